//! The table by which bridges drop frames that pods send by another Ethernet address than their own. Plain
//! executables use it, since they have no BPF programs that could judge a frame.
//!
//! The table's one rule never changes. The elements of two sets say which ports it applies to; their comments
//! name the owner:
//!
//! | set | element |
//! |---|---|
//! | `ports` | name of a bridge port: only addresses that `senders` lists for it may come in by this port |
//! | `senders` | name of a bridge port, and an Ethernet address that may be sent from it |
//!
//! The cost per frame does not grow with the number of pods. A change takes effect only if the packet filter
//! has not changed since the table was read.

use super::super::Error;
use super::batch::{
    APPEND, CREATE, GET_CHAIN, GET_RULE, MOST_VALUE, NEW_CHAIN, NEW_RULE, NEW_TABLE, attribute,
    attribute_length, nested, number, object_in, text, transact, transact_at,
};
use super::expression::{Meta, drop_it, if_in, if_not_in, load_meta, load_sender};
use super::nat::{
    DELETE_ELEMENT, MOST_NOTE, NEW_ELEMENT, comment_in_family, each_element_of, shape_in_family,
};
use super::nat_table::{DELETE_TABLE, NEW_SET, USER_DATA, comment_in, comment_of_data, user_data};
use super::noted::generation_if_any;
use super::{Family, NESTED, attribute_in, attributes_of, dump, name};
use crate::mac::Mac;

/// Name of the table, in the family `bridge`.
pub const TABLE: &str = "netattach-cni";

/// Name of a table that never stays: see [`check_possible`].
const PROBE: &str = "netattach-probe";

/// Comment of the table, which describes the comments of its elements. A table with another comment is of
/// another version.
const COMMENT: &str = "netattach-cni 1: owner, network, container, interface";

const NAME: &str = "NFT_MSG_NEWSETELEM";
const CHAIN: &str = "prerouting";
/// Number of chains and rules: one each.
const PARTS: usize = 2;
const PORTS: &str = "ports";
const SENDERS: &str = "senders";
/// Length of a device name, padded with zeros, and of an Ethernet address, padded to whole words.
const PORT_LENGTH: usize = 16;
const MAC_LENGTH: usize = 8;
/// Most elements in one message, which contains all of them in one attribute.
const AT_ONCE: usize = 256;
/// Bytes of the largest element: key and comment.
const LARGEST: usize = {
    let key = attribute_length(attribute_length(PORT_LENGTH + MAC_LENGTH));
    attribute_length(key + attribute_length(2 + MOST_NOTE + 1))
};
const _: () = assert!(AT_ONCE * LARGEST <= MOST_VALUE);

/// An element of one of the sets.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Element {
    /// The port.
    pub port: String,
    /// The Ethernet address that may be sent from the port; `None`: the element restricts the port to the
    /// listed addresses.
    pub sender: Option<Mac>,
    /// The comment: at most [`super::nat::MOST_NOTE`] bytes.
    pub note: String,
}

/// The table as it was read.
#[derive(Debug, Clone)]
pub struct View {
    /// The packet filter's generation before the table was read.
    generation: u32,
    /// Whether a table of that name exists.
    is_there: bool,
    /// Whether the table has its chain and its rule.
    is_whole: bool,
    elements: Vec<Element>,
}

impl View {
    /// The elements.
    pub fn elements(&self) -> &[Element] {
        &self.elements
    }

    /// Whether the elements have an effect: the table has its chain and its rule.
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }
}

/// Checks that the kernel has what the table needs. Creates a table of another name and deletes it in one
/// transaction, so no other process sees it.
///
/// # Errors
/// The kernel refuses: it may lack nftables, the family `bridge`, or `nft_meta_bridge`.
pub fn check_possible() -> Result<(), Error> {
    transact("NFT_MSG_NEWTABLE", &[create(PROBE), vec![delete(PROBE)]].concat())
}

/// Reads the table. Without nftables there is no table.
///
/// # Errors
/// The kernel does not answer, or the table changed while it was read.
pub fn view() -> Result<View, Error> {
    let generation = generation_if_any()?;
    let shape = shape_in_family(Family::Bridge, TABLE)?;
    let found = comment_in_family(Family::Bridge, TABLE)?;
    let mut elements = Vec::new();
    for set in [PORTS, SENDERS] {
        each_element_of((Family::Bridge, TABLE, set), &mut |attributes| elements.extend(read(attributes)))?;
    }
    let is_whole = found.as_deref() == Some(COMMENT) && shape.parts() == PARTS;
    let is_there = found.is_some() || !shape.is_empty() || !elements.is_empty();
    Ok(View { generation, is_there, is_whole, elements })
}

/// Whether the table exists and has no more than its chain and its rule. In that case it judges only frames
/// that come in by the ports that it lists. Those are ports of executables: no packet that takes the fast
/// path of an agent comes in by them, because an interface made by a plugin that an agent executed never uses
/// the fast path.
///
/// # Errors
/// The kernel does not answer, or the table changed while it was read.
pub(super) fn is_as_made() -> Result<bool, Error> {
    Ok(comment_in_family(Family::Bridge, TABLE)?.as_deref() == Some(COMMENT)
        && shape_in_family(Family::Bridge, TABLE)?.parts() == PARTS)
}

/// Deletes elements from the table and adds others, in one transaction. Creates the table with the first
/// element and deletes it with the last. A table that lacks its chain or its rule is recreated with its
/// elements. Returns `false` if the packet filter has changed since the table was read; nothing was done
/// then.
///
/// # Errors
/// The kernel refuses, as in [`check_possible`].
pub fn change(view: &View, gone: &[Element], new: &[Element]) -> Result<bool, Error> {
    let kept = view.elements.iter().filter(|element| !gone.contains(element));
    let wanted: Vec<&Element> = kept.chain(new).collect();
    let messages = match (wanted.is_empty(), view.is_whole) {
        (true, _) if !view.is_there => return Ok(true),
        (true, _) => remove(),
        (false, true) => {
            [about(DELETE_ELEMENT, 0, gone.iter()), about(NEW_ELEMENT, CREATE, new.iter())].concat()
        }
        (false, false) => [remove(), create(TABLE), about(NEW_ELEMENT, CREATE, wanted.into_iter())].concat(),
    };
    let done = transact_at(NAME, view.generation, &messages)?;
    crate::crash_point!("nft", "senders");
    Ok(done)
}

/// The messages that create a table of that name with its sets, chain and rule, without elements.
fn create(table: &str) -> Vec<Vec<u8>> {
    /// Types of `nft`: device name, Ethernet address; in a concatenation they have six bits each.
    const DEVICE: u32 = 41;
    const ETHERNET: u32 = 9;
    /// `NF_BR_PRE_ROUTING`, and `NF_BR_PRI_NAT_DST_BRIDGED`: before other hooks see the frame.
    const HOOK: u32 = 0;
    const PRIORITY: i32 = -300;
    let its = || attribute(1, &text(table));
    let set = |name: &str, number_of: u32, kind: u32, length: usize| {
        let described = [
            its(),
            attribute(2, &text(name)),
            number(3, 0),
            number(4, kind),
            number(5, length as u32),
            // The number is only valid within the transaction.
            number(10, number_of),
        ];
        object_in(Family::Bridge, NEW_SET, CREATE, &described.concat())
    };
    let made = [its(), attribute(USER_DATA, &user_data(COMMENT))].concat();
    let hook = nested(4, &[number(1, HOOK), attribute(2, &PRIORITY.to_be_bytes())]);
    let chain = [its(), attribute(3, &text(CHAIN)), hook, attribute(7, &text("filter"))].concat();
    let rule = [its(), attribute(2, &text(CHAIN)), attribute(4 | NESTED, &rule())].concat();
    vec![
        object_in(Family::Bridge, NEW_TABLE, CREATE, &made),
        set(PORTS, 1, DEVICE, PORT_LENGTH),
        set(SENDERS, 2, DEVICE << 6 | ETHERNET, PORT_LENGTH + MAC_LENGTH),
        object_in(Family::Bridge, NEW_CHAIN, CREATE, &chain),
        object_in(Family::Bridge, NEW_RULE, CREATE | APPEND, &rule),
    ]
}

/// Drops frames that come in by a listed port from an address that may not be sent from that port.
fn rule() -> Vec<u8> {
    /// The register after the port name, in words.
    const BEHIND_PORT: u32 = PORT_LENGTH as u32 / 4;
    [load_meta(Meta::InName, 0), if_in(PORTS, 0), load_sender(BEHIND_PORT), if_not_in(SENDERS, 0), drop_it()]
        .concat()
}

fn delete(table: &str) -> Vec<u8> {
    object_in(Family::Bridge, DELETE_TABLE, 0, &attribute(1, &text(table)))
}

/// The messages that delete the table, whether or not it exists.
fn remove() -> Vec<Vec<u8>> {
    vec![object_in(Family::Bridge, NEW_TABLE, CREATE, &attribute(1, &text(TABLE))), delete(TABLE)]
}

/// The messages that add or delete elements.
fn about<'e>(kind: u16, flags: u16, elements: impl Iterator<Item = &'e Element>) -> Vec<Vec<u8>> {
    let (senders, ports): (Vec<&Element>, Vec<&Element>) =
        elements.partition(|element| element.sender.is_some());
    let of = |set: &str, elements: &[&Element]| {
        let list: Vec<Vec<u8>> = elements.iter().map(|element| written(element)).collect();
        let attributes = [attribute(1, &text(TABLE)), attribute(2, &text(set)), nested(3, &list)];
        object_in(Family::Bridge, kind, flags, &attributes.concat())
    };
    let chunks = |set, elements: &[&Element]| -> Vec<Vec<u8>> {
        elements.chunks(AT_ONCE).map(|some| of(set, some)).collect()
    };
    [chunks(SENDERS, &senders), chunks(PORTS, &ports)].concat()
}

/// An element as a list item.
fn written(element: &Element) -> Vec<u8> {
    let key = nested(1, &[attribute(1, &key(element))]);
    nested(1, &[key, attribute(USER_DATA, &user_data(&element.note))])
}

/// The key, with each part padded to whole words. A name is shorter than `PORT_LENGTH`.
fn key(element: &Element) -> Vec<u8> {
    let mut key = element.port.as_bytes().to_vec();
    key.resize(PORT_LENGTH, 0);
    if let Some(Mac(bytes)) = element.sender {
        key.extend(bytes);
        key.resize(PORT_LENGTH + MAC_LENGTH, 0);
    }
    key
}

fn read(attributes: &[u8]) -> Option<Element> {
    let key = attribute_in(attribute_in(attributes, 1)?, 1)?;
    let (port, sender) = key.split_at_checked(PORT_LENGTH)?;
    let sender = match sender {
        [] => None,
        [a, b, c, d, e, f, ..] => Some(Mac([*a, *b, *c, *d, *e, *f])),
        _ => return None,
    };
    Some(Element { port: name(port)?, sender, note: comment_in(attributes).unwrap_or_default() })
}

/// The chains and rules that the reference plugin has made for an interface; their names derive from the
/// interface.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct OfReference {
    /// Handles of the rules that jump to its chains.
    rules: Vec<u64>,
    /// Its chains.
    chains: Vec<String>,
}

/// The table of the reference plugin, and its base chain for incoming frames.
const OTHER_TABLE: &str = "nat";
const OTHER_CHAIN: &str = "PREROUTING";

/// Deletes the chains and rules that the reference plugin has made for a container's interface. Returns
/// `false` if the packet filter has changed since they were read; nothing was done then.
///
/// # Errors
/// The kernel does not answer, or refuses.
pub fn remove_of_reference(container: &str, ifname: &str) -> Result<bool, Error> {
    /// Attributes of a rule: the name of its chain, and its handle.
    const RULE_CHAIN: u16 = 2;
    const HANDLE: u16 = 3;
    /// `enum nf_tables_msg_types`.
    const DELETE_CHAIN: u16 = 5;
    const DELETE_RULE: u16 = 8;
    let generation = generation_if_any()?;
    let found = of_reference(container, ifname)?;
    if found == OfReference::default() {
        return Ok(true);
    }
    let table = || attribute(1, &text(OTHER_TABLE));
    let rules = found.rules.iter().map(|handle| {
        let chain = attribute(RULE_CHAIN, &text(OTHER_CHAIN));
        let which = [table(), chain, attribute(HANDLE, &handle.to_be_bytes())];
        object_in(Family::Bridge, DELETE_RULE, 0, &which.concat())
    });
    let chains = found.chains.iter().map(|chain| {
        object_in(Family::Bridge, DELETE_CHAIN, 0, &[table(), attribute(3, &text(chain))].concat())
    });
    let done = transact_at("NFT_MSG_DELCHAIN", generation, &rules.chain(chains).collect::<Vec<_>>())?;
    crate::crash_point!("nft", "of-reference");
    Ok(done)
}

fn of_reference(container: &str, ifname: &str) -> Result<OfReference, Error> {
    /// `NFTA_RULE_USERDATA`.
    const RULE_DATA: u16 = 7;
    let kinds = |asked, answered| [10 << 8 | asked, 10 << 8 | answered];
    let is = |attributes: &[u8], kind, wanted: &str| {
        attribute_in(attributes, kind).and_then(name).as_deref() == Some(wanted)
    };
    let own_chain = format!("cni-br-iface-{container}-{ifname}");
    // In this order: the first chain jumps to the second, and a chain that a rule jumps to cannot be deleted.
    let names = [own_chain.clone(), format!("{own_chain}-mac")];
    let mut there = [false; 2];
    let chains = dump("NFT_MSG_GETCHAIN", kinds(GET_CHAIN, NEW_CHAIN), Family::Bridge, &[], &mut |chain| {
        if is(chain, 1, OTHER_TABLE) {
            names.iter().zip(&mut there).for_each(|(name, there)| *there |= is(chain, 3, name));
        }
    })?;
    let comment = format!("macspoofchk-{container}-{ifname}");
    let mut found = OfReference::default();
    let only = [attribute(1, &text(OTHER_TABLE)), attribute(2, &text(OTHER_CHAIN))].concat();
    let rules = dump("NFT_MSG_GETRULE", kinds(GET_RULE, NEW_RULE), Family::Bridge, &only, &mut |rule| {
        let said = attribute_in(rule, RULE_DATA).and_then(comment_of_data);
        let is_its = is(rule, 1, OTHER_TABLE) && is(rule, 2, OTHER_CHAIN) && said.as_ref() == Some(&comment);
        let handle = attributes_of(rule).find(|(kind, _)| *kind == 3).and_then(|(_, it)| it.try_into().ok());
        found.rules.extend(handle.filter(|_| is_its).map(u64::from_be_bytes));
    })?;
    if !(chains && rules) {
        return Err(Error::Interrupted("NFT_MSG_GETRULE"));
    }
    found.chains = names.into_iter().zip(there).filter_map(|(name, there)| there.then_some(name)).collect();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn element(port: &str, sender: Option<Mac>) -> Element {
        Element { port: port.into(), sender, note: "netattach-cni lan c1 eth0".into() }
    }

    #[test]
    fn elements_are_read_as_they_are_written() {
        let mac = Mac([2, 0, 0, 0, 0, 7]);
        // A name may be as long as its field, except for the terminating zero.
        for wanted in [element("na0123456789abc", None), element("na0123456789abc", Some(mac))] {
            let item = written(&wanted);
            let (_, attributes) = attributes_of(&item).next().unwrap();
            assert_eq!(read(attributes), Some(wanted));
        }
        assert_eq!(key(&element("na0", Some(mac))).len(), PORT_LENGTH + MAC_LENGTH);
    }

    #[test]
    fn elements_of_the_two_sets_are_told_of_apart_and_no_more_at_once_than_fit() {
        let senders: Vec<Element> = (0..=u8::MAX)
            .flat_map(|last| [("na0", last), ("na1", last)])
            .map(|(port, last)| element(port, Some(Mac([2, 0, 0, 0, 0, last]))))
            .collect();
        let all: Vec<Element> =
            [element("na0", None), element("na1", None)].into_iter().chain(senders).collect();
        let told = about(NEW_ELEMENT, CREATE, all.iter()).concat();
        let counts: Vec<(String, usize)> = super::super::messages(&told)
            .map(|message| {
                let attributes = &message.body[4..];
                let set = attribute_in(attributes, 2).and_then(name).unwrap();
                (set, attributes_of(attribute_in(attributes, 3).unwrap()).count())
            })
            .collect();
        let row = |set: &str, count| (set.to_owned(), count);
        assert_eq!(counts, [row(SENDERS, 256), row(SENDERS, 256), row(PORTS, 2)]);
    }

    /// Needs root, like the agent.
    #[test]
    fn the_table_is_no_filter_to_ports_that_it_does_not_list_as_long_as_it_is_as_made() {
        use super::super::hooked_chains;
        use crate::netns::{Netns, within};

        within(&Netns::private().unwrap(), || {
            let count = || hooked_chains(Family::Bridge).unwrap().count;
            assert_eq!((is_as_made().unwrap(), count()), (false, 0), "there is none");
            assert!(change(&view().unwrap(), &[], &[element("na0", None)]).unwrap());
            assert_eq!((is_as_made().unwrap(), count()), (true, 0));
            transact(NAME, &create("another")).unwrap();
            assert_eq!((is_as_made().unwrap(), count()), (true, 1));
            let any =
                [attribute(1, &text(TABLE)), attribute(2, &text(CHAIN)), attribute(4 | NESTED, &drop_it())];
            transact(NAME, &[object_in(Family::Bridge, NEW_RULE, CREATE | APPEND, &any.concat())]).unwrap();
            assert_eq!((is_as_made().unwrap(), count()), (false, 2), "somebody has added a rule");
        })
        .unwrap();
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_parse_without_panic(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..512)) {
            read(&bytes);
        }
    }
}
