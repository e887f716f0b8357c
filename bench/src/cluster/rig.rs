//! The API server and the agent that follows it.

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use netattach_tests::api_server::{ApiServer, Credential, Options, Request, TOKEN, Verb};
use serde_json::Value;

use crate::agent::{self, Agent, NAMESPACE};
use crate::pods::{Node, Pod};

/// Longer than any wait.
const PATIENCE: Duration = Duration::from_secs(120);

/// A cluster of one node with an agent, and of others that are only objects.
pub(crate) struct Cluster {
    pub(crate) agent: Agent,
    pub(crate) server: ApiServer,
}

/// Requests to the API server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub(super) struct Calls {
    pub(super) reads: usize,
    pub(super) writes: usize,
}

/// Starts the API server, in the calling thread's namespace. Its bookmarks are as frequent as those of a real one.
pub(crate) fn serve(node: &Node, objects: &[Value]) -> anyhow::Result<(ApiServer, PathBuf)> {
    let options = Options { bookmarks: Duration::from_secs(60), ..Options::default() };
    let server = ApiServer::start(&options).context("start the API server")?;
    for object in objects {
        server.create(object).context("create an object")?;
    }
    let path = node.scratch().join("kubeconfig");
    let kubeconfig = server.kubeconfig(&path, &Credential::Token(TOKEN))?;
    Ok((server, kubeconfig))
}

impl Cluster {
    /// Starts an agent that follows the server, and waits until it has read everything.
    pub(crate) fn start(node: &Node, server: ApiServer, kubeconfig: PathBuf) -> anyhow::Result<Self> {
        let agent = Agent::start_in(node, kubeconfig)?;
        let cluster = Self { agent, server };
        cluster.wait_until("the agent follows the cluster", || Ok(cluster.is_synced()))?;
        Ok(cluster)
    }

    /// Whether the agent has read everything; it is not ready before, and its status is an error.
    pub(super) fn is_synced(&self) -> bool {
        self.source().is_ok_and(|source| source["met"] == true)
    }

    /// The number of definitions that the agent knows.
    pub(super) fn definitions(&self) -> anyhow::Result<usize> {
        let source = self.source()?;
        let detail = source["detail"].as_str().unwrap_or_default();
        let count = detail.split(", ").find_map(|part| part.strip_suffix(" networks")?.parse().ok());
        Ok(count.unwrap_or_default())
    }

    fn source(&self) -> anyhow::Result<Value> {
        let status = self.agent.ask(&["status"])?;
        let ready = status["ready"].as_array().into_iter().flatten();
        let source = ready.into_iter().find(|row| row["condition"] == "source");
        source.cloned().context("the status says nothing of the source")
    }

    /// Waits until the agent knows at least that many attached pods of the cluster: it reads them a few seconds later
    /// if nothing waits for them.
    pub(crate) fn knows_attached(&self, least: u32) -> anyhow::Result<()> {
        let count = |part: &str| part.strip_suffix(" attached pods of the cluster")?.parse::<u32>().ok();
        self.wait_until("the pods of other nodes are known", || {
            let source = self.source()?;
            let mut counts = source["detail"].as_str().unwrap_or_default().split(", ").filter_map(count);
            Ok(counts.any(|count| count >= least))
        })
    }

    /// Repeats a call until the condition holds.
    pub(super) fn wait_until(
        &self,
        what: &str,
        mut is_so: impl FnMut() -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !is_so()? {
            if Instant::now() > deadline {
                bail!("it does not come about that {what}; the agent's log ends:\n{}", self.end_of_log());
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    fn end_of_log(&self) -> String {
        let log = self.agent.log().unwrap_or_default();
        let lines: Vec<&str> = log.lines().filter(|line| !line.contains("netattach::timing")).collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }

    /// Waits until the agent has finished its work, and has returned free memory.
    pub(super) fn settle(&self) -> anyhow::Result<()> {
        self.has_settled(self.agent.settle(PATIENCE)?)
    }

    /// Waits until the agent is idle.
    pub(super) fn rest(&self) -> anyhow::Result<()> {
        self.has_settled(self.agent.rest(PATIENCE)?)
    }

    fn has_settled(&self, it_has: bool) -> anyhow::Result<()> {
        ensure!(it_has, "the agent does not come to rest; its log ends:\n{}", self.end_of_log());
        Ok(())
    }

    /// Waits until a pod's status is written.
    pub(super) fn published(&self, mark: usize, pod: &Pod) -> anyhow::Result<()> {
        let name = agent::pod_name(pod);
        let is_write = |one: &Request| {
            one.verb == Verb::Patch && one.name.as_deref() == Some(&name) && one.answer == Some(200)
        };
        let written = self.server.wait_for(mark, |requests| requests.iter().any(is_write));
        ensure!(written, "the status of {name} is not written:\n{}", self.end_of_log());
        Ok(())
    }

    /// The requests after a mark, other than watches and events.
    pub(super) fn calls(&self, mark: usize) -> Calls {
        let requests = self.server.requests_since(mark);
        let calls = requests.iter().filter(|one| one.is_call() && one.resource != "events");
        let (reads, writes): (Vec<_>, Vec<_>) =
            calls.partition(|one| matches!(one.verb, Verb::Get | Verb::List));
        Calls { reads: reads.len(), writes: writes.len() }
    }

    /// A pod ends: the kubelet has marked it before the runtime detaches it.
    pub(super) fn end(&self, pod: &Pod) -> anyhow::Result<()> {
        self.server.begin_deletion("pods", NAMESPACE, &agent::pod_name(pod))?;
        Ok(())
    }

    /// Deletes the object of an ended pod.
    pub(super) fn remove(&self, pod: &Pod) -> anyhow::Result<()> {
        self.server.delete("pods", NAMESPACE, &agent::pod_name(pod))
    }
}
