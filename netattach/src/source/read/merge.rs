//! Inserts objects into a snapshot and removes them. If an equal object is already there, it is kept:
//! readers find changes by comparing addresses.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::Kind;
use super::manifest::{Key, Object};
use super::policy::unreadable;
use crate::npwg::NetworkRef;
use crate::objects::policy::{Policy, PolicyKind, PolicyName};
use crate::objects::{ObjectName, Objects, Shared};

/// Inserts an object, in place of the one of its name. Returns whether that changed anything.
pub(crate) fn insert(objects: &mut Objects, object: &Object) -> bool {
    match object {
        Object::Pod(pod) => set(&mut objects.pods, &pod.name, pod),
        Object::Namespace { name, labels } => set(&mut objects.namespaces, name, labels),
        Object::Definition(definition) => {
            set(&mut objects.definitions, &definition.reference(), &Arc::new(definition.clone()))
        }
        Object::Node(node) => set(&mut objects.nodes, &node.name, node),
        Object::Policy(policy) => set(policies(objects, policy.name.kind), &policy.name.object, policy),
    }
}

/// Removes the object of that name. Returns whether there was one.
pub(crate) fn remove(objects: &mut Objects, key: &Key) -> bool {
    let ObjectName { namespace, name } = &key.name;
    match Kind::of_word(key.kind) {
        Some(Kind::Pod) => take(&mut objects.pods, &key.name),
        Some(Kind::Namespace) => take(&mut objects.namespaces, name),
        Some(Kind::Definition) => take(&mut objects.definitions, &NetworkRef::new(namespace, name)),
        Some(Kind::MultiNetworkPolicy) => take(&mut objects.policies, &key.name),
        Some(Kind::NetworkPolicy) => take(&mut objects.network_policies, &key.name),
        Some(Kind::Node) => take(&mut objects.nodes, name),
        None => false,
    }
}

/// Whether there is an object of that name.
pub(crate) fn has(objects: &Objects, key: &Key) -> bool {
    let ObjectName { namespace, name } = &key.name;
    match Kind::of_word(key.kind) {
        Some(Kind::Pod) => objects.pods.contains_key(&key.name),
        Some(Kind::Namespace) => objects.namespaces.contains_key(name),
        Some(Kind::Definition) => objects.definitions.contains_key(&NetworkRef::new(namespace, name)),
        Some(Kind::MultiNetworkPolicy) => objects.policies.contains_key(&key.name),
        Some(Kind::NetworkPolicy) => objects.network_policies.contains_key(&key.name),
        Some(Kind::Node) => objects.nodes.contains_key(name),
        None => false,
    }
}

/// The names of all objects of a kind.
pub(crate) fn keys(objects: &Objects, kind: Kind) -> Vec<Key> {
    let names: Vec<ObjectName> = match kind {
        Kind::Pod => objects.pods.keys().cloned().collect(),
        Kind::Namespace => objects.namespaces.keys().map(|name| ObjectName::new("", name)).collect(),
        Kind::Definition => {
            objects.definitions.keys().map(|it| ObjectName::new(&it.namespace, &it.name)).collect()
        }
        Kind::MultiNetworkPolicy => objects.policies.keys().cloned().collect(),
        Kind::NetworkPolicy => objects.network_policies.keys().cloned().collect(),
        Kind::Node => objects.nodes.keys().map(|name| ObjectName::new("", name)).collect(),
    };
    names.into_iter().map(|name| Key { kind: kind.word(), name }).collect()
}

/// The policy that isolates what `object` selects and allows nothing, if it is a policy.
pub(crate) fn isolating(object: &Object) -> Option<Object> {
    let Object::Policy(policy) = object else { return None };
    let isolating = Policy {
        pods: policy.pods.clone(),
        all_networks: policy.all_networks,
        ..unreadable(policy.name.clone(), policy.networks.clone())
    };
    Some(Object::Policy(Arc::new(isolating)))
}

/// The name of [`isolating_all`]: no object of a cluster has a name with spaces.
pub(crate) const OTHER_POLICIES: &str = "policies beyond the bound";

/// The policy that isolates every pod of a namespace on all networks and allows nothing.
pub(crate) fn isolating_all(kind: PolicyKind, namespace: &str) -> Object {
    let name = PolicyName { kind, object: ObjectName::new(namespace, OTHER_POLICIES) };
    Object::Policy(Arc::new(Policy { all_networks: true, ..unreadable(name, BTreeSet::new()) }))
}

fn policies(objects: &mut Objects, kind: PolicyKind) -> &mut Shared<ObjectName, Arc<Policy>> {
    match kind {
        PolicyKind::Multi => &mut objects.policies,
        PolicyKind::Network => &mut objects.network_policies,
    }
}

fn set<K: Ord + Clone, V: PartialEq + Clone>(map: &mut Shared<K, V>, key: &K, value: &V) -> bool {
    let is_new = map.get(key) != Some(value);
    if is_new {
        map.insert(key.clone(), value.clone());
    }
    is_new
}

/// Removes a key. Does not write to the map if the key is missing, as writing creates a new map.
fn take<K: Ord + Clone, V: Clone>(map: &mut Shared<K, V>, key: &K) -> bool {
    map.contains_key(key) && map.remove(key).is_some()
}
