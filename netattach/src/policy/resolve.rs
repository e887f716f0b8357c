//! Resolves policies: addresses instead of selectors, numbers instead of port names.
//!
//! [`resolve`] makes the lookup tables of one direction of one attachment. The rules that it resolves go to `classes`,
//! which takes their union; `incremental` calls it again only for attachments that a change concerns.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use ipnet::IpNet;

use super::classes::{ResolvedRule, TablesBuilder};
use super::desired::{Condition, Subject};
use super::index::Dhcp;
use super::lookup::{CompiledPolicy, Origin, Traffic};
use super::options::Options;
use super::peers::{Claimant, Peers as KnownPeers};
use super::scope::Scope;
use super::traffic::{one_port, port_blocks};
use crate::npwg::selection::PortProtocol;
use crate::objects::budget::{Excess, FINDINGS, Meter, OF_ADDRESS, PREFIXES};
use crate::objects::policy::{Direction, Peer, Peers, Policy, PolicyKind, PortTerm, Ports, Rule, Severity};
use crate::objects::{ContainerPort, Place, Pod};

/// The input for one direction of one attachment, besides the peers: equal keys have equal tables.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) direction: Direction,
    pub(super) policies: Vec<ByIdentity<Policy>>,
    pub(super) own_ports: NamedPorts,
    pub(super) dhcp: Option<Dhcp>,
    /// The networks of the attachment; `None`: the tables are the same for all networks of the policies.
    pub(super) at: Option<Arc<BTreeSet<Place>>>,
}

/// Findings while tables are computed.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Names that match nothing, and addresses that are not allowed.
    pub(super) conditions: Vec<Condition>,
    /// Attachments on other networks of the policies may get other tables.
    pub(super) is_of_network: bool,
}

/// A shared value, compared by identity: it equals only itself.
#[derive(Debug)]
pub(super) struct ByIdentity<T>(pub(super) Arc<T>);

impl<T> Clone for ByIdentity<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> PartialEq for ByIdentity<T> {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl<T> Eq for ByIdentity<T> {}

impl<T> Hash for ByIdentity<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Arc::as_ptr(&self.0).hash(state);
    }
}

/// Port numbers by protocol and name.
pub(super) type NamedPorts = BTreeMap<(PortProtocol, String), BTreeSet<u16>>;

/// Resolves selectors to addresses and port names to numbers, and computes the tables for an attachment on the networks
/// `at`. Counts the cost, also of what is refused.
///
/// # Errors
/// The rules exceed the budget.
pub(super) fn resolve<'a>(
    key: &Key,
    at: &BTreeSet<Place>,
    options: &Options,
    peers: &KnownPeers,
    places_of: impl Fn(&Policy) -> &'a BTreeSet<Place>,
    found: &mut Found,
    meter: &mut Meter,
) -> Result<CompiledPolicy, Excess> {
    let mut builder = TablesBuilder::new(meter);
    for ByIdentity(policy) in &key.policies {
        let name = Arc::new(policy.name.clone());
        let places = places_of(policy);
        let scope = Scope::new(peers.claims(), policy, places, at);
        let resolving = Resolving { policy, peers, places, scope };
        for (position, rule) in policy.rules(key.direction).iter().enumerate() {
            let origin = Origin::Policy { name: Arc::clone(&name), direction: key.direction, position };
            let resolved = resolving.resolve(key, origin, rule, found, builder.meter)?;
            builder.add(resolved)?;
        }
    }
    for rule in beside_policies(options, key) {
        builder.add(rule)?;
    }
    builder.finish()
}

/// A policy and its possible peers.
struct Resolving<'a> {
    policy: &'a Policy,
    peers: &'a KnownPeers,
    places: &'a BTreeSet<Place>,
    scope: Scope<'a>,
}

impl Resolving<'_> {
    fn resolve(
        &self,
        key: &Key,
        origin: Origin,
        rule: &Rule,
        found: &mut Found,
        meter: &mut Meter,
    ) -> Result<ResolvedRule, Excess> {
        let mut resolved = literal(origin, rule);
        meter.traffic(resolved.traffic.len())?;
        if let Peers::Of(peers) = &rule.peers {
            resolved.hosts = self.hosts(peers, found, meter)?;
        }
        for (protocol, name) in named_terms(&rule.ports) {
            match key.direction {
                Direction::Ingress => {
                    meter.work(1)?;
                    let Some(numbers) = key.own_ports.get(&(protocol, name.to_owned())) else { continue };
                    // A pod may declare many numbers under one name, which each of many rules may name.
                    meter.traffic(numbers.len())?;
                    resolved.traffic.extend(numbers.iter().map(|port| one_port(protocol, *port)));
                }
                Direction::Egress => {
                    if !self.resolve_at_peers(protocol, name, &mut resolved, found, meter)? {
                        let why = "is declared by no pod among the peers";
                        note(&mut found.conditions, unresolved(self.policy, name, why));
                    }
                }
            }
        }
        resolved.traffic.sort_unstable();
        resolved.traffic.dedup();
        Ok(resolved)
    }

    /// Returns the addresses of peers that are selectors, sorted, without duplicates. If several pods have
    /// an address, all must be selected: otherwise a condition is added, one for each rule.
    fn hosts(&self, peers: &[Peer], found: &mut Found, meter: &mut Meter) -> Result<Vec<IpAddr>, Excess> {
        let selectors = peers.iter().filter(|peer| matches!(peer, Peer::Pods { .. }));
        let is_selected = |pod: &_| peers.iter().any(|peer| self.peers.selects(self.policy, peer, pod));
        let weight_of_all: usize = peers.iter().map(Peer::weight).sum();
        let mut hosts: Vec<IpAddr> = Vec::new();
        let mut refused = BTreeSet::new();
        for peer in selectors {
            meter.work(self.peers.len().saturating_mul(peer.weight()).saturating_add(1))?;
            let compared =
                self.peers.claims_of(self.policy, peer, self.places, meter.rest(), |place, address| {
                    let answer = self.scope.is_allowed(place, address, is_selected);
                    found.is_of_network |= answer.is_of_network;
                    // The address belongs to another network and is not visible to this attachment.
                    let is_elsewhere = answer.is_of_network && answer.is_own && !self.scope.is_own(place);
                    if answer.value {
                        hosts.push(address);
                    } else if !is_elsewhere {
                        refused.insert(address);
                    }
                    self.scope.len().saturating_sub(1) + answer.looked_at * weight_of_all
                });
            meter.work(compared)?;
            if hosts.len() > PREFIXES {
                hosts.sort_unstable();
                hosts.dedup();
            }
            if hosts.len() > PREFIXES {
                return Err(Excess::Prefixes);
            }
        }
        hosts.sort_unstable();
        hosts.dedup();
        if let Some(first) = refused.first() {
            note(&mut found.conditions, disputed(self.policy, *first, refused.len()));
        }
        Ok(hosts)
    }

    /// Resolves an egress port name, which is declared by the receiving pod: the number can differ from
    /// peer to peer. Returns whether any peer declares it.
    fn resolve_at_peers(
        &self,
        protocol: PortProtocol,
        name: &str,
        resolved: &mut ResolvedRule,
        found: &mut Found,
        meter: &mut Meter,
    ) -> Result<bool, Excess> {
        // Going over the ports of a pod costs a fraction of what a comparison of addresses does, and a number that it
        // declares under the name as much.
        let looked_at = Cell::new(0_usize);
        // The numbers that all pods with the address declare under the name.
        let numbers_of = |holders: &[Claimant]| {
            let holders = holders.iter().filter(|holder| holder.counts());
            let numbers = holders.map(|holder| {
                let numbers = declared_ports(holder.ports(), protocol, name);
                looked_at.update(|before| before + holder.ports().len() / 8 + numbers.len());
                numbers
            });
            numbers.reduce(|one, other| &one & &other).unwrap_or_default()
        };
        let mut declared = false;
        let parts: usize = resolved.blocks.iter().map(|(_, except)| 1 + except.len()).sum();
        for (address, holders) in self.peers.claims().holders(self.places) {
            let holders = holders.as_slice();
            meter.work(1 + parts + holders.len())?;
            if !resolved.matches(address) {
                continue;
            }
            let numbers = if self.scope.len() > 1 {
                let answer = self.scope.of(address, numbers_of, |one, other| &one & &other);
                meter.work(self.scope.len() + answer.looked_at)?;
                found.is_of_network |= answer.is_of_network;
                answer.value
            } else {
                numbers_of(holders)
            };
            meter.work(looked_at.take())?;
            declared |= !numbers.is_empty();
            meter.traffic(numbers.len() * OF_ADDRESS)?;
            resolved.traffic_of.extend(numbers.into_iter().map(|port| (address, one_port(protocol, port))));
        }
        Ok(declared)
    }
}

/// Adds a condition, up to a bound.
fn note(conditions: &mut Vec<Condition>, condition: Condition) {
    if conditions.len() < FINDINGS {
        conditions.push(condition);
    }
}

/// The conditions of a direction whose rules exceed the budget, one for each of its policies.
pub(super) fn exceeded(key: &Key, excess: Excess) -> impl Iterator<Item = Condition> {
    let message = format!(
        "{excess} together with the other policies of the pods that it selects: these are isolated for {}",
        key.direction
    );
    key.policies.iter().map(move |policy| Condition {
        object: Subject::Policy(policy.0.name.clone()),
        severity: Severity::Error,
        message: message.clone(),
    })
}

/// The numbers of the pod's own ports that ingress rules name. Ports that it does not declare are added to
/// `conditions`.
pub(super) fn ports_of_target(
    isolating: &[Arc<Policy>],
    pod: &Pod,
    conditions: &mut Vec<Condition>,
) -> NamedPorts {
    // Policies can name as many ports as a pod can declare: each is looked up, not searched for.
    let mut declared: BTreeMap<(PortProtocol, &str), BTreeSet<u16>> = BTreeMap::new();
    for port in &pod.ports {
        if let Some(name) = &port.name {
            declared.entry((port.protocol, name.as_str())).or_default().insert(port.port);
        }
    }
    let mut numbers = NamedPorts::new();
    for policy in isolating {
        for (protocol, name) in policy.ingress.iter().flat_map(|rule| named_terms(&rule.ports)) {
            match declared.get(&(protocol, name)) {
                Some(found) => {
                    let key = (protocol, name.to_owned());
                    numbers.entry(key).or_insert_with(|| found.clone());
                }
                None => note_unresolved(policy, name, pod, conditions),
            }
        }
    }
    numbers
}

/// Adds the condition of a port name that the pod does not declare, up to a bound: the others cost nothing.
fn note_unresolved(policy: &Policy, name: &str, pod: &Pod, conditions: &mut Vec<Condition>) {
    if conditions.len() < FINDINGS {
        let why = format!("is not declared by pod {}", pod.name);
        conditions.push(unresolved(policy, name, &why));
    }
}

fn unresolved(policy: &Policy, name: &str, why: &str) -> Condition {
    Condition {
        object: Subject::Policy(policy.name.clone()),
        severity: Severity::Warning,
        message: format!("port name {name:?} {why}: matches nothing there"),
    }
}

fn disputed(policy: &Policy, first: IpAddr, number: usize) -> Condition {
    let more = match number - 1 {
        0 => String::new(),
        more => format!(" (and {more} more like it)"),
    };
    Condition {
        object: Subject::Policy(policy.name.clone()),
        severity: Severity::Warning,
        message: format!(
            "address {first}{more} is claimed by pods that no peer of the rule selects as well: it is not allowed"
        ),
    }
}

/// Whether the policy depends on ports that its peers declare.
pub(super) fn names_ports_of_peers(policy: &Policy) -> bool {
    policy.egress.iter().any(|rule| named_terms(&rule.ports).next().is_some())
}

/// Returns the rules that apply to every isolated attachment, besides its policies.
fn beside_policies(options: &Options, key: &Key) -> impl Iterator<Item = ResolvedRule> {
    let common = match key.direction {
        Direction::Ingress => &options.common.ingress,
        Direction::Egress => &options.common.egress,
    };
    let common = common.iter().map(|(origin, rule)| literal(origin.as_str().into(), rule));
    let of_network_policy = key.policies.iter().any(|policy| policy.0.name.kind == PolicyKind::Network);
    // Traffic to the node's addresses may lead elsewhere: unless it is judged after the address translation, the node
    // is not excepted.
    let ends_there = key.direction == Direction::Ingress || !options.node_may_lead_elsewhere;
    let node = (of_network_policy && ends_there).then(|| ResolvedRule {
        hosts: options.node.iter().copied().collect(),
        traffic: vec![Traffic::Any],
        ..ResolvedRule::of(OF_NODE)
    });
    common.chain(node).chain(key.dhcp.as_ref().map(|dhcp| of_dhcp(dhcp, key.direction)))
}

/// The origin of the rule for the node's addresses.
const OF_NODE: Origin = Origin::OfNode("the pod's own node");

/// Returns the rule for DHCP of an attachment. As a rule has no source port, a named host can be reached
/// from any port: so only servers and relays are named, or the link if these are not known.
fn of_dhcp(dhcp: &Dhcp, direction: Direction) -> ResolvedRule {
    let [everyone, _] = EVERYONE;
    // RFC 2131, section 4.1: servers and relays listen on 67, clients on 68.
    let (port, peers) = match direction {
        Direction::Ingress if dhcp.hears.is_empty() => (68, vec![everyone]),
        Direction::Ingress => (68, dhcp.hears.clone()),
        Direction::Egress => {
            let everybody = IpNet::from(IpAddr::V4(Ipv4Addr::BROADCAST));
            (67, std::iter::once(everybody).chain(dhcp.asks.iter().copied()).collect())
        }
    };
    ResolvedRule {
        blocks: peers.into_iter().map(|peer| (peer, Vec::new())).collect(),
        traffic: vec![one_port(PortProtocol::Udp, port)],
        ..ResolvedRule::of("dhcp of the attachment".into())
    }
}

/// The part of a rule that needs no lookup: blocks and port numbers.
fn literal(origin: Origin, rule: &Rule) -> ResolvedRule {
    let mut resolved = ResolvedRule::of(origin);
    match &rule.peers {
        Peers::Any => resolved.blocks.extend(EVERYONE.map(|net| (net, Vec::new()))),
        Peers::Of(peers) => resolved.blocks.extend(peers.iter().filter_map(|peer| match peer {
            Peer::Block { net, except } => Some((*net, except.clone())),
            Peer::Pods { .. } => None,
        })),
    }
    match &rule.ports {
        Ports::Any => resolved.traffic.push(Traffic::Any),
        Ports::Of(terms) => resolved.traffic.extend(terms.iter().flat_map(numeric_traffic)),
    }
    resolved.traffic.sort_unstable();
    resolved.traffic.dedup();
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

fn declared_ports(ports: &[ContainerPort], protocol: PortProtocol, name: &str) -> BTreeSet<u16> {
    let matching = ports.iter().filter(|p| p.protocol == protocol && p.name.as_deref() == Some(name));
    matching.map(|port| port.port).collect()
}

fn numeric_traffic(term: &PortTerm) -> Vec<Traffic> {
    match term {
        PortTerm::Protocol(protocol) => vec![Traffic::Protocol(protocol.number())],
        PortTerm::Range { protocol, first, last } => port_blocks(*protocol, *first, *last),
        PortTerm::Named { .. } => Vec::new(),
    }
}
