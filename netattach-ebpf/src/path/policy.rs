//! Policy look-ups.

use core::marker::PhantomData;

use netattach_common::{
    DropReason, PortKey, PortRule, Side,
    decide::{Query, Tables, Verdict, decide},
    flow::{Leg, Tuple},
    parse::walk::has_ports,
};

use crate::path::{family::Family, maps, scope::Scope, subprograms::Subprograms, verdict::Denied};

struct Maps<A>(PhantomData<A>);

impl<A: Family> Tables<A> for Maps<A> {
    #[inline(always)]
    fn exact_class(&self, policy: u32, peer: &A) -> Option<u32> {
        A::exact_class(policy, peer)
    }

    #[inline(always)]
    fn prefix_class(&self, policy: u32, peer: &A) -> Option<u32> {
        A::prefix_class(policy, peer)
    }

    #[inline(always)]
    fn rule(&self, key: &PortKey, bits: u32) -> Option<u32> {
        maps::port_rule(key, bits)
    }
}

/// Judges a packet by a pod's policy: returns the rule that allows it, 0 if the pod is not isolated.
#[inline(always)]
pub(crate) fn allows<A: Subprograms>(scope: &Scope, tuple: &Tuple<A>, leg: Leg) -> Result<u32, Denied> {
    if scope.policies.of(leg) == 0 {
        Ok(0)
    } else {
        A::ask_policy(scope, tuple, leg, has_ports(tuple.lane.protocol()))
    }
}

/// [`allows`] for a packet whose ports are not known: only rules without ports can allow it.
#[inline(always)]
pub(crate) fn allows_without_ports<A: Subprograms>(
    scope: &Scope,
    tuple: &Tuple<A>,
    leg: Leg,
) -> Result<u32, Denied> {
    if scope.policies.of(leg) == 0 { Ok(0) } else { A::ask_policy(scope, tuple, leg, false) }
}

/// Why a policy does not allow a flow towards its pod, `None` when it does.
#[inline(always)]
pub(crate) fn refusal<A: Family>(policy: u32, query: &Query<A>) -> Option<DropReason> {
    match decide(&Maps(PhantomData), policy, query) {
        Verdict::Allow { .. } => None,
        Verdict::UnknownPeer => Some(DropReason::IngressPeer),
        Verdict::UnknownPort => Some(DropReason::IngressPort),
    }
}

/// Asks the policy for a leg, on the opener's tuple: the peer is the other end, the port is the responder's. Returns
/// the allowing rule, which is credited once the flow is entered.
#[inline(always)]
pub(crate) fn ask<A: Family>(
    scope: &Scope,
    tuple: &Tuple<A>,
    leg: Leg,
    with_ports: bool,
) -> Result<u32, DropReason> {
    let (peer, peer_port, own_port) = match scope.side {
        Side::FromPod => (tuple.destination, tuple.ports.destination(), tuple.ports.source()),
        Side::ToPod => (tuple.source, tuple.ports.source(), tuple.ports.destination()),
    };
    let responder_port = match leg {
        Leg::Opener => peer_port,
        Leg::Responder => own_port,
    };
    let port = with_ports.then_some(responder_port);
    let policy = scope.policies.of(leg);
    match (decide(&Maps(PhantomData), policy, &Query::new(peer, tuple.lane.protocol(), port)), leg) {
        (Verdict::Allow { rule }, _) => {
            if rule & PortRule::AS_ROUTED != 0 && !leads_here(scope, tuple) {
                return Err(DropReason::EgressPeer);
            }
            Ok(rule & !PortRule::AS_ROUTED)
        }
        (Verdict::UnknownPeer, Leg::Opener) => Err(DropReason::EgressPeer),
        (Verdict::UnknownPort, Leg::Opener) => Err(DropReason::EgressPort),
        (Verdict::UnknownPeer, Leg::Responder) => Err(DropReason::IngressPeer),
        (Verdict::UnknownPort, Leg::Responder) => Err(DropReason::IngressPort),
    }
}

/// Whether the node's packet filter judges a packet by the attachment's policies, behind the node's translation: by the address
/// on the pod's side.
#[inline(always)]
fn leads_here<A: Family>(scope: &Scope, tuple: &Tuple<A>) -> bool {
    Some(scope.id)
        == match scope.side {
            Side::FromPod => maps::guarded(&tuple.source.widen()),
            Side::ToPod => maps::guarded(&tuple.destination.widen()),
        }
}
