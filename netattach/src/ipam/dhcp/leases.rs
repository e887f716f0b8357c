//! The DHCP leases of this node: taken, checked and released.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::config::Config;
use super::converse::{converse, send};
use super::exchange::{Client, Exchange, Outcome, Purpose, release};
use super::proxies::Proxies;
use super::record::{Directory, Found, Record};
use super::terms::Terms;
use super::wire::{self, Socket, now, random};
use super::writer::{self, Job};
use super::{Error, PATIENCE, granted, probe, renewal};
use crate::error_chain::Chain;
use crate::ipam::{Lease, Lessee, Owner};
use crate::moment;
use crate::netns::Netns;
use crate::sync::{Condvar, Mutex, PoisonError, locked, thread};

/// The reason of a lost lease that no server has denied.
pub(super) const OVER: &str = "its time is over, and no server has extended it";

/// The leases that an agent keeps. One thread renews them, and another one writes them; both start with the first
/// lease.
#[derive(Debug)]
pub struct Leases {
    shared: Arc<Shared>,
}

/// A lease that cannot be renewed, or is lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// The owner of the lease.
    pub owner: Owner,
    /// Name of its network's configuration.
    pub network: String,
    /// The problem, as text.
    pub problem: String,
}

#[derive(Debug)]
pub(super) struct Shared {
    directory: Directory,
    /// The files that could not be read at the start, each with the reason.
    unreadable: Vec<(PathBuf, String)>,
    pub(super) boot: String,
    /// Locked only briefly: no thread waits for a disk or a server while it holds this lock.
    pub(super) state: Mutex<State>,
    /// Notified when there is a new lease to renew, or when the threads must end.
    pub(super) changed: Condvar,
    /// Notified when there is a new job for the writer, or when the threads must end.
    queued: Condvar,
    when_lost: OnceLock<WhenLost>,
}

/// The callback for each lease that is lost.
struct WhenLost(Box<dyn Fn(&Owner) + Send + Sync>);

impl fmt::Debug for WhenLost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WhenLost")
    }
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) held: BTreeMap<Owner, Held>,
    /// At most two for each lease: one that writes it, and one that removes its address from the pod.
    jobs: VecDeque<(Owner, u64, Job)>,
    /// Whether the threads have started: the one that renews, and the one that writes.
    has_threads: [bool; 2],
    proxies: Proxies,
    /// Those files that could not be read at the start and have been rewritten since.
    rewritten: BTreeSet<PathBuf>,
    pub(super) ends: bool,
    /// Number of the last lease that was begun.
    last: u64,
}

/// A lease, or a requested address.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) record: Record,
    /// Distinguishes the lease from an earlier one of the same owner.
    pub(super) number: u64,
    /// When the last failed attempt to renew the lease began.
    pub(super) tried: Option<Duration>,
    pub(super) trouble: Option<String>,
    /// Whether an exchange is running for the lease, or the lease is about to be lost or released.
    pub(super) is_busy: bool,
    /// Whether the lease is queued for writing.
    is_queued: bool,
    /// Why the current state of the lease could not be written.
    unwritten: Option<String>,
    /// Lock for writing or removing the lease's file. Never waited for while `state` is locked.
    turn: Arc<Mutex<()>>,
}

impl Held {
    /// Stores the terms that a server has granted.
    pub(super) fn give(&mut self, terms: &Terms) {
        self.record.terms = Some(terms.fuzzed(random()));
        self.record.address = terms.address;
        self.record.server = terms.server;
    }
}

impl Leases {
    /// Opens the directory of the leases, and continues to renew those that it contains.
    ///
    /// # Errors
    /// The directory cannot be created or read.
    pub fn open(directory: &Path) -> Result<Self, Error> {
        let boot = moment::boot_id().map_err(|source| Error::Read { path: directory.to_owned(), source })?;
        let (directory, Found { records, unreadable }) = Directory::open(directory)?;
        directory.tidy();
        let (state, changed, queued) = (Mutex::default(), Condvar::new(), Condvar::new());
        let when_lost = OnceLock::new();
        let shared = Arc::new(Shared { directory, unreadable, boot, state, changed, queued, when_lost });
        for record in records {
            shared.keep(record, Arc::default());
        }
        Ok(Self { shared })
    }

    /// Sets the callback for each lease that is lost from now on, called once its address is removed from the pod.
    /// The thread that writes leases calls it, perhaps more than once for one lease. Only the first callback that is
    /// set counts.
    pub fn when_lost(&self, then: impl Fn(&Owner) + Send + Sync + 'static) {
        // An agent sets it once, at its start.
        let _ = self.shared.when_lost.set(WhenLost(Box::new(then)));
    }

    /// Returns the owners of lost leases.
    pub fn lost(&self) -> Vec<Owner> {
        let state = locked(&self.shared.state);
        let lost = state.held.iter().filter(|(_, held)| held.record.lost.is_some());
        lost.map(|(owner, _)| owner.clone()).collect()
    }

    /// Returns the files that could not be read and still exist, each with the reason.
    pub fn unreadable(&self) -> impl Iterator<Item = &(PathBuf, String)> {
        let is_there = move |(path, _): &&(PathBuf, String)| {
            path.exists() && !locked(&self.shared.state).rewritten.contains(path)
        };
        self.shared.unreadable.iter().filter(is_there)
    }

    /// Whether a lease of the owner is known, in force or lost.
    pub fn is_known(&self, owner: &Owner) -> bool {
        locked(&self.shared.state).held.contains_key(owner)
    }

    /// Returns the path of the owner's lease file, whether or not the file exists.
    pub fn file(&self, owner: &Owner) -> PathBuf {
        self.shared.directory.path(owner)
    }

    /// Leases an address through the pod's interface, which is brought up for that. Unless the configuration disables
    /// the probe, calls `before_probe` with the address and then probes the link, so that no other host has the
    /// address. An address that another host has is declined; but if that host is known to answer for all addresses
    /// (proxy ARP), the address is released to the server, whose pool would otherwise be exhausted.
    pub(in super::super) fn lease(
        &self,
        config: &Config,
        lessee: Lessee<'_>,
        before_probe: &mut dyn FnMut(IpAddr),
    ) -> Result<Lease, Error> {
        let (netns, owner) = (lessee.netns.ok_or(Error::NoNamespace)?, lessee.owner);
        let interface = wire::raise(netns, &owner.ifname)?;
        let socket = Socket::open(netns, interface.index, interface.mac)?;
        let before = {
            let state = locked(&self.shared.state);
            let usable = state.held.get(owner).filter(|held| held.record.lost.is_none());
            usable.map(|held| held.record.address)
        };
        let client = config.client(owner, interface.mac);
        let begun = now();
        // The remaining time is for the probe of the last address.
        let end = begun + PATIENCE.saturating_sub(probe::PAUSE * probe::TIMES);
        let mut exchange = Exchange::begin(client.clone(), Purpose::New(before), begun, end, random());
        // Recorded before the request is sent: the address is then released even if this process is killed.
        let asks =
            |asked| self.shared.begin(Record::new(owner, config, &interface, &self.shared.boot, asked));
        loop {
            let (terms, options) = match converse(&mut exchange, &socket, asks)? {
                Outcome::Bound(terms, options) => (terms, options),
                Outcome::Refused(heard) | Outcome::Silence(heard) => return Err(Error::Silence { heard }),
            };
            self.shared.bind(owner, &terms)?;
            let (network, address) = (config.network.as_str(), terms.address);
            let given = || Ok(granted::lease(&terms, &options, &config.wanted, config.priority));
            if config.unprobed {
                return given();
            }
            before_probe(address.into());
            let Some(holder) = wire::holder(netns, &interface, address)? else {
                locked(&self.shared.state).proxies.forget(network);
                return given();
            };
            let gives_back = locked(&self.shared.state).proxies.gives_back(network, holder, now());
            let back = match gives_back {
                true => release(&client, address, terms.server, random()),
                false => exchange.decline(now(), &terms, holder),
            };
            tracing::warn!(%owner, network, %address, %holder, "another host has the address that dhcp gives: not used");
            send(&socket, &back);
            self.shared.forgo(owner, format!("{holder} has it"))?;
            if exchange.is_answered_by(holder) {
                locked(&self.shared.state).proxies.note(network, holder, now());
            } else if !gives_back {
                continue;
            }
            return Err(Error::Proxy { holder, address });
        }
    }

    /// Verifies that the owner has a lease of each of these addresses, or of any address if the list is empty.
    pub(in super::super) fn check(&self, owner: &Owner, addresses: &[IpAddr]) -> Result<(), Error> {
        let state = locked(&self.shared.state);
        let record = state.held.get(owner).map(|held| &held.record);
        let given = record.and_then(|record| Some((record, record.terms.as_ref()?)));
        let is_given = |address: &IpAddr| given.is_some_and(|(_, terms)| *address == terms.address);
        let missing = match addresses.iter().find(|address| !is_given(address)) {
            Some(address) => Some(address.to_string()),
            None => given.is_none().then(|| "any address".to_owned()),
        };
        if let Some(address) = missing {
            return Err(Error::NotHeld { owner: owner.clone(), address });
        }
        match given.and_then(|(record, _)| Some((record, record.lost.clone()?))) {
            Some((record, why)) => Err(Error::Lost { address: record.address.into(), why }),
            None => Ok(()),
        }
    }

    /// Verifies that the owner's lease is still in force when its ADD is about to answer: a server may have denied
    /// it, or it may have expired, and then its address was removed from an interface that had no address yet.
    pub(in super::super) fn check_in_force(&self, owner: &Owner) -> Result<(), Error> {
        let state = locked(&self.shared.state);
        let record = state.held.get(owner).map(|held| &held.record);
        let Some((record, terms)) = record.and_then(|record| Some((record, record.terms.as_ref()?))) else {
            return Err(Error::NotHeld { owner: owner.clone(), address: "any address".to_owned() });
        };
        let is_over = || terms.is_over(now()).then(|| OVER.to_owned());
        match record.lost.clone().or_else(is_over) {
            Some(why) => Err(Error::LostMeanwhile { address: record.address, why }),
            None => Ok(()),
        }
    }

    /// Returns the address of the owner's lease, in force or lost.
    pub(in super::super) fn address(&self, owner: &Owner) -> Option<Ipv4Addr> {
        locked(&self.shared.state).held.get(owner).map(|held| held.record.address)
    }

    /// Returns an address that a container has leased for any interface except those in `keep`.
    pub(in super::super) fn held_by(&self, container: &str, keep: &[String]) -> Option<Ipv4Addr> {
        let state = locked(&self.shared.state);
        let mut held =
            of_container(&state.held, container).filter(|(owner, _)| !keep.contains(&owner.ifname));
        held.next().map(|(_, held)| held.record.address)
    }

    /// Releases the leases of a container for all interfaces except those in `keep`.
    ///
    /// # Errors
    /// The first lease that could not be released; the others were tried.
    pub(in super::super) fn release_container(&self, container: &str, keep: &[String]) -> Result<(), Error> {
        let owners: Vec<Owner> = {
            let state = locked(&self.shared.state);
            of_container(&state.held, container).map(|(owner, _)| owner.clone()).collect()
        };
        let others = owners.iter().filter(|owner| !keep.contains(&owner.ifname));
        let failed: Vec<Error> = others.filter_map(|owner| self.release(owner).err()).collect();
        failed.into_iter().next().map_or(Ok(()), Err)
    }

    /// Releases the owner's lease. If the pod's interface is gone, as after a reboot, the server is not told, and the
    /// lease expires.
    pub(in super::super) fn release(&self, owner: &Owner) -> Result<(), Error> {
        let taken = locked(&self.shared.state).held.get_mut(owner).map(|held| {
            held.is_busy = true;
            // A running exchange, and the writer, then find that this is another lease.
            held.number = 0;
            (held.record.clone(), Arc::clone(&held.turn))
        });
        // A file that could not be read may exist.
        let Some((record, turn)) = taken else { return self.shared.directory.remove(owner) };
        // A client must not release a lost lease. Otherwise, the pod must stop using the address before the server is
        // told. A pod of an earlier boot is gone, and what has its path and its number now is another one's.
        if record.lost.is_none()
            && record.boot == self.shared.boot
            && let Err(error) = writer::take_away(&record).and_then(|()| self.shared.send_back(&record))
        {
            tracing::warn!(
                %owner, network = record.config.network, address = %record.address, error = %Chain(&error),
                "lease by dhcp is not given back: the server keeps it until its time is over"
            );
        }
        let _turn = locked(&turn);
        self.shared.directory.remove(owner)?;
        locked(&self.shared.state).held.remove(owner);
        Ok(())
    }

    /// Releases the leases of containers for which `is_known` is false: their records are lost, as after a power
    /// failure. Returns the owners of those leases.
    ///
    /// # Errors
    /// The first lease that could not be released; the others were tried.
    pub fn retain(&self, is_known: impl Fn(&str) -> bool) -> Result<Vec<Owner>, Error> {
        let unknown: Vec<Owner> = locked(&self.shared.state)
            .held
            .keys()
            .filter(|it| !is_known(&it.container_id))
            .cloned()
            .collect();
        let failed: Vec<Error> = unknown.iter().filter_map(|owner| self.release(owner).err()).collect();
        failed.into_iter().next().map_or(Ok(unknown), Err)
    }

    /// Returns the leases whose last renewal failed, lost leases, and leases whose current state is not on disk.
    pub fn troubles(&self) -> Vec<Trouble> {
        let state = locked(&self.shared.state);
        let trouble = |(owner, held): (&Owner, &Held)| {
            let stays = if held.record.is_taken { "" } else { ", and the pod's interface still has it" };
            let lost = held.record.lost.as_ref().map(|why| format!("{why}{stays}"));
            let unwritten =
                || Some(format!("not written, which is tried again: {}", held.unwritten.as_ref()?));
            let problem = lost.or_else(|| held.trouble.clone()).or_else(unwritten)?;
            let network = held.record.config.network.clone();
            let problem = format!("lease of {}: {problem}", held.record.address);
            Some(Trouble { owner: owner.clone(), network, problem })
        };
        state.held.iter().filter_map(trouble).collect()
    }
}

impl Drop for Leases {
    fn drop(&mut self) {
        locked(&self.shared.state).ends = true;
        self.shared.changed.notify_all();
        self.shared.queued.notify_all();
    }
}

/// What the writer thread has to do next.
#[derive(Debug)]
pub(super) enum Next {
    Job(Owner, u64, Job),
    /// No job arrived in the requested time.
    Nothing,
    /// The leases end, and no job is left.
    End,
}

/// Returns the leases of a container by interface, without a search of all leases.
fn of_container<'h>(
    held: &'h BTreeMap<Owner, Held>,
    container: &'h str,
) -> impl Iterator<Item = (&'h Owner, &'h Held)> {
    let first = Owner { container_id: container.to_owned(), ifname: String::new() };
    held.range(first..).take_while(move |(owner, _)| owner.container_id == container)
}

/// The main loop of a thread of the leases.
type Work = fn(&Arc<Shared>);

impl Shared {
    /// Adds a record that is on disk, and replaces an earlier one of its owner.
    fn keep(self: &Arc<Self>, record: Record, turn: Arc<Mutex<()>>) {
        let mut state = locked(&self.state);
        state.last += 1;
        let number = state.last;
        let (tried, trouble, unwritten) = (None, None, None);
        let held = Held { record, number, tried, trouble, is_busy: false, is_queued: false, unwritten, turn };
        if !held.record.is_taken {
            self.ensure_threads(&mut state.has_threads);
        }
        let owner = held.record.owner();
        if !self.unreadable.is_empty() {
            let path = self.directory.path(&owner);
            state.rewritten.extend(self.unreadable.iter().any(|(of, _)| *of == path).then_some(path));
        }
        state.held.insert(owner, held);
        self.changed.notify_all();
    }

    fn ensure_threads(self: &Arc<Self>, begun: &mut [bool; 2]) {
        const ALL: [(&str, Work); 2] = [("dhcp", renewal::run), ("dhcp-writer", writer::run)];
        for ((name, run), has_begun) in ALL.into_iter().zip(begun).filter(|(_, has_begun)| !**has_begun) {
            let shared = Arc::clone(self);
            match thread::Builder::new().name(name.into()).spawn(move || run(&shared)) {
                Ok(_) => *has_begun = true,
                // The next lease retries.
                Err(error) => {
                    tracing::error!(error = %Chain(&error), "cannot start a thread that renews or writes leases by dhcp")
                }
            }
        }
    }

    /// Returns the lock for writing the file of an owner's lease.
    fn turn(&self, owner: &Owner) -> Arc<Mutex<()>> {
        locked(&self.state).held.get(owner).map(|held| Arc::clone(&held.turn)).unwrap_or_default()
    }

    /// Writes and adds the record of an address that is about to be requested.
    fn begin(self: &Arc<Self>, record: Record) -> Result<(), Error> {
        let turn = self.turn(&record.owner());
        let _turn = locked(&turn);
        self.directory.write(&record)?;
        self.keep(record, Arc::clone(&turn));
        Ok(())
    }

    /// Writes the current state of a lease, unless another lease has replaced it.
    pub(super) fn write(&self, owner: &Owner, number: u64) -> Result<(), Error> {
        let turn = self.turn(owner);
        let _turn = locked(&turn);
        let mut record = None;
        self.with(owner, number, |held| {
            held.is_queued = false;
            record = Some(held.record.clone());
        });
        let Some(record) = record else { return Ok(()) };
        let written = self.directory.write(&record);
        let why = written.as_ref().err().map(|error| Chain(error).to_string());
        self.with(owner, number, |held| held.unwritten = why);
        written
    }

    /// Records that a server has granted the requested address.
    fn bind(&self, owner: &Owner, terms: &Terms) -> Result<(), Error> {
        self.settle(owner, |held| held.give(terms))?;
        self.changed.notify_all();
        Ok(())
    }

    /// Records that the owner does not use a granted address that it never had, and that it has declined.
    fn forgo(&self, owner: &Owner, why: String) -> Result<(), Error> {
        self.settle(owner, |held| {
            held.record.lost = Some(why);
            held.record.is_taken = true;
        })
    }

    /// Changes a lease and writes it at once, for a caller that waits.
    fn settle(&self, owner: &Owner, change: impl FnOnce(&mut Held)) -> Result<(), Error> {
        let number = {
            let mut state = locked(&self.state);
            let Some(held) = state.held.get_mut(owner) else { return Ok(()) };
            change(held);
            held.number
        };
        self.write(owner, number)
    }

    /// Calls `work` with a lease, unless another lease has replaced it.
    pub(super) fn with(&self, owner: &Owner, number: u64, work: impl FnOnce(&mut Held)) {
        let mut state = locked(&self.state);
        if let Some(held) = state.held.get_mut(owner).filter(|held| held.number == number) {
            work(held);
        }
    }

    /// Changes a lease, unless another lease has replaced it, and queues it for writing.
    pub(super) fn change(&self, owner: &Owner, number: u64, change: impl FnOnce(&mut Held)) {
        let mut is_new = false;
        self.with(owner, number, |held| {
            let before = held.record.clone();
            change(held);
            is_new = held.record != before && !std::mem::replace(&mut held.is_queued, true);
        });
        if is_new {
            self.enqueue(owner.clone(), number, Job::Write);
        }
        // The time of the next renewal may have changed.
        self.changed.notify_all();
    }

    /// Queues a job for the writer thread.
    pub(super) fn enqueue(&self, owner: Owner, number: u64, job: Job) {
        locked(&self.state).jobs.push_back((owner, number, job));
        self.queued.notify_all();
    }

    /// Waits for the next job, at most until `until`.
    pub(super) fn next_job(&self, until: Option<Duration>) -> Next {
        let mut state = locked(&self.state);
        loop {
            if let Some((owner, number, job)) = state.jobs.pop_front() {
                return Next::Job(owner, number, job);
            }
            if state.ends {
                return Next::End;
            }
            // The loop checks again, whatever woke the thread: a job, the timeout, or a spurious wakeup.
            let Some(until) = until else {
                state = self.queued.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = until.saturating_sub(now());
            if left.is_zero() {
                return Next::Nothing;
            }
            (state, _) = self.queued.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Calls the callback for a lost lease.
    pub(super) fn tell_lost(&self, owner: &Owner) {
        if let Some(WhenLost(then)) = self.when_lost.get() {
            then(owner);
        }
    }

    /// Tells the server that the client does not need the address any more.
    fn send_back(&self, record: &Record) -> Result<(), Error> {
        let (socket, client) = open_client(record, &record.owner())?;
        socket.send(&release(&client, record.address, record.server, random())).map_err(Error::Socket)
    }
}

/// Opens a socket on the interface of a lease, and returns its client with the Ethernet address that the interface has
/// now. The server knows the client by its identifier, which stays.
///
/// # Errors
/// As [`open_namespace`], or the socket cannot be opened.
pub(super) fn open_client(record: &Record, owner: &Owner) -> Result<(Socket, Client), Error> {
    let netns = open_namespace(record)?;
    let mac = wire::present_mac(&netns, record.index, record.mac);
    Ok((Socket::open(&netns, record.index, mac)?, record.config.client(owner, mac)))
}

/// Opens the namespace of a record, if it is still the pod's.
///
/// # Errors
/// [`Error::NoNamespace`] if the namespace is gone or another one is at its path; another error if that cannot be
/// determined.
pub(super) fn open_namespace(record: &Record) -> Result<Netns, Error> {
    let netns = Netns::of(&record.netns, record.netns_id, record.netns_cookie);
    let netns = netns.map_err(|error| Error::Open(error.into()))?;
    netns.ok_or(Error::NoNamespace)
}

#[cfg(test)]
#[cfg(not(feature = "model"))]
#[path = "leases_tests.rs"]
mod tests;
