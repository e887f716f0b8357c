//! Rigs shared by the tests: namespaces, links, a programmable CNI plugin, packets.

mod namespace;
pub mod packet;
pub mod runtime;

pub use namespace::Namespace;
