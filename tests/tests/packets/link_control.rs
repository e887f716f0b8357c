//! Link maintenance messages pass every policy, unless they do more than that.

use super::*;

/// A host that the pod reaches through a router.
const ROUTED: &str = "2001:db8::9";
/// The pod's link-local address, and a neighbour's.
const LINK_LOCAL: &str = "fe80::ff:fe00:1";
const NEIGHBOUR: &str = "fe80::2";
const PEER: Mac = Mac([2; 6]);

/// A neighbour discovery message with arbitrary bytes behind its options.
fn discovery(from: &str, to: &str, kind: u8, target: &str, behind: &[u8]) -> Packet {
    let target: std::net::Ipv6Addr = target.parse().unwrap();
    Packet::between(from, to).hop_limit(255).icmp(kind, &[&[0; 4], &target.octets()[..], behind].concat())
}

fn listener(from: &str, to: &str, kind: u8) -> Packet {
    Packet::between(from, to).hop_limit(1).extension(0, &[0, 5, 2, 0, 0, 1, 0]).icmp(kind, &[0; 20])
}

/// A version 2 report that claims that many records, with these bytes after its header.
fn report(to: &str, records: u8, behind: &[u8]) -> Vec<u8> {
    Packet::between(LINK_LOCAL, to).hop_limit(1).icmp(143, &[&[0, 0, 0, records], behind].concat()).frame()
}

/// A record of a version 2 report: "I listen to this group from now on", without sources.
fn record(group: &str) -> Vec<u8> {
    let group: std::net::Ipv6Addr = group.parse().unwrap();
    [&[4, 0, 0, 0], &group.octets()[..]].concat()
}

fn behind(packet: &Packet, bytes: usize) -> Vec<u8> {
    [packet.frame(), vec![0x5a; bytes]].concat()
}

#[test]
fn an_isolated_pod_speaks_to_its_link_and_to_nobody_behind_a_router() {
    let rig = Rig::isolated(Some(&deny_all()), Some(&deny_all()));
    let denied = Err(DropReason::EgressPeer);
    let solicit = |to, target, behind: &[u8]| discovery(POD_V6, to, 135, target, behind);
    let own = [&[1, 1][..], &POD_MAC.0].concat();
    // An unknown option of 240 bytes.
    let hidden = [&[5, 30][..], &[0x5a; 238]].concat();
    let nonce = [14, 1, 1, 2, 3, 4, 5, 6];
    let probe = |behind: &[u8]| discovery("::", "ff02::1:ff00:1", 135, POD_V6, behind);
    let solicit_routers = |to, rest: &[u8]| Packet::between(LINK_LOCAL, to).hop_limit(255).icmp(133, rest);
    let advertise = |to, rest: &[u8]| discovery(POD_V6, to, 136, POD_V6, rest);
    let mut with_reserved_bits = solicit(PEER_V6, PEER_V6, &[]).frame();
    with_reserved_bits[14 + 40 + 7] = 1;
    let cases = [
        ("a neighbour", solicit("ff02::1:ff00:2", PEER_V6, &own).frame(), Ok(())),
        ("whether a neighbour is still there", solicit(PEER_V6, PEER_V6, &own).frame(), Ok(())),
        ("the same without an option", solicit(NEIGHBOUR, NEIGHBOUR, &[]).frame(), Ok(())),
        ("a routed address", solicit(ROUTED, ROUTED, &own).frame(), denied),
        ("a routed address, with 240 bytes", solicit(ROUTED, ROUTED, &hidden).frame(), denied),
        (
            "a neighbour, with 240 bytes that are no options",
            solicit(PEER_V6, PEER_V6, &[0; 240]).frame(),
            Err(DropReason::Malformed),
        ),
        (
            "a neighbour, with an option of another kind",
            solicit(PEER_V6, PEER_V6, &[5, 1, 0, 0, 0, 0, 0, 0]).frame(),
            denied,
        ),
        ("a neighbour, with 240 bytes", solicit(PEER_V6, PEER_V6, &hidden).frame(), denied),
        ("a neighbour, with three options", solicit(PEER_V6, PEER_V6, &own.repeat(3)).frame(), denied),
        ("a neighbour, with a nonce", solicit(PEER_V6, PEER_V6, &nonce).frame(), denied),
        ("a neighbour, for somebody else", solicit(PEER_V6, "fd00::3", &[]).frame(), denied),
        ("a neighbour, with reserved bits", with_reserved_bits, denied),
        ("bytes behind the packet", behind(&solicit(PEER_V6, PEER_V6, &own), 200), denied),
        ("a wider group", solicit("ff05::1:ff00:2", PEER_V6, &own).frame(), denied),
        ("duplicate detection", probe(&[]).frame(), Ok(())),
        ("duplicate detection with a nonce", probe(&nonce).frame(), Ok(())),
        ("an advertisement", advertise(PEER_V6, &[&[2, 1][..], &POD_MAC.0].concat()).frame(), Ok(())),
        ("an advertisement to all", advertise("ff02::1", &[]).frame(), Ok(())),
        ("an advertisement behind a router", advertise(ROUTED, &[]).frame(), denied),
        ("all routers", solicit_routers("ff02::2", &[0; 4]).frame(), Ok(())),
        ("a routed router", solicit_routers(ROUTED, &[0; 4]).frame(), denied),
        (
            "all routers, with 40 bytes",
            solicit_routers("ff02::2", &[[0; 4].as_slice(), &own.repeat(5)].concat()).frame(),
            denied,
        ),
        ("a report", report("ff02::16", 1, &record("ff02::1:ff00:1")), Ok(())),
        ("a report of three groups", report("ff02::16", 3, &record("ff0e::77").repeat(3)), Ok(())),
        ("a report of 1000 bytes of anything", report("ff02::16", 1, &[0x5a; 1000]), denied),
        ("a report without a record, of 1000 bytes", report("ff02::16", 0, &[0x5a; 1000]), denied),
        ("a report of more than it has", report("ff02::16", 2, &record("ff0e::77")), denied),
        (
            "a report with a source",
            report("ff02::16", 1, &[record("ff3e::77"), vec![0x5a; 16]].concat()),
            denied,
        ),
        ("a report to all", report("ff02::1", 1, &record("ff0e::77")), denied),
        ("a report to a wide group", report("ff0e::77", 1, &record("ff0e::77")), denied),
        ("a report of a wide group", listener(LINK_LOCAL, "ff0e::77", 131).frame(), Ok(())),
        ("a report to a pod", report(PEER_V6, 1, &record("ff0e::77")), denied),
        ("a report to a link-local address", listener(LINK_LOCAL, NEIGHBOUR, 131).frame(), denied),
        (
            "bytes behind a report",
            [report("ff02::16", 1, &record("ff0e::77")), vec![0x5a; 100]].concat(),
            denied,
        ),
    ];
    for (what, frame, expected) in cases {
        assert_eq!(rig.run(FromPod, &frame), expected, "{what}");
    }
}

#[test]
fn an_isolated_pod_hears_its_link_and_no_more() {
    let rig = Rig::isolated(Some(&deny_all()), Some(&deny_all()));
    let denied = Err(DropReason::IngressPeer);
    let solicit = |to, target, behind: &[u8]| discovery(PEER_V6, to, 135, target, behind);
    let link_layer = [&[1, 1][..], &PEER.0].concat();
    let query = |rest: &[u8]| Packet::between(NEIGHBOUR, "ff02::1").hop_limit(1).icmp(130, rest).frame();
    let router = |from, to, kind| Packet::between(from, to).hop_limit(255).icmp(kind, &[0; 120]).frame();
    let cases = [
        ("a solicitation", solicit("ff02::1:ff00:1", POD_V6, &link_layer).frame(), Ok(())),
        ("a solicitation of its own", solicit(POD_V6, POD_V6, &link_layer).frame(), Ok(())),
        (
            "a solicitation from elsewhere on the link",
            discovery(ROUTED, POD_V6, 135, POD_V6, &link_layer).frame(),
            Ok(()),
        ),
        ("a solicitation that is not for it", solicit(ROUTED, ROUTED, &link_layer).frame(), denied),
        ("a solicitation with 240 bytes", solicit(POD_V6, POD_V6, &[5; 240]).frame(), denied),
        ("bytes behind a solicitation", behind(&solicit(POD_V6, POD_V6, &link_layer), 240), denied),
        (
            "an advertisement",
            discovery(PEER_V6, POD_V6, 136, PEER_V6, &[&[2, 1][..], &PEER.0].concat()).frame(),
            Ok(()),
        ),
        ("a router advertisement", router(NEIGHBOUR, "ff02::1", 134), Ok(())),
        ("a redirect", router(NEIGHBOUR, LINK_LOCAL, 137), Ok(())),
        ("a router advertisement of no link-local address", router(PEER_V6, "ff02::1", 134), denied),
        ("a query", listener(NEIGHBOUR, "ff02::1", 130).frame(), Ok(())),
        ("a query of version 2", query(&[0; 24]), Ok(())),
        ("a query for two sources", query(&[0; 24 + 32]), Ok(())),
        ("a query of any length", query(&[0; 24 + 33]), denied),
        ("a query to the pod alone", listener(NEIGHBOUR, POD_V6, 130).frame(), denied),
    ];
    for (what, frame, expected) in cases {
        assert_eq!(rig.run(ToPod, &frame), expected, "{what}");
    }
}

#[test]
fn what_is_not_about_the_link_is_judged_like_other_messages() {
    let rig = Rig::isolated(None, Some(&policy(&[("2001:db8::/32", 1)], &[(1, any())])));
    let solicitation = |to: &str| discovery(POD_V6, to, 135, to, &[]).frame();
    assert_eq!(rig.run(FromPod, &solicitation(ROUTED)), Ok(()));
    assert_eq!(rig.run(FromPod, &solicitation("2001:db9::9")), Err(DropReason::EgressPeer));
    rig.put(Checks { source_mac: true, source_address: true, pending: true, ..Checks::default() });
    assert_eq!(rig.run(FromPod, &solicitation(ROUTED)), Err(DropReason::Pending));
    assert_eq!(rig.run(FromPod, &solicitation(PEER_V6)), Ok(()));
}

/// If an attachment's addresses are not known, its link's prefixes are not either: any well-formed message passes.
#[test]
fn without_known_addresses_the_form_decides() {
    let rig = Rig::isolated(None, Some(&deny_all()));
    rig.put(Checks { source_mac: true, ..Checks::default() });
    let solicitation = |behind: &[u8]| discovery("2001:db8::1", ROUTED, 135, ROUTED, behind).frame();
    assert_eq!(rig.run(FromPod, &solicitation(&[])), Ok(()));
    assert_eq!(rig.run(FromPod, &solicitation(&[5, 1, 0, 0, 0, 0, 0, 0])), Err(DropReason::EgressPeer));
}
