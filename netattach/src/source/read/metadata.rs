//! Reads `metadata` of an object, and keeps the parts that netattach uses.
//!
//! An API server bounds labels and annotations; a manifest on the node has the same bounds. Labels are many and short,
//! and take many times their text in memory: their number has a bound of its own, see [`budget::ENTRIES`].

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::manifest::ManifestError;
use crate::budget::{self, Budget, Exceeded};
use crate::npwg::network::is_subdomain;
use crate::npwg::{DEFAULT_NETWORK_ANNOTATION, NETWORKS_ANNOTATION, RESOURCE_ANNOTATION, STATUS_ANNOTATION};
use crate::objects::ObjectName;
use crate::objects::access::ALLOWED_NAMESPACES_ANNOTATION;
use crate::objects::labels::Labels;
use crate::objects::policy::POLICY_FOR_ANNOTATION;
use crate::objects::remote::PORTS_ANNOTATION;

/// The kubelet's annotation of a mirror pod, which represents a static pod in the API: the static pod's
/// uid, which is the hash of its manifest (kubernetes, `pkg/kubelet/types`: `ConfigMirrorAnnotationKey`).
pub(in crate::source) const MIRROR_ANNOTATION: &str = "kubernetes.io/config.mirror";

/// The annotations that netattach reads, of objects of any kind; the others may be large and many. The last three belong
/// to modules that this one does not import; a test compares them.
const IN_USE: [&str; 11] = [
    NETWORKS_ANNOTATION,
    DEFAULT_NETWORK_ANNOTATION,
    STATUS_ANNOTATION,
    RESOURCE_ANNOTATION,
    POLICY_FOR_ANNOTATION,
    ALLOWED_NAMESPACES_ANNOTATION,
    PORTS_ANNOTATION,
    MIRROR_ANNOTATION,
    "netattach.dev/enforce",
    "netattach.dev/ethertypes",
    "netattach.dev/unenforceable",
];

/// The fields common to all objects.
#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::source) struct Metadata {
    name: String,
    namespace: Option<String>,
    uid: Option<AtMost<{ budget::UID.most }>>,
    labels: Option<WrittenLabels>,
    annotations: Option<WrittenAnnotations>,
    /// Set when the object is being deleted.
    pub(in crate::source) deletion_timestamp: Option<IgnoredAny>,
}

impl Metadata {
    /// An object without a namespace is in `default`, where `kubectl apply` would put it.
    pub(in crate::source) fn object_name(&self, kind: &'static str) -> Result<ObjectName, ManifestError> {
        let namespace = self.namespace.as_deref().unwrap_or("default");
        for (field, name) in [("name", self.name.as_str()), ("namespace", namespace)] {
            if !is_subdomain(name) {
                return Err(ManifestError::Name { kind, field, name: name.to_owned() });
            }
        }
        Ok(ObjectName::new(namespace, &self.name))
    }

    /// Takes the uid.
    ///
    /// # Errors
    /// It is too long.
    pub(in crate::source) fn take_uid(&mut self) -> Result<Option<String>, Exceeded> {
        self.uid.take().map(|uid| uid.within(&budget::UID)).transpose()
    }

    /// Takes the labels.
    ///
    /// # Errors
    /// There are too many, or one is too long.
    pub(in crate::source) fn take_labels(&mut self) -> Result<Labels, Exceeded> {
        let WrittenLabels { labels, exceeded } = self.labels.take().unwrap_or_default();
        exceeded.map_or(Ok(labels), Err)
    }

    /// Takes the annotations in use.
    ///
    /// # Errors
    /// All annotations together are too long.
    pub(in crate::source) fn take_annotations(&mut self) -> Result<BTreeMap<String, String>, Exceeded> {
        let WrittenAnnotations { in_use, bytes } = self.annotations.take().unwrap_or_default();
        budget::ANNOTATIONS.check(bytes)?;
        Ok(in_use)
    }

    /// Takes the annotations in use, however long they are: a policy is enforced in any case.
    pub(in crate::source) fn take_annotations_of_policy(&mut self) -> BTreeMap<String, String> {
        self.annotations.take().map(|annotations| annotations.in_use).unwrap_or_default()
    }
}

/// The metadata of a pod of another node, all that is read of it.
pub(crate) struct RemoteMetadata {
    pub(crate) name: ObjectName,
    pub(crate) uid: Option<String>,
    pub(crate) labels: Labels,
    /// The annotation [`STATUS_ANNOTATION`].
    pub(crate) status: Option<String>,
    /// The annotation [`PORTS_ANNOTATION`].
    pub(crate) ports: Option<String>,
    /// The parts that exceed their bound, and were not read.
    pub(crate) beyond: Option<String>,
}

/// Reads a pod of another node. `None` if it has no usable name. Its annotations have bounds of their own, where they
/// are parsed.
pub(crate) fn remote_pod(json: &RawValue) -> Option<RemoteMetadata> {
    #[derive(serde::Deserialize)]
    struct Partial {
        metadata: Metadata,
    }
    let Partial { mut metadata } = serde_json::from_str(json.get()).ok()?;
    let name = metadata.object_name("Pod").ok()?;
    let (uid, labels) = (metadata.take_uid(), metadata.take_labels());
    let beyond = uid.as_ref().err().or(labels.as_ref().err()).map(ToString::to_string);
    let mut annotations =
        metadata.annotations.take().map(|annotations| annotations.in_use).unwrap_or_default();
    Some(RemoteMetadata {
        name,
        uid: uid.unwrap_or_default(),
        labels: labels.unwrap_or_default(),
        status: annotations.remove(STATUS_ANNOTATION),
        ports: annotations.remove(PORTS_ANNOTATION),
        beyond,
    })
}

/// A text of at most `MOST` bytes; of a longer one only the length is kept.
pub(in crate::source) enum AtMost<const MOST: usize> {
    Kept(String),
    Longer(usize),
}

impl<const MOST: usize> AtMost<MOST> {
    /// The text.
    ///
    /// # Errors
    /// It is longer than that budget, which allows `MOST` bytes.
    pub(in crate::source) fn within(self, budget: &Budget) -> Result<String, Exceeded> {
        match self {
            Self::Kept(text) => Ok(text),
            Self::Longer(found) => budget.check(found).map(|()| String::new()),
        }
    }
}

impl<'de, const MOST: usize> Deserialize<'de> for AtMost<MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(Read(|text: &str| {
            if text.len() > MOST { Self::Longer(text.len()) } else { Self::Kept(text.to_owned()) }
        }))
    }
}

/// The length of a text in bytes.
struct Length(usize);

impl<'de> Deserialize<'de> for Length {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(Read(|text: &str| Self(text.len())))
    }
}

/// Name of an annotation.
enum Name {
    InUse(&'static str),
    /// Another one, of that many bytes.
    Other(usize),
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(Read(|text: &str| {
            IN_USE.into_iter().find(|name| *name == text).map_or(Self::Other(text.len()), Self::InUse)
        }))
    }
}

/// Converts a text without copying it.
struct Read<F>(F);

impl<T, F: FnOnce(&str) -> T> Visitor<'_> for Read<F> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E>(self, text: &str) -> Result<T, E> {
        Ok((self.0)(text))
    }
}

/// The labels of an object, up to the first that is beyond a bound.
#[derive(Default)]
struct WrittenLabels {
    labels: Labels,
    exceeded: Option<Exceeded>,
}

impl WrittenLabels {
    fn insert(
        &mut self,
        key: AtMost<{ budget::LABEL_KEY.most }>,
        value: AtMost<{ budget::LABEL_VALUE.most }>,
    ) -> Result<(), Exceeded> {
        self.labels.insert(key.within(&budget::LABEL_KEY)?, value.within(&budget::LABEL_VALUE)?);
        budget::ENTRIES.check(self.labels.len())
    }
}

impl<'de> Deserialize<'de> for WrittenLabels {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Self::default())
    }
}

impl<'de> Visitor<'de> for WrittenLabels {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self, A::Error> {
        while let Some((key, value)) = map.next_entry()? {
            if self.exceeded.is_none() {
                self.exceeded = self.insert(key, value).err();
            }
        }
        Ok(self)
    }
}

/// The annotations of an object.
#[derive(Default)]
struct WrittenAnnotations {
    in_use: BTreeMap<String, String>,
    /// Length of all names and values, used or not.
    bytes: usize,
}

impl<'de> Deserialize<'de> for WrittenAnnotations {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Self::default())
    }
}

impl<'de> Visitor<'de> for WrittenAnnotations {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self, A::Error> {
        while let Some(name) = map.next_key()? {
            match name {
                Name::InUse(name) => {
                    let value: String = map.next_value()?;
                    self.bytes += name.len() + value.len();
                    self.in_use.insert(name.to_owned(), value);
                }
                Name::Other(length) => self.bytes += length + map.next_value::<Length>()?.0,
            }
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::error_chain::Chain;
    use crate::objects::budget::NETWORKS;
    use crate::source::read::manifest::{Object, objects};

    #[test]
    fn every_annotation_that_is_read_is_kept() {
        let elsewhere = [
            crate::step::ENFORCE_ANNOTATION,
            crate::plan::ethertypes::ETHERTYPES_ANNOTATION,
            crate::enforce::admission::UNENFORCEABLE_ANNOTATION,
        ];
        assert_eq!(IN_USE[8..], elsewhere);
    }

    /// The only object of a document in JSON, or its error.
    fn read(document: &Value) -> Result<Object, String> {
        let text = document.to_string();
        let raw: &serde_json::value::RawValue = serde_json::from_str(&text).unwrap();
        let found = [objects(raw), objects(document)].map(|found| {
            let said = |error: ManifestError| Chain(&error).to_string();
            found.into_iter().map(|object| object.map_err(said)).collect::<Vec<_>>()
        });
        assert_eq!(found[0], found[1]);
        found.into_iter().next().unwrap().remove(0)
    }

    fn pod(metadata: Value, containers: Value) -> Value {
        let mut whole = json!({"name": "a", "namespace": "shop"});
        whole.as_object_mut().unwrap().extend(metadata.as_object().unwrap().clone());
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": whole, "spec": {"containers": containers}})
    }

    /// A pod is read at the bound, and refused one past it.
    fn both(budget: &Budget, of: impl Fn(usize) -> Value) {
        assert!(read(&of(budget.most)).is_ok(), "{}", budget.what);
        let said = budget.check(budget.most + 1).unwrap_err();
        assert_eq!(read(&of(budget.most + 1)), Err(format!("read Pod shop/a: {said}")));
    }

    #[test]
    fn a_pod_is_refused_beyond_each_bound_of_what_is_kept_of_it() {
        let labels = |labels: Value| pod(json!({"labels": labels}), json!([]));
        both(&budget::LABEL_KEY, |bytes| labels(json!({"a".repeat(bytes): "x"})));
        both(&budget::LABEL_VALUE, |bytes| labels(json!({"a": "x".repeat(bytes)})));
        let many = |count: usize| -> Value {
            (0..count).map(|number| (number.to_string(), json!(""))).collect::<serde_json::Map<_, _>>().into()
        };
        both(&budget::ENTRIES, |count| labels(many(count)));
        both(&budget::UID, |bytes| pod(json!({"uid": "u".repeat(bytes)}), json!([])));
        let annotations = |bytes: usize, name: &str| {
            pod(json!({"annotations": {"b": "", name: "x".repeat(bytes - 1 - name.len())}}), json!([]))
        };
        both(&budget::ANNOTATIONS, |bytes| annotations(bytes, "a"));
        both(&budget::ANNOTATIONS, |bytes| annotations(bytes, NETWORKS_ANNOTATION));
        both(&budget::CONTAINERS, |count| pod(json!({}), vec![json!({}); count].into()));
        both(&budget::CONTAINER_PORTS, |count| {
            pod(json!({}), json!([{"ports": vec![json!({"containerPort": 80}); count]}]))
        });
    }

    #[test]
    fn a_list_is_refused_beyond_the_bound_of_what_is_kept_of_its_items() {
        let half: serde_json::Map<String, Value> =
            (0..budget::ENTRIES.most / 2).map(|number| (number.to_string(), json!(""))).collect();
        let item = |name: &str, labels: &serde_json::Map<String, Value>| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}});
        let one = serde_json::Map::from_iter([("a".to_owned(), json!("b"))]);
        let list = |items: &[Value]| json!({"apiVersion": "v1", "kind": "List", "items": items});
        let whole = list(&[item("a", &half), item("b", &half)]);
        assert!(matches!(read(&whole), Ok(Object::Namespace { name, .. }) if name == "a"));
        let more = list(&[item("a", &half), item("b", &half), item("c", &one)]);
        let said = budget::ENTRIES.check(budget::ENTRIES.most + 1).unwrap_err().to_string();
        assert_eq!(read(&more), Err(said));
    }

    #[test]
    fn a_definition_is_refused_beyond_each_bound_of_what_is_kept_of_it() {
        let definition = |annotation: usize, config: usize| {
            json!({
                "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
                "metadata": {"name": "a", "namespace": "shop", "annotations": {"b": "x".repeat(annotation)}},
                "spec": {"config": "x".repeat(config)}
            })
        };
        let (annotations, config) = (budget::ANNOTATIONS.most, budget::DEFINITION_CONFIG.most);
        assert!(read(&definition(annotations - 1, config)).is_ok());
        let said = |budget: &Budget| {
            let error = budget.check(budget.most + 1).unwrap_err();
            Err(format!("read NetworkAttachmentDefinition shop/a: {error}"))
        };
        assert_eq!(read(&definition(annotations, 1)), said(&budget::ANNOTATIONS));
        assert_eq!(read(&definition(1, config + 1)), said(&budget::DEFINITION_CONFIG));
    }

    #[test]
    fn a_policy_is_enforced_however_long_its_annotations_are() {
        let networks = vec!["lan"; 10 * NETWORKS].join(",");
        let policy = json!({
            "apiVersion": "k8s.cni.cncf.io/v1beta1", "kind": "MultiNetworkPolicy",
            "metadata": {
                "name": "a", "namespace": "shop", "labels": {"a".repeat(1000): "b"},
                "annotations": {POLICY_FOR_ANNOTATION: networks, "a": "x".repeat(budget::ANNOTATIONS.most)}
            },
            "spec": {"podSelector": {}}
        });
        let Ok(Object::Policy(policy)) = read(&policy) else { panic!("it is read") };
        assert_ne!(policy.networks, Default::default(), "it selects pods of networks");
    }
}
