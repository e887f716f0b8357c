//! Sender checks, and packets that are refused before any policy.

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
    // The link-local address of POD_MAC, then one of another MAC address.
    let (own_link_local, other_link_local) = ("fe80::ff:fe00:1", "fe80::ff:fe00:2");
    let solicit = |source: &str, option| {
        Packet::between(source, "ff02::1:ff00:2").neighbour(135, PEER_V6, &[(1, option)]).frame()
    };
    let advertise = |target: &str, option| from_pod6().neighbour(136, target, &[(2, option)]).frame();
    let igmp =
        |kind| Packet::between(POD_V4, "224.0.0.1").hop_limit(1).payload(2, &[kind, 0, 0, 0, 0, 0, 0, 0]);
    let with_operation = |operation, sender: &str| {
        let mut frame = arp_request(POD_MAC, sender, PEER_V4);
        frame[21] = operation;
        frame
    };
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
        ("a DHCP reply from another port", from_pod().udp(1067, 68).frame(), Err(DropReason::DhcpServer)),
        ("what a DHCP client sends again", from_pod().udp(68, 67).frame(), Ok(())),
        ("own IPv6", from_pod6().udp(1, 2).frame(), Ok(())),
        ("own link-local", Packet::between(own_link_local, PEER_V6).udp(1, 2).frame(), Ok(())),
        (
            "another link-local",
            Packet::between(other_link_local, PEER_V6).udp(1, 2).frame(),
            Err(DropReason::SourceIpv6),
        ),
        ("another IPv6", Packet::between("fd00::9", PEER_V6).udp(1, 2).frame(), Err(DropReason::SourceIpv6)),
        ("a DHCPv6 reply", from_pod6().udp(547, 546).frame(), Err(DropReason::DhcpServer)),
        ("a DHCPv6 reply from another port", from_pod6().udp(1067, 546).frame(), Err(DropReason::DhcpServer)),
        (
            "what a DHCPv6 client sends",
            from_pod6().payload(17, &[2, 34, 2, 35, 0, 12, 0, 0, 1, 0, 0, 1]).frame(),
            Ok(()),
        ),
        ("own ARP", arp_request(POD_MAC, POD_V4, PEER_V4), Ok(())),
        ("an ARP probe", arp_request(POD_MAC, "0.0.0.0", POD_V4), Ok(())),
        ("an ARP probe for another", arp_request(POD_MAC, "0.0.0.0", PEER_V4), Err(DropReason::ArpSenderIp)),
        ("an ARP answer from nobody", with_operation(2, "0.0.0.0"), Err(DropReason::ArpSenderIp)),
        ("an ARP answer", with_operation(2, POD_V4), Ok(())),
        ("reverse ARP", with_operation(3, POD_V4), Err(DropReason::Malformed)),
        ("inverse ARP", with_operation(8, POD_V4), Err(DropReason::Malformed)),
        ("padded ARP", [arp_request(POD_MAC, POD_V4, PEER_V4), vec![0; 18]].concat(), Ok(())),
        ("ARP with a trailer", [arp_request(POD_MAC, POD_V4, PEER_V4), vec![0; 22]].concat(), Ok(())),
        (
            "ARP with something behind it",
            [arp_request(POD_MAC, POD_V4, PEER_V4), vec![7]].concat(),
            Err(DropReason::Malformed),
        ),
        (
            "ARP with something in its padding",
            [arp_request(POD_MAC, POD_V4, PEER_V4), vec![0; 21], vec![7]].concat(),
            Err(DropReason::Malformed),
        ),
        (
            "ARP and more",
            [arp_request(POD_MAC, POD_V4, PEER_V4), vec![0; 23]].concat(),
            Err(DropReason::Malformed),
        ),
        ("ARP for another", arp_request(POD_MAC, "10.0.0.9", PEER_V4), Err(DropReason::ArpSenderIp)),
        ("ARP from another", arp_request(other, POD_V4, PEER_V4), Err(DropReason::ArpSenderMac)),
        ("a solicitation", solicit(POD_V6, POD_MAC), Ok(())),
        (
            "duplicate detection",
            Packet::between("::", "ff02::1:ff00:1").neighbour(135, POD_V6, &[]).frame(),
            Ok(()),
        ),
        (
            "duplicate detection of another's",
            Packet::between("::", "ff02::1:ff00:2").neighbour(135, PEER_V6, &[]).frame(),
            Err(DropReason::NdTarget),
        ),
        (
            "duplicate detection of the link-local address",
            Packet::between("::", "ff02::1:ff00:1").neighbour(135, own_link_local, &[]).frame(),
            Ok(()),
        ),
        (
            "duplicate detection of another's link-local address",
            Packet::between("::", "ff02::1:ff00:2").neighbour(135, other_link_local, &[]).frame(),
            Err(DropReason::NdTarget),
        ),
        ("a ping from nobody", Packet::between("::", PEER_V6).ping(1).frame(), Err(DropReason::SourceIpv6)),
        (
            "an advertisement from nobody",
            Packet::between("::", "ff02::1").neighbour(136, POD_V6, &[]).frame(),
            Err(DropReason::SourceIpv6),
        ),
        (
            "a fragment of ICMPv6 from nobody",
            Packet::between("::", PEER_V6).fragment(3, false).payload(58, &[0; 8]).frame(),
            Err(DropReason::SourceIpv6),
        ),
        (
            "a report from nobody",
            Packet::between("::", "ff02::16").hop_limit(1).icmp(143, &[0; 4]).frame(),
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
        (
            "a multicast query",
            Packet::between(own_link_local, "ff02::1").hop_limit(1).icmp(130, &[0; 20]).frame(),
            Err(DropReason::RouterMessage),
        ),
        (
            "a multicast router's advertisement",
            Packet::between(own_link_local, "ff02::6a").hop_limit(1).icmp(151, &[0; 4]).frame(),
            Err(DropReason::RouterMessage),
        ),
        (
            "a router advertisement, IPv4",
            from_pod().icmp(9, &[0; 12]).frame(),
            Err(DropReason::RouterMessage),
        ),
        ("a redirect, IPv4", from_pod().icmp(5, &[0; 32]).frame(), Err(DropReason::RouterMessage)),
        (
            "the first fragment of a redirect",
            from_pod().fragment(0, true).icmp(5, &[0; 36]).frame(),
            Err(DropReason::RouterMessage),
        ),
        (
            "what could be one in another fragment",
            from_pod().identification(9).fragment(3, false).payload(1, &[5; 8]).frame(),
            Ok(()),
        ),
        ("a router solicitation, IPv4", from_pod().icmp(10, &[0; 4]).frame(), Ok(())),
        ("an IGMP query", igmp(0x11).frame(), Err(DropReason::RouterMessage)),
        ("DVMRP", igmp(0x13).frame(), Err(DropReason::RouterMessage)),
        ("PIM in its first version", igmp(0x14).frame(), Err(DropReason::RouterMessage)),
        ("a multicast router's advertisement, IPv4", igmp(0x30).frame(), Err(DropReason::RouterMessage)),
        ("an IGMP report", igmp(0x22).frame(), Ok(())),
        ("an IGMP query without a type", from_pod().payload(2, &[]).frame(), Err(DropReason::Malformed)),
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
        ("another ethertype", other_ethertype(0x88b5), Ok(())),
    ];
    for (what, frame, expected) in cases {
        assert_eq!(rig.run(FromPod, &frame), expected, "{what}");
    }
}

/// A server trusts a message's data about its client, whichever host has sent it.
///
/// Rows: SRC-dhcp.
#[test]
fn a_pod_speaks_to_servers_of_dhcp_as_itself_alone() {
    let rig = Rig::new();
    let other = Mac([2, 9, 9, 9, 9, 9]);
    let (own, nobody) = ("10.0.0.1", "0.0.0.0");
    let request = [1, 1, 6];
    let asks = dhcp(request, nobody, nobody, POD_MAC);
    let to_all = || Packet::between("0.0.0.0", "255.255.255.255");
    let cases = [
        ("own, without an address", asks.clone(), Ok(())),
        ("own", dhcp(request, own, nobody, POD_MAC), Ok(())),
        ("another's", dhcp(request, nobody, nobody, other), Err(DropReason::SourceMac)),
        ("another's address", dhcp(request, PEER_V4, nobody, POD_MAC), Err(DropReason::SourceIpv4)),
        ("a relay's", dhcp(request, nobody, own, POD_MAC), Err(DropReason::DhcpServer)),
        ("a server's", dhcp([2, 1, 6], nobody, nobody, POD_MAC), Err(DropReason::DhcpServer)),
        ("of other hardware", dhcp([1, 6, 6], nobody, nobody, POD_MAC), Err(DropReason::DhcpServer)),
        ("of a longer address", dhcp([1, 1, 16], nobody, nobody, POD_MAC), Err(DropReason::DhcpServer)),
        ("no message", [&[0_u8, 68, 0, 67, 0, 41, 0, 0][..], &[2; 33]].concat(), Ok(())),
    ];
    for (what, payload, expected) in &cases {
        for packet in [from_pod(), to_all(), from_pod().options(&[1, 1, 1, 0])] {
            assert_eq!(rig.run(FromPod, &packet.payload(17, payload).frame()), *expected, "{what}");
        }
    }
    // A server on a packet socket reads on behind the end of the IP packet.
    let reaching = |length: usize, more: usize| {
        [from_pod().payload(17, &asks[..length]).frame(), asks[length..length + more].to_vec()].concat()
    };
    let ends = [
        (8, 33, Ok(())),
        (8, 34, Err(DropReason::Malformed)),
        (41, 207, Err(DropReason::Malformed)),
        (42, 206, Ok(())),
    ];
    for (length, more, expected) in ends {
        assert_eq!(rig.run(FromPod, &reaching(length, more)), expected, "{length} {more}");
    }
    // The rest of a first fragment would come in another one.
    let first = |length: usize| from_pod().fragment(0, true).payload(17, &asks[..length]).frame();
    assert_eq!(rig.run(FromPod, &first(40)), Err(DropReason::Malformed));
    assert_eq!(rig.run(FromPod, &first(48)), Ok(()));
    // By IPv6, any process may use that port.
    let foreign = dhcp(request, nobody, nobody, other);
    assert_eq!(rig.run(FromPod, &from_pod6().payload(17, &foreign).frame()), Ok(()));
    // Packets to the pod are the responsibility of their sender.
    assert_eq!(rig.run(ToPod, &to_pod().payload(17, &foreign).frame()), Ok(()));

    // `sourceCheck` mac and off.
    rig.put(Checks { source_mac: true, ..Checks::default() });
    let another_address = dhcp(request, PEER_V4, nobody, POD_MAC);
    for (payload, expected) in [(&another_address, Ok(())), (&foreign, Err(DropReason::SourceMac))] {
        assert_eq!(rig.run(FromPod, &from_pod().payload(17, payload).frame()), expected);
    }
    rig.put(Checks::default());
    for (what, payload, _) in &cases {
        assert_eq!(rig.run(FromPod, &from_pod().payload(17, payload).frame()), Ok(()), "{what}");
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
}

/// Rows: C88.
#[test]
fn a_packet_whose_way_is_not_at_its_end_is_refused_whatever_the_header_is_called() {
    let rig = Rig::isolated(Some(&allow_all()), Some(&allow_all()));
    let through = |packet: Packet, kind, segments| {
        packet.extension(43, &[0, kind, segments, 0, 0, 0, 0]).udp(1, 2).frame()
    };
    for kind in [0, 2, 3, 4, 5, 253] {
        assert_eq!(rig.run(FromPod, &through(from_pod6(), kind, 1)), Err(DropReason::SourceRoute), "{kind}");
        assert_eq!(rig.run(ToPod, &through(to_pod6(), kind, 1)), Err(DropReason::SourceRoute), "{kind}");
        let at_the_end = if kind == 0 { Err(DropReason::SourceRoute) } else { Ok(()) };
        assert_eq!(rig.run(FromPod, &through(from_pod6(), kind, 0)), at_the_end, "{kind}");
    }
}

/// Linux reads a packet without a length, but with hop-by-hop options, to the end of the frame; other systems do not.
#[test]
fn a_packet_is_as_long_as_it_says() {
    let rig = Rig::isolated(Some(&allow_all()), Some(&allow_all()));
    let other = Mac([2, 9, 9, 9, 9, 9]);
    let with_length = |mut frame: Vec<u8>, at: usize, length: u16| {
        frame[at..at + 2].copy_from_slice(&length.to_be_bytes());
        frame
    };
    let (v4, v6) = (14 + 2, 14 + 4);
    let padding = [0, 1, 4, 0, 0, 0, 0];
    let solicitation = || from_pod6().extension(0, &padding).neighbour(135, PEER_V6, &[(1, other)]).frame();
    let jumbo = |length: u32| {
        let rest = [&[0, 0xc2, 4][..], &length.to_be_bytes()].concat();
        with_length(from_pod6().extension(0, &rest).udp(1, 2).frame(), v6, 0)
    };
    let cases = [
        ("no length, with hop-by-hop options", with_length(solicitation(), v6, 0)),
        (
            "no length, with destination options",
            with_length(from_pod6().extension(60, &padding).udp(1, 2).frame(), v6, 0),
        ),
        ("no length", with_length(from_pod6().udp(1, 2).frame(), v6, 0)),
        ("a jumbo option and no jumbogram", jumbo(20)),
        ("a jumbo option and no such frame", jumbo(70_000)),
        ("more than there is", with_length(from_pod6().udp(1, 2).frame(), v6, 13)),
        ("less than a header", with_length(from_pod6().udp(1, 2).frame(), v6, 7)),
        (
            "half the extension headers",
            with_length(from_pod6().extension(60, &padding).payload(59, &[]).frame(), v6, 7),
        ),
        ("no length, IPv4", with_length(from_pod().udp(1, 2).frame(), v4, 0)),
        ("less than an IPv4 header", with_length(from_pod().payload(47, &[]).frame(), v4, 19)),
        ("more than there is, IPv4", with_length(from_pod().tcp(1, 2, SYN).frame(), v4, 41)),
        ("less than a TCP header", with_length(from_pod().tcp(1, 2, SYN).frame(), v4, 39)),
        (
            "hop-by-hop options in the second place",
            from_pod6().extension(60, &padding).extension(0, &padding).udp(1, 2).frame(),
        ),
    ];
    for (what, frame) in cases {
        assert_eq!(rig.run(FromPod, &frame), Err(DropReason::Malformed), "{what}");
        rig.put(Checks::default());
        assert_eq!(rig.run(ToPod, &frame), Err(DropReason::Malformed), "{what}");
        rig.put(Checks { source_mac: true, source_address: true, ..Checks::default() });
    }
    assert_eq!(rig.run(FromPod, &solicitation()), Err(DropReason::NdLinkLayer));
    assert_eq!(rig.run(FromPod, &[from_pod().udp(1, 2).frame(), vec![0; 14]].concat()), Ok(()), "padding");
    // A mobility header is the last one (RFC 6275).
    let tcp_only = policy(&[("fd00::/64", 1)], &[(1, port(6, 80))]);
    rig.enforce(None, Some(&tcp_only));
    let mobile = from_pod6().extension(135, &padding).tcp(1, 80, SYN).frame();
    assert_eq!(rig.run(FromPod, &mobile), Err(DropReason::EgressPort));
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
    // Without the attachment's addresses the check is impossible.
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
        rig.dataplane.attachments().put(POD, &Attachment { addresses, flags, ..bare() }).unwrap();
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

/// Programs cache a device's owner; they must not trust the cache.
#[test]
fn a_device_that_changes_hands_is_its_new_owners_at_once() {
    const OTHER: u32 = 9;
    let rig = Rig::new();
    let frame = from_pod().udp(1, 2).frame();
    assert_eq!(rig.run(FromPod, &frame), Ok(()));
    assert_eq!(rig.run(FromPod, &frame), Ok(()), "now from memory");
    rig.dataplane.attachments().put(OTHER, &bare()).unwrap();
    for owner in [OTHER, POD, OTHER] {
        rig.dataplane.attachments().bind(DEVICE, owner).unwrap();
        assert_eq!(rig.run_as(owner, FromPod, &frame), Ok(()), "{owner}");
        assert_eq!(rig.run_as(owner, ToPod, &to_pod().udp(2, 1).frame()), Ok(()), "{owner}");
    }
    rig.dataplane.attachments().unbind(DEVICE).unwrap();
    assert_eq!(rig.run_as(0, FromPod, &frame), Err(DropReason::Unbound));
    rig.dataplane.attachments().bind(DEVICE, POD).unwrap();
    rig.dataplane.remove_attachment(POD).unwrap();
    assert_eq!(rig.run_as(0, FromPod, &frame), Err(DropReason::Unbound));
}

#[test]
fn a_device_of_nobody_passes_nothing() {
    let rig = Rig::new();
    let frame = to_pod().udp(1, 2).frame();
    rig.dataplane.attachments().unbind(DEVICE).unwrap();
    rig.dataplane.attachments().unbind(DEVICE).unwrap();
    for hook in [FromPod, ToPod] {
        assert_eq!(rig.run_as(0, hook, &frame), Err(DropReason::Unbound));
    }
    rig.dataplane.attachments().bind(DEVICE, POD).unwrap();
    assert_eq!(rig.run(ToPod, &frame), Ok(()));
    rig.dataplane.remove_attachment(POD).unwrap();
    assert_eq!(rig.run_as(0, ToPod, &frame), Err(DropReason::Unbound));
}

#[test]
fn a_device_that_was_being_taken_away_when_the_agent_died_is_nobodys() {
    let rig = Rig::new();
    let frame = to_pod().udp(1, 2).frame();
    assert_eq!(rig.run(ToPod, &frame), Ok(()));
    // The first step of unbinding a device; the agent died before the second one.
    let data = MapData::from_pin(rig.pin("na_link")).unwrap();
    let mut links: HashMap<_, u32, u32> = Map::from_map_data(data).unwrap().try_into().unwrap();
    links.remove(&DEVICE).unwrap();
    let successor = Dataplane::open(&config(&rig.root)).unwrap();
    assert_eq!(rig.run_as(0, ToPod, &frame), Err(DropReason::Unbound));
    successor.attachments().bind(DEVICE, POD).unwrap();
    assert_eq!(rig.run(ToPod, &frame), Ok(()));
}

/// A filter in a pod that is ending, or an entry of a map, may still have the number of a removed attachment.
#[test]
fn packets_of_a_number_without_a_record_are_nobodys() {
    let rig = Rig::new();
    rig.dataplane.remove_attachment(POD).unwrap();
    let data = MapData::from_pin(rig.pin("na_link")).unwrap();
    let mut links: HashMap<_, u32, u32> = Map::from_map_data(data).unwrap().try_into().unwrap();
    links.insert(DEVICE, POD, 0).unwrap();
    for (hook, frame) in [(FromPod, from_pod().udp(1, 2).frame()), (ToPod, to_pod().udp(2, 1).frame())] {
        assert_eq!(rig.run_as(0, hook, &frame), Err(DropReason::Unbound));
    }
    assert_eq!(rig.dataplane.stats(POD).unwrap(), Stats::default());
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
        (ToPod, Packet::between("fe80::2", "ff02::1").hop_limit(255).icmp(134, &[0; 12]).frame(), Ok(())),
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
