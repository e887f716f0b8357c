//! What others make large, or of another kind than it should be: refused by name, and nobody else notices.
#![expect(clippy::unwrap_used, reason = "a test reports by panicking")]

use std::fs;
use std::process::Command;
use std::time::Instant;

use netattach_tests::manifest::{NAMESPACE, annotated, network, pod};
use netattach_tests::node::{Outcome, WIRE};
use netattach_tests::snapshot::{Network, Snapshot};
use netattach_tests::traffic::{PATIENCE, eventually};
use netattach_tests::{Node, Pod};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};

/// The agent's own memory, resident, in KiB: what all that follows must not make larger.
const MOST_MEMORY: u64 = 192 << 10;

/// ADD of a pod that the source may not have yet.
fn add(node: &Node, pod: &Pod) -> Outcome {
    let mut last = None;
    let known = || {
        let outcome = node.add(pod);
        let unknown = outcome.exit != 0 && outcome.json["msg"].as_str().unwrap().contains("not known to");
        last = Some(outcome);
        !unknown
    };
    assert!(eventually(PATIENCE, known));
    last.unwrap()
}

/// A pod with this annotation, under a name of its own.
fn wanting(node: &Node, name: &str, networks: &str) -> Pod {
    let manifest = annotated(pod(name, &json!({}), &Value::Null), "k8s.v1.cni.cncf.io/networks", networks);
    node.write(name, &manifest).unwrap();
    Pod::new(name).unwrap()
}

fn defined(node: &Node, name: &str, config: &Value) {
    node.write(&format!("net-{name}"), &network(NAMESPACE, name, config)).unwrap();
}

fn fifo(path: &std::path::Path) {
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
}

fn assert_refused(outcome: Outcome, code: u64, words: &str) {
    let (found, message) = outcome.failure();
    assert_eq!(found, code, "{message}");
    assert!(message.contains(words), "{message}");
}

/// Resident anonymous memory of the agent in KiB.
fn memory(node: &Node) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", node.agent_pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

fn bridge(node: &Node, name: &str) -> Value {
    json!({"cniVersion": "1.0.0", "type": "bridge", "bridge": name, "ipam": node.host_local(&["10.61.0.0/16"])})
}

#[test]
fn the_largest_of_everything_is_refused_or_carried_out_within_192_mib() {
    /// On one bridge, which has at most 1,023 ports.
    const PODS: usize = 8;
    let mut node = Node::new(&[]).unwrap();
    node.set("maxAttachments", json!(2048));
    defined(&node, "lan", &bridge(&node, "br1"));
    let mut padded = bridge(&node, "br1");
    padded["padding"] = json!(vec![0; 120 << 10]);
    defined(&node, "large", &padded);
    node.start().unwrap();
    let flood = vec![json!({"name": "lan"}); 12_000];
    let flood = wanting(&node, "flood", &Value::Array(flood).to_string());
    assert_refused(add(&node, &flood), 7, "networks annotation: ");
    let many = vec!["lan"; 65].join(",");
    assert_refused(
        add(&node, &wanting(&node, "many", &many)),
        7,
        "networks of a pod: 65 networks, and at most 64",
    );
    let deep =
        format!(r#"[{{"name": "lan", "cni-args": {{"a": {}1{}}}}}]"#, "[".repeat(4000), "]".repeat(4000));
    assert_refused(add(&node, &wanting(&node, "deep", &deep)), 7, "recursion limit");
    // As many as may be, all at once.
    let all = vec!["lan"; 64].join(",");
    let pods: Vec<Pod> = (0..PODS).map(|number| wanting(&node, &format!("p{number}"), &all)).collect();
    let of_large = wanting(&node, "of-large", "large");
    std::thread::scope(|scope| {
        let added = pods.iter().chain([&of_large]).map(|pod| (pod, scope.spawn(|| add(&node, pod))));
        for (pod, added) in added.collect::<Vec<_>>() {
            let result = added.join().unwrap();
            assert_eq!(result.exit, 0, "{}: {:#}", pod.name, result.json);
        }
    });
    assert!(memory(&node) <= MOST_MEMORY, "{} KiB", memory(&node));
    std::thread::scope(|scope| {
        for pod in pods.iter().chain([&of_large]) {
            scope.spawn(|| node.del(pod).success());
        }
    });
    node.del(&flood).success();
    assert!(memory(&node) <= MOST_MEMORY, "{} KiB", memory(&node));
    let links = Network::of(&node.namespace).unwrap().links;
    assert_eq!(links.keys().collect::<Vec<_>>(), ["br0", "br1", "lo"]);
}

#[test]
fn one_pod_does_not_take_all_numbers() {
    let mut node = Node::new(&[]).unwrap();
    defined(&node, "lan", &bridge(&node, "br1"));
    let plain = wanting(&node, "plain", "lan");
    let greedy = wanting(&node, "greedy", &vec!["lan"; 32].join(","));
    node.start().unwrap();
    assert_refused(node.add(&greedy), 7, "attachments of a pod: 33 attachments, and at most 32");
    node.add(&plain).success();
    node.del(&plain).success();
    node.del(&greedy).success();
    Snapshot::take(&node, &[&plain, &greedy]).unwrap().assert_nothing_is_left();
}

#[test]
fn what_is_no_regular_file_holds_nobody_up() {
    let mut node = Node::new(&[]).unwrap();
    let with = |resolv_conf: &str| {
        let mut config = bridge(&node, "br1");
        config["ipam"]["resolvConf"] = json!(resolv_conf);
        config
    };
    let at = |name: &str| node.path(name).to_string_lossy().into_owned();
    fifo(&node.path("resolv-fifo"));
    fs::write(node.path("resolv-large"), vec![b'#'; (64 << 10) + 1]).unwrap();
    defined(&node, "fifo", &with(&at("resolv-fifo")));
    defined(&node, "zeros", &with("/dev/zero"));
    defined(&node, "large", &with(&at("resolv-large")));
    // The source goes on beside it, and what comes later is read.
    fifo(&node.path("source").join("a-fifo.yaml"));
    fs::create_dir_all(node.path("cni-conf")).unwrap();
    fifo(&node.path("cni-conf").join("a-fifo.conf"));
    node.set("delegation", json!({"timeoutSeconds": 20}));
    node.start().unwrap();
    let began = Instant::now();
    for (name, words) in [
        ("fifo", "is no regular file"),
        ("zeros", "is no regular file"),
        ("large", "longer than 65536 bytes"),
    ] {
        let pod = wanting(&node, name, name);
        assert_refused(add(&node, &pod), 5, words);
        node.del(&pod).success();
    }
    assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
    let problems = node.ctl(&["status"]).unwrap().to_string();
    assert!(problems.contains("a-fifo.yaml"), "{problems}");
    let after = wanting(&node, "after", "");
    assert_eq!(add(&node, &after).exit, 0);
    node.del(&after).success();
}

#[test]
fn a_directory_or_name_that_cannot_be_keeps_no_pod_from_ending() {
    let mut node = Node::new(&[]).unwrap();
    fs::write(node.path("file"), "").unwrap();
    std::os::unix::fs::symlink("loop", node.path("loop")).unwrap();
    let long = format!("/{}", "x".repeat(300));
    let data_dir = |directory: &str| {
        let mut config = bridge(&node, "br1");
        config["ipam"]["dataDir"] = json!(directory);
        config
    };
    let below = |name: &str| node.path(name).join("leases").to_string_lossy().into_owned();
    defined(&node, "file", &data_dir(&below("file")));
    defined(&node, "loop", &data_dir(&below("loop")));
    defined(&node, "long", &data_dir(&long));
    let mut named = bridge(&node, "br1");
    named["name"] = json!("x".repeat(300));
    defined(&node, "named", &named);
    node.start().unwrap();
    for (name, code) in [("file", 5), ("loop", 5), ("long", 7), ("named", 7)] {
        let pod = wanting(&node, name, name);
        for _ in 0..3 {
            let (found, message) = add(&node, &pod).failure();
            assert_eq!(found, code, "{name}: {message}");
        }
        node.del(&pod).success();
        node.del(&pod).success();
        Snapshot::take(&node, &[&pod]).unwrap().assert_nothing_is_left();
    }
    assert!(!Network::of(&node.namespace).unwrap().links.contains_key("br1"), "made for an ADD that failed");
}

#[test]
fn a_bridge_that_is_made_for_an_add_that_fails_goes_with_it() {
    let mut node = Node::new(&[]).unwrap();
    node.plugin("fails", &json!({"ADD": {"error": {"code": 100, "msg": "no"}}})).unwrap();
    let config = |bridge: &str| {
        let ipam = json!({"type": "fails"});
        json!({"cniVersion": "1.0.0", "type": "bridge", "bridge": bridge, "ipam": ipam})
    };
    defined(&node, "fails", &config("br9"));
    defined(&node, "pattern", &config("x%d"));
    defined(&node, "works", &bridge(&node, "br8"));
    node.start().unwrap();
    let bridges = || -> Vec<String> {
        let links = Network::of(&node.namespace).unwrap().links;
        links.into_iter().filter(|(_, link)| link.kind == "bridge").map(|(name, _)| name).collect()
    };
    let pod = wanting(&node, "fails", "fails");
    assert_refused(add(&node, &pod), 100, "no");
    assert_eq!(bridges(), Vec::<String>::new());
    let pattern = wanting(&node, "pattern", "pattern");
    assert_refused(add(&node, &pattern), 7, "key bridge: \"x%d\"");
    let call = node.call("ADD", &pattern).with("CNI_IFNAME", "%d");
    assert_refused(call.run(), 4, "interface name contains %");
    assert_eq!(bridges(), Vec::<String>::new());
    // Somebody's, or one that has a port, stays.
    let works = wanting(&node, "works", "works");
    assert_eq!(add(&node, &works).exit, 0);
    let made = || Command::new("ip").args(["link", "add", "br9", "type", "bridge"]).status();
    assert!(node.namespace.run(made).unwrap().success());
    assert_refused(add(&node, &pod), 100, "no");
    assert_eq!(bridges(), ["br0", "br8", "br9"]);
    for pod in [&pod, &pattern, &works] {
        node.del(pod).success();
    }
    Snapshot::take(&node, &[&pod, &pattern, &works]).unwrap().assert_nothing_is_left();
}

#[test]
fn thousands_of_routes_are_installed_and_refusals_have_their_codes() {
    const ROUTES: usize = 4000;
    let mut node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    let mut routes = bridge(&node, "br1");
    routes["ipam"]["routes"] = (0..ROUTES)
        .map(|number| json!({"dst": format!("10.{}.{}.0/24", 100 + number / 256, number % 256)}))
        .collect();
    defined(&node, "routes", &routes);
    let table = [
        (
            "zeros",
            {
                let mut config = bridge(&node, "br1");
                config["ipam"]["ranges"] = json!([[{"subnet": "010.3.0.0/24"}]]);
                config
            },
            7,
            "010.3.0.0/24",
        ),
        (
            "multicast",
            {
                let mut config = bridge(&node, "br1");
                config["ipam"]["ranges"] = json!([[{"subnet": "224.0.1.0/24"}]]);
                config
            },
            7,
            "multicast",
        ),
        (
            "small",
            json!({
                "cniVersion": "1.0.0", "type": "bridge", "bridge": "br1", "mtu": 68,
                "ipam": node.host_local(&["fd00:61::/64"])
            }),
            7,
            "mtu 68 is below 1280",
        ),
        (
            "gateway",
            {
                let mut config = bridge(&node, "br1");
                config["ipam"]["routes"] = json!([{"dst": "10.9.0.0/24", "gw": "192.0.2.1"}]);
                config
            },
            7,
            "unreachable",
        ),
    ];
    for (name, config, ..) in &table {
        defined(&node, name, config);
    }
    node.start().unwrap();
    let pod = wanting(&node, "routes", "routes");
    assert_eq!(add(&node, &pod).exit, 0);
    let found = Network::of(&pod.namespace).unwrap().routes.len();
    assert!(found >= ROUTES, "{found} routes");
    node.check(&pod).success();
    node.del(&pod).success();
    for (name, _, code, words) in table {
        let pod = wanting(&node, name, name);
        assert_refused(add(&node, &pod), code, words);
        node.del(&pod).success();
    }
    let list = node.cni_config("1.0.0").as_object().unwrap().clone();
    let mut list = Value::Object(list);
    list["runtimeConfig"] = json!([1]);
    assert_refused(node.call("ADD", &pod).stdin(list).run(), 7, "key runtimeConfig: expected an object");
    // Somebody else's macvlan has the address.
    let lan = json!({
        "cniVersion": "1.0.0", "type": "macvlan", "master": WIRE, "capabilities": {"mac": true},
        "ipam": node.host_local(&["10.52.0.0/24"])
    });
    defined(&node, "lan", &lan);
    let words = format!("link add other link {WIRE} address 02:00:00:00:00:77 type macvlan mode bridge");
    let elsewhere = netattach_tests::Namespace::new().unwrap();
    let run = || {
        Command::new("ip")
            .args(words.replace("other", &format!("other netns {}", elsewhere.task())).split(' '))
            .status()
    };
    assert!(node.namespace.run(run).unwrap().success());
    netattach_tests::node::ip(&elsewhere, &["link", "set", "other", "up"]).unwrap();
    let taken = wanting(&node, "taken", r#"[{"name": "lan", "mac": "02:00:00:00:00:77"}]"#);
    assert_refused(add(&node, &taken), 11, "Address already in use");
    node.del(&taken).success();
    Snapshot::take(&node, &[&pod, &taken]).unwrap().assert_nothing_is_left();
}
