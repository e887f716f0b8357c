//! The fast path between two routed links: what the node's stack would do to a packet that it forwards.
//!
//! Where it goes the node's own routing says (`bpf_fib_lookup`): rules, tables, whether the node forwards, and the next
//! hop, which is the pod itself. What the stack would have more to say about is left to it: a hop limit that runs out,
//! IPv4 options and hop-by-hop options, a pod whose address it has not resolved yet.

use core::mem::zeroed;

use aya_ebpf::{
    bindings::bpf_fib_lookup, helpers::generated::bpf_fib_lookup as fib_lookup, programs::TcContext,
};
use netattach_common::{Decline, FastPort, Mac, attachment::flag};

use crate::{
    fast::{PACKET_HOST, too_big},
    frame::{self, ETHERNET_LEN, ethertype},
    maps,
    packet::{HOP_BY_HOP, Ipv4Header, Ipv6Header},
};

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
/// Offsets in the frame.
const IPV4_HOP_LIMIT: usize = ETHERNET_LEN + core::mem::offset_of!(Ipv4Header, hop_limit);
const IPV4_CHECKSUM: usize = ETHERNET_LEN + core::mem::offset_of!(Ipv4Header, checksum);
const IPV6_HOP_LIMIT: usize = ETHERNET_LEN + core::mem::offset_of!(Ipv6Header, hop_limit);
/// Version 4, a header of five words.
const IPV4_PLAIN: u8 = 0x45;

/// Finds the attachment that a packet is routed to, and makes the packet what it is behind the node: one hop on, between
/// other Ethernet addresses. Nothing of the packet has changed when it fails.
#[inline(always)]
pub(crate) fn receiver(ctx: &TcContext, sender: u32) -> Result<u32, Decline> {
    // SAFETY: the context pointer is valid while the program runs.
    let (kind, protocol) = unsafe { ((*ctx.skb.skb).pkt_type, (*ctx.skb.skb).protocol) };
    if kind != PACKET_HOST {
        return Err(Decline::Elsewhere);
    }
    if frame::says_ipv6(ctx) {
        ipv6(ctx, sender)
    } else if protocol == u32::from(ethertype::IPV4.to_be()) {
        ipv4(ctx, sender)
    } else {
        Err(Decline::Control)
    }
}

#[inline(never)]
fn ipv4(ctx: &TcContext, sender: u32) -> Result<u32, Decline> {
    let header: Ipv4Header = read(ctx)?;
    if header.hop_limit <= 1 || header.version_and_words != IPV4_PLAIN {
        return Err(Decline::HopLimit);
    }
    // SAFETY: integers and unions of integers.
    let mut query: bpf_fib_lookup = unsafe { zeroed() };
    query.family = AF_INET;
    query.l4_protocol = header.protocol;
    query.__bindgen_anon_2.tos = header.service;
    query.__bindgen_anon_3.ipv4_src = u32::from_ne_bytes(header.source.octets);
    query.__bindgen_anon_4.ipv4_dst = u32::from_ne_bytes(header.destination.octets);
    let to = find(ctx, sender, &mut query)?;
    let [before, after] =
        [header.hop_limit, header.hop_limit - 1].map(|hops| u16::from_ne_bytes([hops, header.protocol]));
    ctx.l3_csum_replace(IPV4_CHECKSUM, before.into(), after.into(), 2).map_err(|_| Decline::Unroutable)?;
    change(ctx, &query, IPV4_HOP_LIMIT, header.hop_limit - 1)?;
    Ok(to)
}

#[inline(never)]
fn ipv6(ctx: &TcContext, sender: u32) -> Result<u32, Decline> {
    let header: Ipv6Header = read(ctx)?;
    if header.hop_limit <= 1 || header.next_header == HOP_BY_HOP {
        return Err(Decline::HopLimit);
    }
    // SAFETY: as above.
    let mut query: bpf_fib_lookup = unsafe { zeroed() };
    query.family = AF_INET6;
    query.l4_protocol = header.next_header;
    query.__bindgen_anon_3.ipv6_src = words(&header.source.octets);
    query.__bindgen_anon_4.ipv6_dst = words(&header.destination.octets);
    let to = find(ctx, sender, &mut query)?;
    change(ctx, &query, IPV6_HOP_LIMIT, header.hop_limit - 1)?;
    Ok(to)
}

#[inline(always)]
fn read<T: Copy>(ctx: &TcContext) -> Result<T, Decline> {
    frame::header(ctx, true, ETHERNET_LEN, ETHERNET_LEN).map_err(|_| Decline::Control)
}

/// Asks the node's routing. The answer is an attachment that can be sent to, with the Ethernet addresses in `query`.
#[inline(always)]
fn find(ctx: &TcContext, sender: u32, query: &mut bpf_fib_lookup) -> Result<u32, Decline> {
    query.ifindex = frame::ifindex(ctx);
    let length = size_of::<bpf_fib_lookup>() as i32;
    // SAFETY: the context pointer is valid while the program runs; `query` is of the length that is said.
    let answer = unsafe { fib_lookup(ctx.skb.skb.cast(), query, length, 0) };
    // 0 is success: there is a route, the node forwards, and knows the next hop's address.
    if answer != 0 {
        return Err(Decline::Unroutable);
    }
    let device = query.ifindex;
    let to = maps::attachment_of(device).filter(|to| *to != sender).ok_or(Decline::Elsewhere)?;
    let port =
        maps::fast_port(to).filter(|port| port.bridge == FastPort::ROUTED).ok_or(Decline::Elsewhere)?;
    let record = maps::record(to).ok_or(Decline::Unready)?;
    let known = Mac { octets: query.dmac };
    if !record.has(flag::PRESENT)
        || record.has(flag::PENDING)
        || record.host_ifindex != device
        || !record.mac.same(&known)
    {
        return Err(Decline::Unready);
    }
    // Segments are as long as the sender's own link allows.
    let sent = maps::fast_port(sender).map_or(u32::MAX, |port| port.mtu);
    if sent > port.mtu && too_big(ctx, port.mtu, true) {
        return Err(Decline::TooBig);
    }
    Ok(to)
}

/// Sets the hop limit and the Ethernet addresses. The first write makes the packet writable or fails; the others follow.
#[inline(always)]
fn change(ctx: &TcContext, query: &bpf_fib_lookup, at: usize, hop_limit: u8) -> Result<(), Decline> {
    ctx.store(at, &hop_limit, 0).map_err(|_| Decline::Unroutable)?;
    ctx.store(0, &[query.dmac, query.smac], 0).map_err(|_| Decline::Unroutable)
}

#[inline(always)]
fn words(octets: &[u8; 16]) -> [u32; 4] {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = *octets;
    [[a, b, c, d], [e, f, g, h], [i, j, k, l], [m, n, o, p]].map(u32::from_ne_bytes)
}
