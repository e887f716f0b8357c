//! The headers of IP, of its extensions and of its transports, as they are in a packet.

use super::bytes::Plain;
use super::frame::ETHERNET_LEN;
use crate::flow::{Lane, Tuple};
use crate::protocol::{ICMP, ICMPV6};
use crate::{DropReason, Ip4, Ip6, Port, Ports};

/// Length of an IPv4 header without options.
pub const IPV4_LEN: usize = size_of::<Ipv4Header>();
/// Length of an IPv6 header.
pub const IPV6_LEN: usize = size_of::<Ipv6Header>();
/// Ethernet, IPv4 and the part of TCP that is read, which is the longest of the transports'; ARP is shorter. Packets
/// of a pod's own TCP have their headers in place and their payload elsewhere: a request for one byte more than the
/// headers would copy each such packet.
pub const HEADERS_V4: usize = ETHERNET_LEN + IPV4_LEN + size_of::<TcpHeader>();
/// The same with IPv6.
pub const HEADERS_V6: usize = ETHERNET_LEN + IPV6_LEN + size_of::<TcpHeader>();

/// Number of bytes that suffices for all that is read of a packet: headers behind tags, options and extension
/// headers, the headers that an ICMP error quotes, and the options of neighbour discovery.
pub const HEADERS_MOST: usize = 512;

/// An IPv4 header (RFC 791, 3.1) without options.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Ipv4Header {
    /// Version 4 and header length in words.
    pub version_and_words: u8,
    /// Type of service.
    pub service: u8,
    pub(super) total_len: u16,
    pub(super) identification: u16,
    /// Flags and fragment offset.
    pub fragment: u16,
    /// Time to live.
    pub hop_limit: u8,
    /// Protocol of the payload.
    pub protocol: u8,
    /// Checksum of the header.
    pub checksum: u16,
    /// Source address.
    pub source: Ip4,
    /// Destination address.
    pub destination: Ip4,
}

/// An IPv6 header (RFC 8200, 3).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Ipv6Header {
    pub(super) version_and_class: u8,
    flow_label: [u8; 3],
    pub(super) payload_len: u16,
    /// Type of the next header.
    pub next_header: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Source address.
    pub source: Ip6,
    /// Destination address.
    pub destination: Ip6,
}

/// A TCP header (RFC 9293, 3.1) up to the flags.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TcpHeader {
    /// Source and destination.
    pub ports: Ports,
    sequence: [u16; 2],
    acknowledgement: [u16; 2],
    data_offset: u8,
    /// See [`tcp`](crate::flow::tcp).
    pub flags: u8,
}

/// An SCTP packet (RFC 9260, 3) up to the type of its first chunk.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct SctpHeader {
    pub(super) ports: Ports,
    verification: [u16; 2],
    checksum: [u16; 2],
    pub(super) chunk: u8,
    chunk_flags: u8,
}

/// An ICMP header (RFC 792, RFC 4443).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IcmpHeader {
    /// Type of the message.
    pub kind: u8,
    code: u8,
    checksum: u16,
    pub(super) identifier: Port,
    sequence: u16,
}

const _: () = {
    assert!(size_of::<Ipv4Header>() == 20);
    assert!(size_of::<Ipv6Header>() == 40);
    assert!(size_of::<TcpHeader>() == 16);
    assert!(size_of::<SctpHeader>() == 16);
    assert!(size_of::<IcmpHeader>() == 8);
};

// SAFETY: integers and addresses.
unsafe impl Plain for Ipv4Header {}
// SAFETY: as above.
unsafe impl Plain for Ipv6Header {}
// SAFETY: as above.
unsafe impl Plain for TcpHeader {}
// SAFETY: as above.
unsafe impl Plain for SctpHeader {}
// SAFETY: as above, as long as these together (asserted above).
unsafe impl Plain for IcmpHeader {}

/// The part of a packet in a fragment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The whole packet.
    Whole,
    /// Begins with the transport header.
    First,
    /// A part without the transport header.
    Later {
        /// Bytes of the packet before it.
        offset: u16,
    },
}

/// A tuple without ports.
#[inline(always)]
fn tuple<A>(source: A, destination: A, protocol: u8, lane: Lane) -> Tuple<A> {
    Tuple { source, destination, ports: Ports::NONE, lane: lane.of(protocol) }
}

impl Ipv4Header {
    /// Whether this is the header of a packet of which no more than [`HEADERS_V4`] is read.
    #[inline(always)]
    pub fn is_usual(&self) -> bool {
        usize::from(self.version_and_words & 15) * 4 == IPV4_LEN && self.protocol != ICMP
    }

    #[inline(always)]
    pub(super) fn tuple(&self, lane: Lane) -> Tuple<Ip4> {
        tuple(self.source, self.destination, self.protocol, lane)
    }

    /// Length of the header with its options, and which part of the packet follows.
    #[inline(always)]
    pub(super) fn shape(&self) -> Result<(usize, Part), DropReason> {
        let words = usize::from(self.version_and_words & 15);
        if self.version_and_words >> 4 != 4 || words < 5 {
            return Err(DropReason::Malformed);
        }
        let part = match u16::from_be(self.fragment) & 0x3fff {
            0 => Part::Whole,
            0x2000 => Part::First,
            position => Part::Later { offset: position << 3 },
        };
        Ok((words * 4, part))
    }
}

impl Ipv6Header {
    /// Whether this is the header of a packet of which no more than [`HEADERS_V6`] is read.
    #[inline(always)]
    pub fn is_usual(&self) -> bool {
        !is_extension(self.next_header) && self.next_header != ICMPV6
    }

    /// Traffic class and flow label from the first word, without the version: routing distinguishes packets by them.
    #[inline(always)]
    pub fn flow_information(&self) -> u32 {
        let [a, b, c] = self.flow_label;
        u32::from_ne_bytes([self.version_and_class & 15, a, b, c])
    }

    #[inline(always)]
    pub(super) fn tuple(&self, lane: Lane) -> Tuple<Ip6> {
        tuple(self.source, self.destination, self.next_header, lane)
    }
}

/// The extension header that every router reads.
pub const HOP_BY_HOP: u8 = 0;
/// Names the hops of a packet.
pub(super) const ROUTING: u8 = 43;
/// The packet is one of several fragments.
pub(super) const FRAGMENT: u8 = 44;
/// The authentication header (RFC 4302).
pub const AUTHENTICATION: u8 = 51;
const DESTINATION: u8 = 60;

/// Whether a "next header" is one that has a next one. A mobility header has none (RFC 6275, 6.1.1).
#[inline(always)]
pub fn is_extension(number: u8) -> bool {
    matches!(number, HOP_BY_HOP | ROUTING | FRAGMENT | AUTHENTICATION | DESTINATION)
}
