//! A device without a record: it goes back by what was written to the device itself, and to a file, when it was moved.

use super::find::{find_in_pod, if_told};
use super::restore::{move_as_at_home, restore_at_home, restore_conduct, restore_properties};
use super::take_off;
use crate::attach::StepError;
use crate::attach::device::claims::Other;
use crate::attach::device::identity::{self, Inside};
use crate::attach::device::take_device::group_on_node;
use crate::attach::device::{above, left_programs};
use crate::cni::identifier::check_link_name;
use crate::error_chain::Chain;
use crate::mac::Mac;
use crate::netlink::{DeviceState, Handle};
use crate::netns::Netns;
use crate::spec::{OWN_GROUPS, Reception};
use crate::step::Home;

/// A device to give back that has no record.
#[derive(Debug, Clone, Copy)]
pub(in crate::attach) struct Unrecorded<'a> {
    /// The container, and the device's name in it.
    pub of: (&'a str, &'a str),
    /// The other devices of the node that the pod holds according to records.
    pub others: &'a [Other],
    /// Whether only a card is accepted.
    pub card: bool,
    /// Whether the device was given an Ethernet address.
    pub has_mac: bool,
    /// The device's state on the node before the move, if the plugin has stored it.
    pub home: Option<&'a Home>,
    /// The link group that the plugin has given the device, if the device had the default group.
    pub group: u32,
}

/// A device in its pod, with a handle in the pod's namespace, and the device's former state on the node, if stored.
type InPod<'k> = (Handle, DeviceState, Option<&'k Home>);

impl Unrecorded<'_> {
    /// Returns the alias that marks the device on the node until it has its former state, with or without programs of
    /// its pod. Only this alias identifies the device to a later DEL. Earlier versions find the device by the same
    /// wording.
    pub(super) fn mark(&self) -> String {
        let (container, name) = self.of;
        // An alias has 255 bytes at most.
        format!("netattach: has programs of {name} of {}", container.get(..128).unwrap_or(container))
    }

    /// Returns the device in its pod, with a handle there, and the stored former state if that state belongs to this
    /// device: the pod may have replaced the device.
    fn in_pod(&self, host: &mut Handle, netns: &Netns) -> Result<Option<InPod<'_>>, StepError> {
        let Self { of: (_, pod_name), others, card, home, group, .. } = *self;
        // A device with another record goes back by that record, with its settings and under its own name, which its
        // current alias need not contain.
        let is_of_another = |found: &DeviceState| {
            let found = std::slice::from_ref(found);
            let is_it = |Other { home, made }: &Other| {
                identity::in_pod(home, found, Inside { index: *made, ..Inside::default() }).is_some()
            };
            others.iter().any(is_it)
        };
        if let Some(home) = home
            && let Some((inside, found)) = find_in_pod(host, netns, (home, None), pod_name)?
        {
            // The device at this path may belong to another container now.
            let is_taken = found.link.group & OWN_GROUPS != 0 && found.link.group != group;
            if !is_taken && !is_of_another(&found) {
                return Ok(Some((inside, found, Some(home))));
            }
        }
        let is_it = |found: &DeviceState| {
            let may_be =
                found.link.name == pod_name && found.alias.is_some() && (found.parent.is_some() || !card);
            may_be && !is_of_another(found)
        };
        let mut inside = Handle::open_in(netns)?;
        let Some(found) = if_told(inside.device_named(pod_name))?.filter(is_it) else { return Ok(None) };
        if inside.is_blurred(found.link.index)? {
            return Ok(None);
        }
        Ok(Some((inside, found, None)))
    }
}

/// Gives back a device that has no record, using what was written to the device when it was moved: by the plugin
/// without an agent, by the reference plugin, or by an agent whose record has lost the device. In the last case the
/// device must be a `card`: any other device may have been created by the pod, which would thereby place it on the
/// node.
///
/// If the plugin has stored the former state, the device gets that state again, but stays down. Otherwise nothing
/// tells which programs were attached before, so all programs are detached.
///
/// # Errors
/// A program stays attached on the node, or the device's former way to send and receive cannot be restored. The
/// device is then down on the node, as it is if this process is killed after the move; a later call finds the device
/// by its alias.
pub(in crate::attach) fn give_back_by_alias(
    host: &mut Handle,
    unrecorded: Unrecorded<'_>,
    netns: Option<&Netns>,
) -> Result<(), StepError> {
    give_back_unrecorded(host, unrecorded, netns, left_programs::take_off)
}

/// Like [`give_back_by_alias`]. `by` detaches the pod's programs from the device, once the device is on the node.
pub(super) fn give_back_unrecorded(
    host: &mut Handle,
    unrecorded: Unrecorded<'_>,
    netns: Option<&Netns>,
    by: impl Fn(&mut Handle, &Home, u32) -> Result<(), StepError>,
) -> Result<(), StepError> {
    let Unrecorded { others, has_mac, home: kept, group, .. } = unrecorded;
    let in_pod = netns.map(|netns| unrecorded.in_pod(host, netns)).transpose()?.flatten();
    // The device keeps the mark until it has its former state.
    let mark = Some(unrecorded.mark());
    let (home, kept, back) = match in_pod {
        Some((mut inside, found, kept)) => {
            let alias = found.alias.as_deref().unwrap_or_default();
            let name = name_by_alias(host, kept.map_or(alias, |kept| kept.name.as_str()))?;
            let home = Home { name, alias: mark, ..kept.cloned().unwrap_or_else(|| unknown(&found)) };
            if kept.is_some()
                && let Some(error) = restore_properties(&mut inside, &home, &found)?
            {
                tracing::debug!(
                    device = home.name, error = %Chain(&error),
                    "the device does not get its MTU in the pod"
                );
            }
            above::remove(&mut inside, &found, others)?;
            // Moves the device and sets the mark in one netlink request.
            move_as_at_home(host, &mut inside, &found, &home, &Netns::current()?)?;
            let back = host.device_named(&home.name)?;
            (home, kept, back)
        }
        None => {
            let devices = host.devices()?;
            let marked = devices.iter().find(|it| it.alias == mark);
            // Any other device that the kernel has moved back stays as it is: an alias given by the pod cannot be
            // told from the node's own.
            let back = marked.or_else(|| came_home(kept?, &devices, group));
            let Some(back) = back.cloned() else { return Ok(()) };
            let name = match kept {
                Some(kept) if kept.name != back.link.name => name_by_alias(host, &kept.name)?,
                _ => back.link.name.clone(),
            };
            let home = Home { name, alias: mark, ..kept.cloned().unwrap_or_else(|| unknown(&back)) };
            (home, kept, Some(back))
        }
    };
    let Some(back) = back else { return Ok(()) };
    let index = back.link.index;
    let restored = match kept {
        Some(_) => restore_at_home(host, &home, false, &back),
        None => restore_usual(host, (&home, has_mac), &back),
    };
    let taken_off = match netns {
        Some(netns) => take_off(host, (&home, index), (netns, others), by),
        None => by(host, &home, index),
    };
    // Of two errors, that of a program that stays attached is reported.
    taken_off.and(restored)?;
    let alias = kept.and_then(|kept| kept.alias.as_deref());
    Ok(host.set_alias(index, alias.unwrap_or_default())?)
}

/// Returns what can be derived of a device's former state on the node if that state was not stored.
fn unknown(found: &DeviceState) -> Home {
    Home {
        name: found.alias.clone().unwrap_or_default(),
        index: found.link.index,
        kind: found.link.kind.clone(),
        link: None,
        mac: None,
        permanent: found.permanent,
        parent: found.parent.clone(),
        among: false,
        mtu: 0,
        up: false,
        alias: None,
        group: group_on_node(&found.link),
        other_names: Vec::new(),
        programs: None,
        planned: None,
        conduct: None,
        reception: Reception::default(),
    }
}

/// Returns the card that the kernel has moved back because its namespace has ended, if its marks are unchanged since:
/// it has the group that marks its container or, if it had a group of its own, its name on the node as its alias. Any
/// device other than a card has ended with its namespace.
pub(super) fn came_home<'d>(home: &Home, devices: &'d [DeviceState], group: u32) -> Option<&'d DeviceState> {
    let is_card = home.parent.is_some() || home.permanent.is_some();
    let found = identity::at_home(home, devices).filter(|_| is_card)?;
    let is_as_moved = match home.group {
        0 => found.link.group == group,
        _ => found.alias.as_deref() == Some(&*home.name) && found.alias != home.alias,
    };
    is_as_moved.then_some(found)
}

/// Makes a device whose former state was not stored send and receive as its kind does by default, and restores the
/// permanent Ethernet address if the device was given another one.
fn restore_usual(
    host: &mut Handle,
    (home, has_mac): (&Home, bool),
    found: &DeviceState,
) -> Result<(), StepError> {
    host.set_reception(found.link.index, Reception::default())?;
    // A device without a record gets no address other than its permanent one.
    if let Some(own) = lost_address(found).filter(|_| has_mac)
        && let Err(error) = host.set_mac(found.link.index, own)
    {
        tracing::warn!(
            device = home.name, %own, error = %Chain(&error),
            "the device keeps the address that it had in the pod"
        );
    }
    restore_conduct(host, home, found)
}

/// Returns the device's name on the node according to its alias. The pod may have changed the alias to an invalid
/// name or to another device's name: this must neither prevent the move, nor make the kernel choose a name under
/// which the device cannot be found again.
fn name_by_alias(host: &mut Handle, alias: &str) -> Result<String, StepError> {
    // The kernel replaces `%d` by a number.
    let is_name = check_link_name(alias).is_ok() && !alias.contains('%');
    if is_name && host.find_link(alias)?.is_none() {
        return Ok(alias.to_owned());
    }
    let name = free_name(&host.devices()?);
    tracing::warn!(alias, name, "the device cannot have the name that its alias has, and gets another one");
    Ok(name)
}

/// Returns the first free name of the form that the kernel gives to devices in [`make_way`](super::make_way).
pub(super) fn free_name(present: &[DeviceState]) -> String {
    let is_taken =
        |name: &String| present.iter().any(|it| it.link.name == *name || it.other_names.contains(name));
    let mut free = (0..=u32::MAX).map(|number| format!("dev{number}")).skip_while(is_taken);
    free.next().unwrap_or_default()
}

/// Returns a device's permanent address, if its current address is another one.
pub(super) fn lost_address(found: &DeviceState) -> Option<Mac> {
    found.permanent.filter(|own| found.link.mac != Some(*own))
}
