//! Timers with a common phase: the tasks that a thread runs every second all run at the same moment, so that the
//! thread wakes once for all of them. All intervals count from one origin, so tasks that run every five seconds run
//! at a moment of those that run every second.

use std::sync::OnceLock;
use std::time::Duration;

use tokio::time::{Instant, Interval, MissedTickBehavior};

/// Pauses end at ticks of this interval; pauses of [`COARSE`] and longer at ticks of that.
const BASE: Duration = Duration::from_secs(1);
const COARSE: Duration = Duration::from_secs(5);
/// The work before a pause takes time itself, so a pause that would end up to this long before a tick ends at that
/// tick.
const LATE: Duration = Duration::from_millis(500);

/// Ticks at once, and from then on together with all others of that interval. A late tick does not move later ones.
pub fn ticks(every: Duration) -> Interval {
    let mut ticks = tokio::time::interval_at(last(every), every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    ticks
}

/// Waits for the next tick of that interval.
pub async fn next(every: Duration) {
    tokio::time::sleep_until(last(every) + every).await;
}

/// Waits for about this duration, until a tick at which other tasks wake too. A pause of five seconds or more is
/// never prolonged, a shorter one by half a second at most.
pub async fn pause(pause: Duration) {
    let (origin, now) = (origin(), Instant::now());
    let since = now.saturating_duration_since(origin);
    tokio::time::sleep_until(origin + end(since, pause)).await;
}

/// Returns when a pause that begins at `since` ends; both relative to the origin.
fn end(since: Duration, pause: Duration) -> Duration {
    let end = since.saturating_add(pause);
    if pause >= COARSE {
        // Shorter than the pause, by less than [`COARSE`].
        return whole(end, COARSE);
    }
    if pause >= BASE {
        return whole(end.saturating_add(LATE), BASE);
    }
    end
}

/// Returns the last multiple of an interval up to `since`.
fn whole(since: Duration, every: Duration) -> Duration {
    let past = since.as_nanos().checked_rem(every.as_nanos()).unwrap_or(0);
    // The remainder is less than an interval, and no interval takes centuries.
    since.saturating_sub(Duration::from_nanos(past.try_into().unwrap_or(0)))
}

/// When this process first used a timer.
fn origin() -> Instant {
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    *ORIGIN.get_or_init(Instant::now)
}

/// Returns the last tick of that interval: a multiple of it since the origin.
fn last(every: Duration) -> Instant {
    let origin = origin();
    origin + whole(Instant::now().saturating_duration_since(origin), every)
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

    #[test]
    fn pauses_end_with_ticks_and_are_not_longer_than_they_are_meant_to_be() {
        let table = [
            ("of a second, after a look on the tick", (7_003, 1_000), 8_000),
            ("of a second, after one beside it", (7_300, 1_000), 8_000),
            ("of a second, after a long one", (7_900, 1_000), 9_000),
            ("of two seconds", (6_001, 2_000), 8_000),
            ("of five seconds, after a look on the tick", (5_020, 5_000), 10_000),
            ("of five seconds, after one beside it", (7_300, 5_000), 10_000),
            ("of five seconds, right before a tick", (9_999, 5_000), 10_000),
            ("of half a minute, after one that took a second", (6_000, 30_000), 35_000),
            ("of a few milliseconds", (7_003, 50), 7_053),
        ];
        for (what, (since, pause), expected) in table {
            let of = Duration::from_millis;
            assert_eq!(end(of(since), of(pause)), of(expected), "{what}");
        }
        // A pause never ends at once, whenever it begins.
        for since in (0..20_000).step_by(7).map(Duration::from_millis) {
            for pause in [1, 2, 4, 5, 6, 30, 180].map(Duration::from_secs) {
                let ends = end(since, pause);
                assert!(ends > since && ends <= since + pause + LATE, "{since:?} {pause:?} {ends:?}");
                assert!(pause < COARSE || ends <= since + pause, "{since:?} {pause:?} {ends:?}");
            }
        }
        assert_eq!(end(Duration::MAX, Duration::MAX), whole(Duration::MAX, COARSE));
    }

    #[tokio::test]
    async fn a_pause_and_a_ticker_end_together() {
        let mut seconds = ticks(BASE);
        seconds.tick().await;
        seconds.tick().await;
        let before = last(BASE);
        tokio::time::sleep(Duration::from_millis(20)).await;
        pause(BASE).await;
        // However late this runs.
        assert!(last(BASE) > before && Instant::now() >= before + BASE);
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
