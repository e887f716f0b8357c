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

/// File with the boot in which an agent last took over what was there, and below it, a line each, the records that an earlier
/// boot had torn and that are there still. An agent that does not know such lines takes the file for that of another boot.
const BOOT: &str = "boot";

/// Ends the name of a record that is being written as a whole, behind that which it will have.
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
    /// The records that are of an earlier boot if they are torn: all that were there when the first agent of this boot opened
    /// the directory, and from [`Store::keep_torn`] on those that were torn then.
    earlier: Mutex<BTreeSet<String>>,
    /// Whether the file [`BOOT`] is another boot's: the next start would take every record for one of that.
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

    /// The current moment, as records have it.
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

    /// Writes a new record with all that its sandbox has come to: whenever the agent ends, the whole of it is there, or none.
    ///
    /// # Errors
    /// [`JournalError::Exists`] if there is one for the same sandbox and interface. There is no new one.
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

    /// Creates a file, in the place of one that was not finished.
    fn create_in_place(&self, name: &str) -> io::Result<Box<dyn Appended>> {
        match self.files.create(name) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                self.files.remove(name)?;
                self.files.create(name)
            }
            created => created,
        }
    }

    /// Removes what an earlier agent has left of records that it was writing as a whole. To be called before there can be any
    /// such of this agent.
    ///
    /// # Errors
    /// The journal cannot be listed.
    pub fn remove_unfinished(&self) -> Result<(), JournalError> {
        let failed = |source| JournalError::Open { path: self.directory.clone(), source };
        let names = self.files.list().map_err(failed)?;
        for name in names.iter().filter(|name| name.ends_with(UNFINISHED)) {
            // One that stays is no record, and its place is taken by the next.
            let _ = self.files.remove(name);
        }
        Ok(())
    }

    /// Has the current boot noted before a record is made: what a bad byte makes unreadable of it would be taken for torn by an
    /// earlier boot.
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

    /// Whether a record is as it was written. One that another operation has removed meanwhile is.
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

    /// To be called when all records have been looked at, with those that an earlier boot has torn: no other is of an earlier
    /// boot from now on, whatever becomes of it. [`Store::note_boot`] is to follow.
    pub fn keep_torn<'k>(&self, torn: impl IntoIterator<Item = &'k JournalKey>) {
        let torn: BTreeSet<String> = torn.into_iter().filter_map(|key| key.file_name().ok()).collect();
        locked(&self.earlier).retain(|name| torn.contains(name));
    }

    /// Notes the current boot, and which records an earlier one has torn. Where that cannot be written, the file goes: the next
    /// start concludes nothing then, and keeps what is torn and may have an address.
    ///
    /// # Errors
    /// It could not be written.
    pub fn note_boot(&self) -> Result<(), JournalError> {
        self.note(&locked(&self.earlier))
    }

    fn note(&self, earlier: &BTreeSet<String>) -> Result<(), JournalError> {
        // Each name has its newline, so that what is left of a longer text makes no other names.
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
                // Once: a loss of power leaves one that was there as it was, or as it is written, but a new one empty.
                file.sync()?;
                return self.files.sync();
            }
            opened => opened?,
        };
        if file.read().is_ok_and(|noted| noted == text) {
            return Ok(());
        }
        // Over what is there, which takes no room of a full disk. An end before the cut leaves names that are not there any more.
        file.write_at(0, text)?;
        crate::crash_point!("journal", "boot");
        file.cut(text.len() as u64)
    }

    /// The error for a record without a plan although objects of its sandbox exist: damage.
    pub fn emptied(&self, key: &JournalKey, what: String) -> JournalError {
        let path = self.path(key).unwrap_or_default();
        JournalError::damaged(&path, &[Damage { line: 1, what }])
    }

    /// The file of a record, whether it is there or not.
    ///
    /// # Errors
    /// The key cannot be one.
    pub fn path(&self, key: &JournalKey) -> Result<PathBuf, JournalError> {
        Ok(self.directory.join(key.file_name()?))
    }

    /// Removes a record that is torn.
    pub fn discard(&self, key: &JournalKey) -> Result<(), JournalError> {
        let name = key.file_name()?;
        let failed = |source| JournalError::Write { path: self.directory.join(&name), source };
        self.files.remove(&name).map_err(failed)?;
        let mut earlier = locked(&self.earlier);
        // A record of that name is of this boot from now on.
        if earlier.remove(&name)
            && let Err(error) = self.note(&earlier)
        {
            tracing::warn!(error = %Chain(&error), "cannot update the list of records that an earlier boot tore");
        }
        Ok(())
    }

    /// Whether a pool is noted: [`Store::note_pool`] then does not wait for the disk.
    pub fn has_noted(&self, pool: &Pool) -> bool {
        self.pools.has(pool)
    }

    /// Notes a pool that leases are about to be taken from. It stays noted until a [`Store::keep_pools`] that comes after what is
    /// returned is dropped. Waits for the disk the first time.
    ///
    /// # Errors
    /// [`JournalError::ManyPools`], or the file cannot be written.
    pub fn note_pool(&self, pool: Pool) -> Result<NotedPool<'_>, JournalError> {
        self.pools.note(pool).map_err(|error| match error {
            NotNoted::Many => JournalError::ManyPools(MOST_POOLS),
            NotNoted::File(source) => JournalError::Write { path: self.directory.join(POOLS), source },
        })
    }

    /// Whether there are so many pools that [`Store::keep_pools`] is worth its time.
    pub fn has_many_pools(&self) -> bool {
        self.pools.are_many()
    }

    /// Forgets the pools of which `is_needed` is false, where there are more than a few: whoever defines networks names pools, and
    /// a node would have all that it ever had. One that somebody leases from meanwhile stays. Returns how many were forgotten.
    ///
    /// # Errors
    /// The file cannot be written anew; all are known then.
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

/// The records that an earlier boot has torn, by the file [`BOOT`]. `None`: it is another boot's, so all that are there are of an
/// earlier one.
fn noted_earlier(noted: &[u8], boot: &str) -> Option<BTreeSet<String>> {
    let noted = String::from_utf8_lossy(noted);
    let mut lines = noted.lines();
    match lines.next() {
        Some(of) if of == boot => Some(lines.map(str::to_owned).collect()),
        Some(_) => None,
        // Nobody has noted a boot, or who began to was killed. Nothing is concluded from it.
        None => Some(BTreeSet::new()),
    }
}
