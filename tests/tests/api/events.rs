//! Events: on the object that somebody has to mend, once for each problem.

use std::fs;

use netattach_tests::Pod;
use netattach_tests::api_server::{Fault, Options, Request, Verb, When};
use netattach_tests::manifest::NAMESPACE;
use netattach_tests::traffic::{PATIENCE, eventually};
use serde_json::{Value, json};

use crate::rig::{NODE, Rig, object};

fn is_event(one: &Request) -> bool {
    one.resource == "events" && one.answer.is_some()
}

/// The requests about events after a mark, once there are as many: verb, answer and body.
fn events(rig: &Rig, mark: usize, count: usize) -> Vec<(Verb, Option<u16>, Value)> {
    rig.server.wait_for(mark, |requests| requests.iter().filter(|one| is_event(one)).count() >= count);
    let requests = rig.server.requests_since(mark);
    requests.into_iter().filter(is_event).map(|one| (one.verb, one.answer, one.body)).collect()
}

#[test]
fn a_pod_whose_network_is_not_defined_has_one_event_however_often_it_is_tried() {
    let rig = Rig::started();
    let mut pod = object("a", NODE);
    pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] = json!("nowhere");
    rig.server.create(&pod).unwrap();
    let sandbox = Pod::new("a").unwrap();
    let mark = rig.server.mark();
    let mut message = String::new();
    for _ in 0..3 {
        message = rig.add(&sandbox).failure().1;
    }
    rig.settle("b");
    let seen = events(&rig, mark, 1);
    assert_eq!(seen.len(), 1, "{seen:#?}");
    let (verb, answer, body) = &seen[0];
    assert_eq!((*verb, *answer), (Verb::Create, Some(201)));
    assert_eq!(
        body["regarding"],
        json!({"apiVersion": "v1", "kind": "Pod", "namespace": NAMESPACE, "name": "a", "uid": "uid-a"})
    );
    assert_eq!((&body["reason"], &body["type"]), (&json!("InvalidNetwork"), &json!("Warning")));
    assert_eq!(body["reportingInstance"], NODE);
    assert!(
        message.contains("nowhere") && body["note"].as_str().unwrap().contains("nowhere"),
        "{message}: {body}"
    );
}

#[test]
fn a_definition_that_cannot_be_used_has_an_event_that_the_next_agent_counts() {
    let mut rig = Rig::new(&Options::default());
    let broken = json!({
        "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
        "metadata": {"namespace": NAMESPACE, "name": "broken"}, "spec": {"config": "{"}
    });
    rig.server.create(&broken).unwrap();
    rig.start();
    let seen = events(&rig, 0, 1);
    assert_eq!(seen.len(), 1, "{seen:#?}");
    assert_eq!(
        (seen[0].0, seen[0].1, &seen[0].2["reason"]),
        (Verb::Create, Some(201), &json!("InvalidNetwork"))
    );
    assert_eq!(
        seen[0].2["regarding"],
        json!({
            "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
            "namespace": NAMESPACE, "name": "broken"
        })
    );
    rig.node.stop().unwrap();
    let mark = rig.server.mark();
    rig.start();
    let seen = events(&rig, mark, 2);
    let verbs: Vec<_> = seen.iter().map(|(verb, answer, _)| (*verb, *answer)).collect();
    assert_eq!(verbs, [(Verb::Create, Some(409)), (Verb::Patch, Some(200))]);
    assert_eq!(seen[1].2["series"]["count"], 2);
}

#[test]
fn events_that_the_server_refuses_change_nothing() {
    let rig = Rig::started();
    let fault = rig.server.faults().always(When::resource("events"), Fault::Answer(403));
    let mut pod = object("a", NODE);
    pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] = json!("nowhere");
    rig.server.create(&pod).unwrap();
    rig.add(&Pod::new("a").unwrap()).failure();
    assert_eq!(events(&rig, 0, 1).len(), 1);
    rig.settle("b");
    assert_eq!(rig.server.faults().hits(fault), 1);
}

/// The node's own problems: its default network that is late, which keeps the startup taint, and its configuration that
/// somebody puts away.
#[test]
fn a_late_default_network_and_a_file_that_was_put_away_are_events_of_the_node_and_the_taint_waits() {
    const TAINT: &str = "netattach.dev/agent-not-ready";
    let mut rig = Rig::new(&Options::default());
    let taints = json!([{"key": TAINT, "effect": "NoSchedule"}]);
    let node =
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}, "spec": {"taints": taints}});
    rig.server.create(&node).unwrap();
    rig.node.set("cniConf", json!({"dir": rig.node.path("net.d")}));
    rig.node.set("kubernetes", json!({"startupTaint": TAINT}));
    let (default, late) = (rig.node.path("default.conf"), rig.node.path("default.late"));
    fs::rename(&default, &late).unwrap();
    rig.start();
    let seen = events(&rig, 0, 1);
    let of_node = |body: &Value| {
        assert_eq!(body["regarding"], json!({"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": NODE}));
        assert_eq!(body["metadata"]["namespace"], "default");
        (body["reason"].as_str().unwrap().to_owned(), body["note"].as_str().unwrap().to_owned())
    };
    let missing = format!("read {}: No such file or directory (os error 2)", default.display());
    assert_eq!(of_node(&seen[0].2), ("DefaultNetworkNotReady".to_owned(), missing));
    let tainted = || rig.server.get("nodes", "", NODE).unwrap()["spec"]["taints"] == taints;
    assert!(tainted());

    let mark = rig.server.mark();
    fs::rename(&late, &default).unwrap();
    assert!(eventually(PATIENCE, || !tainted()));
    let own = rig.node.path("net.d/00-netattach.conflist");
    assert!(own.exists());
    fs::rename(&own, own.with_extension("conflist.cilium_bak")).unwrap();
    let seen = events(&rig, mark, 1);
    let note = format!(
        "{} was renamed to 00-netattach.conflist.cilium_bak, as Cilium does with the configurations of others: set its \
         cni.exclusive to false; it was written again",
        own.display()
    );
    assert_eq!(of_node(&seen[0].2), ("CniConfigurationDisturbed".to_owned(), note));
    assert!(own.exists());
}
