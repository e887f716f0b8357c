//! The state of a link, as the kernel describes it.

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    InfoBridgePort, InfoData, InfoIpVlan, InfoMacVlan, InfoMacVtap, InfoPortData, InfoVrf, LinkAttribute,
    LinkFlags, LinkInfo,
};

use super::super::netkit::observed_ways;
use super::super::tap::observed_access;
use super::mode::{observed_ipvlan_mode, observed_mode, observed_tag, observed_tap_mode};
use crate::mac::Mac;
use crate::spec;

/// Alias of a bridge or VRF that netattach has created. Such links outlast the attachment that they were
/// created for; only links with this alias may be deleted.
pub(in crate::netlink) const BRIDGE_ALIAS: &str = "netattach";

/// A link as the kernel describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkState {
    /// Index in its namespace.
    pub index: u32,
    /// Name in its namespace.
    pub name: String,
    /// `veth`, `bridge`, `macvlan`, ...; empty for physical and loopback devices.
    pub kind: String,
    /// Ethernet address, if it has one of six bytes.
    pub mac: Option<Mac>,
    /// In bytes.
    pub mtu: u32,
    /// Administratively up.
    pub up: bool,
    /// Whether the link was configured to receive all frames.
    pub promiscuous: bool,
    /// Index of the bridge (or other controller) of which the link is a port.
    pub controller: Option<u32>,
    /// Whether frames may leave through the port on which they arrived; only for a bridge port.
    pub hairpin: Option<bool>,
    /// Whether the port exchanges no frames with other isolated ports.
    pub isolated: bool,
    /// Index of the peer or parent, possibly in another namespace.
    pub link: Option<u32>,
    /// Mode, if the kind has modes.
    pub mode: Option<spec::LinkMode>,
    /// Link group.
    pub group: u32,
    /// Created by netattach, and not for a single pod or attachment: a bridge, the port that holds the node's
    /// gateway in a VLAN of a bridge, or a VRF.
    pub own: bool,
    /// Routing table, of a VRF.
    pub table: Option<u32>,
}

impl LinkState {
    /// Whether the kernel may change its Ethernet address with that of its parent: see
    /// [`spec::Link::follows_parent`]. Nothing shows whether the address of a VLAN was set.
    pub fn may_follow_parent(&self) -> bool {
        let is_passthru = self.mode == Some(spec::LinkMode::Macvlan(spec::MacvlanMode::Passthru));
        is_passthru || matches!(self.kind.as_str(), "ipvlan" | "vlan")
    }

    /// Whether the link is a network card: its driver reports no kind.
    pub fn is_card(&self) -> bool {
        self.kind.is_empty()
    }

    /// Whether the link is a bridge that netattach has created.
    pub fn own_bridge(&self) -> bool {
        self.own && self.kind == "bridge"
    }
}

/// Returns the link that a message describes; `None` if it describes none.
pub(in crate::netlink) fn observed(message: RouteNetlinkMessage) -> Option<LinkState> {
    let RouteNetlinkMessage::NewLink(link) = message else { return None };
    let flags = link.header.flags;
    let mut state = LinkState {
        index: link.header.index,
        name: String::new(),
        kind: String::new(),
        mac: None,
        mtu: 0,
        up: flags.contains(LinkFlags::Up),
        promiscuous: flags.contains(LinkFlags::Promisc),
        controller: None,
        hairpin: None,
        isolated: false,
        link: None,
        mode: None,
        group: 0,
        own: false,
        table: None,
    };
    for attribute in link.attributes {
        match attribute {
            LinkAttribute::IfAlias(alias) => state.own = alias == BRIDGE_ALIAS,
            LinkAttribute::IfName(name) => state.name = name,
            LinkAttribute::Address(bytes) => state.mac = <[u8; 6]>::try_from(bytes).ok().map(Mac),
            LinkAttribute::Mtu(mtu) => state.mtu = mtu,
            LinkAttribute::Controller(index) => state.controller = Some(index).filter(|index| *index != 0),
            LinkAttribute::Link(index) => state.link = Some(index),
            LinkAttribute::Group(group) => state.group = group,
            LinkAttribute::LinkInfo(infos) => {
                for info in infos {
                    match info {
                        LinkInfo::Kind(kind) => state.kind = kind.to_string(),
                        LinkInfo::PortData(InfoPortData::BridgePort(data)) => {
                            state.hairpin = data.iter().find_map(|datum| match datum {
                                InfoBridgePort::HairpinMode(on) => Some(*on),
                                _ => None,
                            });
                            state.isolated = data.contains(&InfoBridgePort::Isolated(true));
                        }
                        LinkInfo::Data(InfoData::MacVlan(data)) => {
                            state.mode = data.iter().find_map(|datum| match datum {
                                InfoMacVlan::Mode(mode) => observed_mode(mode).map(spec::LinkMode::Macvlan),
                                _ => None,
                            });
                        }
                        LinkInfo::Data(InfoData::MacVtap(data)) => {
                            state.mode = data.iter().find_map(|datum| match datum {
                                InfoMacVtap::Mode(mode) => {
                                    observed_tap_mode(mode).map(spec::LinkMode::Macvlan)
                                }
                                _ => None,
                            });
                        }
                        LinkInfo::Data(InfoData::Vlan(data)) => {
                            state.mode = observed_tag(&data).map(spec::LinkMode::Vlan);
                        }
                        LinkInfo::Data(InfoData::Netkit(data)) => {
                            state.mode = observed_ways(&data).map(spec::LinkMode::Netkit);
                        }
                        LinkInfo::Data(InfoData::Tun(data)) => {
                            state.mode = observed_access(&data).map(spec::LinkMode::Tap);
                        }
                        LinkInfo::Data(InfoData::Vrf(data)) => {
                            state.table = data.iter().find_map(|datum| match datum {
                                InfoVrf::TableId(table) => Some(*table),
                                _ => None,
                            });
                        }
                        LinkInfo::Data(InfoData::IpVlan(data)) => {
                            state.mode = data.iter().find_map(|datum| match datum {
                                InfoIpVlan::Mode(mode) => {
                                    observed_ipvlan_mode(mode).map(spec::LinkMode::Ipvlan)
                                }
                                _ => None,
                            });
                        }
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    Some(state)
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::link::LinkMessage;

    use super::*;

    #[test]
    fn links_of_some_kinds_may_change_their_address_with_their_parent() {
        let link = observed(RouteNetlinkMessage::NewLink(LinkMessage::default())).unwrap();
        let may =
            |kind: &str, mode| LinkState { kind: kind.to_owned(), mode, ..link.clone() }.may_follow_parent();
        let macvlan = |mode| Some(spec::LinkMode::Macvlan(mode));
        assert!(may("ipvlan", None) && may("vlan", None));
        assert!(may("macvlan", macvlan(spec::MacvlanMode::Passthru)));
        assert!(may("macvtap", macvlan(spec::MacvlanMode::Passthru)));
        assert!(!may("macvlan", macvlan(spec::MacvlanMode::Bridge)) && !may("veth", None));
    }
}
