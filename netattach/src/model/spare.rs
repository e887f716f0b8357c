//! A fault that the journal once had: the file of the last removed record was kept for the next record, and its lock
//! was released before the file had its new name.

use std::io;

use super::disk::Disk;
use crate::journal::files::{Appended, Files};
use crate::sync::{Mutex, locked};

const NAME: &str = "spare";

/// A directory that keeps a removed file for the next one.
#[derive(Debug, Default)]
pub(super) struct WithSpare {
    disk: Disk,
    present: Mutex<bool>,
}

impl WithSpare {
    pub(super) fn over(disk: Disk) -> Self {
        Self { disk, present: Mutex::new(false) }
    }
}

impl Files for WithSpare {
    fn create(&self, name: &str) -> io::Result<Box<dyn Appended>> {
        // The fault: a concurrent removal now moves its file to the spare name and truncates the file of that name.
        if std::mem::take(&mut *locked(&self.present)) && self.disk.move_to(NAME, name, false).is_ok() {
            return self.disk.open(name);
        }
        self.disk.create(name)
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn Appended>> {
        self.disk.open(name)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut present = locked(&self.present);
        if *present {
            return self.disk.remove(name);
        }
        self.disk.move_to(name, NAME, true)?;
        *present = self.disk.open(NAME).and_then(|mut file| file.cut(0)).is_ok();
        Ok(())
    }

    fn give_name(&self, from: &str, name: &str) -> io::Result<()> {
        self.disk.give_name(from, name)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.disk.rename(from, to)
    }

    fn list(&self) -> io::Result<Vec<String>> {
        self.disk.list()
    }

    fn sync(&self) -> io::Result<()> {
        self.disk.sync()
    }
}
