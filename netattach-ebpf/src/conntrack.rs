//! The flow table: replies of allowed flows pass, and one lookup decides for an established flow.

use aya_ebpf::{helpers::generated::bpf_ktime_get_coarse_ns, programs::TcContext};
use netattach_common::{
    DropReason, Flow, FlowKey, Hook,
    decide::Query,
    flow::{Leg, Tuple, state},
};

use crate::{classifier::Scope, count, maps::Family, packet::Packet, policy};

/// Judges a packet of a flow, and enters the flow when it is new and allowed.
#[inline(never)]
pub(crate) fn flow<A: Family>(scope: &Scope<'_>, packet: &Packet<A>) -> Result<(), DropReason> {
    let tuple = &packet.tuple;
    let key = FlowKey::new(scope.record.zone, tuple);
    let from_low = tuple.source_is_low();
    let now = seconds();
    if let Some(entry) = A::flow(&key) {
        // SAFETY: values of an LRU map stay mapped while the program runs. Other CPUs may change the entry
        // meanwhile, or the kernel reuse it for another flow: then this packet is judged by that flow's
        // approval once, as with every LRU flow table; no memory is at risk.
        let entry = unsafe { &mut *entry };
        let forward = entry.is_forward(from_low);
        if !entry.is_expired(tuple.protocol, now) && entry.admits(packet.signal, forward) {
            return known(scope, packet, entry, forward, now);
        }
    }
    let leg = Leg::of(scope.hook, true);
    let (leg, opened_by_low) = match judge(scope, packet, leg) {
        Ok(()) => (leg, from_low),
        Err(denied) if packet.signal.is_midstream(tuple.protocol) => {
            let leg = Leg::of(scope.hook, false);
            judge(scope, packet, leg).map_err(|_| denied)?;
            (leg, !from_low)
        }
        Err(denied) => return Err(denied),
    };
    // A connection picked up midstream has answered before.
    let before = if packet.signal.is_midstream(tuple.protocol) { state::REPLIED } else { 0 };
    let state = Flow::state_after(before, packet.signal, true);
    let entry = Flow::opened(now, opened_by_low, leg, scope.policies.of(leg), state);
    count::new_flow(scope.id, A::remember(&key, &entry));
    Ok(())
}

/// Judges a fragment that has no ports: only rules without ports can allow it.
#[inline(always)]
pub(crate) fn fragment<A: Family>(scope: &Scope<'_>, packet: &Packet<A>) -> Result<(), DropReason> {
    without_ports(scope, packet).map_err(|_| DropReason::FragmentPort)
}

/// Judges an ICMP error by the flow it is about. It never opens a flow.
#[inline(never)]
pub(crate) fn icmp_error<A: Family>(
    ctx: &TcContext,
    scope: &Scope<'_>,
    packet: &Packet<A>,
) -> Result<(), DropReason> {
    if let Some(about) = A::embedded(ctx, packet.transport + 8)
        // An error goes back to the sender of the packet it is about.
        && about.source.same(&packet.tuple.destination)
        && let Some(entry) = A::flow(&FlowKey::new(scope.record.zone, &about))
        // SAFETY: as in `flow`; only read.
        && !unsafe { &*entry }.is_expired(about.protocol, seconds())
    {
        return Ok(());
    }
    without_ports(scope, packet).map_err(|_| DropReason::IcmpUnrelated)
}

#[inline(always)]
fn known<A: Family>(
    scope: &Scope<'_>,
    packet: &Packet<A>,
    entry: &mut Flow,
    forward: bool,
    now: u32,
) -> Result<(), DropReason> {
    let leg = Leg::of(scope.hook, forward);
    let policy = scope.policies.of(leg);
    if policy != 0 && entry.approved_by(leg) != policy {
        judge(scope, packet, leg)?;
        match leg {
            Leg::Opener => entry.opener_approved_by = policy,
            Leg::Responder => entry.responder_approved_by = policy,
        }
    }
    // Only changes are written: the entry's cache line is shared between CPUs.
    if entry.last_seen != now {
        entry.last_seen = now;
    }
    let state = Flow::state_after(entry.state, packet.signal, forward);
    if entry.state != state {
        entry.state = state;
    }
    Ok(())
}

/// Asks the pod's policy for a leg, on the opener's tuple: the peer is the other end, the port is the
/// responder's. A function of its own in BPF as well: it is called from several places, and has large keys.
#[inline(never)]
fn judge<A: Family>(scope: &Scope<'_>, packet: &Packet<A>, leg: Leg) -> Result<(), DropReason> {
    let Tuple { source, destination, source_port, destination_port, protocol } = packet.tuple;
    let (peer, peer_port, own_port) = match scope.hook {
        Hook::FromPod => (destination, destination_port, source_port),
        Hook::ToPod => (source, source_port, destination_port),
    };
    let responder_port = match leg {
        Leg::Opener => peer_port,
        Leg::Responder => own_port,
    };
    let port = packet.has_ports.then_some(responder_port);
    policy::allows(scope.policies.of(leg), leg, &Query { peer, protocol, port })
}

#[inline(always)]
fn without_ports<A: Family>(scope: &Scope<'_>, packet: &Packet<A>) -> Result<(), DropReason> {
    let peer = match scope.hook {
        Hook::FromPod => packet.tuple.destination,
        Hook::ToPod => packet.tuple.source,
    };
    let leg = Leg::of(scope.hook, true);
    let query = Query { peer, protocol: packet.tuple.protocol, port: None };
    policy::allows(scope.policies.of(leg), leg, &query)
}

/// Seconds of the monotonic clock, as of the last timer tick: no clock device is read.
#[inline(always)]
fn seconds() -> u32 {
    // SAFETY: the helper takes nothing and exists since Linux 5.11.
    (unsafe { bpf_ktime_get_coarse_ns() } / 1_000_000_000) as u32
}
