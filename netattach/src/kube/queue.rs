//! The statuses to be written: the newest of each pod, with one write of a pod at a time. Pure.

use std::collections::BTreeMap;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::backoff::Backoff;
use super::patch::{Status, is_written, patch};
use crate::objects::{ObjectName, Pod};
use crate::publish::Published;

/// Pauses between attempts.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const MOST_PAUSE: Duration = Duration::from_secs(60);

/// How long the watch may take to show a write.
const LAG: Duration = Duration::from_secs(30);

/// How long the withdrawal for a pod that is being deleted waits for the pod's end, which makes the
/// withdrawal unnecessary. A kubelet removes the object some seconds after DEL; with a finalizer it may
/// stay indefinitely.
const END: Duration = Duration::from_secs(10);

/// How often records of writes are removed for pods without a pending status.
const SWEEP: Duration = Duration::from_secs(60);

/// A caller that waits for the result of a write.
pub(super) type Waiter = Sender<Result<(), String>>;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Queue {
    wanted: BTreeMap<ObjectName, Wanted>,
    /// Running writes.
    writing: BTreeMap<ObjectName, Vec<Waiter>>,
    /// The last write of each pod, until the watch shows it. `None`: it is not known whether the last write
    /// took effect, and the watch may show the state before it.
    written: BTreeMap<ObjectName, Option<Last>>,
    /// When `written` was last swept.
    swept: Option<Instant>,
}

/// The last write.
#[derive(Debug)]
struct Last {
    uid: Option<String>,
    status: Status,
    /// The version that the server then gave to the pod, if it is a number.
    version: Option<u64>,
    at: Instant,
}

#[derive(Debug)]
struct Wanted {
    uid: Option<String>,
    status: Status,
    waiters: Vec<Waiter>,
    backoff: Backoff,
    due: Instant,
    end: End,
    /// Since when writes of the pod have failed, and the last reason.
    failing: Option<(Instant, String)>,
}

/// The expected end of a pod whose status is to be withdrawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// It is not known to end.
    Open,
    /// Its end is awaited until the withdrawal is due.
    Awaited,
    /// It did not end in that time.
    Overdue,
}

/// One write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Write {
    pub(super) name: ObjectName,
    /// The uid by which the runtime knows the pod.
    pub(super) uid: Option<String>,
    pub(super) status: Status,
    /// Its patch, with the values of the known object: its uid and its ports.
    pub(super) patch: Value,
}

/// The outcome of a write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Written; the version of the pod in the server's answer.
    Written(Option<u64>),
    /// The pod is deleted, or another one has its name.
    Gone(String),
    /// It may succeed later, not before this pause.
    Failed {
        why: String,
        pause: Duration,
        /// The server may have carried it out: its answer was lost, or reported only a failure.
        maybe_written: bool,
    },
}

impl Last {
    /// Whether a pod of that version includes this write.
    fn is_shown_by(&self, version: Option<u64>) -> bool {
        matches!((self.version, version), (Some(written), Some(shown)) if shown >= written)
    }
}

impl Wanted {
    /// Whether it waits for the end of its pod from now on. This happens only once.
    fn waits_for_end(&mut self, pod: Option<&Pod>, now: Instant) -> bool {
        let is_ending = self.status == Status::Detached && pod.is_some_and(|pod| pod.terminating);
        self.end = match self.end {
            End::Open if is_ending => End::Awaited,
            End::Open => End::Open,
            End::Awaited | End::Overdue => End::Overdue,
        };
        if self.end == End::Awaited {
            self.due = now + END;
        }
        self.end == End::Awaited
    }
}

impl Queue {
    /// Sets the status to write for a pod, replacing an older one that is not written yet.
    pub(super) fn put(
        &mut self,
        name: ObjectName,
        uid: Option<String>,
        status: Status,
        waiter: Option<Waiter>,
        now: Instant,
    ) {
        let mut wanted = Wanted {
            uid,
            status,
            waiters: Vec::new(),
            backoff: Backoff::new(FIRST_PAUSE, MOST_PAUSE),
            due: now,
            end: End::Open,
            failing: None,
        };
        if let Some(older) = self.wanted.remove(&name) {
            // A repeated withdrawal does not postpone the waiting one.
            if older.end == End::Awaited && older.status == wanted.status && older.uid == wanted.uid {
                (wanted.due, wanted.end) = (older.due, older.end);
            }
            wanted.failing = older.failing.filter(|_| older.uid == wanted.uid);
            match is_another(&older.uid, &wanted.uid) {
                true => tell(older.waiters, &Err("another pod has its name now".to_owned())),
                false => wanted.waiters = older.waiters,
            }
        }
        wanted.waiters.extend(waiter);
        self.wanted.insert(name, wanted);
    }

    /// Sets what to write for a pod that another plugin has attached, unless it is written or pending, or
    /// something about attachments of the pod is pending.
    pub(super) fn put_of_another(&mut self, pod: &Pod, status: Status, now: Instant) {
        self.forget_seen(&pod.name, Some(pod));
        // The watch may never show the write alone: another writer's change can come together with it.
        let is_lost = |last: &Option<Last>| last.as_ref().is_some_and(|it| now.duration_since(it.at) >= LAG);
        if self.written.get(&pod.name).is_some_and(is_lost) {
            self.written.remove(&pod.name);
        }
        let is_pending = self.wanted.get(&pod.name).is_some_and(|wanted| {
            !is_another(&wanted.uid, &pod.uid) && (wanted.status == status || wanted.status.is_own())
        });
        if !is_pending && !is_written(pod, &status) {
            self.put(pod.name.clone(), pod.uid.clone(), status, None, now);
        }
    }

    /// Returns the next write that is due and necessary. `known`: the pod as the watch shows it.
    pub(super) fn next<'p>(
        &mut self,
        now: Instant,
        known: impl Fn(&ObjectName) -> Option<&'p Pod>,
    ) -> Option<Write> {
        loop {
            let due =
                |(name, it): &(&ObjectName, &Wanted)| it.due <= now && !self.writing.contains_key(*name);
            let (name, _) = self.wanted.iter().filter(due).min_by_key(|(_, it)| it.due)?;
            let name = name.clone();
            let pod = known(&name);
            self.forget_seen(&name, pod);
            let is_needed = self.is_needed(&name, pod);
            // Kept during the write, for a retry.
            let wanted = self.wanted.get_mut(&name)?;
            let waiters = std::mem::take(&mut wanted.waiters);
            if is_needed && wanted.waits_for_end(pod, now) {
                tell(waiters, &Ok(()));
                continue;
            }
            if is_needed {
                self.writing.insert(name.clone(), waiters);
                // A static pod's uid in the runtime differs from that of its object.
                let object_uid = pod.and_then(|pod| pod.uid.clone()).or_else(|| wanted.uid.clone());
                let (uid, status) = (wanted.uid.clone(), wanted.status.clone());
                let patch = patch(object_uid.as_deref(), pod, &status);
                return Some(Write { name, uid, status, patch });
            }
            self.wanted.remove(&name);
            tell(waiters, &Ok(()));
        }
    }

    /// Removes the record of a write that the watch shows.
    fn forget_seen(&mut self, name: &ObjectName, pod: Option<&Pod>) {
        if let Some(last @ Some(_)) = self.written.get(name)
            && pod.is_none_or(|pod| is_shown(pod, last.as_ref()))
        {
            self.written.remove(name);
        }
    }

    /// From time to time removes the records of writes of pods without a pending status, once the watch
    /// shows them or the pods are deleted: no caller may ever ask about a detached pod again. Records of
    /// existing pods remain.
    pub(super) fn sweep<'p>(&mut self, now: Instant, known: impl Fn(&ObjectName) -> Option<&'p Pod>) {
        if self.swept.is_some_and(|swept| now.duration_since(swept) < SWEEP) {
            return;
        }
        self.swept = Some(now);
        let Self { wanted, writing, written, .. } = self;
        written.retain(|name, last| {
            let in_use = wanted.contains_key(name) || writing.contains_key(name);
            in_use || known(name).is_some_and(|pod| !is_shown(pod, last.as_ref()))
        });
    }

    fn is_needed(&self, name: &ObjectName, pod: Option<&Pod>) -> bool {
        let Some(wanted) = self.wanted.get(name) else { return false };
        let is_other = pod.is_some_and(|pod| wanted.uid.as_deref().is_some_and(|uid| !pod.has_uid(uid)));
        let is_of_known = !matches!(wanted.status, Status::Attached { .. });
        if is_other || (is_of_known && pod.is_none()) {
            return false;
        }
        match self.written.get(name) {
            Some(Some(last)) => last.status != wanted.status || last.uid != wanted.uid,
            Some(None) => true,
            None => pod.is_none_or(|pod| !is_written(pod, &wanted.status)),
        }
    }

    /// Whether the pod, in the version that the watch shows, has lost the last write. A write that the
    /// watch does not show counts as lost after [`LAG`].
    pub(super) fn published(
        &mut self,
        pod: &Pod,
        version: Option<u64>,
        uid: Option<&str>,
        status: &Status,
        now: Instant,
    ) -> Published {
        let name = &pod.name;
        if self.wanted.contains_key(name) || self.writing.contains_key(name) {
            return Published::Unknown;
        }
        let is_ours = !pod.terminating && uid.is_none_or(|uid| pod.has_uid(uid));
        if !is_ours || is_written(pod, status) {
            self.forget_seen(name, Some(pod));
            return Published::AsShown;
        }
        match self.written.get(name) {
            Some(Some(last)) if now.duration_since(last.at) < LAG && !last.is_shown_by(version) => {
                Published::Unknown
            }
            // Another write is needed.
            _ => {
                self.written.remove(name);
                Published::Drifted
            }
        }
    }

    /// Records the result of a write.
    pub(super) fn done(&mut self, write: Write, outcome: &Outcome, now: Instant) {
        let waiters = self.writing.remove(&write.name).unwrap_or_default();
        let is_newest =
            self.wanted.get(&write.name).is_some_and(|it| it.status == write.status && it.uid == write.uid);
        match outcome {
            Outcome::Written(version) => {
                if is_newest {
                    self.answer_newer(&write.name);
                } else if let Some(wanted) = self.wanted_of(&write) {
                    wanted.failing = None;
                }
                let last = Last { uid: write.uid, status: write.status, version: *version, at: now };
                self.written.insert(write.name, Some(last));
                tell(waiters, &Ok(()));
            }
            Outcome::Gone(why) => {
                if is_newest {
                    self.answer_newer(&write.name);
                } else if let Some(wanted) = self.wanted_of(&write) {
                    wanted.failing = None;
                }
                self.written.remove(&write.name);
                tell(waiters, &Err(why.clone()));
            }
            Outcome::Failed { why, pause, maybe_written } => {
                if *maybe_written {
                    self.written.insert(write.name.clone(), None);
                }
                match self.wanted_of(&write) {
                    Some(wanted) => {
                        wanted.failing.get_or_insert_with(|| (now, String::new())).1.clone_from(why);
                        wanted.due = now + wanted.backoff.next().max(*pause);
                        wanted.waiters.extend(waiters);
                    }
                    // Not retried: the name belongs to another pod now.
                    None => tell(waiters, &Err(why.clone())),
                }
            }
        }
    }

    /// Returns the pending status of the pod of a write, unless the name belongs to another pod now.
    fn wanted_of(&mut self, write: &Write) -> Option<&mut Wanted> {
        self.wanted.get_mut(&write.name).filter(|wanted| wanted.uid == write.uid)
    }

    fn answer_newer(&mut self, name: &ObjectName) {
        if let Some(wanted) = self.wanted.remove(name) {
            tell(wanted.waiters, &Ok(()));
        }
    }

    /// Returns when the next write is due.
    pub(super) fn due(&self) -> Option<Instant> {
        self.wanted.iter().filter(|(name, _)| !self.writing.contains_key(*name)).map(|(_, it)| it.due).min()
    }

    /// Returns the number of pods with a pending status, since when writes of one of them have failed, and
    /// why.
    pub(super) fn failing(&self) -> Option<(usize, Instant, &str)> {
        let waiting = || self.wanted.values().filter(|it| it.end != End::Awaited);
        let (since, why) = waiting().filter_map(|it| it.failing.as_ref()).min_by_key(|(since, _)| *since)?;
        Some((waiting().count(), *since, why.as_str()))
    }

    /// Returns why the last write of a pod's pending status has failed.
    pub(super) fn failure_of(&self, name: &ObjectName) -> Option<&str> {
        self.wanted.get(name)?.failing.as_ref().map(|(_, why)| why.as_str())
    }
}

/// Whether the pod shows the last write.
fn is_shown(pod: &Pod, last: Option<&Last>) -> bool {
    last.is_some_and(|last| is_written(pod, &last.status))
}

/// Whether two pods of one name differ; an unknown uid matches any.
fn is_another(older: &Option<String>, newer: &Option<String>) -> bool {
    matches!((older, newer), (Some(older), Some(newer)) if older != newer)
}

fn tell(waiters: Vec<Waiter>, outcome: &Result<(), String>) {
    for waiter in waiters {
        // Fails if the waiter has given up.
        let _ = waiter.send(outcome.clone());
    }
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
