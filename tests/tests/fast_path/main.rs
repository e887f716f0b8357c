//! The fast path: traffic takes it, and conditions that prevent it are noticed.
//!
//! `bridge` tests pods of one bridge, `kept_apart` those that VLANs and isolation separate, `uplink` pods and peers
//! behind a device of the node.
#![expect(clippy::unwrap_used, reason = "a test reports by panicking")]

mod bridge;
mod kept_apart;
mod uplink;
