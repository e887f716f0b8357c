//! Decides which policies of an earlier agent attachments keep while the source does not know everything
//! that policies depend on.
//!
//! An agent that has just started may have to do with half of the peers: what it compiles then would cut connections that its
//! predecessor's tables allow. So an attachment that these isolate keeps them until the peers have all been read once, or one of
//! its policies is changed meanwhile: who makes a policy stricter is not to wait for a list that may never come. One that they
//! leave open in a direction in which a policy isolates it now is decided at once: it is closed rather too much than not.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::policy_maps::PolicyMaps;
use crate::bpf::PolicyIds;
use crate::objects::policy::{Direction, Peer, Peers, Policy, PolicyKind, PolicyName};
use crate::objects::{Objects, Unknown};
use crate::policy::desired::{Desired, EndpointPolicy};
use crate::policy::diff::{DENY_ALL, PolicyId};

/// Adopted attachments that have not been decided yet.
#[derive(Debug, Default)]
pub(super) struct Held {
    adopted: BTreeSet<u32>,
    /// Those of them that wait for peers, each with the policies that isolated it when it began to.
    waiting: BTreeMap<u32, Vec<Arc<Policy>>>,
    /// There were policies of a kind that the server does not know. That stays so until it is known for sure, though the
    /// attachments that have shown it go: those of the pods in their place may be selected as well.
    doubts: bool,
    /// Some are held back by what the source does not know.
    awaits: bool,
}

impl Held {
    /// Adds these attachments, whose policies are an earlier agent's.
    pub(super) fn adopt(&mut self, attachments: impl IntoIterator<Item = u32>) {
        self.adopted.extend(attachments);
    }

    /// Removes an attachment: it has ended, or its number belongs to another one.
    pub(super) fn forget(&mut self, id: u32) {
        self.adopted.remove(&id);
        self.waiting.remove(&id);
    }

    /// Whether some keep their policies because the source does not know enough.
    pub(super) fn awaits(&self) -> bool {
        self.awaits
    }

    /// Leaves attachments undecided that have to wait for the source.
    pub(super) fn hold(&mut self, desired: &mut Desired, maps: &PolicyMaps, objects: &Objects) {
        let Unknown { remote_pods, kinds } = objects.unknown;
        let would_open =
            |id: &u32| desired.endpoints.get(id).is_some_and(|it| Words::of(*id, maps).opens(it));
        self.doubts = kinds && (self.doubts || self.adopted.iter().any(would_open));
        if self.doubts {
            let is_held = |id: u32, policy: &EndpointPolicy| Words::of(id, maps).may_lose_policies(policy);
            let all = desired.endpoints.iter();
            let held = all.filter(|(id, policy)| is_held(**id, policy)).map(|(id, _)| *id).collect();
            leave_undecided(desired, held);
        }
        let waiting = if remote_pods { self.waiting_for_peers(desired, maps, objects) } else { Vec::new() };
        self.awaits = self.doubts || !waiting.is_empty();
        leave_undecided(desired, waiting);
    }

    /// The attachments that wait for peers.
    fn waiting_for_peers(&mut self, desired: &Desired, maps: &PolicyMaps, objects: &Objects) -> Vec<u32> {
        let mut held = Vec::new();
        for id in &self.adopted {
            let Some(policy) = desired.endpoints.get(id) else { continue };
            if !Words::of(*id, maps).may_lose_peers(policy, objects) {
                continue;
            }
            let now = isolating(policy, objects);
            let first = self.waiting.entry(*id).or_insert_with(|| now.clone());
            if *first == now {
                held.push(*id);
            }
        }
        held
    }

    /// Returns the policies of adopted attachments that are decided for the first time.
    pub(super) fn decided(&self, desired: &Desired) -> Desired {
        let decided = self.adopted.iter().filter_map(|id| Some((*id, desired.endpoints.get(id)?.clone())));
        Desired { endpoints: decided.collect(), ..Desired::default() }
    }

    /// Removes the decided attachments, whose policies are this agent's.
    pub(super) fn release(&mut self, desired: &Desired) {
        let Self { adopted, waiting, .. } = self;
        adopted.retain(|id| !desired.endpoints.contains_key(id));
        waiting.retain(|id, _| adopted.contains(id));
    }
}

fn leave_undecided(desired: &mut Desired, attachments: Vec<u32>) {
    for id in attachments {
        desired.endpoints.remove(&id);
        desired.undecided.insert(id);
    }
}

/// What an attachment has in the maps: the numbers of its policies, ingress and egress. One that has nothing yet is isolated.
#[derive(Debug, Clone, Copy)]
struct Words([PolicyId; 2]);

impl Words {
    fn of(id: u32, maps: &PolicyMaps) -> Self {
        let isolated = PolicyIds { ingress: DENY_ALL, egress: DENY_ALL };
        let PolicyIds { ingress, egress } = maps.assigned(id).unwrap_or(isolated);
        Self([ingress, egress])
    }

    /// Of each direction what it has, and whether it is to be isolated.
    fn beside(self, policy: &EndpointPolicy) -> impl Iterator<Item = (PolicyId, bool)> {
        self.0.into_iter().zip([policy.ingress.is_some(), policy.egress.is_some()])
    }

    /// Whether it is isolated in a direction in which it would be open.
    fn opens(self, policy: &EndpointPolicy) -> bool {
        self.beside(policy).any(|(word, is_isolated)| word != 0 && !is_isolated)
    }

    /// Whether it is open in a direction in which it is to be isolated.
    fn closes(self, policy: &EndpointPolicy) -> bool {
        self.beside(policy).any(|(word, is_isolated)| word == 0 && is_isolated)
    }

    /// Whether what it has may be of policies that are not known: it would be open without them, or lack what they allow.
    fn may_lose_policies(self, policy: &EndpointPolicy) -> bool {
        self.opens(policy) || (!self.closes(policy) && self.0.into_iter().any(allows))
    }

    /// Whether it would lack what it allows to pods that are not known, and is isolated wherever it is to be.
    fn may_lose_peers(self, policy: &EndpointPolicy, objects: &Objects) -> bool {
        let by = [(Direction::Ingress, &policy.ingress_by), (Direction::Egress, &policy.egress_by)];
        let mut each = self.0.into_iter().zip(by);
        !self.closes(policy)
            && each.any(|(word, (direction, by))| {
                allows(word) && by.iter().any(|name| has_pods(name, direction, objects))
            })
    }
}

/// Whether a policy of that number isolates and may allow something.
fn allows(word: PolicyId) -> bool {
    word != 0 && word != DENY_ALL
}

/// The policies that isolate an attachment.
fn isolating(policy: &EndpointPolicy, objects: &Objects) -> Vec<Arc<Policy>> {
    let names = policy.ingress_by.iter().chain(&policy.egress_by);
    names.filter_map(|name| named(name, objects)).cloned().collect()
}

fn named<'o>(name: &PolicyName, objects: &'o Objects) -> Option<&'o Arc<Policy>> {
    let all = match name.kind {
        PolicyKind::Multi => &objects.policies,
        PolicyKind::Network => &objects.network_policies,
    };
    all.get(&name.object)
}

/// Whether rules of a policy in that direction have pods as peers.
fn has_pods(name: &PolicyName, direction: Direction, objects: &Objects) -> bool {
    let is_pods = |peer: &Peer| matches!(peer, Peer::Pods { .. });
    named(name, objects).is_some_and(|policy| {
        let mut rules = policy.rules(direction).iter();
        rules.any(|rule| matches!(&rule.peers, Peers::Of(peers) if peers.iter().any(is_pods)))
    })
}

#[cfg(test)]
#[path = "held_tests.rs"]
mod tests;
