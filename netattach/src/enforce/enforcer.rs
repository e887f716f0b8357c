//! Keeps the kernel's policies equal to what the manifests say, and attachments under them from their first packet.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::Enforce;
use super::admission::{self, Demand, Unenforceable};
use super::attachment::Guarded;
use super::deferred::Turn;
use super::error::EnforceError;
use super::node_defaults::Passage;
use super::policies::{Behind, Change};
use super::routed::Routed;
use crate::bpf::{self, Dataplane, FlowTable, PolicyIds};
use crate::fast_path::FastPaths;
use crate::hooks::parent::Parents;
use crate::hooks::{AttachMode, AttachModes, HookPoint, node_end};
use crate::netlink::Handle;
use crate::netns::Netns;
use crate::plan::{AttachmentPlan, PodRef};
use crate::policy::desired::{Condition, Desired};
use crate::policy::diff::{DENY_ALL, PolicyId, Programmed};
use crate::policy::incremental::Compiler;
use crate::policy::index::Endpoint;
use crate::policy::options::Options;
use crate::report::Chain;
use crate::source::Source;
use crate::spec::Pace;
use crate::step::{Vantage, When};

/// The dataplane, the policies in it, and the attachments under them.
pub struct Enforcer {
    pub(super) dataplane: Dataplane,
    pub(super) flows: FlowTable,
    pub(super) source: Arc<dyn Source>,
    pub(super) options: Options,
    pub(super) passage: Passage,
    pub(super) fast: Arc<FastPaths>,
    pub(super) routed: Routed,
    pub(super) parents: Parents,
    pub(super) modes: AttachModes,
    /// Whether programs can tell from which namespace's socket a frame came.
    pub(super) knows_senders: bool,
    pub(super) turn: Turn,
    pub(super) demand: Demand,
    /// How often programs were put back.
    pub(super) put_back: AtomicU64,
    state: Mutex<State>,
    /// See [`keep_hooks_on`].
    _hooks_on: Option<Netns>,
}

/// What is meant to be in the maps, and what is.
#[derive(Default)]
pub(super) struct State {
    pub(super) endpoints: BTreeMap<u32, Endpoint>,
    /// Where programs of attachments run.
    pub(super) points: BTreeMap<u32, Point>,
    /// Attachments whose programs run once a policy selects them.
    pub(super) waiting: BTreeMap<u32, Guarded>,
    pub(super) compiler: Compiler,
    pub(super) programmed: Programmed,
    pub(super) desired: Desired,
    pub(super) over_capacity: Vec<Condition>,
    /// What the last change has left.
    pub(super) behind: Behind,
    /// There are attachments in the maps that nobody knows: policies that only they refer to are not to be removed.
    pub(super) strangers: bool,
    pub(super) last_change: Option<Change>,
    /// Policies that nothing refers to, and since when.
    pub(super) unreferenced: BTreeMap<PolicyId, Instant>,
}

/// Where programs of an attachment run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Point {
    pub(super) point: HookPoint,
    /// Whether another plugin made its interface.
    pub(super) delegated: bool,
}

impl Point {
    pub(super) fn of(guarded: &Guarded) -> Self {
        Self { point: guarded.point.clone(), delegated: guarded.is_delegated() }
    }
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
        let last_id = dataplane.policies().allocate()?;
        let state = State { programmed: Programmed { last_id, ..Programmed::default() }, ..State::default() };
        let passage = Passage { paced: Handle::open()?.has_pacing()?, ..passage };
        if !passage.paced {
            tracing::warn!("the kernel has no tbf: what exceeds a bandwidth is dropped and never delayed");
        }
        let hooks_on = keep_hooks_on(&dataplane);
        if let Err(error) = &hooks_on {
            tracing::debug!(error = %Chain(error), "the first attachment will switch the kernel's hooks on");
        }
        let fast = Arc::new(FastPaths::new(passage.fast_path, passage.xdp, modes.others, &dataplane)?);
        let flows = dataplane.flows()?;
        let routed = Routed::begin(dataplane.routed()?, options.network_policy, dataplane.is_new())?;
        Ok(Self {
            dataplane,
            flows,
            fast,
            _hooks_on: hooks_on.ok(),
            source,
            options,
            passage,
            routed,
            parents: Parents::new(modes.attachments, passage.strangers),
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
            state.points.insert(guarded.id, Point::of(guarded));
            if guarded.when == When::Selected && !guarded.point.is_nowhere() {
                state.waiting.insert(guarded.id, guarded.clone());
            }
            if let Some(endpoint) = &guarded.endpoint {
                state.endpoints.insert(guarded.id, endpoint.clone());
                self.bring_up_to_date(&mut state)?;
                if !state.programmed.endpoints.contains_key(&guarded.id) {
                    // Its pod vanished from the source meanwhile: nobody can say what selects it.
                    self.assign(&mut state, guarded.id, PolicyIds { ingress: DENY_ALL, egress: DENY_ALL })?;
                }
            }
        }
        self.routed.guard(guarded, host)?;
        if let HookPoint::Parent { on, macvlan } = &guarded.point {
            return Ok(self.parents.attach(&self.dataplane, guarded.id, on, macvlan, host, pod)?);
        }
        if let HookPoint::NodeEnd(index) = &guarded.point {
            self.dataplane.attachments().bind(*index, guarded.id)?;
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
        if guarded.point.is_nowhere() {
            // Policies of others name its addresses; no packet is ever asked about.
            return Ok(());
        }
        Ok(self.dataplane.attachments().put(guarded.id, &self.applied(guarded))?)
    }

    /// The attachment as the dataplane gets it.
    pub(super) fn applied(&self, guarded: &Guarded) -> bpf::Attachment {
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
        self.routed.forget(id)?;
        self.flows.purge(self.dataplane.attachments().hosts(id)?)?;
        // A link whose device is still there would judge packets of nobody, and drop them.
        self.end(id)?;
        self.unlink_node_ends(&self.dataplane.attachments().devices_of(id))?;
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

    /// Removes entries that nothing has referred to for long enough, and goes on with what the last change has left: policies for
    /// which there is room now, and what failed.
    ///
    /// # Errors
    /// A map could not be written.
    pub fn sweep(&self) -> Result<(), EnforceError> {
        let is_clean = self.lock().unreferenced.is_empty();
        let unread = if is_clean { None } else { self.unread(Instant::now()) };
        {
            let mut state = self.lock();
            let more_room = self.take_out(&mut state, unread)?;
            if !state.behind.is_due(more_room) {
                return Ok(());
            }
            let change = self.bring_up_to_date(&mut state)?;
            if change.attachments > 0 {
                state.last_change = Some(change);
            }
        }
        self.begin_due()
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
        if !whole {
            return Ok(false);
        }
        let (isolated, strangers) = {
            let state = self.lock();
            let assigned = state.programmed.endpoints.iter();
            let isolated = assigned.filter(|(_, assigned)| **assigned != PolicyIds::default());
            (isolated.map(|(id, _)| *id).collect::<Vec<u32>>(), state.strangers)
        };
        if isolated.is_empty() && !strangers {
            self.flows.nothing_isolated();
        }
        let mut live = self.flows.census().unwrap_or_default().by_attachment;
        for id in isolated {
            live.entry(id).or_default();
        }
        self.flows.set_places(self.dataplane.attachments().share_out(live)?);
        Ok(true)
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
    node_end::on(loopback.index).attach(AttachMode::Clsact, dataplane.programs(), &mut handle)?;
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
        self.dataplane.attachments().records().into_keys().collect()
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
        let asked = admission::demand(&self.source.snapshot(), attachment, self.demand)?;
        match vantage {
            Some(vantage) => {
                let enforcement = self.enforcement(pod, vantage);
                admission::permit(enforcement, asked, self.selecting(pod, attachment))
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
