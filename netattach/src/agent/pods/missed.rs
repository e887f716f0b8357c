//! The pods that run without their networks, and when each is repaired. Pure, except that callers pass the
//! clock's time.
//!
//! A pod counts only if every check of a grace time has found it so, no request to attach it came during
//! that time, and every record of the journal can be read: an unreadable record may be the pod's.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::kube::Owner;
use crate::objects::ObjectName;
use crate::plan::PodRef;
use crate::rpc::message::Condition;
use crate::settings::Repair;
use crate::sync::{Mutex, MutexGuard, locked};

/// Most pods without networks that are kept; others are found when these are gone.
const MOST_MISSED: usize = 100;
/// How long a request to attach a pod counts as a sign that the runtime handles the pod: the runtime
/// repeats a failed request.
const ASKED: Duration = Duration::from_secs(300);
/// From this many requests on, each new one removes old ones.
const MOST_ASKED: usize = 1024;
/// Least time between two evictions.
const EVICTIONS: Duration = Duration::from_secs(10);
/// Pauses between two tries.
const FIRST_PAUSE: Duration = Duration::from_secs(10);
const MOST_PAUSE: Duration = Duration::from_secs(600);
/// Most tries for one pod.
const MOST_TRIES: u32 = 20;
/// Evictions of a controller's pods are counted for this time.
const COUNTED: Duration = Duration::from_secs(3600);
/// Most evictions of a controller's pods in that time.
const MOST_OF_ONE: usize = 5;
/// The kind of a controller whose pods return to the same node.
const DAEMON_SET: &str = "DaemonSet";
/// Most controllers that are remembered.
const MOST_OWNERS: usize = 1000;

/// The pods that run without their networks, and the repairs tried.
#[derive(Debug)]
pub(in crate::agent) struct Repairs {
    pub(in crate::agent) how: Repair,
    /// The grace time.
    pub(in crate::agent) after: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    cases: BTreeMap<ObjectName, Case>,
    /// When the runtime last asked to attach each pod, and any pod.
    asked: BTreeMap<ObjectName, Instant>,
    last_asked: Option<Instant>,
    /// When pods of each controller were evicted, by the controller's uid.
    evicted: BTreeMap<String, Vec<Instant>>,
    last_eviction: Option<Instant>,
    /// Number of unreadable records: while there are any, nothing is repaired.
    unreadable: usize,
}

/// A pod that runs without its networks.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Case {
    pod: PodRef,
    since: Instant,
    /// When the next repair is due.
    again: Instant,
    tries: u32,
    /// Why it is not repaired yet.
    said: Option<String>,
    /// No further repair is tried.
    is_final: bool,
}

impl Repairs {
    pub(in crate::agent) fn new(how: Repair, after: Duration) -> Self {
        Self { how, after, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }

    /// Records that the runtime asks to attach that pod.
    pub(in crate::agent) fn asked_for(&self, pod: &ObjectName) {
        let (now, mut state) = (Instant::now(), self.state());
        if state.asked.len() >= MOST_ASKED {
            state.asked.retain(|_, at| now.duration_since(*at) < ASKED);
        }
        state.last_asked = Some(now);
        state.asked.insert(pod.clone(), now);
    }

    /// One row for each pod.
    pub(in crate::agent) fn conditions(&self) -> Vec<Condition> {
        let state = self.state();
        let held = state.unreadable;
        state.cases.values().map(|case| case.condition(self.how, held)).collect()
    }

    /// Records the results of a check, and returns the pods whose repair is due.
    pub(in crate::agent) fn take_in(
        &self,
        found: Vec<PodRef>,
        unreadable: usize,
        now: Instant,
    ) -> Vec<PodRef> {
        let mut state = self.state();
        state.asked.retain(|_, at| now.duration_since(*at) < ASKED);
        state.unreadable = unreadable;
        let mut before = std::mem::take(&mut state.cases);
        let found = found.into_iter().filter(|pod| !state.asked.contains_key(&pod.name));
        let found: Vec<PodRef> = found.take(MOST_MISSED).collect();
        for pod in found {
            let same = before.remove(&pod.name).filter(|case| case.pod == pod);
            let case = same.unwrap_or_else(|| Case {
                pod: pod.clone(),
                since: now,
                again: now + self.after,
                tries: 0,
                said: None,
                is_final: false,
            });
            state.cases.insert(pod.name, case);
        }
        if self.how == Repair::Report || unreadable > 0 {
            return Vec::new();
        }
        let is_due = |case: &&Case| !case.is_final && case.again <= now;
        state.cases.values().filter(is_due).map(|case| case.pod.clone()).collect()
    }

    /// Whether a pod may be evicted now.
    ///
    /// # Errors
    /// The condition that it waits for.
    pub(super) fn may_evict_any(&self, pod: &PodRef, now: Instant) -> Result<(), String> {
        let state = self.state();
        let since = state.cases.get(&pod.name).map(|case| case.since);
        if since.is_none_or(|since| state.last_asked.is_none_or(|asked| asked < since)) {
            return Err("it is evicted once the runtime asks this agent to attach a pod: until then, the next one would start \
                        without its networks too"
                .to_owned());
        }
        if state.last_eviction.is_some_and(|last| now.duration_since(last) < EVICTIONS) {
            return Err("it is about to be evicted, one pod after another".to_owned());
        }
        Ok(())
    }

    /// Whether few enough of the controller's pods were evicted lately.
    ///
    /// # Errors
    /// Too many were evicted.
    pub(super) fn may_evict_of(&self, owner: &Owner, now: Instant) -> Result<(), String> {
        let mut state = self.state();
        let most = if owner.kind == DAEMON_SET { 1 } else { MOST_OF_ONE };
        let times = state.evicted.entry(owner.uid.clone()).or_default();
        times.retain(|at| now.duration_since(*at) < COUNTED);
        if times.len() < most {
            return Ok(());
        }
        let Owner { kind, name, .. } = owner;
        Err(format!(
            "{} pods of {kind} {name} were evicted in the last hour; it is not evicted too",
            times.len()
        ))
    }

    pub(super) fn was_evicted(&self, pod: &PodRef, owner: Option<&Owner>, now: Instant) {
        let mut state = self.state();
        state.last_eviction = Some(now);
        if let Some(owner) = owner {
            if state.evicted.len() >= MOST_OWNERS {
                state
                    .evicted
                    .retain(|_, times| times.last().is_some_and(|at| now.duration_since(*at) < COUNTED));
            }
            state.evicted.entry(owner.uid.clone()).or_default().push(now);
        }
        // The pod ends within its grace period; its successor is another pod.
        if let Some(case) = state.cases.get_mut(&pod.name) {
            case.said = Some("it is evicted".to_owned());
            case.is_final = true;
        }
    }

    /// Records why a pod is not repaired. An attempt that was made counts.
    pub(in crate::agent) fn put_off(&self, pod: &PodRef, why: String, how: PutOff, now: Instant) {
        let mut state = self.state();
        let Some(case) = state.cases.get_mut(&pod.name).filter(|case| case.pod == *pod) else { return };
        case.said = Some(why);
        match how {
            PutOff::Waits => {}
            PutOff::Later => case.again = now + MOST_PAUSE,
            PutOff::Never => case.is_final = true,
            PutOff::Tried(pause) => {
                case.tries += 1;
                let own = FIRST_PAUSE.saturating_mul(1 << (case.tries - 1).min(10)).min(MOST_PAUSE);
                case.again = now + own.max(pause);
                case.is_final = case.tries >= MOST_TRIES;
            }
        }
    }
}

/// The next step for a pod that was not repaired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::agent) enum PutOff {
    /// It waits for other pods.
    Waits,
    /// It waits for longer.
    Later,
    /// It was tried, and is retried after this pause.
    Tried(Duration),
    /// It is not tried any more.
    Never,
}

impl Case {
    fn condition(&self, how: Repair, unreadable: usize) -> Condition {
        let mut problem =
            "runs without the networks that it selects: the runtime did not ask for them".to_owned();
        let next = match (how, &self.said) {
            _ if unreadable > 0 => {
                format!(
                    "nothing is done about it while {unreadable} records cannot be read: one may be its own"
                )
            }
            (Repair::Report, _) => "delete it, so that it is recreated".to_owned(),
            (_, Some(said)) if self.is_final && self.tries >= MOST_TRIES => {
                format!("given up after {} tries: {said}", self.tries)
            }
            (_, Some(said)) => said.clone(),
            (Repair::Attach, None) => "they are about to be attached".to_owned(),
            (Repair::Evict, None) => "it is about to be evicted".to_owned(),
        };
        problem.push_str("; ");
        problem.push_str(&next);
        Condition { object: format!("pod {}", self.pod.name), problem }
    }
}

#[cfg(test)]
#[path = "missed_tests.rs"]
mod tests;
