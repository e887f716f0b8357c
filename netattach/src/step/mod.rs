//! The elements of a plan: steps and their outputs. Plain data, serialised in the form that the journal stores.
//!
//! A [`Step`] is one effect; an [`Output`] (`output`) is its result. [`HookKind`] (`hook_kind`) is the place where
//! programs see an attachment's frames, [`Translate`] (`translate`) the address translation that the node does for
//! it, [`Admit`] (`admit`) the traffic that the node forwards for it, and [`Claim`] (`claim`) a device of the node
//! that it takes. Drivers and plans assemble steps, `attach` carries them out.

mod admit;
mod claim;
mod hook_kind;
mod output;
mod translate;

use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use crate::cni;
use crate::cni::json::Text;
use crate::ipam;
pub use crate::ipam::LeasedAddress;
use crate::mac::Mac;
use crate::spec;
pub use admit::{ADMIN_CHAIN, Admit, Admitted, Ingress};
pub use claim::{Claim, Home, Representor};
pub use hook_kind::{ENFORCE_ANNOTATION, EnforceWhen, HookKind, NotObservable};
pub use output::{
    Bridge, Brought, HostAccess, Interface, Kept, Output, Outputs, Parent, Printed, Reached, SourceRouting,
    Trunk,
};
pub use translate::{PortSenders, Translate};

/// One effect. Each step is idempotent or has an inverse ([`crate::plan::undo::inverse`]).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self", tag = "step", rename_all = "kebab-case")]
pub enum Step {
    /// Takes over the interface that a plugin earlier in the runtime's list has created, as its result describes it.
    TakeMade(MadeBefore),
    /// Creates the bridge if needed and brings it up.
    EnsureBridge(spec::Bridge),
    /// Creates a link in the pod. Serialised as the link itself, see [`spec::Link`].
    #[serde(skip)]
    CreateLink(spec::Link),
    /// Claims a device of the node for the attachment, and stores the device's state.
    ClaimDevice(spec::Device),
    /// Changes settings of a claimed device before it is moved into the pod.
    SetDevice(SetDevice),
    /// Moves the claimed device into the pod.
    MoveDevice,
    /// Sets the pod's loopback interface up.
    RaiseLoopback,
    /// Leases addresses from IPAM that netattach implements itself.
    Lease(ipam::Config),
    /// Replaces the attachment's device information file by a copy of the device plugin's, if there is one. Before the
    /// attachment's plugins.
    PrepareDeviceInfo(DeviceInfoFiles),
    /// Calls another CNI plugin.
    Delegate(Delegate),
    /// Adds the gateway addresses of the lease to the bridge.
    Gateway {
        /// The bridge.
        bridge: String,
        /// Remove other addresses of the same family instead of failing.
        force: bool,
        /// Keep other addresses of the same family whose subnets do not overlap.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        beside: bool,
        /// The VLAN of the bridge that the gateway addresses belong to; absent: the bridge itself.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        vlan: Option<u16>,
    },
    /// Enables forwarding on the node for the leased families.
    EnsureForwarding,
    /// Adds the gateway addresses to the node's end of a routed veth, and adds routes to the pod's addresses on the
    /// node.
    RouteToPod,
    /// Finds the device through which the node reaches an interface that other plugins created, for
    /// [`Step::Translate`].
    FindReach,
    /// Makes the node translate addresses for the pod. Runs before any packet of the pod is let through.
    Translate(Translate),
    /// Makes the node accept forwarded packets from and to the attachment's addresses.
    Admit(Admit),
    /// Makes the node's packet filter drop packets that the pod sends with an Ethernet source other than its
    /// interface's: for plain executables, which have no BPF programs. Runs before the interface comes up.
    RestrictSender,
    /// Finds the hook for the traffic of an interface that other plugins created. Runs after all of them.
    FindDevice,
    /// Creates the attachment's record and attaches its policy and its programs.
    Protect(Protect),
    /// Adds the leased addresses to the record of an attachment for which [`Step::Protect`] ran before the lease.
    /// Undone together with that step.
    ProtectAddresses,
    /// Adds addresses and routes to the pod's interface and brings it up.
    Configure(Configure),
    /// Chooses how the node and a pod on one of its parents reach each other. Runs before [`Step::GiveHostAccess`]
    /// changes anything.
    ChooseHostAccess,
    /// Makes the node and the pod reach each other in the chosen way.
    GiveHostAccess,
    /// Writes the attachment to libcni's cache, for programs that read the cache.
    Remember(Remember),
    /// Stores the interface's properties that [`Step::Tune`] is about to change, in order to restore them.
    NoteProperties(spec::Tune),
    /// Changes settings and properties of the interface.
    Tune(spec::Tune),
    /// Chooses the routing tables for the addresses of the interface. Runs before [`Step::UseTables`] changes
    /// anything.
    ChooseTables(spec::BySource),
    /// Routes packets from the interface's addresses by the chosen tables.
    UseTables(spec::BySource),
    /// Chooses the VRF that the interface is enslaved to. Runs before [`Step::JoinVrf`] changes anything.
    ChooseVrf(spec::Vrf),
    /// Enslaves the interface to the chosen VRF.
    JoinVrf(spec::Vrf),
    /// Reads the device information after the attachment's plugins have run.
    ReadDeviceInfo(DeviceInfoFiles),
    /// Moves the pod's default routes to the attachment's interface. Runs after all attachments are made.
    MoveDefaultRoutes {
        /// Next hops in the order of preference; empty: the attachment's own gateways.
        gateways: Vec<IpAddr>,
        /// The destinations that stay on the sandbox's own interface, as do packets from its addresses; `None`:
        /// cluster traffic also uses the moved default routes. An agent that does not know this field can ignore it:
        /// nothing of it is outside the pod.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        keep: Option<Vec<IpNet>>,
    },
    /// Routes packets through the interface that has their source address, if several interfaces lead to one
    /// destination. The last step of all.
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

/// The interface that a plugin earlier in the list has created.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MadeBefore {
    /// The plugin's result, in the version of the attachment's configuration.
    pub result: Text,
}

/// Settings for a claimed device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetDevice {
    /// Settings made by the physical function.
    #[serde(default, skip_serializing_if = "spec::VfSettings::is_empty")]
    pub function: spec::VfSettings,
    /// Ethernet address, set by the physical function if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// MTU in bytes. An agent that does not know this field restores the device's former MTU nevertheless.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
}

/// The files of an attachment's device information (NPWG Device Information Specification, section 4).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceInfoFiles {
    /// The device plugin's file, if a device plugin allocated the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_plugin: Option<PathBuf>,
    /// The attachment's own file, removed with the attachment.
    pub attachment: PathBuf,
}

/// A call of another CNI plugin.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Delegate {
    /// The plugin's `type`.
    pub plugin: String,
    /// The plugin's standard input without `prevResult`, which depends on earlier steps.
    pub config: Map<String, Value>,
    /// The use of the plugin's result.
    pub role: Role,
}

/// The use of the result of a [`Delegate`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// An interface or chained plugin: its result replaces the previous one.
    Plugin,
    /// IPAM for a native interface: its addresses are added to the result.
    Ipam,
}

/// The dataplane's settings of an attachment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Protect {
    /// The attachment's number in BPF maps.
    pub id: u32,
    /// Number of the attachment's network: flows of different networks never share conntrack entries.
    pub zone: u32,
    /// Drop frames from the pod with an Ethernet source other than its own.
    pub check_mac: bool,
    /// Drop packets from the pod with source addresses other than its own.
    pub check_addresses: bool,
    /// Further addresses that the pod may send from, and answer for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allowed: Vec<IpAddr>,
    /// First and last of each range of VLANs whose tagged frames pass, in addition to those of a bridge's trunk. An
    /// agent that does not know this field passes none of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vlans: Vec<(u16, u16)>,
    /// Rate limits for receiving and sending, in bits per second, each with its burst in bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<crate::npwg::selection::Bandwidth>,
    /// Whether packets may bypass the node's network stack.
    #[serde(default = "yes")]
    pub fast_path: bool,
    /// When the attachment's programs run.
    #[serde(default = "EnforceWhen::always")]
    pub when: EnforceWhen,
    /// Whether the ADD fails if no program sees the interface. An agent that does not know this field can ignore it:
    /// it is used only during ADD.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub needed: bool,
    /// Ethertypes that pass in addition to IP and ARP, regardless of policies.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ethertypes: Vec<u16>,
}

#[cfg(test)]
impl Protect {
    /// Settings of an attachment whose sources are verified, for tests.
    pub(crate) fn verified() -> Self {
        Self {
            id: 3,
            zone: 5,
            check_mac: true,
            check_addresses: true,
            allowed: Vec::new(),
            vlans: Vec::new(),
            bandwidth: None,
            fast_path: true,
            when: EnforceWhen::Always,
            needed: false,
            ethertypes: Vec::new(),
        }
    }
}

impl Protect {
    /// Describes which packets pass beyond untagged ones from the pod's own addresses; `None`: none.
    pub fn laxity(&self) -> Option<String> {
        let lax: Vec<String> = self.senders().into_iter().chain(self.tags()).collect();
        (!lax.is_empty()).then(|| lax.join("; "))
    }

    /// Describes the VLANs whose tagged frames pass.
    fn tags(&self) -> Option<String> {
        let ranges: Vec<String> = self
            .vlans
            .iter()
            .map(|(first, last)| match first == last {
                true => first.to_string(),
                false => format!("{first} to {last}"),
            })
            .collect();
        let several = self.vlans.len() > 1 || self.vlans.iter().any(|(first, last)| first != last);
        let plural = if several { "s" } else { "" };
        (!ranges.is_empty())
            .then(|| format!("frames of VLAN{plural} {} pass with their tag", ranges.join(", ")))
    }

    /// Describes the further addresses that the pod may send from.
    fn senders(&self) -> Option<String> {
        match (self.check_mac, self.check_addresses) {
            (false, _) => Some("the pod may send from any Ethernet and IP address".to_owned()),
            (true, false) => Some("the pod may send from any IP address".to_owned()),
            (true, true) if !self.allowed.is_empty() => {
                let nets = IpNet::aggregate(&self.allowed.iter().copied().map(IpNet::from).collect());
                let allowed: Vec<String> = nets
                    .iter()
                    .map(|net| match net.prefix_len() == net.max_prefix_len() {
                        true => net.addr().to_string(),
                        false => net.to_string(),
                    })
                    .collect();
                Some(format!("the pod may send from {} too", allowed.join(", ")))
            }
            (true, true) => None,
        }
    }
}

/// The default of `fast_path`, for records written before the field existed.
fn yes() -> bool {
    true
}

/// How a pod's interface is configured.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Configure {
    /// How addresses become routes.
    pub style: Style,
    /// Whether a default route through the leased gateway is added for each family that has none.
    pub default_route: bool,
    /// `dns` of the configuration: reported in place of the lease's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dns: Option<cni::Dns>,
    /// Whether an interface with only IPv4 addresses gets no IPv6 link-local address.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub v4_alone: bool,
    /// Whether IPv6 addresses are used only after duplicate address detection has found no other user.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub detect_duplicates: bool,
    /// Whether the interface stays down.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub down: bool,
}

/// How a leased address is configured in the pod.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Style {
    /// With the prefix length of its subnet, which is on-link.
    #[default]
    Subnet,
    /// As a host address; all traffic goes through the node ([`crate::plan::addressing::GATEWAY_V4`],
    /// [`crate::plan::addressing::GATEWAY_V6`]).
    Routed,
    /// With the prefix length of its subnet, of which only the gateway is on-link: the rest is routed through the
    /// gateway, which is the leased gateway address on the node's end of the link.
    PointToPoint,
}

/// The origin of an attachment's interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MadeBy<'s> {
    /// netattach creates this link.
    Link(&'s spec::Link),
    /// The interface is this device of the node.
    Device(&'s spec::Device),
    /// The kernel creates it with the pod's namespace: loopback.
    Kernel,
    /// Another plugin creates the interface.
    Plugin,
}

impl<'s> MadeBy<'s> {
    /// Returns the link, if netattach creates it.
    pub fn link(self) -> Option<&'s spec::Link> {
        match self {
            Self::Link(link) => Some(link),
            Self::Device(_) | Self::Kernel | Self::Plugin => None,
        }
    }

    /// Returns the name in the pod of an interface that does not exist there before.
    pub fn pod_name(self) -> Option<&'s str> {
        match self {
            Self::Link(link) => Some(link.pod_name()),
            Self::Device(device) => Some(&device.pod_name),
            Self::Kernel | Self::Plugin => None,
        }
    }
}

impl Step {
    /// Returns how the step makes the attachment's interface; `None` if the step does not. Each attachment has one
    /// such step; plugins that run after it change the interface.
    pub fn makes_interface(&self) -> Option<MadeBy<'_>> {
        match self {
            Self::CreateLink(link) => Some(MadeBy::Link(link)),
            Self::ClaimDevice(device) => Some(MadeBy::Device(device)),
            Self::RaiseLoopback => Some(MadeBy::Kernel),
            Self::TakeMade(_) | Self::Delegate(Delegate { role: Role::Plugin, .. }) => Some(MadeBy::Plugin),
            Self::Delegate(Delegate { role: Role::Ipam, .. })
            | Self::EnsureBridge(_)
            | Self::SetDevice(_)
            | Self::MoveDevice
            | Self::Lease(_)
            | Self::PrepareDeviceInfo(_)
            | Self::Gateway { .. }
            | Self::EnsureForwarding
            | Self::RouteToPod
            | Self::FindReach
            | Self::Translate(_)
            | Self::Admit(_)
            | Self::RestrictSender
            | Self::FindDevice
            | Self::Protect(_)
            | Self::ProtectAddresses
            | Self::ChooseHostAccess
            | Self::GiveHostAccess
            | Self::Configure(_)
            | Self::Remember(_)
            | Self::NoteProperties(_)
            | Self::Tune(_)
            | Self::ChooseTables(_)
            | Self::UseTables(_)
            | Self::ChooseVrf(_)
            | Self::JoinVrf(_)
            | Self::ReadDeviceInfo(_)
            | Self::MoveDefaultRoutes { .. }
            | Self::RouteBySource => None,
        }
    }

    /// Whether the step requests addresses through the pod's interface, which comes up for that: see
    /// [`ipam::Config::asks_the_network`]; includes the executed plugin of that name.
    pub fn asks_the_network(&self) -> bool {
        match self {
            Self::Lease(config) => config.asks_the_network(),
            Self::Delegate(delegate) => delegate.asks_the_network(),
            _ => false,
        }
    }

    /// Returns a copy without potentially large parts: see [`crate::plan::Plan::outline`].
    pub(crate) fn outline(&self) -> Self {
        match self {
            Self::Lease(config) => Self::Lease(config.without_routes()),
            Self::Delegate(delegate) => Self::Delegate(delegate.outline()),
            Self::Remember(_) => Self::Remember(Remember::default()),
            Self::TakeMade(_) => Self::TakeMade(MadeBefore::default()),
            small => small.clone(),
        }
    }
}

impl Delegate {
    /// As [`Step::asks_the_network`].
    pub fn asks_the_network(&self) -> bool {
        self.role == Role::Ipam && self.plugin == ipam::Kind::Dhcp.name()
    }

    /// Returns a copy with only the plugin and its IPAM plugin.
    fn outline(&self) -> Self {
        let ipam = self.config.get("ipam").and_then(|ipam| ipam.get("type"));
        let ipam = ipam.map(|kind| ("ipam".to_owned(), serde_json::json!({ "type": kind })));
        Self { plugin: self.plugin.clone(), config: ipam.into_iter().collect(), role: self.role }
    }
}

/// Data about an attachment that its steps do not contain.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Remember {
    /// The network's configuration.
    pub config: Text,
    /// The values offered to plugins that declare the capability.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub capability_args: Map<String, Value>,
}

/// Position of a step in a plan: attachment, then step, both from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct StepRef(pub u16, pub u16);

/// When a step runs relative to the steps of other attachments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Together with its attachment.
    Attach,
    /// After all attachments are made.
    MoveDefaultRoutes,
    /// After [`Stage::MoveDefaultRoutes`].
    RouteBySource,
    /// Last: only then is the state that goes into the cache final.
    Remember,
}

impl Stage {
    /// All stages, in order.
    pub const ALL: [Self; 4] = [Self::Attach, Self::MoveDefaultRoutes, Self::RouteBySource, Self::Remember];
}

impl Step {
    /// Returns the stage in which the step runs.
    pub fn stage(&self) -> Stage {
        match self {
            Self::MoveDefaultRoutes { .. } => Stage::MoveDefaultRoutes,
            Self::RouteBySource => Stage::RouteBySource,
            Self::Remember(_) => Stage::Remember,
            Self::TakeMade(_)
            | Self::EnsureBridge(_)
            | Self::CreateLink(_)
            | Self::ClaimDevice(_)
            | Self::SetDevice(_)
            | Self::MoveDevice
            | Self::RaiseLoopback
            | Self::Lease(_)
            | Self::PrepareDeviceInfo(_)
            | Self::Delegate(_)
            | Self::Gateway { .. }
            | Self::EnsureForwarding
            | Self::RouteToPod
            | Self::FindReach
            | Self::Translate(_)
            | Self::Admit(_)
            | Self::RestrictSender
            | Self::FindDevice
            | Self::Protect(_)
            | Self::ProtectAddresses
            | Self::ChooseHostAccess
            | Self::GiveHostAccess
            | Self::Configure(_)
            | Self::NoteProperties(_)
            | Self::Tune(_)
            | Self::ChooseTables(_)
            | Self::UseTables(_)
            | Self::ChooseVrf(_)
            | Self::JoinVrf(_)
            | Self::ReadDeviceInfo(_) => Stage::Attach,
        }
    }

    /// Describes the step for an operator.
    pub fn describe(&self) -> String {
        match self {
            Self::TakeMade(_) => "take the interface that a plugin before netattach has made".to_owned(),
            Self::EnsureBridge(bridge) => format!("set up bridge {}", bridge.name),
            Self::CreateLink(link) => format!("create {link}"),
            Self::ClaimDevice(device) => format!("claim {device}"),
            Self::SetDevice(_) => "set the device".to_owned(),
            Self::MoveDevice => "move the device into the pod".to_owned(),
            Self::RaiseLoopback => "bring loopback up".to_owned(),
            Self::Lease(config) => format!("lease {config}"),
            Self::Delegate(delegate) => format!("run plugin {}", delegate.plugin),
            Self::Gateway { bridge, .. } => format!("put the gateway address on bridge {bridge}"),
            Self::EnsureForwarding => "enable IP forwarding on the node".to_owned(),
            Self::RouteToPod => "route to the pod's addresses".to_owned(),
            Self::FindReach => "find how the node reaches the pod".to_owned(),
            Self::Translate(translate) => translate.describe(),
            Self::Admit(_) => "have the node forward for its addresses".to_owned(),
            Self::RestrictSender => "have it send by its own Ethernet address alone".to_owned(),
            Self::FindDevice => "find where the interface can be judged".to_owned(),
            Self::Protect(_) => "load policy and counters".to_owned(),
            Self::ProtectAddresses => "load its addresses".to_owned(),
            Self::Configure(_) => "configure the pod's interface".to_owned(),
            Self::ChooseHostAccess => "choose how node and pod reach each other".to_owned(),
            Self::GiveHostAccess => "have node and pod reach each other".to_owned(),
            Self::Remember(_) => "write to libcni's cache".to_owned(),
            Self::NoteProperties(_) => "note the interface's properties".to_owned(),
            Self::Tune(_) => "tune the interface".to_owned(),
            Self::ChooseTables(_) => "choose tables by source address".to_owned(),
            Self::UseTables(_) => "route by source address".to_owned(),
            Self::ChooseVrf(vrf) => format!("choose the table of VRF {}", vrf.name),
            Self::JoinVrf(vrf) => format!("put the interface into VRF {}", vrf.name),
            Self::PrepareDeviceInfo(_) => "prepare device information".to_owned(),
            Self::ReadDeviceInfo(_) => "read device information".to_owned(),
            Self::MoveDefaultRoutes { .. } => "move the pod's default route here".to_owned(),
            Self::RouteBySource => "route by source".to_owned(),
        }
    }
}
