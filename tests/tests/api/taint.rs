//! The node's startup taint.

use netattach_tests::api_server::{Fault, Options, Verb, When};
use netattach_tests::traffic::{PATIENCE, eventually};
use serde_json::{Value, json};

use crate::rig::{NODE, Rig};

const TAINT: &str = "netattach.dev/agent-not-ready";

/// A rig whose node has the startup taint and another one.
fn rig() -> Rig {
    rig_with(TAINT)
}

/// The same with a startup taint of that key.
fn rig_with(startup: &str) -> Rig {
    let mut rig = Rig::new(&Options::default());
    let taint = |key: &str| json!({"key": key, "effect": "NoSchedule"});
    let node = json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE},
        "spec": {"taints": [taint("other"), taint(startup)]}
    });
    rig.server.create(&node).unwrap();
    rig.node.set("kubernetes", json!({"startupTaint": startup}));
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

/// The policies of `deploy` let agents remove taints with the prefix of netattach only: without a word about it the
/// node would have none but pods that tolerate the taint, for ever.
#[test]
fn a_taint_that_the_agent_may_not_remove_is_told_and_tried_more_and_more_rarely() {
    const OTHERS: &str = "example.com/agent-not-ready";
    let mut rig = rig_with(OTHERS);
    rig.start();
    let named = format!("cannot remove the taint {OTHERS} of node {NODE}: ");
    rig.await_trouble("startup taint", PATIENCE * 2, &named);
    let said = rig.trouble("startup taint").unwrap();
    let refusal = "an agent of netattach removes taints whose keys begin with netattach.dev/ only";
    assert!(said.contains(refusal), "{said}");
    let removals = || {
        let requests = rig.server.requests();
        requests.iter().filter(|one| one.verb == Verb::Patch && one.resource == "nodes").count()
    };
    // After 0, 2, 6 and at most 14 s; it is told after 10 s.
    assert!((1..=4).contains(&removals()), "{}", removals());
    assert_eq!(taints(&rig), [json!("other"), json!(OTHERS)]);
    // Once an operator has removed it, nothing is told any more.
    let without = json!({"spec": {"taints": [{"key": "other", "effect": "NoSchedule"}]}});
    rig.server.patch("nodes", "", NODE, &without).unwrap();
    assert!(eventually(PATIENCE * 2, || rig.trouble("startup taint").is_none()));
}

/// A server that starts, or cannot reach a webhook, refuses nothing: no pod should wait for the pauses after refusals.
#[test]
fn a_removal_that_fails_for_a_passing_reason_is_tried_as_often_as_before() {
    let mut rig = rig();
    let busy = rig.server.faults().times(5, When::on(Verb::Patch, "nodes"), Fault::Answer(503));
    rig.start();
    // After 10 s. After refusals, the sixth attempt is made after 62 s.
    assert!(eventually(PATIENCE + PATIENCE / 2, || taints(&rig) == [json!("other")]), "{:?}", taints(&rig));
    assert_eq!(rig.server.faults().hits(busy), 5);
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
