//! Carries out the DELs that the CNI executable has recorded because no agent answered. The runtime was
//! told that they succeeded and does not repeat them: a DEL that fails is kept and retried, at growing
//! intervals, while the agent runs and at its next start.
//!
//! Most are found at the start ([`left_over`](super::left_over)). The agent also looks for them while it
//! serves (`collector`): the executable records one if the agent was too slow to answer it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use crate::agent::Agent;
use crate::agent::admission::lanes::Class;
use crate::agent::admission::scheduler::MOST_DELS;
use crate::agent::request::devices::Asked;
use crate::agent::request::request_log::{self, Made};
use crate::cni;
use crate::error_chain::Chain;
use crate::journal::JournalKey;
use crate::own_thread;
use crate::pace;
use crate::rpc::message::Condition;
use crate::rpc::pending::{self, Pending, PendingError, Request, UnreadableError};
use crate::sync::{Mutex, locked};
use crate::waits::{Footprint, Resource};

/// Longest time between two attempts of one DEL; the first retry is at the next check.
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

/// Most recorded DELs that run at a time: an eighth of the queue of DELs, so that the runtime's DELs have
/// room.
const AT_ONCE: usize = MOST_DELS / 8;

/// Most of them that may hang at the same plugin or pool: the limit of the lanes for one resource. Further
/// ones would only wait there, in slots that DELs of other networks need.
const OF_ONE: usize = AT_ONCE / 4;

/// The recorded DELs.
#[derive(Debug)]
pub(super) struct WaitingDels {
    state_dir: PathBuf,
    /// The time between two checks.
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

/// The recorded DELs to try now.
struct Due {
    /// Their files, with their containers.
    files: Vec<(PathBuf, String)>,
    /// The resources that the DEL of each container may wait for, as far as known.
    needs: BTreeMap<String, Footprint>,
}

/// The DELs that are running, each with the resources at which it may hang.
#[derive(Debug, Default)]
pub(super) struct UnderWay {
    tasks: JoinSet<Footprint>,
    places: Places,
}

/// The slots of running DELs. Pure.
#[derive(Debug, Default)]
struct Places {
    taken: usize,
    /// How many DELs may hang at each resource.
    at: BTreeMap<Resource, usize>,
}

impl UnderWay {
    /// Frees the slots of ended DELs.
    fn end(&mut self) {
        while let Some(ended) = self.tasks.try_join_next() {
            if let Some(at) = own_thread::joined(ended) {
                self.places.give_back(&at);
            }
        }
    }
}

impl Places {
    /// Gives slots to those due DELs that may begin now, in their order, with the resources at which they
    /// may hang and their container's turn. `needs`: the resources that the DEL of a container may wait
    /// for, as far as known.
    fn give<T>(
        &mut self,
        due: Vec<(PathBuf, String)>,
        needs: &BTreeMap<String, Footprint>,
        turn: impl Fn(&str) -> Option<T>,
    ) -> Vec<(PathBuf, Footprint, T)> {
        let mut begun = Vec::new();
        for (path, container) in due {
            if self.taken >= AT_ONCE {
                break;
            }
            let at = needs.get(&container).map(may_hang_at).unwrap_or_default();
            if at.iter().any(|one| self.at.get(one).is_some_and(|many| *many >= OF_ONE)) {
                continue;
            }
            let Some(turn) = turn(&container) else { continue };
            self.taken += 1;
            for one in &at {
                *self.at.entry(one.clone()).or_default() += 1;
            }
            begun.push((path, at, turn));
        }
        begun
    }

    fn give_back(&mut self, at: &Footprint) {
        self.taken = self.taken.saturating_sub(1);
        for one in at {
            let Some(many) = self.at.get_mut(one) else { continue };
            *many = many.saturating_sub(1);
            if *many == 0 {
                self.at.remove(one);
            }
        }
    }
}

/// Returns the needs of a DEL that may hang, except those that would hang for all DELs of the node. A
/// plugin mostly hangs for all its networks, because the service that it calls does not answer.
fn may_hang_at(needs: &Footprint) -> Footprint {
    let of_one = |needed: &Resource| match needed {
        Resource::Plugin { plugin, network: _ } => {
            Some(Resource::Plugin { plugin: plugin.clone(), network: String::new() })
        }
        Resource::Pool(_) | Resource::VfLocks { .. } | Resource::Devices { .. } => Some(needed.clone()),
        Resource::Cache
        | Resource::Sync
        | Resource::Detection { .. }
        | Resource::PacketFilter
        | Resource::Publication => None,
    };
    needs.iter().filter_map(of_one).collect()
}

impl WaitingDels {
    /// Handles the DELs recorded in that state directory, which is checked at that interval.
    pub(in crate::agent) fn new(state_dir: PathBuf, interval: Duration) -> Self {
        Self { state_dir, interval, failed: Mutex::default() }
    }

    /// Returns the DELs that failed, by container.
    pub(in crate::agent) fn troubles(&self) -> Vec<Condition> {
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

    /// Returns the files of `found` to try now, with their containers: those with the fewest failures
    /// first, and of these the oldest. So DELs of one hanging network do not delay all others. Forgets the
    /// failures of removed files.
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

    /// Records a failure, and returns whether it differs from the last one.
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

/// Returns the time from a failed attempt to the next.
fn pause(interval: Duration, attempts: u32) -> Duration {
    // Slightly less than the interval, so that the check at that time finds it due.
    pace::after_failures(interval / 2, attempts, LONGEST_PAUSE)
}

impl Agent {
    /// Starts the due recorded DELs, as far as there are slots beside those `under_way`, except those of
    /// containers whose turn another operation has. Does not wait for them, as one may hang.
    pub(super) async fn carry_out_waiting(self: &Arc<Self>, under_way: &mut UnderWay) {
        let Due { files, needs } = match self.work(|agent| Ok(agent.find_due())).await {
            Ok(Ok(due)) => due,
            Ok(Err(error)) => return tracing::error!(error = %Chain(&error), "cannot list the recorded DELs"),
            // The agent is ending.
            Err(_) => return,
        };
        under_way.end();
        for (path, at, turn) in
            under_way.places.give(files, &needs, |container| self.admission.turns().take(container))
        {
            turn.rolls_back();
            let agent = Arc::clone(self);
            under_way.tasks.spawn(async move {
                agent.carry_out(&path).await;
                drop(turn);
                at
            });
        }
    }

    /// Finds the recorded DELs to try now. Reads the records of their containers alone.
    fn find_due(&self) -> Result<Due, PendingError> {
        let waiting_dels = &self.collector.waiting_dels;
        let files = waiting_dels.due(pending::list(&waiting_dels.state_dir)?, Instant::now());
        let containers: BTreeSet<&str> = files.iter().map(|(_, container)| container.as_str()).collect();
        let needs = match containers.is_empty() {
            true => BTreeMap::new(),
            false => self.engine.needs_of(&containers),
        };
        Ok(Due { files, needs })
    }

    /// Carries out a recorded DEL, in its container's turn, which the caller has. `false`: it failed, and
    /// is kept. It is logged like a DEL of the runtime, but a repeated failure only once.
    pub(in crate::agent) async fn carry_out(self: &Arc<Self>, path: &Path) -> bool {
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

    /// Returns what was detached; `None`: the request is for an earlier attachment.
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
            Ok(asked) => self.call_engine(&asked, &Asked::new()).map(|done| Some(done.made.in_words())),
            // No runtime repeats the request in another form, and the record has all that is needed.
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

/// Deletes a file that will never be a request. A file that cannot be read now is kept.
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

    /// They are found in the order of their age. A network may hang, and its DEL fail only after a minute.
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

    fn plugin(plugin: &str, network: &str) -> Resource {
        Resource::Plugin { plugin: plugin.to_owned(), network: network.to_owned() }
    }

    /// Begins the DELs of those containers that get a slot, and returns the containers.
    fn begun(places: &mut Places, containers: &[String], needs: &BTreeMap<String, Footprint>) -> Vec<String> {
        let due = containers.iter().map(|container| (container.into(), container.clone())).collect();
        let begun = places.give(due, needs, |container| (container != "busy").then_some(()));
        begun.into_iter().map(|(path, _, ())| path.display().to_string()).collect()
    }

    fn named(name: &str, numbers: std::ops::Range<usize>) -> Vec<String> {
        numbers.map(|number| format!("{name}-{number}")).collect()
    }

    /// None of these DELs has failed yet, and the hanging ones have come first.
    #[test]
    fn those_at_one_plugin_or_pool_leave_room_for_others_that_came_after_them() {
        let hung = named("hung", 0..200);
        let pooled = named("pooled", 0..40);
        let others = named("other", 0..100);
        let of_hung = hung.iter().enumerate().map(|(number, container)| {
            // Of two networks of one plugin.
            let network = if number % 2 == 0 { "lan" } else { "storage" };
            (container.clone(), Footprint::from([Resource::Sync, plugin("away", network)]))
        });
        let pool = Resource::Pool(crate::ipam::Pool::directory("/pools", "lan"));
        let of_pooled = pooled.iter().map(|container| (container.clone(), Footprint::from([pool.clone()])));
        let of_others = others
            .iter()
            .map(|container| (container.clone(), Footprint::from([Resource::Sync, Resource::Cache])));
        let needs: BTreeMap<String, Footprint> = of_hung.chain(of_pooled).chain(of_others).collect();
        let mut places = Places::default();
        let busy = ["busy".to_owned()];
        let due = [&busy[..], &hung, &pooled, &others[..10]].concat();
        let expected = [&hung[..OF_ONE], &pooled[..OF_ONE], &others[..10]].concat();
        assert_eq!(begun(&mut places, &due, &needs), expected);
        // While they hang, later DELs of other networks get one slot each, up to the number of slots.
        let left = AT_ONCE - expected.len();
        let due = [&hung[OF_ONE..], &pooled[OF_ONE..], &others[10..], &named("unknown", 0..9)].concat();
        assert_eq!(begun(&mut places, &due, &needs), others[10..10 + left]);
        assert_eq!(begun(&mut places, &due, &needs), [""; 0]);
        // A DEL that ends frees its slot for the first DEL that may have it.
        places.give_back(&may_hang_at(&needs["other-0"]));
        let late = [&hung[OF_ONE..], &named("unknown", 0..2)].concat();
        assert_eq!(begun(&mut places, &late, &needs), ["unknown-0"]);
        places.give_back(&may_hang_at(&needs["hung-0"]));
        assert_eq!(begun(&mut places, &late, &needs), [hung[OF_ONE].clone()]);
    }

    #[test]
    fn what_all_dels_of_the_node_need_is_no_reason_to_keep_one_back() {
        let pool = Resource::Pool(crate::ipam::Pool::directory("/pools", "lan"));
        let locks = Resource::VfLocks { network: "sriov".to_owned() };
        let devices = Resource::Devices { network: "sriov".to_owned() };
        let needs = [
            Resource::Cache,
            Resource::Sync,
            Resource::PacketFilter,
            Resource::Detection { network: "lan".to_owned() },
            pool.clone(),
            locks.clone(),
            devices.clone(),
            plugin("ovs", "a"),
            plugin("ovs", "b"),
        ];
        assert_eq!(may_hang_at(&needs.into()), [pool, locks, devices, plugin("ovs", "")].into());
    }
}
