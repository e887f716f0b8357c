//! The two entry points and the order in which a packet is judged.

use aya_ebpf::{
    bindings::{TC_ACT_SHOT, TC_ACT_UNSPEC},
    macros::classifier,
    programs::TcContext,
};
use netattach_common::{AttachmentRecord, DropReason, Hook, PolicyIds, attachment::flag};

use crate::{
    antispoof, conntrack, count,
    maps::{self, Family},
    packet::{self, Kind, Packet, ethertype},
};

/// Why a packet may go on, or not.
type Verdict = Result<(), DropReason>;

#[classifier]
pub(crate) fn na_from_pod(ctx: TcContext) -> i32 {
    run(&ctx, Hook::FromPod)
}

#[classifier]
pub(crate) fn na_to_pod(ctx: TcContext) -> i32 {
    run(&ctx, Hook::ToPod)
}

#[inline(always)]
fn run(ctx: &TcContext, hook: Hook) -> i32 {
    let id = maps::attachment_of(packet::ifindex(ctx)).unwrap_or(0);
    let verdict = judge(ctx, hook, id);
    count::packet(id, hook, ctx.len(), verdict);
    match verdict {
        Ok(()) => TC_ACT_UNSPEC,
        Err(_) => TC_ACT_SHOT as i32,
    }
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

#[inline(always)]
fn judge(ctx: &TcContext, hook: Hook, id: u32) -> Verdict {
    let record = maps::record(id).filter(|record| record.has(flag::PRESENT)).ok_or(DropReason::Unbound)?;
    let scope = Scope { id, record, policies: maps::policies(id), hook };
    let unguarded = scope.policies.none() && !record.has(flag::PENDING);
    if hook == Hook::ToPod && unguarded {
        return Ok(());
    }
    packet::pull(ctx);
    let ethernet = packet::ethernet(ctx)?;
    if ethernet.is_tagged(ctx) {
        return Err(DropReason::VlanTagged);
    }
    if hook == Hook::FromPod && record.has(flag::CHECK_MAC) && !ethernet.source.same(&record.mac) {
        return Err(DropReason::SourceMac);
    }
    match ethernet.ethertype() {
        ethertype::ARP if hook == Hook::FromPod => antispoof::arp(ctx, &scope),
        ethertype::ARP => Ok(()),
        ethertype::IPV4 => {
            let packet = packet::ipv4(ctx)?;
            if hook == Hook::FromPod {
                antispoof::ipv4(ctx, &scope, &packet)?;
            }
            judge_ip(ctx, &scope, &packet)
        }
        ethertype::IPV6 => {
            let packet = packet::ipv6(ctx)?;
            if hook == Hook::FromPod {
                antispoof::ipv6(ctx, &scope, &packet)?;
            }
            judge_ip(ctx, &scope, &packet)
        }
        _ if record.has(flag::PENDING) => Err(DropReason::Pending),
        _ => Ok(()),
    }
}

#[inline(always)]
fn judge_ip<A: Family>(ctx: &TcContext, scope: &Scope<'_>, packet: &Packet<A>) -> Verdict {
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
        Kind::LaterFragment => conntrack::fragment(scope, packet),
        Kind::IcmpError => conntrack::icmp_error(ctx, scope, packet),
        _ => conntrack::flow(scope, packet),
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
