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

/// The outputs of a plan's steps, in the order of the steps. Kept for as long as a sandbox is attached, so each takes what
/// it has, and most have nothing.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Outputs(Vec<(StepRef, Option<Box<Output>>)>);

/// The output that takes no memory.
static NOTHING: Output = Output::Nothing;

impl Outputs {
    /// The outputs of the attachment at that position of the plan.
    pub fn of(&self, attachment: u16) -> Brought<'_> {
        Brought { all: self, attachment }
    }

    /// The output of a step, if it has finished.
    pub fn get(&self, at: &StepRef) -> Option<&Output> {
        let position = self.position(*at).ok()?;
        self.0.get(position).map(|(_, output)| read(output))
    }

    /// Whether a step has finished.
    pub fn contains_key(&self, at: &StepRef) -> bool {
        self.position(*at).is_ok()
    }

    /// The output of a step that has finished, in the place of an earlier one.
    pub fn insert(&mut self, at: StepRef, output: Output) {
        let output = Some(output).filter(|output| *output != Output::Nothing).map(Box::new);
        match self.position(at) {
            Ok(position) => self.0[position].1 = output,
            Err(position) => self.0.insert(position, (at, output)),
        }
    }

    /// Forgets all but those.
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

    /// All of them.
    pub fn values(&self) -> impl Iterator<Item = &Output> {
        self.0.iter().map(|(_, output)| read(output))
    }

    /// All of them, with their steps.
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
    /// The output of the step at that position, if it has finished.
    pub fn step(self, position: usize) -> Option<&'o Output> {
        self.all.get(&StepRef(self.attachment, u16::try_from(position).ok()?))
    }

    /// In the order of the steps.
    pub fn iter(self) -> impl Iterator<Item = &'o Output> {
        let (first, attachment) = (StepRef(self.attachment, 0), self.attachment);
        let first = self.all.position(first).unwrap_or_else(|first| first);
        let own = self.all.0.iter().skip(first).take_while(move |(at, _)| at.0 == attachment);
        own.map(|(_, output)| read(output))
    }

    /// The node's end of the VF that was claimed, if its card is in mode switchdev.
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
    /// The device that has a VLAN's gateways.
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
    /// Findings about the interface that other plugins made.
    Device {
        /// Where programs see its traffic.
        vantage: HookKind,
        /// The node's end, if there is one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        host: Option<Interface>,
        /// The interface, if there is one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pod: Option<Interface>,
        /// The addresses that the kernel has on it, where no result attributes any to it. An agent that does not know the
        /// field checks no source there, as all did before.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        addresses: Vec<IpNet>,
    },
    /// How the node reaches the interface that other plugins made.
    Reach {
        /// Name of the device by which it does.
        device: String,
    },
    /// What the node lets pass.
    Admitted(Admitted),
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
        /// Routes of the lease.
        #[serde(default)]
        routes: Vec<cni::Route>,
        /// The server that has given it, of `dhcp`; one that extends it later is not noted here. An agent that does not know
        /// the field has no use for it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        server: Option<Ipv4Addr>,
    },
    /// The pod's default routes as the kernel shows them after they were moved.
    DefaultRoutes {
        /// By family, then by metric.
        routes: Vec<spec::Route>,
        /// What stayed on the cluster's interface.
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
    /// What leads from the node to the pod and back, chosen and not yet made.
    HostAccess(HostAccess),
    /// Properties of the interface before they were changed.
    Properties {
        /// Those that were.
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

/// What leads from the node to a pod on a parent, and back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostAccess {
    /// Name of the node's own link on the parent.
    pub device: String,
    /// The pod's addresses, each with the address of the node that it is reached from.
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
    /// Apart, as most outputs are of other kinds and take as much as the largest.
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

    /// The parsed result. `version` is that of its attachment's configuration, always the same.
    ///
    /// # Errors
    /// It is not a valid result of that version.
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
    /// In bytes.
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
    /// Where the pod's frames leave with a tag: the devices beneath, as far as the parent or the link is a VLAN.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub trunks: Vec<Trunk>,
}

/// A device on which the frames of a VLAN leave.
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
    /// The step created it: it is deleted if the ADD fails.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub made: bool,
    /// It was there, and an earlier ADD had made it, whose pod may end first.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ours: bool,
}

/// What stayed on the cluster's interface when the pod's default routes moved to another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// Routes of the main table to the cluster's ranges.
    pub routes: Vec<spec::Route>,
    /// Keeps what has the interface's own addresses on it.
    pub answers: SourceRouting,
}

/// Source-based routing of one interface: traffic from its addresses leaves through it.
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
