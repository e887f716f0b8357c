//! The node's own devices that packets come in and go out by: what the programs there know.

use crate::address::{Ip6, Mac};

/// Value of map `na_uplink`, by index of a device of the node that is no attachment's. Without an entry, or with one of
/// zeroes, nothing that crosses the device is the programs' business.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Uplink {
    /// Where its frames go: index of the bridge that it is a port of, [`FastPort::ROUTED`](crate::FastPort::ROUTED)
    /// when the node routes what comes in by it, 0 for neither.
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
    /// A bridge that the node routes by: packets may be routed from and to the attachments on it.
    pub const GATEWAY: u32 = 1 << 1;
    /// Frames from addresses of attachments that it leads to are dropped before they are the kernel's.
    pub const SPOOFED: u32 = 1 << 2;
    /// And those to such attachments that policies do not allow.
    pub const DENIED: u32 = 1 << 3;
}

/// Key of map `na_local`: an address of an attachment, as it is reached. An Ethernet address stands as the IPv6
/// link-local address that follows from it ([`link_local`](crate::attachment::link_local)).
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

/// How long frames of a station pass the bridge by before it is shown one again, in seconds. A bridge forgets
/// stations that it does not see, and floods what is for them.
pub const SHOWN_EVERY: u32 = 10;

const _: () = {
    assert!(size_of::<Uplink>() == 20);
    assert!(size_of::<LocalKey>() == 20);
    assert!(size_of::<Seen>() == 8);
};
