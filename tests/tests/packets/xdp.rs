//! Early drops by the program in an uplink's driver.

use netattach::bpf::{Place, Segment, Uplink, XdpDrops};
use netattach_common::attachment::link_local;
use netattach_tests::other_programs::run_xdp;

use super::fast::{BRIDGE, FastRig, PEER};
use super::*;

const XDP_DROP: u32 = 1;
const XDP_PASS: u32 = 2;
/// A station behind the uplink.
const OUTSIDE: Mac = Mac([2, 0, 0, 0, 0, 0x77]);

struct XdpRig(FastRig);

impl XdpRig {
    /// The loopback device is an uplink that leads to the peer.
    fn new(leads_to: Segment, xdp: Option<XdpDrops>) -> Self {
        let mut rig = FastRig::new();
        rig.rig.dataplane.attachments().unbind(DEVICE).unwrap();
        rig.fast.put(PEER, Place { segment: leads_to, mtu: 1500, mac: PEER_MAC }).unwrap();
        let mac = Mac([0; 6]);
        let uplink = Uplink { leads_to: Some(leads_to), fast: true, xdp, gateway: false, mtu: 1500, mac };
        rig.fast.set_uplinks([(DEVICE, uplink)].into()).unwrap();
        let by_mac = IpAddr::V6(link_local(netattach_common::Mac { octets: PEER_MAC.0 }).into());
        let addresses = [PEER_V4.parse().unwrap(), PEER_V6.parse().unwrap(), by_mac];
        rig.fast.set_locals(addresses.map(|address| ((leads_to, address), PEER)).into()).unwrap();
        Self(rig)
    }

    /// On the peer's bridge; one host may reach the peer by UDP on port 80.
    fn isolated() -> Self {
        let rig = Self::new(Segment::Bridge(BRIDGE), Some(XdpDrops::SpoofedAndDenied));
        let from_one = policy(&[("10.0.0.9/32", 1), ("fd00::9/128", 1)], &[(1, port(17, 80))]);
        let ingress = rig.0.rig.install(&from_one);
        rig.0.rig.dataplane.policies().set(PEER, PolicyIds { ingress, egress: 0 }).unwrap();
        rig
    }

    /// Why a frame is dropped, with exactly that counted; `None`: it passes, and no drop is counted.
    fn receive(&self, packet: &Packet) -> Option<DropReason> {
        self.receive_frame(&packet.frame())
    }

    fn receive_frame(&self, frame: &[u8]) -> Option<DropReason> {
        let before = self.0.rig.dataplane.stats(PEER).unwrap();
        let verdict = run_xdp(&self.0.rig.pin("prog/na_xdp"), frame).unwrap();
        let after = self.0.rig.dataplane.stats(PEER).unwrap();
        let grew = |reason: &&DropReason| after.drops[**reason as usize] > before.drops[**reason as usize];
        let reason = DropReason::ALL.iter().find(grew).copied();
        let mut expected = before;
        if let Some(reason) = reason {
            expected.drops[reason as usize] += 1;
            expected.dropped_to_pod.packets += 1;
            expected.dropped_to_pod.bytes += frame.len() as u64;
        }
        assert_eq!(after, expected);
        assert_eq!(verdict, if reason.is_some() { XDP_DROP } else { XDP_PASS });
        reason
    }
}

fn outside() -> Packet {
    Packet::between("10.0.0.9", PEER_V4).from_mac(OUTSIDE)
}

fn outside6() -> Packet {
    Packet::between("fd00::9", PEER_V6).from_mac(OUTSIDE)
}

#[test]
fn what_claims_to_be_an_attachment_is_dropped() {
    let rig = XdpRig::new(Segment::Bridge(BRIDGE), Some(XdpDrops::Spoofed));
    let link_local = link_local(netattach_common::Mac { octets: PEER_MAC.0 });
    for packet in [
        outside().from_mac(PEER_MAC).udp(1, 2),
        Packet::between(PEER_V4, "10.0.0.1").from_mac(OUTSIDE).udp(1, 2),
        Packet::between(PEER_V4, "10.0.0.1").from_mac(OUTSIDE).udp(1, 2).fragment(3, false),
        Packet::between(PEER_V6, "fd00::1").from_mac(OUTSIDE).tcp(1, 2, tcp::ACK),
        Packet::between(&std::net::Ipv6Addr::from(link_local).to_string(), "fd00::1")
            .from_mac(OUTSIDE)
            .ping(1),
    ] {
        assert_eq!(rig.receive(&packet), Some(DropReason::WireSource), "{packet:?}");
    }
    for packet in [outside().udp(1, 2), outside6().udp(1, 2), outside().tagged(5).udp(1, 2)] {
        assert_eq!(rig.receive(&packet), None, "{packet:?}");
    }
    // Tags with a priority alone are none for the pod's program.
    for spoofed in [Packet::between(PEER_V4, "10.0.0.1"), Packet::between(PEER_V6, "fd00::1")] {
        let tagged = |tags: &[u16]| {
            let packet =
                tags.iter().fold(spoofed.clone().from_mac(OUTSIDE), |packet, tag| packet.tagged(*tag));
            rig.receive(&packet.udp(1, 2))
        };
        for tags in [&[0][..], &[0xc000], &[0xc000, 0]] {
            assert_eq!(tagged(tags), Some(DropReason::WireSource), "{spoofed:?} {tags:?}");
        }
        for tags in [&[5][..], &[0, 5], &[5, 0], &[5, 0, 0]] {
            assert_eq!(tagged(tags), None, "{spoofed:?} {tags:?}");
        }
    }
    assert_eq!(rig.receive(&outside().tagged(0).udp(1, 2)), None);
    // Address ownership is not for a filter to decide.
    assert_eq!(rig.receive_frame(&arp_request(OUTSIDE, PEER_V4, "10.0.0.1")), None);
    assert_eq!(rig.receive_frame(&other_ethertype(0x88cc)), None);
    assert_eq!(rig.receive_frame(&outside().udp(1, 2).frame()[..20]), None);
}

/// A bridge that filters by VLAN takes the first tag for its own, and the pod's program takes the two others for none.
#[test]
fn more_tags_without_an_id_than_are_read_let_nothing_pass() {
    for leads_to in [Segment::Bridge(BRIDGE), Segment::Routed] {
        let rig = XdpRig::new(leads_to, Some(XdpDrops::Spoofed));
        for packet in [Packet::between(PEER_V4, "10.0.0.1"), Packet::between(PEER_V6, "fd00::1"), outside()] {
            for tags in [&[0, 0, 0][..], &[0xc000, 0, 0xc000], &[0, 0, 5], &[0, 0, 0, 0, 5]] {
                let tagged = |packet: Packet, tag: &u16| packet.tagged(*tag);
                let frame = tags.iter().fold(packet.clone().from_mac(OUTSIDE), tagged).udp(1, 2).frame();
                assert_eq!(rig.receive_frame(&frame), Some(DropReason::Malformed), "{packet:?} {tags:?}");
                // To nobody of the node it is dropped all the same, and counted for no attachment.
                let to_all = [&[0xff; 6][..], &frame[6..]].concat();
                let before = rig.0.rig.dataplane.stats(PEER).unwrap();
                assert_eq!(run_xdp(&rig.0.rig.pin("prog/na_xdp"), &to_all).unwrap(), XDP_DROP, "{tags:?}");
                assert_eq!(rig.0.rig.dataplane.stats(PEER).unwrap(), before);
            }
        }
    }
}

/// The next holder of its address is another attachment, and until then there is none.
#[test]
fn an_attachment_that_goes_has_no_address_that_uplinks_know() {
    for (segment, drops) in
        [(Segment::Bridge(BRIDGE), XdpDrops::SpoofedAndDenied), (Segment::Routed, XdpDrops::Spoofed)]
    {
        let mut rig = XdpRig::new(segment, Some(drops));
        let spoofed = Packet::between(PEER_V4, "10.0.0.1").from_mac(OUTSIDE).udp(1, 2);
        assert_eq!(rig.receive(&spoofed), Some(DropReason::WireSource));
        rig.0.fast.forget(PEER).unwrap();
        assert_eq!(rig.receive(&spoofed), None);
    }
}

#[test]
fn what_can_only_be_refused_is_dropped_and_everything_else_left_to_the_pods_program() {
    let rig = XdpRig::isolated();
    let stranger = || Packet::between("10.0.0.8", PEER_V4).from_mac(OUTSIDE);
    for (packet, expected) in [
        (outside().udp(1, 80), None),
        (outside().udp(1, 81), Some(DropReason::IngressPort)),
        (outside().tcp(1, 80, tcp::SYN), Some(DropReason::IngressPort)),
        (stranger().udp(1, 80), Some(DropReason::IngressPeer)),
        (outside6().udp(1, 80), None),
        (outside6().tcp(1, 80, tcp::SYN), Some(DropReason::IngressPort)),
        // It may belong to a connection that is older than the flow table.
        (stranger().tcp(1, 80, tcp::ACK), None),
        (stranger().tcp(1, 80, tcp::SYN | tcp::ACK), None),
        (stranger().ping(1), None),
        (stranger().sctp(1, 80, 1), None),
        (stranger().udp(1, 80).fragment(0, true), None),
        (stranger().udp(1, 80).options(&[1, 1, 1, 0]), None),
        (outside6().extension(60, &[0, 1, 4, 0, 0, 0, 0]).udp(1, 81), None),
        (stranger().tagged(5).udp(1, 80), None),
    ] {
        assert_eq!(rig.receive(&packet), expected, "{packet:?}");
    }
    let mut to_another = stranger().udp(1, 80).frame();
    to_another[..6].copy_from_slice(&[2, 0, 0, 0, 0, 0x55]);
    assert_eq!(rig.receive_frame(&to_another), None);
}

#[test]
fn an_answer_passes_while_its_flow_is_remembered() {
    let rig = XdpRig::isolated();
    let answer = Packet::between("10.0.0.8", PEER_V4).from_mac(OUTSIDE).udp(53, 999);
    assert_eq!(rig.receive(&answer), Some(DropReason::IngressPeer));
    let dataplane = &rig.0.rig.dataplane;
    dataplane.attachments().bind(DEVICE, PEER).unwrap();
    let question = Packet::between(PEER_V4, "10.0.0.8").from_mac(PEER_MAC).udp(999, 53);
    rig.0.rig.test_run(FromPod, &question.frame(), 1);
    dataplane.attachments().unbind(DEVICE).unwrap();
    assert_eq!(rig.receive(&answer), None);
}

#[test]
fn without_a_policy_in_force_or_off_the_bridge_nothing_is_refused() {
    let rig = XdpRig::isolated();
    let refused = outside().udp(1, 81);
    let pending = Checks { pending: true, ..Checks::default() };
    rig.0.put_peer(Attachment { mac: PEER_MAC, flags: pending, ..bare() });
    assert_eq!(rig.receive(&refused), None);
    rig.0.put_peer(Attachment { mac: PEER_MAC, ..bare() });
    assert_eq!(rig.receive(&refused), Some(DropReason::IngressPort));
    rig.0.rig.dataplane.policies().set(PEER, PolicyIds::default()).unwrap();
    assert_eq!(rig.receive(&refused), None);

    let spoofed = Packet::between(PEER_V4, "10.0.0.1").from_mac(OUTSIDE).udp(1, 2);
    let routed = XdpRig::new(Segment::Routed, Some(XdpDrops::Spoofed));
    assert_eq!(routed.receive(&spoofed), Some(DropReason::WireSource));
    assert_eq!(routed.receive(&refused), None);
    let none = XdpRig::new(Segment::Bridge(BRIDGE), None);
    assert_eq!(none.receive(&spoofed), None);
}
