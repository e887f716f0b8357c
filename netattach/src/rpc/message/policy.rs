//! Policies: which apply to each attachment, and how often each rule has allowed a flow.

use serde::{Deserialize, Serialize};

use super::attachment::{AttachmentName, Level};
use super::status::Condition;

/// Policies as they are in force.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PolicyReport {
    /// One row per attachment.
    pub attachments: Vec<AttachmentPolicy>,
    /// How many flows each rule in force has allowed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<RuleFlows>,
    /// Problems of policies and of the objects they refer to.
    pub conditions: Vec<Condition>,
}

/// Policies of one attachment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachmentPolicy {
    /// Name of the attachment.
    #[serde(flatten)]
    pub name: AttachmentName,
    /// Number of the ingress policy in the kernel's maps; `None`: all traffic to the pod is allowed.
    pub ingress: Option<u32>,
    /// Number of the egress policy, likewise.
    pub egress: Option<u32>,
    /// Enforcement level of policies.
    pub enforcement: Level,
    /// The policies that select it: `namespace/name`, sorted.
    pub selected_by: Vec<String>,
}

/// How often a rule has allowed a flow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleFlows {
    /// Number of the policy in the kernel's maps.
    pub policy: u32,
    /// Number of the rule in it.
    pub rule: u32,
    /// `namespace/policy direction[number]`.
    pub text: String,
    /// Flows since the policy was installed.
    pub flows: u64,
}
