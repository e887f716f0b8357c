//! Decides which policies of an earlier agent attachments keep while the source does not know everything
//! that policies depend on.
//!
//! An agent that has just started may know only some of the peers: its compiled policies would cut
//! connections that its predecessor's tables allow. So an attachment that these tables isolate keeps them
//! until all peers have been read once. An attachment that they leave open in a direction in which a policy
//! isolates it now is decided at once: isolating too much is preferred to too little.

use std::collections::BTreeSet;

use super::policy_maps::PolicyMaps;
use crate::bpf::PolicyIds;
use crate::objects::policy::{Direction, Peer, Peers, PolicyKind, PolicyName};
use crate::objects::{Objects, Unknown};
use crate::policy::desired::{Desired, EndpointPolicy};

/// Adopted attachments that have not been decided yet.
#[derive(Debug, Default)]
pub(super) struct Held {
    adopted: BTreeSet<u32>,
    /// Whether some are held because the source does not know enough.
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
    }

    /// Whether some keep their policies because the source does not know enough.
    pub(super) fn awaits(&self) -> bool {
        self.awaits
    }

    /// Leaves attachments undecided that have to wait for the source.
    pub(super) fn hold(&mut self, desired: &mut Desired, maps: &PolicyMaps, objects: &Objects) {
        self.awaits = false;
        let Unknown { remote_pods, kinds } = objects.unknown;
        if kinds && self.adopted.iter().any(|id| opens(*id, desired, maps)) {
            // There were policies of a kind that the server does not report now. An attachment without
            // policies may be selected by them.
            let undecided = std::mem::take(&mut desired.endpoints);
            desired.undecided.extend(undecided.into_keys());
            self.awaits = true;
        } else if remote_pods {
            let held = self.adopted.iter().copied().filter(|id| waits_for_peers(*id, desired, maps, objects));
            for id in held.collect::<Vec<_>>() {
                desired.endpoints.remove(&id);
                desired.undecided.insert(id);
                self.awaits = true;
            }
        }
    }

    /// Returns the policies of adopted attachments that are decided for the first time.
    pub(super) fn decided(&self, desired: &Desired) -> Desired {
        let decided = self.adopted.iter().filter_map(|id| Some((*id, desired.endpoints.get(id)?.clone())));
        Desired { endpoints: decided.collect(), ..Desired::default() }
    }

    /// Removes the decided attachments, whose policies are this agent's.
    pub(super) fn release(&mut self, desired: &Desired) {
        self.adopted.retain(|id| !desired.endpoints.contains_key(id));
    }
}

/// Whether an attachment that is isolated would be open in a direction.
fn opens(id: u32, desired: &Desired, maps: &PolicyMaps) -> bool {
    each_direction(id, desired, maps).is_some_and(|(_, each)| each.iter().any(|(was, is)| *was && !*is))
}

/// Whether policies that isolate an attachment have pods as peers, and it is isolated wherever it is to be.
fn waits_for_peers(id: u32, desired: &Desired, maps: &PolicyMaps, objects: &Objects) -> bool {
    each_direction(id, desired, maps).is_some_and(|(policy, each)| {
        let by = [(Direction::Ingress, &policy.ingress_by), (Direction::Egress, &policy.egress_by)];
        each.iter().all(|(was, is)| *was || !*is)
            && by.into_iter().any(|(direction, by)| by.iter().any(|it| has_pods(it, direction, objects)))
    })
}

/// The desired policy of an adopted attachment, and whether it was and is to be isolated in each direction.
fn each_direction<'d>(
    id: u32,
    desired: &'d Desired,
    maps: &PolicyMaps,
) -> Option<(&'d EndpointPolicy, [(bool, bool); 2])> {
    let policy: &EndpointPolicy = desired.endpoints.get(&id)?;
    let PolicyIds { ingress, egress } = maps.assigned(id)?;
    Some((policy, [(ingress != 0, policy.ingress.is_some()), (egress != 0, policy.egress.is_some())]))
}

/// Whether rules of a policy in that direction have pods as peers.
fn has_pods(name: &PolicyName, direction: Direction, objects: &Objects) -> bool {
    let all = match name.kind {
        PolicyKind::Multi => &objects.policies,
        PolicyKind::Network => &objects.network_policies,
    };
    let is_pods = |peer: &Peer| matches!(peer, Peer::Pods { .. });
    all.get(&name.object).is_some_and(|policy| {
        let mut rules = policy.rules(direction).iter();
        rules.any(|rule| matches!(&rule.peers, Peers::Of(peers) if peers.iter().any(is_pods)))
    })
}

#[cfg(test)]
#[path = "held_tests.rs"]
mod tests;
