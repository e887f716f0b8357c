//! Desired kernel objects in the kernel's terms: produced by planning, carried out by `netlink`.

mod by_source;
mod device;
mod netkit;
mod tap;
mod tune;
mod vrf;

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::mac::Mac;
pub use by_source::{BySource, SourceTable, SourceTables};
pub use device::{
    Conduct, Device, DeviceId, Reception, VfLinkState, VfRates, VfSettings, VfVlan, VirtualFunction,
};
pub use netkit::{Netkit, NetkitMode, NetkitPolicy, NetkitWays};
pub use tap::{Tap, TapAccess};
pub use tune::{Properties, Sysctl, Tune};
pub use vrf::{Vrf, VrfPort};

/// A traffic-control hook of a device, from the view of the node's network stack. Ordered as listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TcHook {
    /// Packets that the device receives: for a veth, those that the pod behind it sends.
    Ingress,
    /// Packets that the device sends: for a veth, those that the pod behind it receives.
    Egress,
}

/// This bit is set in the group of every link that an agent's plans make. Other programs do not use numbers this high.
pub const OWN_GROUPS: u32 = 1 << 31;

/// A veth pair. The pod's end is created in the pod's namespace under its final name, never moved there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Veth {
    /// Name of the end that stays in the node's namespace.
    pub host_name: String,
    /// Name of the end in the pod's namespace.
    pub pod_name: String,
    /// MTU of both ends in bytes; the kernel's default (1500) when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Address of the pod's end; a random one when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// Link group of both ends: one request deletes all links of a group, and the group marks the links that
    /// netattach created.
    pub group: u32,
    /// The bridge that the node's end joins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<BridgePort>,
}

/// Membership of a bridge.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BridgePort {
    /// Name of the bridge in the node's namespace.
    pub bridge: String,
    /// Whether frames may leave through the port on which they arrived.
    #[serde(default)]
    pub hairpin: bool,
    /// Whether the port exchanges no frames with other isolated ports.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub isolated: bool,
    /// The port's VLANs on a bridge with VLAN filtering; absent: the bridge's default for every port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlans: Option<PortVlans>,
}

/// VLANs of a bridge's port.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortVlans {
    /// The VLAN of untagged frames, in both directions; absent: the port has only the VLANs of `tagged`, and the
    /// default VLAN with `keeps_default`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub native: Option<u16>,
    /// The VLANs whose frames are tagged, in both directions: first and last of each range, ascending and not
    /// adjacent, without `native`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tagged: Vec<(u16, u16)>,
    /// Whether the port stays a member of the bridge's default VLAN, usually 1.
    #[serde(default)]
    pub keeps_default: bool,
}

impl PortVlans {
    /// Returns the VLAN ids in `tagged`.
    pub fn tagged_ids(&self) -> impl Iterator<Item = u16> {
        self.tagged.iter().flat_map(|(first, last)| *first..=*last)
    }
}

/// Rate limit for sending of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// Bytes per second, Ethernet headers included.
    pub rate: u64,
    /// Bytes that may be sent at once after a pause, at least the longest frame.
    pub burst: u32,
    /// Bytes that may wait in the queue; packets beyond that are dropped.
    pub queue: u32,
}

/// A macvlan, created in the pod's namespace on a parent in the node's namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Macvlan {
    /// Name in the pod's namespace.
    pub pod_name: String,
    /// The parent; the interface of the node's default route when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Whether and how macvlans of the same parent reach each other.
    pub mode: MacvlanMode,
    /// MTU in bytes, at most the parent's; the parent's when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Ethernet address; a random one when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// Link group: links of one group are deleted by one request.
    pub group: u32,
    /// Length in frames of the parent's queue for broadcasts (kernel 5.11); the kernel's default (1000) when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub broadcast_queue: Option<u32>,
    /// Whether the link is a macvtap: the kernel passes its frames to and from a character device, `/dev/tapN` with N
    /// the link's index.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tap: bool,
    /// Whether the parent is an interface in the pod's namespace.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_pod: bool,
}

#[cfg(test)]
impl Macvlan {
    /// A macvlan in mode `bridge` with defaults everywhere else.
    pub(crate) fn plain(pod_name: &str, parent: &str) -> Self {
        Self {
            pod_name: pod_name.to_owned(),
            parent: Some(parent.to_owned()),
            mode: MacvlanMode::Bridge,
            mtu: None,
            mac: None,
            group: 0,
            broadcast_queue: None,
            tap: false,
            in_pod: false,
        }
    }
}

/// How the macvlans of one parent reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MacvlanMode {
    /// Directly.
    #[default]
    Bridge,
    /// Not at all.
    Private,
    /// Through the switch that the parent is connected to.
    Vepa,
    /// The macvlan takes over the parent, which can have no other macvlan.
    Passthru,
}

/// An ipvlan, created in the pod's namespace on a parent in the node's namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ipvlan {
    /// Name in the pod's namespace.
    pub pod_name: String,
    /// The parent; the interface of the node's default route when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// The layer at which packets are routed; one mode for all ipvlans of a parent.
    pub mode: IpvlanMode,
    /// MTU in bytes, at most the parent's; the parent's when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Link group: links of one group are deleted by one request.
    pub group: u32,
    /// Whether the parent is an interface in the pod's namespace.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_pod: bool,
}

/// A VLAN link of a parent, as an interface of the pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vlan {
    /// Name in the pod's namespace.
    pub pod_name: String,
    /// The parent.
    pub parent: String,
    /// The VLAN tag of frames on the parent.
    #[serde(flatten)]
    pub tag: VlanTag,
    /// MTU in bytes, at most the parent's; the parent's when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Ethernet address; the parent's when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// Link group: links of one group are deleted by one request.
    pub group: u32,
    /// Whether the parent is an interface in the pod's namespace.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_pod: bool,
}

/// The tag of a VLAN link's frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct VlanTag {
    /// The VLAN, 0 to 4094.
    pub id: u16,
    /// Whether the tag is a service tag (802.1ad, the outer of two); otherwise a customer tag (802.1Q).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub service: bool,
}

/// A dummy interface in the pod: the kernel drops all packets sent on the interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dummy {
    /// Name in the pod's namespace.
    pub pod_name: String,
    /// MTU in bytes; the kernel's default (1500) when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Ethernet address; a random one when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// Link group: links of one group are deleted by one request.
    pub group: u32,
}

/// Where the packets of the ipvlans of one parent are routed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IpvlanMode {
    /// In the pod, which also resolves its neighbours' addresses.
    #[default]
    L2,
    /// By the node; the pod has no neighbours.
    L3,
    /// As in [`IpvlanMode::L3`], through the node's netfilter hooks.
    L3s,
}

/// A link that a step creates in the pod's namespace. Serialised as the step itself: `{"step": "create-veth", ...}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "step")]
pub enum Link {
    /// A veth pair into the pod.
    #[serde(rename = "create-veth")]
    Veth(Veth),
    /// A macvlan in the pod.
    #[serde(rename = "create-macvlan")]
    Macvlan(Macvlan),
    /// An ipvlan in the pod.
    #[serde(rename = "create-ipvlan")]
    Ipvlan(Ipvlan),
    /// A VLAN in the pod.
    #[serde(rename = "create-vlan")]
    Vlan(Vlan),
    /// A dummy in the pod.
    #[serde(rename = "create-dummy")]
    Dummy(Dummy),
    /// A tap in the pod.
    #[serde(rename = "create-tap")]
    Tap(Tap),
    /// A netkit pair into the pod.
    #[serde(rename = "create-netkit")]
    Netkit(Netkit),
}

/// How a link in a pod is connected to the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tie<'l> {
    /// By a peer in the node's namespace.
    NodeEnd {
        /// Name of that end.
        name: &'l str,
        /// The bridge that the end joins; the node routes to an end outside bridges.
        port: Option<&'l BridgePort>,
    },
    /// A parent in the node's namespace, which carries links of other pods too.
    Parent {
        /// Name of the parent; the interface of the node's default route when absent.
        name: Option<&'l str>,
        /// Whether the links of the parent reach each other without leaving it.
        siblings: bool,
    },
    /// Not at all: by another interface of the pod, or by none.
    InPod,
}

/// The mode of a link, for kinds that have one: how links of one parent reach each other, who may open a tap, or how
/// the ends of a netkit are connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkMode {
    /// A macvlan's mode.
    Macvlan(MacvlanMode),
    /// An ipvlan's mode.
    Ipvlan(IpvlanMode),
    /// The tag of a VLAN link, which is the only setting that such links differ in.
    Vlan(VlanTag),
    /// The users that may open a tap.
    Tap(TapAccess),
    /// The mode and policies of a netkit.
    Netkit(NetkitWays),
}

impl Link {
    /// Sets the Ethernet address that the link is created with. Returns `false` if this kind of link cannot have an
    /// address of its own.
    pub fn set_mac(&mut self, mac: Mac) -> bool {
        match self {
            Self::Veth(veth) => veth.mac = Some(mac),
            Self::Macvlan(Macvlan { mode: MacvlanMode::Passthru, .. }) | Self::Ipvlan(_) => return false,
            Self::Netkit(Netkit { ways: NetkitWays { mode: NetkitMode::L3, .. }, .. }) => return false,
            Self::Netkit(netkit) => netkit.mac = Some(mac),
            Self::Macvlan(macvlan) => macvlan.mac = Some(mac),
            Self::Vlan(vlan) => vlan.mac = Some(mac),
            Self::Dummy(dummy) => dummy.mac = Some(mac),
            Self::Tap(tap) => tap.mac = Some(mac),
        }
        true
    }

    /// Values of `step` in the serialised form.
    pub const STEPS: [&str; 7] = [
        "create-veth",
        "create-macvlan",
        "create-ipvlan",
        "create-vlan",
        "create-dummy",
        "create-tap",
        "create-netkit",
    ];

    /// Returns the name under which the kernel reports this kind of link.
    pub fn shown_kind(&self) -> &'static str {
        match self {
            Self::Tap(_) => "tun",
            other => other.kind(),
        }
    }

    /// Returns netattach's name for this kind of link.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Veth(_) => "veth",
            Self::Macvlan(Macvlan { tap: true, .. }) => "macvtap",
            Self::Macvlan(_) => "macvlan",
            Self::Ipvlan(_) => "ipvlan",
            Self::Vlan(_) => "vlan",
            Self::Dummy(_) => "dummy",
            Self::Tap(_) => "tap",
            Self::Netkit(_) => "netkit",
        }
    }

    /// Name in the pod's namespace.
    pub fn pod_name(&self) -> &str {
        match self {
            Self::Veth(veth) => &veth.pod_name,
            Self::Macvlan(macvlan) => &macvlan.pod_name,
            Self::Ipvlan(ipvlan) => &ipvlan.pod_name,
            Self::Vlan(vlan) => &vlan.pod_name,
            Self::Dummy(dummy) => &dummy.pod_name,
            Self::Tap(tap) => &tap.pod_name,
            Self::Netkit(netkit) => &netkit.pod_name,
        }
    }

    /// How the link is connected to the node.
    pub fn tie(&self) -> Tie<'_> {
        match self {
            Self::Macvlan(Macvlan { in_pod: true, .. })
            | Self::Ipvlan(Ipvlan { in_pod: true, .. })
            | Self::Vlan(Vlan { in_pod: true, .. })
            | Self::Dummy(_)
            | Self::Tap(_) => Tie::InPod,
            Self::Vlan(vlan) => Tie::Parent { name: Some(&vlan.parent), siblings: false },
            Self::Veth(veth) => Tie::NodeEnd { name: &veth.host_name, port: veth.port.as_ref() },
            Self::Netkit(netkit) => Tie::NodeEnd { name: &netkit.host_name, port: None },
            Self::Macvlan(macvlan) => {
                Tie::Parent { name: macvlan.parent.as_deref(), siblings: macvlan.mode == MacvlanMode::Bridge }
            }
            Self::Ipvlan(ipvlan) => Tie::Parent { name: ipvlan.parent.as_deref(), siblings: true },
        }
    }

    /// The mode, if links of this kind have one.
    pub fn mode(&self) -> Option<LinkMode> {
        match self {
            Self::Veth(_) | Self::Dummy(_) => None,
            Self::Macvlan(macvlan) => Some(LinkMode::Macvlan(macvlan.mode)),
            Self::Ipvlan(ipvlan) => Some(LinkMode::Ipvlan(ipvlan.mode)),
            Self::Vlan(vlan) => Some(LinkMode::Vlan(vlan.tag)),
            Self::Tap(tap) => Some(LinkMode::Tap(tap.access)),
            Self::Netkit(netkit) => Some(LinkMode::Netkit(netkit.ways)),
        }
    }

    /// Whether the driver classifies the pod's packets by the protocol that the sender's socket has set instead of by
    /// the frame's ethertype. This is the case for an ipvlan in a layer 3 mode, to which any pod with an ipvlan can
    /// switch the parent (`drivers/net/ipvlan/ipvlan_core.c`), and for the node's stack behind a netkit
    /// (`drivers/net/netkit.c`). All other drivers send the frame, or determine its protocol again from the frame
    /// (`eth_type_trans`).
    pub fn goes_by_named_protocol(&self) -> bool {
        match self {
            Self::Ipvlan(_) | Self::Netkit(_) => true,
            Self::Veth(_) | Self::Macvlan(_) | Self::Vlan(_) | Self::Dummy(_) | Self::Tap(_) => false,
        }
    }

    /// Whether the link has the Ethernet address of its parent on the node, also after that has changed: the kernel
    /// gives the parent's new address to each ipvlan (`ipvlan_device_event`), to a macvlan in mode passthru
    /// (`macvlan_device_event`), and to each VLAN whose address nobody has set (`vlan_dev_inherit_address`).
    pub fn follows_parent(&self) -> bool {
        match self {
            Self::Ipvlan(ipvlan) => !ipvlan.in_pod,
            Self::Vlan(vlan) => !vlan.in_pod && vlan.mac.is_none(),
            Self::Macvlan(macvlan) => !macvlan.in_pod && macvlan.mode == MacvlanMode::Passthru,
            Self::Veth(_) | Self::Dummy(_) | Self::Tap(_) | Self::Netkit(_) => false,
        }
    }

    /// Describes how the link shares its parent: links that share a parent in different ways cannot coexist on that
    /// parent. `None`: the link has no parent on the node, or its parent can carry links of any kind beside this one.
    pub fn sharing(&self) -> Option<&'static str> {
        match self {
            Self::Veth(_)
            | Self::Vlan(_)
            | Self::Dummy(_)
            | Self::Tap(_)
            | Self::Netkit(_)
            | Self::Macvlan(Macvlan { in_pod: true, .. })
            | Self::Ipvlan(Ipvlan { in_pod: true, .. }) => None,
            Self::Macvlan(Macvlan { mode: MacvlanMode::Passthru, .. }) => Some("a macvlan in mode passthru"),
            Self::Macvlan(_) => Some("macvlans"),
            // The mode is a property of the parent: the ipvlan created last changes the mode of all.
            Self::Ipvlan(Ipvlan { mode: IpvlanMode::L2, .. }) => Some("ipvlans in mode l2"),
            Self::Ipvlan(Ipvlan { mode: IpvlanMode::L3, .. }) => Some("ipvlans in mode l3"),
            Self::Ipvlan(Ipvlan { mode: IpvlanMode::L3s, .. }) => Some("ipvlans in mode l3s"),
        }
    }

    /// Returns the name of the end in the node's namespace, if there is one.
    pub fn node_end(&self) -> Option<&str> {
        match self.tie() {
            Tie::NodeEnd { name, .. } => Some(name),
            Tie::Parent { .. } | Tie::InPod => None,
        }
    }

    /// Returns the name of the parent on the node, if the configuration names one.
    pub fn parent(&self) -> Option<&str> {
        match self.tie() {
            Tie::NodeEnd { .. } | Tie::InPod => None,
            Tie::Parent { name, .. } => name,
        }
    }

    /// Returns the bridge that the link's node end joins.
    pub fn port(&self) -> Option<&BridgePort> {
        match self.tie() {
            Tie::NodeEnd { port, .. } => port,
            Tie::Parent { .. } | Tie::InPod => None,
        }
    }

    /// Returns the bridge in the pod that the link is a port of.
    pub fn bridge_in_pod(&self) -> Option<&str> {
        match self {
            Self::Tap(tap) => tap.bridge.as_deref(),
            _ => None,
        }
    }

    /// Whether the node routes to the link: the link has a node end, which is not in a bridge.
    pub fn is_routed(&self) -> bool {
        matches!(self.tie(), Tie::NodeEnd { port: None, .. })
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, pod_name) = (self.kind(), self.pod_name());
        match self.tie() {
            Tie::NodeEnd { name, .. } => write!(f, "{kind} {name} to {pod_name}"),
            Tie::Parent { name, .. } => {
                write!(f, "{kind} {pod_name} on {}", name.unwrap_or("the default route's interface"))
            }
            Tie::InPod => write!(f, "{kind} {pod_name} in the pod"),
        }
    }
}

/// Returns the name of the VLAN link on a bridge that has the gateway addresses of a VLAN, the same name that the
/// reference bridge plugin uses.
pub fn vlan_device(bridge: &str, vlan: u16) -> String {
    format!("{bridge}.{vlan}")
}

/// A bridge in the node's namespace, shared by all attachments that name it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bridge {
    /// Name of the bridge.
    pub name: String,
    /// MTU in bytes; the kernel's default when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Whether the bridge receives all frames (promiscuous mode).
    #[serde(default)]
    pub promiscuous: bool,
    /// Whether the bridge forwards by VLAN.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub vlan_filtering: bool,
}

/// A route to install.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// Destination; host bits are cleared before it is sent.
    pub destination: IpNet,
    /// Next hop; absent for an on-link destination.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
    /// Preferred source address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<IpAddr>,
    /// Treat the gateway as reachable although no route covers it.
    #[serde(default)]
    pub on_link: bool,
    /// Metric.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<u32>,
    /// Table; main when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<u32>,
    /// `rt_scopes` value; link for a route without gateway and universe with one when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<u8>,
    /// Path MTU in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Maximum segment size to advertise, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advmss: Option<u32>,
    /// The origin of the route (`rtm_protocol`); that of an administrator (`RTPROT_STATIC`) when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<u8>,
}

impl Route {
    /// A route through a gateway.
    pub fn via(destination: IpNet, gateway: IpAddr) -> Self {
        Self { gateway: Some(gateway), ..Self::on_link(destination) }
    }

    /// A route to an on-link destination.
    pub fn on_link(destination: IpNet) -> Self {
        Self {
            destination,
            gateway: None,
            source: None,
            on_link: false,
            priority: None,
            table: None,
            scope: None,
            mtu: None,
            advmss: None,
            protocol: None,
        }
    }
}

/// Addresses and routes of an interface.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Addressing {
    /// Addresses with their prefix lengths.
    pub addresses: Vec<IpNet>,
    /// Routes in the order in which they are installed.
    pub routes: Vec<Route>,
    /// Whether addresses are installed without their subnet routes: the interface then has only `routes`.
    pub no_subnet_routes: bool,
    /// Whether IPv6 addresses are used only after duplicate address detection has found no other user.
    pub detect_duplicates: bool,
    /// Whether the link announces its IPv4 addresses to its neighbours when it comes up (`arp_notify`): neighbours
    /// may still map the addresses to the interface that had them before.
    pub announce_v4: bool,
    /// Whether the kernel generates no IPv6 link-local address when the link comes up.
    #[serde(default)]
    pub no_link_local: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_steps_of_links_are_those_that_serde_reads() {
        let error = serde_json::from_value::<Link>(serde_json::json!({"step": ""})).unwrap_err().to_string();
        let steps = Link::STEPS.map(|step| format!("`{step}`")).join(", ");
        assert_eq!(error, format!("unknown variant ``, expected one of {steps}"));
    }

    /// Rows: IVL-parent-mac, MVL-parent-mac, VLN-parent-mac.
    #[test]
    fn links_without_an_address_of_their_own_follow_a_parent_on_the_node() {
        let name = || "net1".to_owned();
        let ipvlan = |in_pod| {
            let (parent, mode) = (Some("eth1".to_owned()), IpvlanMode::L2);
            Link::Ipvlan(Ipvlan { pod_name: name(), parent, mode, mtu: None, group: 1, in_pod })
        };
        let vlan = |mac, in_pod| {
            let (parent, tag) = ("eth1".to_owned(), VlanTag { id: 5, service: false });
            Link::Vlan(Vlan { pod_name: name(), parent, tag, mtu: None, mac, group: 1, in_pod })
        };
        assert!(ipvlan(false).follows_parent() && vlan(None, false).follows_parent());
        assert!(!ipvlan(true).follows_parent() && !vlan(None, true).follows_parent());
        assert!(!vlan(Some(Mac([2, 0, 0, 0, 0, 1])), false).follows_parent());
        let macvlan =
            |mode, in_pod| Link::Macvlan(Macvlan { mode, in_pod, ..Macvlan::plain("net1", "eth1") });
        assert!(macvlan(MacvlanMode::Passthru, false).follows_parent());
        assert!(!macvlan(MacvlanMode::Passthru, true).follows_parent());
        assert!(!macvlan(MacvlanMode::Bridge, false).follows_parent());
    }
}
