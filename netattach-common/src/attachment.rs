//! The programs' data of one attachment.

use crate::address::{Address, Ip4, Ip6, Mac};
use crate::flow::{Flow, Leg};
use crate::link::Prefix;

/// Value of map `na_att`: one attachment. All zero means that the id is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct AttachmentRecord {
    /// The bits of [`flag`].
    pub flags: u32,
    /// Network the attachment belongs to. Flows of different zones never meet, so networks may overlap.
    pub zone: u32,
    /// Index of the host-side device in the host's namespace, 0 until bound.
    pub host_ifindex: u32,
    /// The pod-side interface's Ethernet address.
    pub mac: Mac,
    /// Zero.
    pub pad: [u8; 2],
    /// The IPv6 link-local address derived from `mac`; always an allowed source.
    pub link_local: Ip6,
    /// The first allowed IPv4 source, unspecified if there is none. It is in `na_addr4` too; here it saves most packets
    /// that lookup.
    pub ipv4: Ip4,
    /// The same for IPv6.
    pub ipv6: Ip6,
    /// The IPv6 prefixes of the attachment's link, as far as they follow from its addresses; padded with
    /// [`Prefix::NONE`].
    pub on_link: [Prefix; Prefix::MOST],
    /// Ethertypes (host order) that pass in both directions regardless of policies; padded with 0.
    pub ethertypes: [u16; AttachmentRecord::ETHERTYPES],
}

/// Bits of [`AttachmentRecord::flags`].
pub mod flag {
    /// The record is in use. Without it every packet of the device is dropped.
    pub const PRESENT: u32 = 1;
    /// Frames must come from the attachment's MAC address (also inside ARP and neighbour discovery), and the pod may
    /// not act as a router or DHCP server, nor use source routing.
    pub const CHECK_MAC: u32 = 1 << 1;
    /// Packets must come from the attachment's addresses (also inside ARP and neighbour discovery).
    pub const CHECK_ADDRESS: u32 = 1 << 2;
    /// The policy is not loaded yet: only ARP, neighbour discovery and multicast listener messages pass.
    pub const PENDING: u32 = 1 << 3;
    /// VLAN tags listed in `na_vlan` may pass. Without it no tagged frame passes.
    pub const VLANS: u32 = 1 << 4;
    /// Traffic from the pod is limited (`Limits::from_pod`).
    pub const LIMIT_FROM_POD: u32 = 1 << 5;
    /// Traffic to the pod is limited (`Limits::to_pod`).
    pub const LIMIT_TO_POD: u32 = 1 << 6;
    /// A TCP or SCTP packet without a known connection is dropped unless it opens one.
    pub const NO_MIDSTREAM: u32 = 1 << 7;
    /// A flow that a policy has approved stays approved when the policy changes.
    pub const KEEP_ESTABLISHED: u32 = 1 << 8;
    /// ICMP passes regardless of the policy.
    pub const ACCEPT_ICMP: u32 = 1 << 9;
    /// ICMPv6 passes regardless of the policy.
    pub const ACCEPT_ICMPV6: u32 = 1 << 10;
    /// The kernel dispatches the pod's packets by the protocol that their socket has named (netkit, ipvlan); other
    /// drivers read it from the frame. The named protocol must be the frame's ethertype, by which the programs judge.
    pub const ONE_PROTOCOL: u32 = 1 << 11;
    /// Never with [`PRESENT`]: the attachment is gone, but packets in flight may still be counted for it. Only the
    /// agent reads this bit, and does not reuse the id until those packets have ended; the programs see no record.
    pub const RESTING: u32 = 1 << 12;
    /// The pod may send from addresses that other pods of its network may have as well, and so may take part in the
    /// protocols by which routers agree on the owner of an address and on routes
    /// ([`is_routers_protocol`](crate::link::is_routers_protocol)).
    pub const SHARES_ADDRESSES: u32 = 1 << 13;
}

const _: () = {
    assert!(size_of::<AttachmentRecord>() == 104);
    assert!(core::mem::offset_of!(AttachmentRecord, mac) == 12);
    assert!(core::mem::offset_of!(AttachmentRecord, link_local) == 20);
    assert!(core::mem::offset_of!(AttachmentRecord, ipv6) == 40);
    assert!(core::mem::offset_of!(AttachmentRecord, on_link) == 56);
};

impl AttachmentRecord {
    /// Maximum number of ethertypes of an attachment.
    pub const ETHERTYPES: usize = 4;

    /// A record in use, not yet bound to a device.
    pub const fn new(mac: Mac, zone: u32, flags: u32) -> Self {
        Self {
            flags: flags | flag::PRESENT,
            zone,
            host_ifindex: 0,
            mac,
            pad: [0; 2],
            link_local: link_local(mac),
            ipv4: Ip4::UNSPECIFIED,
            ipv6: Ip6::UNSPECIFIED,
            on_link: [Prefix::NONE; Prefix::MOST],
            ethertypes: [0; Self::ETHERTYPES],
        }
    }

    /// An id without an attachment.
    pub const FREE: Self = Self {
        flags: 0,
        zone: 0,
        host_ifindex: 0,
        mac: Mac { octets: [0; 6] },
        pad: [0; 2],
        link_local: Ip6::UNSPECIFIED,
        ipv4: Ip4::UNSPECIFIED,
        ipv6: Ip6::UNSPECIFIED,
        on_link: [Prefix::NONE; Prefix::MOST],
        ethertypes: [0; Self::ETHERTYPES],
    };

    /// An id whose attachment is gone, until it is free.
    pub const RESTING: Self = Self { flags: flag::RESTING, ..Self::FREE };

    /// Whether frames of an ethertype pass regardless of policies.
    #[inline(always)]
    pub const fn passes(&self, ethertype: u16) -> bool {
        let [a, b, c, d] = self.ethertypes;
        ethertype != 0 && (ethertype == a || ethertype == b || ethertype == c || ethertype == d)
    }

    /// Whether all bits of `flags` are set.
    #[inline(always)]
    pub const fn has(&self, flags: u32) -> bool {
        self.flags & flags == flags
    }
}

/// The link-local address with the modified EUI-64 interface identifier of a MAC address (RFC 4291,
/// appendix A), which Linux gives an Ethernet interface by default.
pub const fn link_local(mac: Mac) -> Ip6 {
    let [a, b, c, d, e, f] = mac.octets;
    Ip6 { octets: [0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f] }
}

/// Value of map `na_policy`: the policies of one attachment. Both ids change with one aligned 64-bit store,
/// so no packet sees one direction of the old pair and the other of the new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[repr(C, align(8))]
pub struct PolicyIds {
    /// Policy that judges flows opened towards the pod, 0 when the pod is not isolated for ingress.
    pub ingress: u32,
    /// Policy that judges flows opened by the pod, 0 when the pod is not isolated for egress.
    pub egress: u32,
}

const _: () = {
    assert!(size_of::<PolicyIds>() == 8);
    assert!(align_of::<PolicyIds>() == 8);
    // The mark of a refused leg must never be taken for the approval of a policy in force.
    assert!(PolicyIds::DENY_ALL != Flow::REFUSED);
    assert!(PolicyIds::HIGHEST < Flow::REFUSED && Flow::REFUSED < PolicyIds::DENY_ALL);
};

impl PolicyIds {
    /// A policy without entries: it allows nothing and never approves a leg of a flow.
    pub const DENY_ALL: u32 = u32::MAX;

    /// No policy with entries has a higher number.
    pub const HIGHEST: u32 = Flow::REFUSED - 1;

    /// Whether neither direction is isolated.
    #[inline(always)]
    pub const fn none(self) -> bool {
        self.ingress == 0 && self.egress == 0
    }

    /// The policy for flows in which the attachment's pod has the given role.
    #[inline(always)]
    pub const fn of(self, leg: Leg) -> u32 {
        match leg {
            Leg::Opener => self.egress,
            Leg::Responder => self.ingress,
        }
    }

    /// The pair as the stored word.
    #[inline(always)]
    pub const fn to_word(self) -> u64 {
        let [a, b, c, d] = self.ingress.to_ne_bytes();
        let [e, f, g, h] = self.egress.to_ne_bytes();
        u64::from_ne_bytes([a, b, c, d, e, f, g, h])
    }

    /// The pair from a stored word.
    #[inline(always)]
    pub const fn from_word(word: u64) -> Self {
        let [a, b, c, d, e, f, g, h] = word.to_ne_bytes();
        Self { ingress: u32::from_ne_bytes([a, b, c, d]), egress: u32::from_ne_bytes([e, f, g, h]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::net::Ipv6Addr;

    #[test]
    fn link_local_flips_the_universal_bit_and_inserts_fffe() {
        let mac = Mac { octets: [0x02, 0, 0, 0xaa, 0xbb, 0xcc] };
        assert_eq!(Ipv6Addr::from(link_local(mac)), "fe80::ff:feaa:bbcc".parse::<Ipv6Addr>().unwrap());
    }

    #[test]
    fn policy_word_round_trips() {
        let ids = PolicyIds { ingress: 0x0102_0304, egress: 0xa0b0_c0d0 };
        assert_eq!(PolicyIds::from_word(ids.to_word()), ids);
        assert_eq!(ids.of(Leg::Opener), 0xa0b0_c0d0);
        assert_eq!(ids.of(Leg::Responder), 0x0102_0304);
    }
}
