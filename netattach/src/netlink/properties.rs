//! Properties of a link that can be changed at any time.

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkFlags};
use rtnetlink::{LinkMessageBuilder, LinkUnspec};

use super::link::show;
use super::{Error, Handle};
use crate::mac::Mac;
use crate::spec::Properties;

impl Handle {
    /// Reads the properties of a link.
    ///
    /// # Errors
    /// [`Error::NoSuchLink`] if no link has that name.
    pub fn properties(&mut self, name: &str) -> Result<Properties, Error> {
        let index = self.link(name)?.index;
        let answers = self.socket.request(show(LinkUnspec::new_with_index(index)), 0)?;
        let found = answers.into_iter().find_map(observed);
        found.ok_or_else(|| Error::NoSuchLink(name.to_owned()))
    }

    /// Sets these properties of a link, each by a separate request, so that a refusal identifies the
    /// property.
    ///
    /// # Errors
    /// The kernel refuses one.
    pub fn set_properties(&mut self, name: &str, wanted: &Properties) -> Result<(), Error> {
        let index = self.link(name)?.index;
        let link = || LinkUnspec::new_with_index(index);
        let Properties { mac, mtu, promisc, allmulti, queue } = wanted;
        // The order of the reference plugin.
        if let Some(Mac(address)) = mac {
            self.set_address(index, address.to_vec())?;
        }
        if let Some(on) = promisc {
            self.change(link().promiscuous(*on))?;
        }
        if let Some(mtu) = mtu {
            self.set_mtu(index, *mtu)?;
        }
        if let Some(on) = allmulti {
            self.change(link().allmulticast(*on))?;
        }
        if let Some(length) = queue {
            self.set_queue(index, *length)?;
        }
        Ok(())
    }

    /// Sets the Ethernet address; if the driver requires the link to be down, sets it down and up again.
    fn set_address(&mut self, index: u32, address: Vec<u8>) -> Result<(), Error> {
        let link = || -> LinkMessageBuilder<LinkUnspec> { LinkUnspec::new_with_index(index) };
        match self.change(link().address(address.clone())) {
            Err(error) if error.errno() == Some(rustix::io::Errno::BUSY) => {
                self.change(link().down())?;
                let changed = self.change(link().address(address));
                self.change(link().up())?;
                changed
            }
            other => other,
        }
    }
}

fn observed(message: RouteNetlinkMessage) -> Option<Properties> {
    let RouteNetlinkMessage::NewLink(link) = message else { return None };
    let flags = link.header.flags;
    let mut found = Properties {
        promisc: Some(flags.contains(LinkFlags::Promisc)),
        allmulti: Some(flags.contains(LinkFlags::Allmulti)),
        ..Properties::default()
    };
    for attribute in link.attributes {
        match attribute {
            LinkAttribute::Address(bytes) => found.mac = <[u8; 6]>::try_from(bytes).ok().map(Mac),
            LinkAttribute::Mtu(mtu) => found.mtu = Some(mtu),
            LinkAttribute::TxQueueLen(length) => found.queue = Some(length),
            _ => {}
        }
    }
    Some(found)
}
