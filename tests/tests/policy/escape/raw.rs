//! Frames that bypass the pod's queueing discipline.

use super::*;

/// Rows: C88.
#[test]
fn raw_frames_past_the_queueing_discipline_are_judged_like_all_others() {
    let scene = Scene::new();
    for link in &scene.links() {
        let towards = |packet: Packet| link.towards_the_victim(packet.frame());
        let spoofed4 = format!("{}7", link.v4[0]);
        let spoofed6 = format!("{}7", link.v6[0]);
        let padding = [0, 1, 4, 0, 0, 0, 0];
        let nine = (0..9).fold(link.v6(), |packet, _| packet.extension(60, &padding));
        let mut service_tagged = towards(link.v4().tagged(5).tagged(6).udp(1010, ALLOWED));
        service_tagged[12..14].copy_from_slice(&(libc::ETH_P_8021AD as u16).to_be_bytes());
        // For addresses that end in ::3.
        let solicited = "ff02::1:ff00:3";
        let behind_a_router = "2001:db8::9";
        let hidden = [&[5, 30][..], &[0x5a; 238]].concat();
        let solicit = |from: &str, to: &str, target: &str, behind: &[u8]| {
            let target: std::net::Ipv6Addr = target.parse().unwrap();
            let message = [&[0; 4], &target.octets()[..], behind].concat();
            towards(Packet::between(from, to).from_mac(link.own).hop_limit(255).icmp(135, &message))
        };
        let mut probe = link.arp(link.own, "0.0.0.0");
        probe[38..42].copy_from_slice(&link.v4[1].parse::<std::net::Ipv4Addr>().unwrap().octets());
        let mut endless =
            towards(link.v6().extension(0, &padding).neighbour(135, link.v6[1], &[(1, STRANGER)]));
        endless[18..20].copy_from_slice(&[0, 0]);
        let listener = |kind| {
            let router_alert = [0, 5, 2, 0, 0, 1, 0];
            towards(link.v6().hop_limit(1).extension(0, &router_alert).icmp(kind, &[0x31; 20]))
        };
        let to_routers = Packet::between(link.v6[0], "ff02::16").from_mac(link.own).hop_limit(1);
        let report_of_anything = towards(to_routers.icmp(143, &[0x32; 1000]));
        let other = |to, ethertype, byte: u8| any_frame(to, link.own, ethertype, &[byte; 46]);
        let all_bridges = Mac([1, 0x80, 0xc2, 0, 0, 0]);
        let rapid_spanning_tree = Mac([1, 0, 0x0c, 0xcc, 0xcc, 0xcd]);
        let frames = [
            ("an ethertype for experiments", other(link.next, 0x88b5, 0x71), "ethertype"),
            ("MPLS", other(link.next, 0x8847, 0x72), "ethertype"),
            ("PPPoE", other(link.next, 0x8863, 0x73), "ethertype"),
            ("MACsec", other(link.next, 0x88e5, 0x74), "ethertype"),
            ("reverse ARP", other(Mac([0xff; 6]), 0x8035, 0x75), "ethertype"),
            ("a frame of 802.2", other(link.next, 46, 0xaa), "ethertype"),
            ("spanning tree", other(all_bridges, 46, 0x42), "link-protocol"),
            ("spanning tree to one", other(link.next, 46, 0x42), "link-protocol"),
            ("a VLAN's spanning tree", other(rapid_spanning_tree, 46, 0xab), "link-protocol"),
            ("LACP", other(Mac([1, 0x80, 0xc2, 0, 0, 2]), 0x8809, 0x76), "link-protocol"),
            ("LLDP", other(link.next, 0x88cc, 0x77), "link-protocol"),
            ("802.1X", other(link.next, 0x888e, 0x78), "link-protocol"),
            ("a pause", other(Mac([1, 0x80, 0xc2, 0, 0, 1]), 0x8808, 0x79), "link-protocol"),
            (
                "a solicitation of a routed address",
                solicit(link.v6[0], behind_a_router, behind_a_router, &hidden),
                "egress-port",
            ),
            (
                "a solicitation with something hidden",
                solicit(link.v6[0], link.v6[1], link.v6[1], &hidden),
                "egress-port",
            ),
            ("another's duplicate detection", solicit("::", solicited, link.v6[1], &[]), "nd-target"),
            ("an ARP probe for another", probe, "arp-sender-ip"),
            ("a solicitation of no length", endless, "malformed"),
            ("a DHCP answer from another port", towards(link.v4().udp(1067, 68)), "dhcp-server"),
            ("a DHCPv6 answer from another port", towards(link.v6().udp(1068, 546)), "dhcp-server"),
            ("a multicast query", listener(130), "router-message"),
            ("a report to one", listener(131), "egress-port"),
            ("a report of anything", report_of_anything, "egress-port"),
            ("an IGMP query", towards(link.v4().hop_limit(1).payload(2, &[0x11; 12])), "router-message"),
            (
                "a router advertisement, IPv4",
                towards(link.v4().hop_limit(1).icmp(9, &[0x41; 12])),
                "router-message",
            ),
            ("a redirect, IPv4", towards(link.v4().icmp(5, &[0x42; 32])), "router-message"),
            (
                "segment routing",
                towards(link.v6().extension(43, &[0, 4, 1, 0, 0, 0, 0]).udp(1011, ALLOWED)),
                "source-route",
            ),
            ("a VLAN tag in a service VLAN tag", service_tagged, "vlan-tagged"),
            ("a denied port", towards(link.v4().udp(1001, DENIED)), "egress-port"),
            ("a denied port, IPv6", towards(link.v6().udp(1002, DENIED)), "egress-port"),
            ("another MAC", towards(link.v4().from_mac(STRANGER).udp(1003, ALLOWED)), link.strange),
            (
                "another IPv4",
                towards(Packet::between(&spoofed4, link.v4[1]).from_mac(link.own).udp(1004, ALLOWED)),
                "source-ipv4",
            ),
            (
                "another IPv6",
                towards(Packet::between(&spoofed6, link.v6[1]).from_mac(link.own).udp(1005, ALLOWED)),
                "source-ipv6",
            ),
            ("ARP for another address", link.arp(link.own, &spoofed4), "arp-sender-ip"),
            ("ARP with another MAC", link.arp(STRANGER, link.v4[0]), "arp-sender-mac"),
            (
                "an advertisement of another address",
                towards(link.v6().neighbour(136, &spoofed6, &[(2, link.own)])),
                "nd-target",
            ),
            (
                "an advertisement with another MAC",
                towards(link.v6().neighbour(136, link.v6[0], &[(2, STRANGER)])),
                "nd-link-layer",
            ),
            ("a VLAN tag", towards(link.v4().tagged(5).udp(1006, ALLOWED)), "vlan-tagged"),
            ("two VLAN tags", towards(link.v4().tagged(5).tagged(6).udp(1007, ALLOWED)), "vlan-tagged"),
            (
                "a first fragment without ports",
                towards(link.v4().fragment(0, true).payload(17, &[0x11; 4])),
                "frag-tiny",
            ),
            (
                "a fragment without its first",
                towards(link.v4().identification(77).fragment(9, false).payload(17, &[0x22; 16])),
                "frag-miss",
            ),
            (
                "a denied port behind an extension header",
                towards(link.v6().extension(60, &padding).udp(1008, DENIED)),
                "egress-port",
            ),
            ("nine extension headers", towards(nine.udp(1009, ALLOWED)), "extension-headers"),
        ];
        only_the_allowed_arrives(&scene, link, link.device, &frames, 2000);
    }
    let [port, _, lan] = &scene.links();
    let named = |link: &Link| any_frame(link.next, link.own, 0x88b6, &[0x7a; 46]);
    scene.blocked(port, "not named", &attackers_socket(&scene, port.device), &named(port), "ethertype");
    let victim = RawSocket::open_for(&scene.victim.namespace, lan.device, 0x88b6).unwrap();
    attackers_socket(&scene, lan.device).send(&named(lan)).unwrap();
    assert_eq!(
        victim.frames_until(&[0x7a; TAIL], PATIENCE).unwrap(),
        [named(lan)],
        "named by the definition"
    );
    scene.end();
}

/// The sum that a driver writes into a packet is a number of the sender's choice, at an offset of its choice.
///
/// Rows: C88.
#[test]
fn what_is_judged_of_a_packet_is_not_written_later() {
    let scene = Scene::new();
    for link in &scene.links() {
        let towards = |packet: Packet| link.towards_the_victim(packet.frame());
        let target: std::net::Ipv6Addr = link.v6[1].parse().unwrap();
        let message = [&[0; 4], &target.octets()[..], &[1, 1], &link.own.0].concat();
        let solicitation = towards(link.v6().hop_limit(255).icmp(135, &message));
        let socket = as_attacker(&scene, || RawSocket::leaving_sums(link.device));
        let (v4, v6) =
            (|port| towards(link.v4().udp(port, ALLOWED)), |port| towards(link.v6().udp(port, ALLOWED)));
        // A DHCP client's claims; and a tunnel, whose checksum its kernel leaves to the device.
        let asks = towards(link.v4().payload(17, &dhcp([1, 1, 6], link.v4[0], "0.0.0.0", link.own)));
        let tunnelled = [&[0x80_u8, 0, 8][..], &[0; 29]].concat();
        let (gre, gre6) =
            (towards(link.v4().payload(47, &tunnelled)), towards(link.v6().payload(47, &tunnelled)));
        // If no judged field is overwritten, the policy denies the packet.
        let (malformed, denied) = ("malformed", "egress-port");
        let table = [
            ("the port", v4(3001), (34, 2), malformed),
            ("half of the port", v4(3002), (34, 1), malformed),
            ("the own port", v4(3003), (34, 0), malformed),
            ("the destination", v4(3004), (20, 12), malformed),
            ("the source", v4(3005), (20, 8), malformed),
            ("the protocol", v4(3006), (20, 2), malformed),
            ("an ARP sender's address", link.arp(link.own, link.v4[0]), (20, 10), malformed),
            ("an ARP operation", link.arp(link.own, link.v4[0]), (20, 0), malformed),
            ("the port, IPv6", v6(3007), (54, 2), malformed),
            ("the destination, IPv6", v6(3008), (20, 32), malformed),
            ("a solicitation's target", solicitation.clone(), (54, 22), malformed),
            ("a solicitation's link-layer address", solicitation, (54, 30), malformed),
            (
                "behind an ethertype",
                any_frame(link.next, link.own, 0x88b5, &[0x71; 46]),
                (20, 0),
                "ethertype",
            ),
            ("a DHCP client's address", asks.clone(), (34, 20), malformed),
            ("a DHCP relay's address", asks.clone(), (34, 32), malformed),
            ("a DHCP client's Ethernet address", asks.clone(), (34, 36), malformed),
            ("its last bytes", asks.clone(), (34, 40), malformed),
            ("behind a DHCP client's Ethernet address", asks.clone(), (34, 42), denied),
            ("the sum of a message to DHCP servers", asks, (34, 6), denied),
            ("a tunnel's protocol", gre.clone(), (34, 2), malformed),
            ("a tunnel's sum", gre, (34, 4), denied),
            ("a tunnel's sum, IPv6", gre6, (54, 4), denied),
        ];
        for (what, frame, (start, offset), reason) in table {
            scene.blocked(link, what, &socket, &[&sum_at(start, offset)[..], &frame].concat(), reason);
        }
        let victim = Witness::of(&scene.victim, link);
        // The checksum of the transport itself, and that of its payload.
        let carrying =
            towards(link.v4().payload(17, &[&[0xb_u8, 0xc2, 0, 7, 0, 72, 0, 0][..], &[0x6e; 64]].concat()));
        for (frame, offset) in [(v4(3009), 6), (carrying, 40)] {
            socket.send(&[&sum_at(34, offset)[..], &frame].concat()).unwrap();
            let tail = &frame[frame.len() - TAIL..];
            let came = victim.frames_until(tail).iter().any(|seen| seen.ends_with(tail));
            assert!(came, "{}: a datagram without the sum at {offset} does not arrive", link.network);
        }
    }
    scene.end();
}
