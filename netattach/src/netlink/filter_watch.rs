//! The kernel's notifications about removed filters and queueing disciplines.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

use netlink_sys::{Socket as RawSocket, protocols::NETLINK_ROUTE};
use tokio::io::unix::AsyncFd;

use super::change_watch::{half, messages, word};
use super::receive::Receiver;
use super::socket_filter::{By, receive_only};

/// `RTNLGRP_TC` of `linux/rtnetlink.h`.
const GROUP_TC: u32 = 4;
const RTM_DELQDISC: u16 = 37;
const RTM_DELTFILTER: u16 = 45;
/// Length of a message's header.
const HEADER: usize = 16;
/// Offset of the device's index in a message: behind the header, in `struct tcmsg`. Nothing else of it is read.
const INDEX: std::ops::Range<usize> = HEADER + 4..HEADER + 8;
/// Most devices that are listed separately. Beyond that, checking all devices takes no longer.
const MOST_DEVICES: usize = 4096;

/// Receives a notification for every filter and queueing discipline that is removed in the namespace of the thread
/// that opened it. Removing a device removes its filters without a notification.
#[derive(Debug)]
pub struct FilterWatch {
    socket: AsyncFd<Descriptor>,
    receiver: Receiver,
}

/// The devices from which filters or queueing disciplines were removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Removed {
    /// These devices, by their indices.
    From(BTreeSet<u32>),
    /// The kernel dropped notifications, or a notification cannot be parsed: any device.
    Anywhere,
}

impl Default for Removed {
    fn default() -> Self {
        Self::From(BTreeSet::new())
    }
}

impl Removed {
    /// Merges both.
    pub fn extend(&mut self, other: Self) {
        match other {
            Self::From(others) => {
                if let Self::From(devices) = self {
                    devices.extend(others);
                    if devices.len() > MOST_DEVICES {
                        *self = Self::Anywhere;
                    }
                }
            }
            Self::Anywhere => *self = Self::Anywhere,
        }
    }
}

struct Descriptor(RawSocket);

impl std::fmt::Debug for Descriptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Descriptor").field(&self.0.as_raw_fd()).finish()
    }
}

impl AsRawFd for Descriptor {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl FilterWatch {
    /// Starts listening. To be called by an async task.
    ///
    /// # Errors
    /// The socket cannot be opened.
    pub fn open() -> io::Result<Self> {
        let mut raw = RawSocket::new(NETLINK_ROUTE)?;
        raw.bind_auto()?;
        raw.set_non_blocking(true)?;
        // Each ADD adds filters, and would have to wait while a reader of those notifications is woken.
        receive_only(&raw, By::Type(&[RTM_DELQDISC, RTM_DELTFILTER]))?;
        raw.add_membership(GROUP_TC)?;
        // SAFETY: the descriptor is the socket's own, which stays open and the same until this value is dropped.
        let socket = unsafe { AsyncFd::register(Descriptor(raw)) }?;
        Ok(Self { socket, receiver: Receiver::of_notifications() })
    }

    /// Waits until a filter or discipline was removed, or until the kernel dropped notifications. Returns the
    /// devices.
    ///
    /// # Errors
    /// The socket failed.
    pub async fn removed(&mut self) -> io::Result<Removed> {
        loop {
            let mut ready = self.socket.readable_mut().await?;
            let receiver = &mut self.receiver;
            match ready.try_io(|socket| receiver.receive(&socket.get_ref().0)) {
                Ok(Ok(())) => {
                    if let Some(removed) = removals(self.receiver.bytes()) {
                        return Ok(removed);
                    }
                }
                Ok(Err(error)) if error.raw_os_error() == Some(libc::ENOBUFS) => {
                    return Ok(Removed::Anywhere);
                }
                Ok(Err(error)) => return Err(error),
                // There was nothing to read; the runtime waits again.
                Err(_) => {}
            }
        }
    }
}

/// The devices that the messages report; `None`: nothing was removed.
fn removals(datagram: &[u8]) -> Option<Removed> {
    let mut all: Option<Removed> = None;
    for message in messages(datagram).take_while(|message| message.len() >= HEADER) {
        if let Some(RTM_DELQDISC | RTM_DELTFILTER) = half(message, 4) {
            let index = word(message, INDEX.start);
            let one = index.map_or(Removed::Anywhere, |index| Removed::From([index].into()));
            all.get_or_insert_default().extend(one);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u16, index: u32, length: usize) -> Vec<u8> {
        let mut message = vec![0; length.next_multiple_of(4).max(INDEX.end)];
        message[..4].copy_from_slice(&(length as u32).to_ne_bytes());
        message[4..6].copy_from_slice(&kind.to_ne_bytes());
        message[INDEX].copy_from_slice(&index.to_ne_bytes());
        message
    }

    #[test]
    fn only_removals_are_reported_with_their_devices() {
        let added = [message(36, 7, 33), message(44, 8, 40)].concat();
        assert_eq!(removals(&added), None);
        let from = |devices: &[u32]| Some(Removed::From(devices.iter().copied().collect()));
        assert_eq!(removals(&[added, message(37, 9, 36)].concat()), from(&[9]));
        assert_eq!(removals(&[message(45, 9, 36), message(37, 7, 36)].concat()), from(&[7, 9]));
        // A message without a device.
        assert_eq!(removals(&message(45, 9, 36)[..HEADER]), Some(Removed::Anywhere));
        assert_eq!(removals(&message(45, 9, 36)[..HEADER - 1]), None);
        assert_eq!(removals(&[0; 40]), None);
        assert_eq!(removals(&[1, 2, 3]), None);
    }

    #[test]
    fn what_is_added_to_anywhere_is_anywhere() {
        let mut removed = Removed::default();
        removed.extend(Removed::From([3].into()));
        removed.extend(Removed::From([5].into()));
        assert_eq!(removed, Removed::From([3, 5].into()));
        removed.extend(Removed::Anywhere);
        removed.extend(Removed::From([7].into()));
        assert_eq!(removed, Removed::Anywhere);
        // The number of devices is bounded.
        let all = || Removed::From((0..MOST_DEVICES as u32).collect());
        let mut removed = all();
        removed.extend(Removed::From([7].into()));
        assert_eq!(removed, all());
        removed.extend(Removed::From([u32::MAX].into()));
        assert_eq!(removed, Removed::Anywhere);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_to_their_end(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..256)) {
            removals(&bytes);
        }
    }
}
