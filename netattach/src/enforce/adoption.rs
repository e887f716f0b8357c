//! Adopts the attachments of an earlier agent.
//!
//! Programs on the devices keep enforcing meanwhile, with the policies in their maps. Therefore records and policies
//! are updated first; then the devices are checked, and only those that differ from the desired state are changed.

use std::collections::BTreeSet;

use super::attachment::EnforcedAttachment;
use super::enforcer::Enforcer;
use super::error::EnforceError;
use super::programs::Adopted;
use super::routed_to::RoutedTo;
use super::state::State;
use crate::hooks::HookPoint;
use crate::hooks::node_end::Found;
use crate::netlink::Handle;
use crate::step::EnforceWhen;

impl Enforcer {
    /// Adopts the attachments found at the start and, if they are `all`, removes leftovers of other
    /// attachments. Running programs are replaced only if this agent's differ.
    pub(super) fn take_over(&self, attachments: &[EnforcedAttachment], all: bool) -> Vec<EnforceError> {
        let is_new = self.dataplane().is_new();
        let changed = is_new || self.dataplane().programs_changed().unwrap_or(true);
        let mut errors = self.take_over_records(attachments, all, is_new);
        if is_new && !errors.is_empty() {
            // Programs on the devices keep enforcing the policies of their maps; new programs would have no policies.
            return errors;
        }
        errors.extend(self.guard_routed(attachments));
        match self.take_over_devices(attachments, changed) {
            Ok(failed) => errors.extend(failed),
            Err(error) => errors.push(error),
        }
        if all {
            let known = attachments.iter().map(|attachment| attachment.id).collect();
            errors.extend(self.remove_strays(&known).err());
        }
        errors.extend(self.programs().adopt_parents(all));
        if errors.is_empty() {
            errors.extend(self.routed().finish().err());
            let attached = self.dataplane().programs_attached();
            // Attachments without a record keep their programs, whose maps stay pinned.
            let removed =
                attached.and_then(|()| if all { self.dataplane().remove_other_layouts() } else { Ok(()) });
            errors.extend(removed.err().map(EnforceError::from));
        }
        errors
    }

    /// Updates records and policies. In new maps, attachments that policies could select and whose pods are missing
    /// from the source are isolated: their previous policies are unknown.
    fn take_over_records(
        &self,
        attachments: &[EnforcedAttachment],
        all: bool,
        is_new: bool,
    ) -> Vec<EnforceError> {
        let mut errors = Vec::new();
        let mut state = self.lock();
        state.maps_mut().set_unknown_attachments(!all);
        for attachment in attachments {
            errors.extend(self.take_over_record(&mut state, attachment, is_new).err());
        }
        // If this fails, all policies are written again.
        errors.extend(state.recognise(self.sources(), &self.kernel()).err());
        errors.extend(state.bring_up_to_date(self.sources(), &self.kernel()).err());
        if is_new {
            let isolated = attachments.iter().try_for_each(|it| state.isolate_undecided(it, &self.kernel()));
            errors.extend(isolated.err());
        }
        errors
    }

    /// Adopts the record of an attachment and its policies. New maps have neither.
    fn take_over_record(
        &self,
        state: &mut State,
        attachment: &EnforcedAttachment,
        is_new: bool,
    ) -> Result<(), EnforceError> {
        state.take_over(attachment);
        let attachments = self.dataplane().attachments();
        let former = attachments.link_local(attachment.id);
        self.put_record(attachment)?;
        self.note_former(former.filter(|former| attachments.link_local(attachment.id) != Some(*former)));
        if self.dataplane().lost_flows() && !attachment.point.is_nowhere() {
            self.dataplane().attachments().take_answers(attachment.id)?;
        }
        if !is_new {
            state.maps_mut().adopt(attachment.id, &self.kernel())?;
        }
        Ok(())
    }

    /// Enables judging of routed packets for these attachments and, if the maps are new, for no others. An attachment
    /// that fails keeps its entries in the maps, and has none in new maps; the other attachments and the use of this
    /// agent's program by the table do not depend on it.
    fn guard_routed(&self, attachments: &[EnforcedAttachment]) -> Vec<EnforceError> {
        if !self.judges_routed() {
            return Vec::new();
        }
        let mut host = match Handle::open() {
            Ok(host) => host,
            Err(error) => return vec![error.into()],
        };
        let sources = self.sources();
        // An address that two attachments have stays with the one that the maps lead to; in new maps the first one
        // gets it, in the order of the numbers, which are assigned in ascending order. Attachments to which the node
        // routes nothing come first: addresses that an earlier agent has assigned to them go to the attachment that
        // the node routes them to.
        let mut in_turn: Vec<&EnforcedAttachment> = attachments.iter().collect();
        in_turn.sort_by_key(|attachment| (attachment.routed_to != RoutedTo::None, attachment.id));
        let mut errors = Vec::new();
        for attachment in in_turn {
            errors.extend(self.routed().adopt(attachment, &sources.options.restrictions, &mut host).err());
        }
        if self.dataplane().is_new() {
            errors.extend(self.routed().take_over().err());
        }
        errors
    }

    /// Ensures that every device is bound to its attachment and runs the programs, and this agent's
    /// programs if they have `changed`. Returns the failures of single attachments.
    fn take_over_devices(
        &self,
        attachments: &[EnforcedAttachment],
        changed: bool,
    ) -> Result<Vec<EnforceError>, EnforceError> {
        let mut host = Handle::open()?;
        let (mut node_ends, mut failed) = (Vec::new(), Vec::new());
        for attachment in attachments {
            let done = match &attachment.point {
                HookPoint::NodeEnd(index) => {
                    node_ends.push((*index, attachment));
                    self.programs().bind(attachment, *index)
                }
                HookPoint::Parent { .. } => self.programs().adopt_on_parent(attachment, changed, &mut host),
                HookPoint::Pod(device) => {
                    match self.programs().adopt_in_pod(attachment, device, changed, &mut host) {
                        Ok(Adopted::Deferred) => self.defer(attachment),
                        other => other.map(drop),
                    }
                }
                HookPoint::Nowhere(_) => Ok(()),
            };
            failed.extend(done.err());
        }
        for (index, attachment, found) in self.programs().find_node_ends(node_ends, &mut host)? {
            let done = match found {
                Ok(Some(found)) => self.take_over_node_end(attachment, index, &found, changed, &mut host),
                // The device is gone, and the DEL of the attachment follows.
                Ok(None) => Ok(()),
                Err(error) => Err(error.into()),
            };
            failed.extend(done.err());
        }
        Ok(failed)
    }

    fn take_over_node_end(
        &self,
        attachment: &EnforcedAttachment,
        device: u32,
        found: &Found,
        changed: bool,
        host: &mut Handle,
    ) -> Result<(), EnforceError> {
        if attachment.is_delegated() {
            // A delegated attachment is never on the fast path, and its device is no uplink.
            self.fast_paths().admit(attachment.member());
        }
        if attachment.when == EnforceWhen::Selected && !found.anything() {
            return self.defer(attachment);
        }
        // The pod's own end is left as it is.
        self.ensure_paced(device, attachment.host_pace(), host)?;
        self.programs().adopt_node_end((attachment, device), found, changed, host)?;
        if !attachment.is_delegated() {
            self.fast_paths().admit(attachment.member());
        }
        Ok(())
    }

    /// Removes the attachments that are not `known`: records, flows, links.
    fn remove_strays(&self, known: &BTreeSet<u32>) -> Result<(), EnforceError> {
        let dataplane = self.dataplane();
        let (recorded, bound) = (dataplane.attachments().records(), dataplane.attachments().bound());
        let macvlans = dataplane.parents().attachments();
        let entered = recorded.keys().chain(bound.values()).chain(&macvlans).copied();
        let strays: BTreeSet<u32> = entered.filter(|id| !known.contains(id)).collect();
        self.flows().purge(dataplane.attachments().hosts(&strays)?)?;
        let addresses = dataplane.attachments().addresses();
        for id in strays {
            // No other state of it is known.
            let addresses = addresses.get(&id);
            tracing::info!(
                number = id,
                ?addresses,
                "removing an attachment that is in the maps but in no record"
            );
            dataplane.remove_attachment(id)?;
        }
        dataplane.parents().forget_lost()?;
        self.routed().retain(known)?;
        self.programs().sweep(known)
    }
}
