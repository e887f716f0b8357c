//! `kill -9` of the agent at every point of ADD, DEL, GC, a rollback and a recovery, and journals truncated at every
//! byte. And a panic, which ends it like a kill.
//!
//! There is a point after each write to the journal, each change requested from the kernel, each lease file, map entry,
//! status file and start of a plugin. The agent with crash points is the executable `crash-agent` of this crate.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};

use netattach_tests::manifest::{NAMESPACE, network, pod, policy};
use netattach_tests::node::{WIRE, ip};
use netattach_tests::record::first_version;
use netattach_tests::snapshot::{Maps, Snapshot, has_resting_numbers, installed_policies};
use netattach_tests::tools::report_skipped;
use netattach_tests::traffic::{PATIENCE, eventually, ping};
use netattach_tests::{Namespace, Node, Outcome, Pod};
use serde_json::{Value, json};

use crate::bad_node::{Disk, Spoiled};

/// Number of cut-off records that one agent is started on.
const AT_ONCE: usize = 500;
/// Executed plugins, in the order of their list.
const PLUGINS: [&str; 2] = ["other", "tail"];

/// The device that the device plugin assigned to the last attachment.
const DEVICE: &str = "0000:03:02.1";

/// The device of the node that the pod gets, and its other end, which stays.
const CARD: [&str; 2] = ["card0", "card1"];

/// Returns a node whose pod `a` has five attachments: bridge, routed veth with a port of the node and tables by
/// source, macvlan with the pod's default route and with host access, a tuned device of the node, and one of a list
/// of two external plugins for a device; the second and the last are under a policy.
fn node() -> Node {
    let node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    ip(&node.namespace, &["addr", "add", "10.52.0.1/24", "dev", WIRE]).unwrap();
    ip(&node.namespace, &["link", "add", CARD[0], "up", "type", "veth", "peer", "name", CARD[1]]).unwrap();
    ip(&node.namespace, &["link", "set", CARD[1], "up"]).unwrap();
    for name in PLUGINS {
        // The first plugin makes an interface in the pod, on which programs run.
        let link = (name == PLUGINS[0]).then_some("veth");
        node.plugin(name, &json!({"link": link})).unwrap();
    }
    // Its port is an isolated one.
    let mut default = node.default_config();
    default["portIsolation"] = json!(true);
    node.write("default", &network("kube-system", "default", &default)).unwrap();
    let storage = node.host_local(&["10.51.0.0/24", "fd00:51::/64"]);
    let lan = node.host_local(&["10.52.0.0/24"]);
    // Both ends of the link get a queue.
    let bandwidth = json!({"ingressRate": 1_000_000_000, "egressRate": 1_000_000_000});
    let networks = [
        (
            "storage",
            json!({"cniVersion": "1.0.0", "plugins": [
                {
                    "type": "veth", "bandwidth": bandwidth, "ipMasq": true,
                    "capabilities": {"portMappings": true}, "ipam": storage
                },
                {"type": "sbr"}
            ]}),
        ),
        (
            "lan",
            json!({"cniVersion": "1.0.0", "type": "macvlan", "master": WIRE, "hostAccess": true, "ipam": lan}),
        ),
        (
            "card",
            json!({"cniVersion": "1.0.0", "plugins": [
                {"type": "host-device", "device": CARD[0], "mac": "02:00:00:00:00:77"},
                {"type": "tuning", "mtu": 1400, "promisc": true}
            ]}),
        ),
        ("odd", json!({"cniVersion": "1.0.0", "plugins": PLUGINS.map(|name| json!({"type": name}))})),
    ];
    for (name, config) in networks {
        let mut defined = network(NAMESPACE, name, &config);
        if name == "odd" {
            defined["metadata"]["annotations"] = json!({"k8s.v1.cni.cncf.io/resourceName": "example.com/vf"});
        }
        node.write(name, &defined).unwrap();
    }
    let device = json!({"type": "pci", "version": "1.1.0", "pci": {"pci-address": DEVICE}});
    fs::create_dir_all(node.path("devinfo/dp")).unwrap();
    fs::write(node.path(&format!("devinfo/dp/example.com-vf-{DEVICE}-device.json")), device.to_string())
        .unwrap();
    let networks = json!([
        {"name": "storage", "portMappings": [{"hostPort": 8080, "containerPort": 80}]},
        {"name": "lan", "default-route": ["10.52.0.1"]},
        {"name": "card"},
        {"name": "odd", "deviceID": DEVICE}
    ]);
    node.write("a", &pod("a", &json!({"app": "a"}), &networks)).unwrap();
    node.write("by", &pod("by", &json!({"app": "by"}), &json!("storage"))).unwrap();
    let rules = json!({
        "podSelector": {"matchLabels": {"app": "a"}},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "by"}}}], "ports": [{"port": 80}]}],
        "egress": [{"to": [{"ipBlock": {"cidr": "10.51.0.0/28"}}, {"ipBlock": {"cidr": "fd00:51::/96"}}]}]
    });
    node.write("rules", &policy("rules", "storage, odd", &rules)).unwrap();
    node
}

/// A node with a bystander attached; `before` is its state while `a` is not attached.
struct Scene {
    node: Node,
    a: Pod,
    bystander: Pod,
    before: Snapshot,
}

impl Scene {
    /// With the crash agent running.
    fn new() -> Self {
        Self::of(node())
    }

    fn of(node: Node) -> Self {
        let (a, bystander) = (Pod::new("a").unwrap(), Pod::new("by").unwrap());
        let before = Snapshot::take(&node, &[]).unwrap();
        let mut scene = Self { node, a, bystander, before };
        scene.start().unwrap();
        scene.node.add(&scene.bystander).success();
        for gateway in ["10.50.0.1", "169.254.1.1"] {
            assert!(ping(&scene.bystander.namespace, gateway.parse().unwrap(), PATIENCE).unwrap());
        }
        // Warm-up: lease directories and forwarding stay once made.
        scene.node.add(&scene.a).success();
        scene.node.del(&scene.a).success();
        scene.before = scene.look();
        scene.assert_as_before("no crash");
        scene
    }

    fn start(&mut self) -> anyhow::Result<()> {
        self.node.start_with_points(&crashing_agent())
    }

    /// From now on the agent counts points, and dies at this one.
    fn arm(&self, point: usize) {
        self.node.arm(point).unwrap();
    }

    fn disarm(&self) {
        self.node.disarm().unwrap();
    }

    /// Makes the agent die at that point of the operation; returns the point's name and the caller's answer. `None`:
    /// the operation has no such point, and is complete.
    fn dies_at(&mut self, point: usize, operation: impl Fn(&Self) -> Outcome) -> Option<(String, Outcome)> {
        let scene = &*self;
        let outcome = scene.node.comes_to(point, &scene.a, || operation(scene))?;
        Some((self.node.was_killed_at(point), outcome))
    }

    fn look(&self) -> Snapshot {
        Snapshot::take(&self.node, &[&self.a, &self.bystander]).unwrap()
    }

    /// Checks that nothing of `a` is left, the bystander is unaffected, and the plugins that got an ADD got a DEL.
    fn assert_as_before(&self, what: &str) {
        let (after, before) = (self.look(), &self.before);
        assert_eq!(after.node, before.node, "{what}");
        assert_eq!(after.pods, before.pods, "{what}");
        assert_eq!(after.files, before.files, "{what}");
        assert_eq!(after.dataplane, before.dataplane, "{what}");
        assert_eq!(after.pins, before.pins, "{what}");
        assert_eq!(after.translation, before.translation, "{what}");
        assert_eq!(after.forwarding, before.forwarding, "{what}");
        self.assert_calls(what);
    }

    /// Checks that each plugin that got an ADD got a DEL after it, the last plugin first; at most one, the next of
    /// the list, got a DEL without an ADD; and all calls were for the one attachment.
    fn assert_calls(&self, what: &str) {
        let mut calls = self.node.take_calls().unwrap();
        calls.retain(|call| call["env"]["CNI_COMMAND"] != "GC");
        let about =
            |call: &Value| [&call["env"]["CNI_CONTAINERID"], &call["env"]["CNI_IFNAME"]].map(Value::clone);
        assert!(calls.iter().all(|call| about(call) == [json!("c-a"), json!("net4")]), "{what}: {calls:#?}");
        let of = |plugin: &str, verb: &str| -> Vec<usize> {
            let wanted = |call: &Value| call["plugin"] == plugin && call["env"]["CNI_COMMAND"] == verb;
            (0..calls.len()).filter(|at| wanted(&calls[*at])).collect()
        };
        let mut begun = true;
        for (number, plugin) in PLUGINS.iter().enumerate() {
            let (adds, dels) = (of(plugin, "ADD"), of(plugin, "DEL"));
            assert!(adds.len() <= 1 && adds.last() <= dels.last(), "{what}: {plugin}: {calls:#?}");
            assert!(begun || dels.is_empty(), "{what}: {plugin} had not begun: {calls:#?}");
            begun = !adds.is_empty();
            if let Some(next) = PLUGINS.get(number + 1) {
                assert!(of(next, "DEL").first() <= dels.last(), "{what}: order: {calls:#?}");
            }
        }
    }

    /// Checks that the bystander was never affected, and that nothing is left when it is removed as well.
    fn end(mut self) {
        self.node.check(&self.bystander).success();
        assert!(ping(&self.bystander.namespace, "10.50.0.1".parse().unwrap(), PATIENCE).unwrap());
        self.node.del(&self.bystander).success();
        ip(&self.node.namespace, &["link", "del", CARD[0]]).unwrap();
        self.look().assert_nothing_is_left();
        // Unreferenced entries are kept for a second, and removed by the next request.
        let swept = || {
            self.node.add(&self.bystander).success();
            self.node.del(&self.bystander).success();
            installed_policies(&self.node).unwrap().is_empty()
        };
        assert!(eventually(PATIENCE, swept), "{:?}", installed_policies(&self.node));
        let are_free = || !has_resting_numbers(&self.node).unwrap();
        assert!(eventually(PATIENCE, are_free), "numbers that are not free");
        self.look().assert_nothing_is_left();
        self.node.stop().unwrap();
    }
}

/// The agent with crash points.
fn crashing_agent() -> PathBuf {
    env!("CARGO_BIN_EXE_crash-agent").into()
}

/// Rows: ADD-03, NPWG-7.2-del-attempted-only, HDV-crash.
#[test]
fn an_agent_killed_at_any_point_of_add_leaves_nothing_once_del_came() {
    let mut scene = Scene::new();
    let mut point = 0;
    while let Some((what, added)) = scene.dies_at(point, |scene| scene.node.call("ADD", &scene.a).run()) {
        assert!(added.exit == 0 || added.json["code"] == 11, "{what}: {:#}", added.json);
        scene.start().unwrap();
        // Rolled back unprompted, as the runtime may never call DEL; or complete and adopted.
        let checked = scene.node.check(&scene.a);
        if checked.exit != 0 {
            assert_eq!((&checked.json["code"], scene.look()), (&json!(3), scene.before.clone()), "{what}");
        }
        scene.node.del(&scene.a).success();
        scene.assert_as_before(&what);
        point += 1;
    }
    assert!(point > 70, "{point} points");
    scene.node.del(&scene.a).success();
    scene.assert_as_before("no crash");
    scene.end();
}

#[test]
fn a_panic_ends_the_agent_with_a_line_in_its_log_and_the_next_one_rolls_back() {
    const SIGABRT: i32 = 6;
    let mut scene = Scene::new();
    scene.arm(usize::MAX);
    scene.node.add(&scene.a).success();
    let points = scene.node.points();
    scene.disarm();
    scene.node.del(&scene.a).success();
    scene.assert_as_before("no panic");
    let point = points.iter().position(|point| point.starts_with("apply:")).unwrap();
    scene.node.arm_with_panic(point).unwrap();
    let added = scene.node.call("ADD", &scene.a).run();
    assert_eq!(added.json["code"], 11, "{:#}", added.json);
    scene.disarm();
    let (status, log) = scene.node.wait_for_end().unwrap();
    assert_eq!(status.signal(), Some(SIGABRT), "{log}");
    let [line] = log.lines().filter(|line| line.contains("panicked")).collect::<Vec<_>>()[..] else {
        panic!("one line: {log}")
    };
    let reached = scene.node.points();
    assert_eq!(reached.len(), point + 1, "{reached:?}");
    for part in [" ERROR ", "the agent panicked at netattach-shim/src/crash.rs:", reached[point].as_str()] {
        assert!(line.contains(part), "{part}: {log}");
    }
    assert!(line.ends_with("; it ends, attachments keep working"), "{log}");
    scene.start().unwrap();
    assert_eq!(scene.look(), scene.before);
    scene.node.del(&scene.a).success();
    scene.assert_as_before("a panic");
    scene.end();
}

#[test]
fn an_agent_killed_at_any_point_of_del_carries_it_out_when_it_is_back() {
    let mut scene = Scene::new();
    let mut point = 0;
    loop {
        scene.node.add(&scene.a).success();
        let Some((what, deleted)) = scene.dies_at(point, |scene| scene.node.del(&scene.a)) else { break };
        assert_eq!(deleted.exit, 0, "{what}: recorded: {:#}", deleted.json);
        scene.start().unwrap();
        scene.assert_as_before(&what);
        scene.node.del(&scene.a).success();
        scene.assert_as_before(&what);
        point += 1;
    }
    assert!(point > 30, "{point} points");
    scene.assert_as_before("no crash");
    scene.end();
}

/// Attaches the pod with a record whose last page has no room for the line that begins a removal.
fn add_with_a_full_page(node: &Node, pod: &Pod, record: &Path) {
    let (page, line) = (rustix::param::page_size(), "[\"01234567\",\"removing\"]\n".len());
    let mut padding = 0;
    for _ in 0..10 {
        let add = node.call("ADD", pod);
        let args = format!("{};PADDING={}", add.env["CNI_ARGS"], "x".repeat(padding));
        add.with("CNI_ARGS", &args).run().success();
        node.await_status(pod);
        let length = usize::try_from(fs::metadata(record).unwrap().len()).unwrap();
        let room = length.next_multiple_of(page) - length;
        if room < line {
            return;
        }
        node.del(pod).success();
        padding = (padding + room - line / 2) % page;
    }
    panic!("records of the same pod are of different lengths");
}

/// A removal begins with a line in the record, for which there is no room.
#[test]
fn an_agent_killed_at_any_point_of_a_del_on_a_full_disk_leaves_what_the_next_goes_on_with() {
    let mut node = Node::new(&[pod("a", &json!({}), &Value::Null)]).unwrap();
    let disk = Disk::mount(&node.path("state"));
    node.start_with_points(&crashing_agent()).unwrap();
    let a = Pod::new("a").unwrap();
    let record = node.path("state/journal/c-a@eth0.jsonl");
    let left = |node: &Node| Snapshot::take(node, &[&a]).unwrap();
    // There is no room for the request either.
    let mut config = node.cni_config("1.0.0");
    config["agentWaitSeconds"] = json!(0);
    let (mut point, mut unfinished) = (0, 0);
    loop {
        add_with_a_full_page(&node, &a, &record);
        disk.spoil(Spoiled::Full);
        let died = node.comes_to(point, &a, || node.call("DEL", &a).stdin(&config).run());
        disk.mend(Spoiled::Full);
        if died.is_none() {
            break;
        }
        let what = node.was_killed_at(point);
        // Between the two writes that mark it as unfinished, nothing has been rolled back yet.
        let says_unfinished = fs::read_to_string(&record)
            .is_ok_and(|text| text.contains("\"state\":\"applying\"") && !text.contains("\",{\"attached\":"));
        node.start_with_points(&crashing_agent()).unwrap();
        if says_unfinished {
            unfinished += 1;
            assert!(!record.exists(), "{what}");
            left(&node).assert_nothing_is_left();
        }
        node.del(&a).success();
        left(&node).assert_nothing_is_left();
        point += 1;
    }
    assert!(unfinished > 3, "{unfinished} of {point} points");
    left(&node).assert_nothing_is_left();
    node.stop().unwrap();
    drop(disk);
}

#[test]
fn an_agent_killed_in_the_middle_of_a_roll_back_goes_on_with_it() {
    let mut scene = Scene::new();
    scene.node.plugin("tail", &json!({"ADD": {"error": {"code": 100, "msg": "no"}}})).unwrap();
    scene.arm(usize::MAX);
    assert_eq!(scene.node.add(&scene.a).failure().0, 100);
    let points = scene.node.points();
    scene.disarm();
    scene.assert_as_before("no crash");
    let first = points.iter().position(|point| point.contains("undo")).unwrap();
    for point in first.. {
        let Some((what, _)) = scene.dies_at(point, |scene| scene.node.call("ADD", &scene.a).run()) else {
            assert!(point - first > 20, "{first} to {point}");
            break;
        };
        scene.start().unwrap();
        scene.assert_as_before(&what);
        scene.node.del(&scene.a).success();
        scene.assert_as_before(&what);
    }
    scene.node.del(&scene.a).success();
    scene.assert_as_before("no crash");
    scene.end();
}

#[test]
fn an_agent_killed_at_any_point_of_its_recovery_begins_it_again() {
    let mut scene = Scene::new();
    scene.arm(usize::MAX);
    scene.node.add(&scene.a).success();
    let all_done = scene.node.points().iter().rposition(|point| point.starts_with("applied:")).unwrap();
    scene.disarm();
    scene.node.del(&scene.a).success();
    // A request as recorded by the executable when no agent runs.
    scene.node.stop().unwrap();
    scene.node.del(&scene.a).success();
    let waiting = fs::read_dir(scene.node.path("state/pending")).unwrap().next().unwrap().unwrap().path();
    let request = fs::read(&waiting).unwrap();
    scene.start().unwrap();
    scene.assert_as_before("no crash");
    for point in 0.. {
        // All steps are done, nothing is answered; and the runtime's DEL is waiting already.
        scene.dies_at(all_done, |scene| scene.node.call("ADD", &scene.a).run()).unwrap();
        fs::write(&waiting, &request).unwrap();
        scene.arm(point);
        let started = scene.start().is_ok();
        let points = scene.node.points();
        scene.disarm();
        if started {
            scene.assert_as_before(&format!("no crash at {point} of {points:?}"));
            assert!(point > 30, "{points:?}");
            break;
        }
        scene.start().unwrap();
        scene.assert_as_before(&format!("point {point}, {}", points[point]));
    }
    scene.end();
}

#[test]
fn an_agent_killed_at_any_point_of_gc_spares_what_is_in_use_and_the_next_gc_ends_it() {
    let mut scene = Scene::new();
    let gc = |scene: &Scene| scene.node.gc("pods", Some(&[&scene.bystander]));
    let mut point = 0;
    loop {
        scene.node.add(&scene.a).success();
        let Some((what, collected)) = scene.dies_at(point, gc) else { break };
        assert!(collected.exit == 0 || collected.json["code"] == 11, "{what}: {:#}", collected.json);
        scene.start().unwrap();
        scene.node.check(&scene.bystander).success();
        gc(&scene).success();
        scene.assert_as_before(&what);
        point += 1;
    }
    assert!(point > 30, "{point} points");
    scene.assert_as_before("no crash");
    scene.end();
}

/// A node whose pod `a` has one network besides the default one, of a kind that few kernels have a driver for.
fn node_with(list: &Value) -> Node {
    let node = node();
    node.write("few", &network(NAMESPACE, "few", list)).unwrap();
    node.write("a", &pod("a", &json!({"app": "a"}), &json!("few"))).unwrap();
    node
}

/// Whether a point belongs to the network of [`node_with`], or to the work on all links of a pod.
fn is_of_few(point: &str) -> bool {
    point.contains("StepRef(1, ") || ["netlink", "ioctl", "nft"].iter().any(|kind| point.starts_with(kind))
}

/// Kills the agent at each point of ADD that concerns the network, from the one on that `first` selects among all of
/// them, and at each of DEL.
fn survives_with(list: &Value, first: impl Fn(&[String]) -> usize) {
    let mut scene = Scene::of(node_with(list));
    scene.arm(usize::MAX);
    scene.node.add(&scene.a).success();
    let points = scene.node.points();
    scene.disarm();
    scene.node.check(&scene.a).success();
    scene.arm(usize::MAX);
    scene.node.del(&scene.a).success();
    let points_of_del = scene.node.points();
    scene.disarm();
    scene.assert_as_before("no crash");
    let chosen = (first(&points)..points.len()).filter(|at| is_of_few(&points[*at]));
    let mut killed = 0;
    for point in chosen {
        let Some((what, _)) = scene.dies_at(point, |scene| scene.node.call("ADD", &scene.a).run()) else {
            // It asked less often than the first one whether a link has its carrier.
            scene.node.del(&scene.a).success();
            break;
        };
        killed += 1;
        scene.start().unwrap();
        scene.node.del(&scene.a).success();
        scene.assert_as_before(&what);
    }
    assert!(killed > 5, "{killed} of {points:?}");
    let mut killed = 0;
    for point in (0..points_of_del.len()).filter(|at| is_of_few(&points_of_del[*at])) {
        scene.node.add(&scene.a).success();
        let Some((what, _)) = scene.dies_at(point, |scene| scene.node.del(&scene.a)) else {
            scene.node.del(&scene.a).success();
            break;
        };
        killed += 1;
        scene.start().unwrap();
        scene.assert_as_before(&what);
    }
    assert!(killed > 2, "{killed} of {points_of_del:?}");
    scene.end();
}

/// Rows: TAP-crash.
#[test]
fn an_agent_killed_while_it_makes_a_tap_leaves_nothing() {
    let ipam =
        json!({"type": "static", "addresses": [{"address": "10.51.1.2/24"}, {"address": "fd00:51:1::2/64"}]});
    let tap = json!({"cniVersion": "1.0.0", "type": "tap", "mtu": 1400, "owner": 107, "ipam": ipam});
    survives_with(&tap, |points| points.iter().position(|point| point.contains("StepRef(1, ")).unwrap());
}

/// Rows: VRF-crash.
#[test]
fn an_agent_killed_while_a_vrf_is_joined_or_left_leaves_nothing() {
    let test = "an_agent_killed_while_a_vrf_is_joined_or_left_leaves_nothing";
    let probe = Namespace::new().unwrap();
    if ip(&probe, &["link", "add", "probe", "type", "vrf", "table", "7"]).is_err() {
        return report_skipped(test, "the kernel has no vrf");
    }
    let ipam =
        json!({"type": "static", "addresses": [{"address": "10.51.1.2/24"}, {"address": "fd00:51:1::2/64"}]});
    let list = json!({"cniVersion": "1.0.0", "plugins": [
        {"type": "veth", "isDefaultGateway": true, "ipam": ipam}, {"type": "vrf", "vrfname": "blue"}
    ]});
    // The earlier points are those of any veth. Joining is the last step of the network that changes something.
    survives_with(&list, |points| {
        let changes = |at: &usize| {
            points[*at].starts_with("apply:StepRef(1, ") && points[*at + 1].starts_with("netlink")
        };
        (0..points.len() - 1).rev().find(changes).unwrap()
    });
}

/// Rows: FWL-crash.
#[test]
fn an_agent_killed_while_it_writes_rules_of_iptables_leaves_none() {
    let ipam =
        json!({"type": "static", "addresses": [{"address": "10.51.1.2/24"}, {"address": "fd00:51:1::2/64"}]});
    let list = json!({"cniVersion": "1.0.0", "plugins": [
        {"type": "bridge", "bridge": "few0", "ipam": ipam}, {"type": "firewall", "ingressPolicy": "same-bridge"}
    ]});
    survives_with(&list, |points| {
        assert!(points.iter().any(|point| point.starts_with("nft")), "{points:?}");
        points.iter().position(|point| point.contains("StepRef(1, ")).unwrap()
    });
}

/// Record and leases of `c-a`, attached to networks without other plugins, after an agent was killed.
fn killed_with(networks: &Value) -> (Node, Pod, String) {
    let mut node = node();
    node.write("a", &pod("a", &json!({"app": "a"}), networks)).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    node.kill().unwrap();
    let path = node.path("state/journal/c-a@eth0.jsonl");
    let record = first_version(&fs::read_to_string(&path).unwrap());
    fs::remove_file(path).unwrap();
    node.take_calls().unwrap();
    (node, a, record)
}

#[test]
fn a_record_cut_off_at_any_byte_is_taken_back_or_dropped() {
    let (mut node, a, record) = killed_with(&json!("storage, lan"));
    // The last line marks the record as attached: from then on it is adopted.
    let lengths: Vec<usize> = (0..record.rfind("{\"attached\"").unwrap()).collect();
    for lengths in lengths.chunks(AT_ONCE) {
        for length in lengths {
            let container = format!("c-{length}");
            let record = record[..*length].replace("\"c-a\"", &format!("\"{container}\""));
            fs::write(node.path(&format!("state/journal/{container}@eth0.jsonl")), record).unwrap();
        }
        node.start().unwrap();
        let log = node.stop().unwrap();
        assert!(log.contains(&format!("rolled_back={} failed=0", lengths.len())), "{log}");
        assert!(!log.contains("ERROR") && !log.contains("panicked"), "{log}");
    }
    // Links in the group of `c-a` are not for other containers to delete.
    let own = &record[..record.rfind("{\"attached\"").unwrap()];
    fs::write(node.path("state/journal/c-a@eth0.jsonl"), own).unwrap();
    node.start().unwrap();
    node.stop().unwrap();
    ip(&node.namespace, &["link", "del", CARD[0]]).unwrap();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

#[test]
fn what_outlived_a_loss_of_power_is_taken_back_wherever_the_record_was_cut_off() {
    let (mut node, a, record) = killed_with(&json!("storage, lan"));
    // Resources held by `a` are released; each pool is remembered with its interface.
    let mut pools = Vec::new();
    for lease in files_below(&node.path("leases")) {
        let content = fs::read_to_string(&lease).unwrap();
        let Some(ifname) = content.strip_prefix("c-a\r\n") else { continue };
        pools.push((lease.parent().unwrap().to_owned(), ifname.to_owned()));
        fs::remove_file(lease).unwrap();
    }
    pools.sort();
    pools.dedup();
    assert_eq!(pools.len(), 3, "{pools:?}");
    let earlier = earlier_boot(&record);
    let lengths: Vec<usize> = (0..=earlier.len()).collect();
    for lengths in lengths.chunks(AT_ONCE) {
        for (number, length) in lengths.iter().enumerate() {
            // A separate sandbox, with a lease in each pool.
            let container = format!("c-{length}");
            let record = &earlier.as_bytes()[..*length];
            let record = String::from_utf8_lossy(record).replace("\"c-a\"", &format!("\"{container}\""));
            fs::write(node.path(&format!("state/journal/{container}@eth0.jsonl")), record).unwrap();
            for (pool, ifname) in &pools {
                let address = format!("10.99.{}.{}", number / 250, number % 250);
                fs::write(pool.join(address), format!("{container}\r\n{ifname}")).unwrap();
            }
        }
        fs::write(node.path("state/journal/boot"), "00000000-0000-0000-0000-000000000000").unwrap();
        node.start().unwrap();
        let log = node.stop().unwrap();
        assert!(log.contains(&format!("rolled_back={} failed=0", lengths.len())), "{log}");
        assert_eq!(Snapshot::take(&node, &[]).unwrap().files, [].into());
    }
    drop(a);
}

#[test]
fn after_a_loss_of_power_each_plugin_of_a_record_gets_its_del() {
    let (mut node, _a, record) = killed_with(&json!([{"name": "odd", "deviceID": DEVICE}]));
    let earlier = earlier_boot(&record);
    let lines: Vec<&str> = earlier.split_inclusive('\n').collect();
    for count in 1..=lines.len() {
        fs::write(node.path("state/journal/c-a@eth0.jsonl"), lines[..count].concat()).unwrap();
        node.start().unwrap();
        node.stop().unwrap();
        let calls = node.take_calls().unwrap();
        let called: Vec<Value> = calls
            .iter()
            .map(|call| json!([call["plugin"], call["env"]["CNI_COMMAND"], call["env"]["CNI_NETNS"]]))
            .collect();
        assert_eq!(called, [json!(["tail", "DEL", ""]), json!(["other", "DEL", ""])], "{count} lines");
        assert!(!node.path("state/journal/c-a@eth0.jsonl").exists(), "{count} lines");
    }
}

fn files_below(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files_below(&path) } else { vec![path] }).collect()
}

/// A record as found after a reboot: its namespace and its links are of an earlier boot.
fn earlier_boot(record: &str) -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let earlier = record.replace(boot.trim(), "00000000-0000-0000-0000-000000000000");
    assert_ne!(earlier, record);
    earlier
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
    // A FIFO without a writer.
    let fifo = journal.join("fifo@eth0.jsonl");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    node.del(&a).success();
    let log = node.stop().unwrap();
    for kept in ["directory@eth0", "binary@eth0", "other@eth0", "null@eth0", "fifo@eth0"] {
        assert!(log.contains(kept), "{kept}: {log}");
        assert!(journal.join(format!("{kept}.jsonl")).exists(), "{kept}");
    }
    assert!(!journal.join("empty@eth0.jsonl").exists());
    // Reading all files would block on it.
    fs::remove_file(fifo).unwrap();
    assert_eq!(Snapshot::take(&node, &[&a]).unwrap().dataplane, Maps::default());
}
