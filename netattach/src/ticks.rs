//! Timers of one phase: what several tasks of a thread do every second they do in the same moment, and the thread wakes once
//! for all of it.

use std::sync::OnceLock;
use std::time::Duration;

use tokio::time::{Instant, Interval, MissedTickBehavior};

/// Ticks at once, and from then on with all others of that interval. A tick that comes late moves no other.
pub fn ticks(every: Duration) -> Interval {
    let mut ticks = tokio::time::interval_at(last(every), every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    ticks
}

/// Waits for the next tick of that interval.
pub async fn next(every: Duration) {
    tokio::time::sleep_until(last(every) + every).await;
}

/// The last tick of that interval: a whole multiple of it since the process first asked.
fn last(every: Duration) -> Instant {
    static FIRST: OnceLock<Instant> = OnceLock::new();
    let now = Instant::now();
    let since = now.saturating_duration_since(*FIRST.get_or_init(|| now));
    let past = since.as_nanos().checked_rem(every.as_nanos()).unwrap_or(0);
    // Less than an interval, and no interval is of centuries.
    now.checked_sub(Duration::from_nanos(past.try_into().unwrap_or(0))).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERY: Duration = Duration::from_millis(40);

    /// Whether two moments are whole intervals apart.
    fn are_together(one: Instant, other: Instant) -> bool {
        let apart = one.max(other) - one.min(other);
        apart.as_nanos().is_multiple_of(EVERY.as_nanos())
    }

    /// However long the machine makes this test wait anywhere.
    #[tokio::test]
    async fn tickers_that_begin_at_different_times_tick_together_and_a_late_tick_moves_no_other() {
        let mut early = ticks(EVERY);
        let first = early.tick().await;
        tokio::time::sleep(EVERY / 4).await;
        let mut late = ticks(EVERY);
        assert!(are_together(late.tick().await, first));
        assert!(are_together(late.tick().await, first));
        tokio::time::sleep(EVERY * 2 + EVERY / 4).await;
        early.tick().await;
        assert!(are_together(early.tick().await, first));
        let before = last(EVERY);
        next(EVERY).await;
        assert!(last(EVERY) > before);
    }
}
