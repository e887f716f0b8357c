//! Networks made by other plugins: the input of each plugin of a list by verb, the configuration that a definition
//! resolves to, and the contents of libcni's cache. Live, through the CNI executable.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use netattach::cni::cache::{Entry, Key};
use netattach::delegate::ResultCache;
use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::node::{WIRE, ip};
use netattach_tests::plugin_calls::verbs;
use netattach_tests::record::first_version;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{PATIENCE, eventually};
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

/// A pod that requests no MAC.
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

/// A number that a double cannot represent.
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
    // Version of the runtime's configuration, of the list, of the plugin's output; verbs; prevResult of DEL.
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
        // The result passed from the first plugin to the second has the list's version and shape.
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

/// Rows: DEL-01, DEL-03, NPWG-7.2-del-all, NPWG-7.2-del-final-error.
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
    // The cache entry stays until everything is deleted.
    assert!(cache(&node).read(&key("net1")).unwrap().is_some());
    for name in ["one", "three"] {
        node.plugin(name, &json!({})).unwrap();
    }
    node.del(&x).success();
    assert_eq!(verbs(&node.take_calls().unwrap()), backwards);
    Snapshot::take(&node, &[&x]).unwrap().assert_nothing_is_left();
}

/// From then on the address belongs to another pod, on whichever node its plugin assigns it.
#[test]
fn an_address_of_another_plugin_is_given_back_once_its_interface_is_gone() {
    let mut node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    let lan = json!({"cniVersion": "1.0.0", "type": "macvlan", "master": WIRE, "ipam": {"type": "pool"}});
    node.write("lan", &network(NAMESPACE, "lan", &lan)).unwrap();
    node.write("net", &network(NAMESPACE, "net", &json!({"cniVersion": "1.0.0", "type": "one"}))).unwrap();
    node.write("x", &pod("x", &json!({}), &json!("net, lan"))).unwrap();
    let given = json!({"cniVersion": "1.0.0", "ips": [{"address": "10.52.0.7/24"}]});
    node.plugin("pool", &json!({"ADD": {"result": given}, "DEL": {"tellInterface": true}})).unwrap();
    node.plugin("one", &json!({})).unwrap();
    node.start().unwrap();
    let x = Pod::new("x").unwrap();
    node.add(&x).success();
    node.take_calls().unwrap();
    node.del(&x).success();
    let calls = node.take_calls().unwrap();
    let told = |call: &Value| match call["interface"].as_bool() {
        Some(is_there) => format!("interface: {is_there}"),
        None => format!("DEL {}", call["plugin"].as_str().unwrap_or_default()),
    };
    assert_eq!(calls.iter().map(told).collect::<Vec<_>>(), ["DEL one", "DEL pool", "interface: false"]);
    Snapshot::take(&node, &[&x]).unwrap().assert_nothing_is_left();
}

#[test]
fn a_plugin_that_wants_a_device_that_is_gone_keeps_no_pod_from_ending() {
    // A VF that its card no longer has, and an interface lost in another way.
    for (device, ends) in [(json!({"pciBusID": "ffff:ff:1f.7"}), true), (json!({}), false)] {
        let mut config =
            json!({"cniVersion": "1.0.0", "name": "net", "type": "one", "ipam": {"type": "pool"}});
        config.as_object_mut().unwrap().extend(device.as_object().unwrap().clone());
        let mut node = plain(&config);
        let refuses = json!({"error": {"code": 999, "msg": "no such device"}});
        node.plugin("one", &json!({"ADD": {"link": "veth"}, "DEL": refuses})).unwrap();
        node.plugin("pool", &json!({})).unwrap();
        node.start().unwrap();
        let x = Pod::new("x").unwrap();
        node.add(&x).success();
        let taken = || -> Vec<(String, bool)> {
            let calls = node.take_calls().unwrap();
            let told = |call: &Value| {
                let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                (text(&call["plugin"]), !text(&call["env"]["CNI_NETNS"]).is_empty())
            };
            calls.iter().map(told).collect()
        };
        let call = |plugin: &str, netns| (plugin.to_owned(), netns);
        taken();
        if !ends {
            // As long as the interface exists, the plugin's refusal is returned.
            let (_, message) = node.del(&x).failure();
            assert!(message.contains("no such device"), "{message}");
            assert_eq!(taken(), [call("one", true)]);
        }
        ip(&x.namespace, &["link", "del", "net1"]).unwrap();
        // Its addresses are released even if the plugin fails; the plugin is called again without the namespace, for
        // cleanup that needs no device.
        let outcome = node.del(&x);
        assert_eq!(taken(), [call("one", true), call("pool", true), call("one", false)]);
        if !ends {
            let (_, message) = outcome.failure();
            assert!(message.contains("no such device"), "{message}");
            node.plugin("one", &json!({})).unwrap();
            node.del(&x).success();
        } else {
            outcome.success();
        }
        Snapshot::take(&node, &[&x]).unwrap().assert_nothing_is_left();
    }
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

/// A started node whose definition `net` has no `spec.config`.
fn undescribed() -> Node {
    let mut node = plain(&json!({}));
    let mut bare = network(NAMESPACE, "net", &json!({}));
    bare["spec"] = json!({});
    node.write("manifest-00", &bare).unwrap();
    for name in ["list", "single", "inline", "first", "second"] {
        node.plugin(name, &json!({})).unwrap();
    }
    node.start().unwrap();
    node
}

/// The configuration directory holds these files and no others.
fn on_disk(node: &Node, files: &[(&str, Value)]) {
    // Absent before the first time.
    let _ = fs::remove_dir_all(node.path("cni-conf"));
    for (file, content) in files {
        let path = node.path("cni-conf").join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let text = content.as_str().map_or_else(|| content.to_string(), str::to_owned);
        fs::write(path, text).unwrap();
    }
}

/// Rows: NPWG-3.2-noconfig-known-network, NPWG-3.4.1-r2-list-before-single, NPWG-3.4.1-r3-single.
/// Rows: NPWG-3.4.1-other-file-broken, CFG-09, CFG-10, CFG-12, CFG-13, CFG-14, CFG-22.
#[test]
fn a_definition_without_a_configuration_means_the_one_on_disk() {
    let node = undescribed();
    let x = Pod::new("x").unwrap();
    let list = json!({"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "list"}]});
    let single = json!({"cniVersion": "1.0.0", "name": "net", "type": "single"});
    let folder = |only: bool| {
        json!({"cniVersion": "1.0.0", "name": "net", "loadOnlyInlinedPlugins": only,
            "plugins": [{"type": "inline"}]})
    };
    for (files, called) in [
        (vec![("10.conf", single.clone()), ("20.conflist", list.clone())], vec!["list"]),
        (vec![("10.json", single.clone()), ("20.configlist", list)], vec!["list"]),
        (vec![("00.conflist", json!("{")), ("01.conf", json!("[]")), ("10.config", single)], vec!["single"]),
        (
            vec![
                ("a.conflist", folder(false)),
                ("net/20.conf", json!({"type": "second"})),
                ("net/10.conf", json!({"type": "first"})),
            ],
            vec!["inline", "first", "second"],
        ),
        (vec![("a.conflist", folder(true)), ("net/10.conf", json!({"type": "first"}))], vec!["inline"]),
    ] {
        on_disk(&node, &files);
        node.add(&x).success();
        let calls = node.take_calls().unwrap();
        let expected: Vec<String> = called.iter().map(|plugin| format!("ADD {plugin} net1")).collect();
        assert_eq!(verbs(&calls), expected);
        assert!(calls.iter().all(|call| call["stdin"]["name"] == "net"));
        node.del(&x).success();
        node.take_calls().unwrap();
    }
}

/// Rows: CFG-22.
#[test]
fn files_on_disk_that_describe_no_network_are_shown_until_they_do() {
    let node = undescribed();
    let usable = json!({"cniVersion": "1.0.0", "name": "net", "type": "single"});
    let untyped = json!({"name": "other", "plugins": [{}]});
    on_disk(&node, &[("00.conflist", json!("{")), ("05.conflist", untyped), ("10.conf", usable.clone())]);
    let shown = || {
        let status = node.ctl(&["status"]).unwrap();
        let rows = status["source"].as_array().unwrap().iter();
        rows.map(|row| format!("{}: {}", row["object"].as_str().unwrap(), row["problem"].as_str().unwrap()))
            .collect::<Vec<_>>()
    };
    let path = |file: &str| node.path("cni-conf").join(file).display().to_string();
    let expected = [
        format!(
            "{}: parse network configuration: EOF while parsing an object at line 1 column 1",
            path("00.conflist")
        ),
        format!("{}: plugin 0 of the list: key type: expected a string, found null", path("05.conflist")),
    ];
    assert!(eventually(PATIENCE, || shown() == expected), "{:#?}", shown());
    on_disk(&node, &[("10.conf", usable)]);
    assert!(eventually(PATIENCE, || shown() == [""; 0]), "{:#?}", shown());
}

/// Rows: NPWG-3.4.1-r4-none-fails, CFG-15, CFG-16, CFG-17.
#[test]
fn a_definition_that_no_file_describes_fails_the_pod_by_its_name() {
    let node = undescribed();
    let x = Pod::new("x").unwrap();
    let other = json!({"cniVersion": "1.0.0", "name": "other", "type": "single"});
    for (files, why) in [
        (vec![], "no network configuration in the directory"),
        (
            vec![("10.conf", other), ("20.conflist", json!("{"))],
            "no network configuration with name \"net\" (unusable files: 20.conflist)",
        ),
        (
            vec![("10.conflist", json!({"name": "net", "plugins": []}))],
            "load network \"net\" from 10.conflist: key plugins: no plugins in list",
        ),
    ] {
        on_disk(&node, &files);
        let directory = node.path("cni-conf");
        let message = format!("network shop/net has no spec.config, and {}: {why}", directory.display());
        assert_eq!(node.add(&x).failure(), (7, message));
        node.del(&x).success();
        assert!(node.take_calls().unwrap().is_empty());
        Snapshot::take(&node, &[&x]).unwrap().assert_nothing_is_left();
    }
}

/// Rows: NPWG-3.4.1-r1-config-wins, NPWG-3.4.2-inject-name-conf, NPWG-3.4.2-inject-name-list.
/// Rows: NPWG-3.4.2-keep-name, NPWG-3.4.3-mismatch-allowed.
#[test]
fn a_configuration_without_a_name_gets_that_of_its_definition() {
    let rows = [
        ("single", json!({"cniVersion": "1.0.0", "type": "one"}), "single"),
        (
            "list",
            json!({"cniVersion": "1.0.0", "name": "", "plugins": [{"type": "one"}, {"type": "one"}]}),
            "list",
        ),
        ("kept", json!({"cniVersion": "1.0.0", "name": "own", "type": "one"}), "own"),
        (
            "kept-list",
            json!({"cniVersion": "1.0.0", "name": "own", "plugins": [{"type": "one", "name": "x"}]}),
            "own",
        ),
    ];
    let mut node = Node::new(&[]).unwrap();
    let mut files = Vec::new();
    for (name, config, _) in &rows {
        node.write(name, &network(NAMESPACE, name, config)).unwrap();
        node.write(&format!("pod-{name}"), &pod(name, &json!({}), &json!(name))).unwrap();
        files.push((*name, json!({"cniVersion": "1.0.0", "name": name, "type": "nothing-such"})));
    }
    let files: Vec<(String, Value)> =
        files.into_iter().map(|(name, config)| (format!("{name}.conf"), config)).collect();
    let files: Vec<(&str, Value)> =
        files.iter().map(|(file, config)| (file.as_str(), config.clone())).collect();
    on_disk(&node, &files);
    node.plugin("one", &json!({})).unwrap();
    node.start().unwrap();
    for (name, _, told) in &rows {
        let pod = Pod::new(name).unwrap();
        node.add(&pod).success();
        node.del(&pod).success();
        let calls = node.take_calls().unwrap();
        assert!(calls.len() >= 2 && calls.iter().all(|call| call["stdin"]["name"] == *told), "{calls:#?}");
    }
}

/// Two networks called `net` with one pool definition, each of which assigns addresses by its own files, where the second
/// passes over what the node routes to the first; the executed host-local finds the same pool. With a `name`, and with `separatePools: false`, there is one pool.
#[test]
fn networks_of_one_name_in_two_namespaces_have_pools_of_their_own() {
    for (named, separate, addresses, pools) in [
        (false, true, ["10.53.0.2", "10.53.0.3"], ["@shop/net", "@other/net"]),
        (false, false, ["10.53.0.2", "10.53.0.3"], ["net", "net"]),
        (true, true, ["10.53.0.2", "10.53.0.3"], ["own", "own"]),
    ] {
        let mut node = Node::new(&[pod("x", &json!({}), &json!("net,other/net,shop/odd"))]).unwrap();
        let mut config = json!({
            "cniVersion": "1.0.0", "type": "veth", "ipam": node.host_local(&["10.53.0.0/24"]),
        });
        if named {
            config["name"] = json!("own");
        }
        for namespace in [NAMESPACE, "other"] {
            node.write(namespace, &network(namespace, "net", &config)).unwrap();
        }
        let odd = json!({"cniVersion": "1.0.0", "type": "odd", "ipam": config["ipam"]});
        node.write("odd", &network(NAMESPACE, "odd", &odd)).unwrap();
        node.plugin("odd", &json!({})).unwrap();
        node.set("separatePools", json!(separate));
        node.start().unwrap();
        let x = Pod::new("x").unwrap();
        node.add(&x).success();
        let leased = |at: usize| node.path("leases").join(pools[at]).join(addresses[at]);
        assert_eq!(fs::read_to_string(leased(0)).unwrap(), "c-x\r\nnet1");
        assert_eq!(fs::read_to_string(leased(1)).unwrap(), "c-x\r\nnet2");
        let told = &node.take_calls().unwrap()[0]["stdin"]["ipam"]["dataDir"];
        let expected = if separate { node.path("leases/@shop") } else { node.path("leases") };
        assert_eq!(told, &json!(expected));
        node.check(&x).success();
        node.del(&x).success();
        assert!(!leased(0).exists() && !leased(1).exists());
        Snapshot::take(&node, &[&x]).unwrap().assert_nothing_is_left();
    }
}

/// A `name` that is added to a definition names another pool, which does not know the addresses of live pods: those
/// of the first pool would be assigned again, on the same bridge. Executed plugins find the same pool.
#[test]
fn a_definition_that_changes_under_live_pods_does_not_change_their_pool() {
    let pods = ["x", "y", "z"].map(|name| pod(name, &json!({}), &json!("net,odd")));
    let mut node = Node::new(&pods).unwrap();
    let define = |node: &Node, named: bool| {
        for (name, kind) in [("net", "bridge"), ("odd", "odd")] {
            let ipam = node.host_local(&["10.53.0.0/24"]);
            let mut config = json!({"cniVersion": "1.0.0", "type": kind, "bridge": "br1", "ipam": ipam});
            if named {
                config["name"] = json!(format!("{name}-named"));
            }
            node.write(name, &network(NAMESPACE, name, &config)).unwrap();
        }
    };
    define(&node, false);
    node.plugin("odd", &json!({})).unwrap();
    node.start().unwrap();
    let [x, y, z] = ["x", "y", "z"].map(|name| Pod::new(name).unwrap());
    node.add(&x).success();
    let (old, new) = (node.path("leases/@shop/net"), node.path("leases/net-named"));
    assert!(old.join("10.53.0.2").exists());

    define(&node, true);
    let row = |node: &Node| {
        let status = node.ctl(&["status"]).unwrap();
        let rows = status["source"].as_array().cloned().unwrap_or_default();
        rows.into_iter().find(|row| row["object"] == "network-attachment-definition shop/net")
    };
    assert!(eventually(PATIENCE, || row(&node).is_some()));
    let told = format!(
        "its pool {} is not in force: attachments live in pool {}, which new pods get too until the last of them is gone",
        new.display(),
        old.display()
    );
    assert_eq!(row(&node).unwrap()["problem"], json!(told));
    // A restarted agent knows the pools from its records.
    node.kill().unwrap();
    node.start().unwrap();
    node.take_calls().unwrap();
    node.add(&y).success();
    assert!(old.join("10.53.0.3").exists() && !new.exists());
    let named =
        |calls: &[Value]| (calls[0]["stdin"]["name"].clone(), calls[0]["stdin"]["ipam"]["dataDir"].clone());
    assert_eq!(named(&node.take_calls().unwrap()), (json!("odd"), json!(node.path("leases/@shop"))));
    node.gc("pods", Some(&[&x, &y])).success();
    assert!(old.join("10.53.0.2").exists() && old.join("10.53.0.3").exists());

    node.del(&x).success();
    node.del(&y).success();
    assert_eq!(row(&node), None);
    node.take_calls().unwrap();
    node.add(&z).success();
    assert!(new.join("10.53.0.2").exists(), "from now on the pool that the definition names");
    assert_eq!(named(&node.take_calls().unwrap()), (json!("odd-named"), json!(node.path("leases"))));
    node.del(&z).success();
    Snapshot::take(&node, &[&x, &y, &z]).unwrap().assert_nothing_is_left();
}

/// Rows: CAC-12.
#[test]
fn what_was_attached_before_a_reboot_is_dead_and_leaves_the_cache() {
    let mut node = plain(&json!({"cniVersion": "1.0.0", "type": "one"}));
    node.plugin("one", &json!({})).unwrap();
    node.start().unwrap();
    let x = Pod::new("x").unwrap();
    node.add(&x).success();
    node.kill().unwrap();
    let record = node.path("state/journal/c-x@eth0.jsonl");
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let text = first_version(&fs::read_to_string(&record).unwrap());
    assert!(text.contains(boot.trim()));
    fs::write(&record, text.replace(boot.trim(), "an-earlier-boot")).unwrap();
    assert!(cache(&node).read(&key("net1")).unwrap().is_some());
    node.take_calls().unwrap();
    node.start().unwrap();
    assert_eq!(verbs(&node.take_calls().unwrap()), ["DEL one net1"]);
    assert!(cache(&node).read(&key("net1")).unwrap().is_none());
    assert!(!record.exists());
}

/// Rows: REQ-24.
#[test]
fn address_management_is_given_the_whole_configuration_of_its_interface() {
    let mut node = plain(&json!({
        "cniVersion": "1.0.0", "type": "veth", "mtu": 1400, "own": [BIG], "ipam": {"type": "pool", "deep": {"n": BIG}},
    }));
    node.plugin(
        "pool",
        &json!({"ADD": {"result": {"cniVersion": "1.0.0", "ips": [{"address": "10.54.0.2/24"}]}}}),
    )
    .unwrap();
    node.start().unwrap();
    let x = Pod::new("x").unwrap();
    node.add(&x).success();
    node.check(&x).success();
    node.del(&x).success();
    let calls = node.take_calls().unwrap();
    assert_eq!(
        calls.iter().map(|call| call["env"]["CNI_COMMAND"].as_str().unwrap()).collect::<Vec<_>>(),
        ["ADD", "CHECK", "DEL"]
    );
    for call in &calls {
        let mut stdin = call["stdin"].clone();
        stdin.as_object_mut().unwrap().remove("prevResult");
        let given = json!({
            "cniVersion": "1.0.0", "name": "net", "type": "veth", "mtu": 1400, "own": [BIG],
            "ipam": {"type": "pool", "deep": {"n": BIG}},
        });
        assert_eq!(stdin, given);
        assert_eq!(call["env"]["CNI_IFNAME"], "net1");
    }
    Snapshot::take(&node, &[&x]).unwrap().assert_nothing_is_left();
}
