//! The state that CHECK expects in the kernel for an attachment. Pure.

use ipnet::IpNet;

use super::{AttachmentPlan, addressing, hook_kind, result, routing};
use crate::cni::{CniError, CniResult};
use crate::ipam;
use crate::spec::{self, Route, SourceTables, Tune, VrfPort};
use crate::step::{Admitted, Brought, HookKind, HostAccess, Kept, MadeBy, SourceRouting};
use crate::step::{Interface, LeasedAddress, Output, Role, Step, Translate};

/// The state of one attachment, according to its record or to the result that was printed for it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Expected {
    /// The interface in the pod. An MTU of 0 means unknown.
    pub pod: Option<Interface>,
    /// Index of the parent on the node whose Ethernet address the interface may have instead, if the parent has got
    /// another one since the ADD.
    pub follows: Option<u32>,
    /// The link as requested; `None` if another plugin created it.
    pub link: Option<spec::Link>,
    /// The node's end.
    pub host: Option<Interface>,
    /// The bridge as requested.
    pub bridge: Option<spec::Bridge>,
    /// Gateway addresses that the bridge has.
    pub gateways: Vec<IpNet>,
    /// The device that has these addresses instead of the bridge.
    pub gateway_device: Option<String>,
    /// Addresses on the interface in the pod.
    pub addresses: Vec<IpNet>,
    /// Routes in the pod.
    pub routes: Vec<Route>,
    /// Addresses and routes of the node's end of a routed link.
    pub host_side: Option<spec::Addressing>,
    /// The link and routes from the node to the pod on its parent.
    pub host_access: Option<HostAccess>,
    /// The address translation of the node, and the addresses that it applies to.
    pub translation: Option<(Translate, Vec<LeasedAddress>)>,
    /// The forwarded traffic that the node accepts.
    pub admitted: Option<Admitted>,
    /// Whether the node's packet filter limits the interface to its own Ethernet address.
    pub restricted: bool,
    /// The configuration that the addresses were leased with.
    pub lease: Option<ipam::Config>,
    /// The pod's default routes that were moved, and the interface that has them after the move.
    pub default_routes: Option<(String, Vec<Route>)>,
    /// The routes that stayed on the cluster's interface then.
    pub kept: Option<Kept>,
    /// The interfaces of the pod that have source-based rules.
    pub sources: Vec<SourceRouting>,
    /// The routing tables of the interface's own addresses, if a chained plugin requested them.
    pub by_source: Option<SourceTables>,
    /// The VRF that the interface is a port of.
    pub vrf: Option<VrfPort>,
    /// Settings and properties of the interface.
    pub tune: Option<Tune>,
    /// The device that the pod holds, and the settings that its physical function makes.
    pub device: Option<(spec::Device, spec::VfSettings)>,
    /// Whether loopback is up.
    pub loopback: bool,
    /// Whether the interface in the pod was left down.
    pub down: bool,
    /// Whether programs on the interface in the pod enforce policies on its traffic.
    pub judged_in_pod: bool,
}

/// Returns the state that the finished steps of an attachment have left. `last` is the attachment's final result:
/// plugins that ran after the interface was created may have changed its Ethernet address and its MTU, and report
/// that there. If another plugin created the interface, the result describes it and its addresses, provided that it
/// names `netns`.
///
/// # Errors
/// A plugin's result cannot be read.
pub fn expected(
    attachment: &AttachmentPlan,
    outputs: Brought<'_>,
    last: &CniResult,
    netns: &str,
) -> Result<Expected, CniError> {
    let mut expected = left_by_steps(attachment, outputs)?;
    if let Some(pod) = expected.pod.take() {
        let tuned = expected.tune.as_ref().and_then(|tune| tune.properties.mtu);
        expected.pod = Some(as_reported(pod, attachment, tuned, last));
    } else if matches!(attachment.made_by(), MadeBy::Device(device) if device.userspace.is_some()) {
        // A process of the pod drives the device: there is no interface, although the result has one for the
        // addresses.
    } else if !expected.loopback
        && let Some((pod, addresses)) = of_another_plugin(attachment, outputs, last, netns)?
    {
        expected.pod = Some(pod);
        expected.addresses = addresses;
    }
    Ok(expected)
}

/// Returns the state that the finished steps have left, derived from the plan and their outputs.
fn left_by_steps(attachment: &AttachmentPlan, outputs: Brought<'_>) -> Result<Expected, CniError> {
    let judged_in_pod = hook_kind::of(attachment, outputs) == HookKind::Pod;
    let follows = result::ends(outputs).and_then(|ends| result::parent_followed(attachment, &ends));
    let mut expected = Expected { judged_in_pod, follows, ..Expected::default() };
    let leased = result::leased(attachment, outputs)?;
    for (index, step) in attachment.steps.iter().enumerate() {
        let Some(output) = outputs.step(index) else { break };
        if let Output::Link { host, pod, .. } = output {
            expected.host = host.clone().or(expected.host);
            expected.pod = Some(pod.clone());
        }
        expected.add(step, output, (attachment, outputs), &leased.addresses)?;
    }
    Ok(expected)
}

impl Expected {
    /// Adds the state that a step has left, derived from the step and its output. `leased`: the attachment's
    /// addresses.
    fn add(
        &mut self,
        step: &Step,
        output: &Output,
        (attachment, outputs): (&AttachmentPlan, Brought<'_>),
        leased: &[LeasedAddress],
    ) -> Result<(), CniError> {
        match step {
            Step::EnsureBridge(bridge) => self.bridge = Some(bridge.clone()),
            Step::CreateLink(link) => self.link = Some(link.clone()),
            Step::ClaimDevice(device) => {
                self.device = Some((device.clone(), spec::VfSettings::default()));
                self.host = outputs.representor().map(|it| it.device.clone());
            }
            Step::SetDevice(set) => {
                if let Some((_, settings)) = &mut self.device {
                    settings.clone_from(&set.function);
                    settings.mac = set.mac;
                }
            }
            Step::RaiseLoopback => self.loopback = true,
            Step::Lease(config) => self.lease = Some(config.clone()),
            Step::Gateway { bridge, vlan, .. } => {
                self.gateways = addressing::gateways(leased);
                self.gateway_device = vlan.map(|vlan| spec::vlan_device(bridge, vlan));
            }
            Step::Configure(configure) => {
                self.down = configure.down;
                let addressing = routing::settled(attachment, outputs, configure)?;
                self.addresses = addressing.addresses;
                self.routes = addressing.routes;
            }
            Step::RouteToPod => {
                self.host_side = Some(addressing::host_side(routing::style(attachment), leased))
            }
            Step::Translate(translate) => {
                self.translation = Some((result::translation(translate, outputs), leased.to_vec()));
            }
            Step::RestrictSender => self.restricted = true,
            Step::Tune(tune) => self.tune = Some(self.tune.take().unwrap_or_default().then(tune)),
            Step::MoveDefaultRoutes { .. } => self.add_moved_routes(attachment, outputs),
            Step::Admit(_)
            | Step::ChooseHostAccess
            | Step::ChooseTables(_)
            | Step::ChooseVrf(_)
            | Step::RouteBySource => self.add_chosen(step, output),
            Step::Delegate(_)
            | Step::TakeMade(_)
            | Step::MoveDevice
            | Step::EnsureForwarding
            | Step::FindReach
            | Step::FindDevice
            | Step::Protect(_)
            | Step::ProtectAddresses
            | Step::GiveHostAccess
            | Step::Remember(_)
            | Step::PrepareDeviceInfo(_)
            | Step::ReadDeviceInfo(_) => {}
            Step::NoteProperties(_) | Step::UseTables(_) | Step::JoinVrf(_) => {}
        }
        Ok(())
    }

    /// Adds what a step chose when it was carried out, which only its output contains.
    fn add_chosen(&mut self, step: &Step, output: &Output) {
        match (step, output) {
            (Step::Admit(_), Output::Admitted(admitted)) => self.admitted = Some(admitted.clone()),
            (Step::ChooseHostAccess, Output::HostAccess(chosen)) => self.host_access = Some(chosen.clone()),
            (Step::ChooseTables(_), Output::SourceTables(chosen)) => self.by_source = Some(chosen.clone()),
            (Step::ChooseVrf(_), Output::Vrf(chosen)) => self.vrf = Some(chosen.clone()),
            (Step::RouteBySource, Output::SourceRouting { interfaces }) => {
                self.sources.extend(interfaces.iter().cloned());
            }
            _ => {}
        }
    }

    /// Adds the default routes that have moved to the attachment, and the routes that stayed.
    fn add_moved_routes(&mut self, attachment: &AttachmentPlan, outputs: Brought<'_>) {
        let routes = routing::moved(attachment.yields_to, outputs.all()).to_vec();
        self.default_routes = Some((attachment.ifname.clone(), routes));
        self.kept = routing::kept(attachment.yields_to, outputs.all()).cloned();
        self.sources.extend(self.kept.iter().map(|kept| kept.answers.clone()));
    }
}

/// Returns the interface in the pod as changed by later plugins. `tuned`: the MTU set by netattach's own plugins.
fn as_reported(
    mut pod: Interface,
    attachment: &AttachmentPlan,
    tuned: Option<u32>,
    last: &CniResult,
) -> Interface {
    let listed = listed(last, &pod.name).map(|index| result::read_interface(&last.interfaces[index]));
    pod.mac = listed.as_ref().and_then(|listed| listed.mac).or(pod.mac);
    // A plugin may change the MTU and report a result in a version without that field, or pass on the MTU that it
    // received.
    let others =
        attachment.steps.iter().any(|step| matches!(step, Step::Delegate(it) if it.role == Role::Plugin));
    pod.mtu = match listed.map(|listed| listed.mtu).filter(|mtu| *mtu > 0) {
        Some(mtu) if others && mtu == pod.mtu => 0,
        Some(mtu) => mtu,
        None if others => 0,
        None => tuned.unwrap_or(pod.mtu),
    };
    pod
}

/// Returns the interface that another plugin created, and its addresses, if the result says that it is in the pod.
fn of_another_plugin(
    attachment: &AttachmentPlan,
    outputs: Brought<'_>,
    last: &CniResult,
    netns: &str,
) -> Result<Option<(Interface, Vec<IpNet>)>, CniError> {
    let in_pod = |index: &usize| last.interfaces[*index].sandbox.as_deref() == Some(netns);
    let Some(index) = listed(last, &attachment.ifname).filter(in_pod) else { return Ok(None) };
    let mut pod = result::read_interface(&last.interfaces[index]);
    if is_handed_on(attachment, outputs, &pod)? {
        pod.mtu = 0;
    }
    let its = last.ips.iter().filter(|ip| ip.interface == Some(index));
    Ok(Some((pod, its.map(|ip| ip.address).collect())))
}

/// Returns the index of the interface with this name in the result, among those in a pod.
fn listed(last: &CniResult, name: &str) -> Option<usize> {
    last.interfaces.iter().position(|listed| listed.sandbox.is_some() && listed.name == name)
}

/// Whether other plugins ran after the one that created an interface, and the interface still has the MTU that this
/// one reported: they may have changed the MTU and passed on the value that they received.
fn is_handed_on(
    attachment: &AttachmentPlan,
    outputs: Brought<'_>,
    last: &Interface,
) -> Result<bool, CniError> {
    let printed = |(index, step): (usize, &Step)| match (step, outputs.step(index)?) {
        (Step::Delegate(delegate), Output::Delegate { result }) if delegate.role == Role::Plugin => {
            Some(result)
        }
        (Step::TakeMade(_), Output::Delegate { result }) => Some(result),
        _ => None,
    };
    let mut printed = attachment.steps.iter().enumerate().filter_map(printed);
    let (Some(first), Some(_)) = (printed.next(), printed.next()) else { return Ok(false) };
    let first = first.read(attachment.version)?;
    let made = first.interfaces.iter().find(|one| one.sandbox.is_some() && one.name == last.name);
    Ok(made.and_then(|made| made.mtu) == Some(last.mtu))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni;
    use crate::spec::{Bridge, BridgePort, Link, Veth};
    use crate::step::Configure;
    use crate::step::{Outputs, StepRef};

    const POD: &str = "/run/netns/c1";

    fn made(name: &str, last: u8) -> Interface {
        Interface {
            name: name.into(),
            index: last.into(),
            mac: Some(crate::mac::Mac([2, 0, 0, 0, 0, last])),
            mtu: 1500,
        }
    }

    fn attachment() -> AttachmentPlan {
        let port = BridgePort { bridge: "br0".into(), hairpin: true, ..BridgePort::default() };
        AttachmentPlan {
            network: "net".into(),
            config_name: "net".into(),
            default: true,
            ifname: "eth0".into(),
            version: cni::Version::LATEST,
            kind: "bridge".into(),
            disable_check: false,
            disable_gc: false,
            steps: vec![
                Step::EnsureBridge(Bridge { name: "br0".into(), ..Bridge::default() }),
                Step::CreateLink(Link::Veth(Veth {
                    host_name: "na0".into(),
                    pod_name: "eth0".into(),
                    mtu: None,
                    mac: None,
                    group: 1,
                    port: Some(port),
                })),
                Step::Delegate(crate::step::Delegate {
                    plugin: "dhcp".into(),
                    config: serde_json::Map::new(),
                    role: crate::step::Role::Ipam,
                }),
                Step::Gateway { bridge: "br0".into(), force: false, beside: false, vlan: None },
                Step::Configure(Configure { default_route: true, ..Configure::default() }),
            ],
            yields_to: None,
            warnings: Vec::new(),
            device: None,
        }
    }

    fn outputs() -> Outputs {
        let lease = Output::Lease {
            addresses: vec![LeasedAddress { address: "10.1.0.2/24".parse().unwrap(), gateway: None }],
            dns: cni::Dns::default(),
            routes: vec![],
            server: None,
        };
        let all = [
            Output::Bridge(crate::step::Bridge { link: made("br0", 1), made: false, ours: false }),
            Output::Link { host: Some(made("na0", 2)), pod: made("eth0", 3), parent: None },
            lease,
            Output::Nothing,
            Output::Nothing,
        ];
        all.into_iter().enumerate().map(|(index, output)| (StepRef(0, index as u16), output)).collect()
    }

    #[test]
    fn everything_that_the_steps_left_is_expected() {
        let expected = expected(&attachment(), outputs().of(0), &CniResult::default(), POD).unwrap();
        let wanted = Expected {
            pod: Some(made("eth0", 3)),
            link: attachment().link().cloned(),
            host: Some(made("na0", 2)),
            bridge: Some(Bridge { name: "br0".into(), ..Bridge::default() }),
            gateways: vec!["10.1.0.1/24".parse().unwrap()],
            addresses: vec!["10.1.0.2/24".parse().unwrap()],
            routes: vec![Route::via("0.0.0.0/0".parse().unwrap(), "10.1.0.1".parse().unwrap())],
            ..Expected::default()
        };
        assert_eq!(expected, wanted);
    }

    fn listed(sandbox: &str, mtu: Option<u32>) -> CniResult {
        let interface = cni::Interface {
            name: "eth0".into(),
            mac: Some("02:00:00:00:00:99".into()),
            sandbox: Some(sandbox.into()),
            mtu,
            ..cni::Interface::default()
        };
        let ip = |interface, address: &str| cni::IpConfig {
            interface,
            address: address.parse().unwrap(),
            gateway: None,
        };
        let ips = vec![ip(Some(0), "192.0.2.9/24"), ip(None, "192.0.2.10/24")];
        CniResult { interfaces: vec![interface], ips, ..CniResult::default() }
    }

    #[test]
    fn the_expected_mtu_is_that_of_a_later_plugins_result_and_none_if_it_may_have_changed_unreported() {
        let mut chained = attachment();
        let tuning = |role| {
            Step::Delegate(crate::step::Delegate {
                plugin: "tuning".into(),
                config: serde_json::Map::new(),
                role,
            })
        };
        let mtu = |attachment: &AttachmentPlan, told| {
            expected(attachment, outputs().of(0), &listed(POD, told), POD).unwrap().pod.unwrap().mtu
        };
        assert_eq!((mtu(&chained, None), mtu(&chained, Some(1400))), (1500, 1400));
        chained.steps.push(tuning(Role::Plugin));
        assert_eq!((mtu(&chained, None), mtu(&chained, Some(1400))), (0, 1400));
        assert_eq!(mtu(&chained, Some(1500)), 0, "handed on");
    }

    #[test]
    fn what_each_of_two_plugins_has_tuned_is_expected() {
        let mut tuned = attachment();
        let of = |properties| Tune { properties, ..Tune::default() };
        let (long, small) = (
            of(spec::Properties { queue: Some(7), mtu: Some(1300), ..spec::Properties::default() }),
            of(spec::Properties { mtu: Some(1400), ..spec::Properties::default() }),
        );
        tuned.steps.extend([Step::Tune(long.clone()), Step::Tune(small.clone())]);
        let mut outputs = outputs();
        (5..7).for_each(|index| outputs.insert(StepRef(0, index), Output::Nothing));
        let expected = expected(&tuned, outputs.of(0), &CniResult::default(), POD).unwrap();
        assert_eq!((expected.tune, expected.pod.unwrap().mtu), (Some(long.then(&small)), 1400));
    }

    #[test]
    fn the_mtu_that_another_plugin_reports_is_expected_unless_one_behind_it_has_handed_it_on() {
        let mut foreign = attachment();
        let plugin = |plugin: &str| {
            Step::Delegate(crate::step::Delegate {
                plugin: plugin.into(),
                config: serde_json::Map::new(),
                role: Role::Plugin,
            })
        };
        let mtu = |attachment: &AttachmentPlan, told: [u32; 2]| {
            let printed = told.map(|mtu| {
                let result = listed(POD, Some(mtu)).to_value(attachment.version).unwrap().into();
                Output::Delegate { result }
            });
            let all = printed.into_iter().take(attachment.steps.len()).enumerate();
            let outputs: Outputs = all.map(|(index, output)| (StepRef(0, index as u16), output)).collect();
            let last = listed(POD, Some(told[attachment.steps.len() - 1]));
            expected(attachment, outputs.of(0), &last, POD).unwrap().pod.unwrap().mtu
        };
        foreign.steps = vec![plugin("makes-a-card")];
        assert_eq!(mtu(&foreign, [1500, 0]), 1500);
        foreign.steps.push(plugin("tuning"));
        assert_eq!((mtu(&foreign, [1500, 1500]), mtu(&foreign, [1500, 1400])), (0, 1400));
    }

    #[test]
    fn an_interface_of_another_plugin_is_expected_where_its_result_says_it_is() {
        let mut foreign = attachment();
        foreign.steps.clear();
        let there = expected(&foreign, Outputs::default().of(0), &listed(POD, Some(1400)), POD).unwrap();
        let pod = Interface { index: 0, mtu: 1400, ..made("eth0", 0x99) };
        let addresses = vec!["192.0.2.9/24".parse().unwrap()];
        assert_eq!(there, Expected { pod: Some(pod), addresses, ..Expected::default() });
        let elsewhere = expected(&foreign, Outputs::default().of(0), &listed("/run/netns/other", None), POD);
        assert_eq!(elsewhere.unwrap(), Expected::default());
    }

    #[test]
    fn what_is_judged_in_the_pod_is_expected_to_be_judged_there() {
        let is_judged = |vantage| {
            let protect =
                r#"{"step": "protect", "id": 3, "zone": 1, "check_mac": true, "check_addresses": true}"#;
            let steps = vec![serde_json::from_str(protect).unwrap()];
            let foreign = AttachmentPlan { steps, ..attachment() };
            let pod = Some(made("eth0", 3));
            let found = Output::Device { vantage, host: None, pod, addresses: Vec::new() };
            let outputs: Outputs = [(StepRef(0, 0), found)].into_iter().collect();
            expected(&foreign, outputs.of(0), &listed(POD, None), POD).unwrap().judged_in_pod
        };
        let nowhere = HookKind::Nowhere(crate::step::NotObservable::NotJudged);
        assert_eq!([HookKind::Pod, HookKind::Node, nowhere].map(is_judged), [true, false, false]);
    }

    #[test]
    fn an_ethernet_address_that_a_later_plugin_changed_is_expected() {
        let last = listed(POD, None);
        let pod = expected(&attachment(), outputs().of(0), &last, POD).unwrap().pod.unwrap();
        assert_eq!(pod.mac, "02:00:00:00:00:99".parse().ok());
    }

    #[test]
    fn steps_that_were_not_carried_out_leave_nothing() {
        let mut outputs = outputs();
        outputs.retain(|step, _| step.1 == 0);
        let expected = expected(&attachment(), outputs.of(0), &CniResult::default(), POD).unwrap();
        let bridge = Some(Bridge { name: "br0".into(), ..Bridge::default() });
        assert_eq!(expected, Expected { bridge, ..Expected::default() });
    }
}
