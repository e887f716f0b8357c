//! The time of a node from `kubectl apply -k` to Ready.

use std::fmt;
use std::fs;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::site::{SOCKET, Site};

/// The limit on a machine that is not shared.
const PROMISED: Duration = Duration::from_secs(20);
/// The limit on a machine that is shared with other tests and builds.
const SHARED: Duration = Duration::from_secs(60);
/// How long the machine's load is measured. A cluster without work takes a tenth of two processors.
const LOOK: Duration = Duration::from_secs(1);
/// Least part of the processors' time that is idle on a machine that is not shared.
const IDLE: f64 = 0.6;

/// A measurement under way.
#[derive(Debug)]
pub struct Ready {
    idle: f64,
    since: Instant,
}

/// The duration, and its limit.
#[derive(Debug, Clone, Copy)]
pub struct Took {
    time: Duration,
    limit: Duration,
    idle: f64,
}

impl Ready {
    /// Starts the measurement, after measuring the load of the machine.
    ///
    /// # Errors
    /// The kernel does not report the use of the processors.
    pub fn begin() -> Result<Self> {
        Ok(Self { idle: idle()?, since: Instant::now() })
    }

    /// Waits until the node is ready and its agent serves: with a primary network, the node is ready without the
    /// agent.
    ///
    /// # Errors
    /// The node does not become ready, or that took longer than the limit of an unshared machine although no other
    /// process used the processors, before and after: the delay is then netattach's.
    pub fn in_time(self, site: &Site) -> Result<Took> {
        site.worker.wait_until_ready(site.cluster()).with_context(|| site.told())?;
        let serves = || UnixStream::connect(SOCKET).is_ok();
        ensure!(site.eventually(serves), "the agent does not serve: {}", site.told());
        let time = self.since.elapsed();
        let idle = self.idle.min(idle()?);
        let limit = if idle >= IDLE { PROMISED } else { SHARED };
        let took = Took { time, limit, idle };
        ensure!(time < limit, "{took}\n{}", site.told());
        Ok(took)
    }
}

impl fmt::Display for Took {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "node ready {:.1} s after kubectl apply -k; {} s are allowed where {:.0} % of the processors are idle",
            self.time.as_secs_f64(),
            self.limit.as_secs(),
            self.idle * 100.0
        )
    }
}

/// The part of all processors' time that is idle.
fn idle() -> Result<f64> {
    let look = || times(&fs::read_to_string("/proc/stat")?).context("/proc/stat has no times");
    let before = look()?;
    std::thread::sleep(LOOK);
    Ok(part(before, look()?))
}

/// Returns idle time and total time of all processors, in ticks: the first line of `/proc/stat` (proc(5)). A guest's
/// time is a part of `user`, and waiting for a disk counts as idle.
fn times(stat: &str) -> Option<(u64, u64)> {
    let words = stat.lines().next()?.split_whitespace().skip(1).take(8);
    let ticks: Vec<u64> = words.map(|word| word.parse().ok()).collect::<Option<_>>()?;
    Some((ticks.get(3)? + ticks.get(4)?, ticks.iter().sum()))
}

fn part(before: (u64, u64), after: (u64, u64)) -> f64 {
    // A second without ticks counts as idle.
    if after.1 == before.1 { 1.0 } else { (after.0 - before.0) as f64 / (after.1 - before.1) as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_is_that_of_all_processors() {
        let before = times("cpu  100 0 50 800 50 0 0 0 7 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n");
        let after = times("cpu  150 10 70 880 70 5 5 10 9 0\n");
        assert_eq!((before, after, times("cpu 1 x\n")), (Some((850, 1000)), Some((950, 1200)), None));
        assert!((part(before.unwrap(), after.unwrap()) - 0.5).abs() < 1e-9);
        assert!((part(before.unwrap(), before.unwrap()) - 1.0).abs() < 1e-9);
    }
}
