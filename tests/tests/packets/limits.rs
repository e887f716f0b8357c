//! Limits, switches and records.

use super::*;

fn put(rig: &Rig, flags: Checks, limits: Limits) {
    let addresses = vec![POD_V4.parse().unwrap(), POD_V6.parse().unwrap()];
    rig.dataplane.attachments().put(POD, &Attachment { addresses, flags, limits, ..bare() }).unwrap();
}

#[test]
fn new_flows_beyond_the_rate_are_dropped_and_known_ones_are_not() {
    let rig = Rig::isolated(Some(&allow_all()), None);
    // One flow in ten seconds; the third exceeds the limit at any test speed.
    put(
        &rig,
        Checks::default(),
        Limits { flows: Rate { interval: 10_000_000_000 << 16, ..Rate::NONE }, ..Limits::default() },
    );
    let syn = |number| to_pod().tcp(number, 80, SYN).frame();
    assert_eq!(rig.run(ToPod, &syn(1)), Ok(()));
    assert_eq!(rig.run(ToPod, &syn(2)), Err(DropReason::FlowRate));
    assert_eq!(rig.run(ToPod, &syn(1)), Ok(()));
    assert_eq!(rig.dataplane.stats(POD).unwrap().new_flows, 1);
    put(
        &rig,
        Checks::default(),
        Limits { flows: Rate { interval: 10_000_000_000 << 16, ..Rate::NONE }, ..Limits::default() },
    );
    assert_eq!(rig.run(ToPod, &syn(3)), Err(DropReason::FlowRate), "written again, not given again");
    put(&rig, Checks::default(), Limits::default());
    assert_eq!(rig.run(ToPod, &syn(3)), Ok(()));
}

#[test]
fn flows_that_others_open_leave_half_of_the_burst_to_the_pod() {
    let rig = Rig::isolated(Some(&allow_all()), Some(&allow_all()));
    // One flow in ten seconds, and four at once beyond that.
    let rate = Rate { interval: 10_000_000_000 << 16, tolerance: 40_000_000_000, ..Rate::NONE };
    put(&rig, Checks::default(), Limits { flows: rate, ..Limits::default() });
    let into = [1, 2, 3, 4, 5].map(|port| rig.run(ToPod, &to_pod().tcp(port, 80, SYN).frame()));
    let refused = Err(DropReason::FlowRate);
    assert_eq!(into, [Ok(()), Ok(()), Ok(()), refused, refused]);
    let out = [1, 2, 3].map(|port| rig.run(FromPod, &from_pod().tcp(port, 443, SYN).frame()));
    assert_eq!(out, [Ok(()), Ok(()), refused]);
}

/// The kubelet's probes do not wait for strangers.
#[test]
fn flows_of_the_node_are_not_charged_to_the_half_of_others() {
    let rig = Rig::isolated(Some(&from_the_node()), None);
    let rate = Rate { interval: 10_000_000_000 << 16, tolerance: 40_000_000_000, ..Rate::NONE };
    put(&rig, Checks::default(), Limits { flows: rate, ..Limits::default() });
    // To the address of the device of test runs, as from the node's stack.
    let received = |number: u16, port: u16| {
        let mut frame = to_pod().udp(number, port).frame();
        frame[..6].fill(0);
        rig.run(ToPod, &frame)
    };
    let refused = Err(DropReason::FlowRate);
    assert_eq!([1, 2, 3, 4].map(|number| received(number, 53)), [Ok(()), Ok(()), Ok(()), refused]);
    assert_eq!([1, 2, 3].map(|number| received(number, 8080)), [Ok(()), Ok(()), refused]);
}

#[test]
fn bytes_beyond_the_bandwidth_are_dropped_in_either_direction() {
    let rig = Rig::new();
    // Two packets of 46 bytes, then none for longer than the test can take.
    let rate = Rate::new(Rate::SLOWEST, 46);
    put(&rig, Checks::default(), Limits { from_pod: rate, ..Limits::default() });
    let out = from_pod().udp(1, 2).frame();
    let outcomes = [(); 3].map(|()| rig.run(FromPod, &out));
    assert_eq!(outcomes, [Ok(()), Ok(()), Err(DropReason::RateLimit)]);
    let into = to_pod().udp(1, 2).frame();
    assert_eq!([(); 5].map(|()| rig.run(ToPod, &into)), [Ok(()); 5]);
    put(&rig, Checks::default(), Limits { to_pod: rate, ..Limits::default() });
    let outcomes = [(); 3].map(|()| rig.run(ToPod, &into));
    assert_eq!(outcomes, [Ok(()), Ok(()), Err(DropReason::RateLimit)]);
    assert_eq!([(); 5].map(|()| rig.run(FromPod, &out)), [Ok(()); 5]);
}

/// Rows: C85.
#[test]
fn established_flows_outlive_a_change_of_policy_where_that_is_asked_for() {
    let rig = Rig::isolated(Some(&web_from_peer()), None);
    put(&rig, Checks { keep_established: true, ..Checks::default() }, Limits::default());
    assert_eq!(rig.run(ToPod, &to_pod().tcp(2000, 80, SYN).frame()), Ok(()));
    rig.enforce(Some(&deny_all()), None);
    assert_eq!(rig.run(ToPod, &to_pod().tcp(2000, 80, ACK).frame()), Ok(()));
    assert_eq!(rig.run(ToPod, &to_pod().tcp(2001, 80, SYN).frame()), Err(DropReason::IngressPeer));
    rig.put(Checks::default());
    rig.enforce(Some(&deny_all()), Some(&deny_all()));
    assert_eq!(rig.run(ToPod, &to_pod().tcp(2000, 80, ACK).frame()), Err(DropReason::IngressPeer));
}

#[test]
fn without_pickup_a_connection_begins_at_its_beginning() {
    let rig = Rig::isolated(Some(&allow_all()), Some(&allow_all()));
    put(&rig, Checks { strict_connections: true, ..Checks::default() }, Limits::default());
    let midstream = Err(DropReason::Midstream);
    // Even if the flows were lost.
    rig.dataplane.attachments().take_answers(POD).unwrap();
    for flags in [ACK, tcp::FIN, 0, SYN | ACK, RST] {
        assert_eq!(rig.run(ToPod, &to_pod().tcp(2000, 80, flags).frame()), midstream);
    }
    assert_eq!(rig.run(FromPod, &from_pod().sctp(1, 2, 0).frame()), midstream);
    assert_eq!(rig.run(ToPod, &to_pod().tcp(2000, 80, SYN).frame()), Ok(()));
    assert_eq!(rig.run(ToPod, &to_pod().tcp(2000, 80, ACK).frame()), Ok(()));
    assert_eq!(rig.run(FromPod, &from_pod().sctp(1, 2, INIT).frame()), Ok(()));
    assert_eq!(rig.run(ToPod, &to_pod().udp(1, 2).frame()), Ok(()));
}

/// Rows: C81.
#[test]
fn icmp_passes_a_policy_where_it_is_accepted() {
    let rig = Rig::isolated(Some(&deny_all()), None);
    assert_eq!(rig.run(ToPod, &to_pod().ping(1).frame()), Err(DropReason::IngressPeer));
    put(&rig, Checks { accept_icmp: true, ..Checks::default() }, Limits::default());
    assert_eq!(rig.run(ToPod, &to_pod().ping(1).frame()), Ok(()));
    assert_eq!(rig.run(ToPod, &to_pod6().ping(1).frame()), Err(DropReason::IngressPeer));
    put(&rig, Checks { accept_icmpv6: true, ..Checks::default() }, Limits::default());
    assert_eq!(rig.run(ToPod, &to_pod6().ping(1).frame()), Ok(()));
    assert_eq!(rig.run(ToPod, &to_pod().ping(1).frame()), Err(DropReason::IngressPeer));
}

#[test]
fn new_flows_and_drops_are_told_and_no_more_than_a_share_of_them() {
    let rig = Rig::isolated(Some(&web_from_peer()), None);
    let share = Rate { interval: 10_000_000_000 << 16, ..Rate::NONE };
    put(&rig, Checks::default(), Limits { drop_records: share, ..Limits::default() });
    let policy = rig.dataplane.policies().of(POD).unwrap().ingress;
    assert_eq!(rig.run(ToPod, &to_pod().tcp(2000, 80, SYN).frame()), Ok(()));
    assert_eq!(rig.run(ToPod, &to_pod6().udp(2000, 80).frame()), Err(DropReason::IngressPort));
    assert_eq!(rig.run(ToPod, &to_pod6().udp(2001, 80).frame()), Err(DropReason::IngressPort));
    rig.dataplane.attachments().unbind(DEVICE).unwrap();
    assert_eq!(rig.run_as(0, FromPod, &from_pod().udp(1, 2).frame()), Err(DropReason::Unbound));
    let mut records = rig.dataplane.records().unwrap();
    let told: Vec<_> = std::iter::from_fn(|| records.next()).collect();
    let now = told[0].time;
    let expected = Record {
        time: now,
        attachment: POD,
        ifindex: DEVICE,
        ingress: policy,
        egress: 0,
        rule: 1,
        length: 54,
        source: PEER_V4.parse::<std::net::Ipv4Addr>().unwrap().to_ipv6_mapped().into(),
        destination: POD_V4.parse::<std::net::Ipv4Addr>().unwrap().to_ipv6_mapped().into(),
        source_port: Port::new(2000),
        destination_port: Port::new(80),
        ethertype: 0x800,
        vlan: 0,
        reason: 0,
        to_pod: 1,
        protocol: 6,
        flags: SYN,
        parsed: 1,
        responder: 1,
        pad: [0; 2],
    };
    assert_eq!(told[0], expected);
    let denied = Record {
        time: told[1].time,
        rule: 0,
        length: 66,
        source: PEER_V6.parse::<std::net::Ipv6Addr>().unwrap().into(),
        destination: POD_V6.parse::<std::net::Ipv6Addr>().unwrap().into(),
        ethertype: 0x86dd,
        reason: DropReason::IngressPort as u8,
        protocol: 17,
        flags: 0,
        responder: 0,
        ..expected
    };
    assert_eq!(told[1], denied);
    assert_eq!((told[2].attachment, told[2].reason, told[2].parsed), (0, DropReason::Unbound as u8, 0));
    assert_eq!(told.len(), 3);
    assert_eq!(rig.dataplane.stats(POD).unwrap().records_withheld, 1);
}

#[test]
fn records_that_nobody_reads_are_counted_as_lost() {
    let rig = Rig::isolated(Some(&deny_all()), None);
    let frame = to_pod().udp(1, 2).frame();
    // 64 KiB hold 744 records of 80 bytes with their headers.
    rig.test_run(ToPod, &frame, 1000);
    assert_eq!(rig.dataplane.stats(POD).unwrap().records_lost, 1000 - 744);
    let mut records = rig.dataplane.records().unwrap();
    assert_eq!(std::iter::from_fn(|| records.next()).count(), 744);
    assert_eq!(rig.run(ToPod, &frame), Err(DropReason::IngressPeer));
    assert_eq!(records.next().unwrap().reason, DropReason::IngressPeer as u8);
}
