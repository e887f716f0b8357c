//! Computes the addresses and routes of both ends of a link from leased addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

pub(crate) use crate::cidr::first_host;
use crate::cni;
use crate::spec::{Addressing, IpvlanMode, Link, Route, VfLinkState};
use crate::step::{Brought, Configure, LeasedAddress, MadeBy, Output, Step, Style};

/// The IPv4 gateway of every routed veth (RFC 3927: valid on the link only).
pub const GATEWAY_V4: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);
/// The IPv6 gateway of every routed veth.
pub const GATEWAY_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

/// Addresses and routes of the pod's interface.
pub fn pod_side(configure: &Configure, leased: &[LeasedAddress], routes: &[cni::Route]) -> Addressing {
    let addressing = match configure.style {
        Style::Subnet => subnet(configure, leased, routes),
        Style::Routed => routed(configure.default_route, leased, routes),
        Style::PointToPoint => point_to_point(leased, routes),
    };
    Addressing { detect_duplicates: configure.detect_duplicates, ..addressing }
}

/// When the IPv4 addresses of an interface are announced to its neighbours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Announcement {
    /// The interface has no IPv4 addresses, or no neighbour could use them.
    Never,
    /// During the ADD.
    AtOnce,
    /// After the ADD has been answered.
    Late,
}

/// Returns when the IPv4 addresses of an interface are announced to its neighbours. `may_wait`: the caller can
/// announce them after the answer. A late announcement sends an ARP request for each address from the first address
/// of its subnet, so with two addresses in one subnet only one would be announced, unless they are [`advertised`]. For
/// a card, the ADD has waited for the carrier anyway.
pub fn announcement(made_by: MadeBy<'_>, addressing: &Addressing, may_wait: bool) -> Announcement {
    if !addressing.announce_v4 {
        return Announcement::Never;
    }
    match made_by {
        MadeBy::Device(_) => Announcement::AtOnce,
        _ if !may_wait => Announcement::AtOnce,
        _ if share_a_subnet(&addressing.addresses) && !advertised(made_by) => Announcement::AtOnce,
        _ => Announcement::Late,
    }
}

/// Whether the addresses of a link that is up are announced with an ARP request for each. Otherwise the link's
/// Ethernet address is set to its current value, after which the kernel announces all addresses, including IPv6. The
/// kernel refuses that for an ipvlan, and the driver of a VF asks its card, which takes a tenth of an ADD.
pub fn announced_by_requests(made_by: MadeBy<'_>, addressing: &Addressing) -> bool {
    match made_by {
        MadeBy::Link(Link::Ipvlan(_)) => true,
        MadeBy::Device(_) => {
            let all_v4 = addressing.addresses.iter().all(|address| address.addr().is_ipv4());
            all_v4 && !share_a_subnet(&addressing.addresses)
        }
        _ => false,
    }
}

/// Whether the addresses of an interface are announced by frames that netattach sends itself: the kernel announces no
/// IPv6 address of an ipvlan, and of its IPv4 addresses one of each subnet, see [`announced_by_requests`]. In the layer
/// 3 modes an ipvlan has no neighbours.
pub fn advertised(made_by: MadeBy<'_>) -> bool {
    matches!(made_by, MadeBy::Link(Link::Ipvlan(ipvlan)) if ipvlan.mode == IpvlanMode::L2)
}

/// Whether the ADD waits for the carrier of the pod's interface before it announces the addresses: for a card that
/// gets addresses. A VF whose card keeps its link down never gets a carrier, whoever has set that.
pub fn awaits_carrier(steps: &[Step], outputs: Brought<'_>, addressing: &Addressing) -> bool {
    let is_card = steps.iter().any(|step| matches!(step, Step::ClaimDevice(_)));
    let asked = steps.iter().find_map(|step| match step {
        Step::SetDevice(set) => set.function.link_state,
        _ => None,
    });
    let before = outputs.iter().find_map(|output| match output {
        Output::Claimed(claim) => claim.settings.as_ref()?.link_state,
        _ => None,
    });
    is_card && !addressing.addresses.is_empty() && asked.or(before) != Some(VfLinkState::Disable)
}

/// Whether two of the IPv4 addresses are in one subnet.
fn share_a_subnet(addresses: &[IpNet]) -> bool {
    let v4: Vec<&IpNet> = addresses.iter().filter(|it| it.addr().is_ipv4()).collect();
    let meet = |a: &IpNet, b: &IpNet| a.contains(&b.addr()) || b.contains(&a.addr());
    v4.iter().enumerate().any(|(at, one)| v4[..at].iter().any(|before| meet(before, one)))
}

/// Addresses of the node's end of a routed link, and the node's routes through it.
pub fn host_side(style: Style, leased: &[LeasedAddress]) -> Addressing {
    let routes = leased.iter().map(|leased| Route::on_link(leased.address.addr().into())).collect();
    let mut addressing = Addressing { routes, ..Addressing::default() };
    if style == Style::PointToPoint {
        for gateway in leased.iter().map(only_gateway) {
            let net = if gateway == IpAddr::V6(GATEWAY_V6) { link_net_v6() } else { gateway.into() };
            if !addressing.addresses.contains(&net) {
                addressing.addresses.push(net);
            }
        }
        return addressing;
    }
    if leased.iter().any(|leased| leased.address.addr().is_ipv4()) {
        addressing.addresses.push(Ipv4Net::from(GATEWAY_V4).into());
    }
    if leased.iter().any(|leased| leased.address.addr().is_ipv6()) {
        addressing.addresses.push(link_net_v6());
    }
    addressing
}

/// [`GATEWAY_V6`] with the prefix length that an interface has it with.
fn link_net_v6() -> IpNet {
    Ipv6Net::new_assert(GATEWAY_V6, 64).into()
}

/// Returns the gateway of a leased address on a point-to-point link; if the lease names none, the gateway of every
/// routed link.
pub fn only_gateway(leased: &LeasedAddress) -> IpAddr {
    leased.gateway.unwrap_or_else(|| link_gateway(leased.address.addr()))
}

/// Returns the gateway addresses that a bridge must have, each with the prefix length of its subnet. If the lease
/// names no gateway, it is the first address of the subnet.
pub fn gateways(leased: &[LeasedAddress]) -> Vec<IpNet> {
    let mut gateways: Vec<IpNet> = Vec::new();
    for leased in leased {
        let gateway = leased.gateway.or_else(|| first_host(leased.address));
        let net = gateway.and_then(|gateway| IpNet::new(gateway, leased.address.prefix_len()).ok());
        gateways.extend(net.filter(|net| !gateways.contains(net)));
    }
    gateways
}

/// The changes that give a bridge its gateway addresses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GatewayChanges {
    /// Addresses that conflict with the gateways.
    pub remove: Vec<IpNet>,
    /// Gateway addresses that are missing.
    pub add: Vec<IpNet>,
}

/// An address on a bridge conflicts with a gateway address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GatewayConflict {
    /// The address on the bridge.
    pub present: IpNet,
    /// The gateway address to add.
    pub wanted: IpNet,
}

/// How other addresses of a bridge are treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Others {
    /// Any other IPv4 address conflicts; another IPv6 address conflicts only if the subnets overlap.
    Refused,
    /// Addresses that would conflict are removed.
    Removed,
    /// Another address of either family conflicts only if the subnets overlap.
    Kept,
}

/// Compares the addresses of a bridge with the `wanted` gateways.
///
/// # Errors
/// An address conflicts, and must not be removed.
pub fn gateway_changes(
    present: &[IpNet],
    wanted: &[IpNet],
    others: Others,
) -> Result<GatewayChanges, GatewayConflict> {
    let mut changes = GatewayChanges::default();
    for &gateway in wanted.iter().filter(|gateway| !present.contains(gateway)) {
        for &other in present.iter().filter(|it| !wanted.contains(it) && is_in_the_way(**it, gateway, others))
        {
            if others != Others::Removed {
                return Err(GatewayConflict { present: other, wanted: gateway });
            }
            if !changes.remove.contains(&other) {
                changes.remove.push(other);
            }
        }
        changes.add.push(gateway);
    }
    Ok(changes)
}

fn is_in_the_way(present: IpNet, wanted: IpNet, others: Others) -> bool {
    match (present, wanted) {
        (IpNet::V4(present), IpNet::V4(wanted)) => {
            let overlap = present.contains(&wanted.network()) || wanted.contains(&present.network());
            overlap || others != Others::Kept
        }
        // Every interface has a link-local address; the kernel manages it.
        (IpNet::V6(present), IpNet::V6(_)) if present.addr().is_unicast_link_local() => false,
        (IpNet::V6(present), IpNet::V6(wanted)) => {
            present.contains(&wanted.network()) || wanted.contains(&present.network())
        }
        _ => false,
    }
}

/// Returns the gateway of a routed veth in the family of `address`: all traffic goes through this gateway.
pub fn link_gateway(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => GATEWAY_V4.into(),
        IpAddr::V6(_) => GATEWAY_V6.into(),
    }
}

/// Whether every routed veth has this gateway in the pod, whatever its addresses.
pub fn is_link_gateway(address: IpAddr) -> bool {
    address == link_gateway(address)
}

fn subnet(configure: &Configure, leased: &[LeasedAddress], routes: &[cni::Route]) -> Addressing {
    let gateways = leased.iter().filter_map(|leased| leased.gateway);
    let has_v4 = leased.iter().any(|leased| leased.address.addr().is_ipv4());
    let has_v6 = leased.iter().any(|leased| leased.address.addr().is_ipv6());
    let mut result = Addressing {
        addresses: leased.iter().map(|leased| leased.address).collect(),
        announce_v4: has_v4,
        no_link_local: configure.v4_alone && has_v4 && !has_v6,
        ..Addressing::default()
    };
    result.routes.extend(routes.iter().map(|route| with_attributes(route, route.next_hop(gateways.clone()))));
    if configure.default_route {
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
    let through_node = |route: Route| Route {
        gateway: Some(link_gateway(route.destination.addr())),
        on_link: true,
        scope: None,
        ..route
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
        // A host address has no neighbours to be routed to.
        if leased.address.prefix_len() < leased.address.max_prefix_len() {
            add(Route::on_link(leased.address.trunc()));
        }
        if default_route {
            add(Route::on_link(any_of(leased.address.addr())));
        }
    }
    for route in routes {
        add(with_attributes(route, None));
    }
    result
}

/// Like the reference plugin: the gateway is on-link, and the subnet is routed through the gateway.
fn point_to_point(leased: &[LeasedAddress], routes: &[cni::Route]) -> Addressing {
    let mut result = Addressing {
        addresses: leased.iter().map(|leased| leased.address).collect(),
        no_subnet_routes: true,
        announce_v4: leased.iter().any(|leased| leased.address.addr().is_ipv4()),
        ..Addressing::default()
    };
    for leased in leased {
        let (source, gateway) = (Some(leased.address.addr()), only_gateway(leased));
        let subnet = Route { source, on_link: true, ..Route::via(leased.address.trunc(), gateway) };
        let to_gateway = Route { source, ..Route::on_link(gateway.into()) };
        // A result names the link's own gateway too.
        let has_own = gateway != link_gateway(leased.address.addr());
        // The link's own gateway needs no route, and a host address has no neighbours to be routed to.
        let is_subnet = leased.address.prefix_len() < leased.address.max_prefix_len();
        for route in has_own.then_some(to_gateway).into_iter().chain(is_subnet.then_some(subnet)) {
            if !result.routes.iter().any(|other| other.destination == route.destination) {
                result.routes.push(route);
            }
        }
    }
    result.routes.extend(routes.iter().map(|route| {
        let gateway = route.next_hop(leased.iter().map(only_gateway));
        Route { on_link: gateway.is_some(), ..with_attributes(route, gateway) }
    }));
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

pub(super) fn any_of(address: IpAddr) -> IpNet {
    match address {
        IpAddr::V4(_) => Ipv4Net::default().into(),
        IpAddr::V6(_) => Ipv6Net::default().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::fixtures;
    use crate::spec::{Ipvlan, VfSettings};
    use crate::step::{Claim, Outputs, SetDevice, StepRef};

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
        let configure = Configure { default_route: true, ..Configure::default() };
        let expected = Addressing {
            addresses: vec![net("10.1.0.7/24"), net("fd00::7/64")],
            routes: vec![
                Route::via(net("0.0.0.0/0"), "10.1.0.254".parse().unwrap()),
                Route::via(net("::/0"), "fd00::1".parse().unwrap()),
            ],
            announce_v4: true,
            ..Addressing::default()
        };
        assert_eq!(pod_side(&configure, &leased, &routes), expected);
        assert_eq!(gateways(&leased), [net("10.1.0.1/24"), net("fd00::1/64")]);
    }

    #[test]
    fn only_an_interface_without_ipv6_is_without_a_link_local_address() {
        let (v4, v6) = (leased("10.1.0.7/24", None), leased("fd00::7/64", None));
        let without = |v4_alone, leased: &[LeasedAddress]| {
            let configure = Configure { v4_alone, ..Configure::default() };
            pod_side(&configure, leased, &[]).no_link_local
        };
        assert!(without(true, std::slice::from_ref(&v4)));
        assert!(!without(false, std::slice::from_ref(&v4)));
        assert!(!without(true, std::slice::from_ref(&v6)) && !without(true, &[v4, v6]));
        assert!(!without(true, &[]), "who has no address may give himself any");
    }

    #[test]
    fn a_routed_veth_reaches_everything_through_the_node() {
        let leased = [leased("10.9.0.7/24", Some("10.9.0.1"))];
        let configure = Configure { style: Style::Routed, ..Configure::default() };
        let expected = Addressing {
            addresses: vec![net("10.9.0.7/32")],
            routes: vec![Route { on_link: true, ..Route::via(net("10.9.0.0/24"), GATEWAY_V4.into()) }],
            ..Addressing::default()
        };
        assert_eq!(pod_side(&configure, &leased, &[]), expected);
        let node = Addressing {
            addresses: vec![net("169.254.1.1/32")],
            routes: vec![Route::on_link(net("10.9.0.7/32"))],
            ..Addressing::default()
        };
        assert_eq!(host_side(Style::Routed, &leased), node);
    }

    /// Rows: PTP-one-subnet.
    #[test]
    fn on_a_point_to_point_link_the_subnet_is_behind_its_gateway() {
        let configure = Configure { style: Style::PointToPoint, ..Configure::default() };
        let routes: Vec<cni::Route> = serde_json::from_value(serde_json::json!([
            {"dst": "0.0.0.0/0"}, {"dst": "10.8.0.0/16", "gw": "10.9.0.77"}, {"dst": "::/0"},
        ]))
        .unwrap();
        // Two addresses of one subnet: the reference fails, as it makes the routes twice.
        let both = [
            leased("10.9.0.7/24", Some("10.9.0.1")),
            leased("10.9.0.8/24", Some("10.9.0.1")),
            leased("fd00::7/64", Some("fd00::1")),
        ];
        let from = |source: &str, route: Route| Route { source: Some(source.parse().unwrap()), ..route };
        let via = |text: &str, gateway: &str| Route {
            on_link: true,
            ..Route::via(net(text), gateway.parse().unwrap())
        };
        let expected = Addressing {
            addresses: vec![net("10.9.0.7/24"), net("10.9.0.8/24"), net("fd00::7/64")],
            routes: vec![
                from("10.9.0.7", Route::on_link(net("10.9.0.1/32"))),
                from("10.9.0.7", via("10.9.0.0/24", "10.9.0.1")),
                from("fd00::7", Route::on_link(net("fd00::1/128"))),
                from("fd00::7", via("fd00::/64", "fd00::1")),
                via("0.0.0.0/0", "10.9.0.1"),
                via("10.8.0.0/16", "10.9.0.77"),
                via("::/0", "fd00::1"),
            ],
            no_subnet_routes: true,
            announce_v4: true,
            ..Addressing::default()
        };
        assert_eq!(pod_side(&configure, &both, &routes), expected);
        let node = Addressing {
            addresses: vec![net("10.9.0.1/32"), net("fd00::1/128")],
            routes: ["10.9.0.7/32", "10.9.0.8/32", "fd00::7/128"].map(|it| Route::on_link(net(it))).into(),
            ..Addressing::default()
        };
        assert_eq!(host_side(Style::PointToPoint, &both), node);
    }

    /// Rows: PTP-no-gateway.
    #[test]
    fn a_point_to_point_link_without_a_leased_gateway_has_that_of_every_routed_link() {
        let configure = Configure { style: Style::PointToPoint, ..Configure::default() };
        let leased = [leased("10.9.0.7/24", None), leased("fd00::7/128", None)];
        let subnet = Route {
            source: Some("10.9.0.7".parse().unwrap()),
            on_link: true,
            ..Route::via(net("10.9.0.0/24"), GATEWAY_V4.into())
        };
        assert_eq!(pod_side(&configure, &leased, &[]).routes, std::slice::from_ref(&subnet));
        // As CHECK knows it, from the result.
        let told = leased.clone().map(|it| LeasedAddress { gateway: Some(only_gateway(&it)), ..it });
        assert_eq!(pod_side(&configure, &told, &[]).routes, [subnet]);
        let node = host_side(Style::PointToPoint, &leased).addresses;
        assert_eq!(node, [net("169.254.1.1/32"), net("fe80::1/64")]);
    }

    #[test]
    fn routes_without_a_next_hop_get_the_first_gateway_of_their_family() {
        let leased = [
            leased("fd00::7/64", Some("10.0.0.1")),
            leased("10.0.0.7/24", None),
            leased("10.0.0.8/24", Some("10.0.0.1")),
            leased("10.2.0.7/24", Some("10.2.0.1")),
        ];
        let routes: Vec<cni::Route> = serde_json::from_value(serde_json::json!([
            {"dst": "10.3.0.0/16", "mtu": 1400, "advmss": 1360, "priority": 7, "table": 100, "scope": 0},
            {"dst": "fd01::/64"},
            {"dst": "10.4.0.0/16", "gw": "10.2.0.9"},
        ]))
        .unwrap();
        let configure = Configure::default();
        let expected = [
            Route {
                mtu: Some(1400),
                advmss: Some(1360),
                priority: Some(7),
                table: Some(100),
                scope: Some(0),
                ..Route::via(net("10.3.0.0/16"), "10.0.0.1".parse().unwrap())
            },
            Route::on_link(net("fd01::/64")),
            Route::via(net("10.4.0.0/16"), "10.2.0.9".parse().unwrap()),
        ];
        assert_eq!(pod_side(&configure, &leased, &routes).routes, expected);
    }

    /// As option 121 of DHCP has it beside a default route: as we write it, as the reference's `dhcp` does, and as
    /// other plugins may.
    ///
    /// Rows: DHCP-daemonSocketPath.
    #[test]
    fn routes_on_the_link_get_no_gateway() {
        let leased = [leased("10.1.0.7/24", Some("10.1.0.1"))];
        let routes: Vec<cni::Route> = serde_json::from_value(serde_json::json!([
            {"dst": "10.3.128.0/17", "scope": 253},
            {"dst": "10.4.0.0/16", "gw": "0.0.0.0", "scope": 253},
            {"dst": "fd01::/64", "gw": "::"},
            {"dst": "0.0.0.0/0"},
        ]))
        .unwrap();
        let on = |scope: Option<u8>, to: &str| Route { scope, ..Route::on_link(net(to)) };
        let near = [on(Some(253), "10.3.128.0/17"), on(Some(253), "10.4.0.0/16"), on(None, "fd01::/64")];
        let default = Route::via(net("0.0.0.0/0"), "10.1.0.1".parse().unwrap());
        let of = |style| pod_side(&Configure { style, ..Configure::default() }, &leased, &routes).routes;
        assert_eq!(of(Style::Subnet), [&near[..], std::slice::from_ref(&default)].concat());
        let through = Route { on_link: true, ..default };
        assert_eq!(of(Style::PointToPoint)[2..], [&near[..], &[through]].concat());
    }

    #[test]
    fn everything_behind_a_routed_veth_has_one_next_hop_for_each_family() {
        let leased = [leased("10.9.0.7/32", None), leased("fd00::7/64", Some("fd00::1"))];
        let routes: [cni::Route; 1] =
            [serde_json::from_value(serde_json::json!({"dst": "10.5.0.0/16", "gw": "10.9.0.1"})).unwrap()];
        let configure = Configure { style: Style::Routed, default_route: true, ..Configure::default() };
        let through = |text: &str, gateway: IpAddr| Route { on_link: true, ..Route::via(net(text), gateway) };
        let expected = Addressing {
            addresses: vec![net("10.9.0.7/32"), net("fd00::7/128")],
            routes: vec![
                through("0.0.0.0/0", GATEWAY_V4.into()),
                through("fd00::/64", GATEWAY_V6.into()),
                through("::/0", GATEWAY_V6.into()),
                through("10.5.0.0/16", GATEWAY_V4.into()),
            ],
            ..Addressing::default()
        };
        assert_eq!(pod_side(&configure, &leased, &routes), expected);
    }

    /// Rows: SRV-carrier.
    #[test]
    fn a_card_is_waited_for_unless_its_vf_is_kept_down() {
        let addressing = |addresses: &[&str]| Addressing {
            addresses: addresses.iter().map(|text| net(text)).collect(),
            ..Addressing::default()
        };
        let (some, none) = (addressing(&["10.9.0.7/24"]), addressing(&[]));
        let of = |link_state| VfSettings { link_state, ..VfSettings::default() };
        let (enable, disable) = (Some(VfLinkState::Enable), Some(VfLinkState::Disable));
        // Asked for, shown by the card before, addresses.
        let table = [
            (None, None, &some, true),
            (None, None, &none, false),
            (Some(VfLinkState::Auto), disable, &some, true),
            (enable, disable, &some, true),
            (disable, enable, &some, false),
            (disable, None, &some, false),
            (None, enable, &some, true),
            (None, disable, &some, false),
        ];
        for (asked, before, addressing, expected) in table {
            let claim = Claim {
                device: "0000:03:02.1".to_owned(),
                generation: 1,
                home: None,
                settings: Some(of(before)),
                physical: None,
                representor: None,
                is_back: false,
            };
            let outputs: Outputs = [(StepRef(0, 0), Output::Claimed(Box::new(claim)))].into_iter().collect();
            let set = Step::SetDevice(SetDevice { function: of(asked), ..SetDevice::default() });
            let steps = [Step::ClaimDevice(fixtures::device()), set];
            let found = awaits_carrier(&steps, outputs.of(0), addressing);
            assert_eq!(found, expected, "{asked:?} {before:?} {addressing:?}");
            // Without a card there is nothing to wait for in the pod.
            assert!(!awaits_carrier(&steps[1..], outputs.of(0), addressing));
        }
    }

    /// The one place that decides it: what is not told within the ADD is told after it, and nothing is told twice.
    #[test]
    fn neighbours_are_told_after_the_answer_but_by_cards_and_of_two_addresses_of_a_subnet() {
        let device = fixtures::device();
        let [card, plugin] = [MadeBy::Device(&device), MadeBy::Plugin];
        let (never, at_once, late) = (Announcement::Never, Announcement::AtOnce, Announcement::Late);
        let link = Link::Ipvlan(Ipvlan {
            pod_name: "net1".to_owned(),
            parent: None,
            mode: IpvlanMode::L2,
            mtu: None,
            group: 0,
            in_pod: false,
        });
        let ipvlan = MadeBy::Link(&link);
        // Addresses: on a card, on an ipvlan, on another link, and on one without an announcement after the answer.
        let table: [(&[&str], bool, [Announcement; 4]); 6] = [
            (&["10.9.0.7/24"], true, [at_once, late, late, at_once]),
            (&["10.9.0.7/24"], false, [never, never, never, never]),
            (&["10.9.0.7/24", "10.9.1.7/24"], true, [at_once, late, late, at_once]),
            (&["10.9.0.7/24", "10.9.0.8/24"], true, [at_once, late, at_once, at_once]),
            (&["10.9.0.7/24", "10.8.0.1/8"], true, [at_once, late, at_once, at_once]),
            // Those of IPv6 are told within the ADD in any case, but on ipvlans.
            (&["10.9.0.7/24", "fd00::7/64", "fd00::8/64"], true, [at_once, late, late, at_once]),
        ];
        for (addresses, announce_v4, expected) in table {
            let addresses = addresses.iter().map(|text| net(text)).collect();
            let addressing = Addressing { addresses, announce_v4, ..Addressing::default() };
            let found = [(card, true), (ipvlan, true), (plugin, true), (plugin, false)]
                .map(|(made_by, may_wait)| announcement(made_by, &addressing, may_wait));
            assert_eq!(found, expected, "{addressing:?}");
        }
    }

    #[test]
    fn addresses_are_advertised_on_ipvlans_that_have_neighbours() {
        let ipvlan = |mode| {
            let pod_name = "net1".to_owned();
            Link::Ipvlan(Ipvlan { pod_name, parent: None, mode, mtu: None, group: 0, in_pod: false })
        };
        let links = [IpvlanMode::L2, IpvlanMode::L3, IpvlanMode::L3s].map(ipvlan);
        let found = links.each_ref().map(|link| advertised(MadeBy::Link(link)));
        assert_eq!(found, [true, false, false]);
        assert!(!advertised(MadeBy::Device(&fixtures::device())) && !advertised(MadeBy::Plugin));
    }

    /// Rows: SRV-announce.
    #[test]
    fn a_card_is_not_asked_for_an_address_to_tell_neighbours_where_requests_do() {
        let device = fixtures::device();
        let ipvlan = Link::Ipvlan(Ipvlan {
            pod_name: "net1".to_owned(),
            parent: None,
            mode: IpvlanMode::L2,
            mtu: None,
            group: 0,
            in_pod: false,
        });
        let makers = [MadeBy::Device(&device), MadeBy::Link(&ipvlan), MadeBy::Plugin];
        let table: [(&[&str], [bool; 3]); 4] = [
            (&["10.9.0.7/24"], [true, true, false]),
            (&["10.9.0.7/24", "10.9.1.7/24"], [true, true, false]),
            (&["10.9.0.7/24", "10.9.0.8/24"], [false, true, false]),
            (&["10.9.0.7/24", "fd00::7/64"], [false, true, false]),
        ];
        for (addresses, expected) in table {
            let addresses = addresses.iter().map(|text| net(text)).collect();
            let addressing = Addressing { addresses, ..Addressing::default() };
            assert_eq!(
                makers.map(|made_by| announced_by_requests(made_by, &addressing)),
                expected,
                "{addressing:?}"
            );
        }
    }

    /// Rows: BRG-keepAddresses.
    #[test]
    fn a_bridge_gets_what_it_lacks_and_loses_only_what_is_in_the_way() {
        let nets = |texts: &[&str]| texts.iter().map(|text| net(text)).collect::<Vec<_>>();
        // Addresses on the bridge, wanted addresses, conflict (`None`: there is none), addresses to add.
        type Row<'a> = (&'a [&'a str], &'a [&'a str], Option<(&'a str, &'a str)>, &'a [&'a str]);
        let table: [Row<'_>; 7] = [
            (&[], &["10.1.0.1/24"], None, &["10.1.0.1/24"]),
            (&["10.1.0.1/24"], &["10.1.0.1/24"], None, &[]),
            (&["10.1.0.1/24"], &["10.1.0.1/16"], Some(("10.1.0.1/24", "10.1.0.1/16")), &["10.1.0.1/16"]),
            (&["10.2.0.1/24"], &["10.1.0.1/24"], Some(("10.2.0.1/24", "10.1.0.1/24")), &["10.1.0.1/24"]),
            (&["10.1.0.1/24"], &["10.1.0.1/24", "10.2.0.1/24"], None, &["10.2.0.1/24"]),
            (&["fe80::5/64", "fd01::1/64", "10.2.0.1/24"], &["fd00::1/64"], None, &["fd00::1/64"]),
            (&["fd00::5/48"], &["fd00::1/64"], Some(("fd00::5/48", "fd00::1/64")), &["fd00::1/64"]),
        ];
        for (present, wanted, conflict, add) in table {
            let (present, wanted, add) = (nets(present), nets(wanted), nets(add));
            let conflict = conflict
                .map(|(present, wanted)| GatewayConflict { present: net(present), wanted: net(wanted) });
            let remove = conflict.iter().map(|conflict| conflict.present).collect();
            assert_eq!(
                gateway_changes(&present, &wanted, Others::Removed),
                Ok(GatewayChanges { remove, add: add.clone() })
            );
            let refused = gateway_changes(&present, &wanted, Others::Refused);
            let only_added = |add| Ok(GatewayChanges { remove: vec![], add });
            assert_eq!(refused, conflict.map_or(only_added(add.clone()), Err), "{present:?} {wanted:?}");
            // A subnet beside another is none of its business.
            let beside = conflict.filter(|conflict| conflict.present != net("10.2.0.1/24"));
            let kept = gateway_changes(&present, &wanted, Others::Kept);
            assert_eq!(kept, beside.map_or(only_added(add), Err), "{present:?} {wanted:?}");
        }
    }
}
