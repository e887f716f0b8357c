//! Reports which of the node's links have changed since the last call, or have had changes of addresses or
//! routes.

use std::collections::BTreeSet;
use std::io;

use netlink_sys::Socket as RawSocket;

use super::receive::{Receiver, subscribed};

/// `RTNLGRP_LINK`, `RTNLGRP_IPV4_IFADDR`, `RTNLGRP_IPV4_ROUTE`, `RTNLGRP_IPV6_IFADDR` and `RTNLGRP_IPV6_ROUTE` of
/// `linux/rtnetlink.h`.
const GROUPS: [u32; 5] = [1, 5, 7, 9, 11];
const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const RTM_NEWROUTE: u16 = 24;
const RTM_DELROUTE: u16 = 25;
const HEADER: usize = 16;
/// Offset of the link's index in `ifinfomsg` and `ifaddrmsg`.
const INDEX_AT: usize = HEADER + 4;
/// Where the attributes of links and of routes begin.
const OF_LINK: usize = HEADER + 16;
const OF_ROUTE: usize = HEADER + 12;
/// `IFLA_IFNAME` and `RTA_OIF`.
const NAME: u16 = 3;
const LINK: u16 = 4;
/// `NLM_F_REPLACE`, `NLM_F_EXCL` and `NLM_F_APPEND`. In a notification they say whether the route has
/// replaced another one, is the first to its destination, or was added beside others.
const REPLACE: u16 = 0x100;
const FIRST: u16 = 0x200;
const BESIDE: u16 = 0x800;
const AF_INET: u8 = 2;
/// `NLA_TYPE_MASK`.
const TYPE: u16 = 0x3fff;
/// Bytes of notifications that may be queued between two calls: see [`LinkWatch`](super::LinkWatch).
const QUEUE: usize = 1 << 20;
/// Most datagrams that are read in one call: more than fit into the queue, so the limit is only reached while
/// notifications arrive as fast as they are read.
const MOST_READ: usize = 1 << 14;
/// Most links that are listed separately, and most of their names. Beyond that, checking all links takes no
/// longer.
const MOST_LINKS: usize = 4096;

/// What has changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Changed {
    /// These links, or their addresses or routes.
    Of(ChangedLinks),
    /// The kernel dropped notifications, or a notification does not say what was there before: anything may
    /// have changed.
    Anything,
}

/// Links that have changed, appeared or disappeared.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ChangedLinks {
    /// Their indices.
    pub indices: BTreeSet<u32>,
    /// The names that they have or had last.
    pub names: BTreeSet<String>,
}

impl Default for Changed {
    fn default() -> Self {
        Self::Of(ChangedLinks::default())
    }
}

impl Changed {
    /// Whether nothing has changed.
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }

    /// Merges both.
    pub fn extend(&mut self, other: Self) {
        match other {
            Self::Of(others) => {
                if let Self::Of(links) = self {
                    links.indices.extend(others.indices);
                    links.names.extend(others.names);
                }
                self.bound();
            }
            Self::Anything => *self = Self::Anything,
        }
    }

    /// Bounds the memory: a process could create and delete links without end while checks fail.
    fn bound(&mut self) {
        if let Self::Of(links) = self
            && links.indices.len().max(links.names.len()) > MOST_LINKS
        {
            *self = Self::Anything;
        }
    }

    /// Processes the messages of a datagram.
    fn read(&mut self, datagram: &[u8]) {
        for message in messages(datagram).map(alone) {
            self.take(message);
            self.bound();
        }
    }

    fn take(&mut self, message: &[u8]) {
        let Self::Of(links) = self else { return };
        match (half(message, 4), half(message, 6)) {
            (Some(RTM_NEWLINK | RTM_DELLINK), _) => {
                links.indices.extend(word(message, INDEX_AT));
                let name = attribute(message, OF_LINK, NAME).unwrap_or_default();
                let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
                links.names.insert(String::from_utf8_lossy(&name[..end]).into_owned());
            }
            (Some(RTM_NEWADDR | RTM_DELADDR), _) => links.indices.extend(word(message, INDEX_AT)),
            // The kernel does not report the route that was replaced.
            (Some(RTM_NEWROUTE), Some(flags)) if replaces(message.get(HEADER), flags) => {
                *self = Self::Anything;
            }
            (Some(RTM_DELROUTE), _) => {
                links.indices.extend(attribute(message, OF_ROUTE, LINK).and_then(|index| word(index, 0)));
            }
            _ => {}
        }
    }
}

/// Whether a new route of that family may have replaced another one. For IPv6 the kernel sets only one flag.
fn replaces(family: Option<&u8>, flags: u16) -> bool {
    flags & REPLACE != 0 || (family == Some(&AF_INET) && flags & (FIRST | BESIDE) == 0)
}

/// Receives the kernel's notifications in the namespace of the thread that opened it, and keeps only which
/// links they are about: the caller reads their present state. Costs nothing between calls.
pub struct ChangeWatch {
    raw: RawSocket,
    receiver: Receiver,
}

impl ChangeWatch {
    /// Starts listening.
    ///
    /// # Errors
    /// The socket cannot be opened.
    pub fn open() -> io::Result<Self> {
        let raw = subscribed(GROUPS, QUEUE)?;
        Ok(Self { raw, receiver: Receiver::of_notifications() })
    }

    /// Returns the changes since the last call. Also returns while other programs change routes as fast as
    /// the notifications are read, such as a routing daemon that has lost a neighbour, so that the caller can
    /// go on.
    pub fn changed(&mut self) -> Changed {
        let mut changed = Changed::default();
        for _ in 0..MOST_READ {
            match self.receiver.receive(&self.raw) {
                Ok(()) => changed.read(self.receiver.bytes()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return changed,
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => changed = Changed::Anything,
                // Without notifications the caller has to check everything.
                Err(_) => return Changed::Anything,
            }
        }
        Changed::Anything
    }
}

impl std::fmt::Debug for ChangeWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChangeWatch").finish_non_exhaustive()
    }
}

/// Returns the messages of a datagram, each with all that follows it. Every one of them has a length, which may be less
/// than a header's or more than there is: any bytes may be read, and are read to their end.
pub(super) fn messages(datagram: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::successors(Some(datagram), |from| {
        let length = word(from, 0)? as usize;
        from.get(length.max(HEADER).checked_next_multiple_of(4)?..)
    })
    .take_while(|from| word(from, 0).is_some())
}

/// Returns a message without what follows it in its datagram.
pub(super) fn alone(message: &[u8]) -> &[u8] {
    let length = word(message, 0).unwrap_or_default() as usize;
    message.get(..length).unwrap_or(message)
}

/// The value of the first attribute of that kind.
pub(super) fn attribute(message: &[u8], mut at: usize, wanted: u16) -> Option<&[u8]> {
    loop {
        let (length, kind) = (usize::from(half(message, at)?), half(message, at + 2)? & TYPE);
        let value = message.get(at + 4..at + length)?;
        if kind == wanted {
            return Some(value);
        }
        at += length.next_multiple_of(4);
    }
}

pub(super) fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes_at(bytes, at).map(u32::from_ne_bytes)
}

pub(super) fn half(bytes: &[u8], at: usize) -> Option<u16> {
    bytes_at(bytes, at).map(u16::from_ne_bytes)
}

/// The `N` bytes from an offset on, if there are as many.
pub(super) fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::Handle;
    use crate::netns::{Netns, within};

    fn of(indices: &[u32], names: &[&str]) -> Changed {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        Changed::Of(ChangedLinks { indices: indices.iter().copied().collect(), names })
    }

    fn message((kind, flags): (u16, u16), body: &[u8], attributes: &[(u16, &[u8])]) -> Vec<u8> {
        let mut message = vec![0; HEADER];
        message.extend(body);
        for (kind, value) in attributes {
            message.extend((4 + value.len() as u16).to_ne_bytes());
            message.extend(kind.to_ne_bytes());
            message.extend(*value);
            message.resize(message.len().next_multiple_of(4), 0);
        }
        let length = message.len() as u32;
        message[..4].copy_from_slice(&length.to_ne_bytes());
        message[4..6].copy_from_slice(&kind.to_ne_bytes());
        message[6..8].copy_from_slice(&flags.to_ne_bytes());
        message
    }

    fn body<const N: usize>(index: u32) -> [u8; N] {
        let mut body = [0; N];
        body[4..8].copy_from_slice(&index.to_ne_bytes());
        body
    }

    fn read(datagrams: &[Vec<u8>]) -> Changed {
        let mut changed = Changed::default();
        changed.read(&datagrams.concat());
        changed
    }

    #[test]
    fn changes_say_which_links_they_are_about() {
        let mtu = 1500_u32.to_ne_bytes();
        let link = message((RTM_NEWLINK, 0), &body::<16>(7), &[(4, &mtu[..]), (NAME, &b"br0\0"[..])]);
        let gone = message((RTM_DELLINK, 0), &body::<16>(8), &[(NAME, &b"na0\0"[..])]);
        let address = message((RTM_DELADDR, 0), &body::<8>(9), &[(1, &[10, 0, 0, 1][..])]);
        let route = |kind, flags, index: u32| {
            let mut body = [0; 12];
            body[0] = AF_INET;
            message((kind, flags), &body, &[(1, &[10, 0, 0, 1][..]), (LINK, &index.to_ne_bytes()[..])])
        };
        assert_eq!(read(&[link.clone(), gone, address]), of(&[7, 8, 9], &["br0", "na0"]));
        assert_eq!(read(&[route(RTM_DELROUTE, 0, 5)]), of(&[5], &[]));
        // A new route removes nothing; a replaced route is not identified.
        assert!(read(&[route(RTM_NEWROUTE, FIRST, 5), route(RTM_NEWROUTE, BESIDE, 5)]).is_nothing());
        for flags in [REPLACE, 0] {
            assert_eq!(read(&[link.clone(), route(RTM_NEWROUTE, flags, 5)]), Changed::Anything);
        }
        // A multipath route is not one of netattach's.
        assert!(read(&[message((RTM_DELROUTE, 0), &[0; 12], &[(9, &[0; 8][..])])]).is_nothing());
    }

    #[test]
    fn what_follows_a_message_is_none_of_it_and_of_one_that_is_cut_off_the_rest_is_read() {
        let route = |length: u32| {
            let mut route = message((RTM_DELROUTE, 0), &[0; 12], &[(LINK, &5_u32.to_ne_bytes()[..])]);
            route[..4].copy_from_slice(&length.to_ne_bytes());
            route
        };
        assert_eq!(read(&[route(36)]), of(&[5], &[]));
        assert!(read(&[route(28)]).is_nothing());
        let link = message((RTM_NEWLINK, 0), &body::<16>(7), &[(NAME, &b"br0\0"[..])]);
        assert_eq!(read(&[link[..INDEX_AT + 4].to_vec()]), of(&[7], &[""]));
        assert_eq!(read(&[link[..INDEX_AT].to_vec()]), of(&[], &[""]));
        assert!(read(&[link[..5].to_vec()]).is_nothing());
    }

    #[test]
    fn a_datagram_is_read_from_message_to_message_whatever_their_lengths() {
        let says = |length: u32, bytes: usize| {
            let mut message = vec![0; bytes];
            message[..4].copy_from_slice(&length.to_ne_bytes());
            message
        };
        let table = [
            ("padded", vec![says(20, 20), says(33, 36), says(16, 16)], vec![72, 52, 16]),
            ("cut off", vec![says(20, 20), says(20, 6)], vec![26, 6]),
            ("cut off in its length", vec![says(16, 16), vec![0; 3]], vec![19]),
            ("of the greatest length", vec![says(u32::MAX, 40)], vec![40]),
            ("shorter than a header", vec![says(0, 16), says(15, 16), says(4, 8)], vec![40, 24, 8]),
            ("none", vec![], vec![]),
        ];
        for (what, datagram, expected) in table {
            let datagram = datagram.concat();
            let lengths: Vec<usize> = messages(&datagram).map(<[u8]>::len).collect();
            assert_eq!(lengths, expected, "{what}");
        }
    }

    #[test]
    fn of_very_many_links_that_have_changed_all_are_looked_at() {
        let link = |index: u32| message((RTM_DELLINK, 0), &body::<16>(index), &[(NAME, &b"na0\0"[..])]);
        let most = MOST_LINKS as u32;
        let links = |range: std::ops::Range<u32>| read(&range.map(link).collect::<Vec<_>>());
        let all: Vec<u32> = (0..most).collect();
        assert_eq!(links(0..most), of(&all, &["na0"]));
        assert_eq!(links(0..most + 1), Changed::Anything);
        // Links from failed checks are kept for the next check.
        let mut kept = links(0..most);
        kept.extend(links(7..8));
        assert_eq!(kept, of(&all, &["na0"]));
        kept.extend(links(most..most + 1));
        assert_eq!(kept, Changed::Anything);
        let names: Vec<String> = (0..=MOST_LINKS).map(|number| format!("na{number}")).collect();
        let mut named = Changed::default();
        named.extend(of(&[7], &names.iter().map(String::as_str).collect::<Vec<_>>()));
        assert_eq!(named, Changed::Anything);
    }

    #[test]
    fn what_changes_is_told_once() {
        let netns = Netns::private().unwrap();
        let mut watch = within(&netns, || ChangeWatch::open().unwrap()).unwrap();
        assert!(watch.changed().is_nothing());
        let mut handle = Handle::open_in(&netns).unwrap();
        let loopback = handle.link("lo").unwrap();
        handle.ensure_up(loopback.index).unwrap();
        assert_eq!([watch.changed(), watch.changed()], [of(&[loopback.index], &["lo"]), Changed::default()]);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_to_their_end(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..256)) {
            Changed::default().read(&bytes);
        }
    }
}
