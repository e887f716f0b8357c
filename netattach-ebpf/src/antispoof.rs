//! What a pod may claim to be.
//!
//! `CHECK_MAC` guards the link layer: the source MAC (checked by the caller), sender and link-layer fields of
//! ARP and neighbour discovery, and the parts only infrastructure plays: router, DHCP server, source routing.
//! `CHECK_ADDRESS` guards addresses: IP source, ARP sender, advertised neighbour.

use aya_ebpf::programs::TcContext;
use netattach_common::{Address, DropReason, Ip4, Ip6, Mac, attachment::flag, protocol};

use crate::{
    classifier::Scope,
    frame::{self, ETHERNET_LEN, Frame, ethertype},
    icmp::icmpv6,
    maps::Family,
    packet::{Kind, Packet},
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

/// Checks an ARP packet for Ethernet and IPv4 (RFC 826); a probe has no sender address yet (RFC 5227).
#[inline(always)]
pub(crate) fn arp(ctx: &TcContext, scope: &Scope<'_>, frame: &Frame) -> Result<(), DropReason> {
    if !scope.record.has(flag::CHECK_MAC) && !scope.record.has(flag::CHECK_ADDRESS) {
        return Ok(());
    }
    let arp: ArpPacket = frame::header(ctx, !frame.tagged, ETHERNET_LEN, frame.network)?;
    if arp.hardware_and_protocol != [1u16.to_be(), ethertype::IPV4.to_be()] || arp.lengths != [6, 4] {
        return Err(DropReason::Malformed);
    }
    if scope.record.has(flag::CHECK_MAC) && !arp.sender_mac.same(&scope.record.mac) {
        return Err(DropReason::ArpSenderMac);
    }
    let sender = Ip4 { octets: arp.sender_ip };
    let probe = sender.same(&Ip4::UNSPECIFIED);
    if scope.record.has(flag::CHECK_ADDRESS) && !probe && !is_own_ipv4(scope, &sender) {
        return Err(DropReason::ArpSenderIp);
    }
    Ok(())
}

/// Checks an IPv4 packet.
#[inline(always)]
pub(crate) fn ipv4(
    ctx: &TcContext,
    scope: &Scope<'_>,
    frame: &Frame,
    packet: &Packet<Ip4>,
) -> Result<(), DropReason> {
    if scope.record.has(flag::CHECK_ADDRESS) && !is_own_ipv4(scope, &packet.tuple.source) {
        // A DHCP client has no address before it gets one (RFC 2131, 4.1).
        if !(packet.tuple.source.same(&Ip4::UNSPECIFIED) && is_udp(packet, 68, 67)) {
            return Err(DropReason::SourceIpv4);
        }
    }
    if scope.record.has(flag::CHECK_MAC) {
        if is_udp(packet, 67, 68) {
            return Err(DropReason::DhcpServer);
        }
        if packet.has_options {
            return source_route(ctx, frame.network + 20, packet.transport());
        }
    }
    Ok(())
}

/// Checks an IPv6 packet.
#[inline(never)]
pub(crate) fn ipv6(ctx: &TcContext, scope: &Scope<'_>, packet: &Packet<Ip6>) -> Result<(), DropReason> {
    let source = &packet.tuple.source;
    let is_icmp = packet.tuple.protocol == protocol::ICMPV6;
    if scope.record.has(flag::CHECK_ADDRESS) && !is_own_ipv6(scope, source) {
        // Only duplicate address detection and its listener reports have no source (RFC 4862, 5.4).
        if !(source.same(&Ip6::UNSPECIFIED) && is_icmp) {
            return Err(DropReason::SourceIpv6);
        }
    }
    if scope.record.has(flag::CHECK_MAC) && is_udp(packet, 547, 546) {
        return Err(DropReason::DhcpServer);
    }
    if is_icmp && packet.kind != Kind::LaterFragment {
        return neighbour(ctx, scope, packet);
    }
    Ok(())
}

#[inline(always)]
fn neighbour(ctx: &TcContext, scope: &Scope<'_>, packet: &Packet<Ip6>) -> Result<(), DropReason> {
    let check_mac = scope.record.has(flag::CHECK_MAC);
    let options = match packet.icmp_type {
        icmpv6::ROUTER_ADVERTISEMENT | icmpv6::REDIRECT if check_mac => {
            return Err(DropReason::RouterMessage);
        }
        icmpv6::ROUTER_SOLICITATION => 8,
        icmpv6::NEIGHBOUR_SOLICITATION => 24,
        icmpv6::NEIGHBOUR_ADVERTISEMENT => {
            if scope.record.has(flag::CHECK_ADDRESS) {
                let target: Ip6 = frame::load(ctx, packet.transport() + 8)?;
                if !is_own_ipv6(scope, &target) {
                    return Err(DropReason::NdTarget);
                }
            }
            24
        }
        _ => return Ok(()),
    };
    if check_mac { link_layer_options(ctx, scope, packet, options) } else { Ok(()) }
}

/// Source and target link-layer address options (RFC 4861, 4.6.1) must name the pod's own MAC.
#[inline(always)]
fn link_layer_options(
    ctx: &TcContext,
    scope: &Scope<'_>,
    packet: &Packet<Ip6>,
    skip: usize,
) -> Result<(), DropReason> {
    /// More options than any of these messages has.
    const LIMIT: usize = 8;
    const SOURCE: u8 = 1;
    const TARGET: u8 = 2;
    let mut offset = packet.transport() + skip;
    for _ in 0..LIMIT {
        if offset >= packet.end as usize {
            return Ok(());
        }
        let option: LinkLayerOption = frame::load(ctx, offset)?;
        if option.eights == 0 {
            return Err(DropReason::Malformed);
        }
        if (option.kind == SOURCE || option.kind == TARGET) && !option.address.same(&scope.record.mac) {
            return Err(DropReason::NdLinkLayer);
        }
        offset += usize::from(option.eights) * 8;
    }
    if offset >= packet.end as usize { Ok(()) } else { Err(DropReason::Malformed) }
}

/// The unspecified address, which stands for "none" in the record, is nobody's own.
#[inline(always)]
fn is_own_ipv4(scope: &Scope<'_>, address: &Ip4) -> bool {
    !address.same(&Ip4::UNSPECIFIED) && (address.same(&scope.record.ipv4) || Ip4::is_own(scope.id, address))
}

#[inline(always)]
fn is_own_ipv6(scope: &Scope<'_>, address: &Ip6) -> bool {
    !address.same(&Ip6::UNSPECIFIED)
        && (address.same(&scope.record.ipv6)
            || address.same(&scope.record.link_local)
            || Ip6::is_own(scope.id, address))
}

#[inline(always)]
fn is_udp<A>(packet: &Packet<A>, source_port: u16, destination_port: u16) -> bool {
    packet.tuple.protocol == protocol::UDP
        && packet.has_ports
        && packet.tuple.source_port.number() == source_port
        && packet.tuple.destination_port.number() == destination_port
}

/// Looks for loose and strict source routing (RFC 791, 3.1) among the options from `offset` to `transport`.
#[inline(never)]
fn source_route(ctx: &TcContext, mut offset: usize, transport: usize) -> Result<(), DropReason> {
    const END: u8 = 0;
    const NO_OPERATION: u8 = 1;
    const LOOSE: u8 = 131;
    const STRICT: u8 = 137;
    /// More options than any header in use has; each costs the verifier.
    const LIMIT: usize = 12;
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
                if length < 2 {
                    return Err(DropReason::Malformed);
                }
                offset += usize::from(length);
            }
        }
    }
    if offset >= transport { Ok(()) } else { Err(DropReason::Malformed) }
}
