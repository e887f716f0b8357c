//! Discovery documents and the version.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::kinds::{ALL, Kind};
use super::query::Discovery;
use super::state::Shared;

/// `/version`.
pub(super) fn version(shared: &Shared) -> Value {
    let minor = shared.settings.minor;
    json!({
        "major": "1", "minor": minor.to_string(), "gitVersion": format!("v1.{minor}.0"), "gitCommit": "0",
        "gitTreeState": "clean", "buildDate": "2026-01-01T00:00:00Z", "goVersion": "go1.24",
        "compiler": "gc", "platform": "linux/amd64"
    })
}

/// A discovery document; `None`: it is not served.
pub(super) fn document(shared: &Shared, document: &Discovery) -> Option<Value> {
    match document {
        Discovery::CoreVersions => {
            Some(json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}))
        }
        Discovery::Groups => Some(groups(shared)),
        Discovery::Resources { group, version } => resources(shared, group, version),
    }
}

fn served_versions(shared: &Shared, kind: &Kind) -> Vec<&'static str> {
    kind.versions.iter().copied().filter(|version| shared.is_served(kind, version)).collect()
}

fn groups(shared: &Shared) -> Value {
    let names: BTreeSet<&str> = ALL.iter().map(|kind| kind.group).filter(|group| !group.is_empty()).collect();
    let group = |name: &str| {
        let versions: BTreeSet<&str> = ALL
            .iter()
            .filter(|kind| kind.group == name)
            .flat_map(|kind| served_versions(shared, kind))
            .collect();
        let versions: Vec<Value> = versions
            .into_iter()
            .map(|version| json!({"groupVersion": format!("{name}/{version}"), "version": version}))
            .collect();
        let preferred = versions.first()?.clone();
        Some(json!({"name": name, "versions": versions, "preferredVersion": preferred}))
    };
    let groups: Vec<Value> = names.into_iter().filter_map(group).collect();
    json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
}

fn resources(shared: &Shared, group: &str, version: &str) -> Option<Value> {
    let served: Vec<Value> = ALL
        .iter()
        .filter(|kind| kind.group == group && served_versions(shared, kind).contains(&version))
        .flat_map(|kind| kind.discovery())
        .collect();
    let name = if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
    (!served.is_empty()).then(
        || json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": name, "resources": served}),
    )
}
