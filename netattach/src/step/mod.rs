//! The vocabulary of a plan: steps and their outputs. Plain data, serialised in the form the journal stores.
//!
//! A [`Step`] is one effect; an [`Output`] (`output`) is its result. Where programs see an attachment's frames is its
//! [`HookKind`] (`hook_kind`); what the node translates for it is a [`Translate`] (`translate`), what it lets pass an [`Admit`] (`admit`); a device of the node that it takes is a [`Claim`]
//! (`claim`). Drivers and plans put steps together, `attach` carries them out.

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
pub use admit::{Admit, Admitted, Ingress};
pub use claim::{Claim, Home, Representor};
pub use hook_kind::{ENFORCE_ANNOTATION, EnforceWhen, HookKind, NotObservable};
pub use output::{
    Bridge, Brought, HostAccess, Interface, Kept, Output, Outputs, Parent, Printed, Reached, SourceRouting,
    Trunk,
};
pub use translate::{PortSenders, Translate};

/// One effect. Each is idempotent or has an inverse ([`crate::plan::undo::inverse`]).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self", tag = "step", rename_all = "kebab-case")]
pub enum Step {
    /// Takes the interface that a plugin before netattach in the runtime's list has made, as its result describes it.
    TakeMade(MadeBefore),
    /// Creates the bridge if needed and brings it up.
    EnsureBridge(spec::Bridge),
    /// Creates a link in the pod. Serialised by the link itself, see [`spec::Link`].
    #[serde(skip)]
    CreateLink(spec::Link),
    /// Claims a device of the node for the attachment, and notes how it is.
    ClaimDevice(spec::Device),
    /// Sets what a claimed device is to be, before the pod has it.
    SetDevice(SetDevice),
    /// Moves the claimed device into the pod.
    MoveDevice,
    /// Brings the pod's loopback up.
    RaiseLoopback,
    /// Leases addresses from address management that netattach carries out itself.
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
        /// Remove other addresses of the same family instead of refusing them.
        force: bool,
        /// Leave other addresses of the same family, whose subnets do not overlap, where they are.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        beside: bool,
        /// The VLAN of the bridge whose gateways these are; absent: the bridge's own.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        vlan: Option<u16>,
    },
    /// Enables forwarding on the node for the leased families.
    EnsureForwarding,
    /// Adds the gateway addresses to the node's end of a routed veth, and a route to each of the pod's addresses to
    /// the node.
    RouteToPod,
    /// Finds the device by which the node reaches an interface that other plugins made, for [`Step::Translate`].
    FindReach,
    /// Has the node translate addresses for the pod. Before any packet of the pod is let through.
    Translate(Translate),
    /// Has the node let packets from and to the attachment's addresses pass.
    Admit(Admit),
    /// Has the node's packet filter drop what the pod sends by another Ethernet address than its interface's: for plain executables,
    /// which have no programs. Before the interface comes up.
    RestrictSender,
    /// Finds where the traffic of the interface that other plugins made can be judged. After all of them.
    FindDevice,
    /// Creates the attachment's record and attaches its policy and its programs.
    Protect(Protect),
    /// Adds the leased addresses to the record of an attachment that [`Step::Protect`] made before there were any. Undone
    /// with that.
    ProtectAddresses,
    /// Adds addresses and routes to the pod's interface and brings it up.
    Configure(Configure),
    /// Chooses how the node and a pod on one of its parents reach each other, before [`Step::GiveHostAccess`] changes
    /// anything.
    ChooseHostAccess,
    /// Has them reach each other.
    GiveHostAccess,
    /// Writes the attachment to libcni's cache, for programs that read it.
    Remember(Remember),
    /// Notes what properties the interface has that [`Step::Tune`] is about to change, to give them back.
    NoteProperties(spec::Tune),
    /// Changes settings and properties of the interface.
    Tune(spec::Tune),
    /// Decides which routing tables the addresses of the interface get, before [`Step::UseTables`] changes anything.
    ChooseTables(spec::BySource),
    /// Has what the interface's addresses send routed by the tables that were chosen.
    UseTables(spec::BySource),
    /// Decides which VRF the interface is to be a port of, before [`Step::JoinVrf`] changes anything.
    ChooseVrf(spec::Vrf),
    /// Makes the interface a port of the VRF that was chosen.
    JoinVrf(spec::Vrf),
    /// Reads the device information after the attachment's plugins have run.
    ReadDeviceInfo(DeviceInfoFiles),
    /// Moves the pod's default routes to the attachment's interface. After all attachments are made.
    MoveDefaultRoutes {
        /// Next hops in the order of preference; empty: those that the attachment itself has.
        gateways: Vec<IpAddr>,
        /// The destinations that stay on the sandbox's own interface, with what its addresses send; `None`: the cluster is
        /// left to the default routes. An agent that does not know the field passes over it: nothing of it is outside the
        /// pod.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        keep: Option<Vec<IpNet>>,
    },
    /// Makes traffic leave through the interface that has its source address, if several interfaces lead to one
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

/// What a plugin before netattach has made.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MadeBefore {
    /// Its result, in the version of the attachment's configuration.
    pub result: Text,
}

/// What a claimed device is to be.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetDevice {
    /// By its physical function.
    #[serde(default, skip_serializing_if = "spec::VfSettings::is_empty")]
    pub function: spec::VfSettings,
    /// Ethernet address, given by the physical function where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// In bytes. An agent that does not know it gives the device its own back all the same.
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
    /// Its `type`.
    pub plugin: String,
    /// Its standard input, except `prevResult`, which depends on earlier steps.
    pub config: Map<String, Value>,
    /// How its result is used.
    pub role: Role,
}

/// How the result of a [`Delegate`] is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// An interface or chained plugin: its result replaces the previous one.
    Plugin,
    /// Address management for a native interface: its addresses are added to the result.
    Ipam,
}

/// The dataplane's settings for an attachment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Protect {
    /// The attachment's number in the maps.
    pub id: u32,
    /// Number of its network: flows of different networks never meet in conntrack.
    pub zone: u32,
    /// Drop frames from the pod with an Ethernet source other than its own.
    pub check_mac: bool,
    /// Drop packets from the pod with source addresses other than its own.
    pub check_addresses: bool,
    /// Addresses beside its own that it may send from, and answer for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allowed: Vec<IpAddr>,
    /// First and last of each range of VLANs whose frames pass with their tag, beside those of a bridge's trunk. An agent
    /// that does not know the field passes none of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vlans: Vec<(u16, u16)>,
    /// Rate limits for receiving and sending, in bits per second, each with its burst in bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<crate::npwg::selection::Bandwidth>,
    /// Whether its packets may bypass the node's network stack.
    #[serde(default = "yes")]
    pub fast_path: bool,
    /// When the attachment's programs run.
    #[serde(default = "EnforceWhen::always")]
    pub when: EnforceWhen,
    /// Whether the ADD fails where no program sees the interface. An agent that does not know the field passes over it:
    /// nothing asks for it later.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub needed: bool,
    /// Ethertypes that pass in addition to IP and ARP, regardless of policies.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ethertypes: Vec<u16>,
}

#[cfg(test)]
impl Protect {
    /// What the dataplane is told of an attachment whose sources it verifies, for tests.
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
    /// What passes beside the pod's own addresses and with a tag, in words; `None`: nothing.
    pub fn laxity(&self) -> Option<String> {
        let lax: Vec<String> = self.senders().into_iter().chain(self.tags()).collect();
        (!lax.is_empty()).then(|| lax.join("; "))
    }

    /// The VLANs whose frames pass with their tag, in words.
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

    /// From which addresses the pod may send beside its own, in words.
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

/// The default of `fast_path` for records from before the field existed.
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
    /// Whether an interface with IPv4 addresses alone gets no IPv6 link-local one either.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub v4_alone: bool,
    /// Whether IPv6 addresses are used only after nobody else on the link has answered for them.
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
    /// With the prefix length of its subnet, of which only the gateway is on-link: the rest is behind it. The gateway is
    /// the leased one, an address of the node's end of the link.
    PointToPoint,
}

/// How an attachment gets its interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MadeBy<'s> {
    /// netattach makes this link.
    Link(&'s spec::Link),
    /// It is this device of the node.
    Device(&'s spec::Device),
    /// The kernel creates it with the pod's namespace: loopback.
    Kernel,
    /// Another plugin makes it.
    Plugin,
}

impl<'s> MadeBy<'s> {
    /// The link, if netattach makes it.
    pub fn link(self) -> Option<&'s spec::Link> {
        match self {
            Self::Link(link) => Some(link),
            Self::Device(_) | Self::Kernel | Self::Plugin => None,
        }
    }

    /// Name that an interface in the pod gets which is not there before.
    pub fn pod_name(self) -> Option<&'s str> {
        match self {
            Self::Link(link) => Some(link.pod_name()),
            Self::Device(device) => Some(&device.pod_name),
            Self::Kernel | Self::Plugin => None,
        }
    }
}

impl Step {
    /// How the step makes the attachment's interface; `None` if it does not. Each attachment has one such step;
    /// plugins that run after it change the interface.
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

    /// Whether it asks for addresses by the pod's interface, which comes up for that: as
    /// [`ipam::Config::asks_the_network`], and the plugin of that name where it is executed.
    pub fn asks_the_network(&self) -> bool {
        match self {
            Self::Lease(config) => config.asks_the_network(),
            Self::Delegate(delegate) => delegate.asks_the_network(),
            _ => false,
        }
    }

    /// A copy without potentially large parts: see [`crate::plan::Plan::outline`].
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

    /// A copy with only the plugin and its IPAM plugin.
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

/// When a step runs, relative to those of other attachments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Together with its attachment.
    Attach,
    /// After all attachments are made.
    MoveDefaultRoutes,
    /// After [`Stage::MoveDefaultRoutes`].
    RouteBySource,
    /// Last: only then is the state written to the cache final.
    Remember,
}

impl Stage {
    /// All stages, in order.
    pub const ALL: [Self; 4] = [Self::Attach, Self::MoveDefaultRoutes, Self::RouteBySource, Self::Remember];
}

impl Step {
    /// The stage in which it runs.
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
