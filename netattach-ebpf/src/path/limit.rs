//! Limits of one attachment: bytes, flows, records.

use aya_ebpf::{helpers::generated::bpf_ktime_get_ns, programs::TcContext};
use core::intrinsics::{AtomicOrdering, atomic_cxchg, atomic_xadd};
use netattach_common::{DropReason, Limits, Rate, Side, attachment::flag, limit::wire_length};

use crate::path::{clock, frame, maps, scope::Scope};

/// Charges a packet that passed all other checks to the attachment's bandwidth.
#[inline(always)]
pub(crate) fn bytes(ctx: &TcContext, scope: &Scope) -> Result<(), DropReason> {
    let limited = match scope.side {
        Side::FromPod => flag::LIMIT_FROM_POD,
        Side::ToPod => flag::LIMIT_TO_POD,
    };
    if !scope.has(limited) || charge_packet(ctx, scope) { Ok(()) } else { Err(DropReason::RateLimit) }
}

#[inline(never)]
fn charge_packet(ctx: &TcContext, scope: &Scope) -> bool {
    let Some(limits) = maps::limits(scope.id) else {
        return true;
    };
    let rate = match scope.side {
        // SAFETY: the map's values stay in place as long as the map does.
        Side::FromPod => unsafe { &raw mut (*limits).from_pod },
        // SAFETY: as above.
        Side::ToPod => unsafe { &raw mut (*limits).to_pod },
    };
    // SAFETY: the helper takes nothing.
    charge(rate, |rate| rate, on_the_wire(ctx), || unsafe { bpf_ktime_get_ns() })
}

/// Whether the attachment may enter another flow. `by_others`: neither the pod nor its own node opens it. These leave
/// room to the pod and the node, whose flows cannot be kept out by sending to the pod.
#[inline(never)]
pub(crate) fn flow(attachment: u32, by_others: bool) -> bool {
    let terms = |rate: Rate| if by_others { rate.reserving() } else { rate };
    // SAFETY: a field of a map value, which stays in place as long as the map does; nothing is read.
    one(attachment, |limits| unsafe { &raw mut (*limits).flows }, terms)
}

/// Whether the attachment may have another record of a new flow.
#[inline(never)]
pub(crate) fn flow_record(attachment: u32) -> bool {
    // SAFETY: a field of a map value, which stays in place as long as the map does; nothing is read.
    one(attachment, |limits| unsafe { &raw mut (*limits).flow_records }, |rate| rate)
}

/// Whether the attachment may have another record of a drop.
#[inline(never)]
pub(crate) fn drop_record(attachment: u32) -> bool {
    // SAFETY: a field of a map value, which stays in place as long as the map does; nothing is read.
    one(attachment, |limits| unsafe { &raw mut (*limits).drop_records }, |rate| rate)
}

#[inline(always)]
fn one(
    attachment: u32,
    select: impl FnOnce(*mut Limits) -> *mut Rate,
    terms: impl FnOnce(Rate) -> Rate,
) -> bool {
    // Passed as an address: other CPUs charge the same limits, so a reference would wrongly promise exclusive access.
    let Some(limits) = maps::limits(attachment) else {
        return true;
    };
    charge(select(limits), terms, 1, clock::nanoseconds)
}

/// Charges `units` to a rate that other CPUs charge at the same time. `terms` makes of the rate the one by which it is
/// charged. `false`: over the limit.
#[inline(always)]
fn charge(rate: *mut Rate, terms: impl FnOnce(Rate) -> Rate, units: u32, now: impl FnOnce() -> u64) -> bool {
    // SAFETY: `rate` points into a map value. Interval and tolerance are only written by the agent, each as one aligned
    // word; a packet that sees one old and one new value is judged by a mixture once.
    let view =
        terms(unsafe { Rate { arrival: 0, interval: (*rate).interval, tolerance: (*rate).tolerance } });
    if !view.is_limited() {
        return true;
    }
    // SAFETY: as above; `arrival` is only changed by the atomic operations below.
    let word = unsafe { &raw mut (*rate).arrival };
    // SAFETY: an aligned word of a map value.
    let arrival = unsafe { word.read_volatile() };
    let Some(next) = view.admit(arrival, units, now()) else {
        return false;
    };
    // SAFETY: as above.
    let (_, swapped) = unsafe {
        atomic_cxchg::<u64, { AtomicOrdering::Relaxed }, { AtomicOrdering::Relaxed }>(word, arrival, next)
    };
    if swapped {
        return true;
    }
    // Another CPU was faster. The new value is not read again; the cost is added to it, so that the next packet waits
    // for both. SAFETY: as above.
    unsafe { atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(word, view.cost(units)) };
    true
}

/// Bytes of the packet on the wire. The kernel reports them at egress; at ingress it counts a packet that is still to
/// be cut into segments as one.
#[inline(always)]
fn on_the_wire(ctx: &TcContext) -> u32 {
    /// Ethernet, IP and TCP with timestamps: the headers of nearly all such packets.
    const HEADERS_V4: u32 = 14 + 20 + 32;
    const HEADERS_V6: u32 = 14 + 40 + 32;
    /// More bytes than any packet has; [`Rate::cost`] needs a bound.
    const MOST: u32 = 1 << 20;
    // SAFETY: the context pointer is valid while the program runs.
    let (said, segment) = unsafe { ((*ctx.skb.skb).wire_len, (*ctx.skb.skb).gso_size) };
    let length = ctx.len();
    if said > length {
        return said.min(MOST);
    }
    let headers = if frame::says_ipv6(ctx) { HEADERS_V6 } else { HEADERS_V4 };
    wire_length(length, headers, segment).min(MOST)
}
