//! Taking over what an earlier agent attached.
//!
//! What runs on the devices enforces all the while, with the policies that it has. Therefore records and policies are brought
//! up to date first, then the devices are looked at, and only those that are not as they should be are touched.

use std::collections::BTreeSet;

use super::attachment::Guarded;
use super::enforcer::{Enforcer, Point, State};
use super::error::EnforceError;
use crate::bpf::PolicyIds;
use crate::hooks::HookPoint;
use crate::hooks::node_end::{self, Found};
use crate::netlink::Handle;
use crate::policy::diff::DENY_ALL;
use crate::step::When;

impl Enforcer {
    /// Takes over the attachments that were there at start and, when they are `all`, removes what belongs to none of
    /// them. Programs that still run are replaced only when this agent brings others.
    pub fn adopt(&self, attachments: &[Guarded], all: bool) -> Vec<EnforceError> {
        let mut errors = Vec::new();
        let is_new = self.dataplane.is_new();
        let changed = is_new || self.dataplane.programs_changed().unwrap_or(true);
        {
            let mut state = self.lock();
            state.strangers = !all;
            for guarded in attachments {
                errors.extend(self.adopt_record(&mut state, guarded, is_new).err());
            }
            // Should it fail, everything is written anew.
            errors.extend(self.recognise(&mut state).err());
            errors.extend(self.bring_up_to_date(&mut state).err());
            if is_new {
                errors.extend(self.isolate_unknown(&mut state, attachments).err());
                if !errors.is_empty() {
                    // What runs on the devices goes on with the policies that it has; new programs would have none.
                    return errors;
                }
            }
        }
        errors.extend(self.guard_routed(attachments).err());
        match self.adopt_devices(attachments, changed) {
            Ok(failed) => errors.extend(failed),
            Err(error) => errors.push(error),
        }
        let known: BTreeSet<u32> = attachments.iter().map(|guarded| guarded.id).collect();
        if all {
            errors.extend(self.remove_strays(&known).err());
        }
        match Handle::open() {
            Ok(mut host) => {
                let failed = self.parents.adopt_all(&self.dataplane, all, &mut host);
                errors.extend(failed.into_iter().map(EnforceError::from));
            }
            Err(error) => errors.push(error.into()),
        }
        if errors.is_empty() {
            errors.extend(self.routed.finish().err());
            let attached = self.dataplane.programs_attached();
            // Attachments that no record tells of go on under their programs, whose maps stay within reach.
            let removed =
                attached.and_then(|()| if all { self.dataplane.remove_other_layouts() } else { Ok(()) });
            errors.extend(removed.err().map(EnforceError::from));
        }
        errors
    }

    /// What the node routes is judged for those that are here, and, where that has gone on without an agent, for no others.
    fn guard_routed(&self, attachments: &[Guarded]) -> Result<(), EnforceError> {
        if !self.judges_routed() {
            return Ok(());
        }
        let mut host = Handle::open()?;
        attachments.iter().try_for_each(|guarded| self.routed.guard(guarded, &mut host))?;
        if self.dataplane.is_new() { self.routed.take_over() } else { Ok(()) }
    }

    /// Takes over the record of an attachment, and the policies that it is under. New maps know of none.
    fn adopt_record(&self, state: &mut State, guarded: &Guarded, is_new: bool) -> Result<(), EnforceError> {
        let Guarded { id, endpoint, .. } = guarded;
        state.endpoints.extend(endpoint.clone().map(|endpoint| (*id, endpoint)));
        state.points.insert(*id, Point::of(guarded));
        self.put(guarded)?;
        if self.dataplane.lost_flows() && !guarded.point.is_nowhere() {
            self.dataplane.attachments().take_answers(*id)?;
        }
        if !is_new {
            state.programmed.endpoints.insert(*id, self.dataplane.policies().of(*id)?);
        }
        Ok(())
    }

    /// In new maps, attachments that policies could select and whose pods the source does not have are isolated: nobody
    /// can say what they were under.
    fn isolate_unknown(&self, state: &mut State, attachments: &[Guarded]) -> Result<(), EnforceError> {
        for Guarded { id, endpoint, .. } in attachments {
            if endpoint.is_some() && !state.programmed.endpoints.contains_key(id) {
                self.assign(state, *id, PolicyIds { ingress: DENY_ALL, egress: DENY_ALL })?;
            }
        }
        Ok(())
    }

    /// Sees to it that every device is its attachment's and runs the programs, and this agent's if those have `changed`.
    /// Returns what failed of single ones.
    fn adopt_devices(
        &self,
        attachments: &[Guarded],
        changed: bool,
    ) -> Result<Vec<EnforceError>, EnforceError> {
        let mut host = Handle::open()?;
        let (mut own, mut failed) = (Vec::new(), Vec::new());
        for guarded in attachments {
            let done = match &guarded.point {
                HookPoint::NodeEnd(index) => {
                    own.push((*index, guarded));
                    self.dataplane.attachments().bind(*index, guarded.id).map_err(EnforceError::from)
                }
                HookPoint::Parent { on, macvlan } => {
                    let adopted =
                        self.parents.adopt(&self.dataplane, guarded.id, on, macvlan, changed, &mut host);
                    adopted.map_err(EnforceError::from)
                }
                HookPoint::Pod(device) => self.adopt_in_pod(guarded, device, changed, &mut host),
                HookPoint::Nowhere(_) => Ok(()),
            };
            failed.extend(done.err());
        }
        let devices: Vec<u32> = own.iter().map(|(index, _)| *index).collect();
        let found = node_end::find_all(&devices, self.dataplane.programs(), &mut host)?;
        for ((index, guarded), found) in own.into_iter().zip(found) {
            let done = match found {
                Ok(Some(found)) => self.adopt_device(guarded, index, &found, changed, &mut host),
                // The device is gone: its DEL is still to come.
                Ok(None) => Ok(()),
                Err(error) => Err(error.into()),
            };
            failed.extend(done.err());
        }
        Ok(failed)
    }

    fn adopt_device(
        &self,
        guarded: &Guarded,
        device: u32,
        found: &Found,
        changed: bool,
        host: &mut Handle,
    ) -> Result<(), EnforceError> {
        if guarded.is_delegated() {
            // Never on the fast path, and no uplink either, whatever comes by its device.
            self.fast.admit(guarded.member());
        }
        if guarded.when == When::Selected && !found.anything() {
            return self.wait(guarded);
        }
        // The pod's own end is left as the pod has it.
        self.ensure_paced(device, guarded.host_pace(), host)?;
        let (mode, programs) = (self.modes.attachments, self.dataplane.programs());
        let hooks = node_end::on(device);
        if changed || !found.is_whole(mode, programs, device, host)? {
            hooks.attach(mode, programs, host)?;
        }
        // Last, so that every packet is judged by one of the two.
        if found.has(mode.other()) {
            hooks.detach(mode.other(), programs, host, false)?;
        }
        if !guarded.is_delegated() {
            self.fast.admit(guarded.member());
        }
        Ok(())
    }

    fn remove_strays(&self, known: &BTreeSet<u32>) -> Result<(), EnforceError> {
        let recorded = self.dataplane.attachments().records();
        let bound = self.dataplane.attachments().bound();
        let macvlans = self.dataplane.parents().attachments();
        let entered = recorded.keys().chain(bound.values()).chain(&macvlans).copied();
        let strays: BTreeSet<u32> = entered.filter(|id| !known.contains(id)).collect();
        let hosts =
            strays.iter().map(|id| self.dataplane.attachments().hosts(*id)).collect::<Result<Vec<_>, _>>()?;
        self.flows.purge(hosts.into_iter().flatten())?;
        let addresses = self.dataplane.attachments().addresses();
        for id in strays {
            // Nothing else is known of it.
            let addresses = addresses.get(&id);
            tracing::info!(
                number = id,
                ?addresses,
                "removing an attachment from the maps that is in no record"
            );
            self.dataplane.remove_attachment(id)?;
        }
        self.routed.retain(known)?;
        self.sweep_pods(known)?;
        let known = self.dataplane.attachments().bound().into_keys().collect();
        Ok(node_end::sweep(self.dataplane.programs(), &known)?)
    }
}
