//! Networks that other plugins make: what each plugin of a list is told by which verb, which configuration a
//! definition means, and what others find in libcni's cache. Live, through the CNI executable.
#![expect(clippy::unwrap_used, reason = "a test reports by panicking")]

use std::fs;
use std::os::unix::fs::PermissionsExt;

use netattach::cni::cache::{Entry, Key};
use netattach::delegate::ResultCache;
use netattach_tests::calls::verbs;
use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};

/// A node whose pod `x` selects the network `net`.
fn node(config: &Value) -> Node {
    let node = Node::new(&[
        network(NAMESPACE, "net", config),
        pod("x", &json!({}), &json!([{"name": "net", "mac": "02:00:00:00:00:09"}])),
    ]);
    node.unwrap()
}

/// A pod without a request for a MAC.
fn plain(config: &Value) -> Node {
    Node::new(&[network(NAMESPACE, "net", config), pod("x", &json!({}), &json!("net"))]).unwrap()
}

fn result(version: &str) -> Value {
    let mut result = json!({
        "cniVersion": version,
        "interfaces": [{"name": "net1", "mac": "02:00:00:00:00:09", "sandbox": "/x"}],
        "ips": [{"interface": 0, "address": "192.0.2.9/24"}],
        "dns": {},
    });
    if version.starts_with('0') {
        result["ips"][0]["version"] = json!("4");
    }
    result
}

fn key(ifname: &str) -> Key {
    Key { network: "net".into(), container_id: "c-x".into(), ifname: ifname.into() }
}

fn cache(node: &Node) -> ResultCache {
    ResultCache::new(node.path("cni-cache"))
}

fn stdin_of<'a>(calls: &'a [Value], verb: &str) -> Vec<&'a Value> {
    calls.iter().filter(|call| call["env"]["CNI_COMMAND"] == verb).map(|call| &call["stdin"]).collect()
}

/// A number that a double cannot hold.
const BIG: u64 = 9_007_199_254_740_993;

/// Rows: REQ-01, REQ-02, REQ-03, REQ-04, REQ-06, REQ-08, REQ-14, REQ-20, REQ-21, CFG-20, VER-22, RES-12.
/// Rows: NPWG-7.1-inject, NPWG-7.1-prevresult, CAC-03.
#[test]
fn each_plugin_of_a_list_is_told_what_it_must_know_and_nothing_is_lost_on_the_way() {
    let mut node = node(&json!({
        "cniVersion": "0.4.0", "cniVersions": ["0.3.1", "1.1.0", "99.0.0"], "name": "net", "own": {"n": BIG},
        "plugins": [
            {"type": "one", "name": "another", "cniVersion": "0.1.0", "deep": {"n": [BIG]}, "prevResult": {}},
            {"type": "two", "capabilities": {"mac": true, "ips": true}, "runtimeConfig": {"static": true}},
            {"type": "three", "capabilities": {"mac": false}},
        ],
    }));
    let first =
        json!({"cniVersion": "1.1.0", "interfaces": [{"name": "net1", "x": 1}], "vendor": {"n": BIG}});
    let mut last = first.clone();
    last["ips"] = json!([{"address": "192.0.2.9/24"}]);
    node.plugin("one", &json!({"ADD": {"result": first}})).unwrap();
    node.plugin("two", &json!({"ADD": {"result": "prevResult"}})).unwrap();
    node.plugin("three", &json!({"ADD": {"result": last}})).unwrap();
    node.start().unwrap();
    let x = Pod::new("x").unwrap();
    node.add(&x).success();
    let entry = cache(&node).read(&key("net1")).unwrap().unwrap();
    node.check(&x).success();
    node.del(&x).success();

    let calls = node.take_calls().unwrap();
    let order = [
        "ADD one net1",
        "ADD two net1",
        "ADD three net1",
        "CHECK one net1",
        "CHECK two net1",
        "CHECK three net1",
        "DEL three net1",
        "DEL two net1",
        "DEL one net1",
    ];
    assert_eq!(verbs(&calls), order);
    let one = json!({"type": "one", "name": "net", "cniVersion": "1.1.0", "deep": {"n": [BIG]}});
    let two = json!({
        "type": "two", "name": "net", "cniVersion": "1.1.0", "capabilities": {"mac": true, "ips": true},
        "runtimeConfig": {"mac": "02:00:00:00:00:09"},
    });
    let three =
        json!({"type": "three", "name": "net", "cniVersion": "1.1.0", "capabilities": {"mac": false}});
    let with = |config: &Value, result: &Value| {
        let mut config = config.clone();
        config["prevResult"] = result.clone();
        config
    };
    assert_eq!(stdin_of(&calls, "ADD"), [&one, &with(&two, &first), &with(&three, &first)]);
    let checked = [&one, &two, &three].map(|config| with(config, &last));
    assert_eq!(stdin_of(&calls, "CHECK"), checked.iter().collect::<Vec<_>>());
    assert_eq!(stdin_of(&calls, "DEL"), checked.iter().rev().collect::<Vec<_>>());
    let env = &calls[0]["env"];
    assert_eq!(env["CNI_ARGS"], json!(node.call("ADD", &x).env["CNI_ARGS"]));
    assert_eq!(env["CNI_NETNS"], json!(x.namespace.path()));

    let config: Value = serde_json::from_slice(&entry.config).unwrap();
    assert_eq!(config["own"], json!({"n": BIG}));
    let expected = Entry {
        key: key("net1"),
        config: entry.config.clone(),
        netns: Some(x.namespace.path().to_string_lossy().into_owned()),
        args: [
            ("IgnoreUnknown", "1"),
            ("K8S_POD_NAMESPACE", NAMESPACE),
            ("K8S_POD_NAME", "x"),
            ("K8S_POD_INFRA_CONTAINER_ID", "c-x"),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into(),
        capability_args: json!({"mac": "02:00:00:00:00:09"}).as_object().unwrap().clone(),
        result: Some(last),
    };
    assert_eq!(entry, expected);
    assert_eq!(entry.network().unwrap().version.as_str(), "1.1.0");
    Snapshot::take(&node, &[&x]).unwrap().assert_nothing_is_left();
    assert_eq!(fs::read_dir(node.path("cni-cache/results")).unwrap().count(), 0);
}

/// Rows: CNI-VERSION-mix, VER-24, VER-26, RES-09, RES-11, CNV-02, CNV-03.
#[test]
fn runtime_list_and_plugin_may_each_speak_another_version() {
    // Version of the runtime's configuration, of the list, of what the plugin prints; verbs; prevResult of DEL.
    let all = ["ADD", "ADD", "CHECK", "CHECK", "DEL", "DEL"].as_slice();
    let unchecked = ["ADD", "ADD", "DEL", "DEL"].as_slice();
    for (runtime, list, printed, verbs, at_del) in [
        ("1.1.0", "0.3.1", "0.3.1", unchecked, None),
        ("0.3.1", "1.1.0", "1.1.0", unchecked, Some("1.1.0")),
        ("1.1.0", "0.4.0", "1.0.0", all, Some("0.4.0")),
        ("1.0.0", "1.1.0", "0.4.0", all, Some("1.1.0")),
        ("0.4.0", "0.2.0", "0.2.0", unchecked, None),
        ("1.1.0", "1.0.0", "", all, Some("1.0.0")),
    ] {
        let mut node = plain(&json!({
            "cniVersion": list, "name": "net", "plugins": [{"type": "one"}, {"type": "two"}],
        }));
        let answer = match printed {
            "0.2.0" => json!({"cniVersion": printed, "ip4": {"ip": "192.0.2.9/24"}, "dns": {}}),
            _ => result(printed),
        };
        node.plugin("one", &json!({"ADD": {"result": answer}})).unwrap();
        node.plugin("two", &json!({"ADD": {"result": "prevResult"}})).unwrap();
        node.start().unwrap();
        let x = Pod::new("x").unwrap();
        let config = node.cni_config(runtime);
        let told = node.call("ADD", &x).stdin(&config).run().success();
        assert_eq!(told["cniVersion"], runtime);
        if runtime != "0.3.1" {
            node.call("CHECK", &x).stdin(&config).run().success();
        }
        node.call("DEL", &x).stdin(&config).run().success();
        let calls = node.take_calls().unwrap();
        let called: Vec<&str> =
            calls.iter().map(|call| call["env"]["CNI_COMMAND"].as_str().unwrap()).collect();
        assert_eq!(called, verbs, "{runtime} {list} {printed}");
        assert!(calls.iter().all(|call| call["stdin"]["cniVersion"] == list));
        // What went from the first plugin to the second is in the list's version and shape.
        let passed = &stdin_of(&calls, "ADD")[1]["prevResult"];
        let address = if list == "0.2.0" { &passed["ip4"]["ip"] } else { &passed["ips"][0]["address"] };
        assert_eq!((&passed["cniVersion"], address), (&json!(list), &json!("192.0.2.9/24")));
        assert_eq!(passed["ips"][0].get("version").is_some(), ["0.3.1", "0.4.0"].contains(&list));
        for stdin in stdin_of(&calls, "DEL") {
            assert_eq!(
                stdin.get("prevResult").map(|result| result["cniVersion"].clone()),
                at_del.map(Value::from)
            );
        }
        Snapshot::take(&node, &[&x]).unwrap().assert_nothing_is_left();
    }
}

/// Rows: DEL-01, DEL-03, NPWG-7.2-del-all.
#[test]
fn del_runs_every_plugin_and_names_all_that_failed() {
    let mut node = plain(&json!({
        "cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "one"}, {"type": "two"}, {"type": "three"}],
    }));
    let fails = |message: &str| json!({"DEL": {"error": {"code": 120, "msg": message}}});
    node.plugin("one", &fails("one is busy")).unwrap();
    node.plugin("two", &json!({})).unwrap();
    node.plugin("three", &fails("three is busy")).unwrap();
    node.start().unwrap();
    let x = Pod::new("x").unwrap();
    node.add(&x).success();
    node.take_calls().unwrap();
    let (_, message) = node.del(&x).failure();
    assert!(message.contains("one is busy") && message.contains("three is busy"), "{message}");
    let backwards = ["DEL three net1", "DEL two net1", "DEL one net1"];
    assert_eq!(verbs(&node.take_calls().unwrap()), backwards);
    // Whoever looks for what is left finds it until nothing is.
    assert!(cache(&node).read(&key("net1")).unwrap().is_some());
    for name in ["one", "three"] {
        node.plugin(name, &json!({})).unwrap();
    }
    node.del(&x).success();
    assert_eq!(verbs(&node.take_calls().unwrap()), backwards);
    Snapshot::take(&node, &[&x]).unwrap().assert_nothing_is_left();
}

/// Rows: ADD-02, ADD-04.
#[test]
fn what_failed_is_not_cached_and_is_taken_back() {
    let mut node = plain(&json!({
        "cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "one"}, {"type": "two"}, {"type": "three"}],
    }));
    node.plugin("one", &json!({})).unwrap();
    node.plugin("two", &json!({"ADD": {"error": {"code": 120, "msg": "no"}}})).unwrap();
    node.plugin("three", &json!({})).unwrap();
    node.start().unwrap();
    let x = Pod::new("x").unwrap();
    let (code, _) = node.add(&x).failure();
    assert_eq!(code, 120);
    assert_eq!(
        verbs(&node.take_calls().unwrap()),
        ["ADD one net1", "ADD two net1", "DEL two net1", "DEL one net1"]
    );
    Snapshot::take(&node, &[&x]).unwrap().assert_nothing_is_left();
    assert!(!node.path("cni-cache").exists());
}

/// Rows: CAC-01, CAC-02.
#[test]
fn the_setting_says_which_attachments_are_cached() {
    let files = |node: &Node| -> Vec<String> {
        let entries = fs::read_dir(node.path("cni-cache/results")).into_iter().flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    for (setting, expected) in [
        ("all", vec!["default-c-x-eth0", "native-c-x-net2", "net-c-x-net1"]),
        ("delegated", vec!["net-c-x-net1"]),
        ("off", Vec::new()),
    ] {
        let mut node = plain(&json!({"cniVersion": "1.0.0", "type": "one"}));
        let native =
            json!({"cniVersion": "1.0.0", "type": "veth", "ipam": node.host_local(&["10.51.0.0/24"])});
        node.write("native", &network(NAMESPACE, "native", &native)).unwrap();
        node.write("manifest-01", &pod("x", &json!({}), &json!("net,native"))).unwrap();
        node.plugin("one", &json!({})).unwrap();
        node.set("delegation", json!({"resultCache": setting}));
        node.start().unwrap();
        let x = Pod::new("x").unwrap();
        node.add(&x).success();
        assert_eq!(files(&node), expected, "{setting}");
        if setting == "all" {
            let results = node.path("cni-cache/results");
            let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
            assert_eq!((mode(&results), mode(&results.join("net-c-x-net1"))), (0o700, 0o600));
            let mut default = key("eth0");
            default.network = "default".into();
            let entry = cache(&node).read(&default).unwrap().unwrap();
            assert_eq!(entry.result.unwrap()["interfaces"][2]["name"], "eth0");
            // The runtime writes the file that is named after its own configuration.
            node.del(&x).success();
            let own = json!({"cniVersion": "1.0.0", "name": "default", "type": "netattach",
                "socket": node.socket(), "stateDir": node.path("state")});
            node.call("ADD", &x).stdin(own).run().success();
            assert_eq!(files(&node), expected[1..]);
        }
        node.del(&x).success();
        assert_eq!(files(&node), [""; 0]);
        Snapshot::take(&node, &[&x]).unwrap().assert_nothing_is_left();
    }
}
