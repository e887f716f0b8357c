//! Evicts one pod. It is read from the server first, so that its identity and owner are taken from its
//! newest version, and evicted by its uid. The server honours PodDisruptionBudgets: it answers 429 while
//! one forbids the eviction.

use std::time::Duration;

use http::{Method, StatusCode};
use serde::Deserialize;
use serde_json::json;

use super::client::{Ask, Client, RequestError};
use super::resource::pod_path;
use crate::error_chain::Chain;
use crate::objects::ObjectName;

/// Most bytes of a pod, and of the answer to an eviction.
const POD: usize = 4 << 20;
const STATUS: usize = 64 << 10;
/// Timeout of a request.
const PATIENCE: Duration = Duration::from_secs(10);
/// The API versions of an eviction, newest first: a server before Kubernetes 1.22 knows only the second,
/// and answers 400 to the first.
const VERSIONS: [&str; 2] = ["policy/v1", "policy/v1beta1"];
/// Longest pause requested by a server that is honoured.
const MOST_ASKED: Duration = Duration::from_secs(600);

/// A pod that may be evicted, as the server has it now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Its uid.
    pub uid: String,
    /// Its controller, which creates it again.
    pub owner: Option<Owner>,
    /// Whether it is the mirror of a static pod: the kubelet runs that pod from a file, and evicting the
    /// mirror does not end it.
    pub is_static: bool,
    /// It is being deleted, or has ended.
    pub has_ended: bool,
}

/// The controller of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// Its kind, such as `ReplicaSet`.
    pub kind: String,
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
}

/// Why a pod was not evicted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotEvicted {
    /// The pod is gone, or another one has its name.
    Gone,
    /// A PodDisruptionBudget forbids it now, or the server is overloaded.
    Forbidden {
        /// The server's words.
        why: String,
        /// How long it asks to wait.
        pause: Duration,
    },
    /// The request failed.
    Failed(String),
}

#[derive(Deserialize)]
struct Pod {
    metadata: Metadata,
    #[serde(default)]
    status: Status,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    #[serde(default)]
    uid: String,
    deletion_timestamp: Option<String>,
    annotations: Option<Annotations>,
    owner_references: Option<Vec<Reference>>,
}

#[derive(Default, Deserialize)]
struct Annotations {
    #[serde(rename = "kubernetes.io/config.mirror")]
    mirror: Option<String>,
    #[serde(rename = "kubernetes.io/config.source")]
    source: Option<String>,
}

#[derive(Deserialize)]
struct Reference {
    #[serde(default)]
    kind: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    uid: String,
    #[serde(default)]
    controller: Option<bool>,
}

#[derive(Default, Deserialize)]
struct Status {
    #[serde(default)]
    phase: String,
}

/// Reads a pod.
///
/// # Errors
/// [`NotEvicted`].
pub(super) async fn candidate(client: &Client, name: &ObjectName) -> Result<Candidate, NotEvicted> {
    let ask = Ask::get(pod_path(name));
    let body = client.read(&ask, POD, PATIENCE).await.map_err(|error| failed(&error))?;
    let pod = serde_json::from_slice(&body).map_err(|source| failed(&ask.undecodable(source)))?;
    Ok(read(pod))
}

fn read(pod: Pod) -> Candidate {
    let Pod { metadata, status } = pod;
    let Annotations { mirror, source } = metadata.annotations.unwrap_or_default();
    let controls = |reference: &Reference| reference.controller == Some(true);
    let owner = metadata.owner_references.into_iter().flatten().find(controls);
    Candidate {
        uid: metadata.uid,
        // A mirror pod is owned by its node, which does not create pods.
        owner: owner.map(|Reference { kind, name, uid, .. }| Owner { kind, name, uid }),
        is_static: mirror.is_some() || source.is_some_and(|source| source != "api"),
        has_ended: metadata.deletion_timestamp.is_some()
            || matches!(status.phase.as_str(), "Succeeded" | "Failed"),
    }
}

/// Evicts the pod of that name, if it has that uid.
///
/// # Errors
/// [`NotEvicted`].
pub(super) async fn evict(client: &Client, name: &ObjectName, uid: &str) -> Result<(), NotEvicted> {
    let [newest, before] = VERSIONS.map(|version| eviction(name, uid, version));
    let refused = match client.read(&newest, STATUS, PATIENCE).await {
        Ok(_) => return Ok(()),
        Err(error) => error,
    };
    if refused.code() != Some(StatusCode::BAD_REQUEST.as_u16()) {
        return Err(failed(&refused));
    }
    client.read(&before, STATUS, PATIENCE).await.map(drop).map_err(|error| failed(&error))
}

fn eviction(name: &ObjectName, uid: &str, version: &str) -> Ask {
    let eviction = json!({
        "apiVersion": version,
        "kind": "Eviction",
        "metadata": { "namespace": name.namespace, "name": name.name },
        "deleteOptions": { "preconditions": { "uid": uid } },
    });
    let body = Some(("application/json", eviction.to_string().into_bytes()));
    Ask { method: Method::POST, body, ..Ask::get(format!("{}/eviction", pod_path(name))) }
}

fn failed(error: &RequestError) -> NotEvicted {
    let why = Chain(error).to_string();
    match error.code() {
        // 409: the uid belongs to another pod.
        Some(404 | 409) => NotEvicted::Gone,
        Some(429) => {
            let pause = error.refusal().and_then(|refusal| refusal.retry_after).unwrap_or_default();
            NotEvicted::Forbidden { why, pause: pause.min(MOST_ASKED) }
        }
        _ => NotEvicted::Failed(why),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use crate::kube::evict::*;

    fn of(metadata: &Value, phase: &str) -> Candidate {
        read(serde_json::from_value(json!({"metadata": metadata, "status": {"phase": phase}})).unwrap())
    }

    #[test]
    fn who_a_pod_is_stands_in_its_metadata() {
        let plain = Candidate { uid: "u".to_owned(), owner: None, is_static: false, has_ended: false };
        assert_eq!(of(&json!({"uid": "u"}), "Running"), plain);
        let mirror = json!({"uid": "u", "annotations": {"kubernetes.io/config.mirror": "7f"}});
        assert_eq!(of(&mirror, "Running"), Candidate { is_static: true, ..plain.clone() });
        for (source, is_static) in [("file", true), ("api", false)] {
            let written = json!({"uid": "u", "annotations": {"kubernetes.io/config.source": source}});
            assert_eq!(of(&written, "Running").is_static, is_static, "{source}");
        }
        let owners = json!([
            {"kind": "X", "name": "x", "uid": "1"},
            {"kind": "DaemonSet", "name": "log", "uid": "2", "controller": true}
        ]);
        let owner = Owner { kind: "DaemonSet".to_owned(), name: "log".to_owned(), uid: "2".to_owned() };
        assert_eq!(
            of(&json!({"uid": "u", "ownerReferences": owners}), "Running"),
            Candidate { owner: Some(owner), ..plain.clone() }
        );
        let ending = json!({"uid": "u", "deletionTimestamp": "2026-01-01T00:00:00Z"});
        assert!(of(&ending, "Running").has_ended && of(&json!({"uid": "u"}), "Failed").has_ended);
    }
}
