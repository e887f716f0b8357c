//! What CHECK should find in the kernel for an attachment. Pure.

use std::collections::BTreeMap;

use ipnet::IpNet;

use super::{AttachmentPlan, Interface, Output, Step, StepRef, addressing, result};
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
                let addressing = addressing::pod_side(configure, &leased.addresses, &leased.routes);
                expected.addresses = addressing.addresses;
                expected.routes = addressing.routes;
            }
            Step::Delegate(_) | Step::EnsureForwarding | Step::RouteToPod => {}
        }
    }
    if let Some(pod) = &mut expected.pod {
        let listed =
            last.interfaces.iter().find(|listed| listed.sandbox.is_some() && listed.name == pod.name);
        pod.mac = listed.and_then(|listed| listed.mac.as_deref()?.parse().ok()).or(pod.mac);
    }
    Ok(expected)
}
