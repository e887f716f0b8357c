//! Live pods: their interfaces follow their annotation.

use netattach_tests::Pod;
use netattach_tests::manifest::{self, NAMESPACE};
use netattach_tests::node::ip;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{PATIENCE, eventually};
use serde_json::{Value, json};

use crate::rig::{Rig, STATUS};

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
