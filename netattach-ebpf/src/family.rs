//! What differs between the versions of IP in how a packet is judged.

use netattach_common::{
    Address, AttachmentRecord, DropReason, Ip4, Ip6,
    attachment::flag,
    parse::{Packet, Version, ethertype},
};

use crate::{antispoof, classifier::Scope, frame::Skb, verdict::Denied};

/// What differs, apart from what is read of a packet ([`Version`]) and its maps.
pub(crate) trait Judged: Version {
    /// What Ethernet calls it.
    const ETHERTYPE: u16;
    /// The flag of attachments that get its control messages whatever the policy says.
    const ACCEPT_ICMP: u32;
    /// Whether all fragments of a packet name the same protocol.
    const FRAGMENTS_NAME_PROTOCOL: bool;
    /// Why a packet from an address that is not its sender's is dropped.
    const SPOOFED: DropReason;
    /// Whether an address is the attachment's own.
    fn is_own_address(scope: &Scope, record: &AttachmentRecord, address: &Self) -> bool;
    /// Whether an address is the attachment's own, and one that routers pass on.
    fn is_own_routable(scope: &Scope, record: &AttachmentRecord, address: &Self) -> bool;
    /// Checks what a pod says about itself.
    fn check_sender(
        skb: &Skb,
        scope: &Scope,
        record: &AttachmentRecord,
        packet: &Packet<Self>,
    ) -> Result<(), Denied>;
}

impl Judged for Ip4 {
    const ETHERTYPE: u16 = ethertype::IPV4;
    const ACCEPT_ICMP: u32 = flag::ACCEPT_ICMP;
    const FRAGMENTS_NAME_PROTOCOL: bool = true;
    const SPOOFED: DropReason = DropReason::SourceIpv4;

    #[inline(always)]
    fn is_own_address(scope: &Scope, record: &AttachmentRecord, address: &Self) -> bool {
        antispoof::is_own_ipv4(scope, record, address)
    }

    #[inline(always)]
    fn is_own_routable(scope: &Scope, record: &AttachmentRecord, address: &Self) -> bool {
        antispoof::is_own_ipv4(scope, record, address)
    }

    #[inline(always)]
    fn check_sender(
        skb: &Skb,
        scope: &Scope,
        record: &AttachmentRecord,
        packet: &Packet<Self>,
    ) -> Result<(), Denied> {
        antispoof::ipv4(skb, scope, record, packet)
    }
}

impl Judged for Ip6 {
    const ETHERTYPE: u16 = ethertype::IPV6;
    const ACCEPT_ICMP: u32 = flag::ACCEPT_ICMPV6;
    const FRAGMENTS_NAME_PROTOCOL: bool = false;
    const SPOOFED: DropReason = DropReason::SourceIpv6;

    #[inline(always)]
    fn is_own_address(scope: &Scope, record: &AttachmentRecord, address: &Self) -> bool {
        antispoof::is_own_ipv6(scope, record, address)
    }

    #[inline(always)]
    fn is_own_routable(scope: &Scope, record: &AttachmentRecord, address: &Self) -> bool {
        !address.same(&record.link_local) && antispoof::is_own_ipv6(scope, record, address)
    }

    #[inline(always)]
    fn check_sender(
        skb: &Skb,
        scope: &Scope,
        record: &AttachmentRecord,
        packet: &Packet<Self>,
    ) -> Result<(), Denied> {
        antispoof::ipv6(skb, scope, record, packet)
    }
}
