//! The routing tables of one interface's addresses, as the chained plugin `sbr` chooses them. Pure.
//!
//! Each address gets a table, with the routes of the interface that belong to the address, and a rule that selects
//! the table for packets from the address. The table numbers are those that the reference plugin chooses.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

use super::addressing::any_of;
use super::routing::metric;
use crate::cni::{CniResult, Interface};
use crate::spec::{BySource, Route, SourceTable, SourceTables};

/// The lowest table number to use.
const FIRST_TABLE: u32 = 100;

/// `RTPROT_BOOT`, by which the reference plugin marks the default routes that it adds.
const BOOT: u8 = 3;

/// Returns the addresses of the pod's interface with their gateways. As with the reference plugin, an address that
/// names no interface belongs to it.
pub fn addresses(result: &CniResult, ifname: &str) -> Vec<(IpNet, Option<IpAddr>)> {
    // An interface of the node may have the same name. Some plugins mark no interface as the pod's.
    let is_told = result.interfaces.iter().any(|it| it.name == ifname && it.sandbox.is_some());
    let is_pods = |it: &Interface| it.name == ifname && (it.sandbox.is_some() || !is_told);
    let is_its = |index: &Option<usize>| {
        let named = index.map(|index| result.interfaces.get(index));
        named.is_none_or(|named| named.is_none_or(is_pods))
    };
    let its = result.ips.iter().filter(|ip| is_its(&ip.interface));
    its.map(|ip| (ip.address, ip.gateway)).collect()
}

/// Chooses the tables. `routes` are those of the interface in the main table, `taken` the tables with a route, a rule
/// or a VRF.
pub fn choose(
    asked: &BySource,
    index: u32,
    addresses: &[(IpNet, Option<IpAddr>)],
    routes: &[Route],
    taken: &BTreeSet<u32>,
) -> SourceTables {
    let mut chosen = SourceTables { index, ..SourceTables::default() };
    // `taken` is finite and bounded by what fits into a message, so a free number exists.
    let mut free = (FIRST_TABLE..).filter(|table| !taken.contains(table));
    let is_for = |route: &Route, (address, gateway): &(IpNet, Option<IpAddr>)| {
        let of_subnet = |it: Option<IpAddr>| it.is_some_and(|it| address.contains(&it));
        (route.source.is_none() && route.gateway.is_none())
            || of_subnet(route.source)
            || of_subnet(route.gateway)
            || (route.gateway.is_some() && route.gateway == *gateway)
    };
    let is_anybodys =
        |route: &Route| addresses.iter().any(|one| same_family(route, one.0) && is_for(route, one));
    for one @ (address, gateway) in addresses {
        let source = address.addr();
        if let Some(table) = asked.table {
            chosen.tables.push(SourceTable { source, table, routes: Vec::new() });
            continue;
        }
        let Some(table) = free.next() else { break };
        // A route that belongs to no address would be lost, so every table gets it.
        let its = routes
            .iter()
            .filter(|route| same_family(route, *address) && (is_for(route, one) || !is_anybodys(route)));
        let mut its: Vec<Route> = its.cloned().collect();
        // Routes by which a gateway is reached come before routes through that gateway.
        its.sort_by_key(|route| route.gateway.is_some());
        let wanted = asked.gateways.iter().find(|it| it.is_ipv4() == source.is_ipv4()).copied();
        if let Some(gateway) = wanted.or(*gateway) {
            let default = Route { protocol: Some(BOOT), ..Route::via(any_of(gateway), gateway) };
            let is_default =
                |route: &Route| route.destination == default.destination && metric(route) == metric(&default);
            if wanted.is_some() {
                its.retain(|route| !is_default(route));
            }
            if !its.iter().any(is_default) {
                its.push(default);
            }
        }
        for route in &mut its {
            route.table = Some(table);
            // The kernel has accepted the gateway before, by routes that this table need not have.
            route.on_link |= route.gateway.is_some();
        }
        chosen.tables.push(SourceTable { source, table, routes: its });
    }
    chosen.removed = routes.iter().filter(|route| !asked.stays(route)).cloned().collect();
    if asked.hints {
        let hinted = routes.iter().filter(|route| route.gateway.is_none() && route.source.is_none());
        chosen.hinted = hinted.filter_map(|route| hinted_by(route, addresses)).collect();
    }
    chosen
}

/// The route that the table of an address needs, so that packets reach any destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needed {
    /// A default route; through that gateway, if one was requested.
    Default {
        /// Whether the family is IPv4.
        is_ipv4: bool,
        /// The next hop.
        by: Option<IpAddr>,
    },
    /// Any route of that family.
    Any {
        /// Whether the family is IPv4.
        is_ipv4: bool,
    },
}

/// Returns the route that [`choose`] has certainly put into the table of an address, for callers that do not know the
/// interface's routes; `None`: there may be none. The interface's own default route may have another gateway than the
/// address, or none.
pub fn needed(asked: &BySource, address: IpNet, gateway: Option<IpAddr>) -> Option<Needed> {
    let is_ipv4 = address.addr().is_ipv4();
    let by = asked.gateways.iter().find(|it| it.is_ipv4() == is_ipv4).copied();
    if by.is_some() || gateway.is_some() {
        return Some(Needed::Default { is_ipv4, by });
    }
    // If the address's subnet contains other addresses, there is a route to them.
    (address.prefix_len() < address.max_prefix_len()).then_some(Needed::Any { is_ipv4 })
}

impl Needed {
    /// Whether a route is the needed one.
    pub fn is(self, destination: IpNet, gateway: Option<IpAddr>) -> bool {
        let is_default = destination.prefix_len() == 0;
        match self {
            Self::Default { is_ipv4, by } => {
                is_default && destination.addr().is_ipv4() == is_ipv4 && (by.is_none() || gateway == by)
            }
            Self::Any { is_ipv4 } => destination.addr().is_ipv4() == is_ipv4,
        }
    }
}

impl fmt::Display for Needed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default { by: Some(by), .. } => write!(f, "its default route by {by}"),
            Self::Default { by: None, .. } => f.write_str("its default route"),
            Self::Any { .. } => f.write_str("its routes"),
        }
    }
}

fn same_family(route: &Route, address: IpNet) -> bool {
    route.destination.addr().is_ipv4() == address.addr().is_ipv4()
}

/// Returns the route to an address's subnet, with that address as its source.
fn hinted_by(route: &Route, addresses: &[(IpNet, Option<IpAddr>)]) -> Option<Route> {
    let (own, _) = addresses.iter().find(|(address, _)| address.trunc() == route.destination)?;
    Some(Route { source: Some(own.addr()), ..route.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    fn on_link(text: &str, source: Option<&str>) -> Route {
        Route { source: source.map(ip), ..Route::on_link(net(text)) }
    }

    fn via(text: &str, gateway: &str) -> Route {
        Route::via(net(text), ip(gateway))
    }

    /// Returns the route as it is in a table.
    fn there(route: Route, table: u32) -> Route {
        Route { table: Some(table), on_link: route.gateway.is_some(), ..route }
    }

    fn boot(gateway: &str) -> Route {
        let any = if ip(gateway).is_ipv4() { "0.0.0.0/0" } else { "::/0" };
        Route { protocol: Some(3), ..via(any, gateway) }
    }

    #[test]
    fn each_address_has_a_table_with_the_routes_that_belong_to_it() {
        let addresses = [
            (net("10.1.0.2/24"), Some(ip("10.1.0.1"))),
            (net("10.2.0.2/24"), None),
            (net("fd00::2/64"), Some(ip("fd00::1"))),
        ];
        let (first, second) =
            (on_link("10.1.0.0/24", Some("10.1.0.2")), on_link("10.2.0.0/24", Some("10.2.0.2")));
        let (sixth, local) = (on_link("fd00::/64", None), on_link("fe80::/64", None));
        let (plain, own, strange) = (
            on_link("192.0.2.0/24", None),
            via("198.51.100.0/24", "10.2.0.9"),
            via("203.0.113.0/24", "10.9.0.1"),
        );
        let routes = [&own, &first, &second, &plain, &strange, &sixth, &local].map(Route::clone);
        let chosen = choose(&BySource::default(), 7, &addresses, &routes, &BTreeSet::from([101, 254]));
        let table = |source: &str, table, routes: Vec<Route>| SourceTable {
            source: ip(source),
            table,
            routes: routes.into_iter().map(|route| there(route, table)).collect(),
        };
        let expected = SourceTables {
            index: 7,
            tables: vec![
                table("10.1.0.2", 100, vec![first.clone(), plain.clone(), strange.clone(), boot("10.1.0.1")]),
                table("10.2.0.2", 102, vec![second.clone(), plain.clone(), own.clone(), strange.clone()]),
                table("fd00::2", 103, vec![sixth.clone(), local, boot("fd00::1")]),
            ],
            hinted: Vec::new(),
            removed: vec![own, first, second, plain, strange, sixth],
        };
        assert_eq!(chosen, expected);
    }

    #[test]
    fn a_table_that_somebody_else_fills_gets_rules_alone() {
        let asked = BySource { table: Some(500), ..BySource::default() };
        let addresses = [(net("10.1.0.2/24"), Some(ip("10.1.0.1"))), (net("fd00::2/64"), None)];
        let chosen = choose(&asked, 7, &addresses, &[on_link("10.1.0.0/24", None)], &BTreeSet::from([500]));
        let alone = |source: &str| SourceTable { source: ip(source), table: 500, routes: Vec::new() };
        let tables = vec![alone("10.1.0.2"), alone("fd00::2")];
        assert_eq!(chosen, SourceTables { index: 7, tables, ..SourceTables::default() });
    }

    #[test]
    fn gateways_go_over_those_of_the_addresses_and_hints_leave_the_subnets() {
        let asked = BySource { table: None, gateways: vec![ip("10.1.0.9")], hints: true };
        let addresses =
            [(net("10.1.0.2/24"), Some(ip("10.1.0.1"))), (net("fd00::2/64"), Some(ip("fd00::1")))];
        let (default, v4, v6) = (
            via("0.0.0.0/0", "10.1.0.1"),
            on_link("10.1.0.0/24", Some("10.1.0.2")),
            on_link("fd00::/64", None),
        );
        let metric_v6 = Route { priority: Some(256), ..v6 };
        let routes = [default.clone(), v4.clone(), metric_v6.clone()];
        let chosen = choose(&asked, 7, &addresses, &routes, &BTreeSet::new());
        let expected = SourceTables {
            index: 7,
            tables: vec![
                SourceTable {
                    source: ip("10.1.0.2"),
                    table: 100,
                    routes: vec![there(v4, 100), there(boot("10.1.0.9"), 100)],
                },
                SourceTable {
                    source: ip("fd00::2"),
                    table: 101,
                    routes: vec![there(metric_v6.clone(), 101), there(boot("fd00::1"), 101)],
                },
            ],
            hinted: vec![Route { source: Some(ip("fd00::2")), ..metric_v6 }],
            removed: vec![default],
        };
        assert_eq!(chosen, expected);
    }

    /// Rows: SBR-check.
    #[test]
    fn of_a_table_is_needed_what_was_put_there_whatever_routes_there_were() {
        let plain = BySource::default();
        let asked = BySource { gateways: vec![ip("10.1.0.9")], ..BySource::default() };
        let default = |is_ipv4, by: Option<&str>| Some(Needed::Default { is_ipv4, by: by.map(ip) });
        for (asked, address, gateway, expected) in [
            (&plain, "10.1.0.2/24", Some("10.1.0.1"), default(true, None)),
            (&plain, "10.1.0.2/32", Some("169.254.1.1"), default(true, None)),
            (&asked, "10.1.0.2/24", Some("10.1.0.1"), default(true, Some("10.1.0.9"))),
            (&asked, "fd00::2/64", Some("fd00::1"), default(false, None)),
            (&asked, "fd00::2/64", None, Some(Needed::Any { is_ipv4: false })),
            (&plain, "10.1.0.2/24", None, Some(Needed::Any { is_ipv4: true })),
            (&plain, "10.1.0.2/32", None, None),
        ] {
            assert_eq!(needed(asked, net(address), gateway.map(ip)), expected, "{address} {gateway:?}");
        }
        let (any, by) = (default(true, None).unwrap(), default(true, Some("10.1.0.9")).unwrap());
        let subnet = Needed::Any { is_ipv4: true };
        for (destination, gateway, expected) in [
            ("0.0.0.0/0", Some("10.1.0.9"), [true, true, true]),
            ("0.0.0.0/0", Some("10.1.0.1"), [true, false, true]),
            ("0.0.0.0/0", None, [true, false, true]),
            ("10.1.0.0/24", None, [false, false, true]),
            ("::/0", Some("fd00::1"), [false, false, false]),
        ] {
            let found = [any, by, subnet].map(|it| it.is(net(destination), gateway.map(ip)));
            assert_eq!(found, expected, "{destination} {gateway:?}");
        }
        let said = [any, by, subnet].map(|it| it.to_string());
        assert_eq!(said, ["its default route", "its default route by 10.1.0.9", "its routes"]);
    }

    #[test]
    fn addresses_are_those_of_the_interface() {
        let interface = |name: &str| Interface { name: name.into(), ..Interface::default() };
        let ips = [
            (None, "10.1.0.2/24"),
            (Some(0), "10.2.0.2/24"),
            (Some(1), "10.3.0.2/24"),
            (Some(9), "10.4.0.2/24"),
        ];
        let mut result = CniResult {
            interfaces: vec![interface("br0"), interface("net1")],
            ips: ips
                .map(|(interface, address)| crate::cni::IpConfig {
                    interface,
                    address: net(address),
                    gateway: None,
                })
                .into(),
            ..CniResult::default()
        };
        let found = |result: &CniResult| -> Vec<IpNet> {
            addresses(result, "net1").into_iter().map(|(address, _)| address).collect()
        };
        assert_eq!(found(&result), ["10.1.0.2/24", "10.3.0.2/24", "10.4.0.2/24"].map(net));
        // That of the node is another one.
        result.interfaces[0] = Interface { sandbox: Some("/pod".into()), ..interface("net1") };
        assert_eq!(found(&result), ["10.1.0.2/24", "10.2.0.2/24", "10.4.0.2/24"].map(net));
    }
}
