//! Removes the node's startup taint, which keeps pods from a node until its agent can attach them, and watches the
//! node for its return: a node that registers again has it.

use std::time::Duration;

use http::Method;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::sync::Notify;

use super::cache;
use super::client::{Ask, Client, RequestError};
use super::resource::{Target, escaped};
use super::watch::{Broken, Event, watch};

/// Most bytes of a node, which lists its images.
const NODE: usize = 4 << 20;
/// Timeout of a request.
const PATIENCE: Duration = Duration::from_secs(5);
/// Least time between two watches, if a server ends each after an event.
const BETWEEN_WATCHES: Duration = Duration::from_secs(1);

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

/// Why a node may still have its startup taint.
#[derive(Debug, thiserror::Error)]
pub(super) enum TaintError {
    /// The node could not be read.
    #[error("cannot see whether node {node} has the taint {key}")]
    Unknown {
        /// The node.
        node: String,
        /// The key of the taint.
        key: String,
        /// The cause.
        source: RequestError,
    },
    /// The removal was refused: by an admission policy, or with the status 409 if the node was changed meanwhile.
    #[error("cannot remove the taint {key} of node {node}")]
    NotRemoved {
        /// The key of the taint.
        key: String,
        /// The node.
        node: String,
        /// The cause.
        source: RequestError,
    },
}

/// Statuses of refusals that pass: another token is taken, the node is registered later or was changed meanwhile, the
/// server has too much to do.
const PASSING: [u16; 4] = [401, 404, 409, 429];

impl TaintError {
    /// Whether the server refuses it until somebody changes something: the setting, a right, an admission policy.
    pub(super) fn is_lasting(&self) -> bool {
        let (Self::Unknown { source, .. } | Self::NotRemoved { source, .. }) = self;
        source.code().is_some_and(|code| (400..500).contains(&code) && !PASSING.contains(&code))
    }
}

/// Removes the taints of that key from a node. Returns whether there was one.
///
/// # Errors
/// [`TaintError`].
pub(super) async fn remove(client: &Client, node: &str, key: &str) -> Result<bool, TaintError> {
    let ask = Ask::get(format!("/api/v1/nodes/{}", escaped(node)));
    let found = read(client, &ask).await;
    let found =
        found.map_err(|source| TaintError::Unknown { node: node.to_owned(), key: key.to_owned(), source })?;
    let Some(patch) = patch(found, key) else { return Ok(false) };
    let body = Some(("application/merge-patch+json", patch.to_string().into_bytes()));
    let patched = client.read(&Ask { method: Method::PATCH, body, ..ask }, NODE, PATIENCE).await;
    match patched {
        Ok(_) => Ok(true),
        Err(source) => Err(TaintError::NotRemoved { key: key.to_owned(), node: node.to_owned(), source }),
    }
}

async fn read(client: &Client, ask: &Ask) -> Result<Node, RequestError> {
    let body = client.read(ask, NODE, PATIENCE).await?;
    serde_json::from_slice(&body).map_err(|source| ask.undecodable(source))
}

/// Waits until the node may have a taint of that key. `since`: a version of nodes, before the node was found without.
///
/// # Errors
/// [`RequestError`]: the node cannot be watched from there.
pub(super) async fn returns(
    client: &Client,
    target: &Target<'_>,
    key: &str,
    since: String,
) -> Result<(), RequestError> {
    let is_back = Notify::new();
    let mut version = since;
    loop {
        let began = tokio::time::Instant::now();
        let from = version.clone();
        let mut had_events = false;
        let take = |event: Event<'_>| {
            let (Event::Applied(json) | Event::Deleted(json) | Event::Bookmark(json)) = event;
            had_events = true;
            if let Some(newer) = cache::version(json) {
                version = newer;
            }
            if matches!(event, Event::Applied(node) if has_taint(node, key)) {
                is_back.notify_one();
            }
        };
        // Both may be dropped: the caller looks at the node, or the next watch goes on from the last version.
        tokio::select! {
            ended = watch(client, target, &from, || (), take) => ended.map_err(Broken::error)?,
            () = is_back.notified() => return Ok(()),
        }
        // A server that was put back to an earlier state sends nothing from a version that it has not reached.
        if !had_events {
            return Ok(());
        }
        tokio::time::sleep_until(began + BETWEEN_WATCHES).await;
    }
}

fn has_taint(node: &RawValue, key: &str) -> bool {
    let node = serde_json::from_str::<Node>(node.get());
    node.is_ok_and(|node| node.spec.taints.into_iter().flatten().any(|taint| taint["key"] == key))
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
    use std::sync::Arc;

    use crate::kube::client::Refusal;
    use crate::kube::resource::{NODES_PATH, OWN_NODE};
    use crate::kube::taint::*;
    use crate::kube::test_server::{self, Answer};
    use crate::sync::{Mutex, locked};

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

    #[test]
    fn a_refusal_by_a_server_that_is_there_lasts_and_a_conflict_does_not() {
        let ask = Ask::get("/api/v1/nodes/n");
        let (key, node) = ("a/b".to_owned(), "n".to_owned());
        let not_removed = |source| TaintError::NotRemoved { key: key.clone(), node: node.clone(), source };
        let unknown = |source| TaintError::Unknown { key: key.clone(), node: node.clone(), source };
        let refused = |code: u16| {
            let message = String::new();
            ask.refused(Refusal { code, message, retry_after: None, is_of_future: false })
        };
        let is_lasting = |code: &u16| {
            let both = [not_removed(refused(*code)), unknown(refused(*code))];
            assert_eq!(both[0].is_lasting(), both[1].is_lasting(), "{code}");
            both[0].is_lasting()
        };
        let lasting: Vec<u16> = (300..600).filter(is_lasting).collect();
        assert_eq!(lasting.len(), 96);
        assert!([400, 403, 422].iter().all(|code| lasting.contains(code)), "{lasting:?}");
        assert!(![401, 404, 409, 429].iter().any(|code| lasting.contains(code)), "{lasting:?}");
        assert!(!not_removed(ask.late(PATIENCE)).is_lasting());
    }

    /// Waits for the taint `a/b`. Returns the versions from which the node was watched, and whether it may be back.
    fn awaited(mut answer: impl FnMut(usize) -> Answer + Send + 'static) -> (Vec<String>, bool) {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let all = Arc::clone(&asked);
        let script = move |target: &str| {
            let (query, version) = target.split_once("&resourceVersion=").unwrap();
            assert!(query.starts_with("/api/v1/nodes?fieldSelector=metadata.name%3Dn&watch=true"), "{query}");
            let mut all = locked(&all);
            all.push(version.to_owned());
            answer(all.len())
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let may_be_back = runtime.block_on(async {
            let client = test_server::client(script).await;
            let target =
                Target { resource: &OWN_NODE, path: NODES_PATH, node: "n", watch_seconds: 60, left_out: "" };
            returns(&client, &target, "a/b", "7".to_owned()).await.is_ok()
        });
        (std::mem::take(&mut *locked(&asked)), may_be_back)
    }

    fn event(kind: &str, version: &str, taint: &str) -> String {
        let node = json!({"metadata": {"name": "n", "resourceVersion": version},
                          "spec": {"taints": [{"key": taint, "effect": "NoSchedule"}]}});
        format!("{}\n", json!({"type": kind, "object": node}))
    }

    #[test]
    fn a_taint_that_returns_is_noticed_by_a_watch_that_goes_on_where_the_last_one_ended() {
        let answer = |number: usize| match number {
            // It was removed from this node, which is gone.
            1 => Answer::of(200, event("MODIFIED", "8", "other") + &event("DELETED", "9", "a/b")),
            // The watch stays open.
            _ => Answer { ends: None, ..Answer::of(200, event("ADDED", "10", "a/b")) },
        };
        assert_eq!(awaited(answer), (vec!["7".to_owned(), "9".to_owned()], true));
    }

    #[test]
    fn a_node_that_cannot_be_watched_from_there_is_to_be_looked_at() {
        for code in [403, 410] {
            assert_eq!(awaited(move |_| Answer::of(code, "{}")), (vec!["7".to_owned()], false), "{code}");
        }
        let silent = |_| Answer { ends: Some(Duration::from_millis(1200)), ..Answer::of(200, "") };
        assert_eq!(awaited(silent), (vec!["7".to_owned()], true));
    }
}
