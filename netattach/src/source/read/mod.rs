//! Converts Kubernetes API objects into the model; shared by all sources.
//!
//! [`api_object`] turns an object of a known kind into the model, and [`manifest`] a document of any kind, with its
//! [`metadata`]: [`pods`] with their [`security_context`], [`nodes`], [`policies`], whose specification is read by
//! [`policy`]. [`merge`] puts them into a snapshot.

pub(crate) mod manifest;
pub(crate) mod merge;
pub(in crate::source) mod metadata;
pub(in crate::source) mod nodes;
pub(in crate::source) mod pods;
pub(in crate::source) mod policies;
pub mod policy;
pub(in crate::source) mod security_context;

use serde_json::value::RawValue;

use manifest::{ManifestError, Object};
pub(crate) use metadata::{RemoteMetadata, remote_pod};

/// The kinds of objects that are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Kind {
    Pod,
    Namespace,
    Definition,
    MultiNetworkPolicy,
    NetworkPolicy,
    Node,
}

impl Kind {
    /// The kind in lower case, as `kubectl get` takes it.
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Pod => "pod",
            Self::Namespace => "namespace",
            Self::Definition => "network-attachment-definition",
            Self::MultiNetworkPolicy => "multi-networkpolicy",
            Self::NetworkPolicy => "networkpolicy",
            Self::Node => "node",
        }
    }

    /// Returns the kind of a word.
    pub(crate) fn of_word(word: &str) -> Option<Self> {
        let all = [
            Self::Pod,
            Self::Namespace,
            Self::Definition,
            Self::MultiNetworkPolicy,
            Self::NetworkPolicy,
            Self::Node,
        ];
        all.into_iter().find(|kind| kind.word() == word)
    }
}

/// Reads an object of a known kind from the JSON of the API, which omits the kind of a list's items.
///
/// # Errors
/// [`ManifestError`], which may have an object to enforce in its place.
pub(crate) fn api_object(kind: Kind, json: &RawValue) -> Result<Object, ManifestError> {
    match kind {
        Kind::Pod => pods::pod(json),
        Kind::Namespace => manifest::namespace(json),
        Kind::Definition => manifest::definition(json),
        Kind::MultiNetworkPolicy => policies::multi_network_policy(json),
        Kind::NetworkPolicy => policies::network_policy(json),
        Kind::Node => nodes::node(json),
    }
}
