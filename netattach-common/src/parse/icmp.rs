//! ICMP: which messages are errors, and which belong to the link.

use super::bytes::Bytes;
use super::header::Part;
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
