//! Policies on VLANs of a wire, one inside another, and the use of a dummy: an interface that leads nowhere.
//!
//! They run where the kernel has the drivers.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use netattach::netlink::Handle;
use netattach::spec::{LinkMode, VlanTag};
use netattach_tests::manifest::{NAMESPACE, network, pod, policy};
use netattach_tests::node::{WIRE, ip};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::tools::{has_driver, report_skipped};
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, connects};
use netattach_tests::{Namespace, Node, Pod};
use serde_json::{Value, json};

/// Rows: VLN-master-gone, VLN-one-pod, MVL-linkInContainer, HDV-in-use.
#[test]
fn policies_hold_on_vlans_of_a_wire_and_each_has_one_pod() {
    if !["vlan", "dummy"].into_iter().all(has_driver) {
        return report_skipped("policies_hold_on_vlans", "the kernel has no vlan or no dummy");
    }
    let mut node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    let fixed = |address: &str| json!({"type": "static", "addresses": [{"address": address}]});
    let networks = [
        ("outer", json!({"type": "vlan", "master": WIRE, "vlanId": 5, "ipam": fixed("10.70.0.1/24")})),
        ("inner", json!({"type": "vlan", "master": "net1", "linkInContainer": true, "vlanId": 7})),
        ("nowhere", json!({"type": "dummy", "ipam": fixed("10.71.0.1/32")})),
    ];
    for (name, mut config) in networks {
        config["cniVersion"] = json!("1.0.0");
        node.write(&format!("net-{name}"), &network(NAMESPACE, name, &config)).unwrap();
    }
    let rules = json!({
        "podSelector": {"matchLabels": {"app": "a"}}, "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"port": 80}]}],
    });
    node.write("rules", &policy("rules", "outer", &rules)).unwrap();
    let wire = json!({"cniVersion": "1.0.0", "type": "host-device", "device": WIRE});
    node.write("net-wire", &network(NAMESPACE, "wire", &wire)).unwrap();
    for (name, networks) in [("a", "outer, inner, nowhere"), ("b", "outer"), ("c", "wire")] {
        node.write(name, &pod(name, &json!({"app": name}), &json!(networks))).unwrap();
    }
    let outside = Namespace::new().unwrap();
    // `ip` takes a task for the namespace that it is in.
    let task = outside.path().ancestors().nth(2).and_then(Path::file_name).unwrap().to_str().unwrap();
    ip(&node.namespace, &["link", "set", "wire1", "netns", task]).unwrap();
    ip(&outside, &["link", "set", "wire1", "up"]).unwrap();
    ip(&outside, &["link", "add", "link", "wire1", "name", "v5", "type", "vlan", "id", "5"]).unwrap();
    ip(&outside, &["addr", "add", "10.70.0.9/24", "dev", "v5"]).unwrap();
    ip(&outside, &["link", "set", "v5", "up"]).unwrap();
    node.start().unwrap();

    let [a, b, c] = ["a", "b", "c"].map(|name| Pod::new(name).unwrap());
    node.add(&a).success();
    node.check(&a).success();
    let at = |port| SocketAddr::from((IpAddr::from([10, 70, 0, 1]), port));
    let _servers = [80, 81].map(|port| Echo::serve(&a.namespace, at(port)).unwrap());
    assert!(connects(&outside, at(80), PATIENCE));
    assert!(!connects(&outside, at(81), SILENCE));

    let mut inside = Handle::open_in(a.namespace.netns()).unwrap();
    let found = |inside: &mut Handle, name: &str| {
        let link = inside.link(name).unwrap();
        (link.kind, link.mode)
    };
    let vlan = |id| ("vlan".to_owned(), Some(LinkMode::Vlan(VlanTag { id, service: false })));
    assert_eq!([found(&mut inside, "net1"), found(&mut inside, "net2")], [vlan(5), vlan(7)]);
    assert_eq!(found(&mut inside, "net3"), ("dummy".to_owned(), None));
    let rows = node.ctl(&["attachments", "--pod", &format!("{NAMESPACE}/a")]).unwrap();
    let told: Vec<(&Value, Option<&Value>)> = rows
        .as_array()
        .unwrap()
        .iter()
        .filter(|row| row["ifname"] != "eth0")
        .map(|row| (&row["enforcement"], row.get("fast_path")))
        .collect();
    assert_eq!(told, [(&json!("full-unless-privileged"), None); 3]);

    let (code, message) = node.add(&b).failure();
    assert_eq!(code, 11, "{message}");
    let expected = format!(
        "{WIRE} has an interface of VLAN 5 already; macvlans or a bridge on that one serve several pods"
    );
    assert!(message.ends_with(&expected), "{message}");
    // No pod can have the parent as a device while it carries one, also for an agent that has not created it itself.
    for _ in 0..2 {
        let (code, message) = node.add(&c).failure();
        let expected = format!("device {WIRE} stays on the node: it carries interfaces of pods");
        assert_eq!((code, message.ends_with(&expected)), (11, true), "{message}");
        node.kill().unwrap();
        node.start().unwrap();
    }
    node.del(&a).success();
    node.add(&b).success();
    // The parent is gone before the DEL: the reference fails then.
    ip(&node.namespace, &["link", "del", WIRE]).unwrap();
    node.del(&b).success();
    Snapshot::take(&node, &[&a, &b, &c]).unwrap().assert_nothing_is_left();
}

/// The host beyond the wire, on it and on two VLANs of it.
const OUTSIDE: [&str; 3] = ["10.52.0.9", "10.53.0.9", "10.54.0.9"];

/// Returns a node with a VLAN of its wire, and networks of macvlans on both and of another VLAN; and the outside
/// host.
fn with_vlans() -> (Node, Namespace) {
    let mut node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    let tagged = ["link", "add", "link", WIRE, "name", "tagged0", "up", "type", "vlan", "id", "5"];
    ip(&node.namespace, &tagged).unwrap();
    let own = json!({"type": "static", "addresses": [{"address": "10.54.0.2/24"}]});
    let networks = [
        ("plain", json!({"type": "macvlan", "master": WIRE, "ipam": node.host_local(&["10.52.0.0/24"])})),
        (
            "tagged",
            json!({"type": "macvlan", "master": "tagged0", "ipam": node.host_local(&["10.53.0.0/24"])}),
        ),
        ("own", json!({"type": "vlan", "master": WIRE, "vlanId": 6, "ipam": own})),
    ];
    for (name, mut config) in networks {
        config["cniVersion"] = json!("1.0.0");
        node.write(&format!("net-{name}"), &network(NAMESPACE, name, &config)).unwrap();
    }
    let rules = json!({
        "podSelector": {"matchLabels": {"app": "t"}}, "policyTypes": ["Egress"], "egress": [{"ports": [{"port": 80}]}]
    });
    node.write("rules", &policy("rules", "tagged", &rules)).unwrap();
    for (name, networks) in [("p", "plain"), ("t", "tagged"), ("v", "own"), ("both", "plain, tagged")] {
        node.write(name, &pod(name, &json!({"app": name}), &json!(networks))).unwrap();
    }
    let outside = Namespace::new().unwrap();
    ip(&node.namespace, &["link", "set", "wire1", "netns", &outside.task()]).unwrap();
    ip(&outside, &["link", "set", "wire1", "up"]).unwrap();
    for (device, id) in [("v5", "5"), ("v6", "6")] {
        ip(&outside, &["link", "add", "link", "wire1", "name", device, "up", "type", "vlan", "id", id])
            .unwrap();
    }
    for (device, address) in ["wire1", "v5", "v6"].into_iter().zip(OUTSIDE) {
        ip(&outside, &["addr", "add", &format!("{address}/24"), "dev", device]).unwrap();
    }
    node.start().unwrap();
    (node, outside)
}

/// If the kernel reports the namespace of a frame's socket, a frame that comes down from a VLAN is not attributed by
/// its address on the parent.
///
/// Rows: MVL-vlan.
#[test]
fn policies_hold_on_vlans_beside_macvlans_on_their_parent() {
    if !has_driver("vlan") {
        return report_skipped("policies_hold_on_vlans_beside_macvlans", "the kernel has no vlan");
    }
    let (mut node, outside) = with_vlans();
    let at = |number: usize, port| SocketAddr::new(OUTSIDE[number].parse().unwrap(), port);
    let _servers = [at(0, 80), at(1, 80), at(1, 81), at(2, 80)].map(|it| Echo::serve(&outside, it).unwrap());
    let [p, t, v, both] = ["p", "t", "v", "both"].map(|name| Pod::new(name).unwrap());
    let all = [&p, &t, &v, &both];
    for pod in all {
        node.add(pod).success();
        node.check(pod).success();
    }
    // A pod that has a macvlan on the parent too could send identical frames by a VLAN that it creates itself.
    let by_both = !netattach::bpf::probe::has_netns_cookie();
    let attempts = [
        (&p, at(0, 80), true),
        (&t, at(1, 80), true),
        (&t, at(1, 81), false),
        (&v, at(2, 80), true),
        (&both, at(0, 80), true),
        (&both, at(1, 80), by_both),
    ];
    let surprises = || {
        let reached = |pod: &Pod, to, expected: bool| {
            connects(&pod.namespace, to, if expected { PATIENCE } else { SILENCE })
        };
        let wrong = attempts.iter().filter(|(pod, to, expected)| reached(pod, *to, *expected) != *expected);
        wrong.map(|(pod, to, _)| format!("{} to {to}", pod.name)).collect::<Vec<_>>()
    };
    assert_eq!(surprises(), Vec::<String>::new());
    node.kill().unwrap();
    node.start().unwrap();
    assert_eq!(surprises(), Vec::<String>::new());
    // Without a macvlan on the parent frames are not attributed there, and with the next one they are again.
    node.del(&both).success();
    node.del(&p).success();
    assert!(connects(&t.namespace, at(1, 80), PATIENCE));
    node.add(&p).success();
    assert!(connects(&t.namespace, at(1, 80), PATIENCE) && connects(&v.namespace, at(2, 80), PATIENCE));
    for pod in [&p, &t, &v] {
        node.del(pod).success();
    }
    ip(&node.namespace, &["link", "del", "tagged0"]).unwrap();
    Snapshot::take(&node, &all).unwrap().assert_nothing_is_left();
}

/// A VLAN whose address nobody has set has that of its parent. As on an ipvlan, see `ipvlan`.
///
/// Rows: VLN-parent-mac.
#[test]
fn a_pod_on_a_vlan_follows_a_parent_that_gets_another_ethernet_address() {
    if !has_driver("vlan") {
        return report_skipped("a_pod_on_a_vlan_follows_a_parent", "the kernel has no vlan");
    }
    let (node, outside) = with_vlans();
    let to = SocketAddr::new(OUTSIDE[2].parse().unwrap(), 80);
    let _server = Echo::serve(&outside, to).unwrap();
    let v = Pod::new("v").unwrap();
    node.add(&v).success();
    assert!(connects(&v.namespace, to, PATIENCE));
    let own = || Handle::open_in(v.namespace.netns()).unwrap().link("net1").unwrap().mac.unwrap().to_string();
    let change = |mac: &str| ip(&node.namespace, &["link", "set", WIRE, "address", mac]).unwrap();
    change("02:00:00:00:00:77");
    assert_eq!(own(), "02:00:00:00:00:77");
    assert!(connects(&v.namespace, to, PATIENCE));
    node.check(&v).success();
    // An address that was set stays, and the pod may send from no other.
    ip(&v.namespace, &["link", "set", "net1", "address", "02:00:00:00:00:99"]).unwrap();
    change("02:00:00:00:00:78");
    assert_eq!(own(), "02:00:00:00:00:99");
    assert!(!connects(&v.namespace, to, SILENCE));
    node.check(&v).failure();
    node.del(&v).success();
    ip(&node.namespace, &["link", "del", "tagged0"]).unwrap();
    Snapshot::take(&node, &[&v]).unwrap().assert_nothing_is_left();
}
