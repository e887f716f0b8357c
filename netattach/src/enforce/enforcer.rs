//! The enforcer: attaches and detaches attachments, and updates the maps when the objects change.
//!
//! It combines the parts and defines their order. Locks are taken in this order: the turn of
//! [`AttachedPrograms`], the lock of the parents (`hooks::parent`), the state, the lock of [`Routed`]. The
//! parents' lock is released before the state is locked, and the fast path's lock is taken alone. That of
//! former addresses is held for an assignment. No lock is held while waiting for readers of policies.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::admission::{self, EnforcementRequirement, Unenforceable};
use super::attachment::{EnforcedAttachment, is_behind_card};
use super::error::{AttachFailed, EnforceError};
use super::level::Vantage;
use super::node_addresses::NodeAddresses;
use super::node_defaults::NodeDefaults;
use super::policies::{Change, Sources, Sweep};
use super::policy_maps::{KernelMaps, unread_since};
use super::programs::AttachedPrograms;
use super::routed::Routed;
use super::state::State;
use super::verify::offloaded;
use super::{Enforce, WholeParents};
use crate::bpf::{self, Dataplane, FlowTable, Host, Owner};
use crate::fast_path::FastPaths;
use crate::hooks::{AttachModes, HookPoint};
use crate::mac::Mac;
use crate::netlink::{self, Changes, Handle};
use crate::plan::{AttachmentPlan, PodRef};
use crate::policy::options::Options;
use crate::source::Source;
use crate::spec::Pace;
use crate::step::{EnforceWhen, HookKind};

/// How long an ADD waits between two checks whether a number is free, if the kernel cannot report that
/// packets have ended.
const PAUSE: Duration = Duration::from_millis(50);

/// The dataplane, its policies, and the attachments.
pub struct Enforcer {
    dataplane: Arc<Dataplane>,
    flows: FlowTable,
    fast: Arc<FastPaths>,
    routed: Routed,
    programs: AttachedPrograms,
    source: Arc<dyn Source>,
    options: Options,
    node: NodeAddresses,
    defaults: NodeDefaults,
    requirement: EnforcementRequirement,
    state: Mutex<State>,
    /// Link-local addresses that attachments had until their parents got other Ethernet addresses: their flows are
    /// still to be removed. A pass over the flow table removes those of all. An agent that is killed before forgets
    /// them: the record has only the present address, and a flow that nobody uses ends by itself.
    former: Mutex<BTreeSet<Host>>,
}

impl Enforcer {
    /// Adopts a dataplane with all that an earlier agent left in it. `owner`: the agent's state directory.
    ///
    /// # Errors
    /// The dataplane cannot be read.
    pub fn new(
        (dataplane, owner): (Dataplane, String),
        source: Arc<dyn Source>,
        options: Options,
        defaults: NodeDefaults,
        modes: AttachModes,
        requirement: EnforcementRequirement,
    ) -> Result<Self, EnforceError> {
        let last_id = dataplane.policies().allocate()?;
        let defaults = NodeDefaults { paced: Handle::open()?.has_pacing()?, ..defaults };
        if !defaults.paced {
            tracing::warn!("the kernel has no tbf: traffic above a bandwidth limit is dropped, not delayed");
        }
        let node = if options.network_policy { NodeAddresses::of_now()? } else { NodeAddresses::none() };
        let dataplane = Arc::new(dataplane);
        let programs = AttachedPrograms::new(Arc::clone(&dataplane), modes, defaults.strangers);
        let fast = FastPaths::new(defaults.fast_path, defaults.xdp, modes.others, &dataplane)?;
        let routed = Routed::begin(dataplane.routed()?, owner, options.network_policy, dataplane.is_new())?;
        Ok(Self {
            flows: dataplane.flows()?,
            fast: Arc::new(fast),
            routed,
            programs,
            dataplane,
            source,
            options,
            node,
            defaults,
            requirement,
            state: Mutex::new(State::new(last_id)),
            former: Mutex::default(),
        })
    }

    /// Applies the current manifests to all attachments.
    ///
    /// # Errors
    /// A write failed. The previous policies stay in force where it failed.
    pub fn sync(&self) -> Result<(), EnforceError> {
        {
            let mut state = self.lock();
            let change = state.bring_up_to_date(self.sources(), &self.kernel())?;
            state.note(Change { read: self.source.reading(), ..change });
        }
        self.sweep_after(Sweep::Change)
    }

    /// Removes entries that have been unreferenced for long enough and flows of former addresses, frees the
    /// numbers of attachments that ended as long ago, completes the last change (policies for which there is
    /// room now, failures, and what the work of an update did not suffice for), and attaches programs that policies
    /// wait for.
    ///
    /// # Errors
    /// A map could not be written, or a program not be attached.
    pub fn sweep(&self) -> Result<(), EnforceError> {
        self.sweep_after(Sweep::Pause)
    }

    fn sweep_after(&self, after: Sweep) -> Result<(), EnforceError> {
        let is_clean = !self.lock().maps().has_unreferenced() && !self.dataplane.attachments().has_resting();
        let unread = if is_clean { None } else { unread_since(&self.kernel(), Instant::now()) };
        let freed = unread.map_or(Ok(()), |unread| self.free_numbers(unread));
        let went_on = self.lock().go_on(after, unread, self.sources(), &self.kernel());
        let purged = if went_on.is_ok() { self.purge_departed(BTreeSet::new()) } else { Ok(()) };
        let former = self.purge_former();
        let began = self.begin_due();
        freed.and(went_on.map(drop)).and(purged).and(former).and(began)
    }

    /// Removes the flows of hosts that are gone, and of addresses that pods have given up, if flows stay
    /// approved; called once policies have changed. Until then packets to them have entered flows, which
    /// would be kept for the address's next owner. An address of an attachment of this node belongs to it,
    /// even if another host has claimed it.
    fn purge_departed(&self, mut gone: BTreeSet<Host>) -> Result<(), EnforceError> {
        let mut state = self.lock();
        if !self.defaults.keep_established {
            state.take_departed();
            return Ok(());
        }
        // While old policies are still in the maps, they admit flows.
        let mut departed = if state.is_behind() { BTreeSet::new() } else { state.take_departed() };
        if !departed.is_empty() {
            let records = self.dataplane.attachments().records();
            let endpoints = state.roster().endpoints();
            for endpoint in endpoints.values() {
                let held =
                    endpoint.at.iter().flat_map(|at| endpoint.addresses.iter().map(move |ip| (at, ip)));
                for (place, address) in held {
                    departed.remove(&(place.clone(), *address));
                }
            }
            for (id, endpoint) in endpoints {
                let Some(record) = records.get(id) else { continue };
                let here = departed.iter().filter(|(place, _)| endpoint.at.contains(place));
                gone.extend(here.map(|(_, address)| (record.zone, *address)));
            }
        }
        drop(state);
        Ok(self.flows.purge(gone)?)
    }

    /// Removes the flows of link-local addresses that attachments had: the next holder of the Ethernet address
    /// must not find what policies have approved.
    fn purge_former(&self) -> Result<(), EnforceError> {
        let former = std::mem::take(&mut *self.former());
        let purged = self.flows.purge(former.iter().copied());
        if purged.is_err() {
            self.note_former(former);
        }
        Ok(purged?)
    }

    /// Notes link-local addresses that attachments had.
    pub(super) fn note_former(&self, addresses: impl IntoIterator<Item = Host>) {
        self.former().extend(addresses);
    }

    fn former(&self) -> MutexGuard<'_, BTreeSet<Host>> {
        self.former.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Continues the pass over the flow table, if there can be flows. `true` when it has reached the end.
    ///
    /// # Errors
    /// The table could not be read or written.
    pub fn collect_flows(&self) -> Result<bool, EnforceError> {
        if !self.flows.may_hold_flows() {
            return Ok(true);
        }
        let whole = self.flows.collect()?;
        if !whole {
            return Ok(false);
        }
        let (isolated, has_unknown, endpoints) = {
            let state = self.lock();
            let endpoints = state.roster().endpoints().clone();
            (state.maps().isolated(), state.maps().has_unknown_attachments(), endpoints)
        };
        if isolated.is_empty() && !has_unknown {
            self.flows.nothing_isolated();
        }
        let mut live = self.flows.census().unwrap_or_default().by_attachment;
        for id in isolated {
            live.entry(id).or_default();
        }
        let owner = |id: &u32| {
            let pod = &endpoints.get(id)?.pod;
            Some((*id, Owner { namespace: pod.namespace.clone(), pod: pod.name.clone() }))
        };
        let owners = live.keys().filter_map(owner).collect();
        self.flows.set_places(self.dataplane.attachments().share_out(live, &owners)?);
        Ok(true)
    }

    /// Maintains the table in the node's packet filter that judges routed packets.
    ///
    /// # Errors
    /// The node cannot be inspected, or a map not be written.
    pub fn keep_routed(&self, changes: &Changes) -> Result<(), EnforceError> {
        let put_back = || {
            self.programs.count_put_back();
            tracing::warn!(
                table = netlink::GUARD_TABLE,
                "the table in the node's packet filter was changed by another program; put back"
            );
        };
        if self.routed.keep(changes, put_back)? {
            if let Some(why) = self.routed.missing() {
                tracing::error!(
                    why,
                    "the table in the node's packet filter is missing; routed packets are judged before address translation"
                );
            }
            self.sync()?;
        }
        Ok(())
    }

    /// Updates the policies if the node's addresses have changed since the last read.
    ///
    /// # Errors
    /// The kernel cannot be queried, or a map not be written.
    pub fn keep_addresses(&self) -> Result<(), EnforceError> {
        if self.node.refresh()? { self.sync() } else { Ok(()) }
    }

    /// The attachments of the fast path.
    pub fn fast_paths(&self) -> &Arc<FastPaths> {
        &self.fast
    }

    /// The flow table.
    pub fn flows(&self) -> &FlowTable {
        &self.flows
    }

    /// Whether routed packets are judged after the node's address translation.
    pub fn judges_routed(&self) -> bool {
        self.options.network_policy
    }

    pub(super) fn dataplane(&self) -> &Dataplane {
        &self.dataplane
    }

    pub(super) fn programs(&self) -> &AttachedPrograms {
        &self.programs
    }

    pub(super) fn routed(&self) -> &Routed {
        &self.routed
    }

    pub(super) fn defaults(&self) -> NodeDefaults {
        self.defaults
    }

    pub(super) fn requirement(&self) -> EnforcementRequirement {
        self.requirement
    }

    /// The inputs of policies other than the attachments.
    pub(super) fn sources(&self) -> Sources<'_> {
        Sources {
            source: self.source.as_ref(),
            options: &self.options,
            node: &self.node,
            behind_translation: self.routed.is_active(),
        }
    }

    /// The maps of policies.
    pub(super) fn kernel(&self) -> KernelMaps<'_> {
        KernelMaps { dataplane: &self.dataplane, flows: &self.flows }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // No lock is poisoned: a panic ends the agent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes the record of an attachment. If it is on a VLAN, frames from its netns also pass on the devices
    /// beneath that VLAN from this point on.
    pub(super) fn put_record(&self, attachment: &EnforcedAttachment) -> Result<(), EnforceError> {
        self.dataplane.parents().pass_above(attachment.id, &attachment.trunks)?;
        if attachment.point.is_nowhere() {
            // Policies of other attachments use its addresses; no packet is looked up by its record.
            return Ok(());
        }
        Ok(self.dataplane.attachments().put(attachment.id, &self.record(attachment))?)
    }

    /// Waits until a number is free: packets of an attachment that has just ended may still be counted for
    /// its number. As numbers are assigned in ascending order, the sweep has usually freed it long before,
    /// unless there was no other number or the agent has just started.
    fn await_free(&self, id: u32) -> Result<(), EnforceError> {
        while let Some(since) = self.dataplane.attachments().resting_since(id) {
            match unread_since(&self.kernel(), Instant::now()).filter(|unread| since <= *unread) {
                Some(unread) => self.free_numbers(unread)?,
                None => thread::sleep(PAUSE),
            }
        }
        Ok(())
    }

    /// Frees the numbers of attachments that ended before `unread`.
    fn free_numbers(&self, unread: Instant) -> Result<(), EnforceError> {
        Ok(crate::upkeep(|| self.dataplane.free_numbers(unread))?)
    }

    /// The record of an attachment, in the dataplane's format.
    pub(super) fn record(&self, attachment: &EnforcedAttachment) -> bpf::Attachment {
        self.defaults.applied_to(&attachment.attachment, attachment.bandwidth())
    }

    /// Sets the pace of a device, if there is one and the kernel supports it.
    pub(super) fn ensure_paced(
        &self,
        index: u32,
        pace: Option<Pace>,
        handle: &mut Handle,
    ) -> Result<(), EnforceError> {
        match pace.filter(|_| self.defaults.paced) {
            Some(pace) => Ok(handle.ensure_paced(index, &pace)?),
            None => Ok(()),
        }
    }

    /// Writes an attachment's record, once its number is free, and sets the pace of its link.
    fn prepare(
        &self,
        attachment: &EnforcedAttachment,
        host: &mut Handle,
        pod: &mut Handle,
    ) -> Result<(), EnforceError> {
        self.await_free(attachment.id)?;
        self.put_record(attachment)?;
        self.ensure_paced(attachment.host_index(), attachment.host_pace(), host)?;
        self.ensure_paced(attachment.pod_index, attachment.pod_pace(), pod)
    }

    /// Binds the device of an attachment that has its record and its policy: from this point on packets
    /// find them.
    fn bind(&self, attachment: &EnforcedAttachment, host: &mut Handle) -> Result<(), EnforceError> {
        self.routed.guard(attachment, &self.options.restrictions, host)?;
        match attachment.point {
            HookPoint::NodeEnd(device) => self.programs.bind(attachment, device),
            _ => Ok(()),
        }
    }

    /// Called after the programs on the node's ends and the parents were attached: attaches the programs of
    /// the other attachments, and admits attachments to the fast path.
    fn begin(&self, attachment: &EnforcedAttachment, host: &mut Handle) -> Result<(), EnforceError> {
        let is_at_node_end = matches!(attachment.point, HookPoint::NodeEnd(_));
        // A delegated attachment is never on the fast path, and its device is no uplink.
        if is_at_node_end && (attachment.is_delegated() || attachment.when != EnforceWhen::Selected) {
            self.fast.admit(attachment.member());
        }
        match attachment.point {
            HookPoint::Parent { .. } => Ok(()),
            _ if attachment.when == EnforceWhen::Selected => self.begin_if_due(attachment.id).map(drop),
            _ if is_at_node_end => Ok(()),
            _ if self.may_begin_by_filters(attachment) => {
                self.programs.attach_by_filters(attachment, host)?;
                self.lock().note_filters(attachment.id);
                Ok(())
            }
            _ => self.programs.attach(attachment, host),
        }
    }

    fn may_begin_by_filters(&self, attachment: &EnforcedAttachment) -> bool {
        let objects = self.source.snapshot();
        let pod = attachment.pod.as_ref().and_then(|pod| objects.pods.get(&pod.name));
        self.programs.may_begin_by_filters(attachment, pod.map(AsRef::as_ref))
    }

    /// Defers an attachment until a policy selects it, which may already be the case.
    pub(super) fn defer(&self, attachment: &EnforcedAttachment) -> Result<(), EnforceError> {
        self.lock().deferred_mut().wait(attachment);
        self.begin_if_due(attachment.id).map(drop)
    }

    /// Attaches the programs of deferred attachments that are selected now.
    ///
    /// # Errors
    /// The first failure; the others run. The next sweep retries.
    fn begin_due(&self) -> Result<(), EnforceError> {
        let due = {
            let state = self.lock();
            state.deferred().all_due(state.maps())
        };
        let began: Vec<_> = due.into_iter().map(|id| self.begin_if_due(id).map(drop)).collect();
        began.into_iter().collect()
    }

    /// Attaches the programs of an attachment that is deferred and due; returns whether it did.
    pub(super) fn begin_if_due(&self, id: u32) -> Result<bool, EnforceError> {
        let _turn = self.programs.take_turn();
        let due = {
            let state = self.lock();
            state.deferred().due(id, state.maps()).cloned()
        };
        // The attachment may have ended, and its number may have been reassigned.
        let Some(attachment) = due else { return Ok(false) };
        match self.programs.attach(&attachment, &mut Handle::open()?) {
            // Its pod is terminating, or has deleted the device.
            Err(error) if error.is_device_gone() => return Ok(false),
            other => other?,
        }
        self.lock().deferred_mut().remove(id);
        tracing::info!(attachment = attachment.label, "a policy selects the attachment: programs attached");
        Ok(true)
    }
}

impl Enforce for Enforcer {
    /// Writes records and policies, binds the devices, and attaches the programs last. A policy that does not fit is
    /// not an error: the attachment is isolated completely and a condition reports it.
    fn attach(
        &self,
        attachments: &[EnforcedAttachment],
        host: &mut Handle,
        pod: &mut Handle,
    ) -> Result<(), AttachFailed> {
        let failed = |at| move |source| AttachFailed { at, source: Box::new(source) };
        for (at, attachment) in attachments.iter().enumerate() {
            self.prepare(attachment, host, pod).map_err(failed(at))?;
        }
        let entered = self.lock().enter(attachments, self.sources(), &self.kernel());
        entered.map_err(|(at, source)| failed(at)(*source))?;
        for (at, attachment) in attachments.iter().enumerate() {
            self.bind(attachment, host).map_err(failed(at))?;
        }
        self.programs.attach_all(attachments, host, pod)?;
        for (at, attachment) in attachments.iter().enumerate() {
            self.begin(attachment, host).map_err(failed(at))?;
            if let Some(past_programs) = offloaded(attachment) {
                self.lock().note_shortfall(attachment, Some(past_programs));
            }
        }
        Ok(())
    }

    /// Removes an attachment whose links are gone. Its flows are removed first, while the record still identifies
    /// them: the next attachment with the same addresses must not find them. The flows of a shared address stay as
    /// long as other attachments have the address.
    fn detach(&self, id: u32) -> Result<(), EnforceError> {
        self.fast.forget(id)?;
        self.routed.forget(id)?;
        let gone = self.dataplane.attachments().leave(id)?;
        self.purge_former()?;
        self.flows.purge(gone.iter().copied())?;
        let nothing_in_pod = self.lock().end(id);
        if !nothing_in_pod {
            self.programs.detach_in_pod(id)?;
        }
        self.programs.detach(id)?;
        self.lock().leave(id, self.sources(), &self.kernel())?;
        self.purge_departed(gone)
    }

    fn leave_device(&self, id: u32) -> Result<(), EnforceError> {
        // The programs of an attachment that has ended are not reattached.
        self.lock().end(id);
        self.programs.detach_in_pod(id)?;
        self.programs.leave_node_end(id)
    }

    fn retire(&self, id: u32) -> Result<(), EnforceError> {
        Ok(self.fast.retire(id)?)
    }

    fn adopt(&self, attachments: &[EnforcedAttachment], all: bool) -> Vec<EnforceError> {
        self.take_over(attachments, all)
    }

    fn drop_groups(&self, host_link: u32, host: &mut Handle) -> Result<(), EnforceError> {
        self.programs.drop_groups(host_link, host)
    }

    fn mac(&self, id: u32) -> Option<Mac> {
        self.dataplane.attachments().mac(id)
    }

    fn follow(&self, attachment: &EnforcedAttachment) -> Result<bool, EnforceError> {
        if attachment.inherits().is_none() || attachment.point.is_nowhere() {
            return Ok(false);
        }
        let (id, attachments) = (attachment.id, self.dataplane.attachments());
        // An attachment ends under this lock before its record is removed, so that no removed record comes back.
        let state = self.lock();
        if !state.roster().is_current(attachment) || attachments.mac(id) == Some(attachment.attachment.mac) {
            return Ok(false);
        }
        let former = attachments.link_local(id);
        let written = attachments.put(id, &self.record(attachment));
        self.note_former(former);
        written?;
        tracing::debug!(
            attachment = attachment.label, mac = %attachment.attachment.mac,
            "the parent of the attachment has another Ethernet address, which is now the pod's"
        );
        Ok(true)
    }

    fn recorded(&self) -> Vec<u32> {
        self.dataplane.attachments().records().into_keys().collect()
    }

    fn verify(
        &self,
        attachment: &EnforcedAttachment,
        host: &mut Handle,
    ) -> Result<Option<String>, EnforceError> {
        self.difference(attachment, &mut WholeParents::default(), host)
    }

    fn verify_among_others(
        &self,
        attachment: &EnforcedAttachment,
        known: &mut WholeParents,
        host: &mut Handle,
    ) -> Result<Option<String>, EnforceError> {
        self.difference(attachment, known, host)
    }

    fn restore(&self, attachment: &EnforcedAttachment, host: &mut Handle) -> Result<bool, EnforceError> {
        self.put_programs_back(attachment, host)
    }

    fn settle(&self, attachment: &EnforcedAttachment) -> Result<(), EnforceError> {
        self.exchange_filters(attachment)
    }

    fn look_into_pod(&self, attachment: &EnforcedAttachment, pod: &mut Handle) -> Result<(), EnforceError> {
        self.note_mode(attachment, pod)
    }

    fn note_ifb(&self, attachments: &[u32], has_one: bool) -> bool {
        let mut state = self.lock();
        let mut is_past = false;
        for id in attachments {
            is_past |= state.note_ifb(*id, has_one);
        }
        is_past
    }

    fn verify_shared(&self) -> Result<Option<String>, EnforceError> {
        Ok(self.dataplane.missing_pin()?.map(|path| format!("pin {} is gone", path.display())))
    }

    fn permit_on_device(
        &self,
        pod: Option<&PodRef>,
        attachment: &AttachmentPlan,
        enforced: &EnforcedAttachment,
    ) -> Result<(), Unenforceable> {
        let Some(past_programs) = offloaded(enforced) else { return Ok(()) };
        let required = admission::requirement(&self.source.snapshot(), attachment, self.requirement)?;
        admission::permit(past_programs, required, self.selecting(pod, attachment))
    }

    fn permit(
        &self,
        pod: Option<&PodRef>,
        attachment: &AttachmentPlan,
        vantage: Option<&HookKind>,
    ) -> Result<(), Unenforceable> {
        let required = admission::requirement(&self.source.snapshot(), attachment, self.requirement)?;
        match vantage {
            Some(hook) => {
                let vantage = Vantage { hook, behind_card: is_behind_card(attachment) };
                let enforcement = self.enforcement(None, pod, vantage);
                admission::permit(enforcement, required, self.selecting(pod, attachment))
            }
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Enforcer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Enforcer").field("options", &self.options).finish_non_exhaustive()
    }
}
