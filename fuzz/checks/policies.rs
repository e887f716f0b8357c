//! Policies as users write them, compiled and compared with an interpreter that has no classes, no prefixes and no
//! index.
//!
//! The input is a choice of pods, attachments and policies with few names and addresses, so that all combinations
//! occur; some items are invalid and must allow nothing. A difference in what passes is a finding, and so is a panic.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use netattach::npwg::NetworkRef;
use netattach::objects::Place;
use netattach::objects::interner::Interner;
use netattach::objects::remote::{RemotePod, Written as Metadata};
use netattach::objects::{ContainerPort, ObjectName, Objects, Phase, Pod};
use netattach::policy::evaluate::evaluate;
use netattach::policy::incremental::Compiler;
use netattach::policy::index::{Endpoint, Endpoints};
use netattach::policy::options::Options;
use netattach::source::read::policy as manifest;
use serde_json::{Map, Value, json};

const NAMESPACES: [&str; 2] = ["a", "b"];
const NETWORKS: [&str; 2] = ["a/m", "a/n"];
const PORT_NAMES: [&str; 2] = ["p", "q"];
const PROTOCOLS: [(&str, u8); 3] = [("TCP", 6), ("UDP", 17), ("SCTP", 132)];

/// Choices taken from the input; when it is exhausted, always the first option.
struct Choices<'a>(&'a [u8]);

impl Choices<'_> {
    fn below(&mut self, number: usize) -> usize {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        usize::from(*first) % number
    }

    fn rarely(&mut self) -> bool {
        self.below(16) == 15
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    fn some<T>(&mut self, most: usize, mut one: impl FnMut(&mut Self) -> T) -> Vec<T> {
        let number = self.below(most + 1);
        (0..number).map(|_| one(self)).collect()
    }
}

/// A policy as it is written, and its namespace.
struct Written {
    namespace: &'static str,
    networks: BTreeSet<&'static str>,
    spec: Value,
}

/// A pod of another node, and what its status claims: network and address.
struct Remote {
    name: ObjectName,
    labels: BTreeMap<String, String>,
    ports: Vec<(&'static str, &'static str, u16)>,
    claims: Vec<(&'static str, IpAddr)>,
    /// Its annotation of ports cannot be read: it is nobody's peer, and its claims count.
    is_unreadable: bool,
}

/// A pod's attachment: the network and the address.
struct World {
    pods: Vec<Pod>,
    addresses: Vec<(usize, &'static str, IpAddr)>,
    remote: Vec<Remote>,
    policies: Vec<Written>,
}

/// Who has an address, to a rule.
struct Owner<'w> {
    name: &'w ObjectName,
    labels: &'w BTreeMap<String, String>,
    ports: Vec<(&'w str, u8, u16)>,
    is_unreadable: bool,
}

pub(crate) fn check(data: &[u8]) {
    let world = world(&mut Choices(data));
    let mut objects = Objects::default();
    for pod in &world.pods {
        objects.pods.insert(pod.name.clone(), Arc::new(pod.clone()));
    }
    let mut interner = Interner::default();
    for remote in &world.remote {
        objects.remote_pods.insert(Arc::new(remote.read(&mut interner))).expect("there is room");
    }
    for (number, policy) in world.policies.iter().enumerate() {
        let name = ObjectName::new(policy.namespace, format!("p{number}"));
        let networks: Vec<&str> = policy.networks.iter().copied().collect();
        let annotations = [("k8s.v1.cni.cncf.io/policy-for".to_owned(), networks.join(","))].into();
        let policy = manifest::read(name, &annotations, &policy.spec).expect("has the shape of a policy");
        objects.policies.insert(policy.name.object.clone(), Arc::new(policy));
    }
    let endpoints: Endpoints = (1..)
        .zip(&world.addresses)
        .map(|(id, (pod, network, address))| {
            let at = BTreeSet::from([Place::Network(reference(network))]);
            let pod = world.pods[*pod].name.clone();
            let endpoint = Endpoint {
                id,
                pod,
                uid: None,
                at: Arc::new(at),
                addresses: vec![*address],
                dhcp: None,
                ethertypes: Default::default(),
            };
            (id, Arc::new(endpoint))
        })
        .collect();
    let desired = Compiler::default().update(&Arc::new(objects), &endpoints, &Options::default());
    for (id, (pod, network, _)) in (1..).zip(&world.addresses) {
        let policies = &desired.endpoints[&id];
        for (direction, tables) in [("ingress", &policies.ingress), ("egress", &policies.egress)] {
            for peer in (0..16).flat_map(|low| [v4(low), v6(low)]) {
                for (protocol, port) in [(6, 0), (6, 9), (6, 80), (17, 80), (132, 81), (17, 1000), (1, 0)] {
                    let port = (protocol != 1).then_some(port);
                    let expected = read_text(&world, *pod, network, direction, peer, protocol, port);
                    let found =
                        tables.as_ref().map(|tables| evaluate(tables, peer, protocol, port).is_some());
                    assert_eq!(found, expected, "{direction} of {id}, {peer}, {protocol}/{port:?}");
                }
            }
        }
    }
}

fn reference(network: &str) -> NetworkRef {
    let (namespace, name) = network.split_once('/').expect("has a namespace");
    NetworkRef::new(namespace, name)
}

fn v4(low: u8) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, low).into()
}

fn v6(low: u8) -> IpAddr {
    Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, low.into()).into()
}

// Generating the policies.

fn world(choices: &mut Choices<'_>) -> World {
    let mut pods = Vec::new();
    for number in 0..=choices.below(4) {
        let port = |choices: &mut Choices<'_>| ContainerPort {
            name: Some(choices.of(&PORT_NAMES).to_owned()),
            protocol: netattach::npwg::selection::PortProtocol::from_name(choices.of(&PROTOCOLS).0)
                .expect("is a protocol"),
            port: choices.of(&[9, 80, 81]),
        };
        pods.push(Pod {
            name: ObjectName::new(choices.of(&NAMESPACES), format!("pod{number}")),
            uid: None,
            mirror_of: None,
            labels: labels(choices),
            annotations: BTreeMap::new(),
            phase: if choices.rarely() { Phase::Failed } else { Phase::Running },
            host_network: choices.rarely(),
            ports: choices.some(2, port),
            powers: Default::default(),
            on_this_node: false,
            terminating: false,
        });
    }
    let mut addresses = Vec::new();
    for pod in 0..pods.len() {
        for network in NETWORKS {
            if choices.below(3) > 0 {
                let low = choices.below(16) as u8;
                addresses.push((pod, network, if choices.below(2) == 0 { v4(low) } else { v6(low) }));
            }
        }
    }
    let mut remote = Vec::new();
    for number in 0..choices.below(4) {
        remote.push(Remote {
            // Pods of one name, on two nodes, are compared elsewhere.
            name: ObjectName::new(choices.of(&NAMESPACES), format!("remote{number}")),
            labels: labels(choices),
            ports: choices.some(2, |it| (it.of(&PROTOCOLS).0, it.of(&PORT_NAMES), it.of(&[9, 80, 81]))),
            claims: choices.some(3, |it| {
                let (network, low) = (it.of(&NETWORKS), it.below(16) as u8);
                (network, if it.below(2) == 0 { v4(low) } else { v6(low) })
            }),
            is_unreadable: choices.rarely(),
        });
    }
    let policies = choices.some(4, |choices| Written {
        namespace: choices.of(&NAMESPACES),
        networks: choices.some(2, |choices| choices.of(&NETWORKS)).into_iter().collect(),
        spec: spec(choices),
    });
    World { pods, addresses, remote, policies }
}

impl Remote {
    fn read(&self, interner: &mut Interner) -> RemotePod {
        let entry =
            |(network, address): &(&str, IpAddr)| json!({"name": network, "ips": [address.to_string()]});
        let status = Value::Array(self.claims.iter().map(entry).collect()).to_string();
        let mut ports: BTreeMap<String, BTreeSet<u16>> = BTreeMap::new();
        for (protocol, name, port) in &self.ports {
            ports.entry(format!("{protocol}/{name}")).or_default().insert(*port);
        }
        let ports = if self.is_unreadable { "{".to_owned() } else { json!(ports).to_string() };
        let (labels, status, ports) = (self.labels.clone(), Some(&*status), Some(&*ports));
        RemotePod::read(&self.name, Metadata { labels, status, ports, ..Metadata::default() }, interner)
    }
}

fn labels(choices: &mut Choices<'_>) -> BTreeMap<String, String> {
    let label = |choices: &mut Choices<'_>| (choices.of(&["x", "y"]).into(), choices.of(&["1", "2"]).into());
    choices.some(2, label).into_iter().collect()
}

fn spec(choices: &mut Choices<'_>) -> Value {
    let mut spec = Map::new();
    spec.insert("podSelector".into(), selector(choices));
    if choices.below(3) > 0 {
        let word = |choices: &mut Choices<'_>| choices.of(&["Ingress", "Egress", "egress", "Both"]);
        spec.insert("policyTypes".into(), json!(choices.some(2, word)));
    }
    for (direction, key) in [("ingress", "from"), ("egress", "to")] {
        if choices.below(4) > 0 {
            spec.insert(direction.into(), choices.some(3, |choices| rule(choices, key)).into());
        }
    }
    if choices.rarely() {
        spec.insert("ingres".into(), json!([]));
    }
    spec.into()
}

fn selector(choices: &mut Choices<'_>) -> Value {
    let expression = |choices: &mut Choices<'_>| {
        let operator = choices.of(&["In", "NotIn", "Exists", "DoesNotExist", "In", "NotIn", "Gt"]);
        let values = choices.some(2, |choices| choices.of(&["1", "2"]));
        json!({"key": choices.of(&["x", "y"]), "operator": operator, "values": values})
    };
    match choices.below(8) {
        0..3 => json!({}),
        3..6 => json!({"matchLabels": labels(choices)}),
        6 => json!({"matchLabels": labels(choices), "matchExpressions": choices.some(2, expression)}),
        _ => json!({"matchExpressions": choices.some(2, expression), "matchLabel": {"x": "1"}}),
    }
}

fn rule(choices: &mut Choices<'_>, key: &str) -> Value {
    let mut rule = Map::new();
    if choices.below(4) > 0 {
        rule.insert(key.into(), choices.some(3, peer).into());
    }
    if choices.below(3) > 0 {
        rule.insert("ports".into(), choices.some(3, port).into());
    }
    if choices.rarely() {
        rule.insert(choices.of(&["form", "from", "to"]).into(), json!([]));
    }
    rule.into()
}

fn block(choices: &mut Choices<'_>) -> String {
    let (address, longest) = (choices.below(16) as u8, choices.below(2));
    let host_bits = choices.of(&[0, 0, 1, 2, 3, 4, 5, 32]);
    match (choices.rarely(), longest) {
        (true, _) => choices.of(&["10.0.0.1", "10.0.0.0/33", "", "10.0.0/24", "fd00::/129"]).to_owned(),
        (false, 0) => format!("10.0.0.{address}/{}", 32 - host_bits),
        (false, _) => format!("fd00::{address:x}/{}", 128 - host_bits),
    }
}

fn peer(choices: &mut Choices<'_>) -> Value {
    let mut peer = Map::new();
    if choices.below(2) == 0 {
        let except = choices.some(2, block);
        peer.insert("ipBlock".into(), json!({"cidr": block(choices), "except": except}));
    }
    if choices.below(3) == 0 {
        peer.insert("podSelector".into(), selector(choices));
    }
    if choices.below(4) == 0 {
        peer.insert("namespaceSelector".into(), selector(choices));
    }
    peer.into()
}

fn port(choices: &mut Choices<'_>) -> Value {
    let mut port = Map::new();
    if choices.below(3) > 0 {
        port.insert("protocol".into(), choices.of(&["TCP", "UDP", "SCTP", "tcp", "ICMP"]).into());
    }
    if choices.below(4) > 0 {
        let number = choices.of(&[9, 80, 81, 1, 0, 70_000]);
        let name = choices.of(&PORT_NAMES);
        port.insert("port".into(), if choices.below(3) == 0 { json!(name) } else { json!(number) });
    }
    if choices.below(4) == 0 {
        port.insert("endPort".into(), choices.of(&[80, 65535, 9, 0]).into());
    }
    port.into()
}

// Interpreting the policies.

/// `None`: not isolated.
fn read_text(
    world: &World,
    target: usize,
    network: &str,
    direction: &str,
    peer: IpAddr,
    protocol: u8,
    port: Option<u16>,
) -> Option<bool> {
    let pod = &world.pods[target];
    let selecting = world.policies.iter().filter(|policy| {
        policy.namespace == pod.name.namespace
            && policy.networks.contains(network)
            && !pod.host_network
            // An unreadable selector counts as selecting every pod.
            && selects(&policy.spec["podSelector"], &pod.labels).unwrap_or(true)
            && isolates(&policy.spec, direction)
    });
    let mut isolating = selecting.peekable();
    isolating.peek()?;
    let allows = |policy: &Written| {
        // Of the attachment's own network, or where nobody has the address there, of each of the others.
        let on = |is_own: bool| {
            let there = policy.networks.iter().filter(|it| (**it == network) == is_own);
            there.filter_map(|it| owners(world, it, peer)).collect::<Vec<_>>()
        };
        let own = on(true);
        let owners = if own.is_empty() { on(false) } else { own };
        selects(&policy.spec["podSelector"], &pod.labels).is_some()
            && list(&policy.spec, direction).unwrap_or(&[]).iter().any(|rule| {
                let key = if direction == "ingress" { "from" } else { "to" };
                let known =
                    rule.as_object().is_some_and(|rule| rule.keys().all(|it| it == key || it == "ports"));
                let peers = list(rule, key).unwrap_or(&[]);
                let ports = list(rule, "ports").unwrap_or(&[]);
                known
                    && (peers.is_empty() || are_peers(peers, policy.namespace, peer, &owners))
                    && (ports.is_empty()
                        || ports.iter().any(|it| fits(it, direction, pod, &owners, protocol, port)))
            })
    };
    Some(isolating.any(allows))
}

/// The pods that have an address of a network and are peers, all together; `None`: nobody has it. Those of this node have
/// theirs, whatever pods of other nodes claim.
fn owners<'w>(world: &'w World, network: &str, address: IpAddr) -> Option<Vec<Owner<'w>>> {
    let has = |(_, on, has): &&(usize, &str, IpAddr)| *on == network && *has == address;
    let attached: Vec<&Pod> = world.addresses.iter().filter(has).map(|(pod, ..)| &world.pods[*pod]).collect();
    if attached.is_empty() {
        let claims = |remote: &&Remote| remote.claims.contains(&(network, address));
        let owners: Vec<Owner<'w>> = world.remote.iter().filter(claims).map(Remote::owner).collect();
        return (!owners.is_empty()).then_some(owners);
    }
    let peers = attached.into_iter().filter(|pod| !pod.host_network && pod.phase != Phase::Failed);
    Some(peers.map(owner).collect())
}

/// Whether it is true of all who have an address, and somebody has.
fn is_of_all(owners: &[Vec<Owner<'_>>], is_true: impl Fn(&Owner<'_>) -> bool) -> bool {
    !owners.is_empty() && owners.iter().all(|of_one| !of_one.is_empty() && of_one.iter().all(&is_true))
}

fn owner(pod: &Pod) -> Owner<'_> {
    let port = |it: &ContainerPort| (it.protocol.number(), it.port);
    let named = pod.ports.iter().filter_map(|it| Some((it.name.as_deref()?, port(it).0, port(it).1)));
    Owner { name: &pod.name, labels: &pod.labels, ports: named.collect(), is_unreadable: false }
}

impl Remote {
    fn owner(&self) -> Owner<'_> {
        let number = |word: &str| PROTOCOLS.iter().find(|(name, _)| *name == word).expect("is a protocol").1;
        let ports =
            self.ports.iter().map(|(protocol, name, port)| (*name, number(protocol), *port)).collect();
        let (name, labels) = (&self.name, &self.labels);
        Owner { name, labels, ports, is_unreadable: self.is_unreadable }
    }
}

fn list<'v>(object: &'v Value, key: &str) -> Option<&'v [Value]> {
    object.get(key).and_then(Value::as_array).map(Vec::as_slice)
}

fn isolates(spec: &Value, direction: &str) -> bool {
    let rules = |direction| list(spec, direction).is_some_and(|rules| !rules.is_empty());
    match list(spec, "policyTypes").filter(|types| !types.is_empty()) {
        Some(types) => types.iter().filter_map(Value::as_str).any(|word| {
            let word = word.to_lowercase();
            word == direction || !["ingress", "egress"].contains(&word.as_str())
        }),
        // An unknown key: its meaning cannot be guessed.
        None if spec.get("ingres").is_some() => true,
        // An unreadable selector: the isolated pods and directions are unknown.
        None if selects(&spec["podSelector"], &BTreeMap::new()).is_none() => {
            direction == "ingress" || rules("egress")
        }
        None => rules(direction),
    }
}

/// `None`: the selector cannot be read.
fn selects(selector: &Value, labels: &BTreeMap<String, String>) -> Option<bool> {
    if selector.get("matchLabel").is_some() {
        return None;
    }
    let wanted = selector.get("matchLabels").and_then(Value::as_object);
    let mut all = wanted
        .into_iter()
        .flatten()
        .all(|(key, value)| labels.get(key).map(String::as_str) == value.as_str());
    for expression in list(selector, "matchExpressions").unwrap_or(&[]) {
        let has = labels.get(expression["key"].as_str()?);
        let values: Vec<&str> = list(expression, "values")?.iter().filter_map(Value::as_str).collect();
        let is_among = has.is_some_and(|has| values.contains(&has.as_str()));
        let holds = match (expression["operator"].as_str()?, values.is_empty()) {
            ("In", false) => is_among,
            ("NotIn", false) => !is_among,
            ("Exists", true) => has.is_some(),
            ("DoesNotExist", true) => has.is_none(),
            _ => return None,
        };
        all &= holds;
    }
    Some(all)
}

/// Whether a rule's peers include an address: it is in one of the blocks, or each pod that has it is selected by one of the
/// selectors.
fn are_peers(peers: &[Value], namespace: &str, peer: IpAddr, owners: &[Vec<Owner<'_>>]) -> bool {
    let is_selected = |owner: &Owner<'_>| peers.iter().any(|item| is_selected(item, namespace, owner));
    peers.iter().any(|item| is_in(item, peer)) || is_of_all(owners, is_selected)
}

fn is_in(item: &Value, peer: IpAddr) -> bool {
    let Some(block) = item.get("ipBlock") else { return false };
    let Some(net) = block["cidr"].as_str().and_then(parse) else { return false };
    let mut cuts = Vec::new();
    for except in list(block, "except").unwrap_or(&[]) {
        let Some(cut) = except.as_str().and_then(parse) else { return false };
        cuts.push(cut);
    }
    holds(net, peer) && !cuts.iter().any(|cut| holds(*cut, peer) && within(*cut, net))
}

fn is_selected(item: &Value, namespace: &str, owner: &Owner<'_>) -> bool {
    let selectors = [item.get("namespaceSelector"), item.get("podSelector")];
    if owner.is_unreadable || item.get("ipBlock").is_some() || selectors == [None, None] {
        return false;
    }
    let [namespaces, pods] = selectors;
    let name = [("kubernetes.io/metadata.name".to_owned(), owner.name.namespace.clone())].into();
    let in_scope = match namespaces {
        None => Some(owner.name.namespace == namespace),
        Some(selector) => selects(selector, &name),
    };
    let selected = pods.map_or(Some(true), |selector| selects(selector, owner.labels));
    in_scope == Some(true) && selected == Some(true)
}

/// Address and length of a prefix.
fn parse(text: &str) -> Option<(IpAddr, u32)> {
    let (address, length) = text.split_once('/')?;
    let (address, length) = (address.parse::<IpAddr>().ok()?, length.parse::<u32>().ok()?);
    (length <= if address.is_ipv4() { 32 } else { 128 }).then_some((address, length))
}

fn number(address: IpAddr) -> u128 {
    match address {
        // In the upper bits, so that prefixes of both families are upper bits.
        IpAddr::V4(address) => u128::from(u32::from(address)) << 96,
        IpAddr::V6(address) => address.into(),
    }
}

fn holds((net, length): (IpAddr, u32), address: IpAddr) -> bool {
    let upper = |address| number(address).checked_shr(128 - length).unwrap_or(0);
    net.is_ipv4() == address.is_ipv4() && upper(net) == upper(address)
}

/// Whether an exception applies to a block: one outside is ignored, one around it covers it.
fn within(cut: (IpAddr, u32), net: (IpAddr, u32)) -> bool {
    holds(net, cut.0) && cut.1 >= net.1 || holds(cut, net.0) && cut.1 <= net.1
}

fn fits(
    item: &Value,
    direction: &str,
    target: &Pod,
    owners: &[Vec<Owner<'_>>],
    protocol: u8,
    port: Option<u16>,
) -> bool {
    let word = item.get("protocol").and_then(Value::as_str).unwrap_or("TCP").to_uppercase();
    let Some((_, wanted)) = PROTOCOLS.iter().find(|(name, _)| *name == word) else { return false };
    if *wanted != protocol {
        return false;
    }
    let declares = |owner: &Owner<'_>, name: &str| {
        let is_it =
            |(of, by, number): &(&str, u8, u16)| *of == name && *by == protocol && Some(*number) == port;
        !owner.is_unreadable && owner.ports.iter().any(is_it)
    };
    match (item.get("port"), item.get("endPort").and_then(Value::as_u64)) {
        (None, None) => true,
        (Some(Value::String(name)), None) if direction == "ingress" => declares(&owner(target), name),
        (Some(Value::String(name)), None) => is_of_all(owners, |owner| declares(owner, name)),
        (Some(first), last) => first.as_u64().is_some_and(|first| {
            let last = last.unwrap_or(first);
            (1..=65535).contains(&first)
                && (first..=65535).contains(&last)
                && port.is_some_and(|port| (first..=last).contains(&u64::from(port)))
        }),
        (None, Some(_)) => false,
    }
}
