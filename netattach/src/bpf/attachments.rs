//! Attachments, their addresses and their devices: the maps that the attachment side writes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use aya::maps::{Array, HashMap, MapData};
use netattach_common::attachment::flag;
use netattach_common::{AddressKey, AttachmentRecord, Ip4, Ip6};

use super::BpfError;
use super::pin::{Pins, map_name};
use super::policies::{absent, insert, keys};
use crate::mac::Mac;

/// What the programs are to know about an attachment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    /// The pod-side interface's Ethernet address.
    pub mac: Mac,
    /// Addresses the pod may send from, the most used of each family first. The link-local address that
    /// follows from `mac` is always allowed as well.
    pub addresses: Vec<IpAddr>,
    /// Network id: flows of different zones never meet.
    pub zone: u32,
    /// What is checked.
    pub flags: Checks,
}

/// What is checked of an attachment's traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Checks {
    /// The pod sends from its own MAC only, and neither as a router nor as a DHCP server.
    pub source_mac: bool,
    /// The pod sends from its own addresses only.
    pub source_address: bool,
    /// A policy is still to be loaded: only ARP and neighbour discovery pass, until the attachment is put
    /// again without this.
    pub pending: bool,
}

impl Checks {
    fn bits(self) -> u32 {
        [
            (self.source_mac, flag::CHECK_MAC),
            (self.source_address, flag::CHECK_ADDRESS),
            (self.pending, flag::PENDING),
        ]
        .into_iter()
        .filter(|(set, _)| *set)
        .fold(0, |bits, (_, bit)| bits | bit)
    }
}

/// Handles of the attachment maps, and what is in them.
pub(super) struct Attachments {
    links: HashMap<MapData, u32, u32>,
    records: Array<MapData, AttachmentRecord>,
    addresses_v4: HashMap<MapData, AddressKey<Ip4>, u32>,
    addresses_v6: HashMap<MapData, AddressKey<Ip6>, u32>,
    /// Every allowed address in the maps, also of ids without a record.
    addresses: BTreeMap<u32, BTreeSet<IpAddr>>,
    /// Device to attachment.
    bound: BTreeMap<u32, u32>,
    max: u32,
}

impl Attachments {
    /// Opens the maps and takes stock.
    pub(super) fn open(pins: &Pins, max: u32) -> Result<Self, BpfError> {
        let links: HashMap<_, u32, u32> = pins.open(map_name::LINK)?;
        let addresses_v4: HashMap<_, AddressKey<Ip4>, u32> = pins.open(map_name::ADDRESS4)?;
        let addresses_v6: HashMap<_, AddressKey<Ip6>, u32> = pins.open(map_name::ADDRESS6)?;
        let mut addresses: BTreeMap<u32, BTreeSet<IpAddr>> = BTreeMap::new();
        for key in keys(addresses_v4.keys(), map_name::ADDRESS4, |_| true)? {
            addresses.entry(key.attachment).or_default().insert(IpAddr::V4(key.address.into()));
        }
        for key in keys(addresses_v6.keys(), map_name::ADDRESS6, |_| true)? {
            addresses.entry(key.attachment).or_default().insert(IpAddr::V6(key.address.into()));
        }
        let bound = links
            .iter()
            .collect::<Result<_, _>>()
            .map_err(|source| BpfError::ReadMap { map: map_name::LINK, source })?;
        let records = pins.open(map_name::ATTACHMENT)?;
        Ok(Self { links, records, addresses_v4, addresses_v6, addresses, bound, max })
    }

    /// Creates or changes an attachment: new addresses, then the record, then without the old addresses.
    pub(super) fn put(&mut self, id: u32, attachment: &Attachment) -> Result<(), BpfError> {
        self.check(id)?;
        let wanted: BTreeSet<IpAddr> = attachment.addresses.iter().copied().collect();
        let present = self.addresses.get(&id).cloned().unwrap_or_default();
        for address in wanted.difference(&present) {
            self.allow(id, *address)?;
        }
        let mac = netattach_common::Mac { octets: attachment.mac.0 };
        let mut record = AttachmentRecord::new(mac, attachment.zone, attachment.flags.bits());
        record.host_ifindex = self.device_of(id).unwrap_or(0);
        for address in attachment.addresses.iter().rev() {
            match address {
                IpAddr::V4(v4) => record.ipv4 = Ip4::from(*v4),
                IpAddr::V6(v6) => record.ipv6 = Ip6::from(*v6),
            }
        }
        self.write_record(id, record)?;
        for address in present.difference(&wanted) {
            self.disallow(id, *address)?;
        }
        Ok(())
    }

    /// Makes a device an attachment's, which must have a record.
    pub(super) fn bind(&mut self, ifindex: u32, id: u32) -> Result<(), BpfError> {
        self.check(id)?;
        let mut record = self.record(id)?;
        if !record.has(flag::PRESENT) {
            return Err(BpfError::UnknownAttachment(id));
        }
        insert(&mut self.links, map_name::LINK, ifindex, id)?;
        self.bound.insert(ifindex, id);
        record.host_ifindex = ifindex;
        self.write_record(id, record)
    }

    /// Makes a device nobody's. One that is nobody's is fine.
    pub(super) fn unbind(&mut self, ifindex: u32) -> Result<(), BpfError> {
        let failed = |source| BpfError::WriteMap { map: map_name::LINK, source };
        self.links.remove(&ifindex).or_else(absent).map_err(failed)?;
        let Some(id) = self.bound.remove(&ifindex) else {
            return Ok(());
        };
        let mut record = self.record(id)?;
        if record.host_ifindex == ifindex {
            record.host_ifindex = 0;
            self.write_record(id, record)?;
        }
        Ok(())
    }

    /// Removes an attachment's devices, record and addresses, in this order.
    pub(super) fn remove(&mut self, id: u32) -> Result<(), BpfError> {
        self.check(id)?;
        let devices: Vec<u32> =
            self.bound.iter().filter(|(_, bound)| **bound == id).map(|(ifindex, _)| *ifindex).collect();
        for ifindex in devices {
            self.unbind(ifindex)?;
        }
        self.write_record(id, AttachmentRecord::FREE)?;
        for address in self.addresses.get(&id).cloned().unwrap_or_default() {
            self.disallow(id, address)?;
        }
        Ok(())
    }

    /// Every attachment with a record.
    pub(super) fn records(&self) -> Result<BTreeMap<u32, AttachmentRecord>, BpfError> {
        let mut present = BTreeMap::new();
        for id in 1..self.max {
            let record = self.record(id)?;
            if record.has(flag::PRESENT) {
                present.insert(id, record);
            }
        }
        Ok(present)
    }

    /// Which addresses the maps allow which attachment, also ids without a record.
    pub(super) fn addresses(&self) -> &BTreeMap<u32, BTreeSet<IpAddr>> {
        &self.addresses
    }

    /// Device to attachment.
    pub(super) fn bound(&self) -> &BTreeMap<u32, u32> {
        &self.bound
    }

    /// Ids start at 1: slot 0 counts the packets of unbound devices.
    pub(super) fn check(&self, id: u32) -> Result<(), BpfError> {
        if (1..self.max).contains(&id) {
            Ok(())
        } else {
            Err(BpfError::InvalidAttachment { id, max: self.max - 1 })
        }
    }

    fn device_of(&self, id: u32) -> Option<u32> {
        self.bound.iter().find(|(_, bound)| **bound == id).map(|(ifindex, _)| *ifindex)
    }

    fn record(&self, id: u32) -> Result<AttachmentRecord, BpfError> {
        self.records.get(&id, 0).map_err(|source| BpfError::ReadMap { map: map_name::ATTACHMENT, source })
    }

    fn write_record(&mut self, id: u32, record: AttachmentRecord) -> Result<(), BpfError> {
        let failed = |source| BpfError::WriteMap { map: map_name::ATTACHMENT, source };
        self.records.set(id, record, 0).map_err(failed)
    }

    fn allow(&mut self, id: u32, address: IpAddr) -> Result<(), BpfError> {
        match address {
            IpAddr::V4(v4) => {
                let key = AddressKey { attachment: id, address: Ip4::from(v4) };
                insert(&mut self.addresses_v4, map_name::ADDRESS4, key, 1)?;
            }
            IpAddr::V6(v6) => {
                let key = AddressKey { attachment: id, address: Ip6::from(v6) };
                insert(&mut self.addresses_v6, map_name::ADDRESS6, key, 1)?;
            }
        }
        self.addresses.entry(id).or_default().insert(address);
        Ok(())
    }

    fn disallow(&mut self, id: u32, address: IpAddr) -> Result<(), BpfError> {
        let (result, map) = match address {
            IpAddr::V4(v4) => {
                let key = AddressKey { attachment: id, address: Ip4::from(v4) };
                (self.addresses_v4.remove(&key), map_name::ADDRESS4)
            }
            IpAddr::V6(v6) => {
                let key = AddressKey { attachment: id, address: Ip6::from(v6) };
                (self.addresses_v6.remove(&key), map_name::ADDRESS6)
            }
        };
        result.or_else(absent).map_err(|source| BpfError::WriteMap { map, source })?;
        if let Some(addresses) = self.addresses.get_mut(&id) {
            addresses.remove(&address);
            if addresses.is_empty() {
                self.addresses.remove(&id);
            }
        }
        Ok(())
    }
}
