//! The result of an ADD, in the format of the newest version. Older formats are in `convert`.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Deserializer, Serialize};

use super::convert;
use super::error::{CniError, code};
use super::json::{self, Value, null_is_default};
use super::keys;
use super::version::Version;
use crate::cidr;

/// The result of an ADD (SPEC, "Result Types").
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CniResult {
    /// Every interface the attachment created, in the container and on the host.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "Vec::is_empty")]
    pub interfaces: Vec<Interface>,
    /// The addresses assigned.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "Vec::is_empty")]
    pub ips: Vec<IpConfig>,
    /// The routes created.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<Route>,
    /// Name resolution for the container.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "Dns::is_empty")]
    pub dns: Dns,
}

/// An interface of a [`CniResult`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Interface {
    /// The link's name; may be empty for a device that is not a link, such as one bound to vfio.
    #[serde(default, deserialize_with = "null_is_default")]
    pub name: String,
    /// The hardware address, lower case with colons; 6 or 20 bytes.
    #[serde(default, deserialize_with = "blank_is_none", skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// The MTU in bytes. Since 1.1.0.
    #[serde(default, deserialize_with = "zero_is_none", skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// The `CNI_NETNS` of the interface; `None` on the host.
    #[serde(default, deserialize_with = "blank_is_none", skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<String>,
    /// The socket of a vhost-user interface. Since 1.1.0.
    #[serde(
        rename = "socketPath",
        default,
        deserialize_with = "blank_is_none",
        skip_serializing_if = "Option::is_none"
    )]
    pub socket_path: Option<String>,
    /// The PCI address of the underlying device. Since 1.1.0.
    #[serde(
        rename = "pciID",
        default,
        deserialize_with = "blank_is_none",
        skip_serializing_if = "Option::is_none"
    )]
    pub pci_id: Option<String>,
}

/// An address of a [`CniResult`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpConfig {
    /// The index into [`CniResult::interfaces`]; not validated. A negative number, which old plugins print for "none",
    /// reads as `None`.
    #[serde(default, deserialize_with = "negative_is_none", skip_serializing_if = "Option::is_none")]
    pub interface: Option<usize>,
    /// The address with its prefix length; host bits are kept.
    #[serde(deserialize_with = "cidr::deserialize")]
    pub address: IpNet,
    /// The gateway of its subnet.
    #[serde(default, deserialize_with = "blank_is_no_address", skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
}

/// A route of a [`CniResult`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// The destination; host bits are kept.
    #[serde(deserialize_with = "cidr::deserialize")]
    pub dst: IpNet,
    /// The next hop; if absent, the gateway of the subnet if there is one, else the link.
    #[serde(default, deserialize_with = "blank_is_no_address", skip_serializing_if = "Option::is_none")]
    pub gw: Option<IpAddr>,
    /// The path MTU in bytes.
    #[serde(default, deserialize_with = "zero_is_none", skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// The TCP MSS to advertise, in bytes.
    #[serde(default, deserialize_with = "zero_is_none", skip_serializing_if = "Option::is_none")]
    pub advmss: Option<u32>,
    /// The metric; lower wins.
    #[serde(default, deserialize_with = "zero_is_none", skip_serializing_if = "Option::is_none")]
    pub priority: Option<u32>,
    /// The routing table; zero is a value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<u32>,
    /// The scope as in `rtnetlink(7)`: 0 global, 253 link, 254 host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<u32>,
}

/// Name resolution for the container.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Dns {
    /// Addresses of the servers, in order of preference.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "Vec::is_empty")]
    pub nameservers: Vec<String>,
    /// The local domain.
    #[serde(default, deserialize_with = "blank_is_none", skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// Domains to search, in order.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "Vec::is_empty")]
    pub search: Vec<String>,
    /// Options of the resolver.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

impl CniResult {
    /// Reads a result of any version. `assumed` is used for a result without `cniVersion`: the version of the
    /// configuration that the plugin was called with. `null` is an empty result.
    ///
    /// # Errors
    /// Code 6, naming the key.
    pub fn parse(value: &Value, assumed: Version) -> Result<Self, CniError> {
        if value.is_null() {
            return Ok(Self::default());
        }
        convert::read(value, declared_version(value, assumed)?)
    }

    /// Writes the result in the format of `version`.
    ///
    /// Members that a version does not have are omitted (see the table in `convert.rs`). The two oldest need an
    /// address.
    ///
    /// # Errors
    /// Code 1 when the version needs an address and there is none.
    pub fn to_value(&self, version: Version) -> Result<Value, CniError> {
        convert::write(self, version)
    }

    /// The interface of an address, if its index is valid.
    pub fn interface_of(&self, ip: &IpConfig) -> Option<&Interface> {
        self.interfaces.get(ip.interface?)
    }
}

impl IpConfig {
    /// An address without interface and gateway.
    pub fn new(address: IpNet) -> Self {
        Self { interface: None, address, gateway: None }
    }
}

impl Route {
    /// The scope of what is on the link: `RT_SCOPE_LINK` of rtnetlink(7).
    pub const LINK: u32 = 253;

    /// A route with a destination and an optional next hop only.
    pub fn new(dst: IpNet, gw: Option<IpAddr>) -> Self {
        Self { dst, gw, mtu: None, advmss: None, priority: None, table: None, scope: None }
    }

    /// Its next hop: where it names none, the first of these gateways that is of its family. What is on the link, or
    /// nearer, has none: the kernel refuses such a route with a gateway. The unspecified address is how the `dhcp` of
    /// containernetworking/plugins writes that there is none; the kernel shows such a route without a gateway.
    pub fn next_hop(&self, mut gateways: impl Iterator<Item = IpAddr>) -> Option<IpAddr> {
        let is_near = self.scope.is_some_and(|scope| scope >= Self::LINK);
        let is_usual = |gateway: &IpAddr| !is_near && gateway.is_ipv4() == self.dst.addr().is_ipv4();
        match self.gw {
            Some(gateway) => Some(gateway).filter(|gateway| !gateway.is_unspecified()),
            None => gateways.find(is_usual),
        }
    }
}

impl Dns {
    /// Whether nothing is set.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The result's `cniVersion`, else `assumed`.
pub(super) fn declared_version(value: &Value, assumed: Version) -> Result<Version, CniError> {
    let text = match value {
        Value::Object(map) => map.get("cniVersion").or_else(|| {
            // Go's decoder ignores the letter case of keys, and plugins have come to rely on it.
            map.iter().find(|(key, _)| keys::is_same(key, "cniVersion")).map(|(_, value)| value)
        }),
        Value::Null => None,
        other => {
            return Err(undecodable(format!("CNI result is {}, not an object", json::kind(other))));
        }
    };
    match text {
        None | Some(Value::Null) => Ok(assumed),
        Some(Value::String(text)) if text.is_empty() => Ok(assumed),
        Some(Value::String(text)) => Version::exact(text)
            .ok_or_else(|| undecodable(format!("unsupported CNI result version {text:?}"))),
        Some(other) => {
            let kind = json::kind(other);
            Err(undecodable(format!("CNI result: key cniVersion: expected a string, found {kind}")))
        }
    }
}

/// The result unchanged, with `cniVersion` added if it is missing.
pub(crate) fn with_version(value: &Value, version: Version) -> Value {
    let mut map = value.as_object().cloned().unwrap_or_default();
    let declared = map.iter().any(|(key, value)| {
        keys::is_same(key, "cniVersion") && value.as_str().is_some_and(|text| !text.is_empty())
    });
    if !declared {
        map.insert("cniVersion".into(), version.as_str().into());
    }
    Value::Object(map)
}

/// Converts a plugin's result to `version`. One that has that version already is passed on unchanged, so that unknown
/// keys survive; one without `cniVersion` is assumed to have it.
///
/// # Errors
/// The result cannot be read, or cannot be expressed in that version.
pub fn in_version(printed: &Value, version: Version) -> Result<Value, CniError> {
    if declared_version(printed, version)? == version {
        return Ok(with_version(printed, version));
    }
    CniResult::parse(printed, version)?.to_value(version)
}

/// Reads a `prevResult`, which must be in the format of the configuration's version.
pub(super) fn read_prev_result(value: &Value, config: Version) -> Result<CniResult, CniError> {
    let version = declared_version(value, config)?;
    if convert::Family::of(version) != convert::Family::of(config) {
        return Err(undecodable(format!(
            "could not parse prevResult: its version {version} has another shape than the configuration's {config}"
        )));
    }
    convert::read(value, version)
}

pub(super) fn undecodable(msg: String) -> CniError {
    CniError::new(code::DECODING_FAILURE, msg)
}

fn blank_is_none<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    Ok(Option::deserialize(deserializer)?.filter(|text: &String| !text.is_empty()))
}

fn zero_is_none<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    Ok(Option::deserialize(deserializer)?.filter(|number| *number != 0))
}

fn negative_is_none<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<usize>, D::Error> {
    Ok(Option::<i64>::deserialize(deserializer)?.and_then(|number| usize::try_from(number).ok()))
}

pub(super) fn blank_is_no_address<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<IpAddr>, D::Error> {
    match blank_is_none(deserializer)? {
        None => Ok(None),
        Some(text) => text
            .parse()
            .map(Some)
            .map_err(|_| serde::de::Error::custom(format!("{text:?} is not an IP address"))),
    }
}

#[cfg(test)]
pub(super) mod arbitrary {
    //! Generators for property tests of the neighbouring modules.

    use proptest::prelude::*;
    use serde_json::{Map, Value};

    /// A JSON document whose keys and strings are often ones that the readers know.
    pub(in crate::cni) fn document(keys: &'static [&'static str]) -> impl Strategy<Value = Value> {
        let text = prop_oneof![
            prop::sample::select(vec![
                "",
                "1.1.0",
                "0.2.0",
                "0.4.0",
                "9.9",
                "n",
                "true",
                "10.0.0.1/8",
                "fd00::1/64",
                "10.0.0.1",
                "::",
            ])
            .prop_map(str::to_owned),
            ".{0,8}",
        ];
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            text.prop_map(Value::from),
        ];
        let key = prop_oneof![prop::sample::select(keys).prop_map(str::to_owned), ".{0,4}"];
        let object = move |value: BoxedStrategy<Value>| {
            prop::collection::vec((key.clone(), value), 0..6)
                .prop_map(|pairs| Value::Object(pairs.into_iter().collect::<Map<_, _>>()))
        };
        let object_again = object.clone();
        let inner = leaf.prop_recursive(4, 64, 6, move |inner| {
            let inner = inner.boxed();
            prop_oneof![prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from), object(inner)]
        });
        object_again(inner.boxed())
    }
}

#[cfg(test)]
#[path = "result_tests.rs"]
mod tests;
