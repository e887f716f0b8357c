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

use std::thread;
use std::time::{Duration, Instant};

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
const LEAST_OF_CODE: Duration = Duration::from_secs(2);

/// How often the process's memory is checked; and how often once it is at rest.
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

fn give_back() {
    let (mut before, mut left, mut rested) = (0, 0, 0_u32);
    let (mut counted_at, mut checks) = (0_usize, 0_u32);
    let (mut counted, mut is_owed) = (Instant::now(), false);
    let (mut code_left, mut code_given, mut has_worked) = (0, None::<Instant>, false);
    loop {
        thread::sleep(if rested < LONG_REST { INTERVAL } else { INTERVAL_AT_REST });
        let Some(Resident { all, shared }) = Resident::now() else { continue };
        let resident = all.saturating_sub(shared);
        rested = if resident.abs_diff(before) < SAME { rested.saturating_add(1) } else { 0 };
        before = resident;
        has_worked |= rested == 0;
        let is_owed_code = has_worked || code_given.is_none_or(|at| at.elapsed() >= LEAST_OF_CODE);
        if is_owed_code && rested >= REST && shared.saturating_sub(code_left) > SLACK_OF_CODE {
            code::give_back();
            (code_given, has_worked) = (Some(Instant::now()), false);
            code_left = Resident::now().map_or(shared, |now| now.shared);
        }
        checks += 1;
        // Once for each rest: what was free before that was not worth anybody's time.
        is_owed |= rested == REST;
        let is_rest = is_owed && rested >= REST && counted.elapsed() >= LEAST;
        if checks < COUNTED && resident.abs_diff(counted_at) < MOVED && !is_rest {
            continue;
        }
        (counted_at, checks, counted, is_owed) = (resident, 0, Instant::now(), false);
        let free = resident.saturating_sub(in_use());
        if is_due(free, left, rested >= REST) {
            // SAFETY: may be called at any time by any thread.
            unsafe { libc::malloc_trim(0) };
            counted_at = self::resident().unwrap_or(resident);
            left = counted_at.saturating_sub(in_use());
        } else {
            // What was between blocks in use may be used again, and be free another time.
            left = left.min(free);
        }
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
