//! Rules in addresses and numbers to the tables of one direction: prefixes to classes, classes to ports.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use ipnet::IpNet;

use super::compiled::{ClassId, CompiledPolicy, PortPrefix, RuleId, Traffic};
use super::traffic::wider;

/// A rule in addresses and numbers.
pub(super) struct ResolvedRule {
    /// What the rule is called in explanations.
    pub(super) origin: String,
    /// Blocks with what is cut out of them.
    pub(super) blocks: Vec<(IpNet, Vec<IpNet>)>,
    /// Single addresses.
    pub(super) hosts: BTreeSet<IpAddr>,
    /// What is allowed to and from every peer.
    pub(super) traffic: BTreeSet<Traffic>,
    /// What is allowed besides to single peers.
    pub(super) traffic_of: BTreeMap<IpAddr, BTreeSet<Traffic>>,
}

impl ResolvedRule {
    /// One that allows nothing yet.
    pub(super) fn of(origin: String) -> Self {
        Self {
            origin,
            blocks: Vec::new(),
            hosts: BTreeSet::new(),
            traffic: BTreeSet::new(),
            traffic_of: BTreeMap::new(),
        }
    }

    /// Whether the rule is about `address`.
    pub(super) fn matches(&self, address: IpAddr) -> bool {
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
pub(super) struct Tables {
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
    /// Adds the next rule.
    pub(super) fn add(&mut self, rule: ResolvedRule) {
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
    pub(super) fn finish(self) -> CompiledPolicy {
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
pub(super) const NOTHING: ClassId = netattach_common::decide::NOTHING;

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
