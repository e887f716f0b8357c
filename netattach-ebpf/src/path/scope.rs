//! One attachment's view of one packet.

use netattach_common::{AttachmentRecord, DropReason, PolicyIds, Side, attachment::flag};

use crate::path::maps;

/// What is known of an attachment for each packet of it. Without padding, as subprograms want their arguments.
#[repr(C)]
pub(crate) struct Scope {
    /// Attachment id.
    pub(crate) id: u32,
    /// The bits of [`flag`].
    flags: u32,
    /// Network the attachment belongs to.
    pub(crate) zone: u32,
    /// Who sends the packet.
    pub(crate) side: Side,
    /// Its policies, read once for each packet.
    pub(crate) policies: PolicyIds,
}

const _: () = assert!(size_of::<Scope>() == 24);

/// Beside the bits of [`flag`]: what passes here goes on to the node's stack or comes from it.
const BESIDE_THE_STACK: u32 = 1 << 31;

impl Scope {
    /// `None`: there is no such attachment.
    #[inline(always)]
    pub(crate) fn of(id: u32, side: Side) -> Option<Self> {
        let record = maps::record(id).filter(|record| record.has(flag::PRESENT))?;
        Some(Self { id, flags: record.flags, zone: record.zone, side, policies: maps::policies(id) })
    }

    /// The same on the node's end of a link, with the node's stack behind or before it.
    #[inline(always)]
    pub(crate) fn beside_the_stack(self) -> Self {
        Self { flags: self.flags | BESIDE_THE_STACK, ..self }
    }

    /// Whether all bits of `flags` are set.
    #[inline(always)]
    pub(crate) fn has(&self, flags: u32) -> bool {
        self.flags & flags == flags
    }

    /// Whether what its pod exchanges with the node's routing may be judged there.
    #[inline(always)]
    pub(crate) fn leaves_to_the_node(&self) -> bool {
        self.has(BESIDE_THE_STACK) && !self.has(flag::PENDING) && !self.policies.none()
    }

    /// Whether its policy is still to come.
    #[inline(always)]
    pub(crate) fn is_pending(&self) -> bool {
        self.has(flag::PENDING)
    }

    /// The attachment's record. Looked up where it is needed: a function that the verifier sees alone cannot be
    /// handed a map's value. It is there, as it was for [`Scope::of`].
    #[inline(always)]
    pub(crate) fn record(&self) -> Result<&'static AttachmentRecord, DropReason> {
        maps::record(self.id).ok_or(DropReason::Unbound)
    }
}
