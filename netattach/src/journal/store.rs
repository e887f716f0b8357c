//! The directory of records.

use std::collections::BTreeSet;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::JournalError;
use super::record::{Key, Record};
use super::spare::Spare;
use crate::plan::Plan;

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
    boot: String,
    spare: Arc<Spare>,
    pools: Mutex<BTreeSet<Pool>>,
}

impl Store {
    /// Opens the directory, making it (mode 0700) when it is missing.
    pub fn open(directory: impl Into<PathBuf>) -> Result<Self, JournalError> {
        let directory = directory.into();
        let failed = |source| JournalError::Open { path: directory.clone(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(&directory).map_err(failed)?;
        let boot = std::fs::read_to_string(BOOT_ID).map_err(failed)?.trim().to_owned();
        let pools = read_pools(&directory.join(POOLS)).map_err(failed)?;
        let spare = Arc::new(Spare::none(&directory).map_err(failed)?);
        Ok(Self { directory, boot, spare, pools: Mutex::new(pools) })
    }

    /// Writes a new record with its plan.
    ///
    /// # Errors
    /// [`JournalError::Exists`] when there is one for the same sandbox and interface.
    pub fn create(&self, key: Key, plan: Plan) -> Result<Record, JournalError> {
        let path = self.directory.join(key.file_name()?);
        let file = match self.spare.or_new(&path) {
            Ok(file) => file,
            Err(source) if source.kind() == io::ErrorKind::AlreadyExists => {
                return Err(JournalError::Exists(key));
            }
            Err(source) => return Err(JournalError::Write { path, source }),
        };
        crate::crash_point!("journal", "opened");
        let created = Record::create(path.clone(), file, key, &self.boot, plan, Arc::clone(&self.spare));
        if created.is_err() {
            // A full disk leaves part of a line; nothing was done yet, so nothing needs to be remembered.
            let _ = std::fs::remove_file(&path);
        }
        created
    }

    /// What there is of a sandbox and interface.
    pub fn load(&self, key: &Key) -> Result<Loaded, JournalError> {
        let path = self.directory.join(key.file_name()?);
        let failed = |source| JournalError::Read { path: path.clone(), source };
        let mut file = match OpenOptions::new().read(true).append(true).open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Loaded::Absent),
            Err(source) => return Err(failed(source)),
        };
        let mut text = Vec::new();
        file.read_to_end(&mut text).map_err(failed)?;
        drop_partial_line(&file, &text).map_err(failed)?;
        let record =
            Record::replay(path.clone(), file, key.clone(), &self.boot, &text, Arc::clone(&self.spare))?;
        Ok(record.map_or(Loaded::Torn, |record| Loaded::Whole(Box::new(record))))
    }

    /// Removes a record that turned out to be torn.
    pub fn discard(&self, key: &Key) -> Result<(), JournalError> {
        let path = self.directory.join(key.file_name()?);
        match std::fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(JournalError::Write { path, source })
            }
            _ => Ok(()),
        }
    }

    /// Remembers, for good, a pool that leases are about to be taken from. Syncs to disk the first time.
    pub fn note_pool(&self, pool: Pool) -> Result<(), JournalError> {
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        if pools.contains(&pool) {
            return Ok(());
        }
        let path = self.directory.join(POOLS);
        let write = || -> io::Result<()> {
            let mut line = serde_json::to_vec(&pool)?;
            line.push(b'\n');
            let mut file = OpenOptions::new().append(true).create(true).mode(0o600).open(&path)?;
            file.write_all(&line)?;
            file.sync_all()?;
            File::open(&self.directory)?.sync_all()
        };
        write().map_err(|source| JournalError::Write { path: path.clone(), source })?;
        crate::crash_point!("journal", "pool");
        pools.insert(pool);
        Ok(())
    }

    /// Every pool that leases were ever taken from.
    pub fn pools(&self) -> Vec<Pool> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    /// The keys of all records.
    pub fn keys(&self) -> Result<Vec<Key>, JournalError> {
        let failed = |source| JournalError::Open { path: self.directory.clone(), source };
        let mut keys = Vec::new();
        for entry in std::fs::read_dir(&self.directory).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            keys.extend(name.to_str().and_then(Key::from_file_name));
        }
        keys.sort();
        Ok(keys)
    }

    /// Where the records are.
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

fn read_pools(path: &Path) -> io::Result<BTreeSet<Pool>> {
    match std::fs::read(path) {
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
fn drop_partial_line(file: &File, text: &[u8]) -> io::Result<()> {
    let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |newline| newline + 1);
    if whole < text.len() { file.set_len(whole as u64) } else { Ok(()) }
}
