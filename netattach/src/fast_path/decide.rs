//! Which attachments take the fast path. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::reason::Reason;
use crate::bpf::{Place, Segment};
use crate::mac::Mac;
use crate::netlink::ForwardingState;

/// The qdisc of a virtual device that queues nothing.
pub(super) const NO_DISCIPLINE: &str = "noqueue";

/// When packets take the fast path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Where it makes no difference to other programs of the node.
    #[default]
    Auto,
    /// Also where the node's packet filters and spanning trees would see fewer packets.
    On,
    /// Never.
    Off,
}

impl Mode {
    /// The name in the settings.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::On => "on",
            Self::Off => "off",
        }
    }
}

/// An attachment as far as the fast path needs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Number of the attachment.
    pub id: u32,
    /// Ethernet address of the pod's end.
    pub mac: Mac,
    /// IP addresses of the attachment.
    pub addresses: Vec<IpAddr>,
    /// Those addresses that the pod has chosen outside of the subnets that the network's author has named.
    pub chosen: Vec<IpAddr>,
    /// Index of the node's end.
    pub device: u32,
    /// Whether the node routes the attachment's packets; otherwise a bridge switches them.
    pub routed: bool,
    /// Why the network's configuration keeps the attachment off the fast path.
    pub kept_off: Option<Reason>,
}

impl Member {
    /// Whether only the pod has named the address.
    pub fn is_chosen(&self, address: &IpAddr) -> bool {
        self.chosen.contains(address)
    }
}

/// The node's links, filters, programs and routes, as reported by the kernel.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Node {
    /// The node's ends of attachments, and their bridges, by index.
    pub links: BTreeMap<u32, ForwardingState>,
    /// Packet filters.
    pub filters: Filters,
    /// Devices with other programs' tc programs or filters.
    pub others: BTreeMap<u32, Others>,
    /// Devices of the default routes.
    pub default_routes: BTreeSet<u32>,
    /// The node has IPsec policies.
    pub ipsec: bool,
    /// The port behind which a bridge knows an attachment's address, by the bridge's index; absent: the
    /// bridge does not know the address.
    pub stations: BTreeMap<(u32, Mac), u32>,
    /// Addresses that a bridge has seen behind a port other than their attachment's within the last minutes.
    pub contested: BTreeSet<(u32, Mac)>,
}

/// Where other programs' tc programs or filters run on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Others {
    /// On ingress.
    pub ingress: bool,
    /// On egress.
    pub egress: bool,
}

/// Packet filters that frames between bridge ports may meet.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Filters {
    /// There are chains or tables for bridged frames.
    pub bridge: bool,
    /// There are chains or tables for IP packets.
    pub ip: bool,
    /// Some of them translate addresses and ports.
    pub nat: bool,
    /// All bridges pass frames to the filters for IP packets.
    pub bridges_call_ip: bool,
    /// Devices that have chains; a name that ends in `*` is a prefix.
    pub devices: BTreeSet<String>,
}

/// Decides about each attachment: returns its place on the fast path, or why it has none.
pub fn decide(
    mode: Mode,
    members: &BTreeMap<u32, Member>,
    node: &Node,
) -> BTreeMap<u32, Result<Place, Reason>> {
    let mut decided: BTreeMap<u32, Result<Place, Reason>> =
        members.iter().map(|(id, member)| (*id, place(mode, member, node))).collect();
    let mut owners: BTreeMap<(u32, Mac), u32> = BTreeMap::new();
    let mut own = |bridge: Option<u32>, mac: Option<Mac>| {
        if let (Some(bridge), Some(mac)) = (bridge, mac) {
            *owners.entry((bridge, mac)).or_default() += 1;
        }
    };
    for member in members.values() {
        own(node.links.get(&member.device).and_then(|link| link.controller), Some(member.mac));
    }
    // Frames to the address of a bridge or of one of its ports belong to the node.
    for link in node.links.values() {
        own(link.bridge.map(|_| link.index).or(link.controller), link.mac);
    }
    for (member, decision) in members.values().zip(decided.values_mut()) {
        let bridge = node.links.get(&member.device).and_then(|link| link.controller);
        let owners = bridge.and_then(|bridge| owners.get(&(bridge, member.mac)));
        let is_shared = !member.routed && owners.is_some_and(|owners| *owners > 1);
        // A bridge that takes over an attachment's address knows the address as local from then on:
        // `KnownElsewhere` is then only a consequence.
        if is_shared && matches!(decision, Ok(_) | Err(Reason::KnownElsewhere)) {
            *decision = Err(Reason::SameMac);
        }
    }
    decided
}

fn place(mode: Mode, member: &Member, node: &Node) -> Result<Place, Reason> {
    if mode == Mode::Off {
        return Err(Reason::Off);
    }
    if let Some(reason) = &member.kept_off {
        return Err(reason.clone());
    }
    let link = node.links.get(&member.device).ok_or(Reason::NoDevice)?;
    if member.routed {
        return routed(mode, member, link, node);
    }
    let index = link.controller.ok_or(Reason::NoBridge)?;
    let bridge = node.links.get(&index).and_then(|controller| controller.bridge).ok_or(Reason::NoBridge)?;
    let port = link.port.ok_or(Reason::NoBridge)?;
    let filters = &node.filters;
    // `on` cannot enable what the bridge itself would not do.
    let always = [
        (!port.forwarding, Reason::PortState),
        (port.isolated || port.locked, Reason::PortRestricted),
        (bridge.vlan_filtering, Reason::VlanFiltering),
        (filters.nat && (filters.bridges_call_ip || bridge.calls_iptables), Reason::Nat),
        (node.is_known_elsewhere(index, member), Reason::KnownElsewhere),
        (link.discipline != NO_DISCIPLINE, Reason::Shaped(link.discipline.clone())),
    ];
    let in_auto = [
        (bridge.spanning_tree, Reason::SpanningTree),
        (filters.bridge, Reason::BridgeRules),
        (filters.ip && (filters.bridges_call_ip || bridge.calls_iptables), Reason::Iptables),
        (filters.are_on(link), Reason::DeviceRules),
        (node.are_others_on(link), Reason::Programs),
    ];
    first(mode, in_auto, always)?;
    Ok(Place { segment: Segment::Bridge(index), mtu: link.mtu, mac: member.mac })
}

/// The programs query the node's routing for each packet; this function checks everything else.
fn routed(mode: Mode, member: &Member, link: &ForwardingState, node: &Node) -> Result<Place, Reason> {
    let filters = &node.filters;
    let always = [
        (node.ipsec, Reason::Ipsec),
        (filters.nat, Reason::Nat),
        (link.controller.is_some(), Reason::Enslaved),
        (link.discipline != NO_DISCIPLINE, Reason::Shaped(link.discipline.clone())),
    ];
    let in_auto = [
        (filters.ip, Reason::IpRules),
        (filters.are_on(link), Reason::DeviceRules),
        (node.are_others_on(link), Reason::Programs),
    ];
    first(mode, in_auto, always)?;
    Ok(Place { segment: Segment::Routed, mtu: link.mtu, mac: member.mac })
}

/// Returns the first reason that applies. Causes in the configuration come before their consequences.
pub(super) fn first<const A: usize, const B: usize>(
    mode: Mode,
    in_auto: [(bool, Reason); A],
    always: [(bool, Reason); B],
) -> Result<(), Reason> {
    let in_auto = in_auto.into_iter().filter(|_| mode == Mode::Auto);
    in_auto.chain(always).find(|(holds, _)| *holds).map_or(Ok(()), |(_, reason)| Err(reason))
}

impl Node {
    /// Whether the bridge forwards frames to an attachment's address to a port other than the attachment's.
    fn is_known_elsewhere(&self, bridge: u32, member: &Member) -> bool {
        let station = (bridge, member.mac);
        self.contested.contains(&station)
            || self.stations.get(&station).is_some_and(|port| *port != member.device)
    }

    /// Whether other programs run on what a device receives or sends.
    pub(super) fn are_others_on(&self, link: &ForwardingState) -> bool {
        link.xdp || self.others.get(&link.index).is_some_and(|others| others.ingress || others.egress)
    }
}

impl Filters {
    /// Whether the device has chains of its own.
    pub(super) fn are_on(&self, link: &ForwardingState) -> bool {
        self.devices.iter().any(|pattern| match pattern.strip_suffix('*') {
            Some(prefix) => link.name.starts_with(prefix),
            None => *pattern == link.name,
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::fast_path::decide::*;
    use crate::netlink::{BridgeState, PortState};

    const BRIDGE: u32 = 3;
    const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);

    fn link(index: u32, name: &str) -> ForwardingState {
        let discipline = NO_DISCIPLINE.into();
        ForwardingState {
            index,
            name: name.into(),
            mtu: 1500,
            mac: Some(Mac([2, 0, 0, 0, 1, index as u8])),
            kind: "veth".into(),
            group: 0,
            xdp: false,
            controller: None,
            discipline,
            bridge: None,
            port: None,
        }
    }

    fn port(index: u32, name: &str) -> ForwardingState {
        let port = PortState { forwarding: true, ..PortState::default() };
        ForwardingState { controller: Some(BRIDGE), port: Some(port), ..link(index, name) }
    }

    fn node() -> Node {
        let bridge = ForwardingState { bridge: Some(BridgeState::default()), ..link(BRIDGE, "br0") };
        let links = [bridge, port(10, "na10"), port(11, "na11")];
        let links = links.into_iter().map(|link| (link.index, link)).collect();
        Node { links, ..Node::default() }
    }

    fn member(id: u32, device: u32) -> Member {
        let (mac, addresses) = (Mac([2, 0, 0, 0, 0, id as u8]), Vec::new());
        Member { id, mac, addresses, chosen: Vec::new(), device, routed: false, kept_off: None }
    }

    fn one(mode: Mode, member: Member, node: &Node) -> Result<Place, Reason> {
        let id = member.id;
        decide(mode, &[(id, member)].into(), node).remove(&id).unwrap()
    }

    fn bridge(node: &mut Node) -> &mut BridgeState {
        node.links.get_mut(&BRIDGE).unwrap().bridge.as_mut().unwrap()
    }

    fn device(node: &mut Node) -> &mut ForwardingState {
        node.links.get_mut(&10).unwrap()
    }

    #[test]
    fn a_plain_bridge_port_takes_part() {
        let place = Place { segment: Segment::Bridge(BRIDGE), mtu: 1500, mac: MAC };
        assert_eq!(one(Mode::Auto, member(1, 10), &node()), Ok(place));
        assert_eq!(one(Mode::On, member(1, 10), &node()), Ok(place));
        assert_eq!(one(Mode::Off, member(1, 10), &node()), Err(Reason::Off));
    }

    /// Changes one property of the node, and returns the decision about the attachment with `auto` and with
    /// `on`.
    fn with(change: impl FnOnce(&mut Node)) -> [Result<Place, Reason>; 2] {
        let mut node = node();
        change(&mut node);
        [Mode::Auto, Mode::On].map(|mode| one(mode, member(1, 10), &node))
    }

    #[test]
    fn frames_that_the_bridge_would_not_forward_are_never_forwarded() {
        let never = |reason: Reason| [Err(reason.clone()), Err(reason)];
        assert_eq!(with(|node| node.links.clear()), never(Reason::NoDevice));
        assert_eq!(with(|node| device(node).controller = None), never(Reason::NoBridge));
        assert_eq!(with(|node| device(node).controller = Some(11)), never(Reason::NoBridge));
        assert_eq!(with(|node| device(node).port = None), never(Reason::NoBridge));
        assert_eq!(with(|node| device(node).port = Some(PortState::default())), never(Reason::PortState));
        let restricted = PortState { forwarding: true, isolated: true, locked: false };
        assert_eq!(with(|node| device(node).port = Some(restricted)), never(Reason::PortRestricted));
        let restricted = PortState { forwarding: true, isolated: false, locked: true };
        assert_eq!(with(|node| device(node).port = Some(restricted)), never(Reason::PortRestricted));
        assert_eq!(with(|node| bridge(node).vlan_filtering = true), never(Reason::VlanFiltering));
        let shaped = never(Reason::Shaped("tbf".into()));
        assert_eq!(with(|node| device(node).discipline = "tbf".into()), shaped);
    }

    #[test]
    fn other_programs_are_respected_unless_the_setting_is_on() {
        let place = Place { segment: Segment::Bridge(BRIDGE), mtu: 1500, mac: MAC };
        let unless_on = |reason| [Err(reason), Ok(place)];
        assert_eq!(with(|node| bridge(node).spanning_tree = true), unless_on(Reason::SpanningTree));
        assert_eq!(with(|node| node.filters.bridge = true), unless_on(Reason::BridgeRules));
        assert_eq!(
            with(|node| node.filters.devices = ["na10".into()].into()),
            unless_on(Reason::DeviceRules)
        );
        assert_eq!(with(|node| node.filters.devices = ["na*".into()].into()), unless_on(Reason::DeviceRules));
        assert_eq!(with(|node| node.filters.devices = ["na11".into()].into()), [Ok(place), Ok(place)]);
        let of_this = |node: &mut Node| {
            bridge(node).calls_iptables = true;
            node.filters.ip = true;
        };
        assert_eq!(with(of_this), unless_on(Reason::Iptables));
        let of_all = |node: &mut Node| {
            node.filters.bridges_call_ip = true;
            node.filters.ip = true;
        };
        assert_eq!(with(of_all), unless_on(Reason::Iptables));
        assert_eq!(with(|node| node.filters.ip = true), [Ok(place), Ok(place)], "bridges do not call it");
        assert_eq!(with(|node| node.filters.bridges_call_ip = true), [Ok(place), Ok(place)], "no rules");
    }

    #[test]
    fn translated_packets_never_take_the_fast_path() {
        let translates = |node: &mut Node| (node.filters.ip, node.filters.nat) = (true, true);
        let place = Place { segment: Segment::Bridge(BRIDGE), mtu: 1500, mac: MAC };
        assert_eq!(with(translates), [Ok(place), Ok(place)], "bridges do not call it");
        let seen_by = |calls: fn(&mut Node)| {
            with(|node| {
                translates(node);
                calls(node);
            })
        };
        let never = [Err(Reason::Iptables), Err(Reason::Nat)];
        assert_eq!(seen_by(|node| node.filters.bridges_call_ip = true), never);
        assert_eq!(seen_by(|node| bridge(node).calls_iptables = true), never);
    }

    #[test]
    fn a_routed_link_needs_no_bridge_and_no_filters() {
        let routed = |change: fn(&mut Node)| {
            let mut node = node();
            node.links.insert(10, ForwardingState { port: None, controller: None, ..port(10, "na10") });
            change(&mut node);
            [Mode::Auto, Mode::On].map(|mode| one(mode, Member { routed: true, ..member(1, 10) }, &node))
        };
        let place = Ok(Place { segment: Segment::Routed, mtu: 1500, mac: MAC });
        let never = |reason: Reason| [Err(reason.clone()), Err(reason)];
        assert_eq!(routed(|_| {}), [place.clone(), place.clone()]);
        assert_eq!(routed(|node| node.filters.bridge = true), [place.clone(), place.clone()]);
        assert_eq!(routed(|node| node.filters.ip = true), [Err(Reason::IpRules), place.clone()]);
        let translated = routed(|node| (node.filters.ip, node.filters.nat) = (true, true));
        assert_eq!(translated, [Err(Reason::IpRules), Err(Reason::Nat)]);
        let on_device = routed(|node| node.filters.devices = ["na10".into()].into());
        assert_eq!(on_device, [Err(Reason::DeviceRules), place]);
        assert_eq!(routed(|node| node.links.clear()), never(Reason::NoDevice));
        assert_eq!(routed(|node| device(node).controller = Some(BRIDGE)), never(Reason::Enslaved));
        let shaped = routed(|node| device(node).discipline = "tbf".into());
        assert_eq!(shaped, never(Reason::Shaped("tbf".into())));
    }

    #[test]
    fn the_setting_of_the_network_comes_first() {
        let opted_out = Member { kept_off: Some(Reason::OptedOut), ..member(1, 10) };
        assert_eq!(one(Mode::On, opted_out, &node()), Err(Reason::OptedOut));
        assert_eq!(
            Reason::of_plugins(["tuning", "bandwidth", "portmap"]),
            Some(Reason::Plugin("bandwidth".into()))
        );
        assert_eq!(Reason::of_plugins(["tuning", "sbr"]), None);
    }

    #[test]
    fn the_address_of_the_bridge_or_of_a_port_is_no_attachments() {
        let never = |reason: Reason| [Err(reason.clone()), Err(reason)];
        for index in [BRIDGE, 10, 11] {
            let taken = with(|node| node.links.get_mut(&index).unwrap().mac = Some(MAC));
            assert_eq!(taken, never(Reason::SameMac), "{index}");
        }
        let known_too = with(|node| {
            node.links.get_mut(&BRIDGE).unwrap().mac = Some(MAC);
            node.contested.extend([(BRIDGE, MAC)]);
        });
        assert_eq!(known_too, never(Reason::SameMac));
        let place = Ok(Place { segment: Segment::Bridge(BRIDGE), mtu: 1500, mac: MAC });
        let of_another = ForwardingState { mac: Some(MAC), controller: Some(4), ..port(12, "eth1") };
        assert_eq!(with(|node| drop(node.links.insert(12, of_another))), [place.clone(), place]);
    }

    #[test]
    fn frames_that_the_bridge_sends_to_another_port_are_left_to_it() {
        let known = |port| with(|node| node.stations.extend([((BRIDGE, MAC), port)]));
        let place = Ok(Place { segment: Segment::Bridge(BRIDGE), mtu: 1500, mac: MAC });
        assert_eq!(known(11), [Err(Reason::KnownElsewhere), Err(Reason::KnownElsewhere)]);
        assert_eq!(known(BRIDGE), [Err(Reason::KnownElsewhere), Err(Reason::KnownElsewhere)]);
        assert_eq!(known(10), [place.clone(), place.clone()]);
        assert_eq!(with(|node| node.stations.extend([((4, MAC), 11)])), [place.clone(), place]);
        let contested = with(|node| node.contested.extend([(BRIDGE, MAC)]));
        assert_eq!(contested, [Err(Reason::KnownElsewhere), Err(Reason::KnownElsewhere)]);
    }

    #[test]
    fn two_owners_of_one_address_both_stay_on_the_bridge() {
        let second = Member { mac: MAC, ..member(2, 11) };
        let members: BTreeMap<_, _> = [(1, member(1, 10)), (2, second)].into();
        let decided = decide(Mode::Auto, &members, &node());
        assert_eq!(decided, [(1, Err(Reason::SameMac)), (2, Err(Reason::SameMac))].into());
        let mut elsewhere = node();
        elsewhere.links.get_mut(&11).unwrap().controller = Some(4);
        assert_eq!(decide(Mode::Auto, &members, &elsewhere)[&1], one(Mode::Auto, member(1, 10), &node()));
    }
}
