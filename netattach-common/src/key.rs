//! Keys and small values of the policy and anti-spoofing maps.

#[allow(unused_imports, reason = "Ip4 and Ip6 only appear in the assertions")]
use crate::address::{Ip4, Ip6, Port};

/// Key of `na_addr4` and `na_addr6`: an address that an attachment may send from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(C)]
pub struct AddressKey<A> {
    /// Attachment id.
    pub attachment: u32,
    /// The address.
    pub address: A,
}

/// Values of `na_addr4` and `na_addr6`.
pub mod source {
    /// Several attachments may have the address, or an agent wrote this that did not distinguish the two cases.
    pub const SHARED: u32 = 1;
    /// The address was given to this attachment.
    pub const OWN: u32 = 2;
}

/// Key of `na_peer4` and `na_peer6`, and data of the prefixes in `na_cidr4` and `na_cidr6`: a peer as one
/// policy sees it. In a prefix, the policy id is always matched whole ([`PolicyAddress::POLICY_BITS`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(C)]
pub struct PolicyAddress<A> {
    /// Policy id.
    pub policy: u32,
    /// The address.
    pub address: A,
}

impl<A> PolicyAddress<A> {
    /// Bits in front of the address.
    pub const POLICY_BITS: u32 = 32;
}

/// Data of the prefixes in `na_l4`: what traffic a class of peers may exchange.
///
/// From general to specific, by prefix length: everything ([`PortKey::CLASS_BITS`]), one protocol
/// ([`PortKey::PROTOCOL_BITS`]), a block of ports (`PROTOCOL_BITS + 8 + n`). The longest entry that matches
/// names the rule; all entries allow, so precedence only decides which rule is credited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(C)]
pub struct PortKey {
    /// Policy id.
    pub policy: u32,
    /// Class of the peer within the policy.
    pub class: u32,
    /// IP protocol number.
    pub protocol: u8,
    /// Zero; keeps the port aligned.
    pub pad: u8,
    /// Port of the side that did not open the flow.
    pub port: Port,
}

impl PortKey {
    /// Prefix length of an entry for everything a class sends.
    pub const CLASS_BITS: u32 = 64;
    /// Prefix length of an entry for one protocol; lookups without ports go no deeper.
    pub const PROTOCOL_BITS: u32 = 72;
    /// Prefix length of an entry for one port, and of a lookup with ports.
    pub const PORT_BITS: u32 = 96;

    /// Prefix length of an entry for the ports that share their first `bits` bits.
    pub const fn port_prefix(bits: u8) -> u32 {
        Self::PORT_BITS - 16 + bits as u32
    }
}

/// Value of `na_l4`: the rule that allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct PortRule {
    /// Rule id within the policy, with or without [`PortRule::AS_ROUTED`].
    pub rule: u32,
    /// The entry's own prefix length: the kernel does not report which entry matched.
    pub prefix_len: u32,
}

impl PortRule {
    /// Flag beside the id: the rule is about the pod's own node, and holds only for packets that go to the node's own
    /// stack or come from it. Who writes a node's address into a packet is not the node. What a pod sends must also be
    /// judged again by the node's packet filter, behind the node's translation: the address on the pod's side leads to
    /// the attachment there (`na_guard`). No policy has so many rules that the bit is needed for an id.
    pub const AS_ROUTED: u32 = 1 << 31;
}

/// Key of `na_vlan`: a VLAN that an attachment may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(C)]
pub struct VlanKey {
    /// Attachment id.
    pub attachment: u32,
    /// VLAN id, 0 to 4095.
    pub vlan: u32,
}

/// Key of `na_rule`: counts the flows that one rule allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(C)]
pub struct RuleKey {
    /// Policy id.
    pub policy: u32,
    /// Rule id within the policy.
    pub rule: u32,
}

const _: () = {
    assert!(size_of::<AddressKey<Ip4>>() == 8);
    assert!(size_of::<AddressKey<Ip6>>() == 20);
    assert!(size_of::<PolicyAddress<Ip4>>() == 8);
    assert!(size_of::<PolicyAddress<Ip6>>() == 20);
    assert!(size_of::<PortKey>() == 12);
    assert!(core::mem::offset_of!(PortKey, port) == 10);
    assert!(size_of::<PortRule>() == 8);
    assert!(size_of::<RuleKey>() == 8);
    assert!(size_of::<VlanKey>() == 8);
};
