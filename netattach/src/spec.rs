//! Desired kernel objects, in the words of the kernel: what planning produces and `netlink` carries out.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::mac::Mac;

/// The groups of links that an agent's plans make have this bit. Nobody else counts so high.
pub const OWN_GROUPS: u32 = 1 << 31;

/// A veth pair. The pod's end is created in the pod's namespace under its final name, never moved there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Veth {
    /// Name of the end that stays in the node's namespace.
    pub host_name: String,
    /// Name of the end in the pod's namespace.
    pub pod_name: String,
    /// MTU of both ends in bytes; the kernel's default (1500) when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Address of the pod's end; a random one when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// Link group of both ends: links of one group are deleted by one request, and whose they are can be seen.
    pub group: u32,
    /// The bridge that the host's end joins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<BridgePort>,
}

/// Membership of a bridge.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BridgePort {
    /// Name of the bridge in the node's namespace.
    pub bridge: String,
    /// Whether frames may leave by the port they came in by.
    #[serde(default)]
    pub hairpin: bool,
}

/// How fast a device sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// Bytes per second, Ethernet headers included.
    pub rate: u64,
    /// Bytes that may leave at once after a pause, at least the longest frame.
    pub burst: u32,
    /// Bytes that may wait; what comes when as many do is dropped.
    pub queue: u32,
}

/// A macvlan, created in the pod's namespace on a parent in the node's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Macvlan {
    /// Name in the pod's namespace.
    pub pod_name: String,
    /// The parent; the interface of the node's default route when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// How siblings reach each other.
    pub mode: MacvlanMode,
    /// In bytes, at most the parent's; the parent's when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// A random one when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// Link group: links of one group are deleted by one request.
    pub group: u32,
    /// Length in frames of the parent's queue for broadcasts (kernel 5.11); the kernel's default (1000) when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub broadcast_queue: Option<u32>,
}

/// How the macvlans of one parent reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MacvlanMode {
    /// Directly.
    #[default]
    Bridge,
    /// Not at all.
    Private,
    /// By way of the switch that the parent is connected to.
    Vepa,
    /// There are no siblings: the one macvlan takes over the parent.
    Passthru,
}

/// A bridge in the node's namespace, shared by all attachments that name it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bridge {
    /// Its name.
    pub name: String,
    /// In bytes; the kernel's default when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Whether to receive all frames.
    #[serde(default)]
    pub promiscuous: bool,
}

/// A route to install.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// Destination; host bits are cleared before it is sent.
    pub destination: IpNet,
    /// Next hop; absent for a destination on the link itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
    /// Preferred source address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<IpAddr>,
    /// Treat the gateway as reachable although no route covers it.
    #[serde(default)]
    pub on_link: bool,
    /// Metric.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<u32>,
    /// Table; main when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<u32>,
    /// `rt_scopes` value; link for a route without gateway and universe with one when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<u8>,
    /// Path MTU in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Maximum segment size to advertise, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advmss: Option<u32>,
}

impl Route {
    /// A route through a gateway.
    pub fn via(destination: IpNet, gateway: IpAddr) -> Self {
        Self { gateway: Some(gateway), ..Self::on_link(destination) }
    }

    /// A route to a destination on the link.
    pub fn on_link(destination: IpNet) -> Self {
        Self {
            destination,
            gateway: None,
            source: None,
            on_link: false,
            priority: None,
            table: None,
            scope: None,
            mtu: None,
            advmss: None,
        }
    }
}

/// What is on an interface once it is configured.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Addressing {
    /// Addresses with their prefix lengths.
    pub addresses: Vec<IpNet>,
    /// In the order in which they are installed.
    pub routes: Vec<Route>,
    /// Whether the link tells its neighbours of its IPv4 addresses when it comes up (`arp_notify`): they may still know
    /// them by the interface that had them before.
    pub announce_v4: bool,
}
