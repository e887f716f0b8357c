//! The consumer of the ring buffer in which the programs report packets.

use std::fmt;

use aya::maps::{MapData, RingBuf};
use netattach_common::Record;

use super::BpfError;
use super::map_table::map_name;
use super::pin::Pins;

/// Reads records in the order in which they were written.
pub struct Records {
    ring: RingBuf<MapData>,
}

impl Records {
    pub(super) fn open(pins: &Pins) -> Result<Self, BpfError> {
        Ok(Self { ring: pins.open(map_name::RECORD)? })
    }

    /// The oldest unread record; `None` when there is none at the moment.
    #[allow(clippy::should_implement_trait, reason = "an iterator that has ended does not go on")]
    pub fn next(&mut self) -> Option<Record> {
        loop {
            let item = self.ring.next()?;
            // Programs of this layout write only records; an entry of another length is skipped.
            if item.len() == size_of::<Record>() {
                // SAFETY: the item has the size of a record, any bytes are a valid record, and no alignment
                // is assumed.
                return Some(unsafe { std::ptr::read_unaligned(item.as_ptr().cast()) });
            }
        }
    }
}

impl fmt::Debug for Records {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Records").finish_non_exhaustive()
    }
}
