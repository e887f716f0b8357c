//! Policies to lookup tables.
//!
//! A longest-prefix lookup gives one answer, while policies are a union of rules. The union is therefore taken
//! here: every prefix that any rule mentions gets the *set* of rules that match an address whose longest
//! mentioned prefix it is; equal sets share a class; and each class gets the union of its rules' ports. The
//! result is exact, exceptions and overlaps included, and costs a packet the same for one rule as for ten
//! thousand.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use super::compiled::{ClassId, CompiledPolicy, PortPrefix, RuleId, Traffic};
use super::index::{Endpoint, Index};
use super::model::{Direction, Inference, Peer, Peers, Policy, PortTerm, Ports, Rule, Severity};
use crate::npwg::selection::PortProtocol;
use crate::source::objects::{ObjectName, Objects, Pod};

/// Choices that the policies leave open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Options {
    /// What a policy without `policyTypes` isolates.
    pub policy_types_inference: Inference,
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
    pub policies: Vec<ObjectName>,
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
    /// A MultiNetworkPolicy.
    Policy(ObjectName),
    /// A pod.
    Pod(ObjectName),
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Policy(name) => write!(f, "multi-networkpolicy {name}"),
            Self::Pod(name) => write!(f, "pod {name}"),
        }
    }
}

/// Works out what shall be in force for every attachment of this node.
///
/// Attachments to which the same rules apply share one [`CompiledPolicy`].
pub fn compile(objects: &Objects, endpoints: &[Endpoint], options: Options) -> Desired {
    let mut conditions: BTreeSet<Condition> = objects.policies.values().flat_map(conditions_of).collect();
    let index = Index::new(objects, endpoints, &mut conditions);
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
                        endpoint.network
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
type Key<'a> = (Direction, Vec<&'a ObjectName>, NamedPorts);

/// Port numbers by protocol and name.
type NamedPorts = BTreeMap<(PortProtocol, String), BTreeSet<u16>>;

struct Compiler<'a> {
    index: Index<'a>,
    options: Options,
    conditions: BTreeSet<Condition>,
    done: HashMap<Key<'a>, Arc<CompiledPolicy>>,
    shared: HashSet<Arc<CompiledPolicy>>,
}

impl<'a> Compiler<'a> {
    fn endpoint(&mut self, endpoint: &Endpoint, pod: &Pod) -> EndpointPolicy {
        let selecting = self.index.selecting(pod, &endpoint.network);
        EndpointPolicy {
            ingress: self.direction(Direction::Ingress, &selecting, pod),
            egress: self.direction(Direction::Egress, &selecting, pod),
            policies: selecting.iter().map(|policy| policy.name.clone()).collect(),
        }
    }

    fn direction(
        &mut self,
        direction: Direction,
        selecting: &[&'a Policy],
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
        let key: Key<'a> = (direction, isolating.iter().map(|policy| &policy.name).collect(), own_ports);
        if let Some(done) = self.done.get(&key) {
            return Some(Arc::clone(done));
        }
        let mut tables = Tables::default();
        for policy in isolating {
            for (position, rule) in policy.rules(direction).iter().enumerate() {
                tables.add(self.resolve(policy, direction, position, rule, &key.2));
            }
        }
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
        let mut resolved = ResolvedRule {
            origin: format!("{} {direction}[{position}]", policy.name),
            blocks: Vec::new(),
            hosts: BTreeSet::new(),
            traffic: BTreeSet::new(),
            traffic_of: BTreeMap::new(),
        };
        match &rule.peers {
            Peers::Any => resolved.blocks.extend(EVERYONE.map(|net| (net, Vec::new()))),
            Peers::Of(peers) => {
                for peer in peers {
                    if let Peer::Block { net, except } = peer {
                        resolved.blocks.push((*net, except.clone()));
                    }
                    resolved.hosts.extend(self.index.addresses_of(policy, peer));
                }
            }
        }
        match &rule.ports {
            Ports::Any => {
                resolved.traffic.insert(Traffic::Any);
            }
            Ports::Of(terms) => resolved.traffic.extend(terms.iter().flat_map(numeric_traffic)),
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

fn one_port(protocol: PortProtocol, port: u16) -> Traffic {
    Traffic::Ports { protocol: protocol.number(), port, bits: 16 }
}

/// The fewest blocks that make up a range of ports, at most 30. `first` is not 0, so no block is all ports.
fn port_blocks(protocol: PortProtocol, first: u16, last: u16) -> Vec<Traffic> {
    let mut blocks = Vec::new();
    let (mut low, last) = (u32::from(first.max(1)), u32::from(last));
    while low <= last {
        let mut size = 1 << low.trailing_zeros();
        while low + size - 1 > last {
            size /= 2;
        }
        let bits = 16 - size.trailing_zeros();
        // Both are at most 16 bits wide: `low` by the loop's condition, `bits` because `size` is at least 1.
        #[expect(clippy::cast_possible_truncation, reason = "see above")]
        blocks.push(Traffic::Ports { protocol: protocol.number(), port: low as u16, bits: bits as u8 });
        low += size;
    }
    blocks
}

/// A rule in addresses and numbers.
struct ResolvedRule {
    origin: String,
    /// Blocks with what is cut out of them.
    blocks: Vec<(IpNet, Vec<IpNet>)>,
    hosts: BTreeSet<IpAddr>,
    /// What is allowed to and from every peer.
    traffic: BTreeSet<Traffic>,
    /// What is allowed besides to single peers.
    traffic_of: BTreeMap<IpAddr, BTreeSet<Traffic>>,
}

impl ResolvedRule {
    fn matches(&self, address: IpAddr) -> bool {
        self.hosts.contains(&address)
            || self.blocks.iter().any(|(net, except)| {
                net.contains(&address) && !except.iter().any(|cut| cut.contains(&address))
            })
    }
}

/// Number of a grant: one rule's traffic, for all of its peers or for some.
type GrantId = usize;

/// Collects rules and works out the tables of one direction.
#[derive(Default)]
struct Tables {
    rules: BTreeMap<RuleId, String>,
    grants: Vec<(RuleId, BTreeSet<Traffic>)>,
    /// The grant of each block.
    blocks: Vec<GrantId>,
    marks: BTreeMap<IpNet, Mark>,
}

/// What changes at a prefix, compared with the next wider one.
#[derive(Default)]
struct Mark {
    /// Blocks that begin here.
    begins: Vec<usize>,
    /// Blocks that have an exception here.
    cut: Vec<usize>,
    /// Grants of this very address.
    grants: Vec<GrantId>,
}

impl Tables {
    fn add(&mut self, rule: ResolvedRule) {
        let id = RuleId::try_from(self.rules.len() + 1).unwrap_or(RuleId::MAX);
        for (address, traffic) in rule.traffic_of {
            let grant = self.grant(id, traffic);
            self.marks.entry(IpNet::from(address)).or_default().grants.push(grant);
        }
        if !rule.traffic.is_empty() {
            let grant = self.grant(id, rule.traffic);
            for address in rule.hosts {
                self.marks.entry(IpNet::from(address)).or_default().grants.push(grant);
            }
            for (net, except) in rule.blocks {
                self.add_block(grant, net, &except);
            }
        }
        self.rules.insert(id, rule.origin);
    }

    fn grant(&mut self, rule: RuleId, traffic: BTreeSet<Traffic>) -> GrantId {
        // Rules come one by one, so an equal grant can only be among the last; most often it is the last.
        match self.grants.last() {
            Some(last) if *last == (rule, traffic.clone()) => {}
            _ => self.grants.push((rule, traffic)),
        }
        self.grants.len() - 1
    }

    fn add_block(&mut self, grant: GrantId, net: IpNet, except: &[IpNet]) {
        if except.iter().any(|cut| cut.contains(&net)) {
            return;
        }
        let block = self.blocks.len();
        self.blocks.push(grant);
        self.marks.entry(net).or_default().begins.push(block);
        for cut in except.iter().filter(|cut| net.contains(*cut)) {
            self.marks.entry(*cut).or_default().cut.push(block);
        }
    }

    /// Goes through the prefixes from wide to narrow, keeping those that enclose the current one on a stack.
    ///
    /// A prefix whose class is that of the next wider one is left out: the lookup finds the same without it.
    fn finish(self) -> CompiledPolicy {
        let mut classes = Classes::new(&self.grants);
        let mut peers = BTreeMap::new();
        let mut enclosing: Vec<(IpNet, BTreeSet<usize>, ClassId)> = Vec::new();
        // The order of `IpNet` is by address and then by length, so a prefix comes before all that it holds.
        for (net, mark) in &self.marks {
            while enclosing.last().is_some_and(|(outer, ..)| !outer.contains(net)) {
                enclosing.pop();
            }
            let (mut active, outer_class) = match enclosing.last() {
                Some((_, active, class)) => (active.clone(), *class),
                None => (BTreeSet::new(), NOTHING),
            };
            active.extend(&mark.begins);
            for block in &mark.cut {
                active.remove(block);
            }
            let of_blocks = active.iter().map(|block| self.blocks[*block]);
            let class = classes.number(of_blocks.chain(mark.grants.iter().copied()).collect());
            if class != outer_class {
                peers.insert(*net, class);
            }
            enclosing.push((*net, active, class));
        }
        let ports = classes.into_ports(&peers);
        CompiledPolicy { peers, ports, rules: self.rules }
    }
}

/// The class that allows nothing: of addresses cut out of a block, and of those in no prefix at all.
const NOTHING: ClassId = 1;

/// Numbers sets of grants. Sets that allow the same by the same rules get the same number.
struct Classes<'a> {
    grants: &'a [(RuleId, BTreeSet<Traffic>)],
    by_grants: HashMap<BTreeSet<GrantId>, ClassId>,
    by_content: HashMap<BTreeMap<Traffic, RuleId>, ClassId>,
}

impl<'a> Classes<'a> {
    fn new(grants: &'a [(RuleId, BTreeSet<Traffic>)]) -> Self {
        Self {
            grants,
            by_grants: HashMap::from([(BTreeSet::new(), NOTHING)]),
            by_content: HashMap::from([(BTreeMap::new(), NOTHING)]),
        }
    }

    fn number(&mut self, grants: BTreeSet<GrantId>) -> ClassId {
        if let Some(class) = self.by_grants.get(&grants) {
            return *class;
        }
        let content = self.content(&grants);
        let next = ClassId::try_from(self.by_content.len() + 1).unwrap_or(ClassId::MAX);
        let class = *self.by_content.entry(content).or_insert(next);
        self.by_grants.insert(grants, class);
        class
    }

    /// What a set of grants allows, by the first rule that does; without what something wider allows as well.
    fn content(&self, grants: &BTreeSet<GrantId>) -> BTreeMap<Traffic, RuleId> {
        let mut all: BTreeMap<Traffic, RuleId> = BTreeMap::new();
        for (rule, traffic) in grants.iter().map(|grant| &self.grants[*grant]) {
            for traffic in traffic {
                let first = all.entry(*traffic).or_insert(*rule);
                *first = (*first).min(*rule);
            }
        }
        let covered = |traffic: &Traffic| wider(*traffic).any(|wide| all.contains_key(&wide));
        all.iter().filter(|(traffic, _)| !covered(traffic)).map(|(traffic, rule)| (*traffic, *rule)).collect()
    }

    fn into_ports(self, peers: &BTreeMap<IpNet, ClassId>) -> BTreeMap<PortPrefix, RuleId> {
        let used: BTreeSet<ClassId> = peers.values().copied().collect();
        let entries = self.by_content.into_iter().filter(|(_, class)| used.contains(class));
        entries
            .flat_map(|(content, class)| {
                content.into_iter().map(move |(traffic, rule)| (PortPrefix { class, traffic }, rule))
            })
            .collect()
    }
}

/// Every traffic that holds this one and is not the same, from narrow to wide.
pub(super) fn wider(traffic: Traffic) -> impl Iterator<Item = Traffic> {
    let (protocol, port, bits) = match traffic {
        Traffic::Any => (None, 0, 0),
        Traffic::Protocol(_) => (None, 0, 0),
        Traffic::Ports { protocol, port, bits } => (Some(protocol), port, bits),
    };
    let blocks = (1..bits).rev().map(move |bits| Traffic::Ports {
        protocol: protocol.unwrap_or_default(),
        port: port & (u16::MAX << (16 - bits)),
        bits,
    });
    let any = (traffic != Traffic::Any).then_some(Traffic::Any);
    blocks.chain(protocol.map(Traffic::Protocol)).chain(any)
}

#[cfg(test)]
#[path = "compile_tests.rs"]
mod tests;
