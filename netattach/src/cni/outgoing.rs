//! Determines which plugins of a list a verb calls, in which order, and the configuration each receives on stdin.

use super::capability;
use super::config::{NetworkList, PluginConf};
use super::error::{CniError, code};
use super::json::{Map, Value};
use super::request::{AttachmentId, Command};

/// The keys under which GC receives the attachments in use. The second is a mistake in the specification's text that
/// plugins have come to rely on.
pub const VALID_ATTACHMENTS: [&str; 2] = ["cni.dev/valid-attachments", "cni.dev/attachments"];

/// The plugins that a verb calls, in order: DEL runs backwards. Empty if the verb succeeds without calling a plugin:
/// CHECK and GC that the list disables, GC and STATUS on a list older than 1.1.0.
///
/// # Errors
/// Code 1 for CHECK on a list older than 0.4.0.
pub fn plugins_called(list: &NetworkList, command: Command) -> Result<Vec<&PluginConf>, CniError> {
    let has_verb = match command {
        Command::Add | Command::Version => true,
        Command::Del => return Ok(list.plugins.iter().rev().collect()),
        Command::Check if !list.version.has_check() => {
            let msg = format!("configuration version {} does not support the CHECK command", list.version);
            return Err(CniError::new(code::INCOMPATIBLE_VERSION, msg));
        }
        Command::Check => !list.disable_check,
        Command::Gc => list.version.has_gc_and_status() && !list.disable_gc,
        Command::Status => list.version.has_gc_and_status(),
    };
    Ok(if has_verb { list.plugins.iter().collect() } else { Vec::new() })
}

/// The configuration for ADD, CHECK and DEL: the plugin's own keys, the list's name and version, the capabilities the
/// plugin declares, and `prev_result` if there is one.
pub fn request_config(
    list: &NetworkList,
    plugin: &PluginConf,
    prev_result: Option<&Value>,
    capability_args: &Map,
) -> Map {
    let mut config = base(list, plugin);
    let runtime_config = capability::runtime_config(plugin, capability_args);
    if !runtime_config.is_empty() {
        config.insert("runtimeConfig".into(), Value::Object(runtime_config));
    }
    if let Some(result) = prev_result {
        config.insert("prevResult".into(), result.clone());
    }
    config
}

/// The configuration for GC. `None` omits the keys, which a plugin reads as "unknown"; an empty slice means that
/// nothing is in use.
pub fn gc_config(list: &NetworkList, plugin: &PluginConf, in_use: Option<&[AttachmentId]>) -> Map {
    let mut config = base(list, plugin);
    if let Some(attachments) = in_use {
        insert_in_use(&mut config, attachments);
    }
    config
}

/// Sets the attachments in use under both keys.
pub fn insert_in_use(config: &mut Map, attachments: &[AttachmentId]) {
    let entries: Value = attachments.iter().map(AttachmentId::to_value).collect();
    for key in VALID_ATTACHMENTS {
        config.insert(key.into(), entries.clone());
    }
}

/// The configuration for STATUS.
pub fn status_config(list: &NetworkList, plugin: &PluginConf) -> Map {
    base(list, plugin)
}

/// The plugin's keys with the list's name and version. A `prevResult` from a file is dropped: it describes no
/// attachment (REQ-14).
fn base(list: &NetworkList, plugin: &PluginConf) -> Map {
    let mut config = plugin.raw().clone();
    config.shift_remove("prevResult");
    config.insert("name".into(), list.name.as_str().into());
    config.insert("cniVersion".into(), list.version.as_str().into());
    config
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn list(version: &str, plugin: Value) -> NetworkList {
        let value = json!({"cniVersion": version, "name": "n", "plugins": [plugin]});
        NetworkList::parse(value.to_string().as_bytes()).unwrap()
    }

    fn map(value: Value) -> Map {
        value.as_object().unwrap().clone()
    }

    /// Rows: ADD-01, DEL-01, CHK-05, CHK-02, GCC-05, GCC-01, VER-25, STA-02, STA-01, CHK-01, VER-24.
    #[test]
    fn each_verb_calls_the_plugins_it_must_in_its_order() {
        let called = |version: &str, extra: Value, command: Command| {
            let mut value = json!({"cniVersion": version, "name": "n",
                "plugins": [{"type": "a"}, {"type": "b"}, {"type": "c"}]});
            value.as_object_mut().unwrap().extend(map(extra));
            let list = NetworkList::parse(value.to_string().as_bytes()).unwrap();
            let plugins = plugins_called(&list, command);
            plugins.map(|plugins| plugins.iter().map(|plugin| plugin.plugin_type()).collect::<String>())
        };
        for (version, extra, command, expected) in [
            ("0.1.0", json!({}), Command::Add, "abc"),
            ("0.1.0", json!({}), Command::Del, "cba"),
            ("0.4.0", json!({}), Command::Check, "abc"),
            ("0.4.0", json!({"disableCheck": true}), Command::Check, ""),
            ("1.1.0", json!({}), Command::Gc, "abc"),
            ("1.1.0", json!({"disableGC": true}), Command::Gc, ""),
            ("1.0.0", json!({}), Command::Gc, ""),
            ("1.1.0", json!({}), Command::Status, "abc"),
            ("1.0.0", json!({}), Command::Status, ""),
        ] {
            assert_eq!(called(version, extra, command).unwrap(), expected, "{command} {version}");
        }
        assert_eq!(
            called("0.3.1", json!({}), Command::Check),
            Err(CniError::new(1, "configuration version 0.3.1 does not support the CHECK command"))
        );
    }

    /// Rows: REQ-01, REQ-02, REQ-05, REQ-08, VER-22.
    #[test]
    fn name_and_version_of_the_list_replace_the_plugins_own() {
        let list = list(
            "0.4.0",
            json!({"type": "a", "name": "other", "cniVersion": "0.1.0", "x": [1], "capabilities": {"mac": true},
                   "prevResult": {"cniVersion": "0.4.0"}}),
        );
        assert_eq!(
            request_config(&list, &list.plugins[0], None, &Map::new()),
            map(
                json!({"type": "a", "name": "n", "cniVersion": "0.4.0", "x": [1], "capabilities": {"mac": true}})
            )
        );
    }

    /// Rows: REQ-03, REQ-06.
    #[test]
    fn previous_result_and_runtime_config_are_added() {
        let list =
            list("1.0.0", json!({"type": "a", "capabilities": {"mac": true}, "runtimeConfig": {"ips": []}}));
        let prev = json!({"cniVersion": "1.0.0", "unknown": true});
        assert_eq!(
            request_config(&list, &list.plugins[0], Some(&prev), &map(json!({"mac": "m", "ips": []}))),
            map(json!({
                "type": "a", "capabilities": {"mac": true}, "runtimeConfig": {"mac": "m"}, "name": "n",
                "cniVersion": "1.0.0", "prevResult": {"cniVersion": "1.0.0", "unknown": true},
            }))
        );
    }

    /// Rows: REQ-07.
    #[test]
    fn a_static_runtime_config_passes_when_nothing_is_requested() {
        let list = list("1.0.0", json!({"type": "a", "runtimeConfig": {"ips": []}}));
        let config = request_config(&list, &list.plugins[0], None, &map(json!({"mac": "m"})));
        assert_eq!(config["runtimeConfig"], json!({"ips": []}));
    }

    /// Rows: REQ-09, REQ-10, REQ-11, REQ-12.
    #[test]
    fn gc_lists_attachments_under_both_keys() {
        let list = list("1.1.0", json!({"type": "a", "capabilities": {"mac": true}}));
        let id = AttachmentId { container_id: "c".into(), ifname: "eth0".into() };
        let entries = json!([{"containerID": "c", "ifname": "eth0"}]);
        assert_eq!(
            gc_config(&list, &list.plugins[0], Some(&[id])),
            map(json!({
                "type": "a", "capabilities": {"mac": true}, "name": "n", "cniVersion": "1.1.0",
                "cni.dev/valid-attachments": entries, "cni.dev/attachments": entries,
            }))
        );
        let bare =
            map(json!({"type": "a", "capabilities": {"mac": true}, "name": "n", "cniVersion": "1.1.0"}));
        assert_eq!(gc_config(&list, &list.plugins[0], None), bare);
        assert_eq!(status_config(&list, &list.plugins[0]), bare);
    }
}
