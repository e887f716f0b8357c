//! A policy as the compiler keeps it, with what is computed from it once.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use super::desired::{Condition, conditions_of};
use super::index::usable_networks;
use super::options::Options;
use super::resolve::names_ports_of_peers;
use crate::objects::policy::{Peer, Peers, Policy, PolicyKind};
use crate::objects::{Objects, Place};

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct PolicyEntry {
    pub(super) policy: Arc<Policy>,
    /// The networks on which peers are looked up: those that its namespace may use.
    pub(super) places: BTreeSet<Place>,
    pub(super) conditions: Vec<Condition>,
    /// Whether its rules depend on the ports that peers declare.
    pub(super) names_ports_of_peers: bool,
    /// The positions of its peers that are selectors; equal selectors once.
    selectors: Box<[At]>,
    /// The cost of comparing all of them with a pod: the sum of [`Peer::weight`].
    pub(super) weight: usize,
}

/// The position of a peer in a policy: the rule (egress rules follow the ingress rules), and the peer in
/// it.
#[derive(Debug, Clone, Copy)]
struct At {
    rule: usize,
    peer: usize,
}

impl PolicyEntry {
    pub(super) fn new(policy: &Arc<Policy>, objects: &Objects, options: &Options) -> Self {
        let (places, conditions) = looked_up(policy, objects, options);
        let mut entry = Self {
            policy: Arc::clone(policy),
            places,
            conditions,
            names_ports_of_peers: names_ports_of_peers(policy),
            selectors: selectors(policy),
            weight: 0,
        };
        entry.weight = entry.selectors().flatten().map(Peer::weight).sum();
        entry
    }

    /// Looks up again which networks its namespace may use. Returns whether they have changed.
    pub(super) fn look_again(&mut self, objects: &Objects, options: &Options) -> bool {
        let (places, conditions) = looked_up(&self.policy, objects, options);
        self.conditions = conditions;
        let are_others = places != self.places;
        self.places = places;
        are_others
    }

    /// Whether the policy depends on which pods have which addresses on a network.
    pub(super) fn is_for(&self, place: &Place) -> bool {
        match place {
            Place::Network(network) => self.policy.networks.contains(network),
            Place::Default => self.policy.name.kind == PolicyKind::Network,
        }
    }

    /// The different selectors among its peers.
    pub(super) fn selectors(&self) -> impl Iterator<Item = Option<&Peer>> {
        self.selectors.iter().map(|at| {
            let Policy { ingress, egress, .. } = &*self.policy;
            let behind = at.rule.checked_sub(ingress.len());
            let rule = behind.map_or_else(|| ingress.get(at.rule), |at| egress.get(at))?;
            match &rule.peers {
                Peers::Of(peers) => peers.get(at.peer),
                Peers::Any => None,
            }
        })
    }
}

fn looked_up(policy: &Policy, objects: &Objects, options: &Options) -> (BTreeSet<Place>, Vec<Condition>) {
    let mut conditions: Vec<Condition> = conditions_of(policy).collect();
    let places = usable_networks(objects, policy, &options.restrictions, &mut conditions);
    (places, conditions)
}

fn selectors(policy: &Policy) -> Box<[At]> {
    let mut seen = HashSet::new();
    let mut found = Vec::new();
    for (rule, of) in policy.ingress.iter().chain(&policy.egress).enumerate() {
        let Peers::Of(peers) = &of.peers else { continue };
        for (at, peer) in peers.iter().enumerate() {
            if matches!(peer, Peer::Pods { .. }) && seen.insert(peer) {
                found.push(At { rule, peer: at });
            }
        }
    }
    found.into()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::objects::ObjectName;
    use crate::source::read::policy::read_network_policy;

    #[test]
    fn equal_selectors_are_one_and_blocks_are_none() {
        let role = |role: &str| json!({"podSelector": {"matchLabels": {"role": role}}});
        let everywhere = json!({"namespaceSelector": {}, "podSelector": {"matchLabels": {"role": "a"}}});
        let block = json!({"ipBlock": {"cidr": "10.0.0.0/8"}});
        let spec = json!({
            "podSelector": {},
            "ingress": [{"from": [block, role("a")]}, {}, {"from": [role("a"), role("b")]}],
            "egress": [{"to": [role("b"), everywhere]}, {"to": [block]}, {"to": [role("c")]}],
        });
        let policy = read_network_policy(ObjectName::new("shop", "p"), &spec).unwrap();
        let entry = PolicyEntry::new(&Arc::new(policy), &Objects::default(), &Options::default());
        let found: Vec<&Peer> = entry.selectors().map(Option::unwrap).collect();
        let peer = |egress: bool, rule: usize, at: usize| {
            let rules = if egress { &entry.policy.egress } else { &entry.policy.ingress };
            let Peers::Of(peers) = &rules[rule].peers else { panic!("{rules:?}") };
            &peers[at]
        };
        assert_eq!(found, [peer(false, 0, 1), peer(false, 2, 1), peer(true, 0, 1), peer(true, 2, 0)]);
    }
}
