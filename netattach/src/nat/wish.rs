//! What an attachment wants of the node's translation of addresses, as elements of the table's sets. Pure.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use sha2::{Digest, Sha256};

use crate::netlink::nat::{Element, Set};
use crate::npwg::selection::{PortMapping, PortProtocol};
use crate::step::{LeasedAddress, Translate};

/// What is never masqueraded: who is on the link, and groups.
const NEVER_V4: [Ipv4Net; 2] = [
    Ipv4Net::new_assert(Ipv4Addr::new(169, 254, 0, 0), 16),
    Ipv4Net::new_assert(Ipv4Addr::new(224, 0, 0, 0), 4),
];
/// The same of IPv6.
const NEVER_V6: [Ipv6Net; 2] = [
    Ipv6Net::new_assert(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), 10),
    Ipv6Net::new_assert(Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0), 8),
];
/// Length of a device's name in a register.
const DEVICE_LENGTH: usize = 16;

/// A port of the node that leads to a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostPort {
    /// The protocol.
    pub protocol: PortProtocol,
    /// Address and port of the node; the unspecified address stands for all of its family.
    pub at: SocketAddr,
    /// Address and port of the pod.
    pub to: SocketAddr,
}

/// What one attachment wants.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wish {
    /// Its elements; others may want some of them too.
    pub(super) elements: BTreeSet<Element>,
    /// Its ports of the node, which nobody else may have.
    pub(super) ports: Vec<HostPort>,
    /// The device that addresses of loopback must be able to leave by.
    pub(super) opened: Option<String>,
}

/// A port of the node that cannot lead to the pod.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("hostPort {port} of {at} asked for, but the attachment has no {family} address")]
pub struct NoAddress {
    /// The port.
    pub port: u16,
    /// The address of the node.
    pub at: String,
    /// `IPv4`, `IPv6`, or `IP` for either.
    pub family: &'static str,
}

impl Wish {
    /// What a step wants for an attachment with these addresses. Ports lead to the first address of each family.
    ///
    /// # Errors
    /// A port of the node cannot lead to any of them.
    pub fn new(translate: &Translate, leased: &[LeasedAddress]) -> Result<Self, NoAddress> {
        let mut wish = Self::default();
        let addresses: Vec<IpNet> = leased.iter().map(|leased| leased.address).collect();
        for v4 in [true, false] {
            let own: Vec<IpNet> =
                addresses.iter().filter(|net| net.addr().is_ipv4() == v4).copied().collect();
            if let Some(except) = &translate.masquerade {
                wish.masquerade(&own, except);
            }
            let Some(pod) = own.first().map(IpNet::addr) else { continue };
            let neighbours = if translate.bridged {
                own.iter().map(IpNet::trunc).collect()
            } else {
                vec![IpNet::from(pod)]
            };
            let mapped = translate.ports.iter().filter_map(|port| Some((port, at(port, v4)?)));
            for (port, address) in mapped {
                wish.open(port, address, pod, &neighbours);
                if matches!(address, IpAddr::V4(v4) if v4.is_unspecified() || v4.is_loopback()) {
                    wish.opened = Some(translate.device.clone());
                }
            }
        }
        wish.elements.extend(wish.opened.as_deref().map(device));
        match translate.ports.iter().find(|port| !wish.has(port)) {
            Some(port) => Err(NoAddress {
                port: port.host_port,
                at: port.host_ip.map_or_else(|| "the node".to_owned(), |address| address.to_string()),
                family: port.host_ip.map_or("IP", |it| if it.is_ipv4() { "IPv4" } else { "IPv6" }),
            }),
            None => Ok(wish),
        }
    }

    /// What keeps addresses of loopback out of a device, and nothing else.
    pub(super) fn of_device(name: &str) -> Self {
        Self { elements: [device(name)].into(), ports: Vec::new(), opened: Some(name.to_owned()) }
    }

    /// Its ports of the node.
    pub fn ports(&self) -> &[HostPort] {
        &self.ports
    }

    fn has(&self, port: &PortMapping) -> bool {
        self.ports.iter().any(|open| {
            open.protocol == port.protocol
                && open.at.port() == port.host_port
                && port.host_ip.is_none_or(|address| open.at.ip() == address)
        })
    }

    /// Masquerades these addresses of one family.
    fn masquerade(&mut self, own: &[IpNet], except: &[IpNet]) {
        let Some(first) = own.first() else { return };
        let v4 = first.addr().is_ipv4();
        let never: Vec<IpNet> =
            if v4 { NEVER_V4.map(IpNet::from).to_vec() } else { NEVER_V6.map(IpNet::from).to_vec() };
        let of_family = except.iter().filter(|net| net.addr().is_ipv4() == v4).copied();
        let list = self.list(v4, never.into_iter().chain(of_family).chain(own.iter().map(IpNet::trunc)));
        for net in own {
            self.elements.insert(Element {
                set: if v4 { Set::Masquerade4 } else { Set::Masquerade6 },
                key: octets(net.addr()),
                end: None,
                value: list.to_vec(),
            });
        }
    }

    /// Opens a port at an address of the node.
    fn open(&mut self, port: &PortMapping, at: IpAddr, pod: IpAddr, neighbours: &[IpNet]) {
        let v4 = pod.is_ipv4();
        let list = self.list(v4, neighbours.iter().copied());
        let protocol = word(&[port.protocol.number()]);
        let [host, container] = [port.host_port, port.container_port].map(|it| word(&it.to_be_bytes()));
        self.elements.insert(Element {
            set: if v4 { Set::Ports4 } else { Set::Ports6 },
            key: [octets(at), protocol.clone(), host.clone()].concat(),
            end: None,
            value: [octets(pod), container.clone()].concat(),
        });
        self.elements.insert(Element {
            set: if v4 { Set::Mapped4 } else { Set::Mapped6 },
            key: [octets(pod), protocol, container, host].concat(),
            end: None,
            value: list.to_vec(),
        });
        self.ports.push(HostPort {
            protocol: port.protocol,
            at: SocketAddr::new(at, port.host_port),
            to: SocketAddr::new(pod, port.container_port),
        });
    }

    /// Enters a list of prefixes of one family; returns its name, which follows from its content.
    fn list(&mut self, v4: bool, nets: impl Iterator<Item = IpNet>) -> [u8; 6] {
        // Ranges of one list must not overlap.
        let mut nets = IpNet::aggregate(&nets.collect());
        nets.sort();
        let text: String = nets.iter().map(|net| format!("{net} ")).collect();
        let digest = Sha256::digest(text);
        let mut name = [0; 6];
        name.copy_from_slice(&digest[..6]);
        let key = |address| [word(&name), octets(address)].concat();
        self.elements.extend(nets.iter().map(|net| Element {
            set: if v4 { Set::Prefixes4 } else { Set::Prefixes6 },
            key: key(net.network()),
            end: Some(key(net.broadcast())),
            value: Vec::new(),
        }));
        name
    }
}

/// The address of the node at which a port is opened in a family; `None`: at none.
fn at(port: &PortMapping, v4: bool) -> Option<IpAddr> {
    match port.host_ip {
        None if v4 => Some(Ipv4Addr::UNSPECIFIED.into()),
        None => Some(Ipv6Addr::UNSPECIFIED.into()),
        Some(address) => (address.is_ipv4() == v4).then_some(address),
    }
}

fn device(name: &str) -> Element {
    let mut key = name.as_bytes().to_vec();
    key.resize(DEVICE_LENGTH, 0);
    Element { set: Set::Devices, key, end: None, value: Vec::new() }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

/// A value that begins in a register of its own: padded to whole words.
fn word(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}
