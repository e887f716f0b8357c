//! Recreation and deletion of bridges that netattach has made.

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::LinkAttribute;
use rtnetlink::LinkUnspec;

use super::link::BRIDGE_ALIAS;
use super::{Born, Ensured, Error, Handle, LinkState};
use crate::mac::Mac;
use crate::spec;

impl Handle {
    /// Deletes a bridge that netattach has made, with the ports that hold the node's gateways in its VLANs.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn ensure_own_bridge_absent(&mut self, bridge: &LinkState) -> Result<(), Error> {
        let ports =
            self.links()?.into_iter().filter(|link| link.own && link.controller == Some(bridge.index));
        for port in ports {
            self.ensure_link_absent(&port.name)?;
        }
        self.ensure_link_absent(&bridge.name)
    }

    /// Returns the bridge of that name, up. Creates a missing bridge with the index and the address of an
    /// earlier one, so that stations that know its address keep reaching it, and references to its index stay
    /// valid. The kernel chooses the index if it is 0 or meanwhile belongs to another link. `born`: state of
    /// a created bridge.
    ///
    /// # Errors
    /// As [`Handle::ensure_bridge`].
    pub fn restore_bridge(
        &mut self,
        bridge: &spec::Bridge,
        index: u32,
        mac: Option<Mac>,
        born: Born,
    ) -> Result<Ensured, Error> {
        let mut create = born.bridge(&bridge.name);
        if let Some(mac) = mac {
            // A bridge with a configured address keeps the address when ports are added.
            create = create.address(mac.0.to_vec());
        }
        if let Some(mtu) = bridge.mtu {
            create = create.mtu(mtu);
        }
        if bridge.promiscuous {
            create = create.promiscuous(true);
        }
        if bridge.vlan_filtering {
            create = create.vlan_filtering(true);
        }
        let mut create = create.build();
        create.header.index = index;
        match self.create_and_show(RouteNetlinkMessage::NewLink(create), &bridge.name) {
            Ok(link) => {
                // The kernel ignores an alias in the request that creates a link.
                let mark = LinkAttribute::IfAlias(BRIDGE_ALIAS.to_owned());
                let set = LinkUnspec::new_with_index(link.index).append_extra_attribute(mark).build();
                self.socket.request(RouteNetlinkMessage::SetLink(set), 0)?;
                Ok(Ensured { link, created: true })
            }
            Err(error) if error.is_taken() => {
                let present = self.find_link(&bridge.name)?;
                self.ensure_bridge_beside(bridge, present, born)
            }
            Err(error) => Err(error),
        }
    }
}
