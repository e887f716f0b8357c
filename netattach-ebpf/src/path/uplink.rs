//! Packets that come in by an uplink of the node: a port of a bridge that belongs to no attachment, or the device of
//! the default route.
//!
//! `na_wire` looks for packets to attachments that take the fast path, and continues in `na_fast` with them; everything
//! else takes the stack and is not counted. The device is shared: others' programs run on packets left to the stack.
//!
//! | question | no |
//! |---|---|
//! | does the agent say that packets may pass the stack by here? | not asked further |
//! | is it unicast IP without a tag, to an attachment of the fast path on this bridge, or of a routed one? | not asked further |
//! | is the device no attachment's? | not asked further |
//! | bridge: is it no neighbour discovery, and has it no extension headers that could hide it? | `control` |
//! | bridge: has it seen the sender on this port lately? | `learning` |

use aya_ebpf::{bindings::TC_ACT_UNSPEC, macros::classifier, programs::TcContext};
use netattach_common::{
    Address, Decline, FastPort, LocalKey, Seen, StationKey, Uplink,
    parse::{
        ETHERNET_LEN, ethertype,
        header::{self, HOP_BY_HOP, IPV6_LEN, Ipv4Header, Ipv6Header},
    },
    protocol::ICMPV6,
    uplink::{SHOWN_EVERY, flag},
};

use crate::path::{
    clock, count, fast,
    frame::{self, PACKET_HOST},
    maps,
};

/// Extension headers that neighbour discovery could stand behind (IANA).
const ROUTING: u8 = 43;
const DESTINATION_OPTIONS: u8 = 60;

#[classifier]
pub(crate) fn na_wire(ctx: TcContext) -> i32 {
    let ifindex = frame::ifindex(&ctx);
    let uplink = match maps::uplink(ifindex) {
        Some(uplink) if uplink.flags & flag::FAST != 0 => uplink,
        _ => return TC_ACT_UNSPEC,
    };
    // A device can become an attachment's while the agent still treats it as an uplink (a port that an executed
    // plugin has made): packets of its pod are left to `na_from_pod`, which runs next.
    if let Some(attachment) = addressed(&ctx, uplink).filter(|_| maps::attachment_of(ifindex).is_none()) {
        let clear =
            if uplink.segment == FastPort::ROUTED { Ok(()) } else { switched(&ctx, uplink.segment, ifindex) };
        match clear {
            Ok(()) => fast::tail_call_from_uplink(&ctx, attachment),
            Err(reason) => count::declined(attachment, reason),
        }
    }
    TC_ACT_UNSPEC
}

/// The attachment that a packet is for, judging by its addresses.
#[inline(always)]
fn addressed(ctx: &TcContext, uplink: &Uplink) -> Option<u32> {
    // SAFETY: the context pointer is valid while the program runs.
    let (kind, protocol, tagged) =
        unsafe { ((*ctx.skb.skb).pkt_type, (*ctx.skb.skb).protocol, (*ctx.skb.skb).vlan_present) };
    let six = frame::says_ipv6(ctx);
    if tagged != 0 || !six && protocol != u32::from(ethertype::IPV4.to_be()) {
        return None;
    }
    if uplink.segment != FastPort::ROUTED {
        let found = maps::station(&StationKey::new(uplink.segment, *frame::destination(ctx).ok()?));
        return found.filter(|attachment| *attachment != StationKey::GATEWAY);
    }
    if kind != PACKET_HOST {
        return None;
    }
    let address = if six {
        frame::pull(ctx, header::HEADERS_V6).ok()?;
        frame::network::<Ipv6Header>(ctx).ok()?.destination
    } else {
        frame::pull(ctx, header::HEADERS_V4).ok()?;
        frame::network::<Ipv4Header>(ctx).ok()?.destination.widen()
    };
    maps::local(&LocalKey { segment: FastPort::ROUTED, address })
}

/// Whether a bridge needs to see a frame.
#[inline(always)]
fn switched(ctx: &TcContext, bridge: u32, ifindex: u32) -> Result<(), Decline> {
    if frame::says_ipv6(ctx) {
        frame::pull(ctx, header::HEADERS_V6).map_err(|_| Decline::Control)?;
        let header: &Ipv6Header = frame::network(ctx).map_err(|_| Decline::Control)?;
        match header.next_header {
            HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS => return Err(Decline::Control),
            ICMPV6 => {
                let kind: u8 = frame::load(ctx, ETHERNET_LEN + IPV6_LEN).map_err(|_| Decline::Control)?;
                // Multicast listeners and neighbour discovery (RFC 2710, 4861, 3810).
                if matches!(kind, 130..=137 | 143) {
                    return Err(Decline::Control);
                }
            }
            _ => {}
        }
    }
    let (_, source) = frame::addresses(ctx).map_err(|_| Decline::Control)?;
    let key = StationKey::new(bridge, source);
    let now = clock::seconds();
    match maps::seen(&key) {
        Some(seen) if seen.port == ifindex && now.wrapping_sub(seen.at) < SHOWN_EVERY => Ok(()),
        _ => {
            maps::note_seen(&key, &Seen { port: ifindex, at: now });
            Err(Decline::Learning)
        }
    }
}
