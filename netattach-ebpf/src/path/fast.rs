//! The fast path: from the sender's program into the receiver's interface, between two pods of one bridge, two routed
//! links (`route`), or from an uplink to a pod (`uplink`); and from a pod to an uplink, where the node would route
//! it.
//!
//! `na_from_pod` and `na_wire` continue in `na_fast` with the packets that they let pass and that have not taken the
//! `shortcut`. `na_fast` finds the receiver, judges the packet by the receiver's policy and bandwidth as `na_to_pod`
//! would, and moves it into the pod's interface (`bpf_redirect_peer`): no bridge, no second queue. It is a separate
//! program because two others continue there. The ends of a packet are in `endpoint`.
//!
//! Every uncertain case takes the stack, where `na_to_pod` judges the packet. Properties of a *device* (its bridge only
//! switches, its port forwards) are established by the agent, which writes and withdraws `na_fast_port` and
//! `na_fast_mac`; properties of a *packet* are checked here:
//!
//! | question | no |
//! |---|---|
//! | does the sender's attachment take part? | not asked further |
//! | is it unicast IP without a tag, and no neighbour discovery? | `control` |
//! | has an agent looked at the node lately? | `unwatched` |
//! | is the destination another attachment on the sender's bridge, both on routed links, or behind an uplink that the node routes to and that is no parent? | `elsewhere` |
//! | is its policy in force, and its device its own? | `unready` |
//! | does the packet fit its link? | `too-big` |
//! | routed: is there a hop left, and nothing for routers to read? | `hop-limit` |
//! | routed: are the ports at hand, by which the node may route? | `no-ports` |
//! | routed: would the node pass it on? | `unroutable` |
//! | routed, from an uplink: would an answer leave by the device that it came in by? | `source` |

use aya_ebpf::{
    bindings::{TC_ACT_REDIRECT, TC_ACT_SHOT, TC_ACT_UNSPEC},
    macros::classifier,
    programs::TcContext,
};
use netattach_common::{Decline, FastPort, Mac, Side, StationKey, uplink};

use crate::path::{
    clock, count,
    endpoint::{Origin, TO_UPLINK, fits, in_force, put_into, ready},
    frame::{self, PACKET_HOST},
    judge,
    log::{self, Stage},
    maps, route,
    scope::Scope,
    verdict::{Declined, PacketClass},
};

/// Words of the packet's scratch area (`cb`), which a tail call keeps: the sender's attachment (0 for a packet that
/// came in by an uplink), and the attachment that counts the packet when it is left to the stack.
const SENDER: usize = 0;
const COUNTED: usize = 1;

/// Continues in `na_fast` when the sender takes part in the fast path. Returns when it does not, or when the call
/// fails.
#[inline(always)]
pub(crate) fn tail_call_from_pod(ctx: &TcContext, sender: u32, class: PacketClass) {
    if maps::fast_port(sender).is_none_or(|port| port.bridge == 0) {
        return;
    }
    if class != PacketClass::Data {
        count::declined(sender, Decline::Control);
        return;
    }
    tail_call(ctx, sender, sender);
}

/// Continues in `na_fast` with a packet that came in by an uplink and is addressed to an attachment. Returns when the
/// call fails.
#[inline(always)]
pub(crate) fn tail_call_from_uplink(ctx: &TcContext, attachment: u32) {
    tail_call(ctx, 0, attachment);
}

#[inline(always)]
fn tail_call(ctx: &TcContext, sender: u32, counted: u32) {
    // SAFETY: the context pointer is valid while the program runs.
    unsafe {
        (*ctx.skb.skb).cb[SENDER] = sender;
        (*ctx.skb.skb).cb[COUNTED] = counted;
    }
    maps::tail_call_fast(ctx);
    count::declined(counted, Decline::NoProgram);
}

/// The continuation of `na_from_pod` and `na_wire`, with the scratch area filled in.
#[classifier]
pub(crate) fn na_fast(ctx: TcContext) -> i32 {
    // SAFETY: the context pointer is valid while the program runs.
    let (sender, counted) = unsafe { ((*ctx.skb.skb).cb[SENDER], (*ctx.skb.skb).cb[COUNTED]) };
    match receiver(&ctx, sender, counted) {
        Ok(TO_UPLINK) => {
            log::number(counted, Stage::Fast, TO_UPLINK);
            count::to_uplink(sender, ctx.len());
            TC_ACT_REDIRECT as i32
        }
        Ok(attachment) => {
            log::number(counted, Stage::Fast, attachment);
            deliver(&ctx, attachment)
        }
        Err(reason) => {
            log::number(counted, Stage::Declined, reason.0);
            count::declined(counted, reason);
            TC_ACT_UNSPEC
        }
    }
}

/// The receiver of a packet, or [`TO_UPLINK`]. `addressed`: the attachment that a packet from an uplink is addressed
/// to.
#[inline(always)]
fn receiver(ctx: &TcContext, sender: u32, addressed: u32) -> Result<u32, Declined> {
    if clock::nanoseconds() >= maps::fast_until() {
        return Err(Decline::Unwatched.into());
    }
    let mut origin = Origin::of(ctx, sender).ok_or(Decline::Elsewhere)?;
    if origin.segment == FastPort::ROUTED {
        // SAFETY: the context pointer is valid while the program runs.
        if unsafe { (*ctx.skb.skb).pkt_type } != PACKET_HOST {
            return Err(Decline::Elsewhere.into());
        }
    } else {
        let mac: &Mac = frame::destination(ctx).map_err(|_| Decline::Control)?;
        if mac.octets[0] & 1 != 0 {
            return Err(Decline::Control.into());
        }
        let station = StationKey::new(origin.segment, *mac);
        if let Some(attachment) = near(ctx, &origin, &station) {
            return Ok(attachment);
        }
        let found = if sender == 0 { Some(addressed) } else { maps::listed_station(&station) };
        match found {
            // To the bridge itself: the node routes such packets.
            Some(StationKey::GATEWAY) if sender != 0 => {}
            Some(attachment) if attachment != sender => {
                return switched(ctx, &origin, attachment, mac).map_err(Declined::from);
            }
            _ => return Err(Decline::Elsewhere.into()),
        }
        let gateway = maps::uplink(origin.segment).filter(|bridge| bridge.flags & uplink::flag::GATEWAY != 0);
        if !gateway.ok_or(Decline::Elsewhere)?.mac.same(mac) {
            return Err(Decline::Elsewhere.into());
        }
        origin.ingress = origin.segment;
    }
    route::receiver(ctx, &origin).map_err(Declined::from)
}

/// The receiver of most frames from pods: the attachment found last for that address, without a second lookup.
/// `None`: [`receiver`] looks in the table, and finds a receiver or the reason why there is none.
#[inline(always)]
fn near(ctx: &TcContext, origin: &Origin, station: &StationKey) -> Option<u32> {
    let (attachment, port, record) = maps::last_station(station)?;
    let receives =
        attachment != origin.sender && port.bridge != 0 && in_force(record).is_ok() && fits(ctx, port);
    receives.then_some(attachment)
}

/// Whether an attachment can receive a frame of its bridge.
#[inline(always)]
fn switched(ctx: &TcContext, origin: &Origin, attachment: u32, mac: &Mac) -> Result<u32, Decline> {
    let port = maps::fast_port(attachment).filter(|port| port.bridge == origin.segment && port.bridge != 0);
    let port = port.ok_or(Decline::Elsewhere)?;
    ready(attachment, mac)?;
    if fits(ctx, port) { Ok(attachment) } else { Err(Decline::TooBig) }
}

/// Judges a packet by the receiver's policy and puts it into the receiver's interface.
#[inline(always)]
pub(crate) fn deliver(ctx: &TcContext, to: u32) -> i32 {
    // The attachment existed a moment ago: now there is none for which the packet could be counted.
    let Some(record) = maps::record(to) else {
        return TC_ACT_SHOT as i32;
    };
    let device = record.host_ifindex;
    let Some(scope) = Scope::within(to, record, Side::ToPod) else {
        return TC_ACT_SHOT as i32;
    };
    if judge::verdict(ctx, to, Side::ToPod, Some(scope)).is_err() {
        return TC_ACT_SHOT as i32;
    }
    count::fast_path(to, ctx.len());
    put_into(ctx, device)
}
