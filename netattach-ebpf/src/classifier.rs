//! The entry points of the two hooks and the order in which a packet is judged.

use aya_ebpf::{
    bindings::{TC_ACT_SHOT, TC_ACT_UNSPEC},
    macros::classifier,
    programs::TcContext,
};
use netattach_common::{
    AttachmentRecord, DropReason, Hook, Ip4, Ip6, PolicyIds,
    attachment::flag,
    parse::{Kind, Packet, Room, ethertype, packet},
};

use crate::{
    antispoof, conntrack, count, fast,
    frame::{self, Skb},
    limit, maps, record,
    stages::{self, Stages},
    verdict::{Denied, Sort},
};

#[classifier]
pub(crate) fn na_from_pod(ctx: TcContext) -> i32 {
    let id = maps::owner_of(frame::ifindex(&ctx));
    match judged(&ctx, id, Hook::FromPod, Scope::of(id, Hook::FromPod).map(Scope::beside_the_stack)) {
        Ok(sort) => {
            fast::hand_over(&ctx, id, sort);
            TC_ACT_UNSPEC
        }
        Err(()) => TC_ACT_SHOT as i32,
    }
}

#[classifier]
pub(crate) fn na_to_pod(ctx: TcContext) -> i32 {
    let id = maps::owner_of(frame::ifindex(&ctx));
    match judged(&ctx, id, Hook::ToPod, Scope::of(id, Hook::ToPod).map(Scope::beside_the_stack)) {
        Ok(_) => TC_ACT_UNSPEC,
        Err(()) => TC_ACT_SHOT as i32,
    }
}

/// Judges a packet, counts it and tells of it when it is dropped. `Err`: it must not go on.
#[inline(always)]
pub(crate) fn verdict(ctx: &TcContext, id: u32, hook: Hook) -> Result<Sort, ()> {
    judged(ctx, id, hook, Scope::of(id, hook))
}

#[inline(always)]
fn judged(ctx: &TcContext, id: u32, hook: Hook, scope: Option<Scope>) -> Result<Sort, ()> {
    let verdict = match scope {
        Some(scope) => judge(ctx, &scope).and_then(|sort| {
            limit::bytes(ctx, &scope)?;
            Ok(sort)
        }),
        None => Err(DropReason::Unbound.into()),
    };
    count::packet(id, hook, ctx.len(), verdict.map(drop));
    verdict.map_err(|denied| {
        if !denied.is_told() {
            record::dropped_unread(ctx, id, hook, denied);
        }
    })
}

/// One attachment's view of one packet. Without padding, as stages want their arguments.
#[repr(C)]
pub(crate) struct Scope {
    /// Attachment id.
    pub(crate) id: u32,
    /// The bits of [`flag`].
    flags: u32,
    /// Network the attachment belongs to.
    pub(crate) zone: u32,
    /// Where the packet is seen.
    pub(crate) hook: Hook,
    /// Its policies, read once for each packet.
    pub(crate) policies: PolicyIds,
}

const _: () = assert!(size_of::<Scope>() == 24);

/// Beside the bits of [`flag`]: what passes here goes on to the node's stack or comes from it.
const BESIDE_THE_STACK: u32 = 1 << 31;

impl Scope {
    #[inline(always)]
    pub(crate) fn of(id: u32, hook: Hook) -> Option<Self> {
        let record = maps::record(id).filter(|record| record.has(flag::PRESENT))?;
        Some(Self { id, flags: record.flags, zone: record.zone, hook, policies: maps::policies(id) })
    }

    /// The same on the node's end of a link, with the node's stack behind or before it.
    #[inline(always)]
    fn beside_the_stack(self) -> Self {
        Self { flags: self.flags | BESIDE_THE_STACK, ..self }
    }

    /// Whether all bits of `flags` are set.
    #[inline(always)]
    pub(crate) fn has(&self, flags: u32) -> bool {
        self.flags & flags == flags
    }

    /// Whether what its pod exchanges with the node's routing may be judged there.
    #[inline(always)]
    pub(crate) fn leaves_to_the_node(&self) -> bool {
        self.has(BESIDE_THE_STACK) && !self.has(flag::PENDING) && !self.policies.none()
    }

    /// Whether its policy is still to come.
    #[inline(always)]
    pub(crate) fn is_pending(&self) -> bool {
        self.has(flag::PENDING)
    }

    /// What else is known of the attachment. Looked up where it is needed: a function that the verifier sees alone cannot
    /// be handed a map's value. It is there, as it was for [`Scope::of`].
    #[inline(always)]
    pub(crate) fn record(&self) -> Result<&'static AttachmentRecord, DropReason> {
        maps::record(self.id).ok_or(DropReason::Unbound)
    }
}

/// Judges a packet.
#[inline(always)]
pub(crate) fn judge(ctx: &TcContext, scope: &Scope) -> Result<Sort, Denied> {
    let unguarded = scope.policies.none() && !scope.has(flag::PENDING);
    if scope.hook == Hook::ToPod && unguarded {
        return Ok(Sort::Control);
    }
    stages::judge(ctx, scope)
}

/// Reads a frame and judges it. The body of a stage.
#[inline(always)]
pub(crate) fn judge_frame(ctx: &TcContext, scope: &Scope) -> Result<Sort, Denied> {
    if frame::says_ipv6(ctx) {
        frame::pull(ctx, packet::HEADERS_V6);
    } else {
        frame::pull(ctx, packet::HEADERS_V4);
    }
    let record = scope.record()?;
    let frame = frame::read(ctx, scope, record)?;
    let mut room = Room::default();
    let from_pod = scope.hook == Hook::FromPod;
    if from_pod && scope.has(flag::CHECK_MAC) && !frame.is_own {
        return Err(DropReason::SourceMac.into());
    }
    match frame.payload.ethertype {
        ethertype::ARP => antispoof::arp(ctx, scope, record, &frame)?,
        ethertype::IPV4 => {
            return ip::<Ip4>(
                ctx,
                scope,
                record,
                room.begin(&frame.payload, frame.tagged),
                frame.is_for_the_node,
            );
        }
        ethertype::IPV6 => {
            return ip::<Ip6>(
                ctx,
                scope,
                record,
                room.begin(&frame.payload, frame.tagged),
                frame.is_for_the_node,
            );
        }
        _ => stages::check_other(ctx, scope, &frame.payload)?,
    }
    Ok(Sort::Control)
}

#[inline(always)]
fn ip<A: Stages>(
    ctx: &TcContext,
    scope: &Scope,
    record: &AttachmentRecord,
    packet: &mut Packet<A>,
    passes_the_node: bool,
) -> Result<Sort, Denied> {
    A::read(ctx, packet)?;
    let verdict = match scope.hook {
        Hook::FromPod => A::check_sender(&Skb::of(ctx), scope, record, packet),
        Hook::ToPod => Ok(()),
    };
    if verdict.is_ok() && is_for_the_node(scope, record, packet, passes_the_node) {
        // Not for the fast path either.
        return Ok(Sort::Control);
    }
    let control = packet.tagged || packet.kind == Kind::LinkControl;
    match verdict.and_then(|()| judge_ip(ctx, scope, packet)) {
        Ok(()) if control => Ok(Sort::Control),
        Ok(()) => Ok(Sort::Data),
        Err(denied) => {
            record::dropped(ctx, scope, packet, denied);
            Err(denied.told())
        }
    }
}

/// Whether a packet's policy is asked where the node has translated its addresses (`routed`), and not here. `passes_there`:
/// the node's packet filter sees it, or has seen it. Only what has an address of the attachment is known there.
#[inline(always)]
fn is_for_the_node<A: Stages>(
    scope: &Scope,
    record: &AttachmentRecord,
    packet: &Packet<A>,
    passes_there: bool,
) -> bool {
    if !passes_there || packet.tagged || packet.kind == Kind::LinkControl {
        return false;
    }
    let own = match scope.hook {
        Hook::FromPod => &packet.tuple.source,
        Hook::ToPod => &packet.tuple.destination,
    };
    A::is_own_routable(scope, record, own)
}

/// Asks the policies about a packet.
#[inline(always)]
pub(crate) fn judge_ip<A: Stages>(
    ctx: &TcContext,
    scope: &Scope,
    packet: &mut Packet<A>,
) -> Result<(), Denied> {
    let pending = scope.has(flag::PENDING);
    if !pending && scope.policies.none() {
        return Ok(());
    }
    if packet.kind == Kind::LinkControl {
        if A::stays_on_link(ctx, scope, packet)? {
            return Ok(());
        }
        packet.kind = Kind::Flow;
    }
    if pending {
        return Err(DropReason::Pending.into());
    }
    if packet.kind.is_fragment() {
        A::complete_fragment(scope, packet);
    }
    let accepted = packet.tuple.lane.protocol() == A::ICMP && scope.has(A::ACCEPT_ICMP);
    let of_flow = !matches!(packet.kind, Kind::IcmpError | Kind::LaterFragment) && !accepted;
    if of_flow && A::is_known(ctx, scope, packet)? {
        return Ok(());
    }
    antispoof::from_others(scope, packet)?;
    match packet.kind {
        _ if accepted => Ok(()),
        Kind::IcmpError if A::is_answer(ctx, scope, packet) => Ok(()),
        Kind::IcmpError => conntrack::without_ports(scope, packet, DropReason::IcmpUnrelated),
        Kind::LaterFragment => conntrack::without_ports(scope, packet, DropReason::FragmentMiss),
        _ => {
            let opening = A::open(scope, packet)?;
            if opening.is_any() { A::enter(ctx, scope, packet, opening) } else { Ok(()) }
        }
    }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // The verifier refuses a program that could get here.
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
