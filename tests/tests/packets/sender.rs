//! What a pod may claim to be, and what reaches it before any policy.

use super::*;

#[test]
fn without_policy_own_packets_pass_and_are_counted() {
    let rig = Rig::new();
    let frame = from_pod().tcp(40000, 80, SYN).frame();
    assert_eq!(rig.run(FromPod, &frame), Ok(()));
    assert_eq!(rig.run(FromPod, &from_pod6().udp(1, 2).frame()), Ok(()));
    assert_eq!(rig.run(ToPod, &to_pod().tcp(80, 40000, ACK).frame()), Ok(()));
    let stats = rig.dataplane.stats(POD).unwrap();
    let expected = Stats {
        from_pod: Traffic { packets: 2, bytes: 54 + 66 },
        to_pod: Traffic { packets: 1, bytes: 54 },
        ..Stats::default()
    };
    assert_eq!(stats, expected);
    assert_eq!(rig.flows().keys().count(), 0, "nobody isolated, nothing tracked");
}

#[test]
fn a_pod_speaks_only_for_itself() {
    let rig = Rig::new();
    let other = Mac([2, 9, 9, 9, 9, 9]);
    // The link-local address of POD_MAC, then one that is somebody else's.
    let (own_link_local, other_link_local) = ("fe80::ff:fe00:1", "fe80::ff:fe00:2");
    let solicit = |source: &str, option| {
        Packet::between(source, "ff02::1:ff00:2").neighbour(135, PEER_V6, &[(1, option)]).frame()
    };
    let advertise = |target: &str, option| from_pod6().neighbour(136, target, &[(2, option)]).frame();
    let cases = [
        ("own IPv4", from_pod().udp(1, 2).frame(), Ok(())),
        ("another MAC", from_pod().from_mac(other).udp(1, 2).frame(), Err(DropReason::SourceMac)),
        ("another IPv4", Packet::between("10.0.0.9", PEER_V4).udp(1, 2).frame(), Err(DropReason::SourceIpv4)),
        (
            "0.0.0.0 as a DHCP client",
            Packet::between("0.0.0.0", "255.255.255.255").udp(68, 67).frame(),
            Ok(()),
        ),
        (
            "0.0.0.0 otherwise",
            Packet::between("0.0.0.0", "255.255.255.255").udp(68, 69).frame(),
            Err(DropReason::SourceIpv4),
        ),
        ("a DHCP reply", from_pod().udp(67, 68).frame(), Err(DropReason::DhcpServer)),
        ("own IPv6", from_pod6().udp(1, 2).frame(), Ok(())),
        ("own link-local", Packet::between(own_link_local, PEER_V6).udp(1, 2).frame(), Ok(())),
        (
            "another link-local",
            Packet::between(other_link_local, PEER_V6).udp(1, 2).frame(),
            Err(DropReason::SourceIpv6),
        ),
        ("another IPv6", Packet::between("fd00::9", PEER_V6).udp(1, 2).frame(), Err(DropReason::SourceIpv6)),
        ("a DHCPv6 reply", from_pod6().udp(547, 546).frame(), Err(DropReason::DhcpServer)),
        ("own ARP", arp_request(POD_MAC, POD_V4, PEER_V4), Ok(())),
        ("an ARP probe", arp_request(POD_MAC, "0.0.0.0", POD_V4), Ok(())),
        ("ARP for another", arp_request(POD_MAC, "10.0.0.9", PEER_V4), Err(DropReason::ArpSenderIp)),
        ("ARP from another", arp_request(other, POD_V4, PEER_V4), Err(DropReason::ArpSenderMac)),
        ("a solicitation", solicit(POD_V6, POD_MAC), Ok(())),
        (
            "duplicate detection",
            Packet::between("::", "ff02::1:ff00:1").neighbour(135, POD_V6, &[]).frame(),
            Ok(()),
        ),
        (
            "no source otherwise",
            Packet::between("::", PEER_V6).udp(1, 2).frame(),
            Err(DropReason::SourceIpv6),
        ),
        ("a solicitation for another", solicit("fd00::9", POD_MAC), Err(DropReason::SourceIpv6)),
        ("a solicitation with another MAC", solicit(POD_V6, other), Err(DropReason::NdLinkLayer)),
        ("an advertisement", advertise(POD_V6, POD_MAC), Ok(())),
        ("an advertisement of the link-local", advertise(own_link_local, POD_MAC), Ok(())),
        ("an advertisement of another", advertise(PEER_V6, POD_MAC), Err(DropReason::NdTarget)),
        ("an advertisement with another MAC", advertise(POD_V6, other), Err(DropReason::NdLinkLayer)),
        ("a router solicitation", from_pod6().hop_limit(255).icmp(133, &[0; 4]).frame(), Ok(())),
        (
            "a router advertisement",
            from_pod6().hop_limit(255).icmp(134, &[0; 12]).frame(),
            Err(DropReason::RouterMessage),
        ),
        (
            "a redirect",
            from_pod6().hop_limit(255).icmp(137, &[0; 36]).frame(),
            Err(DropReason::RouterMessage),
        ),
        ("a VLAN tag", from_pod().tagged(5).udp(1, 2).frame(), Err(DropReason::VlanTagged)),
        (
            "loose source routing",
            from_pod().options(&[1, 131, 7, 4, 10, 0, 0, 9]).udp(1, 2).frame(),
            Err(DropReason::SourceRoute),
        ),
        (
            "strict source routing",
            from_pod().options(&[137, 7, 4, 10, 0, 0, 9, 0]).udp(1, 2).frame(),
            Err(DropReason::SourceRoute),
        ),
        ("a router alert", from_pod().options(&[148, 4, 0, 0]).udp(1, 2).frame(), Ok(())),
        ("12 no-operations", from_pod().options(&[1; 12]).udp(1, 2).frame(), Ok(())),
        ("40 no-operations", from_pod().options(&[1; 40]).udp(1, 2).frame(), Err(DropReason::Malformed)),
        (
            "an option without end",
            from_pod().options(&[7, 0, 0, 0]).udp(1, 2).frame(),
            Err(DropReason::Malformed),
        ),
        ("another ethertype", other_ethertype(0x88cc), Ok(())),
    ];
    for (what, frame, expected) in cases {
        assert_eq!(rig.run(FromPod, &frame), expected, "{what}");
    }
}

#[test]
fn router_messages_do_not_hide_behind_extension_headers() {
    let rig = Rig::new();
    let advertisement = || from_pod6().hop_limit(255).icmp(134, &[0; 12]);
    let padding = [0, 1, 4, 0, 0, 0, 0];
    let eight = (0..8).fold(advertisement(), |packet, _| packet.extension(60, &padding));
    let seven = (0..7).fold(advertisement(), |packet, _| packet.extension(60, &padding));
    let cases = [
        (advertisement().extension(0, &padding).frame(), DropReason::RouterMessage),
        (advertisement().extension(51, &[0; 7]).frame(), DropReason::RouterMessage),
        (seven.frame(), DropReason::RouterMessage),
        (eight.frame(), DropReason::ExtensionHeaders),
        (advertisement().fragment(0, true).frame(), DropReason::Malformed),
        (advertisement().fragment(0, false).frame(), DropReason::RouterMessage),
        (from_pod6().extension(43, &[0, 0, 0, 0, 0, 0, 0]).udp(1, 2).frame(), DropReason::SourceRoute),
    ];
    for (frame, expected) in cases {
        assert_eq!(rig.run(FromPod, &frame), Err(expected));
    }
    let segment_routing = from_pod6().extension(43, &[0, 4, 0, 0, 0, 0, 0]).udp(1, 2);
    assert_eq!(rig.run(FromPod, &segment_routing.frame()), Ok(()));
}

#[test]
fn without_known_addresses_only_the_mac_and_the_role_are_checked() {
    let rig = Rig::new();
    rig.put(Checks { source_mac: true, ..Checks::default() });
    let stranger = Packet::between("192.0.2.1", PEER_V4);
    let other = Mac([2, 9, 9, 9, 9, 9]);
    assert_eq!(rig.run(FromPod, &stranger.clone().udp(1, 2).frame()), Ok(()));
    assert_eq!(rig.run(FromPod, &arp_request(POD_MAC, "192.0.2.1", PEER_V4)), Ok(()));
    assert_eq!(rig.run(FromPod, &arp_request(other, POD_V4, PEER_V4)), Err(DropReason::ArpSenderMac));
    assert_eq!(
        rig.run(FromPod, &stranger.clone().from_mac(other).udp(1, 2).frame()),
        Err(DropReason::SourceMac)
    );
    rig.put(Checks::default());
    assert_eq!(rig.run(FromPod, &stranger.from_mac(other).udp(67, 68).frame()), Ok(()));
}

/// Rows: C60.
#[test]
fn nobody_else_comes_with_the_pods_own_address() {
    let rig = Rig::isolated(Some(&allow_all()), None);
    let own_link_local = "fe80::ff:fe00:1";
    let addresses = [
        (POD_V4, POD_V4, DropReason::SourceIpv4),
        (POD_V6, POD_V6, DropReason::SourceIpv6),
        (own_link_local, POD_V6, DropReason::SourceIpv6),
    ];
    for (source, destination, reason) in addresses {
        let packet = || Packet::between(source, destination);
        for packet in
            [packet().tcp(1000, 80, SYN), packet().tcp(1000, 80, ACK), packet().udp(1, 2), packet().ping(1)]
        {
            assert_eq!(rig.run(ToPod, &packet.frame()), Err(reason), "{packet:?}");
        }
    }
    let fragment = Packet::between(POD_V4, POD_V4).udp(1, 2).fragment(185, false);
    assert_eq!(rig.run(ToPod, &fragment.frame()), Err(DropReason::SourceIpv4));
    assert_eq!(rig.run(ToPod, &to_pod().udp(1, 2).frame()), Ok(()));
    // Of an attachment whose addresses nobody knows it could not be told.
    rig.put(Checks { source_mac: true, ..Checks::default() });
    assert_eq!(rig.run(ToPod, &Packet::between(POD_V4, POD_V4).udp(1, 2).frame()), Ok(()));
}

#[test]
fn addresses_can_be_added_and_taken_away() {
    let rig = Rig::new();
    let from_second = Packet::between("10.0.0.9", PEER_V4).udp(1, 2).frame();
    let put = |addresses: &[&str]| {
        let flags = Checks { source_mac: true, source_address: true, ..Checks::default() };
        let addresses: Vec<IpAddr> = addresses.iter().map(|address| address.parse().unwrap()).collect();
        rig.dataplane.put_attachment(POD, &Attachment { addresses, flags, ..bare() }).unwrap();
    };
    assert_eq!(rig.run(FromPod, &from_second), Err(DropReason::SourceIpv4));
    put(&[POD_V4, "10.0.0.9"]);
    assert_eq!(rig.run(FromPod, &from_second), Ok(()));
    put(&["10.0.0.9"]);
    assert_eq!(rig.run(FromPod, &from_second), Ok(()));
    assert_eq!(rig.run(FromPod, &from_pod().udp(1, 2).frame()), Err(DropReason::SourceIpv4));
    put(&[]);
    assert_eq!(rig.run(FromPod, &from_second), Err(DropReason::SourceIpv4));
    let unspecified = Packet::between("0.0.0.0", PEER_V4).udp(1, 2).frame();
    assert_eq!(rig.run(FromPod, &unspecified), Err(DropReason::SourceIpv4), "not even in its place");
}

#[test]
fn truncated_packets_are_malformed() {
    let rig = Rig::isolated(Some(&allow_all()), Some(&allow_all()));
    let cut = |packet: Packet, keep: usize| packet.frame()[..keep].to_vec();
    let cases = [
        ("IPv4 without UDP ports", cut(from_pod().udp(1, 2), 36)),
        ("IPv4 without TCP flags", cut(from_pod().tcp(1, 2, SYN), 46)),
        ("IPv6 without UDP ports", cut(from_pod6().udp(1, 2), 56)),
        ("half an ARP packet", arp_request(POD_MAC, POD_V4, PEER_V4)[..30].to_vec()),
        ("an ARP packet for other networks", {
            let mut frame = arp_request(POD_MAC, POD_V4, PEER_V4);
            frame[18] = 8;
            frame
        }),
        ("an IPv4 header length below five", {
            let mut frame = from_pod().udp(1, 2).frame();
            frame[14] = 0x44;
            frame
        }),
        ("IPv6 that says version 4", {
            let mut frame = from_pod6().udp(1, 2).frame();
            frame[14] = 0x40;
            frame
        }),
        ("a neighbour option of no length", {
            let mut frame = from_pod6().neighbour(135, PEER_V6, &[(1, POD_MAC)]).frame();
            let option = frame.len() - 8;
            frame[option + 1] = 0;
            frame
        }),
    ];
    for (what, frame) in cases {
        assert_eq!(rig.run(FromPod, &frame), Err(DropReason::Malformed), "{what}");
    }
}

/// Programs remember whose a device was; they must not believe it.
#[test]
fn a_device_that_changes_hands_is_its_new_owners_at_once() {
    const OTHER: u32 = 9;
    let rig = Rig::new();
    let frame = from_pod().udp(1, 2).frame();
    assert_eq!(rig.run(FromPod, &frame), Ok(()));
    assert_eq!(rig.run(FromPod, &frame), Ok(()), "now from memory");
    rig.dataplane.put_attachment(OTHER, &bare()).unwrap();
    for owner in [OTHER, POD, OTHER] {
        rig.dataplane.bind_link(DEVICE, owner).unwrap();
        assert_eq!(rig.run_as(owner, FromPod, &frame), Ok(()), "{owner}");
        assert_eq!(rig.run_as(owner, ToPod, &to_pod().udp(2, 1).frame()), Ok(()), "{owner}");
    }
    rig.dataplane.unbind_link(DEVICE).unwrap();
    assert_eq!(rig.run_as(0, FromPod, &frame), Err(DropReason::Unbound));
    rig.dataplane.bind_link(DEVICE, POD).unwrap();
    rig.dataplane.remove_attachment(POD).unwrap();
    assert_eq!(rig.run_as(0, FromPod, &frame), Err(DropReason::Unbound));
}

#[test]
fn a_device_of_nobody_passes_nothing() {
    let rig = Rig::new();
    let frame = to_pod().udp(1, 2).frame();
    rig.dataplane.unbind_link(DEVICE).unwrap();
    rig.dataplane.unbind_link(DEVICE).unwrap();
    for hook in [FromPod, ToPod] {
        assert_eq!(rig.run_as(0, hook, &frame), Err(DropReason::Unbound));
    }
    rig.dataplane.bind_link(DEVICE, POD).unwrap();
    assert_eq!(rig.run(ToPod, &frame), Ok(()));
    rig.dataplane.remove_attachment(POD).unwrap();
    assert_eq!(rig.run_as(0, ToPod, &frame), Err(DropReason::Unbound));
}

#[test]
fn a_device_that_was_being_taken_away_when_the_agent_died_is_nobodys() {
    let rig = Rig::new();
    let frame = to_pod().udp(1, 2).frame();
    assert_eq!(rig.run(ToPod, &frame), Ok(()));
    // The first step of making a device nobody's; the agent did not come to the second one.
    let data = MapData::from_pin(rig.pin("na_link")).unwrap();
    let mut links: HashMap<_, u32, u32> = Map::from_map_data(data).unwrap().try_into().unwrap();
    links.remove(&DEVICE).unwrap();
    let successor = Dataplane::open(&config(&rig.root)).unwrap();
    assert_eq!(rig.run_as(0, ToPod, &frame), Err(DropReason::Unbound));
    successor.bind_link(DEVICE, POD).unwrap();
    assert_eq!(rig.run(ToPod, &frame), Ok(()));
}

#[test]
fn while_pending_only_address_resolution_passes() {
    let rig = Rig::new();
    rig.put(Checks { source_mac: true, source_address: true, pending: true, ..Checks::default() });
    let pending = Err(DropReason::Pending);
    let report = Packet::between("fe80::ff:fe00:1", "ff02::16")
        .hop_limit(1)
        .extension(0, &[0, 5, 2, 0, 0, 1, 0])
        .icmp(143, &[0; 4]);
    let cases = [
        (FromPod, arp_request(POD_MAC, POD_V4, PEER_V4), Ok(())),
        (ToPod, arp_request(Mac([2; 6]), PEER_V4, POD_V4), Ok(())),
        (FromPod, from_pod6().neighbour(135, PEER_V6, &[(1, POD_MAC)]).frame(), Ok(())),
        (ToPod, to_pod6().neighbour(136, PEER_V6, &[(2, Mac([2; 6]))]).frame(), Ok(())),
        (ToPod, to_pod6().hop_limit(255).icmp(134, &[0; 12]).frame(), Ok(())),
        (FromPod, report.frame(), Ok(())),
        (FromPod, from_pod().udp(1, 2).frame(), pending),
        (ToPod, to_pod().tcp(80, 1, ACK).frame(), pending),
        (FromPod, from_pod6().ping(1).frame(), pending),
        (ToPod, to_pod6().ping(1).frame(), pending),
        (FromPod, other_ethertype(0x88cc), pending),
        (ToPod, to_pod().tagged(3).udp(1, 2).frame(), Err(DropReason::VlanTagged)),
        (FromPod, Packet::between("10.0.0.9", PEER_V4).udp(1, 2).frame(), Err(DropReason::SourceIpv4)),
    ];
    for (hook, frame, expected) in cases {
        assert_eq!(rig.run(hook, &frame), expected, "{hook:?} {frame:02x?}");
    }
    rig.put(Checks { source_mac: true, source_address: true, ..Checks::default() });
    assert_eq!(rig.run(FromPod, &from_pod().udp(1, 2).frame()), Ok(()));
}

#[test]
fn vlan_tags_pass_only_towards_a_pod_that_is_not_isolated() {
    let rig = Rig::new();
    let tagged = to_pod().tagged(5).udp(1, 2).frame();
    assert_eq!(rig.run(ToPod, &tagged), Ok(()));
    rig.enforce(Some(&allow_all()), None);
    assert_eq!(rig.run(ToPod, &tagged), Err(DropReason::VlanTagged));
}
