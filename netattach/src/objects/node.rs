//! Nodes of the cluster: what a network that the agent makes by itself needs of them.

use std::net::IpAddr;

use ipnet::IpNet;

/// A node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Its name.
    pub name: String,
    /// `spec.podCIDRs`: the ranges of its pods' addresses, at most one of each family, without host bits.
    pub pod_cidrs: Vec<IpNet>,
    /// The addresses of type `InternalIP`, in the order of its status.
    pub addresses: Vec<IpAddr>,
}
