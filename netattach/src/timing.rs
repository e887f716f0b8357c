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
pub struct Times(BTreeMap<&'static str, (u32, Duration)>, Vec<Run>);

/// One run of a part, including nested parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Its name.
    pub name: &'static str,
    /// When it began.
    pub begun: Instant,
    /// Its duration.
    pub took: Duration,
}

/// Most runs of an operation that are kept, the first ones.
const MOST_RUNS: usize = 256;

impl Times {
    /// Returns the time of all parts together.
    pub fn total(&self) -> Duration {
        self.0.values().map(|(_, time)| *time).sum()
    }

    /// Returns each part with its time.
    pub fn parts(&self) -> impl Iterator<Item = (&'static str, Duration)> + '_ {
        self.0.iter().map(|(name, (_, time))| (*name, *time))
    }

    /// Returns the runs of parts, in the order in which they ended.
    pub fn runs(&self) -> &[Run] {
        &self.1
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

/// Returns to the enclosing part when it is dropped.
struct Within {
    around: &'static str,
    name: &'static str,
    begun: Instant,
}

impl Drop for Within {
    fn drop(&mut self) {
        let around = self.around;
        with_clock(|clock| {
            let now = Instant::now();
            clock.switch(around, now);
            if clock.times.1.len() < MOST_RUNS {
                let took = now.saturating_duration_since(self.begun);
                clock.times.1.push(Run { name: self.name, begun: self.begun, took });
            }
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
    let entered = with_clock(|clock| {
        let begun = Instant::now();
        clock.times.add(name, 1, Duration::ZERO);
        (clock.switch(name, begun), begun)
    });
    let _within = entered.map(|(around, begun)| Within { around, name, begun });
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
        let runs: Vec<&str> = times.runs().iter().map(|run| run.name).collect();
        assert_eq!(runs, ["inner", "inner", "outer"]);
        let [first, _, outer] = times.runs() else { panic!("three runs") };
        assert!(outer.begun <= first.begun && outer.took >= first.took, "{times:?}");
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
    fn times_are_printed_for_programs() {
        let mut times = Times::default();
        times.add("journal", 3, Duration::from_micros(1_500));
        times.add("RTM_NEWLINK", 1, Duration::from_nanos(99_900));
        assert_eq!(times.to_string(), "RTM_NEWLINK=1/99,journal=3/1500");
    }
}
