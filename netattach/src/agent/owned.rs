//! Directories that one agent has for itself: a second one with the same records, or on the same pins, would take the
//! first one's pods for its own.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// How long another agent is waited for that may be ending.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often is asked meanwhile.
const INTERVAL: Duration = Duration::from_millis(20);

/// A directory cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum OwnedError {
    /// Another agent has it.
    #[error("another agent has {what} {path}; see which with: fuser {path}")]
    Taken {
        /// What the directory is for.
        what: &'static str,
        /// The directory.
        path: PathBuf,
    },
    /// It cannot be made, opened or locked.
    #[error("lock {what} {path}")]
    Lock {
        /// What the directory is for.
        what: &'static str,
        /// The directory.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// A directory that is locked until this is dropped.
#[derive(Debug)]
pub(super) struct Owned {
    _directory: File,
}

/// Locks a directory, which is made (mode 0700) when it is missing. The directory itself is locked (flock(2)), so that it
/// may be read-only, and holds nothing more.
pub(super) fn own(what: &'static str, path: &Path) -> Result<Owned, OwnedError> {
    let failed = |source| OwnedError::Lock { what, path: path.to_owned(), source };
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed)?;
    lock(what, path)
}

/// Locks a directory that is there.
pub(super) fn lock(what: &'static str, path: &Path) -> Result<Owned, OwnedError> {
    let failed = |source| OwnedError::Lock { what, path: path.to_owned(), source };
    let directory = File::open(path).map_err(failed)?;
    let began = Instant::now();
    loop {
        match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Owned { _directory: directory }),
            // One that has answered on the socket last may still be ending.
            Err(Errno::WOULDBLOCK) if began.elapsed() < PATIENCE => std::thread::sleep(INTERVAL),
            Err(Errno::WOULDBLOCK) => return Err(OwnedError::Taken { what, path: path.to_owned() }),
            Err(error) => return Err(failed(error.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_one_owner_at_a_time_and_is_free_when_it_ends() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a/state");
        let first = own("state directory", &path).unwrap();
        let said = own("state directory", &path).unwrap_err().to_string();
        assert_eq!(
            said,
            format!("another agent has state directory {0}; see which with: fuser {0}", path.display())
        );
        drop(first);
        lock("state directory", &path).unwrap();
    }
}
