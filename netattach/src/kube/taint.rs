//! Removes the node's startup taint, which keeps pods from a node until its agent can attach them.

use std::time::Duration;

use http::Method;
use serde::Deserialize;
use serde_json::{Value, json};

use super::client::{Ask, Client, RequestError};
use super::resource::escaped;

/// Most bytes of a node, which lists its images.
const NODE: usize = 4 << 20;
/// Timeout of a request.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Deserialize)]
struct Node {
    metadata: Metadata,
    #[serde(default)]
    spec: Spec,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    resource_version: String,
}

#[derive(Deserialize, Default)]
struct Spec {
    #[serde(default)]
    taints: Option<Vec<Value>>,
}

/// Removes the taints of that key from a node. Returns whether there was one.
///
/// # Errors
/// [`RequestError`]; with the status 409 if the node was changed meanwhile.
pub(super) async fn remove(client: &Client, node: &str, key: &str) -> Result<bool, RequestError> {
    let ask = Ask::get(format!("/api/v1/nodes/{}", escaped(node)));
    let body = client.read(&ask, NODE, PATIENCE).await?;
    let found: Node = serde_json::from_slice(&body).map_err(|source| ask.undecodable(source))?;
    let Some(patch) = patch(found, key) else { return Ok(false) };
    let body = Some(("application/merge-patch+json", patch.to_string().into_bytes()));
    client.read(&Ask { method: Method::PATCH, body, ..ask }, NODE, PATIENCE).await?;
    Ok(true)
}

/// Returns the merge patch that removes the taints with a key. A merge patch replaces the list, so it is
/// valid for this version only.
fn patch(node: Node, key: &str) -> Option<Value> {
    let taints = node.spec.taints.unwrap_or_default();
    let (of_key, others): (Vec<Value>, Vec<Value>) =
        taints.into_iter().partition(|taint| taint["key"] == key);
    let metadata = json!({ "resourceVersion": node.metadata.resource_version });
    (!of_key.is_empty()).then(|| json!({ "metadata": metadata, "spec": { "taints": others } }))
}

#[cfg(test)]
mod tests {
    use crate::kube::taint::*;

    #[test]
    fn the_taints_of_the_key_go_and_others_stay() {
        let node = |taints: Value| {
            serde_json::from_value(json!({"metadata": {"resourceVersion": "7"}, "spec": {"taints": taints}}))
                .unwrap()
        };
        let (ours, other) =
            (json!({"key": "a/b", "effect": "NoExecute"}), json!({"key": "c", "effect": "NoSchedule"}));
        assert_eq!(
            patch(node(json!([ours, other])), "a/b"),
            Some(json!({"metadata": {"resourceVersion": "7"}, "spec": {"taints": [other]}}))
        );
        assert_eq!(patch(node(json!([other])), "a/b"), None);
        assert_eq!(patch(node(Value::Null), "a/b"), None);
    }
}
