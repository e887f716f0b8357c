//! The requests of clients.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::query::Verb;

/// One request.
#[derive(Debug, Clone)]
pub struct Request {
    /// When its head and body had arrived.
    pub at: Instant,
    /// Its verb.
    pub verb: Verb,
    /// API group and version as in `apiVersion`; empty if it does not concern objects.
    pub api_version: String,
    /// Plural name, `pods/status` for a subresource; the path if it does not concern objects.
    pub resource: String,
    /// Namespace.
    pub namespace: Option<String>,
    /// Name.
    pub name: Option<String>,
    /// Parameters of the query.
    pub query: BTreeMap<String, String>,
    /// Header `Accept`.
    pub accept: String,
    /// Header `User-Agent`.
    pub user_agent: String,
    /// The bearer token.
    pub token: Option<String>,
    /// The body as JSON; null without one.
    pub body: Value,
    /// Number of its connection.
    pub connection: u64,
    /// HTTP status of the answer; `None` if there is none yet.
    pub answer: Option<u16>,
}

impl Request {
    /// `pods default/web`, as assertions are best read.
    pub fn subject(&self) -> String {
        match (&self.namespace, &self.name) {
            (Some(namespace), Some(name)) => format!("{} {namespace}/{name}", self.resource),
            (Some(namespace), None) => format!("{} {namespace}/", self.resource),
            (None, Some(name)) => format!("{} {name}", self.resource),
            (None, None) => self.resource.clone(),
        }
    }

    /// Whether it reads or writes an object or a collection, other than by a watch.
    pub fn is_call(&self) -> bool {
        !matches!(self.verb, Verb::Watch | Verb::Other)
    }
}

/// All requests, in the order of their arrival.
#[derive(Debug, Default)]
pub(super) struct Log {
    entries: Mutex<Vec<Request>>,
    changed: Condvar,
}

impl Log {
    fn entries(&self) -> MutexGuard<'_, Vec<Request>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a request; returns its number.
    pub(super) fn add(&self, request: Request) -> usize {
        let mut entries = self.entries();
        entries.push(request);
        self.changed.notify_all();
        entries.len() - 1
    }

    /// Records the status of the answer.
    pub(super) fn answered(&self, number: usize, code: u16) {
        if let Some(entry) = self.entries().get_mut(number) {
            entry.answer = Some(code);
        }
        self.changed.notify_all();
    }

    /// The requests from that number on.
    pub(super) fn since(&self, number: usize) -> Vec<Request> {
        self.entries().get(number..).unwrap_or_default().to_vec()
    }

    pub(super) fn len(&self) -> usize {
        self.entries().len()
    }

    /// Waits until the requests from a number on are as wanted.
    pub(super) fn wait(
        &self,
        number: usize,
        patience: Duration,
        mut wanted: impl FnMut(&[Request]) -> bool,
    ) -> bool {
        let entries = self.entries();
        let unlike = |entries: &mut Vec<Request>| !wanted(entries.get(number..).unwrap_or_default());
        let waited = self.changed.wait_timeout_while(entries, patience, unlike);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}
