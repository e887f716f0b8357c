//! The device of an attachment in its pod: where another plugin made an interface without an end on the node.

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
    /// Which namespace that was.
    pub(crate) netns_id: NetnsId,
    /// Its cookie, where it is known: the kernel gives the number of a namespace that has ended to another.
    pub(crate) netns_cookie: Option<u64>,
    /// Index of the device there.
    pub(crate) index: u32,
}

impl PodDevice {
    /// The pod's namespace, if it is still that one.
    ///
    /// # Errors
    /// That cannot be told: a program of a pod that may be there is not to count as one that nobody needs.
    pub(crate) fn namespace(&self) -> Result<Option<Netns>, NetnsError> {
        Netns::of(&self.netns, self.netns_id, self.netns_cookie)
    }

    /// A handle in the pod's namespace, if it is still that one.
    ///
    /// # Errors
    /// As of [`PodDevice::namespace`], or no handle can be opened there.
    pub(super) fn handle(&self) -> Result<Option<Handle>, HookError> {
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

/// Takes an attachment's links away, wherever its device is. Idempotent.
pub(crate) fn unlink(attachment: u32, programs: &Programs) -> Result<(), HookError> {
    // The pin is found by the attachment alone.
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
