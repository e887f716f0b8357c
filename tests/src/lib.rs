//! Rigs shared by the tests: namespaces, links, a programmable CNI plugin, packets, a whole node with a
//! running agent, and a machine with container runtimes.

pub mod calls;
pub mod foreign;
pub mod machine;
pub mod manifest;
mod namespace;
pub mod node;
pub mod packet;
pub mod privilege;
pub mod raw;
pub mod record;
pub mod runtime;
pub mod snapshot;
pub mod sriov;
pub mod tools;
pub mod traffic;
pub mod wires;

pub use namespace::Namespace;
pub use node::{Node, Outcome, Pod};
