//! Remembers objects beyond the bound of their kind by name and size, so that the kind is listed again only
//! when one of them may fit. Pure.

use std::collections::BTreeMap;

use crate::objects::ObjectName;

/// Most refused objects that are remembered, to count them.
pub(super) const REMEMBERED: usize = 16 << 10;

/// The refused objects of a kind, each with its size in bytes; 0 if the size does not matter.
#[derive(Debug, Default)]
pub(super) struct Refused(BTreeMap<ObjectName, usize>);

impl Refused {
    /// Records a refused object. Only the first of very many are kept.
    pub(super) fn put(&mut self, name: &ObjectName, bytes: usize) {
        if self.0.len() < REMEMBERED || self.0.contains_key(name) {
            self.0.insert(name.clone(), bytes);
        }
    }

    /// Removes an object that is kept now, or deleted. Returns whether it had been refused.
    pub(super) fn remove(&mut self, name: &ObjectName) -> bool {
        self.0.remove(name).is_some()
    }

    /// Returns the names, sorted.
    pub(super) fn names(&self) -> impl Iterator<Item = &ObjectName> {
        self.0.keys()
    }

    /// Returns the number of objects.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the smallest object, and the smallest one of a namespace: if neither fits, no object does.
    pub(super) fn smallest(&self, namespace: &str) -> impl Iterator<Item = (&ObjectName, usize)> {
        let of_namespace = self.0.iter().filter(move |(name, _)| name.namespace == namespace);
        let least =
            [self.0.iter().min_by_key(|(_, bytes)| **bytes), of_namespace.min_by_key(|(_, bytes)| **bytes)];
        least.into_iter().flatten().map(|(name, bytes)| (name, *bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_of_all_and_of_a_namespace_are_told() {
        let mut refused = Refused::default();
        let name =
            |text: &str| ObjectName::new(text.split('/').next().unwrap(), text.split('/').nth(1).unwrap());
        for (text, bytes) in [("a/x", 30), ("a/y", 20), ("b/x", 10), ("c/x", 40)] {
            refused.put(&name(text), bytes);
        }
        let smallest = |refused: &Refused, namespace: &str| -> Vec<(String, usize)> {
            refused.smallest(namespace).map(|(name, bytes)| (name.to_string(), bytes)).collect()
        };
        let of = |text: &str, bytes| (text.to_owned(), bytes);
        assert_eq!(smallest(&refused, "a"), [of("b/x", 10), of("a/y", 20)]);
        assert_eq!(smallest(&refused, "d"), [of("b/x", 10)]);
        refused.put(&name("a/x"), 5);
        assert_eq!(smallest(&refused, "c"), [of("a/x", 5), of("c/x", 40)]);
        assert_eq!(
            (refused.remove(&name("a/x")), refused.remove(&name("a/x")), refused.len()),
            (true, false, 3)
        );
    }
}
