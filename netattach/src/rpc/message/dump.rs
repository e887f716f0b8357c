//! Compiled policies as they are in the kernel's maps.

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// One compiled policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dump {
    /// Number of the policy in the maps.
    pub policy: u32,
    /// The attachments under the policy.
    pub attachments: Vec<Use>,
    /// Rules of the policy.
    pub rules: Vec<Rule>,
    /// Peers and their classes.
    pub peers: Vec<Peer>,
    /// The traffic that each class may exchange.
    pub ports: Vec<Port>,
    /// How many rules, peers and ports are in the maps but left out here: an answer has a largest size.
    pub left_out: usize,
}

/// An attachment under a policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Use {
    /// Number of the attachment.
    pub attachment: u32,
    /// Whether the policy judges traffic to the pod.
    pub ingress: bool,
    /// Whether the policy judges traffic from the pod.
    pub egress: bool,
}

/// A rule of a policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    /// Number of the rule in the policy.
    pub rule: u32,
    /// Object, direction and position: `shop/db ingress[0]`.
    pub from: String,
}

/// The class of the peers in a prefix.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// The prefix. Of two prefixes that hold an address, the longer one counts.
    pub net: IpNet,
    /// Number of the class. Class 1 may exchange nothing.
    pub class: u32,
}

/// Traffic that a class may exchange.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    /// Number of the class.
    pub class: u32,
    /// `any`, `tcp`, `tcp/80` or `tcp/64-127`.
    pub traffic: String,
    /// Number of the rule that allows it.
    pub rule: u32,
}
