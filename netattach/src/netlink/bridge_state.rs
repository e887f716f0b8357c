//! Properties of links that affect forwarding: of bridges, their ports, and the devices that lead elsewhere.

use netlink_packet_route::AddressFamily;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    BridgePortState, BridgeStpState, InfoBridge, InfoBridgePort, InfoData, InfoPortData, LinkAttribute,
    LinkInfo, LinkLayerType, LinkMessage, LinkXdp, XdpAttached,
};
use netlink_packet_route::neighbour::{NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState};
use rtnetlink::LinkUnspec;

use super::link::show;
use super::socket::{CREATE, REPLACE};
use super::{Error, Handle};
use crate::mac::Mac;

/// A link's properties that matter to a fast path around it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForwardingState {
    /// Index in its namespace.
    pub index: u32,
    /// Name in its namespace.
    pub name: String,
    /// In bytes.
    pub mtu: u32,
    /// The link's own address, if it sends Ethernet frames.
    pub mac: Option<Mac>,
    /// Link group; has the bit [`OWN_GROUPS`](crate::spec::OWN_GROUPS) if an agent made the link.
    pub group: u32,
    /// Kind, as `ip -d link` shows it; empty for a network card.
    pub kind: String,
    /// Whether an XDP program runs on the link.
    pub xdp: bool,
    /// The bridge (or other controller) of which the link is a port.
    pub controller: Option<u32>,
    /// Kind of the queueing discipline for sending; `noqueue` for a veth by default.
    pub discipline: String,
    /// Settings, for a bridge.
    pub bridge: Option<BridgeState>,
    /// Settings, for a bridge's port.
    pub port: Option<PortState>,
}

/// Settings of a bridge beyond plain switching.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BridgeState {
    /// The bridge runs a spanning tree protocol.
    pub spanning_tree: bool,
    /// The bridge forwards by VLAN.
    pub vlan_filtering: bool,
    /// The bridge passes forwarded packets to iptables or ip6tables, independent of the sysctls.
    pub calls_iptables: bool,
    /// Ageing time of a station that is not seen, in hundredths of a second.
    pub ageing: u32,
}

/// Settings of a bridge's port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PortState {
    /// The port forwards: up, with a carrier, and not blocked by a spanning tree.
    pub forwarding: bool,
    /// The port does not exchange frames with other isolated ports.
    pub isolated: bool,
    /// The port accepts frames only from addresses that were entered by hand.
    pub locked: bool,
}

impl Handle {
    /// The link of that index, or `None`.
    pub fn forwarding_state(&mut self, index: u32) -> Result<Option<ForwardingState>, Error> {
        match self.socket.request(show(LinkUnspec::new_with_index(index)), 0) {
            Ok(answers) => Ok(answers.into_iter().find_map(observed)),
            Err(error) if error.not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether the bridge forwards by VLAN.
    pub fn filters_by_vlan(&mut self, bridge: u32) -> Result<bool, Error> {
        let state = self.forwarding_state(bridge)?.and_then(|link| link.bridge);
        Ok(state.is_some_and(|bridge| bridge.vlan_filtering))
    }

    /// All links of the namespace.
    pub fn forwarding_states(&mut self) -> Result<Vec<ForwardingState>, Error> {
        Ok(self.all_links()?.into_iter().filter_map(observed).collect())
    }

    /// Adds the address behind the port to the bridge's forwarding database, without ageing. The entry moves when the
    /// bridge sees the address behind another port, and is removed with the port.
    pub fn ensure_station(&mut self, port: u32, mac: Mac) -> Result<(), Error> {
        let mut entry = NeighbourMessage::default();
        entry.header.family = AddressFamily::Bridge;
        entry.header.ifindex = port;
        entry.header.state = NeighbourState::Reachable;
        // Learned by a control plane: the kernel does not age such entries, but lets them move (`br_fdb_update`).
        entry.header.flags = NeighbourFlags::Controller | NeighbourFlags::ExtLearned;
        entry.attributes.push(NeighbourAttribute::LinkLayerAddress(mac.0.to_vec()));
        self.socket.request(RouteNetlinkMessage::NewNeighbour(entry), CREATE | REPLACE)?;
        Ok(())
    }
}

fn observed(message: RouteNetlinkMessage) -> Option<ForwardingState> {
    let RouteNetlinkMessage::NewLink(LinkMessage { header, attributes, .. }) = message else { return None };
    let mut state = ForwardingState {
        index: header.index,
        name: String::new(),
        mtu: 0,
        mac: None,
        group: 0,
        kind: String::new(),
        xdp: false,
        controller: None,
        discipline: String::new(),
        bridge: None,
        port: None,
    };
    for attribute in attributes {
        match attribute {
            LinkAttribute::IfName(name) => state.name = name,
            LinkAttribute::Mtu(mtu) => state.mtu = mtu,
            LinkAttribute::Group(group) => state.group = group,
            LinkAttribute::Address(bytes) if header.link_layer_type == LinkLayerType::Ether => {
                state.mac = <[u8; 6]>::try_from(bytes).ok().map(Mac);
            }
            LinkAttribute::Xdp(xdp) => {
                state.xdp =
                    xdp.iter().any(|it| matches!(it, LinkXdp::Attached(how) if *how != XdpAttached::None));
            }
            LinkAttribute::Qdisc(kind) => state.discipline = kind,
            LinkAttribute::Controller(index) => state.controller = Some(index).filter(|index| *index != 0),
            LinkAttribute::LinkInfo(infos) => {
                for info in infos {
                    match info {
                        LinkInfo::Kind(kind) => state.kind = kind.to_string(),
                        LinkInfo::Data(InfoData::Bridge(data)) => state.bridge = Some(bridge(&data)),
                        LinkInfo::PortData(InfoPortData::BridgePort(data)) => state.port = Some(port(&data)),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    Some(state)
}

fn bridge(data: &[InfoBridge]) -> BridgeState {
    let mut state = BridgeState::default();
    for datum in data {
        match datum {
            InfoBridge::StpState(stp) => state.spanning_tree = *stp != BridgeStpState::Disabled,
            InfoBridge::AgeingTime(ageing) => state.ageing = *ageing,
            InfoBridge::VlanFiltering(on) => state.vlan_filtering = *on,
            InfoBridge::NfCallIpTables(on) | InfoBridge::NfCallIp6Tables(on) => state.calls_iptables |= *on,
            _ => {}
        }
    }
    state
}

fn port(data: &[InfoBridgePort]) -> PortState {
    let mut state = PortState::default();
    for datum in data {
        match datum {
            InfoBridgePort::State(now) => state.forwarding = *now == BridgePortState::Forwarding,
            InfoBridgePort::Isolated(on) => state.isolated = *on,
            InfoBridgePort::Locked(on) => state.locked = *on,
            _ => {}
        }
    }
    state
}
