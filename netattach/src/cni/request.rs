//! The request of a container runtime: the `CNI_*` variables and the configuration on stdin.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::args::{self, CniArgs};
use super::config::{self, PluginConf};
use super::error::{CniError, code};
use super::identifier::{check_container_id, check_ifname, check_network_name};
use super::json::{self, Map, Value};
use super::keys;
use super::outgoing::VALID_ATTACHMENTS;
use super::result::{self, CniResult};
use super::version::{Number, Version};
use crate::budget;

/// A verb of the specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Command {
    /// Attach a container.
    Add,
    /// Undo ADD; succeeds when there is nothing to undo.
    Del,
    /// Check that the attachment is as ADD left it. Since 0.4.0.
    Check,
    /// Remove the resources of attachments that are no longer in use. Since 1.1.0.
    Gc,
    /// Report whether ADD can be served. Since 1.1.0.
    Status,
    /// Report the supported versions. Since 0.2.0.
    Version,
}

/// A validated request.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// The verb.
    pub command: Command,
    /// `CNI_CONTAINERID`; empty for GC, STATUS and VERSION.
    pub container_id: String,
    /// `CNI_NETNS`, not empty. Always set for ADD and CHECK.
    pub netns: Option<String>,
    /// `CNI_IFNAME`; empty for GC, STATUS and VERSION.
    pub ifname: String,
    /// `CNI_ARGS`.
    pub args: CniArgs,
    /// `CNI_PATH`: where the runtime keeps plugin executables.
    pub path: Vec<PathBuf>,
    /// `CNI_NETNS_OVERRIDE`: `CNI_NETNS` may be the caller's own namespace.
    pub netns_override: bool,
    /// The object on stdin, keys in order; empty for VERSION.
    pub config: Map,
    /// Its `cniVersion`; [`Version::LATEST`] for VERSION.
    pub version: Version,
    /// Its `name`; empty for VERSION.
    pub name: String,
    /// GC: the attachments in use. `None` means unknown: nothing may be removed.
    pub valid_attachments: Option<Vec<AttachmentId>>,
    /// DEL: an error that ADD would have returned. An existing attachment must be removable under such a name; if there
    /// is no record of it, this error is returned.
    pub tolerated: Option<CniError>,
}

/// An attachment in a GC request.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AttachmentId {
    /// The container.
    #[serde(rename = "containerID")]
    pub container_id: String,
    /// The interface in the container.
    pub ifname: String,
}

impl Request {
    /// Reads a request. `env` holds at least the `CNI_*` variables; an empty variable counts as missing.
    ///
    /// # Errors
    /// Code 4 for variables (3 and 4 for identifiers), 6 for JSON, 7 for the network name, 1 for versions.
    pub fn parse(env: &BTreeMap<String, String>, stdin: &[u8]) -> Result<Self, CniError> {
        let var = |name: &str| env.get(name).map_or("", String::as_str);
        let word = var("CNI_COMMAND");
        let command = Command::from_str(word).ok();
        let mut tolerated = None;
        check_variables(word, command, var)?;
        if command == Some(Command::Version) {
            return Ok(Self::version_probe());
        }

        let mut config = read_config(stdin)?;
        keys::as_documented(&mut config);
        let name = read_name(&config)?;
        let Some(command) = command else {
            return Err(CniError::new(code::INVALID_ENVIRONMENT, format!("unknown CNI_COMMAND: {word}")));
        };
        let version = gate_version(command, &config)?;
        if let Err(error) = check_runtime_config(&config) {
            tolerate(command, error, &mut tolerated)?;
        }
        let args = match CniArgs::parse(var("CNI_ARGS")) {
            Ok(args) => args,
            Err(error) => {
                tolerate(command, error, &mut tolerated)?;
                CniArgs::unread(var("CNI_ARGS"))
            }
        };
        Ok(Self {
            command,
            container_id: var("CNI_CONTAINERID").to_owned(),
            netns: Some(var("CNI_NETNS")).filter(|path| !path.is_empty()).map(str::to_owned),
            ifname: var("CNI_IFNAME").to_owned(),
            args,
            path: search_path(var("CNI_PATH")),
            netns_override: args::truth(var("CNI_NETNS_OVERRIDE")) == Some(true),
            valid_attachments: if command == Command::Gc { valid_attachments(&config)? } else { None },
            config,
            version,
            name,
            tolerated,
        })
    }

    /// The `prevResult` of the configuration.
    ///
    /// # Errors
    /// Code 6 if it cannot be decoded, or is not in the format of the configuration's version.
    pub fn prev_result(&self) -> Result<Option<CniResult>, CniError> {
        match self.config.get("prevResult") {
            None | Some(Value::Null) => Ok(None),
            Some(value) => result::read_prev_result(value, self.version).map(Some),
        }
    }

    /// A key of `runtimeConfig`.
    pub fn runtime_config(&self, capability: &str) -> Option<&Value> {
        self.config.get("runtimeConfig")?.get(capability)
    }

    /// The configuration as that of a single plugin.
    ///
    /// # Errors
    /// Code 7, naming the key.
    pub fn plugin(&self) -> Result<PluginConf, CniError> {
        Ok(PluginConf::new(self.config.clone())?)
    }

    fn version_probe() -> Self {
        Self {
            command: Command::Version,
            container_id: String::new(),
            netns: None,
            ifname: String::new(),
            args: CniArgs::default(),
            path: Vec::new(),
            netns_override: false,
            config: Map::new(),
            version: Version::LATEST,
            name: String::new(),
            valid_attachments: None,
            tolerated: None,
        }
    }
}

/// The version for printing an error, for a request that may be unreadable.
pub fn error_version(stdin: &[u8]) -> Version {
    /// The `cniVersion` of an object; the rest is discarded.
    struct Declared(Option<Version>);

    impl<'de> Deserialize<'de> for Declared {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            deserializer.deserialize_map(Self(Version::exact("")))
        }
    }

    impl<'de> Visitor<'de> for Declared {
        type Value = Self;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self, A::Error> {
            while let Some(key) = map.next_key::<String>()? {
                if key == "cniVersion" {
                    self.0 = map.next_value::<Value>()?.as_str().and_then(Version::exact);
                } else {
                    map.next_value::<IgnoredAny>()?;
                }
            }
            Ok(self)
        }
    }

    if budget::STDIN_VALUES.check(json::count_values(stdin)).is_err() {
        return Version::LATEST;
    }
    let declared = serde_json::from_slice::<Declared>(stdin).ok().and_then(|declared| declared.0);
    declared.unwrap_or(Version::LATEST)
}

/// The output of VERSION: every supported version (SPEC, "VERSION").
pub fn version_reply() -> Value {
    serde_json::json!({
        "cniVersion": Version::LATEST,
        "supportedVersions": Version::ALL,
    })
}

/// The message on stderr of an executable started without `CNI_COMMAND`.
pub fn about(program: &str) -> String {
    format!("{program}\nCNI protocol versions supported: {}", Version::list())
}

impl Command {
    /// The verb as written in `CNI_COMMAND`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Del => "DEL",
            Self::Check => "CHECK",
            Self::Gc => "GC",
            Self::Status => "STATUS",
            Self::Version => "VERSION",
        }
    }

    /// Whether the verb applies to one attachment, as opposed to a network or a plugin.
    pub fn is_about_an_attachment(self) -> bool {
        matches!(self, Self::Add | Self::Del | Self::Check)
    }

    fn requires(self, variable: &str) -> bool {
        match variable {
            "CNI_COMMAND" => true,
            "CNI_CONTAINERID" | "CNI_IFNAME" => self.is_about_an_attachment(),
            "CNI_NETNS" => matches!(self, Self::Add | Self::Check),
            "CNI_PATH" => self != Self::Version,
            _ => false,
        }
    }
}

/// The text is not a CNI verb.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a CNI command")]
pub struct UnknownCommand(pub String);

impl FromStr for Command {
    type Err = UnknownCommand;

    fn from_str(text: &str) -> Result<Self, UnknownCommand> {
        [Self::Add, Self::Del, Self::Check, Self::Gc, Self::Status, Self::Version]
            .into_iter()
            .find(|command| command.as_str() == text)
            .ok_or_else(|| UnknownCommand(text.to_owned()))
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl AttachmentId {
    pub(super) fn to_value(&self) -> Value {
        serde_json::json!({"containerID": self.container_id, "ifname": self.ifname})
    }
}

/// Missing variables are reported together; an invalid one is reported alone, as soon as it is found, also for DEL:
/// paths are built from them.
fn check_variables<'a>(
    word: &str,
    command: Option<Command>,
    var: impl Fn(&str) -> &'a str,
) -> Result<(), CniError> {
    let mut missing = Vec::new();
    if word.is_empty() {
        missing.push("CNI_COMMAND");
    }
    for name in ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"] {
        if !command.is_some_and(|command| command.requires(name)) {
            continue;
        }
        let value = var(name);
        let verdict = match name {
            _ if value.is_empty() => {
                missing.push(name);
                Ok(())
            }
            "CNI_CONTAINERID" => check_container_id(value),
            "CNI_IFNAME" => check_ifname(value),
            _ => Ok(()),
        };
        verdict?;
    }
    if missing.is_empty() {
        return Ok(());
    }
    let missing = missing.join(",");
    Err(CniError::new(code::INVALID_ENVIRONMENT, format!("required env variables [{missing}] missing")))
}

/// DEL records the first error and continues; every other verb stops.
fn tolerate(command: Command, error: CniError, tolerated: &mut Option<CniError>) -> Result<(), CniError> {
    if command != Command::Del {
        return Err(error);
    }
    tolerated.get_or_insert(error);
    Ok(())
}

fn read_config(stdin: &[u8]) -> Result<Map, CniError> {
    budget::STDIN_VALUES.check(json::count_values(stdin)).map_err(|error| undecodable(error.to_string()))?;
    match serde_json::from_slice(stdin) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => {
            Err(undecodable(format!("network configuration is {}, not an object", json::kind(&other))))
        }
        Err(error) => Err(undecodable(format!("network configuration is not JSON: {error}"))),
    }
}

/// Refuses a `runtimeConfig` that cannot be read, so that the runtime's request is not ignored.
fn check_runtime_config(config: &Map) -> Result<(), CniError> {
    match config.get("runtimeConfig") {
        None | Some(Value::Null | Value::Object(_)) => Ok(()),
        Some(other) => {
            let msg = format!("key runtimeConfig: expected an object, found {}", json::kind(other));
            Err(CniError::new(code::INVALID_CONFIG, msg))
        }
    }
}

fn read_name(config: &Map) -> Result<String, CniError> {
    let name = match config.get("name") {
        None | Some(Value::Null) => "",
        Some(Value::String(name)) => name,
        Some(other) => {
            return Err(undecodable(format!("key name: expected a string, found {}", json::kind(other))));
        }
    };
    check_network_name(name)?;
    Ok(name.to_owned())
}

/// Reads `cniVersion` and refuses versions that netattach does not support or that lack the verb.
fn gate_version(command: Command, config: &Map) -> Result<Version, CniError> {
    let text = match config.get("cniVersion") {
        None | Some(Value::Null) => "",
        Some(Value::String(text)) => text,
        Some(other) => {
            let kind = json::kind(other);
            return Err(undecodable(format!("key cniVersion: expected a string, found {kind}")));
        }
    };
    let since = match command {
        Command::Check => Some(Version::V0_4_0),
        Command::Gc | Command::Status => Some(Version::V1_1_0),
        Command::Add | Command::Del | Command::Version => None,
    };
    let number = |text: &str| {
        config::version_number(text).map_err(|error| undecodable(format!("key cniVersion: {error}")))
    };
    let incompatible = |msg: String| CniError::new(code::INCOMPATIBLE_VERSION, msg);
    if let Some(since) = since {
        let declared: Number = number(text)?;
        if declared < number(since.as_str())? {
            return Err(incompatible(format!("config version does not allow {command}")));
        }
        if declared > number(Version::LATEST.as_str())? {
            return Err(incompatible(format!("plugin version does not allow {command}")));
        }
    }
    Version::exact(text).ok_or_else(|| {
        incompatible("incompatible CNI versions".into())
            .with_details(format!("config is {text:?}, plugin supports [{}]", Version::list()))
    })
}

fn valid_attachments(config: &Map) -> Result<Option<Vec<AttachmentId>>, CniError> {
    for key in VALID_ATTACHMENTS {
        match config.get(key) {
            None | Some(Value::Null) => {}
            Some(value) => {
                return json::read_value(value)
                    .map(Some)
                    .map_err(|error| undecodable(format!("key {key}: {}: {}", error.key, error.source)));
            }
        }
    }
    Ok(None)
}

fn search_path(text: &str) -> Vec<PathBuf> {
    text.split(':').filter(|part| !part.is_empty()).map(PathBuf::from).collect()
}

fn undecodable(msg: String) -> CniError {
    CniError::new(code::DECODING_FAILURE, msg)
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
