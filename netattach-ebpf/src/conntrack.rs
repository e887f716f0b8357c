//! The flow table: replies of allowed flows pass, and one lookup decides for an established flow.

use aya_ebpf::programs::TcContext;
use netattach_common::{
    DropReason, Flow, FlowKey, Hook, Traffic,
    attachment::flag,
    decide::Query,
    flow::{Leg, Tuple, state},
};

use crate::{
    classifier::Scope,
    count, limit,
    maps::Family,
    packet::{Packet, has_ports},
    policy, record,
};

/// Judges a packet of a flow that the table has. `false`: it has none.
#[inline(never)]
pub(crate) fn known<A: Family>(
    ctx: &TcContext,
    scope: &Scope<'_>,
    packet: &Packet<A>,
) -> Result<bool, DropReason> {
    let tuple = &packet.tuple;
    let entry = find(scope, packet.tags, tuple);
    if entry.is_null() {
        return Ok(false);
    }
    // SAFETY: values of an LRU map stay mapped while the program runs. Other CPUs may change the entry
    // meanwhile, or the kernel reuse it for another flow: then this packet is judged by that flow's
    // approval once, as with every LRU flow table; no memory is at risk.
    let entry = unsafe { &mut *entry };
    let forward = entry.is_forward(tuple.source_is_low());
    let now = seconds();
    if entry.is_expired(tuple.protocol, now) || !entry.admits(packet.signal, forward) {
        return Ok(false);
    }
    approve(scope, tuple, entry, forward)?;
    note(scope, packet, entry, forward, now, ctx.len());
    Ok(true)
}

/// Judges a packet of no known flow, and enters the flow when it is allowed.
#[inline(always)]
pub(crate) fn open<A: Family>(
    ctx: &TcContext,
    scope: &Scope<'_>,
    packet: &Packet<A>,
) -> Result<(), DropReason> {
    let opening = admit(scope, packet)?;
    if !limit::flow(scope.id) {
        return Err(DropReason::FlowRate);
    }
    enter(ctx, scope, packet, opening);
    let leg = Leg::of(scope.hook, opening.is_forward());
    record::opened(ctx, scope, packet, leg, opening.rule());
    Ok(())
}

/// The entry of a flow in place, null when there is none. Out of line, so that the key's room on the stack is free again
/// for what the policy needs.
#[inline(never)]
fn find<A: Family>(scope: &Scope<'_>, tags: [u8; 3], tuple: &Tuple<A>) -> *mut Flow {
    A::flow(&FlowKey::new(scope.record.zone, tags, tuple)).unwrap_or(core::ptr::null_mut())
}

/// How a flow begins: by which rule (0: nobody had to allow it), and whether its first packet comes from its opener.
/// One word, since that is what a function can return in BPF.
#[derive(Clone, Copy)]
struct Opening(u32);

impl Opening {
    const BACKWARD: u32 = 1 << 31;

    #[inline(always)]
    fn is_forward(self) -> bool {
        self.0 & Self::BACKWARD == 0
    }

    #[inline(always)]
    fn rule(self) -> u32 {
        self.0 & !Self::BACKWARD
    }
}

/// Asks the policy about a new flow. A connection that is older than the table may have been opened by either end.
#[inline(never)]
fn admit<A: Family>(scope: &Scope<'_>, packet: &Packet<A>) -> Result<Opening, DropReason> {
    let midstream = packet.signal.is_midstream(packet.tuple.protocol);
    if midstream && scope.record.has(flag::NO_MIDSTREAM) {
        return Err(DropReason::Midstream);
    }
    match judge(scope, &packet.tuple, Leg::of(scope.hook, true)) {
        Ok(rule) => Ok(Opening(rule)),
        Err(denied) if midstream => judge(scope, &packet.tuple, Leg::of(scope.hook, false))
            .map(|rule| Opening(rule | Opening::BACKWARD))
            .map_err(|_| denied),
        Err(denied) => Err(denied),
    }
}

#[inline(never)]
fn enter<A: Family>(ctx: &TcContext, scope: &Scope<'_>, packet: &Packet<A>, opening: Opening) {
    let forward = opening.is_forward();
    // A connection picked up midstream has been established before.
    let midstream = packet.signal.is_midstream(packet.tuple.protocol);
    let before = if midstream { state::REPLIED | state::ESTABLISHED } else { 0 };
    let state = Flow::state_after(before, packet.signal, forward);
    let opened_by_low = forward == packet.tuple.source_is_low();
    let leg = Leg::of(scope.hook, forward);
    let mut entry = Flow::entered(seconds(), opened_by_low, leg, scope.policies.of(leg), state);
    entry.attachment = scope.id;
    let traffic = if forward { &mut entry.forward } else { &mut entry.backward };
    *traffic = Traffic { packets: 1, bytes: ctx.len().into() };
    let stored = A::remember(&FlowKey::new(scope.record.zone, packet.tags, &packet.tuple), &entry);
    count::new_flow(scope.id, stored);
}

/// Judges a fragment whose first one was not seen: only rules without ports can allow it.
#[inline(always)]
pub(crate) fn fragment<A: Family>(scope: &Scope<'_>, packet: &Packet<A>) -> Result<(), DropReason> {
    without_ports(scope, packet).map_err(|_| DropReason::FragmentMiss)
}

/// Judges an ICMP error by the flow it is about. It never opens a flow.
#[inline(never)]
pub(crate) fn icmp_error<A: Family>(
    ctx: &TcContext,
    scope: &Scope<'_>,
    packet: &Packet<A>,
) -> Result<(), DropReason> {
    // The error counts as an answer to the packet it is about, and goes back to that one's sender.
    let mut answer = packet.tuple;
    if A::answer_to_quoted(ctx, packet.transport() + 8, &mut answer)
        && answer.destination.same(&packet.tuple.destination)
    {
        let entry = find(scope, packet.tags, &answer);
        if entry.is_null() {
            return without_ports(scope, packet).map_err(|_| DropReason::IcmpUnrelated);
        }
        // SAFETY: as in `known`.
        let entry = unsafe { &mut *entry };
        let forward = entry.is_forward(answer.source_is_low());
        if !entry.is_expired(answer.protocol, seconds()) && approve(scope, &answer, entry, forward).is_ok() {
            return Ok(());
        }
    }
    without_ports(scope, packet).map_err(|_| DropReason::IcmpUnrelated)
}

/// Whether the policies in force let a flow go on: what was approved by another policy is judged again.
#[inline(always)]
fn approve<A: Family>(
    scope: &Scope<'_>,
    tuple: &Tuple<A>,
    entry: &mut Flow,
    forward: bool,
) -> Result<(), DropReason> {
    let leg = Leg::of(scope.hook, forward);
    let policy = scope.policies.of(leg);
    let approved = entry.approved_by(leg);
    if policy == 0 || approved == policy {
        return Ok(());
    }
    if approved == 0 || !scope.record.has(flag::KEEP_ESTABLISHED) {
        judge(scope, tuple, leg)?;
    }
    match leg {
        Leg::Opener => entry.opener_approved_by = policy,
        Leg::Responder => entry.responder_approved_by = policy,
    }
    Ok(())
}

/// Writes down a packet that may pass.
#[inline(always)]
fn note<A: Family>(
    scope: &Scope<'_>,
    packet: &Packet<A>,
    entry: &mut Flow,
    forward: bool,
    now: u32,
    bytes: u32,
) {
    if entry.attachment == scope.id {
        let traffic = if forward { &mut entry.forward } else { &mut entry.backward };
        traffic.packets += 1;
        traffic.bytes += u64::from(bytes);
    }
    // Only changes are written elsewhere: the entry's cache line is shared between CPUs.
    if entry.last_seen != now {
        entry.last_seen = now;
    }
    let state = Flow::state_after(entry.state, packet.signal, forward);
    if entry.state != state {
        entry.state = state;
    }
}

/// Asks the pod's policy for a leg, on the opener's tuple: the peer is the other end, the port is the
/// responder's. A function of its own in BPF as well: it is called from several places, and has large keys.
#[inline(never)]
fn judge<A: Family>(scope: &Scope<'_>, tuple: &Tuple<A>, leg: Leg) -> Result<u32, DropReason> {
    let Tuple { source, destination, source_port, destination_port, protocol } = *tuple;
    let (peer, peer_port, own_port) = match scope.hook {
        Hook::FromPod => (destination, destination_port, source_port),
        Hook::ToPod => (source, source_port, destination_port),
    };
    let responder_port = match leg {
        Leg::Opener => peer_port,
        Leg::Responder => own_port,
    };
    let port = has_ports(protocol).then_some(responder_port);
    policy::allows(scope.policies.of(leg), leg, &Query::new(peer, protocol, port))
}

#[inline(always)]
fn without_ports<A: Family>(scope: &Scope<'_>, packet: &Packet<A>) -> Result<(), DropReason> {
    let peer = match scope.hook {
        Hook::FromPod => packet.tuple.destination,
        Hook::ToPod => packet.tuple.source,
    };
    let leg = Leg::of(scope.hook, true);
    let query = Query::new(peer, packet.tuple.protocol, None);
    policy::allows(scope.policies.of(leg), leg, &query).map(drop)
}

/// Seconds of the monotonic clock, as of the last timer tick: no clock device is read.
#[inline(always)]
pub(crate) fn seconds() -> u32 {
    (limit::coarse_now() / 1_000_000_000) as u32
}
