//! Attachments that other plugins made: where their programs run, and from when on.
//!
//! Their policies are in the maps from the ADD on, so that nothing is left to do but to run the programs. That waits, unless
//! it is asked for, until a policy selects the attachment: on a device in a pod it takes two grace periods, and source checks
//! might break what works without. Programs that run stay until the attachment ends.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::diff::Assignment;
use super::error::EnforceError;
use super::guarded::{Guarded, PodDevice};
use super::hooks::{self, AttachMode};
use super::level::{Enforcement, Level, Means, enforcement};
use super::sync::{Enforcer, State};
use super::upkeep::device_name;
use crate::bpf::{Dataplane, Device, Hook as Way, Program};
use crate::netlink::{Filter, Handle, Hook};
use crate::netns::within;
use crate::plan::{PodRef, Vantage, When};
use crate::source::objects::{ObjectName, Objects};

/// Our filters on devices in pods, by numbers that are none of those on parents and macvlans.
const FILTERS: [(Hook, u32, Way); 2] =
    [(Hook::Egress, 0x6e61_0003, Way::FromPod), (Hook::Ingress, 0x6e61_0004, Way::ToPod)];

/// Held while programs are run on a device or taken off: an attachment that ends meanwhile gets none.
#[derive(Debug, Default)]
pub(super) struct Turn(Mutex<()>);

impl Turn {
    fn take(&self) -> MutexGuard<'_, ()> {
        // What a panic left half done, the next repeats.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Whether an attachment is to be under programs that do not run yet.
    fn is_due(&self, id: u32) -> bool {
        self.waiting.contains_key(&id)
            && self.programmed.endpoints.get(&id).is_some_and(|assigned| *assigned != Assignment::default())
    }
}

impl Enforcer {
    /// Runs the programs of attachments that waited for the policy that they are under now.
    ///
    /// # Errors
    /// The first that failed; the others run. What failed is tried again.
    pub(super) fn begin_due(&self) -> Result<(), EnforceError> {
        let due: Vec<u32> = {
            let state = self.lock();
            state.waiting.keys().copied().filter(|id| state.is_due(*id)).collect()
        };
        let began: Vec<_> = due.into_iter().map(|id| self.begin_if_due(id).map(drop)).collect();
        began.into_iter().collect()
    }

    /// Runs the programs of an attachment if it waits for them and is to be under them, and says whether it did.
    pub(super) fn begin_if_due(&self, id: u32) -> Result<bool, EnforceError> {
        let _turn = self.turn.take();
        let waiting = {
            let state = self.lock();
            state.waiting.get(&id).filter(|_| state.is_due(id)).cloned()
        };
        // It may have ended, and its number may be another's.
        let Some(guarded) = waiting else { return Ok(false) };
        match self.run(&guarded, &mut Handle::open()?) {
            // Its pod is going, or has deleted the device.
            Err(error) if error.is_of_a_device_that_is_gone() => return Ok(false),
            other => other?,
        }
        self.lock().waiting.remove(&id);
        tracing::info!(attachment = guarded.whose, "programs run from now on: a policy selects it");
        Ok(true)
    }

    /// Whether an attachment's programs wait for a policy.
    pub fn is_waiting(&self, id: u32) -> bool {
        self.lock().waiting.contains_key(&id)
    }

    /// Runs the programs on the device of an attachment that has one of its own.
    pub(super) fn run(&self, guarded: &Guarded, host: &mut Handle) -> Result<(), EnforceError> {
        match (&guarded.device, &guarded.in_pod) {
            (Device::Own(index), _) => hooks::attach(self.modes.attachments, &self.dataplane, *index, host),
            (Device::InPod, Some(device)) => attach(self.modes.others, &self.dataplane, guarded.id, device),
            _ => Ok(()),
        }
    }

    /// The first program that does not run on the device of an attachment that has one of its own, in words.
    pub(super) fn missing(
        &self,
        guarded: &Guarded,
        host: &mut Handle,
    ) -> Result<Option<String>, EnforceError> {
        let missing = match (&guarded.device, &guarded.in_pod) {
            (Device::Own(index), _) => hooks::missing(self.modes.attachments, &self.dataplane, *index, host)?
                .map(|name| {
                    format!("program {name} is not attached to device {}", device_name(*index, host))
                }),
            (Device::InPod, Some(device)) => missing(self.modes.others, &self.dataplane, guarded.id, device)?
                .map(|name| format!("program {name} is not attached in the pod")),
            _ => None,
        };
        let state = self.lock();
        let waits = state.waiting.contains_key(&guarded.id) && !state.is_due(guarded.id);
        Ok(missing.filter(|_| !waits))
    }

    /// Runs programs that are missing on the device of an attachment that has one of its own, and says whether any were. One
    /// that is ending gets none.
    pub(super) fn run_again(&self, guarded: &Guarded, host: &mut Handle) -> Result<bool, EnforceError> {
        let _turn = self.turn.take();
        // Its number may be another's by now.
        let is_there = self.lock().whereabouts.get(&guarded.id) == Some(&guarded.whereabouts());
        if !is_there || self.missing(guarded, host)?.is_none() {
            return Ok(false);
        }
        self.run(guarded, host)?;
        Ok(true)
    }

    /// From here on nothing is run for an attachment, and nothing of ours on its device in the pod.
    pub(super) fn end(&self, id: u32) -> Result<(), EnforceError> {
        let known = {
            let mut state = self.lock();
            state.waiting.remove(&id);
            state.whereabouts.remove(&id)
        };
        if known.is_some_and(|known| !known.delegated) {
            return Ok(());
        }
        // Whoever has begun to run something for it is waited for.
        let _turn = self.turn.take();
        Ok(self.dataplane.in_pod().detach(id)?)
    }

    /// From now on an attachment waits for a policy, which it may be under already.
    pub(super) fn wait(&self, guarded: &Guarded) -> Result<(), EnforceError> {
        self.lock().waiting.insert(guarded.id, guarded.clone());
        self.begin_if_due(guarded.id).map(drop)
    }

    /// Takes over the programs on a device in a pod. `changed`: what runs may be other programs.
    pub(super) fn adopt_in_pod(&self, guarded: &Guarded, changed: bool) -> Result<(), EnforceError> {
        // Without its namespace the pod is gone: its DEL is still to come.
        let Some(device) = guarded.in_pod.as_ref().filter(|device| device.namespace().is_some()) else {
            return Ok(());
        };
        let (mode, dataplane, id) = (self.modes.others, &self.dataplane, guarded.id);
        let other = match mode {
            AttachMode::Clsact => AttachMode::Tcx,
            AttachMode::Tcx => AttachMode::Clsact,
        };
        let run = missing(mode, dataplane, id, device)?.is_none();
        if !run && guarded.when == When::Selected && missing(other, dataplane, id, device)?.is_some() {
            return self.wait(guarded);
        }
        if changed || !run {
            match attach(mode, dataplane, id, device) {
                // The pod has deleted the device.
                Err(error) if error.is_of_a_device_that_is_gone() => return Ok(()),
                other => other?,
            }
        }
        // Last, so that every packet is judged by one of the two.
        remove_others(mode, dataplane, id, device)
    }

    /// Removes the links on devices in pods of attachments that nobody knows.
    pub(super) fn sweep_pods(&self, known: &BTreeSet<u32>) -> Result<(), EnforceError> {
        for id in self.dataplane.in_pod().attached()?.difference(known) {
            self.dataplane.in_pod().detach(*id)?;
        }
        Ok(())
    }

    /// How far policies hold for an attachment of that pod.
    pub fn enforcement(&self, pod: Option<&PodRef>, vantage: &Vantage) -> Enforcement {
        let pod = pod.map(|pod| ObjectName::new(&pod.namespace, &pod.name));
        self.enforcement_in(&self.source.snapshot(), pod.as_ref(), vantage)
    }

    pub(super) fn enforcement_in(
        &self,
        objects: &Objects,
        pod: Option<&ObjectName>,
        vantage: &Vantage,
    ) -> Enforcement {
        let means = Means { in_pod: self.modes.others, knows_senders: self.knows_senders };
        enforcement(vantage, pod.and_then(|pod| objects.pods.get(pod)).map(AsRef::as_ref), means)
    }

    /// What keeps policies from holding for attachments of this node wherever that is not whatever the pod does, by number.
    pub(super) fn limited(&self, objects: &Objects, state: &State) -> Vec<(u32, Enforcement)> {
        let all = state.endpoints.values().filter_map(|endpoint| {
            let seen = state.whereabouts.get(&endpoint.id)?;
            Some((endpoint.id, self.enforcement_in(objects, Some(&endpoint.pod), &seen.vantage)))
        });
        all.filter(|(_, enforcement)| enforcement.level != Level::Full).collect()
    }
}

/// Runs the programs on a device in a pod. Whose it was may be gone: that is for its DEL.
fn attach(mode: AttachMode, dataplane: &Dataplane, id: u32, device: &PodDevice) -> Result<(), EnforceError> {
    let netns = device.namespace().ok_or(EnforceError::PodGone)?;
    match mode {
        AttachMode::Tcx => Ok(within(&netns, || dataplane.in_pod().attach(id, device.index))??),
        AttachMode::Clsact => {
            let filters = filters(dataplane, id)?;
            Handle::open_in(&netns)?.ensure_filters(device.index, &filters)?;
            Ok(())
        }
    }
}

/// The first program that does not run on a device in a pod. Where the pod is gone none is missing.
fn missing(
    mode: AttachMode,
    dataplane: &Dataplane,
    id: u32,
    device: &PodDevice,
) -> Result<Option<&'static str>, EnforceError> {
    if mode == AttachMode::Tcx {
        return Ok(dataplane.in_pod().missing(id, device.index)?);
    }
    let Some(netns) = device.namespace() else { return Ok(None) };
    let mut pod = Handle::open_in(&netns)?;
    for (hook, _, way) in FILTERS {
        let name = Program::InPod(way).name();
        let found = pod.find_filters(device.index, hook)?;
        if !found.iter().any(|found| found.name.as_deref() == Some(name)) {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// Takes off a device in a pod what an agent of the other mode attached.
fn remove_others(
    mode: AttachMode,
    dataplane: &Dataplane,
    id: u32,
    device: &PodDevice,
) -> Result<(), EnforceError> {
    match (mode, device.namespace()) {
        (AttachMode::Clsact, _) => Ok(dataplane.in_pod().detach(id)?),
        (AttachMode::Tcx, Some(netns)) => {
            let filters = FILTERS.map(|(hook, handle, _)| (hook, handle));
            Ok(Handle::open_in(&netns)?.ensure_filters_absent(device.index, &filters, false)?)
        }
        (AttachMode::Tcx, None) => Ok(()),
    }
}

/// What runs on a device in a pod by filters, whose class says whose the packets are.
fn filters(dataplane: &Dataplane, id: u32) -> Result<[Filter<'_>; 2], EnforceError> {
    let class = u16::try_from(id).map_err(|_| EnforceError::NoClass(id))?;
    Ok(FILTERS.map(|(hook, handle, way)| {
        let (name, program) = (Program::InPod(way).name(), dataplane.in_pod().program(way));
        Filter { hook, handle, class, name, program }
    }))
}
