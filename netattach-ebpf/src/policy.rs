//! Asks the maps of a policy.

use core::marker::PhantomData;

use netattach_common::{
    DropReason, PortKey,
    decide::{Query, Tables, Verdict, decide},
    flow::Leg,
};

use crate::{
    count,
    maps::{self, Family},
};

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

/// The rule by which `policy` allows the query, 0 without a policy: not isolated. `leg` says whose words a denial is
/// put in.
#[inline(always)]
pub(crate) fn allows<A: Family>(policy: u32, leg: Leg, query: &Query<A>) -> Result<u32, DropReason> {
    if policy == 0 {
        return Ok(0);
    }
    match (decide(&Maps(PhantomData), policy, query), leg) {
        (Verdict::Allow { rule }, _) => {
            count::rule(policy, rule);
            Ok(rule)
        }
        (Verdict::UnknownPeer, Leg::Opener) => Err(DropReason::EgressPeer),
        (Verdict::UnknownPort, Leg::Opener) => Err(DropReason::EgressPort),
        (Verdict::UnknownPeer, Leg::Responder) => Err(DropReason::IngressPeer),
        (Verdict::UnknownPort, Leg::Responder) => Err(DropReason::IngressPort),
    }
}
