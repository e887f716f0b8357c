//! Reads the configuration file. Unknown keys are refused, and each error names the key by its full path.

use std::path::Path;

use serde_json::Value;

use super::Settings;
use crate::cni::json::{self, KeyError};

/// Reasons why a configuration file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SettingsFileError {
    /// The file cannot be read.
    #[error("read file")]
    Read(#[source] std::io::Error),
    /// The file is not YAML.
    #[error("parse yaml")]
    Yaml(#[source] serde_norway::Error),
    /// The file has an unknown key.
    #[error("key {key} is not known{}", nearest_hint(nearest.as_deref()))]
    Unknown {
        /// Path of the key.
        key: String,
        /// Path of the most similar known key.
        nearest: Option<String>,
    },
    /// A section is not a mapping. Serde would read a list as one, by position.
    #[error("{path} must be a mapping of keys to values, not {found}", path = if key.is_empty() { "the file" } else { key })]
    NotAMapping {
        /// Path of the section; empty: the whole file.
        key: String,
        /// The kind of value that was found.
        found: &'static str,
    },
    /// A key has an invalid value.
    #[error(transparent)]
    Key(#[from] KeyError),
}

/// Reads the settings in a file; missing keys have their defaults.
pub(super) fn read(path: &Path) -> Result<Settings, SettingsFileError> {
    parse(&std::fs::read_to_string(path).map_err(SettingsFileError::Read)?)
}

/// Reads the settings in a text.
pub(super) fn parse(text: &str) -> Result<Settings, SettingsFileError> {
    let document: Value = serde_norway::from_str(text).map_err(SettingsFileError::Yaml)?;
    // The file has nothing but comments.
    if document.is_null() {
        return Ok(Settings::default());
    }
    let known = defaults();
    check_keys(&document, &known, "").map_err(|error| match error {
        SettingsFileError::Unknown { key, .. } => {
            SettingsFileError::Unknown { nearest: nearest(&key, &leaves(&known)), key }
        }
        other => other,
    })?;
    Ok(json::read_value(&document)?)
}

/// All keys with their defaults.
pub(super) fn defaults() -> Value {
    // Cannot fail: settings are strings, numbers and lists of these, which JSON can represent.
    serde_json::to_value(Settings::default()).unwrap_or_default()
}

/// The paths of all keys that have values, in the order of the structs.
pub(crate) fn leaves(defaults: &Value) -> Vec<(String, &Value)> {
    let mut leaves = Vec::new();
    collect(defaults, "", &mut leaves);
    leaves
}

fn collect<'a>(section: &'a Value, path: &str, leaves: &mut Vec<(String, &'a Value)>) {
    for (key, value) in section.as_object().into_iter().flatten() {
        let path = join(path, key);
        match value {
            Value::Object(inner) if !inner.is_empty() => collect(value, &path, leaves),
            _ => leaves.push((path, value)),
        }
    }
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

/// Checks that every key is known, also in sections.
fn check_keys(written: &Value, known: &Value, path: &str) -> Result<(), SettingsFileError> {
    let Some(known) = known.as_object().filter(|section| !section.is_empty()) else { return Ok(()) };
    let Some(written) = written.as_object() else {
        return Err(SettingsFileError::NotAMapping { key: path.to_owned(), found: json::kind(written) });
    };
    for (key, value) in written {
        let path = join(path, key);
        match known.get(key) {
            None => return Err(SettingsFileError::Unknown { key: path, nearest: None }),
            Some(section) => check_keys(value, section, &path)?,
        }
    }
    Ok(())
}

/// The known key that is most similar to an unknown one; `None` if none is similar.
fn nearest(key: &str, known: &[(String, &Value)]) -> Option<String> {
    let last = |path: &str| path.rsplit('.').next().unwrap_or_default().to_ascii_lowercase();
    let written = last(key);
    let scored = known.iter().map(|(path, _)| (distance(&written, &last(path)), path));
    let (edits, path) = scored.min_by_key(|(edits, _)| *edits)?;
    (edits <= written.len() / 3 + 1).then(|| path.clone())
}

/// Number of letters to insert, delete or replace to turn one text into the other (Levenshtein distance).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = i;
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let changed = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

fn nearest_hint(nearest: Option<&str>) -> String {
    nearest.map(|key| format!("; the nearest key is {key}")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error_chain::Chain;

    #[test]
    fn a_file_without_content_is_all_defaults() {
        for text in ["", "# nothing yet\n", "{}"] {
            assert_eq!(parse(text).unwrap(), Settings::default());
        }
    }

    #[test]
    fn an_invalid_settings_file_is_refused_with_its_path() {
        let table = [
            ("parralelAdds: 3", "key parralelAdds is not known; the nearest key is parallelAdds"),
            ("delegation: {timeout: 3}", "key delegation.timeout is not known"),
            (
                "delegation: {timeoutSecond: 3}",
                "key delegation.timeoutSecond is not known; the nearest key is delegation.timeoutSeconds",
            ),
            ("exec: [bridge]", "key exec is not known; the nearest key is delegation.exec"),
            ("colour: red", "key colour is not known"),
            (
                "delegation: {timeoutSeconds: soon}",
                "key delegation.timeoutSeconds: invalid type: string \"soon\", expected u64",
            ),
            ("cniBinDirs: [/a, 3]", "key cniBinDirs[1]: invalid type: integer `3`, expected path string"),
            (
                "invalidAnnotation: Fail",
                "key invalidAnnotation: unknown variant `Fail`, expected `fail` or `ignore`",
            ),
            ("- a", "the file must be a mapping of keys to values, not an array"),
            ("delegation: [[bridge], 3]", "delegation must be a mapping of keys to values, not an array"),
        ];
        for (text, message) in table {
            assert_eq!(Chain(&parse(text).unwrap_err()).to_string(), message, "{text}");
        }
    }
}
