//! The entry points of the two hooks and the order in which a packet is judged.

use core::mem::MaybeUninit;

use aya_ebpf::{
    bindings::{TC_ACT_SHOT, TC_ACT_UNSPEC},
    macros::classifier,
    programs::TcContext,
};
use netattach_common::{AttachmentRecord, DropReason, Hook, Ip4, Ip6, PolicyIds, attachment::flag};

use crate::{
    antispoof, conntrack, count, fast, fragment,
    frame::{self, Frame, ethertype},
    limit,
    maps::{self, Family},
    packet::{self, Kind, Packet},
    record,
};

/// Why a packet must not go on.
#[derive(Clone, Copy)]
pub(crate) struct Denied {
    reason: DropReason,
    /// Whether the agent has been told, by someone who knew more about the packet.
    told: bool,
}

impl From<DropReason> for Denied {
    #[inline(always)]
    fn from(reason: DropReason) -> Self {
        Self { reason, told: false }
    }
}

#[classifier]
pub(crate) fn na_from_pod(ctx: TcContext) -> i32 {
    let id = maps::attachment_of(frame::ifindex(&ctx)).unwrap_or(0);
    fast::note(&ctx, Sort::Control);
    match verdict(&ctx, id, Hook::FromPod) {
        Ok(()) => {
            fast::hand_over(&ctx, id);
            TC_ACT_UNSPEC
        }
        Err(()) => TC_ACT_SHOT as i32,
    }
}

#[classifier]
pub(crate) fn na_to_pod(ctx: TcContext) -> i32 {
    let id = maps::attachment_of(frame::ifindex(&ctx)).unwrap_or(0);
    match verdict(&ctx, id, Hook::ToPod) {
        Ok(()) => TC_ACT_UNSPEC,
        Err(()) => TC_ACT_SHOT as i32,
    }
}

/// What a packet is to whoever carries it on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sort {
    /// IP traffic without VLAN tags.
    Data,
    /// What keeps a link going: ARP, neighbour discovery, other ethertypes than IP, tagged frames.
    Control,
}

/// Judges a packet, counts it and tells of it when it is dropped. `Err`: it must not go on.
#[inline(always)]
pub(crate) fn verdict(ctx: &TcContext, id: u32, hook: Hook) -> Result<(), ()> {
    let verdict = match Scope::of(id, hook) {
        Some(scope) => judge(ctx, &scope).and_then(|()| Ok(limit::bytes(ctx, &scope)?)),
        None => Err(DropReason::Unbound.into()),
    };
    count::packet(id, hook, ctx.len(), verdict.map_err(|denied| denied.reason));
    verdict.map_err(|Denied { reason, told }| {
        if !told {
            record::dropped_unread(ctx, id, hook, reason);
        }
    })
}

/// One attachment's view of one packet.
pub(crate) struct Scope<'a> {
    /// Attachment id.
    pub(crate) id: u32,
    /// Its record.
    pub(crate) record: &'a AttachmentRecord,
    /// Its policies.
    pub(crate) policies: PolicyIds,
    /// Where the packet is seen.
    pub(crate) hook: Hook,
}

impl Scope<'_> {
    #[inline(always)]
    pub(crate) fn of(id: u32, hook: Hook) -> Option<Self> {
        let record = maps::record(id).filter(|record| record.has(flag::PRESENT))?;
        Some(Self { id, record, policies: maps::policies(id), hook })
    }
}

#[inline(always)]
pub(crate) fn judge(ctx: &TcContext, scope: &Scope<'_>) -> Result<(), Denied> {
    let record = scope.record;
    let unguarded = scope.policies.none() && !record.has(flag::PENDING);
    if scope.hook == Hook::ToPod && unguarded {
        return Ok(());
    }
    if frame::says_ipv6(ctx) {
        frame::pull(ctx, packet::HEADERS_V6);
    } else {
        frame::pull(ctx, packet::HEADERS_V4);
    }
    let mut room = MaybeUninit::<Frame>::uninit();
    frame::read(ctx, scope, &mut room)?;
    // SAFETY: `read` has written it unless it failed.
    let frame = unsafe { room.assume_init_ref() };
    let from_pod = scope.hook == Hook::FromPod;
    if from_pod && record.has(flag::CHECK_MAC) && !frame.source.same(&record.mac) {
        return Err(DropReason::SourceMac.into());
    }
    match frame.ethertype {
        ethertype::ARP if from_pod => Ok(antispoof::arp(ctx, scope, frame)?),
        ethertype::ARP => Ok(()),
        ethertype::IPV4 => ip::<Ip4>(ctx, scope, frame),
        ethertype::IPV6 => ip::<Ip6>(ctx, scope, frame),
        _ if record.has(flag::PENDING) => Err(DropReason::Pending.into()),
        _ => Ok(()),
    }
}

/// Judges an IP packet. Out of line: one of the two versions is on the stack at a time.
#[inline(never)]
fn ip<A: Family>(ctx: &TcContext, scope: &Scope<'_>, frame: &Frame) -> Result<(), Denied> {
    let mut room = MaybeUninit::<Packet<A>>::uninit();
    A::read(ctx, frame, &mut room)?;
    // SAFETY: `read` has written it unless it failed.
    let packet = unsafe { room.assume_init_mut() };
    let verdict = match scope.hook {
        Hook::FromPod => A::check_sender(ctx, scope, frame, packet),
        Hook::ToPod => Ok(()),
    };
    if scope.hook == Hook::FromPod && !frame.tagged && packet.kind != Kind::LinkControl {
        fast::note(ctx, Sort::Data);
    }
    match verdict.and_then(|()| judge_ip(ctx, scope, packet)) {
        Ok(()) => Ok(()),
        Err(reason) => {
            record::dropped(ctx, scope, packet, reason);
            Err(Denied { reason, told: true })
        }
    }
}

#[inline(always)]
fn judge_ip<A: Family>(ctx: &TcContext, scope: &Scope<'_>, packet: &mut Packet<A>) -> Result<(), DropReason> {
    if packet.kind == Kind::LinkControl {
        return Ok(());
    }
    if scope.record.has(flag::PENDING) {
        return Err(DropReason::Pending);
    }
    if scope.policies.none() {
        return Ok(());
    }
    match packet.kind {
        Kind::FirstFragment => fragment::remember(scope, packet),
        Kind::LaterFragment => fragment::recall(scope, packet),
        _ => {}
    }
    if packet.tuple.protocol == A::ICMP && scope.record.has(A::ACCEPT_ICMP) {
        return Ok(());
    }
    match packet.kind {
        Kind::LaterFragment => conntrack::fragment(scope, packet),
        Kind::IcmpError => conntrack::icmp_error(ctx, scope, packet),
        _ if conntrack::known(ctx, scope, packet)? => Ok(()),
        _ => conntrack::open(ctx, scope, packet),
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
