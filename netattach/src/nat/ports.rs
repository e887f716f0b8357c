//! Who has which port of the node. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::wish::HostPort;
use super::{Holder, Key, Taken};
use crate::npwg::selection::PortProtocol;

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
