//! Ports of the node that lead to a pod on an additional network, by `portmap` after a bridge: the reference plugin,
//! which programs iptables in the node's namespace, the bridge itself, and the agent after the reference's bridge.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::thread::spawn;

use netattach::netlink::nat::Set;
use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, connects, eventually};
use netattach_tests::{Node, Pod, tools};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// Rows: NPWG-4.1.2.1.7-pm-works.
#[test]
fn a_mapped_port_of_the_node_reaches_the_pod_on_that_network() {
    let test = "a_mapped_port_of_the_node_reaches_the_pod_on_that_network";
    let Some(reference) = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &["portmap"]) else { return };
    reaches_the_pod(&reference, &["portmap"], &json!({}));
}

/// Without an executable of that name.
///
/// Rows: PMP-native.
#[test]
fn behind_a_bridge_a_mapped_port_needs_no_other_plugin() {
    reaches_the_pod(Path::new("/nonexistent"), &[], &json!({}));
    reaches_the_pod(Path::new("/nonexistent"), &[], &json!({"masqAll": true}));
}

/// Rows: PMP-delegated.
#[test]
fn behind_an_interface_of_another_plugin_a_mapped_port_needs_no_executable_of_that_name() {
    let test = "behind_an_interface_of_another_plugin_a_mapped_port_needs_no_executable_of_that_name";
    let plugins = ["bridge", "host-local"];
    let Some(reference) = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &plugins) else { return };
    for keys in [json!({}), json!({"masqAll": true})] {
        reaches_the_pod(&reference, &plugins, &keys);
    }
}

/// Requests that only iptables can implement are executed, and need an executable only if ports are requested.
///
/// Rows: PMP-executed.
#[test]
fn conditions_are_carried_out_by_the_executable_alone() {
    let test = "conditions_are_carried_out_by_the_executable_alone";
    let plugins = ["bridge", "host-local"];
    let Some(reference) = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &plugins) else { return };
    let keys = json!({"conditionsV4": ["-s", "192.0.2.0/24"]});
    let mut node = published(&reference, &plugins, &keys);
    node.start().unwrap();
    let (_, told) = node.add(&Pod::new("a").unwrap()).failure();
    assert!(told.contains("portmap"), "{told}");
    Snapshot::take(&node, &[]).unwrap().assert_nothing_is_left();
}

/// A node whose pod `a` asks for a port on the network `web`, some of whose plugins are executed.
fn published(reference: &Path, executed: &[&str], keys: &Value) -> Node {
    let selection = json!([{
        "name": "web", "default-route": ["10.60.0.1"],
        "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]
    }]);
    let mut node = Node::new(&[pod("a", &json!({}), &selection)]).unwrap();
    let bridge = json!({
        "type": "bridge", "bridge": "web0", "isGateway": true, "ipam": node.host_local(&["10.60.0.0/24"])
    });
    let mut portmap = json!({"type": "portmap", "capabilities": {"portMappings": true}});
    portmap.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    let list = json!({"cniVersion": "1.0.0", "name": "web", "plugins": [bridge, portmap]});
    node.write("web", &network(NAMESPACE, "web", &list)).unwrap();
    for plugin in executed {
        symlink(reference.join(plugin), node.path("cni-bin").join(plugin)).unwrap();
    }
    // Its address management is executed by it.
    let exec: Vec<&&str> = executed.iter().filter(|plugin| **plugin != "host-local").collect();
    node.set("delegation", json!({ "exec": exec }));
    node
}

fn reaches_the_pod(reference: &Path, executed: &[&str], keys: &Value) {
    let mut node = published(reference, executed, keys);
    let outside = node.add_outside().unwrap();
    let published = "192.0.2.1:8080".parse().unwrap();
    node.start().unwrap();

    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let _echo = Echo::serve(&a.namespace, "10.60.0.2:80".parse().unwrap()).unwrap();
    assert!(connects(&outside, published, PATIENCE));
    node.check(&a).success();
    // The next agent reads it from the record.
    node.stop().unwrap();
    node.start().unwrap();
    assert!(connects(&outside, published, PATIENCE));
    node.check(&a).success();
    node.del(&a).success();
    assert!(!connects(&outside, published, SILENCE));
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

/// Returns the number of the node's ports that lead to pods, and of rules that accept their packets.
fn leading(node: &Node) -> (usize, usize) {
    let now = Snapshot::take(node, &[]).unwrap();
    let ports = now.translation.iter().filter(|element| element.set == Set::Ports4);
    (ports.count(), now.forwarding.len())
}

/// The plugin may assign the address to the next pod before the DEL has ended, which other plugins delay.
///
/// Rows: PMP-before-address, FWL-before-address.
#[test]
fn nothing_leads_to_an_address_any_more_when_another_plugin_frees_it() {
    let maker = |del: Value| {
        let result = json!({
            "cniVersion": "1.0.0", "interfaces": [{"name": "net1", "sandbox": "/run/netns/a"}],
            "ips": [{"interface": 0, "address": "10.60.0.2/24"}],
        });
        json!({"link": "veth", "addresses": ["10.60.0.2/24"], "result": result, "DEL": del})
    };
    let ports = json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]);
    let selection = json!([{"name": "web", "portMappings": ports}]);
    let mut node = Node::new(&[pod("a", &json!({}), &selection)]).unwrap();
    node.set("delegation", json!({"timeoutSeconds": 600}));
    node.plugin("maker", &maker(json!({"sleepMs": 300_000}))).unwrap();
    let portmap = json!({"type": "portmap", "capabilities": {"portMappings": true}});
    let plugins = json!([{"type": "maker"}, portmap, {"type": "firewall"}]);
    let list = json!({"cniVersion": "1.0.0", "name": "web", "plugins": plugins});
    node.write("web", &network(NAMESPACE, "web", &list)).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    assert_eq!(leading(&node), (1, 2));

    let del = node.call("DEL", &a);
    let del = spawn(move || del.run());
    let asked = || -> Option<Pid> {
        let calls = std::fs::read_to_string(node.path("calls")).ok()?;
        let call: Value = serde_json::from_str(calls.lines().find(|line| line.contains("\"DEL\""))?).ok()?;
        Pid::from_raw(i32::try_from(call["pid"].as_i64()?).ok()?)
    };
    assert!(eventually(PATIENCE, || asked().is_some()), "DEL of the plugin");
    assert_eq!(leading(&node), (0, 0));
    kill_process(asked().unwrap(), Signal::KILL).unwrap();
    assert_ne!(del.join().unwrap().exit, 0);
    node.plugin("maker", &maker(json!({}))).unwrap();
    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}
