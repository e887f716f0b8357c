//! Problems of objects, shown in `status` and in the log before a pod suffers from them.

use netattach_tests::Node;
use netattach_tests::manifest::{NAMESPACE, namespace, network, network_policy, pod, policy};
use netattach_tests::node::DEFAULT_NETWORK;
use netattach_tests::traffic::{PATIENCE, eventually};
use serde_json::{Value, json};

/// Problems in `status`, by object; manifest files by their names.
fn rows(node: &Node) -> Vec<(String, String)> {
    let status = node.ctl(&["status"]).unwrap();
    let text = |row: &Value, key: &str| row[key].as_str().unwrap().to_owned();
    let row = |row: &Value| (text(row, "object"), text(row, "problem"));
    let mut rows: Vec<_> = status["source"].as_array().unwrap().iter().map(row).collect();
    rows.sort();
    rows
}

fn await_rows(node: &Node, expected: &[(&str, &str)]) {
    let expected: Vec<_> =
        expected.iter().map(|(object, problem)| ((*object).to_owned(), (*problem).to_owned())).collect();
    let mut found = Vec::new();
    assert!(
        eventually(PATIENCE, || {
            found = rows(node);
            found == expected
        }),
        "{found:#?} in place of {expected:#?}"
    );
}

const NO_NETWORK: (&str, &str) = (
    "multi-networkpolicy shop/lost",
    "is for network shop/lam, which is not defined: it selects nothing there",
);
const OFF: (&str, &str) = (
    "networkpolicies",
    "1 of networking.k8s.io are not enforced: networkPolicy is off, which is right only beside a primary network that enforces them itself",
);

#[test]
fn what_is_not_in_force_is_told_before_a_pod_suffers_from_it() {
    let isolate = json!({"podSelector": {}, "policyTypes": ["Ingress"]});
    let mut broken = network(NAMESPACE, "broken", &json!({}));
    broken["spec"]["config"] = json!("{");
    let subnet =
        json!({"cniVersion": "1.0.0", "type": "veth", "ipam": {"type": "host-local", "subnet": "10.1.0.0"}});
    let mut node = Node::new(&[]).unwrap();
    for (file, manifest) in [
        ("lost", policy("lost", "lam", &isolate)),
        ("network-policy", network_policy("web", &isolate)),
        ("broken", broken),
        ("subnet", network(NAMESPACE, "subnet", &subnet)),
    ] {
        node.write(file, &manifest).unwrap();
    }
    node.start().unwrap();
    let found = rows(&node);
    let objects: Vec<&str> = found.iter().map(|(object, _)| object.as_str()).collect();
    let (one, two) =
        ("network-attachment-definition shop/broken", "network-attachment-definition shop/subnet");
    assert_eq!(objects, [NO_NETWORK.0, one, two, OFF.0], "{found:#?}");
    assert_eq!((found[0].1.as_str(), found[3].1.as_str()), (NO_NETWORK.1, OFF.1));
    assert!(found[1].1.starts_with("network shop/broken: spec.config: "), "{found:#?}");
    assert!(found[2].1.contains("10.1.0.0"), "{found:#?}");
    // Fixed one after the other.
    node.remove("broken").unwrap();
    node.remove("subnet").unwrap();
    await_rows(&node, &[NO_NETWORK, OFF]);
    node.write(
        "lam",
        &network(NAMESPACE, "lam", &json!({"cniVersion": "1.0.0", "type": "bridge", "bridge": "br9"})),
    )
    .unwrap();
    await_rows(&node, &[OFF]);
    node.remove("network-policy").unwrap();
    await_rows(&node, &[]);
    let log = node.stop().unwrap();
    for object in objects {
        let told = log.lines().filter(|line| line.contains("not in force") && line.contains(object));
        assert_eq!(told.count(), 1, "{object}: {log}");
    }
}

/// Policies whose specification cannot be read, from the first time that their file is read.
#[test]
fn a_policy_that_cannot_be_read_is_told() {
    let mut node = Node::new(&[]).unwrap();
    node.write("odd", &policy("odd", "kube-system/default", &json!({"podSelector": 7}))).unwrap();
    node.start().unwrap();
    let found = rows(&node);
    assert_eq!(found.len(), 2, "{found:#?}");
    assert!(
        found[0].0.ends_with("source/odd.yaml") && found[0].1.contains("read spec of shop/odd"),
        "{found:#?}"
    );
    let isolates = "spec: cannot be read: every pod of the namespace is isolated";
    assert_eq!(found[1], ("multi-networkpolicy shop/odd".to_owned(), isolates.to_owned()));
    let log = node.stop().unwrap();
    assert!(log.contains("manifest not in force") && log.contains("not in force as written"), "{log}");
}

#[test]
fn what_is_on_disk_is_told_once_and_shown_while_it_lasts() {
    let mut node = Node::new(&[]).unwrap();
    let mut bare = network(NAMESPACE, "net", &json!({}));
    bare["spec"] = json!({});
    node.write("net", &bare).unwrap();
    let conf_dir = node.path("cni-conf");
    let file = |name: &str| conf_dir.join(name);
    let directory = conf_dir.display().to_string();
    let broken = file("00.conflist").display().to_string();
    node.start().unwrap();
    let none = format!(
        "network shop/net has no spec.config, and {directory}: no network configuration in the directory"
    );
    let definition = ("network-attachment-definition shop/net", none.as_str());
    await_rows(&node, &[definition]);
    std::fs::create_dir_all(file("")).unwrap();
    std::fs::write(
        file("10.conf"),
        json!({"cniVersion": "1.0.0", "name": "net", "type": "bridge"}).to_string(),
    )
    .unwrap();
    await_rows(&node, &[]);
    std::fs::write(file("00.conflist"), "{").unwrap();
    let problem = "parse network configuration: EOF while parsing an object at line 1 column 1";
    await_rows(&node, &[(&broken, problem)]);
    // By checks that have found it again.
    node.write("policy", &network_policy("web", &json!({"podSelector": {}}))).unwrap();
    await_rows(&node, &[(&broken, problem), OFF]);
    node.remove("policy").unwrap();
    std::fs::remove_file(file("10.conf")).unwrap();
    let unusable = format!(
        "network shop/net has no spec.config, and {directory}: no network configuration with name \"net\" (unusable files: 00.conflist)"
    );
    let definition_again = ("network-attachment-definition shop/net", unusable.as_str());
    await_rows(&node, &[(&broken, problem), definition_again]);
    let log = node.stop().unwrap();
    let told: Vec<&str> =
        log.lines().filter_map(|line| line.split_once(" WARN ")).map(|(_, told)| told).collect();
    let line = |(object, problem): (&str, &str)| {
        format!("netattach::agent::health: not in force object={object:?} problem={problem:?}")
    };
    let expected = [definition, (&broken, problem), OFF, definition_again].map(line);
    assert_eq!(told, expected, "{log}");
}

#[test]
fn namespaces_whose_labels_policies_ask_for_and_nobody_knows_are_told() {
    let from =
        json!([{"namespaceSelector": {"matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]}}]);
    let spec = json!({"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{"from": from}]});
    let mut node = Node::new(&[pod("a", &json!({}), &Value::Null)]).unwrap();
    node.write("web", &policy("web", DEFAULT_NETWORK, &spec)).unwrap();
    node.start().unwrap();
    let problem = "has no manifest, so its labels are not known: multi-networkpolicy shop/web selects namespaces by labels";
    await_rows(&node, &[("namespace shop", problem)]);
    node.write("namespace", &namespace(NAMESPACE, &json!({}))).unwrap();
    await_rows(&node, &[]);
    node.remove("namespace").unwrap();
    await_rows(&node, &[("namespace shop", problem)]);
    node.remove("web").unwrap();
    await_rows(&node, &[]);
    let log = node.stop().unwrap();
    assert_eq!(log.matches("not in force object=\"namespace shop\"").count(), 2, "{log}");
}
