//! The programs of attachments on their devices: attaching, detaching, and reattaching those that were removed.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::attachment::EnforcedAttachment;
use super::error::{AttachFailed, EnforceError};
use super::level::{Means, Vantage, contested, enforcement, may_begin_by_filters, removed};
use crate::bpf::{self, Dataplane};
use crate::error_chain::Chain;
use crate::hooks::node_end::{self, Found};
use crate::hooks::parent::{Macvlan, Parents};
use crate::hooks::{
    AttachMode, AttachModes, DeviceHooks, HookError, HookPoint, Lack, PodDevice, Restored, Rivals,
    WholeFilters, host_link, pod,
};
use crate::netlink::Handle;
use crate::netns::Netns;
use crate::objects::Pod;
use crate::policy::level::Enforcement;
use crate::step::EnforceWhen;

/// Attaches programs to devices.
pub(super) struct AttachedPrograms {
    dataplane: Arc<Dataplane>,
    parents: Parents,
    modes: AttachModes,
    /// Whether programs can detect what is written into a packet after they have judged it.
    sees_unfinished: bool,
    turn: Mutex<()>,
    /// How often programs were reattached.
    put_back: AtomicU64,
    rivals: Rivals,
    /// Processes that repeatedly remove programs.
    removers: Rivals,
    /// The filters of which the kernel would have told if they had changed.
    whole: WholeFilters,
    /// See [`keep_hooks_on`].
    _hooks_on: Option<Netns>,
}

/// The lock for attaching or detaching programs on an attachment's device: an attachment that ends
/// meanwhile gets none. Acquired before the enforcer's lock.
pub(super) type Turn<'a> = MutexGuard<'a, ()>;

/// The state of an adopted attachment's programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Adopted {
    /// They run, or the pod or its device is gone.
    Done,
    /// They did not run, and are not needed until a policy selects the attachment.
    Deferred,
}

/// The index of a device that is a node's end, its attachment, and the programs found there; `None`: the device is
/// gone.
pub(super) type FoundNodeEnd<'a> = (u32, &'a EnforcedAttachment, Result<Option<Found>, HookError>);

impl AttachedPrograms {
    /// `strangers`: on parents, frames of macvlans without an attachment pass.
    pub(super) fn new(dataplane: Arc<Dataplane>, modes: AttachModes, strangers: bool) -> Self {
        let hooks_on = keep_hooks_on(&dataplane);
        if let Err(error) = &hooks_on {
            tracing::debug!(error = %Chain(error), "hooks not switched on; the first attachment will do it");
        }
        Self {
            dataplane,
            parents: Parents::new(modes.attachments, strangers),
            modes,
            sees_unfinished: bpf::probe::sees_unfinished(),
            turn: Mutex::default(),
            put_back: AtomicU64::default(),
            rivals: Rivals::default(),
            removers: Rivals::default(),
            whole: WholeFilters::of_namespace(),
            _hooks_on: hooks_on.ok(),
        }
    }

    /// How programs are attached.
    pub(super) fn modes(&self) -> AttachModes {
        self.modes
    }

    /// The enforcement level for an attachment of that pod.
    pub(super) fn enforcement(&self, pod: Option<&Pod>, vantage: Vantage<'_>) -> Enforcement {
        let means = Means { in_pod: self.modes.others, sees_unfinished: self.sees_unfinished };
        enforcement(vantage, pod, means)
    }

    /// Whether the programs of an attachment of that pod may run as filters until they are attached by BPF
    /// links: an ADD then need not wait for the two RCU grace periods of links.
    pub(super) fn may_begin_by_filters(&self, attachment: &EnforcedAttachment, pod: Option<&Pod>) -> bool {
        let uid = attachment.pod.as_ref().and_then(|pod| pod.uid.as_deref());
        attachment.begins_in_pod() && may_begin_by_filters(self.modes, pod, uid)
    }

    /// Waits for the lock for changing programs on attachments' own devices.
    pub(super) fn take_turn(&self) -> Turn<'_> {
        // No lock is poisoned: a panic ends the agent.
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Binds a device of the node to an attachment. Before this its packets are dropped.
    pub(super) fn bind(&self, attachment: &EnforcedAttachment, device: u32) -> Result<(), EnforceError> {
        Ok(self.dataplane.attachments().bind(device, attachment.id)?)
    }

    /// Attaches the programs to the device of an attachment that has its own device.
    pub(super) fn attach(
        &self,
        attachment: &EnforcedAttachment,
        host: &mut Handle,
    ) -> Result<(), EnforceError> {
        match attachment.point.own_device(attachment.id)? {
            Some(device) => Ok(self.attach_own(attachment, &device, host)?),
            None => Ok(()),
        }
    }

    /// Attaches the programs as filters to an attachment's device in its pod, which is down.
    pub(super) fn attach_by_filters(
        &self,
        attachment: &EnforcedAttachment,
        host: &mut Handle,
    ) -> Result<(), EnforceError> {
        if let Some(device) = attachment.point.own_device(attachment.id)? {
            device.attach(AttachMode::Clsact, self.dataplane.programs(), host)?;
        }
        Ok(())
    }

    fn attach_own(
        &self,
        attachment: &EnforcedAttachment,
        device: &DeviceHooks<'_>,
        host: &mut Handle,
    ) -> Result<(), HookError> {
        let (point, programs) = (&attachment.point, self.dataplane.programs());
        let mode = device.mode(self.modes.at(point))?;
        if attachment.is_on_representor() {
            device.expect_room(mode, host)?;
        }
        device.attach(mode, programs, host)?;
        match point {
            // Last, so that every packet is judged by one of the two.
            HookPoint::NodeEnd(_) | HookPoint::Pod(_) => device.detach(mode.other(), programs, host, false),
            HookPoint::Parent { .. } | HookPoint::Nowhere(_) => Ok(()),
        }
    }

    /// Attaches the programs to the node's ends of attachments of one pod, and lets the programs of parents
    /// judge those whose hook point is a parent. Does nothing for others.
    pub(super) fn attach_all(
        &self,
        attachments: &[EnforcedAttachment],
        host: &mut Handle,
        pod: &mut Handle,
    ) -> Result<(), AttachFailed> {
        let (mut on_parents, mut parents_at) = (Vec::new(), Vec::new());
        let (mut on_node, mut node_at) = (Vec::new(), Vec::new());
        let failed = |of: &[usize], (position, error): (usize, HookError)| AttachFailed {
            at: of.get(position).copied().unwrap_or_default(),
            source: Box::new(error.into()),
        };
        for (at, attachment) in attachments.iter().enumerate() {
            match &attachment.point {
                HookPoint::Parent { on, macvlan } => {
                    let (id, on_card) = (attachment.id, attachment.on_card);
                    on_parents.push(Macvlan { id, on, on_card, macvlan });
                    parents_at.push(at);
                }
                HookPoint::NodeEnd(device) if attachment.when != EnforceWhen::Selected => {
                    let hooks = node_end::on(*device);
                    // No other process can have programs on devices that were made for this pod.
                    let mode = match attachment.is_on_representor() {
                        true => {
                            let mode = hooks.mode(self.modes.attachments);
                            let mode = mode.and_then(|it| hooks.expect_room(it, host).map(|()| it));
                            mode.map_err(|error| failed(&[at], (0, error)))?
                        }
                        false => self.modes.attachments,
                    };
                    on_node.push((mode, hooks));
                    node_at.push(at);
                }
                _ => {}
            }
        }
        let dataplane = &self.dataplane;
        let entered = self.parents.enter(dataplane, &on_parents, host);
        let entered = entered.map_err(|error| failed(&parents_at, error))?;
        // Those of parents and of nodes' ends in one message.
        let (bare_at, mut devices): (Vec<usize>, Vec<_>) = entered.bare().unzip();
        let positions = bare_at.iter().filter_map(|at| parents_at.get(*at)).chain(&node_at);
        let positions: Vec<usize> = positions.copied().collect();
        devices.extend(on_node);
        let attached = DeviceHooks::attach_all(&devices, dataplane.programs(), host);
        let outcomes = attached.as_deref().unwrap_or_default();
        let made_clsact: Vec<Option<bool>> = outcomes.iter().map(|one| one.as_ref().ok().copied()).collect();
        let finished = entered.finish(dataplane, &made_clsact, host);
        for (at, one) in attached.map_err(|error| failed(&positions, error))?.into_iter().enumerate() {
            one.map_err(|error| failed(&positions, (at, error)))?;
        }
        finished.map_err(|error| failed(&parents_at, error))?;
        Parents::judge_copies(dataplane, &on_parents, pod).map_err(|error| failed(&parents_at, error))
    }

    /// Attaches the program of the node's own link on a parent.
    pub(super) fn drop_groups(&self, host_link: u32, host: &mut Handle) -> Result<(), EnforceError> {
        host_link::on(host_link).attach(AttachMode::Clsact, self.dataplane.programs(), host)?;
        Ok(())
    }

    /// Returns the first program of an attachment that does not judge every packet, as text. `by_filters`:
    /// they are not attached by BPF links yet. `afresh`: filters are listed although the kernel has told of no
    /// change.
    pub(super) fn missing(
        &self,
        attachment: &EnforcedAttachment,
        by_filters: bool,
        afresh: bool,
        host: &mut Handle,
    ) -> Result<Option<String>, EnforceError> {
        let known = (!afresh).then_some(&self.whole);
        let lack = if let HookPoint::Parent { on, .. } = &attachment.point {
            self.parents.missing(&self.dataplane, on.parent, known, host)?
        } else if let Some(device) = attachment.point.own_device(attachment.id)? {
            let mode = if by_filters { AttachMode::Clsact } else { self.modes.at(&attachment.point) };
            device.lack(mode, self.dataplane.programs(), known, host)?
        } else {
            None
        };
        Ok(lack.map(|lack| self.in_words(attachment, lack, host)))
    }

    /// Returns what an attachment's programs lack, and where, as text.
    pub(super) fn in_words(&self, attachment: &EnforcedAttachment, lack: Lack, host: &mut Handle) -> String {
        let index = attachment.host_index();
        if index == 0 {
            return format!("{lack} in the pod");
        }
        let device = device_name(index, host);
        match (lack, self.rivals.at(index)) {
            (Lack::BehindFilter(_), Some(times)) => format!(
                "{lack} on device {device}: ours were put before it {times} times, and from now on are once a minute"
            ),
            _ => format!("{lack} on device {device}"),
        }
    }

    /// Returns the level of attachments on a device whose programs other processes repeatedly remove or
    /// precede.
    pub(super) fn contested(&self, device: u32) -> Option<Enforcement> {
        self.rivals.at(device).map(contested).or_else(|| self.removers.at(device).map(removed))
    }

    /// Reattaches the programs on an attachment's own device or on its parent, if one is missing or behind
    /// programs of others.
    pub(super) fn restore(
        &self,
        attachment: &EnforcedAttachment,
        host: &mut Handle,
    ) -> Result<Restored, EnforceError> {
        let EnforcedAttachment { id, point, .. } = attachment;
        let restored = if matches!(point, HookPoint::Parent { .. }) {
            self.parents.restore(&self.dataplane, *id, host, &self.rivals)?
        } else if let Some(device) = point.own_device(*id)? {
            let attach = |host: &mut Handle| self.attach_own(attachment, &device, host);
            device.restore(self.modes.at(point), self.dataplane.programs(), host, &self.rivals, attach)?
        } else {
            Restored::default()
        };
        // In the pod the pod itself has removed it, which the level expresses anyway.
        if restored.was_absent && restored.helped() && point.host_index() != 0 {
            self.removers.note(point.host_index());
        }
        Ok(restored)
    }

    /// Counts a program that another process removed and that was reattached.
    pub(super) fn count_put_back(&self) {
        self.put_back.fetch_add(1, Ordering::Relaxed);
    }

    /// How often programs were reattached.
    pub(super) fn put_back(&self) -> u64 {
        self.put_back.load(Ordering::Relaxed)
    }

    /// Removes the links on the device in the pod of an attachment that has ended, after any attaching in progress.
    pub(super) fn detach_in_pod(&self, id: u32) -> Result<(), EnforceError> {
        let _turn = self.take_turn();
        Ok(pod::unlink(id, self.dataplane.programs())?)
    }

    /// Detaches the programs from the node's end of an attachment that has ended, if the device stays;
    /// `clsact` stays too, as it is not known who made it. Waits for any attaching in progress.
    pub(super) fn leave_node_end(&self, id: u32) -> Result<(), EnforceError> {
        let _turn = self.take_turn();
        let devices = self.dataplane.attachments().devices_of(id);
        if devices.is_empty() {
            return Ok(());
        }
        let (mut host, programs) = (Handle::open()?, self.dataplane.programs());
        let found = node_end::find_all(&devices, programs, &mut host)?;
        for (device, found) in devices.into_iter().zip(found) {
            let Some(found) = found? else { continue };
            for mode in [AttachMode::Tcx, AttachMode::Clsact].into_iter().filter(|mode| found.has(*mode)) {
                node_end::on(device).detach(mode, programs, &mut host, false)?;
            }
        }
        Ok(())
    }

    /// Removes an attachment's links and its record; a parent loses its programs with its last attachment. A link left
    /// on an existing device would judge packets without an attachment, and drop them.
    pub(super) fn detach(&self, id: u32) -> Result<(), EnforceError> {
        for device in self.dataplane.attachments().devices_of(id) {
            node_end::on(device).unlink(self.dataplane.programs())?;
        }
        Ok(self.parents.detach(&self.dataplane, id)?)
    }

    /// Inspects the node's ends of all attachments at once. Returns the programs found on each existing device.
    pub(super) fn find_node_ends<'a>(
        &self,
        attachments: Vec<(u32, &'a EnforcedAttachment)>,
        host: &mut Handle,
    ) -> Result<Vec<FoundNodeEnd<'a>>, EnforceError> {
        let devices: Vec<u32> = attachments.iter().map(|(index, _)| *index).collect();
        let found = node_end::find_all(&devices, self.dataplane.programs(), host)?;
        let each = attachments.into_iter().zip(found);
        Ok(each.map(|((index, attachment), found)| (index, attachment, found)).collect())
    }

    /// Runs the programs on a node's end in this agent's mode; `changed`: the running programs may differ from this
    /// agent's.
    pub(super) fn adopt_node_end(
        &self,
        (attachment, device): (&EnforcedAttachment, u32),
        found: &Found,
        changed: bool,
        host: &mut Handle,
    ) -> Result<(), EnforceError> {
        let programs = self.dataplane.programs();
        let hooks = node_end::on(device);
        let mode = hooks.mode(self.modes.attachments)?;
        if changed || !found.is_whole(mode, programs, device, host)? {
            if attachment.is_on_representor() {
                hooks.expect_room(mode, host)?;
            }
            hooks.attach(mode, programs, host)?;
        }
        if mode == AttachMode::Clsact && found.has_spares() {
            hooks.bring_to_front(programs, host)?;
        }
        // Last, so that every packet is judged by one of the two.
        if found.has(mode.other()) {
            hooks.detach(mode.other(), programs, host, false)?;
        }
        Ok(())
    }

    /// Adopts the programs on a device in a pod; `changed` as above.
    pub(super) fn adopt_in_pod(
        &self,
        attachment: &EnforcedAttachment,
        device: &PodDevice,
        changed: bool,
        host: &mut Handle,
    ) -> Result<Adopted, EnforceError> {
        if device.namespace().map_err(HookError::from)?.is_none() {
            // The pod is gone, and its DEL is still to come.
            return Ok(Adopted::Done);
        }
        let (mode, programs) = (self.modes.others, self.dataplane.programs());
        let hooks = pod::on(attachment.id, device)?;
        let runs = hooks.missing(mode, programs, host)?.is_none();
        let may_wait = !runs && attachment.when == EnforceWhen::Selected;
        if may_wait && hooks.missing(mode.other(), programs, host)?.is_some() {
            return Ok(Adopted::Deferred);
        }
        if changed || !runs {
            match hooks.attach(mode, programs, host) {
                // The pod has deleted the device.
                Err(error) if error.is_device_gone() => return Ok(Adopted::Done),
                other => other.map(drop)?,
            }
        }
        // Last, so that every packet is judged by one of the two.
        hooks.detach(mode.other(), programs, host, false)?;
        Ok(Adopted::Done)
    }

    /// Adopts an attachment whose hook point is a parent; otherwise does nothing. `changed` as above.
    pub(super) fn adopt_on_parent(
        &self,
        attachment: &EnforcedAttachment,
        changed: bool,
        host: &mut Handle,
    ) -> Result<(), EnforceError> {
        let HookPoint::Parent { on, macvlan } = &attachment.point else { return Ok(()) };
        Ok(self.parents.adopt(&self.dataplane, attachment.id, on, macvlan, changed, host)?)
    }

    /// To be called after all attachments are adopted: every parent runs this agent's programs, and when those
    /// attachments are `all`, programs are removed from parents without attachments.
    pub(super) fn adopt_parents(&self, all: bool) -> Vec<EnforceError> {
        let adopted = Handle::open().map(|mut host| self.parents.adopt_all(&self.dataplane, all, &mut host));
        match adopted {
            Ok(failed) => failed.into_iter().map(EnforceError::from).collect(),
            Err(error) => vec![error.into()],
        }
    }

    /// Removes the links of attachments that are not `known`, and of devices without an attachment.
    pub(super) fn sweep(&self, known: &BTreeSet<u32>) -> Result<(), EnforceError> {
        let programs = self.dataplane.programs();
        pod::sweep(programs, known)?;
        let devices = self.dataplane.attachments().bound().into_keys().collect();
        Ok(node_end::sweep(programs, &devices)?)
    }
}

/// Runs the programs on the loopback of a dedicated namespace.
///
/// The kernel leaves its traffic control hooks out of the packet path until the first program is attached, and removes
/// them again after the last: by patching its own code on all processors, in the middle of an ADD or a DEL. A permanent
/// pair of programs spares pods that cost.
fn keep_hooks_on(dataplane: &Dataplane) -> Result<Netns, EnforceError> {
    let netns = Netns::private()?;
    let mut handle = Handle::open_in(&netns)?;
    let loopback = handle.link("lo")?;
    node_end::on(loopback.index).attach(AttachMode::Clsact, dataplane.programs(), &mut handle)?;
    Ok(netns)
}

/// The name of a device, or its index if it is gone.
pub(super) fn device_name(index: u32, host: &mut Handle) -> String {
    host.link_by_index(index).map_or_else(|_| index.to_string(), |link| link.name)
}
