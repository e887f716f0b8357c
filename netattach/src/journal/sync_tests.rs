//! Tests of plans that must survive a power failure if no thread can be started to sync them.

use std::io;

use super::files::{Appended, Files, OnDisk};
use super::{JournalError, JournalKey, Record, Store};
use crate::moment::boot_id;
use crate::plan::{Plan, fixtures};
use crate::sync::{Arc, Mutex, locked};

/// The directory of an agent that gets no more file descriptors.
#[derive(Debug)]
struct Short {
    disk: OnDisk,
    /// The names that survive a power failure.
    synced: Arc<Mutex<Vec<String>>>,
    is_broken: bool,
}

#[derive(Debug)]
struct Open {
    name: String,
    file: Box<dyn Appended>,
    synced: Arc<Mutex<Vec<String>>>,
    is_broken: bool,
}

impl Short {
    fn opened(&self, name: &str, file: Box<dyn Appended>) -> Box<dyn Appended> {
        let (name, synced) = (name.to_owned(), Arc::clone(&self.synced));
        Box::new(Open { name, file, synced, is_broken: self.is_broken })
    }
}

impl Files for Short {
    fn create(&self, name: &str) -> io::Result<Box<dyn Appended>> {
        Ok(self.opened(name, self.disk.create(name)?))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn Appended>> {
        Ok(self.opened(name, self.disk.open(name)?))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.disk.remove(name)
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
        locked(&self.synced).push("the directory".to_owned());
        Ok(())
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
        self.file.write_at(offset, bytes)
    }

    fn cut(&mut self, length: u64) -> io::Result<()> {
        self.file.cut(length)
    }

    fn again(&self) -> io::Result<Box<dyn Appended>> {
        Err(rustix::io::Errno::MFILE.into())
    }

    fn sync(&mut self) -> io::Result<()> {
        if self.is_broken {
            return Err(rustix::io::Errno::IO.into());
        }
        locked(&self.synced).push(self.name.clone());
        Ok(())
    }
}

/// Returns a record of `c`, and the synced names of its directory.
fn record(directory: &tempfile::TempDir, is_broken: bool) -> (Record, Arc<Mutex<Vec<String>>>) {
    let synced = Arc::<Mutex<Vec<String>>>::default();
    let disk = OnDisk(directory.path().to_owned());
    let files = Short { disk, synced: Arc::clone(&synced), is_broken };
    let store = Store::over(Arc::new(files), directory.path().to_owned(), boot_id().unwrap()).unwrap();
    let plan = Plan { sandbox: fixtures::sandbox("c"), attachments: Vec::new(), dynamic: None };
    let key = JournalKey { container_id: "c".to_owned(), ifname: "eth0".to_owned() };
    (store.create(key, plan).unwrap(), synced)
}

#[test]
fn a_plan_that_no_thread_writes_out_is_written_out_by_who_waits_for_it() {
    let directory = tempfile::tempdir().unwrap();
    let (mut record, synced) = record(&directory, false);
    record.wait_durable().unwrap();
    assert_eq!(*locked(&synced), [""; 0], "nobody has asked for it");
    record.start_sync();
    assert!(record.is_being_synced());
    for _ in 0..2 {
        record.wait_durable().unwrap();
        assert!(!record.is_being_synced());
        assert_eq!(*locked(&synced), ["c@eth0.jsonl", "the directory"]);
    }
}

/// The plugin must not run.
#[test]
fn a_plan_that_cannot_be_written_out_is_an_error_for_who_waits_for_it() {
    let directory = tempfile::tempdir().unwrap();
    let (mut record, synced) = record(&directory, true);
    record.start_sync();
    let error = record.wait_durable().unwrap_err();
    assert!(matches!(&error, JournalError::Sync { path, .. } if *path == record.path()), "{error}");
    assert_eq!(*locked(&synced), [""; 0]);
    record.remove().unwrap();
    assert!(!directory.path().join("c@eth0.jsonl").exists());
}
