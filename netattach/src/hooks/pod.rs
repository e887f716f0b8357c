//! The programs of an attachment on its device in the pod: where another plugin made an interface without an end on the node.

use std::path::PathBuf;

use super::numbers::{POD_FROM, POD_TO};
use super::{AttachMode, HookError};
use crate::bpf::{Dataplane, Hook as Way, Program};
use crate::netlink::{Filter, Handle, Hook};
use crate::netns::{Netns, NetnsId, within};

const FILTERS: [(Hook, u32, Way); 2] =
    [(Hook::Egress, POD_FROM, Way::FromPod), (Hook::Ingress, POD_TO, Way::ToPod)];

/// A device in its pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PodDevice {
    /// Path of the pod's namespace.
    pub(crate) netns: PathBuf,
    /// Which namespace that was.
    pub(crate) netns_id: NetnsId,
    /// Index of the device there.
    pub(crate) index: u32,
}

impl PodDevice {
    /// The pod's namespace, if it is still that one.
    pub(crate) fn namespace(&self) -> Option<Netns> {
        Netns::open(&self.netns).ok().filter(|netns| netns.id() == self.netns_id)
    }
}

/// Runs the programs on a device in a pod. The pod may be gone; its DEL will clean up.
pub(crate) fn attach(
    mode: AttachMode,
    dataplane: &Dataplane,
    id: u32,
    device: &PodDevice,
) -> Result<(), HookError> {
    let netns = device.namespace().ok_or(HookError::PodGone)?;
    match mode {
        AttachMode::Tcx => Ok(within(&netns, || dataplane.in_pod().attach(id, device.index))??),
        AttachMode::Clsact => {
            let filters = filters(dataplane, id)?;
            Handle::open_in(&netns)?.ensure_filters(device.index, &filters)?;
            Ok(())
        }
    }
}

/// The first program that does not run on a device in a pod. Where the pod is gone none is missing.
pub(crate) fn missing(
    mode: AttachMode,
    dataplane: &Dataplane,
    id: u32,
    device: &PodDevice,
) -> Result<Option<&'static str>, HookError> {
    if mode == AttachMode::Tcx {
        return Ok(dataplane.in_pod().missing(id, device.index)?);
    }
    let Some(netns) = device.namespace() else { return Ok(None) };
    let mut pod = Handle::open_in(&netns)?;
    for (hook, _, way) in FILTERS {
        let name = Program::InPod(way).name();
        let found = pod.find_filters(device.index, hook)?;
        if !found.iter().any(|found| found.name.as_deref() == Some(name)) {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// Takes off a device in a pod what an agent of the other mode attached.
pub(crate) fn remove_others(
    mode: AttachMode,
    dataplane: &Dataplane,
    id: u32,
    device: &PodDevice,
) -> Result<(), HookError> {
    match (mode, device.namespace()) {
        (AttachMode::Clsact, _) => Ok(dataplane.in_pod().detach(id)?),
        (AttachMode::Tcx, Some(netns)) => {
            let filters = FILTERS.map(|(hook, handle, _)| (hook, handle));
            Ok(Handle::open_in(&netns)?.ensure_filters_absent(device.index, &filters, false)?)
        }
        (AttachMode::Tcx, None) => Ok(()),
    }
}

/// What runs on a device in a pod by filters, whose class says whose the packets are.
fn filters(dataplane: &Dataplane, id: u32) -> Result<[Filter<'_>; 2], HookError> {
    let class = u16::try_from(id).map_err(|_| HookError::NoClass(id))?;
    Ok(FILTERS.map(|(hook, handle, way)| {
        let (name, program) = (Program::InPod(way).name(), dataplane.in_pod().program(way));
        Filter { hook, handle, class, name, program }
    }))
}
