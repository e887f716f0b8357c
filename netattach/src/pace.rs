//! How often what nobody has asked for is looked at: what a look costs grows with the node, and what looks cost together
//! must not.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// One look may take a processor for one part in so many of the time. There are some ten of them.
const PART: u32 = 5000;
/// However much work a look is, it is taken again after so many times its interval.
const MOST: u32 = 6;

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

/// The pause after a look for which a processor has worked that long, of a kind that is taken every so often on a small node.
pub fn pause(every: Duration, worked: Duration) -> Duration {
    pause_between(every, longest(every), worked)
}

/// The same, of a kind with bounds of its own.
pub fn pause_between(least: Duration, most: Duration, worked: Duration) -> Duration {
    worked.saturating_mul(PART).clamp(least, most)
}

/// The longest [`pause`].
pub fn longest(every: Duration) -> Duration {
    every.saturating_mul(MOST)
}

/// How long a look may go on that can be continued by the next: even with the longest [`pause`] it costs its part.
pub fn longest_look(every: Duration) -> Duration {
    longest(every) / PART
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_that_take_long_are_taken_rarely_and_never_not_at_all() {
        let table = [(5, 0, 5_000), (5, 1, 5_000), (5, 4, 20_000), (5, 60, 30_000), (30, 9_000, 180_000)];
        for (every, took, expected) in table {
            let pause = pause(Duration::from_secs(every), Duration::from_millis(took));
            assert_eq!(pause, Duration::from_millis(expected), "{took} ms every {every} s");
        }
        assert_eq!(pause(Duration::from_secs(5), Duration::MAX), Duration::from_secs(30));
        assert_eq!(longest_look(Duration::from_secs(5)), Duration::from_millis(6));
    }
}
