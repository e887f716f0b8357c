//! The node's end of an attachment's link: a device in the node's namespace that belongs to the attachment
//! alone.

use std::collections::BTreeSet;

use super::device::{DeviceHooks, HookProgram};
use super::numbers::{NODE_END, SPARE};
use super::{AttachMode, HookError};
use crate::bpf::{LinkPlace, Program, Programs, Side};
use crate::netlink::{DevicePrograms, Handle};
use crate::spec::TcHook;

/// The node's end receives what the pod sends, and sends what the pod receives.
const PROGRAMS: [(TcHook, Program); 2] =
    [(TcHook::Ingress, Program::At(Side::FromPod)), (TcHook::Egress, Program::At(Side::ToPod))];

/// The programs of an attachment on this device.
pub(crate) fn on(ifindex: u32) -> DeviceHooks<'static> {
    let programs = PROGRAMS.map(|(hook, program)| HookProgram {
        hook,
        number: NODE_END,
        class: 0,
        program,
        link: Some(LinkPlace::Node { ifindex, program }),
    });
    DeviceHooks { index: ifindex, pod: None, programs: programs.into(), first: true }
}

/// The programs that earlier agents left on a device, in either mode.
#[derive(Debug)]
pub(crate) struct Found {
    filters: DevicePrograms,
    /// Spare filters, which ran while the regular ones were put before other filters, left by an agent that
    /// was killed during this.
    spares: DevicePrograms,
    /// Whether there are pins of links.
    links: bool,
}

impl Found {
    /// Whether any program of netattach may run.
    pub(crate) fn anything(&self) -> bool {
        self.has(AttachMode::Clsact) || self.has(AttachMode::Tcx)
    }

    /// Whether any program of netattach may run in that mode.
    pub(crate) fn has(&self, mode: AttachMode) -> bool {
        match mode {
            AttachMode::Clsact => self.filters != DevicePrograms::default() || self.has_spares(),
            AttachMode::Tcx => self.links,
        }
    }

    /// Whether there are spare filters: packets are then judged twice.
    pub(crate) fn has_spares(&self) -> bool {
        self.spares != DevicePrograms::default()
    }

    /// Whether both programs of a device run in that mode. Programs of an earlier object count.
    pub(crate) fn is_whole(
        &self,
        mode: AttachMode,
        programs: &Programs,
        device: u32,
        host: &mut Handle,
    ) -> Result<bool, HookError> {
        match mode {
            AttachMode::Clsact => {
                let found = [&self.filters.ingress, &self.filters.egress].map(Option::as_deref);
                Ok(found == PROGRAMS.map(|(_, program)| Some(program.name())))
            }
            AttachMode::Tcx => Ok(self.links && on(device).missing(mode, programs, host)?.is_none()),
        }
    }
}

/// Finds the programs of many devices at once: one by one would take longer than the rest of a restart.
/// `None` for a device that is gone.
pub(crate) fn find_all(
    devices: &[u32],
    programs: &Programs,
    host: &mut Handle,
) -> Result<Vec<Result<Option<Found>, HookError>>, HookError> {
    let linked = linked(programs)?;
    let attached = host.attached_programs(devices, NODE_END)?;
    let spares = host.attached_programs(devices, NODE_END | SPARE)?;
    let found = devices.iter().zip(attached.into_iter().zip(spares)).map(|(device, (filters, spares))| {
        let links = linked.contains(device);
        Ok(filters?.zip(spares?).map(|(filters, spares)| Found { filters, spares, links }))
    });
    Ok(found.collect())
}

/// Removes the links of devices that are not `known`: the devices are gone, or never belonged to an
/// attachment.
pub(crate) fn sweep(programs: &Programs, known: &BTreeSet<u32>) -> Result<(), HookError> {
    linked(programs)?.difference(known).try_for_each(|device| on(*device).unlink(programs))
}

fn linked(programs: &Programs) -> Result<BTreeSet<u32>, HookError> {
    Ok(programs.linked_devices(&PROGRAMS.map(|(_, program)| program))?)
}
