//! The agent's own state.

use serde::{Deserialize, Serialize};

use super::attachment::FastPath;

/// The state of the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Version of the agent's software.
    pub version: String,
    /// Conditions for serving, in the order in which the agent starts.
    pub ready: Vec<Readiness>,
    /// Problems of the objects and files that the agent reads.
    pub source: Vec<Condition>,
    /// Problems of single networks, pools and attachments; others are not affected.
    #[serde(default)]
    pub troubles: Vec<Condition>,
    /// The kernel and its features, as probed.
    pub kernel: Kernel,
    /// How programs are attached to the node's ends of attachments and to parents of macvlans: `tcx` or `clsact`.
    pub attach_mode: String,
    /// How programs are attached to uplinks and to devices in pods.
    #[serde(default)]
    pub attach_mode_others: String,
    /// How often programs were reattached since the agent's start, after another process removed them.
    #[serde(default)]
    pub programs_put_back: u64,
    /// How many sandboxes were detached since the agent's start that no runtime had asked to detach.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub collected: u64,
    /// Resident memory in bytes.
    pub memory_bytes: u64,
    /// Number of attachments.
    pub attachments: u64,
    /// When the fast path is used: `auto`, `on` or `off`.
    #[serde(default)]
    pub fast_path_mode: String,
    /// Number of attachments in each state on the fast path.
    #[serde(default)]
    pub fast_path: Vec<FastPathCount>,
    /// The devices of the node by which packets may use the fast path to and from outside.
    #[serde(default)]
    pub uplinks: Vec<Uplink>,
    /// How full the flow table is, for each address family.
    #[serde(default)]
    pub flows: Vec<FlowTableUse>,
    /// Duration of the last change of policies; none before the first that affected an attachment.
    #[serde(default)]
    pub policy_change: Option<PolicyChange>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A problem with an object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Condition {
    /// Kind and name, `MultiNetworkPolicy shop/db`, or a file.
    pub object: String,
    /// The problem and its consequence, on one line.
    pub problem: String,
}

/// The duration of a change of policies, from the manifests to the maps, in microseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyChange {
    /// Reading what changed of the manifests.
    pub read_us: u64,
    /// Compiling the policies of the affected attachments.
    pub compile_us: u64,
    /// Writing new policies into the maps.
    pub write_us: u64,
    /// Switching attachments to them.
    pub switch_us: u64,
    /// New policies.
    pub policies: u64,
    /// Switched attachments.
    pub attachments: u64,
}

/// Number of attachments in one state on the fast path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FastPathCount {
    /// The state.
    #[serde(flatten)]
    pub standing: FastPath,
    /// Number of attachments.
    pub attachments: u64,
}

/// A device of the node that leads outside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Uplink {
    /// Its name.
    pub device: String,
    /// Its destination: `bridge` for a port of a bridge with attachments, `routes` for the device of a default route.
    pub leads_to: String,
    /// State on the fast path.
    #[serde(flatten)]
    pub standing: FastPath,
    /// Mode of the XDP program: `native`, `generic`, or why there is none; empty if none is requested.
    #[serde(default)]
    pub xdp: String,
}

/// How full one map of the flow table is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowTableUse {
    /// `IPv4` or `IPv6`.
    pub family: String,
    /// Flows in it, as of the last pass over it.
    pub entries: u64,
    /// Capacity of the map. Attachments have shares of it, so that it is full for all only if more of them start at
    /// once.
    pub capacity: u64,
}

/// One condition of readiness.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Readiness {
    /// Short name.
    pub condition: String,
    /// Whether it holds.
    pub met: bool,
    /// Why not, or details; may be empty.
    pub detail: String,
}

/// The running kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kernel {
    /// `uname -r`.
    pub release: String,
    /// Features that were probed.
    pub features: Vec<Feature>,
}

/// A feature that a kernel may lack.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Feature {
    /// Short name.
    pub name: String,
    /// Whether it is there.
    pub present: bool,
    /// What its absence means and since which kernel it exists; may be empty.
    pub detail: String,
}
