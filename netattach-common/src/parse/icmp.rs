//! ICMP: which messages are errors, and which belong to the link.

use super::bytes::Bytes;
use super::header::{IPV4_LEN, IPV6_LEN, Part};
use super::packet::{Kind, Packet, Place};
use super::version::Version;
use crate::link::{Message, icmpv6};
use crate::protocol::ICMP;
use crate::{DropReason, Ip6};

/// The kind of a message, if it is not ordinary traffic.
///
/// # Errors
/// The message must be dropped.
#[inline(always)]
pub fn kind_of<A: Version>(message: u8, place: &Place) -> Result<Option<Kind>, DropReason> {
    if A::ICMP == ICMP {
        // Destination unreachable, source quench, redirect, time exceeded, parameter problem (RFC 792).
        return Ok(matches!(message, 3 | 4 | 5 | 11 | 12).then_some(Kind::IcmpError));
    }
    Ok(match message {
        1..=icmpv6::PARAMETER_PROBLEM => Some(Kind::IcmpError),
        icmpv6::ROUTER_SOLICITATION..=icmpv6::REDIRECT => {
            // Fragmented neighbour discovery hides its options and must be ignored (RFC 6980, 5).
            if place.part == Part::First {
                return Err(DropReason::Malformed);
            }
            // A message that has crossed a router is not about this link (RFC 4861, 6.1 and 7.1).
            (place.hop_limit == 255).then_some(Kind::LinkControl)
        }
        icmpv6::LISTENER_QUERY..=icmpv6::LISTENER_DONE | icmpv6::LISTENER_REPORT_2
            if place.hop_limit == 1 && place.part == Part::Whole =>
        {
            Some(Kind::LinkControl)
        }
        _ => None,
    })
}

/// The destination of the packet that an ICMP error is about.
///
/// # Errors
/// The error ends before it.
#[inline(always)]
pub fn quoted_destination<A: Version, B: Bytes>(bytes: &B, packet: &Packet<A>) -> Result<A, DropReason> {
    /// Of the error itself, in either family.
    const HEADER: u32 = 8;
    // In both IP headers the destination is the last field.
    let quoted = if A::ICMP == ICMP { IPV4_LEN } else { IPV6_LEN };
    let end = packet.transport + HEADER + quoted as u32;
    // The receiver does not read bytes behind the packet's end.
    if end > packet.end {
        return Err(DropReason::Malformed);
    }
    bytes.load(end as usize - size_of::<A>())
}

/// The type of a message needed for the link to work ([`Kind::LinkControl`]), if it has the exact form of such a
/// message.
///
/// # Errors
/// It is truncated.
#[inline(always)]
pub fn form<B: Bytes>(bytes: &B, packet: &Packet<Ip6>) -> Result<Option<u8>, DropReason> {
    // Bytes after the end of the packet are read only by raw sockets.
    if packet.end != bytes.length() {
        return Ok(None);
    }
    let [kind, code, _, _, flags @ ..]: [u8; 8] = bytes.load(packet.transport())?;
    let length = packet.end - packet.transport;
    let has_target = matches!(kind, icmpv6::NEIGHBOUR_SOLICITATION | icmpv6::NEIGHBOUR_ADVERTISEMENT);
    if has_target && length < 24 {
        return Ok(None);
    }
    let target: Ip6 = if has_target { bytes.load(packet.transport() + 8)? } else { packet.tuple.source };
    let destination = &packet.tuple.destination;
    let message =
        Message { kind, code, flags, length, source: &packet.tuple.source, destination, target: &target };
    let Some(mut offset) = message.options_at() else { return Ok(None) };
    for _ in 0..Message::OPTIONS {
        if offset >= length {
            break;
        }
        if !message.is_option(bytes.load(packet.transport() + offset as usize)?) {
            return Ok(None);
        }
        offset += 8;
    }
    Ok(Some(kind))
}

#[cfg(test)]
mod tests {
    use super::super::bytes::InMemory;
    use super::super::frame::{Payload, ethertype};
    use super::super::packet::Room;
    use super::super::walk;
    use super::*;
    use crate::Ip4;
    use crate::flow::Lane;

    fn read(bytes: &[u8]) -> InMemory<'_> {
        InMemory { bytes, in_place: bytes.len(), is_uncut: false, tag_beside: None }
    }

    /// A frame with an IP header of that many bytes, an error, and so many bytes quoted, which count from 0.
    fn error(header: [u8; 2], ip_len: usize, quoted: u8) -> Vec<u8> {
        let [protocol_at, protocol] = header;
        let mut frame = vec![0; 14 + ip_len + 8];
        frame[14 + usize::from(protocol_at)] = protocol;
        frame.extend(0..quoted);
        let payload = 8 + quoted;
        match ip_len {
            40 => (frame[14], frame[19], frame[14 + 40]) = (0x60, payload, 1),
            _ => (frame[14], frame[17], frame[14 + 20]) = (0x45, 20 + payload, 3),
        }
        frame
    }

    #[test]
    fn an_error_names_whom_its_packet_was_sent_to() {
        let payload = |ethertype| Payload { ethertype, offset: 14, lane: Lane::NONE };
        let four = |bytes: &[u8]| {
            let mut room = Room::default();
            let packet = room.begin::<Ip4>(&payload(ethertype::IPV4), false);
            walk::ipv4(&read(bytes), packet).unwrap();
            assert_eq!(packet.kind, Kind::IcmpError);
            quoted_destination(&read(bytes), packet)
        };
        let six = |bytes: &[u8]| {
            let mut room = Room::default();
            let packet = room.begin::<Ip6>(&payload(ethertype::IPV6), false);
            walk::ipv6(&read(bytes), packet).unwrap();
            assert_eq!(packet.kind, Kind::IcmpError);
            quoted_destination(&read(bytes), packet)
        };
        let (in_four, in_six) = ([9, 1], [6, 58]);
        assert_eq!(four(&error(in_four, 20, 20)), Ok(Ip4 { octets: [16, 17, 18, 19] }));
        let octets = core::array::from_fn(|at| 24 + at as u8);
        assert_eq!(six(&error(in_six, 40, 40)), Ok(Ip6 { octets }));
        // The rest of the header is behind the packet's end, or missing.
        for behind in [0, 30] {
            let beyond = |mut frame: Vec<u8>| {
                frame.resize(frame.len() + behind, 7);
                frame
            };
            assert_eq!(four(&beyond(error(in_four, 20, 19))), Err(DropReason::Malformed), "{behind}");
            assert_eq!(six(&beyond(error(in_six, 40, 39))), Err(DropReason::Malformed), "{behind}");
        }
    }
}
