//! Random policies, pods and packets: the programs' verdicts with compiled policies in the kernel's maps, compared with
//! an interpretation of the policies' text that has neither classes nor prefixes.

use std::collections::BTreeMap;

use ipnet::IpNet;
use netattach::npwg::NetworkRef;
use netattach::npwg::selection::PortProtocol;
use netattach::objects::Place;
use netattach::objects::policy::POLICY_FOR_ANNOTATION;
use netattach::objects::{ContainerPort, ObjectName, Objects, Phase, Pod};
use netattach::policy::incremental::Compiler;
use netattach::policy::index::Endpoint;
use netattach::policy::options::Options;
use netattach::source::read::policy;
use proptest::prelude::*;
use proptest::test_runner::{Config as Cases, TestRunner};
use serde_json::{Value, json};

use super::*;

/// Number of worlds, each with some hundreds of packets.
const WORLDS: u32 = 150;
/// IANA numbers: the protocols that rules can name, ICMP in each family, and one that rules cannot name.
const PROTOCOLS: [u8; 5] = [6, 17, 132, ICMP, GRE];
const ICMP: u8 = 1;
const GRE: u8 = 47;
/// Ports that rules name, and some others.
const PORTS: [u16; 7] = [1, 8, 10, 11, 12, 16, 65_535];

/// A pod with one address of each family, `10.0.0.N` and `fd00::N`, and a port `web`: TCP 10 + N.
#[derive(Debug, Clone)]
struct AnyPod {
    namespace: &'static str,
    label: &'static str,
}

/// Pods, counted from 1, of which the first is the one under test; labels of the namespaces; policies of namespace `a`.
#[derive(Debug, Clone)]
pub(super) struct World {
    pods: Vec<AnyPod>,
    namespaces: BTreeMap<&'static str, &'static str>,
    policies: Vec<Value>,
}

fn any_label() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec!["1", "2"])
}

fn any_selector() -> impl Strategy<Value = Value> {
    let expression =
        (prop::sample::select(vec!["In", "NotIn", "Exists", "DoesNotExist"]), any_label(), "[xy]").prop_map(
            |(operator, value, key)| match operator {
                "In" | "NotIn" => {
                    json!({"matchExpressions": [{"key": key, "operator": operator, "values": [value]}]})
                }
                _ => json!({"matchExpressions": [{"key": key, "operator": operator}]}),
            },
        );
    prop_oneof![
        Just(json!({})),
        any_label().prop_map(|label| json!({"matchLabels": {"x": label}})),
        expression
    ]
}

fn any_block() -> impl Strategy<Value = String> {
    (prop::bool::ANY, 0_u8..10, prop::sample::select(vec![0_u8, 1, 2, 3, 4, 200])).prop_map(
        |(v6, last, host_bits)| {
            let (base, longest) =
                if v6 { (format!("fd00::{last}"), 128_u8) } else { (format!("10.0.0.{last}"), 32) };
            let net: IpNet = format!("{base}/{}", longest.saturating_sub(host_bits)).parse().unwrap();
            net.trunc().to_string()
        },
    )
}

fn any_peer() -> impl Strategy<Value = Value> {
    prop_oneof![
        (any_block(), prop::collection::vec(any_block(), 0..3))
            .prop_map(|(cidr, except)| json!({"ipBlock": {"cidr": cidr, "except": except}})),
        any_selector().prop_map(|pods| json!({"podSelector": pods})),
        any_selector().prop_map(|namespaces| json!({"namespaceSelector": namespaces})),
        (any_selector(), any_selector())
            .prop_map(|(pods, namespaces)| json!({"podSelector": pods, "namespaceSelector": namespaces})),
    ]
}

fn any_port() -> impl Strategy<Value = Value> {
    let protocol = || prop::sample::select(vec!["TCP", "UDP", "SCTP"]);
    prop_oneof![
        protocol().prop_map(|protocol| json!({"protocol": protocol})),
        (protocol(), 1_u16..17).prop_map(|(protocol, port)| json!({"protocol": protocol, "port": port})),
        (protocol(), 1_u16..17, 0_u16..9).prop_map(
            |(protocol, port, more)| json!({"protocol": protocol, "port": port, "endPort": port + more})
        ),
        Just(json!({"port": "web"})),
    ]
}

fn any_rules(peers: &'static str) -> impl Strategy<Value = Value> {
    let rule =
        (prop::option::of(prop::collection::vec(any_peer(), 0..3)), prop::collection::vec(any_port(), 0..3));
    let rule = rule.prop_map(move |(of, ports)| match of {
        None => json!({"ports": ports}),
        Some(of) => json!({peers: of, "ports": ports}),
    });
    prop::collection::vec(rule, 0..3).prop_map(Value::from)
}

fn any_policy() -> impl Strategy<Value = Value> {
    let types =
        prop::sample::select(vec![json!(["Ingress"]), json!(["Egress"]), json!(["Ingress", "Egress"])]);
    (any_selector(), types, any_rules("from"), any_rules("to")).prop_map(|(pods, types, ingress, egress)| {
        json!({"podSelector": pods, "policyTypes": types, "ingress": ingress, "egress": egress})
    })
}

pub(super) fn any_world() -> impl Strategy<Value = World> {
    let pod = (prop::sample::select(vec!["a", "b"]), any_label())
        .prop_map(|(namespace, label)| AnyPod { namespace, label });
    let pods = prop::collection::vec(pod, 1..6).prop_map(|mut pods| {
        pods[0].namespace = "a";
        pods
    });
    let namespaces = (any_label(), any_label()).prop_map(|(a, b)| BTreeMap::from([("a", a), ("b", b)]));
    (pods, namespaces, prop::collection::vec(any_policy(), 1..4))
        .prop_map(|(pods, namespaces, policies)| World { pods, namespaces, policies })
}

impl World {
    pub(super) fn objects(&self) -> (Objects, Vec<Endpoint>) {
        let mut objects = Objects::default();
        let labels = |label: &str| BTreeMap::from([("x".to_owned(), label.to_owned())]);
        for (name, label) in &self.namespaces {
            objects.namespaces.insert((*name).to_owned(), labels(label));
        }
        let mut endpoints = Vec::new();
        for (number, pod) in (1_u16..).zip(&self.pods) {
            let name = ObjectName::new(pod.namespace, format!("pod{number}"));
            endpoints.push(Endpoint {
                id: number.into(),
                pod: name.clone(),
                uid: None,
                at: BTreeSet::from([Place::Network(NetworkRef::new("a", "lan"))]).into(),
                addresses: [format!("10.0.0.{number}"), format!("fd00::{number}")]
                    .map(|address| address.parse().unwrap())
                    .into(),
                dhcp: None,
                ethertypes: Vec::new(),
            });
            let web = ContainerPort {
                name: Some("web".to_owned()),
                protocol: PortProtocol::Tcp,
                port: 10 + number,
            };
            let pod = Pod {
                name: name.clone(),
                uid: None,
                mirror_of: None,
                labels: labels(pod.label),
                annotations: BTreeMap::new(),
                phase: Phase::Running,
                host_network: false,
                ports: vec![web],
                powers: Default::default(),
                on_this_node: false,
                terminating: false,
            };
            objects.pods.insert(name, pod.into());
        }
        let annotations = BTreeMap::from([(POLICY_FOR_ANNOTATION.to_owned(), "lan".to_owned())]);
        for (number, spec) in self.policies.iter().enumerate() {
            let name = ObjectName::new("a", format!("p{number}"));
            objects.policies.insert(name.clone(), policy::read(name, &annotations, spec).unwrap().into());
        }
        (objects, endpoints)
    }

    /// The policies that isolate the pod under test in a direction.
    fn isolating(&self, direction: &str) -> Vec<&Value> {
        let kind = if direction == "ingress" { "Ingress" } else { "Egress" };
        let selected = |policy: &&Value| selects(&policy["podSelector"], self.pods[0].label);
        let lists = |policy: &&Value| policy["policyTypes"].as_array().unwrap().contains(&json!(kind));
        self.policies.iter().filter(selected).filter(lists).collect()
    }

    pub(super) fn isolates(&self, direction: &str) -> bool {
        !self.isolating(direction).is_empty()
    }

    /// The answer from the text alone.
    fn allows(&self, direction: &str, peer: IpAddr, protocol: u8, port: u16) -> bool {
        self.allows_one(direction, peer, protocol, Some(port))
    }

    /// [`World::allows`] for traffic whose port may not be known.
    pub(super) fn allows_one(&self, direction: &str, peer: IpAddr, protocol: u8, port: Option<u16>) -> bool {
        let peers = if direction == "ingress" { "from" } else { "to" };
        let isolating = self.isolating(direction);
        let rules = isolating.iter().flat_map(|policy| policy[direction].as_array().unwrap());
        let mut rules = rules.filter(|rule| none_or_any(&rule[peers], |item| self.is_peer(item, peer)));
        let called = if direction == "ingress" { Some(1) } else { self.number_of(peer) };
        isolating.is_empty()
            || rules.any(|rule| none_or_any(&rule["ports"], |item| is_port(item, called, protocol, port)))
    }

    /// The number of the pod that has the address.
    fn number_of(&self, address: IpAddr) -> Option<u16> {
        let last = match address {
            IpAddr::V4(address) => address.octets().strip_prefix(&[10, 0, 0]).map(|rest| u16::from(rest[0])),
            IpAddr::V6(address) => {
                address.segments().strip_prefix(&[0xfd00, 0, 0, 0, 0, 0, 0]).map(|rest| rest[0])
            }
        }?;
        (1..=self.pods.len()).contains(&usize::from(last)).then_some(last)
    }

    fn is_peer(&self, item: &Value, address: IpAddr) -> bool {
        if let Some(block) = item.get("ipBlock") {
            let holds = |text: &Value| text.as_str().unwrap().parse::<IpNet>().unwrap().contains(&address);
            let block_net: IpNet = block["cidr"].as_str().unwrap().parse().unwrap();
            // An exception that lies outside the block is ignored; it could not contain an address of the block anyway.
            return block_net.contains(&address) && !block["except"].as_array().unwrap().iter().any(holds);
        }
        let Some(number) = self.number_of(address) else { return false };
        let pod = &self.pods[usize::from(number) - 1];
        let namespace = match item.get("namespaceSelector") {
            None => pod.namespace == "a",
            Some(selector) => selects(selector, self.namespaces[pod.namespace]),
        };
        namespace && item.get("podSelector").is_none_or(|selector| selects(selector, pod.label))
    }
}

/// Objects have the label `x` and no label `y`.
fn selects(selector: &Value, x: &str) -> bool {
    if let Some(wanted) = selector.get("matchLabels") {
        return wanted["x"] == x;
    }
    let Some(expression) = selector.get("matchExpressions").map(|all| &all[0]) else { return true };
    let value = (expression["key"] == "x").then_some(x);
    match expression["operator"].as_str().unwrap() {
        "In" => value.is_some_and(|value| expression["values"][0] == value),
        "NotIn" => value.is_none_or(|value| expression["values"][0] != value),
        "Exists" => value.is_some(),
        _ => value.is_none(),
    }
}

fn none_or_any(items: &Value, holds: impl Fn(&Value) -> bool) -> bool {
    match items.as_array() {
        None => true,
        Some(items) => items.is_empty() || items.iter().any(holds),
    }
}

fn is_port(item: &Value, called: Option<u16>, protocol: u8, port: Option<u16>) -> bool {
    let wanted = match item.get("protocol").and_then(Value::as_str).unwrap_or("TCP") {
        "TCP" => 6,
        "UDP" => 17,
        _ => 132,
    };
    let matches = match item.get("port") {
        None => true,
        Some(Value::String(_)) => called.is_some_and(|number| port == Some(10 + number)),
        Some(first) => {
            let first = first.as_u64().unwrap();
            let last = item.get("endPort").and_then(Value::as_u64).unwrap_or(first);
            port.is_some_and(|port| (first..=last).contains(&port.into()))
        }
    };
    wanted == protocol && matches
}

/// A packet that opens a flow of its own.
fn opening(from: &str, to: &str, protocol: u8, source: u16, port: u16) -> Vec<u8> {
    let packet = Packet::between(from, to);
    let packet = match protocol {
        6 => packet.tcp(source, port, SYN),
        17 => packet.udp(source, port),
        132 => packet.sctp(source, port, INIT),
        ICMP => packet.ping(source),
        other => packet.payload(other, &[0; 16]),
    };
    packet.frame()
}

/// Rows: C12, C29, C40, C41, C42, C43, C45, C46, C52, C53, C54.
/// Rows: C58, C65, C66, C67, C68, C69, C71, C72, C73, C74, C75.
#[test]
fn the_kernel_does_what_the_text_says() {
    let rig = Rig::new();
    // Each world enters flows of its own, and the table keeps those of all earlier worlds.
    rig.set_share(|share| (share.most_v4, share.most_v6) = (512, 512));
    let zone = std::cell::Cell::new(1);
    let judge = |world: &World| {
        let (objects, endpoints) = world.objects();
        let endpoints = endpoints.into_iter().map(|endpoint| (endpoint.id, endpoint.into())).collect();
        let desired = Compiler::default().update(&objects.into(), &endpoints, &Options::default());
        let tables = &desired.endpoints[&1];
        let before = rig.dataplane.policies().of(POD).unwrap();
        rig.enforce(tables.ingress.as_deref(), tables.egress.as_deref());
        for old in [before.ingress, before.egress] {
            rig.dataplane.policies().remove(&[old].into()).unwrap();
        }
        for (direction, side) in [("ingress", ToPod), ("egress", FromPod)] {
            // Flows of different zones never match, so no packet is a reply.
            zone.set(zone.get() + 1);
            rig.dataplane.attachments().put(POD, &Attachment { zone: zone.get(), ..bare() }).unwrap();
            let mut source = 1000;
            for last in [2_u8, 3, 4, 5, 6, 9, 14, 250] {
                for (pod, peer) in
                    [("10.0.0.1", format!("10.0.0.{last}")), ("fd00::1", format!("fd00::{last}"))]
                {
                    for protocol in PROTOCOLS {
                        let ports = if [ICMP, GRE].contains(&protocol) { &[0][..] } else { &PORTS[..] };
                        for port in ports {
                            source += 1;
                            let frame = match side {
                                ToPod => opening(&peer, pod, protocol, source, *port),
                                FromPod => opening(pod, &peer, protocol, source, *port),
                            };
                            let passed = rig.test_run(side, &frame, 1).return_value as i32 == -1;
                            let expected = world.allows(direction, peer.parse().unwrap(), protocol, *port);
                            prop_assert_eq!(passed, expected, "{} {} {}/{}", direction, peer, protocol, port);
                        }
                    }
                }
            }
        }
        Ok(())
    };
    let mut runner = TestRunner::new(Cases { cases: WORLDS, failure_persistence: None, ..Cases::default() });
    runner.run(&any_world(), |world| judge(&world)).unwrap();
}
