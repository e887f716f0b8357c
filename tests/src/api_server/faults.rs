//! What goes wrong on purpose.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use super::log::Request;
use super::query::Verb;

/// What goes wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// The answer comes later.
    Delay(Duration),
    /// A `Status` of that HTTP code. 429 has `Retry-After: 1`.
    Answer(u16),
    /// A `Status` of that HTTP code, with `Retry-After` in seconds.
    AnswerRetryAfter(u16, u64),
    /// The request is never answered; the connection stays open.
    NoAnswer,
    /// The connection is reset before the answer.
    Reset,
    /// The answer stops in the middle, or a watch after so many events.
    CutOff {
        /// Events of a watch, bookmarks included, that arrive whole; nothing to other answers.
        after: usize,
        /// How it stops.
        how: CutOff,
    },
    /// The body comes at this many bytes a second.
    Slow(usize),
}

/// How an answer stops in the middle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CutOff {
    /// The connection is reset.
    Reset,
    /// The body ends as if it were whole.
    End,
    /// Half of what comes next, then silence; the connection stays open.
    Silence,
    /// A watch gets an ERROR event with a `Status` of that code, then ends. Other answers end.
    Error(u16),
}

/// Which requests a fault hits.
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

    /// Those of them that are for an object of that name.
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
    /// How often yet; `None`: until it is lifted.
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

    /// A fault that hits so many requests. Of several such faults, each request is hit by the first that has not had
    /// its number: they follow one another.
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

    /// How many requests a fault has hit, while it is not lifted.
    pub fn hits(&self, id: FaultId) -> usize {
        self.active().faults.iter().find(|entry| entry.id == id.0).map_or(0, |entry| entry.hits)
    }

    fn stale(&self) -> MutexGuard<'_, BTreeMap<String, u64>> {
        self.stale.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lists of a resource are of that version from now on, until all faults end: the answers of a server whose cache is
    /// behind. Watches that begin there tell everything since.
    pub(super) fn list_at(&self, resource: &str, version: u64) {
        self.stale().insert(resource.to_owned(), version);
    }

    /// The version of which lists of a resource are, if not of the newest.
    pub(super) fn listed_at(&self, resource: &str) -> Option<u64> {
        self.stale().get(resource).copied()
    }

    /// Ends every fault, and lets held watches go on.
    pub fn clear(&self) {
        self.active().faults.clear();
        self.stale().clear();
        self.held.send_modify(BTreeSet::clear);
    }

    /// Watches of a resource tell nothing from now on, until [`Faults::release_watches`]: the cache of a client lags.
    pub fn hold_watches(&self, resource: &str) {
        self.held.send_modify(|held| {
            held.insert(resource.to_owned());
        });
    }

    /// Watches of a resource tell what happened in the meantime, and go on.
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

    /// What hits a request.
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
