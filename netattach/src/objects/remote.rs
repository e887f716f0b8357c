//! Pods of other nodes, reduced to what makes them peers of policies.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use super::budget::{
    ADDRESSES_OF_REMOTE_POD, LABELS_OF_REMOTE_POD, PORTS_OF_REMOTE_POD, REMOTE_PORTS_ANNOTATION,
    REMOTE_STATUS_ANNOTATION, shown,
};
use super::interner::Interner;
use super::labels::Labels;
use super::{ContainerPort, ObjectName, Place};
use crate::error_chain::Chain;
use crate::npwg::selection::PortProtocol;
use crate::npwg::{NetworkRef, StatusEntry, status};

/// Annotation of a pod with the ports that its containers name, as JSON: `{"TCP/http":[8080]}`. Agents write it beside
/// the status for the agents of other nodes, which do not read the pod's containers.
pub const PORTS_ANNOTATION: &str = "netattach.dev/ports";

/// A pod of another node, reduced to what makes it a peer of policies.
///
/// Memory of one with a UUID, a name of up to 40 bytes and two addresses, in bytes of the C library's allocator: 144
/// for the value and its counters, 48 for the name, 80 for the addresses, 8 in the map: 280. The rest is shared.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RemotePod {
    /// Namespace.
    pub namespace: Arc<str>,
    /// Name in the namespace.
    pub name: Box<str>,
    /// Identity across re-creation under the same name.
    pub uid: Option<Uid>,
    /// Labels.
    pub labels: Arc<Labels>,
    /// The addresses that its status annotation claims, sorted, each with the network.
    pub addresses: Box<[(Arc<Place>, IpAddr)]>,
    /// The ports that its containers name.
    pub ports: Arc<[ContainerPort]>,
    /// What of it could not be read: it is no policy's peer. The addresses that could be read still count as claimed.
    pub unreadable: Option<Box<str>>,
}

/// The identity of an object, which is a UUID everywhere but in tests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Uid {
    /// A UUID in the common form.
    Uuid([u8; 16]),
    /// Any other text.
    Other(Box<str>),
}

/// What is written in the metadata of a pod.
#[derive(Debug, Clone, Default)]
pub struct Written<'a> {
    /// `metadata.uid`.
    pub uid: Option<&'a str>,
    /// `metadata.labels`.
    pub labels: Labels,
    /// The annotation [`STATUS_ANNOTATION`](crate::npwg::STATUS_ANNOTATION).
    pub status: Option<&'a str>,
    /// The annotation [`PORTS_ANNOTATION`].
    pub ports: Option<&'a str>,
    /// What of it was not taken, because it is larger than its bound.
    pub beyond: Option<&'a str>,
}

/// Why a pod of another node is no peer.
#[derive(Debug, thiserror::Error)]
pub enum UnreadablePod {
    /// The status annotation is invalid.
    #[error(transparent)]
    Status(#[from] status::StatusError),
    /// The annotation of ports is no JSON of its form.
    #[error("read annotation {PORTS_ANNOTATION}")]
    Ports(#[source] serde_json::Error),
    /// A key of the annotation of ports is not `PROTOCOL/name`.
    #[error("annotation {PORTS_ANNOTATION}: {0:?} is not of the form PROTOCOL/name")]
    PortName(String),
    /// Something is larger than its bound.
    #[error("{what}: {found} {unit}, and at most {most} are read of a pod of another node")]
    TooLarge {
        /// What is.
        what: &'static str,
        /// Its size.
        found: usize,
        /// The bound.
        most: usize,
        /// Their unit.
        unit: &'static str,
    },
}

impl RemotePod {
    /// Reads a pod. One that cannot be read, or is larger than its bounds, has [`RemotePod::unreadable`].
    pub fn read(name: &ObjectName, written: Written<'_>, interner: &mut Interner) -> Self {
        let mut problem = written.beyond.map(|text| shown(text).into());
        let labels = note(&mut problem, within_labels(written.labels));
        let claims = note(&mut problem, claims(written.status, &name.namespace));
        let ports = note(&mut problem, ports(written.ports));
        let claims = claims.into_iter().map(|(place, address)| (interner.place(place), address)).collect();
        Self {
            namespace: interner.namespace(&name.namespace),
            name: name.name.as_str().into(),
            uid: written.uid.map(Uid::new),
            addresses: claims,
            labels: interner.labels(labels),
            ports: interner.ports(ports),
            unreadable: problem,
        }
    }

    /// Namespace and name.
    pub fn object_name(&self) -> ObjectName {
        ObjectName::new(&*self.namespace, &*self.name)
    }

    /// Namespace and name, to compare and sort by.
    pub fn key(&self) -> (&str, &str) {
        (&self.namespace, &self.name)
    }
}

/// Keeps the first problem; what has one is empty.
fn note<T: Default>(problem: &mut Option<Box<str>>, read: Result<T, UnreadablePod>) -> T {
    read.unwrap_or_else(|error| {
        problem.get_or_insert_with(|| shown(&Chain(&error).to_string()).into());
        T::default()
    })
}

fn within(what: &'static str, found: usize, most: usize, unit: &'static str) -> Result<(), UnreadablePod> {
    if found > most { Err(UnreadablePod::TooLarge { what, found, most, unit }) } else { Ok(()) }
}

fn within_labels(labels: Labels) -> Result<Labels, UnreadablePod> {
    let bytes = labels.iter().map(|(key, value)| key.len() + value.len()).sum();
    within("labels", bytes, LABELS_OF_REMOTE_POD, "bytes")?;
    Ok(labels)
}

/// The addresses that a status annotation claims, sorted.
fn claims(status: Option<&str>, namespace: &str) -> Result<Vec<(Place, IpAddr)>, UnreadablePod> {
    let Some(text) = status else { return Ok(Vec::new()) };
    within("network-status annotation", text.len(), REMOTE_STATUS_ANNOTATION, "bytes")?;
    let mut claims = published(&status::parse(text)?, namespace);
    claims.sort_unstable();
    claims.dedup();
    within("addresses in its status", claims.len(), ADDRESSES_OF_REMOTE_POD, "addresses")?;
    Ok(claims)
}

/// The addresses in the entries of a status annotation, each with the network that policies know it by.
pub fn published(entries: &[StatusEntry], namespace: &str) -> Vec<(Place, IpAddr)> {
    let mut addresses = Vec::new();
    for entry in entries {
        let network = network_of(entry, namespace).map(Place::Network);
        for place in network.into_iter().chain(entry.default.then_some(Place::Default)) {
            addresses.extend(entry.ips.iter().map(|ip| (place.clone(), ip.address)));
        }
    }
    addresses
}

/// Before version 1.2 of the standard the namespace could be left out. The default network is often no object
/// at all but a configuration on disk.
fn network_of(entry: &StatusEntry, namespace: &str) -> Option<NetworkRef> {
    match entry.name.split_once('/') {
        Some((namespace, name)) => Some(NetworkRef::new(namespace, name)),
        None if entry.default => None,
        None => Some(NetworkRef::new(namespace, &entry.name)),
    }
}

fn ports(annotation: Option<&str>) -> Result<Vec<ContainerPort>, UnreadablePod> {
    let Some(text) = annotation else { return Ok(Vec::new()) };
    within("annotation of ports", text.len(), REMOTE_PORTS_ANNOTATION, "bytes")?;
    let written: BTreeMap<&str, Vec<u16>> = serde_json::from_str(text).map_err(UnreadablePod::Ports)?;
    let mut ports = Vec::new();
    for (key, numbers) in written {
        let named = key.split_once('/').filter(|(_, name)| !name.is_empty());
        let known = named.and_then(|(protocol, name)| Some((PortProtocol::from_name(protocol)?, name)));
        let (protocol, name) = known.ok_or_else(|| UnreadablePod::PortName(key.to_owned()))?;
        ports.extend(numbers.into_iter().filter(|port| *port != 0).map(|port| ContainerPort {
            name: Some(name.to_owned()),
            protocol,
            port,
        }));
    }
    within("ports", ports.len(), PORTS_OF_REMOTE_POD, "ports")?;
    Ok(ports)
}

/// The annotation [`PORTS_ANNOTATION`] of a pod; `None` if it names no port. Ports beyond those that are read of it are
/// left out, the last by name.
pub fn ports_annotation(ports: &[ContainerPort]) -> Option<String> {
    let named = ports.iter().filter_map(|port| Some((port.name.as_deref()?, port)));
    let mut named: Vec<(&str, PortProtocol, u16)> =
        named.map(|(name, port)| (name, port.protocol, port.port)).collect();
    named.sort_unstable();
    named.dedup();
    let mut written: BTreeMap<String, Vec<u16>> = BTreeMap::new();
    // Name, protocol and punctuation; the number.
    let size_of = |name: &str| 2 * name.len() + 20;
    let mut bytes = 0;
    for (name, protocol, port) in named.into_iter().take(PORTS_OF_REMOTE_POD) {
        bytes += size_of(name);
        if bytes > REMOTE_PORTS_ANNOTATION {
            break;
        }
        written.entry(format!("{}/{name}", word(protocol))).or_default().push(port);
    }
    // Printing a `Value` cannot fail, unlike a foreign `Serialize`.
    (!written.is_empty()).then(|| serde_json::json!(written).to_string())
}

fn word(protocol: PortProtocol) -> &'static str {
    match protocol {
        PortProtocol::Tcp => "TCP",
        PortProtocol::Udp => "UDP",
        PortProtocol::Sctp => "SCTP",
    }
}

impl Uid {
    /// The identity with this text.
    pub fn new(text: &str) -> Self {
        match uuid(text) {
            Some(bytes) => Self::Uuid(bytes),
            None => Self::Other(text.into()),
        }
    }
}

/// The bytes of a UUID whose text is exactly what [`Uid`] prints.
fn uuid(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b'-').collect();
    let mut bytes = [0; 16];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    (Uid::Uuid(bytes).to_string() == text).then_some(bytes)
}

impl fmt::Display for Uid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uuid(bytes) => bytes.iter().enumerate().try_for_each(|(position, byte)| {
                let dash = if matches!(position, 4 | 6 | 8 | 10) { "-" } else { "" };
                write!(f, "{dash}{byte:02x}")
            }),
            Self::Other(text) => f.write_str(text),
        }
    }
}

#[cfg(test)]
#[path = "remote_tests.rs"]
mod tests;
