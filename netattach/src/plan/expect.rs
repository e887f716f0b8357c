//! What CHECK should find in the kernel for an attachment. Pure.

use std::collections::BTreeMap;

use ipnet::IpNet;

use super::routing::SourceRouting;
use super::{AttachmentPlan, Interface, Output, Step, StepRef, addressing, result, routing};
use crate::cni::{CniError, CniResult};
use crate::ipam::host_local::Config;
use crate::link::spec::{self, MacvlanMode, Route};

/// The state of one attachment as its record, or the result that was printed for it, has it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Expected {
    /// The interface in the pod.
    pub pod: Option<Interface>,
    /// What kind of link that is, in the kernel's words.
    pub kind: Option<&'static str>,
    /// The node's end.
    pub host: Option<Interface>,
    /// The bridge, as it was asked for.
    pub bridge: Option<spec::Bridge>,
    /// How the node's end is a port of it.
    pub port: Option<spec::BridgePort>,
    /// Gateway addresses that the bridge carries.
    pub gateways: Vec<IpNet>,
    /// Mode of a macvlan.
    pub macvlan_mode: Option<MacvlanMode>,
    /// Parent of a macvlan, where it was named.
    pub parent: Option<String>,
    /// Addresses on the interface in the pod.
    pub addresses: Vec<IpNet>,
    /// Routes in the pod.
    pub routes: Vec<Route>,
    /// The pool that the addresses are reserved in.
    pub lease: Option<Config>,
    /// The attachment's number in the dataplane.
    pub protected: Option<u32>,
    /// The pod's default routes that were moved, and the interface that they were moved to.
    pub default_routes: Option<(String, Vec<Route>)>,
    /// The interfaces of the pod that have rules by source.
    pub sources: Vec<SourceRouting>,
    /// Loopback is up.
    pub loopback: bool,
}

/// What the finished steps of an attachment have left in place. `last` is the attachment's final result: plugins
/// that came after the interface was made may have changed its Ethernet address, and say so there.
///
/// # Errors
/// A plugin's result cannot be read.
pub fn expected(
    number: u16,
    attachment: &AttachmentPlan,
    outputs: &BTreeMap<StepRef, Output>,
    last: &CniResult,
) -> Result<Expected, CniError> {
    let mut expected = Expected::default();
    let leased = result::leased(number, attachment, outputs)?;
    for (index, step) in attachment.steps.iter().enumerate() {
        // Step numbers fit: see `Plan::steps`.
        let Some(output) = outputs.get(&StepRef(number, index as u16)) else { break };
        if let Output::Link { host, pod } = output {
            expected.host.clone_from(host);
            expected.pod = Some(pod.clone());
        }
        match step {
            Step::EnsureBridge(bridge) => expected.bridge = Some(bridge.clone()),
            Step::CreateVeth(veth) => {
                expected.kind = Some("veth");
                expected.port.clone_from(&veth.port);
            }
            Step::CreateMacvlan(macvlan) => {
                expected.kind = Some("macvlan");
                expected.macvlan_mode = Some(macvlan.mode);
                expected.parent.clone_from(&macvlan.parent);
            }
            Step::RaiseLoopback => expected.loopback = true,
            Step::Lease(config) => expected.lease = Some(config.clone()),
            Step::Gateway { .. } => expected.gateways = addressing::gateways(&leased.addresses),
            Step::Protect(protect) => expected.protected = Some(protect.id),
            Step::Configure(configure) => {
                let addressing = routing::settled(number, attachment, outputs, configure)?;
                expected.addresses = addressing.addresses;
                expected.routes = addressing.routes;
            }
            Step::Delegate(_)
            | Step::EnsureForwarding
            | Step::RouteToPod
            | Step::Remember(_)
            | Step::PrepareDeviceInfo(_)
            | Step::ReadDeviceInfo(_) => {}
            Step::MoveDefaultRoutes { .. } => {
                let routes = routing::moved(attachment.yields_to, outputs).to_vec();
                expected.default_routes = Some((attachment.ifname.clone(), routes));
            }
            Step::RouteBySource => {
                if let Output::SourceRouting { interfaces } = output {
                    expected.sources.clone_from(interfaces);
                }
            }
        }
    }
    if let Some(pod) = &mut expected.pod {
        let listed =
            last.interfaces.iter().find(|listed| listed.sandbox.is_some() && listed.name == pod.name);
        pod.mac = listed.and_then(|listed| listed.mac.as_deref()?.parse().ok()).or(pod.mac);
    }
    Ok(expected)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni;
    use crate::link::spec::{Bridge, BridgePort, Veth};
    use crate::plan::{Configure, LeasedAddress, Style};

    fn made(name: &str, last: u8) -> Interface {
        Interface {
            name: name.into(),
            index: last.into(),
            mac: Some(crate::mac::Mac([2, 0, 0, 0, 0, last])),
            mtu: 1500,
        }
    }

    fn attachment() -> AttachmentPlan {
        let port = BridgePort { bridge: "br0".into(), hairpin: true };
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
                Step::EnsureBridge(Bridge { name: "br0".into(), mtu: None, promiscuous: false }),
                Step::CreateVeth(Veth {
                    host_name: "na0".into(),
                    pod_name: "eth0".into(),
                    mtu: None,
                    mac: None,
                    group: 1,
                    port: Some(port),
                }),
                Step::Delegate(crate::plan::Delegate {
                    plugin: "dhcp".into(),
                    config: serde_json::Map::new(),
                    role: crate::plan::Role::Ipam,
                }),
                Step::Gateway { bridge: "br0".into(), force: false },
                Step::Configure(Configure { style: Style::Subnet, default_route: true, dns: None }),
            ],
            yields_to: None,
            warnings: Vec::new(),
        }
    }

    fn outputs() -> BTreeMap<StepRef, Output> {
        let lease = Output::Lease {
            addresses: vec![LeasedAddress { address: "10.1.0.2/24".parse().unwrap(), gateway: None }],
            dns: cni::Dns::default(),
            routes: vec![],
        };
        let all = [
            Output::Bridge(made("br0", 1)),
            Output::Link { host: Some(made("na0", 2)), pod: made("eth0", 3) },
            lease,
            Output::Nothing,
            Output::Nothing,
        ];
        all.into_iter().enumerate().map(|(index, output)| (StepRef(0, index as u16), output)).collect()
    }

    #[test]
    fn everything_that_the_steps_left_is_expected() {
        let expected = expected(0, &attachment(), &outputs(), &CniResult::default()).unwrap();
        let wanted = Expected {
            pod: Some(made("eth0", 3)),
            kind: Some("veth"),
            host: Some(made("na0", 2)),
            bridge: Some(Bridge { name: "br0".into(), mtu: None, promiscuous: false }),
            port: Some(BridgePort { bridge: "br0".into(), hairpin: true }),
            gateways: vec!["10.1.0.1/24".parse().unwrap()],
            addresses: vec!["10.1.0.2/24".parse().unwrap()],
            routes: vec![Route::via("0.0.0.0/0".parse().unwrap(), "10.1.0.1".parse().unwrap())],
            ..Expected::default()
        };
        assert_eq!(expected, wanted);
    }

    #[test]
    fn an_ethernet_address_that_a_later_plugin_changed_is_expected() {
        let changed = cni::Interface {
            name: "eth0".into(),
            mac: Some("02:00:00:00:00:99".into()),
            sandbox: Some("/run/netns/c1".into()),
            ..cni::Interface::default()
        };
        let last = CniResult { interfaces: vec![changed], ..CniResult::default() };
        let pod = expected(0, &attachment(), &outputs(), &last).unwrap().pod.unwrap();
        assert_eq!(pod.mac, "02:00:00:00:00:99".parse().ok());
    }

    #[test]
    fn steps_that_were_not_carried_out_leave_nothing() {
        let mut outputs = outputs();
        outputs.retain(|step, _| step.1 == 0);
        let expected = expected(0, &attachment(), &outputs, &CniResult::default()).unwrap();
        let bridge = Some(Bridge { name: "br0".into(), mtu: None, promiscuous: false });
        assert_eq!(expected, Expected { bridge, ..Expected::default() });
    }
}
