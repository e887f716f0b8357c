//! Limits the memory that the agent keeps after use: little, and not for long.
//!
//! By default glibc's allocator keeps freed memory for later requests: in arenas, of which there may be eight per
//! processor and none of which can use another's memory; in the middle of each arena, where only an explicit request
//! returns pages; and it takes ever larger blocks from arenas once a block of that size was freed, up to 32 MiB, of
//! which it then keeps as much again. After a burst that is most of the process's memory. So the agent sets a small
//! number of arenas, has large blocks mapped and unmapped regardless of what was freed before, and returns free memory
//! when there is much of it.
//!
//! Of the executable, what only the start, a burst or a connection's set-up runs stays resident as long as the kernel is not
//! short of memory, and counts as in use. At rest the agent says that it is not (`code`).

mod code;
mod relay;

use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use self::relay::{Check, Relay};
use crate::rounds;
use crate::ticks::ticks;

/// Number of arenas: operations mostly wait for the kernel, not for each other's memory.
const ARENAS: libc::c_int = 2;

/// Blocks of at least this size, in bytes, are mapped separately and returned at once; also the limit for free memory
/// at the end of an arena.
const LARGE: libc::c_int = 128 << 10;

/// Resident bytes beyond those in use that are tolerated before memory is returned: returning and taking it again costs
/// time.
const SLACK: usize = 4 << 20;

/// The same, in bytes, for a process that has come to rest: then it costs nobody's time.
const SLACK_AT_REST: usize = 512 << 10;

/// After so many checks with about the same memory resident, within [`SAME`] bytes, the process is at rest.
const REST: u32 = 2;
const SAME: usize = 64 << 10;

/// Resident bytes of the executable, beyond those that were when it was given back last, from which it is at rest. What
/// a look of an agent at rest runs is less.
const SLACK_OF_CODE: usize = 2 << 20;

/// During one rest code is given back no sooner than this after the last time: what a look runs is mapped again for it, 64 KiB
/// around each page, and looks are many. Each time takes half a millisecond, with what is mapped again; of 16 MiB 8 are resident
/// a second later, and 14 after ten.
const LEAST_OF_CODE: Duration = Duration::from_secs(4);
/// A check that comes so little before that is not put off to the next: checks are on ticks, and each takes a moment.
const TICK: Duration = Duration::from_millis(250);

/// How often the process's memory is checked; and how often once it is at rest, then beside other looks ([`keep_at_rest`]).
const INTERVAL: Duration = Duration::from_millis(500);
const INTERVAL_AT_REST: Duration = Duration::from_secs(2);
/// After so many checks at rest they are taken more rarely.
const LONG_REST: u32 = 10;

/// What is in use is counted when so many bytes more or less are resident than at the last count, when the process comes to
/// rest, and every so many checks. The allocator goes through all free blocks for it: done at each check, it was a third of what an agent at rest
/// uses of a processor.
const MOVED: usize = 1 << 20;
const COUNTED: u32 = 20;
/// A rest that begins so soon after the last count is no reason to count at once: looks end one, and another begins.
const LEAST: Duration = Duration::from_secs(30);

/// Applies these limits. Must be called while the process has one thread: existing threads already have their arenas.
pub(super) fn keep_small() {
    for (parameter, value) in
        [(libc::M_ARENA_MAX, ARENAS), (libc::M_MMAP_THRESHOLD, LARGE), (libc::M_TRIM_THRESHOLD, LARGE)]
    {
        // SAFETY: changes a number of the allocator, which checks it; no other thread does so meanwhile.
        unsafe { libc::mallopt(parameter, value) };
    }
    // Without the thread the agent only uses more memory.
    let _ = thread::Builder::new().name("memory".into()).stack_size(64 << 10).spawn(give_back);
}

/// As long as the process lives.
fn give_back() {
    loop {
        MEMORY.turn(|rests| thread::sleep(if rests { INTERVAL_AT_REST } else { INTERVAL }));
    }
}

/// Checks while the process is at rest, in place of the thread, which sleeps until it works again: beside other looks nobody has to
/// wake for it. Until this is dropped.
pub(super) async fn keep_at_rest() {
    let _relief = MEMORY.relief();
    let mut tick = ticks(INTERVAL_AT_REST);
    loop {
        tick.tick().await;
        // Behind others that are due now, so that what they have run is given back.
        tokio::task::yield_now().await;
        rounds::look(|| MEMORY.check_at_rest()).await;
    }
}

static MEMORY: LazyLock<Relay<Memory>> = LazyLock::new(|| Relay::new(Memory::new(Instant::now())));

/// What the last checks have found and done.
struct Memory {
    /// Resident bytes at the last check.
    before: usize,
    /// Bytes that were free and could not be returned.
    left: usize,
    /// Checks since the memory was another.
    rested: u32,
    /// Resident bytes when those in use were counted, checks since, and when that was.
    counted_at: usize,
    checks: u32,
    counted: Instant,
    /// Whether a rest has begun for which they were not counted.
    is_owed: bool,
    /// Shared resident bytes when code was given back, when that was, and whether the process has worked since.
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
        // Once for each rest: what was free before that was not worth anybody's time.
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
            // What was between blocks in use may be used again, and be free another time.
            self.left = self.left.min(free);
        }
    }

    fn rests(&self) -> bool {
        self.rested >= LONG_REST
    }
}

/// Whether there is enough to return, of so many bytes that are resident and not in use. As many as the last time left,
/// because they lie between blocks in use, will be left again.
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
