//! Puts back what others change of what attachments have on the node: ends of links, leases, records, and the published
//! network-status. Programs are put back by the looks of [`super::health`]; what is changed in pods is reported by
//! [`super::in_pods`].
//!
//! Differences are looked for beside everything else, and only where something may have changed: links of which the kernel
//! has told that they, their bridges, addresses or routes have changed; the status of pods that are another value of the source, or that
//! have other attachments. Every half minute, or more rarely where there is much, links are looked at in any case, and
//! leases and records; leases by a task of their own. What is different is looked at again and put back in its container's
//! turn, so that nothing is put back that a DEL is taking away. What others change again and again is put back once a minute, and each
//! time where a link reaches meanwhile whom it should not, and reported. What cannot be put back is tried as often, and at once
//! when its bridge has changed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::handler::Agent;
use crate::attach::{AttachError, Attached, Drifted, WholeRecords};
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

/// How often ends of links and the published status are compared, as far as they may have changed.
const INTERVAL: Duration = Duration::from_secs(5);
/// How often links are compared in any case, and leases and records, as [`pace`] leaves it.
const WHOLE_INTERVAL: Duration = Duration::from_secs(30);
/// Most rows of each kind.
pub(super) const MOST_ROWS: usize = 100;

/// What can be changed by others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Links,
    Leases,
    Record,
    Status,
}

/// A pod of the source, what is attached to it, and its published status where that is a file.
#[derive(Debug)]
struct Shown {
    pod: Weak<Pod>,
    attached: Vec<Weak<Attached>>,
    mark: Option<Mark>,
}

/// What the status of every pod was compared with.
#[derive(Debug)]
struct AllShown {
    pods: Identity<ObjectName, Arc<Pod>>,
    /// See [`Registry::revision`](crate::attach::Registry::revision).
    attached: u64,
}

impl Shown {
    fn is_of(&self, pod: &Arc<Pod>, attached: &[Arc<Attached>], mark: Option<&Mark>) -> bool {
        // An address is not given again while it is referred to.
        self.pod.as_ptr() == Arc::as_ptr(pod)
            && self.mark.as_ref() == mark
            && self.attached.iter().map(Weak::as_ptr).eq(attached.iter().map(Arc::as_ptr))
    }
}

/// What was put back, and what could not be.
#[derive(Debug, Default)]
pub(super) struct Drift {
    bound: Mutex<PutBack<(JournalKey, Part)>>,
    /// The sandboxes whose links the last look has found different.
    seen: Mutex<BTreeSet<JournalKey>>,
    /// Those of them that reach meanwhile whom they should not.
    open: Mutex<BTreeSet<JournalKey>>,
    /// The sandboxes whose links could not be put back at the last time.
    in_vain: Mutex<BTreeSet<JournalKey>>,
    /// The records that were as written at the last look.
    records: Mutex<WholeRecords>,
    /// The pods whose status is as it should be, as long as nothing here is another value.
    as_shown: Mutex<BTreeMap<JournalKey, Shown>>,
    /// Set while the status of every pod is as it should be.
    all_shown: Mutex<Option<AllShown>>,
    /// Why something is not as it was, by container and part.
    rows: Mutex<BTreeMap<(JournalKey, Part), String>>,
}

/// Whether something is put back now.
#[derive(Debug, PartialEq, Eq)]
enum Due {
    /// It is.
    Yes,
    /// It is: it was too often just now, but is open meanwhile; what the status is to say of that.
    Open(String),
    /// It was too often just now.
    Later,
}

impl Drift {
    /// What is not as it was made.
    pub(super) fn conditions(&self, name: impl Fn(&JournalKey) -> String) -> Vec<Condition> {
        let rows = locked(&self.rows);
        let row = |((key, _), problem): (&(JournalKey, Part), &String)| Condition {
            object: name(key),
            problem: problem.clone(),
        };
        rows.iter().take(MOST_ROWS).map(row).collect()
    }

    /// Counts one more time, and says whether something is put back now.
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
        // Why it cannot be put back says more, where it could not be.
        locked(&self.rows).entry((key.clone(), part)).or_insert(problem);
        Due::Later
    }

    /// Has links put back at the next time that could not be, as their bridge has changed since: its administrator may have made it
    /// again, or have it filter by VLAN again.
    fn retry_links(&self, on_changed: &BTreeSet<JournalKey>) {
        let in_vain = locked(&self.in_vain);
        let mut bound = locked(&self.bound);
        for key in on_changed.intersection(&in_vain) {
            bound.forget(&(key.clone(), Part::Links));
        }
    }

    /// Notes the outcome of putting back what was due; `Ok`: what was different, in words.
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
            // The log has it at the rate of what is not open; the row goes with the look that finds it as it was.
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

    /// The sandboxes whose links the last look has found different, which the next has to confirm. Those that have rows are
    /// among them: so a look at them and at what has changed is enough to keep the rows.
    fn seen_links(&self) -> BTreeSet<JournalKey> {
        locked(&self.seen).clone()
    }

    /// Takes in what a look has found; returns what is to be put back. A link has to be different in two looks: somebody
    /// may be about to put it back himself. Rows of what is as it was are forgotten.
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

/// When a kind of look is taken again, after one that began then and was that much work.
fn next(every: Duration, began: Instant, worked: Duration) -> Instant {
    // A tick that comes a moment earlier is not put off to the next.
    began + pace::pause(every, worked).saturating_sub(INTERVAL / 2)
}

impl Part {
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
    /// Looks for what others have changed, and puts it back, without end.
    pub(super) async fn keep_as_made(self: Arc<Self>) {
        let mut tick = ticks(INTERVAL);
        let mut changes = ChangeWatch::open()
            .inspect_err(|error| {
                tracing::warn!(
                    error = %Chain(error),
                    "no link notifications; links are checked every 5 s"
                )
            })
            .ok();
        // Since the last look, and before that one.
        let (mut changed, mut before) = (Changed::default(), Changed::default());
        let (mut whole_is_due, mut status_is_due) = (Instant::now(), Instant::now());
        loop {
            tick.tick().await;
            let began = Instant::now();
            let is_whole = began >= whole_is_due;
            // Asked first: what changes during the look is told of at the next.
            changed.extend(changes.as_mut().map_or(Changed::Anything, ChangeWatch::changed));
            let mut now = if is_whole { Changed::Anything } else { changed.clone() };
            now.extend(before.clone());
            let (mut links, seen) = (None, self.drift.seen_links());
            if !now.is_nothing() || !seen.is_empty() {
                links = self.put_back(Part::Links, move |agent| agent.with_changed_links(&now, &seen)).await;
                if links.is_some() {
                    // What has changed is looked at once more: an ADD may not have ended yet. After a look that failed it
                    // still is to be: the kernel tells of each change once.
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

    /// The same for leases, beside all else: other processes may have their pools locked, or a disk hang beneath one.
    pub(super) async fn keep_leases(self: Arc<Self>) {
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

    /// Has records say which of their devices have gone back without a DEL.
    async fn write_returns(self: &Arc<Self>) {
        for key in self.engine.unwritten_returns() {
            // A DEL says so itself, or has nothing to say any more; the next look finds what is left.
            let Some(turn) = self.turns.look(&key.container_id) else { continue };
            let agent = Arc::clone(self);
            // Not where the agent ends: the next one finds what is left.
            let _ = own_thread::blocking(move || crate::upkeep(|| agent.engine.write_returned(&key))).await;
            drop(turn);
        }
    }

    /// Returns how much work the look was; `None`: it could not look.
    async fn put_back(
        self: &Arc<Self>,
        part: Part,
        look: impl FnOnce(&Self) -> Result<Vec<JournalKey>, AttachError> + Send + 'static,
    ) -> Option<Duration> {
        let looking = Arc::clone(self);
        let looked = rounds::look(move || pace::measured(|| look(&looking))).await;
        let (found, worked) = match looked {
            (Ok(found), worked) => (found, worked),
            (Err(error), _) => {
                tracing::warn!(error = %Chain(&error), "drift check failed");
                return None;
            }
        };
        for key in self.drift.confirmed(part, found) {
            // An operation on the container goes first; the next look finds what is left.
            let Some(turn) = self.turns.look(&key.container_id) else { continue };
            let due = self.drift.due(&key, part, Instant::now());
            if due == Due::Later {
                continue;
            }
            let (agent, of) = (Arc::clone(self), key.clone());
            let done = own_thread::blocking(move || agent.put_part_back(part, &of)).await;
            if let Ok(outcome) = done {
                self.drift.note(&key, part, due, outcome);
            }
            drop(turn);
        }
        Some(worked)
    }

    /// Returns what was different, in words.
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

    /// The sandboxes whose record is gone, or not as it was written.
    fn with_changed_record(&self) -> Result<Vec<JournalKey>, AttachError> {
        let mut changed = self.engine.without_record()?;
        changed.extend(self.engine.with_edited_record(&mut locked(&self.drift.records)));
        Ok(changed)
    }

    /// How status names the sandbox of a record.
    pub(super) fn sandbox_name(&self, key: &JournalKey) -> String {
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
        *locked(&self.drift.open) = open;
        self.drift.retry_links(&on_changed);
        Ok(keys)
    }

    fn with_drifted_status(&self) -> Vec<JournalKey> {
        let objects = self.intents.source.snapshot();
        // Asked first: what is attached meanwhile is looked at the next time.
        let revision = self.engine.registry().revision();
        let is_same = |it: &AllShown| it.pods.is_of(&objects.pods) && it.attached == revision;
        if locked(&self.drift.all_shown).as_ref().is_some_and(is_same) {
            return Vec::new();
        }
        let all = self.engine.registry().all();
        let mut of_pods: BTreeMap<&ObjectName, Vec<&JournalKey>> = BTreeMap::new();
        for sandbox in all.iter().filter(|it| it.plan.dynamic.is_none()) {
            if let Some(pod) = &sandbox.plan.sandbox.pod {
                of_pods.entry(&pod.name).or_default().push(&sandbox.key);
            }
        }
        // Of a pod that has a new sandbox before the old one is detached, the new one counts.
        let newest = of_pods.into_values().filter_map(|keys| match keys.as_slice() {
            [one] => Some((*one).clone()),
            several => self.engine.newest(several),
        });
        let mut drifted = newest.collect::<Vec<_>>();
        let count = drifted.len();
        let mut before = std::mem::take(&mut *locked(&self.drift.as_shown));
        let mut as_shown = BTreeMap::new();
        drifted.retain(|key| {
            let attached = self.engine.registry().with_dynamic(key);
            let named = attached.first().and_then(|it| it.plan.sandbox.pod.as_ref());
            let pod = named.and_then(|pod| objects.pods.get(&pod.name));
            // Asked before the status is read: what is changed meanwhile has another at the next look.
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
        // A file changes without a word.
        let are_told = as_shown.len() == count && as_shown.values().all(|it| it.mark.is_none());
        *locked(&self.drift.all_shown) =
            are_told.then(|| AllShown { pods: objects.pods.identity(), attached: revision });
        *locked(&self.drift.as_shown) = as_shown;
        drifted
    }
}

#[cfg(test)]
mod tests {
    use crate::agent::drift::*;

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

    /// An administrator's bridge is away for longer than it takes to try it five times.
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
        // What is as it was is no longer waited for.
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
