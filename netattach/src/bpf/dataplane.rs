//! Opened programs and maps: the packet path as seen by the rest of the agent.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use aya::Ebpf;
use aya::maps::{Array, MapData};
use netattach_common as common;
use netattach_common::{LAYOUT_VERSION, PolicyIds, Stats, capacity};
use rustix::thread::MembarrierCommand;

use super::caches::{AttachmentMaps, ParentMap};
use super::counters::Counters;
use super::fast::FastPath;
use super::flows::FlowTable;
use super::links::Links;
use super::map_table::{map_name, specs};
use super::object::{Fitted, Means};
use super::packet_log::{LogObject, PacketLog};
use super::pin::{Found, Pins, check_root, exists};
use super::policy_maps::PolicyMaps;
use super::programs::Programs;
use super::ring::Records;
use super::routed::Routed;
use super::{BpfError, load, object};
use crate::sync::{Mutex, locked};

/// The directory of the pins and the capacities of the maps. Capacities are set when the maps are created and
/// must not change later.
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
    /// IPv4 flows in the flow table.
    pub max_flows_v4: u32,
    /// IPv6 flows in the flow table.
    pub max_flows_v6: u32,
    /// Fragmented packets in the table of fragments, per family.
    pub max_fragments: u32,
    /// Allowed VLAN ids of all attachments.
    pub max_vlans: u32,
    /// Bytes of the ring buffer of records, a power of two and whole pages.
    pub record_bytes: u32,
    /// An object that logs the results of its stages, which replaces the embedded one.
    pub log: Option<LogObject>,
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
            log: None,
        }
    }

    /// The smallest maps, used to try out programs: the kernel's verifier needs no larger ones.
    fn smallest(&self) -> Self {
        const FEW: u32 = 16;
        Self {
            root: self.root.clone(),
            max_attachments: FEW,
            max_addresses: FEW,
            max_peers_v4: FEW,
            max_peers_v6: FEW,
            max_ports: FEW,
            max_rules: FEW,
            max_flows_v4: FEW,
            max_flows_v6: FEW,
            max_fragments: FEW,
            max_vlans: FEW,
            record_bytes: self.record_bytes,
            log: self.log.clone(),
        }
    }
}

/// The opened programs and maps. Dropping this value changes nothing in the kernel. Only one process at a
/// time may hold it, because map entries are cached.
pub struct Dataplane {
    programs: Arc<Programs>,
    object_tag: u64,
    /// See [`Dataplane::is_new`].
    is_new: bool,
    /// See [`Dataplane::lost_flows`].
    lost_flows: bool,
    pins: Pins,
    links: Links,
    attachments: AttachmentMaps,
    policies: PolicyMaps,
    counters: Mutex<Counters>,
    /// The loaded object, until [`Dataplane::packet_log`] takes it.
    logging: Mutex<Option<Ebpf>>,
}

impl Dataplane {
    /// Opens the pins of an earlier agent, or loads and pins programs and maps.
    ///
    /// Existing maps are checked, never replaced. Programs are replaced if this agent has different ones;
    /// devices keep the old ones until the caller attaches the new ones
    /// ([`programs_changed`](Self::programs_changed)).
    pub fn open(config: &Config) -> Result<Self, BpfError> {
        let object = fitted(config)?;
        let pins = Pins::new(&config.root);
        let specs = specs(config);
        pins.create(&config.root)?;
        let found = pins.verify(&specs)?;
        let others = pins.other_layouts()?;
        for path in &others {
            tracing::info!(path = %path.display(), "found the pins of an agent with another layout; its attachments are taken over");
        }
        let lost_flows = !others.is_empty()
            || !exists(&pins.map(map_name::FLOW4))?
            || !exists(&pins.map(map_name::FLOW6))?;
        let current = is_current(config, &pins, found, &object)?;
        let loaded = if current {
            None
        } else {
            forget_programs(&pins)?;
            Some(load::load(&object, config.log.as_ref().map(|log| log.detail), &pins, &specs)?)
        };
        let policies = PolicyMaps::open(&pins, config)?;
        if !current {
            let mut installed = policies.lock();
            let memory = installed.recall()?;
            installed.memorise(common::Config {
                object_tag: object.tag,
                // At the first start no device can run other programs yet.
                attached_tag: if found == Found::Nothing { object.tag } else { 0 },
                next_policy_id: memory.next_policy_id.max(policies.first_unused()),
                layout_version: LAYOUT_VERSION,
            })?;
        }
        let links = Links::new(&config.root);
        Ok(Self {
            programs: Arc::new(Programs::open(&pins, links.clone())?),
            object_tag: object.tag,
            is_new: found == Found::Nothing || !others.is_empty(),
            lost_flows,
            attachments: AttachmentMaps::open(&pins, config)?,
            policies,
            counters: Mutex::new(Counters::open(&pins)?),
            links,
            pins,
            logging: Mutex::new(loaded.filter(|_| config.log.is_some())),
        })
    }

    /// Checks whether [`Dataplane::open`] would succeed, while another process may hold the dataplane. Checks
    /// the pins, and has the kernel verify the programs if others are pinned. Changes nothing.
    ///
    /// # Errors
    /// Those of [`Dataplane::open`].
    pub fn try_open(config: &Config) -> Result<(), BpfError> {
        let object = fitted(config)?;
        check_root(&config.root)?;
        let pins = Pins::new(&config.root);
        let found = pins.verify(&specs(config))?;
        if is_current(config, &pins, found, &object)? {
            return Ok(());
        }
        load::try_out(&object, config.log.as_ref().map(|log| log.detail), &specs(&config.smallest()))
    }

    /// Returns the log lines that the programs write about packets, each passed to `say`. `None`: the object
    /// does not log, or the log was already taken.
    ///
    /// # Errors
    /// The object was built by another version.
    pub fn packet_log(
        &self,
        say: impl Fn(&str) + Send + Sync + 'static,
    ) -> Result<Option<PacketLog>, BpfError> {
        locked(&self.logging).take().map(|ebpf| PacketLog::new(ebpf, say)).transpose()
    }

    /// The maps of attachments.
    pub fn attachments(&self) -> &AttachmentMaps {
        &self.attachments
    }

    /// The map of macvlans' parents.
    pub fn parents(&self) -> ParentMap<'_> {
        self.attachments.parents()
    }

    /// The maps of policies, and the policies of each attachment.
    pub fn policies(&self) -> &PolicyMaps {
        &self.policies
    }

    /// The programs that run on devices, and their links.
    pub fn programs(&self) -> &Arc<Programs> {
        &self.programs
    }

    /// Whether devices may still run programs other than [`programs`](Self::programs). This persists across
    /// restarts until [`programs_attached`](Self::programs_attached).
    pub fn programs_changed(&self) -> Result<bool, BpfError> {
        let memory = self.policies.lock().recall()?;
        Ok(memory.attached_tag != self.object_tag || !self.pins.other_layouts()?.is_empty())
    }

    /// Records that every device now runs the programs of [`programs`](Self::programs).
    pub fn programs_attached(&self) -> Result<(), BpfError> {
        let mut policies = self.policies.lock();
        let memory = policies.recall()?;
        policies.memorise(common::Config { attached_tag: self.object_tag, ..memory })
    }

    /// Whether the maps were created by this agent, or by one that ended before
    /// [`remove_other_layouts`](Self::remove_other_layouts). New maps do not contain the policies that were
    /// in force before, which the maps of another layout may still enforce.
    pub fn is_new(&self) -> bool {
        self.is_new
    }

    /// Whether attachments of earlier agents had flows that are missing from this agent's table, because the
    /// table is new or the table of another layout is still in use.
    pub fn lost_flows(&self) -> bool {
        self.lost_flows
    }

    /// Removes the pins of agents with other layouts. Every device has to run this agent's programs before,
    /// since maps without a pin can no longer be changed. Idempotent.
    pub fn remove_other_layouts(&self) -> Result<(), BpfError> {
        self.pins.remove_other_layouts()
    }

    /// Returns the first missing pin. Its program or map still works, but no later agent would find it.
    pub fn missing_pin(&self) -> Result<Option<PathBuf>, BpfError> {
        for path in self.pins.all() {
            if !exists(&path)? {
                return Ok(Some(path));
            }
        }
        Ok(None)
    }

    /// Removes an attachment: devices, record, addresses, policies, counters. Its number cannot be reused
    /// until [`free_numbers`](Self::free_numbers). Idempotent.
    pub fn remove_attachment(&self, id: u32) -> Result<(), BpfError> {
        self.attachments.remove(id, || self.policies.set(id, PolicyIds::default()))?;
        locked(&self.counters).clear(id)
    }

    /// Frees the numbers of attachments that were removed before `unread`, and clears what packets in flight
    /// have counted for them since. A call of [`wait_for_readers`](Self::wait_for_readers) that began at
    /// `unread` or later must have returned.
    pub fn free_numbers(&self, unread: Instant) -> Result<(), BpfError> {
        self.attachments.free(unread, |id| locked(&self.counters).clear(id))
    }

    /// Waits until the programs have finished every packet that they were judging. After that, no packet
    /// reads policies that were unreferenced at the call, or counts for an attachment that had been removed.
    /// Takes some milliseconds.
    ///
    /// # Errors
    /// The kernel does not support this (Linux before 4.3; processors without a clock tick, `nohz_full`).
    pub fn wait_for_readers(&self) -> Result<(), BpfError> {
        // The programs run within RCU read sides, for whose end this command waits
        // (kernel/sched/membarrier.c). With only one processor online the command does not wait: no packet is
        // being judged while this thread runs.
        rustix::thread::membarrier(MembarrierCommand::Global)
            .map_err(|source| BpfError::WaitForReaders(source.into()))
    }

    /// The counters of an attachment, summed over CPUs. Number 0: packets of devices without an attachment.
    pub fn stats(&self, id: u32) -> Result<Stats, BpfError> {
        locked(&self.counters).of(id)
    }

    /// Opens the records that the programs write about packets, from the position where the last reader
    /// stopped. Only one reader at a time.
    pub fn records(&self) -> Result<Records, BpfError> {
        Records::open(&self.pins)
    }

    /// Opens the fast path between pods, without members. Only one owner at a time.
    pub fn fast_path(&self) -> Result<FastPath, BpfError> {
        FastPath::open(&self.pins, self.links.clone())
    }

    /// Opens the part for traffic that is judged after the node has translated addresses. Only one owner at a
    /// time.
    pub fn routed(&self) -> Result<Routed, BpfError> {
        Routed::open(&self.pins)
    }

    /// Opens the flow table.
    pub fn flows(&self) -> Result<FlowTable, BpfError> {
        FlowTable::open(&self.pins)
    }
}

impl fmt::Debug for Dataplane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dataplane").field("object_tag", &self.object_tag).finish_non_exhaustive()
    }
}

/// The configured object, adapted to this kernel.
fn fitted(config: &Config) -> Result<Fitted, BpfError> {
    let object = config.log.as_ref().map_or_else(object::embedded, LogObject::read)?;
    Ok(object.fitted(Means::of_kernel()))
}

/// Whether the pinned programs are those of the object.
fn is_current(config: &Config, pins: &Pins, found: Found, object: &Fitted) -> Result<bool, BpfError> {
    // Only the process that loads a logging object has the maps through which it logs.
    Ok(config.log.is_none() && found == Found::Everything && open_memory(pins)?.1.object_tag == object.tag)
}

fn open_memory(pins: &Pins) -> Result<(Array<MapData, common::Config>, common::Config), BpfError> {
    let map: Array<MapData, common::Config> = pins.open(map_name::CONFIG)?;
    let memory = map.get(&0, 0).map_err(|source| BpfError::ReadMap { map: map_name::CONFIG, source })?;
    Ok((map, memory))
}

/// Clears the tags before the programs are replaced: if the agent is killed meanwhile, the next one replaces
/// and attaches the programs again.
fn forget_programs(pins: &Pins) -> Result<(), BpfError> {
    if !exists(&pins.map(map_name::CONFIG))? {
        return Ok(());
    }
    let (mut map, memory) = open_memory(pins)?;
    map.set(0, common::Config { object_tag: 0, attached_tag: 0, ..memory }, 0)
        .map_err(|source| BpfError::WriteMap { map: map_name::CONFIG, source })
}
