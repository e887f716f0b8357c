//! Rules in addresses and numbers to the tables of one direction: prefixes to classes, classes to ports.
//!
//! A longest-prefix lookup gives one answer, while policies are a union of rules. The union is therefore taken here:
//! every prefix that any rule mentions gets the *set* of rules that match an address whose longest mentioned prefix it
//! is; equal sets share a class; and each class gets the union of its rules' ports. The result is exact, exceptions and
//! overlaps included, and costs a packet the same for one rule as for ten thousand.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;

use ipnet::IpNet;

use super::lookup::{ClassId, CompiledPolicy, Origin, PortPrefix, RuleId, Traffic};
use super::traffic::wider;
use crate::objects::budget::{ENTRIES, Excess, Meter};

/// A rule in addresses and numbers.
pub(super) struct ResolvedRule {
    /// The name of the rule in explanations.
    pub(super) origin: Origin,
    /// Blocks with their exceptions.
    pub(super) blocks: Vec<(IpNet, Vec<IpNet>)>,
    /// Single addresses, in order.
    pub(super) hosts: Vec<IpAddr>,
    /// Traffic that is allowed for every peer, sorted, without duplicates.
    pub(super) traffic: Vec<Traffic>,
    /// Further traffic that is allowed for single peers, in any order. A list, as a set for each peer would take several
    /// times the memory.
    pub(super) traffic_of: Vec<(IpAddr, Traffic)>,
}

impl ResolvedRule {
    /// A rule that allows nothing yet.
    pub(super) fn of(origin: Origin) -> Self {
        Self { origin, blocks: Vec::new(), hosts: Vec::new(), traffic: Vec::new(), traffic_of: Vec::new() }
    }

    /// Whether the rule names `address` as a peer.
    pub(super) fn matches(&self, address: IpAddr) -> bool {
        self.hosts.binary_search(&address).is_ok()
            || self.blocks.iter().any(|(net, except)| {
                net.contains(&address) && !except.iter().any(|cut| cut.contains(&address))
            })
    }
}

/// Number of a grant: one rule's traffic, for all peers of the rule or for some. There are at most as many as prefixes
/// and blocks, and the budget bounds both.
type GrantId = u32;

/// Number of a block, from 0.
type BlockId = u32;

/// Cached sets hold at most this many grants together. The traffic of further sets is computed each time.
const REMEMBERED: usize = 1 << 20;

/// The prefixes on the stack of [`TablesBuilder::finish`] list at most this many blocks together.
const ENCLOSING: usize = 1 << 20;

/// Collects rules and computes the tables of one direction, within the budget.
pub(super) struct TablesBuilder<'m> {
    pub(super) meter: &'m mut Meter,
    rules: Vec<Origin>,
    grants: Grants,
    /// The grant of each block.
    blocks: Vec<GrantId>,
    marks: Vec<(IpNet, Mark)>,
}

/// A change at a prefix, compared with the next wider one.
#[derive(Debug, Clone, Copy)]
enum Mark {
    /// A block begins here.
    Begins(BlockId),
    /// A block has an exception here.
    Cut(BlockId),
    /// A grant for this single address.
    Grant(GrantId),
}

/// A prefix that contains the current one.
struct Enclosing {
    net: IpNet,
    /// The blocks that contain all of it.
    blocks: Vec<BlockId>,
    class: ClassId,
}

/// The grants of all rules. Their traffic is stored in one vector: a large policy has a grant for each rule, and an
/// allocation for each would be most of the memory.
#[derive(Default)]
struct Grants {
    /// The rule of each grant and the start of its traffic, which ends at the start of the next.
    all: Vec<(RuleId, u32)>,
    traffic: Vec<Traffic>,
    /// The rule that holds only as [`Origin::OfNode`] says. There is one at most.
    of_node: Option<RuleId>,
}

impl Grants {
    fn len(&self) -> usize {
        self.all.len()
    }

    /// Adds traffic, which is sorted and has no duplicates.
    fn push(&mut self, rule: RuleId, traffic: &[Traffic]) -> GrantId {
        // Rules are added one by one: an equal grant is most often the last.
        let last = self.all.len().checked_sub(1);
        match last {
            Some(last) if self.get(last as GrantId) == (rule, traffic) => {}
            _ => {
                self.all.push((rule, number(self.traffic.len())));
                self.traffic.extend_from_slice(traffic);
            }
        }
        number(self.all.len() - 1)
    }

    /// An existing grant.
    fn get(&self, id: GrantId) -> (RuleId, &[Traffic]) {
        let (rule, begin) = self.all[id as usize];
        let end = self.all.get(id as usize + 1).map_or(self.traffic.len(), |(_, next)| *next as usize);
        (rule, &self.traffic[begin as usize..end])
    }
}

/// A position as a number. The budget keeps positions far below the limit.
fn number(position: usize) -> u32 {
    u32::try_from(position).unwrap_or(u32::MAX)
}

impl<'m> TablesBuilder<'m> {
    /// Begins without rules. The meter counts their cost.
    pub(super) fn new(meter: &'m mut Meter) -> Self {
        Self { meter, rules: Vec::new(), grants: Grants::default(), blocks: Vec::new(), marks: Vec::new() }
    }

    /// Adds the next rule.
    pub(super) fn add(&mut self, mut rule: ResolvedRule) -> Result<(), Excess> {
        let cuts: usize = rule.blocks.iter().map(|(_, except)| 1 + except.len()).sum();
        rule.traffic_of.sort_unstable();
        rule.traffic_of.dedup();
        let of_addresses = || rule.traffic_of.chunk_by(|(one, _), (next, _)| one == next);
        self.meter.prefixes(of_addresses().count() + rule.hosts.len() + cuts)?;
        if rule.traffic.len() > ENTRIES {
            return Err(Excess::Entries);
        }
        let id = RuleId::try_from(self.rules.len() + 1).unwrap_or(RuleId::MAX);
        if matches!(rule.origin, Origin::OfNode(_)) {
            self.grants.of_node = Some(id);
        }
        let mut traffic = Vec::new();
        for of_address in of_addresses() {
            let Some((address, _)) = of_address.first() else { continue };
            traffic.clear();
            traffic.extend(of_address.iter().map(|(_, traffic)| *traffic));
            let grant = self.grants.push(id, &traffic);
            self.marks.push((IpNet::from(*address), Mark::Grant(grant)));
        }
        if !rule.traffic.is_empty() {
            let grant = self.grants.push(id, &rule.traffic);
            self.marks.extend(rule.hosts.into_iter().map(|host| (IpNet::from(host), Mark::Grant(grant))));
            for (net, except) in rule.blocks {
                self.add_block(grant, net, &except);
            }
        }
        self.rules.push(rule.origin);
        Ok(())
    }

    fn add_block(&mut self, grant: GrantId, net: IpNet, except: &[IpNet]) {
        if except.iter().any(|cut| cut.contains(&net)) {
            return;
        }
        let block = number(self.blocks.len());
        self.blocks.push(grant);
        self.marks.push((net, Mark::Begins(block)));
        let cuts = except.iter().filter(|cut| net.contains(*cut));
        self.marks.extend(cuts.map(|cut| (*cut, Mark::Cut(block))));
    }

    /// Walks the prefixes from wide to narrow and keeps those that enclose the current one on a stack.
    ///
    /// A prefix with the class of the next wider one is left out: the lookup finds the same class without it.
    pub(super) fn finish(mut self) -> Result<CompiledPolicy, Excess> {
        let mut classes = Classes::new(self.grants);
        let mut in_enclosing = 0;
        let mut peers = Vec::with_capacity(self.marks.len());
        let mut enclosing: Vec<Enclosing> = Vec::new();
        // Most prefixes are single addresses, which keep neither: the memory is reused.
        let (mut blocks, mut grants) = (Vec::new(), Vec::new());
        // `IpNet` is ordered by address, then by length, so a prefix comes before all prefixes inside it.
        self.marks.sort_unstable_by_key(|(net, _)| *net);
        for marks in self.marks.chunk_by(|(one, _), (next, _)| one == next) {
            let Some((net, _)) = marks.first() else { continue };
            while let Some(outer) = enclosing.pop_if(|outer| !outer.net.contains(net)) {
                in_enclosing -= outer.blocks.len();
            }
            blocks.clear();
            grants.clear();
            let outer_class = enclosing.last().map_or(NOTHING, |outer| {
                blocks.extend_from_slice(&outer.blocks);
                outer.class
            });
            for (_, mark) in marks {
                match mark {
                    Mark::Begins(block) => blocks.push(*block),
                    Mark::Cut(_) => {}
                    Mark::Grant(grant) => grants.push(*grant),
                }
            }
            self.meter.work(marks.len() + blocks.len())?;
            for (_, mark) in marks {
                if let Mark::Cut(cut) = mark {
                    self.meter.work(blocks.len())?;
                    blocks.retain(|block| block != cut);
                }
            }
            grants.extend(blocks.iter().map(|block| self.blocks[*block as usize]));
            grants.sort_unstable();
            grants.dedup();
            let class = classes.number(&grants, self.meter)?;
            if class != outer_class {
                peers.push((*net, class));
            }
            // No prefix is inside a single address.
            if net.prefix_len() < net.max_prefix_len() {
                in_enclosing += blocks.len();
                if in_enclosing > ENCLOSING {
                    return Err(Excess::Work);
                }
                enclosing.push(Enclosing { net: *net, blocks: blocks.clone(), class });
            }
        }
        // Freed before the tables are built, so that the two are never in memory together.
        drop((self.marks, self.blocks));
        let ports = classes.into_ports(&peers);
        Ok(CompiledPolicy {
            peers: peers.into_iter().collect(),
            ports,
            rules: (1..).zip(self.rules).collect(),
        })
    }
}

/// The class that allows nothing: for addresses that a block excepts, and for those in no prefix at all.
pub(super) const NOTHING: ClassId = netattach_common::decide::NOTHING;

/// The traffic that a class allows, sorted, each with the first rule that allows it.
type Content = Vec<(Traffic, RuleId)>;

/// Gives sets of grants their class numbers. Sets that allow the same traffic by the same rules share a number.
struct Classes {
    grants: Grants,
    /// The class of each single grant, which most addresses have; 0: not computed yet.
    of_one: Vec<ClassId>,
    of_several: HashMap<Vec<GrantId>, ClassId>,
    remembered: usize,
    by_content: HashMap<Content, ClassId>,
}

impl Classes {
    fn new(grants: Grants) -> Self {
        let of_one = vec![0; grants.len()];
        let by_content = Self::room_for(grants.len());
        Self { grants, of_one, of_several: HashMap::new(), remembered: 0, by_content }
    }

    fn room_for(classes: usize) -> HashMap<Content, ClassId> {
        let mut by_content = HashMap::with_capacity(classes + 1);
        by_content.insert(Content::new(), NOTHING);
        by_content
    }

    /// The class of a set of grants, which is sorted and has no duplicates.
    fn number(&mut self, grants: &[GrantId], meter: &mut Meter) -> Result<ClassId, Excess> {
        meter.work(grants.len())?;
        match *grants {
            [] => Ok(NOTHING),
            [one] => {
                let known = self.of_one[one as usize];
                let class = if known == 0 { self.of_content(grants, meter)? } else { known };
                self.of_one[one as usize] = class;
                Ok(class)
            }
            _ => match self.of_several.get(grants) {
                Some(class) => Ok(*class),
                None => {
                    let class = self.of_content(grants, meter)?;
                    if self.remembered + grants.len() <= REMEMBERED {
                        self.remembered += grants.len();
                        self.of_several.insert(grants.to_vec(), class);
                    }
                    Ok(class)
                }
            },
        }
    }

    fn of_content(&mut self, grants: &[GrantId], meter: &mut Meter) -> Result<ClassId, Excess> {
        meter.work(grants.iter().map(|grant| self.grants.get(*grant).1.len()).sum())?;
        let content = self.content(grants);
        let next = ClassId::try_from(self.by_content.len() + 1).unwrap_or(ClassId::MAX);
        match self.by_content.entry(content) {
            Entry::Occupied(known) => Ok(*known.get()),
            Entry::Vacant(new) => {
                meter.entries(new.key().len())?;
                Ok(*new.insert(next))
            }
        }
    }

    /// Returns the traffic that a set of grants allows, each with the first rule that allows it. Traffic
    /// that is part of wider traffic in the set is left out, unless the wider traffic is allowed only under
    /// a condition.
    fn content(&self, grants: &[GrantId]) -> Content {
        let of_grant = |grant: &GrantId| {
            let (rule, traffic) = self.grants.get(*grant);
            traffic.iter().map(move |traffic| (*traffic, rule))
        };
        let mut all: Content = grants.iter().flat_map(of_grant).collect();
        all.sort_unstable();
        all.dedup_by_key(|(traffic, _)| *traffic);
        if all.len() > 1 {
            let holds = |traffic: Traffic| {
                all.binary_search_by_key(&traffic, |(traffic, _)| *traffic)
                    .is_ok_and(|at| Some(all[at].1) != self.grants.of_node)
            };
            let covered: Vec<bool> = all.iter().map(|(traffic, _)| wider(*traffic).any(holds)).collect();
            let mut covered = covered.into_iter();
            all.retain(|_| !covered.next().unwrap_or(false));
        }
        all
    }

    fn into_ports(self, peers: &[(IpNet, ClassId)]) -> BTreeMap<PortPrefix, RuleId> {
        drop((self.grants, self.of_one, self.of_several));
        // Numbers run from 1 without gaps.
        let mut is_used = vec![false; self.by_content.len() + 1];
        for (_, class) in peers {
            if let Some(is_used) = is_used.get_mut(*class as usize) {
                *is_used = true;
            }
        }
        let mut by_class: Vec<(ClassId, Content)> =
            self.by_content.into_iter().map(|(content, class)| (class, content)).collect();
        by_class.retain(|(class, _)| is_used.get(*class as usize).copied().unwrap_or(false));
        by_class.sort_unstable_by_key(|(class, _)| *class);
        by_class
            .into_iter()
            .flat_map(|(class, content)| {
                content.into_iter().map(move |(traffic, rule)| (PortPrefix { class, traffic }, rule))
            })
            .collect()
    }
}
