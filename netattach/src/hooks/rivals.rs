//! Other programs that put their filters before ours on a device, or take ours off, again and again.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::put_back::PutBack;

/// How often ours were put before the filters of others, or put back, by index of the device on the node. Each time costs the
/// kernel some ten requests, and takes filters off and on again, which has everything looked at anew.
#[derive(Debug, Default)]
pub(crate) struct Rivals(Mutex<PutBack<u32>>);

impl Rivals {
    /// Counts one more time that ours are put first on a device. `false`: that was done too often just now.
    pub(super) fn may_answer(&self, device: u32) -> bool {
        self.lock().once_more(device, Instant::now()).is_ok()
    }

    /// How often ours were put first on a device where others have theirs put first too often; or back, where others take them off
    /// too often: at least so often.
    pub(crate) fn at(&self, device: u32) -> Option<u32> {
        self.lock().fought_over(&device, Instant::now())
    }

    /// Counts one more time that ours were put back on a device, which is never put off: nothing judges without them.
    pub(crate) fn note(&self, device: u32) {
        // Beyond the bound that one minds who asks, for as long as it goes on.
        let _ = self.lock().once_more(device, Instant::now());
    }

    fn lock(&self) -> MutexGuard<'_, PutBack<u32>> {
        // Each change is complete by itself.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
