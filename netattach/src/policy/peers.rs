//! All pods that can be peers, and the rule by which an address belongs to a peer: all its claimants must
//! be selected.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use super::by_kind::ByKind;
use super::claims::Claims;
use super::desired::{Condition, Subject};
use super::index::{Endpoint, published_addresses};
use crate::objects::budget::FINDINGS;
use crate::objects::labels::Labels;
use crate::objects::policy::{Peer, Policy, Severity};
use crate::objects::remote::RemotePod;
use crate::objects::{ContainerPort, ObjectName, Objects, Place, Pod};

/// Every pod that can be a peer, by namespace, and every pod that claims an address.
#[derive(Debug, Default)]
pub(super) struct Peers {
    namespaces: BTreeMap<String, Namespace>,
    claims: Claims,
    /// Pods of other nodes that could not be read, by name.
    unreadable: BTreeMap<ObjectName, Condition>,
    /// How many times a selector was compared with a pod.
    #[cfg(test)]
    pub(super) compared: std::cell::Cell<usize>,
}

#[derive(Debug)]
struct Namespace {
    labels: Labels,
    pods: BTreeMap<String, Arc<PeerPod>>,
    former: BTreeMap<String, Arc<PeerPod>>,
    /// Pods of other nodes that selectors can select; the objects have them by name.
    remote: ByKind,
}

/// All that is known under one pod's name.
#[derive(Debug, Clone, Default)]
pub(super) struct Known {
    pod: Option<Arc<PeerPod>>,
    /// The attachments of an earlier pod of that name that are not detached yet: their addresses are
    /// allowed for no rule.
    former: Option<Arc<PeerPod>>,
    remote: Option<RemotePeer>,
}

/// A pod of the source, or the attachments on this node of an unknown pod.
#[derive(Debug)]
pub(super) struct PeerPod {
    name: ObjectName,
    /// `None`: unknown.
    pod: Option<Arc<Pod>>,
    /// Sorted.
    addresses: Box<[(Place, IpAddr)]>,
    /// The addresses are those of attachments of this node: its leases decide, and no other pod has them.
    is_attached: bool,
    standing: Standing,
    /// The error in its status annotation.
    unreadable: Option<Condition>,
}

/// The role of a pod with addresses in policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// Selectors select it.
    Peer,
    /// Not known well enough to be selected: its addresses are allowed for no rule.
    Void,
    /// It has ended, or uses the node's netns. Its attachments keep their addresses from pods of other
    /// nodes.
    Ended,
}

/// A pod of another node.
#[derive(Debug, Clone)]
pub(super) struct RemotePeer {
    pod: Arc<RemotePod>,
    /// It could not be read, or another pod has its name: it is not selected, but its addresses count as
    /// claimed.
    is_void: bool,
}

/// A pod that claims an address.
#[derive(Debug, Clone)]
pub(super) enum Claimant {
    /// A pod of the source, or attached to this node.
    Pod(Arc<PeerPod>),
    /// A pod of another node.
    Remote(RemotePeer),
}

impl Known {
    /// Returns what the objects and the attachments of this node contain under that name.
    ///
    /// If a pod of this node and one of another node have the same name, they are either the same pod by
    /// its uid, represented by the pod of this node; or one has replaced the other, and neither is a peer
    /// until one of them is gone.
    pub(super) fn of<'e>(
        name: &ObjectName,
        objects: &Objects,
        attachments: impl Iterator<Item = &'e Endpoint>,
    ) -> Self {
        let pod = objects.pods.get(name);
        let remote = RemotePeer::named(name, objects);
        let is_replaced = pod.is_some() && remote.is_some();
        let (current, former): (Vec<_>, Vec<_>) =
            attachments.partition(|endpoint| pod.is_none_or(|pod| endpoint.is_of(pod)));
        let former = (!former.is_empty()).then(|| PeerPod::new(name, None, false, former.into_iter()));
        Self {
            pod: PeerPod::new(name, pod, is_replaced, current.into_iter()).map(Arc::new),
            former: former.flatten().map(Arc::new),
            remote,
        }
    }

    pub(super) fn claimants(&self) -> impl Iterator<Item = Claimant> {
        let pods = self.pod.iter().chain(&self.former).cloned().map(Claimant::Pod);
        pods.chain(self.remote.iter().cloned().map(Claimant::Remote))
    }

    /// Returns the addresses that pods of this name claim here but not in `other`.
    pub(super) fn addresses_beyond(&self, other: &Self) -> BTreeSet<(Place, IpAddr)> {
        let mut addresses = self.addresses();
        for kept in other.addresses() {
            addresses.remove(&kept);
        }
        addresses
    }

    fn addresses(&self) -> BTreeSet<(Place, IpAddr)> {
        let mut all = BTreeSet::new();
        for claimant in self.claimants() {
            all.extend(claimant.addresses().map(|(place, address)| (place.clone(), address)));
        }
        all
    }

    fn is_nobody(&self) -> bool {
        self.pod.is_none() && self.former.is_none() && self.remote.is_none()
    }

    /// Whether the two are equivalent for policies.
    pub(super) fn is_as(&self, other: &Self) -> bool {
        let are_same = |one: &Option<Arc<PeerPod>>, other: &Option<Arc<PeerPod>>| match (one, other) {
            (Some(one), Some(other)) => one.is_as(other),
            (one, other) => one.is_none() && other.is_none(),
        };
        let pods = are_same(&self.pod, &other.pod) && are_same(&self.former, &other.former);
        pods && match (&self.remote, &other.remote) {
            (Some(one), Some(other)) => {
                let (pod, before) = (&one.pod, &other.pod);
                one.is_void == other.is_void
                    && pod.claims().eq(before.claims())
                    && pod.labels() == before.labels()
                    && pod.ports() == before.ports()
            }
            (one, other) => one.is_none() && other.is_none(),
        }
    }
}

impl PeerPod {
    /// Makes a pod with the addresses of its attachments on this node. A pod without attachments has the
    /// addresses of its status annotation, unless this node's agent has written it.
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
            _ if is_attached => (attachments.flat_map(of).collect::<BTreeSet<_>>(), None),
            None => return None,
            Some(_) if standing == Standing::Ended => return None,
            Some(pod) if !pod.has_what_it_claims() => (BTreeSet::new(), None),
            Some(pod) => match published_addresses(pod) {
                Ok(addresses) => (addresses, None),
                Err(condition) => (BTreeSet::new(), Some(condition)),
            },
        };
        // Most pods have one address, for which a set would allocate eleven entries.
        let addresses = addresses.into_iter().collect();
        Some(Self { name: name.clone(), pod: pod.cloned(), addresses, is_attached, standing, unreadable })
    }

    /// Returns the labels for selectors; `None`: it is not selected.
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

impl RemotePeer {
    /// Makes the peer for a pod whose name no pod of this node has.
    pub(super) fn of(pod: Arc<RemotePod>) -> Self {
        let is_void = pod.unreadable().is_some();
        Self { pod, is_void }
    }

    /// Returns the pod of that name, unless a pod of this node represents it.
    fn named(name: &ObjectName, objects: &Objects) -> Option<Self> {
        let remote = Self::of(Arc::clone(objects.remote_pods.get(name)?));
        match objects.pods.get(name) {
            Some(pod) if remote.pod.has_uid(pod.uid.as_deref()) => None,
            Some(_) => Some(Self { is_void: true, ..remote }),
            None => Some(remote),
        }
    }
}

impl Claimant {
    fn namespace(&self) -> &str {
        match self {
            Self::Pod(pod) => &pod.name.namespace,
            Self::Remote(remote) => remote.pod.namespace(),
        }
    }

    /// Namespace and name.
    pub(super) fn key(&self) -> (&str, &str) {
        match self {
            Self::Pod(pod) => (&pod.name.namespace, &pod.name.name),
            Self::Remote(remote) => (remote.pod.namespace(), remote.pod.name()),
        }
    }

    /// Returns the pod of another node if [`RemotePeer::of`] the pod equals this claimant.
    pub(super) fn plain(&self) -> Option<&Arc<RemotePod>> {
        match self {
            Self::Remote(remote) if remote.is_void == remote.pod.unreadable().is_some() => Some(&remote.pod),
            _ => None,
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

    /// Whether its selection matters: a pod that has ended does not count.
    pub(super) fn counts(&self) -> bool {
        !matches!(self, Self::Pod(pod) if pod.standing == Standing::Ended)
    }

    /// Returns the labels for selectors; `None`: it is not selected.
    fn labels(&self) -> Option<&Labels> {
        match self {
            Self::Pod(pod) => pod.labels(),
            Self::Remote(remote) => (!remote.is_void).then(|| remote.pod.labels()),
        }
    }

    /// The ports that it declares.
    pub(super) fn ports(&self) -> &[ContainerPort] {
        match self {
            Self::Pod(pod) if pod.standing == Standing::Peer => pod.pod.as_ref().map_or(&[], |it| &it.ports),
            Self::Remote(remote) if !remote.is_void => remote.pod.ports(),
            _ => &[],
        }
    }

    pub(super) fn addresses(&self) -> impl Iterator<Item = (&Place, IpAddr)> {
        let (own, remote) = match self {
            Self::Pod(pod) => (Some(pod.addresses.iter()), None),
            Self::Remote(remote) => (None, Some(remote.pod.claims())),
        };
        let own = own.into_iter().flatten().map(|(place, address)| (place, *address));
        own.chain(remote.into_iter().flatten())
    }
}

impl Peers {
    /// Returns what is known under that name: the last argument of [`Peers::replace`] for these objects.
    pub(super) fn known(&self, name: &ObjectName, objects: &Objects) -> Known {
        let remote = RemotePeer::named(name, objects);
        let Some(namespace) = self.namespaces.get(&name.namespace) else {
            return Known { remote, ..Known::default() };
        };
        Known {
            pod: namespace.pods.get(&name.name).cloned(),
            former: namespace.former.get(&name.name).cloned(),
            remote,
        }
    }

    /// Replaces what is known under that name.
    pub(super) fn replace(&mut self, name: &ObjectName, before: &Known, now: &Known, objects: &Objects) {
        for before in before.claimants() {
            self.claims.remove(&before);
        }
        for claimant in now.claimants() {
            self.claims.add(&claimant);
        }
        match now.remote.as_ref().and_then(|remote| remote.pod.unreadable()) {
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
            remote: ByKind::default(),
        });
        match &now.pod {
            Some(pod) => drop(namespace.pods.insert(name.name.clone(), Arc::clone(pod))),
            None => drop(namespace.pods.remove(&name.name)),
        }
        match &now.former {
            Some(former) => drop(namespace.former.insert(name.name.clone(), Arc::clone(former))),
            None => drop(namespace.former.remove(&name.name)),
        }
        let selectable =
            |known: &Known| known.remote.as_ref().filter(|it| !it.is_void).map(|it| Arc::clone(&it.pod));
        if let Some(before) = selectable(before) {
            namespace.remote.remove(before);
        }
        if let Some(now) = selectable(now) {
            namespace.remote.insert(now);
        }
        if namespace.pods.is_empty() && namespace.former.is_empty() && namespace.remote.is_empty() {
            self.namespaces.remove(&name.namespace);
        }
    }

    /// Returns the pods known under one name, and those that share an address with them: a change affects
    /// the policies that select any of these.
    pub(super) fn concerned(&self, known: &Known) -> Vec<Claimant> {
        let mut concerned: Vec<Claimant> = known.claimants().collect();
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
        #[cfg(test)]
        self.compared.update(|compared| compared + 1);
        let Peer::Pods { namespaces, pods } = peer else { return false };
        let in_scope = match namespaces {
            Some(selector) => {
                self.namespaces.get(claimant.namespace()).is_some_and(|it| selector.matches(&it.labels))
            }
            None => claimant.namespace() == policy.namespace(),
        };
        in_scope && claimant.labels().is_some_and(|labels| pods.matches(labels))
    }

    /// Returns the number of namespaces and of pods of the source: the most comparisons of a selector,
    /// besides those with labels of pods of other nodes.
    pub(super) fn len(&self) -> usize {
        self.namespaces.values().map(|namespace| 1 + namespace.pods.len()).sum()
    }

    /// The same with the label sets of pods of other nodes: what the cost of a selector grows with.
    pub(super) fn charged(&self) -> usize {
        self.len()
            + self.namespaces.values().map(|namespace| namespace.remote.number_of_kinds()).sum::<usize>()
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

    /// Finds the addresses that the pods selected by a peer claim on the policy's networks; none for a
    /// block. `found` returns the comparisons that an address takes. Returns all of these, and the comparisons with
    /// pods of other nodes and different label sets of theirs; ends once they are more than `most`.
    pub(super) fn claims_of(
        &self,
        policy: &Policy,
        peer: &Peer,
        places: &BTreeSet<Place>,
        most: usize,
        mut found: impl FnMut(&Place, IpAddr) -> usize,
    ) -> usize {
        let Peer::Pods { pods: selector, .. } = peer else { return 0 };
        let weight = selector.weight().max(1);
        let mut compared = 0;
        for namespace in self.in_scope(policy, peer) {
            let own = namespace.pods.values();
            let selected = own.filter(|pod| pod.labels().is_some_and(|labels| selector.matches(labels)));
            for (place, address) in selected.flat_map(|pod| pod.addresses.iter()) {
                if compared > most {
                    return compared;
                }
                compared += 1 + if places.contains(place) { found(place, *address) } else { 0 };
            }
            for (first, alike) in namespace.remote.kinds() {
                if compared > most {
                    return compared;
                }
                compared += weight;
                if !selector.matches(first.labels()) {
                    continue;
                }
                for pod in alike {
                    compared += 1;
                    for (place, address) in pod.claims().filter(|(place, _)| places.contains(place)) {
                        if compared > most {
                            return compared;
                        }
                        compared += found(place, address);
                    }
                }
            }
        }
        compared
    }

    /// Returns which pods claim which address, and which of them have it.
    pub(super) fn claims(&self) -> &Claims {
        &self.claims
    }

    /// Returns the problems of peers.
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

#[cfg(test)]
#[path = "peers_tests.rs"]
mod tests;
