//! The request of an attachment for forwarding by the node.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// The chain of the node's administrator, which is asked for the packets of all pods.
pub const ADMIN_CHAIN: &str = "CNI-ADMIN";

/// Makes the node accept forwarded packets from and to the attachment's addresses: the chained plugin `firewall`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Admit {
    /// The chain that is asked first: [`ADMIN_CHAIN`], or one that is asked for the attachment's packets alone.
    pub admin_chain: String,
    /// The senders that may reach the pods of a bridge.
    #[serde(default, skip_serializing_if = "Ingress::is_open")]
    pub ingress: Ingress,
    /// Whether the rules are also needed on a node with firewalld.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub beside_firewalld: bool,
}

/// The senders that may reach the pods of a bridge through forwarding by the node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ingress {
    /// All senders.
    #[default]
    Open,
    /// All senders except pods of other such bridges.
    SameBridge,
    /// In addition, not other pods of the same bridge, if the node filters bridged frames
    /// (`bridge-nf-call-iptables`).
    Isolated,
}

impl Ingress {
    /// All values.
    pub const ALL: [Self; 3] = [Self::Open, Self::SameBridge, Self::Isolated];

    /// Returns the value of the key.
    pub fn word(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::SameBridge => "same-bridge",
            Self::Isolated => "isolated",
        }
    }

    /// Whether it restricts nothing.
    pub fn is_open(&self) -> bool {
        *self == Self::Open
    }
}

/// The forwarding rules of an attachment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Admitted {
    /// The addresses whose packets are accepted.
    pub addresses: Vec<IpAddr>,
    /// As in [`Admit`].
    pub admin_chain: String,
    /// The bridge to whose pods access is restricted, or the device through which the node routes to their VLAN of
    /// the bridge, and the restriction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub closed: Option<(Ingress, String)>,
}
