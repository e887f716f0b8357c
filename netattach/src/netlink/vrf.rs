//! VRFs: making one, its ports, and the addresses that the kernel takes from an interface that joins one.

use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage, AddressScope};
use netlink_packet_route::link::{InfoData, InfoKind, InfoVrf, LinkAttribute};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rtnetlink::{LinkMessageBuilder, LinkUnspec};

use super::link::BRIDGE_ALIAS;
use super::socket::{CREATE, NetlinkRequest, REPLACE};
use super::{Error, Handle, LinkState};

/// IPv6 addresses of an interface, which it loses when it is set down unless a setting of the kernel keeps them.
#[derive(Debug, Default)]
pub struct KeptAddresses(Vec<AddressMessage>);

impl Handle {
    /// Makes a VRF, up, and marks it as made by netattach: it outlasts the attachment that it was made for while it has
    /// other ports.
    ///
    /// # Errors
    /// There is a link of that name ([`Error::already_exists`]), or the kernel refuses.
    pub fn create_vrf(&mut self, name: &str, table: u32) -> Result<LinkState, Error> {
        let create = LinkMessageBuilder::<LinkUnspec>::new_with_info_kind(InfoKind::Vrf)
            .name(name.to_owned())
            .up()
            .set_info_data(InfoData::Vrf(vec![InfoVrf::TableId(table)]));
        let made = self.create_and_show(RouteNetlinkMessage::NewLink(create.build()), name)?;
        let alias = LinkAttribute::IfAlias(BRIDGE_ALIAS.to_owned());
        self.change(LinkUnspec::new_with_index(made.index).append_extra_attribute(alias))?;
        Ok(LinkState { own: true, ..made })
    }

    /// Sets a link down. A link that is gone counts as down.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub fn ensure_down(&mut self, index: u32) -> Result<(), Error> {
        match self.set_down(index) {
            Err(error) if !error.not_found() => Err(error),
            _ => Ok(()),
        }
    }

    /// Takes a link out of what it is a port of. A link that is gone counts as taken out.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub fn ensure_no_controller(&mut self, index: u32) -> Result<(), Error> {
        match self.change(LinkUnspec::new_with_index(index).controller(0)) {
            Err(error) if !error.not_found() => Err(error),
            _ => Ok(()),
        }
    }

    /// Whether a link has ports. More than are read are some.
    ///
    /// # Errors
    /// The kernel cannot be asked.
    pub fn has_ports(&mut self, controller: u32) -> Result<bool, Error> {
        match self.links() {
            Err(error) if error.is_too_many() => Ok(true),
            links => Ok(links?.iter().any(|link| link.controller == Some(controller))),
        }
    }

    /// The IPv6 addresses of an interface that somebody gave it.
    ///
    /// # Errors
    /// The kernel cannot be asked.
    pub fn v6_addresses_to_keep(&mut self, index: u32) -> Result<KeptAddresses, Error> {
        let found = self.list_addresses(AddressFamily::Inet6, index)?.into_iter();
        let kept = found.filter_map(|answer| match answer {
            RouteNetlinkMessage::NewAddress(address)
                if address.header.index == index && address.header.family == AddressFamily::Inet6 =>
            {
                to_keep(address)
            }
            _ => None,
        });
        Ok(KeptAddresses(kept.collect()))
    }

    /// Gives an interface the addresses again that it had. Idempotent.
    ///
    /// # Errors
    /// The kernel refuses one.
    pub fn ensure_kept_addresses(&mut self, kept: KeptAddresses) -> Result<(), Error> {
        let again = |address| NetlinkRequest::new(RouteNetlinkMessage::NewAddress(address), CREATE | REPLACE);
        self.socket.all(kept.0.into_iter().map(again).collect())
    }
}

/// The request that makes an address again; `None`: the kernel makes it itself.
fn to_keep(address: AddressMessage) -> Option<AddressMessage> {
    if address.header.scope == AddressScope::Link {
        return None;
    }
    let told = address.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Flags(flags) => Some(*flags),
        _ => None,
    });
    let told = told.unwrap_or_else(AddressFlags::empty);
    // Without the flag it is one that a router has announced, and announces again.
    if !told.contains(AddressFlags::Permanent) {
        return None;
    }
    let mut again = AddressMessage::default();
    again.header.family = address.header.family;
    again.header.index = address.header.index;
    again.header.prefix_len = address.header.prefix_len;
    again.header.scope = address.header.scope;
    let lasting = AddressFlags::Noprefixroute | AddressFlags::Homeaddress | AddressFlags::Mcautojoin;
    // It was found to be nobody else's before.
    again.attributes = vec![AddressAttribute::Flags((told & lasting) | AddressFlags::Nodad)];
    let lasts = |attribute: &AddressAttribute| {
        matches!(attribute, AddressAttribute::Local(_) | AddressAttribute::Address(_))
    };
    again.attributes.extend(address.attributes.into_iter().filter(lasts));
    Some(again)
}
