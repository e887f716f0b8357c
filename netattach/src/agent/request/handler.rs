//! Answers requests: CNI calls through the engine, queries from memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::OwnedSemaphorePermit;

use super::devices::{self, Asked};
use super::request_log::{self, Made};
use crate::agent::Agent;
use crate::agent::admission::lanes::Class;
use crate::agent::admission::places::MOST_QUESTIONS;
use crate::agent::monitoring::events;
use crate::agent::monitoring::traces::Trace;
use crate::agent::report::pools;
use crate::attach::{AttachError, Attached};
use crate::cni::{self, CniError, Command, code};
use crate::enforce::error::EnforceError;
use crate::error_chain::Chain;
use crate::journal::JournalKey;
use crate::own_thread;
use crate::rpc::message::{CniCall, CniReply, Request, Response};
use crate::rpc::server::{Handler, Reply};
use crate::rpc::shim::TRACE_VARIABLE;
use crate::timing::{self, Times};
use crate::waits::{self, Footprint, Resource};

/// A request that takes at least this long is logged with its timings.
const SLOW: Duration = Duration::from_secs(1);

/// Log target of the timing lines.
const TIMING: &str = "netattach::timing";

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
                agent.reporter.refresh_flows().await;
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

impl Agent {
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
        let trace = Arc::new(self.monitoring.begin(call.variable(TRACE_VARIABLE)));
        // The call may be large, and waiting may take long.
        drop(call);
        let added = asked.added_pod();
        if let Some(pod) = &added {
            self.pods.asked_for(pod);
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
            self.pods.asked_for(&pod);
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
        self.monitoring.answered(trace, asked.verb(), || asked.attributes(), error, took);
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
            let (done, times) = agent.timed(&request, &devices, &answering.trace);
            let Done { stdout, made } = done.inspect_err(|_| log_times(&request, &times))?;
            agent.admission.turns().finish(&request.container_id);
            let publish = made.added().map(|attached| attached.key.clone());
            agent.answer(&answering, stdout, || made.in_words());
            log_times(&request, &times);
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
    /// Code 11: other large ADDs hold the memory for long.
    async fn ready_to_add(
        &self,
        request: &cni::Request,
        devices: &Asked,
    ) -> Result<Option<OwnedSemaphorePermit>, CniError> {
        let Some((pod, networks)) = self.intents.await_pod(request).await else { return Ok(None) };
        self.ask_for_devices(&pod, &networks, devices).await;
        self.admission.memory_for(self.intents.weight(&networks)).await
    }

    /// Answers a query on a thread that may block, as the runtime's own threads must not.
    async fn question(self: &Arc<Self>, answer: impl FnOnce(&Self) -> Response + Send + 'static) -> Response {
        let Some(_asked) = self.admission.ask() else {
            return Response::Refused(format!("{MOST_QUESTIONS} questions are being answered; ask again"));
        };
        let agent = Arc::clone(self);
        own_thread::blocking(move || answer(&agent))
            .await
            .unwrap_or_else(|ending| Response::Refused(ending.to_string()))
    }

    /// Carries out a request. Returns its timings too, for [`log_times`].
    fn timed(
        &self,
        request: &cni::Request,
        devices: &Asked,
        trace: &Trace,
    ) -> (Result<Done, CniError>, Times) {
        let (done, times) = timing::operation(|| self.call_engine(request, devices));
        trace.worked(&times);
        if request.command == Command::Add && done.is_ok() {
            self.monitoring.metrics().added(&times);
        }
        (done, times)
    }

    pub(in crate::agent) fn call_engine(
        &self,
        request: &cni::Request,
        devices: &Asked,
    ) -> Result<Done, CniError> {
        match request.command {
            Command::Add => {
                let (result, attached, is_new) = self.add(request, devices)?;
                if self.statuses.are_required() {
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
            if self.statuses.are_required() {
                // It would wait for the same server as others that are being published.
                let needs = Footprint::from([Resource::Publication]);
                waits::admit(&needs).map_err(AttachError::from)?;
            }
            let (pod, mut intent) = timing::part("reading", || self.intents.read(request))?;
            devices::give(&self.engine, &mut intent, devices)?;
            Ok(self.engine.add(request, pod, &intent)?)
        };
        add().inspect_err(|_| self.statuses.ended_untried())
    }
}

/// Logs the timings of a request, after its answer if that is a success: at level debug, or at level info if it took
/// long.
fn log_times(request: &cni::Request, times: &Times) {
    let (container, took_us) = (&request.container_id, times.total().as_micros());
    if times.total() >= SLOW {
        tracing::info!(target: TIMING, verb = %request.command, container, took_us, parts = %times, "slow");
    } else {
        tracing::debug!(target: TIMING, verb = %request.command, container, took_us, parts = %times, "done");
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

fn or_refused(answer: Result<Response, EnforceError>) -> Response {
    answer.unwrap_or_else(|error| Response::Refused(Chain(&error).to_string()))
}
