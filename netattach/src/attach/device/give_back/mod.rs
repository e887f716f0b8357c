//! Gives a device back to the node in the state that it had before: first the settings made by its physical function,
//! because some cards accept no changes of a VF afterwards, then the device itself.
//!
//! | module | what it does |
//! |---|---|
//! | `find` | finds the device, in the pod or on the node |
//! | `function` | restores the settings that a VF's physical function makes |
//! | `restore` | moves the device to the node, and restores its own state |
//! | `unrecorded` | gives back a device that has no record |

mod find;
mod function;
mod restore;
#[cfg(test)]
mod tests;
mod unrecorded;

pub(in crate::attach) use self::find::find_home;
use self::find::find_in_pod;
use self::function::{set_address_again, settle_function};
pub(super) use self::restore::make_way;
use self::restore::{move_as_at_home, restore_at_home, restore_properties};
pub(in crate::attach) use self::unrecorded::{Unrecorded, give_back_by_alias};
use super::claims::Other;
use super::error::DeviceError;
use super::{above, bus, left_programs};
use crate::attach::StepError;
use crate::error_chain::Chain;
use crate::netlink::Handle;
use crate::netns::{Netns, NetnsError};
use crate::spec::Device;
use crate::step::{Claim, Home};
use crate::sysctl;

/// The namespace in which the pod's end of a device may be.
#[derive(Debug, Clone, Copy)]
pub(in crate::attach) enum PodEnd<'a> {
    /// In a namespace.
    In {
        /// The pod's namespace.
        netns: &'a Netns,
        /// The device's index in that namespace, if the device was moved.
        made: Option<u32>,
        /// The other devices of the node that the pod holds.
        others: &'a [Other],
    },
    /// The namespace is gone: the kernel has moved the device back to the node if it is a card, and deleted it
    /// otherwise.
    Gone,
}

/// Gives a device back. Leaves alone what already has its former state, so that the call can be repeated.
///
/// # Errors
/// The device's name is taken on the node, the card refuses, the device is in no known namespace, or a program of the
/// pod remains attached to the device: then the device is on the node and down.
pub(in crate::attach) fn give_back(
    host: &mut Handle,
    device: &Device,
    claim: &Claim,
    pod: PodEnd<'_>,
) -> Result<(), StepError> {
    let between = || namespace_between(device, sysctl::is_first_namespace(), Netns::private);
    give_back_by(host, device, claim, pod, Ways { between, take_off: left_programs::take_off })
}

/// The operations by which a device goes back.
struct Ways<B, T> {
    /// Creates [the intermediate namespace](namespace_between) that a VF passes through, if it uses one.
    between: B,
    /// Detaches the pod's programs from the device, once the device is on the node. Can be repeated.
    take_off: T,
}

/// Creates an intermediate namespace that no other process uses, in which a VF gets its former settings on its way
/// back. So the pod never holds the VF without the pod's VLAN, and the node never holds the VF with that VLAN. If the
/// agent ends meanwhile, this namespace ends too, and the kernel moves the VF to the machine's initial namespace.
///
/// Returns `None` if the initial namespace is not the node's, where the VF would be lost, or if no more namespaces
/// can be created. Then the VF moves directly to the node and gets its settings there while it is down, like a VF
/// whose pod's namespace has ended. On the node, only the administrator could set the VF up before that; in the pod,
/// the pod itself could, and send through the card without its VLAN.
fn namespace_between(
    device: &Device,
    is_first: bool,
    make: impl FnOnce() -> Result<Netns, NetnsError>,
) -> Option<Netns> {
    if !is_first {
        tracing::debug!(
            device = %device.id,
            "the VF keeps its pod's settings until it is on the node: from an intermediate namespace the kernel would move it elsewhere"
        );
        return None;
    }
    let made = make().inspect_err(|error| {
        tracing::warn!(
            device = %device.id, error = %Chain(error),
            "the VF keeps its pod's settings until it is on the node, where it is down"
        );
    });
    made.ok()
}

fn give_back_by(
    host: &mut Handle,
    device: &Device,
    claim: &Claim,
    pod: PodEnd<'_>,
    ways: Ways<impl FnOnce() -> Option<Netns>, impl Fn(&mut Handle, &Home, u32) -> Result<(), StepError>>,
) -> Result<(), StepError> {
    if let (PodEnd::Gone, Some(home)) = (pod, &claim.home)
        && find_home(host, home)?.is_none()
    {
        // Processes may still keep the namespace alive.
        check_it_is_nowhere(claim, home)?;
    }
    let Some(home) = &claim.home else { return settle_function(host, device, claim).map(drop) };
    if matches!(pod, PodEnd::Gone) && !claim.outlives_namespace() {
        // The device ended with the namespace: a device on the node with its name is another one.
        return settle_function(host, device, claim).map(drop);
    }
    let mut in_pod = None;
    if let PodEnd::In { netns, made, others } = pod
        && let Some((mut inside, found)) = find_in_pod(host, netns, (home, made), &device.pod_name)?
    {
        above::remove(&mut inside, &found, others)?;
        in_pod = Some((inside, found));
    }
    let mut settled = None;
    let found = match in_pod {
        Some((mut inside, mut found)) => {
            if let Some(error) = restore_properties(&mut inside, home, &found)? {
                // A program of the pod may forbid this MTU. The MTU is set again on the node, after the pod's
                // programs have been detached.
                tracing::debug!(
                    device = home.name, error = %Chain(&error),
                    "the device does not get its MTU in the pod"
                );
            }
            if device.function.is_some()
                && let Some(between) = (ways.between)()
            {
                move_as_at_home(host, &mut inside, &found, home, &between)?;
                inside = Handle::open_in(&between)?;
                found = inside
                    .device_named(&home.name)?
                    .ok_or_else(|| DeviceError::NotThere(claim.device.clone()))?;
                settled = Some(settle_function(host, device, claim));
                crate::crash_point!("give-back", "settled");
            }
            move_as_at_home(host, &mut inside, &found, home, &Netns::current()?)?;
            // Looked up by name alone: the device's other end may have moved to another namespace meanwhile.
            host.devices()?.into_iter().find(|it| it.link.name == home.name)
        }
        None => find_home(host, home)?,
    };
    if found.is_none() {
        check_it_is_nowhere(claim, home)?;
    }
    let settled = settled.unwrap_or_else(|| settle_function(host, device, claim));
    if let Some(found) = found {
        let at_home = (home, found.link.index);
        let taken_off = match pod {
            PodEnd::In { netns, others, .. } => take_off(host, at_home, (netns, others), ways.take_off),
            PodEnd::Gone => (ways.take_off)(host, home, found.link.index),
        };
        // With settings or programs of the pod, the device must not be up.
        let up = home.up && settled.is_ok() && taken_off.is_ok();
        restore_at_home(host, home, up, &found)?;
        taken_off?;
    }
    match settled? {
        true => set_address_again(host, device, claim),
        false => Ok(()),
    }
}

/// Detaches the pod's programs from a device that is back on the node. If that fails, removes the pod's links that
/// are still on top of the device, and retries.
fn take_off(
    host: &mut Handle,
    (home, index): (&Home, u32),
    (netns, others): (&Netns, &[Other]),
    by: impl Fn(&mut Handle, &Home, u32) -> Result<(), StepError>,
) -> Result<(), StepError> {
    by(host, home, index).or_else(|first| {
        if let Err(error) = above::remove_beyond(netns, index, others) {
            tracing::warn!(device = home.name, error = %Chain(&error), "cannot delete the pod's links on the device");
            return Err(first);
        }
        by(host, home, index)
    })
}

/// Whether a card is in no namespace: it was unplugged, or has no network driver any more.
pub(in crate::attach) fn is_nowhere(home: &Home) -> bool {
    home.parent.as_deref().is_some_and(bus::has_no_interface)
}

/// Checks that a device that was not found need not be found: a virtual device ends with its namespace, and a card
/// may have been unplugged or bound to a userspace driver. Any other device is lost and must be found.
fn check_it_is_nowhere(claim: &Claim, home: &Home) -> Result<(), StepError> {
    let Some(parent) = &home.parent else { return Ok(()) };
    let Some(on_bus) = bus::find(parent) else { return Ok(()) };
    match on_bus.network_driver() {
        Some(driver) => {
            let (driver, elsewhere) = (driver.to_owned(), !sysctl::is_first_namespace());
            Err(DeviceError::Lost { device: claim.device.clone(), driver, elsewhere }.into())
        }
        None => {
            tracing::warn!(
                device = claim.device,
                "the device has no network driver any more; its name is not given back"
            );
            Ok(())
        }
    }
}
