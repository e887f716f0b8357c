//! Rigs shared by the tests: namespaces, links, a programmable CNI plugin, packets, and a whole node with a
//! running agent.

pub mod calls;
pub mod manifest;
mod namespace;
pub mod node;
pub mod packet;
pub mod runtime;
pub mod snapshot;
pub mod tools;
pub mod traffic;

pub use namespace::Namespace;
pub use node::{Node, Outcome, Pod};
