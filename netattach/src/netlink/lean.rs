//! Removes attributes that netattach does not read from the kernel's messages about links and filters: they
//! are most of each message and most of the cost of parsing. Also converts names and aliases that are not
//! valid text to text ([`text`]), because the parser would reject the whole message.

use std::borrow::Cow;
use std::ops::Range;

use super::blurred::{Blurred, INFO, KIND, blurred};
use super::nft::{attribute_in, attributes_of};
use super::text::{self, ALIAS, NAME, OTHER_NAME, PROPERTIES};

pub(super) const RTM_NEWLINK: u16 = 16;
pub(super) const RTM_NEWTFILTER: u16 = 44;
/// `struct ifinfomsg`; its first byte is the family.
const LINK_HEADER: usize = 16;
const AF_UNSPEC: u8 = 0;
/// `IFLA_STATS`, `IFLA_MAP`, `IFLA_STATS64` and `IFLA_AF_SPEC` of `linux/if_link.h`: counters, the resources
/// of old cards, and the settings and counters of each address family.
const LEFT_OUT: [u16; 4] = [7, 14, 23, 26];
/// `IFLA_VFINFO_LIST` of the same header, and `IFLA_VF_INFO` in it.
const FUNCTIONS: u16 = 22;
const FUNCTION: u16 = 1;
/// `IFLA_VF_SPOOFCHK` and `IFLA_VF_TRUST` of a virtual function: its number and a value, each of 32 bits.
const SWITCHES: [u16; 2] = [4, 9];
const VALUE_AT: usize = 4;
/// Value of a switch that the driver does not report (`rtnl_fill_vfinfo`). The parser would take it for
/// "off".
const UNTOLD: [u8; 4] = [0xff; 4];
/// `IFLA_VF_UNSPEC`, which netattach does not read.
const UNSPECIFIED: u16 = 0;
/// `NLA_TYPE_MASK` and `NLA_F_NESTED`.
pub(super) const TYPE: u16 = 0x3fff;
const NESTED: u16 = 0x8000;
pub(super) const ATTRIBUTE_HEADER: usize = 4;
/// `struct tcmsg`.
const FILTER_HEADER: usize = 20;
/// `TCA_KIND`, `TCA_OPTIONS` and `TCA_CHAIN` of `linux/rtnetlink.h`.
const FILTER_KIND: u16 = 1;
const FILTER_OPTIONS: u16 = 2;
const FILTER_CHAIN: u16 = 11;
/// The kind of filters that are BPF programs, and `TCA_BPF_NAME` and `TCA_BPF_ID` among their options
/// (`linux/pkt_cls.h`).
const BPF: &[u8] = b"bpf\0";
const BPF_NAME: u16 = 7;
const BPF_ID: u16 = 11;

/// Returns the part of a message after the header, reduced to what has to be parsed. A bridge's messages
/// about its ports have another family: they have no counters, and their `IFLA_AF_SPEC` is read, so they are
/// returned unchanged.
pub(super) fn lean(kind: u16, payload: &[u8]) -> Cow<'_, [u8]> {
    let whole = Cow::Borrowed(payload);
    if kind == RTM_NEWTFILTER {
        return filter(payload).map_or(whole, Cow::Owned);
    }
    if kind != RTM_NEWLINK || payload.first() != Some(&AF_UNSPEC) {
        return whole;
    }
    let Some((header, all)) = payload.split_at_checked(LINK_HEADER) else { return whole };
    let blurred = blurred(all);
    let mut attributes = blurred.map_or(all, |blurred| blurred.before);
    let mut kept = Vec::with_capacity(payload.len());
    kept.extend_from_slice(header);
    while let Some((&[a, b, c, d], _)) = attributes.split_first_chunk() {
        let length = usize::from(u16::from_ne_bytes([a, b]));
        if length < ATTRIBUTE_HEADER || length > attributes.len() {
            // The parser reports the error.
            return whole;
        }
        let (attribute, rest) = attributes.split_at(length.next_multiple_of(4).min(attributes.len()));
        match u16::from_ne_bytes([c, d]) & TYPE {
            left_out if LEFT_OUT.contains(&left_out) => {}
            FUNCTIONS => kept.extend(told(attribute)),
            kind @ (NAME | ALIAS) if !is_text(&attribute[..length]) => {
                write(&mut kept, kind, &attribute[ATTRIBUTE_HEADER..length]);
            }
            PROPERTIES if !are_texts(&attribute[..length]) => other_names(&mut kept, &attribute[..length]),
            _ => kept.extend_from_slice(attribute),
        }
        attributes = rest;
    }
    if let Some(Blurred { kind, .. }) = blurred {
        let mut info = Vec::new();
        attribute(&mut info, KIND, kind);
        attribute(&mut kept, INFO | NESTED, &info);
    }
    Cow::Owned(kept)
}

/// Reduces a filter: for a BPF program, to its name and id. Any other filter is returned without its kind,
/// because the parser would otherwise parse the options of that kind; if it failed, it would reject the
/// message, and another program's filter would be overlooked.
fn filter(payload: &[u8]) -> Option<Vec<u8>> {
    let (header, all) = payload.split_at_checked(FILTER_HEADER)?;
    let is_program = attribute_in(all, FILTER_KIND) == Some(BPF);
    let mut kept = header.to_vec();
    for (kind, value) in attributes_of(all) {
        match kind {
            FILTER_KIND if is_program => attribute(&mut kept, kind, value),
            FILTER_OPTIONS if is_program => attribute(&mut kept, kind | NESTED, &program(value)),
            FILTER_OPTIONS | FILTER_CHAIN => attribute(&mut kept, kind, value),
            _ => {}
        }
    }
    Some(kept)
}

/// The name and the id of a program from the options of its filter.
fn program(options: &[u8]) -> Vec<u8> {
    let mut kept = Vec::new();
    for (kind, value) in attributes_of(options) {
        match kind {
            BPF_NAME => write(&mut kept, kind, value),
            BPF_ID => attribute(&mut kept, kind, value),
            _ => {}
        }
    }
    kept
}

/// Whether the value of an attribute is plain ASCII, which needs no conversion.
fn is_text(attribute: &[u8]) -> bool {
    attribute.iter().skip(ATTRIBUTE_HEADER).all(u8::is_ascii)
}

/// The same for all names in a list of properties.
fn are_texts(list: &[u8]) -> bool {
    let text = |value| list.get(value).is_none_or(<[u8]>::is_ascii);
    nested(list, ATTRIBUTE_HEADER..list.len()).all(|(_, value)| text(value))
}

/// Writes each name of a list of properties as a list of its own, because the converted names may be too long
/// for one list. Other properties are dropped.
fn other_names(kept: &mut Vec<u8>, list: &[u8]) {
    for (_, name) in nested(list, ATTRIBUTE_HEADER..list.len()).filter(|(kind, _)| *kind == OTHER_NAME) {
        let Some(name) = list.get(name) else { continue };
        let mut one = Vec::with_capacity(4 * name.len() + ATTRIBUTE_HEADER);
        write(&mut one, OTHER_NAME, name);
        attribute(kept, PROPERTIES | NESTED, &one);
    }
}

/// Writes an attribute whose value is a text.
fn write(kept: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let mut text = text::read(value.strip_suffix(&[0]).unwrap_or(value)).into_owned().into_bytes();
    text.push(0);
    attribute(kept, kind, &text);
}

/// Appends an attribute. A value that is too long for an attribute is left out; the limit is three times the
/// length of any name or alias.
fn attribute(kept: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let Ok(length) = u16::try_from(ATTRIBUTE_HEADER + value.len()) else { return };
    kept.extend_from_slice(&length.to_ne_bytes());
    kept.extend_from_slice(&kind.to_ne_bytes());
    kept.extend_from_slice(value);
    kept.resize(kept.len().next_multiple_of(4), 0);
}

/// Returns a list of virtual functions without the switches that their driver does not report.
fn told(list: &[u8]) -> Vec<u8> {
    let mut told = list.to_vec();
    let functions = nested(list, ATTRIBUTE_HEADER..list.len()).filter(|(kind, _)| *kind == FUNCTION);
    let untold = functions.flat_map(|(_, function)| nested(list, function)).filter(|(kind, value)| {
        SWITCHES.contains(kind) && list.get(value.start + VALUE_AT..value.end) == Some(&UNTOLD[..])
    });
    for (_, value) in untold {
        // Overwrites the type of the attribute, so that all lengths stay the same.
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
    use super::super::blurred::tests::{ORDERS, before, with_sources};
    use super::*;

    pub(in crate::netlink) fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        super::attribute(&mut bytes, kind, value);
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
    fn what_is_no_text_becomes_one_and_texts_stay() {
        let other = |names: &[&[u8]]| {
            let each: Vec<u8> = names.iter().flat_map(|name| attribute(OTHER_NAME, name)).collect();
            attribute(PROPERTIES | NESTED, &each)
        };
        let odd = [attribute(NAME, b"a\xff\0"), attribute(ALIAS, b"\xfe\0"), other(&[b"b\0", b"\x80\0"])];
        let told = [
            attribute(NAME, "a\u{f7ff}\0".as_bytes()),
            attribute(ALIAS, "\u{f7fe}\0".as_bytes()),
            other(&[b"b\0"]),
            other(&["\u{f780}\0".as_bytes()]),
        ];
        assert_eq!(lean(RTM_NEWLINK, &message(0, &odd)), message(0, &told));
        let texts =
            [attribute(NAME, b"eth0\0"), attribute(ALIAS, "Gerät\0".as_bytes()), other(&[b"b\0", b"c\0"])];
        assert_eq!(lean(RTM_NEWLINK, &message(0, &texts)), message(0, &texts));
    }

    #[test]
    fn of_a_description_whose_lengths_may_have_wrapped_what_is_before_them_and_the_kind_are_told() {
        for order in ORDERS {
            let told =
                |number: usize| lean(RTM_NEWLINK, &message(0, &[with_sources(number, order)])).into_owned();
            assert_eq!(told(5_000), message(0, &[with_sources(5_000, order)]));
            let kind = attribute(INFO | NESTED, &attribute(KIND, b"macvlan\0"));
            let expected = message(0, &[before(order.0), kind]);
            for number in [5_460, 6_000, 90_000] {
                assert_eq!(told(number), expected, "{number} {order:?}");
            }
        }
        // As long, but no length has wrapped.
        let names: Vec<u8> = (0..496).flat_map(|_| attribute(OTHER_NAME, &[b'a'; 128])).collect();
        let kind = attribute(INFO | NESTED, &attribute(KIND, b"veth\0"));
        let many = [kind, attribute(54, &[0; 100]), attribute(PROPERTIES | NESTED, &names)];
        assert_eq!(lean(RTM_NEWLINK, &message(0, &many)), message(0, &many));
    }

    #[test]
    fn of_filters_programs_are_told_by_their_names_and_others_are_of_no_kind() {
        let filter = |attributes: &[Vec<u8>]| [vec![7; FILTER_HEADER], attributes.concat()].concat();
        let chain = attribute(FILTER_CHAIN, &[0; 4]);
        let id = attribute(BPF_ID, &[3, 0, 0, 0]);
        let shown = [attribute(BPF_NAME, b"x\xff\0"), attribute(10, &[1; 8]), id.clone()].concat();
        let [options, counters] = [attribute(FILTER_OPTIONS | NESTED, &shown), attribute(7, &[1; 20])];
        let kind = attribute(FILTER_KIND, BPF);
        let told = [attribute(BPF_NAME, "x\u{f7ff}\0".as_bytes()), id].concat();
        assert_eq!(
            lean(RTM_NEWTFILTER, &filter(&[kind.clone(), chain.clone(), options.clone(), counters])),
            filter(&[kind.clone(), chain.clone(), attribute(FILTER_OPTIONS | NESTED, &told)])
        );
        let other = attribute(FILTER_KIND, b"flower\0");
        assert_eq!(
            lean(RTM_NEWTFILTER, &filter(&[other, chain.clone(), options])),
            filter(&[chain.clone(), attribute(FILTER_OPTIONS, &shown)])
        );
        // The first message of each dump, which contains no filter.
        let none = filter(&[kind, chain]);
        assert_eq!(lean(RTM_NEWTFILTER, &none), none);
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
            let _ = lean(RTM_NEWLINK, &bytes);
            let _ = lean(RTM_NEWLINK, &message(0, std::slice::from_ref(&bytes)));
            let list = attribute(FUNCTIONS, &attribute(FUNCTION, &bytes));
            assert_eq!(told(&list).len(), list.len());
            let long = [&bytes[..], &attribute(INFO, &bytes), &vec![0; 1 << 16], &bytes].concat();
            let _ = lean(RTM_NEWLINK, &message(0, &[long]));
            let _ = lean(RTM_NEWTFILTER, &bytes);
            let options = attribute(FILTER_OPTIONS, &bytes);
            let _ = lean(RTM_NEWTFILTER, &[vec![0; FILTER_HEADER], attribute(FILTER_KIND, BPF), options].concat());
        }
    }
}
