//! An uplink of the node: the program on its ingress.
//!
//! The devices with the program are not recorded, because the kernel lists them. A starting agent checks all
//! devices once, and detaches a program that an earlier agent has left.

use std::collections::BTreeSet;

use super::device::{DeviceHooks, HookProgram};
use super::numbers::{UPLINK_FOREIGN_CLSACT, UPLINK_OWN_CLSACT};
use super::{AttachMode, HookError};
use crate::bpf::{LinkPlace, Program, Programs};
use crate::netlink::Handle;
use crate::spec::TcHook;

const NUMBERS: [u32; 2] = [UPLINK_OWN_CLSACT, UPLINK_FOREIGN_CLSACT];

/// The program on an uplink, run by the filter with this number.
fn on(ifindex: u32, number: u32) -> DeviceHooks<'static> {
    let program = Program::Uplink;
    let link = Some(LinkPlace::Node { ifindex, program });
    let programs = vec![HookProgram { hook: TcHook::Ingress, number, class: 0, program, link }];
    DeviceHooks { index: ifindex, pod: None, programs, first: false }
}

/// Attaches the program to a device. A program that runs there already is replaced in one step.
pub(crate) fn attach(
    mode: AttachMode,
    programs: &Programs,
    device: u32,
    host: &mut Handle,
) -> Result<(), HookError> {
    if mode == AttachMode::Tcx {
        return on(device, UPLINK_OWN_CLSACT).attach(mode, programs, host).map(drop);
    }
    let found = numbers(device, host)?;
    let mut attach_as = |number| on(device, number).attach(mode, programs, host).map_err(of(device));
    if let Some(number) = found.first() {
        return attach_as(*number).map(drop);
    }
    // Until the answer is known, the clsact counts as created here: otherwise a clsact that is left over
    // would never be deleted.
    if attach_as(UPLINK_OWN_CLSACT)? {
        return Ok(());
    }
    attach_as(UPLINK_FOREIGN_CLSACT)?;
    on(device, UPLINK_OWN_CLSACT).detach(mode, programs, host, false).map_err(of(device))
}

/// Detaches the program from a device, if it was attached in that mode. Idempotent; a device that is gone has
/// no program.
pub(crate) fn detach(
    mode: AttachMode,
    programs: &Programs,
    device: u32,
    host: &mut Handle,
) -> Result<(), HookError> {
    if mode == AttachMode::Tcx {
        return on(device, UPLINK_OWN_CLSACT).detach(mode, programs, host, false);
    }
    numbers(device, host)?.into_iter().try_for_each(|number| {
        let clsact = number == UPLINK_OWN_CLSACT;
        on(device, number).detach(mode, programs, host, clsact).map_err(of(device))
    })
}

/// Whether the program runs on a device: another process may have detached it.
pub(crate) fn runs(
    mode: AttachMode,
    programs: &Programs,
    device: u32,
    host: &mut Handle,
) -> Result<bool, HookError> {
    match mode {
        AttachMode::Clsact => Ok(!numbers(device, host)?.is_empty()),
        AttachMode::Tcx => Ok(on(device, UPLINK_OWN_CLSACT).missing(mode, programs, host)?.is_none()),
    }
}

/// The devices on which the program runs, in either mode. Devices of attachments are not checked.
pub(crate) fn running(
    programs: &Programs,
    attachments: &BTreeSet<u32>,
    host: &mut Handle,
) -> Result<BTreeSet<u32>, HookError> {
    let mut running = programs.linked_devices(&[Program::Uplink])?;
    let links = host.forwarding_states()?.into_iter();
    for link in links.filter(|link| !attachments.contains(&link.index)) {
        if !numbers(link.index, host)?.is_empty() {
            running.insert(link.index);
        }
    }
    Ok(running)
}

/// Numbers of netattach's filters on a device.
fn numbers(device: u32, host: &mut Handle) -> Result<Vec<u32>, HookError> {
    let found = host.find_filters(device, TcHook::Ingress).map_err(HookError::from).map_err(of(device))?;
    Ok(found.into_iter().map(|filter| filter.handle).filter(|number| NUMBERS.contains(number)).collect())
}

/// Adds the device to an error about its filter.
fn of(device: u32) -> impl Fn(HookError) -> HookError {
    move |error| match error {
        HookError::Netlink(source) => HookError::Uplink { device, source },
        other => other,
    }
}
