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
use super::packed::Packed;
use super::{ContainerPort, ObjectName, Place, is_port_name};
use crate::error_chain::Chain;
use crate::npwg::selection::PortProtocol;
use crate::npwg::{NetworkRef, StatusEntry, status};

/// Annotation of a pod with the ports that its containers name, as JSON: `{"TCP/http":[8080]}`. Agents write it beside
/// the status for the agents of other nodes, which do not read the pod's containers.
pub const PORTS_ANNOTATION: &str = "netattach.dev/ports";

/// Label of pods with a network-status, by which agents of other nodes select these pods. Agents set it on
/// the pods that they have attached, without a value or with that of pods that are on the default network
/// alone, and on those that another plugin has attached, with the value [`BY_ANOTHER`].
pub const ATTACHED_LABEL: &str = "netattach.dev/networks";

/// Value of the label [`ATTACHED_LABEL`] of a pod whose status another plugin has written.
pub const BY_ANOTHER: &str = "by-another";

/// A pod of another node, reduced to what makes it a peer of policies.
///
/// Memory of a pod with a UUID, a name of up to 40 bytes and two IPv4 addresses, in bytes of the C
/// library's allocator: 48 for the value and its counters, 80 for its own values, 8 in the map plus about
/// as much spare room: 144. As a peer of policies it takes about 75 more: 17 among the pods of its kind,
/// and 28 for each claimed address.
#[derive(Clone, PartialEq, Eq)]
pub struct RemotePod {
    common: Arc<Common>,
    own: Packed,
}

/// The values that the pods of a workload have in common, and share.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct Common {
    namespace: Arc<str>,
    labels: Arc<Labels>,
    ports: Arc<[ContainerPort]>,
    /// The networks of the claims, sorted.
    places: Box<[Arc<Place>]>,
    unreadable: Option<Box<str>>,
    /// An identity that is not a UUID in the common form; outside of tests it always is.
    uid: Option<Box<str>>,
}

/// The metadata of a pod, as written.
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
    /// The parts that were not read because they exceed their bound.
    pub beyond: Option<&'a str>,
}

/// Why a pod of another node is not a peer.
#[derive(Debug, thiserror::Error)]
pub enum UnreadablePod {
    /// The status annotation is invalid.
    #[error(transparent)]
    Status(#[from] status::StatusError),
    /// The annotation of ports is not JSON of the expected form.
    #[error("read annotation {PORTS_ANNOTATION}")]
    Ports(#[source] serde_json::Error),
    /// A key of the annotation of ports is not `PROTOCOL/name`.
    #[error("annotation {PORTS_ANNOTATION}: {0:?} is not of the form PROTOCOL/name")]
    PortName(String),
    /// A part exceeds its bound.
    #[error("{what}: {found} {unit}, and at most {most} are read of a pod that is attached elsewhere")]
    TooLarge {
        /// The part.
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
    /// Reads a pod. If it cannot be read, or exceeds its bounds, [`RemotePod::unreadable`] is set.
    pub fn read(name: &ObjectName, written: Written<'_>, interner: &mut Interner) -> Self {
        let mut problem = written.beyond.map(|text| shown(text).into());
        let labels = note(&mut problem, within_labels(written.labels));
        let claims = note(&mut problem, claims(written.status, &name.namespace));
        let ports = note(&mut problem, ports(written.ports));
        let mut places: Vec<Arc<Place>> = Vec::new();
        let mut numbered = Vec::with_capacity(claims.len());
        // They are sorted by their networks.
        for (place, address) in claims {
            if places.last().is_none_or(|last| **last != place) {
                places.push(interner.place(place));
            }
            numbered.push((places.len() - 1, address));
        }
        let uuid = written.uid.and_then(uuid);
        let common = Common {
            namespace: interner.namespace(&name.namespace),
            labels: interner.labels(labels),
            ports: interner.ports(ports),
            places: places.into(),
            unreadable: problem,
            uid: written.uid.filter(|_| uuid.is_none()).map(Into::into),
        };
        Self { common: interner.common(common), own: Packed::new(&numbered, uuid, &name.name) }
    }

    /// Namespace.
    pub fn namespace(&self) -> &str {
        &self.common.namespace
    }

    /// Name in the namespace.
    pub fn name(&self) -> &str {
        self.own.name()
    }

    /// Namespace and name.
    pub fn object_name(&self) -> ObjectName {
        ObjectName::new(self.namespace(), self.name())
    }

    /// Returns namespace and name, for comparing and sorting.
    pub(super) fn key(&self) -> (&[u8], &[u8]) {
        (self.common.namespace.as_bytes(), self.own.name_bytes())
    }

    /// Whether this is its uid, the identity across re-creation under the same name; `None`: it has none.
    pub fn has_uid(&self, uid: Option<&str>) -> bool {
        let uuid = uid.and_then(uuid);
        uuid == self.own.uuid() && uid.filter(|_| uuid.is_none()) == self.common.uid.as_deref()
    }

    /// Labels.
    pub fn labels(&self) -> &Labels {
        &self.common.labels
    }

    /// The addresses that its status annotation claims, sorted, each with the network.
    pub fn claims(&self) -> impl Iterator<Item = (&Place, IpAddr)> {
        self.own.claims().filter_map(|(place, address)| Some((&**self.common.places.get(place)?, address)))
    }

    /// The ports that its containers name.
    pub fn ports(&self) -> &[ContainerPort] {
        &self.common.ports
    }

    /// Returns which part could not be read: the pod is not a peer of policies then. Addresses that could
    /// be read still count as claimed.
    pub fn unreadable(&self) -> Option<&str> {
        self.common.unreadable.as_deref()
    }

    /// Returns a number that is equal only for pods that are alike in all that policies select by:
    /// namespace, labels and ports. It is valid as long as one of these pods is kept.
    pub(crate) fn kind(&self) -> usize {
        Arc::as_ptr(&self.common).addr()
    }
}

impl fmt::Debug for RemotePod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemotePod")
            .field("name", &self.name())
            .field("uuid", &self.own.uuid())
            .field("claims", &self.claims().collect::<Vec<_>>())
            .field("common", &self.common)
            .finish()
    }
}

/// Keeps the first problem, and returns an empty value for an unreadable one.
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

/// Returns the addresses that a status annotation claims, sorted.
///
/// # Errors
/// It cannot be read, or exceeds its bounds.
pub fn claims(status: Option<&str>, namespace: &str) -> Result<Vec<(Place, IpAddr)>, UnreadablePod> {
    let Some(text) = status else { return Ok(Vec::new()) };
    within("network-status annotation", text.len(), REMOTE_STATUS_ANNOTATION, "bytes")?;
    let mut claims = published(&status::parse(text)?, namespace);
    claims.sort_unstable();
    claims.dedup();
    within("addresses in its status", claims.len(), ADDRESSES_OF_REMOTE_POD, "addresses")?;
    Ok(claims)
}

/// Returns the addresses in the entries of a status annotation, each with its network as policies name it.
fn published(entries: &[StatusEntry], namespace: &str) -> Vec<(Place, IpAddr)> {
    let mut addresses = Vec::new();
    for entry in entries {
        let network = network_of(entry, namespace).map(Place::Network);
        for place in network.into_iter().chain(entry.default.then_some(Place::Default)) {
            addresses.extend(entry.ips.iter().map(|ip| (place.clone(), ip.address)));
        }
    }
    addresses
}

/// Returns the network of an entry. Before version 1.2 of the standard the namespace could be left out. The
/// default network is often no object but a configuration on disk.
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
        // No policy can name it, and a long name would be copied for each of its numbers.
        if !is_port_name(name) {
            continue;
        }
        ports.extend(numbers.into_iter().filter(|port| *port != 0).map(|port| ContainerPort {
            name: Some(name.to_owned()),
            protocol,
            port,
        }));
    }
    within("ports", ports.len(), PORTS_OF_REMOTE_POD, "ports")?;
    Ok(ports)
}

/// Returns the annotation [`PORTS_ANNOTATION`] of a pod; `None` if it names no port. Ports beyond the
/// number that agents read are left out, the last ones by name, and those that no policy can name.
pub fn ports_annotation(ports: &[ContainerPort]) -> Option<String> {
    let named = ports.iter().filter_map(|port| Some((port.name.as_deref()?, port)));
    let named = named.filter(|(name, _)| is_port_name(name));
    let mut named: Vec<(&str, PortProtocol, u16)> =
        named.map(|(name, port)| (name, port.protocol, port.port)).collect();
    named.sort_unstable();
    named.dedup();
    let mut written: BTreeMap<String, Vec<u16>> = BTreeMap::new();
    for (name, protocol, port) in named.into_iter().take(PORTS_OF_REMOTE_POD) {
        written.entry(format!("{}/{name}", word(protocol))).or_default().push(port);
    }
    // Printing a `Value` cannot fail, unlike a foreign `Serialize`.
    (!written.is_empty()).then(|| serde_json::json!(written).to_string())
}

/// The longest entry of the annotation of ports. As many as are read fit.
const LONGEST_PORT: &str = r#""SCTP/nameof15letters":[65535],"#;
const _: () = assert!(2 + PORTS_OF_REMOTE_POD * LONGEST_PORT.len() <= REMOTE_PORTS_ANNOTATION);

fn word(protocol: PortProtocol) -> &'static str {
    match protocol {
        PortProtocol::Tcp => "TCP",
        PortProtocol::Udp => "UDP",
        PortProtocol::Sctp => "SCTP",
    }
}

/// The bytes of a UUID in its common form, with small letters; `None`: another text.
fn uuid(text: &str) -> Option<[u8; 16]> {
    let mut bytes = [0; 16];
    let mut digits = text.bytes();
    for (position, byte) in bytes.iter_mut().enumerate() {
        if matches!(position, 4 | 6 | 8 | 10) && digits.next() != Some(b'-') {
            return None;
        }
        *byte = digit(digits.next()?)? << 4 | digit(digits.next()?)?;
    }
    digits.next().is_none().then_some(bytes)
}

fn digit(letter: u8) -> Option<u8> {
    match letter {
        b'0'..=b'9' => Some(letter - b'0'),
        b'a'..=b'f' => Some(letter - b'a' + 10),
        _ => None,
    }
}

#[cfg(test)]
#[path = "remote_tests.rs"]
mod tests;
