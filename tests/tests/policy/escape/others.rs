//! Packets from devices on which no program runs: other ports on the pods' bridge.

use netattach::netlink::Handle;
use netattach_tests::raw::Ring;

use super::*;
use crate::bandwidth::host_end;

/// Frames to the victim whose port is beyond the usual offset: its offset, and the frame.
fn with_the_port_elsewhere(link: &Link) -> [(&'static str, Vec<u8>, usize); 2] {
    // Two unknown options.
    let options = [&[30_u8, 24][..], &[0; 22], &[30, 16], &[0; 14]].concat();
    let padding = [&[1_u8, 1, 12][..], &[0; 12]].concat();
    let v4 = Packet::between("10.50.0.77", link.v4[1]).from_mac(STRANGER).options(&options);
    let v6 = Packet::between("fd00:50::77", link.v6[1]).from_mac(STRANGER).extension(60, &padding);
    [
        ("behind options", link.towards_the_victim(v4.udp(1001, ALLOWED).frame()), 14 + 60 + 2),
        (
            "behind an extension header",
            link.towards_the_victim(v6.udp(1002, ALLOWED).frame()),
            14 + 40 + 16 + 2,
        ),
    ]
}

/// Number of flows that have begun at the victim's interface.
fn flows_at_the_victim(scene: &Scene) -> u64 {
    let stats = scene.node.ctl(&["stats"]).unwrap();
    let mut rows = stats.as_array().unwrap().iter();
    let of = |row: &&Value| row["pod"]["name"] == "victim" && row["network"] == DEFAULT_NETWORK;
    rows.find(of).unwrap()["new_flows"].as_u64().unwrap()
}

/// The sender passes frames in shared memory to the kernel, and changes them while they wait for the pod after its
/// program.
///
/// Rows: C88.
#[test]
fn what_is_judged_for_a_pod_is_what_it_receives() {
    let ingress = json!({
        "podSelector": {"matchLabels": {"app": "victim"}},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"protocol": "UDP", "port": ALLOWED}]}]
    });
    // On the fast path, frames do not wait there.
    let scene = Scene::under(&[("fastPath", json!("off"))], "victim", &ingress);
    let [link, ..] = scene.links();
    let namespace = &scene.node.namespace;
    for words in [
        "link add foreign0 type veth peer name foreign1",
        "link set foreign0 master br0 up",
        "link set foreign1 up",
    ] {
        ip(namespace, &words.split(' ').collect::<Vec<_>>()).unwrap();
    }
    // The kernel handles the carrier of the end that came up first later: until then the bridge takes nothing from it.
    let mut node = Handle::open_in(namespace.netns()).unwrap();
    let port = node.link("foreign0").unwrap().index;
    assert!(eventually(PATIENCE, || node.await_carrier(port).unwrap()), "foreign0 has no carrier");
    let device = host_end(&scene.node, "shop/victim", DEFAULT_NETWORK);
    let words = format!("qdisc replace dev {device} root tbf rate 32kbit burst 1600 limit 65536");
    let output = namespace.run(|| Command::new("tc").args(words.split(' ')).output()).unwrap();
    assert!(output.status.success(), "tc {words}: {output:?}");
    let victim = Witness::of(&scene.victim, &link);
    let foreign = RawSocket::open(namespace, "foreign1").unwrap();
    let before = flows_at_the_victim(&scene);
    // Keeps the queue busy for a second.
    let ports = [1000_u16.to_be_bytes(), ALLOWED.to_be_bytes()].concat();
    let datagram = [&ports[..], &1408_u16.to_be_bytes(), &[0; 1402]].concat();
    let filler = Packet::between("10.50.0.77", link.v4[1]).from_mac(STRANGER).payload(17, &datagram);
    let filler = link.towards_the_victim(filler.frame());
    (0..4).for_each(|_| foreign.send(&filler).unwrap());
    let frames = with_the_port_elsewhere(&link).map(|(what, frame, at)| {
        let ethertype = u16::from_be_bytes([frame[12], frame[13]]);
        let mut ring = namespace.run(|| Ring::open_here("foreign1", ethertype)).unwrap();
        let sent = ring.send(&frame).unwrap_or_else(|error| panic!("{what}: {error:#}"));
        (what, frame, at, ring, sent)
    });
    assert!(eventually(PATIENCE, || flows_at_the_victim(&scene) >= before + 3), "not all are judged");
    let denied = DENIED.to_be_bytes();
    let frames = frames.map(|(what, frame, at, mut ring, sent)| {
        ring.change(sent, at, &denied);
        let mut changed = frame.clone();
        changed[at..at + denied.len()].copy_from_slice(&denied);
        (what, frame, changed, ring)
    });
    // Each is waited for in either form: a frame sent after them may overtake them by way of another processor.
    let mut seen: Vec<Vec<u8>> = Vec::new();
    eventually(PATIENCE, || {
        seen.extend(victim.frames());
        frames.iter().all(|(_, frame, changed, _)| seen.contains(frame) || seen.contains(changed))
    });
    let arrived = frames
        .each_ref()
        .map(|(what, frame, changed, _)| (*what, seen.contains(frame), seen.contains(changed)));
    assert_eq!(arrived, frames.each_ref().map(|(what, ..)| (*what, true, false)));
    ip(namespace, &["link", "del", "foreign0"]).unwrap();
    scene.end();
}
