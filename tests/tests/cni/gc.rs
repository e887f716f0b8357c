//! GC by the real executable and the real agent: which attachments are removed, which are kept, which plugins are
//! called.

use std::fs;
use std::time::Instant;

use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::node::WIRE;
use netattach_tests::plugin_calls::verbs;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{PATIENCE, eventually};
use netattach_tests::{Node, Outcome, Pod};
use serde_json::{Value, json};

/// A node with two networks besides the default one, a macvlan and one of the scripted plugin `odd`, and two pods
/// that have both.
fn node() -> Node {
    let node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    let lan = json!({"cniVersion": "1.1.0", "type": "macvlan", "master": WIRE, "ipam": node.host_local(&["10.52.0.0/24"])});
    node.write("lan", &network(NAMESPACE, "lan", &lan)).unwrap();
    scripted(&node, "odd", &json!({}), &json!({}));
    for name in ["a", "b"] {
        node.write(name, &pod(name, &json!({}), &json!("lan, odd"))).unwrap();
    }
    node
}

/// Defines a network of a scripted plugin of the same name.
fn scripted(node: &Node, name: &str, script: &Value, keys: &Value) {
    node.plugin(name, script).unwrap();
    let mut config = json!({"cniVersion": "1.1.0", "type": name});
    config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    node.write(name, &network(NAMESPACE, name, &config)).unwrap();
}

fn gc(node: &Node, in_use: &[&Pod]) -> Outcome {
    node.gc("pods", Some(in_use))
}

fn id(pod: &Pod, ifname: &str) -> Value {
    json!({"containerID": pod.container, "ifname": ifname})
}

/// Pools of configurations without a `name` lie below their namespace.
const DEFAULT_POOL: &str = "@kube-system/default";
const LAN_POOL: &str = "@shop/lan";

fn leases(node: &Node, network: &str) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(node.path("leases").join(network))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("10.") || name.starts_with("fd"))
        .collect();
    names.sort();
    names
}

/// Rows: CNI-GC-uses-runtime-list, GCC-02, GCC-05, GCC-07, GCC-09.
/// Rows: REQ-09, REQ-10, REQ-23, ENV-25.
#[test]
fn a_sandbox_that_the_runtime_does_not_list_is_taken_back_and_every_plugin_is_told_what_is_in_use() {
    let mut node = node();
    node.start().unwrap();
    let (a, b) = (Pod::new("a").unwrap(), Pod::new("b").unwrap());
    let nothing = Snapshot::take(&node, &[&b]).unwrap();
    node.add(&a).success();
    let only_a = Snapshot::take(&node, &[&a]).unwrap();
    node.add(&b).success();
    node.take_calls().unwrap();

    assert_eq!(gc(&node, &[&a]).success(), Value::Null);

    let calls = node.take_calls().unwrap();
    assert_eq!(verbs(&calls), ["DEL odd net2", "GC odd "]);
    assert_eq!(calls[0]["env"]["CNI_CONTAINERID"], json!("c-b"));
    let in_use = json!([id(&a, "net2")]);
    assert_eq!(
        calls[1]["stdin"],
        json!({"cniVersion": "1.1.0", "name": "odd", "type": "odd",
            "cni.dev/valid-attachments": in_use, "cni.dev/attachments": in_use})
    );
    for name in ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS"] {
        assert_eq!(calls[1]["env"][name], json!(""), "{name}");
    }
    assert_eq!(Snapshot::take(&node, &[&a]).unwrap(), only_a);
    assert_eq!(Snapshot::take(&node, &[&b]).unwrap().pods, nothing.pods);
    assert!(!node.path("run/network-status/shop/b.json").exists());
    node.check(&a).success();
    node.del(&b).success();
    node.del(&a).success();
    Snapshot::take(&node, &[&a, &b]).unwrap().assert_nothing_is_left();
}

/// Rows: REQ-11, GCC-03.
#[test]
fn without_a_list_nothing_is_done_and_with_an_empty_one_everything_goes() {
    let mut node = node();
    node.start().unwrap();
    let (a, b) = (Pod::new("a").unwrap(), Pod::new("b").unwrap());
    node.add(&a).success();
    node.add(&b).success();
    node.take_calls().unwrap();
    node.gc("pods", None).success();
    assert_eq!(node.take_calls().unwrap(), Vec::<Value>::new());
    node.check(&a).success();
    node.take_calls().unwrap();

    gc(&node, &[]).success();
    let called = verbs(&node.take_calls().unwrap());
    assert_eq!(called, ["DEL odd net2", "DEL odd net2", "GC odd "]);
    Snapshot::take(&node, &[&a, &b]).unwrap().assert_nothing_is_left();
}

/// Rows: GCC-10.
#[test]
fn the_sandboxes_of_another_configuration_are_left_alone_and_in_use() {
    let mut node = node();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let before = Snapshot::take(&node, &[&a]).unwrap();
    node.take_calls().unwrap();
    node.gc("others", Some(&[])).success();
    let calls = node.take_calls().unwrap();
    assert_eq!(verbs(&calls), ["GC odd "]);
    assert_eq!(calls[0]["stdin"]["cni.dev/valid-attachments"], json!([id(&a, "net2")]));
    assert_eq!(Snapshot::take(&node, &[&a]).unwrap(), before);
    node.check(&a).success();
}

/// Rows: CNI-GC-continue, GCC-05, GCC-07.
#[test]
fn what_fails_does_not_keep_the_others_from_being_asked() {
    let mut node = node();
    let failing = |code: u32, msg: &str| json!({"GC": {"error": {"code": code, "msg": msg}}});
    scripted(&node, "one", &failing(101, "not one"), &json!({}));
    scripted(&node, "two", &failing(102, "not two"), &json!({}));
    node.write("x", &pod("x", &json!({}), &json!("one, odd"))).unwrap();
    node.start().unwrap();
    let x = Pod::new("x").unwrap();
    node.add(&x).success();
    node.take_calls().unwrap();
    let (code, message) = gc(&node, &[]).failure();
    assert_eq!(
        (code, &*message),
        (
            101,
            "GC of network shop/one: plugin \"one\" failed (GC): not one; \
             GC of network shop/two: plugin \"two\" failed (GC): not two"
        )
    );
    let mut called = verbs(&node.take_calls().unwrap());
    called[2..].sort();
    assert_eq!(called, ["DEL odd net2", "DEL one net1", "GC odd ", "GC one ", "GC two "]);
    Snapshot::take(&node, &[&x]).unwrap().assert_nothing_is_left();
}

/// Rows: GCC-01, VER-25.
#[test]
fn networks_that_disable_it_or_are_too_old_for_it_are_not_asked() {
    let mut node = node();
    let disabled = json!({"cniVersion": "1.1.0", "disableGC": true, "plugins": [{"type": "odd"}]});
    node.write("odd", &network(NAMESPACE, "odd", &disabled)).unwrap();
    scripted(&node, "old", &json!({}), &json!({"cniVersion": "1.0.0"}));
    node.write("a", &pod("a", &json!({}), &json!("odd, old"))).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    // The record of the attachment has the key too, if the definition is deleted.
    node.remove("odd").unwrap();
    node.take_calls().unwrap();
    gc(&node, &[&a]).success();
    assert_eq!(node.take_calls().unwrap(), Vec::<Value>::new());
    node.del(&a).success();
}

/// Rows: CNI-GC-uses-runtime-list.
#[test]
fn a_network_whose_definition_is_gone_is_asked_from_memory() {
    let mut node = node();
    let keys = json!({"colour": "blue", "capabilities": {"mac": true}});
    scripted(&node, "odd", &json!({}), &keys);
    let networks = json!([{"name": "odd", "mac": "02:00:00:00:00:09"}]);
    node.write("a", &pod("a", &json!({}), &networks)).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    node.remove("odd").unwrap();
    let is_gone = || node.ctl(&["status"]).unwrap()["ready"].to_string().contains(" 2 networks");
    assert!(eventually(PATIENCE, is_gone), "{:#}", node.ctl(&["status"]).unwrap());
    node.take_calls().unwrap();
    gc(&node, &[&a]).success();
    let calls = node.take_calls().unwrap();
    let in_use = json!([id(&a, "net1")]);
    let stdin: Vec<&Value> = calls.iter().map(|call| &call["stdin"]).collect();
    let expected = json!({"cniVersion": "1.1.0", "name": "odd", "type": "odd", "colour": "blue",
        "capabilities": {"mac": true}, "cni.dev/valid-attachments": in_use, "cni.dev/attachments": in_use});
    assert_eq!(stdin, [&expected]);
    node.del(&a).success();
}

#[test]
fn a_lease_that_no_record_has_is_released_unless_the_runtime_knows_its_container() {
    let mut node = node();
    let mut default = node.default_config();
    default["cniVersion"] = json!("1.1.0");
    node.write("default", &network("kube-system", "default", &default)).unwrap();
    node.start().unwrap();
    let (a, stranger) = (Pod::new("a").unwrap(), Pod::new("b").unwrap());
    node.add(&a).success();
    let held = (leases(&node, DEFAULT_POOL), leases(&node, LAN_POOL));
    let reserve = |network: &str, address: &str, ifname: &str| {
        let content = format!("{}\r\n{ifname}", stranger.container);
        fs::write(node.path("leases").join(network).join(address), content).unwrap();
    };
    let plant = || {
        reserve(DEFAULT_POOL, "10.50.0.98", "net1");
        reserve(DEFAULT_POOL, "10.50.0.99", "eth0");
        reserve(LAN_POOL, "10.52.0.99", "net1");
    };
    let has = |network: &str, address: &str| leases(&node, network).contains(&address.to_owned());

    plant();
    gc(&node, &[&a, &stranger]).success();
    assert!(
        has(DEFAULT_POOL, "10.50.0.98"),
        "another plugin may have attached it to the default network once more"
    );
    assert!(has(DEFAULT_POOL, "10.50.0.99"), "in use, says the runtime");
    assert!(has(LAN_POOL, "10.52.0.99"), "nobody knows whether its container has this network");
    gc(&node, &[&a]).success();
    assert_eq!((leases(&node, DEFAULT_POOL), leases(&node, LAN_POOL)), held);
    node.check(&a).success();
    node.del(&a).success();
}

#[test]
fn a_plugin_that_is_not_on_this_node_is_missed_only_where_it_is_used() {
    let mut node = node();
    let absent = json!({"cniVersion": "1.1.0", "type": "elsewhere"});
    node.write("elsewhere", &network(NAMESPACE, "elsewhere", &absent)).unwrap();
    node.start().unwrap();
    gc(&node, &[]).success();
    node.plugin("elsewhere", &json!({})).unwrap();
    node.write("x", &pod("x", &json!({}), &json!("elsewhere"))).unwrap();
    let x = Pod::new("x").unwrap();
    assert!(eventually(PATIENCE, || node.call("ADD", &x).run().exit == 0));
    fs::remove_file(node.path("cni-bin/elsewhere")).unwrap();
    let (code, message) = gc(&node, &[&x]).failure();
    let looked = format!(
        "GC of network shop/elsewhere: failed to find plugin \"elsewhere\" in path [/nonexistent/cni-bin {}]",
        node.path("cni-bin").display()
    );
    assert_eq!((code, message), (7, looked));
}

/// An ADD in progress, which the runtime cannot have listed yet, keeps its attachment and is passed to plugins as
/// valid.
///
/// Rows: CNI-GC-exclusive, GCC-08, ADD-09.
#[test]
fn gc_leaves_alone_who_is_under_way_and_its_networks_plugin_is_asked_by_one_at_a_time() {
    let mut node = node();
    let slow = json!({"ADD": {"sleepMs": 400}, "GC": {"sleepMs": 400}});
    scripted(&node, "odd", &slow, &json!({}));
    node.start().unwrap();
    let (a, b) = (Pod::new("a").unwrap(), Pod::new("b").unwrap());
    let calls = || fs::read_to_string(node.path("calls")).unwrap_or_default();
    let ended = |run: &dyn Fn() -> Outcome| {
        run().success();
        Instant::now()
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| ended(&|| node.call("ADD", &a).run()));
        assert!(eventually(PATIENCE, || calls().contains("\"ADD\"")));
        let collect = scope.spawn(|| ended(&|| gc(&node, &[])));
        // The plugin's GC runs: the first ADD has left the plugin.
        assert!(eventually(PATIENCE, || calls().contains("\"GC\"")));
        let second = scope.spawn(|| ended(&|| node.call("ADD", &b).run()));
        let (_, collect, second) = (first.join().unwrap(), collect.join().unwrap(), second.join().unwrap());
        assert!(collect < second, "it has the same network");
    });
    let calls = node.take_calls().unwrap();
    assert_eq!(verbs(&calls), ["ADD odd net2", "GC odd ", "ADD odd net2"]);
    assert_eq!(calls[1]["stdin"]["cni.dev/valid-attachments"], json!([id(&a, "net2")]));
    node.check(&a).success();
    node.check(&b).success();
    node.del(&a).success();
    node.del(&b).success();
    Snapshot::take(&node, &[&a, &b]).unwrap().assert_nothing_is_left();
}
