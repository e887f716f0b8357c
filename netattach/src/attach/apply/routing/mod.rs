//! Configures the routing of a pod after all its attachments are made, and compares it later.
//!
//! | module | what it does |
//! |---|---|
//! | `cluster_routes` | keeps cluster traffic on the cluster's interface while default routes move |
//! | `by_source` | routes packets from an interface's addresses by tables of their own |
//! | `vrf` | makes an interface a port of a VRF |

pub(in crate::attach) mod by_source;
pub(super) mod cluster_routes;
pub(in crate::attach) mod vrf;

use std::net::IpAddr;

use rustix::io::Errno;

use crate::attach::StepError;
use crate::cni::code;
use crate::error_chain::Chain;
use crate::netlink::{self, Handle, RouteState, Rule};
use crate::plan::check::Expected;
use crate::plan::routing::{MAIN_TABLE, NotOnLink, RULE_PRIORITY, interface_of, metric};
use crate::spec::Route;
use crate::step::SourceRouting;

/// Makes `wanted` the only default routes of the pod in their address families, through the interface with that
/// index. If `wanted` is empty, the interface's own default routes become the only ones of their families. Returns
/// the default routes that the kernel shows afterwards.
pub(super) fn move_default_routes(
    pod: &mut Handle,
    index: u32,
    wanted: &[Route],
) -> Result<Vec<Route>, StepError> {
    let before = default_routes(pod)?;
    let own = before.iter().filter(|route| route.interface == Some(index)).map(described);
    let wanted: Vec<Route> = if wanted.is_empty() { own.collect() } else { wanted.to_vec() };
    // Existing routes are not sent again: such a route may have a gateway that was only accepted as on-link when the
    // route was created.
    let is_here =
        |route: &&Route| before.iter().any(|found| found.interface == Some(index) && is(found, route));
    for route in wanted.iter().filter(|route| !is_here(route)) {
        pod.ensure_route_beside_others(index, route).map_err(|source| unreachable(route, source))?;
    }
    let is_wanted =
        |found: &RouteState| wanted.iter().any(|route| found.interface == Some(index) && is(found, route));
    let in_the_way = |found: &&RouteState| of_a_family(found, &wanted) && !is_wanted(found);
    let others: Vec<RouteState> = default_routes(pod)?.iter().filter(in_the_way).cloned().collect();
    pod.ensure_routes_absent(&others)?;

    let mut after = default_routes(pod)?;
    after.retain(|found| of_a_family(found, &wanted));
    after.sort_by_key(|found| (found.destination, found.priority));
    let all = wanted.iter().all(|route| after.iter().any(|found| is(found, route)));
    match after.iter().find(|found| !is_wanted(found)) {
        None if all => Ok(after.iter().map(described).collect()),
        found => Err(RoutingError::DefaultRoute(found.and_then(|found| found.gateway)).into()),
    }
}

/// Makes packets from the addresses of each of these interfaces leave through that interface.
pub(super) fn route_by_source(pod: &mut Handle, interfaces: &[SourceRouting]) -> Result<(), StepError> {
    for interface in interfaces {
        // A destination may have several gateways.
        pod.ensure_routes_beside_others(interface.index, &interface.routes)?;
        pod.ensure_rules(&rules(interface))?;
    }
    Ok(())
}

/// Removes the rules of those of the interfaces that are gone: the kernel removes their routes but keeps their rules.
pub(in crate::attach) fn forget_gone(
    pod: &mut Handle,
    interfaces: &[SourceRouting],
) -> Result<(), StepError> {
    let mut gone = Vec::new();
    for interface in interfaces {
        match pod.link_by_index(interface.index) {
            Err(netlink::Error::NoSuchLink(_)) => gone.extend(rules(interface)),
            // The interface exists, whatever the pod has changed of it.
            Err(error) if error.is_untold() => {}
            found => drop(found?),
        }
    }
    Ok(pod.ensure_rules_absent(&gone)?)
}

/// Does the same for all interfaces that the pod's rules name. In a pod with more links or rules than are read, the
/// rules stay: they have no effect, and end with the pod's namespace.
pub(in crate::attach) fn forget_all_gone(pod: &mut Handle) -> Result<(), StepError> {
    let listed = pod.links().and_then(|links| Ok((links, pod.rules()?)));
    let (links, mut rules) = match listed {
        Err(error) if error.is_too_many() => {
            tracing::warn!(error = %Chain(&error), "rules of interfaces that are gone stay in the pod");
            return Ok(());
        }
        listed => listed?,
    };
    rules.retain(|rule| {
        let of = interface_of(rule.table).filter(|_| rule.priority == RULE_PRIORITY);
        of.is_some_and(|index| !links.iter().any(|link| link.index == index))
    });
    Ok(pod.ensure_rules_absent(&rules)?)
}

/// Describes the first difference between the pod's routing and the configured one.
pub(in crate::attach) fn compare(want: &Expected, pod: &mut Handle) -> Result<Option<String>, StepError> {
    if let Some((ifname, routes)) = &want.default_routes {
        let index = pod.find_link(ifname)?.map(|link| link.index);
        let found = default_routes(pod)?;
        let is_there =
            |route: &&Route| found.iter().any(|found| found.interface == index && is(found, route));
        if let Some(route) = routes.iter().find(|route| !is_there(route)) {
            return Ok(Some(format!(
                "the default route through {} of {ifname} is gone",
                through(route.gateway)
            )));
        }
    }
    if let Some(kept) = &want.kept
        && let Some(gone) = cluster_routes::compare(kept, pod)?
    {
        return Ok(Some(gone));
    }
    if want.sources.is_empty() {
        return Ok(None);
    }
    let present = pod.rules()?;
    for interface in &want.sources {
        if let Some(rule) = rules(interface).iter().find(|rule| !present.contains(rule)) {
            return Ok(Some(format!("the rule that keeps {} to {} is gone", rule.source, interface.ifname)));
        }
        let found = pod.routes_in(interface.table)?;
        let is_there = |route: &&Route| {
            let same =
                |found: &RouteState| found.destination == route.destination.trunc() && is(found, route);
            found.iter().any(same)
        };
        if let Some(route) = interface.routes.iter().find(|route| !is_there(route)) {
            let what = format!("the route to {} in table {} is gone", route.destination, interface.table);
            return Ok(Some(what));
        }
    }
    Ok(None)
}

fn rules(interface: &SourceRouting) -> Vec<Rule> {
    let rule = |source: &IpAddr| Rule { source: *source, table: interface.table, priority: RULE_PRIORITY };
    interface.sources.iter().map(rule).collect()
}

fn default_routes(pod: &mut Handle) -> Result<Vec<RouteState>, StepError> {
    let mut routes = pod.routes_in(MAIN_TABLE)?;
    routes.retain(|route| route.destination.prefix_len() == 0 && route.interface.is_some());
    Ok(routes)
}

fn of_a_family(found: &RouteState, wanted: &[Route]) -> bool {
    wanted.iter().any(|route| route.destination.addr().is_ipv4() == found.destination.addr().is_ipv4())
}

/// Whether the found route has the same address family, gateway and metric.
pub(super) fn is(found: &RouteState, route: &Route) -> bool {
    found.destination.addr().is_ipv4() == route.destination.addr().is_ipv4()
        && found.gateway == route.gateway
        && found.priority == metric(route)
}

pub(super) fn described(found: &RouteState) -> Route {
    let usual = Route {
        gateway: found.gateway,
        source: found.source,
        mtu: found.mtu,
        advmss: found.advmss,
        ..Route::on_link(found.destination)
    };
    let priority = (metric(&usual) != found.priority).then_some(found.priority);
    Route { priority, ..usual }
}

fn through(gateway: Option<IpAddr>) -> String {
    gateway.map_or_else(|| "the link".into(), |gateway| gateway.to_string())
}

/// Recognises the three errors, depending on family and kernel version, for an unreachable gateway.
fn unreachable(route: &Route, source: crate::netlink::Error) -> StepError {
    let refused = [Errno::NETUNREACH, Errno::HOSTUNREACH, Errno::INVAL].map(Some);
    match route.gateway {
        Some(gateway) if refused.contains(&source.errno()) => {
            StepError::Routing(RoutingError::Gateway { gateway, source })
        }
        _ => source.into(),
    }
}

/// Why a pod's routing cannot be configured.
#[derive(Debug, thiserror::Error)]
pub enum RoutingError {
    /// Routing by source address was requested for an interface without addresses.
    #[error("sbr: no plugin before it gave {0} an address")]
    NoSource(String),
    /// An interface has more routes than are moved to other tables.
    #[error("{plugin}: {ifname} has {found} routes, and there may be {most}")]
    ManyRoutes {
        /// The plugin.
        plugin: &'static str,
        /// The interface.
        ifname: String,
        /// The number of its routes.
        found: usize,
        /// The maximum number.
        most: usize,
    },
    /// The attachment's link does not lead to the gateway.
    #[error("default-route: gateway {gateway} is not reachable on the attachment's link")]
    Gateway {
        /// The gateway.
        gateway: IpAddr,
        /// The kernel's error.
        #[source]
        source: netlink::Error,
    },
    /// A routed link does not have the requested gateway.
    #[error("default-route")]
    NotOnLink(#[from] NotOnLink),
    /// The kernel shows default routes other than the requested ones.
    #[error(
        "default-route: the kernel shows another default route of the pod{}",
        .0.map(|gateway| format!(", through {gateway}")).unwrap_or_default()
    )]
    DefaultRoute(Option<IpAddr>),
}

impl RoutingError {
    /// The CNI code.
    pub(in crate::attach) fn code(&self) -> u32 {
        match self {
            Self::NoSource(_) | Self::ManyRoutes { .. } | Self::Gateway { .. } | Self::NotOnLink(_) => {
                code::INVALID_CONFIG
            }
            Self::DefaultRoute(_) => code::INTERNAL,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::Netns;
    use crate::plan::routing::table_of;
    use crate::spec::Bridge;

    #[test]
    fn a_table_has_all_gateways_of_a_destination_and_is_made_again_without_a_difference() {
        let netns = Netns::private().unwrap();
        let mut pod = Handle::open_in(&netns).unwrap();
        let bridge = Bridge { name: "net1".to_owned(), mtu: None, promiscuous: false, vlan_filtering: false };
        let index = pod.ensure_bridge(&bridge).unwrap().link.index;
        pod.ensure_up(index).unwrap();
        for address in ["10.1.0.7/24", "fd00:1::7/64"] {
            pod.ensure_address(index, address.parse().unwrap()).unwrap();
        }
        let table = table_of(index);
        let via = |net: &str, gateway: &str| Route {
            table: Some(table),
            ..Route::via(net.parse().unwrap(), gateway.parse().unwrap())
        };
        let on_link = |net: &str| Route { table: Some(table), ..Route::on_link(net.parse().unwrap()) };
        let interface = SourceRouting {
            ifname: "net1".to_owned(),
            index,
            table,
            sources: ["10.1.0.7", "fd00:1::7"].map(|it| it.parse().unwrap()).to_vec(),
            routes: vec![
                on_link("10.1.0.0/24"),
                on_link("fd00:1::/64"),
                via("10.9.0.0/16", "10.1.0.1"),
                via("10.9.0.0/16", "10.1.0.2"),
                via("fd00:9::/64", "fd00:1::1"),
                via("fd00:9::/64", "fd00:1::2"),
            ],
        };
        let want = Expected { sources: vec![interface.clone()], ..Expected::default() };
        for time in ["first", "again"] {
            route_by_source(&mut pod, &want.sources).unwrap();
            assert_eq!(compare(&want, &mut pod).unwrap(), None, "{time}");
            assert_eq!(pod.routes_in(table).unwrap().len(), interface.routes.len(), "{time}");
        }
        let of_first = |found: &RouteState| found.gateway == Some([10, 1, 0, 1].into());
        let mut found = pod.routes_in(table).unwrap();
        found.retain(of_first);
        pod.ensure_routes_absent(&found).unwrap();
        let gone = format!("the route to 10.9.0.0/16 in table {table} is gone");
        assert_eq!(compare(&want, &mut pod).unwrap(), Some(gone));
    }

    #[test]
    fn a_route_is_described_with_all_that_its_copy_needs() {
        let (gateway, source) = (IpAddr::from([10, 1, 0, 1]), Some(IpAddr::from([10, 1, 0, 7])));
        let found = RouteState {
            destination: "10.3.0.0/16".parse().unwrap(),
            gateway: Some(gateway),
            interface: Some(3),
            priority: 5,
            table: MAIN_TABLE,
            protocol: 4,
            source,
            mtu: Some(1400),
            advmss: Some(1360),
        };
        let expected = Route {
            source,
            priority: Some(5),
            mtu: Some(1400),
            advmss: Some(1360),
            ..Route::via(found.destination, gateway)
        };
        assert_eq!(described(&found), expected);
    }
}
