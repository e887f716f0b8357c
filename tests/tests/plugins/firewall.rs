//! Pods whose traffic passes a chain FORWARD that drops, by `firewall` after an interface: the agent's own and that
//! of an executed plugin.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, connects, eventually};
use netattach_tests::{Node, Pod, tools};
use serde_json::{Value, json};

/// Returns the output of a program on the node.
fn said(node: &Node, program: &str, line: &str) -> String {
    let words: Vec<&str> = line.split(' ').collect();
    let output = node.namespace.run(|| Command::new(program).args(words).output().unwrap());
    assert!(output.status.success(), "{program} {line}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the number of pods' rules in the node's IPv4 table.
fn rules(node: &Node) -> usize {
    said(node, "iptables", "-S CNI-FORWARD").matches("ACCEPT").count()
}

/// Returns a node that forwards nothing, whose pod `a` is on the network `out`, with these keys of `firewall`.
fn dropping(reference: &Path, executed: &[&str], keys: &Value) -> Node {
    let selection = json!([{"name": "out", "default-route": ["10.60.0.1"]}]);
    let mut node = Node::new(&[pod("a", &json!({}), &selection)]).unwrap();
    let bridge = json!({
        "type": "bridge", "bridge": "out0", "isGateway": true, "ipam": node.host_local(&["10.60.0.0/24"])
    });
    let mut firewall = json!({"type": "firewall"});
    firewall.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    let list = json!({"cniVersion": "1.0.0", "name": "out", "plugins": [bridge, firewall]});
    node.write("out", &network(NAMESPACE, "out", &list)).unwrap();
    for plugin in executed {
        symlink(reference.join(plugin), node.path("cni-bin").join(plugin)).unwrap();
    }
    let exec: Vec<&&str> = executed.iter().filter(|plugin| **plugin != "host-local").collect();
    node.set("delegation", json!({ "exec": exec }));
    said(&node, "iptables", "-P FORWARD DROP");
    node
}

fn gets_out(reference: &Path, executed: &[&str]) {
    let mut node = dropping(reference, executed, &json!({}));
    let outside = node.add_outside().unwrap();
    netattach_tests::node::ip(&outside, &["route", "add", "10.60.0.0/24", "via", "192.0.2.1"]).unwrap();
    let echo = Echo::serve(&outside, "192.0.2.2:7".parse().unwrap()).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    assert!(connects(&a.namespace, echo.address(), PATIENCE));
    node.check(&a).success();
    // Another process removes the rules, like a reload of other rules.
    said(&node, "iptables", "-F");
    assert!(eventually(PATIENCE, || rules(&node) == 2));
    assert!(connects(&a.namespace, echo.address(), PATIENCE));
    node.check(&a).success();
    // The next agent reads them from the record, and restores removed ones.
    node.stop().unwrap();
    said(&node, "iptables", "-F CNI-FORWARD");
    assert!(!connects(&a.namespace, echo.address(), SILENCE));
    node.start().unwrap();
    assert!(connects(&a.namespace, echo.address(), PATIENCE));
    node.check(&a).success();
    node.del(&a).success();
    assert_eq!(rules(&node), 0);
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

/// Rows: FWL-native.
#[test]
fn behind_a_bridge_pods_get_out_without_another_plugin() {
    gets_out(Path::new("/nonexistent"), &[]);
}

/// Rows: FWL-delegated.
#[test]
fn behind_an_interface_of_another_plugin_pods_get_out_without_an_executable_of_that_name() {
    let test = "behind_an_interface_of_another_plugin_pods_get_out_without_an_executable_of_that_name";
    let plugins = ["bridge", "host-local"];
    let Some(reference) = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &plugins) else { return };
    gets_out(&reference, &plugins);
}

/// Rows: FWL-fought.
#[test]
fn what_another_program_removes_again_and_again_is_put_back_rarely_and_told_of() {
    let mut node = dropping(Path::new("/nonexistent"), &[], &json!({}));
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    for time in 1..=5 {
        said(&node, "iptables", "-F CNI-FORWARD");
        assert!(eventually(PATIENCE, || rules(&node) == 2), "{time}");
    }
    said(&node, "iptables", "-F CNI-FORWARD");
    let told = "another program removes rules for pods again and again: they were put back 5 times, and from now on are once a \
                minute";
    let is_told = || node.whole_status().unwrap().to_string().contains(told);
    assert!(eventually(PATIENCE, is_told), "{:#}", node.whole_status().unwrap());
    assert_eq!(rules(&node), 0);
    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

/// Rows: FWL-executed.
#[test]
fn firewalld_is_asked_by_the_executable_alone() {
    let mut node = dropping(Path::new("/nonexistent"), &[], &json!({"backend": "firewalld"}));
    node.start().unwrap();
    let (_, told) = node.add(&Pod::new("a").unwrap()).failure();
    assert!(told.contains("firewall"), "{told}");
    Snapshot::take(&node, &[]).unwrap().assert_nothing_is_left();
}

/// An agent that was killed has left rules of a pod that was deleted since, with its record.
///
/// Rows: FWL-stray.
#[test]
fn rules_of_nobody_go_when_the_agent_starts() {
    let mut node = dropping(Path::new("/nonexistent"), &[], &json!({}));
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let own = said(&node, "iptables", "-S CNI-FORWARD");
    let line = own.lines().find(|line| line.contains("-s 10.60.0.2/32")).unwrap();
    let owner = line.split('"').nth(1).unwrap().split(' ').next().unwrap();
    for whose in [owner, "netattach:00000000", "netattach-cni"] {
        let rule = ["-A", "CNI-FORWARD", "-s", "10.9.9.9/32", "-m", "comment", "--comment"];
        let comment = format!("{whose} out gone eth0");
        let add =
            || Command::new("iptables").args(rule).args([comment.as_str(), "-j", "ACCEPT"]).status().unwrap();
        assert!(node.namespace.run(add).success());
    }
    node.stop().unwrap();
    node.start().unwrap();
    // Rules of other agents and of executables stay.
    assert_eq!(said(&node, "iptables", "-S CNI-FORWARD").matches("10.9.9.9").count(), 2);
    node.check(&a).success();
    node.del(&a).success();
}

/// Its address may be another pod's by the time that it is detached.
#[test]
fn a_pod_that_is_half_detached_gets_no_rules_when_the_agent_starts() {
    let mut node = dropping(Path::new("/nonexistent"), &[], &json!({}));
    node.set("delegation", json!({"exec": [], "timeoutSeconds": 600}));
    node.plugin("odd", &json!({})).unwrap();
    node.write("odd", &network(NAMESPACE, "odd", &json!({"cniVersion": "1.1.0", "type": "odd"}))).unwrap();
    node.write("b", &pod("b", &json!({}), &json!([{"name": "out"}, {"name": "odd"}]))).unwrap();
    node.start().unwrap();
    let b = Pod::new("b").unwrap();
    node.add(&b).success();
    assert_eq!(rules(&node), 2);
    // All but one of its networks is taken back.
    node.plugin("odd", &json!({"DEL": {"error": {"code": 11, "msg": "not now"}}})).unwrap();
    node.del(&b).failure();
    assert_eq!(rules(&node), 0);
    node.kill().unwrap();
    // The next agent continues, and is delayed by the plugin.
    node.plugin("odd", &json!({"DEL": {"sleepMs": 300_000}})).unwrap();
    node.start_serving().unwrap();
    assert_eq!(rules(&node), 0);
    node.kill().unwrap();
    node.plugin("odd", &json!({})).unwrap();
    node.start().unwrap();
    Snapshot::take(&node, &[&b]).unwrap().assert_nothing_is_left();
}
