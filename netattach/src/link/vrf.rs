//! `vrf`, chained: makes an interface a port of a VRF in the pod, whose table routes the interface's traffic.
//!
//! The keys are those of the plugin of the same name in containernetworking/plugins.

use serde::Deserialize;

use super::{PlanError, Request, check_new_name};
use crate::spec::Vrf;

/// The plugin type.
pub const KIND: &str = "vrf";

/// Tables that belong to the namespace as a whole: `default`, `main`, `local`.
pub const TABLES_OF_ALL: std::ops::RangeInclusive<u32> = 253..=255;

#[derive(Deserialize)]
struct Keys {
    #[serde(default)]
    vrfname: Option<String>,
    #[serde(default)]
    table: Option<u32>,
}

/// Parses the configuration.
///
/// # Errors
/// The error names the key.
pub fn parse(request: &Request<'_>) -> Result<Vrf, PlanError> {
    const NAME: &str = "vrfname";
    let wrong = |key, reason: String| Err(PlanError::Value { key, reason });
    let Keys { vrfname, table } = request.read()?;
    let Some(name) = vrfname.filter(|name| !name.is_empty()) else {
        return wrong(NAME, "missing; name the VRF".into());
    };
    check_new_name(NAME, &name)?;
    if name == request.ifname || name == "lo" {
        return wrong(NAME, format!("{name:?} is another interface of the pod"));
    }
    // As in the reference plugin, a table of 0 counts as absent.
    let table = table.filter(|table| *table != 0);
    match table {
        Some(table) if TABLES_OF_ALL.contains(&table) => {
            wrong("table", format!("{table} is the table of all interfaces that are in no VRF"))
        }
        _ => Ok(Vrf { name, table }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::cni::CniArgs;
    use crate::link::tests::request;

    fn read(config: Value) -> Result<Vrf, String> {
        let Value::Object(config) = config else { panic!("{config}") };
        parse(&Request { ifname: "net1", ..request(&config, &CniArgs::default()) })
            .map_err(|error| crate::error_chain::Chain(&error).to_string())
    }

    #[test]
    fn each_key_is_read_or_refused_by_its_name() {
        let vrf = |table| Ok(Vrf { name: "blue".into(), table });
        for none in [json!({"vrfname": "blue"}), json!({"vrfname": "blue", "table": null})] {
            assert_eq!(read(none), vrf(None));
        }
        assert_eq!(read(json!({"vrfname": "blue", "table": 0})), vrf(None));
        assert_eq!(read(json!({"vrfname": "blue", "table": 500})), vrf(Some(500)));
        for missing in [json!({}), json!({"vrfname": null}), json!({"vrfname": ""})] {
            assert_eq!(read(missing), Err("key vrfname: missing; name the VRF".into()));
        }
        for (name, said) in [
            ("net1", r#"key vrfname: "net1" is another interface of the pod"#),
            ("lo", r#"key vrfname: "lo" is another interface of the pod"#),
            ("a/b", r#"key vrfname: "a/b": "#),
        ] {
            let found = read(json!({"vrfname": name})).unwrap_err();
            assert!(found.starts_with(said), "{found}");
        }
        for table in 253..=255 {
            let said = format!("key table: {table} is the table of all interfaces that are in no VRF");
            assert_eq!(read(json!({"vrfname": "blue", "table": table})), Err(said));
        }
        assert!(read(json!({"vrfname": 5})).unwrap_err().contains("vrfname"));
        assert!(read(json!({"vrfname": "blue", "table": "a"})).unwrap_err().contains("table"));
    }
}
