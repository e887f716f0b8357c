//! The networks of the soak.

use std::collections::BTreeMap;
use std::net::IpAddr;

/// Name of the network that a pod can choose as its default one, on a node.
pub(super) fn second(node: usize) -> String {
    format!("second-{node}")
}

/// The ranges of a node's default network, the usual one or the second.
pub(super) fn default_subnets(node: usize, is_second: bool) -> Vec<String> {
    if is_second {
        vec![format!("10.{}.0.0/27", 70 + node)]
    } else {
        vec!["10.50.0.0/24".to_owned(), "fd00:50::/64".to_owned()]
    }
}

/// Namespace of the definitions.
pub(super) const NETWORKS: &str = "nets";

/// A kind of network. Interfaces in pods are named for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Network {
    /// Macvlans on the wire between the nodes; pods ask for their addresses.
    Seg,
    /// A bridge on each node, connected by another wire; pods ask for their addresses, of both families.
    Lan,
    /// A bridge of one node, with a pool.
    Pool,
    /// Routed links of one node, with a pool.
    Link,
    /// Made by the reference plugin `ptp`, with the pool of the reference plugin.
    Ptp,
}

pub(super) const ALL: [Network; 5] = [Network::Seg, Network::Lan, Network::Pool, Network::Link, Network::Ptp];

impl Network {
    /// Name of the interface in the pod, and of the network in texts for people.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Seg => "seg",
            Self::Lan => "lan",
            Self::Pool => "pool",
            Self::Link => "link",
            Self::Ptp => "ptp",
        }
    }

    pub(super) fn named(name: &str) -> Option<Self> {
        ALL.into_iter().find(|network| network.name() == name)
    }

    /// Whether pods of both nodes reach each other, and bring their addresses.
    pub(super) fn spans_nodes(self) -> bool {
        matches!(self, Self::Seg | Self::Lan)
    }

    /// Name of the definition that the pods of a node use.
    pub(super) fn definition(self, node: usize) -> String {
        if self.spans_nodes() { self.name().to_owned() } else { format!("{}-{node}", self.name()) }
    }

    /// The addresses, with prefix lengths, that the host of a number asks for.
    pub(super) fn addresses(self, host: u8) -> Vec<String> {
        match self {
            Self::Seg => vec![format!("10.20.0.{host}/24")],
            Self::Lan => vec![format!("10.21.0.{host}/24"), format!("fd21::{host:x}/64")],
            Self::Pool | Self::Link | Self::Ptp => Vec::new(),
        }
    }

    /// The pools of a node's network.
    pub(super) fn subnets(self, node: usize) -> Vec<String> {
        match self {
            Self::Seg | Self::Lan => Vec::new(),
            Self::Pool => vec![format!("10.{}.0.0/28", 30 + node), format!("fd3{node}::/120")],
            Self::Link => vec![format!("10.{}.0.0/28", 40 + node)],
            Self::Ptp => vec![format!("10.{}.0.0/28", 60 + node)],
        }
    }
}

/// `10.20.0.1/24` without the length.
pub(super) fn address_of(text: &str) -> Option<IpAddr> {
    text.split('/').next()?.parse().ok()
}

/// The selections of an annotation.
pub(super) fn selections(networks: &BTreeMap<Network, u8>, node: usize) -> String {
    let of = |(network, host): (&Network, &u8)| {
        let mut selection = serde_json::json!({
            "namespace": NETWORKS, "name": network.definition(node), "interface": network.name()
        });
        let ips = network.addresses(*host);
        if !ips.is_empty() {
            selection["ips"] = serde_json::json!(ips);
        }
        selection
    };
    networks.iter().map(of).collect::<serde_json::Value>().to_string()
}
