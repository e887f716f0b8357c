//! Masquerades pods and leads ports of the node to them, by a table of nftables of the agent's own.
//!
//! | module | contents |
//! |---|---|
//! | [`wish`] | what one attachment wants, as elements of the table's sets. Pure |
//! | `error` | why it does not translate as asked |
//! | `forgetting` | who has connections of UDP forgotten, and when |
//! | `exceptions` | the list of destinations without masquerade that changes under attached pods. Pure |
//! | `ports` | who has which port of the node, how many, and which nobody. Pure |
//! | `loopback` | devices that addresses of loopback may leave by |
//! | `table` | the table in the kernel: what is in it and what should be |
//! | [`without_agent`] | the same without an agent: processes that share a table, whose elements say whose they are |
//!
//! The table exists while some attachment wants something of it, and its rules never change: an attachment is added and
//! removed by one transaction of elements. It lies behind all others who translate at the usual priorities, so what is
//! meant for a Service is not taken from it; and a port of the node is one only in packets to an address of the node.
//! Decision 0028 says why it is so.

mod error;
mod exceptions;
mod forgetting;
mod loopback;
mod ports;
mod table;
pub mod wish;
pub mod without_agent;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use ipnet::IpNet;

use crate::error_chain::Chain;
use crate::netlink::nat::{Element, Set, TABLE};
use crate::netlink::{Handle, conntrack};
use crate::put_back::PutBack;
use exceptions::{Changes, Exceptions};
use forgetting::{Forgetting, Stale, Which};
use ports::Ports;
use table::{Repaired, Table};
use wish::{HostPort, Wish};

pub use error::{NatError, Taken};
pub use ports::{Reserved, ReservedFor};

/// An attachment: container and interface.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// `CNI_CONTAINERID`.
    pub container: String,
    /// Name of the interface in the pod.
    pub ifname: String,
}

/// An attachment, and how messages name it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// The attachment.
    pub key: Key,
    /// The attachment in words.
    pub who: String,
}

/// The node's translation of addresses.
#[derive(Debug)]
pub struct Nat {
    reserved: Reserved,
    state: Mutex<State>,
    forgetting: Forgetting,
}

#[derive(Debug, Default)]
struct State {
    wishes: BTreeMap<Key, Wish>,
    ports: Ports,
    /// How many attachments want each element; those of the exceptions of the node are wanted once.
    users: BTreeMap<Element, usize>,
    exceptions: Exceptions,
    table: Table,
    /// How often what others had removed from the table was put back.
    put_back: PutBack<()>,
    /// Whether devices may be closed that are to be open: the table did not keep addresses of loopback out of them, or opening them
    /// has failed half way.
    has_closed: bool,
    /// Why the table is not as it should be.
    trouble: Option<String>,
}

impl Nat {
    /// The translation by the agent with that state directory.
    pub fn new(owner: &str) -> Self {
        let state = Mutex::new(State { table: Table::new(owner), ..State::default() });
        Self { reserved: Reserved::default(), state, forgetting: Forgetting::new(forget) }
    }

    /// The same, with ports of the node that no pod gets from now on.
    #[must_use]
    pub fn reserving(self, reserved: Reserved) -> Self {
        Self { reserved, ..self }
    }

    /// Takes over what an attachment of an earlier agent has. Nothing is written before [`Nat::begin`]. Two of them may
    /// want the same port or address, if one of their records is damaged: it stays with the first. What they have they keep: it
    /// counts beside what others ask for, and no bound is asked about it.
    pub fn adopt(&self, holder: &Holder, wish: Wish) {
        let mut state = self.lock();
        let is_known = state.wishes.contains_key(&holder.key) || state.ambiguous(&wish).is_some();
        if !is_known && state.ports.claim(&wish.ports, holder).is_ok() {
            state.count(&wish);
            state.wishes.insert(holder.key.clone(), wish);
        }
    }

    /// Goes on keeping addresses of loopback out of a device until [`Nat::detach`] for an attachment that an earlier
    /// agent has left half made or half removed.
    pub fn guard(&self, holder: &Holder, device: &str) {
        let mut state = self.lock();
        if !state.wishes.contains_key(&holder.key) {
            let wish = Wish::of_device(device);
            state.count(&wish);
            state.wishes.insert(holder.key.clone(), wish);
        }
    }

    /// Makes the table that which the adopted attachments want. `all`: every record could be read, so what nobody wants
    /// belongs to nobody.
    ///
    /// # Errors
    /// The kernel refuses. Whichever call comes next begins anew: [`Nat::repair`], which is called once a second, or one that
    /// changes the table.
    pub fn begin(&self, all: bool) -> Result<(), NatError> {
        let mut state = self.lock();
        state.take_over_exceptions();
        let State { users, table, .. } = &mut *state;
        let begun = table.begin(users, all);
        state.note(&begun);
        begun?;
        state.reopen()
    }

    /// Gives an attachment what it wants. Idempotent.
    ///
    /// # Errors
    /// Another attachment has a port that it wants, or nobody may have it, or it would be one too many; or the kernel refuses. What
    /// has been done is taken back by [`Nat::detach`].
    pub fn attach(&self, holder: &Holder, wish: Wish) -> Result<(), NatError> {
        let mut state = self.lock();
        if state.wishes.get(&holder.key).is_some_and(|known| *known != wish) {
            // An earlier attempt whose record is gone.
            state.remove(&holder.key)?;
        }
        if let Some(address) = state.ambiguous(&wish) {
            return Err(NatError::Ambiguous(address));
        }
        let is_new = !state.wishes.contains_key(&holder.key);
        if is_new {
            if let Some((port, why)) = self.reserved.find(&wish.ports) {
                return Err(NatError::PortReserved { port: Box::new(port), why });
            }
            state.ports.check_room(&wish.ports, &holder.key)?;
        }
        state.ports.claim(&wish.ports, holder).map_err(NatError::PortTaken)?;
        if is_new {
            let Changes { gone, new } = state.count(&wish);
            let State { users, table, .. } = &mut *state;
            let written = table.change(users, &gone, &new);
            state.note(&written);
            if let Err(error) = written {
                // A transaction is carried out as a whole or not at all.
                state.uncount(&wish);
                state.ports.release(&wish.ports, &holder.key);
                return Err(error);
            }
            state.wishes.insert(holder.key.clone(), wish.clone());
        }
        drop(state);
        if let Some(device) = &wish.opened {
            loopback::open(device)?;
        }
        // Nobody waits for it: who reached somebody else by the port does so for some tens of milliseconds more.
        self.forgetting.ask(Which::Misled, &wish.ports);
        Ok(())
    }

    /// Takes back what an attachment has. Idempotent.
    ///
    /// # Errors
    /// The kernel refuses. Nothing has changed then.
    pub fn detach(&self, key: &Key) -> Result<(), NatError> {
        let mut state = self.lock();
        let Some(wish) = state.wishes.get(key).cloned() else { return Ok(()) };
        let removed = state.remove(key);
        drop(state);
        removed?;
        if let Some(walk) = self.forgetting.ask(Which::Led, &wish.ports) {
            // The address is free after this: no sender is to reach its next holder by a port that that does not have.
            self.forgetting.wait(walk);
        }
        Ok(())
    }

    /// Sets the exceptions of the node, for all attachments that follow them, those that are there included: in one
    /// transaction, during which no packet meets anything but the former list or this one. Returns whether something
    /// has changed in the table.
    ///
    /// # Errors
    /// The kernel refuses. The former list stands then, also for attachments to come.
    pub fn except(&self, nets: &[IpNet]) -> Result<bool, NatError> {
        let mut state = self.lock();
        if state.exceptions.given() == Some(nets) {
            return Ok(false);
        }
        let former = state.exceptions.give(Some(nets.to_vec()));
        let Changes { gone, new } = state.settle();
        if gone.is_empty() && new.is_empty() {
            return Ok(false);
        }
        let State { users, table, .. } = &mut *state;
        let written = table.change(users, &gone, &new);
        state.note(&written);
        if written.is_err() {
            state.exceptions.give(former);
            state.settle();
        }
        written.map(|()| true)
    }

    /// Puts back what another program has removed from the table: at once, but once a minute where that goes on. Returns whether
    /// there was something. While it is not put back, no address of loopback leaves by any device: by these it would come in.
    /// What has failed of [`Nat::begin`] is begun anew.
    ///
    /// # Errors
    /// The kernel refuses; or it was put back too often just now.
    pub fn repair(&self) -> Result<bool, NatError> {
        let mut state = self.lock();
        let now = Instant::now();
        let State { users, table, put_back, .. } = &mut *state;
        let repaired = table.repair(users, || put_back.check(&(), now).map_err(NatError::FoughtOver));
        state.note(&repaired);
        if let Err(NatError::FoughtOver(_) | NatError::Foreign { .. }) = &repaired {
            state.has_closed = true;
            state.opened().into_iter().try_for_each(loopback::close_unless_shared)?;
        }
        let repaired = repaired?;
        if repaired == Repaired::PutBack {
            state.put_back.count((), now);
        }
        // The table is whole.
        if state.has_closed || repaired != Repaired::Nothing {
            state.reopen()?;
        }
        Ok(repaired == Repaired::PutBack)
    }

    /// A device has been made anew under its name: addresses of loopback leave by it again where ports of an attachment
    /// lead there.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn reopen(&self, device: &str) -> Result<(), NatError> {
        let leads_there = |wish: &Wish| !wish.ports.is_empty() && wish.opened.as_deref() == Some(device);
        let is_open = self.lock().wishes.values().any(leads_there);
        if is_open { loopback::open(device) } else { Ok(()) }
    }

    /// Why the table is not as it should be, or will not be for long.
    pub fn trouble(&self) -> Option<String> {
        let state = self.lock();
        let fought_over = || state.put_back.fought_over(&(), Instant::now());
        state.trouble.clone().or_else(|| Some(NatError::FoughtOver(fought_over()?).to_string()))
    }

    /// What the table lacks of an attachment's wish, in words.
    ///
    /// # Errors
    /// The kernel does not answer.
    pub fn difference(&self, wish: &Wish) -> Result<Option<String>, NatError> {
        let state = self.lock();
        let mut wanted = wish.elements.clone();
        if !wish.follows.is_empty() {
            wanted.extend(state.exceptions.elements().iter().cloned());
        }
        let missing = state.table.missing(&wanted).map_err(NatError::Table)?;
        let said = |element: Element| format!("table {TABLE} lacks an element of set {}", element.set.name());
        Ok(missing.map(said).or_else(|| wish.opened.as_deref().and_then(loopback::closed)))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No lock is poisoned: a panic ends the agent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The devices by which ports of the node at 127.0.0.1 lead to pods.
    fn opened(&self) -> BTreeSet<&str> {
        let whole = self.wishes.values().filter(|wish| !wish.ports.is_empty());
        whole.filter_map(|wish| wish.opened.as_deref()).collect()
    }

    /// Opens these devices, but for those that are gone. Where that fails half way, [`Nat::repair`] does it again: a process
    /// without an agent may have closed what nobody seemed to need while the table was not there.
    fn reopen(&mut self) -> Result<(), NatError> {
        self.has_closed = true;
        self.opened().into_iter().try_for_each(loopback::reopen)?;
        self.has_closed = false;
        Ok(())
    }

    /// An address of the wish for which another attachment wants something else: the kernel takes one value for a key.
    /// Ports have holders, so they are not looked at here.
    fn ambiguous(&self, wish: &Wish) -> Option<IpAddr> {
        let other = |element: &&Element| {
            let first = Element { end: None, value: Vec::new(), ..(*element).clone() };
            let is_same = |it: &Element| (it.set, &it.key) == (element.set, &element.key);
            self.users.range(first..).take_while(|(it, _)| is_same(it)).any(|(it, _)| it != *element)
        };
        let elements = || wish.elements.iter();
        let v4 = elements().filter(|it| matches!(it.set, Set::Masquerade4 | Set::Mapped4)).find(other);
        let v6 = elements().filter(|it| matches!(it.set, Set::Masquerade6 | Set::Mapped6)).find(other);
        let v4 = v4.and_then(|it| it.key.first_chunk::<4>().copied()).map(IpAddr::from);
        v4.or_else(|| v6.and_then(|it| it.key.first_chunk::<16>().copied()).map(IpAddr::from))
    }

    /// Takes the exceptions of the node over from the table of an earlier agent, until the agent says them.
    fn take_over_exceptions(&mut self) {
        if !self.exceptions.is_followed() || self.exceptions.given().is_some() {
            return;
        }
        match Table::exceptions() {
            // Somebody has removed the table.
            Ok(nets) if nets.is_empty() => {}
            Ok(nets) => {
                self.exceptions.give(Some(nets));
                self.settle();
            }
            Err(error) => tracing::warn!(
                error = %Chain(&error),
                "cannot read the table's destinations without masquerade; they are masqueraded until the source has the nodes"
            ),
        }
    }

    /// Brings the exceptions of the node up to date; returns what that changes in the table.
    fn settle(&mut self) -> Changes {
        let changes = self.exceptions.settle();
        for element in &changes.gone {
            self.users.remove(element);
        }
        self.users.extend(changes.new.iter().map(|element| (element.clone(), 1)));
        changes
    }

    /// Counts a wish in; returns what that changes in the table: elements that nobody else wants, above all.
    fn count(&mut self, wish: &Wish) -> Changes {
        let mut changes = Changes::default();
        for element in &wish.elements {
            let users = self.users.entry(element.clone()).or_default();
            *users += 1;
            if *users == 1 {
                changes.new.push(element.clone());
            }
        }
        if self.exceptions.count(&wish.follows) {
            changes.extend(self.settle());
        }
        changes
    }

    /// Counts a wish out; returns what that changes in the table: elements that nobody wants any more, above all.
    fn uncount(&mut self, wish: &Wish) -> Changes {
        let mut changes = Changes::default();
        for element in &wish.elements {
            let Some(users) = self.users.get_mut(element) else { continue };
            *users = users.saturating_sub(1);
            if *users == 0 {
                self.users.remove(element);
                changes.gone.push(element.clone());
            }
        }
        if self.exceptions.uncount(&wish.follows) {
            changes.extend(self.settle());
        }
        changes
    }

    /// Removes an attachment from the table, or leaves everything as it is. While the table is another agent's, it is
    /// removed, and that stays noted.
    fn remove(&mut self, key: &Key) -> Result<(), NatError> {
        let Some(wish) = self.wishes.get(key).cloned() else { return Ok(()) };
        let Changes { gone, new } = self.uncount(&wish);
        let closed = match &wish.opened {
            // While the table still drops what comes from there with an address of loopback.
            Some(device) if gone.iter().any(|element| element.set == Set::Devices) => {
                loopback::close_unless_shared(device)
            }
            _ => Ok(()),
        };
        let written = closed.and_then(|()| {
            let State { users, table, .. } = self;
            table.change(users, &gone, &new)
        });
        self.note(&written);
        match written {
            // Nothing in another agent's table is the attachment's.
            Ok(()) | Err(NatError::Foreign { .. }) => {}
            Err(error) => {
                self.count(&wish);
                return Err(error);
            }
        }
        self.wishes.remove(key);
        self.ports.release(&wish.ports, key);
        Ok(())
    }

    fn note<T>(&mut self, outcome: &Result<T, NatError>) {
        self.trouble = outcome.as_ref().err().map(|error| Chain(error).to_string());
    }
}

/// Forgets the connections of UDP by which senders would go on reaching somebody else than the pod that has their port,
/// or a pod that has it no more. They are only late if this fails: their senders pause for half a minute, or the
/// connections end.
fn forget(stale: &Stale) {
    let is_misled = |(which, _): &(Which, HostPort)| *which == Which::Misled;
    let own = match stale.values().flatten().any(is_misled) {
        true => Handle::open().and_then(|mut host| host.all_addresses()).unwrap_or_default(),
        false => Vec::new(),
    };
    let own: BTreeSet<IpAddr> = own.iter().map(|net| net.addr()).collect();
    let forgotten = conntrack::forget_udp(&mut |connection| {
        let ports = stale.get(&connection.to.port()).into_iter().flatten();
        ports.filter(|(_, port)| is_of(port, connection.to.ip())).any(|(which, port)| match which {
            Which::Led => connection.answers == port.to,
            Which::Misled => {
                let to = connection.to.ip();
                connection.answers != port.to && (to.is_loopback() || own.contains(&to))
            }
        })
    });
    match forgotten {
        Ok(0) => {}
        Ok(connections) => {
            tracing::debug!(connections, "deleted conntrack entries of UDP connections to host ports")
        }
        Err(error) => {
            tracing::warn!(error = %Chain(&error), "cannot delete conntrack entries of UDP connections to host ports");
        }
    }
}

/// Whether the port is one of that address of the node.
fn is_of(port: &HostPort, address: IpAddr) -> bool {
    let at = port.at.ip();
    at.is_ipv4() == address.is_ipv4() && (at.is_unspecified() || at == address)
}

#[cfg(test)]
mod tests;
