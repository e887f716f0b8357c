//! The data formats shared by the BPF programs and the agent.
//!
//! Every type here is the key or the value of a pinned map, so its layout outlives the process that wrote it:
//! fixed field order, explicit padding (always zero), addresses as byte arrays in network order, every other
//! number in host order. Sizes and offsets are asserted at compile time; a change of any of them is a change
//! of [`LAYOUT_VERSION`], which names the pin directory.
//!
//! The decisions of the packet path are here as well, free of maps and of the kernel's buffers, so that the kernel and
//! the tests run the same code: [`parse`] (reads a packet), [`decide`] (is this peer and port allowed by a policy),
//! [`flow`] and [`entry`] (the state of the packet's flow) and [`limit`] (is it over the limit).
//!
//! Map values: [`attachment`] with its [`link`] and [`address`]es, [`parent`], [`gate`], [`key`] for policies,
//! [`fragment`], [`share`] and [`stats`], [`fast`] and [`uplink`] for the fast path. [`record`]s carry a [`reason`].
//! [`unfinished`] has the constants that the agent writes into the programs before it loads them. `pod` lists the
//! types that aya may read as plain bytes.
#![cfg_attr(not(test), no_std)]

pub mod address;
pub mod attachment;
pub mod decide;
pub mod entry;
pub mod fast;
pub mod flow;
pub mod fragment;
pub mod gate;
pub mod key;
pub mod limit;
pub mod link;
pub mod parent;
pub mod parse;
#[cfg(feature = "user")]
mod pod;
pub mod reason;
pub mod record;
pub mod share;
pub mod stats;
pub mod unfinished;
pub mod uplink;

pub use address::{Address, Ip4, Ip6, Mac, Port, Ports};
pub use attachment::{AttachmentRecord, PolicyIds};
pub use fast::{Decline, FastPort, FastStats, StationKey};
pub use flow::{Flow, FlowKey};
pub use fragment::{FragmentKey, Fragmented};
pub use gate::Gate;
pub use key::{AddressKey, PolicyAddress, PortKey, PortRule, RuleKey, VlanKey};
pub use limit::{Limits, Rate, Reading};
pub use link::Prefix;
pub use parent::{ParentEntry, ParentKey};
pub use reason::DropReason;
pub use record::Record;
pub use share::{PlaceKey, Share};
pub use stats::{Stats, Traffic};
pub use uplink::{LocalKey, Seen, Uplink};

/// Version of every layout in this crate. The agent pins the maps below `<root>/v<LAYOUT_VERSION>`.
pub const LAYOUT_VERSION: u32 = 5;

/// IP protocol numbers (IANA) that the packet path distinguishes.
pub mod protocol {
    /// ICMP for IPv4.
    pub const ICMP: u8 = 1;
    /// TCP.
    pub const TCP: u8 = 6;
    /// UDP.
    pub const UDP: u8 = 17;
    /// DCCP.
    pub const DCCP: u8 = 33;
    /// GRE.
    pub const GRE: u8 = 47;
    /// ICMP for IPv6.
    pub const ICMPV6: u8 = 58;
    /// SCTP.
    pub const SCTP: u8 = 132;
    /// UDP-Lite.
    pub const UDP_LITE: u8 = 136;
}

/// Direction of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
pub enum Side {
    /// Sent by the pod: ingress of the host-side device.
    FromPod,
    /// Received by the pod: egress of the host-side device.
    ToPod,
}

/// The one value of map `na_cfg`: state that the agent keeps across restarts. The programs do not read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Config {
    /// First bytes of the SHA-256 of the object whose programs are pinned, 0 before the first load.
    pub object_tag: u64,
    /// The tag of the object whose programs are known to be attached everywhere.
    pub attached_tag: u64,
    /// The next policy id to hand out; ids are never used twice.
    pub next_policy_id: u32,
    /// [`LAYOUT_VERSION`] of the agent that created the maps.
    pub layout_version: u32,
}

const _: () = assert!(size_of::<Config>() == 24);

/// Default number of entries of each map.
pub mod capacity {
    /// `na_link`, `na_att`, `na_policy`, `na_stat`, `na_fast_*`: attachments of one node, id 0 included.
    pub const ATTACHMENTS: usize = 8192;
    /// `na_hint`, `na_fast_hint`: devices with neighbouring indexes have separate slots, and so have most Ethernet
    /// addresses; a power of two.
    pub const HINTS: usize = 16_384;
    /// `na_addr4`, `na_addr6`: allowed source addresses.
    pub const ADDRESSES: usize = 32_768;
    /// `na_peer4`, `na_cidr4`: exact IPv4 peers, and IPv4 prefixes. A policy and its replacement coexist for a moment.
    pub const PEERS_V4: usize = 262_144;
    /// `na_peer6`, `na_cidr6`: exact IPv6 peers, and IPv6 prefixes.
    pub const PEERS_V6: usize = 65_536;
    /// `na_l4`: port entries.
    pub const PORTS: usize = 262_144;
    /// `na_rule`: rules whose flows are counted.
    pub const RULES: usize = 65_536;
    /// `na_ct4`: IPv4 flows.
    pub const FLOWS_V4: usize = 262_144;
    /// `na_ct6`: IPv6 flows.
    pub const FLOWS_V6: usize = 131_072;
    /// `na_par`: macvlans of all attachments, and their parents.
    pub const PARENTS: usize = ATTACHMENTS * 2;
    /// `na_vlan`: allowed VLAN ids of all attachments.
    pub const VLANS: usize = 32_768;
    /// `na_uplink`: devices of the node that lead outside.
    pub const UPLINKS: usize = 1024;
    /// `na_seen`: stations behind uplinks of bridges.
    pub const STATIONS: usize = 16_384;
    /// `na_frag4`, `na_frag6`: incomplete fragmented packets.
    pub const FRAGMENTS: usize = 8192;
    /// `na_record`: bytes of unread records.
    pub const RECORD_BYTES: usize = 1 << 20;
}
