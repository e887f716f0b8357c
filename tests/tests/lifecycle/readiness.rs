//! The file that makes the container runtime call netattach: when it is written, its content, and that it is kept.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use netattach_tests::manifest::{network, pod};
use netattach_tests::node::executable;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{PATIENCE, eventually, ping};
use netattach_tests::{Call, Node, Pod};
use serde_json::{Value, json};

/// A node that writes the file into a directory of its own, which does not exist yet.
fn node() -> Node {
    let mut node = Node::new(&[pod("a", &json!({}), &json!(null))]).unwrap();
    node.set("cniConf", json!({"dir": node.path("net.d"), "network": "pods"}));
    node
}

fn file(node: &Node) -> PathBuf {
    node.path("net.d/00-netattach.conflist")
}

fn written(node: &Node) -> Option<Value> {
    fs::read(file(node)).ok().map(|text| serde_json::from_slice(&text).expect("never half written"))
}

fn await_file(node: &Node, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
    assert!(eventually(PATIENCE, || written(node).is_some_and(|conf| holds(&conf))), "{what}");
    written(node).unwrap()
}

/// Returns the configuration that a runtime derives from the file for the plugin: its first plugin, with name and
/// newest version of the list.
fn as_called_by_a_runtime(conf: &Value) -> Value {
    let mut plugin = conf["plugins"][0].clone();
    plugin["name"] = conf["name"].clone();
    plugin["cniVersion"] = conf["cniVersions"].as_array().unwrap().last().unwrap().clone();
    plugin.as_object_mut().unwrap().remove("capabilities");
    plugin
}

fn call(node: &Node, verb: &str, pod: &Pod, conf: &Value) -> Call {
    node.call(verb, pod).stdin(as_called_by_a_runtime(conf))
}

/// The condition as `netattachctl status` shows it.
fn condition(node: &Node, name: &str) -> (bool, String) {
    let output = Command::new(executable("netattachctl").unwrap())
        .arg("--socket")
        .arg(node.socket())
        .args(["status", "-o", "json"])
        .output()
        .unwrap();
    let status: Value = serde_json::from_slice(&output.stdout).unwrap();
    let conditions = status["ready"].as_array().unwrap();
    let found = conditions.iter().find(|condition| condition["condition"] == name).unwrap();
    (found["met"].as_bool().unwrap(), found["detail"].as_str().unwrap().to_owned())
}

/// Returns the log's lines about the node's readiness, without time and module.
fn told(node: &Node) -> Vec<String> {
    let log = node.log_so_far();
    let lines = log.lines().filter_map(|line| line.split_once(" netattach::agent::health::readiness: "));
    lines.map(|(_, told)| told.to_owned()).collect()
}

/// Returns the last line that the log must have for the output of `netattachctl status`.
fn to_be_told(node: &Node) -> String {
    let status = node.whole_status().unwrap();
    let unmet: Vec<&Value> =
        status["ready"].as_array().unwrap().iter().filter(|it| it["met"] == false).collect();
    let text = |it: &Value, key: &str| it[key].as_str().unwrap().to_owned();
    let first = |it: &Value| format!("not ready: {}: {}", text(it, "condition"), text(it, "detail"));
    match unmet[..] {
        [] => "ready".to_owned(),
        [only] => first(only),
        [it, ref others @ ..] => format!("{} others={}", first(it), others.len()),
    }
}

#[test]
fn the_log_says_once_what_status_shows_when_it_changes() {
    let mut node = Node::new(&[pod("a", &json!({}), &json!(null))]).unwrap();
    let default = network("kube-system", "default", &node.default_config());
    node.remove("default").unwrap();
    node.start().unwrap();
    let undefined = "not ready: default network: network kube-system/default is not defined".to_owned();
    let ready = "ready".to_owned();
    let mut expected = Vec::new();
    for (is_defined, line) in [(false, &undefined), (true, &ready), (false, &undefined), (true, &ready)] {
        match (is_defined, expected.is_empty()) {
            (true, _) => node.write("default", &default).unwrap(),
            (false, true) => {}
            (false, false) => node.remove("default").unwrap(),
        }
        expected.push(line.clone());
        assert!(eventually(PATIENCE, || told(&node) == expected), "{:#?}\n{expected:#?}", told(&node));
        assert!(eventually(PATIENCE, || to_be_told(&node) == *line), "{}", to_be_told(&node));
    }
    // Serving the socket does not depend on readiness, and is logged only once.
    assert_eq!(node.log_so_far().matches(" serving socket=").count(), 1);
}

/// Rows: NPWG-6.1-conf-after-ready, NPWG-6.1-ready-means-usable, NPWG-6.1.1-own-confdir.
/// Rows: NPWG-6.1.2-block-until-ready.
#[test]
fn the_file_comes_with_the_default_network_and_pods_work_at_once() {
    let mut node = node();
    node.remove("default").unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    let not_ready = "the node's default network is not ready: network kube-system/default is not defined";
    assert_eq!(node.add(&a).failure(), (11, not_ready.to_owned()));
    node.del(&a).success();
    let undefined = "network kube-system/default is not defined".to_owned();
    assert_eq!(condition(&node, "default network"), (false, undefined.clone()));
    assert!(eventually(PATIENCE, || condition(&node, "CNI configuration") == (false, undefined.clone())));

    // Defined, but its plugin is not installed yet.
    let plain = node.default_config();
    let list = |plugin: &str| json!({"cniVersion": "1.0.0", "plugins": [plain, {"type": plugin, "capabilities": {"portMappings": true}}]});
    let missing = network("kube-system", "default", &list("chained"));
    node.write("default", &missing).unwrap();
    let search = node.path("cni-bin");
    let no_plugin = format!("failed to find plugin \"chained\" in path [{}]", search.display());
    assert!(eventually(PATIENCE, || condition(&node, "CNI configuration").1.contains(&no_plugin)));
    assert_eq!(written(&node), None);

    node.plugin("chained", &json!({})).unwrap();
    let conf = await_file(&node, "the plugin is there", |_| true);
    assert_eq!(conf["plugins"][0]["capabilities"], json!({"portMappings": true}));
    call(&node, "ADD", &a, &conf).run().success();
    assert!(ping(&a.namespace, "10.50.0.1".parse().unwrap(), PATIENCE).unwrap());
    assert_eq!(condition(&node, "CNI configuration"), (true, file(&node).display().to_string()));
    node.await_status(&a);
    call(&node, "CHECK", &a, &conf).run().success();
    call(&node, "DEL", &a, &conf).run().success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

/// Rows: NPWG-6.1.2-block-until-ready.
#[test]
fn the_file_stays_without_agent_and_without_default_network_and_add_fails_closed() {
    let mut node = node();
    node.start().unwrap();
    let conf = await_file(&node, "ready", |_| true);
    let a = Pod::new("a").unwrap();
    node.stop().unwrap();
    assert_eq!(written(&node).as_ref(), Some(&conf), "after an orderly end");
    let (code, message) = call(&node, "ADD", &a, &conf).run().failure();
    assert_eq!((code, message.contains("the agent does not answer at")), (11, true), "{message}");
    call(&node, "DEL", &a, &conf).run().success();
    assert_eq!(fs::read_dir(node.path("state/pending")).unwrap().count(), 1, "the DEL is recorded");

    node.start().unwrap();
    assert_eq!(written(&node).as_ref(), Some(&conf), "after a start");
    assert_eq!(fs::read_dir(node.path("state/pending")).unwrap().count(), 0, "the DEL is done");
    node.kill().unwrap();
    assert_eq!(written(&node).as_ref(), Some(&conf), "after a kill");

    node.remove("default").unwrap();
    node.start().unwrap();
    assert!(eventually(PATIENCE, || !condition(&node, "CNI configuration").0));
    assert_eq!(written(&node).as_ref(), Some(&conf), "without a default network");
    assert_eq!(call(&node, "ADD", &a, &conf).run().failure().0, 11);
}

#[test]
fn the_file_follows_the_default_network_on_disk() {
    let mut node = node();
    let default = node.path("default.conflist");
    node.set("defaultNetwork", json!(default));
    let plain = node.default_config();
    let write = |version: &str, capability: &str| {
        let mut plugin = plain.clone();
        plugin["capabilities"] = json!({capability: true});
        let list = json!({"cniVersion": version, "name": "cbr0", "plugins": [plugin]});
        fs::write(&default, list.to_string()).unwrap();
    };
    write("0.4.0", "ips");
    node.start().unwrap();
    let declares = |capability: &'static str| {
        // hostPorts are always declared, so that they are refused if no plugin opens them.
        move |conf: &Value| {
            conf["plugins"][0]["capabilities"] == json!({capability: true, "portMappings": true})
        }
    };
    let conf = await_file(&node, "the first", declares("ips"));
    assert_eq!(conf["cniVersions"], json!(["0.4.0", "1.0.0", "1.1.0"]));
    write("1.0.0", "mac");
    await_file(&node, "the second", declares("mac"));
    fs::remove_file(&default).unwrap();
    assert!(eventually(PATIENCE, || !condition(&node, "CNI configuration").0));
    assert!(declares("mac")(&written(&node).unwrap()));
}

#[test]
fn somebody_elses_file_is_left_alone() {
    let mut node = node();
    fs::create_dir(node.path("net.d")).unwrap();
    let foreign = r#"{"cniVersion": "1.0.0", "name": "theirs", "plugins": [{"type": "x"}]}"#;
    fs::write(file(&node), foreign).unwrap();
    node.start().unwrap();
    let told = format!(
        "{} was not written by netattach; remove it or choose another cniConf.name",
        file(&node).display()
    );
    assert!(eventually(PATIENCE, || condition(&node, "CNI configuration") == (false, told.clone())));
    assert_eq!(fs::read_to_string(file(&node)).unwrap(), foreign);
    fs::remove_file(file(&node)).unwrap();
    await_file(&node, "ours", |conf| conf["netattach.dev/managed"] == true);
}

/// A crash between writing and renaming leaves the old file or none, never a part.
#[test]
fn an_agent_that_dies_while_writing_leaves_no_half_file() {
    const WRITTEN: &str = "replace:\"written\"";
    let (mut node, mut other) = (node(), node());
    let agent = Path::new(env!("CARGO_BIN_EXE_crash-agent"));
    let start_as = |node: &mut Node, at: &str| {
        let crash = node.path("crash");
        fs::create_dir(&crash).unwrap();
        fs::write(crash.join("at"), at).unwrap();
        node.start_as(agent, &[("NETATTACH_CRASH_DIR", crash.to_str().unwrap())])
    };
    let points = |node: &Node| fs::read_to_string(node.path("crash/log")).unwrap();
    // A second agent counts the points before that.
    start_as(&mut other, "none").unwrap();
    await_file(&other, "nobody dies", |_| true);
    let before = points(&other).lines().position(|point| point == WRITTEN).unwrap();
    // It dies before or after it reports readiness.
    if start_as(&mut node, &before.to_string()).is_ok() {
        node.wait_for_end().unwrap();
    }
    assert_eq!(points(&node).lines().last(), Some(WRITTEN));
    assert_eq!(written(&node), None);
    node.start().unwrap();
    await_file(&node, "after the crash", |_| true);
    let files: Vec<_> = fs::read_dir(node.path("net.d")).unwrap().collect();
    assert_eq!(files.len(), 1, "{files:?}");
}
