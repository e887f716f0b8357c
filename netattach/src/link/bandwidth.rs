//! `bandwidth`, chained: rate limits for an interface made by a preceding plugin.
//!
//! The keys are those of the plugin of the same name in containernetworking/plugins; the default burst is a
//! tenth of a second at the rate.

use serde_json::{Map, Value, json};

use super::{PlanError, Request, checked_limits};
use crate::npwg::selection::Bandwidth;

/// The plugin type.
pub const KIND: &str = "bandwidth";

/// The capability, and the equivalent key of interfaces.
pub const CAPABILITY: &str = "bandwidth";

/// The keys of the configuration.
const RATES: [&str; 4] = ["ingressRate", "ingressBurst", "egressRate", "egressBurst"];

/// Keys that the reference plugin had for a while: lists of subnets.
const SUBNETS: [&str; 2] = ["shapedSubnets", "unshapedSubnets"];

/// The limits that a configuration asks for, as written: its own take precedence over those of the pod.
pub fn asked(config: &Map<String, Value>) -> Option<Value> {
    written(config).or_else(|| of(config.get("runtimeConfig")?.as_object()?).cloned())
}

/// The limits in the configuration's own keys.
fn written(config: &Map<String, Value>) -> Option<Value> {
    let is_set = |value: &Value| !value.is_null() && *value != json!(0);
    let fixed = RATES.iter().filter_map(|key| Some(((*key).to_owned(), config.get(*key)?.clone())));
    let fixed: Map<String, Value> = fixed.filter(|(_, value)| is_set(value)).collect();
    (!fixed.is_empty()).then_some(Value::Object(fixed))
}

/// The limits in the key of interfaces, if any.
fn of(keys: &Map<String, Value>) -> Option<&Value> {
    let limits = keys.get(CAPABILITY).filter(|limits| !limits.is_null())?;
    limits.as_object().is_none_or(|limits| !limits.is_empty()).then_some(limits)
}

/// Refuses limits of a configuration that differ from those in the configuration of the preceding interface:
/// one of the two would have no effect. Limits that a pod asks for are not checked here.
///
/// # Errors
/// The error names the key of the interface: the limits differ, or one of the two is invalid.
pub fn check_alone(interface: &Map<String, Value>, config: &Map<String, Value>) -> Result<(), PlanError> {
    let Some((own, written)) = of(interface).zip(written(config)) else { return Ok(()) };
    // Compared after parsing: a number may be 0, which counts as absent, or equal the default.
    let (has, asks) = (checked_limits(Some(own))?, checked_limits(Some(&written))?);
    if has == asks || has == checked_limits(None)? {
        return Ok(());
    }
    let reason = format!("{written} of {KIND} behind the interface, which itself has {own}; one of the two");
    Err(PlanError::Value { key: CAPABILITY, reason })
}

/// Refuses the keys that netattach does not support.
///
/// # Errors
/// The error names the key.
pub fn check_keys(config: &Map<String, Value>) -> Result<(), PlanError> {
    let asks = |value: &&Value| !value.is_null() && **value != json!([]);
    match SUBNETS.into_iter().find_map(|key| Some((key, config.get(key).filter(asks)?))) {
        Some((key, value)) => Err(PlanError::Unsupported { key, value: value.clone(), kind: KIND }),
        None => Ok(()),
    }
}

/// Parses the configuration; `None`: there is no limit.
///
/// # Errors
/// The error names the key.
pub fn parse(request: &Request<'_>) -> Result<Option<Bandwidth>, PlanError> {
    check_keys(request.config)?;
    let Some(limits) = asked(request.config) else { return Ok(None) };
    let of_interface = Map::from_iter([(CAPABILITY.to_owned(), limits)]);
    Request { config: &of_interface, ..*request }.limits()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::{CniArgs, CniError, code};
    use crate::link::tests::request;

    fn read(config: Value) -> Result<Option<Bandwidth>, (u32, String)> {
        let args = CniArgs::default();
        parse(&request(config.as_object().unwrap(), &args)).map_err(|error| {
            let error = CniError::from(error);
            (error.code, error.msg)
        })
    }

    #[test]
    fn what_is_written_goes_over_what_a_pod_asks_for() {
        let none =
            Bandwidth { ingress_rate: None, ingress_burst: None, egress_rate: None, egress_burst: None };
        let by_pod = json!({"bandwidth": {"egressRate": 5000, "egressBurst": 200_000}});
        for nothing in [
            json!({}),
            json!({"ingressRate": 0}),
            json!({"runtimeConfig": {"bandwidth": {}}}),
            json!({"runtimeConfig": {"bandwidth": null}}),
        ] {
            assert_eq!(asked(nothing.as_object().unwrap()), None);
            assert_eq!(read(nothing), Ok(None));
        }
        let of_pod = Bandwidth { egress_rate: Some(5000), egress_burst: Some(200_000), ..none };
        assert_eq!(read(json!({"runtimeConfig": by_pod, "ingressBurst": 0})), Ok(Some(of_pod)));
        let written = Bandwidth { ingress_rate: Some(1_000_000), ingress_burst: Some(120_000), ..none };
        assert_eq!(read(json!({"runtimeConfig": by_pod, "ingressRate": 1_000_000})), Ok(Some(written)));
    }

    /// Rows: BWD-interface.
    #[test]
    fn a_pod_lifts_no_limit_that_its_network_has_set() {
        let limits = |config: Value| {
            let args = CniArgs::default();
            request(config.as_object().unwrap(), &args).limits().map_err(|error| CniError::from(error).msg)
        };
        let own = json!({"ingressRate": 1_000_000, "ingressBurst": 300_000, "egressRate": 2_000_000});
        let more = json!({"ingressRate": 1_000_000_000_000_u64, "ingressBurst": 400_000});
        let both = json!({"ingressRate": 5000, "egressRate": 6000, "egressBurst": 500_000});
        let of_own = Bandwidth {
            ingress_rate: Some(1_000_000),
            ingress_burst: Some(300_000),
            egress_rate: Some(2_000_000),
            egress_burst: Some(200_000),
        };
        // A separate burst does not let more pass at once.
        let less = Bandwidth { ingress_rate: Some(5000), ingress_burst: Some(120_000), ..of_own };
        let less = Bandwidth { egress_rate: Some(6000), egress_burst: Some(200_000), ..less };
        let of_both = Bandwidth {
            ingress_rate: Some(5000),
            ingress_burst: Some(120_000),
            egress_rate: Some(6000),
            egress_burst: Some(500_000),
        };
        let one = json!({"ingressRate": 1_000_000, "ingressBurst": 300_000, "egressRate": 0});
        let one_way = json!({"egressRate": 6000});
        let of_each = Bandwidth { egress_rate: Some(6000), egress_burst: Some(120_000), ..of_own };
        let lower_burst = json!({"ingressRate": 2_000_000, "ingressBurst": 200_000});
        let by_burst = Bandwidth { ingress_burst: Some(200_000), ..of_own };
        let rows = [
            (&own, &more, Some(of_own)),
            (&own, &both, Some(less)),
            (&own, &one_way, Some(of_each)),
            (&own, &lower_burst, Some(by_burst)),
            (&own, &json!(null), Some(of_own)),
            (&own, &json!({}), Some(of_own)),
            (&one, &both, Some(of_both)),
            (&json!(null), &both, Some(of_both)),
            (&json!({}), &json!(null), None),
        ];
        for (written, asked, expected) in rows {
            let config = json!({"bandwidth": written, "runtimeConfig": {"bandwidth": asked}});
            assert_eq!(limits(config.clone()), Ok(expected), "{config}");
        }
        let invalid = json!({"bandwidth": {"ingressBurst": 8000}, "runtimeConfig": {"bandwidth": both}});
        assert_eq!(limits(invalid), Err("key bandwidth: ingressBurst without ingressRate".to_owned()));
    }

    #[test]
    fn what_is_no_limit_is_refused_by_its_key() {
        let invalid = |told: &str| Err((code::INVALID_CONFIG, told.to_owned()));
        assert_eq!(
            read(json!({"ingressBurst": 8000})),
            invalid("key bandwidth: ingressBurst without ingressRate")
        );
        assert_eq!(
            read(json!({"egressRate": 999})),
            invalid("key bandwidth: egressRate 999 is below 1000 bits per second")
        );
        for key in SUBNETS {
            let (code, msg) = read(json!({key: ["10.0.0.0/8"], "ingressRate": 5000})).unwrap_err();
            let start =
                format!("key {key}: [\"10.0.0.0/8\"] is not supported by netattach's own bandwidth plugin");
            assert!(code == code::UNSUPPORTED_FIELD && msg.starts_with(&start), "{code} {msg}");
            assert_eq!(read(json!({key: []})), Ok(None));
        }
    }
}
