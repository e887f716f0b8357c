//! Runs a command in an agent's pod, as `kubectl exec` does: for `kubectl netattach`. It needs no open
//! port: the API server forwards the request to the kubelet, and the right to `create pods/exec` decides
//! who may run commands.

use std::path::PathBuf;
use std::time::Duration;

use ::kube::api::{AttachParams, ListParams};
use ::kube::client::ClientBuilder;
use ::kube::config::{Config, KubeConfigOptions, Kubeconfig, KubeconfigError};
use ::kube::{Api, Client};
use http::Request;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt};

use crate::objects::ObjectName;

/// Timeout of connecting.
const CONNECT: Duration = Duration::from_secs(10);
/// Timeout of listing the agents.
const LIST: Duration = Duration::from_secs(30);
/// Most agents that are listed.
const MOST_AGENTS: u32 = 5000;
/// Size of one read, in bytes.
const PIECE: usize = 32 << 10;

/// The cluster and the identity to use.
#[derive(Debug, Clone, Default)]
pub struct Target {
    /// The kubeconfig; otherwise that of the environment, as kubectl finds it.
    pub kubeconfig: Option<PathBuf>,
    /// Its context; otherwise the current one.
    pub context: Option<String>,
}

/// A user's connection to a cluster.
pub struct Remote {
    client: Client,
}

impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Remote").finish_non_exhaustive()
    }
}

/// The pod of an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentPod {
    /// The node that it is on.
    pub node: String,
    /// Its name.
    pub pod: ObjectName,
    /// Whether all its containers are ready.
    pub is_ready: bool,
}

/// The pods of agents in a namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agents {
    /// Running agents, one for each node, by node.
    pub running: Vec<AgentPod>,
    /// Agents that do not run, one for each other node, by node.
    pub absent: Vec<AbsentAgent>,
}

/// The pod of an agent that does not run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AbsentAgent {
    /// The node that it is on, or is meant for; `None`: neither is known.
    pub node: Option<String>,
    /// Its name.
    pub pod: ObjectName,
    /// Its state, such as "is Pending (Init: CrashLoopBackOff)".
    pub state: String,
}

impl AbsentAgent {
    /// Returns the node, or the pod if the node is not known.
    pub fn place(&self) -> String {
        self.node.clone().unwrap_or_else(|| format!("pod {}", self.pod))
    }

    /// Returns why the node cannot be queried.
    pub fn problem(&self) -> String {
        format!("its agent's pod {} {}", self.pod, self.state)
    }
}

/// A command could not be run.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// There is no usable kubeconfig.
    #[error("kubeconfig")]
    Kubeconfig(#[source] Box<KubeconfigError>),
    /// The certificates or the identity are unusable.
    #[error("set up the connection to the API server")]
    Client(#[source] Box<::kube::Error>),
    /// The API server refused or did not answer.
    #[error("{doing}")]
    Server {
        /// What was asked for.
        doing: String,
        /// The cause.
        #[source]
        source: Box<::kube::Error>,
    },
    /// No answer in time.
    #[error("{doing}: the API server did not answer within {} s", .within.as_secs())]
    Late {
        /// What was asked for.
        doing: String,
        /// The deadline.
        within: Duration,
    },
    /// The command could not be started in the pod, or its end is not known.
    #[error("run the command in pod {pod}: {reason}")]
    Run {
        /// The agent's pod.
        pod: ObjectName,
        /// What the kubelet says.
        reason: String,
    },
    /// Its output could not be read or written.
    #[error("output of pod {pod}")]
    Output {
        /// The agent's pod.
        pod: ObjectName,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

impl RemoteError {
    /// Whether the requested object does not exist.
    pub fn is_not_found(&self) -> bool {
        let Self::Server { source, .. } = self else { return false };
        matches!(&**source, ::kube::Error::Api(status) if status.code == 404)
    }
}

/// Receives the pieces of a command's output.
pub trait Sink {
    /// A piece of standard output.
    ///
    /// # Errors
    /// It cannot be written: the command is given up.
    fn out(&mut self, piece: &[u8]) -> std::io::Result<()>;
    /// A piece of standard error.
    ///
    /// # Errors
    /// It cannot be written: the command is given up.
    fn err(&mut self, piece: &[u8]) -> std::io::Result<()>;
}

impl Remote {
    /// Connects at the first request.
    ///
    /// # Errors
    /// The kubeconfig cannot be used.
    pub async fn new(target: &Target) -> Result<Self, RemoteError> {
        let wrong = |error| RemoteError::Kubeconfig(Box::new(error));
        let options = KubeConfigOptions { context: target.context.clone(), ..KubeConfigOptions::default() };
        let mut config = match &target.kubeconfig {
            Some(path) => {
                let kubeconfig = Kubeconfig::read_from(path).map_err(wrong)?;
                Config::from_custom_kubeconfig(kubeconfig, &options).await.map_err(wrong)?
            }
            None => Config::from_kubeconfig(&options).await.map_err(wrong)?,
        };
        config.connect_timeout = Some(CONNECT);
        let failed = |error| RemoteError::Client(Box::new(error));
        let client = ClientBuilder::try_from(config).map_err(failed)?.build();
        Ok(Self { client })
    }

    /// Returns the pods of agents that have these labels in a namespace. Only this namespace is searched:
    /// pods elsewhere may have the same labels, and their authors would be queried instead of the agents.
    ///
    /// # Errors
    /// [`RemoteError::Server`], [`RemoteError::Late`].
    pub async fn agents(&self, namespace: &str, labels: &str) -> Result<Agents, RemoteError> {
        let parameters = ListParams::default().labels(labels).limit(MOST_AGENTS);
        let doing = || format!("list the agents' pods in namespace {namespace} (labels {labels})");
        let pods = Api::<Pod>::namespaced(self.client.clone(), namespace);
        let pods = within(LIST, doing, pods.list(&parameters)).await?;
        Ok(agents(pods.items))
    }

    /// Returns the node of a pod; `None` if it has none yet.
    ///
    /// # Errors
    /// [`RemoteError::Server`], [`RemoteError::Late`].
    pub async fn node_of(&self, pod: &ObjectName) -> Result<Option<String>, RemoteError> {
        let pods = Api::<Pod>::namespaced(self.client.clone(), &pod.namespace);
        let found = within(LIST, || format!("read pod {pod}"), pods.get(&pod.name)).await?;
        Ok(found.spec.and_then(|spec| spec.node_name).filter(|name| !name.is_empty()))
    }

    /// Sends a request with a path, and an object if it has one, and returns the object of the answer.
    ///
    /// # Errors
    /// [`RemoteError::Server`], [`RemoteError::Late`].
    pub async fn request(
        &self,
        verb: &str,
        path: &str,
        object: Option<&Value>,
    ) -> Result<Value, RemoteError> {
        let doing = || format!("{verb} {path}");
        let body = object.map(Value::to_string).unwrap_or_default().into_bytes();
        let request = Request::builder().method(verb).uri(path).header("content-type", "application/json");
        let asked =
            async { self.client.request(request.body(body).map_err(::kube::Error::HttpError)?).await };
        within(LIST, doing, asked).await
    }

    /// Runs a command in the first container of an agent's pod and passes on what it writes. Returns its exit code.
    ///
    /// # Errors
    /// It could not be run, or its end is not known.
    pub async fn run(
        &self,
        agent: &AgentPod,
        command: &[String],
        sink: &mut (dyn Sink + Send),
    ) -> Result<u8, RemoteError> {
        let pods = Api::<Pod>::namespaced(self.client.clone(), &agent.pod.namespace);
        let parameters = AttachParams::default().stdin(false).stdout(true).stderr(true);
        let doing = || format!("run {} in pod {}", command.join(" "), agent.pod);
        let mut process =
            within(LIST, doing, pods.exec(&agent.pod.name, command.to_vec(), &parameters)).await?;
        let lost = |reason: &str| RemoteError::Run { pod: agent.pod.clone(), reason: reason.to_owned() };
        let (Some(mut out), Some(mut err), Some(status)) =
            (process.stdout(), process.stderr(), process.take_status())
        else {
            return Err(lost("the connection has no output"));
        };
        let output = |source| RemoteError::Output { pod: agent.pod.clone(), source };
        let (mut out_buffer, mut err_buffer) = (vec![0; PIECE], vec![0; PIECE]);
        let (mut has_out, mut has_err) = (true, true);
        while has_out || has_err {
            // A read that is dropped has consumed nothing.
            tokio::select! {
                count = read(&mut out, &mut out_buffer), if has_out => match count.map_err(output)? {
                    0 => has_out = false,
                    count => sink.out(&out_buffer[..count]).map_err(output)?,
                },
                count = read(&mut err, &mut err_buffer), if has_err => match count.map_err(output)? {
                    0 => has_err = false,
                    count => sink.err(&err_buffer[..count]).map_err(output)?,
                },
            }
        }
        let status = status.await.ok_or_else(|| lost("the connection broke before its end"))?;
        exit_code(&status).ok_or_else(|| lost(&status.message.unwrap_or_default()))
    }
}

async fn read(stream: &mut (impl AsyncRead + Unpin), buffer: &mut [u8]) -> std::io::Result<usize> {
    stream.read(buffer).await
}

/// Returns the answer, unless it takes too long.
async fn within<T>(
    within: Duration,
    doing: impl Fn() -> String,
    answer: impl Future<Output = Result<T, ::kube::Error>>,
) -> Result<T, RemoteError> {
    match tokio::time::timeout(within, answer).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(source)) => Err(RemoteError::Server { doing: doing(), source: Box::new(source) }),
        Err(_) => Err(RemoteError::Late { doing: doing(), within }),
    }
}

/// Sorts pods into running and absent agents. A node with one of each, as during an update, counts as
/// running.
fn agents(pods: Vec<Pod>) -> Agents {
    let running = one_of_each_node(pods.iter().filter_map(agent).collect());
    let can_be_asked =
        |absent: &AbsentAgent| running.iter().any(|agent| Some(&agent.node) == absent.node.as_ref());
    let mut absent: Vec<AbsentAgent> =
        pods.iter().filter(|pod| agent(pod).is_none()).filter_map(absent_agent).collect();
    absent.retain(|absent| !can_be_asked(absent));
    absent.sort_by_key(|absent| (absent.node.clone(), absent.pod.clone()));
    absent.dedup_by(|later, first| later.node.is_some() && later.node == first.node);
    Agents { running, absent }
}

fn name(pod: &Pod) -> Option<ObjectName> {
    Some(ObjectName::new(pod.metadata.namespace.clone()?, pod.metadata.name.clone()?))
}

fn node_name(pod: &Pod) -> Option<String> {
    pod.spec.as_ref()?.node_name.clone().filter(|name| !name.is_empty())
}

/// Returns a pod that runs on a node. A pod whose container restarts again and again stays in the phase
/// `Running`.
fn agent(pod: &Pod) -> Option<AgentPod> {
    let (node, name) = (node_name(pod)?, name(pod)?);
    let status = pod.status.as_ref()?;
    if status.phase.as_deref() != Some("Running") || pod.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let mut containers = status.container_statuses.iter().flatten();
    if containers.clone().any(is_stopped) {
        return None;
    }
    Some(AgentPod { node, pod: name, is_ready: containers.all(|container| container.ready) })
}

fn is_stopped(container: &ContainerStatus) -> bool {
    container.state.as_ref().is_some_and(|state| state.waiting.is_some() || state.terminated.is_some())
}

/// Returns a pod that does not run.
fn absent_agent(pod: &Pod) -> Option<AbsentAgent> {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("Unknown");
    let state = match (&pod.metadata.deletion_timestamp, waits_for(pod)) {
        (Some(_), _) => "is being ended".to_owned(),
        (None, Some(reason)) => format!("is {phase} ({reason})"),
        (None, None) if phase == "Running" => "is Running, and its container is not".to_owned(),
        (None, None) => format!("is {phase}"),
    };
    Some(AbsentAgent { node: node_name(pod).or_else(|| meant_for(pod)), pod: name(pod)?, state })
}

/// Returns why a pod does not run, in the words of the kubelet or the scheduler.
fn waits_for(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    let of =
        |containers: Option<&Vec<ContainerStatus>>| containers.into_iter().flatten().find_map(stopped_by);
    let first = of(status.init_container_statuses.as_ref()).map(|reason| format!("Init: {reason}"));
    let unplaced = || {
        let mut conditions = status.conditions.iter().flatten();
        let placed = conditions.find(|it| it.type_ == "PodScheduled" && it.status == "False")?;
        placed.reason.clone()
    };
    first
        .or_else(|| of(status.container_statuses.as_ref()))
        .or_else(|| status.reason.clone())
        .or_else(unplaced)
}

/// Returns why a container does not run, unless it only waits for the containers before it.
fn stopped_by(container: &ContainerStatus) -> Option<String> {
    let state = container.state.as_ref()?;
    let waiting = state.waiting.as_ref().and_then(|waiting| waiting.reason.clone());
    let failed = || {
        let ended = state.terminated.as_ref().filter(|ended| ended.exit_code != 0)?;
        ended.reason.clone()
    };
    waiting
        .filter(|reason| !["PodInitializing", "ContainerCreating"].contains(&reason.as_str()))
        .or_else(failed)
}

/// Returns the node for which the controller of a DaemonSet has created a pod that is not scheduled yet.
fn meant_for(pod: &Pod) -> Option<String> {
    let affinity = pod.spec.as_ref()?.affinity.as_ref()?.node_affinity.as_ref()?;
    let required = affinity.required_during_scheduling_ignored_during_execution.as_ref()?;
    let mut fields =
        required.node_selector_terms.iter().filter_map(|term| term.match_fields.as_ref()).flatten();
    let named = fields.find(|field| field.key == "metadata.name" && field.operator == "In")?;
    named.values.as_ref()?.first().cloned()
}

/// Of two pods of a node, as during an update, keeps the ready one.
fn one_of_each_node(mut agents: Vec<AgentPod>) -> Vec<AgentPod> {
    agents.sort_by(|one, other| {
        let rank = |agent: &AgentPod| !agent.is_ready;
        (&one.node, rank(one), &one.pod).cmp(&(&other.node, rank(other), &other.pod))
    });
    agents.dedup_by(|later, first| later.node == first.node);
    agents
}

/// Returns the exit code in the status of a command that has ended; `None` if it was not run.
fn exit_code(status: &Status) -> Option<u8> {
    if status.status.as_deref() == Some("Success") {
        return Some(0);
    }
    let causes = status.details.as_ref()?.causes.as_ref()?;
    let cause = causes.iter().find(|cause| cause.reason.as_deref() == Some("ExitCode"))?;
    cause.message.as_deref()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_exit_code_is_that_of_the_command() {
        let code = |status: Value| exit_code(&serde_json::from_value(status).unwrap());
        assert_eq!(code(json!({"status": "Success"})), Some(0));
        let failed = |causes: Value| json!({"status": "Failure", "details": {"causes": causes}});
        assert_eq!(code(failed(json!([{"reason": "ExitCode", "message": "3"}]))), Some(3));
        for causes in
            [json!([]), json!([{"reason": "ExitCode", "message": "x"}]), json!([{"reason": "Other"}])]
        {
            assert_eq!(code(failed(causes)), None);
        }
        assert_eq!(code(json!({"status": "Failure", "message": "no such container"})), None);
    }

    #[test]
    fn an_agent_is_a_pod_that_runs_on_a_node() {
        let of = |phase: &str, node: &str, ready: bool| {
            agent(
                &serde_json::from_value(json!({
                    "metadata": {"namespace": "kube-system", "name": "na-1"},
                    "spec": {"nodeName": node, "containers": []},
                    "status": {"phase": phase, "containerStatuses": [
                        {"name": "agent", "ready": ready, "image": "", "imageID": "", "restartCount": 0}
                    ]},
                }))
                .unwrap(),
            )
        };
        let found =
            |is_ready| AgentPod { node: "n1".into(), pod: ObjectName::new("kube-system", "na-1"), is_ready };
        assert_eq!(of("Running", "n1", true), Some(found(true)));
        assert_eq!(of("Running", "n1", false), Some(found(false)));
        assert_eq!(of("Pending", "n1", false), None);
        assert_eq!(of("Running", "", true), None);
    }

    #[test]
    fn a_node_without_an_agent_that_runs_is_known_with_what_its_pod_waits_for() {
        let pod = |name: &str, node: &str, status: Value| {
            json!({
                "metadata": {"namespace": "kube-system", "name": name},
                "spec": {"nodeName": node, "containers": []}, "status": status,
            })
        };
        let container = |state: Value| json!([{"name": "a", "ready": false, "image": "", "imageID": "", "restartCount": 3, "state": state}]);
        let waiting = |reason: &str| container(json!({"waiting": {"reason": reason}}));
        let mut ending = pod("na-2", "n2", json!({"phase": "Running"}));
        ending["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        let mut unplaced = pod(
            "na-5",
            "",
            json!({"phase": "Pending", "conditions": [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            ]}),
        );
        let field = json!({"key": "metadata.name", "operator": "In", "values": ["n5"]});
        unplaced["spec"]["affinity"] = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchFields": [field]}]
        }}});
        let pods = [
            unplaced,
            pod("na-1", "n1", json!({"phase": "Running"})),
            // The next agent of a node, beside the serving one.
            pod("na-1-next", "n1", json!({"phase": "Pending"})),
            ending,
            pod(
                "na-3",
                "n3",
                json!({
                    "phase": "Pending", "initContainerStatuses": waiting("CrashLoopBackOff"),
                    "containerStatuses": waiting("PodInitializing"),
                }),
            ),
            pod("na-4", "n4", json!({"phase": "Pending", "containerStatuses": waiting("ImagePullBackOff")})),
            pod("na-6", "n6", json!({"phase": "Failed", "reason": "Evicted"})),
            pod("na-7", "n7", json!({"phase": "Pending", "containerStatuses": waiting("ContainerCreating")})),
            pod(
                "na-8",
                "n8",
                json!({
                    "phase": "Pending",
                    "initContainerStatuses": container(json!({"terminated": {"exitCode": 1, "reason": "Error"}})),
                }),
            ),
            pod("na-9", "", json!({"phase": "Pending"})),
            pod(
                "na-10",
                "n10",
                json!({"phase": "Running", "containerStatuses": waiting("CrashLoopBackOff")}),
            ),
            pod(
                "na-11",
                "n11",
                json!({
                    "phase": "Running",
                    "containerStatuses": container(json!({"terminated": {"exitCode": 0, "reason": "Completed"}})),
                }),
            ),
            pod(
                "na-12",
                "n12",
                json!({
                    "phase": "Running",
                    "containerStatuses": container(json!({"running": {"startedAt": "2026-01-01T00:00:00Z"}})),
                }),
            ),
        ];
        let pods = pods.into_iter().map(|pod| serde_json::from_value(pod).unwrap()).collect();
        let Agents { running, absent } = agents(pods);
        assert_eq!(running.iter().map(|agent| agent.node.as_str()).collect::<Vec<_>>(), ["n1", "n12"]);
        let said: Vec<String> =
            absent.iter().map(|absent| format!("{}: {}", absent.place(), absent.problem())).collect();
        let of = |number: u32, state: &str| {
            format!("n{number}: its agent's pod kube-system/na-{number} is {state}")
        };
        assert_eq!(
            said,
            [
                "pod kube-system/na-9: its agent's pod kube-system/na-9 is Pending".to_owned(),
                of(10, "Running (CrashLoopBackOff)"),
                of(11, "Running, and its container is not"),
                of(2, "being ended"),
                of(3, "Pending (Init: CrashLoopBackOff)"),
                of(4, "Pending (ImagePullBackOff)"),
                of(5, "Pending (Unschedulable)"),
                of(6, "Failed (Evicted)"),
                of(7, "Pending"),
                of(8, "Pending (Init: Error)"),
            ]
        );
    }

    #[test]
    fn a_node_has_one_agent_and_that_is_ready_if_any_is() {
        let of = |node: &str, name: &str, is_ready| AgentPod {
            node: node.into(),
            pod: ObjectName::new("kube-system", name),
            is_ready,
        };
        let all =
            [("n2", "a", false), ("n1", "b", true), ("n2", "b", true), ("n2", "c", true), ("n3", "a", false)];
        let all = all.map(|(node, name, is_ready)| of(node, name, is_ready)).into();
        assert_eq!(one_of_each_node(all), [of("n1", "b", true), of("n2", "b", true), of("n3", "a", false)]);
    }
}
