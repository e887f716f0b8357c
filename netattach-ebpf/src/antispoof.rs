//! What a pod may claim to be.
//!
//! `CHECK_MAC` guards the link layer: the source MAC (checked by the caller), sender and link-layer fields of
//! ARP and neighbour discovery, and the parts only infrastructure plays: bridge, router, multicast querier, DHCP server, source
//! routing. `CHECK_ADDRESS` guards addresses: IP source, ARP sender, advertised neighbour, and whose duplicates are looked for: who
//! may ask for anybody's would have every newcomer give up its address. Neither may others use the pod's addresses towards it,
//! where a policy keeps others from it.

use aya_ebpf::programs::TcContext;
use netattach_common::{
    Address, AttachmentRecord, DropReason, Hook, Ip4, Ip6, Mac,
    attachment::flag,
    link::{self, icmpv6},
    parse::{Bytes, Kind, Packet, Payload, arp, options, packet::IPV4_LEN},
    protocol,
};

use crate::{
    classifier::Scope,
    family::Judged,
    frame::{self, Frame, Skb},
    maps::Family,
    stages,
    verdict::Denied,
};

/// IANA number of IGMP.
const IGMP: u8 = 2;

/// Judges a frame that is neither IP's nor ARP's. Rules speak of IP, so none can allow it: what isolates a pod for egress keeps
/// it from sending such frames, what isolates it for ingress keeps them from it. The body of a stage.
#[inline(always)]
pub(crate) fn other(ctx: &TcContext, scope: &Scope, payload: &Payload) -> Result<(), DropReason> {
    let ethertype = payload.ethertype;
    if scope.has(flag::PENDING) {
        return Err(DropReason::Pending);
    }
    if scope.record()?.passes(ethertype) {
        return Ok(());
    }
    let from_pod = scope.hook == Hook::FromPod;
    if from_pod && scope.has(flag::CHECK_MAC) {
        let destination: Mac = frame::load(ctx, 0)?;
        if link::is_infrastructure(&destination, ethertype) {
            return Err(DropReason::LinkProtocol);
        }
        if ethertype < link::FIRST_ETHERTYPE {
            let [access_point]: [u8; 1] = frame::load(ctx, payload.offset.into())?;
            if access_point == link::SPANNING_TREE {
                return Err(DropReason::LinkProtocol);
            }
        }
    }
    let policy = if from_pod { scope.policies.egress } else { scope.policies.ingress };
    if policy == 0 { Ok(()) } else { Err(DropReason::Ethertype) }
}

/// Checks an ARP packet for Ethernet and IPv4 (RFC 826); a probe has no sender address yet (RFC 5227).
#[inline(always)]
pub(crate) fn arp(
    ctx: &TcContext,
    scope: &Scope,
    record: &AttachmentRecord,
    frame: &Frame,
) -> Result<(), DropReason> {
    if !arp::fits(ctx.len(), frame.payload.offset) {
        return Err(DropReason::Malformed);
    }
    let checked = scope.has(flag::CHECK_MAC) || scope.has(flag::CHECK_ADDRESS);
    if scope.hook == Hook::ToPod || !checked {
        return Ok(());
    }
    let claim = arp::read(&Skb::of(ctx), !frame.tagged, frame.payload.offset)?;
    if scope.has(flag::CHECK_MAC) && !claim.mac.same(&record.mac) {
        return Err(DropReason::ArpSenderMac);
    }
    if scope.has(flag::CHECK_ADDRESS) && !is_own_ipv4(scope, record, &claim.address) {
        return Err(DropReason::ArpSenderIp);
    }
    Ok(())
}

/// Checks that what comes in does not claim to come from the pod itself.
#[inline(always)]
pub(crate) fn from_others<A: Judged>(scope: &Scope, packet: &Packet<A>) -> Result<(), Denied> {
    let checked = scope.hook == Hook::ToPod && scope.has(flag::CHECK_ADDRESS);
    if checked && A::is_own_address(scope, scope.record()?, &packet.tuple.source) {
        return Err(A::SPOOFED.into());
    }
    Ok(())
}

/// Checks an IPv4 packet.
#[inline(always)]
pub(crate) fn ipv4(
    skb: &Skb,
    scope: &Scope,
    record: &AttachmentRecord,
    packet: &Packet<Ip4>,
) -> Result<(), Denied> {
    let source = &packet.tuple.source;
    if scope.has(flag::CHECK_ADDRESS) && !is_own_ipv4(scope, record, source) {
        // A DHCP client has no address before it gets one (RFC 2131, 4.1).
        if !(source.same(&Ip4::UNSPECIFIED) && is_udp(packet, 68, 67)) {
            return Err(Ip4::SPOOFED.into());
        }
    }
    if scope.has(flag::CHECK_MAC) {
        if is_udp_to(packet, 68) {
            return Err(DropReason::DhcpServer.into());
        }
        if packet.tuple.lane.protocol() == IGMP && packet.kind != Kind::LaterFragment {
            if packet.transport == packet.end {
                return Err(DropReason::Malformed.into());
            }
            let [message]: [u8; 1] = skb.load(packet.transport())?;
            if link::is_routers_igmp(message) {
                return Err(DropReason::RouterMessage.into());
            }
        }
        if packet.has_options {
            return stages::check_options(skb, packet.network() as u32 + IPV4_LEN as u32, packet.transport);
        }
    }
    Ok(())
}

/// Checks an IPv6 packet.
#[inline(always)]
pub(crate) fn ipv6(
    skb: &Skb,
    scope: &Scope,
    record: &AttachmentRecord,
    packet: &Packet<Ip6>,
) -> Result<(), Denied> {
    let source = &packet.tuple.source;
    let is_icmp = packet.tuple.lane.protocol() == protocol::ICMPV6;
    if scope.has(flag::CHECK_ADDRESS) && !is_own_ipv6(scope, record, source) {
        let unsourced = packet.kind == Kind::LinkControl && link::may_lack_source(packet.icmp_type);
        if !(source.same(&Ip6::UNSPECIFIED) && unsourced) {
            return Err(Ip6::SPOOFED.into());
        }
    }
    if scope.has(flag::CHECK_MAC) && is_udp_to(packet, 546) {
        return Err(DropReason::DhcpServer.into());
    }
    if is_icmp && packet.kind != Kind::LaterFragment {
        return stages::check_neighbour(skb, scope, packet);
    }
    Ok(())
}

/// Checks what neighbour discovery says. The body of a stage.
#[inline(always)]
pub(crate) fn neighbour(skb: &Skb, scope: &Scope, packet: &Packet<Ip6>) -> Result<(), DropReason> {
    let check_mac = scope.has(flag::CHECK_MAC);
    let record = scope.record()?;
    let skipped = match packet.icmp_type {
        icmpv6::ROUTER_ADVERTISEMENT
        | icmpv6::REDIRECT
        | icmpv6::LISTENER_QUERY
        | icmpv6::MULTICAST_ROUTER
            if check_mac =>
        {
            return Err(DropReason::RouterMessage);
        }
        icmpv6::ROUTER_SOLICITATION => 8,
        icmpv6::NEIGHBOUR_SOLICITATION | icmpv6::NEIGHBOUR_ADVERTISEMENT => {
            // A solicitation from nobody asks whether somebody else has its target (RFC 4862, 5.4).
            let claims = packet.icmp_type == icmpv6::NEIGHBOUR_ADVERTISEMENT
                || packet.tuple.source.same(&Ip6::UNSPECIFIED);
            if claims && scope.has(flag::CHECK_ADDRESS) {
                let target: Ip6 = skb.load(packet.transport() + 8)?;
                if !is_own_ipv6(scope, record, &target) {
                    return Err(DropReason::NdTarget);
                }
            }
            24
        }
        _ => return Ok(()),
    };
    if !check_mac {
        return Ok(());
    }
    options::neighbour(skb, &record.mac, packet.transport() + skipped, packet.end as usize)
}

/// The unspecified address, which stands for "none" in the record, is nobody's own.
#[inline(always)]
pub(crate) fn is_own_ipv4(scope: &Scope, record: &AttachmentRecord, address: &Ip4) -> bool {
    !address.same(&Ip4::UNSPECIFIED) && (address.same(&record.ipv4) || is_listed(scope.id, address))
}

#[inline(always)]
pub(crate) fn is_own_ipv6(scope: &Scope, record: &AttachmentRecord, address: &Ip6) -> bool {
    !address.same(&Ip6::UNSPECIFIED)
        && (address.same(&record.ipv6) || address.same(&record.link_local) || is_listed(scope.id, address))
}

/// Whether the address is among those that the record has no room for. Out of line, with the key's room on the stack: few
/// packets come here.
#[inline(never)]
fn is_listed<A: Family>(attachment: u32, address: &A) -> bool {
    A::is_own(attachment, address)
}

#[inline(always)]
fn is_udp_to<A>(packet: &Packet<A>, port: u16) -> bool {
    packet.tuple.lane.protocol() == protocol::UDP
        && packet.has_ports
        && packet.tuple.ports.destination().number() == port
}

#[inline(always)]
fn is_udp<A>(packet: &Packet<A>, source_port: u16, destination_port: u16) -> bool {
    packet.tuple.lane.protocol() == protocol::UDP
        && packet.has_ports
        && packet.tuple.ports.source().number() == source_port
        && packet.tuple.ports.destination().number() == destination_port
}
