//! Messages for the floor of each kind of interface.

use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, BorrowedFd};

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::{AddressAttribute, AddressFlags};
use netlink_packet_route::link::{
    InfoData, InfoIpVlan, InfoKind, InfoMacVlan, InfoMacVtap, InfoVlan, IpVlanMode, LinkAttribute, LinkFlags,
    LinkInfo, LinkMessage, MacVlanMode, MacVtapMode,
};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteFlags, RouteScope};

use super::{address_of, named, one_queue, route_with, up};

/// The driver of a link that has no end on the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Driver {
    /// In bridge mode.
    Macvlan,
    /// In bridge mode.
    Macvtap,
    /// In mode `l2`.
    Ipvlan,
    /// With this tag.
    Vlan(u16),
    /// Without a parent.
    Dummy,
}

/// A link of a driver, created in `pod` with its final name, up. One queue.
pub(crate) fn made_in(
    driver: Driver,
    (name, index): (&str, u32),
    parent: Option<u32>,
    pod: BorrowedFd<'_>,
    group: u32,
) -> RouteNetlinkMessage {
    let (kind, data) = match driver {
        Driver::Macvlan => {
            (InfoKind::MacVlan, Some(InfoData::MacVlan(vec![InfoMacVlan::Mode(MacVlanMode::Bridge)])))
        }
        Driver::Macvtap => {
            (InfoKind::MacVtap, Some(InfoData::MacVtap(vec![InfoMacVtap::Mode(MacVtapMode::Bridge)])))
        }
        Driver::Ipvlan => (InfoKind::IpVlan, Some(InfoData::IpVlan(vec![InfoIpVlan::Mode(IpVlanMode::L2)]))),
        Driver::Vlan(tag) => (InfoKind::Vlan, Some(InfoData::Vlan(vec![InfoVlan::Id(tag)]))),
        Driver::Dummy => (InfoKind::Dummy, None),
    };
    let mut info = vec![LinkInfo::Kind(kind)];
    info.extend(data.map(LinkInfo::Data));
    let mut link = named(name, index);
    up(&mut link);
    one_queue(&mut link);
    link.attributes.extend(parent.map(LinkAttribute::Link));
    link.attributes.extend([
        LinkAttribute::NetNsFd(pod.as_raw_fd()),
        LinkAttribute::Group(group),
        LinkAttribute::LinkInfo(info),
    ]);
    RouteNetlinkMessage::NewLink(link)
}

/// Moves a device that is there to a namespace, under another name.
pub(crate) fn moved(index: u32, name: &str, namespace: BorrowedFd<'_>) -> RouteNetlinkMessage {
    let mut link = named(name, index);
    link.attributes.push(LinkAttribute::NetNsFd(namespace.as_raw_fd()));
    RouteNetlinkMessage::SetLink(link)
}

/// Sets a link down.
pub(crate) fn set_down(index: u32) -> RouteNetlinkMessage {
    let mut link = LinkMessage::default();
    link.header.index = index;
    link.header.change_mask |= LinkFlags::Up;
    RouteNetlinkMessage::SetLink(link)
}

/// Deletes a link.
pub(crate) fn deleted(index: u32) -> RouteNetlinkMessage {
    let mut link = LinkMessage::default();
    link.header.index = index;
    RouteNetlinkMessage::DelLink(link)
}

/// Gives a link an IPv4 address to whose subnet the kernel adds no route.
pub(crate) fn address_alone(index: u32, address: Ipv4Addr, prefix: u8) -> RouteNetlinkMessage {
    let mut message = address_of(index, address, prefix);
    message.attributes.push(AddressAttribute::Flags(AddressFlags::Noprefixroute));
    RouteNetlinkMessage::NewAddress(message)
}

/// A route by a link, to a neighbour without a gateway; the gateway need not be in any subnet of the link.
pub(crate) fn route(
    index: u32,
    (destination, prefix): (Ipv4Addr, u8),
    gateway: Option<Ipv4Addr>,
) -> RouteNetlinkMessage {
    let mut route = route_with(vec![
        RouteAttribute::Destination(RouteAddress::Inet(destination)),
        RouteAttribute::Oif(index),
    ]);
    route.header.destination_prefix_length = prefix;
    match gateway {
        Some(gateway) => {
            route.header.flags |= RouteFlags::Onlink;
            route.attributes.push(RouteAttribute::Gateway(RouteAddress::Inet(gateway)));
        }
        None => route.header.scope = RouteScope::Link,
    }
    RouteNetlinkMessage::NewRoute(route)
}
