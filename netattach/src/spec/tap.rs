//! A tap: an interface whose other end is a process.

use serde::{Deserialize, Serialize};

use crate::mac::Mac;

/// A tap, created in the pod's namespace. It stays when no process has it open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tap {
    /// Name in the pod's namespace.
    pub pod_name: String,
    /// MTU in bytes; the kernel's default (1500) when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Ethernet address; a random one when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// Link group: links of one group are deleted by one request.
    pub group: u32,
    /// The users that may open it, and its queues.
    #[serde(default)]
    pub access: TapAccess,
    /// The bridge in the pod that it is a port of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bridge: Option<String>,
}

/// The users that may open a tap without `CAP_NET_ADMIN`, and its queues.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TapAccess {
    /// UID of the user; any user when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<u32>,
    /// GID of the group; any group when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<u32>,
    /// Whether it has several queues, each of which is opened separately.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub multi_queue: bool,
}
