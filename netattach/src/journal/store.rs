//! The directory of records.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::JournalError;
use super::record::{Key, Record};
use crate::plan::Plan;

/// Where the kernel says which boot this is.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// A directory of records. Callers see to it that one sandbox is worked on by one caller at a time.
#[derive(Debug)]
pub struct Store {
    directory: PathBuf,
    boot: String,
}

impl Store {
    /// Opens the directory, making it (mode 0700) when it is missing.
    pub fn open(directory: impl Into<PathBuf>) -> Result<Self, JournalError> {
        let directory = directory.into();
        let failed = |source| JournalError::Open { path: directory.clone(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(&directory).map_err(failed)?;
        let boot = std::fs::read_to_string(BOOT_ID).map_err(failed)?.trim().to_owned();
        Ok(Self { directory, boot })
    }

    /// Writes a new record with its plan.
    ///
    /// # Errors
    /// [`JournalError::Exists`] when there is one for the same sandbox and interface.
    pub fn create(&self, key: Key, plan: Plan) -> Result<Record, JournalError> {
        let path = self.directory.join(key.file_name()?);
        let file = match OpenOptions::new().append(true).create_new(true).mode(0o600).open(&path) {
            Ok(file) => file,
            Err(source) if source.kind() == io::ErrorKind::AlreadyExists => {
                return Err(JournalError::Exists(key));
            }
            Err(source) => return Err(JournalError::Write { path, source }),
        };
        let created = Record::create(path.clone(), file, key, &self.boot, plan);
        if created.is_err() {
            // A full disk leaves part of a line; nothing was done yet, so nothing needs to be remembered.
            let _ = std::fs::remove_file(&path);
        }
        created
    }

    /// The record of a sandbox and interface, if there is one. A file without a whole plan is removed: nothing
    /// was done on its account.
    pub fn load(&self, key: &Key) -> Result<Option<Record>, JournalError> {
        let path = self.directory.join(key.file_name()?);
        let failed = |source| JournalError::Read { path: path.clone(), source };
        let mut file = match OpenOptions::new().read(true).append(true).open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(failed(source)),
        };
        let mut text = Vec::new();
        file.read_to_end(&mut text).map_err(failed)?;
        drop_partial_line(&file, &text).map_err(failed)?;
        let record = Record::replay(path.clone(), file, key.clone(), &self.boot, &text);
        if record.is_none() {
            std::fs::remove_file(&path).map_err(failed)?;
        }
        Ok(record)
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

/// Cuts off a line that a crash left unfinished, so that the next one starts at a line's beginning.
fn drop_partial_line(file: &File, text: &[u8]) -> io::Result<()> {
    let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |newline| newline + 1);
    if whole < text.len() { file.set_len(whole as u64) } else { Ok(()) }
}
