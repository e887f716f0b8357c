//! `macspoofchk` of `bridge` without an agent: the node's packet filter drops frames that a pod sends by
//! another Ethernet address than its own.
//!
//! The reference plugin gives each interface two chains. Here all interfaces share one rule and have elements
//! in its sets. The comment of an element names its interface, so DEL and GC need neither the link nor the
//! pod's namespace. DEL also removes what the reference plugin has made for an interface, since either
//! implementation may have run the ADD.

use std::collections::BTreeSet;

use super::{FirewallError, Owner};
use crate::mac::Mac;
use crate::nat::without_agent::network_word;
use crate::netlink::Error;
use crate::netlink::senders::{self, Element, TABLE, View};

/// Names the interface whose elements are meant.
#[derive(Debug, Clone, Copy)]
pub struct Whose<'a> {
    /// Name of the network's configuration.
    pub network: &'a str,
    /// `CNI_CONTAINERID`.
    pub container: &'a str,
    /// Name of the interface in the pod.
    pub ifname: &'a str,
}

impl Whose<'_> {
    fn note(&self) -> String {
        Owner::executables().note(self.network, self.container, self.ifname)
    }
}

/// A change of the table.
#[derive(Debug, Default, PartialEq, Eq)]
struct Change {
    gone: Vec<Element>,
    new: Vec<Element>,
}

/// Checks that the kernel supports the table.
///
/// # Errors
/// The kernel does not: it may lack nftables, or its bridge family.
pub fn check_possible() -> Result<(), FirewallError> {
    // A table with elements exists, so the kernel supports it.
    if !look()?.elements().is_empty() {
        return Ok(());
    }
    senders::check_possible().map_err(FirewallError::NoSenders)
}

/// Restricts a port of a bridge to sending by that Ethernet address. Idempotent.
///
/// # Errors
/// The kernel refuses.
pub fn attach(whose: &Whose<'_>, port: &str, mac: Mac) -> Result<(), FirewallError> {
    let note = whose.note();
    carry_out(|there| attached(there, &note, port, mac))
}

/// Removes the elements of an interface, and the rules that the reference plugin made for it. Idempotent.
///
/// # Errors
/// The kernel refuses.
pub fn detach(whose: &Whose<'_>) -> Result<(), FirewallError> {
    let note = whose.note();
    carry_out(|there| detached(there, |it| it.note == note))?;
    until_done(|| senders::remove_of_reference(whose.container, whose.ifname))
}

/// Removes the elements of those interfaces of a network that are not in `valid`, a list of containers and
/// interfaces.
///
/// # Errors
/// The kernel refuses.
pub fn collect(network: &str, valid: &[(&str, &str)]) -> Result<(), FirewallError> {
    let note = |(container, ifname): &(&str, &str)| Whose { network, container, ifname }.note();
    let valid: BTreeSet<String> = valid.iter().map(note).collect();
    let of_network = format!("{} {} ", Owner::executables().0, network_word(network));
    carry_out(|there| detached(there, |it| it.note.starts_with(&of_network) && !valid.contains(&it.note)))
}

/// Describes what the table lacks of an interface's elements.
///
/// # Errors
/// The kernel does not answer.
pub fn difference(whose: &Whose<'_>, port: &str, mac: Mac) -> Result<Option<String>, FirewallError> {
    let view = look()?;
    Ok(lacking(view.is_whole(), view.elements(), &wanted(&whose.note(), port, mac)))
}

fn lacking(is_whole: bool, there: &[Element], wanted: &[Element]) -> Option<String> {
    if !is_whole {
        return Some(format!("table bridge {TABLE} lacks its chain or its rule"));
    }
    let missing = wanted.iter().find(|element| !there.contains(element))?;
    Some(match missing.sender {
        None => format!("table bridge {TABLE} lacks port {}", missing.port),
        Some(mac) => format!("table bridge {TABLE} does not let port {} send by {mac}", missing.port),
    })
}

fn wanted(note: &str, port: &str, mac: Mac) -> [Element; 2] {
    [None, Some(mac)].map(|sender| Element { port: port.to_owned(), sender, note: note.to_owned() })
}

/// Computes the change that gives the interface that port and that address and removes what it had before. A
/// port has one owner: its name is derived from container and interface.
fn attached(there: &[Element], note: &str, port: &str, mac: Mac) -> Change {
    let wanted = wanted(note, port, mac);
    let mut change = detached(there, |it| (it.note == note || it.port == port) && !wanted.contains(it));
    change.new.extend(wanted.into_iter().filter(|element| !there.contains(element)));
    change
}

fn detached(there: &[Element], is_gone: impl Fn(&Element) -> bool) -> Change {
    let gone = there.iter().filter(|element| is_gone(element)).cloned().collect();
    Change { gone, new: Vec::new() }
}

/// Changes the table as `decide` says.
fn carry_out(decide: impl Fn(&[Element]) -> Change) -> Result<(), FirewallError> {
    until_done(|| {
        let view = senders::view()?;
        let Change { gone, new } = decide(view.elements());
        let is_right = view.is_whole() || view.elements().is_empty();
        if gone.is_empty() && new.is_empty() && is_right {
            return Ok(true);
        }
        senders::change(&view, &gone, &new)
    })
}

fn look() -> Result<View, FirewallError> {
    let mut found = None;
    until_done(|| {
        found = Some(senders::view()?);
        Ok(true)
    })?;
    found.ok_or(FirewallError::Busy)
}

/// Repeats `attempt` until no other process interferes.
fn until_done(mut attempt: impl FnMut() -> Result<bool, Error>) -> Result<(), FirewallError> {
    super::carry_out(|| match attempt() {
        Ok(is_done) => Ok(is_done.then_some(())),
        Err(Error::Interrupted(_)) => Ok(None),
        Err(error) => Err(FirewallError::Senders(error)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: Mac = Mac([2, 0, 0, 0, 0, 7]);

    fn note(network: &str, container: &str) -> String {
        Whose { network, container, ifname: "eth0" }.note()
    }

    fn after(there: &[Element], change: Change) -> Vec<Element> {
        let kept = there.iter().filter(|element| !change.gone.contains(element)).cloned();
        kept.chain(change.new).collect()
    }

    #[test]
    fn an_interface_has_its_port_and_its_address_once_and_alone() {
        let first = attached(&[], &note("lan", "a"), "na1", MAC);
        let there = after(&[], first);
        assert_eq!(there, wanted(&note("lan", "a"), "na1", MAC));
        assert_eq!(attached(&there, &note("lan", "a"), "na1", MAC), Change::default());
        // A repeated ADD with another address: the former address may not send any more.
        let other = Mac([2, 0, 0, 0, 0, 8]);
        let changed = after(&there, attached(&there, &note("lan", "a"), "na1", other));
        assert_eq!(changed, wanted(&note("lan", "a"), "na1", other));
        // Elements that another owner left for a port of the same name are all replaced.
        let taken = after(&there, attached(&there, &note("wan", "a"), "na1", MAC));
        assert_eq!(taken, wanted(&note("wan", "a"), "na1", MAC));
    }

    #[test]
    fn what_is_taken_back_is_one_interfaces_alone() {
        let a = wanted(&note("lan", "a"), "na1", MAC);
        let there = [a.clone(), wanted(&note("lan", "b"), "na2", MAC)].concat();
        let own = note("lan", "b");
        assert_eq!(after(&there, detached(&there, |it| it.note == own)), a);
    }

    #[test]
    fn what_is_lacking_is_said() {
        let wanted = wanted(&note("lan", "a"), "na1", MAC);
        assert_eq!(lacking(true, &wanted, &wanted), None);
        let said = |is_whole, there: &[Element]| lacking(is_whole, there, &wanted).unwrap();
        assert_eq!(said(false, &wanted), "table bridge netattach-cni lacks its chain or its rule");
        assert_eq!(said(true, &wanted[1..]), "table bridge netattach-cni lacks port na1");
        let silent = "table bridge netattach-cni does not let port na1 send by 02:00:00:00:00:07";
        assert_eq!(said(true, &wanted[..1]), silent);
    }
}
