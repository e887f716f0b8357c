//! The outcome of compilation: the policies of every attachment of this node, and conditions of the objects.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use super::conditions::Conditions;
use super::lookup::CompiledPolicy;
use crate::objects::ObjectName;
use crate::objects::policy::{Policy, PolicyKind, PolicyName, Severity};

/// The desired policies of this node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Desired {
    /// The policy of each attachment: the same value from one update to the next while it is unchanged.
    pub endpoints: BTreeMap<u32, Arc<EndpointPolicy>>,
    /// Attachments whose pod is unknown, so that the policies that select them are unknown too: their policies in the
    /// maps must stay.
    pub undecided: BTreeSet<u32>,
    /// Problems that are reported to the authors of policies and pods.
    pub conditions: Conditions,
}

/// The policy of one attachment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EndpointPolicy {
    /// Tables for ingress; `None`: not isolated.
    pub ingress: Option<Arc<CompiledPolicy>>,
    /// Tables for egress; `None`: not isolated.
    pub egress: Option<Arc<CompiledPolicy>>,
    /// The policies that select the attachment, sorted by name.
    pub policies: Vec<PolicyName>,
    /// Those of them that isolate ingress: only their ingress rules count.
    pub ingress_by: Vec<PolicyName>,
    /// Those of them that isolate egress.
    pub egress_by: Vec<PolicyName>,
}

/// A problem of an object that its author should know.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Condition {
    /// The object.
    pub object: Subject,
    /// The severity.
    pub severity: Severity,
    /// The problem, in one line.
    pub message: String,
}

/// The object that a condition is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    /// A policy.
    Policy(PolicyName),
    /// A pod.
    Pod(ObjectName),
    /// A namespace, with more problems than are reported individually.
    Namespace(String),
}

impl Subject {
    /// Its namespace.
    pub fn namespace(&self) -> &str {
        match self {
            Self::Policy(name) => &name.object.namespace,
            Self::Pod(name) => &name.namespace,
            Self::Namespace(namespace) => namespace,
        }
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Policy(name) if name.kind == PolicyKind::Multi => write!(f, "multi-networkpolicy {name}"),
            Self::Policy(name) => write!(f, "{name}"),
            Self::Pod(name) => write!(f, "pod {name}"),
            Self::Namespace(namespace) => write!(f, "namespace {namespace}"),
        }
    }
}

/// Returns the problems found when the policy was read.
pub(super) fn conditions_of(policy: &Policy) -> impl Iterator<Item = Condition> {
    policy.problems.iter().map(|problem| Condition {
        object: Subject::Policy(policy.name.clone()),
        severity: problem.severity,
        message: problem.to_string(),
    })
}
