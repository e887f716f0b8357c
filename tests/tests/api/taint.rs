//! The node's startup taint.

use netattach_tests::api_server::{Fault, Options, Verb, When};
use netattach_tests::traffic::{PATIENCE, eventually};
use serde_json::{Value, json};

use crate::rig::{NODE, Rig};

const TAINT: &str = "netattach.dev/agent-not-ready";

/// A rig whose node has the startup taint and another one.
fn rig() -> Rig {
    let mut rig = Rig::new(&Options::default());
    let taint = |key: &str| json!({"key": key, "effect": "NoSchedule"});
    let node = json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE},
        "spec": {"taints": [taint("other"), taint(TAINT)]}
    });
    rig.server.create(&node).unwrap();
    rig.node.set("kubernetes", json!({"startupTaint": TAINT}));
    rig
}

fn taints(rig: &Rig) -> Vec<Value> {
    let node = rig.server.get("nodes", "", NODE).unwrap();
    node["spec"]["taints"].as_array().unwrap().iter().map(|taint| taint["key"].clone()).collect()
}

#[test]
fn a_node_that_is_ready_loses_its_taint_and_keeps_others_even_if_it_is_changed_meanwhile() {
    let mut rig = rig();
    // The first write meets a newer version of the node.
    let conflict = rig.server.faults().times(1, When::on(Verb::Patch, "nodes"), Fault::Answer(409));
    rig.start();
    assert!(eventually(PATIENCE, || taints(&rig) == [json!("other")]), "{:?}", taints(&rig));
    assert_eq!(rig.server.faults().hits(conflict), 1);
}

/// Like a node that is registered again while the agent runs.
#[test]
fn a_node_that_has_its_taint_again_loses_it_again() {
    let mut rig = rig();
    rig.start();
    assert!(eventually(PATIENCE, || taints(&rig) == [json!("other")]), "{:?}", taints(&rig));
    let taint = |key: &str| json!({"key": key, "effect": "NoSchedule"});
    let again = json!({"spec": {"taints": [taint(TAINT), taint("other")]}});
    rig.server.patch("nodes", "", NODE, &again).unwrap();
    assert_eq!(taints(&rig), [json!(TAINT), json!("other")]);
    // By a watch: a look at a node that is not watched comes later.
    assert!(eventually(PATIENCE / 2, || taints(&rig) == [json!("other")]), "{:?}", taints(&rig));
}

#[test]
fn a_node_that_cannot_be_watched_is_looked_at_from_time_to_time() {
    let mut rig = rig();
    rig.server.faults().always(When::on(Verb::Watch, "nodes"), Fault::Answer(403));
    rig.start();
    assert!(eventually(PATIENCE, || taints(&rig) == [json!("other")]), "{:?}", taints(&rig));
    let again = json!({"spec": {"taints": [{"key": TAINT, "effect": "NoSchedule"}]}});
    rig.server.patch("nodes", "", NODE, &again).unwrap();
    assert!(eventually(PATIENCE * 3, || taints(&rig).is_empty()), "{:?}", taints(&rig));
}

#[test]
fn a_node_that_is_not_ready_keeps_its_taint() {
    let mut rig = rig();
    // Its default network is made by a plugin that is not installed.
    let default = rig.node.path("default.conf");
    let missing = json!({"cniVersion": "1.0.0", "name": "default", "type": "missing"});
    std::fs::write(&default, missing.to_string()).unwrap();
    let unfollowed = rig.server.faults().always(When::on(Verb::Watch, "namespaces"), Fault::Answer(503));
    let mark = rig.server.mark();
    rig.node.start_serving().unwrap();
    rig.await_watch(mark, "pods");
    assert!(eventually(PATIENCE * 2, || rig.unmet().len() == 2), "{:?}", rig.unmet());
    assert_eq!(taints(&rig), [json!("other"), json!(TAINT)]);
    // No condition is left out.
    rig.node.plugin("missing", &json!({})).unwrap();
    assert!(eventually(PATIENCE, || rig.unmet() == ["API server"]), "{:?}", rig.unmet());
    // More than one check.
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert_eq!(taints(&rig), [json!("other"), json!(TAINT)]);
    rig.server.faults().lift(unfollowed);
    assert!(eventually(PATIENCE, || taints(&rig) == [json!("other")]), "{:?}", taints(&rig));
}
