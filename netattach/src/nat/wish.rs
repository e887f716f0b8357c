//! The node's address translation for an attachment, as elements of the table's sets. Pure.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ipnet::IpNet;
use sha2::{Digest, Sha256};

use super::exceptions;
use crate::netlink::nat::{Element, Set};
use crate::npwg::selection::{PortMapping, PortProtocol};
use crate::step::{LeasedAddress, PortSenders, Translate};

/// Length of a device name in nftables registers, in bytes.
const DEVICE_LENGTH: usize = 16;

/// Name of a list of prefixes.
pub(super) type List = [u8; 6];
/// Length of a list's name, padded to whole words, in bytes.
const LIST_WORDS: usize = 8;
/// Bit of the first byte that is set in all names that are derived from the content of their lists.
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

/// The translation that one attachment requests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wish {
    /// Elements of this attachment; other attachments may want some of them too.
    pub(super) elements: BTreeSet<Element>,
    /// Ports of the node that this attachment holds; no other attachment may hold them.
    pub(super) ports: Vec<HostPort>,
    /// The device by which packets with loopback addresses must be able to leave.
    pub(super) opened: Option<String>,
    /// Subnets of the attachment, which count as exceptions of the node while the attachment exists; empty:
    /// the attachment does not follow the exceptions of the node.
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
    /// Computes the request of a `Translate` step for an attachment with these addresses. Ports lead to the first
    /// address of each family.
    ///
    /// # Errors
    /// A port of the node cannot lead to any of these addresses.
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
            let masked = match translate.senders {
                PortSenders::Near if translate.bridged => own.iter().map(IpNet::trunc).collect(),
                PortSenders::Near => vec![IpNet::from(pod)],
                PortSenders::All => vec![everything(v4)],
                PortSenders::None => Vec::new(),
            };
            let mapped = translate.ports.iter().filter_map(|port| Some((port, at(port, v4)?)));
            for (port, address) in mapped {
                wish.open(port, address, pod, &masked);
                // A pod cannot answer a packet from a loopback address.
                let may_answer = translate.senders != PortSenders::None && !translate.device.is_empty();
                if may_answer && matches!(address, IpAddr::V4(v4) if v4.is_unspecified() || v4.is_loopback())
                {
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

    /// A wish that only keeps packets with loopback addresses from coming in by a device.
    pub(super) fn of_device(name: &str) -> Self {
        Self { elements: [device(name)].into(), opened: Some(name.to_owned()), ..Self::default() }
    }

    /// Whether this wish keeps packets out at most, and the table may have more of its attachment: see
    /// [`Wish::of_device`].
    pub(super) fn is_guard(&self) -> bool {
        self.elements.iter().all(|element| element.set == Set::Devices)
    }

    /// The ports of the node that this attachment holds.
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

    /// Masquerades these addresses of one family, with the exceptions of the node.
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

    /// Opens a port at an address of the node; senders in `masked` get the node's address on the way.
    fn open(&mut self, port: &PortMapping, at: IpAddr, pod: IpAddr, masked: &[IpNet]) {
        let v4 = pod.is_ipv4();
        let protocol = word(&[port.protocol.number()]);
        let [host, container] = [port.host_port, port.container_port].map(|it| word(&it.to_be_bytes()));
        self.elements.insert(Element {
            set: if v4 { Set::Ports4 } else { Set::Ports6 },
            key: [octets(at), protocol.clone(), host.clone()].concat(),
            end: None,
            value: [octets(pod), container.clone()].concat(),
        });
        if !masked.is_empty() {
            let list = self.list(masked.iter().copied());
            self.elements.insert(Element {
                set: if v4 { Set::Mapped4 } else { Set::Mapped6 },
                key: [octets(pod), protocol, container, host].concat(),
                end: None,
                value: named(list),
            });
        }
        self.ports.push(HostPort {
            protocol: port.protocol,
            at: SocketAddr::new(at, port.host_port),
            to: SocketAddr::new(pod, port.container_port),
        });
    }

    /// Adds a list of prefixes of one family; returns its name, which is derived from its content.
    fn list(&mut self, nets: impl Iterator<Item = IpNet>) -> List {
        // Ranges of one list must not overlap.
        let mut nets = IpNet::aggregate(&nets.collect());
        nets.sort();
        let text: String = nets.iter().map(|net| format!("{net} ")).collect();
        let digest = Sha256::digest(text);
        let mut name = [0; 6];
        name.copy_from_slice(&digest[..6]);
        // Authors of definitions can influence the digest, within limits, but not this bit.
        name[0] |= OF_DIGEST;
        self.elements.extend(nets.iter().map(|net| prefix(name, *net)));
        name
    }
}

/// What the table may have of an attachment that was not taken over: its plan, and its addresses as far as they are
/// known.
#[derive(Debug)]
pub struct Left<'a> {
    /// What the attachment asked for.
    pub translate: &'a Translate,
    /// Its addresses. Empty: none is known, so those to which its ports lead count as its own.
    pub addresses: BTreeSet<IpAddr>,
}

impl Left<'_> {
    /// Returns the elements among `found`, which no known attachment wants, that lead to the attachment or translate
    /// what it sends. Lists of prefixes and devices are not among them: others may share them, they have no effect
    /// without an element that names them, and a device in the table only drops packets.
    pub(super) fn among(&self, found: &BTreeSet<Element>) -> Vec<Element> {
        let ports = found.iter().filter_map(HostPort::of).filter(|port| self.is_planned(port));
        let led = ports.map(|port| port.to.ip()).filter(|_| self.addresses.is_empty());
        let own: BTreeSet<IpAddr> = self.addresses.iter().copied().chain(led).collect();
        let is_its = |element: &&Element| match element.set {
            Set::Ports4 | Set::Ports6 => HostPort::of(element)
                .is_some_and(|port| self.is_planned(&port) && own.contains(&port.to.ip())),
            Set::Mapped4 | Set::Mapped6 => {
                !self.translate.ports.is_empty() && translated(element).is_some_and(|it| own.contains(&it))
            }
            Set::Masquerade4 | Set::Masquerade6 => {
                self.translate.masquerade.is_some() && translated(element).is_some_and(|it| own.contains(&it))
            }
            Set::Prefixes4 | Set::Prefixes6 | Set::Devices => false,
        };
        found.iter().filter(is_its).cloned().collect()
    }

    fn is_planned(&self, open: &HostPort) -> bool {
        self.translate.ports.iter().any(|port| {
            (port.protocol, port.host_port, port.container_port)
                == (open.protocol, open.at.port(), open.to.port())
                && at(port, open.at.is_ipv4()) == Some(open.at.ip())
        })
    }
}

impl HostPort {
    /// The port of the node that an element forwards to a pod; `None` for other elements.
    pub(super) fn of(element: &Element) -> Option<Self> {
        let length = match element.set {
            Set::Ports4 => 4,
            Set::Ports6 => 16,
            _ => return None,
        };
        let (at, rest) = element.key.split_at_checked(length)?;
        let (to, port) = element.value.split_at_checked(length)?;
        let number = |bytes: &[u8]| bytes.first_chunk::<2>().map(|bytes| u16::from_be_bytes(*bytes));
        let protocols = [PortProtocol::Tcp, PortProtocol::Udp, PortProtocol::Sctp];
        let protocol = protocols.into_iter().find(|protocol| rest.first() == Some(&protocol.number()))?;
        Some(Self {
            protocol,
            at: SocketAddr::new(address(at)?, number(rest.get(4..)?)?),
            to: SocketAddr::new(address(to)?, number(port)?),
        })
    }
}

/// The address of the pod that an element translates; `None`: the element's set is not keyed by the address of
/// a pod.
pub(super) fn translated(element: &Element) -> Option<IpAddr> {
    let length = match element.set {
        Set::Mapped4 | Set::Masquerade4 => 4,
        Set::Mapped6 | Set::Masquerade6 => 16,
        _ => return None,
    };
    address(element.key.get(..length)?)
}

/// Returns the element with list names of its own, which no other attachment shares: `whose` is part of the
/// digest.
pub(super) fn with_own_lists(element: &Element, whose: &str) -> Element {
    let renamed = |word: &[u8]| -> Vec<u8> {
        let digest = Sha256::new().chain_update(whose).chain_update([0]).chain_update(word).finalize();
        let mut name = [0; 6];
        name.copy_from_slice(&digest[..6]);
        name[0] |= OF_DIGEST;
        self::word(&name)
    };
    let with_list = |bytes: &[u8], at: usize| -> Vec<u8> {
        match (bytes.get(..at), bytes.get(at..at + LIST_WORDS), bytes.get(at + LIST_WORDS..)) {
            (Some(before), Some(list), Some(after)) => [before, &renamed(list), after].concat(),
            _ => bytes.to_vec(),
        }
    };
    match element.set {
        Set::Prefixes4 | Set::Prefixes6 => Element {
            key: with_list(&element.key, 0),
            end: element.end.as_deref().map(|end| with_list(end, 0)),
            ..element.clone()
        },
        // The name comes after a zero word: see [`named`].
        Set::Mapped4 | Set::Mapped6 | Set::Masquerade4 | Set::Masquerade6 => {
            Element { value: with_list(&element.value, 4), ..element.clone() }
        }
        Set::Ports4 | Set::Ports6 | Set::Devices => element.clone(),
    }
}

/// The network of all addresses of a family.
fn everything(v4: bool) -> IpNet {
    if v4 { ipnet::Ipv4Net::default().into() } else { ipnet::Ipv6Net::default().into() }
}

fn address(octets: &[u8]) -> Option<IpAddr> {
    let v4 = || <[u8; 4]>::try_from(octets).ok().map(IpAddr::from);
    v4().or_else(|| <[u8; 16]>::try_from(octets).ok().map(IpAddr::from))
}

/// Value of a map entry that names a list: see the table of sets.
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

/// The address of the node at which a port is opened in a family; `None`: the port is not opened in this
/// family.
fn at(port: &PortMapping, v4: bool) -> Option<IpAddr> {
    match port.host_ip {
        None if v4 => Some(Ipv4Addr::UNSPECIFIED.into()),
        None => Some(Ipv6Addr::UNSPECIFIED.into()),
        Some(address) => (address.is_ipv4() == v4).then_some(address),
    }
}

pub(super) fn device(name: &str) -> Element {
    let mut key = name.as_bytes().to_vec();
    key.resize(DEVICE_LENGTH, 0);
    Element { set: Set::Devices, key, end: None, value: Vec::new() }
}

/// The name of the device that an element of the set of devices contains.
pub(super) fn device_named(element: &Element) -> Option<String> {
    let end = element.key.iter().position(|byte| *byte == 0).unwrap_or(element.key.len());
    let name = element.key.get(..end).filter(|_| element.set == Set::Devices)?;
    std::str::from_utf8(name).ok().map(str::to_owned)
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

/// Pads a value to whole words, so that the next value begins in a register of its own.
fn word(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}
