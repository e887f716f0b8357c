//! What the agent keeps of memory that it needs no more: little, and not for long.
//!
//! Left to itself the allocator of glibc keeps what was freed, for whoever asks next: in an arena for each few threads, of
//! which there may be eight a processor and none of which can use what another has; in the middle of each, where only a
//! request takes pages back; and it takes ever larger blocks from there once one of that size was freed, up to 32 MiB, of
//! which it then keeps as much again. After a burst that is most of what the process has. So there are few arenas, large
//! blocks are mapped and unmapped whatever came before, and what is free is given back when there is much of it.

use std::thread;
use std::time::Duration;

/// Arenas: operations mostly wait for the kernel, not for each other's memory.
const ARENAS: libc::c_int = 2;

/// Blocks from this size on are mapped by themselves, and given back at once; also what may be free at the end of an arena.
const LARGE: libc::c_int = 128 << 10;

/// What may be resident beyond what is in use before it is given back: giving back and taking again costs.
const SLACK: usize = 4 << 20;

/// How often is looked.
const INTERVAL: Duration = Duration::from_millis(500);

/// Sees to it from now on. To be called while there is one thread: those that are there have their arenas.
pub(super) fn keep_small() {
    for (parameter, value) in
        [(libc::M_ARENA_MAX, ARENAS), (libc::M_MMAP_THRESHOLD, LARGE), (libc::M_TRIM_THRESHOLD, LARGE)]
    {
        // SAFETY: changes a number of the allocator, which checks it; nobody else does so meanwhile.
        unsafe { libc::mallopt(parameter, value) };
    }
    // Without the thread the agent is only larger.
    let _ = thread::Builder::new().name("memory".into()).stack_size(64 << 10).spawn(give_back);
}

fn give_back() {
    let mut after = 0;
    loop {
        thread::sleep(INTERVAL);
        let Some(resident) = resident() else { continue };
        if is_due(resident, in_use(), after) {
            // SAFETY: may be called at any time by any thread.
            unsafe { libc::malloc_trim(0) };
            after = self::resident().unwrap_or(resident);
        }
        // What shrinks by itself may grow again.
        after = after.min(resident);
    }
}

/// Whether there is something to give back: what was left by the last time, because it lies between what is in use, is left
/// again.
fn is_due(resident: usize, in_use: usize, after_last: usize) -> bool {
    resident.saturating_sub(in_use) > SLACK && resident.saturating_sub(after_last) > SLACK / 2
}

/// Memory that the process has, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Resident {
    /// All of it.
    pub(super) all: usize,
    /// What files and others have, too.
    shared: usize,
}

impl Resident {
    /// As the kernel counts it now; `None`: it does not tell.
    pub(super) fn now() -> Option<Self> {
        let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
        let mut pages = statm.split(' ').skip(1).map_while(|number| number.parse::<usize>().ok());
        let (all, shared) = (pages.next()?, pages.next()?);
        let size = rustix::param::page_size();
        Some(Self { all: all * size, shared: shared * size })
    }
}

/// Anonymous memory that the process has, in bytes.
fn resident() -> Option<usize> {
    Resident::now().map(|Resident { all, shared }| all.saturating_sub(shared))
}

/// What has been allocated and not freed, in bytes.
fn in_use() -> usize {
    // SAFETY: may be called at any time by any thread; returns numbers.
    let counted = unsafe { libc::mallinfo2() };
    counted.uordblks + counted.hblkhd
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_free_is_given_back_once_there_is_much_of_it() {
        const MIB: usize = 1 << 20;
        let table = [
            ("nothing is free", (40, 39, 0), false),
            ("much is", (40, 10, 0), true),
            ("much is, and it could not be given back last time", (40, 10, 40), false),
            ("much has come since", (50, 10, 40), true),
        ];
        for (what, (resident, in_use, after), due) in table {
            assert_eq!(is_due(resident * MIB, in_use * MIB, after * MIB), due, "{what}");
        }
    }

    #[test]
    fn memory_is_counted_by_kernel_and_allocator_alike() {
        let (resident_before, used_before) = (resident().unwrap(), in_use());
        let block = vec![1_u8; 64 << 20];
        // Other tests take and free some meanwhile.
        let most = (32 << 20)..(256 << 20);
        assert!(most.contains(&(resident().unwrap() - resident_before)));
        assert!(most.contains(&(in_use() - used_before)));
        drop(block);
    }
}
