//! An attachment to plan: the values that its pod asks for and its runtime offers, merged into the configuration of
//! each plugin, and whether the network lets the pod ask for them.

use serde_json::{Map, Value};

use super::super::CachedResults;
use super::super::resolve::Network;
use super::capability::{IPS, MAC};
use crate::cni::{self, CniArgs, CniError, PluginConf, code};
use crate::link::Facts;
use crate::npwg::{self, Selection};

/// An attachment to plan.
pub(in crate::plan) struct Wanted<'a> {
    pub(in crate::plan) network: &'a Network,
    pub(in crate::plan) ifname: &'a str,
    pub(in crate::plan) default: bool,
    pub(in crate::plan) remembered: CachedResults,
    /// The values that the runtime offers to plugins with the matching capability.
    pub(in crate::plan) offered: Map<String, Value>,
    /// The pod's selection.
    pub(in crate::plan) asked: Option<&'a Selection>,
    /// Facts about the node that the driver needs.
    pub(in crate::plan) facts: &'a Facts,
    /// The result of the plugin that created the interface before netattach was called, if any.
    pub(in crate::plan) made_before: Option<&'a Value>,
}

impl Wanted<'_> {
    /// Merges offered and requested values, by capability. A requested value is never dropped silently (D14).
    pub(super) fn capabilities(&self) -> Result<Map<String, Value>, CniError> {
        let list = &self.network.list;
        let asked = self.asked.map(npwg::runtime_config).unwrap_or_default();
        let missing = cni::capability::undeclared(list, asked.keys().map(String::as_str));
        if !missing.is_empty() {
            let msg = format!(
                "{} asked for, but no plugin of network {} declares that capability",
                missing.join(", "),
                list.name
            );
            return Err(CniError::new(code::INVALID_CONFIG, msg));
        }
        let mut capabilities = self.offered.clone();
        capabilities.extend(asked);
        Ok(capabilities)
    }

    /// Checks that the pod may choose its addresses: a network declares the capabilities `mac` and `ips` to permit
    /// that (NPWG 4.1.2.1.3, 4.1.2.1.4). This covers every way in which a pod can request an address, and its runtime
    /// an Ethernet address. Plugins in Go read keys in any case ([`cni::keys::is_same`]).
    pub(super) fn check_addresses_are_permitted(&self, cni_args: &CniArgs) -> Result<(), CniError> {
        let argument = |name: &str| {
            let arguments = self.asked?.cni_args.as_ref()?;
            let key = arguments.keys().find(|key| cni::keys::is_same(key, name))?;
            Some(format!("cni-args.{key}"))
        };
        let of_runtime = || {
            let is_asked = self.default && cni_args.get("MAC").is_some_and(|mac| !mac.is_empty());
            is_asked.then(|| "MAC in CNI_ARGS".to_owned())
        };
        let list = &self.network.list;
        for (capability, way, what) in [
            (MAC, argument(MAC).or_else(of_runtime), "a MAC address is"),
            (IPS, argument(IPS), "IP addresses are"),
        ] {
            let Some(way) = way else { continue };
            if !cni::capability::undeclared(list, [capability]).is_empty() {
                let msg = format!(
                    "key {way}: {what} asked for, but no plugin of network {} declares the capability {capability}",
                    list.name
                );
                return Err(CniError::new(code::INVALID_CONFIG, msg));
            }
        }
        Ok(())
    }

    /// Returns the configuration that one of the network's plugins receives.
    pub(in crate::plan) fn config(
        &self,
        plugin: &PluginConf,
        capabilities: &Map<String, Value>,
    ) -> Result<Map<String, Value>, CniError> {
        let mut config = cni::request_config(&self.network.list, plugin, None, capabilities);
        let arguments = self.asked.map(Selection::arguments).unwrap_or_default();
        if !arguments.is_empty() {
            merge_args(&mut config, &arguments)?;
            cni::keys::as_documented(&mut config);
        }
        Ok(config)
    }
}

/// Merges a selection's `cni-args` over the `args.cni` of the configuration, key by key.
fn merge_args(config: &mut Map<String, Value>, extra: &Map<String, Value>) -> Result<(), CniError> {
    let args = object_at(config, "args", "args")?;
    let cni = object_at(args, "cni", "args.cni")?;
    for (key, value) in extra {
        cni.insert(key.clone(), value.clone());
    }
    Ok(())
}

/// Returns the object that is the value of a key, which is inserted if the key is missing or null. `path`: for the
/// error.
fn object_at<'v>(
    within: &'v mut Map<String, Value>,
    key: &str,
    path: &str,
) -> Result<&'v mut Map<String, Value>, CniError> {
    let value = within.entry(key).or_insert(Value::Null);
    if value.is_null() {
        *value = Value::Object(Map::new());
    }
    let wrong = || CniError::new(code::INVALID_CONFIG, format!("key {path}: must be an object"));
    value.as_object_mut().ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::plan::fixtures::{self, network};

    #[test]
    fn arguments_of_a_pod_are_merged_into_those_of_the_definition_key_by_key() {
        let merged = |mut config: Value| {
            let extra = json!({"mtu": 1400, "mac": null});
            let merged = merge_args(config.as_object_mut().unwrap(), extra.as_object().unwrap());
            merged.map(|()| config).map_err(|error| (error.code, error.msg))
        };
        let alone = json!({"args": {"cni": {"mtu": 1400, "mac": null}}});
        for absent in [json!({}), json!({"args": null}), json!({"args": {}}), json!({"args": {"cni": null}})]
        {
            assert_eq!(merged(absent.clone()), Ok(alone.clone()), "{absent}");
        }
        let beside = json!({"args": {"cni": {"mtu": 9000, "promisc": true}, "labels": {}}});
        let expected = json!({"args": {"cni": {"mtu": 1400, "mac": null, "promisc": true}, "labels": {}}});
        assert_eq!(merged(beside), Ok(expected));
        for (config, path) in [(json!({"args": 7}), "args"), (json!({"args": {"cni": []}}), "args.cni")] {
            let refused = (code::INVALID_CONFIG, format!("key {path}: must be an object"));
            assert_eq!(merged(config), Err(refused));
        }
    }

    /// Returns the error for a pod with these `cni-args` on a network that declares these capabilities.
    fn refused(capabilities: &Value, arguments: &Value) -> Option<String> {
        let config = json!({"name": "lan", "cniVersion": "1.0.0", "type": "macvlan",
            "capabilities": capabilities, "ipam": {"type": "static"}});
        let network = network(&config);
        let selection: Selection =
            serde_json::from_value(json!({"namespace": "shop", "name": "lan", "cni-args": arguments}))
                .unwrap();
        let facts = Facts::default();
        let wanted = Wanted { asked: Some(&selection), ..fixtures::wanted(&network, &facts) };
        let error = wanted.check_addresses_are_permitted(&CniArgs::default()).err()?;
        assert_eq!(error.code, code::INVALID_CONFIG);
        Some(error.msg)
    }

    #[test]
    fn a_pod_chooses_addresses_only_where_the_network_lets_it() {
        let both = json!({"ips": true, "mac": true});
        let said = |start: &str, capability: &str| {
            Some(format!(
                "key cni-args.{start} asked for, but no plugin of network lan declares the capability {capability}"
            ))
        };
        for key in ["ips", "IPs", "ip\u{17f}", "IP\u{17f}"] {
            let arguments = json!({key: ["10.244.1.5/0"]});
            let expected = said(&format!("{key}: IP addresses are"), "ips");
            assert_eq!(refused(&json!({"mac": true}), &arguments), expected);
            assert_eq!(refused(&both, &arguments), None);
        }
        let arguments = json!({"MAC": "02:00:00:00:00:01"});
        assert_eq!(refused(&json!({"ips": true}), &arguments), said("MAC: a MAC address is", "mac"));
        assert_eq!(refused(&both, &arguments), None);
        assert_eq!(refused(&json!({}), &json!({"colour": "red"})), None);
    }
}
