//! Determines which addresses of the node a pod on a parent reaches, and from which of them the node reaches the pod
//! (`hostAccess`). Pure.

use ipnet::IpNet;

use crate::step::{LeasedAddress, Reached};

/// Prefix of the names of the node's own links on parents, followed by the index of the parent.
const PREFIX: &str = "nahst";

/// Returns the name of the node's link on the parent with that index: at most 15 bytes, the limit of a link name.
pub fn device(parent: u32) -> String {
    format!("{PREFIX}{parent}")
}

/// Whether a link with that name is the node's link on a parent.
pub fn is_device(name: &str) -> bool {
    let index = name.strip_prefix(PREFIX);
    index.is_some_and(|index| index.parse::<u32>().is_ok_and(|index| device(index) == name))
}

/// Pairs each of the pod's addresses with an address of the node on the parent, if each is in the other's subnet. A
/// pod may have chosen its prefix, but not the node's, so its routes cannot divert the node's other traffic.
pub fn reached(leased: &[LeasedAddress], of_node: &[IpNet]) -> Vec<Reached> {
    let in_subnet = |leased: &LeasedAddress| {
        let pod = leased.address.addr();
        let beside = of_node.iter().filter(|node| node.contains(&pod) && node.addr() != pod);
        let node = beside.map(IpNet::addr).find(|node| leased.address.contains(node))?;
        Some(Reached { pod, node })
    };
    leased.iter().filter_map(in_subnet).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_and_its_node_reach_each_other_in_the_pods_subnets() {
        let leased = |address: &str| LeasedAddress { address: address.parse().unwrap(), gateway: None };
        let of_node: Vec<IpNet> =
            ["fe80::1/64", "10.1.0.1/24", "10.1.0.9/24", "fd00:1::1/64", "192.0.2.1/24"]
                .map(|net| net.parse().unwrap())
                .into();
        let pod = ["10.1.0.7/24", "10.2.0.7/24", "fd00:1::7/64"].map(leased);
        let reaches =
            |pod: &str, node: &str| Reached { pod: pod.parse().unwrap(), node: node.parse().unwrap() };
        let expected = [reaches("10.1.0.7", "10.1.0.1"), reaches("fd00:1::7", "fd00:1::1")];
        assert_eq!(reached(&pod, &of_node), expected);
        assert_eq!(reached(&pod[1..2], &of_node), []);
        assert_eq!(reached(&[leased("10.1.0.1/32")], &of_node), [], "itself");
        let far = ["10.244.1.5/0", "2001:db8::5/0", "10.1.1.7/16"].map(leased);
        assert_eq!(reached(&far, &of_node), [], "not in the node's subnets");
    }

    #[test]
    fn the_nodes_links_are_known_by_their_names() {
        assert_eq!(device(u32::MAX >> 1).len(), 15, "the highest index of a link");
        assert!(is_device(&device(7)) && is_device("nahst12"));
        assert!(
            ["nahst", "nahst07", "nahstx", "na0123456789abc", "eth0"].iter().all(|name| !is_device(name))
        );
    }
}
