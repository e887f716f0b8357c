//! ICMP: which messages are errors, and which belong to the link.

use aya_ebpf::programs::TcContext;
use netattach_common::{
    DropReason, Hook, Ip6, Port, Ports,
    attachment::flag,
    flow::Tuple,
    link::{self, Message, icmpv6},
    protocol::{ICMP, ICMPV6},
};

use crate::{
    antispoof,
    classifier::Scope,
    frame,
    packet::{Kind, Packet, Part, Place, Version},
};

/// An ICMP header (RFC 792, RFC 4443).
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IcmpHeader {
    /// Type of the message.
    pub(crate) kind: u8,
    /// What it says besides.
    code: u8,
    checksum: u16,
    identifier: Port,
    sequence: u16,
}

/// Gives an echo its identifier as the requester's port and the next number as the responder's, and other messages the type of their
/// request: what answers one answers no other, and two hosts that ask each other the same make two flows.
#[inline(always)]
pub(crate) fn set_echo<A>(tuple: &mut Tuple<A>, header: &IcmpHeader) {
    const ECHO_REPLY: u8 = 0;
    const ECHO_REQUEST: u8 = 8;
    let echo = || {
        let identifier = header.identifier.number();
        Ports::new(header.identifier, Port::new(identifier.wrapping_add(1)))
    };
    tuple.ports = match (tuple.lane.protocol(), header.kind) {
        (ICMP, ECHO_REQUEST) | (ICMPV6, icmpv6::ECHO_REQUEST) => echo(),
        (ICMP, ECHO_REPLY) | (ICMPV6, icmpv6::ECHO_REPLY) => echo().reversed(),
        (protocol, kind) => {
            let (request, is_reply) = asked(protocol, kind);
            let there = Ports::new(Port::new(TYPES | u16::from(request)), Port::new(u16::MAX));
            if is_reply { there.reversed() } else { there }
        }
    };
}

/// Added to types where they stand for ports: neither they nor [`u16::MAX`] have the other for the next number.
const TYPES: u16 = 1 << 8;

/// The type of the request, and whether this is the reply to it: timestamp, information and address mask (RFC 792, 950), extended
/// echo (RFC 8335), node information (RFC 4620). Whatever has no reply is a request.
#[inline(always)]
const fn asked(protocol: u8, kind: u8) -> (u8, bool) {
    match (protocol, kind) {
        (ICMP, 14 | 16 | 18) | (ICMPV6, 140 | 161) => (kind - 1, true),
        (ICMP, 43) => (42, true),
        _ => (kind, false),
    }
}

/// What a message is, if it is not ordinary traffic.
#[inline(always)]
pub(crate) fn kind_of<A: Version>(message: u8, place: &Place) -> Result<Option<Kind>, DropReason> {
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
            // Whatever has crossed a router is not about this link (RFC 4861, 6.1 and 7.1).
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

/// Whether a message of the kinds that keep a link going stays on the link and is no more than that: its form is theirs, and
/// it goes to link-local addresses, to the link's groups, to what is on the link, or comes to the pod's own. The body of a
/// stage.
#[inline(always)]
pub(crate) fn stays_on_link(
    ctx: &TcContext,
    scope: &Scope,
    packet: &Packet<Ip6>,
) -> Result<bool, DropReason> {
    // What lies behind the packet is read by nobody but a raw socket.
    if packet.end != ctx.len() {
        return Ok(false);
    }
    let [kind, code, _, _, flags @ ..]: [u8; 8] = frame::load(ctx, packet.transport())?;
    let length = packet.end - packet.transport;
    let has_target = matches!(kind, icmpv6::NEIGHBOUR_SOLICITATION | icmpv6::NEIGHBOUR_ADVERTISEMENT);
    if has_target && length < 24 {
        return Ok(false);
    }
    let target: Ip6 =
        if has_target { frame::load(ctx, packet.transport() + 8)? } else { packet.tuple.source };
    let destination = &packet.tuple.destination;
    let message =
        Message { kind, code, flags, length, source: &packet.tuple.source, destination, target: &target };
    let Some(mut offset) = message.options_at() else { return Ok(false) };
    for _ in 0..Message::OPTIONS {
        if offset >= length {
            break;
        }
        if !message.is_option(frame::load(ctx, packet.transport() + offset as usize)?) {
            return Ok(false);
        }
        offset += 8;
    }
    if link::is_link_scope(destination) || link::is_link_local(destination) {
        return Ok(true);
    }
    let listener = !matches!(kind, icmpv6::ROUTER_SOLICITATION..=icmpv6::REDIRECT);
    // Reports go to the group they are about (RFC 2710, 3); a hop limit of 1 keeps them on the link.
    if listener && link::is_multicast(destination) {
        return Ok(true);
    }
    // Where nobody knows an attachment's addresses, nobody knows its prefixes.
    if !scope.has(flag::CHECK_ADDRESS) {
        return Ok(!link::is_multicast(destination));
    }
    let record = scope.record()?;
    Ok(match scope.hook {
        Hook::FromPod => record.on_link[0].holds(destination) || record.on_link[1].holds(destination),
        Hook::ToPod => antispoof::is_own_ipv6(scope, record, destination),
    })
}
