//! The packet path of devices in pods that have no end on the node.
//!
//! Device indices start again in each pod, so a packet's attachment cannot be derived from its device's index. It is
//! in `tc_classid`: a filter sets it itself. A tcx link cannot, so each link runs a small program of its own, made by
//! the agent, which sets the attachment and continues here, by the map `na_pod`.

use aya_ebpf::{
    bindings::{TC_ACT_SHOT, TC_ACT_UNSPEC},
    macros::classifier,
    programs::TcContext,
};
use netattach_common::Side;

use crate::path::{judge, scope::Scope};

#[classifier]
pub(crate) fn na_pod_from(ctx: TcContext) -> i32 {
    verdict(&ctx, Side::FromPod)
}

#[classifier]
pub(crate) fn na_pod_to(ctx: TcContext) -> i32 {
    verdict(&ctx, Side::ToPod)
}

#[inline(always)]
fn verdict(ctx: &TcContext, side: Side) -> i32 {
    // SAFETY: the context pointer is valid while the program runs.
    let attachment = unsafe { (*ctx.skb.skb).tc_classid };
    // Later classifiers must not take it for a class.
    // SAFETY: as above; programs may write this field.
    unsafe { (*ctx.skb.skb).tc_classid = 0 };
    let scope = Scope::of(attachment, side).map(Scope::in_pod);
    match judge::verdict(ctx, attachment, side, scope) {
        Ok(_) => TC_ACT_UNSPEC,
        Err(()) => TC_ACT_SHOT as i32,
    }
}
