//! Queries the versions that plugins support, and checks that a network's plugins can serve it.

use std::fmt;

use serde::Deserialize;

use super::{Call, Delegate, DelegateError, VersionReplyError};
use crate::cni::version::Number;
use crate::cni::{Command, NetworkList, Value, Version, json};
use crate::error_chain::Chain;

/// The plugins of a network that cannot serve it. Displayed as one bracketed line with every cause.
#[derive(Debug)]
pub struct UnfitPlugins(pub Vec<UnfitPlugin>);

/// A plugin cannot serve its network.
#[derive(Debug, thiserror::Error)]
pub enum UnfitPlugin {
    /// The plugin's versions could not be queried.
    #[error("plugin {index} of the list")]
    Probe {
        /// Its position in the list, from zero.
        index: usize,
        /// The reason.
        #[source]
        source: DelegateError,
    },
    /// The plugin does not support the network's version.
    #[error(
        "plugin {index} of the list: {plugin:?} does not support version {version} (supported: {})",
        supported.join(", ")
    )]
    Version {
        /// Its position in the list, from zero.
        index: usize,
        /// Its `type`.
        plugin: String,
        /// The network's version.
        version: Version,
        /// The versions it supports.
        supported: Vec<String>,
    },
}

impl fmt::Display for UnfitPlugins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<String> = self.0.iter().map(|unfit| Chain(unfit).to_string()).collect();
        write!(f, "[{}]", lines.join("; "))
    }
}

impl std::error::Error for UnfitPlugins {}

/// Variables that VERSION does not need but that older plugins may require: set to `dummy`.
pub(super) const DUMMIES: [&str; 3] = ["CNI_NETNS", "CNI_IFNAME", "CNI_PATH"];

/// The answer of a plugin that does not know VERSION.
const UNKNOWN_VERB: &str = "unknown CNI_COMMAND: VERSION";

pub(super) fn version(delegate: &Delegate, plugin_type: &str) -> Result<Vec<String>, DelegateError> {
    let stdin = format!("{{\"cniVersion\":\"{}\"}}", Version::LATEST);
    let call = Call::without_container(Command::Version, plugin_type, stdin.as_bytes());
    let stdout = match delegate.run(&call) {
        Ok(stdout) => stdout,
        Err(DelegateError::Reported { source, .. }) if source.msg == UNKNOWN_VERB => {
            return Ok(vec![Version::V0_1_0.to_string()]);
        }
        Err(error) => return Err(error),
    };
    let reply: Value = serde_json::from_slice(&stdout)
        .map_err(|source| DelegateError::garbage(&call, &stdout, source, String::new()))?;
    supported(&reply).map_err(|source| DelegateError::VersionReply { plugin: plugin_type.to_owned(), source })
}

/// Queries every plugin of a list that is not `native`, and collects all problems.
pub(super) fn validate(
    delegate: &Delegate,
    list: &NetworkList,
    is_native: impl Fn(&str) -> bool,
) -> Result<Vec<String>, UnfitPlugins> {
    let mut unfit = Vec::new();
    let mut capabilities = Vec::new();
    for (index, plugin) in list.plugins.iter().enumerate() {
        for capability in plugin.capabilities() {
            if !capabilities.iter().any(|known| known == capability) {
                capabilities.push(capability.to_owned());
            }
        }
        if is_native(plugin.plugin_type()) {
            continue;
        }
        match version(delegate, plugin.plugin_type()) {
            Ok(supported) if supported.iter().any(|text| text == list.version.as_str()) => {}
            Ok(supported) => unfit.push(UnfitPlugin::Version {
                index,
                plugin: plugin.plugin_type().to_owned(),
                version: list.version,
                supported,
            }),
            Err(source) => unfit.push(UnfitPlugin::Probe { index, source }),
        }
    }
    if unfit.is_empty() { Ok(capabilities) } else { Err(UnfitPlugins(unfit)) }
}

fn supported(reply: &Value) -> Result<Vec<String>, VersionReplyError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Reply {
        cni_version: Option<String>,
        supported_versions: Option<Vec<String>>,
    }
    let reply: Reply = json::read_value(reply).map_err(VersionReplyError::Shape)?;
    let version = reply.cni_version.filter(|text| !text.is_empty()).ok_or(VersionReplyError::NoVersion)?;
    match reply.supported_versions.filter(|versions| !versions.is_empty()) {
        Some(versions) => {
            for (index, text) in versions.iter().enumerate() {
                text.parse::<Number>().map_err(|source| VersionReplyError::Entry { index, source })?;
            }
            Ok(versions)
        }
        // The key did not exist in 0.2.0 yet.
        None if version == Version::V0_2_0.as_str() => {
            Ok(vec![Version::V0_1_0.to_string(), Version::V0_2_0.to_string()])
        }
        None => Err(VersionReplyError::NoSupportedVersions { version }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::error_chain::Chain;

    /// Rows: VER-09.
    #[test]
    fn the_answer_names_versions_as_text() {
        let texts = |value: Value| supported(&value).unwrap();
        assert_eq!(
            texts(json!({"cniVersion": "1.0.0", "supportedVersions": ["0.4.0", "9.0.0"]})),
            ["0.4.0", "9.0.0"]
        );
        assert_eq!(texts(json!({"cniVersion": "0.2.0"})), ["0.1.0", "0.2.0"]);
    }

    /// Rows: VER-08, VER-10.
    #[test]
    fn an_answer_that_is_not_one_is_refused() {
        for (value, message) in [
            (json!({"supportedVersions": ["1.0.0"]}), "key cniVersion: missing"),
            (json!({"cniVersion": ""}), "key cniVersion: missing"),
            (
                json!({"cniVersion": "1.0.0"}),
                "key supportedVersions: missing in an answer of version \"1.0.0\"",
            ),
            (
                json!({"cniVersion": "1.0.0", "supportedVersions": ["x"]}),
                "key supportedVersions[0]: \"x\" is not a version such as 1.1.0",
            ),
            (
                json!({"cniVersion": 1}),
                "decode the answer: key cniVersion: invalid type: integer `1`, expected a string",
            ),
        ] {
            assert_eq!(Chain(&supported(&value).unwrap_err()).to_string(), message);
        }
    }
}
