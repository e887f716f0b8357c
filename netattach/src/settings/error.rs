//! Why the agent cannot be configured.

use std::path::PathBuf;

use super::file::SettingsFileError;
use crate::attach::{InvalidDefaultNetwork, standalone};
use crate::builtin::InvalidSettings;
use crate::cni::CniError;
use crate::source::read::policy::CommonRulesError;

/// Reasons why the agent cannot be configured.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// `bpfLog` is set without a BPF object that logs.
    #[error(
        "bpfLog: give bpfLogObject (--bpf-log-object) too, the file that `cargo xtask build-ebpf --log` writes to target/bpf/netattach-log.bpf.o"
    )]
    BpfLogObject,
    /// `bpfLogOf` does not name an attachment.
    #[error("bpfLogOf: {0:?} is not NAMESPACE/POD/INTERFACE")]
    BpfLogOf(String),
    /// The configuration file cannot be used.
    #[error("configuration {path}")]
    File {
        /// Path of the file.
        path: PathBuf,
        /// The error in the file.
        #[source]
        source: SettingsFileError,
    },
    /// No source of manifests is given.
    #[error(
        "no source: give --source DIR, a directory of manifests: Pod, NetworkAttachmentDefinition, Namespace, MultiNetworkPolicy, NetworkPolicy; or --kubernetes in a pod of the cluster, or --kubeconfig FILE"
    )]
    NoSource,
    /// Two sources are given.
    #[error(
        "source and kubernetes.enabled: objects come from a directory or from the cluster, not from both: leave one of them out"
    )]
    TwoSources,
    /// A kubeconfig is set but not used.
    #[error(
        "kubernetes.kubeconfig is set and kubernetes.enabled is not: set it too, or leave kubeconfig out"
    )]
    UnusedKubeconfig,
    /// The name of the node is unknown or invalid.
    #[error(
        "kubernetes.nodeName: {0:?} is not the name of a node; set the key, --node-name or the variable NODE_NAME"
    )]
    NodeName(String),
    /// The startup taint is not the key of a taint, so the node would keep it.
    #[error(
        "kubernetes.startupTaint: {0:?} is not the key of a taint; give the key alone, without value and effect, such as netattach.dev/agent-not-ready"
    )]
    StartupTaint(String),
    /// The default network is neither a name nor a path.
    #[error("defaultNetwork")]
    DefaultNetwork(#[from] InvalidDefaultNetwork),
    /// The settings of the builtin network are invalid.
    #[error(transparent)]
    Builtin(#[from] InvalidSettings),
    /// A value is not a valid namespace name.
    #[error("{key}: {value:?} is not the name of a namespace")]
    Namespace {
        /// Path of the key.
        key: String,
        /// The invalid value.
        value: String,
    },
    /// The name for the runtime's file is invalid.
    #[error("cniConf.name: {0:?} is not a file name that ends in .conflist")]
    ConfName(String),
    /// The directory for the runtime's file is not absolute.
    #[error("cniConf.dir: {0} is not an absolute path")]
    ConfDir(PathBuf),
    /// The agent's own file would make the runtime call netattach without the plugins before it.
    #[error(
        "defaultNetwork chained: the runtime's list is another program's, with netattach behind its plugins, so cniConf.dir has to be empty, not {0}; the agent's own file would be taken in its place"
    )]
    ChainedConf(PathBuf),
    /// A file is to be removed, but its directory is not set.
    #[error("cniConf.remove: true needs cniConf.dir, where the file is")]
    ConfRemove,
    /// A range of the cluster covers all addresses.
    #[error(
        "clusterCIDRs[{index}]: {range} covers all addresses, so a default route on another interface would lead nowhere; name the ranges of the cluster, such as 10.96.0.0/12"
    )]
    WholeRange {
        /// The index in the list.
        index: usize,
        /// The range.
        range: ipnet::IpNet,
    },
    /// A permission is invalid.
    #[error("podSources[{index}].{problem}")]
    PodSources {
        /// The index in the list.
        index: usize,
        /// What is wrong with it, after the key.
        problem: String,
    },
    /// The chosen repair of pods needs another setting.
    #[error("repair: {how} needs {needs}")]
    Repair {
        /// The setting.
        how: &'static str,
        /// What is not set.
        needs: &'static str,
    },
    /// The runtime's socket is not absolute.
    #[error("runtimeSocket: {0} is not an absolute path")]
    RuntimeSocket(PathBuf),
    /// The listening address of probes and metrics is invalid.
    #[error(
        "metrics.listen: {0:?} is not an address and a port, such as 127.0.0.1:10475; an empty one serves nothing"
    )]
    Listen(String),
    /// The endpoint for traces is invalid.
    #[error(
        "traces.endpoint: {0:?} is not the URL of a collector, such as http://127.0.0.1:4318/v1/traces: without TLS and credentials, so on this node, and without a query (?)"
    )]
    Traces(String),
    /// The node's root directory is not absolute.
    #[error(
        "delegation.root: {0} is not where the node's root directory is mounted in the agent's container, such as /host"
    )]
    Root(PathBuf),
    /// A type in `delegation.exec` is not built in, so it is executed anyway.
    #[error("delegation.exec[{index}]: {kind:?} is not built in, so it is executed anyway; the built-in types are {}", standalone::built_in().collect::<Vec<_>>().join(", "))]
    NotBuiltIn {
        /// The index in the list.
        index: usize,
        /// The type.
        kind: String,
    },
    /// The network name for the runtime's file is invalid.
    #[error("cniConf.network")]
    ConfNetwork(#[source] CniError),
    /// A common rule is invalid.
    #[error("commonRules")]
    CommonRules(#[from] CommonRulesError),
    /// A number is out of range.
    #[error("{key} must be between {min} and {max}, not {value}")]
    Range {
        /// The key.
        key: &'static str,
        /// The value.
        value: u64,
        /// Lowest accepted.
        min: u64,
        /// Highest accepted.
        max: u64,
    },
}
