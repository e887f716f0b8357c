//! Tells whether anything of the node's links, addresses and routes has changed since it was asked last.

use std::io;

use netlink_sys::{Socket as RawSocket, protocols::NETLINK_ROUTE};

/// `RTNLGRP_LINK`, `RTNLGRP_IPV4_IFADDR`, `RTNLGRP_IPV4_ROUTE`, `RTNLGRP_IPV6_IFADDR` and `RTNLGRP_IPV6_ROUTE` of
/// `linux/rtnetlink.h`.
const GROUPS: [u32; 5] = [1, 5, 7, 9, 11];
/// What is read is not looked at: the kernel cuts it off.
const BUFFER: usize = 16;

/// Receives the kernel's notifications in the namespace of the thread that opened it, and counts none of them: whoever
/// asks looks at what is there now. Costs nothing while nobody asks.
pub struct ChangeWatch(RawSocket);

impl ChangeWatch {
    /// Starts listening.
    ///
    /// # Errors
    /// The socket cannot be opened.
    pub fn open() -> io::Result<Self> {
        let mut raw = RawSocket::new(NETLINK_ROUTE)?;
        raw.bind_auto()?;
        for group in GROUPS {
            raw.add_membership(group)?;
        }
        raw.set_non_blocking(true)?;
        Ok(Self(raw))
    }

    /// Whether something has changed since the last call, or may have: the kernel drops notifications when there are many.
    pub fn has_changed(&mut self) -> bool {
        let mut buffer = [0; BUFFER];
        let mut some = false;
        loop {
            match self.0.recv(&mut &mut buffer[..], 0) {
                Ok(_) => some = true,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return some,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => some = true,
                // Whoever cannot be told looks.
                Err(_) => return true,
            }
        }
    }
}

impl std::fmt::Debug for ChangeWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChangeWatch").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::Handle;
    use crate::netns::{Netns, within};

    #[test]
    fn what_changes_is_told_once() {
        let netns = Netns::private().unwrap();
        let mut watch = within(&netns, || ChangeWatch::open().unwrap()).unwrap();
        assert!(!watch.has_changed());
        let mut handle = Handle::open_in(&netns).unwrap();
        let loopback = handle.link("lo").unwrap();
        handle.ensure_up(loopback.index).unwrap();
        assert_eq!([watch.has_changed(), watch.has_changed()], [true, false]);
    }
}
