//! A tap: an interface whose other end is a process.

use serde::{Deserialize, Serialize};

use crate::mac::Mac;

/// A tap, created in the pod's namespace. It stays when no process has it open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tap {
    /// Name in the pod's namespace.
    pub pod_name: String,
    /// In bytes; the kernel's default (1500) when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// A random one when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// Link group: links of one group are deleted by one request.
    pub group: u32,
    /// Who may open it, and how often.
    #[serde(default)]
    pub access: TapAccess,
    /// The bridge of the pod that it is a port of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bridge: Option<String>,
}

/// Who may open a tap without `CAP_NET_ADMIN`, and how often.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TapAccess {
    /// Number of the user; anybody when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<u32>,
    /// Number of the group; any when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<u32>,
    /// Whether it has several queues, each of which is opened for itself.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub multi_queue: bool,
}
