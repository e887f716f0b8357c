//! Measures how the time of one operation is spent.
//!
//! An operation blocks one thread from start to end ([`operation`]). Modules name their work ([`part`]); a part's time
//! does not include that of nested parts, so that all of them add up to the total. Outside an operation a part costs an
//! access to a thread-local variable; within one, two readings of the monotonic clock.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

/// Name for the time outside of all parts.
const REST: &str = "the rest";

thread_local! {
    static CLOCK: RefCell<Option<Clock>> = const { RefCell::new(None) };
}

/// How often each part ran and its total time. Printed as `name=count/microseconds`, separated by commas, in the order
/// of the names. The number of names is bounded: they are constants in the source.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Times(BTreeMap<&'static str, (u32, Duration)>);

impl Times {
    /// The time of all parts together.
    pub fn total(&self) -> Duration {
        self.0.values().map(|(_, time)| *time).sum()
    }

    fn add(&mut self, name: &'static str, runs: u32, time: Duration) {
        let (count, sum) = self.0.entry(name).or_default();
        *count = count.saturating_add(runs);
        *sum = sum.saturating_add(time);
    }
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (name, (count, time))) in self.0.iter().enumerate() {
            let comma = if number == 0 { "" } else { "," };
            write!(f, "{comma}{name}={count}/{}", time.as_micros())?;
        }
        Ok(())
    }
}

/// The clock of the operation on this thread.
#[derive(Debug)]
struct Clock {
    current: &'static str,
    since: Instant,
    times: Times,
}

impl Clock {
    /// Adds the time until now to the current part, and switches to another.
    fn switch(&mut self, to: &'static str, now: Instant) -> &'static str {
        self.times.add(self.current, 0, now.saturating_duration_since(self.since));
        self.since = now;
        std::mem::replace(&mut self.current, to)
    }
}

/// Returns to the enclosing part, also when the part panics.
struct Within(Option<&'static str>);

impl Drop for Within {
    fn drop(&mut self) {
        let Some(around) = self.0 else { return };
        with_clock(|clock| {
            clock.switch(around, Instant::now());
        });
    }
}

fn with_clock<T>(work: impl FnOnce(&mut Clock) -> T) -> Option<T> {
    CLOCK.with(|clock| clock.borrow_mut().as_mut().map(work))
}

/// Runs an operation on this thread and returns its times. Operations are not nested.
pub fn operation<T>(work: impl FnOnce() -> T) -> (T, Times) {
    let clock = Clock { current: REST, since: Instant::now(), times: Times::default() };
    CLOCK.with(|place| *place.borrow_mut() = Some(clock));
    let done = work();
    let mut times = Times::default();
    if let Some(mut clock) = CLOCK.with(|place| place.borrow_mut().take()) {
        clock.switch(REST, Instant::now());
        clock.times.add(REST, 1, Duration::ZERO);
        times = clock.times;
    }
    (done, times)
}

/// Runs one part of the operation on this thread, if there is one.
pub fn part<T>(name: &'static str, work: impl FnOnce() -> T) -> T {
    let around = with_clock(|clock| {
        clock.times.add(name, 1, Duration::ZERO);
        clock.switch(name, Instant::now())
    });
    let _within = Within(around);
    work()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(times: &Times) -> Vec<(&'static str, u32)> {
        times.0.iter().map(|(name, (count, _))| (*name, *count)).collect()
    }

    #[test]
    fn parts_within_parts_add_up_to_the_whole() {
        let began = Instant::now();
        let (answer, times) = operation(|| {
            part("outer", || {
                std::thread::sleep(Duration::from_millis(2));
                part("inner", || std::thread::sleep(Duration::from_millis(3)));
                part("inner", || 7)
            })
        });
        let whole = began.elapsed();
        assert_eq!(answer, 7);
        assert_eq!(names(&times), [("inner", 2), ("outer", 1), (REST, 1)]);
        assert!(times.0["inner"].1 >= Duration::from_millis(3), "{times}");
        assert!(times.0["outer"].1 >= Duration::from_millis(2), "{times}");
        assert!(times.total() <= whole, "{times} in {whole:?}");
        assert!(times.total() >= Duration::from_millis(5), "{times}");
    }

    #[test]
    fn a_part_outside_an_operation_is_just_run() {
        assert_eq!(part("anything", || 7), 7);
        let (_, times) = operation(|| ());
        assert_eq!(names(&times), [(REST, 1)]);
    }

    #[test]
    fn a_part_that_panics_ends() {
        let (_, times) = operation(|| {
            let _ = std::panic::catch_unwind(|| part("bad", || panic!("on purpose")));
            std::thread::sleep(Duration::from_millis(2));
        });
        assert_eq!(names(&times), [("bad", 1), (REST, 1)]);
        assert!(times.0[REST].1 >= Duration::from_millis(2), "{times}");
    }

    #[test]
    fn times_are_printed_for_programs() {
        let mut times = Times::default();
        times.add("journal", 3, Duration::from_micros(1_500));
        times.add("RTM_NEWLINK", 1, Duration::from_nanos(99_900));
        assert_eq!(times.to_string(), "RTM_NEWLINK=1/99,journal=3/1500");
    }
}
