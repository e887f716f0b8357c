//! Whether the node has an address.
//!
//! An ADD may send few requests to route netlink (`docs/performance.md`), and asks about each address that a pool
//! leases. Nearly all of them are nobody's here, so no socket can be bound to them, and the kernel says so in three
//! short system calls. Only of the others its routes are asked.
//!
//! Neither shows these addresses of devices, which do not count as the node's:
//!
//! | address | why not |
//! |---|---|
//! | of a VRF and of its ports | what is local there is in the VRF's table, and known to sockets that are bound to the VRF |
//! | tentative (IPv6): duplicate detection goes on, has found another holder, or waits until the device is up | it has no local route, and the kernel refuses to bind it |
//!
//! The calling thread must be in the network namespace of the handle.

use std::net::{IpAddr, SocketAddr};

use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};

use crate::netlink::{Error, Handle};
use crate::sysctl;

/// Whether packets to an address that a pool has leased stay on the node or its links. Addresses that only IPv6 routes
/// make the node's, anycast and local routes without an address, are not noticed: [`has`] asks for each.
pub(in crate::attach) fn has_leased(host: &mut Handle, address: IpAddr) -> Result<bool, Error> {
    // Whatever else is in the way, such as ports that are used up, says nothing of the address.
    if bind(address) == Err(Errno::ADDRNOTAVAIL) { Ok(false) } else { has(host, address) }
}

/// Whether packets to an address stay on the node or its links: it is an address of the node, or a broadcast or
/// multicast address.
pub(in crate::attach) fn has(host: &mut Handle, address: IpAddr) -> Result<bool, Error> {
    Ok(host.is_own_address(address)? || is_without_route_yet(address))
}

/// Whether the node has an IPv6 address, which gets its route a moment later, from a thread of the kernel.
fn is_without_route_yet(address: IpAddr) -> bool {
    // Any value but 0 lets any address be bound; what cannot be read may be one.
    address.is_ipv6() && sysctl::is("ipv6/ip_nonlocal_bind", "0") && bind(address).is_ok()
}

/// Binds a socket to an address. In IPv4 the kernel decides by its table of local routes, in IPv6 by the addresses of
/// devices; with `ip_nonlocal_bind` any address may be bound.
fn bind(address: IpAddr) -> Result<(), Errno> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = net::socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    net::bind(&socket, &SocketAddr::new(address, 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::{Netns, within};
    use crate::spec::Bridge;
    use crate::timing;

    /// A node with a bridge that is up, and its index.
    fn on_node(work: impl FnOnce(&mut Handle, u32)) {
        let work = || {
            let mut host = Handle::open().unwrap();
            let wire =
                Bridge { name: "wire".to_owned(), mtu: None, promiscuous: false, vlan_filtering: false };
            let wire = host.ensure_bridge(&wire).unwrap().link.index;
            host.ensure_up(wire).unwrap();
            work(&mut host, wire);
        };
        within(&Netns::private().unwrap(), work).unwrap();
    }

    /// Otherwise each address costs an ADD a request.
    #[test]
    fn routes_are_not_asked_of_an_address_that_nobody_here_has() {
        on_node(|host, wire| {
            for net in ["10.1.0.1/24", "fd00::1/64"] {
                host.ensure_address(wire, net.parse().unwrap()).unwrap();
            }
            for (address, expected, asked) in [
                ("10.1.0.7", false, 0),
                ("fd00::7", false, 0),
                ("192.0.2.7", false, 0),
                ("10.1.0.1", true, 1),
                ("fd00::1", true, 1),
            ] {
                let (has, times) = timing::operation(|| has_leased(host, address.parse().unwrap()).unwrap());
                let of_routes = times.runs().iter().filter(|run| run.name == "RTM_GETROUTE").count();
                assert_eq!((has, of_routes), (expected, asked), "{address}");
            }
        });
    }

    #[test]
    fn every_address_of_the_node_and_its_links_is_noticed_whether_or_not_any_may_be_bound() {
        on_node(|host, wire| {
            for net in ["10.1.0.1/24", "10.1.0.9/24", "fd00::1/64"] {
                host.ensure_address(wire, net.parse().unwrap()).unwrap();
            }
            // Where any address may be bound, the route alone tells, which the kernel makes in a thread of its own.
            while !host.is_own_address("fd00::1".parse().unwrap()).unwrap() {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            for any in ["0", "1", "2"] {
                // That of IPv4 is a yes or no in some kernels.
                for (family, value) in [("ipv4", any.replace('2', "1")), ("ipv6", any.to_owned())] {
                    sysctl::ensure(&format!("{family}/ip_nonlocal_bind"), &value).unwrap();
                }
                for (address, expected) in [
                    ("10.1.0.1", true),
                    // Of a second address in the subnet, and of all stations.
                    ("10.1.0.9", true),
                    ("10.1.0.255", true),
                    ("10.1.0.7", false),
                    ("192.0.2.7", false),
                    ("fd00::1", true),
                    ("fd00::7", false),
                ] {
                    let address = address.parse().unwrap();
                    assert_eq!(has_leased(host, address).unwrap(), expected, "{address}, {any}");
                    assert_eq!(has(host, address).unwrap(), expected, "{address}, {any}");
                }
            }
        });
    }

    /// The kernel makes its route in a thread of its own.
    #[test]
    fn an_ipv6_address_is_the_nodes_as_soon_as_it_is_given() {
        on_node(|host, wire| {
            for number in 1..20 {
                let net: ipnet::IpNet = format!("fd00:{number:x}::1/64").parse().unwrap();
                host.ensure_address(wire, net).unwrap();
                assert!(has_leased(host, net.addr()).unwrap() && has(host, net.addr()).unwrap(), "{net}");
            }
        });
    }
}
