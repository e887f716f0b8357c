//! Kernel settings below `/proc/sys/net`. They belong to the network namespace of the accessing thread.

use std::io;
use std::path::PathBuf;

use crate::timing;

/// A setting could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("set {path} to {value}")]
pub struct SysctlError {
    /// Its file.
    pub path: PathBuf,
    /// The intended value.
    pub value: String,
    /// The kernel's error.
    #[source]
    pub source: io::Error,
}

/// Whether a setting of the calling thread's network namespace has that value. One that cannot be read has none.
pub fn is(key: &str, value: &str) -> bool {
    std::fs::read_to_string(format!("/proc/sys/net/{key}")).is_ok_and(|found| found.trim_end() == value)
}

/// Sets `key` (below `/proc/sys/net`, with slashes) to `value`; written only when it differs, because a write may be an
/// event for every interface.
///
/// # Errors
/// The setting does not exist or cannot be written.
pub fn ensure(key: &str, value: &str) -> Result<(), SysctlError> {
    let path = PathBuf::from("/proc/sys/net").join(key);
    let set = || {
        if std::fs::read_to_string(&path)?.trim_end() == value {
            Ok(())
        } else {
            std::fs::write(&path, value)?;
            crate::crash_point!("sysctl", key);
            Ok(())
        }
    };
    timing::part("sysctl", set).map_err(|source| SysctlError {
        path: path.clone(),
        value: value.to_owned(),
        source,
    })
}
