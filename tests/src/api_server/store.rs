//! The objects, and the history that watches and pages of lists are read from.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use serde_json::{Value, json};

use super::kinds::Kind;

/// The first version: higher than numbers that could be counts.
const FIRST_VERSION: u64 = 1000;
/// Changes that are kept. A watch that is further behind gets 410.
const MAX_HISTORY: usize = 200_000;

/// The key of an object: resource, namespace (empty without one), name.
pub(super) type Key = (&'static str, String, String);

/// All objects with one counter of versions.
#[derive(Debug)]
pub(super) struct Store {
    objects: BTreeMap<Key, Arc<Value>>,
    history: VecDeque<Change>,
    version: u64,
    /// A watch or a page from before this version is expired.
    oldest: u64,
    /// The last change that is no longer kept.
    dropped: u64,
}

/// One change of one object.
#[derive(Debug, Clone)]
pub(super) struct Change {
    pub(super) version: u64,
    pub(super) key: Key,
    pub(super) before: Option<Arc<Value>>,
    pub(super) after: Option<Arc<Value>>,
}

impl Store {
    pub(super) fn new() -> Self {
        Self {
            objects: BTreeMap::new(),
            history: VecDeque::new(),
            version: FIRST_VERSION,
            oldest: FIRST_VERSION,
            dropped: 0,
        }
    }

    /// The version of the last change.
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// Returns the version before which nothing is remembered.
    pub(super) fn oldest(&self) -> u64 {
        self.oldest
    }

    /// An object.
    pub(super) fn get(&self, key: &Key) -> Option<Arc<Value>> {
        self.objects.get(key).cloned()
    }

    /// Writes or removes an object; returns it with its new version, or as it was.
    pub(super) fn commit(&mut self, key: Key, after: Option<Value>) -> Arc<Value> {
        self.version += 1;
        let version = self.version;
        let after = after.map(|object| Arc::new(with_version(object, version)));
        let before = match &after {
            Some(object) => self.objects.insert(key.clone(), Arc::clone(object)),
            None => self.objects.remove(&key),
        };
        let result = after.clone().or_else(|| before.clone()).unwrap_or_default();
        self.history.push_back(Change { version, key, before, after });
        while self.history.len() > MAX_HISTORY {
            self.dropped = self.history.pop_front().map_or(self.dropped, |change| change.version);
            self.oldest = self.oldest.max(self.dropped);
        }
        result
    }

    /// Returns the objects of a kind at a version that is not expired, in the order of their keys.
    pub(super) fn list_at(&self, kind: &Kind, version: u64) -> Vec<(Key, Arc<Value>)> {
        let mut found: BTreeMap<&Key, &Arc<Value>> =
            self.objects.iter().filter(|(key, _)| key.0 == kind.resource).collect();
        for change in self.history.iter().rev().take_while(|change| change.version > version) {
            if change.key.0 != kind.resource {
                continue;
            }
            match &change.before {
                Some(object) => found.insert(&change.key, object),
                None => found.remove(&change.key),
            };
        }
        found.into_iter().map(|(key, object)| (key.clone(), Arc::clone(object))).collect()
    }

    /// The changes of a kind after a version, oldest first; `None`: some of them are no longer kept.
    pub(super) fn changes_after(&self, kind: &Kind, version: u64) -> Option<Vec<Change>> {
        if version < self.dropped {
            return None;
        }
        let first = self.history.partition_point(|change| change.version <= version);
        let of_kind = |change: &&Change| change.key.0 == kind.resource;
        Some(self.history.range(first..).filter(of_kind).cloned().collect())
    }

    /// Forgets the history: watches that begin at a version before now, and pages of earlier lists, are expired.
    /// Running watches are not.
    pub(super) fn compact(&mut self) {
        self.version += 1;
        self.oldest = self.version;
    }
}

/// Returns an object with its `resourceVersion`. A value without a map `metadata` stays unchanged.
pub(super) fn with_version(mut object: Value, version: u64) -> Value {
    if object["metadata"].is_object() {
        object["metadata"]["resourceVersion"] = json!(version.to_string());
    }
    object
}
