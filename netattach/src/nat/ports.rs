//! Who has which port of the node, how many one may have, and which nobody may. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use super::wish::HostPort;
use super::{Holder, Key, Taken};
use crate::budget::{self, Exceeded};
use crate::npwg::selection::PortProtocol;

/// Ports of the node that lead to no pod: what listens at one would no longer be reached.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reserved {
    /// The port of TCP at which the agent itself listens; `None`: it does at none.
    pub own: Option<u16>,
    /// Those of the setting `reservedHostPorts`, of every protocol.
    pub set: BTreeSet<u16>,
}

/// Why a port of the node is reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReservedFor {
    /// The agent answers probes and gives metrics there.
    Agent,
    /// The administrator has said so.
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
    /// The first of these ports that is reserved, and why: whichever address of the node it is asked for, as processes listen at
    /// all of them or are asked by any.
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
    /// Its pod would have too many.
    OfPod(Exceeded),
    /// All pods of the node together would.
    OfNode(Exceeded),
}

/// Whether a container may have that many ports more. `others`: the container of each port that is held.
///
/// # Errors
/// It, or all of them together, would have more than [`budget::HOST_PORTS_OF_POD`] or [`budget::HOST_PORTS`].
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

/// The ports of the node that attachments have.
#[derive(Debug, Default)]
pub(super) struct Ports {
    /// By protocol, family (whether IPv4) and port: at which addresses, and whose.
    held: BTreeMap<(PortProtocol, bool, u16), Vec<(IpAddr, Holder)>>,
}

impl Ports {
    /// Gives the holder these ports, or none of them.
    ///
    /// # Errors
    /// Another has one of them.
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

    /// Whether there is room for these beside those that other attachments have.
    ///
    /// # Errors
    /// As of [`check_room`].
    pub(super) fn check_room(&self, ports: &[HostPort], key: &Key) -> Result<(), NoRoom> {
        let others = self.held.values().flatten().filter(|(_, holder)| holder.key != *key);
        check_room(others.map(|(_, holder)| holder.key.container.as_str()), &key.container, ports.len())
    }

    /// Takes these ports back from an attachment.
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

/// Whether a packet could be to both addresses of the node.
pub(super) fn overlap(one: IpAddr, other: IpAddr) -> bool {
    one == other || one.is_unspecified() || other.is_unspecified()
}
