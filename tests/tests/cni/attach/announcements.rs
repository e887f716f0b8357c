//! Neighbours of a pod learn its addresses before it sends a packet, even those that knew another holder of them.

use std::process::Command;

use netattach::mac::Mac;
use netattach::netlink::Handle;
use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::node::{WIRE, ip};
use netattach_tests::traffic::{PATIENCE, eventually};
use netattach_tests::{Namespace, Node, Pod};
use serde_json::{Value, json};

/// The holder that was there before.
const BEFORE: &str = "02:00:00:00:00:99";
/// A device of the node, on the wire, which pod `b` takes.
const CARD: &str = "card";
/// The addresses that pod `b` gets, with the interface of `a` on the same network and its own.
const ADDRESSES: [(&str, &str, &str); 5] = [
    ("10.50.0.3", "eth0", "eth0"),
    ("10.52.0.3", "net1", "net1"),
    ("10.53.0.3", "net1", "net2"),
    ("fd00:53::3", "net1", "net2"),
    ("fd00:50::3", "eth0", "eth0"),
];

/// Pod `a` is attached to the default network, a bridge, and to macvlans.
fn node() -> (Node, Pod) {
    let mut node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    let ipam = node.host_local(&["10.52.0.0/24"]);
    let lan = json!({"cniVersion": "1.0.0", "type": "macvlan", "master": WIRE, "ipam": ipam});
    node.write("lan", &network(NAMESPACE, "lan", &lan)).unwrap();
    ip(&node.namespace, &["link", "add", "link", WIRE, "name", CARD, "type", "macvlan", "mode", "bridge"])
        .unwrap();
    let addresses = json!([{"address": "10.53.0.3/24"}, {"address": "fd00:53::3/64"}]);
    let ipam = json!({"type": "static", "addresses": addresses});
    let card = json!({"cniVersion": "1.0.0", "type": "host-device", "device": CARD, "ipam": ipam});
    node.write("card", &network(NAMESPACE, "card", &card)).unwrap();
    for (name, networks) in [("a", "lan"), ("b", "lan, card")] {
        node.write(name, &pod(name, &json!({}), &json!(networks))).unwrap();
    }
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    (node, a)
}

/// Makes pod `a` know the addresses with the Ethernet address of their previous holder.
fn know_another(a: &Pod) {
    for (address, device, _) in ADDRESSES {
        let entry = ["neigh", "replace", address, "lladdr", BEFORE, "dev", device, "nud", "stale"];
        ip(&a.namespace, &entry).unwrap();
    }
}

fn known(namespace: &Namespace, address: &str) -> Option<String> {
    let listed =
        namespace.run(|| Command::new("ip").args(["-j", "neigh", "show", "to", address]).output()).unwrap();
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    Some(listed[0]["lladdr"].as_str()?.to_owned())
}

fn assert_learns(a: &Pod, b: &Pod, what: &[(&str, &str, &str)]) {
    let mut inside = Handle::open_in(b.namespace.netns()).unwrap();
    for (address, _, device) in what {
        let mac: Mac = inside.link(device).unwrap().mac.unwrap();
        let told = eventually(PATIENCE, || known(&a.namespace, address) == Some(mac.to_string()));
        assert!(told, "{address}: {:?}, not {mac}", known(&a.namespace, address));
    }
}

/// Rows: SRV-announce.
#[test]
fn neighbours_that_knew_another_holder_are_told() {
    let (node, a) = node();
    know_another(&a);
    let b = Pod::new("b").unwrap();
    node.add(&b).success();
    assert_learns(&a, &b, &ADDRESSES);
    // The same when the interface is brought up again, also of its IPv6 address, which it keeps; but not on a bridge,
    // whose port does not forward yet.
    know_another(&a);
    for device in ["net1", "net2"] {
        ip(&b.namespace, &["link", "set", device, "down"]).unwrap();
        ip(&b.namespace, &["link", "set", device, "up"]).unwrap();
    }
    assert_learns(&a, &b, &ADDRESSES[1..4]);
}

#[test]
fn an_agent_tells_them_that_starts_after_one_ended_too_early() {
    let (mut node, a) = node();
    let b = Pod::new("b").unwrap();
    know_another(&a);
    node.add(&b).success();
    assert_learns(&a, &b, &ADDRESSES);
    node.kill().unwrap();
    know_another(&a);
    // The state after ADD.
    for (_, _, device) in &ADDRESSES[..2] {
        let key = format!("/proc/sys/net/ipv4/conf/{device}/arp_notify");
        b.namespace.run(|| std::fs::write(&key, "0")).unwrap();
    }
    node.start().unwrap();
    // IPv6 addresses were announced before the answer.
    assert_learns(&a, &b, &ADDRESSES[..2]);
}
