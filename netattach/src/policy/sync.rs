//! Keeps the kernel's policies equal to what the manifests say, and attachments under them from their first packet.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::compile::{Condition, Desired, Options};
use super::compiled::RuleFlows;
use super::compiler::Compiler;
use super::delegated::Turn;
use super::diff::{Assignment, PolicyId, Programmed};
use super::dump::{Dump, dump};
use super::explain::{Path, Question, View, explain};
use super::guarded::{Guarded, Whereabouts};
use super::hooks::{self, AttachModes};
use super::index::Endpoint;
use super::level::Level;
use super::model::PolicyName;
use super::parents::Parents;
use super::passage::Passage;
use super::programming::Change;
use super::unenforced::{self, Demand, Unenforceable};
use crate::attach::Enforce;
use crate::bpf::{self, BpfError, Dataplane, Device, FlowTable, Records};
use crate::fast::{FastPaths, KeepError};
use crate::link::spec::Pace;
use crate::netlink::{self, Handle};
use crate::netns::{Netns, NetnsError};
use crate::plan::{AttachmentPlan, PodRef, Vantage, When};
use crate::report::Chain;
use crate::source::Source;

/// A policy number without entries, so that it allows nothing: what an isolated attachment is under when its own
/// policy does not fit into the maps.
pub(super) const DENY_ALL: PolicyId = PolicyId::MAX;

/// Why an attachment could not be put under its policies.
#[derive(Debug, thiserror::Error)]
pub enum EnforceError {
    /// A map or a program.
    #[error("dataplane")]
    Bpf(#[from] BpfError),
    /// The fast path.
    #[error("fast path")]
    Fast(#[from] KeepError),
    /// A filter.
    #[error("attach programs")]
    Netlink(#[from] netlink::Error),
    /// A namespace.
    #[error(transparent)]
    Netns(#[from] NetnsError),
    /// No netlink socket.
    #[error(transparent)]
    Open(#[from] netlink::OpenError),
    /// The interface in the pod has no Ethernet address to verify.
    #[error("interface {0} has no Ethernet address")]
    NoMac(String),
    /// Nothing on the node sees what the interface sends and receives.
    #[error("interface {0} has no end and no parent on the node")]
    NoDevice(String),
    /// A filter has no room for the attachment's number.
    #[error("attachment number {0} is more than a filter can hold")]
    NoClass(u32),
    /// The namespace that the interface is in is another one by now, or none.
    #[error("the pod's network namespace is gone")]
    PodGone,
}

impl EnforceError {
    /// Whether that is because the interface has gone meanwhile.
    pub(super) fn is_of_a_device_that_is_gone(&self) -> bool {
        match self {
            Self::PodGone => true,
            Self::Netlink(error) => error.not_found(),
            Self::Bpf(error) => error.is_of_a_device_that_is_gone(),
            _ => false,
        }
    }
}

/// One row of a report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InForce {
    /// Number of the attachment.
    pub id: u32,
    /// Policy number for what comes in; `None`: not isolated.
    pub ingress: Option<PolicyId>,
    /// Policy number for what goes out; `None`: not isolated.
    pub egress: Option<PolicyId>,
    /// The policies that select it.
    pub policies: Vec<PolicyName>,
}

/// The dataplane, the policies in it, and the attachments under them.
pub struct Enforcer {
    pub(super) dataplane: Dataplane,
    pub(super) flows: FlowTable,
    pub(super) source: Arc<dyn Source>,
    pub(super) options: Options,
    pub(super) passage: Passage,
    pub(super) fast: Arc<FastPaths>,
    pub(super) parents: Parents,
    pub(super) modes: AttachModes,
    /// Whether programs can tell from which namespace's socket a frame came.
    pub(super) knows_senders: bool,
    pub(super) turn: Turn,
    demand: Demand,
    put_back: AtomicU64,
    state: Mutex<State>,
    /// See [`keep_hooks_on`].
    _hooks_on: Option<Netns>,
}

/// What is meant to be in the maps, and what is.
#[derive(Default)]
pub(super) struct State {
    pub(super) endpoints: BTreeMap<u32, Endpoint>,
    /// Where the frames of attachments are seen.
    pub(super) whereabouts: BTreeMap<u32, Whereabouts>,
    /// Attachments whose programs run once a policy selects them.
    pub(super) waiting: BTreeMap<u32, Guarded>,
    pub(super) compiler: Compiler,
    pub(super) programmed: Programmed,
    pub(super) desired: Desired,
    pub(super) over_capacity: Vec<Condition>,
    /// There are attachments in the maps that nobody knows: policies that only they refer to are not to be removed.
    pub(super) strangers: bool,
    pub(super) last_change: Option<Change>,
    /// Policies that nothing refers to, and since when.
    pub(super) unreferenced: BTreeMap<PolicyId, Instant>,
}

impl Enforcer {
    /// Takes over a dataplane, whatever an earlier agent left in it.
    ///
    /// # Errors
    /// The dataplane cannot be read.
    pub fn new(
        dataplane: Dataplane,
        source: Arc<dyn Source>,
        options: Options,
        passage: Passage,
        modes: AttachModes,
        demand: Demand,
    ) -> Result<Self, EnforceError> {
        let last_id = dataplane.allocate_policy_id()?;
        let state = State { programmed: Programmed { last_id, ..Programmed::default() }, ..State::default() };
        let passage = Passage { paced: Handle::open()?.has_pacing()?, ..passage };
        if !passage.paced {
            tracing::warn!("the kernel has no tbf: what exceeds a bandwidth is dropped and never delayed");
        }
        let hooks_on = keep_hooks_on(&dataplane);
        if let Err(error) = &hooks_on {
            tracing::debug!(error = %Chain(error), "the first attachment will switch the kernel's hooks on");
        }
        let fast =
            Arc::new(FastPaths::new(passage.fast_path, passage.xdp, modes.others, dataplane.fast_path()?));
        let flows = dataplane.flows()?;
        Ok(Self {
            dataplane,
            flows,
            fast,
            _hooks_on: hooks_on.ok(),
            source,
            options,
            passage,
            parents: Parents::new(modes.others, passage.strangers),
            modes,
            knows_senders: bpf::probe::has_netns_cookie(),
            turn: Turn::default(),
            demand,
            put_back: AtomicU64::default(),
            state: Mutex::new(state),
        })
    }

    /// Puts a new attachment under its policies: record, policy, device, and last the programs. The pod's end of
    /// the link is still down, so its first packet is judged.
    ///
    /// # Errors
    /// A write failed: the attachment must not come up. A policy that does not fit is not an error: the
    /// attachment is isolated completely and a condition says so.
    pub fn attach(&self, guarded: &Guarded, host: &mut Handle, pod: &mut Handle) -> Result<(), EnforceError> {
        self.put(guarded)?;
        self.ensure_paced(guarded.host_index(), guarded.host_pace(), host)?;
        self.ensure_paced(guarded.pod_index, guarded.pod_pace(), pod)?;
        {
            let mut state = self.lock();
            state.programmed.endpoints.remove(&guarded.id);
            state.whereabouts.insert(guarded.id, guarded.whereabouts());
            if guarded.when == When::Selected && guarded.device != Device::Nowhere {
                state.waiting.insert(guarded.id, guarded.clone());
            }
            if let Some(endpoint) = &guarded.endpoint {
                state.endpoints.insert(guarded.id, endpoint.clone());
                self.bring_up_to_date(&mut state)?;
                if !state.programmed.endpoints.contains_key(&guarded.id) {
                    // Its pod vanished from the source meanwhile: nobody can say what selects it.
                    self.assign(&mut state, guarded.id, Assignment { ingress: DENY_ALL, egress: DENY_ALL })?;
                }
            }
        }
        if let (Device::Parent(on), Some(macvlan)) = (&guarded.device, &guarded.in_pod) {
            return self.parents.attach(&self.dataplane, guarded.id, on, macvlan, host, pod);
        }
        if let Device::Own(index) = &guarded.device {
            self.dataplane.bind_link(*index, guarded.id)?;
            if guarded.is_delegated() {
                // Never on the fast path, and no uplink either, whatever comes by its device.
                self.fast.admit(guarded.member());
            }
        }
        if guarded.when == When::Selected {
            return self.begin_if_due(guarded.id).map(drop);
        }
        self.run(guarded, host)?;
        if !guarded.is_delegated() {
            self.fast.admit(guarded.member());
        }
        Ok(())
    }

    /// The attachments of the fast path.
    pub fn fast_paths(&self) -> &Arc<FastPaths> {
        &self.fast
    }

    pub(super) fn put(&self, guarded: &Guarded) -> Result<(), EnforceError> {
        if guarded.device == Device::Nowhere {
            // Policies of others name its addresses; no packet is ever asked about.
            return Ok(());
        }
        Ok(self.dataplane.put_attachment(guarded.id, &self.applied(guarded))?)
    }

    /// The attachment as the dataplane gets it.
    fn applied(&self, guarded: &Guarded) -> bpf::Attachment {
        self.passage.applied_to(&guarded.attachment, guarded.limited.as_ref())
    }

    /// A device sends at a pace, where there is one and the kernel can.
    pub(super) fn ensure_paced(
        &self,
        index: u32,
        pace: Option<Pace>,
        handle: &mut Handle,
    ) -> Result<(), EnforceError> {
        match pace.filter(|_| self.passage.paced) {
            Some(pace) => Ok(handle.ensure_paced(index, &pace)?),
            None => Ok(()),
        }
    }

    /// Forgets an attachment whose links are gone, and its flows: the next that has its addresses must not find them.
    /// Idempotent: the flows go first, while the record says whose they are.
    ///
    /// # Errors
    /// A map could not be written.
    pub fn detach(&self, id: u32) -> Result<(), EnforceError> {
        self.fast.forget(id)?;
        self.flows.purge(self.dataplane.hosts(id)?)?;
        // A link whose device is still there would judge packets of nobody, and drop them.
        self.end(id)?;
        for device in self.dataplane.devices_of(id) {
            self.dataplane.remove_links(device)?;
        }
        self.parents.detach(&self.dataplane, id)?;
        let mut state = self.lock();
        state.programmed.endpoints.remove(&id);
        if state.endpoints.remove(&id).is_some() {
            self.bring_up_to_date(&mut state)?;
        }
        Ok(())
    }

    /// Brings all attachments under what the manifests say now.
    ///
    /// # Errors
    /// A write failed. What was in force before stays so where that is.
    pub fn sync(&self) -> Result<(), EnforceError> {
        {
            let mut state = self.lock();
            let change = self.bring_up_to_date(&mut state)?;
            if change.attachments > 0 {
                state.last_change = Some(Change { read: self.source.reading(), ..change });
            }
        }
        self.begin_due()?;
        self.sweep()
    }

    /// Removes entries that nothing has referred to for long enough.
    ///
    /// # Errors
    /// A map could not be written.
    pub fn sweep(&self) -> Result<(), EnforceError> {
        if self.lock().unreferenced.is_empty() {
            return Ok(());
        }
        let unread = self.unread(Instant::now());
        Ok(self.take_out(&mut self.lock(), unread)?)
    }

    /// What is missing of an attachment's enforcement, in words.
    ///
    /// # Errors
    /// A map or the device's filters could not be read.
    pub fn verify(&self, guarded: &Guarded, host: &mut Handle) -> Result<Option<String>, EnforceError> {
        let Guarded { id, device, .. } = guarded;
        if *device == Device::Nowhere {
            return Ok(None);
        }
        if let Some(difference) = self.dataplane.difference(*id, device, &self.applied(guarded))? {
            return Ok(Some(difference));
        }
        {
            let state = self.lock();
            let ids = self.dataplane.policy(*id)?;
            let found = Assignment { ingress: ids.ingress, egress: ids.egress };
            let wanted = state.programmed.endpoints.get(id).copied().unwrap_or_default();
            if found != wanted {
                return Ok(Some(format!("attachment {id} is under other policies in the dataplane")));
            }
        }
        if let Some(on) = guarded.on_parent() {
            return self.parents.missing(&self.dataplane, on.parent, host);
        }
        let index = device.index();
        if let Some(missing) = self.missing(guarded, host)? {
            return Ok(Some(missing));
        }
        if let Some(pace) = guarded.host_pace().filter(|_| self.passage.paced)
            && host.find_pace(index)? != Some((pace.rate, pace.queue))
        {
            return Ok(Some(format!("device {index} does not send at the attachment's rate")));
        }
        Ok(None)
    }

    /// Puts the programs back where somebody has taken them off an attachment's device, and says whether it did.
    ///
    /// # Errors
    /// The device's filters could not be read, or the kernel refused a program.
    pub fn restore(&self, guarded: &Guarded, host: &mut Handle) -> Result<bool, EnforceError> {
        let device = guarded.host_index();
        if guarded.on_parent().is_some() {
            if !self.parents.restore(&self.dataplane, guarded.id, host)? {
                return Ok(false);
            }
        } else if self.is_waiting(guarded.id) {
            return self.begin_if_due(guarded.id);
        } else if !self.run_again(guarded, host)? {
            return Ok(false);
        }
        self.put_back.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(device, attachment = guarded.id, "somebody took programs off a device; put back");
        Ok(true)
    }

    /// How often programs were put back since the agent's start.
    pub fn put_back(&self) -> u64 {
        self.put_back.load(Ordering::Relaxed)
    }

    /// What is missing of what all attachments share, in words.
    ///
    /// # Errors
    /// The pins cannot be looked at.
    pub fn verify_shared(&self) -> Result<Option<String>, EnforceError> {
        Ok(self.dataplane.missing_pin()?.map(|path| format!("pin {} is gone", path.display())))
    }

    /// Counters of an attachment.
    ///
    /// # Errors
    /// The map could not be read.
    pub fn stats(&self, id: u32) -> Result<bpf::Stats, EnforceError> {
        Ok(self.dataplane.stats(id)?)
    }

    /// What the programs tell about packets.
    ///
    /// # Errors
    /// The map could not be opened.
    pub fn records(&self) -> Result<Records, EnforceError> {
        Ok(self.dataplane.records()?)
    }

    /// The flow table.
    pub fn flows(&self) -> &FlowTable {
        &self.flows
    }

    /// Goes on with the pass over the flow table, where there can be flows. `true` when it is at its end.
    ///
    /// # Errors
    /// The table could not be read or written.
    pub fn collect_flows(&self) -> Result<bool, EnforceError> {
        if !self.flows.may_hold_flows() {
            return Ok(true);
        }
        let whole = self.flows.collect()?;
        let state = self.lock();
        let isolated = state.programmed.endpoints.values().any(|assigned| *assigned != Assignment::default());
        if whole && !isolated && !state.strangers {
            self.flows.nothing_isolated();
        }
        Ok(whole)
    }

    /// How many flows each rule in force has allowed.
    ///
    /// # Errors
    /// The map could not be read.
    pub fn rule_flows(&self) -> Result<Vec<RuleFlows>, EnforceError> {
        let policies = self.lock().programmed.policies.clone();
        let counted = self.dataplane.rule_flows()?;
        let mut rows = Vec::new();
        for (policy, compiled) in policies {
            let flows_of =
                |rule| counted.get(&policy).and_then(|rules| rules.get(rule)).copied().unwrap_or(0);
            rows.extend(compiled.rules.iter().map(|(rule, text)| RuleFlows {
                policy,
                rule: *rule,
                text: text.to_string(),
                flows: flows_of(rule),
            }));
        }
        Ok(rows)
    }

    /// How programs are attached.
    pub fn attach_modes(&self) -> AttachModes {
        self.modes
    }

    /// What is in force.
    pub fn in_force(&self) -> Vec<InForce> {
        let state = self.lock();
        let some = |id: PolicyId| Some(id).filter(|id| *id != 0);
        let row = |(id, assignment): (&u32, &Assignment)| InForce {
            id: *id,
            ingress: some(assignment.ingress),
            egress: some(assignment.egress),
            policies: state
                .desired
                .endpoints
                .get(id)
                .map(|policy| policy.policies.clone())
                .unwrap_or_default(),
        };
        state.programmed.endpoints.iter().map(row).collect()
    }

    /// What the last change took that made a difference to any attachment; `None` before the first.
    pub fn last_change(&self) -> Option<Change> {
        self.lock().last_change
    }

    /// The policies that select an attachment.
    pub fn selecting(&self, pod: Option<&PodRef>, attachment: &AttachmentPlan) -> Vec<PolicyName> {
        unenforced::selected(&self.source.snapshot(), self.options.network_policy, pod, attachment)
    }

    /// The lowest level that is accepted where a policy selects an attachment.
    pub fn least(&self, attachment: &AttachmentPlan) -> Level {
        let demand = unenforced::demand(&self.source.snapshot(), attachment, self.demand);
        // A word that there is not has failed the ADD, or was written since.
        demand.map_or(Level::None, |(demand, _)| demand.least())
    }

    /// What authors of policies should know.
    pub fn conditions(&self) -> Vec<Condition> {
        let state = self.lock();
        state.desired.conditions.iter().chain(&state.over_capacity).cloned().collect()
    }

    /// Why traffic passes or does not.
    pub fn explain(&self, question: &Question) -> Vec<Path> {
        let state = self.lock();
        let endpoints: Vec<Endpoint> = state.endpoints.values().cloned().collect();
        let objects = self.source.snapshot();
        let limited = self.limited(&objects, &state).into_iter().collect();
        let view = View {
            objects: &objects,
            limited: &limited,
            endpoints: &endpoints,
            programmed: &state.programmed,
            desired: &state.desired,
            passage: self.passage,
        };
        explain(&view, question)
    }

    /// Compiled policies as they are in the maps; see [`dump`].
    pub fn dump(&self, wanted: Option<&str>) -> Vec<Dump> {
        dump(&self.lock().programmed, wanted)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // A panic between two writes leaves a state that the next comparison repairs.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs the programs on the loopback of a namespace that nobody uses.
///
/// The kernel leaves its traffic control hooks out of the packet path until the first program is attached, and
/// takes them out again after the last: by patching its own code on all processors, in the middle of an ADD or a
/// DEL. With one pair of programs always there, no pod pays for that.
fn keep_hooks_on(dataplane: &Dataplane) -> Result<Netns, EnforceError> {
    let netns = Netns::private()?;
    let mut handle = Handle::open_in(&netns)?;
    let loopback = handle.link("lo")?;
    handle.ensure_programs(loopback.index, &hooks::programs(dataplane))?;
    Ok(netns)
}

impl Enforce for Enforcer {
    fn attach(&self, guarded: &Guarded, host: &mut Handle, pod: &mut Handle) -> Result<(), EnforceError> {
        Self::attach(self, guarded, host, pod)
    }

    fn detach(&self, id: u32) -> Result<(), EnforceError> {
        Self::detach(self, id)
    }

    fn retire(&self, id: u32) -> Result<(), EnforceError> {
        Ok(self.fast.retire(id)?)
    }

    fn adopt(&self, attachments: &[Guarded], all: bool) -> Vec<EnforceError> {
        Self::adopt(self, attachments, all)
    }

    fn recorded(&self) -> Vec<u32> {
        self.dataplane.attachments_dump().into_keys().collect()
    }

    fn verify(&self, guarded: &Guarded, host: &mut Handle) -> Result<Option<String>, EnforceError> {
        Self::verify(self, guarded, host)
    }

    fn restore(&self, guarded: &Guarded, host: &mut Handle) -> Result<bool, EnforceError> {
        Self::restore(self, guarded, host)
    }

    fn verify_shared(&self) -> Result<Option<String>, EnforceError> {
        Self::verify_shared(self)
    }

    fn permit(
        &self,
        pod: Option<&PodRef>,
        attachment: &AttachmentPlan,
        vantage: Option<&Vantage>,
    ) -> Result<(), Unenforceable> {
        let asked = unenforced::demand(&self.source.snapshot(), attachment, self.demand)?;
        match vantage {
            Some(vantage) => {
                let enforcement = self.enforcement(pod, vantage);
                unenforced::permit(enforcement, asked, self.selecting(pod, attachment))
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
