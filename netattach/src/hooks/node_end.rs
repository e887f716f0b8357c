//! The programs of an attachment on the node's end of its link.

use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;

use super::{AttachMode, HookError};
use crate::bpf::{self, Dataplane, Running};
use crate::netlink::{self, DevicePrograms, Handle, Hook};

/// Name of the program that judges what pods send, as `tc` and `bpftool` show it.
pub const FROM_POD: &str = "na_from_pod";
/// Name of the program that judges what pods receive.
pub const TO_POD: &str = "na_to_pod";

/// The two directions of a device with the program that runs there.
const DIRECTIONS: [(Hook, &str, bpf::Hook); 2] =
    [(Hook::Ingress, FROM_POD, bpf::Hook::FromPod), (Hook::Egress, TO_POD, bpf::Hook::ToPod)];

/// Runs the programs on a device. Those of the other mode are taken off afterwards, so that every packet is judged.
pub(crate) fn attach(
    mode: AttachMode,
    dataplane: &Dataplane,
    device: u32,
    host: &mut Handle,
) -> Result<(), HookError> {
    match mode {
        AttachMode::Clsact => Ok(host.ensure_programs(device, &programs(dataplane))?),
        AttachMode::Tcx => Ok(dataplane.attach_by_links(device)?),
    }
}

/// Takes off a device what an agent of the other mode attached: what was found there.
pub(crate) fn remove_others(
    mode: AttachMode,
    dataplane: &Dataplane,
    device: u32,
    found: &Found,
    host: &mut Handle,
) -> Result<(), HookError> {
    match mode {
        AttachMode::Clsact if found.links => Ok(dataplane.remove_links(device)?),
        AttachMode::Tcx if found.filters != DevicePrograms::default() => Ok(host.remove_programs(device)?),
        AttachMode::Clsact | AttachMode::Tcx => Ok(()),
    }
}

/// What an earlier agent left on a device, in whatever mode it was.
#[derive(Debug)]
pub(crate) struct Found {
    /// Filters at our place.
    pub(crate) filters: DevicePrograms,
    /// Whether there are pins of links.
    pub(crate) links: bool,
}

impl Found {
    /// Whether any program of ours may run.
    pub(crate) fn anything(&self) -> bool {
        self.links || self.filters != DevicePrograms::default()
    }

    /// Whether both programs run as they are to in this mode. Those of an earlier object count.
    pub(crate) fn is_whole(
        &self,
        mode: AttachMode,
        dataplane: &Dataplane,
        device: u32,
    ) -> Result<bool, HookError> {
        match mode {
            AttachMode::Clsact => {
                let DevicePrograms { ingress, egress } = &self.filters;
                Ok((ingress.as_deref(), egress.as_deref()) == (Some(FROM_POD), Some(TO_POD)))
            }
            AttachMode::Tcx => {
                for (_, _, program) in DIRECTIONS {
                    if !self.links || dataplane.running_by_link(device, program)? == Running::Nothing {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
        }
    }
}

/// The first program that does not run on a device. One of an earlier object counts as running.
pub(crate) fn missing(
    mode: AttachMode,
    dataplane: &Dataplane,
    device: u32,
    host: &mut Handle,
) -> Result<Option<&'static str>, HookError> {
    for (hook, name, program) in DIRECTIONS {
        let runs = match mode {
            AttachMode::Clsact => {
                host.find_program(device, hook)?.and_then(|found| found.name).as_deref() == Some(name)
            }
            AttachMode::Tcx => dataplane.running_by_link(device, program)? != Running::Nothing,
        };
        if !runs {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// Removes the links of devices that nobody knows: theirs are gone, or never became anybody's.
pub(crate) fn sweep(dataplane: &Dataplane, known: &BTreeSet<u32>) -> Result<(), HookError> {
    for device in dataplane.linked_devices()?.difference(known) {
        dataplane.remove_links(*device)?;
    }
    Ok(())
}

/// The programs of an attachment and where they run.
pub(crate) fn programs(dataplane: &Dataplane) -> [(netlink::Hook, &'static str, BorrowedFd<'_>); 2] {
    DIRECTIONS.map(|(hook, name, program)| (hook, name, dataplane.program(program)))
}
