//! What is remembered of the maps that attachments are in, for all threads.

use std::collections::BTreeMap;

use super::attachments::{self, Attachments};
use super::pin::Pins;
use super::shares::{self, PerFamily, Shares};
use super::{BpfError, Config};
use crate::sync::{Mutex, MutexGuard, locked};

/// Attachments, and their places in the flow table. A thread that panicked inside left at most a half-done sequence of map
/// writes, which repeating completes.
pub(super) struct Caches {
    attachments: Mutex<Attachments>,
    shares: Mutex<Shares>,
}

impl Caches {
    /// Takes stock of the pinned maps.
    pub(super) fn open(pins: &Pins, config: &Config) -> Result<Self, BpfError> {
        let flows = [config.max_flows_v4, config.max_flows_v6];
        Self::over(attachments::Maps::open(pins)?, config.max_attachments, shares::Maps::open(pins)?, flows)
    }

    /// Takes stock of any maps.
    pub(super) fn over(
        attachments: attachments::Maps,
        max_attachments: u32,
        shares: shares::Maps,
        flows: PerFamily,
    ) -> Result<Self, BpfError> {
        Ok(Self {
            attachments: Mutex::new(Attachments::over(attachments, max_attachments)?),
            shares: Mutex::new(Shares::over(shares, flows)?),
        })
    }

    pub(super) fn attachments(&self) -> MutexGuard<'_, Attachments> {
        locked(&self.attachments)
    }

    /// Removes an attachment's devices, record and addresses, then its policies by `unassign`, then its places. Idempotent.
    pub(super) fn remove(
        &self,
        id: u32,
        unassign: impl FnOnce() -> Result<(), BpfError>,
    ) -> Result<(), BpfError> {
        self.attachments().remove(id)?;
        unassign()?;
        locked(&self.shares).clear(id)
    }

    /// See [`super::Dataplane::take_answers`].
    pub(super) fn take_answers(&self, id: u32) -> Result<(), BpfError> {
        self.attachments().check(id)?;
        locked(&self.shares).take_answers(id)
    }

    /// See [`super::Dataplane::share_out_flows`].
    pub(super) fn share_out(
        &self,
        mut live: BTreeMap<u32, PerFamily>,
    ) -> Result<BTreeMap<u32, PerFamily>, BpfError> {
        live.retain(|id, _| self.attachments().check(*id).is_ok());
        locked(&self.shares).share_out(&live)
    }
}

#[cfg(test)]
#[cfg(feature = "model")]
mod model;
