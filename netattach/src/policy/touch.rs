//! Decides which policies must be compiled again because a pod, or the labels of a namespace, have changed.
//!
//! No table of this node depends on a policy of a namespace without attachments here. All different
//! selectors of the other policies are compared with the change: that costs less than compiling, unless
//! very much has changed.

use std::collections::{BTreeMap, BTreeSet};

use super::entry::PolicyEntry;
use super::index::Endpoints;
use super::peers::{Claimant, Known, Peers};
use crate::objects::ObjectName;
use crate::objects::labels::Labels;
use crate::objects::policy::{Peer, PolicyKind, PolicyName};

/// Comparisons for one policy in one update. A policy that would take more is compiled again, which has a
/// bound of its own.
const COMPARED: usize = 1_000_000;

/// The policies that may have to be compiled again, not decided yet.
pub(super) struct Open<'a>(Vec<Asked<'a>>);

struct Asked<'a> {
    entry: &'a PolicyEntry,
    /// Remaining comparisons.
    left: usize,
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
        for kind in [PolicyKind::Multi, PolicyKind::Network] {
            for namespace in &namespaces {
                let first = PolicyName { kind, object: ObjectName::new(*namespace, "") };
                let from_first = policies.range(first..);
                let all = from_first
                    .take_while(|(name, _)| name.kind == kind && name.object.namespace == *namespace);
                let others = all.filter(|(name, _)| !touched.contains(*name));
                open.extend(others.map(|(_, entry)| Asked { entry, left: COMPARED }));
            }
        }
        Self(open)
    }

    /// Adds to `touched` the policies that select the pod, or another pod with one of its addresses.
    pub(super) fn pod_changes(&mut self, peers: &Peers, pod: &Known, touched: &mut BTreeSet<PolicyName>) {
        if !self.0.is_empty() {
            let (own, concerned) = (pod.claimants().collect::<Vec<_>>(), peers.concerned(pod));
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
    fn means(&mut self, peers: &Peers, pod: &Claimant) -> bool {
        let entry = self.entry;
        pod.addresses().any(|(place, _)| entry.is_for(place))
            && (entry.names_ports_of_peers || self.selects(peers, pod))
    }

    /// Whether it selects a pod that has an address of this pod on another of the policy's networks. An
    /// address counts from another network only if no pod has it on an attachment's own network.
    fn means_elsewhere(&mut self, peers: &Peers, pod: &Claimant) -> bool {
        let entry = self.entry;
        entry.policy.networks.len() > 1
            && pod.addresses().filter(|(place, _)| entry.is_for(place)).any(|(place, address)| {
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
        let mut selectors = entry.selectors();
        !self.spend(selectors.len()) || selectors.any(|peer| peer.is_some_and(&is_one))
    }

    /// Subtracts comparisons from the remaining ones. Returns whether there were enough.
    fn spend(&mut self, comparisons: usize) -> bool {
        let left = self.left.checked_sub(comparisons);
        self.left = left.unwrap_or_default();
        left.is_some()
    }
}

#[cfg(test)]
#[path = "touch_tests.rs"]
mod tests;
