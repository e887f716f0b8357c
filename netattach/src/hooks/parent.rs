//! Parents of macvlans: a parent has programs, by filters or by tcx links, as long as it carries attachments.
//!
//! The order of steps makes every moment safe and every crash repairable: a parent is added to the map before
//! its first program is attached, and removed after the last program is detached. Parents in the map that
//! carry no attachment are removed at start. If an earlier agent used another mode, its programs are detached
//! after this agent's have been attached.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use netattach_common::parent::place;

use super::device::{DeviceHooks, HookProgram, Lack, Restored};
use super::numbers::{FROM, TO};
use super::pod::class;
use super::{AttachMode, HookError, PodDevice, Rivals, WholeFilters};
use crate::bpf::{Dataplane, Entry, LinkPlace, OnParent, Parent, Program, Side};
use crate::netlink::Handle;
use crate::spec::TcHook;

/// The programs on a parent. A filter tells its program by the class at which hook it runs; a link runs a
/// separate program for each hook.
const ON_PARENT: [(TcHook, u32, Side, u16, Entry); 3] = [
    (TcHook::Ingress, FROM, Side::FromPod, place::INGRESS, Entry::InFrom),
    (TcHook::Ingress, TO, Side::ToPod, place::INGRESS, Entry::InTo),
    (TcHook::Egress, FROM, Side::FromPod, place::EGRESS, Entry::Out),
];

/// The parent with its programs.
fn on(ifindex: u32) -> DeviceHooks<'static> {
    let programs = ON_PARENT.map(|(hook, number, side, class, entry)| HookProgram {
        hook,
        number,
        class,
        program: Program::OnParent(side),
        link: Some(LinkPlace::Node { ifindex, program: Program::Entry(entry) }),
    });
    DeviceHooks { index: ifindex, pod: None, programs: programs.into(), first: true }
}

/// The programs on a macvlan in its pod, by filters in either mode. The driver copies multicast and broadcast
/// frames to each macvlan without passing the parent's hooks: each copy is judged where it arrives.
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

/// A macvlan whose parent is to get programs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Macvlan<'a> {
    /// Number of its attachment.
    pub(crate) id: u32,
    /// The parent.
    pub(crate) on: &'a OnParent,
    /// Whether the parent is a network card, if the caller knows.
    pub(crate) on_card: Option<bool>,
    pub(crate) macvlan: &'a PodDevice,
}

/// Macvlans that were added to the map, and those of their parents that may have no programs yet. If there
/// are such parents, the lock on all parents is held until [`Entered::finish`].
#[must_use]
pub(crate) struct Entered<'p> {
    turn: Option<MutexGuard<'p, BTreeSet<u32>>>,
    bare: Vec<Bare>,
}

/// A parent that is in the map and may have no programs yet.
struct Bare {
    /// Position of the first macvlan on this parent.
    at: usize,
    parent: u32,
    /// The mode in which its programs are attached.
    mode: AttachMode,
    what: Parent,
    /// Whether its `clsact` already belonged to netattach.
    had_own_clsact: bool,
}

impl Entered<'_> {
    /// The programs of the parents that have none yet, with mode and the position of a macvlan on the parent.
    pub(crate) fn bare(&self) -> impl Iterator<Item = (usize, (AttachMode, DeviceHooks<'static>))> + '_ {
        self.bare.iter().map(|bare| (bare.at, (bare.mode, on(bare.parent))))
    }

    /// To be called after the programs have been attached, as far as that succeeded. `made_clsact`: for each
    /// parent whether a `clsact` was created; `None` where attaching failed; entries are missing where
    /// nothing was tried. The next operation on a parent for which attaching was not successful attaches its
    /// programs, whether or not it has pods; they are detached with its last pod.
    ///
    /// # Errors
    /// The position of the first macvlan for which the remaining work failed, and the error.
    pub(crate) fn finish(
        mut self,
        dataplane: &Dataplane,
        made_clsact: &[Option<bool>],
        host: &mut Handle,
    ) -> Result<(), (usize, HookError)> {
        let Some(doubtful) = &mut self.turn else { return Ok(()) };
        let mut finished = Ok(());
        for (number, Bare { at, parent, mode, what, had_own_clsact }) in self.bare.iter().enumerate() {
            let outcome = match made_clsact.get(number) {
                Some(Some(made)) => {
                    covered(dataplane, (*parent, *what), (*mode, *made), *had_own_clsact, host).map(|()| true)
                }
                // The failed attempt may have created one.
                Some(None) => Ok(false),
                // A `clsact` that exists does not belong to this agent.
                None => {
                    let entered = Parent { own_clsact: *had_own_clsact, ..*what };
                    dataplane.parents().cover(*parent, entered).map(|()| false).map_err(HookError::from)
                }
            };
            match outcome {
                Ok(true) => doubtful.remove(parent),
                _ => doubtful.insert(*parent),
            };
            finished = finished.and(outcome.map(drop).map_err(|error| (*at, error)));
        }
        finished
    }
}

/// Manages the programs of parents.
#[derive(Debug)]
pub(crate) struct Parents {
    /// How the programs are attached, unless other programs' tcx links require tcx ([`DeviceHooks::mode`]).
    mode: AttachMode,
    /// Whether frames of macvlans that belong to no attachment pass.
    strangers: bool,
    /// Locked while it is determined whether an attachment is the first or last on a parent, and while the
    /// consequence is carried out. Contains the parents in the map that may lack programs because attaching
    /// failed: at most those that carry attachments.
    turn: Mutex<BTreeSet<u32>>,
}

impl Parents {
    pub(crate) fn new(mode: AttachMode, strangers: bool) -> Self {
        Self { mode, strangers, turn: Mutex::default() }
    }

    /// Adds macvlans of one pod, and those of their parents that have no programs, to the map. The caller
    /// attaches the parents' programs together with others, before any other operation on a parent. The
    /// macvlans' records have been written and the macvlans are down.
    ///
    /// # Errors
    /// The position of the first macvlan that failed, and the error.
    pub(crate) fn enter(
        &self,
        dataplane: &Dataplane,
        macvlans: &[Macvlan<'_>],
        host: &mut Handle,
    ) -> Result<Entered<'_>, (usize, HookError)> {
        let turn = (!macvlans.is_empty()).then(|| self.turn());
        let mut entered = Entered { turn, bare: Vec::new() };
        for (at, macvlan) in macvlans.iter().enumerate() {
            if let Err(error) = self.enter_one(dataplane, (at, macvlan), &mut entered, host) {
                // The first failure is the one to report.
                let _ = entered.finish(dataplane, &[], host);
                return Err((at, error));
            }
        }
        // Operations that do not involve such a parent need no lock.
        entered.turn = entered.turn.filter(|_| !entered.bare.is_empty());
        Ok(entered)
    }

    fn enter_one(
        &self,
        dataplane: &Dataplane,
        (at, macvlan): (usize, &Macvlan<'_>),
        entered: &mut Entered<'_>,
        host: &mut Handle,
    ) -> Result<(), HookError> {
        let Macvlan { id, on: OnParent { parent, .. }, on_card, .. } = *macvlan;
        let parent = *parent;
        dataplane.attachments().bind_macvlan(id, macvlan.on)?;
        let known = dataplane.parents().covered().get(&parent).copied();
        let is_doubtful = entered.turn.as_ref().is_some_and(|doubtful| doubtful.contains(&parent));
        if known.is_some() && !is_doubtful || entered.bare.iter().any(|bare| bare.parent == parent) {
            return Ok(());
        }
        let mode = on(parent).mode(self.mode)?;
        let what = self.entry(known, (parent, on_card), mode, host)?;
        let had_own_clsact = known.is_some_and(|known| known.own_clsact);
        entered.bare.push(Bare { at, parent, mode, what, had_own_clsact });
        Ok(dataplane.parents().cover(parent, what)?)
    }

    /// Attaches the programs that judge copies of group frames to macvlans of one pod, which are down.
    ///
    /// # Errors
    /// The position of the first macvlan that failed, and the error.
    pub(crate) fn judge_copies(
        dataplane: &Dataplane,
        macvlans: &[Macvlan<'_>],
        pod: &mut Handle,
    ) -> Result<(), (usize, HookError)> {
        let judged = macvlans.iter().enumerate().map(|(at, Macvlan { id, macvlan, .. })| {
            copies(*id, macvlan.index, None)
                .map(|hooks| (AttachMode::Clsact, hooks))
                .map_err(|error| (at, error))
        });
        let judged = judged.collect::<Result<Vec<_>, _>>()?;
        let attached = DeviceHooks::attach_all(&judged, dataplane.programs(), pod)?;
        attached.into_iter().enumerate().try_for_each(|(at, one)| one.map(drop).map_err(|error| (at, error)))
    }

    /// Forgets an attachment; with the last one of a parent, the parent's programs are detached.
    pub(crate) fn detach(&self, dataplane: &Dataplane, id: u32) -> Result<(), HookError> {
        let Some(parent) = dataplane.parents().parent_of(id) else {
            return Ok(dataplane.remove_attachment(id)?);
        };
        let mut doubtful = self.turn();
        dataplane.remove_attachment(id)?;
        if dataplane.parents().in_use().contains(&parent) {
            return Ok(());
        }
        uncover(dataplane, parent, &mut Handle::open()?)?;
        doubtful.remove(&parent);
        Ok(())
    }

    /// Takes over an attachment that existed at start. `changed`: the attached programs may be of another
    /// version.
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
            // The pod is gone and its DEL is still to come, or a process in the pod has deleted the macvlan.
            Err(HookError::PodGone) => Ok(()),
            Err(HookError::Netlink(error)) if error.not_found() => Ok(()),
            other => other.map(drop),
        }
    }

    /// Completes the takeover of all attachments: every parent runs this agent's programs. If those
    /// attachments are `all`, programs are detached from parents that carry none.
    pub(crate) fn adopt_all(&self, dataplane: &Dataplane, all: bool, host: &mut Handle) -> Vec<HookError> {
        let _turn = self.turn();
        let in_use = dataplane.parents().in_use();
        let mut covered: BTreeSet<u32> = dataplane.parents().covered().into_keys().collect();
        match dataplane.programs().linked_devices(&Entry::ALL.map(Program::Entry)) {
            // Links of earlier maps.
            Ok(linked) => covered.extend(linked),
            Err(error) => return vec![error.into()],
        }
        let stale = covered.iter().filter(|parent| all && !in_use.contains(parent));
        let removed = stale.map(|parent| uncover(dataplane, *parent, &mut *host)).collect::<Vec<_>>();
        let wanted = in_use.iter().chain(covered.iter().filter(|parent| !all && !in_use.contains(parent)));
        let ensured = wanted.map(|parent| match self.cover(dataplane, *parent, &mut *host) {
            // The device is gone, and its macvlans with it.
            Err(error) if error.is_device_gone() => Ok(()),
            other => other,
        });
        let ensured = ensured.collect::<Vec<_>>();
        removed.into_iter().chain(ensured).filter_map(Result::err).collect()
    }

    /// Returns the first program that is missing on a parent, or that comes after other programs. `known`: as in
    /// [`DeviceHooks::lack`].
    pub(crate) fn missing(
        &self,
        dataplane: &Dataplane,
        parent: u32,
        known: Option<&WholeFilters>,
        host: &mut Handle,
    ) -> Result<Option<Lack>, HookError> {
        on(parent).lack(self.mode, dataplane.programs(), known, host)
    }

    /// Restores the programs of an attachment's parent if one is missing or comes after other programs. An
    /// attachment that is being removed may have been the last that needed them.
    pub(crate) fn restore(
        &self,
        dataplane: &Dataplane,
        id: u32,
        host: &mut Handle,
        rivals: &Rivals,
    ) -> Result<Restored, HookError> {
        let mut doubtful = self.turn();
        // The attachment may have been removed meanwhile, and the programs with the last one of its parent.
        let Some(parent) = dataplane.parents().parent_of(id) else { return Ok(Restored::default()) };
        let cover = |host: &mut Handle| self.cover(dataplane, parent, host);
        let restored = on(parent).restore(self.mode, dataplane.programs(), host, rivals, cover)?;
        if restored.made_clsact
            && let Some(known) = dataplane.parents().covered().get(&parent)
        {
            dataplane.parents().cover(parent, Parent { own_clsact: true, ..*known })?;
        }
        if restored.helped() {
            doubtful.remove(&parent);
        }
        Ok(restored)
    }

    fn cover(&self, dataplane: &Dataplane, parent: u32, host: &mut Handle) -> Result<(), HookError> {
        let known = dataplane.parents().covered().get(&parent).copied();
        let had_own_clsact = known.is_some_and(|known| known.own_clsact);
        let mode = on(parent).mode(self.mode)?;
        let what = self.entry(known, (parent, None), mode, host)?;
        dataplane.parents().cover(parent, what)?;
        let made_clsact = on(parent).attach(mode, dataplane.programs(), host)?;
        covered(dataplane, (parent, what), (mode, made_clsact), had_own_clsact, host)
    }

    /// The map entry of a parent before its programs are attached. `known`: the present entry; `card`:
    /// whether the parent is a network card, if known.
    fn entry(
        &self,
        known: Option<Parent>,
        (parent, card): (u32, Option<bool>),
        mode: AttachMode,
        host: &mut Handle,
    ) -> Result<Parent, HookError> {
        Ok(Parent {
            netns_cookie: host.netns_cookie(),
            card: match card {
                Some(card) => card,
                None => host.link_by_index(parent)?.is_card(),
            },
            strangers: self.strangers,
            own_clsact: match mode {
                // True until the answer is known: otherwise a `clsact` that is left over would never be
                // deleted.
                AttachMode::Clsact => known.is_none_or(|known| known.own_clsact),
                AttachMode::Tcx => known.is_some_and(|known| known.own_clsact),
            },
        })
    }

    fn turn(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        // No lock is poisoned: a panic ends the agent.
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Completes a parent whose programs have been attached in `mode`; `made_clsact`: whether that created a
/// `clsact`.
fn covered(
    dataplane: &Dataplane,
    (parent, what): (u32, Parent),
    (mode, made_clsact): (AttachMode, bool),
    had_own_clsact: bool,
    host: &mut Handle,
) -> Result<(), HookError> {
    // The other mode is detached last, so that each packet is judged by at least one of the two.
    on(parent).detach(mode.other(), dataplane.programs(), host, had_own_clsact)?;
    let own_clsact = mode == AttachMode::Clsact && (made_clsact || had_own_clsact);
    if own_clsact != what.own_clsact {
        dataplane.parents().cover(parent, Parent { own_clsact, ..what })?;
    }
    Ok(())
}

/// Detaches the programs of a parent, in either mode.
fn uncover(dataplane: &Dataplane, parent: u32, host: &mut Handle) -> Result<(), HookError> {
    let own_clsact = dataplane.parents().covered().get(&parent).is_some_and(|covered| covered.own_clsact);
    for mode in [AttachMode::Tcx, AttachMode::Clsact] {
        on(parent).detach(mode, dataplane.programs(), host, own_clsact)?;
    }
    Ok(dataplane.parents().uncover(parent)?)
}
