//! Other programs that put their filters before netattach's on a device, or remove netattach's, again and
//! again.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::put_back::PutBack;

/// Counts how often netattach's filters were moved to the front or put back, by index of the device on the
/// node. Each time takes the kernel some ten requests, and replaces filters, which triggers new checks of
/// everything.
#[derive(Debug, Default)]
pub(crate) struct Rivals(Mutex<PutBack<u32>>);

impl Rivals {
    /// Counts one more move to the front on a device. Returns `false` if this was done too often just now.
    pub(super) fn may_answer(&self, device: u32) -> bool {
        self.lock().once_more(device, Instant::now()).is_ok()
    }

    /// Returns how often filters were moved to the front on a device where other programs move theirs there
    /// too often, or were put back where other programs remove them too often; a lower bound.
    pub(crate) fn at(&self, device: u32) -> Option<u32> {
        self.lock().fought_over(&device, Instant::now())
    }

    /// Counts one more time that filters were put back on a device. This is never delayed: nothing judges
    /// packets without them.
    pub(crate) fn note(&self, device: u32) {
        // Beyond the bound, [`Rivals::at`] reports the conflict for as long as it goes on.
        let _ = self.lock().once_more(device, Instant::now());
    }

    fn lock(&self) -> MutexGuard<'_, PutBack<u32>> {
        // A poisoned lock can be used: each change is complete by itself.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
