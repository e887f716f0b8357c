//! The result cache: the files in which libcni and its users store the input and the result of each ADD.
//!
//! One JSON object per attachment (libcni `api.go`, `cachedInfo`). Older versions of libcni wrote the bare result. A
//! file name joins three parts that may contain the separator themselves, so the attachment is identified from the
//! content.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use super::config::{ConfigError, NetworkList};
use super::json::{Map, Value, count_values, null_is_default};
use crate::budget::{self, Exceeded};

/// The value of `kind` that identifies the format.
const KIND: &str = "cniCacheV1";

/// Identifies the attachment of a cached entry.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// `name` of the network's configuration.
    pub network: String,
    /// `CNI_CONTAINERID`.
    pub container_id: String,
    /// `CNI_IFNAME`.
    pub ifname: String,
}

/// A cached entry: the input of an ADD and its result.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// The attachment.
    pub key: Key,
    /// The network's configuration, byte for byte.
    pub config: Vec<u8>,
    /// `CNI_NETNS`.
    pub netns: Option<String>,
    /// `CNI_ARGS` in their order.
    pub args: Vec<(String, String)>,
    /// The capability arguments that the runtime offered to plugins.
    pub capability_args: Map,
    /// The last plugin's result, in the version it was printed in.
    pub result: Option<Value>,
}

/// Why a cached file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CacheFormatError {
    /// Empty: its writer lost power.
    #[error("the file is empty")]
    Empty,
    /// A size limit is exceeded.
    #[error(transparent)]
    Exceeded(#[from] Exceeded),
    /// Not JSON, or a key of another type.
    #[error("not a cached attachment")]
    Json(#[source] serde_json::Error),
    /// Another document, such as a bare result of an old libcni.
    #[error("key kind: expected {KIND:?}, found {0:?}")]
    Kind(String),
    /// The configuration is not base64.
    #[error("key config")]
    Config(#[source] base64::DecodeError),
    /// A key that identifies the attachment is missing or empty.
    #[error("key {0}: missing or empty")]
    Missing(&'static str),
}

/// The format in the file.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Stored {
    #[serde(default)]
    kind: String,
    #[serde(default)]
    container_id: String,
    #[serde(default, deserialize_with = "null_is_default")]
    config: String,
    #[serde(default)]
    if_name: String,
    #[serde(default)]
    network_name: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    netns: String,
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "Vec::is_empty")]
    cni_args: Vec<(String, String)>,
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "Map::is_empty")]
    capability_args: Map,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    result: Option<Value>,
}

impl Key {
    /// The name of the file. Two attachments may share it: network `a-b` of container `c` and network `a` of container
    /// `b-c`.
    pub fn file_name(&self) -> String {
        format!("{}-{}-{}", self.network, self.container_id, self.ifname)
    }

    /// The first part that is empty: libcni caches nothing for such an attachment.
    pub fn missing(&self) -> Option<&'static str> {
        let parts =
            [("networkName", &self.network), ("containerId", &self.container_id), ("ifName", &self.ifname)];
        parts.into_iter().find(|(_, part)| part.is_empty()).map(|(name, _)| name)
    }
}

/// Whether a file of that name can belong to the container; its content decides.
pub fn may_be_of(file_name: &str, container_id: &str) -> bool {
    let infix = format!("-{container_id}-");
    file_name.find(&infix).is_some_and(|at| at > 0 && at + infix.len() < file_name.len())
}

impl Entry {
    /// The content of the file.
    pub fn encode(&self) -> Vec<u8> {
        let stored = Stored {
            kind: KIND.into(),
            container_id: self.key.container_id.clone(),
            config: STANDARD.encode(&self.config),
            if_name: self.key.ifname.clone(),
            network_name: self.key.network.clone(),
            netns: self.netns.clone().unwrap_or_default(),
            cni_args: self.args.clone(),
            capability_args: self.capability_args.clone(),
            result: self.result.clone(),
        };
        // Serializing strings and JSON values cannot fail, and this function has no way to report it if it did.
        serde_json::to_vec(&stored).unwrap_or_default()
    }

    /// Reads a file.
    ///
    /// # Errors
    /// [`CacheFormatError`], also for a bare result; for those see [`result`].
    pub fn decode(bytes: &[u8]) -> Result<Self, CacheFormatError> {
        if bytes.is_empty() {
            return Err(CacheFormatError::Empty);
        }
        budget::CACHED_VALUES.check(count_values(bytes))?;
        let stored: Stored = serde_json::from_slice(bytes).map_err(CacheFormatError::Json)?;
        if stored.kind != KIND {
            return Err(CacheFormatError::Kind(stored.kind));
        }
        let entry = Self {
            key: Key {
                network: stored.network_name,
                container_id: stored.container_id,
                ifname: stored.if_name,
            },
            config: STANDARD.decode(stored.config).map_err(CacheFormatError::Config)?,
            netns: Some(stored.netns).filter(|netns| !netns.is_empty()),
            args: stored.cni_args,
            capability_args: stored.capability_args,
            result: stored.result.filter(|result| !result.is_null()),
        };
        entry.key.missing().map_or(Ok(entry), |key| Err(CacheFormatError::Missing(key)))
    }

    /// The network's configuration as it was at ADD.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn network(&self) -> Result<NetworkList, ConfigError> {
        NetworkList::parse_with_default_name(&self.config, &self.key.network)
    }

    /// `CNI_ARGS` in its text form.
    pub fn args_text(&self) -> String {
        let pairs: Vec<String> = self.args.iter().map(|(key, value)| format!("{key}={value}")).collect();
        pairs.join(";")
    }
}

/// The result in a file of any libcni version: the result in the entry, or the file itself if it is a bare result.
/// `None` for an entry that was written without a result.
///
/// # Errors
/// [`CacheFormatError::Empty`] or [`CacheFormatError::Json`].
pub fn result(bytes: &[u8]) -> Result<Option<Value>, CacheFormatError> {
    if bytes.is_empty() {
        return Err(CacheFormatError::Empty);
    }
    budget::CACHED_VALUES.check(count_values(bytes))?;
    let mut map: Map = serde_json::from_slice(bytes).map_err(CacheFormatError::Json)?;
    if map.get("kind").and_then(Value::as_str) == Some(KIND) {
        return Ok(map.remove("result").filter(|result| !result.is_null()));
    }
    Ok(Some(Value::Object(map)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::error_chain::Chain;

    fn entry() -> Entry {
        Entry {
            key: Key { network: "n".into(), container_id: "c1".into(), ifname: "eth0".into() },
            config: br#"{"name":"n","type":"a"}"#.to_vec(),
            netns: Some("/run/netns/a".into()),
            args: vec![("IgnoreUnknown".into(), "1".into()), ("K8S_POD_NAME".into(), "p".into())],
            capability_args: json!({"mac": "m"}).as_object().unwrap().clone(),
            result: Some(json!({"cniVersion": "1.0.0", "own": 9_007_199_254_740_993_u64})),
        }
    }

    fn stored() -> Value {
        json!({
            "kind": "cniCacheV1", "containerId": "c1", "config": "eyJuYW1lIjoibiIsInR5cGUiOiJhIn0=",
            "ifName": "eth0", "networkName": "n", "netns": "/run/netns/a",
            "cniArgs": [["IgnoreUnknown", "1"], ["K8S_POD_NAME", "p"]], "capabilityArgs": {"mac": "m"},
            "result": {"cniVersion": "1.0.0", "own": 9_007_199_254_740_993_u64},
        })
    }

    /// Rows: CAC-03, ADD-10.
    #[test]
    fn an_entry_is_one_object_and_reads_back_as_it_was() {
        let bytes = entry().encode();
        assert_eq!(serde_json::from_slice::<Value>(&bytes).unwrap(), stored());
        assert_eq!(Entry::decode(&bytes).unwrap(), entry());
        assert_eq!(entry().args_text(), "IgnoreUnknown=1;K8S_POD_NAME=p");
        let bare =
            Entry { netns: None, args: Vec::new(), capability_args: Map::new(), result: None, ..entry() };
        let keys: Map = serde_json::from_slice(&bare.encode()).unwrap();
        assert_eq!(
            keys.keys().collect::<Vec<_>>(),
            ["kind", "containerId", "config", "ifName", "networkName"]
        );
        assert_eq!(Entry::decode(&bare.encode()).unwrap(), bare);
    }

    #[test]
    fn null_as_go_prints_it_is_empty() {
        let mut keys = stored();
        for key in ["config", "cniArgs", "capabilityArgs", "result"] {
            keys[key] = Value::Null;
        }
        let read = Entry::decode(keys.to_string().as_bytes()).unwrap();
        let expected = Entry {
            config: Vec::new(),
            args: Vec::new(),
            capability_args: Map::new(),
            result: None,
            ..entry()
        };
        assert_eq!(read, expected);
    }

    /// Rows: CAC-04.
    #[test]
    fn a_bare_result_or_another_kind_is_read_as_a_result() {
        let bare = json!({"cniVersion": "0.3.1", "ips": []});
        assert_eq!(result(bare.to_string().as_bytes()).unwrap(), Some(bare));
        let other = json!({"kind": "cniCacheV2", "result": {}});
        assert_eq!(result(other.to_string().as_bytes()).unwrap(), Some(other));
        assert_eq!(result(&entry().encode()).unwrap(), entry().result);
        assert_eq!(result(&Entry { result: None, ..entry() }.encode()).unwrap(), None);
    }

    /// Rows: CAC-07.
    #[test]
    fn a_file_that_is_no_entry_says_why() {
        let with = |key: &str, value: Value| {
            let mut keys = stored();
            keys[key] = value;
            keys.to_string()
        };
        for (text, message) in [
            (String::new(), "the file is empty"),
            ("{".into(), "not a cached attachment: EOF while parsing an object at line 1 column 1"),
            (json!({"cniVersion": "1.0.0"}).to_string(), "key kind: expected \"cniCacheV1\", found \"\""),
            (with("config", json!("*")), "key config: Invalid symbol 42, offset 0."),
            (with("networkName", json!("")), "key networkName: missing or empty"),
            (with("containerId", json!("")), "key containerId: missing or empty"),
            (with("ifName", json!("")), "key ifName: missing or empty"),
        ] {
            let error = Entry::decode(text.as_bytes()).unwrap_err();
            assert_eq!(Chain(&error).to_string(), message, "{text}");
        }
    }

    /// Rows: CAC-10.
    #[test]
    fn a_file_name_does_not_say_whose_it_is() {
        let key = |network: &str, container: &str| Key {
            network: network.into(),
            container_id: container.into(),
            ifname: "eth0".into(),
        };
        assert_eq!(key("a-b", "c").file_name(), key("a", "b-c").file_name());
        for (container, may) in [("b-c", true), ("c", true), ("a", false), ("eth0", false), ("x", false)] {
            assert_eq!(may_be_of("a-b-c-eth0", container), may, "{container}");
        }
    }
}
