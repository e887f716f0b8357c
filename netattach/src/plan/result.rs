//! From step outputs to a CNI result, and back. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;

use super::{
    AttachmentPlan, Configure, Interface, LeasedAddress, Output, Role, Sandbox, Step, StepRef, Style,
    addressing,
};
use crate::cni::{self, CniError, CniResult};

/// What an attachment looks like after the steps that have an output: the `prevResult` of the next plugin, and
/// in the end the result.
///
/// # Errors
/// A plugin's result cannot be read.
pub fn result(
    sandbox: &Sandbox,
    number: u16,
    attachment: &AttachmentPlan,
    outputs: &BTreeMap<StepRef, Output>,
) -> Result<CniResult, CniError> {
    let mut result = CniResult::default();
    let mut pod = None;
    for (index, step) in attachment.steps.iter().enumerate() {
        // Step numbers fit: see `Plan::steps`.
        let Some(output) = outputs.get(&StepRef(number, index as u16)) else { break };
        match (step, output) {
            (Step::Delegate(delegate), Output::Delegate { result: printed }) => {
                let printed = CniResult::parse(printed, attachment.version)?;
                match delegate.role {
                    Role::Plugin => result = printed,
                    Role::Ipam => {
                        add_ips(&mut result, pod, printed.ips.iter().map(|ip| (ip.address, ip.gateway)));
                        result.routes.extend(printed.routes);
                        result.dns = printed.dns;
                    }
                }
            }
            (_, Output::Bridge(bridge)) => result.interfaces.push(interface(bridge, None)),
            (_, Output::Link { host, pod: end }) => {
                result.interfaces.extend(host.iter().map(|host| interface(host, None)));
                pod = Some(result.interfaces.len());
                result.interfaces.push(interface(end, Some(&sandbox.netns)));
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
            (_, Output::Lease { addresses, dns, routes }) => {
                add_ips(&mut result, pod, addresses.iter().map(|leased| (leased.address, leased.gateway)));
                result.routes.extend(routes.iter().cloned());
                result.dns = dns.clone();
            }
            (Step::Gateway { .. }, Output::Nothing) => {
                for ip in result.ips.iter_mut().filter(|ip| ip.interface == pod) {
                    ip.gateway = ip.gateway.or_else(|| addressing::first_host(ip.address));
                }
            }
            (Step::Configure(configure), Output::Nothing) => {
                configured(&mut result, configure, &leased(number, attachment, outputs)?.addresses);
            }
            _ => {}
        }
    }
    Ok(result)
}

/// What configuring the interface adds to what was leased: routes of our own, the addresses as they really are.
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
    if let Some(dns) = &configure.dns {
        result.dns = dns.clone();
    }
}

/// The outputs that a result tells of: the way back from [`result`], for callers that kept no record and are
/// handed a `prevResult`. Indexes are not known. A link that the result does not list has no output.
///
/// # Errors
/// The result cannot be expressed in the attachment's version.
pub fn read_back(
    attachment: &AttachmentPlan,
    result: &CniResult,
) -> Result<BTreeMap<StepRef, Output>, CniError> {
    let pod = result
        .interfaces
        .iter()
        .position(|interface| interface.sandbox.is_some() && interface.name == attachment.ifname);
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
    let mut outputs = BTreeMap::new();
    for (index, step) in attachment.steps.iter().enumerate() {
        let link = |host| {
            let pod = result.interfaces.get(pod?).map(read_interface)?;
            Some(Output::Link { host, pod })
        };
        let output = match step {
            Step::EnsureBridge(_) => on_node(true).map(Output::Bridge),
            Step::CreateVeth(_) => link(on_node(false)),
            Step::CreateMacvlan(_) => link(None),
            Step::RaiseLoopback => {
                Some(Output::Loopback { addresses: ips.clone().map(|ip| ip.address).collect() })
            }
            Step::Lease(_) => Some(Output::Lease {
                addresses: ips
                    .clone()
                    .map(|ip| LeasedAddress { address: ip.address, gateway: ip.gateway })
                    .collect(),
                dns: result.dns.clone(),
                routes: result.routes.clone(),
            }),
            Step::Delegate(_) => {
                let brought = CniResult {
                    ips: ips.clone().cloned().collect(),
                    routes: result.routes.clone(),
                    ..CniResult::default()
                };
                Some(Output::Delegate { result: brought.to_value(attachment.version)? })
            }
            Step::Gateway { .. }
            | Step::EnsureForwarding
            | Step::RouteToPod
            | Step::Protect(_)
            | Step::Configure(_) => Some(Output::Nothing),
        };
        // Step numbers fit: see `Plan::steps`.
        outputs.extend(output.map(|output| (StepRef(0, index as u16), output)));
    }
    Ok(outputs)
}

fn read_interface(interface: &cni::Interface) -> Interface {
    Interface {
        name: interface.name.clone(),
        index: 0,
        mac: interface.mac.as_deref().and_then(|mac| mac.parse().ok()),
        mtu: interface.mtu.unwrap_or_default(),
    }
}

/// What address management brought to an attachment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Leased {
    /// The addresses.
    pub addresses: Vec<LeasedAddress>,
    /// Routes that came with them.
    pub routes: Vec<cni::Route>,
}

/// The addresses and routes of an attachment's lease or of the plugin that stands in for it.
///
/// # Errors
/// The plugin's result cannot be read.
pub fn leased(
    number: u16,
    attachment: &AttachmentPlan,
    outputs: &BTreeMap<StepRef, Output>,
) -> Result<Leased, CniError> {
    for (index, step) in attachment.steps.iter().enumerate() {
        match (step, outputs.get(&StepRef(number, index as u16))) {
            (_, Some(Output::Lease { addresses, routes, .. })) => {
                return Ok(Leased { addresses: addresses.clone(), routes: routes.clone() });
            }
            (Step::Delegate(delegate), Some(Output::Delegate { result })) if delegate.role == Role::Ipam => {
                let printed = CniResult::parse(result, attachment.version)?;
                let addresses = printed
                    .ips
                    .iter()
                    .map(|ip| LeasedAddress { address: ip.address, gateway: ip.gateway })
                    .collect();
                return Ok(Leased { addresses, routes: printed.routes });
            }
            _ => {}
        }
    }
    Ok(Leased::default())
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
