//! Policies at random, as their authors write them. Pure.

use serde_json::{Map, Value, json};

use super::network::{ALL, NETWORKS};
use super::random::Random;

/// Labels of pods; few, so that everything meets everything.
pub(super) fn labels(random: &mut Random) -> Map<String, Value> {
    let mut labels = Map::new();
    for (key, values) in [("app", ["a", "b", "c"]), ("tier", ["x", "y", "y"])] {
        if !random.chance(1, 5) {
            labels.insert(key.to_owned(), json!(random.of(values)));
        }
    }
    labels
}

/// A label of namespaces.
pub(super) fn namespace_labels(random: &mut Random) -> Map<String, Value> {
    let mut labels = Map::new();
    if !random.chance(1, 4) {
        labels.insert("team".to_owned(), json!(random.of(["1", "2"])));
    }
    labels
}

fn selector(random: &mut Random, keys: &[(&str, &[&str])]) -> Value {
    let Some((key, values)) = random.one(keys) else { return json!({}) };
    let value = random.one(values).unwrap_or_default();
    match random.below(7) {
        0 => json!({}),
        1..=3 => json!({"matchLabels": {key: value}}),
        4 => json!({"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]}),
        5 => json!({"matchExpressions": [{"key": key, "operator": "NotIn", "values": [value]}]}),
        _ => json!({"matchExpressions": [{"key": key, "operator": random.of(["Exists", "DoesNotExist"])}]}),
    }
}

fn pods(random: &mut Random) -> Value {
    selector(random, &[("app", &["a", "b", "c"]), ("tier", &["x", "y"])])
}

fn namespaces(random: &mut Random) -> Value {
    selector(random, &[("team", &["1", "2"]), ("kubernetes.io/metadata.name", &["red", "blue"])])
}

fn peer(random: &mut Random) -> Value {
    match random.below(6) {
        0 | 1 => json!({"podSelector": pods(random)}),
        2 => json!({"namespaceSelector": namespaces(random)}),
        3 => json!({"namespaceSelector": namespaces(random), "podSelector": pods(random)}),
        4 => {
            let cidr = random.of(["10.20.0.0/16", "10.21.0.0/24", "10.0.0.0/8", "fd21::/64", "0.0.0.0/0"]);
            json!({"ipBlock": {"cidr": cidr}})
        }
        _ => {
            let (cidr, except) = random.of([
                ("10.20.0.0/24", "10.20.0.0/29"),
                ("10.21.0.0/24", "10.21.0.8/29"),
                ("fd21::/64", "fd21::8/125"),
                ("10.0.0.0/8", "10.30.0.0/15"),
            ]);
            json!({"ipBlock": {"cidr": cidr, "except": [except]}})
        }
    }
}

fn port(random: &mut Random) -> Value {
    let protocol = random.of(["UDP", "UDP", "TCP"]);
    match random.below(6) {
        0 => json!({"protocol": protocol}),
        1 | 2 => json!({"protocol": protocol, "port": random.of([80, 81, 53])}),
        3 => json!({"protocol": protocol, "port": random.of([50, 80]), "endPort": random.of([80, 81])}),
        4 => json!({"protocol": protocol, "port": random.of(["web", "dns"])}),
        _ => json!({"port": 80}),
    }
}

fn rules(random: &mut Random, peers: &str) -> Vec<Value> {
    let number = random.of([0, 1, 1, 2]);
    let rule = |random: &mut Random| {
        let mut rule = json!({});
        if !random.chance(1, 6) {
            rule[peers] = (0..=random.below(2)).map(|_| peer(random)).collect();
        }
        if random.chance(1, 2) {
            rule["ports"] = (0..=random.below(2)).map(|_| port(random)).collect();
        }
        rule
    };
    (0..number).map(|_| rule(random)).collect()
}

/// A policy of a namespace, for some of the networks.
pub(super) fn policy(random: &mut Random, namespace: &str, name: &str) -> Value {
    let mut spec = json!({"podSelector": pods(random)});
    let (ingress, egress) = (rules(random, "from"), rules(random, "to"));
    match random.below(5) {
        0 => {}
        1 | 2 => spec["policyTypes"] = json!(["Ingress"]),
        3 => spec["policyTypes"] = json!(["Egress"]),
        _ => spec["policyTypes"] = json!(["Ingress", "Egress"]),
    }
    if !ingress.is_empty() {
        spec["ingress"] = Value::Array(ingress);
    }
    if !egress.is_empty() {
        spec["egress"] = Value::Array(egress);
    }
    let mut networks = Vec::new();
    for network in ALL {
        for node in 0..if network.spans_nodes() { 1 } else { 2 } {
            if random.chance(1, 2) {
                networks.push(format!("{NETWORKS}/{}", network.definition(node)));
            }
        }
    }
    let version = random.of(["v1beta1", "v1beta2"]);
    json!({
        "apiVersion": format!("k8s.cni.cncf.io/{version}"), "kind": "MultiNetworkPolicy",
        "metadata": {
            "namespace": namespace, "name": name,
            "annotations": {"k8s.v1.cni.cncf.io/policy-for": networks.join(",")}
        },
        "spec": spec
    })
}
