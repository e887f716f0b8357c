//! The order in which a packet is judged.

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use netattach_common::{
    AttachmentRecord, DropReason, Ip4, Ip6, Side,
    attachment::flag,
    parse::{Kind, Packet, Room, ethertype},
};

use crate::path::{
    antispoof::{self, Sender},
    count, enforce,
    frame::{self, Skb},
    limit,
    log::{self, Stage},
    plain, record,
    scope::Scope,
    subprograms::{NULL_ARGUMENT, Subprograms, exclusive},
    unfinished,
    verdict::{Denied, Encode, PacketClass},
};

/// Judges a packet, counts it and, if it is dropped, writes a record of it. `None`: the device is bound to no
/// attachment. `Err`: the packet must be dropped.
#[inline(always)]
pub(crate) fn verdict(ctx: &TcContext, id: u32, side: Side, scope: Option<Scope>) -> Result<PacketClass, ()> {
    let Some(mut scope) = scope else {
        log::denial(id, Stage::Verdict, DropReason::Unbound.into());
        unbound(ctx, side);
        return Err(());
    };
    log::arrival(ctx, id, side);
    let verdict = judge(ctx, &mut scope).and_then(|class| {
        limit::bytes(ctx, &scope)?;
        Ok(class)
    });
    log::outcome(id, Stage::Verdict, &verdict);
    count::packet(id, side, ctx.len(), verdict.map(drop));
    verdict.map_err(|denied| {
        if !denied.is_recorded() {
            record::dropped_unread(ctx, id, side, denied);
        }
    })
}

/// Counts a packet of no attachment. It is counted under id 0, even if a filter or a map still gives another id: the
/// attachment of that id is gone, and the next one with it starts with counters of zero.
#[inline(never)]
fn unbound(ctx: &TcContext, side: Side) {
    count::packet(0, side, ctx.len(), Err(DropReason::Unbound.into()));
    record::dropped_unread(ctx, 0, side, DropReason::Unbound.into());
}

/// Judges a packet.
#[inline(always)]
pub(crate) fn judge(ctx: &TcContext, scope: &mut Scope) -> Result<PacketClass, Denied> {
    let unguarded = scope.policies.none() && !scope.has(flag::PENDING);
    if scope.side == Side::ToPod && unguarded {
        return Ok(PacketClass::Control);
    }
    match plain::verdict(ctx, scope) {
        Some(verdict) => verdict.map(|()| PacketClass::Data),
        None => Encode::decode(na_judge(ctx.skb.skb, scope)),
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
fn na_judge(skb: *mut __sk_buff, scope: *mut Scope) -> u32 {
    let ctx = TcContext::new(skb);
    let answer = match exclusive(scope) {
        Some(scope) => judge_frame(&ctx, scope),
        None => Err(NULL_ARGUMENT),
    };
    answer.unwrap_or_else(|denied| Err::<PacketClass, Denied>(denied).encode())
}

/// A class, as [`na_judge`] returns it. Passed on as a number: in a result with a class the compiler leaves the
/// fields of a denial undefined; they may then hold any register, and if that is a pointer, the verifier allows no
/// arithmetic on it.
#[inline(always)]
fn class(class: PacketClass) -> u32 {
    Ok::<PacketClass, Denied>(class).encode()
}

/// The body of [`judge`] within a subprogram: reads a frame and judges it.
#[inline(always)]
fn judge_frame(ctx: &TcContext, scope: &mut Scope) -> Result<u32, Denied> {
    frame::pull_headers(ctx)?;
    let record = scope.record()?;
    let frame = frame::read(ctx, scope, record)?;
    let mut room = Room::default();
    let from_pod = scope.side == Side::FromPod;
    if from_pod && scope.has(flag::CHECK_MAC) && !frame.is_own {
        return Err(DropReason::SourceMac.into());
    }
    match frame.payload.ethertype {
        ethertype::ARP => antispoof::arp(ctx, scope, record, &frame)?,
        ethertype::IPV4 => {
            return ip::<Ip4>(ctx, scope, record, room.begin(&frame.payload, frame.tagged));
        }
        ethertype::IPV6 => {
            return ip::<Ip6>(ctx, scope, record, room.begin(&frame.payload, frame.tagged));
        }
        _ => antispoof::check_other(ctx, scope, &frame.payload)?,
    }
    Ok(class(PacketClass::Control))
}

#[inline(always)]
fn ip<A: Subprograms + Sender + log::Addresses>(
    ctx: &TcContext,
    scope: &mut Scope,
    record: &AttachmentRecord,
    packet: &mut Packet<A>,
) -> Result<u32, Denied> {
    A::read(ctx, packet)?;
    let tuple = &packet.tuple;
    log::headers(scope, tuple);
    let checked = match scope.side {
        Side::FromPod => {
            let finished = unfinished::check(ctx, packet).map_err(Denied::from);
            finished.and_then(|()| A::check_sender(&Skb::of(ctx), scope, record, packet))
        }
        Side::ToPod => Ok(()),
    };
    let verdict = match checked {
        Ok(()) if scope.leaves_to_the_node() && A::is_judged_as_routed(ctx, scope, packet) => {
            log::answer(scope.id, Stage::Sender, true);
            // Such packets do not take the fast path either.
            return Ok(class(PacketClass::Control));
        }
        Ok(()) => {
            log::answer(scope.id, Stage::Sender, false);
            frame::note_node(ctx, scope);
            enforce::policies(ctx, scope, packet)
        }
        Err(denied) => {
            log::denial(scope.id, Stage::Sender, denied);
            Err(denied)
        }
    };
    let control = packet.tagged || packet.kind == Kind::LinkControl;
    match verdict {
        Ok(()) if control => Ok(class(PacketClass::Control)),
        Ok(()) => Ok(class(PacketClass::Data)),
        Err(denied) => {
            record::dropped(ctx, scope, packet, denied);
            Err(denied.recorded())
        }
    }
}
