//! `aya::Pod` for every type that is a map key or value.

use crate::{
    AddressKey, AttachmentRecord, Config, FastPort, FastStats, Flow, FlowKey, FragmentKey, Fragmented, Ip4,
    Ip6, Limits, LocalKey, ParentEntry, ParentKey, PlaceKey, PolicyAddress, PolicyIds, PortKey, PortRule,
    Rate, Record, RuleKey, Seen, Share, StationKey, Stats, Traffic, Uplink, VlanKey,
};

macro_rules! pod {
    ($($type:ty),+ $(,)?) => {
        $(
            // SAFETY: `repr(C)` with explicit padding fields (sizes asserted beside each type), made of
            // integers and byte arrays only: every byte is initialised and every bit pattern is valid.
            unsafe impl aya::Pod for $type {}
        )+
    };
}

pod!(
    AddressKey<Ip4>,
    AddressKey<Ip6>,
    AttachmentRecord,
    Config,
    FastPort,
    FastStats,
    Flow,
    FlowKey<Ip4>,
    FlowKey<Ip6>,
    FragmentKey<Ip4>,
    FragmentKey<Ip6>,
    Fragmented,
    Ip6,
    Limits,
    LocalKey,
    ParentEntry,
    ParentKey,
    PlaceKey,
    PolicyAddress<Ip4>,
    PolicyAddress<Ip6>,
    PolicyIds,
    PortKey,
    PortRule,
    Rate,
    Record,
    RuleKey,
    Seen,
    Share,
    StationKey,
    Stats,
    Traffic,
    Uplink,
    VlanKey,
);
