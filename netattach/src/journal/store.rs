//! The directory of records.

use std::collections::BTreeSet;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::JournalError;
use super::files::{Appended, Files, OnDisk};
use super::record::{Key, Record};
use crate::plan::Plan;
use crate::sync::{Arc, Mutex, locked};

/// Where the kernel says which boot this is.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Names the pools below the directory of records. No record is called so: records have an `@` in their names.
const POOLS: &str = "pools.jsonl";

/// Where one network's leases are.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Pool {
    /// Where networks keep their reservations.
    pub data_dir: PathBuf,
    /// Which network.
    pub network: String,
}

/// What there is of a record.
#[derive(Debug)]
pub enum Loaded {
    /// Nothing.
    Absent,
    /// A file without a whole plan. The agent died before the first step; or the power failed, and then nothing
    /// is left of the sandbox but leases, perhaps.
    Torn,
    /// All of it.
    Whole(Box<Record>),
}

/// A directory of records. Callers see to it that one sandbox is worked on by one caller at a time.
#[derive(Debug)]
pub struct Store {
    directory: PathBuf,
    files: Arc<dyn Files>,
    boot: String,
    pools: Mutex<BTreeSet<Pool>>,
}

impl Store {
    /// Opens the directory, making it (mode 0700) when it is missing.
    pub fn open(directory: impl Into<PathBuf>) -> Result<Self, JournalError> {
        let directory = directory.into();
        let failed = |source| JournalError::Open { path: directory.clone(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(&directory).map_err(failed)?;
        // Of an earlier version, which kept the file of the record removed last.
        let _ = std::fs::remove_file(directory.join("spare"));
        let boot = std::fs::read_to_string(BOOT_ID).map_err(failed)?.trim().to_owned();
        Self::over(Arc::new(OnDisk(directory.clone())), directory.clone(), boot)
    }

    /// The same over any files. `directory` is what errors call them.
    pub(crate) fn over(
        files: Arc<dyn Files>,
        directory: PathBuf,
        boot: String,
    ) -> Result<Self, JournalError> {
        let failed = |source| JournalError::Open { path: directory.clone(), source };
        let pools = Mutex::new(read_pools(&*files).map_err(failed)?);
        Ok(Self { directory, files, boot, pools })
    }

    /// Writes a new record with its plan.
    ///
    /// # Errors
    /// [`JournalError::Exists`] when there is one for the same sandbox and interface.
    pub fn create(&self, key: Key, plan: Plan) -> Result<Record, JournalError> {
        let name = key.file_name()?;
        let path = self.directory.join(&name);
        let file = match self.files.create(&name) {
            Ok(file) => file,
            Err(source) if source.kind() == io::ErrorKind::AlreadyExists => {
                return Err(JournalError::Exists(key));
            }
            Err(source) => return Err(JournalError::Write { path, source }),
        };
        crate::crash_point!("journal", "opened");
        let created = Record::create(path, Arc::clone(&self.files), file, key, &self.boot, plan);
        if created.is_err() {
            // A full disk leaves part of a line; nothing was done yet, so nothing needs to be remembered.
            let _ = self.files.remove(&name);
        }
        created
    }

    /// What there is of a sandbox and interface.
    pub fn load(&self, key: &Key) -> Result<Loaded, JournalError> {
        self.read(key, drop_partial_line)
    }

    /// The same of one that somebody else may be working on: only to be looked at. Its last line may be in the making.
    pub fn peek(&self, key: &Key) -> Result<Loaded, JournalError> {
        self.read(key, |_, _| Ok(()))
    }

    fn read(
        &self,
        key: &Key,
        mend: fn(&mut dyn Appended, &[u8]) -> io::Result<()>,
    ) -> Result<Loaded, JournalError> {
        let name = key.file_name()?;
        let path = self.directory.join(&name);
        let failed = |source| JournalError::Read { path: path.clone(), source };
        let mut file = match self.files.open(&name) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Loaded::Absent),
            Err(source) => return Err(failed(source)),
        };
        let text = file.read().map_err(failed)?;
        mend(&mut *file, &text).map_err(failed)?;
        let record =
            Record::replay(path.clone(), Arc::clone(&self.files), file, key.clone(), &self.boot, &text)?;
        Ok(record.map_or(Loaded::Torn, |record| Loaded::Whole(Box::new(record))))
    }

    /// Removes a record that turned out to be torn.
    pub fn discard(&self, key: &Key) -> Result<(), JournalError> {
        let name = key.file_name()?;
        let failed = |source| JournalError::Write { path: self.directory.join(&name), source };
        self.files.remove(&name).map_err(failed)
    }

    /// Remembers, for good, a pool that leases are about to be taken from. Syncs to disk the first time.
    pub fn note_pool(&self, pool: Pool) -> Result<(), JournalError> {
        let mut pools = locked(&self.pools);
        if pools.contains(&pool) {
            return Ok(());
        }
        let write = || -> io::Result<()> {
            let mut line = serde_json::to_vec(&pool)?;
            line.push(b'\n');
            let mut file = match self.files.open(POOLS) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => self.files.create(POOLS)?,
                other => other?,
            };
            file.append(&line)?;
            file.sync()?;
            self.files.sync()
        };
        write().map_err(|source| JournalError::Write { path: self.directory.join(POOLS), source })?;
        crate::crash_point!("journal", "pool");
        pools.insert(pool);
        Ok(())
    }

    /// Every pool that leases were ever taken from.
    pub fn pools(&self) -> Vec<Pool> {
        locked(&self.pools).iter().cloned().collect()
    }

    /// The keys of all records.
    pub fn keys(&self) -> Result<Vec<Key>, JournalError> {
        let failed = |source| JournalError::Open { path: self.directory.clone(), source };
        let names = self.files.list().map_err(failed)?;
        let mut keys: Vec<Key> = names.iter().filter_map(|name| Key::from_file_name(name)).collect();
        keys.sort();
        Ok(keys)
    }

    /// Where the records are.
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

fn read_pools(files: &dyn Files) -> io::Result<BTreeSet<Pool>> {
    match files.open(POOLS).and_then(|mut file| file.read()) {
        // A line that a crash cut off was not noted yet.
        Ok(text) => Ok(text
            .split(|byte| *byte == b'\n')
            .filter_map(|line| serde_json::from_slice(line).ok())
            .collect()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeSet::new()),
        Err(error) => Err(error),
    }
}

/// Cuts off a line that a crash left unfinished, so that the next one starts at a line's beginning.
fn drop_partial_line(file: &mut dyn Appended, text: &[u8]) -> io::Result<()> {
    let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |newline| newline + 1);
    if whole < text.len() { file.cut(whole as u64) } else { Ok(()) }
}
