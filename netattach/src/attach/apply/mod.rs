//! Carries out the steps of a plan in order. This is the only dispatcher of [`Step`].
//!
//! | module | the effects of steps |
//! |---|---|
//! | `together` | steps that several attachments take at once |
//! | `links` | an attachment's interface |
//! | `bridge`, `bridges`, `bridge_stack` | the bridge that it is a port of; bridges that several ADDs create and use; their separation from the node's IP stack |
//! | `plugins` | calls of other plugins |
//! | `addresses`, `ways` | addresses, and the routes, forwarding and translation that the node and the pod need for them |
//! | `admit`, `translation` | requests to the node's forwarding and address translation |
//! | [`host_access`] | the node's own links on parents, through which the node and pods reach each other |
//! | `restrict_sender` | limits a pod to its Ethernet source address |
//! | `tuning` | settings and properties of an interface |
//! | `routing` | the routing of a pod after all its attachments are made |
//! | `device_info` | device information files |

mod addresses;
pub(super) mod admit;
mod bridge;
mod bridge_stack;
pub(super) mod bridges;
pub(super) mod device_info;
pub mod host_access;
mod links;
mod plugins;
pub(super) mod restrict_sender;
pub(super) mod routing;
mod together;
pub(super) mod translation;
pub(super) mod tuning;
mod ways;

use std::collections::BTreeSet;

pub(super) use self::addresses::lease;
pub(super) use self::bridge::BridgeError;
use self::bridges::Entered;
pub(super) use self::links::LinkError;
pub(super) use self::plugins::{DelegateCall, PluginError, runner};
use self::plugins::{check_plugins, take_made};
use self::routing::{by_source, vrf};
pub(super) use self::together::DataplaneError;
use super::device::take_device::Looked;
use super::{AttachError, Doing, Node, Progress, StepError};
use crate::firewall;
use crate::ipam::Owner;
use crate::netlink::{Handle, LinkState};
use crate::netns::Netns;
use crate::plan::addressing::Others;
use crate::plan::phases::{self, Item};
use crate::plan::undo::inverse;
use crate::plan::{AttachmentPlan, Plan, Sandbox, result, result_cache};
use crate::spec;
use crate::step::{Brought, Interface, MadeBy, Output, Parent, Step, StepRef};
use crate::sysctl;
use crate::timing;
use crate::waits::{self, Resource};

/// The smallest MTU with which a link has IPv6 (RFC 8200, section 5), in bytes.
const IPV6_MIN_MTU: u32 = 1280;

/// Carries out every step of `plan`.
///
/// # Errors
/// The first step that fails, by name. Finished steps stay in effect; the caller rolls them back.
pub fn apply(
    node: &Node,
    plan: &Plan,
    netns: &Netns,
    progress: &mut dyn Progress,
) -> Result<(), AttachError> {
    // Names matter only to a plan that makes interfaces.
    let makes_one = plan.steps().any(|(_, _, step)| made_name(step).is_some());
    let (pod, present) = match makes_one {
        true => Handle::open_with_names(netns)?,
        false => (Handle::open_in(netns)?, Some(BTreeSet::new())),
    };
    let mut executor = Executor {
        node,
        plan,
        sandbox: &plan.sandbox,
        netns,
        host: Handle::open().map_err(|error| AttachError::Open(error.into()))?,
        pod,
        parents: Vec::new(),
        looked: Looked::default(),
        entered: node.bridges.begin(),
        progress,
    };
    executor.progress.note_namespace(executor.pod.netns_cookie())?;
    executor.check_preconditions(plan, present)?;
    for group in phases::groups(plan) {
        executor.carry_out(&group).map_err(|Failed { item: (_, attachment, step), source }| {
            AttachError::step(Doing::Attach, attachment, step.describe(), *source)
        })?;
    }
    Ok(())
}

/// The step of a group that failed, and the error.
struct Failed<'p> {
    item: Item<'p>,
    source: Box<StepError>,
}

impl<'p> Failed<'p> {
    fn of<E: Into<StepError>>(item: &Item<'p>) -> impl FnOnce(E) -> Self + use<'p, E> {
        let item = *item;
        move |source| Self { item, source: Box::new(source.into()) }
    }
}

struct Executor<'a> {
    node: &'a Node,
    plan: &'a Plan,
    sandbox: &'a Sandbox,
    netns: &'a Netns,
    host: Handle,
    pod: Handle,
    /// Parents of macvlans that were looked up already, by the name in the request.
    parents: Vec<(Option<String>, LinkState)>,
    /// The state of the device that was claimed last.
    looked: Looked,
    progress: &'a mut dyn Progress,
    /// The bridges that this plan is about to use.
    entered: Entered<'a>,
}

impl<'a> Executor<'a> {
    /// Carries out the steps of a group: all are recorded as begun, then all take effect.
    fn carry_out(&mut self, group: &[Item<'a>]) -> Result<(), Failed<'a>> {
        let Some(first) = group.first() else { return Ok(()) };
        let mut begun = Vec::with_capacity(group.len());
        for item in group {
            let (at, attachment, step) = *item;
            let container = &self.plan.sandbox.container_id;
            tracing::debug!(container, ifname = attachment.ifname, step = step.describe(), "step");
            if matches!(step, Step::Delegate(_)) {
                waits::at(&Resource::Sync, || self.progress.wait_durable()).map_err(Failed::of(item))?;
            }
            // A step without an inverse is never rolled back, so its beginning is not recorded. But if the inverse of
            // an earlier step also undoes this step, the output of that earlier step is written first.
            let is_taken_back_by_another = matches!(
                step,
                Step::SetDevice(_)
                    | Step::MoveDevice
                    | Step::Tune(_)
                    | Step::UseTables(_)
                    | Step::JoinVrf(_)
                    | Step::GiveHostAccess
            );
            if is_taken_back_by_another || inverse(self.sandbox, attachment, step, None).is_some() {
                begun.push(at);
            }
        }
        self.progress.begin(&begun).map_err(Failed::of(first))?;
        for (at, _, _) in group {
            crate::crash_point!("apply", at);
        }
        let together = match first.2 {
            Step::CreateLink(link) if phases::has_company(link) => Some(self.create_links(group)?),
            Step::Protect(_) | Step::ProtectAddresses => {
                Some(timing::part("policy", || self.protect(group))?)
            }
            Step::Configure(_) => Some(self.configure(group)?),
            _ => None,
        };
        match together {
            Some(outputs) => {
                for (item, output) in group.iter().zip(outputs) {
                    self.done(item, output)?;
                }
            }
            // Each step may need the output of the previous one.
            None => {
                for item in group {
                    let (at, attachment, step) = *item;
                    if step.asks_the_network() {
                        // The request and the reply pass the representor.
                        self.raise_representor(at).map_err(Failed::of(item))?;
                    }
                    let output = self.effect(at, attachment, step).map_err(Failed::of(item))?;
                    self.done(item, output)?;
                }
            }
        }
        Ok(())
    }

    fn done(&mut self, item: &Item<'a>, output: Output) -> Result<(), Failed<'a>> {
        crate::crash_point!("applied", item.0);
        self.progress.done(item.0, output).map_err(Failed::of(item))
    }

    /// Refuses, before the first step, a plan that is certain to fail: a step that has begun is rolled back, but a
    /// link that exists already must not be deleted, and a plugin that is not installed cannot run its DEL.
    /// `present`: the names of the pod's links, if they were read.
    fn check_preconditions(
        &mut self,
        plan: &Plan,
        present: Option<BTreeSet<String>>,
    ) -> Result<(), AttachError> {
        let present = match present {
            Some(present) => present,
            None => {
                let links = self.pod.links().map_err(|error| AttachError::Open(error.into()))?;
                links.into_iter().map(|link| link.name).collect()
            }
        };
        check_plugins(self.node, plan)?;
        for (_, attachment, step) in plan.steps() {
            if matches!(step, Step::RestrictSender) {
                firewall::senders::check_possible()
                    .map_err(|error| AttachError::step(Doing::Attach, attachment, step.describe(), error))?;
            }
            let Some(name) = made_name(step) else { continue };
            if present.contains(name) {
                return Err(AttachError::step(
                    Doing::Attach,
                    attachment,
                    step.describe(),
                    StepError::Link(LinkError::NameTaken(name.to_owned())),
                ));
            }
        }
        Ok(())
    }

    fn effect(&mut self, at: StepRef, attachment: &AttachmentPlan, step: &Step) -> Result<Output, StepError> {
        match step {
            Step::TakeMade(made) => take_made(attachment, made),
            Step::EnsureBridge(bridge) => self.bridge(attachment, bridge),
            Step::CreateLink(link) => self.create_link(attachment, link),
            Step::ClaimDevice(device) => self.claim_device(attachment, device),
            Step::SetDevice(set) => self.set_device(at, attachment, set),
            Step::MoveDevice => self.move_device(at, attachment),
            Step::RaiseLoopback => self.loopback(),
            Step::Lease(config) => timing::part("lease", || self.lease(at, attachment, config)),
            Step::Delegate(delegate) => timing::part("plugin", || self.delegate(at, attachment, delegate)),
            Step::Gateway { bridge, force, beside, vlan } => {
                let others = match (force, beside) {
                    (true, _) => Others::Removed,
                    (false, true) => Others::Kept,
                    (false, false) => Others::Refused,
                };
                self.gateway(at, attachment, (bridge, *vlan), others)
            }
            Step::EnsureForwarding => self.forwarding(at, attachment),
            Step::RouteToPod => self.route_to_pod(at, attachment),
            Step::FindReach => self.find_reach(at, attachment),
            Step::Translate(translate) => {
                timing::part("translation", || self.translate(at, attachment, translate))
            }
            Step::Admit(admit) => timing::part("firewall", || {
                let outputs = self.progress.outputs().of(at.0);
                admit::attach(self.node, (self.sandbox, attachment), admit, outputs).map(Output::Admitted)
            }),
            Step::RestrictSender => {
                restrict_sender::attach((self.sandbox, attachment), self.progress.outputs().of(at.0))?;
                Ok(Output::Nothing)
            }
            Step::FindDevice => self.find_device(at, attachment),
            Step::Remember(remember) => {
                let entry =
                    result_cache::entry(self.sandbox, attachment, remember, self.progress.outputs().of(at.0))
                        .map_err(|source| PluginError::Result { plugin: attachment.kind.clone(), source })?;
                waits::at(&Resource::Cache, || self.node.cache.write(&entry))?;
                Ok(Output::Nothing)
            }
            Step::PrepareDeviceInfo(files) => device_info::prepare(files),
            Step::MoveDefaultRoutes { gateways, keep } => {
                self.move_default_routes(at, attachment, gateways, keep.as_deref())
            }
            Step::RouteBySource => self.route_by_source(attachment),
            Step::NoteProperties(tune) => {
                let before = tuning::before(&mut self.pod, &attachment.ifname, tune)?;
                Ok(Output::Properties { before })
            }
            Step::Tune(tune) => self.tune(attachment, tune),
            Step::ChooseTables(asked) => {
                let outputs = self.progress.outputs().of(at.0);
                let now = result::result(self.sandbox, attachment, outputs)
                    .map_err(|source| PluginError::Result { plugin: attachment.kind.clone(), source })?;
                Ok(Output::SourceTables(by_source::choose(&mut self.pod, &attachment.ifname, asked, &now)?))
            }
            Step::UseTables(_) => {
                let chosen = self.progress.outputs().of(at.0).iter().find_map(|output| match output {
                    Output::SourceTables(chosen) => Some(chosen.clone()),
                    _ => None,
                });
                by_source::apply(&mut self.pod, &chosen.ok_or(StepError::Missing("tables"))?)?;
                Ok(Output::Nothing)
            }
            Step::ChooseVrf(asked) => Ok(Output::Vrf(vrf::choose(&mut self.pod, &attachment.ifname, asked)?)),
            Step::JoinVrf(_) => self.join_vrf(at),
            Step::ChooseHostAccess => {
                let parent = on_parent(self.progress.outputs().of(at.0))?;
                let leased = self.leased(at, attachment)?;
                let on = (own_link(attachment)?, &parent.device);
                Ok(Output::HostAccess(host_access::choose(&mut self.host, on, &leased)?))
            }
            Step::GiveHostAccess => self.give_host_access(at, attachment),
            Step::ReadDeviceInfo(files) => {
                let found = device_info::read(&files.attachment);
                let (made_by, outputs) = (attachment.made_by(), self.progress.outputs().of(at.0));
                match (made_by, outputs.representor()) {
                    (MadeBy::Device(device), Some(representor)) => {
                        device_info::with_representor(&files.attachment, found, (device, representor))
                    }
                    _ => Ok(found),
                }
            }
            // Carried out together: see [`Executor::carry_out`].
            Step::Protect(_) | Step::ProtectAddresses | Step::Configure(_) => {
                Err(StepError::Missing("a group of steps"))
            }
        }
    }

    fn leased(&self, at: StepRef, attachment: &AttachmentPlan) -> Result<result::Leased, StepError> {
        result::leased(attachment, self.progress.outputs().of(at.0)).map_err(|source| {
            StepError::Plugin(PluginError::Result { plugin: attachment.kind.clone(), source })
        })
    }

    /// Returns the index of the bridge that the attachment is a port of.
    fn bridge_index(&self, at: StepRef) -> Result<u32, StepError> {
        let outputs = self.progress.outputs().of(at.0);
        outputs
            .iter()
            .find_map(|output| match output {
                Output::Bridge(bridge) => Some(bridge.link.index),
                _ => None,
            })
            .ok_or(StepError::Missing("a bridge"))
    }

    /// Returns the node's end, if there is one, and the pod's end of the attachment's link.
    fn link(&self, at: StepRef) -> Result<(Option<Interface>, Interface), StepError> {
        result::link(self.progress.outputs().of(at.0)).ok_or(StepError::Missing("a link"))
    }
}

/// Returns the name of the interface that a step makes in the pod, if it makes one.
fn made_name(step: &Step) -> Option<&str> {
    step.makes_interface().and_then(MadeBy::pod_name)
}

/// Returns the parent of an attachment's link on the node.
fn on_parent(outputs: Brought<'_>) -> Result<Parent, StepError> {
    result::ends(outputs).and_then(|ends| ends.parent).ok_or(StepError::Missing("a link on a parent"))
}

/// Returns the link that netattach creates for an attachment.
fn own_link(attachment: &AttachmentPlan) -> Result<&spec::Link, StepError> {
    attachment.link().ok_or(StepError::Missing("a link on a parent"))
}

pub(super) fn owner(sandbox: &Sandbox, attachment: &AttachmentPlan) -> Owner {
    Owner { container_id: sandbox.container_id.clone(), ifname: attachment.ifname.clone() }
}

pub(super) fn ensure_if_present(key: &str, value: &str) -> Result<(), StepError> {
    match sysctl::ensure(key, value) {
        // A kernel without IPv6 has no such setting.
        Err(error) if error.source.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => Ok(other?),
    }
}

fn interface(link: &LinkState) -> Interface {
    Interface { name: link.name.clone(), index: link.index, mac: link.mac, mtu: link.mtu }
}
