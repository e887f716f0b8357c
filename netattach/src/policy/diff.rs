//! The writes that bring the kernel from what is programmed to what is desired, in an order that is safe to stop
//! in at any point.
//!
//! A policy is written under a number that nothing refers to yet; then each attachment is switched, both
//! directions at once; and only then are policies deleted that nothing refers to any more.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use netattach_common::PolicyIds;

use super::desired::Desired;
use super::lookup::CompiledPolicy;

/// Number of a policy in the kernel's tables. 0 is no policy: the direction is not isolated.
pub type PolicyId = u32;

/// A policy number without entries, which allows nothing: for an isolated attachment whose own policy does not fit into
/// the maps.
pub const DENY_ALL: PolicyId = PolicyIds::DENY_ALL;

/// The content of the kernel's maps.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Programmed {
    /// Policies by number.
    pub policies: BTreeMap<PolicyId, Arc<CompiledPolicy>>,
    /// Attachments that exist, by number.
    pub endpoints: BTreeMap<u32, PolicyIds>,
    /// The last number given. A number is reused only after all others were used, so that a stale reference (a counter,
    /// the policy noted in a flow) does not soon mean another policy.
    pub last_id: PolicyId,
}

/// Writes that bring the kernel from what is programmed to what is desired. They are carried out in the order of the
/// fields.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Writes {
    /// Policies to write, by their new numbers, which nothing refers to yet.
    pub install: BTreeMap<PolicyId, Arc<CompiledPolicy>>,
    /// Attachments to switch, each with both directions in one write.
    pub assign: BTreeMap<u32, PolicyIds>,
    /// Policies to delete, once no packet can be in the middle of reading them.
    pub remove: BTreeSet<PolicyId>,
}

/// Works out the writes. Equal policies must be one value, in `desired` and in `programmed`, as the compiler has them.
///
/// Attachments that are programmed but neither desired nor undecided are gone: they get no write and their
/// policies are removed.
pub fn diff(desired: &Desired, programmed: &Programmed) -> Writes {
    let mut numbers = Numbers::new(programmed);
    let mut assign = BTreeMap::new();
    let mut referenced = BTreeSet::new();
    for (endpoint, policy) in &desired.endpoints {
        let policies = PolicyIds { ingress: numbers.of(&policy.ingress), egress: numbers.of(&policy.egress) };
        referenced.extend([policies.ingress, policies.egress]);
        if programmed.endpoints.get(endpoint) != Some(&policies) {
            assign.insert(*endpoint, policies);
        }
    }
    for endpoint in &desired.undecided {
        let kept = programmed.endpoints.get(endpoint).copied().unwrap_or_default();
        referenced.extend([kept.ingress, kept.egress]);
    }
    let remove = programmed.policies.keys().filter(|id| !referenced.contains(id)).copied().collect();
    Writes { install: numbers.install, assign, remove }
}

/// Finds the number of a policy, and gives new numbers to those that have none.
struct Numbers<'a> {
    programmed: &'a Programmed,
    /// By the place in memory: equal policies are one value, and looking through a hundred thousand prefixes for every
    /// attachment would take seconds.
    by_place: HashMap<*const CompiledPolicy, PolicyId>,
    last_id: PolicyId,
    install: BTreeMap<PolicyId, Arc<CompiledPolicy>>,
}

impl<'a> Numbers<'a> {
    fn new(programmed: &'a Programmed) -> Self {
        let by_place = programmed.policies.iter().map(|(id, policy)| (Arc::as_ptr(policy), *id)).collect();
        Self { programmed, by_place, last_id: programmed.last_id, install: BTreeMap::new() }
    }

    fn of(&mut self, policy: &Option<Arc<CompiledPolicy>>) -> PolicyId {
        let Some(policy) = policy else { return 0 };
        if let Some(id) = self.by_place.get(&Arc::as_ptr(policy)) {
            return *id;
        }
        self.last_id = next_free(self.last_id, &self.programmed.policies);
        self.install.insert(self.last_id, Arc::clone(policy));
        self.by_place.insert(Arc::as_ptr(policy), self.last_id);
        self.last_id
    }
}

#[cfg(test)]
impl Programmed {
    /// Notes writes that have been carried out.
    pub(super) fn apply(&mut self, writes: &Writes) {
        self.policies.extend(writes.install.iter().map(|(id, policy)| (*id, Arc::clone(policy))));
        self.last_id = writes.install.keys().max().copied().unwrap_or(self.last_id);
        self.endpoints.extend(&writes.assign);
        self.policies.retain(|id, _| !writes.remove.contains(id));
    }
}

fn next_free(last: PolicyId, used: &BTreeMap<PolicyId, Arc<CompiledPolicy>>) -> PolicyId {
    let mut id = last;
    loop {
        id = if id < PolicyIds::HIGHEST { id + 1 } else { 1 };
        if !used.contains_key(&id) {
            return id;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::policy::desired::EndpointPolicy;
    use proptest::prelude::*;

    /// A policy that differs from those of other names, and is one value for each.
    fn policy(name: &str) -> Arc<CompiledPolicy> {
        static POLICIES: Mutex<BTreeMap<String, Arc<CompiledPolicy>>> = Mutex::new(BTreeMap::new());
        let named = || CompiledPolicy { rules: [(1, name.into())].into(), ..CompiledPolicy::default() };
        let mut policies = POLICIES.lock().unwrap();
        Arc::clone(policies.entry(name.to_owned()).or_insert_with(|| Arc::new(named())))
    }

    fn desired(endpoints: &[(u32, Option<&str>, Option<&str>)], undecided: &[u32]) -> Desired {
        let endpoint = |(id, ingress, egress): &(u32, Option<&str>, Option<&str>)| {
            let policies = EndpointPolicy {
                ingress: ingress.map(policy),
                egress: egress.map(policy),
                ..EndpointPolicy::default()
            };
            (*id, Arc::new(policies))
        };
        Desired {
            endpoints: endpoints.iter().map(endpoint).collect(),
            undecided: undecided.iter().copied().collect(),
            ..Desired::default()
        }
    }

    fn writes(
        install: &[(PolicyId, &str)],
        assign: &[(u32, PolicyId, PolicyId)],
        remove: &[PolicyId],
    ) -> Writes {
        let assign = assign.iter().map(|&(id, ingress, egress)| (id, PolicyIds { ingress, egress }));
        Writes {
            install: install.iter().map(|(id, name)| (*id, policy(name))).collect(),
            assign: assign.collect(),
            remove: remove.iter().copied().collect(),
        }
    }

    /// The writes one by one, in the order in which they are carried out.
    fn one_by_one(writes: &Writes) -> Vec<Writes> {
        let install = writes.install.iter().map(|(id, policy)| Writes {
            install: BTreeMap::from([(*id, Arc::clone(policy))]),
            ..Writes::default()
        });
        let assign = writes
            .assign
            .iter()
            .map(|(id, ids)| Writes { assign: BTreeMap::from([(*id, *ids)]), ..Writes::default() });
        let remove =
            writes.remove.iter().map(|id| Writes { remove: BTreeSet::from([*id]), ..Writes::default() });
        install.chain(assign).chain(remove).collect()
    }

    fn applied(mut programmed: Programmed, writes: &Writes) -> Programmed {
        programmed.apply(writes);
        programmed
    }

    #[test]
    fn policies_are_written_before_use_and_removed_after() {
        let start = Programmed::default();
        let first = diff(&desired(&[(1, Some("a"), None), (2, Some("a"), Some("b"))], &[]), &start);
        assert_eq!(first, writes(&[(1, "a"), (2, "b")], &[(1, 1, 0), (2, 1, 2)], &[]));
        let then = applied(start, &first);
        let second = diff(&desired(&[(1, Some("c"), None), (2, Some("a"), None)], &[]), &then);
        assert_eq!(second, writes(&[(3, "c")], &[(1, 3, 0), (2, 1, 0)], &[2]));
    }

    #[test]
    fn one_content_is_written_once_even_for_both_directions() {
        let found = diff(&desired(&[(1, Some("deny"), Some("deny"))], &[]), &Programmed::default());
        assert_eq!(found, writes(&[(1, "deny")], &[(1, 1, 1)], &[]));
    }

    #[test]
    fn attachments_that_are_gone_free_their_policies_and_undecided_ones_keep_theirs() {
        let both = desired(&[(1, Some("a"), None), (2, Some("b"), None)], &[]);
        let programmed = applied(Programmed::default(), &diff(&both, &Programmed::default()));
        assert_eq!(diff(&desired(&[], &[2]), &programmed), writes(&[], &[], &[1]));
    }

    #[test]
    fn an_attachment_without_isolation_is_still_switched_once() {
        // A new attachment denies everything until it is switched.
        let open = desired(&[(1, None, None)], &[]);
        let found = diff(&open, &Programmed::default());
        assert_eq!(found, writes(&[], &[(1, 0, 0)], &[]));
        assert_eq!(diff(&open, &applied(Programmed::default(), &found)), Writes::default());
    }

    #[test]
    fn numbers_come_round_without_meeting_those_in_use() {
        let programmed = Programmed {
            policies: BTreeMap::from([(1, policy("a"))]),
            endpoints: BTreeMap::from([(1, PolicyIds { ingress: 1, egress: 0 })]),
            last_id: PolicyIds::HIGHEST - 1,
        };
        let last = PolicyIds::HIGHEST;
        let found = diff(&desired(&[(1, Some("a"), Some("b")), (2, Some("c"), None)], &[]), &programmed);
        assert_eq!(found, writes(&[(last, "b"), (2, "c")], &[(1, 1, last), (2, 2, 0)], &[]));
        let programmed = Programmed { last_id: PolicyId::MAX, ..programmed };
        let found = diff(&desired(&[(1, Some("a"), Some("b"))], &[]), &programmed);
        assert_eq!(found, writes(&[(2, "b")], &[(1, 1, 2)], &[]));
    }

    fn any_desired() -> impl Strategy<Value = Desired> {
        let name = || prop::option::of(prop::sample::select(vec!["a", "b", "c", "d"]));
        let endpoints = prop::collection::vec((0_u32..5, name(), name()), 0..5);
        (endpoints, prop::collection::vec(0_u32..5, 0..2)).prop_map(|(endpoints, undecided)| {
            let undecided: Vec<u32> =
                undecided.into_iter().filter(|id| endpoints.iter().all(|(known, ..)| known != id)).collect();
            desired(&endpoints, &undecided)
        })
    }

    proptest! {
        #[test]
        fn stopping_after_any_write_leaves_no_dangling_reference(steps in prop::collection::vec(any_desired(), 1..6)) {
            let mut programmed = Programmed::default();
            for step in steps {
                // Attachments that are gone were detached, and DEL cleared their records.
                programmed.endpoints.retain(|id, _| step.endpoints.contains_key(id) || step.undecided.contains(id));
                for write in one_by_one(&diff(&step, &programmed)) {
                    for id in write.install.keys() {
                        prop_assert!(*id != 0 && !programmed.policies.contains_key(id));
                    }
                    programmed.apply(&write);
                    for assignment in programmed.endpoints.values() {
                        for id in [assignment.ingress, assignment.egress] {
                            prop_assert!(id == 0 || programmed.policies.contains_key(&id));
                        }
                    }
                }
                for (endpoint, policies) in &step.endpoints {
                    let PolicyIds { ingress, egress } = programmed.endpoints[endpoint];
                    prop_assert_eq!(programmed.policies.get(&ingress), policies.ingress.as_ref());
                    prop_assert_eq!(programmed.policies.get(&egress), policies.egress.as_ref());
                }
                prop_assert_eq!(diff(&step, &programmed), Writes::default());
            }
        }
    }
}
