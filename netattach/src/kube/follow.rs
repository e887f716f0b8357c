//! Follows one kind of objects for as long as the agent runs: lists them, watches from the list's version,
//! and lists again only if the server no longer has that version, or a watch from it cannot continue. Known
//! objects are kept through all failures.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::value::RawValue;

use super::backoff::Backoff;
use super::cache::{self, Cache, Unlisted};
use super::client::{Client, RequestError};
use super::list::{GONE, UNKNOWN, list, version_now};
use super::resource::{Content, Resource, Target};
use super::view::View;
use super::watch::{Broken, Event, watch};
use crate::pace::spread;
use crate::source::read::Kind;
use crate::source::read::manifest::Key;

/// Pauses between attempts.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const MOST_PAUSE: Duration = Duration::from_secs(30);
/// How often a kind that the server does not serve is requested again.
const UNSERVED: Duration = Duration::from_secs(30);
/// The pauses before a kind counts as not served: a server that is starting, or one of several servers that
/// is not up to date, may not know it yet. Concluding too early would disable the kind's policies.
const BEFORE_UNSERVED: [Duration; 3] =
    [Duration::from_millis(500), Duration::from_secs(1), Duration::from_secs(2)];
/// Least time between two watches, if a server ends each after an event.
const BETWEEN_WATCHES: Duration = Duration::from_secs(1);
/// Consecutive refusals of one version after which the kind is listed: a server whose history was restored
/// to an earlier state may answer neither 404 nor 410 for a version that it has not reached yet.
const REFUSALS: u32 = 3;
/// Least and most time between two lists that are made because refused objects may fit: at its bound a kind
/// is large. The time doubles while lists keep no formerly refused object.
const ROOM: Duration = Duration::from_secs(60);
const MOST_ROOM: Duration = Duration::from_secs(960);

/// Follows a kind, and reports to the view.
pub(super) struct Follower {
    pub(super) client: Arc<Client>,
    pub(super) view: Arc<View>,
    pub(super) resource: &'static Resource,
    pub(super) node: Arc<str>,
    /// The setting `kubernetes.watchSeconds`.
    pub(super) watch_seconds: u32,
    /// See [`Target::left_out`].
    pub(super) left_out: Arc<str>,
}

/// A version of a kind, from which to watch.
struct Position {
    path: &'static str,
    version: String,
}

/// When a kind may be listed again for refused objects.
struct ForRoom {
    backoff: Backoff,
    next: tokio::time::Instant,
    /// The next list is for refused objects.
    is_next: bool,
}

impl ForRoom {
    fn new(now: tokio::time::Instant) -> Self {
        // A pause is at least half its length.
        Self { backoff: Backoff::new(ROOM * 2, MOST_ROOM), next: now, is_next: false }
    }

    /// The kind has been listed. `has_admitted`: a formerly refused object was kept.
    fn listed(&mut self, has_admitted: bool, now: tokio::time::Instant) {
        if !std::mem::take(&mut self.is_next) {
            return;
        }
        if has_admitted {
            self.backoff.reset();
        }
        self.next = now + self.backoff.next();
    }
}

/// Why a round has ended.
enum Ended {
    /// The watch ended after its time.
    Regularly,
    Unserved,
    /// Refused objects may fit now.
    Room,
    Failed(Broken),
}

/// What a round has received from its watch.
#[derive(Default)]
struct Had {
    /// At least one event.
    events: bool,
    /// When the first event came, or the watch had lasted for a while.
    lives_since: Option<Instant>,
}

impl Had {
    fn has_lived_for(&self, time: Duration) -> bool {
        self.lives_since.is_some_and(|since| since.elapsed() >= time)
    }
}

impl Follower {
    /// Follows the kind, forever.
    pub(super) async fn run(&self) {
        let mut backoff = Backoff::new(FIRST_PAUSE, MOST_PAUSE);
        let mut position = None;
        let mut room = ForRoom::new(tokio::time::Instant::now());
        // Whether the previous round received nothing from its watch either.
        let mut again = false;
        // Whether the server has reported since then that it no longer has the version.
        let mut was_gone = false;
        let mut refusals = 0;
        let mut before_unserved = BEFORE_UNSERVED.into_iter();
        loop {
            let began = Instant::now();
            let mut had = Had::default();
            let ended = self.round(&mut position, &mut had, &mut room).await;
            if had.lives_since.is_some() {
                (again, was_gone, refusals) = (false, false, 0);
            }
            if position.is_some() {
                before_unserved = BEFORE_UNSERVED.into_iter();
            }
            let pause = match ended {
                Ended::Room => {
                    (position, room.is_next, refusals) = (None, true, 0);
                    continue;
                }
                Ended::Regularly => {
                    backoff.reset();
                    if self.is_outdated(position.as_ref(), &had).await {
                        position = None;
                    }
                    BETWEEN_WATCHES.saturating_sub(began.elapsed())
                }
                Ended::Unserved => before_unserved.next().unwrap_or_else(|| {
                    self.view.unserved(self.resource);
                    UNSERVED
                }),
                Ended::Failed(broken) => {
                    refusals += u32::from(position.is_some() && broken.denies_position());
                    let lists = !broken.may_go_on() || refusals >= REFUSALS;
                    let error = broken.error();
                    // The server was restarted, or has dropped the version: the next round will succeed.
                    if again || !passes(&error) {
                        self.view.failing(self.resource, &error);
                    }
                    if lists {
                        (position, refusals) = (None, 0);
                    }
                    // A list costs more than a watch, so events between two lists do not shorten the pause.
                    // Neither does the duration of a list, which is long if the server is busy.
                    if (had.events && !lists) || had.has_lived_for(MOST_PAUSE) {
                        backoff.reset();
                    }
                    let pause = backoff.next().max(error.asked_pause());
                    again = true;
                    // The history of one server ends for all agents at once.
                    if error.code() == Some(GONE) && !std::mem::replace(&mut was_gone, true) {
                        pause.max(spread(self.resource.spread()))
                    } else {
                        pause
                    }
                }
            };
            tokio::time::sleep(pause).await;
        }
    }

    /// Lists, unless the version is known, and watches from it until the watch ends, or until refused
    /// objects may fit and their list is due.
    async fn round(&self, position: &mut Option<Position>, had: &mut Had, room: &mut ForRoom) -> Ended {
        if position.is_none() {
            match self.list().await {
                Ok(Some(listed)) => {
                    *position = Some(listed);
                    let has_admitted = self.view.change(|cache| cache.has_admitted(self.resource.content));
                    room.listed(has_admitted, tokio::time::Instant::now());
                }
                Ok(None) => return Ended::Unserved,
                Err(error) => return Ended::Failed(Broken::Off(error)),
            }
        }
        let Some(Position { path, version }) = position else { return Ended::Unserved };
        let target = self.target(path);
        let from = version.clone();
        let take = |event: Event<'_>| {
            let json = match event {
                Event::Applied(json) | Event::Deleted(json) | Event::Bookmark(json) => json,
            };
            if let Some(newer) = cache::version(json) {
                *version = newer;
            }
            had.events = true;
            self.take(&event);
        };
        let lives = || {
            had.lives_since = Some(Instant::now());
            self.view.following(self.resource);
        };
        let next_for_room = room.next;
        let room = async {
            tokio::time::sleep_until(next_for_room).await;
            self.view.has_room(self.resource).await;
            // All agents have room at the same time.
            tokio::time::sleep(spread(self.resource.spread())).await;
        };
        // Both may be dropped: a watch restarts from the last version, or after a list.
        tokio::select! {
            ended = watch(&self.client, &target, &from, lives, take) => match ended {
                Ok(()) => Ended::Regularly,
                Err(broken) => Ended::Failed(broken),
            },
            () = room => Ended::Room,
        }
    }

    /// Whether the kind must be listed although its watch has ended after its time: a newer API version is
    /// served now, or the server's history was restored to an earlier state. A watch from a future version
    /// receives nothing, not even a bookmark.
    async fn is_outdated(&self, position: Option<&Position>, had: &Had) -> bool {
        let Some(&Position { path, ref version }) = position else { return false };
        let newest = self.resource.paths.first().copied().filter(|newest| *newest != path);
        if let Some(newest) = newest
            && version_now(&self.client, &self.target(newest)).await.is_ok()
        {
            return true;
        }
        if had.events {
            return false;
        }
        let now = version_now(&self.client, &self.target(path)).await;
        let went_back = now.is_ok_and(|now| is_before(&now, version));
        if went_back {
            tracing::warn!(
                kind = self.resource.name,
                "the API server was put back to an earlier state: listed again"
            );
        }
        went_back
    }

    /// Lists the kind from the first of its paths that is served; `None` if none is.
    async fn list(&self) -> Result<Option<Position>, RequestError> {
        for path in self.resource.paths {
            let target = self.target(path);
            let mut listed = self.view.change(|cache| Listed::begin(cache, self.resource.content));
            let take =
                |json: &RawValue| self.view.change(|cache| listed.put(cache, self.resource.content, json));
            let failed = |error: &RequestError| self.view.failing(self.resource, error);
            match list(&self.client, &target, take, failed).await {
                Ok(version) => {
                    self.view.change(|cache| {
                        listed.finish(cache, self.resource.content);
                        if let Content::Objects(kind) = self.resource.content {
                            cache.listed(kind, &version);
                        }
                    });
                    self.view.complete(self.resource, path);
                    return Ok(Some(Position { path, version }));
                }
                Err(error) if error.code() == Some(UNKNOWN) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    fn target(&self, path: &'static str) -> Target<'_> {
        let Self { resource, watch_seconds, .. } = *self;
        Target { resource, path, node: &self.node, watch_seconds, left_out: &self.left_out }
    }

    fn take(&self, event: &Event<'_>) {
        self.view.change(|cache| match (event, self.resource.content) {
            (Event::Applied(json), Content::Objects(kind)) => drop(cache.put(kind, json)),
            (Event::Applied(json), Content::RemotePods) => drop(cache.put_remote(json)),
            (Event::Applied(json), Content::OwnNode) => drop(cache.put(Kind::Node, json)),
            (Event::Deleted(json), Content::Objects(kind)) => cache.remove(kind, json),
            (Event::Deleted(json), Content::RemotePods) => cache.remove_remote(json),
            (Event::Deleted(json), Content::OwnNode) => cache.remove(Kind::Node, json),
            (Event::Bookmark(json), Content::Objects(kind)) => {
                cache.passed(kind, cache::version(json).as_deref());
            }
            (Event::Bookmark(_), Content::RemotePods | Content::OwnNode) => {}
        });
    }
}

/// Whether a version precedes another one of the same kind. `false` if they are no numbers.
fn is_before(version: &str, other: &str) -> bool {
    matches!((cache::number(version), cache::number(other)), (Some(version), Some(other)) if version < other)
}

/// Whether an error may occur once without a problem, if the next round succeeds.
fn passes(error: &RequestError) -> bool {
    matches!(error, RequestError::Ended { .. }) || matches!(error.code(), Some(GONE | UNKNOWN))
}

/// The names in a list; of pods of other nodes, those not in it.
#[derive(Default)]
struct Listed {
    objects: BTreeSet<Key>,
    remote: Unlisted,
}

impl Listed {
    fn begin(cache: &mut Cache, content: Content) -> Self {
        cache.list_begins(content);
        match content {
            Content::RemotePods => Self { remote: cache.unlisted_remote(), ..Self::default() },
            Content::Objects(_) | Content::OwnNode => Self::default(),
        }
    }

    fn put(&mut self, cache: &mut Cache, content: Content, json: &RawValue) {
        match content {
            Content::Objects(kind) => self.objects.extend(cache.put(kind, json)),
            Content::RemotePods => {
                if let Some(name) = cache.put_remote(json) {
                    self.remote.remove(&name);
                }
            }
            Content::OwnNode => self.objects.extend(cache.put(Kind::Node, json)),
        }
    }

    fn finish(&self, cache: &mut Cache, content: Content) {
        match content {
            Content::Objects(kind) => cache.retain(kind, &self.objects),
            Content::RemotePods => cache.retain_remote(&self.remote),
            Content::OwnNode => cache.retain(Kind::Node, &self.objects),
        }
    }
}

#[cfg(test)]
#[path = "follow_tests.rs"]
mod tests;
