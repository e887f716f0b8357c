//! A client of the container runtime interface: the calls by which kubelet runs a pod.
//!
//! Messages are the members of `runtime.v1` (kubernetes/cri-api, `api.proto`) that the tests use, by their numbers
//! there; both sides ignore the others.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::{Context, Result};
use prost::Message;
use tonic::Request;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

use super::IMAGE;

const DEADLINE: Duration = Duration::from_secs(60);

/// A connection to a runtime.
#[derive(Debug)]
pub struct Client {
    grpc: Grpc<Channel>,
    executor: tokio::runtime::Runtime,
    cgroup_parent: String,
}

/// A pod as kubelet describes it.
#[derive(Debug, Clone, Copy)]
pub struct Pod<'a> {
    /// Its namespace.
    pub namespace: &'a str,
    /// Its name.
    pub name: &'a str,
    /// Its UID.
    pub uid: &'a str,
}

/// A pod's sandbox and its one container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sandbox {
    /// The runtime's id of the sandbox: `CNI_CONTAINERID`.
    pub id: String,
    /// The id of its container; empty if there is none.
    pub container: String,
}

impl Client {
    /// Connects to a socket.
    ///
    /// # Errors
    /// Nothing listens on the socket.
    pub(super) fn connect(socket: &str, cgroup_parent: String) -> Result<Self> {
        let executor = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let endpoint = Endpoint::from_shared(format!("unix://{socket}"))?.timeout(DEADLINE);
        let channel = executor.block_on(endpoint.connect()).context("connect to the runtime")?;
        Ok(Self { grpc: Grpc::new(channel), executor, cgroup_parent })
    }

    /// RunPodSandbox. The error is the runtime's own text.
    ///
    /// # Errors
    /// The runtime refuses.
    pub fn run_sandbox(&mut self, pod: Pod<'_>) -> Result<String> {
        self.run_sandbox_with_port(pod, None)
    }

    /// RunPodSandbox of a pod with a container's port that is to be opened on the node: `(hostPort, containerPort)`.
    ///
    /// # Errors
    /// The runtime refuses.
    pub fn run_sandbox_with_port(&mut self, pod: Pod<'_>, port: Option<(u16, u16)>) -> Result<String> {
        let mapping = |(host, container): (u16, u16)| PortMapping {
            container_port: container.into(),
            host_port: host.into(),
        };
        let port_mappings = port.map(mapping).into_iter().collect();
        let config = PodSandboxConfig { port_mappings, ..self.config(pod) };
        let request = RunPodSandboxRequest { config: Some(config) };
        let ran: PodSandbox = self.call("/runtime.v1.RuntimeService/RunPodSandbox", request)?;
        Ok(ran.pod_sandbox_id)
    }

    /// RunPodSandbox, CreateContainer, StartContainer: a pod whose container runs busybox with these arguments.
    ///
    /// # Errors
    /// The runtime refuses.
    pub fn run_pod(&mut self, pod: Pod<'_>, words: &[&str]) -> Result<Sandbox> {
        let id = self.run_sandbox(pod)?;
        let command = ["/bin/busybox"].iter().chain(words).map(|word| (*word).to_owned()).collect();
        let config = ContainerConfig {
            metadata: Some(ContainerMetadata { name: "main".to_owned(), attempt: 0 }),
            image: Some(ImageSpec { image: IMAGE.to_owned() }),
            command,
        };
        let request = CreateContainerRequest {
            pod_sandbox_id: id.clone(),
            config: Some(config),
            sandbox_config: Some(self.config(pod)),
        };
        let created: Container = self.call("/runtime.v1.RuntimeService/CreateContainer", request)?;
        let _: Empty = self.call("/runtime.v1.RuntimeService/StartContainer", created.clone())?;
        Ok(Sandbox { id, container: created.container_id })
    }

    /// ExecSync of busybox; returns exit code and output.
    ///
    /// # Errors
    /// The runtime refuses.
    pub fn exec(&mut self, sandbox: &Sandbox, words: &[&str]) -> Result<(i32, String)> {
        let cmd = ["/bin/busybox"].iter().chain(words).map(|word| (*word).to_owned()).collect();
        let request = ExecSyncRequest { container_id: sandbox.container.clone(), cmd, timeout: 30 };
        let said: ExecSyncResponse = self.call("/runtime.v1.RuntimeService/ExecSync", request)?;
        Ok((said.exit_code, String::from_utf8(said.stdout)?))
    }

    /// PodSandboxStatus: whether it is ready, and its addresses.
    ///
    /// # Errors
    /// The runtime refuses.
    pub fn sandbox_status(&mut self, id: &str) -> Result<(bool, Vec<String>)> {
        let request = PodSandbox { pod_sandbox_id: id.to_owned() };
        let answer: PodSandboxStatusResponse =
            self.call("/runtime.v1.RuntimeService/PodSandboxStatus", request)?;
        let status = answer.status.context("a sandbox has a status")?;
        let network = status.network.unwrap_or_default();
        let addresses = std::iter::once(network.ip).chain(network.additional_ips.into_iter().map(|ip| ip.ip));
        // The first state of the enumeration is "ready".
        Ok((status.state == 0, addresses.filter(|ip| !ip.is_empty()).collect()))
    }

    /// StopPodSandbox.
    ///
    /// # Errors
    /// The runtime refuses.
    pub fn stop_sandbox(&mut self, id: &str) -> Result<()> {
        self.about_a_sandbox("/runtime.v1.RuntimeService/StopPodSandbox", id)
    }

    /// RemovePodSandbox.
    ///
    /// # Errors
    /// The runtime refuses.
    pub fn remove_sandbox(&mut self, id: &str) -> Result<()> {
        self.about_a_sandbox("/runtime.v1.RuntimeService/RemovePodSandbox", id)
    }

    /// Status: whether the network is ready, and the message if it is not.
    ///
    /// # Errors
    /// The runtime refuses.
    pub fn network_ready(&mut self) -> Result<(bool, String)> {
        let answer: StatusResponse = self.call("/runtime.v1.RuntimeService/Status", Empty {})?;
        let conditions = answer.status.context("a runtime has a status")?.conditions;
        let network = conditions.into_iter().find(|condition| condition.kind == "NetworkReady");
        let network = network.context("a runtime has a network")?;
        Ok((network.status, network.message))
    }

    /// The network configuration that the runtime has read, in its own words.
    ///
    /// # Errors
    /// The runtime refuses.
    pub fn network_configuration(&mut self) -> Result<String> {
        let question = StatusRequest { verbose: true };
        let mut answer: StatusResponse = self.call("/runtime.v1.RuntimeService/Status", question)?;
        answer.info.remove("cniconfig").context("a runtime says which networks it has")
    }

    /// Whether the runtime, which may have just been started, accepts requests: it lists its sandboxes.
    pub(super) fn is_served(&mut self) -> bool {
        self.call::<_, Empty>("/runtime.v1.RuntimeService/ListPodSandbox", Empty {}).is_ok()
    }

    fn config(&self, pod: Pod<'_>) -> PodSandboxConfig {
        let metadata = PodSandboxMetadata {
            name: pod.name.to_owned(),
            uid: pod.uid.to_owned(),
            namespace: pod.namespace.to_owned(),
        };
        let linux = LinuxPodSandboxConfig { cgroup_parent: self.cgroup_parent.clone() };
        PodSandboxConfig { metadata: Some(metadata), port_mappings: Vec::new(), linux: Some(linux) }
    }

    fn about_a_sandbox(&mut self, method: &'static str, id: &str) -> Result<()> {
        let _: Empty = self.call(method, PodSandbox { pod_sandbox_id: id.to_owned() })?;
        Ok(())
    }

    fn call<Question, Answer>(&mut self, method: &'static str, question: Question) -> Result<Answer>
    where
        Question: Message + 'static,
        Answer: Message + Default + 'static,
    {
        let Self { grpc, executor, .. } = self;
        let method = PathAndQuery::from_static(method);
        let answer = executor.block_on(async {
            grpc.ready().await?;
            let answer: tonic::Response<Answer> =
                grpc.unary(Request::new(question), method, ProstCodec::default()).await?;
            anyhow::Ok(answer.into_inner())
        });
        answer.map_err(|error| match error.downcast::<tonic::Status>() {
            Ok(status) => anyhow::Error::msg(status.message().to_owned()),
            Err(error) => error,
        })
    }
}

#[derive(Clone, PartialEq, Message)]
struct Empty {}

#[derive(Clone, PartialEq, Message)]
struct PodSandboxConfig {
    #[prost(message, optional, tag = "1")]
    metadata: Option<PodSandboxMetadata>,
    #[prost(message, repeated, tag = "5")]
    port_mappings: Vec<PortMapping>,
    #[prost(message, optional, tag = "8")]
    linux: Option<LinuxPodSandboxConfig>,
}

/// TCP, the first protocol of the enumeration.
#[derive(Clone, PartialEq, Message)]
struct PortMapping {
    #[prost(int32, tag = "2")]
    container_port: i32,
    #[prost(int32, tag = "3")]
    host_port: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct PodSandboxMetadata {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(string, tag = "2")]
    pub(crate) uid: String,
    #[prost(string, tag = "3")]
    pub(crate) namespace: String,
}

#[derive(Clone, PartialEq, Message)]
struct LinuxPodSandboxConfig {
    #[prost(string, tag = "1")]
    cgroup_parent: String,
}

#[derive(Clone, PartialEq, Message)]
struct RunPodSandboxRequest {
    #[prost(message, optional, tag = "1")]
    config: Option<PodSandboxConfig>,
}

/// RunPodSandboxResponse, and the requests that only name a sandbox.
#[derive(Clone, PartialEq, Message)]
struct PodSandbox {
    #[prost(string, tag = "1")]
    pod_sandbox_id: String,
}

#[derive(Clone, PartialEq, Message)]
struct CreateContainerRequest {
    #[prost(string, tag = "1")]
    pod_sandbox_id: String,
    #[prost(message, optional, tag = "2")]
    config: Option<ContainerConfig>,
    #[prost(message, optional, tag = "3")]
    sandbox_config: Option<PodSandboxConfig>,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerConfig {
    #[prost(message, optional, tag = "1")]
    metadata: Option<ContainerMetadata>,
    #[prost(message, optional, tag = "2")]
    image: Option<ImageSpec>,
    #[prost(string, repeated, tag = "3")]
    command: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerMetadata {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(uint32, tag = "2")]
    attempt: u32,
}

#[derive(Clone, PartialEq, Message)]
struct ImageSpec {
    #[prost(string, tag = "1")]
    image: String,
}

/// CreateContainerResponse and StartContainerRequest.
#[derive(Clone, PartialEq, Message)]
struct Container {
    #[prost(string, tag = "1")]
    container_id: String,
}

#[derive(Clone, PartialEq, Message)]
struct ExecSyncRequest {
    #[prost(string, tag = "1")]
    container_id: String,
    #[prost(string, repeated, tag = "2")]
    cmd: Vec<String>,
    /// In seconds.
    #[prost(int64, tag = "3")]
    timeout: i64,
}

#[derive(Clone, PartialEq, Message)]
struct ExecSyncResponse {
    #[prost(bytes = "vec", tag = "1")]
    stdout: Vec<u8>,
    #[prost(int32, tag = "3")]
    exit_code: i32,
}

#[derive(Clone, PartialEq, Message)]
struct PodSandboxStatusResponse {
    #[prost(message, optional, tag = "1")]
    status: Option<PodSandboxStatus>,
}

#[derive(Clone, PartialEq, Message)]
struct PodSandboxStatus {
    #[prost(int32, tag = "3")]
    state: i32,
    #[prost(message, optional, tag = "5")]
    network: Option<PodSandboxNetworkStatus>,
}

#[derive(Clone, PartialEq, Message)]
struct PodSandboxNetworkStatus {
    #[prost(string, tag = "1")]
    ip: String,
    #[prost(message, repeated, tag = "2")]
    additional_ips: Vec<PodIp>,
}

#[derive(Clone, PartialEq, Message)]
struct PodIp {
    #[prost(string, tag = "1")]
    ip: String,
}

#[derive(Clone, PartialEq, Message)]
struct StatusRequest {
    #[prost(bool, tag = "1")]
    verbose: bool,
}

#[derive(Clone, PartialEq, Message)]
struct StatusResponse {
    #[prost(message, optional, tag = "1")]
    status: Option<RuntimeStatus>,
    #[prost(map = "string, string", tag = "2")]
    info: HashMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
struct RuntimeStatus {
    #[prost(message, repeated, tag = "1")]
    conditions: Vec<RuntimeCondition>,
}

#[derive(Clone, PartialEq, Message)]
struct RuntimeCondition {
    #[prost(string, tag = "1")]
    kind: String,
    #[prost(bool, tag = "2")]
    status: bool,
    #[prost(string, tag = "4")]
    message: String,
}
