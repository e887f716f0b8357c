//! Decides by which devices of the node packets reach and leave attachments. Pure.
//!
//! A port of a bridge that belongs to no attachment is an uplink of that bridge; the device of a default
//! route is an uplink of the node's routing. A bridge with attachments is a gateway: the node may route from
//! and to it. Uplinks exist only while attachments take the fast path, or while uplinks should run the XDP
//! program.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use netattach_common::attachment::link_local;
use netattach_common::uplink::SHOWN_EVERY;

use super::decide::{Member, Mode, NO_DISCIPLINE, Node, first};
use super::reason::Reason;
use super::xdp::Xdp;
use crate::bpf::{self, Local, Place, Segment, XdpDrops, XdpMode};
use crate::mac::Mac;
use crate::netlink::ForwardingState;
use crate::spec::OWN_GROUPS;

/// Shortest accepted ageing time, in hundredths of a second: a bridge forgets a station that it does not see
/// for this long. The fast path shows each station to its bridge more often.
const SHORTEST_AGEING: u32 = 3 * SHOWN_EVERY * 100;

/// A device of the node as an uplink of the fast path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Uplink {
    /// Name of the device.
    pub name: String,
    /// Segment to which it leads: a bridge, or the node's routing.
    pub segment: Segment,
    /// Whether packets take the fast path by it; if not, why.
    pub status: Result<(), Reason>,
    /// The mode in which it should run the XDP program, if any.
    pub xdp: Option<XdpMode>,
}

/// The decisions about the node's devices.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Uplinks {
    /// The uplinks, by index.
    pub uplinks: BTreeMap<u32, Uplink>,
    /// The entries of uplinks and gateways for the packet programs.
    pub entries: BTreeMap<u32, bpf::Uplink>,
    /// Addresses that uplinks lead to.
    pub locals: BTreeMap<Local, u32>,
}

impl Uplinks {
    /// The devices that run the uplinks' program.
    pub fn running(&self) -> BTreeSet<u32> {
        let running = self.uplinks.iter().filter(|(_, uplink)| uplink.status.is_ok());
        running.map(|(index, _)| *index).collect()
    }

    /// The devices that should run the XDP program.
    pub fn xdp(&self) -> BTreeMap<u32, XdpMode> {
        self.uplinks.iter().filter_map(|(index, uplink)| Some((*index, uplink.xdp?))).collect()
    }
}

/// Decides about all devices; `places`: the decisions about attachments.
pub fn decide(
    mode: Mode,
    xdp: Xdp,
    members: &BTreeMap<u32, Member>,
    places: &BTreeMap<u32, Result<Place, Reason>>,
    node: &Node,
) -> Uplinks {
    let on: BTreeMap<u32, Segment> =
        places.iter().filter_map(|(id, place)| Some((*id, place.as_ref().ok()?.segment))).collect();
    let connected = if xdp == Xdp::Off { on.clone() } else { segments(members, node) };
    let view = View { mode, xdp, members, on, connected, node };
    let mut uplinks = view.ports();
    for (index, router) in view.routers() {
        // A bridge port with a default route of its own counts as the bridge's uplink: packets that it
        // receives never reach that route.
        uplinks.entry(index).or_insert(router);
    }
    let gateways = view.gateways(&uplinks);
    let entries = view.entries(&uplinks, &gateways);
    let mut locals = view.routed_locals(&uplinks, &gateways);
    locals.extend(view.xdp_locals(&uplinks));
    Uplinks { uplinks, entries, locals }
}

/// The facts on which decisions are based.
struct View<'a> {
    mode: Mode,
    xdp: Xdp,
    members: &'a BTreeMap<u32, Member>,
    /// The attachments that take the fast path.
    on: BTreeMap<u32, Segment>,
    /// The attachments that may have uplinks, with the segment that they are connected to.
    connected: BTreeMap<u32, Segment>,
    node: &'a Node,
}

impl View<'_> {
    /// The ports of attachments' bridges that belong to no attachment.
    fn ports(&self) -> BTreeMap<u32, Uplink> {
        let (fast, switched) = (bridges(&self.on), bridges(&self.connected));
        // A pod's device must never be taken for an uplink, since its packets would then bypass the pod's
        // policies. The link group marks such a device as long as it exists; devices that other plugins made
        // have no group.
        let own: BTreeSet<u32> = self.members.values().map(|member| member.device).collect();
        let is_own = |link: &ForwardingState| own.contains(&link.index) || link.group & OWN_GROUPS != 0;
        let uplink = |link: &ForwardingState| {
            let bridge = link.controller.filter(|bridge| switched.contains(bridge))?;
            let status = match fast.contains(&bridge) {
                true => port(self.mode, bridge, link, self.node),
                false => Err(Reason::Idle),
            };
            let (name, segment) = (link.name.clone(), Segment::Bridge(bridge));
            Some(Uplink { name, segment, status, xdp: self.xdp.mode(link) })
        };
        let links = self.node.links.iter().filter(|(_, link)| !is_own(link));
        links.filter_map(|(index, link)| Some((*index, uplink(link)?))).collect()
    }

    /// The devices of default routes.
    fn routers(&self) -> BTreeMap<u32, Uplink> {
        if self.connected.is_empty() {
            return BTreeMap::new();
        }
        let links = self.node.default_routes.iter().filter_map(|index| self.node.links.get(index));
        let uplink = |link: &ForwardingState| Uplink {
            name: link.name.clone(),
            segment: Segment::Routed,
            status: if self.on.is_empty() { Err(Reason::Idle) } else { router(self.mode, link, self.node) },
            xdp: self.xdp.mode(link).filter(|_| link.mac.is_some()),
        };
        links.map(|link| (link.index, uplink(link))).collect()
    }

    /// The bridges from and to which the node routes by the fast path.
    fn gateways(&self, uplinks: &BTreeMap<u32, Uplink>) -> BTreeSet<u32> {
        let routes = routes(uplinks);
        let is_one = |bridge: &u32| routes && is_gateway(self.mode, *bridge, self.node);
        bridges(&self.on).into_iter().filter(is_one).collect()
    }

    /// The entries of uplinks and gateways for the packet programs.
    fn entries(
        &self,
        uplinks: &BTreeMap<u32, Uplink>,
        gateways: &BTreeSet<u32>,
    ) -> BTreeMap<u32, bpf::Uplink> {
        let entry = |index: &u32| {
            let gateway = gateways.contains(index);
            let uplink = uplinks.get(index).filter(|uplink| uplink.status.is_ok() || uplink.xdp.is_some());
            let link = self.node.links.get(index).filter(|_| gateway || uplink.is_some())?;
            let entry = bpf::Uplink {
                leads_to: uplink.map(|uplink| uplink.segment),
                fast: uplink.is_some_and(|uplink| uplink.status.is_ok()),
                xdp: uplink.and_then(Uplink::dropped),
                gateway,
                mtu: link.mtu,
                mac: link.mac.unwrap_or(Mac([0; 6])),
            };
            Some((*index, entry))
        };
        uplinks.keys().chain(gateways).filter_map(entry).collect()
    }

    /// The addresses that the node routes to by the fast path.
    fn routed_locals(
        &self,
        uplinks: &BTreeMap<u32, Uplink>,
        gateways: &BTreeSet<u32>,
    ) -> BTreeMap<Local, u32> {
        let routes = routes(uplinks);
        let is_routed = |id: &u32| match self.on.get(id) {
            Some(Segment::Routed) => routes,
            Some(Segment::Bridge(bridge)) => gateways.contains(bridge),
            None => false,
        };
        let mut locals = BTreeMap::new();
        for (id, member) in self.members.iter().filter(|(id, _)| is_routed(id)) {
            let known = member.addresses.iter().filter(|address| member.routed || !member.is_chosen(address));
            locals.extend(known.map(|address| ((Segment::Routed, *address), *id)));
        }
        locals
    }

    /// The addresses behind uplinks that run the XDP program, which drops packets that come in by an uplink
    /// with such a source address. An address that a pod on a bridge has chosen outside of the subnets of the
    /// network's author is left out: it may belong to a host there, whose frames all pods should get.
    fn xdp_locals(&self, uplinks: &BTreeMap<u32, Uplink>) -> BTreeMap<Local, u32> {
        let by_xdp: BTreeSet<Segment> =
            uplinks.values().filter(|uplink| uplink.xdp.is_some()).map(|uplink| uplink.segment).collect();
        let mut locals = BTreeMap::new();
        for (id, segment) in self.connected.iter().filter(|(_, segment)| by_xdp.contains(segment)) {
            let Some(member) = self.members.get(id) else { continue };
            let known = member.addresses.iter().filter(|address| member.routed || !member.is_chosen(address));
            locals.extend(known.map(|address| ((*segment, *address), *id)));
            // An Ethernet address is represented by the link-local address that is derived from it, which
            // belongs to the pod too.
            let by_mac = link_local(netattach_common::Mac { octets: member.mac.0 });
            locals.insert((*segment, IpAddr::V6(by_mac.into())), *id);
        }
        locals
    }
}

fn bridges(segments: &BTreeMap<u32, Segment>) -> BTreeSet<u32> {
    segments.values().filter_map(|segment| segment.bridge()).collect()
}

/// Whether the node routes by an uplink on the fast path.
fn routes(uplinks: &BTreeMap<u32, Uplink>) -> bool {
    uplinks.values().any(|uplink| uplink.segment == Segment::Routed && uplink.status.is_ok())
}

/// The segments of attachments, whether or not they take the fast path.
fn segments(members: &BTreeMap<u32, Member>, node: &Node) -> BTreeMap<u32, Segment> {
    let segment = |member: &Member| {
        let link = node.links.get(&member.device)?;
        let bridge =
            link.controller.filter(|index| node.links.get(index).is_some_and(|it| it.bridge.is_some()));
        if member.routed { Some(Segment::Routed) } else { bridge.map(Segment::Bridge) }
    };
    members.iter().filter_map(|(id, member)| Some((*id, segment(member)?))).collect()
}

impl Uplink {
    /// The packets that the XDP program drops. Whether a policy denies a frame is certain only if nothing on
    /// the way to the pod would change the frame.
    fn dropped(&self) -> Option<XdpDrops> {
        self.xdp?;
        let certain = self.status.is_ok() && self.segment != Segment::Routed;
        Some(if certain { XdpDrops::SpoofedAndDenied } else { XdpDrops::Spoofed })
    }
}

/// Decides about a port of a bridge. The bridge itself is a plain switch, as its attachments take the fast path.
fn port(mode: Mode, bridge: u32, link: &ForwardingState, node: &Node) -> Result<(), Reason> {
    let port = link.port.unwrap_or_default();
    let ageing = node.links.get(&bridge).and_then(|link| link.bridge).map_or(0, |bridge| bridge.ageing);
    let always = [
        (link.mac.is_none(), Reason::NotEthernet),
        (!port.forwarding, Reason::PortState),
        (port.isolated || port.locked, Reason::PortRestricted),
        (ageing < SHORTEST_AGEING, Reason::Ageing),
    ];
    first(mode, received(link, node), always)
}

/// Decides about the device of a default route.
fn router(mode: Mode, link: &ForwardingState, node: &Node) -> Result<(), Reason> {
    let always = [
        (link.mac.is_none(), Reason::NotEthernet),
        (link.controller.is_some(), Reason::Enslaved),
        (node.ipsec, Reason::Ipsec),
        (node.filters.nat, Reason::Nat),
    ];
    let [rules, programs] = received(link, node);
    first(mode, [(node.filters.ip, Reason::IpRules), rules, programs], always)
}

/// Rules and other programs that would see the packets that a device receives after netattach's program. They
/// see packets that the device sends in any case, and XDP programs see all received packets.
fn received(link: &ForwardingState, node: &Node) -> [(bool, Reason); 2] {
    let programs = node.others.get(&link.index).is_some_and(|others| others.ingress);
    [(node.filters.are_on(link), Reason::DeviceRules), (programs, Reason::Programs)]
}

/// Whether packets that the node routes from or to a bridge are subject to nothing but routing.
fn is_gateway(mode: Mode, bridge: u32, node: &Node) -> bool {
    let Some(link) = node.links.get(&bridge) else { return false };
    let always =
        [(link.controller.is_some(), Reason::Enslaved), (link.discipline != NO_DISCIPLINE, Reason::NoBridge)];
    let in_auto =
        [(node.filters.are_on(link), Reason::DeviceRules), (node.are_others_on(link), Reason::Programs)];
    first(mode, in_auto, always).is_ok()
}

#[cfg(test)]
#[path = "uplink_tests.rs"]
mod tests;
