//! Places for flows: an attachment that enters too many flows displaces only its own.

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use netattach_common::{DropReason, Flow, FlowKey, PlaceKey, Share};

use crate::path::{count, family::Family, maps, subprograms::Subprograms, verdict::Denied};

/// Result of [`ask`]: the flow now has the place.
pub(crate) const TAKEN: u32 = 0;
/// Set in a result of [`ask`] if the flow that has the place is of a connection that has ended. The lowest bit: of two
/// that have been idle for as long, that one is missed less.
const ENDED: u32 = 1;

/// Whether the place of a flow in the table still belongs to the attachment. Then only that flow has it: taking a place
/// removes the flow that had it.
#[inline(always)]
pub(crate) fn is_own<A: Family>(attachment: u32, flow: &Flow) -> bool {
    flow.attachment == attachment
        && A::places(attachment).is_some_and(|(most, _)| u32::from(flow.place) < most)
}

/// Takes one of an attachment's places for a flow that is about to be entered.
#[inline(always)]
pub(crate) fn take<A: Subprograms>(attachment: u32, key: &FlowKey<A>, now: u32) -> Result<u32, Denied> {
    let Some((most, next)) = A::places(attachment) else { return Err(DropReason::FlowsFull.into()) };
    let (mut least_missed, mut chosen) = (0, 0);
    for _ in 0..Share::TRIED {
        // SAFETY: an aligned word of a map value, which stays in place as long as the map does. Not relaxed: for that
        // the compiler takes the instruction that fetches nothing.
        let turn = unsafe { atomic_xadd::<u64, u64, { AtomicOrdering::AcqRel }>(next, 1) };
        let place = turn as u32 % most;
        match A::ask_for_place(attachment, place, key, now)? {
            TAKEN => return Ok(place),
            // The bit goes along with the place: one word less on the stack, which is full.
            answer if answer >= least_missed => {
                (least_missed, chosen) = (answer, place << 1 | answer & ENDED)
            }
            _ => {}
        }
    }
    if chosen & ENDED != 0 {
        note_compared(attachment, now);
    }
    let chosen = chosen >> 1;
    if let Some(held) = A::at_place(&PlaceKey { attachment, place: chosen }) {
        // SAFETY: a map value, which stays mapped while the program runs: bytes and numbers. Another CPU that has gone
        // through all the places meanwhile may be writing here; then the flow of a mixture of two keys is not found.
        let held = unsafe { &mut *held };
        A::remove_flow(held);
        *held = *key;
        count::displaced(attachment);
    }
    Ok(chosen)
}

/// Takes a place unless a flow that goes on, or has only just ended, has it: [`TAKEN`], or else how little that flow
/// would be missed, at least 2. In a second in which flows have been compared for nothing ([`Share`]'s `compared`), one
/// that has only just ended does not keep it either.
#[inline(always)]
pub(crate) fn ask<A: Family>(
    attachment: u32,
    place: u32,
    key: &FlowKey<A>,
    now: u32,
) -> Result<u32, DropReason> {
    let owned = PlaceKey { attachment, place };
    let Some(held) = A::at_place(&owned) else {
        return if A::take_place(&owned, key) { Ok(TAKEN) } else { Err(DropReason::FlowsFull) };
    };
    // SAFETY: as in `take`.
    let held = unsafe { &mut *held };
    if let Some(flow) = A::flow(held) {
        // SAFETY: as in `conntrack::look_up`.
        let flow = unsafe { &*flow };
        // A flow that was opened again belongs to another attachment, or has another place.
        if flow.attachment == attachment && u32::from(flow.place) == place {
            if !flow.is_expired(held.protocol, now) {
                let has_ended = flow.has_ended(held.protocol);
                if !(flow.is_over(held.protocol, now) || has_ended && is_compared(attachment, now)) {
                    return Ok(readiness_of(flow, held.protocol, now) | u32::from(has_ended) * ENDED);
                }
                // Nobody would find one that is missed less. Looking at more places costs much: each is two entries of
                // large tables, which are in no cache.
                count::displaced(attachment);
            }
            A::remove_flow(held);
        }
    }
    *held = *key;
    Ok(TAKEN)
}

/// How little a flow would be missed, as [`Flow::readiness`] orders them, with room for [`ENDED`]. Idle times of more than
/// seventeen years are one.
#[inline(always)]
fn readiness_of(flow: &Flow, protocol: u8, now: u32) -> u32 {
    const NOT_LASTING: u32 = 1 << 31;
    let readiness = flow.readiness(protocol, now);
    let idle = (readiness & !NOT_LASTING).min((1 << 29) - 1);
    readiness & NOT_LASTING | (idle + 1) << 1
}

/// Notes what [`is_compared`] asks. Out of line: the caller's frame is as large as it may be.
#[inline(never)]
fn note_compared(attachment: u32, now: u32) {
    if let Some(second) = maps::compared(attachment) {
        // SAFETY: an aligned word of a map value. The agent, which writes the value as a whole, may undo it: then flows
        // are compared once more.
        unsafe { second.write_volatile(now) };
    }
}

/// Whether flows of an attachment have been compared in this second, and none was missed less than one that had ended.
#[inline(always)]
fn is_compared(attachment: u32, now: u32) -> bool {
    // SAFETY: an aligned word of a map value, which stays in place as long as the map does.
    maps::compared(attachment).is_some_and(|second| unsafe { second.read_volatile() } == now)
}
