//! What an attachment wants of the node's translation of addresses, as elements of the table's sets. Pure.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ipnet::IpNet;
use sha2::{Digest, Sha256};

use super::exceptions;
use crate::netlink::nat::{Element, Set};
use crate::npwg::selection::{PortMapping, PortProtocol};
use crate::step::{LeasedAddress, Translate};

/// Length of a device's name in a register.
const DEVICE_LENGTH: usize = 16;

/// The name of a list of prefixes.
pub(super) type List = [u8; 6];
/// The bit of the first byte that all names have which follow from the content of their lists.
const OF_DIGEST: u8 = 0x80;

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
    /// Its own subnets, which are exceptions of the node while the attachment is there; empty: it does not follow the
    /// exceptions of the node.
    pub(super) follows: Vec<IpNet>,
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
            match &translate.masquerade {
                Some(_) if translate.follows_node => wish.masquerade_as_the_node(&own),
                Some(except) => wish.masquerade(&own, except),
                None => {}
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
        Self { elements: [device(name)].into(), opened: Some(name.to_owned()), ..Self::default() }
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
        let of_family = except.iter().filter(|net| net.addr().is_ipv4() == v4).copied();
        let never = exceptions::never(v4).into_iter();
        let list = self.list(never.chain(of_family).chain(own.iter().map(IpNet::trunc)));
        self.sources(own, list);
    }

    /// The same, but for the exceptions of the node.
    fn masquerade_as_the_node(&mut self, own: &[IpNet]) {
        self.sources(own, exceptions::LIST);
        self.follows.extend(own.iter().map(IpNet::trunc));
    }

    fn sources(&mut self, own: &[IpNet], list: List) {
        self.elements.extend(own.iter().map(|net| Element {
            set: if net.addr().is_ipv4() { Set::Masquerade4 } else { Set::Masquerade6 },
            key: octets(net.addr()),
            end: None,
            value: named(list),
        }));
    }

    /// Opens a port at an address of the node.
    fn open(&mut self, port: &PortMapping, at: IpAddr, pod: IpAddr, neighbours: &[IpNet]) {
        let v4 = pod.is_ipv4();
        let list = self.list(neighbours.iter().copied());
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
            value: named(list),
        });
        self.ports.push(HostPort {
            protocol: port.protocol,
            at: SocketAddr::new(at, port.host_port),
            to: SocketAddr::new(pod, port.container_port),
        });
    }

    /// Enters a list of prefixes of one family; returns its name, which follows from its content.
    fn list(&mut self, nets: impl Iterator<Item = IpNet>) -> List {
        // Ranges of one list must not overlap.
        let mut nets = IpNet::aggregate(&nets.collect());
        nets.sort();
        let text: String = nets.iter().map(|net| format!("{net} ")).collect();
        let digest = Sha256::digest(text);
        let mut name = [0; 6];
        name.copy_from_slice(&digest[..6]);
        // Whoever writes definitions can choose a digest, within limits, and not this bit.
        name[0] |= OF_DIGEST;
        self.elements.extend(nets.iter().map(|net| prefix(name, *net)));
        name
    }
}

/// What a map says of a list: see the table of sets.
fn named(list: List) -> Vec<u8> {
    [vec![0; 4], word(&list)].concat()
}

/// An element of a list of prefixes.
pub(super) fn prefix(list: List, net: IpNet) -> Element {
    let key = |address| [word(&list), octets(address)].concat();
    Element {
        set: if net.addr().is_ipv4() { Set::Prefixes4 } else { Set::Prefixes6 },
        key: key(net.network()),
        end: Some(key(net.broadcast())),
        value: Vec::new(),
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
