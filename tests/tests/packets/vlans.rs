//! VLAN tags.

use super::*;

fn with_vlans(rig: &Rig, vlans: &[u16]) {
    let flags = Checks { source_mac: true, source_address: true, ..Checks::default() };
    let addresses = vec![POD_V4.parse().unwrap(), POD_V6.parse().unwrap()];
    let attachment = Attachment { addresses, flags, vlans: vlans.iter().copied().collect(), ..bare() };
    rig.dataplane.attachments().put(POD, &attachment).unwrap();
}

#[test]
fn every_tag_of_a_frame_must_be_allowed() {
    let rig = Rig::new();
    with_vlans(&rig, &[5, 6]);
    let tagged = Err(DropReason::VlanTagged);
    for out in [from_pod(), from_pod6()] {
        let frame =
            |tags: &[u16]| tags.iter().fold(out.clone(), |packet, tag| packet.tagged(*tag)).udp(1, 2).frame();
        let cases: [(&[u16], Outcome); 11] = [
            (&[], Ok(())),
            (&[5], Ok(())),
            (&[6], Ok(())),
            (&[0xe005], Ok(())),
            (&[7], tagged),
            (&[0xc000], Ok(())),
            (&[0, 5], Ok(())),
            (&[0, 7], tagged),
            (&[5, 6], Ok(())),
            (&[5, 7], tagged),
            (&[5, 6, 5], tagged),
        ];
        for (tags, expected) in cases {
            assert_eq!(rig.run(FromPod, &frame(tags)), expected, "{tags:?}");
        }
    }
    with_vlans(&rig, &[6]);
    assert_eq!(rig.run(FromPod, &from_pod().tagged(5).udp(1, 2).frame()), tagged, "taken away");
    let successor = Dataplane::open(&config(&rig.root)).unwrap();
    successor.remove_attachment(POD).unwrap();
    assert_eq!(rig.run_as(0, FromPod, &from_pod().tagged(6).udp(1, 2).frame()), Err(DropReason::Unbound));
}

#[test]
fn senders_and_policies_are_checked_behind_tags() {
    let rig = Rig::isolated(Some(&web_from_peer()), None);
    with_vlans(&rig, &[5, 6]);
    let cases = [
        (FromPod, Packet::between("10.0.0.9", PEER_V4).tagged(5).udp(1, 2), Err(DropReason::SourceIpv4)),
        (
            FromPod,
            Packet::between("fd00::9", PEER_V6).tagged(5).tagged(6).udp(1, 2),
            Err(DropReason::SourceIpv6),
        ),
        (
            FromPod,
            from_pod().options(&[137, 7, 4, 10, 0, 0, 9, 0]).tagged(5).udp(1, 2),
            Err(DropReason::SourceRoute),
        ),
        (ToPod, to_pod().tagged(5).tcp(1, 80, SYN), Ok(())),
        (ToPod, to_pod().tagged(5).tcp(1, 81, SYN), Err(DropReason::IngressPort)),
        (ToPod, to_pod6().tagged(5).tagged(6).tcp(1, 80, SYN), Ok(())),
        (ToPod, to_pod6().tagged(5).tagged(6).tcp(1, 81, SYN), Err(DropReason::IngressPort)),
        (ToPod, to_pod().tagged(7).tcp(1, 80, SYN), Err(DropReason::VlanTagged)),
    ];
    for (hook, packet, expected) in cases {
        assert_eq!(rig.run(hook, &packet.frame()), expected, "{packet:?}");
    }
}

#[test]
fn the_same_addresses_in_another_vlan_are_another_flow() {
    let rig = Rig::isolated(Some(&deny_all()), None);
    with_vlans(&rig, &[5, 6]);
    assert_eq!(rig.run(FromPod, &from_pod().tagged(5).udp(1000, 53).frame()), Ok(()));
    assert_eq!(rig.run(ToPod, &to_pod().tagged(5).udp(53, 1000).frame()), Ok(()));
    // A tag with a priority alone is of no VLAN.
    assert_eq!(rig.run(FromPod, &from_pod().tagged(0).tagged(5).udp(1001, 53).frame()), Ok(()));
    assert_eq!(rig.run(ToPod, &to_pod().tagged(5).udp(53, 1001).frame()), Ok(()));
    for other in [to_pod(), to_pod().tagged(6), to_pod().tagged(5).tagged(6)] {
        assert_eq!(rig.run(ToPod, &other.udp(53, 1000).frame()), Err(DropReason::IngressPeer));
    }
}

/// A tag with a priority and no id (802.1Q): industrial protocols send such frames, and some switches.
#[test]
fn a_frame_with_a_priority_alone_is_one_without_a_tag() {
    const PRIORITY: u16 = 6 << 13;
    let rig = Rig::isolated(Some(&web_from_peer()), None);
    rig.put(Checks { source_mac: true, source_address: true, ..Checks::default() });
    let spoofed = Packet::between("10.0.0.9", PEER_V4);
    for (hook, packet, expected) in [
        (FromPod, from_pod().tagged(PRIORITY).udp(1000, 53), Ok(())),
        // The answer belongs to the flow, with the tag and without.
        (ToPod, to_pod().udp(53, 1000), Ok(())),
        (ToPod, to_pod().tagged(PRIORITY).udp(53, 1000), Ok(())),
        (ToPod, to_pod().tagged(PRIORITY).tcp(1, 80, SYN), Ok(())),
        (ToPod, to_pod6().tagged(PRIORITY).tcp(1, 81, SYN), Err(DropReason::IngressPort)),
        (FromPod, spoofed.tagged(PRIORITY).udp(1, 2), Err(DropReason::SourceIpv4)),
    ] {
        assert_eq!(rig.run(hook, &packet.frame()), expected, "{packet:?}");
    }
}
