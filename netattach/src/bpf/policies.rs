//! The maps of installed policies, and the agent's persistent state (`na_cfg`).

use std::collections::{BTreeMap, BTreeSet};
use std::thread;

use aya::maps::{Array, MapData};
use netattach_common as common;
use netattach_common::{Ip4, Ip6, PolicyAddress, PolicyIds, PortKey, PortRule, RuleKey};

use super::batched_map::BatchedMap;
use super::map_table::map_name;
use super::pin::Pins;
use super::policy_rows::{Keys, PolicyRows, Prefix, Usage};
use super::{BpfError, Config};
use crate::policy::lookup::{CompiledPolicy, RuleId};

/// From this number of entries on, a second thread makes writing faster.
const MANY: usize = 4096;

/// The policy maps, with a cache of their keys.
pub(super) struct Policies {
    rules: BatchedMap<RuleKey, u64>,
    ports: BatchedMap<Prefix<PortKey>, PortRule>,
    peers_v4: BatchedMap<PolicyAddress<Ip4>, u32>,
    peers_v6: BatchedMap<PolicyAddress<Ip6>, u32>,
    prefixes_v4: BatchedMap<Prefix<PolicyAddress<Ip4>>, u32>,
    prefixes_v6: BatchedMap<Prefix<PolicyAddress<Ip6>>, u32>,
    memory: Array<MapData, common::Config>,
    /// The keys of each policy that has entries, so that removal needs no search.
    installed: BTreeMap<u32, Keys>,
    used: Usage,
    capacity: Usage,
}

impl Policies {
    /// Opens the maps and reads their entries.
    pub(super) fn open(pins: &Pins, config: &Config) -> Result<Self, BpfError> {
        let size = |entries: u32| entries as usize;
        let mut policies = Self {
            rules: BatchedMap::open(pins, map_name::RULE)?,
            ports: BatchedMap::open(pins, map_name::PORT)?,
            peers_v4: BatchedMap::open(pins, map_name::PEER4)?,
            peers_v6: BatchedMap::open(pins, map_name::PEER6)?,
            prefixes_v4: BatchedMap::open(pins, map_name::PREFIX4)?,
            prefixes_v6: BatchedMap::open(pins, map_name::PREFIX6)?,
            memory: pins.open(map_name::CONFIG)?,
            installed: BTreeMap::new(),
            used: Usage::default(),
            capacity: Usage([
                size(config.max_ports),
                size(config.max_peers_v4),
                size(config.max_peers_v6),
                size(config.max_peers_v4),
                size(config.max_peers_v6),
            ]),
        };
        policies.take_stock()?;
        Ok(policies)
    }

    fn take_stock(&mut self) -> Result<(), BpfError> {
        let installed = &mut self.installed;
        for (key, _) in self.ports.read()? {
            installed.entry(key.of.policy).or_default().ports.push(key);
        }
        for (key, _) in self.peers_v4.read()? {
            installed.entry(key.policy).or_default().peers_v4.push(key);
        }
        for (key, _) in self.peers_v6.read()? {
            installed.entry(key.policy).or_default().peers_v6.push(key);
        }
        for (key, _) in self.prefixes_v4.read()? {
            installed.entry(key.of.policy).or_default().prefixes_v4.push(key);
        }
        for (key, _) in self.prefixes_v6.read()? {
            installed.entry(key.of.policy).or_default().prefixes_v6.push(key);
        }
        for keys in installed.values() {
            self.used.add(&keys.usage());
        }
        // Counters of policies whose removal was not finished by an earlier agent.
        let is_left = |policy| !self.installed.contains_key(&policy);
        let rules = self.rules.read()?;
        let left: Vec<RuleKey> =
            rules.iter().map(|(key, _)| *key).filter(|key| is_left(key.policy)).collect();
        self.rules.delete(&left)
    }

    /// Writes the entries of policies that nothing refers to yet. Policies that do not fit are left out
    /// completely and returned with the reason.
    pub(super) fn install(
        &mut self,
        policies: &[(u32, &CompiledPolicy)],
    ) -> Result<BTreeMap<u32, BpfError>, BpfError> {
        let (mut rows, mut fitting) = (PolicyRows::default(), Vec::new());
        let mut used = self.used;
        let mut refused = BTreeMap::new();
        for (policy, compiled) in policies {
            if *policy == 0 {
                return Err(BpfError::PolicyZero);
            }
            if self.installed.contains_key(policy) {
                return Err(BpfError::PolicyExists(*policy));
            }
            // Counted first, because a policy that does not fit is tried again and again and should not take
            // memory.
            let needed = Usage::of(compiled);
            if let Some((map, needed, free)) = used.overflow(&needed, &self.capacity) {
                refused.insert(*policy, BpfError::OverCapacity { map, needed, free });
                continue;
            }
            used.add(&needed);
            let mut its = PolicyRows::of(*policy, compiled);
            rows.append(&mut its);
            if needed != Usage::default() {
                fitting.push((*policy, its.keys));
            }
        }
        if let Err(error) = self.write(&rows) {
            if self.erase(&rows.keys).is_err() {
                // Some entries may exist. They take room until the sweep removes the policies.
                self.installed.extend(fitting);
                self.used = used;
            }
            return Err(error);
        }
        self.installed.extend(fitting);
        self.used = used;
        Ok(refused)
    }

    /// Returns those of these policies, by number and content, whose exact content is in the maps.
    pub(super) fn holding(&mut self, policies: &[(u32, &CompiledPolicy)]) -> Result<BTreeSet<u32>, BpfError> {
        let mut held = BTreeSet::new();
        let mut rows = PolicyRows::default();
        for (policy, compiled) in policies {
            let found = self.installed.get(policy).map(Keys::usage).unwrap_or_default();
            // The number of entries is equal, and each of them is looked up below: together this means equal
            // content.
            if found == Usage::of(compiled) && held.insert(*policy) {
                rows.append(&mut PolicyRows::of(*policy, compiled));
            }
        }
        let PolicyRows { keys, port_rules, classes } = &rows;
        let mut without = |other: BTreeSet<u32>| held.retain(|policy| !other.contains(policy));
        without(self.ports.different(&keys.ports, port_rules, |key| key.of.policy)?);
        without(self.peers_v4.different(&keys.peers_v4, &classes.peers_v4, |key| key.policy)?);
        without(self.peers_v6.different(&keys.peers_v6, &classes.peers_v6, |key| key.policy)?);
        without(self.prefixes_v4.different(&keys.prefixes_v4, &classes.prefixes_v4, |key| key.of.policy)?);
        without(self.prefixes_v6.different(&keys.prefixes_v6, &classes.prefixes_v6, |key| key.of.policy)?);
        Ok(held)
    }

    /// Deletes every entry of policies. Idempotent.
    pub(super) fn remove(&mut self, policies: &BTreeSet<u32>) -> Result<(), BpfError> {
        let mut all = Keys::default();
        for keys in policies.iter().filter_map(|policy| self.installed.get(policy)) {
            all.extend(keys);
        }
        if all == Keys::default() {
            return Ok(());
        }
        self.erase(&all)?;
        self.used.subtract(&all.usage());
        self.installed.retain(|policy, _| !policies.contains(policy));
        let rules = self.rules.read()?;
        let counters = rules.iter().map(|(key, _)| *key).filter(|key| policies.contains(&key.policy));
        self.rules.delete(&counters.collect::<Vec<_>>())
    }

    /// The policies that have entries.
    pub(super) fn installed(&self) -> BTreeSet<u32> {
        self.installed.keys().copied().collect()
    }

    /// The number of flows that each rule has allowed, by policy; rules that have allowed none are left out.
    pub(super) fn rule_flows(&mut self) -> Result<BTreeMap<u32, BTreeMap<RuleId, u64>>, BpfError> {
        let mut flows: BTreeMap<u32, BTreeMap<RuleId, u64>> = BTreeMap::new();
        for (key, count) in self.rules.read()? {
            flows.entry(key.policy).or_default().insert(key.rule, count);
        }
        Ok(flows)
    }

    /// Allocates a policy number that was never used before.
    pub(super) fn allocate(&mut self) -> Result<u32, BpfError> {
        let memory = self.recall()?;
        let highest = self.installed.last_key_value().map_or(0, |(id, _)| *id);
        let id = memory.next_policy_id.max(highest.saturating_add(1)).max(1);
        self.use_up(id)?;
        Ok(id)
    }

    /// Marks this policy number and all below it as used: no later agent allocates them.
    pub(super) fn use_up(&mut self, id: u32) -> Result<(), BpfError> {
        let memory = self.recall()?;
        if id > PolicyIds::HIGHEST {
            return Err(BpfError::PolicyIdsUsedUp);
        }
        let next = id + 1;
        if next <= memory.next_policy_id {
            return Ok(());
        }
        self.memorise(common::Config { next_policy_id: next, ..memory })
    }

    /// Reads the persistent state.
    pub(super) fn recall(&self) -> Result<common::Config, BpfError> {
        self.memory.get(&0, 0).map_err(|source| BpfError::ReadMap { map: map_name::CONFIG, source })
    }

    /// Replaces the persistent state.
    pub(super) fn memorise(&mut self, memory: common::Config) -> Result<(), BpfError> {
        let write = |source| BpfError::WriteMap { map: map_name::CONFIG, source };
        self.memory.set(0, memory, 0).map_err(write)?;
        crate::crash_point!("map", map_name::CONFIG);
        Ok(())
    }

    /// Writes entries. If there are many, ports and addresses are written in parallel, since they are in
    /// different maps.
    fn write(&mut self, rows: &PolicyRows) -> Result<(), BpfError> {
        let Self { ports, peers_v4, peers_v6, prefixes_v4, prefixes_v6, .. } = self;
        let PolicyRows { keys, port_rules, classes } = rows;
        let mut ports = || ports.write(&keys.ports, port_rules);
        let mut addresses = || {
            peers_v4.write(&keys.peers_v4, &classes.peers_v4)?;
            peers_v6.write(&keys.peers_v6, &classes.peers_v6)?;
            prefixes_v4.write(&keys.prefixes_v4, &classes.prefixes_v4)?;
            prefixes_v6.write(&keys.prefixes_v6, &classes.prefixes_v6)
        };
        if keys.ports.len() < MANY {
            ports()?;
            return addresses();
        }
        thread::scope(|scope| {
            let ports = scope.spawn(ports);
            let addresses = addresses();
            ports.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)).and(addresses)
        })
    }

    fn erase(&mut self, keys: &Keys) -> Result<(), BpfError> {
        self.ports.delete(&keys.ports)?;
        self.peers_v4.delete(&keys.peers_v4)?;
        self.peers_v6.delete(&keys.peers_v6)?;
        self.prefixes_v4.delete(&keys.prefixes_v4)?;
        self.prefixes_v6.delete(&keys.prefixes_v6)
    }
}
