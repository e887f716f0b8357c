//! The networks that a pod selects: its `networks` annotation, in the short form and in the JSON form.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use super::element::parse_element;
use super::guid::Guid;
use super::ifname::is_interface_name;
use super::network::{NetworkRef, is_label};
use crate::budget::{self, Exceeded};
use crate::cni::json;
use crate::mac::Mac;

/// One request of a pod for one attachment. Serialized as the JSON form of the annotation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Selection {
    /// The network.
    #[serde(flatten)]
    pub network: NetworkRef,
    /// Interface name in the pod; `None`: to be generated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    /// Requested addresses of the interface, in the order of the request.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ips: Vec<RequestedIp>,
    /// Requested hardware address of the interface; always unicast.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// Requested InfiniBand GUID of the interface.
    #[serde(default, rename = "infiniband-guid", skip_serializing_if = "Option::is_none")]
    pub infiniband_guid: Option<Guid>,
    /// Keys that override `args.cni` of every plugin in the chain.
    #[serde(default, rename = "cni-args", skip_serializing_if = "Option::is_none")]
    pub cni_args: Option<Map<String, Value>>,
    /// Host ports to forward to the pod on this network.
    #[serde(default, rename = "portMappings", skip_serializing_if = "Vec::is_empty")]
    pub port_mappings: Vec<PortMapping>,
    /// Limits on the interface's traffic.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Bandwidth>,
    /// Gateways of the pod's default routes, which move to this attachment; the first of each family has the lowest
    /// metric. An empty list moves the families for which the attachment has a default route; `None` leaves the routes
    /// unchanged.
    #[serde(default, rename = "default-route", skip_serializing_if = "Option::is_none")]
    pub default_route: Option<Vec<IpAddr>>,
    /// Name of the IPAMClaim whose addresses are requested.
    #[serde(default, rename = "ipam-claim-reference", skip_serializing_if = "Option::is_none")]
    pub ipam_claim_reference: Option<String>,
    /// Device to use, such as a PCI address.
    #[serde(default, rename = "deviceID", skip_serializing_if = "Option::is_none")]
    pub device_id: Option<String>,
}

impl Selection {
    /// A selection of a network without further requests.
    pub fn of(network: NetworkRef) -> Self {
        Self {
            network,
            interface: None,
            ips: Vec::new(),
            mac: None,
            infiniband_guid: None,
            cni_args: None,
            port_mappings: Vec::new(),
            bandwidth: None,
            default_route: None,
            ipam_claim_reference: None,
            device_id: None,
        }
    }

    /// The keys that override `args.cni` of every plugin in the chain: `cni-args`, and the name of the claim under
    /// [`CLAIM_ARGUMENT`](super::CLAIM_ARGUMENT).
    pub fn arguments(&self) -> Map<String, Value> {
        let mut arguments = self.cni_args.clone().unwrap_or_default();
        if let Some(claim) = &self.ipam_claim_reference {
            arguments.insert(super::CLAIM_ARGUMENT.to_owned(), claim.as_str().into());
        }
        arguments
    }
}

/// An address, with the prefix length of its subnet if the request has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RequestedIp {
    /// The address.
    pub address: IpAddr,
    /// Prefix length in bits, at most 32 or 128 by family.
    pub prefix: Option<u8>,
}

/// The text was neither an IP address nor one with a prefix length.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an IP address with or without a prefix length")]
pub struct InvalidRequestedIp(pub String);

/// A host port forwarded to the pod. Serialized in the format of the CNI conventions.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PortMapping {
    /// Port on the host, never 0.
    pub host_port: u16,
    /// Port in the pod, never 0.
    pub container_port: u16,
    /// Protocol.
    pub protocol: PortProtocol,
    /// Host address to listen on; `None`: every one.
    #[serde(default, rename = "hostIP", skip_serializing_if = "Option::is_none")]
    pub host_ip: Option<IpAddr>,
}

/// A transport protocol with ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PortProtocol {
    /// TCP, IP protocol 6.
    Tcp,
    /// UDP, IP protocol 17.
    Udp,
    /// SCTP, IP protocol 132.
    Sctp,
}

impl PortProtocol {
    /// Parses the name, case-insensitively.
    pub fn from_name(name: &str) -> Option<Self> {
        match name.to_ascii_lowercase().as_str() {
            "tcp" => Some(Self::Tcp),
            "udp" => Some(Self::Udp),
            "sctp" => Some(Self::Sctp),
            _ => None,
        }
    }

    /// IANA protocol number.
    pub fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }
}

/// Bandwidth limits seen from the pod: ingress is the traffic it receives. Rates in bits per second, bursts in bits; no
/// value is 0, at least one rate is set, and every burst has a rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Bandwidth {
    /// Rate limit of received traffic.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ingress_rate: Option<u64>,
    /// Burst of received traffic.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ingress_burst: Option<u64>,
    /// Rate limit of sent traffic.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress_rate: Option<u64>,
    /// Burst of sent traffic.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress_burst: Option<u64>,
}

/// A parsed annotation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Parsed {
    /// The requests, in the order of the annotation.
    pub selections: Vec<Selection>,
    /// Problems that do not prevent the attachment.
    pub warnings: Vec<SelectionWarning>,
}

/// A problem that is tolerated but probably not intended. Positions count from 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SelectionWarning {
    /// A key that is neither in the standard nor in the reverse-DNS form of a private one; it is ignored.
    UnknownKey {
        /// Position of the element.
        index: usize,
        /// The key.
        key: String,
    },
    /// A spelling of a key that Multus also accepts; it is read as the standard's key.
    Spelling {
        /// Position of the element.
        index: usize,
        /// The key as written.
        key: String,
        /// The key it is read as.
        read_as: &'static str,
    },
    /// A key of Multus that the standard does not define, without the reverse-DNS form of private keys.
    NotOfTheStandard {
        /// Position of the element.
        index: usize,
        /// The key.
        key: &'static str,
    },
    /// A name or namespace of more than 63 bytes, which other tools may refuse (section 3.3).
    LongName {
        /// Position of the element.
        index: usize,
        /// The name.
        name: String,
    },
}

impl SelectionWarning {
    /// Position of the element concerned.
    pub fn index(&self) -> usize {
        match self {
            Self::UnknownKey { index, .. }
            | Self::Spelling { index, .. }
            | Self::NotOfTheStandard { index, .. }
            | Self::LongName { index, .. } => *index,
        }
    }
}

impl fmt::Display for SelectionWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownKey { index, key } => {
                write!(f, "networks annotation element {index}: unknown key {key:?} is ignored")
            }
            Self::Spelling { index, key, read_as } => {
                write!(f, "networks annotation element {index}: key {key:?} is read as {read_as:?}")
            }
            Self::NotOfTheStandard { index, key } => {
                write!(
                    f,
                    "networks annotation element {index}: key {key:?} is not of the standard; Multus has it"
                )
            }
            Self::LongName { index, name } => {
                write!(f, "networks annotation element {index}: name {name:?} is longer than 63 bytes")
            }
        }
    }
}

/// Why an annotation is invalid as a whole. Positions count from 0.
#[derive(Debug, thiserror::Error)]
pub enum SelectionError {
    /// A size limit is exceeded.
    #[error(transparent)]
    Exceeded(#[from] Exceeded),
    /// It looks like JSON but is invalid.
    #[error("read networks annotation as json")]
    Json(#[source] serde_json::Error),
    /// It is JSON but not a list.
    #[error("networks annotation is {found}, not a json list")]
    NotAList {
        /// The type found.
        found: &'static str,
    },
    /// An item of the short form is malformed.
    #[error("networks annotation element {index}: {text:?} is not of the form [namespace/]name[@interface]")]
    ShortForm {
        /// Position of the item.
        index: usize,
        /// The item.
        text: String,
    },
    /// An element of the list is not an object.
    #[error("networks annotation element {index} is {found}, not an object")]
    NotAnObject {
        /// Position of the element.
        index: usize,
        /// The type found.
        found: &'static str,
    },
    /// The network's name is missing.
    #[error("networks annotation element {index} has no name")]
    NoName {
        /// Position of the element.
        index: usize,
    },
    /// A key has a value that the standard does not allow.
    #[error("networks annotation element {index}: {key} is {value}, but must be {expected}")]
    Value {
        /// Position of the element.
        index: usize,
        /// Path of the key within the element, such as `portMappings[0].hostPort`.
        key: String,
        /// The value as written, in JSON.
        value: String,
        /// The expected value.
        expected: &'static str,
    },
    /// A required key is missing.
    #[error("networks annotation element {index}: {key} is missing")]
    Missing {
        /// Position of the element.
        index: usize,
        /// Path of the key within the element.
        key: String,
    },
    /// Two keys of one element are mutually exclusive.
    #[error("networks annotation element {index}: {first} and {second} exclude each other")]
    Exclusive {
        /// Position of the element.
        index: usize,
        /// One key.
        first: String,
        /// The other.
        second: String,
    },
    /// The number of default networks is not one.
    #[error("one network is needed, not {found}")]
    NotOne {
        /// Number of networks found.
        found: usize,
    },
    /// A key that only additional networks may have.
    #[error("{key} is for additional networks, not for the default network")]
    NotForDefault {
        /// The key.
        key: &'static str,
    },
    /// More than one element requests the default route.
    #[error("networks annotation elements {first} and {second} both have default-route")]
    DefaultRouteTwice {
        /// Position of the earlier element.
        first: usize,
        /// Position of the later element.
        second: usize,
    },
}

/// Reads the `networks` annotation of a pod.
///
/// Text with any of `[`, `{` and `"` is the JSON form, all other text the short form (as in Multus). An empty
/// annotation selects nothing. A network without a namespace is in the pod's.
///
/// # Errors
/// One invalid element makes the whole annotation invalid (section 4.1).
pub fn parse_networks(annotation: &str, pod_namespace: &str) -> Result<Parsed, SelectionError> {
    budget::ANNOTATION.check(annotation.len())?;
    let mut parsed = Parsed::default();
    if annotation.trim().is_empty() {
        return Ok(parsed);
    }
    if annotation.contains(['[', '{', '"']) {
        let elements = match serde_json::from_str(annotation).map_err(SelectionError::Json)? {
            Value::Array(elements) => elements,
            other => return Err(SelectionError::NotAList { found: json::kind(&other) }),
        };
        budget::SELECTIONS.check(elements.len())?;
        for (index, element) in elements.iter().enumerate() {
            let selection = parse_element(index, element, pod_namespace, &mut parsed.warnings)?;
            parsed.selections.push(selection);
        }
    } else {
        budget::SELECTIONS.check(annotation.split(',').count())?;
        for (index, item) in annotation.split(',').enumerate() {
            let selection = parse_short(index, item.trim(), pod_namespace)?;
            warn_of_long_names(index, &selection.network, &mut parsed.warnings);
            parsed.selections.push(selection);
        }
    }
    refuse_second_default_route(&parsed.selections)?;
    Ok(parsed)
}

/// Parses the annotation by which a pod selects its default network: the same forms, for exactly one network. A network
/// without a namespace is in `namespace`.
///
/// # Errors
/// As [`parse_networks`], and if the number of networks is not one.
pub fn parse_default_network(annotation: &str, namespace: &str) -> Result<Parsed, SelectionError> {
    let parsed = parse_networks(annotation, namespace)?;
    let [selection] = parsed.selections.as_slice() else {
        return Err(SelectionError::NotOne { found: parsed.selections.len() });
    };
    // A claim is for additional networks (section 8.1), and the default network has the default routes anyway.
    for (key, present) in [
        ("ipam-claim-reference", selection.ipam_claim_reference.is_some()),
        ("default-route", selection.default_route.is_some()),
    ] {
        if present {
            return Err(SelectionError::NotForDefault { key });
        }
    }
    Ok(parsed)
}

/// Parses a standalone selection, in the JSON form of an element.
///
/// # Errors
/// As for an element of an annotation.
pub fn parse_selection(
    element: &Value,
    namespace: &str,
) -> Result<(Selection, Vec<SelectionWarning>), SelectionError> {
    let mut warnings = Vec::new();
    let selection = parse_element(0, element, namespace, &mut warnings)?;
    Ok((selection, warnings))
}

/// `[namespace/]name[@interface]`; the interface is an extension that Multus introduced.
fn parse_short(index: usize, item: &str, pod_namespace: &str) -> Result<Selection, SelectionError> {
    let malformed = || SelectionError::ShortForm { index, text: item.to_owned() };
    budget::NAME.check(item.split(['/', '@']).map(str::len).max().unwrap_or(0))?;
    let (namespace, rest) = match item.split_once('/') {
        Some((namespace, rest)) => (namespace.trim(), rest),
        None => (pod_namespace, item),
    };
    let (name, interface) = match rest.split_once('@') {
        Some((name, interface)) => (name.trim(), Some(interface.trim())),
        None => (rest.trim(), None),
    };
    let namespace_is_valid = !item.contains('/') || is_label(namespace);
    if !namespace_is_valid
        || !is_label(name)
        || !interface.is_none_or(|i| !i.contains('@') && is_interface_name(i))
    {
        return Err(malformed());
    }
    Ok(Selection {
        interface: interface.map(str::to_owned),
        ..Selection::of(NetworkRef::new(namespace, name))
    })
}

pub(super) fn warn_of_long_names(index: usize, network: &NetworkRef, warnings: &mut Vec<SelectionWarning>) {
    for text in [&network.namespace, &network.name] {
        if text.split('.').any(|label| label.len() > 63) {
            warnings.push(SelectionWarning::LongName { index, name: text.clone() });
        }
    }
}

fn refuse_second_default_route(selections: &[Selection]) -> Result<(), SelectionError> {
    let mut with_route = selections.iter().enumerate().filter(|(_, s)| s.default_route.is_some());
    match (with_route.next(), with_route.next()) {
        (Some((first, _)), Some((second, _))) => Err(SelectionError::DefaultRouteTwice { first, second }),
        _ => Ok(()),
    }
}

impl FromStr for RequestedIp {
    type Err = InvalidRequestedIp;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || InvalidRequestedIp(text.to_owned());
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| invalid())?;
        let longest = if address.is_ipv4() { 32 } else { 128 };
        let prefix = match prefix {
            // `u8::from_str` accepts a sign, which is not valid in a prefix length.
            Some(digits) if digits.bytes().all(|b| b.is_ascii_digit()) => {
                Some(digits.parse().ok().filter(|bits| *bits <= longest).ok_or_else(invalid)?)
            }
            Some(_) => return Err(invalid()),
            None => None,
        };
        Ok(Self { address, prefix })
    }
}

impl fmt::Display for RequestedIp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.prefix {
            Some(bits) => write!(f, "{}/{bits}", self.address),
            None => write!(f, "{}", self.address),
        }
    }
}

impl Serialize for RequestedIp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for RequestedIp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
#[path = "selection_tests.rs"]
mod tests;
