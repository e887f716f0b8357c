//! Decides which policies must be compiled again because a pod, or the labels of a namespace, have changed.
//!
//! No table of this node depends on a policy of a namespace without attachments here. All different
//! selectors of the other policies are compared with the change: that costs less than compiling, unless
//! very much has changed.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use super::entry::PolicyEntry;
use super::index::Endpoints;
use super::peers::{Claimant, Known, Peers};
use crate::objects::labels::Labels;
use crate::objects::policy::{Peer, PolicyKind, PolicyName};
use crate::objects::{ObjectName, Place};

/// Comparisons for one policy in one update, by the weight of its selectors. A policy that would take more is
/// compiled again, which has a bound of its own.
const COMPARED: usize = 1_000_000;

/// The same for all policies of one namespace together.
const COMPARED_OF_NAMESPACE: usize = 10 * COMPARED;

/// The policies that may have to be compiled again, not decided yet.
pub(super) struct Open<'a>(Vec<Asked<'a>>);

struct Asked<'a> {
    entry: &'a PolicyEntry,
    /// Remaining comparisons.
    left: usize,
    /// Those of all policies of its namespace.
    left_of_namespace: Rc<Cell<usize>>,
}

/// A pod with the networks on which it has addresses.
struct At<'c> {
    pod: &'c Claimant,
    places: BTreeSet<&'c Place>,
}

impl<'c> At<'c> {
    fn of(pod: &'c Claimant) -> Self {
        Self { pod, places: pod.addresses().map(|(place, _)| place).collect() }
    }
}

impl<'a> Open<'a> {
    /// Those of namespaces with attachments, except those that are touched already.
    pub(super) fn new(
        policies: &'a BTreeMap<PolicyName, PolicyEntry>,
        endpoints: &Endpoints,
        touched: &BTreeSet<PolicyName>,
    ) -> Self {
        let namespaces: BTreeSet<&str> = endpoints.values().map(|it| it.pod.namespace.as_str()).collect();
        let mut open = Vec::new();
        for namespace in &namespaces {
            let left_of_namespace = Rc::new(Cell::new(COMPARED_OF_NAMESPACE));
            for kind in [PolicyKind::Multi, PolicyKind::Network] {
                let first = PolicyName { kind, object: ObjectName::new(*namespace, "") };
                let from_first = policies.range(first..);
                let all = from_first
                    .take_while(|(name, _)| name.kind == kind && name.object.namespace == *namespace);
                let others = all.filter(|(name, _)| !touched.contains(*name));
                open.extend(others.map(|(_, entry)| Asked {
                    entry,
                    left: COMPARED,
                    left_of_namespace: Rc::clone(&left_of_namespace),
                }));
            }
        }
        Self(open)
    }

    /// Adds to `touched` the policies that select the pod, or another pod with one of its addresses.
    pub(super) fn pod_changes(&mut self, peers: &Peers, pod: &Known, touched: &mut BTreeSet<PolicyName>) {
        if !self.0.is_empty() {
            let (own, concerned) = (pod.claimants().collect::<Vec<_>>(), peers.concerned(pod));
            let [own, concerned] = [&own, &concerned].map(|pods| pods.iter().map(At::of).collect::<Vec<_>>());
            self.ask(touched, |policy| {
                concerned.iter().any(|it| policy.means(peers, it))
                    || own.iter().any(|it| policy.means_elsewhere(peers, it))
            });
        }
    }

    /// Adds to `touched` the policies whose namespace selectors match the old and the new labels
    /// differently.
    pub(super) fn namespace_changes(
        &mut self,
        before: &Labels,
        now: &Labels,
        touched: &mut BTreeSet<PolicyName>,
    ) {
        let tells = |peer: &Peer| {
            matches!(peer, Peer::Pods { namespaces: Some(selector), .. }
                if selector.matches(before) != selector.matches(now))
        };
        self.ask(touched, |policy| policy.has(tells));
    }

    fn ask(
        &mut self,
        touched: &mut BTreeSet<PolicyName>,
        mut is_concerned: impl FnMut(&mut Asked<'_>) -> bool,
    ) {
        self.0.retain_mut(|policy| {
            let is_concerned = is_concerned(policy);
            if is_concerned {
                touched.insert(policy.entry.policy.name.clone());
            }
            !is_concerned
        });
    }
}

impl Asked<'_> {
    /// Whether the policy's tables depend on this pod.
    fn means(&mut self, peers: &Peers, pod: &At<'_>) -> bool {
        let entry = self.entry;
        if !self.spend_of_namespace(pod.places.len()) {
            return true;
        }
        pod.places.iter().any(|place| entry.is_for(place))
            && (entry.names_ports_of_peers || self.selects(peers, pod.pod))
    }

    /// Whether it selects a pod that has an address of this pod on another of the policy's networks. An
    /// address counts from another network only if no pod has it on an attachment's own network.
    fn means_elsewhere(&mut self, peers: &Peers, pod: &At<'_>) -> bool {
        let entry = self.entry;
        entry.policy.networks.len() > 1
            && pod.places.iter().any(|place| entry.is_for(place))
            && pod.pod.addresses().filter(|(place, _)| entry.is_for(place)).any(|(place, address)| {
                let others = entry.places.iter().filter(|other| *other != place);
                let mut holders = others.filter_map(|other| peers.claims().at(other)?.holders_of(address));
                !self.spend(entry.places.len())
                    || holders.any(|of_one| of_one.as_slice().iter().any(|it| self.selects(peers, it)))
            })
    }

    fn selects(&mut self, peers: &Peers, pod: &Claimant) -> bool {
        let entry = self.entry;
        self.has(|peer| peers.selects(&entry.policy, peer, pod))
    }

    /// Whether it has such a selector, or the check would take too many comparisons.
    fn has(&mut self, is_one: impl Fn(&Peer) -> bool) -> bool {
        let entry = self.entry;
        !self.spend(entry.weight) || entry.selectors().any(|peer| peer.is_some_and(&is_one))
    }

    /// Subtracts comparisons from the remaining ones. Returns whether there were enough.
    fn spend(&mut self, comparisons: usize) -> bool {
        let left = self.left.checked_sub(comparisons);
        self.left = left.unwrap_or_default();
        left.is_some() && self.spend_of_namespace(comparisons)
    }

    /// The same, from those of the namespace alone.
    fn spend_of_namespace(&self, comparisons: usize) -> bool {
        let left = self.left_of_namespace.get().checked_sub(comparisons);
        if let Some(left) = left {
            self.left_of_namespace.set(left);
        }
        left.is_some()
    }
}

#[cfg(test)]
#[path = "touch_tests.rs"]
mod tests;
