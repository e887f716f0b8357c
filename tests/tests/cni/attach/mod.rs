//! Pods attached by the real executable and the real agent: results, kernel, files, traffic.
//!
//! `announcements` tests the announcements to neighbours, `check` CHECK of such pods, `crowded` the end of pods that
//! have created very many objects in their namespace or changed their interfaces, `other_plugins` pods with executed
//! plugins.

mod announcements;
mod check;
mod crowded;
mod other_plugins;

use std::collections::BTreeSet;
use std::net::IpAddr;

use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::node::WIRE;
use netattach_tests::snapshot::{Network, Snapshot};
use netattach_tests::traffic::{PATIENCE, ping};
use netattach_tests::{Node, Outcome, Pod};
use serde_json::{Value, json};

/// A node with a routed network `storage`, a macvlan network `lan`, a pod `a` that has both (one of them
/// twice) and a pod `b` that has each once.
fn node() -> Node {
    let node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    let storage = json!({
        "cniVersion": "1.0.0", "type": "veth", "mtu": 1400, "capabilities": {"ips": true, "mac": true},
        "ipam": node.host_local(&["10.51.0.0/24", "fd00:51::/64"])
    });
    let lan = json!({
        "cniVersion": "1.0.0", "type": "macvlan", "master": WIRE,
        "capabilities": {"ips": true, "mac": true}, "ipam": node.host_local(&["10.52.0.0/24"])
    });
    node.write("storage", &network(NAMESPACE, "storage", &storage)).unwrap();
    node.write("lan", &network(NAMESPACE, "lan", &lan)).unwrap();
    let networks = json!([
        {"name": "storage", "interface": "st0", "ips": ["10.51.0.77/24", "fd00:51::77/64"], "mac": "02:00:00:00:51:77"},
        {"name": "storage"},
        {"name": "lan", "ips": ["10.52.0.10/24"], "mac": "02:00:00:00:52:10"}
    ]);
    node.write("a", &pod("a", &json!({}), &networks)).unwrap();
    node.write("b", &pod("b", &json!({}), &json!("storage, lan@lan7"))).unwrap();
    node.write("plain", &pod("plain", &json!({}), &Value::Null)).unwrap();
    node
}

/// The same node, started.
fn serving() -> Node {
    let mut node = node();
    node.start().unwrap();
    node
}

fn network_of(node: &Node, name: &str, config: &Value) {
    node.write(name, &network(NAMESPACE, name, config)).unwrap();
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn pings(from: &Pod, to: &str) -> bool {
    ping(&from.namespace, address(to), PATIENCE).unwrap()
}

fn link_names(pod: &Pod) -> Vec<String> {
    Network::of(&pod.namespace).unwrap().links.into_keys().collect()
}

/// Replaces values that differ from run to run.
fn normalised(mut result: Value, pod: &Pod) -> Value {
    for interface in result["interfaces"].as_array_mut().unwrap() {
        if interface["mac"].as_str().is_some_and(|mac| mac.len() == 17) {
            interface["mac"] = json!("MAC");
        }
        if interface["name"].as_str().is_some_and(|name| name.starts_with("na") && name.len() == 15) {
            interface["name"] = json!("HOST");
        }
        if interface["sandbox"] == json!(pod.namespace.path()) {
            interface["sandbox"] = json!("POD");
        }
    }
    result
}

/// Rows: RES-14, NPWG-4.1.2.1.3-ips-honoured.
#[test]
fn a_pod_gets_its_networks_and_loses_them_again() {
    let node = serving();
    let a = Pod::new("a").unwrap();
    let result = node.add(&a).success();
    let expected = json!({
        "cniVersion": "1.0.0",
        "interfaces": [
            {"name": "br0", "mac": "MAC", "mtu": 1500},
            {"name": "HOST", "mac": "MAC", "mtu": 1500},
            {"name": "eth0", "mac": "MAC", "mtu": 1500, "sandbox": "POD"}
        ],
        "ips": [
            {"interface": 2, "address": "10.50.0.2/24", "gateway": "10.50.0.1"},
            {"interface": 2, "address": "fd00:50::2/64", "gateway": "fd00:50::1"}
        ],
        "routes": [{"dst": "0.0.0.0/0", "gw": "10.50.0.1"}, {"dst": "::/0", "gw": "fd00:50::1"}]
    });
    assert_eq!(normalised(result, &a), expected);

    let snapshot = Snapshot::take(&node, &[&a]).unwrap();
    let pod = &snapshot.pods["c-a"];
    let shown: Vec<String> = pod
        .links
        .iter()
        .filter(|(name, _)| *name != "lo")
        .map(|(name, link)| {
            let addresses: Vec<String> = link.addresses.iter().map(ToString::to_string).collect();
            format!("{name} {} {} {} {}", link.kind, link.mtu, link.up, addresses.join(" "))
        })
        .collect();
    assert_eq!(
        shown,
        [
            "eth0 veth 1500 true 10.50.0.2/24 fd00:50::2/64",
            "net2 veth 1400 true 10.51.0.78/32 fd00:51::78/128",
            "net3 macvlan 1500 true 10.52.0.10/24",
            "st0 veth 1400 true 10.51.0.77/32 fd00:51::77/128"
        ]
    );
    let mac = |name: &str| pod.links[name].mac.unwrap().to_string();
    assert_eq!((mac("st0"), mac("net3")), ("02:00:00:00:51:77".into(), "02:00:00:00:52:10".into()));
    let bridge = &snapshot.node.links["br0"];
    let gateways: Vec<String> = bridge.addresses.iter().map(ToString::to_string).collect();
    assert_eq!(gateways, ["10.50.0.1/24", "fd00:50::1/64"]);

    let status: Value = serde_json::from_str(&snapshot.files["run/network-status/shop/a.json"]).unwrap();
    let expected = json!([
        {"name": "kube-system/default", "interface": "eth0", "ips": ["10.50.0.2", "fd00:50::2"],
         "mac": mac("eth0"), "default": true, "dns": {}},
        {"name": "shop/storage", "interface": "st0", "ips": ["10.51.0.77", "fd00:51::77"],
         "mac": "02:00:00:00:51:77", "default": false, "dns": {}},
        {"name": "shop/storage", "interface": "net2", "ips": ["10.51.0.78", "fd00:51::78"],
         "mac": mac("net2"), "default": false, "dns": {}},
        {"name": "shop/lan", "interface": "net3", "ips": ["10.52.0.10"],
         "mac": "02:00:00:00:52:10", "default": false, "dns": {}}
    ]);
    assert_eq!(status, expected);

    node.check(&a).success();
    assert_eq!(node.del(&a), Outcome { exit: 0, json: Value::Null });
    let gone = Snapshot::take(&node, &[&a]).unwrap();
    gone.assert_nothing_is_left();
    assert_eq!(node.del(&a), Outcome { exit: 0, json: Value::Null }, "DEL of what is gone succeeds");
    assert_eq!(Snapshot::take(&node, &[&a]).unwrap(), gone);
}

#[test]
fn pods_reach_each_other_on_every_network() {
    let node = serving();
    let (a, b) = (Pod::new("a").unwrap(), Pod::new("b").unwrap());
    node.add(&a).success();
    node.add(&b).success();
    for (network, of_a, of_b) in [
        ("bridge", "10.50.0.2", "10.50.0.3"),
        ("bridge, IPv6", "fd00:50::2", "fd00:50::3"),
        ("macvlan", "10.52.0.10", "10.52.0.11"),
    ] {
        assert!(pings(&a, of_b), "a to b: {network}");
        assert!(pings(&b, of_a), "b to a: {network}");
    }
    for gateway in ["10.50.0.1", "fd00:50::1"] {
        assert!(pings(&a, gateway), "{gateway}");
    }
    node.del(&a).success();
    node.del(&b).success();
    Snapshot::take(&node, &[&a, &b]).unwrap().assert_nothing_is_left();
}

#[test]
fn routed_pods_reach_each_other_through_the_node() {
    let node = node();
    for name in ["left", "right"] {
        node.write(name, &pod(name, &json!({}), &json!("storage"))).unwrap();
    }
    let mut node = node;
    node.start().unwrap();
    let (left, right) = (Pod::new("left").unwrap(), Pod::new("right").unwrap());
    node.add(&left).success();
    node.add(&right).success();
    for (of_left, of_right) in [("10.51.0.2", "10.51.0.3"), ("fd00:51::2", "fd00:51::3")] {
        assert!(pings(&left, of_right), "{of_right}");
        assert!(pings(&right, of_left), "{of_left}");
    }
    let routes = Network::of(&node.namespace).unwrap().routes;
    let hosts: BTreeSet<&str> = routes
        .iter()
        .filter(|route| route.contains("10.51.") || route.contains("fd00:51:"))
        .map(|route| route.split(' ').next().unwrap())
        .collect();
    assert_eq!(hosts, BTreeSet::from(["10.51.0.2/32", "10.51.0.3/32", "fd00:51::2/128", "fd00:51::3/128"]));
    node.del(&left).success();
    node.del(&right).success();
    Snapshot::take(&node, &[&left, &right]).unwrap().assert_nothing_is_left();
    let routes = Network::of(&node.namespace).unwrap().routes;
    assert!(!routes.iter().any(|route| route.contains("10.51.") || route.contains("fd00:51:")), "{routes:?}");
}

/// Rows: DEL-07, CNI-DEL-idempotent.
#[test]
fn del_needs_neither_the_namespace_nor_its_path() {
    let node = serving();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    node.call("DEL", &a).with("CNI_NETNS", "").run().success();
    Snapshot::take(&node, &[]).unwrap().assert_nothing_is_left();

    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    node.call("DEL", &a).without("CNI_NETNS").run().success();
    Snapshot::take(&node, &[]).unwrap().assert_nothing_is_left();

    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let del = node.call("DEL", &a);
    drop(a);
    del.run().success();
    Snapshot::take(&node, &[]).unwrap().assert_nothing_is_left();
}

/// Rows: ADD-06.
#[test]
fn a_second_add_is_refused_and_harms_nothing() {
    let node = serving();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let before = Snapshot::take(&node, &[&a]).unwrap();
    let (code, message) = node.add(&a).failure();
    assert_eq!(
        (code, &*message),
        (4, "container c-a is attached with interface eth0 already; another ADD needs a DEL first")
    );
    assert_eq!(Snapshot::take(&node, &[&a]).unwrap(), before);
    node.check(&a).success();
    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

/// Rows: NPWG-2.1-cni-plugin.
#[test]
fn every_version_gets_the_result_in_its_shape() {
    let node = serving();
    for version in ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
        let pod = Pod::new("plain").unwrap();
        let config = node.cni_config(version);
        let result = node.call("ADD", &pod).stdin(&config).run().success();
        let ip = |family: &str, result: &Value| {
            let address = |ip: &Value| ip["address"].as_str().unwrap().to_owned();
            let ips = result["ips"].as_array().unwrap();
            ips.iter().map(address).find(|text| text.contains(':') == (family == "6")).unwrap()
        };
        let expected = match version {
            "0.1.0" | "0.2.0" => json!({
                "cniVersion": version,
                "ip4": {"ip": result["ip4"]["ip"], "gateway": "10.50.0.1", "routes": [{"dst": "0.0.0.0/0", "gw": "10.50.0.1"}]},
                "ip6": {"ip": result["ip6"]["ip"], "gateway": "fd00:50::1", "routes": [{"dst": "::/0", "gw": "fd00:50::1"}]},
                "dns": {}
            }),
            _ => {
                let mut interfaces = json!([
                    {"name": "br0", "mac": "MAC"},
                    {"name": "HOST", "mac": "MAC"},
                    {"name": "eth0", "mac": "MAC", "sandbox": "POD"}
                ]);
                let mut ips = json!([
                    {"version": "4", "interface": 2, "address": ip("4", &result), "gateway": "10.50.0.1"},
                    {"version": "6", "interface": 2, "address": ip("6", &result), "gateway": "fd00:50::1"}
                ]);
                if version.starts_with('1') {
                    ips.as_array_mut().unwrap().iter_mut().for_each(|ip| {
                        ip.as_object_mut().unwrap().remove("version");
                    });
                }
                if version.starts_with('1') {
                    interfaces
                        .as_array_mut()
                        .unwrap()
                        .iter_mut()
                        .for_each(|interface| interface["mtu"] = json!(1500));
                }
                json!({
                    "cniVersion": version, "interfaces": interfaces, "ips": ips,
                    "routes": [{"dst": "0.0.0.0/0", "gw": "10.50.0.1"}, {"dst": "::/0", "gw": "fd00:50::1"}],
                    "dns": {}
                })
            }
        };
        let mut expected = expected;
        let shown = if version < "0.3.0" { result } else { normalised(result, &pod) };
        if version.starts_with('1') {
            // Since 1.0.0 an empty member is omitted.
            expected.as_object_mut().unwrap().remove("dns");
        }
        assert_eq!(shown, expected, "{version}");
        node.call("DEL", &pod).stdin(&config).run().success();
        Snapshot::take(&node, &[&pod]).unwrap().assert_nothing_is_left();
    }
}

#[test]
fn twenty_pods_at_once_get_addresses_of_their_own_and_leave_nothing() {
    let node = node();
    for number in 0..20 {
        let name = format!("p{number}");
        node.write(&name, &pod(&name, &json!({}), &json!("storage, lan"))).unwrap();
    }
    let mut node = node;
    node.start().unwrap();
    let pods: Vec<Pod> = (0..20).map(|number| Pod::new(&format!("p{number}")).unwrap()).collect();
    let node = &node;
    let results: Vec<Value> = std::thread::scope(|scope| {
        let threads: Vec<_> = pods.iter().map(|pod| scope.spawn(|| node.add(pod).success())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let addresses: BTreeSet<&str> =
        results.iter().map(|result| result["ips"][0]["address"].as_str().unwrap()).collect();
    assert_eq!(addresses.len(), 20);
    let rows = node.ctl(&["attachments"]).unwrap();
    assert_eq!(rows.as_array().unwrap().len(), 60);
    std::thread::scope(|scope| {
        for pod in &pods {
            scope.spawn(|| node.del(pod).success());
        }
    });
    let pods: Vec<&Pod> = pods.iter().collect();
    Snapshot::take(node, &pods).unwrap().assert_nothing_is_left();
}
