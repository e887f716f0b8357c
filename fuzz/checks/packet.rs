//! The packet programs' parser, from the source that they are compiled from, compared with a parser that shares no code
//! with it.
//!
//! A panic is a finding, and so is any difference between the two: tags, addresses, ports, fragments, extension
//! headers, quoted packets, options, ARP.

use std::net::{IpAddr, Ipv6Addr};

use netattach_common::flow::{Lane, Tuple};
use netattach_common::parse::{
    Bytes, ETHERNET_LEN, EthernetHeader, InMemory, Kind, Packet, Payload, Room, Version, arp, ethertype,
    frame, header, icmp, options, walk,
};
use netattach_common::{Address, DropReason, Ip4, Ip6, Mac};

use crate::reading::{self, Reading};

/// Bits of the first byte: the packet begins with its IP header, as behind the node's translation; it is still to be
/// cut into segments; it has a tag beside its bytes; many bytes follow it.
const ROUTED: u8 = 1;
const UNCUT: u8 = 2;
const TAGGED: u8 = 4;
const LONG: u8 = 8;

/// More bytes than an IP header's length field can express.
const MUCH: usize = 70_000;

/// The attachment's Ethernet address.
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

// Flags beside the packet's bytes, the number of bytes in place beyond its headers, its tag; then the bytes.
pub(crate) fn check(data: &[u8]) {
    let Some((&[how, place, high, low], bytes)) = data.split_first_chunk::<4>() else { return };
    let mut bytes = bytes.to_vec();
    if how & LONG != 0 {
        bytes.resize(MUCH, 0);
    }
    let tag_beside = (how & TAGGED != 0).then_some(u16::from_be_bytes([high, low]));
    let in_place = header::HEADERS_V4 + usize::from(place);
    let read = InMemory { bytes: &bytes, in_place, is_uncut: how & UNCUT != 0, tag_beside };
    if how & ROUTED != 0 { routed(&read) } else { framed(&read) }
}

fn routed(read: &InMemory<'_>) {
    let mut room = Room::default();
    match read.load::<u8>(0).map(|byte| byte >> 4) {
        Ok(4) => {
            let packet = room.blank::<Ip4>();
            compare(read, 0, walk::copied_ipv4(read, packet), packet);
        }
        Ok(6) => {
            let packet = room.blank::<Ip6>();
            compare(read, 0, walk::copied_ipv6(read, packet), packet);
        }
        _ => {}
    }
}

fn framed(read: &InMemory<'_>) {
    let Ok(header) = read.at::<EthernetHeader>(0) else {
        assert!(read.bytes.len() < ETHERNET_LEN);
        return;
    };
    let number = u16::from_be(header.ethertype);
    let tagged = read.tag_beside.is_some() || frame::is_tag(number);
    let mut payload = Payload { ethertype: number, offset: ETHERNET_LEN as u16, lane: Lane::NONE };
    // As `may_use_vlan`: some are allowed.
    let allowed = |id: u16| id % 8 != 7;
    if tagged {
        let peeled = frame::peel(read, &mut payload, allowed);
        let said = reading::tags(read.bytes, read.tag_beside);
        let said = said.filter(|(ids, ..)| ids.iter().all(|id| allowed(*id)));
        assert_eq!(peeled.is_ok(), said.is_some(), "tags");
        let Some((ids, said, offset)) = said else { return };
        assert_eq!((payload.ethertype, usize::from(payload.offset)), (said, offset));
        // A tag without an id is of no VLAN.
        let ids = ids
            .iter()
            .filter(|id| **id != 0)
            .chain(&[0, 0])
            .take(2)
            .fold(0, |ids, id| ids << 12 | u32::from(*id));
        assert_eq!(payload.lane.tags()[..], ids.to_be_bytes()[1..]);
    }
    let offset = usize::from(payload.offset);
    // The number of bytes that `frame::pull_headers` makes readable in place.
    let headers = if payload.ethertype == ethertype::IPV6 { header::HEADERS_V6 } else { header::HEADERS_V4 };
    let read = &InMemory { in_place: read.in_place.max(headers), ..*read };
    let mut room = Room::default();
    match payload.ethertype {
        ethertype::ARP => {
            assert_eq!(arp::fits(read.length(), payload.offset), read.bytes.len() <= offset + 50);
            if arp::fits(read.length(), payload.offset) {
                let padding = read.bytes.get(offset + 28..).unwrap_or_default();
                let is_padded = arp::check_padding(read, arp::end(payload.offset)).is_ok();
                assert_eq!(is_padded, padding.iter().all(|byte| *byte == 0));
            }
            let claim = arp::read(read, !tagged, payload.offset);
            let said = reading::arp(&read.bytes[offset.min(read.bytes.len())..]);
            assert_eq!(claim.ok().map(|it| (it.mac.octets, wide(it.address))), said.map(in_ipv6));
        }
        ethertype::IPV4 => {
            let packet = room.begin::<Ip4>(&payload, tagged);
            compare(read, offset, walk::ipv4(read, packet), packet);
        }
        ethertype::IPV6 => {
            let packet = room.begin::<Ip6>(&payload, tagged);
            compare(read, offset, walk::ipv6(read, packet), packet);
        }
        _ => {}
    }
}

fn in_ipv6((mac, address): ([u8; 6], IpAddr)) -> ([u8; 6], Ipv6Addr) {
    (mac, mapped(address))
}

fn mapped(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

fn wide(address: impl Address) -> Ipv6Addr {
    address.widen().into()
}

fn compare<A: Version>(
    read: &InMemory<'_>,
    offset: usize,
    outcome: Result<(), DropReason>,
    packet: &Packet<A>,
) {
    let version = if A::BITS == 32 { 4 } else { 6 };
    let ip = read.bytes.get(offset..).unwrap_or_default();
    let said = reading::packet(ip, version, read.is_uncut).filter(|said| !said.is_broken_discovery());
    assert_eq!(outcome.is_ok(), said.is_some(), "{outcome:?} {said:?}");
    let Some(said) = said else { return };
    let tuple = &packet.tuple;
    assert_eq!(
        (wide(tuple.source), wide(tuple.destination)),
        (mapped(said.source), mapped(said.destination))
    );
    assert_eq!(tuple.lane.protocol(), said.protocol);
    assert_eq!(packet.network(), offset);
    assert_eq!(packet.end as usize, read.bytes.len() - said.behind);
    assert_eq!(packet.kind, kind(&said), "{said:?}");
    assert_eq!(packet.identification.to_ne_bytes()[..], identification(&said.identification));
    let said_ports = said.ports().is_some();
    assert_eq!((packet.has_ports, packet.has_options), (said_ports, !said.options.is_empty()));
    assert_eq!((tuple.ports.source().number(), tuple.ports.destination().number()), ends(&said), "{said:?}");
    let beyond = read.bytes.get(read.bytes.len() - said.behind - said.payload.len()..).unwrap_or_default();
    assert_eq!(packet.signal.flags, if said.later { 0 } else { signal(said.protocol, beyond) });
    assert_eq!(packet.icmp_type, said.icmp().unwrap_or_default());
    if said.later {
        return;
    }
    assert_eq!(packet.transport(), packet.end as usize - said.payload.len());
    if packet.kind == Kind::IcmpError {
        quoted(read, packet);
    }
    if packet.has_options {
        let (from, to) = ((offset + header::IPV4_LEN) as u32, packet.transport);
        assert_eq!(options::ipv4(read, from, to).is_ok(), reading::options_are_sound(&said.options));
    }
    neighbour(read, packet, &said);
}

fn identification(said: &[u8]) -> [u8; 4] {
    match *said {
        [a, b] => u32::from(u16::from_ne_bytes([a, b])).to_ne_bytes(),
        [a, b, c, d] => [a, b, c, d],
        _ => [0; 4],
    }
}

fn kind(said: &Reading) -> Kind {
    let is_error = match said.icmp() {
        Some(message) if said.source.is_ipv4() => [3, 4, 5, 11, 12].contains(&message),
        Some(message) => (1..=4).contains(&message),
        None => false,
    };
    match said {
        _ if said.later => Kind::LaterFragment,
        _ if is_error => Kind::IcmpError,
        _ if said.claims_the_link() => Kind::LinkControl,
        _ if said.first => Kind::FirstFragment,
        _ => Kind::Flow,
    }
}

/// The values that stand for ports in a flow.
fn ends(said: &Reading) -> (u16, u16) {
    if said.later {
        return (0, 0);
    }
    transport_ends(said.protocol, said.source.is_ipv4(), &said.payload).expect("it is whole")
}

/// `None`: too few bytes of it are there.
fn transport_ends(protocol: u8, is_v4: bool, transport: &[u8]) -> Option<(u16, u16)> {
    let number = |at: usize| Some(u16::from_be_bytes([*transport.get(at)?, *transport.get(at + 1)?]));
    let swapped = |(a, b)| (b, a);
    Some(match (protocol, is_v4) {
        (6 | 17 | 33 | 132 | 136, _) => (number(0)?, number(2)?),
        (1, true) | (58, false) => {
            let (message, identifier) = (*transport.first()?, number(4)?);
            number(6)?;
            let echo = (identifier, identifier.wrapping_add(1));
            let typed = |request: u8| (256 + u16::from(request), 65_535);
            match (message, is_v4) {
                (8, true) | (128, false) => echo,
                (0, true) | (129, false) => swapped(echo),
                (14 | 16 | 18, true) | (140 | 161, false) | (43, true) => swapped(typed(message - 1)),
                _ => typed(message),
            }
        }
        _ => (0, 0),
    })
}

/// TCP flags; for SCTP the meaning of its first chunk, which may lie behind the packet.
fn signal(protocol: u8, transport: &[u8]) -> u8 {
    const FIN: u8 = 1;
    const SYN: u8 = 2;
    const RST: u8 = 4;
    const ACK: u8 = 16;
    match protocol {
        6 => transport[13],
        132 => match transport[12] {
            1 => SYN,
            2 => SYN | ACK,
            6 => RST,
            7 | 8 | 14 => FIN | ACK,
            _ => ACK,
        },
        _ => 0,
    }
}

/// The packet that an ICMP error quotes: its answer has the same ends, swapped.
fn quoted<A: Version>(read: &InMemory<'_>, packet: &Packet<A>) {
    let mut answer: Tuple<A> = packet.tuple;
    let is_told = A::answer_to_quoted(read, packet.transport() + 8, &mut answer);
    let quoted = &read.bytes[packet.transport() + 8..];
    let said = if A::BITS == 32 { quoted_v4(quoted) } else { quoted_v6(quoted) };
    assert_eq!(is_told, said.is_some());
    let Some((source, destination, protocol, (from, to))) = said else {
        assert!(answer == packet.tuple, "left alone");
        return;
    };
    assert_eq!((wide(answer.source), wide(answer.destination)), (destination, source));
    assert_eq!((answer.ports.source().number(), answer.ports.destination().number()), (to, from));
    assert_eq!(answer.lane, packet.tuple.lane.of(protocol));
}

type Quoted = (Ipv6Addr, Ipv6Addr, u8, (u16, u16));

fn quoted_v4(ip: &[u8]) -> Option<Quoted> {
    let header = ip.get(..20)?;
    let words = usize::from(header[0] & 15);
    let later = u16::from_be_bytes([header[6] & 0x1f, header[7]]) != 0;
    if header[0] >> 4 != 4 || words < 5 || later {
        return None;
    }
    let address = |at: usize| mapped(IpAddr::from([ip[at], ip[at + 1], ip[at + 2], ip[at + 3]]));
    let ends = transport_ends(header[9], true, ip.get(words * 4..).unwrap_or_default())?;
    Some((address(12), address(16), header[9], ends))
}

fn quoted_v6(ip: &[u8]) -> Option<Quoted> {
    let header = ip.get(..40)?;
    let address = |at: usize| Ipv6Addr::from(std::array::from_fn::<u8, 16, _>(|byte| header[at + byte]));
    let ends = transport_ends(header[6], false, &ip[40..])?;
    Some((address(8), address(24), header[6], ends))
}

/// Messages by which hosts on a link find each other.
fn neighbour<A: Version>(read: &InMemory<'_>, packet: &Packet<A>, said: &Reading) {
    let Some(message) = said.message() else { return };
    let tuple = Tuple {
        source: packet.tuple.source.widen(),
        destination: packet.tuple.destination.widen(),
        ports: packet.tuple.ports,
        lane: packet.tuple.lane,
    };
    let mut room = Room::default();
    let packet = {
        let of_ipv6 = room.blank::<Ip6>();
        of_ipv6.tuple = tuple;
        (of_ipv6.transport, of_ipv6.end, of_ipv6.kind) = (packet.transport, packet.end, packet.kind);
        of_ipv6
    };
    if packet.kind == Kind::LinkControl {
        assert_eq!(icmp::form(read, packet), Ok(said.is_formed().then_some(message)), "{said:?}");
    }
    let skipped = match message {
        133 => 8,
        135 | 136 => 24,
        _ => return,
    };
    let found =
        options::neighbour(read, &Mac { octets: MAC }, packet.transport() + skipped, packet.end as usize);
    assert_eq!(found.is_ok(), said.names_only(MAC, skipped), "{said:?}");
}
