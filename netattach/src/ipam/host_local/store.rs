//! The reservations of this node: allocates, releases and checks them, each under the lock of the pool's directory.

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::allocator::{self, Reservations};
use super::cache::{After, Directories, Known};
use super::directory::{self, Contents, Found, Given, LOCK, Locked};
use super::error::Error;
use super::range::RangeSet;
use super::{Config, Lease, Owner, config, survey, usage};
use crate::ipam::{self, Held, InUse, Lacking, Patience, PoolUse, Survey};
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
mod tests;
