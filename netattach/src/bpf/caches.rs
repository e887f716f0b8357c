//! The maps of attachments behind their locks, with cached entries, for all threads.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::time::Instant;

use netattach_common::AttachmentRecord;

use super::attachments::{self, Attachment, Attachments};
use super::flows::Host;
use super::parents::{Device, OnParent, Parent, Trunks};
use super::pin::Pins;
use super::shares::{self, Owners, PerFamily, Shares};
use super::{BpfError, Config};
use crate::mac::Mac;
use crate::sync::{Mutex, MutexGuard, locked};

/// Attachments, and their places in the flow table.
///
/// The number of a removed attachment is *at rest* until it is freed, because packets in flight may still be
/// counted for it. No other attachment may get the number before, since those counts would be its own.
pub struct AttachmentMaps {
    attachments: Mutex<Attachments>,
    shares: Mutex<Shares>,
    /// Held while numbers are freed, so that no number is used before it is completely free.
    freeing: Mutex<()>,
}

impl AttachmentMaps {
    /// Opens the pinned maps and reads their entries.
    pub(super) fn open(pins: &Pins, config: &Config) -> Result<Self, BpfError> {
        let flows = [config.max_flows_v4, config.max_flows_v6];
        Self::over(attachments::Maps::open(pins)?, config.max_attachments, shares::Maps::open(pins)?, flows)
    }

    /// Reads the entries of the given maps.
    pub(super) fn over(
        attachments: attachments::Maps,
        max_attachments: u32,
        shares: shares::Maps,
        flows: PerFamily,
    ) -> Result<Self, BpfError> {
        let attachments = Attachments::over(attachments, max_attachments)?;
        let mut shares = Shares::over(shares, flows)?;
        for id in attachments.resting().keys() {
            shares.leave(*id);
        }
        Ok(Self { attachments: Mutex::new(attachments), shares: Mutex::new(shares), freeing: Mutex::new(()) })
    }

    /// Creates or changes an attachment. Its devices and policies are not changed. The number of a new
    /// attachment must not be at rest.
    ///
    /// # Errors
    /// The number is out of range, or a map is full or cannot be written.
    pub fn put(&self, id: u32, attachment: &Attachment) -> Result<(), BpfError> {
        self.lock().put(id, attachment)
    }

    /// Binds a host-side device to an attachment. Until then its packets are dropped, so bind before attaching
    /// programs.
    ///
    /// # Errors
    /// The attachment has no record, or a map is full or cannot be written.
    pub fn bind(&self, ifindex: u32, id: u32) -> Result<(), BpfError> {
        self.lock().bind(ifindex, id)
    }

    /// Binds the frames of a macvlan's parent that have the attachment's MAC address to the attachment.
    ///
    /// # Errors
    /// The attachment has no record, or a map is full or cannot be written.
    pub fn bind_macvlan(&self, id: u32, on: &OnParent) -> Result<(), BpfError> {
        self.lock().bind_macvlan(id, on)
    }

    /// Unbinds a device. Idempotent.
    ///
    /// # Errors
    /// A map cannot be written.
    pub fn unbind(&self, ifindex: u32) -> Result<(), BpfError> {
        self.lock().unbind(ifindex)
    }

    /// The devices that are bound to an attachment.
    pub fn devices_of(&self, id: u32) -> Vec<u32> {
        self.lock().devices_of(id)
    }

    /// Describes the first difference between the kernel's maps and an attachment as it was put and bound.
    /// Policies are not compared.
    ///
    /// # Errors
    /// A map cannot be read.
    pub fn difference(
        &self,
        id: u32,
        device: &Device,
        attachment: &Attachment,
    ) -> Result<Option<String>, BpfError> {
        self.lock().difference(id, device, attachment)
    }

    /// The addresses, in their networks, that disappear with these attachments, link-local ones included:
    /// their own, and shared ones that no other attachment has. Attachments without a record have none.
    ///
    /// # Errors
    /// A number is out of range.
    pub fn hosts(&self, leaving: &BTreeSet<u32>) -> Result<BTreeSet<Host>, BpfError> {
        self.lock().hosts(leaving)
    }

    /// Returns [`hosts`](Self::hosts) of an attachment that is being removed and opens no more flows. Until
    /// it is removed it does not count as a holder of its addresses: of attachments that are removed
    /// together, the last caller gets the shared addresses.
    ///
    /// # Errors
    /// The number is out of range.
    pub fn leave(&self, id: u32) -> Result<BTreeSet<Host>, BpfError> {
        self.lock().leave(id)
    }

    /// Every attachment that has a record, for recovery.
    pub fn records(&self) -> BTreeMap<u32, AttachmentRecord> {
        self.lock().records().clone()
    }

    /// The Ethernet address in the record of an attachment; `None`: it has no record.
    pub fn mac(&self, id: u32) -> Option<Mac> {
        self.lock().records().get(&id).map(|record| Mac(record.mac.octets))
    }

    /// The link-local address of an attachment, in its network, as its record has it; `None`: it has no record.
    pub fn link_local(&self, id: u32) -> Option<Host> {
        self.lock().records().get(&id).map(|record| (record.zone, IpAddr::V6(record.link_local.into())))
    }

    /// The source addresses that each number is allowed, including numbers without a record, for recovery.
    pub fn addresses(&self) -> BTreeMap<u32, BTreeSet<IpAddr>> {
        self.lock().addresses()
    }

    /// The attachment of each bound device, for recovery.
    pub fn bound(&self) -> BTreeMap<u32, u32> {
        self.lock().bound().clone()
    }

    /// Lets an attachment whose flows are lost accept segments of unknown connections as answers, for
    /// [`Share::GRACE`](netattach_common::Share::GRACE) seconds from now. Later calls change nothing, so that
    /// repeated restarts of the agent do not prolong this time.
    ///
    /// # Errors
    /// The number is out of range, or the map cannot be written.
    pub fn take_answers(&self, id: u32) -> Result<(), BpfError> {
        self.lock().check(id)?;
        locked(&self.shares).take_answers(id)
    }

    /// Gives attachments their places in the flow table by their owners and the number of their live flows
    /// ([`share_out`](super::share_out)), and withdraws the places of all others, except numbers at rest.
    /// Returns the places of each. Numbers without an attachment are ignored.
    ///
    /// # Errors
    /// The map cannot be written.
    pub fn share_out(
        &self,
        mut live: BTreeMap<u32, PerFamily>,
        owners: &Owners,
    ) -> Result<BTreeMap<u32, PerFamily>, BpfError> {
        {
            let attachments = self.lock();
            live.retain(|id, _| attachments.check(*id).is_ok() && !attachments.resting().contains_key(id));
        }
        locked(&self.shares).share_out(&live, owners)
    }

    /// Whether numbers are at rest.
    pub fn has_resting(&self) -> bool {
        !self.lock().resting().is_empty()
    }

    /// The time since when a number is at rest; `None`: the number is free, or belongs to an attachment.
    pub fn resting_since(&self, id: u32) -> Option<Instant> {
        self.lock().resting().get(&id).copied()
    }

    /// Frees the numbers that have been at rest since that time or longer; `clear` is called for each.
    /// Packets that were in flight at that time must have ended.
    pub(super) fn free(
        &self,
        unread: Instant,
        clear: impl Fn(u32) -> Result<(), BpfError>,
    ) -> Result<(), BpfError> {
        let _turn = locked(&self.freeing);
        let resting = self.lock().resting().clone();
        for (id, since) in resting.into_iter().filter(|(_, since)| *since <= unread) {
            clear(id)?;
            locked(&self.shares).clear(id)?;
            self.lock().free(id, since)?;
        }
        Ok(())
    }

    /// Removes an attachment's devices, record and addresses, then its policies by `unassign`. Afterwards its
    /// number is at rest and still has its places. Idempotent.
    pub(super) fn remove(
        &self,
        id: u32,
        unassign: impl FnOnce() -> Result<(), BpfError>,
    ) -> Result<(), BpfError> {
        self.lock().remove(id)?;
        locked(&self.shares).leave(id);
        unassign()
    }

    /// The map of macvlans' parents.
    pub(super) fn parents(&self) -> ParentMap<'_> {
        ParentMap(self)
    }

    fn lock(&self) -> MutexGuard<'_, Attachments> {
        locked(&self.attachments)
    }
}

impl fmt::Debug for AttachmentMaps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttachmentMaps").finish_non_exhaustive()
    }
}

/// The map of macvlans' parents, under the lock of [`AttachmentMaps`].
#[derive(Debug, Clone, Copy)]
pub struct ParentMap<'a>(&'a AttachmentMaps);

impl ParentMap<'_> {
    /// Adds a parent to the map, before programs are attached to it.
    ///
    /// # Errors
    /// The map is full or cannot be written.
    pub fn cover(&self, parent: u32, what: Parent) -> Result<(), BpfError> {
        self.0.lock().parents.cover(parent, what)
    }

    /// Removes a parent from the map, after its programs are gone. Idempotent.
    ///
    /// # Errors
    /// The map cannot be written.
    pub fn uncover(&self, parent: u32) -> Result<(), BpfError> {
        self.0.lock().parents.uncover(parent)
    }

    /// The parents in the map.
    pub fn covered(&self) -> BTreeMap<u32, Parent> {
        self.0.lock().parents.covered()
    }

    /// The parents that carry attachments.
    pub fn in_use(&self) -> BTreeSet<u32> {
        self.0.lock().parents.in_use()
    }

    /// The parent of an attachment's macvlan, if it has one.
    pub fn parent_of(&self, id: u32) -> Option<u32> {
        self.0.lock().parents.parent_of(id)
    }

    /// Lets frames pass that an attachment sends and that have been judged at a VLAN, on the devices below
    /// the VLAN and nowhere else.
    ///
    /// # Errors
    /// The map is full or cannot be written.
    pub fn pass_above(&self, id: u32, trunks: &Trunks) -> Result<(), BpfError> {
        self.0.lock().parents.pass_above(id, trunks)
    }

    /// Removes such entries of an earlier agent for attachments that this agent does not know.
    ///
    /// # Errors
    /// The map cannot be written.
    pub fn forget_lost(&self) -> Result<(), BpfError> {
        self.0.lock().parents.forget_lost()
    }

    /// The attachments that have an address on a parent, for recovery.
    pub fn attachments(&self) -> BTreeSet<u32> {
        self.0.lock().parents.attachments().collect()
    }

    /// The number of entries: macvlans, their parents, their namespaces, and frames from VLANs.
    pub fn entries(&self) -> usize {
        self.0.lock().parents.len()
    }
}

#[cfg(test)]
#[cfg(feature = "model")]
mod model;
