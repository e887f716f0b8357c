//! The configuration of the network, as if somebody had written it.

use ipnet::IpNet;
use serde_json::{Value, json};

use super::settings::{Mode, Settings};
use crate::cni::{ConfigError, NetworkList};

/// Name of the network, of its pool, and of the network in published status.
pub const NAME: &str = "builtin";

/// Destinations beyond the pods of the cluster that see the pods' own addresses: no router forwards packets to them, or
/// there is more than one receiver.
const NEVER_MASQUERADED: [&str; 4] = ["169.254.0.0/16", "224.0.0.0/4", "fe80::/10", "ff00::/8"];

/// What the configuration depends on besides the settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// The ranges of this node's pods.
    pub ranges: Vec<IpNet>,
    /// The ranges of the pods of all nodes.
    pub cluster: Vec<IpNet>,
    /// MTU of the device that leads out of the node, in bytes, if there is one.
    pub uplink_mtu: Option<u32>,
}

/// The configuration.
///
/// # Errors
/// None: what is written here can be read.
pub fn configuration(settings: &Settings, facts: &Facts) -> Result<NetworkList, ConfigError> {
    let ranges: Vec<Value> = facts.ranges.iter().map(|range| json!([{"subnet": range}])).collect();
    let mut plugin = json!({
        "isDefaultGateway": true,
        "capabilities": {"portMappings": true, "bandwidth": true},
        "ipam": {"type": "host-local", "dataDir": settings.data_dir, "ranges": ranges}
    });
    match settings.mode {
        Mode::Bridge => {
            plugin["type"] = "bridge".into();
            plugin["bridge"] = settings.bridge.clone().into();
            plugin["hairpinMode"] = settings.hairpin.into();
        }
        Mode::Routed => plugin["type"] = "veth".into(),
    }
    let mtu = Some(settings.mtu).filter(|mtu| *mtu != 0).or(facts.uplink_mtu);
    if let Some(mtu) = mtu {
        plugin["mtu"] = mtu.into();
    }
    if settings.masquerade {
        plugin["ipMasq"] = true.into();
        plugin["nonMasqueradeCIDRs"] = json!(non_masqueraded(settings, facts));
    }
    let list = json!({"cniVersion": "1.0.0", "name": NAME, "plugins": [plugin]});
    let Value::Object(map) = list else { return Err(ConfigError::MissingName) };
    NetworkList::from_map(map)
}

/// Destinations that see the pods' own addresses, of the families that pods have.
fn non_masqueraded(settings: &Settings, facts: &Facts) -> Vec<IpNet> {
    let all = match settings.non_masquerade_cidrs.as_slice() {
        [] => {
            let fixed = NEVER_MASQUERADED.iter().filter_map(|text| text.parse().ok());
            let cluster = facts.cluster.iter().chain(&facts.ranges).copied();
            IpNet::aggregate(&cluster.chain(fixed).collect())
        }
        set => set.iter().map(IpNet::trunc).collect(),
    };
    let has_family =
        |net: &IpNet| facts.ranges.iter().any(|own| own.addr().is_ipv4() == net.addr().is_ipv4());
    all.into_iter().filter(has_family).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn plugin(settings: &Settings, facts: &Facts) -> Value {
        let list = configuration(settings, facts).unwrap();
        assert_eq!((list.name.as_str(), list.plugins.len()), ("builtin", 1));
        Value::Object(list.plugins[0].raw().clone())
    }

    fn facts() -> Facts {
        Facts {
            ranges: nets(&["10.244.1.0/24", "fd00:1::/64"]),
            cluster: nets(&["10.244.0.0/24", "10.244.1.0/24", "10.244.3.0/24", "fd00:2::/64"]),
            uplink_mtu: Some(1450),
        }
    }

    #[test]
    fn a_bridge_with_the_nodes_ranges_is_the_default() {
        assert_eq!(
            plugin(&Settings::default(), &facts()),
            json!({
                "type": "bridge", "bridge": "pods0", "hairpinMode": false, "isDefaultGateway": true, "mtu": 1450,
                "capabilities": {"portMappings": true, "bandwidth": true},
                "ipMasq": true,
                "nonMasqueradeCIDRs": [
                    "10.244.0.0/23", "10.244.3.0/24", "169.254.0.0/16", "224.0.0.0/4",
                    "fd00:1::/64", "fd00:2::/64", "fe80::/10", "ff00::/8"
                ],
                "ipam": {
                    "type": "host-local", "dataDir": "/var/lib/cni/networks",
                    "ranges": [[{"subnet": "10.244.1.0/24"}], [{"subnet": "fd00:1::/64"}]]
                }
            })
        );
    }

    #[test]
    fn each_setting_has_its_key() {
        let settings = Settings {
            mode: Mode::Routed,
            mtu: 9000,
            masquerade: false,
            data_dir: "/run/pools".into(),
            ..Settings::default()
        };
        let only_ipv4 = Facts { ranges: nets(&["10.244.1.0/24"]), uplink_mtu: None, ..facts() };
        assert_eq!(
            plugin(&settings, &only_ipv4),
            json!({
                "type": "veth", "isDefaultGateway": true, "mtu": 9000,
                "capabilities": {"portMappings": true, "bandwidth": true},
                "ipam": {
                    "type": "host-local", "dataDir": "/run/pools", "ranges": [[{"subnet": "10.244.1.0/24"}]]
                }
            })
        );
        let settings = Settings {
            hairpin: true,
            bridge: "cbr0".into(),
            non_masquerade_cidrs: nets(&["10.0.0.7/8", "fd00::/8"]),
            ..Settings::default()
        };
        let written = plugin(&settings, &only_ipv4);
        assert_eq!(
            (&written["bridge"], &written["hairpinMode"], &written["nonMasqueradeCIDRs"], written.get("mtu")),
            (&json!("cbr0"), &json!(true), &json!(["10.0.0.0/8"]), None)
        );
    }
}
