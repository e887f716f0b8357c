//! Tracks the policies in the kernel's maps by number, and the policies of each attachment.
//!
//! Three rules hold even when a write fails:
//! - a number is marked as used in the kernel's maps before anything is written under it, so that no later agent reuses
//!   it;
//! - an attachment is assigned a policy only when the maps hold it;
//! - a policy's entries are removed only when no attachment refers to it and no packet can still be reading it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::bpf::{BpfError, Dataplane, FlowTable, PolicyIds};
use crate::error_chain::Chain;
use crate::policy::desired::Desired;
use crate::policy::diff::{DENY_ALL, PolicyId, Programmed, Writes, diff};
use crate::policy::lookup::CompiledPolicy;

/// How long unreferenced entries are kept if the kernel cannot report when packets have stopped reading them: longer
/// than any packet takes.
const GRACE: Duration = Duration::from_secs(1);

/// Policies that could not be written, with the errors.
pub(super) type Refused = BTreeMap<PolicyId, Arc<BpfError>>;

/// The kernel's side of [`PolicyMaps`]. A trait so that the rules can be tested without a kernel.
pub(super) trait Kernel {
    /// See [`crate::bpf::PolicyMaps::use_up`].
    fn use_up(&self, last: PolicyId) -> Result<(), BpfError>;
    /// See [`crate::bpf::PolicyMaps::install`].
    fn install(
        &self,
        policies: &[(PolicyId, &CompiledPolicy)],
    ) -> Result<BTreeMap<PolicyId, BpfError>, BpfError>;
    /// See [`crate::bpf::PolicyMaps::holding`].
    fn holding(&self, policies: &[(PolicyId, &CompiledPolicy)]) -> Result<BTreeSet<PolicyId>, BpfError>;
    /// See [`crate::bpf::PolicyMaps::installed`].
    fn installed(&self) -> BTreeSet<PolicyId>;
    /// See [`crate::bpf::PolicyMaps::remove`].
    fn remove(&self, policies: &BTreeSet<PolicyId>) -> Result<(), BpfError>;
    /// See [`Dataplane::wait_for_readers`].
    fn wait_for_readers(&self) -> Result<(), BpfError>;
    /// See [`crate::bpf::PolicyMaps::of`].
    fn assigned(&self, attachment: u32) -> Result<PolicyIds, BpfError>;
    /// See [`crate::bpf::PolicyMaps::set`].
    fn assign(&self, attachment: u32, assignment: PolicyIds) -> Result<(), BpfError>;
    /// See [`FlowTable::expect_flows`].
    fn expect_flows(&self);
}

/// The kernel's maps.
pub(super) struct KernelMaps<'a> {
    /// Policies and assignments.
    pub(super) dataplane: &'a Dataplane,
    /// Flows of isolated attachments.
    pub(super) flows: &'a FlowTable,
}

impl Kernel for KernelMaps<'_> {
    fn use_up(&self, last: PolicyId) -> Result<(), BpfError> {
        self.dataplane.policies().use_up(last)
    }

    fn install(
        &self,
        policies: &[(PolicyId, &CompiledPolicy)],
    ) -> Result<BTreeMap<PolicyId, BpfError>, BpfError> {
        self.dataplane.policies().install(policies)
    }

    fn holding(&self, policies: &[(PolicyId, &CompiledPolicy)]) -> Result<BTreeSet<PolicyId>, BpfError> {
        self.dataplane.policies().holding(policies)
    }

    fn installed(&self) -> BTreeSet<PolicyId> {
        self.dataplane.policies().installed()
    }

    fn remove(&self, policies: &BTreeSet<PolicyId>) -> Result<(), BpfError> {
        self.dataplane.policies().remove(policies)
    }

    fn wait_for_readers(&self) -> Result<(), BpfError> {
        self.dataplane.wait_for_readers()
    }

    fn assigned(&self, attachment: u32) -> Result<PolicyIds, BpfError> {
        self.dataplane.policies().of(attachment)
    }

    fn assign(&self, attachment: u32, assignment: PolicyIds) -> Result<(), BpfError> {
        self.dataplane.policies().set(attachment, assignment)
    }

    fn expect_flows(&self) {
        self.flows.expect_flows();
    }
}

/// Policies unreferenced since before this time are no longer read by any packet; `None`: no age is enough. Takes some
/// milliseconds.
pub(super) fn unread_since(kernel: &impl Kernel, now: Instant) -> Option<Instant> {
    match kernel.wait_for_readers() {
        Ok(()) => Some(now),
        Err(error) => {
            tracing::debug!(error = %Chain(&error), "cannot wait for packets in flight; removed policies are kept for a while");
            now.checked_sub(GRACE)
        }
    }
}

/// The contents of the maps.
#[derive(Debug, Default)]
pub(super) struct PolicyMaps {
    programmed: Programmed,
    /// Unreferenced policies, and since when.
    unreferenced: BTreeMap<PolicyId, Instant>,
    /// The maps have attachments unknown to this agent: policies referenced only by those must stay.
    unknown_attachments: bool,
}

impl PolicyMaps {
    /// The initial state, when only the last number is known.
    pub(super) fn new(last_id: PolicyId) -> Self {
        Self { programmed: Programmed { last_id, ..Programmed::default() }, ..Self::default() }
    }

    /// The contents of the maps, as far as this agent knows.
    pub(super) fn programmed(&self) -> &Programmed {
        &self.programmed
    }

    /// The policies of an attachment; `None`: nothing has been written for it.
    pub(super) fn assigned(&self, attachment: u32) -> Option<PolicyIds> {
        self.programmed.endpoints.get(&attachment).copied()
    }

    /// Whether an attachment is isolated in any direction.
    pub(super) fn is_isolated(&self, attachment: u32) -> bool {
        self.assigned(attachment).is_some_and(|assigned| assigned != PolicyIds::default())
    }

    /// The attachments that are isolated in any direction.
    pub(super) fn isolated(&self) -> Vec<u32> {
        self.programmed.endpoints.keys().copied().filter(|id| self.is_isolated(*id)).collect()
    }

    /// Whether the maps have attachments unknown to this agent.
    pub(super) fn has_unknown_attachments(&self) -> bool {
        self.unknown_attachments
    }

    /// Records whether the maps have attachments unknown to this agent.
    pub(super) fn set_unknown_attachments(&mut self, unknown: bool) {
        self.unknown_attachments = unknown;
    }

    /// Adopts the policies that an earlier agent assigned to an attachment.
    pub(super) fn adopt(&mut self, attachment: u32, kernel: &impl Kernel) -> Result<(), BpfError> {
        let assigned = kernel.assigned(attachment)?;
        self.programmed.endpoints.insert(attachment, assigned);
        Ok(())
    }

    /// Forgets the assignment of an attachment that has ended or starts anew.
    pub(super) fn forget(&mut self, attachment: u32) {
        self.programmed.endpoints.remove(&attachment);
    }

    /// Adopts an earlier agent's policies that equal desired ones: they need not be rewritten or take up room twice,
    /// and attachments keep them.
    pub(super) fn recognise(&mut self, desired: &Desired, kernel: &impl Kernel) -> Result<(), BpfError> {
        let mut candidates: BTreeMap<PolicyId, &Arc<CompiledPolicy>> = BTreeMap::new();
        for (endpoint, policy) in &desired.endpoints {
            let found = self.assigned(*endpoint).unwrap_or_default();
            for (id, wanted) in [(found.ingress, &policy.ingress), (found.egress, &policy.egress)] {
                if let Some(wanted) = wanted.as_ref().filter(|_| id != 0 && id != DENY_ALL) {
                    // If several contents are desired under one number, only the first is compared: the others are
                    // written anew.
                    candidates.entry(id).or_insert(wanted);
                }
            }
        }
        let asked: Vec<(PolicyId, &CompiledPolicy)> =
            candidates.iter().map(|(id, policy)| (*id, policy.as_ref())).collect();
        for id in kernel.holding(&asked)? {
            if let Some(policy) = candidates.get(&id) {
                self.programmed.policies.insert(id, Arc::clone(policy));
            }
        }
        Ok(())
    }

    /// The writes that bring the maps to the desired contents.
    pub(super) fn writes(&self, desired: &Desired) -> Writes {
        diff(desired, &self.programmed)
    }

    /// Writes these new policies, all at once. Returns those that the maps do not hold afterwards: each was refused as
    /// a whole.
    pub(super) fn install(
        &mut self,
        new: &BTreeMap<PolicyId, Arc<CompiledPolicy>>,
        ids: impl IntoIterator<Item = PolicyId>,
        kernel: &impl Kernel,
    ) -> Refused {
        let some: Vec<(PolicyId, &Arc<CompiledPolicy>)> =
            ids.into_iter().filter_map(|id| Some((id, new.get(&id)?))).collect();
        let Some(last) = some.iter().map(|(id, _)| *id).max() else { return Refused::new() };
        let written = kernel.use_up(last).and_then(|()| {
            // Used in the kernel's maps too, even if the writes that follow fail.
            self.programmed.last_id = last;
            let contents: Vec<_> = some.iter().map(|(id, policy)| (*id, policy.as_ref())).collect();
            kernel.install(&contents)
        });
        let refused: Refused = match written {
            Ok(refused) => refused.into_iter().map(|(id, error)| (id, Arc::new(error))).collect(),
            Err(error) => {
                let error = Arc::new(error);
                some.iter().map(|(id, _)| (*id, Arc::clone(&error))).collect()
            }
        };
        let held = some.into_iter().filter(|(id, _)| !refused.contains_key(id));
        self.programmed.policies.extend(held.map(|(id, policy)| (id, Arc::clone(policy))));
        refused
    }

    /// Assigns other policies to an attachment, both directions at once. The maps must hold them.
    pub(super) fn assign(
        &mut self,
        attachment: u32,
        assignment: PolicyIds,
        kernel: &impl Kernel,
    ) -> Result<(), BpfError> {
        if self.is_isolated(attachment) || assignment != PolicyIds::default() {
            kernel.expect_flows();
        }
        kernel.assign(attachment, assignment)?;
        self.programmed.endpoints.insert(attachment, assignment);
        Ok(())
    }

    /// Records which of these policies, and of an earlier agent's, are no longer referenced. Most changes
    /// have none; then attachments are not searched.
    pub(super) fn retire(&mut self, policies: &BTreeSet<PolicyId>, kernel: &impl Kernel) {
        let is_known = |id: &PolicyId| self.programmed.policies.contains_key(id);
        let mut candidates: BTreeSet<PolicyId> = policies.iter().copied().filter(is_known).collect();
        if !self.unknown_attachments {
            candidates.extend(kernel.installed().into_iter().filter(|id| !is_known(id)));
        }
        if candidates.is_empty() {
            return;
        }
        let assigned = self.programmed.endpoints.values();
        let referenced: BTreeSet<PolicyId> =
            assigned.flat_map(|assigned| [assigned.ingress, assigned.egress]).collect();
        for id in candidates.difference(&referenced) {
            self.programmed.policies.remove(id);
            self.unreferenced.entry(*id).or_insert_with(Instant::now);
        }
    }

    /// Whether there are policies waiting for removal.
    pub(super) fn has_unreferenced(&self) -> bool {
        !self.unreferenced.is_empty()
    }

    /// Removes the policies that have been unreferenced since `unread` ([`unread_since`]); returns whether there were
    /// any.
    pub(super) fn remove_unread(
        &mut self,
        unread: Option<Instant>,
        kernel: &impl Kernel,
    ) -> Result<bool, BpfError> {
        let is_due = |since: &Instant| unread.is_some_and(|unread| *since <= unread);
        let due = self.unreferenced.iter().filter(|(_, since)| is_due(since));
        let due: BTreeSet<PolicyId> = due.map(|(id, _)| *id).collect();
        kernel.remove(&due)?;
        self.unreferenced.retain(|id, _| !due.contains(id));
        Ok(!due.is_empty())
    }
}

#[cfg(test)]
pub(super) mod fake {
    //! A fake kernel controlled by tests.

    use std::cell::{Cell, RefCell};

    use super::*;

    /// Holds policies and assignments, and refuses writes as configured.
    #[derive(Default)]
    pub(in crate::enforce) struct FakeKernel {
        pub(in crate::enforce) held: RefCell<BTreeMap<PolicyId, CompiledPolicy>>,
        pub(in crate::enforce) assigned: RefCell<BTreeMap<u32, PolicyIds>>,
        pub(in crate::enforce) last: Cell<PolicyId>,
        /// How many policies fit.
        pub(in crate::enforce) room: Cell<usize>,
        /// All writes fail.
        pub(in crate::enforce) broken: Cell<bool>,
        /// Waiting for readers fails.
        pub(in crate::enforce) cannot_wait: Cell<bool>,
    }

    impl FakeKernel {
        pub(in crate::enforce) fn with_room(room: usize) -> Self {
            Self { room: Cell::new(room), ..Self::default() }
        }

        fn unless_broken(&self) -> Result<(), BpfError> {
            if self.broken.get() { Err(BpfError::PolicyIdsUsedUp) } else { Ok(()) }
        }
    }

    impl Kernel for FakeKernel {
        fn use_up(&self, last: PolicyId) -> Result<(), BpfError> {
            self.unless_broken()?;
            self.last.set(last);
            Ok(())
        }

        fn install(
            &self,
            policies: &[(PolicyId, &CompiledPolicy)],
        ) -> Result<BTreeMap<PolicyId, BpfError>, BpfError> {
            let mut refused = BTreeMap::new();
            for (id, policy) in policies {
                assert!(*id <= self.last.get(), "{id} is not used up");
                let free = self.room.get().saturating_sub(self.held.borrow().len());
                if free == 0 {
                    refused.insert(*id, BpfError::OverCapacity { map: "na_peer4", needed: 1, free });
                } else {
                    self.held.borrow_mut().insert(*id, (*policy).clone());
                }
            }
            Ok(refused)
        }

        fn holding(&self, policies: &[(PolicyId, &CompiledPolicy)]) -> Result<BTreeSet<PolicyId>, BpfError> {
            let held = self.held.borrow();
            let same = policies.iter().filter(|(id, policy)| held.get(id) == Some(*policy));
            Ok(same.map(|(id, _)| *id).collect())
        }

        fn installed(&self) -> BTreeSet<PolicyId> {
            self.held.borrow().keys().copied().collect()
        }

        fn remove(&self, policies: &BTreeSet<PolicyId>) -> Result<(), BpfError> {
            self.unless_broken()?;
            let assigned = self.assigned.borrow();
            let used: BTreeSet<PolicyId> = assigned.values().flat_map(|it| [it.ingress, it.egress]).collect();
            assert!(policies.is_disjoint(&used), "{policies:?} of {used:?}");
            self.held.borrow_mut().retain(|id, _| !policies.contains(id));
            Ok(())
        }

        fn wait_for_readers(&self) -> Result<(), BpfError> {
            if self.cannot_wait.get() { Err(BpfError::PolicyIdsUsedUp) } else { Ok(()) }
        }

        fn assigned(&self, attachment: u32) -> Result<PolicyIds, BpfError> {
            Ok(self.assigned.borrow().get(&attachment).copied().unwrap_or_default())
        }

        fn assign(&self, attachment: u32, assignment: PolicyIds) -> Result<(), BpfError> {
            self.unless_broken()?;
            for id in [assignment.ingress, assignment.egress] {
                assert!(
                    id == 0 || id == DENY_ALL || self.held.borrow().contains_key(&id),
                    "{id} is not held"
                );
            }
            self.assigned.borrow_mut().insert(attachment, assignment);
            Ok(())
        }

        fn expect_flows(&self) {}
    }
}

#[cfg(test)]
mod tests {
    use super::fake::FakeKernel;
    use super::*;

    fn policies(ids: impl IntoIterator<Item = PolicyId>) -> BTreeMap<PolicyId, Arc<CompiledPolicy>> {
        ids.into_iter().map(|id| (id, Arc::default())).collect()
    }

    const BOTH: fn(PolicyId) -> PolicyIds = |id| PolicyIds { ingress: id, egress: id };

    #[test]
    fn numbers_are_never_reused_even_if_writing_fails() {
        let kernel = FakeKernel::with_room(1);
        let mut maps = PolicyMaps::new(4);
        let refused = maps.install(&policies([5, 6]), [5, 6], &kernel);
        assert_eq!(refused.keys().collect::<Vec<_>>(), [&6]);
        assert_eq!((kernel.last.get(), maps.programmed().last_id), (6, 6));
        assert_eq!(maps.programmed().policies.keys().collect::<Vec<_>>(), [&5]);

        kernel.broken.set(true);
        let refused = maps.install(&policies([7, 8]), [7, 8], &kernel);
        assert_eq!(refused.keys().collect::<Vec<_>>(), [&7, &8], "none was written");
        assert_eq!((kernel.last.get(), maps.programmed().last_id), (6, 6));
        assert_eq!(maps.programmed().policies.keys().collect::<Vec<_>>(), [&5]);
    }

    #[test]
    fn a_failed_assignment_keeps_the_old_one() {
        let kernel = FakeKernel::with_room(2);
        let mut maps = PolicyMaps::new(0);
        maps.install(&policies([1, 2]), [1, 2], &kernel);
        maps.assign(9, BOTH(1), &kernel).unwrap();
        kernel.broken.set(true);
        maps.assign(9, BOTH(2), &kernel).unwrap_err();
        assert_eq!((maps.assigned(9), maps.isolated()), (Some(BOTH(1)), vec![9]));
    }

    #[test]
    fn a_policy_goes_when_nothing_refers_to_it_and_no_packet_reads_it() {
        let kernel = FakeKernel::with_room(2);
        let mut maps = PolicyMaps::new(0);
        maps.install(&policies([1, 2]), [1, 2], &kernel);
        maps.assign(9, BOTH(1), &kernel).unwrap();
        maps.assign(9, BOTH(2), &kernel).unwrap();
        maps.assign(8, PolicyIds { ingress: 0, egress: 2 }, &kernel).unwrap();
        maps.retire(&[1, 2].into(), &kernel);
        assert_eq!(maps.unreferenced.keys().collect::<Vec<_>>(), [&1]);

        assert!(!maps.remove_unread(None, &kernel).unwrap());
        let before = Instant::now().checked_sub(GRACE);
        assert!(!maps.remove_unread(before, &kernel).unwrap(), "packets may read it");
        assert_eq!(kernel.installed(), [1, 2].into());

        kernel.broken.set(true);
        maps.remove_unread(Some(Instant::now()), &kernel).unwrap_err();
        assert!(maps.has_unreferenced(), "it is tried again");
        kernel.broken.set(false);
        assert!(maps.remove_unread(Some(Instant::now()), &kernel).unwrap());
        assert_eq!((kernel.installed(), maps.has_unreferenced()), ([2].into(), false));
    }

    #[test]
    fn without_word_from_the_kernel_readers_are_given_their_time() {
        let (kernel, now) = (FakeKernel::default(), Instant::now());
        assert_eq!(unread_since(&kernel, now), Some(now));
        kernel.cannot_wait.set(true);
        assert_eq!(unread_since(&kernel, now), now.checked_sub(GRACE));
    }

    #[test]
    fn policies_of_an_earlier_agent_stay_while_there_are_attachments_that_are_not_known() {
        let kernel = FakeKernel::with_room(2);
        kernel.held.borrow_mut().extend([(3, CompiledPolicy::default()), (4, CompiledPolicy::default())]);
        kernel.assigned.borrow_mut().insert(9, BOTH(3));
        let mut maps = PolicyMaps::new(4);
        maps.adopt(9, &kernel).unwrap();
        maps.set_unknown_attachments(true);
        maps.retire(&BTreeSet::new(), &kernel);
        assert!(!maps.has_unreferenced());
        maps.set_unknown_attachments(false);
        maps.retire(&BTreeSet::new(), &kernel);
        assert_eq!(maps.unreferenced.keys().collect::<Vec<_>>(), [&4]);
    }
}
