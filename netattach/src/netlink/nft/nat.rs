//! The nftables table that masquerades pods and forwards ports of the node to them.
//!
//! The table's rules never change; one transaction adds and deletes elements of its sets. `nft::nat_table`
//! documents the sets.

use std::collections::BTreeSet;

use super::super::Error;
use super::batch::{
    CREATE, GET_CHAIN, GET_RULE, GET_TABLE, MOST_VALUE, NEW_CHAIN, NEW_RULE, NEW_TABLE, attribute,
    attribute_length, nested, object, text, transact,
};
use super::nat_table::{self, create, remove};
use super::{Family, attributes_of, dump, find, name};

pub use super::noted::{MOST_NOTE, Noted, View, change_noted, check_table_possible, view};
pub use nat_table::{SHARED_TABLE, Set, TABLE};

const NAME: &str = "NFT_MSG_NEWSETELEM";
/// `enum nf_tables_msg_types`.
pub(super) const NEW_ELEMENT: u16 = 12;
const GET_ELEMENT: u16 = 13;
pub(super) const DELETE_ELEMENT: u16 = 14;
/// Length of a zero word and the name of a list of prefixes, padded to whole words.
const LIST_LENGTH: usize = 12;
/// Most elements in one message, which contains all of them in one attribute.
const AT_ONCE: usize = 256;
/// Bytes of the longest key: an IPv6 address, a protocol and two ports. No value and no end of a range is
/// longer.
const LONGEST_KEY: usize = 16 + 3 * 4;
/// Bytes of the largest element: key, end, value and comment.
const LARGEST: usize = {
    let values = 3 * attribute_length(attribute_length(LONGEST_KEY));
    attribute_length(values + attribute_length(2 + MOST_NOTE + 1))
};
const _: () = assert!(AT_ONCE * LARGEST <= MOST_VALUE);

/// An element of a set.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Element {
    /// The set that contains the element.
    pub set: Set,
    /// The key, with each part padded to whole words.
    pub key: Vec<u8>,
    /// The end of a range, in sets of ranges.
    pub end: Option<Vec<u8>>,
    /// The value, in maps.
    pub value: Vec<u8>,
}

/// The chains and rules of the table, as the kernel lists them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Shape(Vec<Vec<u8>>);

/// Creates the table with these elements and replaces any table of the same name. `owner` is the state
/// directory of the agent, which the table's comment contains.
///
/// # Errors
/// The kernel refuses: it may lack nftables, `nft_nat`, `nft_masq`, `nft_ct` or `nft_fib_inet`.
pub fn install<'e>(owner: &str, elements: impl IntoIterator<Item = &'e Element>) -> Result<(), Error> {
    let made = create(TABLE, &nat_table::comment_of(owner));
    transact(NAME, &[remove(TABLE), made, messages_of(NEW_ELEMENT, CREATE, elements)].concat())?;
    crate::crash_point!("nft", "installed");
    Ok(())
}

/// Returns the table's comment if the table exists and belongs to another owner.
///
/// # Errors
/// The kernel does not answer.
pub fn comment_of_another(owner: &str) -> Result<Option<String>, Error> {
    // An earlier version wrote no comment.
    Ok(comment(TABLE)?.filter(|found| *found != nat_table::comment_of(owner)))
}

/// The comment of a table; `None`: there is no such table, or it has no comment.
pub(in crate::netlink) fn comment(table: &str) -> Result<Option<String>, Error> {
    comment_in_family(Family::Inet, table)
}

/// As [`comment`], for a table of that family.
pub(super) fn comment_in_family(family: Family, table: &str) -> Result<Option<String>, Error> {
    Ok(look_at(family, table)?.as_deref().and_then(nat_table::comment_in))
}

/// The attributes of a table; `None`: there is no such table.
fn look_at(family: Family, table: &str) -> Result<Option<Vec<u8>>, Error> {
    find("NFT_MSG_GETTABLE", kinds(GET_TABLE, NEW_TABLE), family, &attribute(1, &text(table)))
}

/// Whether a table of that name exists and is dormant: the kernel lists the chains and rules of a dormant
/// table like those of any other, but runs none of them.
///
/// # Errors
/// The kernel does not answer.
pub(in crate::netlink) fn is_dormant(family: Family, table: &str) -> Result<bool, Error> {
    /// `NFTA_TABLE_FLAGS`, big-endian, and one of them: `linux/netfilter/nf_tables.h`.
    const FLAGS: u16 = 2;
    const DORMANT: u32 = 1;
    let shown = look_at(family, table)?.unwrap_or_default();
    let flags = attributes_of(&shown).find(|(kind, _)| *kind == FLAGS);
    let flags = flags.and_then(|(_, value)| value.try_into().ok()).map_or(0, u32::from_be_bytes);
    Ok(flags & DORMANT != 0)
}

/// Deletes elements from the table, then adds others. An element that exists already stays.
///
/// # Errors
/// The kernel refuses: the table is missing, an element to delete is missing, or an element with the same key
/// has another value.
pub fn change<'e>(
    gone: impl IntoIterator<Item = &'e Element>,
    new: impl IntoIterator<Item = &'e Element>,
) -> Result<(), Error> {
    let messages = [messages_of(DELETE_ELEMENT, 0, gone), messages_of(NEW_ELEMENT, CREATE, new)].concat();
    transact(NAME, &messages)?;
    crate::crash_point!("nft", "changed");
    Ok(())
}

/// Removes the table. Idempotent.
///
/// # Errors
/// The kernel refuses.
pub fn uninstall() -> Result<(), Error> {
    transact(NAME, &remove(TABLE))?;
    crate::crash_point!("nft", "removed");
    Ok(())
}

/// Reads the table's chains and rules from the kernel; empty if there is no table.
///
/// # Errors
/// The kernel does not answer, or the table changed while it was read.
pub fn shape() -> Result<Shape, Error> {
    shape_of(TABLE)
}

/// As [`shape`], for the table of that name.
pub(super) fn shape_of(table: &str) -> Result<Shape, Error> {
    shape_in_family(Family::Inet, table)
}

/// As [`shape`], for the table of that name in that family.
pub(super) fn shape_in_family(family: Family, table: &str) -> Result<Shape, Error> {
    let mut shape = Vec::new();
    let chains = dump("NFT_MSG_GETCHAIN", kinds(GET_CHAIN, NEW_CHAIN), family, &[], &mut |chain| {
        if is_of(chain, table) {
            // Name, hook with priority, and type, but not the use count and the handle.
            shape.push(only(chain, &[3, 4, 7]));
        }
    })?;
    // A dormant table has all its chains, but on no hook.
    shape.extend(is_dormant(family, table)?.then(|| b"dormant".to_vec()));
    let only_its = attribute(1, &text(table));
    let rules = dump("NFT_MSG_GETRULE", kinds(GET_RULE, NEW_RULE), family, &only_its, &mut |rule| {
        if is_of(rule, table) {
            shape.push(only(rule, &[2, 4]));
        }
    })?;
    if chains && rules { Ok(Shape(shape)) } else { Err(Error::Interrupted(NAME)) }
}

impl Shape {
    /// Whether there are no chains and rules.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Number of chains and rules.
    pub(super) fn parts(&self) -> usize {
        self.0.len()
    }
}

/// Reads the elements of a set from the kernel; empty if there is no table.
///
/// # Errors
/// The kernel does not answer, or the table changed while it was read.
pub fn elements(set: Set) -> Result<BTreeSet<Element>, Error> {
    elements_of(TABLE, set)
}

/// As [`elements`], for the table of that name.
///
/// # Errors
/// As [`elements`].
pub fn elements_of(table: &str, set: Set) -> Result<BTreeSet<Element>, Error> {
    let mut found = BTreeSet::new();
    each_element(table, set, &mut |attributes| found.extend(read(set, attributes)))?;
    Ok(found)
}

/// Passes the attributes of each element of a table's set to `each`.
pub(super) fn each_element(table: &str, set: Set, each: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
    each_element_of((Family::Inet, table, set.name()), each)
}

/// As [`each_element`], for a set of a table of that family.
pub(super) fn each_element_of(
    (family, table, set): (Family, &str, &str),
    each: &mut dyn FnMut(&[u8]),
) -> Result<(), Error> {
    let only = [attribute(1, &text(table)), attribute(2, &text(set))].concat();
    let kinds = kinds(GET_ELEMENT, NEW_ELEMENT);
    let whole = dump("NFT_MSG_GETSETELEM", kinds, family, &only, &mut |message| {
        let lists = attributes_of(message).filter(|(kind, _)| *kind == 3);
        lists.flat_map(|(_, list)| attributes_of(list)).for_each(|(_, element)| each(element));
    })?;
    if whole { Ok(()) } else { Err(Error::Interrupted("NFT_MSG_GETSETELEM")) }
}

/// Reads all elements of the table from the kernel.
///
/// # Errors
/// As [`elements`].
pub fn all_elements() -> Result<BTreeSet<Element>, Error> {
    let mut all = BTreeSet::new();
    for set in Set::ALL {
        all.extend(elements(set)?);
    }
    Ok(all)
}

fn kinds(asked: u16, answered: u16) -> [u16; 2] {
    [asked, answered].map(|kind| 10 << 8 | kind)
}

fn is_of(attributes: &[u8], wanted: &str) -> bool {
    let table = attributes_of(attributes).find(|(kind, _)| *kind == 1);
    table.and_then(|(_, table)| name(table)).as_deref() == Some(wanted)
}

fn only(attributes: &[u8], kinds: &[u16]) -> Vec<u8> {
    attributes_of(attributes)
        .filter(|(kind, _)| kinds.contains(kind))
        .flat_map(|(kind, value)| attribute(kind, value))
        .collect()
}

fn messages_of<'e>(kind: u16, flags: u16, elements: impl IntoIterator<Item = &'e Element>) -> Vec<Vec<u8>> {
    let noted = elements.into_iter().map(|element| (element, ""));
    messages_about((TABLE, kind, flags), noted)
}

/// The messages that add or delete elements of a table, each with its comment, if it has one.
pub(super) fn messages_about<'e>(
    (table, kind, flags): (&str, u16, u16),
    elements: impl IntoIterator<Item = (&'e Element, &'e str)>,
) -> Vec<Vec<u8>> {
    let mut sorted: Vec<(&Element, &str)> = elements.into_iter().collect();
    sorted.sort();
    let of_one_set = sorted.chunk_by(|(one, _), (next, _)| one.set == next.set);
    of_one_set
        .flat_map(|elements| elements.chunks(AT_ONCE))
        .filter_map(|elements| {
            let set = elements.first()?.0.set;
            let list: Vec<Vec<u8>> = elements.iter().map(|(element, note)| written(element, note)).collect();
            let attributes = [attribute(1, &text(table)), attribute(2, &text(set.name())), nested(3, &list)];
            Some(object(kind, flags, &attributes.concat()))
        })
        .collect()
}

/// An element as a list item.
fn written(element: &Element, note: &str) -> Vec<u8> {
    let value = |kind, bytes: &[u8]| nested(kind, &[attribute(1, bytes)]);
    let mut attributes = vec![value(1, &element.key)];
    if !element.value.is_empty() {
        attributes.push(value(2, &element.value));
    }
    if !note.is_empty() {
        attributes.push(attribute(nat_table::USER_DATA, &nat_table::user_data(note)));
    }
    attributes.extend(element.end.as_deref().map(|end| value(10, end)));
    nested(1, &attributes)
}

pub(super) fn read(set: Set, attributes: &[u8]) -> Option<Element> {
    let bytes = |wanted| {
        let (_, value) = attributes_of(attributes).find(|(kind, _)| *kind == wanted)?;
        attributes_of(value).find(|(kind, _)| *kind == 1).map(|(_, bytes)| bytes.to_vec())
    };
    let mut value = bytes(2).unwrap_or_default();
    if set.has_list() && value.len() < LIST_LENGTH {
        // An earlier version wrote only the name of the list.
        value.splice(..0, [0; 4]);
        value.resize(LIST_LENGTH, 0);
    }
    Some(Element { set, key: bytes(1)?, end: bytes(10), value })
}

#[cfg(test)]
mod tests {
    use super::super::messages;
    use super::*;

    fn element(set: Set, key: u8) -> Element {
        Element { set, key: vec![key; 4], end: None, value: vec![9; 12] }
    }

    #[test]
    fn elements_are_read_as_they_are_written() {
        let range =
            Element { set: Set::Prefixes4, key: vec![1; 12], end: Some(vec![2; 12]), value: Vec::new() };
        for wanted in [range, element(Set::Masquerade4, 7)] {
            let item = written(&wanted, "");
            let (_, attributes) = attributes_of(&item).next().unwrap();
            assert_eq!(read(wanted.set, attributes), Some(wanted));
        }
        // In the form that an earlier version wrote.
        let earlier = Element { value: vec![9; 6], ..element(Set::Mapped6, 7) };
        let item = written(&earlier, "whose");
        let (_, attributes) = attributes_of(&item).next().unwrap();
        let value = vec![0, 0, 0, 0, 9, 9, 9, 9, 9, 9, 0, 0];
        assert_eq!(read(Set::Mapped6, attributes), Some(Element { value, ..earlier }));
    }

    #[test]
    fn a_message_has_elements_of_one_set_and_no_more_than_fit() {
        let many: Vec<Element> = (0..=255)
            .flat_map(|key| [element(Set::Masquerade4, key), element(Set::Mapped4, key)])
            .chain((0..=255).map(|key| Element { end: Some(vec![1]), ..element(Set::Mapped4, key) }))
            .collect();
        let batch = messages_of(NEW_ELEMENT, CREATE, &many).concat();
        let counts: Vec<(String, usize)> = messages(&batch)
            .map(|message| {
                let attributes = &message.body[4..];
                let of = |wanted| attributes_of(attributes).find(|(kind, _)| *kind == wanted).unwrap().1;
                (name(of(2)).unwrap(), attributes_of(of(3)).count())
            })
            .collect();
        let row = |name: &str, count| (name.to_owned(), count);
        assert_eq!(counts, [row("mapped4", 256), row("mapped4", 256), row("masquerade4", 256)]);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_parse_without_panic(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..512)) {
            read(Set::Ports4, &bytes);
            is_of(&bytes, TABLE);
            only(&bytes, &[1]);
        }
    }
}
