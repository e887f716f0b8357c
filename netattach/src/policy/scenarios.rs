//! Whole scenarios between pods: the public MultiNetworkPolicy suite and the cases of the Kubernetes suite for
//! NetworkPolicy, both sides of every connection judged by the tables that each has been compiled.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use serde_json::{Value, json};

use super::desired::{Desired, EndpointPolicy};
use super::evaluate::evaluate;
use super::incremental::compile;
use super::index::{Dhcp, Endpoint};
use super::lookup::{CompiledPolicy, Origin};
use super::options::{CommonRules, Options};
use crate::npwg::NetworkRef;
use crate::npwg::selection::PortProtocol;
use crate::objects::Place;
use crate::objects::access::Restrictions;
use crate::objects::labels::Labels;
use crate::objects::policy::Direction;
use crate::objects::policy::POLICY_FOR_ANNOTATION;
use crate::objects::{ContainerPort, ObjectName, Objects, Phase, Pod};
use crate::source::read::policy;

const NAMESPACES: [&str; 3] = ["x", "y", "z"];
const PODS: [&str; 4] = ["a", "b", "c", "server"];

/// Namespaces `x`, `y` and `z`, each with the pods `a`, `b`, `c` and `server`, all on the network `infra/lan`.
struct Cluster {
    objects: Objects,
    endpoints: Vec<Endpoint>,
}

impl Cluster {
    fn new(policies: &[(&str, Value)]) -> Self {
        let mut cluster = Self { objects: Objects::default(), endpoints: Vec::new() };
        for (x, namespace) in (1..).zip(NAMESPACES) {
            cluster.objects.namespaces.insert(namespace.to_owned(), labels("ns", namespace));
            for (y, name) in (1..).zip(PODS) {
                let pod = ObjectName::new(namespace, name);
                cluster.endpoints.push(Endpoint {
                    id: x * 10 + y,
                    pod: pod.clone(),
                    uid: None,
                    at: Arc::new(BTreeSet::from([
                        Place::Network(NetworkRef::new("infra", "lan")),
                        Place::Default,
                    ])),
                    addresses: [format!("10.0.{x}.{y}"), format!("fd00::{x}:{y}")]
                        .map(|address| address.parse().unwrap())
                        .into(),
                    dhcp: None,
                    ethertypes: Vec::new(),
                });
                cluster.objects.pods.insert(pod.clone(), self::pod(pod).into());
            }
        }
        for (namespace, policy) in policies {
            cluster.apply(namespace, policy);
        }
        cluster
    }

    /// Adds a policy under the next name.
    fn apply(&mut self, namespace: &str, policy: &Value) -> ObjectName {
        let name = ObjectName::new(namespace, format!("p{}", self.objects.policies.len()));
        self.replace(&name, policy);
        name
    }

    fn replace(&mut self, name: &ObjectName, spec: &Value) {
        let annotations = BTreeMap::from([(POLICY_FOR_ANNOTATION.to_owned(), "infra/lan".to_owned())]);
        let policy = policy::read(name.clone(), &annotations, spec).unwrap();
        self.objects.policies.insert(name.clone(), policy.into());
    }

    fn compile(&self) -> Desired {
        self.compile_with(&Options::default())
    }

    fn compile_with(&self, options: &Options) -> Desired {
        compile(&self.objects, &self.endpoints, options)
    }

    fn endpoint(&self, name: &str) -> &Endpoint {
        let name = name.split_once('/').unwrap_or(("x", name));
        let is_named = |pod: &ObjectName| (pod.namespace.as_str(), pod.name.as_str()) == name;
        self.endpoints.iter().find(|endpoint| is_named(&endpoint.pod)).unwrap()
    }

    /// Whether both sides let `a>y/b tcp/80`, or `icmp/-`, pass, in both families alike; pods without a namespace are
    /// of `x`.
    fn passes(&self, desired: &Desired, probe: &str) -> bool {
        let (pods, traffic) = probe.split_once(' ').unwrap_or((probe, "tcp/5555"));
        let (from, to) = pods.split_once('>').unwrap();
        let (from, to) = (self.endpoint(from), self.endpoint(to));
        let (protocol, port) = traffic.split_once('/').unwrap();
        let protocol = PortProtocol::from_name(protocol).map_or(1, PortProtocol::number);
        let verdicts: [bool; 2] = [0, 1].map(|family| {
            let allows = |policy: &Option<_>, peer: IpAddr| {
                let Some(policy) = policy else { return true };
                let policy: &std::sync::Arc<super::lookup::CompiledPolicy> = policy;
                evaluate(policy, peer, protocol, port.parse().ok()).is_some()
            };
            allows(&desired.endpoints[&from.id].egress, to.addresses[family])
                && allows(&desired.endpoints[&to.id].ingress, from.addresses[family])
        });
        assert_eq!(verdicts[0], verdicts[1], "{probe}: both families");
        verdicts[0]
    }

    #[track_caller]
    fn check(&self, passing: &[&str], dropped: &[&str]) {
        let desired = self.compile();
        for (probes, expected) in [(passing, true), (dropped, false)] {
            for probe in probes {
                assert_eq!(self.passes(&desired, probe), expected, "{probe}");
            }
        }
    }

    /// The pods that any policy's state belongs to.
    fn isolated(&self) -> Vec<String> {
        let desired = self.compile();
        let is_isolated = |endpoint: &&Endpoint| {
            let policies = &desired.endpoints[&endpoint.id];
            policies.ingress.is_some() || policies.egress.is_some()
        };
        self.endpoints.iter().filter(is_isolated).map(|endpoint| endpoint.pod.to_string()).collect()
    }
}

/// Every pod declares `web` (TCP 80), `dns` (UDP 81) and `sig` (SCTP 82), on `server` one higher each.
fn pod(name: ObjectName) -> Pod {
    let more = u16::from(name.name == "server");
    let port = |(name, protocol, port): (&str, PortProtocol, u16)| ContainerPort {
        name: Some(name.to_owned()),
        protocol,
        port: port + more,
    };
    let ports =
        [("web", PortProtocol::Tcp, 80), ("dns", PortProtocol::Udp, 90), ("sig", PortProtocol::Sctp, 100)];
    Pod {
        uid: None,
        mirror_of: None,
        labels: labels("pod", &name.name),
        annotations: BTreeMap::new(),
        phase: Phase::Running,
        host_network: false,
        ports: ports.map(port).into(),
        powers: Default::default(),
        on_this_node: false,
        terminating: false,
        name,
    }
}

fn labels(key: &str, value: &str) -> Labels {
    Labels::from([(key.to_owned(), value.to_owned())])
}

/// A selector of the pods of these names, and of the namespaces of these.
fn pods(names: &[&str]) -> Value {
    json!({"matchExpressions": [{"key": "pod", "operator": "In", "values": names}]})
}

fn namespaces(names: &[&str]) -> Value {
    json!({"matchExpressions": [{"key": "ns", "operator": "In", "values": names}]})
}

/// A policy on the server of its namespace.
fn server(mut spec: Value) -> Value {
    spec["podSelector"] = pods(&["server"]);
    spec
}

fn from(peers: Value) -> Value {
    server(json!({"policyTypes": ["Ingress"], "ingress": [{"from": peers}]}))
}

fn to(peers: Value) -> Value {
    server(json!({"policyTypes": ["Egress"], "egress": [{"to": peers}]}))
}

/// The pod's addresses as blocks.
fn blocks(last: u8) -> Value {
    json!([{"ipBlock": {"cidr": format!("10.0.1.{last}/32")}}, {"ipBlock": {"cidr": format!("fd00::1:{last}/128")}}])
}

fn both(one: Value, other: Value) -> Value {
    let mut items = one.as_array().unwrap().clone();
    items.extend(other.as_array().unwrap().clone());
    Value::Array(items)
}

/// Rows: E05, E06, E07, E08, C47.
#[test]
fn a_namespace_that_nobody_is_in_lets_nobody_in() {
    let cluster = Cluster::new(&[("x", from(json!([{"namespaceSelector": namespaces(&["nobody"])}])))]);
    cluster.check(&["server>a", "server>y/b"], &["a>server", "y/b>server"]);
}

/// Rows: E09, E10, E11, E12, E13, E14, E15, E16, E17, E18, E19.
#[test]
fn blocks_add_up_within_a_rule_in_two_rules_and_in_two_policies() {
    let (a, b) = (blocks(1), blocks(2));
    let list = server(json!({"policyTypes": ["Ingress"], "ingress": [{"from": a}, {"from": b}]}));
    for policies in [
        vec![("x", from(both(a.clone(), b.clone())))],
        vec![("x", list)],
        vec![("x", from(a)), ("x", from(b))],
    ] {
        let cluster = Cluster::new(&policies);
        cluster.check(&["a>server", "b>server"], &["c>server"]);
        assert_eq!(cluster.isolated(), ["x/server"]);
    }
}

/// Rows: E20, E21, E22, E23.
#[test]
fn port_ranges_differ_by_direction() {
    let spec = json!({
        "podSelector": pods(&["a"]),
        "policyTypes": ["Ingress", "Egress"],
        "egress": [{"ports": [{"port": 5000, "endPort": 5900}]}],
        "ingress": [{"ports": [{"port": 6000, "endPort": 6900}]}],
    });
    Cluster::new(&[("x", spec)]).check(&["a>b tcp/5555", "b>a tcp/6666"], &["a>b tcp/6666", "b>a tcp/5555"]);
}

/// Rows: E24, E25, E26, E27, V1-any-port-of-protocol.
#[test]
fn a_protocol_without_a_port_is_all_of_its_ports_and_no_other_protocol() {
    let spec = json!({
        "podSelector": pods(&["a"]),
        "policyTypes": ["Ingress", "Egress"],
        "egress": [{"ports": [{"protocol": "TCP"}]}],
        "ingress": [{"ports": [{"protocol": "UDP"}]}],
    });
    Cluster::new(&[("x", spec)])
        .check(&["a>b tcp/5555", "b>a udp/6666", "b>a udp/1"], &["a>b udp/6666", "b>a tcp/5555"]);
}

/// Rows: E28, E29, E30, E31, E32, E34, E35, E36, E37, E38, E39, C24.
#[test]
fn egress_rules_alone_isolate_egress_alone() {
    let rule = |name: &str| json!({"to": [{"podSelector": pods(&[name])}]});
    let one = Cluster::new(&[("x", server(json!({"egress": [rule("a")]})))]);
    one.check(&["a>server", "b>server", "server>a"], &["server>b"]);
    assert_eq!(one.isolated(), ["x/server"]);
    let list = Cluster::new(&[("x", server(json!({"egress": [rule("a"), rule("c")]})))]);
    list.check(&["a>server", "b>server", "c>server", "server>a", "server>c"], &["server>b"]);
}

/// Every probe is made in both families.
///
/// Rows: E40, E41, E42, E43, E45, E46, E47, E48, E49, E50.
/// Rows: E51, E52, E53, E54, E56, E57, E58, E59, E60, E61, C23.
#[test]
fn ingress_rules_alone_isolate_ingress_alone() {
    let rule = |name: &str| json!({"from": [{"podSelector": pods(&[name])}]});
    let one = Cluster::new(&[("x", server(json!({"ingress": [rule("a")]})))]);
    one.check(&["a>server", "server>a", "server>b"], &["b>server"]);
    assert_eq!(one.isolated(), ["x/server"]);
    let list = Cluster::new(&[("x", server(json!({"ingress": [rule("a"), rule("c")]})))]);
    list.check(&["a>server", "c>server", "server>a", "server>b", "server>c"], &["b>server"]);
}

/// Rows: E62, E63, E64, E65, C29, V1-stacked-overlapping.
#[test]
fn policies_on_one_pod_add_up_in_any_order() {
    let (a, b) = (from(json!([{"podSelector": pods(&["a"])}])), from(json!([{"podSelector": pods(&["b"])}])));
    for policies in [[("x", a.clone()), ("x", b.clone())], [("x", b), ("x", a)]] {
        let cluster = Cluster::new(&policies);
        cluster.check(&["a>server", "b>server"], &["c>server"]);
        assert_eq!(cluster.isolated(), ["x/server"]);
    }
}

/// Rows: V1-default-deny-ingress, V1-default-deny-all, V1-deny-egress-namespace, C26, C27.
#[test]
fn a_policy_without_rules_denies_the_directions_it_lists() {
    let deny = |types: Value| [("x", json!({"podSelector": {}, "policyTypes": types}))];
    Cluster::new(&deny(json!(["Ingress"]))).check(&["a>y/a", "y/a>y/b"], &["a>b", "y/a>a"]);
    Cluster::new(&deny(json!(["Egress"]))).check(&["y/a>a"], &["a>b", "a>y/a"]);
    Cluster::new(&deny(json!(["Ingress", "Egress"]))).check(&["y/a>z/a"], &["a>b", "a>y/a", "y/a>a"]);
}

/// Rows: V1-allow-within-namespace, V1-allow-ingress-for-target, V1-allow-all-namespaces, V1-allow-one-namespace.
/// Rows: V1-pod-match-expressions, V1-namespace-match-expressions, V1-pod-or-namespace, V1-pod-and-namespace.
/// Rows: V1-multiple-selectors, V1-any-pod-selectors, V1-pod-in-other-namespace, V1-deny-other-namespaces.
/// Rows: V1-allow-all, C42.
#[test]
fn ingress_is_for_the_pods_that_selectors_mean() {
    let team = |name: &str| json!({"matchLabels": {"ns": name}});
    let label = |name: &str| json!({"matchLabels": {"pod": name}});
    let not = |key: &str, value: &str| json!({"matchExpressions": [{"key": key, "operator": "NotIn", "values": [value]}]});
    type Case<'a> = (&'a str, Value, &'a [&'a str], &'a [&'a str]);
    let cases: Vec<Case<'_>> = vec![
        (
            "within the namespace",
            json!([{"podSelector": label("b")}]),
            &["b>server"],
            &["a>server", "y/b>server"],
        ),
        ("other namespaces are denied", json!([{"podSelector": {}}]), &["a>server"], &["y/a>server"]),
        (
            "all namespaces",
            json!([{"namespaceSelector": {}}]),
            &["a>server", "y/a>server", "z/c>server"],
            &[],
        ),
        (
            "one namespace",
            json!([{"namespaceSelector": team("y")}]),
            &["y/a>server"],
            &["a>server", "z/a>server"],
        ),
        (
            "expressions on pods",
            json!([{"podSelector": not("pod", "b")}]),
            &["a>server"],
            &["b>server", "y/a>server"],
        ),
        (
            "expressions on namespaces",
            json!([{"namespaceSelector": not("ns", "y")}]),
            &["a>server", "z/a>server"],
            &["y/a>server"],
        ),
        (
            "a pod or a namespace",
            json!([{"namespaceSelector": team("y")}, {"podSelector": label("b")}]),
            &["y/a>server", "b>server"],
            &["a>server", "z/b>server"],
        ),
        (
            "a pod of a namespace",
            json!([{"namespaceSelector": team("y"), "podSelector": label("a")}]),
            &["y/a>server"],
            &["y/b>server", "a>server"],
        ),
        (
            "pods of namespaces",
            json!([{"namespaceSelector": namespaces(&["y", "z"]), "podSelector": pods(&["b", "c"])}]),
            &["y/b>server", "z/c>server"],
            &["y/a>server", "b>server"],
        ),
        (
            "any of several pods",
            json!([{"podSelector": label("b")}, {"podSelector": label("c")}]),
            &["b>server", "c>server"],
            &["a>server"],
        ),
        ("everyone", json!([]), &["a>server", "y/a>server"], &[]),
    ];
    for (_what, peers, passing, dropped) in cases {
        let cluster = Cluster::new(&[("x", from(peers))]);
        cluster.check(passing, dropped);
        cluster.check(&["server>a", "a>b", "y/a>a"], &[]);
    }
}

/// Rows: V1-ports, V1-named-port, V1-namespace-and-named-port, V1-egress-named-port, C68, C71.
#[test]
fn ports_are_of_the_pod_that_is_called() {
    let ports = |ports: Value| server(json!({"policyTypes": ["Ingress"], "ingress": [{"ports": ports}]}));
    Cluster::new(&[("x", ports(json!([{"port": 81}])))])
        .check(&["a>server tcp/81"], &["a>server tcp/80", "a>server udp/81"]);
    let named =
        json!([{"port": "web"}, {"port": "dns", "protocol": "UDP"}, {"port": "sig", "protocol": "SCTP"}]);
    Cluster::new(&[("x", ports(named))]).check(
        &["a>server tcp/81", "y/a>server udp/91", "a>server sctp/101"],
        &["a>server tcp/80", "a>server udp/81", "a>server sctp/81"],
    );
    let of_namespace =
        json!({"from": [{"namespaceSelector": namespaces(&["y"])}], "ports": [{"port": "web"}]});
    Cluster::new(&[("x", server(json!({"policyTypes": ["Ingress"], "ingress": [of_namespace]})))])
        .check(&["y/a>server tcp/81"], &["a>server tcp/81", "y/a>server tcp/80"]);
    let egress = json!({"podSelector": pods(&["a"]), "policyTypes": ["Egress"], "egress": [{"ports": [{"port": "web"}]}]});
    Cluster::new(&[("x", egress)]).check(
        &["a>server tcp/81", "a>b tcp/80", "a>y/server tcp/81"],
        &["a>server tcp/80", "a>b tcp/81", "a>b udp/80"],
    );
}

/// Rows: V1-updated-policy, V1-updated-namespace-labels, V1-updated-pod-labels, V1-ends-after-deletion, C31, C51.
#[test]
fn changes_of_policies_and_labels_are_followed() {
    let mut cluster = Cluster::new(&[]);
    let of_z = json!([{"namespaceSelector": namespaces(&["z"]), "podSelector": pods(&["a"])}]);
    let name = cluster.apply("x", &from(of_z));
    cluster.check(&["z/a>server"], &["y/a>server", "z/b>server"]);

    cluster.objects.namespaces.insert("z".to_owned(), labels("ns", "other"));
    cluster.objects.namespaces.insert("y".to_owned(), labels("ns", "z"));
    cluster.check(&["y/a>server"], &["z/a>server", "y/b>server"]);

    let mut relabel = |pod: &str, label: &str| {
        let pod = cluster.objects.pods.get_mut(&ObjectName::new("y", pod)).unwrap();
        std::sync::Arc::make_mut(pod).labels = labels("pod", label);
    };
    relabel("b", "a");
    relabel("a", "b");
    cluster.check(&["y/b>server"], &["y/a>server"]);

    let gone = cluster.endpoint("y/b").clone();
    cluster.endpoints.retain(|endpoint| *endpoint != gone);
    cluster.objects.pods.remove(&gone.pod);
    cluster.objects.pods.insert(ObjectName::new("y", "heir"), pod(ObjectName::new("y", "heir")).into());
    cluster.endpoints.push(Endpoint { pod: ObjectName::new("y", "heir"), ..gone });
    cluster.check(&[], &["y/heir>server"]);

    cluster.replace(&name, &from(json!([{"podSelector": pods(&["a"])}])));
    cluster.check(&["a>server"], &["b>server", "y/heir>server"]);

    cluster.objects.policies.clear();
    cluster.check(&["a>server", "b>server", "y/heir>server"], &[]);
    assert_eq!(cluster.isolated(), Vec::<String>::new());
}

/// Rows: V1-deny-egress-by-pod, V1-ingress-and-egress, V1-client-egress-denied, V1-egress-other-namespace.
/// Rows: V1-independent-directions, C30.
#[test]
fn both_sides_and_both_directions_have_their_say() {
    Cluster::new(&[("x", to(json!([{"podSelector": pods(&["a"])}])))])
        .check(&["server>a", "b>server"], &["server>b", "server>y/a"]);
    let other = json!([{"namespaceSelector": namespaces(&["y"]), "podSelector": pods(&["a"])}]);
    Cluster::new(&[("x", to(other))]).check(&["server>y/a"], &["server>y/b", "server>a"]);
    let spec = server(json!({
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [{"podSelector": pods(&["a"])}]}],
        "egress": [{"to": [{"podSelector": pods(&["b"])}]}],
    }));
    Cluster::new(&[("x", spec)]).check(&["a>server", "server>b"], &["b>server", "server>a"]);
    // The server allows every peer; a client's own policy prevents its connections.
    let silent = json!({"podSelector": pods(&["a"]), "policyTypes": ["Egress"]});
    Cluster::new(&[("x", from(json!([]))), ("x", silent)]).check(&["b>server", "server>a"], &["a>server"]);
}

/// Rows: V1-ingress-allow-all-wins, V1-egress-allow-all-wins.
#[test]
fn among_policies_the_one_that_allows_all_wins() {
    for direction in ["Ingress", "Egress"] {
        let key = direction.to_lowercase();
        let rules = |rules: Value| server(json!({"policyTypes": [direction], &key: rules}));
        let some = rules(json!([{"ports": [{"port": 81}]}]));
        let probe = if direction == "Ingress" { "a>server tcp/7" } else { "server>a tcp/7" };
        Cluster::new(&[("x", some.clone())]).check(&[], &[probe]);
        Cluster::new(&[("x", some), ("x", rules(json!([{}])))]).check(&[probe], &[]);
    }
}

/// Rows: V1-egress-cidr, V1-except-clause, V1-cidr-and-except, C54.
#[test]
fn an_exception_holds_within_its_block_only() {
    let block = |v4: &str, v6: &str, cut: &[&str; 2]| json!([{"ipBlock": {"cidr": v4, "except": [cut[0]]}}, {"ipBlock": {"cidr": v6, "except": [cut[1]]}}]);
    let all = block("10.0.1.0/24", "fd00::1:0/112", &["10.0.1.2/32", "fd00::1:2/128"]);
    Cluster::new(&[("x", to(all.clone()))]).check(&["server>a", "server>c"], &["server>b", "server>y/a"]);
    Cluster::new(&[("x", to(all)), ("x", to(blocks(2)))]).check(&["server>a", "server>b"], &["server>y/a"]);
}

/// Rows: V1-sctp-is-not-tcp, V1-sctp-isolates, V1-udp-is-not-tcp, C72.
#[test]
fn protocols_are_not_each_other() {
    for (allowed, others) in [("SCTP", ["tcp", "udp"]), ("UDP", ["tcp", "sctp"])] {
        let rule = json!({"ports": [{"protocol": allowed, "port": 80}]});
        let cluster = Cluster::new(&[("x", server(json!({"policyTypes": ["Ingress"], "ingress": [rule]})))]);
        let passing = format!("a>server {}/80", allowed.to_lowercase());
        let dropped = others.map(|other| format!("a>server {other}/80"));
        cluster.check(&[&passing], &[&dropped[0], &dropped[1]]);
    }
}

fn options(network_policy: bool) -> Options {
    Options { network_policy, node: BTreeSet::from(["192.0.2.1".parse().unwrap()]), ..Options::default() }
}

/// Rows: C16.
#[test]
fn network_policies_hold_on_the_default_network_where_they_are_switched_on() {
    let name = ObjectName::new("x", "p0");
    // The same name as that of a MultiNetworkPolicy, which adds to it.
    let mut cluster = Cluster::new(&[("x", from(json!([{"podSelector": pods(&["b"])}])))]);
    let spec = json!({"podSelector": pods(&["server"]), "egress": [{"to": [{"podSelector": pods(&["a"])}]}]});
    let policy = policy::read_network_policy(name.clone(), &spec).unwrap();
    assert_eq!(policy.problems, []);
    cluster.objects.network_policies.insert(name, policy.into());
    let verdicts = |options: &Options| {
        let desired = cluster.compile_with(options);
        ["a>server", "b>server", "server>a", "server>b", "y/a>y/server"]
            .map(|probe| cluster.passes(&desired, probe))
    };
    assert_eq!(verdicts(&options(false)), [false, true, true, true, true]);
    // Without `policyTypes` a NetworkPolicy isolates ingress too, whatever the setting for the other kind.
    assert_eq!(verdicts(&options(true)), [false, true, true, false, true]);
    cluster.objects.policies.clear();
    let desired = cluster.compile_with(&options(true));
    assert!(!cluster.passes(&desired, "b>server"));
    let EndpointPolicy { ingress, policies, .. } = &*desired.endpoints[&cluster.endpoint("server").id];
    assert_eq!(policies.iter().map(ToString::to_string).collect::<Vec<_>>(), ["networkpolicy x/p0"]);
    let from_node = |port| evaluate(ingress.as_ref().unwrap(), "192.0.2.1".parse().unwrap(), 6, Some(port));
    assert_eq!(from_node(10250), Some(1), "the node reaches its pods");

    for endpoint in &mut cluster.endpoints {
        Arc::make_mut(&mut endpoint.at).remove(&Place::Default);
    }
    let desired = cluster.compile_with(&options(true));
    assert!(cluster.passes(&desired, "b>server"), "other networks are not what it is about");

    // A second attachment to the nodes' default network leads to the same pods, and its address is no peer.
    let default_network = Some(NetworkRef::new("infra", "lan"));
    let restrictions = Restrictions { default_network, ..Restrictions::default() };
    let desired = cluster.compile_with(&Options { restrictions, ..options(true) });
    let verdicts = ["b>server", "server>a", "server>b", "a>b", "y/a>y/server"]
        .map(|probe| cluster.passes(&desired, probe));
    assert_eq!(verdicts, [false, false, false, true, true]);
}

/// Rows: SVC-node-ports.
#[test]
fn a_node_that_may_lead_elsewhere_is_not_excepted_from_what_its_pods_may_send() {
    let name = ObjectName::new("x", "p0");
    let mut cluster = Cluster::new(&[]);
    let spec = json!({"podSelector": pods(&["server"]), "policyTypes": ["Ingress", "Egress"]});
    let policy = policy::read_network_policy(name.clone(), &spec).unwrap();
    cluster.objects.network_policies.insert(name, policy.into());
    let with_node = |node_may_lead_elsewhere| {
        let desired = cluster.compile_with(&Options { node_may_lead_elsewhere, ..options(true) });
        let EndpointPolicy { ingress, egress, .. } = &*desired.endpoints[&cluster.endpoint("server").id];
        [ingress, egress].map(|policy| {
            evaluate(policy.as_ref().unwrap(), "192.0.2.1".parse().unwrap(), 6, Some(30080)).is_some()
        })
    };
    assert_eq!(with_node(false), [true, true]);
    assert_eq!(with_node(true), [true, false]);
}

/// Traffic that a policy allows does not depend on the node's exception, which applies where the node judges again.
///
/// Rows: SVC-node-ports.
#[test]
fn the_node_is_excepted_from_egress_where_it_judges_again_and_beside_what_policies_allow() {
    let name = ObjectName::new("x", "p0");
    let mut cluster = Cluster::new(&[]);
    let block = json!([{"ipBlock": {"cidr": "192.0.2.0/24"}}]);
    let spec = json!({
        "podSelector": pods(&["server"]), "policyTypes": ["Ingress", "Egress"],
        "egress": [{"to": block, "ports": [{"port": 443}]}]
    });
    let policy = policy::read_network_policy(name.clone(), &spec).unwrap();
    cluster.objects.network_policies.insert(name, policy.into());
    let desired = cluster.compile_with(&options(true));
    let EndpointPolicy { ingress, egress, .. } = &*desired.endpoints[&cluster.endpoint("server").id];
    let [ingress, egress] = [ingress, egress].map(|policy| policy.as_ref().unwrap());
    let by = |policy: &CompiledPolicy, address: &str, port| {
        let rule = evaluate(policy, address.parse().unwrap(), 6, Some(port))?;
        Some(policy.rules[&rule].clone())
    };
    let said = |origin: Option<Origin>| origin.map(|origin| origin.to_string());
    let own_node = || Some(Origin::OfNode("the pod's own node"));
    let written = Some("networkpolicy x/p0 egress[0]".to_owned());
    assert_eq!(said(by(egress, "192.0.2.1", 443)), written);
    assert_eq!(said(by(egress, "192.0.2.9", 443)), written);
    assert_eq!(by(egress, "192.0.2.1", 30080), own_node());
    assert_eq!(by(egress, "192.0.2.9", 30080), None);
    assert_eq!(by(ingress, "192.0.2.1", 30080), own_node());
}

/// The lease of the first attachment is known, that of the second not yet; the third has none by DHCP.
///
/// Rows: C26, C27, C84.
#[test]
fn attachments_with_leases_by_dhcp_reach_servers_and_hear_from_them_and_from_nobody_else() {
    let deny = json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]});
    let mut cluster = Cluster::new(&[("x", deny)]);
    let nets = |nets: &[&str]| nets.iter().map(|net| net.parse().unwrap()).collect();
    cluster.endpoints[0].dhcp =
        Some(Dhcp { asks: nets(&["192.0.2.67/32"]), hears: nets(&["10.0.0.0/16", "192.0.2.67/32"]) });
    cluster.endpoints[1].dhcp = Some(Dhcp::default());
    let desired = cluster.compile();
    // Whether it hears from there, and reaches it.
    let judge = |endpoint: usize, address: &str, port| {
        let policies = &desired.endpoints[&cluster.endpoints[endpoint].id];
        [&policies.ingress, &policies.egress].map(|policy| {
            evaluate(policy.as_ref().unwrap(), address.parse().unwrap(), 17, Some(port)).is_some()
        })
    };
    let (client, server) = (68, 67);
    for (address, hears, reaches) in [
        ("255.255.255.255", [false, true], [true, true]),
        ("192.0.2.67", [true, true], [true, false]),
        ("10.0.9.9", [true, true], [false, false]),
        ("203.0.113.9", [false, true], [false, false]),
        ("2001:db8::9", [false, false], [false, false]),
        ("ff02::1:2", [false, false], [false, false]),
    ] {
        for endpoint in 0..2 {
            let expected = ([hears[endpoint], false], [false, reaches[endpoint]]);
            let found = (judge(endpoint, address, client), judge(endpoint, address, server));
            assert_eq!(found, expected, "{endpoint}: {address}");
        }
        assert_eq!((judge(2, address, client), judge(2, address, server)), ([false; 2], [false; 2]));
        for port in [546, 547, 80] {
            assert_eq!(judge(0, address, port), [false; 2], "{address} {port}");
        }
    }
}

/// Rows: C82, C83.
#[test]
fn common_rules_hold_beside_the_policies_of_isolated_pods() {
    let read = |direction, rules: Value| {
        let rules = policy::read_common_rules(direction, rules.as_array().unwrap()).unwrap();
        rules.into_iter().map(|rule| ("settings".to_owned(), rule)).collect()
    };
    let web = json!([{"ports": [{"port": 7}]}, {"from": [{"ipBlock": {"cidr": "10.0.1.3/32"}}, {"ipBlock": {"cidr": "fd00::1:3/128"}}]}]);
    let common = CommonRules {
        ingress: read(Direction::Ingress, web),
        egress: read(Direction::Egress, json!([{"ports": [{"port": 9}]}])),
    };
    let options = Options { common, ..Options::default() };
    let cluster = Cluster::new(&[("x", from(json!([{"podSelector": pods(&["b"])}])))]);
    let desired = cluster.compile_with(&options);
    for (probe, passes) in [
        ("a>server tcp/7", true),
        ("a>server tcp/8", false),
        ("b>server tcp/8", true),
        ("c>server icmp/-", true),
        ("server>a tcp/8", true),
    ] {
        assert_eq!(cluster.passes(&desired, probe), passes, "{probe}");
    }
    let silent = json!({"podSelector": {}, "policyTypes": ["Egress"]});
    let cluster = Cluster::new(&[("x", silent)]);
    let desired = cluster.compile_with(&options);
    assert!(cluster.passes(&desired, "a>b tcp/9") && !cluster.passes(&desired, "a>b tcp/7"));
}
