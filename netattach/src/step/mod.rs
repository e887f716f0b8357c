//! The words of a plan: steps, and what they bring. Data, read and written as the journal has it.
//!
//! A [`Step`] is one effect; an [`Output`] (`output`) is what it brought. Where programs see an attachment's frames is its
//! [`HookKind`] (`hook_kind`). Drivers and plans put steps together, `attach` carries them out.

mod hook_kind;
mod output;

use std::net::IpAddr;
use std::path::PathBuf;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use crate::cni;
use crate::cni::json::Text;
use crate::ipam;
pub use crate::ipam::LeasedAddress;
use crate::spec;
pub use hook_kind::{ENFORCE_ANNOTATION, EnforceWhen, HookKind, NotObservable};
pub use output::{Bridge, Brought, Interface, Output, Outputs, Parent, Printed, SourceRouting};

/// One effect. Each is idempotent or has an inverse ([`crate::plan::undo::inverse`]).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self", tag = "step", rename_all = "kebab-case")]
pub enum Step {
    /// The bridge is there and up.
    EnsureBridge(spec::Bridge),
    /// A link in the pod. Written by the link itself, see [`spec::Link`].
    #[serde(skip)]
    CreateLink(spec::Link),
    /// The pod's loopback is up.
    RaiseLoopback,
    /// Addresses, by address management that netattach carries out itself.
    Lease(ipam::Config),
    /// The file of the attachment's device information says what the device plugin says, where it says anything.
    /// Before the attachment's plugins.
    PrepareDeviceInfo(DeviceInfoFiles),
    /// Another CNI plugin does its part.
    Delegate(Delegate),
    /// The gateway addresses of what was leased are on the bridge.
    Gateway {
        /// The bridge.
        bridge: String,
        /// Remove other addresses of the same family instead of refusing them.
        force: bool,
    },
    /// The node forwards the families that were leased.
    EnsureForwarding,
    /// The node's end of a routed veth has the gateway addresses and the node a route to each of the pod's.
    RouteToPod,
    /// Where the interface that other plugins made can be judged. After all of them.
    FindDevice,
    /// The attachment has its record, its policy and its programs.
    Protect(Protect),
    /// The pod's interface gets its addresses and routes and comes up.
    Configure(Configure),
    /// The attachment is in libcni's cache, for those who look there.
    Remember(Remember),
    /// What the device information says after the attachment's plugins have run.
    ReadDeviceInfo(DeviceInfoFiles),
    /// The pod's default routes are through the attachment's interface. After all attachments are made.
    MoveDefaultRoutes {
        /// Next hops in the order of preference; empty: those that the attachment has brought.
        gateways: Vec<IpAddr>,
    },
    /// Traffic leaves by the interface whose address it has, where several interfaces lead to one destination. The
    /// last step of all.
    RouteBySource,
}

impl Serialize for Step {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::CreateLink(link) => link.serialize(serializer),
            other => Self::serialize(other, serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Step {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let object = Value::Object(Map::deserialize(deserializer)?);
        let is_link = object["step"].as_str().is_some_and(|name| spec::Link::STEPS.contains(&name));
        let read = if is_link {
            spec::Link::deserialize(object).map(Self::CreateLink)
        } else {
            Self::deserialize(object)
        };
        read.map_err(D::Error::custom)
    }
}

/// Where the information about an attachment's device is (NPWG Device Information Specification, section 4).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceInfoFiles {
    /// Written by the device plugin, where one allocated the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_plugin: Option<PathBuf>,
    /// The attachment's own: it is removed with the attachment.
    pub attachment: PathBuf,
}

/// A call of another CNI plugin.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Delegate {
    /// Its `type`.
    pub plugin: String,
    /// Exactly what it reads from standard input, except `prevResult`, which the steps before it decide.
    pub config: Map<String, Value>,
    /// What its result means.
    pub role: Role,
}

/// What the result of a [`Delegate`] means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// An interface or chained plugin: its result replaces the one so far.
    Plugin,
    /// Address management for a native interface: its addresses are added to the result.
    Ipam,
}

/// What the dataplane has to know of an attachment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Protect {
    /// The attachment's number in the maps.
    pub id: u32,
    /// Number of its network: flows of different networks never meet in conntrack.
    pub zone: u32,
    /// Drop what the pod sends with another Ethernet source than its own.
    pub check_mac: bool,
    /// Drop what the pod sends from addresses that are not its own.
    pub check_addresses: bool,
    /// What the pod may receive and send: rates in bits per second, each with its burst in bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<crate::npwg::selection::Bandwidth>,
    /// Whether its packets may pass the node's network stack by.
    #[serde(default = "yes")]
    pub fast_path: bool,
    /// When its programs run.
    #[serde(default = "EnforceWhen::always")]
    pub when: EnforceWhen,
    /// Ethertypes that pass besides IP and ARP, whatever the policies say.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ethertypes: Vec<u16>,
}

/// What records from before there was a fast path say about it.
fn yes() -> bool {
    true
}

/// How a pod's interface is configured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Configure {
    /// How addresses become routes.
    pub style: Style,
    /// Whether a default route through the leased gateway is added for each family that has none.
    pub default_route: bool,
    /// What the configuration says about name resolution: reported in place of what came with the addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dns: Option<cni::Dns>,
}

/// How a leased address appears in the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Style {
    /// With the prefix length of its subnet, which is on the link.
    Subnet,
    /// As a host address; everything else goes through the node ([`crate::plan::addressing::GATEWAY_V4`], [`crate::plan::addressing::GATEWAY_V6`]).
    Routed,
}

/// What brings an attachment its interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MadeBy<'s> {
    /// netattach makes this link.
    Link(&'s spec::Link),
    /// The kernel made it with the pod's namespace: loopback.
    Kernel,
    /// Another plugin makes it.
    Plugin,
}

impl<'s> MadeBy<'s> {
    /// The link, where netattach makes it.
    pub fn link(self) -> Option<&'s spec::Link> {
        match self {
            Self::Link(link) => Some(link),
            Self::Kernel | Self::Plugin => None,
        }
    }
}

impl Step {
    /// Whether the step brings the attachment's interface, and how. Each attachment has one such step; plugins that run after
    /// it change the interface.
    pub fn makes_interface(&self) -> Option<MadeBy<'_>> {
        match self {
            Self::CreateLink(link) => Some(MadeBy::Link(link)),
            Self::RaiseLoopback => Some(MadeBy::Kernel),
            Self::Delegate(Delegate { role: Role::Plugin, .. }) => Some(MadeBy::Plugin),
            Self::Delegate(Delegate { role: Role::Ipam, .. })
            | Self::EnsureBridge(_)
            | Self::Lease(_)
            | Self::PrepareDeviceInfo(_)
            | Self::Gateway { .. }
            | Self::EnsureForwarding
            | Self::RouteToPod
            | Self::FindDevice
            | Self::Protect(_)
            | Self::Configure(_)
            | Self::Remember(_)
            | Self::ReadDeviceInfo(_)
            | Self::MoveDefaultRoutes { .. }
            | Self::RouteBySource => None,
        }
    }

    /// Without what may be large: see [`crate::plan::Plan::outline`].
    pub(crate) fn outline(&self) -> Self {
        match self {
            Self::Lease(config) => Self::Lease(config.without_routes()),
            Self::Delegate(delegate) => Self::Delegate(delegate.outline()),
            Self::Remember(_) => Self::Remember(Remember::default()),
            small => small.clone(),
        }
    }
}

impl Delegate {
    /// The plugin, and who assigns its addresses.
    fn outline(&self) -> Self {
        let ipam = self.config.get("ipam").and_then(|ipam| ipam.get("type"));
        let ipam = ipam.map(|kind| ("ipam".to_owned(), serde_json::json!({ "type": kind })));
        Self { plugin: self.plugin.clone(), config: ipam.into_iter().collect(), role: self.role }
    }
}

/// What the steps of an attachment do not say of it.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Remember {
    /// The network's configuration.
    pub config: Text,
    /// What was offered to plugins that declare the capability.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub capability_args: Map<String, Value>,
}

/// Which step of a plan: attachment, then step, both from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct StepRef(pub u16, pub u16);

/// When a step is carried out, relative to those of other attachments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// With its attachment.
    Attach,
    /// Once all attachments are made.
    MoveDefaultRoutes,
    /// After that.
    RouteBySource,
    /// What is told of an attachment is true then.
    Remember,
}

impl Stage {
    /// In their order.
    pub const ALL: [Self; 4] = [Self::Attach, Self::MoveDefaultRoutes, Self::RouteBySource, Self::Remember];
}

impl Step {
    /// When it is carried out.
    pub fn stage(&self) -> Stage {
        match self {
            Self::MoveDefaultRoutes { .. } => Stage::MoveDefaultRoutes,
            Self::RouteBySource => Stage::RouteBySource,
            Self::Remember(_) => Stage::Remember,
            Self::EnsureBridge(_)
            | Self::CreateLink(_)
            | Self::RaiseLoopback
            | Self::Lease(_)
            | Self::PrepareDeviceInfo(_)
            | Self::Delegate(_)
            | Self::Gateway { .. }
            | Self::EnsureForwarding
            | Self::RouteToPod
            | Self::FindDevice
            | Self::Protect(_)
            | Self::Configure(_)
            | Self::ReadDeviceInfo(_) => Stage::Attach,
        }
    }

    /// The step in an operator's words.
    pub fn describe(&self) -> String {
        match self {
            Self::EnsureBridge(bridge) => format!("set up bridge {}", bridge.name),
            Self::CreateLink(link) => format!("create {link}"),
            Self::RaiseLoopback => "bring loopback up".to_owned(),
            Self::Lease(config) => format!("lease {config}"),
            Self::Delegate(delegate) => format!("run plugin {}", delegate.plugin),
            Self::Gateway { bridge, .. } => format!("put the gateway address on bridge {bridge}"),
            Self::EnsureForwarding => "enable IP forwarding on the node".to_owned(),
            Self::RouteToPod => "route to the pod's addresses".to_owned(),
            Self::FindDevice => "find where the interface can be judged".to_owned(),
            Self::Protect(_) => "load policy and counters".to_owned(),
            Self::Configure(_) => "configure the pod's interface".to_owned(),
            Self::Remember(_) => "tell libcni's cache".to_owned(),
            Self::PrepareDeviceInfo(_) => "prepare device information".to_owned(),
            Self::ReadDeviceInfo(_) => "read device information".to_owned(),
            Self::MoveDefaultRoutes { .. } => "move the pod's default route here".to_owned(),
            Self::RouteBySource => "route by source".to_owned(),
        }
    }
}
