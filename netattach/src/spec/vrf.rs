//! Routing of one interface by a VRF of the pod, as in the plugin `vrf`.

use serde::{Deserialize, Serialize};

use super::Route;

/// The request of a configuration.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Vrf {
    /// Name of the VRF in the pod's namespace; created if the pod has none of this name.
    pub name: String,
    /// Its routing table; absent: that of the existing VRF, or the first unused one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<u32>,
}

/// A VRF with one of its interfaces.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct VrfPort {
    /// Name of the VRF.
    pub name: String,
    /// Its routing table.
    pub table: u32,
    /// Whether the VRF did not exist in the pod before.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub made: bool,
    /// Index of the interface.
    pub index: u32,
    /// The interface's routes that the kernel removes when it joins, with their tables after that.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<Route>,
}
