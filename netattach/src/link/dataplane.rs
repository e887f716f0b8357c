//! `netattach`, chained: the dataplane for an interface made by a preceding plugin.
//!
//! The keys are the dataplane keys of netattach's own interfaces. After one of these, the keys are added to
//! the interface's configuration. After another plugin, they configure the checks and limits of the
//! attachment's programs, which run from the ADD on.

use serde_json::{Map, Value, json};

use super::{Driver, PlanError, Request, bandwidth, sources};
use crate::cni::multi_network::OWN_TYPE;
use crate::step::{EnforceWhen, Protect, Step};

/// The plugin type.
pub const KIND: &str = OWN_TYPE;

/// The key that keeps packets off the fast path.
const FAST_PATH: &str = "fastPath";

/// The keys of the configuration.
const KEYS: [&str; 5] = [bandwidth::CAPABILITY, FAST_PATH, sources::CHECK, sources::ALLOWED, sources::VLANS];

/// Whether a configuration has a key for the dataplane.
pub fn asks(config: &Map<String, Value>) -> bool {
    KEYS.iter().any(|key| value(config, key).is_some()) || offered_limits(config).is_some()
}

/// Whether a configuration limits the interface.
pub fn limits(config: &Map<String, Value>) -> bool {
    value(config, bandwidth::CAPABILITY).is_some() || offered_limits(config).is_some()
}

/// Adds the keys to the configuration of the preceding interface, which is netattach's own.
///
/// # Errors
/// No program judges interfaces of this kind, or the interface has a key with another value.
pub fn merge(
    driver: &dyn Driver,
    interface: &mut Map<String, Value>,
    chained: &Map<String, Value>,
) -> Result<(), PlanError> {
    if !driver.is_judged(interface) {
        let kind = driver.kind();
        let reason =
            format!("{KIND} behind {kind}: no program sees such an interface, so it has no dataplane");
        return Err(PlanError::Value { key: "type", reason });
    }
    for key in KEYS {
        let Some(asked) = value(chained, key) else { continue };
        match value(interface, key) {
            Some(own) if own != asked => {
                let reason =
                    format!("{asked} of {KIND} behind the interface, which itself has {own}; one of the two");
                return Err(PlanError::Value { key, reason });
            }
            _ => drop(interface.insert(key.to_owned(), asked.clone())),
        }
    }
    if let Some(limits) = offered_limits(chained) {
        super::offer(interface, bandwidth::CAPABILITY, limits.clone());
    }
    Ok(())
}

/// Parses the keys for an interface that another plugin has made. The request has the numbers for the
/// dataplane.
///
/// # Errors
/// The error names the key.
pub fn parse(request: &Request<'_>) -> Result<Option<Protect>, PlanError> {
    if value(request.config, FAST_PATH) == Some(&json!(true)) {
        let reason =
            "true: packets of an interface that another plugin made do not take the fast path".to_owned();
        return Err(PlanError::Value { key: FAST_PATH, reason });
    }
    Ok(match request.protection(true)? {
        Some(Step::Protect(protect)) => {
            Some(Protect { fast_path: false, when: EnforceWhen::Always, needed: true, ..protect })
        }
        _ => None,
    })
}

fn value<'a>(config: &'a Map<String, Value>, key: &str) -> Option<&'a Value> {
    config.get(key).filter(|value| !value.is_null())
}

/// The limits that a pod asks for by the capability.
fn offered_limits(config: &Map<String, Value>) -> Option<&Value> {
    let limits = value(config.get("runtimeConfig")?.as_object()?, bandwidth::CAPABILITY)?;
    limits.as_object().is_none_or(|limits| !limits.is_empty()).then_some(limits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::{CniArgs, CniError};
    use crate::link::driver;
    use crate::link::tests::request;

    fn read(config: Value) -> Result<Option<Protect>, String> {
        let (args, protect) = (CniArgs::default(), Protect::verified());
        let request = Request { protect: Some(&protect), ..request(config.as_object().unwrap(), &args) };
        parse(&request).map_err(|error| CniError::from(error).msg)
    }

    /// Rows: CHN-keys.
    #[test]
    fn behind_another_plugin_the_keys_say_what_the_programs_check() {
        let asked = Protect { fast_path: false, needed: true, ..Protect::verified() };
        let rows = [
            (json!({}), asked.clone()),
            (json!({"fastPath": false, "sourceCheck": "full", "vlans": null}), asked.clone()),
            (json!({"sourceCheck": "mac"}), Protect { check_addresses: false, ..asked.clone() }),
            (
                json!({"sourceCheck": "off", "vlans": [5, {"minID": 7, "maxID": 9}]}),
                Protect {
                    check_mac: false,
                    check_addresses: false,
                    vlans: vec![(5, 5), (7, 9)],
                    ..asked.clone()
                },
            ),
            (
                json!({"allowedAddresses": ["10.1.0.100"]}),
                Protect { allowed: vec!["10.1.0.100".parse().unwrap()], ..asked },
            ),
        ];
        for (keys, expected) in rows {
            assert_eq!(read(keys.clone()), Ok(Some(expected)), "{keys}");
        }
        let limited = read(json!({"runtimeConfig": {"bandwidth": {"ingressRate": 8000}}})).unwrap().unwrap();
        assert_eq!(limited.bandwidth.and_then(|limits| limits.ingress_rate), Some(8000));
        let both = json!({"bandwidth": {"ingressRate": 8000}, "runtimeConfig": {"bandwidth": {"ingressRate": 9000}}});
        assert_eq!(read(both).unwrap().unwrap().bandwidth, limited.bandwidth, "a pod lifts no limit");
        let refused = [
            (
                json!({"fastPath": true}),
                "key fastPath: true: packets of an interface that another plugin made do not take the fast path",
            ),
            (
                json!({"sourceCheck": "mac", "allowedAddresses": ["10.1.0.9"]}),
                "key allowedAddresses: without effect, as sourceCheck lets every address pass",
            ),
        ];
        for (keys, said) in refused {
            assert_eq!(read(keys), Err(said.to_owned()));
        }
    }

    /// Rows: CHN-own.
    #[test]
    fn behind_an_interface_of_ours_the_keys_are_the_interfaces() {
        let merged = |kind: &str, interface: Value, chained: Value| {
            let (Value::Object(mut interface), Value::Object(chained)) = (interface, chained) else {
                return Err("no objects".to_owned());
            };
            let merged = merge(driver(kind).unwrap(), &mut interface, &chained);
            merged.map(|()| Value::Object(interface)).map_err(|error| CniError::from(error).msg)
        };
        let limits = json!({"bandwidth": {"egressRate": 8000}});
        let rows = [
            (json!({"type": KIND, "mac": "x"}), json!({"fastPath": true})),
            (json!({"fastPath": true, "vlans": null}), json!({"fastPath": true})),
            (json!({"sourceCheck": "mac"}), json!({"fastPath": true, "sourceCheck": "mac"})),
            (json!({"runtimeConfig": limits}), json!({"fastPath": true, "runtimeConfig": limits})),
            (json!({"runtimeConfig": {"bandwidth": {}}}), json!({"fastPath": true})),
        ];
        for (chained, expected) in rows {
            assert_eq!(merged("bridge", json!({"fastPath": true}), chained), Ok(expected));
        }
        assert_eq!(
            merged("bridge", json!({"sourceCheck": "mac"}), json!({"sourceCheck": "off"})),
            Err(
                "key sourceCheck: \"off\" of netattach behind the interface, which itself has \"mac\"; one of the two"
                    .to_owned()
            )
        );
        for (kind, interface) in [("loopback", json!({})), ("macvlan", json!({"mode": "passthru"}))] {
            assert_eq!(
                merged(kind, interface, json!({})),
                Err(format!(
                    "key type: netattach behind {kind}: no program sees such an interface, so it has no dataplane"
                ))
            );
        }
    }

    #[test]
    fn what_asks_for_something_is_known_by_its_keys() {
        let config = |config: Value| config.as_object().unwrap().clone();
        let rate = json!({"ingressRate": 8000});
        for (asked, expected) in [
            (json!({"type": KIND, "socket": "/run/x"}), (false, false)),
            (json!({"sourceCheck": null, "runtimeConfig": {"portMappings": []}}), (false, false)),
            (json!({"sourceCheck": "full"}), (true, false)),
            (json!({"bandwidth": rate}), (true, true)),
            (json!({"runtimeConfig": {"bandwidth": rate}}), (true, true)),
        ] {
            let asked = config(asked);
            assert_eq!((asks(&asked), limits(&asked)), expected, "{asked:?}");
        }
    }
}
