//! Changes of existing links.

use netlink_packet_route::RouteNetlinkMessage;
use rtnetlink::{LinkMessageBuilder, LinkUnspec};

use super::{Error, Handle, text};

impl Handle {
    /// Renames a link. If the kernel requires it (before Linux 6.2), a link that is up is set down and up
    /// again.
    ///
    /// # Errors
    /// Another link has the name, or there is no such link.
    pub fn rename(&mut self, index: u32, name: &str) -> Result<(), Error> {
        let renamed =
            || LinkUnspec::new_with_index(index).append_extra_attribute(text::attribute(text::NAME, name));
        match self.change(renamed()) {
            Err(error) if error.errno() == Some(rustix::io::Errno::BUSY) => {
                self.change(LinkUnspec::new_with_index(index).down())?;
                self.change(renamed())?;
                self.change(LinkUnspec::new_with_index(index).up())
            }
            other => other,
        }
    }

    /// Sets the MTU of a link, in bytes.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub fn set_mtu(&mut self, index: u32, mtu: u32) -> Result<(), Error> {
        self.change(LinkUnspec::new_with_index(index).mtu(mtu))
    }

    /// Makes a link a port of a bridge or VRF.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub fn set_controller(&mut self, index: u32, controller: u32) -> Result<(), Error> {
        self.change(LinkUnspec::new_with_index(index).controller(controller))
    }

    pub(super) fn change(&mut self, link: LinkMessageBuilder<LinkUnspec>) -> Result<(), Error> {
        self.socket.request(RouteNetlinkMessage::SetLink(link.build()), 0).map(drop)
    }
}
