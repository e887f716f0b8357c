//! Converts step outputs to a CNI result, and back. Pure.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;

use super::{AttachmentPlan, Sandbox, addressing, routing};
use crate::cni::{self, CniArgs, CniError, CniResult, Value, Version};
use crate::ipam;
use crate::npwg::device_info::is_pci_address;
use crate::spec::{Device, DeviceId, Tune};
use crate::step::{
    Bridge, Brought, Configure, Delegate, Interface, LeasedAddress, MadeBy, Output, Outputs, Parent, Protect,
    Role, SetDevice, Step, StepRef, Style, Translate,
};

/// The state of an attachment after the steps that have an output: the `prevResult` of the next plugin, and in the end
/// the result.
///
/// # Errors
/// A plugin's result cannot be read.
pub fn result(
    sandbox: &Sandbox,
    attachment: &AttachmentPlan,
    outputs: Brought<'_>,
) -> Result<CniResult, CniError> {
    let mut result = CniResult::default();
    let mut pod = None;
    for (index, step) in attachment.steps.iter().enumerate() {
        let Some(output) = outputs.step(index) else { break };
        match (step, output) {
            (Step::Delegate(delegate), Output::Delegate { result: printed }) => {
                let printed = printed.read(attachment.version)?;
                match delegate.role {
                    Role::Plugin => result = printed.clone(),
                    Role::Ipam => {
                        add_ips(&mut result, pod, printed.ips.iter().map(|ip| (ip.address, ip.gateway)));
                        result.routes.extend(printed.routes.iter().cloned());
                        result.dns = printed.dns.clone();
                    }
                }
            }
            (Step::TakeMade(_), Output::Delegate { result: printed }) => {
                result = printed.read(attachment.version)?.clone();
            }
            (_, Output::Bridge(bridge)) => result.interfaces.push(interface(&bridge.link, None)),
            (_, Output::Link { host, pod: end, .. }) => {
                result.interfaces.extend(host.iter().map(|host| interface(host, None)));
                pod = Some(result.interfaces.len());
                let end = interface(end, Some(&sandbox.netns));
                result.interfaces.push(cni::Interface { pci_id: pci_id(attachment), ..end });
            }
            (Step::ClaimDevice(device), Output::Claimed(claim)) => {
                let representor = claim.representor.iter().map(|it| interface(&it.device, None));
                result.interfaces.extend(representor);
                if device.userspace.is_none() {
                    continue;
                }
                pod = Some(result.interfaces.len());
                let mac = claim.settings.as_ref().and_then(|settings| settings.mac);
                result.interfaces.push(cni::Interface {
                    name: device.pod_name.clone(),
                    mac: mac.filter(|mac| mac.0 != [0; 6]).map(|mac| mac.to_string()),
                    sandbox: Some(sandbox.netns.clone()),
                    pci_id: pci_id(attachment),
                    ..Default::default()
                });
            }
            (Step::SetDevice(SetDevice { mac: Some(mac), .. }), Output::Nothing) => {
                if let Some(own) = pod.and_then(|pod| result.interfaces.get_mut(pod)) {
                    own.mac = Some(mac.to_string());
                }
            }
            (Step::Tune(tune), _) => {
                let of_pod = |one: &&mut cni::Interface| {
                    one.sandbox.as_deref() == Some(&sandbox.netns) && one.name == attachment.ifname
                };
                if let Some(own) = result.interfaces.iter_mut().find(of_pod) {
                    tuned(own, tune);
                }
            }
            (_, Output::Loopback { addresses }) => {
                pod = Some(result.interfaces.len());
                result.interfaces.push(cni::Interface {
                    name: "lo".into(),
                    mac: Some("00:00:00:00:00:00".into()),
                    sandbox: Some(sandbox.netns.clone()),
                    ..Default::default()
                });
                let own = |is_ipv4: bool| {
                    let is_own = |net: &&IpNet| net.addr().is_loopback() && net.addr().is_ipv4() == is_ipv4;
                    addresses.iter().find(is_own).map(|address| (*address, None))
                };
                add_ips(&mut result, pod, [own(true), own(false)].into_iter().flatten());
            }
            (_, Output::Lease { addresses, dns, routes, server: _ }) => {
                add_ips(&mut result, pod, addresses.iter().map(|leased| (leased.address, leased.gateway)));
                result.routes.extend(routes.iter().cloned());
                result.dns = dns.clone();
            }
            (Step::Gateway { .. }, Output::Nothing | Output::Gateway(_)) => {
                if let Output::Gateway(device) = output {
                    result.interfaces.push(interface(device, None));
                }
                for ip in result.ips.iter_mut().filter(|ip| ip.interface == pod) {
                    ip.gateway = ip.gateway.or_else(|| addressing::first_host(ip.address));
                }
            }
            (Step::Configure(configure), Output::Nothing) => {
                configured(&mut result, configure, &leased(attachment, outputs)?.addresses);
            }
            _ => {}
        }
    }
    routing::settle_result(attachment, outputs, &mut result.routes);
    Ok(result)
}

/// Puts the Ethernet address and the MTU that an interface was given into what a result says of it; the MTU where it says any.
pub fn tuned(interface: &mut cni::Interface, tune: &Tune) {
    if let Some(mac) = tune.properties.mac {
        interface.mac = Some(mac.to_string());
    }
    if let (Some(mtu), Some(_)) = (tune.properties.mtu, interface.mtu) {
        interface.mtu = Some(mtu);
    }
}

/// The PCI address of the attachment's device, if it has one.
fn pci_id(attachment: &AttachmentPlan) -> Option<String> {
    match attachment.made_by() {
        MadeBy::Device(Device { id: DeviceId::Bus(name), .. }) if is_pci_address(name) => Some(name.clone()),
        _ => None,
    }
}

/// Adds the effects of configuring the interface to the leased addresses and routes: netattach's own routes, and the
/// addresses as they are in the pod.
fn configured(result: &mut CniResult, configure: &Configure, leased: &[LeasedAddress]) {
    if configure.default_route || configure.style == Style::Routed {
        for route in addressing::pod_side(configure, leased, &result.routes).routes {
            if !result.routes.iter().any(|known| known.dst.trunc() == route.destination.trunc()) {
                result.routes.push(cni::Route::new(route.destination, route.gateway));
            }
        }
    }
    if configure.style == Style::Routed {
        for ip in &mut result.ips {
            ip.address = ip.address.addr().into();
            ip.gateway = Some(addressing::link_gateway(ip.address.addr()));
        }
    }
    if configure.style == Style::PointToPoint {
        for ip in &mut result.ips {
            ip.gateway = ip.gateway.or_else(|| Some(addressing::link_gateway(ip.address.addr())));
        }
    }
    if let Some(dns) = &configure.dns {
        result.dns = dns.clone();
    }
}

/// The result as [`as_reported`], in each of these versions.
///
/// # Errors
/// As there, or the result cannot be expressed in one of them.
pub fn in_versions<const N: usize>(
    sandbox: &Sandbox,
    attachment: &AttachmentPlan,
    outputs: Brought<'_>,
    versions: [Version; N],
) -> Result<[Value; N], CniError> {
    let is_own = printed(attachment, outputs).is_none();
    let mut written = [const { Value::Null }; N];
    if is_own && attachment.version.has_whole_results() {
        // What was just made need not be read again.
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

/// The output of the last plugin, if there is one.
fn printed<'o>(attachment: &AttachmentPlan, outputs: Brought<'o>) -> Option<&'o Output> {
    attachment.steps.iter().enumerate().rev().find_map(|(index, step)| match step {
        Step::Delegate(delegate) if delegate.role == Role::Plugin => outputs.step(index),
        Step::TakeMade(_) => outputs.step(index),
        _ => None,
    })
}

/// The result for plugins and the cache, in the version of the attachment's configuration: the output of the last
/// plugin, including keys that netattach does not know, or the combined outputs of netattach's own steps.
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

/// Replaces the routes of one result by those of another. The two oldest versions keep them among the addresses.
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
/// `prevResult`. Indexes are not known. A link that the result does not list has no output.
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
            // How the device was is not in a result.
            Step::ClaimDevice(_) => None,
            Step::Lease(_) => Some(Output::Lease {
                addresses: ips
                    .clone()
                    .map(|ip| LeasedAddress { address: ip.address, gateway: ip.gateway })
                    .collect(),
                dns: result.dns.clone(),
                routes: result.routes.clone(),
                // Not in a result.
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

/// An interface of a result, which has no index.
pub(super) fn read_interface(interface: &cni::Interface) -> Interface {
    Interface {
        name: interface.name.clone(),
        index: 0,
        mac: interface.mac.as_deref().and_then(|mac| mac.parse().ok()),
        mtu: interface.mtu.unwrap_or_default(),
    }
}

/// The link that an attachment's steps made or found.
#[derive(Debug, Clone, PartialEq)]
pub struct Ends {
    /// The node's end, if it has one.
    pub host: Option<Interface>,
    /// The pod's end.
    pub pod: Interface,
    /// The parent, if other pods' links share it.
    pub parent: Option<Parent>,
}

/// The link that an attachment's steps made or found, if there is one.
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

/// The ends of the link that an attachment's steps made or found: the node's, if there is one, and the pod's.
pub fn link(outputs: Brought<'_>) -> Option<(Option<Interface>, Interface)> {
    ends(outputs).map(|ends| (ends.host, ends.pod))
}

/// What the node is to translate, with the device that was found for it.
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

/// The leased addresses with their subnets as the network's author has them, which a pod that asks for an address does not
/// choose: for what holds for others as well. What it asks for outside of these is by itself if it is `alone`, and else in the
/// subnet that it names.
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
        // What another plugin's interface has is that plugin's to say.
        attachment.steps.iter().find_map(by_step).unwrap_or(Some(address))
    };
    let in_subnet = |leased: &LeasedAddress| {
        let otherwise = if alone { IpNet::from(leased.address.addr()) } else { leased.address };
        LeasedAddress { address: named(leased.address).unwrap_or(otherwise), gateway: leased.gateway }
    };
    leased.iter().map(in_subnet).collect()
}

/// The result of an attachment's address management.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Leased {
    /// The addresses.
    pub addresses: Vec<LeasedAddress>,
    /// Routes that came with them.
    pub routes: Vec<cni::Route>,
    /// The server by DHCP that has given them, where netattach has leased them.
    pub server: Option<Ipv4Addr>,
}

/// The addresses and routes of an attachment's lease or of the IPAM plugin called in place of it.
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

/// The addresses from which the pod may send by an attachment's interface, and its routes: [`leased`], but of an interface that
/// other plugins made those that the last result attributes to it in the namespace of that path, or to nothing. If there are
/// none, those that the kernel had on it.
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

/// Whether nobody knows from which addresses a pod may send by an interface: another plugin made it and gave it none, and its
/// network names none. The pod itself may give it one, as by DHCP.
pub fn is_unaddressed(protect: &Protect, attachment: &AttachmentPlan, own: &Leased) -> bool {
    own.addresses.is_empty() && protect.allowed.is_empty() && attachment.made_by() == MadeBy::Plugin
}

/// The addresses and routes of an interface that other plugins made, from the last plugin's result. `is_here`: whether a path
/// of a namespace is the pod's.
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

fn add_ips(
    result: &mut CniResult,
    interface: Option<usize>,
    ips: impl Iterator<Item = (IpNet, Option<IpAddr>)>,
) {
    result.ips.extend(ips.map(|(address, gateway)| cni::IpConfig { interface, address, gateway }));
}

fn interface(made: &Interface, sandbox: Option<&str>) -> cni::Interface {
    cni::Interface {
        name: made.name.clone(),
        mac: made.mac.map(|mac| mac.to_string()),
        mtu: Some(made.mtu).filter(|mtu| *mtu != 0),
        sandbox: sandbox.map(str::to_owned),
        ..Default::default()
    }
}

#[cfg(test)]
#[path = "result_tests.rs"]
mod tests;
