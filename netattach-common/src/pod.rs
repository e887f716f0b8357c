//! `aya::Pod` for every type that is a map key or value.

use crate::{
    AddressKey, AttachmentRecord, Config, Flow, FlowKey, PolicyAddress, PolicyIds, PortKey, PortRule, RuleKey,
    Stats, Traffic,
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
    AddressKey<[u8; 4]>,
    AddressKey<[u8; 16]>,
    AttachmentRecord,
    Config,
    Flow,
    FlowKey<[u8; 4]>,
    FlowKey<[u8; 16]>,
    PolicyAddress<[u8; 4]>,
    PolicyAddress<[u8; 16]>,
    PolicyIds,
    PortKey,
    PortRule,
    RuleKey,
    Stats,
    Traffic,
);
