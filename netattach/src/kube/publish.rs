//! Publishes the network-status of this node's pods: one patch for each change, off the way of CNI calls.
//!
//! A pod's newest status is written; one that is there already is not. A pod that is gone is left alone, and one that is
//! being deleted is given time to go: DEL of a deleted pod costs no request. A server that asks for a pause gets it from the
//! writes of all pods.

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
use super::resource::ATTACHED_LABEL;
use super::view::View;
use crate::error_chain::Chain;
use crate::npwg::{StatusEntry, status};
use crate::objects::ObjectName;
use crate::plan::PodRef;
use crate::publish::{Event, Publish, PublishError, Published};
use crate::source::Warning;
use crate::sync::{Mutex, MutexGuard, locked};

/// Writes in flight at a time.
const AT_ONCE: usize = 4;
/// The steady rate, and how many may come at once.
const INTERVAL: Duration = Duration::from_millis(50);
const BURST: u32 = 100;
/// How long a write may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// Most bytes of the answer, which has the whole pod.
const ANSWER: usize = 4 << 20;
/// How long writes may fail before it is reported.
const REPORTED: Duration = Duration::from_secs(10);

/// A write, and what became of it.
struct Sent {
    write: Write,
    outcome: Outcome,
    /// The HTTP status of a refusal.
    code: Option<u16>,
}

impl Sent {
    /// How long the server, which has too much to do, asks everybody to wait.
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
    /// Of writes, for the log.
    failures: Mutex<Failures>,
    /// Pods that have been published since the start, by this agent or its predecessor. `None`: what others have left was
    /// withdrawn, or stays.
    mine: Mutex<Option<BTreeSet<PodRef>>>,
    /// Whether those of the predecessor are among them.
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
            adopted: watch::Sender::new(false),
            more: Notify::new(),
            events,
        }
    }

    /// The events that are written.
    pub(super) fn events(&self) -> Arc<Events> {
        Arc::clone(&self.events)
    }

    /// Writes what is to be written, without end. Nothing is written before the pods are known: most of what an agent
    /// publishes at its start is there already.
    pub(super) async fn run(self: Arc<Self>, client: Arc<Client>) {
        let mut changes = self.view.changes();
        while self.view.synced().is_err() {
            if changes.changed().await.is_err() {
                return;
            }
        }
        // The cluster may be known before the journal is.
        if self.adopted.subscribe().wait_for(|adopted| *adopted).await.is_err() {
            return;
        }
        self.withdraw_unknown();
        let mut bucket = Bucket::new(INTERVAL, BURST, Instant::now());
        let mut writing = JoinSet::new();
        // When the server may be written to again.
        let mut from = Instant::now();
        loop {
            let wake = match from > Instant::now() {
                true => from,
                false => self.start(&client, &mut bucket, &mut writing),
            };
            let sleep = tokio::time::sleep_until(wake.into());
            // All three may be dropped at any time: a notice is kept, writes go on.
            tokio::select! {
                () = self.more.notified() => {}
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

    /// Starts the writes that are due, as far as rate and number allow. Returns when to look again.
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
        let labelled = snapshot.pods.values().filter(|pod| pod.labels.contains_key(ATTACHED_LABEL));
        // An earlier pod of the name, whose DEL is still to come, is another one.
        for pod in labelled.filter(|pod| !mine.iter().any(|of| of.is(pod))) {
            self.queue().put(pod.name.clone(), pod.uid.clone(), Status::Detached, None, Instant::now());
        }
    }

    fn put(&self, pod: &PodRef, status: Status, waiter: Option<Waiter>) {
        if let Some(mine) = self.mine().as_mut() {
            mine.insert(pod.clone());
        }
        self.queue().put(pod.name.clone(), pod.uid.clone(), status, waiter, Instant::now());
        self.more.notify_one();
    }

    /// A condition of the writes that an operator should know.
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
        self.put(pod, attached(entries), None);
        Ok(())
    }

    fn publish_within(
        &self,
        pod: &PodRef,
        entries: &[StatusEntry],
        within: Duration,
    ) -> Result<(), PublishError> {
        let (waiter, written) = mpsc::channel();
        self.put(pod, attached(entries), Some(waiter));
        let failed = |why: String| PublishError { place: format!("pod {pod}"), source: why.into() };
        match written.recv_timeout(within) {
            Ok(outcome) => outcome.map_err(failed),
            Err(_) => {
                let why = self.queue().failure_of(&pod.name).map(str::to_owned);
                Err(failed(why.unwrap_or_else(|| format!("not written within {} s", within.as_secs()))))
            }
        }
    }

    fn published(&self, pod: &PodRef, entries: &[StatusEntry]) -> Published {
        let status = attached(entries);
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
        // The status of an earlier pod of the name went with its object. What is to be written of the later one stays so.
        if snapshot.pods.get(&pod.name).is_none_or(|object| pod.is(object)) {
            self.put(pod, Status::Detached, None);
        }
        Ok(())
    }

    /// Takes effect when the pods are known. Until it is called, nothing is written.
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

fn attached(entries: &[StatusEntry]) -> Status {
    Status::Attached { text: status::render(entries) }
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

/// What became of a write that the server has not confirmed.
fn failed(error: &RequestError) -> Outcome {
    let why = Chain(error).to_string();
    match error.code() {
        // The pod is gone, or another one has its name. A server that answers 409 in the latter case is asked again
        // until the watch shows the other pod: 409 may also be a conflict with another writer.
        Some(404) => Outcome::Gone(why),
        // A uid is immutable. Another field, or a policy of admission, is not the pod's fate.
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
