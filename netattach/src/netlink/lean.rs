//! Leaves out of the kernel's messages about links and filters what nobody here reads: it is most of them, and costs most of what
//! parsing them takes. And makes texts of what others have chosen as such, and is none ([`text`]): the parser refuses the whole
//! message.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ops::Range;

use super::nft::{attribute_in, attributes_of};
use super::text::{self, ALIAS, NAME, OTHER_NAME, PROPERTIES};

pub(super) const RTM_NEWLINK: u16 = 16;
pub(super) const RTM_NEWTFILTER: u16 = 44;
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
/// `NLA_TYPE_MASK` and `NLA_F_NESTED`.
const TYPE: u16 = 0x3fff;
const NESTED: u16 = 0x8000;
const ATTRIBUTE_HEADER: usize = 4;
/// `IFLA_LINKINFO`, and `IFLA_INFO_KIND` in it.
const INFO: u16 = 18;
const KIND: u16 = 1;
/// An attribute of as many bytes and more says of itself that it has as many fewer: its length is a number of 16 bits. A macvlan
/// in mode `source` has as many addresses, a VLAN as many priorities, as somebody in its namespace gives it.
const WRAPS: usize = 1 << 16;
/// `struct tcmsg`.
const FILTER_HEADER: usize = 20;
/// `TCA_KIND`, `TCA_OPTIONS` and `TCA_CHAIN` of `linux/rtnetlink.h`.
const FILTER_KIND: u16 = 1;
const FILTER_OPTIONS: u16 = 2;
const FILTER_CHAIN: u16 = 11;
/// The kind of filters that are programs, and `TCA_BPF_NAME` and `TCA_BPF_ID` among their options (`linux/pkt_cls.h`).
const BPF: &[u8] = b"bpf\0";
const BPF_NAME: u16 = 7;
const BPF_ID: u16 = 11;

/// A message behind its header, as it is to be parsed. What a bridge says of its ports, a message of another family, has no
/// counters, and its `IFLA_AF_SPEC` is read.
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
            // The parser says what is wrong.
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
    if let Some(Blurred { kind: Some(kind), .. }) = blurred {
        let mut info = Vec::new();
        attribute(&mut info, KIND, kind);
        attribute(&mut kept, INFO | NESTED, &info);
    }
    Cow::Owned(kept)
}

/// What is read of a filter: of a program its name and number. Any other is told without its kind, for which the parser would look
/// into its options: where it does not understand one it refuses the message, and a stranger's filter would be overlooked.
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

/// The name and the number of a program among the options of its filter.
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

/// A description of which nobody can tell where what its link is by its kind ends, and what is behind that: which namespace what it
/// is on is in, other names, a parent on a bus.
#[derive(Debug, Clone, Copy)]
pub(super) struct Blurred<'m> {
    /// The attributes before that.
    before: &'m [u8],
    /// The kind's name.
    pub(super) kind: Option<&'m [u8]>,
}

/// Of the attributes that describe a link; `None`: all of them can be told.
pub(super) fn blurred(attributes: &[u8]) -> Option<Blurred<'_>> {
    let mut at = 0;
    while attributes.len().saturating_sub(at) >= WRAPS {
        let from = attributes.get(at..)?;
        let (&[a, b, c, d], value) = from.split_first_chunk()?;
        let length = usize::from(u16::from_ne_bytes([a, b]));
        let rest = from.get(length.next_multiple_of(4)..).filter(|_| length >= ATTRIBUTE_HEADER);
        if u16::from_ne_bytes([c, d]) & TYPE == INFO {
            let kind = || attribute_in(value, KIND);
            return (!rest.is_some_and(are_sound))
                .then(|| Blurred { before: &attributes[..at], kind: kind() });
        }
        rest?;
        at += length.next_multiple_of(4);
    }
    None
}

/// Whether attributes end where their message does, with none twice: each of those that the kernel puts there is there once.
fn are_sound(attributes: &[u8]) -> bool {
    let (mut seen, mut end) = (BTreeSet::new(), 0);
    let once = attributes_of(attributes).all(|(kind, value)| {
        end += ATTRIBUTE_HEADER + value.len().next_multiple_of(4);
        seen.insert(kind)
    });
    once && end >= attributes.len()
}

/// Whether a text stands for itself for sure.
fn is_text(attribute: &[u8]) -> bool {
    attribute.iter().skip(ATTRIBUTE_HEADER).all(u8::is_ascii)
}

/// The same of all names of a list of properties.
fn are_texts(list: &[u8]) -> bool {
    let text = |value| list.get(value).is_none_or(<[u8]>::is_ascii);
    nested(list, ATTRIBUTE_HEADER..list.len()).all(|(_, value)| text(value))
}

/// Each name of a list of properties in a list of its own: as texts, all of them may be too long for one. What else is a property
/// nobody reads.
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

/// Appends an attribute. One that is too long for the kernel's attributes, three times as long as any name or alias, is left out.
fn attribute(kept: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let Ok(length) = u16::try_from(ATTRIBUTE_HEADER + value.len()) else { return };
    kept.extend_from_slice(&length.to_ne_bytes());
    kept.extend_from_slice(&kind.to_ne_bytes());
    kept.extend_from_slice(value);
    kept.resize(kept.len().next_multiple_of(4), 0);
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

    /// As the kernel describes a macvlan with so many source addresses.
    pub(in crate::netlink) fn with_sources(number: usize) -> Vec<u8> {
        let long = |kind: u16, value: &[u8]| {
            let mut bytes = vec![0; ATTRIBUTE_HEADER];
            bytes[..2].copy_from_slice(&((ATTRIBUTE_HEADER + value.len()) as u16).to_ne_bytes());
            bytes[2..].copy_from_slice(&kind.to_ne_bytes());
            bytes.extend_from_slice(value);
            bytes
        };
        let sources: Vec<u8> = (0..number).flat_map(|_| attribute(4, &[2, 0, 0, 0, 0, 7])).collect();
        let data = [attribute(1, &16_u32.to_ne_bytes()), long(4, &sources), attribute(7, &[0; 4])].concat();
        let info = [attribute(KIND, b"macvlan\0"), long(2, &data)].concat();
        [
            attribute(NAME, b"lan\0"),
            attribute(5, &4_u32.to_ne_bytes()),
            long(INFO, &info),
            attribute(37, &[3, 0, 0, 0]),
        ]
        .concat()
    }

    #[test]
    fn of_a_description_whose_lengths_have_wrapped_what_is_before_them_and_the_kind_is_told() {
        let told = |number: usize| lean(RTM_NEWLINK, &message(0, &[with_sources(number)])).into_owned();
        assert_eq!(told(5_000), message(0, &[with_sources(5_000)]));
        let kind = attribute(INFO | NESTED, &attribute(KIND, b"macvlan\0"));
        let expected = message(0, &[attribute(NAME, b"lan\0"), attribute(5, &4_u32.to_ne_bytes()), kind]);
        for number in [5_460, 5_470, 6_000, 11_000, 90_000] {
            assert_eq!(told(number), expected, "{number}");
        }
        // As long, and no length has wrapped.
        let names: Vec<u8> = (0..496).flat_map(|_| attribute(OTHER_NAME, &[b'a'; 128])).collect();
        let many = [with_sources(10), attribute(PROPERTIES | NESTED, &names)];
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
        // The message without a filter of each list.
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
            assert!(lean(RTM_NEWLINK, &bytes).len() <= bytes.len());
            let list = attribute(FUNCTIONS, &attribute(FUNCTION, &bytes));
            assert_eq!(told(&list).len(), list.len());
            let long = [&bytes[..], &attribute(INFO, &bytes), &vec![0; WRAPS], &bytes].concat();
            let _ = lean(RTM_NEWLINK, &message(0, &[long]));
            let _ = lean(RTM_NEWTFILTER, &bytes);
            let options = attribute(FILTER_OPTIONS, &bytes);
            let _ = lean(RTM_NEWTFILTER, &[vec![0; FILTER_HEADER], attribute(FILTER_KIND, BPF), options].concat());
        }
    }
}
