//! Rigs shared by the tests: namespaces, links, a programmable CNI plugin, packets.

mod namespace;

pub use namespace::Namespace;
