//! Where programs see the traffic of an interface, and when they run.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::spec;

/// Where programs see the traffic of an interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HookKind {
    /// On the node's end of the link.
    Node,
    /// On the parent of the macvlan.
    Parent,
    /// On the interface itself, in the pod.
    Pod,
    /// Nowhere.
    Nowhere(NotObservable),
}

impl HookKind {
    /// Returns where programs see the traffic of a link that netattach created.
    pub fn of_link(link: &spec::Link) -> Self {
        match link {
            spec::Link::Veth(_) | spec::Link::Netkit(_) => Self::Node,
            spec::Link::Macvlan(macvlan) if macvlan.in_pod => Self::Pod,
            spec::Link::Macvlan(_) => Self::Parent,
            spec::Link::Ipvlan(_) | spec::Link::Vlan(_) | spec::Link::Dummy(_) | spec::Link::Tap(_) => {
                Self::Pod
            }
        }
    }
}

impl HookKind {
    /// Returns where programs see the traffic of a device of the node in a pod: a process that drives the device
    /// itself, and RDMA, bypass the kernel, but not the switch of a card in switchdev mode.
    pub fn of_device(device: &spec::Device) -> Self {
        if device.switchdev {
            return Self::Node;
        }
        match (&device.userspace, &device.rdma) {
            (Some(driver), _) => Self::Nowhere(NotObservable::Userspace(driver.clone())),
            (None, Some(rdma)) => Self::Nowhere(NotObservable::Rdma(rdma.clone())),
            (None, None) => Self::Pod,
        }
    }
}

/// Why no program sees the traffic of an interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NotObservable {
    /// netattach does not enforce policies on interfaces of this kind: loopback, macvlan in mode passthru, ipvlan in
    /// mode l3s.
    NotJudged,
    /// The network's definition or the agent's settings exclude it.
    LeftAlone,
    /// The pod has no interface of that name.
    NoInterface,
    /// Its frames are not Ethernet frames.
    NotEthernet,
    /// The pod drives the device itself; the value is the type from the device information.
    Userspace(String),
    /// The interface also has this RDMA device, so part of the traffic bypasses the kernel.
    Rdma(String),
}

/// Annotation of a NetworkAttachmentDefinition: [`EnforceWhen`] of its attachments that other plugins create;
/// overrides the agent's setting.
pub const ENFORCE_ANNOTATION: &str = "netattach.dev/enforce";

/// When the programs of an attachment run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EnforceWhen {
    /// From the first policy that selects the attachment until the attachment ends.
    #[default]
    Selected,
    /// From the start of the attachment.
    Always,
    /// Never.
    Never,
}

impl EnforceWhen {
    /// Parses the word.
    pub fn named(word: &str) -> Option<Self> {
        let words = [("selected", Self::Selected), ("always", Self::Always), ("never", Self::Never)];
        words.into_iter().find(|(name, _)| *name == word).map(|(_, when)| when)
    }

    /// The default for records without this field: those of interfaces that netattach created.
    pub(super) const fn always() -> Self {
        Self::Always
    }
}

impl fmt::Display for NotObservable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotJudged => f.write_str("interfaces of this kind are not judged"),
            Self::LeftAlone => {
                f.write_str("enforce is never, by the network's definition or the agent's settings")
            }
            Self::NoInterface => f.write_str("the pod has no interface of that name"),
            Self::NotEthernet => f.write_str("the interface is no Ethernet device"),
            Self::Userspace(kind) => write!(f, "the pod drives the device ({kind}) itself, past the kernel"),
            Self::Rdma(device) => write!(f, "the RDMA device {device} carries traffic past the kernel"),
        }
    }
}
