//! The object model: pods, namespaces, definitions and policies as every source provides them. Independent
//! of API types, and immutable.
//!
//! A [`policy`] selects pods by [`labels`]; [`budget`] limits its size, `policy_memory` estimates its
//! memory, and users of the command line select pods by a [`label_query`]. `unknown_keys` reads structs
//! that collect unknown keys. [`access`] decides which namespaces may use a network, which is a
//! `definition`. Pods of other nodes are reduced to what makes them peers of policies ([`remote`]):
//! [`remote_pods`] is the map of all of them, [`interner`] holds the values that they share, `packed` the
//! others. Nodes are reduced to what the network between them needs ([`node`]).

pub mod access;
pub mod budget;
mod definition;
pub mod interner;
pub mod label_query;
pub mod labels;
pub mod node;
mod packed;
pub mod policy;
mod policy_memory;
pub mod remote;
pub mod remote_pods;
pub(crate) mod unknown_keys;

use std::collections::{BTreeMap, btree_map};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Arc, Weak};

use serde::{Deserialize, Serialize};

use crate::npwg::NetworkRef;
use crate::npwg::selection::PortProtocol;
pub use crate::objects::definition::Definition;
use crate::objects::labels::Labels;
pub use crate::objects::node::{ClusterRanges, Node};
use crate::objects::policy::Policy;
use crate::objects::remote::{ATTACHED_LABEL, BY_ANOTHER};
use crate::objects::remote_pods::RemotePods;

/// Label that the API server sets on every namespace: its name.
pub const NAMESPACE_NAME_LABEL: &str = "kubernetes.io/metadata.name";

/// One consistent snapshot of all objects. Unchanged objects are the same values in the next snapshot, so changes are
/// found by comparing addresses.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Objects {
    /// Pods of this node. A source that does not know the node of a pod has all of them here.
    pub pods: Shared<ObjectName, Arc<Pod>>,
    /// Pods of other nodes.
    pub remote_pods: RemotePods,
    /// Labels of the namespaces that have a manifest. Use [`Objects::namespace_labels`], which also covers the others.
    pub namespaces: Shared<String, Labels>,
    /// NetworkAttachmentDefinitions.
    pub definitions: Shared<NetworkRef, Arc<Definition>>,
    /// MultiNetworkPolicies, each with its own problems.
    pub policies: Shared<ObjectName, Arc<Policy>>,
    /// NetworkPolicies, which are enforced only if the agent's settings enable them.
    pub network_policies: Shared<ObjectName, Arc<Policy>>,
    /// Nodes, including this one: those that the agent's own network connects, or none if they are not needed.
    pub nodes: Shared<String, Arc<Node>>,
    /// Whether the cluster is known to have other nodes.
    pub has_other_nodes: bool,
    /// The cluster's ranges; `None` if they are not needed, or not known yet.
    pub cluster_ranges: Option<Arc<ClusterRanges>>,
    /// Problems found while reading.
    pub problems: Vec<Problem>,
    /// Which inputs of policies are not known yet.
    pub unknown: Unknown,
}

/// Inputs that a source does not know yet although its snapshot counts as complete. A source of manifests
/// knows all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Unknown {
    /// Pods of other nodes are needed, and have not all been read once: policies that select pods have
    /// fewer peers than they should.
    pub remote_pods: bool,
    /// The server has reported a kind as unknown only for a few seconds: it may serve the kind, with
    /// objects, when it is asked again.
    pub kinds: bool,
}

/// A map shared between snapshots: a copy costs nothing until one of the two is written to, which then gets its own
/// entries.
#[derive(Debug, PartialEq, Eq)]
pub struct Shared<K, V>(Arc<BTreeMap<K, V>>);

/// Identifies the map it was created from, without keeping that map's entries.
#[derive(Debug, Clone)]
pub struct Identity<K, V>(Weak<BTreeMap<K, V>>);

/// Name of an object in a namespace. Printed as `namespace/name`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ObjectName {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
}

/// A pod, reduced to what its networks need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// Namespace and name.
    pub name: ObjectName,
    /// Identity across re-creation under the same name; manifests usually have none.
    pub uid: Option<String>,
    /// Uid of the static pod whose mirror this is. The runtime uses that uid, as the kubelet runs the
    /// static pod.
    pub mirror_of: Option<String>,
    /// Labels.
    pub labels: Labels,
    /// Annotations, limited to those that are read.
    pub annotations: BTreeMap<String, String>,
    /// Phase of the pod.
    pub phase: Phase,
    /// Whether it shares the node's network namespace.
    pub host_network: bool,
    /// Ports that its containers (and restartable init containers) declare.
    pub ports: Vec<ContainerPort>,
    /// The privileges of its containers over its network.
    pub powers: Powers,
    /// The source knows that the pod is on this node: its addresses are those of its attachments, and
    /// those that its status claims only if [another plugin](Pod::is_by_another) has written it. Manifests
    /// do not show it.
    pub on_this_node: bool,
    /// Whether it is being deleted.
    pub terminating: bool,
}

/// Whether any container of a pod, or its runtime, has capabilities over the pod's network.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Powers {
    /// `CAP_NET_ADMIN`, or `CAP_SYS_ADMIN`, which leads to it.
    pub admin: Grant,
    /// `CAP_NET_RAW`.
    pub raw: Grant,
    /// Whether it requests a runtime other than the node's usual one (`runtimeClassName`). A runtime that
    /// runs pods in virtual machines puts filters of its own on their interfaces.
    pub own_runtime: bool,
}

/// Whether a pod's manifest grants a capability.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Grant {
    /// The manifest lists no containers, so it is unknown.
    #[default]
    Unknown,
    /// No container has it.
    No,
    /// The container of this name has it.
    To(String),
    /// Only some ephemeral containers were read, and one of the others may have it.
    ToUnread,
}

impl Powers {
    /// Returns the grant if not all containers were read: one of the others may have every capability.
    #[must_use]
    pub fn with_unread(self) -> Self {
        let of = |grant: Grant| match grant {
            Grant::To(container) => Grant::To(container),
            Grant::Unknown | Grant::No | Grant::ToUnread => Grant::ToUnread,
        };
        Self { admin: of(self.admin), raw: of(self.raw), ..self }
    }
}

/// Phase of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Phase {
    /// Not all containers have started; also the phase of a pod without a status.
    #[default]
    Pending,
    /// At least one container runs.
    Running,
    /// All containers have terminated successfully.
    Succeeded,
    /// All containers have terminated, at least one with a failure.
    Failed,
    /// The node does not respond.
    Unknown,
}

/// A network as policies name it. The default network can be both.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// The network of a definition, which MultiNetworkPolicies name.
    Network(NetworkRef),
    /// The pod's default network, which NetworkPolicies are about.
    Default,
}

/// A port that a container declares.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ContainerPort {
    /// Its name, by which policies can refer to it.
    pub name: Option<String>,
    /// Protocol.
    pub protocol: PortProtocol,
    /// Port number, never 0.
    pub port: u16,
}

/// Whether policies can name a port so (RFC 6335, section 5.1): at most 15 characters, at least one of them a letter, so
/// that `"80"` is not a name.
pub(crate) fn is_port_name(text: &str) -> bool {
    text.len() <= 15
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        && text.bytes().any(|b| b.is_ascii_lowercase())
}

/// An object that a source could not read. Its previous version is still in the snapshot.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// Where it is.
    pub origin: Origin,
    /// The error, in one line.
    pub message: String,
}

/// Where a source found an object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// A manifest.
    File {
        /// File or directory.
        path: PathBuf,
        /// Index of the document in the file, from 0; `None`: the file as a whole.
        document: Option<usize>,
    },
    /// The Kubernetes API.
    Api {
        /// Kind of the object, in lower case, as `kubectl get` takes it.
        kind: &'static str,
        /// Its name. Of an object without a namespace, the namespace is empty.
        name: ObjectName,
    },
}

impl Objects {
    /// Labels of a namespace, whether or not it has an object.
    pub fn namespace_labels(&self, namespace: &str) -> Labels {
        let mut labels = self.namespaces.get(namespace).cloned().unwrap_or_default();
        labels.insert(NAMESPACE_NAME_LABEL.to_owned(), namespace.to_owned());
        labels
    }
}

impl<K, V> Default for Shared<K, V> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<K, V> Clone for Shared<K, V> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<K, V> Shared<K, V> {
    /// An identity by which this map is recognised later.
    pub fn identity(&self) -> Identity<K, V> {
        Identity(Arc::downgrade(&self.0))
    }
}

impl<K, V> Identity<K, V> {
    /// Whether `map` is the same map, unchanged since. Comparing addresses suffices: a map's memory is not reused while
    /// its identity is kept, and a map that is changed gets memory of its own.
    pub fn is_of(&self, map: &Shared<K, V>) -> bool {
        std::ptr::eq(self.0.as_ptr(), Arc::as_ptr(&map.0))
    }
}

/// The identity of no map.
impl<K, V> Default for Identity<K, V> {
    fn default() -> Self {
        Self(Weak::new())
    }
}

impl<K, V> Deref for Shared<K, V> {
    type Target = BTreeMap<K, V>;

    fn deref(&self) -> &BTreeMap<K, V> {
        &self.0
    }
}

impl<K: Ord + Clone, V: Clone> DerefMut for Shared<K, V> {
    fn deref_mut(&mut self) -> &mut BTreeMap<K, V> {
        Arc::make_mut(&mut self.0)
    }
}

impl<K: Ord, V> FromIterator<(K, V)> for Shared<K, V> {
    fn from_iter<T: IntoIterator<Item = (K, V)>>(entries: T) -> Self {
        Self(Arc::new(entries.into_iter().collect()))
    }
}

impl<K: Clone, V: Clone> IntoIterator for Shared<K, V> {
    type Item = (K, V);
    type IntoIter = btree_map::IntoIter<K, V>;

    fn into_iter(self) -> Self::IntoIter {
        Arc::unwrap_or_clone(self.0).into_iter()
    }
}

impl ObjectName {
    /// Joins a namespace and a name, unchecked.
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

/// The text was not `namespace/name`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not of the form namespace/name")]
pub struct InvalidObjectName(pub String);

impl FromStr for ObjectName {
    type Err = InvalidObjectName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once('/') {
            Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => {
                Ok(Self::new(namespace, name))
            }
            _ => Err(InvalidObjectName(text.to_owned())),
        }
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl Pod {
    /// Whether a uid from the runtime or the kubelet can be this pod's: its own, or that of the static pod
    /// whose mirror it is. A pod without a uid is identified by its name only.
    pub fn has_uid(&self, uid: &str) -> bool {
        let own = self.uid.as_deref().is_none_or(|own| own == uid);
        own || self.mirror_of.as_deref() == Some(uid)
    }

    /// Whether a network-status of the pod is not an agent's: agents label the pods whose status they
    /// write.
    pub fn is_by_another(&self) -> bool {
        self.labels.get(ATTACHED_LABEL).is_none_or(|value| value == BY_ANOTHER)
    }

    /// Whether the pod has the addresses that its status claims, unless it has an attachment on this node.
    /// A status of this node's agent says nothing that its attachments do not say better.
    pub fn has_what_it_claims(&self) -> bool {
        !self.on_this_node || self.is_by_another()
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Network(network) => write!(f, "{network}"),
            Self::Default => f.write_str("the default network"),
        }
    }
}

impl Phase {
    /// Whether the pod's containers have terminated for good: its addresses may already belong to another pod.
    pub fn has_ended(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }
}

impl Problem {
    /// The namespace of the object; empty if it has none, or is a manifest.
    pub fn namespace(&self) -> &str {
        match &self.origin {
            Origin::Api { name, .. } => &name.namespace,
            Origin::File { .. } => "",
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.origin {
            Origin::File { document: Some(index), .. } => {
                write!(f, "{} document {index}: {}", self.origin, self.message)
            }
            origin => write!(f, "{origin}: {}", self.message),
        }
    }
}

/// Prints the file or the object.
impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { path, .. } => write!(f, "{}", path.display()),
            Self::Api { kind, name } if name.namespace.is_empty() => write!(f, "{kind} {}", name.name),
            Self::Api { kind, name } => write!(f, "{kind} {name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::objects::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_map_is_recognised_until_it_is_changed_and_its_entries_are_not_kept() {
        let entry = Arc::new(7);
        let mut map: Shared<u8, Arc<i32>> = [(1, Arc::clone(&entry))].into_iter().collect();
        let identity = map.identity();
        let snapshot = map.clone();
        assert!(identity.is_of(&map) && identity.is_of(&snapshot));
        assert!(!Identity::default().is_of(&map) && !identity.is_of(&Shared::default()));
        map.insert(2, Arc::new(8));
        assert!(identity.is_of(&snapshot) && !identity.is_of(&map));
        drop(snapshot);
        // No snapshot shares the map now, so its entries stay in the same memory; only its identity
        // changes.
        let identity = map.identity();
        map.clear();
        assert!(!identity.is_of(&map));
        assert_eq!(Arc::strong_count(&entry), 1);
    }

    #[test]
    fn objects_are_named_with_their_namespace() {
        assert_eq!("a/b".parse::<ObjectName>().unwrap().to_string(), "a/b");
        for text in ["", "b", "a/", "/b", "a/b/c"] {
            assert_eq!(text.parse::<ObjectName>(), Err(InvalidObjectName(text.to_owned())));
        }
    }

    #[test]
    fn every_namespace_is_labelled_with_its_name() {
        let mut objects = Objects::default();
        objects
            .namespaces
            .insert("shop".to_owned(), labels(&[("team", "a"), (NAMESPACE_NAME_LABEL, "wrong")]));
        assert_eq!(
            objects.namespace_labels("shop"),
            labels(&[("team", "a"), ("kubernetes.io/metadata.name", "shop")])
        );
        assert_eq!(objects.namespace_labels("bare"), labels(&[("kubernetes.io/metadata.name", "bare")]));
    }
}
