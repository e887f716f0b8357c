//! The nftables table that masquerades pods and leads ports of the node to them.
//!
//! Its rules never change; one transaction adds and removes elements of its sets. See the table of sets in
//! `nft::nat_table`.

use std::collections::BTreeSet;

use super::super::Error;
use super::batch::{attribute, nested, object, text, transact};
use super::nat_table::{self, create, remove};
use super::{Family, attributes_of, dump, name};

pub use nat_table::{Set, TABLE};

const NAME: &str = "NFT_MSG_NEWSETELEM";
/// `enum nf_tables_msg_types`.
const NEW_TABLE: u16 = 0;
const GET_TABLE: u16 = 1;
const NEW_CHAIN: u16 = 3;
const GET_CHAIN: u16 = 4;
const NEW_RULE: u16 = 6;
const GET_RULE: u16 = 7;
const NEW_ELEMENT: u16 = 12;
const GET_ELEMENT: u16 = 13;
const DELETE_ELEMENT: u16 = 14;
/// A zero, and the name of a list of prefixes in whole words.
const LIST_LENGTH: usize = 12;
const CREATE: u16 = 0x400;
/// Elements in one message: all of them are one attribute, of at most 64 KiB.
const AT_ONCE: usize = 256;

/// An element of a set.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Element {
    /// Its set.
    pub set: Set,
    /// The key, with each part in words of its own.
    pub key: Vec<u8>,
    /// The end of a range.
    pub end: Option<Vec<u8>>,
    /// The value, of a map.
    pub value: Vec<u8>,
}

/// The chains and rules of the table, as the kernel shows them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Shape(Vec<Vec<u8>>);

/// Makes the table with these elements, in place of any of the same name. `owner`: the state directory of the agent,
/// which the table's comment says.
///
/// # Errors
/// The kernel refuses: it may lack nftables, `nft_nat`, `nft_masq`, `nft_ct` or `nft_fib_inet`.
pub fn install<'e>(owner: &str, elements: impl IntoIterator<Item = &'e Element>) -> Result<(), Error> {
    transact(NAME, &[remove(), create(owner), messages_of(NEW_ELEMENT, CREATE, elements)].concat())?;
    crate::crash_point!("nft", "installed");
    Ok(())
}

/// The comment of the table, if there is the table, and another than that of this owner.
///
/// # Errors
/// The kernel does not answer, or tables changed while they were read.
pub fn comment_of_another(owner: &str) -> Result<Option<String>, Error> {
    let mut found = None;
    let kinds = kinds(GET_TABLE, NEW_TABLE);
    let whole = dump("NFT_MSG_GETTABLE", kinds, Family::Inet, &[], &mut |table| {
        if is_own(table) {
            found = nat_table::comment_in(table);
        }
    })?;
    if !whole {
        return Err(Error::Interrupted("NFT_MSG_GETTABLE"));
    }
    // An earlier version wrote none.
    Ok(found.filter(|found| *found != nat_table::comment_of(owner)))
}

/// Adds elements to the table and removes others, first those. An element that is there already stays.
///
/// # Errors
/// The kernel refuses: the table is not there, an element to remove is not, or one of the same key has another value.
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
    transact(NAME, &remove())?;
    crate::crash_point!("nft", "removed");
    Ok(())
}

/// The chains and rules that the kernel has of the table; empty where there is none.
///
/// # Errors
/// The kernel does not answer, or the table changed while it was read.
pub fn shape() -> Result<Shape, Error> {
    let mut shape = Vec::new();
    let chains = dump("NFT_MSG_GETCHAIN", kinds(GET_CHAIN, NEW_CHAIN), Family::Inet, &[], &mut |chain| {
        if is_own(chain) {
            // Name, hook with its priority, and kind: not the counts of users, nor the number.
            shape.push(only(chain, &[3, 4, 7]));
        }
    })?;
    let table = attribute(1, &text(TABLE));
    let rules = dump("NFT_MSG_GETRULE", kinds(GET_RULE, NEW_RULE), Family::Inet, &table, &mut |rule| {
        if is_own(rule) {
            shape.push(only(rule, &[2, 4]));
        }
    })?;
    if chains && rules { Ok(Shape(shape)) } else { Err(Error::Interrupted(NAME)) }
}

impl Shape {
    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The elements that the kernel has of a set; none where there is no table.
///
/// # Errors
/// The kernel does not answer, or the table changed while it was read.
pub fn elements(set: Set) -> Result<BTreeSet<Element>, Error> {
    let only = [attribute(1, &text(TABLE)), attribute(2, &text(set.name()))].concat();
    let mut found = BTreeSet::new();
    let kinds = kinds(GET_ELEMENT, NEW_ELEMENT);
    let whole = dump("NFT_MSG_GETSETELEM", kinds, Family::Inet, &only, &mut |message| {
        let lists = attributes_of(message).filter(|(kind, _)| *kind == 3);
        found.extend(lists.flat_map(|(_, list)| attributes_of(list)).filter_map(|(_, it)| read(set, it)));
    })?;
    if whole { Ok(found) } else { Err(Error::Interrupted("NFT_MSG_GETSETELEM")) }
}

/// All elements that the kernel has of the table.
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

fn is_own(attributes: &[u8]) -> bool {
    let table = attributes_of(attributes).find(|(kind, _)| *kind == 1);
    table.and_then(|(_, table)| name(table)).as_deref() == Some(TABLE)
}

fn only(attributes: &[u8], kinds: &[u16]) -> Vec<u8> {
    attributes_of(attributes)
        .filter(|(kind, _)| kinds.contains(kind))
        .flat_map(|(kind, value)| attribute(kind, value))
        .collect()
}

fn messages_of<'e>(kind: u16, flags: u16, elements: impl IntoIterator<Item = &'e Element>) -> Vec<Vec<u8>> {
    let mut sorted: Vec<&Element> = elements.into_iter().collect();
    sorted.sort();
    let of_one_set = sorted.chunk_by(|one, next| one.set == next.set);
    of_one_set
        .flat_map(|elements| elements.chunks(AT_ONCE))
        .filter_map(|elements| {
            let set = elements.first()?.set;
            let list: Vec<Vec<u8>> = elements.iter().map(|element| written(element)).collect();
            let attributes = [attribute(1, &text(TABLE)), attribute(2, &text(set.name())), nested(3, &list)];
            Some(object(kind, flags, &attributes.concat()))
        })
        .collect()
}

/// An element as an item of a list.
fn written(element: &Element) -> Vec<u8> {
    let value = |kind, bytes: &[u8]| nested(kind, &[attribute(1, bytes)]);
    let mut attributes = vec![value(1, &element.key)];
    if !element.value.is_empty() {
        attributes.push(value(2, &element.value));
    }
    attributes.extend(element.end.as_deref().map(|end| value(10, end)));
    nested(1, &attributes)
}

fn read(set: Set, attributes: &[u8]) -> Option<Element> {
    let bytes = |wanted| {
        let (_, value) = attributes_of(attributes).find(|(kind, _)| *kind == wanted)?;
        attributes_of(value).find(|(kind, _)| *kind == 1).map(|(_, bytes)| bytes.to_vec())
    };
    let mut value = bytes(2).unwrap_or_default();
    if set.has_list() && value.len() < LIST_LENGTH {
        // An earlier version had the name of the list alone.
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
            let item = written(&wanted);
            let (_, attributes) = attributes_of(&item).next().unwrap();
            assert_eq!(read(wanted.set, attributes), Some(wanted));
        }
        // As an earlier version wrote it.
        let earlier = Element { value: vec![9; 6], ..element(Set::Mapped6, 7) };
        let item = written(&earlier);
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
            is_own(&bytes);
            only(&bytes, &[1]);
        }
    }
}
