//! Translation without an agent: each process adds and removes the elements of one attachment, in a table
//! that all processes share.
//!
//! The comment of an element names its owner: plugin, network, container, interface, and for a port that
//! 127.0.0.1 leads to, the device that such packets leave by. DEL and GC therefore need no configuration, and
//! no process removes an element that meanwhile belongs to another pod. A process reads the table, decides,
//! and changes the table on the condition that the packet filter has not changed since; otherwise it begins
//! again.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::forgetting::{Stale, Which};
use super::ports::{check_room, overlap};
use super::wish::{self, HostPort, Wish};
use super::{Holder, Key, NatError, Taken, forget, loopback};
use crate::netlink::Error;
use crate::netlink::nat::{self, Element, Noted, Set};
use crate::npwg::selection::PortProtocol;

/// Longest time to retry while other processes change the packet filter first.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Longest names in a comment, so that the whole comment fits: a longer name is replaced by its digest.
const MOST_CONTAINER: usize = 64;
const MOST_NETWORK: usize = 22;
/// First character of a name's digest; no name begins with it.
const DIGEST: char = '~';

/// A plugin that has elements of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plugin {
    /// The plugin that made the interface.
    Link,
    /// `portmap`.
    Portmap,
}

impl Plugin {
    fn word(self) -> &'static str {
        match self {
            Self::Link => "link",
            Self::Portmap => "portmap",
        }
    }
}

/// Selects the elements of a plugin for one attachment.
#[derive(Debug, Clone, Copy)]
pub struct Whose<'a> {
    /// The plugin.
    pub plugin: Plugin,
    /// Name of the network's configuration.
    pub network: &'a str,
    /// `CNI_CONTAINERID`.
    pub container: &'a str,
    /// Name of the interface in the pod.
    pub ifname: &'a str,
}

impl Whose<'_> {
    /// The owner in the form of a comment.
    fn note(&self) -> String {
        format!("{} {}", self.plugin.word(), attachment_words(self.network, self.container, self.ifname))
    }
}

/// An attachment in the form of a comment: network, container, interface; at most 103 bytes.
pub(crate) fn attachment_words(network: &str, container: &str, ifname: &str) -> String {
    format!("{} {} {ifname}", shortened(network, MOST_NETWORK), shortened(container, MOST_CONTAINER))
}

/// The first of these words, which all attachments of a network share.
pub(crate) fn network_word(network: &str) -> String {
    shortened(network, MOST_NETWORK)
}

/// The name itself, or its digest if the name is longer than `most` bytes.
fn shortened(name: &str, most: usize) -> String {
    if name.len() <= most {
        return name.to_owned();
    }
    let digits: String = Sha256::digest(name).iter().map(|byte| format!("{byte:02x}")).collect();
    std::iter::once(DIGEST).chain(digits.chars()).take(most).collect()
}

/// The comment of an element, split into its words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Note<'n> {
    plugin: &'n str,
    network: &'n str,
    container: &'n str,
    ifname: &'n str,
    /// The device by which packets with loopback addresses leave.
    device: Option<&'n str>,
}

impl<'n> Note<'n> {
    fn of(element: &'n Noted) -> Option<Self> {
        let mut words = element.note.split(' ');
        let mut next = || words.next();
        let (plugin, network, container, ifname) = (next()?, next()?, next()?, next()?);
        Some(Self { plugin, network, container, ifname, device: next() })
    }

    fn is_of(&self, whose: &str) -> bool {
        let Self { plugin, network, container, ifname, device: _ } = self;
        whose == format!("{plugin} {network} {container} {ifname}")
    }

    /// Whether both belong to one attachment, whichever the plugins.
    fn is_with(&self, other: &Self) -> bool {
        (self.network, self.container, self.ifname) == (other.network, other.container, other.ifname)
    }

    fn holder(&self) -> Holder {
        let who = format!("container {}, interface {}", self.container, self.ifname);
        Holder { key: Key { container: self.container.to_owned(), ifname: self.ifname.to_owned() }, who }
    }
}

/// A change of the table.
#[derive(Debug, Default, PartialEq, Eq)]
struct Change {
    gone: Vec<Noted>,
    new: Vec<Noted>,
    /// Devices that no element names any more.
    closed: BTreeSet<String>,
    /// Devices that elements name.
    opened: BTreeSet<String>,
}

/// Computes the change that gives the attachment exactly the elements that it wants.
///
/// # Errors
/// Another attachment holds one of its ports, or its address; or the attachment would exceed a bound of
/// ports.
fn attached(table: &[Noted], whose: &Whose<'_>, wish: &Wish) -> Result<Change, NatError> {
    let own = whose.note();
    let of_ports = table.iter().filter(|it| matches!(it.element.set, Set::Ports4 | Set::Ports6));
    let others = of_ports.filter_map(Note::of).filter(|note| !note.is_of(&own)).map(|note| note.container);
    check_room(others, &shortened(whose.container, MOST_CONTAINER), wish.ports.len())?;
    let wanted = wanted(&own, wish);
    let mut gone: Vec<Noted> = table
        .iter()
        .filter(|it| Note::of(it).is_some_and(|note| note.is_of(&own)) && !wanted.contains(it))
        .cloned()
        .collect();
    let mut new = Vec::new();
    for noted in wanted {
        let Some(its) = Note::of(&noted) else { continue };
        check_ports(table, &noted.element, &its).map_err(NatError::PortTaken)?;
        let in_place =
            |it: &&Noted| it.element.set == noted.element.set && it.element.key == noted.element.key;
        match table.iter().find(in_place) {
            Some(there) if *there == noted => continue,
            // Another plugin of the same attachment has asked for the same element.
            Some(there)
                if there.element == noted.element
                    && Note::of(there).is_some_and(|note| !note.is_of(&own) && note.is_with(&its)) =>
            {
                continue;
            }
            Some(there) => {
                check_address(there, &its)?;
                if !gone.contains(there) {
                    gone.push(there.clone());
                }
            }
            None => {}
        }
        new.push(noted);
    }
    Ok(with_devices(table, gone, new))
}

/// Computes the change that removes all elements whose comment satisfies `is_gone`.
fn detached(table: &[Noted], is_gone: impl Fn(&Note<'_>) -> bool) -> Change {
    let its = |it: &&Noted| Note::of(it).is_some_and(|note| is_gone(&note));
    with_devices(table, table.iter().filter(its).cloned().collect(), Vec::new())
}

/// The elements that an attachment wants, except devices, whose elements name no owner.
fn wanted(own: &str, wish: &Wish) -> Vec<Noted> {
    let elements = wish.elements.iter().filter(|element| element.set != Set::Devices);
    elements
        .map(|element| {
            let device = wish.opened.as_ref().filter(|_| element.set == Set::Ports4);
            let note = match device {
                Some(device) => format!("{own} {device}"),
                None => own.to_owned(),
            };
            Noted { element: wish::with_own_lists(element, own), note }
        })
        .collect()
}

/// Checks that the port of the node, if the element is one, is free for this attachment.
fn check_ports(table: &[Noted], element: &Element, its: &Note<'_>) -> Result<(), Box<Taken>> {
    let Some(port) = HostPort::of(element) else { return Ok(()) };
    for there in table.iter().filter(|there| there.element.set == element.set) {
        let (Some(other), Some(note)) = (HostPort::of(&there.element), Note::of(there)) else { continue };
        let same = (other.protocol, other.at.port()) == (port.protocol, port.at.port());
        if same && overlap(other.at.ip(), port.at.ip()) && !note.is_with(its) {
            return Err(Box::new(Taken { port, holder: note.holder() }));
        }
    }
    Ok(())
}

/// Checks that an element to be replaced belongs to the same container on the same network. If another
/// attachment has the same address, replacing the element would take its translation away: packets do not
/// tell which of the two attachments they come from.
fn check_address(there: &Noted, its: &Note<'_>) -> Result<(), NatError> {
    let (Some(address), Some(note)) = (wish::translated(&there.element), Note::of(there)) else {
        return Ok(());
    };
    match (note.network, note.container) == (its.network, its.container) {
        true => Ok(()),
        false => Err(NatError::AddressTaken { address, holder: Box::new(note.holder()) }),
    }
}

/// Completes a change with the elements of devices that follow from it.
fn with_devices(table: &[Noted], mut gone: Vec<Noted>, mut new: Vec<Noted>) -> Change {
    let there = || table.iter().filter(|it| it.element.set == Set::Devices);
    let kept = table.iter().filter(|it| !gone.contains(it));
    let opened: BTreeSet<String> =
        kept.chain(&new).filter_map(|it| Some(Note::of(it)?.device?.to_owned())).collect();
    let wanted: Vec<Noted> =
        opened.iter().map(|name| Noted { element: wish::device(name), note: String::new() }).collect();
    let closed: Vec<Noted> = there().filter(|it| !wanted.contains(it)).cloned().collect();
    new.extend(wanted.into_iter().filter(|it| !there().any(|there| there == it)));
    let names = closed.iter().filter_map(|it| wish::device_named(&it.element)).collect();
    gone.extend(closed);
    Change { gone, new, closed: names, opened }
}

/// Gives an attachment what it wants and removes what it had before. Idempotent.
///
/// # Errors
/// Another attachment has a port or the address that it wants, or the kernel refuses.
pub fn attach(whose: &Whose<'_>, wish: &Wish) -> Result<(), NatError> {
    carry_out(|table| attached(table, whose, wish), BTreeSet::new)?;
    if let Some(device) = &wish.opened {
        loopback::open_without_agent(device)?;
    }
    forget_udp(Which::Misled, &wish.ports);
    Ok(())
}

/// Removes the elements of an attachment. Idempotent.
///
/// # Errors
/// The kernel refuses.
pub fn detach(whose: &Whose<'_>) -> Result<(), NatError> {
    let own = whose.note();
    remove(|note| note.is_of(&own))
}

/// Removes a plugin's elements for those attachments of a network that are not in `valid`, a list of
/// containers and interfaces.
///
/// # Errors
/// The kernel refuses.
pub fn collect(plugin: Plugin, network: &str, valid: &[(&str, &str)]) -> Result<(), NatError> {
    let network_word = network_word(network);
    let whose = |(container, ifname): &(&str, &str)| Whose { plugin, network, container, ifname }.note();
    let valid: BTreeSet<String> = valid.iter().map(whose).collect();
    remove(|note| {
        let is_its = note.plugin == plugin.word() && note.network == network_word;
        is_its && !valid.iter().any(|valid| note.is_of(valid))
    })
}

/// Describes what the table lacks of an attachment's wish.
///
/// # Errors
/// The kernel does not answer.
pub fn difference(whose: &Whose<'_>, wish: &Wish) -> Result<Option<String>, NatError> {
    let view = look()?;
    if !view.is_whole() {
        return Ok(Some(format!("table {} lacks chains or rules", nat::SHARED_TABLE)));
    }
    let devices = wish.opened.iter().map(|name| Noted { element: wish::device(name), note: String::new() });
    let wanted = wanted(&whose.note(), wish).into_iter().chain(devices);
    let is_there = |noted: &Noted| view.elements().iter().any(|there| there.element == noted.element);
    let mut missing = wanted.into_iter().filter(|noted| !is_there(noted));
    let said =
        |it: Noted| format!("table {} lacks an element of set {}", nat::SHARED_TABLE, it.element.set.name());
    Ok(missing.next().map(said).or_else(|| wish.opened.as_deref().and_then(loopback::closed)))
}

/// Checks that the kernel supports the table.
///
/// # Errors
/// The kernel does not support it.
pub fn check_possible() -> Result<(), NatError> {
    nat::check_table_possible().map_err(NatError::Shared)
}

fn remove(is_gone: impl Fn(&Note<'_>) -> bool) -> Result<(), NatError> {
    let ports = carry_out(|table| Ok(detached(table, &is_gone)), loopback::opened_without_agent)?;
    forget_udp(Which::Led, &ports);
    Ok(())
}

/// Changes the table as `decide` says; returns the ports that were removed. Closes the devices that no
/// element of this table or of the agent's table names any more, and those devices of `left` that no element
/// names: another program may have removed the table that named them.
fn carry_out(
    decide: impl Fn(&[Noted]) -> Result<Change, NatError>,
    left: impl Fn() -> BTreeSet<String>,
) -> Result<Vec<HostPort>, NatError> {
    let due = Instant::now() + PATIENCE;
    let mut closed: BTreeSet<String> = BTreeSet::new();
    let mut pause = Pause::default();
    loop {
        // The view is read first: a later change of the agent's table is also a change of the packet filter
        // since the view.
        let view = look()?;
        let mut needed = loopback::named(nat::TABLE).map_err(NatError::Table)?;
        let change = decide(view.elements())?;
        needed.extend(change.opened.iter().cloned());
        let closing: BTreeSet<String> =
            change.closed.union(&left()).filter(|device| !needed.contains(*device)).cloned().collect();
        // Devices are closed while the table still drops packets with loopback addresses that come from them.
        closing.iter().try_for_each(|device| loopback::close(device))?;
        // Another process has asked for the device since it was closed.
        closed.intersection(&needed).try_for_each(|device| loopback::reopen_without_agent(device))?;
        let has_nothing_to_do = change.gone.is_empty() && change.new.is_empty();
        let is_right = view.is_whole() || view.elements().is_empty();
        let is_done = match has_nothing_to_do && is_right {
            // A process that has asked for a device since the view finds the device closed: the next round
            // notices.
            true => closing.is_empty(),
            false => nat::change_noted(&view, &change.gone, &change.new).map_err(NatError::Shared)?,
        };
        if is_done {
            let ports = change.gone.iter().filter_map(|noted| HostPort::of(&noted.element));
            return Ok(ports.collect());
        }
        if Instant::now() > due {
            return Err(NatError::Busy);
        }
        closed.extend(closing);
        pause.wait();
    }
}

/// Pause between two attempts. Its length differs between processes, which would otherwise collide again.
#[derive(Default)]
pub(crate) struct Pause(u32);

impl Pause {
    pub(crate) fn wait(&mut self) {
        self.0 += 1;
        let spread = std::process::id().wrapping_mul(self.0) % (1 + 2 * self.0.min(8));
        std::thread::sleep(Duration::from_millis(spread.into()));
    }
}

/// Reads the table, and retries while other processes change it.
fn look() -> Result<nat::View, NatError> {
    let due = Instant::now() + PATIENCE;
    let mut pause = Pause::default();
    loop {
        match nat::view() {
            Err(Error::Interrupted(_)) if Instant::now() < due => pause.wait(),
            other => return other.map_err(NatError::Shared),
        }
    }
}

fn forget_udp(which: Which, ports: &[HostPort]) {
    let mut stale = Stale::new();
    for port in ports.iter().filter(|port| port.protocol == PortProtocol::Udp) {
        stale.entry(port.at.port()).or_default().push((which, *port));
    }
    if !stale.is_empty() {
        forget(&stale);
    }
}

#[cfg(test)]
#[path = "without_agent_tests.rs"]
mod tests;
