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

/// Judges a packet by a pod's policy: returns the rule that allows it, with its flag ([`PortRule::AS_ROUTED`]), 0 if the
/// pod is not isolated.
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
/// the allowing rule as it is in the map, with its flag; it is credited once the flow is entered.
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
            let is_about_node = rule & PortRule::AS_ROUTED != 0;
            match leg {
                Leg::Opener if is_about_node && !leads_to_node(scope, tuple) => {
                    return Err(DropReason::EgressPeer);
                }
                Leg::Responder if is_about_node && !is_of_node(scope) => return Err(DropReason::IngressPeer),
                _ => {}
            }
            Ok(rule)
        }
        (Verdict::UnknownPeer, Leg::Opener) => Err(DropReason::EgressPeer),
        (Verdict::UnknownPort, Leg::Opener) => Err(DropReason::EgressPort),
        (Verdict::UnknownPeer, Leg::Responder) => Err(DropReason::IngressPeer),
        (Verdict::UnknownPort, Leg::Responder) => Err(DropReason::IngressPort),
    }
}

/// Whether the rule about the pod's own node holds for a flow that the pod opens.
///
/// The packet must go to the node's stack: by another link-layer address it reaches another host, or another node,
/// which may translate it. And it must be judged again behind the node's translation. An answer must come from the
/// stack; a program in the pod cannot tell, and believes the address.
#[inline(always)]
fn leads_to_node<A: Family>(scope: &Scope, tuple: &Tuple<A>) -> bool {
    let is_believed = scope.side == Side::ToPod && scope.is_in_pod();
    (scope.is_at_the_node() || is_believed) && leads_here(scope, tuple)
}

/// Whether the rule holds for a flow that is opened to the pod, by the same. An answer to the node passes where it is
/// not known at which address the node receives frames: the other direction has shown who opened the flow.
#[inline(always)]
fn is_of_node(scope: &Scope) -> bool {
    scope.is_at_the_node()
        || match scope.side {
            Side::FromPod => !maps::gate(scope.id).is_known(),
            Side::ToPod => scope.is_in_pod(),
        }
}

/// Whether the node's packet filter judges a packet by the attachment's policies, behind the node's translation: by the
/// address on the pod's side.
#[inline(always)]
fn leads_here<A: Family>(scope: &Scope, tuple: &Tuple<A>) -> bool {
    Some(scope.id)
        == match scope.side {
            Side::FromPod => maps::guarded(&tuple.source.widen()),
            Side::ToPod => maps::guarded(&tuple.destination.widen()),
        }
}
