//! DHCPv4 messages on the wire (RFC 2131, section 2; RFC 2132). Pure: every length in the input is checked.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use crate::mac::Mac;

/// Bytes before the options: the fields of BOOTP and the cookie (RFC 2131, figure 1).
const FIXED: usize = 240;
/// The first four bytes of the options (RFC 2131, section 3).
pub(super) const COOKIE: [u8; 4] = [99, 130, 83, 99];
/// The shortest message that BOOTP servers and relays accept (RFC 951, section 3), in bytes.
const SHORTEST: usize = 300;
/// The longest message that is read, in bytes: the longest IPv4 packet without its headers.
const LONGEST: usize = 65_535 - 28;
/// Offsets and lengths of the fields that may hold options (RFC 2132, section 9.3).
const SERVER_NAME: (usize, usize) = (44, 64);
const FILE: (usize, usize) = (108, 128);
/// `htype` and `hlen` of Ethernet.
const ETHERNET: [u8; 2] = [1, 6];
/// The bit of `flags` that requests broadcast replies (RFC 2131, figure 2).
const BROADCAST: u16 = 0x8000;

/// Codes of options (RFC 2132; 119 RFC 3397; 121 RFC 3442).
pub(super) mod code {
    pub(in super::super) const PAD: u8 = 0;
    pub(in super::super) const SUBNET_MASK: u8 = 1;
    pub(in super::super) const ROUTERS: u8 = 3;
    pub(in super::super) const NAME_SERVERS: u8 = 6;
    pub(in super::super) const DOMAIN: u8 = 15;
    pub(in super::super) const STATIC_ROUTES: u8 = 33;
    pub(in super::super) const REQUESTED_ADDRESS: u8 = 50;
    pub(in super::super) const LEASE_TIME: u8 = 51;
    pub(in super::super) const OVERLOAD: u8 = 52;
    pub(in super::super) const KIND: u8 = 53;
    pub(in super::super) const SERVER: u8 = 54;
    pub(in super::super) const WANTED: u8 = 55;
    pub(in super::super) const MESSAGE: u8 = 56;
    pub(in super::super) const LONGEST_MESSAGE: u8 = 57;
    pub(in super::super) const RENEW_AFTER: u8 = 58;
    pub(in super::super) const REBIND_AFTER: u8 = 59;
    pub(in super::super) const CLIENT: u8 = 61;
    pub(in super::super) const SEARCH: u8 = 119;
    pub(in super::super) const CLASSLESS_ROUTES: u8 = 121;
    pub(in super::super) const END: u8 = 255;
}

/// The kinds of message that a client sends or receives (RFC 2132, section 9.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// DHCPDISCOVER.
    Discover,
    /// DHCPOFFER.
    Offer,
    /// DHCPREQUEST.
    Request,
    /// DHCPDECLINE.
    Decline,
    /// DHCPACK.
    Ack,
    /// DHCPNAK.
    Nak,
    /// DHCPRELEASE.
    Release,
}

impl Kind {
    const ALL: [(u8, Self); 7] = [
        (1, Self::Discover),
        (2, Self::Offer),
        (3, Self::Request),
        (4, Self::Decline),
        (5, Self::Ack),
        (6, Self::Nak),
        (7, Self::Release),
    ];

    fn number(self) -> u8 {
        Self::ALL.iter().find(|(_, kind)| *kind == self).map_or(0, |(number, _)| *number)
    }
}

/// The options of a message. An option that occurs several times is the concatenation of its parts (RFC 3396).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Options(BTreeMap<u8, Vec<u8>>);

/// A message of a client or a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Whether a server sent it.
    pub is_reply: bool,
    /// The transaction.
    pub xid: u32,
    /// Seconds since the client began.
    pub secs: u16,
    /// Whether the reply must be broadcast.
    pub broadcast: bool,
    /// The client's current address.
    pub ciaddr: Ipv4Addr,
    /// The address that the server assigns.
    pub yiaddr: Ipv4Addr,
    /// The client's Ethernet address.
    pub mac: Mac,
    /// Its options.
    pub options: Options,
}

/// The bytes are not a DHCP message for Ethernet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a DHCP message: {0}")]
pub struct Malformed(&'static str);

impl Options {
    /// Returns the value of an option.
    pub fn get(&self, code: u8) -> Option<&[u8]> {
        self.0.get(&code).map(Vec::as_slice)
    }

    /// Returns those of the options whose numbers are in `codes`.
    pub fn only(&self, codes: &[u8]) -> Self {
        let kept = self.0.iter().filter(|(code, _)| codes.contains(code));
        Self(kept.map(|(code, value)| (*code, value.clone())).collect())
    }

    /// Sets an option.
    pub fn set(&mut self, code: u8, value: impl Into<Vec<u8>>) {
        self.0.insert(code, value.into());
    }

    /// Returns an option with one address.
    pub fn address(&self, code: u8) -> Option<Ipv4Addr> {
        self.get(code)?.try_into().ok().map(|octets: [u8; 4]| octets.into())
    }

    /// Returns an option with several addresses; ignores bytes after the last complete one.
    pub fn addresses(&self, code: u8) -> impl Iterator<Item = Ipv4Addr> {
        let (addresses, _) = self.get(code).unwrap_or_default().as_chunks::<4>();
        addresses.iter().map(|octets| Ipv4Addr::from(*octets))
    }

    /// Returns an option with a 32-bit number.
    pub fn number(&self, code: u8) -> Option<u32> {
        self.get(code)?.try_into().ok().map(u32::from_be_bytes)
    }

    /// Returns an option with text, without the final NUL that some servers send. Text that is empty or not printable
    /// counts as absent.
    pub fn text(&self, code: u8) -> Option<&str> {
        let text = std::str::from_utf8(self.get(code)?).ok()?.trim_end_matches('\0');
        let is_printable = !text.is_empty() && !text.chars().any(char::is_control);
        is_printable.then_some(text)
    }

    /// Returns the kind of message.
    pub fn kind(&self) -> Option<Kind> {
        let &[number] = self.get(code::KIND)? else { return None };
        Kind::ALL.iter().find(|(known, _)| *known == number).map(|(_, kind)| *kind)
    }

    /// Adds the options in an area of a message, up to its end or its option `END`.
    fn read(&mut self, mut area: &[u8]) -> Result<(), Malformed> {
        const CUT: Malformed = Malformed("an option is longer than the message");
        while let Some((&code, rest)) = area.split_first() {
            area = match code {
                code::PAD => rest,
                code::END => return Ok(()),
                _ => {
                    let (&length, rest) = rest.split_first().ok_or(CUT)?;
                    let (value, rest) = rest.split_at_checked(length.into()).ok_or(CUT)?;
                    self.0.entry(code).or_default().extend_from_slice(value);
                    rest
                }
            };
        }
        Ok(())
    }

    fn write(&self, message: &mut Vec<u8>) {
        for (&code, value) in &self.0 {
            let mut write = |part: &[u8]| {
                // At most 255, by the chunks.
                message.extend([code, u8::try_from(part.len()).unwrap_or(u8::MAX)]);
                message.extend_from_slice(part);
            };
            if value.is_empty() {
                write(&[]);
            }
            value.chunks(255).for_each(write);
        }
        message.push(code::END);
    }
}

impl Message {
    /// Makes a message of a client, of that kind.
    pub fn of(kind: Kind, xid: u32, mac: Mac) -> Self {
        let mut options = Options::default();
        options.set(code::KIND, [kind.number()]);
        Self {
            is_reply: matches!(kind, Kind::Offer | Kind::Ack | Kind::Nak),
            xid,
            secs: 0,
            broadcast: false,
            ciaddr: Ipv4Addr::UNSPECIFIED,
            yiaddr: Ipv4Addr::UNSPECIFIED,
            mac,
            options,
        }
    }

    /// Parses the payload of a UDP datagram.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn read(bytes: &[u8]) -> Result<Self, Malformed> {
        if bytes.len() > LONGEST {
            return Err(Malformed("longer than an IPv4 packet"));
        }
        let (fixed, area) = bytes.split_first_chunk::<FIXED>().ok_or(Malformed("too short"))?;
        let at =
            |from: usize| -> [u8; 4] { [fixed[from], fixed[from + 1], fixed[from + 2], fixed[from + 3]] };
        if at(236) != COOKIE {
            return Err(Malformed("no magic cookie"));
        }
        let is_reply = match fixed[0] {
            1 => false,
            2 => true,
            _ => return Err(Malformed("neither request nor reply")),
        };
        if fixed[1..3] != ETHERNET {
            return Err(Malformed("not for Ethernet"));
        }
        let mut options = Options::default();
        options.read(area)?;
        let overloaded: &[(usize, usize)] = match options.get(code::OVERLOAD) {
            Some([1]) => &[FILE],
            Some([2]) => &[SERVER_NAME],
            Some([3]) => &[FILE, SERVER_NAME],
            _ => &[],
        };
        for (from, length) in overloaded {
            options.read(&fixed[*from..from + length])?;
        }
        let half = |from: usize| u16::from_be_bytes([fixed[from], fixed[from + 1]]);
        Ok(Self {
            is_reply,
            xid: u32::from_be_bytes(at(4)),
            secs: half(8),
            broadcast: half(10) & BROADCAST != 0,
            ciaddr: at(12).into(),
            yiaddr: at(16).into(),
            mac: Mac([fixed[28], fixed[29], fixed[30], fixed[31], fixed[32], fixed[33]]),
            options,
        })
    }

    /// Returns the payload of a UDP datagram.
    pub fn write(&self) -> Vec<u8> {
        let mut message = vec![0; FIXED];
        message[0] = if self.is_reply { 2 } else { 1 };
        message[1..3].copy_from_slice(&ETHERNET);
        message[4..8].copy_from_slice(&self.xid.to_be_bytes());
        message[8..10].copy_from_slice(&self.secs.to_be_bytes());
        let flags = if self.broadcast { BROADCAST } else { 0 };
        message[10..12].copy_from_slice(&flags.to_be_bytes());
        message[12..16].copy_from_slice(&self.ciaddr.octets());
        message[16..20].copy_from_slice(&self.yiaddr.octets());
        message[28..34].copy_from_slice(&self.mac.0);
        message[236..240].copy_from_slice(&COOKIE);
        self.options.write(&mut message);
        message.resize(message.len().max(SHORTEST), code::PAD);
        message
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn offer() -> Message {
        let mut message = Message::of(Kind::Offer, 0x0102_0304, Mac([2, 0, 0, 0, 0, 7]));
        message.yiaddr = [10, 1, 0, 7].into();
        message.options.set(code::SUBNET_MASK, [255, 255, 255, 0]);
        message.options.set(code::DOMAIN, "example.org\0");
        message.options.set(code::CLASSLESS_ROUTES, vec![7; 300]);
        message
    }

    #[test]
    fn what_is_written_is_read() {
        let read = Message::read(&offer().write()).unwrap();
        assert_eq!(read, offer());
        assert_eq!(read.options.kind(), Some(Kind::Offer));
        assert_eq!(read.options.text(code::DOMAIN), Some("example.org"));
        assert_eq!(Message::of(Kind::Discover, 1, Mac([2; 6])).write().len(), SHORTEST);
    }

    #[test]
    fn options_are_read_from_the_fields_that_are_said_to_hold_some() {
        let mut bytes = offer().write();
        let end = bytes.iter().rposition(|byte| *byte == code::END).unwrap();
        bytes.splice(end.., [code::OVERLOAD, 1, 3, code::END]);
        bytes[108..115].copy_from_slice(&[code::ROUTERS, 4, 10, 1, 0, 1, code::END]);
        bytes[44..51].copy_from_slice(&[code::NAME_SERVERS, 4, 10, 1, 0, 2, code::END]);
        let read = Message::read(&bytes).unwrap().options;
        assert_eq!(read.address(code::ROUTERS), Some([10, 1, 0, 1].into()));
        assert_eq!(read.address(code::NAME_SERVERS), Some([10, 1, 0, 2].into()));
    }

    #[test]
    fn what_is_no_message_is_refused_by_what_is_wrong() {
        let whole = offer().write();
        let with = |at: usize, byte: u8| {
            let mut bytes = whole.clone();
            bytes[at] = byte;
            Message::read(&bytes).unwrap_err().to_string()
        };
        assert_eq!(with(0, 3), "not a DHCP message: neither request nor reply");
        assert_eq!(with(2, 8), "not a DHCP message: not for Ethernet");
        assert_eq!(with(239, 0), "not a DHCP message: no magic cookie");
        assert_eq!(Message::read(&whole[..239]), Err(Malformed("too short")));
        let cut = Message::read(&whole[..FIXED + 4]).unwrap_err();
        assert_eq!(cut, Malformed("an option is longer than the message"));
    }

    proptest! {
        /// Rows: DHCP-malformed.
        #[test]
        fn any_bytes_are_read_or_refused(mut bytes: Vec<u8>, prefix: bool) {
            if prefix {
                let mut whole = offer().write();
                whole.truncate(FIXED);
                whole.append(&mut bytes);
                bytes = whole;
            }
            if let Ok(message) = Message::read(&bytes) {
                prop_assert_eq!(Message::read(&message.write()), Ok(message));
            }
        }
    }
}
