//! Fragments: the first one has the ports.

use super::*;

/// Later fragments of the packet that `first` begins.
fn later(of: Packet, offset: u16) -> Vec<u8> {
    of.fragment(offset, false).payload(17, &[0xff; 40]).frame()
}

/// Rows: C86.
#[test]
fn later_fragments_follow_the_verdict_of_the_first() {
    let compiled = policy(&[("10.0.0.2/32", 1), ("fd00::2/128", 1)], &[(1, port(17, 53))]);
    let rig = Rig::isolated(Some(&compiled), None);
    for into in [to_pod(), to_pod6()] {
        let before = into.clone().identification(1);
        assert_eq!(rig.run(ToPod, &later(before, 3)), Err(DropReason::FragmentMiss), "nothing came before");
        let allowed = into.clone().identification(2);
        assert_eq!(rig.run(ToPod, &allowed.clone().fragment(0, true).udp(9, 53).frame()), Ok(()));
        assert_eq!(rig.run(ToPod, &later(allowed.clone(), 3)), Ok(()));
        assert_eq!(rig.run(ToPod, &later(allowed, 8)), Ok(()), "as many as there are");
        let denied = into.clone().identification(3);
        assert_eq!(
            rig.run(ToPod, &denied.clone().fragment(0, true).udp(9, 54).frame()),
            Err(DropReason::IngressPort)
        );
        assert_eq!(rig.run(ToPod, &later(denied, 3)), Err(DropReason::FragmentMiss), "not remembered");
    }
    let other_network = Attachment { zone: 2, addresses: vec![POD_V4.parse().unwrap()], ..bare() };
    rig.dataplane.attachments().put(POD, &other_network).unwrap();
    assert_eq!(rig.run(ToPod, &later(to_pod().identification(2), 3)), Err(DropReason::FragmentMiss));
}

/// The table serves the packets of all pods: refused packets take no entries of others.
#[test]
fn first_fragments_that_are_refused_displace_no_other() {
    let compiled = policy(&[("10.0.0.2/32", 1), ("fd00::2/128", 1)], &[(1, port(17, 53))]);
    let rig = Rig::sized(|config| Config { max_fragments: 16, ..config });
    rig.enforce(Some(&compiled), Some(&compiled));
    for (side, of) in [(ToPod, to_pod()), (ToPod, to_pod6()), (FromPod, from_pod()), (FromPod, from_pod6())] {
        let allowed = of.clone().identification(1);
        assert_eq!(rig.run(side, &allowed.clone().fragment(0, true).udp(9, 53).frame()), Ok(()));
        for number in 2..2000 {
            let refused = of.clone().identification(number).fragment(0, true).udp(9, 54);
            let reason = if matches!(side, ToPod) { DropReason::IngressPort } else { DropReason::EgressPort };
            assert_eq!(rig.run(side, &refused.frame()), Err(reason));
        }
        assert_eq!(rig.run(side, &later(allowed, 3)), Ok(()));
    }
}

#[test]
fn a_fragment_of_an_ipv6_packet_with_more_headers_belongs_to_its_first() {
    let rig = Rig::isolated(Some(&policy(&[("fd00::2/128", 1)], &[(1, port(17, 53))])), None);
    // The first one has destination options between the fragment header and UDP; the later one names destination
    // options.
    let options = [17, 0, 1, 4, 0, 0, 0, 0];
    let datagram = [0, 9, 0, 53, 0, 8, 0, 0];
    let first = to_pod6().identification(5).fragment(0, true).payload(60, &[options, datagram].concat());
    assert_eq!(rig.run(ToPod, &first.frame()), Ok(()));
    let later = to_pod6().identification(5).fragment(2, false).payload(60, &[0xff; 24]);
    assert_eq!(rig.run(ToPod, &later.frame()), Ok(()));
}

#[test]
fn a_transport_header_must_not_be_split_or_overlapped() {
    let rig = Rig::isolated(Some(&allow_all()), Some(&allow_all()));
    let tiny = Err(DropReason::FragmentTiny);
    for out in [from_pod(), from_pod6()] {
        let first =
            |protocol, bytes: usize| out.clone().fragment(0, true).payload(protocol, &vec![0; bytes]).frame();
        let later = |protocol, offset| {
            out.clone().identification(77).fragment(offset, false).payload(protocol, &[0; 24]).frame()
        };
        let cases = [
            ("TCP without its flags", first(6, 8), tiny),
            ("TCP without its window", first(6, 16), tiny),
            ("a whole TCP header", first(6, 24), Ok(())),
            ("UDP without its length", first(17, 4), tiny),
            ("a whole UDP header", first(17, 8), Ok(())),
            ("SCTP without its checksum", first(132, 8), tiny),
            ("TCP flags again", later(6, 1), tiny),
            ("the end of a TCP header again", later(6, 2), tiny),
            ("behind a TCP header", later(6, 3), Ok(())),
            ("behind a UDP header", later(17, 1), Ok(())),
            ("an SCTP checksum again", later(132, 1), tiny),
        ];
        for (what, frame, expected) in cases {
            assert_eq!(rig.run(FromPod, &frame), expected, "{what}");
        }
    }
}

#[test]
fn a_first_fragment_is_forgotten_in_time() {
    let rig = Rig::isolated(Some(&policy(&[("10.0.0.2/32", 1)], &[(1, port(17, 53))])), None);
    let datagram = to_pod().identification(9);
    assert_eq!(rig.run(ToPod, &datagram.clone().fragment(0, true).udp(9, 53).frame()), Ok(()));
    let data = MapData::from_pin(rig.pin("na_frag4")).unwrap();
    let mut map: HashMap<_, FragmentKey<Ip4>, Fragmented> =
        Map::from_map_data(data).unwrap().try_into().unwrap();
    let (key, said) = map.iter().next().unwrap().unwrap();
    map.insert(key, Fragmented { seen: said.seen.wrapping_sub(40), ..said }, 0).unwrap();
    assert_eq!(rig.run(ToPod, &later(datagram, 3)), Err(DropReason::FragmentMiss));
}
