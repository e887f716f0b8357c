//! Rolls back steps. Every inverse is tried even if others fail, and all errors are reported.
//!
//! | module | what it does |
//! |---|---|
//! | `needs` | the resources that a DEL may wait for |
//! | `plugin_del` | DEL of other plugins |
//! | `delete_links` | deletes the links of a sandbox |

mod delete_links;
mod needs;
mod plugin_del;

use std::collections::BTreeSet;

use self::delete_links::{KnownBy, Links, Made};
use self::plugin_del::PluginDel;
use super::apply::routing::vrf;
use super::apply::{admit, device_info, host_access, restrict_sender, routing, translation, tuning};
use super::device::give_back::{PodEnd, Unrecorded, give_back, give_back_by_alias};
use super::device::take_device::asked_mac;
use super::device::{claims, representor};
use super::{AttachError, Attached, Doing, Node, Progress, StepError};
use crate::ipam::Lessee;
use crate::journal::JournalKey;
use crate::netlink::Handle;
use crate::netns::Netns;
use crate::plan::undo::{Inverse, Stage, inverse};
use crate::plan::{AttachmentPlan, Plan, Sandbox, result, result_cache};
use crate::spec::Device;
use crate::step::{MadeBy, Outputs, Step, StepRef};
use crate::waits::{self, Resource};

const RELEASE: &str = "release its resources";
const GIVE_BACK: &str = "give the device back";
const WITHDRAW: &str = "take back what leads to an address that is lost";

/// Rolls back every step of `plan` that may have begun. `netns` is the sandbox's namespace if it still exists.
///
/// Other plugins run first, in reverse order, while their interfaces exist, and leases are given back to servers
/// through the interfaces; before that, routes and rules of the node for the addresses that are free then are removed.
/// Then all links of the sandbox are deleted at once, because each separate deletion would cost a grace period. Other
/// addresses are released only after the links that had them are gone.
///
/// # Errors
/// [`AttachError::Undo`] with every failure. Calling again is safe.
pub fn undo(
    node: &Node,
    plan: &Plan,
    netns: Option<&Netns>,
    progress: &dyn Progress,
) -> Result<(), AttachError> {
    take_back(node, plan, netns, progress, Extent::All)
}

/// Like [`undo`], but keeps the plan's leases, including those of other plugins, until [`release_addresses`]. For a
/// record that still marks its sandbox as attached: another pod that got such an address would share it with that
/// sandbox after the next start.
///
/// # Errors
/// As for [`undo`].
pub(super) fn undo_but_addresses(
    node: &Node,
    plan: &Plan,
    netns: Option<&Netns>,
    progress: &dyn Progress,
) -> Result<(), AttachError> {
    take_back(node, plan, netns, progress, Extent::ButAddresses)
}

/// Releases the leases that [`undo_but_addresses`] has kept. `outputs`: those of the plan's steps.
///
/// # Errors
/// [`AttachError::Undo`] with every failure. Calling again is safe.
pub(super) fn release_addresses(
    node: &Node,
    plan: &Plan,
    netns: Option<&Netns>,
    outputs: &Outputs,
) -> Result<(), AttachError> {
    let mut errors = Vec::new();
    for (at, attachment, step) in plan.steps().rev() {
        let Some(inverse) = inverse(&plan.sandbox, attachment, step, None) else { continue };
        if inverse.frees_addresses() {
            let begun = Begun { at, attachment, step, inverse };
            let released = begun.release(node, plan, netns, outputs);
            errors.extend(released.map_err(|source| begun.failed(RELEASE, source)).err());
        }
    }
    node.occupied.release(plan);
    if errors.is_empty() { Ok(()) } else { Err(AttachError::Undo(errors)) }
}

/// The extent of a rollback.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Extent {
    All,
    ButAddresses,
}

fn take_back(
    node: &Node,
    plan: &Plan,
    netns: Option<&Netns>,
    progress: &dyn Progress,
    extent: Extent,
) -> Result<(), AttachError> {
    let begun = plan.steps().rev().filter(|(at, _, _)| progress.has_begun(*at));
    let inverses = begun.filter_map(|(at, attachment, step)| {
        let inverse = inverse(&plan.sandbox, attachment, step, progress.outputs().get(&at))?;
        Some(Begun { at, attachment, step, inverse })
    });
    let is_due = |begun: &Begun<'_>| extent == Extent::All || !begun.inverse.frees_addresses();
    let inverses: Vec<Begun<'_>> = inverses.filter(is_due).collect();
    let of = |stage| inverses.iter().filter(move |begun| begun.inverse.stage() == stage);

    let mut errors = Vec::new();
    errors.extend(retire(node, &inverses).err());
    // A lease that is not given back yet keeps the interface through which it will be.
    let (led_to, not_withdrawn) = withdraw_first(&inverses, node, plan, progress.outputs());
    errors.extend(not_withdrawn);
    let is_led_to = |begun: &&Begun<'_>| led_to.contains(&begun.at.0);
    for begun in of(Stage::Plugins).filter(|begun| !(begun.ends_addresses() && is_led_to(begun))) {
        crate::crash_point!("undo", begun.at);
        errors.extend(begun.ask_plugin(node, plan, netns, progress).err());
    }
    crate::crash_point!("undo", "links");
    // A link that may still be in the pod keeps its programs and addresses.
    let (needed, ending): (Vec<_>, Vec<_>) = of(Stage::Links).partition(is_led_to);
    let (left, not_deleted) = delete_all_links(plan, netns, progress, &ending, &needed);
    let mut kept: BTreeSet<u16> = led_to.iter().copied().chain(left).collect();
    errors.extend(not_deleted);
    crate::crash_point!("undo", "devices");
    for begun in of(Stage::Devices).filter(|begun| !is_led_to(begun)) {
        if let Err(source) = begun.give_back(node, plan, netns, progress) {
            kept.insert(begun.at.0);
            errors.push(begun.failed(GIVE_BACK, source));
        }
    }
    crate::crash_point!("undo", "leases");
    let is_left = |begun: &&Begun<'_>| !begun.precedes_plugins() && !kept.contains(&begun.at.0);
    let holdings = of(Stage::Holdings).filter(is_left);
    errors.extend(release_all(holdings, node, plan, netns, progress.outputs()));
    if errors.is_empty() {
        for begun in of(Stage::Cache) {
            crate::crash_point!("forget", begun.at);
            let key = result_cache::key(&plan.sandbox, begun.attachment);
            let removed = waits::at(&Resource::Cache, || node.cache.remove(&key));
            errors.extend(removed.map_err(|it| begun.failed("remove it from libcni's cache", it)).err());
        }
    }
    if errors.is_empty() {
        errors.extend(release_devices(node, plan));
    }
    if !errors.is_empty() {
        return Err(AttachError::Undo(errors));
    }
    if extent == Extent::All {
        node.occupied.release(plan);
    }
    Ok(())
}

/// Removes the claims of a plan's devices, all of which have been given back. Returns the errors.
fn release_devices(node: &Node, plan: &Plan) -> Vec<AttachError> {
    let release = |attachment: &AttachmentPlan| {
        let released = node.devices.release(&plan.sandbox, attachment);
        released.map_err(|it| AttachError::step(Doing::Detach, attachment, GIVE_BACK, it)).err()
    };
    plan.attachments.iter().filter_map(release).collect()
}

/// Removes routes and rules of the node for addresses that are freed while interfaces exist, by the DEL of the plugin
/// that created the interface or by giving a lease back to its server: the next pod or host with one of them would
/// receive the former pod's traffic. Returns the attachments for which that failed, whose interfaces and leases must
/// stay, and the errors.
fn withdraw_first(
    begun: &[Begun<'_>],
    node: &Node,
    plan: &Plan,
    outputs: &Outputs,
) -> (BTreeSet<u16>, Vec<AttachError>) {
    let (mut kept, mut errors) = (BTreeSet::new(), Vec::new());
    for begun in begun.iter().filter(|begun| begun.precedes_plugins()) {
        crate::crash_point!("withdraw", begun.at);
        if let Err(source) = begun.release(node, plan, None, outputs) {
            kept.insert(begun.at.0);
            errors.push(begun.failed(RELEASE, source));
        }
    }
    (kept, errors)
}

/// Releases resources that are free once links and devices are gone. Keeps those that depend on another inverse that
/// has failed. Returns the errors.
fn release_all<'p>(
    begun: impl Iterator<Item = &'p Begun<'p>>,
    node: &Node,
    plan: &Plan,
    netns: Option<&Netns>,
    outputs: &Outputs,
) -> Vec<AttachError> {
    let (mut failed, mut errors): (Vec<&Begun<'_>>, _) = (Vec::new(), Vec::new());
    for begun in begun {
        let is_before = |it: &&Begun<'_>| it.at.0 == begun.at.0 && begun.inverse.needs(&it.inverse);
        if failed.iter().any(is_before) {
            continue;
        }
        crate::crash_point!("release", begun.at);
        if let Err(source) = begun.release(node, plan, netns, outputs) {
            failed.push(begun);
            errors.push(begun.failed(RELEASE, source));
        }
    }
    errors
}

/// Removes the node's routes and port mappings to an attachment's addresses, and the rules that admit traffic to
/// them, because the attachment does not own the addresses any more. Everything else stays until its DEL, which
/// repeats these removals. Rules that close a bridge are kept, although they also let traffic pass. Every part is
/// tried even if others fail.
///
/// # Errors
/// [`AttachError::Undo`] with every failure. Calling again is safe.
pub(super) fn withdraw(node: &Node, attached: &Attached, number: u16) -> Result<(), AttachError> {
    let Attached { plan, outputs, .. } = attached;
    let mut errors = Vec::new();
    for (at, attachment, step) in plan.steps().filter(|(at, ..)| at.0 == number) {
        let Some(inverse) = inverse(&plan.sandbox, attachment, step, outputs.get(&at)) else { continue };
        if leads_there(step) {
            let begun = Begun { at, attachment, step, inverse };
            let withdrawn = begun.release(node, plan, None, outputs);
            errors.extend(withdrawn.map_err(|source| begun.failed(WITHDRAW, source)).err());
        }
    }
    if errors.is_empty() { Ok(()) } else { Err(AttachError::Undo(errors)) }
}

/// Whether a step makes the node route or admit traffic to an attachment's addresses, and does not close a bridge.
fn leads_there(step: &Step) -> bool {
    match step {
        Step::ChooseHostAccess | Step::Translate(_) => true,
        Step::Admit(admit) => admit.ingress.is_open(),
        _ => false,
    }
}

/// A step that may have begun, and its inverse.
struct Begun<'p> {
    at: StepRef,
    attachment: &'p AttachmentPlan,
    step: &'p Step,
    inverse: Inverse<'p>,
}

impl Begun<'_> {
    fn failed(&self, what: &'static str, source: impl Into<StepError>) -> AttachError {
        AttachError::step(Doing::Detach, self.attachment, what, source.into())
    }

    /// Whether this step creates the interface.
    fn makes_interface(&self) -> bool {
        self.attachment.is_made_at(self.at.1.into())
    }

    /// The link that the step has created. `is_certain`: whether the namespace is known to be the one in which it did.
    fn made(&self, is_certain: bool) -> Option<Made<'_>> {
        let Inverse::DeleteLink { pod_name, host_name, kind, made } = self.inverse else { return None };
        let known = match made.filter(|_| is_certain) {
            // The index of a link that another meta plugin created is unknown.
            Some(0) => KnownBy::Name,
            Some(index) => KnownBy::Index(index),
            None => KnownBy::Group,
        };
        Some(Made { pod_name, host_name, kind, known })
    }

    /// Whether undoing this step while interfaces exist frees the attachment's addresses.
    fn ends_addresses(&self) -> bool {
        self.makes_interface() || self.inverse.frees_addresses()
    }

    /// Whether the step is undone before other plugins run DEL and leases are given back to servers, because one of
    /// these frees the addresses that the step routes to.
    fn precedes_plugins(&self) -> bool {
        let is_freed_early = self.attachment.made_by() == MadeBy::Plugin
            || self.attachment.steps.iter().any(Step::asks_the_network);
        is_freed_early && leads_there(self.step)
    }

    fn ask_plugin(
        &self,
        node: &Node,
        plan: &Plan,
        netns: Option<&Netns>,
        progress: &dyn Progress,
    ) -> Result<(), AttachError> {
        if let (Inverse::GiveBack { ifname, before }, Some(netns)) = (&self.inverse, netns)
            && !before.is_empty()
        {
            // The pod may have given the interface's name to another one. 0: another meta plugin created the
            // interface, and its index is unknown.
            let made = result::ends(progress.outputs().of(self.at.0)).map(|ends| ends.pod.index);
            let made = made.filter(|index| *index != 0);
            let give_back = || tuning::give_back(&mut Handle::open_in(netns)?, (ifname, made), before);
            return give_back().map_err(|source| self.failed("give back the interface's properties", source));
        }
        if let Inverse::Release { .. } | Inverse::Delegate(_) = &self.inverse {
            let what = if let Inverse::Delegate(_) = &self.inverse { "read its result" } else { RELEASE };
            let released = self.release(node, plan, netns, progress.outputs());
            return released.map_err(|source| self.failed(what, source));
        }
        self.leave_vrf(netns).map_err(|source| self.failed("take the interface out of its VRF", source))
    }

    fn leave_vrf(&self, netns: Option<&Netns>) -> Result<(), StepError> {
        match (&self.inverse, netns) {
            (Inverse::LeaveVrf { ifname, port: Some(port), .. }, Some(netns)) => {
                vrf::leave(&mut Handle::open_in(netns)?, ifname, vrf::By::Record(port))
            }
            _ => Ok(()),
        }
    }

    /// Whether a device without a known claim may have been moved. The plan that a plain executable derives from the
    /// configuration for DEL does not tell whether it was moved; a device that a process drives never is.
    fn may_have_moved(&self, device: &Device, progress: &dyn Progress) -> bool {
        let mut steps = self.attachment.steps.iter();
        match steps.position(|step| *step == Step::MoveDevice) {
            Some(position) => progress.has_begun(StepRef(self.at.0, position as u16)),
            None => device.userspace.is_none(),
        }
    }

    /// Gives a device back to the node, unless another sandbox has claimed it since.
    fn give_back(
        &self,
        node: &Node,
        plan: &Plan,
        netns: Option<&Netns>,
        progress: &dyn Progress,
    ) -> Result<(), StepError> {
        let Inverse::ReturnDevice { device, claim } = &self.inverse else { return Ok(()) };
        if claim.is_none() && !self.may_have_moved(device, progress) {
            // The interface with its name in the pod is another one, perhaps one that the pod has renamed for a
            // moment.
            return Ok(());
        }
        let kept = || node.devices.claim_of(&plan.sandbox, self.attachment).map(Box::new);
        let claim = claim.clone().or_else(kept);
        let Some(claim) = &claim else {
            // The record has lost the claim, or there is no record.
            let others = node.devices.others_in(plan.sandbox.netns_id, None);
            let of = (&*plan.sandbox.container_id, &*device.pod_name);
            let (card, has_mac) = (node.records, asked_mac(&self.attachment.steps).is_some());
            let (home, group) = (progress.home(), plan.sandbox.link_group());
            let unrecorded = Unrecorded { of, others: &others, card, has_mac, home, group };
            return give_back_by_alias(&mut Handle::open()?, unrecorded, netns);
        };
        let others = node.devices.others_in(plan.sandbox.netns_id, Some(&claim.device));
        let made = result::ends(progress.outputs().of(self.at.0)).map(|ends| ends.pod.index);
        let made = made.filter(|index| *index != 0);
        let pod = netns.map_or(PodEnd::Gone, |netns| PodEnd::In { netns, made, others: &others });
        let of = (&plan.sandbox, self.attachment);
        let act = || {
            let locks = waits::vf_locks(self.attachment);
            node.devices.sriov_cni.give_back((device, &plan.sandbox.netns), Some(&locks), || {
                give_back(&mut Handle::open()?, device, claim, pod)?;
                representor::leave(node, self.attachment.number(), claim)
            })?;
            representor::leave_programs(node, self.attachment.number(), claim)
        };
        node.devices.give_back(claim, of, act, claims::make_way)
    }

    /// Releases resources, most of which are free only once the sandbox's links are gone. `outputs`: those of the
    /// plan's steps.
    fn release(
        &self,
        node: &Node,
        plan: &Plan,
        netns: Option<&Netns>,
        outputs: &Outputs,
    ) -> Result<(), StepError> {
        match &self.inverse {
            Inverse::Delegate(delegate) => {
                let (at, attachment) = (self.at, self.attachment);
                PluginDel { node, plan, netns, at, attachment, delegate, outputs }.run()?;
            }
            Inverse::Release { config, owner } => {
                let lessee = Lessee { owner, netns };
                let resource = waits::of_lease(self.attachment, config);
                let recorded = outputs.leased(&self.at).unwrap_or_default();
                waits::at_any(resource.as_ref(), || node.leases.release(config, lessee, &recorded))?;
            }
            Inverse::Untranslate => {
                let of = (&plan.sandbox, self.attachment);
                translation::detach(node, of, self.step, outputs.of(self.at.0))?;
            }
            Inverse::Dismiss => admit::detach(node, &plan.sandbox, self.attachment)?,
            Inverse::UnrestrictSender => restrict_sender::detach(&plan.sandbox, self.attachment)?,
            Inverse::Unprotect { id } => {
                if let Some(enforcer) = &node.enforcer {
                    if let Some(departures) = &node.departures {
                        let Sandbox { container_id, ifname, .. } = plan.sandbox.clone();
                        let record = JournalKey { container_id, ifname };
                        departures.ends(&record, self.at.0, self.attachment, *id);
                    }
                    enforcer.detach(*id)?;
                }
            }
            Inverse::RemoveFile(path) => device_info::forget(path)?,
            Inverse::ForgetSources { interfaces } => {
                if let Some(netns) = netns {
                    let pod = &mut Handle::open_in(netns)?;
                    match interfaces {
                        Some(interfaces) => routing::forget_gone(pod, interfaces)?,
                        None => routing::forget_all_gone(pod)?,
                    }
                }
            }
            Inverse::LeaveVrf { .. } => self.leave_vrf(netns)?,
            Inverse::ForgetHostAccess(Some(chosen)) => host_access::forget(node, chosen)?,
            Inverse::ForgetHostAccess(None) => {
                let of = (&plan.sandbox, self.attachment);
                host_access::forget_unrecorded(node, of, outputs.of(self.at.0))?;
            }
            Inverse::ForgetTables(rules) => {
                if let (Some(netns), false) = (netns, rules.is_empty()) {
                    Handle::open_in(netns)?.ensure_source_rules_absent(rules)?;
                }
            }
            // These inverses belong to other stages.
            Inverse::DeleteLink { .. }
            | Inverse::GiveBack { .. }
            | Inverse::ReturnDevice { .. }
            | Inverse::Forget => {}
        }
        Ok(())
    }
}

/// Removes the attachments from the fast path while their links exist.
fn retire(node: &Node, inverses: &[Begun<'_>]) -> Result<(), AttachError> {
    let Some(enforcer) = &node.enforcer else { return Ok(()) };
    for begun in inverses {
        if let Inverse::Unprotect { id } = begun.inverse {
            enforcer.retire(id).map_err(|source| begun.failed("remove it from the fast path", source))?;
        }
    }
    Ok(())
}

/// The links that steps have created, and before them the attachments that have them. `is_certain`: as for
/// [`Begun::made`].
fn made_by<'b>(begun: &[&'b Begun<'_>], is_certain: bool) -> (Vec<u16>, Vec<Made<'b>>) {
    begun.iter().filter_map(|begun| Some((begun.at.0, begun.made(is_certain)?))).unzip()
}

/// Deletes the links of the attachments but those that are still needed. Returns the attachments whose links may still
/// exist, and the errors.
fn delete_all_links(
    plan: &Plan,
    netns: Option<&Netns>,
    progress: &dyn Progress,
    ending: &[&Begun<'_>],
    needed: &[&Begun<'_>],
) -> (BTreeSet<u16>, Vec<AttachError>) {
    // Without a cookie, another namespace may have this inode number now, and another link in it the index.
    let is_certain = progress.netns_cookie().is_some();
    let (attachments, ending) = made_by(ending, is_certain);
    let (_, needed) = made_by(needed, is_certain);
    if ending.is_empty() {
        return (BTreeSet::new(), Vec::new());
    }
    let links = Links { group: plan.sandbox.link_group(), ending: &ending, needed: &needed };
    let left = delete_links::delete(netns, links);
    let failed = |source| AttachError::DeleteLinks {
        container: plan.sandbox.container_id.clone(),
        ifname: plan.sandbox.ifname.clone(),
        source: Box::new(source),
    };
    let kept = left.links.into_iter().filter_map(|at| attachments.get(at).copied());
    (kept.collect(), left.errors.into_iter().map(failed).collect())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixListener;
    use std::path::Path;

    use serde_json::json;

    use super::super::Engine;
    use super::super::rig::{self, Maps};
    use super::*;
    use crate::error_chain::Chain;
    use crate::ipam::host_local::withheld::Withheld;
    use crate::ipam::{self, Owner, dhcp};
    use crate::journal::{Loaded, Store};
    use crate::netns::{NetnsError, within};
    use crate::plan::fixtures;
    use crate::spec::{Bridge, Link, Macvlan, Veth};
    use crate::step::{Admit, Delegate, HostAccess, Ingress, Interface, Output, Role, Translate};
    use crate::sync::Arc;

    /// Attaches `a` to the network `net` twice, by `eth0` with the number 1 and by `net1` with 2. `edit`: what the plan has besides.
    fn attach(directory: &Path, maps: &Arc<Maps>, edit: impl FnOnce(&mut Plan)) -> Engine {
        let engine = rig::engine(directory, Store::open(directory.join("journal")).unwrap(), maps);
        let (mut plan, mut second) = (rig::plan(directory, "a", 1), rig::plan(directory, "a", 2));
        second.attachments[0].ifname = "net1".to_owned();
        let leases = [&plan, &second].map(|plan| rig::lease(&engine, plan));
        plan.attachments.append(&mut second.attachments);
        edit(&mut plan);
        let mut record = engine.journal.create(rig::key("a"), plan.clone()).unwrap();
        for (at, _, step) in plan.steps() {
            record.begin(&[at]).unwrap();
            let output = match step {
                Step::Lease(_) => leases[usize::from(at.0)].clone(),
                Step::CreateLink(_) => {
                    let end = |index| Interface { name: "x".to_owned(), index, mac: None, mtu: 1500 };
                    Output::Link { host: Some(end(8)), pod: end(9), parent: None }
                }
                // The kernel knows no name of this length.
                Step::ChooseHostAccess => {
                    Output::HostAccess(HostAccess { device: "x".repeat(20), reached: Vec::new() })
                }
                _ => Output::Nothing,
            };
            record.done(at, output).unwrap();
        }
        plan.attachments.iter().filter_map(AttachmentPlan::number).for_each(|id| maps.enter(id));
        record.attached(json!({"cniVersion": "1.1.0"})).unwrap();
        engine
    }

    /// The leased addresses with their owners, and the numbers in the dataplane.
    fn held(directory: &Path, maps: &Maps) -> (BTreeMap<String, String>, BTreeSet<u32>) {
        (rig::leased(directory), maps.numbers())
    }

    fn of_a(addresses: &[&str], numbers: &[u32]) -> (BTreeMap<String, String>, BTreeSet<u32>) {
        let addresses = addresses.iter().map(|address| ((*address).to_owned(), "a".to_owned()));
        (addresses.collect(), numbers.iter().copied().collect())
    }

    /// `lo`, which has the name of the node's end, is of no kind that the kernel deletes.
    #[test]
    fn an_attachment_whose_link_cannot_be_deleted_keeps_its_address_and_its_programs() {
        let directory = tempfile::tempdir().unwrap();
        let (directory, maps) = (directory.path(), Arc::new(Maps::default()));
        let engine = attach(directory, &maps, |plan| {
            let (host_name, pod_name) = ("lo".to_owned(), "eth0".to_owned());
            let veth = Veth { host_name, pod_name, mtu: None, mac: None, group: 7, port: None };
            plan.attachments[0].steps.push(Step::CreateLink(Link::Veth(veth)));
        });
        assert_eq!(held(directory, &maps), of_a(&["10.1.0.2", "10.1.0.3"], &[1, 2]));
        let node = Netns::private().unwrap();
        let del = || within(&node, || engine.del(&rig::request("DEL", "a"))).unwrap();
        for _ in 0..2 {
            let failed = Chain(&del().unwrap_err()).to_string();
            assert!(failed.starts_with("detach container a (eth0): delete links: "), "{failed}");
            assert_eq!(held(directory, &maps), of_a(&["10.1.0.2"], &[1]));
        }
        let mut host = Handle::open_in(&node).unwrap();
        let lo = host.link("lo").unwrap().index;
        host.rename(lo, "other").unwrap();
        del().unwrap();
        assert_eq!(held(directory, &maps), of_a(&[], &[]));
    }

    /// Attaches the sandbox of a plan, whose pool has a second set of addresses.
    fn attach_with_two(engine: &Engine, mut plan: Plan) {
        let Step::Lease(ipam::Config::HostLocal(config)) = &mut plan.attachments[0].steps[0] else {
            panic!("the first step is a lease of host-local")
        };
        let range =
            json!({"subnet": "fd00::/112", "start": "fd00::1", "end": "fd00::ff", "gateway": "fd00::1"});
        config.sets.push(serde_json::from_value(json!([range])).unwrap());
        let key = rig::key(&plan.sandbox.container_id);
        let mut record = engine.journal.create(key, plan.clone()).unwrap();
        let lease = rig::lease(engine, &plan);
        for (at, _, step) in plan.steps() {
            record.begin(&[at]).unwrap();
            let output = if let Step::Lease(_) = step { lease.clone() } else { Output::Nothing };
            record.done(at, output).unwrap();
        }
        record.attached(json!({"cniVersion": "1.1.0"})).unwrap();
    }

    /// Otherwise the address stays taken for ever, or pods that have nothing to do with it cannot be removed.
    #[test]
    fn a_removal_fails_as_long_as_an_address_of_its_record_cannot_be_read_and_for_no_other() {
        let directory = tempfile::tempdir().unwrap();
        let (directory, maps) = (directory.path(), Arc::new(Maps::default()));
        let mut engine = rig::engine(directory, Store::open(directory.join("journal")).unwrap(), &maps);
        for (container, id) in [("a", 1), ("b", 2)] {
            attach_with_two(&engine, rig::plan(directory, container, id));
            maps.enter(id);
        }
        let pool = directory.join("pools/net");
        let withheld = Withheld::new(&pool.join("fd00::2"));
        // Those of before know what is in the pool without reading it.
        engine.node.leases = ipam::Leases::default();
        let del = |container| engine.del(&rig::request("DEL", container));
        for _ in 0..2 {
            let failed = Chain(&del("a").unwrap_err()).to_string();
            let unread = format!("read {}: ", pool.join("fd00::2").display());
            assert!(failed.contains(RELEASE) && failed.contains(&unread), "{failed}");
            assert!(!pool.join("10.1.0.2").exists(), "the other one is free");
        }
        for removed in ["10.1.0.3", "fd00::3"] {
            std::fs::remove_file(pool.join(removed)).unwrap();
        }
        del("b").unwrap();
        drop(withheld);
        del("a").unwrap();
        assert_eq!(held(directory, &maps), of_a(&[], &[]));
    }

    fn lease_by_dhcp() -> Step {
        let config = json!({"network": "lan", "wanted": [1]});
        Step::Lease(ipam::Config::Dhcp(serde_json::from_value(config).unwrap()))
    }

    /// Otherwise the server gives the address to another host, to which the node still leads.
    #[test]
    fn an_address_goes_back_to_its_server_once_nothing_on_the_node_leads_to_it() {
        let directory = tempfile::tempdir().unwrap();
        let (directory, maps) = (directory.path(), Arc::new(Maps::default()));
        let mut engine = attach(directory, &maps, |plan| {
            plan.attachments[0].steps.extend([lease_by_dhcp(), Step::ChooseHostAccess]);
        });
        let leases = directory.join("dhcp");
        std::fs::create_dir(&leases).unwrap();
        let owner = Owner { container_id: "a".to_owned(), ifname: "eth0".to_owned() };
        let lease = json!({
            "version": 1, "container_id": "a", "ifname": "eth0", "config": {"network": "lan", "wanted": [1]},
            "mac": "02:00:00:00:00:07", "index": 3, "netns": "/nonexistent",
            "netns_id": {"device": 4, "inode": 5}, "boot": "00000000-0000-0000-0000-000000000000",
            "address": "10.1.0.7", "server": {"address": "10.1.0.1", "mac": "02:00:00:00:00:01"},
        });
        let file = dhcp::Leases::open(&leases).unwrap().file(&owner);
        std::fs::write(&file, lease.to_string()).unwrap();
        engine.node.leases = ipam::Leases::renewing(dhcp::Leases::open(&leases).unwrap());
        for _ in 0..2 {
            let failed = Chain(&engine.del(&rig::request("DEL", "a")).unwrap_err()).to_string();
            assert!(failed.contains(RELEASE), "{failed}");
            assert!(engine.node.leases.dhcp().unwrap().is_known(&owner) && file.exists());
            assert_eq!(held(directory, &maps), of_a(&["10.1.0.2"], &[1]));
        }
    }

    /// By it the lease is given back, once nothing leads to its address.
    #[test]
    fn the_interface_of_a_lease_that_is_not_given_back_yet_stays_while_others_of_the_sandbox_go() {
        let directory = tempfile::tempdir().unwrap();
        let (directory, maps) = (directory.path(), Arc::new(Maps::default()));
        let [node, pod] = [(); 2].map(|()| Netns::private().unwrap());
        let [mut host, mut inside] = [&node, &pod].map(|netns| Handle::open_in(netns).unwrap());
        let wire = Bridge { name: "wire".to_owned(), mtu: None, promiscuous: false, vlan_filtering: false };
        let parent = host.ensure_bridge(&wire).unwrap().link;
        let engine = attach(directory, &maps, |plan| {
            let group = plan.sandbox.link_group();
            for attachment in &mut plan.attachments {
                let macvlan = Macvlan { group, ..Macvlan::plain(&attachment.ifname, "wire") };
                host.create_macvlan(&macvlan, &parent, pod.as_fd(), &mut inside).unwrap();
                attachment.steps.push(Step::CreateLink(Link::Macvlan(macvlan)));
            }
            plan.attachments[1].steps.extend([lease_by_dhcp(), Step::ChooseHostAccess]);
        });
        let Loaded::Whole(record) = engine.journal.load(&rig::key("a")).unwrap() else { panic!("a record") };
        for _ in 0..2 {
            let undone = within(&node, || undo(&engine.node, &record.plan, Some(&pod), &*record)).unwrap();
            assert!(undone.is_err());
            let mut left: Vec<String> = inside.links().unwrap().into_iter().map(|link| link.name).collect();
            left.sort();
            assert_eq!(left, ["lo", "net1"]);
        }
    }

    /// As where no descriptor is left. A socket is no file that can be opened.
    #[test]
    fn nothing_is_taken_back_while_nobody_can_tell_whether_the_namespace_is_there() {
        let directory = tempfile::tempdir().unwrap();
        let (directory, maps) = (directory.path(), Arc::new(Maps::default()));
        let path = directory.join("netns");
        let engine =
            attach(directory, &maps, |plan| plan.sandbox.netns = path.to_string_lossy().into_owned());
        let socket = UnixListener::bind(&path).unwrap();
        let whole = of_a(&["10.1.0.2", "10.1.0.3"], &[1, 2]);
        let failed = engine.del(&rig::request("DEL", "a")).unwrap_err();
        assert!(
            matches!(&failed, AttachError::Netns(NetnsError::Open { path: at, .. }) if *at == path),
            "{failed}"
        );
        assert_eq!((held(directory, &maps), engine.is_half_detached("a")), (whole, false));
        drop(socket);
        std::fs::remove_file(&path).unwrap();
        engine.del(&rig::request("DEL", "a")).unwrap();
        assert_eq!(held(directory, &maps), of_a(&[], &[]));
    }

    /// It has no plan: what its sandbox has left may show in the pod alone.
    #[test]
    fn a_torn_record_stays_while_nobody_can_tell_whether_the_namespace_is_there() {
        let directory = tempfile::tempdir().unwrap();
        let (directory, maps) = (directory.path(), Arc::new(Maps::default()));
        let engine = rig::engine(directory, Store::open(directory.join("journal")).unwrap(), &maps);
        let record = engine.journal.path(&rig::key("a")).unwrap();
        std::fs::write(&record, "").unwrap();
        let path = directory.join("netns");
        let socket = UnixListener::bind(&path).unwrap();
        let mut request = rig::request("DEL", "a");
        request.netns = Some(path.to_string_lossy().into_owned());
        let failed = engine.del(&request).unwrap_err();
        assert!(
            matches!(&failed, AttachError::Netns(NetnsError::Open { path: at, .. }) if *at == path),
            "{failed}"
        );
        assert!(record.exists());
        drop(socket);
        std::fs::remove_file(&path).unwrap();
        engine.del(&request).unwrap();
        assert!(!record.exists());
    }

    /// The pod calls another of its devices so.
    ///
    /// Rows: HDV-names.
    #[test]
    fn what_has_the_name_of_a_device_that_was_never_moved_stays_in_the_pod() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let journal = Store::open(directory.join("journal")).unwrap();
        let mut engine = rig::engine(directory, journal, &Arc::new(Maps::default()));
        // Then what is given back need not be a card.
        engine.node.records = false;
        let mut plan = rig::plan(directory, "a", 1);
        plan.attachments[0].steps = vec![Step::ClaimDevice(fixtures::device()), Step::MoveDevice];
        let mut record = engine.journal.create(rig::key("a"), plan).unwrap();
        let [node, pod] = [(); 2].map(|()| Netns::private().unwrap());
        let [mut host, mut inside] = [&node, &pod].map(|netns| Handle::open_in(netns).unwrap());
        let (host_name, pod_name) = ("far".to_owned(), "net1".to_owned());
        let veth = Veth { host_name, pod_name, mtu: None, mac: None, group: 0, port: None };
        let (_, other) = host.create_veth(&veth, None, pod.as_fd(), &mut inside).unwrap();
        inside.set_alias(other.index, "card0").unwrap();
        for (step, is_home) in [(0, false), (1, true)] {
            record.begin(&[StepRef(0, step)]).unwrap();
            within(&node, || undo(&engine.node, &record.plan, Some(&pod), &record)).unwrap().unwrap();
            assert_eq!(host.find_link("card0").unwrap().is_some(), is_home);
            assert_eq!(inside.find_link("net1").unwrap().is_none(), is_home);
        }
    }

    /// Rows: DHCP-lost.
    #[test]
    fn of_a_lost_address_goes_what_leads_there_and_no_bridge_is_opened() {
        let admit = |ingress| Step::Admit(Admit { ingress, ..Admit::default() });
        for (step, expected) in [
            (Step::ChooseHostAccess, true),
            (Step::Translate(Translate::default()), true),
            (admit(Ingress::Open), true),
            (admit(Ingress::SameBridge), false),
            (admit(Ingress::Isolated), false),
            (Step::RestrictSender, false),
            (Step::FindDevice, false),
        ] {
            assert_eq!(leads_there(&step), expected, "{step:?}");
        }
    }

    /// Rows: PMP-before-address, FWL-before-address.
    #[test]
    fn what_leads_to_an_address_goes_before_the_plugin_that_frees_it_and_no_bridge_is_opened() {
        let plugin =
            || Delegate { plugin: "other".to_owned(), config: serde_json::Map::new(), role: Role::Plugin };
        let link = || {
            let (host_name, pod_name) = ("na1".to_owned(), "net1".to_owned());
            Step::CreateLink(Link::Veth(Veth {
                host_name,
                pod_name,
                mtu: None,
                mac: None,
                group: 7,
                port: None,
            }))
        };
        let admit = |ingress| Step::Admit(Admit { ingress, ..Admit::default() });
        let chain = |first: Step, last: Step| {
            let rest =
                [Step::Translate(Translate::default()), admit(Ingress::Open), admit(Ingress::Isolated)];
            let steps = std::iter::once(first).chain(rest).chain([last]);
            fixtures::attachment("other", steps.collect())
        };
        let of_server =
            Delegate { plugin: "dhcp".to_owned(), config: serde_json::Map::new(), role: Role::Ipam };
        let (all, leading) = ([false; 5], [false, true, true, false, false]);
        let sandbox = fixtures::sandbox("a");
        for (first, last, preceding, ending) in [
            (Step::Delegate(plugin()), Step::Delegate(plugin()), leading, [true, false, false, false, false]),
            (link(), Step::Delegate(plugin()), all, [true, false, false, false, false]),
            (link(), lease_by_dhcp(), leading, [true, false, false, false, true]),
            (link(), Step::Delegate(of_server), leading, [true, false, false, false, true]),
        ] {
            let attachment = chain(first, last);
            let begun: Vec<Begun<'_>> = (0_u16..)
                .zip(&attachment.steps)
                .map(|(number, step)| {
                    let inverse = inverse(&sandbox, &attachment, step, None).unwrap();
                    Begun { at: StepRef(0, number), attachment: &attachment, step, inverse }
                })
                .collect();
            assert_eq!(begun.iter().map(Begun::precedes_plugins).collect::<Vec<_>>(), preceding);
            assert_eq!(begun.iter().map(Begun::ends_addresses).collect::<Vec<_>>(), ending);
        }
    }
}
