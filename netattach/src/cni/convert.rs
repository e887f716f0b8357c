//! Converts results between the newest format and the formats of older versions.
//!
//! | family | versions | lost in conversion |
//! |---|---|---|
//! | `Oldest` | 0.1.0, 0.2.0 | interfaces; all but the first address of each IP family; all of a route but `dst` and `gw` |
//! | `Middle` | 0.3.0 to 0.4.0 | an interface's `mtu`, `socketPath` and `pciID` |
//! | `Newest` | 1.0.0, 1.1.0 | nothing, even from 1.1.0 to 1.0.0 |

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::error::{CniError, code};
use super::json::{self, KeyError, Value, null_is_default};
use super::result::{CniResult, Dns, Interface, IpConfig, Route, blank_is_no_address, undecodable};
use super::version::Version;
use crate::budget;

/// Versions whose results have the same format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Family {
    Oldest,
    Middle,
    Newest,
}

impl Family {
    pub(super) fn of(version: Version) -> Self {
        match version {
            Version::V0_1_0 | Version::V0_2_0 => Self::Oldest,
            Version::V0_3_0 | Version::V0_3_1 | Version::V0_4_0 => Self::Middle,
            Version::V1_0_0 | Version::V1_1_0 => Self::Newest,
        }
    }
}

/// Reads a result in the format of `version`.
pub(super) fn read(value: &Value, version: Version) -> Result<CniResult, CniError> {
    let in_result = |KeyError { key, source }| undecodable(format!("CNI result: key {key}: {source}"));
    let result = match Family::of(version) {
        Family::Oldest => json::read_value(value).map(OldestResult::into_newest).map_err(in_result),
        // The middle format states an address's family, but it also follows from the address.
        Family::Middle => json::read_value(value)
            .map(|mut result: CniResult| {
                for interface in &mut result.interfaces {
                    strip_to_middle(interface);
                }
                result
            })
            .map_err(in_result),
        Family::Newest => json::read_value(value).map_err(in_result),
    }?;
    for (found, budget) in [
        (result.interfaces.len(), &budget::RESULT_INTERFACES),
        (result.ips.len(), &budget::RESULT_IPS),
        (result.routes.len(), &budget::RESULT_ROUTES),
    ] {
        budget.check(found).map_err(|error| undecodable(error.to_string()))?;
    }
    Ok(result)
}

/// Writes a result in the format of `version`.
pub(super) fn write(result: &CniResult, version: Version) -> Result<Value, CniError> {
    match Family::of(version) {
        Family::Oldest => {
            let oldest = OldestResult::from_newest(result).ok_or_else(|| {
                CniError::new(code::INCOMPATIBLE_VERSION, "cannot convert: no valid IP addresses")
                    .with_details(format!("a CNI {version} result consists of addresses"))
            })?;
            object(version, &oldest)
        }
        Family::Middle => object(version, &MiddleResult::from_newest(result)),
        Family::Newest => object(version, result),
    }
}

fn object(version: Version, body: &impl Serialize) -> Result<Value, CniError> {
    /// `cniVersion` first, then the members of the format.
    #[derive(Serialize)]
    struct Versioned<'a, T> {
        #[serde(rename = "cniVersion")]
        version: Version,
        #[serde(flatten)]
        body: &'a T,
    }
    serde_json::to_value(Versioned { version, body })
        .map_err(|error| CniError::new(code::INTERNAL, format!("encode CNI result: {error}")))
}

/// 0.1.0 and 0.2.0: one address per family, with its routes.
#[derive(Serialize, Deserialize)]
struct OldestResult {
    #[serde(skip_serializing_if = "Option::is_none")]
    ip4: Option<OldestIp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ip6: Option<OldestIp>,
    #[serde(default, deserialize_with = "null_is_default")]
    dns: Dns,
}

#[derive(Serialize, Deserialize)]
struct OldestIp {
    #[serde(deserialize_with = "crate::cidr::deserialize")]
    ip: IpNet,
    #[serde(default, deserialize_with = "blank_is_no_address", skip_serializing_if = "Option::is_none")]
    gateway: Option<IpAddr>,
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "Vec::is_empty")]
    routes: Vec<Route>,
}

impl OldestResult {
    fn into_newest(self) -> CniResult {
        let mut result = CniResult { dns: self.dns, ..CniResult::default() };
        for OldestIp { ip, gateway, routes } in [self.ip4, self.ip6].into_iter().flatten() {
            result.ips.push(IpConfig { interface: None, address: ip, gateway });
            result.routes.extend(routes);
        }
        result
    }

    /// `None` if there is no address.
    fn from_newest(result: &CniResult) -> Option<Self> {
        let first = |is_ip4: bool| {
            let is_ours = |net: &IpNet| matches!(net, IpNet::V4(_)) == is_ip4;
            let ip = result.ips.iter().find(|ip| is_ours(&ip.address))?;
            let routes = result.routes.iter().filter(|route| is_ours(&route.dst));
            Some(OldestIp {
                ip: ip.address,
                gateway: ip.gateway,
                routes: routes.map(|route| Route::new(route.dst, route.gw)).collect(),
            })
        };
        let (ip4, ip6) = (first(true), first(false));
        if ip4.is_none() && ip6.is_none() {
            return None;
        }
        Some(Self { ip4, ip6, dns: result.dns.clone() })
    }
}

/// 0.3.0 to 0.4.0: addresses state their family, interfaces have three members, `dns` is always present.
#[derive(Serialize)]
struct MiddleResult {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    interfaces: Vec<Interface>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ips: Vec<MiddleIp>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    routes: Vec<Route>,
    dns: Dns,
}

#[derive(Serialize)]
struct MiddleIp {
    version: &'static str,
    #[serde(flatten)]
    ip: IpConfig,
}

impl MiddleResult {
    fn from_newest(result: &CniResult) -> Self {
        let mut interfaces = result.interfaces.clone();
        interfaces.iter_mut().for_each(strip_to_middle);
        let ips = result.ips.iter().map(|ip| MiddleIp {
            version: if ip.address.addr().is_ipv4() { "4" } else { "6" },
            ip: ip.clone(),
        });
        Self { interfaces, ips: ips.collect(), routes: result.routes.clone(), dns: result.dns.clone() }
    }
}

fn strip_to_middle(interface: &mut Interface) {
    interface.mtu = None;
    interface.socket_path = None;
    interface.pci_id = None;
}
