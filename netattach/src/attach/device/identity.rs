//! Identifies a claimed device among all others, in whichever namespace it is. Pure.
//!
//! A pod that administrates its network can choose names, aliases and Ethernet addresses, including those that its
//! devices had on the node, so none of these identifies a device. A card is identified by its parent device and its
//! permanent address, which the kernel keeps. Any other device has neither: it is identified by its index, and by its
//! peer or the device beneath it on the node. A pod can create links with a peer or parent on the node, using the id
//! of the node's namespace in the pod's, if it has CAP_NET_ADMIN in the node's user namespace, that is, if it has no
//! user namespace of its own: such a pod can have another link moved to the node in place of such a device.

use crate::netlink::DeviceState;
use crate::step::Home;

/// What is known of a device in a pod beyond its former state on the node.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Inside {
    /// Its index there; `None`: it may have been moved, and the agent was killed before it recorded the index.
    pub index: Option<u32>,
    /// Whether its peer or the device beneath is still on the node.
    pub leads_home: bool,
    /// The id of the node's namespace in the pod's namespace, if it has one.
    pub node: Option<i32>,
}

/// Whether the kernel keeps what identifies the device.
fn is_card(home: &Home) -> bool {
    home.parent.is_some() || home.permanent.is_some()
}

/// Returns the device among those of the node's namespace.
pub(super) fn at_home<'d>(home: &Home, devices: &'d [DeviceState]) -> Option<&'d DeviceState> {
    if is_card(home) {
        return card(home, devices);
    }
    let others = devices.iter().filter(|it| is_of_its_kind(home, it));
    only(others.filter(|it| {
        let has_other_end = home.link.is_some() && it.link.link == home.link;
        let is_named = it.link.name == home.name && (home.link.is_none() || has_other_end);
        is_named || (it.link.index == home.index && has_other_end)
    }))
}

/// Returns the device among those of a pod.
pub(super) fn in_pod<'d>(home: &Home, devices: &'d [DeviceState], inside: Inside) -> Option<&'d DeviceState> {
    if is_card(home) {
        return card(home, devices);
    }
    let others = devices.iter().filter(|it| is_of_its_kind(home, it));
    only(others.filter(|it| {
        let is_it = match inside.index {
            Some(index) => it.link.index == index,
            None => it.alias.as_deref() == Some(&*home.name),
        };
        let leads_home =
            || it.link.link == home.link && it.link_netns.is_some() && it.link_netns == inside.node;
        is_it && (!inside.leads_home || leads_home())
    }))
}

/// Finds a card by its permanent address, among the devices with its parent. Some drivers report the last configured
/// address as the permanent one: then the card is identified as the only device of its parent, if it was the only one
/// when it was claimed.
fn card<'d>(home: &Home, devices: &'d [DeviceState]) -> Option<&'d DeviceState> {
    let (parent, permanent) = (&home.parent, home.permanent);
    let related = || devices.iter().filter(|it| it.parent == *parent && it.link.kind == home.kind);
    let has_address = |it: &&DeviceState| permanent.is_some() && it.permanent == permanent;
    match related().any(|it| has_address(&it)) {
        true => only(related().filter(has_address)),
        false if parent.is_some() && !home.among => only(related()),
        false => None,
    }
}

/// Whether a device has the kind of a claimed device that is not a card.
fn is_of_its_kind(home: &Home, found: &DeviceState) -> bool {
    found.parent.is_none() && found.permanent.is_none() && found.link.kind == home.kind
}

/// Returns the only match; several matches identify no device.
fn only<'d>(mut found: impl Iterator<Item = &'d DeviceState>) -> Option<&'d DeviceState> {
    found.next().filter(|_| found.next().is_none())
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::take_device;
    use super::*;
    use crate::mac::Mac;
    use crate::netlink::LinkState;
    use crate::spec::{Conduct, Reception};

    pub(in crate::attach) const FUNCTION: &str = "0000:03:00.0";

    pub(in crate::attach) fn mac(last: u8) -> Option<Mac> {
        Some(Mac([2, 0, 0, 0, 0, last]))
    }

    pub(in crate::attach) fn device(
        index: u32,
        name: &str,
        (kind, link): (&str, Option<u32>),
    ) -> DeviceState {
        let link = LinkState {
            index,
            name: name.to_owned(),
            kind: kind.to_owned(),
            mac: None,
            mtu: 1500,
            up: false,
            promiscuous: false,
            controller: None,
            hairpin: None,
            isolated: false,
            link,
            mode: None,
            group: 0,
            own: false,
            table: None,
        };
        DeviceState {
            link,
            link_netns: None,
            parent: None,
            permanent: None,
            alias: None,
            other_names: Vec::new(),
            xdp: Vec::new(),
            conduct: Conduct { broadcast: None, arp: true, multicast: true, mode: 0, queue: 1000 },
            reception: Reception::default(),
        }
    }

    /// An interface of the function.
    pub(in crate::attach) fn port(index: u32, name: &str, permanent: Option<Mac>) -> DeviceState {
        DeviceState { parent: Some(FUNCTION.to_owned()), permanent, ..device(index, name, ("", None)) }
    }

    /// A veth in a pod whose other end is on the node, which has that number in the pod.
    fn end(index: u32, name: &str, other: u32, netns: i32) -> DeviceState {
        DeviceState { link_netns: Some(netns), ..device(index, name, ("veth", Some(other))) }
    }

    fn home(of: &DeviceState) -> Home {
        take_device::home(of.clone(), false)
    }

    fn index(found: Option<&DeviceState>) -> Option<u32> {
        found.map(|found| found.link.index)
    }

    #[test]
    fn a_card_is_known_by_what_the_kernel_keeps_whatever_it_is_called() {
        let first = port(4, "eth1", mac(1));
        let among = Home { among: true, ..home(&first) };
        // Its pod has swapped the names of two, and their aliases.
        let swapped = [
            DeviceState { alias: Some("eth1".to_owned()), ..port(9, "eth1", mac(2)) },
            DeviceState { alias: Some("eth2".to_owned()), ..port(8, "eth2", mac(1)) },
        ];
        assert_eq!(index(in_pod(&among, &swapped, Inside::default())), Some(8));
        assert_eq!(index(at_home(&among, &swapped)), Some(8));
        // The other interface of the function is not it.
        assert_eq!(at_home(&among, &swapped[..1]), None);
        // The address that the driver tells may change where there is no other.
        assert_eq!(index(at_home(&home(&first), &[port(8, "net1", mac(7))])), Some(8));
        assert_eq!(at_home(&home(&first), &[port(8, "net1", mac(7)), port(9, "net2", mac(8))]), None);
        // Two that have one address are not told apart.
        assert_eq!(at_home(&among, &[port(8, "eth1", mac(1)), port(9, "eth2", mac(1))]), None);
        let alone = Home { parent: None, ..home(&first) };
        assert_eq!(at_home(&alone, &[device(4, "eth1", ("", None))]), None);
    }

    #[test]
    fn any_other_device_is_known_by_its_index_and_its_other_end() {
        let card = home(&device(4, "card0", ("veth", Some(5))));
        let inside = Inside { index: Some(7), leads_home: true, node: Some(0) };
        let made = end(7, "net1", 5, 0);
        let look = |devices: &[DeviceState], inside| index(in_pod(&card, devices, inside));
        assert_eq!(look(&[end(8, "net1", 6, 0), end(7, "net2", 5, 0)], inside), Some(7));
        // A link that the pod has created in its place.
        for forged in [
            end(8, "net1", 5, 0),
            end(7, "net1", 6, 0),
            end(7, "net1", 5, 1),
            device(7, "net1", ("veth", Some(5))),
            device(7, "net1", ("bridge", None)),
        ] {
            let named = DeviceState { alias: Some("card0".to_owned()), ..forged };
            assert_eq!(look(std::slice::from_ref(&named), inside), None, "{named:?}");
        }
        // As what it was moved is not known: its alias says, and it leads home.
        let unknown = Inside { index: None, ..inside };
        let aliased = DeviceState { alias: Some("card0".to_owned()), ..made.clone() };
        assert_eq!(look(&[aliased.clone(), made.clone()], unknown), Some(7));
        let other = DeviceState { alias: Some("card0".to_owned()), ..end(8, "net2", 6, 0) };
        assert_eq!(look(&[aliased, other], unknown), Some(7));
        // Its other end is in another namespace now.
        let elsewhere = Inside { index: Some(7), ..Inside::default() };
        assert_eq!(look(&[end(7, "net1", 3, 2)], elsewhere), Some(7));
    }

    #[test]
    fn a_device_at_home_is_not_taken_for_another_that_has_its_name_or_index() {
        let card = home(&device(4, "card0", ("veth", Some(5))));
        let look = |found: DeviceState| index(at_home(&card, &[found]));
        assert_eq!(look(device(4, "other", ("veth", Some(5)))), Some(4));
        assert_eq!(look(device(9, "card0", ("veth", Some(5)))), Some(9));
        assert_eq!(look(device(9, "card0", ("veth", Some(6)))), None);
        assert_eq!(look(device(4, "other", ("veth", Some(6)))), None);
        assert_eq!(look(device(4, "card0", ("bridge", Some(5)))), None);
        let plain = home(&device(4, "tun0", ("tun", None)));
        assert_eq!(index(at_home(&plain, &[device(9, "tun0", ("tun", None))])), Some(9));
        assert_eq!(at_home(&plain, &[device(4, "tun1", ("tun", None))]), None);
    }
}
