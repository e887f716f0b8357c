//! The work that compiling takes, by namespace: for the tables that hold, and in one update.

use std::collections::BTreeMap;

use crate::objects::budget::{WORK_OF_NAMESPACE, WORK_OF_UPDATE};

/// What the tables of each namespace take, in comparisons.
#[derive(Debug, Default)]
pub(super) struct Work {
    /// The peers that there are in this update (`Peers::len`): a selector counts as compared with each of them.
    peers: usize,
    of_namespaces: BTreeMap<String, OfNamespace>,
}

/// The work for one namespace. The two have different bounds, as a table that is refused takes time and holds nothing.
#[derive(Debug, Default)]
struct OfNamespace {
    /// For the tables that hold. Bound: [`WORK_OF_NAMESPACE`].
    spent: usize,
    /// In this update, for refused tables as well. Bound: [`WORK_OF_UPDATE`].
    tried: usize,
}

/// What tables took until they were complete or refused.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cost {
    comparisons: usize,
    /// The peers that there were.
    peers: usize,
}

impl Work {
    /// Begins an update, with that many peers.
    pub(super) fn begin(&mut self, peers: usize) {
        self.peers = peers;
        self.of_namespaces.retain(|_, of| of.spent > 0);
        self.of_namespaces.values_mut().for_each(|of| of.tried = 0);
    }

    /// The most that further tables of a namespace may take now.
    pub(super) fn left(&self, namespace: &str) -> usize {
        let (spent, tried) = self.of_namespaces.get(namespace).map_or((0, 0), |of| (of.spent, of.tried));
        WORK_OF_NAMESPACE.saturating_sub(spent).min(WORK_OF_UPDATE.saturating_sub(tried))
    }

    /// Whether there is room for what a table took until it was refused for lack of it: with less, it is refused again.
    /// With fewer peers, it takes less.
    pub(super) fn has_room(&self, namespace: &str, refused: Cost) -> bool {
        let with_peers = refused.comparisons.saturating_mul(self.peers.max(1)) / refused.peers.max(1);
        with_peers.min(refused.comparisons) <= self.left(namespace)
    }

    /// Whether tables of a namespace were worked out in this update.
    pub(super) fn is_tried(&self, namespace: &str) -> bool {
        self.of_namespaces.get(namespace).is_some_and(|of| of.tried > 0)
    }

    /// Adds the work for tables, whether they hold or not.
    pub(super) fn tries(&mut self, namespace: &str, comparisons: usize) -> Cost {
        let of = self.of_namespaces.entry(namespace.to_owned()).or_default();
        of.tried = of.tried.saturating_add(comparisons);
        Cost { comparisons, peers: self.peers }
    }

    /// Adds tables that hold.
    pub(super) fn holds(&mut self, namespace: &str, cost: Cost) {
        let of = self.of_namespaces.entry(namespace.to_owned()).or_default();
        of.spent = of.spent.saturating_add(cost.comparisons);
    }

    /// Subtracts tables that have been added by [`Work::holds`] and are gone.
    pub(super) fn lets_go(&mut self, namespace: &str, cost: Cost) {
        if let Some(of) = self.of_namespaces.get_mut(namespace) {
            of.spent = of.spent.saturating_sub(cost.comparisons);
        }
    }

    /// The cost of the tables that hold, of all namespaces.
    #[cfg(test)]
    pub(super) fn spent(&self) -> usize {
        self.of_namespaces.values().map(|of| of.spent).sum()
    }

    /// The work of this update for one namespace.
    #[cfg(test)]
    pub(super) fn tried(&self, namespace: &str) -> usize {
        self.of_namespaces.get(namespace).map_or(0, |of| of.tried)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHOP: &str = "shop";

    #[test]
    fn what_is_refused_takes_of_the_update_alone_and_what_goes_gives_back() {
        let mut work = Work::default();
        work.begin(10);
        assert_eq!((work.left(SHOP), work.is_tried(SHOP)), (WORK_OF_NAMESPACE, false));
        let half = work.tries(SHOP, WORK_OF_NAMESPACE / 2);
        work.holds(SHOP, half);
        assert_eq!((work.left(SHOP), work.is_tried(SHOP)), (WORK_OF_NAMESPACE / 2, true));
        work.tries(SHOP, WORK_OF_NAMESPACE / 2);
        assert_eq!(work.left(SHOP), WORK_OF_NAMESPACE / 2, "refused");
        work.tries(SHOP, WORK_OF_NAMESPACE - 1);
        assert_eq!((work.left(SHOP), work.left("other")), (1, WORK_OF_NAMESPACE), "the update's bound");
        work.tries(SHOP, 2);
        assert_eq!(work.left(SHOP), 0);
        work.begin(10);
        assert_eq!((work.left(SHOP), work.is_tried(SHOP)), (WORK_OF_NAMESPACE / 2, false));
        work.lets_go(SHOP, half);
        assert_eq!((work.left(SHOP), work.spent()), (WORK_OF_NAMESPACE, 0));
        work.begin(10);
        assert!(work.of_namespaces.is_empty());
    }

    #[test]
    fn there_is_room_for_what_a_table_took_or_would_with_the_peers_of_now() {
        // Peers when it was refused and now, what it took beyond what is left, whether there is room.
        let table = [
            (100, 100, 0, true),
            (100, 100, 1, false),
            (100, 99, 1, true),
            (100, 200, 0, true),
            (100, 99, WORK_OF_NAMESPACE, false),
            (0, 0, 1, false),
        ];
        for (then, now, beyond, has_room) in table {
            let mut work = Work::default();
            work.begin(then);
            let took = work.tries(SHOP, WORK_OF_NAMESPACE + beyond);
            work.begin(now);
            assert_eq!(work.has_room(SHOP, took), has_room, "{then} peers, {now} now, {beyond} beyond");
        }
    }
}
