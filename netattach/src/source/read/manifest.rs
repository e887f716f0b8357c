//! Parses manifests: a document into the objects that netattach uses.

use std::marker::PhantomData;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

use super::metadata::{AtMost, Metadata};
use super::pods::pod;
use super::policies::{
    KUBERNETES_NETWORKS_GROUP, MULTI_NETWORK_POLICY, MULTI_NETWORK_POLICY_VERSIONS, NETWORK_POLICY,
    multi_network_policy, network_policy,
};
use super::{Kind, policy};
use crate::budget::{self, Exceeded};
use crate::objects::access::{ALLOWED_NAMESPACES_ANNOTATION, AllowedNamespaces};
use crate::objects::labels::Labels;
use crate::objects::policy::{Policy, PolicyKind};
use crate::objects::{Definition, Node, ObjectName, Pod};

/// Group of NetworkAttachmentDefinition and MultiNetworkPolicy.
pub(in crate::source) const NETWORKS_GROUP: &str = "k8s.cni.cncf.io";

/// One object of a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Object {
    Pod(Arc<Pod>),
    Namespace { name: String, labels: Labels },
    Definition(Definition),
    Policy(Arc<Policy>),
    Node(Arc<Node>),
}

/// The key of an object. Printed as in `kubectl get`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) kind: &'static str,
    pub(crate) name: ObjectName,
}

/// Why a document or a list item yields no object.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ManifestError {
    #[error("parse yaml")]
    Yaml(#[source] serde_norway::Error),
    #[error("parse json")]
    Json(#[source] serde_json::Error),
    /// A limit is exceeded.
    #[error(transparent)]
    Budget(Exceeded),
    #[error("is no Kubernetes object with apiVersion and kind")]
    NoKind(#[source] serde_json::Error),
    #[error("{kind} of version {version} is not known, only of {known}")]
    Version { kind: &'static str, version: String, known: &'static str },
    #[error("read {kind}")]
    Shape {
        kind: &'static str,
        #[source]
        source: serde_json::Error,
    },
    #[error("{kind} has {name:?} as its {field}")]
    Name { kind: &'static str, field: &'static str, name: String },
    #[error("read {kind} {name}: container port {port} is not from 1 to 65535")]
    ContainerPort { kind: &'static str, name: ObjectName, port: i64 },
    #[error(
        "read Node {name}: podCIDR {text:?} is not an address with a prefix length, or the second of its family"
    )]
    PodCidr { name: String, text: String },
    /// A limit of what is kept of an object is exceeded.
    #[error("read {kind} {name}")]
    Excess {
        kind: &'static str,
        /// With its namespace, if the kind has them.
        name: String,
        #[source]
        source: Exceeded,
    },
    #[error("read {kind}")]
    Policy {
        kind: &'static str,
        #[source]
        source: policy::ManifestError,
        /// The isolating policy that substitutes it if no earlier version is known.
        isolating: Arc<Policy>,
    },
    #[error("items[{index}]")]
    Item {
        index: usize,
        #[source]
        source: Box<ManifestError>,
    },
}

impl ManifestError {
    /// The same error for a list item.
    pub(in crate::source) fn of_item(self, index: usize) -> Self {
        Self::Item { index, source: Box::new(self) }
    }

    /// The object enforced in place of one that cannot be read and has no earlier version.
    pub(crate) fn isolating(&self) -> Option<Object> {
        match self {
            Self::Policy { isolating, .. } => Some(Object::Policy(Arc::clone(isolating))),
            Self::Item { source, .. } => source.isolating(),
            _ => None,
        }
    }
}

impl Object {
    pub(crate) fn key(&self) -> Key {
        let (kind, name) = match self {
            Self::Pod(pod) => (Kind::Pod, pod.name.clone()),
            Self::Namespace { name, .. } => (Kind::Namespace, ObjectName::new("", name)),
            Self::Definition(definition) => {
                (Kind::Definition, ObjectName::new(&definition.namespace, &definition.name))
            }
            Self::Node(node) => (Kind::Node, ObjectName::new("", &node.name)),
            Self::Policy(policy) => {
                let kind = match policy.name.kind {
                    PolicyKind::Multi => Kind::MultiNetworkPolicy,
                    PolicyKind::Network => Kind::NetworkPolicy,
                };
                (kind, policy.name.object.clone())
            }
        };
        Key { kind: kind.word(), name }
    }

    /// What is kept of it beside its own texts: see [`budget::ENTRIES`]. Policies have budgets of their own.
    pub(in crate::source) fn entries(&self) -> usize {
        match self {
            Self::Pod(pod) => pod.labels.len() + pod.annotations.len() + pod.ports.len(),
            Self::Namespace { labels, .. } => labels.len(),
            Self::Definition(definition) => {
                definition.annotations.len() + definition.allowed.as_ref().map_or(0, AllowedNamespaces::len)
            }
            Self::Policy(_) | Self::Node(_) => 0,
        }
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.name.namespace.as_str() {
            "" => write!(f, "{} {}", self.kind, self.name.name),
            _ => write!(f, "{} {}", self.kind, self.name),
        }
    }
}

/// The input of an object, read once for each type wanted from it. Of a text only the requested parts are kept: as
/// values, all of it takes many times its memory.
pub(in crate::source) trait Document<'de>: Copy {
    /// Reads a `T` from the document.
    ///
    /// # Errors
    /// It is missing, or of another type.
    fn read<T: Deserialize<'de>>(self) -> serde_json::Result<T>;

    /// The items of a list.
    ///
    /// # Errors
    /// It is not a list.
    fn items(self) -> serde_json::Result<Items<Self>>;
}

/// The items of a list.
pub(in crate::source) struct Items<T> {
    /// The items within the limit.
    items: Vec<T>,
    /// Number of items in total.
    count: usize,
}

impl<T> Default for Items<T> {
    fn default() -> Self {
        Self { items: Vec::new(), count: 0 }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Items<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ItemsVisitor(PhantomData))
    }
}

struct ItemsVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ItemsVisitor<T> {
    type Value = Items<T>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a sequence")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Items<T>, A::Error> {
        let mut found = Items::default();
        while found.items.len() < budget::OBJECTS.most {
            let Some(item) = seq.next_element()? else { break };
            found.items.push(item);
        }
        found.count = found.items.len();
        while seq.next_element::<IgnoredAny>()?.is_some() {
            found.count += 1;
        }
        Ok(found)
    }
}

impl<'de> Document<'de> for &'de Value {
    fn read<T: Deserialize<'de>>(self) -> serde_json::Result<T> {
        T::deserialize(self)
    }

    fn items(self) -> serde_json::Result<Items<Self>> {
        match self.get("items") {
            None | Some(Value::Null) => Ok(Items::default()),
            Some(Value::Array(items)) => Ok(Items { items: items.iter().collect(), count: items.len() }),
            Some(other) => Vec::<IgnoredAny>::deserialize(other).map(|_| Items::default()),
        }
    }
}

impl<'de> Document<'de> for &'de RawValue {
    fn read<T: Deserialize<'de>>(self) -> serde_json::Result<T> {
        serde_json::from_str(self.get())
    }

    fn items(self) -> serde_json::Result<Items<Self>> {
        #[derive(Deserialize)]
        struct List<'a> {
            #[serde(borrow)]
            items: Option<Items<&'a RawValue>>,
        }
        Ok(self.read::<List<'de>>()?.items.unwrap_or_default())
    }
}

/// The objects of a document: several if it is a list, none if its kind is not handled.
pub(in crate::source) fn objects<'de>(document: impl Document<'de>) -> Vec<Result<Object, ManifestError>> {
    let head: Head = match document.read() {
        Ok(Some(head)) => head,
        Ok(None) => return Vec::new(),
        Err(error) => return vec![Err(ManifestError::NoKind(error))],
    };
    if head.kind == "List" && head.api_version == "v1" {
        let Items { items, count } = match document.items() {
            Ok(items) => items,
            Err(error) => return vec![Err(ManifestError::NoKind(error))],
        };
        if let Err(error) = budget::OBJECTS.check(count) {
            return vec![Err(ManifestError::Budget(error))];
        }
        let (mut found, mut entries) = (Vec::new(), 0);
        for (index, item) in items.into_iter().enumerate() {
            let of_item = objects(item);
            entries += of_item.iter().flatten().map(Object::entries).sum::<usize>();
            if let Err(error) = budget::ENTRIES.check(entries) {
                return vec![Err(ManifestError::Budget(error))];
            }
            found.extend(of_item.into_iter().map(|object| object.map_err(|error| error.of_item(index))));
        }
        return found;
    }
    object(&head, document).transpose().into_iter().collect()
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Head {
    api_version: String,
    kind: String,
}

/// Checks that a version is supported.
pub(in crate::source) fn of_version(
    kind: &'static str,
    version: &str,
    known: &'static str,
) -> Result<(), ManifestError> {
    match known.split(" and ").any(|known| known == version) {
        true => Ok(()),
        false => Err(ManifestError::Version { kind, version: version.to_owned(), known }),
    }
}

fn object<'de>(head: &Head, document: impl Document<'de>) -> Result<Option<Object>, ManifestError> {
    let (group, version) = head.api_version.rsplit_once('/').unwrap_or(("", &head.api_version));
    match (group, head.kind.as_str()) {
        ("", "Pod") => {
            of_version("Pod", version, "v1")?;
            pod(document).map(Some)
        }
        ("", "Namespace") => {
            of_version("Namespace", version, "v1")?;
            namespace(document).map(Some)
        }
        (NETWORKS_GROUP, "NetworkAttachmentDefinition") => {
            of_version("NetworkAttachmentDefinition", version, "v1")?;
            definition(document).map(Some)
        }
        (NETWORKS_GROUP, MULTI_NETWORK_POLICY) => {
            of_version(MULTI_NETWORK_POLICY, version, MULTI_NETWORK_POLICY_VERSIONS)?;
            multi_network_policy(document).map(Some)
        }
        (KUBERNETES_NETWORKS_GROUP, NETWORK_POLICY) => {
            of_version(NETWORK_POLICY, version, "v1")?;
            network_policy(document).map(Some)
        }
        _ => {
            tracing::debug!(
                kind = head.kind,
                api_version = head.api_version,
                "manifest of another kind ignored"
            );
            Ok(None)
        }
    }
}

/// Reads a document, or a part of one, of an object of that kind.
pub(in crate::source) fn shape<'de, T: Deserialize<'de>>(
    kind: &'static str,
    document: impl Document<'de>,
) -> Result<T, ManifestError> {
    document.read().map_err(|source| ManifestError::Shape { kind, source })
}

pub(in crate::source) fn namespace<'de>(document: impl Document<'de>) -> Result<Object, ManifestError> {
    #[derive(Deserialize)]
    struct Written {
        metadata: Metadata,
    }
    const KIND: &str = "Namespace";
    let Written { mut metadata } = shape(KIND, document)?;
    let name = metadata.object_name(KIND)?;
    let labels = metadata.take_labels().map_err(|source| ManifestError::Excess {
        kind: KIND,
        name: name.name.clone(),
        source,
    })?;
    Ok(Object::Namespace { name: name.name, labels })
}

/// The `spec` of a definition. Not derived: serde would also accept a list for a struct, by position.
#[derive(Default)]
struct DefinitionSpec {
    config: Option<AtMost<{ budget::DEFINITION_CONFIG.most }>>,
}

impl<'de> Deserialize<'de> for DefinitionSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Self::default())
    }
}

impl<'de> Visitor<'de> for DefinitionSpec {
    type Value = Self;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a map")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self, A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            if key == "config" {
                self.config = map.next_value()?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(self)
    }
}

pub(in crate::source) fn definition<'de>(document: impl Document<'de>) -> Result<Object, ManifestError> {
    #[derive(Deserialize)]
    struct Written {
        metadata: Metadata,
        spec: Option<DefinitionSpec>,
    }
    const KIND: &str = "NetworkAttachmentDefinition";
    let Written { mut metadata, spec } = shape(KIND, document)?;
    let name = metadata.object_name(KIND)?;
    let excess = |source| ManifestError::Excess { kind: KIND, name: name.to_string(), source };
    let config = spec.and_then(|spec| spec.config);
    let config =
        config.map(|config| config.within(&budget::DEFINITION_CONFIG)).transpose().map_err(excess)?;
    let mut annotations = metadata.take_annotations().map_err(excess)?;
    let allowed = annotations.remove(ALLOWED_NAMESPACES_ANNOTATION);
    let ObjectName { namespace, name } = name;
    Ok(Object::Definition(Definition {
        namespace,
        name,
        config: config.filter(|config| !config.trim().is_empty()).map(Arc::from),
        annotations,
        allowed: allowed.as_deref().map(AllowedNamespaces::read),
    }))
}

#[cfg(test)]
#[path = "crd_tests.rs"]
mod crd_tests;

#[cfg(test)]
pub(in crate::source) mod tests {
    use std::collections::BTreeMap;

    use crate::error_chain::Chain;
    use crate::source::files::documents::{self, yaml_documents};
    use crate::source::read::manifest::*;

    /// The objects of a YAML stream.
    pub(in crate::source) fn read(yaml: &str) -> Vec<Result<Object, String>> {
        let documents =
            yaml_documents(yaml).map(|document| documents::yaml(document).map(|value| objects(&value)));
        let flat = documents.flat_map(|document| match document {
            Ok(objects) => objects,
            Err(error) => vec![Err(error)],
        });
        flat.map(|object| object.map_err(|error| Chain(&error).to_string())).collect()
    }

    /// The only object of a YAML stream.
    pub(in crate::source) fn one(yaml: &str) -> Object {
        read(yaml).remove(0).unwrap()
    }

    /// Labels or annotations.
    pub(in crate::source) fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn lists_namespaces_and_definitions_are_read() {
        // NPWG-3.2-spec-optional
        let objects = read(
            r#"
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Namespace, metadata: {name: shop, labels: {team: a}}}
- {apiVersion: k8s.cni.cncf.io/v1, kind: NetworkAttachmentDefinition, metadata: {name: a, namespace: shop}}
- {apiVersion: k8s.cni.cncf.io/v1, kind: NetworkAttachmentDefinition, metadata: {name: b}, spec: {config: '{"type":"bridge"}'}}
- {apiVersion: apps/v1, kind: Deployment, metadata: {name: other}}
"#,
        );
        let definition = |namespace: &str, name: &str, config: Option<&str>| {
            Ok(Object::Definition(Definition {
                namespace: namespace.to_owned(),
                name: name.to_owned(),
                config: config.map(Arc::from),
                annotations: BTreeMap::new(),
                allowed: None,
            }))
        };
        assert_eq!(
            objects,
            [
                Ok(Object::Namespace { name: "shop".to_owned(), labels: map(&[("team", "a")]) }),
                definition("shop", "a", None),
                definition("default", "b", Some(r#"{"type":"bridge"}"#)),
            ]
        );
    }

    #[test]
    fn what_is_no_object_of_ours_is_named() {
        let table = [
            ("kind: Pod", "is no Kubernetes object with apiVersion and kind: missing field `apiVersion`"),
            (
                "- 1",
                "is no Kubernetes object with apiVersion and kind: invalid type: integer `1`, expected a string",
            ),
            ("{apiVersion: v2, kind: Pod}", "Pod of version v2 is not known, only of v1"),
            (
                "{apiVersion: k8s.cni.cncf.io/v1alpha1, kind: MultiNetworkPolicy}",
                "MultiNetworkPolicy of version v1alpha1 is not known, only of v1beta1 and v1beta2",
            ),
            ("{apiVersion: v1, kind: Pod}", "read Pod: missing field `metadata`"),
            ("{apiVersion: v1, kind: Pod, metadata: {name: A_b}}", r#"Pod has "A_b" as its name"#),
            (
                "{apiVersion: v1, kind: Pod, metadata: {name: a, namespace: ../b}}",
                r#"Pod has "../b" as its namespace"#,
            ),
            (
                "{apiVersion: v1, kind: Pod, metadata: {name: a}, spec: {containers: [{ports: [{containerPort: 0}]}]}}",
                "read Pod default/a: container port 0 is not from 1 to 65535",
            ),
            (
                // NPWG-3.1-config-is-string
                "{apiVersion: k8s.cni.cncf.io/v1, kind: NetworkAttachmentDefinition, metadata: {name: a}, spec: {config: {type: x}}}",
                "read NetworkAttachmentDefinition: invalid type: map, expected a string",
            ),
            (
                "{apiVersion: k8s.cni.cncf.io/v1beta1, kind: MultiNetworkPolicy, metadata: {name: a}, spec: {}}",
                "read MultiNetworkPolicy: read spec of default/a: missing field `podSelector`",
            ),
            (
                "{apiVersion: v1, kind: List, items: [{apiVersion: v1, kind: Pod}]}",
                "items[0]: read Pod: missing field `metadata`",
            ),
        ];
        for (yaml, expected) in table {
            assert_eq!(read(yaml), [Err(expected.to_owned())], "{yaml}");
        }
    }
}
