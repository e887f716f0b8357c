//! The device of an attachment in its pod, for an interface that another plugin made without an end on the
//! node.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::HookError;
use super::device::{DeviceHooks, HookProgram};
use super::numbers::{POD_FROM, POD_TO};
use crate::bpf::{LinkPlace, Program, Programs, Side};
use crate::netlink::Handle;
use crate::netns::{Netns, NetnsError, NetnsId};
use crate::spec::TcHook;

/// The device sends what the pod sends, and receives what the pod receives.
const PROGRAMS: [(TcHook, u32, Side); 2] =
    [(TcHook::Egress, POD_FROM, Side::FromPod), (TcHook::Ingress, POD_TO, Side::ToPod)];

/// A device in its pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PodDevice {
    /// Path of the pod's namespace.
    pub(crate) netns: PathBuf,
    /// Identity of that namespace.
    pub(crate) netns_id: NetnsId,
    /// Cookie of the namespace, where known: the kernel may reuse the identity of a namespace that has ended.
    pub(crate) netns_cookie: Option<u64>,
    /// Index of the device there.
    pub(crate) index: u32,
}

impl PodDevice {
    /// Returns the pod's namespace, if its path still denotes that one.
    ///
    /// # Errors
    /// This cannot be determined. In that case a program in a pod that may still exist does not count as
    /// unneeded.
    pub(crate) fn namespace(&self) -> Result<Option<Netns>, NetnsError> {
        Netns::of(&self.netns, self.netns_id, self.netns_cookie)
    }

    /// Returns a handle in the pod's namespace, if its path still denotes that one.
    ///
    /// # Errors
    /// As [`PodDevice::namespace`], or no handle can be opened in the namespace.
    pub(crate) fn handle(&self) -> Result<Option<Handle>, HookError> {
        let Some(netns) = Netns::of(&self.netns, self.netns_id, None)? else { return Ok(None) };
        Ok(Handle::open_in_that(&netns, self.netns_cookie)?)
    }
}

/// The programs of an attachment on its device in the pod. The class of filters is the attachment's number.
pub(crate) fn on(attachment: u32, device: &PodDevice) -> Result<DeviceHooks<'_>, HookError> {
    let (index, class) = (device.index, class(attachment)?);
    let programs = PROGRAMS.map(|(hook, number, side)| HookProgram {
        hook,
        number,
        class,
        program: Program::InPod(side),
        link: Some(link(attachment, index, side)),
    });
    Ok(DeviceHooks { index, pod: Some(device), programs: programs.into(), first: false })
}

/// Removes an attachment's links, wherever its device is. Idempotent.
pub(crate) fn unlink(attachment: u32, programs: &Programs) -> Result<(), HookError> {
    // The pin's path depends on the attachment alone.
    let places = PROGRAMS.map(|(_, _, side)| link(attachment, 0, side));
    Ok(places.into_iter().try_for_each(|place| programs.unlink(place))?)
}

/// Removes the links of attachments that are not `known`.
pub(crate) fn sweep(programs: &Programs, known: &BTreeSet<u32>) -> Result<(), HookError> {
    programs.linked_attachments()?.difference(known).try_for_each(|attachment| unlink(*attachment, programs))
}

/// An attachment's number as the class of a filter.
pub(super) fn class(attachment: u32) -> Result<u16, HookError> {
    u16::try_from(attachment).map_err(|_| HookError::NoClass(attachment))
}

fn link(attachment: u32, ifindex: u32, side: Side) -> LinkPlace {
    LinkPlace::Pod { attachment, ifindex, side }
}
