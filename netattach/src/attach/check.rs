//! CHECK: is every attachment of a sandbox still what its record says?

use std::net::IpAddr;

use super::apply::{DelegateCall, owner};
use super::{AttachError, Node, StepError};
use crate::cni::{Command, Version};
use crate::journal::Record;
use crate::netlink::{Handle, Hook};
use crate::netns::Netns;
use crate::plan::expect::{Expected, expected};
use crate::plan::{AttachmentPlan, Step, result};
use crate::policy::sync::{FROM_POD, TO_POD};

/// Compares the kernel with the record, and asks every other plugin.
///
/// # Errors
/// [`AttachError::Differs`] with the first difference; a plugin's own error.
pub(super) fn check(node: &Node, record: &Record, netns: &Netns) -> Result<(), AttachError> {
    let mut host = Handle::open().map_err(|error| AttachError::Open(error.into()))?;
    let mut pod = Handle::open_in(netns)?;
    for (number, attachment) in record.plan.attachments.iter().enumerate() {
        // Attachment numbers fit: see `Plan::steps`.
        let number = number as u16;
        let want = expected(&record.plan.sandbox, number, attachment, &record.outputs)?;
        let looked = compare(node, record, attachment, &want, &mut host, &mut pod);
        if let Some(what) = looked.map_err(|source| failed(attachment, "look at the kernel", source))? {
            return Err(AttachError::Differs {
                ifname: attachment.ifname.clone(),
                network: attachment.network.clone(),
                what,
            });
        }
        check_delegates(node, record, number, attachment)?;
    }
    Ok(())
}

fn compare(
    node: &Node,
    record: &Record,
    attachment: &AttachmentPlan,
    want: &Expected,
    host: &mut Handle,
    pod: &mut Handle,
) -> Result<Option<String>, StepError> {
    if want.loopback && !pod.find_link("lo")?.is_some_and(|link| link.up) {
        return Ok(Some("lo is not up".into()));
    }
    if let Some(difference) = compare_pod_end(want, pod)? {
        return Ok(Some(difference));
    }
    if let Some(difference) = compare_host_end(node, want, host)? {
        return Ok(Some(difference));
    }
    if let Some(config) = &want.lease {
        let held: Vec<IpAddr> = want.addresses.iter().map(|address| address.addr()).collect();
        node.leases.check(
            &config.data_dir,
            &config.network,
            &owner(&record.plan.sandbox, attachment),
            &held,
        )?;
    }
    Ok(None)
}

fn compare_pod_end(want: &Expected, pod: &mut Handle) -> Result<Option<String>, StepError> {
    let Some(wanted) = &want.pod else { return Ok(None) };
    let Some(link) = pod.find_link(&wanted.name)? else {
        return Ok(Some(format!("interface {} is gone from the pod", wanted.name)));
    };
    if link.index != wanted.index {
        return Ok(Some(format!("interface {} is not the one that was made", wanted.name)));
    }
    if link.mac != wanted.mac {
        let shown = link.mac.map_or_else(|| "none".into(), |mac| mac.to_string());
        return Ok(Some(format!("interface {} has Ethernet address {shown}", wanted.name)));
    }
    if !link.up {
        return Ok(Some(format!("interface {} is down", wanted.name)));
    }
    if want.macvlan_mode.is_some() && link.macvlan_mode != want.macvlan_mode {
        return Ok(Some(format!("interface {} has another macvlan mode", wanted.name)));
    }
    let addresses = pod.addresses(link.index)?;
    if let Some(missing) = want.addresses.iter().find(|address| !addresses.contains(address)) {
        return Ok(Some(format!("interface {} lacks address {missing}", wanted.name)));
    }
    let routes = pod.routes()?;
    let present = |route: &crate::link::spec::Route| {
        routes.iter().any(|found| {
            found.destination == route.destination.trunc()
                && found.gateway == route.gateway
                && found.interface == Some(link.index)
        })
    };
    let main = want.routes.iter().filter(|route| route.table.is_none_or(|table| table == MAIN_TABLE));
    Ok(main
        .into_iter()
        .find(|route| !present(route))
        .map(|route| format!("the route to {} is gone", route.destination)))
}

const MAIN_TABLE: u32 = 254;

fn compare_host_end(node: &Node, want: &Expected, host: &mut Handle) -> Result<Option<String>, StepError> {
    let Some(wanted) = &want.host else { return Ok(None) };
    let Some(link) = host.find_link(&wanted.name)? else {
        return Ok(Some(format!("link {} is gone from the node", wanted.name)));
    };
    if let Some(bridge) = &want.bridge {
        let index = host.find_link(bridge)?.map(|link| link.index);
        if index.is_none() || link.controller != index {
            return Ok(Some(format!("link {} is not a port of bridge {bridge}", wanted.name)));
        }
    }
    if let (Some(id), Some(enforcer)) = (want.protected, &node.enforcer) {
        if !enforcer.is_bound(link.index, id) {
            return Ok(Some("the dataplane does not know the attachment".into()));
        }
        for (hook, name) in [(Hook::Ingress, FROM_POD), (Hook::Egress, TO_POD)] {
            if host.find_program(link.index, hook)?.is_none() {
                return Ok(Some(format!("program {name} is not attached to {}", wanted.name)));
            }
        }
    }
    Ok(None)
}

fn check_delegates(
    node: &Node,
    record: &Record,
    number: u16,
    attachment: &AttachmentPlan,
) -> Result<(), AttachError> {
    if attachment.version < Version::V0_4_0 {
        return Ok(());
    }
    let last = result::result(&record.plan.sandbox, number, attachment, &record.outputs)?;
    for step in &attachment.steps {
        let Step::Delegate(delegate) = step else { continue };
        let sandbox = &record.plan.sandbox;
        let call =
            DelegateCall { command: Command::Check, netns: Some(&sandbox.netns), attachment, delegate };
        call.run(node, sandbox, Some(last.to_value(attachment.version)?))
            .map_err(|error| failed(attachment, "run CHECK of its plugin", error.into()))?;
    }
    Ok(())
}

fn failed(attachment: &AttachmentPlan, step: &str, source: StepError) -> AttachError {
    AttachError::Step {
        ifname: attachment.ifname.clone(),
        network: attachment.network.clone(),
        step: step.to_owned(),
        source: Box::new(source),
    }
}
