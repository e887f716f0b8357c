//! How often what nobody has asked for is looked at: what a look costs grows with the node, and what looks cost together
//! must not.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// One look may take a processor for one part in so many of the time. There are some ten of them, which together take a thousandth.
const PART: u32 = 10_000;
/// Of a look that can be continued by the next, which takes a part of what there is to see, so many parts: else it would take twice
/// as long to have seen all.
const PARTS_OF_CONTINUED: u32 = 2;
/// However much work a look is, it is taken again after so many times its interval.
const MOST: u32 = 6;
/// How long a change waits for others that come with it: attaching a pod makes several.
const GATHER: Duration = Duration::from_millis(50);
/// The longest that one waits on a node whose looks take long.
const LONGEST_GATHER: Duration = Duration::from_millis(500);
/// While changes come one after another, one part in so many of the time goes to looks at them, and not all that is left of it.
const PART_OF_CHANGES: u32 = 10;

/// Does a look, and returns for how long a processor has worked for it: on a busy machine it takes longer, and costs no more.
pub fn measured<T>(look: impl FnOnce() -> T) -> (T, Duration) {
    let before = worked();
    let looked = look();
    (looked, worked().saturating_sub(before))
}

/// For how long a processor has worked for this thread.
pub fn worked() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

/// The pause after a look for which a processor has worked that long, of a kind that is taken every so often on a small node: a
/// multiple of that, so that looks of a kind stay in phase with others (`ticks`).
pub fn pause(every: Duration, worked: Duration) -> Duration {
    let wanted = worked.saturating_mul(PART).as_nanos();
    let times = wanted.div_ceil(every.as_nanos().max(1)).clamp(1, u128::from(MOST));
    every.saturating_mul(u32::try_from(times).unwrap_or(MOST))
}

/// The same, of a look that goes on for [`longest_look`] at most and is continued by the next.
pub fn pause_of_continued(every: Duration, worked: Duration) -> Duration {
    pause(every, worked / PARTS_OF_CONTINUED)
}

/// The pause after a look of a kind with bounds of its own.
pub fn pause_between(least: Duration, most: Duration, worked: Duration) -> Duration {
    worked.saturating_mul(PART).clamp(least, most)
}

/// How long a change waits for others before it is looked at. `took`: the last such look.
pub fn gather(took: Duration) -> Duration {
    took.saturating_mul(PART_OF_CHANGES).clamp(GATHER, LONGEST_GATHER)
}

/// The longest [`pause`].
pub fn longest(every: Duration) -> Duration {
    every.saturating_mul(MOST)
}

/// How long a look may go on that can be continued by the next: even with the longest [`pause`] it costs its part.
pub fn longest_look(every: Duration) -> Duration {
    longest(every) / PART * PARTS_OF_CONTINUED
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_that_take_long_are_taken_rarely_and_never_not_at_all() {
        let table = [
            (5, 0, 5_000),
            (5, 1, 10_000),
            (5, 2, 20_000),
            (5, 60, 30_000),
            (30, 4, 60_000),
            (30, 9_000, 180_000),
        ];
        for (every, took, expected) in table {
            let pause = pause(Duration::from_secs(every), Duration::from_millis(took));
            assert_eq!(pause, Duration::from_millis(expected), "{took} ms every {every} s");
        }
        assert_eq!(pause(Duration::from_secs(5), Duration::MAX), Duration::from_secs(30));
        assert_eq!(longest_look(Duration::from_secs(5)), Duration::from_millis(6));
        assert_eq!(pause(Duration::ZERO, Duration::ZERO), Duration::ZERO);
    }

    #[test]
    fn changes_that_come_one_after_another_take_a_tenth_of_the_time() {
        for (took, expected) in [(0, 50), (5, 50), (7, 70), (50, 500), (9_000, 500)] {
            assert_eq!(gather(Duration::from_millis(took)), Duration::from_millis(expected), "{took} ms");
        }
        assert_eq!(gather(Duration::MAX), LONGEST_GATHER);
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
        assert_eq!(pause_of_continued(every, longest_look(every)), longest(every));
        assert_eq!(pause_of_continued(every, Duration::from_micros(1_000)), every);
        assert_eq!(pause_of_continued(every, Duration::from_micros(3_900)), every * 4);
    }
}
