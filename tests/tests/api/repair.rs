//! Pods that started without their networks, because their runtime did not ask for them.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use netattach_tests::Pod;
use netattach_tests::api_server::{Fault, Options, Request, Verb, When};
use netattach_tests::cri::{Cri, Sandbox};
use netattach_tests::manifest::NAMESPACE;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{PATIENCE, eventually};
use serde_json::{Value, json};

use crate::rig::{NODE, Rig, STATUS, object};

const MISSED: &str = "runs without the networks that it selects";

/// A rig whose agent repairs in that way after a second.
fn rig(how: &str) -> Rig {
    let mut rig = Rig::new(&Options::default());
    rig.node.set("repair", json!(how));
    rig.node.set("repairAfterSeconds", json!(1));
    rig
}

/// A running pod, owned by a controller of that kind, or without an owner.
fn running(rig: &Rig, name: &str, owner: Option<&str>) {
    create_running(rig, object(name, NODE), owner);
}

fn create_running(rig: &Rig, mut pod: Value, owner: Option<&str>) {
    pod["status"] = json!({"phase": "Running"});
    if let Some(kind) = owner {
        pod["metadata"]["ownerReferences"] = json!([{"apiVersion": "apps/v1", "kind": kind, "name": "web", "uid": "uid-web", "controller": true}]);
    }
    rig.server.create(&pod).unwrap();
}

fn evictions(rig: &Rig, mark: usize) -> Vec<(String, Option<u16>, Value)> {
    let requests = rig.server.requests_since(mark);
    let is_one = |one: &Request| one.verb == Verb::Create && one.resource == "pods/eviction";
    let of = |one: Request| (one.name.unwrap_or_default(), one.answer, one.body["deleteOptions"].clone());
    requests.into_iter().filter(is_one).map(of).collect()
}

fn trouble(name: &str) -> String {
    format!("pod {NAMESPACE}/{name}")
}

#[test]
fn a_pod_that_is_only_reported_is_seen_in_status_and_by_an_event() {
    let mut rig = rig("report");
    rig.start();
    let mark = rig.server.mark();
    // Multus has attached this one.
    running(&rig, "former", None);
    let status = json!([{"name": "cbr0", "default": true}, {"name": "shop/lan-a", "interface": "net1"}]);
    let status = json!({"metadata": {"annotations": {STATUS: status.to_string()}}});
    rig.server.patch("pods", NAMESPACE, "former", &status).unwrap();
    running(&rig, "missed", None);
    rig.await_trouble(&trouble("missed"), PATIENCE, "delete it, so that it is recreated");
    assert_eq!(rig.trouble(&trouble("former")), None);
    let is_told = |one: &Request| {
        one.resource == "events"
            && one.body["reason"] == "NetworksDiffer"
            && one.body["regarding"]["name"] == "missed"
    };
    assert!(rig.server.wait_for(mark, |requests| requests.iter().any(is_told)));
    assert!(evictions(&rig, mark).is_empty());
}

#[test]
fn a_pod_is_evicted_when_the_runtime_asks_again_and_as_its_budget_allows() {
    let mut rig = rig("evict");
    rig.start();
    let mark = rig.server.mark();
    running(&rig, "missed", Some("ReplicaSet"));
    rig.await_trouble(&trouble("missed"), PATIENCE, "it is evicted once the runtime asks this agent");
    assert!(evictions(&rig, mark).is_empty());
    let refused = rig.server.faults().times(
        1,
        When::on(Verb::Create, "pods/eviction"),
        Fault::AnswerRetryAfter(429, 1),
    );
    // Another pod starts, and its networks are requested.
    rig.settle("other");
    rig.await_trouble(&trouble("missed"), PATIENCE, "its eviction is put off");
    assert_eq!(rig.server.faults().hits(refused), 1);
    let ends =
        || !rig.server.get("pods", NAMESPACE, "missed").unwrap()["metadata"]["deletionTimestamp"].is_null();
    assert!(eventually(PATIENCE * 2, ends), "{:?}", rig.trouble(&trouble("missed")));
    assert!(eventually(PATIENCE, || evictions(&rig, mark).iter().all(|(_, answer, _)| answer.is_some())));
    let only_this = json!({"preconditions": {"uid": "uid-missed"}});
    assert_eq!(
        evictions(&rig, mark),
        [("missed".to_owned(), Some(429), only_this.clone()), ("missed".to_owned(), Some(201), only_this)]
    );
    let is_told = |one: &Request| one.resource == "events" && one.body["reason"] == "Evicted";
    assert!(rig.server.wait_for(mark, |requests| requests.iter().any(is_told)));
    assert!(eventually(PATIENCE, || rig.trouble(&trouble("missed")).is_none()));
}

#[test]
fn static_pods_pods_of_nobody_and_daemon_sets_that_come_back_are_not_evicted() {
    let mut rig = rig("evict");
    rig.start();
    let mark = rig.server.mark();
    running(&rig, "alone", None);
    running(&rig, "static", Some("Node"));
    let mirror = json!({"metadata": {"annotations": {"kubernetes.io/config.mirror": "7f", "kubernetes.io/config.source": "file"}}});
    rig.server.patch("pods", NAMESPACE, "static", &mirror).unwrap();
    running(&rig, "daemon-1", Some("DaemonSet"));
    for name in ["alone", "static", "daemon-1"] {
        rig.await_trouble(&trouble(name), PATIENCE, MISSED);
    }
    rig.settle("other");
    rig.await_trouble(&trouble("alone"), PATIENCE, "it has no controller that would recreate it");
    rig.await_trouble(&trouble("static"), PATIENCE, "it is a static pod, which is not evicted");
    assert!(eventually(PATIENCE, || evictions(&rig, mark).len() == 1));
    rig.server.delete("pods", NAMESPACE, "daemon-1").unwrap();
    running(&rig, "daemon-2", Some("DaemonSet"));
    rig.await_trouble(&trouble("daemon-2"), PATIENCE, MISSED);
    rig.settle("another");
    rig.await_trouble(
        &trouble("daemon-2"),
        PATIENCE,
        "1 pods of DaemonSet web were evicted in the last hour",
    );
    let evicted: Vec<_> = evictions(&rig, mark).into_iter().map(|(name, ..)| name).collect();
    assert_eq!(evicted, ["daemon-1"]);
}

/// Writes libcni's cache of the plugin that attached the pod.
fn remember(rig: &Rig, pod: &Pod) -> PathBuf {
    fs::create_dir_all(rig.node.path("cni-cache/results")).unwrap();
    let path = rig.node.path("cni-cache/results").join(format!("cbr0-{}-eth0", pod.container));
    let config = json!({"cniVersion": "1.0.0", "name": "cbr0", "plugins": [{"type": "former"}]});
    let cached = json!({
        "kind": "cniCacheV1", "containerId": pod.container, "config": STANDARD.encode(config.to_string()),
        "ifName": "eth0", "networkName": "cbr0", "netns": pod.namespace.path(),
        "cniArgs": [["IgnoreUnknown", "1"]],
        "result": {"cniVersion": "1.0.0", "interfaces": [{"name": "eth0"}]},
    });
    fs::write(&path, cached.to_string()).unwrap();
    path
}

#[test]
fn a_pod_is_attached_where_it_is_and_its_del_takes_all_of_it_back() {
    let mut rig = rig("attach");
    let socket = rig.node.path("cri.sock");
    let runtime = Cri::serve(&socket).unwrap();
    rig.node.set("runtimeSocket", json!(socket));
    rig.node.plugin("former", &json!({})).unwrap();
    rig.start();
    let (pod, starting) = (Pod::new("missed").unwrap(), Pod::new("starting").unwrap());
    running(&rig, "missed", None);
    rig.await_trouble(&trouble("missed"), PATIENCE, "the runtime has 0 ready sandboxes of it");
    let cache = remember(&rig, &pod);
    // A sandbox that another pod of this name had, and that of the pod.
    let sandbox = |id: &str, uid: &str, pod: &Pod| Sandbox {
        id: id.to_owned(),
        namespace: NAMESPACE.to_owned(),
        name: pod.name.clone(),
        uid: uid.to_owned(),
        netns: pod.namespace.path().to_owned(),
    };
    *runtime.sandboxes() =
        vec![sandbox("c-before", "uid-before", &starting), sandbox(&pod.container, "uid-missed", &pod)];
    let mut entries = Vec::new();
    let attached = eventually(PATIENCE * 2, || {
        let object = rig.server.get("pods", NAMESPACE, "missed").unwrap();
        let text = object["metadata"]["annotations"][STATUS].as_str().unwrap_or("[]").to_owned();
        entries = serde_json::from_str::<Vec<Value>>(&text).unwrap();
        entries.len() == 2
    });
    assert!(attached, "{:?} {entries:#?}", rig.trouble(&trouble("missed")));
    let networks: Vec<_> = entries.iter().map(|entry| (&entry["interface"], &entry["name"])).collect();
    assert_eq!(networks, [(&json!("net1"), &json!("shop/lan-a")), (&json!("net2"), &json!("shop/lan-b"))]);
    assert!(eventually(PATIENCE, || rig.trouble(&trouble("missed")).is_none()));
    rig.node.check(&pod).success();

    // An agent that is restarted knows it.
    rig.node.kill().unwrap();
    rig.start();
    rig.node.check(&pod).success();
    rig.del(&pod).success();
    let calls = rig.node.take_calls().unwrap();
    let verbs: Vec<_> = calls.iter().map(|call| call["env"]["CNI_COMMAND"].clone()).collect();
    assert_eq!(verbs, ["DEL"], "the plugin that had attached the pod");
    assert!(!cache.exists());
    Snapshot::take(&rig.node, &[&pod]).unwrap().assert_nothing_is_left();
}

#[test]
fn a_pod_that_the_runtime_asks_for_and_whose_add_fails_is_left_to_it() {
    let mut rig = rig("evict");
    rig.start();
    let mark = rig.server.mark();
    let mut failing = object("failing", NODE);
    failing["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] = json!("nowhere");
    create_running(&rig, failing, Some("ReplicaSet"));
    rig.add(&Pod::new("failing").unwrap()).failure();
    rig.settle("other");
    // Several checks.
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(rig.trouble(&trouble("failing")), None);
    assert!(evictions(&rig, mark).is_empty());
}
