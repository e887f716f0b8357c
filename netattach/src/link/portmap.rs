//! `portmap`, chained: forwards ports of the node to an interface made by a preceding plugin.
//!
//! The keys are those of the plugin of the same name in containernetworking/plugins, except those that
//! contain iptables text. After an interface of netattach's own they become keys of that interface: see
//! `plan::chained`.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{PlanError, Request};
use crate::cni::json::{null_is_default, read_object};
use crate::step::{PortSenders, Translate};

/// The plugin type.
pub const KIND: &str = "portmap";

/// The keys that contain iptables text.
const TEXTS: [&str; 3] = ["externalSetMarkChain", "conditionsV4", "conditionsV6"];

/// Bits of a mark.
const MARK_BITS: i64 = 32;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Keys {
    #[serde(default)]
    backend: Option<String>,
    #[serde(default)]
    snat: Option<bool>,
    #[serde(default, deserialize_with = "null_is_default")]
    masq_all: bool,
    #[serde(default)]
    mark_masq_bit: Option<i64>,
}

/// Returns a key that only iptables can carry out, with its value, if one is set.
pub fn text_of_iptables(config: &Map<String, Value>) -> Option<(&'static str, &Value)> {
    let asks = |value: &&Value| !value.is_null() && **value != json!("") && **value != json!([]);
    TEXTS.into_iter().find_map(|key| Some((key, config.get(key).filter(asks)?)))
}

/// Returns which senders are masqueraded on the way to a port.
///
/// # Errors
/// The error names the key.
pub fn senders(config: &Map<String, Value>) -> Result<PortSenders, PlanError> {
    let keys: Keys = read_object(config)?;
    let backend = keys.backend.unwrap_or_default();
    // Both names stand for the only implementation.
    if !["", "nftables", "iptables"].contains(&backend.as_str()) {
        let reason = format!("{backend:?} is neither nftables nor iptables");
        return Err(PlanError::Value { key: "backend", reason });
    }
    // No packet is marked; the bit only has to be valid.
    if let Some(bit) = keys.mark_masq_bit.filter(|bit| !(0..MARK_BITS).contains(bit)) {
        let reason = format!("{bit} is no bit of a mark: 0 to {}", MARK_BITS - 1);
        return Err(PlanError::Value { key: "markMasqBit", reason });
    }
    Ok(match (keys.snat.unwrap_or(true), keys.masq_all) {
        // As in the reference plugin, `masqAll` extends `snat` to all senders.
        (false, _) => PortSenders::None,
        (true, true) => PortSenders::All,
        (true, false) => PortSenders::Near,
    })
}

/// Parses the configuration: the translation, for a device that is not known yet.
///
/// # Errors
/// The error names the key.
pub fn parse(request: &Request<'_>) -> Result<Translate, PlanError> {
    if let Some((key, value)) = text_of_iptables(request.config) {
        return Err(PlanError::Unsupported { key, value: value.clone(), kind: KIND });
    }
    let senders = senders(request.config)?;
    // Hosts in the subnet of the result may be reachable past the node, whatever plugin made the interface.
    Ok(Translate { bridged: true, ports: request.port_mappings()?, senders, ..Translate::default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::{CniArgs, CniError, code};
    use crate::link::tests::request;

    fn read(keys: Value) -> Result<Translate, (u32, String)> {
        let mut config = json!({
            "type": KIND, "runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80}]}
        });
        config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        let args = CniArgs::default();
        parse(&request(config.as_object().unwrap(), &args)).map_err(|error| {
            let error = CniError::from(error);
            (error.code, error.msg)
        })
    }

    #[test]
    fn each_key_is_read() {
        let near = Translate {
            bridged: true,
            ports: vec![crate::npwg::selection::PortMapping {
                host_port: 8080,
                container_port: 80,
                protocol: crate::npwg::selection::PortProtocol::Tcp,
                host_ip: None,
            }],
            ..Translate::default()
        };
        let of = |senders| Ok(Translate { senders, ..near.clone() });
        for usual in [
            json!({}),
            json!({"snat": true, "masqAll": false, "backend": "iptables", "markMasqBit": 31}),
            json!({"snat": null, "masqAll": null, "backend": null, "markMasqBit": null}),
            json!({"backend": "nftables", "externalSetMarkChain": "", "conditionsV4": [], "conditionsV6": null}),
        ] {
            assert_eq!(read(usual.clone()), of(PortSenders::Near), "{usual}");
        }
        assert_eq!(read(json!({"masqAll": true})), of(PortSenders::All));
        for snat in [json!({"snat": false}), json!({"snat": false, "masqAll": true})] {
            assert_eq!(read(snat.clone()), of(PortSenders::None), "{snat}");
        }
    }

    #[test]
    fn what_is_no_value_is_refused_by_its_key() {
        let texts = [
            ("externalSetMarkChain", json!("KUBE-MARK-MASQ")),
            ("conditionsV4", json!(["-s", "10.0.0.0/8"])),
            ("conditionsV6", json!(["-s", "fd00::/8"])),
        ];
        for (key, value) in texts {
            let (code, msg) = read(json!({ key: value })).unwrap_err();
            let start = format!("key {key}: {value} is not supported by netattach's own portmap plugin");
            assert!(code == code::UNSUPPORTED_FIELD && msg.starts_with(&start), "{code} {msg}");
        }
        for (keys, told) in [
            (json!({"backend": "ebtables"}), "key backend: \"ebtables\" is neither nftables nor iptables"),
            (json!({"markMasqBit": 32}), "key markMasqBit: 32 is no bit of a mark: 0 to 31"),
            (json!({"markMasqBit": -1}), "key markMasqBit: -1 is no bit of a mark: 0 to 31"),
        ] {
            assert_eq!(read(keys), Err((code::INVALID_CONFIG, told.to_owned())));
        }
        assert_eq!(read(json!({"snat": "yes"})).unwrap_err().0, code::INVALID_CONFIG);
    }
}
