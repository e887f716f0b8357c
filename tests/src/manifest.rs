//! Manifests in the form that the source reads, from JSON values (which are YAML too).

use serde_json::{Map, Value, json};

/// Namespace of the pods and their networks.
pub const NAMESPACE: &str = "shop";

/// A network definition.
pub fn network(namespace: &str, name: &str, config: &Value) -> Value {
    json!({
        "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
        "metadata": {"namespace": namespace, "name": name},
        "spec": {"config": config.to_string()}
    })
}

/// A pod in [`NAMESPACE`]; `networks` is the annotation, a string or a value that is serialised as JSON.
pub fn pod(name: &str, labels: &Value, networks: &Value) -> Value {
    let mut annotations = Map::new();
    match networks {
        Value::Null => {}
        Value::String(text) => {
            annotations.insert("k8s.v1.cni.cncf.io/networks".into(), text.as_str().into());
        }
        other => {
            annotations.insert("k8s.v1.cni.cncf.io/networks".into(), other.to_string().into());
        }
    }
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": NAMESPACE, "name": name, "labels": labels, "annotations": annotations},
        "spec": {"containers": [{"name": "main", "image": "example.com/x"}]}
    })
}

/// Adds an annotation to an object.
pub fn annotated(mut object: Value, key: &str, value: &str) -> Value {
    object["metadata"]["annotations"][key] = value.into();
    object
}

/// A namespace with a label.
pub fn namespace(name: &str, labels: &Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
}

/// A policy in [`NAMESPACE`] for some networks (`namespace/name`, comma-separated).
pub fn policy(name: &str, networks: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": "k8s.cni.cncf.io/v1beta1", "kind": "MultiNetworkPolicy",
        "metadata": {
            "namespace": NAMESPACE, "name": name,
            "annotations": {"k8s.v1.cni.cncf.io/policy-for": networks}
        },
        "spec": spec
    })
}

/// A NetworkPolicy in [`NAMESPACE`], which applies to the pods' default networks.
pub fn network_policy(name: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"namespace": NAMESPACE, "name": name},
        "spec": spec
    })
}
