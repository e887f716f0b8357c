//! The programs that a pod has left on a device which comes home: they would see what the node sends and receives by it.
//!
//! Programs of XDP, of tcx and of a netkit pair stay on a device that goes to another namespace. Queueing disciplines do not,
//! with whatever filters they have: the kernel shuts them down with each move.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;

use super::StepError;
use crate::bpf::Program;
use crate::bpf::sys::{self, OnHook, SharedHook};
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
    /// A link holds an XDP program, and none of the machine's is it.
    #[error("the link that holds it is not found")]
    NoLink,
}

/// A program on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct OnDevice {
    /// Kernel's id.
    program: u32,
    place: Place,
}

/// Where a program is on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// On that hook, by the link of that id if one holds it.
    Hook(SharedHook, Option<u32>),
    Xdp(XdpPlace),
}

/// Kernel's ids of the programs that are on a device and would go with it to a pod. The device is one of the calling thread's
/// namespace; the XDP programs are those that it was found with.
///
/// # Errors
/// The kernel does not list them.
pub(super) fn running(found: &DeviceState) -> Result<Vec<u32>, StepError> {
    let on_hooks = on_hooks(found.link.index).map_err(|source| {
        let device = found.link.name.clone();
        StepError::ProgramsUnknown { device, source: source.into() }
    })?;
    let on_hooks = on_hooks.into_iter().map(|it| it.program);
    Ok(on_hooks.chain(found.xdp.iter().map(|(_, program)| *program)).collect())
}

/// Takes everything off a device of the node that was not there before a pod had it, the programs that judged the pod among
/// it. The handle is that of the calling thread's namespace. Idempotent; every program is tried even if another one stays.
///
/// Here and not in the pod, whose processes could attach the next one. A program that another agent of the node attaches in
/// the moment before counts as the pod's: nothing tells the two apart.
///
/// # Errors
/// One stays; it is named.
pub(super) fn take_off(host: &mut Handle, home: &Home, index: u32) -> Result<(), StepError> {
    let mut failed = None;
    for found in all(host, &home.name, index)?.into_iter().filter(|it| !home.programs.contains(&it.program)) {
        // One that is gone meanwhile has no name.
        let name = sys::program_name(found.program).ok().flatten().unwrap_or_default();
        match remove(host, index, found) {
            Ok(()) if is_ours(&name) => {}
            Ok(()) => {
                let (device, program) = (&home.name, found.program);
                tracing::info!(device, program, name, "its pod has left a program on the device; taken off");
            }
            Err(source) => {
                let (device, program) = (home.name.clone(), found.program);
                failed.get_or_insert(StepError::ProgramLeft { device, program, name, source });
            }
        }
    }
    failed.map_or(Ok(()), Err)
}

fn is_ours(name: &str) -> bool {
    Program::ALL.iter().any(|program| program.name() == name)
}

fn all(host: &mut Handle, name: &str, index: u32) -> Result<Vec<OnDevice>, StepError> {
    listed(host, index).map_err(|source| StepError::ProgramsUnknown { device: name.to_owned(), source })
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

/// None where this process may not ask, as in a user namespace, from which no program is put on a device either. No agent is
/// there; a plugin without one may be, and has to give devices and get them back there too.
fn as_far_as_told(asked: io::Result<Vec<OnHook>>) -> io::Result<Vec<OnHook>> {
    match asked {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            tracing::debug!(%error, "programs on devices are not looked for");
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
                // Somebody else was quicker.
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

/// Detaches the link that holds an XDP program on a device. A link tells the index of its device and not in which namespace
/// that counts: of several that it may be, one after another goes until the program has, the newest first.
fn detach_xdp_link(host: &mut Handle, index: u32, on_link: (XdpPlace, u32)) -> Result<(), LeftError> {
    // Ids and not descriptors: a pod may have made as many as it has namespaces.
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

/// The link with that id, if it runs this XDP program on a device with that index. One that is gone meanwhile does not.
fn xdp_link(id: u32, (index, program): (u32, u32)) -> Option<OwnedFd> {
    let link = sys::link_by_id(id).ok()??;
    let info = sys::link_info(link.as_fd()).ok()?;
    (info.is_xdp && (info.ifindex, info.program_id) == (index, program)).then_some(link)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_that_may_not_be_asked_for_fail_nothing_and_other_errors_do() {
        let refused = |errno: Errno| as_far_as_told(Err(io::Error::from(errno)));
        assert_eq!(refused(Errno::PERM).unwrap(), []);
        assert_eq!(refused(Errno::NOMEM).unwrap_err().kind(), io::ErrorKind::OutOfMemory);
        let there = vec![OnHook { program: 7, link: None }];
        assert_eq!(as_far_as_told(Ok(there.clone())).unwrap(), there);
    }
}
