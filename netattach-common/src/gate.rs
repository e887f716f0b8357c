//! Attachments whose routed traffic is judged behind the node's address translation.

use crate::address::Mac;

/// Value of map `na_gate`: where the node receives an attachment's frames for its routing, and whether the attachment's
/// device leaves packets to the node's packet filter. All zero: nothing is known, every packet is judged at the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub struct Gate(u64);

impl Gate {
    /// It is not known where the node receives frames, and everything is judged at the device.
    pub const NONE: Self = Self(0);

    const OPEN: u8 = 1;
    const BRIDGED_IPV4: u8 = 1 << 1;
    const BRIDGED_IPV6: u8 = 1 << 2;
    /// The address is known, whether or not the gate is open.
    const KNOWN: u8 = 1 << 3;

    /// `mac`: the address at which the node receives frames for routing, a bridge's or that of the node's end of a
    /// link. `bridged_ipv4`, `bridged_ipv6`: the packet filter also sees bridged packets.
    pub const fn new(mac: Mac, bridged_ipv4: bool, bridged_ipv6: bool) -> Self {
        let mut flags = Self::OPEN | Self::KNOWN;
        if bridged_ipv4 {
            flags |= Self::BRIDGED_IPV4;
        }
        if bridged_ipv6 {
            flags |= Self::BRIDGED_IPV6;
        }
        Self::at(mac, flags)
    }

    /// Everything is judged at the device, which knows by `mac` what goes to the node's own stack and what comes from
    /// there.
    pub const fn closed(mac: Mac) -> Self {
        Self::at(mac, Self::KNOWN)
    }

    const fn at(mac: Mac, flags: u8) -> Self {
        let [a, b, c, d, e, f] = mac.octets;
        Self(u64::from_ne_bytes([a, b, c, d, e, f, flags, 0]))
    }

    /// The same address with nothing left to the packet filter.
    #[must_use]
    pub const fn to_closed(self) -> Self {
        if self.is_known() { Self::closed(self.mac()) } else { Self::NONE }
    }

    /// Whether the device leaves packets to the packet filter.
    #[inline(always)]
    pub const fn is_open(self) -> bool {
        self.flags() & Self::OPEN != 0
    }

    /// Whether it is known where the node receives frames.
    #[inline(always)]
    pub const fn is_known(self) -> bool {
        self.flags() & (Self::KNOWN | Self::OPEN) != 0
    }

    /// Whether the node receives frames for its routing at this address, and sends from it.
    #[inline(always)]
    pub const fn is_at(self, mac: &Mac) -> bool {
        self.is_known() && self.mac().same(mac)
    }

    #[inline(always)]
    const fn flags(self) -> u8 {
        let [.., flags, _] = self.0.to_ne_bytes();
        flags
    }

    #[inline(always)]
    const fn mac(self) -> Mac {
        let [a, b, c, d, e, f, ..] = self.0.to_ne_bytes();
        Mac { octets: [a, b, c, d, e, f] }
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

    /// Whether a frame to this address is left to the packet filter.
    #[inline(always)]
    pub const fn leads(self, destination: &Mac) -> bool {
        self.is_open() && self.mac().same(destination)
    }

    /// Whether the packet filter has seen a packet to the attachment. `routed`: it comes from the node's stack, and not
    /// from another port of a bridge.
    #[inline(always)]
    pub const fn has_been_passed(self, routed: bool, ipv6: bool) -> bool {
        let bridged = if ipv6 { Self::BRIDGED_IPV6 } else { Self::BRIDGED_IPV4 };
        self.is_open() && (routed || self.flags() & bridged != 0)
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
        assert!(!Gate::NONE.is_known() && !Gate::NONE.is_at(&Mac { octets: [0; 6] }));
        assert_eq!(Gate::NONE.to_closed(), Gate::NONE);
    }

    #[test]
    fn a_closed_gate_leaves_nothing_to_the_packet_filter_and_still_says_where_the_node_is() {
        let gate = Gate::from_word(Gate::closed(MAC).to_word());
        assert_eq!(Gate::new(MAC, true, true).to_closed(), gate);
        assert!(gate.is_known() && !gate.is_open());
        assert!(!gate.leads(&MAC) && !gate.has_been_passed(true, false));
        assert!(gate.is_at(&MAC) && !gate.is_at(&Mac { octets: [2, 0, 0, 0, 0, 2] }));
    }

    #[test]
    fn a_gate_is_one_address_and_tells_the_families_of_bridged_packets_apart() {
        let gate = Gate::from_word(Gate::new(MAC, true, false).to_word());
        assert!(gate.leads(&MAC) && !gate.leads(&Mac { octets: [2, 0, 0, 0, 0, 2] }));
        let passed = |routed| [false, true].map(|ipv6| gate.has_been_passed(routed, ipv6));
        assert_eq!((passed(true), passed(false)), ([true, true], [true, false]));
        assert!(gate.is_open() && gate.is_known() && gate.is_at(&MAC));
        let both = Gate::new(MAC, false, true);
        assert_eq!([false, true].map(|ipv6| both.has_been_passed(false, ipv6)), [false, true]);
    }
}
