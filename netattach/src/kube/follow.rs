//! Follows one kind of objects for as long as the agent runs: lists them, watches from there, and lists again only if
//! the server does not have that version any more, or a watch from there cannot go on. Whatever fails, what is known stays.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::value::RawValue;

use super::backoff::{Backoff, spread};
use super::cache::{self, Cache, Unlisted};
use super::client::{Client, RequestError};
use super::list::{GONE, UNKNOWN, list, version_now};
use super::resource::{Content, Resource, Target};
use super::view::View;
use super::watch::{Broken, Event, watch};
use crate::source::read::Kind;
use crate::source::read::manifest::Key;

/// Pauses between tries.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const MOST_PAUSE: Duration = Duration::from_secs(30);
/// How often a kind that the server does not serve is asked for again.
const UNSERVED: Duration = Duration::from_secs(30);
/// The pauses before a kind counts as one that the server does not serve: a server that is being started, or one of several
/// that is not up to date, may not know it yet. Without it, its policies would not be in force.
const BEFORE_UNSERVED: [Duration; 3] =
    [Duration::from_millis(500), Duration::from_secs(1), Duration::from_secs(2)];
/// Least time from one watch to the next of a server that ends each after an event.
const BETWEEN_WATCHES: Duration = Duration::from_secs(1);
/// Refusals in a row of one position, after which the kind is listed: there may be a server that has put back its history,
/// and says of a version that is still to come neither 404 nor 410.
const REFUSALS: u32 = 3;
/// Least and most time from one list to the next that is made because there is room for what was refused: at its bound a
/// kind is large. The time doubles while lists have nothing kept that was refused.
const ROOM: Duration = Duration::from_secs(60);
const MOST_ROOM: Duration = Duration::from_secs(960);

/// A kind, and those to tell.
pub(super) struct Follower {
    pub(super) client: Arc<Client>,
    pub(super) view: Arc<View>,
    pub(super) resource: &'static Resource,
    pub(super) node: Arc<str>,
    /// The setting `kubernetes.watchSeconds`.
    pub(super) watch_seconds: u32,
}

/// A position in the history of a kind.
struct Position {
    path: &'static str,
    version: String,
}

/// When a kind may be listed again because there is room for what was refused.
struct ForRoom {
    backoff: Backoff,
    next: tokio::time::Instant,
    /// The next list is one of these.
    is_next: bool,
}

impl ForRoom {
    fn new(now: tokio::time::Instant) -> Self {
        // A pause is of at least half its length.
        Self { backoff: Backoff::new(ROOM * 2, MOST_ROOM), next: now, is_next: false }
    }

    /// The kind has been listed. `has_admitted`: there was room for one that had been refused.
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
    /// The watch ended as it should.
    Regularly,
    Unserved,
    /// What was refused may fit now.
    Room,
    Failed(Broken),
}

/// What a round had of its watch.
#[derive(Default)]
struct Had {
    /// There was an event.
    events: bool,
    /// When there was the first, or the watch had not ended for a while.
    lives_since: Option<Instant>,
}

impl Had {
    fn has_lived_for(&self, time: Duration) -> bool {
        self.lives_since.is_some_and(|since| since.elapsed() >= time)
    }
}

impl Follower {
    /// Follows the kind, without end.
    pub(super) async fn run(&self) {
        let mut backoff = Backoff::new(FIRST_PAUSE, MOST_PAUSE);
        let mut position = None;
        let mut room = ForRoom::new(tokio::time::Instant::now());
        // Whether the round before had nothing of its watch either.
        let mut again = false;
        // Whether the server has said since then that it does not have the position any more.
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
                    // The server was restarted, or had forgotten the position: the next round goes well.
                    if again || !passes(&error) {
                        self.view.failing(self.resource, &error);
                    }
                    if lists {
                        (position, refusals) = (None, 0);
                    }
                    // A list costs more than a watch: events between two do not hurry the next. Nor does the time that a list
                    // takes: it is long where the server has much to do.
                    if (had.events && !lists) || had.has_lived_for(MOST_PAUSE) {
                        backoff.reset();
                    }
                    let pause = backoff.next().max(error.asked_pause());
                    again = true;
                    // One server's history has ended for all agents at once.
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

    /// Lists, unless the position is known, and watches from there until the watch ends, or there is room for what was
    /// refused and it is time to look.
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
        let target =
            Target { resource: self.resource, path, node: &self.node, watch_seconds: self.watch_seconds };
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
            // All agents have the same room at the same time.
            tokio::time::sleep(spread(self.resource.spread())).await;
        };
        // Both may be dropped: a watch begins anew from the last version, or after a list.
        tokio::select! {
            ended = watch(&self.client, &target, &from, lives, take) => match ended {
                Ok(()) => Ended::Regularly,
                Err(broken) => Ended::Failed(broken),
            },
            () = room => Ended::Room,
        }
    }

    /// Whether the kind has to be listed though its watch has ended as it should: a newer version is served by now, or the
    /// server has put back its history. A watch from a version that is still to come tells nothing, not even a bookmark.
    async fn is_outdated(&self, position: Option<&Position>, had: &Had) -> bool {
        let Some(&Position { path, ref version }) = position else { return false };
        let target = |path: &'static str| Target {
            resource: self.resource,
            path,
            node: &self.node,
            watch_seconds: self.watch_seconds,
        };
        let newest = self.resource.paths.first().copied().filter(|newest| *newest != path);
        if let Some(newest) = newest
            && version_now(&self.client, &target(newest)).await.is_ok()
        {
            return true;
        }
        if had.events {
            return false;
        }
        let now = version_now(&self.client, &target(path)).await;
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
            let target =
                Target { resource: self.resource, path, node: &self.node, watch_seconds: self.watch_seconds };
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

/// Whether a version is before another one of the same kind. Those that are no numbers are not compared.
fn is_before(version: &str, other: &str) -> bool {
    matches!((cache::number(version), cache::number(other)), (Some(version), Some(other)) if version < other)
}

/// Whether an error is usual once, and none when the next round goes well.
fn passes(error: &RequestError) -> bool {
    matches!(error, RequestError::Ended { .. }) || matches!(error.code(), Some(GONE | UNKNOWN))
}

/// The names that a list has had, of pods of other nodes those that it has not had.
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
