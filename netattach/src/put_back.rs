//! How often something is put back that others keep changing: a few times at once, then once a minute for as long as they go
//! on. It is never given up, and whoever uses this says what it is and how often.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How often something is put back at once, before it counts as fought over.
const AT_ONCE: u32 = 5;
/// After that, the least time between two times.
const FOUGHT_OVER: Duration = Duration::from_secs(60);
/// What stays as it is for so long is not fought over any more.
const PEACE: Duration = Duration::from_secs(600);

/// Bounds how often each thing is put back.
#[derive(Debug)]
pub(crate) struct PutBack<K>(BTreeMap<K, Rival>);

#[derive(Debug)]
struct Rival {
    times: u32,
    last: Instant,
    /// Whether it was not put back once.
    was_left: bool,
}

impl<K> Default for PutBack<K> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<K: Ord> PutBack<K> {
    /// Counts one more time.
    ///
    /// # Errors
    /// It was put back too often just now: how often.
    pub(crate) fn once_more(&mut self, key: K, now: Instant) -> Result<(), u32> {
        self.check(&key, now)?;
        self.count(key, now);
        Ok(())
    }

    /// Whether it may be put back now. Whoever has to see first whether that succeeds calls [`PutBack::count`] then.
    ///
    /// # Errors
    /// It was put back too often just now: how often.
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

    /// Counts one more time that it was put back.
    pub(crate) fn count(&mut self, key: K, now: Instant) {
        let rival = self.0.entry(key).or_insert(Rival { times: 0, last: now, was_left: false });
        rival.times = rival.times.saturating_add(1);
        rival.last = now;
    }

    /// Forgets how often something was put back: the reason why that was in vain has gone.
    pub(crate) fn forget(&mut self, key: &K) {
        self.0.remove(key);
    }

    /// How often something was put back that was changed too often, until it stays as it is.
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
