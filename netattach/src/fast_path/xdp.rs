//! The XDP program, which drivers of uplinks run.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::bpf::{self, BpfError, XdpMode};
use crate::error_chain::Chain;
use crate::netlink::ForwardingState;

/// Whether uplinks drop packets by an XDP program, before the kernel allocates a packet buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Xdp {
    /// No: some cards reset their link when they get a program.
    #[default]
    Off,
    /// If the driver supports it and the device is a network card: a veth would lose more than it gains.
    Auto,
    /// On every uplink, in the driver.
    Native,
    /// On every uplink, in generic mode.
    Generic,
}

impl Xdp {
    /// The mode in which a device should run the program.
    pub(super) fn mode(self, link: &ForwardingState) -> Option<XdpMode> {
        match self {
            Self::Off => None,
            Self::Auto => (link.kind != "veth").then_some(XdpMode::Native),
            Self::Native => Some(XdpMode::Native),
            Self::Generic => Some(XdpMode::Generic),
        }
    }
}

/// State of the uplinks that should run the program, by index: the mode, or why they do not run it.
pub(super) type XdpStates = BTreeMap<u32, Result<XdpMode, String>>;

/// Attaches the program to these devices and removes it from all others. `first`: attached programs may
/// belong to an earlier agent. A device that cannot run the program does not stop this function.
///
/// # Errors
/// The pins cannot be listed or removed.
pub(super) fn keep(
    maps: &bpf::FastPath,
    wanted: &BTreeMap<u32, XdpMode>,
    first: bool,
) -> Result<XdpStates, BpfError> {
    let running: BTreeSet<(u32, XdpMode)> = maps.xdp_devices()?;
    for (index, mode) in running.iter().filter(|(index, mode)| wanted.get(index) != Some(mode)) {
        maps.detach_xdp(*index, *mode)?;
    }
    let keep_one = |(index, mode): (&u32, &XdpMode)| {
        let attached = if first || !running.contains(&(*index, *mode)) {
            maps.attach_xdp(*index, *mode)
        } else {
            Ok(())
        };
        (*index, attached.map(|()| *mode).map_err(|error| Chain(&error).to_string()))
    };
    Ok(wanted.iter().map(keep_one).collect())
}
