//! Parents of macvlans: the programs are on a parent as long as it carries attachments, by filters or by tcx links.
//!
//! Order makes every moment safe, and every crash repairable: a parent is entered in the map before the first program is
//! attached to it, and taken out after the last is gone. What is entered and carries nothing is swept at start. Where the mode
//! is another than an earlier agent's, its programs go after this agent's have come.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use netattach_common::parent::place;

use super::device::{DeviceHooks, HookProgram, Lack, Restored};
use super::numbers::{FROM, TO};
use super::pod::class;
use super::{AttachMode, HookError, PodDevice, Rivals};
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
    DeviceHooks { index: ifindex, pod: None, programs: programs.into(), first: true }
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

/// A macvlan that is put under the programs of its parent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Macvlan<'a> {
    /// Its attachment.
    pub(crate) id: u32,
    /// The parent.
    pub(crate) on: &'a OnParent,
    /// Whether the parent is a card, if the caller knows.
    pub(crate) on_card: Option<bool>,
    pub(crate) macvlan: &'a PodDevice,
}

/// Macvlans that are entered, with those of their parents that may have no programs yet. Nothing happens on any parent before
/// this is finished, if there are such parents.
#[must_use]
pub(crate) struct Entered<'p> {
    turn: Option<MutexGuard<'p, BTreeSet<u32>>>,
    bare: Vec<Bare>,
}

/// A parent that is entered and may have no programs yet.
struct Bare {
    /// Position of its first macvlan.
    at: usize,
    parent: u32,
    /// How it gets them.
    mode: AttachMode,
    what: Parent,
    /// Whether its `clsact` was this agent's before.
    had_own_clsact: bool,
}

impl Entered<'_> {
    /// The programs of the parents that have none yet and how to attach them, each with the position of a macvlan there.
    pub(crate) fn bare(&self) -> impl Iterator<Item = (usize, (AttachMode, DeviceHooks<'static>))> + '_ {
        self.bare.iter().map(|bare| (bare.at, (bare.mode, on(bare.parent))))
    }

    /// The programs are attached, as far as that went. `made_clsact`: whether it made one, for each parent; `None` where it failed,
    /// and nothing from where nothing was tried. Whoever comes next on a parent without attaches its programs, whether it has
    /// pods or not; with its last pod they are taken off.
    ///
    /// # Errors
    /// The position of the first where what was left to do failed, and how.
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
                // It may have made one.
                Some(None) => Ok(false),
                // One that is there is not this agent's.
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

/// Keeps the parents' programs.
#[derive(Debug)]
pub(crate) struct Parents {
    /// How they are attached, unless programs of others ask for tcx ([`DeviceHooks::mode`]).
    mode: AttachMode,
    /// Whether frames of macvlans that are no attachment's pass.
    strangers: bool,
    /// Held while it is decided whether a parent is the first or the last of its kind, and while that is carried out. The
    /// parents that are entered and may lack programs, as attaching them failed: at most those that carry attachments.
    turn: Mutex<BTreeSet<u32>>,
}

impl Parents {
    pub(crate) fn new(mode: AttachMode, strangers: bool) -> Self {
        Self { mode, strangers, turn: Mutex::default() }
    }

    /// Enters macvlans of one pod, and those of their parents that have no programs: these are attached by the caller,
    /// together with others, before anything else happens on a parent. Their records are written and the macvlans are down.
    ///
    /// # Errors
    /// The position of the first that failed, and how.
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
                // The first failure is the one to tell.
                let _ = entered.finish(dataplane, &[], host);
                return Err((at, error));
            }
        }
        // Nobody has to wait for what concerns no parent.
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

    /// Puts the programs that judge copies of group frames on macvlans of one pod, which are down.
    ///
    /// # Errors
    /// The position of the first that failed, and how.
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

    /// Forgets an attachment; the programs leave a parent with its last.
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

    /// The first program that is missing on a parent, or behind those of others.
    pub(crate) fn missing(
        &self,
        dataplane: &Dataplane,
        parent: u32,
        host: &mut Handle,
    ) -> Result<Option<Lack>, HookError> {
        on(parent).lack(self.mode, dataplane.programs(), host)
    }

    /// Puts the programs of an attachment's parent back where one is missing or behind those of others. An attachment that is
    /// going may have been the last that needed them.
    pub(crate) fn restore(
        &self,
        dataplane: &Dataplane,
        id: u32,
        host: &mut Handle,
        rivals: &Rivals,
    ) -> Result<Restored, HookError> {
        let mut doubtful = self.turn();
        // It may have gone meanwhile, and the programs with the last of its parent.
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

    /// What is entered of a parent before it has its programs. `known`: what is there already; `card`: whether it is one, where
    /// that is known.
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
                // Until it is known: one that is left over would never be removed.
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

/// What is left to do when a parent has its programs; `how` they were attached, and whether that made a `clsact`.
fn covered(
    dataplane: &Dataplane,
    (parent, what): (u32, Parent),
    (mode, made_clsact): (AttachMode, bool),
    had_own_clsact: bool,
    host: &mut Handle,
) -> Result<(), HookError> {
    // Last, so that every packet is judged by one of the two.
    on(parent).detach(mode.other(), dataplane.programs(), host, had_own_clsact)?;
    let own_clsact = mode == AttachMode::Clsact && (made_clsact || had_own_clsact);
    if own_clsact != what.own_clsact {
        dataplane.parents().cover(parent, Parent { own_clsact, ..what })?;
    }
    Ok(())
}

/// Takes the programs off a parent, in either mode.
fn uncover(dataplane: &Dataplane, parent: u32, host: &mut Handle) -> Result<(), HookError> {
    let own_clsact = dataplane.parents().covered().get(&parent).is_some_and(|covered| covered.own_clsact);
    for mode in [AttachMode::Tcx, AttachMode::Clsact] {
        on(parent).detach(mode, dataplane.programs(), host, own_clsact)?;
    }
    Ok(dataplane.parents().uncover(parent)?)
}
