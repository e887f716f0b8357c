//! Texts of the kernel that may be any bytes: names of links, alternative names, aliases. `dev_valid_name`
//! refuses a slash, a colon and spaces, but nothing refuses invalid UTF-8. Every process with `CAP_NET_ADMIN`
//! in a pod can choose them.
//!
//! In a text that is not valid UTF-8, each byte beyond ASCII is read as a character of the private use area,
//! and such characters are written back as those bytes. So two links never have the same name here, and a
//! text that was read is written back unchanged.

use std::borrow::Cow;

use netlink_packet_core::DefaultNla;
use netlink_packet_route::link::{LinkAttribute, Prop};

/// `IFLA_IFNAME`, `IFLA_IFALIAS`, `IFLA_PROP_LIST` and in that `IFLA_ALT_IFNAME` of `linux/if_link.h`.
pub(super) const NAME: u16 = 3;
pub(super) const ALIAS: u16 = 20;
pub(super) const PROPERTIES: u16 = 52;
pub(super) const OTHER_NAME: u16 = 53;

/// The character that stands for the byte 0. In a text that is not valid UTF-8 the characters for bytes from
/// 0x80 on are used.
const BYTES: u32 = 0xf700;

/// The byte that a character stands for.
fn byte(character: char) -> Option<u8> {
    let byte = u8::try_from(u32::from(character).checked_sub(BYTES)?).ok()?;
    (!byte.is_ascii()).then_some(byte)
}

/// Decodes a text of the kernel. A text that itself contains such characters is also decoded byte by byte, so
/// that it is written back unchanged.
pub(super) fn read(bytes: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(bytes) {
        Ok(text) if text.chars().all(|character| byte(character).is_none()) => text.into(),
        _ => bytes.iter().map(|byte| character(*byte)).collect::<String>().into(),
    }
}

fn character(byte: u8) -> char {
    match byte.is_ascii() {
        true => byte.into(),
        // None of these characters is a surrogate.
        false => char::from_u32(BYTES + u32::from(byte)).unwrap_or(char::REPLACEMENT_CHARACTER),
    }
}

/// Encodes a text for the kernel.
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

/// Attribute that sets a name or an alias of a link.
pub(super) fn attribute(kind: u16, text: &str) -> LinkAttribute {
    LinkAttribute::Other(DefaultNla::new(kind, terminated(text)))
}

/// Attribute that adds or removes an alternative name of a link.
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
