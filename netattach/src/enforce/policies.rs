//! Brings the maps from what they hold to what shall be in force.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::enforcer::{Enforcer, State};
use super::error::EnforceError;
use crate::bpf::{BpfError, PolicyIds};
use crate::netlink::Handle;
use crate::objects::policy::{PolicyName, Severity};
use crate::plan::addressing::GATEWAY_V4;
use crate::policy::desired::{Condition, Desired, EndpointPolicy, Subject};
use crate::policy::diff::DENY_ALL;
use crate::policy::diff::{PolicyId, Writes, diff};
use crate::policy::lookup::CompiledPolicy;
use crate::policy::options::{OnOverflow, Options};
use crate::report::Chain;

/// How long entries that nothing refers to are kept where the kernel does not tell when they are read no more: longer than
/// any packet can be in the middle of reading them.
const GRACE: Duration = Duration::from_secs(1);

/// What a change of the objects took, from the manifests to the maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Change {
    /// Reading what changed of the source.
    pub read: Duration,
    /// Compiling whom it concerns.
    pub compiled: Duration,
    /// Writing new policies into the maps.
    pub written: Duration,
    /// Switching attachments to them.
    pub switched: Duration,
    /// New policies.
    pub policies: usize,
    /// Attachments that were switched.
    pub attachments: usize,
}

/// Policies that are not in the maps, and why.
type Refused = BTreeMap<PolicyId, Arc<BpfError>>;

/// What is left to come back for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Behind {
    /// Nothing: what shall be in force is.
    #[default]
    Nothing,
    /// Policies wait for room.
    Room,
    /// Something failed, or has not ended.
    Failed,
}

impl Behind {
    /// Whether another attempt can come to something, now that there is more room or not.
    pub(super) fn is_due(self, more_room: bool) -> bool {
        match self {
            Self::Nothing => false,
            Self::Room => more_room,
            Self::Failed => true,
        }
    }
}

/// What becomes of attachments whose policies are not in the maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Until {
    /// They stay as they are.
    Later,
    /// They are isolated, or keep what they had, as the settings say.
    Held(OnOverflow),
}

impl Enforcer {
    /// Compiles what the source and the attachments are now, writes what is new, and switches whom it concerns.
    ///
    /// Where new content does not fit beside the old, its attachments are isolated, the old content goes, and the new takes its
    /// place: isolated for the moment, and for as long as it does not fit even then.
    ///
    /// # Errors
    /// The first thing that failed; what does not depend on it is done. [`State::behind`] says that there is more to do.
    pub(super) fn bring_up_to_date(&self, state: &mut State) -> Result<Change, EnforceError> {
        state.behind = Behind::Failed;
        let mut change = Change::default();
        let mut began = Instant::now();
        let mut lap = || {
            let now = Instant::now();
            now.duration_since(std::mem::replace(&mut began, now))
        };
        let desired = self.desired(state)?;
        let writes = diff(&desired, &state.programmed);
        change.compiled = lap();
        change.policies = writes.install.len();
        let mut refused = self.install(state, &writes.install, writes.install.keys().copied());
        change.written = lap();
        let mut first = self.switch(state, &writes, &refused, Until::Later, &mut change);
        for until in [Until::Later, Until::Held(self.options.on_overflow)] {
            if refused.is_empty() {
                break;
            }
            first = first.and(self.switch(state, &writes, &refused, until, &mut change));
            match self.make_room(state) {
                Ok(true) => refused = self.install(state, &writes.install, refused.into_keys()),
                Ok(false) => {}
                Err(error) => first = first.and(Err(error)),
            }
            first = first.and(self.switch(state, &writes, &refused, until, &mut change));
        }
        change.switched = lap();
        self.tell_refused(state, &desired, &writes.install, &refused);
        state.desired = desired;
        first?;
        if refused.is_empty() {
            state.behind = Behind::Nothing;
        } else if refused.values().all(|error| matches!(**error, BpfError::OverCapacity { .. })) {
            state.behind = Behind::Room;
        }
        Ok(change)
    }

    fn desired(&self, state: &mut State) -> Result<Desired, EnforceError> {
        let objects = self.source.snapshot();
        let none = objects.policies.is_empty()
            && (objects.network_policies.is_empty() || !self.options.network_policy);
        if none {
            // Without policies nothing is isolated, and looking at every pod would be part of every ADD.
            let open = state.endpoints.keys().map(|id| (*id, EndpointPolicy::default()));
            return Ok(Desired { endpoints: open.collect(), ..Desired::default() });
        }
        Ok(state.compiler.update(&objects, &state.endpoints, self.options()?.as_ref()))
    }

    /// The options with what the node is now.
    fn options(&self) -> Result<Cow<'_, Options>, EnforceError> {
        if !self.options.network_policy {
            return Ok(Cow::Borrowed(&self.options));
        }
        let addresses = Handle::open()?.all_addresses()?.into_iter().map(|address| address.addr());
        // By that one the node speaks to pods on routed links, whether one is there yet or not.
        let on_links = IpAddr::V4(GATEWAY_V4);
        let node = addresses.filter(|address| is_global(*address)).chain([on_links]).collect();
        let untold = !self.routed.stands();
        Ok(Cow::Owned(Options { node, node_may_lead_elsewhere: untold, ..self.options.clone() }))
    }

    /// Takes over the policies of an earlier agent that are what shall be in force: nothing has to be written, nor has its room
    /// twice, and who is under them stays so.
    pub(super) fn recognise(&self, state: &mut State) -> Result<(), EnforceError> {
        let desired = self.desired(state)?;
        let mut candidates: BTreeMap<PolicyId, Vec<Arc<CompiledPolicy>>> = BTreeMap::new();
        for (endpoint, policy) in &desired.endpoints {
            let found = state.programmed.endpoints.get(endpoint).copied().unwrap_or_default();
            for (id, wanted) in [(found.ingress, &policy.ingress), (found.egress, &policy.egress)] {
                let Some(wanted) = wanted.as_ref().filter(|_| id != 0 && id != DENY_ALL) else { continue };
                let known = candidates.entry(id).or_default();
                if !known.iter().any(|known| Arc::ptr_eq(known, wanted)) {
                    known.push(Arc::clone(wanted));
                }
            }
        }
        // A number with several contents to be is asked about the first: the others are written as ever.
        let first: Vec<(PolicyId, &Arc<CompiledPolicy>)> =
            candidates.iter().filter_map(|(id, known)| Some((*id, known.first()?))).collect();
        let asked: Vec<(PolicyId, &CompiledPolicy)> = first.iter().map(|(id, it)| (*id, &***it)).collect();
        let held = self.dataplane.policies().holding(&asked)?;
        let held = first.into_iter().filter(|(id, _)| held.contains(id));
        let held: Vec<_> = held.map(|(id, policy)| (id, Arc::clone(policy))).collect();
        state.programmed.policies.extend(held);
        Ok(())
    }

    /// Writes policies that are new, all at once. Those that are not in the maps afterwards are returned: what does not fit, or
    /// cannot be written.
    fn install(
        &self,
        state: &mut State,
        new: &BTreeMap<PolicyId, Arc<CompiledPolicy>>,
        ids: impl IntoIterator<Item = PolicyId>,
    ) -> Refused {
        let some: Vec<(PolicyId, &CompiledPolicy)> =
            ids.into_iter().filter_map(|id| Some((id, new.get(&id)?.as_ref()))).collect();
        let Some(last) = some.iter().map(|(id, _)| *id).max() else { return Refused::new() };
        let written = self.dataplane.policies().use_up(last).and_then(|()| {
            // Used up in the kernel's memory too, so that no later agent gives them again, whatever becomes of what follows.
            state.programmed.last_id = last;
            self.dataplane.policies().install(&some)
        });
        let refused: Refused = match written {
            Ok(refused) => refused.into_iter().map(|(id, error)| (id, Arc::new(error))).collect(),
            Err(error) => {
                let error = Arc::new(error);
                some.iter().map(|(id, _)| (*id, Arc::clone(&error))).collect()
            }
        };
        let known = some.iter().filter(|(id, _)| !refused.contains_key(id));
        let known: Vec<PolicyId> = known.map(|(id, _)| *id).collect();
        for id in known {
            if let Some(policy) = new.get(&id) {
                state.programmed.policies.insert(id, Arc::clone(policy));
            }
        }
        refused
    }

    /// Switches the attachments that are not under what they shall be under, as far as it is in the maps, and notes what nothing
    /// refers to any more.
    fn switch(
        &self,
        state: &mut State,
        writes: &Writes,
        refused: &Refused,
        until: Until,
        change: &mut Change,
    ) -> Result<(), EnforceError> {
        let mut first = Ok(());
        for (endpoint, wanted) in &writes.assign {
            let known = state.programmed.endpoints.get(endpoint).copied();
            let Some(now) = possible(refused, *wanted, known, until).filter(|now| known != Some(*now)) else {
                continue;
            };
            match self.assign(state, *endpoint, now) {
                Ok(()) => change.attachments += 1,
                Err(error) => first = first.and(Err(error)),
            }
        }
        self.retire(state, writes);
        first
    }

    /// Notes the policies that nothing refers to any more.
    fn retire(&self, state: &mut State, writes: &Writes) {
        for id in &writes.remove {
            let used = state.programmed.endpoints.values().any(|a| a.ingress == *id || a.egress == *id);
            if !used && state.programmed.policies.remove(id).is_some() {
                state.unreferenced.entry(*id).or_insert_with(Instant::now);
            }
        }
        if !state.strangers {
            self.note_leftovers(state);
        }
    }

    /// Takes out what nobody reads any more, and says whether anything was.
    fn make_room(&self, state: &mut State) -> Result<bool, EnforceError> {
        if state.unreferenced.is_empty() {
            return Ok(false);
        }
        let unread = self.unread(Instant::now());
        Ok(self.take_out(state, unread)?)
    }

    /// Says which policies are not in the maps, to who asks and, once, in the log; and in the log what is new of what is wrong with
    /// them otherwise.
    fn tell_refused(
        &self,
        state: &mut State,
        desired: &Desired,
        new: &BTreeMap<PolicyId, Arc<CompiledPolicy>>,
        refused: &Refused,
    ) {
        let before = std::mem::take(&mut state.over_capacity);
        let then = self.options.on_overflow;
        let told =
            refused.iter().filter_map(|(id, why)| Some(over_capacity(desired, new.get(id)?, then, why)));
        let told: BTreeSet<Condition> = told.flatten().collect();
        for condition in told.iter().filter(|condition| !before.contains(condition)) {
            tracing::error!(object = %condition.object, problem = condition.message, "policy not in force");
        }
        state.over_capacity = told.into_iter().collect();
        let is_new = |condition: &&Condition| {
            // Sorted, as the compiler has them.
            condition.severity == Severity::Error
                && state.desired.conditions.binary_search(condition).is_err()
        };
        for condition in desired.conditions.iter().filter(is_new) {
            tracing::warn!(object = %condition.object, problem = condition.message, "not in force as written");
        }
    }

    /// Switches an attachment, both directions at once.
    pub(super) fn assign(
        &self,
        state: &mut State,
        endpoint: u32,
        assignment: PolicyIds,
    ) -> Result<(), EnforceError> {
        let before = state.programmed.endpoints.get(&endpoint).copied().unwrap_or_default();
        if before != PolicyIds::default() || assignment != PolicyIds::default() {
            self.flows.expect_flows();
        }
        self.dataplane.policies().set(endpoint, assignment)?;
        state.programmed.endpoints.insert(endpoint, assignment);
        Ok(())
    }

    /// Entries of an earlier agent whose content nobody knows any more.
    fn note_leftovers(&self, state: &mut State) {
        let referenced: BTreeSet<PolicyId> =
            state.programmed.endpoints.values().flat_map(|a| [a.ingress, a.egress]).collect();
        for id in self.dataplane.policies().installed() {
            if !state.programmed.policies.contains_key(&id) && !referenced.contains(&id) {
                state.unreferenced.entry(id).or_insert_with(Instant::now);
            }
        }
    }

    /// Until when policies must have been without references for no packet to be in the middle of reading them.
    pub(super) fn unread(&self, now: Instant) -> Option<Instant> {
        match self.dataplane.wait_for_readers() {
            Ok(()) => Some(now),
            Err(error) => {
                tracing::debug!(error = %Chain(&error), "policies are kept for a while instead");
                now.checked_sub(GRACE)
            }
        }
    }

    /// Removes what nothing has referred to since then, and says whether there was anything.
    pub(super) fn take_out(&self, state: &mut State, unread: Option<Instant>) -> Result<bool, BpfError> {
        let is_due = |since: &Instant| unread.is_some_and(|unread| *since <= unread);
        let due = state.unreferenced.iter().filter(|(_, since)| is_due(since));
        let due: BTreeSet<PolicyId> = due.map(|(id, _)| *id).collect();
        self.dataplane.policies().remove(&due)?;
        state.unreferenced.retain(|id, _| !due.contains(id));
        Ok(!due.is_empty())
    }
}

/// What an attachment can be under while policies are not in the maps; `None`: it has to wait. Nobody is left open to whom it
/// should be closed, and with [`OnOverflow::Keep`] those that were isolated stay under what isolated them.
fn possible(
    refused: &Refused,
    wanted: PolicyIds,
    known: Option<PolicyIds>,
    until: Until,
) -> Option<PolicyIds> {
    let lacks = |id| refused.contains_key(&id);
    if !lacks(wanted.ingress) && !lacks(wanted.egress) {
        return Some(wanted);
    }
    let Until::Held(then) = until else { return None };
    let known = known.unwrap_or_default();
    let direction = |wanted, known| match then {
        _ if !lacks(wanted) => wanted,
        OnOverflow::Keep if known != 0 => known,
        OnOverflow::Keep | OnOverflow::Deny => DENY_ALL,
    };
    Some(PolicyIds {
        ingress: direction(wanted.ingress, known.ingress),
        egress: direction(wanted.egress, known.egress),
    })
}

/// Whether packets of other links and hosts can have an address. Those of the links themselves come and go with pods.
fn is_global(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => !address.is_loopback() && !address.is_link_local(),
        IpAddr::V6(address) => !address.is_loopback() && !address.is_unicast_link_local(),
    }
}

/// Tells the policies that take part in one that does not fit.
fn over_capacity(
    desired: &Desired,
    refused: &Arc<CompiledPolicy>,
    then: OnOverflow,
    error: &BpfError,
) -> BTreeSet<Condition> {
    let then = match then {
        OnOverflow::Keep => "attachments keep the policy that isolates them, others are isolated",
        OnOverflow::Deny => "its attachments are isolated",
    };
    let is_refused =
        |policy: &Option<Arc<CompiledPolicy>>| policy.as_ref().is_some_and(|it| Arc::ptr_eq(it, refused));
    let affected = desired.endpoints.values().filter(|it| is_refused(&it.ingress) || is_refused(&it.egress));
    let condition = |policy: &PolicyName| Condition {
        object: Subject::Policy(policy.clone()),
        severity: Severity::Error,
        message: format!("does not fit into the kernel's tables: {then}, until it does: {}", Chain(error)),
    };
    affected.flat_map(|endpoint| &endpoint.policies).map(condition).collect()
}

#[cfg(test)]
mod tests {
    use crate::enforce::policies::*;

    #[test]
    fn an_attachment_without_room_for_its_policy_is_isolated_or_keeps_what_isolates_it() {
        let refused = Refused::from([(7, Arc::new(BpfError::PolicyIdsUsedUp))]);
        let wanted = PolicyIds { ingress: 7, egress: 3 };
        let open = Some(PolicyIds::default());
        let isolated = Some(PolicyIds { ingress: 5, egress: 6 });
        let now = |ingress| Some(PolicyIds { ingress, egress: 3 });
        let (deny, keep) = (Until::Held(OnOverflow::Deny), Until::Held(OnOverflow::Keep));
        let table = [
            (deny, None, now(DENY_ALL)),
            (deny, open, now(DENY_ALL)),
            (deny, isolated, now(DENY_ALL)),
            (keep, None, now(DENY_ALL)),
            (keep, open, now(DENY_ALL)),
            (keep, isolated, now(5)),
            (Until::Later, isolated, None),
        ];
        for (until, known, expected) in table {
            assert_eq!(possible(&Refused::new(), wanted, known, until), Some(wanted));
            assert_eq!(possible(&refused, wanted, known, until), expected, "{until:?} {known:?}");
        }
    }

    #[test]
    fn what_waits_for_room_is_tried_again_when_there_is_more_and_what_failed_always() {
        let due = |behind: Behind| [false, true].map(|more_room| behind.is_due(more_room));
        assert_eq!(due(Behind::Nothing), [false, false]);
        assert_eq!(due(Behind::Room), [false, true]);
        assert_eq!(due(Behind::Failed), [true, true]);
    }
}
