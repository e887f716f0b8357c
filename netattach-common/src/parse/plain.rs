//! Fast parser for the most common packets: whole TCP and UDP packets without tags, options and extension headers,
//! whose headers can be read in place. [`walk`](super::walk) reads all other packets, and would read these with the
//! same result.

use super::bytes::Bytes;
use super::frame::ETHERNET_LEN;
use super::header::{IPV4_LEN, IPV6_LEN, Ipv4Header, Ipv6Header, Part, TcpHeader};
use super::packet::Packet;
use super::version::Version;
use crate::flow::{Lane, Signal, Tuple};
use crate::fragment;
use crate::protocol::{TCP, UDP};
use crate::{Ip4, Ip6};

/// The fields read from such a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Headers<A> {
    /// Addresses, protocol, ports.
    pub tuple: Tuple<A>,
    /// Its effect on a connection.
    pub signal: Signal,
}

impl<A: Version> Headers<A> {
    /// The packet with these fields, as needed for its flow and policies: the offsets of its parts are left out.
    #[inline(always)]
    pub fn packet(&self) -> Packet<A> {
        Packet::of_flow(self.tuple, self.signal)
    }
}

/// Reads an IPv4 packet behind an Ethernet header without tags. `None`: it is another kind of packet, or malformed.
#[inline(always)]
pub fn ipv4<B: Bytes>(bytes: &B) -> Option<Headers<Ip4>> {
    let there = bytes.at::<Ipv4Header>(ETHERNET_LEN).ok()?;
    let ip: &Ipv4Header = &there;
    let Ok((IPV4_LEN, Part::Whole)) = ip.shape() else { return None };
    transport(bytes, ip.tuple(Lane::NONE), IPV4_LEN, u16::from_be(ip.total_len).into())
}

/// Reads an IPv6 packet, as [`ipv4`].
#[inline(always)]
pub fn ipv6<B: Bytes>(bytes: &B) -> Option<Headers<Ip6>> {
    let there = bytes.at::<Ipv6Header>(ETHERNET_LEN).ok()?;
    let ip: &Ipv6Header = &there;
    if ip.version_and_class >> 4 != 6 {
        return None;
    }
    let length = IPV6_LEN as u32 + u32::from(u16::from_be(ip.payload_len));
    transport(bytes, ip.tuple(Lane::NONE), IPV6_LEN, length)
}

/// `length`: of the packet from its IP header on. A packet without a length in its header (`BIG TCP`) counts as too
/// short.
#[inline(always)]
fn transport<A, B: Bytes>(
    bytes: &B,
    mut tuple: Tuple<A>,
    header_len: usize,
    length: u32,
) -> Option<Headers<A>> {
    let holds = |transport_len: u16| length >= header_len as u32 + u32::from(transport_len);
    if ETHERNET_LEN as u32 + length > bytes.length() {
        return None;
    }
    let offset = ETHERNET_LEN + header_len;
    let (ports, flags) = match tuple.lane.protocol() {
        TCP if holds(fragment::header_len(TCP)) => {
            let tcp = bytes.at::<TcpHeader>(offset).ok()?;
            (tcp.ports, tcp.flags)
        }
        UDP if holds(fragment::header_len(UDP)) => (*bytes.at(offset).ok()?, 0),
        _ => return None,
    };
    tuple.ports = ports;
    Some(Headers { tuple, signal: Signal { flags } })
}

#[cfg(test)]
mod tests {
    use super::super::bytes::InMemory;
    use super::super::frame::{Payload, ethertype};
    use super::super::packet::{Kind, Packet, Room};
    use super::super::version::Version;
    use super::super::walk;
    use super::*;
    use proptest::prelude::*;

    /// Frames with ten bytes of payload: TCP and UDP, by IPv4 and IPv6.
    fn frame(six: bool, udp: bool) -> Vec<u8> {
        let (ip_len, transport_len) = (if six { 40 } else { 20 }, if udp { 8 } else { 20 });
        let mut frame = vec![0; 14 + ip_len + transport_len + 10];
        let protocol = if udp { UDP } else { TCP };
        if six {
            frame[12..14].copy_from_slice(&[0x86, 0xdd]);
            (frame[14], frame[19], frame[20]) = (0x60, transport_len as u8 + 10, protocol);
        } else {
            frame[12..14].copy_from_slice(&[8, 0]);
            (frame[14], frame[17], frame[23]) = (0x45, (ip_len + transport_len) as u8 + 10, protocol);
        }
        for (at, byte) in frame[14 + ip_len..].iter_mut().enumerate() {
            *byte = 0x11 + at as u8;
        }
        frame
    }

    /// The result of the walk, if the packet is of this kind.
    fn of<A: Version>(packet: &Packet<A>, header_len: usize) -> Option<Headers<A>> {
        let whole = packet.kind == Kind::Flow && packet.transport() == ETHERNET_LEN + header_len;
        let known = [TCP, UDP].contains(&packet.tuple.lane.protocol());
        (whole && known).then_some(Headers { tuple: packet.tuple, signal: packet.signal })
    }

    /// The results of both.
    fn found(six: bool, read: &InMemory<'_>) -> [Option<(Vec<u8>, Signal)>; 2] {
        fn said<A: Version + core::fmt::Debug>(headers: Headers<A>) -> (Vec<u8>, Signal) {
            (format!("{:?}", headers.tuple).into_bytes(), headers.signal)
        }
        let payload = |ethertype| Payload { ethertype, offset: ETHERNET_LEN as u16, lane: Lane::NONE };
        let mut room = Room::default();
        if six {
            let packet = room.begin::<Ip6>(&payload(ethertype::IPV6), false);
            let walked = walk::ipv6(read, packet).ok().and_then(|()| of(packet, IPV6_LEN));
            [ipv6(read).map(said), walked.map(said)]
        } else {
            let packet = room.begin::<Ip4>(&payload(ethertype::IPV4), false);
            let walked = walk::ipv4(read, packet).ok().and_then(|()| of(packet, IPV4_LEN));
            [ipv4(read).map(said), walked.map(said)]
        }
    }

    #[test]
    fn segments_and_datagrams_are_read() {
        for (six, udp) in [(false, false), (false, true), (true, false), (true, true)] {
            let bytes = &frame(six, udp);
            let read = InMemory { bytes, in_place: bytes.len(), is_uncut: false, tag_beside: None };
            let [plain, walked] = found(six, &read);
            assert!(plain.is_some(), "{six} {udp}");
            assert_eq!(plain, walked, "{six} {udp}");
        }
    }

    proptest! {
        /// A packet with changed bytes, cut off, or not in place, is read as the walk reads it, or is not of this
        /// kind. Except packets without a length, which only the walk reads.
        #[test]
        fn the_walk_finds_the_same(
            (six, udp, is_uncut) in any::<(bool, bool, bool)>(),
            changes in proptest::collection::vec((14usize..60, any::<u8>()), 0..4),
            cut in 0usize..24,
            in_place in 0usize..100,
        ) {
            let mut bytes = frame(six, udp);
            bytes.truncate(bytes.len() - cut);
            for (at, byte) in changes {
                if let Some(there) = bytes.get_mut(at) {
                    *there = byte;
                }
            }
            let read = InMemory { bytes: &bytes, in_place, is_uncut, tag_beside: None };
            let [plain, walked] = found(six, &read);
            if is_uncut {
                prop_assert!(plain.is_none() || plain == walked, "{:?} {:?}", plain, walked);
            } else {
                prop_assert_eq!(plain, walked);
            }
        }
    }
}
