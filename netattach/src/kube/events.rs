//! Events of `events.k8s.io/v1` for problems that an operator has to fix, each about the affected object.
//!
//! The name of an event is a hash of its content, so that all agents of a cluster, and an agent after its
//! restart, write one event for one problem; each recurrence is counted in its series, at most once a
//! minute. If several agents find the same problem of an object that all of them read, it is not counted
//! repeatedly. All of this is best effort, with a bound on the rate and on [the queue](super::event_queue),
//! of which each namespace has a share.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::Method;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::Notify;

use super::client::{Ask, Client};
use super::event_queue::EventQueue;
use super::rate::Bucket;
use super::resource::escaped;
use super::view::View;
use crate::error_chain::{Chain, clipped};
use crate::publish::{Event, Regarding};
use crate::sync::{Mutex, MutexGuard, locked};

/// Most events whose counts are remembered.
const REMEMBERED: usize = 1024;
/// Shortest time between two counts of a recurring event.
const COUNTED: Duration = Duration::from_secs(60);
/// The steady rate, and the burst.
const INTERVAL: Duration = Duration::from_secs(1);
const BURST: u32 = 25;
/// Timeout of a request, and most bytes of its answer.
const PATIENCE: Duration = Duration::from_secs(5);
const ANSWER: usize = 64 << 10;
/// The reporting controller.
const CONTROLLER: &str = "netattach.dev/agent";

/// See the module's documentation.
pub(super) struct Events {
    view: Arc<View>,
    node: Arc<str>,
    waiting: Mutex<Waiting>,
    more: Notify,
}

#[derive(Default)]
struct Waiting {
    events: EventQueue,
    /// For each written event: when it was written, and how often it was seen.
    written: BTreeMap<u64, (Instant, u32)>,
    dropped: u64,
}

impl Events {
    pub(super) fn new(view: Arc<View>, node: Arc<str>) -> Self {
        Self { view, node, waiting: Mutex::default(), more: Notify::new() }
    }

    /// Queues an event.
    pub(super) fn put(&self, mut event: Event) {
        // A plugin's text may be very long, and many events may be queued. The API has the same limit on
        // notes.
        event.note = clipped(event.note);
        let mut waiting = self.waiting();
        if let Some(left_out) = waiting.events.put(event) {
            waiting.dropped += 1;
            if waiting.dropped.is_power_of_two() {
                let namespace = left_out.regarding.namespace();
                tracing::warn!(namespace, dropped = waiting.dropped, "events are not written: too many wait");
            }
        }
        drop(waiting);
        self.more.notify_one();
    }

    /// Writes events, forever.
    pub(super) async fn run(self: Arc<Self>, client: Arc<Client>) {
        let mut bucket = Bucket::new(INTERVAL, BURST, Instant::now());
        loop {
            let next = self.waiting().events.pop();
            let Some(event) = next else {
                self.more.notified().await;
                continue;
            };
            let Some((name, count)) = self.waiting().count(&event, Instant::now()) else { continue };
            while let Err(later) = bucket.take(Instant::now()) {
                tokio::time::sleep_until(later.into()).await;
            }
            self.write(&client, &event, &name, count).await;
        }
    }

    /// Creates the event, or counts it in the series of the existing one.
    async fn write(&self, client: &Client, event: &Event, name: &str, count: u32) {
        let namespace = match event.regarding.namespace() {
            "" => "default",
            namespace => namespace,
        };
        let path = format!("/apis/events.k8s.io/v1/namespaces/{}/events", escaped(namespace));
        let now = format!("{:.6}", Timestamp::now());
        let uid = self.uid(&event.regarding);
        let created = body(event, name, namespace, uid.as_deref(), &self.node, &now);
        let create =
            Ask { method: Method::POST, body: json_body("application/json", &created), ..Ask::get(&path) };
        let Err(error) = client.read(&create, ANSWER, PATIENCE).await else { return };
        // Another agent, or this one before its restart, has written it.
        let error = match error.code() {
            Some(409) if !is_news(&event.regarding, count) => None,
            Some(409) => {
                let series = json!({ "series": { "count": count.max(2), "lastObservedTime": now } });
                let body = json_body("application/merge-patch+json", &series);
                let target = format!("{path}/{}", escaped(name));
                let patch = Ask { method: Method::PATCH, body, ..Ask::get(target) };
                client.read(&patch, ANSWER, PATIENCE).await.err()
            }
            _ => Some(error),
        };
        if let Some(error) = error {
            tracing::debug!(about = %event.regarding, error = %Chain(&error), "event not written");
        }
    }

    fn uid(&self, regarding: &Regarding) -> Option<String> {
        match regarding {
            Regarding::Pod(name) => self.view.snapshot().pods.get(name)?.uid.clone(),
            // `kubectl describe node` selects events by this value; the kubelet sets it too.
            Regarding::Node(name) => Some(name.clone()),
            _ => None,
        }
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        locked(&self.waiting)
    }
}

impl Waiting {
    /// Returns the name of an event and its count, unless it was written just now.
    fn count(&mut self, event: &Event, now: Instant) -> Option<(String, u32)> {
        let hash = hash(event);
        if self.written.len() >= REMEMBERED && !self.written.contains_key(&hash) {
            self.written.retain(|_, (at, _)| now.duration_since(*at) < COUNTED);
            if self.written.len() >= REMEMBERED {
                self.written.clear();
            }
        }
        let (at, count) = self.written.entry(hash).or_insert((now, 0));
        *count += 1;
        if *count > 1 && now.duration_since(*at) < COUNTED {
            return None;
        }
        *at = now;
        Some((format!("{}.{hash:016x}", prefix(event.regarding.name())), *count))
    }
}

/// Whether a recurrence of an existing event is counted: this agent has seen it before, or no other agent
/// can have.
fn is_news(regarding: &Regarding, count: u32) -> bool {
    count > 1 || !regarding.is_read_by_all()
}

/// Returns the hash that identifies an event. Not random: all agents of one version compute the same.
fn hash(event: &Event) -> u64 {
    let mut hasher = DefaultHasher::new();
    event.hash(&mut hasher);
    hasher.finish()
}

/// Returns the name of the object, truncated to fit into the name of the event.
fn prefix(name: &str) -> String {
    let prefix: String = name.chars().take(200).collect();
    prefix.trim_end_matches(['.', '-']).to_owned()
}

fn json_body(kind: &'static str, value: &Value) -> Option<(&'static str, Vec<u8>)> {
    Some((kind, value.to_string().into_bytes()))
}

/// Returns the event as an API object.
fn body(event: &Event, name: &str, namespace: &str, uid: Option<&str>, node: &str, now: &str) -> Value {
    let (api_version, kind) = match &event.regarding {
        Regarding::Pod(_) => ("v1", "Pod"),
        Regarding::Definition(_) => ("k8s.cni.cncf.io/v1", "NetworkAttachmentDefinition"),
        Regarding::MultiNetworkPolicy(_) => ("k8s.cni.cncf.io/v1beta1", "MultiNetworkPolicy"),
        Regarding::NetworkPolicy(_) => ("networking.k8s.io/v1", "NetworkPolicy"),
        Regarding::Node(_) => ("v1", "Node"),
    };
    let mut regarding = json!({ "apiVersion": api_version, "kind": kind, "name": event.regarding.name() });
    if !event.regarding.namespace().is_empty() {
        regarding["namespace"] = event.regarding.namespace().into();
    }
    if let Some(uid) = uid {
        regarding["uid"] = uid.into();
    }
    json!({
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": { "name": name, "namespace": namespace },
        "eventTime": now,
        "reportingController": CONTROLLER,
        "reportingInstance": node,
        "action": event.action,
        "reason": event.reason,
        "regarding": regarding,
        "note": event.note,
        "type": "Warning",
    })
}

#[cfg(test)]
mod tests {
    use crate::kube::events::*;
    use crate::objects::ObjectName;

    fn event(note: &str) -> Event {
        Event {
            regarding: Regarding::Pod(ObjectName::new("shop", "a")),
            reason: "InvalidNetwork",
            action: "Attach",
            note: note.to_owned(),
        }
    }

    #[test]
    fn an_event_is_written_at_once_and_counted_once_a_minute() {
        let (start, mut waiting) = (Instant::now(), Waiting::default());
        let (name, count) = waiting.count(&event("x"), start).unwrap();
        assert_eq!((&name[..2], name.len(), count), ("a.", 18, 1));
        assert_eq!(waiting.count(&event("x"), start + Duration::from_secs(59)), None);
        assert_eq!(waiting.count(&event("x"), start + COUNTED), Some((name.clone(), 3)));
        assert_ne!(waiting.count(&event("y"), start).unwrap().0, name);
    }

    #[test]
    fn what_the_agents_of_all_nodes_find_is_no_news_the_first_time() {
        let name = || ObjectName::new("shop", "a");
        let table = [
            (Regarding::Pod(name()), [true, true]),
            (Regarding::Node("node-1".to_owned()), [true, true]),
            (Regarding::Definition(name()), [false, true]),
            (Regarding::MultiNetworkPolicy(name()), [false, true]),
            (Regarding::NetworkPolicy(name()), [false, true]),
        ];
        for (regarding, expected) in table {
            assert_eq!([1, 2].map(|count| is_news(&regarding, count)), expected, "{regarding:?}");
        }
    }

    #[test]
    fn an_event_names_its_object() {
        let node = Event { regarding: Regarding::Node("node-1".to_owned()), ..event("x") };
        assert_eq!(
            body(&node, "n", "default", Some("node-1"), "node-1", "t")["regarding"],
            json!({"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": "node-1"})
        );
        assert_eq!(
            body(&event("x"), "n", "shop", Some("u"), "node-1", "t"),
            json!({
                "apiVersion": "events.k8s.io/v1",
                "kind": "Event",
                "metadata": {"name": "n", "namespace": "shop"},
                "eventTime": "t",
                "reportingController": "netattach.dev/agent",
                "reportingInstance": "node-1",
                "action": "Attach",
                "reason": "InvalidNetwork",
                "regarding": {"apiVersion": "v1", "kind": "Pod", "namespace": "shop", "name": "a", "uid": "u"},
                "note": "x",
                "type": "Warning",
            })
        );
    }
}
