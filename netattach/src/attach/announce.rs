//! Tells the neighbours of a card's interface which addresses it has: a gratuitous ARP request (RFC 5227, section 3) and an
//! unsolicited neighbour advertisement (RFC 4861, section 7.2.6) for each.
//!
//! The kernel announces an interface when it comes up. A card has no carrier then, and what it sends is lost.

use std::io;
use std::mem::size_of;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddrV6};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, ipproto, sockopt};

use crate::mac::Mac;

/// `linux/if_ether.h`.
const ETH_P_ARP: u16 = 0x0806;
/// The hop limit without which a neighbour advertisement is not accepted (RFC 4861, section 7.1.2).
const HOPS: u32 = 255;
/// All nodes of a link (RFC 4291, section 2.7.1).
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

/// Announces the addresses. The calling thread is in the interface's namespace.
///
/// # Errors
/// The first that could not be sent.
pub(super) fn announce(index: u32, mac: Mac, addresses: impl Iterator<Item = IpAddr>) -> io::Result<()> {
    for address in addresses {
        match address {
            IpAddr::V4(address) => send_arp(index, &arp(mac, address))?,
            IpAddr::V6(address) => send_advertisement(index, address, &advertisement(mac, address))?,
        }
    }
    Ok(())
}

/// A request for the sender's own address, which everybody takes down.
fn arp(mac: Mac, address: Ipv4Addr) -> [u8; 28] {
    let mut packet = [0; 28];
    // Ethernet, IPv4, lengths of their addresses, request.
    packet[..8].copy_from_slice(&[0, 1, 8, 0, 6, 4, 0, 1]);
    packet[8..14].copy_from_slice(&mac.0);
    packet[14..18].copy_from_slice(&address.octets());
    packet[24..].copy_from_slice(&address.octets());
    packet
}

/// With the flag "override" and the option "target link-layer address". The kernel adds the checksum.
fn advertisement(mac: Mac, address: Ipv6Addr) -> [u8; 32] {
    let mut packet = [0; 32];
    packet[0] = 136;
    packet[4] = 0x20;
    packet[8..24].copy_from_slice(&address.octets());
    packet[24..26].copy_from_slice(&[2, 1]);
    packet[26..].copy_from_slice(&mac.0);
    packet
}

fn send_arp(index: u32, packet: &[u8]) -> io::Result<()> {
    let protocol = ETH_P_ARP.to_be();
    // SAFETY: no pointers are passed; the descriptor is owned from here on.
    let socket = unsafe {
        let socket = libc::socket(libc::AF_PACKET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        if socket < 0 {
            return Err(io::Error::last_os_error());
        }
        OwnedFd::from_raw_fd(socket)
    };
    let to = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: protocol,
        sll_ifindex: index as i32,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 6,
        sll_addr: [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0],
    };
    // SAFETY: the kernel reads `packet` and `to`, whose lengths are passed, and keeps neither.
    let sent = unsafe {
        libc::sendto(
            socket.as_raw_fd(),
            packet.as_ptr().cast(),
            packet.len(),
            0,
            (&raw const to).cast(),
            size_of::<libc::sockaddr_ll>() as libc::socklen_t,
        )
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn send_advertisement(index: u32, from: Ipv6Addr, packet: &[u8]) -> io::Result<()> {
    let socket = rustix::net::socket_with(
        AddressFamily::INET6,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        Some(ipproto::ICMPV6),
    )?;
    sockopt::set_ipv6_multicast_hops(&socket, HOPS)?;
    rustix::net::bind(&socket, &SocketAddrV6::new(from, 0, 0, 0))?;
    let to = SocketAddrV6::new(ALL_NODES, 0, 0, index);
    rustix::net::sendto(&socket, packet, SendFlags::empty(), &to)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn announcements_say_who_has_the_address() {
        let mac = Mac([2, 0, 0, 0, 0, 7]);
        let expected = [0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 7, 10, 0, 0, 5, 0, 0, 0, 0, 0, 0, 10, 0, 0, 5];
        assert_eq!(arp(mac, Ipv4Addr::new(10, 0, 0, 5)), expected);
        let told = advertisement(mac, "fd00::5".parse().unwrap());
        assert_eq!(
            (told[0], told[4], &told[8..10], &told[24..]),
            (136, 0x20, &[0xfd, 0][..], &[2, 1, 2, 0, 0, 0, 0, 7][..])
        );
    }
}
