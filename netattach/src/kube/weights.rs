//! The bytes kept of each definition and policy, and which objects are removed when a kind exceeds its
//! bound. Pure.
//!
//! The bound is one for the whole cluster. At the bound, the namespace with the most bytes of the kind
//! gives way to those with fewer: an author of many large objects in one namespace does not displace those
//! of others.

use std::collections::BTreeMap;

use crate::budget::{Budget, Exceeded};
use crate::objects::ObjectName;
use crate::source::read::manifest::Key;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Weights {
    of: BTreeMap<Key, usize>,
    kinds: BTreeMap<&'static str, OfKind>,
}

#[derive(Debug, Default)]
struct OfKind {
    total: usize,
    namespaces: BTreeMap<String, usize>,
}

impl Weights {
    /// Returns the object that must be removed first so that an object of `bytes` bytes fits; `None`: it
    /// fits.
    ///
    /// # Errors
    /// [`Exceeded`]: no other namespace has more of the kind than the object's own would have.
    pub(super) fn in_the_way(&self, key: &Key, bytes: usize, most: &Budget) -> Result<Option<Key>, Exceeded> {
        let Some(kind) = self.kinds.get(key.kind) else { return most.check(bytes).map(|()| None) };
        let before = self.get(key);
        let Err(exceeded) = most.check(kind.total - before + bytes) else { return Ok(None) };
        let own = kind.namespaces.get(&key.name.namespace).copied().unwrap_or_default() - before + bytes;
        let largest = kind.namespaces.iter().max_by_key(|(_, total)| **total);
        let Some((namespace, largest)) = largest.filter(|(name, _)| **name != key.name.namespace) else {
            return Err(exceeded);
        };
        let Some((last, weight)) = self.last_of(key.kind, namespace) else { return Err(exceeded) };
        // An object is not removed for a namespace that would then have more, as the two would alternate.
        if own > largest - weight {
            return Err(exceeded);
        }
        Ok(Some(last.clone()))
    }

    /// Records that an object is kept, with its size. Returns whether it was larger before.
    pub(super) fn set(&mut self, key: &Key, bytes: usize) -> bool {
        let before = self.remove(key);
        self.of.insert(key.clone(), bytes);
        let kind = self.kinds.entry(key.kind).or_default();
        kind.total += bytes;
        *kind.namespaces.entry(key.name.namespace.clone()).or_default() += bytes;
        before.is_some_and(|before| bytes < before)
    }

    /// Removes an object that is not kept any more. Returns its size, if it was kept.
    pub(super) fn remove(&mut self, key: &Key) -> Option<usize> {
        let bytes = self.of.remove(key)?;
        let kind = self.kinds.entry(key.kind).or_default();
        kind.total -= bytes;
        if let Some(total) = kind.namespaces.get_mut(&key.name.namespace) {
            *total -= bytes;
            if *total == 0 {
                kind.namespaces.remove(&key.name.namespace);
            }
        }
        Some(bytes)
    }

    /// Whether the object is kept.
    pub(super) fn has(&self, key: &Key) -> bool {
        self.of.contains_key(key)
    }

    fn get(&self, key: &Key) -> usize {
        self.of.get(key).copied().unwrap_or_default()
    }

    /// Returns the last of a namespace's objects of a kind, by name, and its size.
    fn last_of(&self, kind: &'static str, namespace: &str) -> Option<(&Key, usize)> {
        let at = |namespace: String| Key { kind, name: ObjectName::new(namespace, "") };
        // No namespace name contains this character, so no other namespace is in the range.
        let of_namespace = self.of.range(at(namespace.to_owned())..at(format!("{namespace}\0")));
        of_namespace.map(|(key, bytes)| (key, *bytes)).next_back()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget;

    const MOST: Budget = Budget { most: 100, ..budget::DEFINITIONS_OF_CLUSTER };

    fn key(namespace: &str, name: &str) -> Key {
        Key { kind: "definition", name: ObjectName::new(namespace, name) }
    }

    /// Keeps an object, removing others as needed. Returns the removed ones; `None`: it does not fit.
    fn put(weights: &mut Weights, of: &Key, bytes: usize) -> Option<Vec<String>> {
        let mut gone = Vec::new();
        while let Some(first) = weights.in_the_way(of, bytes, &MOST).ok()? {
            assert!(weights.remove(&first).is_some(), "{first:?}");
            gone.push(first.name.to_string());
        }
        weights.set(of, bytes);
        Some(gone)
    }

    #[test]
    fn who_has_most_gives_way_to_who_has_less_and_to_nobody_else() {
        let mut weights = Weights::default();
        let some = |names: &[&str]| Some(names.iter().map(ToString::to_string).collect::<Vec<_>>());
        for number in 0..10 {
            assert_eq!(put(&mut weights, &key("a", &number.to_string()), 10), some(&[]));
        }
        assert_eq!(put(&mut weights, &key("a", "more"), 1), None, "its own namespace has most");
        assert_eq!(put(&mut weights, &key("b", "x"), 15), some(&["a/9", "a/8"]));
        assert_eq!(put(&mut weights, &key("b", "x"), 20), some(&[]), "there is room for 5 more");
        assert_eq!(put(&mut weights, &key("ab", "x"), 25), some(&["a/7", "a/6", "a/5"]));
        assert_eq!(
            put(&mut weights, &key("a", "9"), 10),
            None,
            "it would take it back from those who have less"
        );
        assert_eq!(put(&mut weights, &key("c", "x"), 45), None, "it would have more than who gives way");
        // The size of an object that is kept already is not counted twice.
        assert_eq!(put(&mut weights, &key("a", "0"), 15), some(&[]));
        assert_eq!(weights.remove(&key("a", "0")), Some(15));
        assert_eq!(weights.remove(&key("a", "0")), None);
        assert_eq!(weights.kinds["definition"].total, 20 + 25 + 40);
        for name in ["1", "2", "3", "4"] {
            weights.remove(&key("a", name));
        }
        assert!(!weights.kinds["definition"].namespaces.contains_key("a"));
    }
}
