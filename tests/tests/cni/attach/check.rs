//! CHECK of whole pods: the error names the missing part.

use std::fs;

use netattach::netlink::Handle;
use netattach_tests::manifest::pod;
use netattach_tests::node::{WIRE, ip};
use netattach_tests::plugin_calls::verbs;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};

use super::{network_of, node, serving};

/// The damage that a test does, and CHECK's message about it.
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
