//! Leases that the agent renews: of containers without a record, and those that cannot be extended.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::apply::owner;
use super::{AttachError, Attached, Doing, Engine, StepError, undo};
use crate::error_chain::{Chain, clipped};
use crate::ipam::{self, Owner, dhcp};
use crate::plan::Plan;
use crate::step::Step;

/// What is said of a file that cannot be read, by the reason, and what to do about it.
fn no_lease(why: &str) -> String {
    clipped(format!(
        "cannot be read ({why}): its lease is neither renewed nor given back, and the pod has the address until its time is \
         over, when another host may get it; start an agent of the version that wrote it, or recreate the pod, and remove \
         the file if it is there still"
    ))
}

impl Engine {
    /// Gives back the leases of `dhcp` whose containers have no record of any kind: a power failure took the record with it.
    /// Called once, before anything is attached.
    ///
    /// # Errors
    /// The journal cannot be listed. A lease that cannot be given back is named in the log, and tried at the next start.
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

    /// Verifies that no lease of a plan that is carried out was lost meanwhile: nobody has taken back what was configured by it
    /// since.
    ///
    /// # Errors
    /// The first that is lost. All is to be rolled back.
    pub(super) fn check_leases(&self, plan: &Plan) -> Result<(), AttachError> {
        for (_, attachment, step) in plan.steps() {
            let Step::Lease(config) = step else { continue };
            let in_force = self.node().leases.check_in_force(config, &owner(&plan.sandbox, attachment));
            in_force.map_err(|source| {
                AttachError::step(Doing::Attach, attachment, "keep its address", StepError::from(source))
            })?;
        }
        Ok(())
    }

    /// Has the node lead nobody to an address whose lease was lost after [`Engine::check_leases`], and before the sandbox was known
    /// to who is told of that.
    pub(super) fn withdraw_lost(&self, attached: &Attached) {
        let Plan { sandbox, .. } = &attached.plan;
        for (_, attachment, step) in attached.plan.steps() {
            let Step::Lease(config) = step else { continue };
            let owner = owner(sandbox, attachment);
            if self.node().leases.check_in_force(config, &owner).is_err() {
                self.withdraw(&owner);
            }
        }
    }

    /// The attachments whose leases could not be extended, are lost or are not known, and the files of leases that cannot be
    /// read, each with what is the matter.
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

    /// The attachments that have an address of `dhcp` and no lease: its file could not be read at the start, or was not there.
    fn with_unknown_lease(&self, leases: &dhcp::Leases) -> Vec<dhcp::Trouble> {
        let mut troubles = Vec::new();
        for attached in self.registry().staying() {
            for (_, attachment, step) in attached.plan.steps() {
                let Step::Lease(ipam::Config::Dhcp(config)) = step else { continue };
                let owner = owner(&attached.plan.sandbox, attachment);
                // A DEL that has begun meanwhile gives it back.
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

    /// Has the node lead nobody to an address whose lease is lost, now and from each start on.
    pub fn withdraw_lost_leases(self: &Arc<Self>) {
        let Some(leases) = self.node().leases.dhcp() else { return };
        let engine = Arc::downgrade(self);
        leases.when_lost(move |owner| {
            if let Some(engine) = engine.upgrade() {
                engine.withdraw(owner);
            }
        });
        // Those of an earlier agent; the dataplane and the tables have been adopted with them.
        for owner in leases.lost() {
            self.withdraw(&owner);
        }
    }

    /// Takes back what leads from the node to the address of a lease that is lost, which may be another host's by now: routes of
    /// `hostAccess`, ports of the node, and what is forwarded.
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
