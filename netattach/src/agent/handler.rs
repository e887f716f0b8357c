//! Answers requests: CNI calls by way of the engine, questions from memory.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};

use super::failure::Asked;
use super::health::Health;
use super::report::Reporter;
use super::serial::{Turn, Turns};
use crate::attach::{Engine, IntentReader, StatusFiles};
use crate::cni::{self, CniError, Command, code};
use crate::journal::Key;
use crate::plan::PodRef;
use crate::report::Chain;
use crate::rpc::message::{CniCall, CniReply, Request, Response};
use crate::rpc::server::Handler;

/// How many DELs run at a time. They mostly wait for the kernel, and share its grace periods when they do so
/// together, so there may be many; ADDs never wait for them.
const PARALLEL_DELS: usize = 64;

/// How long the status waits, so that it does not compete with the answer for a processor.
const PUBLISH_AFTER: Duration = Duration::from_millis(2);

/// What requests are answered with.
#[derive(Debug)]
pub(super) struct Agent {
    pub(super) engine: Arc<Engine>,
    pub(super) intents: Arc<IntentReader>,
    pub(super) status: StatusFiles,
    pub(super) reporter: Reporter,
    health: Arc<Health>,
    turns: Turns,
    pub(super) adds: Semaphore,
    pub(super) dels: Semaphore,
}

impl Agent {
    pub(super) fn new(
        engine: Arc<Engine>,
        intents: Arc<IntentReader>,
        status: StatusFiles,
        reporter: Reporter,
        health: Arc<Health>,
        parallel_adds: usize,
    ) -> Self {
        Self {
            engine,
            intents,
            status,
            reporter,
            health,
            turns: Turns::default(),
            adds: Semaphore::new(parallel_adds),
            dels: Semaphore::new(PARALLEL_DELS),
        }
    }

    /// One CNI call, answered as the executable has to answer it.
    pub(super) async fn cni(self: &Arc<Self>, call: CniCall) -> CniReply {
        let version = cni::request::error_version(call.stdin.as_bytes());
        let asked = Asked::of(&call);
        match self.dispatch(call).await {
            Ok(stdout) => CniReply { stdout, exit: 0 },
            Err(error) => {
                asked.failed(&error);
                CniReply { stdout: error.to_json(version), exit: 1 }
            }
        }
    }

    async fn dispatch(self: &Arc<Self>, call: CniCall) -> Result<String, CniError> {
        let request = cni::Request::parse(&call.env, call.stdin.as_bytes())?;
        let lane = match request.command {
            Command::Version => return Ok(cni::json::pretty(&cni::request::version_reply())),
            Command::Status => return self.health.answer(&request.path).map(|()| String::new()),
            Command::Gc => return self.gc(request).await,
            Command::Del => &self.dels,
            Command::Add | Command::Check => &self.adds,
        };
        let container = request.container_id.clone();
        let ((stdout, publish), turn) =
            self.in_turn(&container, lane, move |agent| agent.blocking(&request)).await?;
        if let Some(sandbox) = publish {
            self.publish_later(sandbox, turn);
        }
        Ok(stdout)
    }

    /// Works in the container's turn, when there is a place in the lane. The turn is handed on, for what belongs to
    /// the operation and need not be waited for.
    pub(super) async fn in_turn<T: Send + 'static>(
        self: &Arc<Self>,
        container: &str,
        lane: &Semaphore,
        work: impl FnOnce(&Self) -> Result<T, CniError> + Send + 'static,
    ) -> Result<(T, Turn), CniError> {
        let turn = self.turns.wait(container).await;
        let _permit: SemaphorePermit<'_> = lane
            .acquire()
            .await
            .map_err(|_| CniError::new(code::TRY_AGAIN_LATER, "the agent is shutting down"))?;
        let agent = Arc::clone(self);
        let worked = blocking(move || work(&agent)).await?;
        Ok((worked, turn))
    }

    /// Publishes the status of the sandbox within its turn: whoever asked does not wait for it, the container's next
    /// operation does.
    pub(super) fn publish_later(self: &Arc<Self>, sandbox: Key, turn: Turn) {
        let agent = Arc::clone(self);
        tokio::spawn(async move {
            tokio::time::sleep(PUBLISH_AFTER).await;
            let published = tokio::task::spawn_blocking(move || agent.publish(&sandbox)).await;
            if let Err(error) = published {
                tracing::error!(%error, "network-status not published");
            }
            drop(turn);
        });
    }

    /// What goes to standard output, and whose status is to be published.
    fn blocking(&self, request: &cni::Request) -> Result<(String, Option<Key>), CniError> {
        let done = |()| (String::new(), None);
        match request.command {
            Command::Add => {
                let (pod, intent) = self.intents.read(request)?;
                let (result, attached) = self.engine.add(request, pod, &intent)?;
                crate::crash_point!("add", "answer");
                Ok((cni::json::pretty(&result), Some(attached.key)))
            }
            Command::Del => {
                let pod = self.engine.del(request)?;
                crate::crash_point!("del", "status");
                self.withdraw(pod.as_ref());
                Ok(done(()))
            }
            Command::Check => Ok(self.engine.check(request).map(done)?),
            // Answered without blocking.
            Command::Gc | Command::Status | Command::Version => Ok(done(())),
        }
    }

    fn publish(&self, sandbox: &Key) {
        if let Err(error) = self.status.publish(&self.engine.registry().with_dynamic(sandbox)) {
            tracing::warn!(error = %Chain(&error), "network-status not published");
        }
    }

    /// Pods that were detached have no network-status, unless they have another sandbox already.
    fn withdraw<'p>(&self, pods: impl IntoIterator<Item = &'p PodRef>) {
        for pod in pods {
            let is_same = |other: &PodRef| (&other.namespace, &other.name) == (&pod.namespace, &pod.name);
            if self.engine.registry().all().iter().any(|it| it.plan.sandbox.pod.as_ref().is_some_and(is_same))
            {
                continue;
            }
            if let Err(error) = self.status.withdraw(pod) {
                tracing::warn!(error = %Chain(&error), "network-status not withdrawn");
            }
        }
    }

    async fn gc(self: &Arc<Self>, request: cni::Request) -> Result<String, CniError> {
        let _alone = self.turns.wait_for_all().await;
        let agent = Arc::clone(self);
        blocking(move || {
            let collected = agent.engine.gc(&request, &agent.intents.defined());
            agent.withdraw(&collected.pods);
            collected.outcome().map(|()| String::new())
        })
        .await
    }
}

/// Netlink, files and other plugins block; a thread that may block does it.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, CniError> + Send + 'static,
) -> Result<T, CniError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|panic| {
        Err(CniError::new(code::INTERNAL, "the agent failed in an unforeseen way; its log has the place")
            .with_details(panic.to_string()))
    })
}

/// The agent as the socket sees it.
#[derive(Debug, Clone)]
pub(super) struct Served(pub(super) Arc<Agent>);

impl Handler for Served {
    async fn handle(&self, request: Request) -> Response {
        let agent = &self.0;
        match request {
            Request::Cni(call) => Response::Cni(agent.cni(call).await),
            Request::Attach(call) => agent.attach(call).await,
            Request::Detach(call) => agent.detach(call).await,
            Request::Attachments => Response::Attachments(agent.reporter.attachments(&agent.engine)),
            Request::Stats => match agent.reporter.stats(&agent.engine) {
                Ok(rows) => Response::Stats(rows),
                Err(error) => Response::Refused(Chain(&error).to_string()),
            },
            Request::PolicyDump(wanted) => {
                Response::PolicyDump(agent.reporter.policy_dump(wanted.as_deref()))
            }
            Request::Explain(question) => {
                agent.reporter.explain(&question).map_or_else(Response::Failed, Response::Explanation)
            }
            Request::Policy => match agent.reporter.policy(&agent.engine) {
                Ok(report) => Response::Policy(report),
                Err(error) => Response::Refused(Chain(&error).to_string()),
            },
            Request::Flows(call) => match agent.reporter.flows(&agent.engine, call) {
                Ok(report) => Response::Flows(report),
                Err(error) => Response::Refused(Chain(&error).to_string()),
            },
            Request::Status => Response::Status(Box::new(agent.reporter.status(&agent.engine))),
        }
    }
}
