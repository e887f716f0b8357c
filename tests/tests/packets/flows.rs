//! The flow table: which flows it holds, and which ones the agent removes.

use netattach::bpf::{Census, Ended, Ending, FlowTable};

use super::*;

/// Rows: C78.
#[test]
fn replies_pass_whatever_the_other_direction_says() {
    let rig = Rig::isolated(Some(&web_from_peer()), Some(&deny_all()));
    assert_eq!(rig.run(FromPod, &from_pod().tcp(80, 2000, SYN | ACK).frame()), Err(DropReason::EgressPeer));
    assert_eq!(rig.run(ToPod, &to_pod().tcp(2000, 80, SYN).frame()), Ok(()));
    assert_eq!(rig.run(FromPod, &from_pod().tcp(80, 2000, SYN | ACK).frame()), Ok(()));
    assert_eq!(rig.run(ToPod, &to_pod().tcp(2000, 80, ACK).frame()), Ok(()));
    assert_eq!(rig.run(FromPod, &from_pod().tcp(81, 2001, ACK).frame()), Err(DropReason::EgressPeer));
    assert_eq!(rig.run(ToPod, &to_pod6().tcp(2000, 80, SYN).frame()), Ok(()));
    assert_eq!(rig.run(FromPod, &from_pod6().tcp(80, 2000, SYN | ACK).frame()), Ok(()));
}

#[test]
fn sctp_and_echo_have_replies_too() {
    let compiled = policy(&[("10.0.0.2/32", 1), ("fd00::2/128", 1)], &[(1, any())]);
    let rig = Rig::isolated(Some(&deny_all()), Some(&compiled));
    assert_eq!(rig.run(FromPod, &from_pod().sctp(5, 6, INIT).frame()), Ok(()));
    assert_eq!(rig.run(ToPod, &to_pod().sctp(6, 5, INIT_ACK).frame()), Ok(()));
    for (out, into) in [(from_pod(), to_pod()), (from_pod6(), to_pod6())] {
        assert_eq!(rig.run(FromPod, &out.clone().ping(9).frame()), Ok(()));
        assert_eq!(rig.run(ToPod, &into.clone().pong(9).frame()), Ok(()));
        assert_eq!(rig.run(ToPod, &into.clone().pong(8).frame()), Err(DropReason::IngressPeer));
        // The peer's own echo with the same identifier is another flow.
        assert_eq!(rig.run(ToPod, &into.ping(9).frame()), Err(DropReason::IngressPeer));
        let _ = out;
    }
}

#[test]
fn both_ends_of_a_flow_are_judged_in_one_entry() {
    const SERVER: u32 = 8;
    let rig = Rig::isolated(None, Some(&web_from_peer()));
    let server =
        Attachment { mac: Mac([2, 0, 0, 0, 0, 2]), addresses: vec![PEER_V4.parse().unwrap()], ..bare() };
    rig.dataplane.attachments().put(SERVER, &server).unwrap();
    let denied = rig.dataplane.policies().allocate().unwrap();
    assert_eq!(rig.dataplane.policies().install(&[(denied, &deny_all())]).unwrap().len(), 0);
    rig.dataplane.policies().set(SERVER, PolicyIds { ingress: denied, egress: 0 }).unwrap();

    let (syn, syn_ack) = (from_pod().tcp(3000, 80, SYN).frame(), to_pod().tcp(80, 3000, SYN | ACK).frame());
    let at = |attachment, side, frame: &[u8]| {
        rig.dataplane.attachments().bind(DEVICE, attachment).unwrap();
        rig.run_as(attachment, side, frame)
    };
    assert_eq!(at(POD, FromPod, &syn), Ok(()));
    assert_eq!(at(SERVER, ToPod, &syn), Err(DropReason::IngressPeer));
    assert_eq!(at(SERVER, FromPod, &syn_ack), Err(DropReason::IngressPeer), "no reply before the call");

    let web = rig.dataplane.policies().allocate().unwrap();
    let from_one = policy(&[("10.0.0.1/32", 1)], &[(1, port(6, 80))]);
    assert_eq!(rig.dataplane.policies().install(&[(web, &from_one)]).unwrap().len(), 0);
    rig.dataplane.policies().set(SERVER, PolicyIds { ingress: web, egress: denied }).unwrap();
    assert_eq!(at(SERVER, ToPod, &syn), Ok(()));
    assert_eq!(at(SERVER, FromPod, &syn_ack), Ok(()));
    assert_eq!(at(POD, ToPod, &syn_ack), Ok(()));
    let flow = rig.only_flow();
    let egress = rig.dataplane.policies().of(POD).unwrap().egress;
    assert_eq!((flow.opener_approved_by, flow.responder_approved_by), (egress, web));

    let elsewhere = Attachment { zone: 2, ..server };
    rig.dataplane.attachments().put(SERVER, &elsewhere).unwrap();
    assert_eq!(at(SERVER, FromPod, &syn_ack), Err(DropReason::EgressPeer), "another network, another flow");
}

/// Rows: C85.
#[test]
fn a_tighter_policy_ends_live_flows_and_a_wider_one_resumes_them() {
    let rig = Rig::isolated(Some(&web_from_peer()), None);
    let (segment, reply) = (to_pod().tcp(2000, 80, ACK).frame(), from_pod().tcp(80, 2000, ACK).frame());
    assert_eq!(rig.run(ToPod, &to_pod().tcp(2000, 80, SYN).frame()), Ok(()));
    assert_eq!(rig.run(ToPod, &segment), Ok(()));
    rig.enforce(Some(&deny_all()), Some(&deny_all()));
    assert_eq!(rig.run(ToPod, &segment), Err(DropReason::IngressPeer));
    assert_eq!(rig.run(FromPod, &reply), Err(DropReason::IngressPeer), "the leg's policy, not egress");
    let ids = rig.enforce(Some(&web_from_peer()), Some(&deny_all()));
    assert_eq!(rig.run(FromPod, &reply), Ok(()));
    assert_eq!(rig.only_flow().responder_approved_by, ids.ingress);
    rig.dataplane.policies().set(POD, PolicyIds::default()).unwrap();
    assert_eq!(rig.run(ToPod, &to_pod().tcp(9, 9, SYN).frame()), Ok(()));
}

/// A pod that accepts connections at port 80, and may open none.
fn server() -> Rig {
    Rig::isolated(Some(&web_from_peer()), Some(&deny_all()))
}

#[test]
fn a_segment_of_no_flow_is_judged_as_if_its_sender_opened_one() {
    const PUSH: u8 = 8;
    let rig = server();
    for flags in [ACK, ACK | PUSH, tcp::FIN, 0, tcp::FIN | PUSH | 32, SYN | ACK, RST, RST | ACK, SYN] {
        let sent = |source| from_pod().tcp(source, 2000, flags).frame();
        // A possible answer to an allowed connection, and one that cannot be.
        assert_eq!([80, 81].map(|port| rig.run(FromPod, &sent(port))), [Err(DropReason::EgressPeer); 2]);
        assert_eq!(rig.run(ToPod, &to_pod().tcp(2000, 81, flags).frame()), Err(DropReason::IngressPort));
    }
    let data = 0;
    assert_eq!(rig.run(FromPod, &from_pod().sctp(80, 1, data).frame()), Err(DropReason::EgressPeer));
    assert_eq!(rig.dataplane.stats(POD).unwrap().new_flows, 0);
    // A connection that is older than the table continues when its opener sends.
    assert_eq!(rig.run(ToPod, &to_pod().tcp(2000, 80, ACK).frame()), Ok(()));
    assert_eq!(rig.only_flow().state, 0, "one packet establishes nothing");
    assert_eq!(rig.run(FromPod, &from_pod().tcp(80, 2000, ACK).frame()), Ok(()));
    use netattach_common::flow::state::{ESTABLISHED, REPLIED};
    assert_eq!(rig.only_flow().state, REPLIED | ESTABLISHED);
}

#[test]
fn what_answers_or_aborts_may_pass_and_opens_nothing() {
    let rig = server();
    for flags in [SYN | ACK, RST, RST | ACK, SYN | RST] {
        assert_eq!(rig.run(ToPod, &to_pod().tcp(2000, 80, flags).frame()), Ok(()));
        assert_eq!(rig.run(FromPod, &from_pod().tcp(80, 2000, ACK).frame()), Err(DropReason::EgressPeer));
    }
    assert_eq!(rig.flows().keys().count(), 0);
}

#[test]
fn where_the_flows_were_lost_a_segment_may_answer_for_a_while() {
    let rig = server();
    let (answer, call) = (from_pod().tcp(80, 2000, ACK).frame(), to_pod().tcp(2000, 80, ACK).frame());
    rig.dataplane.attachments().take_answers(POD).unwrap();
    assert_eq!(rig.run(FromPod, &answer), Ok(()));
    let flow = rig.only_flow();
    assert_eq!((flow.opened_by_low, flow.opener_approved_by), (0, 0), "the peer, 10.0.0.2, opened it");
    assert_eq!(flow.responder_approved_by, rig.dataplane.policies().of(POD).unwrap().ingress);
    use netattach_common::flow::state::{ESTABLISHED, REPLIED};
    assert_eq!(flow.state, REPLIED, "gone after a minute if its opener does not go on");
    assert_eq!(rig.run(ToPod, &call), Ok(()));
    assert_eq!(rig.only_flow().state, REPLIED | ESTABLISHED);
    // A segment that no rule of either direction allows, a SYN, a SYN-ACK, and a datagram.
    assert_eq!(rig.run(FromPod, &from_pod().tcp(81, 2000, ACK).frame()), Err(DropReason::EgressPeer));
    assert_eq!(rig.run(ToPod, &to_pod().tcp(2000, 81, ACK).frame()), Err(DropReason::IngressPort));
    for flags in [SYN, SYN | ACK] {
        assert_eq!(rig.run(FromPod, &from_pod().tcp(80, 2002, flags).frame()), Err(DropReason::EgressPeer));
    }
    assert_eq!(rig.run(FromPod, &from_pod().udp(80, 2002).frame()), Err(DropReason::EgressPeer));
    // The deadline is set once; the next attachment of this number has none.
    let another = from_pod().tcp(80, 2003, ACK).frame();
    rig.set_share(|share| share.answers_until = 1);
    rig.dataplane.attachments().take_answers(POD).unwrap();
    assert_eq!(rig.run(FromPod, &another), Err(DropReason::EgressPeer));
    rig.dataplane.attachments().take_answers(POD + 1).unwrap();
    rig.dataplane.remove_attachment(POD).unwrap();
    rig.free_numbers();
    assert_eq!(rig.share(POD), Share::default());
    assert!(rig.share(POD + 1).answers_until > 1);
}

/// A whole packet is judged in one pass, one with options field by field: both belong to the flow that the policy in
/// force has approved, and both claims of a sender are checked.
#[test]
fn packets_are_of_one_flow_however_they_are_read() {
    use netattach_common::flow::state::{ESTABLISHED, REPLIED};
    let rig = Rig::isolated(Some(&web_from_peer()), None);
    let plain = to_pod().tcp(2000, 80, ACK).frame();
    let with_options = to_pod().options(&[1, 1, 1, 0]).tcp(2000, 80, ACK).frame();
    assert_eq!(rig.run(ToPod, &to_pod().tcp(2000, 80, SYN).frame()), Ok(()));
    assert_eq!(rig.run(FromPod, &from_pod().tcp(80, 2000, SYN | ACK).frame()), Ok(()));
    for frame in [&plain, &with_options, &plain] {
        assert_eq!(rig.run(ToPod, frame), Ok(()));
    }
    let found = || {
        let flow = rig.only_flow();
        (flow.state, flow.forward.packets, flow.backward.packets)
    };
    assert_eq!(found(), (REPLIED | ESTABLISHED, 4, 1));
    let answer = |from: Packet| from.tcp(80, 2000, ACK).frame();
    assert_eq!(rig.run(FromPod, &answer(from_pod().from_mac(PEER_MAC))), Err(DropReason::SourceMac));
    let stranger = answer(Packet::between("10.0.0.9", PEER_V4));
    assert_eq!(rig.run(FromPod, &stranger), Err(DropReason::SourceIpv4));
    assert_eq!(rig.run(FromPod, &answer(from_pod())), Ok(()));
    rig.enforce(Some(&deny_all()), None);
    for frame in [&plain, &with_options] {
        assert_eq!(rig.run(ToPod, frame), Err(DropReason::IngressPeer));
    }
    assert_eq!(found(), (REPLIED | ESTABLISHED, 4, 2));
}

#[test]
fn a_reused_port_is_a_new_connection() {
    let rig = Rig::isolated(Some(&web_from_peer()), None);
    let syn = to_pod().tcp(2000, 80, SYN).frame();
    assert_eq!(rig.run(ToPod, &syn), Ok(()));
    assert_eq!(rig.run(FromPod, &from_pod().tcp(80, 2000, SYN | ACK).frame()), Ok(()));
    assert_eq!(rig.run(ToPod, &to_pod().tcp(2000, 80, tcp::FIN | ACK).frame()), Ok(()));
    let closing = rig.only_flow();
    use netattach_common::flow::state::{ESTABLISHED, OPENER_FIN, REPLIED};
    assert_eq!(closing.state, REPLIED | ESTABLISHED | OPENER_FIN);
    assert_eq!(rig.run(ToPod, &syn), Ok(()));
    assert_eq!(rig.only_flow().state, 0);
    assert_eq!(rig.dataplane.stats(POD).unwrap().new_flows, 2);
    rig.enforce(Some(&deny_all()), None);
    assert_eq!(rig.run(ToPod, &syn), Err(DropReason::IngressPeer));
}

/// No sequence number is compared: what the ends send later shows that they have ignored it.
#[test]
fn a_reset_or_an_end_in_anothers_name_does_not_cut_a_connection_that_goes_on() {
    use netattach_common::flow::state::{self, ESTABLISHED, OPENER_FIN, REPLIED};
    let rig = server();
    let call = |flags| rig.run(ToPod, &to_pod().tcp(2000, 80, flags).frame());
    let answer = |flags| rig.run(FromPod, &from_pod().tcp(80, 2000, flags).frame());
    assert_eq!([call(SYN), answer(SYN | ACK), call(ACK)], [Ok(()); 3]);
    for (flags, bit) in [(RST, state::RST), (RST | ACK, state::RST), (tcp::FIN | ACK, OPENER_FIN)] {
        assert_eq!(call(flags), Ok(()));
        assert_eq!(rig.only_flow().state, REPLIED | ESTABLISHED | bit, "{flags:#b}");
        rig.age(100);
        assert_eq!(answer(ACK), Ok(()), "{flags:#b}");
        assert_eq!(rig.only_flow().state, REPLIED | ESTABLISHED, "{flags:#b}");
        rig.age(7000);
        assert_eq!(answer(ACK), Ok(()), "{flags:#b}");
    }
    // Where both ends are silent it has ended.
    assert_eq!(call(RST), Ok(()));
    rig.age(125);
    assert_eq!(answer(ACK), Err(DropReason::EgressPeer));
    // A port that is used again opens a flow of its own.
    assert_eq!(call(SYN), Ok(()));
    assert_eq!((rig.only_flow().state, rig.dataplane.stats(POD).unwrap().new_flows), (0, 2));
}

#[test]
fn an_expired_flow_is_no_flow() {
    let rig = Rig::isolated(Some(&deny_all()), None);
    let (query, answer) = (from_pod().udp(1000, 53).frame(), to_pod().udp(53, 1000).frame());
    assert_eq!(rig.run(FromPod, &query), Ok(()));
    rig.age(29);
    assert_eq!(rig.run(ToPod, &answer), Ok(()), "just in time");
    rig.age(119);
    assert_eq!(rig.run(ToPod, &answer), Ok(()), "answered flows live longer");
    rig.age(125);
    assert_eq!(rig.run(ToPod, &answer), Err(DropReason::IngressPeer));
    assert_eq!(rig.run(FromPod, &query), Ok(()));
    assert_eq!(rig.run(ToPod, &answer), Ok(()));
    assert_eq!(rig.dataplane.stats(POD).unwrap().new_flows, 2);
}

/// Goes through the whole table.
fn collect(table: &FlowTable) {
    while !table.collect().unwrap() {}
}

/// Opener's port, responder's port and packets both ways of each removed flow, by opener's port.
fn ended(table: &FlowTable) -> Vec<(u16, u16, [u64; 2], Ending)> {
    let (flows, untold) = table.take_ended();
    assert_eq!(untold, 0);
    let row = |Ended { entry, ending, .. }: &Ended| {
        let packets = [entry.flow.forward.packets, entry.flow.backward.packets];
        (entry.opener.1, entry.responder.1, packets, *ending)
    };
    let mut rows: Vec<_> = flows.iter().map(row).collect();
    rows.sort_by_key(|row| row.0);
    rows
}

#[test]
fn what_has_ended_is_taken_out_and_told_and_the_rest_is_counted() {
    let rig = Rig::isolated(Some(&allow_all()), Some(&allow_all()));
    let table = rig.dataplane.flows().unwrap();
    for frame in [from_pod().udp(1000, 53), from_pod().udp(1000, 53), from_pod().udp(1001, 53)] {
        assert_eq!(rig.run(FromPod, &frame.frame()), Ok(()));
    }
    assert_eq!(rig.run(ToPod, &to_pod().udp(53, 1000).frame()), Ok(()));
    // Unanswered flows end after 30 seconds, answered ones after 120.
    rig.age(40);
    assert_eq!(rig.run(ToPod, &to_pod6().tcp(2000, 80, SYN).frame()), Ok(()));
    collect(&table);
    assert_eq!(ended(&table), [(1001, 53, [1, 0], Ending::Expired)]);
    assert_eq!(table.census(), Some(Census { v4: 1, v6: 1, by_attachment: [(POD, [1, 1])].into() }));
    rig.age(100);
    collect(&table);
    assert_eq!(ended(&table), [(1000, 53, [2, 1], Ending::Expired)]);
    assert_eq!(table.census(), Some(Census { v4: 0, v6: 1, by_attachment: [(POD, [0, 1])].into() }));
    assert_eq!(rig.flows().keys().count(), 0);
}

#[test]
fn the_flows_of_a_host_that_is_gone_go_at_once() {
    let rig = Rig::isolated(Some(&allow_all()), Some(&allow_all()));
    let table = rig.dataplane.flows().unwrap();
    for frame in [from_pod().tcp(4000, 80, SYN), from_pod().udp(1, 2)] {
        assert_eq!(rig.run(FromPod, &frame.frame()), Ok(()));
    }
    assert_eq!(rig.run(ToPod, &to_pod6().tcp(2000, 80, SYN).frame()), Ok(()));
    let address = |text: &str| text.parse::<std::net::IpAddr>().unwrap();
    table.purge([(2, address(POD_V4)), (1, address("10.0.0.9"))]).unwrap();
    assert_eq!(ended(&table), [], "another network's and another host's");
    let hosts = || rig.dataplane.attachments().hosts(&[POD].into()).unwrap();
    let expected = [POD_V4, POD_V6, "fe80::ff:fe00:1"].map(|text| (1, address(text)));
    assert_eq!(hosts(), expected.into());
    table.purge(hosts()).unwrap();
    let expected = [
        (1, 2, [1, 0], Ending::Detached),
        (2000, 80, [1, 0], Ending::Detached),
        (4000, 80, [1, 0], Ending::Detached),
    ];
    assert_eq!(ended(&table), expected);
    collect(&table);
    assert_eq!(table.census(), Some(Census::default()));
    rig.dataplane.remove_attachment(POD).unwrap();
    assert_eq!(hosts(), [].into());
}

#[test]
fn the_flows_of_a_shared_address_stay_for_those_that_have_it() {
    const STANDBY: u32 = 8;
    const VIRTUAL: &str = "10.0.0.100";
    let rig = Rig::isolated(Some(&allow_all()), Some(&allow_all()));
    for (id, mac, own) in [(POD, POD_MAC, POD_V4), (STANDBY, PEER_MAC, PEER_V4)] {
        let (addresses, shared) = (vec![own.parse().unwrap()], vec![VIRTUAL.parse().unwrap()]);
        rig.dataplane.attachments().put(id, &Attachment { mac, addresses, shared, ..bare() }).unwrap();
    }
    let client = "10.0.0.3";
    assert_eq!(rig.run(ToPod, &Packet::between(client, VIRTUAL).tcp(2000, 80, SYN).frame()), Ok(()));
    assert_eq!(rig.run(ToPod, &Packet::between(client, PEER_V4).tcp(2001, 80, SYN).frame()), Ok(()));
    let table = rig.dataplane.flows().unwrap();
    let leave = |ids: &[u32]| {
        let leaving = ids.iter().copied().collect();
        table.purge(rig.dataplane.attachments().hosts(&leaving).unwrap()).unwrap();
        ended(&table)
    };
    assert_eq!(leave(&[STANDBY]), [(2001, 80, [1, 0], Ending::Detached)]);
    assert_eq!(leave(&[POD, STANDBY]), [(2000, 80, [1, 0], Ending::Detached)]);
}

#[test]
fn flows_that_share_batches_and_rounds_are_each_seen_once() {
    // Room for all flows, and for the free lists of each processor.
    let rig = Rig::sized(|config| Config { max_flows_v4: 65_536, ..config });
    rig.enforce(None, Some(&allow_all()));
    let table = rig.dataplane.flows().unwrap();
    let mut flows = rig.flows();
    assert_eq!(rig.run(FromPod, &from_pod().udp(1, 2).frame()), Ok(()));
    let (key, flow) = flows.iter().next().unwrap().unwrap();
    let aged = Flow { last_seen: flow.last_seen.wrapping_sub(100), ..flow };
    let count = 20_000_u32;
    for number in 1..count {
        let tags = [0, (number >> 8) as u8, number as u8];
        let flow = if number % 4 == 0 { aged } else { flow };
        flows.insert(FlowKey { tags, ..key }, flow, 0).unwrap();
    }
    assert!(!table.collect().unwrap(), "more than one round looks at");
    collect(&table);
    let old = u64::from(count - 1) / 4;
    let live = u64::from(count) - old;
    assert_eq!(
        table.census(),
        Some(Census { v4: live, v6: 0, by_attachment: [(POD, [live as u32, 0])].into() })
    );
    assert_eq!(flows.keys().count() as u64, live);
    // Per round an attachment has at most its share of records; a round is 16,384 entries.
    let (told, untold) = table.take_ended();
    assert_eq!((told.len(), told.len() as u64 + untold), (1024, old));
}
