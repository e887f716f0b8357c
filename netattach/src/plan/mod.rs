//! Turns a request and the facts about the node into ordered steps with inverses. Pure.
//!
//! Everything that can be decided before the first effect is decided here. A value that is not known yet, such as the
//! address of a future lease, is referred to by the step that will produce it: the executor keeps each step's
//! [`Output`](crate::step::Output), and [`result`] and [`addressing`] compute from the outputs.
//!
//! | module | what it decides |
//! |---|---|
//! | [`resolve`], `attachment` | the plan for a pod's networks; the steps for one network's configuration |
//! | `device`, [`ethertypes`], [`pools`], [`hook_kind`] | which device; which ethertypes pass; which pool; where programs see the frames |
//! | [`author`] | which addresses the network's author has configured, and which the pod has chosen |
//! | [`addressing`], [`routing`] | addresses and routes of both ends of a link; which attachment has the default routes |
//! | [`by_source`], [`vrf`] | the routing tables of an interface's addresses, for `sbr`; the table of a VRF, for `vrf` |
//! | [`pod_sources`] | which exceptions from the source check a pod may request |
//! | `chained` | chained plugins that are properties of an interface that netattach creates |
//! | `made_before` | the default network if an earlier plugin in the list has created it |
//! | `judged_first` | whether programs are attached before the address is leased |
//! | [`cluster_routes`] | which routes stay on the cluster's interface when the default routes move |
//! | [`result`], `told`, [`result_cache`] | the CNI result; what each step contributes to it; the entry in libcni's cache |
//! | [`host_access`] | how the node reaches a pod on a parent |
//! | [`phases`] | which steps of several attachments are carried out together |
//! | [`compare`], [`check`] | whether an ADD is repeated; the state that CHECK expects |
//! | [`undo`], [`gc`] | the inverse of each step; the places that GC cleans up |

use crate::step::{EnforceWhen, HookKind, MadeBy, NotObservable, Protect, Stage, Step, StepRef};
pub mod addressing;
mod attachment;
pub mod author;
pub mod by_source;
mod chained;
pub mod check;
pub mod cluster_routes;
pub mod compare;
mod device;
pub mod ethertypes;
#[cfg(test)]
pub(crate) mod fixtures;
pub mod gc;
pub mod hook_kind;
pub mod host_access;
mod judged_first;
mod made_before;
pub mod phases;
pub mod pod_sources;
pub mod pools;
pub mod resolve;
pub mod result;
pub mod result_cache;
pub mod routing;
mod told;
pub mod undo;
pub mod vrf;

use std::borrow::Cow;
use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::cni::{CniArgs, Version};
use crate::netns::NetnsId;
use crate::npwg::NetworkName;
use crate::npwg::status::Device;
use crate::objects::{ObjectName, Pod};
use crate::spec;
pub use device::pci_address;
pub use result_cache::CachedResults;

/// All steps of one ADD for one sandbox. Written to the journal before the first step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The sandbox that is attached.
    pub sandbox: Sandbox,
    /// In the order in which they are attached.
    pub attachments: Vec<AttachmentPlan>,
    /// Set in the plan of an attachment that was added to a live sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dynamic: Option<Dynamic>,
}

/// An attachment that was added to a live sandbox on request. It has a record of its own, under its own interface
/// name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dynamic {
    /// Interface name in the key of the sandbox that this attachment belongs to: that sandbox's DEL also removes this
    /// attachment.
    pub sandbox: String,
    /// The requester.
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
    /// Identity of that namespace.
    pub netns_id: NetnsId,
    /// `CNI_ARGS`, as given.
    pub cni_args: String,
    /// `CNI_PATH`, as given.
    pub cni_path: Vec<PathBuf>,
    /// `name` of the runtime's configuration. GC only considers sandboxes of the configuration that it is called
    /// with. Empty in records written before this field existed: no GC considers those.
    #[serde(default)]
    pub config_name: String,
    /// The pod, if the runtime named it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodRef>,
}

impl Sandbox {
    /// Returns the group of the links that this record's plan creates: the same for the same container and interface,
    /// different for another record of the same container, never 0 (the default group).
    pub fn link_group(&self) -> u32 {
        link_group(&self.container_id, &self.ifname)
    }

    /// Returns the runtime's `CNI_ARGS` for an attachment: arguments other than the pod's name apply only to the
    /// default network (NPWG 7.5).
    pub fn args_of(&self, attachment: &AttachmentPlan) -> Cow<'_, str> {
        match attachment.default {
            true => Cow::Borrowed(&self.cni_args),
            false => Cow::Owned(CniArgs::from(self.cni_args.clone()).of_pod().into()),
        }
    }
}

/// See [`Sandbox::link_group`].
pub fn link_group(container_id: &str, ifname: &str) -> u32 {
    let digest = Sha256::new().chain_update(container_id).chain_update([0]).chain_update(ifname).finalize();
    let number = digest.iter().take(4).fold(0, |number, byte| number << 8 | u32::from(*byte));
    number | spec::OWN_GROUPS
}

/// The pod of a sandbox, as the runtime names it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PodRef {
    /// Namespace and name.
    #[serde(flatten)]
    pub name: ObjectName,
    /// UID, if the runtime gave it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
}

impl PodRef {
    /// Whether the source's object can be this pod: if one of the two has no UID, the name decides.
    pub fn is(&self, object: &Pod) -> bool {
        self.name == object.name && self.uid.as_deref().is_none_or(|uid| object.has_uid(uid))
    }

    /// Whether a runtime can mean the same pod by both.
    pub fn may_be(&self, other: &Self) -> bool {
        let has_other_uid = matches!((&self.uid, &other.uid), (Some(own), Some(other)) if own != other);
        self.name == other.name && !has_other_uid
    }
}

impl fmt::Display for PodRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.name.fmt(f)
    }
}

/// One attachment: a network, an interface name, and its steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AttachmentPlan {
    /// Its network.
    pub network: NetworkName,
    /// `name` of the network's configuration, which keys leases and caches.
    pub config_name: String,
    /// Whether this is the cluster-wide default network.
    pub default: bool,
    /// Name of the interface in the pod.
    pub ifname: String,
    /// Version of the network's configuration, which is also used to call delegates.
    pub version: Version,
    /// Kind of the attachment, for display: `bridge`, `macvlan`, or the type of the external plugin.
    pub kind: String,
    /// `disableCheck` of the network's configuration: CHECK skips the attachment.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub disable_check: bool,
    /// `disableGC` of the network's configuration: GC calls none of its plugins.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub disable_gc: bool,
    /// In order of execution.
    pub steps: Vec<Step>,
    /// The step, usually of another attachment, that moves the pod's default routes. The default routes of this
    /// attachment yield to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub yields_to: Option<StepRef>,
    /// Warnings for the pod's author; they prevented nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// The device that the kubelet allocated for this attachment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<Device>,
}

impl Plan {
    /// Whether the sandbox was attached by another plugin, whose attachments are in no plan.
    pub fn is_taken_over(&self) -> bool {
        self.attachments.is_empty() && self.dynamic.is_none()
    }

    /// All steps in the order of execution: attachment by attachment, then those that concern the pod as a whole.
    pub fn steps(&self) -> impl DoubleEndedIterator<Item = (StepRef, &AttachmentPlan, &Step)> {
        let stage = |stage| self.in_order().filter(move |(_, _, step)| step.stage() == stage);
        Stage::ALL.into_iter().flat_map(stage)
    }

    /// Returns a copy without configurations and routes, which may be large: for callers that keep the plan as long
    /// as the attachments exist and only query it. Executing or undoing uses the complete plan from the journal.
    pub fn outline(&self) -> Self {
        let outline = |attachment: &AttachmentPlan| AttachmentPlan {
            network: attachment.network.clone(),
            config_name: attachment.config_name.clone(),
            ifname: attachment.ifname.clone(),
            kind: attachment.kind.clone(),
            steps: attachment.steps.iter().map(Step::outline).collect(),
            warnings: attachment.warnings.clone(),
            device: attachment.device.clone(),
            ..*attachment
        };
        Self {
            sandbox: self.sandbox.clone(),
            attachments: self.attachments.iter().map(outline).collect(),
            dynamic: self.dynamic.clone(),
        }
    }

    fn in_order(&self) -> impl DoubleEndedIterator<Item = (StepRef, &AttachmentPlan, &Step)> {
        self.attachments.iter().enumerate().flat_map(|(a, attachment)| {
            attachment
                .steps
                .iter()
                .enumerate()
                // A plan never has 65,536 attachments or steps: selections and plugin lists are bounded when they
                // are read.
                .map(move |(s, step)| (StepRef(a as u16, s as u16), attachment, step))
        })
    }
}

impl AttachmentPlan {
    /// Returns where programs see the interface's traffic, if the plan determines that; `None`: it is determined once
    /// the interface exists.
    pub fn vantage(&self) -> Option<HookKind> {
        match (self.protect(), self.made_by()) {
            (None, _) => Some(HookKind::Nowhere(NotObservable::NotJudged)),
            (Some(Protect { when: EnforceWhen::Never, .. }), _) => {
                Some(HookKind::Nowhere(NotObservable::LeftAlone))
            }
            (Some(_), MadeBy::Link(link)) => Some(HookKind::of_link(link)),
            (Some(_), MadeBy::Device(device)) => Some(HookKind::of_device(device)),
            (Some(_), MadeBy::Kernel) => Some(HookKind::Nowhere(NotObservable::NotJudged)),
            (Some(_), MadeBy::Plugin) => None,
        }
    }

    /// Returns how the interface is created. An attachment without such a step has an interface that another plugin
    /// created.
    pub fn made_by(&self) -> MadeBy<'_> {
        self.steps.iter().find_map(Step::makes_interface).unwrap_or(MadeBy::Plugin)
    }

    /// Returns the link that netattach creates for the attachment.
    pub fn link(&self) -> Option<&spec::Link> {
        self.made_by().link()
    }

    /// Whether the step at that position creates the interface.
    pub fn is_made_at(&self, position: usize) -> bool {
        self.steps.iter().position(|step| step.makes_interface().is_some()) == Some(position)
    }

    /// Returns the dataplane's settings, if the dataplane enforces policies on the attachment.
    pub fn protect(&self) -> Option<&Protect> {
        self.steps.iter().find_map(|step| match step {
            Step::Protect(protect) => Some(protect),
            _ => None,
        })
    }

    /// Returns the number in the dataplane's maps, if the attachment has one.
    pub fn number(&self) -> Option<u32> {
        self.protect().map(|protect| protect.id)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    /// The plans of records that earlier versions wrote.
    const RECORDS: [&str; 5] = [
        include_str!("../journal/fixtures/version-1-own-plugins.jsonl"),
        include_str!("../journal/fixtures/version-1-other-plugins.jsonl"),
        include_str!("../journal/fixtures/version-2-own-plugins.jsonl"),
        include_str!("../journal/fixtures/version-2-other-plugins.jsonl"),
        include_str!("../journal/fixtures/version-3-own-plugins.jsonl"),
    ];

    fn plans() -> impl Iterator<Item = Value> {
        RECORDS.into_iter().map(|record| {
            let lines = record.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
            let mut planned = lines.filter_map(|line| {
                let line = line.get(1).cloned().unwrap_or(line);
                line.get("planned")?.get("plan").cloned()
            });
            planned.next().unwrap()
        })
    }

    #[test]
    fn plans_are_written_as_they_have_been_written_since_the_first_version() {
        for written in plans() {
            let plan: Plan = serde_json::from_value(written.clone()).unwrap();
            assert_eq!(serde_json::to_value(&plan).unwrap(), written);
        }
    }

    #[test]
    fn what_makes_the_interface_follows_from_the_step_that_does() {
        let mut found = Vec::new();
        for written in plans().skip(2) {
            let plan: Plan = serde_json::from_value(written).unwrap();
            found.extend(plan.attachments.iter().map(|attachment| {
                let made = match attachment.made_by() {
                    MadeBy::Link(link) => link.to_string(),
                    MadeBy::Device(device) => device.to_string(),
                    MadeBy::Kernel => "kernel".to_owned(),
                    MadeBy::Plugin => "plugin".to_owned(),
                };
                (attachment.network.to_string(), made, attachment.vantage())
            }));
        }
        let row = |network: &str, made: &str, vantage| (network.to_owned(), made.to_owned(), vantage);
        let expected = [
            row("kube-system/default", "veth na23821816dea4a to eth0", Some(HookKind::Node)),
            row("shop/storage", "veth na962405c9c53b4 to net1", Some(HookKind::Node)),
            row("shop/lan", "macvlan net2 on wire0", Some(HookKind::Parent)),
            row("kube-system/default", "veth na23821816dea4a to eth0", Some(HookKind::Node)),
            row("shop/odd", "plugin", None),
            row("kube-system/default", "veth na23821816dea4a to eth0", Some(HookKind::Node)),
            row("shop/fixed", "ipvlan net1 on wire0", Some(HookKind::Pod)),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn an_unknown_step_is_refused_by_its_name() {
        let error = serde_json::from_str::<Step>(r#"{"step": "claim-vf"}"#).unwrap_err().to_string();
        assert!(error.starts_with("unknown variant `claim-vf`"), "{error}");
        let error = serde_json::from_str::<Step>(r#"{"step": "create-veth"}"#).unwrap_err().to_string();
        assert_eq!(error, "missing field `host_name`");
    }
}
