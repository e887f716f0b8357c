//! Events: on the object that needs a fix, once for each problem.

use std::fs;
use std::time::Duration;

use netattach_tests::Pod;
use netattach_tests::api_server::{Fault, Options, Request, Verb, When};
use netattach_tests::manifest::{self, NAMESPACE};
use netattach_tests::traffic::{PATIENCE, eventually};
use serde_json::{Value, json};

use crate::rig::{NODE, Rig, object};

const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";
/// Problems that all agents see are reported after up to 30 s, by a check each 10 s.
const LATE: Duration = Duration::from_secs(60);

fn is_event(one: &Request) -> bool {
    one.resource == "events" && one.answer.is_some()
}

/// Whether a request is about an event of a fence ([`all_events`]).
fn is_of_fence(one: &Request) -> bool {
    // An event's name begins with that of its object.
    let about = one.body["regarding"]["name"].as_str().or(one.name.as_deref());
    about.is_some_and(|name| name.starts_with("fence-"))
}

/// The requests about events after a mark, once there are as many: verb, answer and body.
fn events(rig: &Rig, mark: usize, count: usize) -> Vec<(Verb, Option<u16>, Value)> {
    let all = || {
        let requests = rig.server.requests_since(mark).into_iter();
        requests.filter(|one| is_event(one) && !is_of_fence(one))
    };
    eventually(LATE, || all().count() >= count);
    all().map(|one| (one.verb, one.answer, one.body)).collect()
}

/// The same, with all late ones. Two fences follow the last one, and their own events are left out: an unreadable
/// pod, as conditions become events one check after the other, and then a failed ADD, whose event follows those of
/// the check that has found the pod.
fn all_events(rig: &Rig, mark: usize, count: usize) -> Vec<(Verb, Option<u16>, Value)> {
    events(rig, mark, count);
    let is_of = |one: &Request, fence: &str| one.body["regarding"]["name"] == fence;
    let await_fence = |fence: &str| {
        let is_it = |one: &Request| is_event(one) && is_of(one, fence);
        assert!(rig.server.wait_for(mark, |requests| requests.iter().any(is_it)), "{fence}: no event");
    };
    let [unread, refused] = ["unread", "refused"].map(|what| format!("fence-{mark}-{what}"));
    let metadata = json!({"namespace": NAMESPACE, "name": unread, "labels": ["x"]});
    let unreadable = json!({"metadata": metadata, "spec": {"nodeName": NODE, "containers": []}});
    rig.server.put_as_is("pods", NAMESPACE, &unread, unreadable).unwrap();
    await_fence(&unread);
    rig.add(&lost(rig, &refused)).failure();
    await_fence(&refused);
    let requests = rig.server.requests_since(mark);
    let others = requests.into_iter().filter(|one| is_event(one) && !is_of_fence(one));
    others.map(|one| (one.verb, one.answer, one.body)).collect()
}

/// A pod whose network is not defined.
fn lost(rig: &Rig, name: &str) -> Pod {
    let mut pod = object(name, NODE);
    pod["metadata"]["annotations"][NETWORKS] = json!("nowhere");
    rig.server.create(&pod).unwrap();
    Pod::new(name).unwrap()
}

#[test]
fn a_pod_whose_network_is_not_defined_has_one_event_however_often_it_is_tried() {
    let rig = Rig::started();
    let sandbox = lost(&rig, "a");
    let mark = rig.server.mark();
    let mut message = String::new();
    for _ in 0..3 {
        message = rig.add(&sandbox).failure().1;
    }
    let seen = all_events(&rig, mark, 1);
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
fn a_definition_that_cannot_be_used_has_an_event_that_the_next_agent_finds() {
    let mut rig = Rig::new(&Options::default());
    let broken = json!({
        "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
        "metadata": {"namespace": NAMESPACE, "name": "broken"}, "spec": {"config": "{"}
    });
    rig.server.create(&broken).unwrap();
    // Something of its namespace is on the node.
    rig.pod("there");
    rig.start();
    let seen = all_events(&rig, 0, 1);
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
    // As many agents may have found it as there are nodes.
    let seen = all_events(&rig, mark, 1);
    let verbs: Vec<_> = seen.iter().map(|(verb, answer, _)| (*verb, *answer)).collect();
    assert_eq!(verbs, [(Verb::Create, Some(409))]);
}

#[test]
fn events_that_the_server_refuses_change_nothing() {
    let rig = Rig::started();
    rig.server.faults().always(When::resource("events"), Fault::Answer(403));
    rig.add(&lost(&rig, "a")).failure();
    let answers: Vec<_> =
        all_events(&rig, 0, 1).into_iter().map(|(verb, answer, _)| (verb, answer)).collect();
    assert_eq!(answers, [(Verb::Create, Some(403))]);
    rig.settle("b");
}

/// Returns the only event after a mark: its object, reason, and note.
fn only_event(rig: &Rig, mark: usize) -> (Value, String, String) {
    let seen = all_events(rig, mark, 1);
    assert_eq!(seen.len(), 1, "{seen:#?}");
    let (verb, answer, body) = &seen[0];
    assert_eq!((*verb, *answer, &body["type"]), (Verb::Create, Some(201), &json!("Warning")));
    let text = |key: &str| body[key].as_str().unwrap().to_owned();
    (body["regarding"].clone(), text("reason"), text("note"))
}

/// Returns the object of an event of a pod.
fn of_pod(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "namespace": NAMESPACE, "name": name, "uid": format!("uid-{name}")
    })
}

#[test]
fn a_policy_that_is_not_enforced_as_written_has_an_event_that_names_the_key() {
    let rig = Rig::started();
    // Something of its namespace is on the node.
    rig.pod("there");
    let mark = rig.server.mark();
    let spec = json!({"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{"from": [{"ipBlock": {"cidr": "10.61.0.0"}}]}]});
    rig.server.create(&manifest::policy("odd", "shop/lan-a", &spec)).unwrap();
    let policy = json!({
        "apiVersion": "k8s.cni.cncf.io/v1beta1", "kind": "MultiNetworkPolicy", "namespace": NAMESPACE,
        "name": "odd"
    });
    let note = r#"spec.ingress[0].from[0].ipBlock.cidr: "10.61.0.0" is not an address block such as 10.0.0.0/8: matches nothing"#;
    assert_eq!(only_event(&rig, mark), (policy, "PolicyNotAsWritten".to_owned(), note.to_owned()));
}

/// The pool's directory cannot be created: there is a file of that name.
#[test]
fn an_add_that_fails_for_a_file_of_the_node_has_an_event_that_names_it() {
    let mut rig = Rig::new(&Options::default());
    let broken = rig.node.path("leases-broken");
    fs::write(&broken, "").unwrap();
    let mut ipam = rig.node.host_local(&["10.63.0.0/24"]);
    ipam["dataDir"] = json!(broken);
    let lan = json!({"cniVersion": "1.0.0", "type": "bridge", "bridge": "br3", "ipam": ipam});
    rig.server.create(&manifest::network(NAMESPACE, "lan-c", &lan)).unwrap();
    rig.start();
    let mut pod = object("a", NODE);
    pod["metadata"]["annotations"][NETWORKS] = json!("lan-c");
    rig.server.create(&pod).unwrap();
    let mark = rig.server.mark();
    let (code, message) = rig.add(&Pod::new("a").unwrap()).failure();
    assert_eq!(code, 5, "{message}");
    assert!(message.contains(&broken.display().to_string()), "{message}");
    assert_eq!(only_event(&rig, mark), (of_pod("a"), "NodeFailure".to_owned(), message));
}

/// A runtime has to DEL before it ADDs again.
#[test]
fn a_request_that_no_runtime_may_make_has_an_event_on_its_pod() {
    let rig = Rig::started();
    let pod = rig.pod("a");
    rig.add(&pod).success();
    rig.published("a");
    let mark = rig.server.mark();
    let (code, message) = rig.add(&pod).failure();
    assert_eq!((code, message.contains("another ADD needs a DEL first")), (4, true), "{message}");
    assert_eq!(only_event(&rig, mark), (of_pod("a"), "InvalidRequest".to_owned(), message));
}

/// At ADD and, for the same network, for a live pod whose annotation has changed.
#[test]
fn a_plugin_that_refuses_an_add_and_one_that_refuses_a_live_pod_have_events_with_its_message() {
    let mut rig = Rig::new(&Options::default());
    rig.node
        .plugin("odd", &json!({"ADD": {"error": {"code": 123, "msg": "no more", "details": "of these"}}}))
        .unwrap();
    let odd = json!({"cniVersion": "1.0.0", "type": "odd"});
    rig.server.create(&manifest::network(NAMESPACE, "odd", &odd)).unwrap();
    rig.start();
    let mut pod = object("a", NODE);
    pod["metadata"]["annotations"][NETWORKS] = json!("odd");
    rig.server.create(&pod).unwrap();
    let mark = rig.server.mark();
    let (code, message) = rig.add(&Pod::new("a").unwrap()).failure();
    let said = "attach net1 (shop/odd): plugin \"odd\" failed (ADD): no more: of these";
    assert_eq!((code, message.as_str()), (123, said));
    assert_eq!(only_event(&rig, mark), (of_pod("a"), "AttachFailed".to_owned(), said.to_owned()));

    let live = rig.pod("b");
    rig.add(&live).success();
    rig.published("b");
    let mark = rig.server.mark();
    let networks = json!({"metadata": {"annotations": {NETWORKS: "lan-a,lan-b,odd"}}});
    rig.server.patch("pods", NAMESPACE, "b", &networks).unwrap();
    let said = "attach net3 (shop/odd): plugin \"odd\" failed (ADD): no more: of these";
    assert_eq!(only_event(&rig, mark), (of_pod("b"), "NetworksDiffer".to_owned(), said.to_owned()));
}

/// The node's own problems: its default network is missing at first, which keeps the startup taint, and its
/// configuration is removed by another process.
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
    // A check that reported the first one again would have been before that of the second.
    let all = events(&rig, 0, 2);
    let reasons: Vec<_> = all.iter().map(|(verb, _, body)| (*verb, of_node(body).0)).collect();
    let once = |reason: &str| (Verb::Create, reason.to_owned());
    assert_eq!(reasons, ["DefaultNetworkNotReady", "CniConfigurationDisturbed"].map(once));
}
