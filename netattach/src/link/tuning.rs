//! `tuning`, chained: kernel settings and properties of an interface that a plugin before it has made.
//!
//! The keys are those of the plugin of the same name in containernetworking/plugins, `args.cni` included.
//! Unlike there, `runtimeConfig` takes precedence over `args.cni`, as in every other plugin. A sysctl from
//! `args.cni`, which pods fill in, is marked as requested by the pod: the kubelet has a list of the sysctls
//! that pods may request, and `args.cni` must not bypass that list.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{PlanError, Request};
use crate::spec::{Properties, Sysctl, Tune};

/// The plugin type.
pub const KIND: &str = "tuning";

/// Most sysctls of one interface.
const MOST_SETTINGS: usize = 256;

/// Placeholder for the interface in the name of a sysctl.
const INTERFACE: &str = "IFNAME";

/// The keys that the configuration and `args.cni` have in common, except the Ethernet address.
#[derive(Default, Deserialize)]
struct Keys {
    #[serde(default)]
    sysctl: Option<Map<String, Value>>,
    #[serde(default)]
    mtu: Option<u32>,
    #[serde(default)]
    promisc: Option<bool>,
    #[serde(default)]
    allmulti: Option<bool>,
    #[serde(default, rename = "txQLen")]
    queue: Option<u32>,
}

/// Reads the configuration.
///
/// # Errors
/// The error names the key.
pub fn parse(request: &Request<'_>) -> Result<Tune, PlanError> {
    let fixed: Keys = request.read()?;
    let asked = match request.config.get("args").and_then(|args| args.get("cni")) {
        Some(Value::Object(asked)) => crate::cni::json::read_object(asked)?,
        _ => Keys::default(),
    };
    let (of_author, of_pod) = (fixed.sysctl.unwrap_or_default(), asked.sysctl.unwrap_or_default());
    let mut settings = of_author.clone();
    settings.extend(of_pod.clone());
    if settings.len() > MOST_SETTINGS {
        let reason = format!("{} settings, and there may be {MOST_SETTINGS}", settings.len());
        return Err(PlanError::Value { key: "sysctl", reason });
    }
    // A sysctl that the author sets to the same value counts as the author's.
    let is_asked = |key: &str| of_pod.get(key).is_some_and(|value| of_author.get(key) != Some(value));
    let sysctls = settings.iter().map(|(key, value)| {
        let asked = is_asked(key);
        sysctl(key, value, request.ifname).map(|sysctl| Sysctl { asked, ..sysctl })
    });
    // As in the reference plugin, an MTU of 0 counts as absent, and `false` does not switch off what another
    // program has switched on.
    Ok(Tune {
        sysctls: sysctls.collect::<Result<_, _>>()?,
        properties: Properties {
            mac: request.mac()?,
            mtu: asked.mtu.or(fixed.mtu).filter(|mtu| *mtu != 0),
            promisc: asked.promisc.or(fixed.promisc).filter(|on| *on),
            allmulti: asked.allmulti.or(fixed.allmulti),
            queue: asked.queue.or(fixed.queue),
        },
    })
}

/// Parses a sysctl of the pod's namespace. Dots and slashes in its name are equivalent; `IFNAME` stands for
/// the interface, whose own name may contain dots.
fn sysctl(key: &str, value: &Value, ifname: &str) -> Result<Sysctl, PlanError> {
    let wrong = |reason: String| PlanError::Value { key: "sysctl", reason };
    let Value::String(value) = value else {
        return Err(wrong(format!("{key:?}: the value {value} must be a string")));
    };
    if value.contains(['\n', '\0']) {
        return Err(wrong(format!("{key:?}: the value has more than one line")));
    }
    let with_slashes = key.replace('.', "/");
    let parts: Vec<&str> = with_slashes.split('/').filter(|part| !part.is_empty()).collect();
    let Some((&"net", rest)) = parts.split_first().filter(|(_, rest)| !rest.is_empty()) else {
        return Err(wrong(format!("{key:?} is not a setting below net")));
    };
    let path = rest.join("/").replacen(INTERFACE, ifname, 1);
    Ok(Sysctl { key: key.to_owned(), path, value: value.clone(), asked: false })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cni::CniArgs;
    use crate::link::tests::request;

    fn read(config: Value, args: &str) -> Result<Tune, String> {
        let Value::Object(config) = config else { panic!("{config}") };
        let args = CniArgs::parse(args).unwrap();
        let request = Request { ifname: "net.1", ..request(&config, &args) };
        parse(&request).map_err(|error| crate::error_chain::Chain(&error).to_string())
    }

    fn sysctl(key: &str, path: &str, value: &str) -> Sysctl {
        Sysctl { key: key.into(), path: path.into(), value: value.into(), asked: false }
    }

    #[test]
    fn each_key_is_read_and_args_go_over_it() {
        assert_eq!(read(json!({"type": "tuning"}), ""), Ok(Tune::default()));
        let all = json!({
            "sysctl": {"net.ipv4.conf.IFNAME.log_martians": "1", "net/core/somaxconn": "500"},
            "mac": "02:00:00:00:00:01", "mtu": 1400, "promisc": true, "allmulti": false, "txQLen": 0
        });
        let read_all = Tune {
            sysctls: vec![
                sysctl("net.ipv4.conf.IFNAME.log_martians", "ipv4/conf/net.1/log_martians", "1"),
                sysctl("net/core/somaxconn", "core/somaxconn", "500"),
            ],
            properties: Properties {
                mac: "02:00:00:00:00:01".parse().ok(),
                mtu: Some(1400),
                promisc: Some(true),
                allmulti: Some(false),
                queue: Some(0),
            },
        };
        assert_eq!(read(all.clone(), ""), Ok(read_all.clone()));
        let mut asked = all.clone();
        asked["args"] = json!({"cni": {
            "sysctl": {"net/core/somaxconn": "600", "net.ipv4.conf.IFNAME.log_martians": "1"}, "mtu": 1300, "promisc": false, "allmulti": true, "txQLen": 7,
            "mac": "02:00:00:00:00:03"
        }});
        let mut expected = read_all.clone();
        expected.sysctls[1] = Sysctl { asked: true, ..sysctl("net/core/somaxconn", "core/somaxconn", "600") };
        expected.properties = Properties {
            mac: "02:00:00:00:00:03".parse().ok(),
            mtu: Some(1300),
            promisc: None,
            allmulti: Some(true),
            queue: Some(7),
        };
        assert_eq!(read(asked.clone(), "MAC=02:00:00:00:00:02"), Ok(expected.clone()));
        asked["runtimeConfig"] = json!({"mac": "02:00:00:00:00:04"});
        expected.properties.mac = "02:00:00:00:00:04".parse().ok();
        assert_eq!(read(asked, "MAC=02:00:00:00:00:02"), Ok(expected));
        let mut none = all;
        for key in ["sysctl", "mac", "mtu", "promisc", "allmulti", "txQLen"] {
            none[key] = Value::Null;
        }
        assert_eq!(read(none, ""), Ok(Tune::default()));
        assert_eq!(read(json!({"mtu": 0, "promisc": false, "mac": ""}), ""), Ok(Tune::default()));
    }

    #[test]
    fn what_is_no_setting_of_the_network_is_refused() {
        let rows = [
            (
                json!({"sysctl": {"kernel.hostname": "a"}}),
                r#"key sysctl: "kernel.hostname" is not a setting below net"#,
            ),
            (json!({"sysctl": {"net": "a"}}), r#"key sysctl: "net" is not a setting below net"#),
            (json!({"sysctl": {"": "a"}}), r#"key sysctl: "" is not a setting below net"#),
            (
                json!({"sysctl": {"net.core.somaxconn": 5}}),
                r#"key sysctl: "net.core.somaxconn": the value 5 must be a string"#,
            ),
            (
                json!({"sysctl": {"net.core.somaxconn": "5\n6"}}),
                r#"key sysctl: "net.core.somaxconn": the value has more than one line"#,
            ),
            (
                json!({"mac": "01:00:00:00:00:00"}),
                r#"key mac: "01:00:00:00:00:00" is not a unicast Ethernet address such as 02:00:00:00:00:01"#,
            ),
        ];
        for (config, said) in rows {
            assert_eq!(read(config.clone(), ""), Err(said.to_owned()), "{config}");
        }
        // Dots are converted to slashes, so `..` cannot lead to a parent directory.
        let up = read(json!({"sysctl": {"net/../kernel/hostname": "a"}}), "").unwrap();
        assert_eq!(up.sysctls[0].path, "kernel/hostname");
        assert!(read(json!({"mtu": "big"}), "").unwrap_err().contains("mtu"));
    }
}
