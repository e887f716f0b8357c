//! Ports of bridges: their settings and their VLANs.

use std::collections::{BTreeMap, BTreeSet};

use netlink_packet_route::link::{
    AfSpecBridge, BridgeVlanInfo, BridgeVlanInfoFlags, LinkAttribute, LinkExtentMask, LinkMessage,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rtnetlink::{LinkBridge, LinkBridgePort, LinkBridgeVlan, LinkUnspec};

use super::link::BRIDGE_ALIAS;
use super::socket::NetlinkRequest;
use super::{Error, Handle};
use crate::spec::{BridgePort, PortVlans};

/// Membership of a port in a VLAN.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct VlanUse {
    /// Untagged frames that arrive belong to the VLAN.
    pub pvid: bool,
    /// Frames of the VLAN leave untagged.
    pub untagged: bool,
}

impl VlanUse {
    const NATIVE: Self = Self { pvid: true, untagged: true };
    const TAGGED: Self = Self { pvid: false, untagged: false };
}

/// The VLANs of a port, by id.
pub type VlanUses = BTreeMap<u16, VlanUse>;

impl Handle {
    /// Gives a bridge port its settings: hairpin mode, isolation, VLANs. Idempotent.
    ///
    /// # Errors
    /// The link is not a port, or the bridge does not filter by VLAN.
    pub fn ensure_port(&mut self, index: u32, port: &BridgePort) -> Result<(), Error> {
        if port.hairpin || port.isolated {
            let mut set = LinkBridgePort::new(index);
            if port.hairpin {
                set = set.hairpin(true);
            }
            if port.isolated {
                set = set.isolated(true);
            }
            self.socket.request(RouteNetlinkMessage::NewLink(set.build()), 0)?;
        }
        let Some(wanted) = &port.vlans else { return Ok(()) };
        let present = self.port_vlans()?.remove(&index).unwrap_or_default();
        let changes = changes(&present, wanted);
        let mut requests = Vec::new();
        // The new native VLAN replaces the former one in one step, so that no frame meets a state in between.
        if !changes.set.is_empty() {
            let set = RouteNetlinkMessage::SetLink(vlan_message(index, &changes.set));
            requests.push(NetlinkRequest::new(set, 0));
        }
        if !changes.remove.is_empty() {
            let removed: Vec<(u16, VlanUse)> =
                changes.remove.iter().map(|id| (*id, VlanUse::TAGGED)).collect();
            let remove = RouteNetlinkMessage::DelLink(vlan_message(index, &removed));
            requests.push(NetlinkRequest::new(remove, 0));
        }
        self.socket.all(requests)
    }

    /// Makes a link a port of a bridge with these settings. A link with restrictions is down until they are
    /// set, so that no frame passes before.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub fn join_bridge(&mut self, index: u32, bridge: u32, port: &BridgePort) -> Result<(), Error> {
        let is_restricted = port.isolated || port.vlans.is_some();
        if is_restricted {
            self.change(LinkUnspec::new_with_index(index).down())?;
        }
        self.set_controller(index, bridge)?;
        self.ensure_port(index, port)?;
        if is_restricted { self.ensure_up(index) } else { Ok(()) }
    }

    /// Returns the VLANs of the ports of all bridges that filter by VLAN, by the port's index; those of a
    /// bridge itself, by the bridge's index.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn port_vlans(&mut self) -> Result<BTreeMap<u32, VlanUses>, Error> {
        let mut all = LinkMessage::default();
        all.header.interface_family = AddressFamily::Bridge;
        all.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::BrvlanCompressed]));
        let found = self.socket.dump(RouteNetlinkMessage::GetLink(all))?;
        Ok(found.into_iter().filter_map(observed).collect())
    }

    /// Makes a bridge filter by VLAN. Existing ports stay in the bridge's default VLAN.
    ///
    /// # Errors
    /// The kernel refuses: it may be built without VLAN filtering.
    pub fn filter_by_vlan(&mut self, bridge: &str, index: u32) -> Result<(), Error> {
        let mut set = LinkBridge::new(bridge).vlan_filtering(true).build();
        set.header.index = index;
        self.socket.request(RouteNetlinkMessage::NewLink(set), 0).map(drop)
    }

    /// Marks a link as created by netattach and as outlasting its pods, like netattach's bridges.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn mark_own(&mut self, index: u32) -> Result<(), Error> {
        let mark = LinkAttribute::IfAlias(BRIDGE_ALIAS.to_owned());
        self.change(LinkUnspec::new_with_index(index).append_extra_attribute(mark))
    }
}

/// Changes of a port's VLANs.
#[derive(Debug, Default, PartialEq, Eq)]
struct Changes {
    /// In ascending order.
    set: Vec<(u16, VlanUse)>,
    remove: BTreeSet<u16>,
}

fn changes(present: &VlanUses, wanted: &PortVlans) -> Changes {
    let native = wanted.native.map(|id| (id, VlanUse::NATIVE));
    let wanted_uses: VlanUses = wanted.tagged_ids().map(|id| (id, VlanUse::TAGGED)).chain(native).collect();
    let is_other = |id: &&u16| !wanted.keeps_default && !wanted_uses.contains_key(id);
    let remove = present.keys().filter(is_other).copied().collect();
    let set = wanted_uses.iter().filter(|(id, how)| present.get(id) != Some(how));
    Changes { set: set.map(|(id, how)| (*id, *how)).collect(), remove }
}

/// Whether a port has exactly the wanted VLANs.
pub fn has_vlans(present: &VlanUses, wanted: &PortVlans) -> bool {
    changes(present, wanted) == Changes::default()
}

/// A request for the VLANs of a port; consecutive VLANs with the same flags form a range.
fn vlan_message(index: u32, vlans: &[(u16, VlanUse)]) -> LinkMessage {
    let mut message = LinkBridgeVlan::new(index);
    let mut rest = vlans;
    while let Some(((first, how), _)) = rest.split_first() {
        let is_next = |(position, (id, other)): &(usize, &(u16, VlanUse))| {
            usize::from(*id) == usize::from(*first) + position && other == how
        };
        // A port has one native VLAN, which is not part of a range.
        let most = if how.pvid { 1 } else { rest.len() };
        let run = rest.iter().enumerate().take(most).take_while(is_next).count().max(1);
        let flags = flags(*how);
        message = match rest.get(run - 1) {
            Some((last, _)) if last != first => {
                message.vlan_range_start(*first, flags).vlan_range_end(*last, flags)
            }
            _ => message.vlan(*first, flags),
        };
        rest = rest.get(run..).unwrap_or_default();
    }
    message.build()
}

fn flags(how: VlanUse) -> BridgeVlanInfoFlags {
    let mut flags = BridgeVlanInfoFlags::empty();
    flags.set(BridgeVlanInfoFlags::Pvid, how.pvid);
    flags.set(BridgeVlanInfoFlags::Untagged, how.untagged);
    flags
}

fn observed(message: RouteNetlinkMessage) -> Option<(u32, VlanUses)> {
    let RouteNetlinkMessage::NewLink(LinkMessage { header, attributes, .. }) = message else { return None };
    let mut uses = VlanUses::new();
    let mut first = None;
    let infos = attributes.into_iter().filter_map(|attribute| match attribute {
        LinkAttribute::AfSpecBridge(specs) => Some(specs),
        _ => None,
    });
    for spec in infos.flatten() {
        let AfSpecBridge::VlanInfo(BridgeVlanInfo { flags, vid, .. }) = spec else { continue };
        if flags.contains(BridgeVlanInfoFlags::RangeBegin) {
            first = Some(vid);
            continue;
        }
        let how = VlanUse {
            pvid: flags.contains(BridgeVlanInfoFlags::Pvid),
            untagged: flags.contains(BridgeVlanInfoFlags::Untagged),
        };
        for id in first.take().unwrap_or(vid)..=vid {
            uses.insert(id, how);
        }
    }
    Some((header.index, uses))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFAULT: (u16, VlanUse) = (1, VlanUse::NATIVE);

    fn uses(all: &[(u16, VlanUse)]) -> VlanUses {
        all.iter().copied().collect()
    }

    #[test]
    fn a_port_loses_its_default_vlan_unless_it_is_to_keep_it() {
        let kept = (1, VlanUse { pvid: false, untagged: true });
        let access = |keeps_default| PortVlans { native: Some(100), keeps_default, ..PortVlans::default() };
        let native = (100, VlanUse::NATIVE);
        let fresh = uses(&[DEFAULT]);
        let expected = Changes { set: vec![native], remove: [1].into() };
        assert_eq!(changes(&fresh, &access(false)), expected);
        assert_eq!(changes(&fresh, &access(true)), Changes { set: vec![native], ..Changes::default() });
        assert!(has_vlans(&uses(&[kept, native]), &access(true)));
        assert!(!has_vlans(&uses(&[kept, native]), &access(false)));
        assert!(has_vlans(&uses(&[native]), &access(false)));
        assert!(!has_vlans(&uses(&[(100, VlanUse::TAGGED)]), &access(false)), "it is tagged");
    }

    #[test]
    fn neighbours_are_one_range_in_a_request() {
        let tagged = [(5, VlanUse::TAGGED), (6, VlanUse::TAGGED), (8, VlanUse::TAGGED), (9, VlanUse::NATIVE)];
        let message = vlan_message(7, &tagged);
        let infos: Vec<(u16, u16)> = message
            .attributes
            .iter()
            .flat_map(|attribute| match attribute {
                LinkAttribute::AfSpecBridge(specs) => specs.clone(),
                _ => Vec::new(),
            })
            .filter_map(|spec| match spec {
                AfSpecBridge::VlanInfo(info) => Some((info.vid, info.flags.bits())),
                _ => None,
            })
            .collect();
        // BRIDGE_VLAN_INFO_RANGE_BEGIN, _RANGE_END, _PVID with _UNTAGGED.
        assert_eq!(infos, [(5, 8), (6, 16), (8, 0), (9, 6)]);
        let shown = observed(RouteNetlinkMessage::NewLink(message)).unwrap();
        assert_eq!(shown, (7, uses(&tagged)));
    }
}
