//! Permanent neighbour entries, for neighbours that are not resolved by ARP or neighbour discovery.

use std::net::IpAddr;

use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::socket::{CREATE, NetlinkRequest, REPLACE};
use super::{Error, Handle};
use crate::mac::Mac;

impl Handle {
    /// Adds permanent entries with the Ethernet addresses of these neighbours to a link. They stay until they
    /// are deleted or the link is. Idempotent.
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

    /// Returns the Ethernet address in a link's neighbour entry, if there is one.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn neighbour(&mut self, index: u32, address: IpAddr) -> Result<Option<Mac>, Error> {
        let asked = RouteNetlinkMessage::GetNeighbour(entry(index, address));
        match self.socket.request(asked, 0) {
            Err(error) if error.errno() == Some(rustix::io::Errno::NOENT) => Ok(None),
            shown => Ok(shown?.into_iter().find_map(known_by)),
        }
    }

    /// Deletes the entries of these neighbours. Idempotent.
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

fn known_by(shown: RouteNetlinkMessage) -> Option<Mac> {
    let RouteNetlinkMessage::NewNeighbour(entry) = shown else { return None };
    entry.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::LinkLayerAddress(bytes) => bytes.as_slice().try_into().ok().map(Mac),
        _ => None,
    })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::{Netns, within};
    use crate::spec::Veth;

    /// Needs root, like the agent.
    #[test]
    fn a_neighbour_is_known_by_what_was_entered() {
        use std::os::fd::AsFd;

        let netns = Netns::private().unwrap();
        within(&netns, || {
            let (mut host, mut pod) = (Handle::open().unwrap(), Handle::open().unwrap());
            let veth = Veth {
                host_name: "a".to_owned(),
                pod_name: "b".to_owned(),
                mtu: None,
                mac: None,
                group: 1,
                port: None,
            };
            let (made, _) = host.create_veth(&veth, None, netns.as_fd(), &mut pod).unwrap();
            host.ensure_up(made.index).unwrap();
            for address in ["10.1.0.2", "fd00::2"].map(|text| text.parse::<IpAddr>().unwrap()) {
                assert_eq!(host.neighbour(made.index, address).unwrap(), None);
                for mac in [1, 2].map(|last| Mac([2, 0, 0, 0, 0, last])) {
                    host.ensure_neighbours(made.index, &[(address, mac)]).unwrap();
                    assert_eq!(host.neighbour(made.index, address).unwrap(), Some(mac));
                }
            }
        })
        .unwrap();
    }
}
