//! The maps of the fast path between pods, and between pods and uplinks: members, deadline and counters.
//!
//! An agent begins with empty maps, so these maps contain nothing that has to survive the agent, and no
//! moment at which an agent's end would matter.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use aya::maps::{Array, HashMap, MapData, PerCpuArray};
use netattach_common as common;
use netattach_common::uplink::flag;
use netattach_common::{FastPort, FastStats, LocalKey, StationKey};
use rustix::time::{ClockId, clock_gettime};

use super::BpfError;
use super::batched_map::BatchedMap;
use super::links::{LinkPlace, Links};
use super::map_ops::{absent, insert, keys};
use super::map_table::map_name;
use super::pin::Pins;
use super::program_table::Program;
use super::sys::{self, XdpMode};
use crate::mac::Mac;

/// An attachment's place on the fast path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The device that the node's end is connected to.
    pub segment: Segment,
    /// MTU of the node's end.
    pub mtu: u32,
    /// The pod's address on the bridge: no other attachment on it has the same.
    pub mac: Mac,
}

/// The segment in which packets are switched or routed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Segment {
    /// The bridge of this index; not 0.
    Bridge(u32),
    /// The node's routing.
    Routed,
}

impl Segment {
    /// Index of the bridge, if it is one.
    pub fn bridge(self) -> Option<u32> {
        match self {
            Self::Bridge(index) => Some(index),
            Self::Routed => None,
        }
    }

    fn number(self) -> u32 {
        match self {
            Self::Bridge(index) => index,
            Self::Routed => FastPort::ROUTED,
        }
    }
}

/// A device of the node that belongs to no attachment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Uplink {
    /// Segment of frames that come in by the device; `None` for a bridge that is only a gateway.
    pub leads_to: Option<Segment>,
    /// Whether packets may take the fast path by the device.
    pub fast: bool,
    /// The packets that XDP drops, before the kernel allocates them.
    pub xdp: Option<XdpDrops>,
    /// Whether the device is a bridge by which the node routes from and to the attachments on it.
    pub gateway: bool,
    /// In bytes.
    pub mtu: u32,
    /// MAC address of the device.
    pub mac: Mac,
}

/// The packets that the XDP program drops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum XdpDrops {
    /// Frames from addresses of attachments.
    Spoofed,
    /// These, and packets that policies do not allow.
    SpoofedAndDenied,
}

/// An address of an attachment, with its segment.
pub type Local = (Segment, IpAddr);

/// The maps of the fast path, with a cache of their entries. Only one owner at a time.
pub struct FastPath {
    ports: Array<MapData, FastPort>,
    stations: HashMap<MapData, StationKey, u32>,
    stats: PerCpuArray<MapData, FastStats>,
    until: Array<MapData, u64>,
    uplinks: HashMap<MapData, u32, common::Uplink>,
    locals: HashMap<MapData, LocalKey, u32>,
    xdp: OwnedFd,
    links: Links,
    places: BTreeMap<u32, Place>,
    known_uplinks: BTreeMap<u32, Uplink>,
    known_locals: BTreeMap<Local, u32>,
}

impl FastPath {
    /// Opens the maps and takes all attachments off the fast path, because what an earlier agent knew about
    /// the node may be outdated. Counters stay.
    pub(super) fn open(pins: &Pins, links: Links) -> Result<Self, BpfError> {
        let mut opened = Self {
            ports: pins.open(map_name::FAST_PORT)?,
            stations: pins.open(map_name::STATION)?,
            stats: pins.open(map_name::FAST_STATS)?,
            until: pins.open(map_name::FAST_UNTIL)?,
            uplinks: pins.open(map_name::UPLINK)?,
            locals: pins.open(map_name::LOCAL)?,
            xdp: open_xdp(pins)?,
            links,
            places: BTreeMap::new(),
            known_uplinks: BTreeMap::new(),
            known_locals: BTreeMap::new(),
        };
        opened.write_until(0)?;
        for key in keys(opened.uplinks.keys(), map_name::UPLINK, |_| true)? {
            opened.remove_uplink(key)?;
        }
        for key in keys(opened.locals.keys(), map_name::LOCAL, |_| true)? {
            opened.remove_local(&key)?;
        }
        for key in keys(opened.stations.keys(), map_name::STATION, |_| true)? {
            opened.remove_station(&key)?;
        }
        for (id, port) in BatchedMap::<u32, FastPort>::open(pins, map_name::FAST_PORT)?.read()? {
            if port != FastPort::default() {
                opened.write_port(id, FastPort::default())?;
            }
        }
        Ok(opened)
    }

    /// Puts an attachment on the fast path, or changes its place.
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
        self.write_port(id, FastPort { bridge: place.segment.number(), mtu: place.mtu })?;
        if let Some(station) = station(&place) {
            self.stations
                .insert(station, id, 0)
                .map_err(|source| BpfError::WriteMap { map: map_name::STATION, source })?;
        }
        self.places.insert(id, place);
        Ok(())
    }

    /// Takes an attachment off the fast path: from now on its packets go through the network stack.
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

    /// Takes an attachment off the fast path, and removes its addresses from those that uplinks lead to: from
    /// now on no packet is counted for it here. Idempotent.
    ///
    /// # Errors
    /// A map could not be written.
    pub fn forget(&mut self, id: u32) -> Result<(), BpfError> {
        self.remove(id)?;
        let its = self.known_locals.iter().filter(|(_, of)| **of == id).map(|(local, _)| *local);
        for local in its.collect::<Vec<_>>() {
            self.remove_local(&local_key(&local))?;
            self.known_locals.remove(&local);
        }
        Ok(())
    }

    /// The attachments on the fast path.
    pub fn places(&self) -> &BTreeMap<u32, Place> {
        &self.places
    }

    /// Sets the uplinks, and removes all others.
    ///
    /// # Errors
    /// A map could not be written: some uplinks may be on or off the fast path contrary to `wanted`.
    pub fn set_uplinks(&mut self, wanted: BTreeMap<u32, Uplink>) -> Result<(), BpfError> {
        let gone = self.known_uplinks.keys().filter(|index| !wanted.contains_key(index));
        for index in gone.copied().collect::<Vec<_>>() {
            self.close_gateway(index)?;
            self.remove_uplink(index)?;
            self.known_uplinks.remove(&index);
        }
        for (index, uplink) in wanted {
            if self.known_uplinks.get(&index) != Some(&uplink) {
                self.close_gateway(index)?;
                insert(&mut self.uplinks, map_name::UPLINK, index, entry(&uplink))?;
                self.known_uplinks.insert(index, uplink);
                if uplink.gateway {
                    let station = gateway_station(index, &uplink);
                    insert(&mut self.stations, map_name::STATION, station, StationKey::GATEWAY)?;
                }
            }
        }
        Ok(())
    }

    /// Removes a bridge's own address from the stations, if present.
    fn close_gateway(&mut self, index: u32) -> Result<(), BpfError> {
        match self.known_uplinks.get(&index).filter(|uplink| uplink.gateway) {
            Some(uplink) => self.remove_station(&gateway_station(index, uplink)),
            None => Ok(()),
        }
    }

    /// The uplinks.
    pub fn uplinks(&self) -> &BTreeMap<u32, Uplink> {
        &self.known_uplinks
    }

    /// Sets the addresses that uplinks lead to, and removes all others.
    ///
    /// # Errors
    /// A map could not be written.
    pub fn set_locals(&mut self, wanted: BTreeMap<Local, u32>) -> Result<(), BpfError> {
        let gone = self.known_locals.keys().filter(|local| !wanted.contains_key(local));
        for local in gone.copied().collect::<Vec<_>>() {
            self.remove_local(&local_key(&local))?;
            self.known_locals.remove(&local);
        }
        for (local, id) in wanted {
            if self.known_locals.get(&local) != Some(&id) {
                insert(&mut self.locals, map_name::LOCAL, local_key(&local), id)?;
                self.known_locals.insert(local, id);
            }
        }
        Ok(())
    }

    /// Attaches the XDP program to an uplink.
    ///
    /// # Errors
    /// [`BpfError::AttachLink`]: the driver does not support XDP, or runs another program.
    pub fn attach_xdp(&self, ifindex: u32, mode: XdpMode) -> Result<(), BpfError> {
        self.links.ensure(LinkPlace::Xdp { ifindex, mode }, self.xdp.as_fd())
    }

    /// Detaches the XDP program in that mode from an uplink. Idempotent.
    ///
    /// # Errors
    /// The pin cannot be removed.
    pub fn detach_xdp(&self, ifindex: u32, mode: XdpMode) -> Result<(), BpfError> {
        self.links.remove(LinkPlace::Xdp { ifindex, mode })
    }

    /// The devices that run the XDP program, or ran it before they were deleted, with its mode.
    ///
    /// # Errors
    /// The pins cannot be listed.
    pub fn xdp_devices(&self) -> Result<BTreeSet<(u32, XdpMode)>, BpfError> {
        self.links.xdp_devices()
    }

    /// The time of the clock by which the programs detect the end of the fast path's lease.
    pub fn now() -> Duration {
        // Never negative: the clock counts from the start of the node.
        Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap_or_default()
    }

    /// Lets packets take the fast path until that time of [`FastPath::now`]; later calls extend it.
    ///
    /// # Errors
    /// The map could not be written.
    pub fn renew(&mut self, until: Duration) -> Result<(), BpfError> {
        self.write_until(u64::try_from(until.as_nanos()).unwrap_or(u64::MAX))
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

    fn remove_uplink(&mut self, ifindex: u32) -> Result<(), BpfError> {
        let failed = |source| BpfError::WriteMap { map: map_name::UPLINK, source };
        self.uplinks.remove(&ifindex).or_else(absent).map_err(failed)
    }

    fn remove_local(&mut self, key: &LocalKey) -> Result<(), BpfError> {
        let failed = |source| BpfError::WriteMap { map: map_name::LOCAL, source };
        self.locals.remove(key).or_else(absent).map_err(failed)
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

/// Opens the pin without aya, which would require more information about the program than is available here.
fn open_xdp(pins: &Pins) -> Result<OwnedFd, BpfError> {
    let path = pins.program(Program::Xdp);
    sys::open_pin(&path).map_err(|source| BpfError::PinTree { action: "open the program", path, source })
}

fn entry(uplink: &Uplink) -> common::Uplink {
    let flags = [
        (uplink.fast, flag::FAST),
        (uplink.gateway, flag::GATEWAY),
        (uplink.xdp.is_some(), flag::SPOOFED),
        (uplink.xdp == Some(XdpDrops::SpoofedAndDenied), flag::DENIED),
    ];
    common::Uplink {
        segment: uplink.leads_to.map_or(0, Segment::number),
        flags: flags.into_iter().filter(|(set, _)| *set).fold(0, |flags, (_, bit)| flags | bit),
        mtu: uplink.mtu,
        mac: common::Mac { octets: uplink.mac.0 },
        pad: [0; 2],
    }
}

fn gateway_station(index: u32, uplink: &Uplink) -> StationKey {
    StationKey::new(index, common::Mac { octets: uplink.mac.0 })
}

fn local_key((segment, address): &Local) -> LocalKey {
    let address = match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => *v6,
    };
    LocalKey { segment: segment.number(), address: address.into() }
}

/// The key of an attachment on its bridge.
fn station(place: &Place) -> Option<StationKey> {
    match place.segment {
        Segment::Bridge(index) => Some(StationKey::new(index, netattach_common::Mac { octets: place.mac.0 })),
        Segment::Routed => None,
    }
}
