//! Policy verdicts.

use super::*;

/// Rows: C72, C73, C81.
#[test]
fn policy_denies_by_peer_and_by_port_in_both_families() {
    let rig = Rig::isolated(Some(&web_from_peer()), Some(&web_from_peer()));
    let others = [("10.0.0.9", POD_V4), ("fd00::9", POD_V6)];
    for (ours, peer) in [(POD_V4, PEER_V4), (POD_V6, PEER_V6)] {
        let (out, into) = (Packet::between(ours, peer), Packet::between(peer, ours));
        assert_eq!(rig.run(FromPod, &out.clone().tcp(1000, 80, SYN).frame()), Ok(()));
        assert_eq!(rig.run(ToPod, &into.clone().tcp(1001, 80, SYN).frame()), Ok(()));
        let denied = [
            (FromPod, out.clone().tcp(1002, 81, SYN), DropReason::EgressPort),
            (FromPod, out.clone().udp(1002, 80), DropReason::EgressPort),
            (FromPod, out.ping(1), DropReason::EgressPort),
            (ToPod, into.clone().tcp(80, 81, SYN), DropReason::IngressPort),
            (ToPod, into.clone().sctp(1, 80, INIT), DropReason::IngressPort),
            (ToPod, into.ping(1), DropReason::IngressPort),
        ];
        for (side, packet, reason) in denied {
            assert_eq!(rig.run(side, &packet.frame()), Err(reason), "{packet:?}");
        }
    }
    for (other, ours) in others {
        let into = Packet::between(other, ours).tcp(1, 80, SYN);
        assert_eq!(rig.run(ToPod, &into.frame()), Err(DropReason::IngressPeer));
        let out = Packet::between(ours, other).tcp(1, 80, SYN);
        assert_eq!(rig.run(FromPod, &out.frame()), Err(DropReason::EgressPeer));
    }
    let stats = rig.dataplane.stats(POD).unwrap();
    assert_eq!(stats.new_flows, 4, "denied packets open no flow");
}

/// Rows: C20, C78.
#[test]
fn a_direction_without_policy_stays_open() {
    let rig = Rig::isolated(Some(&deny_all()), None);
    assert_eq!(rig.run(ToPod, &to_pod().tcp(1, 80, SYN).frame()), Err(DropReason::IngressPeer));
    assert_eq!(rig.run(FromPod, &from_pod().tcp(1000, 22, SYN).frame()), Ok(()));
    assert_eq!(rig.run(ToPod, &to_pod().tcp(22, 1000, SYN | ACK).frame()), Ok(()));
    assert_eq!(rig.run(FromPod, &from_pod().udp(1000, 53).frame()), Ok(()));
    assert_eq!(rig.run(ToPod, &to_pod().udp(53, 1000).frame()), Ok(()));
    assert_eq!(rig.run(ToPod, &to_pod().udp(53, 1001).frame()), Err(DropReason::IngressPeer));
}

#[test]
fn the_longest_peer_prefix_decides_as_except_needs() {
    // 10.0.0.0/8 except 10.1.0.0/16, which another rule opens for one host and UDP 53 only.
    let compiled = policy(
        &[("10.0.0.0/8", 1), ("10.1.0.0/16", 2), ("10.1.0.9/32", 3), ("fd00::/16", 1), ("fd00:1::/32", 2)],
        &[(1, any()), (3, port(17, 53))],
    );
    let rig = Rig::isolated(None, Some(&compiled));
    let cases = [
        (POD_V4, "10.2.0.1", Ok(())),
        (POD_V4, "10.1.0.1", Err(DropReason::EgressPort)),
        (POD_V4, "10.1.0.9", Ok(())),
        (POD_V4, "192.0.2.1", Err(DropReason::EgressPeer)),
        (POD_V6, "fd00:2::1", Ok(())),
        (POD_V6, "fd00:1::1", Err(DropReason::EgressPort)),
        (POD_V6, "fe00::1", Err(DropReason::EgressPeer)),
    ];
    for (ours, peer, expected) in cases {
        assert_eq!(rig.run(FromPod, &Packet::between(ours, peer).udp(1, 53).frame()), expected, "{peer}");
    }
    let other_port = Packet::between(POD_V4, "10.1.0.9").udp(1, 54).frame();
    assert_eq!(rig.run(FromPod, &other_port), Err(DropReason::EgressPort));
}

#[test]
fn port_blocks_begin_and_end_where_they_should() {
    // 5000 to 5003, and 6000 to 6001, as blocks.
    let block = |port, bits| lookup::Traffic::Ports { protocol: 6, port, bits };
    let compiled = policy(&[("10.0.0.2/32", 1)], &[(1, block(5000, 14)), (1, block(6000, 15))]);
    let rig = Rig::isolated(Some(&compiled), None);
    for (number, allowed) in
        [(4999, false), (5000, true), (5003, true), (5004, false), (5999, false), (6001, true), (6002, false)]
    {
        let outcome = rig.run(ToPod, &to_pod().tcp(number, number, SYN).frame());
        assert_eq!(outcome.is_ok(), allowed, "{number}: {outcome:?}");
    }
}

/// Rows: C79.
#[test]
fn icmp_errors_pass_for_known_flows_only() {
    let rig = Rig::isolated(Some(&deny_all()), Some(&web_from_peer()));
    for (out, into, router, ours) in
        [(from_pod(), to_pod(), "10.9.9.9", POD_V4), (from_pod6(), to_pod6(), "fd00::99", POD_V6)]
    {
        let call = out.clone().tcp(3000, 80, SYN);
        assert_eq!(rig.run(FromPod, &call.frame()), Ok(()));
        let too_big = Packet::between(router, ours).unreachable(&call);
        assert_eq!(rig.run(ToPod, &too_big.frame()), Ok(()));
        let unrelated = Err(DropReason::IcmpUnrelated);
        let other_call = out.clone().tcp(3001, 80, SYN);
        let about_other = Packet::between(router, ours).unreachable(&other_call);
        assert_eq!(rig.run(ToPod, &about_other.frame()), unrelated);
        let not_to_the_sender = Packet::between(router, ours).unreachable(&into.tcp(80, 3000, ACK));
        assert_eq!(rig.run(ToPod, &not_to_the_sender.frame()), unrelated);
        let quotes_nothing = Packet::between(router, ours).icmp(if ours == POD_V4 { 3 } else { 1 }, &[0; 8]);
        assert_eq!(rig.run(ToPod, &quotes_nothing.frame()), unrelated);
    }
    assert_eq!(rig.dataplane.stats(POD).unwrap().new_flows, 2);
    rig.enforce(Some(&allow_all()), None);
    let stray = Packet::between("10.9.9.9", POD_V4).unreachable(&from_pod().udp(7, 7));
    assert_eq!(rig.run(ToPod, &stray.frame()), Ok(()), "rules without ports cover it");
}

/// An ICMP error of a pod about packets that it has not received is no reply to them, whatever their flow.
///
/// Rows: C79.
#[test]
fn a_pod_sends_icmp_errors_about_its_own_flows_only() {
    const OTHER: u32 = 8;
    let rig = Rig::isolated(None, Some(&deny_all()));
    let addresses = vec![PEER_V4.parse().unwrap(), PEER_V6.parse().unwrap()];
    let other = Attachment { mac: PEER_MAC, addresses, ..bare() };
    rig.dataplane.attachments().put(OTHER, &other).unwrap();
    let all = rig.install(&allow_all());
    rig.dataplane.policies().set(OTHER, PolicyIds { ingress: all, egress: all }).unwrap();
    let at = |attachment, side, packet: &Packet| {
        rig.dataplane.attachments().bind(DEVICE, attachment).unwrap();
        rig.run_as(attachment, side, &packet.frame())
    };
    for (ours, theirs, caller) in [(POD_V4, PEER_V4, "10.0.0.3"), (POD_V6, PEER_V6, "fd00::3")] {
        let about = |call: &Packet| Packet::between(ours, caller).unreachable(call);
        let their_call = Packet::between(caller, theirs).udp(1000, 443);
        assert_eq!(at(OTHER, ToPod, &their_call), Ok(()));
        assert_eq!(at(POD, FromPod, &about(&their_call)), Err(DropReason::IcmpUnrelated));
        let our_call = Packet::between(caller, ours).udp(1000, 443);
        assert_eq!(at(POD, ToPod, &our_call), Ok(()));
        assert_eq!(at(POD, FromPod, &about(&our_call)), Ok(()));
    }
    // A router's errors are about packets that it forwards.
    rig.put(Checks { source_mac: true, ..Checks::default() });
    let call = Packet::between("10.0.0.3", PEER_V4).udp(1000, 443);
    assert_eq!(at(POD, FromPod, &Packet::between(POD_V4, "10.0.0.3").unreachable(&call)), Ok(()));
}

/// Receivers of an error use the quoted packet, whether a policy isolates the error's sender or not.
///
/// Rows: C79.
#[test]
fn a_pod_that_nobody_isolates_sends_icmp_errors_about_what_it_was_sent() {
    let rig = Rig::new();
    let of = |ours: &str, theirs: &str, caller: &str, kinds: [u8; 4], at: usize| {
        let about = |to: &str| {
            let call = Packet::between(caller, to).udp(1000, 443);
            Packet::between(ours, caller).unreachable(&call).frame()
        };
        for kind in kinds {
            let of_kind = |mut frame: Vec<u8>| {
                frame[at] = kind;
                frame
            };
            assert_eq!(rig.run(FromPod, &of_kind(about(ours))), Ok(()), "{kind}");
            let forged = rig.run(FromPod, &of_kind(about(theirs)));
            assert_eq!(forged, Err(DropReason::IcmpUnrelated), "{kind}");
            assert_eq!(rig.run(ToPod, &of_kind(about(theirs))), Ok(()), "{kind} from others");
        }
        // The quoted packet comes in a later fragment, or is of a kind that receivers do not read.
        let header = || Packet::between(ours, caller).icmp(kinds[0], &[0; 4]);
        let cut = rig.run(FromPod, &header().fragment(0, true).frame());
        assert_eq!(cut, Err(DropReason::Malformed), "in another fragment");
        let call = Packet::between(caller, ours).udp(1000, 443).frame();
        let behind = [&header().frame()[..], &call[14..]].concat();
        assert_eq!(rig.run(FromPod, &behind), Err(DropReason::Malformed), "behind the packet");
    };
    of(POD_V4, PEER_V4, "10.0.0.3", [3, 4, 11, 12], 14 + 20);
    of(POD_V6, PEER_V6, "fd00::3", [1, 2, 3, 4], 14 + 40);

    // Packets to an address that pods share may reach any of them.
    let flags = Checks { source_mac: true, source_address: true, ..Checks::default() };
    let addresses = vec![POD_V4.parse().unwrap()];
    let shared = vec![PEER_V4.parse().unwrap()];
    rig.dataplane.attachments().put(POD, &Attachment { addresses, shared, flags, ..bare() }).unwrap();
    let about = |to: &str| {
        let call = Packet::between("10.0.0.3", to).udp(1000, 443);
        rig.run(FromPod, &Packet::between(POD_V4, "10.0.0.3").unreachable(&call).frame())
    };
    assert_eq!([POD_V4, PEER_V4].map(about), [Ok(()); 2]);
    assert_eq!(about("10.0.0.9"), Err(DropReason::IcmpUnrelated));
    // A router's errors are about packets that it forwards.
    rig.put(Checks { source_mac: true, ..Checks::default() });
    assert_eq!(about("10.0.0.9"), Ok(()));
}

#[test]
fn stray_fragments_need_a_rule_without_ports() {
    let ports_only = web_from_peer();
    let rig = Rig::isolated(Some(&ports_only), None);
    for into in [to_pod(), to_pod6()] {
        assert_eq!(rig.run(ToPod, &into.clone().fragment(0, true).tcp(1, 80, SYN).frame()), Ok(()));
        let later = into.clone().identification(2).fragment(3, false).payload(6, &[0xff; 40]).frame();
        assert_eq!(rig.run(ToPod, &later), Err(DropReason::FragmentMiss));
    }
    let atomic = to_pod6().fragment(0, false).tcp(2, 80, SYN).frame();
    assert_eq!(rig.run(ToPod, &atomic), Ok(()));
    let protocol = policy(&[("10.0.0.2/32", 1)], &[(1, lookup::Traffic::Protocol(17))]);
    rig.enforce(Some(&protocol), None);
    let later = |number| to_pod().identification(3).fragment(3, true).payload(number, &[0xff; 40]).frame();
    assert_eq!(rig.run(ToPod, &later(17)), Ok(()));
    assert_eq!(rig.run(ToPod, &later(6)), Err(DropReason::FragmentMiss));
    assert_eq!(rig.run(FromPod, &from_pod().fragment(3, true).payload(6, &[0; 8]).frame()), Ok(()));
}

/// Rows: C80.
#[test]
fn link_control_passes_a_policy_that_denies_all() {
    let rig = Rig::isolated(Some(&deny_all()), Some(&deny_all()));
    let peer_mac = Mac([2, 0, 0, 0, 0, 2]);
    let passing = [
        (ToPod, arp_request(peer_mac, PEER_V4, POD_V4)),
        (FromPod, arp_request(POD_MAC, POD_V4, PEER_V4)),
        (ToPod, to_pod6().neighbour(135, POD_V6, &[(1, peer_mac)]).frame()),
        (ToPod, Packet::between("fe80::9", "ff02::1").hop_limit(255).icmp(134, &[0; 12]).frame()),
        (ToPod, Packet::between("fe80::9", "ff02::1").hop_limit(1).icmp(130, &[0; 20]).frame()),
    ];
    for (side, frame) in passing {
        assert_eq!(rig.run(side, &frame), Ok(()), "{frame:02x?}");
    }
    let routed = to_pod6().neighbour(135, POD_V6, &[(1, peer_mac)]).hop_limit(254).frame();
    assert_eq!(rig.run(ToPod, &routed), Err(DropReason::IngressPeer), "not from this link");
}

#[test]
fn rules_are_credited_with_their_flows() {
    let compiled = policy(&[("10.0.0.0/8", 1)], &[(1, port(6, 80)), (1, lookup::Traffic::Protocol(17))]);
    let rig = Rig::isolated(Some(&compiled), None);
    let id = rig.dataplane.policies().of(POD).unwrap().ingress;
    for number in 0..3 {
        assert_eq!(rig.run(ToPod, &to_pod().tcp(2000 + number, 80, SYN).frame()), Ok(()));
        assert_eq!(rig.run(ToPod, &to_pod().tcp(2000 + number, 80, ACK).frame()), Ok(()));
    }
    assert_eq!(rig.run(ToPod, &to_pod().udp(1, 2).frame()), Ok(()));
    // They pass and open no flow.
    for flags in [SYN | ACK, RST] {
        assert_eq!(rig.run(ToPod, &to_pod().tcp(2100, 80, flags).frame()), Ok(()));
    }
    assert_eq!(rig.dataplane.policies().rule_flows().unwrap(), [(id, [(1, 3), (2, 1)].into())].into());
}
