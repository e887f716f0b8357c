//! The outcome of compilation: the policies of every attachment of this node, and conditions of the objects.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use super::lookup::CompiledPolicy;
use crate::objects::ObjectName;
use crate::objects::policy::{Policy, PolicyKind, PolicyName, Severity};

/// What shall be in force on this node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Desired {
    /// What applies to each attachment.
    pub endpoints: BTreeMap<u32, EndpointPolicy>,
    /// Attachments whose pod is unknown, so that nobody can say what selects them: what is in force for them
    /// must stay in force.
    pub undecided: BTreeSet<u32>,
    /// What authors of policies and pods should know, sorted.
    pub conditions: Vec<Condition>,
}

/// What applies to one attachment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EndpointPolicy {
    /// What may come in; `None`: not isolated, everything.
    pub ingress: Option<Arc<CompiledPolicy>>,
    /// What may go out; `None`: not isolated, everything.
    pub egress: Option<Arc<CompiledPolicy>>,
    /// The policies that select the attachment, in the order of their names.
    pub policies: Vec<PolicyName>,
    /// Those of them that isolate it from what comes in: only their rules for that count.
    pub ingress_by: Vec<PolicyName>,
    /// The same for what goes out.
    pub egress_by: Vec<PolicyName>,
}

/// Something that an object's author should know.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Condition {
    /// About what.
    pub object: Subject,
    /// How much it matters.
    pub severity: Severity,
    /// What, in one line.
    pub message: String,
}

/// What a condition is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    /// A policy.
    Policy(PolicyName),
    /// A pod.
    Pod(ObjectName),
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Policy(name) if name.kind == PolicyKind::Multi => write!(f, "multi-networkpolicy {name}"),
            Self::Policy(name) => write!(f, "{name}"),
            Self::Pod(name) => write!(f, "pod {name}"),
        }
    }
}

/// What an object has against itself.
pub(super) fn conditions_of(policy: &Policy) -> impl Iterator<Item = Condition> {
    policy.problems.iter().map(|problem| Condition {
        object: Subject::Policy(policy.name.clone()),
        severity: problem.severity,
        message: problem.to_string(),
    })
}
