//! A directory of records on a full disk, for tests.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::files::{Appended, Files, OnDisk};
use crate::sync::{Arc, Mutex, locked};

/// The writes that a disk still accepts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Takes {
    /// Everything.
    #[default]
    Everything,
    /// No file grows beyond that length, in bytes. Empty ones can be created; existing ones can be overwritten,
    /// truncated and removed.
    UpTo(u64),
    /// No file grows. Existing ones can be overwritten, truncated and removed.
    NoMore,
    /// Nothing can be written. Existing files can be removed.
    Removals,
    /// The same, and removing a file makes room for everything.
    UntilRemoval,
    /// No change at all: it is read-only.
    Nothing,
}

/// A directory on such a disk.
#[derive(Debug, Clone)]
pub(crate) struct Disk {
    directory: PathBuf,
    takes: Arc<Mutex<Takes>>,
    keeps_names: Arc<Mutex<bool>>,
    fails_to_sync: Arc<Mutex<bool>>,
}

#[derive(Debug)]
struct Open {
    path: PathBuf,
    file: Box<dyn Appended>,
    takes: Arc<Mutex<Takes>>,
}

impl Disk {
    pub(crate) fn at(directory: &Path) -> Self {
        let (takes, keeps_names, fails_to_sync) = (Arc::default(), Arc::default(), Arc::default());
        Self { directory: directory.to_owned(), takes, keeps_names, fails_to_sync }
    }

    /// From now on it accepts only these changes.
    pub(crate) fn takes(&self, what: Takes) {
        *locked(&self.takes) = what;
    }

    /// From now on names cannot be removed, or can again: as if the agent had been killed before it removed a record.
    pub(crate) fn keeps_names(&self, keeps: bool) {
        *locked(&self.keeps_names) = keeps;
    }

    /// From now on names cannot be synced, or can again.
    pub(crate) fn fails_to_sync(&self, fails: bool) {
        *locked(&self.fails_to_sync) = fails;
    }

    fn disk(&self) -> OnDisk {
        OnDisk(self.directory.clone())
    }

    fn opened(&self, name: &str, file: Box<dyn Appended>) -> Box<dyn Appended> {
        Box::new(Open { path: self.directory.join(name), file, takes: Arc::clone(&self.takes) })
    }
}

/// Returns the kernel's error for a writer.
fn refused(takes: Takes) -> io::Error {
    match takes {
        Takes::Nothing => io::ErrorKind::ReadOnlyFilesystem.into(),
        _ => io::ErrorKind::StorageFull.into(),
    }
}

impl Files for Disk {
    fn create(&self, name: &str) -> io::Result<Box<dyn Appended>> {
        match *locked(&self.takes) {
            Takes::Everything | Takes::UpTo(_) => Ok(self.opened(name, self.disk().create(name)?)),
            takes => Err(refused(takes)),
        }
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn Appended>> {
        Ok(self.opened(name, self.disk().open(name)?))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let takes = *locked(&self.takes);
        if takes == Takes::Nothing || *locked(&self.keeps_names) {
            return Err(refused(Takes::Nothing));
        }
        self.disk().remove(name)?;
        if takes == Takes::UntilRemoval {
            self.takes(Takes::Everything);
        }
        Ok(())
    }

    fn give_name(&self, from: &str, name: &str) -> io::Result<()> {
        match *locked(&self.takes) {
            Takes::Everything | Takes::UpTo(_) => self.disk().give_name(from, name),
            takes => Err(refused(takes)),
        }
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        match *locked(&self.takes) {
            Takes::Nothing => Err(refused(Takes::Nothing)),
            _ => self.disk().rename(from, to),
        }
    }

    fn list(&self) -> io::Result<Vec<String>> {
        self.disk().list()
    }

    fn sync(&self) -> io::Result<()> {
        match *locked(&self.fails_to_sync) {
            true => Err(rustix::io::Errno::IO.into()),
            false => self.disk().sync(),
        }
    }
}

impl Appended for Open {
    fn read(&mut self) -> io::Result<Vec<u8>> {
        self.file.read()
    }

    fn length(&self) -> io::Result<u64> {
        self.file.length()
    }

    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let takes = *locked(&self.takes);
        let fits = match takes {
            Takes::Everything => true,
            Takes::UpTo(most) => offset + bytes.len() as u64 <= most,
            Takes::NoMore => offset + bytes.len() as u64 <= fs::metadata(&self.path)?.len(),
            Takes::Removals | Takes::UntilRemoval | Takes::Nothing => false,
        };
        if fits { self.file.write_at(offset, bytes) } else { Err(refused(takes)) }
    }

    fn cut(&mut self, length: u64) -> io::Result<()> {
        let takes = *locked(&self.takes);
        match takes {
            Takes::Everything | Takes::UpTo(_) | Takes::NoMore => self.file.cut(length),
            Takes::Removals | Takes::UntilRemoval | Takes::Nothing => Err(refused(takes)),
        }
    }

    fn again(&self) -> io::Result<Box<dyn Appended>> {
        self.file.again()
    }

    fn sync(&mut self) -> io::Result<()> {
        self.file.sync()
    }
}
