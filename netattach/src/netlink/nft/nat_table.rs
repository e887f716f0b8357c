//! The sets, chains and rules of the table that translates addresses.
//!
//! The rules never change. The elements of the sets say what the rules do:
//!
//! | set | key | value |
//! |---|---|---|
//! | `ports4`, `ports6` | address of the node (0: any), protocol, port | address and port of a pod |
//! | `mapped4`, `mapped6` | address of a pod, protocol, its port, port of the node | a zero, and a list of prefixes: senders that the pod would answer past the node |
//! | `masquerade4`, `masquerade6` | address of a pod | a zero, and a list of prefixes: destinations that see the pod's own address |
//! | `prefixes4`, `prefixes6` | list and range of addresses | |
//! | `devices` | name of a device | |
//!
//! A list of prefixes is identified by a name of six bytes, since a rule cannot look up a set whose name
//! comes from a map. `devices` are those with `route_localnet`, on which the kernel no longer drops packets
//! with loopback addresses by itself.

use sha2::{Digest, Sha256};

use super::batch::{APPEND, CREATE, NEW_CHAIN, NEW_RULE, NEW_TABLE, attribute, nested, number, object, text};
use super::expression::{
    Address, Is, Meta, Version, compare, drop_it, if_in, if_local, if_not_in, if_translated, if_version,
    load_address, load_first_byte, load_meta, load_nothing, load_original_port, load_port, load_zeros,
    look_up, masquerade, translate_destination,
};
use super::{attribute_in, name};

/// Name of the agent's table, in the family `inet`, which covers both versions of IP.
pub const TABLE: &str = "netattach-nat";

/// Name of the table that plain executables share.
pub const SHARED_TABLE: &str = "netattach-cni";

/// Comment of the shared table, which describes the comments of its elements. A table with another comment is
/// of another version.
pub(super) const SHARED_COMMENT: &str = "netattach-cni 1: plugin, network, container, interface, device";

/// Prefix of the comment of an agent's table; the agent's state directory follows.
const COMMENT_START: &str = "netattach, state in ";
/// `NFTNL_UDATA_COMMENT_MAXLEN` of `nft`, including the terminating zero.
pub(super) const MOST_COMMENT: usize = 128;
/// `NFTA_TABLE_USERDATA` and `NFTA_SET_ELEM_USERDATA`, and the type of a comment in user data.
pub(super) const USER_DATA: u16 = 6;
const COMMENT: u8 = 0;

/// `enum nf_tables_msg_types`.
pub(super) const DELETE_TABLE: u16 = 2;
pub(super) const NEW_SET: u16 = 9;

/// A set of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Set {
    /// Ports of the node.
    Ports4,
    /// The same of IPv6.
    Ports6,
    /// Ports of pods to which a port of the node leads.
    Mapped4,
    /// The same of IPv6.
    Mapped6,
    /// Sources to masquerade.
    Masquerade4,
    /// The same of IPv6.
    Masquerade6,
    /// Lists of prefixes.
    Prefixes4,
    /// The same of IPv6.
    Prefixes6,
    /// Devices by which packets with loopback addresses may leave.
    Devices,
}

/// Data types of `nft`. The kernel uses only their length; they matter to programs that list the table.
#[derive(Debug, Clone, Copy)]
enum Type {
    Ipv4 = 7,
    Ipv6 = 8,
    /// An Ethernet address: the only type of six bytes.
    List = 9,
    Protocol = 12,
    Port = 13,
    Device = 41,
    /// A packet mark: `nft` prints it as a number.
    Zero = 19,
}

impl Type {
    fn length(self) -> u32 {
        match self {
            Self::Ipv4 | Self::Zero => 4,
            Self::Ipv6 | Self::Device => 16,
            Self::List => 6,
            Self::Protocol => 1,
            Self::Port => 2,
        }
    }
}

impl Set {
    /// All sets.
    pub const ALL: [Self; 9] = [
        Self::Ports4,
        Self::Ports6,
        Self::Mapped4,
        Self::Mapped6,
        Self::Masquerade4,
        Self::Masquerade6,
        Self::Prefixes4,
        Self::Prefixes6,
        Self::Devices,
    ];

    /// Name of the set in the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ports4 => "ports4",
            Self::Ports6 => "ports6",
            Self::Mapped4 => "mapped4",
            Self::Mapped6 => "mapped6",
            Self::Masquerade4 => "masquerade4",
            Self::Masquerade6 => "masquerade6",
            Self::Prefixes4 => "prefixes4",
            Self::Prefixes6 => "prefixes6",
            Self::Devices => "devices",
        }
    }

    fn key(self) -> &'static [Type] {
        use Type::{Device, Ipv4, Ipv6, List, Port, Protocol};
        match self {
            Self::Ports4 => &[Ipv4, Protocol, Port],
            Self::Ports6 => &[Ipv6, Protocol, Port],
            Self::Mapped4 => &[Ipv4, Protocol, Port, Port],
            Self::Mapped6 => &[Ipv6, Protocol, Port, Port],
            Self::Masquerade4 => &[Ipv4],
            Self::Masquerade6 => &[Ipv6],
            Self::Prefixes4 => &[List, Ipv4],
            Self::Prefixes6 => &[List, Ipv6],
            Self::Devices => &[Device],
        }
    }

    fn value(self) -> &'static [Type] {
        match self {
            Self::Ports4 => &[Type::Ipv4, Type::Port],
            Self::Ports6 => &[Type::Ipv6, Type::Port],
            Self::Mapped4 | Self::Mapped6 | Self::Masquerade4 | Self::Masquerade6 => {
                &[Type::Zero, Type::List]
            }
            Self::Prefixes4 | Self::Prefixes6 | Self::Devices => &[],
        }
    }

    /// Whether the set's values end with the name of a list of prefixes.
    pub(super) fn has_list(self) -> bool {
        self.value().last().is_some_and(|last| matches!(last, Type::List))
    }

    fn has_ranges(self) -> bool {
        matches!(self, Self::Prefixes4 | Self::Prefixes6)
    }

    fn message(self, table: &str) -> Vec<u8> {
        const INTERVAL: u32 = 0x4;
        const MAP: u32 = 0x8;
        const CONCATENATION: u32 = 0x80;
        let (key, value) = (self.key(), self.value());
        let mut flags = if value.is_empty() { 0 } else { MAP };
        if self.has_ranges() {
            flags |= INTERVAL | CONCATENATION;
        }
        let mut attributes = vec![
            attribute(1, &text(table)),
            attribute(2, &text(self.name())),
            number(3, flags),
            number(4, type_of(key)),
            number(5, length_of(key)),
        ];
        if !value.is_empty() {
            attributes.extend([number(6, type_of(value)), number(7, length_of(value))]);
        }
        if self.has_ranges() {
            let fields: Vec<_> = key.iter().map(|field| nested(1, &[number(1, field.length())])).collect();
            attributes.push(nested(9, &[nested(2, &fields)]));
        }
        // The number is only valid within the transaction.
        attributes.push(number(10, self as u32 + 1));
        object(NEW_SET, CREATE, &attributes.concat())
    }
}

/// The type of a concatenation in the encoding of `nft`: six bits for each component.
fn type_of(types: &[Type]) -> u32 {
    types.iter().fold(0, |number, one| number << 6 | *one as u32)
}

/// Length of a concatenation, whose components each begin in a register of their own.
fn length_of(types: &[Type]) -> u32 {
    match types {
        [one] => one.length(),
        several => several.iter().map(|one| one.length().next_multiple_of(4)).sum(),
    }
}

/// A chain of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Chain {
    name: &'static str,
    kind: &'static str,
    /// `NF_INET_*`.
    hook: u32,
    priority: i32,
}

/// Other programs translate at -100 and 100, so a connection that they have already translated, such as to a
/// Service, is not looked up here. Packets with loopback addresses are dropped before any program translates.
const CHAINS: [Chain; 4] = [
    Chain { name: "loopback", kind: "filter", hook: 0, priority: -310 },
    Chain { name: "prerouting", kind: "nat", hook: 0, priority: -90 },
    Chain { name: "output", kind: "nat", hook: 3, priority: -90 },
    Chain { name: "postrouting", kind: "nat", hook: 4, priority: 110 },
];

/// First byte of the loopback addresses.
const LOOPBACK: u8 = 127;

/// The rules: name of the chain, and expressions.
fn rules() -> Vec<(&'static str, Vec<u8>)> {
    let mut rules = Vec::new();
    // Drops packets that `route_localnet` would otherwise let in.
    for address in [Address::Destination, Address::Source] {
        let rule = [
            if_version(Version::V4),
            load_first_byte(address, 0),
            compare(Is::Equal, 0, &[LOOPBACK]),
            load_meta(Meta::InName, 0),
            if_in(Set::Devices.name(), 0),
            drop_it(),
        ];
        rules.push(("loopback", rule.concat()));
    }
    for chain in ["prerouting", "output"] {
        for version in [Version::V4, Version::V6] {
            for any in [false, true] {
                rules.push((chain, port_rule(version, any)));
            }
        }
    }
    let from_loopback = [
        if_version(Version::V4),
        load_first_byte(Address::Source, 0),
        compare(Is::Equal, 0, &[LOOPBACK]),
        if_translated(),
        load_meta(Meta::OutName, 0),
        if_in(Set::Devices.name(), 0),
        masquerade(),
    ];
    rules.push(("postrouting", from_loopback.concat()));
    for version in [Version::V4, Version::V6] {
        rules.push(("postrouting", hairpin_rule(version)));
        rules.push(("postrouting", masquerade_rule(version)));
    }
    rules
}

/// Translates a port of the node to a pod: for packets to this port at the given address of the node, or at
/// `any` address.
fn port_rule(version: Version, any: bool) -> Vec<u8> {
    let set = match version {
        Version::V4 => Set::Ports4,
        Version::V6 => Set::Ports6,
    };
    let words = version.words();
    let mut rule = if_version(version);
    if version == Version::V6 {
        // The kernel does not route packets from ::1 to another device.
        let mut loopback = [0; 16];
        loopback[15] = 1;
        rule.extend(load_address(version, Address::Destination, 0));
        rule.extend(compare(Is::Not, 0, &loopback));
    }
    rule.extend(if_local());
    rule.extend(if any { load_zeros(version, 0) } else { load_address(version, Address::Destination, 0) });
    rule.extend(load_meta(Meta::Transport, words));
    rule.extend(load_port(words + 1));
    rule.extend(look_up(set.name(), 0, 0));
    rule.extend(translate_destination(version, 0, words));
    rule
}

/// Masquerades senders that reach a pod by a port of the node and that the pod would otherwise answer past
/// the node.
fn hairpin_rule(version: Version) -> Vec<u8> {
    let (mapped, prefixes) = match version {
        Version::V4 => (Set::Mapped4, Set::Prefixes4),
        Version::V6 => (Set::Mapped6, Set::Prefixes6),
    };
    let words = version.words();
    [
        if_version(version),
        if_translated(),
        load_nothing(LIST),
        load_address(version, Address::Destination, 0),
        load_meta(Meta::Transport, words),
        load_port(words + 1),
        load_original_port(words + 2),
        look_up(mapped.name(), 0, 0),
        load_address(version, Address::Source, BEHIND_LIST),
        if_in(prefixes.name(), LIST),
        masquerade(),
    ]
    .concat()
}

/// Masquerades pods, except to the destinations of their list.
fn masquerade_rule(version: Version) -> Vec<u8> {
    let (sources, prefixes) = match version {
        Version::V4 => (Set::Masquerade4, Set::Prefixes4),
        Version::V6 => (Set::Masquerade6, Set::Prefixes6),
    };
    [
        if_version(version),
        load_nothing(LIST),
        load_address(version, Address::Source, 0),
        look_up(sources.name(), 0, 0),
        load_address(version, Address::Destination, BEHIND_LIST),
        if_not_in(prefixes.name(), LIST),
        masquerade(),
    ]
    .concat()
}

/// The register in which a map lookup puts the name of a list, which follows a zero word. `nft` fails an assertion
/// if the value of a map lookup is part of a key (seen with 1.0.6; from then on each listing of the node's rules
/// fails). `nft` identifies a value by the register where it begins. The result of the lookup begins in the register
/// before, so `nft` takes what was loaded into this register earlier for the part of the key.
const LIST: u32 = 1;
/// The register after the name.
const BEHIND_LIST: u32 = LIST + 2;

/// Comment of an agent's table, which names the owner. `nft` shows it.
pub(in crate::netlink) fn comment_of(owner: &str) -> String {
    let said = format!("{COMMENT_START}{owner}");
    if said.len() < MOST_COMMENT {
        return said;
    }
    let digest = Sha256::digest(owner);
    let digits: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{COMMENT_START}sha256:{digits}")
}

/// Whether a table with that comment belongs to an agent, whichever one.
pub(in crate::netlink) fn is_of_agent(comment: &str) -> bool {
    comment.starts_with(COMMENT_START)
}

/// The attributes of a table with that name and comment.
pub(in crate::netlink) fn named(table: &str, comment: &str) -> Vec<u8> {
    [attribute(1, &text(table)), attribute(USER_DATA, &user_data(comment))].concat()
}

/// Reads the comment of a table or of an element from its attributes: both use the same attribute number for
/// user data.
pub(super) fn comment_in(attributes: &[u8]) -> Option<String> {
    comment_of_data(attribute_in(attributes, USER_DATA)?)
}

/// Reads the comment from user data. Rules have another attribute number and the same format.
pub(super) fn comment_of_data(mut data: &[u8]) -> Option<String> {
    // Type, length, value.
    while let [kind, length, rest @ ..] = data {
        let value = rest.get(..usize::from(*length))?;
        if *kind == COMMENT {
            return name(value);
        }
        data = &rest[value.len()..];
    }
    None
}

/// User data with a comment of at most 254 bytes. `nft` itself writes comments shorter than [`MOST_COMMENT`].
pub(super) fn user_data(comment: &str) -> Vec<u8> {
    let comment = text(comment);
    [&[COMMENT, comment.len() as u8][..], &comment].concat()
}

/// Number of chains and rules of the table.
pub(super) fn parts() -> usize {
    CHAINS.len() + rules().len()
}

/// The messages that create a table of that name and comment with its sets, chains and rules, without
/// elements.
pub(super) fn create(table: &str, comment: &str) -> Vec<Vec<u8>> {
    let mut messages = vec![object(NEW_TABLE, CREATE, &named(table, comment))];
    messages.extend(Set::ALL.map(|set| set.message(table)));
    messages.extend(CHAINS.iter().map(|chain| {
        let hook = [number(1, chain.hook), attribute(2, &chain.priority.to_be_bytes())];
        let attributes = [
            attribute(1, &text(table)),
            attribute(3, &text(chain.name)),
            nested(4, &hook),
            attribute(7, &text(chain.kind)),
        ];
        object(NEW_CHAIN, CREATE, &attributes.concat())
    }));
    messages.extend(rules().into_iter().map(|(chain, expressions)| {
        let attributes = [
            attribute(1, &text(table)),
            attribute(2, &text(chain)),
            attribute(4 | super::NESTED, &expressions),
        ];
        object(NEW_RULE, CREATE | APPEND, &attributes.concat())
    }));
    messages
}

/// The messages that delete a table, whether or not it exists.
pub(super) fn remove(table: &str) -> Vec<Vec<u8>> {
    let table = attribute(1, &text(table));
    vec![object(NEW_TABLE, CREATE, &table), object(DELETE_TABLE, 0, &table)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_says_whose_it_is() {
        let long = format!("/{}", "d".repeat(200));
        for owner in ["/var/lib/netattach", &long] {
            let table = create(TABLE, &comment_of(owner)).swap_remove(0);
            // The attributes begin after `struct nlmsghdr` and `struct nfgenmsg`.
            assert_eq!(comment_in(&table[20..]), Some(comment_of(owner)));
            assert!(comment_of(owner).len() < MOST_COMMENT);
        }
        assert_eq!(comment_of("/var/lib/netattach"), "netattach, state in /var/lib/netattach");
        assert_ne!(comment_of(&long), comment_of(&format!("{long}d")));
        assert_eq!(comment_in(&attribute(1, &text(TABLE))), None);
    }

    proptest::proptest! {
        #[test]
        fn any_user_data_parses_without_panic(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..300)) {
            comment_in(&attribute(USER_DATA, &bytes));
            comment_in(&bytes);
        }
    }
}
