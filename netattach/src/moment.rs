//! Which of two things came first, whatever becomes of the clock on the wall.

use std::io;

use serde::{Deserialize, Serialize};

/// Where the kernel says which boot this is.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// When something was decided, for telling which of two came first. Not by the clock on the wall, which can be set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    /// Which boot of the node.
    pub boot: String,
    /// Nanoseconds since that boot, suspended time included. Records of version 1 do not know.
    pub since_boot: Option<u64>,
}

impl Moment {
    /// Now, in that boot.
    pub fn now(boot: &str) -> Self {
        let since = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let nanoseconds = u64::try_from(since.tv_sec).unwrap_or(0).saturating_mul(1_000_000_000);
        let nanoseconds = nanoseconds.saturating_add(u64::try_from(since.tv_nsec).unwrap_or(0));
        Self { boot: boot.to_owned(), since_boot: Some(nanoseconds) }
    }
}

/// Which boot of the node this is.
///
/// # Errors
/// The kernel does not say.
pub fn boot_id() -> io::Result<String> {
    Ok(std::fs::read_to_string(BOOT_ID)?.trim().to_owned())
}
