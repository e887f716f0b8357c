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
    protocol,
};

use crate::{
    classifier::Scope,
    frame::{self, ETHERNET_LEN, Frame, Payload, ethertype},
    maps::Family,
    packet::{IPV4_LEN, Kind, Packet, Version},
    stages,
    verdict::Denied,
};

/// An ARP packet for Ethernet and IPv4 (RFC 826).
#[repr(C)]
#[derive(Clone, Copy)]
struct ArpPacket {
    hardware_and_protocol: [u16; 2],
    lengths: [u8; 2],
    operation: u16,
    sender_mac: Mac,
    sender_ip: [u8; 4],
    target_mac: Mac,
    target_ip: [u8; 4],
}

/// A neighbour discovery option that holds an Ethernet address (RFC 4861, 4.6.1).
#[repr(C)]
#[derive(Clone, Copy)]
struct LinkLayerOption {
    kind: u8,
    eights: u8,
    address: Mac,
}

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
    /// What Ethernet pads to (46 bytes; with the trailer that some cards leave, 50): more is no padding.
    const MOST: u32 = 50;
    if ctx.len() > u32::from(frame.payload.offset) + MOST {
        return Err(DropReason::Malformed);
    }
    let checked = scope.has(flag::CHECK_MAC) || scope.has(flag::CHECK_ADDRESS);
    if scope.hook == Hook::ToPod || !checked {
        return Ok(());
    }
    let arp: ArpPacket = frame::header(ctx, !frame.tagged, ETHERNET_LEN, frame.payload.offset.into())?;
    if arp.hardware_and_protocol != [1u16.to_be(), ethertype::IPV4.to_be()] || arp.lengths != [6, 4] {
        return Err(DropReason::Malformed);
    }
    // Reverse and inverse ARP (RFC 903, RFC 2390) are other protocols, which nothing here needs.
    let request = arp.operation == 1u16.to_be();
    if !request && arp.operation != 2u16.to_be() {
        return Err(DropReason::Malformed);
    }
    if scope.has(flag::CHECK_MAC) && !arp.sender_mac.same(&record.mac) {
        return Err(DropReason::ArpSenderMac);
    }
    let sender = Ip4 { octets: arp.sender_ip };
    let probe = request && sender.same(&Ip4::UNSPECIFIED);
    let claimed = if probe { Ip4 { octets: arp.target_ip } } else { sender };
    if scope.has(flag::CHECK_ADDRESS) && !is_own_ipv4(scope, record, &claimed) {
        return Err(DropReason::ArpSenderIp);
    }
    Ok(())
}

/// Checks that what comes in does not claim to come from the pod itself.
#[inline(always)]
pub(crate) fn from_others<A: Version>(scope: &Scope, packet: &Packet<A>) -> Result<(), Denied> {
    let checked = scope.hook == Hook::ToPod && scope.has(flag::CHECK_ADDRESS);
    if checked && A::is_own_address(scope, scope.record()?, &packet.tuple.source) {
        return Err(A::SPOOFED.into());
    }
    Ok(())
}

/// Checks an IPv4 packet.
#[inline(always)]
pub(crate) fn ipv4(
    ctx: &TcContext,
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
            let [message]: [u8; 1] = frame::load(ctx, packet.transport())?;
            if link::is_routers_igmp(message) {
                return Err(DropReason::RouterMessage.into());
            }
        }
        if packet.has_options {
            return stages::check_options(ctx, packet.network() as u32 + IPV4_LEN as u32, packet.transport);
        }
    }
    Ok(())
}

/// Checks an IPv6 packet.
#[inline(always)]
pub(crate) fn ipv6(
    ctx: &TcContext,
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
        return stages::check_neighbour(ctx, scope, packet);
    }
    Ok(())
}

/// Checks what neighbour discovery says. The body of a stage.
#[inline(always)]
pub(crate) fn neighbour(ctx: &TcContext, scope: &Scope, packet: &Packet<Ip6>) -> Result<(), DropReason> {
    let check_mac = scope.has(flag::CHECK_MAC);
    let record = scope.record()?;
    let options = match packet.icmp_type {
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
                let target: Ip6 = frame::load(ctx, packet.transport() + 8)?;
                if !is_own_ipv6(scope, record, &target) {
                    return Err(DropReason::NdTarget);
                }
            }
            24
        }
        _ => return Ok(()),
    };
    if check_mac { link_layer_options(ctx, record, packet, options) } else { Ok(()) }
}

/// Source and target link-layer address options (RFC 4861, 4.6.1) must name the pod's own MAC.
#[inline(always)]
fn link_layer_options(
    ctx: &TcContext,
    record: &AttachmentRecord,
    packet: &Packet<Ip6>,
    skip: usize,
) -> Result<(), DropReason> {
    /// More options than any of these messages has.
    const LIMIT: usize = 8;
    const SOURCE: u8 = 1;
    const TARGET: u8 = 2;
    let mut offset = packet.transport() + skip;
    let end = packet.end as usize;
    for _ in 0..LIMIT {
        if offset == end {
            return Ok(());
        }
        if offset + size_of::<LinkLayerOption>() > end {
            return Err(DropReason::Malformed);
        }
        let option: LinkLayerOption = frame::load(ctx, offset)?;
        if option.eights == 0 {
            return Err(DropReason::Malformed);
        }
        if (option.kind == SOURCE || option.kind == TARGET) && !option.address.same(&record.mac) {
            return Err(DropReason::NdLinkLayer);
        }
        offset += usize::from(option.eights) * 8;
    }
    if offset == end { Ok(()) } else { Err(DropReason::Malformed) }
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

/// Looks for loose and strict source routing (RFC 791, 3.1) among the options from one offset to another. The body of a
/// stage.
#[inline(always)]
pub(crate) fn options(ctx: &TcContext, from: u32, to: u32) -> Result<(), DropReason> {
    const END: u8 = 0;
    const NO_OPERATION: u8 = 1;
    const LOOSE: u8 = 131;
    const STRICT: u8 = 137;
    /// More options than any header in use has; each costs the verifier.
    const LIMIT: usize = 12;
    let (mut offset, transport) = (from as usize, to as usize);
    for _ in 0..LIMIT {
        if offset >= transport {
            return Ok(());
        }
        let [kind]: [u8; 1] = frame::load(ctx, offset)?;
        match kind {
            END => return Ok(()),
            NO_OPERATION => offset += 1,
            LOOSE | STRICT => return Err(DropReason::SourceRoute),
            _ => {
                let [length]: [u8; 1] = frame::load(ctx, offset + 1)?;
                offset += usize::from(length);
                if length < 2 || offset > transport {
                    return Err(DropReason::Malformed);
                }
            }
        }
    }
    if offset >= transport { Ok(()) } else { Err(DropReason::Malformed) }
}
