//! Directories that belong to one agent exclusively: a second agent with the same records or pins would
//! treat the first one's pods as its own.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::{durable, flock};

/// How long the lock is retried, because another agent may be ending.
pub(in crate::agent) const PATIENCE: Duration = Duration::from_secs(1);

/// A directory cannot be locked.
#[derive(Debug, thiserror::Error)]
pub enum OwnedError {
    /// Another agent has locked it.
    #[error("another agent uses {what} {path}; find it with: fuser {path}")]
    Taken {
        /// What the directory is for.
        what: &'static str,
        /// The directory.
        path: PathBuf,
    },
    /// The directory cannot be created, opened or locked.
    #[error("lock {what} {path}{}", durable::remedy(source))]
    Lock {
        /// What the directory is for.
        what: &'static str,
        /// The directory.
        path: PathBuf,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
}

/// A directory that is locked until this is dropped.
#[derive(Debug)]
pub struct Owned {
    _directory: File,
}

/// Locks a directory, and creates it (mode 0700) if it is missing. The lock is on the directory itself
/// (flock(2)), so the directory may be read-only and needs no lock file.
pub(in crate::agent) fn own(
    what: &'static str,
    path: &Path,
    patience: Duration,
) -> Result<Owned, OwnedError> {
    let failed = |source| OwnedError::Lock { what, path: path.to_owned(), source };
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed)?;
    lock(what, path, patience)
}

/// Locks a directory if it exists.
///
/// # Errors
/// [`OwnedError`].
pub fn own_existing(what: &'static str, path: &Path) -> Result<Option<Owned>, OwnedError> {
    path.exists().then(|| lock(what, path, PATIENCE)).transpose()
}

/// Locks an existing directory. Blocks for up to `patience` while another process has locked it.
pub(in crate::agent) fn lock(
    what: &'static str,
    path: &Path,
    patience: Duration,
) -> Result<Owned, OwnedError> {
    let failed = |source| OwnedError::Lock { what, path: path.to_owned(), source };
    let directory = File::open(path).map_err(failed)?;
    // An agent that has sent its last answer on the socket may still be ending.
    match flock::lock(&directory, patience).map_err(failed)? {
        true => Ok(Owned { _directory: directory }),
        false => Err(OwnedError::Taken { what, path: path.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_one_owner_at_a_time_and_is_free_when_it_ends() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a/state");
        let first = own("state directory", &path, PATIENCE).unwrap();
        let message = own("state directory", &path, PATIENCE).unwrap_err().to_string();
        assert_eq!(
            message,
            format!("another agent uses state directory {0}; find it with: fuser {0}", path.display())
        );
        drop(first);
        lock("state directory", &path, PATIENCE).unwrap();
    }
}
