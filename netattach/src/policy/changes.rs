//! The differences between two snapshots of the objects.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::index::{Endpoint, Endpoints};
use crate::npwg::NetworkRef;
use crate::objects::access::AllowedNamespaces;
use crate::objects::policy::PolicyName;
use crate::objects::{ObjectName, Objects};

/// Names of objects that are new, changed or gone.
#[derive(Debug, Default)]
pub(super) struct Changes {
    pub(super) policies: BTreeSet<PolicyName>,
    /// Pods of this node and of others, also those of which only the attachments on this node have changed.
    pub(super) pods: BTreeSet<ObjectName>,
    /// Namespaces with other labels.
    pub(super) namespaces: BTreeSet<String>,
    /// Definitions whose list of namespaces has changed. Nothing else of them, nor whether there are any, matters to
    /// policies.
    pub(super) definitions: BTreeSet<NetworkRef>,
}

impl Changes {
    /// Compares two snapshots; NetworkPolicies only where they are enforced.
    pub(super) fn between(before: &Arc<Objects>, now: &Arc<Objects>, network_policy: bool) -> Self {
        if Arc::ptr_eq(before, now) {
            return Self::default();
        }
        let multi = different(&before.policies, &now.policies, Arc::ptr_eq).cloned().map(PolicyName::multi);
        let mut policies: BTreeSet<PolicyName> = multi.collect();
        if network_policy {
            let network = different(&before.network_policies, &now.network_policies, Arc::ptr_eq);
            policies.extend(network.cloned().map(PolicyName::network));
        }
        let mut pods: BTreeSet<ObjectName> =
            different(&before.pods, &now.pods, Arc::ptr_eq).cloned().collect();
        pods.extend(now.remote_pods.changed_names(&before.remote_pods));
        Self {
            policies,
            pods,
            namespaces: different(&before.namespaces, &now.namespaces, PartialEq::eq).cloned().collect(),
            definitions: lists(before, now),
        }
    }

    /// Compares the attachments of this node and returns the numbers of those that are new or changed. Their pods, and
    /// those of attachments that are gone, count as changed too.
    pub(super) fn attachments<'a>(
        &mut self,
        before: impl Iterator<Item = (&'a u32, &'a Arc<Endpoint>)>,
        now: &'a Endpoints,
    ) -> BTreeSet<u32> {
        let before: BTreeMap<&u32, &Arc<Endpoint>> = before.collect();
        let now: BTreeMap<&u32, &Arc<Endpoint>> = now.iter().collect();
        let is_same = |one: &&Arc<Endpoint>, other: &&Arc<Endpoint>| Arc::ptr_eq(one, other) || one == other;
        let moved: BTreeSet<u32> = different(&before, &now, is_same).map(|id| **id).collect();
        for id in &moved {
            let either = [before.get(id), now.get(id)];
            self.pods.extend(either.into_iter().flatten().map(|endpoint| endpoint.pod.clone()));
        }
        moved
    }
}

/// The definitions with another list of the namespaces that may use them.
fn lists(before: &Objects, now: &Objects) -> BTreeSet<NetworkRef> {
    fn list<'a>(objects: &'a Objects, name: &NetworkRef) -> Option<&'a AllowedNamespaces> {
        objects.definitions.get(name)?.allowed.as_ref()
    }
    let changed = different(&before.definitions, &now.definitions, Arc::ptr_eq);
    changed.filter(|name| list(before, name) != list(now, name)).cloned().collect()
}

/// The keys that only one of two maps has, or whose values differ.
pub(super) fn different<'a, K: Ord, V>(
    before: &'a BTreeMap<K, V>,
    now: &'a BTreeMap<K, V>,
    is_same: impl Fn(&V, &V) -> bool,
) -> impl Iterator<Item = &'a K> {
    let is_itself = std::ptr::eq(before, now);
    let (mut before, mut now) = (before.iter().peekable(), now.iter().peekable());
    std::iter::from_fn(move || {
        if is_itself {
            return None;
        }
        loop {
            let (old, new) = (before.peek().copied(), now.peek().copied());
            let is_old = old.is_some_and(|(old, _)| new.is_none_or(|(new, _)| old <= new));
            let is_new = new.is_some_and(|(new, _)| old.is_none_or(|(old, _)| new <= old));
            let old = if is_old { before.next() } else { None };
            let new = if is_new { now.next() } else { None };
            match (old, new) {
                (None, None) => return None,
                (Some((_, old)), Some((_, new))) if is_same(old, new) => {}
                (Some((key, _)), _) | (None, Some((key, _))) => return Some(key),
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::Definition;

    #[test]
    fn of_definitions_the_list_of_namespaces_alone_matters() {
        let with = |config: &str, allowed: &[(&str, Option<&str>)]| {
            let definition = |(name, allowed): &(&str, Option<&str>)| Definition {
                namespace: "infra".into(),
                name: (*name).into(),
                config: Some(config.into()),
                annotations: BTreeMap::new(),
                allowed: allowed.map(AllowedNamespaces::read),
            };
            let all = allowed.iter().map(definition);
            let definitions = all.map(|one| (one.reference(), Arc::new(one))).collect();
            Arc::new(Objects { definitions, ..Objects::default() })
        };
        let changed = |before: &Arc<Objects>, now: &Arc<Objects>| -> Vec<String> {
            let changes = Changes::between(before, now, true);
            changes.definitions.into_iter().map(|network| network.name).collect()
        };
        let before = with("{}", &[("a", Some("shop")), ("b", None), ("c", Some("x,y")), ("d", None)]);
        let now = with("[]", &[("a", Some("shop")), ("b", Some("shop")), ("c", Some("y, x")), ("e", None)]);
        assert_eq!(changed(&before, &now), ["b"]);
        assert_eq!(changed(&before, &Arc::default()), ["a", "c"]);
        assert_eq!(changed(&now, &now), [""; 0]);
    }

    #[test]
    fn new_removed_and_replaced_objects_are_changes() {
        let map = |pairs: &[(u32, char)]| pairs.iter().copied().collect::<BTreeMap<_, _>>();
        let found = |before: &[(u32, char)], now: &[(u32, char)]| -> Vec<u32> {
            different(&map(before), &map(now), PartialEq::eq).copied().collect()
        };
        assert_eq!(
            found(&[(1, 'a'), (2, 'b'), (4, 'd')], &[(2, 'c'), (3, 'x'), (4, 'd'), (5, 'y')]),
            [1, 2, 3, 5]
        );
        assert_eq!(found(&[], &[(1, 'a')]), [1]);
        assert_eq!(found(&[(1, 'a')], &[]), [1]);
        assert_eq!(found(&[(1, 'a')], &[(1, 'a')]), [0; 0]);
    }
}
