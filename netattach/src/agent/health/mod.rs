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
//! | `look` | one kind of check: its latest result, and when it is repeated |
//! | `node_parts`, `attachments`, `networks` | the checks of the dataplane, journal and descriptors; of attachments; of networks |
//! | `readiness` | logs whether the node is ready |
//! | `shares` | results of checks of attachments |
//! | `pool_uses` | the pool usage that checks have found |
//! | `own_node` | this node's object, as the last check saw it |
//! | `trouble`, `disk_look` | problems with objects, and on disk |
//! | `share` | which of very many are shown |

mod attachments;
mod disk_look;
mod look;
mod networks;
mod node_parts;
mod own_node;
mod pool_uses;
pub(super) mod readiness;
pub(super) mod share;
mod shares;
pub(super) mod trouble;

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};

use self::look::{Look, Seen, follow, not_available};
use self::pool_uses::PoolUses;
use self::share::namespace;
use self::shares::{SHARES, Shares};

use crate::agent::cni_conf::conf_keeper::{self, ConfKeeper};
use crate::agent::cni_conf::conf_watch::ConfWatch;
use crate::attach::{Engine, IntentReader};
use crate::cni::{CniError, code};
use crate::ipam::PoolUse;
use crate::netlink::{FilterWatch, Removed};
use crate::pace;
use crate::rpc::message::{Condition, Readiness};
use crate::source::Source;
use crate::source::log_share::LogShare;
use crate::sync::{Mutex, locked};

/// How often each check runs without a request.
const INTERVAL: Duration = Duration::from_secs(5);
/// How often the default network is checked when the runtime's file follows it. Polling also finds directories that are
/// yet to be created, which a watch does not.
const FILE_INTERVAL: Duration = Duration::from_secs(1);
/// How often networks are checked one by one.
const SINGLE_INTERVAL: Duration = Duration::from_secs(30);
/// Most problems that are kept of each kind.
const MOST_TROUBLES: usize = 100;
/// Problem text for an object that exists but has no effect.
const NOT_IN_FORCE: &str = "not in force";

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
