//! Frames that are neither IP nor ARP.

use netattach_tests::other_programs::attach_tcx;
use netattach_tests::raw::RawSocket;
use netattach_tests::{Namespace, tools::report_skipped};

use super::*;

/// An experimental protocol (IEEE 802, local experimental ethertypes).
const EXPERIMENT: u16 = 0x88b5;
/// Spanning tree by LLC, with the length in place of the ethertype.
const BPDU: [u8; 46] = {
    let mut bytes = [0; 46];
    (bytes[0], bytes[1], bytes[2]) = (0x42, 0x42, 3);
    bytes
};

fn with_ethertypes(rig: &Rig, ethertypes: &[u16]) {
    let flags = Checks { source_mac: true, source_address: true, ..Checks::default() };
    let ethertypes = ethertypes.to_vec();
    rig.dataplane.attachments().put(POD, &Attachment { flags, ethertypes, ..bare() }).unwrap();
}

/// Rows: C80.
#[test]
fn isolation_ends_what_no_rule_can_name_in_its_direction() {
    let rig = Rig::new();
    let frames = [EXPERIMENT, 0x88b6, 0x22f0, 0x8035, 0x88e5, 46].map(other_ethertype);
    let of = |side| frames.each_ref().map(|frame| rig.run(side, frame));
    let dropped = [Err(DropReason::Ethertype); 6];
    let allow = allow_all();
    for (ingress, egress) in [(false, false), (true, false), (false, true), (true, true)] {
        rig.enforce(ingress.then_some(&allow), egress.then_some(&allow));
        assert_eq!(
            of(FromPod),
            if egress { dropped } else { [Ok(()); 6] },
            "from the pod, {ingress} {egress}"
        );
        assert_eq!(of(ToPod), if ingress { dropped } else { [Ok(()); 6] }, "to the pod, {ingress} {egress}");
    }
    assert_eq!(rig.run(FromPod, &arp_request(POD_MAC, POD_V4, PEER_V4)), Ok(()));
}

#[test]
fn no_pod_speaks_as_a_bridge_or_a_switch() {
    let rig = Rig::new();
    let to = |last: [u8; 6], ethertype, payload: &[u8]| any_frame(Mac(last), POD_MAC, ethertype, payload);
    let (standard, cisco) = (|last| [1, 0x80, 0xc2, 0, 0, last], |last| [1, 0, 0x0c, 0xcc, 0xcc, last]);
    let frames = [
        ("spanning tree", to(standard(0), 38, &BPDU)),
        ("spanning tree to one", to(PEER_MAC.0, 38, &BPDU)),
        ("a provider's spanning tree", to(standard(8), 38, &BPDU)),
        ("Cisco's spanning tree of a VLAN", to(cisco(0xcd), 50, &[0xaa; 46])),
        ("CDP", to(cisco(0xcc), 50, &[0xaa; 46])),
        ("registration of VLANs", to(standard(0x21), 38, &BPDU)),
        ("pause", to(standard(1), 0x8808, &[0; 46])),
        ("LACP", to(standard(2), 0x8809, &[0; 46])),
        ("802.1X", to(PEER_MAC.0, 0x888e, &[0; 46])),
        ("LLDP", to(standard(0xe), 0x88cc, &[0; 46])),
    ];
    for (what, frame) in &frames {
        assert_eq!(rig.run(FromPod, frame), Err(DropReason::LinkProtocol), "{what}");
        assert_eq!(rig.run(ToPod, frame), Ok(()), "{what}: others may");
    }
    assert_eq!(rig.run(FromPod, &to(PEER_MAC.0, 38, &[])), Err(DropReason::Malformed), "no LLC header");
    rig.put(Checks::default());
    for (what, frame) in &frames {
        assert_eq!(rig.run(FromPod, frame), Ok(()), "{what}: unchecked");
    }
}

#[test]
fn a_network_lets_ethertypes_pass_that_it_names() {
    let rig = Rig::isolated(Some(&deny_all()), Some(&deny_all()));
    with_ethertypes(&rig, &[0x88cc, 1, 2, EXPERIMENT]);
    for (ethertype, expected) in [
        (EXPERIMENT, Ok(())),
        (0x88cc, Ok(())),
        (0x88b6, Err(DropReason::Ethertype)),
        (0, Err(DropReason::Ethertype)),
    ] {
        assert_eq!(rig.run(FromPod, &other_ethertype(ethertype)), expected, "{ethertype:#x}");
        assert_eq!(rig.run(ToPod, &other_ethertype(ethertype)), expected, "{ethertype:#x}");
    }
    assert_eq!(rig.run(FromPod, &other_ethertype(0x8809)), Err(DropReason::LinkProtocol));
    with_ethertypes(&rig, &[]);
    assert_eq!(rig.run(FromPod, &other_ethertype(EXPERIMENT)), Err(DropReason::Ethertype), "taken away");
}

/// The payload of such frames has addresses, which no program checks.
#[test]
fn carriers_of_packets_pass_where_a_network_names_them_or_addresses_are_not_checked() {
    let rig = Rig::new();
    let snap = |last: u8, ethertype: u16| {
        let [high, low] = ethertype.to_be_bytes();
        let payload = [&[0xaa, 0xaa, 3, 0, 0, last, high, low][..], &[0x45; 38]].concat();
        any_frame(PEER_MAC, POD_MAC, 46, &payload)
    };
    const CARRIERS: [u16; 4] = [0x8847, 0x8848, 0x8863, 0x8864];
    let carriers = CARRIERS.map(other_ethertype);
    let in_snap = [(0, 0x0800), (0, 0x0806), (0, 0x86dd), (0xf8, 0x0800), (0, 0x8100), (0, 0x8847)]
        .map(|(last, ethertype)| snap(last, ethertype));
    let neither = [snap(0x0c, 0x0800), snap(0, 0x809b), any_frame(PEER_MAC, POD_MAC, 3, &[0xaa, 0xaa, 3])];
    let all = |side, frames: &[Vec<u8>], expected: Outcome, why: &str| {
        for frame in frames {
            assert_eq!(rig.run(side, frame), expected, "{why}: {:02x?}", &frame[12..]);
        }
    };
    let dropped = Err(DropReason::Ethertype);
    all(FromPod, &carriers, dropped, "from a pod");
    all(FromPod, &in_snap, dropped, "from a pod");
    let mut asking = snap(0, 0x0800);
    asking[14 + 2] = 0x13;
    all(FromPod, &[asking], dropped, "asks for an answer");
    all(FromPod, &neither, Ok(()), "no carrier");
    all(ToPod, &carriers, Ok(()), "from others");
    all(ToPod, &in_snap, Ok(()), "from others");

    with_ethertypes(&rig, &CARRIERS);
    all(FromPod, &carriers, Ok(()), "named");
    all(FromPod, &in_snap, dropped, "a length has no name");

    rig.put(Checks { source_mac: true, ..Checks::default() });
    all(FromPod, &carriers, Ok(()), "sourceCheck mac");
    all(FromPod, &in_snap, Ok(()), "sourceCheck mac");
}

/// A frame with the right protocol is not dropped where a socket has to name the protocol of its frame. Naming
/// another one needs a socket: for a frame that is passed to a program, the kernel reads the protocol from the frame.
#[test]
fn no_frame_is_lost_where_its_protocol_has_to_be_its_ethertype() {
    let rig = Rig::new();
    let frames = [EXPERIMENT, 0x88b6, 0x22f0, 0x88e5, 46, 1500].map(other_ethertype);
    let frames = frames.into_iter().chain([
        Packet::between(POD_V4, PEER_V4).udp(1000, 7).frame(),
        Packet::between(POD_V6, PEER_V6).udp(1000, 7).frame(),
        arp_request(POD_MAC, POD_V4, PEER_V4),
    ]);
    rig.put(Checks { source_mac: true, source_address: true, one_protocol: true, ..Checks::default() });
    for frame in frames {
        for side in [FromPod, ToPod] {
            assert_eq!(rig.run(side, &frame), Ok(()), "{side:?} {:02x?}", &frame[..14]);
        }
    }
    let tagged = Packet::between(POD_V4, PEER_V4).tagged(5).udp(1000, 7).frame();
    assert_eq!(rig.run(FromPod, &tagged), Err(DropReason::VlanTagged));
}

/// A packet that has passed before, by a flow or without any policy, does not pass under another protocol either.
#[test]
fn a_packet_of_a_flow_passes_by_the_name_of_its_own_protocol_alone() {
    if !netattach::bpf::probe::has_tcx(DEVICE).unwrap() {
        return report_skipped("a packet by another name", "this kernel has no tcx links");
    }
    const IPV4: u16 = libc::ETH_P_IP as u16;
    const IPV6: u16 = libc::ETH_P_IPV6 as u16;
    const ARP: u16 = libc::ETH_P_ARP as u16;
    const VLAN: u16 = libc::ETH_P_8021Q as u16;
    let rig = Rig::new();
    rig.put(Checks { source_mac: true, source_address: true, one_protocol: true, ..Checks::default() });
    // At the egress of a device the protocol is still the one that the socket has named.
    let namespace = Namespace::new().unwrap();
    namespace.loopback_up().unwrap();
    let program = sys::open_pin(&rig.pin("prog/na_from_pod")).unwrap();
    let _link = attach_tcx(&namespace, DEVICE, false, &program).unwrap();
    // Returns how many have passed, and how many were dropped as malformed.
    let sent = |named, frame: &[u8]| {
        let look = || rig.dataplane.stats(POD).unwrap();
        let before = look();
        RawSocket::queued_as(&namespace, "lo", named).unwrap().send(frame).unwrap();
        let (after, reason) = (look(), DropReason::Malformed as usize);
        (after.from_pod.packets - before.from_pod.packets, after.drops[reason] - before.drops[reason])
    };
    let (there4, back4) = (from_pod(), to_pod());
    let (there6, back6) = (from_pod6(), Packet::between(PEER_V6, POD_V6));
    let allow = allow_all();
    for egress in [None, Some(&allow)] {
        rig.enforce(None, egress);
        for (there, back, own, others) in [
            (&there4, &back4, IPV4, [IPV6, ARP, VLAN, EXPERIMENT]),
            (&there6, &back6, IPV6, [IPV4, ARP, VLAN, EXPERIMENT]),
        ] {
            assert_eq!(rig.run(FromPod, &there.clone().tcp(2000, 80, SYN).frame()), Ok(()));
            assert_eq!(rig.run(ToPod, &back.clone().tcp(80, 2000, SYN | ACK).frame()), Ok(()));
            for frame in [there.clone().tcp(2000, 80, ACK).frame(), there.clone().udp(1000, 7).frame()] {
                assert_eq!(sent(own, &frame), (1, 0), "{own:#x}");
                for named in others {
                    assert_eq!(sent(named, &frame), (0, 1), "{own:#x} as {named:#x}");
                }
                assert_eq!(sent(own, &frame), (1, 0), "{own:#x}");
            }
        }
    }
}
