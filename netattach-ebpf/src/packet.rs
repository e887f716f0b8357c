//! From bytes to a [`Packet`]: the bounds-checked walk over IP, extension headers and transport.

use core::mem::MaybeUninit;

use aya_ebpf::programs::TcContext;
use netattach_common::{
    Address, DropReason, Ip4, Ip6, Port,
    attachment::flag,
    flow::{Signal, Tuple},
    fragment,
    protocol::{ICMP, ICMPV6, SCTP, TCP, UDP},
};

use crate::{
    antispoof,
    classifier::Scope,
    frame::{ETHERNET_LEN, Frame, ethertype, header, load},
    icmp::{self, IcmpHeader},
};

const IPV4_LEN: usize = size_of::<Ipv4Header>();
/// Length of an IPv6 header.
pub(crate) const IPV6_LEN: usize = size_of::<Ipv6Header>();
/// Ethernet, IPv4 and the part of TCP that is read, which is the longest of the transports'; ARP is shorter. What a pod's
/// own TCP sends has its headers in place and its payload elsewhere: asking for one byte more than the headers would have
/// each such packet copied.
pub(crate) const HEADERS_V4: usize = ETHERNET_LEN + IPV4_LEN + size_of::<TcpHeader>();
/// The same with IPv6.
pub(crate) const HEADERS_V6: usize = ETHERNET_LEN + IPV6_LEN + size_of::<TcpHeader>();

/// What differs between the versions of IP, apart from the bytes of their headers.
pub(crate) trait Version: Address {
    /// What Ethernet calls it.
    const ETHERTYPE: u16;
    /// Protocol number of its control messages.
    const ICMP: u8;
    /// The flag of attachments that get these messages whatever the policy says.
    const ACCEPT_ICMP: u32;
    /// Whether all fragments of a packet name the same protocol.
    const FRAGMENTS_NAME_PROTOCOL: bool;
    /// Reads a packet. Whoever calls it has room for it.
    fn read(ctx: &TcContext, frame: &Frame, packet: &mut MaybeUninit<Packet<Self>>)
    -> Result<(), DropReason>;
    /// Checks what a pod says about itself.
    fn check_sender(
        ctx: &TcContext,
        scope: &Scope<'_>,
        frame: &Frame,
        packet: &Packet<Self>,
    ) -> Result<(), DropReason>;
    /// The tuple of an answer to the packet that an ICMP error quotes at `offset`. `false`: it cannot be told.
    fn answer_to_quoted(ctx: &TcContext, offset: usize, answer: &mut Tuple<Self>) -> bool;
}

impl Version for Ip4 {
    const ETHERTYPE: u16 = ethertype::IPV4;
    const ICMP: u8 = ICMP;
    const ACCEPT_ICMP: u32 = flag::ACCEPT_ICMP;
    const FRAGMENTS_NAME_PROTOCOL: bool = true;

    #[inline(always)]
    fn read(
        ctx: &TcContext,
        frame: &Frame,
        packet: &mut MaybeUninit<Packet<Self>>,
    ) -> Result<(), DropReason> {
        ipv4(ctx, frame, packet)
    }

    #[inline(always)]
    fn check_sender(
        ctx: &TcContext,
        scope: &Scope<'_>,
        frame: &Frame,
        packet: &Packet<Self>,
    ) -> Result<(), DropReason> {
        antispoof::ipv4(ctx, scope, frame, packet)
    }

    #[inline(never)]
    fn answer_to_quoted(ctx: &TcContext, offset: usize, answer: &mut Tuple<Self>) -> bool {
        let Ok(header) = load::<Ipv4Header>(ctx, offset) else {
            return false;
        };
        match header.shape() {
            Ok((header_len, Part::Whole | Part::First)) => {
                answer_ports(ctx, offset + header_len, header.tuple(), answer)
            }
            _ => false,
        }
    }
}

impl Version for Ip6 {
    const ETHERTYPE: u16 = ethertype::IPV6;
    const ICMP: u8 = ICMPV6;
    const ACCEPT_ICMP: u32 = flag::ACCEPT_ICMPV6;
    const FRAGMENTS_NAME_PROTOCOL: bool = false;

    #[inline(always)]
    fn read(
        ctx: &TcContext,
        frame: &Frame,
        packet: &mut MaybeUninit<Packet<Self>>,
    ) -> Result<(), DropReason> {
        ipv6(ctx, frame, packet)
    }

    #[inline(always)]
    fn check_sender(
        ctx: &TcContext,
        scope: &Scope<'_>,
        _: &Frame,
        packet: &Packet<Self>,
    ) -> Result<(), DropReason> {
        antispoof::ipv6(ctx, scope, packet)
    }

    #[inline(never)]
    fn answer_to_quoted(ctx: &TcContext, offset: usize, answer: &mut Tuple<Self>) -> bool {
        match load::<Ipv6Header>(ctx, offset) {
            // A quoted packet with extension headers is too rare to walk twice for.
            Ok(header) => answer_ports(ctx, offset + IPV6_LEN, header.tuple(), answer),
            Err(_) => false,
        }
    }
}

#[inline(always)]
fn answer_ports<A: Version>(
    ctx: &TcContext,
    transport: usize,
    mut quoted: Tuple<A>,
    answer: &mut Tuple<A>,
) -> bool {
    match quoted.protocol {
        TCP | UDP | SCTP => {
            let Ok(ports) = load::<Ports>(ctx, transport) else {
                return false;
            };
            quoted.source_port = ports.source;
            quoted.destination_port = ports.destination;
        }
        number if number == A::ICMP => {
            let Ok(message) = load(ctx, transport) else {
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
pub(crate) struct Ipv4Header {
    pub(crate) version_and_words: u8,
    pub(crate) service: u8,
    total_len: u16,
    identification: u16,
    fragment: u16,
    pub(crate) hop_limit: u8,
    pub(crate) protocol: u8,
    pub(crate) checksum: u16,
    pub(crate) source: Ip4,
    pub(crate) destination: Ip4,
}

/// An IPv6 header (RFC 8200, 3).
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Ipv6Header {
    version_and_class: u8,
    flow_label: [u8; 3],
    payload_len: u16,
    pub(crate) next_header: u8,
    pub(crate) hop_limit: u8,
    pub(crate) source: Ip6,
    pub(crate) destination: Ip6,
}

/// A TCP header (RFC 9293, 3.1) up to the flags.
#[repr(C)]
#[derive(Clone, Copy)]
struct TcpHeader {
    ports: Ports,
    sequence: [u16; 2],
    acknowledgement: [u16; 2],
    data_offset: u8,
    flags: u8,
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

#[repr(C)]
#[derive(Clone, Copy)]
struct Ports {
    source: Port,
    destination: Port,
}

/// How a packet takes part in flows. A number, not an enumeration: see [`Packet::forget`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kind(u8);

#[allow(non_upper_case_globals, reason = "stand for the variants of an enumeration")]
impl Kind {
    /// Ordinary traffic of a flow.
    pub(crate) const Flow: Self = Self(0);
    /// The same, and the first fragment of it.
    pub(crate) const FirstFragment: Self = Self(1);
    /// A fragment without the transport header.
    pub(crate) const LaterFragment: Self = Self(2);
    /// An ICMP error about another packet.
    pub(crate) const IcmpError: Self = Self(3);
    /// Neighbour discovery or a multicast listener message on its link.
    pub(crate) const LinkControl: Self = Self(4);
}

/// What the programs need to know about an IP packet.
pub(crate) struct Packet<A> {
    /// Addresses, protocol, ports.
    pub(crate) tuple: Tuple<A>,
    /// How to judge it.
    pub(crate) kind: Kind,
    /// What it means to a connection.
    pub(crate) signal: Signal,
    /// Whether the ports in `tuple` are ports (rather than an echo identifier or nothing).
    pub(crate) has_ports: bool,
    /// Whether the IPv4 header has options.
    pub(crate) has_options: bool,
    /// Type of an ICMP message.
    pub(crate) icmp_type: u8,
    /// VLAN tags as they stand in keys.
    pub(crate) tags: [u8; 3],
    /// What the fragments of one packet share.
    pub(crate) identification: u32,
    /// Offset of the transport header in the frame.
    transport: u32,
    /// Offset of the packet's end in the frame.
    pub(crate) end: u32,
}

/// Which part of a packet a fragment is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// All of it.
    Whole,
    /// Begins with the transport header.
    First,
    /// Does not.
    Later {
        /// Bytes of the packet before it.
        offset: u16,
    },
}

/// What the IP header says about the transport header.
pub(crate) struct Place {
    /// How much of the packet it follows.
    pub(crate) part: Part,
    /// TTL or hop limit.
    pub(crate) hop_limit: u8,
    /// Whether it is where it usually is: no tags, options or extension headers before it.
    plain: bool,
    /// And where that is.
    usual: usize,
}

/// Whether a protocol's transport header begins with two ports.
#[inline(always)]
pub(crate) fn has_ports(protocol: u8) -> bool {
    matches!(protocol, TCP | UDP | SCTP)
}

/// Reads an IPv4 packet. Out of line, as its twin: the headers need not stay on the stack, which is small.
#[inline(never)]
fn ipv4(ctx: &TcContext, frame: &Frame, room: &mut MaybeUninit<Packet<Ip4>>) -> Result<(), DropReason> {
    let ip: Ipv4Header = header(ctx, !frame.tagged, ETHERNET_LEN, frame.network)?;
    let (header_len, part) = ip.shape()?;
    let packet = room.write(Packet::new(frame, ip.tuple(), header_len, u16::from_be(ip.total_len).into()));
    packet.has_options = header_len != IPV4_LEN;
    packet.identification = ip.identification.into();
    let plain = !frame.tagged && !packet.has_options;
    let place = Place { part, hop_limit: ip.hop_limit, plain, usual: ETHERNET_LEN + IPV4_LEN };
    read_transport(ctx, packet, &place)?;
    packet.forget(ctx);
    Ok(())
}

/// Reads an IPv6 packet, extension headers included (RFC 8200, 4).
#[inline(never)]
fn ipv6(ctx: &TcContext, frame: &Frame, room: &mut MaybeUninit<Packet<Ip6>>) -> Result<(), DropReason> {
    let ip: Ipv6Header = header(ctx, !frame.tagged, ETHERNET_LEN, frame.network)?;
    if ip.version_and_class >> 4 != 6 {
        return Err(DropReason::Malformed);
    }
    let length = IPV6_LEN as u32 + u32::from(u16::from_be(ip.payload_len));
    let packet = room.write(Packet::new(frame, ip.tuple(), IPV6_LEN, length));
    let extended = is_extension(ip.next_header);
    let part = if extended { extension_headers(ctx, packet)? } else { Part::Whole };
    let plain = !frame.tagged && !extended;
    let place = Place { part, hop_limit: ip.hop_limit, plain, usual: ETHERNET_LEN + IPV6_LEN };
    read_transport(ctx, packet, &place)?;
    packet.forget(ctx);
    Ok(())
}

impl<A: Version> Packet<A> {
    /// Has the verifier forget what it knows about the fields that later code branches on, or that are zero in some
    /// packets: it would follow each way through the headers to the end of the program. Words read from the socket
    /// buffer's scratch area can be anything.
    #[inline(always)]
    fn forget(&mut self, ctx: &TcContext) {
        let [a, b, c] = self.tags;
        let [s, t] = self.tuple.source_port.octets;
        let [d, e] = self.tuple.destination_port.octets;
        let known = [
            u32::from_le_bytes([self.tuple.protocol, self.signal.flags, self.kind.0, self.icmp_type]),
            u32::from_le_bytes([a, b, c, u8::from(self.has_ports) | u8::from(self.has_options) << 1]),
            u32::from_le_bytes([s, t, d, e]),
            self.identification,
        ];
        // SAFETY: the context pointer is valid while the program runs; the scratch area is this program's.
        let [first, second, ports, identification] = unsafe {
            let scratch = (&raw mut (*ctx.skb.skb).cb).cast::<u32>();
            [0, 1, 2, 3].map(|word| {
                scratch.add(word).write_volatile(known[word]);
                scratch.add(word).read_volatile()
            })
        };
        let [protocol, flags, kind, icmp_type] = first.to_le_bytes();
        let [a, b, c, has] = second.to_le_bytes();
        let [s, t, d, e] = ports.to_le_bytes();
        self.tuple.protocol = protocol;
        self.tuple.source_port = Port { octets: [s, t] };
        self.tuple.destination_port = Port { octets: [d, e] };
        self.signal = Signal { flags };
        self.kind = Kind(kind);
        self.icmp_type = icmp_type;
        self.tags = [a, b, c];
        self.has_ports = has & 1 != 0;
        self.has_options = has & 2 != 0;
        self.identification = identification;
    }

    /// Offset of the transport header in the frame.
    #[inline(always)]
    pub(crate) fn transport(&self) -> usize {
        self.transport as usize
    }

    /// Lengths in bytes from the beginning of the IP header.
    #[inline(always)]
    fn new(frame: &Frame, tuple: Tuple<A>, header_len: usize, length: u32) -> Self {
        Self {
            tuple,
            kind: Kind::Flow,
            signal: Signal { flags: 0 },
            has_ports: false,
            has_options: false,
            icmp_type: 0,
            tags: frame.tags,
            identification: 0,
            transport: (frame.network + header_len) as u32,
            end: frame.network as u32 + length,
        }
    }
}

impl Ipv4Header {
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

    #[inline(always)]
    fn tuple(&self) -> Tuple<Ip4> {
        Tuple {
            source: self.source,
            destination: self.destination,
            source_port: Port::NONE,
            destination_port: Port::NONE,
            protocol: self.protocol,
        }
    }
}

impl Ipv6Header {
    #[inline(always)]
    fn tuple(&self) -> Tuple<Ip6> {
        Tuple {
            source: self.source,
            destination: self.destination,
            source_port: Port::NONE,
            destination_port: Port::NONE,
            protocol: self.next_header,
        }
    }
}

/// The extension header that every router reads.
pub(crate) const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const DESTINATION: u8 = 60;
const MOBILITY: u8 = 135;

/// Whether a "next header" is one that has a next one.
#[inline(always)]
fn is_extension(number: u8) -> bool {
    matches!(number, HOP_BY_HOP | ROUTING | FRAGMENT | AUTHENTICATION | DESTINATION | MOBILITY)
}

/// Moves the packet's protocol and transport offset behind the extension headers.
#[inline(always)]
fn extension_headers(ctx: &TcContext, packet: &mut Packet<Ip6>) -> Result<Part, DropReason> {
    const LIMIT: usize = 8;
    let mut part = Part::Whole;
    for _ in 0..LIMIT {
        let protocol = packet.tuple.protocol;
        if !is_extension(protocol) {
            return Ok(part);
        }
        // No header is shorter.
        let [next, length, third, fourth, identification @ ..]: [u8; 8] = load(ctx, packet.transport())?;
        let length = u32::from(length);
        packet.tuple.protocol = next;
        packet.transport += match protocol {
            // Type 0 lets a sender choose the way (deprecated by RFC 5095).
            ROUTING if third == 0 => return Err(DropReason::SourceRoute),
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

/// Fills in what the transport header says.
#[inline(always)]
fn read_transport<A: Version>(
    ctx: &TcContext,
    packet: &mut Packet<A>,
    place: &Place,
) -> Result<(), DropReason> {
    let offset = packet.transport();
    let protocol = packet.tuple.protocol;
    match place.part {
        Part::Whole => {}
        Part::First => {
            let end = packet.end.min(ctx.len());
            if packet.transport + u32::from(fragment::header_len(protocol)) > end {
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
            let tcp: TcpHeader = header(ctx, place.plain, place.usual, offset)?;
            set_ports(packet, tcp.ports);
            packet.signal = Signal { flags: tcp.flags };
        }
        UDP => {
            let ports = header(ctx, place.plain, place.usual, offset)?;
            set_ports(packet, ports);
        }
        SCTP => {
            let sctp: SctpHeader = header(ctx, place.plain, place.usual, offset)?;
            set_ports(packet, sctp.ports);
            packet.signal = Signal::of_chunk(sctp.chunk);
        }
        number if number == A::ICMP => {
            let message: IcmpHeader = header(ctx, place.plain, place.usual, offset)?;
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
    packet.tuple.source_port = ports.source;
    packet.tuple.destination_port = ports.destination;
    packet.has_ports = true;
}
