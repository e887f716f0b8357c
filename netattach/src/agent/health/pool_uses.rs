//! Use of the networks' pools, carried over from one check to the next. Pure.

use std::collections::BTreeSet;

use crate::cni::{CniError, code};
use crate::ipam::PoolUse;

/// The results of a check of the networks' pools.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct PoolUses {
    rows: Vec<PoolUse>,
    /// The networks with a pool that was locked by other processes.
    busy: BTreeSet<String>,
}

impl PoolUses {
    /// The use of each pool.
    pub(in crate::agent) fn rows(&self) -> &[PoolUse] {
        &self.rows
    }

    /// Records the result for a network. `before`: the previous check's results, which stay valid for a
    /// pool that is locked: a check hardly waits for the lock, as this would delay all other networks.
    ///
    /// # Errors
    /// The problem of its pools. A locked pool is a problem only if it was locked at the previous check
    /// too, since a burst of pods also locks pools.
    pub(in crate::agent) fn note(
        &mut self,
        before: &Self,
        network: &str,
        (used, room): (Vec<PoolUse>, Result<(), CniError>),
    ) -> Result<(), CniError> {
        let is_busy = room.as_ref().is_err_and(|error| error.code == code::TRY_AGAIN_LATER);
        if is_busy && used.is_empty() {
            self.rows.extend(before.rows.iter().filter(|row| row.network == network).cloned());
        }
        self.rows.extend(used);
        if is_busy {
            self.busy.insert(network.to_owned());
            if !before.busy.contains(network) {
                return Ok(());
            }
        }
        room
    }

    /// If there are more than `most` rows, keeps those of pools with addresses in use: any author can
    /// define further pools.
    pub(super) fn keep_most(&mut self, most: usize) {
        self.rows.sort_by_key(|row| row.used == 0);
        self.rows.truncate(most);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(network: &str, used: usize) -> PoolUse {
        PoolUse { network: network.to_owned(), family: "IPv4", size: 9, used }
    }

    #[test]
    fn a_pool_that_others_are_at_counts_as_it_was_and_is_named_at_the_second_look() {
        let busy = || Err(CniError::new(code::TRY_AGAIN_LATER, "locked"));
        let full = || Err(CniError::new(code::NOT_AVAILABLE, "full"));
        let look = |before: &PoolUses, found: [(&str, Vec<PoolUse>, Result<(), CniError>); 2]| {
            let mut uses = PoolUses::default();
            let told = found.map(|(network, used, room)| uses.note(before, network, (used, room)));
            (uses, told)
        };
        let (first, told) =
            look(&PoolUses::default(), [("a", vec![row("a", 3)], Ok(())), ("b", vec![row("b", 9)], full())]);
        assert_eq!(told, [Ok(()), full()]);
        let (second, told) = look(&first, [("a", Vec::new(), busy()), ("b", vec![row("b", 8)], Ok(()))]);
        assert_eq!(told, [Ok(()), Ok(())]);
        assert_eq!(second.rows(), [row("a", 3), row("b", 8)]);
        // The pool was read, and then locked by another process.
        let (third, told) = look(&second, [("a", Vec::new(), busy()), ("b", vec![row("b", 7)], busy())]);
        assert_eq!(told, [busy(), Ok(())]);
        assert_eq!(third.rows(), [row("a", 3), row("b", 7)]);
        let (_, told) = look(&third, [("a", vec![row("a", 4)], Ok(())), ("b", Vec::new(), busy())]);
        assert_eq!(told, [Ok(()), busy()]);
    }

    #[test]
    fn of_very_many_pools_those_that_pods_have_addresses_of_are_kept() {
        let mut uses = PoolUses { rows: vec![row("a", 0), row("b", 1), row("c", 2)], busy: BTreeSet::new() };
        uses.keep_most(2);
        assert_eq!(uses.rows(), [row("b", 1), row("c", 2)]);
    }
}
