//! The request of an attachment for address translation by the node.

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::npwg::selection::PortMapping;

/// Masquerade and port mappings for the addresses that the attachment has leased.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Translate {
    /// Name of the device through which the node reaches the pod: its bridge, or its end of the link. Empty: the one
    /// that [`Step::FindReach`](super::Step::FindReach) finds.
    pub device: String,
    /// Whether the pods of a subnet reach each other without passing the node's IP stack.
    pub bridged: bool,
    /// The destinations, apart from the pod's own subnets, to which packets keep the pod's source address; absent: no
    /// masquerade.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub masquerade: Option<Vec<IpNet>>,
    /// Whether the agent's current exceptions of the node replace the destinations in `masquerade`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub follows_node: bool,
    /// Ports of the node that are mapped to the pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<PortMapping>,
    /// The senders whose packets are masqueraded when they use a port mapping.
    #[serde(default, skip_serializing_if = "PortSenders::is_usual")]
    pub senders: PortSenders,
}

/// The senders whose packets to a mapped port are masqueraded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PortSenders {
    /// Those to which the pod would reply without passing the node: itself, neighbours on its bridge, 127.0.0.1.
    #[default]
    Near,
    /// All.
    All,
    /// None.
    None,
}

impl PortSenders {
    /// Parses the word.
    pub fn named(word: &str) -> Option<Self> {
        [("near", Self::Near), ("all", Self::All), ("none", Self::None)]
            .into_iter()
            .find_map(|(name, senders)| (name == word).then_some(senders))
    }

    /// Whether earlier agents behave the same way.
    pub fn is_usual(&self) -> bool {
        *self == Self::Near
    }
}

impl Translate {
    /// Describes the step for an operator.
    pub fn describe(&self) -> String {
        let what = match (&self.masquerade, self.ports.is_empty()) {
            (Some(_), true) => "masquerade the pod",
            (Some(_), false) => "masquerade the pod and open ports of the node",
            (None, _) => "open ports of the node",
        };
        what.to_owned()
    }
}
