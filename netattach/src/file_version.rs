//! Detects whether a file has changed, without reading it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The version of a file, from its metadata. Any change of its content sets its `ctime`, which no system call can set
/// to another value.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FileVersion {
    device: u64,
    inode: u64,
    length: u64,
    /// Seconds and nanoseconds.
    changed: (i64, i64),
}

/// A file that changed less than this before it was read may change again with the same timestamp. The coarsest
/// filesystems in use have a granularity of two seconds.
const SETTLED: Duration = Duration::from_secs(3);

impl FileVersion {
    /// Returns the version of a file that is about to be read.
    pub(crate) fn of(metadata: &fs::Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            length: metadata.len(),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Whether a later change is sure to have another timestamp.
    pub(crate) fn is_settled(&self, now: SystemTime) -> bool {
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(self.changed.0).is_ok_and(|changed| now >= Duration::from_secs(changed) + SETTLED)
    }
}
