//! Descriptions of links in which the length of an attribute may have wrapped. The length of an attribute has
//! 16 bits, but a macvlan in mode `source` has as many addresses, and a VLAN as many priorities, as a process
//! in its namespace sets. From 64 KiB on, the length field of `IFLA_LINKINFO`, which contains these lists, is
//! too small by a multiple of 64 KiB, and the bytes at the position where the attribute then seems to end are
//! controlled by that process.
//!
//! The kernel describes a link in this order (`rtnl_fill_ifinfo`):
//!
//! - `IFLA_IFNAME`, `IFLA_MTU`, `IFLA_GROUP`, `IFLA_MASTER`, `IFLA_IFALIAS`, `IFLA_ADDRESS`, `IFLA_XDP` and
//!   more. Old kernels put the lower device (`IFLA_LINK`) here;
//! - `IFLA_LINKINFO`: `IFLA_INFO_KIND`, then `IFLA_INFO_DATA` with those lists;
//! - after it `IFLA_LINK_NETNSID`; `IFLA_LINK`, since "rtnetlink: always put IFLA_LINK for links with a
//!   link-netnsid"; `IFLA_PERM_ADDRESS`, `IFLA_AF_SPEC`, the alternative names (`IFLA_PROP_LIST`),
//!   `IFLA_PARENT_DEV_NAME`.
//!
//! Data that a pod writes does not decide how the description of its link is read: the length of the message
//! and the kind are set by the kernel. If a link has a kind with such a list, and its description from
//! `IFLA_LINKINFO` on is 64 KiB or longer, everything after the kind counts as unknown, even if the length
//! comes from alternative names.

use super::lean::{ATTRIBUTE_HEADER, TYPE};
use super::nft::attributes_of;

/// `IFLA_LINKINFO` of `linux/if_link.h`, and `IFLA_INFO_KIND` in it.
pub(super) const INFO: u16 = 18;
pub(super) const KIND: u16 = 1;
/// The length field of an attribute of this many bytes or more has wrapped.
const WRAPS: usize = 1 << 16;
/// The kinds that have a list of unbounded length.
const LISTED: [&[u8]; 3] = [b"macvlan", b"macvtap", b"vlan"];

/// A description in which the end of the kind's data, and so everything after it, cannot be determined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Blurred<'m> {
    /// The attributes before `IFLA_LINKINFO`.
    pub(super) before: &'m [u8],
    /// Name of the kind, with the terminating zero of the kernel.
    pub(super) kind: &'m [u8],
}

/// Checks the attributes that describe a link; `None`: all of them can be read.
pub(super) fn blurred(attributes: &[u8]) -> Option<Blurred<'_>> {
    let mut at = 0;
    // An attribute that begins closer to the end cannot have wrapped.
    while attributes.len().saturating_sub(at) >= WRAPS {
        let (&[a, b, c, d], value) = attributes.get(at..)?.split_first_chunk()?;
        if u16::from_ne_bytes([c, d]) & TYPE == INFO {
            let (_, kind) = attributes_of(value).next().filter(|(first, _)| *first == KIND)?;
            let name = kind.strip_suffix(&[0]).unwrap_or(kind);
            return LISTED.contains(&name).then_some(Blurred { before: &attributes[..at], kind });
        }
        let length = usize::from(u16::from_ne_bytes([a, b]));
        if length < ATTRIBUTE_HEADER {
            return None;
        }
        at += length.next_multiple_of(4);
    }
    None
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::lean::tests::attribute;
    use super::super::text::{NAME, OTHER_NAME, PROPERTIES};
    use super::*;

    /// Where a kernel puts `IFLA_LINK`: before or after `IFLA_LINKINFO`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(in crate::netlink) enum LinkAt {
        Before,
        Behind,
    }

    /// Each order, without and with a further attribute after the list of addresses
    /// (`IFLA_MACVLAN_BC_CUTOFF`, Linux 6.4).
    pub(in crate::netlink) const ORDERS: [(LinkAt, bool); 4] =
        [(LinkAt::Before, false), (LinkAt::Before, true), (LinkAt::Behind, false), (LinkAt::Behind, true)];

    /// The kernel's description of the macvlan `lan` with `number` source addresses, whose lower device has
    /// index 4 in namespace 3.
    pub(in crate::netlink) fn with_sources(number: usize, (link_at, cutoff): (LinkAt, bool)) -> Vec<u8> {
        let long = |kind: u16, value: &[u8]| {
            let mut bytes = vec![0; ATTRIBUTE_HEADER];
            bytes[..2].copy_from_slice(&((ATTRIBUTE_HEADER + value.len()) as u16).to_ne_bytes());
            bytes[2..].copy_from_slice(&kind.to_ne_bytes());
            bytes.extend_from_slice(value);
            bytes
        };
        let sources: Vec<u8> = (0..number).flat_map(|_| attribute(4, &[2, 0, 0, 0, 0, 7])).collect();
        let mut data = [attribute(1, &16_u32.to_ne_bytes()), attribute(2, &[0; 2])].concat();
        data.extend(attribute(6, &(number as u32).to_ne_bytes()));
        data.extend(long(5, &sources));
        data.extend(attribute(7, &1000_u32.to_ne_bytes()));
        if cutoff {
            data.extend(attribute(9, &5_u32.to_ne_bytes()));
        }
        let info = long(INFO, &[attribute(KIND, b"macvlan\0"), long(2, &data)].concat());
        let (name, netns) = (attribute(NAME, b"lan\0"), attribute(37, &[3, 0, 0, 0]));
        let link = attribute(5, &4_u32.to_ne_bytes());
        match link_at {
            LinkAt::Before => [name, link, info, netns].concat(),
            LinkAt::Behind => [name, info, netns, link].concat(),
        }
    }

    /// The attributes before `IFLA_LINKINFO` in that description.
    pub(in crate::netlink) fn before(link_at: LinkAt) -> Vec<u8> {
        let mut before = attribute(NAME, b"lan\0");
        if link_at == LinkAt::Before {
            before.extend(attribute(5, &4_u32.to_ne_bytes()));
        }
        before
    }

    #[test]
    fn of_a_description_whose_lengths_may_have_wrapped_what_is_before_them_and_the_kind_are_told() {
        for order in ORDERS {
            let before = before(order.0);
            let told = Blurred { before: &before, kind: b"macvlan\0" };
            assert_eq!(blurred(&with_sources(5_000, order)), None);
            for number in [5_460, 5_470, 6_000, 11_000, 90_000] {
                assert_eq!(blurred(&with_sources(number, order)), Some(told), "{number} {order:?}");
            }
        }
    }

    /// A pod chooses addresses that look like attribute headers.
    #[test]
    fn what_stands_where_a_wrapped_length_ends_makes_no_difference() {
        for order in ORDERS {
            let (mut described, before) = (with_sources(6_000, order), before(order.0));
            let says = u16::from_ne_bytes([described[before.len()], described[before.len() + 1]]);
            let end = before.len() + usize::from(says).next_multiple_of(4);
            let rest = described.len() - end;
            // From the seeming end on, two attributes that fill the rest.
            for (at, length, kind) in [(end, 884, 0_u16), (end + 884, rest - 884, 13_327)] {
                described[at..at + 2].copy_from_slice(&u16::try_from(length).unwrap().to_ne_bytes());
                described[at + 2..at + 4].copy_from_slice(&kind.to_ne_bytes());
            }
            let behind = attributes_of(&described[end..]).map(|(kind, _)| kind);
            assert_eq!(behind.collect::<Vec<_>>(), [0, 13_327]);
            assert_eq!(
                blurred(&described),
                Some(Blurred { before: &before, kind: b"macvlan\0" }),
                "{order:?}"
            );
        }
    }

    #[test]
    fn of_a_kind_without_such_a_list_all_is_told() {
        let names: Vec<u8> = (0..496).flat_map(|_| attribute(OTHER_NAME, &[b'a'; 128])).collect();
        let described = |kind: &[u8]| {
            let info = attribute(INFO | 0x8000, &attribute(KIND, kind));
            let properties = attribute(PROPERTIES | 0x8000, &names);
            [attribute(NAME, b"lan\0"), info, attribute(54, &[0; 100]), properties].concat()
        };
        assert_eq!(blurred(&described(b"veth\0")), None);
        for kind in [&b"macvlan\0"[..], b"macvtap\0", b"vlan\0"] {
            let before = attribute(NAME, b"lan\0");
            assert_eq!(blurred(&described(kind)), Some(Blurred { before: &before, kind }));
        }
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..256)) {
            let long = [&bytes[..], &attribute(INFO, &bytes), &vec![0; WRAPS], &bytes].concat();
            for part in [&bytes, &long] {
                let _ = blurred(part);
            }
        }
    }
}
