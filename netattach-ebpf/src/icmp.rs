//! ICMP: which messages are errors, and which belong to the link.

use netattach_common::{
    DropReason, Port, Ports,
    flow::Tuple,
    protocol::{ICMP, ICMPV6},
};

use crate::packet::{Kind, Part, Place, Version};

/// ICMPv6 types (RFC 4443, 4861, 2710, 3810).
pub(crate) mod icmpv6 {
    /// The last of the error types in use.
    pub(crate) const PARAMETER_PROBLEM: u8 = 4;
    /// Echo request.
    pub(crate) const ECHO_REQUEST: u8 = 128;
    /// Echo reply.
    pub(crate) const ECHO_REPLY: u8 = 129;
    /// Multicast listener query.
    pub(crate) const LISTENER_QUERY: u8 = 130;
    /// Multicast listener done.
    pub(crate) const LISTENER_DONE: u8 = 132;
    /// Router solicitation.
    pub(crate) const ROUTER_SOLICITATION: u8 = 133;
    /// Router advertisement.
    pub(crate) const ROUTER_ADVERTISEMENT: u8 = 134;
    /// Neighbour solicitation.
    pub(crate) const NEIGHBOUR_SOLICITATION: u8 = 135;
    /// Neighbour advertisement.
    pub(crate) const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
    /// Redirect.
    pub(crate) const REDIRECT: u8 = 137;
    /// Multicast listener report, version 2.
    pub(crate) const LISTENER_REPORT_2: u8 = 143;
}

/// An ICMP header (RFC 792, RFC 4443).
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IcmpHeader {
    /// Type of the message.
    pub(crate) kind: u8,
    code: u8,
    checksum: u16,
    identifier: Port,
    sequence: u16,
}

/// Gives an echo its identifier as the requester's port.
#[inline(always)]
pub(crate) fn set_echo<A>(tuple: &mut Tuple<A>, header: &IcmpHeader) {
    const ECHO_REPLY: u8 = 0;
    const ECHO_REQUEST: u8 = 8;
    match (tuple.lane.protocol(), header.kind) {
        (ICMP, ECHO_REQUEST) | (ICMPV6, icmpv6::ECHO_REQUEST) => {
            tuple.ports = Ports::new(header.identifier, Port::NONE);
        }
        (ICMP, ECHO_REPLY) | (ICMPV6, icmpv6::ECHO_REPLY) => {
            tuple.ports = Ports::new(Port::NONE, header.identifier);
        }
        _ => {}
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
            if place.hop_limit == 1 =>
        {
            Some(Kind::LinkControl)
        }
        _ => None,
    })
}
