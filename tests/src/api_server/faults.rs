//! Deliberate faults.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use super::log::Request;
use super::query::Verb;

/// A fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// The answer is delayed.
    Delay(Duration),
    /// A `Status` of that HTTP code. 429 has `Retry-After: 1`.
    Answer(u16),
    /// A `Status` of that HTTP code, with `Retry-After` in seconds.
    AnswerRetryAfter(u16, u64),
    /// The request is never answered; the connection stays open.
    NoAnswer,
    /// The connection is reset before the answer.
    Reset,
    /// The answer is cut off in the middle, or a watch after that many events.
    CutOff {
        /// Events of a watch, bookmarks included, that arrive whole; ignored for other answers.
        after: usize,
        /// The form of the cut.
        how: CutOff,
    },
    /// The body is sent at this many bytes per second.
    Slow(usize),
}

/// How an answer is cut off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CutOff {
    /// The connection is reset.
    Reset,
    /// The body ends as if it were whole.
    End,
    /// Half of the next part, then silence; the connection stays open.
    Silence,
    /// A watch gets an ERROR event with a `Status` of that code, then ends. Other answers end.
    Error(u16),
}

/// The requests that a fault affects.
#[derive(Debug, Clone, Default)]
pub struct When {
    verb: Option<Verb>,
    resource: Option<String>,
    name: Option<String>,
}

impl When {
    /// Every request.
    pub fn any() -> Self {
        Self::default()
    }

    /// Requests of a verb for a resource, `pods/status` for a subresource.
    pub fn on(verb: Verb, resource: &str) -> Self {
        Self { verb: Some(verb), resource: Some(resource.to_owned()), name: None }
    }

    /// Requests of a verb.
    pub fn verb(verb: Verb) -> Self {
        Self { verb: Some(verb), ..Self::default() }
    }

    /// Requests for a resource.
    pub fn resource(resource: &str) -> Self {
        Self { resource: Some(resource.to_owned()), ..Self::default() }
    }

    /// Restricts them to requests for an object of that name.
    #[must_use]
    pub fn named(mut self, name: &str) -> Self {
        self.name = Some(name.to_owned());
        self
    }

    fn matches(&self, request: &Request) -> bool {
        self.verb.is_none_or(|verb| verb == request.verb)
            && self.resource.as_ref().is_none_or(|resource| *resource == request.resource)
            && self.name.as_ref().is_none_or(|name| request.name.as_ref() == Some(name))
    }
}

/// Names a fault, to lift it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FaultId(u64);

/// The faults of a server.
#[derive(Debug)]
pub struct Faults {
    active: Mutex<Active>,
    held: watch::Sender<BTreeSet<String>>,
    /// Versions of which lists of a resource are.
    stale: Mutex<BTreeMap<String, u64>>,
}

#[derive(Debug, Default)]
struct Active {
    last: u64,
    faults: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    id: u64,
    when: When,
    /// The remaining number of requests; `None`: until the fault is lifted.
    left: Option<usize>,
    hits: usize,
    fault: Fault,
}

impl Faults {
    pub(super) fn new() -> Self {
        Self { active: Mutex::default(), held: watch::Sender::new(BTreeSet::new()), stale: Mutex::default() }
    }

    fn active(&self) -> MutexGuard<'_, Active> {
        self.active.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a fault that affects that many requests. Of several such faults, each request is affected by the first
    /// that has requests left: they follow one another.
    pub fn times(&self, count: usize, when: When, fault: Fault) -> FaultId {
        self.add(Some(count), when, fault)
    }

    /// A fault until it is lifted.
    pub fn always(&self, when: When, fault: Fault) -> FaultId {
        self.add(None, when, fault)
    }

    fn add(&self, left: Option<usize>, when: When, fault: Fault) -> FaultId {
        let mut active = self.active();
        active.last += 1;
        let id = active.last;
        active.faults.push(Entry { id, when, left, hits: 0, fault });
        FaultId(id)
    }

    /// Ends a fault; returns how many requests it has hit.
    pub fn lift(&self, id: FaultId) -> usize {
        let mut active = self.active();
        let hits = active.faults.iter().find(|entry| entry.id == id.0).map_or(0, |entry| entry.hits);
        active.faults.retain(|entry| entry.id != id.0);
        hits
    }

    /// Returns how many requests a fault has affected, while it is not lifted.
    pub fn hits(&self, id: FaultId) -> usize {
        self.active().faults.iter().find(|entry| entry.id == id.0).map_or(0, |entry| entry.hits)
    }

    fn stale(&self) -> MutexGuard<'_, BTreeMap<String, u64>> {
        self.stale.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lists of a resource are of that version from now on, until all faults end: the answers of a server whose cache
    /// is behind. Watches that begin there report everything since.
    pub(super) fn list_at(&self, resource: &str, version: u64) {
        self.stale().insert(resource.to_owned(), version);
    }

    /// The version of which lists of a resource are, if not of the newest.
    pub(super) fn listed_at(&self, resource: &str) -> Option<u64> {
        self.stale().get(resource).copied()
    }

    /// Ends every fault, and lets held watches continue.
    pub fn clear(&self) {
        self.active().faults.clear();
        self.stale().clear();
        self.held.send_modify(BTreeSet::clear);
    }

    /// Watches of a resource report nothing from now on, until [`Faults::release_watches`]: the cache of a client
    /// lags.
    pub fn hold_watches(&self, resource: &str) {
        self.held.send_modify(|held| {
            held.insert(resource.to_owned());
        });
    }

    /// Watches of a resource report the changes in the meantime, and continue.
    pub fn release_watches(&self, resource: &str) {
        self.held.send_modify(|held| {
            held.remove(resource);
        });
    }

    /// Waits until watches of a resource may speak.
    pub(super) async fn released(&self, resource: &str) {
        // An error means that the server ends.
        let _ = self.held.subscribe().wait_for(|held| !held.contains(resource)).await;
    }

    /// Returns the faults that affect a request.
    pub(super) fn hit(&self, request: &Request) -> Vec<Fault> {
        let mut hits = Vec::new();
        let mut is_counted = false;
        for entry in &mut self.active().faults {
            let is_due = entry.left.is_none_or(|left| left > 0 && !is_counted);
            if is_due && entry.when.matches(request) {
                is_counted |= entry.left.is_some();
                entry.left = entry.left.map(|left| left - 1);
                entry.hits += 1;
                hits.push(entry.fault.clone());
            }
        }
        hits
    }
}
