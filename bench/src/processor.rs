//! The use of the processors during a measurement: by whom, and how much of it is not attributed.

use std::fs;
use std::io;
use std::ops::AddAssign;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::Serialize;

use super::agent::Agent;

/// Processor time since some moment. Processes that do not exist have used none.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct Shares {
    /// Processes that this one has started and that have ended: the floor's, or the shim's.
    pub(super) processes: Duration,
    /// The threads that have started those processes.
    pub(super) callers: Duration,
    /// The agent.
    pub(super) agent: Duration,
    /// All other threads of this process: the API server's.
    pub(super) server: Duration,
    /// The kernel on behalf of none of these, and all other processes of the machine.
    pub(super) rest: Duration,
    /// Not used.
    pub(super) idle: Duration,
}

impl AddAssign for Shares {
    fn add_assign(&mut self, other: Self) {
        self.processes += other.processes;
        self.callers += other.callers;
        self.agent += other.agent;
        self.server += other.server;
        self.rest += other.rest;
        self.idle += other.idle;
    }
}

/// Reads the clocks at the beginning and at the end.
pub(super) struct Meter<'a> {
    agent: &'a Agent,
    began: Instant,
    before: Clocks,
    callers: AtomicU64,
}

/// Clocks of the machine, with steps of ten milliseconds; of the agent, of this process and of its children, exact.
struct Clocks {
    busy: Duration,
    agent: Duration,
    own: Duration,
    children: Duration,
}

impl<'a> Meter<'a> {
    pub(super) fn begin(agent: &'a Agent) -> anyhow::Result<Self> {
        let before = Clocks::read(agent)?;
        Ok(Self { agent, began: Instant::now(), before, callers: AtomicU64::new(0) })
    }

    /// Runs the whole of a calling thread's work.
    pub(super) fn of_caller<T>(&self, work: impl FnOnce() -> T) -> T {
        let done = work();
        let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        // A thread of this bench lives for less than the centuries that fit.
        let used = Duration::try_from(used).unwrap_or_default().as_nanos() as u64;
        self.callers.fetch_add(used, Ordering::Relaxed);
        done
    }

    pub(super) fn end(&self) -> anyhow::Result<Shares> {
        let processors = thread::available_parallelism().map_or(1, |count| count.get() as u32);
        let all = self.began.elapsed() * processors;
        let (before, after) = (&self.before, Clocks::read(self.agent)?);
        let callers = Duration::from_nanos(self.callers.load(Ordering::Relaxed));
        let agent = after.agent.saturating_sub(before.agent);
        let own = after.own.saturating_sub(before.own);
        let processes = after.children.saturating_sub(before.children);
        let busy = after.busy.saturating_sub(before.busy);
        Ok(Shares {
            processes,
            callers,
            agent,
            server: own.saturating_sub(callers),
            rest: busy.saturating_sub(agent + own + processes),
            idle: all.saturating_sub(busy),
        })
    }
}

impl Clocks {
    fn read(agent: &Agent) -> anyhow::Result<Self> {
        let own = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        Ok(Self {
            busy: busy()?,
            agent: agent.processor_time()?,
            own: Duration::try_from(own).unwrap_or_default(),
            children: of_children().context("ask for the processor time of ended processes")?,
        })
    }
}

/// Time in which the machine's processors were not idle.
fn busy() -> anyhow::Result<Duration> {
    /// user, nice, system, irq, softirq: not idle, not iowait, and no steal time.
    const BUSY: [usize; 5] = [0, 1, 2, 5, 6];
    let stat = fs::read_to_string("/proc/stat").context("read /proc/stat")?;
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu ")).context("/proc/stat has no sum")?;
    let ticks: Vec<u64> = line.split_whitespace().filter_map(|ticks| ticks.parse().ok()).collect();
    let busy: u64 = BUSY.iter().filter_map(|column| ticks.get(*column)).sum();
    Ok(Duration::from_millis(busy * 1000 / rustix::param::clock_ticks_per_second()))
}

fn of_children() -> io::Result<Duration> {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the kernel writes at most the structure, which lives through the call; all of its bits are numbers.
    let usage = unsafe {
        if libc::getrusage(libc::RUSAGE_CHILDREN, usage.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        usage.assume_init()
    };
    let of = |time: libc::timeval| {
        Duration::from_secs(time.tv_sec.unsigned_abs()) + Duration::from_micros(time.tv_usec.unsigned_abs())
    };
    Ok(of(usage.ru_utime) + of(usage.ru_stime))
}
