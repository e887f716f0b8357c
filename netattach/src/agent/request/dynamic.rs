//! Requests to attach a live sandbox to one more network and to detach it again: from other controllers on the agent's
//! socket, and from users of `netattachctl attach`.

use std::future::ready;
use std::sync::Arc;
use std::time::Instant;

use super::devices::{self, Asked};
use super::handler::check_awaited;
use super::request_log::{AskedLive, Made};
use crate::agent::Agent;
use crate::agent::admission::lanes::Class;
use crate::agent::monitoring::traces::Trace;
use crate::attach::{Attached, IntentError, selected_by};
use crate::cni::{CniError, Value, code};
use crate::journal::JournalKey;
use crate::npwg::NetworkRef;
use crate::plan::AttachmentPlan;
use crate::rpc::message::{AttachCall, AttachmentName, DetachCall, Dynamic, Failure, Response, SandboxName};
use crate::rpc::server::Reply;
use crate::timing;

/// Longest requester name, in bytes: the limit of a DNS name.
const LONGEST_BY: usize = 253;
/// Most defined networks that an error lists.
const LISTED: usize = 10;

impl Agent {
    /// Attaches. The status is published after the answer, as after ADD. `client`: the caller, which must
    /// still be connected when the work begins; `None`: the agent itself is the caller.
    pub(in crate::agent) async fn attach(
        self: &Arc<Self>,
        call: AttachCall,
        client: Option<Arc<Reply>>,
    ) -> Response {
        let (of, what) = (call.sandbox.clone(), call.selection.to_string());
        let asked = AskedLive { verb: "attach", sandbox: of, what };
        let live = Live::begin(self, asked, call.traceparent.as_deref());
        let asked = check_by(&call.by).and_then(|()| self.sandbox(&call.sandbox));
        let sandbox = match asked {
            Ok(sandbox) => sandbox,
            Err(error) => return live.failed(None, &Made::default(), &error),
        };
        let key = sandbox.key.clone();
        let wanted = selected_by(sandbox.plan.sandbox.pod.as_ref(), &call.selection);
        let failed = |error: &CniError| live.failed(Some(&key), &Made::named(wanted.as_slice()), error);
        let devices = Arc::new(Asked::new());
        let asking = Arc::clone(&devices);
        let (agent, of_pod, element) = (Arc::clone(self), Arc::clone(&sandbox), call.selection.clone());
        let first = async move {
            let pod = of_pod.plan.sandbox.pod.as_ref();
            agent.ask_for_device_of_one_more(pod, &element, &asking).await;
            agent.admission.memory_for(agent.intents.weight_of_one_more(pod, &element)).await
        };
        let trace = Arc::clone(&live.trace);
        let work = move |agent: &Self| -> Result<Result<(Value, Arc<Attached>), CniError>, CniError> {
            client.as_deref().map_or(Ok(()), check_awaited)?;
            let wanted = agent.intents.one_more(sandbox.plan.sandbox.pod.as_ref(), &call.selection);
            if let Err(IntentError::UnknownNetwork(network)) = &wanted {
                return Ok(Err(agent.no_network(network)));
            }
            let mut wanted = wanted?;
            let of_pod = agent.engine.registry().with_dynamic(&sandbox.key);
            devices::give_one(&agent.engine, &mut wanted, &devices, &of_pod)?;
            Ok(Ok(agent.engine.attach(&sandbox.key, &call.by, &wanted)?))
        };
        let done =
            self.in_turn(&key.container_id, Class::Add, first, move |agent| traced(&trace, || work(agent)));
        match done.await {
            Ok((Ok((result, attached)), turn)) => {
                live.ended(Some(&key), &Made::of(&[Arc::clone(&attached)]), None);
                self.finish_later(attached.key.clone());
                self.publish_later(key, turn);
                answer(result, &attached)
            }
            Ok((Err(missing), _)) => match failed(&missing) {
                Response::Failed(failure) => Response::Failed(Failure { not_there: true, ..failure }),
                other => other,
            },
            Err(error) => failed(&error),
        }
    }

    /// Detaches. An interface that is not attached counts as detached, unless the call requires it to be attached; the
    /// sandbox must exist.
    pub(in crate::agent) async fn detach(self: &Arc<Self>, call: DetachCall) -> Response {
        let (of, what) = (call.sandbox.clone(), call.ifname.clone());
        let asked = AskedLive { verb: "detach", sandbox: of, what };
        let live = Live::begin(self, asked, call.traceparent.as_deref());
        let key = match self.sandbox(&call.sandbox) {
            Ok(sandbox) => sandbox.key.clone(),
            Err(error) => return live.failed(None, &Made::default(), &error),
        };
        let sandbox = key.clone();
        let trace = Arc::clone(&live.trace);
        let done = self.in_turn(&key.container_id, Class::Del, ready(Ok(None)), move |agent| {
            let made = agent.made_at(&sandbox, &call.ifname);
            let found = traced(&trace, || agent.engine.detach(&sandbox, &call.ifname))?;
            if found || !call.must_be_attached { Ok(made) } else { Err(agent.not_dynamic(&sandbox, &call)) }
        });
        match done.await {
            Ok((made, turn)) => {
                live.ended(Some(&key), &made, None);
                self.publish_later(key, turn);
                Response::Detached
            }
            Err(error) => live.failed(Some(&key), &self.made_at(&key, &live.asked.what), &error),
        }
    }

    /// Returns what was attached to the live sandbox at that interface.
    fn made_at(&self, sandbox: &JournalKey, ifname: &str) -> Made {
        let mut found = self.engine.registry().with_dynamic(sandbox);
        found.retain(|attached| attached.plan.dynamic.is_some() && attached.key.ifname == ifname);
        Made::of(&found)
    }

    /// Returns the error that a network is not defined, with the defined ones.
    fn no_network(&self, network: &NetworkRef) -> CniError {
        let objects = self.intents.source.snapshot();
        let NetworkRef { namespace, .. } = network;
        let there = objects.definitions.keys().filter(|other| other.namespace == *namespace);
        let mut names: Vec<&str> = there.map(|other| other.name.as_str()).collect();
        let more = names.len().saturating_sub(LISTED);
        names.truncate(LISTED);
        let mut listed = names.join(", ");
        if more > 0 {
            listed.push_str(&format!(" and {more} more"));
        }
        let names = if listed.is_empty() { "no network".to_owned() } else { listed };
        let msg = format!("network {network} is not defined; namespace {namespace} has {names}");
        CniError::new(code::INVALID_CONFIG, msg)
    }

    /// Returns the error that a sandbox has nothing to detach at an interface, with the interfaces that can
    /// be detached.
    fn not_dynamic(&self, sandbox: &JournalKey, call: &DetachCall) -> CniError {
        let all = self.engine.registry().all();
        let live = all.iter().filter(|it| it.plan.dynamic.is_some());
        let of_sandbox = live.filter(|it| it.key.container_id == sandbox.container_id);
        let names: Vec<&str> = of_sandbox.map(|it| it.key.ifname.as_str()).collect();
        let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        let DetachCall { sandbox, ifname, .. } = call;
        let msg = format!(
            "{sandbox} has no interface {ifname} that was attached while it was live; it has {names}"
        );
        CniError::new(code::UNKNOWN_CONTAINER, msg)
    }

    /// Returns the only attached sandbox of that name.
    fn sandbox(&self, name: &SandboxName) -> Result<Arc<Attached>, CniError> {
        let is_named = |attached: &Attached| match name {
            SandboxName::Container(id) => attached.key.container_id == *id,
            SandboxName::Pod(name) => attached.plan.sandbox.pod.as_ref().is_some_and(|pod| pod.name == *name),
        };
        let mut found = self.engine.registry().all();
        found.retain(|attached| attached.plan.dynamic.is_none() && is_named(attached));
        match found.as_slice() {
            [sandbox] => Ok(Arc::clone(sandbox)),
            [] => Err(CniError::new(
                code::UNKNOWN_CONTAINER,
                format!(
                    "{name} is not attached on this node; netattachctl attachments lists what is attached"
                ),
            )),
            several => {
                let keys = several.iter().map(|attached| &attached.key);
                let names: Vec<String> =
                    keys.map(|key| format!("{} ({})", key.container_id, key.ifname)).collect();
                let msg = format!("{name} has several sandboxes on this node: {}", names.join(", "));
                Err(CniError::new(code::INVALID_ENVIRONMENT, msg))
            }
        }
    }
}

fn check_by(by: &str) -> Result<(), CniError> {
    if (1..=LONGEST_BY).contains(&by.len()) && by.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(());
    }
    let msg = format!(
        "by is {by:?}, but must name the requester: 1 to {LONGEST_BY} printable bytes without spaces"
    );
    Err(CniError::new(code::INVALID_CONFIG, msg))
}

fn answer(result: Value, attached: &Attached) -> Response {
    let pod = attached.plan.sandbox.pod.as_ref();
    let attachment = attached.plan.attachments.first();
    Response::Attached(Box::new(Dynamic {
        name: AttachmentName {
            id: attachment.and_then(AttachmentPlan::number),
            pod: pod.map(|pod| pod.name.clone()),
            network: attachment.map(|attachment| attachment.network.to_string()).unwrap_or_default(),
            ifname: attached.key.ifname.clone(),
        },
        container_id: attached.key.container_id.clone(),
        result,
    }))
}

/// Does the work of a request, and records its timings in the trace.
fn traced<T>(trace: &Trace, work: impl FnOnce() -> T) -> T {
    let (done, times) = timing::operation(work);
    trace.worked(&times);
    done
}

/// A request that is being answered: its outcome is counted, logged and traced.
struct Live<'a> {
    agent: &'a Agent,
    asked: AskedLive,
    begun: Instant,
    trace: Arc<Trace>,
}

impl<'a> Live<'a> {
    fn begin(agent: &'a Agent, asked: AskedLive, parent: Option<&str>) -> Self {
        let trace = Arc::new(agent.monitoring.begin(parent));
        Self { agent, asked, begun: Instant::now(), trace }
    }

    /// `sandbox`: the sandbox of the request, if it was found.
    fn ended(&self, sandbox: Option<&JournalKey>, made: &Made, error: Option<&CniError>) {
        let (verb, took) = (self.asked.verb, self.begun.elapsed());
        let container = sandbox.map(|sandbox| sandbox.container_id.as_str());
        let attributes = || self.asked.attributes(container);
        self.agent.monitoring.answered(&self.trace, verb, attributes, error, took);
        self.asked.answered(container, made, error, took);
    }

    fn failed(&self, sandbox: Option<&JournalKey>, made: &Made, error: &CniError) -> Response {
        self.ended(sandbox, made, Some(error));
        failed(error)
    }
}

fn failed(error: &CniError) -> Response {
    let separator = if error.details.is_empty() { "" } else { ": " };
    Response::Failed(Failure {
        code: error.code,
        message: format!("{}{separator}{}", error.msg, error.details),
        not_there: error.code == code::UNKNOWN_CONTAINER,
    })
}
