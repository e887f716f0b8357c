//! The stations in bridges' forwarding databases: queries and notifications.

use std::io;
use std::os::fd::{AsRawFd, RawFd};

use netlink_packet_route::neighbour::{NeighbourAttribute, NeighbourMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::{Socket as RawSocket, protocols::NETLINK_ROUTE};
use rustix::io::Errno;

use super::change_watch::{alone, bytes_at, half, messages, word};
use super::readable::readable;
use super::receive::Receiver;
use super::socket::NetlinkRequest;
use super::socket_filter::{By, receive_only};
use super::{Error, Handle};
use crate::mac::Mac;

/// `RTNLGRP_NEIGH`: neighbours of every kind, including bridge entries.
const GROUP_NEIGH: u32 = 3;
const RTM_NEWNEIGH: u16 = 28;
const RTM_DELNEIGH: u16 = 29;
/// `AF_BRIDGE`, in the width of the field in `ndmsg`.
const AF_BRIDGE: u8 = 7;
const HEADER_LEN: usize = 16;
/// Offsets of `ndmsg` and of its attributes.
const FAMILY_AT: usize = HEADER_LEN;
const INDEX_AT: usize = HEADER_LEN + 4;
const ATTRIBUTES_AT: usize = HEADER_LEN + 12;
const NDA_LLADDR: u16 = 2;
const NDA_MASTER: u16 = 9;
/// Maximum number of entries queried in one datagram.
const AT_ONCE: usize = 32;

/// An entry of a bridge's forwarding database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Station {
    /// The station's address.
    pub mac: Mac,
    /// Index of the port; the bridge's own index for an address of the bridge itself.
    pub port: u32,
    /// Whether the entry was configured or is an address of the node. Otherwise the bridge has learned it, and removes
    /// it when the station is not seen for a while.
    pub kept: bool,
}

/// A change of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// Index of the bridge.
    pub bridge: u32,
    /// The station.
    pub mac: Mac,
    /// The port of the station from now on; `None`: the station is unknown.
    pub port: Option<u32>,
}

/// The changes since the last call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Moves {
    /// These changes, in order.
    Of(Vec<Move>),
    /// The kernel dropped notifications: any entry may have changed.
    Anything,
}

impl Handle {
    /// Returns for each of these stations the port behind which the bridge of that index knows it; `None`:
    /// unknown, or there is no such bridge.
    pub fn whereabouts(&mut self, wanted: &[(u32, Mac)]) -> Result<Vec<Option<u32>>, Error> {
        let mut found = Vec::with_capacity(wanted.len());
        for some in wanted.chunks(AT_ONCE) {
            let asked = some.iter().map(|(bridge, mac)| {
                let mut entry = of_bridge(*bridge);
                entry.attributes.push(NeighbourAttribute::LinkLayerAddress(mac.0.to_vec()));
                NetlinkRequest::new(RouteNetlinkMessage::GetNeighbour(entry), 0)
            });
            for reply in self.socket.batch(asked.collect())? {
                found.push(match reply {
                    Ok(answers) => answers.into_iter().find_map(observed).map(|station| station.port),
                    Err(refused) => match Errno::from_raw_os_error(refused.errno) {
                        Errno::NOENT | Errno::NODEV | Errno::OPNOTSUPP => None,
                        _ => return Err(refused.into()),
                    },
                });
            }
        }
        Ok(found)
    }

    /// All stations in a bridge's database, in any VLAN. A bridge that is gone knows none.
    pub fn stations(&mut self, bridge: u32) -> Result<Vec<Station>, Error> {
        match self.socket.dump(RouteNetlinkMessage::GetNeighbour(of_bridge(bridge))) {
            Err(error) if error.not_found() => Ok(Vec::new()),
            all => Ok(all?.into_iter().filter_map(observed).collect()),
        }
    }
}

fn of_bridge(bridge: u32) -> NeighbourMessage {
    let mut entry = NeighbourMessage::default();
    entry.header.family = AddressFamily::Bridge;
    entry.attributes.push(NeighbourAttribute::Controller(bridge));
    entry
}

fn observed(message: RouteNetlinkMessage) -> Option<Station> {
    use netlink_packet_route::neighbour::NeighbourState as State;
    let RouteNetlinkMessage::NewNeighbour(entry) = message else { return None };
    let mac = entry.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::LinkLayerAddress(bytes) => <[u8; 6]>::try_from(bytes.as_slice()).ok().map(Mac),
        _ => None,
    })?;
    let kept = matches!(entry.header.state, State::Permanent | State::Noarp);
    Some(Station { mac, port: entry.header.ifindex, kept })
}

/// Receives notifications when bridges of the namespace learn, move and remove stations. Readable if there are any.
pub struct StationWatch {
    raw: RawSocket,
    receiver: Receiver,
}

impl StationWatch {
    /// Starts listening.
    pub fn open() -> Result<Self, Error> {
        let mut raw = RawSocket::new(NETLINK_ROUTE).map_err(Error::Open)?;
        raw.bind_auto().map_err(Error::Open)?;
        receive_only(&raw, By::Family(AF_BRIDGE)).map_err(Error::Open)?;
        raw.add_membership(GROUP_NEIGH).map_err(Error::Open)?;
        raw.set_non_blocking(true).map_err(Error::Open)?;
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
    pub fn moves(&mut self) -> Result<Moves, Error> {
        let mut moves = Vec::new();
        let mut lost = false;
        loop {
            match self.receiver.receive(&self.raw) {
                Ok(()) => read(self.receiver.bytes(), &mut moves),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // The queue was full: the kernel reports it once and continues with later notifications.
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => lost = true,
                Err(error) => return Err(Error::Receive("notifications about stations", error)),
            }
        }
        Ok(if lost { Moves::Anything } else { Moves::Of(moves) })
    }
}

impl AsRawFd for StationWatch {
    fn as_raw_fd(&self) -> RawFd {
        self.raw.as_raw_fd()
    }
}

impl std::fmt::Debug for StationWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StationWatch").finish_non_exhaustive()
    }
}

/// Reads the notifications of one datagram. Those about neighbours other than bridge entries are ignored.
fn read(datagram: &[u8], moves: &mut Vec<Move>) {
    moves.extend(messages(datagram).map(alone).filter_map(one));
}

fn one(message: &[u8]) -> Option<Move> {
    let gone = match half(message, 4)? {
        RTM_NEWNEIGH => false,
        RTM_DELNEIGH => true,
        _ => return None,
    };
    if *message.get(FAMILY_AT)? != AF_BRIDGE {
        return None;
    }
    let port = word(message, INDEX_AT)?;
    let (mut mac, mut bridge) = (None, None);
    let mut attributes = message.get(ATTRIBUTES_AT..)?;
    while let Some(length) = half(attributes, 0).map(usize::from) {
        match half(attributes, 2)? {
            NDA_LLADDR => mac = bytes_at(attributes, 4).map(Mac),
            NDA_MASTER => bridge = word(attributes, 4),
            _ => {}
        }
        let Some(rest) = attributes.get(length.max(4).next_multiple_of(4)..) else { break };
        attributes = rest;
    }
    // An address of the bridge itself has no port, but the bridge's index.
    Some(Move { bridge: bridge.unwrap_or(port), mac: mac?, port: Some(port).filter(|_| !gone) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);

    fn message(kind: u16, family: u8, port: u32) -> Vec<u8> {
        let mut message = vec![0; ATTRIBUTES_AT];
        message[4..6].copy_from_slice(&kind.to_ne_bytes());
        message[FAMILY_AT] = family;
        message[INDEX_AT..INDEX_AT + 4].copy_from_slice(&port.to_ne_bytes());
        for (kind, value) in [(NDA_LLADDR, &MAC.0[..]), (NDA_MASTER, &3u32.to_ne_bytes())] {
            message.extend((4 + value.len() as u16).to_ne_bytes());
            message.extend(kind.to_ne_bytes());
            message.extend(value);
            message.resize(message.len().next_multiple_of(4), 0);
        }
        let length = message.len() as u32;
        message[..4].copy_from_slice(&length.to_ne_bytes());
        message
    }

    fn moves(datagram: &[u8]) -> Vec<Move> {
        let mut moves = Vec::new();
        read(datagram, &mut moves);
        moves
    }

    #[test]
    fn changes_of_bridge_entries_are_reported_and_other_neighbours_are_not() {
        let datagram = [
            message(RTM_NEWNEIGH, AF_BRIDGE, 7),
            message(RTM_NEWNEIGH, 2, 8),
            message(RTM_DELNEIGH, AF_BRIDGE, 7),
            message(16, AF_BRIDGE, 9),
        ];
        let expected = [Some(7), None].map(|port| Move { bridge: 3, mac: MAC, port });
        assert_eq!(moves(&datagram.concat()), expected);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_to_their_end(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..256)) {
            moves(&bytes);
        }
    }
}
