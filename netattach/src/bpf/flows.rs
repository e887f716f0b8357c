//! The flow table from the agent's side. The programs add flows, and leave ended flows in the table until
//! their place is needed. This module counts flows and removes ended ones; flows of an attachment that is
//! being removed are removed at once.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::hash::Hash;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use aya::Pod;
use aya::maps::{HashMap, MapData, MapError};
use netattach_common::{Address, Flow, FlowKey, Ip4, Ip6, Port, Share, entry::Entry};

use super::BpfError;
use super::map_ops::absent;
use super::map_table::map_name;
use super::pin::Pins;
use super::shares::PerFamily;
use super::sys::{self, Batch};
use crate::sync::{Mutex, locked};

/// Entries that one round reads before other calls may run.
const ROUND: usize = 16_384;
/// Entries per system call.
const BATCH: usize = 1024;
/// Ended flows that are kept until they are reported.
const KEPT: usize = 8192;
/// Ended flows of one attachment that one round keeps.
const SHARE: usize = 512;

/// An address in the network (zone) that it is used in.
pub type Host = (u32, IpAddr);

/// A flow from its opener's point of view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowEntry {
    /// Number of the network.
    pub zone: u32,
    /// Address and port (0 for protocols without) of the opener.
    pub opener: (IpAddr, u16),
    /// Address and port of the other end.
    pub responder: (IpAddr, u16),
    /// IP protocol number.
    pub protocol: u8,
    /// Id of the outer VLAN tag, 0 without one.
    pub vlan: u16,
    /// The state that the programs keep.
    pub flow: Flow,
}

/// The reason why a flow was removed from the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// No packet came within its timeout.
    Expired,
    /// One of its ends is no longer attached.
    Detached,
    /// Its attachment got fewer places, and has more flows than places.
    Displaced,
}

/// A flow that was removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// Time of removal, seconds of the kernel's monotonic clock.
    pub at: u32,
    /// The entry at that time.
    pub entry: FlowEntry,
    /// The reason.
    pub ending: Ending,
}

/// The counts of the last complete pass over the table.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Census {
    /// IPv4 entries that had not ended.
    pub v4: u64,
    /// IPv6 entries.
    pub v6: u64,
    /// Entries by the attachment at whose hooks they were added.
    pub by_attachment: BTreeMap<u32, PerFamily>,
}

/// Both maps of the flow table.
pub struct FlowTable {
    passes: Mutex<Passes>,
    /// Hosts that are gone, for whose flows no search has begun yet.
    gone: Mutex<BTreeSet<Host>>,
    ended: Mutex<Waiting>,
    census: Mutex<Option<Census>>,
    /// Places of each attachment that has any.
    places: Mutex<BTreeMap<u32, PerFamily>>,
    capacity: [u32; 2],
    /// Counts assignments of policies: flows are added only where isolation applies. See
    /// [`Self::may_hold_flows`].
    expected: AtomicU64,
    /// `expected` at the start of the last complete pass.
    last_pass: AtomicU64,
    /// `expected` at the last time when the table was empty and would stay empty.
    seen_empty: AtomicU64,
}

#[derive(Default)]
struct Waiting {
    flows: Vec<Ended>,
    untold: u64,
}

struct Passes {
    v4: FamilyTable<Ip4>,
    v6: FamilyTable<Ip6>,
    position: Position,
    counting: Census,
    /// By attachment, its places and the number of its flows beyond them.
    beyond: BTreeMap<u32, [Beyond; 2]>,
    /// [`FlowTable::expected`] at the start of this pass.
    begun: u64,
}

/// The excess flows of an attachment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Beyond {
    places: u32,
    flows: u32,
}

/// Position of the pass over both maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Position {
    /// The map of IPv4 is done.
    in_v6: bool,
    /// Position in the map; `None`: its beginning.
    next: Option<u32>,
}

impl FlowTable {
    pub(super) fn open(pins: &Pins) -> Result<Self, BpfError> {
        let passes = Passes {
            v4: FamilyTable::open(pins, map_name::FLOW4)?,
            v6: FamilyTable::open(pins, map_name::FLOW6)?,
            position: Position::default(),
            counting: Census::default(),
            beyond: BTreeMap::new(),
            begun: 0,
        };
        Ok(Self {
            capacity: [passes.v4.capacity, passes.v6.capacity],
            passes: Mutex::new(passes),
            gone: Mutex::default(),
            ended: Mutex::default(),
            census: Mutex::default(),
            places: Mutex::default(),
            // An earlier agent may have left flows.
            expected: AtomicU64::new(1),
            last_pass: AtomicU64::new(0),
            seen_empty: AtomicU64::new(0),
        })
    }

    /// Continues the pass over the table: removes flows that have ended, and counts the others. One round
    /// reads a bounded number of entries. Returns `true` when the pass is complete.
    ///
    /// An entry is read again directly before it is deleted. If a packet adds a new flow with the same key in
    /// the microsecond in between, that flow is deleted, as can happen at any time when the table is full.
    pub fn collect(&self) -> Result<bool, BpfError> {
        let mut passes = locked(&self.passes);
        let Passes { v4, v6, position, counting, beyond, begun } = &mut *passes;
        if *position == Position::default() {
            *counting = Census::default();
            *beyond = self.beyond();
            *begun = self.expected.load(Ordering::SeqCst);
        }
        let now = now();
        let mut told = BTreeMap::new();
        let mut left = ROUND;
        while left > 0 {
            let Census { v4: in_v4, v6: in_v6, by_attachment } = &mut *counting;
            let entries = if position.in_v6 { in_v6 } else { in_v4 };
            let family = usize::from(position.in_v6);
            let mut judge = |protocol: u8, flow: &Flow| {
                if flow.life().is_expired(protocol, now) {
                    return Some(Ending::Expired);
                }
                if let Some(beyond) = beyond.get_mut(&flow.attachment).map(|beyond| &mut beyond[family])
                    && beyond.flows > 0
                    && u32::from(flow.place) >= beyond.places
                {
                    beyond.flows -= 1;
                    return Some(Ending::Displaced);
                }
                *entries += 1;
                by_attachment.entry(flow.attachment).or_default()[family] += 1;
                None
            };
            let mut end = |ended: Ended| self.tell(&mut told, ended);
            let batch = if position.in_v6 {
                v6.look(position.next, now, |key, flow| judge(key.protocol, flow), &mut end)?
            } else {
                v4.look(position.next, now, |key, flow| judge(key.protocol, flow), &mut end)?
            };
            // A batch without entries has read buckets too.
            left = left.saturating_sub(batch.count.max(1));
            position.next = batch.next;
            if batch.next.is_none() {
                if position.in_v6 {
                    *position = Position::default();
                    *locked(&self.census) = Some(std::mem::take(counting));
                    self.last_pass.store(*begun, Ordering::SeqCst);
                    return Ok(true);
                }
                position.in_v6 = true;
            }
        }
        Ok(false)
    }

    /// Removes every flow of hosts that are gone, so that the next owner of an address does not find them.
    /// Returns when this is complete. Concurrent calls share a pass.
    pub fn purge(&self, hosts: impl IntoIterator<Item = Host>) -> Result<(), BpfError> {
        let mine: BTreeSet<Host> = hosts.into_iter().collect();
        if mine.is_empty() || !self.may_hold_flows() {
            return Ok(());
        }
        locked(&self.gone).extend(&mine);
        let mut passes = locked(&self.passes);
        let gone = {
            let mut gone = locked(&self.gone);
            if mine.is_disjoint(&gone) {
                // The previous holder of the lock has removed the flows of these hosts as well.
                return Ok(());
            }
            std::mem::take(&mut *gone)
        };
        let (now, mut told) = (now(), BTreeMap::new());
        let mut end = |ended: Ended| self.tell(&mut told, ended);
        let in_v4 = family(&gone, |address| match address {
            IpAddr::V4(address) => Some(Ip4::from(address)),
            IpAddr::V6(_) => None,
        });
        let in_v6 = family(&gone, |address| match address {
            IpAddr::V4(_) => None,
            IpAddr::V6(address) => Some(Ip6::from(address)),
        });
        let done = passes
            .v4
            .take_out_all(&in_v4, now, &mut end)
            .and_then(|()| passes.v6.take_out_all(&in_v6, now, &mut end));
        if done.is_err() {
            locked(&self.gone).extend(gone);
        }
        crate::crash_point!("map", "purged flows");
        done
    }

    /// Returns the flows that were removed since the last call, and the number of further ones that were not
    /// kept.
    pub fn take_ended(&self) -> (Vec<Ended>, u64) {
        let waiting = std::mem::take(&mut *locked(&self.ended));
        (waiting.flows, waiting.untold)
    }

    /// The counts of the last complete pass; `None` before the first.
    pub fn census(&self) -> Option<Census> {
        locked(&self.census).clone()
    }

    /// Sets the places of attachments. The next pass removes flows of attachments that have more flows than
    /// places.
    pub fn set_places(&self, places: BTreeMap<u32, PerFamily>) {
        *locked(&self.places) = places;
    }

    /// The places of an attachment.
    pub fn places_of(&self, id: u32) -> PerFamily {
        locked(&self.places).get(&id).copied().unwrap_or_default().map(Share::places)
    }

    /// Whether an attachment may soon need more places than it has: half of its places are taken.
    pub fn is_pressed(&self) -> bool {
        let census = locked(&self.census);
        let mut attachments = census.iter().flat_map(|census| &census.by_attachment);
        attachments.any(|(id, live)| {
            let places = self.places_of(*id);
            live.iter().zip(places).any(|(live, places)| *live > places / 2)
        })
    }

    fn beyond(&self) -> BTreeMap<u32, [Beyond; 2]> {
        let (census, places) = (locked(&self.census), locked(&self.places));
        let live = census.iter().flat_map(|census| &census.by_attachment);
        let beyond = live.filter_map(|(id, live)| {
            let places = places.get(id)?;
            let of = |family: usize| Beyond {
                places: places[family],
                flows: live[family].saturating_sub(places[family]),
            };
            let beyond = [of(0), of(1)];
            beyond.iter().any(|beyond| beyond.flows > 0).then_some((*id, beyond))
        });
        beyond.collect()
    }

    /// Capacity of the two maps, IPv4 and IPv6.
    pub fn capacity(&self) -> [u32; 2] {
        self.capacity
    }

    /// Records that isolation has been configured or removed somewhere.
    pub fn expect_flows(&self) {
        self.expected.fetch_add(1, Ordering::SeqCst);
    }

    /// Records that nothing is isolated. If the last pass found no flows and nothing was isolated since it
    /// began, there can be no flows until something becomes isolated.
    pub fn nothing_isolated(&self) {
        let empty = locked(&self.census).as_ref().is_some_and(|census| census.v4 + census.v6 == 0);
        if empty {
            self.seen_empty.fetch_max(self.last_pass.load(Ordering::SeqCst), Ordering::SeqCst);
        }
    }

    /// Whether there can be flows at all. On a node without policies there are none, and a search at each DEL
    /// would be useless.
    pub fn may_hold_flows(&self) -> bool {
        self.expected.load(Ordering::SeqCst) > self.seen_empty.load(Ordering::SeqCst)
    }

    fn tell(&self, told: &mut BTreeMap<u32, usize>, ended: Ended) {
        let mut waiting = locked(&self.ended);
        let of_one = told.entry(ended.entry.flow.attachment).or_default();
        if *of_one < SHARE && waiting.flows.len() < KEPT {
            *of_one += 1;
            waiting.flows.push(ended);
        } else {
            waiting.untold += 1;
        }
    }
}

impl fmt::Debug for FlowTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FlowTable").finish_non_exhaustive()
    }
}

/// The map of one family.
struct FamilyTable<A> {
    name: &'static str,
    fd: OwnedFd,
    map: HashMap<MapData, FlowKey<A>, Flow>,
    keys: Vec<FlowKey<A>>,
    values: Vec<Flow>,
    capacity: u32,
}

impl<A> FamilyTable<A>
where
    A: Address + Eq + Hash,
    FlowKey<A>: Pod,
{
    fn open(pins: &Pins, name: &'static str) -> Result<Self, BpfError> {
        let path = pins.map(name);
        let failed = |source: MapError| BpfError::OpenMap { path: path.clone(), source };
        let fd = sys::open_pin(&path).map_err(|error| failed(error.into()))?;
        let capacity = aya::maps::MapInfo::from_pin(&path).map_err(failed)?.max_entries();
        let map = pins.open(name)?;
        Ok(Self { name, fd, map, keys: Vec::new(), values: Vec::new(), capacity })
    }

    /// Reads the entries of one batch and removes those for which `judge` returns an ending.
    fn look(
        &mut self,
        from: Option<u32>,
        now: u32,
        mut judge: impl FnMut(&FlowKey<A>, &Flow) -> Option<Ending>,
        end: &mut dyn FnMut(Ended),
    ) -> Result<Batch, BpfError> {
        let batch = self.read(from)?;
        for index in 0..batch.count {
            let (key, flow) = (self.keys[index], self.values[index]);
            let Some(ending) = judge(&key, &flow) else { continue };
            let still = |flow: &Flow| ending != Ending::Expired || flow.life().is_expired(key.protocol, now);
            if let Some(flow) = self.take_out(&key, still)? {
                end(Ended { at: now, entry: entry(&key, flow), ending });
            }
        }
        Ok(batch)
    }

    /// Removes every flow of these hosts.
    fn take_out_all(
        &mut self,
        hosts: &HashSet<(u32, A)>,
        now: u32,
        end: &mut dyn FnMut(Ended),
    ) -> Result<(), BpfError> {
        let mut next = None;
        while !hosts.is_empty() {
            let judge = |key: &FlowKey<A>, _: &Flow| {
                let is_ours = |host: A| hosts.contains(&(key.zone, host));
                (is_ours(key.low) || is_ours(key.high)).then_some(Ending::Detached)
            };
            next = self.look(next, now, judge, end)?.next;
            if next.is_none() {
                break;
            }
        }
        Ok(())
    }

    /// Fills `keys` and `values` with the next batch.
    fn read(&mut self, from: Option<u32>) -> Result<Batch, BpfError> {
        loop {
            self.keys.resize(self.keys.len().max(BATCH), none());
            self.values.resize(self.keys.len(), Flow::default());
            match sys::lookup_batch(self.fd.as_fd(), from, &mut self.keys, &mut self.values) {
                // More entries than that share a bucket.
                Err(error)
                    if error.raw_os_error() == Some(libc::ENOSPC)
                        && self.keys.len() < self.capacity as usize =>
                {
                    self.keys.resize(self.keys.len() * 2, none());
                }
                read => {
                    return read.map_err(|error| BpfError::ReadMap { map: self.name, source: error.into() });
                }
            }
        }
    }

    /// Removes an entry if it exists and has not changed; returns the entry.
    fn take_out(
        &mut self,
        key: &FlowKey<A>,
        meant: impl Fn(&Flow) -> bool,
    ) -> Result<Option<Flow>, BpfError> {
        let flow = match self.map.get(key, 0) {
            Ok(flow) if meant(&flow) => flow,
            Ok(_) | Err(MapError::KeyNotFound) => return Ok(None),
            Err(source) => return Err(BpfError::ReadMap { map: self.name, source }),
        };
        match self.map.remove(key) {
            Ok(()) => Ok(Some(flow)),
            Err(error) => match absent(error) {
                Ok(()) => Ok(None),
                Err(source) => Err(BpfError::WriteMap { map: self.name, source }),
            },
        }
    }
}

/// Seconds of the clock that the programs record.
pub(super) fn now() -> u32 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // Differences are computed with wrap-around, as in the programs.
    now.tv_sec as u32
}

fn none<A: Address>() -> FlowKey<A> {
    FlowKey {
        zone: 0,
        low: A::UNSPECIFIED,
        high: A::UNSPECIFIED,
        low_port: Port::NONE,
        high_port: Port::NONE,
        protocol: 0,
        tags: [0; 3],
    }
}

/// The hosts that have an address of one family.
fn family<A: Eq + Hash>(hosts: &BTreeSet<Host>, address: impl Fn(IpAddr) -> Option<A>) -> HashSet<(u32, A)> {
    hosts.iter().filter_map(|(zone, host)| Some((*zone, address(*host)?))).collect()
}

fn ip<A: Address>(address: A) -> IpAddr {
    IpAddr::V6(Ipv6Addr::from(address.widen())).to_canonical()
}

fn entry<A: Address>(key: &FlowKey<A>, flow: Flow) -> FlowEntry {
    let low = (ip(key.low), key.low_port.number());
    let high = (ip(key.high), key.high_port.number());
    let (opener, responder) = if flow.opened_by_low != 0 { (low, high) } else { (high, low) };
    let vlan = u16::from(key.tags[0]) << 4 | u16::from(key.tags[1]) >> 4;
    FlowEntry { zone: key.zone, opener, responder, protocol: key.protocol, vlan, flow }
}
