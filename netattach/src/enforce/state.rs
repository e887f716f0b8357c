//! The state behind the enforcer's lock: the attachments, the deferred ones, and all policies.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Instant;

use super::attachment::EnforcedAttachment;
use super::deferred::Deferred;
use super::error::EnforceError;
use super::policies::{Change, Policies, Sources, Sweep};
use super::policy_maps::{Kernel, PolicyMaps};
use super::roster::Roster;
use crate::bpf::PolicyIds;
use crate::objects::Place;
use crate::policy::diff::{DENY_ALL, PolicyId};
use crate::policy::level::Enforcement;

/// The policies of a completely isolated attachment.
const ISOLATED: PolicyIds = PolicyIds { ingress: DENY_ALL, egress: DENY_ALL };

/// Components that change together.
#[derive(Default)]
pub(super) struct State {
    roster: Roster,
    deferred: Deferred,
    /// Attachments whose programs run as filters in their pods until they are attached by BPF links.
    by_filters: BTreeSet<u32>,
    policies: Policies,
}

impl State {
    /// With the last policy number in use.
    pub(super) fn new(last_id: PolicyId) -> Self {
        Self { policies: Policies::new(last_id), ..Self::default() }
    }

    /// The attachments.
    pub(super) fn roster(&self) -> &Roster {
        &self.roster
    }

    /// See [`Roster::note_shortfall`].
    pub(super) fn note_shortfall(&mut self, attachment: &EnforcedAttachment, found: Option<Enforcement>) {
        self.roster.note_shortfall(attachment, found);
    }

    /// See [`Roster::note_passed_by`].
    pub(super) fn note_passed_by(&mut self, attachment: &EnforcedAttachment, found: Option<Enforcement>) {
        self.roster.note_passed_by(attachment, found);
    }

    /// See [`Roster::note_ifb`].
    pub(super) fn note_ifb(&mut self, id: u32, has_one: bool) -> bool {
        self.roster.note_ifb(id, has_one)
    }

    /// The deferred attachments.
    pub(super) fn deferred(&self) -> &Deferred {
        &self.deferred
    }

    /// The deferred attachments, mutable.
    pub(super) fn deferred_mut(&mut self) -> &mut Deferred {
        &mut self.deferred
    }

    /// Records that an attachment's programs run as filters in its pod, until they are attached by BPF
    /// links.
    pub(super) fn note_filters(&mut self, id: u32) {
        self.by_filters.insert(id);
    }

    /// Whether an attachment's programs run as filters in its pod until they are attached by BPF links.
    pub(super) fn runs_by_filters(&self, id: u32) -> bool {
        self.by_filters.contains(&id)
    }

    /// Records that an attachment's programs are attached by BPF links.
    pub(super) fn note_links(&mut self, id: u32) {
        self.by_filters.remove(&id);
    }

    /// The policies.
    pub(super) fn policies(&self) -> &Policies {
        &self.policies
    }

    /// The contents of the maps.
    pub(super) fn maps(&self) -> &PolicyMaps {
        self.policies.maps()
    }

    /// The contents of the maps, mutable without recompiling.
    pub(super) fn maps_mut(&mut self) -> &mut PolicyMaps {
        self.policies.maps_mut()
    }

    /// See [`Policies::take_changes`].
    pub(super) fn take_changes(&mut self) -> Vec<Change> {
        self.policies.take_changes()
    }

    /// See [`Policies::is_behind`].
    pub(super) fn is_behind(&self) -> bool {
        self.policies.is_behind()
    }

    /// See [`Policies::take_departed`].
    pub(super) fn take_departed(&mut self) -> BTreeSet<(Place, IpAddr)> {
        self.policies.take_departed()
    }

    /// See [`Policies::note`].
    pub(super) fn note(&mut self, change: Change) {
        self.policies.note(change);
    }

    /// Assigns new attachments of a pod their policies, in the maps only: all at once.
    ///
    /// # Errors
    /// A map could not be written: the attachments must not come up. With the index of the attachment for
    /// which the write failed.
    pub(super) fn enter(
        &mut self,
        attachments: &[EnforcedAttachment],
        sources: Sources<'_>,
        kernel: &impl Kernel,
    ) -> Result<(), (usize, Box<EnforceError>)> {
        for attachment in attachments {
            self.policies.forget(attachment.id);
            self.note_links(attachment.id);
            self.roster.enter(attachment);
            if attachment.may_wait() {
                self.deferred.wait(attachment);
            }
        }
        let mut first = None;
        let endpoints =
            attachments.iter().enumerate().filter(|(_, attachment)| attachment.endpoint.is_some());
        for (at, attachment) in endpoints {
            let is_open = self.policies.enter_open(attachment.id, sources, kernel);
            if !is_open.map_err(|error| (at, Box::new(error)))? {
                first = Some(at);
                break;
            }
        }
        if let Some(first) = first {
            self.bring_up_to_date(sources, kernel).map_err(|error| (first, Box::new(error)))?;
            // A pod may have disappeared from the source, so its policies are unknown.
            for (at, attachment) in attachments.iter().enumerate() {
                self.isolate_undecided(attachment, kernel).map_err(|error| (at, Box::new(error)))?;
            }
        }
        Ok(())
    }

    /// Adopts an attachment of an earlier agent.
    pub(super) fn take_over(&mut self, attachment: &EnforcedAttachment) {
        self.roster.enter(attachment);
    }

    /// Adopts the policies of all attachments that were taken over. See [`Policies::recognise`].
    pub(super) fn recognise(
        &mut self,
        sources: Sources<'_>,
        kernel: &impl Kernel,
    ) -> Result<(), EnforceError> {
        self.policies.adopt();
        self.policies.recognise(sources, self.roster.endpoints(), kernel)
    }

    /// See [`Policies::bring_up_to_date`].
    pub(super) fn bring_up_to_date(
        &mut self,
        sources: Sources<'_>,
        kernel: &impl Kernel,
    ) -> Result<Change, EnforceError> {
        self.policies.bring_up_to_date(sources, self.roster.endpoints(), kernel)
    }

    /// See [`Policies::go_on`].
    pub(super) fn go_on(
        &mut self,
        after: Sweep,
        unread: Option<Instant>,
        sources: Sources<'_>,
        kernel: &impl Kernel,
    ) -> Result<bool, EnforceError> {
        self.policies.go_on(after, unread, sources, self.roster.endpoints(), kernel)
    }

    /// Isolates an attachment that policies could select while it is unknown which do.
    ///
    /// # Errors
    /// The map could not be written.
    pub(super) fn isolate_undecided(
        &mut self,
        attachment: &EnforcedAttachment,
        kernel: &impl Kernel,
    ) -> Result<(), EnforceError> {
        let maps = self.maps_mut();
        if attachment.endpoint.is_some() && maps.assigned(attachment.id).is_none() {
            maps.assign(attachment.id, ISOLATED, kernel)?;
        }
        Ok(())
    }

    /// Stops attaching programs for an attachment. See [`Roster::end`] for the result.
    pub(super) fn end(&mut self, id: u32) -> bool {
        self.deferred.remove(id);
        self.note_links(id);
        self.roster.end(id)
    }

    /// Forgets an attachment whose record is gone: policies that refer to its addresses change.
    ///
    /// # Errors
    /// A map could not be written.
    pub(super) fn leave(
        &mut self,
        id: u32,
        sources: Sources<'_>,
        kernel: &impl Kernel,
    ) -> Result<(), EnforceError> {
        self.policies.forget(id);
        if self.roster.leave(id) && !self.policies.leave_open(id, sources) {
            self.bring_up_to_date(sources, kernel)?;
        }
        Ok(())
    }
}
