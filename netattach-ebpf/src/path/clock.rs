//! The time as of the last timer tick: no clock device is read.

use aya_ebpf::helpers::generated::{bpf_jiffies64, bpf_ktime_get_coarse_ns};
use netattach_common::Reading;

use crate::path::maps;

/// Of a second.
const NANOSECONDS: u64 = 1_000_000_000;

/// Nanoseconds of the monotonic clock, as of the last timer tick. The reading does not change within a tick, so the
/// clock is read once per tick and cached: reading the tick number takes one instruction.
#[inline(always)]
pub(crate) fn nanoseconds() -> u64 {
    match current() {
        // SAFETY: an aligned word of a map value, which stays in place as long as the map does.
        Some(reading) => unsafe { (&raw const (*reading).time).read_volatile() },
        None => read(),
    }
}

/// Seconds of the monotonic clock, as of the last timer tick.
#[inline(always)]
pub(crate) fn seconds() -> u32 {
    match current() {
        // SAFETY: as above.
        Some(reading) => unsafe { (&raw const (*reading).second).read_volatile() as u32 },
        None => whole(read()),
    }
}

/// Both.
#[inline(always)]
pub(crate) fn nanoseconds_and_seconds() -> (u64, u32) {
    match current() {
        // SAFETY: as above, two of them.
        Some(reading) => unsafe {
            let time = (&raw const (*reading).time).read_volatile();
            (time, (&raw const (*reading).second).read_volatile() as u32)
        },
        None => {
            let time = read();
            (time, whole(time))
        }
    }
}

/// The cached reading, which is that of this tick. The words are each read and written whole; another CPU may write
/// them at the same moment, for the same or the next tick: then a reader finds a time that is early or late by a tick.
/// A CPU that was stopped on its way (a hypervisor's) writes an earlier time, which is found until it writes the tick.
#[inline(always)]
fn current() -> Option<*mut Reading> {
    // SAFETY: the helper takes nothing and exists since Linux 5.6.
    let tick = unsafe { bpf_jiffies64() };
    let reading = maps::clock()?;
    // SAFETY: an aligned word of a map value, which stays in place as long as the map does.
    if unsafe { (&raw const (*reading).tick).read_volatile() } != tick {
        next(reading, tick);
    }
    Some(reading)
}

/// Reads the clock, for the rest of the tick. Out of line: few packets come here, and inlined code would leave the
/// stack in another state than a cached reading does, so that the verifier would go through all of `na_fast` twice.
#[inline(never)]
fn next(reading: *mut Reading, tick: u64) {
    let time = read();
    // SAFETY: the value of `na_time`, as above. The tick is last: who finds it finds the time that belongs to it.
    unsafe {
        (&raw mut (*reading).time).write_volatile(time);
        (&raw mut (*reading).second).write_volatile(time / NANOSECONDS);
        (&raw mut (*reading).tick).write_volatile(tick);
    }
}

/// The whole seconds of a reading.
#[inline(always)]
fn whole(nanoseconds: u64) -> u32 {
    (nanoseconds / NANOSECONDS) as u32
}

/// As [`nanoseconds`], read from the clock itself: for rare callers so deep in the call chain that the stack (512
/// bytes, each frame rounded up to 32, Linux before 6.8) has no room for another frame.
#[inline(always)]
pub(crate) fn read() -> u64 {
    // SAFETY: the helper takes nothing and exists since Linux 5.11.
    unsafe { bpf_ktime_get_coarse_ns() }
}
