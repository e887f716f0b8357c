//! What steps bring.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::ops::{Deref, DerefMut};
use std::sync::OnceLock;

use ipnet::IpNet;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use super::{HookKind, StepRef};
use crate::cni::{self, CniError, CniResult, Version};
use crate::ipam::LeasedAddress;
use crate::mac::Mac;
use crate::spec;

/// What the steps of a plan have put out.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Outputs(BTreeMap<StepRef, Output>);

impl Outputs {
    /// Those of the attachment at that position of the plan.
    pub fn of(&self, attachment: u16) -> Brought<'_> {
        Brought { all: self, attachment }
    }
}

impl Deref for Outputs {
    type Target = BTreeMap<StepRef, Output>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for Outputs {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

impl FromIterator<(StepRef, Output)> for Outputs {
    fn from_iter<T: IntoIterator<Item = (StepRef, Output)>>(outputs: T) -> Self {
        Self(outputs.into_iter().collect())
    }
}

/// What the steps of one attachment have put out.
#[derive(Debug, Clone, Copy)]
pub struct Brought<'o> {
    all: &'o Outputs,
    attachment: u16,
}

impl<'o> Brought<'o> {
    /// What the step at that position has put out, if it has ended.
    pub fn step(self, position: usize) -> Option<&'o Output> {
        self.all.get(&StepRef(self.attachment, u16::try_from(position).ok()?))
    }

    /// In the order of the steps.
    pub fn iter(self) -> impl Iterator<Item = &'o Output> {
        let own = StepRef(self.attachment, 0)..=StepRef(self.attachment, u16::MAX);
        self.all.range(own).map(|(_, output)| output)
    }

    /// Position of the attachment in its plan.
    pub fn attachment(self) -> u16 {
        self.attachment
    }

    /// Those of all attachments: a step of one may be about another.
    pub fn all(self) -> &'o Outputs {
        self.all
    }
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
        vantage: HookKind,
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
        interfaces: Vec<SourceRouting>,
    },
    /// Device information.
    DeviceInfo {
        /// Of the specified form, unknown keys included.
        info: Value,
    },
    /// What a plugin printed, in the version it was printed in.
    Delegate {
        /// The result object.
        result: Printed,
    },
}

/// The result that a plugin printed: written as it was printed, read once.
#[derive(Debug, Default)]
pub struct Printed {
    raw: Value,
    read: OnceLock<Result<CniResult, CniError>>,
}

impl Printed {
    /// One that has been read already.
    pub fn new(raw: Value, read: CniResult) -> Self {
        Self { raw, read: OnceLock::from(Ok(read)) }
    }

    /// As it was printed.
    pub fn raw(&self) -> &Value {
        &self.raw
    }

    /// The result. `version` is that of its attachment's configuration, always the same.
    ///
    /// # Errors
    /// It is no result of that version.
    pub fn read(&self, version: Version) -> Result<&CniResult, CniError> {
        self.read.get_or_init(|| CniResult::parse(&self.raw, version)).as_ref().map_err(Clone::clone)
    }
}

impl From<Value> for Printed {
    fn from(raw: Value) -> Self {
        Self { raw, read: OnceLock::new() }
    }
}

/// Without what was read: copies are kept as long as the attachment, and seldom asked.
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

/// How traffic from the addresses of one interface is kept to that interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceRouting {
    /// Name in the pod.
    pub ifname: String,
    /// Its index in the pod.
    pub index: u32,
    /// The routing table that is asked for traffic from these addresses.
    pub table: u32,
    /// Addresses of the interface.
    pub sources: Vec<IpAddr>,
    /// What is in the table, in the order of installation.
    pub routes: Vec<spec::Route>,
}
