//! Asks the container runtime for its sandboxes, their network namespaces, and the configurations with which it calls
//! CNI plugins: `ListPodSandbox`, `PodSandboxStatus` and `Status` of the container runtime interface (CRI), over the
//! runtime's unix socket.
//!
//! The messages contain only the needed fields, by their numbers in kubernetes/cri-api (`api.proto`); they are the
//! same in `runtime.v1` and in `runtime.v1alpha2`, the only version of older runtimes.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use tonic::Code;

use crate::grpc::{CallError, Connection, Refused};

/// Longest time for connecting and for all answers together.
const DEADLINE: Duration = Duration::from_secs(2);

/// Longest answer in bytes: some 10,000 sandboxes with large annotations.
const MAX_ANSWER: usize = 16 << 20;

/// A method in the versions of the interface, newest first.
type Method = [&'static str; 2];

const LIST: Method =
    ["/runtime.v1.RuntimeService/ListPodSandbox", "/runtime.v1alpha2.RuntimeService/ListPodSandbox"];
const STATUS: Method =
    ["/runtime.v1.RuntimeService/PodSandboxStatus", "/runtime.v1alpha2.RuntimeService/PodSandboxStatus"];

const RUNTIME: Method = ["/runtime.v1.RuntimeService/Status", "/runtime.v1alpha2.RuntimeService/Status"];

/// `PodSandboxState` of a sandbox that is ready.
const READY: i32 = 0;
/// The entry with the specification in a sandbox's verbose information, in containerd and in CRI-O.
const INFO: &str = "info";
/// The entry of containerd's verbose information with the CNI configurations that it has read. CRI-O has none.
const CNI_INFO: &str = "cniconfig";
/// The interface that containerd configures itself.
const LOOPBACK: &str = "lo";

/// Why the runtime's answer is unknown.
#[derive(Debug, thiserror::Error)]
pub enum CriError {
    /// There is no socket.
    #[error("the runtime's socket {0} is not there (runtimeSocket)")]
    Absent(PathBuf),
    /// No process listens on the socket, or it does not speak gRPC.
    #[error("connect to the runtime at {socket}")]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// The cause.
        #[source]
        source: tonic::transport::Error,
    },
    /// The runtime returned an error or an answer that is too long, or the connection ended.
    #[error("the runtime at {socket} does not answer")]
    Refused {
        /// The socket.
        socket: PathBuf,
        /// The runtime's answer.
        #[source]
        source: Refused,
    },
    /// The answer did not come in time.
    #[error("the runtime at {socket} did not answer within {DEADLINE:?}")]
    Slow {
        /// The socket.
        socket: PathBuf,
    },
    /// The runtime does not report the sandbox's network namespace.
    #[error("the runtime at {socket} does not say where the network namespace of sandbox {id} is")]
    NoNamespace {
        /// The socket.
        socket: PathBuf,
        /// The sandbox.
        id: String,
    },
}

/// A sandbox of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodSandbox {
    /// Its id: the `CNI_CONTAINERID` of its ADD.
    pub id: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// UID of the pod, as the kubelet runs it.
    pub uid: String,
}

/// The configurations with which the runtime calls CNI plugins for a pod, as it has read them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Networking {
    /// The directory that the runtime reads, as a path in its mount namespace.
    pub directory: PathBuf,
    /// The configurations that it applies to each pod, one per interface.
    pub lists: Vec<LoadedList>,
}

/// A configuration that the runtime has read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadedList {
    /// Its name.
    pub name: String,
    /// The types of its plugins.
    pub plugins: Vec<String>,
}

/// `ListPodSandboxRequest` without its filter: sandboxes in every state.
#[derive(Clone, Copy, PartialEq, prost::Message)]
struct ListRequest {}

/// `ListPodSandboxResponse`.
#[derive(Clone, PartialEq, prost::Message)]
struct ListResponse {
    #[prost(message, repeated, tag = "1")]
    items: Vec<Listed>,
}

/// `PodSandbox`.
#[derive(Clone, PartialEq, prost::Message)]
struct Listed {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(message, optional, tag = "2")]
    metadata: Option<Metadata>,
    #[prost(int32, tag = "3")]
    state: i32,
}

/// `PodSandboxMetadata`.
#[derive(Clone, PartialEq, prost::Message)]
struct Metadata {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    uid: String,
    #[prost(string, tag = "3")]
    namespace: String,
}

/// `PodSandboxStatusRequest`.
#[derive(Clone, PartialEq, prost::Message)]
struct StatusRequest {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(bool, tag = "2")]
    verbose: bool,
}

/// The `StatusRequest` of a runtime.
#[derive(Clone, Copy, PartialEq, prost::Message)]
struct RuntimeRequest {
    #[prost(bool, tag = "1")]
    verbose: bool,
}

/// `PodSandboxStatusResponse`, and the `StatusResponse` of a runtime.
#[derive(Clone, PartialEq, prost::Message)]
struct StatusResponse {
    #[prost(map = "string, string", tag = "2")]
    info: HashMap<String, String>,
}

/// The verbose information about a sandbox: the specification of the Open Container Initiative (OCI).
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Info {
    #[serde(default)]
    runtime_spec: RuntimeSpec,
}

#[derive(Default, Deserialize)]
struct RuntimeSpec {
    #[serde(default)]
    linux: Linux,
}

#[derive(Default, Deserialize)]
struct Linux {
    #[serde(default)]
    namespaces: Vec<Namespace>,
}

#[derive(Deserialize)]
struct Namespace {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    path: PathBuf,
}

/// The CNI configurations that containerd has read: `ConfigResult` of go-cni.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct CniInfo {
    #[serde(default)]
    plugin_conf_dir: PathBuf,
    /// `null` if containerd has read none.
    networks: Option<Vec<CniNetwork>>,
}

#[derive(Deserialize)]
struct CniNetwork {
    #[serde(rename = "Config")]
    config: CniList,
    #[serde(rename = "IFName", default)]
    ifname: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct CniList {
    #[serde(default)]
    name: String,
    plugins: Option<Vec<CniPlugin>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct CniPlugin {
    network: CniPluginConf,
}

#[derive(Deserialize)]
struct CniPluginConf {
    #[serde(rename = "type", default)]
    kind: String,
}

/// Returns the ids of all sandboxes of the runtime, in any state: the `CNI_CONTAINERID` of their ADDs.
///
/// # Errors
/// [`CriError`]: nothing is known then.
pub async fn sandboxes(socket: &Path) -> Result<HashSet<String>, CriError> {
    let listed: ListResponse = ask(socket, LIST, ListRequest {}).await?;
    Ok(listed.items.into_iter().map(|sandbox| sandbox.id).collect())
}

/// Returns the sandboxes that are ready, with their pods.
///
/// # Errors
/// [`CriError`]: nothing is known then.
pub async fn ready_sandboxes(socket: &Path) -> Result<Vec<PodSandbox>, CriError> {
    let listed: ListResponse = ask(socket, LIST, ListRequest {}).await?;
    let ready = listed.items.into_iter().filter(|sandbox| sandbox.state == READY);
    Ok(ready.filter_map(Listed::of_pod).collect())
}

/// Returns the path of a sandbox's network namespace.
///
/// # Errors
/// [`CriError`].
pub async fn network_namespace(socket: &Path, id: &str) -> Result<PathBuf, CriError> {
    let request = StatusRequest { id: id.to_owned(), verbose: true };
    let status: StatusResponse = ask(socket, STATUS, request).await?;
    let path = status.info.get(INFO).and_then(|text| namespace_in(text));
    path.ok_or_else(|| CriError::NoNamespace { socket: socket.to_owned(), id: id.to_owned() })
}

/// Returns the configurations with which the runtime calls CNI plugins; `None`: it does not report them.
///
/// # Errors
/// [`CriError`]: nothing is known then.
pub async fn networking(socket: &Path) -> Result<Option<Networking>, CriError> {
    let status: StatusResponse = ask(socket, RUNTIME, RuntimeRequest { verbose: true }).await?;
    Ok(status.info.get(CNI_INFO).and_then(|text| networking_in(text)))
}

/// Returns the CNI configurations in a runtime's verbose information.
fn networking_in(info: &str) -> Option<Networking> {
    let info: CniInfo = serde_json::from_str(info).ok()?;
    let networks = info.networks.unwrap_or_default().into_iter().filter(|network| network.ifname != LOOPBACK);
    let list = |CniNetwork { config, .. }: CniNetwork| {
        let plugins = config.plugins.unwrap_or_default().into_iter().map(|plugin| plugin.network.kind);
        LoadedList { name: config.name, plugins: plugins.collect() }
    };
    Some(Networking { directory: info.plugin_conf_dir, lists: networks.map(list).collect() })
}

/// Returns the path of the network namespace in a sandbox's verbose information.
fn namespace_in(info: &str) -> Option<PathBuf> {
    let info: Info = serde_json::from_str(info).ok()?;
    let namespaces = info.runtime_spec.linux.namespaces.into_iter();
    namespaces.filter(|it| it.kind == "network").map(|it| it.path).find(|path| path.is_absolute())
}

impl Listed {
    fn of_pod(self) -> Option<PodSandbox> {
        let Metadata { name, uid, namespace } = self.metadata?;
        Some(PodSandbox { id: self.id, namespace, name, uid })
    }
}

/// Sends one request, in the newest version of the interface that the runtime supports.
async fn ask<Q, A>(socket: &Path, method: Method, request: Q) -> Result<A, CriError>
where
    Q: prost::Message + Clone + 'static,
    A: prost::Message + Default + 'static,
{
    let of = || socket.to_owned();
    match tokio::time::timeout(DEADLINE, ask_versions(socket, method, request)).await {
        Ok(answer) => answer.map_err(|error| match error {
            CallError::Absent => CriError::Absent(of()),
            CallError::Connect(source) => CriError::Connect { socket: of(), source },
            CallError::Refused(source) => CriError::Refused { socket: of(), source },
        }),
        Err(_) => Err(CriError::Slow { socket: of() }),
    }
}

async fn ask_versions<Q, A>(socket: &Path, [newest, older]: Method, request: Q) -> Result<A, CallError>
where
    Q: prost::Message + Clone + 'static,
    A: prost::Message + Default + 'static,
{
    let connection = Connection::to(socket).await?;
    match connection.call(newest, request.clone(), MAX_ANSWER).await {
        Err(CallError::Refused(Refused(status))) if status.code() == Code::Unimplemented => {
            connection.call(older, request, MAX_ANSWER).await
        }
        answered => answered,
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;
    use crate::error_chain::Chain;

    #[test]
    fn the_ids_are_read_and_what_else_a_runtime_tells_is_passed_over() {
        // Field 1 (PodSandbox): field 1 (id) "ab", field 2 (metadata, empty), field 3 (state) 1; then field 9 (unknown).
        let bytes = [0x0a, 8, 0x0a, 2, b'a', b'b', 0x12, 0, 0x18, 1, 0x48, 7];
        let response = ListResponse::decode(&bytes[..]).unwrap();
        let listed = Listed { id: "ab".into(), metadata: Some(Metadata::default()), state: 1 };
        assert_eq!(response, ListResponse { items: vec![listed] });
        assert!(ListResponse::decode(&bytes[..5]).is_err(), "a list that is cut off is no list");
        assert!(ListRequest {}.encode_to_vec().is_empty());
    }

    #[test]
    fn the_network_namespace_stands_in_the_specification() {
        let spec = |path: &str| {
            format!(
                r#"{{"pid": 7, "runtimeSpec": {{"linux": {{"namespaces": [{{"type": "pid"}}, {{"type": "network", "path": "{path}"}}]}}}}}}"#
            )
        };
        assert_eq!(namespace_in(&spec("/run/netns/cni-1")), Some("/run/netns/cni-1".into()));
        for info in [spec("").as_str(), &spec("run/netns"), "{}", "", "[]", r#"{"runtimeSpec": {}}"#] {
            assert_eq!(namespace_in(info), None, "{info}");
        }
    }

    #[test]
    fn what_a_runtime_has_read_for_cni_is_all_but_its_own_loopback() {
        let list = |name: &str, plugin: &str, ifname: &str| {
            let plugins = format!(
                r#"[{{"Network": {{"cniVersion": "1.0.0", "type": "{plugin}", "dns": {{}}}}, "Source": "{{}}"}}]"#
            );
            format!(
                r#"{{"Config": {{"Name": "{name}", "CNIVersion": "1.0.0", "Plugins": {plugins}, "Source": ""}}, "IFName": "{ifname}"}}"#
            )
        };
        let networks = [list("cni-loopback", "loopback", "lo"), list("pods", "netattach", "eth0")].join(", ");
        let info = |networks: &str| {
            format!(
                r#"{{"PluginDirs": ["/opt/cni/bin"], "PluginConfDir": "/etc/cni/net.d", "PluginMaxConfNum": 1, "Prefix": "eth", "Networks": {networks}}}"#
            )
        };
        let pods = LoadedList { name: "pods".to_owned(), plugins: vec!["netattach".to_owned()] };
        let of = |lists| Some(Networking { directory: "/etc/cni/net.d".into(), lists });
        assert_eq!(networking_in(&info(&format!("[{networks}]"))), of(vec![pods]));
        assert_eq!(networking_in(&info("null")), of(Vec::new()));
        for info in ["", "[]", "7", r#"{"Networks": 7}"#] {
            assert_eq!(networking_in(info), None, "{info}");
        }
    }

    #[tokio::test]
    async fn a_runtime_that_is_away_or_silent_is_told_apart_from_one_without_sandboxes() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("runtime.sock");
        let error = sandboxes(&socket).await.unwrap_err();
        assert!(matches!(error, CriError::Absent(_)), "{}", Chain(&error));
        let silent = tokio::net::UnixListener::bind(&socket).unwrap();
        let error = sandboxes(&socket).await.unwrap_err();
        assert!(matches!(error, CriError::Slow { .. }), "{}", Chain(&error));
        drop(silent);
    }
}
