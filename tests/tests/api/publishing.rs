//! The network-status of pods, written to a server that refuses, fails, or has another pod of that name meanwhile.

use std::fs;
use std::time::Duration;

use netattach_tests::Pod;
use netattach_tests::api_server::{Fault, ForeignUid, Options, Verb, When};
use netattach_tests::manifest::{self, NAMESPACE};
use netattach_tests::traffic::{PATIENCE, eventually};
use serde_json::{Value, json};

use crate::rig::{LABEL, NODE, Rig, STATUS, object};

fn on_status() -> When {
    When::on(Verb::Patch, "pods/status")
}

#[test]
fn a_write_that_fails_is_tried_again_until_it_succeeds() {
    let rig = Rig::started();
    rig.server.faults().times(1, on_status(), Fault::Answer(500));
    rig.server.faults().times(1, on_status(), Fault::Answer(503));
    let mark = rig.server.mark();
    let pod = rig.pod("a");
    rig.add(&pod).success();
    rig.published("a");
    // The status is on the server a moment before its answer is written down.
    let written = || rig.writes(mark, "a") == [Some(500), Some(503), Some(200)];
    assert!(eventually(PATIENCE, written), "{:?}", rig.writes(mark, "a"));
    let bodies: Vec<Value> = rig
        .server
        .requests_since(mark)
        .into_iter()
        .filter(|one| one.verb == Verb::Patch)
        .map(|one| one.body)
        .collect();
    assert_eq!((&bodies[0], &bodies[1]), (&bodies[1], &bodies[2]));
}

#[test]
fn a_server_that_asks_for_a_pause_gets_it() {
    let rig = Rig::started();
    rig.server.faults().times(1, on_status(), Fault::AnswerRetryAfter(429, 3));
    let mark = rig.server.mark();
    let pod = rig.pod("a");
    rig.add(&pod).success();
    rig.published("a");
    let requests = rig.server.requests_since(mark);
    let at: Vec<_> = requests.iter().filter(|one| one.verb == Verb::Patch).map(|one| one.at).collect();
    assert_eq!(at.len(), 2);
    assert!(at[1] - at[0] >= Duration::from_secs(3), "{:?}", at[1] - at[0]);
}

#[test]
fn a_pod_that_another_plugin_has_attached_is_labelled_while_it_runs_and_keeps_its_status() {
    let rig = Rig::started();
    let status = json!([{"name": "shop/lan-a", "interface": "net1", "ips": ["10.61.0.77"]}]).to_string();
    let mut former = object("former", NODE);
    former["metadata"]["annotations"][STATUS] = json!(status);
    former["status"] = json!({"phase": "Running"});
    let mark = rig.server.mark();
    rig.server.create(&former).unwrap();
    let metadata = || rig.server.get("pods", NAMESPACE, "former").unwrap()["metadata"].take();
    let is_labelled = || metadata()["labels"][LABEL] == "by-another";
    assert!(eventually(PATIENCE, is_labelled), "{:#}", metadata());
    assert_eq!(metadata()["annotations"][STATUS], status);
    // Its addresses may be another pod's from now on.
    let ended = json!({"status": {"phase": "Succeeded"}});
    rig.server.patch("pods", NAMESPACE, "former", &ended).unwrap();
    assert!(eventually(PATIENCE, || metadata()["labels"].get(LABEL).is_none()), "{:#}", metadata());
    assert_eq!(metadata()["annotations"][STATUS], status);
    let answers = || rig.writes(mark, "former");
    assert!(eventually(PATIENCE, || answers() == [Some(200), Some(200)]), "{:?}", answers());
}

#[test]
fn the_status_of_a_pod_that_is_gone_is_dropped() {
    let rig = Rig::started();
    let pod = rig.pod("a");
    rig.settle("first");
    rig.server.faults().hold_watches("pods");
    rig.server.delete("pods", NAMESPACE, "a").unwrap();
    let mark = rig.server.mark();
    rig.add(&pod).success();
    assert!(eventually(PATIENCE, || rig.writes(mark, "a") == [Some(404)]), "{:?}", rig.writes(mark, "a"));
    rig.settle("b");
    rig.server.faults().release_watches("pods");
    rig.settle("c");
    assert_eq!(rig.writes(mark, "a"), [Some(404)]);
    rig.del(&pod).success();
}

/// A pod was replaced by another of its name, unknown to the agent.
fn replaced(foreign_uid: ForeignUid) -> (Rig, usize) {
    let mut rig = Rig::new(&Options { foreign_uid, ..Options::default() });
    rig.start();
    let pod = rig.pod("a");
    rig.settle("first");
    rig.server.faults().hold_watches("pods");
    rig.server.delete("pods", NAMESPACE, "a").unwrap();
    let mut next = object("a", NODE);
    next["metadata"]["uid"] = json!("uid-of-the-next");
    rig.server.create(&next).unwrap();
    let mark = rig.server.mark();
    rig.add(&pod).success();
    (rig, mark)
}

fn untouched(rig: &Rig) {
    let metadata = rig.server.get("pods", NAMESPACE, "a").unwrap()["metadata"].take();
    assert_eq!((&metadata["annotations"][STATUS], metadata["labels"].get(LABEL)), (&Value::Null, None));
}

#[test]
fn the_status_of_a_pod_never_becomes_that_of_its_successor() {
    let (rig, mark) = replaced(ForeignUid::Invalid);
    assert!(eventually(PATIENCE, || rig.writes(mark, "a") == [Some(422)]), "{:?}", rig.writes(mark, "a"));
    rig.settle("b");
    rig.server.faults().release_watches("pods");
    rig.settle("c");
    assert_eq!(rig.writes(mark, "a"), [Some(422)]);
    untouched(&rig);
}

#[test]
fn nor_where_the_server_calls_that_a_conflict() {
    let (rig, mark) = replaced(ForeignUid::Conflict);
    assert!(
        eventually(PATIENCE, || rig.writes(mark, "a").len() >= 2),
        "it is tried until the watch shows the other"
    );
    rig.server.faults().release_watches("pods");
    rig.settle("b");
    let tried = rig.writes(mark, "a");
    assert!(tried.iter().all(|answer| *answer == Some(409)), "{tried:?}");
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(rig.writes(mark, "a"), tried);
    untouched(&rig);
}

#[test]
fn what_is_over_before_it_could_be_written_is_never_written() {
    let rig = Rig::started();
    let pod = rig.pod("a");
    let fault = rig.server.faults().always(on_status().named("a"), Fault::Answer(503));
    let mark = rig.server.mark();
    rig.add(&pod).success();
    assert!(eventually(PATIENCE, || rig.server.faults().hits(fault) >= 1));
    rig.del(&pod).success();
    // Its writes are queued after those of the DEL.
    rig.settle("between");
    rig.server.faults().lift(fault);
    rig.settle("b");
    let answers = rig.writes(mark, "a");
    assert!(answers.iter().all(|answer| *answer == Some(503)), "{answers:?}");
    // The newest is written, once.
    let fault = rig.server.faults().always(on_status(), Fault::Answer(503));
    for _ in 0..3 {
        rig.add(&pod).success();
        rig.del(&pod).success();
    }
    rig.add(&pod).success();
    let mark = rig.server.mark();
    rig.server.faults().lift(fault);
    rig.published("a");
    rig.settle("c");
    assert_eq!(rig.writes(mark, "a").iter().filter(|answer| **answer == Some(200)).count(), 1);
}

#[test]
fn an_agent_that_was_restarted_writes_what_differs() {
    let mut rig = Rig::started();
    let [same, lost, over] = ["same", "lost", "over"].map(|name| rig.pod(name));
    for pod in [&same, &lost, &over] {
        rig.add(pod).success();
        rig.published(&pod.name);
    }
    rig.node.stop().unwrap();
    let nothing = json!({"metadata": {"annotations": {STATUS: null}, "labels": {LABEL: null}}});
    rig.server.patch("pods", NAMESPACE, "lost", &nothing).unwrap();
    // A pod that claims a status that no agent gave it.
    let mut forged = object("forged", NODE);
    forged["metadata"]["labels"] = json!({LABEL: ""});
    forged["metadata"]["annotations"][STATUS] =
        json!("[{\"name\": \"shop/lan-a\", \"ips\": [\"10.61.0.7\"]}]");
    rig.server.create(&forged).unwrap();
    let mark = rig.server.mark();
    rig.start();
    rig.published("lost");
    assert!(eventually(PATIENCE, || {
        let metadata = rig.server.get("pods", NAMESPACE, "forged").unwrap()["metadata"].take();
        metadata["annotations"][STATUS].is_null() && metadata["labels"].get(LABEL).is_none()
    }));
    rig.settle("b");
    let written = ["same", "lost", "over", "forged"].map(|name| rig.writes(mark, name).len());
    let requests = rig.server.requests_since(mark);
    let bodies: Vec<_> =
        requests.iter().filter(|one| one.verb == Verb::Patch).map(|one| (one.subject(), &one.body)).collect();
    assert_eq!(written, [0, 1, 0, 1], "{bodies:#?}");
}

/// The status is computed as soon as the journal is read, and the server may send the pods later.
#[test]
fn the_ports_of_a_pod_stay_published_while_an_agent_starts() {
    const PORTS: &str = "netattach.dev/ports";
    let mut rig = Rig::started();
    let mut named = object("named", NODE);
    named["spec"]["containers"][0]["ports"] = json!([{"name": "http", "containerPort": 8080}]);
    rig.server.create(&named).unwrap();
    let pod = Pod::new("named").unwrap();
    assert!(eventually(PATIENCE, || rig.add(&pod).exit == 0));
    rig.published("named");
    let ports = |rig: &Rig| {
        let mut metadata = rig.server.get("pods", NAMESPACE, "named").unwrap()["metadata"].take();
        metadata["annotations"][PORTS].take()
    };
    assert_eq!(ports(&rig), json!("{\"TCP/http\":[8080]}"));
    rig.node.stop().unwrap();
    let fault = rig.server.faults().always(When::resource("pods"), Fault::Delay(Duration::from_secs(1)));
    let mark = rig.server.mark();
    rig.start();
    rig.server.faults().lift(fault);
    rig.settle("b");
    assert_eq!((ports(&rig), rig.writes(mark, "named")), (json!("{\"TCP/http\":[8080]}"), Vec::new()));
}

#[test]
fn writes_come_at_a_steady_rate_after_a_burst() {
    const PODS: usize = 130;
    let mut rig = Rig::new(&Options::default());
    // Pods whose status is out of date: the next agent withdraws all of them at once.
    for number in 0..PODS {
        let mut left = object(&format!("left-{number}"), NODE);
        left["metadata"]["labels"] = json!({LABEL: ""});
        rig.server.create(&left).unwrap();
    }
    let mark = rig.server.mark();
    rig.start();
    let writes = |requests: &[netattach_tests::api_server::Request]| {
        requests.iter().filter(|one| one.verb == Verb::Patch && one.resource == "pods/status").count()
    };
    assert!(rig.server.wait_for(mark, |requests| writes(requests) >= PODS));
    let requests = rig.server.requests_since(mark);
    let at: Vec<_> = requests.iter().filter(|one| one.verb == Verb::Patch).map(|one| one.at).collect();
    assert_eq!(at.len(), PODS, "each once");
    // 100 at once, then one in 50 ms; some are under way between the agent's clock and the server's,
    // the first for as long as its connection takes.
    let least = Duration::from_millis(50) * (PODS as u32 - 100 - 15);
    assert!(at[PODS - 1] - at[0] >= least, "{:?}", at[PODS - 1] - at[0]);
}

/// Waits until nothing is published of a pod.
fn await_nothing_of(rig: &Rig, name: &str) {
    let mut metadata = Value::Null;
    let is_over = eventually(PATIENCE, || {
        metadata = rig.server.get("pods", NAMESPACE, name).unwrap()["metadata"].take();
        metadata["annotations"][STATUS].is_null() && metadata["labels"].get(LABEL).is_none()
    });
    assert!(is_over, "{metadata:#}");
}

/// A later agent wrote the record, or a byte of it is another.
#[test]
fn the_status_of_a_pod_whose_record_cannot_be_read_stays() {
    let mut rig = Rig::started();
    let pod = rig.pod("a");
    rig.add(&pod).success();
    let status = rig.published("a");
    rig.node.stop().unwrap();
    let record = rig.node.path(&format!("state/journal/{}@eth0.jsonl", pod.container));
    let mut harmed = fs::read(&record).unwrap();
    let plan = harmed.iter().position(|byte| *byte == b'\n').unwrap() + 1;
    harmed[plan + 60] ^= 1;
    fs::write(&record, harmed).unwrap();
    let mark = rig.server.mark();
    rig.start();
    let other = rig.pod("b");
    // Until the pods of other nodes are known.
    assert!(eventually(PATIENCE, || rig.add(&other).exit == 0));
    rig.published("b");
    assert_eq!((rig.published("a"), rig.writes(mark, "a")), (status, Vec::new()));
    // It is known that the pod is not attached once the others are known.
    rig.node.stop().unwrap();
    fs::remove_file(&record).unwrap();
    rig.start();
    await_nothing_of(&rig, "a");
}

/// Creates the pod `db-0` with that uid and network; returns a sandbox of it.
fn db_0(rig: &Rig, uid: &str, network: &str, sandbox: &str) -> Pod {
    let mut object = manifest::pod("db-0", &json!({}), &json!(network));
    object["metadata"]["uid"] = json!(uid);
    object["spec"]["nodeName"] = json!(NODE);
    rig.server.create(&object).unwrap();
    Pod { name: "db-0".to_owned(), ..Pod::new(sandbox).unwrap() }
}

/// The sandbox of the earlier pod stays for as long as its DEL fails.
#[test]
fn a_sandbox_whose_del_fails_keeps_no_status_of_the_next_pod_of_its_name() {
    let rig = Rig::started();
    rig.node.plugin("odd", &json!({"DEL": {"error": {"code": 100, "msg": "away"}}})).unwrap();
    let odd = json!({"cniVersion": "1.0.0", "type": "odd"});
    rig.server.create(&manifest::network(NAMESPACE, "odd", &odd)).unwrap();
    rig.settle("first");
    let earlier = db_0(&rig, "uid-1", "odd", "earlier");
    rig.call_by_uid("ADD", &earlier, "uid-1").run().success();
    rig.published("db-0");
    rig.call_by_uid("DEL", &earlier, "uid-1").run().failure();
    rig.server.delete("pods", NAMESPACE, "db-0").unwrap();
    let later = db_0(&rig, "uid-2", "lan-a", "later");
    rig.call_by_uid("ADD", &later, "uid-2").run().success();
    rig.published("db-0");
    rig.call_by_uid("DEL", &later, "uid-2").run().success();
    await_nothing_of(&rig, "db-0");
    // The later one has a sandbox again; the earlier one's sandbox does not affect it.
    rig.call_by_uid("ADD", &later, "uid-2").run().success();
    let status = rig.published("db-0");
    rig.node.plugin("odd", &json!({})).unwrap();
    rig.call_by_uid("DEL", &earlier, "uid-1").run().success();
    rig.settle("last");
    assert_eq!(rig.published("db-0"), status);
}

/// The DEL of the earlier pod follows later; the later pod ended while no agent ran.
#[test]
fn a_sandbox_without_a_del_keeps_no_status_of_the_next_pod_of_its_name_over_a_restart() {
    let mut rig = Rig::started();
    let earlier = db_0(&rig, "uid-1", "lan-a", "earlier");
    rig.call_by_uid("ADD", &earlier, "uid-1").run().success();
    rig.published("db-0");
    rig.server.delete("pods", NAMESPACE, "db-0").unwrap();
    let later = db_0(&rig, "uid-2", "lan-a", "later");
    rig.call_by_uid("ADD", &later, "uid-2").run().success();
    rig.published("db-0");
    rig.node.stop().unwrap();
    fs::remove_file(rig.node.path(&format!("state/journal/{}@eth0.jsonl", later.container))).unwrap();
    rig.start();
    await_nothing_of(&rig, "db-0");
}
