//! Reports on which of the node's devices filters may have changed since the last call. Unlike
//! [`FilterWatch`](super::FilterWatch) it wakes nobody: what an ADD does to filters waits in the socket until
//! somebody wants to know.

use std::collections::BTreeSet;
use std::io;

use netlink_sys::Socket as RawSocket;

use super::change_watch::{half, messages, word};
use super::receive::{Receiver, subscribed};
use super::socket_filter::{By, receive_only};

/// `RTNLGRP_LINK` and `RTNLGRP_TC` of `linux/rtnetlink.h`.
const GROUPS: [u32; 2] = [1, 4];
/// `RTM_DELLINK`: a device that is moved to another namespace loses its filters without a word about them, and
/// may come back. Queueing disciplines, filters and chains of filters, new or gone. All of these begin with a
/// structure that has the device's index at the same place (`ifinfomsg`, `tcmsg`).
const TYPES: [u16; 7] = [17, 36, 37, 44, 45, 100, 101];
const HEADER: usize = 16;
const INDEX_AT: usize = HEADER + 4;
/// `TCM_IFINDEX_MAGIC_BLOCK`: the message is about a block of filters that devices share.
const BLOCK: u32 = u32::MAX;
/// Bytes of notifications that may be queued between two calls: see [`LinkWatch`](super::LinkWatch).
const QUEUE: usize = 1 << 20;
/// Most datagrams that are read in one call: more than fit into the queue.
const MOST_READ: usize = 1 << 14;

/// Receives the kernel's notifications in the namespace of the thread that opened it. Costs one system call
/// while there are none.
pub struct FilterChanges {
    raw: RawSocket,
    receiver: Receiver,
}

impl FilterChanges {
    /// Starts listening.
    ///
    /// # Errors
    /// The socket cannot be opened.
    pub fn open() -> io::Result<Self> {
        let raw = subscribed(GROUPS, QUEUE)?;
        // The kernel tells of links thirty times for an ADD. What it has told before is read, and is none of these.
        receive_only(&raw, By::Type(&TYPES))?;
        Ok(Self { raw, receiver: Receiver::of_notifications() })
    }

    /// Returns the devices whose filters may have changed since the last call; `None`: any may have.
    pub fn changed(&mut self) -> Option<BTreeSet<u32>> {
        let mut devices = Some(BTreeSet::new());
        for _ in 0..MOST_READ {
            match self.receiver.receive(&self.raw) {
                Ok(()) => devices = devices.and_then(|devices| read(devices, self.receiver.bytes())),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return devices,
                // Notifications were lost. Later ones follow.
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => devices = None,
                Err(_) => return None,
            }
        }
        None
    }
}

impl std::fmt::Debug for FilterChanges {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FilterChanges").finish_non_exhaustive()
    }
}

/// Adds the devices of a datagram's messages; `None`: a message does not name one.
fn read(mut devices: BTreeSet<u32>, datagram: &[u8]) -> Option<BTreeSet<u32>> {
    for message in messages(datagram) {
        if half(message, 4).is_some_and(|kind| TYPES.contains(&kind)) {
            devices.insert(word(message, INDEX_AT).filter(|index| *index != BLOCK)?);
        }
    }
    Some(devices)
}

#[cfg(test)]
mod tests {
    use super::super::socket::{CREATE, EXCL};
    use super::super::tc::{LOOPBACK, clsact};
    use super::*;
    use crate::netlink::Handle;
    use crate::netns::{Netns, within};
    use crate::spec::Bridge;

    fn message(kind: u16, index: u32, length: usize) -> Vec<u8> {
        let mut message = vec![0; length.next_multiple_of(4).max(INDEX_AT + 4)];
        message[..4].copy_from_slice(&(length as u32).to_ne_bytes());
        message[4..6].copy_from_slice(&kind.to_ne_bytes());
        message[INDEX_AT..INDEX_AT + 4].copy_from_slice(&index.to_ne_bytes());
        message
    }

    #[test]
    fn every_message_names_its_device_or_all() {
        let devices = |datagram: &[u8]| read(BTreeSet::new(), datagram).map(Vec::from_iter);
        let all = [message(17, 9, 32), message(16, 3, 33), message(36, 7, 36), message(45, 8, 41)].concat();
        assert_eq!(devices(&all), Some(vec![7, 8, 9]));
        assert_eq!(devices(&message(16, 3, 32)), Some(vec![]));
        assert_eq!(devices(&[message(44, 7, 36), message(44, BLOCK, 36)].concat()), None);
        assert_eq!(devices(&message(44, 7, 36)[..INDEX_AT]), None);
    }

    #[test]
    fn what_changes_is_told_once() {
        let netns = Netns::private().unwrap();
        let mut changes = within(&netns, || FilterChanges::open().unwrap()).unwrap();
        let mut told = || changes.changed().map(Vec::from_iter);
        let mut handle = Handle::open_in(&netns).unwrap();
        let bridge = Bridge { name: "br0".to_owned(), mtu: None, promiscuous: false, vlan_filtering: false };
        let index = handle.ensure_bridge(&bridge).unwrap().link.index;
        assert_eq!(told(), Some(vec![]), "a new link has no filters");
        handle.socket.request(clsact(LOOPBACK), CREATE | EXCL).unwrap();
        assert_eq!([told(), told()], [Some(vec![LOOPBACK]), Some(vec![])]);
        handle.ensure_link_absent("br0").unwrap();
        assert_eq!(told(), Some(vec![index]));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_to_their_end(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..256)) {
            read(BTreeSet::new(), &bytes);
        }
    }
}
