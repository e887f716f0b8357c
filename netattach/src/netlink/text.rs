//! Texts of the kernel that are any bytes: names of links, their other names, their aliases (`dev_valid_name` refuses a slash, a
//! colon and spaces; nothing refuses what is no UTF-8). Whoever has `CAP_NET_ADMIN` in a pod chooses them.
//!
//! A text that is no UTF-8 is read with a character of the private use area in place of each of its bytes beyond ASCII, and such
//! characters are written as those bytes: two links never have one name here, and what is read is what is given back.

use std::borrow::Cow;

use netlink_packet_core::DefaultNla;
use netlink_packet_route::link::{LinkAttribute, Prop};

/// `IFLA_IFNAME`, `IFLA_IFALIAS`, `IFLA_PROP_LIST` and in that `IFLA_ALT_IFNAME` of `linux/if_link.h`.
pub(super) const NAME: u16 = 3;
pub(super) const ALIAS: u16 = 20;
pub(super) const PROPERTIES: u16 = 52;
pub(super) const OTHER_NAME: u16 = 53;

/// The character that stands for the byte 0; of a text that is no UTF-8 those from 0x80 on are used.
const BYTES: u32 = 0xf700;

/// The byte that a character stands for.
fn byte(character: char) -> Option<u8> {
    let byte = u8::try_from(u32::from(character).checked_sub(BYTES)?).ok()?;
    (!byte.is_ascii()).then_some(byte)
}

/// A text as it is here. One that has such characters itself is taken byte by byte as well, so that it is written as it was.
pub(super) fn read(bytes: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(bytes) {
        Ok(text) if text.chars().all(|character| byte(character).is_none()) => text.into(),
        _ => bytes.iter().map(|byte| character(*byte)).collect::<String>().into(),
    }
}

fn character(byte: u8) -> char {
    match byte.is_ascii() {
        true => byte.into(),
        // No surrogate is among these.
        false => char::from_u32(BYTES + u32::from(byte)).unwrap_or(char::REPLACEMENT_CHARACTER),
    }
}

/// A text as the kernel has it.
pub(super) fn raw(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    for character in text.chars() {
        match byte(character) {
            Some(byte) => bytes.push(byte),
            None => bytes.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    bytes
}

/// A name or alias of a link, as it is set.
pub(super) fn attribute(kind: u16, text: &str) -> LinkAttribute {
    LinkAttribute::Other(DefaultNla::new(kind, terminated(text)))
}

/// Another name of a link, as it is given and taken.
pub(super) fn property(text: &str) -> Prop {
    Prop::Other(DefaultNla::new(OTHER_NAME, terminated(text)))
}

fn terminated(text: &str) -> Vec<u8> {
    let mut bytes = raw(text);
    bytes.push(0);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_as_it_is_and_what_is_none_is_told_by_its_bytes() {
        for text in ["", "eth0", "Gerät 7", "\u{f6ff}\u{f800}"] {
            assert_eq!((read(text.as_bytes()).as_ref(), raw(text)), (text, text.as_bytes().to_vec()));
        }
        assert_eq!(read(b"a\xff"), "a\u{f7ff}");
        assert_eq!(read("\u{f7ff}".as_bytes()), "\u{f7ef}\u{f79f}\u{f7bf}");
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_written_as_it_was_read(bytes: Vec<u8>, other: Vec<u8>) {
            assert_eq!(raw(&read(&bytes)), bytes);
            assert_eq!(read(&bytes) == read(&other), bytes == other);
        }
    }
}
