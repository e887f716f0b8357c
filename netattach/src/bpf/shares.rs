//! What the flow table owes to each attachment.

use aya::maps::{Array, MapData};
use netattach_common::Share;

use super::BpfError;
use super::flows;
use super::pin::{Pins, map_name};

/// The map of shares.
pub(super) struct Shares(Array<MapData, Share>);

impl Shares {
    pub(super) fn open(pins: &Pins) -> Result<Self, BpfError> {
        pins.open(map_name::SHARE).map(Self)
    }

    /// See [`super::Dataplane::take_answers`].
    pub(super) fn take_answers(&mut self, id: u32) -> Result<(), BpfError> {
        let share = self.get(id)?;
        if share.answers_until != 0 {
            return Ok(());
        }
        // 0 stands for never.
        let until = flows::now().wrapping_add(Share::GRACE).max(1);
        self.set(id, Share { answers_until: until })
    }

    /// Whoever gets the number next is owed nothing yet. Idempotent.
    pub(super) fn clear(&mut self, id: u32) -> Result<(), BpfError> {
        if self.get(id)? == Share::default() { Ok(()) } else { self.set(id, Share::default()) }
    }

    fn get(&self, id: u32) -> Result<Share, BpfError> {
        self.0.get(&id, 0).map_err(|source| BpfError::ReadMap { map: map_name::SHARE, source })
    }

    fn set(&mut self, id: u32, share: Share) -> Result<(), BpfError> {
        self.0.set(id, share, 0).map_err(|source| BpfError::WriteMap { map: map_name::SHARE, source })?;
        crate::crash_point!("map", map_name::SHARE);
        Ok(())
    }
}
