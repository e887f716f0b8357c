//! The inverse of each step. Pure.
//!
//! Every inverse succeeds if nothing is left to undo, so it may run for a step that may not have begun.

use std::net::IpAddr;
use std::path::Path;

use super::{AttachmentPlan, Plan, Sandbox};
use crate::ipam::{self, Owner};
use crate::spec::{self, Properties, VrfPort};
use crate::step::{Claim, Delegate, HostAccess, Output, Outputs, Role, SourceRouting, Step, StepRef};

/// The action that undoes a step.
#[derive(Debug, Clone, PartialEq)]
pub enum Inverse<'a> {
    /// Deletes the link in the pod and its other end on the node.
    DeleteLink {
        /// Name in the pod.
        pod_name: &'a str,
        /// Name of the node's end, if there is one.
        host_name: Option<&'a str>,
        /// The kernel's name for the kind of link.
        kind: &'a str,
        /// Index in the pod of the created link, if known.
        made: Option<u32>,
    },
    /// Gives a device back to the node.
    ReturnDevice {
        /// The device.
        device: &'a spec::Device,
        /// The device's former state; `None`: the device was not claimed yet and is unchanged, or its state is not
        /// recorded.
        claim: Option<Box<Claim>>,
    },
    /// Releases the owner's addresses.
    Release {
        /// The configuration that they were leased with.
        config: &'a ipam::Config,
        /// The owner.
        owner: Owner,
    },
    /// Calls the plugin's DEL. The DEL of an IPAM plugin releases the owner's addresses.
    Delegate(&'a Delegate),
    /// Restores the former properties of the interface.
    GiveBack {
        /// Its name.
        ifname: &'a str,
        /// The former properties.
        before: Properties,
    },
    /// Removes the pod's rules that route packets from these addresses by these tables.
    ForgetTables(Vec<(IpAddr, u32)>),
    /// Removes the interface from its VRF, and the VRF once it has no ports; `None`: nothing was chosen yet.
    LeaveVrf {
        /// Name of the interface.
        ifname: &'a str,
        /// The VRF.
        port: Option<VrfPort>,
        /// Whether the interface is a link that netattach created: it is deleted first, so that it is in no other
        /// table meanwhile.
        after_link: bool,
    },
    /// Removes the link and routes from the node to the pod on its parent; `None`: nothing was chosen yet, or it is not
    /// recorded.
    ForgetHostAccess(Option<HostAccess>),
    /// Removes the attachment from libcni's cache.
    Forget,
    /// Removes the file.
    RemoveFile(&'a Path),
    /// Removes the pod's rules for interfaces that are gone.
    ForgetSources {
        /// The interfaces that have rules; `None`: not recorded.
        interfaces: Option<Vec<SourceRouting>>,
    },
    /// Removes the node's address translation for the attachment.
    Untranslate,
    /// Removes what makes the node accept forwarded traffic of the attachment.
    Dismiss,
    /// Removes the restriction of the attachment's Ethernet source address.
    UnrestrictSender,
    /// Removes the attachment from the dataplane.
    Unprotect {
        /// Its number in the dataplane's maps.
        id: u32,
    },
}

/// When an inverse runs relative to those of other steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// First, while the interfaces exist: other plugins that create or change them, and leases that are released
    /// through an interface.
    Plugins,
    /// All links together: each would otherwise cost a grace period of its own.
    Links,
    /// Devices that pods held, which may have carried links.
    Devices,
    /// After the links that used them are gone; but routes and rules for an address that is freed while the interface
    /// exists, by another plugin or by giving a lease back to its server, are removed before (`attach::undo`).
    Holdings,
    /// Last: programs that look for leftovers in the cache find them until everything else is gone.
    Cache,
}

impl Inverse<'_> {
    /// Returns the stage in which the inverse runs.
    pub fn stage(&self) -> Stage {
        match self {
            Self::GiveBack { .. }
            | Self::LeaveVrf { after_link: false, .. }
            | Self::Delegate(Delegate { role: Role::Plugin, .. }) => Stage::Plugins,
            // These addresses are released through the interface.
            Self::Release { config, .. } if config.asks_the_network() => Stage::Plugins,
            Self::Delegate(delegate) if delegate.asks_the_network() => Stage::Plugins,
            Self::DeleteLink { .. } => Stage::Links,
            Self::ReturnDevice { .. } => Stage::Devices,
            Self::Release { .. }
            | Self::Delegate(_)
            | Self::RemoveFile(_)
            | Self::ForgetSources { .. }
            | Self::ForgetTables(_)
            | Self::LeaveVrf { after_link: true, .. }
            | Self::ForgetHostAccess(_)
            | Self::Untranslate
            | Self::Dismiss
            | Self::UnrestrictSender
            | Self::Unprotect { .. } => Stage::Holdings,
            Self::Forget => Stage::Cache,
        }
    }

    /// Whether the inverse frees addresses and does nothing else. A plugin that creates interfaces may free addresses
    /// among other things.
    pub fn frees_addresses(&self) -> bool {
        matches!(self, Self::Release { .. } | Self::Delegate(Delegate { role: Role::Ipam, .. }))
    }

    /// Whether the inverse must run after `other`, of the same attachment. While the node still routes, translates,
    /// admits or checks packets by an address, no other pod may get that address: traffic for the former pod would
    /// reach the new one, and a repeated DEL would remove the new pod's rules.
    pub fn needs(&self, other: &Self) -> bool {
        let goes_by_addresses = matches!(
            other,
            Self::ForgetHostAccess(_) | Self::Untranslate | Self::Dismiss | Self::Unprotect { .. }
        );
        self.frees_addresses() && goes_by_addresses
    }
}

/// Returns the inverse of a step; `None` for a step whose effect is shared with others or disappears with the link.
/// `output` is the step's output; `None`: the step has not finished, or its output is unknown.
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
    let owner = || Owner { container_id: sandbox.container_id.clone(), ifname: attachment.ifname.clone() };
    Some(match step {
        Step::CreateLink(link) => Inverse::DeleteLink {
            pod_name: link.pod_name(),
            host_name: link.node_end(),
            kind: link.shown_kind(),
            made,
        },
        Step::ClaimDevice(device) => {
            let claim = match output {
                Some(Output::Claimed(claim)) => Some(claim.clone()),
                _ => None,
            };
            Inverse::ReturnDevice { device, claim }
        }
        Step::Lease(config) if config.is_kept() => Inverse::Release { config, owner: owner() },
        Step::Translate(_) => Inverse::Untranslate,
        Step::Admit(_) => Inverse::Dismiss,
        Step::RestrictSender => Inverse::UnrestrictSender,
        Step::Delegate(delegate) => Inverse::Delegate(delegate),
        Step::Remember(_) => Inverse::Forget,
        Step::Protect(protect) => Inverse::Unprotect { id: protect.id },
        Step::RouteBySource | Step::MoveDefaultRoutes { keep: Some(_), .. } => {
            let interfaces = match output {
                Some(Output::SourceRouting { interfaces }) => Some(interfaces.clone()),
                Some(Output::DefaultRoutes { kept, .. }) => {
                    Some(kept.iter().map(|it| it.answers.clone()).collect())
                }
                _ => None,
            };
            Inverse::ForgetSources { interfaces }
        }
        Step::NoteProperties(_) => {
            // Without an output, the properties were not stored yet, and nothing has changed.
            let before = match output {
                Some(Output::Properties { before }) => before.clone(),
                _ => Properties::default(),
            };
            Inverse::GiveBack { ifname: &attachment.ifname, before }
        }
        Step::ChooseTables(_) => match output {
            Some(Output::SourceTables(chosen)) => Inverse::ForgetTables(chosen.rules()),
            // Nothing was chosen, so there are no rules.
            _ => Inverse::ForgetTables(Vec::new()),
        },
        Step::ChooseVrf(_) => {
            let port = match output {
                Some(Output::Vrf(chosen)) => Some(chosen.clone()),
                _ => None,
            };
            let after_link = attachment.link().is_some();
            Inverse::LeaveVrf { ifname: &attachment.ifname, port, after_link }
        }
        Step::ChooseHostAccess => match output {
            Some(Output::HostAccess(chosen)) => Inverse::ForgetHostAccess(Some(chosen.clone())),
            _ => Inverse::ForgetHostAccess(None),
        },
        Step::PrepareDeviceInfo(files) => Inverse::RemoveFile(&files.attachment),
        // A device is given back as a whole, by its claim.
        Step::SetDevice(_) | Step::MoveDevice => return None,
        // An interface that an earlier plugin in the list created is removed by that plugin. Loopback belongs to the
        // namespace, a bridge and forwarding to the node; addresses and routes disappear with their link.
        Step::TakeMade(_)
        | Step::RaiseLoopback
        | Step::EnsureBridge(_)
        | Step::Lease(_)
        | Step::EnsureForwarding
        | Step::Gateway { .. }
        | Step::RouteToPod
        | Step::ProtectAddresses
        | Step::GiveHostAccess
        | Step::Configure(_)
        | Step::Tune(_)
        | Step::UseTables(_)
        | Step::JoinVrf(_)
        | Step::ReadDeviceInfo(_)
        | Step::FindReach
        | Step::FindDevice
        | Step::MoveDefaultRoutes { keep: None, .. } => return None,
    })
}

/// Returns a plan without the steps that call other plugins, and the outputs of the other steps: everything of a
/// sandbox that can be undone when the configurations of these plugins are lost.
pub fn without_plugins(plan: &Plan, outputs: &Outputs) -> (Plan, Outputs) {
    // Attachments keep their positions; steps move up.
    let moved = |at: StepRef| {
        let attachment = plan.attachments.get(usize::from(at.0));
        let steps = attachment.map(|it| it.steps.as_slice()).unwrap_or_default();
        let before = steps.iter().take(usize::from(at.1)).filter(|step| calls_none(step)).count();
        // At most the original position, which has 16 bits.
        StepRef(at.0, before as u16)
    };
    let own = plan.steps().filter(|(_, _, step)| calls_none(step));
    let of_own = own.filter_map(|(at, _, _)| Some((moved(at), outputs.get(&at)?.clone()))).collect();
    let mut rest = plan.clone();
    for attachment in &mut rest.attachments {
        attachment.steps.retain(calls_none);
        attachment.yields_to = attachment.yields_to.map(moved);
    }
    (rest, of_own)
}

/// Whether a step calls no other plugin.
fn calls_none(step: &Step) -> bool {
    !matches!(step, Step::Delegate(_))
}

/// Returns the IPAM plugin that a plugin calls, so that it can be called directly: with the plugin's own
/// configuration, as the specification's section on delegated plugins requires.
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
    use crate::plan::fixtures;

    #[test]
    fn a_link_goes_before_its_vrf_and_another_plugins_interface_leaves_it_before() {
        let asked = spec::Vrf { name: "blue".into(), table: None };
        let dummy = spec::Dummy { pod_name: "net1".into(), mtu: None, mac: None, group: 1 };
        let delegate =
            Delegate { plugin: "other".into(), config: serde_json::Map::new(), role: Role::Plugin };
        let made = Step::CreateLink(spec::Link::Dummy(dummy));
        let stage = |first: Step| {
            let attachment = fixtures::attachment("other", vec![first, Step::ChooseVrf(asked.clone())]);
            let sandbox = fixtures::sandbox("c1");
            let undone = inverse(&sandbox, &attachment, &attachment.steps[1], None).unwrap();
            assert!(matches!(undone, Inverse::LeaveVrf { .. }), "{undone:?}");
            undone.stage()
        };
        assert_eq!([made, Step::Delegate(delegate)].map(stage), [Stage::Holdings, Stage::Plugins]);
    }

    #[test]
    fn without_other_plugins_each_step_keeps_what_it_has_come_to() {
        let delegate =
            |role| Step::Delegate(Delegate { plugin: "other".into(), config: serde_json::Map::new(), role });
        let routes = Step::MoveDefaultRoutes { gateways: Vec::new(), keep: None };
        let first = vec![Step::EnsureForwarding, delegate(Role::Ipam), Step::RouteToPod];
        let mut attachments =
            [first, vec![delegate(Role::Plugin)], vec![delegate(Role::Plugin), routes.clone()]]
                .map(|steps| fixtures::attachment("any", steps));
        attachments[0].yields_to = Some(StepRef(2, 1));
        let plan = Plan { sandbox: fixtures::sandbox("a"), attachments: attachments.into(), dynamic: None };
        let kept = Output::SourceRouting { interfaces: Vec::new() };
        let outputs = [
            (StepRef(0, 0), Output::Nothing),
            (StepRef(0, 1), kept.clone()),
            (StepRef(0, 2), kept.clone()),
            (StepRef(2, 1), Output::Nothing),
        ];
        let (rest, of_rest) = without_plugins(&plan, &outputs.into_iter().collect());
        let steps: Vec<&[Step]> = rest.attachments.iter().map(|it| it.steps.as_slice()).collect();
        assert_eq!(steps, [&[Step::EnsureForwarding, Step::RouteToPod][..], &[], &[routes]]);
        assert_eq!(rest.attachments[0].yields_to, Some(StepRef(2, 0)));
        let expected =
            [(StepRef(0, 0), Output::Nothing), (StepRef(0, 1), kept), (StepRef(2, 0), Output::Nothing)];
        assert_eq!(of_rest, expected.into_iter().collect());
    }

    #[test]
    fn addresses_of_another_plugin_go_after_their_link_unless_the_interface_asks_for_them() {
        let stage = |(plugin, role): (&str, Role)| {
            let delegate = Delegate { plugin: plugin.to_owned(), config: serde_json::Map::new(), role };
            let attachment = fixtures::attachment("macvlan", vec![Step::Delegate(delegate)]);
            let sandbox = fixtures::sandbox("c1");
            inverse(&sandbox, &attachment, &attachment.steps[0], None).unwrap().stage()
        };
        let plugins = [("other", Role::Ipam), ("dhcp", Role::Ipam), ("other", Role::Plugin)];
        assert_eq!(plugins.map(stage), [Stage::Holdings, Stage::Plugins, Stage::Plugins]);
    }

    #[test]
    fn an_address_is_free_only_once_nothing_on_the_node_goes_by_it() {
        let range =
            json!({"subnet": "10.1.0.0/24", "start": "10.1.0.1", "end": "10.1.0.254", "gateway": "10.1.0.1"});
        let lease = json!({"step": "lease", "network": "net", "data_dir": "/run/leases", "sets": [[range]],
            "exclude": [], "requested": [], "routes": [], "resolv_conf": null});
        let ipam = Delegate { plugin: "other".into(), config: serde_json::Map::new(), role: Role::Ipam };
        let steps = vec![serde_json::from_value(lease).unwrap(), Step::Delegate(ipam)];
        let (sandbox, attachment) = (fixtures::sandbox("c1"), fixtures::attachment("bridge", steps));
        let inverses =
            attachment.steps.iter().map(|step| inverse(&sandbox, &attachment, step, None).unwrap());
        let freeing: Vec<Inverse<'_>> = inverses.collect();
        let going_by_it = [
            Inverse::ForgetHostAccess(None),
            Inverse::Untranslate,
            Inverse::Dismiss,
            Inverse::Unprotect { id: 3 },
        ];
        let others = [Inverse::UnrestrictSender, Inverse::RemoveFile(Path::new("/x")), Inverse::Forget];
        for it in &freeing {
            assert!(going_by_it.iter().all(|other| it.needs(other)), "{it:?}");
            assert!(!others.iter().chain(&freeing).any(|other| it.needs(other)), "{it:?}");
        }
        for it in going_by_it.iter().chain(&others) {
            assert!(!going_by_it.iter().chain(&freeing).any(|other| it.needs(other)), "{it:?}");
        }
    }

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
