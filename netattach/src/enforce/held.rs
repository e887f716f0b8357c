//! Decides which adopted attachments keep the policies of an earlier agent while the source does not know everything
//! that policies depend on.
//!
//! An agent that has just started may know only a part of the peers: the policies that it compiles then would cut
//! connections that the tables of its predecessor allow. So an attachment that these policies isolate keeps the
//! earlier ones until all peers have been read once, or until one of its policies changes: an author who makes a
//! policy stricter must not wait for a list that may never come. An attachment that the earlier policies leave open
//! in a direction in which a policy isolates it now is decided at once, because closing too much is safer than
//! leaving it open.
//!
//! The earlier policies also allow what has been revoked since. So the wait for peers ends when a peer that this agent
//! knows loses what the attachment allowed to it (its pod is gone, or has other labels), as its address may be given
//! to another pod; and after [`LONGEST`] in any case. The peers that are still unknown are then refused.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::policy_maps::PolicyMaps;
use crate::bpf::PolicyIds;
use crate::objects::policy::{Direction, Peer, Peers, Policy, PolicyKind, PolicyName};
use crate::objects::{Objects, Unknown};
use crate::policy::desired::{Desired, EndpointPolicy};
use crate::policy::diff::{DENY_ALL, PolicyId};
use crate::policy::evaluate::peer_entry;
use crate::policy::lookup::{ClassId, CompiledPolicy, Origin, Traffic};

/// How long an attachment keeps the policies of an earlier agent because peers are unknown: longer than it takes to
/// read all pods of a large cluster. What was revoked while no agent ran holds for no longer than this.
const LONGEST: Duration = Duration::from_secs(600);

/// Adopted attachments that have not been decided yet.
#[derive(Debug, Default)]
pub(super) struct Held {
    adopted: BTreeSet<u32>,
    /// The adopted attachments that wait for peers.
    waiting: BTreeMap<u32, Waiting>,
    /// When the first of those that still wait has waited for [`LONGEST`].
    due: Option<Instant>,
    /// Whether policies of a kind that the server does not serve may exist. This lasts until it is certain, even if
    /// the attachments that revealed it end: attachments of the pods that replace them may be selected too.
    doubts: bool,
    /// Whether any attachment waits because the source does not know enough.
    awaits: bool,
}

/// The wait of one attachment for peers.
#[derive(Debug)]
struct Waiting {
    since: Instant,
    /// The policies that isolated the attachment when it began to wait.
    by: Vec<Arc<Policy>>,
    /// What was compiled last for the attachment, by the peers that were known.
    last: Arc<EndpointPolicy>,
}

/// Why an attachment waits no longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Over {
    /// One of its policies has changed.
    Changed,
    /// A known peer has lost what was allowed to it.
    Revoked,
    /// It has waited for [`LONGEST`].
    Late,
}

impl Waiting {
    /// Whether the wait is over; `None`: it goes on.
    fn is_over(&self, by: &[Arc<Policy>], policy: &Arc<EndpointPolicy>, now: Instant) -> Option<Over> {
        if self.by != by {
            Some(Over::Changed)
        } else if revokes(&self.last, policy) {
            Some(Over::Revoked)
        } else {
            (now >= self.due()).then_some(Over::Late)
        }
    }

    fn due(&self) -> Instant {
        self.since + LONGEST
    }
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

    /// Whether an attachment has waited for so long that it must be decided now.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.due.is_some_and(|due| now >= due)
    }

    /// Leaves the attachments undecided that have to wait for the source.
    pub(super) fn hold(&mut self, desired: &mut Desired, maps: &PolicyMaps, objects: &Objects, now: Instant) {
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
        let waiting =
            if remote_pods { self.waiting_for_peers(desired, maps, objects, now) } else { Vec::new() };
        self.due = waiting.iter().filter_map(|id| self.waiting.get(id)).map(Waiting::due).min();
        self.awaits = self.doubts || !waiting.is_empty();
        leave_undecided(desired, waiting);
    }

    /// Returns the attachments that wait for peers.
    fn waiting_for_peers(
        &mut self,
        desired: &Desired,
        maps: &PolicyMaps,
        objects: &Objects,
        now: Instant,
    ) -> Vec<u32> {
        let (mut held, mut revoked, mut late) = (Vec::new(), 0_usize, 0_usize);
        for id in &self.adopted {
            let Some(policy) = desired.endpoints.get(id) else { continue };
            if !Words::of(*id, maps).may_lose_peers(policy, objects) {
                continue;
            }
            let by = isolating(policy, objects);
            let begins = || Waiting { since: now, by: by.clone(), last: Arc::clone(policy) };
            let waiting = self.waiting.entry(*id).or_insert_with(begins);
            match waiting.is_over(&by, policy, now) {
                None => {
                    // Kept as it is once the wait is over, so that it stays over if the policies cannot be written.
                    waiting.last = Arc::clone(policy);
                    held.push(*id);
                }
                Some(Over::Changed) => {}
                Some(Over::Revoked) => revoked += 1,
                Some(Over::Late) => late += 1,
            }
        }
        if revoked > 0 {
            tracing::warn!(
                attachments = revoked,
                "pods of other nodes are not read yet, but a peer was revoked: the policies of the earlier agent end, and peers that are not known are refused"
            );
        }
        if late > 0 {
            tracing::warn!(
                attachments = late,
                seconds = LONGEST.as_secs(),
                "pods of other nodes could not be read in time: the policies of the earlier agent end, and peers that are not known are refused"
            );
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

/// Whether an attachment's new policies refuse to a peer what the earlier ones allowed to it.
fn revokes(before: &Arc<EndpointPolicy>, now: &Arc<EndpointPolicy>) -> bool {
    let differs = |one: &Option<Arc<CompiledPolicy>>, other: &Option<Arc<CompiledPolicy>>| match (one, other)
    {
        (Some(one), Some(other)) => !Arc::ptr_eq(one, other) && allows_less(one, other),
        // That the attachment is isolated in a direction, or no longer, is a change of its policies.
        _ => false,
    };
    !Arc::ptr_eq(before, now)
        && (differs(&before.ingress, &now.ingress) || differs(&before.egress, &now.egress))
}

/// Whether a peer of the first tables has a narrower class in the second, or none. Classes and rules are compared by
/// their traffic: their numbers are given anew with each compilation. Rules that no policy has written revoke nothing:
/// those for DHCP are about everyone until the server is known.
fn allows_less(before: &CompiledPolicy, now: &CompiledPolicy) -> bool {
    let (old, new) = (traffic(before, is_of_policy), traffic(now, |_| true));
    let none = BTreeSet::new();
    before.peers.iter().any(|(peer, class)| {
        let of_old = old.get(class).unwrap_or(&none);
        let class = peer_entry(now, peer.addr()).map(|(_, class)| class);
        let of_new = class.and_then(|class| new.get(&class)).unwrap_or(&none);
        !of_new.contains(&Traffic::Any) && !of_old.is_subset(of_new)
    })
}

/// The traffic of each class, by the rules whose origin counts.
fn traffic(
    tables: &CompiledPolicy,
    counts: impl Fn(Option<&Origin>) -> bool,
) -> BTreeMap<ClassId, BTreeSet<Traffic>> {
    let mut all: BTreeMap<ClassId, BTreeSet<Traffic>> = BTreeMap::new();
    for (prefix, rule) in &tables.ports {
        if counts(tables.rules.get(rule)) {
            all.entry(prefix.class).or_default().insert(prefix.traffic);
        }
    }
    all
}

/// Whether a rule is in a policy, as far as is known.
fn is_of_policy(origin: Option<&Origin>) -> bool {
    !matches!(origin, Some(Origin::Other(_) | Origin::OfNode(_)))
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
