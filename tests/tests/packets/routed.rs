//! Packets that devices leave to the node's packet filter, which judges after the node's translation.

use netattach::bpf::Gate;
use netattach_tests::other_programs::answer;

use super::*;

/// Where the node receives frames for its routing.
const GATEWAY: Mac = Mac([0x02, 0, 0, 0, 0, 0x09]);
/// A neighbour on the pod's layer-2 network.
const NEIGHBOUR: Mac = Mac([0x02, 0, 0, 0, 0, 0x0a]);
/// The Ethernet address of `lo`, the device of test runs: packets to it come from the node's stack.
const STACK: Mac = Mac([0; 6]);
/// Addresses that other pods may send from as well.
const SHARED: [&str; 2] = ["10.0.0.9", "fd00::9"];
/// Another attachment.
const OTHER: u32 = 8;

fn addresses(texts: &[&str]) -> Vec<IpAddr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

/// Returns the verdicts on datagrams, in each family: from the pod to the node's routing by its own address and by
/// the shared one, and from the node's stack to them.
fn verdicts(rig: &Rig) -> [[Outcome; 4]; 2] {
    let datagram = |source: &str, destination: &str, to: Mac| {
        let mut frame = Packet::between(source, destination).udp(1, 2).frame();
        frame[..6].copy_from_slice(&to.0);
        frame
    };
    let of_family = |own: &str, shared: &str, peer: &str| {
        let sent = |from: &str| rig.run(FromPod, &datagram(from, peer, GATEWAY));
        let received = |to: &str| rig.run(ToPod, &datagram(peer, to, STACK));
        [sent(own), sent(shared), received(own), received(shared)]
    };
    [of_family(POD_V4, SHARED[0], PEER_V4), of_family(POD_V6, SHARED[1], PEER_V6)]
}

/// Rows: SVC-shared.
#[test]
fn what_the_node_routes_is_left_to_it_by_the_addresses_that_lead_to_the_pod_there() {
    let rig = Rig::isolated(Some(&deny_all()), Some(&deny_all()));
    let own = addresses(&[POD_V4, POD_V6]);
    let flags = Checks { source_mac: true, source_address: true, ..Checks::default() };
    let attachment = Attachment { addresses: [own.clone(), addresses(&SHARED)].concat(), flags, ..bare() };
    rig.dataplane.attachments().put(POD, &attachment).unwrap();
    let [sent, received]: [Outcome; 2] = [Err(DropReason::EgressPeer), Err(DropReason::IngressPeer)];
    assert_eq!(verdicts(&rig), [[sent, sent, received, received]; 2], "no gate is open");

    let mut routed = rig.dataplane.routed().unwrap();
    routed.guard(POD, &own).unwrap();
    routed.set_gate(POD, Gate::new(netattach_common::Mac { octets: GATEWAY.0 }, false, false)).unwrap();
    assert_eq!(verdicts(&rig), [[Ok(()), sent, Ok(()), received]; 2]);

    // An attachment of another network with the same addresses: neither gets them.
    routed.guard(OTHER, &own).unwrap();
    assert_eq!(verdicts(&rig), [[Ok(()), sent, Ok(()), received]; 2], "they lead to the pod still");
    routed.guard(POD, &[]).unwrap();
    assert_eq!(verdicts(&rig), [[sent, sent, received, received]; 2], "they lead to the other now");
    routed.forget(OTHER).unwrap();
    assert_eq!(verdicts(&rig), [[sent, sent, received, received]; 2], "they lead to nobody");
}

fn in_common(mac: Mac) -> netattach_common::Mac {
    netattach_common::Mac { octets: mac.0 }
}

/// The node's translation may redirect packets that a pod sends to its node. Such packets are exempt from the policy
/// at the device only if they go to the node's own stack and are judged after the translation too, and so are the
/// replies; not by an address that leads to no attachment there, and not by the address of a neighbour, which may be
/// another node.
///
/// Rows: SVC-shared, SVC-node-ports.
#[test]
fn the_node_is_excepted_for_what_it_judges_again() {
    const LINK_LOCAL: &str = "fe80::ff:fe00:1";
    // The peer stands for the node: anything there by its exception, and a port that a policy names.
    let mut egress = policy(&[("10.0.0.2/32", 1), ("fd00::2/128", 1)], &[(1, any()), (1, port(17, 53))]);
    egress.rules.insert(1, Origin::OfNode("the pod's own node"));
    let rig = Rig::isolated(None, Some(&egress));
    let own = addresses(&[POD_V4, POD_V6]);
    let flags = Checks { source_mac: true, source_address: true, ..Checks::default() };
    let attachment = Attachment { addresses: own.clone(), shared: addresses(&SHARED), flags, ..bare() };
    rig.dataplane.attachments().put(POD, &attachment).unwrap();
    // By the own address, the shared one and, for IPv6, the link-local one.
    let sent = |port: u16, by: Mac| {
        let to = |source: &str, node: &str| {
            let mut frame = Packet::between(source, node).udp(1, port).frame();
            frame[..6].copy_from_slice(&by.0);
            rig.run(FromPod, &frame)
        };
        let [shared4, shared6] = SHARED;
        [to(POD_V4, PEER_V4), to(shared4, PEER_V4)]
            .into_iter()
            .chain([POD_V6, shared6, LINK_LOCAL].map(|source| to(source, PEER_V6)))
            .collect::<Vec<_>>()
    };
    let refused = Err(DropReason::EgressPeer);
    assert_eq!(sent(30080, GATEWAY), [refused; 5], "nothing is judged again");
    let mut routed = rig.dataplane.routed().unwrap();
    routed.guard(POD, &own).unwrap();
    assert_eq!(sent(30079, GATEWAY), [refused; 5], "it is not known where the node receives frames");
    routed.set_gate(POD, Gate::closed(in_common(GATEWAY))).unwrap();
    let by_own = [Ok(()), refused, Ok(()), refused, refused];
    assert_eq!(sent(30081, GATEWAY), by_own, "judged here and there");
    assert_eq!(sent(30084, NEIGHBOUR), [refused; 5], "not judged again");
    // Replies of a flow whose policy has been replaced are checked as well.
    rig.enforce(None, Some(&egress));
    let back = |node: &str, to: &str| {
        let mut frame = Packet::between(node, to).udp(30081, 1).frame();
        frame[..6].copy_from_slice(&STACK.0);
        rig.run(ToPod, &frame)
    };
    assert_eq!([back(PEER_V4, POD_V4), back(PEER_V6, POD_V6)], [Ok(()); 2]);
    assert_eq!([sent(53, GATEWAY), sent(53, NEIGHBOUR)], [[Ok(()); 5], [Ok(()); 5]], "a policy allows it");
    routed.set_gate(POD, Gate::new(in_common(GATEWAY), false, false)).unwrap();
    assert_eq!(sent(30082, GATEWAY), by_own, "left to the packet filter");
    assert_eq!(sent(30085, NEIGHBOUR), [refused; 5], "judged here, and nowhere else");
    routed.forget(POD).unwrap();
    assert_eq!(sent(30083, GATEWAY), [refused; 5], "judged here again");
}

/// The node's own packets come from its stack. A frame from another port of the bridge may have any source.
#[test]
fn the_node_is_excepted_from_ingress_for_what_comes_from_its_stack_and_not_for_its_address() {
    let rig = Rig::isolated(Some(&from_the_node()), None);
    let received = |port: u16, to: Mac| {
        [(PEER_V4, POD_V4), (PEER_V6, POD_V6)].map(|(node, pod)| {
            let mut frame = Packet::between(node, pod).udp(1, port).frame();
            frame[..6].copy_from_slice(&to.0);
            rig.run(ToPod, &frame)
        })
    };
    let refused: Outcome = Err(DropReason::IngressPeer);
    assert_eq!(received(8080, STACK), [Ok(()); 2]);
    assert_eq!(received(8081, POD_MAC), [refused; 2], "by another port of the bridge");
    assert_eq!(received(53, POD_MAC), [Ok(()); 2], "a policy allows it");
}

/// Where bridges pass forwarded frames to the packet filter, a frame with the node's address goes to a neighbour, or
/// comes from one.
#[test]
fn what_the_packet_filter_forwards_is_neither_to_the_node_nor_from_it() {
    const PASSES: u32 = 0;
    const DROPPED: u32 = 1;
    let rig = Rig::isolated(Some(&from_the_node()), Some(&from_the_node()));
    let mut routed = rig.dataplane.routed().unwrap();
    routed.guard(POD, &addresses(&[POD_V4, POD_V6])).unwrap();
    let [ends, forwarded] = ["na_routed", "na_forwarded"].map(|name| rig.pin(&format!("prog/{name}")));
    for (pod, node) in [(POD_V4, PEER_V4), (POD_V6, PEER_V6)] {
        for (from, to) in [(pod, node), (node, pod)] {
            let frame = |port| Packet::between(from, to).udp(1, port).frame();
            assert_eq!(answer(&forwarded, &frame(8080)).unwrap(), DROPPED, "{from} to {to}");
            assert_eq!(answer(&ends, &frame(8081)).unwrap(), PASSES, "{from} to {to}");
            assert_eq!(answer(&forwarded, &frame(53)).unwrap(), PASSES, "a policy allows {from} to {to}");
        }
    }
}
