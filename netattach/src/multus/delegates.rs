//! Multus's `delegates`: networks within its own configuration, which netattach expects in files.

use serde_json::json;

use super::imported::{Fate, Row, Wanted, insert, text};
use crate::cni::{Map, Value};

/// Imports Multus's `delegates`: the first is the default network of every pod, the others are further
/// networks of every pod. Returns the files to write.
pub(super) fn import(
    keys: &Map,
    wanted: Wanted<'_>,
    settings: &mut Map,
    rows: &mut Vec<Row>,
) -> Vec<(String, Value)> {
    let Some(value) = keys.get("delegates") else { return Vec::new() };
    let mut row = |key: &str, value: &Value, fate: Fate| {
        rows.push(Row { key: key.to_owned(), value: Some(value.clone()), fate });
    };
    let all = match value.as_array() {
        Some(all) if !all.is_empty() => all,
        _ => {
            row("delegates", value, Fate::NotNeeded("not set"));
            return Vec::new();
        }
    };
    if text(keys, "clusterNetwork").is_some() {
        row("delegates", value, Fate::NotNeeded("Multus ignores it beside clusterNetwork"));
        return Vec::new();
    }
    let Some(directory) = wanted.directory else {
        let what = "--write DIR writes the first into a file, for defaultNetwork, and the others as definitions, to be selected in \
                    pods' annotations";
        row("delegates", value, Fate::NoEquivalent(what));
        return Vec::new();
    };
    let mut files = Vec::new();
    for (index, delegate) in all.iter().enumerate() {
        let mut delegate = delegate.clone();
        if let Value::Object(map) = &mut delegate {
            // Multus fills these in.
            for key in ["cniVersion", "name"] {
                if let Some(value) = keys.get(key).filter(|_| !map.contains_key(key)) {
                    map.insert(key.to_owned(), value.clone());
                }
            }
        }
        if index == 0 {
            let end = if delegate.get("plugins").is_some() { "conflist" } else { "conf" };
            let file = format!("default-network.{end}");
            insert(settings, "defaultNetwork", format!("{}/{file}", directory.trim_end_matches('/')).into());
            let note = "a file that the agent has to find there: in a pod, below /etc/cni of its node";
            row("delegates[0]", &delegate, Fate::Becomes { setting: "defaultNetwork", note });
            files.push((file, delegate));
            continue;
        }
        let what = "a definition in a file, for kubectl apply: select it in pods' annotations";
        row(&format!("delegates[{index}]"), &delegate, Fate::NoEquivalent(what));
        let definition = json!({
            "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
            "metadata": {"name": format!("delegate-{index}"), "namespace": "kube-system"},
            "spec": {"config": delegate.to_string()},
        });
        files.push((format!("delegate-{index}.yaml"), definition));
    }
    files
}

#[cfg(test)]
mod tests {
    use super::super::config::Configuration;
    use super::super::imported::Imported;
    use super::super::mapping;
    use super::*;

    #[test]
    fn delegates_become_files() {
        let conf = json!({"type": "multus", "name": "multus-net", "cniVersion": "0.3.1",
            "delegates": [{"type": "bridge"}, {"cniVersion": "1.0.0", "name": "lan", "plugins": [{"type": "macvlan"}]}]});
        let configuration = Configuration::of_cni(conf.to_string().as_bytes()).unwrap();
        let fates = |imported: &Imported| {
            let rows = imported.rows.iter().filter(|row| row.key.starts_with("delegates"));
            rows.map(|row| (row.key.clone(), matches!(row.fate, Fate::NoEquivalent(_)))).collect::<Vec<_>>()
        };
        let unwritten = mapping::import(&configuration, Wanted::default());
        assert_eq!((fates(&unwritten), unwritten.files), (vec![("delegates".to_owned(), true)], vec![]));
        let written =
            mapping::import(&configuration, Wanted { directory: Some("/etc/netattach/"), source: None });
        assert_eq!(fates(&written), [("delegates[0]".to_owned(), false), ("delegates[1]".to_owned(), true)]);
        assert_eq!(written.settings["defaultNetwork"], "/etc/netattach/default-network.conf");
        let first = json!({"type": "bridge", "cniVersion": "0.3.1", "name": "multus-net"});
        assert_eq!(written.files[0], ("default-network.conf".to_owned(), first));
        let (name, definition) = &written.files[1];
        assert_eq!(
            (name.as_str(), &definition["kind"]),
            ("delegate-1.yaml", &json!("NetworkAttachmentDefinition"))
        );
        let config: Value = serde_json::from_str(definition["spec"]["config"].as_str().unwrap()).unwrap();
        assert_eq!(config["plugins"][0]["type"], "macvlan");
    }
}
