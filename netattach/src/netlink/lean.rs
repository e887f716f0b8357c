//! Leaves out of the kernel's messages about links what nobody here reads: it is most of them, and costs most of what parsing
//! them takes.

use std::borrow::Cow;
use std::ops::Range;

pub(super) const RTM_NEWLINK: u16 = 16;
/// `struct ifinfomsg`; its first byte is the family.
const LINK_HEADER: usize = 16;
const AF_UNSPEC: u8 = 0;
/// `IFLA_STATS`, `IFLA_MAP`, `IFLA_STATS64` and `IFLA_AF_SPEC` of `linux/if_link.h`: counters, the resources of old cards, and
/// the settings and counters of each family.
const LEFT_OUT: [u16; 4] = [7, 14, 23, 26];
/// `IFLA_VFINFO_LIST` of that, and `IFLA_VF_INFO` in it.
const FUNCTIONS: u16 = 22;
const FUNCTION: u16 = 1;
/// `IFLA_VF_SPOOFCHK` and `IFLA_VF_TRUST` of a function: its number and a value, each of 32 bits.
const SWITCHES: [u16; 2] = [4, 9];
const VALUE_AT: usize = 4;
/// The value of a switch of which the driver says nothing (`rtnl_fill_vfinfo`). The parser takes it for "off".
const UNTOLD: [u8; 4] = [0xff; 4];
/// `IFLA_VF_UNSPEC`, which nobody reads.
const UNSPECIFIED: u16 = 0;
/// `NLA_TYPE_MASK`.
const TYPE: u16 = 0x3fff;
const ATTRIBUTE_HEADER: usize = 4;

/// A message behind its header, as it is to be parsed. What a bridge says of its ports, a message of another family, has no
/// counters, and its `IFLA_AF_SPEC` is read.
pub(super) fn lean(kind: u16, payload: &[u8]) -> Cow<'_, [u8]> {
    let whole = Cow::Borrowed(payload);
    if kind != RTM_NEWLINK || payload.first() != Some(&AF_UNSPEC) {
        return whole;
    }
    let Some((header, mut attributes)) = payload.split_at_checked(LINK_HEADER) else { return whole };
    let mut kept = Vec::with_capacity(payload.len());
    kept.extend_from_slice(header);
    while let Some((&[a, b, c, d], _)) = attributes.split_first_chunk() {
        let length = usize::from(u16::from_ne_bytes([a, b]));
        if length < ATTRIBUTE_HEADER || length > attributes.len() {
            // The parser says what is wrong.
            return whole;
        }
        let (attribute, rest) = attributes.split_at(length.next_multiple_of(4).min(attributes.len()));
        match u16::from_ne_bytes([c, d]) & TYPE {
            left_out if LEFT_OUT.contains(&left_out) => {}
            FUNCTIONS => kept.extend(told(attribute)),
            _ => kept.extend_from_slice(attribute),
        }
        attributes = rest;
    }
    Cow::Owned(kept)
}

/// A list of functions without the switches of which their driver says nothing.
fn told(list: &[u8]) -> Vec<u8> {
    let mut told = list.to_vec();
    let functions = nested(list, ATTRIBUTE_HEADER..list.len()).filter(|(kind, _)| *kind == FUNCTION);
    let untold = functions.flat_map(|(_, function)| nested(list, function)).filter(|(kind, value)| {
        SWITCHES.contains(kind) && list.get(value.start + VALUE_AT..value.end) == Some(&UNTOLD[..])
    });
    for (_, value) in untold {
        // Where its type is. All lengths stay as they are.
        told[value.start - 2..value.start].copy_from_slice(&UNSPECIFIED.to_ne_bytes());
    }
    told
}

/// The attributes in a part of a message: the type of each, and where its value is.
fn nested(bytes: &[u8], mut part: Range<usize>) -> impl Iterator<Item = (u16, Range<usize>)> {
    std::iter::from_fn(move || {
        let left = bytes.get(part.clone())?;
        let &[a, b, c, d] = left.first_chunk()?;
        let length = usize::from(u16::from_ne_bytes([a, b]));
        if length < ATTRIBUTE_HEADER || length > left.len() {
            return None;
        }
        let value = part.start + ATTRIBUTE_HEADER..part.start + length;
        part.start += length.next_multiple_of(4).min(left.len());
        Some((u16::from_ne_bytes([c, d]) & TYPE, value))
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::netlink) fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let length = (ATTRIBUTE_HEADER + value.len()) as u16;
        let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
        bytes.extend_from_slice(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    pub(in crate::netlink) fn message(family: u8, attributes: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = vec![0; LINK_HEADER];
        bytes[0] = family;
        bytes.extend(attributes.concat());
        bytes
    }

    #[test]
    fn counters_and_settings_of_families_are_left_out() {
        let (name, mtu) = (attribute(3, b"eth0\0"), attribute(4, &1500_u32.to_ne_bytes()));
        let bulk = [attribute(23, &[7; 200]), attribute(7, &[7; 96]), attribute(14, &[0; 32])];
        // Nested, as the kernel marks it.
        let families = attribute(26 | 0x8000, &attribute(2, &[1; 40]));
        let all = [vec![name.clone()], bulk.to_vec(), vec![mtu.clone(), families]].concat();
        assert_eq!(lean(RTM_NEWLINK, &message(0, &all)), message(0, &[name, mtu]));
    }

    #[test]
    fn other_messages_are_as_they_were() {
        let ports = message(7, &[attribute(26, &[1; 8])]);
        assert_eq!(lean(RTM_NEWLINK, &ports), ports);
        let address = message(0, &[attribute(7, &[1; 8])]);
        assert_eq!(lean(20, &address), address);
        let mut torn = message(0, &[attribute(7, &[1; 8]), attribute(3, b"eth0")]);
        torn.truncate(torn.len() - 2);
        assert_eq!(lean(RTM_NEWLINK, &torn), torn);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_to_their_end(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..256)) {
            assert!(lean(RTM_NEWLINK, &bytes).len() <= bytes.len());
            let list = attribute(FUNCTIONS, &attribute(FUNCTION, &bytes));
            assert_eq!(told(&list).len(), list.len());
        }
    }
}
