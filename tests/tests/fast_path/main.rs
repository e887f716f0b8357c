//! The fast path: traffic takes it, and what keeps it off is noticed.
//!
//! `bridge` has the pods of one bridge, `uplink` pods and what is behind a device of the node.
#![expect(clippy::unwrap_used, reason = "a test reports by panicking")]

mod bridge;
mod uplink;
