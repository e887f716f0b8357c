//! What STATUS answers and `netattachctl status` shows of the node's readiness: the outcome of looks that are taken
//! beside the requests, so that nothing that hangs, a disk or another plugin, holds an answer up. The same looks keep
//! the runtime's configuration file.
//!
//! STATUS fails for what would fail every ADD of the node, and for nothing else: a runtime that is told so lets no pod
//! come and has those that are there evicted. What is wrong with one network, one pool or one attachment is shown
//! beside ([`Health::troubles`]).

use std::convert::Infallible;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};

use super::cni_conf::CniConf;
use crate::attach::{Engine, IntentReader};
use crate::cni::{CniError, code};
use crate::descriptors;
use crate::error_chain::Chain;
use crate::netlink::FilterWatch;
use crate::npwg::{Definition, NetworkRef};
use crate::objects::Identity;
use crate::plan::gc::Defined;
use crate::plan::resolve::Network;
use crate::rpc::message::{Condition, Readiness};
use crate::source::Source;

/// How often is looked without being asked.
const INTERVAL: Duration = Duration::from_secs(5);
/// How often the default network is looked at where the runtime's file follows it. Looking finds directories that are
/// yet to be made, which a watch does not.
const FILE_INTERVAL: Duration = Duration::from_secs(1);
/// An answer that is older makes the question a reason to look again.
const FRESH: Duration = Duration::from_secs(1);
/// Longest that one plugin is waited for. STATUS is to be cheap; a plugin that takes longer is not well.
const PLUGIN_PATIENCE: Duration = Duration::from_secs(5);
/// A look that takes longer hangs, and what was seen before it counts no more. Other plugins may take it all.
const LONGEST_LOOK: Duration = Duration::from_secs(30);
/// The same of a look that is a few system calls.
const LONGEST_SHORT_LOOK: Duration = Duration::from_secs(10);
/// How often networks and attachments are looked at one by one.
const SINGLE_INTERVAL: Duration = Duration::from_secs(10);
/// How many troubles are kept of each kind.
const MOST_TROUBLES: usize = 100;
/// An ADD takes some twenty descriptors; with fewer left than this, ADDs fail.
const FEWEST_DESCRIPTORS: u64 = 32;
/// What a look writes into the journal's directory, in bytes: more than any inode holds by itself.
const PROBE: usize = 4096;

/// What is said of an object that is there and does nothing.
pub(super) const NOT_IN_FORCE: &str = "not in force";

/// What there is to say of a dataplane that is well.
const ALL_PINNED: &str = "programs and maps are pinned";

/// What was seen last.
pub(super) struct Health {
    engine: Arc<Engine>,
    intents: Arc<IntentReader>,
    /// The runtime's file, if the agent keeps one.
    conf: Option<CniConf>,
    source: Arc<dyn Source>,
    /// The directory of the journal takes records.
    journal: Look,
    /// Files can be opened.
    descriptors: Look,
    dataplane: Look,
    /// Attachments, one by one.
    attachments: Look,
    /// Networks, one by one.
    networks: Look,
    /// Configuration, pools, parents and executables of the default network.
    network: Look,
    /// What the default network's other plugins say.
    plugins: Look,
    file: Look,
    /// Files that the last look at the default network found unusable.
    unusable: Mutex<Vec<Condition>>,
    /// What the last looks at single attachments and at single networks found.
    not_enforced: Mutex<Vec<Condition>>,
    not_attachable: Mutex<Vec<Condition>>,
    /// `CNI_PATH` of the runtime, as far as it was heard of.
    cni_path: Mutex<Vec<PathBuf>>,
}

/// What a look found: for people where all is well, or what is wrong.
type Seen = Result<String, CniError>;

/// One kind of look.
#[derive(Debug)]
struct Look {
    what: &'static str,
    every: Duration,
    longest: Duration,
    last: Mutex<Option<(Instant, Seen)>>,
    /// Since when a look is being taken.
    begun: Mutex<Option<Instant>>,
    wanted: Notify,
}

impl Health {
    pub(super) fn new(
        engine: Arc<Engine>,
        intents: Arc<IntentReader>,
        source: Arc<dyn Source>,
        conf: Option<CniConf>,
    ) -> Self {
        let network_interval = if conf.is_some() { FILE_INTERVAL } else { INTERVAL };
        Self {
            engine,
            intents,
            conf,
            source,
            journal: Look::short("journal"),
            descriptors: Look::short("descriptors"),
            dataplane: Look::short("dataplane"),
            attachments: Look::new("attachments", INTERVAL),
            networks: Look::new("networks", SINGLE_INTERVAL),
            network: Look::new("default network", network_interval),
            plugins: Look::new("the default network's plugins", INTERVAL),
            file: Look::new("CNI configuration", network_interval),
            unusable: Mutex::default(),
            not_enforced: Mutex::default(),
            not_attachable: Mutex::default(),
            cni_path: Mutex::default(),
        }
    }

    /// STATUS, from memory.
    ///
    /// # Errors
    /// Code 50 or 51 with the reason, or what a plugin answered; how long ago that was is in the details.
    pub(super) fn answer(&self, cni_path: &[PathBuf]) -> Result<(), CniError> {
        let is_new = {
            let mut known = lock(&self.cni_path);
            let is_new = *known != cni_path;
            cni_path.clone_into(&mut known);
            is_new
        };
        self.source.synced().map_err(|why| CniError::new(code::NOT_AVAILABLE, format!("source: {why}")))?;
        let looks = [&self.journal, &self.descriptors, &self.dataplane, &self.network, &self.plugins];
        looks.map(|look| look.answer(is_new)).into_iter().collect()
    }

    /// What is wrong with single attachments and networks.
    pub(super) fn troubles(&self) -> Vec<Condition> {
        [lock(&self.not_enforced).clone(), lock(&self.not_attachable).clone()].concat()
    }

    /// The same for people, and the runtime's file.
    pub(super) fn conditions(&self) -> Vec<Readiness> {
        let seen = |look: &Look| look.seen(false).and_then(|(_, seen)| seen);
        let [network, plugins, file] = [&self.network, &self.plugins, &self.file].map(seen);
        let own =
            [&self.journal, &self.descriptors, &self.dataplane].map(|look| condition(look.what, seen(look)));
        // Nothing is written for a network that cannot be attached: the reason is the network's.
        let file = self.conf.as_ref().map(|_| condition(self.file.what, network.clone().and(file)));
        let network = network.and_then(|name| plugins.map(|_| name));
        let mut conditions: Vec<Readiness> = own.into();
        conditions.push(condition(self.network.what, network));
        conditions.extend(file);
        conditions
    }

    /// The files on disk that should describe networks and cannot be used.
    pub(super) fn unusable_files(&self) -> Vec<Condition> {
        lock(&self.unusable).clone()
    }

    /// The first look, before anything is served. The runtime's file waits until then. A dataplane that was just taken over
    /// without a failure has been looked at.
    pub(super) fn look_first(&self, taken_over: bool) {
        self.journal.take(|| self.look_at_journal());
        self.descriptors.take(|| self.look_at_descriptors());
        self.dataplane.take(|| if taken_over { Ok(ALL_PINNED.to_owned()) } else { self.look_at_dataplane() });
        self.network.take(|| self.usable_network().map(|network| network.name.to_string()));
        if !self.default_network().is_ok_and(|network| self.engine.has_plugins_to_ask(&network)) {
            self.plugins.take(|| Ok(String::new()));
        }
    }

    /// Looks, again and again, until the source of manifests ends. To be started when requests are served.
    pub(super) async fn keep_looking(
        self: Arc<Self>,
        changes: watch::Receiver<u64>,
        filters: io::Result<FilterWatch>,
    ) {
        let this = || Arc::clone(&self);
        tokio::join!(
            self.look_when_filters_go(filters),
            follow(changes.clone(), this(), |health| &health.journal, Self::look_at_journal),
            follow(changes.clone(), this(), |health| &health.descriptors, Self::look_at_descriptors),
            follow(changes.clone(), this(), |health| &health.dataplane, Self::look_at_dataplane),
            follow(changes.clone(), this(), |health| &health.attachments, Self::look_at_attachments),
            follow(changes.clone(), this(), |health| &health.network, Self::look_at_network),
            follow(changes.clone(), this(), |health| &health.networks, Self::look_at_networks),
            follow(changes.clone(), this(), |health| &health.plugins, Self::ask_plugins),
        );
    }

    /// Looks at the dataplane at once when somebody removes a filter or a queueing discipline from any device.
    async fn look_when_filters_go(&self, filters: io::Result<FilterWatch>) {
        let failed = async {
            let mut filters = filters?;
            loop {
                filters.removed().await?;
                self.dataplane.wanted.notify_one();
                self.attachments.wanted.notify_one();
            }
        };
        let ended: io::Result<Infallible> = failed.await;
        let Err(error) = ended;
        tracing::warn!(%error, "removed filters are noticed only every {} s", INTERVAL.as_secs());
    }

    fn look_at_dataplane(&self) -> Seen {
        self.engine.check_dataplane().map(|()| ALL_PINNED.to_owned())
    }

    /// Whether a record could be written: into a file that nobody can see.
    fn look_at_journal(&self) -> Seen {
        let directory = self.engine.journal_directory();
        let written = std::fs::OpenOptions::new()
            .write(true)
            .mode(0o600)
            .custom_flags(rustix::fs::OFlags::TMPFILE.bits().cast_signed())
            .open(directory)
            .and_then(|mut file| file.write_all(&[0; PROBE]));
        match written {
            // A file system without such files; what is wrong with it shows when a record is written.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(directory.display().to_string()),
            Err(error) => Err(not_available(format!("journal {}: {error}", directory.display()))),
            Ok(()) => Ok(directory.display().to_string()),
        }
    }

    fn look_at_descriptors(&self) -> Seen {
        let (open, most) = descriptors::used()
            .map_err(|error| not_available(format!("descriptors: they cannot be counted: {error}")))?;
        let used = format!("{open} of {most} are open");
        if most.saturating_sub(open) < FEWEST_DESCRIPTORS {
            return Err(not_available(format!("descriptors: {used}")));
        }
        Ok(used)
    }

    /// Puts programs back, and notes which attachments lack theirs all the same.
    fn look_at_attachments(&self) -> Seen {
        let missing = self.engine.restore_attachments().map_err(|error| {
            CniError::new(code::LIMITED_CONNECTIVITY, format!("attachments: {}", Chain(&error)))
        })?;
        let rows = missing.into_iter().map(|(object, problem)| Condition { object, problem });
        note("attachment is not enforced", &self.not_enforced, rows.take(MOST_TROUBLES).collect());
        Ok(String::new())
    }

    /// Notes which networks could not be attached, and which have no address left.
    fn look_at_networks(&self) -> Seen {
        let cni_path = lock(&self.cni_path).clone();
        // What makes no plan is the definition's trouble, and told as that (`agent::trouble`).
        let planned = |defined: &Defined| self.engine.check_plan(&defined.network).is_ok();
        let rows = self.intents.defined().into_iter().filter(planned).filter_map(|defined| {
            // What else is wrong with the default network is in a look of its own.
            let found = match defined.default {
                true => Ok(()),
                false => self.engine.check_network(&defined.network, &cni_path),
            };
            let found = found.and_then(|()| self.engine.check_pools(&defined.network));
            let problem = found.err()?.to_string();
            Some(Condition { object: format!("network {}", defined.network.name), problem })
        });
        note("network cannot be attached", &self.not_attachable, rows.take(MOST_TROUBLES).collect());
        Ok(String::new())
    }

    /// Looks at the default network and brings the runtime's file up to date. The file is never taken away: a runtime
    /// without it would take another plugin's.
    fn look_at_network(&self) -> Seen {
        let unusable = self.intents.unusable_files().into_iter();
        let unusable = unusable.map(|(path, error)| Condition {
            object: path.display().to_string(),
            problem: Chain(&error).to_string(),
        });
        note(NOT_IN_FORCE, &self.unusable, unusable.collect());
        let network = self.usable_network()?;
        if let Some(conf) = &self.conf {
            self.file.take(|| {
                let path = conf.path().display().to_string();
                let written = conf
                    .ensure(&network.list)
                    .map_err(|error| CniError::from_chain(code::NOT_AVAILABLE, &error))?;
                if written {
                    tracing::info!(path, "configuration for the container runtime written");
                }
                Ok(path)
            });
        }
        Ok(network.name.to_string())
    }

    fn ask_plugins(&self) -> Seen {
        // What is wrong with the configuration is told by the other look.
        let Ok(network) = self.default_network() else { return Ok(String::new()) };
        let cni_path = lock(&self.cni_path).clone();
        let patience = PLUGIN_PATIENCE.min(self.engine.node().delegate.timeout);
        self.engine.ask_plugins(&network, &cni_path, patience).map(|()| String::new())
    }

    /// The default network, if it could be attached now.
    fn usable_network(&self) -> Result<Network, CniError> {
        let network = self.default_network()?;
        let cni_path = lock(&self.cni_path).clone();
        self.engine
            .check_network(&network, &cni_path)
            .map_err(|error| CniError { code: code::NOT_AVAILABLE, ..error })?;
        Ok(network)
    }

    fn default_network(&self) -> Result<Network, CniError> {
        self.intents.check_default().map_err(|error| CniError::from_chain(code::NOT_AVAILABLE, &error))
    }
}

fn not_available(msg: String) -> CniError {
    CniError::new(code::NOT_AVAILABLE, msg)
}

/// Keeps what a look found, and tells of what was not there before.
pub(super) fn note(what: &str, kept: &Mutex<Vec<Condition>>, found: Vec<Condition>) {
    let mut kept = lock(kept);
    tell_new(what, &kept, &found);
    *kept = found;
}

/// Each trouble is a line when it begins.
pub(super) fn tell_new(what: &str, before: &[Condition], found: &[Condition]) {
    for Condition { object, problem } in found.iter().filter(|row| !before.contains(row)) {
        tracing::warn!(object, problem, "{what}");
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
        Self { what, every, longest, last: Mutex::default(), begun: Mutex::default(), wanted: Notify::new() }
    }

    /// One that is a few system calls.
    fn short(what: &'static str) -> Self {
        Self { longest: LONGEST_SHORT_LOOK, ..Self::new(what, INTERVAL) }
    }

    fn take(&self, look: impl FnOnce() -> Seen) {
        *lock(&self.begun) = Some(Instant::now());
        let seen = look();
        *lock(&self.begun) = None;
        let mut last = lock(&self.last);
        let before = last.replace((Instant::now(), seen)).map(|(_, seen)| seen);
        let Some((_, now)) = &*last else { return };
        match (before, now) {
            (Some(Err(_)), Ok(_)) => tracing::info!("{} is well again", self.what),
            (before, Err(error)) if before.as_ref() != Some(now) => {
                let CniError { code, msg, details } = error;
                tracing::warn!(code, msg, details, "{} is not well", self.what);
            }
            _ => {}
        }
    }

    /// What was seen and how long ago.
    ///
    /// # Errors
    /// Nothing, or nothing lately.
    fn seen(&self, look_again: bool) -> Result<(Duration, Seen), CniError> {
        let last = lock(&self.last);
        let not_known = |how: String| {
            Err(CniError::new(code::NOT_AVAILABLE, format!("state of {} is not known {how}", self.what)))
        };
        let Some((at, seen)) = &*last else { return not_known("yet".into()) };
        let age = at.elapsed();
        if look_again || age > FRESH {
            self.wanted.notify_one();
        }
        let hangs = lock(&self.begun).is_some_and(|begun| begun.elapsed() > self.longest);
        if hangs || age > self.every + LONGEST_LOOK {
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

/// Takes looks on a thread that may block: when definitions change, when an answer asks for it, and once in the look's interval.
async fn follow(
    mut changes: watch::Receiver<u64>,
    health: Arc<Health>,
    which: fn(&Health) -> &Look,
    look: fn(&Health) -> Seen,
) {
    loop {
        let looking = Arc::clone(&health);
        let definitions = health.source.snapshot().definitions.identity();
        // The join error is a panic, which the panic hook has reported; the next look is another try.
        let _ = tokio::task::spawn_blocking(move || which(&looking).take(|| look(&looking))).await;
        // All three may be dropped at any time: a change stays unseen, a wish is kept, time goes on.
        tokio::select! {
            changed = other_definitions(&mut changes, &*health.source, definitions) => {
                if changed.is_err() {
                    return;
                }
            }
            () = which(&health).wanted.notified() => {}
            () = tokio::time::sleep(which(&health).every) => {}
        }
    }
}

/// Waits until the source has other definitions. No look depends on pods and policies, which change more often.
async fn other_definitions(
    changes: &mut watch::Receiver<u64>,
    source: &dyn Source,
    known: Identity<NetworkRef, Definition>,
) -> Result<(), watch::error::RecvError> {
    while known.is_of(&source.snapshot().definitions) {
        changes.changed().await?;
    }
    Ok(())
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change is one assignment.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(ago: Duration, outcome: Seen) -> Look {
        let look = Look::new("dataplane", INTERVAL);
        *lock(&look.last) = Instant::now().checked_sub(ago).map(|at| (at, outcome));
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
