//! The table of maps: name, kind, key, value and number of entries of each.

use std::path::Path;

use aya::maps::MapInfo;
use netattach_common::{
    AddressKey, AttachmentRecord, FastPort, FastStats, Flow, FlowKey, FragmentKey, Fragmented, Ip4, Ip6,
    Limits, LocalKey, ParentEntry, ParentKey, PlaceKey, PolicyAddress, PolicyIds, PortKey, PortRule, Reading,
    RuleKey, Seen, Share, StationKey, Stats, Uplink, VlanKey, capacity,
};

use super::{BpfError, Config, MapProperty};

const BPF_F_NO_PREALLOC: u32 = 1;
const BPF_F_MMAPABLE: u32 = 1 << 10;

/// The expected properties of a map.
#[derive(Debug, Clone, Copy)]
pub(super) struct MapSpec {
    pub(super) name: &'static str,
    kind: MapKind,
    key_size: usize,
    value_size: usize,
    pub(super) max_entries: u32,
}

/// `enum bpf_map_type`, with the flags each of our maps is created with.
#[derive(Debug, Clone, Copy)]
enum MapKind {
    /// Not preallocated.
    Hash,
    Array,
    /// Memory-mappable.
    SharedArray,
    PerCpuArray,
    LruHash,
    LpmTrie,
    /// Programs for tail calls.
    ProgramArray,
    /// No keys; the size in bytes instead of entries.
    RingBuffer,
}

impl MapKind {
    const fn number_and_flags(self) -> (u32, u32) {
        match self {
            Self::Hash => (1, BPF_F_NO_PREALLOC),
            Self::Array => (2, 0),
            Self::SharedArray => (2, BPF_F_MMAPABLE),
            Self::PerCpuArray => (6, 0),
            Self::ProgramArray => (3, 0),
            Self::LruHash => (9, 0),
            Self::LpmTrie => (11, BPF_F_NO_PREALLOC),
            Self::RingBuffer => (27, 0),
        }
    }
}

/// A prefix as a key: its length in bits, then the data.
type Prefix<K> = (u32, K);

/// Makes a constant of each map's name, the list of all names, and [`specs`]. A row is
/// `CONSTANT = "name": Kind<Key, Value>[entries];`.
macro_rules! maps {
    ($config:ident => $($constant:ident = $name:literal: $kind:ident<$key:ty, $value:ty>[$entries:expr];)*) => {
        /// Names of the pinned maps; the kernel knows them by the same names (15 bytes at most).
        pub(super) mod map_name {
            $(pub(in super::super) const $constant: &str = $name;)*

            pub(in super::super) const ALL: &[&str] = &[$($constant),*];
        }

        /// All maps, with the capacities of `config`.
        pub(super) fn specs($config: &Config) -> Vec<MapSpec> {
            vec![$(MapSpec {
                name: map_name::$constant,
                kind: MapKind::$kind,
                key_size: size_of::<$key>(),
                value_size: size_of::<$value>(),
                max_entries: $entries,
            }),*]
        }
    };
}

maps! { config =>
    LINK = "na_link": Hash<u32, u32>[config.max_attachments];
    HINT = "na_hint": Array<u32, u32>[capacity::HINTS as u32];
    ATTACHMENT = "na_att": Array<u32, AttachmentRecord>[config.max_attachments];
    POLICY = "na_policy": SharedArray<u32, PolicyIds>[config.max_attachments];
    ADDRESS4 = "na_addr4": Hash<AddressKey<Ip4>, u32>[config.max_addresses];
    ADDRESS6 = "na_addr6": Hash<AddressKey<Ip6>, u32>[config.max_addresses];
    PEER4 = "na_peer4": Hash<PolicyAddress<Ip4>, u32>[config.max_peers_v4];
    PEER6 = "na_peer6": Hash<PolicyAddress<Ip6>, u32>[config.max_peers_v6];
    PREFIX4 = "na_cidr4": LpmTrie<Prefix<PolicyAddress<Ip4>>, u32>[config.max_peers_v4];
    PREFIX6 = "na_cidr6": LpmTrie<Prefix<PolicyAddress<Ip6>>, u32>[config.max_peers_v6];
    PORT = "na_l4": LpmTrie<Prefix<PortKey>, PortRule>[config.max_ports];
    RULE = "na_rule": Hash<RuleKey, u64>[config.max_rules];
    FLOW4 = "na_ct4": Hash<FlowKey<Ip4>, Flow>[config.max_flows_v4];
    FLOW6 = "na_ct6": Hash<FlowKey<Ip6>, Flow>[config.max_flows_v6];
    OWN4 = "na_own4": Hash<PlaceKey, FlowKey<Ip4>>[config.max_flows_v4];
    OWN6 = "na_own6": Hash<PlaceKey, FlowKey<Ip6>>[config.max_flows_v6];
    SHARE = "na_share": Array<u32, Share>[config.max_attachments];
    FRAGMENT4 = "na_frag4": LruHash<FragmentKey<Ip4>, Fragmented>[config.max_fragments];
    FRAGMENT6 = "na_frag6": LruHash<FragmentKey<Ip6>, Fragmented>[config.max_fragments];
    PARENT = "na_par": Hash<ParentKey, ParentEntry>[config.max_attachments.saturating_mul(2)];
    VLAN = "na_vlan": Hash<VlanKey, u32>[config.max_vlans];
    LIMIT = "na_limit": Array<u32, Limits>[config.max_attachments];
    RECORD = "na_record": RingBuffer<(), ()>[config.record_bytes];
    STATS = "na_stat": PerCpuArray<u32, Stats>[config.max_attachments];
    CLOCK = "na_time": Array<u32, Reading>[1];
    CONFIG = "na_cfg": Array<u32, netattach_common::Config>[1];
    FAST_PORT = "na_fast_port": Array<u32, FastPort>[config.max_attachments];
    STATION = "na_fast_mac": Hash<StationKey, u32>[config.max_attachments];
    STATION_HINT = "na_fast_hint": Array<u32, u32>[capacity::HINTS as u32];
    FAST_STATS = "na_fast_stat": PerCpuArray<u32, FastStats>[config.max_attachments];
    FAST_UNTIL = "na_fast_until": Array<u32, u64>[1];
    PROGRAM = "na_prog": ProgramArray<u32, u32>[1];
    UPLINK = "na_uplink": Hash<u32, Uplink>[capacity::UPLINKS as u32];
    LOCAL = "na_local": Hash<LocalKey, u32>[config.max_addresses];
    SEEN = "na_seen": LruHash<StationKey, Seen>[capacity::STATIONS as u32];
    IN_POD = "na_pod": ProgramArray<u32, u32>[2];
    ON_PARENT = "na_par_prog": ProgramArray<u32, u32>[2];
    GATE = "na_gate": Array<u32, u64>[config.max_attachments];
    GUARD = "na_guard": Hash<Ip6, u32>[config.max_addresses];
}

impl MapSpec {
    pub(super) fn verify(&self, path: &Path) -> Result<(), BpfError> {
        let info = MapInfo::from_pin(path)
            .map_err(|source| BpfError::OpenMap { path: path.to_path_buf(), source })?;
        let found_type =
            info.map_type().map_err(|source| BpfError::OpenMap { path: path.to_path_buf(), source })?;
        let (kind, flags) = self.kind.number_and_flags();
        let compared = [
            (MapProperty::Type, kind, found_type as u32),
            (MapProperty::KeySize, self.key_size as u32, info.key_size()),
            (MapProperty::ValueSize, self.value_size as u32, info.value_size()),
            (MapProperty::MaxEntries, self.max_entries, info.max_entries()),
            (MapProperty::Flags, flags, info.map_flags()),
        ];
        match compared.into_iter().find(|(_, expected, found)| expected != found) {
            None => Ok(()),
            Some((property, expected, found)) => {
                Err(BpfError::ForeignMap { path: path.to_path_buf(), property, expected, found })
            }
        }
    }
}

#[cfg(test)]
#[path = "map_memory.rs"]
mod memory;
