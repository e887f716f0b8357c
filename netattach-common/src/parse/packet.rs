//! From bytes to a [`Packet`]: the bounds-checked walk over IP, extension headers and transport.

use core::mem::MaybeUninit;

use super::bytes::{Bytes, Plain};
use super::frame::{ETHERNET_LEN, Payload};
use super::icmp::{self, IcmpHeader};
use crate::flow::{Lane, Signal, Tuple};
use crate::fragment;
use crate::protocol::{DCCP, ICMP, ICMPV6, SCTP, TCP, UDP, UDP_LITE};
use crate::{Address, DropReason, Ip4, Ip6, Ports};

/// Length of an IPv4 header without options.
pub const IPV4_LEN: usize = size_of::<Ipv4Header>();
/// Length of an IPv6 header.
pub const IPV6_LEN: usize = size_of::<Ipv6Header>();
/// Ethernet, IPv4 and the part of TCP that is read, which is the longest of the transports'; ARP is shorter. What a
/// pod's own TCP sends has its headers in place and its payload elsewhere: asking for one byte more than the headers
/// would have each such packet copied.
pub const HEADERS_V4: usize = ETHERNET_LEN + IPV4_LEN + size_of::<TcpHeader>();
/// The same with IPv6.
pub const HEADERS_V6: usize = ETHERNET_LEN + IPV6_LEN + size_of::<TcpHeader>();

/// The differences between the versions of IP, apart from their header formats.
pub trait Version: Address + Plain {
    /// Protocol number of its control messages.
    const ICMP: u8;
    /// Turns the tuple of an ICMP error into that of an answer to the packet quoted at `offset`. `false`: not possible.
    fn answer_to_quoted<B: Bytes>(bytes: &B, offset: usize, answer: &mut Tuple<Self>) -> bool;
}

impl Version for Ip4 {
    const ICMP: u8 = ICMP;

    #[inline(never)]
    fn answer_to_quoted<B: Bytes>(bytes: &B, offset: usize, answer: &mut Tuple<Self>) -> bool {
        let Ok(header) = bytes.load::<Ipv4Header>(offset) else {
            return false;
        };
        match header.shape() {
            Ok((header_len, Part::Whole | Part::First)) => {
                answer_ports(bytes, offset + header_len, header.tuple(answer.lane), answer)
            }
            _ => false,
        }
    }
}

impl Version for Ip6 {
    const ICMP: u8 = ICMPV6;

    #[inline(never)]
    fn answer_to_quoted<B: Bytes>(bytes: &B, offset: usize, answer: &mut Tuple<Self>) -> bool {
        match bytes.load::<Ipv6Header>(offset) {
            // A quoted packet with extension headers is too rare for a second walk.
            Ok(header) => answer_ports(bytes, offset + IPV6_LEN, header.tuple(answer.lane), answer),
            Err(_) => false,
        }
    }
}

#[inline(always)]
fn answer_ports<A: Version, B: Bytes>(
    bytes: &B,
    transport: usize,
    mut quoted: Tuple<A>,
    answer: &mut Tuple<A>,
) -> bool {
    match quoted.lane.protocol() {
        TCP | UDP | SCTP | DCCP | UDP_LITE => {
            let Ok(ports) = bytes.load::<Ports>(transport) else {
                return false;
            };
            quoted.ports = ports;
        }
        number if number == A::ICMP => {
            let Ok(message) = bytes.load(transport) else {
                return false;
            };
            icmp::set_echo(&mut quoted, &message);
        }
        _ => {}
    }
    *answer = quoted.reversed();
    true
}

/// An IPv4 header (RFC 791, 3.1) without options.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Ipv4Header {
    /// Version 4 and header length in words.
    pub version_and_words: u8,
    /// Type of service.
    pub service: u8,
    total_len: u16,
    identification: u16,
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
    version_and_class: u8,
    flow_label: [u8; 3],
    payload_len: u16,
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
struct SctpHeader {
    ports: Ports,
    verification: [u16; 2],
    checksum: [u16; 2],
    chunk: u8,
    chunk_flags: u8,
}

const _: () = {
    assert!(size_of::<Ipv4Header>() == 20);
    assert!(size_of::<Ipv6Header>() == 40);
    assert!(size_of::<TcpHeader>() == 16);
    assert!(size_of::<SctpHeader>() == 16);
};

// SAFETY: integers and addresses.
unsafe impl Plain for Ipv4Header {}
// SAFETY: as above.
unsafe impl Plain for Ipv6Header {}
// SAFETY: as above.
unsafe impl Plain for TcpHeader {}
// SAFETY: as above.
unsafe impl Plain for SctpHeader {}

/// The role of a packet in flows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Ordinary traffic of a flow.
    Flow,
    /// The same, and the first fragment of it.
    FirstFragment,
    /// A fragment without the transport header.
    LaterFragment,
    /// An ICMP error about another packet.
    IcmpError,
    /// Neighbour discovery or a multicast listener message on its link.
    LinkControl,
}

/// The programs' data of an IP packet. No padding, as required for arguments of subprograms.
#[repr(C)]
#[derive(Debug)]
pub struct Packet<A> {
    /// Addresses, protocol, ports, VLAN tags.
    pub tuple: Tuple<A>,
    /// Identification, which the fragments of one packet share.
    pub identification: u32,
    /// Offset of the transport header in the frame.
    pub transport: u32,
    /// Offset of the packet's end in the frame.
    pub end: u32,
    /// Its role in flows.
    pub kind: Kind,
    /// Its effect on a connection.
    pub signal: Signal,
    /// Whether the ports in `tuple` are ports (rather than an echo identifier or nothing).
    pub has_ports: bool,
    /// Whether the IPv4 header has options.
    pub has_options: bool,
    /// Type of an ICMP message.
    pub icmp_type: u8,
    /// Whether the frame has VLAN tags.
    pub tagged: bool,
    /// Offset of the IP header in the frame.
    network: u16,
}

const _: () = {
    assert!(size_of::<Packet<Ip4>>() == size_of::<Tuple<Ip4>>() + 20);
    assert!(size_of::<Packet<Ip6>>() == size_of::<Tuple<Ip6>>() + 20);
};

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

/// The position of the transport header.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// The part of the packet that follows.
    pub part: Part,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// Whether it is at its usual offset: no tags, options or extension headers before it.
    plain: bool,
    /// The usual offset.
    usual: usize,
}

/// Whether a protocol's transport header begins with two ports.
#[inline(always)]
pub fn has_ports(protocol: u8) -> bool {
    matches!(protocol, TCP | UDP | SCTP)
}

/// Parses an IPv4 packet from its first byte.
///
/// # Errors
/// The packet must be dropped regardless of policies.
#[inline(always)]
pub fn ipv4<B: Bytes>(bytes: &B, packet: &mut Packet<Ip4>) -> Result<(), DropReason> {
    if packet.tagged {
        ipv4_header::<true, B>(bytes, packet, &bytes.load(packet.network())?)
    } else {
        ipv4_header::<true, B>(bytes, packet, &*bytes.at(ETHERNET_LEN)?)
    }
}

/// Reads an IPv4 packet where nothing of it can be read in place.
///
/// # Errors
/// As [`ipv4`].
#[inline(always)]
pub fn copied_ipv4<B: Bytes>(bytes: &B, packet: &mut Packet<Ip4>) -> Result<(), DropReason> {
    ipv4_header::<false, B>(bytes, packet, &bytes.load(packet.network())?)
}

#[inline(always)]
fn ipv4_header<const IN_PLACE: bool, B: Bytes>(
    bytes: &B,
    packet: &mut Packet<Ip4>,
    ip: &Ipv4Header,
) -> Result<(), DropReason> {
    let (header_len, part) = ip.shape()?;
    packet.tuple = ip.tuple(packet.tuple.lane);
    packet.measure(header_len, u16::from_be(ip.total_len).into());
    // Before segmentation its length may exceed the maximum of an IP header, which is then 0 (`BIG TCP`).
    if ip.total_len == 0 && bytes.is_uncut() {
        packet.end = bytes.length();
    }
    packet.has_options = header_len != IPV4_LEN;
    packet.identification = ip.identification.into();
    let plain = !packet.tagged && header_len == IPV4_LEN;
    read_transport::<_, IN_PLACE, B>(
        bytes,
        packet,
        &Place { part, hop_limit: ip.hop_limit, plain, usual: ETHERNET_LEN + IPV4_LEN },
    )
}

/// Reads an IPv6 packet, which has just begun, extension headers included (RFC 8200, 4).
///
/// # Errors
/// As [`ipv4`].
#[inline(always)]
pub fn ipv6<B: Bytes>(bytes: &B, packet: &mut Packet<Ip6>) -> Result<(), DropReason> {
    if packet.tagged {
        ipv6_header::<true, B>(bytes, packet, &bytes.load(packet.network())?)
    } else {
        ipv6_header::<true, B>(bytes, packet, &*bytes.at(ETHERNET_LEN)?)
    }
}

/// Reads an IPv6 packet where nothing of it can be read in place.
///
/// # Errors
/// As [`ipv4`].
#[inline(always)]
pub fn copied_ipv6<B: Bytes>(bytes: &B, packet: &mut Packet<Ip6>) -> Result<(), DropReason> {
    ipv6_header::<false, B>(bytes, packet, &bytes.load(packet.network())?)
}

#[inline(always)]
fn ipv6_header<const IN_PLACE: bool, B: Bytes>(
    bytes: &B,
    packet: &mut Packet<Ip6>,
    ip: &Ipv6Header,
) -> Result<(), DropReason> {
    if ip.version_and_class >> 4 != 6 {
        return Err(DropReason::Malformed);
    }
    packet.tuple = ip.tuple(packet.tuple.lane);
    packet.measure(IPV6_LEN, IPV6_LEN as u32 + u32::from(u16::from_be(ip.payload_len)));
    let hop_limit = ip.hop_limit;
    let extended = is_extension(packet.tuple.lane.protocol());
    if ip.payload_len == 0 {
        if extended {
            packet.end = jumbo_end(bytes, packet)?;
        } else if bytes.is_uncut() {
            packet.end = bytes.length();
        }
    }
    let part = if extended { extension_headers(bytes, packet)? } else { Part::Whole };
    let plain = !packet.tagged && !extended;
    let place = Place { part, hop_limit, plain, usual: ETHERNET_LEN + IPV6_LEN };
    read_transport::<_, IN_PLACE, B>(bytes, packet, &place)
}

/// The end of a packet whose IPv6 header has no length: taken from a jumbo option (RFC 2675, 2), as the first one of
/// hop-by-hop options alone, where the kernel puts it. Without one Linux takes all bytes that follow for the packet,
/// and others take none.
#[inline(always)]
fn jumbo_end<B: Bytes>(bytes: &B, packet: &Packet<Ip6>) -> Result<u32, DropReason> {
    const JUMBO: u8 = 0xc2;
    let [_, eights, option, size, length @ ..]: [u8; 8] = bytes.load(packet.transport())?;
    let length = u32::from_be_bytes(length);
    let jumbo = packet.tuple.lane.protocol() == HOP_BY_HOP && eights == 0 && option == JUMBO && size == 4;
    if !jumbo || length <= u32::from(u16::MAX) || length > bytes.length() {
        return Err(DropReason::Malformed);
    }
    Ok(packet.transport + length)
}

/// Room for a packet of either family: the compiler would keep one for each on the stack, which is small.
#[derive(Debug)]
pub struct Room(MaybeUninit<Packet<Ip6>>);

impl Default for Room {
    #[inline(always)]
    fn default() -> Self {
        Self(MaybeUninit::uninit())
    }
}

impl Room {
    /// A packet of which only the frame has been read.
    #[inline(always)]
    pub fn begin<A: Version>(&mut self, payload: &Payload, tagged: bool) -> &mut Packet<A> {
        let packet = self.blank();
        packet.tuple.lane = payload.lane;
        packet.tagged = tagged;
        packet.network = payload.offset;
        packet
    }

    /// A packet that begins with its IP header.
    #[inline(always)]
    pub fn blank<A: Version>(&mut self) -> &mut Packet<A> {
        const { assert!(size_of::<Packet<A>>() <= size_of::<Packet<Ip6>>()) };
        const { assert!(align_of::<Packet<A>>() == align_of::<Packet<Ip6>>()) };
        let packet = self.0.as_mut_ptr().cast::<Packet<A>>();
        // SAFETY: large enough and aligned (asserted above). Zeros are a packet: an address of zeros (`Plain`),
        // numbers, `false`, and the first kind. Word by word, since the compiler would call a function that fills
        // memory byte by byte.
        unsafe {
            let words = packet.cast::<u32>();
            for word in 0..size_of::<Packet<A>>() / size_of::<u32>() {
                words.add(word).write_volatile(0);
            }
            &mut *packet
        }
    }
}

impl Kind {
    /// Whether the packet is one of several fragments.
    #[inline(always)]
    pub fn is_fragment(self) -> bool {
        matches!(self, Self::FirstFragment | Self::LaterFragment)
    }
}

impl<A: Version> Packet<A> {
    /// Stores the offsets of the packet's parts, given in bytes from the start of the IP header.
    #[inline(always)]
    fn measure(&mut self, header_len: usize, length: u32) {
        self.transport = u32::from(self.network) + header_len as u32;
        self.end = u32::from(self.network) + length;
    }

    /// Whether the packet ends before so many bytes of its transport header.
    #[inline(always)]
    fn lacks(&self, header_len: u16) -> bool {
        self.transport + u32::from(header_len) > self.end
    }

    #[inline(always)]
    fn holds(&self, header_len: u16) -> Result<(), DropReason> {
        if self.lacks(header_len) { Err(DropReason::Malformed) } else { Ok(()) }
    }

    /// Offset of the IP header in the frame.
    #[inline(always)]
    pub fn network(&self) -> usize {
        self.network.into()
    }

    /// Offset of the transport header in the frame.
    #[inline(always)]
    pub fn transport(&self) -> usize {
        self.transport as usize
    }
}

/// A tuple without ports.
#[inline(always)]
fn tuple<A>(source: A, destination: A, protocol: u8, lane: Lane) -> Tuple<A> {
    Tuple { source, destination, ports: Ports::NONE, lane: lane.of(protocol) }
}

impl Ipv4Header {
    #[inline(always)]
    fn tuple(&self, lane: Lane) -> Tuple<Ip4> {
        tuple(self.source, self.destination, self.protocol, lane)
    }

    /// Length of the header with its options, and which part of the packet follows.
    #[inline(always)]
    fn shape(&self) -> Result<(usize, Part), DropReason> {
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
    /// Traffic class and flow label from the first word, without the version: routing distinguishes packets by them.
    #[inline(always)]
    pub fn flow_information(&self) -> u32 {
        let [a, b, c] = self.flow_label;
        u32::from_ne_bytes([self.version_and_class & 15, a, b, c])
    }

    #[inline(always)]
    fn tuple(&self, lane: Lane) -> Tuple<Ip6> {
        tuple(self.source, self.destination, self.next_header, lane)
    }
}

/// The extension header that every router reads.
pub const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
/// The authentication header (RFC 4302).
pub const AUTHENTICATION: u8 = 51;
const DESTINATION: u8 = 60;

/// Whether a "next header" is one that has a next one. A mobility header has none (RFC 6275, 6.1.1).
#[inline(always)]
pub fn is_extension(number: u8) -> bool {
    matches!(number, HOP_BY_HOP | ROUTING | FRAGMENT | AUTHENTICATION | DESTINATION)
}

/// Moves the packet's protocol and transport offset behind the extension headers.
#[inline(always)]
fn extension_headers<B: Bytes>(bytes: &B, packet: &mut Packet<Ip6>) -> Result<Part, DropReason> {
    const LIMIT: usize = 8;
    let mut part = Part::Whole;
    for _ in 0..LIMIT {
        let protocol = packet.tuple.lane.protocol();
        if !is_extension(protocol) {
            return Ok(part);
        }
        // No header is shorter.
        if packet.transport + 8 > packet.end {
            return Err(DropReason::Malformed);
        }
        let [next, length, third, fourth, identification @ ..]: [u8; 8] = bytes.load(packet.transport())?;
        let length = u32::from(length);
        packet.tuple.lane = packet.tuple.lane.of(next);
        packet.transport += match protocol {
            // Only the first one is processed by hosts (RFC 8200, 4.1).
            HOP_BY_HOP if packet.transport() != packet.network() + IPV6_LEN => {
                return Err(DropReason::Malformed);
            }
            // The address that was judged is not where a packet goes that has segments left; type 0 is not even to be
            // looked at (RFC 5095).
            ROUTING if third == 0 || fourth != 0 => return Err(DropReason::SourceRoute),
            // A fragment of a fragment: one of the two would be judged by the wrong packet's ports.
            FRAGMENT if part == Part::First => return Err(DropReason::Malformed),
            FRAGMENT => {
                let position = u16::from_be_bytes([third, fourth]);
                packet.identification = u32::from_ne_bytes(identification);
                if position & 0xfff8 != 0 {
                    return Ok(Part::Later { offset: position & 0xfff8 });
                }
                // Without the "more" bit it is an atomic fragment (RFC 6946), a whole packet.
                if position & 1 != 0 {
                    part = Part::First;
                }
                8
            }
            AUTHENTICATION => (length + 2) * 4,
            _ => (length + 1) * 8,
        };
    }
    Err(DropReason::ExtensionHeaders)
}

/// Reads the transport header. `IN_PLACE`: it may be read in place.
#[inline(always)]
fn read_transport<A: Version, const IN_PLACE: bool, B: Bytes>(
    bytes: &B,
    packet: &mut Packet<A>,
    place: &Place,
) -> Result<(), DropReason> {
    let offset = packet.transport();
    let protocol = packet.tuple.lane.protocol();
    let plain = IN_PLACE && place.plain;
    if packet.end > bytes.length() || packet.transport > packet.end {
        return Err(DropReason::Malformed);
    }
    match place.part {
        Part::Whole => {}
        Part::First => {
            if packet.lacks(fragment::header_len(protocol)) {
                return Err(DropReason::FragmentTiny);
            }
            packet.kind = Kind::FirstFragment;
        }
        Part::Later { offset } => {
            if offset < fragment::header_len(protocol) {
                return Err(DropReason::FragmentTiny);
            }
            packet.kind = Kind::LaterFragment;
            return Ok(());
        }
    }
    match protocol {
        TCP => {
            packet.holds(fragment::header_len(TCP))?;
            let tcp: TcpHeader = bytes.header(plain, place.usual, offset)?;
            set_ports(packet, tcp.ports);
            packet.signal = Signal { flags: tcp.flags };
        }
        UDP => {
            packet.holds(fragment::header_len(UDP))?;
            let ports = bytes.header(plain, place.usual, offset)?;
            set_ports(packet, ports);
        }
        SCTP => {
            packet.holds(fragment::header_len(SCTP))?;
            let sctp: SctpHeader = bytes.header(plain, place.usual, offset)?;
            set_ports(packet, sctp.ports);
            packet.signal = Signal::of_chunk(sctp.chunk);
        }
        // Rules cannot refer to their ports; the flow table distinguishes flows by them.
        DCCP | UDP_LITE => {
            packet.holds(fragment::header_len(protocol))?;
            packet.tuple.ports = bytes.header(plain, place.usual, offset)?;
        }
        number if number == A::ICMP => {
            packet.holds(fragment::header_len(ICMP))?;
            let message: IcmpHeader = bytes.header(plain, place.usual, offset)?;
            packet.icmp_type = message.kind;
            icmp::set_echo(&mut packet.tuple, &message);
            if let Some(kind) = icmp::kind_of::<A>(message.kind, place)? {
                packet.kind = kind;
            }
        }
        _ => {}
    }
    Ok(())
}

#[inline(always)]
fn set_ports<A>(packet: &mut Packet<A>, ports: Ports) {
    packet.tuple.ports = ports;
    packet.has_ports = true;
}
