//! Tracks which attachment holds which device of the node. If records contain several claims of one device, the
//! newest claim counts: a late DEL finds that the device belongs to another sandbox, and leaves the device alone.
//!
//! | module | what it does |
//! |---|---|
//! | `held` | the newest claim of a device, and whether its holder still exists |
//! | `orphans` | gives back devices whose pods' namespaces are gone, and notes it in their records |

mod held;
mod orphans;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use self::held::{Held, State, entry};
pub(in crate::attach) use self::orphans::make_way;
pub(super) use self::orphans::settle;
use super::error::DeviceError;
use super::sriov_cni::SriovCni;
use crate::attach::StepError;
use crate::attach::apply::owner;
use crate::ipam::Owner;
use crate::journal::{JournalKey, Record};
use crate::netns::NetnsId;
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

impl Devices {
    /// The claims of a process beside which an agent may take devices of the node: every VF has its holder in
    /// sriov-cni's files.
    pub(in crate::attach) fn beside_an_agent() -> Self {
        Self { sriov_cni: SriovCni::needed(), ..Self::default() }
    }

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
            Err(StepError::Device(DeviceError::HomeTaken(_))) => {
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

    /// Removes the entry of a sandbox in sriov-cni's file of a VF, unless the sandbox's pod holds the VF by a known
    /// claim, which has the same entry.
    ///
    /// # Errors
    /// sriov-cni holds the VF's lock, or its files cannot be used.
    pub(in crate::attach) fn unmark(
        &self,
        device: &spec::Device,
        sandbox: &Sandbox,
    ) -> Result<(), StepError> {
        let is_its = |(it, _): &(spec::Device, Claim)| it.function == device.function;
        // A claim of another pod has another entry, and one that has ended has none.
        let has_entry = |held: &Held| {
            let of = &held.sandbox;
            held.state != State::Returned
                && (&of.netns, of.netns_id) == (&sandbox.netns, sandbox.netns_id)
                && held.claim.as_ref().is_some_and(is_its)
        };
        let is_held = self.lock().held.values().any(has_entry);
        match is_held {
            true => Ok(()),
            false => self.sriov_cni.give_back((device, &sandbox.netns), None, || Ok(())),
        }
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
                return Err(DeviceError::Returning(device.clone()).into());
            }
            // `waits::at` waits for a slot to continue in: not with the lock held.
            drop(table);
            waits::at(&waits::devices(attachment), || {
                let still = |table: &mut Table| table.held.values().any(is_going);
                drop(self.returned.wait_timeout_while(self.lock(), left, still));
            });
        }
    }

    /// Locks the table. No lock is poisoned: a panic ends the agent.
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
