//! The flow table: replies of allowed flows pass, and one lookup decides for an established flow.

use aya_ebpf::programs::TcContext;
use netattach_common::{
    DropReason, Flow, FlowKey, PolicyIds, Share, Side, Traffic,
    attachment::flag,
    entry::{Entry, InPlace, Life},
    flow::{Leg, Signal, Tuple},
    parse::{Packet, plain::Headers},
};

use crate::path::{
    antispoof, clock, count,
    entry::FlowEntry,
    family::Family,
    frame::Skb,
    limit, maps, policy, record,
    scope::Scope,
    share,
    subprograms::Subprograms,
    verdict::{Denied, Encode, Known, Opening},
};

/// Judges a packet by its flow.
#[inline(always)]
pub(crate) fn look_up<A: Subprograms>(
    ctx: &TcContext,
    scope: &Scope,
    packet: &Packet<A>,
) -> Result<Known, Denied> {
    let tuple = &packet.tuple;
    let source_is_low = tuple.source_is_low();
    let Some(entry) = A::flow(&FlowKey::new(scope.zone, tuple, source_is_low)) else {
        return Ok(Known::ABSENT);
    };
    let forward = entry.is_forward(source_is_low);
    let now = clock::seconds();
    let life = entry.life();
    if life.is_expired(tuple.lane.protocol(), now) || !life.admits(packet.signal, forward) {
        return Ok(Known::OVER);
    }
    let mut written = match approve(scope, tuple, (entry, life), forward) {
        Ok(written) => written,
        Err(denied) if forward => return Err(denied),
        Err(denied) => return Encode::decode(refuse(scope, tuple, entry, denied)),
    };
    let goes_on = entry.go_on(forward, |_| written = true);
    if written && !is_still(scope.zone, tuple, entry) {
        revoke(entry);
    }
    // Traffic is counted at the attachment that entered the flow.
    if entry.attachment() == scope.id {
        entry.count(forward, ctx.len());
    }
    note(entry, packet.signal, forward, if goes_on { now } else { entry.last_seen() });
    Ok(Known::PASSES)
}

/// Out of line, as the stack of [`look_up`] is full.
#[inline(never)]
fn note(entry: FlowEntry, signal: Signal, forward: bool, seen: u32) {
    // Read again: a policy lookup takes long, and words that other CPUs wrote meanwhile must be kept.
    entry.note(entry.life(), signal, forward, seen);
}

/// Whether [`look_up`] would let a packet pass without asking a policy; if so, the packet is recorded in its flow.
#[inline(always)]
pub(crate) fn goes_on<A: Family>(ctx: &TcContext, scope: &Scope, headers: &Headers<A>) -> bool {
    let now = clock::seconds();
    let lives = |life: Life| !life.is_expired(headers.tuple.lane.protocol(), now);
    let is_noted = |life: Life, forward| is_noted(scope, life, Leg::of(scope.side, forward));
    continues([scope], headers, (lives, is_noted), now, ctx.len())
}

/// As [`goes_on`], for both ends of a packet; a policy isolates at least one of them, and both are in one network. A
/// flow that has been idle for longer than the shortest timeout is left to [`look_up`].
#[inline(always)]
pub(crate) fn goes_on_between<A: Family>(
    sends: &Scope,
    receives: &Scope,
    headers: &Headers<A>,
    now: u32,
    bytes: u32,
) -> bool {
    // Whether a leg's mark is set is checked once a second on the normal path, not here.
    let is_noted = |_: Life, _| !sends.has(flag::KEEP_ESTABLISHED) && !receives.has(flag::KEEP_ESTABLISHED);
    continues([sends, receives], headers, (|life: Life| life.is_in_use(now), is_noted), now, bytes)
}

#[inline(always)]
fn continues<A: Family, const N: usize>(
    ends: [&Scope; N],
    headers: &Headers<A>,
    (lives, is_noted): (impl FnOnce(Life) -> bool, impl FnOnce(Life, bool) -> bool),
    now: u32,
    bytes: u32,
) -> bool {
    let tuple = &headers.tuple;
    let source_is_low = tuple.source_is_low();
    let Some(entry) = A::flow(&FlowKey::new(ends[0].zone, tuple, source_is_low)) else { return false };
    let forward = entry.is_forward(source_is_low);
    let life = entry.life();
    let is_certain = lives(life)
        && life.admits(headers.signal, forward)
        && ends.iter().all(|scope| is_approved(scope, entry, Leg::of(scope.side, forward)))
        // Only a packet that prolongs the flow needs closer checks; whether it does so in a connection that is said to
        // have ended is left to [`look_up`].
        && (life.last_seen == now
            || !life.is_ending() && is_noted(life, forward) && !entry.is_refused());
    if is_certain {
        let attachment = entry.attachment();
        // Traffic is counted at the attachment that entered the flow. An end that no policy isolates enters no flows.
        if ends.iter().any(|scope| !scope.policies.none() && attachment == scope.id) {
            entry.count(forward, bytes);
        }
        entry.note_usual(life, headers.signal, forward, now);
    }
    is_certain
}

/// Judges a packet that belongs to no known flow, or must not be the answer that it could be; returns the flow that it
/// opens, if it is allowed and opens one.
#[inline(always)]
pub(crate) fn open<A: Subprograms>(
    scope: &Scope,
    packet: &Packet<A>,
    known: Known,
) -> Result<Opening, Denied> {
    let opening = admit(scope, packet, known).map_err(|denied| known.refusal().unwrap_or(denied))?;
    if packet.signal.accepts() || packet.signal.aborts() {
        // The packet may go to its receiver, but opens no flow for replies.
        return Ok(Opening::NONE);
    }
    // The node's own probes must not wait for room that strangers use up.
    let is_the_nodes = opening.is_by_rule_of_node() && scope.is_at_the_node();
    if !limit::flow(scope.id, scope.side == Side::ToPod && !is_the_nodes) {
        return Err(DropReason::FlowRate.into());
    }
    if !scope.has(flag::KEEP_ESTABLISHED) {
        return Ok(opening);
    }
    let leg = Leg::of(scope.side, opening.is_forward());
    Ok(opening.at_end(leg, A::is_end(scope, &packet.tuple)))
}

/// Enters the flow that a packet opens, at one of its attachment's places.
///
/// The place comes first: a place whose flow is not in the table counts as free, so nothing has to be rolled back, and
/// the flow is written once.
#[inline(always)]
pub(crate) fn enter<A: Subprograms>(
    ctx: &TcContext,
    scope: &Scope,
    packet: &Packet<A>,
    opening: Opening,
) -> Result<(), Denied> {
    let now = clock::seconds();
    let key = FlowKey::new(scope.zone, &packet.tuple, packet.tuple.source_is_low());
    let place = share::take(scope.id, &key, now)?;
    let mut flow = new_flow(ctx, scope, packet, opening, now);
    flow.place = place as u16;
    if !A::enter_flow(&key, &flow) {
        return Err(DropReason::FlowsFull.into());
    }
    count_and_record(ctx, scope, packet, opening);
    Ok(())
}

/// Enters the flow that a packet opens where the table holds an expired one: reuses its entry and its place. `false`:
/// the entry belongs to another attachment, or is gone.
#[inline(always)]
pub(crate) fn renew<A: Subprograms>(
    ctx: &TcContext,
    scope: &Scope,
    packet: &Packet<A>,
    opening: Opening,
) -> bool {
    let key = FlowKey::new(scope.zone, &packet.tuple, packet.tuple.source_is_low());
    let Some(entry) = A::flow(&key) else { return false };
    let place = entry.place();
    if !share::is_own::<A>(scope.id, entry.attachment(), place) {
        return false;
    }
    let flow = Flow { place, ..new_flow(ctx, scope, packet, opening, clock::seconds()) };
    if !A::begin_flow(&key, entry, &flow) {
        return false;
    }
    count_and_record(ctx, scope, packet, opening);
    true
}

/// The flow that begins with a packet; its place is not set.
#[inline(always)]
fn new_flow<A: Subprograms>(
    ctx: &TcContext,
    scope: &Scope,
    packet: &Packet<A>,
    opening: Opening,
    now: u32,
) -> Flow {
    let forward = opening.is_forward();
    let from_low = packet.tuple.source_is_low();
    let leg = Leg::of(scope.side, forward);
    let state = packet.signal.first_state(forward) | opening.state();
    let mut flow = Flow::entered(now, forward == from_low, leg, scope.policies.of(leg), state);
    flow.attachment = scope.id;
    let traffic = if forward { &mut flow.forward } else { &mut flow.backward };
    *traffic = Traffic { packets: 1, bytes: ctx.len().into() };
    flow
}

#[inline(always)]
fn count_and_record<A: Subprograms>(ctx: &TcContext, scope: &Scope, packet: &Packet<A>, opening: Opening) {
    let recorded = limit::flow_record(scope.id);
    count::new_flow(scope.id, recorded);
    if recorded {
        let leg = Leg::of(scope.side, opening.is_forward());
        record::opened(ctx, scope, packet, leg, opening.rule());
    }
}

/// Credits the rule that allowed a flow which has been entered. Not where it is entered: there the stack is full.
#[inline(never)]
pub(crate) fn credit(scope: &Scope, opening: Opening) {
    let policy = scope.policies.of(Leg::of(scope.side, opening.is_forward()));
    if policy != 0 {
        count::rule(policy, opening.rule());
    }
}

/// Asks the policy about a packet of no known flow, as the first packet of a flow opened by its sender. If the table
/// was lost together with its flows, a segment may until `Share::answers_until` also belong to a connection opened by
/// the other end.
#[inline(always)]
fn admit<A: Subprograms>(scope: &Scope, packet: &Packet<A>, known: Known) -> Result<Opening, Denied> {
    let midstream = packet.signal.is_midstream(packet.tuple.lane.protocol());
    // A segment that must not be an answer does not open a connection either: it belongs to no connection opened by
    // its sender.
    if midstream && (scope.has(flag::NO_MIDSTREAM) || known.refusal().is_some()) {
        return Err(DropReason::Midstream.into());
    }
    let by = |forward| {
        let rule = policy::allows(scope, &packet.tuple, Leg::of(scope.side, forward))?;
        Ok(Opening::new(rule, forward))
    };
    by(true).or_else(|denied| {
        if midstream && !packet.signal.accepts() && has_lost_flows(scope) {
            by(false).map_err(|_: Denied| denied)
        } else {
            Err(denied)
        }
    })
}

/// Whether the attachment recently had flows that are now missing from the table.
#[inline(always)]
fn has_lost_flows(scope: &Scope) -> bool {
    Share::takes_answers(maps::answers_until(scope.id), clock::seconds())
}

/// Judges a packet that opens no flow by the rules without ports; `missed` is the drop reason when none allows it.
#[inline(never)]
pub(crate) fn without_ports<A: Subprograms>(
    scope: &Scope,
    packet: &Packet<A>,
    missed: DropReason,
) -> Result<(), Denied> {
    let leg = Leg::of(scope.side, true);
    policy::allows_without_ports(scope, &packet.tuple, leg).map(drop).map_err(|_| missed.into())
}

/// Whether an ICMP error is about a packet of a flow of the pod's that may go on. It approves nothing: that is for the
/// packets of the flow.
#[inline(always)]
pub(crate) fn is_answer<A: Subprograms>(ctx: &TcContext, scope: &Scope, packet: &Packet<A>) -> bool {
    // The error counts as an answer to the packet it is about, and goes back to that packet's sender.
    let mut answer = packet.tuple;
    if !A::answer_to_quoted(&Skb::of(ctx), packet.transport() + 8, &mut answer)
        || !answer.destination.same(&packet.tuple.destination)
        || !antispoof::is_of_pod(scope, &answer)
    {
        return false;
    }
    let source_is_low = answer.source_is_low();
    let Some(entry) = A::flow(&FlowKey::new(scope.zone, &answer, source_is_low)) else { return false };
    let leg = Leg::of(scope.side, entry.is_forward(source_is_low));
    let now = clock::seconds();
    !entry.life().is_expired(answer.lane.protocol(), now)
        && (is_approved(scope, entry, leg)
            || policy::allows(scope, &answer, leg).is_ok()
            || scope.has(flag::KEEP_ESTABLISHED) && entry.is_kept(leg) && A::is_end(scope, &answer))
}

/// Whether the policies in force let a flow go on: a flow approved by another policy is judged again. Where flows
/// stay approved, a flow that the policy no longer allows continues at the end where an earlier policy approved it.
/// Packets also reach other attachments (group frames, or by a link-layer address that is not that of the packet's
/// end), whose approval does not count for that end; so those attachments do not overwrite what an end has written.
/// Returns whether anything was written: then the caller has to look whether the entry [`is_still`] of the flow.
#[inline(always)]
fn approve<A: Subprograms>(
    scope: &Scope,
    tuple: &Tuple<A>,
    (entry, life): (FlowEntry, Life),
    forward: bool,
) -> Result<bool, Denied> {
    let leg = Leg::of(scope.side, forward);
    if is_approved(scope, entry, leg) {
        return Ok((entry.refuses(leg) || !is_noted(scope, life, leg)) && confirm(scope, tuple, entry, leg));
    }
    let keeps = scope.has(flag::KEEP_ESTABLISHED);
    let is_end = keeps && A::is_end(scope, tuple);
    if let Err(denied) = policy::allows(scope, tuple, leg) {
        return if is_end && entry.is_kept(leg) { Ok(false) } else { Err(denied) };
    }
    // Checked after the policy has answered: the end may have written meanwhile.
    let writes = is_end || !(keeps && entry.life().is_at_end(leg));
    if writes {
        entry.approve(leg, scope.policies.of(leg), is_end);
    }
    Ok(writes)
}

/// Takes back what was written about an entry that no longer belongs to the flow of the packet: both legs of the flow
/// that has it now are judged again. Out of line, as the stack of [`look_up`] is full.
#[inline(never)]
fn revoke(entry: FlowEntry) {
    entry.revoke(Leg::Opener);
    entry.revoke(Leg::Responder);
}

/// Whether an entry still belongs to the flow of a packet. Since it was found, another CPU may have displaced the flow,
/// and its memory may now belong to another flow ([`crate::path::entry`]), about which nothing was asked.
///
/// Out of line: the frame of [`look_up`] has no room for a key. Called from there alone, as the stack is full.
#[inline(never)]
fn is_still<A: Subprograms>(zone: u32, tuple: &Tuple<A>, entry: FlowEntry) -> bool {
    A::flow(&FlowKey::new(zone, tuple, tuple.source_is_low())).is_some_and(|found| found.is_same(entry))
}

/// Notes at a leg's own end what its approval did not note: that no policy refuses the leg any more; and that it is
/// approved at this end too, where another attachment under the same policy approved it first, or flows were not kept
/// until now. Returns whether it did.
#[inline(never)]
fn confirm<A: Subprograms>(scope: &Scope, tuple: &Tuple<A>, entry: FlowEntry, leg: Leg) -> bool {
    let is_end = A::is_end(scope, tuple);
    if is_end {
        entry.confirm(leg, scope.policies.of(leg));
    }
    is_end
}

/// Refuses a packet against a flow's direction that must not be an answer, with `denied`.
///
/// If the flow has not been answered, the packet belongs to no conversation: it may open a flow of its own, as if
/// there were no entry. An answered flow ends in both directions, because a server that continues to send would
/// otherwise reopen it; but the entry expires after its timeout, whatever the other end still sends. A packet at the
/// device of an attachment that is not its end changes nothing.
///
/// Whether the entry [`is_still`] of the flow is not asked afterwards (the stack is full): a
/// refusal that comes to another flow's leg approves nothing, and has its end ask its policy again.
///
/// Out of line, with a number as the result: inlined into [`look_up`], the compiler would duplicate the rest of the
/// code for each result.
#[inline(never)]
fn refuse<A: Subprograms>(scope: &Scope, tuple: &Tuple<A>, entry: FlowEntry, denied: Denied) -> u32 {
    let is_at_its_end = scope.side == Side::FromPod || A::is_end(scope, tuple);
    let life = entry.life();
    if is_at_its_end && !life.is_answered() {
        return Ok(Known::refused(denied)).encode();
    }
    if is_at_its_end && !life.is_established() {
        entry.refuse(Leg::of(scope.side, false));
    }
    Err::<Known, _>(denied).encode()
}

/// Whether the policy in force for a leg has approved a flow, or the leg has no policy. Complete isolation approves
/// nothing, whatever the flow says: an earlier version marked a refused leg with the same number.
#[inline(always)]
fn is_approved(scope: &Scope, entry: FlowEntry, leg: Leg) -> bool {
    let policy = scope.policies.of(leg);
    policy == 0 || entry.approved_by(leg) == policy && policy != PolicyIds::DENY_ALL
}

/// Whether nothing is left to note of an approved leg: where flows stay approved, the mark of its own end is set. At
/// another attachment than the leg's end this is never so.
#[inline(always)]
fn is_noted(scope: &Scope, life: Life, leg: Leg) -> bool {
    !scope.has(flag::KEEP_ESTABLISHED) || life.is_at_end(leg) || scope.policies.of(leg) == 0
}
