//! Every pod's default network: how it is chosen, and which pods may choose which.

use std::fs;

use netattach_tests::manifest::{annotated, network, pod};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::{Node, Outcome, Pod};
use serde_json::{Value, json};

const CHOICE: &str = "v1.multus-cni.io/default-network";
const ALLOWED: &str = "netattach.dev/allowed-namespaces";

/// The configuration of a scripted plugin, with the capabilities that runtimes and pods may use.
fn scripted(plugin: &str) -> Value {
    json!({
        "cniVersion": "1.0.0", "type": plugin,
        "capabilities": {"portMappings": true, "bandwidth": true, "ips": true}
    })
}

/// A node whose default network is a scripted plugin that makes no interface, with that plugin as `other` as well.
fn node(manifests: &[Value]) -> Node {
    let node = Node::new(manifests).unwrap();
    for plugin in ["first", "other"] {
        node.plugin(plugin, &json!({"ADD": {"result": {"cniVersion": "1.0.0"}}})).unwrap();
    }
    node.write("default", &network("kube-system", "default", &scripted("first"))).unwrap();
    node.write("other", &network("kube-system", "other", &scripted("other"))).unwrap();
    node
}

fn plain(name: &str, networks: &Value) -> Value {
    pod(name, &json!({}), networks)
}

/// The plugins called for ADD, with the interface and their capability arguments.
fn added(node: &Node) -> Vec<(String, String, Value)> {
    let calls = node.take_calls().unwrap();
    let adds = calls.iter().filter(|call| call["env"]["CNI_COMMAND"] == "ADD");
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    adds.map(|call| {
        let config = &call["stdin"];
        (text(&config["type"]), text(&call["env"]["CNI_IFNAME"]), config["runtimeConfig"].clone())
    })
    .collect()
}

fn status(node: &Node, pod: &str) -> Value {
    let text = fs::read_to_string(node.path(&format!("run/network-status/shop/{pod}.json"))).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Rows: NPWG-6-always-default, NPWG-5.2-default-entry, NPWG-7.5-runtimeconfig-default-only.
#[test]
fn the_runtimes_wishes_reach_the_default_network_alone_which_is_in_the_status_without_any_interface() {
    let mut node = node(&[plain("a", &json!("kube-system/other")), plain("bare", &json!(null))]);
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    let wishes = json!({
        "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}],
        "bandwidth": {"ingressRate": 8000, "ingressBurst": 80000}
    });
    let mut config = node.cni_config("1.0.0");
    config["runtimeConfig"] = wishes.clone();
    assert_eq!(node.call("ADD", &a).stdin(&config).run().success(), json!({"cniVersion": "1.0.0"}));
    node.await_status(&a);
    let row = |plugin: &str, ifname: &str, wishes| (plugin.to_owned(), ifname.to_owned(), wishes);
    assert_eq!(added(&node), [row("first", "eth0", wishes), row("other", "net1", Value::Null)]);
    let entries = json!([
        {"name": "kube-system/default", "interface": "eth0", "default": true, "dns": {}},
        {"name": "kube-system/other", "interface": "net1", "default": false, "dns": {}}
    ]);
    assert_eq!(status(&node, "a"), entries);

    let bare = Pod::new("bare").unwrap();
    node.add(&bare).success();
    assert_eq!(added(&node), [row("first", "eth0", Value::Null)]);
    for pod in [&a, &bare] {
        node.del(pod).success();
    }
    Snapshot::take(&node, &[&a, &bare]).unwrap().assert_nothing_is_left();
}

/// A pod would be Ready with its port closed.
#[test]
fn a_host_port_that_nothing_opens_fails_the_pod_or_is_warned_of() {
    for setting in ["fail", "warn"] {
        let mut node = Node::new(&[plain("a", &json!(null)), plain("b", &json!(null))]).unwrap();
        node.set("unsupportedPortMappings", json!(setting));
        node.start().unwrap();
        let a = Pod::new("a").unwrap();
        let mut config = node.cni_config("1.0.0");
        let mapping = json!({"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": ""});
        config["runtimeConfig"] = json!({"portMappings": [mapping]});
        let outcome = node.call("ADD", &a).stdin(&config).run();
        let told = "hostPort 8080 asked for, but no plugin of network default declares the capability portMappings: \
                    nothing would open it (unsupportedPortMappings)";
        if setting == "fail" {
            let expected = format!("attach eth0 (kube-system/default): {told}");
            assert_eq!(outcome.failure(), (7, expected));
        } else {
            outcome.success();
            node.await_status(&a);
            assert_eq!(status(&node, "a")[0]["dev.netattach.warnings"], json!([told]));
        }
        // A pod without hostPorts, for which runtimes send an empty list.
        config["runtimeConfig"] = json!({"portMappings": []});
        let b = Pod::new("b").unwrap();
        node.call("ADD", &b).stdin(&config).run().success();
        for pod in [&a, &b] {
            node.del(pod).success();
        }
        Snapshot::take(&node, &[&a, &b]).unwrap().assert_nothing_is_left();
    }
}

/// Rows: NPWG-6-always-default.
#[test]
fn a_pod_chooses_its_default_network_in_either_form_and_asks_things_of_it() {
    let long = r#"[{"namespace": "kube-system", "name": "other", "interface": "eth0", "ips": ["10.1.2.3"]}]"#;
    let mut node = node(&[
        annotated(plain("short", &json!(null)), CHOICE, "other"),
        annotated(plain("long", &json!("kube-system/default")), CHOICE, long),
        annotated(plain("none", &json!(null)), CHOICE, ""),
        annotated(plain("two", &json!(null)), CHOICE, "other,default"),
        annotated(plain("renamed", &json!(null)), CHOICE, "other@eth7"),
        annotated(plain("mac", &json!(null)), CHOICE, r#"[{"name": "other", "mac": "02:00:00:00:00:01"}]"#),
    ]);
    node.start().unwrap();
    let row = |plugin: &str, ifname: &str, wishes| (plugin.to_owned(), ifname.to_owned(), wishes);
    let table = [
        ("short", vec![row("other", "eth0", Value::Null)]),
        ("long", vec![row("other", "eth0", json!({"ips": ["10.1.2.3"]})), row("first", "net1", Value::Null)]),
    ];
    for (name, expected) in table {
        let pod = Pod::new(name).unwrap();
        node.add(&pod).success();
        assert_eq!(added(&node), expected, "{name}");
        assert_eq!(status(&node, name)[0]["name"], "kube-system/other", "{name}");
        node.del(&pod).success();
    }
    let annotation = |pod: &str, problem: &str| format!("pod shop/{pod}: annotation {CHOICE}: {problem}");
    let table = [
        ("none", annotation("none", "one network is needed, not 0")),
        ("two", annotation("two", "one network is needed, not 2")),
        (
            "renamed",
            "attach eth0 (kube-system/other): key interface: \"eth7\", but the runtime names the default network's interface eth0".to_owned(),
        ),
        (
            "mac",
            "attach eth0 (kube-system/other): mac asked for, but no plugin of network other declares that capability".to_owned(),
        ),
    ];
    for (name, message) in table {
        assert_eq!(node.add(&Pod::new(name).unwrap()).failure(), (7, message));
    }
}

#[test]
fn the_nodes_default_network_may_be_a_file_a_directory_or_a_name() {
    let mut node = node(&[plain("a", &json!(null))]);
    for directory in ["conf", "cni-conf"] {
        fs::create_dir(node.path(directory)).unwrap();
    }
    let own = json!({"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "netattach"}]});
    let other = json!({"cniVersion": "1.0.0", "name": "on-disk", "plugins": [scripted("other")]});
    let first = json!({"cniVersion": "1.0.0", "name": "last", "type": "first"});
    fs::write(node.path("conf/00-netattach.conflist"), own.to_string()).unwrap();
    fs::write(node.path("conf/10-other.conflist"), other.to_string()).unwrap();
    fs::write(node.path("conf/20-first.conf"), first.to_string()).unwrap();
    fs::write(node.path("cni-conf/x.conflist"), other.to_string()).unwrap();
    let path = |file: &str| json!(node.path(file));
    let table = [
        (path("conf"), "on-disk"),
        (path("conf/20-first.conf"), "last"),
        (json!("other"), "kube-system/other"),
        (json!("on-disk"), "on-disk"),
    ];
    for (setting, name) in table {
        node.set("defaultNetwork", setting.clone());
        node.start().unwrap();
        let a = Pod::new("a").unwrap();
        node.add(&a).success();
        assert_eq!(status(&node, "a")[0]["name"], name, "{setting}");
        node.del(&a).success();
        node.stop().unwrap();
    }

    node.set("defaultNetwork", json!(node.path("conf/00-netattach.conflist")));
    node.start().unwrap();
    let itself =
        "the node's default network is not ready: network pods: plugin type netattach is netattach itself";
    assert_eq!(node.add(&Pod::new("a").unwrap()).failure(), (11, itself.to_owned()));
}

/// Rows: NPWG-7.4-restriction.
#[test]
fn a_namespace_that_may_not_use_a_network_gets_nothing_whichever_way_it_asks() {
    let secret = annotated(network("infra", "secret", &scripted("other")), ALLOWED, "infra,lab");
    let mut node = node(&[
        secret,
        network("shop", "own", &scripted("other")),
        network("default", "everyones", &scripted("other")),
        plain("own", &json!("own,default/everyones")),
        plain("system", &json!("kube-system/other")),
        annotated(plain("choice", &json!(null)), CHOICE, "kube-system/other"),
        plain("unlisted", &json!("infra/secret")),
        annotated(plain("unlisted-choice", &json!(null)), CHOICE, "infra/secret"),
    ]);
    node.set("namespaceIsolation", json!(true));
    node.start().unwrap();
    let own = Pod::new("own").unwrap();
    let before = Snapshot::take(&node, &[&own]).unwrap();
    node.add(&own).success();
    assert_eq!(added(&node).len(), 3);
    node.del(&own).success();
    node.take_calls().unwrap();
    assert_eq!(Snapshot::take(&node, &[&own]).unwrap(), before);

    let isolated = "namespace shop may not use network kube-system/other: namespaceIsolation is on, and kube-system is not among globalNamespaces";
    refused(&node, &["system", "choice"], isolated);
    node.stop().unwrap();

    node.set("namespaceIsolation", json!(false));
    node.start().unwrap();
    let unlisted = format!(
        "namespace shop may not use network infra/secret: its annotation {ALLOWED} does not allow it"
    );
    refused(&node, &["unlisted", "unlisted-choice"], &unlisted);
    let choice = Pod::new("choice").unwrap();
    node.add(&choice).success();
    node.del(&choice).success();
}

fn refused(node: &Node, pods: &[&str], message: &str) {
    for name in pods {
        let pod = Pod::new(name).unwrap();
        let before = Snapshot::take(node, &[&pod]).unwrap();
        assert_eq!(node.add(&pod).failure(), (7, message.to_owned()), "{name}");
        assert_eq!(node.take_calls().unwrap(), Vec::<Value>::new(), "{name}");
        assert_eq!(node.del(&pod), Outcome { exit: 0, json: Value::Null }, "{name}");
        assert_eq!(Snapshot::take(node, &[&pod]).unwrap(), before, "{name}");
    }
}
