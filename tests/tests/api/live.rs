//! Live pods: their interfaces follow their annotation.

use std::path::Path;
use std::process::Command;

use netattach_tests::Pod;
use netattach_tests::manifest::{self, NAMESPACE};
use netattach_tests::node::{executable, ip};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{PATIENCE, eventually};
use serde_json::{Value, json};

use crate::rig::{NODE, Rig, STATUS, object};

const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";

/// Interface and network of each attachment but the default one, by the published status.
fn published(rig: &Rig, pod: &Pod) -> Vec<(String, String)> {
    let object = rig.server.get("pods", NAMESPACE, &pod.name).unwrap();
    let text = object["metadata"]["annotations"][STATUS].as_str().unwrap_or("[]").to_owned();
    let entries: Vec<Value> = serde_json::from_str(&text).unwrap();
    let of = |entry: &Value, key: &str| entry[key].as_str().unwrap_or_default().to_owned();
    let others = entries.iter().filter(|entry| entry["default"] != true);
    others.map(|entry| (of(entry, "interface"), of(entry, "name"))).collect()
}

fn annotate(rig: &Rig, pod: &Pod, networks: &str) {
    let patch = json!({"metadata": {"annotations": {NETWORKS: networks}}});
    rig.server.patch("pods", NAMESPACE, &pod.name, &patch).unwrap();
}

fn await_published(rig: &Rig, pod: &Pod, expected: &[(&str, &str)]) {
    let is_it = || {
        let found = published(rig, pod);
        found.iter().map(|(ifname, network)| (ifname.as_str(), network.as_str())).eq(expected.iter().copied())
    };
    assert!(eventually(PATIENCE, is_it), "{:?}, not {expected:?}", published(rig, pod));
}

#[test]
fn interfaces_follow_a_changed_annotation_and_what_fails_leaves_nothing() {
    let rig = Rig::started();
    // Its bridge is a link of another kind.
    ip(&rig.node.namespace, &["link", "add", "nobridge", "type", "veth", "peer", "name", "nobridge1"])
        .unwrap();
    let broken = json!({"cniVersion": "1.0.0", "type": "bridge", "bridge": "nobridge",
        "ipam": rig.node.host_local(&["10.63.0.0/24"])});
    rig.server.create(&manifest::network(NAMESPACE, "broken", &broken)).unwrap();
    let pod = rig.pod("a");
    rig.add(&pod).success();
    let of_add = [("net1", "shop/lan-a"), ("net2", "shop/lan-b")];
    await_published(&rig, &pod, &of_add);

    annotate(&rig, &pod, "lan-a,lan-b,lan-a@fast");
    await_published(&rig, &pod, &[of_add[0], of_add[1], ("fast", "shop/lan-a")]);
    rig.node.check(&pod).success();
    let whole = Snapshot::take(&rig.node, &[&pod]).unwrap();

    annotate(&rig, &pod, "lan-a,lan-b,lan-a@fast,broken");
    let object = format!("pod {NAMESPACE}/a");
    rig.await_trouble(&object, PATIENCE, "nobridge");
    rig.node.check(&pod).success();
    assert_eq!(Snapshot::take(&rig.node, &[&pod]).unwrap(), whole, "it was rolled back");

    annotate(&rig, &pod, "lan-a,lan-b,{");
    rig.await_trouble(&object, PATIENCE, "its changed annotation is invalid");
    await_published(&rig, &pod, &[of_add[0], of_add[1], ("fast", "shop/lan-a")]);

    annotate(&rig, &pod, "lan-a");
    await_published(&rig, &pod, &of_add);
    rig.await_trouble(&object, PATIENCE, "net2 is not in its annotation any more");
    rig.node.check(&pod).success();
    annotate(&rig, &pod, "lan-a,lan-b");
    assert!(eventually(PATIENCE, || rig.trouble(&object).is_none()), "{:?}", rig.trouble(&object));
    rig.del(&pod).success();
    ip(&rig.node.namespace, &["link", "del", "nobridge"]).unwrap();
    Snapshot::take(&rig.node, &[&pod]).unwrap().assert_nothing_is_left();
}

/// An author who may change a pod's annotation must not control the terminal of an administrator who looks for the
/// problem.
#[test]
fn what_an_annotation_has_for_a_terminal_is_shown_and_not_done() {
    let rig = Rig::started();
    let pod = rig.pod("a");
    rig.add(&pod).success();
    await_published(&rig, &pod, &[("net1", "shop/lan-a"), ("net2", "shop/lan-b")]);
    let hostile = "\u{1b}]52;c;eA==\u{7}\u{1b}[2J\u{9b}\nOBJECT  PROBLEM";
    let networks = json!([
        {"name": "lan-a"}, {"name": "lan-b"},
        {"name": "lan-a", "interface": "fast", "cni-args": {"sourceCheck": hostile}}
    ]);
    annotate(&rig, &pod, &networks.to_string());
    rig.await_trouble(&format!("pod {NAMESPACE}/a"), PATIENCE, "unknown variant");
    let mut command = Command::new(executable("netattachctl").unwrap());
    let shown = command.arg("--socket").arg(rig.node.socket()).arg("status").output().unwrap();
    let text = String::from_utf8(shown.stdout).unwrap();
    assert!(!text.contains(|sign: char| sign != '\n' && sign.is_control()), "{text:?}");
    assert!(text.contains(r"`\u{1b}]52;c;eA==\u{7}\u{1b}[2J\u{9b}\nOBJECT"), "{text}");
    rig.del(&pod).success();
    Snapshot::take(&rig.node, &[&pod]).unwrap().assert_nothing_is_left();
}

/// A network whose plugin hangs, of an author with several pods, does not delay pods of another namespace.
#[test]
fn a_network_that_hangs_keeps_no_other_pod_from_following_its_annotation() {
    const AUTHOR: &str = "author";
    let rig = Rig::started();
    rig.node.plugin("hangs", &json!({"ADD": {"sleepMs": 600_000}})).unwrap();
    rig.server.create(&manifest::namespace(AUTHOR, &json!({}))).unwrap();
    let hangs = json!({"cniVersion": "1.0.0", "type": "hangs"});
    rig.server.create(&manifest::network(AUTHOR, "hangs", &hangs)).unwrap();
    let of_author: Vec<Pod> = (0..5).map(|number| Pod::new(&format!("a{number}")).unwrap()).collect();
    for pod in &of_author {
        let mut object = object(&pod.name, NODE);
        object["metadata"]["namespace"] = json!(AUTHOR);
        object["metadata"]["annotations"][NETWORKS] = json!("");
        rig.server.create(&object).unwrap();
        let args = format!("IgnoreUnknown=1;K8S_POD_NAMESPACE={AUTHOR};K8S_POD_NAME={}", pod.name);
        rig.node.call("ADD", pod).with("CNI_ARGS", &args).run().success();
    }
    let pod = rig.pod("z");
    rig.add(&pod).success();
    rig.node.take_calls().unwrap();
    // They should get one of the other pod's networks after it.
    let patch = json!({"metadata": {"annotations": {NETWORKS: format!("hangs,{NAMESPACE}/lan-a")}}});
    for of_author in &of_author {
        rig.server.patch("pods", AUTHOR, &of_author.name, &patch).unwrap();
    }
    let mut hanging = Vec::new();
    let are_asked = eventually(PATIENCE, || {
        let calls = rig.node.take_calls().unwrap();
        let begun = calls.iter().filter(|call| call["plugin"] == "hangs");
        hanging.extend(begun.map(|call| call["pid"].as_u64().unwrap()));
        hanging.len() == 4
    });
    assert!(are_asked, "{hanging:?} of the most that may hang");
    annotate(&rig, &pod, "lan-a,lan-b,lan-a@fast");
    let of_pod = [("net1", "shop/lan-a"), ("net2", "shop/lan-b"), ("fast", "shop/lan-a")];
    await_published(&rig, &pod, &of_pod);
    rig.del(&pod).success();
    drop(rig);
    // Whoever takes over its children may be slow to ask how they ended.
    let have_ended = || hanging.iter().all(|pid| !Path::new(&format!("/proc/{pid}")).exists());
    assert!(eventually(PATIENCE, have_ended), "{hanging:?} have ended with the node");
}
