//! The program of uplinks on the node's devices: by clsact or by tcx, as on attachments' devices.
//!
//! Where it runs is not written down: the kernel shows it. An agent that begins looks at all devices once, and takes it off
//! where an earlier one has left it.

use std::collections::BTreeSet;

use super::numbers::{UPLINK_FOREIGN_CLSACT, UPLINK_OWN_CLSACT};
use super::{AttachMode, HookError};
use crate::bpf::{self, Program};
use crate::netlink::{self, Filter, Handle, Hook};

const HANDLES: [u32; 2] = [UPLINK_OWN_CLSACT, UPLINK_FOREIGN_CLSACT];

/// A failure with the filter of a device.
fn on(device: u32) -> impl FnOnce(netlink::Error) -> HookError {
    move |source| HookError::Uplink { device, source }
}

/// Runs the program on a device. One that runs there already is replaced in one step.
pub(crate) fn attach(
    mode: AttachMode,
    maps: &bpf::FastPath,
    device: u32,
    host: &mut Handle,
) -> Result<(), HookError> {
    match mode {
        AttachMode::Clsact => ensure_filter(maps, device, host).map_err(on(device)),
        AttachMode::Tcx => Ok(maps.attach_wire_by_link(device)?),
    }
}

fn ensure_filter(maps: &bpf::FastPath, device: u32, host: &mut Handle) -> Result<(), netlink::Error> {
    let filter = |handle| Filter {
        hook: Hook::Ingress,
        handle,
        class: 0,
        name: Program::Wire.name(),
        program: maps.wire_program(),
    };
    let found = ours(device, host)?;
    if let Some(handle) = found.first() {
        return host.ensure_filters(device, &[filter(*handle)]).map(drop);
    }
    // Until it is known, the discipline counts as ours: one that is left over would be nobody's.
    if host.ensure_filters(device, &[filter(UPLINK_OWN_CLSACT)])? {
        return Ok(());
    }
    host.ensure_filters(device, &[filter(UPLINK_FOREIGN_CLSACT)])?;
    host.ensure_filters_absent(device, &[(Hook::Ingress, UPLINK_OWN_CLSACT)], false)
}

/// The program does not run on a device, however it was attached. Idempotent; a device that is gone has none.
pub(crate) fn detach(maps: &bpf::FastPath, device: u32, host: &mut Handle) -> Result<(), HookError> {
    maps.remove_wire_link(device)?;
    detach_filter(device, host).map_err(on(device))
}

fn detach_filter(device: u32, host: &mut Handle) -> Result<(), netlink::Error> {
    let found = ours(device, host)?;
    if found.is_empty() {
        return Ok(());
    }
    let filters: Vec<_> = found.iter().map(|handle| (Hook::Ingress, *handle)).collect();
    host.ensure_filters_absent(device, &filters, found.contains(&UPLINK_OWN_CLSACT))
}

/// Whether the program runs on a device: somebody may have taken it off.
pub(crate) fn runs(
    mode: AttachMode,
    maps: &bpf::FastPath,
    device: u32,
    host: &mut Handle,
) -> Result<bool, HookError> {
    match mode {
        AttachMode::Clsact => {
            let found = ours(device, host).map_err(on(device))?;
            Ok(!found.is_empty())
        }
        AttachMode::Tcx => Ok(maps.linked_uplinks()?.contains(&device)),
    }
}

/// Takes off a device what an agent of the other mode attached.
pub(crate) fn remove_others(
    mode: AttachMode,
    maps: &bpf::FastPath,
    device: u32,
    host: &mut Handle,
) -> Result<(), HookError> {
    match mode {
        AttachMode::Clsact => Ok(maps.remove_wire_link(device)?),
        AttachMode::Tcx => detach_filter(device, host).map_err(on(device)),
    }
}

/// The devices that the program runs on, whoever attached it. Those of attachments are not looked at.
pub(crate) fn running(
    maps: &bpf::FastPath,
    attachments: &BTreeSet<u32>,
    host: &mut Handle,
) -> Result<BTreeSet<u32>, HookError> {
    let mut running = maps.linked_uplinks()?;
    let links = host.forwarding_states()?.into_iter();
    for link in links.filter(|link| !attachments.contains(&link.index)) {
        let found = ours(link.index, host).map_err(on(link.index))?;
        running.extend((!found.is_empty()).then_some(link.index));
    }
    Ok(running)
}

/// Numbers of our filters on a device.
fn ours(device: u32, host: &mut Handle) -> Result<Vec<u32>, netlink::Error> {
    let found = host.find_filters(device, Hook::Ingress)?.into_iter();
    Ok(found.map(|filter| filter.handle).filter(|handle| HANDLES.contains(handle)).collect())
}
