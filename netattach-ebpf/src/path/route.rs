//! The fast path where the node routes: performs the stack's forwarding steps on a packet.
//!
//! The node's own routing decides where it goes (`bpf_fib_lookup`): rules, tables, whether the node forwards, and the
//! next hop: the pod itself, or a router behind an uplink. The query has every field that rules can match: addresses,
//! ports, protocol, type of service, flow label, the device. Cases that need more of the stack are left to it: a hop
//! limit that runs out, IPv4 options and hop-by-hop options, ports that are not at hand (fragments, extension headers),
//! a pod whose address is not resolved yet.

use core::mem::zeroed;

use aya_ebpf::{
    bindings::{
        BPF_FIB_LKUP_RET_FRAG_NEEDED, BPF_FIB_LKUP_RET_NO_NEIGH, BPF_FIB_LKUP_RET_SUCCESS, bpf_fib_lookup,
        bpf_redir_neigh,
    },
    helpers::generated::{bpf_fib_lookup as fib_lookup, bpf_redirect_neigh},
    programs::TcContext,
};
use netattach_common::{
    Decline, FastPort, Ip6, Mac, ParentKey, Ports, StationKey,
    parse::{
        ETHERNET_LEN, Plain, ethertype,
        header::{self, AUTHENTICATION, HOP_BY_HOP, IPV4_LEN, IPV6_LEN, Ipv4Header, Ipv6Header},
    },
    protocol::{SCTP, TCP, UDP},
    uplink::flag,
};

use crate::path::{
    endpoint::{Origin, TO_UPLINK, ready},
    frame, maps,
};

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
/// Offsets in the frame.
const IPV4_HOP_LIMIT: usize = ETHERNET_LEN + core::mem::offset_of!(Ipv4Header, hop_limit);
const IPV4_CHECKSUM: usize = ETHERNET_LEN + core::mem::offset_of!(Ipv4Header, checksum);
const IPV6_HOP_LIMIT: usize = ETHERNET_LEN + core::mem::offset_of!(Ipv6Header, hop_limit);
/// Version 4, a header of five words.
const IPV4_PLAIN: u8 = 0x45;
/// Protocols whose first four bytes the kernel's rules take for ports beside TCP's, UDP's and SCTP's: DCCP, ESP,
/// UDP-Lite (Linux, `proto_ports_offset`).
const ALSO_PORTS: [u8; 3] = [33, 50, 136];

/// Finds the attachment that a packet is routed to, and rewrites the packet as the node would: hop limit and Ethernet
/// addresses. A packet for an uplink ([`TO_UPLINK`]) is already on its way there when this returns. The packet is
/// unchanged on failure.
#[inline(always)]
pub(crate) fn receiver(ctx: &TcContext, origin: &Origin) -> Result<u32, Decline> {
    // SAFETY: the context pointer is valid while the program runs.
    let protocol = unsafe { (*ctx.skb.skb).protocol };
    if frame::says_ipv6(ctx) {
        ipv6(ctx, origin)
    } else if protocol == u32::from(ethertype::IPV4.to_be()) {
        ipv4(ctx, origin)
    } else {
        Err(Decline::Control)
    }
}

#[inline(never)]
fn ipv4(ctx: &TcContext, origin: &Origin) -> Result<u32, Decline> {
    let header: Ipv4Header = read(ctx)?;
    if header.hop_limit <= 1 || header.version_and_words != IPV4_PLAIN {
        return Err(Decline::HopLimit);
    }
    if u16::from_be(header.fragment) & 0x3fff != 0 {
        return Err(Decline::NoPorts);
    }
    let ports = ports(ctx, header.protocol, ETHERNET_LEN + IPV4_LEN)?;
    let [source, destination] =
        [header.source, header.destination].map(|address| u32::from_ne_bytes(address.octets));
    // SAFETY: integers and unions of integers.
    let mut query: bpf_fib_lookup = unsafe { zeroed() };
    query.family = AF_INET;
    query.l4_protocol = header.protocol;
    if origin.sender == 0 {
        query.__bindgen_anon_3.ipv4_src = destination;
        query.__bindgen_anon_4.ipv4_dst = source;
        set_ports(&mut query, ports.reversed());
        answers_leave(ctx, origin, &mut query)?;
    }
    query.family = AF_INET;
    set_ports(&mut query, ports);
    query.__bindgen_anon_2.tos = header.service;
    query.__bindgen_anon_3.ipv4_src = source;
    query.__bindgen_anon_4.ipv4_dst = destination;
    let to = find(ctx, origin, &mut query)?;
    let [before, after] =
        [header.hop_limit, header.hop_limit - 1].map(|hops| u16::from_ne_bytes([hops, header.protocol]));
    ctx.l3_csum_replace(IPV4_CHECKSUM, before.into(), after.into(), 2).map_err(|_| Decline::Unroutable)?;
    send_on(ctx, to, &query, IPV4_HOP_LIMIT, header.hop_limit - 1)
}

#[inline(never)]
fn ipv6(ctx: &TcContext, origin: &Origin) -> Result<u32, Decline> {
    let header: Ipv6Header = read(ctx)?;
    if header.hop_limit <= 1 || header.next_header == HOP_BY_HOP {
        return Err(Decline::HopLimit);
    }
    if stays_on_link(&header.source) || stays_on_link(&header.destination) {
        return Err(Decline::Unroutable);
    }
    if header::is_extension(header.next_header) {
        return Err(Decline::NoPorts);
    }
    let ports = ports(ctx, header.next_header, ETHERNET_LEN + IPV6_LEN)?;
    let [source, destination] = [header.source, header.destination].map(|address| words(&address.octets));
    // SAFETY: as above.
    let mut query: bpf_fib_lookup = unsafe { zeroed() };
    query.family = AF_INET6;
    query.l4_protocol = header.next_header;
    if origin.sender == 0 {
        query.__bindgen_anon_3.ipv6_src = destination;
        query.__bindgen_anon_4.ipv6_dst = source;
        set_ports(&mut query, ports.reversed());
        answers_leave(ctx, origin, &mut query)?;
    }
    query.__bindgen_anon_2.flowinfo = header.flow_information();
    set_ports(&mut query, ports);
    query.__bindgen_anon_3.ipv6_src = source;
    query.__bindgen_anon_4.ipv6_dst = destination;
    let to = find(ctx, origin, &mut query)?;
    send_on(ctx, to, &query, IPV6_HOP_LIMIT, header.hop_limit - 1)
}

/// Whether routers never forward an address: unspecified, loopback, link-local, multicast (RFC 4291, 2).
#[inline(always)]
fn stays_on_link(address: &Ip6) -> bool {
    let [a, b, c, d] = words(&address.octets).map(u32::from_be);
    a >> 24 == 0xff || a >> 22 == 0xfe80 >> 6 || a | b | c == 0 && d <= 1
}

#[inline(always)]
fn read<T: Plain>(ctx: &TcContext) -> Result<T, Decline> {
    frame::network(ctx).copied().map_err(|_| Decline::Control)
}

/// The ports, as routing rules see them, of a whole packet whose transport header is at an offset.
#[inline(always)]
fn ports(ctx: &TcContext, protocol: u8, at: usize) -> Result<Ports, Decline> {
    if matches!(protocol, TCP | UDP | SCTP) || ALSO_PORTS.contains(&protocol) {
        return frame::at(ctx, at).copied().map_err(|_| Decline::NoPorts);
    }
    // The kernel looks for the ports behind it.
    if protocol == AUTHENTICATION { Err(Decline::NoPorts) } else { Ok(Ports::NONE) }
}

#[inline(always)]
fn set_ports(query: &mut bpf_fib_lookup, ports: Ports) {
    query.sport = u16::from_ne_bytes(ports.source().octets);
    query.dport = u16::from_ne_bytes(ports.destination().octets);
}

/// Queries the node's routing.
#[inline(always)]
fn ask(ctx: &TcContext, query: &mut bpf_fib_lookup) -> u32 {
    let length = size_of::<bpf_fib_lookup>() as i32;
    // SAFETY: the context pointer is valid while the program runs; `query` has the length that is passed.
    unsafe { fib_lookup(ctx.skb.skb.cast(), query, length, 0) as u32 }
}

/// Whether an answer to a packet that came in by an uplink would leave by it: the node's source check (`rp_filter`),
/// but stricter. It also catches sources that are no host's address.
#[inline(always)]
fn answers_leave(ctx: &TcContext, origin: &Origin, query: &mut bpf_fib_lookup) -> Result<(), Decline> {
    query.ifindex = origin.ingress;
    // Shorter than any link's limit: the packet's own length does not matter here.
    query.__bindgen_anon_1.tot_len = 1;
    let answer = ask(ctx, query);
    if matches!(answer, BPF_FIB_LKUP_RET_SUCCESS | BPF_FIB_LKUP_RET_NO_NEIGH)
        && query.ifindex == origin.ingress
    {
        Ok(())
    } else {
        Err(Decline::Source)
    }
}

/// Finds where the node sends a packet: an attachment that can receive it, with the Ethernet addresses in `query`, or
/// an uplink, with the next hop there.
#[inline(always)]
fn find(ctx: &TcContext, origin: &Origin, query: &mut bpf_fib_lookup) -> Result<u32, Decline> {
    query.ifindex = origin.ingress;
    query.__bindgen_anon_1.tot_len = longest(ctx, origin.mtu);
    // All other results: there is no route, the node does not forward, or is the destination itself.
    let resolved = match ask(ctx, query) {
        BPF_FIB_LKUP_RET_SUCCESS => true,
        BPF_FIB_LKUP_RET_NO_NEIGH => false,
        BPF_FIB_LKUP_RET_FRAG_NEEDED => return Err(Decline::TooBig),
        _ => return Err(Decline::Unroutable),
    };
    let device = query.ifindex;
    if let Some(to) = maps::attachment_of(device) {
        let routed = maps::fast_port(to).is_some_and(|port| port.bridge == FastPort::ROUTED);
        if to == origin.sender || origin.segment != FastPort::ROUTED || !routed {
            return Err(Decline::Elsewhere);
        }
        return if resolved { attached(to, query) } else { Err(Decline::Unroutable) };
    }
    let out = maps::uplink(device).ok_or(Decline::Elsewhere)?;
    if origin.sender != 0 {
        let leads_out = out.segment == FastPort::ROUTED && out.flags & flag::FAST != 0;
        // On a parent the packet would count as foreign: it still has the socket of the pod that sent it, which the
        // stack takes off.
        let is_parent = maps::parent(&ParentKey::itself(device)).is_some();
        // Where it would go back to where it came from, the stack sends the sender a redirect.
        let goes = leads_out && !is_parent && device != origin.ingress;
        return if goes { Ok(TO_UPLINK) } else { Err(Decline::Elsewhere) };
    }
    if out.flags & flag::GATEWAY == 0 {
        return Err(Decline::Elsewhere);
    }
    if !resolved {
        return Err(Decline::Unroutable);
    }
    let to = maps::station(&StationKey::new(device, Mac { octets: query.dmac })).ok_or(Decline::Elsewhere)?;
    let on_bridge = maps::fast_port(to).is_some_and(|port| port.bridge == device);
    if on_bridge { attached(to, query) } else { Err(Decline::Elsewhere) }
}

#[inline(always)]
fn attached(to: u32, query: &bpf_fib_lookup) -> Result<u32, Decline> {
    ready(to, &Mac { octets: query.dmac }).map(|()| to)
}

/// The length that must fit a route's MTU. Segments are as long as the sender's own link allows.
#[inline(always)]
fn longest(ctx: &TcContext, mtu: u32) -> u16 {
    /// IPv4 and UDP: the shortest headers that a segment has.
    const HEADERS: u32 = 28;
    // SAFETY: the context pointer is valid while the program runs.
    let segment = unsafe { (*ctx.skb.skb).gso_size };
    let length =
        if segment == 0 { ctx.len().saturating_sub(ETHERNET_LEN as u32) } else { mtu.max(segment + HEADERS) };
    length.min(u16::MAX.into()) as u16
}

/// Sets the hop limit, then the Ethernet addresses of an attachment's frame, or sends the packet to the next hop. The
/// first write makes the packet writable or fails; the others cannot fail after it.
#[inline(always)]
fn send_on(
    ctx: &TcContext,
    to: u32,
    query: &bpf_fib_lookup,
    at: usize,
    hop_limit: u8,
) -> Result<u32, Decline> {
    ctx.store(at, &hop_limit, 0).map_err(|_| Decline::Unroutable)?;
    if to != TO_UPLINK {
        ctx.store(0, &[query.dmac, query.smac], 0).map_err(|_| Decline::Unroutable)?;
        return Ok(to);
    }
    // The kernel resolves the next hop and notices when it is gone: nothing else would probe it.
    // SAFETY: integers and a union of integers.
    let mut next: bpf_redir_neigh = unsafe { zeroed() };
    next.nh_family = query.family.into();
    // SAFETY: of the union's members this one is the longest, and the query was all zeroes before it was written.
    next.__bindgen_anon_1.ipv6_nh = unsafe { query.__bindgen_anon_4.ipv6_dst };
    let length = size_of::<bpf_redir_neigh>() as i32;
    // SAFETY: `next` has the length that is passed. It fails only for arguments that are never used here.
    unsafe { bpf_redirect_neigh(query.ifindex, &mut next, length, 0) };
    Ok(TO_UPLINK)
}

#[inline(always)]
fn words(octets: &[u8; 16]) -> [u32; 4] {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = *octets;
    [[a, b, c, d], [e, f, g, h], [i, j, k, l], [m, n, o, p]].map(u32::from_ne_bytes)
}
