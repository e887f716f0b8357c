//! A netkit pair: two ends like those of a veth, but frames pass from one namespace into the other without a queue.

use serde::{Deserialize, Serialize};

use crate::mac::Mac;

/// A netkit pair. The primary end stays on the node; the pod's is created in the pod's namespace under its final name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Netkit {
    /// Name of the end that stays in the node's namespace.
    pub host_name: String,
    /// Name of the end in the pod's namespace.
    pub pod_name: String,
    /// MTU of both ends in bytes; the kernel's default (1500) when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Address of the pod's end; a random one when absent, and none in mode `l3`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// Link group of both ends.
    pub group: u32,
    /// How the two ends are connected.
    pub ways: NetkitWays,
}

/// How the ends of a netkit pair are connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct NetkitWays {
    /// How neighbours are identified.
    pub mode: NetkitMode,
    /// The policy for packets that the node sends to the pod, if no netkit program decides.
    #[serde(default)]
    pub policy: NetkitPolicy,
    /// The policy for packets that the pod sends.
    #[serde(default)]
    pub peer_policy: NetkitPolicy,
}

/// How neighbours on a netkit pair are identified.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NetkitMode {
    /// By Ethernet addresses, which ARP and neighbour discovery resolve.
    L2,
    /// Not at all: there are only the two ends. The kernel's default.
    #[default]
    L3,
}

/// The policy for packets if no netkit program decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NetkitPolicy {
    /// The packets pass.
    #[default]
    Pass,
    /// The packets are dropped.
    Drop,
}
