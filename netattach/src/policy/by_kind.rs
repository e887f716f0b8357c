//! Pods of other nodes, grouped by what they have in common: a selector is compared only once with labels
//! that many pods share.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::fmt;
use std::iter;
use std::ops::Bound;
use std::sync::Arc;

use crate::objects::remote::RemotePod;

/// Pods of other nodes by their kinds ([`RemotePod::kind`]).
#[derive(Debug, Default)]
pub(super) struct ByKind {
    pods: BTreeSet<Entry>,
    /// How many kinds there are: counting them would go over all.
    kinds: usize,
}

struct Entry(Arc<RemotePod>);

/// A position among the entries: the number of the kind, and of the pod.
trait Position {
    fn position(&self) -> (usize, usize);
}

impl ByKind {
    pub(super) fn insert(&mut self, pod: Arc<RemotePod>) {
        self.kinds += usize::from(!self.has_kind(pod.kind()));
        self.pods.insert(Entry(pod));
    }

    /// Removes a pod; an equal one that is another value stays.
    pub(super) fn remove(&mut self, pod: Arc<RemotePod>) {
        let kind = pod.kind();
        if self.pods.remove(&Entry(pod)) && !self.has_kind(kind) {
            self.kinds -= 1;
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pods.is_empty()
    }

    /// Returns how many kinds there are.
    pub(super) fn number_of_kinds(&self) -> usize {
        self.kinds
    }

    fn has_kind(&self, kind: usize) -> bool {
        self.range(Bound::Included(&(kind, 0_usize)), Bound::Included(&(kind, usize::MAX))).next().is_some()
    }

    /// Iterates over one pod of each kind, with all pods that are like it. Skipping these costs no more
    /// than finding the next kind.
    pub(super) fn kinds(&self) -> impl Iterator<Item = (&RemotePod, impl Iterator<Item = &RemotePod>)> {
        let mut next = self.pods.first();
        iter::from_fn(move || {
            let first = next?;
            let behind = (first.0.kind(), usize::MAX);
            next = self.range(Bound::Excluded(&behind), Bound::Unbounded).next();
            let alike = self.range(Bound::Included(first), Bound::Excluded(&behind));
            Some((&*first.0, alike.map(|entry| &*entry.0)))
        })
    }

    fn range(
        &self,
        from: Bound<&dyn Position>,
        to: Bound<&dyn Position>,
    ) -> impl Iterator<Item = &Entry> + use<'_> {
        self.pods.range::<dyn Position, _>((from, to))
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Position for Entry {
    fn position(&self) -> (usize, usize) {
        (self.0.kind(), Arc::as_ptr(&self.0).addr())
    }
}

impl Position for (usize, usize) {
    fn position(&self) -> (usize, usize) {
        *self
    }
}

impl<'a> Borrow<dyn Position + 'a> for Entry {
    fn borrow(&self) -> &(dyn Position + 'a) {
        self
    }
}

/// Entries are sorted as their positions are, so that a set of them can be searched for one.
macro_rules! sorted_by_position {
    ($type:ty) => {
        impl PartialEq for $type {
            fn eq(&self, other: &Self) -> bool {
                self.position() == other.position()
            }
        }

        impl Eq for $type {}

        impl PartialOrd for $type {
            fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
                Some(self.cmp(other))
            }
        }

        impl Ord for $type {
            fn cmp(&self, other: &Self) -> Ordering {
                self.position().cmp(&other.position())
            }
        }
    };
}

sorted_by_position!(Entry);
sorted_by_position!(dyn Position + '_);

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::objects::ObjectName;
    use crate::objects::interner::Interner;
    use crate::objects::labels::Labels;
    use crate::objects::remote::Written;

    #[test]
    fn each_kind_has_its_pods() {
        let mut interner = Interner::default();
        let mut pod = |app: usize, number: usize| {
            let labels = Labels::from([("app".to_owned(), app.to_string())]);
            let name = ObjectName::new("shop", format!("{app}-{number}"));
            Arc::new(RemotePod::read(&name, Written { labels, ..Written::default() }, &mut interner))
        };
        let found = |set: &ByKind| -> BTreeMap<String, Vec<String>> {
            let kinds = set.kinds().map(|(first, alike)| {
                let mut names: Vec<String> = alike.map(|pod| pod.name().to_owned()).collect();
                names.sort();
                (first.labels()["app"].clone(), names)
            });
            let kinds = kinds.collect::<BTreeMap<_, _>>();
            assert_eq!(set.number_of_kinds(), kinds.len());
            kinds
        };
        let mut set = ByKind::default();
        assert_eq!(found(&set), BTreeMap::new());
        let pods: Vec<Arc<RemotePod>> = (0..3)
            .flat_map(|number| [(0, number), (1, number), (2, 9)])
            .map(|(app, number)| pod(app, number))
            .collect();
        for pod in &pods {
            set.insert(Arc::clone(pod));
            set.insert(Arc::clone(pod));
        }
        let expected =
            [("0", vec!["0-0", "0-1", "0-2"]), ("1", vec!["1-0", "1-1", "1-2"]), ("2", vec!["2-9"; 3])];
        let expected =
            expected.map(|(app, names)| (app.to_owned(), names.into_iter().map(str::to_owned).collect()));
        assert_eq!(found(&set), BTreeMap::from(expected));
        for pod in pods {
            assert!(!set.is_empty());
            set.remove(pod);
            found(&set);
        }
        assert!(set.is_empty());
    }
}
