//! Decides which policies go without their rules if all of them together exceed the node's budget.
//!
//! Each namespace has a share. Policies are admitted in the order of the share that their namespace reaches
//! with them, and within a namespace the small ones first: the namespace with the largest share loses rules
//! first, and does not displace others. Only the policies themselves decide, so the result is the same on
//! all nodes, and after a restart.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::objects::budget::{Excess, POLICIES, RULES_OF_NODE};
use crate::objects::policy::{Policy, PolicyName};

/// How many policies, and how many rules in total, a node admits.
pub(super) struct Most {
    policies: usize,
    rules: usize,
}

pub(super) const OF_NODE: Most = Most { policies: POLICIES, rules: RULES_OF_NODE };

/// Returns the policies that go without their rules, with the reason. None if all are within the bounds.
pub(super) fn beyond<'a>(
    all: impl Iterator<Item = &'a Arc<Policy>> + Clone,
    most: &Most,
) -> BTreeMap<PolicyName, Excess> {
    let (mut policies, mut rules) = (0, 0);
    for policy in all.clone() {
        policies += 1;
        rules += number_of_rules(policy);
    }
    if policies <= most.policies && rules <= most.rules {
        return BTreeMap::new();
    }
    let mut beyond = BTreeMap::new();
    (policies, rules) = (0, 0);
    for policy in by_share(all.map(|policy| &**policy).collect(), most) {
        let more = number_of_rules(policy);
        if policies >= most.policies {
            beyond.insert(policy.name.clone(), Excess::Policies);
        } else if rules + more > most.rules {
            beyond.insert(policy.name.clone(), Excess::RulesOfNode);
        } else {
            policies += 1;
            rules += more;
        }
    }
    beyond
}

/// Sorts policies by the larger of the two shares that their namespace reaches with them and its earlier
/// policies.
fn by_share<'a>(mut all: Vec<&'a Policy>, most: &Most) -> impl Iterator<Item = &'a Policy> + use<'a> {
    fn in_namespace(policy: &Policy) -> (&str, usize, &PolicyName) {
        (policy.namespace(), number_of_rules(policy), &policy.name)
    }
    all.sort_unstable_by(|one, other| in_namespace(one).cmp(&in_namespace(other)));
    let (mut namespace, mut policies, mut rules) = ("", 0_usize, 0_usize);
    let mut shares = Vec::with_capacity(all.len());
    for policy in all {
        if policy.namespace() != namespace {
            (namespace, policies, rules) = (policy.namespace(), 0, 0);
        }
        policies += 1;
        rules += number_of_rules(policy);
        // Both fractions have the product of the bounds as denominator.
        let share = (policies as u64 * most.rules as u64).max(rules as u64 * most.policies as u64);
        shares.push((share, policy));
    }
    shares.sort_unstable_by(|(one, a), (other, b)| (one, &a.name).cmp(&(other, &b.name)));
    shares.into_iter().map(|(_, policy)| policy)
}

fn number_of_rules(policy: &Policy) -> usize {
    policy.ingress.len() + policy.egress.len()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::objects::ObjectName;
    use crate::source::read::policy::{read, read_network_policy};

    /// Returns the policies that lose their rules among policies such as `shop/p 3`, with that many rules, or
    /// `np shop/p 3`.
    fn without(all: &[&str]) -> Vec<String> {
        let policy = |text: &&str| {
            let (name, rules) = text.rsplit_once(' ').unwrap();
            let spec = json!({"podSelector": {}, "egress": vec![json!({}); rules.parse::<usize>().unwrap()]});
            let policy = match name.strip_prefix("np ") {
                Some(name) => read_network_policy(name.parse::<ObjectName>().unwrap(), &spec),
                None => read(name.parse::<ObjectName>().unwrap(), &BTreeMap::new(), &spec),
            };
            Arc::new(policy.unwrap())
        };
        let mut all: Vec<Arc<Policy>> = all.iter().map(policy).collect();
        let most = Most { policies: 4, rules: 10 };
        let first = beyond(all.iter(), &most);
        all.reverse();
        assert_eq!(beyond(all.iter(), &most), first, "in another order");
        first.into_iter().map(|(name, excess)| format!("{name} {excess:?}")).collect()
    }

    #[test]
    fn who_has_most_goes_without_first() {
        let table: &[(&[&str], &[&str])] = &[
            (&["a/1 5", "a/2 4", "np a/3 1", "b/1 0"], &[]),
            // By rules: the large ones of the namespace with the most.
            (&["a/1 6", "a/2 5", "b/1 4"], &["a/1 RulesOfNode"]),
            (&["a/1 11", "b/1 4"], &["a/1 RulesOfNode"]),
            (&["a/1 5", "b/1 5", "c/1 5"], &["c/1 RulesOfNode"]),
            (&["a/1 7", "b/1 5", "b/2 1", "c/1 3"], &["a/1 RulesOfNode"]),
            // By number: the last ones of the namespace with the most.
            (&["a/1 1", "a/2 1", "a/3 1", "a/4 1", "a/5 1", "z/1 4"], &["a/4 Policies", "a/5 Policies"]),
            // Of either kind: a NetworkPolicy is not behind all others.
            (&["a/1 3", "a/2 3", "a/3 3", "np b/1 3"], &["a/3 RulesOfNode"]),
            (&["a/1 1", "np a/2 1", "np a/3 1", "np a/4 1", "b/1 7"], &["networkpolicy a/4 Policies"]),
        ];
        for (all, expected) in table {
            assert_eq!(without(all), *expected, "{all:?}");
        }
    }
}
