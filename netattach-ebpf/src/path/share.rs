//! Places for flows: an attachment that enters too many flows displaces only its own.

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use netattach_common::{
    DropReason, FlowKey, PlaceKey, Share,
    entry::{Entry, Life},
};

use crate::path::{count, family::Family, maps, subprograms::Subprograms, verdict::Denied};

/// Result of [`ask`]: the flow now has the place.
pub(crate) const TAKEN: u32 = 0;
/// Set in a result of [`ask`] if the flow that has the place is of a connection that has ended. The lowest bit: of two
/// that have been idle for as long, that one is missed less.
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
    A::displace(attachment, chosen, key, now)?;
    Ok(chosen)
}

/// Takes a place unless a flow that goes on, or has only just ended, has it: [`TAKEN`], or else how little that flow
/// would be missed, at least 2. In a second in which flows have been compared for nothing ([`Share`]'s `compared`), one
/// that has only just ended does not keep it either. `DISPLACES`: no flow does; a constant, as the stack has no room for it.
#[inline(always)]
pub(crate) fn ask<A: Family, const DISPLACES: bool>(
    attachment: u32,
    place: u32,
    key: &FlowKey<A>,
    now: u32,
) -> Result<u32, DropReason> {
    // Its fields are read from there: a word that is kept over a call is one more on the stack, which is full.
    let owned = PlaceKey { attachment, place };
    // Copied: the kernel does not accept a function's argument as key or value of a map. For the same reason of room this
    // is the variable for the key of the flow that has the place as well.
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
            // Nobody would find one that is missed less. Looking at more places costs much: each is two entries of
            // large tables, which are in no cache.
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

/// How little a flow would be missed, as [`Life::readiness`] orders them, and whether it is [`ENDED`]: at least 2. Idle times
/// of more than seventeen years are one.
#[inline(always)]
fn missed(flow: Life, protocol: u8, now: u32) -> u32 {
    const NOT_LASTING: u32 = 1 << 31;
    let readiness = flow.readiness(protocol, now);
    let idle = (readiness & !NOT_LASTING).min((1 << 29) - 1);
    readiness & NOT_LASTING | (idle + 1) << 1 | u32::from(flow.has_ended(protocol)) * ENDED
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
