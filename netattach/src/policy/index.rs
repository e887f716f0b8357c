//! Who is meant: which policies select an attachment, and which addresses a policy's peers have.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use super::compile::{Condition, Options, Subject};
use super::manifest::POLICY_FOR_ANNOTATION;
use super::model::{Peer, Policy, PolicyKind, PolicyName, Severity};
use super::selector::Labels;
use crate::npwg::{NetworkRef, Restrictions, STATUS_ANNOTATION, StatusEntry, status};
use crate::report::Chain;
use crate::source::objects::{ObjectName, Objects, Pod};

/// One attachment of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Its number in the kernel's tables.
    pub id: u32,
    /// Whose it is.
    pub pod: ObjectName,
    /// Where.
    pub at: BTreeSet<Place>,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// Whether its addresses come by DHCP.
    pub dhcp: bool,
}

/// A network as policies mean it. The default network can be both.
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

/// Objects and attachments, arranged for the questions that the compiler asks.
#[derive(Debug)]
pub struct Index<'a> {
    objects: &'a Objects,
    namespaces: BTreeMap<&'a str, Namespace<'a>>,
    /// Whether NetworkPolicies count.
    network_policy: bool,
    /// Where each policy's peers are looked for: the networks that its namespace may use.
    usable: BTreeMap<&'a PolicyName, BTreeSet<Place>>,
}

#[derive(Debug)]
struct Namespace<'a> {
    labels: Labels,
    pods: Vec<PeerPod<'a>>,
}

/// A pod that can be a peer.
#[derive(Debug)]
struct PeerPod<'a> {
    pod: &'a Pod,
    addresses: BTreeSet<(Place, IpAddr)>,
}

impl<'a> Index<'a> {
    /// Arranges everything once. What peers' annotations do not say properly goes to `conditions`.
    ///
    /// A pod with attachments on this node has the addresses of those; of all others the status annotation is
    /// believed. Pods that have ended, and pods on the node's own network, are no peers.
    pub fn new(
        objects: &'a Objects,
        endpoints: &[Endpoint],
        options: &Options,
        conditions: &mut BTreeSet<Condition>,
    ) -> Self {
        let mut local: BTreeMap<&ObjectName, BTreeSet<(Place, IpAddr)>> = BTreeMap::new();
        for endpoint in endpoints {
            let of =
                |place: &Place| endpoint.addresses.iter().map(|address| (place.clone(), *address)).collect();
            let addresses = endpoint.at.iter().flat_map(|place| -> Vec<_> { of(place) });
            local.entry(&endpoint.pod).or_default().extend(addresses);
        }
        let mut namespaces: BTreeMap<&str, Namespace<'_>> = BTreeMap::new();
        for pod in objects.pods.values().filter(|pod| !pod.host_network && !pod.phase.has_ended()) {
            let addresses = match local.remove(&pod.name) {
                Some(addresses) => addresses,
                None => published_addresses(pod, conditions),
            };
            let namespace = pod.name.namespace.as_str();
            let entry = namespaces.entry(namespace).or_insert_with(|| Namespace {
                labels: objects.namespace_labels(namespace),
                pods: Vec::new(),
            });
            entry.pods.push(PeerPod { pod, addresses });
        }
        let network_policy = options.network_policy;
        let mut index = Self { objects, namespaces, network_policy, usable: BTreeMap::new() };
        for policy in index.policies() {
            let usable = usable_networks(objects, policy, &options.restrictions, conditions);
            index.usable.insert(&policy.name, usable);
        }
        index
    }

    /// Every policy that counts.
    pub fn policies(&self) -> impl Iterator<Item = &'a Policy> + use<'a> {
        let objects = self.objects;
        let network = self.network_policy.then(|| objects.network_policies.values());
        objects.policies.values().chain(network.into_iter().flatten())
    }

    /// The policies that select an attachment of `pod`, in the order of their names. Whether the namespace may still
    /// use the network makes no difference: what is attached stays isolated.
    pub fn selecting(&self, pod: &Pod, at: &BTreeSet<Place>) -> Vec<&'a Policy> {
        selecting(self.objects, self.network_policy, pod, at)
    }

    /// The addresses that a peer's selectors mean, on the networks of the policy; none for a block.
    pub fn addresses_of(&self, policy: &Policy, peer: &Peer) -> BTreeSet<IpAddr> {
        let Peer::Pods { namespaces, pods } = peer else { return BTreeSet::new() };
        let in_scope = |(name, namespace): &(&&str, &Namespace<'_>)| match namespaces {
            Some(selector) => selector.matches(&namespace.labels),
            None => **name == policy.namespace(),
        };
        let selected = self.namespaces.iter().filter(in_scope).flat_map(|(_, namespace)| &namespace.pods);
        selected
            .filter(|peer| pods.matches(&peer.pod.labels))
            .flat_map(|peer| peer.addresses_at(self.places_of(policy)))
            .collect()
    }

    /// Where the policy's peers are looked for.
    fn places_of(&self, policy: &Policy) -> &BTreeSet<Place> {
        static NOWHERE: BTreeSet<Place> = BTreeSet::new();
        self.usable.get(&policy.name).unwrap_or(&NOWHERE)
    }

    /// Every address that a pod has on the networks of the policy, with the pod.
    pub fn pods_on(&self, policy: &Policy) -> Vec<(IpAddr, &'a Pod)> {
        let pods = self.namespaces.values().flat_map(|namespace| &namespace.pods);
        pods.flat_map(|peer| peer.addresses_at(self.places_of(policy)).map(|address| (address, peer.pod)))
            .collect()
    }
}

impl PeerPod<'_> {
    fn addresses_at(&self, places: &BTreeSet<Place>) -> impl Iterator<Item = IpAddr> {
        self.addresses.iter().filter(|(place, _)| places.contains(place)).map(|(_, address)| *address)
    }
}

/// As [`Index::selecting`], for a single question.
pub fn selecting<'a>(
    objects: &'a Objects,
    network_policy: bool,
    pod: &Pod,
    at: &BTreeSet<Place>,
) -> Vec<&'a Policy> {
    if pod.host_network {
        return Vec::new();
    }
    let namespace = &pod.name.namespace;
    let of_namespace = |policies: &'a BTreeMap<ObjectName, Policy>| {
        policies
            .range(ObjectName::new(namespace, "")..)
            .map(|(_, policy)| policy)
            .take_while(move |policy| policy.namespace() == namespace)
    };
    let is_about = |policy: &Policy| match policy.name.kind {
        PolicyKind::Multi => at
            .iter()
            .any(|place| matches!(place, Place::Network(network) if policy.networks.contains(network))),
        PolicyKind::Network => network_policy && at.contains(&Place::Default),
    };
    of_namespace(&objects.policies)
        .chain(of_namespace(&objects.network_policies))
        .filter(|policy| is_about(policy) && policy.pods.matches(&pod.labels))
        .collect()
}

/// The networks of a policy that its namespace may use; of the others `conditions` gets to know.
fn usable_networks(
    objects: &Objects,
    policy: &Policy,
    restrictions: &Restrictions,
    conditions: &mut BTreeSet<Condition>,
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
            conditions.insert(Condition {
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

pub(super) fn published_addresses(
    pod: &Pod,
    conditions: &mut BTreeSet<Condition>,
) -> BTreeSet<(Place, IpAddr)> {
    let Some(annotation) = pod.annotations.get(STATUS_ANNOTATION) else { return BTreeSet::new() };
    let entries = match status::parse(annotation) {
        Ok(entries) => entries,
        Err(error) => {
            conditions.insert(Condition {
                object: Subject::Pod(pod.name.clone()),
                severity: Severity::Error,
                message: format!("is no policy's peer: {}", Chain(&error)),
            });
            return BTreeSet::new();
        }
    };
    let mut addresses = BTreeSet::new();
    for entry in entries {
        let network = network_of(&entry, &pod.name.namespace).map(Place::Network);
        for place in network.into_iter().chain(entry.default.then_some(Place::Default)) {
            addresses.extend(entry.ips.iter().map(|address| (place.clone(), address.address)));
        }
    }
    addresses
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
