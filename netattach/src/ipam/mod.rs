//! IPAM that netattach implements itself, with one interface for all kinds.
//!
//! A [`Kind`] is a value of `ipam.type`. Its configuration is a [`Config`], which is part of a plan's step `Lease`
//! and of its record. [`Leases`] serves the calls of steps and requests. Only this directory contains code for a
//! particular kind; IPAM with any other `type` is executed as a plugin.
//!
//! In the order of one lease: `keys` reads a configuration, `leases` dispatches the call to its kind, [`host_local`],
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
//! | [`Leases::collect`] | GC, while the pool is closed to all other operations | the same | succeeds |
//! | [`Leases::room`], [`Leases::survey`] | STATUS, every few seconds concurrently with requests; an operator's query | the same | the same answer; changes nothing |
//! | [`Leases::usage`] | the periodic check of the networks, every few seconds | the same | the same answer; changes nothing |
//! | [`Leases::check_in_force`] | immediately before an ADD answers | nothing | the same answer; changes nothing |
//! | [`Leases::held`], [`Leases::release_container`], [`Leases::held_by_server`], [`Leases::release_to_servers`] | for a container whose record has lost its plan | the same | as `check` and `release` |
//!
//! *Deadline.* Every call of [`Leases`] ends within [`DEADLINE`]; a periodic check ([`Patience::Look`]) ends within a
//! tenth of a second if another process holds the pool's lock. A call that times out returns an error whose
//! [`Failure`] is `TryLater` if a retry may succeed. A kind that uses a service limits connection and answer to that
//! time.
//!
//! *Lanes.* Because a call of [`Leases`] may take that long, callers first enter the lane of the [`Pool`]
//! (`waits::at_pool`): [`Config::pool`] names the pool that a call may wait for. Operations that need the same pool
//! share a lane, and operations of other pools do not wait for them. A kind that waits for nothing outside this
//! process has no pool. A kind that waits for a service has no pool either: it uses the lane that an executed plugin
//! of its name would have in that network (`waits::of_lease`).
//!
//! *Owner of an address.* An [`Owner`] is an interface of a container: unique on this node, and the same from ADD to
//! DEL and across restarts. A kind whose addresses are unique in a cluster adds the node's name itself. The agent
//! compares a chosen address ([`Config::is_chosen`]) with the addresses of other attachments and of the node
//! (`attach::addresses::occupied`); a kind only has to avoid conflicts among its own addresses.
//!
//! *Persistence.* A restarted agent must find a lease by its owner alone: on disk, at the service, or nowhere if the
//! configuration contains the lease. If a writer is killed, the lease is either complete or absent. A kind that
//! renews leases starts renewal in `lease` and stops renewal in `release` and `collect`; [`Lessee`] contains the
//! pod's namespace for a kind that communicates from the pod.

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

/// How long a call waits for a pool whose lock another process holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patience {
    /// As long as an operation may wait: [`DEADLINE`].
    Operation,
    /// A tenth of a second: for a check that is repeated anyway, or that reads many pools.
    Look,
}

/// A kind of IPAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Addresses of one node, each reserved by a file.
    HostLocal,
    /// Addresses from the configuration or the pod.
    Static,
    /// Addresses leased from a DHCP server.
    Dhcp,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::HostLocal, Self::Static, Self::Dhcp];

    /// Returns the kind with that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Returns the kind that a plugin's configuration names.
    pub fn of(config: &Map<String, Value>) -> Option<Self> {
        Self::named(config.get("ipam")?.get("type")?.as_str()?)
    }

    /// Whether netattach implements the whole configuration itself. `recorded`: on behalf of an agent, which keeps a
    /// record; only an agent renews leases. A DHCP configuration that names the socket of another daemon is left to
    /// that daemon.
    pub fn is_carried_out(self, config: &Map<String, Value>, recorded: bool) -> bool {
        match self {
            Self::HostLocal | Self::Static => true,
            Self::Dhcp => recorded && !dhcp::is_by_daemon(config),
        }
    }

    /// Whether this kind works without an agent, as a plain CNI executable.
    pub const fn is_plain(self) -> bool {
        match self {
            Self::HostLocal | Self::Static => true,
            Self::Dhcp => false,
        }
    }

    /// Returns the value of `ipam.type`, which is also the plugin's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::HostLocal => "host-local",
            Self::Static => "static",
            Self::Dhcp => "dhcp",
        }
    }

    /// Returns the keys of `CNI_ARGS` that this kind reads.
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

    /// Returns the part of a configuration that releasing needs, even if the rest is invalid; the result cannot be
    /// used to lease. `None` if this configuration never leased anything, or a lease leaves nothing to release.
    pub fn remains(self, config: &Map<String, Value>) -> Option<Config> {
        match self {
            Self::HostLocal => host_local::Config::for_release(config).map(Config::HostLocal),
            Self::Static => None,
            Self::Dhcp => dhcp::Config::for_release(config).map(Config::Dhcp),
        }
    }
}

/// Like [`Config::subnet_of`], for an address from an IPAM plugin that is executed. If netattach does not know the
/// plugin, a requested address counts as outside of all subnets that the network's author has configured.
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

/// Whether a configuration lacks parts that the runtime adds at ADD. The runtime does not pass these parts to STATUS,
/// so STATUS cannot judge such a configuration.
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

/// Gives the networks of one namespace their own pools: changes an `ipam` section so that its pool differs from the
/// pool of the same network name in another namespace. Sections of kinds without pools and of plugins that are not
/// built in stay unchanged.
pub fn separate(section: &mut Map<String, Value>, namespace: &str) {
    match section.get("type").and_then(Value::as_str).and_then(Kind::named) {
        Some(Kind::HostLocal) => host_local::separate(section, namespace),
        Some(Kind::Static | Kind::Dhcp) | None => {}
    }
}

/// Makes an `ipam` section use this pool instead of the pool that it names. Sections of kinds without pools stay
/// unchanged.
pub fn use_pool(section: &mut Map<String, Value>, pool: &Pool) {
    match (section.get("type").and_then(Value::as_str).and_then(Kind::named), pool) {
        (Some(Kind::HostLocal), Pool::HostLocal(pool)) => {
            section.insert("dataDir".into(), pool.data_dir.to_string_lossy().into());
        }
        (Some(Kind::Static | Kind::Dhcp) | None, _) => {}
    }
}

/// Addresses that a pod or a runtime requests although the network's author has not configured them. The author has
/// not ensured that these addresses are unused on the node's links.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    /// Exactly these addresses.
    These(Vec<IpAddr>),
    /// The request cannot be parsed.
    Unread,
}

impl Asked {
    /// Returns the addresses requested from a plugin that is executed. If netattach does not know the plugin, it does
    /// not know the plugin's own addresses either, so all requested addresses count.
    pub fn of_plugin(plugin: &str, config: &Map<String, Value>, args: &CniArgs) -> Self {
        match Kind::named(plugin).map(|kind| kind.parse(config, args)) {
            Some(Ok(config)) => config.asked_elsewhere(),
            Some(Err(_)) | None => keys::all_asked(config, args).map_or(Self::Unread, Self::These),
        }
    }

    /// Whether the address may be one of the requested ones.
    pub fn may_be(&self, address: IpAddr) -> bool {
        match self {
            Self::These(addresses) => addresses.contains(&address),
            Self::Unread => true,
        }
    }
}

/// A validated configuration, including the runtime's requests.
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
    /// Makes a configuration from the result of a plugin that runs earlier in the list: such addresses are neither
    /// leased again nor released. `key` names the addresses in error messages.
    ///
    /// # Errors
    /// There are no addresses, an address cannot belong to a single interface, or an address occurs twice.
    pub fn given(key: &str, lease: Lease) -> Result<Self, ConfigError> {
        Ok(static_addresses::Config::given(key, lease).map(Self::Static)?)
    }

    /// Returns the kind of this configuration.
    pub fn kind(&self) -> Kind {
        match self {
            Self::HostLocal(_) => Kind::HostLocal,
            Self::Static(_) => Kind::Static,
            Self::Dhcp(_) => Kind::Dhcp,
        }
    }

    /// Returns the pool of the addresses, if attachments share one.
    pub fn pool(&self) -> Option<Pool> {
        match self {
            Self::HostLocal(config) => Some(Pool::HostLocal(config.pool())),
            Self::Static(_) | Self::Dhcp(_) => None,
        }
    }

    /// Whether addresses are requested from the network through the pod's interface, which must then exist until the
    /// addresses are released.
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

    /// Whether the network's author, the pod or a server chose the addresses, which may therefore be in use
    /// elsewhere.
    pub fn is_chosen(&self) -> bool {
        match self {
            Self::HostLocal(config) => !config.requested.is_empty(),
            Self::Static(_) | Self::Dhcp(_) => true,
        }
    }

    /// Returns the addresses that the pod or the runtime requests and that the configuration itself does not contain.
    pub fn asked_elsewhere(&self) -> Asked {
        Asked::These(match self {
            Self::Static(config) => config.asked_elsewhere(),
            // `host-local` leases only addresses of its pool, and a DHCP server chooses its addresses itself.
            Self::HostLocal(_) | Self::Dhcp(_) => Vec::new(),
        })
    }

    /// Returns a leased address with the prefix length of its subnet as the network's author or the server defines
    /// it. `None`: a pod or a runtime requested the address, and the author has configured no subnet that contains
    /// it.
    pub fn subnet_of(&self, address: IpNet) -> Option<IpNet> {
        match self {
            Self::Static(config) => config.subnet_of(address),
            Self::HostLocal(_) | Self::Dhcp(_) => Some(address),
        }
    }

    /// Returns the same configuration for a network whose gateways are addresses of the node: each requested address
    /// gets the gateway that the network's author has configured for its subnet.
    ///
    /// # Errors
    /// A pod or a runtime requests an address outside the subnets that the network's author has configured, or the
    /// gateway's own address.
    pub fn behind_own_gateways(self) -> Result<Self, static_addresses::GatewayError> {
        match self {
            Self::Static(config) => config.behind_own_gateways().map(Self::Static),
            other @ (Self::HostLocal(_) | Self::Dhcp(_)) => Ok(other),
        }
    }

    /// Whether this configuration may have leased the address.
    pub fn may_give(&self, address: IpAddr) -> bool {
        match self {
            Self::HostLocal(config) => config.sets.iter().any(|set| set.range_of(address).is_some()),
            Self::Static(config) => config.addresses.iter().any(|leased| leased.address.addr() == address),
            Self::Dhcp(_) => address.is_ipv4(),
        }
    }

    /// Returns a copy without potentially large parts; the pool and the requested addresses remain.
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
    /// Returns the pool that a plugin's whole configuration names, whether or not the plugin is executed.
    pub fn of(config: &Map<String, Value>) -> Option<Self> {
        Kind::of(config)?.remains(config)?.pool()
    }

    /// Returns the directory with the pool's reservations.
    pub fn path(&self) -> std::path::PathBuf {
        match self {
            Self::HostLocal(pool) => pool.data_dir.join(&pool.network),
        }
    }

    /// Returns the network name that a configuration needs in order to use the pool.
    pub fn network(&self) -> &str {
        match self {
            Self::HostLocal(pool) => &pool.network,
        }
    }
}

#[cfg(test)]
impl Pool {
    /// Returns the pool of one network.
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

/// The number of leased addresses of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolUse {
    /// The pool's network name.
    pub network: String,
    /// `IPv4` or `IPv6`.
    pub family: &'static str,
    /// Number of addresses that pods may have.
    pub size: u128,
    /// Number of those addresses that are leased.
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

/// The owners whose leases GC must keep.
#[derive(Debug, Default)]
pub struct InUse {
    /// Owners, each with its interface.
    pub owners: Vec<Owner>,
    /// Containers of which GC keeps the leases of all interfaces.
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
    /// The pod's namespace, if it exists, for a kind that communicates from the pod's interface.
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
    /// The DHCP server that renews the lease; only of `dhcp`.
    pub server: Option<Ipv4Addr>,
}

/// The leases that a pool lacks, see [`Leases::lacking`].
#[derive(Debug)]
pub struct Lacking {
    /// The indices of the owners that do not hold all their addresses. An address whose lease cannot be read counts as
    /// held.
    pub holders: Vec<usize>,
    /// Why leases of the pool cannot be read now, in the order of their addresses. Each error names the lease.
    pub unread: Vec<Error>,
}

/// The ranges and the leases of a pool, see [`Leases::survey`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Survey {
    /// The ranges that the configuration gives the pool, in order.
    pub ranges: Vec<RangeUse>,
    /// All leased addresses, in order, whether or not a range contains them.
    pub held: Vec<Held>,
}

/// The number of leased and free addresses of a range. Counts saturate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RangeUse {
    /// Index of the range's set.
    pub set: usize,
    /// First address.
    pub first: IpAddr,
    /// Last address.
    pub last: IpAddr,
    /// The gateway, which is never leased.
    pub gateway: IpAddr,
    /// Number of addresses that can be leased.
    pub size: u64,
    /// Number of those addresses that are leased.
    pub used: u64,
    /// Number of those addresses that are free.
    pub free: u64,
    /// Number of runs of consecutive free addresses.
    pub free_runs: u64,
    /// First address of the longest run.
    pub longest_free: Option<IpAddr>,
    /// Length of the longest run.
    pub longest_free_size: u64,
}

/// A leased address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// The address.
    pub address: IpAddr,
    /// The address's owner; `None` if the reservation cannot be read. Entries of old versions contain no interface.
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
            // Another implementation may accept a request that this one cannot parse.
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
