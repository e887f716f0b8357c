//! Converts step outputs to a CNI result, and back. Pure.

use std::net::Ipv4Addr;

use ipnet::IpNet;

use super::told::Told;
pub use super::told::tuned;
use super::{AttachmentPlan, Sandbox, routing};
use crate::cni::{self, CniArgs, CniError, CniResult, Value, Version};
use crate::ipam;
use crate::spec::Link;
use crate::step::{
    Bridge, Brought, Delegate, Interface, LeasedAddress, MadeBy, Output, Outputs, Parent, Protect, Role,
    Step, StepRef, Translate,
};

/// Returns the result of an attachment from the finished steps: the `prevResult` of the next plugin, and in the end
/// the result.
///
/// # Errors
/// A plugin's result cannot be read.
pub fn result(
    sandbox: &Sandbox,
    attachment: &AttachmentPlan,
    outputs: Brought<'_>,
) -> Result<CniResult, CniError> {
    let mut told = Told::nothing(sandbox, attachment);
    for (index, step) in attachment.steps.iter().enumerate() {
        let Some(output) = outputs.step(index) else { break };
        match step {
            Step::Delegate(delegate) => told.plugin(delegate.role, output)?,
            Step::TakeMade(_) => told.plugin(Role::Plugin, output)?,
            Step::EnsureBridge(_) => told.bridge(output),
            Step::CreateLink(_) | Step::MoveDevice => told.link(output),
            Step::ClaimDevice(device) => told.device(device, output),
            Step::SetDevice(set) => told.set(set),
            Step::RaiseLoopback => told.loopback(output),
            Step::Lease(_) => told.lease(output),
            Step::Gateway { .. } => told.gateway(output),
            Step::Configure(configure) => told.configure(configure, &leased(attachment, outputs)?.addresses),
            Step::Tune(tune) => told.tune(tune),
            Step::EnsureForwarding
            | Step::RouteToPod
            | Step::FindReach
            | Step::Translate(_)
            | Step::Admit(_)
            | Step::RestrictSender
            | Step::FindDevice
            | Step::Protect(_)
            | Step::ProtectAddresses
            | Step::ChooseHostAccess
            | Step::GiveHostAccess
            | Step::Remember(_)
            | Step::PrepareDeviceInfo(_)
            | Step::ReadDeviceInfo(_)
            | Step::NoteProperties(_)
            | Step::ChooseTables(_)
            | Step::UseTables(_)
            | Step::ChooseVrf(_)
            | Step::JoinVrf(_)
            // The routes that they moved are removed from the result below.
            | Step::MoveDefaultRoutes { .. }
            | Step::RouteBySource => {}
        }
    }
    let mut result = told.result;
    routing::settle_result(attachment, outputs, &mut result.routes);
    Ok(result)
}

/// Returns the result as [`as_reported`], in each of these versions.
///
/// # Errors
/// As there; or the result cannot be expressed in a version.
pub fn in_versions<const N: usize>(
    sandbox: &Sandbox,
    attachment: &AttachmentPlan,
    outputs: Brought<'_>,
    versions: [Version; N],
) -> Result<[Value; N], CniError> {
    let is_own = printed(attachment, outputs).is_none();
    let mut written = [const { Value::Null }; N];
    if is_own && attachment.version.has_whole_results() {
        // A result that was just made need not be parsed again.
        let result = result(sandbox, attachment, outputs)?;
        for (value, version) in written.iter_mut().zip(versions) {
            *value = result.to_value(version)?;
        }
    } else {
        let reported = as_reported(sandbox, attachment, outputs)?;
        for (value, version) in written.iter_mut().zip(versions) {
            *value = cni::result::in_version(&reported, version)?;
        }
    }
    Ok(written)
}

/// Returns the output of the last plugin, if there is one.
fn printed<'o>(attachment: &AttachmentPlan, outputs: Brought<'o>) -> Option<&'o Output> {
    attachment.steps.iter().enumerate().rev().find_map(|(index, step)| match step {
        Step::Delegate(delegate) if delegate.role == Role::Plugin => outputs.step(index),
        Step::TakeMade(_) => outputs.step(index),
        _ => None,
    })
}

/// Returns the result for plugins and the cache, in the version of the attachment's configuration: the output of the
/// last plugin, including keys that netattach does not know, or the combined outputs of netattach's own steps.
///
/// # Errors
/// A plugin's result cannot be read, or cannot be expressed in that version.
pub fn as_reported(
    sandbox: &Sandbox,
    attachment: &AttachmentPlan,
    outputs: Brought<'_>,
) -> Result<Value, CniError> {
    match printed(attachment, outputs) {
        Some(Output::Delegate { result: printed }) => {
            let mut printed = cni::result::in_version(printed.raw(), attachment.version)?;
            if !routing::moved(attachment.yields_to, outputs.all()).is_empty() {
                let settled = result(sandbox, attachment, outputs)?.to_value(attachment.version)?;
                replace_routes(&mut printed, &settled);
            }
            if attachment.steps.iter().any(|step| matches!(step, Step::Tune(_))) {
                let tuned = result(sandbox, attachment, outputs)?.to_value(attachment.version)?;
                if let (Some(printed), Some(interfaces)) = (printed.as_object_mut(), tuned.get("interfaces"))
                {
                    printed.insert("interfaces".to_owned(), interfaces.clone());
                }
            }
            Ok(printed)
        }
        _ => result(sandbox, attachment, outputs)?.to_value(attachment.version),
    }
}

/// Replaces the routes of one result by those of another. The two oldest versions store routes with the addresses.
fn replace_routes(result: &mut Value, settled: &Value) {
    let Some(result) = result.as_object_mut() else { return };
    for key in ["routes", "ip4", "ip6"] {
        match settled.get(key) {
            Some(value) => result.insert(key.to_owned(), value.clone()),
            None => result.remove(key),
        };
    }
}

/// Reconstructs step outputs from a result, the inverse of [`result`], for callers that kept no record and receive a
/// `prevResult`. Indices are unknown. A link that the result does not list has no output.
///
/// # Errors
/// The result cannot be expressed in the attachment's version.
pub fn from_prev_result(attachment: &AttachmentPlan, result: &CniResult) -> Result<Outputs, CniError> {
    // Loopback is always `lo`, regardless of the requested interface name.
    let name =
        if attachment.steps.contains(&Step::RaiseLoopback) { "lo" } else { attachment.ifname.as_str() };
    let pod =
        result.interfaces.iter().position(|interface| interface.sandbox.is_some() && interface.name == name);
    let bridge = attachment.steps.iter().find_map(|step| match step {
        Step::EnsureBridge(bridge) => Some(bridge.name.as_str()),
        _ => None,
    });
    let on_node = |is_bridge: bool| {
        let sought = |interface: &&cni::Interface| {
            interface.sandbox.is_none() && (Some(interface.name.as_str()) == bridge) == is_bridge
        };
        result.interfaces.iter().find(sought).map(read_interface)
    };
    let ips = result.ips.iter().filter(|ip| ip.interface.is_none() || ip.interface == pod);
    let mut outputs = Outputs::default();
    for (index, step) in attachment.steps.iter().enumerate() {
        let link = |host| {
            let pod = result.interfaces.get(pod?).map(read_interface)?;
            Some(Output::Link { host, pod, parent: None })
        };
        let output = match step {
            Step::EnsureBridge(_) => {
                on_node(true).map(|link| Output::Bridge(Bridge { link, made: false, ours: false }))
            }
            Step::CreateLink(made) => link(made.node_end().and_then(|_| on_node(false))),
            Step::RaiseLoopback => {
                Some(Output::Loopback { addresses: ips.clone().map(|ip| ip.address).collect() })
            }
            Step::MoveDevice => link(None),
            // A result does not contain the device's former state.
            Step::ClaimDevice(_) => None,
            Step::Lease(_) => Some(Output::Lease {
                addresses: ips
                    .clone()
                    .map(|ip| LeasedAddress { address: ip.address, gateway: ip.gateway })
                    .collect(),
                dns: result.dns.clone(),
                routes: result.routes.clone(),
                // A result does not contain the server.
                server: None,
            }),
            Step::Delegate(_) | Step::TakeMade(_) => {
                let brought = CniResult {
                    ips: ips.clone().cloned().collect(),
                    routes: result.routes.clone(),
                    ..CniResult::default()
                };
                Some(Output::Delegate { result: brought.to_value(attachment.version)?.into() })
            }
            Step::Gateway { .. }
            | Step::EnsureForwarding
            | Step::SetDevice(_)
            | Step::RouteToPod
            | Step::FindReach
            | Step::Translate(_)
            | Step::Admit(_)
            | Step::RestrictSender
            | Step::FindDevice
            | Step::Protect(_)
            | Step::ProtectAddresses
            | Step::ChooseHostAccess
            | Step::GiveHostAccess
            | Step::Configure(_)
            | Step::Remember(_)
            | Step::PrepareDeviceInfo(_)
            | Step::ReadDeviceInfo(_)
            | Step::NoteProperties(_)
            | Step::Tune(_)
            | Step::ChooseTables(_)
            | Step::UseTables(_)
            | Step::ChooseVrf(_)
            | Step::JoinVrf(_)
            | Step::MoveDefaultRoutes { .. }
            | Step::RouteBySource => Some(Output::Nothing),
        };
        // Step numbers fit: see `Plan::steps`.
        if let Some(output) = output {
            outputs.insert(StepRef(0, index as u16), output);
        }
    }
    Ok(outputs)
}

/// Returns an interface of a result, which has no index.
pub(super) fn read_interface(interface: &cni::Interface) -> Interface {
    Interface {
        name: interface.name.clone(),
        index: 0,
        mac: interface.mac.as_deref().and_then(|mac| mac.parse().ok()),
        mtu: interface.mtu.unwrap_or_default(),
    }
}

/// The link that an attachment's steps created or found.
#[derive(Debug, Clone, PartialEq)]
pub struct Ends {
    /// The node's end, if it has one.
    pub host: Option<Interface>,
    /// The pod's end.
    pub pod: Interface,
    /// The parent, if other pods' links share it.
    pub parent: Option<Parent>,
}

/// Returns the link that an attachment's steps created or found, if there is one.
pub fn ends(outputs: Brought<'_>) -> Option<Ends> {
    let representor = outputs.representor();
    let on_node = || representor.map(|it| it.device.clone());
    let made = outputs.iter().find_map(|output| match output {
        Output::Link { host, pod, parent } => {
            Some(Ends { host: host.clone().or_else(on_node), pod: pod.clone(), parent: parent.clone() })
        }
        Output::Device { host, pod: Some(pod), .. } => {
            Some(Ends { host: host.clone(), pod: pod.clone(), parent: None })
        }
        _ => None,
    });
    made.or_else(|| Some(Ends { host: on_node(), pod: representor?.driven.clone()?, parent: None }))
}

/// Returns the index of the parent whose Ethernet address an attachment's interface has, also after that has changed.
pub fn parent_followed(attachment: &AttachmentPlan, ends: &Ends) -> Option<u32> {
    let parent = ends.parent.as_ref().filter(|_| attachment.link().is_some_and(Link::follows_parent));
    parent.map(|parent| parent.device.index)
}

/// Returns the ends of the link that an attachment's steps created or found: the node's, if there is one, and the
/// pod's.
pub fn link(outputs: Brought<'_>) -> Option<(Option<Interface>, Interface)> {
    ends(outputs).map(|ends| (ends.host, ends.pod))
}

/// Returns the requested address translation, with the device that was found for it.
pub fn translation(translate: &Translate, outputs: Brought<'_>) -> Translate {
    let found = outputs.iter().find_map(|output| match output {
        Output::Reach { device } => Some(device.clone()),
        _ => None,
    });
    match found.filter(|_| translate.device.is_empty()) {
        Some(device) => Translate { device, ..translate.clone() },
        None => translate.clone(),
    }
}

/// Returns the leased addresses with their subnets as the network's author defines them, for rules that also affect
/// others: a pod that requests an address does not choose these subnets. A requested address outside of them gets a
/// host prefix if `alone`, otherwise the prefix length that the pod gives.
pub fn in_subnets_of_author(
    sandbox: &Sandbox,
    attachment: &AttachmentPlan,
    leased: &[LeasedAddress],
    alone: bool,
) -> Vec<LeasedAddress> {
    let args = CniArgs::parse(&sandbox.cni_args).ok();
    let of_plugin = |delegate: &Delegate, address: IpNet| {
        ipam::subnet_of_plugin(&delegate.plugin, &delegate.config, args.as_ref()?, address)
    };
    let named = |address: IpNet| {
        let by_step = |step: &Step| match step {
            Step::Lease(config) => Some(config.subnet_of(address)),
            Step::Delegate(delegate) if delegate.role == Role::Ipam => Some(of_plugin(delegate, address)),
            _ => None,
        };
        // The addresses of another plugin's interface are determined by that plugin.
        attachment.steps.iter().find_map(by_step).unwrap_or(Some(address))
    };
    let in_subnet = |leased: &LeasedAddress| {
        let otherwise = if alone { IpNet::from(leased.address.addr()) } else { leased.address };
        LeasedAddress { address: named(leased.address).unwrap_or(otherwise), gateway: leased.gateway }
    };
    leased.iter().map(in_subnet).collect()
}

/// The result of an attachment's IPAM.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Leased {
    /// The addresses.
    pub addresses: Vec<LeasedAddress>,
    /// Routes of the lease.
    pub routes: Vec<cni::Route>,
    /// The DHCP server that leased the addresses, if netattach leased them.
    pub server: Option<Ipv4Addr>,
}

/// Returns the addresses and routes of an attachment's lease, or of the IPAM plugin that was called instead.
///
/// # Errors
/// The plugin's result cannot be read.
pub fn leased(attachment: &AttachmentPlan, outputs: Brought<'_>) -> Result<Leased, CniError> {
    if attachment.made_by() == MadeBy::Plugin {
        return brought(attachment, outputs, |_| true);
    }
    for (index, step) in attachment.steps.iter().enumerate() {
        match (step, outputs.step(index)) {
            (_, Some(Output::Lease { addresses, routes, server, .. })) => {
                let (addresses, routes) = (addresses.clone(), routes.clone());
                return Ok(Leased { addresses, routes, server: *server });
            }
            (Step::Delegate(delegate), Some(Output::Delegate { result })) if delegate.role == Role::Ipam => {
                let printed = result.read(attachment.version)?;
                let addresses = printed
                    .ips
                    .iter()
                    .map(|ip| LeasedAddress { address: ip.address, gateway: ip.gateway })
                    .collect();
                return Ok(Leased { addresses, routes: printed.routes.clone(), server: None });
            }
            _ => {}
        }
    }
    Ok(Leased::default())
}

/// Returns the addresses from which the pod may send through an attachment's interface, and its routes: like
/// [`leased`], but for an interface that other plugins created, the addresses that the last result attributes to it
/// in the namespace with path `netns`, or to no interface. If there are none, those that the kernel had on it.
///
/// # Errors
/// The plugin's result cannot be read.
pub fn own(netns: &str, attachment: &AttachmentPlan, outputs: Brought<'_>) -> Result<Leased, CniError> {
    if attachment.made_by() != MadeBy::Plugin {
        return leased(attachment, outputs);
    }
    let told = brought(attachment, outputs, |sandbox| sandbox == netns)?;
    if !told.addresses.is_empty() {
        return Ok(told);
    }
    let found = outputs.iter().find_map(|output| match output {
        Output::Device { addresses, .. } => Some(addresses.as_slice()),
        _ => None,
    });
    let of_kernel = |address: &IpNet| LeasedAddress { address: *address, gateway: None };
    Ok(Leased { addresses: found.unwrap_or_default().iter().map(of_kernel).collect(), ..told })
}

/// Whether the permitted source addresses of an interface are unknown: another plugin created the interface without
/// addresses, and its network names none. The pod itself may add an address, for example by DHCP.
pub fn is_unaddressed(protect: &Protect, attachment: &AttachmentPlan, own: &Leased) -> bool {
    own.addresses.is_empty() && protect.allowed.is_empty() && attachment.made_by() == MadeBy::Plugin
}

/// Returns the addresses and routes of an interface that other plugins created, from the last plugin's result.
/// `is_here`: whether a namespace's path is the pod's.
fn brought(
    attachment: &AttachmentPlan,
    outputs: Brought<'_>,
    is_here: impl Fn(&str) -> bool,
) -> Result<Leased, CniError> {
    let printed = attachment.steps.iter().enumerate().rev().find_map(|(index, step)| match step {
        Step::Delegate(_) | Step::TakeMade(_) => outputs.step(index),
        _ => None,
    });
    let Some(Output::Delegate { result }) = printed else { return Ok(Leased::default()) };
    let printed = result.read(attachment.version)?;
    let is_its = |ip: &&cni::IpConfig| match ip.interface.map(|index| printed.interfaces.get(index)) {
        None => true,
        Some(of) => {
            of.is_some_and(|of| of.name == attachment.ifname && of.sandbox.as_deref().is_some_and(&is_here))
        }
    };
    let addresses = printed.ips.iter().filter(is_its);
    let addresses = addresses.map(|ip| LeasedAddress { address: ip.address, gateway: ip.gateway }).collect();
    Ok(Leased { addresses, routes: printed.routes.clone(), server: None })
}

#[cfg(test)]
#[path = "result_tests.rs"]
mod tests;
