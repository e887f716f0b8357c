//! Remembers objects beyond the bound of their kind by name and size, so that the kind is listed again only
//! when one of them may fit. Pure.

use std::collections::BTreeMap;

use crate::objects::ObjectName;

/// Most refused objects that are remembered, to count them.
pub(super) const REMEMBERED: usize = 16 << 10;

/// The objects of a kind that were refused.
#[derive(Debug, Default)]
pub(super) struct Refused {
    /// The bytes that each would take; 0 where they do not decide.
    bytes: BTreeMap<ObjectName, usize>,
    /// Whether there may be more refused objects than are remembered: an author of thousands of them must not keep
    /// those of others from being read again.
    has_more: bool,
}

impl Refused {
    /// Records a refused object. Only the first of very many are kept.
    pub(super) fn put(&mut self, name: &ObjectName, bytes: usize) {
        if self.bytes.len() < REMEMBERED || self.bytes.contains_key(name) {
            self.bytes.insert(name.clone(), bytes);
        } else {
            self.has_more = true;
        }
    }

    /// Removes an object that is kept now, or deleted. Returns whether it had been refused.
    pub(super) fn remove(&mut self, name: &ObjectName) -> bool {
        self.bytes.remove(name).is_some()
    }

    /// A list begins, which will show the objects that are not remembered.
    pub(super) fn list_begins(&mut self) {
        self.has_more = false;
    }

    /// Whether there may be more refused objects than are remembered.
    pub(super) fn has_more(&self) -> bool {
        self.has_more
    }

    /// Returns the names, sorted.
    pub(super) fn names(&self) -> impl Iterator<Item = &ObjectName> {
        self.bytes.keys()
    }

    /// Returns the number of remembered objects.
    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the smallest object, and the smallest one of a namespace: if neither fits, no object does.
    pub(super) fn smallest(&self, namespace: &str) -> impl Iterator<Item = (&ObjectName, usize)> {
        let of_namespace = self.bytes.iter().filter(move |(name, _)| name.namespace == namespace);
        let least = [
            self.bytes.iter().min_by_key(|(_, bytes)| **bytes),
            of_namespace.min_by_key(|(_, bytes)| **bytes),
        ];
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

    #[test]
    fn of_more_than_are_remembered_it_is_known_that_there_are_until_a_list_tells() {
        let mut refused = Refused::default();
        let name = |number: usize| ObjectName::new("a", format!("{number:06}"));
        for number in 0..REMEMBERED {
            refused.put(&name(number), 1);
        }
        refused.put(&name(0), 2);
        assert_eq!((refused.len(), refused.has_more()), (REMEMBERED, false));
        refused.put(&name(REMEMBERED), 1);
        assert!(refused.remove(&name(1)));
        assert_eq!((refused.len(), refused.has_more()), (REMEMBERED - 1, true));
        refused.list_begins();
        assert!(!refused.has_more());
    }
}
