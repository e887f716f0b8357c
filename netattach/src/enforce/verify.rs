//! Checks that an attachment is enforced completely, and reattaches programs that another process has removed.

use super::WholeParents;
use super::attachment::EnforcedAttachment;
use super::enforcer::Enforcer;
use super::error::EnforceError;
use super::level::{behind_the_interface, behind_the_pods_end, lacking, past_programs};
use super::policy_maps::Kernel;
use super::programs::device_name;
use crate::bpf::sys::{self, SharedHook};
use crate::error_chain::Chain;
use crate::hooks::{HookError, HookPoint, Restored};
use crate::netlink::{Handle, ethtool};
use crate::policy::level::{Enforcement, Level};

impl Enforcer {
    /// Returns the first missing part of an attachment's enforcement, as text. `known`: what a check of many
    /// attachments knows already.
    pub(super) fn difference(
        &self,
        attachment: &EnforcedAttachment,
        known: &mut WholeParents,
        host: &mut Handle,
    ) -> Result<Option<String>, EnforceError> {
        let EnforcedAttachment { id, point, .. } = attachment;
        if point.is_nowhere() {
            return Ok(None);
        }
        if let Some(difference) = self.other_record(attachment)? {
            return Ok(Some(difference));
        }
        {
            let state = self.lock();
            if self.kernel().assigned(*id)? != state.maps().assigned(*id).unwrap_or_default() {
                return Ok(Some("the dataplane has other policies for it".to_owned()));
            }
        }
        if let Some(missing) = self.missing_program(attachment, known, host)? {
            return Ok(Some(missing));
        }
        if matches!(point, HookPoint::Parent { .. }) {
            return Ok(None);
        }
        let index = point.host_index();
        if let Some(pace) = attachment.host_pace().filter(|_| self.defaults().paced)
            && host.find_pace(index)? != Some((pace.rate, pace.queue))
        {
            let device = device_name(index, host);
            return Ok(Some(format!("device {device} does not send at the attachment's rate")));
        }
        Ok(None)
    }

    /// Describes how the record of an attachment differs. Whoever follows its parent compares its Ethernet address, and
    /// may write it at any time: here it has that of the record.
    fn other_record(&self, attachment: &EnforcedAttachment) -> Result<Option<String>, EnforceError> {
        let attachments = self.dataplane().attachments();
        // Records are written anew under this lock.
        let following = attachment.inherits().map(|_| self.lock());
        let mut record = self.record(attachment);
        if following.is_some() {
            record.mac = attachments.mac(attachment.id).unwrap_or(record.mac);
        }
        Ok(attachments.difference(attachment.id, &attachment.point.device(), &record)?)
    }

    /// The first program that should run but does not, as text. A parent's programs run for all of its attachments.
    fn missing_program(
        &self,
        attachment: &EnforcedAttachment,
        known: &mut WholeParents,
        host: &mut Handle,
    ) -> Result<Option<String>, EnforceError> {
        // Takes the turn, so that no filter is being replaced by a BPF link meanwhile.
        let by_filters = self.lock().runs_by_filters(attachment.id);
        let turn = by_filters.then(|| self.programs().take_turn());
        let by_filters = by_filters && self.lock().runs_by_filters(attachment.id);
        let parent = match &attachment.point {
            HookPoint::Parent { on, .. } => Some(on.parent),
            _ => None,
        };
        let afresh = known.lists_afresh();
        let missing = known.lack(parent, || self.programs().missing(attachment, by_filters, afresh, host))?;
        drop(turn);
        let past_programs = offloaded(attachment).or(behind_netkit_programs(attachment)?);
        let mut state = self.lock();
        if missing.is_none() {
            state.note_shortfall(attachment, past_programs);
        }
        if parent.is_some() {
            return Ok(missing);
        }
        let (id, deferred) = (attachment.id, state.deferred());
        let may_wait = deferred.waits(id) && deferred.due(id, state.maps()).is_none();
        Ok(missing.filter(|_| !may_wait))
    }

    /// Reattaches programs that another process has removed from an attachment's device, or has preceded by
    /// its own; returns whether that helped. Records what they still lack.
    pub(super) fn put_programs_back(
        &self,
        attachment: &EnforcedAttachment,
        host: &mut Handle,
    ) -> Result<bool, EnforceError> {
        let is_on_parent = matches!(attachment.point, HookPoint::Parent { .. });
        if !is_on_parent && self.is_waiting(attachment.id) {
            return self.begin_if_due(attachment.id);
        }
        let restored = match is_on_parent {
            true => self.programs().restore(attachment, host),
            false => self.run_again(attachment, host),
        };
        let shortfall = match &restored {
            Ok(restored) => {
                let lack =
                    restored.left.map(|lack| lacking(lack, self.programs().in_words(attachment, lack, host)));
                lack.or_else(|| offloaded(attachment))
                    .or_else(|| behind_netkit_programs(attachment).unwrap_or_default())
            }
            Err(error) => {
                let why = format!("its programs could not be put back: {}", Chain(error));
                Some(Enforcement { level: Level::None, why })
            }
        };
        self.lock().note_shortfall(attachment, shortfall);
        if !restored?.helped() {
            return Ok(false);
        }
        self.programs().count_put_back();
        let device = device_name(attachment.host_index(), host);
        tracing::warn!(
            device,
            attachment = attachment.label,
            "another program removed programs from a device or attached others before them; put back"
        );
        Ok(true)
    }

    /// Reattaches programs on an attachment's own device. An attachment that is ending gets none.
    fn run_again(
        &self,
        attachment: &EnforcedAttachment,
        host: &mut Handle,
    ) -> Result<Restored, EnforceError> {
        let _turn = self.programs().take_turn();
        if !self.lock().roster().is_current(attachment) {
            return Ok(Restored::default());
        }
        let restored = self.programs().restore(attachment, host)?;
        self.lock().note_links(attachment.id);
        Ok(restored)
    }

    /// Records whether packets now reach an attachment's pod without passing its interface.
    pub(super) fn note_mode(
        &self,
        attachment: &EnforcedAttachment,
        pod: &mut Handle,
    ) -> Result<(), EnforceError> {
        let HookPoint::Pod(device) = &attachment.point else { return Ok(()) };
        let mode = match pod.link_by_index(device.index) {
            // The pod has removed it, or its DEL is under way.
            Err(error) if error.not_found() => return Ok(()),
            found => found?.mode,
        };
        let (found, mut state) = (behind_the_interface(mode), self.lock());
        if found.is_some() && state.roster().passed_by(attachment.id).is_none() {
            tracing::warn!(
                attachment = attachment.label,
                "the ipvlans of its parent were switched to mode l3s: packets to the pod pass no program"
            );
        }
        state.note_passed_by(attachment, found);
        Ok(())
    }

    /// Replaces the filters by which an attachment's programs have run in its pod since its ADD with BPF
    /// links. An attachment that has ended, or whose pod is gone, is left unchanged.
    pub(super) fn exchange_filters(&self, attachment: &EnforcedAttachment) -> Result<(), EnforceError> {
        if !self.lock().runs_by_filters(attachment.id) {
            return Ok(());
        }
        let _turn = self.programs().take_turn();
        {
            let state = self.lock();
            if !state.runs_by_filters(attachment.id) || !state.roster().is_current(attachment) {
                return Ok(());
            }
        }
        match self.programs().attach(attachment, &mut Handle::open()?) {
            // Its DEL is still to come.
            Err(error) if error.is_device_gone() => return Ok(()),
            other => other?,
        }
        self.lock().note_links(attachment.id);
        Ok(())
    }
}

/// Returns the level of an attachment on a representor whose card may switch packets past its programs.
pub(super) fn offloaded(attachment: &EnforcedAttachment) -> Option<Enforcement> {
    if !attachment.is_on_representor() {
        return None;
    }
    // A failed query counts as unknown.
    past_programs(ethtool::is_on(attachment.host_index(), ethtool::TC_OFFLOAD).unwrap_or_default())
}

/// Returns the level of an attachment by a netkit if other programs judge the packets of the pod's end
/// first: these run before netattach's, and may redirect packets. They can be attached only from the node's
/// end, so no process in the pod can do it.
fn behind_netkit_programs(attachment: &EnforcedAttachment) -> Result<Option<Enforcement>, EnforceError> {
    let Some(index) = attachment.netkit() else { return Ok(None) };
    let shown = |source| HookError::Tcx { device: index, source };
    let before = sys::programs_on(index, SharedHook::Peer).map_err(shown)?;
    Ok((!before.is_empty()).then(behind_the_pods_end))
}
