//! Nodes of the cluster, reduced to what the agent's own network needs.

use std::net::IpAddr;

use ipnet::IpNet;

/// The ranges of the cluster, apart from the ranges of nodes, and the ranges of this node, as of the last
/// request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ClusterRanges {
    /// The ranges of Services (`ServiceCIDR`, served from Kubernetes 1.33 on).
    pub services: Vec<IpNet>,
    /// The ranges of this node's pods, and its own addresses.
    pub own_node: Vec<IpNet>,
}

impl Node {
    /// The ranges of its pods, and its own addresses.
    pub fn ranges(&self) -> impl Iterator<Item = IpNet> {
        self.pod_cidrs.iter().copied().chain(self.addresses.iter().copied().map(IpNet::from))
    }
}

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
