//! Damaged records of live pods: no pod loses anything through them, and its DEL reports the damage.

use std::fs;
use std::path::PathBuf;

use netattach::netns::Netns;
use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::node::{WIRE, ip};
use netattach_tests::record::rewritten;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{PATIENCE, ping};
use netattach_tests::{Node, Pod};
use rustix::mount::MountFlags;
use serde_json::{Value, json};

fn record(node: &Node, container: &str) -> PathBuf {
    node.path(&format!("state/journal/{container}@eth0.jsonl"))
}

/// A started node that knows the pods `a` and `b`, with `a` attached.
fn attached() -> (Node, Pod) {
    let node = Node::new(&["a", "b"].map(|name| pod(name, &json!({}), &Value::Null))).unwrap();
    with_a(node)
}

/// Returns a started node, and a pod `a` that is attached and has a macvlan `net1` besides its default network.
fn with_macvlan() -> (Node, Pod) {
    let node = Node::new(&[pod("a", &json!({}), &json!("lan"))]).unwrap();
    node.add_wire().unwrap();
    let lan = json!({"cniVersion": "1.0.0", "type": "macvlan", "master": WIRE});
    node.write("lan", &network(NAMESPACE, "lan", &lan)).unwrap();
    with_a(node)
}

fn with_a(mut node: Node) -> (Node, Pod) {
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    (node, a)
}

#[test]
fn a_bad_byte_in_a_live_pods_record_costs_it_nothing_and_its_del_says_where() {
    let (mut node, a) = attached();
    let path = record(&node, "c-a");
    let status = node.status(&a).unwrap();
    let whole = fs::read(&path).unwrap();
    let second_line = whole.iter().position(|byte| *byte == b'\n').unwrap() + 1;
    let mut flipped = whole.clone();
    flipped[second_line + 60] ^= 1;
    let emptied = Vec::new();
    let of_another = String::from_utf8(whole.clone()).unwrap().replace("\"c-a\"", "\"c-x\"").into_bytes();
    for harmed in [flipped, emptied, of_another] {
        node.kill().unwrap();
        fs::write(&path, &harmed).unwrap();
        node.start().unwrap();
        assert_eq!(node.status(&a).unwrap(), status);
        // The address and the number are still held by `a`.
        let b = Pod::new("b").unwrap();
        node.add(&b).success();
        assert!(ping(&a.namespace, "10.50.0.1".parse().unwrap(), PATIENCE).unwrap());
        node.del(&b).success();
        let (_, message) = node.del(&a).failure();
        assert!(message.contains(&format!("{} is damaged (line ", path.display())), "{message}");
        assert!(ping(&a.namespace, "10.50.0.1".parse().unwrap(), PATIENCE).unwrap(), "DEL has taken nothing");
        assert!(path.exists());
        assert!(node.stop().unwrap().contains(&path.display().to_string()));
        node.start().unwrap();
    }
    node.kill().unwrap();
    fs::write(&path, &whole).unwrap();
    node.start().unwrap();
    node.check(&a).success();
    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

/// Rows: IDN-11.
#[test]
fn a_del_removes_nothing_outside_the_journal() {
    let mut node = Node::new(&[]).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    let outside = node.path("state/x@eth0.jsonl");
    fs::write(&outside, "").unwrap();
    for (name, value) in [("CNI_CONTAINERID", "../x"), ("CNI_IFNAME", "../../x"), ("CNI_CONTAINERID", "..")] {
        for verb in ["ADD", "DEL", "CHECK"] {
            let (code, message) = node.call(verb, &a).with(name, value).run().failure();
            assert_eq!(code, 4, "{verb} {value}: {message}");
        }
    }
    node.kill().unwrap();
    // The request is not kept for a later agent either.
    let refused = node.call("DEL", &a).with("CNI_CONTAINERID", "../x").run().failure();
    assert_eq!(refused.0, 4, "{}", refused.1);
    assert!(!node.path("state/pending").exists());
    assert!(outside.exists());
    fs::remove_file(outside).unwrap();
}

/// A namespace with the path and the inode of a removed one is still a different namespace: its link is not deleted.
#[test]
fn a_link_of_another_namespace_with_the_same_path_and_inode_stays() {
    let (mut node, a) = with_macvlan();
    node.kill().unwrap();
    let path = record(&node, "c-a");
    let text = fs::read_to_string(&path).unwrap();
    let cookie = a.namespace.run(|| Netns::current().unwrap()).cookie().unwrap().unwrap();
    let own = format!("{{\"namespace\":{cookie}}}");
    assert_eq!(text.matches(&own).count(), 1, "{text}");
    // As if the kernel had reused the inode of a removed namespace for this one.
    let gone = format!("{{\"namespace\":{}}}", cookie - 1);
    fs::write(&path, rewritten("c-a@eth0.jsonl", &text, |line| line.replace(&own, &gone))).unwrap();
    node.start().unwrap();
    node.del(&a).success();
    let look = Snapshot::take(&node, &[&a]).unwrap();
    assert_eq!(look.pods["c-a"].links.keys().collect::<Vec<_>>(), ["lo", "net1"], "net1 is another pod's");
    assert_eq!((look.files, look.dataplane), Default::default());
}

/// Its addresses stay taken: the record tells the next agent that they are in use.
#[test]
fn a_del_on_a_read_only_state_directory_takes_back_all_but_addresses_and_says_what_is_left() {
    let (node, a) = attached();
    let state = node.path("state");
    rustix::mount::mount_bind(&state, &state).unwrap();
    rustix::mount::mount_remount(&state, MountFlags::BIND | MountFlags::RDONLY, "").unwrap();
    // In the agent's mount namespace, which is this one.
    let (code, message) = node.del(&a).failure();
    rustix::mount::unmount(&state, rustix::mount::UnmountFlags::DETACH).unwrap();
    let expected = format!(
        "everything is rolled back but its addresses, which stay taken: the record {} can be neither changed nor removed",
        record(&node, "c-a").display()
    );
    assert!(code == 5 && message.contains(&expected), "{code}: {message}");
    let look = Snapshot::take(&node, &[&a]).unwrap();
    assert_eq!(look.pods["c-a"].links.keys().collect::<Vec<_>>(), ["lo"]);
    assert!(look.files.keys().any(|path| path.starts_with("leases/")), "{:?}", look.files);
    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

/// A repeated DEL uses the numbers of its record again: they are not reassigned until the record is gone.
#[test]
fn a_record_that_cannot_be_removed_keeps_its_numbers_and_its_next_del_costs_no_other_pod_anything() {
    let (node, a) = attached();
    let b = Pod::new("b").unwrap();
    let path = record(&node, "c-a");
    // In the agent's mount namespace, which is this one: a mount point cannot be removed.
    rustix::mount::mount_bind(&path, &path).unwrap();
    let failed = node.del(&a);
    let added = node.add(&b);
    let failed_again = node.del(&a);
    rustix::mount::unmount(&path, rustix::mount::UnmountFlags::DETACH).unwrap();
    for failed in [failed, failed_again] {
        let (code, message) = failed.failure();
        assert!(code == 5 && message.contains("everything is rolled back, but "), "{code}: {message}");
    }
    added.success();
    node.check(&b).success();
    node.del(&a).success();
    node.check(&b).success();
    assert!(ping(&b.namespace, "10.50.0.1".parse().unwrap(), PATIENCE).unwrap());
    node.del(&b).success();
    Snapshot::take(&node, &[&a, &b]).unwrap().assert_nothing_is_left();
}

/// A plugin's work can be undone only with its result: DEL reports that it is lost.
#[test]
fn a_plugin_whose_answer_is_lost_is_not_asked_to_take_back_what_nobody_knows() {
    let mut node = Node::new(&[pod("a", &json!({}), &json!("odd"))]).unwrap();
    node.plugin("odd", &json!({})).unwrap();
    node.write("odd", &network(NAMESPACE, "odd", &json!({"cniVersion": "1.0.0", "type": "odd"}))).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    node.kill().unwrap();
    node.take_calls().unwrap();
    let path = record(&node, "c-a");
    let whole = fs::read(&path).unwrap();
    let answer = String::from_utf8(whole.clone()).unwrap().find("\"delegate\",\"result\"").unwrap();
    let mut harmed = whole.clone();
    harmed[answer] ^= 1;
    fs::write(&path, harmed).unwrap();
    node.start().unwrap();
    let (_, message) = node.del(&a).failure();
    assert!(message.contains(&format!("{} is damaged (line ", path.display())), "{message}");
    assert_eq!(node.take_calls().unwrap(), [] as [Value; 0]);
    assert!(ping(&a.namespace, "10.50.0.1".parse().unwrap(), PATIENCE).unwrap(), "DEL has taken nothing");
    node.kill().unwrap();
    fs::write(&path, whole).unwrap();
    node.start().unwrap();
    node.del(&a).success();
    assert_eq!(node.take_calls().unwrap().len(), 1);
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

/// A link with the name of an interface that the pod has lost was made by the pod itself.
#[test]
fn a_link_that_the_pod_has_made_in_place_of_its_own_stays() {
    let (node, a) = with_macvlan();
    for words in ["link del net1", "link add net1 type veth peer name x0"] {
        ip(&a.namespace, &words.split(' ').collect::<Vec<_>>()).unwrap();
    }
    node.del(&a).success();
    let look = Snapshot::take(&node, &[&a]).unwrap();
    assert_eq!(
        look.pods["c-a"].links.keys().collect::<Vec<_>>(),
        ["lo", "net1", "x0"],
        "all is the pod's own"
    );
    assert_eq!((look.files, look.dataplane), Default::default());
}
