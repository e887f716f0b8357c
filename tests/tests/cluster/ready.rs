//! How long a node takes from `kubectl apply -k` to Ready.

use std::fs;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use netattach_tests::cluster::site::{SOCKET, Site};

/// What is promised of a machine that is not shared.
const PROMISED: Duration = Duration::from_secs(20);
/// What a machine may take that other tests and builds share.
const SHARED: Duration = Duration::from_secs(60);
/// How long is looked at what the machine does. A cluster without work takes a tenth of two processors.
const LOOK: Duration = Duration::from_secs(1);
/// Least part of the processors' time that is idle on a machine that is not shared.
const IDLE: f64 = 0.6;

/// A measurement under way.
pub(crate) struct Ready {
    idle: f64,
    since: Instant,
}

impl Ready {
    /// From now on, after a look at what else goes on.
    pub(crate) fn begin() -> Self {
        Self { idle: idle(), since: Instant::now() }
    }

    /// Waits until the node is ready and its agent serves: with a primary network, it is ready without. Fails if that took longer
    /// than promised and nobody else used the processors, before and after: what took its time then was ours.
    #[track_caller]
    pub(crate) fn assert_in_time(self, site: &Site, what: &str) {
        site.worker.wait_until_ready(site.cluster()).unwrap();
        let serves = || UnixStream::connect(SOCKET).is_ok();
        assert!(site.eventually(serves), "{}", site.told());
        let ready = self.since.elapsed();
        let idle = self.idle.min(idle());
        let limit = if idle >= IDLE { PROMISED } else { SHARED };
        eprintln!(
            "{what}: node ready {:.1} s after kubectl apply -k; {} s are allowed where {:.0} % of the processors are idle",
            ready.as_secs_f64(),
            limit.as_secs(),
            idle * 100.0
        );
        assert!(ready < limit, "{ready:?}\n{}", site.told());
    }
}

/// The part of all processors' time that is idle.
fn idle() -> f64 {
    let [before, after] = [Duration::ZERO, LOOK].map(|pause| {
        std::thread::sleep(pause);
        let text = fs::read_to_string("/proc/stat").unwrap();
        times(&text)
    });
    part(before, after)
}

/// Idle time and all time of all processors, in ticks: the first line of `/proc/stat` (proc(5)). A guest's time is a part of
/// `user`, and what waits for a disk is idle.
fn times(stat: &str) -> (u64, u64) {
    let words = stat.lines().next().unwrap_or_default().split_whitespace().skip(1).take(8);
    let ticks: Vec<u64> = words.map(|word| word.parse().unwrap()).collect();
    (ticks[3] + ticks[4], ticks.iter().sum())
}

fn part(before: (u64, u64), after: (u64, u64)) -> f64 {
    // In a second of no ticks nothing was done.
    if after.1 == before.1 { 1.0 } else { (after.0 - before.0) as f64 / (after.1 - before.1) as f64 }
}

#[test]
fn idle_time_is_that_of_all_processors() {
    let before = times("cpu  100 0 50 800 50 0 0 0 7 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n");
    let after = times("cpu  150 10 70 880 70 5 5 10 9 0\n");
    assert_eq!((before, after), ((850, 1000), (950, 1200)));
    assert!((part(before, after) - 0.5).abs() < 1e-9);
    assert!((part(before, before) - 1.0).abs() < 1e-9);
}
