//! Attachments whose routed traffic is judged behind the node's address translation.

use crate::address::Mac;

/// Value of map `na_gate`: which frames carry an attachment's packets to the node's routing, and which packets to the
/// attachment the node's packet filter has already seen. All zero: none, every packet is judged at the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub struct Gate(u64);

impl Gate {
    /// Everything is judged at the device.
    pub const NONE: Self = Self(0);

    const OPEN: u8 = 1;
    const BRIDGED_IPV4: u8 = 1 << 1;
    const BRIDGED_IPV6: u8 = 1 << 2;

    /// `mac`: the address at which the node receives frames for routing, a bridge's or that of the node's end of a
    /// link. `bridged_ipv4`, `bridged_ipv6`: the packet filter also sees bridged packets.
    pub const fn new(mac: Mac, bridged_ipv4: bool, bridged_ipv6: bool) -> Self {
        let [a, b, c, d, e, f] = mac.octets;
        let mut flags = Self::OPEN;
        if bridged_ipv4 {
            flags |= Self::BRIDGED_IPV4;
        }
        if bridged_ipv6 {
            flags |= Self::BRIDGED_IPV6;
        }
        Self(u64::from_ne_bytes([a, b, c, d, e, f, flags, 0]))
    }

    /// From the word in the map.
    #[inline(always)]
    pub const fn from_word(word: u64) -> Self {
        Self(word)
    }

    /// The word in the map.
    pub const fn to_word(self) -> u64 {
        self.0
    }

    /// Whether a frame to this address goes to the node's routing.
    #[inline(always)]
    pub const fn leads(self, destination: &Mac) -> bool {
        let [a, b, c, d, e, f, flags, _] = self.0.to_ne_bytes();
        flags & Self::OPEN != 0 && (Mac { octets: [a, b, c, d, e, f] }).same(destination)
    }

    /// Whether the packet filter has seen a packet to the attachment. `routed`: it comes from the node's stack, and not
    /// from another port of a bridge.
    #[inline(always)]
    pub const fn has_been_passed(self, routed: bool, ipv6: bool) -> bool {
        let [.., flags, _] = self.0.to_ne_bytes();
        let bridged = if ipv6 { Self::BRIDGED_IPV6 } else { Self::BRIDGED_IPV4 };
        flags & Self::OPEN != 0 && (routed || flags & bridged != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: Mac = Mac { octets: [2, 0, 0, 0, 0, 1] };

    #[test]
    fn nothing_goes_by_a_gate_that_is_not_there() {
        assert!(!Gate::NONE.leads(&Mac { octets: [0; 6] }));
        assert!(!Gate::NONE.has_been_passed(true, false));
    }

    #[test]
    fn a_gate_is_one_address_and_tells_the_families_of_bridged_packets_apart() {
        let gate = Gate::from_word(Gate::new(MAC, true, false).to_word());
        assert!(gate.leads(&MAC) && !gate.leads(&Mac { octets: [2, 0, 0, 0, 0, 2] }));
        let passed = |routed| [false, true].map(|ipv6| gate.has_been_passed(routed, ipv6));
        assert_eq!((passed(true), passed(false)), ([true, true], [true, false]));
        let both = Gate::new(MAC, false, true);
        assert_eq!([false, true].map(|ipv6| both.has_been_passed(false, ipv6)), [false, true]);
    }
}
