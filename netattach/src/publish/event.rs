//! Events: problems that an operator has to fix, about the affected object. Pure.

use std::fmt;

use crate::objects::ObjectName;

/// An event.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Event {
    /// The object that has the problem.
    pub regarding: Regarding,
    /// A reason of the documented list.
    pub reason: &'static str,
    /// The action that failed.
    pub action: &'static str,
    /// The problem, in one line.
    pub note: String,
}

/// The object of an event.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Regarding {
    /// A pod.
    Pod(ObjectName),
    /// A NetworkAttachmentDefinition.
    Definition(ObjectName),
    /// A MultiNetworkPolicy.
    MultiNetworkPolicy(ObjectName),
    /// A NetworkPolicy.
    NetworkPolicy(ObjectName),
    /// The agent's own node, which is in no namespace.
    Node(String),
}

impl Regarding {
    /// Parses the object that a condition names: `pod shop/a`, as for `kubectl get`. `None` if it is of
    /// another kind, or a part of an object: `pod shop/a net1`.
    pub fn of_condition(object: &str) -> Option<Self> {
        let (kind, name) = object.split_once(' ').filter(|(_, name)| !name.contains(' '))?;
        let name = name.parse().ok()?;
        match kind {
            "pod" => Some(Self::Pod(name)),
            "network-attachment-definition" => Some(Self::Definition(name)),
            "multi-networkpolicy" => Some(Self::MultiNetworkPolicy(name)),
            "networkpolicy" => Some(Self::NetworkPolicy(name)),
            _ => None,
        }
    }

    /// Whether the agents of all nodes read the object, and find the same problem with it.
    pub fn is_read_by_all(&self) -> bool {
        match self {
            Self::Definition(_) | Self::MultiNetworkPolicy(_) | Self::NetworkPolicy(_) => true,
            Self::Pod(_) | Self::Node(_) => false,
        }
    }

    /// Its namespace; empty if it is in none.
    pub fn namespace(&self) -> &str {
        self.object().0
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.object().1
    }

    fn object(&self) -> (&str, &str) {
        match self {
            Self::Pod(name)
            | Self::Definition(name)
            | Self::MultiNetworkPolicy(name)
            | Self::NetworkPolicy(name) => (&name.namespace, &name.name),
            Self::Node(name) => ("", name),
        }
    }
}

impl fmt::Display for Regarding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.object() {
            ("", name) => f.write_str(name),
            (namespace, name) => write!(f, "{namespace}/{name}"),
        }
    }
}
