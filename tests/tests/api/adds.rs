//! The requests of a CNI call to the server.

use std::time::{Duration, Instant};

use netattach_tests::api_server::{Fault, Options, Verb, When};
use netattach_tests::manifest::{self, NAMESPACE};
use netattach_tests::traffic::{PATIENCE, eventually, stretched};
use netattach_tests::{Outcome, Pod};
use serde_json::{Value, json};

use crate::rig::{LABEL, NODE, Rig, STATUS, calls, object, seen, timed};

/// How long an agent waits for an object that exists on the server but not yet in its watch.
const LAG: Duration = Duration::from_millis(500);
/// The lag of a watch in these tests: within it, an ADD reaches the agent, and waits.
const BEHIND: Duration = Duration::from_millis(200);

#[test]
fn an_add_reads_nothing_and_writes_once_and_a_del_neither() {
    let rig = Rig::started();
    let mark = rig.server.mark();
    let pod = rig.pod("a");
    rig.add(&pod).success();
    let entries = rig.published("a");
    let networks: Vec<&str> =
        entries.as_array().unwrap().iter().map(|entry| entry["name"].as_str().unwrap()).collect();
    assert_eq!(networks[1..], ["shop/lan-a", "shop/lan-b"]);
    let requests = rig.server.requests_since(mark);
    assert_eq!(calls(&requests), [(Verb::Patch, "pods/status shop/a".to_owned())]);
    let body = &requests.iter().find(|one| one.verb == Verb::Patch).unwrap().body;
    let written: Value =
        serde_json::from_str(body["metadata"]["annotations"][STATUS].as_str().unwrap()).unwrap();
    assert_eq!(written, entries);
    assert_eq!(
        (&body["metadata"]["uid"], &body["metadata"]["labels"]),
        (&json!("uid-a"), &json!({LABEL: ""}))
    );
    // A pod ends: the kubelet has marked it before the runtime detaches it.
    rig.server.begin_deletion("pods", NAMESPACE, "a").unwrap();
    // The server sends events in order.
    rig.settle("b");
    let mark = rig.server.mark();
    rig.del(&pod).success();
    rig.server.delete("pods", NAMESPACE, "a").unwrap();
    rig.settle("c");
    assert_eq!(calls(&rig.server.requests_since(mark)), [(Verb::Patch, "pods/status shop/c".to_owned())]);
}

#[test]
fn a_pod_that_the_watch_has_not_shown_is_asked_for_once() {
    let rig = Rig::started();
    rig.server.faults().hold_watches("pods");
    let mark = rig.server.mark();
    let pod = rig.pod("a");
    rig.add(&pod).success();
    rig.published("a");
    let requests = rig.server.requests_since(mark);
    assert_eq!(
        calls(&requests),
        [(Verb::Get, "pods shop/a".to_owned()), (Verb::Patch, "pods/status shop/a".to_owned())],
        "{:#?}",
        seen(&requests)
    );
    rig.server.faults().release_watches("pods");
    rig.settle("b");
    rig.del(&pod).success();
}

/// ADDs of one pod after the other, each while the objects that `prepare` creates are on the server but appear in the
/// watch of that resource only a moment later. ADDs that took longer than the agent waits are ignored, as the machine
/// was busy: repeats until three were in time. `judge` gets those, with the server's log since the pod was created.
fn while_a_watch_lags(
    rig: &Rig,
    resource: &str,
    prepare: impl Fn(&str) -> Pod,
    judge: impl Fn(&str, Outcome, Vec<(Verb, String)>),
) {
    let mut in_time = 0;
    let mut number = 0;
    let enough = eventually(PATIENCE * 3, || {
        number += 1;
        let name = format!("late-{number}");
        rig.server.faults().hold_watches(resource);
        let mark = rig.server.mark();
        let pod = prepare(&name);
        let began = Instant::now();
        let (took, outcome) = std::thread::scope(|scope| {
            let call = scope.spawn(|| timed(&rig.call("ADD", &pod)));
            std::thread::sleep(BEHIND.saturating_sub(began.elapsed()));
            rig.server.faults().release_watches(resource);
            call.join().unwrap()
        });
        if took < LAG {
            judge(&name, outcome, calls(&rig.server.requests_since(mark)));
            in_time += 1;
        }
        rig.del(&pod).success();
        in_time == 3
    });
    assert!(enough, "{in_time} of {number} ADDs took less than {LAG:?}");
}

#[test]
fn a_pod_that_the_watch_shows_in_a_moment_is_not_asked_for() {
    let rig = Rig::started();
    let prepare = |name: &str| {
        let mut plain = manifest::pod(name, &json!({}), &Value::Null);
        plain["metadata"]["uid"] = json!(format!("uid-{name}"));
        plain["spec"]["nodeName"] = json!(NODE);
        rig.server.create(&plain).unwrap();
        Pod::new(name).unwrap()
    };
    while_a_watch_lags(&rig, "pods", prepare, |name, outcome, calls| {
        outcome.success();
        let asked: Vec<_> = calls.iter().filter(|(verb, _)| *verb == Verb::Get).collect();
        assert!(asked.is_empty(), "{name}: {asked:?}");
    });
}

/// Kinds are watched one by one: the pod may be there before the definition that was made before it.
#[test]
fn a_definition_that_the_watch_shows_a_moment_after_the_pod_is_waited_for() {
    let rig = Rig::started();
    let prepare = |name: &str| {
        let config = json!({
            "cniVersion": "1.0.0", "type": "bridge", "bridge": "br3", "ipam": rig.node.host_local(&["10.63.0.0/24"])
        });
        rig.server.create(&manifest::network(NAMESPACE, name, &config)).unwrap();
        let mut pod = object(name, NODE);
        pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] = json!(name);
        rig.server.create(&pod).unwrap();
        Pod::new(name).unwrap()
    };
    while_a_watch_lags(&rig, "network-attachment-definitions", prepare, |name, outcome, _| {
        outcome.success();
        assert_eq!(rig.published(name)[1]["name"], format!("{NAMESPACE}/{name}"));
    });
}

#[test]
fn a_pod_that_is_not_there_or_elsewhere_is_refused_in_time() {
    let mut rig = Rig::new(&Options::default());
    rig.node.set("podWaitSeconds", json!(1));
    rig.start();
    rig.server.create(&object("elsewhere", "another")).unwrap();
    rig.settle("settled");
    rig.server.faults().hold_watches("pods");
    rig.server.create(&object("hidden", NODE)).unwrap();
    rig.server.faults().always(When::on(Verb::Get, "pods").named("hidden"), Fault::NoAnswer);
    // What the server has said of a pod once is so; after an error it is asked again while there is time.
    rig.server.create(&object("refused", NODE)).unwrap();
    rig.server.faults().always(When::on(Verb::Get, "pods").named("refused"), Fault::Answer(503));
    for name in ["missing", "elsewhere", "hidden", "refused"] {
        let mark = rig.server.mark();
        let pod = Pod::new(name).unwrap();
        let (took, outcome) = timed(&rig.call("ADD", &pod));
        let (code, message) = outcome.failure();
        assert_eq!(code, 11, "{name}: {message}");
        assert!(took < stretched(Duration::from_secs(4)), "{name}: {took:?}");
        let asked = calls(&rig.server.requests_since(mark));
        let most = if name == "refused" { 2 } else { 1 };
        assert!((1..=most).contains(&asked.len()), "{asked:?}");
        assert_eq!(asked, vec![(Verb::Get, format!("pods shop/{name}")); asked.len()]);
    }
}

/// Whatever their number, none waits for the requests of the others.
#[test]
fn many_pods_that_are_not_there_are_refused_in_time() {
    let mut rig = Rig::new(&Options::default());
    rig.node.set("podWaitSeconds", json!(1));
    rig.start();
    rig.settle("settled");
    rig.server.faults().always(When::on(Verb::Get, "pods"), Fault::NoAnswer);
    let pods: Vec<Pod> = (0..120).map(|number| Pod::new(&format!("missing-{number}")).unwrap()).collect();
    std::thread::scope(|scope| {
        let calls: Vec<_> = pods.iter().map(|pod| scope.spawn(|| timed(&rig.call("ADD", pod)))).collect();
        for call in calls {
            let (took, outcome) = call.join().unwrap();
            let (code, message) = outcome.failure();
            assert_eq!(code, 11, "{message}");
            assert!(took < stretched(Duration::from_secs(8)), "{took:?}");
        }
    });
}

#[test]
fn a_pod_of_the_same_name_with_another_uid_is_another_pod() {
    let mut rig = Rig::new(&Options::default());
    rig.node.set("podWaitSeconds", json!(1));
    rig.start();
    let pod = rig.pod("a");
    let (code, message) = rig.call_by_uid("ADD", &pod, "uid-of-the-next").run().failure();
    assert_eq!(code, 11, "{message}");
    rig.server.delete("pods", NAMESPACE, "a").unwrap();
    let mut next = object("a", NODE);
    next["metadata"]["uid"] = json!("uid-of-the-next");
    rig.server.create(&next).unwrap();
    let mark = rig.server.mark();
    rig.call_by_uid("ADD", &pod, "uid-of-the-next").run().success();
    rig.published("a");
    assert_eq!(calls(&rig.server.requests_since(mark)), [(Verb::Patch, "pods/status shop/a".to_owned())]);
}

#[test]
fn an_add_whose_status_is_required_fails_without_it() {
    let mut rig = Rig::new(&Options::default());
    rig.node.set("kubernetes", json!({"status": "required"}));
    rig.start();
    let pod = rig.pod("a");
    let fault = rig.server.faults().always(When::on(Verb::Patch, "pods/status"), Fault::Answer(500));
    let (code, message) = rig.add(&pod).failure();
    assert_eq!(code, 11, "{message}");
    assert!(message.contains("500 "), "{message}");
    assert!(rig.server.faults().lift(fault) >= 2);
    assert!(eventually(PATIENCE, || rig.add(&pod).exit == 0));
    // It was there when the ADD returned.
    assert!(rig.server.get("pods", NAMESPACE, "a").unwrap()["metadata"]["annotations"][STATUS].is_string());
}

/// The publisher retries a status until it is written; the status of a rolled-back ADD is never written.
#[test]
fn an_add_that_failed_for_its_status_leaves_none_to_be_published() {
    let mut rig = Rig::new(&Options::default());
    rig.node.set("kubernetes", json!({"status": "required"}));
    rig.start();
    let pod = rig.pod("a");
    let fault = rig.server.faults().always(When::on(Verb::Patch, "pods/status"), Fault::Answer(500));
    let mark = rig.server.mark();
    assert_eq!(rig.add(&pod).failure().0, 11);
    assert_eq!(rig.node.ctl(&["attachments"]).unwrap(), json!([]));
    rig.server.faults().lift(fault);
    assert!(eventually(PATIENCE, || rig.writes(mark, "a").contains(&Some(200))));
    let metadata = rig.server.get("pods", NAMESPACE, "a").unwrap()["metadata"].take();
    assert_eq!((&metadata["annotations"][STATUS], metadata["labels"].get(LABEL)), (&Value::Null, None));
}

#[test]
fn a_repeated_add_whose_status_is_required_leaves_the_pod_attached_when_it_fails() {
    let mut rig = Rig::new(&Options::default());
    rig.node.set("kubernetes", json!({"status": "required"}));
    rig.node.set("repeatedAdd", json!("return"));
    rig.start();
    let pod = rig.pod("a");
    let first = rig.add(&pod).success();
    let fault = rig.server.faults().always(When::on(Verb::Patch, "pods/status"), Fault::Answer(500));
    let nothing = json!({"metadata": {"annotations": {STATUS: null}, "labels": {LABEL: null}}});
    rig.server.patch("pods", NAMESPACE, "a", &nothing).unwrap();
    assert!(
        eventually(PATIENCE, || rig.server.faults().hits(fault) >= 1),
        "the agent has seen that it is gone"
    );
    assert_eq!(rig.add(&pod).failure().0, 11);
    rig.call("CHECK", &pod).run().success();
    rig.server.faults().lift(fault);
    rig.published("a");
    assert_eq!(rig.add(&pod).success(), first);
}

/// The cluster's ranges, from Nodes and ServiceCIDRs, stay on the first interface when the default route moves.
#[test]
fn the_clusters_own_ranges_stay_where_the_default_route_was() {
    let mut rig = Rig::new(&Options::default());
    rig.server
        .create(&json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}, "spec": {"podCIDRs": ["10.50.0.0/16"]},
            "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.7"}]}
        }))
        .unwrap();
    rig.server
        .create(&json!({
            "apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR", "metadata": {"name": "kubernetes"},
            "spec": {"cidrs": ["10.96.0.0/12"]}
        }))
        .unwrap();
    rig.start();
    let mut moved = object("a", NODE);
    moved["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] =
        json!(json!([{"name": "lan-a", "default-route": ["10.61.0.1"]}]).to_string());
    rig.server.create(&moved).unwrap();
    let pod = Pod::new("a").unwrap();
    let result = rig.add(&pod).success();
    let by = |destination: &str| json!({"dst": destination, "gw": "10.50.0.1"});
    let told: Vec<Value> = result["routes"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|route| !route["dst"].as_str().unwrap().contains(':'))
        .cloned()
        .collect();
    assert_eq!(told, [by("10.50.0.0/16"), by("10.96.0.0/12"), by("192.0.2.7/32")]);
    let status = rig.published("a");
    assert_eq!(
        status[1]["dev.netattach.warnings"],
        json!([
            "the default route takes along what goes to pods and addresses of other nodes, whose ranges are not known: \
             clusterCIDRs names them"
        ]),
        "{status:#}"
    );
    rig.del(&pod).success();
}

/// An author of pods in a cluster is no administrator of its nodes, and may not name an executed plugin's device; and
/// a device of a resource needs the kubelet's confirmation.
#[test]
fn a_pod_gets_no_device_for_naming_it() {
    let rig = Rig::started();
    rig.node.plugin("vf", &json!({"ADD": {"result": {"cniVersion": "1.0.0"}}})).unwrap();
    let config = json!({"cniVersion": "1.0.0", "type": "vf"});
    let mut of_resource = manifest::network(NAMESPACE, "of-resource", &config);
    of_resource["metadata"]["annotations"] = json!({"k8s.v1.cni.cncf.io/resourceName": "example.com/vf"});
    // A pod that is attached by the second has seen the first.
    for definition in [of_resource, manifest::network(NAMESPACE, "free", &config)] {
        rig.server.create(&definition).unwrap();
    }
    let refused = |name: &str, network: &str| {
        let selection = json!([{"name": network, "deviceID": "0000:03:00.0"}]);
        let mut pod = manifest::pod(name, &json!({}), &selection);
        pod["metadata"]["uid"] = json!(format!("uid-{name}"));
        pod["spec"]["nodeName"] = json!(NODE);
        rig.server.create(&pod).unwrap();
        rig.add(&Pod::new(name).unwrap()).failure()
    };
    let no_resource = "attach net1 (shop/free): deviceID 0000:03:00.0 asked for by the pod: the definition has no resource \
                       (k8s.v1.cni.cncf.io/resourceName) whose devices pods are given";
    assert_eq!(refused("a", "free"), (7, no_resource.to_owned()));
    let no_kubelet = format!(
        "network shop/of-resource: the kubelet's socket {} does not exist (podResourcesSocket), so the devices of the pod are unknown",
        rig.node.path("kubelet.sock").display()
    );
    assert_eq!(refused("b", "of-resource"), (11, no_kubelet));
    assert_eq!(rig.node.take_calls().unwrap(), Vec::<Value>::new());
}
