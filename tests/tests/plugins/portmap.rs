//! Ports of the node that lead to a pod on an additional network, by `portmap` behind a bridge: the reference plugin, which
//! programs iptables in the node's namespace, and the bridge itself.

use std::os::unix::fs::symlink;
use std::path::Path;

use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, connects};
use netattach_tests::{Node, Pod, tools};
use serde_json::json;

/// Rows: NPWG-4.1.2.1.7-pm-works.
#[test]
fn a_mapped_port_of_the_node_reaches_the_pod_on_that_network() {
    let test = "a_mapped_port_of_the_node_reaches_the_pod_on_that_network";
    let Some(reference) = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &["portmap"]) else { return };
    reaches_the_pod(Some(&reference));
}

/// Without an executable of that name.
///
/// Rows: PMP-native.
#[test]
fn behind_a_bridge_a_mapped_port_needs_no_other_plugin() {
    reaches_the_pod(None);
}

fn reaches_the_pod(executed: Option<&Path>) {
    let selection = json!([{
        "name": "web", "default-route": ["10.60.0.1"],
        "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]
    }]);
    let mut node = Node::new(&[pod("a", &json!({}), &selection)]).unwrap();
    let bridge = json!({
        "type": "bridge", "bridge": "web0", "isGateway": true, "ipam": node.host_local(&["10.60.0.0/24"])
    });
    let portmap = json!({"type": "portmap", "capabilities": {"portMappings": true}});
    let list = json!({"cniVersion": "1.0.0", "name": "web", "plugins": [bridge, portmap]});
    node.write("web", &network(NAMESPACE, "web", &list)).unwrap();
    if let Some(reference) = executed {
        symlink(reference.join("portmap"), node.path("cni-bin/portmap")).unwrap();
        node.set("delegation", json!({"exec": ["portmap"]}));
    }
    let outside = node.add_outside().unwrap();
    let published = "192.0.2.1:8080".parse().unwrap();
    node.start().unwrap();

    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let _echo = Echo::serve(&a.namespace, "10.60.0.2:80".parse().unwrap()).unwrap();
    assert!(connects(&outside, published, PATIENCE));
    node.check(&a).success();
    node.del(&a).success();
    assert!(!connects(&outside, published, SILENCE));
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}
