//! Maps each key of Multus's configuration to netattach's settings.

use serde_json::json;

use super::config::Configuration;
use super::imported::{Fate, Imported, Row, Wanted, insert, text};
use super::{STATE_DIRECTORY, delegates};
use crate::cni::{Map, Value};

/// Stands in the place of a key in the row of pods that Multus has attached to parents of macvlans.
const MACVLANS: &str = "(its macvlans)";

/// Maps a configuration of Multus.
pub fn import(configuration: &Configuration, wanted: Wanted<'_>) -> Imported {
    let keys = &configuration.keys;
    let mut settings = Map::new();
    match wanted.source {
        Some(directory) => insert(&mut settings, "source", directory.into()),
        None => insert(&mut settings, "kubernetes", json!({"enabled": true})),
    }
    // With Multus, definitions of the same name share their pools, and live pods have addresses from them.
    settings.insert("separatePools".into(), false.into());
    // Consumers of the status on this node expect Multus's format.
    settings.insert("networkStatus".into(), json!({"everyInterface": true, "multusKeys": true}));
    let mut rows = Vec::new();
    let files = delegates::import(keys, wanted, &mut settings, &mut rows);
    for (key, value) in keys.iter().filter(|(key, _)| !matches!(key.as_str(), "delegates" | "kubeconfig")) {
        let fate = fate(key, value, keys);
        if let Fate::Becomes { setting, .. } = fate {
            insert(&mut settings, setting, setting_of(key, value, keys));
        }
        rows.push(Row { key: key.clone(), value: Some(value.clone()), fate });
    }
    rows.push(Row {
        key: "kubeconfig".into(),
        value: keys.get("kubeconfig").cloned(),
        fate: fate_of_server(wanted, keys.get("kubeconfig").is_some_and(is_set)),
    });
    for (key, setting, default) in [
        ("confDir", "cniConfDir", "/etc/cni/multus/net.d"),
        ("cniDir", "multusStateDir", STATE_DIRECTORY),
        ("binDir", "cniBinDirs", "/opt/cni/bin"),
        ("cniConfigDir", "cniConf", "/etc/cni/net.d"),
    ] {
        if !keys.contains_key(key) {
            insert(&mut settings, setting, setting_of(key, &default.into(), keys));
            rows.push(Row {
                key: key.into(),
                value: None,
                fate: Fate::Becomes { setting, note: "the default of Multus" },
            });
        }
    }
    // Otherwise the first macvlan of netattach on a parent ends the network of Multus's macvlans there.
    insert(&mut settings, "otherMacvlans", "pass".into());
    rows.push(Row {
        key: MACVLANS.into(),
        value: None,
        fate: Fate::Becomes {
            setting: "otherMacvlans",
            note: "Multus's macvlans keep their network beside netattach's; set back to the default, drop, when no \
                   Multus pod is left",
        },
    });
    Imported { rows, settings, files }
}

/// Maps the API server, which Multus uses whether or not a file configures it.
fn fate_of_server(wanted: Wanted<'_>, has_file: bool) -> Fate {
    match (wanted.source, has_file) {
        (Some(_), _) => Fate::NoEquivalent(
            "the API server gave definitions, pods with their annotations, namespaces and policies: with --source they are \
             manifests that somebody writes, and no network-status reaches the pods' annotations",
        ),
        (None, true) => Fate::Becomes {
            setting: "kubernetes",
            note: "by the service account of the agent's pod; on a node itself add kubeconfig: a file of netattach's own, as this one \
                   has Multus's rights and goes with it",
        },
        (None, false) => Fate::Becomes {
            setting: "kubernetes",
            note: "Multus's pod asks the API server by its service account, and the agent's by its own; on a node itself add kubeconfig",
        },
    }
}

fn is_set(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(map) => map.get("enabled").is_none_or(is_set) && !map.is_empty(),
        Value::Bool(true) | Value::Number(_) => true,
    }
}

/// The value of the setting that a key maps to.
fn setting_of(key: &str, value: &Value, keys: &Map) -> Value {
    let path = |value: &Value| match value.as_str() {
        Some(path) => Value::from(on_the_node(path)),
        None => value.clone(),
    };
    match key {
        "binDir" => json!([path(value)]),
        "cniConfigDir" => json!({"dir": path(value)}),
        "clusterNetwork" | "confDir" | "cniDir" => path(value),
        "multusAutoconfigDir" => match (path(value), text(keys, "multusMasterCNI")) {
            (Value::String(directory), Some(file)) => {
                format!("{}/{file}", directory.trim_end_matches('/')).into()
            }
            (directory, _) => directory,
        },
        "globalNamespaces" => value
            .as_str()
            .unwrap_or_default()
            .split(',')
            .map(str::trim)
            .filter(|namespace| !namespace.is_empty())
            .collect(),
        _ => value.clone(),
    }
}

/// Translates a path in Multus's pod to the path on the node: the manifests mount the node's directories below these.
fn on_the_node(path: &str) -> &str {
    ["/hostroot", "/host"]
        .into_iter()
        .find_map(|mount| path.strip_prefix(mount).filter(|rest| rest.starts_with('/')))
        .unwrap_or(path)
}

fn becomes(setting: &'static str) -> Fate {
    Fate::Becomes { setting, note: "" }
}

fn fate(key: &str, value: &Value, keys: &Map) -> Fate {
    use Fate::{Becomes, NoEquivalent, NotNeeded};
    if let Some(fate) = fate_of_networks(key, keys) {
        return fate;
    }
    // A key that is off or empty has no effect.
    let unless_set = |fate: Fate| if is_set(value) { fate } else { NotNeeded("not set") };
    match key {
        "confDir" => becomes("cniConfDir"),
        "cniDir" => {
            Becomes { setting: "multusStateDir", note: "read for the DEL of pods that Multus attached" }
        }
        "binDir" => becomes("cniBinDirs"),
        "namespaceIsolation" => {
            Becomes { setting: "namespaceIsolation", note: "it covers the default-network annotation too" }
        }
        "globalNamespaces" => unless_set(becomes("globalNamespaces")),
        "multusNamespace" => unless_set(becomes("defaultNetworkNamespace")),
        "systemNamespaces" => NotNeeded("it only exempts from defaultNetworks"),
        "cniVersion" | "name" => {
            NotNeeded("belongs to the runtime's configuration, which names netattach instead")
        }
        "capabilities" => {
            NotNeeded("the runtime's configuration of netattach declares those of the default network")
        }
        "prevResult" | "runtimeConfig" => NotNeeded("belongs to a call"),
        "auxiliaryCNIChainName" => {
            unless_set(NoEquivalent("put the plugins into the default network's list"))
        }
        "readinessindicatorfile" => {
            unless_set(NotNeeded("ADD fails with code 11 while the default network cannot be attached"))
        }
        "retryDeleteOnError" => NotNeeded("a record is always kept until DEL has succeeded"),
        "logFile" | "logToStderr" | "logOptions" => {
            NotNeeded("the log goes to standard error, for the service manager to keep")
        }
        "logLevel" => NotNeeded("NETATTACH_LOG=debug, info, warn or error in the agent's environment"),
        _ => fate_of_daemon(key, value),
    }
}

/// Keys that apply to the networks of every pod.
fn fate_of_networks(key: &str, keys: &Map) -> Option<Fate> {
    use Fate::{Becomes, NoEquivalent, NotNeeded};
    let has_cluster = text(keys, "clusterNetwork").is_some();
    let set = keys.get(key).is_some_and(is_set);
    Some(match key {
        "clusterNetwork" | "defaultNetworks" | "multusAutoconfigDir" if !set => NotNeeded("not set"),
        "clusterNetwork" => becomes("defaultNetwork"),
        "defaultNetworks" => NoEquivalent("select them in pods' annotations"),
        "multusAutoconfigDir" if has_cluster => NotNeeded("clusterNetwork says which network it is"),
        "multusAutoconfigDir" => Becomes {
            setting: "defaultNetwork",
            note: "the first configuration there that is not netattach's own; move that of Multus away",
        },
        "multusMasterCNI" => NotNeeded("part of defaultNetwork"),
        _ => return None,
    })
}

/// Keys of the daemon only.
fn fate_of_daemon(key: &str, value: &Value) -> Fate {
    use Fate::{NoEquivalent, NotNeeded, Unknown};
    let unless_set = |fate: Fate| if is_set(value) { fate } else { NotNeeded("not set") };
    match key {
        "socketDir" | "daemonSocketDir" => NotNeeded(
            "the agent's socket is in runDir; callers of /delegate use netattachctl attach and detach",
        ),
        "chrootDir" => unless_set(Fate::Else(
            "in a cluster deploy/components/executed-plugins (helm: executedPlugins.enabled), which has plugins started in the \
             node's root directory as Multus does; nothing on a node itself",
        )),
        "connectionLimit" => NotNeeded("at most 256 connections are served at a time"),
        "metricsPort" => unless_set(Fate::Else(
            "metrics.listen, as in deploy/with-metrics (helm: metrics.enabled): at port 10475, which the probes ask, and under names \
             of netattach's own (docs/metrics.md)",
        )),
        "enablePprof" => unless_set(NoEquivalent("leave it out: there is no profile to ask for")),
        "perNodeCertificate" => {
            unless_set(NotNeeded("the agent's token is of its pod, and its writes are bound to its node"))
        }
        "cniConfigDir" => {
            Fate::Becomes { setting: "cniConf", note: "the agent writes its own configuration there" }
        }
        "multusConfigFile" | "forceCNIVersion" | "overrideNetworkName" | "cleanupConfigOnExit" => {
            NotNeeded("the agent writes its configuration for the runtime itself, and it stays")
        }
        _ => Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn imported(cni: Value, daemon: Option<Value>) -> Imported {
        let mut configuration = Configuration::of_cni(cni.to_string().as_bytes()).unwrap();
        if let Some(daemon) = daemon {
            configuration.overlay(daemon.to_string().as_bytes()).unwrap();
        }
        import(&configuration, Wanted::default())
    }

    #[test]
    fn a_thin_configuration_becomes_settings_and_keys_without_equivalent_are_listed() {
        let imported = imported(
            json!({"cniVersion": "0.3.1", "name": "multus-cni-network", "type": "multus",
                "clusterNetwork": "default", "namespaceIsolation": true, "globalNamespaces": "default, ops",
                "kubeconfig": "/etc/cni/net.d/multus.d/multus.kubeconfig", "defaultNetworks": ["side"],
                "multusNamespace": "net", "logLevel": "verbose", "colour": "red"}),
            None,
        );
        assert!(!imported.is_complete());
        assert_eq!(
            Value::Object(imported.settings.clone()),
            json!({
                "kubernetes": {"enabled": true}, "separatePools": false,
                "networkStatus": {"everyInterface": true, "multusKeys": true}, "defaultNetwork": "default", "namespaceIsolation": true,
                "globalNamespaces": ["default", "ops"], "defaultNetworkNamespace": "net",
                "cniConfDir": "/etc/cni/multus/net.d", "multusStateDir": "/var/lib/cni/multus",
                "cniBinDirs": ["/opt/cni/bin"], "cniConf": {"dir": "/etc/cni/net.d"}, "otherMacvlans": "pass",
            })
        );
        let lost: Vec<&str> = imported
            .rows
            .iter()
            .filter(|row| matches!(row.fate, Fate::NoEquivalent(_) | Fate::Unknown))
            .map(|row| row.key.as_str())
            .collect();
        assert_eq!(lost, ["defaultNetworks", "colour"]);
    }

    #[test]
    fn the_daemons_file_goes_over_and_its_paths_are_those_of_the_node() {
        let imported = imported(
            json!({"cniVersion": "1.0.0", "name": "multus", "plugins": [{"type": "multus-shim", "binDir": "/a"}]}),
            Some(json!({"binDir": "/host/opt/cni/bin", "multusAutoconfigDir": "/host/etc/cni/net.d",
                "multusMasterCNI": "10-calico.conflist", "metricsPort": null, "kubeconfig": "",
                "perNodeCertificate": {"enabled": false}, "socketDir": "/host/run/multus/"})),
        );
        assert!(imported.is_complete(), "{:?}", imported.rows);
        assert_eq!(imported.settings["defaultNetwork"], json!("/etc/cni/net.d/10-calico.conflist"));
        assert_eq!(imported.settings["cniBinDirs"], json!(["/opt/cni/bin"]));
    }

    /// What the quick start of the thick plugin writes.
    #[test]
    fn the_thick_quick_start_says_that_the_api_server_is_asked_and_without_it_what_is_lost() {
        let mut configuration = Configuration::of_cni(
            json!({"capabilities": {"portMappings": true}, "cniVersion": "0.3.1", "logLevel": "verbose", "logToStderr": true,
                "name": "multus-cni-network", "clusterNetwork": "/host/etc/cni/net.d/10-flannel.conflist", "type": "multus-shim"})
            .to_string()
            .as_bytes(),
        )
        .unwrap();
        configuration
            .overlay(
                json!({"chrootDir": "/hostroot", "metricsPort": 9091, "cniVersion": "0.3.1", "logLevel": "verbose", "logToStderr": true,
                    "cniConfigDir": "/host/etc/cni/net.d", "multusAutoconfigDir": "/host/etc/cni/net.d",
                    "multusConfigFile": "auto", "socketDir": "/host/run/multus/"})
                .to_string()
                .as_bytes(),
            )
            .unwrap();
        let imported = import(&configuration, Wanted::default());
        assert!(imported.is_complete(), "{:?}", imported.rows);
        assert_eq!(imported.settings["kubernetes"], json!({"enabled": true}));
        assert_eq!(imported.settings["cniConf"], json!({"dir": "/etc/cni/net.d"}));
        assert_eq!(imported.settings["defaultNetwork"], json!("/etc/cni/net.d/10-flannel.conflist"));
        // The settings are for a node and for a cluster, where the component adds its own.
        assert_eq!((imported.settings.get("delegation"), imported.settings.get("metrics")), (None, None));
        let said = |key: &str| imported.rows.iter().find(|row| row.key == key).map(|row| row.fate.clone());
        let chroot = "in a cluster deploy/components/executed-plugins (helm: executedPlugins.enabled), which has plugins started in \
                      the node's root directory as Multus does; nothing on a node itself";
        assert_eq!(said("chrootDir"), Some(Fate::Else(chroot)));
        let metrics = "metrics.listen, as in deploy/with-metrics (helm: metrics.enabled): at port 10475, which the probes ask, and \
                       under names of netattach's own (docs/metrics.md)";
        assert_eq!(said("metricsPort"), Some(Fate::Else(metrics)));

        let alone = import(&configuration, Wanted { source: Some("/m"), directory: None });
        assert_eq!((alone.settings.get("kubernetes"), &alone.settings["source"]), (None, &json!("/m")));
        let lost: Vec<&Row> =
            alone.rows.iter().filter(|row| matches!(row.fate, Fate::NoEquivalent(_))).collect();
        assert_eq!(lost.iter().map(|row| row.key.as_str()).collect::<Vec<_>>(), ["kubeconfig"]);
    }

    #[test]
    fn a_configuration_of_another_plugin_is_refused() {
        for (text, message) in [
            ("[]", "not a JSON object"),
            (r#"{"type": "bridge"}"#, "key type: expected multus or multus-shim, found \"bridge\""),
            (
                r#"{"plugins": [{"type": "bridge"}]}"#,
                "key type: expected multus or multus-shim, found a list without it",
            ),
        ] {
            assert_eq!(Configuration::of_cni(text.as_bytes()).unwrap_err().to_string(), message);
        }
    }
}
