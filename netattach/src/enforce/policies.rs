//! Updates the maps until they contain what the objects require.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::error::EnforceError;
use super::held::Held;
use super::node_addresses::NodeAddresses;
use super::policy_maps::{Kernel, PolicyMaps, Refused, unread_since};
use crate::bpf::{BpfError, PolicyIds};
use crate::error_chain::Chain;
use crate::objects::policy::{PolicyName, Severity};
use crate::objects::{Objects, Place};
use crate::policy::conditions::{Conditions, Counts};
use crate::policy::desired::{Condition, Desired, EndpointPolicy, Subject};
use crate::policy::diff::{DENY_ALL, PolicyId, Writes};
use crate::policy::incremental::Compiler;
use crate::policy::index::Endpoints;
use crate::policy::lookup::CompiledPolicy;
use crate::policy::options::{OnOverflow, Options};
use crate::source::log_share::LogShare;
use crate::source::{NotSynced, Source};

/// Most changes that are kept until they are read.
const MOST_CHANGES: usize = 64;

/// Durations of a change of the objects, from the manifests to the maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Change {
    /// Reading the changes of the source.
    pub read: Duration,
    /// Compiling the policies of the affected attachments.
    pub compiled: Duration,
    /// Writing new policies into the maps.
    pub written: Duration,
    /// Switching attachments to them.
    pub switched: Duration,
    /// New policies.
    pub policies: usize,
    /// Switched attachments.
    pub attachments: usize,
}

/// The inputs of policies other than the attachments.
#[derive(Clone, Copy)]
pub(super) struct Sources<'a> {
    /// Objects.
    pub(super) source: &'a dyn Source,
    /// Settings.
    pub(super) options: &'a Options,
    /// The addresses that NetworkPolicies except.
    pub(super) node: &'a NodeAddresses,
    /// Whether routed packets are judged behind the node's address translation.
    pub(super) behind_translation: bool,
}

/// What a sweep comes after.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sweep {
    /// A change: its update has just had all the work that one may do.
    Change,
    /// A while without one.
    Pause,
}

/// See [`Compiler::update`] and [`Compiler::update_further`].
type Update = fn(&mut Compiler, &Arc<Objects>, &Endpoints, &Options) -> Desired;

/// The work left over from the last change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Behind {
    /// None: the maps hold the desired policies.
    #[default]
    Nothing,
    /// Policies wait for room.
    Room,
    /// A write failed, or the change is unfinished.
    Failed,
}

impl Behind {
    /// Whether a retry can succeed, depending on whether there is more room.
    fn is_due(self, more_room: bool) -> bool {
        match self {
            Self::Nothing => false,
            Self::Room => more_room,
            Self::Failed => true,
        }
    }
}

/// The handling of attachments whose policies are not in the maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Until {
    /// They are left unchanged.
    Later,
    /// They are isolated or keep their previous policy, by the settings.
    Held(OnOverflow),
}

/// The desired policies, and the maps that are updated to hold them.
#[derive(Default)]
pub(super) struct Policies {
    compiler: Compiler,
    maps: PolicyMaps,
    desired: Desired,
    /// Policies that do not fit.
    over_capacity: Vec<Condition>,
    behind: Behind,
    last_change: Option<Change>,
    /// Changes that were not read yet: at most [`MOST_CHANGES`].
    changes: Vec<Change>,
    /// Whether the policies of an earlier agent still have to be compared with the desired ones: the source was not
    /// complete at the start.
    unrecognised: bool,
    /// Whether there was no policy when the desired policies were compiled.
    is_open: bool,
    /// Policies of an earlier agent that stay.
    held: Held,
    /// The settings with the state of the node, as of the last compilation.
    of_node: Option<OfNode>,
    /// Bounds the log of problems.
    told: LogShare,
}

/// Settings with the state of the node, and the inputs that they were made from.
struct OfNode {
    addresses: Arc<BTreeSet<IpAddr>>,
    behind_translation: bool,
    options: Arc<Options>,
}

impl Policies {
    /// With the last policy number in use.
    pub(super) fn new(last_id: PolicyId) -> Self {
        Self { maps: PolicyMaps::new(last_id), ..Self::default() }
    }

    /// The contents of the maps.
    pub(super) fn maps(&self) -> &PolicyMaps {
        &self.maps
    }

    /// The contents of the maps, mutable.
    pub(super) fn maps_mut(&mut self) -> &mut PolicyMaps {
        &mut self.maps
    }

    /// The last compiled policies.
    pub(super) fn desired(&self) -> &Desired {
        &self.desired
    }

    /// Returns problems of policies for their authors: those found by compiling, and policies that do not
    /// fit.
    pub(super) fn conditions(&self) -> (Conditions, Vec<Condition>) {
        (self.desired.conditions.clone(), self.over_capacity.clone())
    }

    /// Returns the numbers of policies with problems that concern these attachments: of their namespaces, because a
    /// policy selects pods of its own namespace only. All agents read all policies of the cluster.
    pub(super) fn conditions_counted(&self, endpoints: &Endpoints) -> Counts {
        let namespaces: BTreeSet<&str> = endpoints.values().map(|it| it.pod.namespace.as_str()).collect();
        let conditions = &self.desired.conditions;
        let mut counts = conditions.counts(namespaces);
        let without_room = self.over_capacity.iter().map(|condition| &condition.object);
        counts.wrong += without_room.filter(|it| !conditions.is_wrong(it)).collect::<BTreeSet<_>>().len();
        counts
    }

    /// Whether the maps do not hold all desired policies yet.
    pub(super) fn is_behind(&self) -> bool {
        self.behind != Behind::Nothing || self.held.awaits()
    }

    /// Records that the maps have the contents of an earlier agent.
    pub(super) fn adopt(&mut self) {
        self.held.adopt(self.maps.programmed().endpoints.keys().copied());
    }

    /// Forgets the policies of an attachment that has ended or starts again.
    pub(super) fn forget(&mut self, id: u32) {
        self.maps.forget(id);
        self.held.forget(id);
    }

    /// See [`Compiler::take_departed`].
    pub(super) fn take_departed(&mut self) -> BTreeSet<(Place, IpAddr)> {
        self.compiler.take_departed()
    }

    /// The durations of the last change that affected an attachment; `None` before the first.
    pub(super) fn last_change(&self) -> Option<Change> {
        self.last_change
    }

    /// Returns the changes since the last call.
    pub(super) fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// Records a change, if it affected any attachment.
    pub(super) fn note(&mut self, change: Change) {
        if change.attachments > 0 {
            self.last_change = Some(change);
            if self.changes.len() < MOST_CHANGES {
                self.changes.push(change);
            }
        }
    }

    /// Adopts an earlier agent's policies that equal desired ones.
    pub(super) fn recognise(
        &mut self,
        sources: Sources<'_>,
        endpoints: &Endpoints,
        kernel: &impl Kernel,
    ) -> Result<(), EnforceError> {
        self.unrecognised = sources.source.synced().is_err_and(|why| matches!(why, NotSynced::Incomplete(_)));
        if self.unrecognised {
            return Ok(());
        }
        let desired = self.compile(Compiler::update, sources, endpoints);
        self.compare(&desired, kernel)
    }

    /// Compares the policies of adopted attachments with those that are desired now.
    fn compare(&mut self, desired: &Desired, kernel: &impl Kernel) -> Result<(), EnforceError> {
        let decided = self.held.decided(desired);
        if !decided.endpoints.is_empty() {
            self.maps.recognise(&decided, kernel)?;
            self.held.release(desired);
        }
        Ok(())
    }

    /// Compiles the current source and attachments, writes new policies, and switches the affected attachments.
    ///
    /// # Errors
    /// The first failure; work that does not depend on it is done. [`Policies::go_on`] does the rest.
    pub(super) fn bring_up_to_date(
        &mut self,
        sources: Sources<'_>,
        endpoints: &Endpoints,
        kernel: &impl Kernel,
    ) -> Result<Change, EnforceError> {
        self.bring_up_by(Compiler::update, sources, endpoints, kernel)
    }

    fn bring_up_by(
        &mut self,
        mut update: Update,
        sources: Sources<'_>,
        endpoints: &Endpoints,
        kernel: &impl Kernel,
    ) -> Result<Change, EnforceError> {
        self.behind = Behind::Failed;
        if self.unrecognised {
            self.recognise(sources, endpoints, kernel)?;
            // That was an update of the same change.
            update = Compiler::update_further;
        }
        let began = Instant::now();
        let desired = self.compile(update, sources, endpoints);
        if let Err(error) = self.compare(&desired, kernel) {
            tracing::warn!(error = %Chain(&error), "cannot compare the policies of an earlier agent; writing them again");
            self.held.release(&desired);
        }
        Ok(self.write(desired, sources.options.on_overflow, began, kernel)?)
    }

    /// Gives one more attachment the state of all attachments while there is no policy: nothing isolates
    /// it. Returns whether that is sufficient; otherwise everything must be brought up to date.
    ///
    /// # Errors
    /// The map could not be written. [`Policies::go_on`] retries.
    pub(super) fn enter_open(
        &mut self,
        id: u32,
        sources: Sources<'_>,
        kernel: &impl Kernel,
    ) -> Result<bool, EnforceError> {
        if !self.stays_open(sources) {
            return Ok(false);
        }
        let open = PolicyIds::default();
        if self.maps.assigned(id) != Some(open)
            && let Err(error) = self.maps.assign(id, open, kernel)
        {
            self.behind = Behind::Failed;
            return Err(error.into());
        }
        self.desired.endpoints.insert(id, Arc::default());
        Ok(true)
    }

    /// The counterpart of [`Policies::enter_open`], for an attachment that was removed from the maps.
    pub(super) fn leave_open(&mut self, id: u32, sources: Sources<'_>) -> bool {
        let stays_open = self.stays_open(sources);
        if stays_open {
            self.desired.endpoints.remove(&id);
        }
        stays_open
    }

    /// Whether nothing was isolated, the maps are up to date, and there is still no policy.
    fn stays_open(&self, sources: Sources<'_>) -> bool {
        self.is_open
            && self.behind == Behind::Nothing
            && !self.unrecognised
            && !matches!(sources.source.synced(), Err(NotSynced::Incomplete(_)))
            && has_no_policy(&sources.source.snapshot(), sources.options)
    }

    /// Removes policies that packets no longer read ([`unread_since`]), and retries the rest of the last change:
    /// policies for which there is room now, failures, attachments that have waited long enough for unknown peers, and,
    /// after a pause, those for which the last change had no work left: until then they are isolated, so that nothing
    /// else waits for them. A sweep after a change has no more work than the change has left: attaching and detaching
    /// would wait twice as long for both. Returns whether it did.
    ///
    /// # Errors
    /// A map could not be written.
    pub(super) fn go_on(
        &mut self,
        after: Sweep,
        unread: Option<Instant>,
        sources: Sources<'_>,
        endpoints: &Endpoints,
        kernel: &impl Kernel,
    ) -> Result<bool, EnforceError> {
        let more_room = self.maps.remove_unread(unread, kernel)?;
        let is_due = self.behind.is_due(more_room) || self.held.is_due(Instant::now());
        let is_unfinished = after == Sweep::Pause && self.compiler.is_unfinished();
        if !is_due && !is_unfinished {
            return Ok(false);
        }
        let update: Update = match after {
            Sweep::Change => Compiler::update_further,
            Sweep::Pause => Compiler::update,
        };
        let change = self.bring_up_by(update, sources, endpoints, kernel)?;
        self.note(change);
        Ok(true)
    }

    fn compile(&mut self, update: Update, sources: Sources<'_>, endpoints: &Endpoints) -> Desired {
        self.is_open = false;
        if let Err(NotSynced::Incomplete(_)) = sources.source.synced() {
            // Policies that an earlier agent enforced stay. An attachment without any gets none until the
            // policies are known.
            let undecided = endpoints.keys().copied().collect();
            return Desired { undecided, ..Desired::default() };
        }
        // Read after that check: a snapshot from before it may be the empty one that precedes the first.
        let objects = sources.source.snapshot();
        let has_none = has_no_policy(&objects, sources.options);
        let mut desired = if has_none {
            // Without policies nothing is isolated, and examining every pod would slow down every ADD. The
            // state of the compiler is not needed either; for a large cluster it has tens of megabytes.
            self.compiler.forget();
            let open = Arc::<EndpointPolicy>::default();
            let endpoints = endpoints.keys().map(|id| (*id, Arc::clone(&open))).collect();
            Desired { endpoints, ..Desired::default() }
        } else {
            let of_node = self.options_of_node(sources);
            update(&mut self.compiler, &objects, endpoints, of_node.as_deref().unwrap_or(sources.options))
        };
        self.held.hold(&mut desired, &self.maps, &objects, Instant::now());
        self.is_open = has_none && !self.held.awaits();
        desired
    }

    /// The options with the current state of the node, where that matters: one value while nothing of it changes.
    fn options_of_node(
        &mut self,
        Sources { options, node, behind_translation, .. }: Sources<'_>,
    ) -> Option<Arc<Options>> {
        if !options.network_policy {
            return None;
        }
        let addresses = node.known();
        let is_same = |it: &&OfNode| {
            Arc::ptr_eq(&it.addresses, &addresses) && it.behind_translation == behind_translation
        };
        if let Some(same) = self.of_node.as_ref().filter(is_same) {
            return Some(Arc::clone(&same.options));
        }
        let node_may_lead_elsewhere = !behind_translation;
        let node = BTreeSet::clone(&addresses);
        let options = Arc::new(Options { node, node_may_lead_elsewhere, ..options.clone() });
        self.of_node = Some(OfNode { addresses, behind_translation, options: Arc::clone(&options) });
        Some(options)
    }

    /// If new content does not fit next to the old, its attachments are isolated, the old content is removed, and the
    /// new is written in its place. They stay isolated until then, and for as long as it does not fit even then.
    fn write(
        &mut self,
        desired: Desired,
        on_overflow: OnOverflow,
        mut began: Instant,
        kernel: &impl Kernel,
    ) -> Result<Change, BpfError> {
        let mut change = Change::default();
        let mut lap = || {
            let now = Instant::now();
            now.duration_since(std::mem::replace(&mut began, now))
        };
        let writes = self.maps.writes(&desired);
        change.compiled = lap();
        change.policies = writes.install.len();
        let mut refused = self.maps.install(&writes.install, writes.install.keys().copied(), kernel);
        change.written = lap();
        let mut first = self.switch(&writes, &refused, Until::Later, &mut change, kernel);
        for until in [Until::Later, Until::Held(on_overflow)] {
            if refused.is_empty() {
                break;
            }
            first = first.and(self.switch(&writes, &refused, until, &mut change, kernel));
            match self.make_room(kernel) {
                Ok(true) => refused = self.maps.install(&writes.install, refused.into_keys(), kernel),
                Ok(false) => {}
                Err(error) => first = first.and(Err(error)),
            }
            first = first.and(self.switch(&writes, &refused, until, &mut change, kernel));
        }
        change.switched = lap();
        self.report(&desired, &writes.install, &refused, on_overflow);
        self.desired = desired;
        first?;
        if refused.is_empty() {
            self.behind = Behind::Nothing;
        } else if refused.values().all(|error| matches!(**error, BpfError::OverCapacity { .. })) {
            self.behind = Behind::Room;
        }
        Ok(change)
    }

    /// Switches the attachments whose policies differ from the desired ones, as far as the maps hold them, and records
    /// policies that are no longer referenced.
    fn switch(
        &mut self,
        writes: &Writes,
        refused: &Refused,
        until: Until,
        change: &mut Change,
        kernel: &impl Kernel,
    ) -> Result<(), BpfError> {
        let mut first = Ok(());
        for (attachment, wanted) in &writes.assign {
            let known = self.maps.assigned(*attachment);
            let Some(now) = possible(refused, *wanted, known, until).filter(|now| known != Some(*now)) else {
                continue;
            };
            match self.maps.assign(*attachment, now, kernel) {
                Ok(()) => change.attachments += 1,
                Err(error) => first = first.and(Err(error)),
            }
        }
        self.maps.retire(&writes.remove, kernel);
        first
    }

    /// Removes policies that packets no longer read. Returns whether there were any.
    fn make_room(&mut self, kernel: &impl Kernel) -> Result<bool, BpfError> {
        if !self.maps.has_unreferenced() {
            return Ok(false);
        }
        let unread = unread_since(kernel, Instant::now());
        self.maps.remove_unread(unread, kernel)
    }

    /// Reports the policies that are not in the maps, and logs them once; also logs other new problems of
    /// policies, with a share for each namespace.
    fn report(
        &mut self,
        desired: &Desired,
        new: &BTreeMap<PolicyId, Arc<CompiledPolicy>>,
        refused: &Refused,
        then: OnOverflow,
    ) {
        let before = std::mem::take(&mut self.over_capacity);
        let reported =
            refused.iter().filter_map(|(id, why)| Some(over_capacity(desired, new.get(id)?, then, why)));
        let reported: BTreeSet<Condition> = reported.flatten().collect();
        for condition in reported.iter().filter(|condition| before.binary_search(condition).is_err()) {
            self.told.log(condition.object.namespace(), || {
                tracing::error!(object = %condition.object, problem = condition.message, "policy not in force");
            });
        }
        self.over_capacity = reported.into_iter().collect();
        let new = desired.conditions.beyond(&self.desired.conditions);
        for condition in new.filter(|condition| condition.severity == Severity::Error) {
            self.told.log(condition.object.namespace(), || {
                tracing::warn!(object = %condition.object, problem = condition.message, "not in force as written");
            });
        }
    }
}

fn has_no_policy(objects: &Objects, options: &Options) -> bool {
    objects.policies.is_empty() && (objects.network_policies.is_empty() || !options.network_policy)
}

/// Returns the assignment of an attachment while its policies are not in the maps; `None`: it has to wait.
/// An attachment that should be isolated is never left open, and with [`OnOverflow::Keep`] an isolated one
/// keeps the policy that isolated it.
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

/// Returns the conditions of the policies that contribute to one that does not fit.
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
#[path = "first_sync_tests.rs"]
mod first_sync;

#[cfg(test)]
mod tests {
    use super::super::policy_maps::fake::FakeKernel;
    use super::*;
    use crate::objects::ObjectName;

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
    fn policies_without_room_are_retried_when_there_is_more_and_failed_ones_always() {
        let due = |behind: Behind| [false, true].map(|more_room| behind.is_due(more_room));
        assert_eq!(due(Behind::Nothing), [false, false]);
        assert_eq!(due(Behind::Room), [false, true]);
        assert_eq!(due(Behind::Failed), [true, true]);
    }

    /// Attachments isolated for ingress, each with a policy of its own.
    fn isolated(attachments: &[(u32, &Arc<CompiledPolicy>)]) -> Desired {
        let one = |policy: &Arc<CompiledPolicy>| EndpointPolicy {
            ingress: Some(Arc::clone(policy)),
            policies: vec![PolicyName::multi(ObjectName::new("shop", "rules"))],
            ..EndpointPolicy::default()
        };
        let endpoints = attachments.iter().map(|(id, policy)| (*id, Arc::new(one(policy)))).collect();
        Desired { endpoints, ..Desired::default() }
    }

    fn write(policies: &mut Policies, desired: Desired, kernel: &FakeKernel) -> Result<Change, BpfError> {
        policies.write(desired, OnOverflow::Deny, Instant::now(), kernel)
    }

    fn ingress(policies: &Policies, attachment: u32) -> Option<PolicyId> {
        Some(policies.maps().assigned(attachment)?.ingress)
    }

    #[test]
    fn new_content_takes_the_place_of_old_where_both_do_not_fit() {
        let (old, new) = (Arc::default(), Arc::default());
        let kernel = FakeKernel::with_room(1);
        let mut policies = Policies::default();
        write(&mut policies, isolated(&[(9, &old)]), &kernel).unwrap();
        assert_eq!((ingress(&policies, 9), policies.behind), (Some(1), Behind::Nothing));
        write(&mut policies, isolated(&[(9, &new)]), &kernel).unwrap();
        assert_eq!((ingress(&policies, 9), policies.behind), (Some(2), Behind::Nothing));
        assert_eq!(kernel.installed(), [2].into());
        assert_eq!(policies.conditions_counted(&Endpoints::new()), Counts::default());
    }

    #[test]
    fn a_policy_without_room_isolates_its_attachment_and_is_reported_until_it_fits() {
        let (first, second) = (Arc::default(), Arc::default());
        let kernel = FakeKernel::with_room(1);
        let mut policies = Policies::default();
        write(&mut policies, isolated(&[(8, &first), (9, &second)]), &kernel).unwrap();
        assert_eq!((ingress(&policies, 8), ingress(&policies, 9)), (Some(1), Some(DENY_ALL)));
        assert_eq!(policies.behind, Behind::Room);
        let reported: Vec<String> = policies.conditions().1.into_iter().map(|it| it.message).collect();
        let expected = "does not fit into the kernel's tables: its attachments are isolated, until it does: ";
        assert!(reported.len() == 1 && reported[0].starts_with(expected), "{reported:?}");
        assert_eq!(policies.conditions_counted(&Endpoints::new()), Counts { wrong: 1, ..Counts::default() });

        write(&mut policies, isolated(&[(9, &second)]), &kernel).unwrap();
        assert_eq!(policies.behind, Behind::Room, "the other attachment is still under its policy");
        policies.maps_mut().forget(8);
        kernel.assigned.borrow_mut().remove(&8);
        write(&mut policies, isolated(&[(9, &second)]), &kernel).unwrap();
        assert_eq!((ingress(&policies, 9), policies.behind), (Some(4), Behind::Nothing));
        assert_eq!(policies.conditions_counted(&Endpoints::new()), Counts::default());
    }

    #[test]
    fn a_failure_keeps_the_policies_in_force_and_is_retried() {
        let (old, new) = (Arc::default(), Arc::default());
        let kernel = FakeKernel::with_room(2);
        let mut policies = Policies::default();
        write(&mut policies, isolated(&[(9, &old)]), &kernel).unwrap();
        kernel.broken.set(true);
        policies.behind = Behind::Failed;
        write(&mut policies, isolated(&[(9, &new)]), &kernel).unwrap_err();
        assert_eq!((ingress(&policies, 9), policies.behind), (Some(1), Behind::Failed));
        kernel.broken.set(false);
        write(&mut policies, isolated(&[(9, &new)]), &kernel).unwrap();
        assert_eq!((ingress(&policies, 9), policies.behind), (Some(2), Behind::Nothing));
    }
}
