//! Netkits beside policies. Runs where the kernel has the driver.

use std::os::unix::fs::symlink;

use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::node::{executable, ip};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::tools::report_skipped;
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

/// Programs of the pair see what the pod sends before the node's end does: another plugin's netkit is judged in the pod.
///
/// Rows: NKT-delegated.
#[test]
fn a_netkit_of_another_plugin_is_not_judged_at_its_other_end() {
    let test = "a_netkit_of_another_plugin_is_not_judged_at_its_other_end";
    if ip(&Namespace::new().unwrap(), &["link", "add", "probe", "type", "netkit"]).is_err() {
        return report_skipped(test, "the kernel has no netkit");
    }
    let mut node = Node::new(&[]).unwrap();
    symlink(executable("netattach-cni").unwrap(), node.path("cni-bin").join("netkit")).unwrap();
    node.set("delegation", json!({"exec": ["netkit"], "enforce": "always"}));
    for (name, mode) in [("two", "l2"), ("three", "l3")] {
        let ipam = json!({"type": "static", "addresses": [{"address": "10.81.0.2/24"}]});
        let config =
            json!({"cniVersion": "1.0.0", "name": name, "type": "netkit", "mode": mode, "ipam": ipam});
        node.write(name, &network(NAMESPACE, name, &config)).unwrap();
        node.write(&format!("pod-{name}"), &pod(name, &json!({}), &json!(name))).unwrap();
    }
    node.start().unwrap();
    for (name, level) in [("two", "full-unless-privileged"), ("three", "none")] {
        let pod = Pod::new(name).unwrap();
        node.add(&pod).success();
        let rows = node.ctl(&["attachments", "--pod", &format!("{NAMESPACE}/{name}")]).unwrap();
        let row = rows.as_array().unwrap().iter().find(|row| row["ifname"] == "net1").unwrap();
        let told = [&row["enforcement"], &row["host_interface"]];
        assert_eq!(told, [&json!(level), &Value::Null], "{name}");
        node.del(&pod).success();
        Snapshot::take(&node, &[&pod]).unwrap().assert_nothing_is_left();
    }
}
