//! Pods attached by the real executable and the real agent: results, kernel, files, traffic.
#![expect(clippy::unwrap_used, reason = "a test reports by panicking")]

use std::collections::BTreeSet;
use std::fs;
use std::net::IpAddr;

use netattach::netlink::Handle;
use netattach_tests::calls::verbs;
use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::node::{WIRE, ip};
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

/// A started node of that kind.
fn serving() -> Node {
    let mut node = node();
    node.start().unwrap();
    node
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

/// Puts words in place of what differs from run to run.
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

/// What a test takes away, and what CHECK says about it.
type Damage = (&'static str, fn(&Node, &Pod), &'static str);

/// The link on the node that carries an interface of the pod.
fn host_end(node: &Node, pod: &Pod, ifname: &str) -> String {
    let all = node.ctl(&["attachments"]).unwrap();
    let is_it = |row: &&Value| row["container_id"] == json!(pod.container) && row["ifname"] == json!(ifname);
    let row = all.as_array().unwrap().iter().find(is_it).unwrap_or_else(|| panic!("{all:#}"));
    row["host_interface"].as_str().unwrap().to_owned()
}

/// Rows: CNI-CHECK-all, CHK-06.
#[test]
fn check_names_what_is_gone() {
    let damages: [Damage; 11] = [
        (
            "link",
            |_, pod| in_pod(pod, |handle| handle.ensure_link_absent("net3").unwrap()),
            "interface net3 is gone from the pod",
        ),
        (
            "address",
            |_, pod| {
                in_pod(pod, |handle| {
                    let index = handle.link("st0").unwrap().index;
                    handle.ensure_address_absent(index, "fd00:51::77/128".parse().unwrap()).unwrap();
                });
            },
            "interface st0 lacks address fd00:51::77/128",
        ),
        (
            "address and its routes",
            |_, pod| {
                in_pod(pod, |handle| {
                    let index = handle.link("eth0").unwrap().index;
                    let addresses = handle.addresses(index).unwrap();
                    let v4 = addresses.into_iter().find(|net| net.addr().is_ipv4()).unwrap();
                    handle.ensure_address_absent(index, v4).unwrap();
                });
            },
            "interface eth0 lacks address 10.50.0.",
        ),
        (
            "route",
            |_, pod| ip(&pod.namespace, &["route", "del", "default"]).unwrap(),
            "the route to 0.0.0.0/0 is gone",
        ),
        (
            "up",
            |_, pod| ip(&pod.namespace, &["link", "set", "net2", "down"]).unwrap(),
            "interface net2 is down",
        ),
        (
            "MTU",
            |_, pod| ip(&pod.namespace, &["link", "set", "st0", "mtu", "1300"]).unwrap(),
            "interface st0 has MTU 1300, not 1400",
        ),
        (
            "MAC",
            |_, pod| ip(&pod.namespace, &["link", "set", "net3", "address", "02:00:00:00:52:99"]).unwrap(),
            "interface net3 has Ethernet address 02:00:00:00:52:99",
        ),
        (
            "the node's end",
            |node, pod| ip(&node.namespace, &["link", "set", &host_end(node, pod, "st0"), "down"]).unwrap(),
            "of the node is down",
        ),
        (
            "the node's route",
            |node, _| ip(&node.namespace, &["route", "del", "10.51.0.77"]).unwrap(),
            "the node's route to 10.51.0.77/32 is gone",
        ),
        (
            "the bridge",
            |node, pod| {
                ip(&node.namespace, &["link", "set", &host_end(node, pod, "eth0"), "nomaster"]).unwrap();
            },
            "is not a port of bridge br0",
        ),
        ("lease", |node, _| fs::remove_file(node.path("leases/@shop/lan/10.52.0.10")).unwrap(), "10.52.0.10"),
    ];
    let node = serving();
    for (what, damage, said) in damages {
        let a = Pod::new("a").unwrap();
        node.add(&a).success();
        node.check(&a).success();
        damage(&node, &a);
        let (code, message) = node.check(&a).failure();
        assert!(message.contains(said), "{what}: {code} {message}");
        node.del(&a).success();
        Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
    }
}

/// Rows: CNI-CHECK-disable, CHK-02.
#[test]
fn a_network_that_disables_check_is_taken_as_it_is() {
    let mut node = node();
    node.plugin("odd", &json!({"CHECK": {"error": {"code": 100, "msg": "broken"}}})).unwrap();
    let list = |disable: bool| {
        json!({"cniVersion": "1.0.0", "disableCheck": disable, "plugins": [
            {"type": "macvlan", "master": WIRE, "ipam": node.host_local(&["10.52.0.0/24"])}, {"type": "odd"}]})
    };
    network_of(&node, "checked", &list(false));
    network_of(&node, "unchecked", &list(true));
    node.write("x", &pod("x", &json!({}), &json!("checked"))).unwrap();
    node.write("y", &pod("y", &json!({}), &json!("unchecked"))).unwrap();
    node.start().unwrap();
    let (x, y) = (Pod::new("x").unwrap(), Pod::new("y").unwrap());
    node.add(&x).success();
    node.add(&y).success();
    node.take_calls().unwrap();
    assert_eq!(
        node.check(&x).failure(),
        (100, "check net1 (shop/checked): plugin \"odd\" failed (CHECK): broken".into())
    );
    in_pod(&y, |handle| handle.ensure_link_absent("net1").unwrap());
    node.check(&y).success();
    assert_eq!(verbs(&node.take_calls().unwrap()), ["CHECK odd net1"]);
    node.del(&x).success();
    node.del(&y).success();
}

/// Rows: CNI-CHECK-all.
#[test]
fn an_interface_of_another_plugin_is_looked_for_where_its_result_says_it_is() {
    let mut node = node();
    network_of(&node, "odd", &json!({"cniVersion": "1.0.0", "type": "odd"}));
    node.write("x", &pod("x", &json!({}), &json!("odd"))).unwrap();
    let x = Pod::new("x").unwrap();
    let result = json!({
        "cniVersion": "1.0.0",
        "interfaces": [{"name": "net1", "mac": "02:00:00:00:00:09", "sandbox": x.namespace.path()}],
        "ips": [{"interface": 0, "address": "192.0.2.9/24"}]
    });
    node.plugin("odd", &json!({"ADD": {"result": result}})).unwrap();
    node.start().unwrap();
    node.add(&x).success();
    assert_eq!(node.check(&x).failure().1, "net1 (shop/odd): interface net1 is gone from the pod");
    ip(&x.namespace, &["link", "add", "net1", "address", "02:00:00:00:00:09", "type", "bridge"]).unwrap();
    assert_eq!(node.check(&x).failure().1, "net1 (shop/odd): interface net1 lacks address 192.0.2.9/24");
    ip(&x.namespace, &["address", "add", "192.0.2.9/24", "dev", "net1"]).unwrap();
    node.check(&x).success();
    node.del(&x).success();
}

fn in_pod(pod: &Pod, change: impl FnOnce(&mut Handle)) {
    change(&mut Handle::open_in(pod.namespace.netns()).unwrap());
}

/// Rows: DEL-09, CNI-DEL-idempotent.
#[test]
fn check_of_a_pod_that_is_not_attached_fails_and_del_of_it_does_not() {
    let node = serving();
    let a = Pod::new("a").unwrap();
    let (code, message) = node.check(&a).failure();
    assert_eq!((code, &*message), (3, "container c-a is not attached with interface eth0"));
    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
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
        (4, "container c-a is attached with interface eth0 already; DEL comes before another ADD")
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
            // Since 1.0.0 an empty member is left out.
            expected.as_object_mut().unwrap().remove("dns");
        }
        assert_eq!(shown, expected, "{version}");
        node.call("DEL", &pod).stdin(&config).run().success();
        Snapshot::take(&node, &[&pod]).unwrap().assert_nothing_is_left();
    }
}

fn network_of(node: &Node, name: &str, config: &Value) {
    node.write(name, &network(NAMESPACE, name, config)).unwrap();
}

#[test]
fn an_external_plugin_makes_an_attachment() {
    let mut node = node();
    let result = json!({
        "cniVersion": "0.4.0",
        "interfaces": [{"name": "x9", "mac": "02:00:00:00:00:09", "sandbox": "/some/where"}],
        "ips": [{"version": "4", "interface": 0, "address": "192.0.2.9/24"}]
    });
    node.plugin("other", &json!({"ADD": {"result": result}})).unwrap();
    let config =
        json!({"cniVersion": "0.4.0", "type": "other", "colour": "blue", "capabilities": {"mac": true}});
    network_of(&node, "odd", &config);
    let selection = json!([{"name": "odd", "mac": "02:00:00:00:00:09", "cni-args": {"shade": "dark"}}]);
    node.write("x", &pod("x", &json!({}), &selection)).unwrap();
    node.start().unwrap();
    let x = Pod::new("x").unwrap();
    node.add(&x).success();
    node.check(&x).success();
    let status = fs::read_to_string(node.path("run/network-status/shop/x.json")).unwrap();
    let status: Value = serde_json::from_str(&status).unwrap();
    let expected = json!({"name": "shop/odd", "interface": "net1", "ips": ["192.0.2.9"],
        "mac": "02:00:00:00:00:09", "default": false, "dns": {}});
    assert_eq!(status[1]["ips"], expected["ips"]);
    node.call("DEL", &x).with("CNI_NETNS", "").run().success();

    let calls = node.take_calls().unwrap();
    assert_eq!(verbs(&calls), ["ADD other net1", "CHECK other net1", "DEL other net1"]);
    let given = json!({
        "cniVersion": "0.4.0", "name": "odd", "type": "other", "colour": "blue", "capabilities": {"mac": true},
        "runtimeConfig": {"mac": "02:00:00:00:00:09"}, "args": {"cni": {"shade": "dark"}}
    });
    let without_previous = |value: &Value| {
        let mut value = value.clone();
        value.as_object_mut().unwrap().remove("prevResult");
        value.as_object_mut().unwrap().remove("capabilities");
        value
    };
    for call in &calls {
        assert_eq!(
            without_previous(&call["stdin"]),
            without_previous(&given),
            "{}",
            call["env"]["CNI_COMMAND"]
        );
        assert_eq!(call["env"]["CNI_CONTAINERID"], json!("c-x"));
    }
    let path = json!(x.namespace.path());
    let netns: Vec<&Value> = calls.iter().map(|call| &call["env"]["CNI_NETNS"]).collect();
    assert_eq!(netns[..2], [&path, &path]);
    assert_eq!(calls[0]["stdin"].get("prevResult"), None);
    assert_eq!(calls[1]["stdin"]["prevResult"]["ips"], result["ips"]);
    assert_eq!(calls[2]["stdin"]["prevResult"]["ips"], result["ips"]);
    Snapshot::take(&node, &[&x]).unwrap().assert_nothing_is_left();
}

#[test]
fn an_external_plugin_is_chained_after_a_native_one() {
    let mut node = node();
    node.plugin("tuning", &json!({})).unwrap();
    let config = json!({
        "cniVersion": "1.0.0", "name": "chained",
        "plugins": [
            {"type": "bridge", "bridge": "br1", "ipam": node.host_local(&["10.53.0.0/24"])},
            {"type": "tuning", "sysctl": {"net.core.somaxconn": "500"}}
        ]
    });
    network_of(&node, "chained", &config);
    node.write("x", &pod("x", &json!({}), &json!("chained"))).unwrap();
    node.start().unwrap();
    let x = Pod::new("x").unwrap();
    node.add(&x).success();
    node.del(&x).success();
    let calls = node.take_calls().unwrap();
    assert_eq!(verbs(&calls), ["ADD tuning net1", "DEL tuning net1"]);
    let expected = json!({
        "cniVersion": "1.0.0",
        "interfaces": [
            {"name": "br1", "mac": "MAC", "mtu": 1500},
            {"name": "HOST", "mac": "MAC", "mtu": 1500},
            {"name": "net1", "mac": "MAC", "mtu": 1500, "sandbox": "POD"}
        ],
        "ips": [{"interface": 2, "address": "10.53.0.2/24", "gateway": "10.53.0.1"}]
    });
    for call in &calls {
        let previous = normalised(call["stdin"]["prevResult"].clone(), &x);
        assert_eq!(previous, expected, "{}", call["env"]["CNI_COMMAND"]);
        assert_eq!(call["stdin"]["sysctl"], json!({"net.core.somaxconn": "500"}));
        assert_eq!(call["stdin"]["name"], json!("chained"));
    }
    Snapshot::take(&node, &[&x]).unwrap().assert_nothing_is_left();
}

#[test]
fn an_external_ipam_plugin_gives_the_addresses_of_a_native_interface() {
    let mut node = node();
    let result = json!({
        "cniVersion": "1.0.0", "ips": [{"address": "10.54.0.7/24", "gateway": "10.54.0.1"}],
        "routes": [{"dst": "10.99.0.0/16"}], "dns": {"nameservers": ["10.54.0.53"]}
    });
    node.plugin("pool", &json!({"ADD": {"result": result}})).unwrap();
    let config = json!({"cniVersion": "1.0.0", "type": "bridge", "bridge": "br2", "ipam": {"type": "pool", "size": 7}});
    network_of(&node, "pooled", &config);
    node.write("x", &pod("x", &json!({}), &json!("pooled"))).unwrap();
    node.start().unwrap();
    let x = Pod::new("x").unwrap();
    node.add(&x).success();
    let seen = Network::of(&x.namespace).unwrap();
    let addresses: Vec<String> = seen.links["net1"].addresses.iter().map(ToString::to_string).collect();
    assert_eq!(addresses, ["10.54.0.7/24"]);
    assert!(seen.routes.contains("10.99.0.0/16 via 10.54.0.1 dev net1"), "{:?}", seen.routes);
    node.check(&x).success();
    node.del(&x).success();
    let calls = node.take_calls().unwrap();
    // The interface's type stays: an IPAM plugin gets the whole configuration.
    assert_eq!(verbs(&calls), ["ADD bridge net1", "CHECK bridge net1", "DEL bridge net1"]);
    assert_eq!(calls[0]["stdin"]["ipam"], json!({"type": "pool", "size": 7}));
    Snapshot::take(&node, &[&x]).unwrap().assert_nothing_is_left();
}

/// Rows: NPWG-7.2-add-fail-fast, NPWG-7.2-del-attempted-only, ADD-02, ADD-03, ADD-04, ENV-22.
#[test]
fn a_failing_attachment_takes_back_the_ones_before_it_in_reverse() {
    let mut node = node();
    node.plugin("one", &json!({})).unwrap();
    node.plugin("two", &json!({"ADD": {"error": {"code": 123, "msg": "no more", "details": "of these"}}}))
        .unwrap();
    node.plugin("three", &json!({})).unwrap();
    for name in ["one", "two", "three"] {
        network_of(&node, name, &json!({"cniVersion": "1.0.0", "type": name}));
    }
    node.write("x", &pod("x", &json!({}), &json!("one, lan, two, three"))).unwrap();
    node.start().unwrap();
    let x = Pod::new("x").unwrap();
    let before = Snapshot::take(&node, &[&x]).unwrap();
    let (code, message) = node.add(&x).failure();
    assert_eq!(code, 123);
    assert_eq!(message, "attach net3 (shop/two): plugin \"two\" failed (ADD): no more: of these");
    assert_eq!(
        verbs(&node.take_calls().unwrap()),
        ["ADD one net1", "ADD two net3", "DEL two net3", "DEL one net1"]
    );
    let after = Snapshot::take(&node, &[&x]).unwrap();
    after.assert_nothing_is_left();
    assert_eq!(after.pods, before.pods);
    node.del(&x).success();
    assert_eq!(node.take_calls().unwrap(), Vec::<Value>::new(), "there is nothing left to take back");
}

/// Rows: NPWG-6.2-order, NPWG-7.3-serial, NPWG-7.2-add-default-fails.
/// Rows: NPWG-7.2-del-all, NPWG-7.2-del-final-error, DEL-03.
#[test]
fn attachments_come_in_order_and_every_one_is_taken_back_whatever_becomes_of_the_others() {
    let mut node = node();
    for name in ["first", "one", "two", "three"] {
        // Calls that overlapped would be recorded out of order.
        node.plugin(name, &json!({"ADD": {"sleepMs": 20}})).unwrap();
    }
    node.plugin("two", &json!({"DEL": {"error": {"code": 100, "msg": "not this one"}}})).unwrap();
    for name in ["one", "two", "three"] {
        network_of(&node, name, &json!({"cniVersion": "1.0.0", "type": name}));
    }
    let default = json!({"cniVersion": "1.0.0", "type": "first"});
    node.write("default", &network("kube-system", "default", &default)).unwrap();
    node.write("x", &pod("x", &json!({}), &json!("one, two, three"))).unwrap();
    node.start().unwrap();
    let x = Pod::new("x").unwrap();
    node.add(&x).success();
    let message = "detach net2 (shop/two): plugin \"two\" failed (DEL): not this one";
    assert_eq!(node.del(&x).failure(), (100, message.to_owned()));
    let added = ["ADD first eth0", "ADD one net1", "ADD two net2", "ADD three net3"];
    let deleted = ["DEL three net3", "DEL two net2", "DEL one net1", "DEL first eth0"];
    assert_eq!(verbs(&node.take_calls().unwrap()), [added, deleted].concat());
    node.plugin("two", &json!({})).unwrap();
    node.del(&x).success();
    node.take_calls().unwrap();

    node.plugin("first", &json!({"ADD": {"error": {"code": 101, "msg": "no"}}})).unwrap();
    assert_eq!(node.add(&x).failure().0, 101);
    assert_eq!(verbs(&node.take_calls().unwrap()), ["ADD first eth0", "DEL first eth0"]);
    Snapshot::take(&node, &[&x]).unwrap().assert_nothing_is_left();
}

/// Rows: DEL-03, DEL-04, NPWG-7.2-del-final-error.
#[test]
fn a_plugin_whose_del_fails_keeps_the_record_and_is_asked_again() {
    let mut node = node();
    node.plugin("one", &json!({"DEL": {"error": {"code": 11, "msg": "not now"}}})).unwrap();
    network_of(&node, "one", &json!({"cniVersion": "1.0.0", "type": "one"}));
    node.write("x", &pod("x", &json!({}), &json!("lan, one"))).unwrap();
    node.start().unwrap();
    let x = Pod::new("x").unwrap();
    node.add(&x).success();
    let (_, message) = node.del(&x).failure();
    assert!(message.contains("not now"), "{message}");
    assert_eq!(link_names(&x), ["lo"], "the rest is taken back all the same");
    assert!(node.path("state/journal/c-x@eth0.jsonl").exists());
    node.plugin("one", &json!({})).unwrap();
    node.del(&x).success();
    assert_eq!(verbs(&node.take_calls().unwrap()), ["ADD one net2", "DEL one net2", "DEL one net2"]);
    Snapshot::take(&node, &[&x]).unwrap().assert_nothing_is_left();
}

/// Rows: EXE-17.
#[test]
fn a_type_listed_under_delegation_exec_is_executed() {
    let mut node = node();
    node.plugin("macvlan", &json!({})).unwrap();
    node.set("delegation", json!({"exec": ["macvlan"]}));
    node.start().unwrap();
    let b = Pod::new("b").unwrap();
    node.add(&b).success();
    assert_eq!(link_names(&b), ["eth0", "lo", "net1"]);
    node.del(&b).success();
    assert_eq!(verbs(&node.take_calls().unwrap()), ["ADD macvlan lan7", "DEL macvlan lan7"]);
    Snapshot::take(&node, &[&b]).unwrap().assert_nothing_is_left();
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

#[test]
fn check_knows_what_the_agents_settings_change_in_the_dataplane() {
    let mut node = Node::new(&[]).unwrap();
    for (key, value) in
        [("acceptICMP", json!(true)), ("establishedOnChange", json!("keep")), ("midstream", json!("drop"))]
    {
        node.set(key, value);
    }
    node.write("a", &pod("a", &json!({}), &json!(""))).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    node.check(&a).success();
    node.del(&a).success();
}
