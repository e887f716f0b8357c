//! Which attachment holds which port of the node, how many ports it may hold, and which are reserved. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use super::wish::HostPort;
use super::{Holder, Key, Taken};
use crate::budget::{self, Exceeded};
use crate::npwg::selection::PortProtocol;

/// Ports of the node that must not lead to a pod: a process that listens there would no longer be reached.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reserved {
    /// The TCP port on which the agent itself listens; `None`: it does not listen.
    pub own: Option<u16>,
    /// Ports of the setting `reservedHostPorts`, for every protocol.
    pub set: BTreeSet<u16>,
}

/// Why a port of the node is reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReservedFor {
    /// The agent serves probes and metrics there.
    Agent,
    /// The administrator has reserved the port.
    Setting,
}

impl fmt::Display for ReservedFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Agent => "for netattachd, which listens there (setting metrics.listen)",
            Self::Setting => "by the setting reservedHostPorts",
        })
    }
}

impl Reserved {
    /// Returns the first of these ports that is reserved, and why. The address of the node does not matter,
    /// since processes may listen at any or at all of them.
    pub(super) fn find(&self, ports: &[HostPort]) -> Option<(HostPort, ReservedFor)> {
        ports.iter().find_map(|port| {
            let number = port.at.port();
            if port.protocol == PortProtocol::Tcp && self.own == Some(number) {
                return Some((*port, ReservedFor::Agent));
            }
            self.set.contains(&number).then_some((*port, ReservedFor::Setting))
        })
    }
}

/// Why an attachment gets none of the ports that it asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NoRoom {
    /// Its pod would hold too many ports.
    OfPod(Exceeded),
    /// All pods of the node together would hold too many ports.
    OfNode(Exceeded),
}

/// Checks whether a container may hold that many more ports. `others`: the container of each port that is
/// held.
///
/// # Errors
/// The container, or all containers together, would exceed [`budget::HOST_PORTS_OF_POD`] or
/// [`budget::HOST_PORTS`].
pub(super) fn check_room<'c>(
    others: impl Iterator<Item = &'c str>,
    container: &str,
    more: usize,
) -> Result<(), NoRoom> {
    if more == 0 {
        return Ok(());
    }
    let (mut of_node, mut of_pod) = (more, more);
    for other in others {
        of_node += 1;
        of_pod += usize::from(other == container);
    }
    budget::HOST_PORTS_OF_POD.check(of_pod).map_err(NoRoom::OfPod)?;
    budget::HOST_PORTS.check(of_node).map_err(NoRoom::OfNode)
}

/// The ports of the node that attachments hold.
#[derive(Debug, Default)]
pub(super) struct Ports {
    /// By protocol, family (whether IPv4) and port: the addresses at which it is open, each with its holder.
    held: BTreeMap<(PortProtocol, bool, u16), Vec<(IpAddr, Holder)>>,
}

impl Ports {
    /// Gives the holder these ports, or none of them.
    ///
    /// # Errors
    /// Another attachment holds one of them.
    pub(super) fn claim(&mut self, ports: &[HostPort], holder: &Holder) -> Result<(), Box<Taken>> {
        for port in ports {
            let others = self.held.get(&place(port)).into_iter().flatten();
            let taken = others.filter(|(at, other)| other.key != holder.key && overlap(*at, port.at.ip()));
            if let Some((_, other)) = taken.into_iter().next() {
                return Err(Box::new(Taken { port: *port, holder: other.clone() }));
            }
        }
        self.release(ports, &holder.key);
        for port in ports {
            self.held.entry(place(port)).or_default().push((port.at.ip(), holder.clone()));
        }
        Ok(())
    }

    /// Checks whether these ports fit beside those that other attachments hold.
    ///
    /// # Errors
    /// As of [`check_room`].
    pub(super) fn check_room(&self, ports: &[HostPort], key: &Key) -> Result<(), NoRoom> {
        let others = self.held.values().flatten().filter(|(_, holder)| holder.key != *key);
        check_room(others.map(|(_, holder)| holder.key.container.as_str()), &key.container, ports.len())
    }

    /// Releases these ports of an attachment.
    pub(super) fn release(&mut self, ports: &[HostPort], key: &Key) {
        for port in ports {
            let Some(holders) = self.held.get_mut(&place(port)) else { continue };
            holders.retain(|(_, holder)| holder.key != *key);
            if holders.is_empty() {
                self.held.remove(&place(port));
            }
        }
    }
}

fn place(port: &HostPort) -> (PortProtocol, bool, u16) {
    (port.protocol, port.at.is_ipv4(), port.at.port())
}

/// Whether a packet could be addressed to both addresses of the node.
pub(super) fn overlap(one: IpAddr, other: IpAddr) -> bool {
    one == other || one.is_unspecified() || other.is_unspecified()
}
