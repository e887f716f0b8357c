//! Parses the kernel's messages: acknowledgements, ends of dumps, and objects.

use netlink_packet_core::{NetlinkDeserializable, NetlinkHeader};
use netlink_packet_route::RouteNetlinkMessage;

use super::lean::lean;

/// Length of `struct nlmsghdr`.
pub(super) const HEADER_LEN: usize = 16;
pub(super) const NLMSG_ERROR: u16 = 2;
pub(super) const NLMSG_DONE: u16 = 3;
/// In an acknowledgement: only the header of the request is repeated.
const NLM_F_CAPPED: u16 = 0x100;
/// In an acknowledgement, or at the end of a dump: attributes follow.
const NLM_F_ACK_TLVS: u16 = 0x200;
const NLMSGERR_ATTR_MSG: u16 = 1;
/// Length of the error number with which an acknowledgement and the end of a dump begin, after the header.
const ERRNO_LEN: usize = 4;

/// A message of the kernel.
pub(super) struct Received {
    pub(super) sequence: u32,
    pub(super) flags: u16,
    pub(super) body: Body,
}

/// Content of a message.
pub(super) enum Body {
    /// Errno (0 = carried out) and the kernel's text.
    Ack(i32, Option<String>),
    /// The end of a dump: errno (0 = complete), and the kernel's text. The kernel also uses it to report an
    /// error that prevents the dump from starting.
    Done(i32, Option<String>),
    Payload(RouteNetlinkMessage),
    /// An object that the parser rejects, such as one that a newer kernel describes differently.
    Unreadable,
}

/// All messages of a datagram.
///
/// # Errors
/// A length field is wrong, or a message is too short.
pub(super) fn parse_datagram(mut bytes: &[u8]) -> Result<Vec<Received>, &'static str> {
    let mut messages = Vec::new();
    while bytes.len() >= HEADER_LEN {
        let length = u32_at(bytes, 0).ok_or("short header")? as usize;
        if length < HEADER_LEN || length > bytes.len() {
            return Err("message length outside the datagram");
        }
        let (message, rest) = bytes.split_at(length.next_multiple_of(4).min(bytes.len()));
        bytes = rest;
        messages.push(parse_message(&message[..length])?);
    }
    Ok(messages)
}

/// Parses one message, given without its padding.
///
/// # Errors
/// The message is too short.
pub(super) fn parse_message(message: &[u8]) -> Result<Received, &'static str> {
    let kind = u16_at(message, 4).ok_or("short header")?;
    let flags = u16_at(message, 6).ok_or("short header")?;
    let sequence = u32_at(message, 8).ok_or("short header")?;
    let payload = &message[HEADER_LEN..];
    let body = match kind {
        // Unlike an acknowledgement, this message does not repeat the request between the error number and
        // the attributes.
        NLMSG_DONE => Body::Done(end_of_list(payload)?, text_behind(flags, payload.get(ERRNO_LEN..))),
        NLMSG_ERROR => {
            let code = u32_at(payload, 0).ok_or("short acknowledgement")? as i32;
            Body::Ack(code.saturating_neg(), extended_text(payload, flags))
        }
        _ => {
            let mut header = NetlinkHeader::default();
            header.message_type = kind;
            match RouteNetlinkMessage::deserialize(&header, &lean(kind, payload)) {
                Ok(message) => Body::Payload(message),
                Err(error) => {
                    tracing::debug!(kind, %error, "netlink message not understood");
                    Body::Unreadable
                }
            }
        }
    };
    Ok(Received { sequence, flags, body })
}

/// Returns the positive errno with which the kernel ends a dump (`netlink_dump_done`), from the part of
/// [`NLMSG_DONE`] after the header; 0: the dump is complete. Only a negative number is an error.
///
/// # Errors
/// The number is missing.
pub(super) fn end_of_list(payload: &[u8]) -> Result<i32, &'static str> {
    let code = u32_at(payload, 0).ok_or("short end of a list")?.cast_signed();
    Ok(code.min(0).saturating_neg())
}

/// The text of an extended acknowledgement.
fn extended_text(payload: &[u8], flags: u16) -> Option<String> {
    let repeated = if flags & NLM_F_CAPPED != 0 {
        HEADER_LEN
    } else {
        (u32_at(payload, 4)? as usize).max(HEADER_LEN).next_multiple_of(4)
    };
    text_behind(flags, payload.get(ERRNO_LEN + repeated..))
}

/// The kernel's text (`NLMSGERR_ATTR_MSG`) among the attributes at the end of a message.
fn text_behind(flags: u16, attributes: Option<&[u8]>) -> Option<String> {
    if flags & NLM_F_ACK_TLVS == 0 {
        return None;
    }
    let mut attributes = attributes?;
    while attributes.len() >= 4 {
        let length = usize::from(u16_at(attributes, 0)?);
        let kind = u16_at(attributes, 2)? & 0x3fff;
        let value = attributes.get(4..length)?;
        if kind == NLMSGERR_ATTR_MSG {
            let text = value.strip_suffix(&[0]).unwrap_or(value);
            return Some(String::from_utf8_lossy(text).into_owned());
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
    None
}

/// Reads a number of 16 bits in the byte order of the machine; `None`: the bytes end before.
pub(super) fn u16_at(bytes: &[u8], offset: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(offset..offset + 2)?.try_into().ok()?))
}

/// As [`u16_at`], for 32 bits.
pub(super) fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(offset..offset + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ack(errno: i32, text: Option<&str>) -> Vec<u8> {
        let mut payload = (-errno).to_ne_bytes().to_vec();
        payload.extend([0; HEADER_LEN]);
        let mut flags = NLM_F_CAPPED;
        if let Some(text) = text {
            flags |= NLM_F_ACK_TLVS;
            payload.extend((4 + text.len() as u16 + 1).to_ne_bytes());
            payload.extend(NLMSGERR_ATTR_MSG.to_ne_bytes());
            payload.extend(text.as_bytes());
            payload.push(0);
        }
        let mut message = (HEADER_LEN as u32 + payload.len() as u32).to_ne_bytes().to_vec();
        message.extend(NLMSG_ERROR.to_ne_bytes());
        message.extend(flags.to_ne_bytes());
        message.extend(7u32.to_ne_bytes());
        message.extend(0u32.to_ne_bytes());
        message.extend(payload);
        message.resize(message.len().next_multiple_of(4), 0);
        message
    }

    #[test]
    fn acknowledgements_carry_errno_and_text() {
        let mut datagram = ack(17, Some("Name in use"));
        datagram.extend(ack(0, None));
        let parsed = parse_datagram(&datagram).unwrap();
        assert_eq!(parsed.len(), 2);
        assert_eq!(parsed[0].sequence, 7);
        assert!(matches!(&parsed[0].body, Body::Ack(17, Some(text)) if text == "Name in use"));
        assert!(matches!(&parsed[1].body, Body::Ack(0, None)));
    }

    /// Ends a dump of routes as Linux 6.18 does, with more flags than matter here.
    fn done(code: Option<i32>, text: Option<&str>) -> Vec<u8> {
        let mut payload = code.map_or(Vec::new(), |code| code.to_ne_bytes().to_vec());
        if let Some(text) = text {
            payload.extend((4 + text.len() as u16 + 1).to_ne_bytes());
            payload.extend(NLMSGERR_ATTR_MSG.to_ne_bytes());
            payload.extend(text.as_bytes());
            payload.push(0);
        }
        let mut message = (HEADER_LEN as u32 + payload.len() as u32).to_ne_bytes().to_vec();
        message.extend(NLMSG_DONE.to_ne_bytes());
        message.extend((0x22 | if text.is_some() { NLM_F_ACK_TLVS } else { 0 }).to_ne_bytes());
        message.extend([0; 8]);
        message.extend(payload);
        message.resize(message.len().next_multiple_of(4), 0);
        message
    }

    #[test]
    fn a_list_ends_with_the_error_that_has_ended_it() {
        let ended =
            |code, text| match parse_datagram(&done(code, text)).map(|mut parsed| parsed.remove(0).body) {
                Ok(Body::Done(errno, text)) => Ok((errno, text)),
                Ok(_) => Err("another kind"),
                Err(what) => Err(what),
            };
        let no_table = "ipv4: FIB table does not exist";
        assert_eq!(ended(Some(0), None), Ok((0, None)));
        assert_eq!(ended(Some(-90), None), Ok((90, None)));
        assert_eq!(ended(Some(-2), Some(no_table)), Ok((2, Some(no_table.to_owned()))));
        // A positive number, which is no error, and the smallest number.
        assert_eq!(ended(Some(8), None), Ok((0, None)));
        assert_eq!(ended(Some(i32::MIN), None), Ok((i32::MAX, None)));
        assert_eq!(ended(None, None), Err("short end of a list"));
    }

    #[test]
    fn a_length_outside_the_datagram_is_malformed() {
        let mut datagram = ack(1, None);
        datagram[0] = 0xff;
        assert!(parse_datagram(&datagram).is_err());
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_parse_without_panic(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..512)) {
            let _ = parse_datagram(&bytes);
        }
    }
}
