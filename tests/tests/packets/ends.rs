//! Both ends of a flow on one node, each under its own policy, and other attachments that its packets reach.

use netattach_common::entry::Entry;
use netattach_common::flow::state::{OPENER_AT_END, REPLIED, RESPONDER_AT_END};

use super::*;

/// The attachment with the peer's addresses.
const SERVER: u32 = 8;
/// A third attachment, in tests that attach it.
const THIRD: u32 = 9;
const THIRD_V4: &str = "10.0.0.3";
const THIRD_V6: &str = "fd00::3";
/// An address that the first two share.
const VIRTUAL: &str = "10.0.0.100";

fn checked() -> Checks {
    Checks { source_address: true, ..Checks::default() }
}

/// Flows outlive a change of policy.
fn keeping() -> Checks {
    Checks { keep_established: true, ..checked() }
}

/// [`POD`] and [`SERVER`] in one network.
struct Ends(Rig);

impl Ends {
    fn new(flags: Checks) -> Self {
        let ends = Self(Rig::new());
        ends.put(flags);
        ends
    }

    fn put(&self, flags: Checks) {
        for (id, mac, own) in [
            (POD, POD_MAC, [POD_V4, POD_V6]),
            (SERVER, PEER_MAC, [PEER_V4, PEER_V6]),
            (THIRD, Mac([2, 0, 0, 0, 0, 3]), [THIRD_V4, THIRD_V6]),
        ] {
            let shared = if id == THIRD { Vec::new() } else { vec![VIRTUAL.parse().unwrap()] };
            let addresses = own.map(|address| address.parse::<IpAddr>().unwrap()).to_vec();
            let attachment = Attachment { mac, addresses, shared, flags, ..bare() };
            self.0.dataplane.attachments().put(id, &attachment).unwrap();
        }
    }

    /// Puts an attachment under policies, 0 for none.
    fn isolate(&self, id: u32, ingress: u32, egress: u32) {
        self.0.dataplane.policies().set(id, PolicyIds { ingress, egress }).unwrap();
    }

    /// Runs a packet at an attachment's device.
    fn at(&self, id: u32, side: Side, packet: &Packet) -> Outcome {
        self.0.dataplane.attachments().bind(DEVICE, id).unwrap();
        self.0.run_as(id, side, &packet.frame())
    }
}

const REFUSED_IN: Outcome = Err(DropReason::IngressPeer);

/// Datagrams in both directions between the two: by UDP with one port at both ends, read in one pass and field by
/// field, and of a protocol without ports.
fn datagrams() -> Vec<(Packet, Packet)> {
    let kinds: [fn(Packet) -> Packet; 3] = [
        |packet| packet.udp(5, 5),
        |packet| packet.options(&[1, 1, 1, 0]).udp(6, 6),
        |packet| packet.payload(50, &[0; 8]),
    ];
    let families = [(from_pod(), to_pod()), (from_pod6(), to_pod6())];
    let of_family = |(out, back): (Packet, Packet)| kinds.map(|kind| (kind(out.clone()), kind(back.clone())));
    families.into_iter().flat_map(of_family).collect()
}

#[test]
fn a_refused_datagram_keeps_its_receiver_from_nothing() {
    let ends = Ends::new(checked());
    let (all, none) = (ends.0.install(&allow_all()), ends.0.install(&deny_all()));
    ends.isolate(POD, none, all);
    ends.isolate(SERVER, 0, all);
    for (out, back) in datagrams() {
        assert_eq!(ends.at(SERVER, FromPod, &back), Ok(()));
        assert_eq!(ends.at(POD, ToPod, &back), REFUSED_IN, "{back:?}");
        // The pod's own, which is answered.
        assert_eq!(ends.at(POD, FromPod, &out), Ok(()), "{out:?}");
        assert_eq!(ends.at(SERVER, ToPod, &out), Ok(()));
        assert_eq!(ends.at(SERVER, FromPod, &back), Ok(()));
        assert_eq!(ends.at(POD, ToPod, &back), Ok(()), "{back:?}");
    }
    let opened = [POD, SERVER].map(|id| ends.0.dataplane.stats(id).unwrap().new_flows);
    assert_eq!(opened, [6, 6]);
}

#[test]
fn who_refuses_a_datagram_sends_what_its_own_policy_allows() {
    let ends = Ends::new(checked());
    let (all, none) = (ends.0.install(&allow_all()), ends.0.install(&deny_all()));
    // The packets of one flow do not affect the other.
    let (out, back) = (from_pod().udp(5, 5), to_pod().udp(5, 5));
    ends.isolate(POD, none, all);
    ends.isolate(SERVER, none, all);
    for _ in 0..2 {
        assert_eq!(ends.at(SERVER, FromPod, &back), Ok(()));
        assert_eq!(ends.at(POD, ToPod, &back), REFUSED_IN);
        assert_eq!(ends.at(POD, FromPod, &out), Ok(()));
        assert_eq!(ends.at(SERVER, ToPod, &out), REFUSED_IN);
    }
    // A flow that may not be opened either is dropped for the reason of its possible replies.
    let (out, back) = (from_pod().udp(6, 6), to_pod().udp(6, 6));
    ends.isolate(POD, none, none);
    assert_eq!(ends.at(SERVER, FromPod, &back), Ok(()));
    assert_eq!(ends.at(POD, FromPod, &out), REFUSED_IN);
    // A segment is of the connection that is refused; one that opens another is judged as that.
    ends.isolate(POD, none, all);
    assert_eq!(ends.at(SERVER, FromPod, &to_pod().tcp(2000, 80, SYN)), Ok(()));
    for flags in [SYN | ACK, ACK, RST] {
        assert_eq!(ends.at(POD, FromPod, &from_pod().tcp(80, 2000, flags)), REFUSED_IN);
    }
    assert_eq!(ends.at(POD, FromPod, &from_pod().tcp(80, 2000, SYN)), Ok(()));
}

/// A server would otherwise reopen, by continuing to send, a conversation that its policy has ended.
///
/// Rows: C85.
#[test]
fn a_conversation_that_a_policy_ends_is_over_for_both_and_for_no_longer_than_its_timeout() {
    let ends = Ends::new(checked());
    let (all, none) = (ends.0.install(&allow_all()), ends.0.install(&deny_all()));
    let (out, back) = (from_pod().udp(5, 5), to_pod().udp(5, 5));
    ends.isolate(POD, all, all);
    ends.isolate(SERVER, 0, all);
    let both_ways = || {
        // A packet that is dropped where it leaves does not arrive.
        let way = |from, to, packet: &Packet| {
            let left = ends.at(from, FromPod, packet);
            [left, left.and_then(|()| ends.at(to, ToPod, packet))]
        };
        let ([asked, heard], [answered, told]) = (way(SERVER, POD, &back), way(POD, SERVER, &out));
        [asked, heard, answered, told]
    };
    let flow = || {
        let flow = ends.0.only_flow();
        (flow.opened_by_low, flow.state, flow.responder_approved_by)
    };
    assert_eq!(both_ways(), [Ok(()); 4]);
    assert_eq!(flow(), (0, REPLIED, all));
    ends.isolate(POD, none, all);
    assert_eq!(both_ways()[..3], [Ok(()), REFUSED_IN, REFUSED_IN]);
    assert_eq!(flow(), (0, REPLIED, Flow::REFUSED));
    // The policies of the other end do not matter.
    ends.isolate(SERVER, 0, ends.0.install(&allow_all()));
    assert_eq!(ends.at(SERVER, FromPod, &back), Ok(()));
    assert_eq!(flow(), (0, REPLIED, Flow::REFUSED));
    // Allowed again, also by the policy that it was allowed by.
    ends.isolate(POD, all, all);
    assert_eq!(ends.at(POD, ToPod, &back), Ok(()));
    assert_eq!(flow(), (0, REPLIED, all));
    // Packets that the other end still sends do not prolong it.
    ends.isolate(POD, none, all);
    assert_eq!(both_ways()[..3], [Ok(()), REFUSED_IN, REFUSED_IN]);
    ends.0.age(100);
    assert_eq!(both_ways()[..3], [Ok(()), REFUSED_IN, REFUSED_IN]);
    ends.0.age(25);
    assert_eq!(both_ways(), [Ok(()), REFUSED_IN, Ok(()), Ok(())]);
    assert_eq!(both_ways(), [Ok(()); 4]);
}

/// Rows: C85.
#[test]
fn a_conversation_that_a_policy_has_ended_goes_on_when_there_is_none_any_more() {
    let ends = Ends::new(checked());
    let (all, none) = (ends.0.install(&allow_all()), ends.0.install(&deny_all()));
    let refused_out = Err(DropReason::EgressPeer);
    let lasts = |sent: &[(u32, Side, &Packet)], opened_by_low: u8| {
        for seconds in [1, 100, 25] {
            ends.0.age(seconds);
            for (id, side, packet) in sent {
                assert_eq!(ends.at(*id, *side, packet), Ok(()), "{seconds}: {packet:?}");
            }
            let flow = ends.0.only_flow();
            assert_eq!((flow.opened_by_low, flow.is_refused()), (opened_by_low, false), "{seconds}");
        }
    };
    let (out, back) = (from_pod().udp(5, 5), to_pod().udp(5, 5));

    // The pod has been called, and its packets are stopped; then it is not isolated for them any more, or not at all.
    for (lifted, sent) in [
        ((0, all), &[(SERVER, FromPod, &back), (POD, ToPod, &back)][..]),
        ((0, 0), &[(SERVER, FromPod, &back), (POD, FromPod, &out), (SERVER, ToPod, &out)][..]),
    ] {
        ends.isolate(POD, all, all);
        ends.isolate(SERVER, none, all);
        assert_eq!(ends.at(SERVER, FromPod, &back), Ok(()));
        assert_eq!(ends.at(POD, FromPod, &out), Ok(()));
        ends.isolate(POD, none, all);
        assert_eq!(ends.at(POD, FromPod, &out), REFUSED_IN);
        ends.isolate(POD, lifted.0, lifted.1);
        lasts(sent, 0);
        ends.0.age(200);
    }

    // The pod has called, and packets to it are stopped. Afterwards it only listens.
    ends.isolate(POD, none, all);
    ends.isolate(SERVER, 0, 0);
    assert_eq!(ends.at(POD, FromPod, &out), Ok(()));
    assert_eq!(ends.at(POD, ToPod, &back), Ok(()));
    ends.isolate(POD, none, none);
    assert_eq!(ends.at(POD, ToPod, &back), refused_out);
    assert_eq!(ends.0.only_flow().opener_approved_by, Flow::REFUSED);
    ends.isolate(POD, none, 0);
    // A copy at another attachment's device does not count for it.
    ends.isolate(THIRD, none, 0);
    ends.0.age(1);
    assert_eq!(ends.at(THIRD, ToPod, &back), Ok(()));
    assert_eq!(ends.0.only_flow().opener_approved_by, Flow::REFUSED);
    lasts(&[(POD, ToPod, &back)], 1);
}

/// For a pod whose policy does not fit; whether another policy had ended the conversation before or it was in
/// progress.
///
/// Rows: C94.
#[test]
fn complete_isolation_ends_conversations_and_goes_on_with_none_that_had_ended() {
    for (opener, answerer, reason) in
        [(FromPod, ToPod, DropReason::EgressPeer), (ToPod, FromPod, DropReason::IngressPeer)]
    {
        for (flags, had_ended) in
            [(checked(), false), (checked(), true), (keeping(), false), (keeping(), true)]
        {
            let ends = Ends::new(checked());
            let (all, none) = (ends.0.install(&allow_all()), ends.0.install(&deny_all()));
            for (out, back) in datagrams() {
                let at = |side: Side| ends.at(POD, side, if side == FromPod { &out } else { &back });
                // Where flows are kept, this one is from before, so that there is no approval to keep.
                ends.put(checked());
                ends.isolate(POD, all, all);
                assert_eq!([opener, answerer].map(at), [Ok(()); 2], "{out:?}");
                ends.put(flags);
                if had_ended {
                    ends.isolate(POD, none, none);
                    assert_eq!([answerer, opener].map(at), [Err(reason); 2], "{out:?}");
                }
                ends.isolate(POD, PolicyIds::DENY_ALL, PolicyIds::DENY_ALL);
                let sent = [answerer, answerer, opener, answerer, answerer, opener];
                assert_eq!(sent.map(at), [Err(reason); 6], "{opener:?} {flags:?} {had_ended}: {out:?}");
            }
        }
    }
}

/// An earlier version marked a stopped leg by the number of complete isolation.
///
/// Rows: C94.
#[test]
fn a_flow_of_an_earlier_version_does_not_go_on_under_complete_isolation() {
    let ends = Ends::new(checked());
    let all = ends.0.install(&allow_all());
    let (out, back) = (from_pod().udp(5, 5), to_pod().udp(5, 5));
    ends.isolate(POD, all, all);
    assert_eq!(ends.at(POD, FromPod, &out), Ok(()));
    assert_eq!(ends.at(POD, ToPod, &back), Ok(()));
    let mut flows = ends.0.flows();
    let (key, flow) = flows.iter().next().unwrap().unwrap();
    for at_end in [0, OPENER_AT_END] {
        let noted = Flow { opener_approved_by: PolicyIds::DENY_ALL, state: flow.state | at_end, ..flow };
        ends.put(keeping());
        ends.isolate(POD, PolicyIds::DENY_ALL, PolicyIds::DENY_ALL);
        for (side, packet) in [(ToPod, &back), (FromPod, &out)] {
            flows.insert(key, noted, 0).unwrap();
            assert_eq!(ends.at(POD, side, packet), Err(DropReason::EgressPeer), "{at_end} {side:?}");
        }
        let error = Packet::between("10.9.9.9", POD_V4).unreachable(&out);
        flows.insert(key, noted, 0).unwrap();
        assert_eq!(ends.at(POD, ToPod, &error), Err(DropReason::IcmpUnrelated), "{at_end}");
    }
}

/// A frame to one pod's address may carry a packet to another's, and group frames reach all.
///
/// Rows: C85.
#[test]
fn where_flows_are_kept_nobody_approves_one_for_another() {
    let ends = Ends::new(checked());
    let (all, none) = (ends.0.install(&allow_all()), ends.0.install(&deny_all()));
    ends.isolate(POD, all, 0);
    ends.isolate(SERVER, none, all);
    // From before flows were kept.
    let earlier = Packet::between(THIRD_V4, PEER_V4).udp(1, 1);
    assert_eq!(ends.at(POD, ToPod, &earlier), Ok(()));
    assert_eq!(ends.at(SERVER, ToPod, &earlier), REFUSED_IN);
    ends.put(keeping());
    assert_eq!(ends.at(SERVER, ToPod, &earlier), REFUSED_IN);
    for (from, to) in
        [(THIRD_V4, PEER_V4), (THIRD_V4, "224.0.0.9"), (THIRD_V6, PEER_V6), (THIRD_V6, "ff05::9")]
    {
        for packet in [Packet::between(from, to).udp(2, 2), Packet::between(from, to).tcp(2, 2, SYN)] {
            for _ in 0..2 {
                assert_eq!(ends.at(POD, ToPod, &packet), Ok(()));
                assert_eq!(ends.at(SERVER, ToPod, &packet), REFUSED_IN, "{packet:?}");
            }
        }
    }
    // An error about it does not approve it either.
    ends.isolate(THIRD, 0, all);
    let call = Packet::between(THIRD_V4, PEER_V4).udp(3, 3);
    assert_eq!(ends.at(THIRD, FromPod, &call), Ok(()));
    let error = Packet::between(THIRD_V4, PEER_V4).unreachable(&Packet::between(PEER_V4, THIRD_V4).udp(3, 3));
    assert_eq!(ends.at(POD, ToPod, &error), Ok(()), "by a rule without ports");
    assert_eq!(ends.at(SERVER, ToPod, &call), REFUSED_IN);
}

/// Rows: C85.
#[test]
fn where_flows_are_kept_each_end_keeps_its_own() {
    let ends = Ends::new(keeping());
    let [all, other, third] = [(); 3].map(|()| ends.0.install(&allow_all()));
    let none = ends.0.install(&deny_all());
    ends.isolate(POD, all, 0);
    ends.isolate(SERVER, other, 0);
    let (call, answer) =
        (Packet::between(THIRD_V4, POD_V4).udp(1, 2), Packet::between(POD_V4, THIRD_V4).udp(2, 1));
    let approved = || {
        let flow = ends.0.only_flow();
        (flow.responder_approved_by, flow.state & (OPENER_AT_END | RESPONDER_AT_END))
    };
    // A bridge floods it: the copy changes nothing.
    assert_eq!(ends.at(POD, ToPod, &call), Ok(()));
    assert_eq!(ends.at(SERVER, ToPod, &call), Ok(()));
    assert_eq!(approved(), (all, RESPONDER_AT_END));
    ends.isolate(POD, none, none);
    ends.isolate(SERVER, none, none);
    for _ in 0..2 {
        assert_eq!(ends.at(POD, ToPod, &call), Ok(()));
        assert_eq!(ends.at(SERVER, ToPod, &call), REFUSED_IN, "kept by the other");
        assert_eq!(ends.at(POD, FromPod, &answer), Ok(()));
    }
    let error = Packet::between("10.9.9.9", POD_V4).unreachable(&answer);
    assert_eq!(ends.at(POD, ToPod, &error), Ok(()), "it goes on, and so do errors about it");
    assert_eq!(approved(), (all, RESPONDER_AT_END), "not by a policy that does not allow it");
    ends.isolate(POD, third, none);
    assert_eq!(ends.at(POD, ToPod, &call), Ok(()));
    assert_eq!(approved(), (third, RESPONDER_AT_END));
}

/// Equal policies have one number, and a copy of a frame that a bridge floods may come first.
///
/// Rows: C85.
#[test]
fn where_flows_are_kept_an_end_keeps_what_another_under_its_policy_has_seen_first() {
    let ends = Ends::new(keeping());
    let (all, none) = (ends.0.install(&allow_all()), ends.0.install(&deny_all()));
    for (from, to) in [(THIRD_V4, POD_V4), (THIRD_V6, POD_V6)] {
        ends.isolate(POD, all, 0);
        ends.isolate(SERVER, all, 0);
        let [call, goes_on] = [SYN, ACK].map(|flags| Packet::between(from, to).tcp(1, 2, flags));
        assert_eq!(ends.at(SERVER, ToPod, &call), Ok(()));
        assert_eq!(ends.at(POD, ToPod, &call), Ok(()));
        ends.isolate(POD, none, none);
        ends.isolate(SERVER, none, none);
        assert_eq!(ends.at(POD, ToPod, &goes_on), Ok(()), "{to}");
        assert_eq!(ends.at(SERVER, ToPod, &goes_on), REFUSED_IN, "{to}: kept by the other");
    }
}

/// Rows: C85.
#[test]
fn where_flows_are_kept_an_end_notes_what_goes_on_there_once_a_second() {
    for copy_first in [true, false] {
        let ends = Ends::new(if copy_first { keeping() } else { checked() });
        let (all, none) = (ends.0.install(&allow_all()), ends.0.install(&deny_all()));
        let call = Packet::between(THIRD_V4, POD_V4).udp(1, 2);
        let approved = || {
            let flow = ends.0.only_flow();
            (flow.responder_approved_by, flow.state & (OPENER_AT_END | RESPONDER_AT_END))
        };
        ends.isolate(POD, all, 0);
        ends.isolate(SERVER, all, 0);
        // At the other attachment's device, or from before flows were kept.
        assert_eq!(ends.at(if copy_first { SERVER } else { POD }, ToPod, &call), Ok(()));
        assert_eq!(approved(), (all, 0));
        ends.put(keeping());
        for (id, at_end) in [(SERVER, 0), (POD, RESPONDER_AT_END), (SERVER, RESPONDER_AT_END)] {
            ends.0.age(1);
            assert_eq!(ends.at(id, ToPod, &call), Ok(()));
            assert_eq!(approved(), (all, at_end), "{id}");
        }
        ends.isolate(POD, none, none);
        ends.isolate(SERVER, none, none);
        assert_eq!(ends.at(POD, ToPod, &call), Ok(()));
        assert_eq!(ends.at(SERVER, ToPod, &call), REFUSED_IN, "kept by the other");
    }
}

/// Rows: C85.
#[test]
fn where_flows_are_kept_openers_keep_those_of_addresses_that_nobody_shares() {
    let ends = Ends::new(keeping());
    let (all, none) = (ends.0.install(&allow_all()), ends.0.install(&deny_all()));
    for (from, to, goes_on) in [
        (POD_V4, THIRD_V4, Ok(())),
        (POD_V6, THIRD_V6, Ok(())),
        ("fe80::ff:fe00:1", "fe80::9", Ok(())),
        (VIRTUAL, THIRD_V4, Err(DropReason::EgressPeer)),
    ] {
        ends.isolate(POD, 0, all);
        ends.isolate(SERVER, 0, none);
        let packet = Packet::between(from, to).tcp(1, 2, SYN);
        assert_eq!(ends.at(POD, FromPod, &packet), Ok(()), "{from}");
        if from == VIRTUAL {
            assert_eq!(
                ends.at(SERVER, FromPod, &packet),
                Err(DropReason::EgressPeer),
                "approved for another"
            );
        }
        ends.isolate(POD, 0, none);
        assert_eq!(ends.at(POD, FromPod, &packet), goes_on, "{from}");
    }
}
