//! Masquerades what pods send and forwards ports of the node to pods (`hostPort`), by an nftables table that
//! the agent owns.
//!
//! | module | contents |
//! |---|---|
//! | [`wish`] | what one attachment wants, as elements of the table's sets. Pure |
//! | `error` | why the node does not translate as asked |
//! | `forgetting` | deletes conntrack entries of UDP after an ADD or a DEL |
//! | `exceptions` | the list of destinations without masquerade, which changes while pods are attached. Pure |
//! | `ports` | which attachment holds which port of the node, how many ports a pod may hold, and which are reserved. Pure |
//! | `loopback` | devices that packets with loopback addresses may leave by |
//! | `table` | the table in the kernel: its actual and its wanted contents |
//! | [`without_agent`] | the same without an agent: processes share a table, whose elements name their attachment in a comment |
//!
//! The table exists while an attachment wants an element of it. Its rules never change: an attachment is
//! added or removed by one transaction that changes elements only. Its chains have a lower priority than
//! those of other programs that translate at the usual priorities, so it does not take packets that are meant
//! for a Service. A port of the node is translated only in packets to an address of the node. Decision 0028
//! gives the reasons.

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
use wish::{HostPort, Left, Wish};

pub use error::{NatError, Taken};
pub use ports::{Reserved, ReservedFor};

/// Key of an attachment: container and interface.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// `CNI_CONTAINERID`.
    pub container: String,
    /// Name of the interface in the pod.
    pub ifname: String,
}

/// An attachment, and its name in messages.
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
    /// Number of attachments that want each element. An element of the node's exceptions counts once.
    users: BTreeMap<Element, usize>,
    exceptions: Exceptions,
    table: Table,
    /// Counts how often elements that other programs had removed from the table were put back.
    put_back: PutBack<()>,
    /// Whether devices may be closed that should be open: they were closed while the table did not drop packets
    /// with loopback addresses that come in by them, or opening them has failed half way.
    has_closed: bool,
    /// Why the table is not as it should be.
    trouble: Option<String>,
}

impl Nat {
    /// Creates the translation of the agent with the state directory `owner`.
    pub fn new(owner: &str) -> Self {
        let state = Mutex::new(State { table: Table::new(owner), ..State::default() });
        Self { reserved: Reserved::default(), state, forgetting: Forgetting::new(forget) }
    }

    /// The same, with ports of the node that are not given to pods from now on.
    #[must_use]
    pub fn reserving(self, reserved: Reserved) -> Self {
        Self { reserved, ..self }
    }

    /// Takes over an attachment of an earlier agent. Nothing is written before [`Nat::begin`]. If a record is
    /// damaged, two attachments may want the same port or address: the first one keeps it. Adopted ports
    /// count against the bounds when other attachments ask for ports, but adoption itself is not checked
    /// against a bound.
    pub fn adopt(&self, holder: &Holder, wish: Wish) {
        let mut state = self.lock();
        let is_known = state.wishes.contains_key(&holder.key) || state.ambiguous(&wish).is_some();
        if !is_known && state.ports.claim(&wish.ports, holder).is_ok() {
            state.count(&wish);
            state.wishes.insert(holder.key.clone(), wish);
        }
    }

    /// Keeps packets with loopback addresses from coming in by a device, until [`Nat::detach`], for an
    /// attachment that an earlier agent left partly made or partly removed.
    pub fn guard(&self, holder: &Holder, device: &str) {
        let mut state = self.lock();
        if !state.wishes.contains_key(&holder.key) {
            let wish = Wish::of_device(device);
            state.count(&wish);
            state.wishes.insert(holder.key.clone(), wish);
        }
    }

    /// Makes the table what the adopted attachments want. `all`: every record could be read, so elements that
    /// no attachment wants are removed.
    ///
    /// # Errors
    /// The kernel refuses. The next call retries: [`Nat::repair`], which is called once a second, or any call
    /// that changes the table.
    pub fn begin(&self, all: bool) -> Result<(), NatError> {
        let mut state = self.lock();
        state.take_over_exceptions();
        let State { users, table, .. } = &mut *state;
        let begun = table.begin(users, all);
        state.note(&begun);
        begun?;
        state.reopen()
    }

    /// Adds the elements that an attachment wants. Idempotent.
    ///
    /// # Errors
    /// Another attachment holds one of the ports, or a port is reserved, or the attachment would exceed a
    /// bound; or the kernel refuses. [`Nat::detach`] takes back what has been done.
    pub fn attach(&self, holder: &Holder, wish: Wish) -> Result<(), NatError> {
        let mut state = self.lock();
        if state.wishes.get(&holder.key).is_some_and(|known| *known != wish) {
            // An earlier attempt, whose record is gone, left this wish.
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
                // The kernel carries out a transaction as a whole or not at all.
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
        // The ADD does not wait for the walk: a sender whose connection leads to another destination by this
        // port keeps reaching that destination for some tens of milliseconds.
        self.forgetting.ask(Which::Misled, &wish.ports);
        Ok(())
    }

    /// Whether the table may have elements of an attachment that [`Nat::detach`] does not know: its record was not
    /// adopted, and no table was begun since without such elements. Then [`Nat::sweep`] comes before.
    pub fn may_have_left(&self, key: &Key) -> bool {
        let state = self.lock();
        state.wishes.get(key).is_none_or(Wish::is_guard) && state.table.may_have_strangers()
    }

    /// Removes what the table has of an attachment that was not taken over, except what others want. Idempotent.
    ///
    /// # Errors
    /// The kernel refuses. In that case nothing has changed.
    pub fn sweep(&self, left: &Left<'_>) -> Result<(), NatError> {
        let mut state = self.lock();
        let State { users, table, .. } = &mut *state;
        let swept = table.sweep(users, left);
        if !matches!(&swept, Ok(gone) if gone.is_empty()) {
            state.note(&swept);
        }
        drop(state);
        let ports: Vec<HostPort> = swept?.iter().filter_map(HostPort::of).collect();
        self.forget_led(&ports);
        Ok(())
    }

    /// Removes the elements of an attachment. Idempotent.
    ///
    /// # Errors
    /// The kernel refuses. In that case nothing has changed.
    pub fn detach(&self, key: &Key) -> Result<(), NatError> {
        let mut state = self.lock();
        let Some(wish) = state.wishes.get(key).cloned() else { return Ok(()) };
        let removed = state.remove(key);
        drop(state);
        removed?;
        self.forget_led(&wish.ports);
        Ok(())
    }

    /// Waits until connections by ports that do not lead to their pod any more are forgotten: its address is free
    /// then, and no sender may reach the address's next holder by a port that the next holder does not have.
    fn forget_led(&self, ports: &[HostPort]) {
        if let Some(walk) = self.forgetting.ask(Which::Led, ports) {
            self.forgetting.wait(walk);
        }
    }

    /// Sets the exceptions of the node for all attachments that follow them, including those that already
    /// exist. One transaction replaces the list, so each packet meets either the former list or the new one.
    /// Returns whether the table has changed.
    ///
    /// # Errors
    /// The kernel refuses. The former list then stays in force, also for attachments that are added later.
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

    /// Puts back elements that another program has removed from the table: at once, or once a minute if the
    /// removals go on. Returns whether elements were missing. Until they are put back, no packet with a
    /// loopback address leaves by any device, because without the table such packets could also come in by
    /// these devices. Retries [`Nat::begin`] if that has failed.
    ///
    /// # Errors
    /// The kernel refuses; or elements were put back too often just now.
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
        // The table is complete.
        if state.has_closed || repaired != Repaired::Nothing {
            state.reopen()?;
        }
        Ok(repaired == Repaired::PutBack)
    }

    /// Whether no attachment wants anything of the table, and nothing is to be tried again: [`Nat::repair`] would do
    /// nothing. `false` while another thread is at work. Does not wait.
    pub fn has_nothing(&self) -> bool {
        let Ok(state) = self.state.try_lock() else { return false };
        let State { users, table, has_closed, trouble, .. } = &*state;
        users.is_empty() && table.is_begun() && !has_closed && trouble.is_none()
    }

    /// Reopens a device that was recreated under its former name: packets with loopback addresses leave by
    /// the device again if ports of an attachment lead there.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn reopen(&self, device: &str) -> Result<(), NatError> {
        let leads_there = |wish: &Wish| !wish.ports.is_empty() && wish.opened.as_deref() == Some(device);
        let is_open = self.lock().wishes.values().any(leads_there);
        if is_open { loopback::open(device) } else { Ok(()) }
    }

    /// Returns why the table is not as it should be, or why it is unlikely to stay so.
    pub fn trouble(&self) -> Option<String> {
        let state = self.lock();
        let fought_over = || state.put_back.fought_over(&(), Instant::now());
        state.trouble.clone().or_else(|| Some(NatError::FoughtOver(fought_over()?).to_string()))
    }

    /// Describes what the table lacks of an attachment's wish.
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

    /// Opens these devices again, except those that are gone. If opening fails half way, [`Nat::repair`]
    /// retries: a process without an agent may have closed a device that appeared unused while the table was
    /// missing.
    fn reopen(&mut self) -> Result<(), NatError> {
        self.has_closed = true;
        self.opened().into_iter().try_for_each(loopback::reopen)?;
        self.has_closed = false;
        Ok(())
    }

    /// Returns an address of the wish for which another attachment wants a different value: a kernel map
    /// holds one value per key. Ports have holders, so they are not checked here.
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

    /// Takes over the node's exceptions from the table of an earlier agent, until the agent sets them.
    fn take_over_exceptions(&mut self) {
        if !self.exceptions.is_followed() || self.exceptions.given().is_some() {
            return;
        }
        match Table::exceptions() {
            // Another program has removed the table.
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

    /// Updates the exceptions of the node; returns the resulting changes of the table.
    fn settle(&mut self) -> Changes {
        let changes = self.exceptions.settle();
        for element in &changes.gone {
            self.users.remove(element);
        }
        self.users.extend(changes.new.iter().map(|element| (element.clone(), 1)));
        changes
    }

    /// Counts a wish in; returns the resulting changes of the table, mainly the elements that no other
    /// attachment wants.
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

    /// Counts a wish out; returns the resulting changes of the table, mainly the elements that no attachment
    /// wants any more.
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

    /// Removes an attachment from the table, or leaves everything unchanged. While the table belongs to
    /// another agent, the attachment is removed and the trouble stays recorded.
    fn remove(&mut self, key: &Key) -> Result<(), NatError> {
        let Some(wish) = self.wishes.get(key).cloned() else { return Ok(()) };
        let Changes { gone, new } = self.uncount(&wish);
        let closed = match &wish.opened {
            // The device is closed while the table still drops packets with loopback addresses that come from
            // it.
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
            // Another agent's table contains nothing of this attachment.
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

/// Deletes the conntrack entries of UDP by which senders would go on reaching another destination than the
/// pod that holds their port, or a pod that no longer holds the port. If this fails, the change only takes
/// effect later: when a sender pauses for half a minute, or when a connection ends.
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

/// Whether the port is open at that address of the node.
fn is_of(port: &HostPort, address: IpAddr) -> bool {
    let at = port.at.ip();
    at.is_ipv4() == address.is_ipv4() && (at.is_unspecified() || at == address)
}

#[cfg(test)]
mod tests;
