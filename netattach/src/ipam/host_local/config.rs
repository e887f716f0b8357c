//! The configuration of `host-local`, parsed from a plugin's stdin.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::range::{Limits, Range, RangeError, RangeSet};
use crate::budget;
use crate::ipam::keys::{ConfigObject, Item, KeyError, address_without_prefix, holds_many_addresses};

/// `ipam.dataDir` when absent.
pub const DEFAULT_DATA_DIR: &str = "/var/lib/cni/networks";

/// A validated configuration together with the runtime's requests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    /// `name`: the directory of the reservations below [`Config::data_dir`]. Networks of the same name share it.
    pub network: String,
    /// `ipam.dataDir`.
    pub data_dir: PathBuf,
    /// `runtimeConfig.ipRanges`, then `ipam.subnet` and its companions as a set of one range, then
    /// `ipam.ranges`. Never empty except by [`Config::for_release`]; no two sets overlap.
    pub sets: Vec<RangeSet>,
    /// `ipam.exclude`: networks (or single addresses) that are never leased. The Go plugin does not know this key.
    pub exclude: Vec<IpNet>,
    /// Requested addresses, without duplicates: `IP` of `CNI_ARGS`, `args.cni.ips`, `runtimeConfig.ips`.
    pub requested: Vec<IpAddr>,
    /// `ipam.routes`: objects of the CNI result, as configured. Their `dst` and `gw` have been validated.
    pub routes: Vec<Map<String, Value>>,
    /// `ipam.resolvConf`: the file to read the result's `dns` from, in the format of resolv.conf(5).
    pub resolv_conf: Option<PathBuf>,
}

impl Config {
    /// A copy with the pool and the requested addresses.
    pub fn without_routes(&self) -> Self {
        let Self { network, data_dir, sets, exclude, requested, routes: _, resolv_conf } = self;
        Self {
            network: network.clone(),
            data_dir: data_dir.clone(),
            sets: sets.clone(),
            exclude: exclude.clone(),
            requested: requested.clone(),
            routes: Vec::new(),
            resolv_conf: resolv_conf.clone(),
        }
    }
}

/// A configuration cannot be used. Every variant names the key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A key is missing, or its value cannot be read.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// `name` cannot be the name of a directory.
    #[error(
        "name {0:?} is not a network name: it must start with a letter or digit, followed by those, _ . or -"
    )]
    Name(String),
    /// A range that cannot be used.
    #[error("{key}")]
    Range {
        /// Path of the range.
        key: String,
        /// The reason.
        source: RangeError,
    },
    /// A range set without ranges.
    #[error("{key} is an empty range set")]
    EmptySet {
        /// Path of the set.
        key: String,
    },
    /// IPv4 and IPv6 ranges in one set.
    #[error("{key} mixes IPv4 and IPv6 ranges: write a set for each")]
    MixedFamilies {
        /// Path of the set.
        key: String,
    },
    /// Two ranges share addresses.
    #[error("range {first} of {first_key} overlaps with {second} of {second_key}")]
    Overlap {
        /// A range.
        first: Box<Range>,
        /// The set it is in.
        first_key: String,
        /// Another range.
        second: Box<Range>,
        /// The set that contains the other range.
        second_key: String,
    },
    /// None of the three keys contains a range.
    #[error("no ranges: one of ipam.subnet, ipam.ranges, runtimeConfig.ipRanges is needed")]
    NoRanges,
    /// Results before 0.3.0 have one address per family.
    #[error("cniVersion {0:?} allows one range set per address family: use 0.3.0 or newer")]
    ManyPerFamily(String),
}

impl Config {
    /// Reads the configuration from a plugin's stdin; `cni_args_ip` is the value of `IP` in `CNI_ARGS`.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn parse(config: &Map<String, Value>, cni_args_ip: Option<&str>) -> Result<Self, ConfigError> {
        let root = ConfigObject::root(config);
        let network = root.text("name")?.ok_or_else(|| KeyError::Missing { key: "name".to_owned() })?;
        if !is_network_name(network) {
            return Err(ConfigError::Name(network.to_owned()));
        }
        let ipam = root.needed_object("ipam")?;
        let runtime = root.object("runtimeConfig")?;

        budget::FILE_NAME.check(network.len()).map_err(KeyError::Exceeded)?;
        let sets = range_sets(&ipam, runtime.as_ref())?;
        let version = root.text("cniVersion")?.unwrap_or_default();
        let ipv4 = sets.iter().filter(|set| set.is_ipv4()).count();
        if (ipv4 > 1 || sets.len() - ipv4 > 1) && !holds_many_addresses(version) {
            return Err(ConfigError::ManyPerFamily(version.to_owned()));
        }
        Ok(Self {
            network: network.to_owned(),
            data_dir: ipam.path("dataDir")?.unwrap_or_else(|| DEFAULT_DATA_DIR.into()),
            sets,
            exclude: ipam
                .few("exclude", &budget::EXCLUDED)?
                .map(|item| item.network_or_address())
                .collect::<Result<_, _>>()?,
            requested: requested(&root, cni_args_ip)?,
            routes: ipam.routes()?,
            resolv_conf: ipam.path("resolvConf")?,
        })
    }

    /// The part that releasing needs: the network and its data directory, so that addresses can be released despite an
    /// invalid or missing range. Nothing can be allocated from it. `None` if [`Config::parse`] would have refused
    /// these two, so that nothing was ever reserved.
    pub fn for_release(config: &Map<String, Value>) -> Option<Self> {
        let root = ConfigObject::root(config);
        let network = root.text("name").ok()??;
        let ipam = root.object("ipam").ok()??;
        is_network_name(network).then_some(())?;
        let data_dir = ipam.path("dataDir").ok()?.unwrap_or_else(|| DEFAULT_DATA_DIR.into());
        Some(Self::without_ranges(data_dir, network))
    }

    /// The part that releasing needs.
    pub(super) fn without_ranges(data_dir: PathBuf, network: &str) -> Self {
        Self {
            network: network.to_owned(),
            data_dir,
            sets: Vec::new(),
            exclude: Vec::new(),
            requested: Vec::new(),
            routes: Vec::new(),
            resolv_conf: None,
        }
    }

    /// The directory of the network's reservations.
    pub fn directory(&self) -> PathBuf {
        self.data_dir.join(&self.network)
    }

    /// The pool of the network.
    pub fn pool(&self) -> Pool {
        Pool { data_dir: self.data_dir.clone(), network: self.network.clone() }
    }
}

/// The place of one network's reservations.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Pool {
    /// `ipam.dataDir`.
    pub data_dir: PathBuf,
    /// Name of the network and of its directory below that.
    pub network: String,
}

impl fmt::Display for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.data_dir.join(&self.network).display())
    }
}

/// Moves the pool of an `ipam` section into a directory of its namespace: `<dataDir>/@<namespace>/<name>`. No network
/// name starts with `@`, so that directory is no network's pool. An invalid `dataDir` is left unchanged:
/// [`Config::parse`] refuses it.
pub fn separate(section: &mut Map<String, Value>, namespace: &str) {
    let data_dir = match section.get("dataDir") {
        None => DEFAULT_DATA_DIR,
        Some(Value::String(text)) if text.is_empty() => DEFAULT_DATA_DIR,
        Some(Value::String(text)) => text,
        Some(_) => return,
    };
    let directory = PathBuf::from(data_dir).join(format!("@{namespace}"));
    section.insert("dataDir".into(), directory.to_string_lossy().into());
}

/// Whether a network's name can be the name of its directory: the grammar of the CNI specification, which allows
/// neither separators nor a leading dot.
pub(super) fn is_network_name(name: &str) -> bool {
    name.starts_with(|first: char| first.is_ascii_alphanumeric())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'))
}

fn range_sets(ipam: &ConfigObject, runtime: Option<&ConfigObject>) -> Result<Vec<RangeSet>, ConfigError> {
    let mut sets: Vec<(String, RangeSet)> = Vec::new();
    if let Some(runtime) = runtime {
        for item in runtime.items("ipRanges")? {
            sets.push((item.key.clone(), range_set(&item)?));
        }
    }
    if ipam.text("subnet")?.is_some_and(|subnet| !subnet.is_empty()) {
        sets.push(("ipam.subnet".to_owned(), RangeSet(vec![range(ipam, "ipam".to_owned())?])));
    }
    for item in ipam.items("ranges")? {
        sets.push((item.key.clone(), range_set(&item)?));
    }
    if sets.is_empty() {
        return Err(ConfigError::NoRanges);
    }
    // Checked before the ranges are compared with each other.
    let ranges = sets.iter().map(|(_, set)| set.ranges().len()).sum();
    budget::RANGES.check(ranges).map_err(KeyError::Exceeded)?;
    for (position, (first_key, first)) in sets.iter().enumerate() {
        let within = first.own_overlap().map(|pair| (first_key, pair));
        let between =
            || sets[position + 1..].iter().find_map(|(key, second)| Some((key, first.overlap(second)?)));
        if let Some((second_key, (first, second))) = within.or_else(between) {
            return Err(ConfigError::Overlap {
                first: Box::new(first.clone()),
                first_key: first_key.clone(),
                second: Box::new(second.clone()),
                second_key: second_key.clone(),
            });
        }
    }
    Ok(sets.into_iter().map(|(_, set)| set).collect())
}

fn requested(root: &ConfigObject, cni_args_ip: Option<&str>) -> Result<Vec<IpAddr>, ConfigError> {
    let mut requested = Vec::new();
    if let Some(text) = cni_args_ip.filter(|text| !text.is_empty()) {
        requested.push(address_without_prefix("IP of CNI_ARGS", text)?);
    }
    for item in root.asked_ips()?.iter().flatten() {
        let address = address_without_prefix(&item.key, item.text()?)?;
        if !requested.contains(&address) {
            requested.push(address);
        }
    }
    Ok(requested)
}

fn range(object: &ConfigObject, key: String) -> Result<Range, ConfigError> {
    let subnet = object.network("subnet")?;
    let limits = Limits {
        start: object.address("rangeStart")?,
        end: object.address("rangeEnd")?,
        gateway: object.address("gateway")?,
    };
    Range::new(subnet, limits).map_err(|source| ConfigError::Range { key, source })
}

fn range_set(item: &Item) -> Result<RangeSet, ConfigError> {
    let ranges =
        item.list()?.map(|item| range(&item.object()?, item.key.clone())).collect::<Result<Vec<_>, _>>()?;
    match ranges.split_first() {
        None => Err(ConfigError::EmptySet { key: item.key.clone() }),
        Some((first, rest)) if rest.iter().any(|r| r.start.is_ipv4() != first.start.is_ipv4()) => {
            Err(ConfigError::MixedFamilies { key: item.key.clone() })
        }
        Some(_) => Ok(RangeSet(ranges)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::error_chain::Chain;

    fn parse(value: Value, cni_args_ip: Option<&str>) -> Result<Config, ConfigError> {
        Config::parse(value.as_object().unwrap(), cni_args_ip)
    }

    fn shown(sets: &[RangeSet]) -> Vec<String> {
        sets.iter().map(RangeSet::to_string).collect()
    }

    #[test]
    fn what_is_broken_besides_the_directory_does_not_keep_addresses() {
        let released = |value: Value| Config::for_release(value.as_object().unwrap());
        let broken = json!({"name": "blue", "ipam": {"dataDir": "/run/leases", "ranges": 7, "routes": [{}]}});
        assert_eq!(released(broken).unwrap().directory(), PathBuf::from("/run/leases/blue"));
        let bare = released(json!({"name": "blue", "ipam": {}})).unwrap();
        assert_eq!(bare.directory(), PathBuf::from(DEFAULT_DATA_DIR).join("blue"));
        for refused in [
            json!({"name": "..", "ipam": {}}),
            json!({"name": "blue"}),
            json!({"name": "blue", "ipam": {"dataDir": "run/leases"}}),
        ] {
            assert_eq!(released(refused.clone()), None, "{refused}");
        }
    }

    /// Rows: HLC-ranges, HLC-ipRanges.
    #[test]
    fn everything_is_read_and_survives_the_journal() {
        let config = parse(
            json!({
                "cniVersion": "1.1.0", "name": "blue", "type": "bridge",
                "ipam": {
                    "type": "host-local", "dataDir": "/run/leases", "resolvConf": "/etc/resolv.conf",
                    "subnet": "10.1.0.0/24", "rangeStart": "10.1.0.10", "rangeEnd": "10.1.0.20", "gateway": "10.1.0.254",
                    "ranges": [[{"subnet": "10.2.0.0/29"}, {"subnet": "10.2.1.0/29"}], [{"subnet": "2001:db8::/64"}]],
                    "exclude": ["10.1.0.16/30", "10.2.0.4", "2001:db8::ff/120"],
                    "routes": [{"dst": "0.0.0.0/0", "gw": "10.1.0.254", "mtu": 1400, "x": {"y": 1}}, {"dst": "::/0"}]
                },
                "args": {"cni": {"ips": ["10.2.0.3/24"]}},
                "runtimeConfig": {"ips": ["2001:db8::7", "10.1.0.11"], "ipRanges": [[{"subnet": "10.0.0.0/30"}]]}
            }),
            Some("10.1.0.11"),
        )
        .unwrap();
        assert_eq!(config.directory(), PathBuf::from("/run/leases/blue"));
        assert_eq!(
            shown(&config.sets),
            [
                "10.0.0.1-10.0.0.2",
                "10.1.0.10-10.1.0.20",
                "10.2.0.1-10.2.0.6,10.2.1.1-10.2.1.6",
                "2001:db8::1-2001:db8::ffff:ffff:ffff:ffff",
            ]
        );
        assert_eq!(config.sets[1].ranges()[0].gateway.to_string(), "10.1.0.254");
        assert_eq!(
            config.exclude.iter().map(IpNet::to_string).collect::<Vec<_>>(),
            ["10.1.0.16/30", "10.2.0.4/32", "2001:db8::/120"]
        );
        assert_eq!(
            config.requested.iter().map(IpAddr::to_string).collect::<Vec<_>>(),
            ["10.1.0.11", "10.2.0.3", "2001:db8::7"]
        );
        assert_eq!(
            serde_json::to_value(&config.routes).unwrap(),
            json!([{"dst": "0.0.0.0/0", "gw": "10.1.0.254", "mtu": 1400, "x": {"y": 1}}, {"dst": "::/0"}])
        );
        assert_eq!(config.resolv_conf, Some("/etc/resolv.conf".into()));
        let journal = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<Config>(&journal).unwrap(), config);
    }

    #[test]
    fn null_is_absent() {
        let config = parse(
            json!({
                "name": "n", "args": null, "runtimeConfig": {"ips": null, "ipRanges": null},
                "ipam": {"subnet": "10.0.0.0/24", "gateway": null, "dataDir": null, "ranges": null, "routes": null}
            }),
            None,
        )
        .unwrap();
        assert_eq!(
            config,
            Config {
                network: "n".to_owned(),
                data_dir: DEFAULT_DATA_DIR.into(),
                sets: config.sets.clone(),
                exclude: vec![],
                requested: vec![],
                routes: vec![],
                resolv_conf: None
            }
        );
        assert_eq!(shown(&config.sets), ["10.0.0.1-10.0.0.254"]);
    }

    /// Rows: HLC-exclude.
    #[test]
    fn refusals_name_the_key() {
        let ipam = |ipam: Value| json!({"cniVersion": "1.0.0", "name": "n", "ipam": ipam});
        let table = [
            (json!({}), "name is missing"),
            (json!({"name": 7}), "name must be a string"),
            (
                json!({"name": "../up"}),
                "name \"../up\" is not a network name: it must start with a letter or digit, followed by those, _ . or -",
            ),
            (json!({"name": "n"}), "ipam is missing"),
            (json!({"name": "n", "ipam": []}), "ipam must be an object"),
            (ipam(json!({})), "no ranges: one of ipam.subnet, ipam.ranges, runtimeConfig.ipRanges is needed"),
            (
                ipam(json!({"subnet": "10.0.0.0"})),
                "ipam.subnet: \"10.0.0.0\" is not a network such as 10.1.0.0/16",
            ),
            (
                ipam(json!({"subnet": "10.0.0.9/24"})),
                "ipam: subnet 10.0.0.9/24 has host bits set; the network is 10.0.0.0/24",
            ),
            (
                ipam(json!({"subnet": "10.0.0.0/24", "rangeStart": "fe80::1%eth0"})),
                "ipam.rangeStart: \"fe80::1%eth0\" is not an IP address",
            ),
            (ipam(json!({"ranges": {}})), "ipam.ranges must be a list"),
            (ipam(json!({"ranges": [null]})), "ipam.ranges[0] must be a list"),
            (ipam(json!({"ranges": [[]]})), "ipam.ranges[0] is an empty range set"),
            (ipam(json!({"ranges": [[{}]]})), "ipam.ranges[0][0].subnet is missing"),
            (
                ipam(json!({"ranges": [[{"subnet": "10.0.0.0/24"}, {"subnet": "2001:db8::/64"}]]})),
                "ipam.ranges[0] mixes IPv4 and IPv6 ranges: write a set for each",
            ),
            (
                ipam(json!({"ranges": [[{"subnet": "10.0.0.0/24"}], [{"subnet": "10.0.0.0/16"}]]})),
                "range 10.0.0.1-10.0.0.254 of ipam.ranges[0] overlaps with 10.0.0.1-10.0.255.254 of ipam.ranges[1]",
            ),
            (
                ipam(json!({"ranges": [[{"subnet": "10.0.0.0/24"}, {"subnet": "10.0.0.0/25"}]]})),
                "range 10.0.0.1-10.0.0.254 of ipam.ranges[0] overlaps with 10.0.0.1-10.0.0.126 of ipam.ranges[0]",
            ),
            (
                ipam(json!({"subnet": "10.0.0.0/24", "dataDir": "leases"})),
                "ipam.dataDir: leases is not an absolute path",
            ),
            (
                ipam(json!({"subnet": "10.0.0.0/24", "exclude": ["x"]})),
                "ipam.exclude[0]: \"x\" is not a network such as 10.1.0.0/16",
            ),
            (ipam(json!({"subnet": "10.0.0.0/24", "routes": [{}]})), "ipam.routes[0].dst is missing"),
            (
                ipam(json!({"subnet": "10.0.0.0/24", "routes": [{"dst": "::/0", "gw": "x"}]})),
                "ipam.routes[0].gw: \"x\" is not an IP address",
            ),
            (
                json!({"name": "n", "ipam": {"ranges": [[{"subnet": "10.0.0.0/24"}], [{"subnet": "10.0.1.0/24"}]]}}),
                "cniVersion \"\" allows one range set per address family: use 0.3.0 or newer",
            ),
            (
                json!({"name": "n", "ipam": {"subnet": "10.0.0.0/24"}, "runtimeConfig": {"ips": ["nope"]}}),
                "runtimeConfig.ips[0]: \"nope\" is not an IP address",
            ),
        ];
        for (config, expected) in table {
            let error = parse(config, None).unwrap_err();
            assert_eq!(Chain(&error).to_string(), expected);
        }
        let error = parse(ipam(json!({"subnet": "10.0.0.0/24"})), Some("10.0.0.300")).unwrap_err();
        assert_eq!(error.to_string(), "IP of CNI_ARGS: \"10.0.0.300\" is not an IP address");
    }
}
