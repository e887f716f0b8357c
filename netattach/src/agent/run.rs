//! Starts the agent, each part after the parts it depends on, and serves.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use clap::Parser;
use tokio::sync::{oneshot, watch};

use super::background::{Background, EndedEarly};
use super::cni_conf::CniConf;
use super::collector::Collector;
use super::conf_keeper::ConfKeeper;
use super::config::{Arguments, Settings, SettingsError, StatusWrites};
use super::events;
use super::flow::wall_clock;
use super::handler::{Agent, MOST_PUBLISHERS, MOST_QUESTIONS, Outside, Served, Statuses};
use super::health::Health;
use super::http::Http;
use super::kernel_settings::{self, Unwritable};
use super::left_over::LeftOver;
use super::live;
use super::log::{self, LogError};
use super::memory;
use super::metrics::{LastCounts, Metrics};
use super::missed::Repairs;
use super::node_check;
use super::node_network::{self, NodeNetwork};
use super::owned::{self, Owned, OwnedError};
use super::packet_log;
use super::plugin_group;
use super::plugin_root::{self, UnfitRoot};
use super::privileges::{self, Unprivileged};
use super::readiness;
use super::reload::Reload;
use super::repair;
use super::report::Reporter;
use super::runtime_conf;
use super::scheduler;
use super::signals::Signals;
use super::sources::{self, Sources};
use super::stand_by::{self, Place};
use super::traces::Traces;
use super::trouble::Troubles;
use super::watching::{LogFormat, unprobed};
use crate::attach::{
    AttachError, Bridges, DefaultNetwork, Devices, Engine, Forwarding, HostAccesses, Inheritance,
    IntentReader, Node, Occupied, Recovery, network_status,
};
use crate::bpf::probe::Requirement;
use crate::bpf::{self, BpfError, Dataplane};
use crate::delegate::{self, Delegate, Orphan, PluginGroup, ResultCache, end_orphans};
use crate::descriptors;
use crate::enforce::Enforce;
use crate::enforce::enforcer::Enforcer;
use crate::enforce::error::EnforceError;
use crate::error_chain::Chain;
use crate::firewall::Firewall;
use crate::hooks::{AttachModes, NoHook, choose_all};
use crate::ipam::{self, dhcp};
use crate::journal::{JournalError, Store};
use crate::kube::{Cluster, ClusterError};
use crate::kubelet::PodResources;
use crate::nat::Nat;
use crate::netlink::nat::TABLE as NAT_TABLE;
use crate::netlink::{self, Changes, FilterWatch, Handle, KnownLinks, LOOPBACK, LinkWatch, StationWatch};
use crate::netns::NetnsError;
use crate::observe::{Event, Observer};
use crate::own_thread;
use crate::pace;
use crate::publish::PublishError;
use crate::put_back::PutBack;
use crate::rounds;
use crate::rpc::message::Condition;
use crate::rpc::pending::{self, Pending, PendingError};
use crate::rpc::server::{ACCEPTORS, Limits, ListenError, serve};
use crate::source::Source;
use crate::source::files::FilesError;
use crate::ticks::{self, ticks};

/// How often the records of the packet programs are read; and how often while there are none and nobody asks for them.
const OBSERVE_INTERVAL: Duration = Duration::from_millis(100);
const SILENT_INTERVAL: Duration = Duration::from_secs(1);
/// After so many readings without a record they are taken more rarely.
const SILENCE: u32 = 50;

/// Most records that are read before other tasks get their turn.
const RECORDS_AT_ONCE: usize = 4096;

/// How often the flow table is scanned for ended flows, or as often as [`pace`] leaves it.
const COLLECT_INTERVAL: Duration = Duration::from_secs(5);
/// The interval while an attachment may soon need more flow entries than it has.
const PRESSED_INTERVAL: Duration = Duration::from_secs(1);

/// How long a processor works for one round of a pass over the flow table.
const COLLECT_ROUND: Duration = Duration::from_millis(1);
/// Pause between the rounds.
const COLLECT_PAUSE: Duration = Duration::from_millis(50);

/// How often the tables in the node's packet filter are checked.
const ROUTED_INTERVAL: Duration = Duration::from_secs(1);

/// How often unreferenced policies are checked for.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);

/// How often a node with a startup taint is looked at, until it was found without or rid of it once; and from then on.
const TAINT_INTERVAL: Duration = Duration::from_secs(2);
const TAINT_AGAIN_INTERVAL: Duration = Duration::from_secs(30);

/// How long a blocking thread stays without work: so long that the looks of each second find one, and less than two seconds, or two
/// of them would have every other look each, and both stay.
const KEEP_ALIVE: Duration = Duration::from_millis(1500);

/// How messages name the directory of pins.
const PINS: &str = "pins in";

/// Reasons why the agent does not run.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The configuration is wrong.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// `NETATTACH_LOG` is invalid.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The process lacks privileges that the agent needs.
    #[error(transparent)]
    Unprivileged(#[from] Unprivileged),
    /// Kernel settings cannot be written.
    #[error(transparent)]
    Unwritable(#[from] Unwritable),
    /// Plugins cannot be started in the root directory that was set.
    #[error(transparent)]
    PluginRoot(#[from] UnfitRoot),
    /// The kernel does not tell of the node's links.
    #[error("follow the node's links")]
    Links(#[source] netlink::Error),
    /// Another agent serves, and has not ended while this one stood by.
    #[error("stood by for {seconds} s, but the other agent goes on; is netattach set up twice on this node?")]
    StoodBy {
        /// How long, in seconds.
        seconds: u64,
        /// What it holds.
        #[source]
        source: ListenError,
    },
    /// Another agent holds the state directory or the pins.
    #[error(transparent)]
    Owned(#[from] OwnedError),
    /// The leases of `dhcp` cannot be read.
    #[error(transparent)]
    Leases(#[from] dhcp::Error),
    /// The dataplane could not be set up.
    #[error("set up the dataplane")]
    Dataplane(#[from] BpfError),
    /// It could not, as the kernel has not what the programs need.
    #[error(
        "kernel {release} lacks {}, without which no program can be loaded: use a newer one (docs/supported.md has those that \
         are tested)",
        .lacks.join(", ")
    )]
    Kernel {
        /// Its release.
        release: String,
        /// What it lacks.
        lacks: Vec<&'static str>,
        /// Where that was noticed.
        #[source]
        source: Box<BpfError>,
    },
    /// The kernel cannot attach programs in the way the settings require.
    #[error(transparent)]
    NoHook(#[from] NoHook),
    /// The check whether the kernel has clsact failed.
    #[error("check whether the kernel has clsact")]
    Clsact(#[source] netlink::Error),
    /// Policies could not be put into force.
    #[error("policies")]
    Enforce(#[from] EnforceError),
    /// The manifests cannot be read.
    #[error("source of manifests")]
    Source(#[from] FilesError),
    /// The cluster cannot be the source.
    #[error("the Kubernetes API as the source")]
    Cluster(#[from] ClusterError),
    /// The journal cannot be used.
    #[error("journal")]
    Journal(#[from] JournalError),
    /// The journal and the machine could not be reconciled.
    #[error("recover attachments")]
    Recover(#[from] AttachError),
    /// The node's namespace cannot be identified.
    #[error(transparent)]
    Netns(#[from] NetnsError),
    /// The requests that were queued while no agent ran cannot be read.
    #[error("pending requests")]
    Pending(#[from] PendingError),
    /// The socket cannot be served.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// Link changes cannot be followed.
    #[error("watch for link changes")]
    Watch(#[from] netlink::Error),
    /// A background task ended early.
    #[error(transparent)]
    EndedEarly(#[from] EndedEarly),
    /// The tokio runtime or the signal handlers could not be set up.
    #[error("start")]
    Start(#[from] std::io::Error),
}

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
        return ended(settings.map(|settings| node_check::run(&settings, format)));
    }
    // The settings say how the log is written; mistakes in them are written as text.
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

/// The exit code, after a line for an error.
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

/// As [`run`]; the settings were read from these arguments.
fn run_with(settings: Settings, arguments: Option<Arguments>) -> Result<(), AgentError> {
    if let Err(error) = descriptors::raise() {
        tracing::warn!(%error, "the limit of open files could not be raised");
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(most_threads(settings.parallel_adds))
        .thread_keep_alive(KEEP_ALIVE)
        .build()?;
    let ended = runtime.block_on(serve_until_signal(settings, arguments));
    // Blocking work ends with the process: the journal records how far it came.
    runtime.shutdown_background();
    ended
}

/// Most blocking threads: for connections, operations, GC with the looks and policy upkeep, questions, and status publishing.
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

/// Serves until a signal ends it, or returns why it cannot serve.
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
    let Started {
        source,
        cluster,
        enforcer,
        engine,
        intents,
        recovery,
        pending,
        statuses,
        conf,
        owner,
        pins: _pins,
        no_group,
    } = started?;
    signals.reloads(Reload::new(arguments, Arc::clone(&settings), Arc::clone(&source)));
    let conf = conf.map(ConfKeeper::new);
    let health = Arc::new(Health::new(Arc::clone(&engine), Arc::clone(&intents), Arc::clone(&source), conf));
    if let Some(cluster) = &cluster {
        background.keep("the objects of the cluster", cluster.ended());
    }
    let observer = Arc::new(Observer::default());
    background.keep(
        "the fast path",
        Arc::clone(enforcer.fast_paths()).keep(LinkWatch::open()?, StationWatch::open()?),
    );
    background.keep(
        "records of packets",
        observe(Arc::clone(&observer), Arc::clone(&enforcer), enforcer.records()?),
    );
    let names = Arc::new(packet_log::Names::default());
    if let Some(log) = enforcer.packet_log({
        let names = Arc::clone(&names);
        move |line| names.say(line)
    })? {
        packet_log::keep(log, names, settings.bpf_log_of(), Arc::clone(&engine))?;
    }
    background.keep("the flow table", collect_flows(Arc::clone(&enforcer)));
    background.keep("free memory at rest", memory::keep_at_rest());
    let default = settings.default_network().map_err(SettingsError::from)?;
    let node_network = (default == DefaultNetwork::Builtin).then(|| {
        Arc::new(NodeNetwork::new(Arc::clone(&source), Arc::clone(&engine), Arc::clone(&intents.from_node)))
    });
    let troubles = Arc::new(Troubles::new(
        Arc::clone(&source),
        Arc::clone(&enforcer),
        Arc::clone(&intents),
        Arc::clone(&engine),
        settings.network_policy(),
        node_network.clone(),
    ));
    background.keep("checks of objects", Arc::clone(&troubles).keep_looking(source.changes()));
    let reporter = Reporter::new(
        Arc::clone(&source),
        Arc::clone(&enforcer),
        Arc::clone(&health),
        troubles,
        observer,
        settings.socket(),
    );
    if enforcer.judges_routed() {
        background.keep("the packet filter", keep_routed(Arc::clone(&enforcer), LinkWatch::open()?));
    }
    let repair_nat = |node: &Node| node.nat.as_ref().map_or(Ok(false), Nat::repair);
    background
        .keep("the translation of addresses", keep_put_back(Arc::clone(&engine), NAT_TABLE, repair_nat));
    let repair_firewall = |node: &Node| node.firewall.as_ref().map_or(Ok(false), Firewall::repair);
    let what = "rules of iptables for pods";
    background.keep("the node's forwarding", keep_put_back(Arc::clone(&engine), what, repair_firewall));
    let parallel_adds = settings.parallel_adds;
    let server = server(&settings)?;
    let endpoint = settings.traces.endpoint().map_err(AgentError::from)?;
    let traces = endpoint.map(|endpoint| {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let (traces, sending) = Traces::to(endpoint, settings.node_name().unwrap_or(host));
        background.keep("traces", sending);
        traces
    });
    let taken_over = recovery.is_whole();
    let outside = Outside {
        collector: Collector::new(
            settings.state_dir.clone(),
            settings.collect_after(),
            settings.runtime_socket(),
        ),
        kubelet: PodResources::new(&settings.pod_resources_socket, &settings.device_checkpoint),
        repairs: Repairs::new(settings.repair, settings.repair_after()),
        http: server.clone(),
        metrics: Arc::clone(&metrics),
        traces,
        no_group,
        left_alone: recovery.left_alone,
    };
    let (of_engine, of_health) = (Arc::clone(&engine), Arc::clone(&health));
    let agent = Agent::new(of_engine, intents, statuses, reporter, of_health, outside, parallel_adds);
    let agent = Arc::new(agent);

    let (first_look, first_network) = (Arc::clone(&health), node_network.clone());
    let checked = unless_signal(signals.ending(), move || {
        // The look at the default network needs to know what this finds.
        if let Some(network) = first_network {
            network.look();
        }
        first_look.look_first(taken_over);
    });
    let Some(()) = checked.await else { return Ok(()) };
    if let Some(network) = node_network {
        background
            .keep("the network of the node", network.keep(source.changes(), LinkWatch::open_for_routes()?));
    }
    background.keep("policies", follow_policies(enforcer, source.changes(), Arc::clone(&metrics)));
    // Take the turns of these containers before any request can ask for one.
    recovery.young.into_iter().for_each(|record| agent.finish_later(record));
    let left_over = LeftOver::gather(&agent.turns, recovery.unfinished, pending);
    agent.left_over.store(left_over.len(), Ordering::Relaxed);
    background.once("finishing operations of earlier agents", left_over.finish(Arc::clone(&agent)));
    if let Some(cluster) = &cluster {
        background.keep("live pods", live::follow(Arc::clone(&agent), source.changes()));
        let means = repair::Means { cluster: Arc::clone(cluster), runtime: settings.runtime_socket() };
        background.keep("pods without their networks", repair::keep(Arc::clone(&agent), means));
        background.keep("events", events::report(Arc::clone(&agent), settings.node_name()?));
        let taint = settings.kubernetes.startup_taint.clone();
        if !taint.is_empty() {
            background
                .keep("the startup taint", keep_untainted(Arc::clone(cluster), Arc::clone(&agent), taint));
        }
    }
    if let Some(socket) = settings.runtime_socket() {
        background.keep("what the runtime reads", runtime_conf::keep_asking(Arc::clone(&health), socket));
    }
    background.keep("sandboxes that no runtime asks for", Arc::clone(&agent).keep_collecting());
    background.keep("what others change", Arc::clone(&agent).keep_as_made());
    background.keep("leases that others change", Arc::clone(&agent).keep_leases());
    background.keep("what others change in pods", Arc::clone(&agent).keep_looking_into_pods());
    let of_readiness = readiness::tell(Arc::clone(&agent));
    if let Some(server) = server {
        background.keep("metrics and probes", server.keep(Arc::clone(&agent)));
    }
    let (stop, stopped) = oneshot::channel::<()>();
    let stop_requested = async {
        // A dropped sender stops the server too.
        let _ = stopped.await;
    };
    let mut serving =
        tokio::spawn(serve(listener, Arc::new(Served(agent)), Limits::default(), stop_requested));
    background.keep("checks of the node", health.keep_looking(source.changes(), FilterWatch::open()));
    tracing::info!(socket = %settings.socket().display(), sandboxes = engine.registry().len(), "serving");
    background.keep("what the log says of readiness", of_readiness);

    let early = tokio::select! {
        signal = signals.ending() => {
            log_shutdown(signal);
            None
        }
        // The caller logs the error when the agent ends.
        early = background.ended_early() => Some(early),
    };
    drop(stop);
    tokio::select! {
        ended = &mut serving => {
            own_thread::joined(ended);
        }
        // A second signal does not wait for operations in flight: the journal has their progress.
        _ = signals.ending() => serving.abort(),
    }
    drop(background);
    // End the plugins of aborted operations.
    let _ = tokio::task::spawn_blocking(move || end_orphans(&owner)).await;
    early.map_or(Ok(()), |early| Err(early.into()))
}

/// Runs startup work that may hang. `None`: a signal ended the agent meanwhile.
pub(super) async fn unless_signal<T: Send + 'static>(
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

/// State that exists before the first request is served.
struct Started {
    source: Arc<dyn Source>,
    cluster: Option<Arc<Cluster>>,
    enforcer: Arc<Enforcer>,
    engine: Arc<Engine>,
    intents: Arc<IntentReader>,
    recovery: Recovery,
    pending: Vec<Pending>,
    statuses: Statuses,
    conf: Option<CniConf>,
    /// Identifies the plugins that this agent runs.
    owner: String,
    /// The lock of the pins.
    pins: Option<Owned>,
    /// Why executed plugins have no control group, if they were to have one.
    no_group: Option<Condition>,
}

/// Starts all parts. Waits only for the kernel and the disk. `sources`: those that were opened before.
fn start(
    settings: &Settings,
    metrics: &Arc<Metrics>,
    sources: Option<Sources>,
) -> Result<Started, AgentError> {
    let (source, publisher, cluster) = match sources {
        Some(sources) => sources,
        None => sources::open(settings, metrics)?,
    };
    let lock_pins = || owned::lock(PINS, &settings.bpffs, stand_by::letting_go(settings));
    // If nothing is pinned yet, there are no pins of another agent to lock.
    let mut pins = settings.bpffs.exists().then(lock_pins).transpose()?;
    let enforcer = enforcer(settings, &source)?;
    if pins.is_none() {
        pins = Some(lock_pins()?);
    }
    let journal = Store::open(settings.state_dir.join("journal"))?;
    let owner = owner(settings);
    let (group, no_group) = plugin_group::prepare(settings);
    let engine = engine(settings, journal, owner.clone(), &enforcer, metrics, group)?;
    let intents = Arc::new(settings.intents(Arc::clone(&source))?);
    // End orphaned plugins before undoing what they may still be making, and before any container is given what they
    // may still be undoing.
    for Orphan { pid, command, container_id, gone } in end_orphans(&owner) {
        tracing::warn!(pid, command, container_id, gone, "killed a plugin that an earlier agent had started");
    }
    let recovery = adopt(&engine)?;
    engine.give_back_unknown_leases()?;
    engine.withdraw_lost_leases();
    if intents.default != DefaultNetwork::Builtin
        && let Err(error) = node_network::remove_routes(&engine)
    {
        tracing::warn!(error = %Chain(&error), "routes of a network that the agent does not make any more");
    }
    let required = settings.kubernetes.enabled && settings.kubernetes.status == StatusWrites::Required;
    let statuses = Statuses { publisher, form: settings.network_status, required };
    if let Err(error) = publish_again(&statuses, &engine, &recovery) {
        tracing::warn!(error = %Chain(&error), "network-status not updated");
    }
    let conf = CniConf::of(settings)?;
    let pending = pending::list(&settings.state_dir)?;
    Ok(Started {
        source,
        cluster,
        enforcer,
        engine,
        intents,
        recovery,
        pending,
        statuses,
        conf,
        owner,
        pins,
        no_group,
    })
}

/// The mark that identifies the agent's plugins: its state directory, which no two agents share.
fn owner(settings: &Settings) -> String {
    let path = std::fs::canonicalize(&settings.state_dir);
    path.unwrap_or_else(|_| settings.state_dir.clone()).to_string_lossy().into_owned()
}

/// The pins and the capacities that the settings name.
pub(super) fn dataplane(settings: &Settings) -> Result<bpf::Config, SettingsError> {
    Ok(bpf::Config {
        max_attachments: settings.max_attachments,
        log: settings.log_object()?,
        ..bpf::Config::new(settings.bpffs.clone())
    })
}

/// Loads or adopts the dataplane.
fn enforcer(settings: &Settings, source: &Arc<dyn Source>) -> Result<Arc<Enforcer>, AgentError> {
    let opened = Dataplane::open(&dataplane(settings)?);
    let dataplane = opened.map_err(|source| no_dataplane(source, &bpf::probe::requirements()))?;
    let options = settings.policy_options(settings.restrictions()?).map_err(SettingsError::from)?;
    let modes = attach_modes(settings)?;
    let (passage, demand) = (settings.passage(), settings.unenforceable);
    let owned = (dataplane, owner(settings));
    Ok(Arc::new(Enforcer::new(owned, Arc::clone(source), options, passage, modes, demand)?))
}

/// Why there is no dataplane: what the kernel lacks says more than where that was noticed.
fn no_dataplane(source: BpfError, requirements: &[Requirement]) -> AgentError {
    match bpf::probe::lacking(requirements) {
        lacks if lacks.is_empty() => source.into(),
        lacks => {
            let release = rustix::system::uname().release().to_string_lossy().into_owned();
            AgentError::Kernel { release, lacks, source: Box::new(source) }
        }
    }
}

/// What serves metrics and probes, if something is to.
fn server(settings: &Settings) -> Result<Option<Arc<Http>>, AgentError> {
    let address = settings.metrics.listen()?;
    let is_in_pod = settings.kubernetes.enabled && settings.kubernetes.kubeconfig.as_os_str().is_empty();
    if is_in_pod && let Some(problem) = unprobed(address) {
        tracing::warn!("{problem}");
    }
    Ok(address.map(|address| Arc::new(Http::new(address, settings.metrics.per_pod))))
}

/// Builds the engine that carries out the plans in the journal.
fn engine(
    settings: &Settings,
    journal: Store,
    owner: String,
    enforcer: &Arc<Enforcer>,
    metrics: &Arc<Metrics>,
    group: Option<Arc<PluginGroup>>,
) -> Result<Arc<Engine>, AgentError> {
    let node = Node {
        leases: ipam::Leases::renewing(dhcp::Leases::open(&settings.state_dir.join("dhcp"))?),
        nat: Some(Nat::new(&owner)),
        firewall: Some(Firewall::new(&owner)),
        delegate: Delegate {
            search: settings.cni_bin_dirs.clone(),
            timeout: settings.plugin_timeout(),
            owner,
            root: settings.delegation.plugin_root().map(Path::to_path_buf),
            watcher: Some(Arc::clone(metrics) as Arc<dyn delegate::Watcher>),
            group,
        },
        cache: ResultCache::new(&settings.delegation.cache_dir),
        bridges: Bridges::default(),
        occupied: Occupied::default(),
        host_accesses: HostAccesses::default(),
        devices: Devices::default(),
        enforcer: Some(Arc::clone(enforcer) as Arc<dyn Enforce>),
        links: Some(KnownLinks::open().map_err(AgentError::Links)?),
        forwarding: Forwarding::default(),
        announces_late: true,
        departures: Some(Arc::new(LastCounts::of(Arc::clone(metrics), Arc::clone(enforcer)))),
    };
    let inheritance = Inheritance::new(&settings.multus_state_dir);
    let (limit, repeated) = (settings.max_attachments, settings.repeated_add);
    Ok(Arc::new(Engine::new(node, journal, limit, settings.options(), inheritance, repeated)?))
}

/// Adopts existing attachments, and finds interrupted operations.
fn adopt(engine: &Engine) -> Result<Recovery, AttachError> {
    let recovery = engine.adopt()?;
    tracing::info!(adopted = recovery.adopted, unfinished = recovery.unfinished.len(), "journal read");
    for damaged in &recovery.damaged {
        tracing::error!(record = damaged, "damaged record; its pod keeps running");
    }
    for (key, error) in &recovery.left_alone {
        let record = format!("{}@{}", key.container_id, key.ifname);
        tracing::error!(record, error, "not recovered; DEL will try again");
    }
    for error in &recovery.unenforced {
        tracing::error!(error, "not taken over by the dataplane; it is tried again");
    }
    Ok(recovery)
}

/// Brings the published status of all pods up to date. Any pod may be the one of a record that was left alone, so nobody's is
/// withdrawn then.
fn publish_again(statuses: &Statuses, engine: &Engine, recovery: &Recovery) -> Result<(), PublishError> {
    let Statuses { publisher, form, required: _ } = statuses;
    let attached = engine.registry().all();
    // A dynamic attachment is reported in the entry of the pod's own record.
    for sandbox in attached.iter().filter(|attached| attached.plan.dynamic.is_none()) {
        if let Some((pod, entries)) = network_status(&engine.registry().with_dynamic(&sandbox.key), *form) {
            publisher.publish(&pod, &entries)?;
        }
    }
    let pods: BTreeSet<_> =
        attached.iter().filter_map(|attached| attached.plan.sandbox.pod.clone()).collect();
    publisher.withdraw_others(recovery.left_alone.is_empty().then_some(&pods))
}

/// How programs are attached: as the settings require, as far as the kernel supports it.
pub(super) fn attach_modes(settings: &Settings) -> Result<AttachModes, AgentError> {
    let has_clsact = Handle::open().and_then(|mut node| node.has_clsact()).map_err(AgentError::Clsact)?;
    Ok(choose_all(settings.attach, has_clsact, bpf::probe::has_tcx(LOOPBACK)?)?)
}

/// Reads the records of the packet programs several times a second, because the programs do not wake the reader.
async fn observe(observer: Arc<Observer>, enforcer: Arc<Enforcer>, mut records: bpf::Records) {
    let mut silent = 0_u32;
    loop {
        ticks::next(if silent < SILENCE { OBSERVE_INTERVAL } else { SILENT_INTERVAL }).await;
        let (ended, unreported) = enforcer.flows().take_ended();
        let packets = std::iter::from_fn(|| records.next()).take(RECORDS_AT_ONCE).map(Event::Packet);
        let mut events = packets.chain(ended.into_iter().map(Event::Ended)).peekable();
        let is_silent = events.peek().is_none() && unreported == 0 && !observer.was_asked();
        silent = if is_silent { silent.saturating_add(1) } else { 0 };
        observer.take_in(events, unreported, wall_clock());
    }
}

/// Scans parts of the flow table for [`COLLECT_ROUND`]. `false`: not all of it.
fn collect_some_flows(enforcer: &Enforcer) -> Result<bool, EnforceError> {
    let began = pace::worked();
    loop {
        let is_whole = enforcer.collect_flows()?;
        if is_whole || pace::worked().saturating_sub(began) >= COLLECT_ROUND {
            return Ok(is_whole);
        }
    }
}

/// Removes ended flows from the flow table, a bounded number of entries at a time.
async fn collect_flows(enforcer: Arc<Enforcer>) {
    loop {
        let mut worked = Duration::ZERO;
        loop {
            let enforcer = Arc::clone(&enforcer);
            let round = move || pace::measured(|| crate::upkeep(|| collect_some_flows(&enforcer)));
            let (is_whole, took) = rounds::look(round).await;
            worked += took;
            match is_whole {
                Ok(false) => tokio::time::sleep(COLLECT_PAUSE).await,
                Ok(true) => break,
                Err(error) => {
                    tracing::error!(error = %Chain(&error), "flow table not scanned; will try again");
                    break;
                }
            }
        }
        let pressed = enforcer.flows().is_pressed();
        let pause = if pressed { PRESSED_INTERVAL } else { pace::pause(COLLECT_INTERVAL, worked) };
        ticks::pause(pause).await;
    }
}

/// Removes the node's startup taint once all conditions hold, and whenever the node has it again: one that is registered anew
/// comes with it.
async fn keep_untainted(cluster: Arc<Cluster>, agent: Arc<Agent>, taint: String) {
    let mut interval = TAINT_INTERVAL;
    loop {
        let is_ready = agent.reporter.ready().iter().all(|condition| condition.met);
        if is_ready && cluster.remove_taint(&taint).await {
            interval = TAINT_AGAIN_INTERVAL;
        }
        ticks::pause(interval).await;
    }
}

/// Maintains the enforcement of traffic that the node routes: once a second, and when links change.
async fn keep_routed(enforcer: Arc<Enforcer>, mut watch: LinkWatch) -> std::io::Result<()> {
    let mut tick = ticks(ROUTED_INTERVAL);
    let mut checked = true;
    loop {
        // Both futures may be dropped at any time: notifications stay in the socket, and the ticker ticks again.
        let is_told = tokio::select! {
            ready = watch.readable() => ready.map(|()| true)?,
            _ = tick.tick() => false,
        };
        let changes = watch.changes().ok().filter(|_| checked).unwrap_or(Changes::Anything);
        let enforcer = Arc::clone(&enforcer);
        let keep = move || crate::upkeep(|| enforcer.keep_routed(&changes));
        let kept = rounds::take(!is_told, keep).await;
        checked = kept.is_ok();
        if let Err(error) = kept {
            tracing::warn!(error = %Chain(&error), "enforcement of routed traffic not checked; will try again");
        }
    }
}

/// Puts back what other programs remove from the packet filter, within a second. The log has it a few times, and then once a minute.
async fn keep_put_back<E: std::error::Error + Send + 'static>(
    engine: Arc<Engine>,
    what: &'static str,
    repair: fn(&Node) -> Result<bool, E>,
) {
    let mut tick = ticks(ROUTED_INTERVAL);
    let mut failed = None;
    let mut told = PutBack::default();
    loop {
        tick.tick().await;
        let engine = Arc::clone(&engine);
        let repaired = rounds::look(move || crate::upkeep(|| repair(engine.node()))).await;
        let now = repaired.as_ref().err().map(|error| Chain(error).to_string());
        match (repaired, &now) {
            (Ok(true), _) if told.once_more((), Instant::now()).is_ok() => {
                tracing::warn!(what, "the packet filter was changed by another program; put back");
            }
            (Err(_), Some(error)) if now != failed => {
                tracing::error!(error, what, "the packet filter not checked; will try again");
            }
            _ => {}
        }
        failed = now;
    }
}

/// Updates the kernel's policies whenever the source changes, and deletes those that no packet can still be reading.
async fn follow_policies(enforcer: Arc<Enforcer>, mut changes: watch::Receiver<u64>, metrics: Arc<Metrics>) {
    let mut sweep = ticks(SWEEP_INTERVAL);
    // The source may have changed since the enforcer read it, before this receiver was there.
    changes.mark_changed();
    loop {
        // Both futures may be dropped at any time: a change stays marked as unseen, and the ticker ticks again.
        let changed = tokio::select! {
            changed = changes.changed() => match changed {
                Ok(()) => true,
                Err(_) => return,
            },
            _ = sweep.tick() => false,
        };
        let (enforcer, metrics) = (Arc::clone(&enforcer), Arc::clone(&metrics));
        let update = move || {
            let done = if changed { enforcer.sync() } else { enforcer.sweep() };
            if let Err(error) = done {
                tracing::error!(error = %Chain(&error), "policies not updated");
            }
            for change in enforcer.take_changes() {
                metrics.policies_changed(&change);
            }
        };
        rounds::take(!changed, update).await;
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    #[test]
    fn what_the_kernel_lacks_is_said_before_where_that_was_noticed() {
        let row = |name, needed, present| Requirement { name, needed, purpose: "", since: "5.8", present };
        let unknown = || Err(std::io::Error::other("unknown"));
        let said =
            |rows: &[Requirement]| Chain(&no_dataplane(BpfError::NotBpffs("/a".into()), rows)).to_string();
        let noticed = "/a is not on a BPF filesystem: run `mount -t bpf bpf /sys/fs/bpf`";
        let enough =
            [row("map lpm_trie", true, Ok(true)), row("BTF", false, Ok(false)), row("xdp", true, unknown())];
        assert_eq!(said(&enough), format!("set up the dataplane: {noticed}"));
        let [trie, btf, xdp] = enough;
        let lacking =
            [trie, row("map ringbuf", true, Ok(false)), btf, row("helper jiffies64", true, Ok(false)), xdp];
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        assert_eq!(
            said(&lacking),
            format!(
                "kernel {release} lacks map ringbuf, helper jiffies64, without which no program can be loaded: use a newer one \
                 (docs/supported.md has those that are tested): {noticed}"
            )
        );
    }

    #[tokio::test]
    async fn a_signal_does_not_wait_for_a_start_that_hangs() {
        assert_eq!(unless_signal(pending(), || 7).await, Some(7));
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let hangs = move || ended.recv().is_ok();
        assert_eq!(unless_signal(ready("SIGTERM"), hangs).await, None);
        drop(end);
    }
}
