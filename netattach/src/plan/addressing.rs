//! From leased addresses to what stands on both ends of a link.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::{Configure, LeasedAddress, Style};
use crate::cni;
use crate::link::spec::{Addressing, Route};

/// The IPv4 gateway of every routed veth (RFC 3927: valid on the link only).
pub const GATEWAY_V4: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);
/// The IPv6 gateway of every routed veth.
pub const GATEWAY_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

/// Addresses and routes of the pod's interface.
pub fn pod_side(configure: &Configure, leased: &[LeasedAddress], routes: &[cni::Route]) -> Addressing {
    match configure.style {
        Style::Subnet => subnet(configure.default_route, leased, routes),
        Style::Routed => routed(configure.default_route, leased, routes),
    }
}

/// Addresses of the node's end of a routed veth, and the node's routes through it.
pub fn host_side(leased: &[LeasedAddress]) -> Addressing {
    let mut addressing = Addressing::default();
    if leased.iter().any(|leased| leased.address.addr().is_ipv4()) {
        addressing.addresses.push(Ipv4Net::from(GATEWAY_V4).into());
    }
    if leased.iter().any(|leased| leased.address.addr().is_ipv6()) {
        addressing.addresses.push(Ipv6Net::new_assert(GATEWAY_V6, 64).into());
    }
    addressing.routes = leased.iter().map(|leased| Route::on_link(leased.address.addr().into())).collect();
    addressing
}

/// The gateway addresses that a bridge has to carry: each with the prefix length of its subnet; the first
/// address of the subnet where the lease names none.
pub fn gateways(leased: &[LeasedAddress]) -> Vec<IpNet> {
    let mut gateways: Vec<IpNet> = Vec::new();
    for leased in leased {
        let gateway = leased.gateway.or_else(|| first_host(leased.address));
        let net = gateway.and_then(|gateway| IpNet::new(gateway, leased.address.prefix_len()).ok());
        gateways.extend(net.filter(|net| !gateways.contains(net)));
    }
    gateways
}

fn first_host(net: IpNet) -> Option<IpAddr> {
    match net.network() {
        IpAddr::V4(network) => Some(Ipv4Addr::from(u32::from(network).checked_add(1)?).into()),
        IpAddr::V6(network) => Some(Ipv6Addr::from(u128::from(network).checked_add(1)?).into()),
    }
}

fn subnet(default_route: bool, leased: &[LeasedAddress], routes: &[cni::Route]) -> Addressing {
    let gateway_for = |destination: &IpNet| {
        leased
            .iter()
            .find(|leased| leased.address.addr().is_ipv4() == destination.addr().is_ipv4())
            .and_then(|leased| leased.gateway)
    };
    let mut result =
        Addressing { addresses: leased.iter().map(|leased| leased.address).collect(), routes: vec![] };
    result.routes.extend(
        routes.iter().map(|route| with_attributes(route, route.gw.or_else(|| gateway_for(&route.dst)))),
    );
    if default_route {
        for leased in leased {
            let any = any_of(leased.address.addr());
            let gateway = leased.gateway.or_else(|| first_host(leased.address));
            if !result.routes.iter().any(|route| route.destination.trunc() == any) {
                result.routes.extend(gateway.map(|gateway| Route::via(any, gateway)));
            }
        }
    }
    result
}

fn routed(default_route: bool, leased: &[LeasedAddress], routes: &[cni::Route]) -> Addressing {
    let mut result = Addressing::default();
    let through_node = |route: Route| {
        let gateway =
            if route.destination.addr().is_ipv4() { GATEWAY_V4.into() } else { IpAddr::V6(GATEWAY_V6) };
        Route { gateway: Some(gateway), on_link: true, scope: None, ..route }
    };
    for leased in leased {
        result.addresses.push(leased.address.addr().into());
    }
    let mut add = |route: Route| {
        let route = through_node(route);
        if !result.routes.iter().any(|other| other.destination.trunc() == route.destination.trunc()) {
            result.routes.push(route);
        }
    };
    for leased in leased {
        add(Route::on_link(leased.address.trunc()));
        if default_route {
            add(Route::on_link(any_of(leased.address.addr())));
        }
    }
    for route in routes {
        add(with_attributes(route, None));
    }
    result
}

fn with_attributes(route: &cni::Route, gateway: Option<IpAddr>) -> Route {
    Route {
        gateway,
        priority: route.priority.filter(|priority| *priority != 0),
        table: route.table,
        scope: route.scope.and_then(|scope| u8::try_from(scope).ok()),
        mtu: route.mtu.filter(|mtu| *mtu != 0),
        advmss: route.advmss.filter(|advmss| *advmss != 0),
        ..Route::on_link(route.dst)
    }
}

fn any_of(address: IpAddr) -> IpNet {
    match address {
        IpAddr::V4(_) => Ipv4Net::default().into(),
        IpAddr::V6(_) => Ipv6Net::default().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leased(address: &str, gateway: Option<&str>) -> LeasedAddress {
        LeasedAddress {
            address: address.parse().unwrap(),
            gateway: gateway.map(|text| text.parse().unwrap()),
        }
    }

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    #[test]
    fn a_bridge_port_gets_a_default_route_for_each_family_that_has_none() {
        let leased = [leased("10.1.0.7/24", Some("10.1.0.1")), leased("fd00::7/64", None)];
        let routes: [cni::Route; 1] =
            [serde_json::from_value(serde_json::json!({"dst": "0.0.0.0/0", "gw": "10.1.0.254"})).unwrap()];
        let configure = Configure { style: Style::Subnet, default_route: true };
        let expected = Addressing {
            addresses: vec![net("10.1.0.7/24"), net("fd00::7/64")],
            routes: vec![
                Route::via(net("0.0.0.0/0"), "10.1.0.254".parse().unwrap()),
                Route::via(net("::/0"), "fd00::1".parse().unwrap()),
            ],
        };
        assert_eq!(pod_side(&configure, &leased, &routes), expected);
        assert_eq!(gateways(&leased), [net("10.1.0.1/24"), net("fd00::1/64")]);
    }

    #[test]
    fn a_routed_veth_reaches_everything_through_the_node() {
        let leased = [leased("10.9.0.7/24", Some("10.9.0.1"))];
        let configure = Configure { style: Style::Routed, default_route: false };
        let expected = Addressing {
            addresses: vec![net("10.9.0.7/32")],
            routes: vec![Route { on_link: true, ..Route::via(net("10.9.0.0/24"), GATEWAY_V4.into()) }],
        };
        assert_eq!(pod_side(&configure, &leased, &[]), expected);
        let node = Addressing {
            addresses: vec![net("169.254.1.1/32")],
            routes: vec![Route::on_link(net("10.9.0.7/32"))],
        };
        assert_eq!(host_side(&leased), node);
    }
}
