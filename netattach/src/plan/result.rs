//! From step outputs to a CNI result. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;

use super::{AttachmentPlan, LeasedAddress, Output, Role, Sandbox, Step, StepRef, addressing};
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
                add_ips(&mut result, pod, addresses.iter().map(|address| (*address, None)));
            }
            (_, Output::Lease { addresses, dns, routes }) => {
                add_ips(&mut result, pod, addresses.iter().map(|leased| (leased.address, leased.gateway)));
                result.routes.extend(routes.iter().cloned());
                result.dns = dns.clone();
            }
            (Step::Configure(configure), Output::Nothing) if configure.default_route => {
                let leased = leased(number, attachment, outputs)?;
                let routes = result.routes.clone();
                let added = addressing::pod_side(configure, &leased.addresses, &routes).routes;
                for route in added {
                    if !result.routes.iter().any(|known| known.dst.trunc() == route.destination.trunc()) {
                        result.routes.push(cni::Route::new(route.destination, route.gateway));
                    }
                }
            }
            _ => {}
        }
    }
    Ok(result)
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

fn interface(made: &super::Interface, sandbox: Option<&str>) -> cni::Interface {
    cni::Interface {
        name: made.name.clone(),
        mac: made.mac.map(|mac| mac.to_string()),
        mtu: Some(made.mtu).filter(|mtu| *mtu != 0),
        sandbox: sandbox.map(str::to_owned),
        ..Default::default()
    }
}
