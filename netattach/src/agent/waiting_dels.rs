//! Carries out the DELs that the CNI executable has recorded because no agent answered. The runtime was told that they
//! are done and does not repeat them: one that fails stays and is tried again, at growing intervals, while the agent
//! runs and at its next start.
//!
//! Most are found at the start ([`left_over`](super::left_over)). The agent looks for others while it serves (`collector`):
//! one may be recorded because the agent was too slow to answer it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::devices::Asked;
use super::handler::Agent;
use super::lanes::Class;
use super::request_log::{self, Made};
use super::scheduler::MOST_DELS;
use crate::cni;
use crate::error_chain::Chain;
use crate::journal::JournalKey;
use crate::rpc::message::Condition;
use crate::rpc::pending::{self, Pending, Request, UnreadableError};
use crate::sync::{Mutex, locked};

/// Longest time between two attempts of one DEL; the first retry is at the next look.
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

/// Most DELs that are under way at a time: an eighth of the queue of DELs, so that those of the runtime find room. More than
/// there can be at one plugin that hangs: the lanes let others pass these.
const AT_ONCE: usize = MOST_DELS / 8;

/// The recorded DELs.
#[derive(Debug)]
pub(super) struct WaitingDels {
    state_dir: PathBuf,
    /// The time between two looks.
    interval: Duration,
    failed: Mutex<BTreeMap<PathBuf, Failed>>,
}

/// A DEL that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Failed {
    container: String,
    error: String,
    attempts: u32,
    again: Instant,
}

impl WaitingDels {
    /// The DELs recorded in that state directory, which are looked for at that interval.
    pub(super) fn new(state_dir: PathBuf, interval: Duration) -> Self {
        Self { state_dir, interval, failed: Mutex::default() }
    }

    /// The DELs that failed, by container.
    pub(super) fn troubles(&self) -> Vec<Condition> {
        let failed = locked(&self.failed);
        let condition = |failed: &Failed| Condition {
            object: format!("container {}", failed.container),
            problem: format!(
                "its DEL came while no agent answered, and has failed {} times; it is tried again: {}",
                failed.attempts, failed.error
            ),
        };
        failed.values().map(condition).collect()
    }

    /// The files of `found` to try now, with their containers: those first that have failed least often, and of these the oldest.
    /// So what belongs to one network that hangs does not keep all others waiting. Forgets the failures of files that are gone.
    fn due(&self, found: Vec<Pending>, now: Instant) -> Vec<(PathBuf, String)> {
        let mut failed = locked(&self.failed);
        // Thousands may have failed.
        let mut paths: Vec<&Path> = found.iter().map(|pending| pending.path.as_path()).collect();
        paths.sort_unstable();
        failed.retain(|path, _| paths.binary_search(&path.as_path()).is_ok());
        let mut due = Vec::new();
        for Pending { path, container } in found {
            match container {
                Ok(container) if failed.get(&path).is_none_or(|failed| failed.again <= now) => {
                    due.push((path, container));
                }
                Ok(_) => {}
                Err(error) => drop_unusable(&path, &error),
            }
        }
        due.sort_by_key(|(path, _)| failed.get(path).map_or(0, |failed| failed.attempts));
        due
    }

    /// Notes a failure, and returns whether it is another one than the last.
    fn failed(&self, path: &Path, container: String, error: String, now: Instant) -> bool {
        let mut failed = locked(&self.failed);
        let last = failed.get(path);
        let attempts = last.map_or(0, |failed| failed.attempts).saturating_add(1);
        let is_new = last.is_none_or(|last| last.error != error);
        let again = now + pause(self.interval, attempts);
        failed.insert(path.to_owned(), Failed { container, error, attempts, again });
        is_new
    }

    fn done(&self, path: &Path) {
        locked(&self.failed).remove(path);
    }
}

/// The time from a failed attempt to the next.
fn pause(interval: Duration, attempts: u32) -> Duration {
    let doubled = 1u32.checked_shl(attempts.saturating_sub(1).min(16)).unwrap_or(u32::MAX);
    // A little less than the interval, so that the look of that time finds it due.
    (interval / 2).saturating_mul(doubled).min(LONGEST_PAUSE)
}

impl Agent {
    /// Begins the recorded DELs that are due, except those of containers that another operation has the turn of, as far as
    /// there is room beside those that are `under_way`: one may hang, and nobody waits for it here.
    pub(super) async fn carry_out_waiting(self: &Arc<Self>, under_way: &mut JoinSet<()>) {
        let found = self.work(|agent| Ok(pending::list(&agent.collector.waiting_dels.state_dir))).await;
        let found = match found {
            Ok(Ok(found)) => found,
            Ok(Err(error)) => return tracing::error!(error = %Chain(&error), "recorded DELs not looked for"),
            // The agent ends.
            Err(_) => return,
        };
        while under_way.try_join_next().is_some() {}
        for (path, container) in self.collector.waiting_dels.due(found, Instant::now()) {
            if under_way.len() >= AT_ONCE {
                return;
            }
            let Some(turn) = self.turns.take(&container) else { continue };
            turn.rolls_back();
            let agent = Arc::clone(self);
            under_way.spawn(async move {
                agent.carry_out(&path).await;
                drop(turn);
            });
        }
    }

    /// Carries out a recorded DEL, in its container's turn, which the caller has. `false`: it failed, and stays. It is logged
    /// like one that the runtime waits for, a failure once and not at each attempt.
    pub(super) async fn carry_out(self: &Arc<Self>, path: &Path) -> bool {
        let request = match pending::read(path) {
            Ok(request) => request,
            Err(error) => {
                drop_unusable(path, &error);
                return error.is_gone();
            }
        };
        let asked = request_log::Asked::of(&request.call);
        let (key, begun) = (asked.sandbox(), Instant::now());
        let container = key.container_id.clone();
        let work = move |agent: &Self| agent.carry_out_blocking(&key, &request);
        match self.in_lane(Class::Del, work).await {
            Ok(made) => {
                if let Some(made) = made {
                    asked.answered(&made, None, begun.elapsed());
                }
                forget(path);
                self.collector.waiting_dels.done(path);
                true
            }
            Err(error) => {
                let said = Chain(&error).to_string();
                if self.collector.waiting_dels.failed(path, container, said, Instant::now()) {
                    asked.answered(&self.about(&asked), Some(&error), begun.elapsed());
                }
                false
            }
        }
    }

    /// What was detached; `None`: the request is for an earlier attachment.
    fn carry_out_blocking(&self, key: &JournalKey, request: &Request) -> Result<Option<Made>, cni::CniError> {
        let Request { call, recorded } = request;
        // Some runtimes reuse ids. The DEL deals with a record that cannot be read.
        if self.engine.attached_since(key, recorded.as_ref()).unwrap_or(false) {
            tracing::info!(
                container = key.container_id,
                "the recorded DEL is older than the attachment; dropped"
            );
            return Ok(None);
        }
        match cni::Request::parse(&call.env, call.stdin.as_bytes()) {
            Ok(asked) => self.blocking(&asked, &Asked::new()).map(|done| Some(done.made.in_words())),
            // Nobody repeats it in another form, and the record has all that is needed.
            Err(error) => {
                tracing::warn!(container = key.container_id, error = %Chain(&error), "the recorded DEL is not valid; carried out from the journal");
                let made = self.made_of(key);
                let pod = self.engine.del_recorded(key)?;
                self.withdraw(pod.as_ref());
                Ok(Some(made))
            }
        }
    }
}

/// Drops a file that will never be a request. One that cannot be read now stays.
pub(super) fn drop_unusable(path: &Path, error: &UnreadableError) {
    if error.is_no_request() {
        tracing::warn!(request = %path.display(), error = %Chain(error), "unreadable recorded DEL dropped");
        forget(path);
    } else if !error.is_gone() {
        tracing::error!(request = %path.display(), error = %Chain(error), "recorded DEL cannot be read; it stays");
    }
}

fn forget(path: &Path) {
    if let Err(error) = pending::remove(path) {
        tracing::warn!(error = %Chain(&error), "a recorded DEL was carried out but not removed; it will be repeated");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(30);

    fn found(path: &str) -> Vec<Pending> {
        vec![Pending { path: path.into(), container: Ok("c1".into()) }]
    }

    #[test]
    fn what_failed_is_due_again_after_a_growing_pause_until_it_is_gone() {
        let waiting = WaitingDels::new("/nonexistent".into(), INTERVAL);
        let start = Instant::now();
        let due = |after: u64| waiting.due(found("a"), start + Duration::from_secs(after)).len();
        assert_eq!(due(0), 1);
        let failed = |error: &str| waiting.failed(Path::new("a"), "c1".into(), error.into(), start);
        assert!(failed("not now"));
        assert_eq!([due(14), due(15)], [0, 1]);
        assert!(!failed("not now"), "it has been told");
        assert_eq!([due(29), due(30)], [0, 1]);
        let [condition] = <[Condition; 1]>::try_from(waiting.troubles()).unwrap();
        assert_eq!(
            (condition.object.as_str(), condition.problem.as_str()),
            (
                "container c1",
                "its DEL came while no agent answered, and has failed 2 times; it is tried again: not now"
            )
        );
        assert_eq!([failed("never"), failed("never")], [true, false]);
        assert_eq!((pause(INTERVAL, 7), pause(INTERVAL, u32::MAX)), (LONGEST_PAUSE, LONGEST_PAUSE));
        assert_eq!(waiting.due(Vec::new(), start).len(), 0);
        assert!(waiting.troubles().is_empty());
    }

    /// They are found in the order of their age. A network may hang, and a DEL of it fail only after a minute.
    #[test]
    fn what_has_failed_again_and_again_is_tried_after_what_has_not() {
        let waiting = WaitingDels::new("/nonexistent".into(), INTERVAL);
        let start = Instant::now();
        let many = || ["often", "old", "once", "new"].into_iter().flat_map(found).collect::<Vec<_>>();
        for (path, attempts) in [("often", 3), ("once", 1)] {
            for _ in 0..attempts {
                waiting.failed(Path::new(path), "c1".into(), "not now".into(), start);
            }
        }
        let due = |after: Duration| {
            let due = waiting.due(many(), start + after);
            due.into_iter().map(|(path, _)| path.display().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(due(Duration::ZERO), ["old", "new"]);
        assert_eq!(due(LONGEST_PAUSE), ["old", "new", "once", "often"]);
    }

    /// None of those has failed yet.
    #[test]
    fn a_hundred_that_may_hang_leave_room_for_one_that_came_after_them() {
        let waiting = WaitingDels::new("/nonexistent".into(), INTERVAL);
        let names = (0..100).map(|number| number.to_string()).chain(["other".to_owned()]);
        let due = waiting.due(names.flat_map(|name| found(&name)).collect(), Instant::now());
        assert!(due.iter().take(AT_ONCE).any(|(path, _)| path == Path::new("other")));
    }
}
