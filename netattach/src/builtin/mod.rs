//! The pod network that the agent makes where a cluster has no other (`defaultNetwork: builtin`). Pure.
//!
//! It is an ordinary network: [`network`] writes its configuration from the [`settings`] and what is known of nodes, and
//! the planner takes it like any other. Between nodes, [`routes`] says which routes lead to the pods of the others.
//! [`ranges`] are the addresses of this node's pods, by its `podCIDRs`, which a definition can take them from too
//! ([`pod_cidr`]).

pub mod network;
pub mod pod_cidr;
pub mod ranges;
pub mod routes;
pub mod settings;

pub use network::NAME;
pub use ranges::{NoRange, ThisNode};
pub use settings::{InvalidSettings, Mode, Settings};
