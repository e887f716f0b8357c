//! Follows one kind of objects for as long as the agent runs: lists them, watches from there, and lists again only if
//! the server does not have that version any more, or a watch from there cannot go on. Whatever fails, what is known stays.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::value::RawValue;

use super::backoff::Backoff;
use super::cache::{self, Cache, Unlisted};
use super::client::{Client, RequestError};
use super::list::{GONE, UNKNOWN, list};
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
/// Longest pause that a server can ask for.
const MOST_ASKED: Duration = Duration::from_secs(60);
/// How often a kind is listed again because there is room for what was refused: at its bound a kind is large.
const ROOM: Duration = Duration::from_secs(60);

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
    /// There was one, or the watch has not ended for a while.
    life: bool,
}

impl Follower {
    /// Follows the kind, without end.
    pub(super) async fn run(&self) {
        let mut backoff = Backoff::new(FIRST_PAUSE, MOST_PAUSE);
        let mut position = None;
        let mut next_for_room = tokio::time::Instant::now();
        // Whether the round before had nothing of its watch either.
        let mut again = false;
        let mut before_unserved = BEFORE_UNSERVED.into_iter();
        loop {
            let began = Instant::now();
            let mut had = Had::default();
            let ended = self.round(&mut position, &mut had, next_for_room).await;
            again &= !had.life;
            if position.is_some() {
                before_unserved = BEFORE_UNSERVED.into_iter();
            }
            let pause = match ended {
                Ended::Room => {
                    position = None;
                    next_for_room = tokio::time::Instant::now() + ROOM;
                    continue;
                }
                Ended::Regularly => {
                    backoff.reset();
                    BETWEEN_WATCHES.saturating_sub(began.elapsed())
                }
                Ended::Unserved => before_unserved.next().unwrap_or_else(|| {
                    self.view.unserved(self.resource);
                    UNSERVED
                }),
                Ended::Failed(broken) => {
                    let lists = !broken.may_go_on();
                    let error = broken.error();
                    // The server was restarted, or had forgotten the position: the next round goes well.
                    if again || !passes(&error) {
                        self.view.failing(self.resource, &error);
                    }
                    again = true;
                    if lists {
                        position = None;
                    }
                    // A list costs more than a watch: events between two do not hurry the next.
                    if (had.events && !lists) || began.elapsed() >= MOST_PAUSE {
                        backoff.reset();
                    }
                    let asked = error.refusal().and_then(|refusal| refusal.retry_after).unwrap_or_default();
                    backoff.next().max(asked.min(MOST_ASKED))
                }
            };
            tokio::time::sleep(pause).await;
        }
    }

    /// Lists, unless the position is known, and watches from there until the watch ends, or there is room for what was
    /// refused and it is time to look.
    async fn round(
        &self,
        position: &mut Option<Position>,
        had: &mut Had,
        next_for_room: tokio::time::Instant,
    ) -> Ended {
        if position.is_none() {
            match self.list().await {
                Ok(Some(listed)) => *position = Some(listed),
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
            had.life = true;
            self.view.following(self.resource);
        };
        let room = async {
            tokio::time::sleep_until(next_for_room).await;
            self.view.has_room(self.resource).await;
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

    /// Lists the kind from the first of its paths that is served; `None` if none is.
    async fn list(&self) -> Result<Option<Position>, RequestError> {
        for path in self.resource.paths {
            let target =
                Target { resource: self.resource, path, node: &self.node, watch_seconds: self.watch_seconds };
            let mut listed = self.view.change(|cache| Listed::begin(cache, self.resource.content));
            let take =
                |json: &RawValue| self.view.change(|cache| listed.put(cache, self.resource.content, json));
            match list(&self.client, &target, take).await {
                Ok(version) => {
                    self.view.change(|cache| {
                        listed.finish(cache, self.resource.content);
                        passed(cache, self.resource.content, Some(&version));
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
            (Event::Bookmark(json), content) => passed(cache, content, cache::version(json).as_deref()),
        });
    }
}

/// A list or a watch has come to this version.
fn passed(cache: &mut Cache, content: Content, version: Option<&str>) {
    if let Content::Objects(kind) = content {
        cache.passed(kind, version);
    }
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
