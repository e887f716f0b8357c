//! Routing of one interface by a VRF of the pod, as the plugin `vrf` does it.

use serde::{Deserialize, Serialize};

use super::Route;

/// What is asked for.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Vrf {
    /// Name of the VRF in the pod's namespace; made where the pod has none.
    pub name: String,
    /// Its routing table; absent: that of the VRF that is there, or the first one that nothing uses.
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
    /// Whether the pod had no such VRF before.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub made: bool,
    /// Index of the interface.
    pub index: u32,
    /// The interface's routes that the kernel forgets when it joins, with the tables in which they are to be then.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<Route>,
}
