//! The XDP program, which drivers of uplinks run.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::bpf::{self, BpfError, XdpMode};
use crate::error_chain::Chain;
use crate::netlink::ForwardingState;

/// Whether uplinks drop what they can before it is a packet of the kernel's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Xdp {
    /// No: some cards reset their link when they get a program.
    #[default]
    Off,
    /// Where the driver does it, and it is a card's: a veth loses more by it than it gains.
    Auto,
    /// On every uplink, by its driver.
    Native,
    /// On every uplink, by the kernel.
    Generic,
}

impl Xdp {
    /// How a device is to run the program.
    pub(super) fn mode(self, link: &ForwardingState) -> Option<XdpMode> {
        match self {
            Self::Off => None,
            Self::Auto => (link.kind != "veth").then_some(XdpMode::Native),
            Self::Native => Some(XdpMode::Native),
            Self::Generic => Some(XdpMode::Generic),
        }
    }
}

/// How the uplinks run the program that should, by index: the mode, or why they do not.
pub(super) type XdpStates = BTreeMap<u32, Result<XdpMode, String>>;

/// Has these devices run the program, and no others. `first`: programs that run may be another agent's. A device that cannot is no
/// reason to stop.
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
