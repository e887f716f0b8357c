//! Carries out unfinished operations of an earlier agent, and DELs that arrived while no agent ran. This
//! happens concurrently with requests, each container in its own turn; the turns are taken before the first
//! request is served. So a request for such a container waits only for that container's work.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::waiting_dels::drop_unusable;
use crate::agent::Agent;
use crate::agent::admission::lanes::Class;
use crate::agent::admission::scheduler::{MOST_DELS, Turn, Turns};
use crate::agent::pods::drift::MOST_ROWS;
use crate::attach::Engine;
use crate::error_chain::Chain;
use crate::journal::JournalKey;
use crate::own_thread;
use crate::rpc::message::Condition;
use crate::rpc::pending::Pending;
use crate::sync::{Mutex, locked};

/// Most containers in the lanes at a time: half of the slots, so that DELs of the runtime have room.
const AT_ONCE: usize = MOST_DELS / 2;

/// Unfinished work, by container.
pub(in crate::agent) struct LeftOver(BTreeMap<String, (Turn, Vec<Left>)>);

enum Left {
    /// A record of an unfinished operation.
    Record(JournalKey),
    /// The file of a DEL that arrived while no agent ran.
    Del(PathBuf),
}

/// What earlier agents have left over, for the status.
#[derive(Debug)]
pub(in crate::agent) struct Earlier {
    /// Number of containers with unfinished work.
    unfinished: AtomicUsize,
    /// Records that could not be taken over, until they are gone.
    left_alone: Mutex<Vec<(JournalKey, String)>>,
}

impl Earlier {
    /// `left_alone`: records that could not be taken over, with the reason.
    pub(in crate::agent) fn new(left_alone: Vec<(JournalKey, String)>) -> Self {
        Self { unfinished: AtomicUsize::new(0), left_alone: Mutex::new(left_alone) }
    }

    /// Notes the number of containers with unfinished work.
    pub(in crate::agent) fn begun(&self, containers: usize) {
        self.unfinished.store(containers, Ordering::Relaxed);
    }

    /// Returns the number of containers with unfinished work.
    pub(in crate::agent) fn unfinished(&self) -> usize {
        self.unfinished.load(Ordering::Relaxed)
    }

    /// Returns the records that could not be taken over and still exist, whose pods keep working, and the
    /// work that is not finished.
    pub(in crate::agent) fn conditions(&self, engine: &Engine) -> Vec<Condition> {
        let mut left = locked(&self.left_alone);
        left.retain(|(key, _)| engine.has_record(key));
        let row = |(key, problem): &(JournalKey, String)| Condition {
            object: format!("container {}", key.container_id),
            problem: format!("its record is not taken over: {problem}"),
        };
        let mut conditions: Vec<_> = left.iter().take(MOST_ROWS).map(row).collect();
        let unfinished = self.unfinished();
        conditions.extend((unfinished > 0).then(|| Condition {
            object: "earlier agents".to_owned(),
            problem: format!("their unfinished operations on {unfinished} containers are being finished"),
        }));
        conditions
    }
}

/// Counts a container with unfinished work in the status, until this is dropped.
struct Listed(Arc<Agent>);

impl Drop for Listed {
    fn drop(&mut self) {
        self.0.earlier.unfinished.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Number of successes and failures.
#[derive(Debug, Default)]
struct Counts {
    rolled_back: AtomicUsize,
    failed: AtomicUsize,
}

impl LeftOver {
    /// Takes the turn of every container with unfinished work. Must be called before requests are served.
    pub(in crate::agent) fn gather(
        turns: &Arc<Turns>,
        unfinished: Vec<JournalKey>,
        waiting: Vec<Pending>,
    ) -> Self {
        let mut left = Self(BTreeMap::new());
        for key in unfinished {
            left.add(turns, key.container_id.clone(), Left::Record(key));
        }
        for Pending { path, container } in waiting {
            match container {
                Ok(container) => left.add(turns, container, Left::Del(path)),
                Err(error) => drop_unusable(&path, &error),
            }
        }
        left
    }

    fn add(&mut self, turns: &Arc<Turns>, container: String, what: Left) {
        if let Some((_, left)) = self.0.get_mut(&container) {
            left.push(what);
        } else if let Some(turn) = turns.take(&container) {
            turn.rolls_back();
            self.0.insert(container, (turn, vec![what]));
        }
    }

    /// Number of containers.
    pub(in crate::agent) fn len(&self) -> usize {
        self.0.len()
    }

    /// Carries out all unfinished work.
    pub(in crate::agent) async fn finish(self, agent: Arc<Agent>) {
        let room = Arc::new(Semaphore::new(AT_ONCE));
        let counts = Arc::new(Counts::default());
        let mut under_way = JoinSet::new();
        for (turn, left) in self.0.into_values() {
            let Ok(place) = Arc::clone(&room).acquire_owned().await else { return };
            let (agent, counts) = (Arc::clone(&agent), Arc::clone(&counts));
            let listed = Listed(Arc::clone(&agent));
            under_way.spawn(async move {
                for left in left {
                    agent.finish(left, &counts).await;
                }
                drop((turn, place, listed));
            });
        }
        while let Some(ended) = under_way.join_next().await {
            own_thread::joined(ended);
        }
        let [rolled_back, failed] =
            [&counts.rolled_back, &counts.failed].map(|it| it.load(Ordering::Relaxed));
        // Done again here in case the disk was full at the start. Runs in the background, so that a slow
        // disk delays nothing.
        let _ = tokio::task::spawn_blocking(move || agent.engine.note_boot()).await;
        if failed == 0 {
            tracing::info!(rolled_back, failed, "operations of earlier agents are finished");
        } else {
            tracing::warn!(
                rolled_back,
                failed,
                "operations of earlier agents are finished, except those that failed"
            );
        }
    }
}

impl Agent {
    async fn finish(self: &Arc<Self>, left: Left, counts: &Arc<Counts>) {
        match left {
            Left::Record(key) => {
                let record = format!("{}@{}", key.container_id, key.ifname);
                let counts = Arc::clone(counts);
                let finished = self.in_lane(Class::Del, move |agent| Ok(agent.engine.finish(&key)?)).await;
                match finished {
                    Ok(did) => drop(counts.rolled_back.fetch_add(usize::from(did), Ordering::Relaxed)),
                    Err(error) => {
                        counts.failed.fetch_add(1, Ordering::Relaxed);
                        tracing::error!(record, error = %Chain(&error), "not rolled back; DEL will try again");
                    }
                }
            }
            Left::Del(path) => {
                let done = self.carry_out(&path).await;
                counts.failed.fetch_add(usize::from(!done), Ordering::Relaxed);
            }
        }
    }
}
