//! Tracks which attachment holds which device of the node. If records contain several claims of one device, the
//! newest claim counts: a late DEL finds that the device belongs to another sandbox, and leaves the device alone.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::give_back::{self, PodEnd};
use super::representor;
use super::sriov_cni::SriovCni;
use crate::attach::apply::owner;
use crate::attach::engine::Engine;
use crate::attach::{AttachError, Node, StepError};
use crate::error_chain::Chain;
use crate::ipam::Owner;
use crate::journal::{JournalKey, Loaded, Record};
use crate::netlink::Handle;
use crate::netns::{Netns, NetnsId};
use crate::plan::{AttachmentPlan, Sandbox, result};
use crate::spec;
use crate::step::{Claim, Home, Output, Step};
use crate::waits;

/// How long a DEL waits while another thread gives the device back: a card's firmware may take seconds. If the
/// firmware hangs, the thread that gives the device back stays blocked in the kernel; the DEL fails, and the runtime
/// retries it.
const PATIENCE: Duration = Duration::from_secs(10);

/// The claims of all attachments, by device. Kept in memory; the journal's records contain the claims too.
#[derive(Debug, Default)]
pub struct Devices {
    /// Locked to read or assign entries, never across a system call: a thread that gives a device back marks the
    /// entry as [`State::Returning`] and unlocks the table.
    table: Mutex<Table>,
    /// Notified when a device has been given back, or when that has failed.
    returned: Condvar,
    /// The records that may not yet say that a device of theirs has gone back or belongs to another sandbox. The
    /// value tells whether a failed write of that record was logged. Has a lock of its own, not `table`: the
    /// runtime's thread reads it.
    unwritten: Mutex<BTreeMap<JournalKey, bool>>,
    /// The holders of VFs according to the files of sriov-cni.
    pub(in crate::attach) sriov_cni: SriovCni,
}

#[derive(Debug, Default)]
struct Table {
    held: BTreeMap<String, Held>,
    /// The number of the newest claim of all devices. Does not decrease while a record contains a claim with an older
    /// number.
    newest: u64,
}

/// The newest claim of a device.
#[derive(Debug, Clone)]
pub(super) struct Held {
    owner: Owner,
    /// The owner as text for messages.
    who: String,
    generation: u64,
    /// The namespace that the device was claimed for.
    sandbox: Sandbox,
    cookie: u64,
    state: State,
    /// The attachment's number in the dataplane, if it is enforced.
    number: Option<u32>,
    /// The claimed device and its state before the claim; `None` until both are known.
    claim: Option<(spec::Device, Claim)>,
    /// The device's index in the pod; `None` if the device was not moved, or if the agent was killed before it
    /// recorded the index.
    made: Option<u32>,
}

/// Whether a device is held, or has been given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The attachment holds the device.
    Held,
    /// A thread is giving the device back: no other thread does so, no attachment can claim the device, and the
    /// holder's DEL waits.
    Returning,
    /// The device was given back; the holder's record still exists.
    Returned,
}

/// A device that appears in a record.
#[derive(Debug, Clone)]
pub(super) struct Known {
    /// The key of the device's claims.
    pub key: String,
    /// The device's interface on the node, if it has one.
    pub home: Option<Home>,
    /// Whether it was given back.
    pub is_back: bool,
}

/// Another device of the node that the same pod holds.
#[derive(Debug, Clone)]
pub(in crate::attach) struct Other {
    /// The device's state on the node before the claim.
    pub home: Home,
    /// The device's index in the pod, if known.
    pub made: Option<u32>,
}

/// A device that a thread is giving back. Unless [`Returning::done`] was called, dropping this leaves the device with
/// its holder.
struct Returning<'d> {
    devices: &'d Devices,
    device: String,
    generation: u64,
    owner: Owner,
    is_back: bool,
}

impl Returning<'_> {
    /// Notes that the device has gone back.
    fn done(mut self) {
        self.is_back = true;
    }
}

impl Drop for Returning<'_> {
    fn drop(&mut self) {
        let mut table = self.devices.lock();
        // The entry may already be a newer claim, which is left alone.
        if let Some(held) = table.held.get_mut(&self.device)
            && held.is_claim(self.generation, &self.owner)
        {
            held.state = if self.is_back { State::Returned } else { State::Held };
        }
        drop(table);
        self.devices.returned.notify_all();
    }
}

impl Held {
    /// The key of the record that has the claim.
    fn record(&self) -> JournalKey {
        let Sandbox { container_id, ifname, .. } = &self.sandbox;
        JournalKey { container_id: container_id.clone(), ifname: ifname.clone() }
    }

    /// Whether the pod is gone while its device has not been given back.
    fn is_orphan(&self) -> bool {
        self.state == State::Held && self.claim.is_some() && !self.is_alive()
    }

    /// Whether [`Held::is_orphan`] is conclusive for this device. An interface is either brought back to the node by
    /// the kernel or not found at all. If a process drives the device (userspace driver), the agent cannot tell
    /// whether that process has ended: the process may see its namespace at a path that the agent does not see.
    /// Resetting such a device's settings would release the process from its VLAN.
    fn is_found_out(&self) -> bool {
        self.claim.as_ref().is_some_and(|(_, claim)| claim.home.is_some())
    }

    /// Whether this is the claim of `owner` with number `generation`.
    fn is_claim(&self, generation: u64, owner: &Owner) -> bool {
        self.generation == generation && self.owner == *owner
    }

    /// Whether the device cannot be claimed by `owner`: a thread is giving the device back, or another owner holds it
    /// whose namespace still exists.
    fn is_taken_from(&self, owner: &Owner) -> bool {
        self.state == State::Returning || (self.owner != *owner && self.is_alive())
    }

    /// The error for an attachment that must claim the device again later.
    fn taken(&self, device: &str) -> StepError {
        let (device, container) = (device.to_owned(), self.owner.container_id.clone());
        StepError::DeviceTaken { device, who: self.who.clone(), container }
    }

    /// Whether the namespace that the device was claimed for still exists.
    fn is_alive(&self) -> bool {
        // 0: the kernel has no namespace cookies, or the record has lost the cookie.
        let cookie = Some(self.cookie).filter(|cookie| *cookie != 0);
        let found = Netns::of(&self.sandbox.netns, self.sandbox.netns_id, cookie);
        // If the lookup fails, the namespace may exist.
        found.map_or(true, |netns| netns.is_some())
    }
}

impl Devices {
    /// Claims a device for an attachment in the namespace with that cookie, and returns the number of the claim. If
    /// the current holder's namespace is gone, `settle` first gives the device back; if that fails, the holder keeps
    /// the device. From the begin of `settle` until the new claim is in the table, no other claim of the device
    /// succeeds.
    ///
    /// # Errors
    /// A sandbox that exists holds the device, another thread is giving it back, another attachment has claimed it
    /// meanwhile, or `settle` failed.
    pub(super) fn claim(
        &self,
        device: &str,
        (sandbox, attachment, cookie): (&Sandbox, &AttachmentPlan, u64),
        settle: impl FnOnce(&Held) -> Result<(), StepError>,
    ) -> Result<u64, StepError> {
        let owner = owner(sandbox, attachment);
        let before = self.lock().held.get(device).cloned();
        let mut returning = None;
        if let Some(before) = &before {
            if before.is_taken_from(&owner) {
                return Err(before.taken(device));
            }
            if before.state == State::Held {
                let begun = self.begin(self.lock(), (device, before.generation, &before.owner));
                let begun = begun.ok_or_else(|| before.taken(device))?;
                settle(before)?;
                returning = Some(begun);
            }
        }
        let mut table = self.lock();
        // If nothing had to be given back, another attachment may have claimed the device since the lock was
        // released.
        let is_before =
            |now: &Held| before.as_ref().is_some_and(|it| it.is_claim(now.generation, &now.owner));
        if let Some(now) = table.held.get(device).filter(|now| !is_before(now)) {
            return Err(now.taken(device));
        }
        table.newest += 1;
        let generation = table.newest;
        table.held.insert(device.to_owned(), entry(owner, sandbox, attachment, (generation, cookie)));
        drop(table);
        // If the former holder's DEL waits, it now finds the new claim.
        drop(returning);
        if let Some(before) = before {
            // The new claim's record also shows that the former claim has ended, but may be removed before the former
            // record.
            self.records().insert(before.record(), false);
        }
        Ok(generation)
    }

    /// Stores the device and its state for a claim, once both are known.
    pub(super) fn found(&self, device: &spec::Device, claim: &Claim) {
        if let Some(held) = self.lock().held.get_mut(&claim.device)
            && held.generation == claim.generation
        {
            held.claim = Some((device.clone(), claim.clone()));
        }
    }

    /// Stores the index that a claimed device has in its pod after the move.
    pub(in crate::attach) fn moved(&self, claim: &Claim, index: u32) {
        if let Some(held) = self.lock().held.get_mut(&claim.device)
            && held.generation == claim.generation
        {
            held.made = Some(index);
        }
    }

    /// Returns the devices that records contain. To compare them with the node's devices, list the node's devices
    /// first: then every device that had been claimed before the listing is contained here.
    pub(super) fn known(&self) -> Vec<Known> {
        let table = self.lock();
        let claims = table.held.values().filter_map(|held| {
            let (_, claim) = held.claim.as_ref()?;
            let is_back = held.state == State::Returned;
            Some(Known { key: claim.device.clone(), home: claim.home.clone(), is_back })
        });
        claims.collect()
    }

    /// Returns the holder, as text, and its container for the device that has this index on the node, or had it
    /// before it was moved, and that has not been given back.
    pub(in crate::attach) fn holder_of(&self, index: u32) -> Option<(String, String)> {
        let table = self.lock();
        let mut held = table.held.values().filter(|held| held.state != State::Returned);
        let has_it = |held: &&Held| {
            let home = held.claim.as_ref().and_then(|(_, claim)| claim.home.as_ref());
            home.is_some_and(|home| home.index == index)
        };
        held.find(has_it).map(|held| (held.who.clone(), held.owner.container_id.clone()))
    }

    /// Whether a pod holds a virtual function of the physical function with this bus address.
    pub(super) fn has_function_of(&self, physical: &str) -> bool {
        let is_its = |(device, _): &(spec::Device, Claim)| {
            device.function.as_ref().is_some_and(|function| function.physical == physical)
        };
        let table = self.lock();
        let mut held = table.held.values().filter(|held| held.state != State::Returned);
        held.any(|held| held.claim.as_ref().is_some_and(is_its))
    }

    /// Gives a device back by calling `act`, if the claim is the newest one of its device, belongs to this attachment
    /// and has not been given back. While another thread gives the device back, waits for at most [`PATIENCE`],
    /// because the record must not be removed before that ends. If another device occupies the device's name on the
    /// node, calls `make_way` for the devices that came back with names given by their pods, and retries.
    ///
    /// # Errors
    /// Another thread does not finish in time, or `act` fails; the call can be repeated.
    pub(in crate::attach) fn give_back(
        &self,
        claim: &Claim,
        (sandbox, attachment): (&Sandbox, &AttachmentPlan),
        act: impl Fn() -> Result<(), StepError>,
        make_way: impl FnMut(&Home) -> Result<(), StepError>,
    ) -> Result<(), StepError> {
        let owner = owner(sandbox, attachment);
        let table = self.settled((sandbox, attachment), PATIENCE)?;
        let Some(returning) = self.begin(table, (&claim.device, claim.generation, &owner)) else {
            tracing::debug!(device = claim.device, "the device is not this sandbox's any more");
            return Ok(());
        };
        let given = match act() {
            Err(StepError::HomeTaken(_)) => {
                self.make_way(make_way);
                act()
            }
            other => other,
        };
        if given.is_ok() {
            returning.done();
        }
        given
    }

    /// Whether a claim needs no giving back any more: the device was given back, or another sandbox has claimed it
    /// since.
    pub(in crate::attach) fn has_ended(&self, claim: &Claim) -> bool {
        let table = self.lock();
        let held = table.held.get(&claim.device).filter(|held| held.generation == claim.generation);
        held.is_none_or(|held| held.state == State::Returned)
    }

    /// Adds the claims of a record that was written in this boot.
    pub(in crate::attach) fn adopt(&self, record: &Record) {
        for (at, attachment, step) in record.plan.steps() {
            let Step::ClaimDevice(device) = step else { continue };
            let Some(Output::Claimed(claim)) = record.outputs.get(&at) else { continue };
            let sandbox = &record.plan.sandbox;
            let numbers = (claim.generation, record.netns_cookie.unwrap_or_default());
            let moved = result::ends(record.outputs.of(at.0)).map(|ends| ends.pod.index);
            let entry = Held {
                claim: Some((device.clone(), (**claim).clone())),
                // 0: a process drives the device (userspace driver), so it has no interface.
                made: moved.filter(|index| *index != 0),
                state: if claim.is_back { State::Returned } else { State::Held },
                ..entry(owner(sandbox, attachment), sandbox, attachment, numbers)
            };
            if entry.state == State::Held && entry.is_alive() {
                self.sriov_cni.mark_again(device, &sandbox.netns);
            }
            let mut table = self.lock();
            table.newest = table.newest.max(claim.generation);
            let is_newer = table.held.get(&claim.device).is_none_or(|it| it.generation < claim.generation);
            if is_newer {
                table.held.insert(claim.device.clone(), entry);
            }
        }
    }

    /// Whether the newest claim of a device belongs to the attachment with this number in the dataplane.
    pub(in crate::attach) fn is_newest(&self, number: u32) -> bool {
        self.lock().held.values().any(|held| held.number == Some(number))
    }

    /// Returns the devices that a namespace holds, except for the device `but`.
    pub(in crate::attach) fn others_in(&self, netns: NetnsId, but: Option<&str>) -> Vec<Other> {
        let table = self.lock();
        let is_there = |held: &&Held| held.sandbox.netns_id == netns && held.state != State::Returned;
        let others = table.held.values().filter(is_there).filter_map(|held| {
            let (_, claim) = held.claim.as_ref().filter(|(_, claim)| but != Some(&*claim.device))?;
            Some(Other { home: claim.home.clone()?, made: held.made })
        });
        others.collect()
    }

    /// Returns the newest claim of an attachment's device, even if the attachment's record has lost it.
    pub(in crate::attach) fn claim_of(
        &self,
        sandbox: &Sandbox,
        attachment: &AttachmentPlan,
    ) -> Option<Claim> {
        let owner = owner(sandbox, attachment);
        let table = self.lock();
        let is_its = |held: &&Held| held.owner == owner && held.sandbox.netns_id == sandbox.netns_id;
        let held = table.held.values().filter(is_its).max_by_key(|held| held.generation)?;
        held.claim.as_ref().map(|(_, claim)| claim.clone())
    }

    /// Returns the indices of the representors of all devices with a claim.
    pub(super) fn representors(&self) -> BTreeSet<u32> {
        let table = self.lock();
        let claims = table.held.values().filter_map(|held| held.claim.as_ref());
        claims.filter_map(|(_, claim)| Some(claim.representor.as_ref()?.device.index)).collect()
    }

    /// Removes the claims of an attachment whose device has been given back. While another thread gives such a device
    /// back, although the record does not contain the claim, waits for at most [`PATIENCE`]: the device must not be
    /// claimed before that ends.
    ///
    /// # Errors
    /// The other thread does not finish in time; the call can be repeated.
    pub(in crate::attach) fn release(
        &self,
        sandbox: &Sandbox,
        attachment: &AttachmentPlan,
    ) -> Result<(), StepError> {
        if attachment.steps.iter().any(|step| matches!(step, Step::ClaimDevice(_))) {
            let owner = owner(sandbox, attachment);
            let mut table = self.settled((sandbox, attachment), PATIENCE)?;
            table.held.retain(|_, held| held.owner != owner);
        }
        Ok(())
    }

    /// Calls `settle` for each device of a sandbox whose namespace is gone, until `settle` has succeeded once for
    /// that device. First calls `make_way` for all of these devices, because one may occupy the name of another. No
    /// other sandbox can claim a device during its call. Devices that processes drive wait for a DEL or for the next
    /// claim.
    fn settle_orphans(
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
    fn make_way(&self, mut make_way: impl FnMut(&Home) -> Result<(), StepError>) {
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

    /// Begins to give a device back, if the claim is the newest one and no other thread has given the device back or
    /// is doing so.
    fn begin(
        &self,
        mut table: MutexGuard<'_, Table>,
        (device, generation, owner): (&str, u64, &Owner),
    ) -> Option<Returning<'_>> {
        let its = table.held.get_mut(device).filter(|held| held.is_claim(generation, owner));
        its.filter(|held| held.state == State::Held)?.state = State::Returning;
        let (device, owner) = (device.to_owned(), owner.clone());
        Some(Returning { devices: self, device, generation, owner, is_back: false })
    }

    /// Returns the locked table once no thread is giving back a device of this attachment.
    ///
    /// # Errors
    /// A thread is still giving a device back after `patience`.
    fn settled(
        &self,
        (sandbox, attachment): (&Sandbox, &AttachmentPlan),
        patience: Duration,
    ) -> Result<MutexGuard<'_, Table>, StepError> {
        let (owner, due) = (owner(sandbox, attachment), Instant::now() + patience);
        let is_going = |held: &Held| held.state == State::Returning && held.owner == owner;
        loop {
            let table = self.lock();
            let Some((device, _)) = table.held.iter().find(|(_, held)| is_going(held)) else {
                return Ok(table);
            };
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(StepError::DeviceReturning(device.clone()));
            }
            // `waits::at` waits for a slot to continue in: not with the lock held.
            drop(table);
            waits::at(&waits::devices(attachment), || {
                let still = |table: &mut Table| table.held.values().any(is_going);
                drop(self.returned.wait_timeout_while(self.lock(), left, still));
            });
        }
    }

    /// Returns the records that may not yet say which of their devices have gone back.
    pub(super) fn unwritten(&self) -> Vec<JournalKey> {
        self.records().keys().cloned().collect()
    }

    /// Removes a record from the list before it is written. Returns whether an earlier failed write was logged.
    pub(super) fn take_unwritten(&self, key: &JournalKey) -> bool {
        self.records().remove(key).unwrap_or_default()
    }

    /// Puts a record on the list after a failed write that was logged.
    pub(in crate::attach) fn stays_unwritten(&self, key: &JournalKey) {
        self.records().insert(key.clone(), true);
    }

    fn records(&self) -> MutexGuard<'_, BTreeMap<JournalKey, bool>> {
        self.unwritten.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the table. No lock is poisoned: a panic ends the agent.
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

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
pub(super) fn settle(node: &Node, held: &Held) -> Result<(), StepError> {
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

fn entry(
    owner: Owner,
    sandbox: &Sandbox,
    attachment: &AttachmentPlan,
    (generation, cookie): (u64, u64),
) -> Held {
    let pod = sandbox.pod.as_ref().map(|pod| format!("pod {pod}, ")).unwrap_or_default();
    let who = format!("{pod}container {}, interface {}", sandbox.container_id, attachment.ifname);
    let number = attachment.steps.iter().find_map(|step| match step {
        Step::Protect(protect) => Some(protect.id),
        _ => None,
    });
    let state = State::Held;
    Held { owner, who, generation, sandbox: sandbox.clone(), cookie, state, number, claim: None, made: None }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, mpsc};
    use std::thread;

    use serde_json::Value;

    use super::*;
    use crate::attach::error::step_code;
    use crate::attach::rig;
    use crate::cni::code;
    use crate::journal::Store;
    use crate::journal::full_disk::{Disk, Takes};
    use crate::moment::boot_id;
    use crate::plan::Plan;
    use crate::plan::{Dynamic, fixtures};
    use crate::spec::DeviceId;
    use crate::step::StepRef;
    use crate::waits::tests::Visits;
    use crate::waits::{Place, Resource};

    const CARD: &str = "0000:03:02.1";

    /// How a device was on the node.
    fn home(name: &str, parent: Option<&str>) -> Home {
        Home {
            name: name.to_owned(),
            index: 4,
            kind: String::new(),
            link: None,
            mac: None,
            permanent: None,
            parent: parent.map(str::to_owned),
            among: false,
            mtu: 1500,
            up: false,
            alias: None,
            group: 0,
            other_names: Vec::new(),
            programs: None,
            planned: None,
            conduct: None,
        }
    }

    /// A sandbox whose namespace is gone, with the card.
    fn plan(container: &str) -> Plan {
        let device = spec::Device {
            pod_name: "net1".to_owned(),
            id: DeviceId::Bus(CARD.to_owned()),
            userspace: None,
            function: None,
            rdma: None,
            switchdev: false,
        };
        let sandbox = Sandbox { netns: String::new(), ..fixtures::sandbox(container) };
        let attachment = fixtures::attachment("sriov", vec![Step::ClaimDevice(device)]);
        Plan { sandbox, attachments: vec![attachment], dynamic: None }
    }

    fn claim(
        devices: &Devices,
        plan: &Plan,
        settle: impl FnOnce(&Held) -> Result<(), StepError>,
    ) -> Result<Claim, StepError> {
        claim_as(devices, plan, Some(home("card0", None)), settle)
    }

    fn claim_as(
        devices: &Devices,
        plan: &Plan,
        home: Option<Home>,
        settle: impl FnOnce(&Held) -> Result<(), StepError>,
    ) -> Result<Claim, StepError> {
        let generation = devices.claim(CARD, (&plan.sandbox, &plan.attachments[0], 0), settle)?;
        let device = CARD.to_owned();
        let (settings, physical, representor) = (None, None, None);
        let claim = Claim { device, generation, home, settings, physical, representor, is_back: false };
        let Some(Step::ClaimDevice(device)) = plan.attachments[0].steps.first() else { unreachable!() };
        devices.found(device, &claim);
        Ok(claim)
    }

    fn release(devices: &Devices, plan: &Plan) -> Result<(), StepError> {
        devices.release(&plan.sandbox, &plan.attachments[0])
    }

    /// Rows: SRV-owner, SRV-namespace-gone.
    #[test]
    fn a_device_is_given_back_once_by_whoever_claimed_it_last() {
        let devices = Devices::default();
        let [a, b] = ["a", "b"].map(plan);
        let calls = Cell::new(0);
        let count = || {
            calls.set(calls.get() + 1);
            Ok(())
        };
        let no_way = |_: &Home| unreachable!("no device of these comes home by itself");
        let lost = || Err(StepError::NoDevice(CARD.to_owned()));
        let give_back = |plan: &Plan, claim: &Claim, act: &dyn Fn() -> Result<(), StepError>| {
            devices.give_back(claim, (&plan.sandbox, &plan.attachments[0]), act, no_way)
        };
        let first = claim(&devices, &a, |_| unreachable!()).unwrap();
        // A device that could not be given back stays with its first holder.
        let is_lost = |refused: StepError| matches!(refused, StepError::NoDevice(device) if device == CARD);
        assert!(is_lost(claim(&devices, &b, |_| lost()).unwrap_err()));
        assert!(is_lost(give_back(&a, &first, &lost).unwrap_err()));
        let second = claim(&devices, &b, |_| count()).unwrap();
        assert_eq!((second.generation, calls.get()), (2, 1));
        give_back(&a, &first, &count).unwrap();
        assert_eq!(calls.get(), 1, "a late DEL");
        // While it is being given back, no sandbox can claim it.
        let taken = |_: &Held| unreachable!();
        give_back(&b, &second, &|| {
            let refused = claim(&devices, &a, taken).unwrap_err();
            assert!(matches!(refused, StepError::DeviceTaken { .. }), "{refused}");
            devices.settle_orphans(|_| unreachable!(), no_way);
            count()
        })
        .unwrap();
        give_back(&b, &second, &count).unwrap();
        devices.settle_orphans(|_| count(), no_way);
        assert_eq!(calls.get(), 2, "once");
        // It is home: nothing is to be settled.
        let third = claim(&devices, &a, |_| unreachable!()).unwrap();
        assert_eq!(third.generation, 3);
        release(&devices, &b).unwrap();
        devices.settle_orphans(|_| lost(), no_way);
        devices.settle_orphans(|_| count(), no_way);
        devices.settle_orphans(|_| count(), no_way);
        assert_eq!(calls.get(), 3);
        release(&devices, &a).unwrap();
        assert_eq!(claim(&devices, &b, |_| unreachable!()).unwrap().generation, 4);
    }

    /// A card's firmware may take seconds.
    ///
    /// Rows: SRV-returning.
    #[test]
    fn only_the_del_of_who_had_a_device_waits_while_it_is_given_back_for_the_next_pod() {
        let devices = &Devices::default();
        let plans = ["a", "b", "c"].map(plan);
        let [a, b, c] = &plans;
        let first = &claim(devices, a, |_| unreachable!()).unwrap();
        let (begins, has_begun) = mpsc::channel();
        let (goes_on, may_go_on) = mpsc::channel::<()>();
        thread::scope(|scope| {
            let second = scope.spawn(move || {
                claim(devices, b, |_| {
                    begins.send(()).unwrap();
                    // Until the other end is dropped.
                    let _ = may_go_on.recv();
                    Ok(())
                })
            });
            has_begun.recv().unwrap();
            let refused = claim(devices, c, |_| unreachable!()).unwrap_err();
            let holder = devices.holder_of(4).unwrap();
            assert_eq!(holder.1, "a");
            let StepError::DeviceTaken { device, who, container } = refused else { panic!("{refused}") };
            assert_eq!((device.as_str(), (who, container)), (CARD, holder));
            assert_eq!(devices.unwritten(), []);
            assert!(!devices.has_ended(first));
            devices.settle_orphans(|_| unreachable!(), |_| unreachable!());
            let of = (&a.sandbox, &a.attachments[0]);
            let late = scope.spawn(move || {
                devices.give_back(first, of, || unreachable!("it is b's"), |_| unreachable!())
            });
            thread::sleep(Duration::from_millis(50));
            assert!(!late.is_finished(), "its record would go, and a restart not finish what has begun");
            drop(goes_on);
            assert_eq!(second.join().unwrap().unwrap().generation, 2);
            late.join().unwrap().unwrap();
        });
        assert!(devices.has_ended(first));
        assert_eq!(devices.unwritten(), [rig::key("a")]);
    }

    /// Rows: SRV-returning.
    #[test]
    fn a_del_gives_back_itself_what_a_look_that_was_at_it_could_not() {
        let devices = &Devices::default();
        let a = &plan("a");
        let first = &claim(devices, a, |_| unreachable!()).unwrap();
        let calls = &AtomicUsize::new(0);
        let act = || {
            calls.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        thread::scope(|scope| {
            let mut del = None;
            let look = |_: &Held| {
                let of = (&a.sandbox, &a.attachments[0]);
                let begun = scope.spawn(move || devices.give_back(first, of, act, |_| unreachable!()));
                thread::sleep(Duration::from_millis(50));
                assert!(!begun.is_finished());
                del = Some(begun);
                Err(StepError::NoDevice(CARD.to_owned()))
            };
            devices.settle_orphans(look, |_| unreachable!("it has its own name"));
            del.unwrap().join().unwrap().unwrap();
        });
        assert_eq!(calls.load(Ordering::Relaxed), 1);
        assert!(devices.has_ended(first));
    }

    /// Its DEL then knows of no claim, and gives the device back by what is on it.
    ///
    /// Rows: SRV-returning.
    #[test]
    fn a_del_whose_record_has_lost_the_claim_does_not_let_go_of_a_device_that_a_look_is_at() {
        let devices = &Devices::default();
        let plans = ["a", "b"].map(plan);
        let [a, b] = &plans;
        claim(devices, a, |_| unreachable!()).unwrap();
        thread::scope(|scope| {
            let mut del = None;
            let look = |_: &Held| {
                del = Some(scope.spawn(move || release(devices, a)));
                thread::sleep(Duration::from_millis(50));
                let refused = claim(devices, b, |_| unreachable!()).unwrap_err();
                assert!(matches!(refused, StepError::DeviceTaken { .. }), "{refused}");
                Ok(())
            };
            devices.settle_orphans(look, |_| unreachable!("it has its own name"));
            del.unwrap().join().unwrap().unwrap();
        });
        assert_eq!(claim(devices, b, |_| unreachable!()).unwrap().generation, 2);
    }

    /// A card or a driver that hangs blocks the thread that gives the device back in the kernel.
    ///
    /// Rows: SRV-returning.
    #[test]
    fn a_del_gives_up_on_a_device_that_does_not_come_back_and_stands_meanwhile_where_others_see_it() {
        let devices = &Devices::default();
        let [a, b] = ["a", "b"].map(plan);
        let of = |plan: &Plan, patience| {
            let visits = Arc::<Visits>::default();
            let settled = || devices.settled((&plan.sandbox, &plan.attachments[0]), patience).map(drop);
            let settled = waits::within(Arc::clone(&visits) as Arc<dyn Place>, settled);
            (settled.map_err(|error| (step_code(&error), error.to_string())), visits.all())
        };
        claim(devices, &a, |_| unreachable!()).unwrap();
        let hangs = |_: &Held| {
            let said = format!(
                "device {CARD} is being returned to the node, which has not ended in time: its card or driver may hang (see the \
                 kernel's log)"
            );
            let resource = Resource::Devices { network: a.attachments[0].config_name.clone() };
            let refused = || Err((code::TRY_AGAIN_LATER, said.clone()));
            assert_eq!(of(&a, Duration::from_millis(20)), (refused(), vec![resource]));
            assert_eq!(of(&a, Duration::ZERO), (refused(), Vec::new()));
            assert_eq!(of(&b, Duration::ZERO), (Ok(()), Vec::new()), "it is not this one's");
            Ok(())
        };
        claim(devices, &b, hangs).unwrap();
        assert_eq!(of(&a, Duration::ZERO), (Ok(()), Vec::new()));
    }

    /// The node, or another pod, may have done something with it since.
    #[test]
    fn a_device_that_has_gone_back_in_a_del_that_failed_does_not_once_more_after_a_restart() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path()).unwrap();
        let (devices, plan) = (Devices::default(), plan("a"));
        let claim = claim(&devices, &plan, |_| unreachable!()).unwrap();
        let Sandbox { container_id, ifname, .. } = plan.sandbox.clone();
        let key = JournalKey { container_id, ifname };
        let mut record = store.create(key.clone(), plan.clone()).unwrap();
        let at = StepRef(0, 0);
        record.begin(&[at]).unwrap();
        record.done(at, Output::Claimed(Box::new(claim.clone()))).unwrap();
        record.removing().unwrap();
        let of = (&plan.sandbox, &plan.attachments[0]);
        assert!(!devices.has_ended(&claim));
        devices.give_back(&claim, of, || Ok(()), |_| unreachable!()).unwrap();
        assert!(devices.has_ended(&claim));
        let restarted = || {
            let Loaded::Whole(record) = store.load(&key).unwrap() else { panic!("it is whole") };
            record.check_whole().unwrap();
            let devices = Devices::default();
            devices.adopt(&record);
            devices
        };
        assert!(!restarted().has_ended(&claim), "it is not written down yet");
        record.amend(at, Output::Claimed(Box::new(Claim { is_back: true, ..claim.clone() }))).unwrap();
        let devices = restarted();
        assert!(devices.has_ended(&claim));
        devices.give_back(&claim, of, || unreachable!(), |_| unreachable!()).unwrap();
        devices.settle_orphans(|_| unreachable!(), |_| unreachable!());
    }

    /// Its record stays until its DEL, which may come after the next start.
    ///
    /// Rows: SRV-namespace-gone.
    #[test]
    fn a_device_that_has_gone_back_without_a_del_does_not_once_more_after_a_restart() {
        let directory = tempfile::tempdir().unwrap();
        let started = || {
            let store = Store::open(directory.path().join("journal")).unwrap();
            rig::engine(directory.path(), store, &crate::sync::Arc::default())
        };
        let engine = started();
        let at = StepRef(0, 0);
        let [a, b] = ["a", "b"].map(plan);
        let key = |plan: &Plan| rig::key(&plan.sandbox.container_id);
        for plan in [&a, &b] {
            let mut record = engine.journal.create(key(plan), plan.clone()).unwrap();
            record.begin(&[at]).unwrap();
            // The second is given the device of the first, whose pod is gone.
            let claim = claim(&engine.node.devices, plan, |_| Ok(())).unwrap();
            record.done(at, Output::Claimed(Box::new(claim))).unwrap();
            record.attached(Value::Null).unwrap();
        }
        let said = |plan: &Plan| {
            let Loaded::Whole(record) = engine.journal.load(&key(plan)).unwrap() else {
                panic!("it is whole")
            };
            record.check_whole().unwrap();
            let Some(Output::Claimed(claim)) = record.outputs.get(&at) else { panic!("it has the claim") };
            claim.is_back
        };
        assert_eq!(engine.unwritten_returns(), [key(&a)]);
        engine.node.devices.settle_orphans(|_| Ok(()), |_| Ok(()));
        assert_eq!(engine.unwritten_returns(), [key(&a), key(&b)]);
        assert_eq!([said(&a), said(&b)], [false, false]);
        engine.unwritten_returns().iter().for_each(|key| engine.write_returned(key));
        assert_eq!([said(&a), said(&b)], [true, true]);
        assert_eq!(engine.unwritten_returns(), []);
        let engine = started();
        for plan in [&a, &b] {
            let Loaded::Whole(record) = engine.journal.load(&key(plan)).unwrap() else {
                panic!("it is whole")
            };
            engine.node.devices.adopt(&record);
            engine.node.devices.settle_orphans(|_| unreachable!(), |_| unreachable!());
        }
        // A record that is gone has nothing to say.
        engine.write_returned(&rig::key("c"));
        assert_eq!(engine.unwritten_returns(), []);
    }

    /// Its DEL has given the device back, on a disk that takes nothing.
    ///
    /// Rows: SRV-namespace-gone.
    #[test]
    fn a_record_that_can_be_neither_changed_nor_removed_says_later_that_its_device_has_gone_back() {
        let directory = tempfile::tempdir().unwrap();
        let journal = directory.path().join("journal");
        std::fs::create_dir(&journal).unwrap();
        let disk = Disk::at(&journal);
        let store = Store::over(crate::sync::Arc::new(disk.clone()), journal, boot_id().unwrap()).unwrap();
        let engine = rig::engine(directory.path(), store, &crate::sync::Arc::default());
        let (plan, key, at) = (plan("a"), rig::key("a"), StepRef(0, 0));
        let claim = claim(&engine.node.devices, &plan, |_| unreachable!()).unwrap();
        let mut record = engine.journal.create(key.clone(), plan.clone()).unwrap();
        record.begin(&[at]).unwrap();
        record.done(at, Output::Claimed(Box::new(claim.clone()))).unwrap();
        record.attached(Value::Null).unwrap();
        let of = (&plan.sandbox, &plan.attachments[0]);
        engine.node.devices.give_back(&claim, of, || Ok(()), |_| unreachable!()).unwrap();
        let is_back = || {
            let Loaded::Whole(record) = engine.journal.load(&key).unwrap() else { panic!("it is whole") };
            let Some(Output::Claimed(claim)) = record.outputs.get(&at) else { panic!("it has the claim") };
            claim.is_back
        };
        disk.takes(Takes::Nothing);
        assert!(matches!(engine.del_recorded(&key), Err(AttachError::AddressesStay { .. })));
        engine.write_returned(&key);
        assert_eq!((is_back(), engine.unwritten_returns()), (false, vec![key.clone()]));
        disk.takes(Takes::Everything);
        engine.write_returned(&key);
        assert_eq!((is_back(), engine.unwritten_returns()), (true, Vec::new()));
    }

    /// Programs of the pod are distinguished from those that existed at the time of the claim.
    ///
    /// Rows: HDV-programs.
    #[test]
    fn a_claim_of_an_earlier_version_says_when_it_was_planned_where_no_process_of_the_pod_was_there_before() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path()).unwrap();
        let (claimed, raised) = (StepRef(0, 0), StepRef(0, 1));
        let read = |container: &str, live: bool, seen: Option<Vec<u32>>, begun: &[StepRef]| {
            let mut plan = plan(container);
            plan.attachments[0].steps.push(Step::RaiseLoopback);
            plan.dynamic = live.then(|| Dynamic { sandbox: "eth0".to_owned(), by: "me".to_owned() });
            let key = JournalKey { container_id: container.to_owned(), ifname: "eth0".to_owned() };
            let mut record = store.create(key.clone(), plan).unwrap();
            record.begin(begun).unwrap();
            let claim = Claim {
                device: CARD.to_owned(),
                generation: 1,
                home: Some(Home { programs: seen, ..home("card0", None) }),
                settings: None,
                physical: None,
                representor: None,
                is_back: false,
            };
            record.done(claimed, Output::Claimed(Box::new(claim))).unwrap();
            record.done(raised, Output::Nothing).unwrap();
            record.attached(Value::Null).unwrap();
            let Loaded::Whole(record) = store.load(&key).unwrap() else { panic!("it is whole") };
            let Some(Output::Claimed(claim)) = record.outputs.get(&claimed) else {
                panic!("it has the claim")
            };
            let home = claim.home.clone().unwrap();
            (home.programs, home.planned.map(|at| Some(at) == record.planned.since_boot))
        };
        assert_eq!(read("a", false, None, &[claimed]), (None, Some(true)));
        assert_eq!(read("b", true, None, &[claimed]), (None, None), "the pod was there before");
        assert_eq!(read("c", false, None, &[claimed, raised]), (None, None), "it was written anew");
        assert_eq!(
            read("d", false, Some(Vec::new()), &[claimed]),
            (Some(Vec::new()), None),
            "somebody looked"
        );
        assert_eq!(read("e", false, Some(vec![7]), &[claimed]), (Some(vec![7]), None));
    }

    /// A process may have it that the agent does not see.
    ///
    /// Rows: SRV-userspace.
    #[test]
    fn a_device_that_a_process_drives_waits_for_a_del_or_the_next_claim() {
        let devices = Devices::default();
        let [a, b] = ["a", "b"].map(plan);
        let no_way = |_: &Home| unreachable!("it has no interface");
        claim_as(&devices, &a, None, |_| unreachable!()).unwrap();
        devices.settle_orphans(|_| unreachable!(), no_way);
        let calls = Cell::new(0);
        let count = || {
            calls.set(calls.get() + 1);
            Ok(())
        };
        let second = claim_as(&devices, &b, None, |_| count()).unwrap();
        let claim_of = |plan: &Plan| devices.claim_of(&plan.sandbox, &plan.attachments[0]);
        assert_eq!([&a, &b].map(claim_of), [None, Some(second.clone())]);
        devices.settle_orphans(|_| unreachable!(), no_way);
        devices.give_back(&second, (&b.sandbox, &b.attachments[0]), count, no_way).unwrap();
        assert_eq!(calls.get(), 2);
    }

    /// Rows: HDV-in-use.
    #[test]
    fn a_card_of_which_pods_have_functions_is_known_until_they_are_back() {
        let devices = Devices::default();
        let mut with_vf = plan("a");
        if let Some(Step::ClaimDevice(device)) = with_vf.attachments[0].steps.first_mut() {
            device.function = Some(spec::VirtualFunction { physical: "0000:03:00.0".to_owned(), number: 1 });
        }
        let claim = claim(&devices, &with_vf, |_| unreachable!()).unwrap();
        assert_eq!(["0000:03:00.0", CARD].map(|it| devices.has_function_of(it)), [true, false]);
        let of = (&with_vf.sandbox, &with_vf.attachments[0]);
        devices.give_back(&claim, of, || Ok(()), |_| unreachable!()).unwrap();
        assert!(!devices.has_function_of("0000:03:00.0"));
    }

    #[test]
    fn a_namespace_whose_cookie_is_not_known_is_told_by_its_number() {
        let path = "/proc/self/ns/net";
        let own = Netns::open(path).unwrap();
        let cookie = own.cookie().unwrap().unwrap();
        let is_alive = |netns_id, cookie| {
            let Plan { sandbox, attachments, .. } = plan("a");
            let sandbox = Sandbox { netns: path.to_owned(), netns_id, ..sandbox };
            entry(owner(&sandbox, &attachments[0]), &sandbox, &attachments[0], (1, cookie)).is_alive()
        };
        let another = crate::netns::NetnsId { inode: own.id().inode + 1, ..own.id() };
        assert_eq!([0, cookie, cookie + 1].map(|it| is_alive(own.id(), it)), [true, true, false]);
        assert!(!is_alive(another, 0));
    }

    /// Rows: HDV-names.
    #[test]
    fn devices_that_came_home_make_way_for_each_others_names() {
        let devices = Devices::default();
        let names = ["eth1", "eth2"];
        let claims = names.map(|name| {
            let plan = plan(name);
            let generation =
                devices.claim(name, (&plan.sandbox, &plan.attachments[0], 0), |_| unreachable!());
            let claim = Claim {
                device: name.to_owned(),
                generation: generation.unwrap(),
                home: Some(home(name, Some(name))),
                settings: None,
                physical: None,
                representor: None,
                is_back: false,
            };
            let Some(Step::ClaimDevice(device)) = plan.attachments[0].steps.first() else { unreachable!() };
            devices.found(device, &claim);
            (plan, claim)
        });
        let said = RefCell::new(Vec::new());
        let say = |what: &str, name: &str| said.borrow_mut().push(format!("{what} {name}"));
        let taken = || Err(StepError::HomeTaken("eth1".to_owned()));
        // A DEL of one whose name the other has asks once, and does not ask itself.
        let (plan, claim) = &claims[0];
        let act = || {
            say("give back", "eth1");
            taken()
        };
        let make_way = |home: &Home| {
            say("make way", &home.name);
            Ok(())
        };
        let of = (&plan.sandbox, &plan.attachments[0]);
        assert!(devices.give_back(claim, of, act, make_way).is_err());
        assert_eq!(said.take(), ["give back eth1", "make way eth2", "give back eth1"]);
        devices.settle_orphans(
            |held| {
                say("settle", &held.owner.container_id);
                Ok(())
            },
            make_way,
        );
        assert_eq!(said.take(), ["make way eth1", "make way eth2", "settle eth1", "settle eth2"]);
        devices.settle_orphans(|_| unreachable!(), |_| unreachable!());
    }
}
