//! `bridge`: a veth into the pod whose other end is a port of a bridge on the node.
//!
//! The keys are those of the plugin of the same name in containernetworking/plugins. Differences: the pod's
//! end is created in place, and without an IPv6 link-local address if a network of which the node is the
//! gateway has no IPv6 (key `linkLocal`). The agent's dataplane verifies sources on the port whether or not
//! `macspoofchk` asks for it; without an agent, the packet filter does so if `macspoofchk` asks for it. A
//! bridge's own address is fixed when the bridge is created.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::bridge_vlans::Vlans;
use super::translation::Reach;
use super::{Driver, PlanError, Request, Wanted, check_mtu, check_new_name};
use crate::cni;
use crate::cni::json::null_is_default;
use crate::ipam::Kind;
use crate::ipam::static_addresses::{self, GatewayError};
use crate::spec;
use crate::step::{Configure, Step, Style};

pub(super) struct Bridge;

/// Name of the bridge when the configuration gives none.
const DEFAULT_NAME: &str = "cni0";

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Config {
    #[serde(default)]
    bridge: Option<String>,
    #[serde(default, deserialize_with = "null_is_default")]
    is_gateway: bool,
    #[serde(default, deserialize_with = "null_is_default")]
    is_default_gateway: bool,
    #[serde(default, deserialize_with = "null_is_default")]
    force_address: bool,
    #[serde(default, deserialize_with = "null_is_default")]
    keep_addresses: bool,
    #[serde(default)]
    mtu: Option<u32>,
    #[serde(default, deserialize_with = "null_is_default")]
    hairpin_mode: bool,
    #[serde(default, deserialize_with = "null_is_default")]
    promisc_mode: bool,
    #[serde(default, deserialize_with = "null_is_default")]
    macspoofchk: bool,
    #[serde(default, deserialize_with = "null_is_default")]
    link_local: bool,
    #[serde(default, deserialize_with = "null_is_default")]
    enabledad: bool,
    #[serde(default, deserialize_with = "null_is_default")]
    disable_container_interface: bool,
    #[serde(default, deserialize_with = "null_is_default")]
    port_isolation: bool,
}

impl Driver for Bridge {
    fn kind(&self) -> &'static str {
        "bridge"
    }

    fn is_judged(&self, _: &Map<String, Value>) -> bool {
        true
    }

    fn maps_ports(&self) -> bool {
        true
    }

    fn wants(&self, _: &Map<String, Value>) -> Vec<Wanted> {
        Vec::new()
    }

    fn plan(&self, request: &Request<'_>) -> Result<Vec<Step>, PlanError> {
        let config: Config = request.read()?;
        config.check(request)?;
        let name = config.name()?;
        let mtu = check_mtu(config.mtu)?;
        let (ipam, gateway) = addresses(&config, request)?;
        let addressed = ipam.is_some();
        let Vlans { port: vlans, access } = request.vlans()?;
        // The gateways of a VLAN are on a separate device.
        let vlan = access.filter(|_| gateway);
        let device = gateway_device(&name, vlan)?;

        let translation = request.translation(Reach { device, bridged: true, routed: gateway, addressed })?;
        let made = spec::Bridge {
            name: name.clone(),
            mtu,
            promiscuous: config.promisc_mode,
            vlan_filtering: vlans.is_some(),
        };
        let hairpin = config.reflects(translation.as_ref());
        let port = spec::BridgePort { bridge: name.clone(), hairpin, isolated: config.port_isolation, vlans };
        let mut steps = vec![
            Step::EnsureBridge(made),
            Step::CreateLink(spec::Link::Veth(spec::Veth {
                host_name: request.host_name(),
                pod_name: request.ifname.to_owned(),
                mtu,
                mac: request.mac()?,
                group: request.group,
                port: Some(port),
            })),
        ];
        // Address management may send requests by the pod's interface, which comes up for that.
        steps.extend(config.is_restricted(request).then_some(Step::RestrictSender));
        steps.extend(ipam);
        if gateway {
            let (force, beside) = (config.force_address, config.keep_addresses);
            steps.push(Step::Gateway { bridge: name, force, beside, vlan });
            steps.push(Step::EnsureForwarding);
        }
        steps.extend(translation);
        let configure = Configure {
            style: Style::Subnet,
            default_route: gateway && config.is_default_gateway,
            dns: request.dns()?,
            // The node is the router and does not advertise, so the pod has no IPv6 neighbour to talk to.
            // Without this, the packets that each new pod sends from its link-local address would be flooded
            // to all pods of the bridge.
            v4_alone: gateway && !config.link_local,
            detect_duplicates: config.enabledad,
            down: config.disable_container_interface,
        };
        steps.extend(request.finish(addressed, configure)?);
        Ok(steps)
    }

    fn remains(&self, request: &Request<'_>) -> Vec<Step> {
        // The configuration may have had another value at ADD. With an agent, its programs check.
        let restricted = (!request.recorded).then_some(Step::RestrictSender);
        request.veth_remains().into_iter().chain(restricted).collect()
    }
}

impl Config {
    /// Refuses keys that exclude each other, and keys that need the dataplane if there is none.
    fn check(&self, request: &Request<'_>) -> Result<(), PlanError> {
        let refused = |key, reason: &str| Err(PlanError::Value { key, reason: reason.into() });
        if self.hairpin_mode && self.promisc_mode {
            return refused("hairpinMode", "cannot set hairpin mode and promiscuous mode at the same time");
        }
        if self.keep_addresses && self.force_address {
            return refused("keepAddresses", "cannot keep other addresses and replace them");
        }
        if self.is_restricted(request) && request.recorded {
            return refused("macspoofchk", "true needs the dataplane, which this agent is without");
        }
        Ok(())
    }

    /// Whether the packet filter has to verify what the pod sends: `macspoofchk` asks for it, and no program
    /// does it.
    fn is_restricted(&self, request: &Request<'_>) -> bool {
        self.macspoofchk && request.protect.is_none()
    }

    /// Name of the bridge.
    fn name(&self) -> Result<String, PlanError> {
        let name = self.bridge.clone().filter(|name| !name.is_empty()).unwrap_or_else(|| DEFAULT_NAME.into());
        check_new_name("bridge", &name)?;
        Ok(name)
    }

    /// The key that makes the node the pods' gateway, if one is set.
    fn gateway_key(&self) -> Option<&'static str> {
        match (self.is_gateway, self.is_default_gateway) {
            (true, _) => Some("isGateway"),
            (false, true) => Some("isDefaultGateway"),
            (false, false) => None,
        }
    }

    /// Whether frames may leave by the port on which they arrived. Bridges that pass their frames to the
    /// packet filter forward translated packets as frames: if a pod reaches itself by a port of the node, to
    /// the port on which the frame arrived.
    fn reflects(&self, translation: Option<&Step>) -> bool {
        let comes_back = matches!(translation, Some(Step::Translate(it)) if !it.ports.is_empty());
        self.hairpin_mode || (comes_back && !self.promisc_mode)
    }
}

/// The step that provides addresses, if any, and whether the node is the pod's gateway: without addresses
/// there is no gateway.
fn addresses(config: &Config, request: &Request<'_>) -> Result<(Option<Step>, bool), PlanError> {
    let key = config.gateway_key();
    let ipam = match (request.ipam()?, key) {
        (Some(ipam), Some(key)) => Some(behind_gateways(request, key, ipam)?),
        (ipam, _) => ipam,
    };
    if config.disable_container_interface && ipam.is_some() {
        let reason = "an interface that stays down has no use for ipam".into();
        return Err(PlanError::Value { key: "disableContainerInterface", reason });
    }
    let gateway = key.is_some() && ipam.is_some();
    Ok((ipam, gateway))
}

/// The device that has the gateways: the bridge, or the device of a VLAN on it.
fn gateway_device(bridge: &str, vlan: Option<u16>) -> Result<String, PlanError> {
    let device = vlan.map_or_else(|| bridge.to_owned(), |vlan| spec::vlan_device(bridge, vlan));
    if cni::identifier::check_ifname(&device).is_err() {
        let reason = format!(
            "{bridge:?} is too long for a gateway: the device of its VLAN would be {device}, and a name has 15 bytes"
        );
        return Err(PlanError::Value { key: "bridge", reason });
    }
    Ok(device)
}

/// Refuses address managers that let a party other than the network's author choose the gateway, because the
/// node takes the gateway's address. `key`: the key that makes the node the gateway.
fn behind_gateways(request: &Request<'_>, key: &'static str, asked: Step) -> Result<Step, PlanError> {
    let wrong = |error: GatewayError| PlanError::Value { key, reason: error.to_string() };
    match asked {
        // Whether netattach or another plugin asks.
        asking if asking.asks_the_network() => {
            let reason = "with dhcp a server on the network says who the gateway is, and would choose an address for the node";
            Err(PlanError::Value { key, reason: reason.into() })
        }
        Step::Lease(config) => config.behind_own_gateways().map(Step::Lease).map_err(wrong),
        // Any other executed address manager has its own addresses or its own server.
        Step::Delegate(delegate) if delegate.plugin == Kind::Static.name() => {
            let config = static_addresses::Config::parse(request.config, request.cni_args)
                .map_err(|error| PlanError::Ipam(error.into()))?;
            config.behind_untold_gateways().map_err(wrong)?;
            Ok(Step::Delegate(delegate))
        }
        other => Ok(other),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::request;
    use super::*;
    use crate::cni::{CniArgs, CniError, code};

    fn planned(keys: &Value) -> Result<Vec<Step>, (u32, String)> {
        let pool = json!({"type": "host-local", "subnet": "10.1.0.0/24"});
        let mut config = json!({"cniVersion": "1.1.0", "name": "net", "type": "bridge", "ipam": pool});
        config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        let (config, args) = (config.as_object().unwrap(), CniArgs::default());
        Bridge.plan(&request(config, &args)).map_err(|error| {
            let error = CniError::from(error);
            (error.code, error.msg)
        })
    }

    /// Rows: BRG-keepAddresses.
    #[test]
    fn other_addresses_of_the_bridge_are_refused_replaced_or_kept_and_not_both() {
        for (keys, force, beside) in [
            (json!({"isGateway": true}), false, false),
            (json!({"isGateway": true, "forceAddress": true}), true, false),
            (json!({"isGateway": true, "keepAddresses": true, "forceAddress": null}), false, true),
        ] {
            let expected = Step::Gateway { bridge: DEFAULT_NAME.to_owned(), force, beside, vlan: None };
            assert!(planned(&keys).unwrap().contains(&expected), "{keys}");
        }
        let both = json!({"isGateway": true, "keepAddresses": true, "forceAddress": true});
        let told = "key keepAddresses: cannot keep other addresses and replace them";
        assert_eq!(planned(&both), Err((code::INVALID_CONFIG, told.to_owned())));
    }
}
