//! The number of comparisons that a change of pods costs. The result is compared with that of compiling from scratch.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::{Value, json};

use super::COMPARED;
use crate::npwg::{NetworkRef, STATUS_ANNOTATION};
use crate::objects::budget::{REQUIREMENTS, VALUES};
use crate::objects::labels::Labels;
use crate::objects::policy::POLICY_FOR_ANNOTATION;
use crate::objects::{ObjectName, Objects, Phase, Place, Pod};
use crate::policy::incremental::{Compiler, compile};
use crate::policy::index::Endpoint;
use crate::policy::options::Options;
use crate::source::read::policy;

/// A node with the pod `shop/web` on `shop/lan`.
struct Node {
    objects: Objects,
    endpoints: Vec<Endpoint>,
    compiler: Compiler,
}

impl Node {
    fn new() -> Self {
        let web = ObjectName::new("shop", "web");
        let endpoint = Endpoint {
            id: 1,
            pod: web.clone(),
            uid: None,
            at: Arc::new(BTreeSet::from([Place::Network(NetworkRef::new("shop", "lan"))])),
            addresses: vec!["10.0.0.1".parse().unwrap()],
            dhcp: None,
            ethertypes: Vec::new(),
        };
        let mut node =
            Self { objects: Objects::default(), endpoints: vec![endpoint], compiler: Compiler::default() };
        node.put(web, "web", BTreeMap::new());
        node
    }

    fn put(&mut self, name: ObjectName, role: &str, annotations: BTreeMap<String, String>) {
        let pod = Pod {
            name: name.clone(),
            uid: None,
            mirror_of: None,
            labels: Labels::from([("role".to_owned(), role.to_owned())]),
            annotations,
            phase: Phase::Running,
            host_network: false,
            ports: Vec::new(),
            powers: Default::default(),
            on_this_node: false,
            terminating: false,
        };
        self.objects.pods.insert(name, Arc::new(pod));
    }

    /// A pod that is not attached here, with an address on `shop/lan`.
    fn pod(&mut self, number: usize, role: &str) {
        let address = format!("10.0.{}.{}", 1 + number / 256, number % 256);
        let status = json!([{"name": "shop/lan", "ips": [address]}]).to_string();
        let annotations = BTreeMap::from([(STATUS_ANNOTATION.to_owned(), status)]);
        self.put(ObjectName::new("far", format!("p{number:04}")), role, annotations);
    }

    /// A policy of that namespace for `role: web`.
    fn policy(&mut self, namespace: &str, peers: &[Value]) {
        let spec = json!({
            "podSelector": {"matchLabels": {"role": "web"}},
            "policyTypes": ["Ingress"], "ingress": [{"from": peers}],
        });
        let annotations = BTreeMap::from([(POLICY_FOR_ANNOTATION.to_owned(), "shop/lan".to_owned())]);
        let policy = policy::read(ObjectName::new(namespace, "p"), &annotations, &spec).unwrap();
        self.objects.policies.insert(policy.name.object.clone(), Arc::new(policy));
    }

    /// Returns the number of comparisons needed for the same result as compiling from scratch.
    fn compared(&mut self) -> usize {
        let before = self.compiler.compared();
        let endpoints = self.endpoints.iter().map(|it| (it.id, Arc::new(it.clone()))).collect();
        let options = Options::default();
        let desired = self.compiler.update(&Arc::new(self.objects.clone()), &endpoints, &options);
        assert_eq!(desired, compile(&self.objects, &self.endpoints, &options));
        self.compiler.compared() - before
    }
}

/// Returns that many selectors, each for another role.
fn roles(number: usize) -> Vec<Value> {
    let role = |number: usize| json!({"matchLabels": {"role": number.to_string()}});
    (0..number).map(|number| json!({"namespaceSelector": {}, "podSelector": role(number)})).collect()
}

#[test]
fn a_pod_is_compared_once_with_each_selector_of_namespaces_that_have_attachments_here() {
    let mut node = Node::new();
    node.policy("shop", &[roles(100), roles(100)].concat());
    node.policy("hostile", &roles(1000));
    (0..50).for_each(|number| node.pod(number, "none"));
    assert_eq!(node.compared(), 0, "at the start all is compiled in any case");
    node.pod(50, "none");
    assert_eq!(node.compared(), 100);
    node.pod(50, "other");
    assert_eq!(node.compared(), 200, "what it was, and what it is");
    node.pod(50, "0");
    assert_eq!(node.compared(), 101, "it is found by the first");
    // A changed policy is compiled anyway.
    node.policy("shop", &roles(90));
    node.pod(51, "0");
    assert_eq!(node.compared(), 0);
    // New attachments make their policies subject to comparison.
    let name = ObjectName::new("hostile", "x");
    node.put(name.clone(), "none", BTreeMap::new());
    let more = vec!["10.0.0.2".parse().unwrap()];
    node.endpoints.push(Endpoint { id: 2, pod: name, addresses: more, ..node.endpoints[0].clone() });
    assert_eq!(node.compared(), 90 + 1000, "the new pod itself");
}

#[test]
fn a_selector_counts_with_its_weight() {
    const WEIGHT: usize = REQUIREMENTS * (1 + VALUES.ilog2() as usize);
    let values: Vec<String> = (0..VALUES).map(|value| value.to_string()).collect();
    let one = json!({"key": "role", "operator": "In", "values": values});
    let whole =
        json!({"podSelector": {"matchExpressions": vec![one; REQUIREMENTS]}, "namespaceSelector": {}});
    let mut node = Node::new();
    node.policy("shop", &[whole]);
    assert_eq!(node.compared(), 0);
    (0..COMPARED / WEIGHT + 50).for_each(|number| node.pod(number, "none"));
    assert_eq!(node.compared(), COMPARED / WEIGHT);
}

#[test]
fn a_policy_for_which_very_much_has_changed_is_compiled_without_comparing_all_of_it() {
    const SELECTORS: usize = 4000;
    let mut node = Node::new();
    node.policy("shop", &roles(SELECTORS));
    assert_eq!(node.compared(), 0);
    (0..COMPARED / SELECTORS + 50).for_each(|number| node.pod(number, "none"));
    assert_eq!(node.compared(), COMPARED);
    // The last of them is a peer.
    (0..COMPARED / SELECTORS + 50).for_each(|number| node.pod(number, "other"));
    node.pod(COMPARED / SELECTORS + 49, "7");
    assert_eq!(node.compared(), COMPARED);
}
