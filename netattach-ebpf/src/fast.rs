//! The fast path between two pods of one bridge, or on two routed links (`route`): from the sender's program into the receiver's interface.
//!
//! `na_from_pod` hands over what it lets pass. `na_fast` finds the receiver, judges the packet by the receiver's policy
//! and bandwidth as `na_to_pod` would, and moves it into the pod's interface (`bpf_redirect_peer`): no bridge, no second
//! queue. It is a program of its own because both judgements together would exceed what the verifier follows.
//!
//! Whatever is not certain takes the stack, where `na_to_pod` judges it. What is certain of a *device* - its bridge does
//! nothing but switch, its port forwards - the agent says by writing `na_fast_port` and `na_fast_mac`, and takes back;
//! what is certain of a *packet* is found out here:
//!
//! | question | no |
//! |---|---|
//! | does the sender's attachment take part? | not asked further |
//! | is it unicast IP without a tag, and no neighbour discovery? | `control` |
//! | has an agent looked at the node lately? | `unwatched` |
//! | is the destination an attachment on the sender's bridge, or both on routed links, and another one? | `elsewhere` |
//! | is its policy in force, and its device its own? | `unready` |
//! | does the packet fit its link? | `too-big` |
//! | routed: is there a hop left, and nothing for routers to read? | `hop-limit` |
//! | routed: would the node pass it on? | `unroutable` |

use aya_ebpf::{
    bindings::{TC_ACT_SHOT, TC_ACT_UNSPEC},
    helpers::generated::{bpf_redirect_peer, bpf_skb_change_type},
    macros::classifier,
    programs::TcContext,
};
use netattach_common::{Decline, FastPort, Hook, Mac, StationKey, attachment::flag};

use crate::{classifier, count, frame, limit, maps, route, verdict::Sort};

/// `linux/if_packet.h`: addressed to the host.
pub(crate) const PACKET_HOST: u32 = 0;

/// The word of the packet's scratch area (`cb`, which a tail call keeps) that holds the sender's attachment.
const SENDER: usize = 0;

/// Continues in `na_fast` when the sender takes part. Returns when it does not, or cannot be handed over.
#[inline(always)]
pub(crate) fn hand_over(ctx: &TcContext, sender: u32, sort: Sort) {
    if maps::fast_port(sender).is_none_or(|port| port.bridge == 0) {
        return;
    }
    if sort != Sort::Data {
        count::declined(sender, Decline::Control);
        return;
    }
    // SAFETY: the context pointer is valid while the program runs.
    unsafe { (*ctx.skb.skb).cb[SENDER] = sender };
    maps::tail_call_fast(ctx);
    count::declined(sender, Decline::NoProgram);
}

/// Where `na_from_pod` continues. The sender's attachment is in the scratch area.
#[classifier]
pub(crate) fn na_fast(ctx: TcContext) -> i32 {
    // SAFETY: the context pointer is valid while the program runs.
    let sender = unsafe { (*ctx.skb.skb).cb[SENDER] };
    match receiver(&ctx, sender) {
        Ok(to) => deliver(&ctx, to),
        Err(reason) => {
            count::declined(sender, reason);
            TC_ACT_UNSPEC
        }
    }
}

/// Who receives a packet by the fast path.
#[derive(Clone, Copy)]
struct Receiver {
    attachment: u32,
    device: u32,
}

#[inline(always)]
fn receiver(ctx: &TcContext, sender: u32) -> Result<Receiver, Decline> {
    if limit::coarse_now() >= maps::fast_until() {
        return Err(Decline::Unwatched);
    }
    let bridge = maps::fast_port(sender).ok_or(Decline::Elsewhere)?.bridge;
    if bridge == FastPort::ROUTED {
        let attachment = route::receiver(ctx, sender)?;
        let device = maps::record(attachment).ok_or(Decline::Unready)?.host_ifindex;
        return Ok(Receiver { attachment, device });
    }
    let mac: &Mac = frame::destination(ctx).map_err(|_| Decline::Control)?;
    let attachment = match maps::station(&StationKey::new(bridge, *mac)) {
        Some(attachment) if attachment != sender => attachment,
        _ => return Err(if mac.octets[0] & 1 != 0 { Decline::Control } else { Decline::Elsewhere }),
    };
    let port = maps::fast_port(attachment).filter(|port| port.bridge == bridge && bridge != 0);
    let port = port.ok_or(Decline::Elsewhere)?;
    let record = maps::record(attachment).ok_or(Decline::Unready)?;
    if !record.has(flag::PRESENT) || record.has(flag::PENDING) || !record.mac.same(mac) {
        return Err(Decline::Unready);
    }
    let device = record.host_ifindex;
    if maps::attachment_of(device) != Some(attachment) {
        return Err(Decline::Unready);
    }
    // As the bridge measures it: a packet that is still to be cut into segments fits.
    if too_big(ctx, port.mtu, false) { Err(Decline::TooBig) } else { Ok(Receiver { attachment, device }) }
}

/// Whether a packet is longer than a link's MTU; `segments`: what a packet that is still to be cut counts as.
#[inline(always)]
pub(crate) fn too_big(ctx: &TcContext, mtu: u32, segments: bool) -> bool {
    // SAFETY: the context pointer is valid while the program runs.
    let whole = unsafe { (*ctx.skb.skb).gso_size } == 0;
    if whole { ctx.len() > mtu + frame::ETHERNET_LEN as u32 } else { segments }
}

/// Judges a packet by the receiver's policy and puts it into the receiver's interface.
#[inline(always)]
fn deliver(ctx: &TcContext, to: Receiver) -> i32 {
    if classifier::verdict(ctx, to.attachment, Hook::ToPod).is_err() {
        return TC_ACT_SHOT as i32;
    }
    count::fast_path(to.attachment, ctx.len());
    // SAFETY: the context pointer is valid while the program runs.
    unsafe {
        if (*ctx.skb.skb).pkt_type != PACKET_HOST {
            // It is addressed to the pod, not to the device that received it: the pod's stack would not take it, where
            // the kernel does not do this itself. It cannot fail for a unicast packet.
            bpf_skb_change_type(ctx.skb.skb, PACKET_HOST);
        }
        bpf_redirect_peer(to.device, 0) as i32
    }
}
