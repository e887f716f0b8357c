//! The programs that a pod has left on a device which comes home: they would see what the node sends and receives by it.
//!
//! Programs of XDP, of tcx and of a netkit pair stay on a device that goes to another namespace. Queueing disciplines do not,
//! with whatever filters they have: the kernel shuts them down with each move.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;

use super::StepError;
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
/// it. Where nobody looked what was there, what was loaded before the claim stays, and what nothing is known of goes. The handle
/// is that of the calling thread's namespace. Idempotent; every program is tried even if another one stays.
///
/// Here and not in the pod, whose processes could attach the next one. A program that another agent of the node attaches in
/// the moment before counts as the pod's: nothing tells the two apart.
///
/// # Errors
/// One stays; it is named.
pub(super) fn take_off(host: &mut Handle, home: &Home, index: u32) -> Result<(), StepError> {
    let mut failed = None;
    let was_seen = |it: &OnDevice| home.programs.as_ref().is_some_and(|seen| seen.contains(&it.program));
    for found in all(host, &home.name, index)?.into_iter().filter(|it| !was_seen(it)) {
        let (device, program) = (&home.name, found.program);
        let loaded = sys::loaded_program(found.program).ok().flatten();
        let origin = origin(home, loaded.as_ref());
        // One that is gone meanwhile has no name.
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
                failed.get_or_insert(StepError::ProgramLeft { device, program, name, source });
            }
        }
    }
    failed.map_or(Ok(()), Err)
}

/// Since when a program is on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// Since before the pod had the device.
    Before,
    /// Since the pod had it: the pod's, or one that judged it.
    Since,
    /// Nothing tells.
    Unknown,
}

/// Since when a program is on a device that was not seen there when the device was claimed. `loaded`: what the kernel tells of
/// it; `None`: nothing.
///
/// One that was loaded before the claim is the node's administrator's where nobody looked then: none of the pod's processes was
/// there to load it. Ours are loaded once, and judge pods only.
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
/// that counts (`bpf_xdp_link_fill_link_info`), and a device its program and not the link (`rtnl_xdp_fill`): of several that it
/// may be, one after another goes until the program has, the newest first.
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
        // Whoever looked knows better than the time.
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
