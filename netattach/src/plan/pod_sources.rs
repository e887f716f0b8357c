//! Exceptions from the source check that a pod requests with `cni-args` of its selection, and the setting
//! `podSources`, which permits them. Pure.

use std::collections::BTreeSet;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::Sandbox;
use crate::cni::{CniError, code};
use crate::link::sources::{self, ALLOWED, CHECK, SourceCheck, VLANS};
use crate::npwg::{NetworkName, Selection};

/// Means all namespaces, or all networks.
const ALL: &str = "*";

/// One permission.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Permission {
    /// Names of the namespaces whose pods have the permission; `*`: all.
    pub namespaces: Vec<String>,
    /// The networks on which the pods have it, as `NAMESPACE/NAME`; `*`: all.
    pub networks: Vec<String>,
    /// The laxest check that the pods may request.
    #[serde(default)]
    pub source_check: SourceCheck,
    /// The networks that must contain the requested addresses.
    #[serde(default)]
    pub addresses: Vec<IpNet>,
    /// The VLANs that they may ask for, as in a definition.
    #[serde(default)]
    pub vlans: Vec<Value>,
}

impl Permission {
    /// Describes a mistake in the permission: a permission that permits nothing counts as one.
    pub fn problem(&self) -> Option<String> {
        if let Some(problem) = self.mistake() {
            return Some(problem.to_owned());
        }
        let asked = sources::permitted_vlans(&Value::Array(self.vlans.clone()));
        asked.err().map(|reason| format!("vlans: {reason}"))
    }

    fn mistake(&self) -> Option<&'static str> {
        let names_nothing = |names: &[String]| names.iter().all(String::is_empty);
        let is_network = |name: &String| {
            name == ALL
                || name.split_once('/').is_some_and(|(namespace, name)| {
                    !namespace.is_empty() && !name.is_empty() && !name.contains('/')
                })
        };
        if names_nothing(&self.namespaces) {
            Some("namespaces: names none, and * stands for all")
        } else if names_nothing(&self.networks) {
            Some("networks: names none, and * stands for all")
        } else if !self.networks.iter().all(is_network) {
            Some("networks: a network is NAMESPACE/NAME, or * for all")
        } else if self.source_check == SourceCheck::Full && self.addresses.is_empty() && self.vlans.is_empty()
        {
            Some("permits nothing: sourceCheck, addresses or vlans are needed")
        } else if self.addresses.iter().any(|net| *net != net.trunc()) {
            Some("addresses: a prefix has more bits than its length: write /32 or /128 for one address")
        } else {
            None
        }
    }

    /// Makes a permission for everything, for a plan that is only compared with one that was carried out.
    pub(super) fn of_anything() -> Self {
        let all = || vec![ALL.to_owned()];
        let any = [Ipv4Net::default().into(), Ipv6Net::default().into()];
        Self {
            namespaces: all(),
            networks: all(),
            source_check: SourceCheck::Off,
            addresses: any.into(),
            vlans: vec![json!({"minID": 1, "maxID": 4094})],
        }
    }

    /// Returns the VLANs that pods may request; none if the list is invalid.
    fn permitted_vlans(&self) -> BTreeSet<u16> {
        sources::permitted_vlans(&Value::Array(self.vlans.clone())).unwrap_or_default()
    }

    fn is_for(&self, namespace: &str, network: &str) -> bool {
        let has = |names: &[String], name: &str| names.iter().any(|it| it == ALL || it == name);
        has(&self.namespaces, namespace) && has(&self.networks, network)
    }
}

/// Adds the selection's requests to the interface's configuration. `is_own`: netattach creates the interface, and its
/// programs enforce the source check.
///
/// # Errors
/// The request is invalid, not permitted, or would have no effect.
pub(super) fn apply(
    config: &mut Map<String, Value>,
    (sandbox, network, is_own): (&Sandbox, &NetworkName, bool),
    asked: Option<&Selection>,
    permissions: &[Permission],
) -> Result<(), CniError> {
    let Some(arguments) = asked.and_then(|asked| asked.cni_args.as_ref()) else { return Ok(()) };
    let value = |key: &str| arguments.get(key).filter(|value| !value.is_null());
    let (check, allowed, vlans) = (value(CHECK), value(ALLOWED), value(VLANS));
    let first = [(CHECK, check), (ALLOWED, allowed), (VLANS, vlans)];
    let Some((first, _)) = first.into_iter().find(|(_, value)| value.is_some()) else { return Ok(()) };
    let wrong = |key: &str, reason: &str| {
        CniError::new(code::INVALID_CONFIG, format!("key cni-args.{key}: {reason}"))
    };
    if !is_own {
        return Err(wrong(
            first,
            "only an interface that netattach makes and judges has it, and one behind which netattach is chained",
        ));
    }
    let namespace = sandbox.pod.as_ref().map_or("", |pod| pod.name.namespace.as_str());
    let network = network.to_string();
    let its: Vec<&Permission> = permissions.iter().filter(|it| it.is_for(namespace, &network)).collect();
    let refused = |key: &str, what: String| {
        wrong(
            key,
            &format!("{what} is not permitted to pods of {namespace:?} on {network} (setting podSources)"),
        )
    };
    if let Some(value) = check {
        let read = |value: &Value| serde_json::from_value::<SourceCheck>(value.clone());
        let wanted = read(value).map_err(|error| wrong(CHECK, &error.to_string()))?;
        // The network's own setting applies to all of its pods.
        let own = config.get(CHECK).and_then(|own| read(own).ok()).unwrap_or_default();
        let laxest = its.iter().map(|it| it.source_check).max().unwrap_or_default().max(own);
        if wanted > laxest {
            return Err(refused(CHECK, value.to_string()));
        }
        config.insert(CHECK.to_owned(), value.clone());
        if wanted != SourceCheck::Full {
            // Without a source check, all addresses pass.
            config.shift_remove(ALLOWED);
        }
    }
    if let Some(value) = allowed {
        let wanted = sources::addresses(value).map_err(|reason| wrong(ALLOWED, &reason))?;
        let is_permitted = |address: &&std::net::IpAddr| {
            its.iter().flat_map(|it| &it.addresses).any(|net| net.contains(*address))
        };
        if let Some(address) = wanted.iter().find(|address| !is_permitted(address)) {
            return Err(refused(ALLOWED, address.to_string()));
        }
        extend(config, ALLOWED, value);
    }
    if let Some(value) = vlans {
        let wanted = sources::vlans(value).map_err(|reason| wrong(VLANS, &reason))?;
        let permitted: BTreeSet<u16> = its.iter().flat_map(|it| it.permitted_vlans()).collect();
        if let Some(id) = wanted.difference(&permitted).next() {
            return Err(refused(VLANS, format!("VLAN {id}")));
        }
        extend(config, VLANS, value);
    }
    Ok(())
}

/// Adds a pod's request to the list in the network's configuration.
fn extend(config: &mut Map<String, Value>, key: &str, more: &Value) {
    let own = config.entry(key).or_insert_with(|| json!([]));
    if own.is_null() {
        *own = json!([]);
    }
    if let (Some(own), Some(more)) = (own.as_array_mut(), more.as_array()) {
        own.extend(more.iter().filter(|it| !own.contains(it)).cloned().collect::<Vec<_>>());
    }
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::npwg::NetworkRef;
    use crate::objects::ObjectName;
    use crate::plan::{PodRef, fixtures};

    fn permissions() -> Vec<Permission> {
        serde_json::from_value(json!([
            {
                "namespaces": ["shop"], "networks": ["shop/lan"], "addresses": ["10.1.0.96/28", "fd00::/120"],
                "vlans": [5, {"minID": 7, "maxID": 9}]
            },
            {"namespaces": ["routers", "shop"], "networks": ["*"], "sourceCheck": "mac"}
        ]))
        .unwrap()
    }

    /// The configuration afterwards.
    fn asked(namespace: &str, network: &str, config: Value, arguments: Value) -> Result<Value, String> {
        let pod = Some(PodRef { name: ObjectName::new(namespace, "a"), uid: None });
        let sandbox = Sandbox { pod, ..fixtures::sandbox("c") };
        let (Value::Object(mut config), Value::Object(arguments)) = (config, arguments) else { panic!() };
        let mut selection = Selection::of(NetworkRef::new("shop", "lan"));
        selection.cni_args = Some(arguments);
        let place = (&sandbox, &network.into(), true);
        apply(&mut config, place, Some(&selection), &permissions()).map_err(|error| error.msg)?;
        Ok(Value::Object(config))
    }

    #[test]
    fn what_is_permitted_is_added_to_what_the_network_has() {
        let more = json!({"allowedAddresses": ["10.1.0.100", "10.1.0.104/31"]});
        assert_eq!(asked("shop", "shop/lan", json!({}), more.clone()), Ok(more.clone()));
        assert_eq!(
            asked("shop", "shop/lan", json!({"allowedAddresses": ["10.9.0.1", "10.1.0.100"]}), more.clone()),
            Ok(json!({"allowedAddresses": ["10.9.0.1", "10.1.0.100", "10.1.0.104/31"]}))
        );
        assert_eq!(asked("shop", "shop/lan", json!({"allowedAddresses": null}), more.clone()), Ok(more));
        let lax = json!({"sourceCheck": "mac"});
        assert_eq!(
            asked("routers", "x/y", json!({"allowedAddresses": ["10.9.0.1"]}), lax.clone()),
            Ok(lax.clone())
        );
        let tagged = json!({"vlans": [{"minID": 8, "maxID": 9}, 5]});
        assert_eq!(asked("shop", "shop/lan", json!({}), tagged.clone()), Ok(tagged.clone()));
        assert_eq!(
            asked("shop", "shop/lan", json!({"vlans": [100, 5]}), tagged),
            Ok(json!({"vlans": [100, 5, {"minID": 8, "maxID": 9}]}))
        );
        // A network's own laxity is for each of its pods, and one may have less of it.
        assert_eq!(asked("other", "x/y", json!({"sourceCheck": "off"}), lax.clone()), Ok(lax));
        let full = json!({"sourceCheck": "full"});
        assert_eq!(asked("other", "x/y", json!({"sourceCheck": "off"}), full.clone()), Ok(full));
        assert_eq!(asked("other", "x/y", json!({}), json!({"mac": "a", "sourceCheck": null})), Ok(json!({})));
    }

    #[test]
    fn what_is_not_permitted_is_refused_by_its_key() {
        let ranges = |list: Value| json!({"allowedAddresses": list});
        let rows = [
            (
                "shop",
                "shop/lan",
                ranges(json!(["10.1.0.112"])),
                r#"key cni-args.allowedAddresses: 10.1.0.112 is not permitted to pods of "shop" on shop/lan (setting podSources)"#,
            ),
            (
                "shop",
                "shop/lan",
                // It begins where it may.
                ranges(json!(["10.1.0.96/27"])),
                r#"key cni-args.allowedAddresses: 10.1.0.112 is not permitted to pods of "shop" on shop/lan (setting podSources)"#,
            ),
            (
                "shop",
                "shop/lan",
                // Those of the network are the network's to give.
                json!({"vlans": [5, {"minID": 7, "maxID": 10}]}),
                r#"key cni-args.vlans: VLAN 10 is not permitted to pods of "shop" on shop/lan (setting podSources)"#,
            ),
            (
                "shop",
                "shop/other",
                json!({"vlans": [5]}),
                r#"key cni-args.vlans: VLAN 5 is not permitted to pods of "shop" on shop/other (setting podSources)"#,
            ),
            (
                "shop",
                "shop/lan",
                json!({"vlans": 5}),
                "key cni-args.vlans: a list is needed, of VLAN ids and ranges",
            ),
            (
                "shop",
                "shop/other",
                ranges(json!(["10.1.0.100"])),
                r#"key cni-args.allowedAddresses: 10.1.0.100 is not permitted to pods of "shop" on shop/other (setting podSources)"#,
            ),
            (
                "other",
                "shop/lan",
                json!({"sourceCheck": "mac"}),
                r#"key cni-args.sourceCheck: "mac" is not permitted to pods of "other" on shop/lan (setting podSources)"#,
            ),
            (
                "shop",
                "shop/lan",
                json!({"sourceCheck": "off"}),
                r#"key cni-args.sourceCheck: "off" is not permitted to pods of "shop" on shop/lan (setting podSources)"#,
            ),
            (
                "shop",
                "shop/lan",
                json!({"sourceCheck": "none"}),
                "key cni-args.sourceCheck: unknown variant `none`, expected one of `full`, `mac`, `off`",
            ),
            (
                "shop",
                "shop/lan",
                ranges(json!("10.1.0.100")),
                "key cni-args.allowedAddresses: a list is needed, of addresses and prefixes",
            ),
        ];
        for (namespace, network, arguments, said) in rows {
            assert_eq!(asked(namespace, network, json!({}), arguments), Err(said.to_owned()), "{said}");
        }
    }

    /// Each permission is parsed once: parsing it for each requested VLAN would make this test take far too long.
    #[test]
    fn all_vlans_that_a_pod_may_have_are_found_among_many_permissions() {
        let each: Vec<u16> = (1..=4094).collect();
        let one: Permission =
            serde_json::from_value(json!({"namespaces": ["*"], "networks": ["shop/lan"], "vlans": each}))
                .unwrap();
        let permissions = vec![one; 64];
        let pod = Some(PodRef { name: ObjectName::new("shop", "a"), uid: None });
        let sandbox = Sandbox { pod, ..fixtures::sandbox("c") };
        let mut selection = Selection::of(NetworkRef::new("shop", "lan"));
        let asked = json!({"vlans": [{"minID": 3, "maxID": 514}]});
        selection.cni_args = asked.as_object().cloned();
        let mut config = Map::new();
        let place = (&sandbox, &"shop/lan".into(), true);
        apply(&mut config, place, Some(&selection), &permissions).unwrap();
        assert_eq!(Value::Object(config), asked);
    }

    #[test]
    fn a_permission_permits_something_to_somebody() {
        let problem = |permission: Value| serde_json::from_value::<Permission>(permission).unwrap().problem();
        assert_eq!(permissions().iter().map(Permission::problem).collect::<Vec<_>>(), [None, None]);
        assert_eq!(problem(json!({"namespaces": ["a"], "networks": ["*"], "vlans": [5]})), None);
        let rows = [
            (json!({"namespaces": [], "networks": ["*"]}), "namespaces: names none, and * stands for all"),
            (json!({"namespaces": ["a"], "networks": [""]}), "networks: names none, and * stands for all"),
            (
                json!({"namespaces": ["a"], "networks": ["lan"]}),
                "networks: a network is NAMESPACE/NAME, or * for all",
            ),
            (
                json!({"namespaces": ["a"], "networks": ["*"]}),
                "permits nothing: sourceCheck, addresses or vlans are needed",
            ),
            (
                json!({"namespaces": ["a"], "networks": ["*"], "vlans": ["*"]}),
                "vlans: \"*\" is neither a VLAN id nor a range of minID and maxID",
            ),
        ];
        for (permission, said) in rows {
            assert_eq!(problem(permission.clone()).as_deref(), Some(said), "{permission}");
        }
    }
}
