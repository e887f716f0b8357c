//! The result of an import: the mapping of the keys of Multus's configuration.

use crate::cni::{Map, Value};

/// A key and its mapping.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// The key in Multus's configuration.
    pub key: String,
    /// Its value; `None` for Multus's default.
    pub value: Option<Value>,
    /// The mapping of the key.
    pub fate: Fate,
}

/// How a key is mapped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fate {
    /// A setting of netattach is equivalent.
    Becomes {
        /// Its path.
        setting: &'static str,
        /// A remark about the setting; may be empty.
        note: &'static str,
    },
    /// The equivalent is not a setting of the file; the text describes it.
    Else(&'static str),
    /// No setting is needed; no function is lost. The text gives the reason.
    NotNeeded(&'static str),
    /// A function is lost; the text says how to proceed.
    NoEquivalent(&'static str),
    /// Multus does not know the key.
    Unknown,
}

/// The result of the import: a row per key, and the settings file.
#[derive(Debug, Clone, PartialEq)]
pub struct Imported {
    /// In the order of the files, defaults that differ from netattach's last.
    pub rows: Vec<Row>,
    /// Keys of netattach's settings file.
    pub settings: Map,
    /// Configurations that are part of Multus's own and that netattach expects in files, by
    /// name.
    pub files: Vec<(String, Value)>,
}

/// Values that the import cannot determine.
#[derive(Debug, Clone, Copy, Default)]
pub struct Wanted<'w> {
    /// A directory of manifests instead of the API server.
    pub source: Option<&'w str>,
    /// Absolute path of the directory that files are written to.
    pub directory: Option<&'w str>,
}

impl Imported {
    /// Whether every key is mapped or needs no setting.
    pub fn is_complete(&self) -> bool {
        !self.rows.iter().any(|row| matches!(row.fate, Fate::NoEquivalent(_) | Fate::Unknown))
    }
}

pub(super) fn insert(settings: &mut Map, setting: &str, value: Value) {
    settings.insert(setting.to_owned(), value);
}

pub(super) fn text<'a>(keys: &'a Map, key: &str) -> Option<&'a str> {
    keys.get(key).and_then(Value::as_str).filter(|text| !text.is_empty())
}
