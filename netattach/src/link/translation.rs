//! The address translation that a configuration and a pod ask for: `ipMasq`, `nonMasqueradeCIDRs`, the
//! capability `portMappings` and `portSenders`. Pure.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{PlanError, Request};
use crate::budget;
use crate::cidr;
use crate::cni::json::{kind, null_is_default};
use crate::npwg::selection::{PortMapping, PortProtocol};
use crate::step::{PortSenders, Step, Translate};

/// Name of the capability, also used in errors about its value.
const CAPABILITY: &str = "portMappings";
const PORTS: &str = "runtimeConfig.portMappings";
const EXCEPTIONS: &str = "nonMasqueradeCIDRs";
const OF_NODE: &str = "nonMasqueradeBuiltin";
const MASQUERADE: &str = "ipMasq";
pub(super) const SENDERS: &str = "portSenders";

/// How the node reaches the pods of a network.
pub(super) struct Reach {
    /// Name of the device that leads to the pods.
    pub(super) device: String,
    /// Whether pods of a subnet reach each other without passing the node.
    pub(super) bridged: bool,
    /// Whether the node routes for the pods.
    pub(super) routed: bool,
    /// Whether the pods have addresses.
    pub(super) addressed: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Config {
    #[serde(default, deserialize_with = "null_is_default")]
    ip_masq: bool,
    #[serde(default)]
    ip_masq_backend: Option<String>,
    #[serde(default, rename = "nonMasqueradeCIDRs", deserialize_with = "null_is_default")]
    non_masquerade: Vec<String>,
    #[serde(default, deserialize_with = "null_is_default")]
    non_masquerade_builtin: bool,
    #[serde(default)]
    port_senders: Option<String>,
}

impl Request<'_> {
    /// The step that makes the node translate addresses, if any translation is requested.
    pub(super) fn translation(&self, reach: Reach) -> Result<Option<Step>, PlanError> {
        let config: Config = self.read()?;
        // In the reference plugin this key chooses an implementation. netattach has one, which both names
        // select, as with the `backend` of `portmap`. The resulting translation is the same.
        let backend = config.ip_masq_backend.as_deref().unwrap_or_default();
        if !["", "nftables", "iptables"].contains(&backend) {
            let reason = format!("{backend:?} is neither nftables nor iptables");
            return Err(PlanError::Value { key: "ipMasqBackend", reason });
        }
        let masquerade = exceptions(&config)?;
        let word = config.port_senders.as_deref().filter(|word| !word.is_empty()).unwrap_or("near");
        let senders = PortSenders::named(word).ok_or_else(|| {
            let reason = format!("{word:?} is none of near, all and none");
            PlanError::Value { key: SENDERS, reason }
        })?;
        if config.non_masquerade_builtin && self.protect.is_none() {
            let reason = "needs netattachd, which keeps the list".into();
            return Err(PlanError::Value { key: OF_NODE, reason });
        }
        let ports = self.port_mappings()?;
        let key = match (&masquerade, ports.is_empty()) {
            (None, true) => return Ok(None),
            // As in the reference plugin: there is no address to translate.
            (Some(_), true) if !reach.addressed => return Ok(None),
            (_, false) if !reach.addressed => {
                let reason = "needs ipam: ports of the node lead to addresses".into();
                return Err(PlanError::Value { key: PORTS, reason });
            }
            (Some(_), _) => MASQUERADE,
            (None, false) => PORTS,
        };
        if !reach.routed {
            let reason =
                "needs isGateway or isDefaultGateway: the node translates only what it routes".into();
            return Err(PlanError::Value { key, reason });
        }
        let Reach { device, bridged, routed: _, addressed: _ } = reach;
        let follows_node = config.non_masquerade_builtin;
        Ok(Some(Step::Translate(Translate { device, bridged, masquerade, follows_node, ports, senders })))
    }

    /// The part of a translation that its inverse needs.
    pub(super) fn translation_remains(&self) -> Step {
        let device = self.host_name();
        Step::Translate(Translate { device, ..Translate::default() })
    }

    /// The ports of the node that the runtime or the pod asks for.
    pub(super) fn port_mappings(&self) -> Result<Vec<PortMapping>, PlanError> {
        let asked = self.config.get("runtimeConfig").and_then(|asked| asked.get(CAPABILITY));
        let items = match asked {
            None | Some(Value::Null) => return Ok(Vec::new()),
            Some(Value::Array(items)) => items,
            Some(other) => return Err(wrong(format!("a list is needed, not {}", kind(other)))),
        };
        budget::PORT_MAPPINGS.check(items.len())?;
        let mut mappings: Vec<PortMapping> = Vec::with_capacity(items.len());
        for (position, item) in items.iter().enumerate() {
            let read = item.as_object().ok_or_else(|| "an object is needed".to_owned()).and_then(mapping);
            let Some(read) = read.map_err(|reason| wrong(format!("element {position}: {reason}")))? else {
                continue;
            };
            if mappings.contains(&read) {
                continue;
            }
            if let Some(other) = mappings.iter().find(|other| overlap(other, &read)) {
                let reason = format!(
                    "element {position}: port {} of the node leads to port {} of the pod already",
                    read.host_port, other.container_port
                );
                return Err(wrong(reason));
            }
            mappings.push(read);
        }
        Ok(mappings)
    }
}

fn wrong(reason: String) -> PlanError {
    PlanError::Value { key: PORTS, reason }
}

/// The destinations that are not masqueraded; `None`: masquerading is off.
fn exceptions(config: &Config) -> Result<Option<Vec<IpNet>>, PlanError> {
    budget::NON_MASQUERADE.check(config.non_masquerade.len())?;
    if !config.ip_masq && !config.non_masquerade.is_empty() {
        let reason = "excepts from masquerade, but ipMasq is not true".into();
        return Err(PlanError::Value { key: EXCEPTIONS, reason });
    }
    if config.non_masquerade_builtin && (!config.ip_masq || !config.non_masquerade.is_empty()) {
        let reason = format!("needs {MASQUERADE}, and is in the place of {EXCEPTIONS}");
        return Err(PlanError::Value { key: OF_NODE, reason });
    }
    let mut nets = Vec::with_capacity(config.non_masquerade.len());
    for text in &config.non_masquerade {
        let net = cidr::parse(text).ok_or_else(|| {
            let reason = format!("{text:?} is not a network such as 10.0.0.0/8");
            PlanError::Value { key: EXCEPTIONS, reason }
        })?;
        nets.push(net.trunc());
    }
    Ok(config.ip_masq.then_some(nets))
}

/// Parses one mapping; `None`: runtimes use 0 for container ports without a port of the node.
fn mapping(object: &Map<String, Value>) -> Result<Option<PortMapping>, String> {
    let port = |key: &str| {
        let number = object.get(key).and_then(Value::as_u64).and_then(|number| u16::try_from(number).ok());
        number.ok_or_else(|| format!("{key} must be a port from 1 to 65535"))
    };
    let text = |key: &str| match object.get(key) {
        None | Some(Value::Null) => Ok(""),
        Some(Value::String(text)) => Ok(text.as_str()),
        Some(_) => Err(format!("{key} must be a text")),
    };
    let host_port = match object.get("hostPort") {
        None | Some(Value::Null) => return Ok(None),
        Some(_) => port("hostPort")?,
    };
    if host_port == 0 {
        return Ok(None);
    }
    let container_port = port("containerPort")?;
    if container_port == 0 {
        return Err("containerPort must be a port from 1 to 65535".to_owned());
    }
    let protocol = match text("protocol")? {
        "" => PortProtocol::Tcp,
        name => PortProtocol::from_name(name)
            .ok_or_else(|| format!("protocol {name:?} is none of tcp, udp and sctp"))?,
    };
    let host_ip = match text("hostIP")? {
        "" => None,
        text => {
            let address: IpAddr =
                text.parse().map_err(|_| format!("hostIP {text:?} is not an IP address"))?;
            check_host_ip(address)?;
            Some(address)
        }
    };
    Ok(Some(PortMapping { host_port, container_port, protocol, host_ip }))
}

fn check_host_ip(address: IpAddr) -> Result<(), String> {
    if address.is_multicast() {
        return Err(format!("hostIP {address} is a multicast address, which no node has"));
    }
    if let IpAddr::V6(v6) = address
        && let Some(v4) = v6.to_ipv4_mapped()
    {
        return Err(format!("hostIP {address} is an IPv4 address: write {v4}"));
    }
    if matches!(address, IpAddr::V6(v6) if v6.is_loopback()) {
        return Err(format!("hostIP {address}: the kernel routes nothing from there to a pod"));
    }
    Ok(())
}

/// Whether a packet could match both mappings.
fn overlap(one: &PortMapping, other: &PortMapping) -> bool {
    let addresses = match (one.host_ip, other.host_ip) {
        (Some(one), Some(other)) => {
            let same_family = one.is_ipv4() == other.is_ipv4();
            same_family && (one == other || one.is_unspecified() || other.is_unspecified())
        }
        _ => true,
    };
    addresses && (one.protocol, one.host_port) == (other.protocol, other.host_port)
}
