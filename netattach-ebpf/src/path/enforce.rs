//! Applies the policies to a packet whose headers are read: by its flow, or as the first of one.

use aya_ebpf::programs::TcContext;
use netattach_common::{
    DropReason,
    attachment::flag,
    parse::{Kind, Packet},
};

use crate::path::{
    antispoof, conntrack,
    log::{self, Stage},
    scope::Scope,
    subprograms::Subprograms,
    verdict::{Denied, Known},
};

/// Whether an attachment's policies let a packet pass. The ports of a first fragment are remembered only after it has
/// passed: the table is shared by all pods, and later fragments of a refused packet do not need an entry.
#[inline(always)]
pub(crate) fn policies<A: Subprograms>(
    ctx: &TcContext,
    scope: &Scope,
    packet: &mut Packet<A>,
) -> Result<(), Denied> {
    verdict(ctx, scope, packet)?;
    // Where no pod is isolated, nothing reads the ports.
    if packet.kind == Kind::FirstFragment && !scope.policies.none() {
        A::complete_fragment(scope, packet);
    }
    Ok(())
}

/// [`policies`] of a packet that is no first fragment.
#[inline(always)]
pub(crate) fn verdict<A: Subprograms>(
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
    if packet.kind == Kind::LaterFragment {
        A::complete_fragment(scope, packet);
    }
    let accepted = packet.tuple.lane.protocol() == A::ICMP && scope.has(A::ACCEPT_ICMP);
    let of_flow = !matches!(packet.kind, Kind::IcmpError | Kind::LaterFragment) && !accepted;
    let known = if of_flow {
        let known = A::look_up(ctx, scope, packet);
        log::outcome(scope.id, Stage::Flow, &known);
        known?
    } else {
        Known::ABSENT
    };
    if known == Known::PASSES {
        return Ok(());
    }
    antispoof::from_others(scope, packet)?;
    match packet.kind {
        _ if accepted => Ok(()),
        Kind::IcmpError if A::is_answer(ctx, scope, packet) => Ok(()),
        Kind::IcmpError => conntrack::without_ports(scope, packet, DropReason::IcmpUnrelated),
        Kind::LaterFragment => conntrack::without_ports(scope, packet, DropReason::FragmentMiss),
        _ => {
            let opening = A::open(scope, packet, known);
            log::policy(scope.id, &opening);
            let opening = opening?;
            if !opening.is_any() {
                return Ok(());
            }
            let renewed = known.leaves_entry() && A::renew(ctx, scope, packet, opening);
            let entered = if renewed { Ok(()) } else { A::enter(ctx, scope, packet, opening) };
            log::outcome(scope.id, Stage::Place, &entered);
            entered?;
            conntrack::credit(scope, opening);
            Ok(())
        }
    }
}
