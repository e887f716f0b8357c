//! Starts the agent, serves, and ends it.
//!
//! | module | what it does |
//! |---|---|
//! | `log` | the log |
//! | `owned` | directory locks |
//! | `stand_by` | which agent serves |
//! | `start` | starts the parts, each after the parts it depends on |
//! | `sources` | where objects come from |
//! | `answers` | builds the parts that requests are answered from |
//! | `tasks`, `background` | background tasks; what happens when one ends |
//! | `signals`, `reload` | signals; what SIGHUP reloads |
//! | `error` | why the agent does not run |

mod answers;
mod background;
mod error;
mod log;
pub(super) mod owned;
mod reload;
mod signals;
pub(super) mod sources;
mod stand_by;
mod start;
mod tasks;

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use self::background::{Background, EndedEarly};
pub use self::error::AgentError;
use self::reload::Reload;
use self::signals::Signals;
use self::stand_by::Place;
use self::start::{Parts, Started, start, warn_of_pools};
pub(super) use self::start::{attach_modes, dataplane};
use super::health::Health;
use super::node_network::NodeNetwork;
use crate::agent::Agent;
use crate::agent::admission::places::MOST_QUESTIONS;
use crate::agent::admission::scheduler;
use crate::agent::cleanup::left_over::LeftOver;
use crate::agent::cni_conf::conf_keeper::ConfKeeper;
use crate::agent::health::readiness;
use crate::agent::monitoring::metrics::Metrics;
use crate::agent::node::check;
use crate::agent::node::kernel_settings;
use crate::agent::node::plugin_root;
use crate::agent::node::privileges;
use crate::agent::request::after_add::MOST_PUBLISHERS;
use crate::agent::request::handler::Served;
use crate::attach::Recovery;
use crate::bpf;
use crate::delegate::end_orphans;
use crate::descriptors;
use crate::error_chain::Chain;
use crate::journal::JournalKey;
use crate::netlink::FilterWatch;
use crate::observe::Observer;
use crate::own_thread;
use crate::rpc::pending::Pending;
use crate::rpc::server::{ACCEPTORS, Limits, Listener, serve};
use crate::settings::LogFormat;
use crate::settings::{Arguments, Settings};

/// How long an idle blocking thread is kept: long enough that the checks of each second find one, and less
/// than two seconds, as two threads would otherwise take turns with the checks, and both stay.
const KEEP_ALIVE: Duration = Duration::from_millis(1500);

/// Entry point of `netattachd`: reads the command line, logs to standard error (see [`log`]), runs.
pub(super) fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Some(directory) = &arguments.mount_bpffs {
        let started = log::start(LogFormat::default()).map_err(AgentError::from);
        return ended(started.and_then(|()| mount_bpffs(directory)).map(|()| ExitCode::SUCCESS));
    }
    if arguments.check {
        let format = arguments.output;
        let settings = log::start(LogFormat::default()).map_err(AgentError::from);
        let settings = settings.and_then(|()| Ok(Settings::unvalidated(arguments)?));
        return ended(settings.map(|settings| check::run(&settings, format)));
    }
    // The settings determine the log's format; errors in the settings are logged as text.
    let settings = Settings::read(arguments.clone()).map_err(AgentError::from);
    let format = settings.as_ref().map(|settings| settings.log.format).unwrap_or_default();
    let started = log::start(format).map_err(AgentError::from).and(settings);
    ended(started.and_then(|settings| run_with(settings, Some(arguments))).map(|()| ExitCode::SUCCESS))
}

fn mount_bpffs(directory: &Path) -> Result<(), AgentError> {
    let is_new = bpf::mount_bpffs(directory)?;
    let said = if is_new { "BPF file system mounted" } else { "there is a BPF file system already" };
    tracing::info!(directory = %directory.display(), "{said}");
    Ok(())
}

/// Returns the exit code, after logging an error.
fn ended(outcome: Result<ExitCode, AgentError>) -> ExitCode {
    match outcome {
        Ok(exit) => exit,
        Err(error) => {
            tracing::error!("{}", Chain(&error));
            ExitCode::FAILURE
        }
    }
}

/// Runs the agent until a signal ends it (see [`Signals`]). Attachments, programs and maps stay as they are.
///
/// # Errors
/// The reason why it could not start.
pub fn run(settings: Settings) -> Result<(), AgentError> {
    run_with(settings, None)
}

/// As [`run`]; `arguments`: the arguments that the settings were read from.
fn run_with(settings: Settings, arguments: Option<Arguments>) -> Result<(), AgentError> {
    if let Err(error) = descriptors::raise() {
        tracing::warn!(error = %Chain(&error), "the limit of open files could not be raised");
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(most_threads(settings.parallel_adds))
        .thread_keep_alive(KEEP_ALIVE)
        .build()?;
    let ended = runtime.block_on(serve_until_signal(settings, arguments));
    // Blocking work ends with the process: the journal records its progress.
    runtime.shutdown_background();
    ended
}

/// Most blocking threads: for connections, operations, GC with the checks and policy upkeep, queries, and
/// status publishing.
const fn most_threads(parallel_adds: usize) -> usize {
    const UPKEEP: usize = 16;
    scheduler::most_threads(parallel_adds) + ACCEPTORS + MOST_QUESTIONS + MOST_PUBLISHERS + UPKEEP
}

async fn serve_until_signal(settings: Settings, arguments: Option<Arguments>) -> Result<(), AgentError> {
    privileges::check()?;
    if kernel_settings::make_writable()? {
        tracing::info!("/proc/sys of this container was read-only and is writable now");
    }
    if let Some(root) = settings.delegation.plugin_root() {
        plugin_root::prepare(root)?;
        tracing::info!(root = %root.display(), "plugins are started in another root directory");
    }
    let mut signals = Signals::install()?;
    let served = serve_until(&mut signals, settings, arguments).await;
    signals.end().await;
    served
}

/// Serves until a signal ends the agent, or returns why it cannot serve.
async fn serve_until(
    signals: &mut Signals,
    settings: Settings,
    arguments: Option<Arguments>,
) -> Result<(), AgentError> {
    let mut background = Background::default();
    let settings = Arc::new(settings);
    let metrics = Arc::new(Metrics::default());
    let Some(place) = stand_by::take_place(signals, &settings, &metrics).await? else { return Ok(()) };
    let Place { listener, records: _records, sources } = place;

    let start_with = (Arc::clone(&settings), Arc::clone(&metrics));
    let started = unless_signal(signals.ending(), move || start(&start_with.0, &start_with.1, sources)).await;
    // Unfinished operations continue at the next start.
    let Some(started) = started else { return Ok(()) };
    let Started { parts, recovery, pending, statuses, conf, owner, pins: _pins, no_group } = started?;
    signals.reloads(Reload::new(arguments, Arc::clone(&settings), Arc::clone(&parts.source)));

    let conf = conf.map(ConfKeeper::new);
    let Parts { source, cluster, engine, intents, .. } = &parts;
    let forgot_root = plugin_root::is_forgotten(&settings.delegation);
    let (of_engine, of_intents) = (Arc::clone(engine), Arc::clone(intents));
    let health = Arc::new(Health::new(of_engine, of_intents, Arc::clone(source), conf, forgot_root));
    if let Some(cluster) = cluster {
        background.keep("the objects of the cluster", cluster.ended());
    }
    let observer = Arc::new(Observer::default());
    tasks::follow_packets(&mut background, &parts, (&observer, &health), &settings)?;
    let node_network = answers::node_network(&settings, &parts)?;
    let network = node_network.clone();
    let reporter = answers::reporter(&mut background, &parts, &health, observer, &settings, network);
    tasks::keep_packet_filter(&mut background, &parts)?;
    let server = answers::server(&settings)?;
    let traces = answers::traces(&mut background, &settings)?;
    let taken_over = recovery.is_whole();
    let Recovery { unfinished, unannounced, left_alone, .. } = recovery;
    let outside =
        answers::outside(&settings, server.clone(), traces, Arc::clone(&metrics), no_group, left_alone);
    let (of_engine, of_intents, of_health) = (Arc::clone(engine), Arc::clone(intents), Arc::clone(&health));
    let parallel_adds = settings.parallel_adds;
    let agent = Agent::new(of_engine, of_intents, statuses, reporter, of_health, outside, parallel_adds);
    let agent = Arc::new(agent);

    let looked = look_first(signals, Arc::clone(&health), node_network.clone(), taken_over);
    let Some(()) = looked.await else { return Ok(()) };
    tasks::follow_source(&mut background, &parts, node_network, &metrics)?;
    finish_earlier(&mut background, &agent, unannounced, unfinished, pending);
    if let Some(cluster) = cluster {
        tasks::serve_cluster(&mut background, cluster, source, &agent, &settings)?;
    }
    tasks::look_after_attachments(&mut background, &agent, &health, &settings);
    let of_readiness = readiness::tell(Arc::clone(&agent));
    if let Some(server) = server {
        background.keep("metrics and probes", server.keep(Arc::clone(&agent)));
    }
    let serving = Serving::begin(listener, agent);
    background.keep("checks of the node", health.keep_looking(source.changes(), FilterWatch::open()));
    tracing::info!(socket = %settings.socket().display(), sandboxes = engine.registry().len(), "serving");
    background.keep("what the log says of readiness", of_readiness);
    let of_engine = Arc::clone(engine);
    background
        .once("a look at the file systems of pools", own_thread::blocking(move || warn_of_pools(&of_engine)));

    let early = until_ended(signals, &mut background).await;
    serving.end(signals).await;
    drop(background);
    // Kills the plugins of aborted operations.
    let _ = tokio::task::spawn_blocking(move || end_orphans(&owner)).await;
    early.map_or(Ok(()), |early| Err(early.into()))
}

/// Runs the checks that must precede the first request. `None`: a signal ended the agent meanwhile.
async fn look_first(
    signals: &mut Signals,
    health: Arc<Health>,
    node_network: Option<Arc<NodeNetwork>>,
    taken_over: bool,
) -> Option<()> {
    let looks = move || {
        // The check of the default network needs the results of this one.
        if let Some(network) = node_network {
            network.look();
        }
        health.look_first(taken_over);
    };
    unless_signal(signals.ending(), looks).await
}

/// Starts the unfinished work of earlier agents. `unannounced`, `unfinished`: as in [`Recovery`].
fn finish_earlier(
    background: &mut Background,
    agent: &Arc<Agent>,
    unannounced: Vec<JournalKey>,
    unfinished: Vec<JournalKey>,
    pending: Vec<Pending>,
) {
    // Take the turns of these containers before any request can ask for one.
    unannounced.into_iter().for_each(|record| agent.finish_later(record));
    let left_over = LeftOver::gather(agent.admission.turns(), unfinished, pending);
    agent.earlier.begun(left_over.len());
    background.once("finishing operations of earlier agents", left_over.finish(Arc::clone(agent)));
}

/// The task that answers requests until it is stopped.
struct Serving {
    task: JoinHandle<()>,
    stop: oneshot::Sender<()>,
}

impl Serving {
    fn begin(listener: Listener, agent: Arc<Agent>) -> Self {
        let (stop, stopped) = oneshot::channel::<()>();
        let stop_requested = async {
            // Dropping the sender stops the server too.
            let _ = stopped.await;
        };
        let task = tokio::spawn(serve(listener, Arc::new(Served(agent)), Limits::default(), stop_requested));
        Self { task, stop }
    }

    /// Stops accepting connections, and waits until the accepted ones are answered.
    async fn end(self, signals: &mut Signals) {
        let Self { mut task, stop } = self;
        drop(stop);
        tokio::select! {
            ended = &mut task => {
                own_thread::joined(ended);
            }
            // After a second signal, running operations are not waited for: the journal has their progress.
            _ = signals.ending() => task.abort(),
        }
    }
}

/// Waits for a signal that ends the agent, or for a background task that ends early, which is returned.
async fn until_ended(signals: &mut Signals, background: &mut Background) -> Option<EndedEarly> {
    tokio::select! {
        signal = signals.ending() => {
            log_shutdown(signal);
            None
        }
        // The caller logs the error when the agent ends.
        early = background.ended_early() => Some(early),
    }
}

/// Runs startup work that may hang. `None`: a signal ended the agent meanwhile.
async fn unless_signal<T: Send + 'static>(
    signal: impl Future<Output = &'static str>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    tokio::select! {
        done = own_thread::blocking(work) => done.ok(),
        signal = signal => {
            log_shutdown(signal);
            None
        }
    }
}

fn log_shutdown(signal: &str) {
    tracing::info!(signal, "shutting down; attachments keep working");
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    #[tokio::test]
    async fn a_signal_does_not_wait_for_a_start_that_hangs() {
        assert_eq!(unless_signal(pending(), || 7).await, Some(7));
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let hangs = move || ended.recv().is_ok();
        assert_eq!(unless_signal(ready("SIGTERM"), hangs).await, None);
        drop(end);
    }
}
