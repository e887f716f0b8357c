//! Who is meant: which policies select an attachment, and which addresses a policy's peers have.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::compile::{Condition, Subject};
use super::manifest::POLICY_FOR_ANNOTATION;
use super::model::{Peer, Policy, Severity};
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
    /// What it is attached to.
    pub network: NetworkRef,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
}

/// Objects and attachments, arranged for the questions that the compiler asks.
#[derive(Debug)]
pub struct Index<'a> {
    objects: &'a Objects,
    namespaces: BTreeMap<&'a str, Namespace<'a>>,
    /// The networks of each policy that its namespace may use.
    usable: BTreeMap<&'a ObjectName, BTreeSet<NetworkRef>>,
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
    addresses: BTreeSet<(NetworkRef, IpAddr)>,
}

impl<'a> Index<'a> {
    /// Arranges everything once. What peers' annotations do not say properly goes to `conditions`.
    ///
    /// A pod with attachments on this node has the addresses of those; of all others the status annotation is
    /// believed. Pods that have ended, and pods on the node's own network, are no peers.
    pub fn new(
        objects: &'a Objects,
        endpoints: &[Endpoint],
        restrictions: &Restrictions,
        conditions: &mut BTreeSet<Condition>,
    ) -> Self {
        let mut local: BTreeMap<&ObjectName, BTreeSet<(NetworkRef, IpAddr)>> = BTreeMap::new();
        for endpoint in endpoints {
            let addresses = endpoint.addresses.iter().map(|address| (endpoint.network.clone(), *address));
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
        let policies = objects.policies.values();
        let usable = policies.map(|p| (&p.name, usable_networks(objects, p, restrictions, conditions)));
        Self { objects, namespaces, usable: usable.collect() }
    }

    /// The policies that select an attachment of `pod` to `network`, in the order of their names. Whether the
    /// namespace may still use the network makes no difference: what is attached stays isolated.
    pub fn selecting(&self, pod: &Pod, network: &NetworkRef) -> Vec<&'a Policy> {
        if pod.host_network {
            return Vec::new();
        }
        let first = ObjectName::new(&pod.name.namespace, "");
        let of_namespace =
            self.objects.policies.range(first..).take_while(|(name, _)| name.namespace == pod.name.namespace);
        of_namespace
            .map(|(_, policy)| policy)
            .filter(|policy| policy.networks.contains(network) && policy.pods.matches(&pod.labels))
            .collect()
    }

    /// The addresses that a peer's selectors mean, on the networks of the policy; none for a block.
    pub fn addresses_of(&self, policy: &Policy, peer: &Peer) -> BTreeSet<IpAddr> {
        let Peer::Pods { namespaces, pods } = peer else { return BTreeSet::new() };
        let in_scope = |(name, namespace): &(&&str, &Namespace<'_>)| match namespaces {
            Some(selector) => selector.matches(&namespace.labels),
            None => **name == policy.name.namespace,
        };
        let selected = self.namespaces.iter().filter(in_scope).flat_map(|(_, namespace)| &namespace.pods);
        selected
            .filter(|peer| pods.matches(&peer.pod.labels))
            .flat_map(|peer| peer.addresses_on(self.peer_networks(policy)))
            .collect()
    }

    /// The networks on which the policy's peers are looked for.
    fn peer_networks<'b>(&'b self, policy: &'b Policy) -> &'b BTreeSet<NetworkRef> {
        self.usable.get(&policy.name).unwrap_or(&policy.networks)
    }

    /// Every address that a pod has on the networks of the policy, with the pod.
    pub fn pods_on(&self, policy: &Policy) -> Vec<(IpAddr, &'a Pod)> {
        let pods = self.namespaces.values().flat_map(|namespace| &namespace.pods);
        pods.flat_map(|peer| peer.addresses_on(self.peer_networks(policy)).map(|address| (address, peer.pod)))
            .collect()
    }
}

impl PeerPod<'_> {
    fn addresses_on(&self, networks: &BTreeSet<NetworkRef>) -> impl Iterator<Item = IpAddr> {
        self.addresses.iter().filter(|(network, _)| networks.contains(network)).map(|(_, address)| *address)
    }
}

/// The networks of a policy that its namespace may use; of the others `conditions` gets to know.
fn usable_networks(
    objects: &Objects,
    policy: &Policy,
    restrictions: &Restrictions,
    conditions: &mut BTreeSet<Condition>,
) -> BTreeSet<NetworkRef> {
    let namespace = policy.name.namespace.as_str();
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
    usable
}

fn published_addresses(pod: &Pod, conditions: &mut BTreeSet<Condition>) -> BTreeSet<(NetworkRef, IpAddr)> {
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
        if let Some(network) = network_of(&entry, &pod.name.namespace) {
            addresses.extend(entry.ips.iter().map(|address| (network.clone(), address.address)));
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
