//! The directory of records.

use std::collections::BTreeSet;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use super::JournalError;
use super::files::{Appended, Files, OnDisk};
use super::format::Damage;
use super::pools::{MOST_POOLS, NotNoted, NotedPool, POOLS, Pools};
use super::record::{JournalKey, Progress, Record, RecordFile, Replayed};
use crate::error_chain::Chain;
use crate::ipam::Pool;
use crate::moment::{Moment, boot_id};
use crate::plan::Plan;
use crate::sync::{Arc, Mutex, locked};
use crate::timing;

/// File with the id of the boot in which an agent last took over the records and, on further lines, the records that
/// an earlier boot has torn and that still exist. An agent that does not know these lines takes the file for that of
/// another boot.
const BOOT: &str = "boot";

/// Suffix of the temporary name of a record that is being written as a whole.
const UNFINISHED: &str = ".new";
/// The state of a record on disk.
#[derive(Debug)]
pub enum Loaded {
    /// There is no file.
    Absent,
    /// A file without a complete plan.
    Torn {
        /// `false`: the agent died before the first step, and nothing was done. `true`: the power failed, and at most
        /// leases of the sandbox are left.
        earlier_boot: bool,
    },
    /// A record with its plan.
    Whole(Box<Record>),
}

/// A directory of records. Callers ensure that only one of them works on a sandbox at a time.
#[derive(Debug)]
pub struct Store {
    directory: PathBuf,
    files: Arc<dyn Files>,
    boot: String,
    /// The records that count as of an earlier boot if they are torn: all that existed when the first agent of this
    /// boot opened the directory, and after [`Store::keep_torn`] those that were torn then.
    earlier: Mutex<BTreeSet<String>>,
    /// Whether the file [`BOOT`] names another boot: the next start would then take every record for one of an
    /// earlier boot.
    is_of_another: AtomicBool,
    pools: Pools,
}

impl Store {
    /// Opens the directory; creates it (mode 0700) if it is missing.
    pub fn open(directory: impl Into<PathBuf>) -> Result<Self, JournalError> {
        let directory = directory.into();
        let failed = |source| JournalError::Open { path: directory.clone(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(&directory).map_err(failed)?;
        // An earlier version kept the file of the last removed record.
        let _ = std::fs::remove_file(directory.join("spare"));
        let boot = boot_id().map_err(failed)?;
        Self::over(Arc::new(OnDisk(directory.clone())), directory.clone(), boot)
    }

    /// Opens a store over any implementation of `files`. `directory` is the name used in errors.
    pub(crate) fn over(
        files: Arc<dyn Files>,
        directory: PathBuf,
        boot: String,
    ) -> Result<Self, JournalError> {
        let failed = |source| JournalError::Open { path: directory.clone(), source };
        let pools = Pools::read(Arc::clone(&files)).map_err(failed)?;
        let noted = match files.open(BOOT).and_then(|mut file| file.read()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            read => read.map_err(failed)?,
        };
        let of_this = noted_earlier(&noted, &boot);
        let is_of_another = AtomicBool::new(of_this.is_none());
        let earlier = match of_this {
            Some(noted) => noted,
            None => files.list().map_err(failed)?.into_iter().collect(),
        };
        let earlier = Mutex::new(earlier);
        Ok(Self { directory, files, boot, earlier, is_of_another, pools })
    }

    /// Returns the current moment, as stored in records.
    pub fn now(&self) -> Moment {
        Moment::now(&self.boot)
    }

    /// Writes a new record with its plan.
    ///
    /// # Errors
    /// [`JournalError::Exists`] if there is one for the same sandbox and interface.
    pub fn create(&self, key: JournalKey, plan: Plan) -> Result<Record, JournalError> {
        self.ensure_boot()?;
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
        let place = RecordFile { path, name: name.clone(), files: Arc::clone(&self.files), file };
        let created = timing::part("journal", || Record::create(place, key, &self.boot, plan));
        if created.is_err() {
            // A full disk leaves part of a line; no step has run yet, so the file can be removed.
            let _ = self.files.remove(&name);
        }
        created
    }

    /// Writes a new record with the whole progress of its sandbox: whenever the agent ends, either the complete
    /// record exists or none.
    ///
    /// # Errors
    /// [`JournalError::Exists`] if a record for the same sandbox and interface exists. No new record exists then.
    pub fn create_whole(
        &self,
        key: JournalKey,
        plan: Plan,
        progress: Progress<'_>,
    ) -> Result<Record, JournalError> {
        self.ensure_boot()?;
        let name = key.file_name()?;
        let path = self.directory.join(&name);
        let unfinished = format!("{name}{UNFINISHED}");
        let failed = |source| JournalError::Write { path: path.clone(), source };
        let file = self.create_in_place(&unfinished).map_err(failed)?;
        let place =
            RecordFile { path: path.clone(), name: name.clone(), files: Arc::clone(&self.files), file };
        let written = Record::create(place, key.clone(), &self.boot, plan).and_then(|mut record| {
            record.continue_from(progress)?;
            Ok(record)
        });
        let named = written.and_then(|record| match self.files.give_name(&unfinished, &name) {
            Ok(()) => Ok(record),
            Err(source) if source.kind() == io::ErrorKind::AlreadyExists => Err(JournalError::Exists(key)),
            Err(source) => Err(failed(source)),
        });
        match &named {
            Ok(_) => crate::crash_point!("journal", "named"),
            Err(_) => drop(self.files.remove(&unfinished)),
        }
        named
    }

    /// Creates a file, and replaces one that an earlier agent left unfinished.
    fn create_in_place(&self, name: &str) -> io::Result<Box<dyn Appended>> {
        match self.files.create(name) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                self.files.remove(name)?;
                self.files.create(name)
            }
            created => created,
        }
    }

    /// Removes the temporary files of records that an earlier agent was writing as a whole. Must be called before
    /// this agent writes such a record.
    ///
    /// # Errors
    /// The journal cannot be listed.
    pub fn remove_unfinished(&self) -> Result<(), JournalError> {
        let failed = |source| JournalError::Open { path: self.directory.clone(), source };
        let names = self.files.list().map_err(failed)?;
        for name in names.iter().filter(|name| name.ends_with(UNFINISHED)) {
            // A file that stays is not a record, and the next one replaces it.
            let _ = self.files.remove(name);
        }
        Ok(())
    }

    /// Ensures that the current boot is noted before a record is created: if a bad byte made that record unreadable,
    /// it would otherwise count as torn by an earlier boot.
    fn ensure_boot(&self) -> Result<(), JournalError> {
        if self.is_of_another.load(Ordering::Relaxed) {
            let noted = self.note_boot();
            if self.is_of_another.load(Ordering::Relaxed) {
                noted?;
            }
        }
        Ok(())
    }

    /// Reads the record of a sandbox and interface that another operation may be working on, without changing it. Its
    /// last line may be incomplete, and its header may be changing.
    pub fn peek(&self, key: &JournalKey) -> Result<Loaded, JournalError> {
        match self.load(key) {
            Err(JournalError::Damaged { .. }) => self.load(key),
            Ok(Loaded::Whole(record)) if record.check_whole().is_err() => self.load(key),
            seen => seen,
        }
    }

    /// Whether a record is as it was written. A record that another operation has removed meanwhile counts as such.
    pub fn can_read(&self, key: &JournalKey) -> bool {
        match self.peek(key) {
            Ok(Loaded::Whole(record)) => record.check_whole().is_ok(),
            Ok(Loaded::Absent | Loaded::Torn { .. }) => true,
            Err(_) => false,
        }
    }

    /// Reads the record of a sandbox and interface.
    pub fn load(&self, key: &JournalKey) -> Result<Loaded, JournalError> {
        timing::part("journal", || self.read(key))
    }

    fn read(&self, key: &JournalKey) -> Result<Loaded, JournalError> {
        let name = key.file_name()?;
        let path = self.directory.join(&name);
        let failed = |source| JournalError::Read { path: path.clone(), source };
        let mut file = match self.files.open(&name) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Loaded::Absent),
            Err(source) => return Err(failed(source)),
        };
        let text = file.read().map_err(failed)?;
        let place =
            RecordFile { path: path.clone(), name: name.clone(), files: Arc::clone(&self.files), file };
        let is_earlier = || locked(&self.earlier).contains(&name);
        match Record::replay(place, key.clone(), &self.boot, &text)? {
            Replayed::Torn => Ok(Loaded::Torn { earlier_boot: is_earlier() }),
            Replayed::Lost(damage) if is_earlier() => {
                tracing::warn!(error = %JournalError::damaged(&path, &damage), "damaged record of an earlier boot; its leases are released");
                Ok(Loaded::Torn { earlier_boot: true })
            }
            Replayed::Lost(damage) => Err(JournalError::damaged(&path, &damage)),
            Replayed::Record(record) => Ok(Loaded::Whole(record)),
        }
    }

    /// Called when all records have been read, with those that an earlier boot has torn: from now on no other record
    /// counts as of an earlier boot, whatever happens to it. [`Store::note_boot`] must follow.
    pub fn keep_torn<'k>(&self, torn: impl IntoIterator<Item = &'k JournalKey>) {
        let torn: BTreeSet<String> = torn.into_iter().filter_map(|key| key.file_name().ok()).collect();
        locked(&self.earlier).retain(|name| torn.contains(name));
    }

    /// Notes the current boot, and which records an earlier boot has torn. If that cannot be written, removes the
    /// file: the next start then draws no conclusions, and keeps torn records that may have an address.
    ///
    /// # Errors
    /// The note could not be written.
    pub fn note_boot(&self) -> Result<(), JournalError> {
        self.note(&locked(&self.earlier))
    }

    fn note(&self, earlier: &BTreeSet<String>) -> Result<(), JournalError> {
        // Each name ends with a newline, so that the rest of a longer text does not form other names.
        let names = earlier.iter().flat_map(|name| [name.as_str(), "\n"]);
        let text: String =
            [&*self.boot].into_iter().chain((!earlier.is_empty()).then_some("\n")).chain(names).collect();
        let written = self.write_boot(text.as_bytes());
        if written.is_ok() || self.files.remove(BOOT).is_ok() {
            self.is_of_another.store(false, Ordering::Relaxed);
        }
        written.map_err(|source| JournalError::Write { path: self.directory.join(BOOT), source })
    }

    fn write_boot(&self, text: &[u8]) -> io::Result<()> {
        let mut file = match self.files.open(BOOT) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let mut file = self.files.create(BOOT)?;
                file.write_at(0, text)?;
                // Synced only once: a power failure leaves an existing file with its old or new content, but a new
                // file empty.
                file.sync()?;
                return self.files.sync();
            }
            opened => opened?,
        };
        if file.read().is_ok_and(|noted| noted == text) {
            return Ok(());
        }
        // Overwrites the content, which needs no space on a full disk. If the agent ends before the cut, names remain
        // that do not exist any more.
        file.write_at(0, text)?;
        crate::crash_point!("journal", "boot");
        file.cut(text.len() as u64)
    }

    /// The error for a record without a plan although objects of its sandbox exist: damage.
    pub fn emptied(&self, key: &JournalKey, what: String) -> JournalError {
        let path = self.path(key).unwrap_or_default();
        JournalError::damaged(&path, &[Damage { line: 1, what }])
    }

    /// Returns the path of a record's file, whether or not the file exists.
    ///
    /// # Errors
    /// The key cannot be part of a file name.
    pub fn path(&self, key: &JournalKey) -> Result<PathBuf, JournalError> {
        Ok(self.directory.join(key.file_name()?))
    }

    /// Removes a torn record.
    pub fn discard(&self, key: &JournalKey) -> Result<(), JournalError> {
        let name = key.file_name()?;
        let failed = |source| JournalError::Write { path: self.directory.join(&name), source };
        self.files.remove(&name).map_err(failed)?;
        let mut earlier = locked(&self.earlier);
        // From now on a record with this name is of this boot.
        if earlier.remove(&name)
            && let Err(error) = self.note(&earlier)
        {
            tracing::warn!(error = %Chain(&error), "cannot update the list of records that an earlier boot tore");
        }
        Ok(())
    }

    /// Whether a pool is noted: then [`Store::note_pool`] does not wait for the disk.
    pub fn has_noted(&self, pool: &Pool) -> bool {
        self.pools.has(pool)
    }

    /// Notes a pool that leases are about to be taken from. The pool stays noted until the next [`Store::keep_pools`]
    /// after the returned value is dropped. Waits for the disk the first time.
    ///
    /// # Errors
    /// [`JournalError::ManyPools`], or the file cannot be written.
    pub fn note_pool(&self, pool: Pool) -> Result<NotedPool<'_>, JournalError> {
        self.pools.note(pool).map_err(|error| match error {
            NotNoted::Many => JournalError::ManyPools(MOST_POOLS),
            NotNoted::File(source) => JournalError::Write { path: self.directory.join(POOLS), source },
        })
    }

    /// Whether there are enough pools for [`Store::keep_pools`] to be worthwhile.
    pub fn has_many_pools(&self) -> bool {
        self.pools.are_many()
    }

    /// Forgets the pools for which `is_needed` is false, if there are more than a few: the authors of networks name
    /// pools, and a node would otherwise keep all pools that it ever had. A pool that an operation leases from
    /// meanwhile is kept. Returns how many were forgotten.
    ///
    /// # Errors
    /// The file cannot be rewritten; all pools are still known then.
    pub fn keep_pools(&self, is_needed: impl Fn(&Pool) -> bool) -> Result<usize, JournalError> {
        let failed = |source| JournalError::Write { path: self.directory.join(POOLS), source };
        self.pools.keep(is_needed).map_err(failed)
    }

    /// The pools that leases may have been taken from.
    pub fn pools(&self) -> Vec<Pool> {
        self.pools.all()
    }

    /// The keys of all records.
    pub fn keys(&self) -> Result<Vec<JournalKey>, JournalError> {
        let failed = |source| JournalError::Open { path: self.directory.clone(), source };
        let names = self.files.list().map_err(failed)?;
        let mut keys: Vec<JournalKey> =
            names.iter().filter_map(|name| JournalKey::from_file_name(name)).collect();
        keys.sort();
        Ok(keys)
    }

    /// Path of the directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

/// Returns the records that an earlier boot has torn, according to the file [`BOOT`]. `None`: the file names another
/// boot, so all existing records are of an earlier one.
fn noted_earlier(noted: &[u8], boot: &str) -> Option<BTreeSet<String>> {
    let noted = String::from_utf8_lossy(noted);
    let mut lines = noted.lines();
    match lines.next() {
        Some(of) if of == boot => Some(lines.map(str::to_owned).collect()),
        Some(_) => None,
        // No boot was noted, or the agent was killed while writing. No conclusions are drawn.
        None => Some(BTreeSet::new()),
    }
}
