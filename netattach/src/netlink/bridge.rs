//! Bridges: the one that an attachment needs, and recreation and deletion of those that netattach has made.

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::LinkAttribute;
use rtnetlink::{LinkBridge, LinkMessageBuilder, LinkUnspec};

use super::link::BRIDGE_ALIAS;
use super::{Error, Handle, LinkState};
use crate::mac::Mac;
use crate::spec;

/// The object that `ensure` found or created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ensured {
    /// The link.
    pub link: LinkState,
    /// Whether this call created it.
    pub created: bool,
}

/// Administrative state of a new bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Born {
    /// Up.
    Up,
    /// Down, until further settings have been made.
    Down,
}

impl Born {
    /// Begins a request that creates a bridge.
    fn bridge(self, name: &str) -> LinkMessageBuilder<LinkBridge> {
        match self {
            Self::Up => LinkBridge::new(name),
            Self::Down => LinkMessageBuilder::<LinkBridge>::new(name),
        }
    }
}

impl Handle {
    /// Returns the bridge of that name, up; creates a missing one. Leaves the properties of an existing
    /// bridge unchanged except `promiscuous`, which is switched on if requested.
    ///
    /// # Errors
    /// [`Error::WrongKind`] if another kind of link has that name.
    pub fn ensure_bridge(&mut self, bridge: &spec::Bridge) -> Result<Ensured, Error> {
        let present = self.find_link(&bridge.name)?;
        self.ensure_bridge_beside(bridge, present, Born::Up)
    }

    /// As [`Handle::ensure_bridge`], for a caller that has already looked up the link of that name. `born`:
    /// state of a created bridge.
    pub fn ensure_bridge_beside(
        &mut self,
        bridge: &spec::Bridge,
        present: Option<LinkState>,
        born: Born,
    ) -> Result<Ensured, Error> {
        if let Some(link) = present {
            return self.adopt_bridge(link, bridge).map(|link| Ensured { link, created: false });
        }
        let mut create = born.bridge(&bridge.name);
        if let Some(mtu) = bridge.mtu {
            create = create.mtu(mtu);
        }
        if bridge.promiscuous {
            create = create.promiscuous(true);
        }
        if bridge.vlan_filtering {
            create = create.vlan_filtering(true);
        }
        let create = RouteNetlinkMessage::NewLink(create.build());
        match self.create_and_show(create, &bridge.name) {
            Ok(link) => {
                // A bridge without a configured address changes its address with its ports. Setting the address
                // that the bridge already has makes it permanent.
                if let Some(mac) = link.mac {
                    let pin = LinkUnspec::new_with_index(link.index).address(mac.0.to_vec());
                    let mark = LinkAttribute::IfAlias(BRIDGE_ALIAS.to_owned());
                    let set = pin.append_extra_attribute(mark).build();
                    self.socket.request(RouteNetlinkMessage::SetLink(set), 0)?;
                }
                Ok(Ensured { link, created: true })
            }
            // Another attachment created it first.
            Err(error) if error.already_exists() => {
                let link = self.link(&bridge.name)?;
                self.adopt_bridge(link, bridge).map(|link| Ensured { link, created: false })
            }
            Err(error) => Err(error),
        }
    }

    fn adopt_bridge(&mut self, mut link: LinkState, bridge: &spec::Bridge) -> Result<LinkState, Error> {
        if link.kind != "bridge" {
            let actual =
                if link.kind.is_empty() { "a device".to_owned() } else { format!("a {}", link.kind) };
            return Err(Error::WrongKind { name: link.name, wanted: "a bridge", actual });
        }
        if !link.up || (bridge.promiscuous && !link.promiscuous) {
            let mut set = LinkUnspec::new_with_index(link.index).up();
            if bridge.promiscuous {
                set = set.promiscuous(true);
            }
            self.socket.request(RouteNetlinkMessage::SetLink(set.build()), 0)?;
            link.up = true;
            link.promiscuous |= bridge.promiscuous;
        }
        Ok(link)
    }

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
