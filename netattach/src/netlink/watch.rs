//! The kernel's notifications about links.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

use netlink_sys::{Socket as RawSocket, protocols::NETLINK_ROUTE};
use tokio::io::unix::AsyncFd;

use super::Error;

/// `RTNLGRP_LINK`: links of every kind, and the bridge's own notices about its ports.
const GROUP_LINK: u32 = 1;
/// `RTNLGRP_TC`: queueing disciplines of links.
const GROUP_TC: u32 = 4;
const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_NEWQDISC: u16 = 36;
const RTM_DELQDISC: u16 = 37;
const HEADER_LEN: usize = 16;
/// Where `ifinfomsg` and `tcmsg` have the link's index.
const INDEX_AT: usize = HEADER_LEN + 4;
const RECEIVE_BUFFER: usize = 64 * 1024;

/// Hears of changes of links in the namespace of the thread that opened it. Readable when there are any.
pub struct LinkWatch {
    raw: RawSocket,
    buffer: Vec<u8>,
}

/// What has changed since it was last asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Changes {
    /// These links, by index.
    Of(BTreeSet<u32>),
    /// More than the kernel kept for us: anything may have.
    Anything,
}

impl LinkWatch {
    /// Begins to listen.
    pub fn open() -> Result<Self, Error> {
        let mut raw = RawSocket::new(NETLINK_ROUTE).map_err(Error::Open)?;
        raw.bind_auto().map_err(Error::Open)?;
        raw.add_membership(GROUP_LINK).map_err(Error::Open)?;
        raw.add_membership(GROUP_TC).map_err(Error::Open)?;
        raw.set_non_blocking(true).map_err(Error::Open)?;
        Ok(Self { raw, buffer: vec![0; RECEIVE_BUFFER] })
    }

    /// Lets the async runtime wait for notifications.
    ///
    /// # Errors
    /// The runtime cannot.
    pub fn into_async(self) -> io::Result<AsyncFd<Self>> {
        // SAFETY: the descriptor is the socket's own, which stays open and the same until this value is dropped.
        Ok(unsafe { AsyncFd::register(self) }?)
    }

    /// Everything that has come. Does not wait.
    pub fn changes(&mut self) -> Result<Changes, Error> {
        let mut touched = BTreeSet::new();
        let mut lost = false;
        loop {
            match self.raw.recv(&mut &mut self.buffer[..], 0) {
                Ok(length) => touched.extend(indexes(&self.buffer[..length])),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The queue was full: the kernel says so once, and goes on with what comes after.
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

/// The links that the messages of a datagram are about. Nothing else of them is read: whoever wants to know asks for the
/// link as it is by then.
fn indexes(mut datagram: &[u8]) -> Vec<u32> {
    let mut found = Vec::new();
    while let Some(length) = number::<4>(datagram, 0).map(|bytes| u32::from_ne_bytes(bytes) as usize) {
        let kind = number::<2>(datagram, 4).map(u16::from_ne_bytes);
        if matches!(kind, Some(RTM_NEWLINK | RTM_DELLINK | RTM_NEWQDISC | RTM_DELQDISC)) {
            found.extend(number::<4>(datagram, INDEX_AT).map(u32::from_ne_bytes));
        }
        let next = length.max(HEADER_LEN).next_multiple_of(4);
        let Some(rest) = datagram.get(next..) else { break };
        datagram = rest;
    }
    found
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
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

    #[test]
    fn links_that_change_and_go_are_found() {
        let datagram =
            [message(16, 7, 33), message(24, 8, 40), message(17, 9, 32), message(36, 4, 36)].concat();
        assert_eq!(indexes(&datagram), [7, 9, 4]);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_to_their_end(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..256)) {
            indexes(&bytes);
        }
    }
}
