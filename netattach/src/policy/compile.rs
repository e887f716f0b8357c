//! Policies to lookup tables.
//!
//! A longest-prefix lookup gives one answer, while policies are a union of rules. The union is therefore taken
//! here: every prefix that any rule mentions gets the *set* of rules that match an address whose longest
//! mentioned prefix it is; equal sets share a class; and each class gets the union of its rules' ports. The
//! result is exact, exceptions and overlaps included, and costs a packet the same for one rule as for ten
//! thousand.
//!
//! This file puts addresses in the place of selectors and numbers in the place of names; `tables` does the rest.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use super::compiled::{CompiledPolicy, Traffic};
use super::index::{Endpoint, Index, Place};
use super::model::{
    Direction, Inference, Peer, Peers, Policy, PolicyKind, PolicyName, PortTerm, Ports, Rule, Severity,
};
use super::tables::{ResolvedRule, Tables};
use super::traffic::{one_port, port_blocks};
use crate::npwg::Restrictions;
use crate::npwg::selection::PortProtocol;
use crate::source::objects::{ObjectName, Objects, Pod};

/// Choices that the policies leave open.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Options {
    /// What a policy without `policyTypes` isolates.
    pub policy_types_inference: Inference,
    /// Which networks the policies of a namespace may name.
    pub restrictions: Restrictions,
    /// Whether NetworkPolicies hold on the pods' default networks.
    pub network_policy: bool,
    /// Addresses of this node: NetworkPolicies never keep a pod from its own node, nor the node from the pod.
    pub node: BTreeSet<IpAddr>,
    /// What applies beside the policies wherever one isolates.
    pub common: CommonRules,
    /// What becomes of attachments whose new policy does not fit into the maps.
    pub on_overflow: OnOverflow,
}

/// What becomes of attachments whose new policy does not fit into the maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnOverflow {
    /// They keep the policy they had; new ones are isolated completely in the direction that could not be written.
    #[default]
    Keep,
    /// All of them are isolated completely in that direction.
    Deny,
}

/// Rules that apply beside the policies of every isolated attachment: blocks and port numbers only.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CommonRules {
    /// For what comes in.
    pub ingress: Vec<(String, Rule)>,
    /// For what goes out.
    pub egress: Vec<(String, Rule)>,
}

/// What shall be in force on this node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Desired {
    /// What applies to each attachment.
    pub endpoints: BTreeMap<u32, EndpointPolicy>,
    /// Attachments whose pod is unknown, so that nobody can say what selects them: what is in force for them
    /// must stay in force.
    pub undecided: BTreeSet<u32>,
    /// What authors of policies and pods should know, sorted.
    pub conditions: Vec<Condition>,
}

/// What applies to one attachment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EndpointPolicy {
    /// What may come in; `None`: not isolated, everything.
    pub ingress: Option<Arc<CompiledPolicy>>,
    /// What may go out; `None`: not isolated, everything.
    pub egress: Option<Arc<CompiledPolicy>>,
    /// The policies that select the attachment, in the order of their names.
    pub policies: Vec<PolicyName>,
}

/// Something that an object's author should know.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Condition {
    /// About what.
    pub object: Subject,
    /// How much it matters.
    pub severity: Severity,
    /// What, in one line.
    pub message: String,
}

/// What a condition is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    /// A policy.
    Policy(PolicyName),
    /// A pod.
    Pod(ObjectName),
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Policy(name) if name.kind == PolicyKind::Multi => write!(f, "multi-networkpolicy {name}"),
            Self::Policy(name) => write!(f, "{name}"),
            Self::Pod(name) => write!(f, "pod {name}"),
        }
    }
}

/// Works out what shall be in force for every attachment of this node.
///
/// Attachments to which the same rules apply share one [`CompiledPolicy`].
pub fn compile(objects: &Objects, endpoints: &[Endpoint], options: &Options) -> Desired {
    let mut conditions = BTreeSet::new();
    let index = Index::new(objects, endpoints, options, &mut conditions);
    conditions.extend(index.policies().flat_map(conditions_of));
    let mut compiler = Compiler { index, options, conditions, done: HashMap::new(), shared: HashSet::new() };
    let mut desired = Desired::default();
    for endpoint in endpoints {
        match objects.pods.get(&endpoint.pod) {
            Some(pod) => {
                desired.endpoints.insert(endpoint.id, compiler.endpoint(endpoint, pod));
            }
            None => {
                desired.undecided.insert(endpoint.id);
                compiler.conditions.insert(Condition {
                    object: Subject::Pod(endpoint.pod.clone()),
                    severity: Severity::Warning,
                    message: format!(
                        "is attached to {} but unknown: its policies stay as they are",
                        endpoint.at.first().unwrap_or(&Place::Default)
                    ),
                });
            }
        }
    }
    desired.conditions = compiler.conditions.into_iter().collect();
    desired
}

fn conditions_of(policy: &Policy) -> impl Iterator<Item = Condition> {
    policy.problems.iter().map(|problem| Condition {
        object: Subject::Policy(policy.name.clone()),
        severity: problem.severity,
        message: problem.to_string(),
    })
}

/// What one direction of one attachment depends on: equal keys, equal tables.
#[derive(PartialEq, Eq, Hash)]
struct Key<'a> {
    direction: Direction,
    policies: Vec<&'a PolicyName>,
    own_ports: NamedPorts,
    dhcp: bool,
}

/// Port numbers by protocol and name.
type NamedPorts = BTreeMap<(PortProtocol, String), BTreeSet<u16>>;

struct Compiler<'a> {
    index: Index<'a>,
    options: &'a Options,
    conditions: BTreeSet<Condition>,
    done: HashMap<Key<'a>, Arc<CompiledPolicy>>,
    shared: HashSet<Arc<CompiledPolicy>>,
}

impl<'a> Compiler<'a> {
    fn endpoint(&mut self, endpoint: &Endpoint, pod: &Pod) -> EndpointPolicy {
        let selecting = self.index.selecting(pod, &endpoint.at);
        EndpointPolicy {
            ingress: self.direction(Direction::Ingress, &selecting, endpoint, pod),
            egress: self.direction(Direction::Egress, &selecting, endpoint, pod),
            policies: selecting.iter().map(|policy| policy.name.clone()).collect(),
        }
    }

    fn direction(
        &mut self,
        direction: Direction,
        selecting: &[&'a Policy],
        endpoint: &Endpoint,
        pod: &Pod,
    ) -> Option<Arc<CompiledPolicy>> {
        let inference = self.options.policy_types_inference;
        let isolating: Vec<&Policy> =
            selecting.iter().copied().filter(|policy| policy.isolates(direction, inference)).collect();
        if isolating.is_empty() {
            return None;
        }
        let own_ports = match direction {
            Direction::Ingress => self.ports_of_target(&isolating, pod),
            Direction::Egress => NamedPorts::new(),
        };
        let key = Key {
            direction,
            policies: isolating.iter().map(|policy| &policy.name).collect(),
            own_ports,
            dhcp: endpoint.dhcp,
        };
        if let Some(done) = self.done.get(&key) {
            return Some(Arc::clone(done));
        }
        let mut tables = Tables::default();
        for policy in isolating {
            for (position, rule) in policy.rules(direction).iter().enumerate() {
                tables.add(self.resolve(policy, direction, position, rule, &key.own_ports));
            }
        }
        beside_policies(self.options, &key).for_each(|rule| tables.add(rule));
        let compiled = self.share(tables.finish());
        self.done.insert(key, Arc::clone(&compiled));
        Some(compiled)
    }

    /// One value for equal contents, also where different policies lead to them.
    fn share(&mut self, compiled: CompiledPolicy) -> Arc<CompiledPolicy> {
        match self.shared.get(&compiled) {
            Some(same) => Arc::clone(same),
            None => {
                let compiled = Arc::new(compiled);
                self.shared.insert(Arc::clone(&compiled));
                compiled
            }
        }
    }

    /// The numbers of the pod's own ports that ingress rules name.
    fn ports_of_target(&mut self, isolating: &[&Policy], pod: &Pod) -> NamedPorts {
        let mut numbers = NamedPorts::new();
        for policy in isolating {
            for (protocol, name) in policy.ingress.iter().flat_map(|rule| named_terms(&rule.ports)) {
                let found = declared_ports(pod, protocol, name);
                if found.is_empty() {
                    self.unresolved(policy, name, &format!("is not declared by pod {}", pod.name));
                } else {
                    numbers.insert((protocol, name.to_owned()), found);
                }
            }
        }
        numbers
    }

    fn unresolved(&mut self, policy: &Policy, name: &str, why: &str) {
        self.conditions.insert(Condition {
            object: Subject::Policy(policy.name.clone()),
            severity: Severity::Warning,
            message: format!("port name {name:?} {why}: matches nothing there"),
        });
    }

    /// Puts addresses and numbers in the place of selectors and names.
    fn resolve(
        &mut self,
        policy: &Policy,
        direction: Direction,
        position: usize,
        rule: &Rule,
        own_ports: &NamedPorts,
    ) -> ResolvedRule {
        let mut resolved = literal(format!("{} {direction}[{position}]", policy.name), rule);
        if let Peers::Of(peers) = &rule.peers {
            for peer in peers {
                resolved.hosts.extend(self.index.addresses_of(policy, peer));
            }
        }
        for (protocol, name) in named_terms(&rule.ports) {
            match direction {
                Direction::Ingress => {
                    let numbers = own_ports.get(&(protocol, name.to_owned())).into_iter().flatten();
                    resolved.traffic.extend(numbers.map(|port| one_port(protocol, *port)));
                }
                Direction::Egress => self.resolve_at_peers(policy, protocol, name, &mut resolved),
            }
        }
        resolved
    }

    /// On the way out a port's name is that of the receiving pod: its number can differ from peer to peer.
    fn resolve_at_peers(
        &mut self,
        policy: &Policy,
        protocol: PortProtocol,
        name: &str,
        resolved: &mut ResolvedRule,
    ) {
        let mut declared = false;
        for (address, pod) in self.index.pods_on(policy) {
            if !resolved.matches(address) {
                continue;
            }
            let numbers = declared_ports(pod, protocol, name);
            if !numbers.is_empty() {
                declared = true;
                let traffic = numbers.into_iter().map(|port| one_port(protocol, port));
                resolved.traffic_of.entry(address).or_default().extend(traffic);
            }
        }
        if !declared {
            self.unresolved(policy, name, "is declared by no pod among the peers");
        }
    }
}

/// What applies to an isolated attachment whatever its policies say.
fn beside_policies(options: &Options, key: &Key<'_>) -> impl Iterator<Item = ResolvedRule> {
    let common = match key.direction {
        Direction::Ingress => &options.common.ingress,
        Direction::Egress => &options.common.egress,
    };
    let common = common.iter().map(|(origin, rule)| literal(origin.clone(), rule));
    let of_network_policy = key.policies.iter().any(|name| name.kind == PolicyKind::Network);
    let node = of_network_policy.then(|| ResolvedRule {
        hosts: options.node.clone(),
        traffic: BTreeSet::from([Traffic::Any]),
        ..ResolvedRule::of("the pod's own node".to_owned())
    });
    let dhcp = key.dhcp.then(|| {
        // RFC 2131 section 4.1, RFC 8415 section 7.2: servers listen on the first of each, clients on the second.
        let ports: [u16; 2] = match key.direction {
            Direction::Ingress => [68, 546],
            Direction::Egress => [67, 547],
        };
        let [v4, v6] = EVERYONE;
        ResolvedRule {
            blocks: vec![(v4, Vec::new()), (v6, Vec::new())],
            traffic: ports.map(|port| one_port(PortProtocol::Udp, port)).into(),
            ..ResolvedRule::of("dhcp of the attachment".to_owned())
        }
    });
    common.chain(node).chain(dhcp)
}

/// What a rule says without asking who has which address or port name.
fn literal(origin: String, rule: &Rule) -> ResolvedRule {
    let mut resolved = ResolvedRule::of(origin);
    match &rule.peers {
        Peers::Any => resolved.blocks.extend(EVERYONE.map(|net| (net, Vec::new()))),
        Peers::Of(peers) => resolved.blocks.extend(peers.iter().filter_map(|peer| match peer {
            Peer::Block { net, except } => Some((*net, except.clone())),
            Peer::Pods { .. } => None,
        })),
    }
    match &rule.ports {
        Ports::Any => {
            resolved.traffic.insert(Traffic::Any);
        }
        Ports::Of(terms) => resolved.traffic.extend(terms.iter().flat_map(numeric_traffic)),
    }
    resolved
}

/// The two prefixes that together hold every address.
const EVERYONE: [IpNet; 2] = [
    IpNet::V4(ipnet::Ipv4Net::new_assert(std::net::Ipv4Addr::UNSPECIFIED, 0)),
    IpNet::V6(ipnet::Ipv6Net::new_assert(std::net::Ipv6Addr::UNSPECIFIED, 0)),
];

fn named_terms(ports: &Ports) -> impl Iterator<Item = (PortProtocol, &str)> {
    let terms = match ports {
        Ports::Any => &[],
        Ports::Of(terms) => terms.as_slice(),
    };
    terms.iter().filter_map(|term| match term {
        PortTerm::Named { protocol, name } => Some((*protocol, name.as_str())),
        PortTerm::Protocol(_) | PortTerm::Range { .. } => None,
    })
}

fn declared_ports(pod: &Pod, protocol: PortProtocol, name: &str) -> BTreeSet<u16> {
    let matching = pod.ports.iter().filter(|p| p.protocol == protocol && p.name.as_deref() == Some(name));
    matching.map(|port| port.port).collect()
}

fn numeric_traffic(term: &PortTerm) -> Vec<Traffic> {
    match term {
        PortTerm::Protocol(protocol) => vec![Traffic::Protocol(protocol.number())],
        PortTerm::Range { protocol, first, last } => port_blocks(*protocol, *first, *last),
        PortTerm::Named { .. } => Vec::new(),
    }
}

#[cfg(test)]
#[path = "compile_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "compile_properties.rs"]
mod properties;
