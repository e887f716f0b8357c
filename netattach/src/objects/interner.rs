//! Shares equal values: the pods of a Deployment have the same labels, all pods of a network its name.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Weak};

use super::labels::Labels;
use super::remote::Common;
use super::{ContainerPort, Place};

/// The values that pods of other nodes share. Keeps no value alive: a value that no pod uses any more is
/// dropped.
#[derive(Debug, Default)]
pub struct Interner {
    labels: Pool<Labels>,
    places: Pool<Place>,
    ports: Pool<[ContainerPort]>,
    namespaces: Pool<str>,
    commons: Pool<Common>,
}

impl Interner {
    /// Returns the shared value of these labels.
    pub fn labels(&mut self, labels: Labels) -> Arc<Labels> {
        self.labels.share(labels)
    }

    /// Returns the shared value of this network.
    pub fn place(&mut self, place: Place) -> Arc<Place> {
        self.places.share(place)
    }

    /// Returns the shared value of these ports.
    pub fn ports(&mut self, ports: Vec<ContainerPort>) -> Arc<[ContainerPort]> {
        self.ports.share(ports)
    }

    /// Returns the shared name of this namespace.
    pub fn namespace(&mut self, name: &str) -> Arc<str> {
        self.namespaces.share(name)
    }

    /// Returns the shared value of what the pods of a workload have in common.
    pub(super) fn common(&mut self, common: Common) -> Arc<Common> {
        self.commons.share(common)
    }
}

/// Values of one type by their hash. If two values have one hash, the later one is not shared, which only
/// costs memory.
#[derive(Debug)]
struct Pool<T: ?Sized> {
    by_hash: HashMap<u64, Weak<T>>,
    /// The number of values at which unused ones are removed: twice the number left the last time.
    full_at: usize,
}

/// Smaller pools are not searched for unused values.
const SMALL: usize = 64;

impl<T: ?Sized> Default for Pool<T> {
    fn default() -> Self {
        Self { by_hash: HashMap::new(), full_at: SMALL }
    }
}

impl<T: Hash + Eq + ?Sized> Pool<T> {
    fn share<V: Borrow<T> + Into<Arc<T>>>(&mut self, value: V) -> Arc<T> {
        let mut hasher = DefaultHasher::new();
        value.borrow().hash(&mut hasher);
        self.share_as(hasher.finish(), value)
    }

    fn share_as<V: Borrow<T> + Into<Arc<T>>>(&mut self, hash: u64, value: V) -> Arc<T> {
        if self.by_hash.len() >= self.full_at {
            self.forget();
        }
        match self.by_hash.entry(hash) {
            Entry::Occupied(mut entry) => match entry.get().upgrade() {
                Some(known) if *known == *value.borrow() => known,
                Some(_) => value.into(),
                None => {
                    let value = value.into();
                    entry.insert(Arc::downgrade(&value));
                    value
                }
            },
            Entry::Vacant(entry) => {
                let value = value.into();
                entry.insert(Arc::downgrade(&value));
                value
            }
        }
    }

    /// Removes values that no pod uses any more. Between two calls at least as many values are added as the
    /// first call leaves.
    fn forget(&mut self) {
        self.by_hash.retain(|_, value| value.strong_count() > 0);
        self.by_hash.shrink_to_fit();
        self.full_at = SMALL.max(2 * self.by_hash.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(value: usize) -> Labels {
        Labels::from([("app".to_owned(), value.to_string())])
    }

    #[test]
    fn equal_values_are_one_while_somebody_has_it() {
        let mut interner = Interner::default();
        let first = interner.labels(labels(1));
        assert!(Arc::ptr_eq(&first, &interner.labels(labels(1))));
        assert!(!Arc::ptr_eq(&first, &interner.labels(labels(2))));
        let before = Arc::downgrade(&first);
        drop(first);
        assert!(before.upgrade().is_none(), "the interner keeps nothing alive");
        assert_eq!(*interner.labels(labels(1)), labels(1));
        let (one, other) = (interner.place(Place::Default), interner.place(Place::Default));
        assert!(Arc::ptr_eq(&one, &other));
        let (one, other) = (interner.namespace("shop"), interner.namespace("shop"));
        assert!(Arc::ptr_eq(&one, &other));
    }

    #[test]
    fn forgotten_values_take_no_room() {
        let mut interner = Interner::default();
        let kept: Vec<_> = (0..10).map(|number| interner.labels(labels(number))).collect();
        for number in 0..10_000 {
            drop(interner.labels(labels(10 + number)));
        }
        let left = interner.labels.by_hash.len();
        assert!(left <= SMALL, "{left}");
        for (number, kept) in kept.iter().enumerate() {
            assert!(Arc::ptr_eq(kept, &interner.labels(labels(number))));
        }
        let many: Vec<_> = (0..1000).map(|number| interner.labels(labels(number))).collect();
        drop(many);
        interner.labels.forget();
        assert_eq!(interner.labels.by_hash.len(), 10);
    }

    #[test]
    fn values_of_one_hash_are_not_taken_for_each_other() {
        let mut pool = Pool::default();
        let one = pool.share_as(7, labels(1));
        let other = pool.share_as(7, labels(2));
        assert_eq!((&*one, &*other), (&labels(1), &labels(2)));
        assert!(Arc::ptr_eq(&one, &pool.share_as(7, labels(1))));
        drop(one);
        let again = pool.share_as(7, labels(2));
        assert_eq!(again, other);
        assert!(Arc::ptr_eq(&again, &pool.share_as(7, labels(2))), "the place is taken");
    }
}
