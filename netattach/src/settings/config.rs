//! Command line and configuration file of `netattachd`.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use serde::{Deserialize, Serialize};

use super::file::{self, SettingsFileError};
use super::monitoring::{LogSettings, MetricsSettings, TracesSettings};
use super::policies::{AlwaysAllow, Overflow, PolicyTypes, WrittenCommonRules};
use crate::attach::{DefaultNetwork, InvalidDefaultNetwork, RepeatedAdd, standalone};
use crate::bpf::{self, Detail, LogObject};
use crate::built;
use crate::builtin::{self, InvalidSettings, ThisNode};
use crate::cni::CniError;
use crate::cni::identifier::check_network_name;
use crate::delegate::DEFAULT_DIRECTORY;
use crate::enforce::admission::EnforcementRequirement;
use crate::enforce::node_defaults::NodeDefaults;
use crate::fast_path;
use crate::hooks::AttachBy;
use crate::multus;
use crate::npwg::NetworkRef;
use crate::npwg::network::{is_label, is_subdomain};
use crate::npwg::status::Form;
use crate::objects::access::{Isolation, Restrictions};
use crate::plan::CachedResults;
use crate::plan::cluster_routes::Keep;
use crate::plan::pod_sources::Permission;
use crate::plan::resolve::UnsupportedPortMappings;
use crate::rpc::shim::{DEFAULT_AGENT_WAIT, MAX_AGENT_WAIT};
use crate::source::read::policy::CommonRulesError;
use crate::step::EnforceWhen;

/// Attaches pods to their networks.
///
/// Every option can also be set in the configuration file; the command line takes precedence.
#[derive(Debug, Clone, Default, Parser)]
#[command(name = "netattachd", version, long_version = long_version())]
pub struct Arguments {
    /// Configuration file (YAML).
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Directory of manifests: Pod, NetworkAttachmentDefinition, Namespace, MultiNetworkPolicy, NetworkPolicy.
    #[arg(long, value_name = "DIR")]
    pub source: Option<PathBuf>,
    /// Read pods, networks and policies from the Kubernetes API, as the service account of the agent's pod.
    #[arg(long, conflicts_with = "source")]
    pub kubernetes: bool,
    /// The same, as this kubeconfig says.
    #[arg(long, value_name = "FILE", conflicts_with = "source")]
    pub kubeconfig: Option<PathBuf>,
    /// Name of this node in the cluster [default: the variable NODE_NAME, else the host's name].
    #[arg(long, value_name = "NAME")]
    pub node_name: Option<String>,
    /// Directory of the socket and the published network-status [default: /run/netattach].
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
    /// Directory of the journal [default: /var/lib/netattach].
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Directory of the pinned BPF programs and maps [default: /sys/fs/bpf/netattach].
    #[arg(long, value_name = "DIR")]
    pub bpffs: Option<PathBuf>,
    /// The network that every pod gets: NAMESPACE/NAME or NAME of a definition, the path of a CNI configuration or of a
    /// directory of them, builtin, or chained [default: kube-system/default].
    #[arg(long, value_name = "NETWORK")]
    pub default_network: Option<String>,
    /// Directory of other CNI plugins; may be repeated [default: /opt/cni/bin].
    #[arg(long = "cni-bin-dir", value_name = "DIR")]
    pub cni_bin_dirs: Vec<PathBuf>,
    /// Directory of CNI configurations for definitions without one [default: /etc/cni/netattach.d].
    #[arg(long, value_name = "DIR")]
    pub cni_conf_dir: Option<PathBuf>,
    /// Start other plugins in this root directory, where the node's is mounted in a container.
    #[arg(long, value_name = "DIR")]
    pub plugin_root: Option<PathBuf>,
    /// Log what becomes of packets: their verdicts, or what every stage makes of them. Needs --bpf-log-object.
    #[arg(long, value_name = "HOW", value_enum)]
    pub bpf_log: Option<BpfLog>,
    /// The BPF object that logs, from `cargo xtask build-ebpf --log`.
    #[arg(long, value_name = "FILE")]
    pub bpf_log_object: Option<PathBuf>,
    /// Log the packets of this attachment only.
    #[arg(long, value_name = "NAMESPACE/POD/INTERFACE")]
    pub bpf_log_of: Option<String>,
    /// While another agent serves this node, check what can be checked, and take over when it ends; be refused if it has
    /// not ended after so many seconds [default: 0, be refused at once].
    #[arg(long, value_name = "SECONDS")]
    pub stand_by: Option<u64>,
    /// Show what this node offers an agent with these settings, and what to do about what is missing; changes nothing.
    /// Exit code 1 if something needed is missing.
    #[arg(long)]
    pub check: bool,
    /// Output of --check.
    #[arg(long, short, value_enum, default_value_t, requires = "check")]
    pub output: CheckFormat,
    /// Mount a BPF file system on DIR, unless there is one, and end.
    #[arg(long, value_name = "DIR", exclusive = true)]
    pub mount_bpffs: Option<PathBuf>,
}

/// Output of `--check`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum CheckFormat {
    /// Aligned columns.
    #[default]
    Table,
    /// For programs: the field names are stable.
    Json,
}

fn long_version() -> &'static str {
    static TEXT: LazyLock<String> =
        LazyLock::new(|| built::describe(&[("programs", format!("object {}", bpf::embedded_object()))]));
    &TEXT
}

/// Most permissions in `podSources`.
const MOST_PERMISSIONS: u64 = 256;

/// Most ports in `reservedHostPorts`.
const MOST_RESERVED_PORTS: u64 = 1024;

/// Most ranges in `clusterCIDRs`.
const MOST_CLUSTER_CIDRS: u64 = 64;

/// The agent's settings. The configuration file has the same keys in camel case; unknown ones are refused.
///
/// A new setting is a field here, its default below, and its row in `docs/configuration.md`: a test compares them and
/// prints the row that is missing. A section is a struct of its own, never optional.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Settings {
    /// Directory of manifests.
    pub source: PathBuf,
    /// The Kubernetes API as the source.
    pub kubernetes: Kubernetes,
    /// How long an ADD waits for a pod that the source does not have yet, in seconds; 0: it does not wait.
    pub pod_wait_seconds: u64,
    /// Directory of the socket and the network-status.
    pub run_dir: PathBuf,
    /// Directory of the journal.
    pub state_dir: PathBuf,
    /// Directory of pinned BPF programs and maps.
    pub bpffs: PathBuf,
    /// See [`Settings::stand_by`].
    stand_by_seconds: u64,
    /// See [`Settings::default_network`].
    default_network: String,
    /// Namespace of a default network that is given without one.
    pub default_network_namespace: String,
    /// The network that the agent makes itself (`defaultNetwork: builtin`).
    pub builtin: builtin::Settings,
    /// Restricts pods to networks of their own namespace and of [`Settings::global_namespaces`].
    namespace_isolation: bool,
    /// Namespaces whose networks every pod may use.
    global_namespaces: Vec<String>,
    /// Directories of other CNI plugins, searched after the runtime's own `CNI_PATH`.
    pub cni_bin_dirs: Vec<PathBuf>,
    /// Directory of CNI configurations for definitions without one.
    pub cni_conf_dir: PathBuf,
    /// Directory of device information, where device plugins and CNI plugins expect it.
    pub device_info_dir: PathBuf,
    /// The kubelet's PodResources socket, which reports the devices of a pod.
    pub pod_resources_socket: PathBuf,
    /// The kubelet's checkpoint of device allocations, which has the pods' uids.
    pub device_checkpoint: PathBuf,
    /// Form of the network-status.
    pub network_status: Form,
    /// The configuration file that the agent writes for the container runtime.
    pub cni_conf: CniConf,
    /// Directory where Multus recorded the pods that it attached before netattach replaced it.
    pub multus_state_dir: PathBuf,
    /// How long a sandbox must be gone before it is detached without a DEL, in seconds; 0: it is never
    /// detached.
    pub collect_after_seconds: u64,
    /// See [`Settings::runtime_socket`].
    runtime_socket: PathBuf,
    /// The action on a pod that runs without its selected networks.
    pub repair: Repair,
    /// How long such a pod is watched before the action is taken, in seconds.
    pub repair_after_seconds: u64,
    /// How other plugins are executed.
    pub delegation: Delegation,
    /// Whether definitions with the same name in two namespaces, whose configurations have no `name`, have separate
    /// pools.
    pub separate_pools: bool,
    /// The effect of an invalid selection annotation.
    pub invalid_annotation: InvalidAnnotation,
    /// The effect of a hostPort that no plugin of the default network can open.
    pub unsupported_port_mappings: UnsupportedPortMappings,
    /// Ports of the node that are never forwarded to a pod, besides the agent's own.
    pub reserved_host_ports: Vec<u16>,
    /// See [`Settings::keep_cluster_routes`].
    keep_cluster_routes: Option<bool>,
    /// Ranges of the cluster whose routes stay on the cluster's interface, besides the ranges that the
    /// cluster reports.
    #[serde(rename = "clusterCIDRs")]
    pub cluster_cidrs: Vec<ipnet::IpNet>,
    /// Which relaxations of the source check pods may request, by the arguments of their selections.
    pub pod_sources: Vec<Permission>,
    /// The effect of an ADD for a sandbox that is attached already.
    pub repeated_add: RepeatedAdd,
    /// The directions that a policy without `policyTypes` isolates.
    pub policy_types_inference: PolicyTypes,
    /// See [`Settings::network_policy`].
    network_policy: Option<bool>,
    /// Prefixes that pass every policy.
    pub always_allow: AlwaysAllow,
    /// Rules that apply in addition to the policies.
    pub common_rules: WrittenCommonRules,
    /// The handling of attachments whose new policy does not fit into the maps.
    pub on_overflow: Overflow,
    /// The effect of an ADD whose pod is selected by a policy that cannot be enforced on it; definitions
    /// may override this.
    pub unenforceable: EnforcementRequirement,
    /// How the packet programs are attached.
    pub attach: AttachBy,
    /// Most attachments with a dataplane at a time; fixed when the maps are first created.
    pub max_attachments: u32,
    /// What is logged of packets.
    bpf_log: BpfLog,
    /// The BPF object that logs packets.
    bpf_log_object: PathBuf,
    /// The only attachment whose packets are logged: `NAMESPACE/POD/INTERFACE`.
    bpf_log_of: String,
    /// Most pods that are attached at the same time.
    pub parallel_adds: usize,
    /// Most new flows of one attachment per second; 0: no limit.
    pub new_flows_per_second: u32,
    /// The handling of connections that are older than the flow table.
    pub midstream: Midstream,
    /// The handling of flows when the policy that allowed them changes.
    pub established_on_change: EstablishedOnChange,
    /// When packets between pods of the node bypass its network stack.
    pub fast_path: fast_path::Mode,
    /// Whether the node's uplinks drop packets early, before the kernel's network stack processes them.
    pub xdp: fast_path::Xdp,
    /// ICMP is allowed regardless of policies.
    #[serde(rename = "acceptICMP")]
    pub accept_icmp: bool,
    /// ICMPv6 is allowed regardless of policies.
    #[serde(rename = "acceptICMPv6")]
    pub accept_icmpv6: bool,
    /// The handling of frames that macvlans without an attachment send, on parents of attachments.
    pub other_macvlans: OtherMacvlans,
    /// Probes and metrics.
    pub metrics: MetricsSettings,
    /// The log.
    pub log: LogSettings,
    /// Traces of requests.
    pub traces: TracesSettings,
}

/// The Kubernetes API as the source, and the publication of network-status there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Kubernetes {
    /// Whether the Kubernetes API is the source.
    pub enabled: bool,
    /// A kubeconfig; empty: the service account of the agent's pod.
    pub kubeconfig: PathBuf,
    /// Name of this node; empty: see [`Settings::node_name`].
    pub node_name: String,
    /// Whether an ADD waits for its network-status to be published.
    pub status: StatusWrites,
    /// Key of the node's taint that is removed when the node is ready; empty: no taint is removed.
    pub startup_taint: String,
    /// How long one watch request for pods lasts, in seconds.
    pub watch_seconds: u32,
}

/// Whether an ADD waits for its network-status to be published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StatusWrites {
    /// The status is published after the ADD, and retried until it succeeds.
    #[default]
    Later,
    /// The ADD fails unless the status is published.
    Required,
}

/// The configuration file that the agent writes for the container runtime.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct CniConf {
    /// Its directory; empty: no file is written.
    pub dir: PathBuf,
    /// Its file name.
    pub name: String,
    /// Name of the network in the file.
    pub network: String,
    /// The action when another program renames, removes or changes the file.
    pub repair: ConfRepair,
    /// Whether the file is removed instead of written, so that netattach does not attach new pods.
    pub remove: bool,
    /// How long ADD and CHECK wait for an agent that has served before, in seconds.
    pub agent_wait_seconds: u64,
}

/// The action when another program renames, removes or changes the runtime's configuration file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ConfRepair {
    /// It is written again, a few times.
    #[default]
    Rewrite,
    /// It is reported, and written again at the next start.
    Report,
}

/// The action on a pod that runs without its networks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Repair {
    /// The pod is only reported.
    #[default]
    Report,
    /// The networks are attached to the pod.
    Attach,
    /// The pod is evicted, so that its controller creates a new one.
    Evict,
}

/// How other plugins are executed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Delegation {
    /// Built-in plugin types that are executed as plugins instead.
    pub exec: Vec<String>,
    /// Longest time of one call, in seconds.
    pub timeout_seconds: u64,
    /// Most memory of all plugins together, in MiB; 0: they run in the agent's own control group. If unset,
    /// a default applies, or the agent's own control group if the agent cannot create another.
    #[serde(rename = "memoryLimitMiB")]
    pub memory_limit_mib: Option<u64>,
    /// The attachments that are recorded in libcni's cache.
    pub result_cache: CachedResults,
    /// libcni's cache directory: the files are in `results` below it.
    pub cache_dir: PathBuf,
    /// When packet programs run on interfaces that other plugins create; definitions may override this.
    pub enforce: EnforceWhen,
    /// The node's root directory, in which plugins are started; empty: the agent's own root directory. `/`
    /// means the same, but an agent in a container then does not warn about it.
    pub root: PathBuf,
}

/// The effect of an invalid selection annotation (NPWG 4.1: ignored; Multus: fails the pod).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum InvalidAnnotation {
    /// The pod fails.
    #[default]
    Fail,
    /// The pod gets the default network only.
    Ignore,
}

/// What is logged of packets, by a BPF object built for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum BpfLog {
    /// Nothing.
    #[default]
    Off,
    /// Their verdicts.
    Debug,
    /// What every stage makes of them.
    Trace,
}

/// The handling of connections that are older than the flow table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Midstream {
    /// They are judged as if the sender of the packet opened them now.
    #[default]
    Pickup,
    /// They are dropped.
    Drop,
}

/// The handling of frames from other netns whose source address belongs to no attachment, on parents of
/// attachments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OtherMacvlans {
    /// They are dropped: a pod can create such a macvlan itself.
    #[default]
    Drop,
    /// They pass: other software attaches pods or machines to the same parents.
    Pass,
}

/// The handling of flows when the policy that allowed them changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EstablishedOnChange {
    /// They are judged again by the new policy.
    #[default]
    Recheck,
    /// They continue.
    Keep,
}

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
    #[error("clusterCIDRs[{0}]: the default route itself cannot stay behind")]
    WholeRange(usize),
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
        "traces.endpoint: {0:?} is not the URL of a collector, such as http://127.0.0.1:4318/v1/traces: without TLS and credentials, so on this node"
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

/// Default limit of the memory of all executed plugins together, in MiB; a plugin takes about 10.
const PLUGIN_MEMORY: u64 = 256;

impl Default for Settings {
    fn default() -> Self {
        Self {
            source: PathBuf::new(),
            kubernetes: Kubernetes::default(),
            pod_wait_seconds: 5,
            run_dir: "/run/netattach".into(),
            state_dir: "/var/lib/netattach".into(),
            bpffs: "/sys/fs/bpf/netattach".into(),
            stand_by_seconds: 0,
            default_network: "kube-system/default".into(),
            default_network_namespace: "kube-system".into(),
            builtin: builtin::Settings::default(),
            namespace_isolation: false,
            global_namespaces: vec!["default".into()],
            cni_bin_dirs: vec!["/opt/cni/bin".into()],
            cni_conf_dir: "/etc/cni/netattach.d".into(),
            device_info_dir: "/var/run/k8s.cni.cncf.io/devinfo".into(),
            pod_resources_socket: "/var/lib/kubelet/pod-resources/kubelet.sock".into(),
            device_checkpoint: "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint".into(),
            network_status: Form::default(),
            cni_conf: CniConf::default(),
            multus_state_dir: multus::STATE_DIRECTORY.into(),
            collect_after_seconds: 60,
            runtime_socket: PathBuf::new(),
            repair: Repair::default(),
            repair_after_seconds: 60,
            delegation: Delegation::default(),
            separate_pools: true,
            invalid_annotation: InvalidAnnotation::default(),
            unsupported_port_mappings: UnsupportedPortMappings::default(),
            // The kubelet's API, and kube-proxy's health check for load balancers.
            reserved_host_ports: vec![10250, 10256],
            keep_cluster_routes: None,
            cluster_cidrs: Vec::new(),
            pod_sources: Vec::new(),
            repeated_add: RepeatedAdd::default(),
            policy_types_inference: PolicyTypes::default(),
            network_policy: None,
            always_allow: AlwaysAllow::default(),
            common_rules: WrittenCommonRules::default(),
            on_overflow: Overflow::default(),
            unenforceable: EnforcementRequirement::default(),
            attach: AttachBy::default(),
            max_attachments: 8192,
            bpf_log: BpfLog::default(),
            bpf_log_object: PathBuf::new(),
            bpf_log_of: String::new(),
            parallel_adds: 8,
            new_flows_per_second: 25_000,
            midstream: Midstream::default(),
            established_on_change: EstablishedOnChange::default(),
            fast_path: fast_path::Mode::default(),
            xdp: fast_path::Xdp::default(),
            accept_icmp: false,
            accept_icmpv6: false,
            other_macvlans: OtherMacvlans::default(),
            metrics: MetricsSettings::default(),
            log: LogSettings::default(),
            traces: TracesSettings::default(),
        }
    }
}

impl Default for Kubernetes {
    fn default() -> Self {
        Self {
            enabled: false,
            kubeconfig: PathBuf::new(),
            node_name: String::new(),
            status: StatusWrites::default(),
            startup_taint: String::new(),
            watch_seconds: 60,
        }
    }
}

impl Default for CniConf {
    fn default() -> Self {
        Self {
            dir: PathBuf::new(),
            name: "00-netattach.conflist".into(),
            network: "netattach".into(),
            repair: ConfRepair::default(),
            remove: false,
            agent_wait_seconds: DEFAULT_AGENT_WAIT,
        }
    }
}

impl Default for Delegation {
    fn default() -> Self {
        Self {
            exec: Vec::new(),
            timeout_seconds: 60,
            memory_limit_mib: None,
            result_cache: CachedResults::default(),
            cache_dir: DEFAULT_DIRECTORY.into(),
            enforce: EnforceWhen::default(),
            root: PathBuf::new(),
        }
    }
}

impl Delegation {
    /// Returns the root directory in which plugins are started, unless it is the agent's own.
    pub(crate) fn plugin_root(&self) -> Option<&Path> {
        Some(self.root.as_path()).filter(|root| self.names_root() && *root != Path::new("/"))
    }

    /// Whether the root directory of plugins is set explicitly.
    pub(crate) fn names_root(&self) -> bool {
        !self.root.as_os_str().is_empty()
    }
}

impl Settings {
    /// Merges the configuration file with the command line.
    ///
    /// # Errors
    /// [`SettingsError`], naming the key or option.
    pub fn read(arguments: Arguments) -> Result<Self, SettingsError> {
        let settings = Self::unvalidated(arguments)?;
        settings.validate()?;
        Ok(settings)
    }

    /// Merges without checking whether an agent could run with the settings: a node is checked before it
    /// has a source.
    ///
    /// # Errors
    /// The file cannot be read, or has unknown keys or invalid values.
    pub(crate) fn unvalidated(arguments: Arguments) -> Result<Self, SettingsError> {
        let mut settings = match arguments.config {
            Some(path) => file::read(&path).map_err(|source| SettingsError::File { path, source })?,
            None => Self::default(),
        };
        let replace = |setting: &mut PathBuf, argument: Option<PathBuf>| {
            if let Some(argument) = argument {
                *setting = argument;
            }
        };
        replace(&mut settings.source, arguments.source);
        settings.kubernetes.enabled |= arguments.kubernetes || arguments.kubeconfig.is_some();
        replace(&mut settings.kubernetes.kubeconfig, arguments.kubeconfig);
        if let Some(name) = arguments.node_name {
            settings.kubernetes.node_name = name;
        }
        replace(&mut settings.run_dir, arguments.run_dir);
        replace(&mut settings.state_dir, arguments.state_dir);
        replace(&mut settings.bpffs, arguments.bpffs);
        replace(&mut settings.cni_conf_dir, arguments.cni_conf_dir);
        replace(&mut settings.bpf_log_object, arguments.bpf_log_object);
        replace(&mut settings.delegation.root, arguments.plugin_root);
        if let Some(how) = arguments.bpf_log {
            settings.bpf_log = how;
        }
        if let Some(of) = arguments.bpf_log_of {
            settings.bpf_log_of = of;
        }
        if let Some(seconds) = arguments.stand_by {
            settings.stand_by_seconds = seconds;
        }
        if let Some(network) = arguments.default_network {
            settings.default_network = network;
        }
        if !arguments.cni_bin_dirs.is_empty() {
            settings.cni_bin_dirs = arguments.cni_bin_dirs;
        }
        Ok(settings)
    }

    fn validate(&self) -> Result<(), SettingsError> {
        let kubernetes = &self.kubernetes;
        match (self.source.as_os_str().is_empty(), kubernetes.enabled) {
            (_, false) if !kubernetes.kubeconfig.as_os_str().is_empty() => {
                return Err(SettingsError::UnusedKubeconfig);
            }
            (true, false) => return Err(SettingsError::NoSource),
            (false, true) => return Err(SettingsError::TwoSources),
            (true, true) => drop(self.node_name()?),
            (false, false) => {}
        }
        let is_builtin = self.default_network()? == DefaultNetwork::Builtin;
        self.builtin.validate()?;
        if self.default_network()? == DefaultNetwork::Chained
            && !self.cni_conf.dir.as_os_str().is_empty()
            && !self.cni_conf.remove
        {
            return Err(SettingsError::ChainedConf(self.cni_conf.dir.clone()));
        }
        if is_builtin && !kubernetes.enabled && self.builtin.pod_cidrs.is_empty() {
            return Err(InvalidSettings::NoRange.into());
        }
        namespace("defaultNetworkNamespace".into(), &self.default_network_namespace)?;
        for (index, name) in self.global_namespaces.iter().enumerate() {
            namespace(format!("globalNamespaces[{index}]"), name)?;
        }
        if let Some(index) = self.cluster_cidrs.iter().position(|net| net.prefix_len() == 0) {
            return Err(SettingsError::WholeRange(index));
        }
        let mistake = |(index, permission): (usize, &Permission)| {
            permission.problem().map(|problem| SettingsError::PodSources { index, problem })
        };
        if let Some(mistake) = self.pod_sources.iter().enumerate().find_map(mistake) {
            return Err(mistake);
        }
        self.cni_conf.validate()?;
        self.policy_options(self.restrictions()?)?;
        let others =
            |(_, kind): &(usize, &String)| !standalone::built_in().any(|known| known == kind.as_str());
        if let Some((index, kind)) = self.delegation.exec.iter().enumerate().find(others) {
            return Err(SettingsError::NotBuiltIn { index, kind: kind.clone() });
        }
        if self.delegation.names_root() && !self.delegation.root.is_absolute() {
            return Err(SettingsError::Root(self.delegation.root.clone()));
        }
        let range = |key, value: u64, min, max| {
            if (min..=max).contains(&value) {
                Ok(())
            } else {
                Err(SettingsError::Range { key, value, min, max })
            }
        };
        self.log_object()?;
        let of = self.bpf_log_of.split('/').filter(|part| !part.is_empty()).count();
        if !self.bpf_log_of.is_empty() && (of != 3 || self.bpf_log_of.split('/').count() != 3) {
            return Err(SettingsError::BpfLogOf(self.bpf_log_of.clone()));
        }
        range("clusterCIDRs", self.cluster_cidrs.len() as u64, 0, MOST_CLUSTER_CIDRS)?;
        range("podSources", self.pod_sources.len() as u64, 0, MOST_PERMISSIONS)?;
        range("reservedHostPorts", self.reserved_host_ports.len() as u64, 0, MOST_RESERVED_PORTS)?;
        range("maxAttachments", self.max_attachments.into(), 2, 65_534)?;
        range("standBySeconds", self.stand_by_seconds, 0, 86_400)?;
        range("kubernetes.watchSeconds", kubernetes.watch_seconds.into(), 1, 600)?;
        range("podWaitSeconds", self.pod_wait_seconds, 0, 60)?;
        range("cniConf.agentWaitSeconds", self.cni_conf.agent_wait_seconds, 0, MAX_AGENT_WAIT)?;
        range("collectAfterSeconds", self.collect_after_seconds, 0, 86_400)?;
        if !self.runtime_socket.as_os_str().is_empty() && !self.runtime_socket.is_absolute() {
            return Err(SettingsError::RuntimeSocket(self.runtime_socket.clone()));
        }
        range("repairAfterSeconds", self.repair_after_seconds, 1, 86_400)?;
        self.check_repair()?;
        self.metrics.listen()?;
        self.traces.endpoint()?;
        range("parallelAdds", self.parallel_adds as u64, 1, 128)?;
        if let Some(limit) = self.delegation.memory_limit_mib.filter(|limit| *limit != 0) {
            range("delegation.memoryLimitMiB", limit, 16, 1 << 20)?;
        }
        range("delegation.timeoutSeconds", self.delegation.timeout_seconds, 1, 600)
    }

    /// Refuses repairs that cannot be carried out.
    fn check_repair(&self) -> Result<(), SettingsError> {
        let how = match self.repair {
            Repair::Report => return Ok(()),
            Repair::Attach => "attach",
            Repair::Evict => "evict",
        };
        if !self.kubernetes.enabled {
            return Err(SettingsError::Repair { how, needs: "kubernetes.enabled" });
        }
        if self.cni_conf.remove {
            return Err(SettingsError::Repair {
                how,
                needs: "cniConf.remove to be false: no new pod is netattach's",
            });
        }
        if self.repair == Repair::Attach && self.runtime_socket.as_os_str().is_empty() {
            return Err(SettingsError::Repair {
                how,
                needs: "runtimeSocket, which tells where a pod's namespace is",
            });
        }
        Ok(())
    }

    /// Returns the name of this node in the cluster: the setting, else the variable `NODE_NAME`, else the
    /// host's name in lower case, which is the kubelet's default.
    ///
    /// # Errors
    /// [`SettingsError::NodeName`].
    pub fn node_name(&self) -> Result<String, SettingsError> {
        let set = Some(self.kubernetes.node_name.clone()).filter(|name| !name.is_empty());
        let named = set.or_else(|| std::env::var("NODE_NAME").ok().filter(|name| !name.is_empty()));
        let host = || rustix::system::uname().nodename().to_string_lossy().trim().to_lowercase();
        let name = named.unwrap_or_else(host);
        if is_subdomain(&name) { Ok(name) } else { Err(SettingsError::NodeName(name)) }
    }

    /// Returns how long to wait for the agent that already serves this node to end. `None`: not at all.
    pub(crate) fn stand_by(&self) -> Option<Duration> {
        (self.stand_by_seconds > 0).then(|| Duration::from_secs(self.stand_by_seconds))
    }

    /// Returns how long a sandbox must be gone before it is detached without a DEL. `None`: it is never
    /// detached.
    pub fn collect_after(&self) -> Option<Duration> {
        (self.collect_after_seconds > 0).then(|| Duration::from_secs(self.collect_after_seconds))
    }

    /// Returns how long a pod without its networks is watched before it is repaired.
    pub fn repair_after(&self) -> Duration {
        Duration::from_secs(self.repair_after_seconds)
    }

    /// The container runtime's CRI socket. `None`: the runtime is not asked for its sandboxes.
    pub fn runtime_socket(&self) -> Option<PathBuf> {
        (!self.runtime_socket.as_os_str().is_empty()).then(|| self.runtime_socket.clone())
    }

    /// Returns the network that every pod gets.
    ///
    /// # Errors
    /// [`InvalidDefaultNetwork`].
    pub fn default_network(&self) -> Result<DefaultNetwork, InvalidDefaultNetwork> {
        self.default_network.parse()
    }

    /// Returns which routes stay on the cluster's interface when a pod's default route moves: as set; if
    /// unset, they stay if a cluster is the source.
    pub fn keep_cluster_routes(&self) -> Option<Keep> {
        let asks_cluster = self.kubernetes.enabled;
        let keep = Keep { cidrs: self.cluster_cidrs.clone(), asks_cluster };
        self.keep_cluster_routes.unwrap_or(asks_cluster).then_some(keep)
    }

    /// Whether NetworkPolicies are enforced on the pods' default networks: as set; if unset, they are
    /// enforced if the agent makes the default network, because no other software enforces them there.
    pub fn network_policy(&self) -> bool {
        self.network_policy.unwrap_or_else(|| self.default_network() == Ok(DefaultNetwork::Builtin))
    }

    /// Returns this node, and the source of the ranges of its pods.
    ///
    /// # Errors
    /// [`SettingsError::NodeName`], with a cluster as the source.
    pub fn this_node(&self) -> Result<ThisNode, SettingsError> {
        let name = self.kubernetes.enabled.then(|| self.node_name()).transpose()?;
        Ok(ThisNode { name, pod_cidrs: self.builtin.pod_cidrs.clone() })
    }

    /// Returns which namespaces may use which networks.
    ///
    /// # Errors
    /// [`SettingsError::DefaultNetwork`].
    pub fn restrictions(&self) -> Result<Restrictions, SettingsError> {
        let global_namespaces = self.global_namespaces.iter().cloned().collect();
        let default_network = match self.default_network()? {
            DefaultNetwork::Definition(network) => Some(network),
            DefaultNetwork::Name(name) => Some(NetworkRef::new(&self.default_network_namespace, name)),
            DefaultNetwork::Path(_) | DefaultNetwork::Builtin | DefaultNetwork::Chained => None,
        };
        let isolation = self.namespace_isolation.then_some(Isolation { global_namespaces });
        Ok(Restrictions { default_network, isolation })
    }

    /// The socket that the CNI executable and the command line connect to.
    pub fn socket(&self) -> PathBuf {
        self.run_dir.join("netattach.sock")
    }

    /// Returns the defaults for every attachment, except those that depend on the kernel.
    pub fn passage(&self) -> NodeDefaults {
        NodeDefaults {
            new_flows_per_second: self.new_flows_per_second,
            strict_connections: self.midstream == Midstream::Drop,
            keep_established: self.established_on_change == EstablishedOnChange::Keep,
            accept_icmp: self.accept_icmp,
            accept_icmpv6: self.accept_icmpv6,
            paced: false,
            fast_path: self.fast_path,
            xdp: self.xdp,
            strangers: self.other_macvlans == OtherMacvlans::Pass,
        }
    }

    /// Returns the BPF object that logs packets, if logging is enabled.
    ///
    /// # Errors
    /// [`SettingsError::BpfLogObject`].
    pub fn log_object(&self) -> Result<Option<LogObject>, SettingsError> {
        let detail = match self.bpf_log {
            BpfLog::Off => return Ok(None),
            BpfLog::Debug => Detail::Verdicts,
            BpfLog::Trace => Detail::Stages,
        };
        if self.bpf_log_object.as_os_str().is_empty() {
            return Err(SettingsError::BpfLogObject);
        }
        Ok(Some(LogObject { path: self.bpf_log_object.clone(), detail }))
    }

    /// Returns the only attachment whose packets are logged, as `NAMESPACE/POD/INTERFACE`.
    pub fn bpf_log_of(&self) -> Option<String> {
        (!self.bpf_log_of.is_empty()).then(|| self.bpf_log_of.clone())
    }

    /// How long an ADD waits for a pod that the source does not have.
    pub fn pod_wait(&self) -> Duration {
        Duration::from_secs(self.pod_wait_seconds)
    }

    /// How long one call of another plugin may take.
    pub fn plugin_timeout(&self) -> Duration {
        Duration::from_secs(self.delegation.timeout_seconds)
    }

    /// Returns the memory limit of all plugins together, in bytes; `None`: they have no control group of
    /// their own.
    pub fn plugin_memory(&self) -> Option<u64> {
        let mib = self.delegation.memory_limit_mib.unwrap_or(PLUGIN_MEMORY);
        (mib != 0).then_some(mib << 20)
    }
}

impl CniConf {
    fn validate(&self) -> Result<(), SettingsError> {
        let stem = self.name.strip_suffix(".conflist").unwrap_or_default();
        if stem.is_empty() || self.name.contains(['/', '\0']) {
            return Err(SettingsError::ConfName(self.name.clone()));
        }
        if self.dir.is_relative() && !self.dir.as_os_str().is_empty() {
            return Err(SettingsError::ConfDir(self.dir.clone()));
        }
        if self.remove && self.dir.as_os_str().is_empty() {
            return Err(SettingsError::ConfRemove);
        }
        check_network_name(&self.network).map_err(SettingsError::ConfNetwork)
    }
}

fn namespace(key: String, name: &str) -> Result<(), SettingsError> {
    if is_label(name) { Ok(()) } else { Err(SettingsError::Namespace { key, value: name.to_owned() }) }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
