//! Publishes the network-status of this node's pods: one patch for each change, independently of CNI calls.
//!
//! The newest status of a pod is written, unless the pod already has it. A deleted pod is skipped, and a
//! pod that is being deleted is given time to end, so that DEL of a deleted pod needs no request. If the
//! server asks for a pause, the writes of all pods pause.
//!
//! Pods of this node that another plugin has attached, such as Multus before netattach replaced it, get the
//! label without which the agents of other nodes do not read their status. The status stays that plugin's.

use std::collections::BTreeSet;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use http::Method;
use serde_json::value::RawValue;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;

use super::cache;
use super::client::{Ask, Client, RequestError};
use super::events::Events;
use super::failures::{Failures, Line};
use super::patch::{self, Status};
use super::queue::{Outcome, Queue, Waiter, Write};
use super::rate::Bucket;
use super::view::View;
use crate::error_chain::Chain;
use crate::npwg::StatusEntry;
use crate::objects::{Identity, ObjectName, Pod};
use crate::plan::PodRef;
use crate::publish::{Event, Publish, PublishError, Published};
use crate::source::Warning;
use crate::sync::{Mutex, MutexGuard, locked};

/// Concurrent writes.
const AT_ONCE: usize = 4;
/// The steady rate, and the burst.
const INTERVAL: Duration = Duration::from_millis(50);
const BURST: u32 = 100;
/// Timeout of a write.
const PATIENCE: Duration = Duration::from_secs(10);
/// Most bytes of the answer, which has the whole pod.
const ANSWER: usize = 4 << 20;
/// How long writes may fail before a warning is reported.
const REPORTED: Duration = Duration::from_secs(10);

/// A write, and its result.
struct Sent {
    write: Write,
    outcome: Outcome,
    /// The HTTP status of a refusal.
    code: Option<u16>,
}

impl Sent {
    /// Returns how long an overloaded server asks all clients to wait.
    fn pause(&self) -> Option<Duration> {
        match (&self.outcome, self.code) {
            (Outcome::Failed { pause, .. }, Some(429 | 503)) if !pause.is_zero() => Some(*pause),
            _ => None,
        }
    }
}

/// See the module's documentation.
pub struct Publisher {
    view: Arc<View>,
    queue: Mutex<Queue>,
    /// Failures of writes, for the log.
    failures: Mutex<Failures>,
    /// Pods published since the start, by this agent or its predecessor. `None`: leftovers of others were
    /// withdrawn, or are kept.
    mine: Mutex<Option<BTreeSet<PodRef>>>,
    /// The names of the pods whose status this agent publishes. Locked before the queue.
    own: Mutex<BTreeSet<ObjectName>>,
    /// Whether those of the predecessor are included.
    adopted: watch::Sender<bool>,
    more: Notify,
    events: Arc<Events>,
}

impl std::fmt::Debug for Publisher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Publisher").field("queue", &self.queue).finish_non_exhaustive()
    }
}

impl Publisher {
    pub(super) fn new(view: Arc<View>, node: Arc<str>) -> Self {
        let events = Arc::new(Events::new(Arc::clone(&view), node));
        Self {
            view,
            queue: Mutex::default(),
            failures: Mutex::default(),
            mine: Mutex::new(Some(BTreeSet::new())),
            own: Mutex::default(),
            adopted: watch::Sender::new(false),
            more: Notify::new(),
            events,
        }
    }

    /// Returns the writer of events.
    pub(super) fn events(&self) -> Arc<Events> {
        Arc::clone(&self.events)
    }

    /// Writes queued statuses, forever. Waits until the pods are known: at the start most statuses are
    /// already written.
    pub(super) async fn run(self: Arc<Self>, client: Arc<Client>) {
        let mut changes = self.view.changes();
        while self.view.synced().is_err() {
            if changes.changed().await.is_err() {
                return;
            }
        }
        // The cluster may be read before the journal.
        if self.adopted.subscribe().wait_for(|adopted| *adopted).await.is_err() {
            return;
        }
        self.withdraw_unknown();
        let mut bucket = Bucket::new(INTERVAL, BURST, Instant::now());
        let mut writing = JoinSet::new();
        // When the server may be written to again.
        let mut from = Instant::now();
        let mut looked = Identity::default();
        loop {
            self.look_for_others(&mut looked);
            let wake = match from > Instant::now() {
                true => from,
                false => self.start(&client, &mut bucket, &mut writing),
            };
            let sleep = tokio::time::sleep_until(wake.into());
            // All may be dropped at any time: a notification or a change is kept, and writes continue.
            tokio::select! {
                () = self.more.notified() => {}
                changed = changes.changed() => {
                    if changed.is_err() {
                        return;
                    }
                }
                () = sleep => {}
                Some(done) = writing.join_next() => {
                    if let Ok(sent) = done {
                        from = sent.pause().map_or(from, |pause| from.max(Instant::now() + pause));
                        self.done(sent);
                    }
                }
            }
        }
    }

    /// Starts the writes that are due, within rate and number. Returns when to call again.
    fn start(&self, client: &Arc<Client>, bucket: &mut Bucket, writing: &mut JoinSet<Sent>) -> Instant {
        let idle = Duration::from_secs(3600);
        let snapshot = self.view.snapshot();
        let known = |name: &ObjectName| snapshot.pods.get(name).map(|pod| &**pod);
        self.queue().sweep(Instant::now(), known);
        loop {
            let now = Instant::now();
            if writing.len() >= AT_ONCE {
                return now + idle;
            }
            let mut queue = self.queue();
            match queue.due() {
                None => return now + idle,
                Some(due) if due > now => return due,
                Some(_) => {}
            }
            if let Err(later) = bucket.take(now) {
                return later;
            }
            let Some(write) = queue.next(now, known) else {
                continue;
            };
            let client = Arc::clone(client);
            writing.spawn(async move { send(&client, write).await });
        }
    }

    fn done(&self, sent: Sent) {
        let Sent { write, outcome, code } = sent;
        match &outcome {
            Outcome::Written(_) => {}
            Outcome::Gone(why) => {
                tracing::debug!(pod = %write.name, why, "network-status not needed any more")
            }
            Outcome::Failed { why, .. } => {
                let line = locked(&self.failures).line(code, Instant::now());
                match line {
                    Line::Failure => {
                        tracing::warn!(pod = %write.name, why, "network-status not published; it will be tried again");
                    }
                    Line::More(more) => tracing::warn!(
                        pod = %write.name,
                        why,
                        more,
                        "network-status still not published, and more failures since then; see netattachctl status"
                    ),
                    Line::Nothing => {}
                }
            }
        }
        self.queue().done(write, &outcome, Instant::now());
    }

    /// Withdraws the status of pods that an earlier agent was detaching when it stopped.
    fn withdraw_unknown(&self) {
        let Some(mine) = self.mine().take() else { return };
        let snapshot = self.view.snapshot();
        let labelled = snapshot.pods.values().filter(|pod| !pod.is_by_another());
        // An earlier pod of the same name, whose DEL is still to come, is a different pod.
        for pod in labelled.filter(|pod| !mine.iter().any(|of| of.is(pod))) {
            self.queue().put(pod.name.clone(), pod.uid.clone(), Status::Detached, None, Instant::now());
        }
    }

    /// Queues the labels of pods that another plugin has attached, if the pods have changed since.
    fn look_for_others(&self, looked: &mut Identity<ObjectName, Arc<Pod>>) {
        let snapshot = self.view.snapshot();
        if looked.is_of(&snapshot.pods) {
            return;
        }
        *looked = snapshot.pods.identity();
        let own = locked(&self.own);
        let mut queue = self.queue();
        for pod in snapshot.pods.values().filter(|pod| !own.contains(&pod.name)) {
            if let Some(status) = Status::of_another(pod) {
                queue.put_of_another(pod, status, Instant::now());
            }
        }
    }

    fn put(&self, pod: &PodRef, status: Status, waiter: Option<Waiter>) {
        if let Some(mine) = self.mine().as_mut() {
            mine.insert(pod.clone());
        }
        {
            let mut own = locked(&self.own);
            match status {
                Status::Attached { .. } => own.insert(pod.name.clone()),
                _ => own.remove(&pod.name),
            };
        }
        self.queue().put(pod.name.clone(), pod.uid.clone(), status, waiter, Instant::now());
        self.more.notify_one();
    }

    /// Returns a warning about the writes for the operator.
    pub(super) fn warning(&self) -> Option<Warning> {
        let queue = self.queue();
        let (pods, since, why) = queue.failing().filter(|(_, since, _)| since.elapsed() >= REPORTED)?;
        Some(Warning {
            object: "network-status".to_owned(),
            problem: format!("of {pods} pods not published for {} s: {why}", since.elapsed().as_secs()),
        })
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        locked(&self.queue)
    }

    fn mine(&self) -> MutexGuard<'_, Option<BTreeSet<PodRef>>> {
        locked(&self.mine)
    }
}

impl Publish for Publisher {
    /// Queues the status; never blocks.
    fn publish(&self, pod: &PodRef, entries: &[StatusEntry]) -> Result<(), PublishError> {
        self.put(pod, Status::attached(entries), None);
        Ok(())
    }

    fn publish_within(
        &self,
        pod: &PodRef,
        entries: &[StatusEntry],
        within: Duration,
    ) -> Result<(), PublishError> {
        let (waiter, written) = mpsc::channel();
        self.put(pod, Status::attached(entries), Some(waiter));
        let failed =
            |why: String, is_gone| PublishError { place: format!("pod {pod}"), is_gone, source: why.into() };
        match written.recv_timeout(within) {
            // A waiting ADD gets only final failures: a write that may succeed later is retried.
            Ok(outcome) => outcome.map_err(|why| failed(why, true)),
            Err(_) => {
                let why = self.queue().failure_of(&pod.name).map(str::to_owned);
                let why = why.unwrap_or_else(|| format!("not written within {} s", within.as_secs()));
                Err(failed(why, false))
            }
        }
    }

    fn published(&self, pod: &PodRef, entries: &[StatusEntry]) -> Published {
        let status = Status::attached(entries);
        let snapshot = self.view.snapshot();
        let Some(known) = snapshot.pods.get(&pod.name) else { return Published::Unknown };
        let version = self.view.version_of(&pod.name);
        self.queue().published(known, version, pod.uid.as_deref(), &status, Instant::now())
    }

    fn report(&self, event: Event) {
        self.events.put(event);
    }

    fn withdraw(&self, pod: &PodRef) -> Result<(), PublishError> {
        let snapshot = self.view.snapshot();
        // The status of an earlier pod of the name was deleted with its object. A queued status of the
        // later pod stays queued.
        if snapshot.pods.get(&pod.name).is_none_or(|object| pod.is(object)) {
            self.put(pod, Status::Detached, None);
        }
        Ok(())
    }

    /// Takes effect when the pods are known. Until this is called, nothing is written.
    fn withdraw_others(&self, attached: Option<&BTreeSet<PodRef>>) -> Result<(), PublishError> {
        {
            let mut mine = self.mine();
            match attached {
                Some(attached) => mine.iter_mut().for_each(|mine| mine.extend(attached.iter().cloned())),
                None => *mine = None,
            }
        }
        self.adopted.send_replace(true);
        Ok(())
    }
}

async fn send(client: &Client, write: Write) -> Sent {
    let ask = Ask {
        method: Method::PATCH,
        body: Some(("application/merge-patch+json", write.patch.to_string().into_bytes())),
        ..Ask::get(patch::path(&write.name))
    };
    match client.read(&ask, ANSWER, PATIENCE).await {
        Ok(pod) => {
            let pod = serde_json::from_slice::<&RawValue>(&pod).ok();
            let version = pod.and_then(cache::version).as_deref().and_then(cache::number);
            Sent { write, outcome: Outcome::Written(version), code: None }
        }
        Err(error) => Sent { write, outcome: failed(&error), code: error.code() },
    }
}

/// Classifies the result of a write that failed.
fn failed(error: &RequestError) -> Outcome {
    let why = Chain(error).to_string();
    match error.code() {
        // The pod is deleted, or another one has its name. A server may answer 409 in the latter case; then
        // the write is repeated until the watch shows the other pod, as 409 may also be a conflict with
        // another writer.
        Some(404) => Outcome::Gone(why),
        // A uid is immutable. Another field, or an admission policy, says nothing about the pod.
        Some(422) if why.contains("metadata.uid") => Outcome::Gone(why),
        code => Outcome::Failed {
            why,
            pause: error.asked_pause(),
            maybe_written: matches!(code, None | Some(500 | 502 | 504)),
        },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::super::client::Refusal;
    use super::*;

    #[test]
    fn the_pause_that_an_overloaded_server_asks_for_is_one_of_all_writes() {
        let seconds = |seconds| Duration::from_secs(seconds);
        let table = [
            (429, Some(3), Some(seconds(3))),
            (503, Some(3), Some(seconds(3))),
            (503, Some(u64::MAX), Some(seconds(60))),
            (503, None, None),
            (500, Some(3), None),
            (404, Some(3), None),
        ];
        for (code, asked, expected) in table {
            let retry_after = asked.map(seconds);
            let refusal = Refusal { code, message: String::new(), retry_after, is_of_future: false };
            let error = Ask::get("/p").refused(refusal);
            let write = Write {
                name: ObjectName::new("shop", "a"),
                uid: None,
                status: Status::Detached,
                patch: Value::Null,
            };
            let sent = Sent { write, outcome: failed(&error), code: error.code() };
            assert_eq!(sent.pause(), expected, "{code} {asked:?}");
        }
    }
}
