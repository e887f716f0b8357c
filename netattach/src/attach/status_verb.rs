//! STATUS: reports whether an ADD could be served now.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::path::PathBuf;
use std::time::Duration;

use super::apply::runner;
use super::reconcile::enforcement;
use super::{AttachError, Attached, Doing, Engine, Node, StepError};
use crate::cni::{CniError, Command, Value, code};
use crate::delegate::{self, Call, DelegateError};
use crate::enforce::error::EnforceError;
use crate::error_chain::Chain;
use crate::ipam::{self, Patience, PoolUse};
use crate::journal::JournalKey;
use crate::netlink::Handle;
use crate::plan::AttachmentPlan;
use crate::plan::resolve::{Network, rehearse};
use crate::spec::Link;
use crate::step::Step;

impl Engine {
    /// Checks that an attachment to the network can be planned and that the node has what it depends on: the parent
    /// and the executables of other plugins. Runs no plugin.
    ///
    /// # Errors
    /// Code 50 with the reason.
    pub fn check_network(&self, network: &Network, cni_path: &[PathBuf]) -> Result<(), CniError> {
        let Some(plan) = self.rehearsed(network)? else { return Ok(()) };
        check_parents(&plan)?;
        let runner = runner(&self.node, cni_path);
        for (_, plugin) in plugins(&plan) {
            runner.find(&plugin.plugin).map_err(|error| {
                not_available(&Chain(&AttachError::step(Doing::Attach, &plan, "", error)))
            })?;
        }
        Ok(())
    }

    /// Checks that the network's configuration yields a plan. The node is not examined.
    ///
    /// # Errors
    /// Code 50 with the error in the configuration.
    pub fn check_plan(&self, network: &Network) -> Result<(), CniError> {
        self.rehearsed(network).map(drop)
    }

    /// Returns how many addresses the network's pools have and how many are leased, and whether each has a free one.
    /// For periodic checks.
    ///
    /// # Errors
    /// Code 50 with the exhausted pool, code 11 if another process holds its lock, or the reason why the pools could
    /// not be examined.
    pub fn pools(&self, network: &Network) -> (Vec<PoolUse>, Result<(), CniError>) {
        // `check_network` reports a network that cannot be planned.
        let Ok(Some(plan)) = self.rehearsed(network) else { return (Vec::new(), Ok(())) };
        let (name, leases) = (network.name.to_string(), &self.node.leases);
        let (mut pools, mut room) = (Vec::new(), Ok(()));
        for step in &plan.steps {
            let Step::Lease(config) = step else { continue };
            let looked = leases.usage(config).and_then(|used| {
                pools.extend(used.into_iter().map(|pool| PoolUse { network: name.clone(), ..pool }));
                leases.room(config, Patience::Look)
            });
            room = room.and(looked.map_err(no_room));
        }
        (pools, room)
    }

    /// Checks the parts of the dataplane that all attachments share.
    ///
    /// # Errors
    /// Code 51 with the missing part.
    pub fn check_dataplane(&self) -> Result<(), CniError> {
        let Some(enforcer) = &self.node.enforcer else { return Ok(()) };
        let limited = |msg: String| CniError::new(code::LIMITED_CONNECTIVITY, format!("dataplane: {msg}"));
        match enforcer.verify_shared() {
            Ok(None) => Ok(()),
            Ok(Some(missing)) => Err(limited(missing)),
            Err(error) => Err(limited(Chain(&error).to_string())),
        }
    }

    /// Reattaches programs that were removed from their devices, for the selected attachments out of `shares` shares.
    /// Returns the result of each.
    ///
    /// # Errors
    /// Returned in addition to the results: the last failure.
    pub fn restore_attachments(
        &self,
        which: enforcement::Which<'_>,
        shares: usize,
    ) -> (Vec<enforcement::Looked>, Result<(), EnforceError>) {
        let Some(enforcer) = &self.node.enforcer else { return (Vec::new(), Ok(())) };
        let among = match which {
            enforcement::Which::Share(_) => self.registry.all(),
            // DEL itself detaches programs. If a DEL has failed, the periodic check of its share reattaches removed
            // programs.
            enforcement::Which::On(_) => self.registry.staying(),
        };
        let with = (enforcer.as_ref(), &self.parents);
        let (looked, followed, outcome) = enforcement::restore(with, &among, which, shares);
        self.announce_followed(followed);
        (looked, outcome)
    }

    /// Completes for the attachments in that record what the dataplane has postponed until after their ADD.
    /// Attachments that were detached need nothing. Repeating the call changes nothing.
    ///
    /// # Errors
    /// The kernel refuses. The attachments are enforced nevertheless, and periodic checks retry.
    pub fn settle(&self, record: &JournalKey) -> Result<(), AttachError> {
        let (Some(attached), Some(enforcer)) = (self.registry.get(record), &self.node.enforcer) else {
            return Ok(());
        };
        let followed = self.follow_parents_of(&attached);
        let Attached { plan, outputs, netns_cookie, .. } = &*attached;
        for (attachment, guarded) in enforcement::guards(plan, outputs, *netns_cookie) {
            enforcer.settle(&guarded).map_err(|source| {
                AttachError::step(Doing::Attach, attachment, "exchange filters for links", source)
            })?;
        }
        followed
    }

    /// Whether STATUS of the network requires calls of other plugins.
    pub fn has_plugins_to_ask(&self, network: &Network) -> bool {
        let plan = self.rehearsed(network).ok().flatten();
        plan.is_some_and(|plan| plan.version.has_gc_and_status() && plugins(&plan).next().is_some())
    }

    /// The other plugins that an attachment to the network calls, each once; none if it yields no plan.
    pub fn executed(&self, network: &Network) -> Vec<String> {
        let plan = self.rehearsed(network).ok().flatten();
        let called = plan.iter().flat_map(plugins).map(|(_, called)| called.plugin.clone());
        Vec::from_iter(called.collect::<BTreeSet<_>>())
    }

    /// The paths that the `host-local` of this process uses for an attachment to the network, each with its
    /// key; not those that it resolves below the root directory of plugins.
    pub fn paths_of_leases(&self, network: &Network) -> Vec<(&'static str, PathBuf)> {
        let plan = self.rehearsed(network).ok().flatten();
        let mut paths = Vec::new();
        for step in plan.iter().flat_map(|plan| &plan.steps) {
            let Step::Lease(ipam::Config::HostLocal(config)) = step else { continue };
            paths.push(("ipam.dataDir", config.data_dir.clone()));
            let resolv_conf = config.resolv_conf.clone().filter(|_| self.node.delegate.root.is_none());
            paths.extend(resolv_conf.map(|path| ("ipam.resolvConf", path)));
        }
        paths
    }

    /// Runs STATUS of the network's other plugins, in order, each for at most `patience`.
    ///
    /// # Errors
    /// The first failure: with the plugin's own code and message if it reported them, else with code 50.
    pub fn ask_plugins(
        &self,
        network: &Network,
        cni_path: &[PathBuf],
        patience: Duration,
    ) -> Result<(), CniError> {
        let plan = match self.rehearsed(network) {
            Ok(Some(plan)) if plan.version.has_gc_and_status() => plan,
            // `check_network` reports a network that cannot be planned.
            _ => return Ok(()),
        };
        let runner = delegate::Delegate { timeout: patience, ..runner(&self.node, cni_path) };
        for (config, plugin) in plugins(&plan) {
            let call = Call::without_container(Command::Status, &plugin.plugin, config.as_bytes());
            let asked = match runner.run(&call) {
                // A single slow answer does not mean a broken node, whose pods the kubelet would evict.
                Err(DelegateError::TimedOut { .. }) => runner.run(&call),
                asked => asked,
            };
            asked.map_err(|error| plugin_error(&plan, &error))?;
        }
        Ok(())
    }

    /// A plan for a fictitious sandbox; `None` if the configuration is completed only at ADD.
    pub(super) fn rehearsed(&self, network: &Network) -> Result<Option<AttachmentPlan>, CniError> {
        rehearse(network, &self.options).map_err(|error| CniError { code: code::NOT_AVAILABLE, ..error })
    }
}

/// The other plugins of an attachment, each with its standard input.
fn plugins(plan: &AttachmentPlan) -> impl Iterator<Item = (String, &crate::step::Delegate)> {
    plan.steps.iter().filter_map(|step| match step {
        Step::Delegate(delegate) => Some((Value::Object(delegate.config.clone()).to_string(), delegate)),
        _ => None,
    })
}

/// A plugin's own message is passed on unchanged, because the runtime may know it; the plugin's name is added.
fn plugin_error(plan: &AttachmentPlan, error: &DelegateError) -> CniError {
    match error {
        DelegateError::Reported { plugin, source: reported, .. } => {
            let by = format!("STATUS of plugin {plugin:?} for network {}", plan.network);
            let details = [reported.details.as_str(), &by].into_iter().filter(|text| !text.is_empty());
            let details: Vec<&str> = details.collect();
            CniError { details: details.join("; "), ..reported.clone() }
        }
        _ => not_available(&format!("network {}: {}", plan.network, Chain(error))),
    }
}

/// Checks that the node has what an attachment depends on: the parent and a free address.
///
/// # Errors
/// Code 50 with what is missing, or with the reason why that could not be examined.
pub(super) fn check_node(node: &Node, attachment: &AttachmentPlan) -> Result<(), CniError> {
    check_parents(attachment)?;
    check_pools(node, attachment)
}

fn check_parents(attachment: &AttachmentPlan) -> Result<(), CniError> {
    let Some(parent) = attachment.link().and_then(Link::parent) else { return Ok(()) };
    let mut host = Handle::open().map_err(|error| AttachError::Open(error.into()))?;
    host.link(parent).map(drop).map_err(|error| not_available(&Chain(&error)))
}

fn check_pools(node: &Node, attachment: &AttachmentPlan) -> Result<(), CniError> {
    for step in &attachment.steps {
        if let Step::Lease(config) = step {
            node.leases.room(config, Patience::Operation).map_err(no_room)?;
        }
    }
    Ok(())
}

/// The error for a pool without a free address, or for one that could not be examined.
pub(super) fn no_room(error: ipam::Error) -> CniError {
    if error.is_without_address() { not_available(&Chain(&error)) } else { lease_error(error) }
}

/// Returns the CNI error that the failure gets as a step of an attachment.
pub(super) fn step_error(source: StepError) -> CniError {
    let msg = Chain(&source).to_string();
    let step = AttachError::Step {
        doing: Doing::Attach,
        ifname: String::new(),
        network: String::new(),
        step: String::new(),
        source: Box::new(source),
    };
    CniError::new(CniError::from(step).code, msg)
}

pub(super) fn lease_error(error: ipam::Error) -> CniError {
    step_error(StepError::Lease(error))
}

pub(super) fn not_available(reason: &dyn Display) -> CniError {
    CniError::new(code::NOT_AVAILABLE, reason.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::attach::rig;
    use crate::cni::NetworkList;
    use crate::journal::Store;

    #[test]
    fn executed_plugins_are_those_that_are_not_built_in_address_management_among_them() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path().join("journal")).unwrap();
        let engine = rig::engine(directory.path(), store, &crate::sync::Arc::default());
        let executed = |plugins: Value| {
            let list = json!({"cniVersion": "1.0.0", "name": "pods", "plugins": plugins}).to_string();
            let list = NetworkList::parse(list.as_bytes()).unwrap();
            engine.executed(&Network::of_configuration("pods", list.into()))
        };
        let portmap = json!({"type": "portmap", "capabilities": {"portMappings": true}});
        let bridge = |ipam: &str| json!({"type": "bridge", "ipam": {"type": ipam, "subnet": "10.9.0.0/24"}});
        assert_eq!(executed(json!([{"type": "flannel", "delegate": {}}, portmap])), ["flannel"]);
        assert_eq!(executed(json!([bridge("host-local"), portmap])), [""; 0]);
        assert_eq!(executed(json!([bridge("whereabouts")])), ["whereabouts"]);
        assert_eq!(executed(json!([{"type": "bridge", "mtu": "much"}])), [""; 0]);
    }
}
