//! `kill -9` of the agent at every point of ADD and DEL, and journals cut off at every byte.
//!
//! The agent that dies on demand is the executable `crash-agent` of this crate.
#![expect(clippy::unwrap_used, reason = "a test reports by panicking")]

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;

use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::node::WIRE;
use netattach_tests::snapshot::{Maps, Snapshot};
use netattach_tests::traffic::{PATIENCE, ping};
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};

const SIGKILL: i32 = 9;

/// A node whose pod `a` has four attachments: bridge, routed veth, macvlan, and one of an external plugin.
fn node() -> Node {
    let node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    node.plugin("other", &json!({})).unwrap();
    let networks = [
        (
            "storage",
            json!({"cniVersion": "1.0.0", "type": "veth", "ipam": node.host_local(&["10.51.0.0/24", "fd00:51::/64"])}),
        ),
        (
            "lan",
            json!({"cniVersion": "1.0.0", "type": "macvlan", "master": WIRE, "ipam": node.host_local(&["10.52.0.0/24"])}),
        ),
        ("odd", json!({"cniVersion": "1.0.0", "type": "other"})),
    ];
    for (name, config) in networks {
        node.write(name, &network(NAMESPACE, name, &config)).unwrap();
    }
    node.write("a", &pod("a", &json!({}), &json!("storage, lan, odd"))).unwrap();
    node.write("by", &pod("by", &json!({}), &json!("storage"))).unwrap();
    node
}

/// The agent that dies on demand.
fn crashing_agent() -> PathBuf {
    env!("CARGO_BIN_EXE_crash-agent").into()
}

/// A node with a bystander attached, as it is when `a` is not.
struct Scene {
    node: Node,
    a: Pod,
    bystander: Pod,
    before: Snapshot,
    /// Names of the points of one ADD and, after them, of one DEL.
    points: Vec<String>,
    points_of_add: usize,
}

impl Scene {
    fn new() -> Self {
        let mut node = node();
        let (a, bystander) = (Pod::new("a").unwrap(), Pod::new("by").unwrap());
        let log = node.path("points");
        let log_text = || fs::read_to_string(&log).unwrap_or_default();
        let count = || log_text().lines().count();
        node.start_as(&crashing_agent(), &[("NETATTACH_CRASH_LOG", log.to_str().unwrap())]).unwrap();
        node.add(&bystander).success();
        for gateway in ["10.50.0.1", "169.254.1.1"] {
            assert!(ping(&bystander.namespace, gateway.parse().unwrap(), PATIENCE).unwrap());
        }
        let start = count();
        node.add(&a).success();
        let points_of_add = count() - start;
        node.del(&a).success();
        let points: Vec<String> = log_text().lines().skip(start).map(str::to_owned).collect();
        node.take_calls().unwrap();
        node.stop().unwrap();
        let before = Snapshot::take(&node, &[&a, &bystander]).unwrap();
        Self { node, a, bystander, before, points, points_of_add }
    }

    /// Starts an agent that dies at the point. It begins to count anew: the bystander is there already.
    fn start_dying_at(&mut self, point: usize) {
        self.node.start_as(&crashing_agent(), &[("NETATTACH_CRASH_AT", &point.to_string())]).unwrap();
    }

    fn assert_killed(&mut self) {
        let (status, log) = self.node.wait_for_end().unwrap();
        assert_eq!(status.signal(), Some(SIGKILL), "{log}");
    }

    /// Nothing of `a` is left, the bystander is untouched, and every plugin that was called was told to undo.
    fn assert_as_before(&self, what: &str) {
        let after = Snapshot::take(&self.node, &[&self.a, &self.bystander]).unwrap();
        assert_eq!(after, self.before, "{what}");
        let calls = self.node.take_calls().unwrap();
        let verbs: Vec<&Value> = calls.iter().map(|call| &call["env"]["CNI_COMMAND"]).collect();
        let last_add = verbs.iter().rposition(|verb| **verb == json!("ADD"));
        let last_del = verbs.iter().rposition(|verb| **verb == json!("DEL"));
        assert!(last_del >= last_add, "{what}: {verbs:?}");
    }

    fn end(mut self) {
        self.node.start().unwrap();
        self.node.check(&self.bystander).success();
        assert!(ping(&self.bystander.namespace, "10.50.0.1".parse().unwrap(), PATIENCE).unwrap());
        self.node.del(&self.bystander).success();
        Snapshot::take(&self.node, &[&self.a, &self.bystander]).unwrap().assert_nothing_is_left();
    }
}

#[test]
fn an_agent_killed_at_any_point_of_add_leaves_nothing_once_del_came() {
    let mut scene = Scene::new();
    assert!(scene.points_of_add > 30, "{:?}", scene.points);
    for point in 0..scene.points_of_add {
        let what = scene.points[point].clone();
        scene.start_dying_at(point);
        let (code, _) = scene.node.add(&scene.a).failure();
        assert_eq!(code, 11, "{what}");
        scene.assert_killed();
        // The runtime's DEL comes when the agent is back, or before.
        if point % 2 == 0 {
            scene.node.start().unwrap();
            scene.node.del(&scene.a).success();
        } else {
            let (code, _) = scene.node.del(&scene.a).failure();
            assert_eq!(code, 11, "{what}");
            scene.node.start().unwrap();
        }
        scene.assert_as_before(&what);
        scene.node.stop().unwrap();
    }
    scene.end();
}

#[test]
fn an_agent_killed_at_any_point_of_del_carries_it_out_when_it_is_back() {
    let mut scene = Scene::new();
    let points = scene.points_of_add..scene.points.len();
    assert!(points.len() > 8, "{:?}", scene.points);
    for point in points {
        let what = scene.points[point].clone();
        scene.start_dying_at(point);
        scene.node.add(&scene.a).success();
        let (code, message) = scene.node.del(&scene.a).failure();
        assert_eq!(code, 11, "{what}: {message}");
        assert!(message.contains("DEL is not done yet: it is recorded in "), "{what}: {message}");
        scene.assert_killed();
        scene.node.start().unwrap();
        scene.assert_as_before(&what);
        scene.node.del(&scene.a).success();
        scene.assert_as_before(&what);
        scene.node.stop().unwrap();
    }
    scene.end();
}

#[test]
fn an_agent_killed_in_the_middle_of_a_roll_back_goes_on_with_it() {
    let mut scene = Scene::new();
    scene.node.plugin("other", &json!({"ADD": {"error": {"code": 100, "msg": "no"}}})).unwrap();
    let log = scene.node.path("points");
    fs::remove_file(&log).unwrap();
    scene.node.start_as(&crashing_agent(), &[("NETATTACH_CRASH_LOG", log.to_str().unwrap())]).unwrap();
    assert_eq!(scene.node.add(&scene.a).failure().0, 100);
    scene.node.stop().unwrap();
    scene.assert_as_before("no crash");
    let points = fs::read_to_string(&log).unwrap();
    let points: Vec<&str> = points.lines().collect();
    let first = points.iter().position(|point| point.contains("undo")).unwrap();
    for (point, what) in points.iter().enumerate().skip(first) {
        scene.start_dying_at(point);
        assert_eq!(scene.node.add(&scene.a).failure().0, 11, "{what}");
        scene.assert_killed();
        scene.node.start().unwrap();
        scene.assert_as_before(what);
        scene.node.stop().unwrap();
    }
    scene.end();
}

#[test]
fn a_record_cut_off_at_any_byte_is_taken_back_or_dropped() {
    let mut node = node();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    node.kill().unwrap();
    let journal = node.path("state/journal");
    let record = fs::read(journal.join("c-a@eth0.jsonl")).unwrap();
    fs::remove_file(journal.join("c-a@eth0.jsonl")).unwrap();
    for length in 0..record.len() {
        fs::write(journal.join(format!("c-{length}@eth0.jsonl")), &record[..length]).unwrap();
    }
    node.start().unwrap();
    let log = node.stop().unwrap();
    assert!(log.contains(&format!("adopted=0 taken_back={}", record.len())), "{log}");
    assert!(!log.contains("ERROR") && !log.contains("panicked"), "{log}");
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

#[test]
fn what_is_no_record_does_not_keep_the_agent_from_starting() {
    let mut node = node();
    let journal = node.path("state/journal");
    fs::create_dir_all(journal.join("directory@eth0.jsonl")).unwrap();
    for (name, content) in [
        ("empty@eth0.jsonl", &b""[..]),
        ("binary@eth0.jsonl", b"\xff\x00\xfe\n\n\xff"),
        ("other@eth0.jsonl", b"{\"planned\":{\"version\":99}}\n"),
        ("null@eth0.jsonl", b"null\n"),
        ("no-interface.jsonl", b"x"),
        ("README", b"by hand"),
    ] {
        fs::write(journal.join(name), content).unwrap();
    }
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    node.del(&a).success();
    let log = node.stop().unwrap();
    assert!(log.contains("directory@eth0.jsonl"), "{log}");
    assert_eq!(Snapshot::take(&node, &[&a]).unwrap().dataplane, Maps::default());
}
