//! Address management that netattach carries out itself, with one interface for all kinds.
//!
//! A [`Kind`] is a value of `ipam.type`. Its configuration is a [`Config`], which is part of a plan's step `Lease` and
//! of its record; [`Leases`] carries out the calls of steps and requests. Only this directory names a single kind:
//! address management of any other `type` is executed as a plugin.
//!
//! In the order of one lease: `keys` read a configuration, `leases` passes the call on to its kind, [`host_local`],
//! [`static_addresses`] or [`dhcp`], and `error` defines the errors.
//!
//! # What each function may do
//!
//! | function | called | may block on | repeated |
//! |---|---|---|---|
//! | [`Kind::parse`], [`Kind::remains`], methods of [`Config`] | while planning, for status and GC | nothing: they are pure | the same answer |
//! | [`Leases::lease`] | once for an ADD, after the journal's line "began" | locks, disk, network | not before [`Leases::release`] |
//! | [`Leases::check`] | CHECK | the same | the same answer; changes nothing |
//! | [`Leases::release`] | DEL, and an ADD or an agent's start that undoes a lease which may not have begun | the same | succeeds: nothing is left to release |
//! | [`Leases::collect`] | GC, while the pool is closed to all others | the same | succeeds |
//! | [`Leases::room`], [`Leases::survey`] | STATUS, every few seconds concurrently with requests; when an operator asks | the same | the same answer; changes nothing |
//! | [`Leases::usage`] | a look at the networks, every few seconds | the same | the same answer; changes nothing |
//! | [`Leases::check_in_force`] | as an ADD is about to answer | nothing | the same answer; changes nothing |
//! | [`Leases::held`], [`Leases::release_container`], [`Leases::held_by_server`], [`Leases::release_to_servers`] | for a container whose record has lost its plan | the same | as `check` and `release` |
//!
//! *Deadline.* Every call of [`Leases`] ends within [`DEADLINE`], one for a look ([`Patience::Look`]) within a tenth of a
//! second where others are at the pool, with an error whose [`Failure`] is `TryLater` if a retry may succeed. A kind that
//! uses a service limits connection and answer to that time.
//!
//! *Lanes.* Because a call of [`Leases`] may take that long, callers first enter the lane of the [`Pool`]
//! (`waits::at_pool`): [`Config::pool`] names the pool that a call may wait for, operations that need the same pool
//! share a lane, and operations of other pools do not wait for them. A kind that waits for nothing outside this
//! process has no pool. A kind that waits for a service has no pool either: it has the lane that an executed plugin of its
//! name would have in that network (`waits::of_lease`).
//!
//! *Owner of an address.* An [`Owner`] is an interface of a container: unique on this node, and the same from ADD to
//! DEL and across restarts. A kind whose addresses are unique in a cluster adds the node's name itself. The agent
//! compares a chosen address ([`Config::is_chosen`]) with those of other attachments and of the node
//! (`attach::occupied`); a kind only has to avoid conflicts among its own addresses.
//!
//! *Persistence.* A restarted agent has to find a lease by its owner alone: on disk, at the service, or nowhere if the
//! configuration contains it. A writer that is killed leaves either a complete lease or none. A kind that renews
//! leases starts doing so in `lease` and stops in `release` and `collect`; the [`Lessee`] has the pod's namespace for
//! a kind that communicates from there.

pub mod dhcp;
mod error;
pub mod host_local;
mod keys;
mod leases;
pub mod static_addresses;

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::cni::{self, AttachmentId, CniArgs};
use crate::netns::Netns;

pub use error::{ConfigError, Error, Failure};
pub use keys::KeyError;
pub use leases::Leases;

/// The longest duration of a call of [`Leases`].
pub const DEADLINE: Duration = host_local::LOCK_DEADLINE;

/// How long a call waits for a pool that others are at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patience {
    /// As long as an operation may: [`DEADLINE`].
    Operation,
    /// Hardly: a tenth of a second. For a look that is taken again, or that has many pools to look at.
    Look,
}

/// A kind of address management.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Addresses of one node, each reserved by a file.
    HostLocal,
    /// Addresses from the configuration or the pod.
    Static,
    /// Addresses of a DHCP server.
    Dhcp,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::HostLocal, Self::Static, Self::Dhcp];

    /// The kind with that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// The kind in a plugin's configuration.
    pub fn of(config: &Map<String, Value>) -> Option<Self> {
        Self::named(config.get("ipam")?.get("type")?.as_str()?)
    }

    /// Whether netattach carries a plugin's whole configuration out itself. `recorded`: by an agent, which keeps a record;
    /// only there leases are renewed. A configuration that names the socket of another daemon is that daemon's.
    pub fn is_carried_out(self, config: &Map<String, Value>, recorded: bool) -> bool {
        match self {
            Self::HostLocal | Self::Static => true,
            Self::Dhcp => recorded && !dhcp::is_by_daemon(config),
        }
    }

    /// Whether it works without an agent, as a plain CNI executable.
    pub const fn is_plain(self) -> bool {
        match self {
            Self::HostLocal | Self::Static => true,
            Self::Dhcp => false,
        }
    }

    /// The value of `ipam.type`, and the name of the plugin.
    pub const fn name(self) -> &'static str {
        match self {
            Self::HostLocal => "host-local",
            Self::Static => "static",
            Self::Dhcp => "dhcp",
        }
    }

    /// The keys of `CNI_ARGS` that the kind reads.
    pub const fn args(self) -> &'static [&'static str] {
        match self {
            Self::HostLocal => &["IP"],
            Self::Static => &["IP", "GATEWAY"],
            Self::Dhcp => &[],
        }
    }

    /// Reads a plugin's whole configuration.
    ///
    /// # Errors
    /// [`ConfigError`], which names the key.
    pub fn parse(self, config: &Map<String, Value>, args: &CniArgs) -> Result<Config, ConfigError> {
        Ok(match self {
            Self::HostLocal => Config::HostLocal(host_local::Config::parse(config, args.get("IP"))?),
            Self::Static => Config::Static(static_addresses::Config::parse(config, args)?),
            Self::Dhcp => Config::Dhcp(dhcp::Config::parse(config, args)?),
        })
    }

    /// The part of a configuration that releasing needs, even if the rest is invalid; nothing can be leased with it.
    /// `None` if nothing was ever leased, or a lease leaves nothing to release.
    pub fn remains(self, config: &Map<String, Value>) -> Option<Config> {
        match self {
            Self::HostLocal => host_local::Config::for_release(config).map(Config::HostLocal),
            Self::Static => None,
            Self::Dhcp => dhcp::Config::for_release(config).map(Config::Dhcp),
        }
    }
}

/// As [`Config::subnet_of`], of an address that a plugin has given which is executed. Of one that netattach does not know, what is
/// asked for counts as outside of all subnets of the author.
pub fn subnet_of_plugin(
    plugin: &str,
    config: &Map<String, Value>,
    args: &CniArgs,
    address: IpNet,
) -> Option<IpNet> {
    match Kind::named(plugin).map(|kind| kind.parse(config, args)) {
        Some(Ok(config)) => config.subnet_of(address),
        Some(Err(_)) | None => {
            let asked = Asked::of_plugin(plugin, config, args);
            (!asked.may_be(address.addr())).then_some(address)
        }
    }
}

/// Whether a configuration lacks parts that the runtime adds at ADD. STATUS is not given those, so it cannot judge
/// such a configuration.
pub fn is_completed_at_add(config: &Map<String, Value>) -> bool {
    let declares = |capability: &str| {
        config.get("capabilities").and_then(|all| all.get(capability)) == Some(&Value::Bool(true))
    };
    match Kind::of(config) {
        Some(Kind::HostLocal) => {
            let parsed = host_local::Config::parse(config, None);
            declares("ipRanges") && matches!(parsed, Err(host_local::ConfigError::NoRanges))
        }
        Some(Kind::Static) => {
            let parsed = static_addresses::Config::parse(config, &CniArgs::default());
            declares("ips") && matches!(parsed, Err(static_addresses::ConfigError::NoAddresses))
        }
        Some(Kind::Dhcp) | None => false,
    }
}

/// Gives the networks of one namespace pools of their own: changes an `ipam` section so that its pool differs from
/// that of the same network name in another namespace. A kind without pools stays unchanged, as do plugins that are
/// not built in.
pub fn separate(section: &mut Map<String, Value>, namespace: &str) {
    match section.get("type").and_then(Value::as_str).and_then(Kind::named) {
        Some(Kind::HostLocal) => host_local::separate(section, namespace),
        Some(Kind::Static | Kind::Dhcp) | None => {}
    }
}

/// Makes an `ipam` section use a pool of this network name, whatever pool it names. A kind without pools stays unchanged.
pub fn use_pool(section: &mut Map<String, Value>, pool: &Pool) {
    match (section.get("type").and_then(Value::as_str).and_then(Kind::named), pool) {
        (Some(Kind::HostLocal), Pool::HostLocal(pool)) => {
            section.insert("dataDir".into(), pool.data_dir.to_string_lossy().into());
        }
        (Some(Kind::Static | Kind::Dhcp) | None, _) => {}
    }
}

/// Addresses that a pod or a runtime asks for where the network's author has named none. Nobody has seen to it that they
/// are not somebody's on the node's links.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    /// These.
    These(Vec<IpAddr>),
    /// It cannot be read which.
    Unread,
}

impl Asked {
    /// What is asked of a plugin that is executed. Which addresses one that netattach does not know has of its own is not known
    /// either: all that are asked for count.
    pub fn of_plugin(plugin: &str, config: &Map<String, Value>, args: &CniArgs) -> Self {
        match Kind::named(plugin).map(|kind| kind.parse(config, args)) {
            Some(Ok(config)) => config.asked_elsewhere(),
            Some(Err(_)) | None => keys::all_asked(config, args).map_or(Self::Unread, Self::These),
        }
    }

    /// Whether the address may be one of them.
    pub fn may_be(&self, address: IpAddr) -> bool {
        match self {
            Self::These(addresses) => addresses.contains(&address),
            Self::Unread => true,
        }
    }
}

/// A validated configuration, with the runtime's requests.
///
/// In a record `host-local` has no tag, as it was the only kind; every other kind is tagged by `ipam`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "ipam", rename_all = "kebab-case")]
pub enum Config {
    /// See [`Kind::Static`].
    Static(static_addresses::Config),
    /// See [`Kind::Dhcp`].
    Dhcp(dhcp::Config),
    /// See [`Kind::HostLocal`].
    #[serde(untagged)]
    HostLocal(host_local::Config),
}

impl Config {
    /// What a plugin before has leased: nothing is leased again, and nothing released. `key` names its addresses there.
    ///
    /// # Errors
    /// There are none, or one cannot belong to a single interface, or is there twice.
    pub fn given(key: &str, lease: Lease) -> Result<Self, ConfigError> {
        Ok(static_addresses::Config::given(key, lease).map(Self::Static)?)
    }

    /// The kind that it configures.
    pub fn kind(&self) -> Kind {
        match self {
            Self::HostLocal(_) => Kind::HostLocal,
            Self::Static(_) => Kind::Static,
            Self::Dhcp(_) => Kind::Dhcp,
        }
    }

    /// The pool of the addresses, if attachments share one.
    pub fn pool(&self) -> Option<Pool> {
        match self {
            Self::HostLocal(config) => Some(Pool::HostLocal(config.pool())),
            Self::Static(_) | Self::Dhcp(_) => None,
        }
    }

    /// Whether the addresses are asked for by the pod's interface, which has to be there until they are released.
    pub fn asks_the_network(&self) -> bool {
        match self {
            Self::HostLocal(_) | Self::Static(_) => false,
            Self::Dhcp(_) => true,
        }
    }

    /// Whether a record names the kind. Agents before journal version 3 know only `host-local`, which has no tag.
    pub fn is_tagged(&self) -> bool {
        match self {
            Self::HostLocal(_) => false,
            Self::Static(_) | Self::Dhcp(_) => true,
        }
    }

    /// Whether a lease leaves state that has to be released.
    pub fn is_kept(&self) -> bool {
        match self {
            Self::HostLocal(_) | Self::Dhcp(_) => true,
            Self::Static(_) => false,
        }
    }

    /// Whether the network's author, the pod or a server chose the addresses, which may be in use elsewhere.
    pub fn is_chosen(&self) -> bool {
        match self {
            Self::HostLocal(config) => !config.requested.is_empty(),
            Self::Static(_) | Self::Dhcp(_) => true,
        }
    }

    /// Of the addresses that the pod or the runtime asks for, those that the configuration does not have itself.
    pub fn asked_elsewhere(&self) -> Asked {
        Asked::These(match self {
            Self::Static(config) => config.asked_elsewhere(),
            // A pool has none but its own, and a server chooses.
            Self::HostLocal(_) | Self::Dhcp(_) => Vec::new(),
        })
    }

    /// An address that was leased, with the length of its subnet as the network's author has it, or a server; `None`: a pod or a
    /// runtime asks for it, and the author has named no subnet that it is in.
    pub fn subnet_of(&self, address: IpNet) -> Option<IpNet> {
        match self {
            Self::Static(config) => config.subnet_of(address),
            Self::HostLocal(_) | Self::Dhcp(_) => Some(address),
        }
    }

    /// The same configuration for a network whose gateways are addresses of the node, which no pod chooses.
    ///
    /// # Errors
    /// A pod or a runtime asks for an address that would choose one.
    pub fn behind_own_gateways(self) -> Result<Self, static_addresses::GatewayError> {
        match self {
            Self::Static(config) => config.behind_own_gateways().map(Self::Static),
            other @ (Self::HostLocal(_) | Self::Dhcp(_)) => Ok(other),
        }
    }

    /// Whether an address may have been leased with this configuration.
    pub fn may_give(&self, address: IpAddr) -> bool {
        match self {
            Self::HostLocal(config) => config.sets.iter().any(|set| set.range_of(address).is_some()),
            Self::Static(config) => config.addresses.iter().any(|leased| leased.address.addr() == address),
            Self::Dhcp(_) => address.is_ipv4(),
        }
    }

    /// A copy without potentially large parts: the pool and the requested addresses remain.
    pub fn without_routes(&self) -> Self {
        match self {
            Self::HostLocal(config) => Self::HostLocal(config.without_routes()),
            Self::Static(config) => {
                Self::Static(static_addresses::Config { routes: Vec::new(), ..config.clone() })
            }
            Self::Dhcp(config) => Self::Dhcp(config.clone()),
        }
    }
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HostLocal(config) => write!(f, "addresses of network {}", config.network),
            Self::Static(config) => config.fmt(f),
            Self::Dhcp(config) => config.fmt(f),
        }
    }
}

/// A pool that attachments share: operations may wait for it, GC collects it, and the journal notes it.
///
/// On disk a pool of `host-local` has no tag, as it was the only kind.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Pool {
    /// A directory of reservations.
    HostLocal(host_local::Pool),
}

impl Pool {
    /// The pool that a plugin's whole configuration names, whether or not the plugin is executed.
    pub fn of(config: &Map<String, Value>) -> Option<Self> {
        Kind::of(config)?.remains(config)?.pool()
    }

    /// Where it keeps what is held.
    pub fn path(&self) -> std::path::PathBuf {
        match self {
            Self::HostLocal(pool) => pool.data_dir.join(&pool.network),
        }
    }

    /// The network name that a configuration needs in order to use the pool.
    pub fn network(&self) -> &str {
        match self {
            Self::HostLocal(pool) => &pool.network,
        }
    }
}

#[cfg(test)]
impl Pool {
    /// The pool of one network.
    pub(crate) fn directory(data_dir: impl Into<std::path::PathBuf>, network: &str) -> Self {
        Self::HostLocal(host_local::Pool { data_dir: data_dir.into(), network: network.to_owned() })
    }
}

impl fmt::Display for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HostLocal(pool) => pool.fmt(f),
        }
    }
}

/// How much of a pool is held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolUse {
    /// The pool's network name.
    pub network: String,
    /// `IPv4` or `IPv6`.
    pub family: &'static str,
    /// Addresses that pods may have.
    pub size: u128,
    /// Those of them that are held.
    pub used: usize,
}

/// The holder of addresses: one interface of one container.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Owner {
    /// `CNI_CONTAINERID`.
    pub container_id: String,
    /// `CNI_IFNAME`.
    pub ifname: String,
}

impl From<&AttachmentId> for Owner {
    fn from(id: &AttachmentId) -> Self {
        Self { container_id: id.container_id.clone(), ifname: id.ifname.clone() }
    }
}

/// Who holds what GC leaves alone.
#[derive(Debug, Default)]
pub struct InUse {
    /// These.
    pub owners: Vec<Owner>,
    /// And whatever interfaces these containers have.
    pub containers: BTreeSet<String>,
}

impl From<&[AttachmentId]> for InUse {
    fn from(ids: &[AttachmentId]) -> Self {
        Self { owners: ids.iter().map(Owner::from).collect(), containers: BTreeSet::new() }
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "interface {} of container {}", self.ifname, self.container_id)
    }
}

/// The party for which a call is made.
#[derive(Debug, Clone, Copy)]
pub struct Lessee<'a> {
    /// The holder of the addresses.
    pub owner: &'a Owner,
    /// The pod's namespace, if it exists: for a kind that communicates from the pod's interface.
    pub netns: Option<&'a Netns>,
}

/// The addresses leased by one ADD.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// The addresses, in the order of the configuration.
    pub addresses: Vec<LeasedAddress>,
    /// Routes of the lease.
    pub routes: Vec<cni::Route>,
    /// Name servers of the lease.
    pub dns: cni::Dns,
    /// The server that extends it, of `dhcp`.
    pub server: Option<Ipv4Addr>,
}

/// How full a pool is, see [`Leases::survey`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Survey {
    /// The ranges that a configuration gives it, in order.
    pub ranges: Vec<RangeUse>,
    /// All addresses that are held, in order, whether or not a range has them.
    pub held: Vec<Held>,
}

/// How full a range is. A count that does not fit is the largest number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RangeUse {
    /// Position of its set.
    pub set: usize,
    /// First address.
    pub first: IpAddr,
    /// Last address.
    pub last: IpAddr,
    /// The gateway, which is never given.
    pub gateway: IpAddr,
    /// Addresses that can be given.
    pub size: u64,
    /// Those that are held.
    pub used: u64,
    /// Those that are free.
    pub free: u64,
    /// The pieces in which free addresses lie.
    pub free_runs: u64,
    /// First address of the longest piece.
    pub longest_free: Option<IpAddr>,
    /// Its length.
    pub longest_free_size: u64,
}

/// An address that is held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// The address.
    pub address: IpAddr,
    /// Its holder; `None` if the reservation cannot be read. Entries of old versions have no interface.
    pub owner: Option<Owner>,
}

/// An address of a [`Lease`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeasedAddress {
    /// The address with the prefix length of its subnet.
    pub address: IpNet,
    /// The gateway of the subnet, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Rows: STC-node-links.
    #[test]
    fn what_is_asked_of_an_executed_plugin_is_elsewhere_unless_the_configuration_is_known_to_have_it() {
        let these = |addresses: &[&str]| {
            Asked::These(addresses.iter().map(|address| address.parse().unwrap()).collect())
        };
        let range = json!({"type": "whereabouts", "range": "10.1.0.0/24"});
        let addresses = json!({"type": "static", "addresses": [{"address": "10.1.0.7/24"}]});
        let pool = json!({"type": "host-local", "subnet": "10.1.0.0/24"});
        let both = json!(["10.1.0.8/24", "10.2.0.8"]);
        let lengths = json!(["10.1.0.8/24", "10.2.0.8/24"]);
        for (ipam, args, runtime, cni_args, expected) in [
            (&range, json!({}), json!([]), "", these(&[])),
            (&range, both.clone(), json!([]), "", these(&["10.1.0.8", "10.2.0.8"])),
            (&range, json!([]), both.clone(), "IP=10.3.0.8", these(&["10.3.0.8", "10.1.0.8", "10.2.0.8"])),
            (&range, json!([]), json!(["x"]), "", Asked::Unread),
            (&addresses, json!([]), lengths.clone(), "", these(&["10.2.0.8"])),
            // What this implementation does not read, another may.
            (&addresses, json!([]), both.clone(), "", these(&["10.1.0.8", "10.2.0.8"])),
            (&pool, json!([]), lengths.clone(), "", these(&[])),
        ] {
            let args = if args.is_array() { json!({"cni": {"ips": args}}) } else { args };
            let config = json!({"cniVersion": "1.0.0", "name": "n", "ipam": ipam, "args": args,
                "runtimeConfig": {"ips": runtime}});
            let plugin = ipam["type"].as_str().unwrap();
            let parsed = CniArgs::parse(cni_args).unwrap();
            let found = Asked::of_plugin(plugin, config.as_object().unwrap(), &parsed);
            assert_eq!(found, expected, "{config} {cni_args}");
        }
        let address = |text: &str| text.parse::<IpAddr>().unwrap();
        let found = these(&["10.1.0.8"]);
        assert!(found.may_be(address("10.1.0.8")) && !found.may_be(address("10.1.0.9")));
        assert!(Asked::Unread.may_be(address("10.1.0.9")));
    }
}
