//! Estimates the agent's memory for a policy.
//!
//! The memory can be many times the policy's text: a rule that allows everything takes two characters, and
//! a network of a policy one. The memory of all policies is bounded by this estimate.

use super::labels::{Requirement, Selector};
use super::policy::{Peer, Peers, Policy, PortTerm, Ports, Rule};
use crate::npwg::NetworkRef;

/// Memory of a problem, with its text.
const PROBLEM: usize = 1024;
/// Memory of the compiler for a peer that is a selector, besides the peer itself.
const SELECTOR: usize = 2 * size_of::<usize>();

impl Policy {
    /// Returns its approximate memory in bytes, besides the value itself.
    pub(crate) fn memory(&self) -> usize {
        let rules = [&self.ingress, &self.egress].map(|rules| list(rules, of_rule));
        self.selection_memory() + rules.iter().sum::<usize>() + PROBLEM * self.problems.len()
    }

    /// Returns the part of [`Policy::memory`] for its selector and networks.
    pub(crate) fn selection_memory(&self) -> usize {
        // A node of the B-tree is assumed two thirds full.
        let network =
            |it: &NetworkRef| size_of::<NetworkRef>() * 3 / 2 + text(&it.namespace) + text(&it.name);
        self.networks.iter().map(network).sum::<usize>() + self.pods.memory()
    }
}

/// Returns the memory of a block in the C library's allocator.
fn block(bytes: usize) -> usize {
    if bytes == 0 { 0 } else { (bytes + size_of::<usize>()).next_multiple_of(16).max(32) }
}

fn text(text: &str) -> usize {
    block(text.len())
}

/// Returns the memory of a list, and of what its items point to.
fn list<T>(items: &[T], of_item: impl Fn(&T) -> usize) -> usize {
    block(size_of_val(items)) + items.iter().map(of_item).sum::<usize>()
}

fn of_rule(rule: &Rule) -> usize {
    let peers = match &rule.peers {
        Peers::Any => 0,
        Peers::Of(peers) => list(peers, of_peer),
    };
    let ports = match &rule.ports {
        Ports::Any => 0,
        Ports::Of(terms) => list(terms, of_term),
    };
    peers + ports
}

fn of_peer(peer: &Peer) -> usize {
    match peer {
        Peer::Block { except, .. } => list(except, |_| 0),
        Peer::Pods { namespaces, pods } => {
            SELECTOR + namespaces.as_ref().map_or(0, Selector::memory) + pods.memory()
        }
    }
}

fn of_term(term: &PortTerm) -> usize {
    match term {
        PortTerm::Named { name, .. } => text(name),
        PortTerm::Protocol(_) | PortTerm::Range { .. } => 0,
    }
}

impl Selector {
    /// Returns its approximate memory in bytes, besides the value itself.
    pub(crate) fn memory(&self) -> usize {
        let of_one = |one: &Requirement| text(one.key()) + list(one.values(), |value| text(value));
        list(&self.requirements, of_one)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::objects::ObjectName;
    use crate::objects::policy::POLICY_FOR_ANNOTATION;
    use crate::source::read::policy::read;

    fn policy(networks: &str, spec: &Value) -> Policy {
        let annotations = [(POLICY_FOR_ANNOTATION.to_owned(), networks.to_owned())].into();
        read(ObjectName::new("shop", "p"), &annotations, spec).unwrap()
    }

    #[test]
    fn every_part_of_a_policy_counts() {
        let of = |networks: &str, rule: Value| {
            policy(networks, &json!({"podSelector": {}, "ingress": [rule], "policyTypes": ["Ingress"]}))
                .memory()
        };
        let bare = of("lan", json!({}));
        let more = |rule: Value| of("lan", rule) - bare;
        assert_eq!(of("lan,wan", json!({})) - bare, 72 + 32 + 32);
        assert_eq!(more(json!({"ports": [{"port": 80}]})), block(size_of::<PortTerm>()));
        assert_eq!(more(json!({"ports": [{"port": "http"}]})), block(size_of::<PortTerm>()) + 32);
        let blocks = json!([{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}]);
        let except = block(size_of::<ipnet::IpNet>());
        assert_eq!(more(json!({"from": blocks})), block(size_of::<Peer>()) + except);
        let everybody = block(size_of::<Peer>()) + SELECTOR;
        assert_eq!(more(json!({"from": [{"podSelector": {}}]})), everybody);
        // The requirement, its key, its list of values and the value.
        let requirement = block(size_of::<Requirement>()) + 32 + 32 + 32;
        let labels = json!({"matchLabels": {"app": "web"}});
        let both = json!([{"podSelector": labels, "namespaceSelector": labels}]);
        assert_eq!(more(json!({"from": both})), everybody + 2 * requirement);
        assert_eq!(more(json!({"form": []})), PROBLEM, "it cannot be read");
    }

    #[test]
    fn lists_have_no_room_that_does_not_count() {
        let nobody = vec![json!({}); 1000];
        let values = ["x", "y", "z", "x", "u", "v"];
        let odd = json!({
            "podSelector": {"matchExpressions": [{"key": "a", "operator": "In", "values": values}]},
            "ingress": vec![json!({"from": nobody, "ports": vec![json!({"protocol": "?"}); 1000]}); 5],
            "egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": vec!["10.1.0.0/16"; 5]}}]}],
        });
        let policy = policy("lan", &odd);
        assert_eq!((policy.ingress.capacity(), policy.egress.capacity()), (5, 1));
        let capacities = |rule: &Rule| match (&rule.peers, &rule.ports) {
            (Peers::Of(peers), Ports::Of(ports)) => (peers.capacity(), ports.capacity()),
            other => panic!("{other:?}"),
        };
        assert_eq!(policy.ingress.iter().map(capacities).collect::<Vec<_>>(), [(0, 0); 5]);
        let Peers::Of(to) = &policy.egress[0].peers else { panic!("{:?}", policy.egress) };
        let Peer::Block { except, .. } = &to[0] else { panic!("{to:?}") };
        assert_eq!(except.capacity(), 5);
        let [Requirement::In { values, .. }] = &policy.pods.requirements[..] else {
            panic!("{:?}", policy.pods)
        };
        // Values have exactly the memory of a boxed slice; equal ones are one.
        assert_eq!((policy.pods.requirements.capacity(), values.len()), (1, 5));
    }
}
