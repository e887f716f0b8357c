//! The order of operations on each container: one at a time, first come first served. It has no clock, thread or task:
//! `scheduler` asks, wakes and suspends.

use std::collections::{HashMap, HashSet, VecDeque};

/// An operation that asked for a turn.
pub(crate) type Asker = u64;

/// The operation with the turn of each container, and those that wait for it. Containers without any have
/// no entry.
#[derive(Debug, Default)]
pub(crate) struct Order {
    containers: HashMap<String, VecDeque<Asker>>,
    next: Asker,
}

impl Order {
    /// Asks for a container's turn. `true`: the operation has it now.
    pub(crate) fn ask(&mut self, container: &str) -> (Asker, bool) {
        let asker = self.next;
        self.next += 1;
        let askers = self.containers.entry(container.to_owned()).or_default();
        askers.push_back(asker);
        (asker, askers.len() == 1)
    }

    /// Asks for a turn that no operation has or waits for.
    pub(crate) fn ask_if_free(&mut self, container: &str) -> Option<Asker> {
        (!self.containers.contains_key(container)).then(|| self.ask(container).0)
    }

    /// Returns the operation with a container's turn.
    pub(crate) fn holder(&self, container: &str) -> Option<Asker> {
        self.containers.get(container)?.front().copied()
    }

    /// Returns the containers whose turn is held or waited for by operations other than `but_for`.
    pub(crate) fn containers(&self, but_for: &HashSet<Asker>) -> impl Iterator<Item = &str> {
        let counts = |askers: &VecDeque<Asker>| askers.iter().any(|asker| !but_for.contains(asker));
        self.containers.iter().filter(move |(_, askers)| counts(askers)).map(|(name, _)| name.as_str())
    }

    /// Gives up a turn, or stops waiting for it. Returns the new holder, if that changed.
    pub(crate) fn leave(&mut self, container: &str, asker: Asker) -> Option<Asker> {
        let askers = self.containers.get_mut(container)?;
        let had_it = askers.front() == Some(&asker);
        askers.retain(|other| *other != asker);
        let next = askers.front().copied();
        if next.is_none() {
            self.containers.remove(container);
        }
        next.filter(|_| had_it)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_come_in_the_order_of_asking_and_leave_nothing() {
        let mut order = Order::default();
        let (first, true) = order.ask("a") else { panic!() };
        let [(second, false), (third, false)] = [order.ask("a"), order.ask("a")] else { panic!() };
        let (other, true) = order.ask("b") else { panic!() };
        assert_eq!(order.ask_if_free("a"), None);
        assert_eq!((order.holder("a"), order.holder("c")), (Some(first), None));
        assert_eq!(order.leave("a", second), None, "it did not have the turn");
        assert_eq!(order.leave("a", first), Some(third));
        assert_eq!(order.leave("a", third), None);
        assert_eq!(order.leave("b", other), None);
        assert!(order.containers.is_empty());
        assert!(order.ask_if_free("a").is_some());
    }
}
