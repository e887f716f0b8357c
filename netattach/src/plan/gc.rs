//! What GC has to look at: the pools and the other plugins of every network that is known. Pure.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::resolve::Network;
use super::{AttachmentPlan, Plan};
use crate::cni::outgoing::{gc_config, plugins_called};
use crate::cni::{AttachmentId, CniArgs, Command, NetworkList};
use crate::ipam::Pool;
use crate::link;
use crate::npwg::NetworkName;
use crate::step::{Delegate, Step};

/// The part of one network that may hold something for attachments that are gone.
#[derive(Debug, Clone, PartialEq)]
pub struct Holder {
    /// The network.
    pub network: NetworkName,
    /// `name` of its configuration, by which plugins and pools keep what they hold.
    pub config_name: String,
    /// Whether this is the network whose attachments the runtime knows.
    pub default: bool,
    /// What holds it.
    pub place: Place,
}

/// Where a network keeps something for its attachments.
#[derive(Debug, Clone, PartialEq)]
pub enum Place {
    /// A pool of addresses.
    Pool(Pool),
    /// Another plugin, with its configuration less the attachments in use.
    Plugin(Delegate),
}

/// A network as the source has it now.
#[derive(Debug, Clone)]
pub struct Defined {
    /// Name and configuration.
    pub network: Network,
    /// Whether it is the default network.
    pub default: bool,
}

/// Every place to look at, once: those of the networks that are `defined`, then those of networks that only
/// attachments remember. A network with `disableGC`, wherever it says so, has none; nor has one whose version is
/// without GC. Types in `exec` are executed although they are built in.
pub fn holders(defined: &[Defined], attached: &[Arc<Plan>], exec: &[String]) -> Vec<Holder> {
    let remembered = || attached.iter().flat_map(|plan| &plan.attachments);
    let disabled: BTreeSet<&str> = defined
        .iter()
        .filter(|defined| defined.network.list.disable_gc)
        .map(|defined| defined.network.list.name.as_str())
        .chain(remembered().filter(|old| old.disable_gc).map(|old| old.config_name.as_str()))
        .collect();
    let mut found: Vec<Holder> = Vec::new();
    for Defined { network, default } in defined {
        for step in steps_of_list(&network.list, exec) {
            let Some(place) = place(step) else { continue };
            let holder = Holder {
                network: network.name.clone(),
                config_name: network.list.name.clone(),
                default: *default,
                place,
            };
            if !found.iter().any(|known| known.place == holder.place) {
                found.push(holder);
            }
        }
    }
    for old in remembered().filter(|old| old.version.has_gc_and_status()) {
        for place in old.steps.iter().cloned().filter_map(place) {
            let holder = Holder {
                network: old.network.clone(),
                config_name: old.config_name.clone(),
                default: old.default,
                place,
            };
            if !found.iter().any(|known| is_same(known, &holder)) {
                found.push(holder);
            }
        }
    }
    found.retain(|holder| !disabled.contains(holder.config_name.as_str()));
    found
}

/// The attachments among `attached` whose network has this configuration name, as GC names them.
pub fn in_use(attached: &[Arc<Plan>], config_name: &str) -> Vec<AttachmentId> {
    let mut ids: Vec<AttachmentId> = attached
        .iter()
        .flat_map(|plan| {
            let of_network =
                plan.attachments.iter().filter(|attachment| attachment.config_name == config_name);
            of_network.map(|attachment| id(plan, attachment))
        })
        .collect();
    ids.sort();
    ids
}

fn id(plan: &Plan, attachment: &AttachmentPlan) -> AttachmentId {
    AttachmentId { container_id: plan.sandbox.container_id.clone(), ifname: attachment.ifname.clone() }
}

/// What a list's plugins may have left, whatever else their configuration says.
fn steps_of_list(list: &NetworkList, exec: &[String]) -> Vec<Step> {
    let mut steps = Vec::new();
    // GC is in no list too old for it.
    for plugin in plugins_called(list, Command::Gc).unwrap_or_default() {
        let config = gc_config(list, plugin, None);
        let plugin_type = plugin.plugin_type();
        match link::driver(plugin_type).filter(|_| !exec.iter().any(|name| name == plugin_type)) {
            Some(driver) => steps.extend(driver.remains(&link::Request {
                container_id: "",
                ifname: "",
                config: &config,
                group: 0,
                cni_args: &CniArgs::default(),
                exec,
                protect: None,
                facts: &link::Facts::default(),
            })),
            None => steps.push(Step::Delegate(Delegate {
                plugin: plugin_type.to_owned(),
                config,
                role: crate::step::Role::Plugin,
            })),
        }
    }
    steps
}

/// What a step holds beyond the pod. What was given for one attachment is no part of GC's question.
fn place(step: Step) -> Option<Place> {
    match step {
        Step::Lease(config) => config.pool().map(Place::Pool),
        Step::Delegate(mut delegate) => {
            for key in ["runtimeConfig", "prevResult"] {
                delegate.config.shift_remove(key);
            }
            Some(Place::Plugin(delegate))
        }
        _ => None,
    }
}

/// Whether both ask the same. A plugin is asked once about a network: what else its configuration held for one
/// attachment does not matter.
fn is_same(a: &Holder, b: &Holder) -> bool {
    match (&a.place, &b.place) {
        (Place::Plugin(a_plugin), Place::Plugin(b_plugin)) => {
            a.config_name == b.config_name && a_plugin.plugin == b_plugin.plugin
        }
        (a, b) => a == b,
    }
}
