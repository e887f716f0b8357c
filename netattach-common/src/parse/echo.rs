//! The numbers that stand for the ports of ICMP messages in a flow.

use super::header::IcmpHeader;
use crate::flow::Tuple;
use crate::link::icmpv6;
use crate::protocol::{ICMP, ICMPV6};
use crate::{Port, Ports};

/// Gives an echo its identifier as the requester's port and the next number as the responder's, and other messages
/// the type of their request: an answer matches one kind of request only, and two hosts that send each other the same
/// request make two flows.
#[inline(always)]
pub(super) fn set_echo<A>(tuple: &mut Tuple<A>, header: &IcmpHeader) {
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

/// Added to types used as ports, so that such a port and [`u16::MAX`] are never consecutive numbers, as the two ports
/// of an echo are.
const TYPES: u16 = 1 << 8;

/// The type of the request, and whether this is the reply to it: timestamp, information and address mask (RFC 792,
/// 950), extended echo (RFC 8335), node information (RFC 4620). A type without a reply is a request.
#[inline(always)]
const fn asked(protocol: u8, kind: u8) -> (u8, bool) {
    match (protocol, kind) {
        (ICMP, 14 | 16 | 18) | (ICMPV6, 140 | 161) => (kind - 1, true),
        (ICMP, 43) => (42, true),
        _ => (kind, false),
    }
}
