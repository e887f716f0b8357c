//! Chained plugins that are properties of an interface that netattach creates: `portmap`, `bandwidth` and netattach
//! itself. Pure.
//!
//! A list with a reference interface plugin followed by one of the first two works as before, although neither plugin
//! is executed: the chained plugin's request becomes a property of the interface, which netattach implements with its
//! packet filter and its programs. If a key has no counterpart there, the chained plugin is executed, as it is after
//! a native interface without that property. After an interface that another plugin creates, the two are steps of
//! their own: decision 0037. `firewall` is always a step of its own: decision 0038.

use serde_json::{Map, Value, json};

use crate::cni::{CniError, code};
use crate::link::{self, Driver, PlanError, bandwidth, dataplane, firewall, portmap};
use crate::step::{Admit, PortSenders, Step};

/// The capability of `portmap`, and the key that tells an interface which senders are masqueraded.
const PORTS: &str = "portMappings";
const SENDERS: &str = "portSenders";

/// Folds the request of a chained plugin into the configuration of the interface before it. Returns whether it did;
/// otherwise the plugin is executed.
///
/// # Errors
/// A key of the plugin has an invalid value, or the interface's configuration has another value for it.
pub(super) fn fold(
    driver: &dyn Driver,
    interface: &mut Map<String, Value>,
    kind: &str,
    chained: &Map<String, Value>,
) -> Result<bool, PlanError> {
    match kind {
        // Its other keys only tell how ports are mapped.
        portmap::KIND if ports(chained).is_none() => Ok(true),
        portmap::KIND if driver.maps_ports() && portmap::text_of_iptables(chained).is_none() => {
            let senders = portmap::senders(chained)?;
            link::offer(interface, PORTS, ports(chained).unwrap_or_default());
            if senders != PortSenders::default() {
                interface.insert(SENDERS.to_owned(), json!(senders));
            }
            Ok(true)
        }
        bandwidth::KIND if driver.is_judged(interface) && bandwidth::check_keys(chained).is_ok() => {
            bandwidth::check_alone(interface, chained)?;
            if let Some(limits) = bandwidth::asked(chained) {
                link::offer(interface, bandwidth::CAPABILITY, limits);
            }
            Ok(true)
        }
        dataplane::KIND => dataplane::merge(driver, interface, chained).map(|()| true),
        _ => Ok(false),
    }
}

/// Whether a chained plugin that was not folded into its interface ([`fold`]) is executed because netattach cannot
/// fulfil its request. `is_behind_own`: netattach creates the interface, which could have the property.
/// `has_dataplane`: rate limits are possible.
pub(super) fn is_executed(
    kind: &str,
    chained: &Map<String, Value>,
    is_behind_own: bool,
    has_dataplane: bool,
) -> bool {
    match kind {
        portmap::KIND | bandwidth::KIND => is_behind_own || !is_own_step(kind, chained, has_dataplane),
        firewall::KIND => firewall::is_for_firewalld(chained),
        _ => false,
    }
}

/// Whether a chained plugin after another plugin's interface is carried out by a step of netattach, or requests
/// nothing. `has_dataplane`: its interface can be rate limited.
fn is_own_step(kind: &str, chained: &Map<String, Value>, has_dataplane: bool) -> bool {
    match kind {
        portmap::KIND => ports(chained).is_none() || portmap::text_of_iptables(chained).is_none(),
        bandwidth::KIND => {
            bandwidth::asked(chained).is_none() || (has_dataplane && bandwidth::check_keys(chained).is_ok())
        }
        _ => false,
    }
}

/// Adds the step that admits forwarded traffic of the interface that these steps create: before a native interface
/// comes up, because processes of a live pod use it from then on, and because its bridge may have to be closed.
pub(super) fn admit(steps: &mut Vec<Step>, admit: Admit) {
    let comes_up = matches!(steps.last(), Some(Step::Configure(_)));
    steps.insert(steps.len() - usize::from(comes_up), Step::Admit(admit));
}

/// Returns the requested ports, if any.
pub(super) fn ports(chained: &Map<String, Value>) -> Option<Value> {
    let ports = chained.get("runtimeConfig")?.get(PORTS)?;
    let is_something = !ports.is_null() && ports.as_array().is_none_or(|ports| !ports.is_empty());
    is_something.then(|| ports.clone())
}

/// Refuses a second plugin that limits the interface, as one of the two would have no effect; a second one that
/// enables the dataplane; and a second `firewall`, whose rules would replace those of the first. `chained`: position,
/// type and configuration of plugins that are not executed by name.
pub(super) fn check_once<'a>(
    chained: impl Iterator<Item = (usize, &'a str, &'a Map<String, Value>)>,
) -> Result<(), CniError> {
    let (mut is_limited, mut has_dataplane, mut is_admitted) = (false, false, false);
    for (position, kind, config) in chained {
        let (limits, is_second) = match kind {
            bandwidth::KIND => (bandwidth::asked(config).is_some(), false),
            dataplane::KIND => (dataplane::limits(config), std::mem::replace(&mut has_dataplane, true)),
            firewall::KIND if !firewall::is_for_firewalld(config) => {
                (false, std::mem::replace(&mut is_admitted, true))
            }
            _ => (false, false),
        };
        let why = match (is_second, is_limited && limits) {
            (true, _) => "the list has it already",
            (false, true) => "a plugin before it limits the interface already",
            (false, false) => {
                is_limited |= limits;
                continue;
            }
        };
        return Err(CniError::new(code::INVALID_CONFIG, format!("plugins[{position}].type: {kind}: {why}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::bandwidth::KIND as BANDWIDTH;
    use super::portmap::KIND as PORTMAP;
    use super::*;
    use crate::link;

    /// The interface's configuration after folding, or `None` if the plugin is executed.
    fn folded(driver: &str, interface: Value, kind: &str, chained: Value) -> Option<Value> {
        let (Value::Object(mut interface), Value::Object(chained)) = (interface, chained) else {
            return None;
        };
        let driver = link::driver(driver).unwrap();
        fold(driver, &mut interface, kind, &chained).unwrap().then_some(Value::Object(interface))
    }

    /// Rows: BRG-portSenders.
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
        for (keys, senders) in [(json!({"snat": false}), "none"), (json!({"masqAll": true}), "all")] {
            let mut asked = asked.clone();
            asked.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
            let mut expected = expected.clone();
            expected["portSenders"] = json!(senders);
            assert_eq!(folded("ptp", json!({}), PORTMAP, asked), Some(expected));
        }
        for (key, value) in [
            ("externalSetMarkChain", json!("KUBE-MARK-MASQ")),
            ("conditionsV4", json!(["-s", "10.0.0.0/8"])),
            ("conditionsV6", json!(["-s", "fd00::/8"])),
        ] {
            let mut asked = asked.clone();
            asked[key] = value;
            assert_eq!(folded("bridge", json!({}), PORTMAP, asked.clone()), None, "{key}");
            asked["runtimeConfig"] = json!({"portMappings": []});
            for kind in ["bridge", "macvlan"] {
                assert_eq!(folded(kind, json!({}), PORTMAP, asked.clone()), Some(json!({})), "{key}");
            }
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
        let subnets = json!({"ingressRate": 5000, "unshapedSubnets": ["10.0.0.0/8"]});
        assert_eq!(folded("bridge", json!({}), BANDWIDTH, subnets), None);
        assert_eq!(folded("bridge", json!({}), "other", json!({})), None);
    }

    /// Rows: BWD-interface.
    #[test]
    fn an_interface_with_a_limit_of_its_own_gets_no_other_by_bandwidth() {
        let own = json!({"bandwidth": {"egressRate": 5000}});
        let of = |own: &Value, chained: Value| {
            let mut interface = own.as_object().unwrap().clone();
            let driver = link::driver("bridge").unwrap();
            let folded = fold(driver, &mut interface, BANDWIDTH, chained.as_object().unwrap());
            folded.map(|_| Value::Object(interface)).map_err(|error| CniError::from(error).msg)
        };
        let said = |chained: Value| of(&own, chained);
        for (chained, written) in [
            (json!({"ingressRate": 6000}), "{\"ingressRate\":6000}"),
            (json!({"egressRate": 6000}), "{\"egressRate\":6000}"),
        ] {
            let told = format!(
                "key bandwidth: {written} of bandwidth behind the interface, which itself has {}; one of the two",
                own["bandwidth"]
            );
            assert_eq!(said(chained), Err(told));
        }
        // A pod's request applies if the interface has no limit: see `link::Request::limits`.
        let asked = json!({"bandwidth": {"ingressRate": 6000}});
        let with = |offered: &Value| json!({"bandwidth": own["bandwidth"], "runtimeConfig": offered});
        for (chained, expected) in [
            (json!({"runtimeConfig": asked}), with(&asked)),
            (json!({"egressRate": 5000}), with(&own)),
            (json!({"runtimeConfig": {"bandwidth": null}}), own.clone()),
            (json!({}), own.clone()),
        ] {
            assert_eq!(said(chained), Ok(expected));
        }
        // The same limit in another form, or no limit, is no different one.
        for (own, chained) in [
            (json!({"egressRate": 5000, "egressBurst": 0}), json!({"egressRate": 5000})),
            (json!({"egressRate": 5000}), json!({"egressRate": 5000, "egressBurst": 120_000})),
            (json!({"egressRate": 0, "ingressRate": null}), json!({"egressRate": 6000})),
        ] {
            let own = json!({"bandwidth": own});
            let expected = json!({"bandwidth": own["bandwidth"], "runtimeConfig": {"bandwidth": chained}});
            assert_eq!(of(&own, chained), Ok(expected));
        }
        let invalid = of(&json!({"bandwidth": {"egressRate": 5}}), json!({"egressRate": 6000}));
        assert_eq!(invalid, Err("key bandwidth: egressRate 5 is below 1000 bits per second".to_owned()));
    }

    #[test]
    fn behind_others_they_are_steps_where_those_can_do_it() {
        let is_own = |kind: &str, chained: Value, has_dataplane: bool| {
            is_own_step(kind, chained.as_object().unwrap(), has_dataplane)
        };
        let ports = json!({"portMappings": [{"hostPort": 8080, "containerPort": 80}]});
        assert!(is_own(PORTMAP, json!({"runtimeConfig": ports, "snat": false}), false));
        assert!(is_own(PORTMAP, json!({"conditionsV4": ["-s", "10.0.0.0/8"]}), false));
        assert!(!is_own(
            PORTMAP,
            json!({"runtimeConfig": ports, "conditionsV4": ["-s", "10.0.0.0/8"]}),
            true
        ));
        assert!(is_own(BANDWIDTH, json!({}), false));
        assert!(is_own(BANDWIDTH, json!({"ingressRate": 5000}), true));
        assert!(!is_own(BANDWIDTH, json!({"ingressRate": 5000}), false));
        assert!(!is_own(BANDWIDTH, json!({"ingressRate": 5000, "shapedSubnets": ["::/0"]}), true));
        assert!(!is_own("tuning", json!({}), true));
    }

    #[test]
    fn a_bridge_is_closed_before_an_interface_of_ours_comes_up() {
        let up = || Step::Configure(crate::step::Configure::default());
        let asked = || Admit { ingress: crate::step::Ingress::Isolated, ..Admit::default() };
        for (before, expected) in [
            (vec![Step::EnsureForwarding, up()], vec![Step::EnsureForwarding, Step::Admit(asked()), up()]),
            // With the changes of another plugin since.
            (vec![up(), Step::FindReach], vec![up(), Step::FindReach, Step::Admit(asked())]),
            (Vec::new(), vec![Step::Admit(asked())]),
        ] {
            let mut steps = before;
            admit(&mut steps, asked());
            assert_eq!(steps, expected);
        }
    }

    /// Rows: FWL-once.
    #[test]
    fn a_list_has_one_firewall_and_one_dataplane() {
        let once = |kinds: &[(&str, Value)]| {
            let chained = kinds.iter().enumerate();
            let chained =
                chained.map(|(index, (kind, config))| (index + 1, *kind, config.as_object().unwrap()));
            check_once(chained).map_err(|error| (error.code, error.msg))
        };
        let (firewall, dataplane) = ("firewall", dataplane::KIND);
        let closed = json!({"ingressPolicy": "isolated"});
        let by_firewalld = json!({"backend": "firewalld"});
        let limited = json!({"bandwidth": {"ingressRate": 5000}});
        let said = |told: &str| Err((code::INVALID_CONFIG, told.to_owned()));
        for (kinds, expected) in [
            (
                vec![(firewall, closed.clone()), ("tuning", json!({})), (firewall, json!({}))],
                said("plugins[3].type: firewall: the list has it already"),
            ),
            // Firewalld has rules of its own.
            (vec![(firewall, closed.clone()), (firewall, by_firewalld.clone())], Ok(())),
            (vec![(firewall, by_firewalld), (firewall, closed)], Ok(())),
            (
                vec![(dataplane, json!({})), (dataplane, json!({}))],
                said("plugins[2].type: netattach: the list has it already"),
            ),
            (
                vec![(BANDWIDTH, json!({"ingressRate": 5000})), (dataplane, limited)],
                said("plugins[2].type: netattach: a plugin before it limits the interface already"),
            ),
            (vec![("tuning", json!({"mtu": 1400})), ("tuning", json!({"mtu": 1300}))], Ok(())),
        ] {
            assert_eq!(once(&kinds), expected, "{kinds:?}");
        }
    }

    /// Rows: FWL-firewalldZone.
    #[test]
    fn firewall_is_executed_for_firewalld_alone() {
        for (chained, expected) in [
            (json!({}), false),
            (json!({"backend": "iptables", "firewalldZone": "trusted"}), false),
            (json!({"backend": "firewalld"}), true),
        ] {
            for place in [true, false] {
                let chained = chained.as_object().unwrap();
                assert_eq!(is_executed("firewall", chained, place, place), expected);
                assert!(!is_executed("tuning", chained, place, place));
            }
        }
    }
}
