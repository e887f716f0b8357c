//! Kernel settings below `/proc/sys/net`. They belong to the network namespace of the accessing thread.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::OnceLock;

use crate::timing;

const ROOT: &str = "/proc/sys/net";

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
    std::fs::read_to_string(format!("{ROOT}/{key}")).is_ok_and(|found| found.trim_end() == value)
}

/// Whether the calling thread's network namespace is the machine's first, to which the kernel brings the cards of namespaces
/// that end (`default_device_exit_net`): only there are the settings that all namespaces share (`net_core_table`).
pub fn is_first_namespace() -> bool {
    std::path::Path::new(ROOT).join("core/dev_weight").exists()
}

/// What there are settings of below `key`, such as the devices below `ipv4/conf`.
///
/// # Errors
/// The directory cannot be read.
pub fn names(key: &str) -> io::Result<Vec<String>> {
    let entries = std::fs::read_dir(format!("{ROOT}/{key}"))?;
    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

/// Sets `key` (below `/proc/sys/net`, with slashes) to `value`; written only when it differs, because a write may be an
/// event for every interface.
///
/// # Errors
/// The setting does not exist or cannot be written.
pub fn ensure(key: &str, value: &str) -> Result<(), SysctlError> {
    let path = PathBuf::from(ROOT).join(key);
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

/// A setting whose file is kept open: looking the file up takes most of the time that reading it does. It is that of the network
/// namespace of whichever thread asks first.
#[derive(Debug)]
pub struct Kept {
    key: &'static str,
    file: OnceLock<File>,
}

impl Kept {
    /// The setting `key`, as for [`ensure`]. Opens nothing yet.
    pub const fn new(key: &'static str) -> Self {
        Self { key, file: OnceLock::new() }
    }

    /// As [`ensure`].
    ///
    /// # Errors
    /// The setting does not exist or cannot be written.
    pub fn ensure(&self, value: &str) -> Result<(), SysctlError> {
        match timing::part("sysctl", || self.is(value)) {
            true => Ok(()),
            false => ensure(self.key, value),
        }
    }

    fn is(&self, value: &str) -> bool {
        let file = match self.file.get() {
            Some(file) => file,
            // What is wrong with it is said by whoever writes it.
            None => match File::open(PathBuf::from(ROOT).join(self.key)) {
                Ok(file) => self.file.get_or_init(|| file),
                Err(_) => return false,
            },
        };
        // The kernel gives the whole value at once, and one that is longer is another.
        let mut found = [0; 64];
        let read = file.read_at(&mut found, 0).unwrap_or_default();
        found[..read].trim_ascii_end() == value.as_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::{Netns, within};

    #[test]
    fn a_namespace_that_was_made_is_not_the_machines_first() {
        assert!(!within(&Netns::private().unwrap(), is_first_namespace).unwrap());
    }

    #[test]
    fn a_setting_that_is_kept_is_as_it_is_now_and_of_the_namespace_that_asked_first() {
        let netns = Netns::private().unwrap();
        let (kept, key) = (Kept::new("ipv4/ip_forward"), "ipv4/ip_forward");
        within(&netns, || {
            assert!(!kept.is("1"));
            kept.ensure("1").unwrap();
            assert!(is(key, "1") && kept.is("1"));
            std::fs::write(format!("{ROOT}/{key}"), "0").unwrap();
            assert!(kept.is("0"));
        })
        .unwrap();
        kept.ensure("0").unwrap();
        let missing = Kept::new("ipv4/nothing").ensure("1").unwrap_err();
        assert_eq!(missing.source.kind(), io::ErrorKind::NotFound);
    }
}
