//! Migration from Multus: parses its configuration and state on a node as data, without touching the machine.
//!
//! Key names and defaults are those of Multus 4.
//!
//! `config` reads the configuration. `mapping` maps its keys to settings, and `delegates` the networks in
//! it to files; `imported` is the result. `scratch` reads Multus's saved state of a pod.

pub mod config;
mod delegates;
pub mod imported;
pub mod mapping;
pub mod scratch;

pub use scratch::{Attachment, ScratchError};

/// Directory of Multus's saved state of pods unless `cniDir` is set.
pub const STATE_DIRECTORY: &str = "/var/lib/cni/multus";
