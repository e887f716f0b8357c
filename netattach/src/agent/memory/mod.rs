//! Limits the memory that the agent keeps after use, in amount and in time.
//!
//! By default glibc's allocator keeps freed memory for later requests. It has up to eight arenas per
//! processor, none of which can use another's memory; pages in the middle of an arena are returned only on
//! an explicit request; and once a large block was freed, blocks up to that size (at most 32 MiB) are taken
//! from arenas, which then keep as much again. After a burst this is most of the process's memory. So the
//! agent sets a small number of arenas, has large blocks mapped and unmapped regardless of earlier frees,
//! and returns free memory when there is much of it.
//!
//! Code pages that only the start, a burst or the setup of a connection uses stay resident until the kernel
//! is short of memory, and count as used by the agent. At rest the agent tells the kernel that it does not
//! need them (`code`). At rest the checks for this run on a task that is awake anyway (`relay`).

mod code;
mod relay;

use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use self::relay::{Check, Relay};
use crate::rounds::{self, Begun};
use crate::ticks::ticks;

/// Number of arenas: operations mostly wait for the kernel, not for each other's memory.
const ARENAS: libc::c_int = 2;

/// Blocks of at least this size, in bytes, are mapped separately and returned at once; also the limit for free memory
/// at the end of an arena.
const LARGE: libc::c_int = 128 << 10;

/// Free resident bytes that are tolerated before memory is returned: returning it and faulting it in again
/// takes time.
const SLACK: usize = 4 << 20;

/// The same, in bytes, for a process at rest, where the time does not matter.
const SLACK_AT_REST: usize = 512 << 10;

/// After this many checks in which resident memory has changed by less than [`SAME`] bytes, the process is
/// at rest.
const REST: u32 = 2;
const SAME: usize = 64 << 10;

/// Growth of the resident bytes of the executable, since its pages were last given back, above which they
/// are given back at rest. The checks of an agent at rest use less.
const SLACK_OF_CODE: usize = 2 << 20;

/// Shortest time between two returns of code pages during one rest. The pages that a check runs are mapped
/// again, 64 KiB around each page, and checks are frequent. Each return takes half a millisecond, including
/// the page faults, and twice that beside a thousand attachments; of 16 MiB, 8 are resident a second later, and 14
/// after ten.
const LEAST_OF_CODE: Duration = Duration::from_secs(8);
/// A check that is this much too early still counts: checks are on ticks, which vary slightly.
const TICK: Duration = Duration::from_millis(250);

/// How often the process's memory is checked; and how often at rest, then together with other checks
/// ([`keep_at_rest`]).
const INTERVAL: Duration = Duration::from_millis(500);
const INTERVAL_AT_REST: Duration = Duration::from_secs(2);
/// After this many checks at rest, checks are rarer.
const LONG_REST: u32 = 10;

/// Used memory is counted when resident memory has changed by this many bytes since the last count, when
/// the process comes to rest, and every so many checks. The allocator walks all free blocks for a count: at
/// each check this took a third of the processor time of an agent at rest.
const MOVED: usize = 1 << 20;
const COUNTED: u32 = 20;
/// If a rest begins so soon after the last count, used memory is not counted at once: checks end one rest,
/// and another begins.
const LEAST: Duration = Duration::from_secs(30);

/// Applies these limits. Must be called while the process has one thread: existing threads already have
/// their arenas.
pub(super) fn keep_small() {
    for (parameter, value) in
        [(libc::M_ARENA_MAX, ARENAS), (libc::M_MMAP_THRESHOLD, LARGE), (libc::M_TRIM_THRESHOLD, LARGE)]
    {
        // SAFETY: sets a parameter of the allocator, which validates it; no other thread does so meanwhile.
        unsafe { libc::mallopt(parameter, value) };
    }
    // If the thread cannot be started, the agent only uses more memory.
    let _ = thread::Builder::new().name("memory".into()).stack_size(64 << 10).spawn(give_back);
}

/// Checks the memory as long as the process lives.
fn give_back() {
    loop {
        MEMORY.turn(|rests| thread::sleep(if rests { INTERVAL_AT_REST } else { INTERVAL }));
    }
}

/// Checks the memory while the process is at rest, in place of the thread, which then sleeps until the
/// process works again: so no thread wakes only for this check. Ends when the future is dropped.
pub(super) async fn keep_at_rest() {
    let _relief = MEMORY.relief();
    let mut tick = ticks(INTERVAL_AT_REST);
    let mut begun: Option<Begun<()>> = None;
    loop {
        tick.tick().await;
        // Runs after other tasks that are due now, so that the memory that they used is returned.
        tokio::task::yield_now().await;
        // Nobody needs to know when a check ends, but the next one.
        if let Some(check) = begun.take() {
            check.result().await;
        }
        begun = Some(rounds::begin(true, || MEMORY.check_at_rest()).await);
    }
}

static MEMORY: LazyLock<Relay<Memory>> = LazyLock::new(|| Relay::new(Memory::new(Instant::now())));

/// The results of the last checks.
struct Memory {
    /// Resident bytes at the last check.
    before: usize,
    /// Free bytes that could not be returned.
    left: usize,
    /// Checks since resident memory last changed.
    rested: u32,
    /// Resident bytes when used memory was last counted, checks since then, and the time of that count.
    counted_at: usize,
    checks: u32,
    counted: Instant,
    /// Whether a rest has begun for which used memory has not been counted.
    is_owed: bool,
    /// Shared resident bytes when code pages were last given back, the time of that, and whether the
    /// process has worked since.
    code_left: usize,
    code_given: Option<Instant>,
    has_worked: bool,
}

impl Memory {
    fn new(now: Instant) -> Self {
        Self {
            before: 0,
            left: 0,
            rested: 0,
            counted_at: 0,
            checks: 0,
            counted: now,
            is_owed: false,
            code_left: 0,
            code_given: None,
            has_worked: false,
        }
    }
}

impl Check for Memory {
    fn check(&mut self) {
        let Some(Resident { all, shared }) = Resident::now() else { return };
        let resident = all.saturating_sub(shared);
        self.rested = if resident.abs_diff(self.before) < SAME { self.rested.saturating_add(1) } else { 0 };
        self.before = resident;
        self.has_worked |= self.rested == 0;
        let is_owed_code =
            self.has_worked || self.code_given.is_none_or(|at| at.elapsed() + TICK >= LEAST_OF_CODE);
        if is_owed_code && self.rested >= REST && shared.saturating_sub(self.code_left) > SLACK_OF_CODE {
            code::give_back();
            (self.code_given, self.has_worked) = (Some(Instant::now()), false);
            self.code_left = Resident::now().map_or(shared, |now| now.shared);
        }
        self.checks += 1;
        // Once for each rest: memory that was free before may have been needed again.
        self.is_owed |= self.rested == REST;
        let is_rest = self.is_owed && self.rested >= REST && self.counted.elapsed() >= LEAST;
        if self.checks < COUNTED && resident.abs_diff(self.counted_at) < MOVED && !is_rest {
            return;
        }
        (self.counted_at, self.checks, self.counted, self.is_owed) = (resident, 0, Instant::now(), false);
        let free = resident.saturating_sub(in_use());
        if is_due(free, self.left, self.rested >= REST) {
            // SAFETY: may be called at any time by any thread.
            unsafe { libc::malloc_trim(0) };
            self.counted_at = self::resident().unwrap_or(resident);
            self.left = self.counted_at.saturating_sub(in_use());
        } else {
            // Free memory between used blocks may be used and freed again.
            self.left = self.left.min(free);
        }
    }

    fn rests(&self) -> bool {
        self.rested >= LONG_REST
    }
}

/// Whether enough is free to return. `free`: resident bytes that are not used; `left`: how many of them the
/// last return left, because they lie between used blocks: these would be left again.
fn is_due(free: usize, left: usize, is_at_rest: bool) -> bool {
    let more = free.saturating_sub(left);
    free > SLACK && more > SLACK / 2 || is_at_rest && more > SLACK_AT_REST
}

/// Resident memory of the process, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Resident {
    /// All resident memory.
    pub(super) all: usize,
    /// The part that is shared: files and memory of other processes.
    shared: usize,
}

impl Resident {
    /// The kernel's current count; `None`: it cannot be read.
    pub(super) fn now() -> Option<Self> {
        let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
        let mut pages = statm.split(' ').skip(1).map_while(|number| number.parse::<usize>().ok());
        let (all, shared) = (pages.next()?, pages.next()?);
        let size = rustix::param::page_size();
        Some(Self { all: all * size, shared: shared * size })
    }
}

/// Anonymous resident memory of the process, in bytes.
fn resident() -> Option<usize> {
    Resident::now().map(|Resident { all, shared }| all.saturating_sub(shared))
}

/// Memory that has been allocated and not freed, in bytes.
fn in_use() -> usize {
    // SAFETY: may be called at any time by any thread; returns numbers.
    let counted = unsafe { libc::mallinfo2() };
    counted.uordblks + counted.hblkhd
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_memory_is_given_back_once_there_is_much() {
        const MIB: usize = 1 << 20;
        let table = [
            ("nothing is free", (0, 0, true), false),
            ("little is", (3, 0, false), false),
            ("little is, and nobody's time is lost", (3, 0, true), true),
            ("much is", (30, 0, false), true),
            ("much is, and it could not be given back last time", (30, 30, true), false),
            ("much has come since", (33, 30, false), true),
            ("little has", (31, 30, false), false),
            ("little has, and nobody's time is lost", (31, 30, true), true),
        ];
        for (what, (free, left, is_at_rest), due) in table {
            assert_eq!(is_due(free * MIB, left * MIB, is_at_rest), due, "{what}");
        }
    }

    #[test]
    fn memory_is_counted_by_kernel_and_allocator_alike() {
        let (resident_before, used_before) = (resident().unwrap(), in_use());
        let block = vec![1_u8; 64 << 20];
        // Other tests allocate and free memory meanwhile.
        let most = (32 << 20)..(256 << 20);
        assert!(most.contains(&(resident().unwrap() - resident_before)));
        assert!(most.contains(&(in_use() - used_before)));
        drop(block);
    }
}
