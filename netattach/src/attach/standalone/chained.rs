//! Functions that the chained plugins share.

use std::fs::File;
use std::os::fd::AsFd;
use std::time::Duration;

use crate::attach::error::step_code;
use crate::attach::{AttachError, StepError};
use crate::cni::{self, AttachmentId, CniError, CniResult, code};
use crate::flock;
use crate::link::{self, Facts};
use crate::mac::Mac;
use crate::nat::without_agent::{self, Plugin, Whose};
use crate::netlink::{self, Handle, LinkState};
use crate::netns::Netns;
use crate::plan;
use crate::spec::OWN_GROUPS;

/// How long another process may hold the namespace's lock.
const PATIENCE: Duration = Duration::from_secs(5);

/// The name that runtimes give a pod's first interface (containerd and CRI-O use no other name).
const FIRST: &str = "eth0";

/// The error for a missing `prevResult`.
pub(super) fn missing(kind: &str) -> CniError {
    let msg = format!("key prevResult: missing, and {kind} can only follow another plugin");
    CniError::new(code::INVALID_CONFIG, msg)
}

/// Returns the result of the plugins before this one.
pub(super) fn previous(request: &cni::Request, kind: &str) -> Result<CniResult, CniError> {
    request.prev_result()?.ok_or_else(|| missing(kind))
}

/// Returns the answer of CHECK for a difference, if there is one.
pub(super) fn checked(request: &cni::Request, difference: Option<String>) -> Result<(), CniError> {
    match difference {
        None => Ok(()),
        Some(what) => {
            let (ifname, network) = (request.ifname.clone(), request.name.clone());
            Err(AttachError::Differs { ifname, network, what }.into())
        }
    }
}

/// Returns the CNI error for an effect that failed.
pub(super) fn cannot(error: StepError) -> CniError {
    CniError::from_chain(step_code(&error), &error)
}

/// Opens the pod's namespace, and refuses the node's own: a path may lead to another namespace now.
pub(super) fn sandbox(request: &cni::Request) -> Result<(Netns, Handle), CniError> {
    let path = request.netns.as_deref().unwrap_or_default();
    let netns = Netns::open(path).map_err(AttachError::from)?;
    if is_nodes_own(&netns, request)? {
        return Err(AttachError::HostNetns { path: path.into() }.into());
    }
    let pod = Handle::open_in(&netns).map_err(AttachError::Open)?;
    Ok((netns, pod))
}

/// Whether the pod's namespace is gone, or its path leads to the node's namespace now: if a DEL failed for that
/// reason, the runtime would not call the plugins before this one.
pub(super) fn is_gone(request: &cni::Request) -> Result<bool, CniError> {
    let path = request.netns.as_deref().unwrap_or_default();
    match Netns::open(path) {
        Ok(netns) => is_nodes_own(&netns, request),
        Err(error) => Ok(path.is_empty() || error.is_gone()),
    }
}

/// Whether a namespace is unintentionally the node's own.
pub(super) fn is_nodes_own(netns: &Netns, request: &cni::Request) -> Result<bool, CniError> {
    let own = Netns::current().map_err(AttachError::from)?;
    Ok(netns.id() == own.id() && !request.netns_override)
}

/// Whether the pod's interface with that name belongs to another container: the path of a late DEL may lead to that
/// container's namespace now. The group of a link that netattach created identifies its container: without an agent
/// it is derived from the link's own name, with an agent from that of the pod's first interface. Any other link is
/// identified by the result, if there is one: by its Ethernet address, or by an IP address, as a plugin behind this one
/// may have changed the former, and its DEL, which runs first, has restored it. The pod's administrator can change all
/// of them, so the caller must not lose anything of the node because of the answer. If it is another's, the handle may
/// be unusable.
///
/// # Errors
/// The kernel cannot be asked.
pub(super) fn is_anothers(request: &cni::Request, pod: &mut Handle) -> Result<bool, StepError> {
    let Some(found) = pod.find_told(&request.ifname)? else { return Ok(false) };
    if let Some(is_anothers) = is_marked_anothers(request, &found) {
        return Ok(is_anothers);
    }
    let Some(result) = request.prev_result().ok().flatten() else { return Ok(false) };
    let had = address_of(&result, &request.ifname);
    let has_other_mac = had.is_some_and(|had| found.mac != Some(had));
    Ok(has_other_mac && !has_ip_of(&result, &request.ifname, &found, pod)?)
}

/// Whether a link has one of the IP addresses that a result has for the pod's interface with that name. A link with
/// more addresses than are read counts as having none; the handle is unusable then.
pub(super) fn has_ip_of(
    result: &CniResult,
    ifname: &str,
    link: &LinkState,
    pod: &mut Handle,
) -> Result<bool, netlink::Error> {
    let named = plan::by_source::addresses(result, ifname);
    if named.is_empty() {
        return Ok(false);
    }
    let found = match pod.addresses(link.index) {
        Err(error) if error.is_too_many() => return Ok(false),
        found => found?,
    };
    Ok(named.iter().any(|(named, _)| found.iter().any(|found| found.addr() == named.addr())))
}

/// Whether the group of a link marks it as another container's. `None`: the link has no such group.
pub(super) fn is_marked_anothers(request: &cni::Request, found: &LinkState) -> Option<bool> {
    let is_of = |ifname: &str| found.group == plan::link_group(&request.container_id, ifname);
    (found.group & OWN_GROUPS != 0).then(|| !is_of(&request.ifname) && !is_of(FIRST))
}

/// Returns the Ethernet address of the pod's interface with that name, if a result contains it.
fn address_of(result: &CniResult, ifname: &str) -> Option<Mac> {
    let own = result.interfaces.iter().find(|one| one.sandbox.is_some() && one.name == ifname)?;
    own.mac.as_deref()?.parse().ok()
}

/// Removes the address translation for attachments of a network that are not in `valid`.
pub(super) fn collect(plugin: Plugin, network: &str, valid: &[AttachmentId]) -> Result<(), CniError> {
    without_agent::collect(plugin, network, &pairs(valid)).map_err(|error| cannot(error.into()))
}

/// Returns pairs of container and interface.
pub(super) fn pairs(attachments: &[AttachmentId]) -> Vec<(&str, &str)> {
    attachments.iter().map(|it| (it.container_id.as_str(), it.ifname.as_str())).collect()
}

/// Removes the address translation for an interface that an executable created.
pub(super) fn forget_translation(request: &cni::Request) -> Result<(), CniError> {
    let cni::Request { name, container_id, ifname, .. } = request;
    let whose = Whose { plugin: Plugin::Link, network: name, container: container_id, ifname };
    without_agent::detach(&whose).map_err(|error| cannot(error.into()))
}

/// Makes the input for the readers of configurations from the request alone.
pub(super) fn request(request: &cni::Request) -> link::Request<'_> {
    static NO_FACTS: std::sync::OnceLock<Facts> = std::sync::OnceLock::new();
    link::Request {
        container_id: &request.container_id,
        ifname: &request.ifname,
        config: &request.config,
        group: 0,
        cni_args: &request.args,
        exec: &[],
        protect: None,
        facts: NO_FACTS.get_or_init(Facts::default),
        recorded: false,
    }
}

/// Locks the namespace against other processes that choose routing tables there, and waits for a while, as processes
/// in the pod can hold the lock too. The lock is held until the returned file is dropped.
pub(super) fn lock(netns: &Netns) -> Result<File, CniError> {
    let failed = |error: std::io::Error| {
        CniError::new(code::IO_FAILURE, format!("lock the network namespace: {error}"))
    };
    let file = File::from(netns.as_fd().try_clone_to_owned().map_err(failed)?);
    match flock::lock(&file, PATIENCE).map_err(failed)? {
        true => Ok(file),
        false => {
            let msg = "the network namespace is locked by another process (flock)";
            Err(CniError::new(code::TRY_AGAIN_LATER, msg))
        }
    }
}
