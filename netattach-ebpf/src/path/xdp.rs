//! Early drops in the driver of an uplink, before the node spends anything on a frame: frames for which the verdict
//! at the pod would be the same, and frames with an attachment's source address.
//!
//! | frame | dropped as |
//! |---|---|
//! | from the MAC address of an attachment on the bridge that the uplink is a port of | `wire-source` |
//! | IP, from an address of an attachment that the uplink leads to; also behind VLAN tags without an id, which pods' programs take for none | `wire-source` |
//! | more tags than that, the first two without an id: a bridge that filters by VLAN takes one of them off | `malformed` |
//! | to an attachment on that bridge: a datagram of UDP, or the first segment of a TCP connection, of no flow in the flow table, which the attachment's ingress policy does not allow | `ingress-peer`, `ingress-port` |
//!
//! The last case is checked only where nothing on the way to the pod could rewrite the packet, and only for whole
//! packets without options, extension headers and tags, since everything else needs more than a look-up to be judged
//! exactly. All other frames pass, and are judged at the pod. ARP passes: address ownership is not for a filter to
//! decide.

use aya_ebpf::{
    bindings::xdp_action::{XDP_DROP, XDP_PASS},
    macros::xdp,
    programs::XdpContext,
};
use netattach_common::{
    Address, DropReason, FastPort, FlowKey, Ip4, Ip6, LocalKey, Mac, Ports, Side, Uplink,
    attachment::{flag as attachment, link_local},
    decide::Query,
    flow::{Lane, Tuple, tcp},
    parse::{
        ETHERNET_LEN, EthernetHeader, Plain, ethertype,
        frame::{TAG_LEN, Tag, is_tag, vlan_id},
        header::{IPV4_LEN, IPV6_LEN, Ipv4Header, Ipv6Header, TcpHeader},
    },
    protocol::{TCP, UDP},
    uplink::flag,
};

use crate::path::{count, family::Family, maps, policy, scope::Scope};

/// No attachment has this number. Not an `Option`, whose payload the compiler would carry along even for `None`: the
/// verifier refuses reads of memory that was never written.
const NOBODY: u32 = 0;
/// Version 4, a header of five words.
const IPV4_PLAIN: u8 = 0x45;
/// Offset and "more fragments" of IPv4.
const FRAGMENT: u16 = 0x3fff;

#[xdp]
pub(crate) fn na_xdp(ctx: XdpContext) -> u32 {
    match dropped(&ctx) {
        Some((attachment, reason)) => {
            let bytes = (ctx.data_end() - ctx.data()) as u32;
            count::packet(attachment, Side::ToPod, bytes, Err(reason.into()));
            XDP_DROP
        }
        None => XDP_PASS,
    }
}

/// The attachment whose frame is dropped, and why.
#[inline(always)]
fn dropped(ctx: &XdpContext) -> Option<(u32, DropReason)> {
    // SAFETY: the context pointer is valid while the program runs.
    let uplink = maps::uplink(unsafe { (*ctx.ctx).ingress_ifindex })?;
    if uplink.flags & flag::SPOOFED == 0 {
        return None;
    }
    let ethernet: &EthernetHeader = at(ctx, 0)?;
    let switched = uplink.segment != FastPort::ROUTED;
    if switched {
        let claimed = local(uplink, link_local(ethernet.source));
        if claimed != NOBODY {
            return Some((claimed, DropReason::WireSource));
        }
    }
    let asked = switched && uplink.flags & flag::DENIED != 0;
    let receiver = if asked { local(uplink, link_local(ethernet.destination)) } else { NOBODY };
    match u16::from_be(ethernet.ethertype) {
        ethertype::IPV4 => {
            let ip: &Ipv4Header = at(ctx, ETHERNET_LEN)?;
            let claimed = local(uplink, ip.source.widen());
            if claimed != NOBODY {
                return Some((claimed, DropReason::WireSource));
            }
            let whole = ip.version_and_words == IPV4_PLAIN && u16::from_be(ip.fragment) & FRAGMENT == 0;
            if receiver == NOBODY || !whole {
                return None;
            }
            let ports = opening(ctx, ip.protocol, ETHERNET_LEN + IPV4_LEN)?;
            denied::<Ip4>(receiver, ip.source, ip.destination, ip.protocol, ports)
        }
        ethertype::IPV6 => {
            let ip: &Ipv6Header = at(ctx, ETHERNET_LEN)?;
            let claimed = local(uplink, ip.source);
            if claimed != NOBODY {
                return Some((claimed, DropReason::WireSource));
            }
            if receiver == NOBODY {
                return None;
            }
            let ports = opening(ctx, ip.next_header, ETHERNET_LEN + IPV6_LEN)?;
            denied::<Ip6>(receiver, ip.source, ip.destination, ip.next_header, ports)
        }
        number if is_tag(number) => behind_tags(ctx, uplink, ethernet.destination),
        _ => None,
    }
}

/// Judges a frame by what is behind at most two tags without an id; tags of VLANs are for the pod's program to judge.
/// With more tags it is dropped, and counted for the attachment that it is sent to, if there is one: the pod's program
/// sees one tag less where the bridge has taken the first for its own, and would believe what the frame claims.
#[inline(always)]
fn behind_tags(ctx: &XdpContext, uplink: &Uplink, receiver: Mac) -> Option<(u32, DropReason)> {
    let first = behind_tag(ctx, ETHERNET_LEN);
    let claimed = if is_tag(first) {
        let second = behind_tag(ctx, ETHERNET_LEN + TAG_LEN);
        if is_tag(second) {
            return Some((local(uplink, link_local(receiver)), DropReason::Malformed));
        }
        claimed(ctx, uplink, second, ETHERNET_LEN + 2 * TAG_LEN)
    } else {
        claimed(ctx, uplink, first, ETHERNET_LEN + TAG_LEN)
    };
    (claimed != NOBODY).then_some((claimed, DropReason::WireSource))
}

/// The ethertype behind a tag without an id; 0, which is none, behind any other.
#[inline(always)]
fn behind_tag(ctx: &XdpContext, offset: usize) -> u16 {
    match at::<Tag>(ctx, offset) {
        Some(tag) if vlan_id(u16::from_be(tag.control)) == 0 => u16::from_be(tag.ethertype),
        _ => 0,
    }
}

/// The attachment whose address a packet of that ethertype has as its source, or [`NOBODY`].
#[inline(always)]
fn claimed(ctx: &XdpContext, uplink: &Uplink, number: u16, offset: usize) -> u32 {
    let source = match number {
        ethertype::IPV4 => match at::<Ipv4Header>(ctx, offset) {
            Some(ip) => ip.source.widen(),
            None => return NOBODY,
        },
        ethertype::IPV6 => match at::<Ipv6Header>(ctx, offset) {
            Some(ip) => ip.source,
            None => return NOBODY,
        },
        _ => return NOBODY,
    };
    local(uplink, source)
}

/// The attachment behind the uplink that has an address, or [`NOBODY`].
#[inline(always)]
fn local(uplink: &Uplink, address: Ip6) -> u32 {
    maps::local(&LocalKey { segment: uplink.segment, address }).unwrap_or(NOBODY)
}

/// The ports of a packet that can open a flow, and does nothing else if there is none.
#[inline(always)]
fn opening(ctx: &XdpContext, protocol: u8, offset: usize) -> Option<Ports> {
    match protocol {
        UDP => at(ctx, offset).copied(),
        TCP => {
            let header: &TcpHeader = at(ctx, offset)?;
            let opens = header.flags & (tcp::SYN | tcp::ACK | tcp::RST | tcp::FIN) == tcp::SYN;
            opens.then_some(header.ports)
        }
        _ => None,
    }
}

/// Whether the receiver's policy does not allow a flow that begins with this packet, and no such flow exists. The state
/// of an existing flow is for the pod's program to judge.
#[inline(always)]
fn denied<A: Family>(
    receiver: u32,
    source: A,
    destination: A,
    protocol: u8,
    ports: Ports,
) -> Option<(u32, DropReason)> {
    let scope = Scope::of(receiver, Side::ToPod)?;
    if scope.has(attachment::PENDING) || scope.policies.ingress == 0 {
        return None;
    }
    let tuple = Tuple { source, destination, ports, lane: Lane::NONE.of(protocol) };
    if A::flow(&FlowKey::new(scope.zone, &tuple, tuple.source_is_low())).is_some() {
        return None;
    }
    let query = Query::new(source, protocol, Some(ports.destination()));
    policy::refusal::<A>(scope.policies.ingress, &query).map(|reason| (receiver, reason))
}

/// A header in place, `None` where the frame is shorter: the pod's program then gives the drop reason.
#[inline(always)]
fn at<T: Plain>(ctx: &XdpContext, offset: usize) -> Option<&T> {
    let start = ctx.data() + offset;
    if start + size_of::<T>() > ctx.data_end() {
        return None;
    }
    // SAFETY: the bytes lie within the frame (checked above, and again by the verifier), which nothing changes while
    // the program runs; they can stand for the type (`Plain`), and a BPF load needs no alignment.
    Some(unsafe { &*(start as *const T) })
}
