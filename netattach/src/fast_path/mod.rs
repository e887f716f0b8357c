//! The fast path between pods of one node, and between pods and the external network: which packets take it, and why others do
//! not.
//!
//! The packet programs can move a packet from one pod's interface straight into another's, from an uplink of the node into a
//! pod's, and from a pod's to an uplink, where nothing between the two would do anything else with it. Whether that is so is
//! for the agent to know: [`decide`] and [`uplink`] tell it from what the kernel shows of links, filters and routes (`node`), and
//! `reconciler` keeps maps and uplinks equal to it while the node changes. What is not certain takes the way through the node's
//! network stack, where the same policies hold.
//!
//! A `reason` says why an attachment or an uplink is kept off; `xdp` runs the program of uplinks' drivers.

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
