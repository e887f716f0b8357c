//! Devices that are given to pods: how they are identified in any namespace, and how they are moved.

use std::os::fd::{AsRawFd, BorrowedFd};

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage, LinkMode, Prop};
use rtnetlink::{LinkMessageBuilder, LinkUnspec};

use super::link::{observed, show};
use super::socket::{CREATE, EXCL, NetlinkRequest, Reply};
use super::xdp_links::of_link;
use super::{Error, Handle, LinkState, XdpPlace, text};
use crate::mac::Mac;
use crate::spec::{Conduct, Reception};

/// A network device, with attributes that identify it in whichever namespace it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceState {
    /// Properties that every link has.
    pub link: LinkState,
    /// This namespace's number for the namespace that [`LinkState::link`] refers to; `None`: this namespace.
    pub link_netns: Option<i32>,
    /// Name of its parent device on the bus, a PCI address for a card (Linux 5.14); virtual devices have
    /// none.
    pub parent: Option<String>,
    /// Its permanent address.
    pub permanent: Option<Mac>,
    /// A text for administrators. For a device in a pod it keeps the name that the device has on the node.
    pub alias: Option<String>,
    /// Alternative names.
    pub other_names: Vec<String>,
    /// Its XDP programs: where each runs, and its kernel id.
    pub xdp: Vec<(XdpPlace, u32)>,
    /// Its settings for sending and receiving.
    pub conduct: Conduct,
    /// Which frames of others it receives.
    pub reception: Reception,
}

impl DeviceState {
    /// Whether its lower device or peer is in the same namespace, so that the device does not disappear
    /// together with another namespace, as the node's end of a pod's link does.
    pub fn stays(&self) -> bool {
        self.link_netns.is_none()
    }

    /// Whether the device is on top of the device with that index in the same namespace, as a macvlan or a
    /// VLAN is. The other end of a pair is not.
    pub fn is_on(&self, index: u32) -> bool {
        let is_other = self.link.index != index;
        self.link.link == Some(index) && self.stays() && is_other && !is_pair(&self.link.kind)
    }
}

/// Whether links of a kind come in pairs, each end of which refers to the other.
pub(super) fn is_pair(kind: &str) -> bool {
    matches!(kind, "veth" | "netkit" | "vxcan")
}

impl Handle {
    /// All devices of the namespace.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn devices(&mut self) -> Result<Vec<DeviceState>, Error> {
        Ok(self.all_links()?.into_iter().filter_map(device).collect())
    }

    /// The device of that index, or `None`.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn device_by_index(&mut self, index: u32) -> Result<Option<DeviceState>, Error> {
        self.one_device(LinkUnspec::new_with_index(index))
    }

    /// The device of that name, or `None`.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn device_named(&mut self, name: &str) -> Result<Option<DeviceState>, Error> {
        self.one_device(LinkUnspec::new_with_name(name))
    }

    /// Returns the devices of these indices, in their order, requested in one datagram; `None` for a device
    /// that does not exist.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn devices_by_index(&mut self, indices: &[u32]) -> Result<Vec<Option<DeviceState>>, Error> {
        let ask = |index: &u32| NetlinkRequest::new(show(LinkUnspec::new_with_index(*index)), 0);
        let replies = self.socket.batch(indices.iter().map(ask).collect())?;
        replies.into_iter().map(shown).collect()
    }

    fn one_device(&mut self, which: LinkMessageBuilder<LinkUnspec>) -> Result<Option<DeviceState>, Error> {
        let replies = self.socket.batch(vec![NetlinkRequest::new(show(which), 0)])?;
        replies.into_iter().next().map_or(Ok(None), shown)
    }

    /// Moves a device to another namespace, with a new name and link group, in one step: only that name has
    /// to be free there. Afterwards the device is down and without addresses.
    ///
    /// # Errors
    /// The name is taken there, or the device cannot be moved.
    pub fn move_device(
        &mut self,
        index: u32,
        to: BorrowedFd<'_>,
        name: &str,
        alias: Option<&str>,
        group: u32,
    ) -> Result<(), Error> {
        let moved = LinkUnspec::new_with_index(index)
            .append_extra_attribute(text::attribute(text::NAME, name))
            .append_extra_attribute(text::attribute(text::ALIAS, alias.unwrap_or_default()))
            .link_group(group)
            .setns_by_fd(to.as_raw_fd())
            .down();
        self.change(moved)
    }

    /// Sets the Ethernet address of a link.
    ///
    /// # Errors
    /// The kernel refuses it, or the card that the VF belongs to.
    pub fn set_mac(&mut self, index: u32, mac: Mac) -> Result<(), Error> {
        self.change(LinkUnspec::new_with_index(index).address(mac.0.to_vec()))
    }

    /// As [`Handle::set_mac`]. The same datagram requests the resulting state of the device; `None`: the
    /// device is gone.
    ///
    /// # Errors
    /// As of [`Handle::set_mac`]; or the kernel does not answer.
    pub fn set_mac_and_show(&mut self, index: u32, mac: Mac) -> Result<Option<DeviceState>, Error> {
        let set = LinkUnspec::new_with_index(index).address(mac.0.to_vec()).build();
        let requests = [RouteNetlinkMessage::SetLink(set), show(LinkUnspec::new_with_index(index))];
        let requests = requests.map(|message| NetlinkRequest::new(message, 0));
        let mut replies = self.socket.batch(requests.into())?.into_iter();
        replies.next().transpose()?;
        replies.next().map_or(Ok(None), shown)
    }

    /// Sets a link down.
    ///
    /// # Errors
    /// There is no such link.
    pub fn set_down(&mut self, index: u32) -> Result<(), Error> {
        self.change(LinkUnspec::new_with_index(index).down())
    }

    /// Switches promiscuous mode and the reception of all multicast frames on or off. What other parts of the kernel
    /// need of either stays on.
    ///
    /// # Errors
    /// There is no such link.
    pub fn set_reception(&mut self, index: u32, reception: Reception) -> Result<(), Error> {
        let Reception { promiscuous, all_multicast } = reception;
        self.change(LinkUnspec::new_with_index(index).promiscuous(promiscuous).allmulticast(all_multicast))
    }

    /// Sets a device's settings for sending and receiving, except its queue length.
    ///
    /// # Errors
    /// There is no such link, or the link has no Ethernet addresses and a broadcast address was requested.
    pub fn set_conduct(&mut self, index: u32, conduct: &Conduct) -> Result<(), Error> {
        let Conduct { broadcast, arp, multicast, mode, queue: _ } = *conduct;
        let mode = LinkAttribute::Mode(LinkMode::from(mode));
        let set = LinkUnspec::new_with_index(index).arp(arp).multicast(multicast);
        let set = set.append_extra_attribute(mode);
        self.change(match broadcast {
            Some(Mac(address)) => set.broadcast(address.to_vec()),
            None => set,
        })
    }

    /// Sets the maximum number of frames that wait to be sent.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub fn set_queue(&mut self, index: u32, length: u32) -> Result<(), Error> {
        self.change(
            LinkUnspec::new_with_index(index).append_extra_attribute(LinkAttribute::TxQueueLen(length)),
        )
    }

    /// Sets the alias, a text for administrators; empty: no alias.
    ///
    /// # Errors
    /// There is no such link.
    pub fn set_alias(&mut self, index: u32, alias: &str) -> Result<(), Error> {
        let alias = text::attribute(text::ALIAS, alias);
        self.change(LinkUnspec::new_with_index(index).append_extra_attribute(alias))
    }

    /// Sets the link group.
    ///
    /// # Errors
    /// There is no such link.
    pub fn set_group(&mut self, index: u32, group: u32) -> Result<(), Error> {
        self.change(LinkUnspec::new_with_index(index).link_group(group))
    }

    /// Removes alternative names of a link (Linux 5.5).
    ///
    /// # Errors
    /// The link has no such name.
    pub fn remove_other_names(&mut self, index: u32, names: &[String]) -> Result<(), Error> {
        self.other_names(index, names, RouteNetlinkMessage::DelLinkProp, 0)
    }

    /// Adds alternative names to a link (Linux 5.5).
    ///
    /// # Errors
    /// One of the names is taken.
    pub fn add_other_names(&mut self, index: u32, names: &[String]) -> Result<(), Error> {
        self.other_names(index, names, RouteNetlinkMessage::NewLinkProp, CREATE | EXCL)
    }

    fn other_names(
        &mut self,
        index: u32,
        names: &[String],
        verb: fn(LinkMessage) -> RouteNetlinkMessage,
        flags: u16,
    ) -> Result<(), Error> {
        let request = |name: &String| {
            let mut message = LinkMessage::default();
            message.header.index = index;
            message.attributes.push(LinkAttribute::PropList(vec![text::property(name)]));
            NetlinkRequest::new(verb(message), flags)
        };
        self.socket.all(names.iter().map(request).collect())
    }
}

/// The device that an answer describes; `None`: there is no such device.
pub(super) fn shown(reply: Reply) -> Result<Option<DeviceState>, Error> {
    match reply.map_err(Error::from) {
        Err(error) if error.not_found() => Ok(None),
        found => Ok(found?.into_iter().find_map(device)),
    }
}

fn device(message: RouteNetlinkMessage) -> Option<DeviceState> {
    let RouteNetlinkMessage::NewLink(shown) = &message else { return None };
    let (mut link_netns, mut parent, mut permanent, mut alias) = (None, None, None, None);
    let (mut other_names, mut xdp) = (Vec::new(), Vec::new());
    let has = |flag| shown.header.flags.contains(flag);
    let (arp, multicast) = (!has(LinkFlags::Noarp), has(LinkFlags::Multicast));
    let mut conduct = Conduct { broadcast: None, arp, multicast, mode: 0, queue: 0 };
    // Of these two the kernel shows what was switched on explicitly (`dev_get_flags`).
    let reception =
        Reception { promiscuous: has(LinkFlags::Promisc), all_multicast: has(LinkFlags::Allmulti) };
    for attribute in &shown.attributes {
        match attribute {
            LinkAttribute::LinkNetNsId(number) => link_netns = Some(*number),
            LinkAttribute::ParentDevName(name) => parent = Some(name.clone()),
            LinkAttribute::PermAddress(bytes) => permanent = ethernet(bytes),
            LinkAttribute::Broadcast(bytes) => conduct.broadcast = ethernet(bytes),
            LinkAttribute::Mode(mode) => conduct.mode = u8::from(*mode),
            LinkAttribute::TxQueueLen(length) => conduct.queue = *length,
            LinkAttribute::IfAlias(text) => alias = Some(text.clone()).filter(|text| !text.is_empty()),
            LinkAttribute::PropList(all) => other_names.extend(all.iter().filter_map(|one| match one {
                Prop::AltIfName(name) => Some(name.clone()),
                _ => None,
            })),
            LinkAttribute::Xdp(told) => xdp.extend(of_link(told)),
            _ => {}
        }
    }
    let link = observed(message)?;
    Some(DeviceState { link, link_netns, parent, permanent, alias, other_names, xdp, conduct, reception })
}

/// `None`: the link has addresses of another length.
fn ethernet(address: &[u8]) -> Option<Mac> {
    <[u8; 6]>::try_from(address).ok().map(Mac)
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::link::LinkXdp;

    use super::*;
    use crate::netns::Netns;
    use crate::spec::Bridge;

    #[test]
    fn of_devices_asked_for_together_each_is_shown_or_absent() {
        let netns = Netns::private().unwrap();
        let mut handle = Handle::open_in(&netns).unwrap();
        let bridge = |name: &str| {
            let name = name.to_owned();
            Bridge { name, mtu: None, promiscuous: false, vlan_filtering: false }
        };
        let [a, b] = ["a", "b"].map(|name| handle.ensure_bridge(&bridge(name)).unwrap().link.index);
        let found = handle.devices_by_index(&[b, 4000, a]).unwrap();
        let names: Vec<_> = found.iter().map(|it| it.as_ref().map(|it| &*it.link.name)).collect();
        assert_eq!(names, [Some("b"), None, Some("a")]);
        assert_eq!(handle.devices_by_index(&[]).unwrap(), []);
    }

    #[test]
    fn a_device_is_shown_with_the_address_that_it_has_just_been_given() {
        let netns = Netns::private().unwrap();
        let mut handle = Handle::open_in(&netns).unwrap();
        let bridge = Bridge { name: "a".to_owned(), mtu: None, promiscuous: false, vlan_filtering: false };
        let index = handle.ensure_bridge(&bridge).unwrap().link.index;
        let mac = Mac([2, 0, 0, 0, 0, 7]);
        let found = handle.set_mac_and_show(index, mac).unwrap().unwrap();
        assert_eq!((found.link.index, found.link.mac), (index, Some(mac)));
        // The address of a group cannot be a device's address.
        let refused = handle.set_mac_and_show(index, Mac([1, 0, 0, 0, 0, 7])).unwrap_err();
        assert_eq!(refused.errno(), Some(rustix::io::Errno::ADDRNOTAVAIL), "{refused}");
        assert!(handle.set_mac_and_show(4000, mac).unwrap_err().not_found());
    }

    /// Rows: HDV-conduct.
    #[test]
    fn a_device_sends_and_receives_as_it_was_set_to() {
        let netns = Netns::private().unwrap();
        let mut handle = Handle::open_in(&netns).unwrap();
        let bridge = Bridge { name: "a".to_owned(), mtu: None, promiscuous: false, vlan_filtering: false };
        let index = handle.ensure_bridge(&bridge).unwrap().link.index;
        let mut conduct = || handle.device_by_index(index).unwrap().unwrap().conduct;
        let usual =
            Conduct { broadcast: Some(Mac([0xff; 6])), arp: true, multicast: true, mode: 0, queue: 1000 };
        assert_eq!(conduct(), usual);
        let broadcast = Some(Mac([2, 0, 0, 0, 0, 0x99]));
        let other = Conduct { broadcast, arp: false, multicast: false, mode: 1, queue: 7 };
        let mut second = Handle::open_in(&netns).unwrap();
        second.set_conduct(index, &other).unwrap();
        assert_eq!(conduct(), Conduct { queue: 1000, ..other });
        second.set_queue(index, 7).unwrap();
        assert_eq!(conduct(), other);
        second.set_conduct(index, &usual).unwrap();
        assert_eq!(conduct(), Conduct { queue: 7, ..usual });
    }

    /// Rows: HDV-programs.
    #[test]
    fn a_device_is_shown_with_its_xdp_programs() {
        let shown = |attributes: Vec<LinkAttribute>| {
            let mut message = LinkMessage::default();
            message.attributes.extend(attributes);
            device(RouteNetlinkMessage::NewLink(message)).unwrap().xdp
        };
        let programs = vec![LinkXdp::ProgId(7), LinkXdp::SkbProgId(7), LinkXdp::DrvProgId(8)];
        let found = shown(vec![LinkAttribute::Xdp(programs), LinkAttribute::Mtu(1500)]);
        assert_eq!(found, [(XdpPlace::Kernel, 7), (XdpPlace::Driver, 8)]);
        assert_eq!(shown(vec![LinkAttribute::Mtu(1500)]), []);
    }
}
