//! The leases of this node: taken, checked and given back.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::config::Config;
use super::exchange::{Act, Exchange, Outcome, Outgoing, Purpose, release};
use super::record::{Directory, Record};
use super::terms::{Server, Terms};
use super::wire::{self, Socket, now, random};
use super::{Error, PATIENCE, granted, renewal};
use crate::error_chain::Chain;
use crate::ipam::{Lease, Lessee, Owner};
use crate::moment;
use crate::netns::Netns;
use crate::sync::{Condvar, Mutex, locked, thread};

/// The leases that an agent keeps. A thread renews them as long as there are some.
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
    pub(super) boot: String,
    pub(super) state: Mutex<State>,
    /// Signalled when there is something new to renew, or nothing ever again.
    pub(super) changed: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) held: BTreeMap<Owner, Held>,
    is_renewing: bool,
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
    /// Whether an exchange is at it, or it is about to be given back.
    pub(super) is_busy: bool,
}

impl Leases {
    /// Opens the directory of the leases, and goes on renewing what is there.
    ///
    /// # Errors
    /// The directory cannot be made or read.
    pub fn open(directory: &Path) -> Result<Self, Error> {
        let boot = moment::boot_id().map_err(|source| Error::Read { path: directory.to_owned(), source })?;
        let (directory, records) = Directory::open(directory)?;
        let (state, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { directory, boot, state, changed });
        for record in records {
            shared.keep(record);
        }
        Ok(Self { shared })
    }

    /// Leases an address by the pod's interface, which is brought up for it.
    pub(in super::super) fn lease(&self, config: &Config, lessee: Lessee<'_>) -> Result<Lease, Error> {
        let netns = lessee.netns.ok_or(Error::NoNamespace)?;
        let interface = wire::raise(netns, &lessee.owner.ifname)?;
        let socket = Socket::open(netns, interface.index, interface.mac)?;
        let before = locked(&self.shared.state).held.get(lessee.owner).map(|held| held.record.address);
        let client = config.client(lessee.owner, interface.mac);
        let begun = now();
        let exchange = Exchange::begin(client, Purpose::New(before), begun, begun + PATIENCE, random());
        let asks = |asked: (Ipv4Addr, Server)| -> Result<(), Error> {
            // Recorded before it is asked for: whatever becomes of this process, it is given back.
            let record = Record::new(lessee.owner, config, &interface, &self.shared.boot, asked);
            self.shared.directory.write(&record)?;
            self.shared.keep(record);
            Ok(())
        };
        match converse(exchange, &socket, asks)? {
            Outcome::Bound(terms, options) => {
                self.shared.bind(lessee.owner, &terms)?;
                Ok(granted::lease(&terms, &options, config.priority))
            }
            Outcome::Refused(heard) | Outcome::Silence(heard) => Err(Error::Silence { heard }),
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

    /// Gives back what the owner has. Where the pod's interface is gone, the server is not told, and its lease ends by itself.
    pub(in super::super) fn release(&self, owner: &Owner) -> Result<(), Error> {
        let record = match locked(&self.shared.state).held.get_mut(owner) {
            Some(held) => {
                held.is_busy = true;
                // An exchange that is at it finds that it is not that one any more.
                held.number = 0;
                held.record.clone()
            }
            // One that could not be read may be there.
            None => return self.shared.directory.remove(owner),
        };
        // What was lost is not the client's to give back. What is, the pod does not use any more when its server hears of it.
        if record.lost.is_none()
            && let Err(error) = renewal::take_away(&record).and_then(|()| self.shared.send_back(&record))
        {
            tracing::warn!(
                %owner, network = record.config.network, address = %record.address, error = %Chain(&error),
                "lease by dhcp is not given back: the server keeps it until its time is over"
            );
        }
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

    /// The leases that could not be extended when they were last due, and those that are lost.
    pub fn troubles(&self) -> Vec<Trouble> {
        let state = locked(&self.shared.state);
        let trouble = |(owner, held): (&Owner, &Held)| {
            let stays = if held.record.is_taken { "" } else { ", and the pod's interface still has it" };
            let lost = held.record.lost.as_ref().map(|why| format!("{why}{stays}"));
            let problem = lost.or_else(|| held.trouble.clone())?;
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
    }
}

impl Shared {
    /// Takes a record that is on disk, in the place of an earlier one of its owner.
    fn keep(self: &Arc<Self>, record: Record) {
        let mut state = locked(&self.state);
        state.last += 1;
        let held = Held { number: state.last, tried: None, trouble: None, is_busy: false, record };
        if !held.record.is_taken && !state.is_renewing {
            let shared = Arc::clone(self);
            let begun = thread::Builder::new().name("dhcp".into()).spawn(move || renewal::run(&shared));
            match begun {
                Ok(_) => state.is_renewing = true,
                // The next lease tries it again.
                Err(error) => tracing::error!(%error, "no thread that renews leases by dhcp"),
            }
        }
        state.held.insert(held.record.owner(), held);
        self.changed.notify_all();
    }

    /// Records that a server has given the address that was asked for.
    fn bind(&self, owner: &Owner, terms: &Terms) -> Result<(), Error> {
        let mut state = locked(&self.state);
        if let Some(held) = state.held.get_mut(owner) {
            held.record.terms = Some(*terms);
            held.record.address = terms.address;
            held.record.server = terms.server;
            self.directory.write(&held.record)?;
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Changes a lease, unless it is another one by now, and writes it.
    pub(super) fn change(&self, owner: &Owner, number: u64, change: impl FnOnce(&mut Held)) {
        let mut state = locked(&self.state);
        let Some(held) = state.held.get_mut(owner).filter(|held| held.number == number) else { return };
        let before = held.record.clone();
        change(held);
        if held.record != before
            && let Err(error) = self.directory.write(&held.record)
        {
            tracing::warn!(%owner, error = %Chain(&error), "lease by dhcp not written");
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
pub(super) fn open_namespace(record: &Record) -> Result<Netns, Error> {
    let netns = Netns::open(&record.netns).map_err(|error| Error::Open(error.into()))?;
    if netns.id() == record.netns_id { Ok(netns) } else { Err(Error::NoNamespace) }
}

/// Carries out an exchange, on the thread of who waits for it. `asks`: called before an address is first asked for.
fn converse(
    mut exchange: Exchange,
    socket: &Socket,
    asks: impl Fn((Ipv4Addr, Server)) -> Result<(), Error>,
) -> Result<Outcome, Error> {
    let mut asked = None;
    let mut act = exchange.tick(now());
    loop {
        match act {
            Act::Done(outcome) => return Ok(outcome),
            Act::Send(outgoing) => {
                if outgoing.asks_for != asked
                    && let Some(wanted) = outgoing.asks_for
                {
                    asks(wanted)?;
                    asked = outgoing.asks_for;
                }
                send(socket, &outgoing);
            }
            Act::Wait => {}
        }
        wire::wait(std::iter::once(socket), exchange.due());
        act = hear(&mut exchange, socket);
    }
}

/// What follows from what a socket has received, or from the time.
pub(super) fn hear(exchange: &mut Exchange, socket: &Socket) -> Act {
    for (from, message) in socket.received() {
        let act = exchange.hear(now(), from, &message);
        if act != Act::Wait {
            return act;
        }
    }
    exchange.tick(now())
}

/// Sends a message. What cannot be sent now is sent again, as what is lost on the way.
pub(super) fn send(socket: &Socket, outgoing: &Outgoing) {
    if let Err(error) = socket.send(outgoing) {
        tracing::debug!(%error, "message of dhcp not sent");
    }
}
