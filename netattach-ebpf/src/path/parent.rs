//! The packet path of macvlan attachments.
//!
//! A macvlan has no end on the node. Traffic between its pod and others crosses the parent, which other pods' macvlans
//! share: a frame's attachment follows from its Ethernet addresses there. Frames cross (`drivers/net/macvlan.c`):
//!
//! | frame | parent's ingress | parent's egress | macvlan's ingress |
//! |---|---|---|---|
//! | unicast from one pod to another of the same parent, both in mode bridge | yes | | yes |
//! | any other frame that a pod sends | | yes | |
//! | unicast from outside | yes | | yes |
//! | multicast and broadcast from outside | yes, once | | one copy for each |
//! | multicast and broadcast of a pod in mode bridge, to the others | | (the one for outside) | one copy for each |
//!
//! So unicast is judged on the parent, out of the pods' reach, and the copies of group frames on the macvlan that
//! receives them, for both ends. A pod that detaches the programs from its own macvlan loses only its own protection
//! from such copies.
//!
//! A source address is trusted only as far as the kernel knows the sender: where it can tell from which namespace's
//! socket a frame came, only the pod itself may use the pod's address, and no other pod may use an unassigned one.
//! Frames without a socket (answers of the kernel itself, forwarded packets) count as the initial namespace's, and
//! pass. A frame that comes down from a VLAN of the parent has been judged there, or in the pod: it passes for
//! namespaces that have attachments on that VLAN and no macvlan on the parent itself, by which they could send frames
//! that look the same.

use aya_ebpf::{
    bindings::{TC_ACT_SHOT, TC_ACT_UNSPEC},
    helpers::generated::bpf_get_netns_cookie,
    macros::classifier,
    programs::TcContext,
};
use core::ptr::null_mut;
use netattach_common::{
    DropReason, Mac, ParentKey, Side,
    parent::{flag, place},
    parse::{Bytes, frame::vlan_id},
};

use crate::path::{
    count,
    frame::{self, Skb},
    judge, maps, record,
    scope::Scope,
};

/// Whether the kernel has `bpf_get_netns_cookie` for classifiers: written by the agent before it loads the programs.
/// The verifier skips code that is never executed, so kernels without the helper accept the programs too.
#[unsafe(no_mangle)]
static NA_COOKIES: u8 = 0;

/// Where a program runs.
#[derive(Clone, Copy)]
enum Place {
    /// Ingress of the parent, or its egress.
    Parent { ingress: bool },
    /// Ingress of the macvlan of this attachment.
    Macvlan(u32),
}

impl Place {
    #[inline(always)]
    fn of(ctx: &TcContext) -> Self {
        // SAFETY: the context pointer is valid while the program runs.
        let class = unsafe { (*ctx.skb.skb).tc_classid } as u16;
        // Later classifiers must not take it for a class.
        // SAFETY: as above; programs may write this field.
        unsafe { (*ctx.skb.skb).tc_classid = 0 };
        match class {
            place::EGRESS => Self::Parent { ingress: false },
            place::INGRESS => Self::Parent { ingress: true },
            attachment => Self::Macvlan(attachment.into()),
        }
    }
}

/// Judges a frame for its sender.
#[classifier]
pub(crate) fn na_par_from(ctx: TcContext) -> i32 {
    let Ok((destination, source)) = frame::addresses(&ctx) else {
        return TC_ACT_SHOT as i32;
    };
    match Place::of(&ctx) {
        Place::Parent { ingress } => from(&ctx, source, ingress),
        Place::Macvlan(attachment) if is_group(&destination) => copied(&ctx, attachment, source),
        Place::Macvlan(_) => TC_ACT_UNSPEC,
    }
}

/// Judges a frame for its receiver.
#[classifier]
pub(crate) fn na_par_to(ctx: TcContext) -> i32 {
    let Ok((destination, _)) = frame::addresses(&ctx) else {
        return TC_ACT_SHOT as i32;
    };
    let attachment = match Place::of(&ctx) {
        Place::Parent { .. } => {
            let entry = maps::parent(&ParentKey::macvlan(frame::ifindex(&ctx), destination));
            // SAFETY: a field of a map's value, which stays readable until the program ends.
            entry.map_or(0, |entry| unsafe { (*entry).attachment })
        }
        Place::Macvlan(attachment) if is_group(&destination) => attachment,
        Place::Macvlan(_) => 0,
    };
    if attachment == 0 { TC_ACT_UNSPEC } else { decide(&ctx, attachment, Side::ToPod) }
}

/// Entry for a link at a parent's ingress, for the sender.
#[classifier]
pub(crate) fn na_par_in_from(ctx: TcContext) -> i32 {
    tail_call_at(&ctx, place::INGRESS, Side::FromPod)
}

/// Entry for a link at a parent's ingress, for the receiver.
#[classifier]
pub(crate) fn na_par_in_to(ctx: TcContext) -> i32 {
    tail_call_at(&ctx, place::INGRESS, Side::ToPod)
}

/// Entry for a link at a parent's egress.
#[classifier]
pub(crate) fn na_par_out(ctx: TcContext) -> i32 {
    tail_call_at(&ctx, place::EGRESS, Side::FromPod)
}

/// A filter has a class that identifies its place; a link has none. So links run one program per place, which sets it.
#[inline(always)]
fn tail_call_at(ctx: &TcContext, place: u16, side: Side) -> i32 {
    // SAFETY: the context pointer is valid while the program runs; programs may write this field.
    unsafe { (*ctx.skb.skb).tc_classid = place.into() };
    maps::tail_call_parent(ctx, side);
    // The slot is empty.
    TC_ACT_SHOT as i32
}

#[inline(always)]
fn from(ctx: &TcContext, source: Mac, ingress: bool) -> i32 {
    let parent = frame::ifindex(ctx);
    let entry = maps::parent(&ParentKey::macvlan(parent, source));
    let cookie = sender(ctx);
    match entry {
        // SAFETY: as in `na_par_to`.
        Some(entry) if ingress && unsafe { (*entry).flags } & flag::SIBLINGS == 0 => TC_ACT_UNSPEC,
        Some(entry)
            if cookie == 0
                // SAFETY: as in `na_par_to`.
                || cookie == unsafe { (*entry).netns_cookie }
                || is_nodes(parent, cookie, 0) =>
        {
            // SAFETY: as in `na_par_to`.
            decide(ctx, unsafe { (*entry).attachment }, Side::FromPod)
        }
        Some(_) => drop_unattributed(ctx, DropReason::SourceNamespace),
        None if cookie == 0 || is_nodes(parent, cookie, flag::STRANGERS) => TC_ACT_UNSPEC,
        None if !ingress && is_judged_above(ctx, parent, cookie) => TC_ACT_UNSPEC,
        // It may have come in by the other end of a veth.
        None if ingress && !is_nodes(parent, 0, flag::CARD) && !is_pods(cookie) => TC_ACT_UNSPEC,
        None => drop_unattributed(ctx, DropReason::Stranger),
    }
}

/// Judges a copy for the macvlan of `receiver` on behalf of its sender. Only the frame that leaves by the parent is
/// counted.
#[inline(always)]
fn copied(ctx: &TcContext, receiver: u32, source: Mac) -> i32 {
    let Some(record) = maps::record(receiver) else {
        return TC_ACT_SHOT as i32;
    };
    let entry = maps::parent(&ParentKey::macvlan(record.host_ifindex, source));
    // SAFETY: a field of a map's value, which stays readable until the program ends.
    let sender = entry.map_or(0, |entry| unsafe { (*entry).attachment });
    match Scope::of(sender, Side::FromPod) {
        Some(mut scope) => match judge::judge(ctx, &mut scope) {
            Ok(_) => TC_ACT_UNSPEC,
            Err(_) => TC_ACT_SHOT as i32,
        },
        // From outside, or of a macvlan without an attachment.
        None => TC_ACT_UNSPEC,
    }
}

/// Cookie of the namespace of the socket that sent the frame; 0 where that is not known.
#[inline(always)]
fn sender(ctx: &TcContext) -> u64 {
    // SAFETY: read as the agent wrote it; a constant to the verifier.
    if unsafe { core::ptr::read_volatile(&raw const NA_COOKIES) } == 0 {
        return 0;
    }
    // SAFETY: the context pointer is valid while the program runs; without one the helper returns the initial
    // namespace's cookie, which is also its answer for frames that no socket sent.
    let (cookie, initial) =
        unsafe { (bpf_get_netns_cookie(ctx.skb.skb.cast()), bpf_get_netns_cookie(null_mut())) };
    if cookie == initial { 0 } else { cookie }
}

/// Whether a cookie is that of the node's own namespace, or the parent has one of these flags.
#[inline(always)]
fn is_nodes(parent: u32, cookie: u64, or: u32) -> bool {
    match maps::parent(&ParentKey::itself(parent)) {
        // SAFETY: as in `na_par_to`.
        Some(entry) => unsafe { (*entry).netns_cookie == cookie || (*entry).flags & or != 0 },
        None => true,
    }
}

/// Whether a cookie is that of a pod with a macvlan.
#[inline(always)]
fn is_pods(cookie: u64) -> bool {
    maps::parent(&ParentKey::namespace(cookie)).is_some()
}

/// Whether a frame comes down from a VLAN of the parent on which the cookie's namespace has attachments. A VLAN
/// device stores the tag beside the bytes; a tag within the bytes may have been written by the pod.
#[inline(always)]
fn is_judged_above(ctx: &TcContext, parent: u32, cookie: u64) -> bool {
    let (tagged, control) = Skb::of(ctx).tag_beside();
    let entry = maps::parent(&ParentKey::above(parent, cookie, vlan_id(control)));
    // SAFETY: as in `na_par_to`.
    tagged && entry.is_some_and(|entry| unsafe { (*entry).netns_cookie } == cookie)
}

#[inline(always)]
fn decide(ctx: &TcContext, attachment: u32, side: Side) -> i32 {
    let scope = Scope::of(attachment, side).map(Scope::on_parent);
    match judge::verdict(ctx, attachment, side, scope) {
        Ok(_) => TC_ACT_UNSPEC,
        Err(()) => TC_ACT_SHOT as i32,
    }
}

/// Drops a frame whose sender is not the pod of an attachment.
#[inline(always)]
fn drop_unattributed(ctx: &TcContext, reason: DropReason) -> i32 {
    count::packet(0, Side::FromPod, ctx.len(), Err(reason.into()));
    record::dropped_unread(ctx, 0, Side::FromPod, reason.into());
    TC_ACT_SHOT as i32
}

/// Whether a frame goes to more than one receiver.
#[inline(always)]
fn is_group(mac: &Mac) -> bool {
    mac.octets[0] & 1 != 0
}
