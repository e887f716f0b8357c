//! The kernel's notifications about addresses of links.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, RawFd};

use netlink_sys::Socket as RawSocket;

use super::Error;
use super::address::{ADDRESS, LOCAL, address_of};
use super::change_watch::{alone, attribute, half, messages};
use super::readable::readable;
use super::receive::{Receiver, subscribed};

/// `RTNLGRP_IPV4_IFADDR` and `RTNLGRP_IPV6_IFADDR` of `linux/rtnetlink.h`.
const GROUPS: [u32; 2] = [5, 9];
const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const HEADER: usize = 16;
/// Where the attributes are, behind `ifaddrmsg`.
const ATTRIBUTES: usize = HEADER + 8;
/// Bytes of notifications that may wait: see [`LinkWatch`](super::LinkWatch).
const QUEUE: usize = 1 << 20;
/// Most datagrams that are read in one call: more than fit into the queue.
const MOST_READ: usize = 1 << 14;
/// Most addresses that are returned one by one. Beyond that, checking all addresses takes no longer.
const MOST_TOLD: usize = 4096;

/// An address of a link that was added, changed or removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ToldAddress {
    /// The link's own address.
    pub address: IpAddr,
    /// The address was not removed. If it was, another link may still have it.
    pub is_there: bool,
}

/// Receives notifications about addresses in the namespace of the thread that opened it. Readable when
/// notifications are queued.
pub struct AddressWatch {
    raw: RawSocket,
    receiver: Receiver,
}

impl AddressWatch {
    /// Starts listening.
    ///
    /// # Errors
    /// The socket cannot be opened.
    pub fn open() -> Result<Self, Error> {
        let raw = subscribed(GROUPS, QUEUE).map_err(Error::Open)?;
        Ok(Self { raw, receiver: Receiver::of_notifications() })
    }

    /// Waits for notifications.
    ///
    /// # Errors
    /// The runtime refused the descriptor.
    pub async fn readable(&mut self) -> io::Result<()> {
        readable(self).await
    }

    /// Returns the addresses of all queued notifications, in their order. Does not wait. `None`: some were
    /// lost, or there are too many.
    pub fn told(&mut self) -> Option<Vec<ToldAddress>> {
        let (mut told, mut is_lost) = (Vec::new(), false);
        for _ in 0..MOST_READ {
            match self.receiver.receive(&self.raw) {
                Ok(()) if is_lost => {}
                Ok(()) => read(self.receiver.bytes(), &mut told),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return (!is_lost).then_some(told);
                }
                // The queue was full: the kernel says so once and goes on with later notifications.
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => is_lost = true,
                // Without notifications the caller has to check everything.
                Err(_) => return None,
            }
            is_lost |= told.len() > MOST_TOLD;
        }
        // Notifications arrive as fast as they are read.
        None
    }
}

impl AsRawFd for AddressWatch {
    fn as_raw_fd(&self) -> RawFd {
        self.raw.as_raw_fd()
    }
}

impl std::fmt::Debug for AddressWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AddressWatch").finish_non_exhaustive()
    }
}

/// Processes the messages of a datagram.
fn read(datagram: &[u8], told: &mut Vec<ToldAddress>) {
    for message in messages(datagram).map(alone) {
        let is_there = match half(message, 4) {
            Some(RTM_NEWADDR) => Some(true),
            Some(RTM_DELADDR) => Some(false),
            _ => None,
        };
        if let (Some(is_there), Some(address)) = (is_there, own(message)) {
            told.push(ToldAddress { address, is_there });
        }
    }
}

/// The link's own address in a message.
fn own(message: &[u8]) -> Option<IpAddr> {
    let of = |kind| attribute(message, ATTRIBUTES, kind);
    address_of(of(LOCAL).or_else(|| of(ADDRESS))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::Handle;
    use crate::netns::{Netns, within};

    fn message(kind: u16, attributes: &[(u16, &[u8])]) -> Vec<u8> {
        let mut message = vec![0; ATTRIBUTES];
        for (kind, value) in attributes {
            message.extend((4 + value.len() as u16).to_ne_bytes());
            message.extend(kind.to_ne_bytes());
            message.extend(*value);
        }
        let length = message.len() as u32;
        message[..4].copy_from_slice(&length.to_ne_bytes());
        message[4..6].copy_from_slice(&kind.to_ne_bytes());
        message
    }

    fn told(address: &str, is_there: bool) -> ToldAddress {
        ToldAddress { address: address.parse().unwrap(), is_there }
    }

    #[test]
    fn notifications_say_which_addresses_links_have_and_had() {
        let peer = [10, 0, 0, 1];
        let v6 = "2001:db8::1".parse::<std::net::Ipv6Addr>().unwrap().octets();
        let datagram = [
            message(RTM_NEWADDR, &[(ADDRESS, &peer[..]), (LOCAL, &[10, 0, 0, 2][..])]),
            message(RTM_DELADDR, &[(ADDRESS, &v6[..])]),
            // A message about a link, and one without an address.
            message(16, &[(ADDRESS, &[2, 0, 0, 0, 0, 1, 0, 0][..])]),
            message(RTM_NEWADDR, &[(7, &peer[..])]),
        ];
        let mut found = Vec::new();
        read(&datagram.concat(), &mut found);
        assert_eq!(found, [told("10.0.0.2", true), told("2001:db8::1", false)]);
    }

    #[test]
    fn an_address_is_told_as_it_comes_and_goes() {
        let netns = Netns::private().unwrap();
        let mut watch = within(&netns, || AddressWatch::open().unwrap()).unwrap();
        assert_eq!(watch.told(), Some(Vec::new()));
        let mut handle = Handle::open_in(&netns).unwrap();
        let loopback = handle.link("lo").unwrap();
        let address = "192.0.2.7/32".parse().unwrap();
        handle.ensure_address(loopback.index, address).unwrap();
        assert_eq!(watch.told(), Some(vec![told("192.0.2.7", true)]));
        handle.ensure_address_absent(loopback.index, address).unwrap();
        assert_eq!([watch.told(), watch.told()], [Some(vec![told("192.0.2.7", false)]), Some(Vec::new())]);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_to_their_end(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..256)) {
            read(&bytes, &mut Vec::new());
        }
    }
}
