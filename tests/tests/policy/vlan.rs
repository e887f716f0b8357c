//! Policies on VLANs of a wire, one inside another, and what a dummy is: an interface that leads nowhere.
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
    // The parent is nobody's while it carries one, also for an agent that has not made it itself.
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
