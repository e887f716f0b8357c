//! Attachments, their addresses and their devices: the maps about attachments.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;
use std::time::Instant;

use aya::maps::{Array, MapData};
use ipnet::Ipv6Net;
use netattach_common::attachment::flag;
use netattach_common::key::source;
use netattach_common::{
    AddressKey, AttachmentRecord, Ip4, Ip6, Limits, ParentEntry, ParentKey, Prefix, Rate, VlanKey,
};

use super::BpfError;
use super::batched_map::BatchedMap;
use super::flows::Host;
use super::map_ops::MapOps;
use super::map_table::map_name;
use super::parents::{Device, OnParent, Parents};
use super::pin::{self, Pins};
use crate::mac::Mac;

/// An attachment in the form of the programs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    /// Ethernet address of the interface in the pod.
    pub mac: Mac,
    /// The pod's own addresses, the most used of each family first. The pod may send from these and from the
    /// link-local address that is derived from `mac`.
    pub addresses: Vec<IpAddr>,
    /// Further addresses from which the pod may send, as may others of its network. An attachment with such
    /// addresses takes part in router protocols ([`flag::SHARES_ADDRESSES`]).
    pub shared: Vec<IpAddr>,
    /// The IPv6 prefixes of its link; the programs do not know those beyond the first [`Prefix::MOST`].
    pub on_link: Vec<Ipv6Net>,
    /// Ethertypes that pass in spite of policies; those beyond the first [`AttachmentRecord::ETHERTYPES`] do
    /// not.
    pub ethertypes: Vec<u16>,
    /// Network id: flows of different zones never meet.
    pub zone: u32,
    /// The checks of its traffic.
    pub flags: Checks,
    /// VLAN ids (0 to 4095) that tagged frames may have; without any, tagged frames are dropped.
    pub vlans: BTreeSet<u16>,
    /// Rate limits.
    pub limits: Limits,
}

/// The checks of an attachment's traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Checks {
    /// The pod may send from its own MAC address only, and neither as a router nor as a DHCP server.
    pub source_mac: bool,
    /// The pod may send from its own IP addresses only.
    pub source_address: bool,
    /// A policy is still to be loaded: only ARP and neighbour discovery pass, until `Attachments::put`
    /// writes the attachment without this flag.
    pub pending: bool,
    /// A connection must begin with its first packet; otherwise a connection that is older than the flow
    /// table is accepted as opened by the sender of the first packet that is seen.
    pub strict_connections: bool,
    /// Flows stay approved when the policy that approved them is replaced.
    pub keep_established: bool,
    /// ICMP passes in spite of policies.
    pub accept_icmp: bool,
    /// ICMPv6 passes in spite of policies.
    pub accept_icmpv6: bool,
    /// The pod's packet sockets may not set a protocol that differs from that of their frames, because
    /// everything after the programs relies on that protocol.
    pub one_protocol: bool,
}

/// Maximum records per second about drops on devices without an attachment.
const STRANGERS_RECORDS: u64 = 100;

impl Checks {
    fn bits(self) -> u32 {
        [
            (self.strict_connections, flag::NO_MIDSTREAM),
            (self.keep_established, flag::KEEP_ESTABLISHED),
            (self.accept_icmp, flag::ACCEPT_ICMP),
            (self.accept_icmpv6, flag::ACCEPT_ICMPV6),
            (self.source_mac, flag::CHECK_MAC),
            (self.source_address, flag::CHECK_ADDRESS),
            (self.pending, flag::PENDING),
            (self.one_protocol, flag::ONE_PROTOCOL),
        ]
        .into_iter()
        .filter(|(set, _)| *set)
        .fold(0, |bits, (_, bit)| bits | bit)
    }
}

/// The maps of attachments.
pub(super) struct Maps {
    /// Device to attachment.
    pub(super) links: Box<dyn MapOps<u32, u32>>,
    pub(super) records: Box<dyn MapOps<u32, AttachmentRecord>>,
    pub(super) addresses_v4: Box<dyn MapOps<AddressKey<Ip4>, u32>>,
    pub(super) addresses_v6: Box<dyn MapOps<AddressKey<Ip6>, u32>>,
    pub(super) vlans: Box<dyn MapOps<VlanKey, u32>>,
    pub(super) limits: Box<dyn MapOps<u32, Limits>>,
    pub(super) parents: Box<dyn MapOps<ParentKey, ParentEntry>>,
}

impl Maps {
    pub(super) fn open(pins: &Pins) -> Result<Self, BpfError> {
        Ok(Self {
            links: Box::new(BatchedMap::open(pins, map_name::LINK)?),
            records: Box::new(BatchedMap::open(pins, map_name::ATTACHMENT)?),
            addresses_v4: Box::new(BatchedMap::open(pins, map_name::ADDRESS4)?),
            addresses_v6: Box::new(BatchedMap::open(pins, map_name::ADDRESS6)?),
            vlans: Box::new(BatchedMap::open(pins, map_name::VLAN)?),
            limits: Box::new(BatchedMap::open(pins, map_name::LIMIT)?),
            parents: Box::new(BatchedMap::open(pins, map_name::PARENT)?),
        })
    }
}

/// The maps of attachments, with a cache of their entries.
pub(super) struct Attachments {
    links: Box<dyn MapOps<u32, u32>>,
    record_map: Box<dyn MapOps<u32, AttachmentRecord>>,
    addresses_v4: Box<dyn MapOps<AddressKey<Ip4>, u32>>,
    addresses_v6: Box<dyn MapOps<AddressKey<Ip6>, u32>>,
    vlan_map: Box<dyn MapOps<VlanKey, u32>>,
    limits: Box<dyn MapOps<u32, Limits>>,
    /// Records that belong to an attachment.
    present: BTreeMap<u32, AttachmentRecord>,
    /// Numbers whose attachment is gone but which are not free yet, with the time of removal.
    resting: BTreeMap<u32, Instant>,
    /// Attachments with a record whose flows are being or have been removed; they open no new flows.
    leaving: BTreeSet<u32>,
    /// Every allowed VLAN in the maps.
    vlans: BTreeMap<u32, BTreeSet<u16>>,
    /// Every allowed address in the maps with its kind ([`source`]), also of ids without a record.
    addresses: BTreeMap<u32, BTreeMap<IpAddr, u32>>,
    /// Device to attachment.
    bound: BTreeMap<u32, u32>,
    /// Macvlans, which share a device.
    pub(super) parents: Parents,
    max: u32,
}

impl Attachments {
    /// Reads the entries of the maps.
    pub(super) fn over(maps: Maps, max: u32) -> Result<Self, BpfError> {
        let Maps { mut links, mut records, mut addresses_v4, mut addresses_v6, mut vlans, limits, parents } =
            maps;
        let mut addresses: BTreeMap<u32, BTreeMap<IpAddr, u32>> = BTreeMap::new();
        for (key, kind) in addresses_v4.all()? {
            addresses.entry(key.attachment).or_default().insert(IpAddr::V4(key.address.into()), kind);
        }
        for (key, kind) in addresses_v6.all()? {
            addresses.entry(key.attachment).or_default().insert(IpAddr::V6(key.address.into()), kind);
        }
        let mut allowed: BTreeMap<u32, BTreeSet<u16>> = BTreeMap::new();
        for (key, _) in vlans.all()? {
            // The programs look up 12 bits only: other keys match nothing.
            allowed.entry(key.attachment).or_default().extend(u16::try_from(key.vlan));
        }
        let mut present = records.all()?;
        // An earlier agent may have released them just before.
        let now = Instant::now();
        let at_rest = present.iter().filter(|(_, record)| *record == AttachmentRecord::RESTING);
        let resting = at_rest.map(|(id, _)| (*id, now)).collect();
        present.retain(|(id, record)| *id != 0 && record.has(flag::PRESENT));
        let mut opened = Self {
            bound: links.all()?.into_iter().collect(),
            links,
            record_map: records,
            addresses_v4,
            addresses_v6,
            vlan_map: vlans,
            limits,
            present: present.into_iter().collect(),
            resting,
            leaving: BTreeSet::new(),
            vlans: allowed,
            addresses,
            parents: Parents::over(parents)?,
            max,
        };
        let strangers =
            Limits { drop_records: Rate::new(STRANGERS_RECORDS, STRANGERS_RECORDS), ..Limits::default() };
        opened.write_limits(0, strangers)?;
        opened.forget_lost_devices()?;
        Ok(opened)
    }

    /// Removes devices from records to which `na_link` does not assign them: an agent may have been killed
    /// between writing `na_link` and a record, and the programs trust the record.
    fn forget_lost_devices(&mut self) -> Result<(), BpfError> {
        let on_parents: BTreeSet<u32> = self.parents.attachments().collect();
        let lost: Vec<(u32, u32)> = self
            .present
            .iter()
            .map(|(id, record)| (*id, record.host_ifindex))
            .filter(|(id, ifindex)| *ifindex != 0 && self.bound.get(ifindex) != Some(id))
            .filter(|(id, _)| !on_parents.contains(id))
            .collect();
        lost.into_iter().try_for_each(|(id, ifindex)| self.forget_device(id, ifindex))
    }

    /// Creates or changes an attachment: adds new addresses, then writes the record, then removes old
    /// addresses.
    pub(super) fn put(&mut self, id: u32, attachment: &Attachment) -> Result<(), BpfError> {
        self.check(id)?;
        let wanted = sources(attachment);
        let present = self.addresses.get(&id).cloned().unwrap_or_default();
        for (address, kind) in &wanted {
            if present.get(address) != Some(kind) {
                self.allow(id, *address, *kind)?;
            }
        }
        let no_vlans = BTreeSet::new();
        let vlans = self.vlans.get(&id).unwrap_or(&no_vlans).clone();
        for vlan in attachment.vlans.difference(&vlans) {
            self.allow_vlan(id, *vlan)?;
        }
        self.write_limits(id, attachment.limits)?;
        let device = self.present.get(&id).map_or(0, |record| record.host_ifindex);
        self.write_record(id, Self::record_of(attachment, device))?;
        for address in present.into_keys().filter(|address| !wanted.contains_key(address)) {
            self.disallow(id, address)?;
        }
        for vlan in vlans.difference(&attachment.vlans) {
            self.disallow_vlan(id, *vlan)?;
        }
        Ok(())
    }

    /// Binds a device to an attachment, which must have a record.
    pub(super) fn bind(&mut self, ifindex: u32, id: u32) -> Result<(), BpfError> {
        self.check(id)?;
        let mut record = self.known(id)?;
        let before = self.bound.get(&ifindex).copied();
        if before != Some(id) {
            self.links.put(ifindex, id)?;
            self.bound.insert(ifindex, id);
        }
        // The programs trust a record that names the device (`na_hint`), so only one record may name it.
        if let Some(before) = before.filter(|before| *before != id) {
            self.forget_device(before, ifindex)?;
        }
        record.host_ifindex = ifindex;
        self.write_record(id, record)
    }

    /// Binds an address on a parent to an attachment, which must have a record.
    pub(super) fn bind_macvlan(&mut self, id: u32, on: &OnParent) -> Result<(), BpfError> {
        self.check(id)?;
        let mut record = self.known(id)?;
        record.host_ifindex = on.parent;
        self.write_record(id, record)?;
        self.parents.bind(id, record.mac, on)
    }

    /// Unbinds a device. Idempotent.
    pub(super) fn unbind(&mut self, ifindex: u32) -> Result<(), BpfError> {
        self.links.remove(&ifindex)?;
        match self.bound.remove(&ifindex) {
            Some(id) => self.forget_device(id, ifindex),
            None => Ok(()),
        }
    }

    /// Removes a device from an attachment's record if the record names it.
    fn forget_device(&mut self, id: u32, ifindex: u32) -> Result<(), BpfError> {
        match self.present.get(&id).copied() {
            Some(record) if record.host_ifindex == ifindex => {
                self.write_record(id, AttachmentRecord { host_ifindex: 0, ..record })
            }
            _ => Ok(()),
        }
    }

    /// Removes an attachment's devices, record and addresses, in this order. Once the record is removed the
    /// number is at rest: packets that have read the record may still be counted for it.
    pub(super) fn remove(&mut self, id: u32) -> Result<(), BpfError> {
        self.check(id)?;
        for ifindex in self.devices_of(id) {
            self.unbind(ifindex)?;
        }
        self.parents.unbind(id)?;
        self.write_record(id, AttachmentRecord::RESTING)?;
        self.resting.insert(id, Instant::now());
        for address in self.addresses.get(&id).cloned().unwrap_or_default().into_keys() {
            self.disallow(id, address)?;
        }
        for vlan in self.vlans.get(&id).cloned().unwrap_or_default() {
            self.disallow_vlan(id, vlan)?;
        }
        self.write_limits(id, Limits::default())
    }

    /// The numbers at rest, with the time since when.
    pub(super) fn resting(&self) -> &BTreeMap<u32, Instant> {
        &self.resting
    }

    /// Frees a number that has been at rest since `since`, and clears what packets in flight have charged to
    /// its limits. Does nothing if the number belongs to another attachment now, or has come to rest again.
    pub(super) fn free(&mut self, id: u32, since: Instant) -> Result<(), BpfError> {
        if self.resting.get(&id) != Some(&since) {
            return Ok(());
        }
        self.limits.put(id, Limits::default())?;
        self.write_record(id, AttachmentRecord::FREE)?;
        self.resting.remove(&id);
        Ok(())
    }

    /// Describes the first difference between the kernel's maps and an attachment as it was put and bound.
    pub(super) fn difference(
        &self,
        id: u32,
        device: &Device,
        attachment: &Attachment,
    ) -> Result<Option<String>, BpfError> {
        let found = self.record_map.get(&id)?.unwrap_or(AttachmentRecord::FREE);
        let wanted = Self::record_of(attachment, device.index());
        if !found.has(flag::PRESENT) {
            return Ok(Some(format!("the dataplane has no record of attachment {id}")));
        }
        if found != wanted {
            return Ok(Some(format!("the dataplane's record of attachment {id} differs")));
        }
        let bound = match device {
            Device::Own(ifindex) => self.links.get(ifindex)? == Some(id),
            Device::Parent(on) => self.parents.has(id, found.mac, on)?,
            Device::InPod | Device::Nowhere => true,
        };
        if !bound {
            let index = device.index();
            return Ok(Some(format!("the dataplane does not bind device {index} to attachment {id}")));
        }
        if !self.parents.has_trunks(id)? {
            return Ok(Some(format!(
                "the dataplane does not let pass beneath its VLAN what attachment {id} sends"
            )));
        }
        for (address, kind) in sources(attachment) {
            let found = self.kind_of(id, address)?;
            if found.is_none() {
                return Ok(Some(format!(
                    "the dataplane does not allow attachment {id} the source {address}"
                )));
            }
            if found != Some(kind) {
                let whose = if kind == source::OWN { "a shared one" } else { "its own" };
                return Ok(Some(format!(
                    "the dataplane takes the source {address} of attachment {id} for {whose}"
                )));
            }
        }
        Ok(None)
    }

    /// The kind of a source address that the kernel's maps allow an attachment.
    fn kind_of(&self, id: u32, address: IpAddr) -> Result<Option<u32>, BpfError> {
        match address {
            IpAddr::V4(v4) => self.addresses_v4.get(&AddressKey { attachment: id, address: Ip4::from(v4) }),
            IpAddr::V6(v6) => self.addresses_v6.get(&AddressKey { attachment: id, address: Ip6::from(v6) }),
        }
    }

    /// Every attachment with a record.
    pub(super) fn records(&self) -> &BTreeMap<u32, AttachmentRecord> {
        &self.present
    }

    /// The addresses that the maps allow each attachment, including numbers without a record.
    pub(super) fn addresses(&self) -> BTreeMap<u32, BTreeSet<IpAddr>> {
        self.addresses.iter().map(|(id, sources)| (*id, sources.keys().copied().collect())).collect()
    }

    /// The addresses, in their networks, that disappear with these attachments, link-local ones included:
    /// their own, and shared ones that no other attachment has. Attachments without a record have none.
    pub(super) fn hosts(&self, leaving: &BTreeSet<u32>) -> Result<BTreeSet<Host>, BpfError> {
        let mut hosts = BTreeSet::new();
        for id in leaving {
            self.check(*id)?;
            let Some(record) = self.present.get(id) else { continue };
            hosts.insert((record.zone, IpAddr::V6(record.link_local.into())));
            for (address, kind) in self.addresses.get(id).into_iter().flatten() {
                let host = (record.zone, *address);
                if *kind == source::OWN || !self.others_have(host, leaving) {
                    hosts.insert(host);
                }
            }
        }
        Ok(hosts)
    }

    /// Returns [`hosts`](Self::hosts) of an attachment that is being removed. From now on it no longer counts
    /// as a holder of its addresses: of attachments that are removed together, the last one to begin takes
    /// the shared addresses with it.
    pub(super) fn leave(&mut self, id: u32) -> Result<BTreeSet<Host>, BpfError> {
        self.check(id)?;
        if self.present.contains_key(&id) {
            self.leaving.insert(id);
        }
        self.hosts(&[id].into())
    }

    /// Whether an attachment that stays may send from an address as well.
    fn others_have(&self, (zone, address): Host, leaving: &BTreeSet<u32>) -> bool {
        let stays = |id: &u32| !leaving.contains(id) && !self.leaving.contains(id);
        let mut others = self.present.iter().filter(|(id, record)| record.zone == zone && stays(id));
        others.any(|(id, _)| self.addresses.get(id).is_some_and(|sources| sources.contains_key(&address)))
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

    /// The devices that belong to an attachment alone.
    pub(super) fn devices_of(&self, id: u32) -> Vec<u32> {
        self.bound.iter().filter(|(_, bound)| **bound == id).map(|(ifindex, _)| *ifindex).collect()
    }

    fn record_of(attachment: &Attachment, host_ifindex: u32) -> AttachmentRecord {
        let mac = netattach_common::Mac { octets: attachment.mac.0 };
        let flags = attachment.flags.bits() | passage_bits(attachment);
        let mut record = AttachmentRecord::new(mac, attachment.zone, flags);
        record.host_ifindex = host_ifindex;
        for (known, prefix) in record.on_link.iter_mut().zip(&attachment.on_link) {
            *known = Prefix { address: Ip6::from(prefix.network()), bits: prefix.prefix_len().into() };
        }
        for (passing, ethertype) in record.ethertypes.iter_mut().zip(&attachment.ethertypes) {
            *passing = *ethertype;
        }
        for address in attachment.addresses.iter().chain(&attachment.shared).rev() {
            match address {
                IpAddr::V4(v4) => record.ipv4 = Ip4::from(*v4),
                IpAddr::V6(v6) => record.ipv6 = Ip6::from(*v6),
            }
        }
        record
    }

    /// The record of an attachment; an error if it has none.
    fn known(&self, id: u32) -> Result<AttachmentRecord, BpfError> {
        self.present.get(&id).copied().ok_or(BpfError::UnknownAttachment(id))
    }

    fn write_record(&mut self, id: u32, record: AttachmentRecord) -> Result<(), BpfError> {
        if self.present.get(&id) == Some(&record) {
            return Ok(());
        }
        self.record_map.put(id, record)?;
        if record.has(flag::PRESENT) {
            self.present.insert(id, record);
            self.resting.remove(&id);
        } else {
            self.present.remove(&id);
            self.leaving.remove(&id);
        }
        Ok(())
    }

    /// Writes limits. A rate that stays the same keeps its state.
    fn write_limits(&mut self, id: u32, wanted: Limits) -> Result<(), BpfError> {
        let present = self.limits.get(&id)?.unwrap_or_default();
        let keep = |wanted: Rate, present: Rate| Rate {
            arrival: if wanted.interval == present.interval { present.arrival } else { 0 },
            ..wanted
        };
        let limits = Limits {
            from_pod: keep(wanted.from_pod, present.from_pod),
            to_pod: keep(wanted.to_pod, present.to_pod),
            flows: keep(wanted.flows, present.flows),
            flow_records: keep(wanted.flow_records, present.flow_records),
            drop_records: keep(wanted.drop_records, present.drop_records),
        };
        if limits == present {
            return Ok(());
        }
        self.limits.put(id, limits)
    }

    fn allow_vlan(&mut self, id: u32, vlan: u16) -> Result<(), BpfError> {
        self.vlan_map.put(VlanKey { attachment: id, vlan: vlan.into() }, 1)?;
        self.vlans.entry(id).or_default().insert(vlan);
        Ok(())
    }

    fn disallow_vlan(&mut self, id: u32, vlan: u16) -> Result<(), BpfError> {
        self.vlan_map.remove(&VlanKey { attachment: id, vlan: vlan.into() })?;
        forget(&mut self.vlans, id, |of_one| {
            of_one.remove(&vlan);
            of_one.is_empty()
        });
        Ok(())
    }

    fn allow(&mut self, id: u32, address: IpAddr, kind: u32) -> Result<(), BpfError> {
        match address {
            IpAddr::V4(v4) => {
                self.addresses_v4.put(AddressKey { attachment: id, address: Ip4::from(v4) }, kind)?;
            }
            IpAddr::V6(v6) => {
                self.addresses_v6.put(AddressKey { attachment: id, address: Ip6::from(v6) }, kind)?;
            }
        }
        self.addresses.entry(id).or_default().insert(address, kind);
        Ok(())
    }

    fn disallow(&mut self, id: u32, address: IpAddr) -> Result<(), BpfError> {
        match address {
            IpAddr::V4(v4) => {
                self.addresses_v4.remove(&AddressKey { attachment: id, address: Ip4::from(v4) })?;
            }
            IpAddr::V6(v6) => {
                self.addresses_v6.remove(&AddressKey { attachment: id, address: Ip6::from(v6) })?;
            }
        }
        forget(&mut self.addresses, id, |of_one| {
            of_one.remove(&address);
            of_one.is_empty()
        });
        Ok(())
    }
}

/// The addresses from which an attachment may send, with their kinds. An address that is both its own and
/// shared counts as its own.
fn sources(attachment: &Attachment) -> BTreeMap<IpAddr, u32> {
    let shared = attachment.shared.iter().map(|address| (*address, source::SHARED));
    let own = attachment.addresses.iter().map(|address| (*address, source::OWN));
    shared.chain(own).collect()
}

/// Returns the number of attachments with a record in the maps of this layout that are pinned below a root; 0
/// without pins.
///
/// # Errors
/// The map cannot be read.
pub fn pinned_attachments(root: &Path) -> Result<usize, BpfError> {
    let pins = Pins::new(root);
    if !pin::exists(&pins.map(map_name::ATTACHMENT))? {
        return Ok(0);
    }
    let records: Array<MapData, AttachmentRecord> = pins.open(map_name::ATTACHMENT)?;
    let failed = |source| BpfError::ReadMap { map: map_name::ATTACHMENT, source };
    let mut present = 0;
    for record in records.iter() {
        present += usize::from(record.map_err(failed)?.has(flag::PRESENT));
    }
    Ok(present)
}

/// Removes one entry of an attachment, and the attachment after its last entry: `remove` returns whether it
/// was the last.
fn forget<T>(entries: &mut BTreeMap<u32, T>, id: u32, remove: impl FnOnce(&mut T) -> bool) {
    if entries.get_mut(&id).is_some_and(remove) {
        entries.remove(&id);
    }
}

/// The flags that are derived from an attachment's limits, VLANs and addresses, by which the programs only
/// look up entries that exist.
fn passage_bits(attachment: &Attachment) -> u32 {
    [
        (!attachment.shared.is_empty(), flag::SHARES_ADDRESSES),
        (!attachment.vlans.is_empty(), flag::VLANS),
        (attachment.limits.from_pod.is_limited(), flag::LIMIT_FROM_POD),
        (attachment.limits.to_pod.is_limited(), flag::LIMIT_TO_POD),
    ]
    .into_iter()
    .filter(|(set, _)| *set)
    .fold(0, |bits, (_, bit)| bits | bit)
}

#[cfg(test)]
mod tests;
