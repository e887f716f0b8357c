//! `sbr`, chained: packets from the addresses of an interface are routed by separate tables.
//!
//! The keys are those of the plugin of the same name in containernetworking/plugins.

use std::net::IpAddr;

use serde::Deserialize;

use super::{PlanError, Request};
use crate::spec::BySource;

/// The plugin type.
pub const KIND: &str = "sbr";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Keys {
    #[serde(default)]
    table: Option<u32>,
    #[serde(default)]
    gateways: Option<Vec<IpAddr>>,
    #[serde(default)]
    add_source_hints: Option<bool>,
}

/// Parses the configuration.
///
/// # Errors
/// The error names the key.
pub fn parse(request: &Request<'_>) -> Result<BySource, PlanError> {
    let Keys { table, gateways, add_source_hints } = request.read()?;
    let gateways = gateways.unwrap_or_default();
    let hints = add_source_hints.unwrap_or(false);
    let wrong = |key, reason: String| Err(PlanError::Value { key, reason });
    if table == Some(0) {
        return wrong("table", "0 is no table of the kernel".into());
    }
    for (word, is_ipv4) in [("IPv4", true), ("IPv6", false)] {
        let of_family = gateways.iter().filter(|it| it.is_ipv4() == is_ipv4).count();
        if of_family > 1 {
            return wrong("gateways", format!("{of_family} of {word}, and there may be one"));
        }
    }
    if let Some(address) = gateways.iter().find(|it| it.is_unspecified() || it.is_multicast()) {
        return wrong("gateways", format!("{address} is no gateway"));
    }
    if table.is_some() && (hints || !gateways.is_empty()) {
        let key = if hints { "addSourceHints" } else { "gateways" };
        return wrong(key, "without effect, as with table no routes are made or moved".into());
    }
    Ok(BySource { table, gateways, hints })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::cni::CniArgs;
    use crate::link::tests::request;

    fn read(config: Value) -> Result<BySource, String> {
        let Value::Object(config) = config else { panic!("{config}") };
        parse(&request(&config, &CniArgs::default()))
            .map_err(|error| crate::error_chain::Chain(&error).to_string())
    }

    #[test]
    fn each_key_is_read_or_refused_by_its_name() {
        assert_eq!(read(json!({})), Ok(BySource::default()));
        assert_eq!(
            read(json!({"table": null, "gateways": null, "addSourceHints": null})),
            Ok(BySource::default())
        );
        assert_eq!(read(json!({"table": 500})), Ok(BySource { table: Some(500), ..BySource::default() }));
        let gateways = vec!["10.1.0.1".parse().unwrap(), "fd00::1".parse().unwrap()];
        assert_eq!(
            read(json!({"gateways": gateways, "addSourceHints": true})),
            Ok(BySource { table: None, gateways, hints: true })
        );
        let rows = [
            (json!({"table": 0}), "key table: 0 is no table of the kernel"),
            (json!({"gateways": ["10.1.0.1", "10.1.0.2"]}), "key gateways: 2 of IPv4, and there may be one"),
            (json!({"gateways": ["fd00::1", "fd00::2"]}), "key gateways: 2 of IPv6, and there may be one"),
            (json!({"gateways": ["0.0.0.0"]}), "key gateways: 0.0.0.0 is no gateway"),
            (
                json!({"table": 5, "gateways": ["10.1.0.1"]}),
                "key gateways: without effect, as with table no routes are made or moved",
            ),
            (
                json!({"table": 5, "addSourceHints": true}),
                "key addSourceHints: without effect, as with table no routes are made or moved",
            ),
        ];
        for (config, said) in rows {
            assert_eq!(read(config.clone()), Err(said.to_owned()), "{config}");
        }
        for key in ["table", "gateways", "addSourceHints"] {
            assert!(read(json!({ key: "a" })).unwrap_err().contains(key), "{key}");
        }
    }
}
