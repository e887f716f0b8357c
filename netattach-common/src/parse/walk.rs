//! From bytes to a [`Packet`]: the bounds-checked walk over IP, extension headers and transport.

use super::bytes::Bytes;
use super::frame::ETHERNET_LEN;
use super::header::{
    AUTHENTICATION, FRAGMENT, HOP_BY_HOP, IPV4_LEN, IPV6_LEN, IcmpHeader, Ipv4Header, Ipv6Header, Part,
    ROUTING, SctpHeader, TcpHeader, is_extension,
};
use super::packet::{Kind, Packet, Place};
use super::version::Version;
use super::{echo, icmp};
use crate::flow::Signal;
use crate::fragment;
use crate::protocol::{DCCP, ICMP, SCTP, TCP, UDP, UDP_LITE};
use crate::{DropReason, Ip4, Ip6, Ports};

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

/// Reads an IPv4 packet of which no byte can be read in place.
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

/// Reads an IPv6 packet of which no byte can be read in place.
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

/// The end of a packet whose IPv6 header has no length, taken from a jumbo option (RFC 2675, 2). The option must be
/// the first of the hop-by-hop options, where the kernel puts it. Without one Linux counts all bytes that follow as
/// the packet, and other systems none.
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
            // A packet with segments left goes to another address than the judged one; type 0 must not be processed
            // at all (RFC 5095).
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
            echo::set_echo(&mut packet.tuple, &message);
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
