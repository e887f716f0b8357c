//! Intervals of periodic checks: the cost of a check grows with the node, but the cost of all checks together must
//! stay bounded.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// A check may use at most this fraction of a processor's time: 1/20000. There are about fifteen checks, some of which
/// may use two parts, so together they use a thousandth.
const PART: u32 = 20_000;
/// Factor for a check that covers only a part per run and continues in the next run, for one that is rare, and where
/// what is found is waited for: it would otherwise be found twice as late.
const TWO_PARTS: u32 = 2;
/// A check is rare if its interval on a small node is at least this.
const RARE: Duration = Duration::from_secs(30);
/// Upper limit of a check's interval, as a multiple of its shortest interval, however expensive the check is.
const MOST: u32 = 6;
/// How long a change waits for further changes that come with it: attaching a pod makes several.
const GATHER: Duration = Duration::from_millis(50);
/// The upper limit of this wait on a node whose checks take long.
const LONGEST_GATHER: Duration = Duration::from_millis(500);
/// During a series of changes, checks of them use at most this fraction (1/10) of the time.
const PART_OF_CHANGES: u32 = 10;

/// Runs a check of this name, and returns the processor time that it has used: on a busy machine a check takes longer,
/// but does not cost more.
pub fn measured<T>(what: &'static str, look: impl FnOnce() -> T) -> (T, Duration) {
    let before = worked();
    let looked = look();
    let worked = worked().saturating_sub(before);
    tracing::trace!(what, us = worked.as_micros(), "looked");
    (looked, worked)
}

/// Returns the processor time that this thread has used.
pub fn worked() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

/// Returns a random time of up to `most`, to spread what all agents of a cluster do for one reason.
pub fn spread(most: Duration) -> Duration {
    // A hash map's state has random keys.
    let random = RandomState::new().hash_one(0_u8) % 1024;
    most * (random as u32) / 1024
}

/// Returns the pause after a check that has used this much processor time; `every` is its interval on a small node.
/// The pause is a multiple of `every`, so that checks stay in phase with others (`ticks`).
pub fn pause(every: Duration, worked: Duration) -> Duration {
    if every < RARE { pause_by_one_part(every, worked) } else { pause_by_two_parts(every, worked) }
}

/// Like [`pause`], for a check that may use two parts: one that runs for [`longest_look`] at most and continues in the
/// next run, or whose findings are waited for. A rare check may use them anyway.
pub fn pause_by_two_parts(every: Duration, worked: Duration) -> Duration {
    pause_by_one_part(every, worked / TWO_PARTS)
}

fn pause_by_one_part(every: Duration, worked: Duration) -> Duration {
    let wanted = worked.saturating_mul(PART).as_nanos();
    let times = wanted.div_ceil(every.as_nanos().max(1)).clamp(1, u128::from(MOST));
    every.saturating_mul(u32::try_from(times).unwrap_or(MOST))
}

/// Returns the pause after a check that may use two parts, limited to `least` and `most`.
pub fn pause_between(least: Duration, most: Duration, worked: Duration) -> Duration {
    worked.saturating_mul(PART / TWO_PARTS).clamp(least, most)
}

/// Returns how long a change waits for further changes before the check. `took`: the duration of the last such check.
pub fn gather(took: Duration) -> Duration {
    took.saturating_mul(PART_OF_CHANGES).clamp(GATHER, LONGEST_GATHER)
}

/// Returns the pause after so many failures in a row: `first` after one, and twice as long after each further one, up
/// to `most`.
pub fn after_failures(first: Duration, failed: u32, most: Duration) -> Duration {
    // More would be years, whatever the first pause is.
    let doublings = failed.saturating_sub(1).min(31);
    first.saturating_mul(1 << doublings).min(most)
}

/// Work that has failed and is tried again, each piece of it after pauses of its own: see [`after_failures`].
#[derive(Debug)]
pub struct Retries<K> {
    first: Duration,
    most: Duration,
    tries: u32,
    failed: BTreeMap<K, Failed>,
}

#[derive(Debug, Clone, Copy)]
struct Failed {
    /// Failures in a row.
    times: u32,
    due: Instant,
}

impl<K: Ord + Clone> Retries<K> {
    /// Nothing has failed. `first` and `most`: the first pause and the longest one.
    pub fn new(first: Duration, most: Duration) -> Self {
        Self { first, most, tries: u32::MAX, failed: BTreeMap::new() }
    }

    /// Gives up what has failed that many times in a row.
    pub fn at_most(self, tries: u32) -> Self {
        Self { tries, ..self }
    }

    /// Notes the outcome: of what was `tried`, all but the `failed` is done. Returns whether something else than before
    /// is to be tried again.
    pub fn note(&mut self, tried: &BTreeSet<K>, failed: &BTreeSet<K>, now: Instant) -> bool {
        let before: Vec<K> = self.failed.keys().cloned().collect();
        self.failed.retain(|what, _| !tried.contains(what) || failed.contains(what));
        for what in failed {
            let times = self.failures(what).saturating_add(1);
            if times >= self.tries {
                self.failed.remove(what);
                continue;
            }
            let due = now + after_failures(self.first, times, self.most);
            self.failed.insert(what.clone(), Failed { times, due });
        }
        !before.iter().eq(self.failed.keys())
    }

    /// How many times in a row this has failed.
    pub fn failures(&self, what: &K) -> u32 {
        self.failed.get(what).map_or(0, |it| it.times)
    }

    /// What is to be tried again now.
    pub fn due(&self, now: Instant) -> BTreeSet<K> {
        let due = self.failed.iter().filter(|(_, it)| it.due <= now);
        due.map(|(what, _)| what.clone()).collect()
    }

    /// How long until something is to be tried again; endless if nothing is.
    pub fn pause(&self, now: Instant) -> Duration {
        let next = self.failed.values().map(|it| it.due).min();
        next.map_or(Duration::MAX, |due| due.saturating_duration_since(now))
    }
}

/// Returns the longest [`pause`].
pub fn longest(every: Duration) -> Duration {
    every.saturating_mul(MOST)
}

/// Returns how long a check that continues in its next run may run: it then stays within its fraction even with the
/// longest [`pause`].
pub fn longest_look(every: Duration) -> Duration {
    longest(every) / PART * TWO_PARTS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_that_take_long_are_taken_rarely_and_never_not_at_all() {
        let table = [
            (5, 0, 5_000),
            (5, 1, 20_000),
            (5, 2, 30_000),
            (5, 60, 30_000),
            (30, 3, 30_000),
            (30, 4, 60_000),
            (30, 9_000, 180_000),
        ];
        for (every, took, expected) in table {
            let pause = pause(Duration::from_secs(every), Duration::from_millis(took));
            assert_eq!(pause, Duration::from_millis(expected), "{took} ms every {every} s");
        }
        assert_eq!(pause(Duration::from_secs(5), Duration::MAX), Duration::from_secs(30));
        assert_eq!(longest_look(Duration::from_secs(5)), Duration::from_millis(3));
        assert_eq!(pause(Duration::ZERO, Duration::ZERO), Duration::ZERO);
        let [least, most] = [5, 60].map(Duration::from_secs);
        let between = |took| pause_between(least, most, Duration::from_millis(took)).as_secs();
        assert_eq!([0, 1, 7].map(between), [5, 10, 60]);
    }

    #[test]
    fn changes_that_come_one_after_another_take_a_tenth_of_the_time() {
        for (took, expected) in [(0, 50), (5, 50), (7, 70), (50, 500), (9_000, 500)] {
            assert_eq!(gather(Duration::from_millis(took)), Duration::from_millis(expected), "{took} ms");
        }
        assert_eq!(gather(Duration::MAX), LONGEST_GATHER);
    }

    #[test]
    fn failures_in_a_row_are_tried_again_more_and_more_rarely() {
        let (first, most) = (Duration::from_secs(2), Duration::from_secs(60));
        let pauses =
            [0, 1, 2, 3, 5, 6, 7, u32::MAX].map(|failed| after_failures(first, failed, most).as_secs());
        assert_eq!(pauses, [2, 2, 4, 8, 32, 60, 60, 60]);
        assert_eq!(after_failures(Duration::MAX, u32::MAX, Duration::MAX), Duration::MAX);
    }

    #[test]
    fn what_fails_is_tried_again_after_pauses_of_its_own() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let [nothing, a, b, both] =
            [&[][..], &["a"], &["b"], &["a", "b"]].map(|it| BTreeSet::from_iter(it.to_vec()));
        let mut retries = Retries::new(Duration::from_secs(1), Duration::from_secs(8));
        assert!(!retries.note(&both, &nothing, begun));
        assert_eq!(retries.pause(begun), Duration::MAX);
        assert!(retries.note(&both, &a, begun));
        assert_eq!((retries.pause(begun), retries.due(begun)), (Duration::from_secs(1), nothing.clone()));
        assert!(!retries.note(&a, &a, at(1)));
        // One that fails for the first time does not wait as long as another, nor does the other wait any longer.
        assert!(retries.note(&b, &b, at(1)));
        assert_eq!((retries.pause(at(1)), retries.due(at(2))), (Duration::from_secs(1), b.clone()));
        assert_eq!(["a", "b", "c"].map(|what| retries.failures(&what)), [2, 1, 0]);
        assert!(retries.note(&b, &nothing, at(2)));
        assert_eq!((retries.pause(at(2)), retries.due(at(3))), (Duration::from_secs(1), a.clone()));
        for seconds in [3, 7, 15] {
            assert!(!retries.note(&a, &a, at(seconds)));
        }
        assert_eq!(retries.pause(at(15)), Duration::from_secs(8));
        assert_eq!((retries.pause(at(60)), retries.due(at(60))), (Duration::ZERO, a.clone()));
        // Another one fails as this one ends.
        assert!(retries.note(&both, &b, at(60)));
        // What was tried for another reason is done as well.
        assert!(retries.note(&both, &nothing, at(60)));
        assert_eq!(retries.pause(at(60)), Duration::MAX);
    }

    #[test]
    fn what_fails_too_often_in_a_row_is_given_up_and_begins_anew_when_it_is_asked_for_again() {
        let (now, a, nothing) = (Instant::now(), BTreeSet::from(["a"]), BTreeSet::new());
        let mut retries = Retries::new(Duration::from_secs(1), Duration::from_secs(8)).at_most(3);
        for _ in 0..2 {
            let failures = [1, 2, 0].map(|_| {
                retries.note(&a, &a, now);
                retries.failures(&"a")
            });
            assert_eq!(failures, [1, 2, 0]);
            assert_eq!(retries.pause(now), Duration::MAX);
        }
        retries.note(&a, &a, now);
        retries.note(&a, &nothing, now);
        assert_eq!(retries.failures(&"a"), 0);
    }

    #[test]
    fn pauses_are_multiples_of_the_interval() {
        let every = Duration::from_secs(5);
        for worked in (0..5_000).step_by(13).map(Duration::from_micros) {
            let pause = pause(every, worked);
            assert_eq!(pause.as_secs_f64() % 5.0, 0.0, "{worked:?}");
            assert!(pause >= worked * PART || pause == longest(every), "{worked:?}");
        }
    }

    /// A look that is cut short and continued is taken as often as one may be that takes half as long.
    #[test]
    fn a_look_that_is_continued_costs_two_parts() {
        let every = Duration::from_secs(5);
        assert_eq!(pause_by_two_parts(every, longest_look(every)), longest(every));
        assert_eq!(pause_by_two_parts(every, Duration::from_micros(500)), every);
        assert_eq!(pause_by_two_parts(every, Duration::from_micros(1_900)), every * 4);
        // One that is rare as well costs no more than that.
        assert_eq!(pause_by_two_parts(RARE, longest_look(RARE)), longest(RARE));
        assert_eq!(pause_by_two_parts(RARE, Duration::from_millis(4)), RARE * 2);
    }
}
