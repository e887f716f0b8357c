//! The expressions of rules (`linux/netfilter/nf_tables.h`), each encoded as one attribute of a rule.
//!
//! Registers are numbered in words of four bytes, from 0. A value of several words takes as many registers; a
//! value that does not fill its last word is padded with zeros.

use super::batch::{attribute, nested, number, text};

/// `NFT_REG32_00`.
const FIRST_REGISTER: u32 = 8;
/// The register of verdicts.
const VERDICT: u32 = 0;
/// `NFTA_LIST_ELEM`.
const LIST_ELEMENT: u16 = 1;

/// `NFPROTO_*` of the versions of IP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Version {
    /// IPv4.
    V4 = 2,
    /// IPv6.
    V6 = 10,
}

/// An address in the header of a packet.
#[derive(Debug, Clone, Copy)]
pub(super) enum Address {
    Source,
    Destination,
}

impl Version {
    /// Length of an address, in bytes.
    pub(super) fn address_length(self) -> u32 {
        match self {
            Self::V4 => 4,
            Self::V6 => 16,
        }
    }

    /// Number of registers that an address takes.
    pub(super) fn words(self) -> u32 {
        self.address_length() / 4
    }

    pub(super) fn offset(self, address: Address) -> u32 {
        match (self, address) {
            (Self::V4, Address::Source) => 12,
            (Self::V4, Address::Destination) => 16,
            (Self::V6, Address::Source) => 8,
            (Self::V6, Address::Destination) => 24,
        }
    }
}

fn register(kind: u16, register: u32) -> Vec<u8> {
    number(kind, FIRST_REGISTER + register)
}

fn expression(name: &str, attributes: &[Vec<u8>]) -> Vec<u8> {
    nested(LIST_ELEMENT, &[attribute(1, &text(name)), nested(2, attributes)])
}

fn value(kind: u16, bytes: &[u8]) -> Vec<u8> {
    nested(kind, &[attribute(1, bytes)])
}

/// Loads an address.
pub(super) fn load_address(version: Version, address: Address, to: u32) -> Vec<u8> {
    const NETWORK: u32 = 1;
    load(NETWORK, version.offset(address), version.address_length(), to)
}

/// Loads the source Ethernet address of a frame.
pub(super) fn load_sender(to: u32) -> Vec<u8> {
    const LINK: u32 = 0;
    load(LINK, 6, 6, to)
}

/// Loads the first byte of an IPv4 address.
pub(super) fn load_first_byte(address: Address, to: u32) -> Vec<u8> {
    const NETWORK: u32 = 1;
    load(NETWORK, Version::V4.offset(address), 1, to)
}

/// Loads the destination port of TCP, UDP or SCTP.
pub(super) fn load_port(to: u32) -> Vec<u8> {
    const TRANSPORT: u32 = 2;
    load(TRANSPORT, 2, 2, to)
}

fn load(base: u32, offset: u32, length: u32, to: u32) -> Vec<u8> {
    expression("payload", &[register(1, to), number(2, base), number(3, offset), number(4, length)])
}

/// Loads zeros instead of an address.
pub(super) fn load_zeros(version: Version, to: u32) -> Vec<u8> {
    let zeros = vec![0; version.address_length() as usize];
    expression("immediate", &[register(1, to), value(2, &zeros)])
}

/// Loads zeros, which are the name of no list of prefixes.
pub(super) fn load_nothing(to: u32) -> Vec<u8> {
    expression("immediate", &[register(1, to), value(2, &[0; 6])])
}

/// Loads metadata of the packet (`NFT_META_*`).
pub(super) fn load_meta(what: Meta, to: u32) -> Vec<u8> {
    expression("meta", &[register(1, to), number(2, what as u32)])
}

/// `NFT_META_*`.
#[derive(Debug, Clone, Copy)]
pub(super) enum Meta {
    /// Name of the device by which the packet came in.
    InName = 6,
    /// Name of the device by which the packet leaves.
    OutName = 7,
    /// `NFPROTO_*`.
    Family = 15,
    /// Number of the transport protocol.
    Transport = 16,
}

/// Loads the destination port of the connection's original direction.
pub(super) fn load_original_port(to: u32) -> Vec<u8> {
    const PROTO_DST: u32 = 12;
    const ORIGINAL: u8 = 0;
    expression("ct", &[register(1, to), number(2, PROTO_DST), attribute(3, &[ORIGINAL])])
}

/// Continues if the destination of the connection was translated.
pub(super) fn if_translated() -> Vec<u8> {
    const STATUS: u32 = 2;
    /// `IPS_DST_NAT`, in the byte order of the machine.
    const DST_NAT: u32 = 1 << 5;
    let masked =
        [register(1, 0), register(2, 0), number(3, 4), value(4, &DST_NAT.to_ne_bytes()), value(5, &[0; 4])];
    [
        expression("ct", &[register(1, 0), number(2, STATUS)]),
        expression("bitwise", &masked),
        compare(Is::Not, 0, &[0; 4]),
    ]
    .concat()
}

/// Comparison operator.
#[derive(Debug, Clone, Copy)]
pub(super) enum Is {
    /// `NFT_CMP_EQ`.
    Equal = 0,
    /// `NFT_CMP_NEQ`.
    Not = 1,
}

/// Continues if the register has this value, or if it has another, according to `is`.
pub(super) fn compare(is: Is, from: u32, with: &[u8]) -> Vec<u8> {
    expression("cmp", &[register(1, from), number(2, is as u32), value(3, with)])
}

/// Continues if the packet is of that IP version.
pub(super) fn if_version(version: Version) -> Vec<u8> {
    [load_meta(Meta::Family, 0), compare(Is::Equal, 0, &[version as u8])].concat()
}

/// Continues if the destination is an address of the node.
pub(super) fn if_local() -> Vec<u8> {
    const ADDRESS_TYPE: u32 = 3;
    const OF_DESTINATION: u32 = 1 << 1;
    /// `RTN_LOCAL`, in the byte order of the machine.
    const LOCAL: u32 = 2;
    [
        expression("fib", &[register(1, 0), number(2, ADDRESS_TYPE), number(3, OF_DESTINATION)]),
        compare(Is::Equal, 0, &LOCAL.to_ne_bytes()),
    ]
    .concat()
}

/// Continues if the set has the value in these registers.
pub(super) fn if_in(set: &str, from: u32) -> Vec<u8> {
    expression("lookup", &[attribute(1, &text(set)), register(2, from)])
}

/// Continues if the set does not have the value in these registers.
pub(super) fn if_not_in(set: &str, from: u32) -> Vec<u8> {
    const INVERTED: u32 = 1;
    expression("lookup", &[attribute(1, &text(set)), register(2, from), number(5, INVERTED)])
}

/// Looks the value up in a map and loads the result; continues if the map has the key.
pub(super) fn look_up(map: &str, from: u32, to: u32) -> Vec<u8> {
    expression("lookup", &[attribute(1, &text(map)), register(2, from), register(3, to)])
}

/// Replaces the destination by the address and the port in these registers.
pub(super) fn translate_destination(version: Version, address: u32, port: u32) -> Vec<u8> {
    const DNAT: u32 = 1;
    expression("nat", &[number(1, DNAT), number(2, version as u32), register(3, address), register(5, port)])
}

/// Replaces the source by the address of the device that the packet leaves by.
pub(super) fn masquerade() -> Vec<u8> {
    plain("masq")
}

/// An expression without attributes.
fn plain(name: &str) -> Vec<u8> {
    nested(LIST_ELEMENT, &[attribute(1, &text(name))])
}

/// Drops the packet.
pub(super) fn drop_it() -> Vec<u8> {
    const DROP: u32 = 0;
    give_verdict(DROP, None)
}

/// Ends the rule with that verdict (`NF_*`, `NFT_*`), which may name a chain.
pub(super) fn give_verdict(code: u32, chain: Option<&str>) -> Vec<u8> {
    let mut verdict = vec![number(1, code)];
    verdict.extend(chain.map(|chain| attribute(2, &text(chain))));
    expression("immediate", &[number(1, VERDICT), nested(2, &[nested(2, &verdict)])])
}

/// Counts packets and bytes.
pub(super) fn count() -> Vec<u8> {
    plain("counter")
}

/// Continues if the iptables extension of that name and revision matches. `told` is the extension's own
/// parameter structure (`linux/netfilter/nf_tables_compat.h`).
pub(super) fn if_match(name: &str, revision: u32, told: &[u8]) -> Vec<u8> {
    expression("match", &[attribute(1, &text(name)), number(2, revision), attribute(3, told)])
}
