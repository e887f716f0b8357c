//! The routes to the pods of the other nodes.
//!
//! A node on a link of this one is the next hop to its own podCIDRs. Other nodes are behind routers, which
//! need routes of their own: such nodes get no route here, and are reported. The objects of nodes are not
//! trusted without limits: a range that covers destinations that this node reaches in another way, or that
//! two nodes claim, gets no route either.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use crate::objects::Node;
use crate::spec::Route;

/// `rtm_protocol` of these routes, which marks them as the agent's. 110 is not in the list
/// `/etc/iproute2/rt_protos`.
pub const PROTOCOL: u8 = 110;

/// Metric: greater than the usual metrics of administrators and routing daemons, so that their routes take
/// precedence.
pub const METRIC: u32 = 1110;

/// A network that this node reaches without a router.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OnLink {
    /// Index of the link.
    pub link: u32,
    /// The node's address on it.
    pub net: IpNet,
}

/// The routes that should exist.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Wanted {
    /// Routes, each with the index of its link.
    pub routes: Vec<(u32, Route)>,
    /// The accepted ranges of other nodes' pods, whether or not there is a route to them.
    pub ranges: Vec<IpNet>,
    /// The nodes for which the route to a range is missing, and why, ordered by name.
    pub problems: Vec<(String, Problem)>,
}

/// Why there is no route to a range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The node's address is behind routers.
    #[error(
        "its address {address} is on no link of this node: pods reach {range} only if routers lead there"
    )]
    NotOnLink {
        /// The range.
        range: IpNet,
        /// The node's address.
        address: IpAddr,
    },
    /// The node has no address of the family.
    #[error("it has no InternalIP of the family of {range}, so no route leads there")]
    NoAddress {
        /// The range.
        range: IpNet,
    },
    /// The range is one of this node's.
    #[error("its podCIDR {range} overlaps with {own} of this node: no route leads there")]
    Own {
        /// The range.
        range: IpNet,
        /// This node's range.
        own: IpNet,
    },
    /// The range overlaps with the network of a link.
    #[error(
        "its podCIDR {range} overlaps with {link}, which is on a link of this node: no route leads there"
    )]
    Link {
        /// The range.
        range: IpNet,
        /// The network of the link.
        link: IpNet,
    },
    /// Another node has the range.
    #[error("its podCIDR {range} overlaps with {other} of node {node}, which the route leads to")]
    Taken {
        /// The range.
        range: IpNet,
        /// The other node's range.
        other: IpNet,
        /// The other node.
        node: String,
    },
}

impl Problem {
    /// Whether the range legitimately belongs to the node, and only the next hop is unknown.
    fn is_of_the_way(&self) -> bool {
        matches!(self, Self::NotOnLink { .. } | Self::NoAddress { .. })
    }
}

/// Computes the routes for the node with that name, these ranges and these links. If two nodes claim the same
/// range, the one whose name sorts first gets it.
pub fn wanted<'n>(
    own: (&str, &[IpNet]),
    nodes: impl IntoIterator<Item = &'n Arc<Node>>,
    links: &[OnLink],
) -> Wanted {
    let (own_name, own_ranges) = own;
    let mut wanted = Wanted::default();
    let mut taken: BTreeMap<IpNet, &str> = BTreeMap::new();
    for node in nodes.into_iter().filter(|node| node.name != own_name) {
        for &range in &node.pod_cidrs {
            match next_hop(node, range, own_ranges, links, &taken) {
                Ok((link, gateway)) => {
                    taken.insert(range, &node.name);
                    wanted.ranges.push(range);
                    let route = Route {
                        priority: Some(METRIC),
                        protocol: Some(PROTOCOL),
                        ..Route::via(range, gateway)
                    };
                    wanted.routes.push((link, route));
                }
                Err(problem) => {
                    if problem.is_of_the_way() {
                        wanted.ranges.push(range);
                    }
                    wanted.problems.push((node.name.clone(), problem));
                }
            }
        }
    }
    wanted
}

fn next_hop(
    node: &Node,
    range: IpNet,
    own: &[IpNet],
    links: &[OnLink],
    taken: &BTreeMap<IpNet, &str>,
) -> Result<(u32, IpAddr), Problem> {
    if let Some(&own) = own.iter().find(|own| overlap(**own, range)) {
        return Err(Problem::Own { range, own });
    }
    if let Some(on_link) = links.iter().find(|on_link| overlap(on_link.net, range)) {
        return Err(Problem::Link { range, link: on_link.net.trunc() });
    }
    // Accepted ranges do not overlap with each other, so only the two neighbours in the order can overlap
    // with this one.
    let (before, after) = (taken.range(..=range).next_back(), taken.range(range..).next());
    if let Some((&other, node)) = before.into_iter().chain(after).find(|(other, _)| overlap(**other, range)) {
        return Err(Problem::Taken { range, other, node: (*node).to_owned() });
    }
    let is_ipv4 = range.addr().is_ipv4();
    let mut of_family = node.addresses.iter().copied().filter(|address| address.is_ipv4() == is_ipv4);
    let first = of_family.clone().next().ok_or(Problem::NoAddress { range })?;
    let on_link = of_family.find_map(|address| Some((link_to(address, links)?, address)));
    on_link.ok_or(Problem::NotOnLink { range, address: first })
}

/// The link that the kernel would choose for an address; none if the address is the node's own.
fn link_to(address: IpAddr, links: &[OnLink]) -> Option<u32> {
    if links.iter().any(|on_link| on_link.net.addr() == address) {
        return None;
    }
    let to = links.iter().filter(|on_link| on_link.net.contains(&address));
    to.max_by_key(|on_link| on_link.net.prefix_len()).map(|on_link| on_link.link)
}

/// Whether two networks have an address in common.
pub fn overlap(one: IpNet, other: IpNet) -> bool {
    one.contains(&other.network()) || other.contains(&one.network())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builtin::ranges::tests::{node, objects};

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    fn links() -> Vec<OnLink> {
        [(2, "192.0.2.1/24"), (3, "192.0.2.129/25"), (2, "2001:db8::1/64"), (2, "fe80::1/64")]
            .map(|(link, text)| OnLink { link, net: net(text) })
            .into()
    }

    /// The routes as destination, next hop and link; the problems as text.
    fn shown(nodes: Vec<Node>) -> (Vec<(String, String, u32)>, Vec<String>) {
        let objects = objects(nodes);
        let own = [net("10.1.0.0/24"), net("fd00:1::/64")];
        let Wanted { routes, ranges, problems } = wanted(("a", &own), objects.nodes.values(), &links());
        assert!(routes.iter().all(|(_, it)| it.protocol == Some(110) && it.priority == Some(1110)));
        let route = |(link, route): &(u32, Route)| {
            (route.destination.to_string(), route.gateway.unwrap().to_string(), *link)
        };
        let problem = |(node, problem): &(String, Problem)| format!("{node}: {problem}");
        // A route leads to an accepted range; a range without a route is accepted only if just the next hop
        // is missing.
        let unknown = problems.iter().filter(|(_, problem)| problem.is_of_the_way()).count();
        assert!(routes.iter().all(|(_, route)| ranges.contains(&route.destination)));
        assert_eq!(ranges.len(), routes.len() + unknown);
        (routes.iter().map(route).collect(), problems.iter().map(problem).collect())
    }

    #[test]
    fn a_node_on_a_link_is_the_next_hop_to_its_ranges() {
        let (routes, problems) = shown(vec![
            node("a", &["10.1.0.0/24", "fd00:1::/64"], &["192.0.2.1"]),
            node("b", &["10.2.0.0/24", "fd00:2::/64"], &["192.0.2.2", "2001:db8::2"]),
            node("c", &["10.3.0.0/24"], &["203.0.113.3", "192.0.2.200"]),
            node("new", &[], &["192.0.2.4"]),
        ]);
        let route = |to: &str, via: &str, link| (to.to_owned(), via.to_owned(), link);
        assert_eq!(
            routes,
            [
                route("10.2.0.0/24", "192.0.2.2", 2),
                route("fd00:2::/64", "2001:db8::2", 2),
                // The link with the longer prefix is chosen.
                route("10.3.0.0/24", "192.0.2.200", 3),
            ]
        );
        assert_eq!(problems, [""; 0]);
    }

    #[test]
    fn a_node_that_no_route_leads_to_is_reported() {
        let (routes, problems) = shown(vec![
            node("b", &["10.2.0.0/24", "fd00:2::/64"], &["203.0.113.2"]),
            node("c", &["10.3.0.0/24"], &["192.0.2.1"]),
            node("d", &["10.4.0.0/24"], &[]),
        ]);
        assert_eq!(routes, []);
        assert_eq!(
            problems,
            [
                "b: its address 203.0.113.2 is on no link of this node: pods reach 10.2.0.0/24 only if routers lead there",
                "b: it has no InternalIP of the family of fd00:2::/64, so no route leads there",
                "c: its address 192.0.2.1 is on no link of this node: pods reach 10.3.0.0/24 only if routers lead there",
                "d: it has no InternalIP of the family of 10.4.0.0/24, so no route leads there",
            ]
        );
    }

    #[test]
    fn a_range_that_is_not_the_nodes_to_have_gets_no_route() {
        let (routes, problems) = shown(vec![
            node("b", &["10.2.0.0/16"], &["192.0.2.2"]),
            node("everything", &["0.0.0.0/0"], &["192.0.2.3"]),
            node("link", &["192.0.2.64/26"], &["192.0.2.4"]),
            node("own", &["10.1.0.128/25", "fd00::/16"], &["192.0.2.5", "2001:db8::5"]),
            node("twice", &["10.2.7.0/24"], &["192.0.2.6"]),
            node("wider", &["10.0.0.0/14"], &["192.0.2.7"]),
            node("zwider", &["10.2.0.0/15"], &["192.0.2.7"]),
        ]);
        assert_eq!(routes, [("10.2.0.0/16".to_owned(), "192.0.2.2".to_owned(), 2)]);
        let own = |range: &str, own: &str| {
            format!("its podCIDR {range} overlaps with {own} of this node: no route leads there")
        };
        let taken = |range: &str| {
            format!("its podCIDR {range} overlaps with 10.2.0.0/16 of node b, which the route leads to")
        };
        assert_eq!(
            problems,
            [
                format!("everything: {}", own("0.0.0.0/0", "10.1.0.0/24")),
                "link: its podCIDR 192.0.2.64/26 overlaps with 192.0.2.0/24, which is on a link of this node: no route leads there".into(),
                format!("own: {}", own("10.1.0.128/25", "10.1.0.0/24")),
                format!("own: {}", own("fd00::/16", "fd00:1::/64")),
                format!("twice: {}", taken("10.2.7.0/24")),
                format!("wider: {}", own("10.0.0.0/14", "10.1.0.0/24")),
                format!("zwider: {}", taken("10.2.0.0/15")),
            ]
        );
    }
}
