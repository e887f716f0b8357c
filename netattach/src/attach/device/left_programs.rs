//! The programs that a pod has left on a device that goes back to the node: they would see the node's traffic on it.
//!
//! XDP programs, tcx programs and those of a netkit pair stay attached when a device moves to another namespace.
//! Queueing disciplines and their filters do not: the kernel shuts them down with each move.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;

use super::error::DeviceError;
use crate::attach::StepError;
use crate::bpf::Program;
use crate::bpf::sys::{self, LoadedProgram, OnHook, SharedHook};
use crate::error_chain::Chain;
use crate::netlink::{self, DeviceState, Handle, XdpPlace};
use crate::step::Home;

/// Why a program stays on a device.
#[derive(Debug, thiserror::Error)]
pub enum LeftError {
    /// The kernel refuses a call of `bpf(2)`.
    #[error(transparent)]
    Bpf(#[from] io::Error),
    /// The kernel refuses a request.
    #[error(transparent)]
    Netlink(#[from] netlink::Error),
    /// A link (`bpf_link`) holds an XDP program, but none of the machine's links is that link.
    #[error("the link that holds it is not found")]
    NoLink,
}

/// A program attached to a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct OnDevice {
    /// The kernel's id of the program.
    program: u32,
    place: Place,
}

/// Where a program is attached to a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// On that hook; through the link with that id if a link holds the program.
    Hook(SharedHook, Option<u32>),
    Xdp(XdpPlace),
}

/// Returns the kernel ids of the programs on a device that would go with it to a pod. The device must be in the
/// calling thread's namespace; its XDP programs are those in `found`.
///
/// # Errors
/// The kernel does not list them.
pub(super) fn running(found: &DeviceState) -> Result<Vec<u32>, StepError> {
    let on_hooks = on_hooks(found.link.index).map_err(|source| {
        let device = found.link.name.clone();
        StepError::Device(DeviceError::ProgramsUnknown { device, source: source.into() })
    })?;
    let on_hooks = on_hooks.into_iter().map(|it| it.program);
    Ok(on_hooks.chain(found.xdp.iter().map(|(_, program)| *program)).collect())
}

/// Detaches all programs from a device of the node that were not attached before a pod had the device, including the
/// programs that enforced the pod's policies. If the attached programs were not recorded at the claim, keeps programs
/// that were loaded before the claim, and detaches programs of unknown age. `host` must be a handle in the calling
/// thread's namespace. Idempotent; every program is tried even if another one stays.
///
/// This happens on the node and not in the pod, whose processes could attach another program. A program that another
/// agent of the node attaches immediately before this call counts as the pod's: nothing distinguishes the two.
///
/// # Errors
/// A program stays attached; the error names it.
pub(super) fn take_off(host: &mut Handle, home: &Home, index: u32) -> Result<(), StepError> {
    let mut failed = None;
    let was_seen = |it: &OnDevice| home.programs.as_ref().is_some_and(|seen| seen.contains(&it.program));
    for found in all(host, &home.name, index)?.into_iter().filter(|it| !was_seen(it)) {
        let (device, program) = (&home.name, found.program);
        let loaded = sys::loaded_program(found.program).ok().flatten();
        let origin = origin(home, loaded.as_ref());
        // A program that was unloaded meanwhile has no name.
        let name = loaded.map(|it| it.name).unwrap_or_default();
        if origin == Origin::Before {
            tracing::info!(device, program, name, "loaded before a pod was given the device; stays on it");
            continue;
        }
        match remove(host, index, found) {
            Ok(()) if Program::is_one(&name) => {}
            Ok(()) if origin == Origin::Unknown => {
                tracing::warn!(
                    device,
                    program,
                    name,
                    "program detached from a device that a pod had; unknown whether it was attached before the pod"
                );
            }
            Ok(()) => {
                tracing::info!(device, program, name, "the pod left a program on the device; detached");
            }
            Err(source) => {
                let device = device.clone();
                failed.get_or_insert(StepError::Device(DeviceError::ProgramLeft {
                    device,
                    program,
                    name,
                    source,
                }));
            }
        }
    }
    failed.map_or(Ok(()), Err)
}

/// Whether a program was on a device before a pod had it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// It was attached before the pod had the device.
    Before,
    /// It was attached since: by the pod, or by netattach to enforce the pod's policies.
    Since,
    /// Unknown.
    Unknown,
}

/// Returns the origin of a program that was not recorded when the device was claimed. `loaded`: the kernel's
/// information about the program; `None`: none.
///
/// If the programs were not recorded at the claim, a program that was loaded before the claim belongs to the node's
/// administrator: no process of the pod existed then. netattach's own programs are loaded only once, and are attached
/// only for pods.
fn origin(home: &Home, loaded: Option<&LoadedProgram>) -> Origin {
    if home.programs.is_some() || loaded.is_some_and(|it| Program::is_one(&it.name)) {
        return Origin::Since;
    }
    match home.planned.zip(loaded.and_then(|it| it.loaded)) {
        Some((planned, at)) if at < planned => Origin::Before,
        Some(_) => Origin::Since,
        None => Origin::Unknown,
    }
}

fn all(host: &mut Handle, name: &str, index: u32) -> Result<Vec<OnDevice>, StepError> {
    listed(host, index)
        .map_err(|source| StepError::Device(DeviceError::ProgramsUnknown { device: name.to_owned(), source }))
}

fn listed(host: &mut Handle, index: u32) -> Result<Vec<OnDevice>, LeftError> {
    let mut found = on_hooks(index)?;
    let by_xdp = host.xdp_programs(index)?.into_iter();
    found.extend(by_xdp.map(|(place, program)| OnDevice { program, place: Place::Xdp(place) }));
    Ok(found)
}

fn on_hooks(index: u32) -> io::Result<Vec<OnDevice>> {
    let mut found = Vec::new();
    for hook in SharedHook::ALL {
        let on_hook = |OnHook { program, link }| OnDevice { program, place: Place::Hook(hook, link) };
        found.extend(as_far_as_told(sys::programs_on(index, hook))?.into_iter().map(on_hook));
    }
    Ok(found)
}

/// Returns no programs if this process lacks permission, as in a user namespace, from which no program can be
/// attached to a device either. No agent runs there, but a plugin without an agent may, and must be able to move
/// devices and give them back.
fn as_far_as_told(asked: io::Result<Vec<OnHook>>) -> io::Result<Vec<OnHook>> {
    match asked {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            tracing::debug!(error = %Chain(&error), "cannot list programs on devices");
            Ok(Vec::new())
        }
        asked => asked,
    }
}

fn remove(host: &mut Handle, index: u32, found: OnDevice) -> Result<(), LeftError> {
    match found.place {
        Place::Hook(_, Some(link)) => match sys::link_by_id(link)? {
            Some(link) => Ok(sys::link_detach(link.as_fd())?),
            None => Ok(()),
        },
        Place::Hook(hook, None) => {
            let Some(program) = sys::program_by_id(found.program)? else { return Ok(()) };
            match sys::detach_program(program.as_fd(), index, hook) {
                // Another process has detached it already.
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                done => Ok(done?),
            }
        }
        Place::Xdp(place) => match host.ensure_xdp_absent(index, place) {
            Err(error) if error.errno() == Some(Errno::BUSY) => {
                detach_xdp_link(host, index, (place, found.program))
            }
            done => Ok(done?),
        },
    }
}

/// Detaches the link that holds an XDP program on a device. A link reports the index of its device but not the
/// device's namespace (`bpf_xdp_link_fill_link_info`), and a device reports its program but not the link
/// (`rtnl_xdp_fill`). So of several candidates, the newest first, links are detached until the program is gone.
fn detach_xdp_link(host: &mut Handle, index: u32, on_link: (XdpPlace, u32)) -> Result<(), LeftError> {
    // Collects ids, not descriptors: a pod may have created as many such links as it has namespaces.
    let (mut links, mut last) = (Vec::new(), 0);
    while let Some(id) = sys::next_link(last)? {
        last = id;
        if xdp_link(id, (index, on_link.1)).is_some() {
            links.push(id);
        }
    }
    let mut is_there = true;
    for id in links.into_iter().rev() {
        if let Some(link) = xdp_link(id, (index, on_link.1)) {
            sys::link_detach(link.as_fd())?;
        }
        is_there = host.xdp_programs(index)?.contains(&on_link);
        if !is_there {
            break;
        }
    }
    if is_there { Err(LeftError::NoLink) } else { Ok(()) }
}

/// Returns the link with that id, if it runs this XDP program on a device with that index. A link that is gone
/// meanwhile does not.
fn xdp_link(id: u32, (index, program): (u32, u32)) -> Option<OwnedFd> {
    let link = sys::link_by_id(id).ok()??;
    let info = sys::link_info(link.as_fd()).ok()?;
    (info.is_xdp && (info.ifindex, info.program_id) == (index, program)).then_some(link)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows: HDV-programs.
    #[test]
    fn where_nobody_looked_what_was_loaded_before_the_claim_stays_and_what_is_in_doubt_goes() {
        let device = super::super::identity::tests::port(4, "eth1", None);
        let home = super::super::take_device::home(device, false);
        let program = |name: &str, loaded| LoadedProgram { name: name.to_owned(), loaded };
        let old = Home { planned: Some(100), ..home.clone() };
        let own = Program::ALL[0].name();
        let table = [
            (&old, Some(program("guard", Some(99))), Origin::Before),
            (&old, Some(program("guard", Some(100))), Origin::Since),
            (&old, Some(program("guard", Some(101))), Origin::Since),
            // It judged the pod, and the agent had loaded it long before.
            (&old, Some(program(own, Some(1))), Origin::Since),
            (&old, Some(program("guard", None)), Origin::Unknown),
            (&old, None, Origin::Unknown),
            (&home, Some(program("guard", Some(99))), Origin::Unknown),
        ];
        for (home, loaded, expected) in table {
            assert_eq!(origin(home, loaded.as_ref()), expected, "{loaded:?}");
        }
        // Programs recorded at the claim count more than the time.
        let seen = Home { programs: Some(vec![7]), ..old };
        assert_eq!(origin(&seen, Some(&program("guard", Some(99)))), Origin::Since);
    }

    #[test]
    fn programs_that_may_not_be_asked_for_fail_nothing_and_other_errors_do() {
        let refused = |errno: Errno| as_far_as_told(Err(io::Error::from(errno)));
        assert_eq!(refused(Errno::PERM).unwrap(), []);
        assert_eq!(refused(Errno::NOMEM).unwrap_err().kind(), io::ErrorKind::OutOfMemory);
        let there = vec![OnHook { program: 7, link: None }];
        assert_eq!(as_far_as_told(Ok(there.clone())).unwrap(), there);
    }
}
