//! Addresses and ports in the form of packets and map keys: bytes in network order.
//!
//! The types are aligned so that the BPF compiler moves them as words; byte-wise copies of an IPv6 address
//! would not even fit the program's stack. The alignment adds no padding to any key (asserted there).

use core::fmt;
use core::net::{Ipv4Addr, Ipv6Addr};

/// An IP address of either family, as the maps hold it.
pub trait Address: Copy + Ord {
    /// Length in bits.
    const BITS: u32;
    /// The address `0.0.0.0` or `::`.
    const UNSPECIFIED: Self;

    /// The address as an IPv6 address; an IPv4 address becomes an IPv4-mapped one (RFC 4291, 2.5.5.2).
    fn widen(&self) -> Ip6;
    /// Whether both are the same address (by words).
    fn same(&self, other: &Self) -> bool;
    /// Whether `self` is the smaller number (by words).
    fn is_below(&self, other: &Self) -> bool;
}

/// An IPv4 address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(C, align(4))]
pub struct Ip4 {
    /// Network order.
    pub octets: [u8; 4],
}

/// An IPv6 address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(C, align(4))]
pub struct Ip6 {
    /// Network order.
    pub octets: [u8; 16],
}

/// An Ethernet address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[repr(C, align(2))]
pub struct Mac {
    /// Wire order.
    pub octets: [u8; 6],
}

/// A transport port.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[repr(C, align(2))]
pub struct Port {
    /// Network order.
    pub octets: [u8; 2],
}

/// Source and destination port, adjacent as in a packet: one word, moved as such.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub struct Ports(u32);

impl Address for Ip4 {
    const BITS: u32 = 32;
    const UNSPECIFIED: Self = Self { octets: [0; 4] };

    #[inline(always)]
    fn widen(&self) -> Ip6 {
        Ip6::from_words([0, 0, 0xffff_u32.to_be(), u32::from_ne_bytes(self.octets)])
    }

    #[inline(always)]
    fn same(&self, other: &Self) -> bool {
        u32::from_ne_bytes(self.octets) == u32::from_ne_bytes(other.octets)
    }

    #[inline(always)]
    fn is_below(&self, other: &Self) -> bool {
        u32::from_be_bytes(self.octets) < u32::from_be_bytes(other.octets)
    }
}

impl Ip6 {
    /// The address from words in memory order.
    #[inline(always)]
    const fn from_words(words: [u32; 4]) -> Self {
        // SAFETY: same size, and every bit pattern is valid for both.
        Self { octets: unsafe { core::mem::transmute::<[u32; 4], [u8; 16]>(words) } }
    }

    /// The address as two numbers, the most significant first.
    #[inline(always)]
    pub(crate) const fn halves(&self) -> [u64; 2] {
        let [a, b, c, d] = self.words();
        [
            (u32::from_be(a) as u64) << 32 | u32::from_be(b) as u64,
            (u32::from_be(c) as u64) << 32 | u32::from_be(d) as u64,
        ]
    }

    /// The address as words in memory order.
    #[inline(always)]
    const fn words(&self) -> [u32; 4] {
        // SAFETY: same size, and every bit pattern is valid for both.
        unsafe { core::mem::transmute::<[u8; 16], [u32; 4]>(self.octets) }
    }
}

impl Address for Ip6 {
    const BITS: u32 = 128;
    const UNSPECIFIED: Self = Self { octets: [0; 16] };

    #[inline(always)]
    fn widen(&self) -> Ip6 {
        *self
    }

    #[inline(always)]
    fn same(&self, other: &Self) -> bool {
        let ([a, b, c, d], [w, x, y, z]) = (self.words(), other.words());
        a == w && b == x && c == y && d == z
    }

    #[inline(always)]
    fn is_below(&self, other: &Self) -> bool {
        let ([a, b], [x, y]) = (self.halves(), other.halves());
        if a == x { b < y } else { a < x }
    }
}

impl Mac {
    /// The address as words in memory order.
    #[inline(always)]
    pub(crate) const fn words(&self) -> [u16; 3] {
        // SAFETY: same size, and every bit pattern is valid for both.
        unsafe { core::mem::transmute::<[u8; 6], [u16; 3]>(self.octets) }
    }

    /// Whether both are the same address (by words).
    #[inline(always)]
    pub const fn same(&self, other: &Self) -> bool {
        let ([a, b, c], [x, y, z]) = (self.words(), other.words());
        a == x && b == y && c == z
    }
}

impl Ports {
    /// No ports.
    pub const NONE: Self = Self(0);

    /// A pair of ports.
    #[inline(always)]
    pub const fn new(source: Port, destination: Port) -> Self {
        let ([a, b], [c, d]) = (source.octets, destination.octets);
        Self(u32::from_ne_bytes([a, b, c, d]))
    }

    /// Source port.
    #[inline(always)]
    pub const fn source(self) -> Port {
        let [a, b, ..] = self.0.to_ne_bytes();
        Port { octets: [a, b] }
    }

    /// Destination port.
    #[inline(always)]
    pub const fn destination(self) -> Port {
        let [.., c, d] = self.0.to_ne_bytes();
        Port { octets: [c, d] }
    }

    /// The ports of a packet in the opposite direction.
    #[inline(always)]
    pub const fn reversed(self) -> Self {
        Self(self.0.rotate_left(16))
    }
}

impl Port {
    /// No port.
    pub const NONE: Self = Self { octets: [0; 2] };

    /// The port with a number.
    #[inline(always)]
    pub const fn new(number: u16) -> Self {
        Self { octets: number.to_be_bytes() }
    }

    /// The number.
    #[inline(always)]
    pub const fn number(self) -> u16 {
        u16::from_be_bytes(self.octets)
    }
}

impl From<Ipv4Addr> for Ip4 {
    fn from(address: Ipv4Addr) -> Self {
        Self { octets: address.octets() }
    }
}

impl From<Ipv6Addr> for Ip6 {
    fn from(address: Ipv6Addr) -> Self {
        Self { octets: address.octets() }
    }
}

impl From<Ip4> for Ipv4Addr {
    fn from(address: Ip4) -> Self {
        Self::from(address.octets)
    }
}

impl From<Ip6> for Ipv6Addr {
    fn from(address: Ip6) -> Self {
        Self::from(address.octets)
    }
}

impl fmt::Debug for Ip4 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&Ipv4Addr::from(*self), f)
    }
}

impl fmt::Debug for Ip6 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&Ipv6Addr::from(*self), f)
    }
}

impl fmt::Debug for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.number(), f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn words_compare_like_bytes(a in any::<[u8; 16]>(), b in any::<[u8; 16]>(), common in 0usize..=16) {
            let mut b = b;
            b[..common].copy_from_slice(&a[..common]);
            let (x, y) = (Ip6 { octets: a }, Ip6 { octets: b });
            prop_assert_eq!((x.is_below(&y), x.same(&y)), (a < b, a == b));
            let (x, y) = (Ip4 { octets: [a[0], a[1], a[2], a[3]] }, Ip4 { octets: [b[0], b[1], b[2], b[3]] });
            prop_assert_eq!((x.is_below(&y), x.same(&y)), (x < y, x == y));
            let mac = |o: [u8; 16]| Mac { octets: [o[0], o[1], o[2], o[3], o[4], o[5]] };
            prop_assert_eq!(mac(a).same(&mac(b)), mac(a) == mac(b));
        }

        #[test]
        fn a_widened_address_is_the_mapped_one(a in any::<[u8; 4]>(), b in any::<[u8; 16]>()) {
            prop_assert_eq!(Ip4 { octets: a }.widen(), Ip6::from(Ipv4Addr::from(a).to_ipv6_mapped()));
            prop_assert_eq!(Ip6 { octets: b }.widen(), Ip6 { octets: b });
        }

        #[test]
        fn ports_keep_their_number(number in any::<u16>()) {
            prop_assert_eq!(Port::new(number).number(), number);
        }
    }
}
