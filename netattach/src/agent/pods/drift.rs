//! Restores the state of attachments on the node that other processes have changed: ends of links, leases,
//! records, and the published network-status. Programs are restored by the checks of [`crate::agent::health`];
//! changes in pods are reported by [`super::in_pods`].
//!
//! The checks run concurrently with requests, and only where something may have changed: on links for which
//! the kernel has notified a change of the link, its bridge, addresses or routes; and on the status of pods
//! whose object in the source or whose attachments have changed. Every half minute, or more rarely on a
//! large node, all links, leases and records are checked, leases by a task of their own. A difference is
//! checked again and repaired in its container's turn, so that the repair does not undo the work of a DEL.
//! State that others change repeatedly is restored once a minute and reported; a link that can reach
//! destinations it should not reach is restored every time. A failed repair is retried as often, and
//! immediately when the link's bridge has changed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::agent::Agent;
use crate::attach::{AttachError, Attached, Drifted, Examined, WholeRecords};
use crate::error_chain::Chain;
use crate::journal::JournalKey;
use crate::netlink::{ChangeWatch, Changed};
use crate::objects::{Identity, ObjectName, Pod};
use crate::own_thread;
use crate::pace;
use crate::publish::{Mark, Published};
use crate::put_back::PutBack;
use crate::rounds;
use crate::rpc::message::Condition;
use crate::sync::{Mutex, locked};
use crate::ticks::ticks;

/// How often ends of links and the published status are checked where they may have changed.
const INTERVAL: Duration = Duration::from_secs(5);
/// How often all links, leases and records are checked, unless [`pace`] makes it rarer.
const WHOLE_INTERVAL: Duration = Duration::from_secs(30);
/// Most rows of each kind.
pub(in crate::agent) const MOST_ROWS: usize = 100;

/// A kind of state that others can change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Links,
    Leases,
    Record,
    Status,
}

/// A pod of the source, its attachments, and the version of its published status if that is a file.
#[derive(Debug)]
struct Shown {
    pod: Weak<Pod>,
    attached: Vec<Weak<Attached>>,
    mark: Option<Mark>,
}

/// The state for which the status of every pod was found right.
#[derive(Debug)]
struct AllShown {
    pods: Identity<ObjectName, Arc<Pod>>,
    /// See [`Registry::revision`](crate::attach::Registry::revision).
    attached: u64,
}

impl Shown {
    fn is_of(&self, pod: &Arc<Pod>, attached: &[Arc<Attached>], mark: Option<&Mark>) -> bool {
        // The address is not reused while a weak reference exists.
        self.pod.as_ptr() == Arc::as_ptr(pod)
            && self.mark.as_ref() == mark
            && self.attached.iter().map(Weak::as_ptr).eq(attached.iter().map(Arc::as_ptr))
    }
}

/// The state of the repairs: what was repaired, and what could not be.
#[derive(Debug, Default)]
pub(super) struct Drift {
    bound: Mutex<PutBack<(JournalKey, Part)>>,
    /// The sandboxes whose links the last check found different.
    seen: Mutex<BTreeSet<JournalKey>>,
    /// Those of them whose links can reach destinations that they should not.
    open: Mutex<BTreeSet<JournalKey>>,
    /// The sandboxes whose links the last repair could not restore.
    in_vain: Mutex<BTreeSet<JournalKey>>,
    /// The records that were unchanged at the last check.
    records: Mutex<WholeRecords>,
    /// The pods whose status is right, valid while the pod's object, its attachments and the file are the
    /// same.
    as_shown: Mutex<BTreeMap<JournalKey, Shown>>,
    /// Set while the status of every pod is right.
    all_shown: Mutex<Option<AllShown>>,
    /// The problem, by container and part.
    rows: Mutex<BTreeMap<(JournalKey, Part), String>>,
}

/// Whether a part is repaired now.
#[derive(Debug, PartialEq, Eq)]
enum Due {
    /// It is repaired now.
    Yes,
    /// It is repaired now, although it was repaired too often, because the link is open meanwhile; the text
    /// for the status.
    Open(String),
    /// It is not repaired now: it was repaired too often lately.
    Later,
}

impl Drift {
    /// Returns what differs from its state as made.
    pub(in crate::agent) fn conditions(&self, name: impl Fn(&JournalKey) -> String) -> Vec<Condition> {
        let rows = locked(&self.rows);
        let row = |((key, _), problem): (&(JournalKey, Part), &String)| Condition {
            object: name(key),
            problem: problem.clone(),
        };
        rows.iter().take(MOST_ROWS).map(row).collect()
    }

    /// Counts one more repair, and decides whether it is carried out now.
    fn due(&self, key: &JournalKey, part: Part, now: Instant) -> Due {
        let Err(times) = locked(&self.bound).once_more((key.clone(), part), now) else { return Due::Yes };
        let often =
            format!("{} changed by other programs again and again; put back {times} times", part.words());
        if part == Part::Links && locked(&self.open).contains(key) {
            return Due::Open(format!(
                "{often} and more, and still each time, because until then the link reaches what it must not reach"
            ));
        }
        let problem = format!("{often}, and from now on once a minute");
        // A row that says why the repair failed is more useful, so it is kept.
        locked(&self.rows).entry((key.clone(), part)).or_insert(problem);
        Due::Later
    }

    /// Retries links whose repair failed and whose bridge has changed since: its administrator may have
    /// created the bridge again, or enabled VLAN filtering again.
    fn retry_links(&self, on_changed: &BTreeSet<JournalKey>) {
        let in_vain = locked(&self.in_vain);
        let mut bound = locked(&self.bound);
        for key in on_changed.intersection(&in_vain) {
            bound.forget(&(key.clone(), Part::Links));
        }
    }

    /// Records the outcome of a repair. `Ok`: the differences, as text.
    fn note(&self, key: &JournalKey, part: Part, due: Due, outcome: Result<Vec<String>, String>) {
        if part == Part::Links {
            let mut in_vain = locked(&self.in_vain);
            match &outcome {
                Ok(_) => in_vain.remove(key),
                Err(_) => in_vain.insert(key.clone()),
            };
        }
        let mut rows = locked(&self.rows);
        match (outcome, due) {
            // The row stays until a check finds the link in order.
            (Ok(_), Due::Open(problem)) => {
                rows.insert((key.clone(), part), problem);
            }
            (Ok(changed), _) => {
                rows.remove(&(key.clone(), part));
                for what in changed {
                    tracing::warn!(
                        container = key.container_id,
                        what,
                        "changed by another program; put back"
                    );
                }
            }
            (Err(error), _) => {
                let problem =
                    format!("{} changed by another program and cannot be put back: {error}", part.words());
                if rows.get(&(key.clone(), part)) != Some(&problem) {
                    tracing::error!(container = key.container_id, problem, "not as it was made");
                }
                rows.insert((key.clone(), part), problem);
            }
        }
    }

    /// Returns the sandboxes whose links the last check found different, which the next check has to
    /// confirm. They include all with rows, so checking them and the changed links is enough to keep the
    /// rows up to date.
    fn seen_links(&self) -> BTreeSet<JournalKey> {
        locked(&self.seen).clone()
    }

    /// Records the results of a check and returns what to repair. A link must differ in two checks, as the
    /// process that changed it may be about to restore it. Deletes the rows of parts that are in order.
    fn confirmed(&self, part: Part, found: Vec<JournalKey>) -> Vec<JournalKey> {
        let now: BTreeSet<JournalKey> = found.iter().cloned().collect();
        locked(&self.rows).retain(|(key, of), _| *of != part || now.contains(key));
        if part != Part::Links {
            return found;
        }
        locked(&self.in_vain).retain(|key| now.contains(key));
        let before = std::mem::replace(&mut *locked(&self.seen), now);
        found.into_iter().filter(|key| before.contains(key)).collect()
    }
}

/// When the next check of a kind is due, after one that began at `began` and took `worked` of work.
fn next(every: Duration, began: Instant, worked: Duration) -> Instant {
    // Half an interval early, so that a tick slightly before the due time is not skipped.
    began + pace::pause(every, worked).saturating_sub(INTERVAL / 2)
}

impl Part {
    /// What a look at it is called in the log.
    fn name(self) -> &'static str {
        match self {
            Self::Links => "links of attachments",
            Self::Leases => "leases",
            Self::Record => "records",
            Self::Status => "published statuses",
        }
    }

    fn words(self) -> &'static str {
        match self {
            Self::Links => "its links on the node were",
            Self::Leases => "its leases were",
            Self::Record => "its record was",
            Self::Status => "its network-status was",
        }
    }
}

impl Agent {
    /// Checks for changes by other processes, and repairs them, forever.
    pub(in crate::agent) async fn keep_as_made(self: Arc<Self>) {
        let mut tick = ticks(INTERVAL);
        let mut changes = ChangeWatch::open()
            .inspect_err(|error| {
                tracing::warn!(
                    error = %Chain(error),
                    "no link notifications; links are checked every 5 s"
                )
            })
            .ok();
        // Changes since the last check, and those of the period before it.
        let (mut changed, mut before) = (Changed::default(), Changed::default());
        let (mut whole_is_due, mut status_is_due) = (Instant::now(), Instant::now());
        loop {
            tick.tick().await;
            let began = Instant::now();
            let is_whole = began >= whole_is_due;
            // Read before the check: changes during the check are reported at the next one.
            changed.extend(changes.as_mut().map_or(Changed::Anything, ChangeWatch::changed));
            let mut now = if is_whole { Changed::Anything } else { changed.clone() };
            now.extend(before.clone());
            let (mut links, seen) = (None, self.pods.drift.seen_links());
            if !now.is_nothing() || !seen.is_empty() {
                links = self.put_back(Part::Links, move |agent| agent.with_changed_links(&now, &seen)).await;
                if links.is_some() {
                    // Changed links are checked once more, as an ADD may not have ended yet. After a failed
                    // check they are kept, as the kernel notifies each change only once.
                    before = std::mem::take(&mut changed);
                } else if is_whole {
                    changed = Changed::Anything;
                }
            }
            self.write_returns().await;
            if began >= status_is_due {
                let worked = self.put_back(Part::Status, |agent| Ok(agent.with_drifted_status())).await;
                status_is_due = next(INTERVAL, began, worked.unwrap_or_default());
            }
            if is_whole {
                let records = self.put_back(Part::Record, Agent::with_changed_record).await;
                let worked = [links, records].into_iter().flatten().sum();
                whole_is_due = next(WHOLE_INTERVAL, began, worked);
            }
        }
    }

    /// Checks leases, in a task of its own: other processes may hold the locks of pools, or a disk may
    /// hang.
    pub(in crate::agent) async fn keep_leases(self: Arc<Self>) {
        let mut tick = ticks(INTERVAL);
        let mut is_due = Instant::now();
        loop {
            tick.tick().await;
            let began = Instant::now();
            if began >= is_due {
                let worked = self.put_back(Part::Leases, |agent| agent.engine.without_lease()).await;
                is_due = next(WHOLE_INTERVAL, began, worked.unwrap_or_default());
            }
        }
    }

    /// Updates records with the devices that were returned without a DEL.
    async fn write_returns(self: &Arc<Self>) {
        for key in self.engine.unwritten_returns() {
            // A DEL updates the record itself, or removes it; the next check finds the others.
            let Some(turn) = self.admission.turns().look(&key.container_id) else { continue };
            let agent = Arc::clone(self);
            // Fails only while the agent ends; the next agent finds the rest.
            let _ = own_thread::blocking(move || crate::upkeep(|| agent.engine.write_returned(&key))).await;
            drop(turn);
        }
    }

    /// Returns the work that the check took; `None`: the check failed.
    async fn put_back(
        self: &Arc<Self>,
        part: Part,
        look: impl FnOnce(&Self) -> Result<Vec<JournalKey>, AttachError> + Send + 'static,
    ) -> Option<Duration> {
        let looking = Arc::clone(self);
        let looked = rounds::look(move || pace::measured(part.name(), || look(&looking))).await;
        let (found, worked) = match looked {
            (Ok(found), worked) => (found, worked),
            (Err(error), _) => {
                tracing::warn!(error = %Chain(&error), "drift check failed");
                return None;
            }
        };
        for key in self.pods.drift.confirmed(part, found) {
            // An operation on the container goes first; the next check finds the difference again.
            let Some(turn) = self.admission.turns().look(&key.container_id) else { continue };
            let due = self.pods.drift.due(&key, part, Instant::now());
            if due == Due::Later {
                continue;
            }
            let (agent, of) = (Arc::clone(self), key.clone());
            let done = own_thread::blocking(move || agent.put_part_back(part, &of)).await;
            if let Ok(outcome) = done {
                self.pods.drift.note(&key, part, due, outcome);
            }
            drop(turn);
        }
        Some(worked)
    }

    /// Repairs one part. Returns the differences, as text.
    fn put_part_back(&self, part: Part, key: &JournalKey) -> Result<Vec<String>, String> {
        let said = |error: AttachError| Chain(&error).to_string();
        match part {
            Part::Links => self.engine.put_links_back(key).map_err(said),
            Part::Leases => self.engine.take_leases_back(key).map_err(said),
            Part::Record => {
                let written = self.engine.write_record_anew(key).map_err(said)?;
                Ok(written.then(|| "its record was removed".to_owned()).into_iter().collect())
            }
            Part::Status => {
                if self.published(&self.engine.registry().with_dynamic(key)) != Published::Drifted {
                    return Ok(Vec::new());
                }
                self.publish(key);
                Ok(vec!["its network-status was changed".to_owned()])
            }
        }
    }

    /// Returns the sandboxes whose record is missing or changed.
    fn with_changed_record(&self) -> Result<Vec<JournalKey>, AttachError> {
        let Examined { edited, are_complete } =
            self.engine.examine_records(&mut locked(&self.pods.drift.records));
        let mut changed = if are_complete { Vec::new() } else { self.engine.without_record()? };
        changed.extend(edited);
        Ok(changed)
    }

    /// Returns the name of a record's sandbox for the status.
    pub(in crate::agent) fn sandbox_name(&self, key: &JournalKey) -> String {
        let pod = self.engine.registry().get(key).and_then(|it| it.plan.sandbox.pod.clone());
        pod.map_or_else(|| format!("container {}", key.container_id), |pod| format!("pod {pod}"))
    }

    fn with_changed_links(
        &self,
        changed: &Changed,
        seen: &BTreeSet<JournalKey>,
    ) -> Result<Vec<JournalKey>, AttachError> {
        self.engine.settle_orphans();
        let Drifted { keys, open, on_changed } = self.engine.with_drifted_links(changed, seen)?;
        *locked(&self.pods.drift.open) = open;
        self.pods.drift.retry_links(&on_changed);
        Ok(keys)
    }

    fn with_drifted_status(&self) -> Vec<JournalKey> {
        let objects = self.intents.source.snapshot();
        // Read first: attachments made meanwhile are checked the next time.
        let revision = self.engine.registry().revision();
        let is_same = |it: &AllShown| it.pods.is_of(&objects.pods) && it.attached == revision;
        if locked(&self.pods.drift.all_shown).as_ref().is_some_and(is_same) {
            return Vec::new();
        }
        let all = self.engine.registry().all();
        let mut of_pods: BTreeMap<&ObjectName, Vec<&JournalKey>> = BTreeMap::new();
        for sandbox in all.iter().filter(|it| it.plan.dynamic.is_none()) {
            if let Some(pod) = &sandbox.plan.sandbox.pod {
                of_pods.entry(&pod.name).or_default().push(&sandbox.key);
            }
        }
        // If a pod has a new sandbox before the old one is detached, the newest one counts.
        let newest = of_pods.into_values().filter_map(|keys| match keys.as_slice() {
            [one] => Some((*one).clone()),
            several => self.engine.newest(several),
        });
        let mut drifted = newest.collect::<Vec<_>>();
        let count = drifted.len();
        let mut before = std::mem::take(&mut *locked(&self.pods.drift.as_shown));
        let mut as_shown = BTreeMap::new();
        drifted.retain(|key| {
            let attached = self.engine.registry().with_dynamic(key);
            let named = attached.first().and_then(|it| it.plan.sandbox.pod.as_ref());
            let pod = named.and_then(|pod| objects.pods.get(&pod.name));
            // Read before the status: if the file changes meanwhile, its mark differs at the next check.
            let mark = named.and_then(|pod| self.published_mark(pod));
            let is_as_before = |it: &Shown| pod.is_some_and(|pod| it.is_of(pod, &attached, mark.as_ref()));
            if let Some((own, known)) = before.remove_entry(key).filter(|(_, it)| is_as_before(it)) {
                as_shown.insert(own, known);
                return false;
            }
            let published = self.published(&attached);
            let stays = match published {
                Published::AsShown => true,
                Published::Same => mark.is_some(),
                Published::Unknown | Published::Drifted => false,
            };
            if let Some(pod) = pod.filter(|_| stays) {
                let attached = attached.iter().map(Arc::downgrade).collect();
                as_shown.insert(key.clone(), Shown { pod: Arc::downgrade(pod), attached, mark });
            }
            published == Published::Drifted
        });
        // Changes of a file are not notified, so status files are checked every time.
        let are_told = as_shown.len() == count && as_shown.values().all(|it| it.mark.is_none());
        *locked(&self.pods.drift.all_shown) =
            are_told.then(|| AllShown { pods: objects.pods.identity(), attached: revision });
        *locked(&self.pods.drift.as_shown) = as_shown;
        drifted
    }
}

#[cfg(test)]
mod tests {
    use crate::agent::pods::drift::*;

    #[test]
    fn what_cannot_be_put_back_is_told_until_it_is_as_it_was() {
        let drift = Drift::default();
        let key = JournalKey { container_id: "c".to_owned(), ifname: "eth0".to_owned() };
        let told = || {
            drift
                .conditions(|key| key.container_id.clone())
                .into_iter()
                .map(|it| it.problem)
                .collect::<Vec<_>>()
        };
        let now = Instant::now();
        for _ in 0..5 {
            assert_eq!(drift.due(&key, Part::Links, now), Due::Yes);
        }
        assert_eq!(drift.due(&key, Part::Links, now), Due::Later);
        assert_eq!(drift.due(&key, Part::Leases, now), Due::Yes);
        assert_eq!(
            told(),
            [
                "its links on the node were changed by other programs again and again; put back 5 times, and from now on once a minute"
            ]
        );
        drift.note(&key, Part::Leases, Due::Yes, Err("another has it".to_owned()));
        assert_eq!(
            told()[1],
            "its leases were changed by another program and cannot be put back: another has it"
        );
        drift.note(&key, Part::Links, Due::Yes, Ok(vec!["x".to_owned()]));
        drift.confirmed(Part::Status, Vec::new());
        assert_eq!(told().len(), 1);
        drift.confirmed(Part::Leases, Vec::new());
        assert_eq!(told(), [""; 0]);
        let found = || vec![key.clone()];
        assert_eq!(drift.confirmed(Part::Links, found()), [], "it may be put back by who has changed it");
        assert_eq!(drift.confirmed(Part::Links, found()), found());
        assert_eq!(drift.confirmed(Part::Links, Vec::new()), []);
        assert_eq!(drift.confirmed(Part::Links, found()), []);
        assert_eq!(drift.confirmed(Part::Status, found()), found());
    }

    /// An administrator's bridge is missing for longer than five attempts take.
    #[test]
    fn a_link_that_could_not_be_put_back_is_tried_at_once_when_its_bridge_has_changed() {
        let drift = Drift::default();
        let [gone, fought] = ["gone", "fought"]
            .map(|it| JournalKey { container_id: it.to_owned(), ifname: "eth0".to_owned() });
        let now = Instant::now();
        drift.confirmed(Part::Links, vec![gone.clone(), fought.clone()]);
        for _ in 0..5 {
            for (key, outcome) in [(&gone, Err("bridge br0 is gone".to_owned())), (&fought, Ok(Vec::new()))] {
                assert_eq!(drift.due(key, Part::Links, now), Due::Yes);
                drift.note(key, Part::Links, Due::Yes, outcome);
            }
        }
        let dues = || [&gone, &fought].map(|key| drift.due(key, Part::Links, now));
        assert_eq!(dues(), [Due::Later, Due::Later]);
        drift.retry_links(&BTreeSet::new());
        assert_eq!(dues(), [Due::Later, Due::Later]);
        drift.retry_links(&[gone.clone(), fought.clone()].into());
        assert_eq!(dues(), [Due::Yes, Due::Later], "what was put back was changed again by others");
        // Links that are in order are no longer retried.
        drift.confirmed(Part::Links, Vec::new());
        assert!(locked(&drift.in_vain).is_empty());
    }

    #[test]
    fn a_link_that_is_open_is_put_back_each_time_and_that_is_told_until_it_is_as_it_was() {
        let drift = Drift::default();
        let key = JournalKey { container_id: "c".to_owned(), ifname: "eth0".to_owned() };
        locked(&drift.open).insert(key.clone());
        let put_back = |part| {
            let due = drift.due(&key, part, Instant::now());
            if due != Due::Later {
                drift.note(&key, part, due, Ok(vec!["x".to_owned()]));
            }
            let rows = drift.conditions(|key| key.container_id.clone());
            rows.into_iter().map(|row| row.problem).collect::<Vec<_>>()
        };
        for _ in 0..5 {
            assert_eq!(put_back(Part::Links), [""; 0]);
        }
        let told = "its links on the node were changed by other programs again and again; put back 5 times and more, and still each time, because until then the link reaches what it must not reach";
        for _ in 0..3 {
            assert_eq!(put_back(Part::Links), [told]);
        }
        drift.confirmed(Part::Links, vec![key.clone()]);
        assert_eq!(drift.due(&key, Part::Links, Instant::now()), Due::Open(told.to_owned()));
        drift.confirmed(Part::Links, Vec::new());
        for _ in 0..5 {
            assert_eq!(put_back(Part::Record), [""; 0]);
        }
        assert!(put_back(Part::Record)[0].ends_with("from now on once a minute"), "a record opens nothing");
    }
}
