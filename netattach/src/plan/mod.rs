//! A request and the facts about the node become ordered steps with inverses. Pure.
//!
//! Everything that can be decided before the first effect is decided here. What cannot be known yet, such as
//! the address that a lease will bring, is named by the step that will know it: the executor keeps each step's
//! [`Output`], and [`result`] and [`addressing`] compute from those.
//!
//! | module | what it decides |
//! |---|---|
//! | [`resolve`], `attachment` | from a pod's networks to a plan; from one network's configuration to steps |
//! | `device`, [`ethertypes`], [`pools`], [`hook_kind`] | which device; which ethertypes pass; which pool; where programs see the frames |
//! | [`addressing`], [`routing`] | what stands on both ends of a link; which attachment has the default routes |
//! | [`result`], [`result_cache`] | the CNI result; what libcni's cache is told |
//! | [`compare`], [`check`] | whether an ADD is repeated; what CHECK should find |
//! | [`undo`], [`gc`] | the inverse of each step; what GC has to look at |

use crate::step::{EnforceWhen, HookKind, MadeBy, NotObservable, Protect, Stage, Step, StepRef};
pub mod addressing;
mod attachment;
pub mod check;
pub mod compare;
mod device;
pub mod ethertypes;
pub mod gc;
pub mod hook_kind;
pub mod pools;
pub mod resolve;
pub mod result;
pub mod result_cache;
pub mod routing;
pub mod undo;

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::cni::Version;
use crate::netns::NetnsId;
use crate::npwg::NetworkName;
use crate::objects::ObjectName;
use crate::spec;
pub use device::pci_address;
pub use result_cache::CachedResults;

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

/// The pod of a sandbox, as the runtime names it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PodRef {
    /// Namespace and name.
    #[serde(flatten)]
    pub name: ObjectName,
    /// UID, when the runtime gave it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
}

impl fmt::Display for PodRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.name.fmt(f)
    }
}

/// One attachment: a network, an interface name, and what it takes.
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

impl Plan {
    /// All steps in the order in which they are carried out: attachment by attachment, then what concerns the pod as a
    /// whole.
    pub fn steps(&self) -> impl DoubleEndedIterator<Item = (StepRef, &AttachmentPlan, &Step)> {
        let stage = |stage| self.in_order().filter(move |(_, _, step)| step.stage() == stage);
        Stage::ALL.into_iter().flat_map(stage)
    }

    /// The same for those who only ask about attachments, and keep it as long as they exist: without configurations and routes,
    /// which may be large. Whoever carries it out or takes it back has it from the journal.
    pub fn outline(&self) -> Self {
        let outline = |attachment: &AttachmentPlan| AttachmentPlan {
            network: attachment.network.clone(),
            config_name: attachment.config_name.clone(),
            ifname: attachment.ifname.clone(),
            kind: attachment.kind.clone(),
            steps: attachment.steps.iter().map(Step::outline).collect(),
            warnings: attachment.warnings.clone(),
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
                // A plan never has 65,536 of either: selections and plugin lists are bounded when they are read.
                .map(move |(s, step)| (StepRef(a as u16, s as u16), attachment, step))
        })
    }
}

impl AttachmentPlan {
    /// Where programs see what the interface sends and receives, as far as that follows from the plan; `None`: that is
    /// found out once the interface is there.
    pub fn vantage(&self) -> Option<HookKind> {
        match (self.protect(), self.made_by()) {
            (None, _) => Some(HookKind::Nowhere(NotObservable::NotJudged)),
            (Some(Protect { when: EnforceWhen::Never, .. }), _) => {
                Some(HookKind::Nowhere(NotObservable::LeftAlone))
            }
            (Some(_), MadeBy::Link(link)) => Some(HookKind::of_link(link)),
            (Some(_), MadeBy::Kernel) => Some(HookKind::Nowhere(NotObservable::NotJudged)),
            (Some(_), MadeBy::Plugin) => None,
        }
    }

    /// What brings the interface. An attachment whose plan has no step for that has nothing of netattach's own.
    pub fn made_by(&self) -> MadeBy<'_> {
        self.steps.iter().find_map(Step::makes_interface).unwrap_or(MadeBy::Plugin)
    }

    /// The link that netattach makes for it.
    pub fn link(&self) -> Option<&spec::Link> {
        self.made_by().link()
    }

    /// Whether the step at that position brings the interface.
    pub fn is_made_at(&self, position: usize) -> bool {
        self.steps.iter().position(|step| step.makes_interface().is_some()) == Some(position)
    }

    /// What the dataplane has to know, if it judges the attachment.
    pub fn protect(&self) -> Option<&Protect> {
        self.steps.iter().find_map(|step| match step {
            Step::Protect(protect) => Some(protect),
            _ => None,
        })
    }

    /// Number in the dataplane's maps, if it is there.
    pub fn number(&self) -> Option<u32> {
        self.protect().map(|protect| protect.id)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    /// The plans of records that earlier versions wrote.
    const RECORDS: [&str; 4] = [
        include_str!("../journal/fixtures/version-1-own-plugins.jsonl"),
        include_str!("../journal/fixtures/version-1-other-plugins.jsonl"),
        include_str!("../journal/fixtures/version-2-own-plugins.jsonl"),
        include_str!("../journal/fixtures/version-2-other-plugins.jsonl"),
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
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn an_unknown_step_is_refused_by_its_name() {
        let error = serde_json::from_str::<Step>(r#"{"step": "claim-device"}"#).unwrap_err().to_string();
        assert!(error.starts_with("unknown variant `claim-device`"), "{error}");
        let error = serde_json::from_str::<Step>(r#"{"step": "create-veth"}"#).unwrap_err().to_string();
        assert_eq!(error, "missing field `host_name`");
    }
}
