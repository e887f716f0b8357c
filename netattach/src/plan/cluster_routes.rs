//! The routes that stay on the cluster's interface when a pod's default routes move to another one. Pure.
//!
//! Otherwise, a pod whose default route moves away could not reach the cluster: Services and pods of other nodes are
//! behind its first interface, and so are clients that connect to its address there, such as the kubelet's probes.
//! Two things preserve this: routes to the cluster's ranges through the gateway of the first interface, and a table
//! by source address, so that the pod's replies from that interface's addresses leave through it. Interfaces whose
//! replies would be diverted by such a route get tables of their own (`routing::by_source`).

use std::net::IpAddr;

use ipnet::IpNet;

use super::routing::table_of;
use crate::cni::{CniError, code};
use crate::spec::Route;
use crate::step::{Kept, SourceRouting};

/// Most ranges that are kept; each is a route in each pod whose default route moves. If there are more, ranges of
/// nodes are left out, and the pod's status says so.
const MOST_RANGES: usize = 256;

/// The setting `keepClusterRoutes`, if it applies.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Keep {
    /// `clusterCIDRs`.
    pub cidrs: Vec<IpNet>,
    /// Whether the source also knows ranges: a cluster does, manifests do not.
    pub asks_cluster: bool,
}

/// The known ranges of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Known {
    /// Ranges of Services.
    pub services: Vec<IpNet>,
    /// Pod ranges of the nodes, and the nodes' own addresses.
    pub nodes: Vec<IpNet>,
    /// Whether `nodes` covers all nodes; otherwise only this one.
    pub all_nodes: bool,
}

/// The kept ranges, and a message for the pod's author.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Destinations {
    /// Ranges without host bits, at most [`MOST_RANGES`].
    pub ranges: Vec<IpNet>,
    /// Describes what is not kept.
    pub missing: Option<String>,
}

/// Returns the destinations that stay on the cluster's interface.
///
/// # Errors
/// The cluster has not been asked yet: the ADD must be retried.
pub fn destinations(keep: &Keep, known: Option<&Known>) -> Result<Destinations, CniError> {
    let nothing = Known { all_nodes: true, ..Known::default() };
    let known = match known {
        Some(known) if keep.asks_cluster => known,
        None if keep.asks_cluster => {
            let msg = "keepClusterRoutes: the cluster's ranges are not known yet";
            return Err(CniError::new(code::TRY_AGAIN_LATER, msg.to_owned()));
        }
        _ => &nothing,
    };
    let fixed: Vec<IpNet> = keep.cidrs.iter().chain(&known.services).map(IpNet::trunc).collect();
    let mut all = fixed.clone();
    all.extend(known.nodes.iter().map(IpNet::trunc));
    let mut ranges = IpNet::aggregate(&all);
    let beyond = ranges.len() > MOST_RANGES;
    if beyond {
        ranges = IpNet::aggregate(&fixed);
        ranges.truncate(MOST_RANGES);
    }
    let mut missing = Vec::new();
    if keep.cidrs.is_empty() && keep.asks_cluster {
        if known.services.is_empty() {
            missing.push("Services");
        }
        if !known.all_nodes || beyond {
            missing.push("pods and addresses of other nodes");
        }
    }
    let missing = (!missing.is_empty()).then(|| {
        format!(
            "the default route takes along what goes to {}, whose ranges are not known: clusterCIDRs names them",
            missing.join(" and ")
        )
    });
    Ok(Destinations { ranges, missing })
}

/// The cluster's interface in the pod, before the default routes moved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterSide {
    /// Its name.
    pub ifname: String,
    /// Its index.
    pub index: u32,
    /// Its addresses.
    pub addresses: Vec<IpNet>,
    /// Its routes in the main table.
    pub routes: Vec<Route>,
    /// The destinations of all routes of the main table, through any interface: these are not changed.
    pub taken: Vec<IpNet>,
}

/// Returns the routes that keep cluster traffic on its interface once these default routes have moved; `None` if the
/// interface had none of their families.
pub fn kept(side: &ClusterSide, moved: &[Route], destinations: &[IpNet]) -> Option<Kept> {
    let table = table_of(side.index);
    let mut kept = Kept {
        routes: Vec::new(),
        answers: SourceRouting {
            ifname: side.ifname.clone(),
            index: side.index,
            table,
            sources: Vec::new(),
            routes: Vec::new(),
        },
    };
    for v4 in [true, false] {
        let of_family = |net: &IpNet| net.addr().is_ipv4() == v4;
        let defaults =
            side.routes.iter().filter(|it| it.destination.prefix_len() == 0 && of_family(&it.destination));
        let usual = defaults.min_by_key(|route| route.priority.unwrap_or_default());
        let has_moved = moved.iter().any(|route| of_family(&route.destination));
        let Some(usual) = usual.filter(|_| has_moved) else { continue };
        // The kernel has resolved the gateway already, perhaps by a route that this table does not have.
        let through = |destination: IpNet| Route {
            destination,
            on_link: usual.gateway.is_some(),
            priority: None,
            ..usual.clone()
        };
        let is_new = |net: &&IpNet| of_family(net) && !side.taken.contains(net);
        kept.routes.extend(destinations.iter().filter(is_new).map(|net| through(*net)));

        let global = side.addresses.iter().filter(|net| of_family(net) && !is_link_local(net.addr()));
        kept.answers.sources.extend(global.map(IpNet::addr));
        let others = side.routes.iter().filter(|it| {
            it.destination.prefix_len() > 0
                && of_family(&it.destination)
                && !is_link_local(it.destination.addr())
        });
        let others = others.map(|route| Route { on_link: route.gateway.is_some(), ..route.clone() });
        kept.answers.routes.extend(
            others.chain([through(usual.destination)]).map(|route| Route { table: Some(table), ..route }),
        );
    }
    (!kept.answers.routes.is_empty()).then_some(kept)
}

fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local() || address.is_multicast(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn via(destination: &str, gateway: &str) -> Route {
        Route::via(destination.parse().unwrap(), gateway.parse().unwrap())
    }

    /// As a primary network makes its routes whose tunnel takes a part of each packet.
    fn narrow(route: Route) -> Route {
        Route { source: Some([10, 244, 1, 5].into()), mtu: Some(1400), advmss: Some(1360), ..route }
    }

    fn side() -> ClusterSide {
        ClusterSide {
            ifname: "eth0".into(),
            index: 3,
            addresses: nets(&["10.244.1.5/24", "fd00:1::5/64", "fe80::5/64"]),
            routes: vec![
                narrow(via("0.0.0.0/0", "10.244.1.1")),
                Route::on_link("10.244.1.0/24".parse().unwrap()),
                via("10.244.0.0/16", "10.244.1.1"),
                via("::/0", "fe80::1"),
                Route { priority: Some(256), ..Route::on_link("fd00:1::/64".parse().unwrap()) },
                Route { priority: Some(256), ..Route::on_link("fe80::/64".parse().unwrap()) },
            ],
            taken: nets(&["0.0.0.0/0", "10.244.1.0/24", "10.244.0.0/16", "10.53.0.0/24", "fd00:1::/64"]),
        }
    }

    #[test]
    fn the_settings_ranges_and_those_of_the_cluster_are_kept() {
        let set = Keep { cidrs: nets(&["10.96.0.7/12", "10.0.0.0/8"]), asks_cluster: false };
        let expected = Destinations { ranges: nets(&["10.0.0.0/8"]), missing: None };
        assert_eq!(destinations(&set, None).unwrap(), expected);

        let asks = Keep { cidrs: Vec::new(), asks_cluster: true };
        let error = destinations(&asks, None).unwrap_err();
        let said = "keepClusterRoutes: the cluster's ranges are not known yet";
        assert_eq!((error.code, error.msg.as_str()), (code::TRY_AGAIN_LATER, said));

        let known = Known {
            services: nets(&["10.96.0.0/12"]),
            nodes: nets(&["10.244.1.0/24", "192.0.2.7/32"]),
            all_nodes: true,
        };
        let ranges = nets(&["10.96.0.0/12", "10.244.1.0/24", "192.0.2.7/32"]);
        assert_eq!(
            destinations(&asks, Some(&known)).unwrap(),
            Destinations { ranges: ranges.clone(), missing: None }
        );

        let missing = |what: &str| {
            Some(format!(
                "the default route takes along what goes to {what}, whose ranges are not known: clusterCIDRs names them"
            ))
        };
        let own = Known { all_nodes: false, ..known.clone() };
        assert_eq!(
            destinations(&asks, Some(&own)).unwrap(),
            Destinations { ranges, missing: missing("pods and addresses of other nodes") }
        );
        assert_eq!(
            destinations(&asks, Some(&Known::default())).unwrap().missing,
            missing("Services and pods and addresses of other nodes")
        );
        let set = Keep { asks_cluster: true, ..set };
        assert_eq!(destinations(&set, Some(&Known::default())).unwrap(), expected);
    }

    #[test]
    fn more_ranges_of_nodes_than_routes_are_left_out_together() {
        let range = |number: usize| format!("10.{}.{}.0/25", number / 256, number % 256).parse().unwrap();
        let known = |count| Known {
            services: nets(&["172.20.0.0/16"]),
            nodes: (0..count).map(range).collect(),
            all_nodes: true,
        };
        let asks = Keep { cidrs: Vec::new(), asks_cluster: true };
        let most = MOST_RANGES;
        assert_eq!(destinations(&asks, Some(&known(most - 1))).unwrap().ranges.len(), most);
        let beyond = destinations(&asks, Some(&known(most))).unwrap();
        assert_eq!(beyond.ranges, nets(&["172.20.0.0/16"]));
        assert!(beyond.missing.unwrap().contains("pods and addresses of other nodes"));
    }

    #[test]
    fn the_clusters_ranges_and_the_interfaces_own_answers_stay() {
        let ranges = nets(&["10.96.0.0/12", "10.244.0.0/16", "fd00:96::/112", "10.53.0.0/24"]);
        let moved = [via("0.0.0.0/0", "10.53.0.1"), via("::/0", "fd00:53::1")];
        let on_link = |route: Route| Route { on_link: true, ..route };
        let in_table = |route: Route| Route { table: Some(table_of(3)), ..route };
        let expected = Kept {
            // A route that is there already stays as it is.
            routes: vec![
                narrow(on_link(via("10.96.0.0/12", "10.244.1.1"))),
                on_link(via("fd00:96::/112", "fe80::1")),
            ],
            answers: SourceRouting {
                ifname: "eth0".into(),
                index: 3,
                table: table_of(3),
                sources: vec!["10.244.1.5".parse().unwrap(), "fd00:1::5".parse().unwrap()],
                routes: [
                    Route::on_link("10.244.1.0/24".parse().unwrap()),
                    on_link(via("10.244.0.0/16", "10.244.1.1")),
                    narrow(on_link(via("0.0.0.0/0", "10.244.1.1"))),
                    Route { priority: Some(256), ..Route::on_link("fd00:1::/64".parse().unwrap()) },
                    on_link(via("::/0", "fe80::1")),
                ]
                .map(in_table)
                .to_vec(),
            },
        };
        assert_eq!(kept(&side(), &moved, &ranges), Some(expected));
    }

    #[test]
    fn a_family_that_did_not_move_or_had_no_default_route_is_left_alone() {
        let ranges = nets(&["10.96.0.0/12", "fd00:96::/112"]);
        let only_v6 = kept(&side(), &[via("::/0", "fd00:53::1")], &ranges).unwrap();
        assert_eq!(only_v6.answers.sources, ["fd00:1::5".parse::<IpAddr>().unwrap()]);
        assert!(only_v6.routes.iter().all(|route| route.destination.addr().is_ipv6()));
        let mut without = side();
        without.routes.retain(|route| route.destination.prefix_len() > 0);
        assert_eq!(kept(&without, &[via("0.0.0.0/0", "10.53.0.1")], &ranges), None);
        assert_eq!(kept(&side(), &[], &ranges), None);
    }

    #[test]
    fn a_point_to_point_link_has_no_gateway() {
        let mut side = side();
        side.routes = vec![Route::on_link("0.0.0.0/0".parse().unwrap())];
        let kept = kept(&side, &[via("0.0.0.0/0", "10.53.0.1")], &nets(&["10.96.0.0/12"])).unwrap();
        assert_eq!(kept.routes, [Route::on_link("10.96.0.0/12".parse().unwrap())]);
    }
}
