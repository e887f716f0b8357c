//! DHCP leases that the agent renews: those of containers without a record, and those with problems.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::attach::apply::owner;
use crate::attach::{AttachError, Attached, Doing, Engine, StepError, undo};
use crate::error_chain::{Chain, clipped};
use crate::ipam::{self, Owner, dhcp};
use crate::plan::Plan;
use crate::step::Step;

/// Returns the message for a file that cannot be read, with the reason and a remedy.
fn no_lease(why: &str) -> String {
    clipped(format!(
        "cannot be read ({why}): its lease is neither renewed nor given back, and the pod has the address until its time is \
         over, when another host may get it; start an agent of the version that wrote it, or recreate the pod, and remove \
         the file if it is there still"
    ))
}

impl Engine {
    /// Releases the `dhcp` leases of containers without any record: a power failure has destroyed the record. Called
    /// once, before anything is attached.
    ///
    /// # Errors
    /// The journal cannot be listed. A lease that cannot be released is logged, and retried at the next start.
    pub fn give_back_unknown_leases(&self) -> Result<(), AttachError> {
        let Some(leases) = self.node().leases.dhcp() else { return Ok(()) };
        let known: BTreeSet<String> = self.journal.keys()?.into_iter().map(|key| key.container_id).collect();
        match leases.retain(|container| known.contains(container)) {
            Ok(unknown) => {
                for owner in unknown {
                    tracing::warn!(%owner, "lease by dhcp without a record of its container: given back");
                }
            }
            Err(error) => {
                let error = AttachError::TornLease(ipam::Error::Dhcp(error));
                tracing::error!(error = %Chain(&error), "lease by dhcp not given back");
            }
        }
        Ok(())
    }

    /// Verifies that no lease of a plan was lost while the plan was carried out, because what was configured with it
    /// has not been removed then.
    ///
    /// # Errors
    /// The first lost lease. Everything must be rolled back.
    pub(in crate::attach) fn check_leases(&self, plan: &Plan) -> Result<(), AttachError> {
        for (_, attachment, step) in plan.steps() {
            let Step::Lease(config) = step else { continue };
            let in_force = self.node().leases.check_in_force(config, &owner(&plan.sandbox, attachment));
            in_force.map_err(|source| {
                AttachError::step(Doing::Attach, attachment, "keep its address", StepError::from(source))
            })?;
        }
        Ok(())
    }

    /// Removes the node's routes and rules for an address whose lease was lost after [`Engine::check_leases`], but
    /// before the sandbox was in the registry, which the callback for lost leases uses.
    pub(in crate::attach) fn withdraw_lost(&self, attached: &Attached) {
        let Plan { sandbox, .. } = &attached.plan;
        for (_, attachment, step) in attached.plan.steps() {
            let Step::Lease(config) = step else { continue };
            let owner = owner(sandbox, attachment);
            if self.node().leases.check_in_force(config, &owner).is_err() {
                self.withdraw(&owner);
            }
        }
    }

    /// Returns the attachments whose leases could not be renewed, are lost or are unknown, and the lease files that
    /// cannot be read, each with the problem.
    pub fn troubled_leases(&self) -> impl Iterator<Item = (String, String)> {
        let leases = self.node().leases.dhcp();
        let troubles = leases.map(dhcp::Leases::troubles).unwrap_or_default();
        let unknown = leases.map(|leases| self.with_unknown_lease(leases)).unwrap_or_default();
        let troubles =
            troubles.into_iter().chain(unknown).map(|dhcp::Trouble { owner, network, problem }| {
                let whose = self.describe(&owner.container_id);
                (format!("interface {} (network {network}) of {whose}", owner.ifname), clipped(problem))
            });
        let unreadable = leases.into_iter().flat_map(dhcp::Leases::unreadable);
        troubles
            .chain(unreadable.map(|(file, why)| (format!("lease by dhcp {}", file.display()), no_lease(why))))
    }

    /// Returns the attachments that have an address of `dhcp` but no lease: the lease's file could not be read at the
    /// start, or was missing.
    fn with_unknown_lease(&self, leases: &dhcp::Leases) -> Vec<dhcp::Trouble> {
        let mut troubles = Vec::new();
        for attached in self.registry().staying() {
            for (_, attachment, step) in attached.plan.steps() {
                let Step::Lease(ipam::Config::Dhcp(config)) = step else { continue };
                let owner = owner(&attached.plan.sandbox, attachment);
                // A DEL that has begun meanwhile releases the lease.
                if leases.is_known(&owner) || self.registry().stays(&attached.key).is_none() {
                    continue;
                }
                let problem = format!(
                    "its lease by dhcp is not known any more, as {} could not be read or was not there when the \
                     agent started; it is neither renewed nor given back: recreate the pod",
                    leases.file(&owner).display()
                );
                troubles.push(dhcp::Trouble { owner, network: config.network.clone(), problem });
            }
        }
        troubles
    }

    /// Removes the node's routes and rules for addresses whose leases are lost: for future losses, and for leases
    /// that were lost under an earlier agent.
    pub fn withdraw_lost_leases(self: &Arc<Self>) {
        let Some(leases) = self.node().leases.dhcp() else { return };
        let engine = Arc::downgrade(self);
        leases.when_lost(move |owner| {
            if let Some(engine) = engine.upgrade() {
                engine.withdraw(owner);
            }
        });
        // Leases lost under an earlier agent; the dataplane and the tables have been adopted with their addresses.
        for owner in leases.lost() {
            self.withdraw(&owner);
        }
    }

    /// Removes the node's routes and rules for the address of a lost lease, which another host may have now: routes
    /// of `hostAccess`, port mappings, and admitted forwarding.
    fn withdraw(&self, owner: &Owner) {
        for attached in self.registry().of_container(&owner.container_id) {
            let attachments = (0..).zip(&attached.plan.attachments);
            for (number, _) in attachments.filter(|(_, of)| of.ifname == owner.ifname) {
                if let Err(error) = undo::withdraw(self.node(), &attached, number) {
                    tracing::error!(
                        %owner, error = %Chain(&error),
                        "what leads to an address whose lease is lost stays until the pod ends"
                    );
                }
            }
        }
    }
}
