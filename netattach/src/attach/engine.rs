//! One function per CNI verb.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::addresses::announce_late::Unannounced;
use super::addresses::holder::AddressError;
use super::apply::{LinkError, apply};
use super::check::{check, differences_in_pod};
use super::device::DeviceError;
use super::reconcile::departed::Recognised;
use super::reconcile::drift::UnreadLeases;
use super::reconcile::enforcement;
use super::reconcile::parents::Parents;
use super::registry::{Attached, Reservation};
use super::undo::{release_addresses, undo, undo_but_addresses};
use super::{AttachError, Doing, Holder, Inheritance, Node, Registry, RepeatedAdd, StepError, facts};
use serde_json::Value;

use crate::cni;
use crate::error_chain::Chain;
use crate::ipam::Pool;
use crate::journal::{JournalError, JournalKey, Loaded, NotedPool, Record, RecordState, Store};
use crate::moment::Moment;
use crate::nat::NatError;
use crate::netlink::Handle;
use crate::netns::{Netns, NetnsError, NetnsId};
use crate::plan::pools::settle;
use crate::plan::resolve::{Intent, Network, Numbers, Options, needs_device, resolve, wishes};
use crate::plan::{Plan, PodRef, Sandbox, result};
use crate::step::{Claim, Output, Role, Step};
use crate::timing;
use crate::waits::{self, Resource};

/// Attaches and detaches sandboxes. At most one operation per (container, interface) at a time: callers serialise by
/// container.
#[derive(Debug)]
pub struct Engine {
    pub(super) node: Node,
    pub(super) journal: Store,
    pub(super) registry: Registry,
    pub(super) options: Options,
    pub(super) inheritance: Inheritance,
    pub(super) repeated: RepeatedAdd,
    pub(super) own: NetnsId,
    pub(super) recognised: Recognised,
    pub(super) parents: Parents,
    pub(super) unannounced: Unannounced,
    pub(super) unread_leases: UnreadLeases,
}

/// The message for a pod that can send past programs, or may, through a device that it has created: the kind, because
/// its name does not tell, and the reason.
const IFB: (&str, &str) =
    ("ifb", "a device of this kind is there, by which what the pod sends can go past programs on the node");

impl Engine {
    /// Makes an engine. The calling thread must be in the node's namespace.
    ///
    /// # Errors
    /// The node's namespace cannot be identified.
    pub fn new(
        node: Node,
        journal: Store,
        limit: u32,
        options: Options,
        inheritance: Inheritance,
        repeated: RepeatedAdd,
    ) -> Result<Self, NetnsError> {
        let own = Netns::current()?.id();
        let (registry, recognised) = (Registry::new(limit), Recognised::default());
        let (parents, unannounced) = (Parents::default(), Unannounced::default());
        let unread_leases = UnreadLeases::default();
        Ok(Self {
            node,
            journal,
            registry,
            options,
            inheritance,
            repeated,
            own,
            recognised,
            parents,
            unannounced,
            unread_leases,
        })
    }

    /// Returns the attached sandboxes.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Processes pending notifications about bridges and parents, so that the next ADD need not.
    pub fn catch_up(&self) {
        if let Some(links) = &self.node.links {
            links.catch_up();
        }
    }

    /// Returns the directory of the records.
    pub fn journal_directory(&self) -> &Path {
        self.journal.directory()
    }

    /// Whether the journal has a record with this key, whatever its content.
    pub fn has_record(&self, key: &JournalKey) -> bool {
        self.journal.path(key).is_ok_and(|path| path.exists())
    }

    /// Returns the pools that leases may have been taken from.
    pub(super) fn noted_pools(&self) -> Vec<Pool> {
        self.journal.pools()
    }

    /// Returns the state that all attachments share.
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// ADD: attaches the sandbox to every network of `intent`, or to none. Returns the default network's result in
    /// the version of the request, and whether it has attached anything: [`RepeatedAdd::Return`] does not.
    ///
    /// # Errors
    /// The first failure. Everything done before it has been rolled back; if an inverse failed as well, the record is
    /// kept for DEL.
    pub fn add(
        &self,
        request: &cni::Request,
        pod: Option<PodRef>,
        intent: &Intent,
    ) -> Result<(Value, Arc<Attached>, bool), AttachError> {
        let key = key(request);
        let path = PathBuf::from(request.netns.as_deref().unwrap_or_default());
        let netns = Netns::open(&path)?;
        if netns.id() == self.own && !request.netns_override {
            return Err(AttachError::HostNetns { path });
        }
        let sandbox = Sandbox {
            container_id: request.container_id.clone(),
            ifname: request.ifname.clone(),
            netns: path.to_string_lossy().into_owned(),
            netns_id: netns.id(),
            cni_args: request.args.raw().to_owned(),
            cni_path: request.path.clone(),
            config_name: request.name.clone(),
            pod,
        };
        let intent = self.with_live_pools(intent);
        let intent = intent.as_ref();
        match self.load_to_attach(&key, &netns)? {
            Loaded::Absent => {}
            Loaded::Torn { earlier_boot } => self.clear_torn(&key, earlier_boot, Some(&netns))?,
            Loaded::Whole(record) if is_whole(&record) => {
                record.check_whole()?;
                let (result, attached) = self.repeat(&record, sandbox, request, intent, &netns)?;
                return Ok((result, attached, false));
            }
            // A crash has left it unfinished, and it has not been rolled back yet.
            Loaded::Whole(record) => self.roll_back(*record)?,
        }
        let mut numbers = self.registry.reserve();
        let facts = facts::gather(&wishes(intent.selected(), &self.options))?;
        let (given, numbered) = ((&self.options, &facts), self.numbers(&mut numbers));
        let plan = timing::part("planning", || resolve(sandbox, request, intent, given, numbered))?;
        let (result, attached) = self.carry_out(key, plan, numbers, &netns, request.version)?;
        Ok((result, attached, true))
    }

    /// Whether attachments of the network need a device.
    pub fn needs_device(&self, network: &Network) -> bool {
        needs_device(network, &self.options)
    }

    /// Whether pods belong to a cluster, where their authors are not the node's administrators.
    pub fn is_in_cluster(&self) -> bool {
        self.options.in_cluster
    }

    /// Returns the networks with the pools of their live attachments.
    fn with_live_pools<'i>(&self, intent: &'i Intent) -> Cow<'i, Intent> {
        let live = self.registry.pools_of(intent.networks().map(|network| &network.name));
        let (intent, kept) = settle(intent, &live);
        for pool in kept {
            tracing::warn!(network = %pool.network, "{pool}");
        }
        intent
    }

    /// Attachment numbers are assigned only if there is a dataplane.
    pub(super) fn numbers<'a>(&self, numbers: &'a mut Reservation<'_>) -> Option<&'a mut dyn Numbers> {
        self.node.enforcer.is_some().then_some(numbers as &mut _)
    }

    /// Records a plan and carries it out; rolls it back on failure. Returns the result of its first attachment.
    pub(crate) fn carry_out(
        &self,
        key: JournalKey,
        plan: Plan,
        mut numbers: Reservation<'_>,
        netns: &Netns,
        version: cni::Version,
    ) -> Result<(Value, Arc<Attached>), AttachError> {
        if let Some(enforcer) = &self.node.enforcer {
            for attachment in &plan.attachments {
                enforcer
                    .permit(plan.sandbox.pod.as_ref(), attachment, attachment.vantage().as_ref())
                    .map_err(|source| AttachError::step(Doing::Attach, attachment, "", source))?;
            }
        }
        let mut needs = waits::footprint(&plan);
        let notes = leased_from(&plan).any(|pool| !self.journal.has_noted(&pool));
        needs.extend(notes.then_some(Resource::Sync));
        waits::admit(&needs)?;
        numbers.claim_pools(&plan)?;
        numbers.claim_addresses(&plan)?;
        // Until the registry, or the leases in the pools, show which pools are needed.
        let _noted = self.note_pools(&plan)?;
        self.carry_out_settled(key, plan, numbers, (netns, version))
    }

    /// Like [`Engine::carry_out`], for a plan that is permitted and whose pools and addresses are settled: without a
    /// dataplane, any plan.
    pub(super) fn carry_out_settled(
        &self,
        key: JournalKey,
        plan: Plan,
        numbers: Reservation<'_>,
        (netns, version): (&Netns, cni::Version),
    ) -> Result<(Value, Arc<Attached>), AttachError> {
        let foreign = plan.steps().any(|(_, _, step)| matches!(step, Step::Delegate(_)));
        let mut record = self.journal.create(key, plan)?;
        numbers.keep();
        crate::crash_point!("add", "planned");
        if foreign {
            record.start_sync();
        }
        match self.apply_and_record(&mut record, netns, version) {
            Ok(result) => {
                let attached = Arc::new(Attached::from(record));
                self.registry.insert(Arc::clone(&attached));
                self.withdraw_lost(&attached);
                Ok((result, attached))
            }
            Err(error) => {
                let container = record.key.container_id.clone();
                let asking = record.plan.sandbox.pod.clone();
                // The error is returned, and logged there.
                tracing::debug!(container, error = %Chain(&error), "ADD failed; rolling it back");
                match self.roll_back(record) {
                    Ok(()) => {
                        let waits_for = waits::put_off(|leaving| self.holder(&error, leaving));
                        if let Some(holder) = holder_named(&error).map(str::to_owned).or(waits_for) {
                            self.tell_holder(holder, asking.as_ref());
                        }
                    }
                    Err(undo) => {
                        tracing::error!(container, error = %Chain(&undo), "ADD not rolled back; DEL will try again");
                    }
                }
                Err(error)
            }
        }
    }

    /// Notes the pools that a plan leases from, each until the returned value is dropped. Noting a new pool waits for
    /// the disk.
    fn note_pools(&self, plan: &Plan) -> Result<Vec<NotedPool<'_>>, JournalError> {
        let note = |pool: Pool| match self.journal.has_noted(&pool) {
            true => self.journal.note_pool(pool),
            false => waits::at(&Resource::Sync, || self.journal.note_pool(pool)),
        };
        leased_from(plan).map(note).collect()
    }

    /// Returns the container among `of` that holds the address, the node's port or the parent for which the ADD
    /// failed, or any address of the exhausted pool.
    fn holder(&self, error: &AttachError, of: &[String]) -> Option<String> {
        if let Some(container) = holder_named(error) {
            return of.iter().find(|it| *it == container).cloned();
        }
        let AttachError::Step { source, .. } = error else { return None };
        match &**source {
            StepError::Lease(error) => {
                let (pool, wanted) = error.none_free()?;
                let has_it = |container: &&String| {
                    let held = self.node.leases.held(&pool, container, &[]);
                    // A container whose leases cannot be read is not waited for.
                    held.is_ok_and(|held| {
                        wanted.map_or(!held.is_empty(), |one| held.contains(&one.to_canonical()))
                    })
                };
                waits::at_pool(Some(pool.clone()), || of.iter().find(has_it).cloned())
            }
            _ => None,
        }
    }

    /// Describes a container, with its pod if known.
    pub fn describe(&self, container: &str) -> String {
        described(container, self.pod_of(container).as_ref())
    }

    fn pod_of(&self, container: &str) -> Option<PodRef> {
        let attached = self.registry.of_container(container).into_iter().next();
        let pod = attached.and_then(|it| it.plan.sandbox.pod.clone());
        pod.or_else(|| self.records_of(container).find_map(|record| record.plan.sandbox.pod.clone()))
    }

    /// Notes the container that holds a resource, for the details of the error of the pod that asks for it. They name
    /// it only to a pod of the same namespace; the log has all others.
    fn tell_holder(&self, container: String, asking: Option<&PodRef>) {
        let pod = self.pod_of(&container);
        let is_of_namespace =
            |asking: &PodRef| pod.as_ref().is_some_and(|pod| pod.name.namespace == asking.name.namespace);
        let who = described(&container, pod.as_ref());
        let told = if asking.is_none_or(is_of_namespace) {
            who
        } else {
            tracing::info!(holder = who, "refused for what another container holds");
            "another container of the node".to_owned()
        };
        waits::held_by(container, told);
    }

    /// Whether a DEL or a roll-back of the container has begun and is not complete.
    pub fn is_half_detached(&self, container: &str) -> bool {
        self.records_of(container).any(|record| record.state == RecordState::Removing)
    }

    /// Returns the records of a container that can be read, for messages.
    fn records_of(&self, container: &str) -> impl Iterator<Item = Box<Record>> {
        let keys = self.journal.keys().unwrap_or_default();
        let own = keys.into_iter().filter(move |key| key.container_id == container);
        own.filter_map(|key| match self.journal.peek(&key) {
            Ok(Loaded::Whole(record)) => Some(record),
            _ => None,
        })
    }

    fn apply_and_record(
        &self,
        record: &mut Record,
        netns: &Netns,
        version: cni::Version,
    ) -> Result<Value, AttachError> {
        let plan = Arc::clone(&record.plan);
        apply(&self.node, &plan, netns, record)?;
        // Only now it is known how many addresses executed plugins have given.
        self.registry.count_addresses(&plan, &record.outputs)?;
        let versions = [version, cni::Version::LATEST];
        // A version that cannot express the result fails here, while everything can still be rolled back.
        let [reply, kept] = match plan.attachments.first() {
            Some(default) => result::in_versions(&plan.sandbox, default, record.outputs.of(0), versions)?,
            None => [cni::result::in_version(&Value::Null, version)?, Value::Null],
        };
        if record.is_being_synced() {
            waits::at(&Resource::Sync, || record.wait_durable())?;
        }
        // The latest point at which everything can still be rolled back.
        self.check_leases(&plan)?;
        record.attached(kept)?;
        crate::crash_point!("add", "attached");
        Ok(reply)
    }

    /// DEL: rolls back everything in the record of the sandbox, and returns the pod. An unknown sandbox is success.
    ///
    /// # Errors
    /// The inverses that failed. The record is kept and DEL may be repeated.
    pub fn del(&self, request: &cni::Request) -> Result<Option<PodRef>, AttachError> {
        let netns = request.netns.as_deref().map(Path::new);
        self.del_sandbox(&key(request), netns, || match &request.tolerated {
            // A sandbox with names that ADD refuses was never attached.
            Some(error) => Err(error.clone().into()),
            None => self.del_inherited(request),
        })
    }

    /// Like [`Engine::del`], for a sandbox that is known only by its record or in memory.
    ///
    /// # Errors
    /// As for [`Engine::del`].
    pub fn del_recorded(&self, key: &JournalKey) -> Result<Option<PodRef>, AttachError> {
        self.del_sandbox(key, None, || Ok(()))
    }

    fn del_sandbox(
        &self,
        key: &JournalKey,
        netns: Option<&Path>,
        without_record: impl FnOnce() -> Result<(), AttachError>,
    ) -> Result<Option<PodRef>, AttachError> {
        // The newest attachments are removed first. The sandbox itself is rolled back even if that fails.
        let dynamic = self.detach_all(key);
        let sandbox = self.load_to_release(key).and_then(|loaded| match loaded {
            Loaded::Absent => without_record().map(|()| None),
            Loaded::Torn { earlier_boot } => {
                let netns = netns.map(Netns::if_there).transpose()?.flatten();
                self.clear_torn(key, earlier_boot, netns.as_ref()).map(|()| None)
            }
            Loaded::Whole(record) => {
                let pod = record.plan.sandbox.pod.clone();
                let is_taken_over = record.plan.is_taken_over();
                self.roll_back(*record)?;
                if is_taken_over {
                    without_record()?;
                }
                Ok(pod)
            }
        });
        match (sandbox, dynamic) {
            (Err(sandbox), Err(dynamic)) => Err(AttachError::Undo(vec![dynamic, sandbox])),
            (sandbox, dynamic) => sandbox.and_then(|pod| dynamic.map(|()| pod)),
        }
    }

    /// Whether the sandbox was attached after `then`: an older detach request was meant for another container of the
    /// same id. A record without a time was written by an earlier version of the agent, before any request that has
    /// one; a request without a time was answered by an error and is repeated.
    ///
    /// # Errors
    /// The record cannot be read.
    pub fn attached_since(&self, key: &JournalKey, then: Option<&Moment>) -> Result<bool, AttachError> {
        let (attached, is_of_earlier_boot) = match self.registry.stays(key) {
            // The record may be gone, or have been rewritten with a later time.
            Some(attached) => (Moment { since_boot: attached.planned, ..self.journal.now() }, false),
            None => match self.journal.load(key)? {
                Loaded::Whole(record) if record.state == RecordState::Attached => {
                    (record.planned.clone(), record.is_of_earlier_boot())
                }
                _ => return Ok(false),
            },
        };
        Ok(match (attached.since_boot, then.and_then(|then| Some((&then.boot, then.since_boot?)))) {
            (None, _) => false,
            (Some(_), None) => true,
            (Some(planned), Some((boot, then))) => {
                // A record of an earlier boot cannot be newer than a request of this boot, and a record of this boot
                // cannot be older than a request of an earlier one.
                if *boot == attached.boot { planned > then } else { !is_of_earlier_boot }
            }
        })
    }

    /// CHECK: compares the kernel with the record of the sandbox.
    ///
    /// # Errors
    /// The first difference.
    pub fn check(&self, request: &cni::Request) -> Result<(), AttachError> {
        let (record, netns) = self.attached(&key(request))?;
        self.check_sandbox(&record, &netns)
    }

    /// Compares the kernel with the record of a sandbox and with those of the attachments made while it was live.
    pub(super) fn check_sandbox(&self, record: &Record, netns: &Netns) -> Result<(), AttachError> {
        self.check_attached(record, netns)?;
        let (records, unread) = self.dynamic_of(&record.key);
        if let Some(error) = unread.into_iter().next() {
            return Err(error);
        }
        records.iter().rev().try_for_each(|record| self.check_attached(record, netns))
    }

    fn check_attached(&self, record: &Record, netns: &Netns) -> Result<(), AttachError> {
        waits::admit(&waits::footprint(&record.plan))?;
        let attached = self.registry.stays(&record.key);
        let followed = attached.map_or(Ok(()), |attached| self.follow_parents_of(&attached));
        check(&self.node, record, netns).and(followed)
    }

    /// Returns changes that other programs have made in the pod of a sandbox, in the container's turn: the first
    /// difference of each attachment, with its interface, and devices through which the pod can send past programs,
    /// with their kind. Returns nothing if the namespace is gone. If traffic can bypass an attachment's programs
    /// there, its enforcement level is lowered.
    ///
    /// # Errors
    /// The kernel's state cannot be read.
    pub fn differences_in_pod(&self, attached: &Attached) -> Result<Vec<(String, String)>, AttachError> {
        let sandbox = &attached.plan.sandbox;
        let netns = Netns::of(&sandbox.netns, sandbox.netns_id, None)?;
        let Some(netns) = netns.filter(|netns| netns.id() != self.own) else { return Ok(Vec::new()) };
        let enforcer = self.node.enforcer.as_ref();
        let Some(pod) = Handle::open_in_that(&netns, attached.netns_cookie)? else { return Ok(Vec::new()) };
        let (has_ifb, pod) = match enforcer {
            Some(enforcer) => enforcement::look_for_ifb(enforcer.as_ref(), &attached.plan, pod)?,
            None => (false, Some(pod)),
        };
        let mut pod = match pod {
            Some(pod) => pod,
            None => Handle::open_in(&netns)?,
        };
        let looked = match enforcer {
            Some(enforcer) => enforcement::look_into_pod(enforcer.as_ref(), attached, &mut pod),
            None => Ok(()),
        };
        let mut differences = match looked.and_then(|()| differences_in_pod(attached, (&netns, &mut pod))) {
            // Otherwise a pod could suppress this message with a list that is too long to read, for example of
            // routes.
            Err(error) if has_ifb => {
                let container = &attached.key.container_id;
                tracing::debug!(container, error = %Chain(&error), "cannot check its interfaces");
                Vec::new()
            }
            found => found?,
        };
        differences.extend(has_ifb.then(|| (IFB.0.to_owned(), IFB.1.to_owned())));
        Ok(differences)
    }

    /// Returns the record of an attached sandbox, and its network namespace.
    pub(super) fn attached(&self, key: &JournalKey) -> Result<(Box<Record>, Netns), AttachError> {
        let record = match self.journal.load(key)? {
            Loaded::Whole(record) if record.state == RecordState::Attached => record,
            _ => return Err(AttachError::NotAttached(key.clone())),
        };
        record.check_whole()?;
        let netns = self
            .netns_of(&record)?
            .ok_or_else(|| NetnsError::Gone { path: PathBuf::from(&record.plan.sandbox.netns) })?;
        Ok((record, netns))
    }

    pub(super) fn roll_back(&self, mut record: Record) -> Result<(), AttachError> {
        waits::admit(&waits::footprint(&record.plan))?;
        if !record.is_of_earlier_boot() {
            record.check_undoable()?;
        }
        let netns = self.netns_of(&record)?;
        let whole = record.check_whole();
        if let Err(error) = &whole {
            tracing::error!(error = %Chain(error), "damaged record; rolling back its plan as if every step had begun");
        }
        let never_attached = !record.may_have_been_attached() && whole.is_ok();
        let mut says_attached = false;
        if record.state != RecordState::Removing {
            let was_attached = is_whole(&record);
            if let Err(error) = record.removing() {
                // The disk accepts no writes. The begun steps are known, and rolling them back frees resources.
                tracing::warn!(record = %record.path().display(), error = %Chain(&error), "journal not written");
                says_attached = was_attached;
            }
        }
        self.registry.leaves(&record.key);
        crate::crash_point!("undo", "begun");
        let take_back = if says_attached { undo_but_addresses } else { undo };
        if let Err(error) = take_back(&self.node, &record.plan, netns.as_ref(), &record) {
            if let Err(error) = self.note_returned(&mut record) {
                tracing::warn!(record = %record.path().display(), error = %Chain(&error), "journal not written");
                self.node.devices.stays_unwritten(&record.key);
            }
            return Err(error);
        }
        if never_attached && let Err(error) = self.node.bridges.remove_made(&record.outputs) {
            tracing::warn!(error = %Chain(&error), "bridge of a failed ADD not removed");
        }
        crate::crash_point!("undo", "record");
        let (key, plan, cookie) = (record.key.clone(), Arc::clone(&record.plan), record.netns_cookie);
        let outputs = says_attached.then(|| record.outputs.clone());
        // While the record exists, DEL may be repeated and uses these numbers again.
        record.remove().map_err(|error| {
            // A record that stays must note that its devices have gone back to the node.
            self.node.devices.stays_unwritten(&key);
            match error {
                JournalError::Remove { path, source } if says_attached => {
                    AttachError::AddressesStay { path, plugins: executed(&plan), source }
                }
                other => other.into(),
            }
        })?;
        if let Some(outputs) = outputs {
            // Without a record, a repeated DEL succeeds without retrying the release. So the sandbox stays in the
            // registry until the release has succeeded, and its record is rewritten as that of a removal;
            // immediately, if there is space.
            release_addresses(&self.node, &plan, netns.as_ref(), &outputs)
                .inspect_err(|_| self.write_removal_again(&key, (&plan, &outputs, cookie)))?;
        }
        self.registry.remove(&key, &plan);
        Ok(())
    }

    /// Notes in a record that stays which of its devices have gone back, so that the next agent leaves them to the
    /// node or to their new holder.
    ///
    /// # Errors
    /// A device could not be noted; all were tried.
    pub(super) fn note_returned(&self, record: &mut Record) -> Result<(), JournalError> {
        let mut written = Ok(());
        let plan = Arc::clone(&record.plan);
        for (at, _, _) in plan.steps().filter(|(_, _, step)| matches!(step, Step::ClaimDevice(_))) {
            let Some(Output::Claimed(claim)) = record.outputs.get(&at) else { continue };
            if claim.is_back || !self.node.devices.has_ended(claim) {
                continue;
            }
            let claim = Claim { is_back: true, ..(**claim).clone() };
            written = written.and(record.amend(at, Output::Claimed(Box::new(claim))));
        }
        written
    }

    /// Returns the sandbox's namespace, if it is still the one that was attached. The kernel reuses inode numbers, so
    /// a record of an earlier boot has none, and the cookie decides if there is one.
    ///
    /// # Errors
    /// The namespace cannot be determined, for example without a free descriptor: otherwise its contents would count
    /// as gone.
    pub(super) fn netns_of(&self, record: &Record) -> Result<Option<Netns>, NetnsError> {
        let sandbox = &record.plan.sandbox;
        if record.is_of_earlier_boot() {
            return Ok(None);
        }
        let netns = Netns::of(&sandbox.netns, sandbox.netns_id, record.netns_cookie)?;
        Ok(netns.filter(|netns| netns.id() != self.own))
    }
}

fn described(container: &str, pod: Option<&PodRef>) -> String {
    match pod {
        Some(pod) => format!("pod {pod} (container {container})"),
        None => format!("container {container}"),
    }
}

/// Returns the container that holds the resource for which the operation failed, according to the error.
fn holder_named(error: &AttachError) -> Option<&str> {
    let AttachError::Step { source, .. } = error else { return None };
    match &**source {
        StepError::Address(AddressError::Taken { holder: Holder::Attachment { container, .. }, .. })
        | StepError::Device(DeviceError::Taken { container, .. })
        | StepError::Link(LinkError::ParentShared { container, .. }) => Some(container),
        StepError::Nat(NatError::PortTaken(taken)) => Some(&taken.holder.key.container),
        _ => None,
    }
}

/// Returns the pools that a plan leases from.
pub(super) fn leased_from(plan: &Plan) -> impl Iterator<Item = Pool> {
    plan.steps().filter_map(|(_, _, step)| match step {
        Step::Lease(config) => config.pool(),
        _ => None,
    })
}

/// Returns the other plugins of a plan that create or change interfaces, each once.
fn executed(plan: &Plan) -> Vec<String> {
    let plugins = plan.steps().filter_map(|(_, _, step)| match step {
        Step::Delegate(delegate) if delegate.role == Role::Plugin => Some(delegate.plugin.clone()),
        _ => None,
    });
    Vec::from_iter(plugins.collect::<BTreeSet<_>>())
}

/// Whether the sandbox is attached and continues unchanged.
pub(super) fn is_whole(record: &Record) -> bool {
    record.state == RecordState::Attached && !record.is_of_earlier_boot()
}

pub(super) fn key(request: &cni::Request) -> JournalKey {
    JournalKey { container_id: request.container_id.clone(), ifname: request.ifname.clone() }
}
