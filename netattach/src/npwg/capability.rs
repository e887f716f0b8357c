//! The capability arguments of a selection: `runtimeConfig` as the CNI conventions define it.

use serde_json::{Map, Value, json};

use super::Selection;
use super::selection::Bandwidth;

/// Smallest default burst, in bits: ten full Ethernet frames.
const SMALLEST_BURST: u64 = 10 * 1500 * 8;

/// Largest default burst, in bits: the maximum of a plugin's signed 32-bit field.
const LARGEST_BURST: u64 = i32::MAX as u64;

/// The values that a selection passes to plugins, by the name of the capability that a plugin must declare.
///
/// Contains only requested capabilities: if no plugin of the chain declares one of them, the attachment fails. A
/// bandwidth limit without a burst gets a burst of a tenth of a second, since the reference plugin refuses a rate
/// without one.
pub fn runtime_config(selection: &Selection) -> Map<String, Value> {
    let mut config = Map::new();
    if !selection.ips.is_empty() {
        let ips: Vec<Value> = selection.ips.iter().map(|ip| Value::String(ip.to_string())).collect();
        config.insert("ips".to_owned(), Value::Array(ips));
    }
    if let Some(mac) = selection.mac {
        config.insert("mac".to_owned(), Value::String(mac.to_string()));
    }
    if !selection.port_mappings.is_empty() {
        config.insert("portMappings".to_owned(), json!(selection.port_mappings));
    }
    if let Some(bandwidth) = selection.bandwidth {
        config.insert("bandwidth".to_owned(), json!(with_bursts(bandwidth)));
    }
    if let Some(guid) = selection.infiniband_guid {
        config.insert("infinibandGUID".to_owned(), Value::String(guid.to_string()));
    }
    config
}

/// Sets the burst of each rate without one to a tenth of a second.
pub(crate) fn with_bursts(asked: Bandwidth) -> Bandwidth {
    let default_burst = |rate: u64| (rate / 10).clamp(SMALLEST_BURST, LARGEST_BURST);
    Bandwidth {
        ingress_burst: asked.ingress_burst.or(asked.ingress_rate.map(default_burst)),
        egress_burst: asked.egress_burst.or(asked.egress_rate.map(default_burst)),
        ..asked
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::npwg::parse_networks;

    fn config_of(element: Value) -> Value {
        let annotation = Value::Array(vec![element]).to_string();
        let parsed = parse_networks(&annotation, "default").unwrap();
        Value::Object(runtime_config(&parsed.selections[0]))
    }

    /// Rows: NPWG-4.1.2.1.3.2-ips-runtimeconfig, NPWG-4.1.2.1.4-mac-valid, NPWG-4.1.2.1.7-pm-default-proto.
    /// Rows: NPWG-4.1.2.1.8-bw-default-burst, NPWG-4.1.2.1.10-guid-valid, REQ-15.
    #[test]
    fn each_request_goes_under_its_capability() {
        let table = [
            ("nothing asked", json!({"name": "a"}), json!({})),
            (
                "NPWG-4.1.2.1.3.2-ips-runtimeconfig",
                json!({"name": "a", "ips": ["10.2.2.42/24", "2001:db8::5"]}),
                json!({"ips": ["10.2.2.42/24", "2001:db8::5"]}),
            ),
            (
                "NPWG-4.1.2.1.4-mac-valid",
                json!({"name": "a", "mac": "02-23-45-67-89-AB"}),
                json!({"mac": "02:23:45:67:89:ab"}),
            ),
            (
                "NPWG-4.1.2.1.7-pm-default-proto",
                json!({"name": "a", "portMappings": [{"hostPort": 8080, "containerPort": 80}]}),
                json!({"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]}),
            ),
            (
                "NPWG-4.1.2.1.8-bw-default-burst",
                json!({"name": "a", "bandwidth": {"ingressRate": 8_000_000, "egressRate": 1, "egressBurst": 9}}),
                json!({"bandwidth": {"ingressRate": 8_000_000, "ingressBurst": 800_000, "egressRate": 1, "egressBurst": 9}}),
            ),
            (
                "NPWG-4.1.2.1.10-guid-valid",
                json!({"name": "a", "infiniband-guid": "c2:11:22:33:44:55:66:77"}),
                json!({"infinibandGUID": "c2:11:22:33:44:55:66:77"}),
            ),
        ];
        for (row, element, expected) in table {
            assert_eq!(config_of(element), expected, "{row}");
        }
    }

    #[test]
    fn filled_in_bursts_stay_between_a_few_frames_and_what_plugins_hold() {
        let limits = |rate| Bandwidth {
            ingress_rate: Some(rate),
            ingress_burst: None,
            egress_rate: None,
            egress_burst: None,
        };
        assert_eq!(with_bursts(limits(1000)).ingress_burst, Some(SMALLEST_BURST));
        assert_eq!(with_bursts(limits(u64::MAX)).ingress_burst, Some(LARGEST_BURST));
        assert_eq!(with_bursts(limits(1000)).egress_burst, None);
    }
}
