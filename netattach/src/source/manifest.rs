//! Reads manifests: a file's text into documents, a document into the objects that netattach knows.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

use super::objects::{ContainerPort, ObjectName, Phase, Pod};
use super::plain_yaml;
use super::powers::{SecurityContext, powers};
use crate::npwg::Definition;
use crate::npwg::network::is_subdomain;
use crate::npwg::selection::PortProtocol;
use crate::policy::manifest as policy;
use crate::policy::model::{Policy, PolicyKind};
use crate::policy::selector::Labels;

/// Group of NetworkAttachmentDefinition and MultiNetworkPolicy.
const NETWORKS_GROUP: &str = "k8s.cni.cncf.io";

/// Group of NetworkPolicy.
const KUBERNETES_NETWORKS_GROUP: &str = "networking.k8s.io";

const MULTI_NETWORK_POLICY: &str = "MultiNetworkPolicy";
const MULTI_NETWORK_POLICY_VERSIONS: &str = "v1beta1 and v1beta2";
const NETWORK_POLICY: &str = "NetworkPolicy";

/// What stands in the names of both kinds.
const POLICY_KINDS: &str = NETWORK_POLICY;

/// One object of a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Object {
    Pod(Arc<Pod>),
    Namespace { name: String, labels: Labels },
    Definition(Definition),
    Policy(Arc<Policy>),
}

/// What an object is called among all others. Printed as in `kubectl get`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) kind: &'static str,
    pub(super) name: ObjectName,
}

/// Why a document or an item of its list gives no object.
#[derive(Debug, thiserror::Error)]
pub(super) enum ManifestError {
    #[error("parse yaml")]
    Yaml(#[source] serde_norway::Error),
    #[error("parse json")]
    Json(#[source] serde_json::Error),
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
    #[error("read {kind}")]
    Policy {
        kind: &'static str,
        #[source]
        source: policy::ManifestError,
    },
    #[error("items[{index}]")]
    Item {
        index: usize,
        #[source]
        source: Box<ManifestError>,
    },
}

impl Object {
    pub(super) fn key(&self) -> Key {
        let (kind, name) = match self {
            Self::Pod(pod) => ("pod", pod.name.clone()),
            Self::Namespace { name, .. } => ("namespace", ObjectName::new("", name)),
            Self::Definition(definition) => {
                ("network-attachment-definition", ObjectName::new(&definition.namespace, &definition.name))
            }
            Self::Policy(policy) => {
                let kind = match policy.name.kind {
                    PolicyKind::Multi => "multi-networkpolicy",
                    PolicyKind::Network => "networkpolicy",
                };
                (kind, policy.name.object.clone())
            }
        };
        Key { kind, name }
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

/// The documents of a YAML stream, each on its own, so that one that does not parse leaves the others readable.
///
/// A line that begins with `---` starts a document wherever it stands (YAML 1.2 section 9.1.4), which makes the
/// split exact without parsing. Parts with nothing but comments and directives are left out.
pub(super) fn yaml_documents(text: &str) -> impl Iterator<Item = &str> {
    let text = text.trim_start_matches('\u{feff}');
    let marker = memchr::memmem::find_iter(text.as_bytes(), "\n---").map(|end| end + 1).filter(|start| {
        let rest = &text[start + "---".len()..];
        rest.is_empty() || rest.starts_with(char::is_whitespace)
    });
    let starts: Vec<usize> = std::iter::once(0).chain(marker).collect();
    let ends: Vec<usize> = starts.iter().skip(1).copied().chain([text.len()]).collect();
    let parts = starts.into_iter().zip(ends).map(move |(start, end)| &text[start..end]);
    parts.filter(|part| part.lines().any(holds_content))
}

/// Reads one document of a YAML stream.
pub(super) fn yaml(document: &str) -> Result<Value, ManifestError> {
    match plain(document) {
        Some(value) => Ok(value),
        None => serde_norway::from_str(document).map_err(ManifestError::Yaml),
    }
}

/// Reads a document of a YAML stream that is JSON or plain, which takes a fraction of the time; `None`: it is neither, or not
/// what is wanted.
fn plain<'d, T: Deserialize<'d>>(document: &'d str) -> Option<T> {
    let text = document.strip_prefix("---").unwrap_or(document).trim_start();
    // Text in braces that is JSON is YAML and means the same.
    if text.starts_with('{') { serde_json::from_str(text).ok() } else { plain_yaml::read(document) }
}

fn holds_content(line: &str) -> bool {
    let content = line.strip_prefix("---").unwrap_or(line).trim();
    !(content.is_empty() || content == "..." || content.starts_with('#') || line.starts_with('%'))
}

/// The documents of a file with JSON texts one after the other. After one that does not parse there is no next.
pub(super) fn json_documents(text: &str) -> impl Iterator<Item = Result<Value, ManifestError>> {
    let stream = serde_json::Deserializer::from_str(text.trim_start_matches('\u{feff}')).into_iter();
    stream.map(|document| document.map_err(ManifestError::Json))
}

/// The objects of a document: several if it is a list, none if its kind is not ours.
pub(super) fn objects(document: &Value) -> Vec<Result<Object, ManifestError>> {
    if document.is_null() {
        return Vec::new();
    }
    let head = match Head::deserialize(document) {
        Ok(head) => head,
        Err(error) => return vec![Err(ManifestError::NoKind(error))],
    };
    if head.kind == "List" && head.api_version == "v1" {
        let items = head.items.unwrap_or_default();
        let numbered = items.iter().enumerate();
        return numbered
            .flat_map(|(index, item)| {
                let wrap = move |source| ManifestError::Item { index, source: Box::new(source) };
                objects(item).into_iter().map(move |object| object.map_err(wrap))
            })
            .collect();
    }
    object(&head, document).transpose().into_iter().collect()
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Head {
    api_version: String,
    kind: String,
    items: Option<Vec<Value>>,
}

fn of_version(kind: &'static str, version: &str, known: &'static str) -> Result<(), ManifestError> {
    match known.split(" and ").any(|known| known == version) {
        true => Ok(()),
        false => Err(ManifestError::Version { kind, version: version.to_owned(), known }),
    }
}

fn object(head: &Head, document: &Value) -> Result<Option<Object>, ManifestError> {
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

#[derive(Deserialize)]
struct Metadata {
    name: String,
    namespace: Option<String>,
    uid: Option<String>,
    labels: Option<Labels>,
    annotations: Option<BTreeMap<String, String>>,
}

impl Metadata {
    /// Without a namespace an object is in `default`, where `kubectl apply` would put it.
    fn object_name(&self, kind: &'static str) -> Result<ObjectName, ManifestError> {
        let namespace = self.namespace.as_deref().unwrap_or("default");
        for (field, name) in [("name", self.name.as_str()), ("namespace", namespace)] {
            if !is_subdomain(name) {
                return Err(ManifestError::Name { kind, field, name: name.to_owned() });
            }
        }
        Ok(ObjectName::new(namespace, &self.name))
    }
}

fn shape<'de, T: Deserialize<'de>>(kind: &'static str, document: &'de Value) -> Result<T, ManifestError> {
    T::deserialize(document).map_err(|source| ManifestError::Shape { kind, source })
}

#[derive(Deserialize)]
struct WrittenPod {
    metadata: Metadata,
    spec: Option<WrittenPodSpec>,
    status: Option<WrittenPodStatus>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WrittenPodSpec {
    host_network: Option<bool>,
    containers: Option<Vec<WrittenContainer>>,
    init_containers: Option<Vec<WrittenContainer>>,
    ephemeral_containers: Option<Vec<WrittenContainer>>,
}

#[derive(Deserialize)]
struct WrittenPodStatus {
    phase: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WrittenContainer {
    name: Option<String>,
    security_context: Option<SecurityContext>,
    ports: Option<Vec<WrittenContainerPort>>,
    restart_policy: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WrittenContainerPort {
    name: Option<String>,
    container_port: i64,
    protocol: Option<String>,
}

fn pod(document: &Value) -> Result<Object, ManifestError> {
    const KIND: &str = "Pod";
    let WrittenPod { metadata, spec, status } = shape(KIND, document)?;
    let name = metadata.object_name(KIND)?;
    let (host_network, powers, containers) = match spec {
        None => (false, Default::default(), Vec::new()),
        Some(spec) => {
            let all = [&spec.init_containers, &spec.containers, &spec.ephemeral_containers];
            let all = all.into_iter().flatten().flatten();
            let powers = powers(all.map(|written| {
                (written.name.as_deref().unwrap_or_default(), written.security_context.as_ref())
            }));
            let restartable = spec.init_containers.into_iter().flatten();
            let restartable = restartable.filter(|c| c.restart_policy.as_deref() == Some("Always"));
            let containers = spec.containers.into_iter().flatten().chain(restartable).collect();
            (spec.host_network.unwrap_or(false), powers, containers)
        }
    };
    let mut ports = Vec::new();
    for written in containers.into_iter().filter_map(|container| container.ports).flatten() {
        // A protocol that the API does not have can be meant by no policy.
        let protocol = written.protocol.as_deref().unwrap_or("TCP");
        let Some(protocol) = PortProtocol::from_name(protocol) else { continue };
        let port = u16::try_from(written.container_port).ok().filter(|port| *port != 0);
        let port = port.ok_or_else(|| ManifestError::ContainerPort {
            kind: KIND,
            name: name.clone(),
            port: written.container_port,
        })?;
        ports.push(ContainerPort { name: written.name, protocol, port });
    }
    Ok(Object::Pod(Arc::new(Pod {
        name,
        uid: metadata.uid,
        labels: metadata.labels.unwrap_or_default(),
        annotations: metadata.annotations.unwrap_or_default(),
        phase: phase(status.and_then(|status| status.phase).as_deref()),
        host_network,
        ports,
        powers,
    })))
}

fn phase(word: Option<&str>) -> Phase {
    match word {
        None | Some("" | "Pending") => Phase::Pending,
        Some("Running") => Phase::Running,
        Some("Succeeded") => Phase::Succeeded,
        Some("Failed") => Phase::Failed,
        Some(_) => Phase::Unknown,
    }
}

fn namespace(document: &Value) -> Result<Object, ManifestError> {
    #[derive(Deserialize)]
    struct Written {
        metadata: Metadata,
    }
    let Written { metadata } = shape("Namespace", document)?;
    let name = metadata.object_name("Namespace")?.name;
    Ok(Object::Namespace { name, labels: metadata.labels.unwrap_or_default() })
}

fn definition(document: &Value) -> Result<Object, ManifestError> {
    #[derive(Deserialize)]
    struct Written {
        metadata: Metadata,
        // As a map: serde would read a list as a struct, by position.
        spec: Option<serde_json::Map<String, Value>>,
    }
    const KIND: &str = "NetworkAttachmentDefinition";
    let Written { metadata, spec } = shape(KIND, document)?;
    let config: Option<String> = match spec.as_ref().and_then(|spec| spec.get("config")) {
        Some(config) => shape(KIND, config)?,
        None => None,
    };
    let ObjectName { namespace, name } = metadata.object_name(KIND)?;
    Ok(Object::Definition(Definition {
        namespace,
        name,
        config: config.filter(|config| !config.trim().is_empty()),
        annotations: metadata.annotations.unwrap_or_default(),
    }))
}

#[derive(Deserialize)]
struct WrittenPolicy {
    metadata: Metadata,
    spec: Value,
}

fn multi_network_policy(document: &Value) -> Result<Object, ManifestError> {
    const KIND: &str = MULTI_NETWORK_POLICY;
    let WrittenPolicy { metadata, spec } = shape(KIND, document)?;
    let name = metadata.object_name(KIND)?;
    let annotations = metadata.annotations.unwrap_or_default();
    let policy = policy::read(name, &annotations, &spec);
    let policy = policy.map_err(|source| ManifestError::Policy { kind: KIND, source })?;
    Ok(Object::Policy(Arc::new(policy)))
}

/// Reads a document that is one policy and nothing else, without taking the way through a [`Value`]: a policy of a
/// hundred thousand rules takes ten times as long by it. `None`: it is something else, or has something wrong, which
/// [`objects`] is to say.
pub(super) fn policy(json: &str) -> Option<Object> {
    if json.contains(POLICY_KINDS) { policy_of(serde_json::from_str(json).ok()?) } else { None }
}

/// As [`policy`], for a document of a YAML stream.
pub(super) fn yaml_policy(document: &str) -> Option<Object> {
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
    let WholePolicy { api_version, kind, metadata, spec } = document;
    let (group, version) = api_version.rsplit_once('/')?;
    let (kind, known) = match (group, kind.as_str()) {
        (NETWORKS_GROUP, MULTI_NETWORK_POLICY) => (MULTI_NETWORK_POLICY, MULTI_NETWORK_POLICY_VERSIONS),
        (KUBERNETES_NETWORKS_GROUP, NETWORK_POLICY) => (NETWORK_POLICY, "v1"),
        _ => return None,
    };
    of_version(kind, version, known).ok()?;
    let name = metadata.object_name(kind).ok()?;
    let policy = match kind {
        MULTI_NETWORK_POLICY => policy::read_multi(name, &metadata.annotations.unwrap_or_default(), spec),
        _ => policy::read_network(name, spec),
    };
    Some(Object::Policy(Arc::new(policy)))
}

fn network_policy(document: &Value) -> Result<Object, ManifestError> {
    const KIND: &str = NETWORK_POLICY;
    let WrittenPolicy { metadata, spec } = shape(KIND, document)?;
    let policy = policy::read_network_policy(metadata.object_name(KIND)?, &spec);
    let policy = policy.map_err(|source| ManifestError::Policy { kind: KIND, source })?;
    Ok(Object::Policy(Arc::new(policy)))
}

#[cfg(test)]
#[path = "crd_tests.rs"]
mod crd_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Chain;
    use crate::source::objects::{Grant, Powers};

    fn read(yaml: &str) -> Vec<Result<Object, String>> {
        let documents =
            yaml_documents(yaml).map(|document| self::yaml(document).map(|value| objects(&value)));
        let flat = documents.flat_map(|document| match document {
            Ok(objects) => objects,
            Err(error) => vec![Err(error)],
        });
        flat.map(|object| object.map_err(|error| Chain(&error).to_string())).collect()
    }

    fn one(yaml: &str) -> Object {
        read(yaml).remove(0).unwrap()
    }

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_pod_is_read() {
        let pod = one("
apiVersion: v1
kind: Pod
metadata:
  name: cart-0
  namespace: shop
  uid: 3f6c
  labels: {app: cart}
  annotations: {k8s.v1.cni.cncf.io/networks: net-a}
spec:
  hostNetwork: true
  initContainers:
  - {name: once, ports: [{name: setup, containerPort: 1}]}
  - {name: sidecar, restartPolicy: Always, ports: [{containerPort: 9000, protocol: UDP}]}
  containers:
  - name: web
    ports:
    - {name: http, containerPort: 8080}
  - name: silent
status: {phase: Running}
");
        let port = |name: Option<&str>, protocol, port| ContainerPort {
            name: name.map(str::to_owned),
            protocol,
            port,
        };
        assert_eq!(
            pod,
            Object::Pod(Arc::new(Pod {
                name: ObjectName::new("shop", "cart-0"),
                uid: Some("3f6c".to_owned()),
                labels: map(&[("app", "cart")]),
                annotations: map(&[("k8s.v1.cni.cncf.io/networks", "net-a")]),
                phase: Phase::Running,
                host_network: true,
                ports: vec![port(Some("http"), PortProtocol::Tcp, 8080), port(None, PortProtocol::Udp, 9000)],
                powers: Powers { admin: Grant::No, raw: Grant::To("once".to_owned()) },
            }))
        );
    }

    #[test]
    fn a_pod_needs_only_a_name() {
        let pod = one("{apiVersion: v1, kind: Pod, metadata: {name: a}}");
        assert_eq!(
            pod,
            Object::Pod(Arc::new(Pod {
                name: ObjectName::new("default", "a"),
                uid: None,
                labels: BTreeMap::new(),
                annotations: BTreeMap::new(),
                phase: Phase::Pending,
                host_network: false,
                ports: Vec::new(),
                powers: Powers::default(),
            }))
        );
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
                config: config.map(str::to_owned),
                annotations: BTreeMap::new(),
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

    #[test]
    fn documents_are_told_apart_without_parsing_them() {
        let yaml = "%YAML 1.2\n---\n# only a comment\n---\nkind: [unclosed\n--- {a: 1}\n---\ntext: |\n  --- not a marker\n---x: 1\n...\n";
        let documents: Vec<Result<Value, String>> = yaml_documents(yaml)
            .map(|document| self::yaml(document).map_err(|error| error.to_string()))
            .collect();
        assert_eq!(
            documents,
            [
                Err("parse yaml".to_owned()),
                Ok(serde_json::json!({"a": 1})),
                Ok(serde_json::json!({"text": "--- not a marker\n", "---x": 1})),
            ]
        );
        assert_eq!(yaml_documents("").count(), 0);
    }

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

    #[test]
    fn json_texts_follow_each_other_until_one_is_broken() {
        let documents: Vec<Result<Value, String>> =
            json_documents("{\"a\":1}\n[2] {").map(|d| d.map_err(|error| error.to_string())).collect();
        assert_eq!(
            documents,
            [Ok(serde_json::json!({"a": 1})), Ok(serde_json::json!([2])), Err("parse json".to_owned())]
        );
    }
}
