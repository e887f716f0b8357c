//! The time as of the last timer tick: no clock device is read.

use aya_ebpf::helpers::generated::{bpf_jiffies64, bpf_ktime_get_coarse_ns};
use netattach_common::Reading;

use crate::path::maps;

/// Nanoseconds of the monotonic clock, as of the last timer tick. The reading does not change within a tick, so the
/// clock is read once per tick and cached: reading the tick number takes one instruction.
#[inline(always)]
pub(crate) fn nanoseconds() -> u64 {
    // SAFETY: the helper takes nothing and exists since Linux 5.6.
    let tick = unsafe { bpf_jiffies64() };
    let Some(reading) = maps::clock() else { return read() };
    // SAFETY: aligned words of a map value, which stays in place as long as the map does. The time is written before
    // its tick; a reader that finds the new tick with the old time is late by one tick.
    unsafe {
        if (&raw const (*reading).tick).read_volatile() == tick {
            return (&raw const (*reading).time).read_volatile();
        }
    }
    next(reading, tick)
}

/// Reads the clock, for the rest of the tick. Out of line: few packets come here, and inlined code would leave the
/// stack in another state than a cached reading does, so that the verifier would go through all of `na_fast` twice.
#[inline(never)]
fn next(reading: *mut Reading, tick: u64) -> u64 {
    let time = read();
    // SAFETY: the value of `na_clock`, as above.
    unsafe {
        (&raw mut (*reading).time).write_volatile(time);
        (&raw mut (*reading).tick).write_volatile(tick);
    }
    time
}

/// Seconds of the monotonic clock, as of the last timer tick.
#[inline(always)]
pub(crate) fn seconds() -> u32 {
    whole(nanoseconds())
}

/// The whole seconds of a reading.
#[inline(always)]
pub(crate) fn whole(nanoseconds: u64) -> u32 {
    (nanoseconds / 1_000_000_000) as u32
}

/// As [`nanoseconds`], read from the clock itself: for rare callers so deep in the call chain that the stack (512
/// bytes, each frame rounded up to 32, Linux before 6.8) has no room for another frame.
#[inline(always)]
pub(crate) fn read() -> u64 {
    // SAFETY: the helper takes nothing and exists since Linux 5.11.
    unsafe { bpf_ktime_get_coarse_ns() }
}
