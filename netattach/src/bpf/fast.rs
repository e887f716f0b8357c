//! The fast path between pods: who takes part, until when, and what it carried.
//!
//! Nothing in these maps is worth keeping across a death of the agent, so there is no point at which one would matter:
//! its successor begins with empty ones.

use std::collections::BTreeMap;
use std::time::Duration;

use aya::maps::{Array, HashMap, MapData, MapError, PerCpuArray, PerCpuValues};
use netattach_common::{FastPort, FastStats, StationKey};
use rustix::time::{ClockId, clock_gettime};

use super::BpfError;
use super::entries::{absent, keys};
use super::pin::{Pins, map_name};
use super::table::Table;
use crate::mac::Mac;

/// An attachment's place on the fast path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// What the node's end is connected to.
    pub segment: Segment,
    /// MTU of the node's end.
    pub mtu: u32,
    /// The pod's address on the bridge: no other attachment on it has the same.
    pub mac: Mac,
}

/// Where packets find each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Segment {
    /// The bridge of this index; not 0.
    Bridge(u32),
    /// The node's routing.
    Routed,
}

/// Handles of the maps of the fast path, and what is in them. One owner at a time: it remembers what it wrote.
pub struct FastPath {
    ports: Array<MapData, FastPort>,
    stations: HashMap<MapData, StationKey, u32>,
    stats: PerCpuArray<MapData, FastStats>,
    until: Array<MapData, u64>,
    places: BTreeMap<u32, Place>,
    cpus: usize,
}

impl FastPath {
    /// Opens the maps and takes everybody off the fast path: what an earlier agent knew of the node may not be so any
    /// more. Counters stay.
    pub(super) fn open(pins: &Pins, cpus: usize) -> Result<Self, BpfError> {
        let mut opened = Self {
            ports: pins.open(map_name::FAST_PORT)?,
            stations: pins.open(map_name::STATION)?,
            stats: pins.open(map_name::FAST_STATS)?,
            until: pins.open(map_name::FAST_UNTIL)?,
            places: BTreeMap::new(),
            cpus,
        };
        opened.write_until(0)?;
        for key in keys(opened.stations.keys(), map_name::STATION, |_| true)? {
            opened.remove_station(&key)?;
        }
        for (id, port) in Table::<u32, FastPort>::open(pins, map_name::FAST_PORT)?.read()? {
            if port != FastPort::default() {
                opened.write_port(id, FastPort::default())?;
            }
        }
        Ok(opened)
    }

    /// Gives an attachment its place, or another one.
    ///
    /// # Errors
    /// A map could not be written: the attachment is on the fast path as it was before, or not at all.
    pub fn put(&mut self, id: u32, place: Place) -> Result<(), BpfError> {
        let before = self.places.get(&id).copied();
        if before == Some(place) {
            return Ok(());
        }
        if before.is_some_and(|before| (before.segment, before.mac) != (place.segment, place.mac)) {
            self.remove(id)?;
        }
        let bridge = match place.segment {
            Segment::Bridge(index) => index,
            Segment::Routed => FastPort::ROUTED,
        };
        self.write_port(id, FastPort { bridge, mtu: place.mtu })?;
        if let Some(station) = station(&place) {
            self.stations
                .insert(station, id, 0)
                .map_err(|source| BpfError::WriteMap { map: map_name::STATION, source })?;
        }
        self.places.insert(id, place);
        Ok(())
    }

    /// Takes an attachment off the fast path: from here on what it sends, and what is sent to it, takes the stack.
    /// Idempotent.
    ///
    /// # Errors
    /// A map could not be written.
    pub fn remove(&mut self, id: u32) -> Result<(), BpfError> {
        let Some(place) = self.places.get(&id).copied() else { return Ok(()) };
        if let Some(station) = station(&place) {
            self.remove_station(&station)?;
        }
        self.write_port(id, FastPort::default())?;
        self.places.remove(&id);
        Ok(())
    }

    /// Takes an attachment off the fast path and clears its counters. Idempotent.
    ///
    /// # Errors
    /// A map could not be written.
    pub fn forget(&mut self, id: u32) -> Result<(), BpfError> {
        self.remove(id)?;
        let failed = |source| BpfError::WriteMap { map: map_name::FAST_STATS, source };
        let zeros = PerCpuValues::try_from(vec![FastStats::default(); self.cpus])
            .map_err(|error| failed(MapError::from(error)))?;
        self.stats.set(id, zeros, 0).map_err(failed)
    }

    /// Who is on the fast path.
    pub fn places(&self) -> &BTreeMap<u32, Place> {
        &self.places
    }

    /// The fast path may be taken for this long from now, unless this is called again.
    ///
    /// # Errors
    /// The map could not be written.
    pub fn renew(&mut self, length: Duration) -> Result<(), BpfError> {
        let now = clock_gettime(ClockId::Monotonic);
        // Neither is negative: the clock counts from the start of the node.
        let now = Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32);
        let until = now.saturating_add(length).as_nanos();
        self.write_until(u64::try_from(until).unwrap_or(u64::MAX))
    }

    /// The counters of an attachment, summed over CPUs.
    ///
    /// # Errors
    /// The map could not be read.
    pub fn stats(&self, id: u32) -> Result<FastStats, BpfError> {
        let failed = |source| BpfError::ReadMap { map: map_name::FAST_STATS, source };
        let mut total = FastStats::default();
        for part in self.stats.get(&id, 0).map_err(failed)?.iter() {
            total.add(part);
        }
        Ok(total)
    }

    fn write_until(&mut self, until: u64) -> Result<(), BpfError> {
        self.until.set(0, until, 0).map_err(|source| BpfError::WriteMap { map: map_name::FAST_UNTIL, source })
    }

    fn write_port(&mut self, id: u32, port: FastPort) -> Result<(), BpfError> {
        self.ports
            .set(id, port, 0)
            .map_err(|source| BpfError::WriteMap { map: map_name::FAST_PORT, source })?;
        Ok(())
    }

    fn remove_station(&mut self, key: &StationKey) -> Result<(), BpfError> {
        let failed = |source| BpfError::WriteMap { map: map_name::STATION, source };
        self.stations.remove(key).or_else(absent).map_err(failed)?;
        Ok(())
    }
}

impl std::fmt::Debug for FastPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FastPath").field("places", &self.places).finish_non_exhaustive()
    }
}

/// How an attachment is found on its bridge.
fn station(place: &Place) -> Option<StationKey> {
    match place.segment {
        Segment::Bridge(index) => Some(StationKey::new(index, netattach_common::Mac { octets: place.mac.0 })),
        Segment::Routed => None,
    }
}
