//! The fast path between pods of one node: who takes it, and why others do not.
//!
//! The packet programs can move a packet from one pod's interface straight into another's, where nothing between the two
//! would do anything else with it. Whether that is so is for the agent to know: [`decide`] tells it from what the kernel
//! shows of links and filters ([`node`]), and [`keeper`] keeps the maps equal to it while the node changes. What is not
//! certain takes the way through the node's network stack, where the same policies hold.

pub mod decide;
mod keeper;
mod node;

pub use decide::{Member, Mode, Reason};
pub use keeper::{FastPaths, Standing};
