//! A bridge that is made again as it was.

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::LinkAttribute;
use rtnetlink::LinkUnspec;

use super::link::BRIDGE_ALIAS;
use super::{Born, Ensured, Error, Handle, LinkState};
use crate::mac::Mac;
use crate::spec;

impl Handle {
    /// Deletes a bridge that netattach has made, with the ports by which the node has gateways in its VLANs.
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

    /// The bridge of that name, up; made if it is missing, with the index and the address of an earlier one: whoever has
    /// learned its address goes on sending to it, and what knows it by its index goes on knowing it. Index 0, and one
    /// that another link has by now: the kernel chooses. `born`: how one is that is made.
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
            // A bridge whose address was configured keeps it, whatever ports it gets.
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
                // The kernel takes no alias with a new link.
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
