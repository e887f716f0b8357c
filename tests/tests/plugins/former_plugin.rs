//! Pods that another plugin attached before netattach was installed on the node: their DEL is carried out from the
//! cache of the container runtime's libcni.

use std::fs;
use std::path::PathBuf;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use netattach_tests::manifest::pod;
use netattach_tests::node::{DEFAULT_NETWORK, Node, Pod};
use serde_json::{Value, json};

/// Returns a node with an executed plugin `former` and libcni's cache of its ADD for the pod `old`.
fn scene() -> (Node, Pod) {
    let mut node = Node::new(&[pod("old", &json!({}), &Value::Null)]).unwrap();
    node.plugin("former", &json!({})).unwrap();
    node.plugin("chained", &json!({})).unwrap();
    node.start().unwrap();
    let old = Pod::new("old").unwrap();
    fs::create_dir_all(node.path("cni-cache/results")).unwrap();
    (node, old)
}

fn file(node: &Node, network: &str, ifname: &str) -> PathBuf {
    node.path("cni-cache/results").join(format!("{network}-c-old-{ifname}"))
}

fn cached(network: &str, ifname: &str, plugins: &Value) -> Value {
    let config = json!({"cniVersion": "1.0.0", "name": network, "plugins": plugins});
    json!({
        "kind": "cniCacheV1", "containerId": "c-old", "config": STANDARD.encode(config.to_string()),
        "ifName": ifname, "networkName": network, "netns": "/run/netns/gone",
        "cniArgs": [["IgnoreUnknown", "1"], ["K8S_POD_NAME", "old"]],
        "capabilityArgs": {"portMappings": [{"hostPort": 80}]},
        "result": {"cniVersion": "1.0.0", "interfaces": [{"name": ifname, "sandbox": "/run/netns/gone"}]},
    })
}

fn remember(node: &Node, network: &str, ifname: &str, plugins: &Value) {
    fs::write(file(node, network, ifname), cached(network, ifname, plugins).to_string()).unwrap();
}

fn former() -> Value {
    json!([{"type": "former", "key": 1}, {"type": "chained", "capabilities": {"portMappings": true}}])
}

#[test]
fn the_former_plugins_get_their_del_in_reverse_order_and_their_entry_goes() {
    let (node, old) = scene();
    remember(&node, "cbr0", "eth0", &former());
    // Entries of the runtime: of its other attachments, and of netattach's network.
    remember(&node, "cni-loopback", "lo", &former());
    remember(&node, "pods", "eth0", &json!([{"type": "netattach"}]));
    node.del(&old).success();

    let calls = node.take_calls().unwrap();
    let calls: Vec<&Value> = calls.iter().filter(|call| call["env"]["CNI_COMMAND"] == "DEL").collect();
    let of = |call: &Value| call["stdin"]["type"].as_str().unwrap_or_default().to_owned();
    assert_eq!(calls.iter().map(|call| of(call)).collect::<Vec<_>>(), ["chained", "former"], "{calls:#?}");
    for call in &calls {
        assert_eq!(call["env"]["CNI_IFNAME"], "eth0");
        assert_eq!(call["env"]["CNI_ARGS"], "IgnoreUnknown=1;K8S_POD_NAME=old");
        assert_eq!(call["stdin"]["prevResult"]["interfaces"][0]["name"], "eth0");
        assert_eq!(call["stdin"]["name"], "cbr0");
    }
    assert_eq!(calls[0]["stdin"]["runtimeConfig"], json!({"portMappings": [{"hostPort": 80}]}));
    assert!(!file(&node, "cbr0", "eth0").exists());
    assert!(file(&node, "cni-loopback", "lo").exists() && file(&node, "pods", "eth0").exists());

    node.del(&old).success();
    assert_eq!(node.take_calls().unwrap(), [] as [Value; 0]);
}

#[test]
fn a_del_that_the_former_plugin_refuses_fails_and_is_repeated() {
    let (node, old) = scene();
    remember(&node, "cbr0", "eth0", &former());
    node.plugin("former", &json!({"DEL": {"error": {"code": 11, "msg": "not now"}}})).unwrap();
    let (code, message) = node.del(&old).failure();
    assert_eq!((code, message.contains("not now")), (11, true), "{message}");
    assert!(file(&node, "cbr0", "eth0").exists());
    node.plugin("former", &json!({})).unwrap();
    node.del(&old).success();
    assert!(!file(&node, "cbr0", "eth0").exists());
}

#[test]
fn a_del_that_came_while_no_agent_ran_reaches_the_former_plugin() {
    let (mut node, old) = scene();
    remember(&node, "cbr0", "eth0", &former());
    node.kill().unwrap();
    node.del(&old).success();
    assert!(file(&node, "cbr0", "eth0").exists());
    node.start().unwrap();
    assert!(!file(&node, "cbr0", "eth0").exists());
    assert_eq!(fs::read_dir(node.path("state/pending")).unwrap().count(), 0);
}

#[test]
fn bad_and_huge_files_are_named_and_stay() {
    let (node, old) = scene();
    let huge = " ".repeat((4 << 20) + 1);
    for (content, expected) in
        [("", "the file is empty"), ("{", "not a cached attachment"), (&huge, "longer than")]
    {
        fs::write(file(&node, "cbr0", "eth0"), content).unwrap();
        let (code, message) = node.del(&old).failure();
        let named =
            message.contains("what libcni remembers of the container") && message.contains("cbr0-c-old-eth0");
        assert_eq!((code, named, message.contains(expected)), (5, true, true), "{message}");
        assert!(file(&node, "cbr0", "eth0").exists());
    }
    remember(&node, "cbr0", "eth0", &json!("none"));
    let (code, message) = node.del(&old).failure();
    assert_eq!((code, message.contains("in which libcni remembers the container")), (6, true), "{message}");
    fs::remove_file(file(&node, "cbr0", "eth0")).unwrap();
    node.del(&old).success();
}

#[test]
fn an_entry_of_a_container_that_netattach_knows_is_left_alone() {
    let (node, old) = scene();
    node.add(&old).success();
    remember(&node, "cbr0", "eth0", &former());
    node.del(&old).success();
    assert!(file(&node, "cbr0", "eth0").exists(), "{DEFAULT_NETWORK} was taken back, and no other network");
    assert_eq!(node.take_calls().unwrap(), [] as [Value; 0]);
}
