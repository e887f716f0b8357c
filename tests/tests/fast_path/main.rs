//! The fast path: traffic takes it, and what keeps it off is noticed.
//!
//! `bridge` has the pods of one bridge, `uplink` pods and what is behind a device of the node.

mod bridge;
mod uplink;
