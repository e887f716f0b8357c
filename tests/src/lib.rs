//! Rigs shared by the tests: namespaces, links, a programmable CNI plugin, packets.

pub mod packet;
