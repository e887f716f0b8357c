//! Network configurations: lists of plugins, and single plugins, which are read as lists of one.
//!
//! Unknown keys are kept as written, at both levels: they belong to the plugins. Known ones may be written in another
//! letter case ([`keys`]).

use serde::de::DeserializeOwned;

use super::error::{CniError, code};
use super::json::{self, KeyError, Map, Value};
use super::keys;
use super::version::{Number, Version, VersionError};
use crate::budget::{self, Exceeded};
use crate::error_chain::Chain;

/// A network: a name, a version and the plugins that set it up in order.
#[derive(Debug, Clone, PartialEq)]
pub struct NetworkList {
    /// The network's name. Its grammar is checked at ADD, not here.
    pub name: String,
    /// The version that every plugin of the list is called with: the newest that both `cniVersion` and
    /// `cniVersions` offer.
    pub version: Version,
    /// `disableCheck`: CHECK succeeds without calling a plugin.
    pub disable_check: bool,
    /// `disableGC`: GC succeeds without calling a plugin.
    pub disable_gc: bool,
    /// `loadOnlyInlinedPlugins`: plugins in the folder named after the network are not added.
    pub only_inlined: bool,
    /// The configuration has no name of its own and uses the default ([`NetworkList::parse_with_default_name`]).
    pub name_is_default: bool,
    /// The plugins, in the order of ADD. Empty only where [`NetworkList::parse_list`] allows it.
    pub plugins: Vec<PluginConf>,
    raw: Map,
}

/// The configuration of one plugin.
#[derive(Debug, Clone, PartialEq)]
pub struct PluginConf {
    raw: Map,
}

/// Why a network configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A size limit is exceeded.
    #[error(transparent)]
    Exceeded(#[from] Exceeded),
    /// The file that should have it cannot be read.
    #[error("cannot be read: {0}")]
    Unreadable(String),
    /// Not JSON.
    #[error("parse network configuration")]
    Json(#[source] serde_json::Error),
    /// `name` is absent or empty.
    #[error("key name: missing")]
    MissingName,
    /// A key has the wrong type.
    #[error("key {key}: expected {expected}, found {found}")]
    Type {
        /// The key; `.` for the whole document.
        key: String,
        /// The expected type.
        expected: &'static str,
        /// The type found.
        found: &'static str,
    },
    /// A key has an invalid value.
    #[error("key {key}: invalid value {value:?}")]
    Value {
        /// The key.
        key: String,
        /// The value.
        value: String,
    },
    /// A version is malformed or not supported.
    #[error("key {key}")]
    Version {
        /// `cniVersion`, or an entry of `cniVersions`.
        key: String,
        /// The cause.
        #[source]
        source: VersionError,
    },
    /// Neither a list (`plugins`) nor a single plugin (`type`).
    #[error("keys plugins and type are both missing")]
    Shapeless,
    /// No plugin is left to call.
    #[error("key plugins: no plugins in list")]
    NoPlugins,
    /// A plugin of the list is unusable.
    #[error("plugin {index} of the list")]
    Plugin {
        /// Its index in `plugins`, from zero.
        index: usize,
        /// The cause.
        #[source]
        source: Box<ConfigError>,
    },
}

impl NetworkList {
    /// Reads a list, or a single plugin as a list of one.
    ///
    /// # Errors
    /// [`ConfigError`]; a missing `name` is one.
    pub fn parse(bytes: &[u8]) -> Result<Self, ConfigError> {
        Self::from_map(object(bytes)?)
    }

    /// As [`parse`](Self::parse), with a default name for a configuration without one, as a NetworkAttachmentDefinition
    /// provides it (NPWG 3.4.2). An existing name is kept.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn parse_with_default_name(bytes: &[u8], name: &str) -> Result<Self, ConfigError> {
        let mut map = object(bytes)?;
        let name_is_default = inject_name(&mut map, name);
        Ok(Self { name_is_default, ..Self::from_map(map)? })
    }

    /// Gives the list another name.
    pub fn rename(&mut self, name: &str) {
        name.clone_into(&mut self.name);
        self.raw.insert("name".into(), name.into());
    }

    /// As [`parse`](Self::parse), from a decoded document.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn from_map(map: Map) -> Result<Self, ConfigError> {
        if map.contains_key("plugins") {
            let list = Self::list_from_map(map)?;
            if list.plugins.is_empty() { Err(ConfigError::NoPlugins) } else { Ok(list) }
        } else if map.contains_key("type") {
            Self::single_from_map(map)
        } else {
            Err(ConfigError::Shapeless)
        }
    }

    /// Reads a document that must be a list. Unless `loadOnlyInlinedPlugins` is set, `plugins` may be absent: the
    /// plugins then come from the network's folder (see [`load`](super::load)).
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn parse_list(bytes: &[u8]) -> Result<Self, ConfigError> {
        Self::list_from_map(object(bytes)?)
    }

    /// Reads a document that must be a single plugin with a name.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn parse_single(bytes: &[u8]) -> Result<Self, ConfigError> {
        Self::single_from_map(object(bytes)?)
    }

    /// A key of the list itself, such as an extension key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.raw.get(key)
    }

    /// The list as a document that [`from_map`](Self::from_map) reads back.
    pub fn to_value(&self) -> Value {
        let mut map = self.raw.clone();
        map.insert("plugins".into(), self.plugins.iter().map(|plugin| plugin.raw.clone()).collect());
        Value::Object(map)
    }

    /// The size of its plugins' configurations: number of values and bytes of text.
    pub fn extent(&self) -> (usize, usize) {
        let of_plugin = |plugin: &PluginConf| {
            let parts = plugin.raw.iter().map(|(key, value)| (json::extent(value), key.len()));
            parts.fold((0, 0), |(values, bytes), ((more, text), key)| (values + more, bytes + text + key))
        };
        let plugins = self.plugins.iter().map(of_plugin);
        plugins.fold((0, 0), |(values, bytes), (more, text)| (values + more, bytes + text))
    }

    fn list_from_map(mut map: Map) -> Result<Self, ConfigError> {
        let only_inlined = boolean(&map, "loadOnlyInlinedPlugins")?;
        // Taken out, so that the plugins are stored only once; the key keeps its place among the others.
        let plugins = match map.get_mut("plugins").map(Value::take) {
            None if only_inlined => return Err(ConfigError::NoPlugins),
            None => Vec::new(),
            Some(Value::Array(entries)) if entries.is_empty() => return Err(ConfigError::NoPlugins),
            Some(Value::Array(entries)) => {
                budget::PLUGINS.check(entries.len())?;
                entries.into_iter().enumerate().map(plugin_at).collect::<Result<_, _>>()?
            }
            Some(other) => return Err(wrong_type("plugins", "an array", &other)),
        };
        Ok(Self {
            name: name(&map)?,
            version: negotiate(&map)?,
            disable_check: boolean(&map, "disableCheck")?,
            disable_gc: boolean(&map, "disableGC")?,
            only_inlined,
            name_is_default: false,
            plugins,
            raw: map,
        })
    }

    fn single_from_map(map: Map) -> Result<Self, ConfigError> {
        let plugin = PluginConf::new(map)?;
        let name = name(&plugin.raw)?;
        let version = declared_version(&plugin.raw)?;
        let mut raw = Map::new();
        raw.insert("cniVersion".into(), version.as_str().into());
        raw.insert("name".into(), name.as_str().into());
        Ok(Self {
            name,
            version,
            disable_check: false,
            disable_gc: false,
            only_inlined: true,
            name_is_default: false,
            plugins: vec![plugin],
            raw,
        })
    }
}

impl PluginConf {
    /// Reads one plugin's configuration.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn parse(bytes: &[u8]) -> Result<Self, ConfigError> {
        Self::new(object(bytes)?)
    }

    /// Checks the keys that every plugin shares: `type`, `capabilities`, `ipam.type`.
    ///
    /// # Errors
    /// [`ConfigError::Type`] or [`ConfigError::Value`] with the key.
    pub fn new(mut raw: Map) -> Result<Self, ConfigError> {
        keys::as_documented(&mut raw);
        match raw.get("type") {
            Some(Value::String(text)) if !text.is_empty() => {}
            Some(Value::String(_)) => {
                return Err(ConfigError::Value { key: "type".into(), value: String::new() });
            }
            other => return Err(wrong_type("type", "a string", other.unwrap_or(&Value::Null))),
        }
        match raw.get("capabilities") {
            None | Some(Value::Null) => {}
            Some(Value::Object(capabilities)) => {
                let odd = capabilities.iter().find(|(_, value)| !value.is_boolean() && !value.is_null());
                if let Some((key, value)) = odd {
                    return Err(wrong_type(&format!("capabilities.{key}"), "a boolean", value));
                }
            }
            Some(other) => return Err(wrong_type("capabilities", "an object", other)),
        }
        match raw.get("ipam") {
            None | Some(Value::Null) => {}
            Some(Value::Object(ipam)) => match ipam.get("type") {
                None | Some(Value::Null | Value::String(_)) => {}
                Some(other) => return Err(wrong_type("ipam.type", "a string", other)),
            },
            Some(other) => return Err(wrong_type("ipam", "an object", other)),
        }
        Ok(Self { raw })
    }

    /// The plugin to call: the name of an executable, or of a plugin built into netattach.
    pub fn plugin_type(&self) -> &str {
        self.raw.get("type").and_then(Value::as_str).unwrap_or_default()
    }

    /// The IPAM plugin it delegates to.
    pub fn ipam_type(&self) -> Option<&str> {
        self.raw.get("ipam")?.get("type")?.as_str().filter(|text| !text.is_empty())
    }

    /// The capabilities it declares, in the order of the file: those whose value is `true`.
    pub fn capabilities(&self) -> impl Iterator<Item = &str> {
        self.raw
            .get("capabilities")
            .and_then(Value::as_object)
            .into_iter()
            .flatten()
            .filter(|(_, value)| **value == Value::Bool(true))
            .map(|(key, _)| key.as_str())
    }

    /// Reads the whole configuration as the plugin's own type.
    ///
    /// # Errors
    /// [`KeyError`] with the path of the invalid key.
    pub fn section<T: DeserializeOwned>(&self) -> Result<T, KeyError> {
        json::read_object(&self.raw)
    }

    /// The configuration object, its keys as they are documented.
    pub fn raw(&self) -> &Map {
        &self.raw
    }

    /// The `ipam` section, mutable.
    pub fn ipam_mut(&mut self) -> Option<&mut Map> {
        self.raw.get_mut("ipam")?.as_object_mut()
    }
}

impl From<ConfigError> for CniError {
    /// Code 6 if the document cannot be decoded, 1 for an unsupported version, 7 for an invalid value.
    fn from(error: ConfigError) -> Self {
        Self::from_chain(error.code(), &error)
    }
}

impl From<KeyError> for CniError {
    fn from(error: KeyError) -> Self {
        Self::new(code::INVALID_CONFIG, Chain(&error).to_string())
    }
}

impl ConfigError {
    /// The code that reports this error to a container runtime.
    pub fn code(&self) -> u32 {
        match self {
            Self::Unreadable(_) => code::IO_FAILURE,
            Self::Json(_) => code::DECODING_FAILURE,
            Self::Version { source: VersionError::Unsupported(_), .. } => code::INCOMPATIBLE_VERSION,
            Self::Version { source: VersionError::Malformed(_), .. } => code::DECODING_FAILURE,
            Self::Type { .. }
            | Self::Exceeded(_)
            | Self::MissingName
            | Self::Value { .. }
            | Self::Shapeless
            | Self::NoPlugins => code::INVALID_CONFIG,
            Self::Plugin { source, .. } => source.code(),
        }
    }
}

/// Sets the document's name if it has none (NPWG 3.4.2) and returns whether it did. An existing name is kept.
fn inject_name(map: &mut Map, name: &str) -> bool {
    let lacks =
        matches!(map.get("name"), None | Some(Value::Null)) || map.get("name") == Some(&Value::from(""));
    if lacks {
        map.insert("name".into(), name.into());
    }
    lacks
}

/// The document's name, even if the rest of the document is invalid.
pub(super) fn peek_name(bytes: &[u8]) -> Option<String> {
    Some(object(bytes).ok()?.get("name")?.as_str()?.to_owned())
}

/// Parses a document that must be a JSON object.
///
/// # Errors
/// The document is too large, not JSON, or not an object.
pub(crate) fn object(bytes: &[u8]) -> Result<Map, ConfigError> {
    budget::CONFIG.check(bytes.len())?;
    budget::CONFIG_VALUES.check(json::count_values(bytes))?;
    match serde_json::from_slice(bytes).map_err(ConfigError::Json)? {
        Value::Object(map) => Ok(map),
        other => Err(ConfigError::Type { key: ".".into(), expected: "an object", found: json::kind(&other) }),
    }
}

fn plugin_at((index, entry): (usize, Value)) -> Result<PluginConf, ConfigError> {
    match entry {
        Value::Object(map) => PluginConf::new(map),
        other => Err(wrong_type(".", "an object", &other)),
    }
    .map_err(|source| ConfigError::Plugin { index, source: Box::new(source) })
}

fn name(map: &Map) -> Result<String, ConfigError> {
    match map.get("name") {
        None | Some(Value::Null) => Err(ConfigError::MissingName),
        Some(Value::String(name)) if name.is_empty() => Err(ConfigError::MissingName),
        Some(Value::String(name)) => Ok(name.clone()),
        Some(other) => Err(wrong_type("name", "a string", other)),
    }
}

/// A boolean, or `true` or `false` as text in any letter case; absent is false.
fn boolean(map: &Map, key: &str) -> Result<bool, ConfigError> {
    match map.get(key) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(value)) => Ok(*value),
        Some(Value::String(text)) if text.eq_ignore_ascii_case("true") => Ok(true),
        Some(Value::String(text)) if text.eq_ignore_ascii_case("false") => Ok(false),
        Some(Value::String(text)) => Err(ConfigError::Value { key: key.to_owned(), value: text.clone() }),
        Some(other) => Err(wrong_type(key, "a boolean", other)),
    }
}

fn declared_version(map: &Map) -> Result<Version, ConfigError> {
    version_text(map)?
        .unwrap_or_default()
        .parse()
        .map_err(|source| ConfigError::Version { key: "cniVersion".into(), source })
}

fn version_text(map: &Map) -> Result<Option<&str>, ConfigError> {
    match map.get("cniVersion") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => Err(wrong_type("cniVersion", "a string", other)),
    }
}

/// The newest version that netattach supports among `cniVersions` and `cniVersion`.
fn negotiate(map: &Map) -> Result<Version, ConfigError> {
    let entries = match map.get("cniVersions") {
        None | Some(Value::Null) => return declared_version(map),
        Some(Value::Array(entries)) if entries.is_empty() => return declared_version(map),
        Some(Value::Array(entries)) => entries,
        Some(other) => return Err(wrong_type("cniVersions", "an array", other)),
    };
    let mut offered = Vec::new();
    for (index, entry) in entries.iter().enumerate() {
        let key = format!("cniVersions[{index}]");
        let text = entry.as_str().ok_or_else(|| wrong_type(&key, "a string", entry))?;
        offered.push((key, text));
    }
    if let Some(text) = version_text(map)? {
        offered.push(("cniVersion".into(), text));
    }
    let mut newest = None;
    for (key, text) in &offered {
        match text.parse() {
            Ok(version) => newest = newest.max(Some(version)),
            Err(VersionError::Unsupported(_)) => {}
            Err(source) => return Err(ConfigError::Version { key: key.clone(), source }),
        }
    }
    newest.ok_or_else(|| {
        let texts: Vec<&str> = offered.iter().map(|(_, text)| *text).collect();
        ConfigError::Version {
            key: "cniVersions".into(),
            source: VersionError::Unsupported(texts.join(", ")),
        }
    })
}

fn wrong_type(key: &str, expected: &'static str, found: &Value) -> ConfigError {
    ConfigError::Type { key: key.to_owned(), expected, found: json::kind(found) }
}

/// Parses a version that this software need not support: used to distinguish a configuration that is too new from an
/// invalid one.
pub(super) fn version_number(text: &str) -> Result<Number, VersionError> {
    if text.is_empty() { "0.1.0" } else { text }.parse()
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
