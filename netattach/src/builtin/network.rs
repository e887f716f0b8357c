//! The configuration of the network, in the form of a CNI configuration list.

use ipnet::IpNet;
use serde_json::{Value, json};

use super::settings::{Mode, Settings};
use crate::cni::{ConfigError, NetworkList};

/// Name of the network, of its pool, and of the network in published status.
pub const NAME: &str = "builtin";

/// What the configuration depends on besides the settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// The ranges of this node's pods.
    pub ranges: Vec<IpNet>,
    /// MTU of the device that leads out of the node, in bytes, if there is one.
    pub uplink_mtu: Option<u32>,
}

/// The configuration.
///
/// # Errors
/// None in practice: the configuration that is written here is valid.
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
            // Keeps the gateways of an earlier podCIDR, whose pods keep their addresses.
            plugin["keepAddresses"] = true.into();
        }
        Mode::Routed => plugin["type"] = "veth".into(),
    }
    let mtu = Some(settings.mtu).filter(|mtu| *mtu != 0).or(facts.uplink_mtu);
    if let Some(mtu) = mtu {
        plugin["mtu"] = mtu.into();
    }
    if settings.masquerade {
        plugin["ipMasq"] = true.into();
        // Nodes come and go while pods are attached: see `non_masqueraded`.
        plugin["nonMasqueradeBuiltin"] = true.into();
    }
    let list = json!({"cniVersion": "1.0.0", "name": NAME, "plugins": [plugin]});
    let Value::Object(map) = list else { return Err(ConfigError::MissingName) };
    NetworkList::from_map(map)
}

/// Destinations that see the pods' own addresses, besides link-local and multicast addresses and the pods'
/// own subnets: the list in the settings, or else the ranges of this node's pods (`own`) and of the pods of
/// other nodes (`others`).
pub fn non_masqueraded(settings: &Settings, own: &[IpNet], others: &[IpNet]) -> Vec<IpNet> {
    match settings.non_masquerade_cidrs.as_slice() {
        [] => [own, others].concat(),
        set => set.iter().map(IpNet::trunc).collect(),
    }
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
        Facts { ranges: nets(&["10.244.1.0/24", "fd00:1::/64"]), uplink_mtu: Some(1450) }
    }

    /// Rows: BRG-nonMasqueradeBuiltin, BRG-keepAddresses.
    #[test]
    fn a_bridge_with_the_nodes_ranges_is_the_default() {
        assert_eq!(
            plugin(&Settings::default(), &facts()),
            json!({
                "type": "bridge", "bridge": "pods0", "hairpinMode": false, "keepAddresses": true, "isDefaultGateway": true,
                "mtu": 1450,
                "capabilities": {"portMappings": true, "bandwidth": true},
                "ipMasq": true, "nonMasqueradeBuiltin": true,
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
        let only_ipv4 = Facts { ranges: nets(&["10.244.1.0/24"]), uplink_mtu: None };
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
        let settings = Settings { hairpin: true, bridge: "cbr0".into(), ..Settings::default() };
        let written = plugin(&settings, &only_ipv4);
        assert_eq!(
            (&written["bridge"], &written["hairpinMode"], written.get("mtu")),
            (&json!("cbr0"), &json!(true), None)
        );
    }

    #[test]
    fn the_settings_say_which_destinations_see_the_pods_or_the_nodes_do() {
        let (own, others) = (nets(&["10.244.1.0/24"]), nets(&["10.244.2.0/24", "fd00:2::/64"]));
        let cluster = nets(&["10.244.1.0/24", "10.244.2.0/24", "fd00:2::/64"]);
        assert_eq!(non_masqueraded(&Settings::default(), &own, &others), cluster);
        let set = Settings { non_masquerade_cidrs: nets(&["10.0.0.7/8"]), ..Settings::default() };
        assert_eq!(non_masqueraded(&set, &own, &others), nets(&["10.0.0.0/8"]));
    }
}
