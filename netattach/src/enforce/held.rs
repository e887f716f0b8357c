//! Decides which adopted attachments keep the policies of an earlier agent while the source does not know everything
//! that policies depend on.
//!
//! An agent that has just started may know only a part of the peers: the policies that it compiles then would cut
//! connections that the tables of its predecessor allow. So an attachment that these policies isolate keeps the
//! earlier ones until all peers have been read once, or until one of its policies changes: an author who makes a
//! policy stricter must not wait for a list that may never come. An attachment that the earlier policies leave open
//! in a direction in which a policy isolates it now is decided at once, because closing too much is safer than
//! leaving it open.

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
    /// The adopted attachments that wait for peers, each with the policies that isolated it when it began to wait.
    waiting: BTreeMap<u32, Vec<Arc<Policy>>>,
    /// Whether policies of a kind that the server does not serve may exist. This lasts until it is certain, even if
    /// the attachments that revealed it end: attachments of the pods that replace them may be selected too.
    doubts: bool,
    /// Whether any attachment waits because the source does not know enough.
    awaits: bool,
}

impl Held {
    /// Adds these attachments, whose policies in the maps are an earlier agent's.
    pub(super) fn adopt(&mut self, attachments: impl IntoIterator<Item = u32>) {
        self.adopted.extend(attachments);
    }

    /// Removes an attachment: it has ended, or its number belongs to another one.
    pub(super) fn forget(&mut self, id: u32) {
        self.adopted.remove(&id);
        self.waiting.remove(&id);
    }

    /// Whether any attachment keeps its policies because the source does not know enough.
    pub(super) fn awaits(&self) -> bool {
        self.awaits
    }

    /// Leaves the attachments undecided that have to wait for the source.
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

    /// Returns the attachments that wait for peers.
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

/// The numbers of an attachment's ingress and egress policies in the maps. An attachment without any yet is isolated.
#[derive(Debug, Clone, Copy)]
struct Words([PolicyId; 2]);

impl Words {
    fn of(id: u32, maps: &PolicyMaps) -> Self {
        let isolated = PolicyIds { ingress: DENY_ALL, egress: DENY_ALL };
        let PolicyIds { ingress, egress } = maps.assigned(id).unwrap_or(isolated);
        Self([ingress, egress])
    }

    /// Returns, for each direction, the number in the maps, and whether the attachment is to be isolated.
    fn beside(self, policy: &EndpointPolicy) -> impl Iterator<Item = (PolicyId, bool)> {
        self.0.into_iter().zip([policy.ingress.is_some(), policy.egress.is_some()])
    }

    /// Whether the attachment is isolated now in a direction in which `policy` would open it.
    fn opens(self, policy: &EndpointPolicy) -> bool {
        self.beside(policy).any(|(word, is_isolated)| word != 0 && !is_isolated)
    }

    /// Whether the attachment is open now in a direction in which `policy` isolates it.
    fn closes(self, policy: &EndpointPolicy) -> bool {
        self.beside(policy).any(|(word, is_isolated)| word == 0 && is_isolated)
    }

    /// Whether the numbers may belong to unknown policies: `policy` would open the attachment, or lack what they
    /// allow.
    fn may_lose_policies(self, policy: &EndpointPolicy) -> bool {
        self.opens(policy) || (!self.closes(policy) && self.0.into_iter().any(allows))
    }

    /// Whether `policy` would lack what the present policies allow to unknown pods; not if the attachment is open now
    /// in a direction in which `policy` isolates it.
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
