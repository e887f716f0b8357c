//! Which versions a plugin supports.

use serde::Deserialize;

use super::{Call, Delegate, DelegateError, VersionReplyError};
use crate::cni::version::Number;
use crate::cni::{Command, Value, Version, json};

/// Variables that VERSION does not need but that plugins older than it may insist on: set to `dummy`.
pub(super) const DUMMIES: [&str; 3] = ["CNI_NETNS", "CNI_IFNAME", "CNI_PATH"];

/// What a plugin older than VERSION answers.
const UNKNOWN_VERB: &str = "unknown CNI_COMMAND: VERSION";

pub(super) fn version(delegate: &Delegate, plugin_type: &str) -> Result<Vec<String>, DelegateError> {
    let stdin = format!("{{\"cniVersion\":\"{}\"}}", Version::LATEST);
    let call = Call {
        command: Command::Version,
        plugin_type,
        container_id: "",
        netns: None,
        ifname: "",
        args: "",
        netns_override: false,
        stdin: stdin.as_bytes(),
    };
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
        // 0.2.0 did not know the key yet.
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
    use crate::report::Chain;

    #[test]
    fn the_answer_names_versions_as_text() {
        let texts = |value: Value| supported(&value).unwrap();
        assert_eq!(
            texts(json!({"cniVersion": "1.0.0", "supportedVersions": ["0.4.0", "9.0.0"]})),
            ["0.4.0", "9.0.0"]
        );
        assert_eq!(texts(json!({"cniVersion": "0.2.0"})), ["0.1.0", "0.2.0"]); // VER-09
    }

    #[test]
    fn an_answer_that_is_not_one_is_refused() {
        for (value, message) in [
            (json!({"supportedVersions": ["1.0.0"]}), "key cniVersion: missing"), // VER-08
            (json!({"cniVersion": ""}), "key cniVersion: missing"),
            // VER-10
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
