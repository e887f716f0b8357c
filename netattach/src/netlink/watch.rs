//! The kernel's notifications about links, their filters, and default routes.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

use netlink_sys::Socket as RawSocket;

use super::Error;
use super::change_watch::{half, messages, word};
use super::readable::readable;
use super::receive::{Receiver, subscribed};

/// `RTNLGRP_LINK`: links of every kind, including the bridge's notifications about its ports.
const GROUP_LINK: u32 = 1;
/// `RTNLGRP_TC`: queueing disciplines and filters of links.
const GROUP_TC: u32 = 4;
/// `RTNLGRP_IPV4_ROUTE` and `RTNLGRP_IPV6_ROUTE`.
const GROUPS_ROUTE: [u32; 2] = [7, 11];
const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_NEWROUTE: u16 = 24;
const RTM_DELROUTE: u16 = 25;
const RTM_NEWQDISC: u16 = 36;
const RTM_DELQDISC: u16 = 37;
const RTM_NEWTFILTER: u16 = 44;
const RTM_DELTFILTER: u16 = 45;
const HEADER_LEN: usize = 16;
/// Offset of the link's index in `ifinfomsg` and `tcmsg`.
const INDEX_AT: usize = HEADER_LEN + 4;
/// Offset of the destination's prefix length in `rtmsg`.
const PREFIX_AT: usize = HEADER_LEN + 1;
/// Offset of the protocol in `rtmsg`.
const PROTOCOL_AT: usize = HEADER_LEN + 5;

/// Receives notifications about changed links in the namespace of the thread that opened it. Readable if there are
/// any.
pub struct LinkWatch {
    raw: RawSocket,
    receiver: Receiver,
}

/// The changes since the last call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Changes {
    /// These changes.
    Of(Touched),
    /// The kernel dropped notifications: anything may have changed.
    Anything,
}

/// The subjects of notifications. No other content is used: the reader queries the kernel for the present state.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Touched {
    /// Links by index.
    pub links: BTreeSet<u32>,
    /// A default route, in any table.
    pub default_routes: bool,
    /// The protocols (`rtm_protocol`) of removed routes. The kernel does not report routes that are removed
    /// together with their link.
    pub removed_routes: BTreeSet<u8>,
}

impl Changes {
    /// Whether nothing has changed except routes that are not default routes.
    pub fn is_none(&self) -> bool {
        matches!(self, Self::Of(touched) if touched.links.is_empty() && !touched.default_routes)
    }
}

/// Bytes of notifications that may be queued while changes are gathered. The kernel counts one to two KiB for
/// each, and an ADD causes about thirty. With the default size, a handful of pods would overflow the queue,
/// and everything would have to be read again.
const QUEUE: usize = 1 << 20;

impl LinkWatch {
    /// Starts listening.
    pub fn open() -> Result<Self, Error> {
        Self::of([GROUP_LINK, GROUP_TC].into_iter().chain(GROUPS_ROUTE))
    }

    /// Starts listening for links alone, without their filters.
    pub fn open_for_links() -> Result<Self, Error> {
        Self::of([GROUP_LINK])
    }

    /// Starts listening for default routes alone.
    pub fn open_for_routes() -> Result<Self, Error> {
        Self::of(GROUPS_ROUTE)
    }

    fn of(groups: impl IntoIterator<Item = u32>) -> Result<Self, Error> {
        let raw = subscribed(groups, QUEUE).map_err(Error::Open)?;
        Ok(Self { raw, receiver: Receiver::of_notifications() })
    }

    /// Waits for notifications.
    ///
    /// # Errors
    /// The runtime refused the descriptor.
    pub async fn readable(&mut self) -> io::Result<()> {
        readable(self).await
    }

    /// All notifications so far. Does not wait.
    pub fn changes(&mut self) -> Result<Changes, Error> {
        let mut touched = Touched::default();
        let mut lost = false;
        loop {
            match self.receiver.receive(&self.raw) {
                Ok(()) => touched.read(self.receiver.bytes()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // The queue was full: the kernel reports it once and continues with later notifications.
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => lost = true,
                Err(error) => return Err(Error::Receive("notifications about links", error)),
            }
        }
        Ok(if lost { Changes::Anything } else { Changes::Of(touched) })
    }
}

impl AsRawFd for LinkWatch {
    fn as_raw_fd(&self) -> RawFd {
        self.raw.as_raw_fd()
    }
}

impl std::fmt::Debug for LinkWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LinkWatch").finish_non_exhaustive()
    }
}

impl Touched {
    fn read(&mut self, datagram: &[u8]) {
        for message in messages(datagram) {
            match half(message, 4) {
                Some(
                    RTM_NEWLINK | RTM_DELLINK | RTM_NEWQDISC | RTM_DELQDISC | RTM_NEWTFILTER | RTM_DELTFILTER,
                ) => self.links.extend(word(message, INDEX_AT)),
                Some(kind @ (RTM_NEWROUTE | RTM_DELROUTE)) => {
                    self.default_routes |= message.get(PREFIX_AT) == Some(&0);
                    let protocol = message.get(PROTOCOL_AT).filter(|_| kind == RTM_DELROUTE);
                    self.removed_routes.extend(protocol);
                }
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u16, index: u32, length: usize) -> Vec<u8> {
        let mut message = vec![0; length.next_multiple_of(4)];
        message[..4].copy_from_slice(&(length as u32).to_ne_bytes());
        message[4..6].copy_from_slice(&kind.to_ne_bytes());
        message[20..24].copy_from_slice(&index.to_ne_bytes());
        message
    }

    fn touched(datagram: &[u8]) -> Touched {
        let mut touched = Touched::default();
        touched.read(datagram);
        touched
    }

    #[test]
    fn links_that_change_and_go_are_found() {
        let datagram =
            [message(16, 7, 33), message(44, 8, 40), message(17, 9, 32), message(36, 4, 36)].concat();
        assert_eq!(touched(&datagram), Touched { links: [7, 8, 9, 4].into(), ..Touched::default() });
    }

    #[test]
    fn of_routes_default_ones_are_reported_and_whose_those_are_that_go() {
        let route = |kind: u16, prefix: u8, protocol: u8| {
            let mut route = message(kind, 0, 40);
            (route[PREFIX_AT], route[PROTOCOL_AT]) = (prefix, protocol);
            route
        };
        let of = |default_routes, removed: &[u8]| {
            let removed_routes = removed.iter().copied().collect();
            Touched { links: BTreeSet::new(), default_routes, removed_routes }
        };
        assert_eq!(touched(&route(24, 24, 110)), of(false, &[]));
        assert_eq!(touched(&[route(24, 24, 3), route(25, 0, 3)].concat()), of(true, &[3]));
        let removed = touched(&[route(25, 24, 110), route(25, 32, 2)].concat());
        assert_eq!(removed, of(false, &[2, 110]));
        assert!(Changes::Of(removed).is_none());
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_to_their_end(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..256)) {
            touched(&bytes);
        }
    }
}
