//! The objects of the cluster that have been read. Pure.
//!
//! If an object cannot be read, its previous version is kept, or a policy that isolates replaces it; the
//! problem is reported for the object. Sizes are bounded in total. An object beyond a bound is treated as
//! unreadable, but all such objects of a kind are one problem, and the kind is listed again when there is
//! room for one of them (`refused`). At the bound, objects of the namespace with the most bytes are removed
//! first (`weights`).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::value::RawValue;

use super::on_demand::Want;
pub(super) use super::refused::REMEMBERED;
use super::refused::Refused;
use super::resource::Content;
use super::stand_ins::StandIns;
use super::weights::Weights;
use crate::budget::{self, Budget, Exceeded};
use crate::builtin::pod_cidr;
use crate::error_chain::{Chain, clipped};
use crate::npwg::NetworkRef;
use crate::objects::access::AllowedNamespaces;
use crate::objects::interner::Interner;
use crate::objects::policy::{Direction, Peer, Peers, Policy};
use crate::objects::remote::{RemotePod, Written};
use crate::objects::remote_pods::RemotePods;
use crate::objects::{ClusterRanges, ObjectName, Objects, Origin, Place, Pod, Problem};
use crate::source::read::manifest::{Key, Object};
use crate::source::read::{Kind, RemoteMetadata, api_object, merge, remote_pod};

/// How long a pod that was read by name is kept without being seen by the watch.
const FETCHED: Duration = Duration::from_secs(30);
/// Most unreadable objects that are remembered.
pub(super) const UNREADABLE: usize = 1024;
/// Most of them in one namespace, so that an author of many does not hide the problems of others.
pub(super) const UNREADABLE_OF_NAMESPACE: usize = 128;
/// Deleted pods that are remembered, so that a late answer does not restore one.
const DELETED: usize = 1024;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Cache {
    objects: Objects,
    problems: BTreeMap<Key, String>,
    /// Number of unreadable objects in each namespace.
    problems_of: BTreeMap<String, usize>,
    weights: Weights,
    stand_ins: StandIns,
    /// Pods that were read by name and that the watch has not shown yet.
    fetched: BTreeMap<ObjectName, Fetched>,
    /// The newest version that a list or a watch of pods has reached.
    pods_at: Option<u64>,
    /// Uids of the pods deleted last.
    deleted: VecDeque<String>,
    interner: Interner,
    /// The versions of this node's pods, as last read. They are not part of a pod, because most changes of
    /// a pod change nothing here.
    versions: BTreeMap<ObjectName, u64>,
    /// Objects beyond the bound of their kind, by name and size only.
    refused: BTreeMap<Content, Refused>,
    /// Kinds that have refused objects, and now have room for one of them.
    room: BTreeSet<Content>,
    /// Kinds that have kept a formerly refused object since their last list began, or of which a namespace
    /// is no longer isolated as a whole.
    admitted: BTreeSet<Content>,
    /// The policies with pods as peers.
    with_pods: BTreeSet<Key>,
    /// Those of them that are for the default network.
    for_default: BTreeSet<Key>,
    /// The default network, if policies that are for it need more pods of other nodes than others.
    default_network: Option<NetworkRef>,
    /// Whether pods of other nodes that are on the default network alone are no peers of policies.
    leaves_out_default: bool,
    /// Whether they are nevertheless peers of policies for `default_network`, which are needed now.
    has_pods_of_default: bool,
    /// The definitions that take their range from the node.
    of_node: BTreeSet<Key>,
    /// Whether there are changes since the last [`Cache::take_changed`].
    is_changed: bool,
}

/// A pod that was read by name.
#[derive(Debug)]
struct Fetched {
    at: Instant,
    version: Option<u64>,
}

/// The pods of other nodes that a list has not contained so far. The first list starts empty; a later one
/// needs only the memory to find deleted pods. Copies of the names would fragment the memory between the
/// kept pods.
#[derive(Debug, Default)]
pub(super) struct Unlisted {
    pods: RemotePods,
    refused: BTreeSet<ObjectName>,
}

impl Unlisted {
    /// Removes a pod that the list contains.
    pub(super) fn remove(&mut self, name: &ObjectName) {
        self.pods.remove(name);
        self.refused.remove(name);
    }
}

/// Whether there may be more unreadable objects than are remembered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MoreProblems<'a> {
    OfAll,
    /// In this namespace, and possibly in others.
    Of(&'a str),
}

/// The metadata that every object has.
#[derive(Deserialize)]
struct Identified {
    metadata: Identity,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Identity {
    #[serde(default)]
    name: String,
    #[serde(default)]
    namespace: String,
    uid: Option<String>,
    resource_version: Option<String>,
}

/// Returns the version of the object in an event.
pub(super) fn version(json: &RawValue) -> Option<String> {
    serde_json::from_str::<Identified>(json.get()).ok()?.metadata.resource_version
}

/// Converts a version to a number: the versions of one object grow
/// (<https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions>). `None`: this
/// server's versions are no numbers, so they cannot be compared.
pub(super) fn number(version: &str) -> Option<u64> {
    version.parse().ok()
}

fn identity(json: &RawValue) -> Option<Identity> {
    let identity = serde_json::from_str::<Identified>(json.get()).ok()?.metadata;
    (!identity.name.is_empty()).then_some(identity)
}

fn key(kind: Kind, json: &RawValue) -> Option<(Key, Option<String>)> {
    let Identity { name, namespace, uid, .. } = identity(json)?;
    Some((Key { kind: kind.word(), name: ObjectName::new(namespace, name) }, uid))
}

/// Returns the bound on all bytes kept of a kind.
pub(super) fn budget_of(kind: Kind) -> Option<&'static Budget> {
    match kind {
        Kind::Definition => Some(&budget::DEFINITIONS_OF_CLUSTER),
        Kind::MultiNetworkPolicy | Kind::NetworkPolicy => Some(&budget::POLICIES_OF_CLUSTER),
        Kind::Pod => Some(&budget::PODS_OF_NODE),
        Kind::Namespace | Kind::Node => None,
    }
}

/// Returns the bytes counted for an object: for a pod, those of what is kept, which may be little; for a
/// policy, at least those of what is kept, which may be many times its text; for a definition, its text and
/// the list of namespaces in memory.
fn bytes_of(object: &Object, json: &RawValue) -> usize {
    /// Overhead of every pod and policy, and of each string and port of a pod.
    const EACH: usize = 512;
    const ITEM: usize = 64;
    match object {
        Object::Pod(pod) => {
            let texts = pod.labels.iter().chain(&pod.annotations);
            let texts = texts.map(|(key, value)| key.len() + value.len() + ITEM);
            EACH + texts.sum::<usize>() + pod.ports.len() * ITEM
        }
        Object::Policy(policy) => json.get().len().max(EACH + policy.memory()),
        Object::Definition(definition) => {
            json.get().len() + definition.allowed.as_ref().map_or(0, AllowedNamespaces::memory)
        }
        _ => json.get().len(),
    }
}

impl Cache {
    /// Stores a new or changed object. Returns its key, or `None` if it has no name.
    pub(super) fn put(&mut self, kind: Kind, json: &RawValue) -> Option<Key> {
        let Identity { name, namespace, uid, resource_version } = identity(json)?;
        let key = Key { kind: kind.word(), name: ObjectName::new(namespace, name) };
        if kind == Kind::Pod {
            self.passed(kind, resource_version.as_deref());
            if self.is_of_earlier(&key.name, uid.as_deref(), resource_version.as_deref()) {
                return Some(key);
            }
            self.fetched.remove(&key.name);
            match resource_version.as_deref().and_then(number) {
                Some(version) => drop(self.versions.insert(key.name.clone(), version)),
                None => drop(self.versions.remove(&key.name)),
            }
        }
        let was_kept = self.weights.has(&key);
        let isolating = match api_object(kind, json) {
            Ok(object) => {
                self.is_readable(&key);
                let object = of_this_node(object);
                let bytes = bytes_of(&object, json);
                if self.weigh(kind, &key, bytes).is_ok() {
                    self.is_kept(kind, &key, was_kept);
                    self.insert(&object);
                    return Some(key);
                }
                self.refuse(Content::Objects(kind), &key.name, bytes);
                if kind == Kind::Pod {
                    // The old version is dropped too: attachments of unknown pods keep their policies.
                    if self.weights.remove(&key).is_some() {
                        self.has_room(Content::Objects(kind), &key.name.namespace);
                    }
                    self.forget(&key);
                }
                merge::isolating(&object)
            }
            Err(error) => {
                // The kept object is of an earlier version.
                self.versions.remove(&key.name);
                let message = clipped(Chain(&error).to_string());
                self.note(&key, message);
                error.isolating()
            }
        };
        if let Some(isolating) = isolating.filter(|_| !merge::has(&self.objects, &key)) {
            self.isolate(&isolating);
        }
        Some(key)
    }

    /// Replaces a policy that is not kept by one that isolates, or isolates its namespace as a whole.
    fn isolate(&mut self, isolating: &Object) {
        let Object::Policy(policy) = isolating else { return };
        let key = isolating.key();
        if self.stand_ins.take(&key, policy) {
            self.insert(isolating);
        } else {
            self.stand_ins.isolate(key.kind, &key.name.namespace);
            self.insert(&merge::isolating_all(policy.name.kind, &key.name.namespace));
        }
    }

    /// Records that a list or a watch of the kind has reached this version.
    pub(super) fn passed(&mut self, kind: Kind, version: Option<&str>) {
        if kind == Kind::Pod {
            self.pods_at = self.pods_at.max(version.and_then(number));
        }
    }

    /// Records the version of a complete list of the kind. The version is lower than before if the server
    /// was restored to an earlier state. Newer versions of the lost history never come, so they are not
    /// waited for.
    pub(super) fn listed(&mut self, kind: Kind, version: &str) {
        if kind != Kind::Pod {
            return;
        }
        let listed = number(version);
        if listed < self.pods_at {
            let newer = self.fetched.values_mut().filter(|it| it.version > listed);
            newer.for_each(|it| it.version = None);
        }
        self.pods_at = listed;
    }

    /// Records that an object cannot be read. Only the first of very many are kept, fewer of one namespace.
    fn note(&mut self, key: &Key, message: String) {
        match self.problems.get_mut(key) {
            Some(before) if *before == message => return,
            Some(before) => *before = message,
            None => {
                let of = self.problems_of.get(&key.name.namespace).copied().unwrap_or_default();
                if self.problems.len() >= UNREADABLE || of >= UNREADABLE_OF_NAMESPACE {
                    return;
                }
                self.problems_of.insert(key.name.namespace.clone(), of + 1);
                self.problems.insert(key.clone(), message);
            }
        }
        self.is_changed = true;
    }

    /// Records that an object can be read again, or is deleted.
    fn is_readable(&mut self, key: &Key) {
        if self.problems.remove(key).is_none() {
            return;
        }
        self.is_changed = true;
        if let Some(of) = self.problems_of.get_mut(&key.name.namespace) {
            *of -= 1;
            if *of == 0 {
                self.problems_of.remove(&key.name.namespace);
            }
        }
    }

    /// Records that an object exceeds the bound of its kind.
    fn refuse(&mut self, content: Content, name: &ObjectName, bytes: usize) {
        self.refused.entry(content).or_default().put(name, bytes);
    }

    /// Records that a possibly refused object is kept, or deleted. Returns whether it had been refused.
    fn fits(&mut self, content: Content, name: &ObjectName) -> bool {
        let Some(refused) = self.refused.get_mut(&content) else { return false };
        let was_refused = refused.remove(name);
        match refused.len() {
            // Refused objects that are not remembered are known only from a list.
            0 if refused.has_more() => drop(self.room.insert(content)),
            0 => {
                self.refused.remove(&content);
                self.room.remove(&content);
            }
            _ => {}
        }
        was_refused
    }

    /// Notes that fewer bytes of a namespace's objects are kept than before, so refused objects may fit
    /// now.
    fn has_room(&mut self, content: Content, namespace: &str) {
        if !self.room.contains(&content) && self.may_fit(content, namespace) {
            self.room.insert(content);
        }
    }

    /// Whether any refused object may fit now that a namespace has fewer bytes: the smallest object, or the smallest
    /// one of that namespace, which takes precedence over objects of others. `true` if not all refused objects are
    /// remembered.
    fn may_fit(&self, content: Content, namespace: &str) -> bool {
        let Some(refused) = self.refused.get(&content) else { return false };
        if refused.has_more() {
            return true;
        }
        // The bound of other kinds is on their number.
        let Content::Objects(kind) = content else { return true };
        let Some(budget) = budget_of(kind) else { return true };
        refused.smallest(namespace).any(|(name, bytes)| {
            let key = Key { kind: kind.word(), name: name.clone() };
            self.weights.in_the_way(&key, bytes, budget).is_ok()
        })
    }

    /// Whether refused objects of the kind may fit now, so that it must be listed again.
    pub(super) fn wants_list(&self, content: Content) -> bool {
        self.room.contains(&content)
    }

    /// Whether any kind must be listed again.
    pub(super) fn wants_lists(&self) -> bool {
        !self.room.is_empty()
    }

    /// A list of the kind begins. Room that arises later may be too late for this list.
    pub(super) fn list_begins(&mut self, content: Content) {
        self.room.remove(&content);
        self.admitted.remove(&content);
        if let Some(refused) = self.refused.get_mut(&content) {
            refused.list_begins();
            if refused.len() == 0 {
                self.refused.remove(&content);
            }
        }
        if let Content::Objects(kind) = content {
            self.stand_ins.list_begins(kind.word());
        }
    }

    /// Whether the last list of the kind has kept a formerly refused object.
    pub(super) fn has_admitted(&self, content: Content) -> bool {
        self.admitted.contains(&content)
    }

    /// Whether there may be more unreadable objects than are remembered: in all namespaces, or in which
    /// one.
    pub(super) fn has_more_problems(&self) -> Option<MoreProblems<'_>> {
        if self.problems.len() >= UNREADABLE {
            return Some(MoreProblems::OfAll);
        }
        let mut full = self.problems_of.iter().filter(|(_, of)| **of >= UNREADABLE_OF_NAMESPACE);
        full.next().map(|(namespace, _)| MoreProblems::Of(namespace))
    }

    /// Returns the number of objects of each kind beyond its bound, and the first of them. Only remembered
    /// ones are counted.
    pub(super) fn refused(&self) -> impl Iterator<Item = (Content, usize, &ObjectName)> {
        self.refused
            .iter()
            .filter_map(|(content, refused)| Some((*content, refused.len(), refused.names().next()?)))
    }

    fn insert(&mut self, object: &Object) {
        if merge::insert(&mut self.objects, object) {
            self.is_changed = true;
            let note = |among: &mut BTreeSet<Key>, is_one: bool| match is_one {
                true => among.insert(object.key()),
                false => among.remove(&object.key()),
            };
            match object {
                Object::Policy(policy) => {
                    let has_pods = has_pods_as_peers(policy);
                    note(&mut self.with_pods, has_pods);
                    let default = self.default_network.as_ref().filter(|_| has_pods);
                    let is_for_default = default.is_some_and(|default| policy.networks.contains(default));
                    note(&mut self.for_default, is_for_default);
                }
                Object::Definition(definition) => {
                    let is_one = definition.config.as_deref().is_some_and(pod_cidr::is_named);
                    note(&mut self.of_node, is_one);
                }
                _ => {}
            }
        }
    }

    /// Removes a deleted object.
    pub(super) fn remove(&mut self, kind: Kind, json: &RawValue) {
        let Some((key, uid)) = key(kind, json) else { return };
        if kind == Kind::Pod {
            let version = version(json);
            let is_of_earlier = self.is_of_earlier(&key.name, uid.as_deref(), version.as_deref());
            self.deleted.extend(uid);
            self.passed(kind, version.as_deref());
            if self.deleted.len() > DELETED {
                self.deleted.pop_front();
            }
            if is_of_earlier {
                return;
            }
            self.fetched.remove(&key.name);
        }
        self.remove_key(kind, &key);
    }

    /// Whether a delayed event concerns an earlier pod than the one of that name that was read by name.
    fn is_of_earlier(&self, name: &ObjectName, uid: Option<&str>, version: Option<&str>) -> bool {
        let Some(Fetched { version: Some(fetched), .. }) = self.fetched.get(name) else { return false };
        let is_another = self.objects.pods.get(name).is_some_and(|pod| pod.uid.as_deref() != uid);
        is_another && version.and_then(number).is_some_and(|version| version < *fetched)
    }

    fn remove_key(&mut self, kind: Kind, key: &Key) {
        if kind == Kind::Pod {
            self.versions.remove(&key.name);
        }
        self.is_readable(key);
        let content = Content::Objects(kind);
        self.fits(content, &key.name);
        if self.weights.remove(key).is_some() {
            self.has_room(content, &key.name.namespace);
        }
        self.need_not_isolate(content, key);
        self.forget(key);
    }

    /// Records that an object is kept, which may have been refused or unreadable before.
    fn is_kept(&mut self, kind: Kind, key: &Key, was_kept: bool) {
        let content = Content::Objects(kind);
        if self.fits(content, &key.name) {
            self.admitted.insert(content);
        }
        if !was_kept {
            self.need_not_isolate(content, key);
        }
    }

    /// Removes the stand-in of a policy, which is not needed any more.
    fn need_not_isolate(&mut self, content: Content, key: &Key) {
        self.stand_ins.remove(key);
        if self.stand_ins.has_all_of(key) {
            // Only a list shows whether its namespace must still be isolated as a whole.
            self.room.insert(content);
        }
    }

    fn forget(&mut self, key: &Key) {
        self.with_pods.remove(key);
        self.for_default.remove(key);
        self.of_node.remove(key);
        self.is_changed |= merge::remove(&mut self.objects, key);
    }

    /// Removes an object in favour of another one of its kind, as if it had been refused.
    fn give_way(&mut self, kind: Kind, key: &Key) {
        let bytes = self.weights.remove(key).unwrap_or_default();
        self.refuse(Content::Objects(kind), &key.name, bytes);
        let isolating = match kind {
            Kind::MultiNetworkPolicy => self.objects.policies.get(&key.name),
            Kind::NetworkPolicy => self.objects.network_policies.get(&key.name),
            _ => None,
        };
        let isolating = isolating.and_then(|policy| merge::isolating(&Object::Policy(Arc::clone(policy))));
        match isolating {
            // Inserts the stand-in before removing the policy, so that no reader sees neither.
            Some(isolating) => {
                self.with_pods.remove(key);
                self.for_default.remove(key);
                self.isolate(&isolating);
                if !self.stand_ins.has(key) {
                    self.forget(key);
                }
            }
            None => self.forget(key),
        }
    }

    /// Removes the objects of the kind that were not in a complete list. A pod that was read by name during
    /// the list may be newer than it, and is kept for its time.
    pub(super) fn retain(&mut self, kind: Kind, listed: &BTreeSet<Key>) {
        let is_fetched = |key: &Key| kind == Kind::Pod && self.fetched.contains_key(&key.name);
        let mut gone = merge::keys(&self.objects, kind);
        gone.retain(|key| {
            !listed.contains(key) && !is_fetched(key) && key.name.name != merge::OTHER_POLICIES
        });
        gone.extend(
            self.problems.keys().filter(|key| key.kind == kind.word() && !listed.contains(*key)).cloned(),
        );
        let refused = self.refused.get(&Content::Objects(kind)).into_iter().flat_map(Refused::names);
        let refused = refused.map(|name| Key { kind: kind.word(), name: name.clone() });
        gone.extend(refused.filter(|key| !listed.contains(key)));
        for key in gone {
            self.remove_key(kind, &key);
        }
        for namespace in self.stand_ins.list_ends(kind.word()) {
            self.admitted.insert(Content::Objects(kind));
            let name = ObjectName::new(namespace, merge::OTHER_POLICIES);
            self.forget(&Key { kind: kind.word(), name });
        }
    }

    /// Stores a pod of this node that was read by name because the watch has not shown it yet. It is kept
    /// until the watch shows it, and otherwise for [`FETCHED`] and until the watch has reached its version.
    /// A pod that is known, or was deleted meanwhile, is not stored.
    pub(super) fn fetched(&mut self, json: &RawValue, now: Instant) -> Option<Arc<Pod>> {
        let Ok(Object::Pod(pod)) = api_object(Kind::Pod, json) else { return None };
        let is_deleted = pod.uid.as_ref().is_some_and(|uid| self.deleted.contains(uid));
        let known = self.objects.pods.get(&pod.name).filter(|known| known.uid == pod.uid);
        if let Some(known) = known {
            return Some(Arc::clone(known));
        }
        if is_deleted {
            return None;
        }
        let name = pod.name.clone();
        let version = version(json).as_deref().and_then(number);
        self.fetched.insert(name.clone(), Fetched { at: now, version });
        self.insert(&of_this_node(Object::Pod(pod)));
        self.objects.pods.get(&name).cloned()
    }

    /// Removes pods that were read by name but that the watch has not shown for too long, though it has
    /// passed their versions: they are deleted. If the watch shows nothing at all, nothing is concluded.
    pub(super) fn expire(&mut self, now: Instant) {
        let is_passed = |version: Option<u64>| version.is_none() || version <= self.pods_at;
        let over = |it: &Fetched| now.duration_since(it.at) >= FETCHED && is_passed(it.version);
        let expired: Vec<ObjectName> =
            self.fetched.iter().filter(|(_, it)| over(it)).map(|(name, _)| name.clone()).collect();
        for name in expired {
            self.fetched.remove(&name);
            self.remove_key(Kind::Pod, &Key { kind: Kind::Pod.word(), name });
        }
    }

    /// Returns the version of a pod of this node that was read last, unless it has not been published yet.
    pub(super) fn version_of(&self, pod: &ObjectName) -> Option<u64> {
        if self.is_changed { None } else { self.versions.get(pod).copied() }
    }

    /// Returns how urgently the pods of other nodes are needed: at all if a policy with pods as peers is in
    /// the namespace of a pod of this node, and now if it selects such a pod. `tells_apart`: whether to
    /// distinguish the two, which compares labels.
    pub(super) fn wants_remote_pods(&self, tells_apart: bool) -> Want {
        /// Most policies that are compared with pods; with more, the safe answer is returned.
        const LOOKED_AT: usize = 4096;
        let mut looked_at = 0;
        for pod in self.objects.pods.values().filter(|pod| !pod.host_network) {
            for policy in self.with_pods_in(&pod.name.namespace) {
                looked_at += 1;
                if tells_apart && (looked_at > LOOKED_AT || policy.pods.matches(&pod.labels)) {
                    return Want::Now;
                }
                if !tells_apart {
                    return Want::Soon;
                }
            }
        }
        if looked_at > 0 { Want::Soon } else { Want::Not }
    }

    /// NetworkPolicies are not enforced: pods of other nodes that are on the default network alone are not kept. If it is
    /// an object, they are kept while policies for it need them. To be called before objects are read.
    pub(super) fn leave_out_default(&mut self, network: Option<NetworkRef>) {
        (self.leaves_out_default, self.default_network) = (true, network);
    }

    /// A list of pods of other nodes begins, which are read from here on: with those that only policies for the default
    /// network need, or without.
    pub(super) fn read_pods_of_default(&mut self, has_them: bool) {
        self.has_pods_of_default = has_them;
    }

    /// Whether a policy with pods as peers is for the default network, in the namespace of a pod of this node.
    pub(super) fn wants_pods_of_default(&self) -> bool {
        let mut namespaces: Vec<&str> =
            self.for_default.iter().map(|key| key.name.namespace.as_str()).collect();
        namespaces.dedup();
        namespaces.into_iter().any(|namespace| {
            let there = self.objects.pods.range(ObjectName::new(namespace, "")..);
            let mut there = there.take_while(|(name, _)| name.namespace == namespace);
            there.any(|(_, pod)| !pod.host_network)
        })
    }

    /// Whether a pod of another node is on the default network alone and so no peer of any policy. The server selects by
    /// labels, which do not tell that of all pods.
    fn is_left_out(&self, pod: &RemotePod) -> bool {
        let is_left_out = |place: &Place| match place {
            Place::Default => true,
            Place::Network(network) => {
                !self.has_pods_of_default && self.default_network.as_ref() == Some(network)
            }
        };
        let mut networks = pod.claims().map(|(place, _)| place).peekable();
        self.leaves_out_default && networks.peek().is_some() && networks.all(is_left_out)
    }

    /// Returns the policies of a namespace that have pods as peers.
    fn with_pods_in<'a>(&'a self, namespace: &'a str) -> impl Iterator<Item = &'a Arc<Policy>> {
        let of_kind = [
            (Kind::MultiNetworkPolicy, &self.objects.policies),
            (Kind::NetworkPolicy, &self.objects.network_policies),
        ];
        of_kind.into_iter().flat_map(move |(kind, policies)| {
            let first = Key { kind: kind.word(), name: ObjectName::new(namespace, "") };
            let there = self.with_pods.range(first..);
            let there =
                there.take_while(move |key| key.kind == kind.word() && key.name.namespace == namespace);
            there.filter_map(move |key| policies.get(&key.name))
        })
    }

    /// Whether a definition takes its range from the node, whose object is then needed.
    pub(super) fn wants_own_node(&self) -> bool {
        !self.of_node.is_empty()
    }

    /// Records whether the cluster has other nodes.
    pub(super) fn set_other_nodes(&mut self, has_others: bool) {
        self.is_changed |= self.objects.has_other_nodes != has_others;
        self.objects.has_other_nodes = has_others;
    }

    /// Records the cluster's ranges.
    pub(super) fn set_ranges(&mut self, ranges: ClusterRanges) {
        if self.objects.cluster_ranges.as_deref() != Some(&ranges) {
            self.objects.cluster_ranges = Some(Arc::new(ranges));
            self.is_changed = true;
        }
    }

    /// Stores a new or changed pod that an agent has attached. Returns its name, or `None` if it has none.
    pub(super) fn put_remote(&mut self, json: &RawValue) -> Option<ObjectName> {
        let RemoteMetadata { name, uid, labels, status, ports, beyond } = remote_pod(json)?;
        let written = Written {
            uid: uid.as_deref(),
            labels,
            status: status.as_deref(),
            ports: ports.as_deref(),
            beyond: beyond.as_deref(),
        };
        let pod = RemotePod::read(&name, written, &mut self.interner);
        if self.is_left_out(&pod) {
            self.remove_remote_pod(&name);
            return Some(name);
        }
        let more = pod.claims().count();
        let known = self.objects.remote_pods.get(&name);
        if known.is_none_or(|known| **known != pod) {
            let is_known = known.is_some();
            match self.objects.remote_pods.insert(Arc::new(pod)) {
                Ok(before) => {
                    self.is_changed = true;
                    if self.fits(Content::RemotePods, &name) {
                        self.admitted.insert(Content::RemotePods);
                    }
                    if before.is_some_and(|before| before.claims().count() > more) {
                        self.has_room(Content::RemotePods, &name.namespace);
                    }
                }
                Err(_) => {
                    // A formerly known pod has no attachments any more.
                    self.is_changed |= is_known;
                    self.refuse(Content::RemotePods, &name, 0);
                    if is_known {
                        self.has_room(Content::RemotePods, &name.namespace);
                    }
                }
            }
        }
        Some(name)
    }

    /// Removes a pod that an agent had attached: the pod or its networks are deleted.
    pub(super) fn remove_remote(&mut self, json: &RawValue) {
        if let Some((key, _)) = key(Kind::Pod, json) {
            self.remove_remote_pod(&key.name);
        }
    }

    /// Returns all pods that agents have attached, when a list of them begins.
    pub(super) fn unlisted_remote(&self) -> Unlisted {
        let refused = self.refused.get(&Content::RemotePods).into_iter().flat_map(Refused::names);
        Unlisted { pods: self.objects.remote_pods.clone(), refused: refused.cloned().collect() }
    }

    /// Removes the pods that were not in a complete list.
    pub(super) fn retain_remote(&mut self, unlisted: &Unlisted) {
        let pods = unlisted.pods.iter().map(|pod| pod.object_name());
        for name in pods.chain(unlisted.refused.iter().cloned()) {
            self.remove_remote_pod(&name);
        }
    }

    fn remove_remote_pod(&mut self, name: &ObjectName) {
        self.fits(Content::RemotePods, name);
        if self.objects.remote_pods.remove(name).is_some() {
            self.is_changed = true;
            self.has_room(Content::RemotePods, &name.namespace);
        }
    }

    /// Whether there are changes since the last [`Cache::take_changed`].
    pub(super) fn is_changed(&self) -> bool {
        self.is_changed
    }

    /// Returns the objects, with the problems, if they have changed since the last call.
    pub(super) fn take_changed(&mut self) -> Option<Objects> {
        std::mem::take(&mut self.is_changed).then(|| self.objects())
    }

    fn objects(&self) -> Objects {
        let problem = |(key, message): (&Key, &String)| Problem {
            origin: Origin::Api { kind: key.kind, name: key.name.clone() },
            message: message.clone(),
        };
        Objects { problems: self.problems.iter().map(problem).collect(), ..self.objects.clone() }
    }

    /// Counts the bytes of a definition or policy, unless the kind would exceed its bound.
    fn weigh(&mut self, kind: Kind, key: &Key, bytes: usize) -> Result<(), Exceeded> {
        if kind == Kind::Node && !self.objects.nodes.contains_key(&key.name.name) {
            return budget::NODES_OF_CLUSTER.check(self.objects.nodes.len() + 1);
        }
        let Some(budget) = budget_of(kind) else { return Ok(()) };
        while let Some(other) = self.weights.in_the_way(key, bytes, budget)? {
            self.give_way(kind, &other);
        }
        if self.weights.set(key, bytes) {
            self.has_room(Content::Objects(kind), &key.name.namespace);
        }
        Ok(())
    }
}

/// Whether a rule of the policy has pods as peers.
fn has_pods_as_peers(policy: &Policy) -> bool {
    [Direction::Ingress, Direction::Egress].into_iter().flat_map(|it| policy.rules(it)).any(|rule| {
        matches!(&rule.peers, Peers::Of(peers) if peers.iter().any(|it| matches!(it, Peer::Pods { .. })))
    })
}

/// The watch selects the pods of this node. Removes the networks of a pod that has ended, of which the API
/// server may have thousands. A pod that an agent has attached keeps its status, and a mirror pod the
/// annotations for its static pod.
fn of_this_node(object: Object) -> Object {
    match object {
        Object::Pod(pod) => {
            let mut pod = Arc::unwrap_or_clone(pod);
            pod.on_this_node = true;
            let is_in_use = !pod.is_by_another() || pod.mirror_of.is_some();
            if pod.phase.has_ended() && !is_in_use {
                pod.annotations = BTreeMap::new();
                pod.ports = Vec::new();
            }
            Object::Pod(Arc::new(pod))
        }
        other => other,
    }
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;
