//! Every pod that can be a peer, and the rule by which an address belongs to it: all who claim it have to be selected.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use super::claims::Claims;
use super::desired::{Condition, Subject};
use super::index::{Endpoint, published_addresses};
use crate::objects::budget::FINDINGS;
use crate::objects::labels::Labels;
use crate::objects::policy::{Peer, Policy, Severity};
use crate::objects::remote::{RemotePod, Uid};
use crate::objects::{ContainerPort, ObjectName, Objects, Place, Pod};

/// Every pod that can be a peer, by namespace, and every pod that claims an address.
#[derive(Debug, Default)]
pub(super) struct Peers {
    namespaces: BTreeMap<String, Namespace>,
    claims: Claims,
    /// Pods of other nodes that could not be read, by name.
    unreadable: BTreeMap<ObjectName, Condition>,
}

#[derive(Debug)]
struct Namespace {
    labels: Labels,
    pods: BTreeMap<String, Arc<PeerPod>>,
    former: BTreeMap<String, Arc<PeerPod>>,
    remote: BTreeSet<RemotePeer>,
    /// The same, by their labels: a selector is compared once with labels that many pods share.
    by_labels: BTreeSet<Grouped>,
}

/// A pod of another node among those with the same labels; `None` is behind all of them.
#[derive(Debug, PartialEq, Eq)]
struct Grouped {
    labels: usize,
    pod: Option<RemotePeer>,
}

/// Everything that is known under one pod's name.
#[derive(Debug, Clone, Default)]
pub(super) struct Known {
    pod: Option<Arc<PeerPod>>,
    /// The attachments of an earlier pod of that name, which are not detached yet: nobody is allowed by their addresses.
    former: Option<Arc<PeerPod>>,
    remote: Option<RemotePeer>,
}

/// A pod of the source, or the attachments of this node whose pod is not known.
#[derive(Debug)]
pub(super) struct PeerPod {
    name: ObjectName,
    /// `None`: unknown.
    pod: Option<Arc<Pod>>,
    addresses: BTreeSet<(Place, IpAddr)>,
    /// The addresses are those of attachments of this node: its leases decide, and nobody else has them.
    is_attached: bool,
    standing: Standing,
    /// The error in its status annotation.
    unreadable: Option<Condition>,
}

/// What a pod with addresses is to policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// Selectors select it.
    Peer,
    /// Not known well enough to be selected: nobody is allowed by its addresses.
    Void,
    /// It has ended, or is on the node's own network. Its attachments keep their addresses from pods of other nodes.
    Ended,
}

/// A pod of another node. Ordered by its name, within a namespace.
#[derive(Debug, Clone)]
pub(super) struct RemotePeer {
    pod: Arc<RemotePod>,
    /// It could not be read, or another pod has its name: it is not selected, but its addresses count as claimed.
    is_void: bool,
}

/// A pod that claims an address.
#[derive(Debug, Clone)]
pub(super) enum Claimant {
    /// Of the source, or attached to this node.
    Pod(Arc<PeerPod>),
    /// Of another node.
    Remote(RemotePeer),
}

impl Known {
    /// What the objects and the attachments of this node say under that name.
    ///
    /// If there is a pod of this node and one of another under one name, they are the same pod by its uid, which the
    /// pod of this node stands for; or one has replaced the other, and neither is a peer until one of them is gone.
    pub(super) fn of<'e>(
        name: &ObjectName,
        objects: &Objects,
        attachments: impl Iterator<Item = &'e Endpoint>,
    ) -> Self {
        let (pod, remote) = (objects.pods.get(name), objects.remote_pods.get(name));
        let is_same = |pod: &Pod, remote: &RemotePod| pod.uid.as_deref().map(Uid::new) == remote.uid;
        let is_replaced = matches!((pod, remote), (Some(pod), Some(remote)) if !is_same(pod, remote));
        let remote = remote.filter(|_| pod.is_none() || is_replaced).map(|remote| RemotePeer {
            pod: Arc::clone(remote),
            is_void: is_replaced || remote.unreadable.is_some(),
        });
        let (current, former): (Vec<_>, Vec<_>) =
            attachments.partition(|endpoint| pod.is_none_or(|pod| endpoint.is_of(pod)));
        let former = (!former.is_empty()).then(|| PeerPod::new(name, None, false, former.into_iter()));
        Self {
            pod: PeerPod::new(name, pod, is_replaced, current.into_iter()).map(Arc::new),
            former: former.flatten().map(Arc::new),
            remote,
        }
    }

    fn claimants(&self) -> impl Iterator<Item = Claimant> {
        let pods = self.pod.iter().chain(&self.former).cloned().map(Claimant::Pod);
        pods.chain(self.remote.iter().cloned().map(Claimant::Remote))
    }

    fn is_nobody(&self) -> bool {
        self.pod.is_none() && self.former.is_none() && self.remote.is_none()
    }

    /// Whether the two are the same to policies.
    fn is_as(&self, other: &Self) -> bool {
        let are_same = |one: &Option<Arc<PeerPod>>, other: &Option<Arc<PeerPod>>| match (one, other) {
            (Some(one), Some(other)) => one.is_as(other),
            (one, other) => one.is_none() && other.is_none(),
        };
        let pods = are_same(&self.pod, &other.pod) && are_same(&self.former, &other.former);
        pods && match (&self.remote, &other.remote) {
            (Some(one), Some(other)) => {
                let (pod, before) = (&one.pod, &other.pod);
                one.is_void == other.is_void
                    && pod.addresses == before.addresses
                    && pod.labels == before.labels
                    && pod.ports == before.ports
            }
            (one, other) => one.is_none() && other.is_none(),
        }
    }
}

impl PeerPod {
    /// A pod with the addresses of its attachments on this node. A pod without any has the addresses of its status
    /// annotation, unless the source knows that it is on this node.
    fn new<'e>(
        name: &ObjectName,
        pod: Option<&Arc<Pod>>,
        is_replaced: bool,
        attachments: impl Iterator<Item = &'e Endpoint>,
    ) -> Option<Self> {
        let mut attachments = attachments.peekable();
        let is_attached = attachments.peek().is_some();
        let standing = match pod {
            None => Standing::Void,
            Some(pod) if pod.host_network || pod.phase.has_ended() => Standing::Ended,
            Some(_) if is_replaced => Standing::Void,
            Some(_) => Standing::Peer,
        };
        let of = |endpoint: &'e Endpoint| {
            let on = |place: &'e Place| endpoint.addresses.iter().map(|it| (place.clone(), *it));
            endpoint.at.iter().flat_map(on)
        };
        let (addresses, unreadable) = match pod {
            _ if is_attached => (attachments.flat_map(of).collect(), None),
            None => return None,
            Some(_) if standing == Standing::Ended => return None,
            Some(pod) if pod.on_this_node => (BTreeSet::new(), None),
            Some(pod) => match published_addresses(pod) {
                Ok(addresses) => (addresses, None),
                Err(condition) => (BTreeSet::new(), Some(condition)),
            },
        };
        Some(Self { name: name.clone(), pod: pod.cloned(), addresses, is_attached, standing, unreadable })
    }

    /// The labels that selectors see; `None`: it is not selected.
    fn labels(&self) -> Option<&Labels> {
        self.pod.as_ref().filter(|_| self.standing == Standing::Peer).map(|pod| &pod.labels)
    }

    fn is_as(&self, other: &Self) -> bool {
        let relevant = |it: &Self| (it.is_attached, it.standing, it.unreadable.is_some());
        relevant(self) == relevant(other)
            && self.addresses == other.addresses
            && match (&self.pod, &other.pod) {
                (Some(one), Some(other)) => one.labels == other.labels && one.ports == other.ports,
                (one, other) => one.is_none() && other.is_none(),
            }
    }
}

impl Claimant {
    /// Namespace and name.
    pub(super) fn key(&self) -> (&str, &str) {
        match self {
            Self::Pod(pod) => (&pod.name.namespace, &pod.name.name),
            Self::Remote(remote) => remote.pod.key(),
        }
    }

    pub(super) fn object_name(&self) -> ObjectName {
        let (namespace, name) = self.key();
        ObjectName::new(namespace, name)
    }

    /// Whether the two are one value.
    pub(super) fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Pod(one), Self::Pod(other)) => Arc::ptr_eq(one, other),
            (Self::Remote(one), Self::Remote(other)) => Arc::ptr_eq(&one.pod, &other.pod),
            _ => false,
        }
    }

    /// Whether attachments of this node have its addresses.
    pub(super) fn is_attached(&self) -> bool {
        matches!(self, Self::Pod(pod) if pod.is_attached)
    }

    /// Whether selecting it matters: not of a pod that has ended.
    pub(super) fn counts(&self) -> bool {
        !matches!(self, Self::Pod(pod) if pod.standing == Standing::Ended)
    }

    /// The labels that selectors see; `None`: it is not selected.
    fn labels(&self) -> Option<&Labels> {
        match self {
            Self::Pod(pod) => pod.labels(),
            Self::Remote(remote) => (!remote.is_void).then_some(&*remote.pod.labels),
        }
    }

    /// The ports that it declares.
    pub(super) fn ports(&self) -> &[ContainerPort] {
        match self {
            Self::Pod(pod) if pod.standing == Standing::Peer => pod.pod.as_ref().map_or(&[], |it| &it.ports),
            Self::Remote(remote) if !remote.is_void => &remote.pod.ports,
            _ => &[],
        }
    }

    pub(super) fn addresses(&self) -> impl Iterator<Item = (&Place, IpAddr)> {
        static NONE: BTreeSet<(Place, IpAddr)> = BTreeSet::new();
        let (own, remote) = match self {
            Self::Pod(pod) => (&pod.addresses, &[][..]),
            Self::Remote(remote) => (&NONE, &*remote.pod.addresses),
        };
        let own = own.iter().map(|(place, address)| (place, *address));
        own.chain(remote.iter().map(|(place, address)| (&**place, *address)))
    }

    pub(super) fn is_on(&self, places: &BTreeSet<Place>) -> bool {
        self.addresses().any(|(place, _)| places.contains(place))
    }
}

impl Peers {
    /// Whether this is what is known under that name, as far as policies are concerned.
    pub(super) fn has(&self, name: &ObjectName, known: &Known) -> bool {
        self.known(name).is_as(known)
    }

    fn known(&self, name: &ObjectName) -> Known {
        let Some(namespace) = self.namespaces.get(&name.namespace) else { return Known::default() };
        let remote = namespace.remote.get(name.name.as_str()).cloned();
        Known {
            pod: namespace.pods.get(&name.name).cloned(),
            former: namespace.former.get(&name.name).cloned(),
            remote,
        }
    }

    /// Replaces what is known under that name.
    pub(super) fn replace(&mut self, name: &ObjectName, now: Known, objects: &Objects) {
        for before in self.known(name).claimants() {
            self.claims.remove(&before);
        }
        for claimant in now.claimants() {
            self.claims.add(&claimant);
        }
        match now.remote.as_ref().and_then(|remote| remote.pod.unreadable.as_ref()) {
            Some(why) => drop(self.unreadable.insert(name.clone(), unreadable(name, why))),
            None => drop(self.unreadable.remove(name)),
        }
        if now.is_nobody() && !self.namespaces.contains_key(&name.namespace) {
            return;
        }
        let namespace = self.namespaces.entry(name.namespace.clone()).or_insert_with(|| Namespace {
            labels: objects.namespace_labels(&name.namespace),
            pods: BTreeMap::new(),
            former: BTreeMap::new(),
            remote: BTreeSet::new(),
            by_labels: BTreeSet::new(),
        });
        match now.pod {
            Some(pod) => drop(namespace.pods.insert(name.name.clone(), pod)),
            None => drop(namespace.pods.remove(&name.name)),
        }
        match now.former {
            Some(former) => drop(namespace.former.insert(name.name.clone(), former)),
            None => drop(namespace.former.remove(&name.name)),
        }
        if let Some(before) = namespace.remote.take(name.name.as_str()) {
            namespace.by_labels.remove(&Grouped::of(before));
        }
        if let Some(remote) = now.remote {
            namespace.by_labels.insert(Grouped::of(remote.clone()));
            namespace.remote.insert(remote);
        }
        if namespace.pods.is_empty() && namespace.former.is_empty() && namespace.remote.is_empty() {
            self.namespaces.remove(&name.namespace);
        }
    }

    /// What is known under a name, and who shares an address with it: a change of it concerns the policies that mean
    /// any of them.
    pub(super) fn concerned(&self, name: &ObjectName) -> Vec<Claimant> {
        let mut concerned: Vec<Claimant> = self.known(name).claimants().collect();
        let mut seen = BTreeSet::new();
        for at in 0..concerned.len() {
            let claimant = concerned[at].clone();
            for sharer in claimant.addresses().flat_map(|(place, it)| self.claims.concerned(place, it)) {
                if seen.insert(sharer.key()) && sharer.key() != claimant.key() {
                    concerned.push(sharer.clone());
                }
            }
        }
        concerned
    }

    /// Replaces the labels of a namespace, and returns those before if the namespace has peers.
    pub(super) fn relabel(&mut self, namespace: &str, labels: Labels) -> Option<Labels> {
        let namespace = self.namespaces.get_mut(namespace)?;
        Some(std::mem::replace(&mut namespace.labels, labels))
    }

    /// Whether a peer of a rule selects a pod; a block selects none.
    pub(super) fn selects(&self, policy: &Policy, peer: &Peer, claimant: &Claimant) -> bool {
        let Peer::Pods { namespaces, pods } = peer else { return false };
        let in_scope = match namespaces {
            Some(selector) => {
                self.namespaces.get(claimant.key().0).is_some_and(|it| selector.matches(&it.labels))
            }
            None => claimant.key().0 == policy.namespace(),
        };
        in_scope && claimant.labels().is_some_and(|labels| pods.matches(labels))
    }

    /// The number of namespaces, and of pods of the source: what a selector is compared with at most, beside labels of
    /// pods of other nodes.
    pub(super) fn len(&self) -> usize {
        self.namespaces.values().map(|namespace| 1 + namespace.pods.len()).sum()
    }

    fn in_scope(&self, policy: &Policy, peer: &Peer) -> impl Iterator<Item = &Namespace> {
        let (own, selector) = match peer {
            Peer::Pods { namespaces: None, .. } => (self.namespaces.get(policy.namespace()), None),
            Peer::Pods { namespaces, .. } => (None, namespaces.as_ref()),
            Peer::Block { .. } => (None, None),
        };
        let all = selector.into_iter().flat_map(|selector| {
            self.namespaces.values().filter(move |namespace| selector.matches(&namespace.labels))
        });
        own.into_iter().chain(all)
    }

    /// Finds the addresses that the pods that a peer selects claim on the policy's networks; none for a block. Returns
    /// how many pods of other nodes, and different labels of theirs, were looked at.
    pub(super) fn claims_of(
        &self,
        policy: &Policy,
        peer: &Peer,
        places: &BTreeSet<Place>,
        mut found: impl FnMut(&Place, IpAddr),
    ) -> usize {
        let Peer::Pods { pods: selector, .. } = peer else { return 0 };
        let mut looked_at = 0;
        for namespace in self.in_scope(policy, peer) {
            for pod in namespace.pods.values() {
                if pod.labels().is_some_and(|labels| selector.matches(labels)) {
                    let there = pod.addresses.iter().filter(|(place, _)| places.contains(place));
                    there.for_each(|(place, address)| found(place, *address));
                }
            }
            let mut next = namespace.by_labels.first();
            while let Some(Grouped { labels, pod: Some(first) }) = next {
                let end = Grouped { labels: *labels, pod: None };
                looked_at += 1;
                if selector.matches(&first.pod.labels) {
                    let start = Grouped { labels: *labels, pod: Some(first.clone()) };
                    let group = namespace.by_labels.range(&start..&end);
                    for remote in group.filter_map(|it| it.pod.as_ref()).filter(|it| !it.is_void) {
                        looked_at += 1;
                        let claims = remote.pod.addresses.iter();
                        let there = claims.filter(|(place, _)| places.contains(&**place));
                        there.for_each(|(place, address)| found(place, *address));
                    }
                }
                next = namespace.by_labels.range(end..).next();
            }
        }
        looked_at
    }

    /// Who claims which address, and who of them have it.
    pub(super) fn claims(&self) -> &Claims {
        &self.claims
    }

    /// What is wrong with peers.
    pub(super) fn conditions(&self) -> Vec<Condition> {
        let pods = self.namespaces.values().flat_map(|namespace| namespace.pods.values());
        let of_pods = pods.filter_map(|pod| pod.unreadable.clone());
        let of_remote = self.unreadable.values().take(FINDINGS).cloned();
        of_pods.chain(of_remote).chain(self.claims.conditions()).collect()
    }
}

fn unreadable(name: &ObjectName, why: &str) -> Condition {
    Condition {
        object: Subject::Pod(name.clone()),
        severity: Severity::Error,
        message: format!("is no policy's peer: {why}"),
    }
}

impl Grouped {
    fn of(pod: RemotePeer) -> Self {
        Self { labels: Arc::as_ptr(&pod.pod.labels).addr(), pod: Some(pod) }
    }
}

impl PartialOrd for Grouped {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Grouped {
    fn cmp(&self, other: &Self) -> Ordering {
        self.labels.cmp(&other.labels).then_with(|| match (&self.pod, &other.pod) {
            (Some(one), Some(other)) => one.cmp(other),
            (one, other) => one.is_none().cmp(&other.is_none()),
        })
    }
}

impl Borrow<str> for RemotePeer {
    fn borrow(&self) -> &str {
        &self.pod.name
    }
}

impl PartialEq for RemotePeer {
    fn eq(&self, other: &Self) -> bool {
        self.pod.name == other.pod.name
    }
}

impl Eq for RemotePeer {}

impl PartialOrd for RemotePeer {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for RemotePeer {
    fn cmp(&self, other: &Self) -> Ordering {
        self.pod.name.cmp(&other.pod.name)
    }
}

#[cfg(test)]
#[path = "peers_tests.rs"]
mod tests;
