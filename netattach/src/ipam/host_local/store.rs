//! Carries out allocations on the directories and caches their contents.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::allocator::{self, AllocateError, Reservations};
use super::directory::{self, Contents, Found, Given, LOCK, Locked, Opened, Stamp};
use super::range::RangeSet;
use super::{Config, Lease, Owner, Pool, config, survey, usage};
use crate::durable;
use crate::ipam::{self, Failure, Held, InUse, Lacking, Patience, PoolUse, Survey};
use crate::sync::{Arc, Mutex, locked, locked_until};

/// Default time limit for waiting for a directory's lock.
pub const LOCK_DEADLINE: Duration = Duration::from_secs(10);

/// Time limit for waiting in a check that is repeated soon, or that reads many directories.
const LOOK_DEADLINE: Duration = Duration::from_millis(100);

/// The reservations of this node.
///
/// The files are authoritative. The contents of a directory are cached only until another process changes it, so that
/// a call costs the same with ten reservations or ten thousand. Calls block: on the lock, and on the disk for a few
/// system calls.
#[derive(Debug)]
pub struct Leases {
    deadline: Duration,
    directories: Mutex<Directories>,
}

/// Maximum number of directories, of all pools, that are kept open and cached. Each takes a descriptor for itself, one
/// for its lock and one for each set of ranges.
const MOST_DIRECTORIES: usize = 64;

/// The most recently used directories.
#[derive(Debug, Default)]
struct Directories {
    known: HashMap<PathBuf, (u64, Arc<Mutex<Known>>)>,
    uses: u64,
}

/// The reservations of a directory when it was last read.
#[derive(Debug, Default)]
struct Known {
    opened: Option<Opened>,
    /// Present while `contents` is the directory's content at this stamp.
    stamp: Option<Stamp>,
    contents: Contents,
}

/// An operation on reservations failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No address can be leased.
    #[error("allocate an address from {directory}")]
    Allocate {
        /// The network's directory.
        directory: PathBuf,
        /// The reason.
        source: AllocateError,
    },
    /// CHECK: an address that the attachment should hold is not reserved for it.
    #[error("address {address} is not reserved for {owner} in {directory}")]
    NotReserved {
        /// The address of the previous result.
        address: IpAddr,
        /// The owner that should hold it.
        owner: Owner,
        /// The network's directory.
        directory: PathBuf,
    },
    /// CHECK: the attachment holds no address.
    #[error("no address is reserved for {owner} in {directory}")]
    NothingReserved {
        /// The owner that should hold one.
        owner: Owner,
        /// The network's directory.
        directory: PathBuf,
    },
    /// The name cannot be that of a directory.
    #[error("{0:?} is not a network name")]
    NetworkName(String),
    /// Another process held the lock until the deadline: try again later.
    #[error("{path} is locked by another process; find it with: fuser {path}")]
    Busy {
        /// The lock.
        path: PathBuf,
    },
    /// The directory cannot be created.
    #[error("create {path}{}", creating(source))]
    Create {
        /// The directory.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The directory cannot be opened.
    #[error("open {path}")]
    Open {
        /// The directory.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The lock cannot be taken, for a reason other than being held.
    #[error("lock {path}{}", durable::remedy(source))]
    Lock {
        /// The lock.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The directory, or a reservation in it, cannot be read now.
    #[error("read {path}")]
    Read {
        /// The directory or the reservation.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// A reservation cannot be written.
    #[error("write reservation {path}{}", durable::remedy(source))]
    Reserve {
        /// The reservation.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The address reserved last cannot be stored.
    #[error("write {path}{}", durable::remedy(source))]
    WriteCursor {
        /// The file of the address reserved last.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// A reservation cannot be removed.
    #[error("remove reservation {path}{}", durable::remedy(source))]
    Remove {
        /// The reservation.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
}

/// Returns the advice for a directory that cannot be created, to be appended to a message.
fn creating(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::ReadOnlyFilesystem => {
            ": it is on a read-only file system, as is all of an agent's pod that is not mounted there: \
             ipam.dataDir has to be below /var/lib/cni, or another directory that the pod has of the node"
                .to_owned()
        }
        _ => durable::remedy(error),
    }
}

impl Error {
    /// The pool without free addresses, and the requested address, if any.
    pub fn none_free(&self) -> Option<(Pool, Option<IpAddr>)> {
        let Self::Allocate { directory, source } = self else { return None };
        let network = directory.file_name()?.to_str()?.to_owned();
        let pool = Pool { data_dir: directory.parent()?.to_owned(), network };
        match source {
            AllocateError::RequestedTaken { address, .. } => Some((pool, Some(*address))),
            AllocateError::Exhausted { .. } => Some((pool, None)),
            _ => None,
        }
    }

    /// The consequence for the request.
    pub fn failure(&self) -> Failure {
        match self {
            Self::Busy { .. } => Failure::TryLater,
            Self::Allocate { source, .. } => match source {
                // An address becomes free when some pod is deleted. The owner's own address stays until a DEL that
                // has not arrived yet, or has failed.
                AllocateError::Exhausted { .. }
                | AllocateError::RequestedTaken { .. }
                | AllocateError::Duplicate { .. } => Failure::TryLater,
                AllocateError::RequestedGateway(_)
                | AllocateError::RequestedExcluded(_)
                | AllocateError::RequestedOutside(_) => Failure::WrongRequest,
            },
            Self::NotReserved { .. } | Self::NothingReserved { .. } | Self::NetworkName(_) => Failure::Other,
            Self::Create { .. }
            | Self::Open { .. }
            | Self::Lock { .. }
            | Self::Read { .. }
            | Self::Reserve { .. }
            | Self::WriteCursor { .. }
            | Self::Remove { .. } => Failure::Io,
        }
    }

    /// Whether the error concerns reservations rather than files: the directory is unchanged.
    fn is_decision(&self) -> bool {
        matches!(self, Self::Allocate { .. } | Self::NotReserved { .. } | Self::NothingReserved { .. })
    }
}

impl Default for Leases {
    fn default() -> Self {
        Self::with_deadline(LOCK_DEADLINE)
    }
}

impl Leases {
    /// Limits the time for waiting for a directory's lock.
    pub fn with_deadline(deadline: Duration) -> Self {
        Self { deadline, directories: Mutex::default() }
    }

    /// Reserves one address per range set: all of them or none.
    ///
    /// # Errors
    /// [`Error::Allocate`] if an address cannot be leased, [`Error::Busy`] if the directory stays locked, otherwise
    /// the failed file operation.
    pub fn allocate(&self, config: &Config, owner: &Owner) -> Result<Lease, Error> {
        let path = config.directory();
        let reserve = |directory: &Locked, contents: &mut Contents| {
            let view = View { directory, contents };
            let choices = allocator::choose(config, owner, &view)
                .map_err(|source| Error::Allocate { directory: path.clone(), source })?;
            for (set, choice) in choices.iter().enumerate() {
                if let Err(error) = directory.reserve(contents, choice.address.addr(), owner, set) {
                    for taken in &choices[..=set] {
                        // If this fails, the DEL that follows the failed ADD removes the file.
                        let _ = directory.remove(contents, taken.address.addr());
                    }
                    return Err(error);
                }
            }
            let addresses = choices.iter().map(|choice| (choice.address, Some(choice.gateway))).collect();
            Ok(Lease { addresses })
        };
        if let Some(lease) = self.locked(&path, reserve)? {
            return Ok(lease);
        }
        directory::create(&path).map_err(|source| Error::Create { path: path.clone(), source })?;
        let lease = self.locked(&path, reserve)?;
        lease.ok_or_else(|| Error::Open { path: path.clone(), source: io::ErrorKind::NotFound.into() })
    }

    /// Removes every reservation of `owner`, whichever set or configuration it came from, and returns their number. If
    /// there is none, or no directory, nothing is left to do: 0. `recorded`: the addresses that `owner` was given;
    /// empty if they are not known.
    ///
    /// # Errors
    /// [`Error::Read`] if the reservation of a recorded address cannot be read. Without recorded addresses, if one of a
    /// range set cannot be read for the moment and none of `owner` is found in that set; without sets as well, if none
    /// of `owner` is found at all. What could be found is removed all the same. [`Error::Busy`] if the directory stays
    /// locked, otherwise the failed file operation.
    pub fn release(&self, config: &Config, owner: &Owner, recorded: &[IpAddr]) -> Result<usize, Error> {
        let given = Given::of(recorded, &config.sets);
        self.remove_where(&config.data_dir, &config.network, |contents| contents.find(owner, given))
    }

    /// Removes all reservations whose owner is not in `in_use`, and returns their number. A reservation written
    /// before interfaces were recorded stays while its container has any interface in use.
    ///
    /// # Errors
    /// [`Error::Busy`] if the directory stays locked, otherwise the failed file operation.
    pub fn retain(&self, data_dir: &Path, network: &str, in_use: &InUse) -> Result<usize, Error> {
        self.remove_where(data_dir, network, |contents| Found {
            addresses: contents.held_by_others(in_use),
            unread: None,
        })
    }

    /// The addresses that a container holds for any interface except those in `keep`.
    ///
    /// # Errors
    /// As [`Leases::release`] without recorded addresses and sets.
    pub fn held(
        &self,
        data_dir: &Path,
        network: &str,
        container_id: &str,
        keep: &[String],
    ) -> Result<Vec<IpAddr>, Error> {
        let path = directory_of(data_dir, network)?;
        let held =
            self.locked(&path, |_, contents| contents.find_of_container(container_id, keep).whole())?;
        Ok(held.unwrap_or_default())
    }

    /// Removes a container's reservations for all interfaces except those in `keep`, and returns their number.
    ///
    /// # Errors
    /// As [`Leases::release`] without recorded addresses and sets.
    pub fn release_container(
        &self,
        data_dir: &Path,
        network: &str,
        container_id: &str,
        keep: &[String],
    ) -> Result<usize, Error> {
        self.remove_where(data_dir, network, |contents| contents.find_of_container(container_id, keep))
    }

    /// Removes the reservations of a network's pool that `which` finds, and returns their number; 0 if there is no
    /// directory.
    ///
    /// # Errors
    /// There may be more, which is determined after the removal; or the failed file operation.
    fn remove_where(
        &self,
        data_dir: &Path,
        network: &str,
        which: impl Fn(&Contents) -> Found,
    ) -> Result<usize, Error> {
        let path = directory_of(data_dir, network)?;
        let removed = self.locked(&path, |directory, contents| {
            let found = which(contents);
            for address in &found.addresses {
                directory.remove(contents, *address)?;
            }
            found.whole().map(|removed| removed.len())
        })?;
        Ok(removed.unwrap_or(0))
    }

    /// Verifies that every range set has an address left.
    ///
    /// # Errors
    /// [`Error::Allocate`] if one has none; [`Error::Busy`] if the directory stays locked.
    pub fn check_room(&self, config: &Config, patience: Patience) -> Result<(), Error> {
        let path = config.directory();
        // No attachment has this name, so no address counts as already held.
        let no_owner = Owner { container_id: String::new(), ifname: String::new() };
        let unasked = Config { requested: Vec::new(), ..config.clone() };
        self.locked_for(&path, patience, |directory, contents| {
            allocator::choose(&unasked, &no_owner, &View { directory, contents })
                .map(drop)
                .map_err(|source| Error::Allocate { directory: path.clone(), source })
        })
        .map(drop)
    }

    /// Returns the number of all and of leased addresses of the pool, by family. Waits at most `LOOK_DEADLINE` for
    /// the lock.
    ///
    /// # Errors
    /// [`Error::Busy`] if another process or thread has locked the directory; otherwise the failed file operation.
    pub fn usage(&self, config: &Config) -> Result<Vec<PoolUse>, Error> {
        let reserved =
            self.locked_for(&config.directory(), Patience::Look, |_, contents| Ok(contents.reserved()))?;
        Ok(usage::of(config, &reserved.unwrap_or_default()))
    }

    /// Returns the use of the configuration's pool. Waits at most `LOOK_DEADLINE` for the lock.
    ///
    /// # Errors
    /// As [`Leases::usage`].
    pub fn survey(&self, config: &Config) -> Result<Survey, Error> {
        let held = self.locked_for(&config.directory(), Patience::Look, |_, contents| Ok(contents.all()))?;
        Ok(survey::survey(config, held.unwrap_or_default()))
    }

    /// Returns all leased addresses of a network's pool.
    ///
    /// # Errors
    /// [`Error::Busy`] if the directory stays locked, otherwise the failed file operation.
    pub fn holders(&self, data_dir: &Path, network: &str, patience: Patience) -> Result<Vec<Held>, Error> {
        let path = directory_of(data_dir, network)?;
        Ok(self.locked_for(&path, patience, |_, contents| Ok(contents.all()))?.unwrap_or_default())
    }

    /// Verifies that `owner` holds each address of `expected`; if `expected` is empty, that it holds any at all.
    ///
    /// # Errors
    /// [`Error::NotReserved`] or [`Error::NothingReserved`] if it does not; [`Error::Read`] if that is not known, as
    /// for [`Leases::release`]; [`Error::Busy`] if the directory stays locked; otherwise the failed file
    /// operation.
    pub fn check(
        &self,
        data_dir: &Path,
        network: &str,
        owner: &Owner,
        expected: &[IpAddr],
    ) -> Result<(), Error> {
        let path = directory_of(data_dir, network)?;
        let given = Given::of(expected, &[]);
        let held = self.locked(&path, |_, contents| contents.find(owner, given).whole())?;
        let held = held.unwrap_or_default();
        match expected.iter().find(|address| !held.contains(&address.to_canonical())) {
            Some(&address) => Err(Error::NotReserved { address, owner: owner.clone(), directory: path }),
            None if held.is_empty() => Err(Error::NothingReserved { owner: owner.clone(), directory: path }),
            None => Ok(()),
        }
    }

    /// Finds those owners in `holders` that do not hold each of their addresses, or any address if they list none, and
    /// the reservations that cannot be read now. Locks the directory once for all, for which it waits at most
    /// `LOOK_DEADLINE`.
    ///
    /// # Errors
    /// [`Error::Busy`] if another process or thread has locked the directory; otherwise the failed file operation.
    pub fn lacking(
        &self,
        data_dir: &Path,
        network: &str,
        holders: &[(Owner, Vec<IpAddr>)],
    ) -> Result<Lacking, Error> {
        let path = directory_of(data_dir, network)?;
        let lacks = |contents: &Contents, owner: &Owner, expected: &[IpAddr]| match expected.is_empty() {
            true => contents.find(owner, Given::of(&[], &[])).whole().is_ok_and(|held| held.is_empty()),
            false => !contents.missing(owner, expected).is_empty(),
        };
        let lacking = self.locked_for(&path, Patience::Look, |_, contents| {
            let all = holders.iter().enumerate();
            let lacking = all.filter(|(_, (owner, expected))| lacks(contents, owner, expected));
            let unread = contents.unread.values().map(|unread| ipam::Error::from(unread.error()));
            Ok(Lacking { holders: lacking.map(|(at, _)| at).collect(), unread: unread.collect() })
        })?;
        // Without a directory there are no reservations.
        let all = || Lacking { holders: (0..holders.len()).collect(), unread: Vec::new() };
        Ok(lacking.unwrap_or_else(all))
    }

    /// Reserves addresses of `owner` again that another program has removed, and returns them. Recreates a missing
    /// directory. Passes over addresses whose reservations cannot be read now, as they may not have been removed.
    ///
    /// # Errors
    /// [`Error::NotReserved`] if another owner has one of the addresses now; [`Error::Busy`] if the directory stays
    /// locked; otherwise the failed file operation.
    pub fn restore(
        &self,
        data_dir: &Path,
        network: &str,
        owner: &Owner,
        addresses: &[IpAddr],
    ) -> Result<Vec<IpAddr>, Error> {
        let path = directory_of(data_dir, network)?;
        let restore = |directory: &Locked<'_>, contents: &mut Contents| {
            let mut restored = Vec::new();
            for address in contents.missing(owner, addresses) {
                if contents.is_taken(address) {
                    return Err(Error::NotReserved {
                        address,
                        owner: owner.clone(),
                        directory: path.clone(),
                    });
                }
                directory.reserve_again(contents, address, owner)?;
                restored.push(address);
            }
            Ok(restored)
        };
        if let Some(restored) = self.locked(&path, restore)? {
            return Ok(restored);
        }
        directory::create(&path).map_err(|source| Error::Create { path: path.clone(), source })?;
        let restored = self.locked(&path, restore)?;
        restored.ok_or_else(|| Error::Open { path: path.clone(), source: io::ErrorKind::NotFound.into() })
    }

    /// Runs `act` with the directory locked and its contents known; `None` if there is no directory.
    fn locked<T>(
        &self,
        path: &Path,
        act: impl FnOnce(&Locked<'_>, &mut Contents) -> Result<T, Error>,
    ) -> Result<Option<T>, Error> {
        self.locked_for(path, Patience::Operation, act)
    }

    /// Like [`Leases::locked`], with the patience of an operation or of a check.
    fn locked_for<T>(
        &self,
        path: &Path,
        patience: Patience,
        act: impl FnOnce(&Locked<'_>, &mut Contents) -> Result<T, Error>,
    ) -> Result<Option<T>, Error> {
        let known = self.known(path);
        match patience {
            Patience::Operation => {
                let deadline = Instant::now() + self.deadline;
                locked(&known).act(path, deadline, After::Mark, act)
            }
            Patience::Look => {
                let deadline = Instant::now() + LOOK_DEADLINE;
                // A thread that waits for another process holds this lock meanwhile.
                match locked_until(&known, deadline) {
                    Some(mut known) => known.act(path, deadline, After::Keep, act),
                    None => Err(Error::Busy { path: path.join(LOCK) }),
                }
            }
        }
    }

    fn known(&self, path: &Path) -> Arc<Mutex<Known>> {
        locked(&self.directories).of(path)
    }
}

/// How a directory is known again after its contents have been used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum After {
    /// By a new mark.
    Mark,
    /// By the mark that it has: a check changes nothing, and an idle node need not write to the disk for it.
    Keep,
}

impl Known {
    /// As [`Leases::locked`].
    fn act<T>(
        &mut self,
        path: &Path,
        deadline: Instant,
        after: After,
        act: impl FnOnce(&Locked<'_>, &mut Contents) -> Result<T, Error>,
    ) -> Result<Option<T>, Error> {
        let Self { opened, stamp, contents } = self;
        // Taken, not read: after any failure the next call reads the directory.
        let remembered = stamp.take();
        if let (Some(opened), Some(_)) = (&*opened, remembered) {
            let directory = opened.lock(deadline)?;
            // Other processes change the directory only under the lock.
            if Stamp::of(path) == remembered {
                contents.keeps_spares = true;
                let kept = remembered.filter(|_| after == After::Keep);
                return acted(&directory, stamp, kept, contents, act).map(Some);
            }
        }
        *opened = Opened::open(path)?;
        let Some(opened) = opened else { return Ok(None) };
        let directory = opened.lock(deadline)?;
        *contents = directory.read()?;
        acted(&directory, stamp, None, contents, act).map(Some)
    }
}

impl Directories {
    /// The cached state of a directory. If the cache is full, the least recently used directories that are not in use
    /// now are dropped: the files are authoritative.
    fn of(&mut self, path: &Path) -> Arc<Mutex<Known>> {
        self.uses += 1;
        if let Some((used, known)) = self.known.get_mut(path) {
            *used = self.uses;
            return Arc::clone(known);
        }
        while self.known.len() >= MOST_DIRECTORIES {
            let unused = self.known.iter().filter(|(_, (_, known))| Arc::strong_count(known) == 1);
            let Some(oldest) = unused.min_by_key(|(_, (used, _))| *used).map(|(path, _)| path.clone()) else {
                break;
            };
            self.known.remove(&oldest);
        }
        let known = Arc::default();
        self.known.insert(path.to_owned(), (self.uses, Arc::clone(&known)));
        known
    }
}

/// Runs `act`, and marks the directory unless its state may be unknown afterwards. `kept`: the mark that it has, if
/// `act` changes nothing.
fn acted<T>(
    directory: &Locked<'_>,
    stamp: &mut Option<Stamp>,
    kept: Option<Stamp>,
    contents: &mut Contents,
    act: impl FnOnce(&Locked<'_>, &mut Contents) -> Result<T, Error>,
) -> Result<T, Error> {
    let result = act(directory, contents);
    // What could not be read now is read by the next call.
    if contents.unread.is_empty() && result.as_ref().err().is_none_or(Error::is_decision) {
        *stamp = kept.or_else(|| directory.mark());
    }
    result
}

/// The allocator's view of a locked directory.
struct View<'a> {
    directory: &'a Locked<'a>,
    contents: &'a Contents,
}

impl Reservations for View<'_> {
    fn is_taken(&self, address: IpAddr) -> bool {
        self.contents.is_taken(address)
    }
    fn holder(&self, address: IpAddr) -> Option<Owner> {
        self.contents.holder(address)
    }

    fn held_by(&self, owner: &Owner, set: &RangeSet) -> Option<IpAddr> {
        self.contents.held_by(owner).into_iter().find(|address| set.range_of(*address).is_some())
    }

    fn last_reserved(&self, set: usize) -> Option<IpAddr> {
        self.directory.last_reserved(self.contents, set)
    }
}

fn directory_of(data_dir: &Path, network: &str) -> Result<PathBuf, Error> {
    match config::is_network_name(network) {
        true => Ok(data_dir.join(network)),
        false => Err(Error::NetworkName(network.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use rustix::io::Errno;
    use serde_json::json;

    use super::super::withheld::Withheld;
    use super::*;
    use crate::error_chain::Chain;

    fn config(data_dir: &Path, ranges: serde_json::Value) -> Config {
        let value =
            json!({"cniVersion": "1.1.0", "name": "net", "ipam": {"dataDir": data_dir, "ranges": ranges}});
        Config::parse(value.as_object().unwrap(), None).unwrap()
    }

    fn owner(container_id: &str, ifname: &str) -> Owner {
        Owner { container_id: container_id.to_owned(), ifname: ifname.to_owned() }
    }

    const SPARE: &str = ".netattach-reservation.1";
    const SECOND: &str = ".netattach-reservation.2";

    /// Name and content of every file except the lock.
    fn files(config: &Config) -> Vec<(String, String)> {
        let mut files: Vec<_> = fs::read_dir(config.directory())
            .unwrap()
            .map(|entry| entry.unwrap())
            .map(|entry| {
                (entry.file_name().into_string().unwrap(), fs::read_to_string(entry.path()).unwrap())
            })
            .filter(|(name, _)| name != "lock")
            .collect();
        files.sort();
        files
    }

    fn named(files: &[(&str, &str)]) -> Vec<(String, String)> {
        files.iter().map(|(name, content)| ((*name).to_owned(), (*content).to_owned())).collect()
    }

    fn addresses(lease: &Lease) -> Vec<String> {
        lease.addresses.iter().map(|(address, _)| address.to_string()).collect()
    }

    #[test]
    fn files_have_the_content_and_the_mode_of_the_go_plugin() {
        let dir = tempfile::tempdir().unwrap();
        let config =
            config(dir.path(), json!([[{"subnet": "10.0.0.0/29"}], [{"subnet": "2001:db8:0:0:1::/112"}]]));
        let lease = allocate(&config, &owner(" abc ", "eth0"));
        assert_eq!(addresses(&lease), ["10.0.0.2/29", "2001:db8::1:0:0:2/112"]);
        assert_eq!(lease.addresses[0].1, Some("10.0.0.1".parse().unwrap()));
        assert_eq!(
            files(&config),
            named(&[
                ("10.0.0.2", "abc\r\neth0"),
                ("2001:db8::1:0:0:2", "abc\r\neth0"),
                ("last_reserved_ip.0", "10.0.0.2"),
                ("last_reserved_ip.1", "2001:db8::1:0:0:2"),
            ])
        );
        for name in ["10.0.0.2", "last_reserved_ip.0"] {
            let mode = fs::metadata(config.directory().join(name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o7777, 0o600, "{name}");
        }
    }

    #[test]
    fn a_lease_file_of_the_largest_size_has_an_owner_and_a_larger_one_blocks_its_address() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), json!([[{"subnet": "10.0.0.0/29"}]]));
        let most = crate::budget::LEASE.most;
        let abc = owner("abc", "eth0");
        for (bytes, released, next) in [(most, 1, "10.0.0.2/29"), (most + 1, 0, "10.0.0.3/29")] {
            fs::create_dir_all(config.directory()).unwrap();
            fs::write(config.directory().join("10.0.0.2"), crate::bounded::padded("abc\r\neth0", bytes))
                .unwrap();
            let leases = Leases::default();
            assert_eq!(leases.release(&config, &abc, &[]).unwrap(), released, "{bytes}");
            assert_eq!(addresses(&leases.allocate(&config, &owner("b", "eth0")).unwrap()), [next], "{bytes}");
            assert!(config.directory().join("10.0.0.2").exists(), "{bytes}");
            fs::remove_dir_all(config.directory()).unwrap();
        }
    }

    fn allocate(config: &Config, owner: &Owner) -> Lease {
        Leases::default().allocate(config, owner).unwrap()
    }

    /// Otherwise a DEL would succeed and leave the address taken for ever, and so would the next ones: the directory was
    /// remembered as one of files that nobody can read.
    #[test]
    fn a_reservation_that_cannot_be_opened_for_the_moment_is_not_nobodys() {
        const ALONE: &str = "NETATTACH_TEST_ALONE";
        if std::env::var_os(ALONE).is_none() {
            // The limit of open files is that of the process.
            let (_, module) = module_path!().split_once("::").unwrap();
            let name = format!("{module}::a_reservation_that_cannot_be_opened_for_the_moment_is_not_nobodys");
            let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
            let output = alone.args(["--exact", &name, "--nocapture"]).env(ALONE, "1").output().unwrap();
            let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
            assert!(out.contains("1 passed"), "{out}{err}");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), json!([[{"subnet": "10.0.0.0/29"}]]));
        let a = owner("a", "eth0");
        allocate(&config, &a);
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let few = rustix::process::Rlimit { current: Some(64), ..limit };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, few).unwrap();
        let mut taken: Vec<fs::File> = std::iter::from_fn(|| fs::File::open("/dev/null").ok()).collect();
        // There is none for the directory, then none for its lock, to list it, and for the reservation.
        for unread in ["net", "lock", "net", "10.0.0.2"] {
            let leases = Leases::default();
            let release = || leases.release(&config, &a, &[]);
            let error = release().unwrap_err();
            assert!(error.failure() == Failure::Io && error.to_string().ends_with(unread), "{error}");
            if unread == "10.0.0.2" {
                // As many as the directory, its lock and its list take. The other addresses are given meanwhile.
                taken.truncate(taken.len() - 2);
                assert_eq!(addresses(&allocate(&config, &owner("b", "eth0"))), ["10.0.0.3/29"]);
                taken.clear();
                assert_eq!(release().unwrap(), 1);
            }
            taken.pop();
        }
    }

    /// A pool with an IPv4 and an IPv6 range, and two owners with their addresses.
    fn of_two(data_dir: &Path) -> (Config, [(Owner, Vec<IpAddr>); 2]) {
        let config = config(data_dir, json!([[{"subnet": "10.0.0.0/24"}], [{"subnet": "fd00::/112"}]]));
        let holders = ["a", "b"].map(|id| {
            let owner = owner(id, "eth0");
            let lease = allocate(&config, &owner);
            (owner, lease.addresses.iter().map(|(address, _)| address.addr()).collect())
        });
        (config, holders)
    }

    /// Otherwise it stays taken for ever: the DEL succeeds, and is not repeated.
    #[test]
    fn a_release_fails_as_long_as_an_address_of_its_record_cannot_be_read_and_for_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let (config, [(a, of_a), (b, of_b)]) = of_two(dir.path());
        let file = |address: &IpAddr| config.directory().join(address.to_string());
        let withheld = Withheld::new(&file(&of_a[1]));
        let leases = Leases::default();
        let release = |owner: &Owner, recorded: &[IpAddr]| leases.release(&config, owner, recorded);
        for _ in 0..2 {
            let error = release(&a, &of_a).unwrap_err();
            let unread = file(&of_a[1]);
            assert!(matches!(&error, Error::Read { path, .. } if *path == unread), "{error}");
            assert!(!file(&of_a[0]).exists(), "the other one is released");
        }
        leases.check(dir.path(), "net", &b, &of_b).unwrap();
        let error = leases.check(dir.path(), "net", &a, &of_a[1..]).unwrap_err();
        assert!(matches!(error, Error::Read { .. }), "{error}");
        let error = leases.check(dir.path(), "net", &b, &of_a[..1]).unwrap_err();
        assert!(matches!(error, Error::NotReserved { .. }), "{error}");
        assert_eq!(release(&b, &of_b).unwrap(), 2);
        assert_eq!(release(&b, &of_b).unwrap(), 0, "none of its own is unread");
        let error = release(&b, &[]).unwrap_err();
        assert!(matches!(error, Error::Read { .. }), "without a record it may be its own: {error}");
        drop(withheld);
        assert_eq!(release(&a, &of_a).unwrap(), 1);
        assert!(!file(&of_a[1]).exists());
    }

    /// As after a kill between the files and the record, whose agent finds one of them unread when it starts again.
    #[test]
    fn a_release_without_a_record_fails_until_an_address_of_each_set_was_looked_for() {
        let dir = tempfile::tempdir().unwrap();
        let (config, [(a, of_a), (b, of_b)]) = of_two(dir.path());
        let file = |address: &IpAddr| config.directory().join(address.to_string());
        let withheld = Withheld::new(&file(&of_a[1]));
        let leases = Leases::default();
        for _ in 0..2 {
            let error = leases.release(&config, &a, &[]).unwrap_err();
            let unread = file(&of_a[1]);
            assert!(matches!(&error, Error::Read { path, .. } if *path == unread), "{error}");
            assert!(!file(&of_a[0]).exists(), "the other one is released");
        }
        assert_eq!(leases.release(&config, &b, &[]).unwrap(), of_b.len(), "it has one of each");
        drop(withheld);
        assert_eq!(leases.release(&config, &a, &[]).unwrap(), 1);
        assert!(!file(&of_a[1]).exists());
    }

    #[test]
    fn of_a_pool_with_a_reservation_that_cannot_be_read_all_others_are_taken_again() {
        let dir = tempfile::tempdir().unwrap();
        let (config, holders) = of_two(dir.path());
        let [(a, of_a), (b, of_b)] = &holders;
        let file = |address: &IpAddr| config.directory().join(address.to_string());
        let withheld = Withheld::new(&file(&of_a[0]));
        let leases = Leases::default();
        let look = || {
            let Lacking { holders, unread } = leases.lacking(dir.path(), "net", &holders).unwrap();
            (holders, unread.iter().map(|error| Chain(error).to_string()).collect::<Vec<_>>())
        };
        let unread = format!("read {}: {}", file(&of_a[0]).display(), io::Error::from(Errno::AGAIN));
        assert_eq!(look(), (vec![], vec![unread.clone()]));
        for address in [&of_a[1], &of_b[0]] {
            fs::remove_file(file(address)).unwrap();
        }
        assert_eq!(look(), (vec![0, 1], vec![unread.clone()]));
        let restore = |owner: &Owner, addresses: &[IpAddr]| {
            leases.restore(dir.path(), "net", owner, addresses).unwrap()
        };
        assert_eq!(restore(a, of_a), of_a[1..]);
        assert_eq!(restore(b, of_b), of_b[..1]);
        assert_eq!(look(), (vec![], vec![unread]));
        drop(withheld);
        assert_eq!(look(), (vec![], vec![]));
        leases.check(dir.path(), "net", a, of_a).unwrap();
    }

    #[test]
    fn interfaces_of_one_container_are_released_one_by_one() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), json!([[{"subnet": "10.0.0.0/29"}]]));
        let leases = Leases::default();
        for ifname in ["eth0", "net1"] {
            leases.allocate(&config, &owner("abc", ifname)).unwrap();
        }
        assert_eq!(leases.release(&config, &owner("abc", "eth0"), &[]).unwrap(), 1);
        assert_eq!(leases.release(&config, &owner("abc", "eth0"), &[]).unwrap(), 0);
        let unknown = Config { network: "unknown".to_owned(), ..config.clone() };
        assert_eq!(leases.release(&unknown, &owner("abc", "eth0"), &[]).unwrap(), 0);
        assert_eq!(
            files(&config),
            named(&[(SPARE, ""), ("10.0.0.3", "abc\r\nnet1"), ("last_reserved_ip.0", "10.0.0.3")])
        );
        leases.check(dir.path(), "net", &owner("abc", "net1"), &["10.0.0.3".parse().unwrap()]).unwrap();
        leases.check(dir.path(), "net", &owner("abc", "net1"), &[]).unwrap();
    }

    #[test]
    fn a_released_reservation_is_written_over_by_the_next_one() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), json!([[{"subnet": "10.0.0.0/29"}]]));
        let inode = |name: &str| fs::metadata(config.directory().join(name)).unwrap().ino();
        let leases = Leases::default();
        for ifname in ["net1", "net2"] {
            leases.allocate(&config, &owner("a-long-name", ifname)).unwrap();
        }
        let (first, second) = (inode("10.0.0.2"), inode("10.0.0.3"));
        for ifname in ["net1", "net2"] {
            leases.release(&config, &owner("a-long-name", ifname), &[]).unwrap();
        }
        assert_eq!(files(&config), named(&[(SPARE, ""), (SECOND, ""), ("last_reserved_ip.0", "10.0.0.3")]));
        leases.allocate(&config, &owner("b", "eth0")).unwrap();
        assert_eq!((inode("10.0.0.4") == second, first == second), (true, false));
        let after = [(SPARE, ""), ("10.0.0.4", "b\r\neth0"), ("last_reserved_ip.0", "10.0.0.4")];
        assert_eq!(files(&config), named(&after));
        // Another process knows of no spare file that is not its own.
        Leases::default().allocate(&config, &owner("c", "eth0")).unwrap();
        assert_eq!(files(&config).len(), 3);
        Leases::default().release(&config, &owner("c", "eth0"), &[]).unwrap();
        leases.check(dir.path(), "net", &owner("b", "eth0"), &[]).unwrap();
        // A file that has another hard link keeps its content.
        fs::hard_link(config.directory().join("10.0.0.4"), dir.path().join("kept")).unwrap();
        leases.release(&config, &owner("b", "eth0"), &[]).unwrap();
        assert_eq!(files(&config), named(&[("last_reserved_ip.0", "10.0.0.5")]));
        assert_eq!(fs::read_to_string(dir.path().join("kept")).unwrap(), "b\r\neth0");
    }

    #[test]
    fn as_many_files_are_kept_as_a_node_attaches_pods_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), json!([[{"subnet": "10.0.0.0/22"}]]));
        let leases = Leases::default();
        let containers: Vec<String> = (0..300).map(|number| format!("c{number}")).collect();
        for _ in 0..2 {
            for container in &containers {
                leases.allocate(&config, &owner(container, "eth0")).unwrap();
            }
            for container in &containers {
                leases.release(&config, &owner(container, "eth0"), &[]).unwrap();
            }
            let files = files(&config);
            let empty =
                files.iter().filter(|(name, content)| name.starts_with(".netattach-") && content.is_empty());
            assert_eq!((empty.count(), files.len()), (256, 257));
        }
    }

    #[test]
    fn a_directory_that_is_replaced_is_looked_at_anew() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), json!([[{"subnet": "10.0.0.0/29"}]]));
        let leases = Leases::default();
        leases.allocate(&config, &owner("a", "eth0")).unwrap();
        fs::remove_dir_all(config.directory()).unwrap();
        let again = leases.allocate(&config, &owner("a", "eth0")).unwrap();
        assert_eq!(addresses(&again), ["10.0.0.2/29"]);
        fs::rename(config.directory(), dir.path().join("old")).unwrap();
        assert_eq!(leases.release(&config, &owner("a", "eth0"), &[]).unwrap(), 0);
        assert!(dir.path().join("old/10.0.0.2").exists());
    }

    #[test]
    fn a_reservation_without_interface_counts_until_it_is_released() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), json!([[{"subnet": "10.0.0.0/29"}]]));
        fs::create_dir_all(config.directory()).unwrap();
        fs::write(config.directory().join("10.0.0.4"), " abc\n").unwrap();
        let leases = Leases::default();
        leases.check(dir.path(), "net", &owner("abc", "eth0"), &[]).unwrap();
        assert_eq!(
            Chain(&leases.allocate(&config, &owner("abc", "eth0")).unwrap_err()).to_string(),
            format!(
                "allocate an address from {}: 10.0.0.4 is already reserved for interface eth0 of container abc; \
                 a second address from the same range set is not given",
                config.directory().display()
            )
        );
        assert_eq!(leases.release(&config, &owner("abc", "eth0"), &[]).unwrap(), 1);
        assert_eq!(files(&config), []);
        assert_eq!(
            leases.check(dir.path(), "net", &owner("abc", "eth0"), &[]).unwrap_err().to_string(),
            format!(
                "no address is reserved for interface eth0 of container abc in {}",
                config.directory().display()
            )
        );
    }

    #[test]
    fn abandoned_and_stray_files_are_reused_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), json!([[{"subnet": "10.0.0.0/29"}]]));
        fs::create_dir_all(config.directory()).unwrap();
        fs::write(config.directory().join("10.0.0.2"), "").unwrap();
        fs::write(config.directory().join("10.0.0.3"), [0; 5]).unwrap();
        fs::write(config.directory().join("10.0.0.4"), "other\r\neth0").unwrap();
        // As if the writer was killed between link and unlink.
        fs::hard_link(config.directory().join("10.0.0.4"), config.directory().join(".netattach-reservation"))
            .unwrap();
        fs::create_dir(config.directory().join("10.0.0.5")).unwrap();
        let leases = Leases::default();
        let got: Vec<_> = ["a", "b", "c"]
            .map(|id| addresses(&leases.allocate(&config, &owner(id, "eth0")).unwrap()))
            .concat();
        assert_eq!(got, ["10.0.0.2/29", "10.0.0.3/29", "10.0.0.6/29"]);
        fs::remove_dir(config.directory().join("10.0.0.5")).unwrap();
        assert_eq!(
            files(&config),
            named(&[
                ("10.0.0.2", "a\r\neth0"),
                ("10.0.0.3", "b\r\neth0"),
                ("10.0.0.4", "other\r\neth0"),
                ("10.0.0.6", "c\r\neth0"),
                ("last_reserved_ip.0", "10.0.0.6"),
            ])
        );
    }

    #[test]
    fn a_lease_that_was_removed_is_taken_again_unless_another_has_its_address() {
        let directory = tempfile::tempdir().unwrap();
        let config = config(directory.path(), json!([[{"subnet": "10.1.0.0/24"}]]));
        let leases = Leases::default();
        let (a, b) = (owner("a", "eth0"), owner("b", "eth0"));
        let lease = leases.allocate(&config, &a).unwrap();
        let held: Vec<IpAddr> = lease.addresses.iter().map(|(address, _)| address.addr()).collect();
        let before = files(&config);
        let restore = |owner: &Owner| {
            leases.restore(&config.data_dir, &config.network, owner, &held).map_err(|it| it.failure())
        };
        assert_eq!(restore(&a), Ok(vec![]));
        fs::remove_file(config.directory().join(held[0].to_string())).unwrap();
        assert_eq!(restore(&a), Ok(held.clone()));
        assert_eq!(files(&config), before, "as it was, the cursor too");
        fs::remove_dir_all(config.directory()).unwrap();
        assert_eq!(restore(&b), Ok(held.clone()));
        assert_eq!(restore(&a), Err(crate::ipam::Failure::Other));
    }

    #[test]
    fn changes_by_others_are_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), json!([[{"subnet": "10.0.0.0/24"}]]));
        let leases = Leases::default();
        // Without a pause, so within one tick of the clock that stamps directories.
        for round in 0..100 {
            let lease = leases.allocate(&config, &owner("ours", "eth0")).unwrap();
            let next = config.directory().join(format!("10.0.0.{}", 2 + (round * 2 + 1) % 253));
            fs::write(&next, "theirs\r\neth0").unwrap();
            assert_eq!(
                leases.release(&config, &owner("theirs", "eth0"), &[]).unwrap(),
                1,
                "{round} {lease:?}"
            );
            fs::write(&next, "theirs\r\neth1").unwrap();
            fs::remove_file(&next).unwrap();
            fs::write(&next, "theirs\r\neth2").unwrap();
            assert_eq!(leases.release(&config, &owner("theirs", "eth1"), &[]).unwrap(), 0, "{round}");
            assert_eq!(leases.release(&config, &owner("theirs", "eth2"), &[]).unwrap(), 1, "{round}");
            assert_eq!(leases.release(&config, &owner("ours", "eth0"), &[]).unwrap(), 1, "{round}");
            fs::write(
                config.directory().join("last_reserved_ip.0"),
                format!("10.0.0.{}", 2 + (round * 2 + 1) % 253),
            )
            .unwrap();
        }
    }

    #[test]
    fn a_lock_held_elsewhere_is_waited_for_until_the_deadline() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), json!([[{"subnet": "10.0.0.0/24"}]]));
        allocate(&config, &owner("a", "eth0"));
        let lock = fs::File::open(config.directory().join("lock")).unwrap();
        lock.lock().unwrap();
        let error = Leases::with_deadline(Duration::from_millis(20))
            .allocate(&config, &owner("b", "eth0"))
            .unwrap_err();
        assert_eq!(error.failure(), Failure::TryLater);
        let path = config.directory().join("lock");
        assert_eq!(
            error.to_string(),
            format!("{0} is locked by another process; find it with: fuser {0}", path.display())
        );
        let waiting = std::thread::spawn({
            let config = config.clone();
            move || allocate(&config, &owner("b", "eth0"))
        });
        lock.unlock().unwrap();
        assert_eq!(addresses(&waiting.join().unwrap()), ["10.0.0.3/24"]);
    }

    #[test]
    fn holders_that_lack_an_address_are_found_in_one_look() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), json!([[{"subnet": "10.0.0.0/24"}], [{"subnet": "fd00::/112"}]]));
        let leases = Leases::default();
        let holders = ["a", "b", "c"].map(|id| {
            let owner = owner(id, "eth0");
            let lease = leases.allocate(&config, &owner).unwrap();
            (owner, lease.addresses.iter().map(|(address, _)| address.addr()).collect::<Vec<IpAddr>>())
        });
        let lacking =
            |holders: &[(Owner, Vec<IpAddr>)]| leases.lacking(dir.path(), "net", holders).unwrap().holders;
        assert_eq!(lacking(&holders), [0; 0]);
        fs::remove_file(config.directory().join(holders[1].1[1].to_string())).unwrap();
        let stranger = (owner("d", "eth0"), Vec::new());
        let unnamed = (owner("b", "eth0"), Vec::new());
        assert_eq!(lacking(&holders), [1]);
        assert_eq!(lacking(&[stranger, unnamed, holders[2].clone()]), [0], "what is left to it counts");
        fs::remove_dir_all(config.directory()).unwrap();
        assert_eq!(lacking(&holders), [0, 1, 2]);
    }

    #[test]
    fn a_look_waits_neither_for_another_process_nor_for_a_thread_that_does() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), json!([[{"subnet": "10.0.0.0/24"}]]));
        let leases = Leases::default();
        leases.allocate(&config, &owner("a", "eth0")).unwrap();
        let lock = fs::File::open(config.directory().join("lock")).unwrap();
        lock.lock().unwrap();
        let look = || {
            let began = Instant::now();
            let looked = [
                leases.lacking(dir.path(), "net", &[]).map(drop),
                leases.usage(&config).map(drop),
                leases.survey(&config).map(drop),
                leases.holders(dir.path(), "net", Patience::Look).map(drop),
                leases.check_room(&config, Patience::Look),
            ];
            let busy = |looked: &Result<(), Error>| matches!(looked, Err(Error::Busy { .. }));
            assert!(looked.iter().all(busy), "{looked:?}");
            assert!(began.elapsed() < LOCK_DEADLINE / 2, "{:?}", began.elapsed());
        };
        look();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| leases.allocate(&config, &owner("b", "eth0")));
            let known = leases.known(&config.directory());
            while known.try_lock().is_ok() {
                std::thread::sleep(Duration::from_millis(1));
            }
            look();
            lock.unlock().unwrap();
            waits.join().unwrap().unwrap();
        });
        assert_eq!(leases.lacking(dir.path(), "net", &[]).unwrap().holders, [0; 0]);
    }

    #[test]
    fn a_failure_in_a_later_set_reserves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), json!([[{"subnet": "10.0.0.0/29"}], [{"subnet": "10.0.1.0/30"}]]));
        fs::create_dir_all(config.directory().join("last_reserved_ip.1")).unwrap();
        let error = Leases::default().allocate(&config, &owner("a", "eth0")).unwrap_err();
        assert_eq!(
            Chain(&error).to_string(),
            format!(
                "write {}: Is a directory (os error 21)",
                config.directory().join("last_reserved_ip.1").display()
            )
        );
        fs::remove_dir(config.directory().join("last_reserved_ip.1")).unwrap();
        assert_eq!(files(&config), named(&[("last_reserved_ip.0", "10.0.0.2")]));
    }

    #[test]
    fn however_many_directories_are_used_few_are_kept_open_and_none_in_use_is_forgotten() {
        let mut directories = Directories::default();
        let path = |number: usize| PathBuf::from(number.to_string());
        let in_use = directories.of(&path(0));
        for number in 1..10 * MOST_DIRECTORIES {
            directories.of(&path(number));
            directories.of(&path(1));
        }
        assert_eq!(directories.known.len(), MOST_DIRECTORIES);
        assert!(Arc::ptr_eq(&in_use, &directories.of(&path(0))), "in use");
        assert!(directories.known.contains_key(&path(1)), "used often");
        assert!(!directories.known.contains_key(&path(2)));
    }

    #[test]
    fn names_that_leave_the_data_directory_are_refused() {
        for name in ["..", "", "a/b", ".hidden", "a\nb"] {
            let config = Config::without_ranges("/nonexistent".into(), name);
            let error = Leases::default().release(&config, &owner("a", "b"), &[]).unwrap_err();
            assert_eq!(error.to_string(), format!("{name:?} is not a network name"));
        }
    }
}
