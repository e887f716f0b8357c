//! Moves a device to the node, and restores its names, properties and settings there.

use std::os::fd::AsFd;

use super::find::find_home;
use crate::attach::StepError;
use crate::attach::device::DeviceError;
use crate::error_chain::Chain;
use crate::mac::Mac;
use crate::netlink::{self, DeviceState, Handle};
use crate::netns::Netns;
use crate::spec::Conduct;
use crate::step::Home;

/// Moves a device to another namespace with the name, the alias and the link group that it has on the node, and
/// without alternative names.
///
/// # Errors
/// The name is taken on the node or in the target namespace.
pub(super) fn move_as_at_home(
    host: &mut Handle,
    inside: &mut Handle,
    found: &DeviceState,
    home: &Home,
    to: &Netns,
) -> Result<(), StepError> {
    // The kernel would refuse the name only after the move.
    if host.find_link(&home.name)?.is_some() {
        return Err(DeviceError::HomeTaken(home.name.clone()).into());
    }
    if !found.other_names.is_empty() {
        inside.remove_other_names(found.link.index, &found.other_names)?;
    }
    let (name, alias) = (&home.name, home.alias.as_deref());
    let moved = inside.move_device(found.link.index, to.as_fd(), name, alias, home.group);
    moved.map_err(|source| match source.already_exists() {
        true => StepError::Device(DeviceError::HomeTaken(home.name.clone())),
        false => source.into(),
    })
}

/// Restores properties of the device that the pod may have changed, while the device is still in its current
/// namespace. Returns why the MTU could not be restored, if so: the card, the device beneath or a program may not
/// allow this MTU any more.
pub(super) fn restore_properties(
    namespace: &mut Handle,
    home: &Home,
    found: &DeviceState,
) -> Result<Option<netlink::Error>, StepError> {
    let index = found.link.index;
    if found.link.up {
        namespace.set_down(index)?;
    }
    let mut refused = None;
    if home.mtu != 0 && found.link.mtu != home.mtu {
        refused = namespace.set_mtu(index, home.mtu).err();
    }
    namespace.set_reception(index, home.reception)?;
    Ok(refused)
}

/// Restores the remaining state, on the node; all of it for a device that the kernel has moved back.
pub(super) fn restore_at_home(
    host: &mut Handle,
    home: &Home,
    up: bool,
    found: &DeviceState,
) -> Result<(), StepError> {
    let index = found.link.index;
    if found.link.name == home.name && found.link.mtu == home.mtu {
        // The kernel, which may have moved the device back, has left this as it was in the pod.
        host.set_reception(index, home.reception)?;
    } else if let Some(error) = restore_properties(host, home, found)? {
        let (device, mtu) = (&home.name, home.mtu);
        tracing::warn!(
            device, mtu, error = %Chain(&error),
            "the device does not get its MTU back; it keeps the one that it has"
        );
    }
    remove_strange_names(host, home, found)?;
    if found.link.name != home.name {
        host.rename(index, &home.name).map_err(|source| match source.already_exists() {
            true => StepError::Device(DeviceError::HomeTaken(home.name.clone())),
            false => source.into(),
        })?;
    }
    if found.alias != home.alias {
        host.set_alias(index, home.alias.as_deref().unwrap_or_default())?;
    }
    if found.link.group != home.group {
        host.set_group(index, home.group)?;
    }
    if let Some(mac) = home.mac.filter(|mac| found.link.mac != Some(*mac)) {
        // A card may insist on the address that its physical function has set; the settings that matter are restored.
        if let Err(error) = host.set_mac(index, mac) {
            tracing::warn!(
                device = home.name, %mac, error = %Chain(&error),
                "the device keeps the address that it had in the pod"
            );
        }
    }
    restore_conduct(host, home, found)?;
    let missing: Vec<String> =
        home.other_names.iter().filter(|it| !found.other_names.contains(it)).cloned().collect();
    if !missing.is_empty()
        && let Err(error) = host.add_other_names(index, &missing)
    {
        tracing::warn!(device = home.name, error = %Chain(&error), "other names of the device not given back");
    }
    tracing::debug!(device = home.name, "given back");
    if !up {
        return Ok(host.set_down(index)?);
    }
    // For example a VLAN whose parent is down now.
    if let Err(error) = host.ensure_up(index) {
        tracing::warn!(device = home.name, error = %Chain(&error), "the device is back on the node, but cannot be set up");
    }
    Ok(())
}

/// Removes names of other devices from a device that the kernel has moved back from a pod, as those devices need
/// their names. The device gets its own name when it is given back.
pub(in crate::attach::device) fn make_way(host: &mut Handle, home: &Home) -> Result<(), StepError> {
    let Some(found) = find_home(host, home)? else { return Ok(()) };
    let index = found.link.index;
    remove_strange_names(host, home, &found)?;
    if found.link.name != home.name {
        // The kernel inserts the first free number, as it does itself if a name is taken.
        host.rename(index, "dev%d")?;
    }
    Ok(())
}

/// Removes the alternative names that the pod has given to the device.
fn remove_strange_names(host: &mut Handle, home: &Home, found: &DeviceState) -> Result<(), StepError> {
    let strange: Vec<String> =
        found.other_names.iter().filter(|it| !home.other_names.contains(it)).cloned().collect();
    Ok(host.remove_other_names(found.link.index, &strange)?)
}

/// Returns how a device sends and receives on the node. If that was not stored, returns the kernel's defaults for
/// devices with Ethernet addresses; devices of other kinds keep their settings.
pub(super) fn conduct_at_home(home: &Home, found: &DeviceState) -> Conduct {
    let is_usual = matches!(&*found.link.kind, "" | "veth" | "macvlan" | "macvtap" | "vlan");
    match home.conduct {
        Some(conduct) => conduct,
        None if is_usual && found.link.mac.is_some() => {
            let (broadcast, queue) = (Some(Mac([0xff; 6])), found.conduct.queue);
            Conduct { broadcast, arp: true, multicast: true, mode: 0, queue }
        }
        None => found.conduct,
    }
}

/// Restores how a device on the node sends and receives: a pod may have changed its broadcast address or disabled
/// ARP.
pub(super) fn restore_conduct(host: &mut Handle, home: &Home, found: &DeviceState) -> Result<(), StepError> {
    let (index, wanted) = (found.link.index, conduct_at_home(home, found));
    if (Conduct { queue: wanted.queue, ..found.conduct }) != wanted {
        host.set_conduct(index, &wanted)?;
    }
    if found.conduct.queue != wanted.queue
        && let Err(error) = host.set_queue(index, wanted.queue)
    {
        tracing::warn!(
            device = home.name, error = %Chain(&error),
            "the device keeps the length of its queue in the pod"
        );
    }
    Ok(())
}
