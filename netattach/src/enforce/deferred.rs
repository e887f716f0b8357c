//! Attachments that other plugins made: where their programs run, and from when on.
//!
//! Their policies are in the maps from the ADD on, so that nothing is left to do but to run the programs. That waits, unless
//! it is asked for, until a policy selects the attachment: on a device in a pod it takes two grace periods, and source checks
//! might break what works without. Programs that run stay until the attachment ends.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::attachment::Guarded;
use super::enforcer::{Enforcer, Point, State};
use super::error::EnforceError;
use super::level::{Means, enforcement};
use super::verify::not_attached;
use crate::bpf::PolicyIds;
use crate::hooks::{HookPoint, PodDevice, node_end, pod};
use crate::netlink::Handle;
use crate::objects::{ObjectName, Objects};
use crate::plan::PodRef;
use crate::policy::level::{Enforcement, Level};
use crate::step::{Vantage, When};

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
            && self.programmed.endpoints.get(&id).is_some_and(|assigned| *assigned != PolicyIds::default())
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
        if let Some(device) = guarded.point.own_device(guarded.id)? {
            device.attach(self.modes.at(&guarded.point), self.dataplane.programs(), host)?;
        }
        Ok(())
    }

    /// The first program that does not run on the device of an attachment that has one of its own, in words.
    pub(super) fn missing(
        &self,
        guarded: &Guarded,
        host: &mut Handle,
    ) -> Result<Option<String>, EnforceError> {
        let missing = match guarded.point.own_device(guarded.id)? {
            Some(device) => device.missing(self.modes.at(&guarded.point), self.dataplane.programs(), host)?,
            None => None,
        };
        let missing = missing.map(|name| match guarded.point {
            HookPoint::Pod(_) => format!("program {name} is not attached in the pod"),
            _ => not_attached(name, guarded.host_index(), host),
        });
        let state = self.lock();
        let waits = state.waiting.contains_key(&guarded.id) && !state.is_due(guarded.id);
        Ok(missing.filter(|_| !waits))
    }

    /// Runs programs that are missing on the device of an attachment that has one of its own, and says whether any were. One
    /// that is ending gets none.
    pub(super) fn run_again(&self, guarded: &Guarded, host: &mut Handle) -> Result<bool, EnforceError> {
        let _turn = self.turn.take();
        // Its number may be another's by now.
        let is_there = self.lock().points.get(&guarded.id) == Some(&Point::of(guarded));
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
            state.points.remove(&id)
        };
        if known.is_some_and(|known| !known.delegated) {
            return Ok(());
        }
        // Whoever has begun to run something for it is waited for.
        let _turn = self.turn.take();
        Ok(pod::unlink(id, self.dataplane.programs())?)
    }

    /// Takes the links off the node's ends of an attachment's link.
    pub(super) fn unlink_node_ends(&self, devices: &[u32]) -> Result<(), EnforceError> {
        let programs = self.dataplane.programs();
        Ok(devices.iter().try_for_each(|device| node_end::on(*device).unlink(programs))?)
    }

    /// From now on an attachment waits for a policy, which it may be under already.
    pub(super) fn wait(&self, guarded: &Guarded) -> Result<(), EnforceError> {
        self.lock().waiting.insert(guarded.id, guarded.clone());
        self.begin_if_due(guarded.id).map(drop)
    }

    /// Takes over the programs on a device in a pod. `changed`: what runs may be other programs.
    pub(super) fn adopt_in_pod(
        &self,
        guarded: &Guarded,
        device: &PodDevice,
        changed: bool,
        host: &mut Handle,
    ) -> Result<(), EnforceError> {
        if device.namespace().is_none() {
            // The pod is gone: its DEL is still to come.
            return Ok(());
        }
        let (mode, programs) = (self.modes.others, self.dataplane.programs());
        let device = pod::on(guarded.id, device)?;
        let run = device.missing(mode, programs, host)?.is_none();
        if !run && guarded.when == When::Selected && device.missing(mode.other(), programs, host)?.is_some() {
            return self.wait(guarded);
        }
        if changed || !run {
            match device.attach(mode, programs, host).map(drop) {
                // The pod has deleted the device.
                Err(error) if error.is_of_a_device_that_is_gone() => return Ok(()),
                other => other?,
            }
        }
        // Last, so that every packet is judged by one of the two.
        Ok(device.detach(mode.other(), programs, host, false)?)
    }

    /// Removes the links on devices in pods of attachments that nobody knows.
    pub(super) fn sweep_pods(&self, known: &BTreeSet<u32>) -> Result<(), EnforceError> {
        Ok(pod::sweep(self.dataplane.programs(), known)?)
    }

    /// How far policies hold for an attachment of that pod.
    pub fn enforcement(&self, pod: Option<&PodRef>, vantage: &Vantage) -> Enforcement {
        let pod = pod.map(|pod| pod.name.clone());
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
            let seen = state.points.get(&endpoint.id)?;
            Some((endpoint.id, self.enforcement_in(objects, Some(&endpoint.pod), &seen.point.vantage())))
        });
        all.filter(|(_, enforcement)| enforcement.level != Level::Full).collect()
    }
}
