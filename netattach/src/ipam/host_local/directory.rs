//! One network's directory of reservations, under its lock.
//!
//! The Go plugin defines the format: a file per address, named by its canonical text, holding the container's id, CR
//! LF and the interface's name (or, from old versions, the id alone); `last_reserved_ip.<set>` holding an address
//! without a newline; and `lock`, taken with flock(2). Sub-directories are ignored: neither plugin creates any.
//!
//! A reservation is written to [`TEMPORARY`] and then renamed, which fails if the name exists (`RENAME_NOREPLACE`),
//! like the Go plugin's exclusive create: a writer that is killed leaves either the complete file or none. Only the
//! holder of the lock uses the temporary name, so a stray one belongs to no writer and is removed by the next reader;
//! to the Go plugin it is a file whose name is not an address.
//!
//! The file of a released reservation is renamed to a spare name ([`TEMPORARY`] and a number) and emptied, for reuse
//! by one of the next reservations: if files are created and deleted often, ext4 spends most of the time on finding
//! an inode that was not deleted within the last minutes. At most [`MOST_SPARES`] are kept. Like the temporary name,
//! spare files belong to one process: the next reader removes leftovers.
//!
//! Nothing is synced to disk. A power failure also ends every container that holds an address here, so a lost
//! reservation does no harm; it may leave a file without content, like a Go plugin that is killed between create and
//! write. Under the lock such a file has no writer any more: it counts as free and is replaced.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::fs::{AtFlags, CWD, FileType, FlockOperation, Mode, OFlags, RenameFlags, Timespec, Timestamps};
use rustix::io::Errno;

use super::error::Error;
use super::files::{File, Files};
use super::range::RangeSet;
use super::{Owner, file_content};
use crate::ipam::{Held, InUse};
use crate::{bounded, budget, flock, sync};

pub(super) const LOCK: &str = "lock";
const TEMPORARY: &str = ".netattach-reservation";
/// The number of pods that a node has at a time, and some more.
const MOST_SPARES: u16 = 256;

/// An open directory and its lock file.
#[derive(Debug)]
pub(super) struct Opened {
    path: PathBuf,
    directory: OwnedFd,
    lock: OwnedFd,
}

/// A directory that is locked until this value is dropped.
pub(super) struct Locked<'a>(&'a Opened);

/// The reservations of a directory.
#[derive(Debug, Default)]
pub(super) struct Contents {
    files: Files,
    /// The files that could not be read, perhaps only for the moment. Their addresses count as taken, their owners are
    /// unknown.
    pub(super) unread: BTreeMap<IpAddr, Unread>,
    /// The address reserved last, by set, with the file that stores it, as read or written under this lock.
    cursors: HashMap<usize, Cursor>,
    /// Number of empty files: they have the spare names from 1 to this.
    spares: u16,
    /// Whether the files of released reservations are kept as spare files: useful only in a process that lives longer
    /// than one call.
    pub(super) keeps_spares: bool,
}

/// A reservation that could not be read.
#[derive(Debug)]
pub(super) struct Unread {
    path: PathBuf,
    reason: Errno,
}

impl Unread {
    pub(super) fn error(&self) -> Error {
        Error::Read { path: self.path.clone(), source: self.reason.into() }
    }

    /// Whether the file may be read when that is tried again: the system lacked something, or was interrupted.
    fn is_momentary(&self) -> bool {
        matches!(self.reason, Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::AGAIN | Errno::INTR)
    }
}

/// What is known of the addresses that an owner was given.
#[derive(Debug, Clone, Copy)]
pub(super) enum Given<'a> {
    /// All of them.
    These(&'a [IpAddr]),
    /// One of each of these sets, if any; without sets, nothing is known.
    OneOfEach(&'a [RangeSet]),
}

impl<'a> Given<'a> {
    /// `recorded`: the addresses; empty if they are not known. `sets`: the sets that one of each came from.
    pub(super) fn of(recorded: &'a [IpAddr], sets: &'a [RangeSet]) -> Self {
        if recorded.is_empty() { Self::OneOfEach(sets) } else { Self::These(recorded) }
    }

    /// Whether a reservation that could not be read may be the owner's as well. `found`: the addresses of its
    /// reservations that could be read.
    ///
    /// That of an address that it was given may be, whatever the reason, even where its first DEL has released the
    /// address and another owner has it by now: then repetitions of that DEL fail until the file can be read or is
    /// removed. If its addresses are not known, any of a set of which none was found may be, but only for the moment: a
    /// file that stays so may be anybody's, and every such DEL of the pool would fail for ever.
    fn may_include(self, address: IpAddr, unread: &Unread, found: &[IpAddr]) -> bool {
        let has = |set: &RangeSet, address: &IpAddr| set.range_of(*address).is_some();
        let may_lack = |set: &RangeSet| has(set, &address) && !found.iter().any(|it| has(set, it));
        match self {
            Self::These(given) => given.iter().any(|it| it.to_canonical() == address),
            Self::OneOfEach([]) => unread.is_momentary() && found.is_empty(),
            Self::OneOfEach(sets) => unread.is_momentary() && sets.iter().any(may_lack),
        }
    }
}

/// What was found of an owner.
#[derive(Debug)]
pub(super) struct Found {
    /// The addresses that it holds.
    pub(super) addresses: Vec<IpAddr>,
    /// Why there may be more: a reservation that may be its own could not be read.
    pub(super) unread: Option<Error>,
}

impl Found {
    /// Returns the addresses.
    ///
    /// # Errors
    /// There may be more.
    pub(super) fn whole(self) -> Result<Vec<IpAddr>, Error> {
        self.unread.map_or(Ok(self.addresses), Err)
    }
}

/// The address reserved last in a set, and its file.
#[derive(Debug)]
struct Cursor {
    file: OwnedFd,
    /// Length of the file, in bytes.
    length: usize,
    address: Option<IpAddr>,
}

/// Detects changes to a directory's entries since they were read: the modification time set by [`Locked::mark`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    device: u64,
    inode: u64,
    modified: (i64, i64),
}

impl Stamp {
    /// The stamp of the directory that has this path now; `None` if the kernel does not report it.
    pub(super) fn of(path: &Path) -> Option<Self> {
        rustix::fs::stat(path).ok().map(Self::from)
    }
}

impl From<rustix::fs::Stat> for Stamp {
    fn from(stat: rustix::fs::Stat) -> Self {
        Self { device: stat.st_dev, inode: stat.st_ino, modified: (stat.st_mtime, stat.st_mtime_nsec as i64) }
    }
}

impl Opened {
    /// Opens an existing directory; `None` if it does not exist.
    pub(super) fn open(path: &Path) -> Result<Option<Self>, Error> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = match rustix::fs::openat(CWD, path, flags, Mode::empty()) {
            Ok(directory) => directory,
            Err(error) if bounded::is_absent(&error.into()) => return Ok(None),
            Err(error) => return Err(Error::Open { path: path.to_owned(), source: error.into() }),
        };
        // Non-blocking, in case a FIFO has that name.
        let flags = OFlags::RDONLY | OFlags::CREATE | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let lock = rustix::fs::openat(&directory, LOCK, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|error| Error::Lock { path: path.join(LOCK), source: error.into() })?;
        Ok(Some(Self { path: path.to_owned(), directory, lock }))
    }

    /// Waits for the lock until `deadline`.
    pub(super) fn lock(&self, deadline: Instant) -> Result<Locked<'_>, Error> {
        match flock::lock_until(&self.lock, deadline) {
            Ok(true) => Ok(Locked(self)),
            Ok(false) => Err(Error::Busy { path: self.path.join(LOCK) }),
            Err(source) => Err(Error::Lock { path: self.path.join(LOCK), source }),
        }
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        // Unlocking a held lock cannot fail.
        let _ = rustix::fs::flock(&self.0.lock, FlockOperation::Unlock);
    }
}

impl Locked<'_> {
    /// Reads every reservation. One that cannot be read is [`Contents::unread`].
    ///
    /// # Errors
    /// The directory cannot be read now. What was read of it must not be used.
    pub(super) fn read(&self) -> Result<Contents, Error> {
        let failed = |error: Errno| Error::Read { path: self.0.path.clone(), source: error.into() };
        let mut contents = Contents::default();
        for entry in rustix::fs::Dir::read_from(&self.0.directory).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let Ok(name) = entry.file_name().to_str() else { continue };
            if name == TEMPORARY || is_spare(name) {
                self.remove_name(name).map_err(failed)?;
            } else if let Some(address) = address_of(name) {
                match self.read_reservation(name) {
                    Ok(Some(file)) => contents.files.insert(address, file),
                    Ok(None) => {}
                    Err(reason) => {
                        contents.files.insert(address, File::Unreadable);
                        contents.unread.insert(address, Unread { path: self.0.path.join(name), reason });
                    }
                }
            }
        }
        Ok(contents)
    }

    /// The address that was reserved last in a set. Content other than exactly an address, such as a torn write or an
    /// address with a newline, counts as none, as in the Go plugin: the search then starts at the beginning.
    pub(super) fn last_reserved(&self, contents: &Contents, set: usize) -> Option<IpAddr> {
        if let Some(cursor) = contents.cursors.get(&set) {
            return cursor.address;
        }
        let file = self.open_file(&cursor_name(set)).ok()?;
        let content = read_to_end(&file).ok()?;
        std::str::from_utf8(&content).ok()?.parse::<IpAddr>().ok().map(|address| address.to_canonical())
    }

    /// Writes a reservation, then the cursor of its set.
    pub(super) fn reserve(
        &self,
        contents: &mut Contents,
        address: IpAddr,
        owner: &Owner,
        set: usize,
    ) -> Result<(), Error> {
        self.reserve_again(contents, address, owner)?;
        self.write_cursor(contents, set, address).map_err(|error| Error::WriteCursor {
            path: self.0.path.join(cursor_name(set)),
            source: error.into(),
        })
    }

    /// Writes a reservation. The cursor stays where it is.
    pub(super) fn reserve_again(
        &self,
        contents: &mut Contents,
        address: IpAddr,
        owner: &Owner,
    ) -> Result<(), Error> {
        let name = address.to_string();
        let content = file_content(owner);
        let abandoned = contents.files.get(address) == Some(&File::Abandoned);
        let spare = (contents.spares > 0).then(|| spare_name(contents.spares));
        contents.spares = contents.spares.saturating_sub(1);
        self.write_reservation(&name, content.as_bytes(), spare.as_deref(), abandoned)
            .map_err(|error| Error::Reserve { path: self.0.path.join(&name), source: error.into() })?;
        crate::crash_point!("lease", name);
        contents.files.insert(address, File::Held(content.trim_ascii().as_bytes().into()));
        Ok(())
    }

    /// Removes a reservation. Succeeds if it does not exist.
    pub(super) fn remove(&self, contents: &mut Contents, address: IpAddr) -> Result<(), Error> {
        let name = address.to_string();
        let removed = match contents.keeps_spares && contents.spares < MOST_SPARES {
            true => self
                .make_spare(&name, &spare_name(contents.spares + 1))
                .map(|made| contents.spares += u16::from(made)),
            false => self.remove_name(&name),
        };
        removed.map_err(|error| Error::Remove { path: self.0.path.join(&name), source: error.into() })?;
        crate::crash_point!("released", name);
        contents.files.remove(address);
        Ok(())
    }

    /// Gives the directory a modification time that no change of its entries produces, so that any change by another
    /// process is detected, even one within the same tick of the kernel's clock: a point one second ago, to the
    /// nanosecond. `None` if the file system stores coarser times, as two marks could then be the same.
    pub(super) fn mark(&self) -> Option<Stamp> {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
        let mark = Timespec { tv_sec: now.tv_sec - 1, tv_nsec: now.tv_nsec };
        let times = Timestamps { last_access: mark, last_modification: mark };
        rustix::fs::futimens(&self.0.directory, &times).ok()?;
        let stamp = Stamp::from(rustix::fs::fstat(&self.0.directory).ok()?);
        Some(stamp).filter(|stamp| stamp.modified == (mark.tv_sec, mark.tv_nsec))
    }

    fn write_reservation(
        &self,
        name: &str,
        content: &[u8],
        spare: Option<&str>,
        replace: bool,
    ) -> Result<(), Errno> {
        let opened = spare.and_then(|spare| Some((spare, self.open_spare(spare).ok()?)));
        let (from, file) = match opened {
            Some(opened) => opened,
            None => (TEMPORARY, self.create_temporary()?),
        };
        let written = write_all(&file, content).and_then(|()| {
            crate::crash_point!("lease", "written");
            self.give_name(from, name, replace)
        });
        if written.is_err() {
            // The next reader removes a file that is left over.
            let _ = self.remove_name(from);
        }
        written
    }

    fn create_temporary(&self) -> Result<OwnedFd, Errno> {
        sync::step();
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let create = || rustix::fs::openat(&self.0.directory, TEMPORARY, flags, Mode::RUSR | Mode::WUSR);
        match create() {
            // Removed rather than truncated: a stray temporary file may be a hard link to a reservation.
            Err(Errno::EXIST) => self.remove_name(TEMPORARY).and_then(|()| create()),
            created => created,
        }
    }

    fn open_spare(&self, name: &str) -> Result<OwnedFd, Errno> {
        sync::step();
        let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(&self.0.directory, name, flags, Mode::empty())
    }

    /// Turns a reservation into a spare file. `false` if the reservation did not exist.
    ///
    /// Renamed first: from then on the address is free, even if the agent is killed before the file is emptied.
    fn make_spare(&self, name: &str, spare: &str) -> Result<bool, Errno> {
        sync::step();
        let directory = &self.0.directory;
        match rustix::fs::renameat(directory, name, directory, spare) {
            Err(Errno::NOENT) => return Ok(false),
            other => other?,
        }
        match self.open_spare(spare).and_then(|file| empty(&file)) {
            Ok(()) => Ok(true),
            Err(_) => self.remove_name(spare).map(|()| false),
        }
    }

    /// Renames a file that has been written; fails if the name exists, unless it is to be replaced.
    fn give_name(&self, from: &str, name: &str, replace: bool) -> Result<(), Errno> {
        sync::step();
        let directory = &self.0.directory;
        if replace {
            return rustix::fs::renameat(directory, from, directory, name);
        }
        match rustix::fs::renameat_with(directory, from, directory, name, RenameFlags::NOREPLACE) {
            // A file system without `RENAME_NOREPLACE`: the same in two steps.
            Err(Errno::INVAL | Errno::NOSYS) => {
                rustix::fs::linkat(directory, from, directory, name, AtFlags::empty())?;
                self.remove_name(from)
            }
            renamed => renamed,
        }
    }

    /// Overwrites, then truncates: ext4 writes a file that is truncated first to disk at once, which costs more than
    /// everything else here together. A writer killed in between leaves a wrong cursor, which only changes the point
    /// where the next search starts.
    fn write_cursor(&self, contents: &mut Contents, set: usize, address: IpAddr) -> Result<(), Errno> {
        // Removed until it is written: after a failure the file is opened and measured again.
        let (file, length) = match contents.cursors.remove(&set) {
            Some(cursor) => (cursor.file, cursor.length),
            None => {
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NONBLOCK | OFlags::CLOEXEC;
                let mode = Mode::RUSR | Mode::WUSR;
                let file = rustix::fs::openat(&self.0.directory, cursor_name(set), flags, mode)?;
                let length = usize::try_from(rustix::fs::fstat(&file)?.st_size).unwrap_or(usize::MAX);
                (file, length)
            }
        };
        let content = address.to_string();
        write_at_start(&file, content.as_bytes())?;
        if length > content.len() {
            rustix::fs::ftruncate(&file, content.len() as u64)?;
        }
        contents.cursors.insert(set, Cursor { file, length: content.len(), address: Some(address) });
        Ok(())
    }

    fn remove_name(&self, name: &str) -> Result<(), Errno> {
        sync::step();
        match rustix::fs::unlinkat(&self.0.directory, name, AtFlags::empty()) {
            Err(Errno::NOENT) => Ok(()),
            other => other,
        }
    }

    fn open_file(&self, name: &str) -> Result<OwnedFd, Errno> {
        sync::step();
        // Non-blocking: a FIFO of that name must not stall the directory.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.0.directory, name, flags, Mode::empty())?;
        match FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) {
            FileType::RegularFile => Ok(file),
            _ => Err(Errno::INVAL),
        }
    }

    /// Reads a reservation; `None`: a program without the lock has removed it meanwhile.
    ///
    /// # Errors
    /// The file cannot be read, perhaps for the moment, for example without a free descriptor, and perhaps for good, as
    /// on a bad block. Its address must not count as nobody's then: a DEL would succeed without releasing it.
    fn read_reservation(&self, name: &str) -> Result<Option<File>, Errno> {
        let content = match self.open_file(name).and_then(|file| read_to_end(&file)) {
            Ok(content) => content,
            Err(Errno::NOENT) => return Ok(None),
            Err(error) if is_no_reservation(error) => return Ok(Some(File::Unreadable)),
            Err(error) => return Err(error),
        };
        // Blocks that were allocated but not written before a power loss read as zeros.
        if content.iter().all(|byte| byte.is_ascii_whitespace() || *byte == 0) {
            return Ok(Some(File::Abandoned));
        }
        Ok(Some(File::Held(content.trim_ascii().into())))
    }
}

impl Contents {
    /// Finds what an owner holds. Entries of its container without an interface may be another interface's as long as
    /// one with its own may be unread.
    pub(super) fn find(&self, owner: &Owner, given: Given<'_>) -> Found {
        let found = self.found(self.with_interface(owner), given);
        match found.addresses.is_empty() && found.unread.is_none() {
            true => Found { addresses: self.without_interface(owner), unread: None },
            false => found,
        }
    }

    /// Finds what a container holds for any interface except those in `keep`.
    pub(super) fn find_of_container(&self, container_id: &str, keep: &[String]) -> Found {
        self.found(self.held_by_container(container_id, keep), Given::OneOfEach(&[]))
    }

    fn found(&self, addresses: Vec<IpAddr>, given: Given<'_>) -> Found {
        let mut unread = self.unread.iter();
        let unread = unread.find(|(address, unread)| given.may_include(**address, unread, &addresses));
        let unread = unread.map(|(_, unread)| unread.error());
        Found { addresses, unread }
    }

    /// The addresses among `expected` that an owner does not hold. It may hold those whose reservations could not be
    /// read, so they are not among them.
    pub(super) fn missing(&self, owner: &Owner, expected: &[IpAddr]) -> Vec<IpAddr> {
        let held = self.held_by(owner);
        let is_missing = |address: &IpAddr| !held.contains(address) && !self.unread.contains_key(address);
        expected.iter().map(IpAddr::to_canonical).filter(is_missing).collect()
    }

    /// Whether the address is reserved, by any owner.
    pub(super) fn is_taken(&self, address: IpAddr) -> bool {
        self.files.get(address).is_some_and(|file| *file != File::Abandoned)
    }

    /// All reserved addresses, in no order.
    pub(super) fn reserved(&self) -> Vec<IpAddr> {
        let held = self.files.iter().filter(|(_, file)| **file != File::Abandoned);
        held.map(|(address, _)| *address).collect()
    }

    /// All reservations in order.
    pub(super) fn all(&self) -> Vec<Held> {
        let held = self.files.iter().filter(|(_, file)| **file != File::Abandoned);
        let mut held: Vec<Held> =
            held.map(|(address, file)| Held { address: *address, owner: owner(file) }).collect();
        held.sort_unstable_by_key(|held| held.address);
        held
    }

    /// The holder of an address, if there is one that can be read.
    pub(super) fn holder(&self, address: IpAddr) -> Option<Owner> {
        self.files.get(address).and_then(owner)
    }

    /// The addresses of an owner in order. Entries of its container without an interface, from old versions, count
    /// only if there is none with its interface.
    pub(super) fn held_by(&self, owner: &Owner) -> Vec<IpAddr> {
        let exact = self.with_interface(owner);
        if exact.is_empty() { self.without_interface(owner) } else { exact }
    }

    fn with_interface(&self, owner: &Owner) -> Vec<IpAddr> {
        self.files.with_content(file_content(owner).trim_ascii().as_bytes())
    }

    fn without_interface(&self, owner: &Owner) -> Vec<IpAddr> {
        self.files.with_content(owner.container_id.trim_ascii().as_bytes())
    }

    /// Returns the addresses of all owners that are not in `in_use`, in order. An entry without an interface, from
    /// old versions, belongs to its container, whichever of its interfaces is named.
    pub(super) fn held_by_others(&self, in_use: &InUse) -> Vec<IpAddr> {
        let known: HashSet<String> = in_use
            .owners
            .iter()
            .flat_map(|owner| [file_content(owner), owner.container_id.clone()])
            .map(|content| content.trim_ascii().to_owned())
            .collect();
        let is_of_whole =
            |file: &File| owner(file).is_some_and(|owner| in_use.containers.contains(&owner.container_id));
        let is_stale = |file: &File| match file {
            File::Held(content) => {
                let is_known = std::str::from_utf8(content).is_ok_and(|text| known.contains(text));
                !is_known && !is_of_whole(file)
            }
            File::Abandoned | File::Unreadable => false,
        };
        let mut addresses: Vec<_> =
            self.files.iter().filter(|(_, file)| is_stale(file)).map(|(address, _)| *address).collect();
        addresses.sort_unstable();
        addresses
    }

    /// The addresses that a container holds for any interface except those in `keep`.
    fn held_by_container(&self, container_id: &str, keep: &[String]) -> Vec<IpAddr> {
        let holds = |content: &[u8]| {
            let Ok(text) = std::str::from_utf8(content) else { return false };
            match text.split_once("\r\n") {
                Some((id, ifname)) => id == container_id.trim() && !keep.iter().any(|name| name == ifname),
                None => text == container_id.trim(),
            }
        };
        let files =
            self.files.iter().filter(|(_, file)| matches!(file, File::Held(content) if holds(content)));
        files.map(|(address, _)| *address).collect()
    }
}

/// The owner in a reservation. Entries of old versions have no interface.
fn owner(file: &File) -> Option<Owner> {
    let File::Held(content) = file else { return None };
    let text = std::str::from_utf8(content).ok()?;
    let (id, ifname) = text.split_once("\r\n").unwrap_or((text, ""));
    Some(Owner { container_id: id.to_owned(), ifname: ifname.to_owned() })
}

/// The address in a file name. A name other than the canonical text never belongs to a reservation.
fn address_of(name: &str) -> Option<IpAddr> {
    name.parse::<IpAddr>().ok().filter(|address| address.to_canonical().to_string() == name)
}

fn spare_name(number: u16) -> String {
    format!("{TEMPORARY}.{number}")
}

fn is_spare(name: &str) -> bool {
    let number = name.strip_prefix(TEMPORARY).and_then(|rest| rest.strip_prefix('.'));
    number.is_some_and(|number| number.parse::<u16>().is_ok())
}

fn cursor_name(set: usize) -> String {
    format!("last_reserved_ip.{set}")
}

/// Whether the error says what the file is, not what the system lacks: not a regular file, longer than any reservation,
/// or not to be read by anybody. The same file gives the same error again, so its address is merely not handed out.
fn is_no_reservation(error: Errno) -> bool {
    matches!(
        error,
        // Of `open_file`: another kind of file, a symlink, a socket, a device.
        Errno::INVAL | Errno::LOOP | Errno::NXIO | Errno::NODEV
        // Of `read_to_end`: too long.
        | Errno::FBIG
        | Errno::ACCESS
        | Errno::PERM
    )
}

/// Empties a reservation's file, if it has no other hard link and has the properties of a new one.
fn empty(file: &OwnedFd) -> Result<(), Errno> {
    sync::step();
    let stat = rustix::fs::fstat(file)?;
    let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if !regular || stat.st_nlink != 1 || stat.st_mode & 0o7777 != 0o600 {
        return Err(Errno::PERM);
    }
    rustix::fs::ftruncate(file, 0)
}

fn read_to_end(file: &OwnedFd) -> Result<Vec<u8>, Errno> {
    let mut content = Vec::new();
    let mut buffer = [0; 512];
    loop {
        let count = rustix::io::retry_on_intr(|| rustix::io::read(file, &mut buffer))?;
        content.extend_from_slice(&buffer[..count]);
        if content.len() > budget::LEASE.most {
            return Err(Errno::FBIG);
        }
        // A short read of a regular file means its end.
        if count < buffer.len() {
            return Ok(content);
        }
    }
}

fn write_all(file: &OwnedFd, mut content: &[u8]) -> Result<(), Errno> {
    sync::step();
    while !content.is_empty() {
        let count = rustix::io::retry_on_intr(|| rustix::io::write(file, content))?;
        content = &content[count..];
    }
    Ok(())
}

fn write_at_start(file: &OwnedFd, content: &[u8]) -> Result<(), Errno> {
    sync::step();
    let mut written = 0;
    while written < content.len() {
        written +=
            rustix::io::retry_on_intr(|| rustix::io::pwrite(file, &content[written..], written as u64))?;
    }
    Ok(())
}

/// Creates a directory and its parents, readable for everyone.
pub(super) fn create(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o755).create(path)
}

#[cfg(test)]
mod tests {
    use super::super::range::{Limits, Range};
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn a() -> Owner {
        Owner { container_id: "a".to_owned(), ifname: "eth0".to_owned() }
    }

    /// A directory with reservations, and others that could not be read.
    fn contents(held: &[(&str, &str)], unread: &[(&str, Errno)]) -> Contents {
        let mut contents = Contents::default();
        for (address, text) in held {
            contents.files.insert(ip(address), File::Held(text.as_bytes().into()));
        }
        for (address, reason) in unread {
            contents.files.insert(ip(address), File::Unreadable);
            contents.unread.insert(ip(address), Unread { path: address.into(), reason: *reason });
        }
        contents
    }

    /// The addresses that are found, and the file that may be another.
    fn found(contents: &Contents, given: Given<'_>) -> (Vec<IpAddr>, Option<PathBuf>) {
        let Found { addresses, unread } = contents.find(&a(), given);
        let file = unread.map(|error| match error {
            Error::Read { path, .. } => path,
            other => panic!("{other}"),
        });
        (addresses, file)
    }

    fn sets() -> [RangeSet; 2] {
        let set = |subnet: &str| Range::new(subnet.parse().unwrap(), Limits::default()).unwrap();
        ["10.0.0.0/24", "fd00::/112"].map(|subnet| RangeSet(vec![set(subnet)]))
    }

    /// Otherwise one bad block fails every DEL of the pool whose ADD has got no address.
    #[test]
    fn a_file_that_stays_unread_fails_those_alone_whose_address_it_has() {
        let sets = sets();
        for (reason, is_momentary) in [(Errno::MFILE, true), (Errno::AGAIN, true), (Errno::IO, false)] {
            let contents = contents(&[], &[("10.0.0.7", reason)]);
            let file = Some(PathBuf::from("10.0.0.7"));
            for given in [Given::of(&[], &[]), Given::of(&[], &sets)] {
                let expected = file.clone().filter(|_| is_momentary);
                assert_eq!(found(&contents, given), (vec![], expected), "{reason} {given:?}");
            }
            assert_eq!(found(&contents, Given::of(&[ip("10.0.0.7")], &sets)), (vec![], file), "{reason}");
            assert_eq!(found(&contents, Given::of(&[ip("10.0.0.8")], &sets)), (vec![], None), "{reason}");
        }
    }

    /// Otherwise a half of a lease stays taken for ever if the agent is killed before its record has the addresses.
    #[test]
    fn without_a_record_an_unread_file_may_be_of_each_set_of_which_nothing_was_found() {
        let sets = sets();
        let of = |held: &[&str], unread: &str, sets: &[RangeSet]| {
            let held: Vec<_> = held.iter().map(|address| (*address, "a\r\neth0")).collect();
            let (addresses, file) = found(&contents(&held, &[(unread, Errno::NFILE)]), Given::of(&[], sets));
            assert_eq!(addresses.len(), held.len());
            file.is_some()
        };
        for (held, unread, expected) in [
            (&["10.0.0.7"][..], "fd00::7", true),
            (&["10.0.0.7"][..], "10.0.0.8", false),
            (&["10.0.0.7", "fd00::7"][..], "fd00::8", false),
            (&["10.0.0.7"][..], "fd01::7", false),
            (&[][..], "10.0.0.8", true),
            (&[][..], "192.0.2.1", false),
        ] {
            assert_eq!(of(held, unread, &sets), expected, "{held:?} {unread}");
        }
        assert!(!of(&["10.0.0.7"], "fd00::7", &[]), "of how many sets, nobody knows");
    }

    /// Otherwise the DEL of one interface takes the address of another.
    #[test]
    fn entries_without_interface_are_not_the_owners_while_one_with_its_interface_may_be_unread() {
        let contents = contents(&[("10.0.0.7", "a")], &[("10.0.0.8", Errno::IO)]);
        let of = |recorded: &str| found(&contents, Given::of(&[ip(recorded)], &sets()));
        assert_eq!(of("10.0.0.8"), (vec![], Some("10.0.0.8".into())));
        assert_eq!(of("10.0.0.7"), (vec![ip("10.0.0.7")], None));
    }
}
