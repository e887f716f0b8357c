//! The file of the record that was removed last, kept for the next one.
//!
//! Records come and go with sandboxes. Where many files were deleted within the last minutes, ext4 takes longer to
//! find an inode for a new one (`find_inode_bit` passes over those deleted recently) than all else that a record takes.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{CWD, RenameFlags};

/// No record is called so: records have an `@` in their names.
const NAME: &str = "spare";

/// An empty file without a record, or none.
#[derive(Debug)]
pub(super) struct Spare {
    path: PathBuf,
    present: Mutex<bool>,
}

impl Spare {
    /// Begins with none. One that an earlier agent left may have been on its way to be emptied.
    pub(super) fn none(directory: &Path) -> io::Result<Self> {
        let path = directory.join(NAME);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(Self { path, present: Mutex::new(false) }),
        }
    }

    /// An empty file of that name, for its owner alone and open for appending.
    ///
    /// # Errors
    /// [`io::ErrorKind::AlreadyExists`] where the name is taken.
    pub(super) fn or_new(&self, path: &Path) -> io::Result<File> {
        if std::mem::take(&mut *self.present()) {
            match rustix::fs::renameat_with(CWD, &self.path, CWD, path, RenameFlags::NOREPLACE) {
                Ok(()) => return OpenOptions::new().append(true).open(path),
                // The name is taken, somebody removed the file, or the file system cannot do it; it is not needed.
                Err(_) => drop(std::fs::remove_file(&self.path)),
            }
        }
        OpenOptions::new().append(true).create_new(true).mode(0o600).open(path)
    }

    /// Removes a file: it becomes the spare one if there is none. A file that is gone is as good as removed.
    pub(super) fn keep_or_remove(&self, path: &Path) -> io::Result<()> {
        let mut present = self.present();
        let removed = match *present {
            false => std::fs::rename(path, &self.path),
            true => std::fs::remove_file(path),
        };
        match removed {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other?,
        }
        if !*present {
            // The record is gone whatever becomes of the file.
            let emptied = OpenOptions::new().write(true).open(&self.path).and_then(|file| file.set_len(0));
            match emptied {
                Ok(()) => *present = true,
                Err(_) => drop(std::fs::remove_file(&self.path)),
            }
        }
        Ok(())
    }

    fn present(&self) -> MutexGuard<'_, bool> {
        self.present.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;

    #[test]
    fn a_removed_file_is_the_next_new_one() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        std::fs::write(at(NAME), "left behind").unwrap();
        let spare = Spare::none(directory.path()).unwrap();
        assert!(!at(NAME).exists());

        let inode = |name: &str| std::fs::metadata(at(name)).unwrap().ino();
        for name in ["a", "b"] {
            spare.or_new(&at(name)).unwrap().write_all(b"content").unwrap();
        }
        let first = inode("a");
        for name in ["a", "b", "never"] {
            spare.keep_or_remove(&at(name)).unwrap();
        }
        let again = spare.or_new(&at("c")).unwrap().metadata().unwrap();
        assert_eq!((again.ino(), again.len(), again.permissions().mode() & 0o7777), (first, 0, 0o600));
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_name_that_is_taken_stays_whose_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let spare = Spare::none(directory.path()).unwrap();
        spare.or_new(&at("a")).unwrap();
        spare.keep_or_remove(&at("a")).unwrap();
        std::fs::write(at("b"), "theirs").unwrap();
        assert_eq!(spare.or_new(&at("b")).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read_to_string(at("b")).unwrap(), "theirs");
    }
}
