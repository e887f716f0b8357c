//! Outputs of steps.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::OnceLock;

use ipnet::IpNet;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use super::{Admitted, Claim, HookKind, Representor, StepRef};
use crate::cni::{self, CniError, CniResult, Version};
use crate::ipam::LeasedAddress;
use crate::mac::Mac;
use crate::spec;

/// The outputs of a plan's steps, in the order of the steps. Kept for as long as a sandbox is attached, so each
/// output takes only the memory that it needs, and most take none.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Outputs(Vec<(StepRef, Option<Box<Output>>)>);

/// The output that takes no memory.
static NOTHING: Output = Output::Nothing;

impl Outputs {
    /// Returns the outputs of the attachment at that position of the plan.
    pub fn of(&self, attachment: u16) -> Brought<'_> {
        Brought { all: self, attachment }
    }

    /// Returns the output of a step, if the step has finished.
    pub fn get(&self, at: &StepRef) -> Option<&Output> {
        let position = self.position(*at).ok()?;
        self.0.get(position).map(|(_, output)| read(output))
    }

    /// Returns the addresses that a step has leased; `None`: it has not finished, or leases none.
    pub fn leased(&self, at: &StepRef) -> Option<Vec<IpAddr>> {
        let Some(Output::Lease { addresses, .. }) = self.get(at) else { return None };
        Some(addresses.iter().map(|leased| leased.address.addr()).collect())
    }

    /// Whether a step has finished.
    pub fn contains_key(&self, at: &StepRef) -> bool {
        self.position(*at).is_ok()
    }

    /// Stores the output of a finished step, and replaces an earlier one.
    pub fn insert(&mut self, at: StepRef, output: Output) {
        let output = Some(output).filter(|output| *output != Output::Nothing).map(Box::new);
        match self.position(at) {
            Ok(position) => self.0[position].1 = output,
            Err(position) => self.0.insert(position, (at, output)),
        }
    }

    /// Removes all outputs for which `is_kept` is false.
    pub fn retain(&mut self, mut is_kept: impl FnMut(&StepRef, &Output) -> bool) {
        self.0.retain(|(at, output)| is_kept(at, read(output)));
    }

    #[cfg(test)]
    pub(crate) fn remove(&mut self, at: &StepRef) {
        self.retain(|other, _| other != at);
    }

    #[cfg(test)]
    pub(crate) fn keys(&self) -> impl Iterator<Item = &StepRef> {
        self.0.iter().map(|(at, _)| at)
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns all outputs.
    pub fn values(&self) -> impl Iterator<Item = &Output> {
        self.0.iter().map(|(_, output)| read(output))
    }

    /// Returns all outputs, with their steps.
    pub fn iter(&self) -> impl Iterator<Item = (&StepRef, &Output)> {
        self.0.iter().map(|(at, output)| (at, read(output)))
    }

    fn position(&self, at: StepRef) -> Result<usize, usize> {
        self.0.binary_search_by_key(&at, |(at, _)| *at)
    }
}

fn read(output: &Option<Box<Output>>) -> &Output {
    output.as_deref().unwrap_or(&NOTHING)
}

impl FromIterator<(StepRef, Output)> for Outputs {
    fn from_iter<T: IntoIterator<Item = (StepRef, Output)>>(outputs: T) -> Self {
        let mut all = Self::default();
        outputs.into_iter().for_each(|(at, output)| all.insert(at, output));
        all
    }
}

/// The outputs of one attachment's steps.
#[derive(Debug, Clone, Copy)]
pub struct Brought<'o> {
    all: &'o Outputs,
    attachment: u16,
}

impl<'o> Brought<'o> {
    /// Returns the output of the step at that position, if the step has finished.
    pub fn step(self, position: usize) -> Option<&'o Output> {
        self.all.get(&StepRef(self.attachment, u16::try_from(position).ok()?))
    }

    /// Returns the outputs in the order of the steps.
    pub fn iter(self) -> impl Iterator<Item = &'o Output> {
        let (first, attachment) = (StepRef(self.attachment, 0), self.attachment);
        let first = self.all.position(first).unwrap_or_else(|first| first);
        let own = self.all.0.iter().skip(first).take_while(move |(at, _)| at.0 == attachment);
        own.map(|(_, output)| read(output))
    }

    /// Returns the representor of the claimed VF, if its card is in switchdev mode.
    pub fn representor(self) -> Option<&'o Representor> {
        self.iter().find_map(|output| match output {
            Output::Claimed(claim) => claim.representor.as_ref(),
            _ => None,
        })
    }

    /// Position of the attachment in its plan.
    pub fn attachment(self) -> u16 {
        self.attachment
    }

    /// The outputs of all attachments: a step of one attachment may depend on another.
    pub fn all(self) -> &'o Outputs {
        self.all
    }
}

/// The output of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "output", rename_all = "kebab-case")]
pub enum Output {
    /// No output that later steps need.
    Nothing,
    /// A bridge.
    Bridge(Bridge),
    /// The device that has a VLAN's gateway addresses.
    Gateway(Interface),
    /// A link into the pod.
    Link {
        /// The node's end, if there is one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        host: Option<Interface>,
        /// The pod's end.
        pod: Interface,
        /// The parent, if other pods' links share it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        parent: Option<Parent>,
    },
    /// A device that was claimed.
    Claimed(Box<Claim>),
    /// Findings about an interface that other plugins created.
    Device {
        /// Where programs see the interface's traffic.
        vantage: HookKind,
        /// The node's end, if there is one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        host: Option<Interface>,
        /// The interface, if there is one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pod: Option<Interface>,
        /// The addresses that the kernel shows on the interface, if no plugin's result attributes addresses to it. An
        /// agent that does not know this field checks no source addresses there, like all earlier agents.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        addresses: Vec<IpNet>,
    },
    /// How the node reaches an interface that other plugins created.
    Reach {
        /// Name of the device through which the node reaches the interface.
        device: String,
    },
    /// The forwarded traffic that the node accepts.
    Admitted(Admitted),
    /// The pod's loopback, with the addresses it has.
    Loopback {
        /// Usually 127.0.0.1/8 and ::1/128.
        addresses: Vec<IpNet>,
    },
    /// Leased addresses.
    Lease {
        /// In the order of the pools.
        addresses: Vec<LeasedAddress>,
        /// Name servers to hand to the runtime.
        #[serde(default)]
        dns: cni::Dns,
        /// Routes of the lease.
        #[serde(default)]
        routes: Vec<cni::Route>,
        /// The server that leased the address, of `dhcp`; a server that renews the lease later is not stored here. An
        /// agent that does not know this field does not need it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        server: Option<Ipv4Addr>,
    },
    /// The pod's default routes as the kernel shows them after they were moved.
    DefaultRoutes {
        /// By family, then by metric.
        routes: Vec<spec::Route>,
        /// The routes that stayed on the cluster's interface.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        kept: Option<Kept>,
    },
    /// The interfaces that needed source-based rules.
    SourceRouting {
        /// In the order of the attachments.
        interfaces: Vec<SourceRouting>,
    },
    /// The routing tables of the interface's addresses, chosen and not yet used.
    SourceTables(spec::SourceTables),
    /// The VRF that the interface is to be a port of, chosen and not yet joined.
    Vrf(spec::VrfPort),
    /// The link and routes between the node and the pod, chosen and not yet created.
    HostAccess(HostAccess),
    /// Properties of the interface before they were changed.
    Properties {
        /// The former properties.
        before: spec::Properties,
    },
    /// Device information.
    DeviceInfo {
        /// In the specified form, including unknown keys.
        info: Value,
    },
    /// The result of a plugin, in the version in which it was printed.
    Delegate {
        /// The result object.
        result: Printed,
    },
}

/// How the node reaches a pod on a parent, and the pod the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostAccess {
    /// Name of the node's own link on the parent.
    pub device: String,
    /// The pod's addresses, each with the node's address from which it is reached.
    pub reached: Vec<Reached>,
}

/// An address of a pod, and one of its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reached {
    /// The pod's.
    pub pod: IpAddr,
    /// The node's.
    pub node: IpAddr,
}

/// The result that a plugin printed: serialised unchanged, parsed once.
#[derive(Debug, Default)]
pub struct Printed {
    raw: Value,
    /// Boxed, because most outputs are of other kinds and an enum takes as much memory as its largest variant.
    read: OnceLock<Box<Result<CniResult, CniError>>>,
}

impl Printed {
    /// A result that has been parsed already.
    pub fn new(raw: Value, read: CniResult) -> Self {
        Self { raw, read: OnceLock::from(Box::new(Ok(read))) }
    }

    /// The JSON as printed.
    pub fn raw(&self) -> &Value {
        &self.raw
    }

    /// Returns the parsed result. `version` is that of its attachment's configuration, always the same.
    ///
    /// # Errors
    /// The text is not a valid result of that version.
    pub fn read(&self, version: Version) -> Result<&CniResult, CniError> {
        let read = self.read.get_or_init(|| Box::new(CniResult::parse(&self.raw, version)));
        (**read).as_ref().map_err(Clone::clone)
    }
}

impl From<Value> for Printed {
    fn from(raw: Value) -> Self {
        Self { raw, read: OnceLock::new() }
    }
}

/// Clones drop the parsed form: they are kept as long as the attachment and rarely read.
impl Clone for Printed {
    fn clone(&self) -> Self {
        self.raw.clone().into()
    }
}

impl PartialEq for Printed {
    fn eq(&self, other: &Self) -> bool {
        self.raw == other.raw
    }
}

impl Serialize for Printed {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.raw.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Printed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Value::deserialize(deserializer).map(Self::from)
    }
}

/// An interface that a step made or found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// Name in its namespace.
    pub name: String,
    /// Index in its namespace; 0, which no link has, if unknown.
    pub index: u32,
    /// Ethernet address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// MTU in bytes.
    pub mtu: u32,
}

/// A device of the node that is the parent of links in pods.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parent {
    /// The device.
    pub device: Interface,
    /// Cookie of the pod's namespace (`SO_NETNS_COOKIE`), by which programs on the parent recognise traffic of the
    /// pod's sockets. 0 if the kernel has no cookies.
    pub netns_cookie: u64,
    /// The devices beneath on which the pod's frames leave with a VLAN tag, as far as the parent or the link is a
    /// VLAN.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub trunks: Vec<Trunk>,
}

/// A device on which the frames of a VLAN leave tagged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trunk {
    /// Index of the device on the node.
    pub device: u32,
    /// The VLAN.
    pub vlan: u16,
}

/// The bridge of an attachment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bridge {
    /// The interface itself.
    #[serde(flatten)]
    pub link: Interface,
    /// Whether the step created the bridge: then it is deleted if the ADD fails.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub made: bool,
    /// Whether the bridge existed and an earlier ADD had created it, whose pod may end first.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ours: bool,
}

/// The routes that stayed on the cluster's interface when the pod's default routes moved to another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// Routes of the main table to the cluster's ranges.
    pub routes: Vec<spec::Route>,
    /// The source-based routing that keeps packets from the interface's own addresses on it.
    pub answers: SourceRouting,
}

/// Source-based routing of one interface: packets from its addresses leave through it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceRouting {
    /// Name in the pod.
    pub ifname: String,
    /// Index in the pod.
    pub index: u32,
    /// The routing table for traffic from these addresses.
    pub table: u32,
    /// Addresses of the interface.
    pub sources: Vec<IpAddr>,
    /// The routes in the table, in the order of installation.
    pub routes: Vec<spec::Route>,
}
