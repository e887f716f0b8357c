//! Finds a device that goes back: in its pod, whatever its name there, or on the node.

use std::os::fd::AsFd;

use crate::attach::StepError;
use crate::attach::device::identity::{self, Inside};
use crate::error_chain::Chain;
use crate::netlink::{self, DeviceState, Handle};
use crate::netns::Netns;
use crate::step::Home;

/// Returns the device on the node.
pub(in crate::attach) fn find_home(host: &mut Handle, home: &Home) -> Result<Option<DeviceState>, StepError> {
    Ok(identity::at_home(home, &host.devices()?).cloned())
}

/// Returns the device in the pod, whatever its name there, with a handle there. `made`: its index there, if it was
/// moved.
pub(super) fn find_in_pod(
    host: &mut Handle,
    netns: &Netns,
    (home, made): (&Home, Option<u32>),
    pod_name: &str,
) -> Result<Option<(Handle, DeviceState)>, StepError> {
    let mut pod = Handle::open_in(netns)?;
    let devices = match pod.devices() {
        // The pod's administrator has created too many devices. The device is looked up by the index and the name
        // with which it was moved.
        Err(error) if error.is_too_many() => {
            tracing::warn!(device = home.name, error = %Chain(&error), "not all devices of the pod are checked");
            pod = Handle::open_in(netns)?;
            as_moved(&mut pod, made, pod_name)?
        }
        devices => devices?,
    };
    let leads_home = match home.link.map(|other| host.link_by_index(other)) {
        Some(Err(netlink::Error::NoSuchLink(_))) | None => false,
        Some(shown) => shown.map(|_| true)?,
    };
    // Asked after the dump: the node's namespace gets an id in the pod's namespace only when the kernel reports a
    // device that refers to it.
    let node = if leads_home { pod.number_of(Netns::current()?.as_fd())? } else { None };
    let found = identity::in_pod(home, &devices, Inside { index: made, leads_home, node }).cloned();
    let Some(found) = found else { return Ok(None) };
    // The node could not list its links with this device among them. The device ends with its namespace.
    if pod.is_blurred(found.link.index)? {
        tracing::warn!(
            device = home.name,
            "its pod has configured more on the device than a netlink message can describe; the device stays in the pod"
        );
        return Ok(None);
    }
    Ok(Some((pod, found)))
}

/// Returns the devices of a pod that have the index or the name with which a device was moved there.
fn as_moved(pod: &mut Handle, made: Option<u32>, name: &str) -> Result<Vec<DeviceState>, StepError> {
    let mut devices = Vec::from_iter(if_told(pod.device_named(name))?);
    if let Some(index) = made
        && !devices.iter().any(|it| it.link.index == index)
    {
        devices.extend(if_told(pod.device_by_index(index))?);
    }
    Ok(devices)
}

/// Returns a device in a pod, if the kernel can report it. The kernel always reports a card, whatever the pod
/// changed; any other device may be one that the pod created under the name that is looked up.
pub(super) fn if_told(
    found: Result<Option<DeviceState>, netlink::Error>,
) -> Result<Option<DeviceState>, netlink::Error> {
    match found {
        Err(error) if error.is_untold() => Ok(None),
        found => found,
    }
}
