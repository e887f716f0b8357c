//! One attachment's view of one packet.

use netattach_common::{AttachmentRecord, DropReason, PolicyIds, Side, attachment::flag};

use crate::path::maps;

/// The attachment data needed for each of its packets. Without padding, as subprograms require of their arguments.
#[repr(C)]
pub(crate) struct Scope {
    /// Attachment id.
    pub(crate) id: u32,
    /// The bits of [`flag`].
    flags: u32,
    /// Network the attachment belongs to.
    pub(crate) zone: u32,
    /// Which side sends the packet.
    pub(crate) side: Side,
    /// Its policies, read once for each packet.
    pub(crate) policies: PolicyIds,
}

const _: () = assert!(size_of::<Scope>() == 24);

/// A bit in addition to those of [`flag`]: the packet goes to the node's stack or comes from it.
const BESIDE_THE_STACK: u32 = 1 << 31;
/// The same: the packet is known to go to the node's own stack, or to come from it.
const AT_THE_NODE: u32 = 1 << 30;
/// The same: the program runs in the pod, where packets of the node look like those of others.
const IN_POD: u32 = 1 << 29;
/// The same: the node sends from an Ethernet address of its own here.
const BESIDE_THE_NODE: u32 = 1 << 28;

impl Scope {
    /// `None`: there is no such attachment.
    #[inline(always)]
    pub(crate) fn of(id: u32, side: Side) -> Option<Self> {
        Self::within(id, maps::record(id)?, side)
    }

    /// The same with the attachment's record already looked up.
    #[inline(always)]
    pub(crate) fn within(id: u32, record: &AttachmentRecord, side: Side) -> Option<Self> {
        record.has(flag::PRESENT).then(|| Self::present(id, record, side))
    }

    /// The same of a record that is known to be in use.
    #[inline(always)]
    pub(crate) fn present(id: u32, record: &AttachmentRecord, side: Side) -> Self {
        Self { id, flags: record.flags, zone: record.zone, side, policies: maps::policies(id) }
    }

    /// The same scope on the node's end of a link, with the node's stack behind or before it.
    #[inline(always)]
    pub(crate) fn beside_the_stack(self) -> Self {
        Self { flags: self.flags | BESIDE_THE_STACK, ..self }
    }

    /// The same scope on a device in the pod.
    #[inline(always)]
    pub(crate) fn in_pod(self) -> Self {
        Self { flags: self.flags | IN_POD | BESIDE_THE_NODE, ..self }
    }

    /// The same scope on a parent, on which the node may have a link as pods have.
    #[inline(always)]
    pub(crate) fn on_parent(self) -> Self {
        Self { flags: self.flags | BESIDE_THE_NODE, ..self }
    }

    /// Whether the node's packets come from an Ethernet address of its own. Elsewhere, as on the fast path, the packets
    /// of others may have that address.
    #[inline(always)]
    pub(crate) fn is_beside_the_node(&self) -> bool {
        self.has(BESIDE_THE_NODE)
    }

    /// Notes whether the packet goes to the node's own stack, or comes from it. Without a branch: the verifier would
    /// follow what comes next twice.
    #[inline(always)]
    pub(crate) fn note_node(&mut self, is_at_the_node: u32) {
        self.flags |= (is_at_the_node & 1) * AT_THE_NODE;
    }

    /// Whether the program runs on the node's end of a link.
    #[inline(always)]
    pub(crate) fn is_beside_the_stack(&self) -> bool {
        self.has(BESIDE_THE_STACK)
    }

    /// Whether the packet is known to go to the node's own stack, or to come from it.
    #[inline(always)]
    pub(crate) fn is_at_the_node(&self) -> bool {
        self.has(AT_THE_NODE)
    }

    /// Whether the program runs in the pod.
    #[inline(always)]
    pub(crate) fn is_in_pod(&self) -> bool {
        self.has(IN_POD)
    }

    /// Whether all bits of `flags` are set.
    #[inline(always)]
    pub(crate) fn has(&self, flags: u32) -> bool {
        self.flags & flags == flags
    }

    /// Whether the pod's traffic through the node's routing may be judged there.
    #[inline(always)]
    pub(crate) fn leaves_to_the_node(&self) -> bool {
        self.has(BESIDE_THE_STACK) && !self.has(flag::PENDING) && !self.policies.none()
    }

    /// Whether its policy has not arrived yet.
    #[inline(always)]
    pub(crate) fn is_pending(&self) -> bool {
        self.has(flag::PENDING)
    }

    /// The attachment's record. Looked up where it is needed: a function that the verifier checks alone cannot be
    /// handed a map's value. It exists, as it did for [`Scope::of`].
    #[inline(always)]
    pub(crate) fn record(&self) -> Result<&'static AttachmentRecord, DropReason> {
        maps::record(self.id).ok_or(DropReason::Unbound)
    }
}
