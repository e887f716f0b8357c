//! Answers requests: CNI calls through the engine, queries from memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

use super::devices::{self, Asked};
use super::operation::{Operation, Patience};
use super::request_log::{self, Made};
use crate::agent::admission::lanes::{Class, Full};
use crate::agent::admission::required_status::RequiredStatus;
use crate::agent::admission::scheduler::{
    Awaited, MOST_ADDS, MOST_CHECKS, MOST_DELS, Slot, Traffic, Turn, Turns,
};
use crate::agent::cleanup::collector::Collector;
use crate::agent::health::Health;
use crate::agent::monitoring::events;
use crate::agent::monitoring::http::Http;
use crate::agent::monitoring::metrics::Metrics;
use crate::agent::monitoring::traces::{Trace, Traces};
use crate::agent::pods::drift::{self, Drift};
use crate::agent::pods::in_pods::InPods;
use crate::agent::pods::live::LivePods;
use crate::agent::pods::missed::Repairs;
use crate::agent::report::{Reporter, pools};
use crate::attach::{AttachError, Attached, Engine, IntentReader, network_status};
use crate::cni::{self, CniError, Command, code};
use crate::enforce::error::EnforceError;
use crate::error_chain::Chain;
use crate::journal::JournalKey;
use crate::kubelet::PodResources;
use crate::npwg::status::Form;
use crate::objects::Pod;
use crate::own_thread;
use crate::plan::PodRef;
use crate::publish::{Event, Mark, Publish, Published};
use crate::rpc::message::{CniCall, CniReply, Condition, Readiness, Request, Response, Status};
use crate::rpc::server::{Handler, Reply};
use crate::rpc::shim::TRACE_VARIABLE;
use crate::sync::{Mutex, locked};
use crate::timing;
use crate::waits::{self, Footprint, Resource};

/// Most queries that are answered or wait at a time; further queries are refused.
pub(in crate::agent) const MOST_QUESTIONS: usize = 32;

/// How long operations may wait at a plugin or pool before the status reports it.
const LONG_STANDING: Duration = Duration::from_secs(3);

/// A request that takes at least this long is logged with its timings.
const SLOW: Duration = Duration::from_secs(1);

/// Log target of the timing lines.
const TIMING: &str = "netattach::timing";

/// Most threads that publish statuses at a time.
pub(in crate::agent) const MOST_PUBLISHERS: usize = 8;

/// How long an ADD waits for its status to be published, if that is required.
const STATUS_PATIENCE: Duration = Duration::from_secs(10);

/// Memory, in bytes, for the networks of all large ADDs together: more than the largest that a pod may have.
const MOST_WEIGHT: usize = 24 << 20;
/// An ADD whose networks take no more than this, in bytes, is not counted against [`MOST_WEIGHT`]: small
/// ADDs are limited by their number.
const LIGHT: usize = 128 << 10;
/// Unit in which memory is counted, in bytes.
const WEIGHT_UNIT: usize = 1 << 10;
/// How long a large ADD waits for memory.
const MEMORY_PATIENCE: Duration = Duration::from_secs(10);

/// The publisher of pods' network-status, and the form it uses.
#[derive(Debug)]
pub(in crate::agent) struct Statuses {
    pub(in crate::agent) publisher: Arc<dyn Publish>,
    pub(in crate::agent) form: Form,
    /// Whether an ADD fails unless its status is published.
    pub(in crate::agent) required: bool,
}

/// The agent's connections to the rest of the node, and what the start has found.
#[derive(Debug)]
pub(in crate::agent) struct Outside {
    /// Recorded DELs, and sandboxes that no runtime will ask for.
    pub(in crate::agent) collector: Collector,
    /// Devices of pods.
    pub(in crate::agent) kubelet: PodResources,
    /// Pods that run without their networks.
    pub(in crate::agent) repairs: Repairs,
    /// Probes and metrics, if they are served.
    pub(in crate::agent) http: Option<Arc<Http>>,
    /// The counters.
    pub(in crate::agent) metrics: Arc<Metrics>,
    /// The exporter of traces, if traces are sent.
    pub(in crate::agent) traces: Option<Traces>,
    /// Why executed plugins have no control group, if they should have one.
    pub(in crate::agent) no_group: Option<Condition>,
    /// Records that could not be taken over, with the reason.
    pub(in crate::agent) left_alone: Vec<(JournalKey, String)>,
}

/// The state that requests are answered from.
#[derive(Debug)]
pub(in crate::agent) struct Agent {
    pub(in crate::agent) engine: Arc<Engine>,
    pub(in crate::agent) intents: Arc<IntentReader>,
    statuses: Statuses,
    required_status: Mutex<RequiredStatus>,
    pub(in crate::agent) reporter: Reporter,
    pub(in crate::agent) health: Arc<Health>,
    pub(in crate::agent) live_pods: LivePods,
    pub(in crate::agent) repairs: Repairs,
    pub(in crate::agent) drift: Drift,
    pub(in crate::agent) in_pods: InPods,
    pub(in crate::agent) kubelet: PodResources,
    server: Option<Arc<Http>>,
    pub(in crate::agent) metrics: Arc<Metrics>,
    pub(in crate::agent) traces: Option<Traces>,
    no_group: Option<Condition>,
    /// Records that could not be taken over, until they are gone.
    left_alone: Mutex<Vec<(JournalKey, String)>>,
    pub(in crate::agent) turns: Arc<Turns>,
    pub(in crate::agent) traffic: Arc<Traffic>,
    /// Allows one GC at a time.
    pub(in crate::agent) collections: Semaphore,
    /// Number of containers with unfinished work of earlier agents.
    pub(in crate::agent) left_over: AtomicUsize,
    /// Recorded DELs, and sandboxes that no runtime will ask for.
    pub(in crate::agent) collector: Collector,
    /// Limits on waiting and running requests, by kind.
    adds: Semaphore,
    dels: Semaphore,
    checks: Semaphore,
    questions: Semaphore,
    pub(super) publishers: Semaphore,
    /// Lets one thread at a time announce addresses.
    pub(super) announcer: Semaphore,
    /// Lets one thread at a time do the dataplane work that ADDs have deferred.
    pub(super) settler: Semaphore,
    /// Memory for large ADDs, in units.
    large_adds: Arc<Semaphore>,
}

impl Agent {
    pub(in crate::agent) fn new(
        engine: Arc<Engine>,
        intents: Arc<IntentReader>,
        statuses: Statuses,
        reporter: Reporter,
        health: Arc<Health>,
        outside: Outside,
        parallel_adds: usize,
    ) -> Self {
        Self {
            engine,
            intents,
            statuses,
            required_status: Mutex::default(),
            reporter,
            health,
            live_pods: LivePods::default(),
            repairs: outside.repairs,
            drift: Drift::default(),
            in_pods: InPods::default(),
            kubelet: outside.kubelet,
            server: outside.http,
            metrics: outside.metrics,
            traces: outside.traces,
            no_group: outside.no_group,
            left_alone: Mutex::new(outside.left_alone),
            turns: Arc::default(),
            traffic: Traffic::new(parallel_adds),
            collections: Semaphore::new(1),
            left_over: AtomicUsize::new(0),
            collector: outside.collector,
            adds: Semaphore::new(MOST_ADDS),
            dels: Semaphore::new(MOST_DELS),
            checks: Semaphore::new(MOST_CHECKS),
            questions: Semaphore::new(MOST_QUESTIONS),
            publishers: Semaphore::new(MOST_PUBLISHERS),
            announcer: Semaphore::new(1),
            settler: Semaphore::new(1),
            large_adds: Arc::new(Semaphore::new(MOST_WEIGHT / WEIGHT_UNIT)),
        }
    }

    /// Carries out one CNI call. The thread that did the work sends the answer if the call succeeds;
    /// otherwise returns the answer for the executable.
    pub(in crate::agent) async fn cni(
        self: &Arc<Self>,
        call: CniCall,
        reply: &Arc<Reply>,
    ) -> Option<CniReply> {
        let request = cni::Request::parse(&call.env, call.stdin.as_bytes());
        let version = match &request {
            Ok(request) => request.version,
            Err(_) => cni::request::error_version(call.stdin.as_bytes()),
        };
        let asked = request_log::Asked::of(&call);
        let trace = Arc::new(Traces::begin(self.traces.as_ref(), call.variable(TRACE_VARIABLE)));
        // The call may be large, and waiting may take long.
        drop(call);
        let added = asked.added_pod();
        if let Some(pod) = &added {
            self.repairs.asked_for(pod);
        }
        let answering = Arc::new(Answering { asked, trace, begun: Instant::now(), reply: Arc::clone(reply) });
        let carried_out = match request {
            Ok(request) => self.dispatch(request, &answering).await,
            Err(error) => Err(error),
        };
        let error = carried_out.err()?;
        let took = self.record_outcome(&answering, Some(&error));
        answering.asked.answered(&self.about(&answering.asked), Some(&error), took);
        if let Some(pod) = added {
            // The ADD may have waited for long.
            self.repairs.asked_for(&pod);
            self.report(events::of_failed_add(pod, &error));
        }
        Some(CniReply { stdout: error.to_json(version), exit: 1 })
    }

    /// Answers a call that has succeeded, after counting it. The log line is written after the answer.
    fn answer(&self, answering: &Answering, stdout: String, made: impl FnOnce() -> Made) {
        let took = self.record_outcome(answering, None);
        answering.reply.send(&Response::Cni(CniReply { stdout, exit: 0 }));
        answering.asked.answered(&made(), None, took);
    }

    /// Counts a call, and ends its trace. Returns how long it took.
    fn record_outcome(&self, answering: &Answering, error: Option<&CniError>) -> Duration {
        let Answering { asked, trace, begun, reply: _ } = answering;
        let took = begun.elapsed();
        self.metrics.answered(asked.verb(), error, took);
        if let Some(traces) = &self.traces {
            traces.end(trace, asked.verb(), asked.attributes(), error.map(ToString::to_string));
        }
        took
    }

    /// Returns what a failed request was about: the networks that an ADD was to attach, or the present
    /// attachments; empty if the request names no container.
    pub(in crate::agent) fn about(&self, asked: &request_log::Asked) -> Made {
        if !asked.is_about_a_container() {
            return Made::default();
        }
        match asked.added_pod() {
            Some(pod) => Made::named(&self.intents.named(&pod)),
            None => self.made_of(&asked.sandbox()),
        }
    }

    /// Returns the attachments of a sandbox.
    pub(in crate::agent) fn made_of(&self, sandbox: &JournalKey) -> Made {
        Made::of(&self.engine.registry().with_dynamic(sandbox))
    }

    async fn dispatch(
        self: &Arc<Self>,
        request: cni::Request,
        answering: &Arc<Answering>,
    ) -> Result<(), CniError> {
        let without_made = |stdout| self.answer(answering, stdout, Made::default);
        let class = match request.command {
            Command::Version => {
                without_made(cni::json::pretty(&cni::request::version_reply()));
                return Ok(());
            }
            Command::Status => {
                return self.health.answer(&request.path).map(|()| without_made(String::new()));
            }
            Command::Gc => return self.gc(request).await.map(without_made),
            Command::Del => Class::Del,
            Command::Add => Class::Add,
            Command::Check => Class::Check,
        };
        let request = Arc::new(request);
        let container = request.container_id.clone();
        let (agent, waiting) = (Arc::clone(self), Arc::clone(&request));
        let devices = Arc::new(Asked::new());
        let asking = Arc::clone(&devices);
        // This runs in the container's turn, so that a later DEL waits for it, but without a slot in the
        // lanes, which others need.
        let first = async move {
            match class {
                Class::Add => agent.ready_to_add(&waiting, &asking).await,
                Class::Del | Class::Check => Ok(None),
            }
        };
        let answering = Arc::clone(answering);
        // Work that has succeeded is never run again.
        let work = move |agent: &Self| {
            if class == Class::Add {
                check_awaited(&answering.reply)?;
            }
            let Done { stdout, made } = agent.timed(&request, &devices, &answering.trace)?;
            agent.turns.finish(&request.container_id);
            let publish = made.added().map(|attached| attached.key.clone());
            agent.answer(&answering, stdout, || made.in_words());
            agent.engine.catch_up();
            Ok(publish)
        };
        let (publish, turn) = self.in_turn(&container, class, first, work).await?;
        if let Some(sandbox) = publish {
            self.finish_later(sandbox.clone());
            self.publish_later(sandbox, turn);
        }
        Ok(())
    }

    /// Waits for the prerequisites of an ADD: its pod, the kubelet's answer on its devices, and, if its
    /// networks are large, the memory for them. This does not delay other ADDs.
    ///
    /// # Errors
    /// Code 11: other large ADDs have held the memory for [`MEMORY_PATIENCE`].
    async fn ready_to_add(
        &self,
        request: &cni::Request,
        devices: &Asked,
    ) -> Result<Option<OwnedSemaphorePermit>, CniError> {
        let Some((pod, networks)) = self.intents.await_pod(request).await else { return Ok(None) };
        self.ask_for_devices(&pod, &networks, devices).await;
        self.memory_for(self.intents.weight(&networks)).await
    }

    /// Waits for that many bytes of memory, if they exceed [`LIGHT`].
    ///
    /// # Errors
    /// As [`Agent::ready_to_add`].
    pub(super) async fn memory_for(&self, weight: usize) -> Result<Option<OwnedSemaphorePermit>, CniError> {
        if weight <= LIGHT {
            return Ok(None);
        }
        // An ADD that is estimated to need more than the total takes all of it and runs alone.
        let units = u32::try_from(weight.min(MOST_WEIGHT) / WEIGHT_UNIT).unwrap_or(u32::MAX);
        let memory = Arc::clone(&self.large_adds).acquire_many_owned(units);
        match tokio::time::timeout(MEMORY_PATIENCE, memory).await {
            Ok(Ok(memory)) => Ok(Some(memory)),
            _ => Err(CniError::new(
                code::TRY_AGAIN_LATER,
                format!(
                    "other pods with large network configurations are being attached: {weight} bytes of memory are not free"
                ),
            )),
        }
    }

    /// Runs `work` in the container's turn, after `first` and once the lane has a free slot. `work` gets
    /// the turn, to keep it for the parts of the operation that the caller need not wait for.
    ///
    /// # Errors
    /// Code 11 at once if too many operations of the kind are waiting, or the error of `work`.
    pub(in crate::agent) async fn in_turn<T: Send + 'static>(
        self: &Arc<Self>,
        container: &str,
        class: Class,
        first: impl Future<Output = Result<Option<OwnedSemaphorePermit>, CniError>> + Send,
        work: impl Fn(&Self) -> Result<T, CniError> + Send + Sync + 'static,
    ) -> Result<(T, Turn), CniError> {
        let _admitted = self.admit(class)?;
        let turn = self.turns.wait(container).await;
        let _memory = first.await?;
        if class == Class::Del {
            turn.rolls_back();
        }
        Ok((self.in_lane(class, work).await?, turn))
    }

    /// Runs `work` once the lane has a free slot. Work that is sent back has had no effect, and starts
    /// over. Work that failed because another container still holds something starts over once that
    /// container is detached.
    ///
    /// # Errors
    /// Code 11 if too many operations wait, or the error of `work`.
    pub(in crate::agent) async fn in_lane<T: Send + 'static>(
        self: &Arc<Self>,
        class: Class,
        work: impl Fn(&Self) -> Result<T, CniError> + Send + Sync + 'static,
    ) -> Result<T, CniError> {
        let work = Arc::new(work);
        let mut patience = Patience::default();
        loop {
            let slot = self.traffic.enter(class).map_err(|Full| too_many(class))?;
            let (worked, operation) = self.in_slot(slot, &work).await;
            let (waits_for, held_by) = (operation.waits_for(), operation.held_by());
            // Releases the slot in the lanes while this operation waits.
            drop(operation);
            match waits_for {
                Some(container) if worked.is_err() && patience.wait(&self.turns, &container).await => {}
                _ => match (worked, held_by) {
                    (Err(error), Some(container)) => return Err(self.with_holder(error, container).await),
                    (worked, _) => return worked,
                },
            }
        }
    }

    /// Adds to an error which container holds the missing resource, if that container is being detached:
    /// either the operation has waited too long for it, or its DEL has failed.
    async fn with_holder(self: &Arc<Self>, mut error: CniError, container: String) -> CniError {
        let lasts = self.turns.detaching_for(&container);
        let agent = Arc::clone(self);
        // This reads records.
        let told = own_thread::blocking(move || {
            let departs = match lasts {
                Some(lasts) => format!("whose detaching has taken {} s so far", lasts.as_secs()),
                None if agent.engine.is_half_detached(&container) => {
                    "which is half detached: its last DEL has failed, and is to be repeated".to_owned()
                }
                None => return None,
            };
            Some(format!("held by {}, {departs}", agent.engine.describe(&container)))
        });
        // Otherwise the error is unchanged.
        if let Ok(Some(told)) = told.await {
            let separator = if error.details.is_empty() { "" } else { "; " };
            error.details += &format!("{separator}{told}");
        }
        error
    }

    /// Runs `work` in a slot of the lane. Returns the result, and the notes of the operation.
    async fn in_slot<T: Send + 'static>(
        self: &Arc<Self>,
        slot: Arc<Slot>,
        work: &Arc<impl Fn(&Self) -> Result<T, CniError> + Send + Sync + 'static>,
    ) -> (Result<T, CniError>, Arc<Operation>) {
        loop {
            slot.begin().await;
            let operation = Operation::new(Arc::clone(&slot), Arc::clone(&self.turns));
            let (agent, place, work) = (Arc::clone(self), Arc::clone(&operation), Arc::clone(work));
            let worked = blocking(move || waits::within(place, || work(&agent))).await;
            if worked.is_ok() || !slot.was_sent_back() {
                return (worked, operation);
            }
        }
    }

    fn admit(&self, class: Class) -> Result<SemaphorePermit<'_>, CniError> {
        let places = match class {
            Class::Add => &self.adds,
            Class::Del => &self.dels,
            Class::Check => &self.checks,
        };
        places.try_acquire().map_err(|_| too_many(class))
    }

    /// Returns problems with single networks, pools and attachments, as last seen.
    fn troubles(&self) -> Vec<Condition> {
        let mut troubles = self.health.troubles();
        let warnings = self.intents.source.warnings().into_iter();
        troubles.extend(warnings.map(|it| Condition { object: it.object, problem: it.problem }));
        troubles.extend(self.traffic.held(LONG_STANDING).into_iter().map(|held| Condition {
            object: held.resource.to_string(),
            problem: format!(
                "{} requests have used it for up to {} s, {} more wait for it",
                held.standing,
                held.longest.as_secs(),
                held.waiting
            ),
        }));
        troubles.extend(self.turns.awaited().into_iter().filter(|it| it.lasts >= LONG_STANDING).map(|it| {
            let Awaited { container, lasts, waiting } = it;
            Condition {
                object: self.engine.describe(&container),
                problem: format!(
                    "its detaching has taken {} s so far, and {waiting} ADDs wait for an address, port or device that it holds",
                    lasts.as_secs()
                ),
            }
        }));
        troubles.extend(self.live_pods.conditions());
        troubles.extend(self.repairs.conditions());
        troubles.extend(self.drift.conditions(|key| self.sandbox_name(key)));
        troubles.extend(self.collector.troubles());
        troubles.extend(self.server.as_ref().and_then(|server| server.condition()));
        troubles.extend(self.no_group.clone());
        troubles.extend(self.left_alone());
        let left_over = self.left_over.load(Ordering::Relaxed);
        troubles.extend((left_over > 0).then(|| Condition {
            object: "earlier agents".to_owned(),
            problem: format!("their unfinished operations on {left_over} containers are being finished"),
        }));
        // Last, as there may be many.
        troubles.extend(self.in_pods.conditions(|attached| self.engine.is_same(attached)));
        troubles
    }

    /// Returns the records that the start could not take over and that still exist. Their pods keep
    /// working.
    fn left_alone(&self) -> Vec<Condition> {
        let mut left = locked(&self.left_alone);
        left.retain(|(key, _)| self.engine.has_record(key));
        let row = |(key, problem): &(JournalKey, String)| Condition {
            object: format!("container {}", key.container_id),
            problem: format!("its record is not taken over: {problem}"),
        };
        left.iter().take(drift::MOST_ROWS).map(row).collect()
    }

    /// Returns everything that differs from the objects, or that `netattachctl status` reports otherwise.
    pub(in crate::agent) fn conditions(&self) -> Vec<Condition> {
        let mut conditions = self.reporter.of_objects();
        conditions.extend(self.troubles());
        conditions
    }

    /// Reports a problem on the object that has it.
    pub(in crate::agent) fn report(&self, event: Event) {
        self.statuses.publisher.report(event);
    }

    /// Returns the conditions that an ADD depends on.
    pub(in crate::agent) fn conditions_of_ready(&self) -> Vec<Readiness> {
        self.reporter.ready()
    }

    fn status(&self) -> Status {
        self.health.look_soon();
        Status {
            collected: self.collector.collected(),
            ..self.reporter.status(&self.engine, self.troubles())
        }
    }

    /// Answers a query on a thread that may block, as the runtime's own threads must not.
    async fn question(self: &Arc<Self>, answer: impl FnOnce(&Self) -> Response + Send + 'static) -> Response {
        let Ok(_asked) = self.questions.try_acquire() else {
            return Response::Refused(format!("{MOST_QUESTIONS} questions are being answered; ask again"));
        };
        let agent = Arc::clone(self);
        own_thread::blocking(move || answer(&agent))
            .await
            .unwrap_or_else(|ending| Response::Refused(ending.to_string()))
    }

    /// Carries out a request, and logs its timings: at level debug, or at level info if it took long.
    fn timed(&self, request: &cni::Request, devices: &Asked, trace: &Trace) -> Result<Done, CniError> {
        let (done, times) = timing::operation(|| self.call_engine(request, devices));
        trace.worked(&times);
        if request.command == Command::Add && done.is_ok() {
            self.metrics.added(&times);
        }
        let (container, took_us) = (&request.container_id, times.total().as_micros());
        if times.total() >= SLOW {
            tracing::info!(target: TIMING, verb = %request.command, container, took_us, parts = %times, "slow");
        } else {
            tracing::debug!(target: TIMING, verb = %request.command, container, took_us, parts = %times, "done");
        }
        done
    }

    pub(in crate::agent) fn call_engine(
        &self,
        request: &cni::Request,
        devices: &Asked,
    ) -> Result<Done, CniError> {
        match request.command {
            Command::Add => {
                let (result, attached, is_new) = self.add(request, devices)?;
                if self.statuses.required {
                    self.publish_first(request, &attached.key, is_new)?;
                }
                crate::crash_point!("add", "answer");
                Ok(Done { stdout: cni::json::pretty(&result), made: Outcome::Added(attached) })
            }
            Command::Del => {
                let (container_id, ifname) = (request.container_id.clone(), request.ifname.clone());
                let key = JournalKey { container_id, ifname };
                let made = self.made_of(&key);
                let pod = self.engine.del(request)?;
                crate::crash_point!("del", "status");
                self.withdraw(pod.as_ref());
                Ok(Done { stdout: String::new(), made: Outcome::Removed(made) })
            }
            Command::Check => Ok(self.engine.check(request).map(|()| Done::default())?),
            // Answered without blocking.
            Command::Gc | Command::Status | Command::Version => Ok(Done::default()),
        }
    }

    /// All of an ADD but its publication.
    fn add(
        &self,
        request: &cni::Request,
        devices: &Asked,
    ) -> Result<(serde_json::Value, Arc<Attached>, bool), CniError> {
        self.check_publishable(request)?;
        let add = || -> Result<_, CniError> {
            if self.statuses.required {
                // It would wait for the same server as others that are being published.
                let needs = Footprint::from([Resource::Publication]);
                waits::admit(&needs).map_err(AttachError::from)?;
            }
            let (pod, mut intent) = timing::part("reading", || self.intents.read(request))?;
            devices::give(&self.engine, &mut intent, devices)?;
            Ok(self.engine.add(request, pod, &intent)?)
        };
        add().inspect_err(|_| locked(&self.required_status).ended_untried(Instant::now()))
    }

    /// Refuses an ADD that could not be published as it has to be, before it has any effect.
    ///
    /// # Errors
    /// Code 11.
    fn check_publishable(&self, request: &cni::Request) -> Result<(), CniError> {
        if !self.statuses.required {
            return Ok(());
        }
        let key = JournalKey { container_id: request.container_id.clone(), ifname: request.ifname.clone() };
        let reachable = self.intents.source.reachable().unwrap_or(Ok(()));
        // A sandbox that is already attached costs nothing, and its status may be unchanged.
        let may_begin = || {
            let is_attached = self.engine.registry().get(&key).is_some();
            is_attached || locked(&self.required_status).may_begin(reachable.is_ok(), Instant::now())
        };
        if !may_begin()
            && let Err(why) = &reachable
        {
            let msg = format!("network-status cannot be published, and kubernetes.status is required: {why}");
            return Err(CniError::new(code::TRY_AGAIN_LATER, msg));
        }
        Ok(())
    }

    /// Publishes the status of an ADD before its answer; the ADD fails if that fails.
    ///
    /// # Errors
    /// Code 11; the ADD is rolled back if it has attached anything.
    fn publish_first(
        &self,
        request: &cni::Request,
        sandbox: &JournalKey,
        is_new: bool,
    ) -> Result<(), CniError> {
        let attached = self.engine.registry().with_dynamic(sandbox);
        let Some((pod, entries)) = network_status(&attached, self.statuses.form) else { return Ok(()) };
        let published = waits::at(&Resource::Publication, || {
            self.statuses.publisher.publish_within(&pod, &entries, STATUS_PATIENCE)
        });
        {
            let (mut status, now) = (locked(&self.required_status), Instant::now());
            match &published {
                Err(error) if error.is_gone => status.ended_untried(now),
                outcome => status.ended(outcome.is_ok(), now),
            }
        }
        published.map_err(|error| {
            let mut failed = CniError::from_chain(code::TRY_AGAIN_LATER, &error);
            // The attachments of a running pod stay.
            if is_new {
                // The runtime sends a DEL too, which then finds nothing.
                match self.engine.del(request) {
                    // Otherwise the publisher would keep retrying the failed status.
                    Ok(pod) => self.withdraw(pod.as_ref()),
                    Err(left) => {
                        failed = failed.with_details(format!("not rolled back: {}", Chain(&left)));
                    }
                }
            }
            failed
        })
    }

    /// Compares the published status with that of a sandbox with these attachments.
    pub(in crate::agent) fn published(&self, attached: &[Arc<Attached>]) -> Published {
        let status = network_status(attached, self.statuses.form);
        status.map_or(Published::Unknown, |(pod, entries)| self.statuses.publisher.published(&pod, &entries))
    }

    /// See [`Publish::mark`].
    pub(in crate::agent) fn published_mark(&self, pod: &PodRef) -> Option<Mark> {
        self.statuses.publisher.mark(pod)
    }

    pub(in crate::agent) fn publish(&self, sandbox: &JournalKey) {
        let attached = self.engine.registry().with_dynamic(sandbox);
        let Some((pod, entries)) = network_status(&attached, self.statuses.form) else { return };
        if let Err(error) = self.statuses.publisher.publish(&pod, &entries) {
            tracing::warn!(error = %Chain(&error), "network-status not published");
        }
    }

    /// Withdraws the network-status of detached pods, except of pods that already have another sandbox.
    pub(in crate::agent) fn withdraw<'p>(&self, pods: impl IntoIterator<Item = &'p PodRef>) {
        for pod in pods {
            let (all, objects) = (self.engine.registry().all(), self.intents.source.snapshot());
            let of_others = all.iter().filter_map(|it| it.plan.sandbox.pod.as_ref());
            if status_stays(pod, of_others, objects.pods.get(&pod.name).map(|object| &**object)) {
                continue;
            }
            if let Err(error) = self.statuses.publisher.withdraw(pod) {
                tracing::warn!(error = %Chain(&error), "network-status not withdrawn");
            }
        }
    }
}

/// Whether the network-status of a detached pod belongs to another sandbox, one of `of_others`. `object`:
/// the source's pod of that name.
///
/// An earlier pod of the same name may stay attached for long, if its DEL fails or never comes. If the
/// object shows that the detached pod is the later one, the status belongs to no other sandbox.
fn status_stays<'a>(
    pod: &PodRef,
    of_others: impl IntoIterator<Item = &'a PodRef>,
    object: Option<&Pod>,
) -> bool {
    let is_latest = pod.uid.is_some() && object.is_some_and(|object| object.uid.is_some() && pod.is(object));
    of_others.into_iter().any(|other| other.may_be(pod) || (other.name == pod.name && !is_latest))
}

/// Refuses an operation whose client has hung up while the request waited. The runtime considers such an
/// ADD failed, and a DEL of the container may already have been carried out: no later DEL would remove the
/// attachment.
///
/// # Errors
/// Code 11, for the log.
pub(super) fn check_awaited(reply: &Reply) -> Result<(), CniError> {
    match reply.is_abandoned() {
        true => Err(CniError::new(code::TRY_AGAIN_LATER, "the client has hung up before it began")),
        false => Ok(()),
    }
}

fn too_many(class: Class) -> CniError {
    let verb = match class {
        Class::Add => "ADD",
        Class::Del => "DEL",
        Class::Check => "CHECK",
    };
    CniError::new(code::TRY_AGAIN_LATER, format!("too many {verb} requests are waiting"))
}

/// Runs blocking work, such as netlink, files and other plugins, on a thread that may block
/// ([`own_thread`]).
pub(in crate::agent) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, CniError> + Send + 'static,
) -> Result<T, CniError> {
    own_thread::blocking(work)
        .await
        .unwrap_or_else(|ending| Err(CniError::new(code::TRY_AGAIN_LATER, ending.to_string())))
}

/// The result of an operation.
#[derive(Debug, Default)]
pub(in crate::agent) struct Done {
    /// The text for standard output.
    stdout: String,
    pub(in crate::agent) made: Outcome,
}

/// The changes made by an operation.
#[derive(Debug, Default)]
pub(in crate::agent) enum Outcome {
    /// Nothing.
    #[default]
    Nothing,
    /// The sandbox is attached; its status is to be published.
    Added(Arc<Attached>),
    /// The sandbox's attachments have been removed.
    Removed(Made),
}

impl Outcome {
    /// Returns the sandbox that has been attached.
    fn added(&self) -> Option<&Arc<Attached>> {
        match self {
            Self::Added(attached) => Some(attached),
            Self::Nothing | Self::Removed(_) => None,
        }
    }

    /// Converts to the form that the log uses.
    pub(in crate::agent) fn in_words(self) -> Made {
        match self {
            Self::Nothing => Made::default(),
            Self::Added(attached) => Made::of(&[attached]),
            Self::Removed(made) => made,
        }
    }
}

/// A call, with the data for its answer.
#[derive(Debug)]
struct Answering {
    asked: request_log::Asked,
    trace: Arc<Trace>,
    begun: Instant,
    reply: Arc<Reply>,
}

/// The agent as the request handler of the socket.
#[derive(Debug, Clone)]
pub(in crate::agent) struct Served(pub(in crate::agent) Arc<Agent>);

impl Handler for Served {
    async fn handle(&self, request: Request, reply: &Arc<Reply>) -> Option<Response> {
        let agent = &self.0;
        let answer = match request {
            Request::Cni(call) => return agent.cni(call, reply).await.map(Response::Cni),
            Request::Attach(call) => agent.attach(call, Some(Arc::clone(reply))).await,
            Request::Detach(call) => agent.detach(call).await,
            Request::Attachments => {
                agent.question(|it| Response::Attachments(it.reporter.attachments(&it.engine))).await
            }
            Request::Stats => {
                agent.question(|it| or_refused(it.reporter.stats(&it.engine).map(Response::Stats))).await
            }
            Request::PolicyDump(wanted) => {
                let dump = move |it: &Agent| Response::PolicyDump(it.reporter.policy_dump(wanted.as_deref()));
                agent.question(dump).await
            }
            Request::Explain(question) => {
                let explain = move |it: &Agent| {
                    it.reporter.explain(question).map_or_else(Response::Failed, Response::Explanation)
                };
                agent.question(explain).await
            }
            Request::Policy => {
                agent.question(|it| or_refused(it.reporter.policy(&it.engine).map(Response::Policy))).await
            }
            Request::Flows(call) => {
                agent
                    .question(move |it| or_refused(it.reporter.flows(&it.engine, call).map(Response::Flows)))
                    .await
            }
            Request::Pools => {
                agent.question(|it| Response::Pools(it.reporter.pools(&it.engine, &it.intents))).await
            }
            Request::Networks => agent.question(|it| Response::Networks(pools::networks(&it.intents))).await,
            Request::Select(selector) => {
                let select = move |it: &Agent| {
                    it.reporter
                        .select(&selector)
                        .map_or_else(|error| Response::Refused(error.to_string()), Response::Selected)
                };
                agent.question(select).await
            }
            Request::Status => agent.question(|it| Response::Status(Box::new(it.status()))).await,
        };
        Some(answer)
    }
}

fn or_refused(answer: Result<Response, EnforceError>) -> Response {
    answer.unwrap_or_else(|error| Response::Refused(Chain(&error).to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::{ObjectName, Phase, Powers};

    #[test]
    fn the_sandbox_of_an_earlier_pod_of_the_name_keeps_no_status_of_a_later_one() {
        let of = |name: &str, uid: Option<&str>| PodRef {
            name: ObjectName::new("shop", name),
            uid: uid.map(str::to_owned),
        };
        let object = |uid: Option<&str>| Pod {
            name: ObjectName::new("shop", "db-0"),
            uid: uid.map(str::to_owned),
            mirror_of: None,
            labels: Default::default(),
            annotations: Default::default(),
            phase: Phase::Failed,
            host_network: false,
            ports: Vec::new(),
            powers: Powers::default(),
            on_this_node: true,
            terminating: false,
        };
        let [old, new, unnamed] =
            ["old", "new", ""].map(|uid| of("db-0", Some(uid).filter(|uid| !uid.is_empty())));
        let other = of("db-1", Some("new"));
        let (is_new, is_unknown) = (object(Some("new")), object(None));
        let rows = [
            ("there is no other", &new, vec![&other], Some(&is_new), false),
            ("its own next sandbox", &new, vec![&new], Some(&is_new), true),
            ("of an earlier pod", &new, vec![&old], Some(&is_new), false),
            ("of an earlier pod and its own", &new, vec![&old, &new], Some(&is_new), true),
            ("of the later pod", &old, vec![&new], Some(&is_new), true),
            ("the object is gone", &new, vec![&old], None, true),
            ("a manifest without a uid", &new, vec![&old], Some(&is_unknown), true),
            ("a runtime that names no uid", &unnamed, vec![&old], Some(&is_new), true),
            ("another sandbox of such a runtime", &new, vec![&unnamed], Some(&is_new), true),
        ];
        for (what, pod, of_others, object, stays) in rows {
            assert_eq!(status_stays(pod, of_others, object), stays, "{what}");
        }
    }
}
