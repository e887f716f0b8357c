//! The packet path as the rest of the agent sees it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aya::maps::{Array, MapData, PerCpuArray, PerCpuValues};
use netattach_common as common;
use netattach_common::{AttachmentRecord, LAYOUT_VERSION, PolicyIds, Stats, capacity};
use rustix::thread::MembarrierCommand;

use super::attachments::{Attachment, Attachments};
use super::caches::Caches;
use super::fast::FastPath;
use super::flows::{FlowTable, Host};
use super::links::Links;
use super::map_table::{map_name, specs};
use super::parents::{Device, OnParent, Parent};
use super::pin::{Found, Pins, exists};
use super::policies::Policies;
use super::programs::Programs;
use super::ring::Records;
use super::routed::Routed;
use super::shares::PerFamily;
use super::sys::SharedWords;
use super::{BpfError, load, object};
use crate::policy::diff::DENY_ALL;
use crate::policy::lookup::{CompiledPolicy, RuleId};

/// Where the pins are and how much the maps hold. Capacities count when the maps are created; later they must
/// be the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Directory on a BPF filesystem, for instance `/sys/fs/bpf/netattach`. Names without dots.
    pub root: PathBuf,
    /// Attachments of this node plus one. Ids run from 1.
    pub max_attachments: u32,
    /// Source addresses of all attachments, per family.
    pub max_addresses: u32,
    /// IPv4 hosts in all policies, and as many IPv4 prefixes.
    pub max_peers_v4: u32,
    /// The same for IPv6.
    pub max_peers_v6: u32,
    /// Port entries of all policies.
    pub max_ports: u32,
    /// Rules of all policies.
    pub max_rules: u32,
    /// IPv4 flows that are remembered.
    pub max_flows_v4: u32,
    /// IPv6 flows that are remembered.
    pub max_flows_v6: u32,
    /// Fragmented packets that are remembered, per family.
    pub max_fragments: u32,
    /// Allowed VLAN ids of all attachments.
    pub max_vlans: u32,
    /// Bytes of records that wait for the agent, a power of two and whole pages.
    pub record_bytes: u32,
}

impl Config {
    /// The default capacities.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            max_attachments: capacity::ATTACHMENTS as u32,
            max_addresses: capacity::ADDRESSES as u32,
            max_peers_v4: capacity::PEERS_V4 as u32,
            max_peers_v6: capacity::PEERS_V6 as u32,
            max_ports: capacity::PORTS as u32,
            max_rules: capacity::RULES as u32,
            max_flows_v4: capacity::FLOWS_V4 as u32,
            max_flows_v6: capacity::FLOWS_V6 as u32,
            max_fragments: capacity::FRAGMENTS as u32,
            max_vlans: capacity::VLANS as u32,
            record_bytes: capacity::RECORD_BYTES as u32,
        }
    }
}

/// Programs and maps, opened. Dropping it changes nothing in the kernel. One process at a time may hold it:
/// it remembers what it wrote.
pub struct Dataplane {
    programs: Arc<Programs>,
    object_tag: u64,
    /// See [`Dataplane::is_new`].
    is_new: bool,
    /// See [`Dataplane::lost_flows`].
    lost_flows: bool,
    pins: Pins,
    links: Links,
    caches: Caches,
    policies: Mutex<Policies>,
    policy_words: SharedWords,
    stats: Mutex<PerCpuArray<MapData, Stats>>,
    cpus: usize,
}

impl Dataplane {
    /// Finds what a previous agent pinned, or loads and pins it.
    ///
    /// Maps that are there are checked, never replaced. Programs are replaced when this agent brings others;
    /// devices keep the old ones until the caller attaches the new ones
    /// ([`programs_changed`](Self::programs_changed)).
    pub fn open(config: &Config) -> Result<Self, BpfError> {
        let object = object::embedded()?;
        let pins = Pins::new(&config.root);
        let specs = specs(config);
        pins.create(&config.root)?;
        let found = pins.verify(&specs)?;
        let others = pins.other_layouts()?;
        for path in &others {
            tracing::info!(path = %path.display(), "an agent of another layout was here; its attachments are taken over");
        }
        let lost_flows = !others.is_empty()
            || !exists(&pins.map(map_name::FLOW4))?
            || !exists(&pins.map(map_name::FLOW6))?;
        let current = found == Found::Everything && open_memory(&pins)?.1.object_tag == object.tag;
        if !current {
            forget_programs(&pins)?;
            load::load(&object, &pins, &specs)?;
        }
        let cpus = aya::util::nr_cpus().map_err(|(path, source)| BpfError::CountCpus { path, source })?;
        let mut policies = Policies::open(&pins, config)?;
        let policy_words = map_words(&pins, config.max_attachments)?;
        if !current {
            let memory = policies.recall()?;
            policies.memorise(common::Config {
                object_tag: object.tag,
                // At the first start nothing can be attached yet that runs other programs.
                attached_tag: if found == Found::Nothing { object.tag } else { 0 },
                next_policy_id: memory
                    .next_policy_id
                    .max(first_unused((0..policy_words.len()).filter_map(|id| policy_words.get(id)))),
                layout_version: LAYOUT_VERSION,
            })?;
        }
        let links = Links::new(&config.root);
        Ok(Self {
            programs: Arc::new(Programs::open(&pins, links.clone())?),
            object_tag: object.tag,
            is_new: found == Found::Nothing || !others.is_empty(),
            lost_flows,
            caches: Caches::open(&pins, config)?,
            policies: Mutex::new(policies),
            policy_words,
            stats: Mutex::new(pins.open(map_name::STATS)?),
            cpus,
            links,
            pins,
        })
    }

    /// The programs that run on devices, and their links.
    pub fn programs(&self) -> &Arc<Programs> {
        &self.programs
    }

    /// Whether devices may still run other programs than [`programs`](Self::programs) gives. Stays so across
    /// restarts until [`programs_attached`](Self::programs_attached).
    pub fn programs_changed(&self) -> Result<bool, BpfError> {
        let memory = self.policies().recall()?;
        Ok(memory.attached_tag != self.object_tag || !self.pins.other_layouts()?.is_empty())
    }

    /// Tells that every device now runs the programs that [`programs`](Self::programs) gives.
    pub fn programs_attached(&self) -> Result<(), BpfError> {
        let mut policies = self.policies();
        let memory = policies.recall()?;
        policies.memorise(common::Config { attached_tag: self.object_tag, ..memory })
    }

    /// Whether the maps were made by this agent, or by one that did not get as far as
    /// [`remove_other_layouts`](Self::remove_other_layouts): then they do not tell what was in force before, which the
    /// maps of another layout may still be enforcing.
    pub fn is_new(&self) -> bool {
        self.is_new
    }

    /// Whether attachments of earlier agents had flows that the table of this one does not have: it was made anew, or the one of
    /// another layout is still in use.
    pub fn lost_flows(&self) -> bool {
        self.lost_flows
    }

    /// Has an attachment whose flows are lost take segments of unknown connections for answers, for
    /// [`Share::GRACE`](common::Share::GRACE) seconds from now. Once: later calls change nothing, so that agents that are
    /// started again and again do not prolong it.
    pub fn take_answers(&self, id: u32) -> Result<(), BpfError> {
        self.caches.take_answers(id)
    }

    /// Gives attachments their places in the flow table, by how many flows of theirs go on ([`share_out`](super::share_out)), and takes
    /// those of all others back. Returns what each has. Numbers that are no attachment's are left out.
    pub fn share_out_flows(
        &self,
        live: BTreeMap<u32, PerFamily>,
    ) -> Result<BTreeMap<u32, PerFamily>, BpfError> {
        self.caches.share_out(live)
    }

    /// Removes the pins of agents of other layouts. Every device has to run this agent's programs: maps that are pinned no
    /// more can be changed by nobody. Idempotent.
    pub fn remove_other_layouts(&self) -> Result<(), BpfError> {
        self.pins.remove_other_layouts()
    }

    /// Creates or changes an attachment. Its devices and policies stay as they are.
    pub fn put_attachment(&self, id: u32, attachment: &Attachment) -> Result<(), BpfError> {
        self.attachments().put(id, attachment)
    }

    /// What the kernel's maps have otherwise than an attachment was put and bound, in words; its policies are not
    /// looked at.
    pub fn difference(
        &self,
        id: u32,
        device: &Device,
        attachment: &Attachment,
    ) -> Result<Option<String>, BpfError> {
        self.attachments().difference(id, device, attachment)
    }

    /// The first pin that is gone. What was pinned works on, but no later agent would find it.
    pub fn missing_pin(&self) -> Result<Option<PathBuf>, BpfError> {
        for path in self.pins.all() {
            if !exists(&path)? {
                return Ok(Some(path));
            }
        }
        Ok(None)
    }

    /// Makes a host-side device an attachment's. Until then its packets are dropped, so bind before attaching.
    pub fn bind_link(&self, ifindex: u32, id: u32) -> Result<(), BpfError> {
        self.attachments().bind(ifindex, id)
    }

    /// Makes the frames of a macvlan's parent that have the attachment's MAC address its own.
    pub fn bind_macvlan(&self, id: u32, on: &OnParent) -> Result<(), BpfError> {
        self.attachments().bind_macvlan(id, on)
    }

    /// Enters a parent, before programs are attached to it.
    pub fn cover_parent(&self, parent: u32, what: Parent) -> Result<(), BpfError> {
        self.attachments().parents.cover(parent, what)
    }

    /// Takes a parent out, after its programs are gone. Idempotent.
    pub fn uncover_parent(&self, parent: u32) -> Result<(), BpfError> {
        self.attachments().parents.uncover(parent)
    }

    /// The parents that are entered.
    pub fn covered_parents(&self) -> BTreeMap<u32, Parent> {
        self.attachments().parents.covered()
    }

    /// The parents that carry attachments.
    pub fn parents_in_use(&self) -> BTreeSet<u32> {
        self.attachments().parents.in_use()
    }

    /// The parent of an attachment's macvlan, if it has one.
    pub fn parent_of(&self, id: u32) -> Option<u32> {
        self.attachments().parents.parent_of(id)
    }

    /// Makes a device nobody's. Idempotent.
    pub fn unbind_link(&self, ifindex: u32) -> Result<(), BpfError> {
        self.attachments().unbind(ifindex)
    }

    /// The devices that are an attachment's.
    pub fn devices_of(&self, id: u32) -> Vec<u32> {
        self.attachments().devices_of(id)
    }

    /// Removes all traces of an attachment: devices, record, addresses, policies, counters. Idempotent.
    pub fn remove_attachment(&self, id: u32) -> Result<(), BpfError> {
        self.caches.remove(id, || self.set_policy(id, PolicyIds::default()))?;
        let failed = |source| BpfError::WriteMap { map: map_name::STATS, source };
        let zeros = PerCpuValues::try_from(vec![Stats::default(); self.cpus])
            .map_err(|error| failed(error.into()))?;
        lock(&self.stats).set(id, zeros, 0).map_err(failed)
    }

    /// Puts both directions under other policies at one instant. The policies must be installed.
    pub fn set_policy(&self, id: u32, policies: PolicyIds) -> Result<(), BpfError> {
        self.attachments().check(id)?;
        self.policy_words.set(id, policies.to_word()).ok_or_else(|| self.out_of_range(id))?;
        crate::crash_point!("map", map_name::POLICY);
        Ok(())
    }

    /// The policies of an attachment.
    pub fn policy(&self, id: u32) -> Result<PolicyIds, BpfError> {
        self.policy_words.get(id).map(PolicyIds::from_word).ok_or_else(|| self.out_of_range(id))
    }

    /// A policy id that was never used before, by this agent or an earlier one.
    pub fn allocate_policy_id(&self) -> Result<u32, BpfError> {
        self.policies().allocate()
    }

    /// Sees to it that no later agent hands out this policy id or one below it.
    pub fn use_up_policy_ids(&self, last: u32) -> Result<(), BpfError> {
        self.policies().use_up(last)
    }

    /// Writes policies under ids that nothing refers to yet, each whole or not at all: those that do not fit come back
    /// with the reason ([`BpfError::OverCapacity`]).
    pub fn install_policies(
        &self,
        policies: &[(u32, &CompiledPolicy)],
    ) -> Result<BTreeMap<u32, BpfError>, BpfError> {
        self.policies().install(policies)
    }

    /// The policies among these, by number and content, of which the maps hold exactly that content: what an earlier agent
    /// wrote need not be written again.
    ///
    /// # Errors
    /// A map could not be read.
    pub fn policies_holding(&self, policies: &[(u32, &CompiledPolicy)]) -> Result<BTreeSet<u32>, BpfError> {
        self.policies().holding(policies)
    }

    /// Returns when no packet is judged any more that was so when it was called: after that, nobody reads policies that
    /// nothing referred to before. Takes some milliseconds.
    ///
    /// # Errors
    /// The kernel cannot tell (Linux before 4.3; processors without a clock tick, `nohz_full`).
    pub fn wait_for_readers(&self) -> Result<(), BpfError> {
        // The programs run within RCU's read sides, for the end of which this command waits (kernel/sched/membarrier.c).
        // With one processor online it does not wait: then no packet is in the middle of anything while this runs.
        rustix::thread::membarrier(MembarrierCommand::Global)
            .map_err(|source| BpfError::WaitForReaders(source.into()))
    }

    /// Deletes the entries of policies. Nothing may refer to them any more. Idempotent.
    pub fn remove_policies(&self, policies: &BTreeSet<u32>) -> Result<(), BpfError> {
        self.policies().remove(policies)
    }

    /// The policies with entries in the maps, for sweeping those that nothing refers to.
    pub fn installed_policies(&self) -> BTreeSet<u32> {
        self.policies().installed()
    }

    /// How many flows each rule has allowed since its policy was installed, by policy; rules that have allowed none
    /// are left out, and so are those that found no room to be counted in.
    pub fn rule_flows(&self) -> Result<BTreeMap<u32, BTreeMap<RuleId, u64>>, BpfError> {
        self.policies().rule_flows()
    }

    /// The counters of an attachment, summed over CPUs. Id 0: packets of devices that are nobody's.
    pub fn stats(&self, id: u32) -> Result<Stats, BpfError> {
        let per_cpu = lock(&self.stats)
            .get(&id, 0)
            .map_err(|source| BpfError::ReadMap { map: map_name::STATS, source })?;
        let mut total = Stats::default();
        for part in per_cpu.iter() {
            total.add(part);
        }
        Ok(total)
    }

    /// What the programs tell about packets, from where the last reader stopped. One reader at a time.
    pub fn records(&self) -> Result<Records, BpfError> {
        Records::open(&self.pins)
    }

    /// The fast path between pods, with nobody on it. One owner at a time.
    pub fn fast_path(&self) -> Result<FastPath, BpfError> {
        FastPath::open(&self.pins, self.links.clone(), self.cpus)
    }

    /// What is judged behind the node's translation of addresses. One owner at a time.
    pub fn routed(&self) -> Result<Routed, BpfError> {
        Routed::open(&self.pins)
    }

    /// The flow table.
    pub fn flows(&self) -> Result<FlowTable, BpfError> {
        FlowTable::open(&self.pins)
    }

    /// An attachment's addresses in its network, the link-local one included. None when it has no record.
    pub fn hosts(&self, id: u32) -> Result<Vec<Host>, BpfError> {
        self.attachments().hosts(id)
    }

    /// Every attachment that has a record, for recovery.
    pub fn attachments_dump(&self) -> BTreeMap<u32, AttachmentRecord> {
        self.attachments().records().clone()
    }

    /// Which source addresses are allowed to which id, also to ids without a record, for recovery.
    pub fn addresses_dump(&self) -> BTreeMap<u32, BTreeSet<IpAddr>> {
        self.attachments().addresses().clone()
    }

    /// Which device belongs to which attachment, for recovery.
    pub fn links_dump(&self) -> BTreeMap<u32, u32> {
        self.attachments().bound().clone()
    }

    /// Which attachments have an address on a parent, for recovery.
    pub fn macvlans_dump(&self) -> BTreeSet<u32> {
        self.attachments().parents.attachments().collect()
    }

    /// How many entries the map of parents has: macvlans, their parents, their namespaces.
    pub fn parent_entries(&self) -> usize {
        self.attachments().parents.len()
    }

    fn attachments(&self) -> crate::sync::MutexGuard<'_, Attachments> {
        self.caches.attachments()
    }

    fn policies(&self) -> MutexGuard<'_, Policies> {
        lock(&self.policies)
    }

    fn out_of_range(&self, id: u32) -> BpfError {
        BpfError::InvalidAttachment { id, max: self.policy_words.len().saturating_sub(1) }
    }
}

impl fmt::Debug for Dataplane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dataplane").field("object_tag", &self.object_tag).finish_non_exhaustive()
    }
}

/// A thread that panicked inside left at most a half-done sequence of map writes, which repeating completes.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn open_memory(pins: &Pins) -> Result<(Array<MapData, common::Config>, common::Config), BpfError> {
    let map: Array<MapData, common::Config> = pins.open(map_name::CONFIG)?;
    let memory = map.get(&0, 0).map_err(|source| BpfError::ReadMap { map: map_name::CONFIG, source })?;
    Ok((map, memory))
}

/// Before the programs are replaced: an agent that is killed meanwhile must have its successor do it again,
/// and attach them.
fn forget_programs(pins: &Pins) -> Result<(), BpfError> {
    if !exists(&pins.map(map_name::CONFIG))? {
        return Ok(());
    }
    let (mut map, memory) = open_memory(pins)?;
    map.set(0, common::Config { object_tag: 0, attached_tag: 0, ..memory }, 0)
        .map_err(|source| BpfError::WriteMap { map: map_name::CONFIG, source })
}

/// The lowest policy id above all that attachments refer to: matters when `na_cfg` was lost.
fn first_unused(words: impl Iterator<Item = u64>) -> u32 {
    let ids = words.map(PolicyIds::from_word).flat_map(|ids| [ids.ingress, ids.egress]);
    // The number of what is isolated completely is nobody's.
    let highest = ids.filter(|id| *id != DENY_ALL).max();
    highest.map_or(1, |highest| highest.saturating_add(1))
}

fn map_words(pins: &Pins, len: u32) -> Result<SharedWords, BpfError> {
    let path = pins.map(map_name::POLICY);
    let data = MapData::from_pin(&path).map_err(|source| BpfError::OpenMap { path, source })?;
    SharedWords::map(data.fd().as_fd(), len as usize).map_err(BpfError::MapPolicyWords)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_number_is_above_all_that_are_in_use_but_that_of_complete_isolation() {
        let under = |ingress, egress| PolicyIds { ingress, egress }.to_word();
        let table: [(&[u64], u32); 5] = [
            (&[], 1),
            (&[under(0, 0)], 1),
            (&[under(3, 0), under(0, 7), under(2, 2)], 8),
            (&[under(DENY_ALL, DENY_ALL)], 1),
            (&[under(4, 0), under(DENY_ALL, 5)], 6),
        ];
        for (words, expected) in table {
            assert_eq!(first_unused(words.iter().copied()), expected, "{words:x?}");
        }
    }
}
