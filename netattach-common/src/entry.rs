//! Entries of the flow table in place, where several CPUs read and write them at the same time.
//!
//! Decisions are made from words that were read once ([`Life`], the approval of a leg), and only words that change
//! are written. Each word is read and written whole and has a meaning by itself, so no CPU reads half of one. Where
//! two words have to be consistent, the order of writing and reading ensures it: [`InPlace::approve`],
//! [`Entry::is_kept`], [`InPlace::begin`].
//!
//! An entry may be reused for another flow while a CPU writes it. A CPU that has written more than what every packet
//! notes checks afterwards whether the entry still has the key; if not, it revokes the approval together with the mark
//! of the end ([`InPlace::revoke`]), or gives up the whole entry ([`InPlace::give_up`]).
//!
//! If two CPUs change the state at the same moment, a bit of it may be lost. The bits for an answered flow and for a
//! complete handshake are set again by the next packet, and the mark of an end within a second; if the bit for the end
//! of a connection is lost, the flow only waits for a longer timeout; if it comes back, until a later packet clears it
//! again. A mark that reappears has no effect once the approval beside it is cleared.

use crate::Traffic;
use crate::flow::{Flow, Leg, SHORTEST_TIMEOUT, Signal, state, timeout};
use crate::protocol;

/// When a flow last had a packet, and how far it has come: two words of its entry, each read once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Life {
    /// [`Flow::last_seen`], seconds of the kernel's monotonic clock.
    pub last_seen: u32,
    /// [`Flow::state`].
    pub state: u8,
}

impl Life {
    /// Whether the flow is expired. `now` in seconds of the same clock as `last_seen`.
    #[inline(always)]
    pub const fn is_expired(self, protocol: u8, now: u32) -> bool {
        // Another CPU may have stored a second that this one has not reached yet.
        (now.wrapping_sub(self.last_seen) as i32) > timeout(protocol, self.state) as i32
    }

    /// Whether the flow's last packet is so recent that the flow is not expired, whatever its protocol and state.
    /// `now` as in [`is_expired`](Self::is_expired).
    #[inline(always)]
    pub const fn is_in_use(self, now: u32) -> bool {
        (now.wrapping_sub(self.last_seen) as i32) <= SHORTEST_TIMEOUT as i32
    }

    /// Eviction priority within its attachment. Flows that both ends have confirmed and neither has ended are evicted
    /// last; of the same kind, the one idle for longest goes first. `now` as in [`is_expired`](Self::is_expired).
    #[inline(always)]
    pub const fn readiness(self, protocol: u8, now: u32) -> u32 {
        const NOT_LASTING: u32 = 1 << 31;
        let idle = now.wrapping_sub(self.last_seen);
        // Another CPU's second, see `is_expired`.
        let idle = if idle & NOT_LASTING == 0 { idle } else { 0 };
        let lasting = match protocol {
            protocol::TCP | protocol::SCTP => {
                self.state & (state::ESTABLISHED | state::CLOSED | state::RST) == state::ESTABLISHED
            }
            _ => self.state & state::REPLIED != 0,
        };
        if lasting { idle } else { idle | NOT_LASTING }
    }

    /// Whether the flow's connection was finished by both ends, or aborted by one, so long ago that all packets in
    /// flight at that time have arrived: its place may go to another flow although the entry is not expired. `now` as
    /// in [`is_expired`](Self::is_expired).
    #[inline(always)]
    pub const fn is_over(self, protocol: u8, now: u32) -> bool {
        self.has_ended(protocol) && self.has_lingered(now)
    }

    /// Whether all packets that were in flight at the time of the last one have arrived.
    #[inline(always)]
    const fn has_lingered(self, now: u32) -> bool {
        /// Seconds; the first one may be almost over when it is counted: a lost segment is repeated after less than
        /// one (RFC 6298; Linux after 0.2 s and a round trip).
        const LINGERS: i32 = 2;
        now.wrapping_sub(self.last_seen) as i32 >= LINGERS
    }

    /// Whether an end of the flow's connection is said to be finished, or the connection to be aborted.
    #[inline(always)]
    pub const fn is_ending(self) -> bool {
        self.state & (state::CLOSED | state::RST) != 0
    }

    /// Both words after a packet that may pass. `seen`: the second of the packet, or the flow's own if the packet does
    /// not prolong it.
    ///
    /// No sequence numbers are compared. So any station that can send in the name of an end can say that this end has
    /// finished or has aborted the connection, which the other end ignores if the number is wrong (RFC 5961, 3.2). What
    /// the ends say afterwards decides: packets in flight at that time change nothing and do not prolong the flow, and
    /// a later one shows that the connection goes on. A host that does not know the connection answers such a packet
    /// by another reset. Where an end had finished indeed and the other goes on sending, the flow has the timeout of
    /// a connection in use until that one finishes too.
    #[inline(always)]
    pub const fn after(self, signal: Signal, forward: bool, seen: u32) -> Self {
        let (mut state, mut seen) = (self.state, seen);
        if self.is_ending() && signal.carries_on() {
            if self.has_lingered(seen) {
                state &= !(state::CLOSED | state::RST);
            } else {
                seen = self.last_seen;
            }
        }
        Self { last_seen: seen, state: Flow::state_after(state, signal, forward) }
    }

    /// Whether the flow's connection was finished by both ends, or aborted by one.
    #[inline(always)]
    pub const fn has_ended(self, protocol: u8) -> bool {
        matches!(protocol, protocol::TCP | protocol::SCTP)
            && (self.state & state::RST != 0 || self.state & state::CLOSED == state::CLOSED)
    }

    /// Whether the responder has sent a packet that could pass.
    #[inline(always)]
    pub const fn is_answered(self) -> bool {
        self.state & state::REPLIED != 0
    }

    /// Whether the connection's handshake is complete.
    #[inline(always)]
    pub const fn is_established(self) -> bool {
        self.state & state::ESTABLISHED != 0
    }

    /// Whether a leg was approved at its own end.
    #[inline(always)]
    pub const fn is_at_end(self, leg: Leg) -> bool {
        self.state & leg.at_end() != 0
    }

    /// Whether a packet belongs to this flow, or opens another one between the same ports.
    ///
    /// A SYN against the flow's direction must never be accepted as part of it: a bare ACK sent to a peer would then
    /// let that peer in. A SYN on a closing flow is a reused port.
    #[inline(always)]
    pub const fn admits(self, signal: Signal, forward: bool) -> bool {
        !signal.opens() || (forward && self.state & (state::CLOSED | state::RST) == 0)
    }
}

/// An entry whose words are each read on request: in place, or from a copy ([`Flow`]).
pub trait Entry {
    /// [`Flow::last_seen`].
    fn last_seen(&self) -> u32;
    /// [`Flow::state`].
    fn state(&self) -> u8;
    /// [`Flow::opened_by_low`].
    fn opened_by_low(&self) -> u8;
    /// The policy that approved a leg: [`Flow::opener_approved_by`], [`Flow::responder_approved_by`].
    fn approved_by(&self, leg: Leg) -> u32;

    /// Returns the words from which the expiry is computed.
    #[inline(always)]
    fn life(&self) -> Life {
        Life { last_seen: self.last_seen(), state: self.state() }
    }

    /// Whether a packet from this endpoint goes in the opener's direction.
    #[inline(always)]
    fn is_forward(&self, from_low: bool) -> bool {
        (self.opened_by_low() != 0) == from_low
    }

    /// Whether a leg's end refuses to continue the flow.
    #[inline(always)]
    fn refuses(&self, leg: Leg) -> bool {
        self.approved_by(leg) >= Flow::REFUSED
    }

    /// Whether either end refuses to continue it.
    #[inline(always)]
    fn is_refused(&self) -> bool {
        self.refuses(Leg::Opener) || self.refuses(Leg::Responder)
    }

    /// Whether a leg was approved at its own end, so that the flow may continue there when its policy changes.
    #[inline(always)]
    fn is_kept(&self, leg: Leg) -> bool {
        // Reads the approval first: for an approval that is not the end's, the mark is cleared before the approval is
        // written ([`InPlace::approve`]).
        let approved_by = self.approved_by(leg);
        !matches!(approved_by, 0 | Flow::REFUSED..) && self.state() & leg.at_end() != 0
    }
}

impl Entry for Flow {
    #[inline(always)]
    fn last_seen(&self) -> u32 {
        self.last_seen
    }

    #[inline(always)]
    fn state(&self) -> u8 {
        self.state
    }

    #[inline(always)]
    fn opened_by_low(&self) -> u8 {
        self.opened_by_low
    }

    #[inline(always)]
    fn approved_by(&self, leg: Leg) -> u32 {
        match leg {
            Leg::Opener => self.opener_approved_by,
            Leg::Responder => self.responder_approved_by,
        }
    }
}

/// An entry in place. The first methods write one word each, or read and write counters.
pub trait InPlace: Entry {
    /// Writes [`Flow::last_seen`].
    fn set_last_seen(&self, second: u32);
    /// Writes [`Flow::state`].
    fn set_state(&self, state: u8);
    /// Writes the policy that approved a leg.
    fn set_approved_by(&self, leg: Leg, policy: u32);
    /// Writes each word that stays unchanged until the entry is reused for another flow: [`Flow::opened_by_low`],
    /// [`Flow::place`], [`Flow::opened`], [`Flow::attachment`].
    fn set_origin(&self, flow: &Flow);
    /// The traffic of a direction.
    fn traffic(&self, forward: bool) -> Traffic;
    /// Writes the traffic of a direction.
    fn set_traffic(&self, forward: bool, traffic: Traffic);

    /// Records that a policy has approved a leg. `at_end`: the approval comes from the leg's own end.
    ///
    /// The mark of the end never stands beside an approval that is not the end's: the mark is written after an
    /// approval by the end, and cleared before any other approval is written.
    #[inline(always)]
    fn approve(&self, leg: Leg, policy: u32, at_end: bool) {
        if at_end {
            self.set_approved_by(leg, policy);
            self.change_state(|state| state | leg.at_end());
        } else {
            self.change_state(|state| state & !leg.at_end());
            self.set_approved_by(leg, policy);
        }
    }

    /// Records that a leg's end refuses to continue the flow, until that end approves it or sends again.
    #[inline(always)]
    fn refuse(&self, leg: Leg) {
        self.approve(leg, Flow::REFUSED, false);
    }

    /// Records, at a leg's own end, that the policy in force there approves the leg, which has an approval by that
    /// policy already. Writes only the mark: writing the approval again would undo a change by another CPU since the
    /// approval was read, and would approve another flow if the entry was reused. `policy`: 0 if no policy is in
    /// force, so that nothing prevents the leg from continuing.
    #[inline(always)]
    fn confirm(&self, leg: Leg, policy: u32) {
        if policy == 0 {
            self.approve(leg, 0, false);
        } else {
            self.change_state(|state| state | leg.at_end());
        }
    }

    /// Takes back what was written about a leg: the entry belongs to another flow by now, which its policy judges
    /// again.
    #[inline(always)]
    fn revoke(&self, leg: Leg) {
        self.approve(leg, 0, false);
    }

    /// Records that the sender of a packet that may pass continues the flow. The sender does so by having sent the
    /// packet, even if no policy of its own can approve the flow any more. Returns whether the receiver continues it
    /// too, so that the packet prolongs the flow. `written`: called with the sender's leg if anything was written
    /// about it.
    #[inline(always)]
    fn go_on(&self, forward: bool, written: impl FnOnce(Leg)) -> bool {
        let (sender, receiver) =
            if forward { (Leg::Opener, Leg::Responder) } else { (Leg::Responder, Leg::Opener) };
        if self.refuses(sender) {
            self.approve(sender, 0, false);
            written(sender);
        }
        !self.refuses(receiver)
    }

    /// Records a packet that may pass. `life`: as just read; `seen`: as of [`Life::after`].
    #[inline(always)]
    fn note(&self, life: Life, signal: Signal, forward: bool, seen: u32) {
        self.change_life(life, life.after(signal, forward, seen));
    }

    /// The same with fewer questions, for most packets: the flow is not [ending](Life::is_ending), or `seen` is the
    /// second of its last packet.
    #[inline(always)]
    fn note_usual(&self, life: Life, signal: Signal, forward: bool, seen: u32) {
        let state = Flow::state_after(life.state, signal, forward);
        self.change_life(life, Life { last_seen: seen, state });
    }

    /// Writes both words, each if it changes: the entry's cache line is shared between CPUs.
    #[inline(always)]
    fn change_life(&self, before: Life, after: Life) {
        if before.last_seen != after.last_seen {
            self.set_last_seen(after.last_seen);
        }
        if before.state != after.state {
            self.set_state(after.state);
        }
    }

    /// Counts a packet of that many bytes.
    #[inline(always)]
    fn count(&self, forward: bool, bytes: u32) {
        let Traffic { packets, bytes: before } = self.traffic(forward);
        let traffic =
            Traffic { packets: packets.wrapping_add(1), bytes: before.wrapping_add(u64::from(bytes)) };
        self.set_traffic(forward, traffic);
    }

    /// Reuses the entry for another flow with the same key.
    ///
    /// The approvals are cleared until all other words are the new flow's: a packet that finds the entry meanwhile is
    /// judged by its policy, and no approval of the earlier flow counts for the new one, whose opener may be the
    /// other end.
    #[inline(always)]
    fn begin(&self, flow: &Flow) {
        self.set_approved_by(Leg::Opener, 0);
        self.set_approved_by(Leg::Responder, 0);
        self.set_origin(flow);
        self.set_state(flow.state);
        self.set_traffic(true, flow.forward);
        self.set_traffic(false, flow.backward);
        self.set_last_seen(flow.last_seen);
        self.set_approved_by(Leg::Opener, flow.opener_approved_by);
        self.set_approved_by(Leg::Responder, flow.responder_approved_by);
    }

    /// Turns the entry into an expired flow without approvals: [`begin`](Self::begin) has written words that do not
    /// belong to the flow that the entry has. `now` as in [`Life::is_expired`].
    #[inline(always)]
    fn give_up(&self, now: u32) {
        /// Seconds, more than any timeout.
        const LONG: u32 = 1 << 30;
        self.set_approved_by(Leg::Opener, 0);
        self.set_approved_by(Leg::Responder, 0);
        self.set_last_seen(now.wrapping_sub(LONG));
    }

    /// Changes the state, if that makes a difference.
    #[inline(always)]
    fn change_state(&self, change: impl FnOnce(u8) -> u8) {
        let before = self.state();
        let after = change(before);
        if before != after {
            self.set_state(after);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::tcp;
    use proptest::prelude::*;
    use std::cell::RefCell;

    const ESTABLISHED: u8 = state::REPLIED | state::ESTABLISHED;
    const LEGS: [(Leg, Leg); 2] = [(Leg::Opener, Leg::Responder), (Leg::Responder, Leg::Opener)];

    fn signal(flags: u8) -> Signal {
        Signal { flags }
    }

    /// An entry of one CPU: its contents before the first write, and after each.
    #[derive(Debug, Clone)]
    struct Steps(RefCell<Vec<Flow>>);

    impl Steps {
        fn of(flow: Flow) -> Self {
            Self(RefCell::new(vec![flow]))
        }

        fn last(&self) -> Flow {
            self.0.borrow()[self.0.borrow().len() - 1]
        }

        fn step(&self, change: impl FnOnce(&mut Flow)) {
            let mut flow = self.last();
            change(&mut flow);
            self.0.borrow_mut().push(flow);
        }
    }

    impl Entry for Steps {
        fn last_seen(&self) -> u32 {
            self.last().last_seen
        }

        fn state(&self) -> u8 {
            self.last().state
        }

        fn opened_by_low(&self) -> u8 {
            self.last().opened_by_low
        }

        fn approved_by(&self, leg: Leg) -> u32 {
            self.last().approved_by(leg)
        }
    }

    impl InPlace for Steps {
        fn set_last_seen(&self, second: u32) {
            self.step(|flow| flow.last_seen = second);
        }

        fn set_state(&self, state: u8) {
            self.step(|flow| flow.state = state);
        }

        fn set_approved_by(&self, leg: Leg, policy: u32) {
            self.step(|flow| match leg {
                Leg::Opener => flow.opener_approved_by = policy,
                Leg::Responder => flow.responder_approved_by = policy,
            });
        }

        fn set_origin(&self, other: &Flow) {
            self.step(|flow| flow.opened_by_low = other.opened_by_low);
            self.step(|flow| flow.place = other.place);
            self.step(|flow| flow.opened = other.opened);
            self.step(|flow| flow.attachment = other.attachment);
        }

        fn traffic(&self, forward: bool) -> Traffic {
            if forward { self.last().forward } else { self.last().backward }
        }

        fn set_traffic(&self, forward: bool, traffic: Traffic) {
            self.step(|flow| if forward { flow.forward = traffic } else { flow.backward = traffic });
        }
    }

    #[test]
    fn a_flow_expires_after_its_timeout() {
        for (protocol, state, seconds) in
            [(protocol::TCP, ESTABLISHED, 7200), (protocol::UDP, 0, 30), (protocol::ICMP, state::REPLIED, 10)]
        {
            let life = Life { last_seen: u32::MAX - 5, state };
            let expired = [-1, 0, seconds, seconds + 1]
                .map(|idle| life.is_expired(protocol, life.last_seen.wrapping_add_signed(idle)));
            assert_eq!(expired, [false, false, false, true], "protocol {protocol} state {state:#b}");
        }
    }

    proptest! {
        /// As the paths for most packets assume.
        #[test]
        fn most_packets_are_noted_alike_with_fewer_questions(
            state: u8, flags: u8, forward: bool, last_seen: u32, later in 0_u32..10,
        ) {
            let life = Life { last_seen, state };
            let seen = if life.is_ending() { last_seen } else { last_seen.wrapping_add(later) };
            let [usual, full] = [(); 2].map(|()| Steps::of(Flow { last_seen, state, ..Flow::default() }));
            usual.note_usual(life, signal(flags), forward, seen);
            full.note(life, signal(flags), forward, seen);
            prop_assert_eq!(usual.last(), full.last());
        }

        /// What packets say of the end of a connection concerns no other bit, and no approval.
        #[test]
        fn that_a_connection_goes_on_clears_only_its_end(
            state: u8, flags: u8, forward: bool, last_seen: u32, seen: u32,
        ) {
            let life = Life { last_seen, state };
            let after = life.after(signal(flags), forward, seen);
            let end = state::CLOSED | state::RST;
            let expected = Flow::state_after(state, signal(flags), forward);
            prop_assert_eq!(after.state & !end, expected & !end);
            prop_assert!(after.state & end == expected & end || after.state & end == 0);
            prop_assert!(after.last_seen == seen || after.last_seen == last_seen && life.is_ending());
            // A SYN never clears it: a port that is used again opens a flow of its own.
            prop_assert!(!signal(flags).opens() || after.state == expected);
        }

        #[test]
        fn a_flow_in_use_is_not_expired(protocol: u8, state: u8, last_seen: u32, idle in -2_i32..20) {
            let life = Life { last_seen, state };
            let now = last_seen.wrapping_add_signed(idle);
            prop_assert_eq!(life.is_in_use(now), idle <= 10);
            prop_assert!(!(life.is_in_use(now) && life.is_expired(protocol, now)));
        }
    }

    #[test]
    fn what_is_confirmed_and_not_ended_is_missed_most_and_then_what_had_a_packet_last() {
        let now = 10_000;
        let of = |protocol, last_seen, state| Life { last_seen, state }.readiness(protocol, now);
        let by_readiness = [
            of(protocol::TCP, now + 1, ESTABLISHED),
            of(protocol::SCTP, now - 7000, ESTABLISHED),
            of(protocol::UDP, now - 7001, state::REPLIED),
            of(protocol::TCP, now - 1, 0),
            of(protocol::TCP, now - 2, state::REPLIED),
            of(protocol::TCP, now - 3, ESTABLISHED | state::OPENER_FIN),
            of(protocol::UDP, now - 4, 0),
            of(protocol::TCP, now - 5, ESTABLISHED | state::RST),
        ];
        assert!(by_readiness.is_sorted_by(|one, next| one < next), "{by_readiness:?}");
    }

    #[test]
    fn a_connection_is_over_a_second_after_both_ends_have_finished_or_one_has_aborted() {
        let now = 10_000;
        let over = |protocol, state, last_seen| Life { last_seen, state }.is_over(protocol, now);
        let has_ended = |protocol, state| Life { last_seen: now, state }.has_ended(protocol);
        for state in [ESTABLISHED | state::CLOSED, state::CLOSED, state::RST, ESTABLISHED | state::RST] {
            for protocol in [protocol::TCP, protocol::SCTP] {
                let found =
                    [now - 30, now - 2, now - 1, now, now + 1].map(|seen| over(protocol, state, seen));
                assert_eq!(found, [true, true, false, false, false], "{state:#b}");
                assert!(has_ended(protocol, state), "{state:#b}");
            }
            assert!(!over(protocol::UDP, state, now - 30), "{state:#b}");
        }
        for state in [0, state::REPLIED, ESTABLISHED, ESTABLISHED | state::OPENER_FIN, state::RESPONDER_FIN] {
            assert!(!over(protocol::TCP, state, now - 30), "{state:#b}");
            assert!(!has_ended(protocol::TCP, state), "{state:#b}");
        }
    }

    #[test]
    fn what_an_end_sends_later_shows_that_the_connection_goes_on() {
        let (ack, fin, rst) = (signal(tcp::ACK), signal(tcp::FIN | tcp::ACK), signal(tcp::RST));
        let at = |last_seen, state| Life { last_seen, state };
        let (ending, other) = (ESTABLISHED | state::RST, ESTABLISHED | state::OPENER_FIN);
        for forward in [false, true] {
            for state in [ending, other, ending | other, ESTABLISHED | state::CLOSED] {
                // In flight at that time, also of a CPU that has not reached the second.
                for now in [99, 100, 101] {
                    assert_eq!(at(100, state).after(ack, forward, now), at(100, state), "{state:#b} {now}");
                }
                for now in [102, 103, 220] {
                    assert_eq!(at(100, state).after(ack, forward, now), at(now, ESTABLISHED), "{state:#b}");
                }
                // What ends or opens a connection shows nothing of that kind, and neither does a segment without flags.
                for flags in [rst.flags, tcp::SYN | tcp::ACK, tcp::SYN, 0] {
                    let after = at(100, state).after(signal(flags), forward, 150);
                    assert_eq!((after.last_seen, after.state & state), (150, state), "{state:#b} {flags:#b}");
                }
                // A packet that does not prolong the flow.
                assert_eq!(at(100, state).after(ack, forward, 100), at(100, state), "{state:#b}");
            }
        }
        // A busy connection with a forged reset: no pause of its packets is needed.
        let mut life = at(100, ESTABLISHED).after(rst, false, 100);
        assert!(life.has_ended(protocol::TCP));
        for now in [100, 101, 101, 102] {
            life = life.after(ack, true, now);
        }
        assert_eq!(life, at(102, ESTABLISHED));
        // A connection that ends: each end finishes, long after the other one or not.
        for pause in [0, 1, 2, 60] {
            let closed = at(100, ESTABLISHED).after(fin, true, 100).after(ack, false, 100);
            let closed = closed.after(fin, false, 100 + pause).after(ack, true, 100 + pause);
            assert_eq!(closed, at(100 + pause, ESTABLISHED | state::CLOSED), "{pause}");
        }
    }

    #[test]
    fn a_syn_rides_only_forward_on_a_flow_that_is_not_closing() {
        let of = |state| Life { last_seen: 0, state };
        let (open, reset) = (of(state::REPLIED), of(state::RST));
        let closing = of(ESTABLISHED | state::OPENER_FIN);
        let (syn, syn_ack) = (signal(tcp::SYN), signal(tcp::SYN | tcp::ACK));
        let cases = [
            (open, syn, true, true),
            (open, syn, false, false),
            (closing, syn, true, false),
            (reset, syn, false, false),
            (closing, syn_ack, false, true),
            (closing, signal(tcp::ACK), true, true),
        ];
        for (life, signal, forward, expected) in cases {
            assert_eq!(life.admits(signal, forward), expected, "{life:?} {signal:?} forward {forward}");
        }
    }

    #[test]
    fn a_packet_goes_forward_from_the_end_that_has_opened_the_flow() {
        let forward = |low, from_low| Flow { opened_by_low: low, ..Flow::default() }.is_forward(from_low);
        let cases = [(1, true), (1, false), (0, true), (0, false)].map(|(low, from)| forward(low, from));
        assert_eq!(cases, [true, false, false, true]);
    }

    #[test]
    fn a_leg_is_kept_where_its_own_end_has_approved_it() {
        for (leg, other) in LEGS {
            let said =
                |flow: Flow, leg| (flow.approved_by(leg), flow.life().is_at_end(leg), flow.is_kept(leg));
            let entry = Steps::of(Flow { state: ESTABLISHED, ..Flow::default() });
            entry.approve(leg, 7, false);
            assert_eq!(said(entry.last(), leg), (7, false, false));
            entry.approve(leg, 8, true);
            assert_eq!(said(entry.last(), leg), (8, true, true));
            assert_eq!(said(entry.last(), other), (0, false, false));
            entry.approve(other, 9, true);
            entry.approve(leg, 10, false);
            assert_eq!(said(entry.last(), leg), (10, false, false));
            assert_eq!(said(entry.last(), other), (9, true, true));
            entry.approve(other, 11, false);
            assert_eq!(entry.state(), ESTABLISHED);
            // No policy isolated the pod then, so there is no approval to keep.
            assert_eq!(said(Flow::entered(1, true, leg, 0, leg.at_end()), leg), (0, true, false));
            assert_eq!(said(Flow::entered(1, true, leg, 7, leg.at_end()), leg), (7, true, true));
            // From an earlier version, under complete isolation, which never approved anything.
            assert_eq!(
                said(Flow::entered(1, true, leg, u32::MAX, leg.at_end()), leg),
                (u32::MAX, true, false)
            );
        }
    }

    #[test]
    fn a_flow_is_refused_until_that_end_approves_it_again_or_sends_on() {
        for ((leg, other), forward) in LEGS.into_iter().zip([true, false]) {
            let entry = Steps::of(Flow { state: state::REPLIED, ..Flow::default() });
            let life = entry.life();
            assert_eq!((life.is_answered(), life.is_established(), entry.is_refused()), (true, false, false));
            entry.approve(leg, 7, true);
            entry.approve(other, 9, true);
            let said = |entry: &Steps| {
                let flow = entry.last();
                [leg, other].map(|leg| (flow.approved_by(leg), flow.life().is_at_end(leg), flow.refuses(leg)))
            };
            let refused = [(Flow::REFUSED, false, true), (9, true, false)];
            entry.refuse(leg);
            assert_eq!((said(&entry), entry.is_refused()), (refused, true));
            assert!(!entry.go_on(!forward, |_| {}));
            entry.approve(other, 9, true);
            assert_eq!(
                (said(&entry), entry.is_refused()),
                (refused, true),
                "the other end says nothing about it"
            );
            let approved = entry.clone();
            approved.approve(leg, 8, false);
            assert_eq!((said(&approved)[0], approved.is_refused()), ((8, false, false), false));
            assert!(entry.go_on(forward, |_| {}) && entry.go_on(!forward, |_| {}));
            assert_eq!(said(&entry), [(0, false, false), (9, true, false)]);
            // Both ends refuse.
            entry.refuse(leg);
            entry.refuse(other);
            assert!(!entry.go_on(forward, |_| {}) && entry.go_on(!forward, |_| {}) && !entry.is_refused());
            assert_eq!(entry.state(), state::REPLIED);
            // The number that an earlier version used for a refusal.
            entry.approve(leg, u32::MAX, false);
            assert_eq!((entry.refuses(leg), entry.refuses(other), entry.is_refused()), (true, false, true));
        }
        let of = |state| Life { last_seen: 0, state };
        assert_eq!((of(ESTABLISHED).is_answered(), of(ESTABLISHED).is_established()), (true, true));
        assert_eq!((of(0).is_answered(), of(0).is_established()), (false, false));
    }

    #[test]
    fn only_words_that_change_are_written() {
        let flow = Flow { last_seen: 5, state: ESTABLISHED, ..Flow::default() };
        let written = |act: &dyn Fn(&Steps)| {
            let entry = Steps::of(flow);
            act(&entry);
            entry.0.into_inner().split_off(1)
        };
        let ack = signal(tcp::ACK);
        let nothing = Vec::<Flow>::new();
        assert_eq!(written(&|entry| entry.note(entry.life(), ack, true, 5)), nothing);
        assert_eq!(written(&|entry| entry.note(entry.life(), ack, true, 6)), [Flow { last_seen: 6, ..flow }]);
        let closing = ESTABLISHED | state::RESPONDER_FIN;
        assert_eq!(
            written(&|entry| entry.note(entry.life(), signal(tcp::FIN | tcp::ACK), false, 5)),
            [Flow { state: closing, ..flow }]
        );
        assert_eq!(
            written(&|entry| entry.approve(Leg::Responder, 7, false)),
            [Flow { responder_approved_by: 7, ..flow }]
        );
        assert_eq!(written(&|entry| assert!(entry.go_on(true, |_| {}))), nothing);
        let backward = Traffic { packets: 1, bytes: 60 };
        assert_eq!(written(&|entry| entry.count(false, 60)), [Flow { backward, ..flow }]);
    }

    #[test]
    fn the_mark_of_an_end_never_stands_beside_an_approval_that_is_not_the_ends() {
        for (leg, _) in LEGS {
            let marked = Flow::entered(1, true, leg, 7, ESTABLISHED | leg.at_end());
            let unmarked = Flow { state: ESTABLISHED, ..marked };
            let kept = |from: Flow, policy, at_end| {
                let entry = Steps::of(from);
                entry.approve(leg, policy, at_end);
                let steps = entry.0.into_inner();
                steps.iter().map(|flow| (flow.approved_by(leg), flow.is_kept(leg))).collect::<Vec<_>>()
            };
            assert_eq!(kept(marked, 8, false), [(7, true), (7, false), (8, false)]);
            assert_eq!(kept(unmarked, 8, true), [(7, false), (8, false), (8, true)]);
        }
    }

    #[test]
    fn an_end_confirms_what_its_policy_has_approved_by_its_mark_alone() {
        for (leg, _) in LEGS {
            let confirmed = |from: Flow, policy| {
                let entry = Steps::of(from);
                entry.confirm(leg, policy);
                entry.0.into_inner().split_off(1)
            };
            let approved = Flow::entered(1, true, leg, 7, ESTABLISHED);
            let marked = Flow { state: ESTABLISHED | leg.at_end(), ..approved };
            assert_eq!(confirmed(approved, 7), [marked]);
            assert_eq!(confirmed(marked, 7), Vec::<Flow>::new());
            assert!(marked.is_kept(leg));
            // Another CPU has refused the flow meanwhile.
            let refused = Flow::entered(1, true, leg, Flow::REFUSED, ESTABLISHED);
            let steps = confirmed(refused, 7);
            assert_eq!(steps, [Flow { state: ESTABLISHED | leg.at_end(), ..refused }]);
            assert!(!steps[0].is_kept(leg) && steps[0].refuses(leg));
            // No policy refuses the flow any more.
            let free = Flow::entered(1, true, leg, 0, ESTABLISHED);
            assert_eq!(confirmed(refused, 0), [free]);
            assert_eq!(confirmed(marked, 0), [approved, free]);
        }
    }

    #[test]
    fn what_is_revoked_leaves_neither_approval_nor_mark() {
        for (leg, other) in LEGS {
            for policy in [7, Flow::REFUSED, 0] {
                let flow = Flow::entered(1, true, leg, policy, ESTABLISHED | leg.at_end() | other.at_end());
                let entry = Steps::of(flow);
                entry.revoke(leg);
                assert_eq!(entry.last(), Flow::entered(1, true, leg, 0, ESTABLISHED | other.at_end()));
                // At no moment does the mark stand beside what was not the end's.
                let steps = entry.0.into_inner();
                assert!(steps[1..].iter().all(|step| !step.is_kept(leg)), "{steps:?}");
            }
        }
    }

    #[test]
    fn a_sender_that_goes_on_is_named_if_it_had_refused() {
        for ((sender, receiver), forward) in LEGS.into_iter().zip([true, false]) {
            let named = |entry: &Steps| {
                let mut named = None;
                entry.go_on(forward, |leg| named = Some(leg));
                named
            };
            let entry = Steps::of(Flow::entered(1, true, sender, Flow::REFUSED, ESTABLISHED));
            assert_eq!([named(&entry), named(&entry)], [Some(sender), None]);
            assert_eq!(named(&Steps::of(Flow::entered(1, true, receiver, Flow::REFUSED, 0))), None);
        }
    }

    #[test]
    fn an_entry_that_is_given_up_is_expired_and_approved_by_nobody() {
        for now in [0, 5, u32::MAX] {
            for protocol in [protocol::TCP, protocol::UDP, protocol::SCTP, protocol::ICMP] {
                let flow = Flow::entered(now, true, Leg::Opener, 7, ESTABLISHED);
                let entry = Steps::of(Flow { responder_approved_by: 8, ..flow });
                entry.give_up(now);
                let last = entry.last();
                assert_eq!((last.opener_approved_by, last.responder_approved_by), (0, 0));
                assert!(last.life().is_expired(protocol, now), "{protocol} {now}");
            }
        }
    }

    #[test]
    fn nobody_has_approved_a_flow_until_all_of_its_entry_is_of_it() {
        let before = Flow {
            last_seen: 5,
            opener_approved_by: 7,
            responder_approved_by: 8,
            opened_by_low: 1,
            state: ESTABLISHED | state::OPENER_AT_END,
            place: 3,
            opened: 4,
            attachment: 9,
            forward: Traffic { packets: 1, bytes: 2 },
            backward: Traffic { packets: 3, bytes: 4 },
        };
        let flow = Flow {
            place: 6,
            attachment: 10,
            backward: Traffic { packets: 1, bytes: 60 },
            ..Flow::entered(500, false, Leg::Responder, 11, state::RESPONDER_AT_END)
        };
        let entry = Steps::of(before);
        entry.begin(&flow);
        assert_eq!(entry.last(), flow);
        for step in entry.0.into_inner() {
            let is_unapproved = step.opener_approved_by == 0 && step.responder_approved_by == 0;
            let is_old = Flow { opener_approved_by: 7, responder_approved_by: 8, ..step } == before;
            assert!(is_unapproved || is_old || step == flow, "{step:?}");
        }
    }
}
