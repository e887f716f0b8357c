//! Which agent serves a node: the one that has the locks of the socket and of the state directory, in this order. An agent
//! that gives its place up lets the socket go first, then ends what it works on, then lets the rest go.
//!
//! Where the settings say so (`standBySeconds`), an agent that finds the socket taken stands by: it tries what it can try,
//! reads what it can read, and takes the place when it is free. Until then it writes nothing, neither to the kernel nor to
//! the disk nor to the cluster, and answers nobody. Why: `docs/decisions/0034-the-next-agent-stands-by.md`.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::cni_conf::CniConf;
use super::config::Settings;
use super::metrics::Metrics;
use super::owned::{self, Owned};
use super::run::{AgentError, attach_modes, dataplane, unless_signal};
use super::signals::Signals;
use super::sources::{self, Sources};
use crate::bpf::Dataplane;
use crate::rpc::server::{LOCK_PATIENCE, ListenError, Listener, SocketLock};

/// How long an agent that has let its socket go may take to end, where another one stands by: its pod has 20 s.
const LETTING_GO: Duration = Duration::from_secs(30);

/// What an agent has that may serve.
pub(super) struct Place {
    /// Requests wait here until everything else is ready.
    pub(super) listener: Listener,
    /// The lock of the state directory: an agent with another socket may use the same records.
    pub(super) records: Owned,
    /// What was opened while another agent served.
    pub(super) sources: Option<Sources>,
}

/// How long the locks of an agent are waited for that has let its socket go.
pub(super) fn letting_go(settings: &Settings) -> Duration {
    settings.stand_by().map_or(owned::PATIENCE, |_| LETTING_GO)
}

/// Takes the place of the agent of this node, once nobody has it. `None`: a signal came before.
///
/// # Errors
/// Another agent has it, for longer than this one may stand by; or this one could not serve.
pub(super) async fn take_place(
    signals: &mut Signals,
    settings: &Arc<Settings>,
    metrics: &Arc<Metrics>,
) -> Result<Option<Place>, AgentError> {
    let socket = settings.socket();
    let (lock, sources) = match (SocketLock::take(&socket, LOCK_PATIENCE), settings.stand_by()) {
        (Err(ListenError::Served { .. }), Some(most)) => {
            let trial = (Arc::clone(settings), Arc::clone(metrics));
            let tried = unless_signal(signals.ending(), move || try_start(&trial.0, &trial.1)).await;
            let Some(sources) = tried else { return Ok(None) };
            let sources = sources?;
            let waited = unless_signal(signals.ending(), move || wait(&socket, most)).await;
            let Some(lock) = waited else { return Ok(None) };
            (lock?, Some(sources))
        }
        (taken, _) => (taken?, None),
    };
    // Before the records: clients that come while the other agent ends wait in the queue of the socket.
    let listener = Listener::bind(lock)?;
    let own = Arc::clone(settings);
    let owned = unless_signal(signals.ending(), move || {
        owned::own("state directory", &own.state_dir, letting_go(&own))
    });
    let Some(records) = owned.await else { return Ok(None) };
    Ok(Some(Place { listener, records: records?, sources }))
}

/// Everything of a start that can be had, and can fail, without a change to anything.
fn try_start(settings: &Settings, metrics: &Arc<Metrics>) -> Result<Sources, AgentError> {
    // First: a cluster is read from here on.
    let sources = sources::open(settings, metrics)?;
    Dataplane::try_open(&dataplane(settings)?)?;
    attach_modes(settings)?;
    CniConf::of(settings)?;
    Ok(sources)
}

/// Waits until nobody serves the socket.
fn wait(socket: &Path, most: Duration) -> Result<SocketLock, AgentError> {
    let seconds = most.as_secs();
    tracing::info!(
        socket = %socket.display(), seconds,
        "another agent serves; standing by until it ends; the checks before the start have passed"
    );
    let began = Instant::now();
    match SocketLock::take(socket, most) {
        Ok(lock) => {
            tracing::info!(
                stood_by_ms = began.elapsed().as_millis(),
                "the other agent ends; taking its place"
            );
            Ok(lock)
        }
        Err(source @ ListenError::Served { .. }) => Err(AgentError::StoodBy { seconds, source }),
        Err(error) => Err(error.into()),
    }
}
