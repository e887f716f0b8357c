//! Carries out unfinished operations of an earlier agent, and the DELs that arrived while none ran: concurrently with
//! the requests that are served, each in its container's turn, which is taken before the first request is. A request
//! for such a container waits for that container's work only.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::handler::Agent;
use super::lanes::Class;
use super::scheduler::{MOST_DELS, Turn, Turns};
use crate::cni;
use crate::error_chain::Chain;
use crate::journal::JournalKey;
use crate::moment::Moment;
use crate::rpc::message::CniCall;
use crate::rpc::pending::{self, Pending};

/// Most containers in the lanes at a time: half of the places, so that DELs of the runtime find room.
const AT_ONCE: usize = MOST_DELS / 2;

/// Unfinished work, by container.
pub(super) struct LeftOver(BTreeMap<String, (Turn, Vec<Left>)>);

enum Left {
    /// A record of an unfinished operation.
    Record(JournalKey),
    /// A DEL that arrived while no agent ran.
    Del { path: PathBuf, recorded: Option<Moment>, call: Arc<CniCall> },
}

/// Number of successes and failures.
#[derive(Debug, Default)]
struct Counts {
    taken_back: AtomicUsize,
    failed: AtomicUsize,
}

impl LeftOver {
    /// Takes the turn of every container with unfinished work. Must be called before anything is served.
    pub(super) fn gather(turns: &Arc<Turns>, unfinished: Vec<JournalKey>, waiting: Vec<Pending>) -> Self {
        let mut left = Self(BTreeMap::new());
        for key in unfinished {
            left.add(turns, key.container_id.clone(), Left::Record(key));
        }
        for Pending { path, recorded, call } in waiting {
            match call {
                Ok(call) => {
                    let container = call.variable("CNI_CONTAINERID").unwrap_or_default().to_owned();
                    left.add(turns, container, Left::Del { path, recorded, call: Arc::new(call) });
                }
                Err(error) => {
                    tracing::warn!(request = %path.display(), error = %Chain(&error), "unreadable request dropped");
                    forget(&path);
                }
            }
        }
        left
    }

    fn add(&mut self, turns: &Arc<Turns>, container: String, what: Left) {
        if let Some((_, left)) = self.0.get_mut(&container) {
            left.push(what);
        } else if let Some(turn) = turns.take(&container) {
            turn.takes_back();
            self.0.insert(container, (turn, vec![what]));
        }
    }

    /// Number of containers.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Carries out all of it.
    pub(super) async fn finish(self, agent: Arc<Agent>) {
        let room = Arc::new(Semaphore::new(AT_ONCE));
        let counts = Arc::new(Counts::default());
        let mut under_way = JoinSet::new();
        for (turn, left) in self.0.into_values() {
            let Ok(place) = Arc::clone(&room).acquire_owned().await else { return };
            let (agent, counts) = (Arc::clone(&agent), Arc::clone(&counts));
            under_way.spawn(async move {
                for left in left {
                    agent.finish(left, &counts).await;
                }
                agent.left_over.fetch_sub(1, Ordering::Relaxed);
                drop((turn, place));
            });
        }
        // A panic has been reported by the panic hook.
        while under_way.join_next().await.is_some() {}
        let [taken_back, failed] = [&counts.taken_back, &counts.failed].map(|it| it.load(Ordering::Relaxed));
        if failed == 0 {
            // In the background, so that a slow disk delays nothing.
            let _ = tokio::task::spawn_blocking(move || agent.engine.note_boot()).await;
        }
        tracing::info!(taken_back, failed, "nothing is left over of earlier agents");
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
                    Ok(did) => drop(counts.taken_back.fetch_add(usize::from(did), Ordering::Relaxed)),
                    Err(error) => {
                        counts.failed.fetch_add(1, Ordering::Relaxed);
                        tracing::error!(record, error = %Chain(&error), "not taken back; DEL will try again");
                    }
                }
            }
            Left::Del { path, recorded, call } => self.carry_out(&path, recorded, call, counts).await,
        }
    }

    /// Carries out a DEL that came while no agent ran.
    async fn carry_out(
        self: &Arc<Self>,
        path: &Path,
        recorded: Option<Moment>,
        call: Arc<CniCall>,
        counts: &Arc<Counts>,
    ) {
        let request = path.display().to_string();
        let done = self
            .in_lane(Class::Del, move |agent| {
                if is_outdated(agent, &call, recorded.as_ref()) {
                    tracing::info!(
                        request,
                        "DEL that waited for the agent is older than the attachment; dropped"
                    );
                    return Ok(());
                }
                let asked = cni::Request::parse(&call.env, call.stdin.as_bytes())?;
                agent.blocking(&asked).map(drop)
            })
            .await;
        match done {
            Ok(()) => forget(path),
            Err(error) => {
                counts.failed.fetch_add(1, Ordering::Relaxed);
                tracing::error!(request = %path.display(), error = %Chain(&error), "DEL that waited for the agent failed; it stays for the next start");
            }
        }
    }
}

/// Whether the container was attached again after the request was recorded: some runtimes reuse ids.
fn is_outdated(agent: &Agent, call: &CniCall, recorded: Option<&Moment>) -> bool {
    let variable = |name| call.variable(name).unwrap_or_default().to_owned();
    let key = JournalKey { container_id: variable("CNI_CONTAINERID"), ifname: variable("CNI_IFNAME") };
    // The DEL deals with a record that cannot be read.
    agent.engine.attached_since(&key, recorded).unwrap_or(false)
}

fn forget(path: &Path) {
    if let Err(error) = pending::remove(path) {
        tracing::warn!(error = %Chain(&error), "a DEL that was carried out will be again at the next start");
    }
}
