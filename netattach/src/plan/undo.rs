//! The inverse of each step. Pure.
//!
//! Every inverse succeeds when there is nothing left to undo, so it may run for a step that only may have begun.

use std::path::Path;

use super::{AttachmentPlan, Sandbox};
use crate::ipam::{self, Owner};
use crate::step::{Delegate, Output, Role, Step};

/// What takes a step back.
#[derive(Debug, Clone, PartialEq)]
pub enum Inverse<'a> {
    /// The link is gone from the pod, and its other end from the node.
    DeleteLink {
        /// Name in the pod.
        pod_name: &'a str,
        /// Name of the node's end, if it has one.
        host_name: Option<&'a str>,
        /// Index in the pod of the link that was made, where that is known.
        made: Option<u32>,
    },
    /// The owner's addresses are free.
    Release {
        /// What they were leased by.
        config: &'a ipam::Config,
        /// Whose.
        owner: Owner,
    },
    /// The plugin's DEL.
    Delegate(&'a Delegate),
    /// The attachment is not in libcni's cache.
    Forget,
    /// The file is gone.
    RemoveFile(&'a Path),
    /// The pod has no rules for interfaces that are gone.
    ForgetSources,
    /// The dataplane knows the attachment no more.
    Unprotect {
        /// Its number.
        id: u32,
    },
}

/// When an inverse is carried out, relative to those of other steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// First, while their interfaces exist.
    Plugins,
    /// All at once: each would cost a grace period of its own.
    Links,
    /// Once the links that carried it are gone.
    Holdings,
    /// Once nothing else is left: who looks there for what is left finds it until then.
    Cache,
}

impl Inverse<'_> {
    /// When it is carried out.
    pub fn stage(&self) -> Stage {
        match self {
            Self::Delegate(_) => Stage::Plugins,
            Self::DeleteLink { .. } => Stage::Links,
            Self::Release { .. } | Self::RemoveFile(_) | Self::ForgetSources | Self::Unprotect { .. } => {
                Stage::Holdings
            }
            Self::Forget => Stage::Cache,
        }
    }
}

/// The inverse of a step; `None` for a step whose effect is shared with others or goes with the link. `output` is what the step
/// put out; `None`: it has not ended, or not told.
pub fn inverse<'a>(
    sandbox: &Sandbox,
    attachment: &'a AttachmentPlan,
    step: &'a Step,
    output: Option<&Output>,
) -> Option<Inverse<'a>> {
    let made = match output {
        Some(Output::Link { pod, .. }) => Some(pod.index),
        _ => None,
    };
    Some(match step {
        Step::CreateLink(link) => {
            Inverse::DeleteLink { pod_name: link.pod_name(), host_name: link.node_end(), made }
        }
        Step::Lease(config) if config.is_kept() => Inverse::Release {
            config,
            owner: Owner { container_id: sandbox.container_id.clone(), ifname: attachment.ifname.clone() },
        },
        Step::Delegate(delegate) => Inverse::Delegate(delegate),
        Step::Remember(_) => Inverse::Forget,
        Step::Protect(protect) => Inverse::Unprotect { id: protect.id },
        Step::RouteBySource => Inverse::ForgetSources,
        Step::PrepareDeviceInfo(files) => Inverse::RemoveFile(&files.attachment),
        // Loopback belongs to the namespace, a bridge and forwarding to the node; addresses and routes go with
        // their link.
        Step::RaiseLoopback
        | Step::EnsureBridge(_)
        | Step::Lease(_)
        | Step::EnsureForwarding
        | Step::Gateway { .. }
        | Step::RouteToPod
        | Step::Configure(_)
        | Step::ReadDeviceInfo(_)
        | Step::FindDevice
        | Step::MoveDefaultRoutes { .. } => return None,
    })
}

/// The address management that a plugin calls itself, called in its place: with the plugin's own configuration, as the
/// specification's section on delegated plugins has it.
pub fn address_management(plugin: &Delegate) -> Option<Delegate> {
    let name = plugin.config.get("ipam")?.get("type")?.as_str().filter(|name| !name.is_empty())?;
    (plugin.role == Role::Plugin).then(|| Delegate {
        plugin: name.to_owned(),
        config: plugin.config.clone(),
        role: Role::Ipam,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_plugins_address_management_is_called_with_the_plugins_configuration() {
        let plugin = |role, config: &Value| Delegate {
            plugin: "sriov".into(),
            config: config.as_object().unwrap().clone(),
            role,
        };
        let config =
            json!({"type": "sriov", "name": "n", "ipam": {"type": "host-local", "subnet": "10.0.0.0/24"}});
        let ipam = address_management(&plugin(Role::Plugin, &config)).unwrap();
        assert_eq!(ipam, Delegate { plugin: "host-local".into(), ..plugin(Role::Ipam, &config) });
        for config in [json!({}), json!({"ipam": {}}), json!({"ipam": {"type": ""}}), json!({"ipam": "dhcp"})]
        {
            assert_eq!(address_management(&plugin(Role::Plugin, &config)), None, "{config}");
        }
        assert_eq!(address_management(&plugin(Role::Ipam, &config)), None);
    }
}
