//! Gives back devices whose pods' namespaces are gone without a DEL, and notes in their records that they have gone
//! back.

use std::collections::BTreeMap;
use std::sync::{MutexGuard, PoisonError};

use super::Devices;
use super::held::{Held, State};
use crate::attach::device::give_back::{self, PodEnd};
use crate::attach::device::representor;
use crate::attach::engine::Engine;
use crate::attach::{AttachError, Node, StepError};
use crate::error_chain::Chain;
use crate::journal::{JournalKey, Loaded};
use crate::netlink::Handle;
use crate::spec;
use crate::step::{Claim, Home};

impl Engine {
    /// Gives back devices whose pods' namespaces are gone: the kernel has brought them back to the node under the
    /// names that they had in the pods. Their records stay until DEL; [`Engine::write_returned`] notes in them that
    /// the devices have gone back. Costs nothing while no pod holds a device.
    pub fn settle_orphans(&self) {
        self.node.devices.settle_orphans(|held| settle(&self.node, held), make_way);
    }

    /// Returns the records that may not yet say which of their devices have gone back without a DEL.
    pub fn unwritten_returns(&self) -> Vec<JournalKey> {
        self.node.devices.unwritten()
    }

    /// Writes into a record which of its devices have gone back, in the container's turn, so that a restarted agent
    /// leaves those devices alone. A failed write is logged once and must be retried.
    pub fn write_returned(&self, key: &JournalKey) {
        let was_said = self.node.devices.take_unwritten(key);
        let loaded = self.journal.load(key).map_err(AttachError::from);
        let written = loaded.and_then(|loaded| match loaded {
            Loaded::Whole(mut record) => Ok(self.note_returned(&mut record)?),
            Loaded::Absent | Loaded::Torn { .. } => Ok(()),
        });
        if let Err(error) = written {
            if !was_said {
                let container = &key.container_id;
                tracing::warn!(container, error = %Chain(&error), "journal not written: a device has gone back");
            }
            self.node.devices.stays_unwritten(key);
        }
    }
}

impl Devices {
    /// Calls `settle` for each device of a sandbox whose namespace is gone, until `settle` has succeeded once for
    /// that device. First calls `make_way` for all of these devices, because one may occupy the name of another. No
    /// other sandbox can claim a device during its call. Devices that processes drive wait for a DEL or for the next
    /// claim.
    pub(super) fn settle_orphans(
        &self,
        mut settle: impl FnMut(&Held) -> Result<(), StepError>,
        make_way: impl FnMut(&Home) -> Result<(), StepError>,
    ) {
        self.make_way(make_way);
        for (device, held) in self.orphans().filter(|(_, held)| held.is_found_out()) {
            let begun = self.begin(self.lock(), (&device, held.generation, &held.owner));
            let Some(returning) = begun else { continue };
            match settle(&held) {
                Ok(()) => {
                    returning.done();
                    // Only after `done`: a record written earlier would not yet say that the device has gone back.
                    self.records().entry(held.record()).or_insert(false);
                    tracing::info!(device, of = held.who, "given back: the pod's namespace is gone");
                }
                Err(error) => tracing::debug!(device, error = %Chain(&error), "not given back yet"),
            }
        }
    }

    /// Calls `make_way` for each device whose pod is gone and that has not been given back. During the call no other
    /// thread gives the device back, as a device that has been given back would lose its restored name.
    pub(super) fn make_way(&self, mut make_way: impl FnMut(&Home) -> Result<(), StepError>) {
        for (key, held) in self.orphans() {
            // Any other device ends with its pod's namespace; a device with that name on the node is a different one.
            let outlives = |(_, claim): &&(spec::Device, Claim)| claim.outlives_namespace();
            let Some((device, claim)) = held.claim.as_ref().filter(outlives) else { continue };
            let Some(home) = &claim.home else { continue };
            let begun = self.begin(self.lock(), (&key, held.generation, &held.owner));
            let Some(_returning) = begun else { continue };
            let of = (device, held.sandbox.netns.as_str());
            if let Err(error) = self.sriov_cni.unless_anothers(of, None, |_| make_way(home)) {
                tracing::debug!(device = claim.device, error = %Chain(&error), "keeps the names that it has");
            }
        }
    }

    /// Returns the devices, with their keys, whose pods are gone and that no thread has given back or is giving back.
    /// Namespaces are looked up without the lock.
    fn orphans(&self) -> impl Iterator<Item = (String, Held)> {
        let table = self.lock();
        let held = table.held.iter().filter(|(_, held)| held.state == State::Held);
        let held: Vec<(String, Held)> = held.map(|(device, held)| (device.clone(), held.clone())).collect();
        drop(table);
        held.into_iter().filter(|(_, held)| held.is_orphan())
    }

    /// Returns the records that may not yet say which of their devices have gone back.
    pub(super) fn unwritten(&self) -> Vec<JournalKey> {
        self.records().keys().cloned().collect()
    }

    /// Removes a record from the list before it is written. Returns whether an earlier failed write was logged.
    fn take_unwritten(&self, key: &JournalKey) -> bool {
        self.records().remove(key).unwrap_or_default()
    }

    /// Puts a record on the list after a failed write that was logged.
    pub(in crate::attach) fn stays_unwritten(&self, key: &JournalKey) {
        self.records().insert(key.clone(), true);
    }

    pub(super) fn records(&self) -> MutexGuard<'_, BTreeMap<JournalKey, bool>> {
        self.unwritten.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Frees names of other devices that a device occupies after it came back from a pod.
///
/// # Errors
/// The kernel refuses.
pub(in crate::attach) fn make_way(home: &Home) -> Result<(), StepError> {
    give_back::make_way(&mut Handle::open()?, home)
}

/// Gives back the device of a sandbox whose namespace is gone, and detaches the sandbox's programs: they came back
/// with the device and would filter the traffic of its next pod.
///
/// # Errors
/// The device is in no known namespace, or the card refuses.
pub(in crate::attach::device) fn settle(node: &Node, held: &Held) -> Result<(), StepError> {
    let Some((device, claim)) = &held.claim else { return Ok(()) };
    // Does not wait for sriov-cni's lock (`None`): neither the next devices of a check nor an ADD, which occupies its
    // slot, wait for sriov-cni.
    node.devices.sriov_cni.give_back((device, &held.sandbox.netns), None, || {
        give_back::give_back(&mut Handle::open()?, device, claim, PodEnd::Gone)?;
        representor::leave(node, held.number, claim)
    })?;
    representor::leave_programs(node, held.number, claim)?;
    match (&node.enforcer, held.number) {
        (Some(enforcer), Some(number)) if claim.outlives_namespace() => Ok(enforcer.leave_device(number)?),
        _ => Ok(()),
    }
}
