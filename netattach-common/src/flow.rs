//! Flows: how both directions and both ends of a conversation find one entry, and how long it lives.
//!
//! A flow is entered by the first packet that a policy allows; its sender is the opener. Each end whose
//! attachment is on this node judges its own leg of the flow: the opener's end by its egress policy, the
//! responder's end by its ingress policy. What is remembered is the id of the policy that approved the leg.
//! Policy ids are never reused and a policy's content never changes, so comparing ids is enough to know
//! whether the approval still stands.

use crate::address::{Address, Port};
use crate::{Hook, protocol};

/// Source and destination of a packet.
///
/// Protocols without ports use zeros; an ICMP echo has its identifier as the
/// requester's port and zero as the responder's, so that two hosts pinging each other with the same
/// identifier make two flows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuple<A> {
    /// Source address.
    pub source: A,
    /// Destination address.
    pub destination: A,
    /// Source port.
    pub source_port: Port,
    /// Destination port.
    pub destination_port: Port,
    /// IP protocol number.
    pub protocol: u8,
}

impl<A: Address> Tuple<A> {
    /// Whether the source is the endpoint that sorts lower.
    #[inline(always)]
    pub fn source_is_low(&self) -> bool {
        if self.source.same(&self.destination) {
            self.source_port.number() <= self.destination_port.number()
        } else {
            self.source.is_below(&self.destination)
        }
    }
}

/// Key of `na_ct4` and `na_ct6`: the two endpoints in order, so that both directions have the same key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(C)]
pub struct FlowKey<A> {
    /// Network id; equal addresses in different networks are different hosts.
    pub zone: u32,
    /// Address of the endpoint that sorts lower.
    pub low: A,
    /// Address of the other endpoint.
    pub high: A,
    /// Port of the lower endpoint.
    pub low_port: Port,
    /// Port of the higher endpoint.
    pub high_port: Port,
    /// IP protocol number.
    pub protocol: u8,
    /// Zero.
    pub pad: [u8; 3],
}

impl<A: Address> FlowKey<A> {
    /// The key of the flow that a packet belongs to.
    #[inline(always)]
    pub fn new(zone: u32, tuple: &Tuple<A>) -> Self {
        let (low, high, low_port, high_port) = if tuple.source_is_low() {
            (tuple.source, tuple.destination, tuple.source_port, tuple.destination_port)
        } else {
            (tuple.destination, tuple.source, tuple.destination_port, tuple.source_port)
        };
        Self { zone, low, high, low_port, high_port, protocol: tuple.protocol, pad: [0; 3] }
    }
}

/// Value of `na_ct4` and `na_ct6`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Flow {
    /// When a packet was last allowed, seconds of the kernel's monotonic clock.
    pub last_seen: u32,
    /// Policy that approved the opener's leg, 0 when none has.
    pub opener_approved_by: u32,
    /// Policy that approved the responder's leg, 0 when none has.
    pub responder_approved_by: u32,
    /// 1 when the endpoint that sorts lower opened the flow, else 0.
    pub opened_by_low: u8,
    /// The bits of [`state`].
    pub state: u8,
    /// Zero.
    pub pad: [u8; 2],
}

/// Bits of [`Flow::state`].
pub mod state {
    /// The responder has answered.
    pub const REPLIED: u8 = 1;
    /// A TCP FIN was seen.
    pub const FIN: u8 = 2;
    /// A TCP RST was seen.
    pub const RST: u8 = 4;
}

/// TCP flags as in the header's fourteenth byte (RFC 9293, 3.1).
pub mod tcp {
    /// The sender is finished.
    pub const FIN: u8 = 1;
    /// Opens a connection.
    pub const SYN: u8 = 2;
    /// Aborts.
    pub const RST: u8 = 4;
    /// Acknowledges.
    pub const ACK: u8 = 16;
}

const _: () = {
    assert!(size_of::<FlowKey<crate::Ip4>>() == 20);
    assert!(size_of::<FlowKey<crate::Ip6>>() == 44);
    assert!(size_of::<Flow>() == 16);
    assert!(core::mem::offset_of!(Flow, opened_by_low) == 12);
};

/// The part that an attachment's pod plays in a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leg {
    /// It opened the flow: its egress policy judges.
    Opener,
    /// It was called: its ingress policy judges.
    Responder,
}

impl Leg {
    /// The part of the pod at whose hook a packet is seen. `forward`: the packet runs the opener's way.
    #[inline(always)]
    pub const fn of(hook: Hook, forward: bool) -> Self {
        match (hook, forward) {
            (Hook::FromPod, true) | (Hook::ToPod, false) => Self::Opener,
            (Hook::ToPod, true) | (Hook::FromPod, false) => Self::Responder,
        }
    }
}

/// What a packet says about its flow beyond its addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Signal {
    /// TCP flags; 0 for other protocols.
    pub tcp_flags: u8,
}

impl Signal {
    /// Whether the packet asks for a new connection (TCP SYN without ACK).
    #[inline(always)]
    pub const fn opens(self) -> bool {
        self.tcp_flags & (tcp::SYN | tcp::ACK) == tcp::SYN
    }

    /// Whether the packet can belong to a TCP connection that was open before the flow table knew of it.
    /// A SYN/ACK cannot: its SYN was either seen or denied.
    #[inline(always)]
    pub const fn is_midstream(self, protocol: u8) -> bool {
        protocol == protocol::TCP && self.tcp_flags & tcp::SYN == 0
    }
}

impl Flow {
    /// A flow whose first packet was just allowed. `opened_by_low`: by the endpoint that sorts lower;
    /// `leg`, `policy`: the leg that was judged, and by which policy (0 when the pod is not isolated there).
    #[inline(always)]
    pub const fn opened(now: u32, opened_by_low: bool, leg: Leg, policy: u32, state: u8) -> Self {
        let (opener, responder) = match leg {
            Leg::Opener => (policy, 0),
            Leg::Responder => (0, policy),
        };
        Self {
            last_seen: now,
            opener_approved_by: opener,
            responder_approved_by: responder,
            opened_by_low: opened_by_low as u8,
            state,
            pad: [0; 2],
        }
    }

    /// Which policy approved a leg.
    #[inline(always)]
    pub const fn approved_by(&self, leg: Leg) -> u32 {
        match leg {
            Leg::Opener => self.opener_approved_by,
            Leg::Responder => self.responder_approved_by,
        }
    }

    /// Whether a packet from this endpoint runs the way of the opener.
    #[inline(always)]
    pub const fn is_forward(&self, from_low: bool) -> bool {
        (self.opened_by_low != 0) == from_low
    }

    /// Whether the flow counts as gone. `now` in seconds of the same clock as `last_seen`.
    #[inline(always)]
    pub const fn is_expired(&self, protocol: u8, now: u32) -> bool {
        // Another CPU may have stored a second that this one has not reached yet.
        (now.wrapping_sub(self.last_seen) as i32) > timeout(protocol, self.state) as i32
    }

    /// Whether a packet belongs to this flow, or opens another one between the same ports.
    ///
    /// A SYN against the flow's direction must never ride on it: anyone can provoke the pickup of an alleged
    /// old connection with a bare ACK, and would then be let in. A SYN on a closing flow is a reused port.
    #[inline(always)]
    pub const fn admits(&self, signal: Signal, forward: bool) -> bool {
        !signal.opens() || (forward && self.state & (state::FIN | state::RST) == 0)
    }

    /// State bits after a packet.
    #[inline(always)]
    pub const fn state_after(current: u8, signal: Signal, forward: bool) -> u8 {
        let mut next = current;
        if !forward {
            next |= state::REPLIED;
        }
        if signal.tcp_flags & tcp::FIN != 0 {
            next |= state::FIN;
        }
        if signal.tcp_flags & tcp::RST != 0 {
            next |= state::RST;
        }
        next
    }
}

/// Seconds without a packet after which a flow is gone.
#[inline(always)]
pub const fn timeout(protocol: u8, state: u8) -> u32 {
    match protocol {
        protocol::TCP if state & state::RST != 0 => 10,
        protocol::TCP if state & state::FIN != 0 => 30,
        protocol::TCP if state & state::REPLIED == 0 => 60,
        protocol::TCP => 7200,
        protocol::UDP if state & state::REPLIED == 0 => 30,
        protocol::UDP => 120,
        protocol::ICMP | protocol::ICMPV6 => 10,
        _ => 60,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Ip4;
    use proptest::prelude::*;

    fn tuple(source: [u8; 4], source_port: u16, destination: [u8; 4], destination_port: u16) -> Tuple<Ip4> {
        Tuple {
            source: Ip4 { octets: source },
            destination: Ip4 { octets: destination },
            source_port: Port::new(source_port),
            destination_port: Port::new(destination_port),
            protocol: protocol::TCP,
        }
    }

    fn signal(tcp_flags: u8) -> Signal {
        Signal { tcp_flags }
    }

    #[test]
    fn timeouts_follow_protocol_and_state() {
        let cases = [
            (protocol::TCP, 0, 60),
            (protocol::TCP, state::REPLIED, 7200),
            (protocol::TCP, state::REPLIED | state::FIN, 30),
            (protocol::TCP, state::REPLIED | state::FIN | state::RST, 10),
            (protocol::UDP, 0, 30),
            (protocol::UDP, state::REPLIED, 120),
            (protocol::ICMP, state::REPLIED, 10),
            (protocol::ICMPV6, 0, 10),
            (protocol::SCTP, state::REPLIED, 60),
            (47, 0, 60),
        ];
        for (protocol, state, seconds) in cases {
            assert_eq!(timeout(protocol, state), seconds, "protocol {protocol} state {state:#b}");
            let flow = Flow { last_seen: u32::MAX - 5, state, ..Flow::default() };
            assert!(!flow.is_expired(protocol, flow.last_seen.wrapping_add(seconds)));
            assert!(flow.is_expired(protocol, flow.last_seen.wrapping_add(seconds + 1)));
            assert!(!flow.is_expired(protocol, flow.last_seen - 1));
        }
    }

    #[test]
    fn legs_follow_hook_and_direction() {
        assert_eq!(Leg::of(Hook::FromPod, true), Leg::Opener);
        assert_eq!(Leg::of(Hook::ToPod, false), Leg::Opener);
        assert_eq!(Leg::of(Hook::ToPod, true), Leg::Responder);
        assert_eq!(Leg::of(Hook::FromPod, false), Leg::Responder);
    }

    #[test]
    fn a_syn_rides_only_forward_on_a_flow_that_is_not_closing() {
        let open = Flow { state: state::REPLIED, ..Flow::default() };
        let closing = Flow { state: state::REPLIED | state::FIN, ..Flow::default() };
        let reset = Flow { state: state::RST, ..Flow::default() };
        let (syn, syn_ack) = (signal(tcp::SYN), signal(tcp::SYN | tcp::ACK));
        let cases = [
            (open, syn, true, true),
            (open, syn, false, false),
            (closing, syn, true, false),
            (reset, syn, false, false),
            (closing, syn_ack, false, true),
            (closing, signal(tcp::ACK), true, true),
        ];
        for (flow, signal, forward, expected) in cases {
            assert_eq!(flow.admits(signal, forward), expected, "{flow:?} {signal:?} forward {forward}");
        }
    }

    #[test]
    fn only_tcp_without_syn_is_picked_up_midstream() {
        assert!(signal(tcp::ACK).is_midstream(protocol::TCP));
        assert!(!signal(tcp::SYN).is_midstream(protocol::TCP));
        assert!(!signal(tcp::SYN | tcp::ACK).is_midstream(protocol::TCP));
        assert!(!signal(0).is_midstream(protocol::UDP));
    }

    proptest! {
        #[test]
        fn both_directions_share_a_key_and_disagree_on_the_source(
            a in any::<[u8; 4]>(), b in any::<[u8; 4]>(), p in any::<u16>(), q in any::<u16>(), zone in any::<u32>(),
        ) {
            let (there, back) = (tuple(a, p, b, q), tuple(b, q, a, p));
            prop_assert_eq!(FlowKey::new(zone, &there), FlowKey::new(zone, &back));
            prop_assert!((a, p) == (b, q) || there.source_is_low() != back.source_is_low());
        }
    }
}
