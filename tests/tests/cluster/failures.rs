//! Failures around the pods of a node: of the kubelet, the node itself, the runtime's disk, the API server.

use std::collections::BTreeSet;
use std::time::Instant;

use netattach_tests::cluster::{Loss, Setup};
use netattach_tests::nightly;
use netattach_tests::snapshot::Network;
use netattach_tests::traffic::{Conversation, eventually};
use serde_json::json;

use crate::rig::{OUTAGE, PACE, PATIENCE, Rig, Running};

fn containers(pods: &[Running]) -> BTreeSet<&str> {
    pods.iter().map(|pod| &*pod.container).collect()
}

/// A kubelet dies while pods start; then the node loses its power, once more together with the runtime's state, and
/// once more while there is no API server.
#[test]
fn pods_come_back_after_the_kubelet_the_node_and_the_runtimes_disk_fail() {
    let settings = [("collectAfterSeconds", json!(1))];
    let setup = Setup { settings: &settings, ..Setup::default() };
    let Some(mut rig) = Rig::new("reboots", &setup) else { return };
    rig.deploy("client", 1);
    rig.deploy("web", 4);
    let all = [("client", 1), ("web", 4)];
    // During their start.
    let has_begun = || rig.worker.node().ctl(&["attachments"]).is_ok_and(|rows| rows != json!([]));
    assert!(eventually(PATIENCE, has_begun), "no pod is attached");
    rig.worker.restart_kubelet().unwrap();
    let mut before = rig.settled(&all);
    rig.policed(&before).assert_holds();

    for (loss, is_outage) in [(Loss::Memory, false), (Loss::Runtime, false), (Loss::Memory, true)] {
        if is_outage {
            rig.cluster.stop_server();
        }
        rig.worker.reboot(&rig.cluster, loss).unwrap();
        if is_outage {
            // The agent notices by itself that the previous state is gone.
            let held = || rig.held();
            assert!(eventually(PATIENCE, || held() == (0, 0)), "{:?} {:#}", held(), rig.status());
            let source = rig.status()["ready"][0].clone();
            assert_eq!((&source["condition"], &source["met"]), (&json!("source"), &json!(false)), "{source}");
            rig.cluster.start_server().unwrap();
        }
        let after = rig.settled(&all);
        let names = |pods: &[Running]| pods.iter().map(|pod| pod.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&after), names(&before), "the same pods");
        assert!(containers(&after).is_disjoint(&containers(&before)), "in new sandboxes");
        rig.policed(&after).assert_holds();
        before = after;
    }
    rig.delete_deployment("web");
    rig.delete_deployment("client");
    rig.assert_nothing_is_left();
}

/// Without an API server a restarted kubelet leaves its pods alone, and so does the agent. Then the node loses its
/// power and the runtime all its state: the agent notices by itself that the previous pods are gone, and they return
/// with the server.
#[test]
fn the_kubelet_and_the_runtime_fail_while_there_is_no_api_server() {
    let settings = [("collectAfterSeconds", json!(1))];
    let setup = Setup { settings: &settings, ..Setup::default() };
    let Some(mut rig) = Rig::new("losses", &setup) else { return };
    rig.deploy("client", 1);
    rig.deploy("web", 4);
    let all = [("client", 1), ("web", 4)];
    let before = rig.settled(&all);
    let policed = rig.policed(&before);
    let untouched: Vec<_> = before.iter().map(|pod| rig.namespace(pod)).collect();
    let networks = || untouched.iter().map(|of| Network::of(of).unwrap()).collect::<Vec<_>>();
    let as_it_was = networks();
    let conversation = Conversation::paced(&policed.client, policed.server, PACE).unwrap();
    let [short, long] = OUTAGE;
    let outage = nightly(short, long);

    rig.cluster.stop_server();
    let stopped = Instant::now();
    rig.worker.restart_kubelet().unwrap();
    // It has half of the time to do harm.
    std::thread::sleep((outage / 2).saturating_sub(stopped.elapsed()));
    assert_eq!(rig.held(), (before.len(), 5 * before.len()));
    assert_eq!(networks(), as_it_was);
    policed.assert_holds();
    let (sent, lost) = conversation.end();
    assert!(sent > 0 && lost == 0, "{lost} of {sent}");
    drop((policed, untouched));

    rig.worker.reboot(&rig.cluster, Loss::Runtime).unwrap();
    let held = || rig.held();
    assert!(eventually(PATIENCE, || held() == (0, 0)), "{:?} {:#}", held(), rig.status());
    let source = rig.status()["ready"][0].clone();
    assert_eq!((&source["condition"], &source["met"]), (&json!("source"), &json!(false)), "{source}");
    std::thread::sleep(outage.saturating_sub(stopped.elapsed()));
    assert_eq!(rig.held(), (0, 0), "nobody knows a pod to start");

    rig.cluster.start_server().unwrap();
    let after = rig.settled(&all);
    let names = |pods: &[Running]| pods.iter().map(|pod| pod.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&after), names(&before), "the same pods");
    assert!(containers(&after).is_disjoint(&containers(&before)), "in new sandboxes");
    rig.policed(&after).assert_holds();
    rig.delete_deployment("web");
    rig.delete_deployment("client");
    rig.assert_nothing_is_left();
}

/// Attached pods do not notice that there is no API server, a known pod gets a new sandbox, and an agent that starts
/// meanwhile leaves policies unchanged. Afterwards everything is published.
#[test]
fn pods_go_on_while_there_is_no_api_server() {
    let Some(mut rig) = Rig::new("outage", &Setup::default()) else { return };
    rig.deploy("client", 1);
    rig.deploy("web", 4);
    let all = [("client", 1), ("web", 4)];
    let before = rig.settled(&all);
    let policed = rig.policed(&before);
    let untouched: Vec<_> = before[..3].iter().map(|pod| rig.namespace(pod)).collect();
    let networks = || untouched.iter().map(|of| Network::of(of).unwrap()).collect::<Vec<_>>();
    let as_it_was = networks();
    let conversation = Conversation::paced(&policed.client, policed.server, PACE).unwrap();

    rig.cluster.stop_server();
    let stopped = Instant::now();
    // The last pod loses its sandbox: the kubelet has another one made.
    let last = before.last().unwrap();
    rig.worker.containerd().cri().unwrap().stop_sandbox(&last.container).unwrap();
    let rows = || rig.worker.node().ctl(&["attachments"]).unwrap();
    let is_again = || {
        let rows = rows();
        let of_pod = rows.as_array().unwrap().iter().filter(|row| row["pod"]["name"] == *last.name);
        let rows: Vec<_> = of_pod.collect();
        rows.len() == 4
            && rows.iter().all(|row| row["state"] == "attached" && row["container_id"] != *last.container)
    };
    assert!(eventually(PATIENCE, is_again), "{:#}", rows());
    policed.assert_holds();
    let says = || rig.status()["troubles"].to_string().contains("the last known objects stay in force");
    assert!(eventually(PATIENCE, says), "{:#}", rig.status());

    rig.worker.node_mut().kill().unwrap();
    rig.worker.node_mut().start().unwrap();
    let source = rig.status()["ready"][0].clone();
    assert_eq!((&source["condition"], &source["met"]), (&json!("source"), &json!(false)), "{source}");
    policed.assert_holds();
    assert_eq!(networks(), as_it_was);
    let [short, long] = OUTAGE;
    std::thread::sleep(nightly(short, long).saturating_sub(stopped.elapsed()));
    policed.assert_holds();

    rig.cluster.start_server().unwrap();
    let after = rig.settled(&all);
    assert_eq!(after[..3], before[..3]);
    assert_ne!(after[4].container, before[4].container);
    assert_eq!(networks(), as_it_was);
    let (sent, lost) = conversation.end();
    assert!(sent > 0 && lost == 0, "{lost} of {sent}");
    policed.assert_holds();
    drop((policed, untouched));
    rig.delete_deployment("web");
    rig.delete_deployment("client");
    rig.assert_nothing_is_left();
}
