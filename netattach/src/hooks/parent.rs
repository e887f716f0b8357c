//! Parents of macvlans: the programs are on a parent as long as it carries attachments, by filters or by tcx links.
//!
//! Order makes every moment safe, and every crash repairable: a parent is entered in the map before the first program is
//! attached to it, and taken out after the last is gone. What is entered and carries nothing is swept at start. Where the mode
//! is another than an earlier agent's, its programs go after this agent's have come.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use netattach_common::parent::place;

use super::device::{DeviceHooks, HookProgram};
use super::numbers::{FROM, TO};
use super::pod::class;
use super::{AttachMode, HookError, PodDevice};
use crate::bpf::{Dataplane, Entry, LinkPlace, OnParent, Parent, Program, Side};
use crate::netlink::Handle;
use crate::spec::TcHook;

/// The programs on a parent: a filter tells its program by the class where it is, and a link has a program for each place.
const ON_PARENT: [(TcHook, u32, Side, u16, Entry); 3] = [
    (TcHook::Ingress, FROM, Side::FromPod, place::INGRESS, Entry::InFrom),
    (TcHook::Ingress, TO, Side::ToPod, place::INGRESS, Entry::InTo),
    (TcHook::Egress, FROM, Side::FromPod, place::EGRESS, Entry::Out),
];

/// The programs on a parent.
fn on(ifindex: u32) -> DeviceHooks<'static> {
    let programs = ON_PARENT.map(|(hook, number, side, class, entry)| HookProgram {
        hook,
        number,
        class,
        program: Program::OnParent(side),
        link: Some(LinkPlace::Node { ifindex, program: Program::Entry(entry) }),
    });
    DeviceHooks { index: ifindex, pod: None, programs: programs.into(), first: false }
}

/// The programs on a macvlan in its pod, in either mode by filters. The driver copies multicast and broadcast frames to each
/// macvlan past the parent's hooks: each copy is judged where it arrives.
fn copies<'a>(attachment: u32, index: u32, pod: Option<&'a PodDevice>) -> Result<DeviceHooks<'a>, HookError> {
    // Numbers of attachments are below `place::INGRESS`: the settings bound them.
    let class = class(attachment)?;
    let programs = [(FROM, Side::FromPod), (TO, Side::ToPod)].map(|(number, side)| HookProgram {
        hook: TcHook::Ingress,
        number,
        class,
        program: Program::OnParent(side),
        link: None,
    });
    Ok(DeviceHooks { index, pod, programs: programs.into(), first: false })
}

/// Keeps the parents' programs.
#[derive(Debug)]
pub(crate) struct Parents {
    /// How they are attached.
    mode: AttachMode,
    /// Whether frames of macvlans that are no attachment's pass.
    strangers: bool,
    /// Held while it is decided whether a parent is the first or the last of its kind, and while that is carried out.
    turn: Mutex<()>,
}

impl Parents {
    pub(crate) fn new(mode: AttachMode, strangers: bool) -> Self {
        Self { mode, strangers, turn: Mutex::default() }
    }

    /// Puts a macvlan under the programs of its parent, and those that judge copies of group frames on itself. Its
    /// record is written and the macvlan is down.
    pub(crate) fn attach(
        &self,
        dataplane: &Dataplane,
        id: u32,
        on: &OnParent,
        macvlan: &PodDevice,
        host: &mut Handle,
        pod: &mut Handle,
    ) -> Result<(), HookError> {
        {
            let _turn = self.turn();
            dataplane.attachments().bind_macvlan(id, on)?;
            if !dataplane.parents().covered().contains_key(&on.parent) {
                self.cover(dataplane, on.parent, host)?;
            }
        }
        copies(id, macvlan.index, None)?.attach(AttachMode::Clsact, dataplane.programs(), pod)?;
        Ok(())
    }

    /// Forgets an attachment; the programs leave a parent with its last.
    pub(crate) fn detach(&self, dataplane: &Dataplane, id: u32) -> Result<(), HookError> {
        let Some(parent) = dataplane.parents().parent_of(id) else {
            return Ok(dataplane.remove_attachment(id)?);
        };
        let _turn = self.turn();
        dataplane.remove_attachment(id)?;
        if dataplane.parents().in_use().contains(&parent) {
            return Ok(());
        }
        uncover(dataplane, parent, &mut Handle::open()?)
    }

    /// Takes over an attachment that was there at start. `changed`: what runs may be other programs.
    pub(crate) fn adopt(
        &self,
        dataplane: &Dataplane,
        id: u32,
        on: &OnParent,
        macvlan: &PodDevice,
        changed: bool,
        host: &mut Handle,
    ) -> Result<(), HookError> {
        dataplane.attachments().bind_macvlan(id, on)?;
        if !changed {
            return Ok(());
        }
        let copies = copies(id, macvlan.index, Some(macvlan))?;
        match copies.attach(AttachMode::Clsact, dataplane.programs(), host) {
            // The pod is gone, and its DEL is still to come; or the pod has deleted the macvlan.
            Err(HookError::PodGone) => Ok(()),
            Err(HookError::Netlink(error)) if error.not_found() => Ok(()),
            other => other.map(drop),
        }
    }

    /// After all attachments have been taken over: every parent runs this agent's programs. When those attachments are
    /// `all`, a parent that carries none runs none.
    pub(crate) fn adopt_all(&self, dataplane: &Dataplane, all: bool, host: &mut Handle) -> Vec<HookError> {
        let _turn = self.turn();
        let in_use = dataplane.parents().in_use();
        let mut covered: BTreeSet<u32> = dataplane.parents().covered().into_keys().collect();
        match dataplane.programs().linked_devices(&Entry::ALL.map(Program::Entry)) {
            // Those of earlier maps.
            Ok(linked) => covered.extend(linked),
            Err(error) => return vec![error.into()],
        }
        let stale = covered.iter().filter(|parent| all && !in_use.contains(parent));
        let removed = stale.map(|parent| uncover(dataplane, *parent, &mut *host)).collect::<Vec<_>>();
        let wanted = in_use.iter().chain(covered.iter().filter(|parent| !all && !in_use.contains(parent)));
        let ensured = wanted.map(|parent| match self.cover(dataplane, *parent, &mut *host) {
            // The device is gone, and the macvlans with it.
            Err(error) if error.is_device_gone() => Ok(()),
            other => other,
        });
        let ensured = ensured.collect::<Vec<_>>();
        removed.into_iter().chain(ensured).filter_map(Result::err).collect()
    }

    /// The first program that is missing on a parent.
    pub(crate) fn missing(
        &self,
        dataplane: &Dataplane,
        parent: u32,
        host: &mut Handle,
    ) -> Result<Option<&'static str>, HookError> {
        on(parent).missing(self.mode, dataplane.programs(), host)
    }

    /// Puts the programs of an attachment's parent back where one is missing, and says whether it did. An
    /// attachment that is going may have been the last that needed them.
    pub(crate) fn restore(
        &self,
        dataplane: &Dataplane,
        id: u32,
        host: &mut Handle,
    ) -> Result<bool, HookError> {
        let _turn = self.turn();
        // It may have gone meanwhile, and the programs with the last of its parent.
        let Some(parent) = dataplane.parents().parent_of(id) else { return Ok(false) };
        if self.missing(dataplane, parent, host)?.is_none() {
            return Ok(false);
        }
        self.cover(dataplane, parent, host)?;
        Ok(true)
    }

    fn cover(&self, dataplane: &Dataplane, parent: u32, host: &mut Handle) -> Result<(), HookError> {
        let known = dataplane.parents().covered().get(&parent).copied();
        let had_own_clsact = known.is_some_and(|known| known.own_clsact);
        let what = Parent {
            netns_cookie: host.netns_cookie(),
            // Of a kind that the kernel has no name for: a driver's own.
            card: host.link_by_index(parent)?.kind.is_empty(),
            strangers: self.strangers,
            own_clsact: match self.mode {
                // Until it is known: one that is left over would never be removed.
                AttachMode::Clsact => known.is_none_or(|known| known.own_clsact),
                AttachMode::Tcx => had_own_clsact,
            },
        };
        dataplane.parents().cover(parent, what)?;
        let (programs, on) = (dataplane.programs(), on(parent));
        let made_clsact = on.attach(self.mode, programs, host)?;
        // Last, so that every packet is judged by one of the two.
        on.detach(self.mode.other(), programs, host, had_own_clsact)?;
        let own_clsact = self.mode == AttachMode::Clsact && (made_clsact || had_own_clsact);
        if own_clsact != what.own_clsact {
            dataplane.parents().cover(parent, Parent { own_clsact, ..what })?;
        }
        Ok(())
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        // After a panic: the next attempt repeats what was left half done.
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes the programs off a parent, in either mode.
fn uncover(dataplane: &Dataplane, parent: u32, host: &mut Handle) -> Result<(), HookError> {
    let own_clsact = dataplane.parents().covered().get(&parent).is_some_and(|covered| covered.own_clsact);
    for mode in [AttachMode::Tcx, AttachMode::Clsact] {
        on(parent).detach(mode, dataplane.programs(), host, own_clsact)?;
    }
    Ok(dataplane.parents().uncover(parent)?)
}
