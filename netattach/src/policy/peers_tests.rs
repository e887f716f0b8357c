//! Pods of other nodes as peers, and addresses that several pods claim: each step is compiled incrementally and from
//! scratch.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};

use super::{Known, Peers};
use crate::npwg::selection::PortProtocol;
use crate::npwg::{NetworkRef, STATUS_ANNOTATION};
use crate::objects::budget::{
    ADDRESSES_OF_REMOTE_POD, CLAIMANTS, Excess, OF_ADDRESS, PORTS_OF_REMOTE_POD, REQUIREMENTS, RULES,
    TRAFFIC, VALUES,
};
use crate::objects::interner::Interner;
use crate::objects::labels::tests::COMPARED;
use crate::objects::labels::{Labels, Selector};
use crate::objects::policy::{Direction, POLICY_FOR_ANNOTATION, Peer};
use crate::objects::remote::{ATTACHED_LABEL, BY_ANOTHER, RemotePod, Written};
use crate::objects::{ContainerPort, ObjectName, Objects, Phase, Place, Pod};
use crate::policy::desired::Desired;
use crate::policy::evaluate::evaluate;
use crate::policy::incremental::{Compiler, compile};
use crate::policy::index::Endpoint;
use crate::policy::options::Options;
use crate::source::read::policy;

/// This node, with the pod `shop/web` on `shop/lan`, which policies isolate.
struct Node {
    objects: Objects,
    endpoints: Vec<Endpoint>,
    compiler: Compiler,
    interner: Interner,
}

fn labels(role: &str) -> Labels {
    Labels::from([("role".to_owned(), role.to_owned())])
}

fn named(name: &str) -> ObjectName {
    let (namespace, name) = name.split_once('/').unwrap_or(("shop", name));
    ObjectName::new(namespace, name)
}

fn status(addresses: &[&str]) -> String {
    json!([{"name": "shop/lan", "ips": addresses}]).to_string()
}

/// A peer that selects this role.
fn role(role: &str) -> Value {
    json!({"podSelector": {"matchLabels": {"role": role}}})
}

impl Node {
    /// Returns a node whose web server admits these peers.
    fn admitting(from: Value) -> Self {
        let mut node = Self::with(json!({"policyTypes": ["Ingress"], "ingress": [{"from": from}]}));
        node.attach("web", "web", &["10.0.0.1"]);
        node
    }

    fn with(mut spec: Value) -> Self {
        let mut node = Self {
            objects: Objects::default(),
            endpoints: Vec::new(),
            compiler: Compiler::default(),
            interner: Interner::default(),
        };
        spec["podSelector"] = json!({"matchLabels": {"role": "web"}});
        node.policy("lan", &spec);
        node
    }

    fn policy(&mut self, networks: &str, spec: &Value) {
        let annotations = BTreeMap::from([(POLICY_FOR_ANNOTATION.to_owned(), networks.to_owned())]);
        let policy = policy::read(named("p"), &annotations, spec).unwrap();
        self.objects.policies.insert(named("p"), policy.into());
    }

    /// A pod of this node with the uid `u1`.
    fn pod(&mut self, name: &str, role: &str) -> &mut Pod {
        let pod = Pod {
            name: named(name),
            uid: Some("u1".to_owned()),
            mirror_of: None,
            terminating: false,
            labels: labels(role),
            annotations: BTreeMap::new(),
            phase: Phase::Running,
            host_network: false,
            ports: Vec::new(),
            powers: Default::default(),
            on_this_node: true,
        };
        Arc::make_mut(self.objects.pods.entry(named(name)).insert_entry(pod.into()).into_mut())
    }

    fn attach(&mut self, name: &str, role: &str, addresses: &[&str]) {
        self.attach_to("lan", name, role, addresses);
    }

    fn attach_to(&mut self, network: &str, name: &str, role: &str, addresses: &[&str]) {
        self.pod(name, role);
        self.endpoints.push(Endpoint {
            id: u32::try_from(self.endpoints.len()).unwrap() + 1,
            pod: named(name),
            uid: None,
            at: Arc::new(BTreeSet::from([Place::Network(NetworkRef::new("shop", network))])),
            addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
            dhcp: None,
            ethertypes: Vec::new(),
        });
    }

    /// A pod of another node.
    fn remote(&mut self, name: &str, uid: &str, role: &str, addresses: &[&str]) {
        self.written(name, uid, role, &status(addresses), None);
    }

    fn written(&mut self, name: &str, uid: &str, role: &str, status: &str, ports: Option<&str>) {
        let written =
            Written { uid: Some(uid), labels: labels(role), status: Some(status), ports, beyond: None };
        let pod = RemotePod::read(&named(name), written, &mut self.interner);
        self.objects.remote_pods.insert(pod.into()).unwrap();
    }

    fn gone(&mut self, name: &str) {
        assert!(self.objects.remote_pods.remove(&named(name)).is_some(), "{name} was there");
    }

    fn compile(&mut self) -> Desired {
        let endpoints =
            self.endpoints.iter().map(|endpoint| (endpoint.id, Arc::new(endpoint.clone()))).collect();
        let options = Options::default();
        let desired = self.compiler.update(&Arc::new(self.objects.clone()), &endpoints, &options);
        assert_eq!(desired, compile(&self.objects, &self.endpoints, &options), "compiled anew");
        desired
    }

    /// Returns those of some addresses that may connect to the web server.
    fn admitted(&mut self) -> Vec<&'static str> {
        self.admitted_at(1)
    }

    /// The same for one of its attachments.
    fn admitted_at(&mut self, attachment: u32) -> Vec<&'static str> {
        let desired = self.compile();
        let tables = desired.endpoints[&attachment].ingress.clone().unwrap();
        let candidates = ["10.0.0.2", "10.0.0.3", "10.0.0.4", "10.1.0.2", "fd00::2"];
        let is_admitted = |address: &&str| evaluate(&tables, address.parse().unwrap(), 6, Some(80)).is_some();
        candidates.into_iter().filter(is_admitted).collect()
    }

    fn conditions(&mut self) -> Vec<String> {
        let conditions = self.compile().conditions;
        conditions.iter().map(|it| format!("{} {}", it.object, it.message)).collect()
    }
}

#[test]
fn pods_of_other_nodes_are_peers_as_long_as_they_are_there() {
    let mut node = Node::admitting(json!([role("client")]));
    assert_eq!(node.admitted(), [""; 0]);
    let two = json!([
        {"name": "shop/lan", "ips": ["10.0.0.2", "fd00::2"]},
        {"name": "shop/wan", "ips": ["10.1.0.2"]},
    ]);
    node.written("a", "u2", "client", &two.to_string(), None);
    node.remote("other/a", "u3", "client", &["10.0.0.4"]);
    assert_eq!(node.admitted(), ["10.0.0.2", "fd00::2"], "of the policy's network and namespace");
    node.remote("a", "u2", "client", &["10.0.0.3"]);
    assert_eq!(node.admitted(), ["10.0.0.3"], "it moves");
    node.remote("a", "u2", "stranger", &["10.0.0.3"]);
    assert_eq!(node.admitted(), [""; 0], "it is relabelled");
    node.remote("a", "u2", "client", &["10.0.0.3"]);
    node.remote("b", "u4", "client", &["10.0.0.2"]);
    assert_eq!(node.admitted(), ["10.0.0.2", "10.0.0.3"]);
    node.gone("a");
    assert_eq!(node.admitted(), ["10.0.0.2"], "it ends");
    node.remote("c", "u5", "stranger", &["10.0.0.3"]);
    assert_eq!(node.admitted(), ["10.0.0.2"], "another pod has its address since");
    assert_eq!(node.conditions(), [""; 0]);

    let selector = json!({"namespaceSelector": {"matchLabels": {"team": "b"}}});
    let mut node = Node::admitting(json!([selector]));
    node.remote("other/a", "u2", "any", &["10.0.0.2"]);
    assert_eq!(node.admitted(), [""; 0]);
    let team = |team: &str| Labels::from([("team".to_owned(), team.to_owned())]);
    node.objects.namespaces.insert("other".to_owned(), team("b"));
    assert_eq!(node.admitted(), ["10.0.0.2"]);
    node.objects.namespaces.insert("other".to_owned(), team("c"));
    assert_eq!(node.admitted(), [""; 0]);
}

#[test]
fn an_address_that_several_claim_is_allowed_if_all_are() {
    let mut node = Node::admitting(json!([role("client")]));
    node.remote("a", "u2", "client", &["10.0.0.2", "10.0.0.4"]);
    node.remote("b", "u3", "client", &["10.0.0.2", "10.0.0.3"]);
    assert_eq!(node.admitted(), ["10.0.0.2", "10.0.0.3", "10.0.0.4"]);
    // In a namespace that no policy is about.
    node.remote("other/forged", "u4", "client", &["10.0.0.2", "10.0.0.4"]);
    assert_eq!(node.admitted(), ["10.0.0.3"]);
    assert_eq!(
        node.conditions(),
        [
            "multi-networkpolicy shop/p address 10.0.0.2 (and 1 more like it) is claimed by pods that no peer of the \
             rule selects as well: it is not allowed"
        ]
    );
    node.remote("other/forged", "u4", "client", &["10.0.0.4"]);
    assert_eq!(node.admitted(), ["10.0.0.2", "10.0.0.3"]);
    node.remote("b", "u3", "stranger", &["10.0.0.2", "10.0.0.3"]);
    assert_eq!(node.admitted(), [""; 0]);
    node.gone("b");
    node.gone("other/forged");
    assert_eq!(node.admitted(), ["10.0.0.2", "10.0.0.4"]);
    // Claims on other networks are addresses of other hosts.
    let elsewhere = json!([{"name": "other/lan", "ips": ["10.0.0.2"]}]).to_string();
    node.written("other/forged", "u4", "client", &elsewhere, None);
    assert_eq!(node.admitted(), ["10.0.0.2", "10.0.0.4"]);

    // All peers of a rule together; another rule, and a block, allow independently.
    let block = json!({"ipBlock": {"cidr": "10.0.0.3/32"}});
    let mut node = Node::admitting(json!([role("client"), role("batch"), block]));
    node.remote("a", "u2", "client", &["10.0.0.2", "10.0.0.3"]);
    node.remote("b", "u3", "batch", &["10.0.0.2"]);
    node.remote("c", "u4", "stranger", &["10.0.0.3"]);
    assert_eq!(node.admitted(), ["10.0.0.2", "10.0.0.3"]);
}

#[test]
fn nobody_else_has_the_addresses_of_this_nodes_attachments() {
    let mut node = Node::admitting(json!([role("client")]));
    node.attach("mine", "stranger", &["10.0.0.2"]);
    node.attach("friend", "client", &["10.0.0.3"]);
    node.remote("a", "u2", "client", &["10.0.0.2", "10.0.0.4"]);
    node.remote("b", "u3", "stranger", &["10.0.0.3"]);
    assert_eq!(node.admitted(), ["10.0.0.3", "10.0.0.4"]);
    assert_eq!(
        node.conditions(),
        [
            "multi-networkpolicy shop/p address 10.0.0.2 is claimed by pods that no peer of the rule selects as well: \
             it is not allowed",
            "pod shop/a claims address 10.0.0.2 of shop/lan, which pod shop/mine has on this node (and 1 more like \
             it): the claim is ignored here"
        ]
    );
    // A pod that has ended keeps its addresses until it is detached, but is no peer.
    node.pod("friend", "client").phase = Phase::Succeeded;
    node.remote("b", "u3", "client", &["10.0.0.3"]);
    assert_eq!(node.admitted(), ["10.0.0.4"]);
    // The same for attachments whose pod is not known.
    node.objects.pods.remove(&named("mine"));
    assert_eq!(node.admitted(), ["10.0.0.4"]);
    node.endpoints.retain(|endpoint| endpoint.pod == named("web"));
    assert_eq!(node.admitted(), ["10.0.0.2", "10.0.0.3", "10.0.0.4"]);
    // The status that this node's agent has written says nothing, with attachments or without.
    let labels = |of: &str| {
        let mut labels = labels("client");
        labels.insert(ATTACHED_LABEL.to_owned(), of.to_owned());
        labels
    };
    let former = node.pod("former", "client");
    former.annotations = BTreeMap::from([(STATUS_ANNOTATION.to_owned(), status(&["10.1.0.2"]))]);
    former.labels = labels("");
    assert_eq!(node.admitted(), ["10.0.0.2", "10.0.0.3", "10.0.0.4"]);
    node.objects.pods.remove(&named("former"));
    node.pod("manifest", "client").annotations =
        BTreeMap::from([(STATUS_ANNOTATION.to_owned(), status(&["10.1.0.2"]))]);
    Arc::make_mut(node.objects.pods.get_mut(&named("manifest")).unwrap()).on_this_node = false;
    assert_eq!(node.admitted(), ["10.0.0.2", "10.0.0.3", "10.0.0.4", "10.1.0.2"]);
}

#[test]
fn a_pod_of_this_node_that_another_plugin_has_attached_has_the_addresses_of_its_status() {
    let mut node = Node::admitting(json!([role("client")]));
    let by_another = |node: &mut Node, name: &str, role: &str, addresses: &[&str]| {
        node.pod(name, role).annotations =
            BTreeMap::from([(STATUS_ANNOTATION.to_owned(), status(addresses))]);
    };
    by_another(&mut node, "old", "client", &["10.0.0.2", "10.0.0.3"]);
    assert_eq!(node.admitted(), ["10.0.0.2", "10.0.0.3"]);
    let label = (ATTACHED_LABEL.to_owned(), BY_ANOTHER.to_owned());
    Arc::make_mut(node.objects.pods.get_mut(&named("old")).unwrap()).labels.extend([label]);
    assert_eq!(node.admitted(), ["10.0.0.2", "10.0.0.3"], "agents label it for other nodes");
    // An attachment keeps its address, and two pods that claim one have to be selected both.
    node.attach("mine", "stranger", &["10.0.0.2"]);
    assert_eq!(node.admitted(), ["10.0.0.3"]);
    by_another(&mut node, "other", "stranger", &["10.0.0.3", "10.0.0.4"]);
    assert_eq!(node.admitted(), [""; 0]);
    node.objects.pods.remove(&named("other"));
    assert_eq!(node.admitted(), ["10.0.0.3"]);
    // It is never the address of an attachment: netattach has attached the pod since.
    node.attach("old", "client", &["10.0.0.4"]);
    node.pod("old", "client").annotations =
        BTreeMap::from([(STATUS_ANNOTATION.to_owned(), status(&["10.0.0.3"]))]);
    assert_eq!(node.admitted(), ["10.0.0.4"]);
    node.endpoints.retain(|endpoint| endpoint.pod != named("old"));
    node.pod("old", "client").phase = Phase::Succeeded;
    by_another(&mut node, "garbled", "client", &[]);
    node.pod("garbled", "client").annotations =
        BTreeMap::from([(STATUS_ANNOTATION.to_owned(), "[".to_owned())]);
    assert_eq!(node.admitted(), [""; 0]);
    let conditions = node.conditions();
    assert_eq!(conditions.len(), 1, "{conditions:?}");
    let expected = "pod shop/garbled is no policy's peer: read network-status annotation: ";
    assert!(conditions[0].starts_with(expected), "{conditions:?}");
}

#[test]
fn two_pods_of_one_name_are_one_pod_or_none() {
    let mut node = Node::admitting(json!([role("client")]));
    node.attach("a", "client", &["10.0.0.2"]);
    node.remote("a", "u1", "client", &["10.0.0.2", "10.0.0.3"]);
    assert_eq!(node.admitted(), ["10.0.0.2"], "the pod of this node counts");
    // Created again on another node.
    node.remote("a", "u2", "client", &["10.0.0.3"]);
    node.remote("b", "u3", "client", &["10.0.0.3", "10.0.0.4"]);
    assert_eq!(node.admitted(), ["10.0.0.4"], "nor anybody by an address that one of the two has");
    node.objects.pods.remove(&named("a"));
    assert_eq!(node.admitted(), ["10.0.0.3", "10.0.0.4"], "its attachments are still there");
    node.endpoints.retain(|endpoint| endpoint.pod == named("web"));
    node.remote("a", "u2", "client", &["10.0.0.2"]);
    assert_eq!(node.admitted(), ["10.0.0.2", "10.0.0.3", "10.0.0.4"]);
    // And on this node again.
    node.attach("a", "client", &["10.1.0.2"]);
    assert_eq!(node.admitted(), ["10.0.0.3", "10.0.0.4"]);
    node.gone("a");
    assert_eq!(node.admitted(), ["10.0.0.3", "10.0.0.4", "10.1.0.2"]);
}

#[test]
fn one_that_cannot_be_read_is_no_peer_and_keeps_what_it_claims() {
    let mut node = Node::admitting(json!([role("client")]));
    node.written("a", "u2", "client", &status(&["10.0.0.2"]), Some("["));
    node.written("b", "u3", "client", "[", None);
    node.remote("c", "u4", "client", &["10.0.0.2", "10.0.0.3"]);
    assert_eq!(node.admitted(), ["10.0.0.3"]);
    let conditions = node.conditions();
    for (condition, expected) in conditions.iter().zip([
        "multi-networkpolicy shop/p address 10.0.0.2 is claimed by",
        "pod shop/a is no policy's peer: read annotation netattach.dev/ports: ",
        "pod shop/b is no policy's peer: read network-status annotation: EOF",
    ]) {
        assert!(condition.starts_with(expected), "{condition}");
    }
    assert_eq!(conditions.len(), 3);
    node.remote("a", "u2", "client", &["10.0.0.2"]);
    node.gone("b");
    assert_eq!((node.admitted(), node.conditions()), (vec!["10.0.0.2", "10.0.0.3"], vec![]));
}

#[test]
fn an_address_that_too_many_claim_is_nobodys() {
    let mut node = Node::admitting(json!([role("client")]));
    for number in 0..CLAIMANTS {
        node.remote(&format!("p{number}"), "u2", "client", &["10.0.0.2"]);
    }
    assert_eq!(node.admitted(), ["10.0.0.2"]);
    node.remote("more", "u2", "client", &["10.0.0.2"]);
    assert_eq!(node.admitted(), [""; 0]);
    node.remote("even-more", "u2", "client", &["10.0.0.2"]);
    assert_eq!(node.admitted(), [""; 0]);
    node.gone("p7");
    node.gone("p8");
    assert_eq!(node.admitted(), ["10.0.0.2"]);
}

/// The web server on `lan` (attachment 1) and `wan` (2), under one policy for both.
fn on_two_networks(mut spec: Value) -> Node {
    let mut node = Node::with(json!({}));
    spec["podSelector"] = json!({"matchLabels": {"role": "web"}});
    node.policy("lan, wan", &spec);
    node.attach("web", "web", &["10.0.0.1"]);
    node.attach_to("wan", "web", "web", &["10.1.0.1"]);
    node
}

fn on(network: &str, addresses: &[&str]) -> String {
    json!([{"name": format!("shop/{network}"), "ips": addresses}]).to_string()
}

#[test]
fn with_several_networks_an_address_is_whose_it_is_on_the_attachments_own() {
    let rule = json!({"from": [role("client")]});
    let mut node = on_two_networks(json!({"policyTypes": ["Ingress"], "ingress": [rule]}));
    let admitted = |node: &mut Node| [1, 2].map(|attachment| node.admitted_at(attachment));
    node.written("a", "u2", "client", &on("wan", &["10.0.0.2", "10.0.0.3"]), None);
    assert_eq!(
        admitted(&mut node),
        [["10.0.0.2", "10.0.0.3"]; 2],
        "nobody has them on lan: they may be routed"
    );
    node.written("b", "u3", "stranger", &on("lan", &["10.0.0.2"]), None);
    assert_eq!(admitted(&mut node), [vec!["10.0.0.3"], vec!["10.0.0.2", "10.0.0.3"]]);
    assert_eq!(node.conditions(), [""; 0], "two networks with one range are nothing odd");
    node.written("b", "u3", "client", &on("lan", &["10.0.0.2"]), None);
    assert_eq!(admitted(&mut node), [["10.0.0.2", "10.0.0.3"]; 2]);
    node.written("a", "u2", "stranger", &on("wan", &["10.0.0.2", "10.0.0.3"]), None);
    assert_eq!(admitted(&mut node), [vec!["10.0.0.2"], vec![]]);
    node.gone("b");
    assert_eq!(admitted(&mut node), [[""; 0]; 2]);
    // A claim to an address of an attachment of this node, for the other network.
    node.attach("mine", "stranger", &["10.0.0.4"]);
    node.written("a", "u2", "client", &on("wan", &["10.0.0.4"]), None);
    assert_eq!(admitted(&mut node), [vec![], vec!["10.0.0.4"]]);
    // A pod that has ended keeps its addresses until it is detached, although they allow no peer.
    node.pod("mine", "client").phase = Phase::Succeeded;
    assert_eq!(admitted(&mut node), [vec![], vec!["10.0.0.4"]]);
    node.endpoints.retain(|endpoint| endpoint.pod == named("web"));
    assert_eq!(admitted(&mut node), [["10.0.0.4"]; 2]);
    // For other networks, all peers count together.
    node.policy(
        "lan, wan, dmz",
        &json!({
            "podSelector": {"matchLabels": {"role": "web"}},
            "policyTypes": ["Ingress"], "ingress": [rule],
        }),
    );
    node.written("c", "u4", "stranger", &on("dmz", &["10.0.0.4"]), None);
    assert_eq!(admitted(&mut node), [vec![], vec!["10.0.0.4"]]);
    assert_eq!(
        node.conditions(),
        [
            "multi-networkpolicy shop/p address 10.0.0.4 is claimed by pods that no peer of the rule selects as well: it is \
             not allowed"
        ]
    );
    node.written("c", "u4", "client", &on("dmz", &["10.0.0.4"]), None);
    assert_eq!(admitted(&mut node), [["10.0.0.4"]; 2]);
    node.gone("a");
    assert_eq!(admitted(&mut node), [["10.0.0.4"]; 2]);
    assert_eq!(node.conditions(), [""; 0]);
}

#[test]
fn with_several_networks_a_name_of_a_port_means_what_it_does_on_the_attachments_own() {
    let rule = json!({"to": [role("db")], "ports": [{"port": "sql"}]});
    let mut node = on_two_networks(json!({"policyTypes": ["Egress"], "egress": [rule]}));
    let open = |node: &mut Node| {
        let desired = node.compile();
        [1, 2].map(|attachment| {
            let tables = desired.endpoints[&attachment].egress.clone().unwrap();
            let is_open =
                |port: &u16| evaluate(&tables, "10.0.0.2".parse().unwrap(), 6, Some(*port)).is_some();
            (1..9).filter(is_open).collect::<Vec<u16>>()
        })
    };
    node.written("a", "u2", "db", &on("lan", &["10.0.0.2"]), Some(r#"{"TCP/sql":[1,2]}"#));
    assert_eq!(open(&mut node), [[1, 2], [1, 2]]);
    node.written("b", "u3", "db", &on("wan", &["10.0.0.2"]), Some(r#"{"TCP/sql":[2,3]}"#));
    assert_eq!(open(&mut node), [[1, 2], [2, 3]]);
    node.written("b", "u3", "other", &on("wan", &["10.0.0.2"]), Some(r#"{"TCP/sql":[2,3]}"#));
    assert_eq!(open(&mut node), [vec![1, 2], vec![]]);
    node.gone("a");
    assert_eq!(open(&mut node), [[0; 0], [0; 0]]);
}

#[test]
fn a_port_is_named_by_all_who_have_the_address() {
    let peers = json!([role("db"), {"ipBlock": {"cidr": "10.0.0.4/32"}}]);
    let mut node = Node::with(json!({
        "policyTypes": ["Egress"],
        "egress": [{"to": peers, "ports": [{"port": "sql"}]}],
    }));
    node.attach("web", "web", &["10.0.0.1"]);
    let open = |node: &mut Node| -> Vec<String> {
        let tables = node.compile().endpoints[&1].egress.clone().unwrap();
        let mut open = Vec::new();
        for address in ["10.0.0.2", "10.0.0.3", "10.0.0.4"] {
            let is_open = |port: &u16| evaluate(&tables, address.parse().unwrap(), 6, Some(*port)).is_some();
            open.extend((1..9).filter(is_open).map(|port| format!("{address}:{port}")));
        }
        open
    };
    node.written("a", "u2", "db", &status(&["10.0.0.2"]), Some(r#"{"TCP/sql":[1,2],"UDP/sql":[3]}"#));
    node.written("b", "u3", "db", &status(&["10.0.0.3"]), None);
    node.written("c", "u4", "any", &status(&["10.0.0.4"]), Some(r#"{"TCP/sql":[5]}"#));
    assert_eq!(open(&mut node), ["10.0.0.2:1", "10.0.0.2:2", "10.0.0.4:5"]);
    node.written("d", "u5", "db", &status(&["10.0.0.2", "10.0.0.3"]), Some(r#"{"TCP/sql":[2,4]}"#));
    assert_eq!(open(&mut node), ["10.0.0.2:2", "10.0.0.4:5"]);
    node.written("e", "u6", "any", &status(&["10.0.0.4"]), None);
    assert_eq!(open(&mut node), ["10.0.0.2:2"]);
    node.gone("a");
    node.gone("b");
    node.gone("e");
    assert_eq!(open(&mut node), ["10.0.0.2:2", "10.0.0.2:4", "10.0.0.3:2", "10.0.0.3:4", "10.0.0.4:5"]);
    // On this node, its containers are read.
    node.attach("mine", "db", &["10.0.0.3"]);
    let port = ContainerPort { name: Some("sql".to_owned()), protocol: PortProtocol::Tcp, port: 7 };
    node.pod("mine", "db").ports = vec![port];
    assert_eq!(open(&mut node), ["10.0.0.2:2", "10.0.0.2:4", "10.0.0.3:7", "10.0.0.4:5"]);
}

/// Tells whether port 7 of an address is open for the first attachment in that direction, and what is told of policies.
fn of_named_ports(node: &mut Node, direction: Direction, address: &str) -> (bool, Vec<String>) {
    let desired = node.compile();
    let endpoint = &desired.endpoints[&1];
    let tables = match direction {
        Direction::Ingress => endpoint.ingress.clone().unwrap(),
        Direction::Egress => endpoint.egress.clone().unwrap(),
    };
    let conditions = desired.conditions.iter().map(|it| format!("{} {}", it.object, it.message)).collect();
    (evaluate(&tables, address.parse().unwrap(), 6, Some(7)).is_some(), conditions)
}

/// What is told of the policy if it leads to too many ports.
fn too_many_ports(direction: Direction) -> Vec<String> {
    let of = "together with the other policies of the pods that it selects: these are isolated for";
    vec![format!("multi-networkpolicy shop/p {} {of} {direction}", Excess::Traffic)]
}

/// A pod with many addresses and many numbers under one name: each rule that names it leads to all of them.
#[test]
fn numbers_that_peers_declare_under_a_name_are_counted_for_each_address_and_rule() {
    const OF_RULE: usize = ADDRESSES_OF_REMOTE_POD * PORTS_OF_REMOTE_POD * OF_ADDRESS;
    let rules = |number: usize| {
        let rule = json!({"to": [role("db")], "ports": [{"port": "sql"}]});
        json!({
            "podSelector": {"matchLabels": {"role": "web"}},
            "policyTypes": ["Egress"], "egress": vec![rule; number],
        })
    };
    let mut node = Node::with(rules(1));
    node.attach("web", "web", &["10.0.0.1"]);
    let addresses: Vec<String> = (0..ADDRESSES_OF_REMOTE_POD).map(|it| format!("10.0.1.{it}")).collect();
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    let numbers: Vec<usize> = (1..=PORTS_OF_REMOTE_POD).collect();
    node.written("db", "u2", "db", &status(&addresses), Some(&json!({"TCP/sql": numbers}).to_string()));
    for (number, expected) in [
        (TRAFFIC / OF_RULE, (true, Vec::new())),
        (TRAFFIC / OF_RULE + 1, (false, too_many_ports(Direction::Egress))),
    ] {
        node.policy("lan", &rules(number));
        assert_eq!(of_named_ports(&mut node, Direction::Egress, "10.0.1.9"), expected, "{number} rules");
    }
    // With fewer of them it is in force again.
    node.written("db", "u2", "db", &status(&addresses), Some(r#"{"TCP/sql":[7,8]}"#));
    assert_eq!(of_named_ports(&mut node, Direction::Egress, "10.0.1.9"), (true, Vec::new()));
}

/// The same for the numbers that the selected pod declares itself. Ranges fit, as many as a policy may have.
#[test]
fn numbers_that_a_pod_declares_under_a_name_are_counted_for_each_rule() {
    const NUMBERS: u16 = 256;
    let rules = |number: usize| {
        let rules = vec![json!({"ports": [{"port": "sql"}]}); number];
        json!({
            "podSelector": {"matchLabels": {"role": "web"}},
            "policyTypes": ["Ingress"], "ingress": rules,
        })
    };
    let ranges = |number: usize| {
        // No range has more blocks of ports.
        let range = json!({"protocol": "TCP", "port": 1, "endPort": 65_534});
        json!({
            "podSelector": {"matchLabels": {"role": "web"}},
            "policyTypes": ["Ingress"], "ingress": vec![json!({"ports": [range]}); number],
        })
    };
    let mut node = Node::with(rules(1));
    node.attach("web", "web", &["10.0.0.1"]);
    let port = |port| ContainerPort { name: Some("sql".to_owned()), protocol: PortProtocol::Tcp, port };
    node.pod("web", "web").ports = (1..=NUMBERS).map(port).collect();
    let named = TRAFFIC / usize::from(NUMBERS);
    for (spec, expected) in [
        (rules(named), (true, Vec::new())),
        (rules(named + 1), (false, too_many_ports(Direction::Ingress))),
        (ranges(RULES), (true, Vec::new())),
    ] {
        node.policy("lan", &spec);
        assert_eq!(of_named_ports(&mut node, Direction::Ingress, "10.0.0.2"), expected);
    }
}

/// Prints the memory of 20,000 pods of other nodes, and how long a change of one takes with 200 policies.
#[test]
fn a_pod_of_another_node_takes_at_most_300_bytes_and_a_change_is_fast() {
    const ALONE: &str = "NETATTACH_TEST_ALONE";
    const PODS: usize = 20_000;
    const ROLES: usize = 200;
    if env::var_os(ALONE).is_none() {
        // In a separate process no memory of other tests is counted.
        let (_, module) = module_path!().split_once("::").unwrap();
        let name = format!("{module}::a_pod_of_another_node_takes_at_most_300_bytes_and_a_change_is_fast");
        let mut alone = Command::new(env::current_exe().unwrap());
        let output = alone.args(["--exact", &name, "--nocapture"]).env(ALONE, "1").output().unwrap();
        let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        eprint!("{err}");
        assert!(out.contains("1 passed"), "{out}");
        return;
    }
    let allocated = || {
        // SAFETY: may be called at any time by any thread; returns numbers.
        let counted = unsafe { libc::mallinfo2() };
        counted.uordblks + counted.hblkhd
    };
    let mut node = Node::admitting(json!([role("r0")]));
    node.compile();
    let uid = |number: usize| format!("0f8fad5b-d9cb-469f-a165-{number:012x}");
    let put = |node: &mut Node, number: usize, host: usize| {
        let (app, number) = (number % ROLES, number / ROLES);
        let addresses = [
            format!("10.{}.{}.{}", host >> 16, host >> 8 & 255, host & 255),
            format!("fd00::{:x}:{:x}", host >> 16, host & 0xffff),
        ];
        let name = format!("deployment-{app}-7d9f8b6c5d-{number:05x}");
        let addresses = addresses.each_ref().map(String::as_str);
        node.remote(&name, &uid(host), &format!("r{app}"), &addresses);
    };
    let before = allocated();
    for number in 0..PODS {
        put(&mut node, number, 256 + number);
    }
    let in_the_map = (allocated() - before) / PODS;
    let endpoints = node.endpoints.iter().map(|it| (it.id, Arc::new(it.clone()))).collect();
    let began = Instant::now();
    let update = |node: &mut Node| {
        node.compiler.update(&Arc::new(node.objects.clone()), &endpoints, &Options::default())
    };
    drop(update(&mut node));
    let all = (allocated() - before) / PODS;
    eprintln!("a pod: {in_the_map} bytes in the map, {all} with the index and one policy");
    eprintln!("compiled for the first time in {:?}", began.elapsed());
    for number in 0..ROLES {
        let spec = json!({
            "podSelector": {"matchLabels": {"role": "web"}},
            "policyTypes": ["Ingress"], "ingress": [{"from": [role(&format!("r{number}"))]}],
        });
        let annotations = BTreeMap::from([(POLICY_FOR_ANNOTATION.to_owned(), "lan".to_owned())]);
        let name = named(&format!("p{number}"));
        let policy = policy::read(name.clone(), &annotations, &spec).unwrap();
        node.objects.policies.insert(name, policy.into());
    }
    drop(update(&mut node));
    for (what, number, host) in [("moves", 7, 70_000), ("that nobody selects moves", 8, 70_001)] {
        if number == 8 {
            node.objects.policies.remove(&named("p8"));
            drop(update(&mut node));
        }
        put(&mut node, number, host);
        let began = Instant::now();
        let desired = update(&mut node);
        eprintln!("a pod {what}, 200 policies over one attachment: {:?}", began.elapsed());
        let tables = desired.endpoints[&1].ingress.clone().unwrap();
        let address = format!("10.{}.{}.{}", host >> 16, host >> 8 & 255, host & 255);
        let is_allowed = evaluate(&tables, address.parse().unwrap(), 6, Some(80)).is_some();
        assert_eq!(is_allowed, number == 7, "{address}: {:?}", desired.conditions);
    }
    assert!(all <= 300, "{all} bytes");
}

/// The largest selector, which selects pods with labels of their own: the work counted is the work done.
#[test]
fn a_selector_is_compared_no_more_than_is_counted() {
    const KINDS: usize = 2000;
    let values: Vec<String> = (0..VALUES).map(|value| value.to_string()).collect();
    let nobody = json!({"key": "role", "operator": "NotIn", "values": values});
    let everybody = json!({"matchExpressions": vec![nobody; REQUIREMENTS]});
    let mut node = Node::admitting(json!([{"namespaceSelector": {}, "podSelector": everybody}]));
    for number in 0..KINDS {
        let address = format!("10.1.{}.{}", number / 256, number % 256);
        node.remote(&format!("p{number}"), &format!("u{number}"), &format!("r{number}"), &[address.as_str()]);
    }
    let endpoints = node.endpoints.iter().map(|it| (it.id, Arc::new(it.clone()))).collect();
    let before = COMPARED.get();
    let desired = node.compiler.update(&Arc::new(node.objects.clone()), &endpoints, &Options::default());
    let (compared, counted) = (COMPARED.get() - before, node.compiler.spent());
    assert!(compared >= KINDS * REQUIREMENTS && compared <= counted, "{compared}, counted {counted}");
    let tables = desired.endpoints[&1].ingress.clone().unwrap();
    assert!(evaluate(&tables, "10.1.7.7".parse().unwrap(), 6, Some(80)).is_some());
}

/// Going over pods ends once it has taken what is left.
#[test]
fn a_selector_ends_where_nothing_is_left() {
    let mut node = Node::admitting(json!([{"podSelector": {}}]));
    let names: Vec<ObjectName> = (0..10).map(|number| named(&format!("p{number}"))).collect();
    for (number, name) in names.iter().enumerate() {
        let address = format!("10.1.0.{number}");
        node.remote(&name.name, &format!("u{number}"), &format!("r{number}"), &[address.as_str()]);
    }
    let mut peers = Peers::default();
    for name in &names {
        let known = Known::of(name, &node.objects, std::iter::empty());
        peers.replace(name, &Known::default(), &known, &node.objects);
    }
    assert_eq!((peers.len(), peers.charged()), (1, 11), "a namespace, and the labels of ten pods");
    let policy = &node.objects.policies[&named("p")];
    let places = BTreeSet::from([Place::Network(NetworkRef::new("shop", "lan"))]);
    let peer = Peer::Pods { namespaces: None, pods: Selector::default() };
    // What is left, the comparisons that are counted, and the addresses that are looked at.
    for (most, compared, looked_at) in [(0, 2, 0), (7, 10, 2), (1000, 50, 10)] {
        let mut number = 0;
        let counted = peers.claims_of(policy, &peer, &places, most, |_, _| {
            number += 1;
            3
        });
        assert_eq!((counted, number), (compared, looked_at), "{most}");
    }
}

/// A pod was replaced by another of its name, and its sandbox is still attached: its address does not belong to the
/// successor.
#[test]
fn an_address_of_an_earlier_pod_of_the_name_is_nobodys() {
    let mut node = Node::admitting(json!([role("client")]));
    node.attach("other", "client", &["10.0.0.2"]);
    node.endpoints[1].uid = Some("u1".to_owned());
    assert_eq!(node.admitted(), ["10.0.0.2"]);
    node.endpoints[1].uid = Some("u0".to_owned());
    assert_eq!(node.admitted(), [""; 0]);
    assert_eq!(node.compile().undecided, BTreeSet::from([2]), "its own policies stay as they are");
    // The address does not belong to a pod of another node that claims it either.
    node.remote("far", "u2", "client", &["10.0.0.2"]);
    assert_eq!(node.admitted(), [""; 0]);
    node.attach("other", "client", &["10.0.0.3"]);
    node.endpoints[2].uid = Some("u1".to_owned());
    assert_eq!(node.admitted(), ["10.0.0.3"]);
    node.endpoints.remove(1);
    assert_eq!(node.admitted(), ["10.0.0.2", "10.0.0.3"]);
}
