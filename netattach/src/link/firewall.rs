//! `firewall`, chained: lets the node forward packets from and to an interface's addresses, where `iptables`
//! would drop unknown packets.
//!
//! The keys are those of the plugin of the same name in containernetworking/plugins, except for the backend
//! `firewalld`.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{PlanError, Request};
use crate::step::{ADMIN_CHAIN, Admit, Ingress};

/// The plugin type.
pub const KIND: &str = "firewall";

const ADMIN_KEY: &str = "iptablesAdminChainName";
/// Longest name of a chain that `iptables` takes, in bytes.
const MOST_NAME: usize = 28;
/// Names that cannot be the administrator's chain.
const TAKEN: [&str; 10] = [
    "ACCEPT",
    "DROP",
    "QUEUE",
    "RETURN",
    "INPUT",
    "FORWARD",
    "OUTPUT",
    "CNI-FORWARD",
    "CNI-ISOLATION-STAGE-1",
    "CNI-ISOLATION-STAGE-2",
];

const BACKEND_KEY: &str = "backend";
const FIREWALLD: &str = "firewalld";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Keys {
    #[serde(default)]
    backend: Option<String>,
    #[serde(default)]
    iptables_admin_chain_name: Option<String>,
    #[serde(default)]
    ingress_policy: Option<String>,
}

/// Whether the configuration selects firewalld, which only an executed plugin supports.
pub fn is_for_firewalld(config: &Map<String, Value>) -> bool {
    config.get(BACKEND_KEY).is_some_and(|backend| *backend == FIREWALLD)
}

/// Parses the configuration. `firewalldZone` has no effect without firewalld, as in the reference plugin.
///
/// # Errors
/// The error names the key.
pub fn parse(request: &Request<'_>) -> Result<Admit, PlanError> {
    let wrong = |key, reason: String| Err(PlanError::Value { key, reason });
    if is_for_firewalld(request.config) {
        let value = json!(FIREWALLD);
        return Err(PlanError::Unsupported { key: BACKEND_KEY, value, kind: KIND });
    }
    let Keys { backend, iptables_admin_chain_name, ingress_policy } = request.read()?;
    let backend = backend.unwrap_or_default();
    if !["", "iptables"].contains(&backend.as_str()) {
        return wrong(BACKEND_KEY, format!("{backend:?} is neither iptables nor firewalld"));
    }
    let admin_chain = iptables_admin_chain_name.filter(|name| !name.is_empty());
    let admin_chain = admin_chain.unwrap_or_else(|| ADMIN_CHAIN.to_owned());
    if admin_chain.len() > MOST_NAME
        || admin_chain.starts_with(['-', '!'])
        || !admin_chain.bytes().all(|byte| byte.is_ascii_graphic())
    {
        return wrong(ADMIN_KEY, format!("{admin_chain:?} is no name of a chain of iptables"));
    }
    if TAKEN.contains(&admin_chain.as_str()) {
        return wrong(ADMIN_KEY, format!("{admin_chain} is no chain of the administrator's own"));
    }
    let policy = ingress_policy.unwrap_or_default();
    let ingress = match policy.as_str() {
        "" => Some(Ingress::Open),
        word => Ingress::ALL.into_iter().find(|ingress| ingress.word() == word),
    };
    let Some(ingress) = ingress else {
        let words = Ingress::ALL.map(Ingress::word).join(", ");
        return wrong("ingressPolicy", format!("{policy:?} is none of {words}"));
    };
    Ok(Admit { admin_chain, ingress, beside_firewalld: !backend.is_empty() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::{CniArgs, CniError, code};
    use crate::link::tests::request;

    fn read(config: Value) -> Result<Admit, (u32, String)> {
        parse(&request(config.as_object().unwrap(), &CniArgs::default())).map_err(|error| {
            let error = CniError::from(error);
            (error.code, error.msg)
        })
    }

    /// Rows: FWL-firewalldZone.
    #[test]
    fn each_key_is_read() {
        let usual = Admit { admin_chain: "CNI-ADMIN".into(), ..Admit::default() };
        for config in [
            json!({}),
            json!({"backend": "", "iptablesAdminChainName": "", "firewalldZone": "trusted", "ingressPolicy": "open"}),
            json!({"backend": null, "iptablesAdminChainName": null, "firewalldZone": null, "ingressPolicy": null}),
        ] {
            assert_eq!(read(config.clone()), Ok(usual.clone()), "{config}");
        }
        let named = Admit { beside_firewalld: true, ..usual.clone() };
        assert_eq!(read(json!({"backend": "iptables"})), Ok(named));
        let own = Admit { admin_chain: "MINE".into(), ..usual.clone() };
        assert_eq!(read(json!({"iptablesAdminChainName": "MINE"})), Ok(own));
        for ingress in Ingress::ALL {
            let expected = Ok(Admit { ingress, ..usual.clone() });
            assert_eq!(read(json!({"ingressPolicy": ingress.word()})), expected);
        }
    }

    #[test]
    fn what_is_no_value_is_refused_by_its_key() {
        let (code, msg) = read(json!({"backend": "firewalld"})).unwrap_err();
        let start = "key backend: \"firewalld\" is not supported by netattach's own firewall plugin";
        assert!(code == code::UNSUPPORTED_FIELD && msg.starts_with(start), "{code} {msg}");
        let long = "A".repeat(29);
        for (config, told) in [
            (json!({"backend": "nftables"}), "key backend: \"nftables\" is neither iptables nor firewalld"),
            (
                json!({"ingressPolicy": "closed"}),
                "key ingressPolicy: \"closed\" is none of open, same-bridge, isolated",
            ),
            (
                json!({"iptablesAdminChainName": long}),
                &format!("key iptablesAdminChainName: \"{long}\" is no name of a chain of iptables"),
            ),
            (
                json!({"iptablesAdminChainName": "A B"}),
                "key iptablesAdminChainName: \"A B\" is no name of a chain of iptables",
            ),
            (
                json!({"iptablesAdminChainName": "CNI-FORWARD"}),
                "key iptablesAdminChainName: CNI-FORWARD is no chain of the administrator's own",
            ),
        ] {
            assert_eq!(read(config), Err((code::INVALID_CONFIG, told.to_owned())));
        }
        assert_eq!(read(json!({"backend": 1})).unwrap_err().0, code::INVALID_CONFIG);
    }
}
