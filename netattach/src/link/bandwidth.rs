//! `bandwidth`, chained: limits of the interface that a plugin before it has made.
//!
//! The keys are those of the plugin of the same name in containernetworking/plugins; a rate without a burst has one of a
//! tenth of a second.

use serde_json::{Map, Value, json};

use super::{PlanError, Request};
use crate::npwg::selection::Bandwidth;

/// The plugin type.
pub const KIND: &str = "bandwidth";

/// Its capability, and the key of interfaces that means the same.
pub const CAPABILITY: &str = "bandwidth";

/// Its keys.
const RATES: [&str; 4] = ["ingressRate", "ingressBurst", "egressRate", "egressBurst"];

/// Keys that the reference had for a while: lists of subnets.
const SUBNETS: [&str; 2] = ["shapedSubnets", "unshapedSubnets"];

/// The limits that a configuration asks for, as they were written: its own, which go over what a pod asks for.
pub fn asked(config: &Map<String, Value>) -> Option<Value> {
    let is_set = |value: &Value| !value.is_null() && *value != json!(0);
    let fixed = RATES.iter().filter_map(|key| Some(((*key).to_owned(), config.get(*key)?.clone())));
    let fixed: Map<String, Value> = fixed.filter(|(_, value)| is_set(value)).collect();
    let by_runtime = || config.get("runtimeConfig")?.get(CAPABILITY).cloned();
    let limits = if fixed.is_empty() { by_runtime()? } else { Value::Object(fixed) };
    limits.as_object().is_none_or(|limits| !limits.is_empty()).then_some(limits)
}

/// Refuses the keys that nothing of netattach carries out.
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

/// Reads the configuration; `None`: there is no limit.
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
        for nothing in [json!({}), json!({"ingressRate": 0}), json!({"runtimeConfig": {"bandwidth": {}}})] {
            assert_eq!(read(nothing), Ok(None));
        }
        let of_pod = Bandwidth { egress_rate: Some(5000), egress_burst: Some(200_000), ..none };
        assert_eq!(read(json!({"runtimeConfig": by_pod, "ingressBurst": 0})), Ok(Some(of_pod)));
        let written = Bandwidth { ingress_rate: Some(1_000_000), ingress_burst: Some(120_000), ..none };
        assert_eq!(read(json!({"runtimeConfig": by_pod, "ingressRate": 1_000_000})), Ok(Some(written)));
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
