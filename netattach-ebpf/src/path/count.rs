//! Counters: one block per attachment and CPU, so plain additions do, and one word per rule.

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use netattach_common::{Decline, DropReason, RuleKey, Side, Stats};

use crate::path::{
    maps,
    verdict::{Declined, Denied},
};

/// Counts one packet with its verdict.
#[inline(always)]
pub(crate) fn packet(attachment: u32, side: Side, bytes: u32, verdict: Result<(), Denied>) {
    with(attachment, |stats| {
        let traffic = match (side, verdict.is_ok()) {
            (Side::FromPod, true) => &mut stats.from_pod,
            (Side::ToPod, true) => &mut stats.to_pod,
            (Side::FromPod, false) => &mut stats.dropped_from_pod,
            (Side::ToPod, false) => &mut stats.dropped_to_pod,
        };
        traffic.packets += 1;
        traffic.bytes += u64::from(bytes);
        if let Err(denied) = verdict {
            add_reason(stats, denied);
        }
    });
}

/// Counts by its reason alone a packet that is dropped after it was counted as sent at its pod's device.
#[inline(always)]
pub(crate) fn dropped_later(attachment: u32, denied: Denied) {
    with(attachment, |stats| add_reason(stats, denied));
}

#[inline(always)]
fn add_reason(stats: &mut Stats, denied: Denied) {
    // Slot 0 is unused. Going through it makes the verifier forget the number, which it would otherwise follow to the
    // end of the program for each value, and the compiler, which would leave out the mask that keeps the index in
    // range.
    stats.drops[0] = denied.number().into();
    // SAFETY: a field of a value that is borrowed here.
    let number = unsafe { core::ptr::read_volatile(&raw const stats.drops[0]) };
    stats.drops[0] = 0;
    stats.drops[number as usize & (DropReason::SLOTS - 1)] += 1;
}

/// Counts a flow that a policy allowed, and whether a record of it may be written.
#[inline(always)]
pub(crate) fn new_flow(attachment: u32, recorded: bool) {
    with(attachment, |stats| {
        stats.new_flows += 1;
        stats.records_withheld += u64::from(!recorded);
    });
}

/// Counts a flow whose place was taken by another flow of the same attachment.
#[inline(always)]
pub(crate) fn displaced(attachment: u32) {
    with(attachment, |stats| stats.flows_displaced += 1);
}

/// Counts a record that was not written because the attachment had used up its share.
#[inline(always)]
pub(crate) fn record_withheld(attachment: u32) {
    with(attachment, |stats| stats.records_withheld += 1);
}

/// Counts a record for which there was no room.
#[inline(always)]
pub(crate) fn record_lost(attachment: u32) {
    with(attachment, |stats| stats.records_lost += 1);
}

/// Counts a packet that an attachment received by the fast path.
#[inline(always)]
pub(crate) fn fast_path(attachment: u32, bytes: u32) {
    if let Some(stats) = maps::fast_stats(attachment) {
        // SAFETY: as in `with`.
        let received = unsafe { &mut (*stats).received };
        received.packets += 1;
        received.bytes += u64::from(bytes);
    }
}

/// Counts a packet that an attachment sent straight to an uplink.
#[inline(always)]
pub(crate) fn to_uplink(attachment: u32, bytes: u32) {
    if let Some(stats) = maps::fast_stats(attachment) {
        // SAFETY: as in `with`.
        let sent = unsafe { &mut (*stats).sent };
        sent.packets += 1;
        sent.bytes += u64::from(bytes);
    }
}

/// Counts a packet from or to an attachment that was left to the stack.
#[inline(always)]
pub(crate) fn declined(attachment: u32, reason: impl Into<Declined>) {
    if let Some(stats) = maps::fast_stats(attachment) {
        let Declined(number) = reason.into();
        // SAFETY: a variable. It is read again so that the compiler keeps the mask that shows the verifier that the
        // index is in range: otherwise the verifier follows an enumeration through functions.
        let index = unsafe { (&raw const number).read_volatile() } as usize & (Decline::SLOTS - 1);
        // SAFETY: as in `with`.
        unsafe { (&mut (*stats).declined)[index] += 1 };
    }
}

/// Credits a rule with a flow that it allowed and that has been entered. The first flow creates the counter: with a
/// policy of a hundred thousand rules, few of them ever used, the agent does not have to write that many counters and
/// the node spends no memory on them.
#[inline(always)]
pub(crate) fn rule(policy: u32, rule: u32) {
    let key = RuleKey { policy, rule };
    // A second look-up finds a counter that another CPU has just created.
    for _ in 0..2 {
        if let Some(flows) = maps::rule_counter(&key) {
            // SAFETY: a whole aligned word of a map, which only atomic operations change.
            unsafe { atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(flows, 1) };
            return;
        }
        if maps::new_rule_counter(&key) {
            return;
        }
    }
}

#[inline(always)]
fn with(attachment: u32, change: impl FnOnce(&mut Stats)) {
    if let Some(stats) = maps::stats(attachment) {
        // SAFETY: a per-CPU value, and programs of one CPU do not interrupt each other at these hooks: this CPU's block
        // has no other writer while the program runs, except for `na_routed` on packets that the node itself sends,
        // which may be interrupted and then lose a count. The agent may read it meanwhile and see a packet without its
        // bytes; it clears it when no packet of the number is under way.
        change(unsafe { &mut *stats });
    }
}
