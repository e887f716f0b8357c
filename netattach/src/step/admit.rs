//! What an attachment asks of the node's forwarding.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// The node lets packets from and to the attachment's addresses pass: the chained plugin `firewall`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Admit {
    /// The chain of the administrator's own rules, which is asked first.
    pub admin_chain: String,
    /// Who may send to the pods of a bridge.
    #[serde(default, skip_serializing_if = "Ingress::is_open")]
    pub ingress: Ingress,
    /// Whether that is wanted on a node whose firewalld filters beside it, too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub beside_firewalld: bool,
}

/// Who may send to the pods of a bridge through the node's forwarding.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ingress {
    /// Everybody.
    #[default]
    Open,
    /// No pod of another such bridge.
    SameBridge,
    /// Nor any other pod of the bridge, where the node filters what bridges pass on (`bridge-nf-call-iptables`).
    Isolated,
}

impl Ingress {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Open, Self::SameBridge, Self::Isolated];

    /// The value of the key.
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

/// What an attachment has of the node's forwarding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Admitted {
    /// The addresses that pass.
    pub addresses: Vec<IpAddr>,
    /// The chain of the administrator's own rules.
    pub admin_chain: String,
    /// The bridge whose pods are not open to everybody, or the device by which the node routes to their VLAN of it, and to whom
    /// they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub closed: Option<(Ingress, String)>,
}
