//! Routes.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric, RouteNextHop,
    RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rtnetlink::RouteMessageBuilder;

use super::address::address_of;
use super::answer::{u16_at, u32_at};
use super::nft::attribute_in;
use super::socket::{APPEND, CREATE, EXCL, NetlinkRequest, REPLACE, Socket};
use super::{Error, Handle};
use crate::spec::Route;

/// Length of `struct rtmsg`.
const ROUTE_HEADER: usize = 12;
/// `RTA_DST`, `RTA_OIF`, `RTA_MULTIPATH` and `RTA_TABLE` of `linux/rtnetlink.h`.
const DESTINATION: u16 = 1;
const INTERFACE: u16 = 4;
const NEXT_HOPS: u16 = 9;
const TABLE: u16 = 15;
/// Length of `struct rtnexthop`, and offset of the interface's index in it.
const HOP_HEADER: usize = 8;
const HOP_LINK_AT: usize = 4;

/// A route as the kernel describes it; a route with several next hops is split into one per hop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteState {
    /// Destination; a zero prefix for the default route.
    pub destination: IpNet,
    /// Next hop, if any.
    pub gateway: Option<IpAddr>,
    /// Index of the outgoing interface, if the route has one.
    pub interface: Option<u32>,
    /// Metric (0 if the kernel reports none).
    pub priority: u32,
    /// Table.
    pub table: u32,
    /// Number of the program that installed it (`rtm_protocol`).
    pub protocol: u8,
    /// Preferred source address, if any.
    pub source: Option<IpAddr>,
    /// Path MTU in bytes, if set on the route.
    pub mtu: Option<u32>,
    /// Maximum segment size to advertise, in bytes, if set on the route.
    pub advmss: Option<u32>,
}

impl Handle {
    /// Adds these routes by the link to the namespace, each instead of another with the same destination and metric.
    /// Idempotent.
    pub fn ensure_routes(&mut self, index: u32, routes: &[Route]) -> Result<(), Error> {
        let requests = routes.iter().map(|route| {
            NetlinkRequest::new(RouteNetlinkMessage::NewRoute(route_message(index, route)), CREATE | REPLACE)
        });
        self.socket.all(requests.collect())
    }

    /// Adds this route by the link to the namespace.
    ///
    /// # Errors
    /// A route with the same destination and metric exists ([`Error::already_exists`]), or the kernel
    /// refuses.
    pub fn add_route(&mut self, index: u32, route: &Route) -> Result<(), Error> {
        let message = RouteNetlinkMessage::NewRoute(route_message(index, route));
        self.socket.all(vec![NetlinkRequest::new(message, CREATE | EXCL)])
    }

    /// Adds this route by the link to the namespace, after others with the same destination and metric.
    pub fn ensure_route_beside_others(&mut self, index: u32, route: &Route) -> Result<(), Error> {
        self.ensure_routes_beside_others(index, std::slice::from_ref(route))
    }

    /// Adds these routes by the link to the namespace, each after others with the same destination and metric.
    /// Idempotent.
    pub fn ensure_routes_beside_others(&mut self, index: u32, routes: &[Route]) -> Result<(), Error> {
        let requests = routes.iter().map(|route| {
            NetlinkRequest::new(RouteNetlinkMessage::NewRoute(route_message(index, route)), CREATE | APPEND)
        });
        self.socket.all_but(requests.collect(), &[rustix::io::Errno::EXIST])
    }

    /// Removes these routes from the namespace. Idempotent.
    pub fn ensure_routes_absent(&mut self, routes: &[RouteState]) -> Result<(), Error> {
        let gone = |route| NetlinkRequest::new(RouteNetlinkMessage::DelRoute(any_such_route(route)), 0);
        self.socket.all_but(routes.iter().map(gone).collect(), &[rustix::io::Errno::SRCH])
    }

    /// All unicast routes of the namespace's main table, both families.
    pub fn routes(&mut self) -> Result<Vec<RouteState>, Error> {
        self.routes_in(RouteHeader::RT_TABLE_MAIN.into())
    }

    /// All unicast routes of one of the namespace's tables, both families.
    pub fn routes_in(&mut self, table: u32) -> Result<Vec<RouteState>, Error> {
        let answers = self.of_both_families(table, Socket::dump)?;
        Ok(answers.into_iter().flat_map(observed).filter(|route| route.table == table).collect())
    }

    /// As [`Handle::routes`], but only of the families of these destinations: each takes a dump.
    pub fn routes_like<'r>(
        &mut self,
        destinations: impl Iterator<Item = &'r IpNet> + Clone,
    ) -> Result<Vec<RouteState>, Error> {
        let table = RouteHeader::RT_TABLE_MAIN.into();
        let mut answers = Vec::new();
        for (family, is_v4) in [(AddressFamily::Inet, true), (AddressFamily::Inet6, false)] {
            if destinations.clone().any(|net| matches!(net, IpNet::V4(_)) == is_v4) {
                answers.extend(self.of_family(family, table, Socket::dump)?);
            }
        }
        Ok(answers.into_iter().flat_map(observed).filter(|route| route.table == table).collect())
    }

    /// The destinations of the routes of the namespace's main table, both families, each with the index of the
    /// interface that leads there; one for each next hop. Reads nothing else of the routes, of which a node has several
    /// for each attachment.
    pub fn destinations_by_link(&mut self) -> Result<Vec<(u32, IpNet)>, Error> {
        let scan = |socket: &mut Socket, request| socket.scan(request, led_to);
        let routes = self.of_both_families(RouteHeader::RT_TABLE_MAIN.into(), scan)?;
        Ok(routes.into_iter().flat_map(|(to, by)| by.into_iter().map(move |link| (link, to))).collect())
    }

    /// Asks for all routes of a table, both families.
    fn of_both_families<T>(
        &mut self,
        table: u32,
        ask: impl Fn(&mut Socket, RouteNetlinkMessage) -> Result<Vec<T>, Error>,
    ) -> Result<Vec<T>, Error> {
        let mut found = self.of_family(AddressFamily::Inet, table, &ask)?;
        found.extend(self.of_family(AddressFamily::Inet6, table, &ask)?);
        Ok(found)
    }

    /// Asks for all routes of a table of one family. The kernel makes a table with its first route, and may refuse a list
    /// of one that is not there yet.
    fn of_family<T>(
        &mut self,
        family: AddressFamily,
        table: u32,
        ask: impl Fn(&mut Socket, RouteNetlinkMessage) -> Result<Vec<T>, Error>,
    ) -> Result<Vec<T>, Error> {
        match ask(&mut self.socket, every(family, table)) {
            Err(error) if error.errno() == Some(rustix::io::Errno::NOENT) => Ok(Vec::new()),
            answers => answers,
        }
    }

    /// Returns the unicast routes of one of the namespace's tables that lead over the interface, both
    /// families, with everything that is needed to copy them to another table.
    pub fn routes_by(&mut self, index: u32, table: u32) -> Result<Vec<Route>, Error> {
        let mut found = self.routes_of_all_tables_by(index)?;
        found.retain(|route| route.table == Some(table));
        found.iter_mut().for_each(|route| route.table = None);
        Ok(found)
    }

    /// As [`Handle::routes_by`], for all tables; each route names its table.
    ///
    /// # Errors
    /// A request to the kernel failed.
    pub fn routes_of_all_tables_by(&mut self, index: u32) -> Result<Vec<Route>, Error> {
        let mut found = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut all = RouteMessage::default();
            all.header.address_family = family;
            for answer in self.socket.dump(RouteNetlinkMessage::GetRoute(all))? {
                let RouteNetlinkMessage::NewRoute(route) = &answer else { continue };
                if route.header.kind != RouteType::Unicast {
                    continue;
                }
                let (scope, protocol) = (route.header.scope.into(), route.header.protocol.into());
                let its = observed(answer).into_iter();
                found.extend(its.filter(|it| it.interface == Some(index)).map(|it| {
                    Route {
                        gateway: it.gateway,
                        source: it.source,
                        priority: Some(it.priority).filter(|priority| *priority != 0),
                        // The kernel chooses the scope of an IPv6 route.
                        scope: it.destination.addr().is_ipv4().then_some(scope),
                        mtu: it.mtu,
                        advmss: it.advmss,
                        protocol: Some(protocol),
                        table: Some(it.table),
                        ..Route::on_link(it.destination)
                    }
                }));
            }
        }
        Ok(found)
    }

    /// Returns a unicast route by the interface that a [`Route`] cannot describe in full, and the attribute
    /// that it lacks.
    ///
    /// # Errors
    /// A request to the kernel failed.
    pub fn undescribed_route_by(&mut self, index: u32) -> Result<Option<(IpNet, &'static str)>, Error> {
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut all = RouteMessage::default();
            all.header.address_family = family;
            for answer in self.socket.dump(RouteNetlinkMessage::GetRoute(all))? {
                let RouteNetlinkMessage::NewRoute(route) = &answer else { continue };
                let Some(what) = undescribed(route, index) else { continue };
                let by_it = |state: &RouteState| state.interface == Some(index);
                if let Some(state) = observed(answer).into_iter().find(by_it) {
                    return Ok(Some((state.destination, what)));
                }
            }
        }
        Ok(None)
    }

    /// Returns the tables that have routes or that rules refer to, both families.
    pub fn tables_in_use(&mut self) -> Result<BTreeSet<u32>, Error> {
        let mut used: BTreeSet<u32> = self.tables_of_rules()?.into_iter().collect();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut all = RouteMessage::default();
            all.header.address_family = family;
            let answers = self.socket.dump(RouteNetlinkMessage::GetRoute(all))?;
            used.extend(answers.into_iter().flat_map(observed).map(|route| route.table));
        }
        Ok(used)
    }

    /// Deletes these routes over the link from the main table. Idempotent.
    pub fn ensure_taken_out_of_main(&mut self, index: u32, routes: &[Route]) -> Result<(), Error> {
        let states = routes.iter().map(|route| RouteState {
            destination: route.destination,
            gateway: route.gateway,
            interface: Some(index),
            priority: route.priority.unwrap_or_default(),
            table: RouteHeader::RT_TABLE_MAIN.into(),
            protocol: 0,
            source: None,
            mtu: None,
            advmss: None,
        });
        self.ensure_routes_absent(&states.collect::<Vec<_>>())
    }

    /// Whether packets to the address stay on the node or its links: it is an address of the node, or a broadcast or
    /// multicast address.
    pub fn is_own_address(&mut self, address: IpAddr) -> Result<bool, Error> {
        let answers = match self.route_to(address, RouteFlags::empty()) {
            // There is no route to it, or one that refuses packets.
            Err(Error::Refused(_)) => return Ok(false),
            other => other?,
        };
        Ok(answers.iter().any(|answer| {
            matches!(answer, RouteNetlinkMessage::NewRoute(route)
                if !matches!(route.header.kind, RouteType::Unicast | RouteType::Unreachable | RouteType::BlackHole
                    | RouteType::Prohibit | RouteType::Throw))
        }))
    }

    /// Returns the index of the device on whose link an address is; `None`: packets to it stay on the node or
    /// go to a router first, or there is no route.
    pub fn device_towards(&mut self, address: IpAddr) -> Result<Option<u32>, Error> {
        let answers = match self.route_to(address, RouteFlags::empty()) {
            // There is no route to it, or one that refuses packets.
            Err(Error::Refused(_)) => return Ok(None),
            other => other?,
        };
        Ok(answers.into_iter().find_map(|answer| {
            let RouteNetlinkMessage::NewRoute(route) = answer else { return None };
            let by = |attribute: &RouteAttribute| match attribute {
                RouteAttribute::Oif(index) => Some(*index),
                _ => None,
            };
            let is_router =
                |it: &RouteAttribute| matches!(it, RouteAttribute::Gateway(_) | RouteAttribute::Via(_));
            let is_on_link =
                route.header.kind == RouteType::Unicast && !route.attributes.iter().any(is_router);
            route.attributes.iter().find_map(by).filter(|_| is_on_link)
        }))
    }

    /// Returns the unicast route by which packets to the address leave, from the table that the kernel's
    /// rules select; `None`: there is no route, the route refuses packets, or they stay on the node. Of
    /// several next hops the first.
    ///
    /// # Errors
    /// A request to the kernel failed.
    pub fn matching_route(&mut self, address: IpAddr) -> Result<Option<RouteState>, Error> {
        let answers = match self.route_to(address, RouteFlags::FibMatch) {
            Err(Error::Refused(_)) => return Ok(None),
            other => other?,
        };
        let is_unicast = |answer: &RouteNetlinkMessage| match answer {
            RouteNetlinkMessage::NewRoute(route) => route.header.kind == RouteType::Unicast,
            _ => false,
        };
        Ok(answers.into_iter().filter(is_unicast).flat_map(observed).next())
    }

    /// Asks the kernel how it routes packets to an address; with [`RouteFlags::FibMatch`] it returns the
    /// matching route with the route's own destination.
    fn route_to(&mut self, address: IpAddr, flags: RouteFlags) -> Result<Vec<RouteNetlinkMessage>, Error> {
        let mut to = RouteMessage::default();
        to.header.flags = flags;
        to.header.address_family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
        to.header.destination_prefix_length = if address.is_ipv4() { 32 } else { 128 };
        to.attributes.push(RouteAttribute::Destination(wire(address)));
        self.socket.request(RouteNetlinkMessage::GetRoute(to), 0)
    }

    /// The default routes of the namespace's main table, both families.
    pub fn default_routes(&mut self) -> Result<Vec<RouteState>, Error> {
        Ok(self.routes()?.into_iter().filter(|route| route.destination.prefix_len() == 0).collect())
    }

    /// Index of the interface of the default route: IPv4 first, the lowest metric first.
    ///
    /// # Errors
    /// [`Error::NoDefaultRoute`] if neither family has one.
    pub fn default_route_interface(&mut self) -> Result<u32, Error> {
        let mut defaults = self.default_routes()?;
        defaults.sort_by_key(|route| (matches!(route.destination, IpNet::V6(_)), route.priority));
        defaults.into_iter().find_map(|route| route.interface).ok_or(Error::NoDefaultRoute)
    }
}

pub(super) fn route_message(index: u32, route: &Route) -> RouteMessage {
    let mut message = match route.destination.trunc() {
        IpNet::V4(net) => RouteMessageBuilder::<Ipv4Addr>::new()
            .destination_prefix(net.addr(), net.prefix_len())
            .output_interface(index)
            .build(),
        IpNet::V6(net) => RouteMessageBuilder::<Ipv6Addr>::new()
            .destination_prefix(net.addr(), net.prefix_len())
            .output_interface(index)
            .build(),
    };
    message.header.scope = match route.scope {
        Some(scope) => RouteScope::from(scope),
        None if route.gateway.is_none() => RouteScope::Link,
        None => RouteScope::Universe,
    };
    if let Some(protocol) = route.protocol {
        message.header.protocol = protocol.into();
    }
    let attributes = &mut message.attributes;
    attributes.extend(route.gateway.map(|gateway| RouteAttribute::Gateway(wire(gateway))));
    attributes.extend(route.source.map(|source| RouteAttribute::PrefSource(wire(source))));
    attributes.extend(route.priority.map(RouteAttribute::Priority));
    attributes.extend(route.table.map(RouteAttribute::Table));
    let metrics: Vec<_> =
        route.mtu.map(RouteMetric::Mtu).into_iter().chain(route.advmss.map(RouteMetric::Advmss)).collect();
    if !metrics.is_empty() {
        attributes.push(RouteAttribute::Metrics(metrics));
    }
    if route.on_link {
        message.header.flags |= RouteFlags::Onlink;
    }
    message
}

/// Matches a route of any type, scope and origin.
fn any_such_route(route: &RouteState) -> RouteMessage {
    let wanted = Route {
        gateway: route.gateway,
        priority: Some(route.priority).filter(|priority| *priority != 0),
        table: Some(route.table),
        ..Route::on_link(route.destination)
    };
    let mut message = route_message(route.interface.unwrap_or_default(), &wanted);
    message.header.scope = RouteScope::NoWhere;
    message.header.protocol = RouteProtocol::Unspec;
    message.header.kind = RouteType::Unspec;
    message
}

fn wire(address: IpAddr) -> RouteAddress {
    match address {
        IpAddr::V4(address) => RouteAddress::Inet(address),
        IpAddr::V6(address) => RouteAddress::Inet6(address),
    }
}

fn preferred_source(route: &RouteMessage) -> Option<IpAddr> {
    route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::PrefSource(address) => ip(address),
        _ => None,
    })
}

/// Names an attribute of this route that a [`Route`] by the interface cannot express.
fn undescribed(route: &RouteMessage, index: u32) -> Option<&'static str> {
    if route.header.kind != RouteType::Unicast {
        return None;
    }
    if route.header.tos != 0 {
        return Some("a type of service");
    }
    let of_hops = route.attributes.iter().filter_map(|attribute| match attribute {
        RouteAttribute::MultiPath(hops) => Some(hops),
        _ => None,
    });
    let by_it = of_hops.flatten().filter(|hop| hop.interface_index == index);
    let mut attributes = by_it.flat_map(|hop| &hop.attributes).chain(&route.attributes);
    attributes.find_map(|attribute| match attribute {
        RouteAttribute::Via(_) => Some("a gateway of the other family"),
        RouteAttribute::Encap(_) | RouteAttribute::EncapType(_) => Some("an encapsulation"),
        _ => None,
    })
}

/// MTU and maximum segment size, if set on the route.
fn metrics(route: &RouteMessage) -> (Option<u32>, Option<u32>) {
    let (mut mtu, mut advmss) = (None, None);
    for metric in route.attributes.iter().filter_map(|attribute| match attribute {
        RouteAttribute::Metrics(metrics) => Some(metrics),
        _ => None,
    }) {
        for one in metric {
            match one {
                RouteMetric::Mtu(bytes) => mtu = Some(*bytes),
                RouteMetric::Advmss(bytes) => advmss = Some(*bytes),
                _ => {}
            }
        }
    }
    (mtu, advmss)
}

/// Requests all routes of a table: the kernel leaves out those of others, and its own table has one for each address
/// of each link, and more.
fn every(family: AddressFamily, table: u32) -> RouteNetlinkMessage {
    let mut all = RouteMessage::default();
    all.header.address_family = family;
    all.attributes.push(RouteAttribute::Table(table));
    RouteNetlinkMessage::GetRoute(all)
}

/// The destination of a route of the main table, and the interfaces that lead there, from the part of its message after
/// the header. `None`: it is a route of another table, or cannot be read.
fn led_to(message: &[u8]) -> Option<(IpNet, Vec<u32>)> {
    let (header, attributes) = message.split_at_checked(ROUTE_HEADER)?;
    let (family, length) = (header[0], header[1]);
    let number = |kind| attribute_in(attributes, kind).and_then(|value| u32_at(value, 0));
    let table = number(TABLE).unwrap_or_else(|| header[4].into());
    if table != u32::from(RouteHeader::RT_TABLE_MAIN) {
        return None;
    }
    let unspecified = || match i32::from(family) {
        libc::AF_INET => Some(IpAddr::from(Ipv4Addr::UNSPECIFIED)),
        libc::AF_INET6 => Some(IpAddr::from(Ipv6Addr::UNSPECIFIED)),
        _ => None,
    };
    let destination = match attribute_in(attributes, DESTINATION) {
        Some(bytes) => address_of(bytes)?,
        // The default route names none.
        None => unspecified()?,
    };
    let mut by: Vec<u32> = number(INTERFACE).into_iter().collect();
    let mut hops = attribute_in(attributes, NEXT_HOPS).unwrap_or_default();
    while let (Some(length), Some(link)) = (u16_at(hops, 0), u32_at(hops, HOP_LINK_AT)) {
        by.push(link);
        hops = hops.get(usize::from(length).max(HOP_HEADER).next_multiple_of(4)..).unwrap_or_default();
    }
    Some((IpNet::new(destination, length).ok()?, by))
}

/// One state per next hop; none for messages other than routes.
fn observed(message: RouteNetlinkMessage) -> Vec<RouteState> {
    let RouteNetlinkMessage::NewRoute(route) = message else { return Vec::new() };
    let length = route.header.destination_prefix_length;
    let (mtu, advmss) = metrics(&route);
    let mut state = RouteState {
        destination: match route.header.address_family {
            AddressFamily::Inet => IpNet::V4(Ipv4Net::default()),
            AddressFamily::Inet6 => IpNet::V6(Ipv6Net::default()),
            _ => return Vec::new(),
        },
        gateway: None,
        interface: None,
        priority: 0,
        table: u32::from(route.header.table),
        protocol: route.header.protocol.into(),
        source: preferred_source(&route),
        mtu,
        advmss,
    };
    let mut hops = Vec::new();
    for attribute in route.attributes {
        match attribute {
            RouteAttribute::Destination(address) => {
                let Some(destination) = ip(&address).and_then(|ip| IpNet::new(ip, length).ok()) else {
                    return Vec::new();
                };
                state.destination = destination;
            }
            RouteAttribute::Gateway(address) => state.gateway = ip(&address),
            RouteAttribute::Oif(index) => state.interface = Some(index),
            RouteAttribute::Priority(priority) => state.priority = priority,
            RouteAttribute::Table(table) => state.table = table,
            RouteAttribute::MultiPath(several) => hops = several,
            _ => {}
        }
    }
    if hops.is_empty() {
        return vec![state];
    }
    hops.into_iter().map(|hop| through(hop, &state)).collect()
}

/// The route with one of its next hops.
fn through(hop: RouteNextHop, route: &RouteState) -> RouteState {
    let gateway = hop.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Gateway(address) => ip(address),
        _ => None,
    });
    RouteState { gateway, interface: Some(hop.interface_index), ..route.clone() }
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(address) => Some(IpAddr::V4(*address)),
        RouteAddress::Inet6(address) => Some(IpAddr::V6(*address)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::Netns;
    use crate::spec::Bridge;

    #[test]
    fn a_route_is_read_with_all_that_a_copy_needs() {
        let gateway = IpAddr::from([10, 1, 0, 1]);
        let route = Route {
            source: Some([10, 1, 0, 7].into()),
            priority: Some(5),
            table: Some(100),
            mtu: Some(1400),
            advmss: Some(1360),
            protocol: Some(4),
            ..Route::via("10.3.0.0/16".parse().unwrap(), gateway)
        };
        let expected = RouteState {
            destination: route.destination,
            gateway: Some(gateway),
            interface: Some(3),
            priority: 5,
            table: 100,
            protocol: 4,
            source: route.source,
            mtu: Some(1400),
            advmss: Some(1360),
        };
        assert_eq!(observed(RouteNetlinkMessage::NewRoute(route_message(3, &route))), [expected]);
    }

    #[test]
    fn the_route_that_packets_take_has_its_own_destination() {
        let netns = Netns::private().unwrap();
        let mut handle = Handle::open_in(&netns).unwrap();
        let bridge = Bridge { name: "a".to_owned(), mtu: None, promiscuous: false, vlan_filtering: false };
        let index = handle.ensure_bridge(&bridge).unwrap().link.index;
        handle.ensure_up(index).unwrap();
        for address in ["10.1.0.1/24", "fd00:1::1/64"] {
            handle.ensure_address(index, address.parse().unwrap()).unwrap();
        }
        let router = IpAddr::from([10, 1, 0, 9]);
        let through = |net: &str| Route::via(net.parse().unwrap(), router);
        handle.ensure_routes(index, &[through("10.3.0.0/16"), through("0.0.0.0/0")]).unwrap();
        let on_link = |net: &str| Some((net.parse::<IpNet>().unwrap(), None, Some(index)));
        let routed = |net: &str| Some((net.parse::<IpNet>().unwrap(), Some(router), Some(index)));
        for (to, expected) in [
            ("10.1.0.7", on_link("10.1.0.0/24")),
            ("10.3.0.7", routed("10.3.0.0/16")),
            ("10.9.0.7", routed("0.0.0.0/0")),
            ("10.1.0.1", None),
            ("fd00:1::7", on_link("fd00:1::/64")),
            ("fd00:9::7", None),
        ] {
            let found = handle.matching_route(to.parse().unwrap()).unwrap();
            assert_eq!(found.map(|it| (it.destination, it.gateway, it.interface)), expected, "{to}");
        }
    }

    #[test]
    fn destinations_are_those_of_the_main_table_with_each_link_that_leads_there() {
        let netns = Netns::private().unwrap();
        let mut handle = Handle::open_in(&netns).unwrap();
        // The kernel may not have made the table yet.
        handle.destinations_by_link().unwrap();
        let bridge = Bridge { name: "a".to_owned(), mtu: None, promiscuous: false, vlan_filtering: false };
        let index = handle.ensure_bridge(&bridge).unwrap().link.index;
        handle.ensure_up(index).unwrap();
        for address in ["10.1.0.1/24", "fd00:1::1/64"] {
            handle.ensure_address(index, address.parse().unwrap()).unwrap();
        }
        let through = |net: &str, router: &str| Route::via(net.parse().unwrap(), router.parse().unwrap());
        let elsewhere = Route { table: Some(100), ..through("10.4.0.0/16", "10.1.0.9") };
        let routes = [through("10.3.0.0/16", "10.1.0.9"), through("0.0.0.0/0", "10.1.0.9"), elsewhere];
        handle.ensure_routes(index, &routes).unwrap();
        for router in ["fd00:1::8", "fd00:1::9"] {
            handle.ensure_route_beside_others(index, &through("fd00:3::/64", router)).unwrap();
        }
        let found = handle.destinations_by_link().unwrap();
        let all = handle.routes().unwrap().into_iter();
        let expected: Vec<_> = all.filter_map(|route| Some((route.interface?, route.destination))).collect();
        assert_eq!(found, expected);
        for (net, times) in [("10.3.0.0/16", 1), ("0.0.0.0/0", 1), ("10.4.0.0/16", 0), ("fd00:3::/64", 2)] {
            let wanted = (index, net.parse().unwrap());
            assert_eq!(found.iter().filter(|it| **it == wanted).count(), times, "{net}");
        }
        let [v4, v6] = ["10.9.0.0/16", "fd00:9::/64"].map(|net| [net.parse::<IpNet>().unwrap()]);
        let like = [v4, v6].map(|destinations| handle.routes_like(destinations.iter()).unwrap());
        assert!(like.iter().all(|routes| !routes.is_empty()));
        assert_eq!(like.concat(), handle.routes().unwrap());
        assert_eq!(handle.routes_like([].iter()).unwrap(), []);
        assert_eq!(handle.routes_in(100).unwrap().len(), 1);
        assert_eq!(handle.routes_in(101).unwrap(), []);
        let addresses = handle.addresses_by_link().unwrap();
        assert!(addresses.contains(&(index, "10.1.0.1/24".parse().unwrap())));
        assert!(addresses.contains(&(index, "fd00:1::1/64".parse().unwrap())));
    }
}
