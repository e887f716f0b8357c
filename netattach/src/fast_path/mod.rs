//! The fast path between pods of one node, and between pods and the external network: decides which packets
//! take it, and why others do not.
//!
//! The packet programs can move a packet from one pod's interface directly to another's, from an uplink of
//! the node to a pod's interface, and from a pod's interface to an uplink, provided that nothing between the
//! two would process the packet. The agent decides whether that is so: [`decide`] and [`uplink`] compute it
//! from the kernel's links, filters and routes (`node`), and `reconciler` keeps maps and uplinks up to date
//! while the node changes. In doubt, packets go through the node's network stack, where the same policies
//! hold.
//!
//! A `reason` says why an attachment or an uplink is not on the fast path; `xdp` attaches the XDP program to
//! uplinks.

pub mod decide;
mod node;
mod reason;
mod reconciler;
pub mod uplink;
mod xdp;

pub use decide::{Member, Mode};
pub use node::ObserveError;
pub use reason::Reason;
pub use reconciler::{FastPaths, KeepError, Status};
pub use xdp::Xdp;
