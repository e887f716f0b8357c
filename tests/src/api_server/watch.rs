//! Watches.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, sleep_until};

use super::content::{Ended, Writer};
use super::query::ObjectPath;
use super::selector::Selector;
use super::shape::Shape;
use super::state::Shared;
use super::status::Failure;
use super::store::{Change, with_version};

/// Duration of a watch without a timeout.
const DEFAULT_TIME: Duration = Duration::from_secs(1800);

/// A watch that is about to begin.
#[derive(Debug)]
pub(super) struct Watch {
    pub(super) shape: Shape,
    pub(super) path: ObjectPath,
    pub(super) selector: Selector,
    pub(super) from: From,
    pub(super) bookmarks: bool,
    pub(super) time: Option<Duration>,
}

/// The start of a watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum From {
    /// After a version.
    Version(u64),
    /// The present objects, as ADDED; `marked`: a bookmark marks their end.
    Present { marked: bool },
}

/// The event of a change.
#[derive(Debug, PartialEq, Eq)]
enum Told<'a> {
    Added(&'a Value),
    Modified(&'a Value),
    Deleted(&'a Value),
}

impl Watch {
    /// Writes events until the client is gone, or the watch's time is over.
    pub(super) async fn run(self, shared: Arc<Shared>, mut out: Writer) {
        // Either way the body ends here.
        let _: Result<(), Ended> = self.events(&shared, &mut out).await;
    }

    async fn events(&self, shared: &Shared, out: &mut Writer) -> Result<(), Ended> {
        let end = Instant::now() + self.time.unwrap_or(DEFAULT_TIME);
        let mut news = shared.news();
        out.begin().await?;
        let mut position = self.first(shared, out).await?;
        let mut next_bookmark = Instant::now() + shared.settings.bookmarks;
        loop {
            shared.faults.released(self.path.kind.resource).await;
            news.mark_unchanged();
            if !shared.is_served(self.path.kind, self.path.version) {
                return Err(Ended);
            }
            let (changes, version) = {
                let store = shared.store();
                (store.changes_after(self.path.kind, position), store.version())
            };
            let Some(changes) = changes else {
                return out.event("ERROR", &Failure::expired(position, version).status()).await;
            };
            for change in changes.iter().filter(|change| self.covers(change)) {
                self.tell(change, out).await?;
            }
            position = version;
            tokio::select! {
                changed = news.changed() => changed.map_err(|_| Ended)?,
                () = sleep_until(next_bookmark), if self.bookmarks => {
                    next_bookmark = Instant::now() + shared.settings.bookmarks;
                    out.event("BOOKMARK", &self.shape.bookmark(position, false)).await?;
                }
                () = sleep_until(end) => {
                    if self.bookmarks {
                        out.event("BOOKMARK", &self.shape.bookmark(position, false)).await?;
                    }
                    return Err(Ended);
                }
                () = out.abandoned() => return Err(Ended),
            }
        }
    }

    /// Writes the present objects, if the watch begins with them. Returns the version from which changes are
    /// reported.
    async fn first(&self, shared: &Shared, out: &mut Writer) -> Result<u64, Ended> {
        let (present, version, oldest) = {
            let store = shared.store();
            (store.list_at(self.path.kind, store.version()), store.version(), store.oldest())
        };
        let marked = match self.from {
            From::Version(asked) if asked < oldest => {
                out.event("ERROR", &Failure::expired(asked, oldest).status()).await?;
                return Err(Ended);
            }
            From::Version(asked) => return Ok(asked.min(version)),
            From::Present { marked } => marked,
        };
        for (_, object) in present.iter().filter(|(key, _)| self.in_namespace(&key.1)) {
            if self.selector.matches(object) {
                out.event("ADDED", &self.shape.object(object)).await?;
            }
        }
        if marked {
            out.event("BOOKMARK", &self.shape.bookmark(version, true)).await?;
        }
        Ok(version)
    }

    fn in_namespace(&self, namespace: &str) -> bool {
        self.path.namespace.as_deref().is_none_or(|own| own == namespace)
    }

    fn covers(&self, change: &Change) -> bool {
        self.in_namespace(&change.key.1)
    }

    async fn tell(&self, change: &Change, out: &mut Writer) -> Result<(), Ended> {
        match told(change, &self.selector) {
            None => Ok(()),
            Some(Told::Added(object)) => out.event("ADDED", &self.shape.object(object)).await,
            Some(Told::Modified(object)) => out.event("MODIFIED", &self.shape.object(object)).await,
            Some(Told::Deleted(object)) => {
                let last = with_version(self.shape.object(object), change.version);
                out.event("DELETED", &last).await
            }
        }
    }
}

/// Returns the event of a change under a selector: an object that begins to match is added, one that no longer
/// matches is deleted.
fn told<'a>(change: &'a Change, selector: &Selector) -> Option<Told<'a>> {
    let matching =
        |object: &'a Option<Arc<Value>>| object.as_deref().filter(|object| selector.matches(object));
    match (matching(&change.before), matching(&change.after)) {
        (None, Some(new)) => Some(Told::Added(new)),
        (Some(_), Some(new)) => Some(Told::Modified(new)),
        (Some(old), None) => Some(Told::Deleted(old)),
        (None, None) => None,
    }
}
