//! Parents of macvlans: the programs are on a parent as long as it carries attachments, by filters or by tcx links.
//!
//! Order makes every moment safe, and every crash repairable: a parent is entered in the map before the first program is
//! attached to it, and taken out after the last is gone. What is entered and carries nothing is swept at start. Where the mode
//! is another than an earlier agent's, its programs go after this agent's have come.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use netattach_common::parent::place;

use super::numbers::{FROM, TO};
use super::{AttachMode, HookError, PodDevice};
use crate::bpf::{Dataplane, Hook as Way, OnParent, Parent, Program};
use crate::netlink::{Filter, Handle, Hook};

/// Where the programs of a parent run by filters, and which.
const ON_PARENT: [(Hook, u32, Way, u16); 3] = [
    (Hook::Ingress, FROM, Way::FromPod, place::INGRESS),
    (Hook::Ingress, TO, Way::ToPod, place::INGRESS),
    (Hook::Egress, FROM, Way::FromPod, place::EGRESS),
];

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
            dataplane.bind_macvlan(id, on)?;
            if !dataplane.covered_parents().contains_key(&on.parent) {
                self.cover(dataplane, on.parent, host)?;
            }
        }
        ensure_copies_judged(dataplane, id, macvlan, pod)
    }

    /// Forgets an attachment; the programs leave a parent with its last.
    pub(crate) fn detach(&self, dataplane: &Dataplane, id: u32) -> Result<(), HookError> {
        let Some(parent) = dataplane.parent_of(id) else {
            return Ok(dataplane.remove_attachment(id)?);
        };
        let _turn = self.turn();
        dataplane.remove_attachment(id)?;
        if dataplane.parents_in_use().contains(&parent) {
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
    ) -> Result<(), HookError> {
        dataplane.bind_macvlan(id, on)?;
        if !changed {
            return Ok(());
        }
        // Without its namespace the pod is gone: its DEL is still to come.
        let Some(netns) = macvlan.namespace() else { return Ok(()) };
        let mut pod = Handle::open_in(&netns)?;
        match ensure_copies_judged(dataplane, id, macvlan, &mut pod) {
            // The pod has deleted it.
            Err(HookError::Netlink(error)) if error.not_found() => Ok(()),
            other => other,
        }
    }

    /// After all attachments have been taken over: every parent runs this agent's programs. When those attachments are
    /// `all`, a parent that carries none runs none.
    pub(crate) fn adopt_all(&self, dataplane: &Dataplane, all: bool, host: &mut Handle) -> Vec<HookError> {
        let _turn = self.turn();
        let in_use = dataplane.parents_in_use();
        let mut covered: BTreeSet<u32> = dataplane.covered_parents().into_keys().collect();
        match dataplane.parent_links().parents() {
            // Those of earlier maps.
            Ok(linked) => covered.extend(linked),
            Err(error) => return vec![error.into()],
        }
        let stale = covered.iter().filter(|parent| all && !in_use.contains(parent));
        let removed = stale.map(|parent| uncover(dataplane, *parent, &mut *host)).collect::<Vec<_>>();
        let wanted = in_use.iter().chain(covered.iter().filter(|parent| !all && !in_use.contains(parent)));
        let ensured = wanted.map(|parent| match self.cover(dataplane, *parent, &mut *host) {
            // The device is gone, and the macvlans with it.
            Err(error) if error.is_of_a_device_that_is_gone() => Ok(()),
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
        match self.mode {
            AttachMode::Clsact => missing_filter(host, parent),
            AttachMode::Tcx => Ok(dataplane.parent_links().missing(parent)?),
        }
    }

    /// Puts the programs of an attachment's parent back where somebody has taken one off, and says whether it did. An
    /// attachment that is going may have been the last that needed them.
    pub(crate) fn restore(
        &self,
        dataplane: &Dataplane,
        id: u32,
        host: &mut Handle,
    ) -> Result<bool, HookError> {
        let _turn = self.turn();
        // It may have gone meanwhile, and the programs with the last of its parent.
        let Some(parent) = dataplane.parent_of(id) else { return Ok(false) };
        if self.missing(dataplane, parent, host)?.is_none() {
            return Ok(false);
        }
        self.cover(dataplane, parent, host)?;
        Ok(true)
    }

    fn cover(&self, dataplane: &Dataplane, parent: u32, host: &mut Handle) -> Result<(), HookError> {
        let known = dataplane.covered_parents().get(&parent).copied();
        let had_own_clsact = known.is_some_and(|known| known.own_clsact);
        let what = Parent {
            netns_cookie: host.netns_cookie(),
            // Of a kind that the kernel has no name for: a driver's own.
            card: host.link_by_index(parent)?.kind.is_empty(),
            strangers: self.strangers,
            own_clsact: match self.mode {
                // Until it is known: one that is left over would be nobody's.
                AttachMode::Clsact => known.is_none_or(|known| known.own_clsact),
                AttachMode::Tcx => had_own_clsact,
            },
        };
        dataplane.cover_parent(parent, what)?;
        let own_clsact = match self.mode {
            AttachMode::Clsact => {
                let filters =
                    ON_PARENT.map(|(hook, handle, way, class)| filter(dataplane, hook, handle, way, class));
                let made = host.ensure_filters(parent, &filters)?;
                dataplane.parent_links().detach(parent)?;
                made || had_own_clsact
            }
            AttachMode::Tcx => {
                dataplane.parent_links().attach(parent)?;
                remove_filters(parent, had_own_clsact, host)?;
                false
            }
        };
        if own_clsact != what.own_clsact {
            dataplane.cover_parent(parent, Parent { own_clsact, ..what })?;
        }
        Ok(())
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        // What a panic left half done, the next repeats.
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes the programs off a parent, in whatever mode they were attached.
fn uncover(dataplane: &Dataplane, parent: u32, host: &mut Handle) -> Result<(), HookError> {
    let own_clsact = dataplane.covered_parents().get(&parent).is_some_and(|covered| covered.own_clsact);
    dataplane.parent_links().detach(parent)?;
    remove_filters(parent, own_clsact, host)?;
    Ok(dataplane.uncover_parent(parent)?)
}

fn remove_filters(parent: u32, own_clsact: bool, host: &mut Handle) -> Result<(), HookError> {
    let filters = ON_PARENT.map(|(hook, handle, ..)| (hook, handle));
    Ok(host.ensure_filters_absent(parent, &filters, own_clsact)?)
}

/// The first program that no filter runs on a parent.
fn missing_filter(host: &mut Handle, parent: u32) -> Result<Option<&'static str>, HookError> {
    for hook in [Hook::Ingress, Hook::Egress] {
        let found = host.find_filters(parent, hook)?;
        for (_, _, way, _) in ON_PARENT.iter().filter(|(at, ..)| *at == hook) {
            let name = Program::OnParent(*way).name();
            if !found.iter().any(|filter| filter.name.as_deref() == Some(name)) {
                return Ok(Some(name));
            }
        }
    }
    Ok(None)
}

/// The driver copies multicast and broadcast frames to each macvlan past the parent's hooks: each is judged where it
/// arrives.
fn ensure_copies_judged(
    dataplane: &Dataplane,
    id: u32,
    macvlan: &PodDevice,
    pod: &mut Handle,
) -> Result<(), HookError> {
    // Numbers of attachments are below `place::INGRESS`: the settings bound them.
    let class = u16::try_from(id).map_err(|_| HookError::NoClass(id))?;
    let filters = [(FROM, Way::FromPod), (TO, Way::ToPod)]
        .map(|(handle, way)| filter(dataplane, Hook::Ingress, handle, way, class));
    pod.ensure_filters(macvlan.index, &filters)?;
    Ok(())
}

fn filter(dataplane: &Dataplane, hook: Hook, handle: u32, way: Way, class: u16) -> Filter<'_> {
    let name = Program::OnParent(way).name();
    Filter { hook, handle, class, name, program: dataplane.parent_program(way) }
}
