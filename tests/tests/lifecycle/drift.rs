//! Changes by others to attachments on the node are reverted. Changes in the pod are not.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::node::ip;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::tools::report_skipped;
use netattach_tests::traffic::{PATIENCE, eventually, ping};
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};

/// The shortest pause between two CHECKs that wait for something.
const BETWEEN_CHECKS: Duration = Duration::from_secs(1);

/// How long the agent may take to check all leases and records: half a minute, or up to three minutes if a check is
/// much work, as it is for an agent built without optimization.
const FOUND_BY_LOOKING: Duration = Duration::from_secs(200);

/// A node with the pod `a` on the default network, a bridge with hairpin, and a routed link.
fn scene() -> (Node, Pod) {
    let mut node = Node::new(&[]).unwrap();
    let port = json!({"cniVersion": "1.0.0", "type": "bridge", "bridge": "br7", "hairpinMode": true, "mtu": 1400,
        "ipam": node.host_local(&["10.71.0.0/24"])});
    let routed = json!({"cniVersion": "1.0.0", "type": "veth",
        "ipam": node.host_local(&["10.72.0.0/24", "fd00:72::/64"])});
    for (name, config) in [("port", port), ("routed", routed)] {
        node.write(name, &network(NAMESPACE, name, &config)).unwrap();
    }
    node.write("a", &pod("a", &json!({}), &json!("port,routed"))).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    node.await_status(&a);
    (node, a)
}

/// The node's end of an interface.
fn end(node: &Node, ifname: &str) -> String {
    let rows = node.ctl(&["attachments"]).unwrap();
    let row = rows.as_array().unwrap().iter().find(|row| row["ifname"] == ifname).unwrap().clone();
    row["host_interface"].as_str().unwrap().to_owned()
}

/// Waits until CHECK succeeds, after it has found a difference. Nothing is restored during a CHECK, and on a busy
/// machine CHECKs without pauses would always keep the agent from it: most of the time there is none.
fn is_put_back(node: &Node, pod: &Pod, what: &str) {
    let mut said = None;
    let is_whole = eventually(PATIENCE * 2, || {
        let began = Instant::now();
        let outcome = node.check(pod);
        said = (outcome.exit != 0).then_some(outcome.json);
        if said.is_some() {
            std::thread::sleep((began.elapsed() * 4).max(BETWEEN_CHECKS));
        }
        said.is_none()
    });
    assert!(is_whole, "{what}: {said:?}");
}

#[test]
fn ends_of_links_are_put_back_whatever_was_done_to_them() {
    let (mut node, a) = scene();
    let (port, routed) = (end(&node, "net1"), end(&node, "net2"));
    let whole = Snapshot::take(&node, &[&a]).unwrap();
    let port_is =
        |words: &[&str]| ip(&node.namespace, &[&["link", "set", port.as_str()], words].concat()).unwrap();
    let routed_is =
        |words: &[&str]| ip(&node.namespace, &[&["link", "set", routed.as_str()], words].concat()).unwrap();
    let is_whole_again = |what: &str| {
        let is_same = eventually(PATIENCE * 2, || Snapshot::take(&node, &[&a]).unwrap() == whole);
        assert!(is_same, "{what}: {:#?}", Snapshot::take(&node, &[&a]).unwrap());
        is_put_back(&node, &a, what);
    };
    port_is(&["type", "bridge_slave", "hairpin", "off"]);
    port_is(&["mtu", "1300"]);
    port_is(&["down"]);
    ip(&node.namespace, &["addr", "flush", "dev", &routed]).unwrap();
    routed_is(&["mtu", "1300"]);
    is_whole_again("changed in place");
    port_is(&["master", "br0"]);
    routed_is(&["down"]);
    is_whole_again("in another bridge, and down");
    port_is(&["nomaster"]);
    port_is(&["down"]);
    port_is(&["name", "stolen"]);
    routed_is(&["down"]);
    routed_is(&["name", "stolen-too"]);
    is_whole_again("in no bridge, and renamed");
    let log = node.stop().unwrap();
    assert!(log.contains("changed by another program; put back"), "{log}");
}

#[test]
fn what_is_changed_in_a_pod_is_found_by_check_and_left_alone() {
    let (mut node, a) = scene();
    ip(&a.namespace, &["link", "set", "net1", "down"]).unwrap();
    ip(&a.namespace, &["link", "set", "net1", "name", "bound"]).unwrap();
    // A difference on the node is restored meanwhile.
    ip(&node.namespace, &["link", "set", &end(&node, "net2"), "mtu", "1300"]).unwrap();
    let status = || ip(&node.namespace, &["-o", "link", "show", &end(&node, "net2")]);
    assert!(status().is_ok());
    let (code, message) = node.check(&a).failure();
    assert!(code > 0 && message.contains("net1 is gone from the pod"), "{message}");
    ip(&a.namespace, &["link", "show", "bound"]).unwrap();
    node.del(&a).success();
    node.stop().unwrap();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

/// No runtime asks for CHECK here.
#[test]
fn what_is_changed_in_a_pod_is_reported_until_it_is_put_back_there_or_detached() {
    let (mut node, a) = scene();
    node.write("b", &pod("b", &json!({}), &json!("port"))).unwrap();
    let b = Pod::new("b").unwrap();
    node.add(&b).success();
    let whole = Snapshot::take(&node, &[&a]).unwrap().pods;
    let in_a = |words: &[&str]| ip(&a.namespace, words).unwrap();
    let row = |name: &str, what: &str| {
        let problem = format!("in the pod: {what}; it is left as it is");
        json!({"object": format!("pod {NAMESPACE}/{name}"), "problem": problem})
    };
    let await_rows = |expected: &[Value]| {
        let mut told = Value::Null;
        // The pods are checked one after the other, after pauses of up to half a minute.
        let is_told = eventually(PATIENCE * 4, || {
            told = node.whole_status().unwrap()["troubles"].clone();
            told.as_array().unwrap() == expected
        });
        assert!(is_told, "{told:#}");
    };
    in_a(&["addr", "del", "10.71.0.2/24", "dev", "net1"]);
    in_a(&["link", "set", "net2", "mtu", "1300"]);
    ip(&b.namespace, &["link", "set", "net1", "down"]).unwrap();
    ip(&b.namespace, &["link", "set", "net1", "name", "bound"]).unwrap();
    ip(&b.namespace, &["link", "set", "bound", "up"]).unwrap();
    let changed = Snapshot::take(&node, &[&a, &b]).unwrap().pods;
    let of_a = [
        row("a net1", "interface net1 lacks address 10.71.0.2/24"),
        row("a net2", "interface net2 has MTU 1300, not 1500"),
    ];
    let of_b = row("b net1", "interface net1 is gone from the pod");
    await_rows(&[of_a[0].clone(), of_a[1].clone(), of_b.clone()]);
    assert_eq!(Snapshot::take(&node, &[&a, &b]).unwrap().pods, changed, "it is left as it is");
    assert!(node.ctl(&["status"]).unwrap()["ready"].as_array().unwrap().iter().all(|it| it["met"] == true));

    in_a(&["addr", "add", "10.71.0.2/24", "dev", "net1"]);
    await_rows(&[of_a[1].clone(), of_b]);
    node.del(&b).success();
    await_rows(&of_a[1..]);
    in_a(&["link", "set", "net2", "mtu", "1500"]);
    await_rows(&[]);
    assert_eq!(Snapshot::take(&node, &[&a]).unwrap().pods, whole);
    node.del(&a).success();
    let log = node.stop().unwrap();
    assert!(!log.contains("put back"), "{log}");
    Snapshot::take(&node, &[&a, &b]).unwrap().assert_nothing_is_left();
}

#[test]
fn a_bridge_that_is_removed_beneath_its_pods_is_made_again_as_it_was() {
    let (mut node, a) = scene();
    let whole = Snapshot::take(&node, &[&a]).unwrap();
    let gateway = "10.50.0.1".parse().unwrap();
    let is_whole_again = |what: &str| {
        let is_same = eventually(PATIENCE * 2, || Snapshot::take(&node, &[&a]).unwrap() == whole);
        assert!(is_same, "{what}: {:#?}\n{whole:#?}", Snapshot::take(&node, &[&a]).unwrap());
        is_put_back(&node, &a, what);
        assert!(ping(&a.namespace, gateway, PATIENCE).unwrap(), "{what}");
    };
    assert!(ping(&a.namespace, gateway, PATIENCE).unwrap());
    // One has the pods' gateway, the other has none.
    for bridge in ["br0", "br7"] {
        ip(&node.namespace, &["link", "del", bridge]).unwrap();
    }
    is_whole_again("removed");
    ip(&node.namespace, &["addr", "flush", "dev", "br0", "scope", "global"]).unwrap();
    is_whole_again("without addresses");
    ip(&node.namespace, &["link", "set", "br7", "down"]).unwrap();
    is_whole_again("down");
    node.del(&a).success();
    let log = node.stop().unwrap();
    for what in ["left without its bridge, which was removed", "deprived of 10.50.0.1/24 fd00:50::1/64"] {
        assert!(log.contains(what), "{what}: {log}");
    }
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

/// Its record shows that the bridge was closed, also to the next agent: the bridge, which has the mark, is gone.
#[test]
fn a_bridge_without_a_gateway_whose_maker_has_ended_is_made_again() {
    let (mut node, a) = scene();
    node.write("b", &pod("b", &json!({}), &json!("port"))).unwrap();
    let b = Pod::new("b").unwrap();
    node.add(&b).success();
    node.await_status(&b);
    node.del(&a).success();
    node.kill().unwrap();
    node.start().unwrap();
    let whole = Snapshot::take(&node, &[&b]).unwrap();
    ip(&node.namespace, &["link", "del", "br7"]).unwrap();
    let is_same = eventually(PATIENCE * 2, || Snapshot::take(&node, &[&b]).unwrap() == whole);
    assert!(is_same, "{:#?}\n{whole:#?}", Snapshot::take(&node, &[&b]).unwrap());
    is_put_back(&node, &b, "removed");
    node.del(&b).success();
    node.stop().unwrap();
    Snapshot::take(&node, &[&b]).unwrap().assert_nothing_is_left();
}

#[test]
fn a_bridge_that_others_made_is_missed_and_its_ports_return_to_it() {
    let mut node = Node::new(&[]).unwrap();
    let make = |node: &Node| {
        ip(&node.namespace, &["link", "add", "br-lan", "type", "bridge"]).unwrap();
        ip(&node.namespace, &["link", "set", "br-lan", "up"]).unwrap();
    };
    make(&node);
    let lan = json!({"cniVersion": "1.0.0", "type": "bridge", "bridge": "br-lan",
        "ipam": node.host_local(&["10.71.0.0/24"])});
    node.write("lan", &network(NAMESPACE, "lan", &lan)).unwrap();
    node.write("a", &pod("a", &json!({}), &json!("lan"))).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    ip(&node.namespace, &["link", "del", "br-lan"]).unwrap();
    let told = json!({
        "object": format!("pod {NAMESPACE}/a"),
        "problem": "its links on the node were changed by another program and cannot be put back: \
            bridge br-lan is gone; netattach did not create it, and does not recreate it"
    });
    let rows = || node.whole_status().unwrap()["troubles"].as_array().unwrap().clone();
    assert!(eventually(PATIENCE * 2, || rows().contains(&told)), "{:#?}", rows());
    assert!(ip(&node.namespace, &["link", "show", "br-lan"]).is_err(), "what else was in it is not known");
    let (code, message) = node.check(&a).failure();
    assert!(code > 0 && message.contains("bridge br-lan is gone"), "{message}");
    make(&node);
    is_put_back(&node, &a, "made again");
    assert!(
        eventually(PATIENCE * 2, || !rows().iter().any(|row| row["object"] == told["object"])),
        "{:#?}",
        rows()
    );
    node.del(&a).success();
    node.stop().unwrap();
}

fn files(directory: PathBuf) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(files(path)) } else { found.push(path) }
    }
    found.sort();
    found
}

#[test]
fn leases_records_and_the_published_status_are_written_again() {
    let (mut node, a) = scene();
    let addresses = |node: &Node| {
        let is_lease = |path: &PathBuf| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            name.parse::<std::net::IpAddr>().is_ok()
        };
        files(node.path("leases")).into_iter().filter(is_lease).collect::<Vec<_>>()
    };
    // A byte of another record is changed: it is reported, and left for its DEL.
    let edited = node.path("state/journal/c-edited@eth0.jsonl");
    node.write("edited", &pod("edited", &json!({}), &json!([]))).unwrap();
    let other = Pod::new("edited").unwrap();
    node.add(&other).success();
    let whole = fs::read_to_string(&edited).unwrap();
    fs::write(&edited, whole.replacen("eth0", "eth9", 1)).unwrap();
    let leases = addresses(&node);
    assert_eq!(leases.len(), 7, "{leases:?}");
    let record = node.path("state/journal/c-a@eth0.jsonl");
    let status = node.path("run/network-status").join(NAMESPACE).join("a.json");
    let published: Value = serde_json::from_slice(&fs::read(&status).unwrap()).unwrap();
    leases.iter().for_each(|lease| fs::remove_file(lease).unwrap());
    fs::remove_file(&record).unwrap();
    fs::write(&status, "[]").unwrap();
    let is_whole = || {
        let read = fs::read(&status).ok().and_then(|text| serde_json::from_slice::<Value>(&text).ok());
        addresses(&node) == leases && record.exists() && read.as_ref() == Some(&published)
    };
    assert!(eventually(FOUND_BY_LOOKING, is_whole), "{:?} {:?}", addresses(&node), fs::read(&status));
    is_put_back(&node, &a, "files");
    let mut rows = Value::Null;
    let is_told = eventually(FOUND_BY_LOOKING, || {
        rows = node.whole_status().unwrap()["troubles"].clone();
        rows.as_array().unwrap().iter().any(|row| {
            let problem = row["problem"].as_str().unwrap();
            row["object"] == format!("pod {NAMESPACE}/edited")
                && problem.starts_with("its record was changed by another program and cannot be put back: ")
                && problem.contains("c-edited@eth0.jsonl")
        })
    });
    assert!(is_told, "{rows:#}");
    fs::write(&edited, whole).unwrap();
    node.del(&other).success();
    // The record is enough for the next agent.
    node.kill().unwrap();
    node.start().unwrap();
    node.check(&a).success();
    node.del(&a).success();
    node.stop().unwrap();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

/// A check rewrites the record, which may come minutes later.
#[test]
fn a_record_that_was_removed_is_there_again_for_the_operation_that_needs_it() {
    let (mut node, a) = scene();
    let record = node.path("state/journal/c-a@eth0.jsonl");
    fs::remove_file(&record).unwrap();
    let (_, message) = node.add(&a).failure();
    assert!(message.contains("is attached with interface eth0 already"), "{message}");
    node.check(&a).success();
    fs::remove_file(&record).unwrap();
    node.del(&a).success();
    assert!(!record.exists());
    node.stop().unwrap();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

/// On a bridge of ours it is enabled again; another bridge is the administrator's, and is reported.
#[test]
fn a_bridge_that_is_told_not_to_filter_by_vlan_filters_again_or_is_reported() {
    let name = "a_bridge_that_is_told_not_to_filter_by_vlan_filters_again_or_is_reported";
    let mut node = Node::new(&[]).unwrap();
    let theirs = ["link", "add", "theirs", "type", "bridge", "vlan_filtering", "1"];
    if ip(&node.namespace, &theirs).is_err() {
        return report_skipped(name, "bridges of this kernel do not filter by VLAN");
    }
    ip(&node.namespace, &["link", "set", "theirs", "up"]).unwrap();
    for (name, bridge) in [("ours", "br7"), ("others", "theirs")] {
        let config = json!({"cniVersion": "1.0.0", "type": "bridge", "bridge": bridge, "vlan": 7,
            "ipam": node.host_local(&["10.71.0.0/24"])});
        node.write(name, &network(NAMESPACE, name, &config)).unwrap();
    }
    node.write("a", &pod("a", &json!({}), &json!("ours,others"))).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let filter = |bridge: &str, on: &str| {
        ip(&node.namespace, &["link", "set", bridge, "type", "bridge", "vlan_filtering", on]).unwrap();
    };
    filter("br7", "0");
    is_put_back(&node, &a, "ours");
    filter("theirs", "0");
    let told = json!({
        "object": format!("pod {NAMESPACE}/a"),
        "problem": "its links on the node were changed by another program and cannot be put back: \
            have bridge theirs filter by VLAN: bridge theirs does not filter by VLAN and was not made by netattach: \
            switch it on (vlan_filtering 1), or remove the bridge"
    });
    let rows = || node.whole_status().unwrap()["troubles"].as_array().unwrap().clone();
    assert!(eventually(PATIENCE * 2, || rows().contains(&told)), "{:#?}", rows());
    filter("theirs", "1");
    is_put_back(&node, &a, "theirs");
    node.del(&a).success();
    node.stop().unwrap();
}
