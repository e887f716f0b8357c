//! What CHECK should find in the kernel for an attachment. Pure.

use std::collections::BTreeMap;

use ipnet::IpNet;

use super::{AttachmentPlan, Interface, Output, Sandbox, Step, StepRef, addressing, result};
use crate::cni::CniError;
use crate::ipam::host_local::Config;
use crate::link::spec::{MacvlanMode, Route};

/// The state of one attachment as its record has it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Expected {
    /// The interface in the pod.
    pub pod: Option<Interface>,
    /// The node's end.
    pub host: Option<Interface>,
    /// The bridge that the node's end is a port of.
    pub bridge: Option<String>,
    /// Mode of a macvlan.
    pub macvlan_mode: Option<MacvlanMode>,
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

/// What the finished steps of an attachment have left in place.
///
/// # Errors
/// A plugin's result cannot be read.
pub fn expected(
    _sandbox: &Sandbox,
    number: u16,
    attachment: &AttachmentPlan,
    outputs: &BTreeMap<StepRef, Output>,
) -> Result<Expected, CniError> {
    let mut expected = Expected::default();
    let leased = result::leased(number, attachment, outputs)?;
    for (index, step) in attachment.steps.iter().enumerate() {
        let Some(output) = outputs.get(&StepRef(number, index as u16)) else { break };
        if let Output::Link { host, pod } = output {
            expected.host.clone_from(host);
            expected.pod = Some(pod.clone());
        }
        match step {
            Step::CreateVeth(veth) => expected.bridge = veth.port.as_ref().map(|port| port.bridge.clone()),
            Step::CreateMacvlan(macvlan) => expected.macvlan_mode = Some(macvlan.mode),
            Step::RaiseLoopback => expected.loopback = true,
            Step::Lease(config) => expected.lease = Some(config.clone()),
            Step::Protect(protect) => expected.protected = Some(protect.id),
            Step::Configure(configure) => {
                let addressing = addressing::pod_side(configure, &leased.addresses, &leased.routes);
                expected.addresses = addressing.addresses;
                expected.routes = addressing.routes;
            }
            _ => {}
        }
    }
    Ok(expected)
}
