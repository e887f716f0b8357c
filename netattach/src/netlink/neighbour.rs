//! Neighbours that are entered for good, where nobody is to be asked.

use std::net::IpAddr;

use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::socket::{CREATE, NetlinkRequest, REPLACE};
use super::{Error, Handle};
use crate::mac::Mac;

impl Handle {
    /// Enters the Ethernet addresses of these neighbours on a link, until they are taken out or the link goes. Idempotent.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn ensure_neighbours(&mut self, index: u32, neighbours: &[(IpAddr, Mac)]) -> Result<(), Error> {
        let requests = neighbours.iter().map(|(address, mac)| {
            let mut entry = entry(index, *address);
            entry.header.state = NeighbourState::Permanent;
            entry.attributes.push(NeighbourAttribute::LinkLayerAddress(mac.0.to_vec()));
            NetlinkRequest::new(RouteNetlinkMessage::NewNeighbour(entry), CREATE | REPLACE)
        });
        self.socket.all(requests.collect())
    }

    /// Takes these neighbours out. Idempotent.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn ensure_neighbours_absent(&mut self, index: u32, neighbours: &[IpAddr]) -> Result<(), Error> {
        let gone = |address: &IpAddr| {
            NetlinkRequest::new(RouteNetlinkMessage::DelNeighbour(entry(index, *address)), 0)
        };
        self.socket.all_but(neighbours.iter().map(gone).collect(), &[rustix::io::Errno::NOENT])
    }
}

fn entry(index: u32, address: IpAddr) -> NeighbourMessage {
    let mut entry = NeighbourMessage::default();
    entry.header.ifindex = index;
    let (family, destination) = match address {
        IpAddr::V4(address) => (AddressFamily::Inet, NeighbourAddress::Inet(address)),
        IpAddr::V6(address) => (AddressFamily::Inet6, NeighbourAddress::Inet6(address)),
    };
    entry.header.family = family;
    entry.attributes.push(NeighbourAttribute::Destination(destination));
    entry
}
