//! Pods attached by the real executable and the real agent: results, kernel, files, traffic.
#![expect(clippy::unwrap_used, reason = "a test reports by panicking")]

use std::net::IpAddr;

use netattach::link::spec;
use netattach::netlink::Handle;
use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{PATIENCE, ping};
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};

#[test]
fn probe() {
    let mut node = node();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    println!("{:#}", node.add(&a).success());
    println!("{:#?}", Snapshot::take(&node, &[&a]).unwrap());
    assert!(ping(&a.namespace, "10.50.0.1".parse().unwrap(), PATIENCE).unwrap());
    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

fn node() -> Node {
    let node = Node::new(&[]).unwrap();
    let mut handle = Handle::open_in(node.namespace.netns()).unwrap();
    handle.ensure_bridge(&spec::Bridge { name: "lan0".into(), mtu: None, promiscuous: false }).unwrap();
    let storage = json!({
        "cniVersion": "1.0.0", "type": "veth", "mtu": 1400, "capabilities": {"ips": true, "mac": true},
        "ipam": node.host_local(&["10.51.0.0/24", "fd00:51::/64"])
    });
    let lan = json!({
        "cniVersion": "1.0.0", "type": "macvlan", "master": "lan0",
        "capabilities": {"ips": true, "mac": true}, "ipam": node.host_local(&["10.52.0.0/24"])
    });
    node.write("storage", &network(NAMESPACE, "storage", &storage)).unwrap();
    node.write("lan", &network(NAMESPACE, "lan", &lan)).unwrap();
    let networks = json!([
        {"name": "storage", "interface": "st0", "ips": ["10.51.0.77/24"], "mac": "02:00:00:00:51:77"},
        {"name": "storage"},
        {"name": "lan", "ips": ["10.52.0.10/24"], "mac": "02:00:00:00:52:10"}
    ]);
    node.write("a", &pod("a", &json!({}), &networks)).unwrap();
    node.write("b", &pod("b", &json!({}), &json!("storage, lan@lan7"))).unwrap();
    node
}
