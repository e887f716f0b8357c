//! A second ADD for an attached sandbox, with `repeatedAdd: return`.

use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::node::ip;
use netattach_tests::plugin_calls::verbs;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{PATIENCE, eventually};
use netattach_tests::{Call, Node, Pod};
use serde_json::{Value, json};

/// A started node with a routed network `storage`, a network `chain` whose second plugin is scripted, and a pod `a`
/// that has both.
fn node() -> Node {
    let mut node = Node::new(&[pod("a", &json!({}), &json!("storage, chain"))]).unwrap();
    node.write("storage", &network(NAMESPACE, "storage", &storage(&node, 1400))).unwrap();
    let veth = json!({"type": "veth", "ipam": node.host_local(&["10.52.0.0/24"])});
    let chain = json!({"cniVersion": "1.0.0", "plugins": [veth, {"type": "scripted"}]});
    node.write("chain", &network(NAMESPACE, "chain", &chain)).unwrap();
    node.plugin("scripted", &json!({})).unwrap();
    node.set("repeatedAdd", json!("return"));
    node.start().unwrap();
    node
}

fn storage(node: &Node, mtu: u32) -> Value {
    json!({"cniVersion": "1.0.0", "type": "veth", "mtu": mtu, "ipam": node.host_local(&["10.51.0.0/24"])})
}

/// Rows: ADD-07.
#[test]
fn the_same_request_gets_the_first_result_and_changes_nothing() {
    let mut node = node();
    let a = Pod::new("a").unwrap();
    let first = node.add(&a).success();
    node.await_status(&a);
    let before = Snapshot::take(&node, &[&a]).unwrap();
    node.take_calls().unwrap();

    assert_eq!(node.add(&a).success(), first);
    assert_eq!(verbs(&node.take_calls().unwrap()), ["CHECK scripted net2"]);
    // The same namespace by another path.
    let path = a.namespace.path().to_string_lossy().replacen("/proc/", "/proc/./", 1);
    assert_eq!(node.call("ADD", &a).with("CNI_NETNS", &path).run().success(), first);
    let older = node.call("ADD", &a).stdin(node.cni_config("0.4.0")).run().success();
    assert_eq!((&older["cniVersion"], &older["ips"][0]["version"]), (&json!("0.4.0"), &json!("4")));
    node.kill().unwrap();
    node.start().unwrap();
    assert_eq!(node.add(&a).success(), first, "after a restart");
    node.await_status(&a);
    assert_eq!(Snapshot::take(&node, &[&a]).unwrap(), before);

    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

#[test]
fn another_request_is_refused_by_what_is_different() {
    let node = node();
    let (a, other) = (Pod::new("a").unwrap(), Pod::new("other").unwrap());
    node.add(&a).success();
    node.await_status(&a);
    let before = Snapshot::take(&node, &[&a]).unwrap();
    // The agent needs some time to notice changed manifests.
    let refused = |call: Call, what: &str| {
        let start = "container c-a is attached with interface eth0 already, but not as this ADD requests: ";
        let mut last = Value::Null;
        let is_it = || {
            last = call.run().json;
            let msg = last["msg"].as_str().unwrap_or_default();
            last["code"] == 4 && msg.starts_with(start) && msg.contains(what)
        };
        assert!(eventually(PATIENCE, is_it), "{what} does not come: {last:#}");
    };
    let again = || node.call("ADD", &a);
    let netns = other.namespace.path().to_string_lossy();
    refused(again().with("CNI_NETNS", &netns), "CNI_NETNS is a different namespace; DEL it first");
    refused(again().with("CNI_PATH", "/nonexistent/other"), "CNI_PATH differs");
    node.write("storage", &network(NAMESPACE, "storage", &storage(&node, 1300))).unwrap();
    refused(again(), "net1 (shop/storage) has another way to create veth ");
    node.write("manifest-00", &pod("a", &json!({}), &json!("chain"))).unwrap();
    let what = "it has eth0 (kube-system/default), net1 (shop/storage), net2 (shop/chain) and is to have eth0 \
                (kube-system/default), net1 (shop/chain); DEL it first";
    refused(again(), what);
    assert_eq!(Snapshot::take(&node, &[&a]).unwrap(), before);
    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

#[test]
fn a_sandbox_that_is_not_what_it_was_is_refused_by_what_check_says() {
    let node = node();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    ip(&a.namespace, &["link", "set", "net1", "down"]).unwrap();
    let said = "container c-a is attached with interface eth0 already, but not as its ADD left it; DEL it first: \
                net1 (shop/storage): interface net1 is down";
    assert_eq!(node.add(&a).failure(), (4, said.to_owned()));
    node.del(&a).success();
    node.add(&a).success();
    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}
