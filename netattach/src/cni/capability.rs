//! Selects the runtime's dynamic values for each plugin: those whose capability the plugin declares.

use super::config::{NetworkList, PluginConf};
use super::json::Map;

/// The `runtimeConfig` of one plugin: the entries of `requested` whose capability the plugin declares. If it is empty,
/// the key is not written at all.
pub fn runtime_config(plugin: &PluginConf, requested: &Map) -> Map {
    plugin
        .capabilities()
        .filter_map(|capability| Some((capability.to_owned(), requested.get(capability)?.clone())))
        .collect()
}

/// The requested capabilities that no plugin of the list declares, in the order requested. The
/// specification lets a runtime drop them silently; netattach fails the attachment instead.
pub fn undeclared<'a>(list: &NetworkList, requested: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    requested
        .into_iter()
        .filter(|wanted| {
            !list.plugins.iter().any(|plugin| plugin.capabilities().any(|declared| declared == *wanted))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn list() -> NetworkList {
        let plugins = json!([
            {"type": "a", "capabilities": {"mac": true, "ips": false}},
            {"type": "b", "capabilities": {"portMappings": true, "mac": true}},
        ]);
        NetworkList::parse(json!({"name": "n", "plugins": plugins}).to_string().as_bytes()).unwrap()
    }

    fn requested() -> Map {
        json!({"mac": "02:00:00:00:00:01", "ips": ["10.0.0.1/8"], "portMappings": []})
            .as_object()
            .unwrap()
            .clone()
    }

    /// Rows: REQ-06, REQ-07.
    #[test]
    fn a_plugin_receives_only_what_it_declares_as_true() {
        let list = list();
        assert_eq!(
            runtime_config(&list.plugins[0], &requested()),
            json!({"mac": "02:00:00:00:00:01"}).as_object().unwrap().clone()
        );
        assert_eq!(
            runtime_config(&list.plugins[1], &requested()),
            json!({"portMappings": [], "mac": "02:00:00:00:00:01"}).as_object().unwrap().clone()
        );
        assert_eq!(runtime_config(&list.plugins[0], &Map::new()), Map::new());
    }

    #[test]
    fn a_capability_that_nobody_declares_is_reported() {
        assert_eq!(undeclared(&list(), ["ips", "mac", "deviceID"]), ["ips", "deviceID"]);
        assert_eq!(undeclared(&list(), ["mac", "portMappings"]), [""; 0]);
    }
}
