//! One element of the JSON form of the `networks` annotation, key by key (section 4.1.2.1).
//!
//! Keys are matched case-insensitively, as Multus does, so that no request of a pod is lost silently; a spelling other
//! than the standard's gets a warning. `null` is the same as an absent key.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use serde_json::{Map, Value};

use super::guid::Guid;
use super::ifname::is_interface_name;
use super::network::{NetworkRef, is_label, is_subdomain};
use super::selection::{
    Bandwidth, PortMapping, PortProtocol, RequestedIp, Selection, SelectionError, SelectionWarning,
    warn_of_long_names,
};
use crate::budget;
use crate::cni::json;
use crate::cni::keys::is_same;
use crate::mac::Mac;

/// Every supported key of an element.
const KEYS: &[&str] = &[
    "name",
    "namespace",
    "interface",
    "interfaceRequest",
    "ips",
    "mac",
    "infiniband-guid",
    "cni-args",
    "portMappings",
    "bandwidth",
    "default-route",
    "ipam-claim-reference",
    "deviceID",
];

const PORT_MAPPING_KEYS: &[&str] = &["hostPort", "containerPort", "protocol", "hostIP"];

const BANDWIDTH_KEYS: &[&str] = &["ingressRate", "ingressBurst", "egressRate", "egressBurst"];

pub(super) fn parse_element(
    index: usize,
    element: &Value,
    pod_namespace: &str,
    warnings: &mut Vec<SelectionWarning>,
) -> Result<Selection, SelectionError> {
    let Value::Object(object) = element else {
        return Err(SelectionError::NotAnObject { index, found: json::kind(element) });
    };
    let keys = Keys::sort(index, String::new(), object, KEYS, warnings)?;
    let network = network(&keys, pod_namespace)?;
    budget::NAME.check(network.name.len().max(network.namespace.len()))?;
    warn_of_long_names(index, &network, warnings);
    let selection = Selection {
        network,
        interface: interface(&keys, warnings)?,
        ips: ips(&keys)?,
        mac: mac(&keys)?,
        infiniband_guid: infiniband_guid(&keys)?,
        cni_args: cni_args(&keys)?,
        port_mappings: port_mappings(&keys, warnings)?,
        bandwidth: bandwidth(&keys, warnings)?,
        default_route: default_route(&keys)?,
        ipam_claim_reference: ipam_claim_reference(&keys)?,
        device_id: device_id(&keys, warnings)?,
    };
    if selection.ipam_claim_reference.is_some() && !selection.ips.is_empty() {
        return Err(keys.exclusive("ipam-claim-reference", "ips"));
    }
    Ok(selection)
}

fn network(keys: &Keys<'_>, pod_namespace: &str) -> Result<NetworkRef, SelectionError> {
    let expected = "lower-case letters, digits, hyphens and inner dots";
    let name = match keys.text("name", expected)? {
        Some(name) if is_subdomain(name) => name,
        Some("") | None => return Err(SelectionError::NoName { index: keys.index }),
        Some(_) => return Err(keys.wrong("name", expected)),
    };
    let expected = "lower-case letters, digits and inner hyphens";
    let namespace = match keys.text("namespace", expected)? {
        Some("") | None => pod_namespace,
        Some(namespace) if is_label(namespace) => namespace,
        Some(_) => return Err(keys.wrong("namespace", expected)),
    };
    Ok(NetworkRef::new(namespace, name))
}

fn interface(
    keys: &Keys<'_>,
    warnings: &mut Vec<SelectionWarning>,
) -> Result<Option<String>, SelectionError> {
    let expected = "a link name: 1 to 15 printable bytes without '/', ':', '%', not '.' or '..'";
    for key in ["interface", "interfaceRequest"] {
        match keys.text(key, expected)? {
            None | Some("") => {}
            Some(name) if is_interface_name(name) => {
                if key == "interfaceRequest" {
                    warnings.push(SelectionWarning::Spelling {
                        index: keys.index,
                        key: key.to_owned(),
                        read_as: "interface",
                    });
                }
                return Ok(Some(name.to_owned()));
            }
            Some(_) => return Err(keys.wrong(key, expected)),
        }
    }
    Ok(None)
}

fn ips(keys: &Keys<'_>) -> Result<Vec<RequestedIp>, SelectionError> {
    let expected = "an IP address, with or without a prefix length";
    let Some(items) = keys.list("ips", "a list of addresses")? else { return Ok(Vec::new()) };
    if items.is_empty() {
        return Err(keys.wrong("ips", "a list of at least one address"));
    }
    budget::IPS.check(items.len())?;
    items
        .iter()
        .enumerate()
        .map(|(position, item)| {
            let parsed = item.as_str().and_then(|text| text.parse().ok());
            parsed.ok_or_else(|| keys.wrong_at(&format!("ips[{position}]"), item, expected))
        })
        .collect()
}

fn mac(keys: &Keys<'_>) -> Result<Option<Mac>, SelectionError> {
    let expected = "a unicast Ethernet address of 6 bytes such as 02:00:00:00:00:01";
    let Some(text) = keys.text("mac", expected)? else { return Ok(None) };
    match text.parse::<Mac>() {
        Ok(mac) if !mac.is_multicast() && mac.0 != [0; 6] => Ok(Some(mac)),
        _ => Err(keys.wrong("mac", expected)),
    }
}

fn infiniband_guid(keys: &Keys<'_>) -> Result<Option<Guid>, SelectionError> {
    let expected = "a GUID of 8 bytes such as c2:11:22:33:44:55:66:77";
    let Some(text) = keys.text("infiniband-guid", expected)? else { return Ok(None) };
    text.parse().map(Some).map_err(|_| keys.wrong("infiniband-guid", expected))
}

fn cni_args(keys: &Keys<'_>) -> Result<Option<Map<String, Value>>, SelectionError> {
    match keys.get("cni-args") {
        None => Ok(None),
        Some(Value::Object(args)) => {
            budget::ARGUMENTS.check(keys.get("cni-args").map_or(0, |args| args.to_string().len()))?;
            Ok(Some(args.clone()))
        }
        Some(_) => Err(keys.wrong("cni-args", "an object")),
    }
}

fn port_mappings(
    keys: &Keys<'_>,
    warnings: &mut Vec<SelectionWarning>,
) -> Result<Vec<PortMapping>, SelectionError> {
    let Some(items) = keys.list("portMappings", "a list of objects")? else { return Ok(Vec::new()) };
    if items.is_empty() {
        return Err(keys.wrong("portMappings", "a list of at least one object"));
    }
    budget::PORT_MAPPINGS.check(items.len())?;
    let mut mappings = Vec::with_capacity(items.len());
    for (position, item) in items.iter().enumerate() {
        let path = format!("portMappings[{position}]");
        let Value::Object(object) = item else {
            return Err(keys.wrong_at(&path, item, "an object"));
        };
        mappings.push(port_mapping(&Keys::sort(keys.index, path, object, PORT_MAPPING_KEYS, warnings)?)?);
    }
    Ok(mappings)
}

fn port_mapping(keys: &Keys<'_>) -> Result<PortMapping, SelectionError> {
    let port = |key: &'static str| {
        let value = keys.get(key).ok_or_else(|| keys.missing(key))?;
        let port = value.as_u64().and_then(|number| u16::try_from(number).ok()).filter(|port| *port != 0);
        port.ok_or_else(|| keys.wrong(key, "a port from 1 to 65535"))
    };
    let host_port = port("hostPort")?;
    let container_port = port("containerPort")?;
    let protocol = match keys.text("protocol", "tcp, udp or sctp")? {
        // In the CNI conventions the protocol defaults to TCP.
        None | Some("") => PortProtocol::Tcp,
        Some(name) => {
            PortProtocol::from_name(name).ok_or_else(|| keys.wrong("protocol", "tcp, udp or sctp"))?
        }
    };
    let host_ip = match keys.text("hostIP", "an IP address")? {
        None | Some("") => None,
        Some(text) => Some(text.parse().map_err(|_| keys.wrong("hostIP", "an IP address"))?),
    };
    Ok(PortMapping { host_port, container_port, protocol, host_ip })
}

fn bandwidth(
    keys: &Keys<'_>,
    warnings: &mut Vec<SelectionWarning>,
) -> Result<Option<Bandwidth>, SelectionError> {
    let object = match keys.get("bandwidth") {
        None => return Ok(None),
        Some(Value::Object(object)) => object,
        Some(_) => return Err(keys.wrong("bandwidth", "an object")),
    };
    let limits = Keys::sort(keys.index, "bandwidth".to_owned(), object, BANDWIDTH_KEYS, warnings)?;
    let bits = |key: &'static str| match limits.get(key) {
        None => Ok(None),
        Some(value) => match value.as_u64() {
            Some(number) if number > 0 => Ok(Some(number)),
            _ => Err(limits.wrong(key, "a whole number of bits above 0")),
        },
    };
    let bandwidth = Bandwidth {
        ingress_rate: bits("ingressRate")?,
        ingress_burst: bits("ingressBurst")?,
        egress_rate: bits("egressRate")?,
        egress_burst: bits("egressBurst")?,
    };
    if bandwidth.ingress_burst.is_some() && bandwidth.ingress_rate.is_none() {
        return Err(limits.missing("ingressRate"));
    }
    if bandwidth.egress_burst.is_some() && bandwidth.egress_rate.is_none() {
        return Err(limits.missing("egressRate"));
    }
    if bandwidth.ingress_rate.is_none() && bandwidth.egress_rate.is_none() {
        return Err(keys.wrong("bandwidth", "an object with ingressRate, egressRate or both"));
    }
    Ok(Some(bandwidth))
}

fn default_route(keys: &Keys<'_>) -> Result<Option<Vec<IpAddr>>, SelectionError> {
    let Some(items) = keys.list("default-route", "a list of gateway addresses")? else { return Ok(None) };
    budget::GATEWAYS.check(items.len())?;
    let mut gateways: Vec<IpAddr> = Vec::with_capacity(items.len());
    for (position, item) in items.iter().enumerate() {
        let wrong = |expected| keys.wrong_at(&format!("default-route[{position}]"), item, expected);
        let parsed = item.as_str().and_then(|text| text.parse().ok()).filter(is_gateway);
        let gateway = parsed.ok_or_else(|| wrong("the IP address of a host"))?;
        if gateways.contains(&gateway) {
            return Err(wrong("another gateway than those before it"));
        }
        gateways.push(gateway);
    }
    Ok(Some(gateways))
}

/// Whether the address can belong to another host on a link.
pub(super) fn is_gateway(address: &IpAddr) -> bool {
    !address.is_unspecified()
        && !address.is_multicast()
        && !address.is_loopback()
        && *address != IpAddr::V4(Ipv4Addr::BROADCAST)
}

fn device_id(
    keys: &Keys<'_>,
    warnings: &mut Vec<SelectionWarning>,
) -> Result<Option<String>, SelectionError> {
    let expected = "the id of a device, such as a PCI address";
    match keys.text("deviceID", expected)? {
        None | Some("") => Ok(None),
        // The value becomes part of a file name.
        Some(id) if id.len() <= 128 && id.bytes().all(|b| b.is_ascii_graphic()) => {
            warnings.push(SelectionWarning::NotOfTheStandard { index: keys.index, key: "deviceID" });
            Ok(Some(id.to_owned()))
        }
        Some(_) => Err(keys.wrong("deviceID", expected)),
    }
}

fn ipam_claim_reference(keys: &Keys<'_>) -> Result<Option<String>, SelectionError> {
    let expected = "the name of an IPAMClaim";
    match keys.text("ipam-claim-reference", expected)? {
        None => Ok(None),
        Some(name) if is_subdomain(name) => Ok(Some(name.to_owned())),
        Some(_) => Err(keys.wrong("ipam-claim-reference", expected)),
    }
}

/// The keys of one object in their standard spelling, with the context for error messages.
struct Keys<'a> {
    index: usize,
    path: String,
    values: BTreeMap<&'static str, &'a Value>,
}

impl<'a> Keys<'a> {
    fn sort(
        index: usize,
        path: String,
        object: &'a Map<String, Value>,
        known: &'static [&'static str],
        warnings: &mut Vec<SelectionWarning>,
    ) -> Result<Self, SelectionError> {
        let mut keys = Self { index, path, values: BTreeMap::new() };
        for (key, value) in object {
            let Some(standard) = known.iter().copied().find(|k| is_same(k, key)) else {
                // Section 4.1.2.1: private keys are in reverse-DNS notation.
                if !key.contains('.') {
                    warnings.push(SelectionWarning::UnknownKey { index, key: keys.path_of(key) });
                }
                continue;
            };
            if standard != key {
                warnings.push(SelectionWarning::Spelling {
                    index,
                    key: keys.path_of(key),
                    read_as: standard,
                });
            }
            if !value.is_null() && keys.values.insert(standard, value).is_some() {
                let written_otherwise = object.keys().find(|k| is_same(k, key)).unwrap_or(key);
                return Err(keys.exclusive(written_otherwise, key));
            }
        }
        Ok(keys)
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.values.get(key).copied()
    }

    fn text(&self, key: &str, expected: &'static str) -> Result<Option<&'a str>, SelectionError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.wrong(key, expected)),
        }
    }

    fn list(&self, key: &str, expected: &'static str) -> Result<Option<&'a [Value]>, SelectionError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(_) => Err(self.wrong(key, expected)),
        }
    }

    fn wrong(&self, key: &str, expected: &'static str) -> SelectionError {
        self.wrong_at(key, self.get(key).unwrap_or(&Value::Null), expected)
    }

    fn wrong_at(&self, key: &str, value: &Value, expected: &'static str) -> SelectionError {
        SelectionError::Value {
            index: self.index,
            key: self.path_of(key),
            value: value.to_string(),
            expected,
        }
    }

    fn missing(&self, key: &str) -> SelectionError {
        SelectionError::Missing { index: self.index, key: self.path_of(key) }
    }

    fn exclusive(&self, first: &str, second: &str) -> SelectionError {
        SelectionError::Exclusive {
            index: self.index,
            first: self.path_of(first),
            second: self.path_of(second),
        }
    }

    fn path_of(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }
}
