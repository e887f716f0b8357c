//! Reads a MultiNetworkPolicy object (`k8s.cni.cncf.io`, v1beta1 and v1beta2, which do not differ in the fields used
//! here) or a NetworkPolicy object (`networking.k8s.io/v1`) into the [model](crate::objects::policy).
//!
//! The API's schema checks types only. Other errors are resolved here, item by item, so that one bad item neither
//! widens its rule nor invalidates its neighbours.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::marker::PhantomData;

use ipnet::IpNet;
use serde::Deserialize;
use serde::de::{Deserializer, SeqAccess, Visitor};
use serde_json::Value;

use crate::cidr;
use crate::npwg::NetworkRef;
use crate::npwg::network::{is_label, is_subdomain};
use crate::npwg::selection::PortProtocol;
use crate::objects::budget::{Bounded, Excess, FINDINGS, NETWORKS, PEERS, PORTS, RULES, pass_over, shown};
use crate::objects::labels::{self, Selector};
use crate::objects::policy::{
    Direction, Directions, Finding, POLICY_FOR_ANNOTATION, Peer, Peers, Policy, PolicyName, PortTerm, Ports,
    Problem, Rule, Severity,
};
use crate::objects::unknown_keys::keyed;
use crate::objects::{ObjectName, is_port_name};

/// The object does not conform to the API's schema.
#[derive(Debug, thiserror::Error)]
#[error("read spec of {name}")]
pub struct ManifestError {
    /// The policy.
    pub name: PolicyName,
    #[source]
    source: serde_json::Error,
}

impl ManifestError {
    pub(crate) fn new(name: PolicyName, source: serde_json::Error) -> Self {
        Self { name, source }
    }
}

/// Reads a MultiNetworkPolicy from its `spec` and annotations.
///
/// # Errors
/// A value has the wrong type, or `podSelector` is missing: objects that the API server would refuse. Everything else
/// becomes a [`Problem`] of the policy.
pub fn read(
    name: ObjectName,
    annotations: &BTreeMap<String, String>,
    spec: &Value,
) -> Result<Policy, ManifestError> {
    let spec = shape(PolicyName::multi(name.clone()), spec)?;
    Ok(read_multi(name, annotations, spec))
}

/// As [`read`], for a `spec` that conforms to the schema.
pub(crate) fn read_multi(name: ObjectName, annotations: &BTreeMap<String, String>, spec: Spec) -> Policy {
    let mut found = Findings::default();
    let named = networks(annotations.get(POLICY_FOR_ANNOTATION), &name.namespace, &mut found);
    read_spec(PolicyName::multi(name), named, spec, found)
}

/// A MultiNetworkPolicy of which only the name and the networks can be read: its selector is unknown, so it isolates
/// every pod of its namespace on these networks, and allows nothing.
pub(crate) fn unreadable_multi(name: ObjectName, annotations: &BTreeMap<String, String>) -> Policy {
    let mut found = Findings::default();
    let named = networks(annotations.get(POLICY_FOR_ANNOTATION), &name.namespace, &mut found);
    isolating(PolicyName::multi(name), named, found)
}

/// As [`unreadable_multi`], for a NetworkPolicy.
pub(crate) fn unreadable_network(name: ObjectName) -> Policy {
    unreadable(PolicyName::network(name), BTreeSet::new())
}

/// A policy for these networks that isolates every pod of its namespace, and allows nothing.
pub(crate) fn unreadable(name: PolicyName, networks: BTreeSet<NetworkRef>) -> Policy {
    isolating(name, Named { networks, are_too_many: false }, Findings::default())
}

fn isolating(name: PolicyName, named: Named, mut found: Findings) -> Policy {
    found.fail("spec", Finding::Unreadable);
    Policy {
        name,
        networks: named.networks,
        all_networks: named.are_too_many,
        pods: Selector::default(),
        ingress: Vec::new(),
        egress: Vec::new(),
        directions: Directions::Listed { ingress: true, egress: true },
        problems: found.into_problems(),
    }
}

fn shape(name: PolicyName, spec: &Value) -> Result<Spec, ManifestError> {
    Spec::deserialize(spec).map_err(|source| ManifestError { name, source })
}

/// Reads a NetworkPolicy from its `spec`.
///
/// # Errors
/// As [`read`].
#[cfg(test)]
pub(crate) fn read_network_policy(name: ObjectName, spec: &Value) -> Result<Policy, ManifestError> {
    let spec = shape(PolicyName::network(name.clone()), spec)?;
    Ok(read_network(name, spec))
}

/// Reads a NetworkPolicy from a `spec` that conforms to the schema. The directions that it isolates without
/// `policyTypes` do not depend on settings.
pub(crate) fn read_network(name: ObjectName, spec: Spec) -> Policy {
    let mut policy = read_spec(PolicyName::network(name), Named::default(), spec, Findings::default());
    if policy.directions == Directions::Inferred {
        policy.directions = Directions::Listed { ingress: true, egress: !policy.egress.is_empty() };
        policy.problems.retain(|problem| problem.finding != Finding::TypesInferred);
    }
    policy
}

/// Reads rules from the agent's settings that apply in addition to every policy.
///
/// # Errors
/// The first problem, or a rule that refers to pods, which such rules cannot.
pub fn read_common_rules(direction: Direction, rules: &[Value]) -> Result<Vec<Rule>, CommonRulesError> {
    let written: Vec<WrittenRule> = rules
        .iter()
        .map(WrittenRule::deserialize)
        .collect::<Result<_, _>>()
        .map_err(|source| CommonRulesError::Shape { direction, source })?;
    let mut found = Findings::default();
    let rules = crate::source::read::policy::rules(direction, written, &mut found);
    for (position, rule) in rules.iter().enumerate() {
        let is_block = |peer: &Peer| matches!(peer, Peer::Block { .. });
        let plain_peers = matches!(&rule.peers, Peers::Any)
            || matches!(&rule.peers, Peers::Of(all) if all.iter().all(is_block));
        let named = matches!(&rule.ports, Ports::Of(terms) if terms.iter().any(|term| matches!(term, PortTerm::Named { .. })));
        if !plain_peers || named {
            found.fail(format!("spec.{direction}[{position}]"), Finding::NotForAll);
        }
    }
    match found.into_problems().into_iter().next() {
        None => Ok(rules),
        Some(problem) => {
            let path = problem.path.trim_start_matches("spec.").to_owned();
            Err(CommonRulesError::Rule(Problem { path, ..problem }))
        }
    }
}

/// Rules for all policies are invalid.
#[derive(Debug, thiserror::Error)]
pub enum CommonRulesError {
    /// They do not have the form of rules.
    #[error("{direction}")]
    Shape {
        /// Direction of the rules.
        direction: Direction,
        /// The cause.
        #[source]
        source: serde_json::Error,
    },
    /// One of them has a problem.
    #[error("{0}")]
    Rule(Problem),
}

fn read_spec(name: PolicyName, named: Named, spec: Spec, mut found: Findings) -> Policy {
    let (ingress, egress) = (spec.ingress.unwrap_or_default(), spec.egress.unwrap_or_default());
    let too_many_networks = named.are_too_many.then_some(Excess::Networks);
    let excess = too_many_networks.or_else(|| excess(&ingress.counted, &egress.counted));
    found.extend(ingress.found);
    found.extend(egress.found);
    let (mut ingress, mut egress) = (ingress.rules, egress.rules);
    let listed = spec.policy_types.unwrap_or_default();
    let mut directions = directions(listed, &ingress, &egress, &mut found);
    // The value of an unknown key may have been meant as rules of either direction.
    let is_open = !spec.unknown.is_empty() && directions == Directions::Inferred;
    if is_open {
        directions = Directions::Listed { ingress: true, egress: true };
    }
    for key in spec.unknown {
        match is_open {
            true => found.fail("spec", Finding::UnknownSpecKey(key)),
            false => found.warn("spec", Finding::IgnoredKey(key)),
        }
    }
    if let Some(excess) = excess {
        found.fail("spec", Finding::Excess(excess));
        if directions == Directions::Inferred {
            directions = Directions::Listed { ingress: true, egress: !egress.is_empty() };
        }
        // Not kept either, as it would take memory in every agent.
        (ingress, egress) = (Vec::new(), Vec::new());
    }
    let pods = match Selector::try_from(spec.pod_selector.unwrap_or_default()) {
        Ok(selector) => selector,
        Err(error) => {
            // Its selector is unknown, so it isolates every pod; its rules were meant for fewer, so it allows nothing.
            found.fail("spec.podSelector", Finding::PodSelector(error));
            if directions == Directions::Inferred {
                directions = Directions::Listed { ingress: true, egress: !egress.is_empty() };
            }
            ingress.clear();
            egress.clear();
            Selector::default()
        }
    };
    let problems = found.into_problems();
    let Named { networks, are_too_many: all_networks } = named;
    Policy { name, networks, all_networks, pods, ingress, egress, directions, problems }
}

/// Maximum number of `policyTypes` entries that are examined: there are two.
const MOST_TYPES: usize = 16;

/// A policy's `spec` as written in a manifest.
#[derive(Default)]
pub(crate) struct Spec {
    pod_selector: Option<labels::Written>,
    ingress: Option<Rules<Incoming>>,
    egress: Option<Rules<Outgoing>>,
    policy_types: Option<Bounded<String, MOST_TYPES>>,
    unknown: BTreeSet<String>,
}

keyed!(Spec {
    "podSelector" => pod_selector,
    "ingress" => ingress,
    "egress" => egress,
    "policyTypes" => policy_types,
}; required "podSelector" => pod_selector);

/// Rules of one direction, each converted as soon as it is read, so that a hundred thousand of them do not exist
/// twice.
struct Rules<D> {
    rules: Vec<Rule>,
    counted: Counted,
    found: Findings,
    direction: PhantomData<D>,
}

/// Counts the rules, peers and ports of one direction.
#[derive(Debug, Clone, Copy, Default)]
struct Counted {
    rules: usize,
    peers: usize,
    ports: usize,
}

/// The first limit that a policy with these two directions exceeds.
fn excess(ingress: &Counted, egress: &Counted) -> Option<Excess> {
    let bounds = [
        (ingress.rules + egress.rules, RULES, Excess::Rules),
        (ingress.peers + egress.peers, PEERS, Excess::Peers),
        (ingress.ports + egress.ports, PORTS, Excess::Ports),
    ];
    bounds.into_iter().find(|(number, most, _)| number > most).map(|(_, _, excess)| excess)
}

impl Counted {
    fn add(&mut self, rule: &WrittenRule) {
        let peers = rule.from.iter().chain(&rule.to);
        self.rules += 1;
        self.peers += peers.map(WrittenPeers::count).sum::<usize>();
        self.ports += rule.ports.as_ref().map_or(0, |ports| ports.items.len() + usize::from(ports.has_more));
    }
}

trait Way {
    const DIRECTION: Direction;
}

struct Incoming;

impl Way for Incoming {
    const DIRECTION: Direction = Direction::Ingress;
}

struct Outgoing;

impl Way for Outgoing {
    const DIRECTION: Direction = Direction::Egress;
}

impl<D> Default for Rules<D> {
    fn default() -> Self {
        let (rules, found) = (Vec::new(), Findings::default());
        Self { rules, counted: Counted::default(), found, direction: PhantomData }
    }
}

impl<'de, D: Way> Deserialize<'de> for Rules<D> {
    fn deserialize<T: Deserializer<'de>>(deserializer: T) -> Result<Self, T::Error> {
        deserializer.deserialize_seq(Self::default())
    }
}

impl<'de, D: Way> Visitor<'de> for Rules<D> {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of rules")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut written: A) -> Result<Self, A::Error> {
        while excess(&self.counted, &Counted::default()).is_none() {
            let Some(next) = written.next_element()? else {
                self.rules.shrink_to_fit();
                return Ok(self);
            };
            self.counted.add(&next);
            let read = rule(D::DIRECTION, self.rules.len(), next, &mut self.found);
            self.rules.push(read);
        }
        self.counted.rules += pass_over(&mut written)?;
        Ok(self)
    }
}

#[derive(Default)]
struct WrittenRule {
    from: Option<WrittenPeers>,
    to: Option<WrittenPeers>,
    ports: Option<Bounded<WrittenPort, PORTS>>,
    unknown: BTreeSet<String>,
}

keyed!(WrittenRule { "from" => from, "to" => to, "ports" => ports });

type WrittenPeers = Bounded<WrittenPeer, PEERS>;

impl WrittenPeers {
    /// Number of peers and exceptions; one more than kept if there are more.
    fn count(&self) -> usize {
        let exceptions = |peer: &WrittenPeer| {
            let except = peer.ip_block.as_ref().and_then(|block| block.except.as_ref());
            except.map_or(0, |except| except.items.len() + usize::from(except.has_more))
        };
        let of_peers: usize = self.items.iter().map(|peer| 1 + exceptions(peer)).sum();
        of_peers + usize::from(self.has_more)
    }
}

#[derive(Default)]
struct WrittenPeer {
    ip_block: Option<WrittenBlock>,
    namespace_selector: Option<Box<labels::Written>>,
    pod_selector: Option<Box<labels::Written>>,
    unknown: BTreeSet<String>,
}

keyed!(WrittenPeer {
    "ipBlock" => ip_block,
    "namespaceSelector" => namespace_selector,
    "podSelector" => pod_selector,
});

#[derive(Default)]
struct WrittenBlock {
    cidr: Option<String>,
    except: Option<Bounded<String, PEERS>>,
    unknown: BTreeSet<String>,
}

keyed!(WrittenBlock { "cidr" => cidr, "except" => except }; required "cidr" => cidr);

#[derive(Default)]
struct WrittenPort {
    protocol: Option<String>,
    port: Option<Value>,
    end_port: Option<Value>,
    unknown: BTreeSet<String>,
}

keyed!(WrittenPort { "protocol" => protocol, "port" => port, "endPort" => end_port });

/// The findings that are reported, and the number of further ones.
#[derive(Default)]
struct Findings {
    listed: Vec<Problem>,
    unlisted: usize,
}

impl Findings {
    fn warn(&mut self, path: impl fmt::Display, finding: Finding) {
        self.add(Severity::Warning, path, finding);
    }

    fn fail(&mut self, path: impl fmt::Display, finding: Finding) {
        self.add(Severity::Error, path, finding);
    }

    fn add(&mut self, severity: Severity, path: impl fmt::Display, finding: Finding) {
        // The finding that refuses the whole policy is always reported.
        if self.listed.len() < FINDINGS || matches!(finding, Finding::Excess(_)) {
            self.listed.push(Problem { severity, path: path.to_string(), finding });
        } else {
            self.unlisted += 1;
        }
    }

    fn extend(&mut self, other: Self) {
        for problem in other.listed {
            self.add(problem.severity, problem.path, problem.finding);
        }
        self.unlisted += other.unlisted;
    }

    fn into_problems(mut self) -> Vec<Problem> {
        if self.unlisted > 0 {
            let finding = Finding::Unlisted(self.unlisted);
            self.listed.push(Problem { severity: Severity::Error, path: "spec".to_owned(), finding });
        }
        self.listed
    }
}

/// The networks that a policy's annotation names.
#[derive(Default)]
struct Named {
    networks: BTreeSet<NetworkRef>,
    /// Whether there are more networks than a policy may have. Then none is kept: the policy isolates on every
    /// network, because leaving one out would leave pods open.
    are_too_many: bool,
}

fn networks(annotation: Option<&String>, namespace: &str, found: &mut Findings) -> Named {
    let path = format!("metadata.annotations[{POLICY_FOR_ANNOTATION}]");
    let mut networks = BTreeSet::new();
    for item in annotation.map(String::as_str).unwrap_or_default().split(',') {
        let item: String = item.chars().filter(|character| !character.is_whitespace()).collect();
        if item.is_empty() {
            continue;
        }
        let (namespace, name) = item.split_once('/').unwrap_or((namespace, &item));
        if is_label(namespace) && is_subdomain(name) {
            networks.insert(NetworkRef::new(namespace, name));
        } else {
            found.fail(&path, Finding::NetworkName(shown(&item)));
        }
        if networks.len() > NETWORKS {
            return Named { networks: BTreeSet::new(), are_too_many: true };
        }
    }
    if networks.is_empty() {
        found.warn(path, Finding::NoNetwork);
    }
    Named { networks, are_too_many: false }
}

fn directions(
    listed: Bounded<String, MOST_TYPES>,
    ingress: &[Rule],
    egress: &[Rule],
    found: &mut Findings,
) -> Directions {
    const PATH: &str = "spec.policyTypes";
    let Bounded { items: listed, has_more } = listed;
    if listed.is_empty() {
        if ingress.is_empty() {
            found.warn(PATH, Finding::TypesInferred);
        }
        return Directions::Inferred;
    }
    // The entries not examined may be either.
    let (mut has_ingress, mut has_egress) = (has_more, has_more);
    for (position, word) in listed.into_iter().enumerate() {
        let path = format!("{PATH}[{position}]");
        let read_as = match word.to_ascii_lowercase().as_str() {
            "ingress" => {
                has_ingress = true;
                "Ingress"
            }
            "egress" => {
                has_egress = true;
                "Egress"
            }
            _ => {
                found.fail(path, Finding::PolicyType(shown(&word)));
                has_ingress = true;
                has_egress = true;
                continue;
            }
        };
        if word != read_as {
            found.warn(path, Finding::Case { written: word, read_as });
        }
    }
    for (direction, listed, rules) in
        [(Direction::Ingress, has_ingress, ingress), (Direction::Egress, has_egress, egress)]
    {
        if !listed && !rules.is_empty() {
            found.warn(format!("spec.{direction}"), Finding::TypeNotListed(direction));
        }
    }
    Directions::Listed { ingress: has_ingress, egress: has_egress }
}

fn rules(direction: Direction, written: Vec<WrittenRule>, found: &mut Findings) -> Vec<Rule> {
    let numbered = written.into_iter().enumerate();
    numbered
        .map(|(position, rule)| crate::source::read::policy::rule(direction, position, rule, found))
        .collect()
}

/// The path of an item; formatted only when there is a problem with it.
type Path<'a> = &'a fmt::Arguments<'a>;

fn rule(direction: Direction, position: usize, written: WrittenRule, found: &mut Findings) -> Rule {
    let path = &format_args!("spec.{direction}[{position}]");
    let (key, peers, misplaced_key, misplaced) = match direction {
        Direction::Ingress => ("from", written.from, "to", written.to),
        Direction::Egress => ("to", written.to, "from", written.from),
    };
    let misplaced = misplaced.is_some().then(|| misplaced_key.to_owned());
    if let Some(unknown) = written.unknown.into_iter().next().or(misplaced) {
        // Without the unknown part the rule would be wider than its author meant.
        found.fail(path, Finding::UnknownKey(unknown));
        return Rule { peers: Peers::Of(Vec::new()), ports: Ports::Of(Vec::new()) };
    }
    let peers = match peers {
        None => Peers::Any,
        Some(list) if list.items.is_empty() => Peers::Any,
        Some(Bounded { items, .. }) => {
            // Not collected in place: that would keep the allocation of the input, which is several times as large.
            let mut peers = Vec::with_capacity(items.len());
            for (position, item) in items.into_iter().enumerate() {
                peers.extend(peer(&format_args!("{path}.{key}[{position}]"), item, found));
            }
            peers.shrink_to_fit();
            Peers::Of(peers)
        }
    };
    let ports = match written.ports {
        None => Ports::Any,
        Some(list) if list.items.is_empty() => Ports::Any,
        Some(Bounded { items, .. }) => {
            let mut ports = Vec::with_capacity(items.len());
            for (position, item) in items.into_iter().enumerate() {
                ports.extend(port(&format_args!("{path}.ports[{position}]"), item, found));
            }
            ports.shrink_to_fit();
            Ports::Of(ports)
        }
    };
    Rule { peers, ports }
}

fn peer(path: Path<'_>, written: WrittenPeer, found: &mut Findings) -> Option<Peer> {
    if let Some(unknown) = written.unknown.into_iter().next() {
        found.fail(path, Finding::UnknownKey(unknown));
        return None;
    }
    let has_selector = written.namespace_selector.is_some() || written.pod_selector.is_some();
    if let Some(block) = written.ip_block {
        if has_selector {
            found.warn(path, Finding::BlockAndSelector);
        }
        return crate::source::read::policy::block(&format_args!("{path}.ipBlock"), block, found);
    }
    if !has_selector {
        found.warn(path, Finding::EmptyPeer);
        return None;
    }
    let mut read = |key: &str, written: Option<Box<labels::Written>>| match written
        .map(|written| Selector::try_from(*written))
    {
        None => Some(None),
        Some(Ok(selector)) => Some(Some(selector)),
        Some(Err(error)) => {
            found.fail(format_args!("{path}.{key}"), Finding::PeerSelector(error));
            None
        }
    };
    let namespaces = read("namespaceSelector", written.namespace_selector);
    let pods = read("podSelector", written.pod_selector);
    Some(Peer::Pods { namespaces: namespaces?, pods: pods?.unwrap_or_default() })
}

fn block(path: Path<'_>, written: WrittenBlock, found: &mut Findings) -> Option<Peer> {
    if let Some(unknown) = written.unknown.into_iter().next() {
        found.fail(path, Finding::UnknownKey(unknown));
        return None;
    }
    let net = prefix(&format_args!("{path}.cidr"), &written.cidr.unwrap_or_default(), found)?;
    let mut except = Vec::new();
    for (position, text) in written.except.unwrap_or_default().items.iter().enumerate() {
        let path = &format_args!("{path}.except[{position}]");
        // An unreadable exception may have meant any part of the block.
        let cut = prefix(path, text, found)?;
        if cut.contains(&net) {
            found.warn(path, Finding::ExceptCovers(cut));
            except.push(cut);
        } else if net.contains(&cut) {
            except.push(cut);
        } else {
            found.fail(path, Finding::ExceptOutside(cut));
        }
    }
    except.shrink_to_fit();
    Some(Peer::Block { net, except })
}

fn prefix(path: Path<'_>, text: &str, found: &mut Findings) -> Option<IpNet> {
    let Some(net) = cidr::parse(text) else {
        found.fail(path, Finding::Cidr(shown(text)));
        return None;
    };
    let canonical = net.trunc();
    if canonical != net {
        found.warn(path, Finding::HostBits { written: shown(text), read_as: canonical });
    }
    Some(canonical)
}

fn port(path: Path<'_>, written: WrittenPort, found: &mut Findings) -> Option<PortTerm> {
    if let Some(unknown) = written.unknown.into_iter().next() {
        found.fail(path, Finding::UnknownKey(unknown));
        return None;
    }
    let protocol = protocol(path, written.protocol, found)?;
    let end = written.end_port.filter(|end| !end.is_null());
    let first = match written.port.filter(|port| !port.is_null()) {
        None => None,
        Some(Value::String(name)) if is_port_name(&name) => {
            return match end {
                None => Some(PortTerm::Named { protocol, name }),
                Some(end) => bad_end(path, &end, found),
            };
        }
        Some(value) => match port_number(&value) {
            Some(number) => Some(number),
            None => {
                found.fail(path, Finding::Port(shown(&value.to_string())));
                return None;
            }
        },
    };
    match (first, end) {
        (None, None) => Some(PortTerm::Protocol(protocol)),
        (Some(first), None) => Some(PortTerm::Range { protocol, first, last: first }),
        (first, Some(end)) => match (first, port_number(&end)) {
            (Some(first), Some(last)) if first <= last => Some(PortTerm::Range { protocol, first, last }),
            _ => bad_end(path, &end, found),
        },
    }
}

fn protocol(path: Path<'_>, written: Option<String>, found: &mut Findings) -> Option<PortProtocol> {
    let Some(word) = written else { return Some(PortProtocol::Tcp) };
    let Some(protocol) = PortProtocol::from_name(&word) else {
        found.fail(path, Finding::Protocol(shown(&word)));
        return None;
    };
    let read_as = match protocol {
        PortProtocol::Tcp => "TCP",
        PortProtocol::Udp => "UDP",
        PortProtocol::Sctp => "SCTP",
    };
    if word != read_as {
        found.warn(path, Finding::Case { written: word, read_as });
    }
    Some(protocol)
}

fn bad_end(path: Path<'_>, end: &Value, found: &mut Findings) -> Option<PortTerm> {
    found.fail(path, Finding::EndPort { end: shown(&end.to_string()) });
    None
}

fn port_number(value: &Value) -> Option<u16> {
    value.as_u64().and_then(|number| u16::try_from(number).ok()).filter(|port| *port != 0)
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
