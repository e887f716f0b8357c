//! What an attachment asks of the node's translation of addresses.

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::npwg::selection::PortMapping;

/// Masquerade and ports of the node, for the addresses that the attachment has leased.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Translate {
    /// Name of the device by which the node reaches the pod: its bridge, or its end of the link. Empty: the one that
    /// [`Step::FindReach`](super::Step::FindReach) finds.
    pub device: String,
    /// Whether the pods of a subnet reach each other past the node.
    pub bridged: bool,
    /// The destinations, apart from the pod's own subnets, that see the pod's own address; absent: the node leaves the
    /// pod's address as it is everywhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub masquerade: Option<Vec<IpNet>>,
    /// Whether the destinations of `masquerade` are those that the agent keeps for the node, as they change, in the place
    /// of the ones written here.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub follows_node: bool,
    /// Ports of the node that lead to the pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<PortMapping>,
    /// Who has the node's address in place of his own where he comes by one of these ports.
    #[serde(default, skip_serializing_if = "PortSenders::is_usual")]
    pub senders: PortSenders,
}

/// Who is masqueraded on the way to a pod by a port of the node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PortSenders {
    /// Whom the pod would answer past the node: itself, neighbours on its bridge, 127.0.0.1.
    #[default]
    Near,
    /// Everybody.
    All,
    /// Nobody.
    None,
}

impl PortSenders {
    /// Parses the word.
    pub fn named(word: &str) -> Option<Self> {
        [("near", Self::Near), ("all", Self::All), ("none", Self::None)]
            .into_iter()
            .find_map(|(name, senders)| (name == word).then_some(senders))
    }

    /// Whether an earlier agent does so too.
    pub fn is_usual(&self) -> bool {
        *self == Self::Near
    }
}

impl Translate {
    /// Describes it for an operator.
    pub fn describe(&self) -> String {
        let what = match (&self.masquerade, self.ports.is_empty()) {
            (Some(_), true) => "masquerade the pod",
            (Some(_), false) => "masquerade the pod and open ports of the node",
            (None, _) => "open ports of the node",
        };
        what.to_owned()
    }
}
