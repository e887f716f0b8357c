//! A request and the facts about the node become ordered steps with inverses. Pure.
//!
//! Everything that can be decided before the first effect is decided here. What cannot be known yet, such as
//! the address that a lease will bring, is named by the step that will know it: the executor keeps each step's
//! [`Output`], and [`result`] and [`addressing`] compute from those.

pub mod addressing;
mod attachment;
pub mod collect;
pub mod compare;
mod device;
pub mod ethertypes;
pub mod expect;
pub mod pools;
pub mod remember;
pub mod resolve;
pub mod result;
pub mod routing;
pub mod undo;
pub mod vantage;

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::cni::{self, Version};
use crate::ipam::host_local;
use crate::link::spec;
use crate::mac::Mac;
use crate::netns::NetnsId;
pub use device::pci_address;
pub use remember::{Remember, Remembered};
pub use vantage::{Unseen, Vantage, When};

/// Everything that one ADD will do to one sandbox. Written to the journal before the first step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Whom it is done to.
    pub sandbox: Sandbox,
    /// In the order in which they are attached.
    pub attachments: Vec<AttachmentPlan>,
    /// Set for the plan of an attachment that was asked for while its sandbox was live.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dynamic: Option<Dynamic>,
}

/// An attachment that a live sandbox was given on somebody's request. It has a record of its own, under its own
/// interface name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dynamic {
    /// Interface name in the key of the sandbox that it belongs to: that sandbox's DEL takes it back too.
    pub sandbox: String,
    /// Who asked for it.
    pub by: String,
}

/// A container's sandbox, as the runtime named it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sandbox {
    /// `CNI_CONTAINERID`.
    pub container_id: String,
    /// `CNI_IFNAME`: the name of the default network's interface.
    pub ifname: String,
    /// `CNI_NETNS`, as given.
    pub netns: String,
    /// Which namespace that was.
    pub netns_id: NetnsId,
    /// `CNI_ARGS`, as given.
    pub cni_args: String,
    /// `CNI_PATH`, as given.
    pub cni_path: Vec<PathBuf>,
    /// `name` of the runtime's configuration. GC reaches the sandboxes of the configuration that asks for it and no
    /// others. Empty in records from before this was kept: those are no GC's.
    #[serde(default)]
    pub config_name: String,
    /// The pod, when the runtime said which.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodRef>,
}

impl Sandbox {
    /// Link group of the links that this record's plan makes: the same for the same container and
    /// interface, different for another record of the same container, never 0 (the default group).
    pub fn link_group(&self) -> u32 {
        link_group(&self.container_id, &self.ifname)
    }
}

/// See [`Sandbox::link_group`].
pub fn link_group(container_id: &str, ifname: &str) -> u32 {
    let digest = Sha256::new().chain_update(container_id).chain_update([0]).chain_update(ifname).finalize();
    let number = digest.iter().take(4).fold(0, |number, byte| number << 8 | u32::from(*byte));
    number | spec::OWN_GROUPS
}

/// A pod by name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PodRef {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID, when the runtime gave it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
}

impl fmt::Display for PodRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// One attachment: a network, an interface name, and what it takes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AttachmentPlan {
    /// `namespace/name` of the network's definition, or the configuration's own name.
    pub network: String,
    /// `name` of the network's configuration, which keys leases and caches.
    pub config_name: String,
    /// Whether this is the cluster-wide default network.
    pub default: bool,
    /// Name of the interface in the pod.
    pub ifname: String,
    /// Version of the network's configuration: delegates are spoken to in it.
    pub version: Version,
    /// What carries the attachment, for people: `bridge`, `macvlan`, or the type of the external plugin.
    pub kind: String,
    /// `disableCheck` of the network's configuration: CHECK takes the attachment as it is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub disable_check: bool,
    /// `disableGC` of the network's configuration: GC asks none of its plugins.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub disable_gc: bool,
    /// In order.
    pub steps: Vec<Step>,
    /// The step, usually of another attachment, that moves the pod's default routes: those that this attachment
    /// brings yield to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub yields_to: Option<StepRef>,
    /// What the pod's author should know although it stopped nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// One effect. Each is idempotent or has an inverse ([`undo::inverse`]).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "step", rename_all = "kebab-case")]
pub enum Step {
    /// The bridge is there and up.
    EnsureBridge(spec::Bridge),
    /// A veth pair into the pod.
    CreateVeth(spec::Veth),
    /// A macvlan in the pod.
    CreateMacvlan(spec::Macvlan),
    /// The pod's loopback is up.
    RaiseLoopback,
    /// Addresses from the node's own pool.
    Lease(host_local::Config),
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
    #[serde(default = "When::always")]
    pub when: When,
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
    /// As a host address; everything else goes through the node ([`addressing::GATEWAY_V4`], [`addressing::GATEWAY_V6`]).
    Routed,
}

/// What a step brought.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "output", rename_all = "kebab-case")]
pub enum Output {
    /// Nothing that later steps need.
    Nothing,
    /// A bridge.
    Bridge(Bridge),
    /// A link into the pod.
    Link {
        /// The node's end, if there is one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        host: Option<Interface>,
        /// The pod's end.
        pod: Interface,
        /// What it is on, if it shares that with other pods' links.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        parent: Option<Parent>,
    },
    /// What the interface that other plugins made is to the dataplane.
    Device {
        /// Where programs see what it sends and receives.
        vantage: Vantage,
        /// The node's end, if there is one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        host: Option<Interface>,
        /// The interface, if there is one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pod: Option<Interface>,
    },
    /// The pod's loopback, with the addresses it has.
    Loopback {
        /// Usually 127.0.0.1/8 and ::1/128.
        addresses: Vec<IpNet>,
    },
    /// Addresses.
    Lease {
        /// In the order of the pools.
        addresses: Vec<LeasedAddress>,
        /// Name servers to hand to the runtime.
        #[serde(default)]
        dns: cni::Dns,
        /// Routes that come with the lease.
        #[serde(default)]
        routes: Vec<cni::Route>,
    },
    /// The pod's default routes as the kernel shows them after they were moved.
    DefaultRoutes {
        /// By family, then by metric.
        routes: Vec<spec::Route>,
    },
    /// The interfaces that needed rules by source.
    SourceRouting {
        /// In the order of the attachments.
        interfaces: Vec<routing::SourceRouting>,
    },
    /// Device information.
    DeviceInfo {
        /// Of the specified form, unknown keys included.
        info: Value,
    },
    /// What a plugin printed, in the version it was printed in.
    Delegate {
        /// The result object.
        result: Value,
    },
}

/// An interface that a step made or found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// Name in its namespace.
    pub name: String,
    /// Index in its namespace; 0, which no link has, where it is not known.
    pub index: u32,
    /// Ethernet address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// In bytes.
    pub mtu: u32,
}

/// A device of the node that carries links of pods.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parent {
    /// The device.
    pub device: Interface,
    /// Cookie of the pod's namespace (`SO_NETNS_COOKIE`): how programs on the parent know what the pod's sockets send.
    /// 0 where the kernel gives none.
    pub netns_cookie: u64,
}

/// A bridge that an attachment is on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bridge {
    /// Itself.
    #[serde(flatten)]
    pub link: Interface,
    /// It was not there before: when the ADD fails, it goes again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub made: bool,
}

/// An address with its subnet's prefix length and gateway.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeasedAddress {
    /// Host bits kept.
    pub address: IpNet,
    /// The subnet's gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
}

/// Which step of a plan: attachment, then step, both from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct StepRef(pub u16, pub u16);

impl Plan {
    /// All steps in the order in which they are carried out: attachment by attachment, then what concerns the pod as a
    /// whole.
    pub fn steps(&self) -> impl DoubleEndedIterator<Item = (StepRef, &AttachmentPlan, &Step)> {
        let stage = |stage| self.in_order().filter(move |(_, _, step)| step.stage() == stage);
        Stage::ALL.into_iter().flat_map(stage)
    }

    fn in_order(&self) -> impl DoubleEndedIterator<Item = (StepRef, &AttachmentPlan, &Step)> {
        self.attachments.iter().enumerate().flat_map(|(a, attachment)| {
            attachment
                .steps
                .iter()
                .enumerate()
                // A plan never has 65,536 of either: selections and plugin lists are bounded when they are read.
                .map(move |(s, step)| (StepRef(a as u16, s as u16), attachment, step))
        })
    }
}

impl AttachmentPlan {
    /// Where programs see what the interface sends and receives, as far as that follows from the plan; `None`: that is
    /// found out once the interface is there.
    pub fn vantage(&self) -> Option<Vantage> {
        let has = |wanted: fn(&Step) -> bool| self.steps.iter().any(wanted);
        let protect = self.steps.iter().find_map(|step| match step {
            Step::Protect(protect) => Some(protect),
            _ => None,
        });
        match protect {
            None => Some(Vantage::Nowhere(Unseen::NotJudged)),
            Some(Protect { when: When::Never, .. }) => Some(Vantage::Nowhere(Unseen::LeftAlone)),
            Some(_) if has(|step| matches!(step, Step::FindDevice)) => None,
            Some(_) if has(|step| matches!(step, Step::CreateMacvlan(_))) => Some(Vantage::Parent),
            Some(_) => Some(Vantage::Node),
        }
    }

    /// Number in the dataplane's maps, if it is there.
    pub fn number(&self) -> Option<u32> {
        self.steps.iter().find_map(|step| match step {
            Step::Protect(protect) => Some(protect.id),
            _ => None,
        })
    }
}

/// When a step is carried out, relative to those of other attachments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Attach,
    MoveDefaultRoutes,
    RouteBySource,
    /// What is told of an attachment is true then.
    Remember,
}

impl Stage {
    const ALL: [Self; 4] = [Self::Attach, Self::MoveDefaultRoutes, Self::RouteBySource, Self::Remember];
}

impl Step {
    fn stage(&self) -> Stage {
        match self {
            Self::MoveDefaultRoutes { .. } => Stage::MoveDefaultRoutes,
            Self::RouteBySource => Stage::RouteBySource,
            Self::Remember(_) => Stage::Remember,
            _ => Stage::Attach,
        }
    }

    /// The step in an operator's words.
    pub fn describe(&self) -> String {
        match self {
            Self::EnsureBridge(bridge) => format!("set up bridge {}", bridge.name),
            Self::CreateVeth(veth) => format!("create veth {} to {}", veth.host_name, veth.pod_name),
            Self::CreateMacvlan(macvlan) => format!(
                "create macvlan {} on {}",
                macvlan.pod_name,
                macvlan.parent.as_deref().unwrap_or("the default route's interface")
            ),
            Self::RaiseLoopback => "bring loopback up".to_owned(),
            Self::Lease(config) => format!("lease addresses of network {}", config.network),
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
