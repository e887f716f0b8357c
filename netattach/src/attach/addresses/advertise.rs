//! Announces addresses of ipvlans to neighbours: IPv4 by ARP requests for the address itself (RFC 5227, section 2.3),
//! IPv6 by unsolicited neighbour advertisements (RFC 4861, section 7.2.6).
//!
//! The kernel sends both itself when the Ethernet address of an interface is set (`inetdev_event`,
//! `ndisc_netdev_event`), which it refuses for an ipvlan; and IPv6 ones when duplicate address detection ends, which
//! addresses here do not wait for. A request to resolve a neighbour would not do: it tells of the link-local address,
//! and of the first IPv4 address of the subnet.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, ipproto, sockopt};

use crate::attach::StepError;
use crate::error_chain::Chain;
use crate::mac::Mac;
use crate::netlink::{Handle, packet_socket};
use crate::netns::{Netns, NetnsError, within};

/// All stations on the link.
const EVERYBODY: [u8; 6] = [0xff; 6];
/// The ethertype of ARP; Ethernet and IPv4, with the lengths of their addresses; a request (RFC 826).
const ARP_REQUEST: [u8; 10] = [8, 6, 0, 1, 8, 0, 6, 4, 0, 1];
/// Length of a frame with such a request, in bytes.
const REQUEST_LENGTH: usize = 42;
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

/// How the addresses of an interface are announced.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::attach) struct Told {
    /// IPv4 addresses that the kernel announces, one of each subnet; also whenever the interface comes up again.
    pub(in crate::attach) by_kernel: Vec<Ipv4Addr>,
    /// Addresses for which the agent sends frames. Where there are some, the kernel announces its own now only if
    /// frames are not permitted: each goes to all other ipvlans of the parent.
    pub(in crate::attach) by_frames: Vec<IpAddr>,
}

impl Told {
    /// The addresses that the kernel is asked to announce now.
    fn asked_of_kernel(&self, are_frames_refused: bool) -> &[Ipv4Addr] {
        if self.by_frames.is_empty() || are_frames_refused { &self.by_kernel } else { &[] }
    }
}

/// An interface in a pod that announces its addresses.
#[derive(Debug)]
pub(in crate::attach) struct Sender<'p> {
    /// The namespace of the pod.
    pub(in crate::attach) netns: &'p Netns,
    /// A handle in it.
    pub(in crate::attach) pod: &'p mut Handle,
    /// Index of the interface.
    pub(in crate::attach) index: u32,
    /// Its Ethernet address; `None`: it is down, and sends no frames.
    pub(in crate::attach) mac: Option<Mac>,
}

impl Sender<'_> {
    /// Announces addresses. An interface that is gone needs no announcement.
    ///
    /// # Errors
    /// The kernel refuses, but for the permission to send frames: an agent without `NET_RAW` does not get it later.
    pub(in crate::attach) fn announce(self, told: &Told) -> Result<(), StepError> {
        let Self { netns, pod, index, mac } = self;
        let sent = match mac.filter(|_| !told.by_frames.is_empty()) {
            Some(mac) => advertise(netns, (index, mac), &told.by_frames)?,
            None => Ok(()),
        };
        let refused = sent.as_ref().err().filter(|error| error.kind() == io::ErrorKind::PermissionDenied);
        if !told.by_kernel.is_empty() {
            match pod.announce(index, told.asked_of_kernel(refused.is_some())) {
                Err(error) if error.not_found() => return Ok(()),
                asked => asked?,
            }
        }
        if let Some(error) = refused {
            tracing::debug!(index, error = %Chain(error), "addresses not announced by frames");
            return Ok(());
        }
        sent.map_err(StepError::Announce)
    }
}

/// Announces each address from the interface with this index, which has this Ethernet address. An address that the pod
/// has removed needs no announcement. The pod's programs judge them like everything that the pod sends.
///
/// # Errors
/// The namespace cannot be entered; or a socket cannot be opened or used: the other addresses are announced
/// nevertheless.
fn advertise(
    netns: &Netns,
    (index, mac): (u32, Mac),
    addresses: &[IpAddr],
) -> Result<io::Result<()>, NetnsError> {
    let announce = |address: &IpAddr| match *address {
        IpAddr::V4(address) => send_v4(address, index, &arp(address, mac)),
        IpAddr::V6(address) => send_v6(address, index, &message(address, mac)),
    };
    within(netns, || {
        let sent = addresses.iter().map(|address| match announce(address) {
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => Ok(()),
            sent => sent,
        });
        sent.fold(Ok(()), Result::and)
    })
}

fn send_v4(address: Ipv4Addr, index: u32, frame: &[u8]) -> io::Result<()> {
    // Fails for an address that the interface has lost, which somebody else may have by now.
    let (kind, flags) = (SocketType::DGRAM, SocketFlags::CLOEXEC);
    let probe: OwnedFd = rustix::net::socket_with(AddressFamily::INET, kind, flags, None)?;
    use_interface(&probe, index)?;
    rustix::net::bind(&probe, &SocketAddrV4::new(address, 0))?;
    let socket = packet_socket::open(index, libc::ETH_P_ARP, None)?;
    rustix::net::send(&socket, frame, SendFlags::DONTWAIT)?;
    Ok(())
}

/// Has a socket use the addresses of that interface: those of one in a VRF are local in the VRF's table alone, and a
/// socket without an interface cannot be bound to them. `rustix` has other options of sockets, but not this one.
fn use_interface(socket: &OwnedFd, index: u32) -> io::Result<()> {
    let index = libc::c_int::try_from(index).map_err(io::Error::other)?;
    // SAFETY: the value is an integer that lives through the call, and its size is given.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_BINDTOIFINDEX,
            (&raw const index).cast(),
            size_of_val(&index) as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A frame with a request for the address by its holder.
fn arp(address: Ipv4Addr, mac: Mac) -> [u8; REQUEST_LENGTH] {
    let parts: [&[u8]; 7] =
        [&EVERYBODY, &mac.0, &ARP_REQUEST, &mac.0, &address.octets(), &[0; 6], &address.octets()];
    let mut frame = [0; REQUEST_LENGTH];
    for (to, byte) in frame.iter_mut().zip(parts.into_iter().flatten()) {
        *to = *byte;
    }
    frame
}

fn send_v6(address: Ipv6Addr, index: u32, message: &[u8]) -> io::Result<()> {
    let (kind, flags) = (SocketType::RAW, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
    let socket: OwnedFd = rustix::net::socket_with(AddressFamily::INET6, kind, flags, Some(ipproto::ICMPV6))?;
    sockopt::set_ipv6_multicast_hops(&socket, HOPS)?;
    sockopt::set_ipv6_multicast_loop(&socket, false)?;
    use_interface(&socket, index)?;
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

    /// Otherwise the first address of each subnet is broadcast twice.
    #[test]
    fn the_kernel_announces_what_frames_announce_only_where_these_are_not_permitted() {
        let four = Ipv4Addr::new(10, 52, 0, 3);
        let by_kernel = Told { by_kernel: vec![four], by_frames: Vec::new() };
        assert_eq!(by_kernel.asked_of_kernel(false), [four]);
        let by_both = Told { by_kernel: vec![four], by_frames: vec![four.into()] };
        assert_eq!((by_both.asked_of_kernel(false), by_both.asked_of_kernel(true)), (&[][..], &[four][..]));
    }

    #[test]
    fn an_address_is_requested_of_everybody_by_its_holder() {
        let found = arp(Ipv4Addr::new(10, 52, 0, 3), Mac([2, 0, 0, 0, 0, 0x77]));
        let expected: [&[u8]; 6] = [
            &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 0x77, 8, 6],
            &[0, 1, 8, 0, 6, 4, 0, 1],
            &[2, 0, 0, 0, 0, 0x77],
            &[10, 52, 0, 3],
            &[0, 0, 0, 0, 0, 0],
            &[10, 52, 0, 3],
        ];
        assert_eq!(found.as_slice(), expected.concat());
    }

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
