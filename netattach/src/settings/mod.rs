//! The settings of `netattachd`, from its command line and its configuration file.
//!
//! | module | what it does |
//! |---|---|
//! | `arguments` | the command line, which takes precedence over the file |
//! | `file` | reads the configuration file |
//! | `defaults` | the defaults |
//! | `policies`, `monitoring` | the settings about policies; about probes and metrics, the log, traces |
//! | `validate`, `error` | refuses settings with which no agent can run; why |
//! | `values` | the values that the agent takes from the settings |
//! | `networks` | how the settings affect finding and planning networks |

mod arguments;
#[cfg(test)]
mod config_tests;
mod defaults;
mod error;
mod file;
mod monitoring;
mod networks;
mod policies;
mod validate;
mod values;

use std::path::PathBuf;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

pub use self::arguments::{Arguments, CheckFormat};
pub use self::error::SettingsError;
pub use self::file::SettingsFileError;
pub(crate) use self::file::leaves;
pub use self::monitoring::{Endpoint, LogFormat, LogSettings, MetricsSettings, TracesSettings};
pub(crate) use self::monitoring::{OfAttachments, unprobed};
pub use self::policies::{AlwaysAllow, Overflow, PolicyTypes, WrittenCommonRules};
use crate::attach::RepeatedAdd;
use crate::builtin;
use crate::enforce::admission::EnforcementRequirement;
use crate::fast_path;
use crate::hooks::AttachBy;
use crate::npwg::status::Form;
use crate::plan::CachedResults;
use crate::plan::pod_sources::Permission;
use crate::plan::resolve::UnsupportedPortMappings;
use crate::step::EnforceWhen;

/// The agent's settings. The configuration file has the same keys in camel case; unknown ones are refused.
///
/// A new setting is a field here, its default in `defaults`, and its row in `docs/configuration.md`: a test compares them and
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
