//! The programs' data of the node's own devices by which packets arrive and leave.

use crate::address::{Ip6, Mac};

/// Value of map `na_uplink`, by index of a device of the node without an attachment. Without an entry, or with an
/// all-zero one, the programs ignore traffic on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Uplink {
    /// Destination of its frames: index of the bridge that it is a port of,
    /// [`FastPort::ROUTED`](crate::FastPort::ROUTED) if the node routes incoming packets, 0 for neither.
    pub segment: u32,
    /// The bits of [`flag`].
    pub flags: u32,
    /// MTU in bytes.
    pub mtu: u32,
    /// Its own Ethernet address.
    pub mac: Mac,
    /// Zero.
    pub pad: [u8; 2],
}

/// Bits of [`Uplink::flags`].
pub mod flag {
    /// Packets between the device and attachments may take the fast path.
    pub const FAST: u32 = 1;
    /// A bridge that the node routes through: packets may be routed from and to the attachments on it.
    pub const GATEWAY: u32 = 1 << 1;
    /// Incoming frames with the source address of an attachment reached through it are dropped before the kernel sees
    /// them.
    pub const SPOOFED: u32 = 1 << 2;
    /// So are frames to such attachments that policies do not allow.
    pub const DENIED: u32 = 1 << 3;
}

/// Key of map `na_local`: an address of an attachment in its segment. An Ethernet address is stored as the IPv6
/// link-local address derived from it ([`link_local`](crate::attachment::link_local)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(C)]
pub struct LocalKey {
    /// Index of the bridge, or [`FastPort::ROUTED`](crate::FastPort::ROUTED).
    pub segment: u32,
    /// The address; an IPv4 address as an IPv4-mapped one.
    pub address: Ip6,
}

/// Value of map `na_seen`, by bridge and Ethernet address: when the bridge last saw a frame of a station behind an
/// uplink.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Seen {
    /// Index of the port by which it came in.
    pub port: u32,
    /// Seconds of the kernel's monotonic clock.
    pub at: u32,
}

/// How long frames of a station bypass the bridge before the bridge is passed one again, in seconds. A bridge forgets
/// stations that it does not see, and floods frames for them.
pub const SHOWN_EVERY: u32 = 10;

const _: () = {
    assert!(size_of::<Uplink>() == 20);
    assert!(size_of::<LocalKey>() == 20);
    assert!(size_of::<Seen>() == 8);
};
