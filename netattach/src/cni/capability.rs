//! Selects the runtime's dynamic values for each plugin: those whose capability the plugin declares.

use super::config::{NetworkList, PluginConf};
use super::json::{Map, Value};

/// The keys of capabilities whose values are objects, in the conventions of CNI.
const KEYS: [(&str, &[&str]); 2] = [
    ("portMappings", &["hostPort", "containerPort", "protocol", "hostIP"]),
    ("bandwidth", &["ingressRate", "ingressBurst", "egressRate", "egressBurst"]),
];

/// A runtime's dynamic values with the keys of the conventions. containerd writes them as its library names its fields
/// (`HostPort`, `IngressRate`), and plugins written in Go take either.
pub fn with_usual_keys(mut requested: Map) -> Map {
    for (capability, keys) in KEYS {
        match requested.get_mut(capability) {
            Some(Value::Object(object)) => rename(object, keys),
            Some(Value::Array(objects)) => {
                objects.iter_mut().filter_map(Value::as_object_mut).for_each(|object| rename(object, keys));
            }
            _ => {}
        }
    }
    requested
}

fn rename(object: &mut Map, keys: &[&str]) {
    for key in keys.iter().filter(|key| !object.contains_key(**key)).copied().collect::<Vec<_>>() {
        let written = object.keys().find(|written| written.eq_ignore_ascii_case(key)).cloned();
        if let Some(value) = written.and_then(|written| object.remove(&written)) {
            object.insert(key.to_owned(), value);
        }
    }
}

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

    #[test]
    fn keys_are_taken_as_containerd_writes_them() {
        let written = json!({
            "portMappings": [
                {"HostPort": 8443, "ContainerPort": 5432, "Protocol": "tcp", "HostIP": ""},
                {"hostPort": 80, "HostPort": 81, "containerPort": 80}
            ],
            "bandwidth": {"IngressRate": 1, "IngressBurst": 2, "EgressRate": 3, "EgressBurst": 4},
            "mac": "02:00:00:00:00:01", "ips": [{"HostPort": 1}]
        });
        let usual = json!({
            "portMappings": [
                {"hostPort": 8443, "containerPort": 5432, "protocol": "tcp", "hostIP": ""},
                {"hostPort": 80, "HostPort": 81, "containerPort": 80}
            ],
            "bandwidth": {"ingressRate": 1, "ingressBurst": 2, "egressRate": 3, "egressBurst": 4},
            "mac": "02:00:00:00:00:01", "ips": [{"HostPort": 1}]
        });
        let Value::Object(written) = written else { panic!("an object") };
        assert_eq!(Value::Object(with_usual_keys(written)), usual);
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
