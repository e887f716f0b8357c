//! Reports single packets to the agent: those that open a flow, and those that are dropped.
//!
//! The agent is not woken: it polls several times a second. Records that do not fit, or exceed the attachment's share,
//! are counted instead.

use aya_ebpf::{bindings::BPF_RB_NO_WAKEUP, programs::TcContext};
use netattach_common::{Address, Ip6, Port, Record, Side, flow::Leg, parse::Packet};

use crate::path::{clock, count, family::Family, frame, limit, maps, scope::Scope, verdict::Denied};

/// Records that a packet opened a flow, allowed by a rule of the policy of `leg`; rule 0: no policy applies. The caller
/// has checked [`limit::flow_record`].
#[inline(always)]
pub(crate) fn opened<A: Family>(ctx: &TcContext, scope: &Scope, packet: &Packet<A>, leg: Leg, rule: u32) {
    write(ctx, scope, packet, u32::from(leg == Leg::Responder) << 8, rule);
}

/// Records a dropped packet.
#[inline(always)]
pub(crate) fn dropped<A: Family>(ctx: &TcContext, scope: &Scope, packet: &Packet<A>, denied: Denied) {
    if limit::drop_record(scope.id) {
        write(ctx, scope, packet, denied.number().into(), 0);
    } else {
        count::record_withheld(scope.id);
    }
}

/// Records a packet dropped before its addresses are known.
#[inline(always)]
pub(crate) fn dropped_unread(ctx: &TcContext, attachment: u32, side: Side, denied: Denied) {
    if limit::drop_record(attachment) {
        write_unread(ctx, attachment, side, denied.number().into());
    } else {
        count::record_withheld(attachment);
    }
}

/// `outcome`: the reason's number in the lower byte, and above it whether the pod is the responder.
#[inline(never)]
fn write<A: Family>(ctx: &TcContext, scope: &Scope, packet: &Packet<A>, outcome: u32, rule: u32) {
    let tuple = &packet.tuple;
    submit(ctx, scope.id, |record| {
        record.ingress = scope.policies.ingress;
        record.egress = scope.policies.egress;
        record.rule = rule;
        record.source = tuple.source.widen();
        record.destination = tuple.destination.widen();
        record.source_port = tuple.ports.source();
        record.destination_port = tuple.ports.destination();
        record.ethertype = A::ETHERTYPE;
        record.vlan = u16::from(tuple.lane.tags()[0]) << 4 | u16::from(tuple.lane.tags()[1]) >> 4;
        record.reason = outcome as u8;
        record.responder = (outcome >> 8) as u8;
        record.to_pod = u8::from(scope.side == Side::ToPod);
        record.protocol = tuple.lane.protocol();
        record.flags = packet.signal.flags;
        record.parsed = 1;
    });
}

#[inline(never)]
fn write_unread(ctx: &TcContext, attachment: u32, side: Side, reason: u32) {
    submit(ctx, attachment, |record| {
        record.ingress = 0;
        record.egress = 0;
        record.rule = 0;
        record.source = Ip6::UNSPECIFIED;
        record.destination = Ip6::UNSPECIFIED;
        record.source_port = Port::NONE;
        record.destination_port = Port::NONE;
        record.ethertype = 0;
        record.vlan = 0;
        record.reason = reason as u8;
        record.to_pod = u8::from(side == Side::ToPod);
        record.protocol = 0;
        record.flags = 0;
        record.parsed = 0;
        record.responder = 0;
    });
}

/// Fills a record in place. `fill` writes every field that this function does not.
#[inline(always)]
fn submit(ctx: &TcContext, attachment: u32, fill: impl FnOnce(&mut Record)) {
    let Some(mut entry) = maps::new_record() else {
        count::record_lost(attachment);
        return;
    };
    // SAFETY: the memory is the record's size and 8-aligned; integers and byte arrays have no invalid values, and
    // every byte is written before the record is submitted.
    let record = unsafe { &mut *entry.as_mut_ptr() };
    record.time = clock::read();
    record.attachment = attachment;
    record.ifindex = frame::ifindex(ctx);
    record.length = ctx.len();
    record.pad = [0; 2];
    fill(record);
    entry.submit(u64::from(BPF_RB_NO_WAKEUP));
}
