//! Descriptions of links of which a length may have wrapped. The length of an attribute is a number of 16 bits, and a macvlan in
//! mode `source` has as many addresses, a VLAN as many priorities, as somebody in its namespace gives it: from 64 KiB on
//! `IFLA_LINKINFO`, which holds them, says of itself that it is as many bytes shorter, and where it says that it ends is what
//! that somebody has written.
//!
//! The kernel describes a link in this order (`rtnl_fill_ifinfo`):
//!
//! - `IFLA_IFNAME`, `IFLA_MTU`, `IFLA_GROUP`, `IFLA_MASTER`, `IFLA_IFALIAS`, `IFLA_ADDRESS`, `IFLA_XDP` and more. Old kernels
//!   tell here what it is on (`IFLA_LINK`);
//! - `IFLA_LINKINFO`: `IFLA_INFO_KIND`, then `IFLA_INFO_DATA` with those lists;
//! - behind it `IFLA_LINK_NETNSID`; `IFLA_LINK`, since "rtnetlink: always put IFLA_LINK for links with a link-netnsid";
//!   `IFLA_PERM_ADDRESS`, `IFLA_AF_SPEC`, the other names (`IFLA_PROP_LIST`), `IFLA_PARENT_DEV_NAME`.
//!
//! Nothing that a pod writes decides how its link's description is read: how long it is, and the kind, are the kernel's words.
//! Of a link of a kind with such a list whose description is that long from `IFLA_LINKINFO` on, what is behind counts as not
//! told, although it may be as long because of other names.

use super::lean::{ATTRIBUTE_HEADER, TYPE};
use super::nft::attributes_of;

/// `IFLA_LINKINFO` of `linux/if_link.h`, and `IFLA_INFO_KIND` in it.
pub(super) const INFO: u16 = 18;
pub(super) const KIND: u16 = 1;
/// An attribute of as many bytes and more says of itself that it has as many fewer.
const WRAPS: usize = 1 << 16;
/// The kinds with a list that has no end.
const LISTED: [&[u8]; 3] = [b"macvlan", b"macvtap", b"vlan"];

/// A description of which nobody can tell where what its link is by its kind ends, and what is behind that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Blurred<'m> {
    /// The attributes before that.
    pub(super) before: &'m [u8],
    /// The kind's name, as the kernel ends it.
    pub(super) kind: &'m [u8],
}

/// Of the attributes that describe a link; `None`: all of them can be told.
pub(super) fn blurred(attributes: &[u8]) -> Option<Blurred<'_>> {
    let mut at = 0;
    // What begins nearer to the end has not wrapped.
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

    /// Where a kernel tells what a link is on.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(in crate::netlink) enum LinkAt {
        Before,
        Behind,
    }

    /// Each order, without and with a further attribute behind the list of addresses (`IFLA_MACVLAN_BC_CUTOFF`, Linux 6.4).
    pub(in crate::netlink) const ORDERS: [(LinkAt, bool); 4] =
        [(LinkAt::Before, false), (LinkAt::Before, true), (LinkAt::Behind, false), (LinkAt::Behind, true)];

    /// As the kernel describes the macvlan `lan` with so many source addresses, on the link with index 4 of the namespace 3.
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

    /// What is before `IFLA_LINKINFO` there.
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

    /// A pod chooses addresses that are headers of attributes.
    #[test]
    fn what_stands_where_a_wrapped_length_ends_makes_no_difference() {
        for order in ORDERS {
            let (mut described, before) = (with_sources(6_000, order), before(order.0));
            let says = u16::from_ne_bytes([described[before.len()], described[before.len() + 1]]);
            let end = before.len() + usize::from(says).next_multiple_of(4);
            let rest = described.len() - end;
            // From there on two attributes to the end.
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
