//! The form of objects in answers: with the type of the requested version, whole or only their metadata.

use hyper::HeaderMap;
use serde_json::{Map, Value, json};

use super::kinds::Kind;

/// The requested form of objects.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) kind: &'static Kind,
    pub(super) version: &'static str,
    /// As `PartialObjectMetadata`.
    pub(super) metadata_only: bool,
}

impl Shape {
    pub(super) fn of(kind: &'static Kind, version: &'static str, headers: &HeaderMap) -> Self {
        let accept =
            headers.get(hyper::header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
        // The first acceptable form wins; `as=PartialObjectMetadata` begins `as=PartialObjectMetadataList` too.
        let first = accept.split(',').next().unwrap_or_default();
        Self { kind, version, metadata_only: first.contains("as=PartialObjectMetadata") }
    }

    /// An object by itself or in a watch.
    pub(super) fn object(&self, object: &Value) -> Value {
        let mut shaped = Map::new();
        if self.metadata_only {
            shaped.insert("kind".into(), json!("PartialObjectMetadata"));
            shaped.insert("apiVersion".into(), json!("meta.k8s.io/v1"));
            shaped.insert("metadata".into(), object["metadata"].clone());
            return Value::Object(shaped);
        }
        shaped.insert("apiVersion".into(), json!(self.kind.api_version(self.version)));
        shaped.insert("kind".into(), json!(self.kind.kind));
        match object {
            Value::Object(fields) => {
                shaped.extend(fields.iter().map(|(key, value)| (key.clone(), value.clone())));
                Value::Object(shaped)
            }
            // Not an object at all: the test wants it unchanged.
            other => other.clone(),
        }
    }

    /// An object in a list. Items of built-in kinds have no type.
    fn item(&self, object: &Value) -> Value {
        if self.metadata_only || self.kind.custom { self.object(object) } else { object.clone() }
    }

    /// A page of a list.
    pub(super) fn list<'a>(
        &self,
        version: u64,
        items: impl Iterator<Item = &'a Value>,
        rest: Option<(String, Option<usize>)>,
    ) -> Value {
        let (kind, api_version) = if self.metadata_only {
            ("PartialObjectMetadataList".to_owned(), "meta.k8s.io/v1".to_owned())
        } else {
            (format!("{}List", self.kind.kind), self.kind.api_version(self.version))
        };
        let mut metadata = json!({"resourceVersion": version.to_string()});
        if let Some((token, left)) = rest {
            metadata["continue"] = json!(token);
            if let Some(left) = left {
                metadata["remainingItemCount"] = json!(left);
            }
        }
        let items: Vec<Value> = items.map(|object| self.item(object)).collect();
        json!({"kind": kind, "apiVersion": api_version, "metadata": metadata, "items": items})
    }

    /// The object of a bookmark; `initial`: the one that ends the initial events.
    pub(super) fn bookmark(&self, version: u64, initial: bool) -> Value {
        let mut metadata = json!({"resourceVersion": version.to_string(), "creationTimestamp": null});
        if initial {
            metadata["annotations"] = json!({"k8s.io/initial-events-end": "true"});
        }
        let mut object = json!({"metadata": metadata});
        if !self.kind.custom && !self.metadata_only {
            object["spec"] = if self.kind.kind == "Pod" { json!({"containers": null}) } else { json!({}) };
            object["status"] = json!({});
        }
        self.object(&object)
    }
}
