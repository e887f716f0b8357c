//! Multus's saved state of a pod: the file named after the container in its state directory, a JSON list of delegates
//! with the configuration that each was called with.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use crate::cni::config::object;
use crate::cni::{ConfigError, Map, NetworkList, Value, Version};

/// One attachment of a pod in Multus's saved state.
#[derive(Debug, Clone, PartialEq)]
pub struct Attachment {
    /// `namespace/name` of its definition, or the name of its configuration.
    pub network: String,
    /// The configuration that its plugins were called with.
    pub list: NetworkList,
    /// Name of its interface in the pod.
    pub ifname: String,
    /// The capability arguments passed to the plugins, as far as they were saved.
    pub requests: Map,
}

/// Why the file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ScratchError {
    /// Not a list of delegates in Multus's format.
    #[error("not a list of delegates as Multus writes it")]
    Json(#[source] serde_json::Error),
    /// The list is empty.
    #[error("the list of delegates is empty")]
    Empty,
    /// The configuration of a delegate is not base64.
    #[error("delegate {index}, key Bytes")]
    Encoding {
        /// Its index, from 0.
        index: usize,
        /// The cause.
        #[source]
        source: base64::DecodeError,
    },
    /// The configuration of a delegate cannot be read.
    #[error("delegate {index}, configuration")]
    Config {
        /// Its index, from 0.
        index: usize,
        /// The cause.
        #[source]
        source: ConfigError,
    },
}

/// The keys of a delegate that are needed for its DEL. Multus writes more, and may add others in future.
#[derive(Debug, Deserialize)]
struct Delegate {
    #[serde(rename = "Name", default)]
    name: String,
    #[serde(rename = "Bytes")]
    bytes: String,
    #[serde(rename = "ifnameRequest", default)]
    ifname: String,
    #[serde(rename = "macRequest", default)]
    mac: String,
    #[serde(rename = "infinibandGUIDRequest", default)]
    infiniband_guid: String,
    #[serde(rename = "ipRequest", default)]
    ips: Option<Vec<String>>,
    #[serde(rename = "deviceID", default)]
    device_id: String,
}

/// Reads the file. `ifname` is that of the request; the first delegate, the default network, uses it unless it
/// requested another name; the others are numbered from it. `version` is used for lists without one, as Multus fills
/// them in.
///
/// # Errors
/// [`ScratchError`] if any delegate cannot be identified with certainty.
pub fn read(bytes: &[u8], ifname: &str, version: Version) -> Result<Vec<Attachment>, ScratchError> {
    let delegates: Vec<Delegate> = serde_json::from_slice(bytes).map_err(ScratchError::Json)?;
    if delegates.is_empty() {
        return Err(ScratchError::Empty);
    }
    let remembered = delegates.into_iter().enumerate();
    remembered.map(|(index, delegate)| delegate.remembered(index, ifname, version)).collect()
}

impl Delegate {
    fn remembered(self, index: usize, ifname: &str, version: Version) -> Result<Attachment, ScratchError> {
        let raw = STANDARD.decode(&self.bytes).map_err(|source| ScratchError::Encoding { index, source })?;
        let list =
            parse(&raw, &self.name, version).map_err(|source| ScratchError::Config { index, source })?;
        let ifname = match (self.ifname.as_str(), index) {
            ("", 0) => ifname.to_owned(),
            ("", _) => format!("net{index}"),
            (asked, _) => asked.to_owned(),
        };
        let network = if self.name.is_empty() { list.name.clone() } else { self.name.clone() };
        Ok(Attachment { network, ifname, requests: self.requests(), list })
    }

    fn requests(&self) -> Map {
        let mut requests = Map::new();
        if let Some(ips) = self.ips.as_ref().filter(|ips| !ips.is_empty()) {
            requests.insert("ips".into(), ips.iter().map(|ip| Value::from(ip.as_str())).collect());
        }
        let texts =
            [("mac", &self.mac), ("infinibandGUID", &self.infiniband_guid), ("deviceID", &self.device_id)];
        for (capability, text) in texts.into_iter().filter(|(_, text)| !text.is_empty()) {
            requests.insert(capability.into(), text.as_str().into());
        }
        requests
    }
}

fn parse(raw: &[u8], definition: &str, version: Version) -> Result<NetworkList, ConfigError> {
    let mut map = object(raw)?;
    if map.contains_key("plugins") && matches!(map.get("cniVersion"), None | Some(Value::Null)) {
        map.insert("cniVersion".into(), version.as_str().into());
    }
    // Multus names a configuration after the object, without its namespace.
    let name = definition.rsplit('/').next().unwrap_or_default();
    NetworkList::parse_with_default_name(Value::Object(map).to_string().as_bytes(), name)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::error_chain::Chain;

    fn delegate(config: &Value, keys: Value) -> Value {
        let mut delegate = json!({
            "Conf": {}, "ConfList": {}, "Name": "", "IsFilterV4Gateway": false, "IsFilterV6Gateway": false,
            "Bytes": STANDARD.encode(config.to_string()),
        });
        delegate.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        delegate
    }

    fn read_value(value: &Value) -> Result<Vec<Attachment>, ScratchError> {
        read(value.to_string().as_bytes(), "eth0", Version::V1_0_0)
    }

    #[test]
    fn delegates_are_read_with_their_interfaces_and_requests() {
        let single = json!({"cniVersion": "0.3.1", "name": "a", "type": "bridge", "odd": [1]});
        let list = json!({"name": "b", "plugins": [{"type": "macvlan"}, {"type": "tuning"}]});
        let nameless = json!({"cniVersion": "1.0.0", "type": "ipvlan"});
        let file = json!([
            delegate(&single, json!({})),
            delegate(
                &list,
                json!({"Name": "shop/b", "macRequest": "02:00:00:00:00:01",
                "ipRequest": ["10.0.0.7/24"], "deviceID": "0000:01:00.0"})
            ),
            delegate(&nameless, json!({"Name": "shop/c", "ifnameRequest": "lan0", "ipRequest": null})),
        ]);
        let expected = |network: &str, ifname: &str, requests: Value, list: Value| Attachment {
            network: network.into(),
            ifname: ifname.into(),
            requests: requests.as_object().unwrap().clone(),
            list: NetworkList::parse_with_default_name(list.to_string().as_bytes(), "c").unwrap(),
        };
        let with_version = json!({"name": "b", "plugins": [{"type": "macvlan"}, {"type": "tuning"}],
            "cniVersion": "1.0.0"});
        assert_eq!(
            read_value(&file).unwrap(),
            [
                expected("a", "eth0", json!({}), single),
                expected(
                    "shop/b",
                    "net1",
                    json!({"ips": ["10.0.0.7/24"], "mac": "02:00:00:00:00:01", "deviceID": "0000:01:00.0"}),
                    with_version
                ),
                expected("shop/c", "lan0", json!({}), json!({"cniVersion": "1.0.0", "type": "ipvlan"})),
            ]
        );
    }

    #[test]
    fn other_files_are_refused_with_the_place_of_the_error() {
        let table = [
            (
                json!({}),
                "not a list of delegates as Multus writes it: invalid type: map, expected a sequence at line 1 column 0",
            ),
            (json!([]), "the list of delegates is empty"),
            (
                json!([{"Name": "a"}]),
                "not a list of delegates as Multus writes it: missing field `Bytes` at line 1 column 13",
            ),
            (json!([{"Bytes": "?"}]), "delegate 0, key Bytes: Invalid symbol 63, offset 0."),
            (
                json!([delegate(&json!({"name": "a"}), json!({}))]),
                "delegate 0, configuration: keys plugins and type are both missing",
            ),
        ];
        for (file, message) in table {
            assert_eq!(Chain(&read_value(&file).unwrap_err()).to_string(), message, "{file}");
        }
        let whole = json!([delegate(&json!({"name": "a", "type": "b"}), json!({}))]).to_string();
        for length in 0..whole.len() {
            assert!(read(&whole.as_bytes()[..length], "eth0", Version::V1_0_0).is_err(), "{length}");
        }
    }
}
