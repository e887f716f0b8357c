//! The routing of a pod as a whole, decided after all its attachments are made: which attachment has the default
//! routes, and which interface traffic uses if several lead to its destination. Pure.

use std::net::IpAddr;

use ipnet::IpNet;

use super::addressing::{any_of, link_gateway, only_gateway, pod_side};
use super::{AttachmentPlan, Plan, result, vrf};
use crate::cni::{self, CniError};
use crate::spec::{Addressing, BySource, Route};
use crate::step::{
    Brought, Configure, Kept, LeasedAddress, MadeBy, Output, Outputs, SourceRouting, Step, StepRef, Style,
};

/// `RT_TABLE_MAIN`.
pub const MAIN_TABLE: u32 = 254;

/// The table of an interface is this number plus the interface's index: far from the numbers that administrators
/// choose.
const FIRST_TABLE: u32 = 0x6e61_0000;

/// Priority of the source-based rules: before the main table's 32766.
pub const RULE_PRIORITY: u32 = 10_000;

/// Metric that the kernel gives to an IPv6 route without one.
const DEFAULT_METRIC_V6: u32 = 1024;

/// A gateway that is not reachable through the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{gateway} is not a gateway of this routed link, whose only one is {only}")]
pub struct NotOnLink {
    /// The requested gateway.
    pub gateway: IpAddr,
    /// The only gateway of the link.
    pub only: IpAddr,
}

/// Returns the table of the interface with this index.
pub fn table_of(index: u32) -> u32 {
    FIRST_TABLE.saturating_add(index)
}

/// Returns the index of the interface that a table belongs to, if the table is one of netattach's.
pub fn interface_of(table: u32) -> Option<u32> {
    table.checked_sub(FIRST_TABLE).filter(|index| *index > 0)
}

/// Returns the metric of a route in the kernel's representation.
pub fn metric(route: &Route) -> u32 {
    let default = if route.destination.addr().is_ipv6() { DEFAULT_METRIC_V6 } else { 0 };
    route.priority.unwrap_or(default)
}

/// Returns netattach's configuration of the interface; `None`: another plugin configures it.
pub fn own_configuration(attachment: &AttachmentPlan) -> Option<&Configure> {
    attachment.steps.iter().find_map(|step| match step {
        Step::Configure(configure) => Some(configure),
        _ => None,
    })
}

/// Returns the style in which netattach configures the interface.
pub fn style(attachment: &AttachmentPlan) -> Style {
    own_configuration(attachment).map_or(Style::Subnet, |configure| configure.style)
}

/// Returns the default routes through these gateways, for an interface that netattach has configured itself (`own`:
/// the configuration and the addresses) or that another plugin has configured. The first route of each family has the
/// usual metric, each further one a metric higher by one.
///
/// # Errors
/// The link is routed and does not have that gateway. For other links the kernel decides whether a gateway is
/// reachable.
pub fn default_routes(
    gateways: &[IpAddr],
    own: Option<(&Configure, &[LeasedAddress])>,
) -> Result<Vec<Route>, NotOnLink> {
    let mut routes: Vec<Route> = Vec::with_capacity(gateways.len());
    for &gateway in gateways {
        let mut route = Route::via(any_of(gateway), gateway);
        if let Some((Configure { style: Style::Routed, .. }, leased)) = own {
            // On a routed link the node replaces the gateway of the subnet.
            let only = link_gateway(gateway);
            if gateway != only && !leased.iter().any(|leased| leased.gateway == Some(gateway)) {
                return Err(NotOnLink { gateway, only });
            }
            route = Route { gateway: Some(only), on_link: true, ..route };
        }
        if let Some((Configure { style: Style::PointToPoint, .. }, leased)) = own {
            let gateways = leased.iter().map(only_gateway);
            let mut gateways = gateways.filter(|own| own.is_ipv4() == gateway.is_ipv4()).peekable();
            let only = gateways.peek().copied().unwrap_or_else(|| link_gateway(gateway));
            if !gateways.any(|own| own == gateway) {
                return Err(NotOnLink { gateway, only });
            }
            route = Route { on_link: true, ..route };
        }
        let before = routes.iter().filter(|other| other.destination == route.destination);
        if before.clone().any(|other| other.gateway == route.gateway) {
            continue;
        }
        // The number of routes is bounded by the size of an annotation.
        let position = before.count() as u32;
        route.priority = (position > 0).then(|| metric(&route) + position);
        routes.push(route);
    }
    Ok(routes)
}

/// Returns the default routes that the step has moved; empty before it is done.
pub fn moved(at: Option<StepRef>, outputs: &Outputs) -> &[Route] {
    match at.and_then(|at| outputs.get(&at)) {
        Some(Output::DefaultRoutes { routes, .. }) => routes,
        _ => &[],
    }
}

/// Returns the routes that the step which moved the default routes has kept on the cluster's interface.
pub fn kept(at: Option<StepRef>, outputs: &Outputs) -> Option<&Kept> {
    match at.and_then(|at| outputs.get(&at)) {
        Some(Output::DefaultRoutes { kept, .. }) => kept.as_ref(),
        _ => None,
    }
}

/// Whether a route to that destination yielded to the default routes that were moved.
fn has_yielded(destination: IpNet, table: Option<u32>, moved: &[Route]) -> bool {
    destination.prefix_len() == 0
        && table.is_none_or(|table| table == MAIN_TABLE)
        && moved.iter().any(|route| route.destination.addr().is_ipv4() == destination.addr().is_ipv4())
}

/// Corrects the routes of an attachment's result after the pod's default routes were moved.
pub fn settle_result(attachment: &AttachmentPlan, outputs: Brought<'_>, routes: &mut Vec<cni::Route>) {
    let moved = moved(attachment.yields_to, outputs.all());
    routes.retain(|route| !has_yielded(route.dst, route.table, moved));
    if attachment.yields_to.is_some_and(|at| at.0 == outputs.attachment()) {
        routes.extend(moved.iter().map(|route| cni::Route {
            priority: route.priority,
            ..cni::Route::new(route.destination, route.gateway)
        }));
    }
    if let Some(kept) = kept(attachment.yields_to, outputs.all())
        && kept.answers.ifname == attachment.ifname
    {
        routes.extend(kept.routes.iter().map(|route| cni::Route::new(route.destination, route.gateway)));
    }
}

/// Returns the request of a chained `sbr` for the attachment's routes.
pub fn tables_asked_for(attachment: &AttachmentPlan) -> Option<&BySource> {
    attachment.steps.iter().find_map(|step| match step {
        Step::UseTables(asked) => Some(asked),
        _ => None,
    })
}

/// Returns addresses and routes of an interface that netattach configured, without the default routes that yielded.
///
/// # Errors
/// A plugin's result cannot be read.
pub fn settled(
    attachment: &AttachmentPlan,
    outputs: Brought<'_>,
    configure: &Configure,
) -> Result<Addressing, CniError> {
    let leased = result::leased(attachment, outputs)?;
    let mut addressing = pod_side(configure, &leased.addresses, &leased.routes);
    let moved = moved(attachment.yields_to, outputs.all());
    addressing.routes.retain(|route| !has_yielded(route.destination, route.table, moved));
    let in_main = |route: &Route| route.table.is_none_or(|table| table == MAIN_TABLE);
    if vrf::asked_for(attachment).is_some() {
        addressing.routes.retain(|route| !in_main(route));
    }
    if let Some(asked) = tables_asked_for(attachment) {
        addressing.routes.retain(|route| !in_main(route) || asked.stays(route));
    }
    Ok(addressing)
}

/// Returns the interfaces that share a destination with another interface. Without source-based rules, all traffic to
/// that destination would leave through one of them, even with the source address of the other, and would be dropped
/// as spoofed. The cluster's interface shares its kept destinations with all interfaces that have a route there.
/// Interfaces in a VRF share nothing with those outside. This covers only interfaces that netattach has configured
/// itself; for others, there are plugins that do this.
///
/// # Errors
/// A plugin's result cannot be read.
pub fn by_source(plan: &Plan, outputs: &Outputs) -> Result<Vec<SourceRouting>, CniError> {
    let (mut all, mut have_tables) = (Vec::new(), Vec::new());
    for (number, attachment) in plan.attachments.iter().enumerate() {
        // Attachment numbers fit: see `Plan::steps`.
        if vrf::asked_for(attachment).is_some() {
            continue;
        }
        let kept = kept_to_its_interface(attachment, outputs.of(number as u16))?;
        if tables_asked_for(attachment).is_some() {
            have_tables.extend(kept.iter().map(|one| one.index));
        }
        all.extend(kept);
    }
    let shared = |one: &SourceRouting| {
        let others = all.iter().filter(|other| other.index != one.index);
        others.flat_map(|other| &other.routes).any(|theirs| {
            one.routes.iter().any(|ours| ours.destination.trunc() == theirs.destination.trunc())
        })
    };
    let cluster = plan.attachments.first().and_then(|first| kept(first.yields_to, outputs));
    let beside_cluster = |one: &SourceRouting| {
        let others = cluster.iter().filter(|kept| kept.answers.index != one.index);
        others
            .flat_map(|kept| &kept.routes)
            .any(|nearer| one.routes.iter().any(|ours| ours.destination.contains(&nearer.destination)))
    };
    let needs =
        |one: &&SourceRouting| !have_tables.contains(&one.index) && (shared(one) || beside_cluster(one));
    Ok(all.iter().filter(needs).cloned().collect())
}

fn kept_to_its_interface(
    attachment: &AttachmentPlan,
    outputs: Brought<'_>,
) -> Result<Option<SourceRouting>, CniError> {
    let link = result::link(outputs);
    let (Some(configure), Some((_, pod))) = (own_configuration(attachment), link) else { return Ok(None) };
    if matches!(attachment.made_by(), MadeBy::Device(device) if device.userspace.is_some()) {
        // A process drives the device: the pod has no interface there.
        return Ok(None);
    }
    let addressing = settled(attachment, outputs, configure)?;
    let table = table_of(pod.index);
    let is_connected = |net: &&IpNet| !addressing.no_subnet_routes && net.prefix_len() < net.max_prefix_len();
    let connected = addressing.addresses.iter().filter(is_connected);
    let mut routes: Vec<Route> = connected.map(|net| Route::on_link(net.trunc())).collect();
    routes.extend(
        addressing.routes.into_iter().filter(|route| route.table.is_none_or(|table| table == MAIN_TABLE)),
    );
    if attachment.yields_to.is_some_and(|at| at.0 == outputs.attachment()) {
        routes.extend(moved(attachment.yields_to, outputs.all()).iter().map(|route| Route {
            // The kernel already resolved the gateway when the route was moved; this table need not contain the route to
            // it.
            on_link: route.gateway.is_some(),
            ..route.clone()
        }));
    }
    for route in &mut routes {
        route.table = Some(table);
    }
    Ok(Some(SourceRouting {
        ifname: pod.name,
        index: pod.index,
        table,
        sources: addressing.addresses.iter().map(IpNet::addr).collect(),
        routes,
    }))
}

#[cfg(test)]
mod tests {
    use serde_json::Map;

    use super::*;
    use crate::plan::fixtures;
    use crate::spec::{Link, Veth};
    use crate::step::{Delegate, Interface, Role};

    /// An interface that netattach makes and configures, and what its steps have left.
    fn interface(ifname: &str, (index, address): (u32, &str)) -> (AttachmentPlan, [Output; 3]) {
        let veth = Veth {
            host_name: format!("na{index}"),
            pod_name: ifname.to_owned(),
            mtu: None,
            mac: None,
            group: 1,
            port: None,
        };
        let ipam = Delegate { plugin: "other".to_owned(), config: Map::new(), role: Role::Ipam };
        let steps = vec![
            Step::CreateLink(Link::Veth(veth)),
            Step::Delegate(ipam),
            Step::Configure(Configure::default()),
        ];
        let attachment =
            AttachmentPlan { ifname: ifname.to_owned(), ..fixtures::attachment("bridge", steps) };
        let pod = Interface { name: ifname.to_owned(), index, mac: None, mtu: 1500 };
        let addresses = vec![LeasedAddress { address: address.parse().unwrap(), gateway: None }];
        let outputs = [
            Output::Link { host: None, pod, parent: None },
            Output::Lease { addresses, dns: cni::Dns::default(), routes: Vec::new(), server: None },
            Output::Nothing,
        ];
        (attachment, outputs)
    }

    #[test]
    fn what_came_by_an_interface_is_answered_there_though_a_range_of_the_cluster_is_nearer() {
        let via = |destination: &str, gateway: &str| {
            Route::via(destination.parse().unwrap(), gateway.parse().unwrap())
        };
        let mut attachments = Vec::new();
        let mut done = Vec::new();
        let all =
            [("eth0", (3, "10.244.1.5/24")), ("net1", (4, "10.9.0.7/24")), ("net2", (5, "10.8.0.7/24"))];
        for (number, (ifname, of)) in (0..).zip(all) {
            let (mut attachment, outputs) = interface(ifname, of);
            // The default routes are those of `net1`.
            attachment.yields_to = Some(StepRef(1, 3));
            attachments.push(attachment);
            done.extend((0..).zip(outputs).map(|(step, output)| (StepRef(number, step), output)));
        }
        let plan = Plan { sandbox: fixtures::sandbox("c1"), attachments, dynamic: None };
        let moved = via("0.0.0.0/0", "10.9.0.1");
        let found = |range: Option<&str>| {
            let kept = range.map(|range| Kept {
                routes: vec![via(range, "10.244.1.1")],
                answers: SourceRouting {
                    ifname: "eth0".to_owned(),
                    index: 3,
                    table: table_of(3),
                    sources: Vec::new(),
                    routes: Vec::new(),
                },
            });
            let default = Output::DefaultRoutes { routes: vec![moved.clone()], kept };
            let outputs: Outputs = done.iter().cloned().chain([(StepRef(1, 3), default)]).collect();
            by_source(&plan, &outputs).unwrap()
        };
        let table = |index, source: &str, routes: &[Route]| SourceRouting {
            ifname: format!("net{}", index - 3),
            index,
            table: table_of(index),
            sources: vec![source.parse().unwrap()],
            routes: routes.iter().map(|it| Route { table: Some(table_of(index)), ..it.clone() }).collect(),
        };
        let connected = |net: &str| Route::on_link(net.parse().unwrap());
        let default = Route { on_link: true, ..moved.clone() };
        let net1 = table(4, "10.9.0.7", &[connected("10.9.0.0/24"), default]);
        let net2 = table(5, "10.8.0.7", &[connected("10.8.0.0/24")]);
        assert_eq!(found(None), []);
        assert_eq!(found(Some("10.9.0.2/32")), std::slice::from_ref(&net1));
        assert_eq!(found(Some("10.8.0.2/32")), [net1, net2]);
    }
}
