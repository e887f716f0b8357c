//! The ranges of this node's pods.

use ipnet::IpNet;

use crate::objects::Objects;

/// This node, and the source of its ranges.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ThisNode {
    /// Name of the node in the cluster; `None`: objects come from a directory, which has no object of the
    /// node.
    pub name: Option<String>,
    /// The ranges in the settings, which take precedence over those of the node's object.
    pub pod_cidrs: Vec<IpNet>,
}

/// Why the ranges of this node's pods are not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoRange {
    /// No source provides them.
    #[error("builtin.podCIDRs is not set, and a directory of manifests has no node that has podCIDRs")]
    NoSource,
    /// The node's object has not been read, or does not exist.
    #[error("node {0}: its object is not known, so neither are its podCIDRs")]
    Unknown(String),
    /// The node has no ranges yet.
    #[error(
        "node {0} has no podCIDRs: kube-controller-manager gives them to nodes with --allocate-node-cidrs and --cluster-cidr, \
         or builtin.podCIDRs says them"
    )]
    None(String),
    /// The destinations that see the pods' own addresses are not known yet.
    #[error("the podCIDRs of the other nodes have not been read yet")]
    OthersUnknown,
    /// The node has no range of a family.
    #[error("node {node} has no podCIDR of {family}, only {ranges}", family = if *is_ipv4 { "IPv4" } else { "IPv6" })]
    NoneOfFamily {
        /// The node.
        node: String,
        /// The family.
        is_ipv4: bool,
        /// The ranges that it has.
        ranges: String,
    },
}

impl ThisNode {
    /// Returns the ranges of this node's pods: at least one, at most one of each family, without host bits.
    ///
    /// # Errors
    /// [`NoRange`].
    pub fn pod_cidrs(&self, objects: &Objects) -> Result<Vec<IpNet>, NoRange> {
        if !self.pod_cidrs.is_empty() {
            return Ok(self.pod_cidrs.iter().map(IpNet::trunc).collect());
        }
        let name = self.name.as_ref().ok_or(NoRange::NoSource)?;
        let node = objects.nodes.get(name).ok_or_else(|| NoRange::Unknown(name.clone()))?;
        if node.pod_cidrs.is_empty() {
            return Err(NoRange::None(name.clone()));
        }
        Ok(node.pod_cidrs.clone())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::objects::Node;

    pub(in crate::builtin) fn node(name: &str, ranges: &[&str], addresses: &[&str]) -> Node {
        Node {
            name: name.into(),
            pod_cidrs: ranges.iter().map(|range| range.parse().unwrap()).collect(),
            addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
        }
    }

    pub(in crate::builtin) fn objects(nodes: Vec<Node>) -> Objects {
        let nodes = nodes.into_iter().map(|node| (node.name.clone(), Arc::new(node))).collect();
        Objects { nodes, ..Objects::default() }
    }

    #[test]
    fn the_settings_go_before_the_object_and_without_either_there_is_no_range() {
        let known = objects(vec![node("a", &["10.1.0.0/24", "fd00::/64"], &[]), node("bare", &[], &[])]);
        let this = |name: Option<&str>, ranges: &[&str]| {
            let pod_cidrs = ranges.iter().map(|range| range.parse().unwrap()).collect();
            ThisNode { name: name.map(str::to_owned), pod_cidrs }.pod_cidrs(&known)
        };
        let ranges = |texts: &[&str]| Ok(texts.iter().map(|range| range.parse().unwrap()).collect());
        assert_eq!(this(Some("a"), &[]), ranges(&["10.1.0.0/24", "fd00::/64"]));
        assert_eq!(this(Some("a"), &["10.9.0.7/24"]), ranges(&["10.9.0.0/24"]));
        assert_eq!(this(Some("bare"), &[]), Err(NoRange::None("bare".into())));
        assert_eq!(this(Some("gone"), &[]), Err(NoRange::Unknown("gone".into())));
        assert_eq!(this(None, &[]), Err(NoRange::NoSource));
    }
}
