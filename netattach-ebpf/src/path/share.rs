//! Places for flows: an attachment that enters too many flows displaces only its own.

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use netattach_common::{
    DropReason, FlowKey, PlaceKey, Share,
    entry::{Entry, Life},
};

use crate::path::{count, family::Family, maps, subprograms::Subprograms, verdict::Denied};

/// Result of [`ask`]: the flow now has the place.
pub(crate) const TAKEN: u32 = 0;
/// Set in a result of [`ask`] if the flow that has the place belongs to an ended connection. The lowest bit: of two
/// flows that have been idle equally long, the ended one is displaced first.
const ENDED: u32 = 1;

/// Whether the place of a flow in the table, entered at the hooks of `owner`, still belongs to the attachment. Then only that
/// flow has it: taking a place removes the flow that had it.
#[inline(always)]
pub(crate) fn is_own<A: Family>(attachment: u32, owner: u32, place: u16) -> bool {
    owner == attachment && A::places(attachment).is_some_and(|(most, _)| u32::from(place) < most)
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
            // The bit is stored with the place: one word less on the stack, which is full.
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
    A::displace(attachment, chosen, key, now)?;
    Ok(chosen)
}

/// Takes a place unless a flow that continues, or has only just ended, has it. Returns [`TAKEN`], or else the
/// readiness of that flow to be displaced, at least 2. In a second in which a comparison found no better flow
/// ([`Share`]'s `compared`), a flow that has only just ended does not keep its place either. `DISPLACES`: no flow
/// keeps it; a constant, as the stack has no room for it.
#[inline(always)]
pub(crate) fn ask<A: Family, const DISPLACES: bool>(
    attachment: u32,
    place: u32,
    key: &FlowKey<A>,
    now: u32,
) -> Result<u32, DropReason> {
    // The fields are read from this key: a word that is kept over a call would be one more on the stack, which is
    // full.
    let owned = PlaceKey { attachment, place };
    // Copied: the kernel does not accept a function's argument as key or value of a map. To save stack, the same
    // variable also takes the key of the flow that has the place.
    let mut copy = *key;
    let Some(held) = A::at_place(&owned) else {
        return if A::take_place(&owned, &copy) { Ok(TAKEN) } else { Err(DropReason::FlowsFull) };
    };
    held.read_into(&mut copy);
    // A flow that was opened again belongs to another attachment, or has another place.
    if let Some(flow) = A::flow(&copy)
        && flow.attachment() == owned.attachment
        && u32::from(flow.place()) == owned.place
    {
        if !flow.life().is_expired(copy.protocol, now) {
            if !DISPLACES && stays(owned.attachment, flow.life(), copy.protocol, now) {
                return Ok(missed(flow.life(), copy.protocol, now));
            }
            // No flow with a lower priority would be found. Examining more places costs much: each needs two entries
            // of large tables, which are in no cache.
            count::displaced(owned.attachment);
        }
        A::remove_flow(&copy);
    }
    held.set(key);
    Ok(TAKEN)
}

/// Whether a flow that is not expired keeps its place.
#[inline(always)]
fn stays(attachment: u32, flow: Life, protocol: u8, now: u32) -> bool {
    !(flow.is_over(protocol, now) || flow.has_ended(protocol) && is_compared(attachment, now))
}

/// The readiness of a flow to be displaced, as [`Life::readiness`] orders flows, and whether it has [`ENDED`]: at
/// least 2. Idle times of more than seventeen years count as equal.
#[inline(always)]
fn missed(flow: Life, protocol: u8, now: u32) -> u32 {
    const NOT_LASTING: u32 = 1 << 31;
    let readiness = flow.readiness(protocol, now);
    let idle = (readiness & !NOT_LASTING).min((1 << 29) - 1);
    readiness & NOT_LASTING | (idle + 1) << 1 | u32::from(flow.has_ended(protocol)) * ENDED
}

/// Sets the word that [`is_compared`] reads. Out of line: the caller's frame has its maximum size.
#[inline(never)]
fn note_compared(attachment: u32, now: u32) {
    if let Some(second) = maps::compared(attachment) {
        // SAFETY: an aligned word of a map value. The agent, which writes the value as a whole, may undo it: then flows
        // are compared once more.
        unsafe { second.write_volatile(now) };
    }
}

/// Whether flows of an attachment have been compared in this second, and none had a lower priority than an ended one.
#[inline(always)]
fn is_compared(attachment: u32, now: u32) -> bool {
    // SAFETY: an aligned word of a map value, which stays in place as long as the map does.
    maps::compared(attachment).is_some_and(|second| unsafe { second.read_volatile() } == now)
}
