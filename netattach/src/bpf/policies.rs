//! Installed policies and the memory of the agent: the maps that only the policy side writes.

use std::borrow::BorrowMut;
use std::collections::{BTreeMap, BTreeSet};

use aya::Pod;
use aya::maps::lpm_trie::Key;
use aya::maps::{Array, HashMap, LpmTrie, MapData, MapError, PerCpuHashMap, PerCpuValues};
use netattach_common as common;
use netattach_common::{Ip4, Ip6, PolicyAddress, PortKey, PortRule, RuleKey};

use super::pin::{Pins, map_name};
use super::rows::{Rows, Usage};
use super::{BpfError, Config};
use crate::policy::compiled::{CompiledPolicy, RuleId};

/// Handles of the policy maps, and what is in them.
pub(super) struct Policies {
    rules: PerCpuHashMap<MapData, RuleKey, u64>,
    ports: LpmTrie<MapData, PortKey, PortRule>,
    peers_v4: HashMap<MapData, PolicyAddress<Ip4>, u32>,
    peers_v6: HashMap<MapData, PolicyAddress<Ip6>, u32>,
    prefixes_v4: LpmTrie<MapData, PolicyAddress<Ip4>, u32>,
    prefixes_v6: LpmTrie<MapData, PolicyAddress<Ip6>, u32>,
    memory: Array<MapData, common::Config>,
    /// Entries of each policy that has any.
    installed: BTreeMap<u32, Usage>,
    used: Usage,
    capacity: Usage,
    cpus: usize,
}

impl Policies {
    /// Opens the maps and takes stock.
    pub(super) fn open(pins: &Pins, config: &Config, cpus: usize) -> Result<Self, BpfError> {
        let size = |entries: u32| entries as usize;
        let mut policies = Self {
            rules: pins.open(map_name::RULE)?,
            ports: pins.open(map_name::PORT)?,
            peers_v4: pins.open(map_name::PEER4)?,
            peers_v6: pins.open(map_name::PEER6)?,
            prefixes_v4: pins.open(map_name::PREFIX4)?,
            prefixes_v6: pins.open(map_name::PREFIX6)?,
            memory: pins.open(map_name::CONFIG)?,
            installed: BTreeMap::new(),
            used: Usage::default(),
            capacity: Usage([
                size(config.max_rules),
                size(config.max_ports),
                size(config.max_peers_v4),
                size(config.max_peers_v6),
                size(config.max_peers_v4),
                size(config.max_peers_v6),
            ]),
            cpus,
        };
        for (map, ids) in policies.ids_by_map()?.into_iter().enumerate() {
            for id in ids {
                policies.installed.entry(id).or_default().0[map] += 1;
                policies.used.0[map] += 1;
            }
        }
        Ok(policies)
    }

    /// Writes a policy's entries; nothing refers to them yet.
    pub(super) fn install(&mut self, policy: u32, compiled: &CompiledPolicy) -> Result<(), BpfError> {
        if policy == 0 {
            return Err(BpfError::PolicyZero);
        }
        if self.installed.contains_key(&policy) {
            return Err(BpfError::PolicyExists(policy));
        }
        let rows = Rows::of(policy, compiled);
        let needed = rows.usage();
        if let Some((map, needed, free)) = self.used.overflow(&needed, &self.capacity) {
            return Err(BpfError::OverCapacity { map, needed, free });
        }
        if let Err(error) = self.write(&rows) {
            self.erase(&rows);
            return Err(error);
        }
        self.used.add(&needed);
        if needed != Usage::default() {
            self.installed.insert(policy, needed);
        }
        Ok(())
    }

    /// Deletes every entry of a policy. One that has none is fine.
    pub(super) fn remove(&mut self, policy: u32) -> Result<(), BpfError> {
        let Some(usage) = self.installed.get(&policy).copied() else {
            return Ok(());
        };
        self.remove_entries(policy)?;
        self.installed.remove(&policy);
        self.used.subtract(&usage);
        Ok(())
    }

    /// The policies that have entries.
    pub(super) fn installed(&self) -> BTreeSet<u32> {
        self.installed.keys().copied().collect()
    }

    /// How many flows each rule of a policy has allowed.
    pub(super) fn rule_flows(&self, policy: u32) -> Result<BTreeMap<RuleId, u64>, BpfError> {
        let read = |source| BpfError::ReadMap { map: map_name::RULE, source };
        let mut flows = BTreeMap::new();
        for key in self.rules.keys() {
            let key = key.map_err(read)?;
            if key.policy == policy {
                let per_cpu = self.rules.get(&key, 0).map_err(read)?;
                flows.insert(key.rule, per_cpu.iter().sum());
            }
        }
        Ok(flows)
    }

    /// A policy id that was never handed out before.
    pub(super) fn allocate(&mut self) -> Result<u32, BpfError> {
        let mut memory = self.recall()?;
        let highest = self.installed.last_key_value().map_or(0, |(id, _)| *id);
        let id = memory.next_policy_id.max(highest.saturating_add(1)).max(1);
        memory.next_policy_id = id.checked_add(1).ok_or(BpfError::PolicyIdsUsedUp)?;
        self.memorise(memory)?;
        Ok(id)
    }

    /// What the agent remembers across restarts.
    pub(super) fn recall(&self) -> Result<common::Config, BpfError> {
        self.memory.get(&0, 0).map_err(|source| BpfError::ReadMap { map: map_name::CONFIG, source })
    }

    /// Replaces it.
    pub(super) fn memorise(&mut self, memory: common::Config) -> Result<(), BpfError> {
        let write = |source| BpfError::WriteMap { map: map_name::CONFIG, source };
        self.memory.set(0, memory, 0).map_err(write)?;
        crate::crash_point!("map", map_name::CONFIG);
        Ok(())
    }

    fn write(&mut self, rows: &Rows) -> Result<(), BpfError> {
        for key in &rows.rules {
            PerCpuValues::try_from(vec![0; self.cpus])
                .map_err(MapError::from)
                .and_then(|zeros| self.rules.insert(*key, zeros, 0))
                .map_err(|source| BpfError::WriteMap { map: map_name::RULE, source })?;
        }
        for (bits, key, rule) in &rows.ports {
            insert_prefix(&mut self.ports, map_name::PORT, *bits, *key, *rule)?;
        }
        for (key, class) in &rows.peers_v4 {
            insert(&mut self.peers_v4, map_name::PEER4, *key, *class)?;
        }
        for (key, class) in &rows.peers_v6 {
            insert(&mut self.peers_v6, map_name::PEER6, *key, *class)?;
        }
        for (bits, key, class) in &rows.prefixes_v4 {
            insert_prefix(&mut self.prefixes_v4, map_name::PREFIX4, *bits, *key, *class)?;
        }
        for (bits, key, class) in &rows.prefixes_v6 {
            insert_prefix(&mut self.prefixes_v6, map_name::PREFIX6, *bits, *key, *class)?;
        }
        Ok(())
    }

    /// Takes back as much of `rows` as was written. What fails here is found again by the sweep at the next
    /// start: it lies under an id that nothing refers to.
    fn erase(&mut self, rows: &Rows) {
        for key in &rows.rules {
            let _ = self.rules.remove(key);
        }
        for (bits, key, _) in &rows.ports {
            let _ = self.ports.remove(&Key::new(*bits, *key));
        }
        for (key, _) in &rows.peers_v4 {
            let _ = self.peers_v4.remove(key);
        }
        for (key, _) in &rows.peers_v6 {
            let _ = self.peers_v6.remove(key);
        }
        for (bits, key, _) in &rows.prefixes_v4 {
            let _ = self.prefixes_v4.remove(&Key::new(*bits, *key));
        }
        for (bits, key, _) in &rows.prefixes_v6 {
            let _ = self.prefixes_v6.remove(&Key::new(*bits, *key));
        }
    }

    fn remove_entries(&mut self, policy: u32) -> Result<(), BpfError> {
        let of_policy = |map| move |source| BpfError::WriteMap { map, source };
        for key in keys(self.rules.keys(), map_name::RULE, |key| key.policy == policy)? {
            self.rules.remove(&key).or_else(absent).map_err(of_policy(map_name::RULE))?;
        }
        for key in keys(self.ports.keys(), map_name::PORT, |key| key.data().policy == policy)? {
            self.ports.remove(&key).or_else(absent).map_err(of_policy(map_name::PORT))?;
        }
        for key in keys(self.peers_v4.keys(), map_name::PEER4, |key| key.policy == policy)? {
            self.peers_v4.remove(&key).or_else(absent).map_err(of_policy(map_name::PEER4))?;
        }
        for key in keys(self.peers_v6.keys(), map_name::PEER6, |key| key.policy == policy)? {
            self.peers_v6.remove(&key).or_else(absent).map_err(of_policy(map_name::PEER6))?;
        }
        for key in keys(self.prefixes_v4.keys(), map_name::PREFIX4, |key| key.data().policy == policy)? {
            self.prefixes_v4.remove(&key).or_else(absent).map_err(of_policy(map_name::PREFIX4))?;
        }
        for key in keys(self.prefixes_v6.keys(), map_name::PREFIX6, |key| key.data().policy == policy)? {
            self.prefixes_v6.remove(&key).or_else(absent).map_err(of_policy(map_name::PREFIX6))?;
        }
        Ok(())
    }

    /// The policy id of every entry, by map in the order of [`Usage::MAPS`].
    fn ids_by_map(&self) -> Result<[Vec<u32>; 6], BpfError> {
        fn all<K>(_: &K) -> bool {
            true
        }
        let rules = keys(self.rules.keys(), map_name::RULE, all)?;
        let ports = keys(self.ports.keys(), map_name::PORT, all)?;
        let peers_v4 = keys(self.peers_v4.keys(), map_name::PEER4, all)?;
        let peers_v6 = keys(self.peers_v6.keys(), map_name::PEER6, all)?;
        let prefixes_v4 = keys(self.prefixes_v4.keys(), map_name::PREFIX4, all)?;
        let prefixes_v6 = keys(self.prefixes_v6.keys(), map_name::PREFIX6, all)?;
        Ok([
            rules.iter().map(|key| key.policy).collect(),
            ports.iter().map(|key| key.data().policy).collect(),
            peers_v4.iter().map(|key| key.policy).collect(),
            peers_v6.iter().map(|key| key.policy).collect(),
            prefixes_v4.iter().map(|key| key.data().policy).collect(),
            prefixes_v6.iter().map(|key| key.data().policy).collect(),
        ])
    }
}

/// The keys of a map that a condition holds for. Collected first: deleting while walking restarts the walk.
pub(super) fn keys<K>(
    keys: impl Iterator<Item = Result<K, MapError>>,
    map: &'static str,
    wanted: impl Fn(&K) -> bool,
) -> Result<Vec<K>, BpfError> {
    keys.filter(|key| key.as_ref().map_or(true, &wanted))
        .collect::<Result<_, _>>()
        .map_err(|source| BpfError::ReadMap { map, source })
}

/// Deleting what is not there is done.
pub(super) fn absent(error: MapError) -> Result<(), MapError> {
    match error {
        MapError::KeyNotFound => Ok(()),
        MapError::SyscallError(ref call) if call.io_error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        other => Err(other),
    }
}

pub(super) fn insert<K: Pod, V: Pod, M: BorrowMut<MapData>>(
    map: &mut HashMap<M, K, V>,
    name: &'static str,
    key: K,
    value: V,
) -> Result<(), BpfError> {
    map.insert(key, value, 0).map_err(|source| BpfError::WriteMap { map: name, source })?;
    crate::crash_point!("map", name);
    Ok(())
}

fn insert_prefix<K: Pod, V: Pod>(
    map: &mut LpmTrie<MapData, K, V>,
    name: &'static str,
    bits: u32,
    key: K,
    value: V,
) -> Result<(), BpfError> {
    map.insert(&Key::new(bits, key), value, 0).map_err(|source| BpfError::WriteMap { map: name, source })?;
    crate::crash_point!("map", name);
    Ok(())
}
