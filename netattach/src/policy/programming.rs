//! Brings the maps from what they hold to what shall be in force.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::compile::{Condition, Desired, EndpointPolicy, OnOverflow, Options, Subject};
use super::compiled::CompiledPolicy;
use super::diff::{Assignment, PolicyId, Write, diff};
use super::error::EnforceError;
use super::model::{PolicyName, Severity};
use super::sync::{DENY_ALL, Enforcer, State};
use crate::bpf::{BpfError, PolicyIds};
use crate::netlink::Handle;
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

impl Enforcer {
    /// Compiles what the source and the attachments are now, writes what is new, and switches whom it concerns.
    pub(super) fn bring_up_to_date(&self, state: &mut State) -> Result<Change, EnforceError> {
        let mut change = Change::default();
        let mut began = Instant::now();
        let mut lap = || {
            let now = Instant::now();
            now.duration_since(std::mem::replace(&mut began, now))
        };
        let desired = self.desired(state)?;
        let writes = diff(&desired, &state.programmed);
        change.compiled = lap();
        let refused = self.install(state, &desired, &writes)?;
        change.written = lap();
        for write in &writes {
            match write {
                Write::Install { .. } => change.policies += 1,
                Write::Assign { endpoint, assignment } => {
                    let known = state.programmed.endpoints.get(endpoint).copied();
                    let known = known.filter(|_| self.options.on_overflow == OnOverflow::Keep);
                    if let Some(assignment) = without(&refused, *assignment, known) {
                        self.assign(state, *endpoint, assignment)?;
                        change.attachments += 1;
                    }
                }
                Write::Remove { id } => {
                    let used =
                        state.programmed.endpoints.values().any(|a| a.ingress == *id || a.egress == *id);
                    if !used {
                        state.unreferenced.entry(*id).or_insert_with(Instant::now);
                        state.programmed.apply(write);
                    }
                }
            }
        }
        change.switched = lap();
        if !state.strangers {
            self.note_leftovers(state);
        }
        state.desired = desired;
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
        let node = addresses.filter(|address| is_global(*address)).collect();
        Ok(Cow::Owned(Options { node, ..self.options.clone() }))
    }

    /// Writes the policies that are new, all at once. Those that do not fit even after what nobody reads any more has
    /// made room are returned, and said to be so.
    fn install(
        &self,
        state: &mut State,
        desired: &Desired,
        writes: &[Write],
    ) -> Result<BTreeSet<PolicyId>, EnforceError> {
        state.over_capacity.clear();
        let new = writes.iter().filter_map(|write| match write {
            Write::Install { id, policy } => Some((*id, policy)),
            Write::Assign { .. } | Write::Remove { .. } => None,
        });
        let new: BTreeMap<PolicyId, &Arc<CompiledPolicy>> = new.collect();
        let Some(last) = new.last_key_value().map(|(id, _)| *id) else { return Ok(BTreeSet::new()) };
        // The numbers are used up in the kernel's memory too, so that no later agent gives them again.
        self.dataplane.use_up_policy_ids(last)?;
        let write = |ids: &mut dyn Iterator<Item = &PolicyId>| {
            let some: Vec<_> = ids.filter_map(|id| Some((*id, new.get(id)?.as_ref()))).collect();
            self.dataplane.install_policies(&some)
        };
        let mut refused = write(&mut new.keys())?;
        if !refused.is_empty() && !state.unreferenced.is_empty() {
            let unread = self.unread(Instant::now());
            self.take_out(state, unread)?;
            refused = write(&mut refused.keys())?;
        }
        for (id, policy) in &new {
            match refused.get(id) {
                None => state.programmed.apply(&Write::Install { id: *id, policy: Arc::clone(policy) }),
                Some(error) => {
                    let conditions = over_capacity(desired, policy, self.options.on_overflow, error);
                    state.over_capacity.extend(conditions);
                }
            }
        }
        state.programmed.last_id = last;
        Ok(refused.into_keys().collect())
    }

    /// Switches an attachment, both directions at once.
    pub(super) fn assign(
        &self,
        state: &mut State,
        endpoint: u32,
        assignment: Assignment,
    ) -> Result<(), EnforceError> {
        let ids = PolicyIds { ingress: assignment.ingress, egress: assignment.egress };
        let before = state.programmed.endpoints.get(&endpoint).copied().unwrap_or_default();
        if before != Assignment::default() || assignment != Assignment::default() {
            self.flows.expect_flows();
        }
        self.dataplane.set_policy(endpoint, ids)?;
        state.programmed.endpoints.insert(endpoint, assignment);
        Ok(())
    }

    /// Entries of an earlier agent whose content nobody knows any more.
    fn note_leftovers(&self, state: &mut State) {
        let referenced: BTreeSet<PolicyId> =
            state.programmed.endpoints.values().flat_map(|a| [a.ingress, a.egress]).collect();
        for id in self.dataplane.installed_policies() {
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

    /// Removes what nothing has referred to since then.
    pub(super) fn take_out(&self, state: &mut State, unread: Option<Instant>) -> Result<(), BpfError> {
        let is_due = |since: &Instant| unread.is_some_and(|unread| *since <= unread);
        let due = state.unreferenced.iter().filter(|(_, since)| is_due(since));
        let due: BTreeSet<PolicyId> = due.map(|(id, _)| *id).collect();
        self.dataplane.remove_policies(&due)?;
        state.unreferenced.retain(|id, _| !due.contains(id));
        Ok(())
    }
}

/// What to assign when policies were refused for want of room: an attachment keeps what it has; a new one is
/// isolated completely in the direction that could not be written. `None` when nothing changes.
fn without(
    refused: &BTreeSet<PolicyId>,
    wanted: Assignment,
    known: Option<Assignment>,
) -> Option<Assignment> {
    if !refused.contains(&wanted.ingress) && !refused.contains(&wanted.egress) {
        return Some(wanted);
    }
    if known.is_some() {
        return None;
    }
    let or_deny = |id| if refused.contains(&id) { DENY_ALL } else { id };
    Some(Assignment { ingress: or_deny(wanted.ingress), egress: or_deny(wanted.egress) })
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
        OnOverflow::Keep => "attachments keep the policy they had, new ones are isolated",
        OnOverflow::Deny => "its attachments are isolated",
    };
    let is_refused =
        |policy: &Option<Arc<CompiledPolicy>>| policy.as_ref().is_some_and(|it| Arc::ptr_eq(it, refused));
    let affected = desired.endpoints.values().filter(|it| is_refused(&it.ingress) || is_refused(&it.egress));
    let condition = |policy: &PolicyName| Condition {
        object: Subject::Policy(policy.clone()),
        severity: Severity::Error,
        message: format!("does not fit into the kernel's tables: {then}: {}", Chain(error)),
    };
    affected.flat_map(|endpoint| &endpoint.policies).map(condition).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attachment_without_room_for_its_policy_keeps_the_old_or_is_isolated() {
        let refused = BTreeSet::from([7]);
        let wanted = Assignment { ingress: 7, egress: 3 };
        assert_eq!(without(&BTreeSet::new(), wanted, None), Some(wanted));
        assert_eq!(without(&refused, wanted, Some(Assignment::default())), None);
        assert_eq!(without(&refused, wanted, None), Some(Assignment { ingress: DENY_ALL, egress: 3 }));
    }
}
