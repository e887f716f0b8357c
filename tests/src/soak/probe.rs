//! Packets between pods. Each pod has a socket at each port, which records and echoes datagrams, and one at each of
//! its addresses, from which it sends. A datagram names both ends, so that a receiver knows its sender and its
//! destination.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result};

use super::decide::Key;
use super::model::{Attachment, End};
use super::stranger;
use crate::Namespace;
use crate::traffic::stretched;

/// Ports that every pod listens at, over both protocols.
pub(super) const PORTS: [u16; 3] = [80, 81, 53];

/// A way: from one address to a port of another, by the numbers of both ends.
pub(super) type Way = (u32, u32, u16);

/// A pod's address as an end of packets.
#[derive(Debug)]
struct Place {
    network: String,
    address: IpAddr,
    sender: UdpSocket,
}

/// An end of a way, which is remembered when its pod is gone.
#[derive(Debug, Clone)]
pub(super) struct Known {
    pub(super) node: usize,
    pub(super) pod: Key,
    pub(super) uid: String,
    pub(super) network: String,
    pub(super) address: IpAddr,
}

/// The sockets of a pod. They keep its namespace.
#[derive(Debug)]
struct Station {
    uid: String,
    places: BTreeMap<u32, Place>,
    listeners: Vec<(u16, UdpSocket, TcpListener)>,
}

/// All sockets, and the packets that have arrived since the last query.
#[derive(Debug, Default)]
pub(super) struct Prober {
    stations: BTreeMap<Key, Station>,
    /// Every end so far, by its number.
    known: BTreeMap<u32, Known>,
    round: u32,
    arrived: BTreeSet<Way>,
    answered: BTreeSet<Way>,
}

impl Prober {
    /// Opens the sockets that a pod with these attachments needs, and closes those of others.
    pub(super) fn open(
        &mut self,
        key: &Key,
        namespace: &Namespace,
        node: usize,
        uid: &str,
        attachments: &[Attachment],
    ) -> Result<()> {
        let station = match self.stations.get_mut(key) {
            Some(station) if station.uid == uid => station,
            _ => {
                let listeners = namespace.run(listen)?;
                let station = Station { uid: uid.to_owned(), places: BTreeMap::new(), listeners };
                self.stations.insert(key.clone(), station);
                self.stations.get_mut(key).context("it was put there")?
            }
        };
        let wanted =
            attachments.iter().flat_map(|it| it.addresses.iter().map(|address| (&it.network, *address)));
        let wanted: BTreeSet<_> = wanted.collect();
        station.places.retain(|_, place| wanted.contains(&(&place.network, place.address)));
        for (network, address) in wanted {
            let is_there = |place: &Place| place.network == *network && place.address == address;
            if station.places.values().any(is_there) {
                continue;
            }
            let sender = namespace
                .run(|| bound((address, 0).into()))
                .with_context(|| format!("pod {}/{} sends from {address}", key.0, key.1))?;
            let number = self.known.len() as u32;
            let (pod, uid) = (key.clone(), uid.to_owned());
            self.known.insert(number, Known { node, pod, uid, network: network.clone(), address });
            station.places.insert(number, Place { network: network.clone(), address, sender });
        }
        Ok(())
    }

    /// Closes a pod's sockets.
    pub(super) fn close(&mut self, key: &Key) {
        self.stations.remove(key);
    }

    /// Makes new sockets to send from: flows that were allowed do not count for the next question.
    pub(super) fn renew(&mut self, namespaces: &BTreeMap<&Key, &Namespace>) -> Result<()> {
        for (key, station) in &mut self.stations {
            let Some(namespace) = namespaces.get(key) else { continue };
            for place in station.places.values_mut() {
                let address = place.address;
                let socket = namespace.run(|| bound((address, 0).into()));
                place.sender = socket.with_context(|| format!("send from {address}"))?;
            }
        }
        Ok(())
    }

    /// Returns the data of an end.
    pub(super) fn end(&self, number: u32) -> Option<End<'_>> {
        let Known { node, pod, uid, network, address } = self.known.get(&number)?;
        Some(End { node: *node, pod, uid, network, address: *address })
    }

    /// Ways along which packets can go if no policy is in their way.
    pub(super) fn ways(&self) -> Vec<Way> {
        let numbers = self.stations.values().flat_map(|station| station.places.keys());
        let ends: Vec<_> = numbers.filter_map(|number| Some((*number, self.end(*number)?))).collect();
        let mut ways = Vec::new();
        for (from, source) in &ends {
            for (to, target) in &ends {
                if source.pod != target.pod
                    && source.network == target.network
                    && source.address.is_ipv4() == target.address.is_ipv4()
                    && source.address != target.address
                {
                    ways.extend(PORTS.map(|port| (*from, *to, port)));
                }
            }
        }
        ways
    }

    /// Discards the packets that have arrived; datagrams that are still on their way do not count any more.
    pub(super) fn forget(&mut self) {
        self.round += 1;
        self.arrived.clear();
        self.answered.clear();
    }

    /// Sends a datagram along each of these ways.
    pub(super) fn send(&self, ways: &[Way]) {
        let mut senders = BTreeMap::new();
        for station in self.stations.values() {
            senders.extend(station.places.iter().map(|(number, place)| (*number, place)));
        }
        for (from, to, port) in ways {
            let (Some(source), Some(target)) = (senders.get(from), senders.get(to)) else { continue };
            let mut message = Vec::with_capacity(14);
            for number in [self.round, *from, *to] {
                message.extend(number.to_be_bytes());
            }
            message.extend(port.to_be_bytes());
            // Whatever prevents it from being sent, its absence is noticed at the other end.
            let _ = source.sender.send_to(&message, (target.address, *port));
        }
    }

    /// Reads the packets that have arrived, and answers them.
    pub(super) fn take(&mut self) {
        let mut buffer = [0; 64];
        for (key, station) in &self.stations {
            for (port, udp, tcp) in &station.listeners {
                while let Ok((length, peer)) = udp.recv_from(&mut buffer) {
                    let Some((round, from, to, said)) = read(&buffer[..length]) else { continue };
                    // If several pods have an address, it may have arrived at another one than intended.
                    let own = |number: &u32| station.places.contains_key(number);
                    let meant = self.stations.values().find_map(|it| it.places.get(&to)).map(|it| it.address);
                    let here = station.places.iter().find(|(_, place)| Some(place.address) == meant);
                    let to = if own(&to) { Some(to) } else { here.map(|(number, _)| *number) };
                    if let (true, Some(to), true) = (round == self.round, to, said == *port) {
                        self.arrived.insert((from, to, *port));
                    }
                    // A host with many addresses would answer from any of them, and so open a flow of its own, for
                    // which the next packet there is the answer.
                    if !stranger::is_it(key) {
                        let _ = udp.send_to(&buffer[..length], peer);
                    }
                }
                while let Ok((connection, _)) = tcp.accept() {
                    reset(&connection);
                }
            }
        }
        for station in self.stations.values() {
            for (number, place) in &station.places {
                while let Ok((length, _)) = place.sender.recv_from(&mut buffer) {
                    if let Some((round, from, to, port)) = read(&buffer[..length])
                        && round == self.round
                        && from == *number
                    {
                        self.answered.insert((from, to, port));
                    }
                }
            }
        }
    }

    /// The ways by which datagrams arrived since they were forgotten.
    pub(super) fn passed(&self) -> BTreeSet<Way> {
        self.arrived.clone()
    }

    /// The ways by which datagrams arrived since they were forgotten, and those whose answers came back.
    pub(super) fn found(&self) -> (&BTreeSet<Way>, &BTreeSet<Way>) {
        (&self.arrived, &self.answered)
    }
}

/// Whether a TCP connection can be opened. Its source is the pod's address on the network of the destination.
pub(super) fn connects(from: &Namespace, to: SocketAddr, patience: Duration) -> bool {
    let Ok(connection) = from.run(|| TcpStream::connect_timeout(&to, stretched(patience))) else {
        return false;
    };
    reset(&connection);
    true
}

/// Resets a connection. One that waits for the other end's answer would keep the namespace of an ended pod alive.
fn reset(connection: &TcpStream) {
    // Zero linger time turns the close into RST; if that is refused, the connection is closed in the usual way.
    let _ = rustix::net::sockopt::set_socket_linger(connection, Some(Duration::ZERO));
}

fn listen() -> io::Result<Vec<(u16, UdpSocket, TcpListener)>> {
    let at = |port: u16| -> io::Result<_> {
        let any = SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
        let tcp = TcpListener::bind(any)?;
        tcp.set_nonblocking(true)?;
        Ok((port, bound(any)?, tcp))
    };
    PORTS.into_iter().map(at).collect()
}

fn bound(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(address)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

fn read(message: &[u8]) -> Option<(u32, u32, u32, u16)> {
    let number = |at: usize| Some(u32::from_be_bytes(message.get(at..at + 4)?.try_into().ok()?));
    Some((number(0)?, number(4)?, number(8)?, u16::from_be_bytes(message.get(12..14)?.try_into().ok()?)))
}
