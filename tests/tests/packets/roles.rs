//! Messages that a host has no reason to send: protocols among routers, and DHCPv6 of servers and relays.

use super::*;

const PADDING: [u8; 7] = [0, 1, 4, 0, 0, 0, 0];

/// Packets of protocols by which routers agree on routes, and on the holder of an address.
fn among_routers() -> Vec<(&'static str, Packet)> {
    let four = |group| Packet::between(POD_V4, group).hop_limit(255);
    let six = |group| Packet::between(POD_V6, group).hop_limit(255);
    let message = [0x31; 24];
    vec![
        ("VRRP", four("224.0.0.18").payload(112, &message)),
        ("VRRP to one", four(PEER_V4).payload(112, &message)),
        ("VRRP with options", four("224.0.0.18").options(&[1, 1, 1, 0]).payload(112, &message)),
        ("a later fragment of VRRP", four("224.0.0.18").fragment(2, false).payload(112, &message)),
        ("OSPF", four("224.0.0.5").payload(89, &message)),
        ("OSPF to one", four(PEER_V4).payload(89, &message)),
        ("EIGRP", four("224.0.0.10").payload(88, &message)),
        ("PIM", four("224.0.0.13").payload(103, &message)),
        ("HSRP", four("224.0.0.2").udp(1985, 1985)),
        ("GLBP", four("224.0.0.102").udp(3222, 3222)),
        ("VRRP, IPv6", six("ff02::12").payload(112, &message)),
        ("VRRP behind an extension header", six("ff02::12").extension(60, &PADDING).payload(112, &message)),
        ("OSPF, IPv6", six("ff02::5").payload(89, &message)),
        ("EIGRP, IPv6", six("ff02::a").payload(88, &message)),
        ("PIM, IPv6", six("ff02::d").payload(103, &message)),
        ("HSRP, IPv6", six("ff02::66").udp(2029, 2029)),
        ("GLBP, IPv6", six("ff02::66").udp(3222, 3222)),
    ]
}

#[test]
fn only_a_pod_with_virtual_addresses_or_a_router_speaks_to_routers() {
    let rig = Rig::new();
    let packets = among_routers();
    let all = |side, expected: Outcome, why: &str| {
        for (what, packet) in &packets {
            assert_eq!(rig.run(side, &packet.frame()), expected, "{what}: {why}");
        }
    };
    all(FromPod, Err(DropReason::RouterMessage), "a host");
    // For a host these are ordinary ports, which clients may use.
    for port in [1985, 2029, 3222] {
        assert_eq!(rig.run(FromPod, &from_pod().udp(53, port).frame()), Ok(()), "{port}");
        assert_eq!(rig.run(FromPod, &from_pod6().udp(53, port).frame()), Ok(()), "{port}");
    }
    let group = Packet::between(POD_V4, "224.0.0.251").udp(5353, 5353);
    assert_eq!(rig.run(FromPod, &group.frame()), Ok(()), "another port of a group");
    all(ToPod, Ok(()), "what others send is theirs to say");

    let flags = Checks { source_mac: true, source_address: true, ..Checks::default() };
    let addresses = vec![POD_V4.parse().unwrap(), POD_V6.parse().unwrap()];
    let shared = vec!["10.0.0.100".parse().unwrap()];
    let virtual_addresses = Attachment { addresses, shared, flags, ..bare() };
    rig.dataplane.attachments().put(POD, &virtual_addresses).unwrap();
    all(FromPod, Ok(()), "allowedAddresses");
    rig.put(Checks { source_mac: true, ..Checks::default() });
    all(FromPod, Ok(()), "sourceCheck mac");
    rig.put(Checks::default());
    all(FromPod, Ok(()), "sourceCheck off");
}

/// Rows: SRC-dhcp.
#[test]
fn a_pod_speaks_to_servers_of_dhcpv6_as_a_client_alone() {
    let rig = Rig::new();
    // From the port of clients to that of servers.
    let datagram = |message: &[u8]| [&[2, 34, 2, 35, 0, 12, 0, 0][..], message].concat();
    let to_all = || Packet::between("fe80::ff:fe00:1", "ff02::1:2");
    for message in [1, 3, 4, 5, 6, 8, 9, 11, 20, 36, 0, 2, 7, 10, 12, 13, 14, 21, 37, 255] {
        let of_client = [1, 3, 4, 5, 6, 8, 9, 11, 20, 36].contains(&message);
        let expected = if of_client { Ok(()) } else { Err(DropReason::DhcpServer) };
        let payload = datagram(&[message, 0, 0, 1]);
        let behind = from_pod6().extension(60, &PADDING);
        let first = from_pod6().fragment(0, true);
        for packet in [from_pod6(), to_all(), behind, first] {
            assert_eq!(rig.run(FromPod, &packet.payload(17, &payload).frame()), expected, "{message}");
        }
        assert_eq!(rig.run(ToPod, &to_pod6().payload(17, &payload).frame()), Ok(()), "{message} of others");
    }
    let empty = || from_pod6().payload(17, &datagram(&[]));
    assert_eq!(rig.run(FromPod, &empty().frame()), Ok(()), "no message");
    let beyond = [empty().frame(), vec![12]].concat();
    assert_eq!(rig.run(FromPod, &beyond), Err(DropReason::Malformed), "a message behind the packet");
    let cut = empty().fragment(0, true).frame();
    assert_eq!(rig.run(FromPod, &cut), Err(DropReason::Malformed), "a message in another fragment");

    let relayed = from_pod6().payload(17, &datagram(&[12, 0, 0, 0])).frame();
    rig.put(Checks { source_mac: true, ..Checks::default() });
    assert_eq!(rig.run(FromPod, &relayed), Err(DropReason::DhcpServer), "sourceCheck mac");
    rig.put(Checks::default());
    assert_eq!(rig.run(FromPod, &relayed), Ok(()), "sourceCheck off");
}
