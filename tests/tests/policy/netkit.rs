//! Netkits beside policies. Runs where the kernel has the driver.

use std::net::SocketAddr;
use std::os::unix::fs::symlink;

use netattach_tests::manifest::{NAMESPACE, network, pod, policy};
use netattach_tests::node::{executable, ip};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::tools::report_skipped;
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, connects};
use netattach_tests::{Namespace, Node, Pod};
use serde_json::{Value, json};

/// An agent makes none: what the pod sends below another ethertype would be judged as that, and taken as IP.
///
/// Rows: NKT-agent.
#[test]
fn a_netkit_of_the_agents_own_is_refused_by_name() {
    let mut node = Node::new(&[]).unwrap();
    let config = json!({"cniVersion": "1.0.0", "type": "netkit", "ipam": node.host_local(&["10.80.0.0/24"])});
    node.write("kit", &network(NAMESPACE, "kit", &config)).unwrap();
    node.write("pod-a", &pod("a", &json!({}), &json!("kit"))).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    let (code, message) = node.add(&a).failure();
    assert_eq!(code, 7, "{message}");
    assert!(message.contains("plugins[0].type: netkit is an executable alone so far"), "{message}");
    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

/// A node whose agent executes `netkit`, and has it judged; each pod has a network of its own: their name, the mode, and the
/// last byte of the address. `None`: the kernel has no driver.
fn node_that_executes(test: &str, pods: &[(&str, &str, u8)]) -> Option<Node> {
    if ip(&Namespace::new().unwrap(), &["link", "add", "probe", "type", "netkit"]).is_err() {
        report_skipped(test, "the kernel has no netkit");
        return None;
    }
    let mut node = Node::new(&[]).unwrap();
    symlink(executable("netattach-cni").unwrap(), node.path("cni-bin").join("netkit")).unwrap();
    node.set("delegation", json!({"exec": ["netkit"], "enforce": "always"}));
    for (name, mode, host) in pods {
        let ipam = json!({"type": "static", "addresses": [{"address": format!("10.81.0.{host}/24")}]});
        let config =
            json!({"cniVersion": "1.0.0", "name": name, "type": "netkit", "mode": mode, "ipam": ipam});
        node.write(name, &network(NAMESPACE, name, &config)).unwrap();
        node.write(&format!("pod-{name}"), &pod(name, &json!({"app": name}), &json!(name))).unwrap();
    }
    Some(node)
}

/// The level of a pod's netkit, and its end on the node.
fn told(node: &Node, pod: &str) -> [Value; 2] {
    let rows = node.ctl(&["attachments", "--pod", &format!("{NAMESPACE}/{pod}")]).unwrap();
    let row = rows.as_array().unwrap().iter().find(|row| row["ifname"] == "net1").unwrap();
    ["enforcement", "host_interface"].map(|key| row[key].clone())
}

/// What the agent does for a netkit, which it does not make itself: it has it made, judges it, and has it checked and taken
/// away, before and after a restart.
///
/// Rows: NKT-executed.
#[test]
fn a_policy_holds_on_a_netkit_that_is_executed_also_over_a_restart() {
    let test = "a_policy_holds_on_a_netkit_that_is_executed_also_over_a_restart";
    let names = ["server", "client", "stranger"];
    let pods = [(names[0], "l2", 2), (names[1], "l2", 3), (names[2], "l2", 4)];
    let Some(mut node) = node_that_executes(test, &pods) else { return };
    let rules = json!({
        "podSelector": {"matchLabels": {"app": "server"}}, "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "client"}}}], "ports": [{"port": 80}]}]
    });
    node.write("rules", &policy("rules", "server, client, stranger", &rules)).unwrap();
    node.start().unwrap();
    let [server, client, stranger] = names.map(|name| {
        let pod = Pod::new(name).unwrap();
        node.add(&pod).success();
        pod
    });
    let at = |port| SocketAddr::new("10.81.0.2".parse().unwrap(), port);
    let _served = [80, 81].map(|port| Echo::serve(&server.namespace, at(port)).unwrap());
    let assert_it_holds = |when: &str| {
        assert!(connects(&client.namespace, at(80), PATIENCE), "{when}: the open port");
        assert!(!connects(&client.namespace, at(81), SILENCE), "{when}: the closed port");
        assert!(!connects(&stranger.namespace, at(80), SILENCE), "{when}: another pod");
    };
    assert_it_holds("attached");
    node.kill().unwrap();
    assert_it_holds("without an agent");
    node.start().unwrap();
    assert_it_holds("after a restart");
    assert_eq!(told(&node, "server"), [json!("full-unless-privileged"), Value::Null]);
    for pod in [&server, &client, &stranger] {
        node.check(pod).success();
    }
    // The executable finds what ADD has made, and the agent passes on what it says.
    ip(&stranger.namespace, &["link", "set", "net1", "down"]).unwrap();
    ip(&stranger.namespace, &["address", "flush", "dev", "net1"]).unwrap();
    assert_ne!(node.check(&stranger).exit, 0);
    for pod in [&server, &client, &stranger] {
        node.del(pod).success();
        node.del(pod).success();
    }
    Snapshot::take(&node, &[&server, &client, &stranger]).unwrap().assert_nothing_is_left();
}

/// Programs of the pair see what the pod sends before the node's end does: another plugin's netkit is judged in the pod.
///
/// Rows: NKT-delegated.
#[test]
fn a_netkit_of_another_plugin_is_not_judged_at_its_other_end() {
    let test = "a_netkit_of_another_plugin_is_not_judged_at_its_other_end";
    let pods = [("two", "l2", 2), ("three", "l3", 2)];
    let Some(mut node) = node_that_executes(test, &pods) else { return };
    node.start().unwrap();
    for (name, level) in [("two", "full-unless-privileged"), ("three", "none")] {
        let pod = Pod::new(name).unwrap();
        node.add(&pod).success();
        assert_eq!(told(&node, name), [json!(level), Value::Null], "{name}");
        node.del(&pod).success();
        Snapshot::take(&node, &[&pod]).unwrap().assert_nothing_is_left();
    }
}
