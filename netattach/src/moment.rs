//! Determines which of two events came first, independent of the wall clock.

use std::io;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The kernel's identifier of the current boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The time of a decision, for determining which of two came first. Does not use the wall clock, which can be set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    /// The boot of the node.
    pub boot: String,
    /// Nanoseconds since that boot, suspended time included. Absent in records of version 1.
    pub since_boot: Option<u64>,
}

impl Moment {
    /// Whether it was in this boot, and no longer ago than that. `false` where it is not known.
    pub fn is_within(&self, age: Duration) -> bool {
        let then = self.since_boot.map(Duration::from_nanos);
        let now = Self::now(&self.boot).since_boot.map(Duration::from_nanos);
        let same_boot = boot_id().is_ok_and(|boot| boot == self.boot);
        same_boot && then.zip(now).is_some_and(|(then, now)| now.saturating_sub(then) <= age)
    }

    /// The current moment, in that boot.
    pub fn now(boot: &str) -> Self {
        let since = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let nanoseconds = u64::try_from(since.tv_sec).unwrap_or(0).saturating_mul(1_000_000_000);
        let nanoseconds = nanoseconds.saturating_add(u64::try_from(since.tv_nsec).unwrap_or(0));
        Self { boot: boot.to_owned(), since_boot: Some(nanoseconds) }
    }
}

/// The identifier of the node's current boot.
///
/// # Errors
/// The kernel does not provide it.
pub fn boot_id() -> io::Result<String> {
    Ok(std::fs::read_to_string(BOOT_ID)?.trim().to_owned())
}
