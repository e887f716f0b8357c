//! The pod network that the agent provides where a cluster has no other (`defaultNetwork: builtin`). Pure.
//!
//! The network is an ordinary network: [`network`] writes its configuration from the [`settings`] and the
//! known nodes, and the planner processes it like any other. [`routes`] determines the routes to the pods of
//! other nodes. [`ranges`] are the address ranges of this node's pods, from its `podCIDRs`; a definition can
//! use these ranges too ([`pod_cidr`]).

pub mod network;
pub mod pod_cidr;
pub mod ranges;
pub mod routes;
pub mod settings;

pub use network::NAME;
pub use ranges::{NoRange, ThisNode};
pub use settings::{InvalidSettings, Mode, Settings};
