//! Counters: one block per attachment and CPU, so plain additions do.

use netattach_common::{DropReason, Hook, Stats};

use crate::maps;

/// Counts one packet with its verdict.
#[inline(always)]
pub(crate) fn packet(attachment: u32, hook: Hook, bytes: u32, verdict: Result<(), DropReason>) {
    with(attachment, |stats| {
        let traffic = match (hook, verdict.is_ok()) {
            (Hook::FromPod, true) => &mut stats.from_pod,
            (Hook::ToPod, true) => &mut stats.to_pod,
            (Hook::FromPod, false) => &mut stats.dropped_from_pod,
            (Hook::ToPod, false) => &mut stats.dropped_to_pod,
        };
        traffic.packets += 1;
        traffic.bytes += u64::from(bytes);
        if let Err(reason) = verdict {
            // The mask shows the verifier that the index is in range; no reason has a higher number.
            stats.drops[reason as usize & (DropReason::SLOTS - 1)] += 1;
        }
    });
}

/// Counts a flow that a policy allowed. `stored`: whether the flow table took it.
#[inline(always)]
pub(crate) fn new_flow(attachment: u32, stored: bool) {
    with(attachment, |stats| {
        if stored {
            stats.new_flows += 1;
        } else {
            stats.flows_not_stored += 1;
        }
    });
}

/// Credits a rule with a flow it allowed.
#[inline(always)]
pub(crate) fn rule(policy: u32, rule: u32) {
    if let Some(flows) = maps::rule_counter(policy, rule) {
        // SAFETY: a per-CPU value, and programs of one CPU do not interrupt each other at these hooks.
        unsafe { *flows += 1 };
    }
}

#[inline(always)]
fn with(attachment: u32, change: impl FnOnce(&mut Stats)) {
    if let Some(stats) = maps::stats(attachment) {
        // SAFETY: as in `rule`: nobody else writes this CPU's block while the program runs. The agent may
        // read it meanwhile and see a packet without its bytes.
        change(unsafe { &mut *stats });
    }
}
