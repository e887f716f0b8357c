//! The bridge that an attachment is a port of, and its gateway addresses.

use std::net::IpAddr;

use ipnet::IpNet;

use super::links::{LinkError, check_has_v6};
use super::{Executor, bridge_stack, bridges, ensure_if_present, interface};
use crate::attach::addresses::occupied::NodeLink;
use crate::attach::{StepError, facts};
use crate::cni::code;
use crate::netlink::Born;
use crate::plan::AttachmentPlan;
use crate::plan::addressing::{self, GatewayChanges, Others};
use crate::spec;
use crate::step::{Bridge, Output, StepRef};

impl Executor<'_> {
    pub(super) fn bridge(
        &mut self,
        attachment: &AttachmentPlan,
        bridge: &spec::Bridge,
    ) -> Result<Output, StepError> {
        self.entered.enter(&bridge.name);
        let present = facts::named(&mut self.host, &bridge.name, self.node.links.as_ref())?;
        let is_closed = !bridges::is_gateway(attachment);
        // An earlier ADD may have ended before it closed the bridge.
        let is_left = present.as_ref().is_some_and(|link| link.own_bridge() && !link.up);
        let closes = is_closed && (is_left || present.is_none());
        let node = self.node;
        let _turn = closes.then(|| node.bridges.turn());
        let born = if is_closed { Born::Down } else { Born::Up };
        let ensured = self.host.ensure_bridge_beside(bridge, present, born);
        let ensured = ensured.map_err(|error| not_made(bridge, error))?;
        if bridge.vlan_filtering && !ensured.created {
            let filtered = bridges::filter_by_vlan(&mut self.host, &ensured.link);
            filtered.map_err(|error| not_made(bridge, error))?;
        }
        if ensured.created {
            // The node must not accept router advertisements that pods send.
            ensure_if_present(&format!("ipv6/conf/{}/accept_ra", bridge.name), "0")?;
        }
        if is_closed && (ensured.created || is_left) {
            bridges::close(&mut self.host, &ensured.link)?;
        }
        let (made, ours) = (ensured.created, !ensured.created && ensured.link.own_bridge());
        Ok(Output::Bridge(Bridge { link: interface(&ensured.link), made, ours }))
    }

    pub(super) fn gateway(
        &mut self,
        at: StepRef,
        attachment: &AttachmentPlan,
        (bridge, vlan): (&str, Option<u16>),
        others: Others,
    ) -> Result<Output, StepError> {
        let wanted = addressing::gateways(&self.leased(at, attachment)?.addresses);
        let device = match vlan {
            Some(vlan) => {
                let keeps_default = attachment.link().and_then(spec::Link::port);
                let keeps_default = keeps_default.and_then(|port| port.vlans.as_ref());
                let keeps_default = keeps_default.is_some_and(|vlans| vlans.keeps_default);
                let bridge = (bridge, self.bridge_index(at)?);
                Some(bridges::ensure_vlan_device(&mut self.host, bridge, vlan, keeps_default)?)
            }
            None => None,
        };
        let index = device.as_ref().map_or_else(|| self.bridge_index(at), |device| Ok(device.index))?;
        let present = match &self.node.links {
            Some(links) => links.addresses(index, &mut self.host)?,
            None => self.host.addresses(index)?,
        };
        let changes = addressing::gateway_changes(&present, &wanted, others).map_err(|conflict| {
            StepError::Bridge(BridgeError::GatewayConflict {
                bridge: bridge.to_owned(),
                present: conflict.present,
                wanted: conflict.wanted,
            })
        })?;
        let is_changed = changes != GatewayChanges::default();
        // Also if another process has given a closed bridge the gateway's address.
        let opens =
            device.is_none() && self.is_own_bridge(at) && (is_changed || bridge_stack::is_closed(bridge));
        let node = self.node;
        let _turn = (is_changed || opens).then(|| node.bridges.turn());
        if opens {
            bridge_stack::open(bridge)?;
        }
        let gateways: Vec<IpAddr> = changes.add.iter().map(IpNet::addr).collect();
        let link = NodeLink { name: bridge.to_owned(), segment: self.bridge_index(at)?, vlan };
        let changed =
            self.give_gateways(attachment, &gateways, &link, |own| own.change_addresses(index, changes));
        if let Some(links) = self.node.links.as_ref().filter(|_| is_changed) {
            links.readdressed(index);
        }
        changed?;
        if opens {
            // Another process may have closed it before it saw the address.
            bridge_stack::open(bridge)?;
        }
        Ok(device.as_ref().map_or(Output::Nothing, |device| Output::Gateway(interface(device))))
    }

    /// Whether netattach has created the bridge that the attachment is a port of.
    fn is_own_bridge(&self, at: StepRef) -> bool {
        let outputs = self.progress.outputs().of(at.0);
        outputs.iter().any(|output| matches!(output, Output::Bridge(bridge) if bridge.made || bridge.ours))
    }

    fn change_addresses(&mut self, index: u32, changes: GatewayChanges) -> Result<(), StepError> {
        for other in changes.remove {
            self.host.ensure_address_absent(index, other)?;
        }
        for gateway in changes.add {
            if let Err(refused) = self.host.ensure_address(index, gateway) {
                check_has_v6(self.host.link_by_index(index)?.mtu, &[gateway])?;
                return Err(refused.into());
            }
        }
        Ok(())
    }
}

/// The error for a bridge that the kernel has refused: the kernel may lack the driver, or VLAN filtering.
pub(super) fn not_made(bridge: &spec::Bridge, error: impl Into<StepError>) -> StepError {
    match error.into() {
        StepError::Netlink(source) if source.errno() == Some(rustix::io::Errno::OPNOTSUPP) => {
            let kind = if bridge.vlan_filtering { "bridge with VLAN filtering" } else { "bridge" };
            StepError::Link(LinkError::NoDriver { kind, source })
        }
        other => other,
    }
}

/// Why a bridge does not fit the request.
#[derive(Debug, thiserror::Error)]
pub enum BridgeError {
    /// The bridge does not filter by VLAN, and netattach did not create it.
    #[error(
        "bridge {0} does not filter by VLAN and was not made by netattach: switch it on (vlan_filtering 1), or remove the bridge"
    )]
    NotFiltering(String),
    /// The bridge has another gateway address.
    #[error(
        "bridge {bridge} has the address {present} and {wanted} is needed; forceAddress would replace it"
    )]
    GatewayConflict {
        /// The bridge.
        bridge: String,
        /// The address on the bridge.
        present: IpNet,
        /// The address that is needed.
        wanted: IpNet,
    },
}

impl BridgeError {
    /// The CNI code.
    pub(in crate::attach) fn code(&self) -> u32 {
        match self {
            Self::NotFiltering(_) | Self::GatewayConflict { .. } => code::INVALID_CONFIG,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::error::step_code;
    use crate::netlink;

    fn refused(errno: rustix::io::Errno) -> netlink::Error {
        netlink::Refused { request: "RTM_NEWLINK", errno: errno.raw_os_error(), text: None }.into()
    }

    #[test]
    fn a_kernel_without_bridges_is_told_by_code_50_and_the_drivers_name() {
        for (vlan_filtering, kind) in [(false, "bridge"), (true, "bridge with VLAN filtering")] {
            let bridge = spec::Bridge { name: "br0".to_owned(), vlan_filtering, ..spec::Bridge::default() };
            let error = not_made(&bridge, refused(rustix::io::Errno::OPNOTSUPP));
            let message = format!("the kernel of this node has no driver for links of kind {kind}");
            assert_eq!((step_code(&error), error.to_string()), (50, message));
            // Another refusal is no missing driver.
            let error = not_made(&bridge, refused(rustix::io::Errno::PERM));
            assert_eq!(step_code(&error), code::INTERNAL);
        }
    }
}
