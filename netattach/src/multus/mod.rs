//! What a node has of Multus when netattach takes its place: as data, read and judged without touching the machine.
//!
//! Key names and defaults are those of Multus 4.
//!
//! `config` reads the configuration, `mapping` says what becomes of each of its keys, `scratch` reads what Multus remembers of a pod.

pub mod config;
pub mod mapping;
pub mod scratch;

pub use scratch::{Attachment, ScratchError};

/// Where Multus keeps what it remembers of pods unless `cniDir` says otherwise.
pub const STATE_DIRECTORY: &str = "/var/lib/cni/multus";
