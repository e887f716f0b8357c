//! Selection: the policies that select an attachment, and the addresses of a policy's peers.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use super::desired::{Condition, Subject};
use crate::error_chain::Chain;
use crate::npwg::{NetworkRef, STATUS_ANNOTATION, StatusEntry, status};
use crate::objects::access::Restrictions;
use crate::objects::labels::Labels;
use crate::objects::policy::POLICY_FOR_ANNOTATION;
use crate::objects::policy::{Peer, Policy, PolicyKind, Severity};
use crate::objects::{ObjectName, Objects, Pod};

/// One attachment of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Number in the kernel's maps.
    pub id: u32,
    /// The pod.
    pub pod: ObjectName,
    /// The networks that it is on.
    pub at: BTreeSet<Place>,
    /// IP addresses.
    pub addresses: Vec<IpAddr>,
    /// Whether DHCP assigns the addresses.
    pub dhcp: bool,
    /// Ethertypes that pass in spite of policies.
    pub ethertypes: Vec<u16>,
}

/// A network as policies name it. The default network can be both.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// The network of a definition, which MultiNetworkPolicies name.
    Network(NetworkRef),
    /// The pod's default network, which NetworkPolicies are about.
    Default,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Network(network) => write!(f, "{network}"),
            Self::Default => f.write_str("the default network"),
        }
    }
}

/// Every pod that can be a peer, by namespace.
#[derive(Debug, Default)]
pub(super) struct Peers {
    namespaces: BTreeMap<String, Namespace>,
}

#[derive(Debug)]
struct Namespace {
    labels: Labels,
    pods: BTreeMap<ObjectName, PeerPod>,
}

/// A pod that can be a peer. Pods that have ended, and pods on the node's own network, cannot.
#[derive(Debug, Clone)]
pub(super) struct PeerPod {
    pod: Arc<Pod>,
    addresses: BTreeSet<(Place, IpAddr)>,
    /// The error in its status annotation.
    unreadable: Option<Condition>,
}

impl PeerPod {
    /// A pod with the addresses of its attachments on this node; a pod without any has the addresses of its status
    /// annotation.
    pub(super) fn new<'e>(pod: &Arc<Pod>, attachments: impl Iterator<Item = &'e Endpoint>) -> Option<Self> {
        if pod.host_network || pod.phase.has_ended() {
            return None;
        }
        let mut attachments = attachments.peekable();
        let (addresses, unreadable) = if attachments.peek().is_some() {
            let of = |endpoint: &'e Endpoint| {
                let on = |place: &'e Place| endpoint.addresses.iter().map(|it| (place.clone(), *it));
                endpoint.at.iter().flat_map(on)
            };
            (attachments.flat_map(of).collect(), None)
        } else {
            match published_addresses(pod) {
                Ok(addresses) => (addresses, None),
                Err(condition) => (BTreeSet::new(), Some(condition)),
            }
        };
        Some(Self { pod: Arc::clone(pod), addresses, unreadable })
    }

    /// Whether the two are the same to policies.
    pub(super) fn is_as(&self, other: &Self) -> bool {
        self.addresses == other.addresses
            && self.pod.labels == other.pod.labels
            && self.pod.ports == other.pod.ports
    }

    pub(super) fn is_on(&self, places: &BTreeSet<Place>) -> bool {
        self.addresses.iter().any(|(place, _)| places.contains(place))
    }

    pub(super) fn labels(&self) -> &Labels {
        &self.pod.labels
    }

    fn addresses_at(&self, places: &BTreeSet<Place>) -> impl Iterator<Item = IpAddr> {
        self.addresses.iter().filter(|(place, _)| places.contains(place)).map(|(_, address)| *address)
    }
}

impl Peers {
    /// Replaces the pod of that name, and returns the one before.
    pub(super) fn replace(
        &mut self,
        name: &ObjectName,
        peer: Option<PeerPod>,
        objects: &Objects,
    ) -> Option<PeerPod> {
        let Some(peer) = peer else {
            let namespace = self.namespaces.get_mut(&name.namespace)?;
            let before = namespace.pods.remove(name);
            if namespace.pods.is_empty() {
                self.namespaces.remove(&name.namespace);
            }
            return before;
        };
        let namespace = self.namespaces.entry(name.namespace.clone()).or_insert_with(|| Namespace {
            labels: objects.namespace_labels(&name.namespace),
            pods: BTreeMap::new(),
        });
        namespace.pods.insert(name.clone(), peer)
    }

    /// Replaces the labels of a namespace, and returns those before if the namespace has peers.
    pub(super) fn relabel(&mut self, namespace: &str, labels: Labels) -> Option<Labels> {
        let namespace = self.namespaces.get_mut(namespace)?;
        Some(std::mem::replace(&mut namespace.labels, labels))
    }

    /// Labels of a namespace that has peers.
    pub(super) fn labels(&self, namespace: &str) -> Option<&Labels> {
        self.namespaces.get(namespace).map(|namespace| &namespace.labels)
    }

    /// The addresses of the pods that a peer selects, on the policy's networks; none for a block.
    pub(super) fn addresses_of(
        &self,
        policy: &Policy,
        peer: &Peer,
        places: &BTreeSet<Place>,
    ) -> impl Iterator<Item = IpAddr> {
        let selectors = match peer {
            Peer::Pods { namespaces, pods } => Some((namespaces, pods)),
            Peer::Block { .. } => None,
        };
        selectors.into_iter().flat_map(move |(namespaces, pods)| {
            let in_scope = move |(name, namespace): &(&String, &Namespace)| match namespaces {
                Some(selector) => selector.matches(&namespace.labels),
                None => *name == policy.namespace(),
            };
            let selected = self.namespaces.iter().filter(in_scope).flat_map(|(_, it)| it.pods.values());
            selected
                .filter(move |peer| pods.matches(&peer.pod.labels))
                .flat_map(move |peer| peer.addresses_at(places))
        })
    }

    /// The number of pods.
    pub(super) fn len(&self) -> usize {
        self.namespaces.values().map(|namespace| namespace.pods.len()).sum()
    }

    /// Every address that a pod has on these networks, with the pod.
    pub(super) fn pods_on(&self, places: &BTreeSet<Place>) -> impl Iterator<Item = (IpAddr, &Pod)> {
        let pods = self.namespaces.values().flat_map(|namespace| namespace.pods.values());
        pods.flat_map(move |peer| peer.addresses_at(places).map(move |address| (address, &*peer.pod)))
    }

    /// The errors in status annotations of peers.
    pub(super) fn conditions(&self) -> impl Iterator<Item = &Condition> {
        let pods = self.namespaces.values().flat_map(|namespace| namespace.pods.values());
        pods.filter_map(|peer| peer.unreadable.as_ref())
    }
}

/// Whether a policy selects an attachment of `pod`. Whether the namespace may still use the network is not asked: an
/// existing attachment stays isolated.
pub(super) fn selects(policy: &Policy, network_policy: bool, pod: &Pod, at: &BTreeSet<Place>) -> bool {
    let is_about = match policy.name.kind {
        PolicyKind::Multi => at
            .iter()
            .any(|place| matches!(place, Place::Network(network) if policy.networks.contains(network))),
        PolicyKind::Network => network_policy && at.contains(&Place::Default),
    };
    !pod.host_network
        && is_about
        && policy.namespace() == pod.name.namespace
        && policy.pods.matches(&pod.labels)
}

/// The policies that select an attachment of `pod`, sorted by name.
pub(crate) fn selecting<'a>(
    objects: &'a Objects,
    network_policy: bool,
    pod: &Pod,
    at: &BTreeSet<Place>,
) -> impl Iterator<Item = &'a Arc<Policy>> {
    let of_namespace = |policies: &'a BTreeMap<ObjectName, Arc<Policy>>, namespace: &str| {
        let first = ObjectName::new(namespace, "");
        let namespace = namespace.to_owned();
        let from_first = policies.range(first..).map(|(_, policy)| policy);
        from_first.take_while(move |policy| policy.namespace() == namespace)
    };
    let namespace = &pod.name.namespace;
    of_namespace(&objects.policies, namespace)
        .chain(of_namespace(&objects.network_policies, namespace))
        .filter(move |policy| selects(policy, network_policy, pod, at))
}

/// The networks of a policy that its namespace may use. For the others a condition is added.
pub(super) fn usable_networks(
    objects: &Objects,
    policy: &Policy,
    restrictions: &Restrictions,
    conditions: &mut Vec<Condition>,
) -> BTreeSet<Place> {
    if policy.name.kind == PolicyKind::Network {
        return BTreeSet::from([Place::Default]);
    }
    let namespace = policy.namespace();
    let labels = objects.namespace_labels(namespace);
    let mut usable = policy.networks.clone();
    usable.retain(|network| {
        let definition = objects.definitions.get(network);
        let checked = restrictions.check_policy(network, definition, namespace, &labels);
        if let Err(forbidden) = &checked {
            conditions.push(Condition {
                object: Subject::Policy(policy.name.clone()),
                severity: Severity::Error,
                message: format!(
                    "annotation {POLICY_FOR_ANNOTATION}: {}: no address there is a peer",
                    Chain(forbidden)
                ),
            });
        }
        checked.is_ok()
    });
    usable.into_iter().map(Place::Network).collect()
}

/// The addresses in a pod's status annotation.
pub(super) fn published_addresses(pod: &Pod) -> Result<BTreeSet<(Place, IpAddr)>, Condition> {
    let Some(annotation) = pod.annotations.get(STATUS_ANNOTATION) else { return Ok(BTreeSet::new()) };
    let entries = status::parse(annotation).map_err(|error| Condition {
        object: Subject::Pod(pod.name.clone()),
        severity: Severity::Error,
        message: format!("is no policy's peer: {}", Chain(&error)),
    })?;
    let mut addresses = BTreeSet::new();
    for entry in entries {
        let network = network_of(&entry, &pod.name.namespace).map(Place::Network);
        for place in network.into_iter().chain(entry.default.then_some(Place::Default)) {
            addresses.extend(entry.ips.iter().map(|address| (place.clone(), address.address)));
        }
    }
    Ok(addresses)
}

/// Before version 1.2 of the standard the namespace could be left out. The default network is often no object
/// at all but a configuration on disk.
fn network_of(entry: &StatusEntry, namespace: &str) -> Option<NetworkRef> {
    match entry.name.split_once('/') {
        Some((namespace, name)) => Some(NetworkRef::new(namespace, name)),
        None if entry.default => None,
        None => Some(NetworkRef::new(namespace, &entry.name)),
    }
}
