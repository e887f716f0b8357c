//! Label and field selectors.

use serde_json::Value;

use super::kinds::Kind;
use super::status::Failure;

/// Both selectors of a request. An empty one selects everything.
#[derive(Debug, Clone, Default)]
pub(super) struct Selector {
    labels: Vec<LabelTerm>,
    fields: Vec<FieldTerm>,
}

#[derive(Debug, Clone)]
struct LabelTerm {
    key: String,
    wants: Wants,
}

#[derive(Debug, Clone)]
enum Wants {
    Exists,
    Absent,
    In(Vec<String>),
    NotIn(Vec<String>),
}

#[derive(Debug, Clone)]
struct FieldTerm {
    path: &'static [&'static str],
    value: String,
    equal: bool,
}

impl Selector {
    /// Reads both.
    ///
    /// # Errors
    /// 400: a selector cannot be read, or names a field that the kind has no index of.
    pub(super) fn parse(kind: &Kind, labels: &str, fields: &str) -> Result<Self, Failure> {
        let labels = terms(labels).into_iter().map(label_term).collect::<Result<_, _>>()?;
        let fields =
            terms(fields).into_iter().map(|term| field_term(kind, term)).collect::<Result<_, _>>()?;
        Ok(Self { labels, fields })
    }

    /// Whether it selects everything.
    pub(super) fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    /// Whether it selects an object. Labels that are no map are no labels.
    pub(super) fn matches(&self, object: &Value) -> bool {
        let label = |key: &str| object["metadata"]["labels"].get(key).and_then(Value::as_str);
        self.labels.iter().all(|term| match (&term.wants, label(&term.key)) {
            (Wants::Exists, found) => found.is_some(),
            (Wants::Absent, found) => found.is_none(),
            (Wants::In(values), found) => found.is_some_and(|value| values.iter().any(|one| one == value)),
            (Wants::NotIn(values), found) => found.is_none_or(|value| values.iter().all(|one| one != value)),
        }) && self.fields.iter().all(|term| {
            let found = term.path.iter().try_fold(object, |value, key| value.get(key));
            (found.and_then(Value::as_str).unwrap_or_default() == term.value) == term.equal
        })
    }
}

/// The terms of a selector: commas inside parentheses separate values.
fn terms(text: &str) -> Vec<&str> {
    let mut depth = 0_u32;
    text.split(|character| {
        match character {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        character == ',' && depth == 0
    })
    .map(str::trim)
    .filter(|term| !term.is_empty())
    .collect()
}

fn label_term(term: &str) -> Result<LabelTerm, Failure> {
    let bad = || Failure::bad_request(format!("unable to parse requirement: {term:?}"));
    let of = |key: &str, wants: Wants| {
        let key = key.trim();
        let readable = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./".contains(&byte);
        if key.is_empty() || !key.bytes().all(readable) {
            return Err(bad());
        }
        Ok(LabelTerm { key: key.to_owned(), wants })
    };
    let one = |value: &str| vec![value.trim().to_owned()];
    if let Some((key, values)) = term.split_once(" notin ").or_else(|| term.split_once(" in ")) {
        let values =
            values.trim().strip_prefix('(').and_then(|rest| rest.strip_suffix(')')).ok_or_else(bad)?;
        let values = values.split(',').map(|value| value.trim().to_owned()).collect();
        return of(key, if term.contains(" notin ") { Wants::NotIn(values) } else { Wants::In(values) });
    }
    if let Some((key, value)) = term.split_once("!=") {
        return of(key, Wants::NotIn(one(value)));
    }
    if let Some((key, value)) = term.split_once("==").or_else(|| term.split_once('=')) {
        return of(key, Wants::In(one(value)));
    }
    match term.strip_prefix('!') {
        Some(key) => of(key, Wants::Absent),
        None => of(term, Wants::Exists),
    }
}

fn field_term(kind: &Kind, term: &str) -> Result<FieldTerm, Failure> {
    let split = [("!=", false), ("==", true), ("=", true)]
        .into_iter()
        .find_map(|(sign, equal)| term.split_once(sign).map(|(key, value)| (key, value, equal)));
    let Some((key, value, equal)) = split else {
        return Err(Failure::bad_request(format!("invalid selector: {term:?}; can't understand {term:?}")));
    };
    let path: &'static [&'static str] = match key.trim() {
        "metadata.name" => &["metadata", "name"],
        "metadata.namespace" if kind.namespaced => &["metadata", "namespace"],
        "spec.nodeName" if kind.kind == "Pod" => &["spec", "nodeName"],
        "status.phase" if kind.kind == "Pod" => &["status", "phase"],
        key => return Err(Failure::bad_request(format!("field label not supported: {key}"))),
    };
    Ok(FieldTerm { path, value: value.trim().to_owned(), equal })
}
