//! The configuration of `dhcp`, parsed from a plugin's stdin. Pure.
//!
//! The keys are those of `containernetworking/plugins`, `plugins/ipam/dhcp`; `ipam.broadcast` corresponds to a flag
//! of the daemon there, and `ipam.probe` is netattach's own.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::codec::code;
use super::exchange::Client;
use crate::budget;
use crate::cni::CniArgs;
use crate::ipam::Owner;
use crate::ipam::keys::{ConfigObject, KeyError};
use crate::mac::Mac;

/// The key with the socket of the reference plugin's daemon.
const DAEMON: &str = "daemonSocketPath";

/// The options with names, as in the reference plugin.
const NAMES: [(&str, u8); 6] = [
    ("dhcp-client-identifier", code::CLIENT),
    ("subnet-mask", code::SUBNET_MASK),
    ("routers", code::ROUTERS),
    ("host-name", 12),
    ("user-class", 77),
    ("vendor-class-identifier", 60),
];

/// The options that are requested from every server, after the subnet mask, unless `skipDefault` is set.
const DEFAULT: [u8; 6] = [
    // Requested before the routes that this option replaces (RFC 3442).
    code::CLASSLESS_ROUTES,
    code::ROUTERS,
    code::STATIC_ROUTES,
    code::NAME_SERVERS,
    code::DOMAIN,
    code::SEARCH,
];

/// Options that an exchange sets itself: a configuration can neither request nor provide them.
const OF_EXCHANGE: [u8; 8] = [
    code::PAD,
    code::REQUESTED_ADDRESS,
    code::OVERLOAD,
    code::KIND,
    code::SERVER,
    code::WANTED,
    code::LONGEST_MESSAGE,
    code::END,
];

/// Longest value of an option, and longest identifier without its type byte, in bytes.
const VALUE: usize = 255;
const IDENTIFIER: usize = 254;

/// A validated configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    /// `name`: part of the client's identifier.
    pub network: String,
    /// Whether replies must be broadcast: `ipam.broadcast`, and always for ipvlans, as all ipvlans of a parent have
    /// the same Ethernet address.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub broadcast: bool,
    /// The requested options, in order.
    pub wanted: Vec<u8>,
    /// The provided options, with their values.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub provided: Vec<(u8, String)>,
    /// `ipam.priority`: the metric of the lease's routes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<u32>,
    /// Whether the link is not probed for another host with the address: `ipam.probe` is false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unprobed: bool,
}

/// A configuration cannot be used. Every variant names the key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A key is missing, or its value cannot be read.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// An option that is neither a known name nor a number.
    #[error("{key}: {value:?} is neither the number of an option, 1 to 254, nor one of {}", names())]
    Option {
        /// Path of the key.
        key: String,
        /// Its value.
        value: String,
    },
    /// An option that every exchange sets itself.
    #[error("{key}: option {number} is set by the exchange itself")]
    OfExchange {
        /// Path of the key.
        key: String,
        /// Its number.
        number: u8,
    },
    /// A value that does not fit into an option.
    #[error("{key}: {found} bytes, and an option has at most {}", VALUE)]
    Value {
        /// Path of the key.
        key: String,
        /// Its length.
        found: usize,
    },
    /// The pod or the runtime requests an address.
    #[error("{key}: the server of dhcp chooses the address")]
    Chosen {
        /// Path of the key.
        key: String,
    },
}

fn names() -> String {
    NAMES.map(|(name, _)| name).join(", ")
}

impl Config {
    /// Reads the configuration.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn parse(config: &Map<String, Value>, args: &CniArgs) -> Result<Self, ConfigError> {
        let root = ConfigObject::root(config);
        let ipam = root.needed_object("ipam")?;
        let (_, network) = root.needed_text("name")?;
        if let Some(asked) = root.asked_ips()?.into_iter().flatten().next() {
            return Err(ConfigError::Chosen { key: asked.key });
        }
        let of_ipvlan = root.text("type")? == Some("ipvlan");
        Ok(Self {
            network: network.to_owned(),
            broadcast: ipam.flag("broadcast")? || of_ipvlan,
            wanted: wanted(&ipam)?,
            provided: provided(&ipam, args)?,
            priority: ipam.number("priority")?.filter(|metric| *metric != 0),
            unprobed: ipam.switch("probe")? == Some(false),
        })
    }

    /// Returns the part of a configuration that releasing needs: a lease is identified by its owner.
    pub fn for_release(config: &Map<String, Value>) -> Option<Self> {
        let network = config.get("name")?.as_str()?.to_owned();
        let (wanted, provided) = (Vec::new(), Vec::new());
        Some(Self { network, broadcast: false, wanted, provided, priority: None, unprobed: false })
    }

    /// Returns the DHCP client of an interface, with the identifier that the reference plugin gives it.
    pub(super) fn client(&self, owner: &Owner, mac: Mac) -> Client {
        let name = format!("{}/{}/{}", owner.container_id, self.network, owner.ifname);
        // Type 0: not a hardware address (RFC 2132, section 9.14).
        let id = std::iter::once(0).chain(name.bytes().take(IDENTIFIER)).collect();
        let provided = self.provided.iter().map(|(code, value)| (*code, value.clone().into_bytes()));
        Client {
            mac,
            id,
            broadcast: self.broadcast,
            wanted: self.wanted.clone(),
            provided: provided.collect(),
        }
    }
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an address by DHCP in network {}", self.network)
    }
}

/// Whether a plugin's whole configuration names the socket of the reference plugin's daemon, and so requests that
/// daemon.
pub fn is_by_daemon(config: &Map<String, Value>) -> bool {
    let path = config.get("ipam").and_then(|ipam| ipam.get(DAEMON));
    path.is_some_and(|path| !path.is_null() && path.as_str() != Some(""))
}

fn wanted(ipam: &ConfigObject<'_>) -> Result<Vec<u8>, ConfigError> {
    let mut asked = Vec::new();
    let mut skips_default = false;
    for item in ipam.few("request", &budget::DHCP_OPTIONS)? {
        let request = item.object()?;
        let skips = request.flag("skipDefault")?;
        skips_default |= skips;
        // An entry may only specify options to skip.
        if request.text("option")?.is_some_and(|name| !name.is_empty()) || !skips {
            asked.push(option(&request)?);
        }
    }
    let default = DEFAULT.iter().copied().filter(|_| !skips_default);
    // Without a mask there is no lease; and a request that names no option at all would get all that the server has.
    let mut wanted = vec![code::SUBNET_MASK];
    for code in default.chain(asked) {
        if !wanted.contains(&code) {
            wanted.push(code);
        }
    }
    Ok(wanted)
}

fn provided(ipam: &ConfigObject<'_>, args: &CniArgs) -> Result<Vec<(u8, String)>, ConfigError> {
    let mut provided: Vec<(u8, String)> = Vec::new();
    for item in ipam.few("provide", &budget::DHCP_OPTIONS)? {
        let entry = item.object()?;
        let code = option(&entry)?;
        let argument = entry.text("fromArg")?.filter(|name| !name.is_empty());
        let (key, value) = match argument.and_then(|name| Some((name, args.get(name)?))) {
            Some((name, value)) => (format!("{name} of CNI_ARGS"), value),
            None => (format!("{}.value", item.key), entry.text("value")?.unwrap_or_default()),
        };
        if value.len() > VALUE {
            return Err(ConfigError::Value { key, found: value.len() });
        }
        // As in the reference plugin, the last value of an option counts, and an empty value means no option.
        if !value.is_empty() {
            provided.retain(|(known, _)| *known != code);
            provided.push((code, value.to_owned()));
        }
    }
    let whole = provided.iter().map(|(_, value)| value.len()).sum();
    budget::DHCP_VALUES.check(whole).map_err(KeyError::Exceeded)?;
    Ok(provided)
}

/// Returns the option that an entry names.
fn option(entry: &ConfigObject<'_>) -> Result<u8, ConfigError> {
    let (key, value) = entry.needed_text("option")?;
    let named = NAMES.iter().find(|(name, _)| *name == value).map(|(_, code)| *code);
    match named.or_else(|| value.parse().ok()).filter(|code| (1..=254).contains(code)) {
        Some(number) if OF_EXCHANGE.contains(&number) => Err(ConfigError::OfExchange { key, number }),
        Some(number) => Ok(number),
        None => Err(ConfigError::Option { key, value: value.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(ipam: Value, args: &str) -> Result<Config, String> {
        let config = json!({"name": "lan", "type": "macvlan", "ipam": ipam});
        let args = CniArgs::parse(args).unwrap();
        Config::parse(config.as_object().unwrap(), &args).map_err(|error| error.to_string())
    }

    #[test]
    fn a_configuration_without_keys_asks_for_what_is_used() {
        let expected = Config {
            network: "lan".into(),
            broadcast: false,
            wanted: vec![1, 121, 3, 33, 6, 15, 119],
            provided: Vec::new(),
            priority: None,
            unprobed: false,
        };
        assert_eq!(parse(json!({"type": "dhcp"}), ""), Ok(expected.clone()));
        assert_eq!(parse(json!({"type": "dhcp", "probe": true}), ""), Ok(expected));
    }

    /// Rows: DHCP-request, DHCP-provide, DHCP-unprobed.
    #[test]
    fn options_are_asked_for_and_given_by_name_and_by_number() {
        let ipam = json!({
            "type": "dhcp", "broadcast": true, "priority": 300, "probe": false,
            "request": [{"skipDefault": true}, {"option": "routers"}, {"option": "42"}, {"option": "3"}],
            "provide": [
                {"option": "host-name", "value": "fallback", "fromArg": "K8S_POD_NAME"},
                {"option": "60", "value": "first"},
                {"option": "vendor-class-identifier", "value": "last", "fromArg": "ABSENT"},
                {"option": "77", "fromArg": "ABSENT"},
            ],
        });
        let expected = Config {
            network: "lan".into(),
            broadcast: true,
            wanted: vec![1, 3, 42],
            provided: vec![(12, "web-1".into()), (60, "last".into())],
            priority: Some(300),
            unprobed: true,
        };
        assert_eq!(parse(ipam, "IgnoreUnknown=1;K8S_POD_NAME=web-1"), Ok(expected));
        // The mask is requested all the same.
        let none = parse(json!({"type": "dhcp", "request": [{"skipDefault": true}]}), "").unwrap();
        assert_eq!(none.wanted, [1]);
    }

    /// Rows: DHCP-unprobed.
    #[test]
    fn what_cannot_be_used_is_refused_by_its_key() {
        let names = names();
        let long = "x".repeat(256);
        for (ipam, expected) in [
            (json!({"request": [{}]}), "ipam.request[0].option is missing".to_owned()),
            (
                json!({"request": [{"option": "gateway"}]}),
                format!(
                    "ipam.request[0].option: \"gateway\" is neither the number of an option, 1 to 254, nor one of {names}"
                ),
            ),
            (
                json!({"provide": [{"option": "53", "value": "1"}]}),
                "ipam.provide[0].option: option 53 is set by the exchange itself".to_owned(),
            ),
            (
                json!({"provide": [{"option": "12", "value": long}]}),
                "ipam.provide[0].value: 256 bytes, and an option has at most 255".to_owned(),
            ),
            (json!({"broadcast": 1}), "ipam.broadcast must be true or false".to_owned()),
            (json!({"probe": "arp"}), "ipam.probe must be true or false".to_owned()),
            (json!({"priority": -1}), "ipam.priority must be a number from 0 to 4294967295".to_owned()),
        ] {
            assert_eq!(parse(ipam.clone(), ""), Err(expected), "{ipam}");
        }
        let asks = json!({"name": "lan", "ipam": {}, "runtimeConfig": {"ips": ["10.1.0.7/24"]}});
        let error = Config::parse(asks.as_object().unwrap(), &CniArgs::default()).unwrap_err();
        assert_eq!(error.to_string(), "runtimeConfig.ips[0]: the server of dhcp chooses the address");
    }

    /// Rows: DHCP-client.
    #[test]
    fn a_client_is_known_by_container_network_and_interface() {
        let config = parse(json!({"provide": [{"option": "12", "value": "pod"}]}), "").unwrap();
        let owner = |id: &str| Owner { container_id: id.to_owned(), ifname: "net1".into() };
        let mac = Mac([2, 0, 0, 0, 0, 7]);
        let expected = Client {
            mac,
            id: b"\0c1/lan/net1".to_vec(),
            broadcast: false,
            wanted: config.wanted.clone(),
            provided: vec![(12, b"pod".to_vec())],
        };
        assert_eq!(config.client(&owner("c1"), mac), expected);
        assert_eq!(config.client(&owner(&"c".repeat(300)), mac).id.len(), 255);
    }

    /// Rows: DHCP-broadcast.
    #[test]
    fn an_ipvlan_has_its_answers_sent_to_everybody() {
        let of = |kind: &str| {
            let config = json!({"name": "lan", "type": kind, "ipam": {"type": "dhcp"}});
            Config::parse(config.as_object().unwrap(), &CniArgs::default()).unwrap().broadcast
        };
        assert_eq!(["ipvlan", "macvlan", "bridge"].map(of), [true, false, false]);
        assert!(parse(json!({"broadcast": true}), "").unwrap().broadcast);
    }

    #[test]
    fn the_daemon_serves_who_names_its_socket() {
        let by_daemon = |ipam: Value| is_by_daemon(json!({"ipam": ipam}).as_object().unwrap());
        assert!(by_daemon(json!({"daemonSocketPath": "/run/cni/dhcp.sock"})));
        for ipam in [json!({}), json!({"daemonSocketPath": ""}), json!({"daemonSocketPath": null}), json!(7)]
        {
            assert!(!by_daemon(ipam.clone()), "{ipam}");
        }
    }
}
