//! Parses policies from manifests: MultiNetworkPolicy and NetworkPolicy.

use std::sync::Arc;

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::manifest::{Document, ManifestError, NETWORKS_GROUP, Object, of_version, shape};
use super::metadata::Metadata;
use super::policy;
use crate::objects::policy::PolicyName;
use crate::source::files::documents::plain;

/// Group of NetworkPolicy.
pub(in crate::source) const KUBERNETES_NETWORKS_GROUP: &str = "networking.k8s.io";

pub(in crate::source) const MULTI_NETWORK_POLICY: &str = "MultiNetworkPolicy";
pub(in crate::source) const MULTI_NETWORK_POLICY_VERSIONS: &str = "v1beta1 and v1beta2";
pub(in crate::source) const NETWORK_POLICY: &str = "NetworkPolicy";

/// Substring of the names of both kinds.
const POLICY_KINDS: &str = NETWORK_POLICY;

/// A policy reduced to its name, regardless of its rules.
#[derive(Deserialize)]
struct Named {
    metadata: Metadata,
    #[serde(rename = "spec")]
    _spec: IgnoredAny,
}

#[derive(Deserialize)]
struct Specified {
    spec: policy::Spec,
}

/// Reads a MultiNetworkPolicy.
pub(in crate::source) fn multi_network_policy<'de>(
    document: impl Document<'de>,
) -> Result<Object, ManifestError> {
    const KIND: &str = MULTI_NETWORK_POLICY;
    let Named { mut metadata, .. } = shape(KIND, document)?;
    let name = metadata.object_name(KIND)?;
    let annotations = metadata.take_annotations_of_policy();
    match document.read::<Specified>() {
        Ok(Specified { spec }) => Ok(Object::Policy(Arc::new(policy::read_multi(name, &annotations, spec)))),
        Err(source) => {
            let source = policy::ManifestError::new(PolicyName::multi(name.clone()), source);
            let isolating = Arc::new(policy::unreadable_multi(name, &annotations));
            Err(ManifestError::Policy { kind: KIND, source, isolating })
        }
    }
}

/// Reads a document that is exactly one policy, without an intermediate [`Value`](serde_json::Value), which takes ten times as long for a
/// policy of a hundred thousand rules. `None`: it is another document, or has an error, which
/// [`objects`](crate::source::read::manifest::objects) reports.
pub(in crate::source) fn policy(json: &str) -> Option<Object> {
    if json.contains(POLICY_KINDS) { policy_of(serde_json::from_str(json).ok()?) } else { None }
}

/// As [`policy`], for a document of a YAML stream.
pub(in crate::source) fn yaml_policy(document: &str) -> Option<Object> {
    if document.contains(POLICY_KINDS) { policy_of(plain(document)?) } else { None }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WholePolicy {
    api_version: String,
    kind: String,
    metadata: Metadata,
    spec: policy::Spec,
}

fn policy_of(document: WholePolicy) -> Option<Object> {
    let WholePolicy { api_version, kind, mut metadata, spec } = document;
    let (group, version) = api_version.rsplit_once('/')?;
    let (kind, known) = match (group, kind.as_str()) {
        (NETWORKS_GROUP, MULTI_NETWORK_POLICY) => (MULTI_NETWORK_POLICY, MULTI_NETWORK_POLICY_VERSIONS),
        (KUBERNETES_NETWORKS_GROUP, NETWORK_POLICY) => (NETWORK_POLICY, "v1"),
        _ => return None,
    };
    of_version(kind, version, known).ok()?;
    let name = metadata.object_name(kind).ok()?;
    let policy = match kind {
        MULTI_NETWORK_POLICY => policy::read_multi(name, &metadata.take_annotations_of_policy(), spec),
        _ => policy::read_network(name, spec),
    };
    Some(Object::Policy(Arc::new(policy)))
}

/// Reads a NetworkPolicy.
pub(in crate::source) fn network_policy<'de>(document: impl Document<'de>) -> Result<Object, ManifestError> {
    const KIND: &str = NETWORK_POLICY;
    let Named { metadata, .. } = shape(KIND, document)?;
    let name = metadata.object_name(KIND)?;
    match document.read::<Specified>() {
        Ok(Specified { spec }) => Ok(Object::Policy(Arc::new(policy::read_network(name, spec)))),
        Err(source) => {
            let source = policy::ManifestError::new(PolicyName::network(name.clone()), source);
            let isolating = Arc::new(policy::unreadable_network(name));
            Err(ManifestError::Policy { kind: KIND, source, isolating })
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::source::read::manifest::tests::{one, read};
    use crate::source::read::policies::*;

    #[test]
    fn a_network_policy_is_a_policy_of_its_own_kind() {
        let policy = one("
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: db, namespace: shop}
spec: {podSelector: {}, ingress: [{}]}
");
        assert_eq!(policy.key().to_string(), "networkpolicy shop/db");
        let Object::Policy(policy) = policy else { panic!("{policy:?}") };
        assert_eq!((policy.name.to_string(), policy.networks.len()), ("networkpolicy shop/db".to_owned(), 0));
        let refused =
            read("{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: a}, spec: {}}");
        assert_eq!(
            refused,
            [Err("read NetworkPolicy: read spec of networkpolicy default/a: missing field `podSelector`"
                .to_owned())]
        );
    }
}
