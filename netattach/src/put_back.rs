//! Limits how often something is restored that another program keeps changing: a few times immediately, then once a
//! minute as long as the changes go on. Restoring is never given up, and the caller reports what is restored and how
//! often.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Number of times that something is restored immediately, before it counts as fought over.
const AT_ONCE: u32 = 5;
/// After that, the shortest interval between two restores.
const FOUGHT_OVER: Duration = Duration::from_secs(60);
/// If nothing was restored for this long, the thing does not count as fought over any more.
const PEACE: Duration = Duration::from_secs(600);

/// Counts the restores of each thing and limits their rate.
#[derive(Debug)]
pub(crate) struct PutBack<K>(BTreeMap<K, Rival>);

#[derive(Debug)]
struct Rival {
    times: u32,
    last: Instant,
    /// Whether a restore was skipped.
    was_left: bool,
}

impl<K> Default for PutBack<K> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<K: Ord> PutBack<K> {
    /// Counts one more restore.
    ///
    /// # Errors
    /// The thing was restored too often just now; contains the number of times.
    pub(crate) fn once_more(&mut self, key: K, now: Instant) -> Result<(), u32> {
        self.check(&key, now)?;
        self.count(key, now);
        Ok(())
    }

    /// Whether the thing may be restored now. A caller that counts only successful restores calls [`PutBack::count`]
    /// afterwards.
    ///
    /// # Errors
    /// The thing was restored too often just now; contains the number of times.
    pub(crate) fn check(&mut self, key: &K, now: Instant) -> Result<(), u32> {
        self.0.retain(|_, rival| now.duration_since(rival.last) < PEACE);
        match self.0.get_mut(key) {
            Some(rival) if rival.times >= AT_ONCE && now.duration_since(rival.last) < FOUGHT_OVER => {
                rival.was_left = true;
                Err(rival.times)
            }
            _ => Ok(()),
        }
    }

    /// Counts one more restore.
    pub(crate) fn count(&mut self, key: K, now: Instant) {
        let rival = self.0.entry(key).or_insert(Rival { times: 0, last: now, was_left: false });
        rival.times = rival.times.saturating_add(1);
        rival.last = now;
    }

    /// Resets the count of a thing, because the cause of the changes is gone.
    pub(crate) fn forget(&mut self, key: &K) {
        self.0.remove(key);
    }

    /// Returns how often a thing was restored that was changed too often, until it stays unchanged for [`PEACE`].
    pub(crate) fn fought_over(&self, key: &K, now: Instant) -> Option<u32> {
        let rival = self.0.get(key)?;
        (rival.was_left && now.duration_since(rival.last) < PEACE).then_some(rival.times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_change_again_and_again_is_put_back_once_a_minute() {
        let mut bound = PutBack::default();
        let start = Instant::now();
        let mut at = |seconds| {
            let now = start + Duration::from_secs(seconds);
            let outcome = bound.once_more("a", now);
            (outcome, bound.fought_over(&"a", now))
        };
        for second in 0..5 {
            assert_eq!(at(second), (Ok(()), None));
        }
        assert_eq!(at(5), (Err(5), Some(5)));
        assert_eq!([at(63), at(64), at(65)], [(Err(5), Some(5)), (Ok(()), Some(6)), (Err(6), Some(6))]);
        for second in 64 + 600..64 + 605 {
            assert_eq!(at(second), (Ok(()), None), "nobody has changed it for long");
        }
        assert_eq!(bound.once_more("b", start), Ok(()));
        assert_eq!(bound.fought_over(&"c", start), None);
    }

    #[test]
    fn what_is_forgotten_is_put_back_at_once() {
        let mut bound = PutBack::default();
        let start = Instant::now();
        let outcomes: Vec<_> = (0..6).map(|_| bound.once_more("a", start)).collect();
        assert_eq!(outcomes[5], Err(5));
        bound.forget(&"a");
        assert_eq!((bound.fought_over(&"a", start), bound.once_more("a", start)), (None, Ok(())));
    }

    #[test]
    fn what_is_left_alone_is_not_fought_over_any_more() {
        let mut bound = PutBack::default();
        let start = Instant::now();
        for _ in 0..6 {
            let _ = bound.once_more("a", start);
        }
        let at = |seconds| bound.fought_over(&"a", start + Duration::from_secs(seconds));
        assert_eq!((at(599), at(600)), (Some(5), None));
    }
}
