//! The kernel's notifications about removed filters and queueing disciplines.

use std::io;
use std::os::fd::{AsRawFd, RawFd};

use netlink_sys::{Socket as RawSocket, protocols::NETLINK_ROUTE};
use tokio::io::unix::AsyncFd;

use super::socket_filter::{By, receive_only};

/// `RTNLGRP_TC` of `linux/rtnetlink.h`.
const GROUP_TC: u32 = 4;
const RTM_DELQDISC: u16 = 37;
const RTM_DELTFILTER: u16 = 45;
/// Length of a message's header, the only part that is read.
const HEADER: usize = 16;
const BUFFER: usize = 64 * 1024;

/// Receives a notification for every filter and queueing discipline that is removed in the namespace of the thread
/// that opened it. Removing a device removes its filters without a notification.
#[derive(Debug)]
pub struct FilterWatch {
    socket: AsyncFd<Descriptor>,
    buffer: Vec<u8>,
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
        // Each ADD makes some, and waits while a reader of them is woken.
        receive_only(&raw, By::Type(&[RTM_DELQDISC, RTM_DELTFILTER]))?;
        raw.add_membership(GROUP_TC)?;
        // SAFETY: the descriptor is the socket's own, which stays open and the same until this value is dropped.
        let socket = unsafe { AsyncFd::register(Descriptor(raw)) }?;
        Ok(Self { socket, buffer: vec![0; BUFFER] })
    }

    /// Waits until something was removed, or until the kernel dropped notifications because there were too many.
    ///
    /// # Errors
    /// The socket failed.
    pub async fn removed(&mut self) -> io::Result<()> {
        loop {
            let mut ready = self.socket.readable_mut().await?;
            let buffer = &mut self.buffer;
            match ready.try_io(|socket| socket.get_ref().0.recv(&mut &mut buffer[..], 0)) {
                Ok(Ok(length)) if is_removal(&self.buffer[..length]) => return Ok(()),
                Ok(Ok(_)) => {}
                Ok(Err(error)) if error.raw_os_error() == Some(libc::ENOBUFS) => return Ok(()),
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(error)) => return Err(error),
                // There was nothing to read; the runtime waits again.
                Err(_) => {}
            }
        }
    }
}

fn is_removal(mut datagram: &[u8]) -> bool {
    while let Some((header, _)) = datagram.split_at_checked(HEADER) {
        let length = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]) as usize;
        let kind = u16::from_ne_bytes([header[4], header[5]]);
        if matches!(kind, RTM_DELQDISC | RTM_DELTFILTER) {
            return true;
        }
        let Some(rest) = datagram.get(length.max(HEADER).next_multiple_of(4)..) else { return false };
        datagram = rest;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u16, length: usize) -> Vec<u8> {
        let mut message = vec![0; length.next_multiple_of(4)];
        message[..4].copy_from_slice(&(length as u32).to_ne_bytes());
        message[4..6].copy_from_slice(&kind.to_ne_bytes());
        message
    }

    #[test]
    fn only_removals_are_reported() {
        let added = [message(36, 33), message(44, 40)].concat();
        assert!(!is_removal(&added));
        assert!(is_removal(&[added, message(37, 20)].concat()));
        assert!(is_removal(&message(45, 16)));
        assert!(!is_removal(&[0; 40]));
        assert!(!is_removal(&[1, 2, 3]));
    }
}
