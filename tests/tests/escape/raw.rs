//! Frames as no queueing discipline of the pod sees them.

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
        let frames = [
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
    scene.end();
}
