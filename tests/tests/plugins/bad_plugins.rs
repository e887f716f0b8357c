//! Plugins that misbehave and hostile configurations, live: bounded time and memory, an error that describes the
//! failure, and a complete rollback.

use std::fs::{self, OpenOptions};
use std::time::{Duration, Instant};

use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::plugin_calls::verbs;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};

/// Longest call of a plugin on these nodes, in seconds.
const TIMEOUT: u64 = 5;

/// Allowance for one call besides the plugin's time: the machine may be busy.
const SLACK: Duration = Duration::from_secs(15);

/// More than any part of a call may keep, and less than any flood writes: in KiB.
const MEMORY: u64 = 24 << 10;

/// A node that has each configuration as a network, and a pod of the same name that selects it after `good`.
fn node(configs: &[(&str, String)]) -> Node {
    let mut node = Node::new(&[]).unwrap();
    let good = json!({"cniVersion": "1.0.0", "type": "veth", "ipam": node.host_local(&["10.51.0.0/24"])});
    node.write("good", &network(NAMESPACE, "good", &good)).unwrap();
    for (name, config) in configs {
        let mut definition = network(NAMESPACE, name, &Value::Null);
        definition["spec"]["config"] = json!(config);
        node.write(name, &definition).unwrap();
        let annotation = json!(format!("good, {name}"));
        node.write(&format!("pod-{name}"), &pod(name, &json!({}), &annotation)).unwrap();
    }
    node.write("pod-warm", &pod("warm", &json!({}), &json!("good"))).unwrap();
    node.set("delegation", json!({"timeoutSeconds": TIMEOUT}));
    node
}

/// Starts the agent and creates the parts that stay after the first pod.
fn start(node: &mut Node) {
    node.start().unwrap();
    let warm = Pod::new("warm").unwrap();
    node.add(&warm).success();
    node.del(&warm).success();
}

/// The agent's peak memory, in KiB.
fn peak(node: &Node) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", node.agent_pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Rows: EXE-04, EXE-06, EXE-07, EXE-08, EXE-09, EXE-10, EXE-12, EXE-13, EXE-14, EXE-16, RES-10.
#[test]
fn a_plugin_that_misbehaves_costs_little_and_leaves_nothing() {
    const FLOOD: usize = 64 << 20;
    // The behaviour at ADD, the code, a part of the message, the verbs that reached the plugin.
    let rows = [
        ("hangs", json!({"sleepMs": 600_000}), 11, "did not end within 5s and was killed", "ADD DEL"),
        ("floods", json!({"floodStdout": FLOOD}), 6, "wrote more than 1048576 bytes to stdout", "ADD DEL"),
        (
            "complains",
            json!({"floodStderr": FLOOD, "stderr": "", "error": {"code": 120, "msg": "no"}}),
            120,
            "no",
            "ADD DEL",
        ),
        ("rambles", json!({"stdout": "no JSON"}), 6, "no JSON", "ADD DEL"),
        ("lists", json!({"stdout": "[1]"}), 6, "an array, not an object", "ADD DEL"),
        (
            "future",
            json!({"result": {"cniVersion": "9.0.0"}}),
            6,
            "unsupported CNI result version",
            "ADD DEL",
        ),
        ("odd-ips", json!({"result": {"cniVersion": "1.0.0", "ips": [{"address": 5}]}}), 6, "ips", "ADD DEL"),
        ("silent", json!({"exit": 3, "stdout": ""}), 999, "exit status: 3", "ADD DEL"),
        (
            "mutters",
            json!({"exit": 3, "stdout": "", "stderr": "out of vlans"}),
            999,
            "out of vlans",
            "ADD DEL",
        ),
        ("refuses", json!({"error": {"code": 123, "msg": "no vlan left"}}), 123, "no vlan left", "ADD DEL"),
        (
            "confused",
            json!({"exit": 1, "result": {"cniVersion": "1.0.0"}}),
            999,
            "not a CNI error",
            "ADD DEL",
        ),
        ("dies", json!({"stdout": "", "abort": true}), 999, "signal: 6", "ADD DEL"),
        // A plugin that certainly cannot run is not started.
        ("directory", Value::Null, 7, "is not a regular file", ""),
        // It may become executable until DEL, which is tried anyway.
        ("busy", Value::Null, 11, "is still being written", ""),
    ];
    let configs: Vec<(&str, String)> = rows
        .iter()
        .map(|(name, ..)| (*name, json!({"cniVersion": "1.0.0", "type": name}).to_string()))
        .collect();
    let mut node = node(&configs);
    for (name, script, ..) in &rows {
        if !script.is_null() {
            node.plugin(name, &json!({"ADD": script})).unwrap();
        }
    }
    fs::create_dir(node.path("cni-bin/directory")).unwrap();
    node.plugin("copied", &json!({})).unwrap();
    fs::copy(node.path("cni-bin/copied"), node.path("cni-bin/busy")).unwrap();
    start(&mut node);
    let mut writer = Some(OpenOptions::new().write(true).open(node.path("cni-bin/busy")).unwrap());
    let before_all = peak(&node);
    let mut wrong = Vec::new();
    for (name, _, code, said, called) in &rows {
        let pod = Pod::new(name).unwrap();
        let before = Snapshot::take(&node, &[&pod]).unwrap();
        let started = Instant::now();
        let (got, message) = node.add(&pod).failure();
        if started.elapsed() > Duration::from_secs(2 * TIMEOUT) + SLACK {
            wrong.push(format!("{name}: {:?}", started.elapsed()));
        }
        if got != *code || !message.contains(said) || !message.contains(name) {
            wrong.push(format!("{name}: {got} {message}"));
        }
        if *name == "busy" {
            drop(writer.take());
        }
        node.del(&pod).success();
        if *name != "busy" {
            let expected: Vec<String> =
                called.split_whitespace().map(|verb| format!("{verb} {name} net2")).collect();
            assert_eq!(verbs(&node.take_calls().unwrap()), expected, "{name}");
        }
        assert_eq!(Snapshot::take(&node, &[&pod]).unwrap(), before, "{name}");
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    let grown = peak(&node) - before_all;
    assert!(grown < MEMORY, "{grown} KiB");
}

/// Rows: REQ-16, EXE-01, EXE-02, CFG-08, CFG-20.
#[test]
fn a_configuration_that_is_meant_to_hurt_is_refused_or_passed_on_whole() {
    let deep = |levels: usize| {
        let (open, close) = ("[".repeat(levels), "]".repeat(levels));
        format!("{{\"cniVersion\":\"1.0.0\",\"type\":\"one\",\"deep\":{open}{close}}}")
    };
    let config = |keys: Value| {
        let mut config = json!({"cniVersion": "1.0.0", "type": "one"});
        config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        config.to_string()
    };
    let large = "x".repeat(250 << 10);
    // The result of ADD: a part of the refusal, or the key that the plugin gets with its value.
    let rows = [
        ("deep", deep(10_000), Err((7, "recursion limit exceeded"))),
        ("deeper", deep(100_000), Err((7, "100003 values, and at most 40960 are allowed"))),
        ("nested", deep(100), Ok(("deep", (1..100).fold(json!([]), |inner, _| json!([inner]))))),
        ("large", config(json!({"large": large})), Ok(("large", json!(large)))),
        ("args", config(json!({"args": []})), Ok(("args", json!([])))),
        ("cni-args", config(json!({"args": {"cni": 5}})), Ok(("args", json!({"cni": 5})))),
        (
            "twice",
            "{\"cniVersion\":\"1.0.0\",\"type\":\"../evil\",\"type\":\"one\",\"x\":1,\"x\":2}".to_owned(),
            Ok(("x", json!(2))),
        ),
        ("path", config(json!({"type": "../one"})), Err((7, "invalid plugin name: \"../one\""))),
        ("absolute", config(json!({"type": "/bin/sh"})), Err((7, "invalid plugin name: \"/bin/sh\""))),
        ("parent", config(json!({"type": ".."})), Err((7, "invalid plugin name: \"..\""))),
        ("nul", config(json!({"type": "one\u{0}"})), Err((7, "invalid plugin name"))),
        ("empty", config(json!({"type": ""})), Err((7, "key type"))),
        ("ipam-path", config(json!({"type": "veth", "ipam": {"type": "../one"}})), Err((7, "\"../one\""))),
        ("ipam-list", config(json!({"ipam": []})), Err((7, "key ipam: expected an object, found an array"))),
        ("no-object", "[]".to_owned(), Err((7, "expected an object, found an array"))),
        ("cut", "{\"type\":".to_owned(), Err((7, "EOF while parsing"))),
        ("null", config(json!({"plugins": [null]})), Err((7, "plugin 0 of the list"))),
    ];
    let configs: Vec<(&str, String)> = rows.iter().map(|(name, text, _)| (*name, text.clone())).collect();
    let mut node = node(&configs);
    node.plugin("one", &json!({})).unwrap();
    start(&mut node);
    let before_all = peak(&node);
    let mut wrong = Vec::new();
    for (name, _, expected) in &rows {
        let pod = Pod::new(name).unwrap();
        let before = Snapshot::take(&node, &[&pod]).unwrap();
        let added = node.add(&pod);
        match expected {
            Ok((key, value)) => {
                added.success();
                let calls = node.take_calls().unwrap();
                assert!(calls[0]["stdin"][*key] == *value, "{name}");
            }
            Err((code, said)) => {
                let (got, message) = added.failure();
                if got != *code || !message.contains(said) || message.len() > 1000 {
                    wrong.push(format!("{name}: {got} {message}"));
                }
            }
        }
        node.del(&pod).success();
        node.take_calls().unwrap();
        assert_eq!(Snapshot::take(&node, &[&pod]).unwrap(), before, "{name}");
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    let grown = peak(&node) - before_all;
    assert!(grown < MEMORY, "{grown} KiB");
}
