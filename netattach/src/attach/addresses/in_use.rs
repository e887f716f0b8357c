//! Whether the kernel knows a holder of an address that a request chooses: a device, a station or a route of the node.
//! Addresses of attachments are in `occupied`.

use std::net::IpAddr;

use crate::attach::StepError;
use crate::attach::addresses::holder::{Address, AddressError, Holder};
use crate::attach::addresses::of_node;
use crate::mac::Mac;
use crate::netlink::{Handle, RouteState, Station};

/// Refuses an Ethernet address that is in use, because its traffic would be diverted to the new holder. `bridge`:
/// index of the bridge whose port is to have it; `own`: name of that port, which may be left over from before.
///
/// # Errors
/// [`AddressError::Taken`] with the holder.
pub(in crate::attach) fn check_mac_is_free(
    host: &mut Handle,
    mac: Mac,
    bridge: Option<u32>,
    own: Option<&str>,
) -> Result<(), StepError> {
    let taken = |holder| Err(StepError::Address(AddressError::Taken { address: Address::Mac(mac), holder }));
    let links = host.links()?;
    if let Some(link) = links.iter().find(|link| link.mac == Some(mac)) {
        return taken(Holder::Node(link.name.clone()));
    }
    let Some(bridge) = bridge else { return Ok(()) };
    let known = host.stations(bridge)?.into_iter().filter(|station| station.mac == mac);
    for Station { port, kept, .. } in known {
        let link = links.iter().find(|link| link.index == port);
        let name = link.map_or_else(|| port.to_string(), |link| link.name.clone());
        if own == Some(name.as_str()) {
            continue;
        }
        return taken(if kept { Holder::Entered(name) } else { Holder::Seen(name) });
    }
    Ok(())
}

/// Whether the node gets a route to an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::attach) enum Routed {
    /// No route.
    No,
    /// A route. The network's author or a pool has determined the address, or requests are limited to subnets of the
    /// node.
    Named,
    /// A route through the device with this index, and only the pod or its runtime has chosen the address.
    Asked(u32),
}

/// Refuses an IP address that is in use.
///
/// # Errors
/// [`AddressError::Taken`] with the holder.
pub(in crate::attach) fn check_ip_is_free(
    host: &mut Handle,
    ip: IpAddr,
    routed: Routed,
) -> Result<(), StepError> {
    let taken = |holder| Err(StepError::Address(AddressError::Taken { address: Address::Ip(ip), holder }));
    if of_node::has(host, ip)? {
        return taken(Holder::Own);
    }
    if routed == Routed::No {
        return Ok(());
    }
    let routes = host.routes()?;
    if routes.iter().any(|route| route.gateway == Some(ip)) {
        return taken(Holder::NextHop);
    }
    let Routed::Asked(own) = routed else { return Ok(()) };
    // Rules may select other tables, and routes that reject packets are reported only for the main table.
    let by_rules = host.matching_route(ip)?;
    match leading_elsewhere(routes.iter().chain(&by_rules), ip, own) {
        Some(route) => taken(behind(host, route)),
        None => Ok(()),
    }
}

/// Returns the most specific route to an address through a device other than the one with index `own`. Default routes
/// do not count: they cover all addresses that the node has no route for.
fn leading_elsewhere<'r>(
    routes: impl Iterator<Item = &'r RouteState>,
    ip: IpAddr,
    own: u32,
) -> Option<&'r RouteState> {
    let others = routes.filter(|route| route.destination.prefix_len() > 0 && route.interface != Some(own));
    others.filter(|route| route.destination.contains(&ip)).max_by_key(|route| route.destination.prefix_len())
}

fn behind(host: &mut Handle, route: &RouteState) -> Holder {
    let RouteState { destination, interface, .. } = route;
    // A device that has just been deleted has no name.
    let device = interface.and_then(|index| host.link_by_index(index).ok()).map(|link| link.name);
    match destination.prefix_len() == destination.max_prefix_len() {
        true => Holder::Route(device),
        false => Holder::Within(*destination, device),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows: STC-node-links.
    #[test]
    fn an_address_that_is_asked_for_is_behind_no_route_of_the_node_but_a_default_one() {
        let route = |destination: &str, gateway: Option<[u8; 4]>, interface: Option<u32>| RouteState {
            destination: destination.parse().unwrap(),
            gateway: gateway.map(IpAddr::from),
            interface,
            priority: 0,
            table: 254,
            protocol: 2,
            source: None,
            mtu: None,
            advmss: None,
        };
        let routes = [
            route("0.0.0.0/0", Some([192, 168, 1, 1]), Some(2)),
            route("::/0", None, Some(2)),
            route("192.168.1.0/24", None, Some(2)),
            route("10.8.0.0/16", Some([192, 168, 1, 9]), Some(2)),
            route("10.8.1.0/26", None, None),
            route("10.9.0.7/32", None, Some(7)),
            route("10.9.0.8/32", None, Some(8)),
            route("2001:db8::/64", None, Some(3)),
        ];
        for (ip, expected) in [
            ("192.168.1.77", Some(2)),
            ("10.8.9.9", Some(3)),
            ("10.8.1.9", Some(4)),
            // By the pod's own device, as a repeated ADD may have left it, and by another pod's.
            ("10.9.0.7", None),
            ("10.9.0.8", Some(6)),
            ("2001:db8::7", Some(7)),
            ("198.51.100.7", None),
            ("2001:db8:1::7", None),
        ] {
            let found = leading_elsewhere(routes.iter(), ip.parse().unwrap(), 7);
            assert_eq!(found, expected.map(|at: usize| &routes[at]), "{ip}");
        }
    }
}
