//! The places that GC has to clean up: the pools and the other plugins of every known network. Pure.

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

/// A part of a network that may hold resources of attachments that are gone.
#[derive(Debug, Clone, PartialEq)]
pub struct Holder {
    /// The network.
    pub network: NetworkName,
    /// `name` of its configuration, under which plugins and pools keep their state.
    pub config_name: String,
    /// Whether this is the default network, whose attachments the runtime knows.
    pub default: bool,
    /// The pool or plugin that holds the resources.
    pub place: Place,
}

/// A pool or plugin that keeps state for a network's attachments.
#[derive(Debug, Clone, PartialEq)]
pub enum Place {
    /// A pool of addresses.
    Pool(Pool),
    /// Another plugin, with its configuration without the list of attachments in use.
    Plugin(Delegate),
}

/// A network as currently defined in the source.
#[derive(Debug, Clone)]
pub struct Defined {
    /// Its name and configuration.
    pub network: Network,
    /// Whether it is the default network.
    pub default: bool,
}

/// All places to clean up, without duplicates: first those of the networks in `defined`, then those of networks that
/// only existing attachments still reference. A network whose configuration sets `disableGC` has none; nor has one
/// whose version lacks GC. Types in `exec` are executed although they are built in.
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

/// The attachments among `attached` whose network has this configuration name, in the form that GC uses.
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

/// Steps whose effects a list's plugins may have left, regardless of the rest of their configuration.
fn steps_of_list(list: &NetworkList, exec: &[String]) -> Vec<Step> {
    let mut steps = Vec::new();
    // `plugins_called` fails only for CHECK.
    for plugin in plugins_called(list, Command::Gc).unwrap_or_default() {
        let config = gc_config(list, plugin, None);
        let plugin_type = plugin.plugin_type();
        let is_executed = exec.iter().any(|name| name == plugin_type);
        if link::chained(plugin_type).is_some() && !is_executed {
            // The record contains its remains.
            continue;
        }
        match link::driver(plugin_type).filter(|_| !is_executed) {
            Some(driver) => steps.extend(driver.remains(&link::Request {
                container_id: "",
                ifname: "",
                config: &config,
                group: 0,
                cni_args: &CniArgs::default(),
                exec,
                protect: None,
                facts: &link::Facts::default(),
                recorded: true,
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

/// The state that a step keeps outside the pod. Values specific to one attachment are not part of a GC request.
fn place(step: Step) -> Option<Place> {
    match step {
        Step::Lease(config) => config.pool().map(Place::Pool),
        Step::Delegate(mut delegate) => {
            for key in ["runtimeConfig", "prevResult"] {
                delegate.config.shift_remove(key);
            }
            Some(Place::Plugin(delegate))
        }
        Step::TakeMade(_)
        | Step::EnsureBridge(_)
        | Step::CreateLink(_)
        | Step::ClaimDevice(_)
        | Step::SetDevice(_)
        | Step::MoveDevice
        | Step::RaiseLoopback
        | Step::PrepareDeviceInfo(_)
        | Step::Gateway { .. }
        | Step::EnsureForwarding
        | Step::RouteToPod
        | Step::FindReach
        | Step::Translate(_)
        | Step::Admit(_)
        | Step::RestrictSender
        | Step::FindDevice
        | Step::Protect(_)
        | Step::ProtectAddresses
        | Step::ChooseHostAccess
        | Step::GiveHostAccess
        | Step::Configure(_)
        | Step::Remember(_)
        | Step::ReadDeviceInfo(_)
        | Step::NoteProperties(_)
        | Step::Tune(_)
        | Step::ChooseTables(_)
        | Step::UseTables(_)
        | Step::ChooseVrf(_)
        | Step::JoinVrf(_)
        | Step::MoveDefaultRoutes { .. }
        | Step::RouteBySource => None,
    }
}

/// Whether two places are the same. A plugin is called once per network, regardless of attachment-specific keys in its
/// configuration.
fn is_same(a: &Holder, b: &Holder) -> bool {
    match (&a.place, &b.place) {
        (Place::Plugin(a_plugin), Place::Plugin(b_plugin)) => {
            a.config_name == b.config_name && a_plugin.plugin == b_plugin.plugin
        }
        (a, b) => a == b,
    }
}
