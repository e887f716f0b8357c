//! The work that compiling takes: for the tables of a namespace that hold, and in one update.

use std::collections::{BTreeMap, BTreeSet};

use crate::objects::budget::{Excess, Left, WORK_OF_NAMESPACE, WORK_OF_UPDATE};

/// What the tables of each namespace take, in comparisons.
#[derive(Debug, Default)]
pub(super) struct Work {
    /// The peers that there are in this update (`Peers::charged`): a selector counts as compared with each of them.
    peers: usize,
    of_namespaces: BTreeMap<String, OfNamespace>,
    /// In this update, of all namespaces, for what had been refused before: it would take the time of an update anew
    /// for each namespace. Bound: [`WORK_OF_UPDATE`].
    again: usize,
    /// Whether what is worked out now had been refused before.
    is_again: bool,
    /// The namespaces in line for `again`, each with the `tables` that there were at its last turn, or when it came to
    /// the line: the one with the fewest is next.
    line: BTreeMap<String, usize>,
    /// How many tables have been worked out.
    tables: usize,
}

/// The work for one namespace. The two have different bounds, as a table that is refused takes time and holds nothing.
#[derive(Debug, Default)]
struct OfNamespace {
    /// For the tables that hold. Bound: [`WORK_OF_NAMESPACE`].
    spent: usize,
    /// In this update, for refused tables as well. Bound: [`WORK_OF_UPDATE`].
    tried: usize,
    /// `Work::tables` when one held last.
    held: usize,
}

/// What tables took until they were complete or refused.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cost {
    comparisons: usize,
    /// The peers that there were.
    peers: usize,
}

/// Tables that were refused for too much work.
#[derive(Debug, Clone, Copy)]
pub(super) struct Short {
    /// What they exceed.
    pub(super) excess: Excess,
    /// What they took until then.
    pub(super) cost: Cost,
}

impl Cost {
    /// What the tables would take with other peers, in eighths of what they took: a few peers fewer are no reason to
    /// try again. More peers do not count, as policies are compiled again when peers come that concern them.
    fn with(self, peers: usize) -> usize {
        if peers >= self.peers {
            return self.comparisons;
        }
        self.comparisons.saturating_mul(peers.saturating_mul(8).div_ceil(self.peers)) / 8
    }
}

impl Work {
    /// Begins an update, with that many peers.
    pub(super) fn begin(&mut self, peers: usize) {
        self.go_on(peers);
        self.again = 0;
        self.of_namespaces.retain(|_, of| of.spent > 0);
        self.of_namespaces.values_mut().for_each(|of| of.tried = 0);
    }

    /// Goes on with what the last update left, with that many peers.
    pub(super) fn go_on(&mut self, peers: usize) {
        self.peers = peers;
    }

    /// Whether what is worked out from now on had been refused before.
    pub(super) fn begin_pass(&mut self, is_again: bool) {
        self.is_again = is_again;
    }

    /// The most that further tables of a namespace may take now.
    pub(super) fn left(&self, namespace: &str) -> Left {
        Left { of_namespace: self.left_of_namespace(namespace), of_update: self.left_of_update(namespace) }
    }

    fn left_of_namespace(&self, namespace: &str) -> usize {
        WORK_OF_NAMESPACE.saturating_sub(self.of_namespaces.get(namespace).map_or(0, |of| of.spent))
    }

    fn left_of_update(&self, namespace: &str) -> usize {
        let again = if self.is_again { self.again } else { 0 };
        WORK_OF_UPDATE.saturating_sub(self.tried(namespace).max(again))
    }

    /// The work of this update for one namespace.
    pub(super) fn tried(&self, namespace: &str) -> usize {
        self.of_namespaces.get(namespace).map_or(0, |of| of.tried)
    }

    /// Whether there is room in this update for what a table took until it was refused: with less, it is refused again.
    pub(super) fn has_room(&self, namespace: &str, short: Short) -> bool {
        self.has_room_anew(namespace, short) && short.cost.with(self.peers) <= self.left_of_update(namespace)
    }

    /// The same in an update that has not tried anything yet.
    pub(super) fn has_room_anew(&self, namespace: &str, Short { excess, cost }: Short) -> bool {
        let takes = cost.with(self.peers);
        let has_room = takes <= self.left_of_namespace(namespace);
        match excess {
            // Nobody knows what else it takes.
            Excess::WorkOfUpdate => true,
            Excess::WorkOfNamespace => has_room,
            // Its own bound does not change, so that only fewer peers can help.
            _ => takes < cost.comparisons && has_room,
        }
    }

    /// What decides whose turn it is among namespaces with something that had been refused before: the least comes
    /// first. Those that are not in line come after it.
    pub(super) fn turn(&self, namespace: &str) -> usize {
        self.line.get(namespace).copied().unwrap_or(self.tables)
    }

    /// A namespace has had its turn if anything was worked out since then. `is_left`: the work of this update did not
    /// suffice. If it was that for all namespaces, those behind do not get the rest either, or one that needs more
    /// would wait for ever. An attachment takes no more than a third of it, so the first three of the line get what
    /// they need in every update.
    pub(super) fn end_turn(&mut self, namespace: &str, since: usize, is_left: bool) {
        if is_left && self.again >= self.tried(namespace) {
            self.again = self.again.max(WORK_OF_UPDATE);
        } else if self.tables > since {
            self.line.insert(namespace.to_owned(), self.tables);
        }
    }

    /// Ends an update, after which these namespaces have something that further updates are to try: who comes to the
    /// line now comes last.
    pub(super) fn line_up(&mut self, waiting: &BTreeSet<&str>) {
        self.line.retain(|namespace, _| waiting.contains(namespace.as_str()));
        for namespace in waiting {
            if !self.line.contains_key(*namespace) {
                self.line.insert((*namespace).to_owned(), self.tables);
            }
        }
    }

    /// How many tables have been worked out, for [`Work::has_held_since`] and [`Work::end_turn`].
    pub(super) fn now(&self) -> usize {
        self.tables
    }

    /// Whether any table of a namespace was worked out and holds since then.
    pub(super) fn has_held_since(&self, namespace: &str, then: usize) -> bool {
        self.of_namespaces.get(namespace).is_some_and(|of| of.held > then)
    }

    /// Adds the work for tables, whether they hold or not.
    pub(super) fn tries(&mut self, namespace: &str, comparisons: usize) -> Cost {
        self.tables += 1;
        if self.is_again {
            self.again = self.again.saturating_add(comparisons);
        }
        let of = self.of_namespaces.entry(namespace.to_owned()).or_default();
        of.tried = of.tried.saturating_add(comparisons);
        Cost { comparisons, peers: self.peers }
    }

    /// Adds tables that hold, the last that were tried.
    pub(super) fn holds(&mut self, namespace: &str, cost: Cost) {
        let of = self.of_namespaces.entry(namespace.to_owned()).or_default();
        of.spent = of.spent.saturating_add(cost.comparisons);
        of.held = self.tables;
    }

    /// Counts the tables that hold anew: some are gone, or there are other peers.
    pub(super) fn recount<'a>(&mut self, holding: impl Iterator<Item = (&'a str, Cost)>) {
        self.of_namespaces.values_mut().for_each(|of| of.spent = 0);
        for (namespace, cost) in holding {
            let cost = cost.with(self.peers);
            // Without a copy of the name for each of the tables.
            match self.of_namespaces.get_mut(namespace) {
                Some(of) => of.spent = of.spent.saturating_add(cost),
                None => {
                    let of = OfNamespace { spent: cost, ..OfNamespace::default() };
                    self.of_namespaces.insert(namespace.to_owned(), of);
                }
            }
        }
    }

    /// The cost of the tables that hold, of all namespaces.
    #[cfg(test)]
    pub(super) fn spent(&self) -> usize {
        self.of_namespaces.values().map(|of| of.spent).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::budget::{ENTRIES, ENTRY, PREFIXES, WORK};

    const SHOP: &str = "shop";

    /// The smaller one of what is left.
    fn left(work: &Work, namespace: &str) -> usize {
        let Left { of_namespace, of_update } = work.left(namespace);
        of_namespace.min(of_update)
    }

    #[test]
    fn what_is_refused_takes_of_the_update_alone_and_what_goes_gives_back() {
        let mut work = Work::default();
        work.begin(10);
        assert_eq!((left(&work, SHOP), work.has_held_since(SHOP, work.now())), (WORK_OF_NAMESPACE, false));
        let before = work.now();
        let half = work.tries(SHOP, WORK_OF_NAMESPACE / 2);
        assert!(!work.has_held_since(SHOP, before), "tried");
        work.holds(SHOP, half);
        assert_eq!((left(&work, SHOP), work.has_held_since(SHOP, before)), (WORK_OF_NAMESPACE / 2, true));
        assert!(!work.has_held_since(SHOP, work.now()) && !work.has_held_since("other", before));
        work.tries(SHOP, WORK_OF_NAMESPACE / 2);
        assert_eq!(left(&work, SHOP), WORK_OF_NAMESPACE / 2, "refused");
        work.tries(SHOP, WORK_OF_NAMESPACE - 1);
        assert_eq!((left(&work, SHOP), left(&work, "other")), (1, WORK_OF_NAMESPACE), "the update's bound");
        work.tries(SHOP, 2);
        assert_eq!(left(&work, SHOP), 0);
        work.begin(10);
        work.recount(std::iter::once((SHOP, half)));
        assert_eq!(left(&work, SHOP), WORK_OF_NAMESPACE / 2);
        work.recount(std::iter::empty());
        assert_eq!((left(&work, SHOP), work.spent()), (WORK_OF_NAMESPACE, 0));
        work.begin(10);
        assert!(work.of_namespaces.is_empty());
    }

    /// What had been refused before has one bound for all namespaces; what had not has one for each.
    #[test]
    fn what_is_tried_again_takes_of_one_update_in_all() {
        let mut work = Work::default();
        work.begin(10);
        work.begin_pass(true);
        let cost = work.tries(SHOP, WORK_OF_UPDATE - 1);
        let short = Short { excess: Excess::WorkOfUpdate, cost };
        assert_eq!((left(&work, SHOP), left(&work, "other")), (1, 1));
        assert_eq!((work.has_room("other", short), work.has_room_anew("other", short)), (false, true));
        work.begin_pass(false);
        assert_eq!((left(&work, SHOP), left(&work, "other")), (1, WORK_OF_NAMESPACE));
        work.begin(10);
        work.begin_pass(true);
        assert_eq!(left(&work, "other"), WORK_OF_NAMESPACE);
        assert!(work.has_room("other", short));
    }

    /// What an attachment takes at most, in both directions.
    const MOST: usize = 2 * (WORK + ENTRY * (PREFIXES + ENTRIES));

    #[test]
    fn three_namespaces_at_least_have_their_turns_in_an_update() {
        let all: Vec<String> = (0..7).map(|number| format!("n{number}")).collect();
        let waiting: BTreeSet<&str> = all.iter().map(String::as_str).collect();
        let mut work = Work::default();
        work.line_up(&waiting);
        for expected in [["n0", "n1", "n2"], ["n3", "n4", "n5"], ["n6", "n0", "n1"], ["n2", "n3", "n4"]] {
            work.begin(10);
            work.begin_pass(true);
            let mut line = all.clone();
            line.sort_by_key(|namespace| work.turn(namespace));
            let mut had = Vec::new();
            for namespace in &line {
                let (since, left) = (work.now(), left(&work, namespace));
                work.tries(namespace, MOST.min(left + 1));
                work.end_turn(namespace, since, left < MOST);
                had.extend((left >= MOST).then_some(namespace.as_str()));
            }
            assert_eq!(had, expected);
            // Who comes has its turn after those that are there.
            work.line_up(&waiting);
            assert!(all.iter().all(|namespace| work.turn(namespace) <= work.turn("new")));
        }
        work.line_up(&BTreeSet::new());
        assert!(work.line.is_empty(), "nobody has anything left");
    }

    /// A namespace whose own changes take the work of an update loses its turn, not that of others.
    #[test]
    fn a_turn_ends_without_the_work_that_a_namespace_has_taken_itself() {
        let mut work = Work::default();
        work.line_up(&[SHOP, "other"].into());
        work.begin(10);
        work.tries(SHOP, WORK_OF_UPDATE);
        work.begin_pass(true);
        let since = work.now();
        work.end_turn(SHOP, since, true);
        assert_eq!(work.turn(SHOP), 0, "nothing was worked out");
        work.tries(SHOP, 1);
        work.end_turn(SHOP, since, true);
        assert_eq!((work.turn(SHOP), work.turn("other")), (2, 0));
        assert_eq!(left(&work, "other"), WORK_OF_NAMESPACE);
    }

    #[test]
    fn what_goes_on_with_an_update_has_what_it_left() {
        let mut work = Work::default();
        work.begin(10);
        work.tries(SHOP, WORK_OF_UPDATE - 1);
        work.go_on(10);
        assert_eq!((left(&work, SHOP), left(&work, "other")), (1, WORK_OF_NAMESPACE));
        work.begin(10);
        assert_eq!(left(&work, SHOP), WORK_OF_NAMESPACE);
    }

    #[test]
    fn there_is_room_for_what_a_table_took_or_would_with_an_eighth_of_the_peers_gone() {
        let [of_namespace, own, of_update] = [Excess::WorkOfNamespace, Excess::Work, Excess::WorkOfUpdate];
        // The bound that refused it, peers then and now, what it took beyond what is left, whether there is room.
        let table = [
            (of_namespace, 100, 100, 0, true),
            (of_namespace, 100, 100, 1, false),
            (of_namespace, 100, 88, 1, false),
            (of_namespace, 100, 87, 1, true),
            (of_namespace, 100, 200, 0, true),
            (of_namespace, 100, 200, 1, false),
            (of_namespace, 100, 87, WORK_OF_NAMESPACE, false),
            (of_namespace, 0, 0, 1, false),
            (own, 100, 100, 0, false),
            (own, 100, 88, 0, false),
            (own, 100, 87, 0, true),
            (own, 100, 87, WORK_OF_NAMESPACE, false),
            (of_update, 100, 100, 1, true),
        ];
        for (excess, then, now, beyond, has_room) in table {
            let mut work = Work::default();
            work.begin(then);
            let cost = work.tries(SHOP, WORK_OF_NAMESPACE + beyond);
            work.begin(now);
            let found = work.has_room(SHOP, Short { excess, cost });
            assert_eq!(found, has_room, "{excess:?}: {then} peers, {now} now, {beyond} beyond");
        }
    }

    #[test]
    fn what_holds_counts_as_with_the_peers_of_now() {
        let mut work = Work::default();
        for (then, now, expected) in
            [(100, 100, 800), (100, 90, 800), (100, 50, 400), (50, 100, 800), (0, 0, 800)]
        {
            work.begin(then);
            let cost = work.tries(SHOP, 800);
            work.begin(now);
            work.recount(std::iter::once((SHOP, cost)));
            assert_eq!(work.spent(), expected, "{then} peers, {now} now");
        }
    }
}
