//! Flows: how both directions and both ends of a conversation find one entry, and how long it lives.
//!
//! A flow is entered by the first packet that a policy allows; its sender is the opener. Each end whose attachment is
//! on this node judges its own leg of the flow: the opener's end by its egress policy, the responder's end by its
//! ingress policy. The entry holds the id of the policy that approved the leg. Policy ids are never reused and a
//! policy's content never changes, so comparing ids is enough to know whether the approval is still valid.

use crate::address::{Address, Port, Ports};
use crate::{Side, Traffic, protocol};

/// The fields of a packet that identify its flow.
///
/// Protocols without ports use zeros. An ICMP echo has its identifier as the requester's port and the next number as
/// the responder's, so that two hosts pinging each other with the same identifier make two flows; other ICMP messages
/// have the type of their request plus 256, and 65535.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Tuple<A> {
    /// Source address.
    pub source: A,
    /// Destination address.
    pub destination: A,
    /// Source and destination port.
    pub ports: Ports,
    /// Protocol and VLANs.
    pub lane: Lane,
}

/// The protocol and VLANs, which separate the conversations of two endpoints: one word, moved as such.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub struct Lane(u32);

impl Lane {
    /// No protocol, no tags.
    pub const NONE: Self = Self(0);

    /// A protocol in VLANs; for the tags see [`tags`].
    #[inline(always)]
    pub const fn new(protocol: u8, [a, b, c]: [u8; 3]) -> Self {
        Self(u32::from_ne_bytes([protocol, a, b, c]))
    }

    /// Another protocol in the same VLANs.
    #[inline(always)]
    pub const fn of(self, protocol: u8) -> Self {
        Self::new(protocol, self.tags())
    }

    /// IP protocol number.
    #[inline(always)]
    pub const fn protocol(self) -> u8 {
        let [protocol, ..] = self.0.to_ne_bytes();
        protocol
    }

    /// VLAN tags.
    #[inline(always)]
    pub const fn tags(self) -> [u8; 3] {
        let [_, tags @ ..] = self.0.to_ne_bytes();
        tags
    }
}

impl<A: Address> Tuple<A> {
    /// The lane of a packet in the opposite direction.
    #[inline(always)]
    pub fn reversed(&self) -> Self {
        Self {
            source: self.destination,
            destination: self.source,
            ports: self.ports.reversed(),
            lane: self.lane,
        }
    }

    /// Whether the source is the endpoint that sorts lower.
    #[inline(always)]
    pub fn source_is_low(&self) -> bool {
        if self.source.same(&self.destination) {
            self.ports.source().number() <= self.ports.destination().number()
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
    /// VLAN tags: see [`tags`]. Equal addresses in different VLANs are different hosts.
    pub tags: [u8; 3],
}

/// Up to two VLAN ids of 12 bits in the format of keys: the outer one in the upper half.
#[inline(always)]
pub const fn tags(outer: u16, inner: u16) -> [u8; 3] {
    [(outer >> 4) as u8, ((outer & 15) << 4) as u8 | (inner >> 8) as u8 & 15, inner as u8]
}

impl<A: Address> FlowKey<A> {
    /// The key of the flow that a packet belongs to. `source_is_low`: see [`Tuple::source_is_low`].
    #[inline(always)]
    pub fn new(zone: u32, tuple: &Tuple<A>, source_is_low: bool) -> Self {
        /// The same bytes, in the words that a tuple has. Written byte by byte, the hash would wait until the processor
        /// has put the bytes of each word together.
        #[repr(C)]
        #[allow(dead_code, reason = "read as the fields of a key")]
        struct Words<A> {
            zone: u32,
            low: A,
            high: A,
            ports: Ports,
            lane: Lane,
        }
        const {
            assert!(
                size_of::<Words<A>>() == size_of::<Self>() && align_of::<Words<A>>() == align_of::<Self>()
            );
        };
        let lane = tuple.lane;
        let words = if source_is_low {
            Words { zone, low: tuple.source, high: tuple.destination, ports: tuple.ports, lane }
        } else {
            Words { zone, low: tuple.destination, high: tuple.source, ports: tuple.ports.reversed(), lane }
        };
        // SAFETY: both are `repr(C)` and of the same size and alignment (asserted above), and hold the same fields in the
        // same order: `Ports` is two ports, the source first, and `Lane` a protocol and its tags, each in the order of
        // memory. Any bytes are valid.
        unsafe { core::mem::transmute_copy::<Words<A>, Self>(&words) }
    }
}

/// Value of `na_ct4` and `na_ct6`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Flow {
    /// When a packet was last allowed, seconds of the kernel's monotonic clock.
    pub last_seen: u32,
    /// Policy that approved the opener's leg, 0 when none has, [`Flow::REFUSED`] when its end refuses to continue the
    /// flow.
    pub opener_approved_by: u32,
    /// The same of the responder's leg.
    pub responder_approved_by: u32,
    /// 1 when the endpoint that sorts lower opened the flow, else 0.
    pub opened_by_low: u8,
    /// The bits of [`state`].
    pub state: u8,
    /// Its place in its attachment's share ([`crate::share`]).
    pub place: u16,
    /// When the flow was entered, seconds of the same clock.
    pub opened: u32,
    /// The attachment at whose hooks the flow was entered; its traffic is counted there.
    pub attachment: u32,
    /// Traffic from the opener. Two CPUs that count one direction at the same time may lose a packet.
    pub forward: Traffic,
    /// Traffic from the responder.
    pub backward: Traffic,
}

/// Bits of [`Flow::state`].
pub mod state {
    /// The responder has answered.
    pub const REPLIED: u8 = 1;
    /// The opener is finished: TCP FIN, SCTP SHUTDOWN.
    pub const OPENER_FIN: u8 = 2;
    /// The connection was aborted: TCP RST, SCTP ABORT.
    pub const RST: u8 = 4;
    /// The opener has confirmed the answer: the handshake is complete.
    pub const ESTABLISHED: u8 = 8;
    /// The responder is finished.
    pub const RESPONDER_FIN: u8 = 16;
    /// The opener's leg was approved at its own end: for the attachment that has the opener's address, and that alone
    /// has it.
    pub const OPENER_AT_END: u8 = 32;
    /// The same of the responder's leg.
    pub const RESPONDER_AT_END: u8 = 64;
    /// Both ends are finished.
    pub const CLOSED: u8 = OPENER_FIN | RESPONDER_FIN;
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
    // No padding, which would be uninitialised: BPF functions pass it to each other.
    assert!(size_of::<Tuple<crate::Ip4>>() == 16);
    assert!(size_of::<Tuple<crate::Ip6>>() == 40);
    assert!(size_of::<FlowKey<crate::Ip4>>() == 20);
    assert!(size_of::<FlowKey<crate::Ip6>>() == 44);
    assert!(size_of::<Flow>() == 56);
    assert!(core::mem::offset_of!(Flow, opened_by_low) == 12);
    assert!(core::mem::offset_of!(Flow, forward) == 24);
};

/// The role of an attachment's pod in a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leg {
    /// It opened the flow: its egress policy judges.
    Opener,
    /// It received the flow: its ingress policy judges.
    Responder,
}

impl Leg {
    /// The role of the pod at whose hook a packet is seen. `forward`: the packet goes in the opener's direction.
    #[inline(always)]
    pub const fn of(side: Side, forward: bool) -> Self {
        match (side, forward) {
            (Side::FromPod, true) | (Side::ToPod, false) => Self::Opener,
            (Side::ToPod, true) | (Side::FromPod, false) => Self::Responder,
        }
    }

    /// The bit of [`state`] that says that it was approved at its own end.
    #[inline(always)]
    pub const fn at_end(self) -> u8 {
        match self {
            Self::Opener => state::OPENER_AT_END,
            Self::Responder => state::RESPONDER_AT_END,
        }
    }
}

/// The state information of a packet, beyond its addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Signal {
    /// TCP flags, and their equivalent in SCTP; 0 for other protocols.
    pub flags: u8,
}

impl Signal {
    /// Translates the first chunk of an SCTP packet (RFC 9260, 3.2) to TCP flags. INIT is alone in its packet.
    #[inline(always)]
    pub const fn of_chunk(kind: u8) -> Self {
        // Half a byte for each type from 0 to 15, the lowest first: FIN, SYN and RST as in TCP, then ACK. INIT is SYN,
        // INIT ACK both; ABORT is RST; SHUTDOWN, SHUTDOWN ACK and SHUTDOWN COMPLETE are FIN and ACK; the rest is ACK.
        // A table, because the kernel's verifier would follow the outcome of each comparison to the program's end.
        const TYPES: u64 = 0x8988_8889_9488_8a28;
        let half = if kind < 16 { (TYPES >> (kind * 4)) as u8 & 15 } else { 8 };
        Self { flags: half & 7 | (half & 8) << 1 }
    }

    /// Whether the packet asks for a new connection (TCP SYN without ACK).
    #[inline(always)]
    pub const fn opens(self) -> bool {
        self.flags & (tcp::SYN | tcp::ACK) == tcp::SYN
    }

    /// Whether the packet belongs to a connection, and does not ask for a new one.
    #[inline(always)]
    pub const fn is_midstream(self, protocol: u8) -> bool {
        matches!(protocol, protocol::TCP | protocol::SCTP)
            && self.flags & (tcp::SYN | tcp::ACK | tcp::RST) != tcp::SYN
    }

    /// Whether the packet answers an earlier one (TCP SYN with ACK): it is never the first of a flow.
    #[inline(always)]
    pub const fn accepts(self) -> bool {
        self.flags & (tcp::SYN | tcp::ACK) == tcp::SYN | tcp::ACK
    }

    /// Whether the packet neither opens, ends nor aborts a connection, but belongs to one (TCP ACK alone): a sender
    /// that takes the connection for aborted sends none.
    #[inline(always)]
    pub const fn carries_on(self) -> bool {
        self.flags & (tcp::SYN | tcp::ACK | tcp::RST | tcp::FIN) == tcp::ACK
    }

    /// Whether the packet aborts a connection: no packet follows it, so it does not start a flow either.
    #[inline(always)]
    pub const fn aborts(self) -> bool {
        self.flags & tcp::RST != 0
    }

    /// State bits of a flow that starts with this packet. A single packet never establishes a connection.
    #[inline(always)]
    pub const fn first_state(self, forward: bool) -> u8 {
        Flow::state_after(0, self, forward) & !state::ESTABLISHED
    }
}

impl Flow {
    /// [`Flow::place`] of a flow without a place.
    pub const UNPLACED: u16 = u16::MAX;

    /// Stored instead of a policy id, and higher than any id ([`HIGHEST`](crate::PolicyIds::HIGHEST)): the leg's end
    /// refuses to continue the flow, which has been answered. Packets that the other end still sends do not prolong
    /// it.
    ///
    /// Flows of agents that had no constant for this have `u32::MAX`, which is read in the same way.
    pub const REFUSED: u32 = u32::MAX - 1;

    /// A flow whose first packet was just allowed. `opened_by_low`: by the endpoint that sorts lower;
    /// `leg`, `policy`: the leg that was judged, and by which policy (0 when the pod is not isolated there).
    #[inline(always)]
    pub const fn entered(now: u32, opened_by_low: bool, leg: Leg, policy: u32, state: u8) -> Self {
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
            place: Self::UNPLACED,
            opened: now,
            attachment: 0,
            forward: Traffic { packets: 0, bytes: 0 },
            backward: Traffic { packets: 0, bytes: 0 },
        }
    }

    /// State bits after a packet.
    #[inline(always)]
    pub const fn state_after(current: u8, signal: Signal, forward: bool) -> u8 {
        let mut next = current;
        if !forward {
            next |= state::REPLIED;
            // An ACK without SYN implies a connection: in a connection that was picked up midstream, no handshake
            // follows.
            if signal.flags & (tcp::ACK | tcp::SYN | tcp::RST) == tcp::ACK {
                next |= state::ESTABLISHED;
            }
        } else if current & state::REPLIED != 0 && signal.flags & (tcp::ACK | tcp::SYN) == tcp::ACK {
            next |= state::ESTABLISHED;
        }
        if signal.flags & tcp::FIN != 0 {
            next |= if forward { state::OPENER_FIN } else { state::RESPONDER_FIN };
        }
        if signal.flags & tcp::RST != 0 {
            next |= state::RST;
        }
        next
    }
}

/// No flow expires earlier, in seconds.
pub(crate) const SHORTEST_TIMEOUT: u32 = 10;

/// Idle time in seconds after which a flow expires.
#[inline(always)]
pub const fn timeout(protocol: u8, state: u8) -> u32 {
    match protocol {
        protocol::TCP | protocol::SCTP => connection_timeout(state),
        protocol::UDP if state & state::REPLIED == 0 => 30,
        protocol::UDP => 120,
        protocol::ICMP | protocol::ICMPV6 => 10,
        _ => 60,
    }
}

/// Seconds for the states of TCP and SCTP. An end that has finished sending may still receive for a long time (RFC
/// 9293, 3.6). A reset of an established connection may be a forged one, which its receiver ignores (RFC 5961, 3.2):
/// the connection then has the same time for its next packet ([`Life::after`](crate::entry::Life::after)).
#[inline(always)]
const fn connection_timeout(state: u8) -> u32 {
    if state & state::CLOSED == state::CLOSED {
        30
    } else if state & (state::RST | state::ESTABLISHED) == state::RST {
        10
    } else if state & (state::CLOSED | state::RST) != 0 {
        120
    } else if state & state::ESTABLISHED != 0 {
        7200
    } else {
        60
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
            ports: Ports::new(Port::new(source_port), Port::new(destination_port)),
            lane: Lane::new(protocol::TCP, tags(1, 2)),
        }
    }

    const ESTABLISHED: u8 = state::REPLIED | state::ESTABLISHED;

    fn signal(tcp_flags: u8) -> Signal {
        Signal { flags: tcp_flags }
    }

    #[test]
    fn timeouts_follow_protocol_and_state() {
        let cases = [
            (protocol::TCP, 0, 60),
            (protocol::TCP, state::REPLIED, 60),
            (protocol::TCP, ESTABLISHED, 7200),
            (protocol::TCP, ESTABLISHED | state::OPENER_FIN, 120),
            (protocol::TCP, ESTABLISHED | state::RESPONDER_FIN, 120),
            (protocol::TCP, ESTABLISHED | state::CLOSED, 30),
            (protocol::TCP, ESTABLISHED | state::CLOSED | state::RST, 30),
            (protocol::TCP, ESTABLISHED | state::RST, 120),
            (protocol::TCP, ESTABLISHED | state::RST | state::RESPONDER_FIN, 120),
            (protocol::TCP, state::RST, 10),
            (protocol::TCP, state::REPLIED | state::RST, 10),
            (protocol::SCTP, state::REPLIED | state::RST | state::OPENER_FIN, 10),
            (protocol::UDP, 0, 30),
            (protocol::UDP, state::REPLIED, 120),
            (protocol::ICMP, state::REPLIED, 10),
            (protocol::ICMPV6, 0, 10),
            (protocol::SCTP, state::REPLIED, 60),
            (protocol::SCTP, ESTABLISHED, 7200),
            (47, 0, 60),
        ];
        for (protocol, state, seconds) in cases {
            assert_eq!(timeout(protocol, state), seconds, "protocol {protocol} state {state:#b}");
            assert!(seconds >= SHORTEST_TIMEOUT);
        }
    }

    #[test]
    fn legs_follow_hook_and_direction() {
        assert_eq!(Leg::of(Side::FromPod, true), Leg::Opener);
        assert_eq!(Leg::of(Side::ToPod, false), Leg::Opener);
        assert_eq!(Leg::of(Side::ToPod, true), Leg::Responder);
        assert_eq!(Leg::of(Side::FromPod, false), Leg::Responder);
    }

    #[test]
    fn packets_leave_what_is_said_of_the_ends() {
        let ends = state::OPENER_AT_END | state::RESPONDER_AT_END;
        for flags in 0..=u8::MAX {
            for forward in [false, true] {
                let after = |state| Flow::state_after(state, signal(flags), forward);
                assert_eq!(after(ends), after(0) | ends, "{flags:#b}");
                assert_eq!(signal(flags).first_state(forward) & ends, 0, "{flags:#b}");
            }
        }
    }

    #[test]
    fn a_connection_is_established_when_both_ends_have_confirmed() {
        let (syn, syn_ack, ack) = (tcp::SYN, tcp::SYN | tcp::ACK, tcp::ACK);
        let fin = tcp::FIN | tcp::ACK;
        /// Flags, and whether the opener sent them.
        type Packet = (u8, bool);
        let conversations: [(&str, &[Packet], u8); 9] = [
            ("picked up", &[(ack, true), (ack, false)], ESTABLISHED),
            ("picked up, and refused", &[(ack, true), (tcp::RST, false)], state::REPLIED | state::RST),
            ("unanswered", &[(syn, true), (syn, true)], 0),
            ("an opener that goes on without an answer", &[(syn, true), (ack, true)], 0),
            ("answered", &[(syn, true), (syn_ack, false)], state::REPLIED),
            ("refused", &[(syn, true), (tcp::RST | ack, false)], state::REPLIED | state::RST),
            ("complete", &[(syn, true), (syn_ack, false), (ack, true)], ESTABLISHED),
            (
                "half closed",
                &[(syn, true), (syn_ack, false), (ack, true), (fin, false), (ack, true)],
                ESTABLISHED | state::RESPONDER_FIN,
            ),
            (
                "closed",
                &[(syn, true), (syn_ack, false), (ack, true), (fin, true), (fin, false), (ack, true)],
                ESTABLISHED | state::CLOSED,
            ),
        ];
        for (what, packets, expected) in conversations {
            let state = packets
                .iter()
                .fold(0, |state, (flags, forward)| Flow::state_after(state, signal(*flags), *forward));
            assert_eq!(state, expected, "{what}");
        }
    }

    #[test]
    fn sctp_chunks_say_what_tcp_flags_say() {
        let (init, init_ack, cookie_echo, data, shutdown, abort) = (1, 2, 10, 0, 7, 6);
        let after = |chunks: &[(u8, bool)]| {
            chunks
                .iter()
                .fold(0, |state, (kind, forward)| Flow::state_after(state, Signal::of_chunk(*kind), *forward))
        };
        for kind in 0..=u8::MAX {
            let flags = match kind {
                1 => tcp::SYN,
                2 => tcp::SYN | tcp::ACK,
                6 => tcp::RST,
                7 | 8 | 14 => tcp::FIN | tcp::ACK,
                _ => tcp::ACK,
            };
            assert_eq!(Signal::of_chunk(kind), signal(flags), "chunk {kind}");
        }
        assert!(Signal::of_chunk(init).opens());
        assert!(!Signal::of_chunk(init_ack).opens());
        assert!(Signal::of_chunk(data).is_midstream(protocol::SCTP));
        assert!(!Signal::of_chunk(init).is_midstream(protocol::SCTP));
        let handshake = [(init, true), (init_ack, false), (cookie_echo, true)];
        assert_eq!(after(&handshake), ESTABLISHED);
        assert_eq!(after(&[&handshake[..], &[(shutdown, true)]].concat()), ESTABLISHED | state::OPENER_FIN);
        assert_eq!(after(&[&handshake[..], &[(abort, false)]].concat()), ESTABLISHED | state::RST);
    }

    #[test]
    fn vlan_ids_keep_their_bits_in_keys() {
        assert_eq!(tags(0, 0), [0, 0, 0]);
        assert_eq!(tags(0xabc, 0), [0xab, 0xc0, 0]);
        assert_eq!(tags(0xabc, 0xdef), [0xab, 0xcd, 0xef]);
        assert_eq!(tags(0, 4095), [0, 0x0f, 0xff]);
    }

    #[test]
    fn what_asks_for_no_connection_is_of_one() {
        /// Flags; whether they ask for a connection, answer a SYN, abort.
        type Case = (u8, bool, bool, bool);
        const PUSH: u8 = 8;
        const URGENT: u8 = 32;
        let cases: [Case; 10] = [
            (tcp::SYN, true, false, false),
            (tcp::SYN | tcp::FIN, true, false, false),
            (tcp::SYN | tcp::ACK, false, true, false),
            (tcp::SYN | tcp::RST, false, false, true),
            (tcp::ACK, false, false, false),
            (tcp::ACK | PUSH, false, false, false),
            (tcp::RST | tcp::ACK, false, false, true),
            (tcp::FIN, false, false, false),
            (0, false, false, false),
            (tcp::FIN | PUSH | URGENT, false, false, false),
        ];
        for (flags, asks, accepts, aborts) in cases {
            let signal = signal(flags);
            for protocol in [protocol::TCP, protocol::SCTP] {
                assert_eq!(signal.is_midstream(protocol), !asks, "{flags:#b}");
            }
            assert!(!signal.is_midstream(protocol::UDP), "{flags:#b}");
            assert_eq!((signal.accepts(), signal.aborts()), (accepts, aborts), "{flags:#b}");
            assert_eq!(signal.first_state(true) & ESTABLISHED, 0, "{flags:#b}");
            assert_eq!(signal.first_state(false) & ESTABLISHED, state::REPLIED, "{flags:#b}");
        }
    }

    proptest! {
        #[test]
        fn both_directions_share_a_key_and_disagree_on_the_source(
            a in any::<[u8; 4]>(), b in any::<[u8; 4]>(), p in any::<u16>(), q in any::<u16>(), zone in any::<u32>(),
        ) {
            let (there, back) = (tuple(a, p, b, q), tuple(b, q, a, p));
            let key = |tuple: &Tuple<Ip4>| FlowKey::new(zone, tuple, tuple.source_is_low());
            prop_assert_eq!(key(&there), key(&back));
            prop_assert!((a, p) == (b, q) || there.source_is_low() != back.source_is_low());
        }

        #[test]
        fn a_key_has_the_fields_of_its_tuple(
            a in any::<[u8; 4]>(), b in any::<[u8; 4]>(), p in any::<u16>(), q in any::<u16>(), zone in any::<u32>(),
        ) {
            let there = tuple(a, p, b, q);
            let [low, high] = if there.source_is_low() { [(a, p), (b, q)] } else { [(b, q), (a, p)] };
            let expected = FlowKey {
                zone,
                low: Ip4 { octets: low.0 },
                high: Ip4 { octets: high.0 },
                low_port: Port::new(low.1),
                high_port: Port::new(high.1),
                protocol: protocol::TCP,
                tags: tags(1, 2),
            };
            prop_assert_eq!(FlowKey::new(zone, &there, there.source_is_low()), expected);
        }
    }
}
