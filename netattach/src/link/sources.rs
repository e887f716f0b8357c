//! `sourceCheck` and `allowedAddresses`: what a pod may send in whose name. For virtual addresses, routers and virtual
//! machines, by whoever writes the network's definition.

use std::net::IpAddr;

use serde::Deserialize;
use serde_json::json;

use super::{Driver, PlanError, Request};

/// Most addresses in `allowedAddresses`.
const MOST_ADDRESSES: usize = 64;

/// What is checked of the sources of a pod's frames.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sources {
    /// Its Ethernet address.
    pub(super) mac: bool,
    /// Its IP addresses.
    pub(super) addresses: bool,
    /// Addresses that pass beside its own.
    pub(super) allowed: Vec<IpAddr>,
}

/// The values of `sourceCheck`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Check {
    /// The pod sends by its own Ethernet and IP addresses.
    #[default]
    Full,
    /// By its own Ethernet address.
    Mac,
    /// By any.
    Off,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Keys {
    #[serde(default)]
    source_check: Option<Check>,
    #[serde(default)]
    allowed_addresses: Option<Vec<IpAddr>>,
}

/// Reads the keys.
///
/// # Errors
/// The error names the key.
pub(super) fn parse(request: &Request<'_>) -> Result<Sources, PlanError> {
    let Keys { source_check, allowed_addresses } = request.read()?;
    let check = source_check.unwrap_or_default();
    let allowed = allowed_addresses.unwrap_or_default();
    let wrong = |reason: String| PlanError::Value { key: "allowedAddresses", reason };
    if allowed.len() > MOST_ADDRESSES {
        return Err(wrong(format!("{} addresses, and there may be {MOST_ADDRESSES}", allowed.len())));
    }
    if let Some(address) =
        allowed.iter().find(|it| it.is_unspecified() || it.is_multicast() || it.is_loopback())
    {
        return Err(wrong(format!("nothing is sent from {address}")));
    }
    if check != Check::Full && !allowed.is_empty() {
        return Err(wrong("without effect, as sourceCheck lets every address pass".to_owned()));
    }
    Ok(Sources { mac: check != Check::Off, addresses: check == Check::Full, allowed })
}

impl Sources {
    /// Whether nothing but the pod's own addresses passes.
    pub(super) fn is_full(&self) -> bool {
        self.mac && self.addresses && self.allowed.is_empty()
    }
}

/// Refuses what cannot be on a parent: there an attachment is known by its Ethernet address.
pub(super) fn refuse_on_parent(request: &Request<'_>, driver: &dyn Driver) -> Result<(), PlanError> {
    let value = request.config.get("sourceCheck").filter(|value| **value == json!("off"));
    match value {
        Some(value) => {
            Err(PlanError::Unsupported { key: "sourceCheck", value: value.clone(), kind: driver.kind() })
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::cni::{CniArgs, CniError};
    use crate::link::{Facts, driver};
    use crate::step::{Protect, Step};

    fn planned(kind: &str, keys: Value) -> Result<Protect, String> {
        let mut config =
            json!({"ipam": {"type": "static", "addresses": [{"address": "10.1.0.7/24"}]}, "master": "eth1"});
        let config = config.as_object_mut().unwrap();
        config.extend(keys.as_object().unwrap().clone());
        let (args, facts, protect) = (CniArgs::default(), Facts::default(), Protect::verified());
        let request = Request {
            container_id: "c",
            ifname: "net1",
            config,
            group: 1,
            cni_args: &args,
            exec: &[],
            protect: Some(&protect),
            facts: &facts,
        };
        let steps = driver(kind).unwrap().plan(&request).map_err(|error| CniError::from(error).msg)?;
        let found = steps.into_iter().find_map(|step| match step {
            Step::Protect(protect) => Some(protect),
            _ => None,
        });
        Ok(found.unwrap())
    }

    #[test]
    fn the_keys_say_what_is_checked() {
        for kind in ["bridge", "veth", "ptp"] {
            let rows = [
                (json!({}), Protect::verified(), None),
                (json!({"sourceCheck": "full", "allowedAddresses": []}), Protect::verified(), None),
                (json!({"sourceCheck": null, "allowedAddresses": null}), Protect::verified(), None),
                (
                    json!({"allowedAddresses": ["10.1.0.100", "fd00::100"]}),
                    Protect {
                        allowed: vec!["10.1.0.100".parse().unwrap(), "fd00::100".parse().unwrap()],
                        fast_path: false,
                        ..Protect::verified()
                    },
                    Some("the pod may send from 10.1.0.100, fd00::100 too"),
                ),
                (
                    json!({"sourceCheck": "mac"}),
                    Protect { check_addresses: false, fast_path: false, ..Protect::verified() },
                    Some("the pod may send from any IP address"),
                ),
                (
                    json!({"sourceCheck": "off"}),
                    Protect {
                        check_mac: false,
                        check_addresses: false,
                        fast_path: false,
                        ..Protect::verified()
                    },
                    Some("the pod may send from any Ethernet and IP address"),
                ),
            ];
            for (keys, expected, laxity) in rows {
                let found = planned(kind, keys.clone()).unwrap();
                assert_eq!((found.laxity().as_deref(), found), (laxity, expected), "{kind} {keys}");
            }
        }
        let lax = planned("macvlan", json!({"sourceCheck": "mac"})).unwrap();
        assert_eq!((lax.check_mac, lax.check_addresses), (true, false));
    }

    #[test]
    fn what_cannot_be_is_refused_by_its_key() {
        let many: Vec<String> = (0..=MOST_ADDRESSES).map(|number| format!("10.1.1.{number}")).collect();
        let rows = [
            ("bridge", json!({"sourceCheck": "none"}), "sourceCheck"),
            ("bridge", json!({"allowedAddresses": ["10.1.0.0/24"]}), "allowedAddresses"),
            (
                "bridge",
                json!({"allowedAddresses": ["224.0.0.18"]}),
                "key allowedAddresses: nothing is sent from 224.0.0.18",
            ),
            ("veth", json!({"allowedAddresses": ["::"]}), "key allowedAddresses: nothing is sent from ::"),
            (
                "veth",
                json!({"allowedAddresses": many}),
                "key allowedAddresses: 65 addresses, and there may be 64",
            ),
            (
                "bridge",
                json!({"sourceCheck": "mac", "allowedAddresses": ["10.1.0.9"]}),
                "key allowedAddresses: without effect, as sourceCheck lets every address pass",
            ),
            ("macvlan", json!({"sourceCheck": "off"}), "key sourceCheck: \"off\" is not supported"),
            ("ipvlan", json!({"sourceCheck": "off"}), "key sourceCheck: \"off\" is not supported"),
        ];
        for (kind, keys, said) in rows {
            let error = planned(kind, keys.clone()).unwrap_err();
            assert!(error.contains(said), "{kind} {keys}: {error}");
        }
    }
}
