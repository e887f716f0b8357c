//! The configuration of Multus on a node: `00-multus.conf`, and the daemon's file, which overrides it key by key.

use serde::de::Error as _;

use crate::cni::{Map, Value};

/// The effective configuration of Multus.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Configuration {
    /// Every key that is set; the daemon's file takes precedence.
    pub keys: Map,
}

/// Why a file is not a configuration of Multus.
#[derive(Debug, thiserror::Error)]
pub enum ConfigurationError {
    /// Not a JSON object.
    #[error("not a JSON object")]
    Json(#[source] serde_json::Error),
    /// The configuration of another plugin.
    #[error("key type: expected multus or multus-shim, found {0}")]
    Type(String),
}

impl Configuration {
    /// Reads the CNI configuration, either a single plugin or a list that contains Multus.
    ///
    /// # Errors
    /// [`ConfigurationError`] about the CNI configuration.
    pub fn of_cni(bytes: &[u8]) -> Result<Self, ConfigurationError> {
        let document: Map = serde_json::from_slice(bytes).map_err(ConfigurationError::Json)?;
        let mut keys = match document.get("plugins") {
            None => document,
            Some(Value::Array(plugins)) => {
                let is_multus = |plugin: &&Value| {
                    plugin.get("type").and_then(Value::as_str).is_some_and(|name| name.starts_with("multus"))
                };
                let plugin = plugins.iter().find(is_multus).and_then(Value::as_object);
                let mut keys =
                    plugin.cloned().ok_or_else(|| ConfigurationError::Type("a list without it".into()))?;
                for (key, value) in document.iter().filter(|(key, _)| *key != "plugins") {
                    keys.entry(key.clone()).or_insert_with(|| value.clone());
                }
                keys
            }
            Some(_) => {
                return Err(ConfigurationError::Json(serde_json::Error::custom("plugins is not a list")));
            }
        };
        match keys.shift_remove("type") {
            Some(Value::String(name)) if matches!(name.as_str(), "multus" | "multus-shim") => {
                Ok(Self { keys })
            }
            other => Err(ConfigurationError::Type(other.unwrap_or(Value::Null).to_string())),
        }
    }

    /// Overrides the configuration with the daemon's file.
    ///
    /// # Errors
    /// [`ConfigurationError::Json`].
    pub fn overlay(&mut self, bytes: &[u8]) -> Result<(), ConfigurationError> {
        let daemon: Map = serde_json::from_slice(bytes).map_err(ConfigurationError::Json)?;
        self.keys.extend(daemon);
        Ok(())
    }
}
