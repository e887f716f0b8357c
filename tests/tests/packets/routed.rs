//! What devices leave to the node's packet filter, which judges behind the node's translation.

use netattach::bpf::Gate;

use super::*;

/// Where the node receives frames for its routing.
const GATEWAY: Mac = Mac([0x02, 0, 0, 0, 0, 0x09]);
/// The address of `lo`, the device of test runs: what is sent to it comes from the node's stack.
const STACK: Mac = Mac([0; 6]);
/// Addresses that other pods may send from as well.
const SHARED: [&str; 2] = ["10.0.0.9", "fd00::9"];
/// Another attachment.
const OTHER: u32 = 8;

fn addresses(texts: &[&str]) -> Vec<IpAddr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

/// The verdicts on datagrams, in each family: from the pod to the node's routing by its own address and by the shared one,
/// and from the node's stack to them.
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

    // Of another network whose addresses are the same: nobody takes them.
    routed.guard(OTHER, &own).unwrap();
    assert_eq!(verdicts(&rig), [[Ok(()), sent, Ok(()), received]; 2], "they lead to the pod still");
    routed.guard(POD, &[]).unwrap();
    assert_eq!(verdicts(&rig), [[sent, sent, received, received]; 2], "they lead to the other now");
    routed.forget(OTHER).unwrap();
    assert_eq!(verdicts(&rig), [[sent, sent, received, received]; 2], "they lead to nobody");
}
