//! Configuration and planning of interfaces, with one file per kind. Pure.
//!
//! A [`Driver`] turns its plugin's configuration into steps, and refuses by name every key that it does not
//! support. The same drivers serve the agent and the plain CNI executables.
//!
//! Drivers: `bridge`, `veth`, `ptp`, `macvlan` (and `macvtap`), `ipvlan`, `vlan`, `dummy`, `tap`, `netkit`,
//! `loopback`; `host-device` and `sriov`, which take a device of the node (`device`). [`facts`] has the facts
//! about the node that drivers need for planning, `bridge_vlans` parses the VLANs of a bridge port,
//! `translation` the address translation for a pod, and `sources` the source addresses and VLANs that a pod
//! may use. `tuning`, `sbr`, `vrf`, `portmap`, `bandwidth`, `firewall` and netattach itself (`dataplane`) are
//! chained after any of the drivers.

pub mod bandwidth;
mod bridge;
mod bridge_vlans;
pub mod dataplane;
mod device;
mod dummy;
pub mod facts;
pub mod firewall;
mod ipvlan;
mod loopback;
mod macvlan;
mod netkit;
pub mod portmap;
mod ptp;
pub mod sbr;
pub mod sources;
mod tap;
mod translation;
pub mod tuning;
mod veth;
mod vlan;
pub mod vrf;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::budget::{self, Exceeded};
use crate::cni::json::{KeyError, read_object};
use crate::cni::{CniArgs, CniError, Dns, code, identifier};
use crate::error_chain::Chain;
use crate::ipam;
use crate::mac::Mac;
use crate::npwg::capability::with_bursts;
use crate::npwg::selection::Bandwidth;
use crate::spec;
use crate::step::{Configure, Delegate, Protect, Role, Step};
pub use device::check_mac_can_be_set;
use facts::Parent;
pub use facts::{Facts, Wanted, Wishes};

/// A kind of interface that netattach creates itself.
pub trait Driver: Sync {
    /// The plugin `type` of this driver.
    fn kind(&self) -> &'static str;

    /// Whether the dataplane can enforce policy on an interface of this configuration.
    fn is_judged(&self, config: &Map<String, Value>) -> bool;

    /// Whether the driver supports the capability `portMappings`: the node routes to its pods.
    fn maps_ports(&self) -> bool {
        false
    }

    /// Whether the driver takes a device that a device plugin allocated or a selection names.
    fn takes_device(&self) -> bool {
        false
    }

    /// Whether the plain CNI executable keeps a record of each attachment, as the agent does: what the steps overwrite
    /// is shown nowhere afterwards.
    fn is_recorded(&self) -> bool {
        false
    }

    /// The error of [`Driver::plan`] as a plain executable if no preceding plugin has provided its input;
    /// `None`: the driver creates an interface without input and can only be the first plugin of a list. An
    /// agent plans before any plugin has run, and executes a plugin that is to follow another one.
    fn lacks_alone(&self) -> Option<PlanError> {
        None
    }

    /// The facts that [`Driver::plan`] needs about the node for this configuration. A key that is missing or invalid
    /// requires no fact.
    fn wants(&self, config: &Map<String, Value>) -> Vec<Wanted>;

    /// The steps that attach one interface.
    ///
    /// # Errors
    /// [`PlanError`] with the key that is invalid or not supported.
    fn plan(&self, request: &Request<'_>) -> Result<Vec<Step>, PlanError>;

    /// Those steps of [`Driver::plan`] whose effects have to be removed separately: callers that keep no
    /// record remove them by the steps' inverses. The steps are derived from as little of the configuration
    /// as possible, because a configuration that cannot be attached must still be detachable.
    fn remains(&self, request: &Request<'_>) -> Vec<Step>;
}

static DRIVERS: [&dyn Driver; 13] = [
    &bridge::Bridge,
    &dummy::Dummy,
    &device::HostDevice,
    &ipvlan::Ipvlan,
    &loopback::Loopback,
    &macvlan::MACVLAN,
    &macvlan::MACVTAP,
    &netkit::Netkit,
    &ptp::Ptp,
    &device::Sriov,
    &tap::Tap,
    &veth::Veth,
    &vlan::Vlan,
];

/// The driver of a plugin type, if netattach has one.
pub fn driver(kind: &str) -> Option<&'static dyn Driver> {
    DRIVERS.iter().copied().find(|driver| driver.kind() == kind)
}

/// The plugin types that change an interface made by a preceding plugin, and that need no agent.
pub const CHAINED: [&str; 6] =
    [tuning::KIND, sbr::KIND, vrf::KIND, portmap::KIND, bandwidth::KIND, firewall::KIND];

/// Returns the plugin type if netattach implements it as a chained plugin.
pub fn chained(kind: &str) -> Option<&'static str> {
    CHAINED.into_iter().chain([dataplane::KIND]).find(|own| *own == kind)
}

/// Passes a plugin the value of a capability.
pub fn offer(config: &mut Map<String, Value>, capability: &str, value: Value) {
    let offered = config.entry("runtimeConfig").or_insert_with(|| json!({}));
    if let Some(offered) = offered.as_object_mut() {
        offered.insert(capability.to_owned(), value);
    }
}

/// The interface types that netattach implements itself.
pub fn kinds() -> impl Iterator<Item = &'static str> {
    DRIVERS.iter().map(|driver| driver.kind())
}

/// The input of [`Driver::plan`].
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// `CNI_CONTAINERID`.
    pub container_id: &'a str,
    /// Name of the interface in the pod.
    pub ifname: &'a str,
    /// The configuration that the plugin would read from standard input: its keys, `name`, `cniVersion`,
    /// `runtimeConfig`, `args`.
    pub config: &'a Map<String, Value>,
    /// Link group of the sandbox's links.
    pub group: u32,
    /// `CNI_ARGS`.
    pub cni_args: &'a CniArgs,
    /// Plugin types that are executed although netattach implements them itself.
    pub exec: &'a [String],
    /// Numbers for the dataplane; `None` without a dataplane.
    pub protect: Option<&'a Protect>,
    /// The facts of [`Driver::wants`] that the node has.
    pub facts: &'a Facts,
    /// Whether an agent carries out the steps, and records what it finds on the node until DEL. Plain CNI executables
    /// record at most the device that they take ([`Driver::is_recorded`]).
    pub recorded: bool,
}

/// Why an interface cannot be planned.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// A limit is exceeded.
    #[error(transparent)]
    Exceeded(#[from] Exceeded),
    /// The node has no device of that name, or does not have it yet.
    #[error("there is no device {0} on a bus of this node")]
    NoDevice(String),
    /// A key has the wrong type.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// A key has a value that is invalid or contradicts another key.
    #[error("key {key}: {reason}")]
    Value {
        /// The key, with dots for nesting.
        key: &'static str,
        /// The error, and what would be valid.
        reason: String,
    },
    /// A key that netattach does not support.
    #[error(
        "key {key}: {value} is not supported by netattach's own {kind} plugin; an agent executes another one that is listed under delegation.exec"
    )]
    Unsupported {
        /// The key.
        key: &'static str,
        /// Its value.
        value: Value,
        /// The plugin type.
        kind: &'static str,
    },
    /// A capability that netattach does not support.
    #[error("key capabilities.{capability}: asked for, and not supported by netattach's own {kind} plugin")]
    Capability {
        /// Its name.
        capability: String,
        /// The plugin type.
        kind: &'static str,
    },
    /// `ipam` is invalid.
    #[error("key ipam")]
    Ipam(#[source] ipam::ConfigError),
    /// `ipam` is missing where addresses are needed.
    #[error("key ipam: missing, and {0} needs addresses")]
    IpamMissing(&'static str),
}

impl From<PlanError> for CniError {
    fn from(error: PlanError) -> Self {
        let code = match error {
            PlanError::Unsupported { .. } | PlanError::Capability { .. } => code::UNSUPPORTED_FIELD,
            PlanError::NoDevice(_) => code::TRY_AGAIN_LATER,
            _ => code::INVALID_CONFIG,
        };
        Self::new(code, Chain(&error).to_string())
    }
}

impl Request<'_> {
    fn read<T: DeserializeOwned>(&self) -> Result<T, PlanError> {
        Ok(read_object(self.config)?)
    }

    /// Refuses keys that the reference plugin supports and this driver does not, unless their value requests
    /// what happens anyway.
    fn refuse(&self, kind: &'static str, keys: &[(&'static str, Value)]) -> Result<(), PlanError> {
        for (key, harmless) in keys {
            match self.config.get(*key) {
                None | Some(Value::Null) => {}
                Some(value) if value == harmless => {}
                Some(value) => return Err(PlanError::Unsupported { key, value: value.clone(), kind }),
            }
        }
        Ok(())
    }

    /// The requested Ethernet address: the last one present of `mac` in the configuration, `MAC` in
    /// `CNI_ARGS`, `args.cni.mac` and `runtimeConfig.mac`.
    fn mac(&self) -> Result<Option<Mac>, PlanError> {
        let at = |path: &[&str]| {
            let (last, objects) = path.split_last()?;
            let mut object = self.config;
            for key in objects {
                object = object.get(*key)?.as_object()?;
            }
            object.get(*last)
        };
        let mut chosen = None;
        for (key, value) in [
            ("mac", at(&["mac"]).cloned()),
            ("MAC in CNI_ARGS", self.cni_args.get("MAC").map(Value::from)),
            ("args.cni.mac", at(&["args", "cni", "mac"]).cloned()),
            ("runtimeConfig.mac", at(&["runtimeConfig", "mac"]).cloned()),
        ] {
            let Some(value) = value.filter(|value| !value.is_null() && value.as_str() != Some("")) else {
                continue;
            };
            let parsed = value
                .as_str()
                .and_then(|text| text.parse::<Mac>().ok())
                .filter(|mac| !mac.is_multicast() && *mac != Mac([0; 6]));
            let reason = || format!("{value} is not a unicast Ethernet address such as 02:00:00:00:00:01");
            chosen = Some(parsed.ok_or_else(|| PlanError::Value { key, reason: reason() })?);
        }
        Ok(chosen)
    }

    /// The step that provides addresses, if the configuration asks for any.
    fn ipam(&self) -> Result<Option<Step>, PlanError> {
        let kind = self.config.get("ipam").and_then(|ipam| ipam.get("type")).and_then(Value::as_str);
        match kind {
            None | Some("") => match self.config.get("ipam") {
                None | Some(Value::Null) => Ok(None),
                Some(ipam) if ipam.as_object().is_some_and(Map::is_empty) => Ok(None),
                Some(_) => Err(PlanError::Value {
                    key: "ipam.type",
                    reason: "missing; name the address management plugin, such as host-local".into(),
                }),
            },
            Some(name) => match self.carried_out(name) {
                Some(kind) => {
                    let config = kind.parse(self.config, self.cni_args).map_err(PlanError::Ipam)?;
                    Ok(Some(Step::Lease(config)))
                }
                None => Ok(Some(self.executed_ipam(name))),
            },
        }
    }

    /// The part of the address step that its inverse needs.
    fn ipam_remains(&self) -> Option<Step> {
        match self.config.get("ipam")?.get("type")?.as_str()? {
            "" => None,
            name => match self.carried_out(name) {
                Some(kind) => kind.remains(self.config).map(Step::Lease),
                None => Some(self.executed_ipam(name)),
            },
        }
    }

    /// The address manager of that name, unless it is executed.
    fn carried_out(&self, name: &str) -> Option<ipam::Kind> {
        let is_own = |kind: &ipam::Kind| kind.is_carried_out(self.config, self.recorded);
        ipam::Kind::named(name).filter(is_own).filter(|_| !self.is_executed(name))
    }

    /// The step for an address manager that another plugin implements.
    fn executed_ipam(&self, name: &str) -> Step {
        Step::Delegate(Delegate { plugin: name.to_owned(), config: self.config.clone(), role: Role::Ipam })
    }

    /// The steps of a veth and its addresses, as far as their inverses need them.
    fn veth_remains(&self) -> Vec<Step> {
        let made = spec::Veth {
            host_name: self.host_name(),
            pod_name: self.ifname.to_owned(),
            mtu: None,
            mac: None,
            group: self.group,
            port: None,
        };
        self.translated_remains(spec::Link::Veth(made))
    }

    /// The steps of a link and its addresses, as far as their inverses need them, if the node translates
    /// nothing for the link.
    fn link_remains(&self, link: spec::Link) -> Vec<Step> {
        std::iter::once(Step::CreateLink(link)).chain(self.ipam_remains()).collect()
    }

    /// The same if the node may translate addresses for the link.
    fn translated_remains(&self, link: spec::Link) -> Vec<Step> {
        let mut remains = self.link_remains(link);
        remains.push(self.translation_remains());
        remains
    }

    fn is_executed(&self, kind: &str) -> bool {
        self.exec.iter().any(|name| name == kind)
    }

    /// The `dns` of the configuration, if any of its members is set; an empty list counts as set.
    fn dns(&self) -> Result<Option<Dns>, PlanError> {
        #[derive(Default, Deserialize)]
        struct Members {
            nameservers: Option<Vec<String>>,
            domain: Option<String>,
            search: Option<Vec<String>>,
            options: Option<Vec<String>>,
        }
        #[derive(Deserialize)]
        struct Holder {
            dns: Option<Members>,
        }
        let Members { nameservers, domain, search, options } = self.read::<Holder>()?.dns.unwrap_or_default();
        for list in [&nameservers, &search, &options].into_iter().flatten() {
            budget::DNS.check(list.len())?;
        }
        let domain = domain.filter(|domain| !domain.is_empty());
        if nameservers.is_none() && domain.is_none() && search.is_none() && options.is_none() {
            return Ok(None);
        }
        Ok(Some(Dns {
            nameservers: nameservers.unwrap_or_default(),
            domain,
            search: search.unwrap_or_default(),
            options: options.unwrap_or_default(),
        }))
    }

    /// The limits of each direction: the lower one of `bandwidth` in the configuration and in
    /// `runtimeConfig`, with the keys of the capability.
    fn bandwidth(&self) -> Result<Option<Bandwidth>, PlanError> {
        let limits = self.limits()?;
        if limits.is_some() && self.protect.is_none() {
            let reason =
                "needs the dataplane, which only netattachd has; chain the plugin bandwidth".to_owned();
            return Err(PlanError::Value { key: bandwidth::CAPABILITY, reason });
        }
        Ok(limits)
    }

    /// The same, whether or not there is a dataplane. A pod may request lower limits, but cannot raise a
    /// limit that its network has set, nor the burst, which passes at once.
    fn limits(&self) -> Result<Option<Bandwidth>, PlanError> {
        const KEY: &str = bandwidth::CAPABILITY;
        let asked = self.config.get("runtimeConfig").and_then(|asked| asked.get(KEY));
        let (written, asked) = (checked_limits(self.config.get(KEY))?, checked_limits(asked)?);
        let lower = |written: Option<u64>, asked: Option<u64>| written.into_iter().chain(asked).min();
        let limits = Bandwidth {
            ingress_rate: lower(written.ingress_rate, asked.ingress_rate),
            ingress_burst: lower(written.ingress_burst, asked.ingress_burst),
            egress_rate: lower(written.egress_rate, asked.egress_rate),
            egress_burst: lower(written.egress_burst, asked.egress_burst),
        };
        let is_limited = limits.ingress_rate.is_some() || limits.egress_rate.is_some();
        Ok(is_limited.then_some(limits))
    }

    /// `fastPath`: whether packets of the attachment may take the agent's fast path. Without an agent there
    /// is no fast path.
    fn fast_path(&self) -> Result<bool, PlanError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Holder {
            #[serde(default)]
            fast_path: Option<bool>,
        }
        Ok(self.read::<Holder>()?.fast_path.unwrap_or(true))
    }

    /// The last steps of every interface: protection first, then the pod's end comes up.
    fn finish(
        &self,
        addressed: bool,
        configure: Configure,
    ) -> Result<impl Iterator<Item = Step> + use<>, PlanError> {
        Ok(self.protection(addressed)?.into_iter().chain([Step::Configure(configure)]))
    }

    /// The step that protects the interface, if there is a dataplane.
    fn protection(&self, addressed: bool) -> Result<Option<Step>, PlanError> {
        let bandwidth = self.bandwidth()?;
        let sources = sources::parse(self)?;
        // The fast path identifies pods by addresses that belong to them alone.
        let fast_path = self.fast_path()? && sources.is_full();
        Ok(self.protect.map(|protect| {
            Step::Protect(Protect {
                check_mac: protect.check_mac && sources.mac,
                check_addresses: protect.check_addresses && sources.addresses && addressed,
                allowed: sources.allowed,
                vlans: sources.vlans,
                bandwidth,
                fast_path,
                ..protect.clone()
            })
        }))
    }

    /// Refuses the keys that no link on a parent supports, and `bandwidth` if no program judges its traffic.
    ///
    /// # Errors
    /// One of these keys is set.
    fn refuse_on_parent(&self, driver: &dyn Driver) -> Result<(), PlanError> {
        self.refuse(driver.kind(), &[("fastPath", json!(false))])?;
        sources::refuse_on_parent(self, driver)?;
        if !driver.is_judged(self.config) {
            self.refuse(driver.kind(), &[("bandwidth", json!({})), (sources::VLANS, json!([]))])?;
        }
        Ok(())
    }

    /// The last steps of an interface on a parent, by which the node and the pod reach each other if this was
    /// requested. `apart`: the reason if they cannot reach each other in any case.
    fn host_access(
        &self,
        asked: bool,
        apart: Option<&str>,
        addressed: bool,
    ) -> Result<impl Iterator<Item = Step> + use<>, PlanError> {
        let in_pod = asked && self.is_in_pod()?;
        let reason = match apart {
            _ if !asked => None,
            Some(reason) => Some(reason),
            None if in_pod => Some("not with linkInContainer: the parent is the pod's"),
            None if !addressed => Some("needs ipam: the node's routes lead to addresses"),
            None if !self.recorded => Some("needs netattachd, which takes back what is made on the node"),
            None => None,
        };
        if let Some(reason) = reason {
            return Err(PlanError::Value { key: "hostAccess", reason: reason.to_owned() });
        }
        Ok(asked.then_some([Step::ChooseHostAccess, Step::GiveHostAccess]).into_iter().flatten())
    }

    /// `linkInContainer`: whether `master` is an interface of the pod.
    fn is_in_pod(&self) -> Result<bool, PlanError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Holder {
            #[serde(default)]
            link_in_container: Option<bool>,
        }
        let in_pod = self.read::<Holder>()?.link_in_container.unwrap_or(false);
        let master = self.config.get("master").and_then(Value::as_str);
        if in_pod && master == Some(self.ifname) {
            let reason = format!("{:?} is the interface that is to be made", self.ifname);
            return Err(PlanError::Value { key: "master", reason });
        }
        Ok(in_pod)
    }

    /// `mtu` of a link on that parent: at most the parent's.
    fn mtu_on(&self, parent: Option<&str>, mtu: Option<u32>) -> Result<Option<u32>, PlanError> {
        let mtu = check_mtu(mtu)?;
        match (mtu, self.facts.parent(parent)) {
            (Some(mtu), Some(Parent { name, mtu: most })) if mtu > *most => {
                let reason = format!("{mtu} is larger than {most}, the MTU of the parent {name}");
                Err(PlanError::Value { key: "mtu", reason })
            }
            _ => Ok(mtu),
        }
    }

    /// Name of the node's end of the pod's veth. The name depends only on container and interface, so that
    /// the link can be found when the pod's namespace is gone.
    fn host_name(&self) -> String {
        host_name(self.container_id, self.ifname)
    }
}

/// The lowest accepted limit, in bits per second; a lower value is taken for a mistake.
const SLOWEST_RATE: u64 = 1000;

/// Name of the node's end of a veth, 15 bytes: `na` and the first 13 hexadecimal digits of the SHA-256 of container,
/// NUL and interface.
pub fn host_name(container_id: &str, ifname: &str) -> String {
    let digest = Sha256::new().chain_update(container_id).chain_update([0]).chain_update(ifname).finalize();
    let digits = digest.iter().flat_map(|byte| [byte >> 4, byte & 15]).take(13);
    // A half byte is always a hexadecimal digit.
    std::iter::once('n')
        .chain(['a'])
        .chain(digits.filter_map(|digit| char::from_digit(digit.into(), 16)))
        .collect()
}

/// Whether a name has the form of [`host_name`].
pub fn is_host_name(name: &str) -> bool {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    name.strip_prefix("na").is_some_and(|digits| digits.len() == 13 && digits.bytes().all(is_digit))
}

/// Refuses names that no existing link can have.
fn check_link_name(key: &'static str, name: &str) -> Result<(), PlanError> {
    named(key, name, identifier::check_link_name(name))
}

/// Refuses names that a new link cannot have.
fn check_new_name(key: &'static str, name: &str) -> Result<(), PlanError> {
    named(key, name, identifier::check_ifname(name))
}

fn named(key: &'static str, name: &str, checked: Result<(), CniError>) -> Result<(), PlanError> {
    checked.map_err(|error| PlanError::Value { key, reason: format!("{name:?}: {}", error.msg) })
}

/// Parses the limits in a value of the key `bandwidth`, each rate with its burst. A rate or burst of 0 counts
/// as absent.
fn checked_limits(value: Option<&Value>) -> Result<Bandwidth, PlanError> {
    let wrong = |reason: String| PlanError::Value { key: bandwidth::CAPABILITY, reason };
    let value = value.filter(|value| !value.is_null()).cloned().unwrap_or_else(|| json!({}));
    let limits: Bandwidth = serde_json::from_value(value).map_err(|error| wrong(error.to_string()))?;
    let some = |number: Option<u64>| number.filter(|number| *number != 0);
    let limits = Bandwidth {
        ingress_rate: some(limits.ingress_rate),
        ingress_burst: some(limits.ingress_burst),
        egress_rate: some(limits.egress_rate),
        egress_burst: some(limits.egress_burst),
    };
    for (name, rate, burst) in [
        ("ingress", limits.ingress_rate, limits.ingress_burst),
        ("egress", limits.egress_rate, limits.egress_burst),
    ] {
        match rate {
            None if burst.is_some() => return Err(wrong(format!("{name}Burst without {name}Rate"))),
            Some(rate) if rate < SLOWEST_RATE => {
                return Err(wrong(format!("{name}Rate {rate} is below {SLOWEST_RATE} bits per second")));
            }
            _ => {}
        }
    }
    Ok(with_bursts(limits))
}

/// The parent that `master` names; an empty name is no name.
fn parent(master: Option<String>) -> Result<Option<String>, PlanError> {
    let parent = master.filter(|name| !name.is_empty());
    if let Some(name) = &parent {
        check_link_name("master", name)?;
    }
    Ok(parent)
}

/// The parent that a configuration names by `master`, if the parent's MTU matters: only if the configuration
/// sets an MTU.
fn parent_for_mtu(config: &Map<String, Value>) -> Vec<Wanted> {
    let has_mtu = config.get("mtu").and_then(Value::as_u64).is_some_and(|mtu| mtu != 0);
    let master = config.get("master").and_then(Value::as_str).filter(|name| !name.is_empty());
    // Interfaces of the pod are not known at planning time.
    let on_node = config.get("linkInContainer").and_then(Value::as_bool) != Some(true);
    (has_mtu && on_node).then(|| Wanted::Parent(master.map(str::to_owned))).into_iter().collect()
}

/// Checks that an MTU is at least 68 bytes and at most the largest packet length. 0 counts as absent.
fn check_mtu(mtu: Option<u32>) -> Result<Option<u32>, PlanError> {
    match mtu {
        None | Some(0) => Ok(None),
        Some(mtu @ 68..=65535) => Ok(Some(mtu)),
        Some(other) => {
            Err(PlanError::Value { key: "mtu", reason: format!("{other} is not between 68 and 65535") })
        }
    }
}

#[cfg(test)]
mod device_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod translation_tests;
