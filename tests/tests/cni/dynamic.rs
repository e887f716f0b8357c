//! Adding a network to a live pod, by `netattachctl attach` and `detach`.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;

use netattach::netlink::Handle;
use netattach::rpc::client::{self, Patience};
use netattach::rpc::message::{DetachCall, Request, Response, SandboxName};
use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::node::{MAX_ATTACHMENTS, WIRE, executable, ip};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{PATIENCE, eventually, ping};
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};

const SIGKILL: i32 = 9;

/// A node with a pod that selects `storage`, and further networks of each kind.
fn node() -> Node {
    let node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    node.plugin("other", &json!({})).unwrap();
    let capable = json!({"ips": true, "mac": true});
    let networks = [
        (
            "storage",
            json!({"cniVersion": "1.0.0", "type": "veth", "ipam": node.host_local(&["10.51.0.0/24", "fd00:51::/64"])}),
        ),
        (
            "lan",
            json!({"cniVersion": "1.0.0", "type": "macvlan", "master": WIRE, "capabilities": capable,
                "ipam": node.host_local(&["10.52.0.0/24"])}),
        ),
        ("odd", json!({"cniVersion": "1.0.0", "type": "other"})),
    ];
    for (name, config) in networks {
        node.write(name, &network(NAMESPACE, name, &config)).unwrap();
    }
    node.write("a", &pod("a", &json!({}), &json!("storage"))).unwrap();
    node
}

/// Detaches `net2` of `shop/a`, like a controller that repeats its request: an absent attachment counts as detached.
fn detach_again(node: &Node) {
    let sandbox = SandboxName::Pod("shop/a".parse().unwrap());
    let call = DetachCall { sandbox, ifname: "net2".into(), must_be_attached: false, traceparent: None };
    let patience = Patience { connect: PATIENCE, answer: PATIENCE };
    let answer: Response = client::call(&node.socket(), &Request::Detach(call), patience).unwrap();
    assert_eq!(answer, Response::Detached);
}

/// The error of `netattachctl` for a refused request.
fn refused(node: &Node, words: &[&str]) -> String {
    let error = node.ctl(words).unwrap_err().to_string();
    error.trim().rsplit("netattachctl: ").next().unwrap_or_default().to_owned()
}

fn status(node: &Node, pod: &Pod) -> Vec<Value> {
    let path = node.path("run/network-status").join(NAMESPACE).join(format!("{}.json", pod.name));
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// Waits until the status has that many entries: it is published after the answer.
fn await_entries(node: &Node, pod: &Pod, count: usize) {
    assert!(eventually(PATIENCE, || status(node, pod).len() == count), "{:?}", status(node, pod));
}

/// Rows: NPWG-5.1-dynamic, NPWG-5.1-dynamic-attribution.
#[test]
fn a_live_pod_is_given_a_network_and_its_status_says_so_and_by_whom() {
    let mut node = node();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let (alone, published) = (Snapshot::take(&node, &[&a]).unwrap(), status(&node, &a));
    let mac = "02:00:00:00:00:77";
    let words =
        ["attach", "shop/a", "lan", "--ips", "10.52.0.77/24", "--mac", mac, "--by", "hotplug.example.org"];
    let result = node.ctl(&words).unwrap();
    assert_eq!(
        result,
        json!({
            "cniVersion": "1.1.0",
            "interfaces": [{"name": "net2", "mac": mac, "mtu": 1500, "sandbox": a.namespace.path()}],
            "ips": [{"address": "10.52.0.77/24", "gateway": "10.52.0.1", "interface": 0}],
        })
    );
    await_entries(&node, &a, 3);
    let mut expected = published.clone();
    expected.push(json!({
        "name": "shop/lan", "interface": "net2", "ips": ["10.52.0.77"], "mac": mac, "default": false, "dns": {},
        "dev.netattach.dynamic": {"by": "hotplug.example.org"},
    }));
    assert_eq!(status(&node, &a), expected);

    assert_eq!(node.ctl(&["detach", "shop/a", "net2"]).unwrap(), json!({}));
    await_entries(&node, &a, 2);
    assert_eq!(status(&node, &a), published);
    assert_eq!(Snapshot::take(&node, &[&a]).unwrap(), alone);
    // A repeated request with the controller's flag succeeds; without it an error is reported.
    detach_again(&node);
    assert_eq!(
        refused(&node, &["detach", "shop/a", "net2"]),
        "pod shop/a has no interface net2 that was attached while it was live; it has none (code 3)"
    );
    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

/// This is legitimate: network bindings of virtual machines rename the interface, and create another one of its name.
#[test]
fn an_interface_that_its_pod_has_renamed_is_detached_and_what_has_its_name_is_not() {
    let mut node = node();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    await_entries(&node, &a, 2);
    let alone = Snapshot::take(&node, &[&a]).unwrap();
    node.ctl(&["attach", "shop/a", "lan"]).unwrap();
    await_entries(&node, &a, 3);
    let in_pod = |words: &[&str]| ip(&a.namespace, words).unwrap();
    in_pod(&["link", "set", "net2", "down"]);
    in_pod(&["link", "set", "net2", "name", "bound"]);
    in_pod(&["link", "set", "bound", "group", "7"]);
    in_pod(&["link", "set", "bound", "up"]);
    in_pod(&["link", "add", "net2", "type", "veth", "peer", "name", "own"]);

    node.ctl(&["detach", "shop/a", "net2"]).unwrap();
    await_entries(&node, &a, 2);
    let links = Handle::open_in(a.namespace.netns()).unwrap().links().unwrap();
    let mut names: Vec<String> = links.into_iter().map(|link| link.name).collect();
    names.sort();
    assert_eq!(names, ["eth0", "lo", "net1", "net2", "own"]);
    in_pod(&["link", "del", "net2"]);
    assert_eq!(Snapshot::take(&node, &[&a]).unwrap(), alone);
    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

#[test]
fn every_kind_is_attached_checked_adopted_and_taken_back_with_its_sandbox() {
    let mut node = node();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    let before = Snapshot::take(&node, &[&a]).unwrap();
    node.add(&a).success();
    let by_container = ["--container-id", a.container.as_str()];
    for name in ["shop/storage", "shop/lan", "shop/odd"] {
        node.ctl(&[&["attach"][..], &by_container, &[name]].concat()).unwrap();
    }
    await_entries(&node, &a, 5);
    let rows = node.ctl(&["attachments"]).unwrap();
    let shown: Vec<[&str; 3]> = rows
        .as_array()
        .unwrap()
        .iter()
        .map(|row| ["network", "ifname", "enforcement"].map(|key| row[key].as_str().unwrap()))
        .collect();
    assert_eq!(
        shown,
        [
            ["kube-system/default", "eth0", "full"],
            ["shop/storage", "net1", "full"],
            ["shop/storage", "net2", "full"],
            ["shop/lan", "net3", "full-unless-privileged"],
            ["shop/odd", "net4", "none"],
        ]
    );
    assert!(ping(&a.namespace, "10.50.0.1".parse().unwrap(), PATIENCE).unwrap());

    let (with_all, published) = (Snapshot::take(&node, &[&a]).unwrap(), status(&node, &a));
    node.kill().unwrap();
    node.start().unwrap();
    assert_eq!(Snapshot::take(&node, &[&a]).unwrap(), with_all);
    assert_eq!(status(&node, &a), published);
    node.check(&a).success();
    ip(&a.namespace, &["link", "set", "net3", "down"]).unwrap();
    let (_, message) = node.check(&a).failure();
    assert!(message.contains("net3") && message.contains("is down"), "{message}");

    node.take_calls().unwrap();
    node.del(&a).success();
    let mut after = Snapshot::take(&node, &[&a]).unwrap();
    // The bridge of the default network stays on the node, and the maps are made at the agent's start.
    after.node = before.node.clone();
    assert_eq!(after, before);
    let calls = node.take_calls().unwrap();
    let verbs: Vec<&Value> = calls.iter().map(|call| &call["env"]["CNI_COMMAND"]).collect();
    assert_eq!(verbs, ["DEL"]);
}

#[test]
fn what_cannot_be_attached_is_refused_and_leaves_nothing() {
    let mut node = node();
    node.plugin("broken", &json!({"ADD": {"error": {"code": 100, "msg": "no"}}})).unwrap();
    node.write("broken", &network(NAMESPACE, "broken", &json!({"cniVersion": "1.0.0", "type": "broken"})))
        .unwrap();
    let mut reserved = network("ops", "reserved", &json!({"cniVersion": "1.0.0", "type": "other"}));
    reserved["metadata"]["annotations"] = json!({"netattach.dev/allowed-namespaces": "[\"ops\"]"});
    node.write("reserved", &reserved).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let before = Snapshot::take(&node, &[&a]).unwrap();
    let table: [(&[&str], &str); 13] = [
        (
            &["shop/b", "lan"],
            "pod shop/b is not attached on this node; netattachctl attachments lists what is attached (code 3)",
        ),
        (
            &["--container-id", "x", "shop/lan"],
            "container x is not attached on this node; netattachctl attachments lists what is attached (code 3)",
        ),
        (
            &["shop/a", "nothing"],
            "network shop/nothing is not defined; namespace shop has broken, lan, odd, storage (code 7)",
        ),
        (
            &["shop/a", "lan", "--ifname", "eth0"],
            "container c-a has an interface named eth0 already (code 4)",
        ),
        (
            &["shop/a", "lan", "--ifname", "net1"],
            "container c-a has an interface named net1 already (code 4)",
        ),
        (&["shop/a", "lan", "--ifname", "lo"], "container c-a has an interface named lo already (code 4)"),
        (&["shop/a", "lan", "--mac", "x"], "mac is \"x\", but must be a unicast Ethernet address"),
        (
            &["shop/a", "storage", "--ips", "10.51.0.9"],
            "no plugin of network storage declares that capability (code 7)",
        ),
        (&["shop/a", "lan", "--with", r#"{"default-route": ["10.52.0.1"]}"#], "key default-route"),
        (&["shop/a", "lan", "--ips", "10.99.0.1/24"], "10.99.0.1"),
        (&["shop/a", "broken"], "no (code 100)"),
        (&["shop/a", "ops/reserved"], "netattach.dev/allowed-namespaces"),
        (&["shop/a", "lan", "--by", "two words"], "by is \"two words\""),
    ];
    for (words, message) in table {
        let said = refused(&node, &[&["attach"][..], words].concat());
        assert!(said.contains(message), "{words:?}: {said}");
        assert_eq!(Snapshot::take(&node, &[&a]).unwrap(), before, "{words:?}");
    }
    for ifname in ["eth0", "net1"] {
        assert_eq!(
            refused(&node, &["detach", "shop/a", ifname]),
            format!(
                "{ifname} of container c-a was attached by the container's ADD: only DEL detaches it (code 4)"
            )
        );
    }
    assert_eq!(Snapshot::take(&node, &[&a]).unwrap(), before);
    node.del(&a).success();
}

#[test]
fn the_socket_is_for_its_owner_only() {
    use std::os::unix::fs::MetadataExt;
    let mut node = node();
    node.start().unwrap();
    assert_eq!(fs::metadata(node.socket()).unwrap().mode() & 0o777, 0o600);
}

/// The crash points passed while the agent served one request.
fn points(log: &Path) -> Vec<String> {
    fs::read_to_string(log).unwrap_or_default().lines().map(str::to_owned).collect()
}

/// Runs `netattachctl` and ignores the result: the agent may die meanwhile.
fn try_ctl(node: &Node, words: &[&str]) {
    Command::new(executable("netattachctl").unwrap())
        .arg("--socket")
        .arg(node.socket())
        .args(words)
        .output()
        .unwrap();
}

#[test]
fn an_agent_killed_at_any_point_leaves_the_attachment_whole_or_not_at_all() {
    let mut node = node();
    let agent = Path::new(env!("CARGO_BIN_EXE_crash-agent"));
    let (crash, log, at) = (node.path("crash"), node.path("crash/log"), node.path("crash/at"));
    fs::create_dir(&crash).unwrap();
    let variables = [("NETATTACH_CRASH_DIR", crash.to_str().unwrap())];
    let a = Pod::new("a").unwrap();
    node.start_as(agent, &variables).unwrap();
    node.add(&a).success();
    // Both count packets from here on.
    for gateway in ["10.50.0.1", "169.254.1.1"] {
        assert!(ping(&a.namespace, gateway.parse().unwrap(), PATIENCE).unwrap());
    }
    let alone = Snapshot::take(&node, &[&a]).unwrap();
    for name in ["storage", "lan", "odd"] {
        let attach = ["attach", "shop/a", name];
        // Warm-up: effects of the first time only.
        node.ctl(&attach).unwrap();
        detach_again(&node);
        node.check(&a).success();
        let start = points(&log).len();
        node.ctl(&attach).unwrap();
        let of_attach = points(&log).len() - start;
        await_entries(&node, &a, 3);
        detach_again(&node);
        await_entries(&node, &a, 2);
        let all = points(&log).split_off(start);
        assert!(of_attach > 3 && all.len() > of_attach, "{name}: {all:?}");
        for (point, what) in all.iter().enumerate() {
            node.stop().unwrap();
            let _ = fs::remove_file(&at);
            node.start_as(agent, &variables).unwrap();
            // Renamed into place, as the agent reads the file at every point.
            fs::write(crash.join("to-be"), point.to_string()).unwrap();
            fs::rename(crash.join("to-be"), &at).unwrap();
            try_ctl(&node, &attach);
            if point >= of_attach {
                try_ctl(&node, &["detach", "shop/a", "net2"]);
            }
            let (ended, text) = node.wait_for_end().unwrap();
            assert_eq!(ended.signal(), Some(SIGKILL), "{name}, {what}: {text}");
            node.start().unwrap();
            // The last point of each request is after its last line: then the attachment is complete, and detached
            // here.
            detach_again(&node);
            // CHECK runs after the status, which is published in the same turn.
            node.check(&a).success();
            assert_eq!(status(&node, &a).len(), 2, "{name}, {what}");
            assert_eq!(Snapshot::take(&node, &[&a]).unwrap(), alone, "{name}, {what}");
            let verbs: Vec<Value> =
                node.take_calls().unwrap().iter().map(|call| call["env"]["CNI_COMMAND"].clone()).collect();
            assert!(verbs.is_empty() || verbs.last() == Some(&json!("DEL")), "{name}, {what}: {verbs:?}");
        }
        node.stop().unwrap();
        fs::remove_file(&at).unwrap();
        node.start_as(agent, &variables).unwrap();
    }
    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

/// Half of the node's attachment numbers, by annotation and by request together.
#[test]
fn what_a_pod_is_given_while_it_lives_counts_among_what_it_may_have() {
    const HALF: u32 = MAX_ATTACHMENTS / 2;
    let mut node = node();
    // One less than that, in addition to the default network.
    let selected = vec!["lan"; HALF as usize - 2].join(",");
    node.write("a", &pod("a", &json!({}), &json!(selected))).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    node.ctl(&["attach", "shop/a", "lan"]).unwrap();
    let said = refused(&node, &["attach", "shop/a", "storage"]);
    let expected =
        format!("attachments of a pod: {} attachments, and at most {HALF} are allowed (code 7)", HALF + 1);
    assert_eq!(said, format!("attach net{HALF} (shop/storage): {expected}"));
    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}
