//! Decides which agent serves a node: the one that holds the locks of the socket and of the state
//! directory, taken in this order. An agent that ends releases the socket first, then finishes its running
//! work, then releases the other locks.
//!
//! If the settings say so (`standBySeconds`), an agent that finds the socket locked stands by: it checks
//! and reads everything that it can, and takes the locks when they are free. Until then it writes nothing,
//! neither to the kernel nor to the disk nor to the cluster, and answers no request. Why:
//! `docs/decisions/0034-the-next-agent-stands-by.md`.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::owned::{self, Owned};
use super::signals::Signals;
use super::sources::{self, Sources};
use super::{AgentError, attach_modes, dataplane, unless_signal};
use crate::agent::cni_conf::CniConf;
use crate::agent::monitoring::metrics::Metrics;
use crate::bpf::Dataplane;
use crate::rpc::server::{LOCK_PATIENCE, ListenError, Listener, SocketLock};
use crate::settings::Settings;

/// How long an agent may take to end after it has released its socket, if another one stands by: its pod
/// has 20 s.
const LETTING_GO: Duration = Duration::from_secs(30);

/// The locks and the listener of the agent that may serve.
pub(in crate::agent) struct Place {
    /// Requests wait here until everything else is ready.
    pub(in crate::agent) listener: Listener,
    /// The lock of the state directory: an agent with another socket may use the same records.
    pub(in crate::agent) records: Owned,
    /// Sources opened while another agent served.
    pub(in crate::agent) sources: Option<Sources>,
}

/// Returns how long to wait for the other locks of an agent that has released its socket.
pub(super) fn letting_go(settings: &Settings) -> Duration {
    settings.stand_by().map_or(owned::PATIENCE, |_| LETTING_GO)
}

/// Takes the locks of this node once they are free. `None`: a signal arrived before.
///
/// # Errors
/// Another agent holds the locks for longer than this one may stand by, or this one could not serve.
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
    // Before the records: clients that connect while the other agent ends wait in the socket's queue.
    let listener = Listener::bind(lock)?;
    let own = Arc::clone(settings);
    let owned = unless_signal(signals.ending(), move || {
        owned::own("state directory", &own.state_dir, letting_go(&own))
    });
    let Some(records) = owned.await else { return Ok(None) };
    Ok(Some(Place { listener, records: records?, sources }))
}

/// Runs every part of a start that changes nothing but may fail.
fn try_start(settings: &Settings, metrics: &Arc<Metrics>) -> Result<Sources, AgentError> {
    // First, as this starts reading the cluster.
    let sources = sources::open(settings, metrics)?;
    Dataplane::try_open(&dataplane(settings)?)?;
    attach_modes(settings)?;
    CniConf::of(settings)?;
    Ok(sources)
}

/// Waits until the socket's lock is free.
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
