//! The multi-network standard (NPWG) as data and pure functions.
//!
//! A pod requests networks in one annotation ([`selection`], whose JSON elements are read by `element`); each request
//! refers to a definition and gets an interface name ([`ifname`]) and the capability arguments for plugins
//! ([`capability`]); the result is published in a second annotation ([`status`]).
//!
//! Section numbers in this module are those of the "Kubernetes Network Custom Resource Definition De-facto
//! Standard", version 1.3.
//!
//! [`network`] has the names of networks, [`device_info`] describes devices, [`guid`] is for InfiniBand ports.

pub mod capability;
pub mod device_info;
mod element;
pub mod guid;
pub mod ifname;
pub mod network;
pub mod selection;
pub mod status;

pub use capability::runtime_config;
pub use ifname::{InterfaceNameError, interface_names};
pub use network::{NetworkName, NetworkRef};
pub use selection::{
    Parsed, Selection, SelectionError, SelectionWarning, parse_default_network, parse_networks,
    parse_selection,
};
pub use status::StatusEntry;

/// Pod annotation that selects networks (section 4.1).
pub const NETWORKS_ANNOTATION: &str = "k8s.v1.cni.cncf.io/networks";

/// Pod annotation that selects the pod's default network instead of the node's. Multus introduced it.
pub const DEFAULT_NETWORK_ANNOTATION: &str = "v1.multus-cni.io/default-network";

/// Annotation of a definition with the extended resource of its devices.
pub const RESOURCE_ANNOTATION: &str = "k8s.v1.cni.cncf.io/resourceName";

/// Key under `args.cni` by which plugins receive the name of the IPAMClaim that a selection refers to. The standard
/// requires that they can learn it (section 4.1.2.1.11), but not how; private keys are in reverse-DNS notation.
pub const CLAIM_ARGUMENT: &str = "dev.netattach.ipam-claim-reference";

/// Pod annotation that reports the attachments (section 5).
pub const STATUS_ANNOTATION: &str = "k8s.v1.cni.cncf.io/network-status";
