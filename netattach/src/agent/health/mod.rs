//! The node's readiness, for STATUS and `netattachctl status`: the results of checks ("looks") that run
//! independently of requests, so that a hanging disk or plugin delays no answer. The checks also maintain
//! the runtime's configuration file.
//!
//! STATUS fails only for problems that would fail every ADD of the node: when STATUS fails, the runtime
//! starts no pods and running pods are evicted. Problems with one network, one pool or one attachment are
//! reported separately ([`Health::troubles`]).
//!
//! | module | what it does |
//! |---|---|
//! | `readiness` | logs whether the node is ready |
//! | `shares` | results of checks of attachments |
//! | `pool_uses` | the pool usage that checks have found |
//! | `own_node` | this node's object, as the last check saw it |
//! | `trouble`, `disk_look` | problems with objects, and on disk |
//! | `share` | which of very many are shown |

mod disk_look;
mod own_node;
mod pool_uses;
pub(super) mod readiness;
pub(super) mod share;
mod shares;
pub(super) mod trouble;

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};

use self::own_node::OwnNode;
use self::pool_uses::PoolUses;
use self::share::{namespace, shared};
use self::shares::{SHARES, Shares};
use crate::agent::cni_conf::conf_keeper::{self, ConfKeeper};
use crate::agent::cni_conf::conf_watch::ConfWatch;
use crate::agent::node::plugin_root;
use crate::attach::{Engine, IntentReader, Which};
use crate::builtin::ThisNode;
use crate::cni::{CniError, code};
use crate::descriptors;
use crate::durable::MAKE_ROOM;
use crate::enforce::error::EnforceError;
use crate::error_chain::{Chain, clipped};
use crate::firewall::Firewall;
use crate::ipam::PoolUse;
use crate::nat::Nat;
use crate::netlink::{FilterWatch, Removed};
use crate::npwg::{Definition, NetworkRef};
use crate::objects::{Identity, Objects};
use crate::pace;
use crate::plan::gc::Defined;
use crate::plan::resolve::Network;
use crate::rounds;
use crate::rpc::message::{Condition, Readiness};
use crate::source::Source;
use crate::source::log_share::LogShare;
use crate::sync::{Mutex, locked};
use crate::ticks;

/// How often each check runs without a request.
const INTERVAL: Duration = Duration::from_secs(5);
/// How often the default network is checked when the runtime's file follows it. Polling also finds directories that are
/// yet to be created, which a watch does not.
const FILE_INTERVAL: Duration = Duration::from_secs(1);
/// A request that finds an older result triggers a new check.
const FRESH: Duration = Duration::from_secs(1);
/// Longest wait for one plugin. STATUS has to be cheap; a plugin that takes longer counts as failed.
const PLUGIN_PATIENCE: Duration = Duration::from_secs(5);
/// A check that takes longer counts as hanging, and its previous result expires. Calls to other plugins may
/// use all of this time.
const LONGEST_LOOK: Duration = Duration::from_secs(30);
/// The same limit for a check that makes only a few system calls.
const LONGEST_SHORT_LOOK: Duration = Duration::from_secs(10);
/// How often networks are checked one by one.
const SINGLE_INTERVAL: Duration = Duration::from_secs(30);
/// After a check that is repeated because definitions have changed, or because of a request, the next one
/// is delayed by this many times its duration; after a requested one by at most [`INTERVAL`].
const PAUSE: u32 = 9;
/// Of the duration of a check that calls other plugins, one part in this many counts as work.
const OTHERS: u32 = 6;
/// Most problems that are kept of each kind.
const MOST_TROUBLES: usize = 100;
/// Most pools whose use is kept.
const MOST_POOLS: usize = 1024;
/// An ADD needs some twenty descriptors; with fewer left than this, ADDs fail.
const FEWEST_DESCRIPTORS: u64 = 32;

/// The remedy for too few descriptors. The list of open files shows whether the limit is too low or
/// descriptors leak.
const RAISE_LIMIT: &str = "raise the limit of open files (LimitNOFILE of the unit, or of the container runtime's unit), and see \
                           what is open: ls -l /proc/PID/fd";
/// Bytes that a check writes into the journal's directory: more than any inode stores inline.
const PROBE: usize = 4096;

/// Problem text for an object that exists but has no effect.
pub(super) const NOT_IN_FORCE: &str = "not in force";

/// Status text of a healthy dataplane.
const ALL_PINNED: &str = "programs and maps are pinned";

/// The results of the latest checks.
pub(super) struct Health {
    engine: Arc<Engine>,
    intents: Arc<IntentReader>,
    /// The runtime's file, if the agent maintains one.
    conf: Option<ConfKeeper>,
    /// Watches the directories that determine the default network, and the runtime's. `None`: the kernel
    /// grants no watch.
    watch: Option<ConfWatch>,
    source: Arc<dyn Source>,
    /// Whether the journal's directory accepts records.
    journal: Look,
    /// Whether files can be opened.
    descriptors: Look,
    dataplane: Look,
    /// Checks attachments one by one.
    attachments: Look,
    /// Checks networks one by one.
    networks: Look,
    /// Checks configuration, pools, parents and executables of the default network.
    network: Look,
    /// STATUS of the default network's other plugins.
    plugins: Look,
    file: Look,
    /// Whether plugins are started in a root directory that may lack the node's files, without an explicit
    /// setting; and the plugins of the default network that this may affect.
    forgot_root: bool,
    without_files: Mutex<Vec<Condition>>,
    /// Files that the last check of the default network found unusable.
    unusable: Mutex<Vec<Condition>>,
    /// Problems that the last checks of single attachments and of single networks found.
    not_enforced: Mutex<Vec<Condition>>,
    /// Problems of attachments, by share.
    shares: Mutex<Shares>,
    /// Devices from which filters were removed since the last check of attachments.
    removed: Mutex<Removed>,
    /// When the last check of all shares began.
    all_shares: Mutex<Option<Instant>>,
    not_attachable: Mutex<Vec<Condition>>,
    /// Problems with the configuration that the runtime reports, and a notification to ask the runtime
    /// again.
    runtime: Mutex<Vec<Condition>>,
    runtime_wanted: Notify,
    /// Use of the networks' pools at the last check.
    pools: Mutex<PoolUses>,
    /// `CNI_PATH` of the runtime, once a request has given it.
    cni_path: Mutex<Vec<PathBuf>>,
}

/// The result of a check: a description if all is well, or the problem.
type Seen = Result<String, CniError>;

/// One kind of check, and its latest result.
#[derive(Debug)]
struct Look {
    what: &'static str,
    every: Duration,
    longest: Duration,
    last: Mutex<Option<(Instant, Seen)>>,
    /// When the running check began.
    begun: Mutex<Option<Instant>>,
    wanted: Notify,
    /// Whether a request wants the next check, or none has run yet.
    is_wanted: AtomicBool,
}

impl Health {
    pub(super) fn new(
        engine: Arc<Engine>,
        intents: Arc<IntentReader>,
        source: Arc<dyn Source>,
        conf: Option<ConfKeeper>,
        forgot_root: bool,
    ) -> Self {
        let watch = ConfWatch::open()
            .inspect_err(|error| tracing::warn!(%error, "changed CNI configurations are noticed late"))
            .ok();
        let network_interval = if conf.is_some() { FILE_INTERVAL } else { INTERVAL };
        Self {
            engine,
            intents,
            conf,
            watch,
            source,
            journal: Look::short("journal"),
            descriptors: Look::short("descriptors"),
            dataplane: Look::short("dataplane"),
            attachments: Look::new("attachments", INTERVAL),
            networks: Look::new("networks", SINGLE_INTERVAL),
            network: Look::new("default network", network_interval),
            plugins: Look::new("the default network's plugins", INTERVAL),
            file: Look::new("CNI configuration", network_interval),
            forgot_root,
            without_files: Mutex::default(),
            unusable: Mutex::default(),
            not_enforced: Mutex::default(),
            shares: Mutex::default(),
            removed: Mutex::default(),
            all_shares: Mutex::default(),
            not_attachable: Mutex::default(),
            runtime: Mutex::default(),
            runtime_wanted: Notify::new(),
            pools: Mutex::default(),
            cni_path: Mutex::default(),
        }
    }

    /// Answers STATUS from memory.
    ///
    /// # Errors
    /// Code 50 or 51 with the reason, or a plugin's own error; the details give the age of the outcome.
    pub(super) fn answer(&self, cni_path: &[PathBuf]) -> Result<(), CniError> {
        let is_new = {
            let mut known = locked(&self.cni_path);
            let is_new = *known != cni_path;
            cni_path.clone_into(&mut known);
            is_new
        };
        self.answer_from_looks(is_new)
    }

    /// As [`Health::answer`], for callers other than the runtime.
    pub(super) fn ready(&self) -> Result<(), CniError> {
        self.answer_from_looks(false)
    }

    fn answer_from_looks(&self, is_new: bool) -> Result<(), CniError> {
        self.source.synced().map_err(|why| CniError::new(code::NOT_AVAILABLE, format!("source: {why}")))?;
        let looks = [&self.journal, &self.descriptors, &self.dataplane, &self.network, &self.plugins];
        looks.map(|look| look.answer(is_new)).into_iter().collect()
    }

    /// Problems with single attachments and networks.
    pub(super) fn troubles(&self) -> Vec<Condition> {
        let mut conf = self.conf.as_ref().map(ConfKeeper::rows).unwrap_or_default();
        // Problems found in the directory are more specific.
        if conf.is_empty() {
            conf = locked(&self.runtime).clone();
        }
        let [without_files, not_enforced, not_attachable] =
            [&self.without_files, &self.not_enforced, &self.not_attachable].map(|rows| locked(rows).clone());
        [conf, without_files, not_enforced, not_attachable].concat()
    }

    /// Repeats the rare checks because of a request, at most every [`INTERVAL`]. The next request gets the
    /// new results.
    pub(super) fn look_soon(&self) {
        self.runtime_wanted.notify_one();
        // After a check of one share of the attachments, the results of the other shares are still old.
        let attachments = *locked(&self.all_shares);
        let networks = locked(&self.networks.last).as_ref().map(|(at, _)| *at);
        for (look, last) in [(&self.attachments, attachments), (&self.networks, networks)] {
            if last.is_some_and(|at| at.elapsed() >= INTERVAL) {
                look.want();
            }
        }
    }

    /// Returns the use of the networks' pools at the last check: at most [`SINGLE_INTERVAL`] ago unless the
    /// check hangs.
    pub(super) fn pools(&self) -> Vec<PoolUse> {
        locked(&self.pools).rows().to_vec()
    }

    /// Returns the results of all checks, as shown by `netattachctl status`, including the runtime's file.
    pub(super) fn conditions(&self) -> Vec<Readiness> {
        self.conditions_by(|look| look.seen(false))
    }

    /// As [`Health::conditions`], without triggering new checks.
    pub(super) fn known_conditions(&self) -> Vec<Readiness> {
        self.conditions_by(Look::known)
    }

    fn conditions_by(&self, outcome: impl Fn(&Look) -> Result<(Duration, Seen), CniError>) -> Vec<Readiness> {
        let seen = |look: &Look| outcome(look).and_then(|(_, seen)| seen);
        let [network, plugins, file] = [&self.network, &self.plugins, &self.file].map(seen);
        let own =
            [&self.journal, &self.descriptors, &self.dataplane].map(|look| condition(look.what, seen(look)));
        // The file is not written for a network that cannot be attached, so the network's problem is
        // reported instead.
        let file = self.conf.as_ref().map(|keeper| {
            if keeper.conf().is_to_go() {
                return condition(self.file.what, file);
            }
            let read =
                locked(&self.runtime).first().map_or(Ok(()), |it| Err(not_available(it.problem.clone())));
            let file = file.and_then(|path| read.map(|()| path));
            condition(self.file.what, network.clone().and(file))
        });
        let network = network.and_then(|name| plugins.map(|_| name));
        let mut conditions: Vec<Readiness> = own.into();
        conditions.push(condition(self.network.what, network));
        conditions.extend(file);
        conditions
    }

    /// The directory that the runtime's file is written to.
    pub(super) fn conf_directory(&self) -> Option<&Path> {
        self.conf.as_ref().map(|keeper| keeper.conf().directory())
    }

    /// Waits until a request wants the runtime's configuration checked.
    pub(super) async fn runtime_wanted(&self) {
        self.runtime_wanted.notified().await;
    }

    /// Records the problem with the configuration that the runtime reports.
    pub(super) fn runtime_reads(&self, problem: Option<String>) {
        let row = problem.map(|problem| Condition { object: conf_keeper::OBJECT.to_owned(), problem });
        note(conf_keeper::DISTURBED, &self.runtime, row.into_iter().collect());
    }

    /// Returns the problem of the default network at the last check.
    pub(super) fn default_network_problem(&self) -> Option<String> {
        let problem = |look: &Look| locked(&look.last).as_ref()?.1.as_ref().err().map(ToString::to_string);
        problem(&self.network).or_else(|| problem(&self.plugins))
    }

    /// Returns the files on disk that should describe networks but are invalid.
    pub(super) fn unusable_files(&self) -> Vec<Condition> {
        locked(&self.unusable).clone()
    }

    /// Runs the first checks, before requests are served. The runtime's file is written only once the agent
    /// serves. A dataplane that was just taken over without a failure needs no check.
    pub(super) fn look_first(&self, taken_over: bool) {
        self.journal.take(|| self.look_at_journal());
        self.descriptors.take(|| self.look_at_descriptors());
        self.dataplane.take(|| if taken_over { Ok(ALL_PINNED.to_owned()) } else { self.look_at_dataplane() });
        self.network.take(|| self.usable_network().map(|network| network.name.to_string()));
        if !self.default_network().is_ok_and(|network| self.engine.has_plugins_to_ask(&network)) {
            self.plugins.take(|| Ok(String::new()));
        }
    }

    /// Repeats the checks until the source of manifests ends. Called when requests are served.
    pub(super) async fn keep_looking(
        self: Arc<Self>,
        changes: watch::Receiver<u64>,
        filters: io::Result<FilterWatch>,
    ) {
        let this = || Arc::clone(&self);
        tokio::join!(
            self.look_when_filters_go(filters),
            self.look_when_configurations_change(),
            follow(changes.clone(), this(), |health| &health.journal, Self::look_at_journal),
            follow(changes.clone(), this(), |health| &health.descriptors, Self::look_at_descriptors),
            follow(changes.clone(), this(), |health| &health.dataplane, Self::look_at_dataplane),
            follow(changes.clone(), this(), |health| &health.attachments, Self::look_at_attachments),
            follow(changes.clone(), this(), |health| &health.network, Self::look_at_network),
            follow(changes.clone(), this(), |health| &health.networks, Self::look_at_networks),
            follow(changes.clone(), this(), |health| &health.plugins, Self::ask_plugins),
        );
    }

    /// Checks the attachments on a device as soon as a filter or a qdisc is removed from it; if there are
    /// some, also the dataplane. Most such devices are removed with their pod.
    async fn look_when_filters_go(&self, filters: io::Result<FilterWatch>) {
        let failed = async {
            let mut filters = filters?;
            loop {
                let removed = filters.removed().await?;
                locked(&self.removed).extend(removed);
                self.attachments.wanted.notify_one();
            }
        };
        let ended: io::Result<Infallible> = failed.await;
        let Err(error) = ended;
        let [soon, late] = [INTERVAL, pace::longest(INTERVAL)].map(|every| every.as_secs() * SHARES as u64);
        tracing::warn!(%error, "removed filters are noticed only by polling, every {soon} to {late} s");
    }

    /// Checks the default network and the runtime's file as soon as anything changes in their directories.
    async fn look_when_configurations_change(&self) {
        let Some(watch) = &self.watch else { return };
        let failed = async {
            loop {
                watch.changed().await?;
                self.network.want();
            }
        };
        let ended: io::Result<Infallible> = failed.await;
        let Err(error) = ended;
        tracing::warn!(%error, "changed CNI configurations are noticed late");
    }

    fn look_at_dataplane(&self) -> Seen {
        self.engine.check_dataplane().map(|()| ALL_PINNED.to_owned())
    }

    /// Checks that a record could be written, using an unnamed temporary file.
    fn look_at_journal(&self) -> Seen {
        let directory = self.engine.journal_directory();
        let written = std::fs::OpenOptions::new()
            .write(true)
            .mode(0o600)
            .custom_flags(rustix::fs::OFlags::TMPFILE.bits().cast_signed())
            .open(directory)
            .and_then(|mut file| file.write_all(&[0; PROBE]));
        match written {
            // The file system has no unnamed files; its problems appear when a record is written.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(directory.display().to_string()),
            Err(error) => {
                Err(not_available(format!("journal {}: {error}; {MAKE_ROOM}", directory.display())))
            }
            Ok(()) => Ok(directory.display().to_string()),
        }
    }

    fn look_at_descriptors(&self) -> Seen {
        let (open, most) = descriptors::used()
            .map_err(|error| not_available(format!("descriptors cannot be counted: {error}")))?;
        let used = format!("{open} of {most} are open");
        if most.saturating_sub(open) < FEWEST_DESCRIPTORS {
            return Err(not_available(format!("descriptors: {used}; {RAISE_LIMIT}")));
        }
        Ok(used)
    }

    /// Restores missing programs, and records the attachments that still lack theirs. Checks all
    /// attachments if a request wants this, else those on devices from which filters were removed, or those
    /// of the next share.
    fn look_at_attachments(&self) -> Seen {
        let removed = std::mem::take(&mut *locked(&self.removed));
        let is_wanted = self.attachments.is_wanted.swap(false, Ordering::Relaxed);
        let found = match &removed {
            Removed::From(devices) if !is_wanted => self.look_at_some(devices),
            _ => {
                if removed == Removed::Anywhere {
                    self.dataplane.want();
                }
                *locked(&self.all_shares) = Some(Instant::now());
                self.look_at_shares(0..SHARES)
            }
        };
        let node = self.engine.node();
        let named = |object: &str, problem: Option<String>| {
            problem.map(|problem| Condition { object: object.to_owned(), problem })
        };
        let translation = named("translation of addresses", node.nat.as_ref().and_then(Nat::trouble));
        let forwarding = named("forwarding for pods", node.firewall.as_ref().and_then(Firewall::trouble));
        let missing: Vec<Condition> = locked(&self.shares).rows().collect();
        let rows = translation.into_iter().chain(forwarding).chain(missing);
        note("attachment is not enforced", &self.not_enforced, rows.take(MOST_TROUBLES).collect());
        let Err(error) = found else { return Ok(String::new()) };
        // The check failed, so its work is still to be done.
        self.attachments.is_wanted.fetch_or(is_wanted, Ordering::Relaxed);
        locked(&self.removed).extend(removed);
        Err(CniError::new(code::LIMITED_CONNECTIVITY, format!("attachments: {}", Chain(&error))))
    }

    /// Checks the attachments on these devices, and those of the next share if there are no devices or the
    /// share is overdue. A failure on the devices does not prevent the check of the share; the devices are
    /// tried again with each check.
    fn look_at_some(&self, devices: &BTreeSet<u32>) -> Result<(), EnforceError> {
        let mut outcome = Ok(());
        if !devices.is_empty() {
            let (looked, done) = self.engine.restore_attachments(Which::On(devices), SHARES);
            if !looked.is_empty() {
                self.dataplane.want();
            }
            locked(&self.shares).merge(looked);
            outcome = done;
        }
        let next = {
            let (mut shares, now) = (locked(&self.shares), Instant::now());
            if !devices.is_empty() && !shares.is_late(now, pace::longest(INTERVAL)) {
                return outcome;
            }
            shares.next(now)
        };
        self.look_at_shares(next..next + 1).and(outcome)
    }

    /// Checks the attachments of these shares. Returns the last failure; the other shares are checked all
    /// the same.
    fn look_at_shares(&self, shares: std::ops::Range<usize>) -> Result<(), EnforceError> {
        let mut outcome = Ok(());
        for share in shares {
            let (looked, done) = self.engine.restore_attachments(Which::Share(share), SHARES);
            let mut known = locked(&self.shares);
            match done {
                Ok(()) => known.replace(share, looked),
                Err(error) => {
                    known.merge(looked);
                    outcome = Err(error);
                }
            }
        }
        outcome
    }

    /// Records the networks that could not be attached, and those without a free address.
    fn look_at_networks(&self) -> Seen {
        let cni_path = locked(&self.cni_path).clone();
        // A definition that yields no plan is reported as the definition's trouble (`agent::trouble`).
        let planned = |defined: &Defined| self.engine.check_plan(&defined.network).is_ok();
        // A metrics scrape during the check gets the previous values.
        let before = locked(&self.pools).clone();
        let mut pools = PoolUses::default();
        // Every network is checked, regardless of the number of problems, to record the use of all pools.
        let troubled = self.intents.defined().into_iter().filter(planned).filter_map(|defined| {
            let looked = self.engine.pools(&defined.network);
            let room = pools.note(&before, &defined.network.name.to_string(), looked);
            // Other problems of the default network are found by its own check.
            let found = match defined.default {
                true => Ok(()),
                false => self.engine.check_network(&defined.network, &cni_path),
            };
            let found = found.and(room);
            let problem = clipped(found.err()?.to_string());
            Some(Condition { object: format!("network {}", defined.network.name), problem })
        });
        let rows = shared(troubled.collect(), MOST_TROUBLES);
        note("network cannot be attached", &self.not_attachable, rows);
        pools.keep_most(MOST_POOLS);
        *locked(&self.pools) = pools;
        self.engine.forget_unused_pools();
        self.look_at_files();
        Ok(String::new())
    }

    /// Checks the default network and updates the runtime's file. The file is removed only by `cniConf.remove`: without it
    /// the runtime uses another plugin's.
    fn look_at_network(&self) -> Seen {
        // Set before anything is read, so that changes made meanwhile trigger another check.
        if let Some(watch) = &self.watch {
            let mut directories = self.intents.default_directories();
            directories.extend(self.conf.as_ref().map(|keeper| keeper.conf().directory().to_owned()));
            watch.set(&directories);
        }
        let network = self.usable_network();
        if let Some(keeper) = &self.conf {
            self.file.take(|| keeper.keep(network.as_ref().ok().map(|network| &*network.list)));
        }
        Ok(network?.name.to_string())
    }

    /// Records the files that should describe networks but are invalid.
    fn look_at_files(&self) {
        let unusable = self.intents.unusable_files().into_iter();
        let unusable = unusable.map(|(path, error)| Condition {
            object: path.display().to_string(),
            problem: Chain(&error).to_string(),
        });
        note(NOT_IN_FORCE, &self.unusable, unusable.collect());
    }

    fn ask_plugins(&self) -> Seen {
        // Problems with the configuration are reported by the other check.
        let Ok(network) = self.default_network() else { return Ok(String::new()) };
        let cni_path = locked(&self.cni_path).clone();
        let patience = PLUGIN_PATIENCE.min(self.engine.node().delegate.timeout);
        self.engine.ask_plugins(&network, &cni_path, patience).map(|()| String::new())
    }

    /// Returns the default network, if it could be attached now.
    fn usable_network(&self) -> Result<Network, CniError> {
        let network = self.default_network();
        self.look_at_plugins_root(network.as_ref().ok());
        let network = network?;
        let cni_path = locked(&self.cni_path).clone();
        self.engine
            .check_network(&network, &cni_path)
            .map_err(|error| CniError { code: code::NOT_AVAILABLE, ..error })?;
        Ok(network)
    }

    /// Records the plugins of the default network that may lack files of the node. Done before the
    /// runtime's file is written. Attaches are not refused for this reason, as there are plugins that need
    /// no such files.
    fn look_at_plugins_root(&self, network: Option<&Network>) {
        if !self.forgot_root {
            return;
        }
        let row = network.and_then(|network| {
            let executed = self.engine.executed(network);
            plugin_root::without_the_nodes_files(&network.name.to_string(), &executed)
        });
        note("plugins may not find what they need", &self.without_files, row.into_iter().collect());
    }

    fn default_network(&self) -> Result<Network, CniError> {
        self.intents.check_default().map_err(|error| CniError::from_chain(code::NOT_AVAILABLE, &error))
    }
}

fn not_available(msg: String) -> CniError {
    CniError::new(code::NOT_AVAILABLE, msg)
}

/// Stores the findings of a check, and logs the new ones.
pub(super) fn note(what: &str, kept: &Mutex<Vec<Condition>>, found: Vec<Condition>) {
    let mut kept = locked(kept);
    log_new(what, &kept, &found);
    *kept = found;
}

/// The log share of each namespace, common to all checks.
static LOGGED: LazyLock<Mutex<LogShare>> = LazyLock::new(|| Mutex::new(LogShare::new()));

/// Logs each problem that is not in `before`; of very many in a namespace only the first ones and the
/// number of the others, as one author can make thousands and change them with every check.
pub(super) fn log_new(what: &str, before: &[Condition], found: &[Condition]) {
    let known: BTreeSet<(&str, &str)> =
        before.iter().map(|row| (row.object.as_str(), row.problem.as_str())).collect();
    let is_new = |row: &&Condition| !known.contains(&(row.object.as_str(), row.problem.as_str()));
    let mut logged = locked(&LOGGED);
    for Condition { object, problem } in found.iter().filter(is_new) {
        logged.log(namespace(object), || tracing::warn!(object, problem, "{what}"));
    }
}

impl std::fmt::Debug for Health {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Health").finish_non_exhaustive()
    }
}

fn condition(what: &str, seen: Seen) -> Readiness {
    Readiness {
        condition: what.to_owned(),
        met: seen.is_ok(),
        detail: seen.unwrap_or_else(|error| error.to_string()),
    }
}

impl Look {
    fn new(what: &'static str, every: Duration) -> Self {
        let longest = LONGEST_LOOK;
        Self {
            what,
            every,
            longest,
            last: Mutex::default(),
            begun: Mutex::default(),
            wanted: Notify::new(),
            is_wanted: AtomicBool::new(true),
        }
    }

    /// A check that makes only a few system calls.
    fn short(what: &'static str) -> Self {
        Self { longest: LONGEST_SHORT_LOOK, ..Self::new(what, INTERVAL) }
    }

    /// Requests the check soon.
    fn want(&self) {
        self.is_wanted.store(true, Ordering::Relaxed);
        self.wanted.notify_one();
    }

    fn take(&self, look: impl FnOnce() -> Seen) {
        *locked(&self.begun) = Some(Instant::now());
        let seen = look();
        *locked(&self.begun) = None;
        let mut last = locked(&self.last);
        let before = last.replace((Instant::now(), seen)).map(|(_, seen)| seen);
        let Some((_, now)) = &*last else { return };
        match (before, now) {
            (Some(Err(_)), Ok(_)) => tracing::info!("{}: healthy again", self.what),
            (before, Err(error)) if before.as_ref() != Some(now) => {
                let CniError { code, msg, details } = error;
                tracing::warn!(code, msg, details, "{}: not healthy", self.what);
            }
            _ => {}
        }
    }

    /// Returns the last result and its age. Triggers a new check unless the result is fresh.
    ///
    /// # Errors
    /// As [`Look::known`].
    fn seen(&self, look_again: bool) -> Result<(Duration, Seen), CniError> {
        let age = locked(&self.last).as_ref().map(|(at, _)| at.elapsed());
        if age.is_some_and(|age| look_again || age > FRESH) {
            self.want();
        }
        self.known()
    }

    /// Returns the last result and its age.
    ///
    /// # Errors
    /// There is no result, or no recent one.
    fn known(&self) -> Result<(Duration, Seen), CniError> {
        let last = locked(&self.last);
        let not_known = |how: String| {
            Err(CniError::new(code::NOT_AVAILABLE, format!("state of {} is not known {how}", self.what)))
        };
        let Some((at, seen)) = &*last else { return not_known("yet".into()) };
        let age = at.elapsed();
        let hangs = locked(&self.begun).is_some_and(|begun| begun.elapsed() > self.longest);
        if hangs || age > pace::longest(self.every) + LONGEST_LOOK {
            return not_known(format!("for {} s", age.as_secs()));
        }
        Ok((age, seen.clone()))
    }

    fn answer(&self, look_again: bool) -> Result<(), CniError> {
        let (age, seen) = self.seen(look_again)?;
        seen.map(drop).map_err(|error| {
            let seen = format!("seen {:.1} s ago", age.as_secs_f32());
            let separator = if error.details.is_empty() { "" } else { "; " };
            CniError { details: format!("{}{separator}{seen}", error.details), ..error }
        })
    }
}

/// Runs checks on a blocking thread: when definitions change, when a request wants one, and once in the
/// check's interval, or as often as [`pace`] allows.
async fn follow(
    mut changes: watch::Receiver<u64>,
    health: Arc<Health>,
    which: fn(&Health) -> &Look,
    look: fn(&Health) -> Seen,
) {
    // No request waits for a periodic check; at the start a request may.
    let mut is_routine = false;
    loop {
        let looking = Arc::clone(&health);
        let known = Known::of(&health.source.snapshot(), &health.intents.from_node.this);
        // Processor time, without the time in which other threads ran.
        let take = move || {
            let began = Instant::now();
            let ((), worked) = pace::measured(|| which(&looking).take(|| look(&looking)));
            (began.elapsed(), worked)
        };
        let (took, worked) = rounds::take(is_routine, take).await;
        // Work that other plugins do for a check counts as well.
        let worked = if which(&health).longest == LONGEST_LOOK { worked.max(took / OTHERS) } else { worked };
        let pause = took * PAUSE;
        let changed = async {
            let changed = other_networks(&mut changes, &health, known).await;
            // Thousands of definitions that arrive one by one do not trigger a check each.
            tokio::time::sleep(pause).await;
            changed
        };
        // A process that repeatedly removes programs triggers a check each time; the pause bounds the
        // processor time for it.
        let soonest = tokio::time::Instant::now() + pause.min(INTERVAL);
        let wanted = async {
            which(&health).wanted.notified().await;
            tokio::time::sleep_until(soonest).await;
        };
        // All three futures may be dropped at any time: a change stays unseen, a request is kept or
        // answered by the check that runs instead, and the sleep starts anew.
        is_routine = tokio::select! {
            changed = changed => {
                if changed.is_err() {
                    return;
                }
                false
            }
            () = wanted => false,
            () = ticks::pause(pace::pause(which(&health).every, worked)) => true,
        };
    }
}

/// The objects that checks depend on.
struct Known {
    definitions: Identity<NetworkRef, Arc<Definition>>,
    /// The default network can take its ranges from this node.
    node: OwnNode,
}

impl Known {
    fn of(objects: &Objects, this: &ThisNode) -> Self {
        Self { definitions: objects.definitions.identity(), node: OwnNode::of(objects, this) }
    }

    fn is_of(&self, objects: &Objects, this: &ThisNode) -> bool {
        self.definitions.is_of(&objects.definitions) && self.node.is_of(objects, this)
    }
}

/// Waits until the source has different definitions or another object of this node. No check depends on
/// pods, policies and other nodes, which change more often.
async fn other_networks(
    changes: &mut watch::Receiver<u64>,
    health: &Health,
    known: Known,
) -> Result<(), watch::error::RecvError> {
    while known.is_of(&health.source.snapshot(), &health.intents.from_node.this) {
        changes.changed().await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(ago: Duration, outcome: Seen) -> Look {
        let look = Look::new("dataplane", INTERVAL);
        *locked(&look.last) = Instant::now().checked_sub(ago).map(|at| (at, outcome));
        look
    }

    fn refused(look: &Look) -> (u32, String, String) {
        let CniError { code, msg, details } = look.answer(false).unwrap_err();
        (code, msg, details)
    }

    /// Rows: STA-06.
    #[test]
    fn an_answer_is_that_of_the_last_look_with_its_age_while_it_is_not_too_old() {
        let limited = Err(CniError::new(51, "no pins").with_details("as told"));
        assert_eq!(seen(Duration::ZERO, Ok("pinned".into())).answer(false), Ok(()));
        assert_eq!(
            refused(&seen(Duration::from_secs(3), limited)),
            (51, "no pins".into(), "as told; seen 3.0 s ago".into())
        );
        let said = |text: &str| (50, format!("state of dataplane is not known {text}"), String::new());
        assert_eq!(refused(&Look::new("dataplane", INTERVAL)), said("yet"));
        assert_eq!(refused(&seen(Duration::from_secs(100), Ok(String::new()))), said("for 100 s"));
    }
}
