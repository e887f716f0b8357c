//! State shared by the followers of all kinds and the readers: the objects read so far, the newest
//! snapshot, and the state of each kind's follower.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use http::StatusCode;
use tokio::sync::{Notify, watch};

use super::cache::{self, Cache, MoreProblems};
use super::client::RequestError;
use super::on_demand::Want;
use super::resource::{Content, REMOTE_PODS, Resource};
use crate::error_chain::Chain;
use crate::objects::{ObjectName, Objects, Problem, Unknown};
use crate::source::log_share::LogShare;
use crate::source::read::Kind;
use crate::source::{NotSynced, Warning};
use crate::sync::{Mutex, locked};
use crate::ticks::ticks;

/// How long a kind may fail before it is reported. A restarting server is unavailable for less.
const PATIENCE: Duration = Duration::from_secs(10);
/// The remedy if a server rejects the agent's identity.
const EXPIRED: &str = "; it does not accept the agent's token or certificate: renew the one that the kubeconfig names (in a pod the kubelet does)";
/// How long the snapshot with the first policy that selects a pod here and has pods as peers waits for the
/// pods of other nodes. Without them the policy would deny allowed traffic; after this time the snapshot
/// marks them as [`Unknown`].
const PEERS_PATIENCE: Duration = Duration::from_secs(3);
/// How long a server has to report that it does not serve a kind, without failing in between, until that is certain.
/// A restarted server reports it wrongly for seconds.
const DOUBT: Duration = Duration::from_secs(20);
/// How often timers are checked.
const TICK: Duration = Duration::from_secs(1);
/// Least time between two snapshots. A single change is published at once; in a burst, each snapshot costs
/// a copy of the changed maps, and work in all tasks that follow them.
const LEAST_PAUSE: Duration = Duration::from_millis(20);

/// See the module's documentation.
pub(super) struct View {
    cache: Mutex<Cache>,
    snapshot: RwLock<Arc<Objects>>,
    version: watch::Sender<u64>,
    /// Time from the first change in the newest snapshot to its publication, in microseconds.
    reading: AtomicU64,
    followed: Mutex<Followed>,
    /// Notified when there are changes to publish.
    changed: Notify,
    /// Notified when refused objects may fit.
    room: Notify,
    /// Whether policies for pods of this node have pods as peers.
    wants_remote: watch::Sender<Want>,
    /// Whether policies for pods of this node have pods as peers that are on the default network alone.
    wants_more_remote: watch::Sender<bool>,
    /// Whether definitions take their range from the node.
    wants_own_node: watch::Sender<Want>,
}

/// The state of the kinds' followers.
#[derive(Default)]
struct Followed {
    kinds: BTreeMap<Content, Following>,
    /// When the first unpublished change was made.
    changed: Option<Instant>,
    /// Since when something waits for the pods of other nodes.
    wanted: Option<Instant>,
    /// Whether those on the default network alone are needed among them; and whether they are followed.
    wants_more_remote: bool,
    has_more_remote: bool,
    /// Whether a complete snapshot has been published.
    published: bool,
}

struct Following {
    resource: &'static Resource,
    /// All objects have been read at least once.
    complete: bool,
    /// The completeness does not rest only on one answer that the server does not serve the kind.
    confirmed: bool,
    served: bool,
    /// Since when the server reports that it does not serve the kind, without another failure in between.
    unserved: Option<Instant>,
    /// The newest version is not served, and this path of an older one is.
    older: Option<&'static str>,
    /// Since when changes are not followed, and the last reason.
    failing: Option<(Instant, String)>,
    /// The server has rejected the agent's identity since then.
    expired: bool,
}

impl View {
    pub(super) fn new(resources: impl IntoIterator<Item = &'static Resource>) -> Self {
        let kinds =
            resources.into_iter().map(|resource| (resource.content, Following::new(resource))).collect();
        Self {
            cache: Mutex::default(),
            snapshot: RwLock::default(),
            version: watch::Sender::new(0),
            reading: AtomicU64::new(0),
            followed: Mutex::new(Followed { kinds, ..Followed::default() }),
            changed: Notify::new(),
            room: Notify::new(),
            wants_remote: watch::Sender::new(Want::Not),
            wants_more_remote: watch::Sender::new(false),
            wants_own_node: watch::Sender::new(Want::Not),
        }
    }

    pub(super) fn snapshot(&self) -> Arc<Objects> {
        Arc::clone(&self.snapshot.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the version of a pod of this node in the snapshot, if it is known.
    pub(super) fn version_of(&self, pod: &ObjectName) -> Option<u64> {
        locked(&self.cache).version_of(pod)
    }

    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    pub(super) fn reading(&self) -> Duration {
        Duration::from_micros(self.reading.load(Ordering::Relaxed))
    }

    /// Whether policies for pods of this node have pods as peers.
    pub(super) fn wants_remote(&self) -> watch::Receiver<Want> {
        self.wants_remote.subscribe()
    }

    /// Whether policies for pods of this node have pods as peers that are on the default network alone.
    pub(super) fn wants_more_remote(&self) -> watch::Receiver<bool> {
        self.wants_more_remote.subscribe()
    }

    /// Whether definitions take their range from the node.
    pub(super) fn wants_own_node(&self) -> watch::Receiver<Want> {
        self.wants_own_node.subscribe()
    }

    /// Changes the objects. They are published soon, together with other changes made in the meantime.
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut Cache) -> T) -> T {
        let (done, is_changed, wants_lists) = {
            let mut cache = locked(&self.cache);
            (change(&mut cache), cache.is_changed(), cache.wants_lists())
        };
        if wants_lists {
            self.room.notify_waiters();
        }
        if is_changed {
            locked(&self.followed).changed.get_or_insert_with(Instant::now);
            self.changed.notify_one();
        }
        done
    }

    /// Waits until refused objects of the kind may fit, so that the kind must be listed again.
    pub(super) async fn has_room(&self, resource: &'static Resource) {
        loop {
            // Registered first: notifications from here on are received.
            let more = self.room.notified();
            if locked(&self.cache).wants_list(resource.content) {
                return;
            }
            more.await;
        }
    }

    /// Records that all objects of the kind have been read, at that path. It is not known yet whether their
    /// changes are followed.
    pub(super) fn complete(&self, resource: &'static Resource, path: &'static str) {
        self.note(resource, |it| {
            (it.complete, it.confirmed, it.served, it.unserved) = (true, true, true, None);
            let older = Some(path).filter(|path| resource.paths.first() != Some(path));
            if older != it.older {
                it.older = older;
                if let Some(problem) = it.of_an_older_version() {
                    tracing::warn!(kind = resource.name, problem, "an older version of the kind is followed");
                }
            }
        });
        self.changed.notify_one();
    }

    /// Records that changes of the kind are being followed.
    pub(super) fn following(&self, resource: &'static Resource) {
        self.note(resource, |it| {
            it.expired = false;
            if let Some((since, _)) = it.failing.take()
                && since.elapsed() >= PATIENCE
            {
                tracing::info!(kind = resource.name, "followed again");
            }
        });
    }

    /// Records that the kind cannot be followed at present.
    pub(super) fn failing(&self, resource: &'static Resource, error: &RequestError) {
        let expired = error.code() == Some(StatusCode::UNAUTHORIZED.as_u16());
        let message = format!("{}{}", Chain(error), if expired { EXPIRED } else { "" });
        let mut followed = locked(&self.followed);
        // A server that rejects the agent does so for every kind, and has often closed its connections
        // before, which says nothing about the reason.
        let (is_told, kind) = match expired {
            true => (followed.kinds.values().any(|it| it.expired), "every kind"),
            false => (followed.of(resource).failing.is_some(), resource.name),
        };
        if !is_told {
            tracing::warn!(kind, error = message, "not followed; it will be tried again");
        }
        let it = followed.of(resource);
        // Any other answer of the server shows that it accepts the token; no answer shows nothing.
        it.expired = if error.code().is_some() { expired } else { it.expired };
        it.unserved = None;
        match &mut it.failing {
            Some((_, known)) => *known = message,
            None => it.failing = Some((Instant::now(), message)),
        }
    }

    /// Returns why changes of the kind are not followed.
    #[cfg(test)]
    pub(super) fn why_failing(&self, resource: &'static Resource) -> Option<String> {
        let followed = locked(&self.followed);
        followed.kinds.get(&resource.content)?.failing.as_ref().map(|(_, why)| why.clone())
    }

    /// Records that the server does not serve the kind. Known objects stay in force. Otherwise an optional
    /// kind has no objects; this is certain once the server has repeated the answer after a while, as a
    /// starting server may not know the kind yet.
    pub(super) fn unserved(&self, resource: &'static Resource) {
        self.note(resource, |it| {
            if it.served {
                let remedy = resource.remedy();
                tracing::warn!(
                    kind = resource.name,
                    "the API server does not serve this kind{remedy}; it will be asked again"
                );
            }
            it.served = false;
            (it.failing, it.expired) = (None, false);
            let since = it.unserved.get_or_insert_with(Instant::now);
            it.confirmed |= it.complete && since.elapsed() >= DOUBT;
            it.complete |= resource.optional;
        });
        self.changed.notify_one();
    }

    /// Begins to follow a kind that is needed, from a list on. `with_more`: all that can be needed of it.
    pub(super) fn begins(&self, resource: &'static Resource, with_more: bool) {
        if resource.content == Content::RemotePods {
            locked(&self.cache).read_pods_of_default(with_more);
        }
        let mut followed = locked(&self.followed);
        followed.kinds.insert(resource.content, Following::new(resource));
        if resource.content == Content::RemotePods {
            followed.has_more_remote = with_more;
        }
    }

    /// Ends following a kind that is no longer needed.
    pub(super) fn forget(&self, resource: &'static Resource) {
        locked(&self.followed).kinds.insert(resource.content, Following::new(resource));
        self.change(|cache| match resource.content {
            Content::RemotePods => {
                let all = cache.unlisted_remote();
                cache.retain_remote(&all);
            }
            Content::Objects(kind) => cache.retain(kind, &Default::default()),
            Content::OwnNode => cache.retain(Kind::Node, &Default::default()),
        });
    }

    fn note(&self, resource: &'static Resource, note: impl FnOnce(&mut Following)) {
        note(locked(&self.followed).of(resource));
    }

    /// Publishes snapshots when there are changes, forever.
    pub(super) async fn publish(&self) {
        let mut tick = ticks(TICK);
        let (mut problems, mut told) = (Vec::new(), LogShare::default());
        let mut next = tokio::time::Instant::now();
        loop {
            // Both futures may be dropped at any time: a notification is kept, and the ticker ticks again.
            tokio::select! {
                () = self.changed.notified() => {}
                _ = tick.tick() => self.change(|cache| cache.expire(Instant::now())),
            }
            // Lets the followers take in received events before the publication.
            tokio::task::yield_now().await;
            tokio::time::sleep_until(next).await;
            self.publish_now(&mut problems, &mut told);
            next = tokio::time::Instant::now() + LEAST_PAUSE;
        }
    }

    fn publish_now(&self, problems: &mut Vec<Problem>, told: &mut LogShare) {
        let wants_more = locked(&self.cache).wants_pods_of_default();
        self.wants_more_remote.send_if_modified(|wanted| std::mem::replace(wanted, wants_more) != wants_more);
        let has_remote = {
            let mut followed = locked(&self.followed);
            followed.wants_more_remote = wants_more;
            followed.has_remote()
        };
        let (wants_remote, wants_own_node) = {
            let cache = locked(&self.cache);
            let own_node = if cache.wants_own_node() { Want::Now } else { Want::Not };
            (cache.wants_remote_pods(!has_remote), own_node)
        };
        for (sender, wants) in [(&self.wants_remote, wants_remote), (&self.wants_own_node, wants_own_node)] {
            sender.send_if_modified(|wanted| std::mem::replace(wanted, wants) != wants);
        }
        let (since, is_first, unknown) = {
            let mut followed = locked(&self.followed);
            if !followed.may_publish(wants_remote) {
                return;
            }
            (followed.changed.take(), !followed.published, followed.unknown(wants_remote))
        };
        let before = self.snapshot();
        let changed = locked(&self.cache).take_changed();
        let changed = changed.or_else(|| (before.unknown != unknown).then(|| (*before).clone()));
        let is_changed = changed.is_some();
        if let Some(objects) = changed {
            let objects = Objects { unknown, ..objects };
            let known: BTreeSet<&Problem> = problems.iter().collect();
            let new = objects.problems.iter().filter(|problem| !known.contains(problem));
            new.for_each(|problem| {
                told.log(problem.namespace(), || tracing::warn!(%problem, "object not in force"));
            });
            problems.clone_from(&objects.problems);
            *self.snapshot.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(objects);
        }
        if is_changed || is_first {
            let took =
                since.map_or(0, |since| u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX));
            self.reading.store(took, Ordering::Relaxed);
            locked(&self.followed).published = true;
            self.version.send_modify(|version| *version += 1);
        }
    }

    /// Whether there is a complete snapshot.
    ///
    /// # Errors
    /// The kinds that have not been read, and why.
    pub(super) fn synced(&self) -> Result<(), NotSynced> {
        let followed = locked(&self.followed);
        if followed.published {
            return Ok(());
        }
        let missing = followed.kinds.values().filter(|it| !it.complete && !it.resource.is_on_demand());
        let missing: Vec<String> = missing.map(Following::missing).collect();
        Err(NotSynced::Incomplete(match missing.is_empty() {
            true => "the pods of other nodes are being read".to_owned(),
            false => missing.join("; "),
        }))
    }

    /// Whether the changes of all kinds are followed, or were interrupted only briefly.
    ///
    /// # Errors
    /// The kind that has not been followed for the longest time, and why.
    pub(super) fn followed(&self) -> Result<(), String> {
        let followed = locked(&self.followed);
        let failing = followed.kinds.values().filter_map(|it| Some((it, it.failing.as_ref()?)));
        let failing = failing.filter(|(_, (since, _))| since.elapsed() >= PATIENCE);
        match failing.min_by_key(|(_, (since, _))| *since) {
            None => Ok(()),
            Some((it, (since, error))) => {
                Err(format!("{} not followed for {} s: {error}", it.resource.name, since.elapsed().as_secs()))
            }
        }
    }

    /// Returns warnings for the operator that fail no ADD.
    pub(super) fn warnings(&self) -> Vec<Warning> {
        let followed = locked(&self.followed);
        let cache = locked(&self.cache);
        let refused = cache.refused().map(|(content, count, first)| Warning {
            object: followed.kinds.get(&content).map_or("", |it| it.resource.name).to_owned(),
            problem: beyond(content, count, first),
        });
        let more = cache.has_more_problems().map(|more| Warning {
            object: "-".to_owned(),
            problem: match more {
                MoreProblems::OfAll => {
                    format!("{} objects or more cannot be read: others are not shown", cache::UNREADABLE)
                }
                MoreProblems::Of(namespace) => format!(
                    "{} objects or more of namespace {namespace} cannot be read: others of it are not shown",
                    cache::UNREADABLE_OF_NAMESPACE
                ),
            },
        });
        let reading = followed.reading_remote();
        followed
            .kinds
            .values()
            .filter_map(Following::warning)
            .chain(reading)
            .chain(refused)
            .chain(more)
            .collect()
    }
}

/// Returns the text for the objects of a kind beyond its bound.
fn beyond(content: Content, count: usize, first: &ObjectName) -> String {
    let or_more = if count >= cache::REMEMBERED { " or more" } else { "" };
    let Content::Objects(kind) = content else {
        return format!(
            "{count}{or_more} are no peers of policies, {first} among them: too many pods are attached in the cluster"
        );
    };
    let bound = cache::budget_of(kind).map(|it| format!("{} have at most {} {}", it.what, it.most, it.unit));
    let bound = bound.unwrap_or_default();
    format!(
        "{count}{or_more} are not in force, {first} among them: {bound}; they are read again when there is room"
    )
}

impl Followed {
    fn of(&mut self, resource: &'static Resource) -> &mut Following {
        self.kinds.entry(resource.content).or_insert_with(|| Following::new(resource))
    }

    /// Whether all needed pods of other nodes have been read once.
    fn has_remote(&self) -> bool {
        let is_complete = self.kinds.get(&REMOTE_PODS.content).is_some_and(|it| it.complete);
        is_complete && (self.has_more_remote || !self.wants_more_remote)
    }

    /// Returns what is unknown in a snapshot that is published now.
    fn unknown(&self, wants_remote: Want) -> Unknown {
        let is_guessed = |it: &Following| it.complete && !it.confirmed && !it.resource.is_on_demand();
        Unknown {
            remote_pods: wants_remote != Want::Not && !self.has_remote(),
            kinds: self.kinds.values().any(is_guessed),
        }
    }

    /// Warns that pods of other nodes are still being read, although something has waited long for them.
    fn reading_remote(&self) -> Option<Warning> {
        self.wanted.filter(|since| since.elapsed() >= PATIENCE)?;
        Some(Warning {
            object: REMOTE_PODS.name.to_owned(),
            problem: "not all read yet: of policies with pods as peers, attachments of an earlier agent keep what it had \
                      enforced, and others admit the pods that have been read"
                .to_owned(),
        })
    }

    /// Whether everything needed has been read.
    fn may_publish(&mut self, wants_remote: Want) -> bool {
        let known = |it: &Following| it.complete || it.resource.is_on_demand();
        if !self.kinds.values().all(known) {
            return false;
        }
        if wants_remote != Want::Now || self.has_remote() {
            self.wanted = None;
            return true;
        }
        self.wanted.get_or_insert_with(Instant::now).elapsed() >= PEERS_PATIENCE
    }
}

impl Following {
    fn new(resource: &'static Resource) -> Self {
        Self {
            resource,
            complete: false,
            confirmed: false,
            served: true,
            unserved: None,
            older: None,
            failing: None,
            expired: false,
        }
    }

    fn missing(&self) -> String {
        match &self.failing {
            Some((_, error)) => format!("{}: {error}", self.resource.name),
            None if !self.served => format!("{}: the API server does not serve them", self.resource.name),
            None => format!("{} are being read", self.resource.name),
        }
    }

    /// Returns what an older API version lacks.
    fn of_an_older_version(&self) -> Option<String> {
        let version = self.older?.rsplit('/').nth(1).unwrap_or_default();
        Some(format!(
            "the API server serves {version} alone, and may cut a policy's endPort off, so that of a range of ports its first \
             one is left{}",
            self.resource.remedy()
        ))
    }

    fn warning(&self) -> Option<Warning> {
        let problem = match &self.failing {
            Some((since, error)) if since.elapsed() >= PATIENCE => format!(
                "not followed for {} s, the last known objects stay in force: {error}",
                since.elapsed().as_secs()
            ),
            _ if !self.served => {
                format!("the API server does not serve this kind{}", self.resource.remedy())
            }
            _ => self.of_an_older_version()?,
        };
        Some(Warning { object: self.resource.name.to_owned(), problem })
    }
}

#[cfg(test)]
#[path = "view_tests.rs"]
mod tests;
