//! Links: finding them, creating them in place, deleting them.
//!
//! `state` has what the kernel tells of a link, `mode` the words of the kernel and of [`spec`](crate::spec) for modes.
//! `create` creates links, of which those that a pod gets together are requested by `new_link`. `carrier` brings links
//! up, `delete` deletes them.

mod carrier;
mod create;
mod delete;
mod mode;
mod new_link;
mod state;

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkExtentMask};
use rtnetlink::{LinkMessageBuilder, LinkUnspec};

use super::{Error, Handle};
pub use new_link::{Ends, NewLink};
pub use state::LinkState;
pub(super) use state::{BRIDGE_ALIAS, observed};

impl Handle {
    /// The link of that name, or `None`.
    pub fn find_link(&mut self, name: &str) -> Result<Option<LinkState>, Error> {
        match self.socket.request(show(LinkUnspec::new_with_name(name)), 0) {
            Ok(answers) => Ok(answers.into_iter().find_map(observed)),
            Err(error) if error.not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the link of that name. Also returns `None` if the link exists but cannot be described
    /// ([`Error::is_untold`]), which a process in the namespace can cause.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn find_told(&mut self, name: &str) -> Result<Option<LinkState>, Error> {
        match self.find_link(name) {
            Err(error) if error.is_untold() => Ok(None),
            found => found,
        }
    }

    /// The link of that name.
    ///
    /// # Errors
    /// [`Error::NoSuchLink`] if there is none.
    pub fn link(&mut self, name: &str) -> Result<LinkState, Error> {
        self.find_link(name)?.ok_or_else(|| Error::NoSuchLink(name.to_owned()))
    }

    /// The link of that index.
    ///
    /// # Errors
    /// [`Error::NoSuchLink`] if there is none.
    pub fn link_by_index(&mut self, index: u32) -> Result<LinkState, Error> {
        let found = match self.socket.request(show(LinkUnspec::new_with_index(index)), 0) {
            Err(error) if error.not_found() => Vec::new(),
            other => other?,
        };
        found.into_iter().find_map(observed).ok_or_else(|| Error::NoSuchLink(format!("with index {index}")))
    }

    /// All links of the namespace.
    pub fn links(&mut self) -> Result<Vec<LinkState>, Error> {
        Ok(self.all_links()?.into_iter().filter_map(observed).collect())
    }

    /// The bridges of the namespace that netattach has made, each with the number of its ports. The ports by which the
    /// node has gateways in VLANs are not counted: they go with the bridge.
    pub fn own_bridges(&mut self) -> Result<Vec<(LinkState, usize)>, Error> {
        let links = self.links()?;
        let is_port = |link: &&LinkState, bridge: u32| !link.own && link.controller == Some(bridge);
        let ports = |bridge: u32| links.iter().filter(|link| is_port(link, bridge)).count();
        let own = links.iter().filter(|link| link.own_bridge());
        Ok(own.map(|bridge| (bridge.clone(), ports(bridge.index))).collect())
    }
}

/// Requests one link without its statistics: collecting and parsing them would take longer than everything
/// else.
pub(super) fn show(link: LinkMessageBuilder<LinkUnspec>) -> RouteNetlinkMessage {
    let mask = LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]);
    RouteNetlinkMessage::GetLink(link.append_extra_attribute(mask).build())
}
