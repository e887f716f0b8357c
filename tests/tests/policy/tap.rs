//! Policies on a tap, whose other end is a process of the pod, and on one that is a port of a bridge in the pod.

use netattach::mac::Mac;
use netattach_tests::manifest::{NAMESPACE, network, pod, policy};
use netattach_tests::node::ip;
use netattach_tests::packet::Packet;
use netattach_tests::raw::RawSocket;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::tap::TapEnd;
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE};
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};

/// Whether a frame is UDP over IPv4 to that port of the process.
fn is_answer(frame: &[u8]) -> bool {
    frame.len() > 38 && frame[12..14] == [8, 0] && frame[23] == 17 && frame[36..38] == 4000_u16.to_be_bytes()
}

/// Rows: TAP-level, TAP-policy.
#[test]
fn policies_hold_on_a_tap_and_a_bridges_port_sends_for_others() {
    let mut node = Node::new(&[]).unwrap();
    node.set("fastPath", json!("on"));
    let ipam = json!({"type": "static", "addresses": [{"address": "10.70.0.1/24"}]});
    let networks = [
        ("machine", json!({"cniVersion": "1.0.0", "type": "tap", "mac": "02:00:00:00:00:02", "ipam": ipam})),
        ("port", json!({"cniVersion": "1.0.0", "type": "tap", "bridge": "inner"})),
    ];
    for (name, config) in networks {
        node.write(name, &network(NAMESPACE, name, &config)).unwrap();
    }
    let rules = json!({
        "podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{"ports": [{"port": 80, "protocol": "UDP"}]}],
    });
    node.write("rules", &policy("rules", "machine", &rules)).unwrap();
    node.write("a", &pod("a", &json!({}), &json!("machine, port"))).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    ip(&a.namespace, &["link", "add", "inner", "up", "type", "bridge"]).unwrap();
    node.add(&a).success();
    node.check(&a).success();
    let rows = node.ctl(&["attachments", "--pod", &format!("{NAMESPACE}/a")]).unwrap();
    let rows: Vec<&Value> = rows.as_array().unwrap().iter().filter(|row| row["ifname"] != "eth0").collect();
    let told: Vec<_> = rows.iter().map(|row| (&row["enforcement"], row.get("fast_path"))).collect();
    assert_eq!(told, [(&json!("full-unless-privileged"), None); 2]);
    let lax = rows[1]["enforcement_detail"].as_str().unwrap();
    assert!(lax.contains("the pod may send from any Ethernet and IP address"), "{lax}");

    let process = TapEnd::open(&a.namespace, "net1", false).unwrap();
    ip(&a.namespace, &["neigh", "add", "10.70.0.9", "lladdr", "02:00:00:00:00:01", "dev", "net1"]).unwrap();
    let _servers = [80, 81].map(|port| Echo::serve(&a.namespace, ([10, 70, 0, 1], port).into()).unwrap());
    let asks = |port| {
        process.send(&Packet::between("10.70.0.9", "10.70.0.1").udp(4000, port).frame()).unwrap();
        let patience = if port == 80 { PATIENCE } else { SILENCE };
        process.receive(patience, is_answer).unwrap().is_some()
    };
    assert_eq!([80, 81].map(asks), [true, false]);
    // Packets with another source address are not sent, except at a bridge's port.
    let port = TapEnd::open(&a.namespace, "net2", false).unwrap();
    let foreign = Packet::between("10.70.0.77", "10.70.0.9").from_mac(Mac([2, 0, 0, 0, 0, 0x77]));
    let foreign = foreign.udp(80, 4000).frame();
    for (device, end, passes) in [("net1", &process, false), ("net2", &port, true)] {
        RawSocket::queued(&a.namespace, device).unwrap().send(&foreign).unwrap();
        let patience = if passes { PATIENCE } else { SILENCE };
        assert_eq!(end.receive(patience, is_answer).unwrap().is_some(), passes, "{device}");
    }
    node.del(&a).success();
    ip(&a.namespace, &["link", "del", "inner"]).unwrap();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}
