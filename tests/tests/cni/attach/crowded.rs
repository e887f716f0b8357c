//! Pods that administrate their network, and have created more objects there than an agent reads, or changed their
//! interfaces: they are detached like others.

use std::collections::BTreeSet;

use netattach::netlink::Handle;
use netattach_tests::crowd::{address, crowd, crowd_of_rules};
use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::node::ip;
use netattach_tests::snapshot::{Network, Snapshot};
use netattach_tests::{Namespace, Node, Pod};
use serde_json::{Value, json};

/// Returns a node with the device `card`, a bridge, and a network whose routes are in tables by source; the pod `a`
/// has the device, the bridge twice, so that it needs rules by source address, and the last one.
fn node() -> Node {
    let mut node = Node::new(&[]).unwrap();
    ip(&node.namespace, &["link", "add", "card", "type", "veth", "peer", "name", "far"]).unwrap();
    let flat = json!({"cniVersion": "1.0.0", "type": "bridge", "bridge": "br1", "isGateway": true,
        "ipam": node.host_local(&["10.53.0.0/24", "fd00:53::/64"])});
    let device = json!({"cniVersion": "1.0.0", "type": "host-device", "device": "card"});
    let mut ipam = node.host_local(&["10.54.0.0/24"]);
    ipam["routes"] = json!([{"dst": "0.0.0.0/0"}]);
    let sbr = json!({"cniVersion": "1.0.0", "name": "sbr", "plugins": [
        {"type": "bridge", "bridge": "br2", "isGateway": true, "ipam": ipam}, {"type": "sbr"}
    ]});
    for (name, config) in [("flat", flat), ("device", device), ("sbr", sbr)] {
        node.write(name, &network(NAMESPACE, name, &config)).unwrap();
    }
    node.write("a", &pod("a", &json!({}), &json!("flat, flat, device, sbr"))).unwrap();
    node.start().unwrap();
    node
}

/// Returns the links and routes that its agent created in the pod, without links of the pod's own.
fn ours(pod: &Namespace) -> (BTreeSet<String>, Vec<String>) {
    let mut all = pod.run(Handle::open).unwrap();
    let links = all.links().unwrap().into_iter().map(|link| link.name);
    let rules = all.rules().unwrap().into_iter().map(|rule| rule.source.to_string());
    (
        links.filter(|name| !name.starts_with("own")).collect(),
        rules.filter(|source| !source.starts_with("11.")).collect(),
    )
}

#[test]
fn a_pod_with_more_links_routes_and_rules_than_are_read_is_detached_whole() {
    let node = node();
    let a = Pod::new("a").unwrap();
    let before = Network::of(&node.namespace).unwrap();
    node.add(&a).success();
    let (links, rules) = ours(&a.namespace);
    assert_eq!(links.iter().collect::<Vec<_>>(), ["eth0", "lo", "net1", "net2", "net3", "net4"]);
    let expected = ["10.53.0.2", "10.53.0.3", "10.54.0.2", "fd00:53::2", "fd00:53::3"].map(str::to_owned);
    assert_eq!(rules.iter().cloned().collect::<BTreeSet<_>>(), expected.into());

    a.namespace.loopback_up().unwrap();
    crowd(&a.namespace, Handle::routes, |number| format!("route add {} dev lo", address(number))).unwrap();
    crowd_of_rules(&a.namespace).unwrap();
    let links = |number| format!("link add own{number} type veth peer name own{number}p");
    crowd(&a.namespace, Handle::links, links).unwrap();
    // The device has another name now.
    ip(&a.namespace, &["link", "set", "net3", "down", "name", "mine"]).unwrap();

    assert_eq!(node.del(&a).success(), Value::Null);
    let (links, rules) = ours(&a.namespace);
    assert_eq!((links, rules), (["lo".to_owned()].into(), Vec::new()));
    let after = Network::of(&node.namespace).unwrap();
    assert_eq!(after.links["card"], before.links["card"]);
    let mut left = Snapshot::take(&node, &[]).unwrap();
    left.node.links.retain(|name, _| !before.links.contains_key(name));
    left.assert_nothing_is_left();
}

/// Names and groups of its links are the pod's own affair.
#[test]
fn a_pod_that_has_given_name_and_group_of_its_interface_to_lo_is_detached_whole() {
    let node = node();
    let a = Pod::new("a").unwrap();
    let before = Network::of(&node.namespace).unwrap();
    node.add(&a).success();
    let mut inside = Handle::open_in(a.namespace.netns()).unwrap();
    let [own, lo] = ["net1", "lo"].map(|name| inside.link(name).unwrap());
    ip(&a.namespace, &["link", "set", "net1", "down"]).unwrap();
    inside.rename(own.index, "mine").unwrap();
    inside.set_group(own.index, 0).unwrap();
    ip(&a.namespace, &["link", "set", "lo", "down"]).unwrap();
    inside.rename(lo.index, "net1").unwrap();
    inside.set_group(lo.index, own.group).unwrap();

    assert_eq!(node.del(&a).success(), Value::Null);
    assert_eq!(ours(&a.namespace), (["net1".to_owned()].into(), Vec::new()));
    let mut left = Snapshot::take(&node, &[]).unwrap();
    left.node.links.retain(|name, _| !before.links.contains_key(name));
    left.assert_nothing_is_left();
}
