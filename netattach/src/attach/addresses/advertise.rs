//! Announces IPv6 addresses to neighbours by unsolicited neighbour advertisements (RFC 4861, section 7.2.6).
//!
//! The kernel sends them itself when the Ethernet address of an interface is set (`ndisc_netdev_event`), which it
//! refuses for an ipvlan, and when duplicate address detection ends, which addresses here do not wait for. A request to
//! resolve a neighbour would not do: its solicitation is from the link-local address, so it tells of no other one.

use std::io;
use std::net::{Ipv6Addr, SocketAddrV6};
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, ipproto, sockopt};

use crate::mac::Mac;
use crate::netns::{Netns, NetnsError, within};

/// All hosts on the link.
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
/// Length of an advertisement with the option below, in bytes.
const LENGTH: usize = 32;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
/// A neighbour replaces the Ethernet address that it knows.
const OVERRIDE: u8 = 0x20;
/// The target's Ethernet address, in one unit of 8 bytes.
const TARGET_ADDRESS: [u8; 2] = [2, 1];
/// Neighbours ignore advertisements that a router has passed on.
const HOPS: u32 = 255;

/// Sends an advertisement of each address from the interface with this index, which has these addresses and this
/// Ethernet address. The pod's programs judge them like everything that the pod sends.
///
/// # Errors
/// The namespace cannot be entered; or a socket cannot be opened or used, for example because the pod has removed an
/// address: the others are advertised nevertheless.
pub(in crate::attach) fn advertise(
    netns: &Netns,
    (index, mac): (u32, Mac),
    addresses: &[Ipv6Addr],
) -> Result<io::Result<()>, NetnsError> {
    within(netns, || {
        let sent = addresses.iter().map(|address| send(*address, index, &message(*address, mac)));
        sent.fold(Ok(()), Result::and)
    })
}

fn send(address: Ipv6Addr, index: u32, message: &[u8]) -> io::Result<()> {
    let (kind, flags) = (SocketType::RAW, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
    let socket: OwnedFd = rustix::net::socket_with(AddressFamily::INET6, kind, flags, Some(ipproto::ICMPV6))?;
    sockopt::set_ipv6_multicast_hops(&socket, HOPS)?;
    sockopt::set_ipv6_multicast_loop(&socket, false)?;
    rustix::net::bind(&socket, &SocketAddrV6::new(address, 0, 0, index))?;
    let to = SocketAddrV6::new(ALL_NODES, 0, 0, index);
    rustix::net::sendto(&socket, message, SendFlags::DONTWAIT, &to)?;
    Ok(())
}

/// An advertisement; the kernel adds the checksum (RFC 3542, section 3.1).
fn message(address: Ipv6Addr, mac: Mac) -> [u8; LENGTH] {
    let mut message = [0; LENGTH];
    message[0] = NEIGHBOUR_ADVERTISEMENT;
    message[4] = OVERRIDE;
    message[8..24].copy_from_slice(&address.octets());
    message[24..26].copy_from_slice(&TARGET_ADDRESS);
    message[26..].copy_from_slice(&mac.0);
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_advertisement_replaces_what_neighbours_know_of_the_address() {
        let found = message("fd00:54::3".parse().unwrap(), Mac([2, 0, 0, 0, 0, 0x77]));
        let expected = [
            [136, 0, 0, 0, 0x20, 0, 0, 0],
            [0xfd, 0, 0, 0x54, 0, 0, 0, 0],
            [0, 0, 0, 0, 0, 0, 0, 3],
            [2, 1, 2, 0, 0, 0, 0, 0x77],
        ];
        assert_eq!(found.as_slice(), expected.as_flattened());
    }
}
