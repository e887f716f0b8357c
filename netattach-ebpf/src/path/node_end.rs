//! The programs on the node's end of a veth pair.

use aya_ebpf::{
    bindings::{TC_ACT_SHOT, TC_ACT_UNSPEC},
    macros::classifier,
    programs::TcContext,
};
use netattach_common::Side;

use crate::path::{
    fast, frame, judge, maps,
    scope::Scope,
    shortcut::{self, Way},
};

#[classifier]
pub(crate) fn na_from_pod(ctx: TcContext) -> i32 {
    match shortcut::take(&ctx) {
        Way::Taken(verdict) => return verdict,
        Way::Sent(receiver) => return fast::deliver(&ctx, receiver),
        Way::NotTaken => {}
    }
    let (id, record) = maps::owner_of(frame::ifindex(&ctx));
    let scope =
        record.and_then(|record| Scope::within(id, record, Side::FromPod)).map(Scope::beside_the_stack);
    match judge::verdict(&ctx, id, Side::FromPod, scope) {
        Ok(class) => {
            fast::tail_call_from_pod(&ctx, id, class);
            TC_ACT_UNSPEC
        }
        Err(()) => TC_ACT_SHOT as i32,
    }
}

#[classifier]
pub(crate) fn na_to_pod(ctx: TcContext) -> i32 {
    let (id, record) = maps::owner_of(frame::ifindex(&ctx));
    let scope = record.and_then(|record| Scope::within(id, record, Side::ToPod)).map(Scope::beside_the_stack);
    match judge::verdict(&ctx, id, Side::ToPod, scope) {
        Ok(_) => TC_ACT_UNSPEC,
        Err(()) => TC_ACT_SHOT as i32,
    }
}
