//! Places for flows: an attachment that enters too many flows displaces only its own.

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use netattach_common::{DropReason, Flow, FlowKey, PlaceKey, Share};

use crate::path::{count, family::Family, subprograms::Subprograms, verdict::Denied};

/// Result of [`ask`]: the flow now has the place.
pub(crate) const TAKEN: u32 = 0;

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
            readiness if readiness >= least_missed => (least_missed, chosen) = (readiness, place),
            _ => {}
        }
    }
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
/// would be missed, at least 1.
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
                if !flow.is_over(held.protocol, now) {
                    return Ok(flow.readiness(held.protocol, now).saturating_add(1));
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
