//! The leases of this node: taken, checked and given back.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::config::Config;
use super::converse::{converse, send};
use super::exchange::{Exchange, Outcome, Purpose, release};
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

/// Why a lease is lost that nobody has denied.
pub(super) const OVER: &str = "its time is over, and no server has extended it";

/// The leases that an agent keeps. A thread renews them, and another one writes them, as soon as there are some.
#[derive(Debug)]
pub struct Leases {
    shared: Arc<Shared>,
}

/// A lease that cannot be extended, or is lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// Whose it is.
    pub owner: Owner,
    /// Name of its network's configuration.
    pub network: String,
    /// What is the matter.
    pub problem: String,
}

#[derive(Debug)]
pub(super) struct Shared {
    directory: Directory,
    /// The files that could not be read at the start, each with the reason.
    unreadable: Vec<(PathBuf, String)>,
    pub(super) boot: String,
    /// Locked for moments: nobody waits for a disk or a server meanwhile.
    pub(super) state: Mutex<State>,
    /// Signalled when there is something new to renew, or nothing ever again.
    pub(super) changed: Condvar,
    /// Signalled when there is something new to write, or nothing ever again.
    queued: Condvar,
    when_lost: OnceLock<WhenLost>,
}

/// What is done with each lease that is lost.
struct WhenLost(Box<dyn Fn(&Owner) + Send + Sync>);

impl fmt::Debug for WhenLost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WhenLost")
    }
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) held: BTreeMap<Owner, Held>,
    /// Two for each lease at most: one that writes it, and one that takes its address away.
    jobs: VecDeque<(Owner, u64, Job)>,
    /// Whether the threads have begun: the one that renews, and the one that writes.
    has_threads: [bool; 2],
    proxies: Proxies,
    /// Of the files that could not be read at the start, those that are written anew since.
    rewritten: BTreeSet<PathBuf>,
    pub(super) ends: bool,
    /// Number of the last lease that was begun.
    last: u64,
}

/// A lease, or an address that was asked for.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) record: Record,
    /// Tells it from an earlier one of the same owner.
    pub(super) number: u64,
    /// When an exchange that extends it was last begun in vain.
    pub(super) tried: Option<Duration>,
    pub(super) trouble: Option<String>,
    /// Whether an exchange is at it, or it is about to be lost or given back.
    pub(super) is_busy: bool,
    /// Whether it is about to be written.
    is_queued: bool,
    /// Why it was not written as it is now.
    unwritten: Option<String>,
    /// The right to write its file, or to remove it. Never waited for by who has locked the state.
    turn: Arc<Mutex<()>>,
}

impl Held {
    /// Takes what a server has given.
    pub(super) fn give(&mut self, terms: &Terms) {
        self.record.terms = Some(terms.fuzzed(random()));
        self.record.address = terms.address;
        self.record.server = terms.server;
    }
}

impl Leases {
    /// Opens the directory of the leases, and goes on renewing what is there.
    ///
    /// # Errors
    /// The directory cannot be made or read.
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

    /// Has this done with each lease that is lost from now on, once its address is taken from the pod. It is called on the
    /// thread that writes leases, perhaps more than once for one of them. Only the first that is set counts.
    pub fn when_lost(&self, then: impl Fn(&Owner) + Send + Sync + 'static) {
        // An agent sets it once, at its start.
        let _ = self.shared.when_lost.set(WhenLost(Box::new(then)));
    }

    /// Whose leases are lost.
    pub fn lost(&self) -> Vec<Owner> {
        let state = locked(&self.shared.state);
        let lost = state.held.iter().filter(|(_, held)| held.record.lost.is_some());
        lost.map(|(owner, _)| owner.clone()).collect()
    }

    /// The files that could not be read, and are there still, each with the reason.
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

    /// The file of the owner's lease, whether it is there or not.
    pub fn file(&self, owner: &Owner) -> PathBuf {
        self.shared.directory.path(owner)
    }

    /// Leases an address by the pod's interface, which is brought up for it. No other host has it: the link is asked, after
    /// `before_probe` was called with it, unless the configuration says otherwise. One that another host has is declined, but
    /// not where that host is known to answer for all: then it goes back to the server, whose pool would be lost otherwise.
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
        // What comes last has its probe still.
        let end = begun + PATIENCE.saturating_sub(probe::PAUSE * probe::TIMES);
        let mut exchange = Exchange::begin(client.clone(), Purpose::New(before), begun, end, random());
        // Recorded before it is asked for: whatever becomes of this process, it is given back.
        let asks =
            |asked| self.shared.begin(Record::new(owner, config, &interface, &self.shared.boot, asked));
        loop {
            let (terms, options) = match converse(&mut exchange, &socket, asks)? {
                Outcome::Bound(terms, options) => (terms, options),
                Outcome::Refused(heard) | Outcome::Silence(heard) => return Err(Error::Silence { heard }),
            };
            self.shared.bind(owner, &terms)?;
            let (network, address) = (config.network.as_str(), terms.address);
            let given = || Ok(granted::lease(&terms, &options, config.priority));
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

    /// Verifies that the owner has the lease of each of these addresses; if the list is empty, of any.
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

    /// Verifies that the owner's lease is in force still, as its ADD is about to say so: a server may have denied it since, or its
    /// time may be over, and then its address was taken from an interface that had none yet.
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

    /// An address that a container has for any interface except those in `keep`.
    pub(in super::super) fn held_by(&self, container: &str, keep: &[String]) -> Option<Ipv4Addr> {
        let state = locked(&self.shared.state);
        let mut held =
            of_container(&state.held, container).filter(|(owner, _)| !keep.contains(&owner.ifname));
        held.next().map(|(_, held)| held.record.address)
    }

    /// Gives back what a container has for any interface except those in `keep`.
    ///
    /// # Errors
    /// The first that could not be given back; the others were tried.
    pub(in super::super) fn release_container(&self, container: &str, keep: &[String]) -> Result<(), Error> {
        let owners: Vec<Owner> = {
            let state = locked(&self.shared.state);
            of_container(&state.held, container).map(|(owner, _)| owner.clone()).collect()
        };
        let others = owners.iter().filter(|owner| !keep.contains(&owner.ifname));
        let failed: Vec<Error> = others.filter_map(|owner| self.release(owner).err()).collect();
        failed.into_iter().next().map_or(Ok(()), Err)
    }

    /// Gives back what the owner has. Where the pod's interface is gone, the server is not told, and its lease ends by itself.
    pub(in super::super) fn release(&self, owner: &Owner) -> Result<(), Error> {
        let taken = locked(&self.shared.state).held.get_mut(owner).map(|held| {
            held.is_busy = true;
            // An exchange that is at it finds that it is not that one any more, and so does who is about to write it.
            held.number = 0;
            (held.record.clone(), Arc::clone(&held.turn))
        });
        // One that could not be read may be there.
        let Some((record, turn)) = taken else { return self.shared.directory.remove(owner) };
        // What was lost is not the client's to give back. What is, the pod does not use any more when its server hears of it.
        if record.lost.is_none()
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

    /// Gives back what containers have that are not among these: their records are lost, as after a power failure. Returns
    /// whose leases those were.
    ///
    /// # Errors
    /// The first that could not be given back; the others were tried.
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

    /// The leases that could not be extended when they were last due, those that are lost, and those that are not on disk as they
    /// are.
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

/// What the thread that writes is to do next.
#[derive(Debug)]
pub(super) enum Next {
    Job(Owner, u64, Job),
    /// Nothing, for as long as it wanted to wait.
    Nothing,
    /// The leases end, and nothing is left.
    End,
}

/// What a container has, by its interfaces: of thousands nobody else's is looked at.
fn of_container<'h>(
    held: &'h BTreeMap<Owner, Held>,
    container: &'h str,
) -> impl Iterator<Item = (&'h Owner, &'h Held)> {
    let first = Owner { container_id: container.to_owned(), ifname: String::new() };
    held.range(first..).take_while(move |(owner, _)| owner.container_id == container)
}

/// What a thread of the leases does, without end.
type Work = fn(&Arc<Shared>);

impl Shared {
    /// Takes a record that is on disk, in the place of an earlier one of its owner.
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
                // The next lease tries it again.
                Err(error) => {
                    tracing::error!(error = %Chain(&error), "cannot start a thread that renews or writes leases by dhcp")
                }
            }
        }
    }

    /// The right to write the file of an owner's lease.
    fn turn(&self, owner: &Owner) -> Arc<Mutex<()>> {
        locked(&self.state).held.get(owner).map(|held| Arc::clone(&held.turn)).unwrap_or_default()
    }

    /// Writes and takes the record of an address that is about to be asked for.
    fn begin(self: &Arc<Self>, record: Record) -> Result<(), Error> {
        let turn = self.turn(&record.owner());
        let _turn = locked(&turn);
        self.directory.write(&record)?;
        self.keep(record, Arc::clone(&turn));
        Ok(())
    }

    /// Writes a lease as it is by now, unless it is another one.
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

    /// Records that a server has given the address that was asked for.
    fn bind(&self, owner: &Owner, terms: &Terms) -> Result<(), Error> {
        self.settle(owner, |held| held.give(terms))?;
        self.changed.notify_all();
        Ok(())
    }

    /// Records that the owner has no use for an address that it never had, and that it has declined.
    fn forgo(&self, owner: &Owner, why: String) -> Result<(), Error> {
        self.settle(owner, |held| {
            held.record.lost = Some(why);
            held.record.is_taken = true;
        })
    }

    /// Changes a lease of who waits for it, and writes it at once.
    fn settle(&self, owner: &Owner, change: impl FnOnce(&mut Held)) -> Result<(), Error> {
        let number = {
            let mut state = locked(&self.state);
            let Some(held) = state.held.get_mut(owner) else { return Ok(()) };
            change(held);
            held.number
        };
        self.write(owner, number)
    }

    /// Does something with a lease, unless it is another one by now.
    pub(super) fn with(&self, owner: &Owner, number: u64, work: impl FnOnce(&mut Held)) {
        let mut state = locked(&self.state);
        if let Some(held) = state.held.get_mut(owner).filter(|held| held.number == number) {
            work(held);
        }
    }

    /// Changes a lease, unless it is another one by now, and has it written.
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
        // When it is due next may be another moment.
        self.changed.notify_all();
    }

    /// Has the thread that writes do this.
    pub(super) fn enqueue(&self, owner: Owner, number: u64, job: Job) {
        locked(&self.state).jobs.push_back((owner, number, job));
        self.queued.notify_all();
    }

    /// The next thing to be done, once there is one; or `until` then there is none.
    pub(super) fn next_job(&self, until: Option<Duration>) -> Next {
        let mut state = locked(&self.state);
        loop {
            if let Some((owner, number, job)) = state.jobs.pop_front() {
                return Next::Job(owner, number, job);
            }
            if state.ends {
                return Next::End;
            }
            // Woken by a job, by the time, or for no reason: it looks again.
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

    /// Tells who wants to know that a lease is lost.
    pub(super) fn tell_lost(&self, owner: &Owner) {
        if let Some(WhenLost(then)) = self.when_lost.get() {
            then(owner);
        }
    }

    /// Tells the server that the client has no use for the address any more.
    fn send_back(&self, record: &Record) -> Result<(), Error> {
        let netns = open_namespace(record)?;
        let socket = Socket::open(&netns, record.index, record.mac)?;
        let client = record.config.client(&record.owner(), record.mac);
        socket.send(&release(&client, record.address, record.server, random())).map_err(Error::Socket)
    }
}

/// Opens the namespace of a record, if it is still that of its pod.
///
/// # Errors
/// [`Error::NoNamespace`] if it is gone, or another one is there; otherwise that cannot be told.
pub(super) fn open_namespace(record: &Record) -> Result<Netns, Error> {
    let netns = Netns::of(&record.netns, record.netns_id, None).map_err(|error| Error::Open(error.into()))?;
    netns.ok_or(Error::NoNamespace)
}

#[cfg(test)]
#[cfg(not(feature = "model"))]
#[path = "leases_tests.rs"]
mod tests;
