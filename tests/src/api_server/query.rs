//! Parses a request: its path, its query and its verb.

use std::collections::BTreeMap;

use super::kinds::{ALL, Kind};

/// The verb of a request, in the terms of the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Verb {
    /// GET of one object.
    Get,
    /// GET of a collection.
    List,
    /// GET of a collection with `watch`.
    Watch,
    /// POST.
    Create,
    /// PUT.
    Update,
    /// PATCH.
    Patch,
    /// DELETE.
    Delete,
    /// Anything that is not about objects: discovery, version, health.
    Other,
}

/// Parameters of the query.
pub(super) type Query = BTreeMap<String, String>;

/// The target of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Target {
    Objects(ObjectPath),
    Discovery(Discovery),
    Health,
    Version,
    /// Questions about the client's own rights.
    Rights,
    /// Not served.
    Unknown,
}

/// A path of the API that names objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ObjectPath {
    pub(super) kind: &'static Kind,
    pub(super) version: &'static str,
    pub(super) namespace: Option<String>,
    pub(super) name: Option<String>,
    pub(super) subresource: Option<String>,
}

/// A discovery document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Discovery {
    CoreVersions,
    Groups,
    Resources { group: String, version: String },
}

/// Returns the target of a path.
pub(super) fn target(path: &str) -> Target {
    let segments: Vec<String> = path
        .split('/')
        .filter(|segment| !segment.is_empty())
        .map(|segment| decoded(segment, false))
        .collect();
    let words: Vec<&str> = segments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["version"] => Target::Version,
        ["readyz" | "livez" | "healthz", ..] => Target::Health,
        ["api"] => Target::Discovery(Discovery::CoreVersions),
        ["apis"] => Target::Discovery(Discovery::Groups),
        ["api", version] => resources("", version),
        ["apis", group, version] => resources(group, version),
        ["api", version, rest @ ..] => objects("", version, rest),
        ["apis", "authorization.k8s.io", "v1", "selfsubjectaccessreviews"] => Target::Rights,
        ["apis", group, version, rest @ ..] => objects(group, version, rest),
        _ => Target::Unknown,
    }
}

fn resources(group: &str, version: &str) -> Target {
    Target::Discovery(Discovery::Resources { group: group.to_owned(), version: version.to_owned() })
}

fn objects(group: &str, version: &str, rest: &[&str]) -> Target {
    let (namespace, rest) = match rest {
        ["namespaces", namespace, kind, rest @ ..]
            if Kind::named(kind).is_some_and(|kind| kind.namespaced) =>
        {
            (Some((*namespace).to_owned()), [&[*kind], rest].concat())
        }
        rest => (None, rest.to_vec()),
    };
    let Some((resource, rest)) = rest.split_first() else { return Target::Unknown };
    let found = ALL.into_iter().find(|kind| kind.group == group && kind.resource == *resource);
    let Some((kind, version)) =
        found.and_then(|kind| Some((kind, *kind.versions.iter().find(|known| **known == version)?)))
    else {
        return Target::Unknown;
    };
    let (name, subresource) = match rest {
        [] => (None, None),
        [name] => (Some((*name).to_owned()), None),
        [name, subresource] => (Some((*name).to_owned()), Some((*subresource).to_owned())),
        _ => return Target::Unknown,
    };
    if name.is_some() && namespace.is_some() != kind.namespaced {
        return Target::Unknown;
    }
    Target::Objects(ObjectPath { kind, version, namespace, name, subresource })
}

/// The parameters of a query string.
pub(super) fn query(text: &str) -> Query {
    text.split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decoded(key, true), decoded(value, true))
        })
        .collect()
}

/// Returns the verb of a request.
pub(super) fn verb(method: &str, target: &Target, query: &Query) -> Verb {
    let Target::Objects(path) = target else { return Verb::Other };
    let watches = query.get("watch").is_some_and(|value| matches!(value.as_str(), "true" | "1" | ""));
    match method {
        "GET" if path.name.is_some() => Verb::Get,
        "GET" if watches => Verb::Watch,
        "GET" => Verb::List,
        "POST" => Verb::Create,
        "PUT" => Verb::Update,
        "PATCH" => Verb::Patch,
        "DELETE" => Verb::Delete,
        _ => Verb::Other,
    }
}

/// Undoes percent encoding; `plus`: a plus is a space. Bytes that are no UTF-8 are replaced.
fn decoded(text: &str, plus: bool) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let digits = after.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        match (first, digits.and_then(|digits| u8::from_str_radix(digits, 16).ok())) {
            (b'%', Some(byte)) => {
                bytes.push(byte);
                rest = &after[2..];
                continue;
            }
            (b'+', _) if plus => bytes.push(b' '),
            (byte, _) => bytes.push(*byte),
        }
        rest = after;
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
