//! Chained plugins that are properties of an interface of netattach's own: `portmap` and `bandwidth`. Pure.
//!
//! A list of a reference interface plugin with one of these behind it works as before, without any of the two being
//! executed: what the chained plugin is asked for becomes a request to the interface, which netattach carries out in its
//! packet filter and its programs. With a key that has no counterpart there the plugin is executed, as it is behind an
//! interface that another plugin makes.

use serde_json::{Map, Value, json};

use crate::link::Driver;

const PORTMAP: &str = "portmap";
const BANDWIDTH: &str = "bandwidth";

/// The types that are carried out so.
pub const KINDS: [&str; 2] = [BANDWIDTH, PORTMAP];

/// The capability and key of [`PORTMAP`].
const PORTS: &str = "portMappings";

/// The keys of [`BANDWIDTH`].
const RATES: [&str; 4] = ["ingressRate", "ingressBurst", "egressRate", "egressBurst"];

/// Puts what a chained plugin is asked for into the configuration of the interface before it. Returns whether it did:
/// else the plugin is executed.
pub(super) fn fold(
    driver: &dyn Driver,
    interface: &mut Map<String, Value>,
    kind: &str,
    chained: &Map<String, Value>,
) -> bool {
    let asked = chained.get("runtimeConfig").and_then(Value::as_object);
    match kind {
        PORTMAP if driver.maps_ports() && has_own_ways(chained) => {
            if let Some(ports) = asked.and_then(|asked| asked.get(PORTS)) {
                request(interface, PORTS, ports.clone());
            }
            true
        }
        BANDWIDTH if driver.is_judged(interface) => {
            let fixed = RATES.iter().filter_map(|key| Some(((*key).to_owned(), chained.get(*key)?.clone())));
            let fixed: Map<String, Value> = fixed.filter(|(_, value)| is_set(value)).collect();
            // What is written goes over what a pod asks for.
            let limits = match asked.and_then(|asked| asked.get(BANDWIDTH)) {
                Some(limits) if fixed.is_empty() => limits.clone(),
                _ => Value::Object(fixed),
            };
            if limits.as_object().is_none_or(|limits| !limits.is_empty()) {
                request(interface, BANDWIDTH, limits);
            }
            true
        }
        _ => false,
    }
}

/// Whether `portmap` is asked for nothing but what netattach does with ports of the node anyway.
fn has_own_ways(chained: &Map<String, Value>) -> bool {
    let harmless = [
        ("snat", json!(true)),
        ("masqAll", json!(false)),
        ("externalSetMarkChain", json!("")),
        ("conditionsV4", json!([])),
        ("conditionsV6", json!([])),
    ];
    harmless
        .iter()
        .all(|(key, usual)| chained.get(*key).is_none_or(|value| value.is_null() || value == usual))
}

fn is_set(value: &Value) -> bool {
    !value.is_null() && *value != json!(0)
}

fn request(interface: &mut Map<String, Value>, capability: &str, value: Value) {
    let asked = interface.entry("runtimeConfig").or_insert_with(|| json!({}));
    if let Some(asked) = asked.as_object_mut() {
        asked.insert(capability.to_owned(), value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link;

    /// The interface's configuration after folding, or `None` if the plugin is executed.
    fn folded(driver: &str, interface: Value, kind: &str, chained: Value) -> Option<Value> {
        let (Value::Object(mut interface), Value::Object(chained)) = (interface, chained) else {
            return None;
        };
        let driver = link::driver(driver).unwrap();
        fold(driver, &mut interface, kind, &chained).then_some(Value::Object(interface))
    }

    #[test]
    fn ports_are_those_of_the_bridge_or_the_routed_link() {
        let ports = json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]);
        let asked = json!({"runtimeConfig": {"portMappings": ports}, "snat": true, "markMasqBit": 13, "backend": "iptables"});
        let expected = json!({"runtimeConfig": {"portMappings": ports}});
        for kind in ["bridge", "veth"] {
            assert_eq!(folded(kind, json!({}), PORTMAP, asked.clone()), Some(expected.clone()));
            assert_eq!(folded(kind, json!({}), PORTMAP, json!({"conditionsV4": null})), Some(json!({})));
        }
        let beside = json!({"runtimeConfig": {"mac": "a"}});
        let both = json!({"runtimeConfig": {"mac": "a", "portMappings": ports}});
        assert_eq!(folded("bridge", beside, PORTMAP, asked.clone()), Some(both));
        for kind in ["macvlan", "ipvlan", "loopback"] {
            assert_eq!(folded(kind, json!({"master": "eth1"}), PORTMAP, asked.clone()), None);
        }
        for (key, value) in [
            ("snat", json!(false)),
            ("masqAll", json!(true)),
            ("externalSetMarkChain", json!("KUBE-MARK-MASQ")),
            ("conditionsV4", json!(["-s", "10.0.0.0/8"])),
            ("conditionsV6", json!(["-s", "fd00::/8"])),
        ] {
            let mut asked = asked.clone();
            asked[key] = value;
            assert_eq!(folded("bridge", json!({}), PORTMAP, asked), None, "{key}");
        }
    }

    #[test]
    fn rates_are_those_of_the_interface_where_it_has_any() {
        let limits = json!({"ingressRate": 1_000_000, "ingressBurst": 80_000});
        let expected = json!({"runtimeConfig": {"bandwidth": limits}});
        let with = |extra: Value| {
            let mut chained = limits.clone();
            chained.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            chained
        };
        let fixed = with(json!({"egressRate": 0, "runtimeConfig": {"bandwidth": {"egressRate": 5000}}}));
        assert_eq!(folded("bridge", json!({}), BANDWIDTH, fixed), Some(expected.clone()));
        let asked = json!({"runtimeConfig": {"bandwidth": limits}});
        assert_eq!(folded("veth", json!({}), BANDWIDTH, asked), Some(expected));
        assert_eq!(folded("veth", json!({}), BANDWIDTH, json!({})), Some(json!({})));
        assert_eq!(folded("loopback", json!({}), BANDWIDTH, limits.clone()), None);
        assert_eq!(folded("macvlan", json!({"mode": "passthru"}), BANDWIDTH, limits), None);
        assert_eq!(folded("bridge", json!({}), "other", json!({})), None);
    }
}
