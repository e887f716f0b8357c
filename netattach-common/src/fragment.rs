//! The data that later fragments of a packet inherit from the first.

use crate::address::Port;
#[allow(unused_imports, reason = "Ip4 and Ip6 only appear in the assertions")]
use crate::address::{Ip4, Ip6};
use crate::protocol;

/// Seconds for which a first fragment is remembered: as long as Linux waits for the rest (`ipfrag_time`).
pub const LIFETIME: u32 = 30;

/// Bytes of the transport header that a first fragment must hold, and no later one may touch (RFC 1858, RFC 3128).
#[inline(always)]
pub const fn header_len(number: u8) -> u16 {
    match number {
        protocol::TCP => 20,
        protocol::SCTP | protocol::DCCP => 12,
        protocol::UDP | protocol::UDP_LITE | protocol::ICMP | protocol::ICMPV6 => 8,
        _ => 0,
    }
}

/// Key of `na_frag4` and `na_frag6`: the fields shared by the fragments of one packet (RFC 791, 2.3; RFC 8200, 4.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(C)]
pub struct FragmentKey<A> {
    /// Network id.
    pub zone: u32,
    /// Source address.
    pub source: A,
    /// Destination address.
    pub destination: A,
    /// Identification; 16 bits in IPv4.
    pub identification: u32,
    /// IP protocol number in IPv4; 0 in IPv6, whose later fragments need not name it.
    pub protocol: u8,
    /// VLAN tags, as in [`FlowKey::tags`](crate::FlowKey::tags).
    pub tags: [u8; 3],
}

/// Value of `na_frag4` and `na_frag6`: the first fragment's fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Fragmented {
    /// When it came, seconds of the kernel's monotonic clock.
    pub seen: u32,
    /// Source port, or its substitute in a flow.
    pub source_port: Port,
    /// Destination port, likewise.
    pub destination_port: Port,
    /// IP protocol number.
    pub protocol: u8,
    /// Zero.
    pub pad: [u8; 3],
}

impl Fragmented {
    /// Whether the entry is expired. `now` in seconds of the same clock as `seen`.
    #[inline(always)]
    pub const fn is_expired(&self, now: u32) -> bool {
        // Another CPU may have stored a second that this one has not reached yet.
        (now.wrapping_sub(self.seen) as i32) > LIFETIME as i32
    }
}

const _: () = {
    assert!(size_of::<FragmentKey<Ip4>>() == 20);
    assert!(size_of::<FragmentKey<Ip6>>() == 44);
    assert!(size_of::<Fragmented>() == 12);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_first_fragment_is_forgotten_after_its_lifetime() {
        let first = |seen| Fragmented {
            seen,
            source_port: Port::NONE,
            destination_port: Port::NONE,
            protocol: 17,
            pad: [0; 3],
        };
        let cases =
            [(100, 100, false), (100, 130, false), (100, 131, true), (u32::MAX, 29, false), (100, 99, false)];
        for (seen, now, expired) in cases {
            assert_eq!(first(seen).is_expired(now), expired, "seen {seen} now {now}");
        }
    }
}
