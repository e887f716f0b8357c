//! The modes of links, as [`spec`] names them and as the kernel does.

use netlink_packet_route::link::{InfoVlan, IpVlanMode, MacVlanMode, MacVtapMode, VlanProtocol};

use crate::spec;

pub(super) fn kernel_mode(mode: spec::MacvlanMode) -> MacVlanMode {
    match mode {
        spec::MacvlanMode::Bridge => MacVlanMode::Bridge,
        spec::MacvlanMode::Private => MacVlanMode::Private,
        spec::MacvlanMode::Vepa => MacVlanMode::Vepa,
        spec::MacvlanMode::Passthru => MacVlanMode::Passthrough,
    }
}

pub(super) fn observed_mode(mode: &MacVlanMode) -> Option<spec::MacvlanMode> {
    Some(match mode {
        MacVlanMode::Bridge => spec::MacvlanMode::Bridge,
        MacVlanMode::Private => spec::MacvlanMode::Private,
        MacVlanMode::Vepa => spec::MacvlanMode::Vepa,
        MacVlanMode::Passthrough => spec::MacvlanMode::Passthru,
        _ => return None,
    })
}

pub(super) fn kernel_tap_mode(mode: spec::MacvlanMode) -> MacVtapMode {
    match mode {
        spec::MacvlanMode::Bridge => MacVtapMode::Bridge,
        spec::MacvlanMode::Private => MacVtapMode::Private,
        spec::MacvlanMode::Vepa => MacVtapMode::Vepa,
        spec::MacvlanMode::Passthru => MacVtapMode::Passthrough,
    }
}

pub(super) fn observed_tap_mode(mode: &MacVtapMode) -> Option<spec::MacvlanMode> {
    Some(match mode {
        MacVtapMode::Bridge => spec::MacvlanMode::Bridge,
        MacVtapMode::Private => spec::MacvlanMode::Private,
        MacVtapMode::Vepa => spec::MacvlanMode::Vepa,
        MacVtapMode::Passthrough => spec::MacvlanMode::Passthru,
        _ => return None,
    })
}

pub(super) fn kernel_ipvlan_mode(mode: spec::IpvlanMode) -> IpVlanMode {
    match mode {
        spec::IpvlanMode::L2 => IpVlanMode::L2,
        spec::IpvlanMode::L3 => IpVlanMode::L3,
        spec::IpvlanMode::L3s => IpVlanMode::L3S,
    }
}

pub(super) fn observed_ipvlan_mode(mode: &IpVlanMode) -> Option<spec::IpvlanMode> {
    Some(match mode {
        IpVlanMode::L2 => spec::IpvlanMode::L2,
        IpVlanMode::L3 => spec::IpvlanMode::L3,
        IpVlanMode::L3S => spec::IpvlanMode::L3s,
        _ => return None,
    })
}

/// The tag of a VLAN's frames.
pub(super) fn observed_tag(data: &[InfoVlan]) -> Option<spec::VlanTag> {
    let id = data.iter().find_map(|datum| match datum {
        InfoVlan::Id(id) => Some(*id),
        _ => None,
    })?;
    Some(spec::VlanTag { id, service: data.contains(&InfoVlan::Protocol(VlanProtocol::Ieee8021Ad)) })
}
