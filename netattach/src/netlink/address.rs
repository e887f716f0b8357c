//! Addresses of links, and the complete configuration of an interface in one datagram.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage, AddressScope};
use netlink_packet_route::link::{
    AfSpecInet, AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InetDevConf, LinkAttribute,
};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rtnetlink::{AddressMessageBuilder, LinkMessageBuilder, LinkUnspec};
use rustix::io::Errno;

use super::answer::u32_at;
use super::nft::attribute_in;
use super::route::route_message;
use super::socket::{APPEND, CREATE, NetlinkRequest, REPLACE};
use super::{Error, Handle};
use crate::mac::Mac;
use crate::spec::Addressing;

/// Length of `struct ifaddrmsg`, and offset of the link's index in it.
const ADDRESS_HEADER: usize = 8;
const LINK_AT: usize = 4;
/// `IFA_ADDRESS` and `IFA_LOCAL` of `linux/if_addr.h`: on a point-to-point link the first is the peer's.
pub(super) const ADDRESS: u16 = 1;
pub(super) const LOCAL: u16 = 2;

/// Time between two checks of addresses whose duplicate address detection is running.
const DETECTION_POLL: Duration = Duration::from_millis(10);

impl Handle {
    /// Adds the addresses, brings the link up and installs the routes, in one datagram.
    ///
    /// IPv6 addresses skip duplicate address detection (`IFA_F_NODAD`): the allocator guarantees that they are unique,
    /// and detection would delay the pod by a second. A route to a destination that already has one becomes another
    /// next hop of it. Repeating the call changes nothing.
    pub fn configure(&mut self, index: u32, addressing: &Addressing) -> Result<(), Error> {
        self.configure_all(&[(index, addressing)])?.into_iter().collect()
    }

    /// As [`Handle::configure`], for several links in one datagram. Returns the outcome for each; a refusal
    /// for one link does not prevent the configuration of the others.
    ///
    /// # Errors
    /// The socket failed: some of the changes may have been made.
    pub fn configure_all(&mut self, links: &[(u32, &Addressing)]) -> Result<Vec<Result<(), Error>>, Error> {
        let each: Vec<_> = links.iter().map(|(index, addressing)| requests(*index, addressing)).collect();
        let counts: Vec<usize> = each.iter().map(Vec::len).collect();
        let mut replies = self.socket.batch(each.into_iter().flatten().collect())?.into_iter();
        let outcome = |((_, addressing), count): (&(u32, &Addressing), usize)| {
            // Addresses are replaced, so only a route can exist already, and then it is identical. A link
            // without IPv6 gets no link-local address anyway.
            let harmless: &[Errno] = match addressing.no_link_local {
                true => &[Errno::EXIST, Errno::AFNOSUPPORT],
                false => &[Errno::EXIST],
            };
            // All replies of a link are consumed, so that the next reply belongs to the next link.
            let own: Vec<_> = replies.by_ref().take(count).collect();
            let refused = own.into_iter().filter_map(Result::err);
            let mut grave = refused.filter(|it| !harmless.iter().any(|one| one.raw_os_error() == it.errno));
            grave.next().map_or(Ok(()), |refused| Err(refused.into()))
        };
        Ok(links.iter().zip(counts).map(outcome).collect())
    }

    /// Makes a link that is up announce its addresses: IPv4 addresses if `arp_notify` is on, IPv6 addresses
    /// if `ndisc_notify` is. To trigger this, the link's Ethernet address is set to its present value
    /// (`NETDEV_CHANGEADDR` in `net/ipv4/devinet.c` and `net/ipv6/ndisc.c`), which empties the link's
    /// neighbour table.
    pub fn announce_all(&mut self, index: u32, mac: Mac) -> Result<(), Error> {
        let same = LinkUnspec::new_with_index(index).address(mac.0.to_vec()).build();
        self.socket.request(RouteNetlinkMessage::SetLink(same), 0).map(drop)
    }

    /// Makes a link that is up announce these IPv4 addresses of its own, and makes it announce its addresses
    /// whenever it comes up again (`arp_notify`). The kernel is asked to resolve the address (`NTF_USE`) and
    /// broadcasts an ARP request. Since the sender is the first address of that subnet, which is the address
    /// itself, this is a gratuitous ARP request (RFC 5227, section 3). The neighbour entry that waits for an
    /// answer is deleted.
    ///
    /// # Errors
    /// [`Error::not_found`]: the link is gone.
    pub fn announce(&mut self, index: u32, addresses: &[Ipv4Addr]) -> Result<(), Error> {
        let mut requests = vec![NetlinkRequest::new(arp_notify(index), 0)];
        for address in addresses {
            let mut entry = NeighbourMessage::default();
            entry.header.family = AddressFamily::Inet;
            entry.header.ifindex = index;
            entry.header.flags = NeighbourFlags::Use;
            entry.attributes.push(NeighbourAttribute::Destination(NeighbourAddress::Inet(*address)));
            requests.push(NetlinkRequest::new(RouteNetlinkMessage::NewNeighbour(entry.clone()), CREATE));
            entry.header.flags = NeighbourFlags::empty();
            requests.push(NetlinkRequest::new(RouteNetlinkMessage::DelNeighbour(entry), 0));
        }
        // Another process may have cleared the table meanwhile.
        self.socket.all_but(requests, &[Errno::NOENT])
    }

    /// Waits until the link's IPv6 addresses may be used, for at most `patience`. Returns an address that
    /// another host has.
    ///
    /// # Errors
    /// A request to the kernel failed, or duplicate address detection takes longer.
    pub fn await_unique(&mut self, index: u32, patience: Duration) -> Result<Option<IpAddr>, Error> {
        let deadline = Instant::now() + patience;
        loop {
            let found = self.list_addresses(AddressFamily::default(), index)?;
            let with = |flag: AddressFlags| {
                found.iter().find_map(|message| match message {
                    RouteNetlinkMessage::NewAddress(address) if address.header.index == index => {
                        flags(address).contains(flag).then(|| observed(message.clone(), None)).flatten()
                    }
                    _ => None,
                })
            };
            if let Some(taken) = with(AddressFlags::Dadfailed) {
                return Ok(Some(taken.addr()));
            }
            let Some(tentative) = with(AddressFlags::Tentative) else { return Ok(None) };
            if Instant::now() > deadline {
                return Err(Error::Tentative(tentative.addr()));
            }
            std::thread::sleep(DETECTION_POLL);
        }
    }

    /// Adds this address to the link. Idempotent.
    pub fn ensure_address(&mut self, index: u32, address: IpNet) -> Result<(), Error> {
        let message = RouteNetlinkMessage::NewAddress(address_message(index, address));
        self.socket.request(message, CREATE | REPLACE)?;
        Ok(())
    }

    /// Removes this address from the link. Idempotent.
    pub fn ensure_address_absent(&mut self, index: u32, address: IpNet) -> Result<(), Error> {
        let message = RouteNetlinkMessage::DelAddress(address_message(index, address));
        match self.socket.request(message, 0) {
            Err(error) if error.errno() != Some(rustix::io::Errno::ADDRNOTAVAIL) && !error.not_found() => {
                Err(error)
            }
            _ => Ok(()),
        }
    }

    /// The addresses of all links, host bits kept.
    pub fn all_addresses(&mut self) -> Result<Vec<IpNet>, Error> {
        let found = self.socket.dump(RouteNetlinkMessage::GetAddress(AddressMessage::default()))?;
        Ok(found.into_iter().filter_map(|message| observed(message, None)).collect())
    }

    /// The addresses of all links, each with the index of its link, host bits kept.
    pub fn addresses_by_link(&mut self) -> Result<Vec<(u32, IpNet)>, Error> {
        self.socket.scan(RouteNetlinkMessage::GetAddress(AddressMessage::default()), by_link)
    }

    /// The addresses of a link, host bits kept. A link that is gone has none.
    pub fn addresses(&mut self, index: u32) -> Result<Vec<IpNet>, Error> {
        let found = self.list_addresses(AddressFamily::default(), index)?;
        Ok(found.into_iter().filter_map(|message| observed(message, Some(index))).collect())
    }

    /// The kernel's messages about a link's addresses; none for a link that is gone.
    pub(super) fn list_addresses(
        &mut self,
        family: AddressFamily,
        index: u32,
    ) -> Result<Vec<RouteNetlinkMessage>, Error> {
        let mut all = AddressMessage::default();
        all.header.family = family;
        all.header.index = index;
        match self.socket.dump(RouteNetlinkMessage::GetAddress(all)) {
            Err(error) if error.not_found() => Ok(Vec::new()),
            found => found,
        }
    }
}

/// The requests that configure a link: see [`Handle::configure`].
fn requests(index: u32, addressing: &Addressing) -> Vec<NetlinkRequest> {
    let mut requests = Vec::with_capacity(addressing.addresses.len() + addressing.routes.len() + 2);
    if addressing.announce_v4 {
        requests.push(NetlinkRequest::new(arp_notify(index), 0));
    }
    if addressing.no_link_local {
        let none = no_link_local(LinkUnspec::new_with_index(index));
        requests.push(NetlinkRequest::new(none, 0));
    }
    for address in &addressing.addresses {
        let mut message = address_message(index, *address);
        if addressing.detect_duplicates {
            message.attributes.retain(|it| !matches!(it, AddressAttribute::Flags(_)));
        }
        if addressing.no_subnet_routes {
            without_prefix_route(&mut message);
        }
        requests.push(NetlinkRequest::new(RouteNetlinkMessage::NewAddress(message), CREATE | REPLACE));
    }
    let up = LinkUnspec::new_with_index(index).up().build();
    requests.push(NetlinkRequest::new(RouteNetlinkMessage::SetLink(up), 0));
    for route in &addressing.routes {
        let message = RouteNetlinkMessage::NewRoute(route_message(index, route));
        requests.push(NetlinkRequest::new(message, CREATE | APPEND));
    }
    requests
}

/// Makes the link announce its IPv4 addresses to its neighbours when it comes up.
fn arp_notify(index: u32) -> RouteNetlinkMessage {
    let mut settings = InetDevConf::default();
    settings.arp_notify = 1;
    let request = vec![AfSpecUnspec::Inet(vec![AfSpecInet::DevConfRequest(settings)])];
    let set = LinkUnspec::new_with_index(index).append_extra_attribute(LinkAttribute::AfSpecUnspec(request));
    RouteNetlinkMessage::SetLink(set.build())
}

/// Keeps the kernel from creating an IPv6 link-local address for a link that is not up yet. Without the
/// address there are no routes and multicast groups for it, and no duplicate address detection, listener
/// reports and router solicitations. Addresses, routes and group memberships that are set explicitly are not
/// affected.
pub(super) fn no_link_local(link: LinkMessageBuilder<LinkUnspec>) -> RouteNetlinkMessage {
    let none = AfSpecInet6::AddrGenMode(In6AddrGenMode::None);
    let request = LinkAttribute::AfSpecUnspec(vec![AfSpecUnspec::Inet6(vec![none])]);
    RouteNetlinkMessage::SetLink(link.append_extra_attribute(request).build())
}

fn address_message(index: u32, address: IpNet) -> AddressMessage {
    match address {
        IpNet::V4(net) => {
            let mut message = AddressMessageBuilder::<Ipv4Addr>::new()
                .index(index)
                .address(net.addr(), net.prefix_len())
                .build();
            if net.addr().is_link_local() {
                message.header.scope = AddressScope::Link;
            }
            message
        }
        IpNet::V6(net) => {
            let mut message = AddressMessageBuilder::<Ipv6Addr>::new()
                .index(index)
                .address(net.addr(), net.prefix_len())
                .build();
            message.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
            message
        }
    }
}

fn flags(address: &AddressMessage) -> AddressFlags {
    let told = address.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Flags(flags) => Some(*flags),
        _ => None,
    });
    told.unwrap_or_else(AddressFlags::empty)
}

/// Keeps the kernel from creating a route to the address's subnet.
fn without_prefix_route(message: &mut AddressMessage) {
    for attribute in &mut message.attributes {
        if let AddressAttribute::Flags(flags) = attribute {
            *flags |= AddressFlags::Noprefixroute;
            return;
        }
    }
    message.attributes.push(AddressAttribute::Flags(AddressFlags::Noprefixroute));
}

/// An address and the index of its link, from the part of its message after the header.
fn by_link(message: &[u8]) -> Option<(u32, IpNet)> {
    let (header, attributes) = message.split_at_checked(ADDRESS_HEADER)?;
    let own = attribute_in(attributes, LOCAL).or_else(|| attribute_in(attributes, ADDRESS))?;
    Some((u32_at(header, LINK_AT)?, IpNet::new(address_of(own)?, header[1]).ok()?))
}

/// An address as the kernel writes it into a message.
pub(super) fn address_of(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = || <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    let v6 = || <[u8; 16]>::try_from(bytes).map(IpAddr::from);
    v4().or_else(|_| v6()).ok()
}

/// `index`: only addresses of this link; `None`: of any.
fn observed(message: RouteNetlinkMessage, index: Option<u32>) -> Option<IpNet> {
    let RouteNetlinkMessage::NewAddress(address) = message else { return None };
    if index.is_some_and(|index| index != address.header.index) {
        return None;
    }
    let mut local = None;
    let mut peer = None;
    for attribute in address.attributes {
        match attribute {
            AddressAttribute::Local(address) => local = Some(address),
            AddressAttribute::Address(address) => peer = Some(address),
            _ => {}
        }
    }
    let own: IpAddr = local.or(peer)?;
    IpNet::new(own, address.header.prefix_len).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::Netns;
    use crate::spec;

    #[test]
    fn of_links_configured_together_each_has_its_own_outcome() {
        let pod = Netns::private().unwrap();
        let mut inside = Handle::open_in(&pod).unwrap();
        let bridge = |name: &str| spec::Bridge {
            name: name.to_owned(),
            mtu: None,
            promiscuous: false,
            vlan_filtering: false,
        };
        let [a, c] = ["a", "c"].map(|name| inside.ensure_bridge(&bridge(name)).unwrap().link.index);
        let addressing = |net: &str| spec::Addressing {
            addresses: vec![net.parse().unwrap()],
            no_link_local: true,
            ..spec::Addressing::default()
        };
        let (first, second, third) =
            (addressing("10.1.0.2/24"), addressing("10.2.0.2/24"), addressing("10.3.0.2/24"));
        let all = [(a, &first), (4000, &second), (c, &third)];
        let outcomes = inside.configure_all(&all).unwrap();
        let refused: Vec<bool> = outcomes.iter().map(Result::is_err).collect();
        assert_eq!(refused, [false, true, false]);
        assert!(outcomes[1].as_ref().unwrap_err().not_found());
        for (index, addressing) in [(a, first), (c, third)] {
            assert!(inside.addresses(index).unwrap().contains(&addressing.addresses[0]));
        }
    }
}
