//! The flow table is shared: an attachment that enters too many flows loses its own.

use netattach::bpf::{Ending, Owners, PerFamily};
use netattach_common::flow::state::{ESTABLISHED, REPLIED};

use super::*;

/// An attachment beside [`POD`], with the peer's address.
const NEIGHBOUR: u32 = 8;
const PLACES: u32 = 64;

/// Two attachments that may communicate with all peers; the one under test has [`PLACES`].
fn two() -> Rig {
    let rig = Rig::isolated(Some(&allow_all()), Some(&allow_all()));
    let neighbour =
        Attachment { mac: Mac([2, 0, 0, 0, 0, 2]), addresses: vec![PEER_V4.parse().unwrap()], ..bare() };
    rig.dataplane.attachments().put(NEIGHBOUR, &neighbour).unwrap();
    let ids = rig.dataplane.policies().of(POD).unwrap();
    rig.dataplane.policies().set(NEIGHBOUR, ids).unwrap();
    rig.set_share(|share| (share.most_v4, share.most_v6) = (PLACES, PLACES));
    rig
}

/// Runs a packet for one of the two.
fn at(rig: &Rig, attachment: u32, side: Side, packet: &Packet) {
    rig.dataplane.attachments().bind(DEVICE, attachment).unwrap();
    assert_eq!(rig.run_as(attachment, side, &packet.frame()), Ok(()));
}

/// Opener's and responder's port of each IPv4 flow of an attachment, with its state.
fn flows_of(rig: &Rig, attachment: u32) -> BTreeSet<(u16, u16, u8)> {
    let flows = rig.flows();
    let all = flows.iter().map(|flow| flow.unwrap());
    all.filter(|(_, flow)| flow.attachment == attachment)
        .map(|(key, flow)| {
            let (low, high) = (key.low_port.number(), key.high_port.number());
            let ports = if flow.opened_by_low != 0 { (low, high) } else { (high, low) };
            (ports.0, ports.1, flow.state)
        })
        .collect()
}

/// A TCP connection of an attachment's pod with a third host, which then is idle.
fn connection(rig: &Rig, attachment: u32, own: &str) {
    let (there, back) = (Packet::between(own, "10.9.9.9"), Packet::between("10.9.9.9", own));
    at(rig, attachment, FromPod, &there.clone().tcp(4000, 80, SYN));
    at(rig, attachment, ToPod, &back.clone().tcp(80, 4000, SYN | ACK));
    at(rig, attachment, FromPod, &there.tcp(4000, 80, ACK));
}

const IDLE: (u16, u16, u8) = (4000, 80, REPLIED | ESTABLISHED);

/// Rows: C78.
#[test]
fn a_flood_takes_the_flows_of_nobody_else_whichever_way_it_goes() {
    for side in [FromPod, ToPod] {
        let rig = two();
        rig.put(Checks::default());
        connection(&rig, POD, POD_V4);
        connection(&rig, NEIGHBOUR, PEER_V4);
        for port in 1..100 {
            at(&rig, NEIGHBOUR, FromPod, &Packet::between(PEER_V4, "10.9.9.9").udp(port, 53));
        }
        let neighbours = flows_of(&rig, NEIGHBOUR);
        assert_eq!(neighbours.len(), 100);
        assert!(neighbours.contains(&IDLE));
        rig.age(1);
        for port in 1..=2000 {
            let (from, to) = if side == FromPod { (POD_V4, "10.9.9.8") } else { ("10.9.9.8", POD_V4) };
            at(&rig, POD, side, &Packet::between(from, to).tcp(port, 443, SYN));
        }
        assert_eq!(flows_of(&rig, NEIGHBOUR), neighbours, "{side:?}");
        let own = flows_of(&rig, POD);
        assert_eq!(own.len(), PLACES as usize, "{side:?}");
        assert!(own.contains(&IDLE), "{side:?}: what is confirmed is displaced last");
        assert!(own.contains(&(2000, 443, 0)), "{side:?}: the last of the flood");
        let stats = rig.dataplane.stats(POD).unwrap();
        assert_eq!((stats.new_flows, stats.flows_displaced), (2001, 2001 - u64::from(PLACES)));
        assert_eq!(rig.dataplane.stats(NEIGHBOUR).unwrap().flows_displaced, 0);
    }
}

#[test]
fn ipv6_flows_have_places_of_their_own() {
    let rig = two();
    rig.put(Checks::default());
    connection(&rig, POD, POD_V4);
    for port in 1..=500 {
        at(&rig, POD, FromPod, &from_pod6().udp(port, 53));
    }
    assert_eq!(flows_of(&rig, POD), [IDLE].into());
    assert_eq!(rig.dataplane.stats(POD).unwrap().flows_displaced, 500 - u64::from(PLACES));
    let table = rig.dataplane.flows().unwrap();
    while !table.collect().unwrap() {}
    assert_eq!(table.census().unwrap().by_attachment, [(POD, [1, PLACES])].into());
}

#[test]
fn what_has_ended_makes_room_first_and_what_had_a_packet_last_stays() {
    let rig = two();
    rig.put(Checks::default());
    rig.set_share(|share| share.most_v4 = 4);
    let query = |port| from_pod().udp(port, 53);
    for port in 1..=4 {
        at(&rig, POD, FromPod, &query(port));
    }
    rig.age(40);
    for port in 5..=8 {
        at(&rig, POD, FromPod, &query(port));
    }
    assert_eq!(
        rig.dataplane.stats(POD).unwrap().flows_displaced,
        0,
        "without an agent that takes out what has ended"
    );
    let ports = || flows_of(&rig, POD).into_iter().map(|flow| flow.0).collect::<Vec<_>>();
    assert_eq!(ports(), [5, 6, 7, 8]);
    rig.age(2);
    for port in [5, 6, 8] {
        at(&rig, POD, FromPod, &query(port));
    }
    at(&rig, POD, FromPod, &query(9));
    assert_eq!(ports(), [5, 6, 8, 9]);
    assert_eq!(rig.dataplane.stats(POD).unwrap().flows_displaced, 1);
}

/// A TCP connection of the pod from its first packet to its last.
fn finished(rig: &Rig, port: u16) {
    let (there, back) = (from_pod(), to_pod());
    for (side, packet) in [
        (FromPod, there.clone().tcp(port, 80, SYN)),
        (ToPod, back.clone().tcp(80, port, SYN | ACK)),
        (FromPod, there.clone().tcp(port, 80, tcp::FIN | ACK)),
        (ToPod, back.tcp(80, port, tcp::FIN | ACK)),
        (FromPod, there.tcp(port, 80, ACK)),
    ] {
        at(rig, POD, side, &packet);
    }
}

/// A connection that both ends have finished gives its entry to the first new flow, without a search for others; in
/// its first second only if all are like it.
#[test]
fn a_connection_that_is_over_makes_room_at_once() {
    let rig = two();
    rig.put(Checks::default());
    rig.set_share(|share| share.most_v4 = 4);
    let whole = |port| finished(&rig, port);
    let ports = || flows_of(&rig, POD).into_iter().map(|flow| flow.0).collect::<Vec<_>>();
    (1001..=1004).for_each(whole);
    let asked = || rig.share(POD).next_v4;
    assert_eq!((ports(), asked()), (vec![1001, 1002, 1003, 1004], 4));
    rig.age(2);
    whole(1005);
    assert_eq!((ports(), asked()), (vec![1002, 1003, 1004, 1005], 5), "one place was looked at");
    (1006..=1008).for_each(whole);
    assert_eq!((ports(), asked()), (vec![1005, 1006, 1007, 1008], 8));
    whole(1009);
    assert_eq!(asked(), 8 + u64::from(Share::TRIED), "those that have only just ended are compared");
    assert_eq!(ports().len(), 4);
    let stats = rig.dataplane.stats(POD).unwrap();
    assert_eq!((stats.new_flows, stats.flows_displaced), (9, 5));
}

/// If a search has found only connections that have ended, they are not compared again in that second; an active flow
/// keeps its entry all the same.
#[test]
fn connections_that_have_only_just_ended_are_compared_once_a_second() {
    let rig = two();
    rig.put(Checks::default());
    rig.set_share(|share| share.most_v4 = 4);
    connection(&rig, POD, POD_V4);
    (1001..=1003).for_each(|port| finished(&rig, port));
    let looked = |port| {
        let before = rig.share(POD).next_v4;
        finished(&rig, port);
        rig.share(POD).next_v4 - before
    };
    let looks: Vec<u64> = (1004..1034).map(looked).collect();
    assert_eq!(looks[0], u64::from(Share::TRIED));
    // One more entry when the active flow is examined. A second may begin meanwhile.
    let few = looks.iter().filter(|looks| **looks <= 2).count();
    assert!(few >= looks.len() - 3, "{looks:?}");
    let flows = flows_of(&rig, POD);
    assert!(flows.contains(&IDLE) && flows.len() == 4, "{flows:?}");
}

#[test]
fn a_flow_that_another_opens_again_is_the_others_and_is_not_taken_from_it() {
    let rig = two();
    rig.put(Checks::default());
    rig.set_share(|share| share.most_v4 = 1);
    let packet = Packet::between(POD_V4, PEER_V4).udp(1, 2);
    at(&rig, POD, FromPod, &packet);
    rig.age(40);
    // It has expired; the neighbour is called again, by a side where the caller is not judged.
    at(&rig, NEIGHBOUR, ToPod, &packet);
    assert_eq!((flows_of(&rig, POD).len(), flows_of(&rig, NEIGHBOUR).len()), (0, 1));
    // The only entry of the first attachment is free, although the flow of that entry continues.
    at(&rig, POD, FromPod, &from_pod().udp(3, 4));
    assert_eq!((flows_of(&rig, POD).len(), flows_of(&rig, NEIGHBOUR).len()), (1, 1));
    assert_eq!(rig.dataplane.stats(POD).unwrap().flows_displaced, 0);
}

#[test]
fn a_flow_that_is_opened_again_keeps_its_place_while_its_attachment_has_it() {
    let rig = two();
    rig.put(Checks::default());
    rig.set_share(|share| share.most_v4 = 4);
    let query = |port| at(&rig, POD, FromPod, &from_pod().udp(port, 53));
    let places = || {
        let flows: Vec<_> = rig.flows().iter().map(Result::unwrap).collect();
        let port = |key: &FlowKey<Ip4>| key.low_port.number().max(key.high_port.number());
        flows.iter().map(|(key, flow)| (port(key), flow.place)).collect::<BTreeSet<_>>()
    };
    (1001..=1004).for_each(query);
    rig.age(40);
    query(1003);
    assert_eq!(places(), [(1001, 0), (1002, 1), (1003, 2), (1004, 3)].into());
    assert_eq!(rig.share(POD).next_v4, 4, "no place was asked for");
    (1005..=1007).for_each(query);
    assert_eq!(places(), [(1005, 0), (1006, 1), (1003, 2), (1007, 3)].into());
    rig.age(40);
    rig.set_share(|share| share.most_v4 = 2);
    query(1003);
    assert_eq!(places(), [(1003, 0), (1006, 1), (1007, 3)].into());
    let stats = rig.dataplane.stats(POD).unwrap();
    assert_eq!((stats.new_flows, stats.flows_displaced), (9, 0));
}

/// Goes through the table once, and assigns places as the agent does.
fn pass(rig: &Rig, table: &netattach::bpf::FlowTable) -> Vec<(u32, PerFamily)> {
    while !table.collect().unwrap() {}
    let live = table.census().unwrap().by_attachment;
    let shares = rig.dataplane.attachments().share_out(live, &Owners::new()).unwrap();
    table.set_places(shares.clone());
    shares.into_iter().collect()
}

#[test]
fn places_follow_use_and_are_taken_back_from_who_borrowed_them() {
    // 896 places of 1024; each of the two is guaranteed 128.
    let rig = two();
    rig.put(Checks::default());
    let table = rig.dataplane.flows().unwrap();
    let send = |attachment: u32, from: &str, ports: std::ops::RangeInclusive<u16>| {
        for port in ports {
            at(&rig, attachment, FromPod, &Packet::between(from, "10.9.9.9").udp(port, 53));
        }
    };
    connection(&rig, NEIGHBOUR, PEER_V4);
    send(POD, POD_V4, 1..=60);
    assert!(!table.is_pressed(), "nothing is known yet");
    // A quarter of the table at most.
    assert_eq!(pass(&rig, &table), [(POD, [256, 128]), (NEIGHBOUR, [128, 128])]);
    assert!(!table.is_pressed());
    send(POD, POD_V4, 1..=300);
    assert_eq!(flows_of(&rig, POD).len(), 256);
    assert_eq!(pass(&rig, &table), [(POD, [256, 128]), (NEIGHBOUR, [128, 128])]);
    assert!(table.is_pressed());
    // Thirty more are added, and the guaranteed share of each is a sixth of that.
    let others: Vec<u32> = (20..50).collect();
    let mut live = table.census().unwrap().by_attachment;
    live.extend(others.iter().map(|id| (*id, [200, 0])));
    let shares = rig.dataplane.attachments().share_out(live, &Owners::new()).unwrap();
    assert!(shares.values().map(|places| places[0]).sum::<u32>() <= 896, "{shares:?}");
    assert!(shares[&POD][0] < 64 && shares[&NEIGHBOUR][0] < 64, "{shares:?}");
    table.set_places(shares.clone());
    while !table.collect().unwrap() {}
    assert_eq!(flows_of(&rig, POD).len(), shares[&POD][0] as usize);
    assert_eq!(flows_of(&rig, NEIGHBOUR), [IDLE].into(), "it has no more flows than places");
    let (ended, _) = table.take_ended();
    assert!(ended.iter().all(|ended| ended.entry.flow.attachment == POD));
    assert!(ended.iter().all(|ended| ended.ending == Ending::Displaced), "{ended:?}");
    assert_eq!(ended.len(), 256 - shares[&POD][0] as usize);
    // The places beyond have no owner.
    let places = |attachment| rig.places().filter(|place| place.attachment == attachment).count();
    assert_eq!(places(POD), shares[&POD][0] as usize);
    // A removed attachment leaves no places behind, once no packet can take one any more.
    rig.dataplane.remove_attachment(POD).unwrap();
    let (held, of_pod) = (rig.share(POD), places(POD));
    rig.dataplane.attachments().share_out([(NEIGHBOUR, [1, 0])].into(), &Owners::new()).unwrap();
    assert_eq!((rig.share(POD), places(POD)), (held, of_pod));
    rig.free_numbers();
    assert_eq!((places(POD), places(NEIGHBOUR)), (0, 1));
    assert_eq!([POD, 20].map(|id| rig.share(id)), [Share::default(); 2]);
}

/// More attachments use a table at once than fit: no attachment's flows are displaced, and new flows are refused with
/// the reason.
#[test]
fn where_there_is_no_room_at_all_a_flow_is_not_opened() {
    let rig = Rig::sized(|config| Config { max_flows_v4: 16, ..config });
    rig.enforce(Some(&allow_all()), Some(&allow_all()));
    let outcomes: Vec<Outcome> =
        (1..=40).map(|port| rig.run(FromPod, &from_pod().udp(port, 53).frame())).collect();
    assert!(outcomes[..16].iter().all(Result::is_ok), "{outcomes:?}");
    assert_eq!(outcomes[39], Err(DropReason::FlowsFull));
    assert_eq!(rig.run(FromPod, &from_pod().udp(1, 53).frame()), Ok(()));
}

/// Rows: C78.
#[test]
fn each_type_of_icmp_has_flows_of_its_own() {
    let none = [0; 4];
    let rig = Rig::isolated(Some(&deny_all()), None);
    let denied = Err(DropReason::IngressPeer);
    // Timestamp, information, address mask, extended echo; node information, extended echo.
    let pairs4 = [(13, 14), (15, 16), (17, 18), (42, 43)];
    let pairs6 = [(139, 140), (160, 161)];
    let families =
        [(from_pod(), to_pod(), &pairs4[..], 8, 0), (from_pod6(), to_pod6(), &pairs6[..], 128, 129)];
    for (out, into, pairs, echo, echo_reply) in families {
        let received = |kind| rig.run(ToPod, &into.clone().icmp(kind, &none).frame());
        for (request, reply) in pairs {
            assert_eq!(received(*reply), denied, "{reply} without {request}");
            assert_eq!(rig.run(FromPod, &out.clone().icmp(*request, &none).frame()), Ok(()));
            assert_eq!(received(*reply), Ok(()), "{reply} after {request}");
            assert_eq!(received(*request), denied, "{request} the other way");
            assert_eq!([echo, echo_reply].map(received), [denied; 2], "echo after {request}");
            for (other, others_reply) in pairs.iter().filter(|other| other.0 > *request) {
                assert_eq!([*other, *others_reply].map(received), [denied; 2], "{other} after {request}");
            }
        }
        assert_eq!(rig.run(FromPod, &out.clone().ping(0).frame()), Ok(()));
        assert_eq!([echo, echo_reply].map(received), [denied, Ok(())], "identifier 0");
        // A type without a reply type.
        assert_eq!(rig.run(FromPod, &out.clone().icmp(200, &none).frame()), Ok(()));
        assert_eq!(received(200), denied);
    }
}

#[test]
fn udp_lite_and_dccp_answer_from_the_port_that_was_called() {
    let rig = Rig::isolated(Some(&deny_all()), None);
    let ports = |source: u16, destination: u16| {
        let mut header = vec![0; 16];
        header[..2].copy_from_slice(&source.to_be_bytes());
        header[2..4].copy_from_slice(&destination.to_be_bytes());
        header
    };
    for protocol in [33, 136] {
        for (out, into) in [(from_pod(), to_pod()), (from_pod6(), to_pod6())] {
            let received =
                |from, to| rig.run(ToPod, &into.clone().payload(protocol, &ports(from, to)).frame());
            assert_eq!(rig.run(FromPod, &out.payload(protocol, &ports(1000, 53)).frame()), Ok(()));
            assert_eq!(received(53, 1000), Ok(()), "{protocol}");
            assert_eq!(received(53, 22), Err(DropReason::IngressPeer), "{protocol}");
        }
    }
}
