//! Gives a device back to the node in the state that it had before: first the settings made by its physical function,
//! because some cards accept no changes of a VF afterwards, then the device itself.

use std::os::fd::AsFd;

use super::card::physical;
use super::devices::Other;
use super::identity::{self, Inside};
use super::take_device::group_on_node;
use super::{above, bus, left_programs};
use crate::attach::StepError;
use crate::cni::identifier::check_link_name;
use crate::error_chain::Chain;
use crate::mac::Mac;
use crate::netlink::{self, DeviceState, Handle};
use crate::netns::{Netns, NetnsError};
use crate::spec::{Conduct, Device, OWN_GROUPS, VfSettings};
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
    let Some(home) = &claim.home else { return settle_function(host, device, claim) };
    if matches!(pod, PodEnd::Gone) && !claim.outlives_namespace() {
        // The device ended with the namespace: a device on the node with its name is another one.
        return settle_function(host, device, claim);
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
                move_as_at_home(host, &mut inside, (&found, home), &between)?;
                inside = Handle::open_in(&between)?;
                found = inside
                    .device_named(&home.name)?
                    .ok_or_else(|| StepError::NoDevice(claim.device.clone()))?;
                settled = Some(settle_function(host, device, claim));
                crate::crash_point!("give-back", "settled");
            }
            move_as_at_home(host, &mut inside, (&found, home), &Netns::current()?)?;
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
        restore_at_home(host, (home, up), &found)?;
        taken_off?;
    }
    settled
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
    fn mark(&self) -> String {
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
fn give_back_unrecorded(
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
            move_as_at_home(host, &mut inside, (&found, &home), &Netns::current()?)?;
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
        Some(_) => restore_at_home(host, (&home, false), &back),
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
    }
}

/// Returns the card that the kernel has moved back because its namespace has ended, if its marks are unchanged since:
/// it has the group that marks its container or, if it had a group of its own, its name on the node as its alias. Any
/// device other than a card has ended with its namespace.
fn came_home<'d>(home: &Home, devices: &'d [DeviceState], group: u32) -> Option<&'d DeviceState> {
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

/// Returns the first free name of the form that the kernel gives to devices in [`make_way`].
fn free_name(present: &[DeviceState]) -> String {
    let is_taken =
        |name: &String| present.iter().any(|it| it.link.name == *name || it.other_names.contains(name));
    let mut free = (0..=u32::MAX).map(|number| format!("dev{number}")).skip_while(is_taken);
    free.next().unwrap_or_default()
}

/// Returns a device's permanent address, if its current address is another one.
fn lost_address(found: &DeviceState) -> Option<Mac> {
    found.permanent.filter(|own| found.link.mac != Some(*own))
}

/// Returns the device on the node.
pub(in crate::attach) fn find_home(host: &mut Handle, home: &Home) -> Result<Option<DeviceState>, StepError> {
    Ok(identity::at_home(home, &host.devices()?).cloned())
}

/// Returns the device in the pod, whatever its name there, with a handle there. `made`: its index there, if it was
/// moved.
fn find_in_pod(
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
fn if_told(
    found: Result<Option<DeviceState>, netlink::Error>,
) -> Result<Option<DeviceState>, netlink::Error> {
    match found {
        Err(error) if error.is_untold() => Ok(None),
        found => found,
    }
}

/// Removes names of other devices from a device that the kernel has moved back from a pod, as those devices need
/// their names. The device gets its own name when it is given back.
pub(super) fn make_way(host: &mut Handle, home: &Home) -> Result<(), StepError> {
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

/// Restores the settings of a VF that its physical function makes.
fn settle_function(host: &mut Handle, device: &Device, claim: &Claim) -> Result<(), StepError> {
    let (Some(function), Some(before)) = (&device.function, &claim.settings) else { return Ok(()) };
    let Some((index, present)) = physical(host, function)? else {
        // The card is gone, or has fewer functions now, or its interface is in another namespace temporarily.
        return match bus::find(&claim.device) {
            Some(found) if found.function.as_ref() == Some(function) => {
                Err(StepError::NoPhysicalFunction(function.physical.clone()))
            }
            _ => Ok(()),
        };
    };
    let own = claim.home.as_ref().and_then(|home| home.mac);
    let mut failed = None;
    for (setting, one) in before.beyond(&present).each() {
        let set = match one.mac {
            Some(mac) => release_address(host, (index, function.number), (mac, own)),
            None => host.set_vf(index, function.number, &one),
        };
        if let Err(source) = set {
            failed.get_or_insert(StepError::VfSetting { setting, function: function.clone(), source });
        }
    }
    failed.map_or(Ok(()), Err)
}

/// Restores a VF's address, with the first value that its card accepts.
fn release_address(
    host: &mut Handle,
    (index, number): (u32, u32),
    (before, own): (Mac, Option<Mac>),
) -> Result<(), netlink::Error> {
    let address = |mac| VfSettings { mac: Some(mac), ..VfSettings::default() };
    let mut set = Ok(());
    for way in ways_back(before, own) {
        set = host.set_vf(index, number, &address(way));
        if set.is_ok() {
            break;
        }
    }
    set
}

/// Returns the addresses that a physical function may restore for a VF, in order of preference. First zero, so that
/// the VF chooses its address again, as most cards reported zero or the VF's own address before. Then the address
/// reported before. Last the VF's own address on the node: some cards accept only a valid address
/// (`qede_set_vf_mac`), and had reported none.
fn ways_back(before: Mac, own: Option<Mac>) -> Vec<Mac> {
    let mut ways = vec![Mac([0; 6])];
    for way in std::iter::once(before).chain(own) {
        if !ways.contains(&way) {
            ways.push(way);
        }
    }
    ways
}

/// Restores properties of the device that the pod may have changed, while the device is still in its current
/// namespace. Returns why the MTU could not be restored, if so: the card, the device beneath or a program may not
/// allow this MTU any more.
fn restore_properties(
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
    namespace.set_selective(index)?;
    Ok(refused)
}

/// Moves a device to another namespace with the name, the alias and the link group that it has on the node, and
/// without alternative names.
///
/// # Errors
/// The name is taken on the node or in the target namespace.
fn move_as_at_home(
    host: &mut Handle,
    inside: &mut Handle,
    (found, home): (&DeviceState, &Home),
    to: &Netns,
) -> Result<(), StepError> {
    // The kernel would refuse the name only after the move.
    if host.find_link(&home.name)?.is_some() {
        return Err(StepError::HomeTaken(home.name.clone()));
    }
    if !found.other_names.is_empty() {
        inside.remove_other_names(found.link.index, &found.other_names)?;
    }
    let (name, alias) = (&home.name, home.alias.as_deref());
    let moved = inside.move_device(found.link.index, to.as_fd(), name, alias, home.group);
    moved.map_err(|source| match source.already_exists() {
        true => StepError::HomeTaken(home.name.clone()),
        false => source.into(),
    })
}

/// Restores the remaining state, on the node; all of it for a device that the kernel has moved back.
fn restore_at_home(
    host: &mut Handle,
    (home, up): (&Home, bool),
    found: &DeviceState,
) -> Result<(), StepError> {
    let index = found.link.index;
    if (found.link.name != home.name || found.link.mtu != home.mtu)
        && let Some(error) = restore_properties(host, home, found)?
    {
        let (device, mtu) = (&home.name, home.mtu);
        tracing::warn!(
            device, mtu, error = %Chain(&error),
            "the device does not get its MTU back; it keeps the one that it has"
        );
    }
    remove_strange_names(host, home, found)?;
    if found.link.name != home.name {
        host.rename(index, &home.name).map_err(|source| match source.already_exists() {
            true => StepError::HomeTaken(home.name.clone()),
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

/// Returns how a device sends and receives on the node. If that was not stored, returns the kernel's defaults for
/// devices with Ethernet addresses; devices of other kinds keep their settings.
fn conduct_at_home(home: &Home, found: &DeviceState) -> Conduct {
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
fn restore_conduct(host: &mut Handle, home: &Home, found: &DeviceState) -> Result<(), StepError> {
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

/// Checks that a device that was not found need not be found: a virtual device ends with its namespace, and a card
/// may have been unplugged or bound to a userspace driver. Any other device is lost and must be found.
fn check_it_is_nowhere(claim: &Claim, home: &Home) -> Result<(), StepError> {
    let Some(parent) = &home.parent else { return Ok(()) };
    let Some(on_bus) = bus::find(parent) else { return Ok(()) };
    match on_bus.driver {
        Some(driver) if on_bus.userspace().is_none() => {
            let elsewhere = !sysctl::is_first_namespace();
            Err(StepError::DeviceLost { device: claim.device.clone(), driver, elsewhere })
        }
        _ => {
            tracing::warn!(
                device = claim.device,
                "the device has no network driver any more; its name is not given back"
            );
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::io;

    use super::super::identity::tests::{device, mac, port};
    use super::super::left_programs::LeftError;
    use super::super::take_device::home;
    use super::*;
    use crate::netns::within;
    use crate::spec::{Bridge, DeviceId, Macvlan, Veth, VirtualFunction};

    fn vf(name: &str) -> Device {
        Device {
            pod_name: "net1".to_owned(),
            id: DeviceId::Name(name.to_owned()),
            userspace: None,
            function: Some(VirtualFunction { physical: "none".to_owned(), number: 0 }),
            rdma: None,
            switchdev: false,
        }
    }

    fn refused() -> Result<Netns, NetnsError> {
        Err(NetnsError::Make(io::Error::from_raw_os_error(libc::ENOSPC)))
    }

    /// Rows: SRV-back.
    #[test]
    fn a_vf_goes_by_a_namespace_of_its_own_only_if_it_can_be_made_and_the_kernel_would_bring_it_home() {
        let made = |is_first, make: fn() -> Result<Netns, NetnsError>| {
            namespace_between(&vf("x"), is_first, make).is_some()
        };
        assert!(made(true, Netns::private));
        assert!(!made(true, refused));
        assert!(!made(false, || unreachable!()));
    }

    /// Rows: SRV-back.
    #[test]
    fn a_vf_chooses_its_address_again_or_has_a_real_one() {
        let mac = |last| Mac([2, 0, 0, 0, 0, last]);
        let none = Mac([0; 6]);
        assert_eq!(ways_back(none, Some(mac(1))), [none, mac(1)]);
        assert_eq!(ways_back(mac(2), Some(mac(1))), [none, mac(2), mac(1)]);
        assert_eq!(ways_back(mac(1), Some(mac(1))), [none, mac(1)]);
        assert_eq!(ways_back(none, None), [none]);
    }

    /// How a pod has its device send and receive.
    const OF_POD: Conduct = Conduct {
        broadcast: Some(Mac([2, 0, 0, 0, 0, 0x99])),
        arp: false,
        multicast: false,
        mode: 1,
        queue: 1,
    };

    /// A device of the node that a pod has, and how it was before. Its other end is elsewhere.
    struct Taken {
        node: Netns,
        pod: Netns,
        _elsewhere: Netns,
        device: Device,
        before: DeviceState,
        /// In the pod.
        index: u32,
    }

    impl Taken {
        fn new() -> Self {
            let [node, pod, elsewhere] = [(); 3].map(|()| Netns::private().unwrap());
            let mut host = Handle::open_in(&node).unwrap();
            let veth = Veth {
                host_name: "card".to_owned(),
                pod_name: "wire".to_owned(),
                mtu: None,
                mac: None,
                group: 5,
                port: None,
            };
            let mut far = Handle::open_in(&elsewhere).unwrap();
            host.create_veth(&veth, None, elsewhere.as_fd(), &mut far).unwrap();
            Self::in_pod([node, pod, elsewhere])
        }

        /// A macvlan on the node's device `wire`, with its MTU of 9000.
        fn on_wire() -> Self {
            let [node, pod, elsewhere] = [(); 3].map(|()| Netns::private().unwrap());
            let [mut host, mut same] = [(); 2].map(|()| Handle::open_in(&node).unwrap());
            let (name, mtu) = ("wire".to_owned(), Some(9000));
            let wire = Bridge { name: name.clone(), mtu, promiscuous: false, vlan_filtering: false };
            let wire = host.ensure_bridge(&wire).unwrap().link;
            let macvlan = Macvlan { group: 5, ..Macvlan::plain("card", &name) };
            host.create_macvlan(&macvlan, &wire, node.as_fd(), &mut same).unwrap();
            Self::in_pod([node, pod, elsewhere])
        }

        fn in_pod([node, pod, elsewhere]: [Netns; 3]) -> Self {
            let mut host = Handle::open_in(&node).unwrap();
            let card = host.link("card").unwrap().index;
            host.ensure_up(card).unwrap();
            let before = host.device_named("card").unwrap().unwrap();
            // The pod has given it a group of ours.
            host.move_device(card, pod.as_fd(), "net1", Some("card"), OWN_GROUPS | 7).unwrap();
            let mut inside = Handle::open_in(&pod).unwrap();
            let index = inside.link("net1").unwrap().index;
            inside.set_conduct(index, &OF_POD).unwrap();
            inside.set_queue(index, OF_POD.queue).unwrap();
            Self { node, pod, _elsewhere: elsewhere, device: vf("card"), before, index }
        }

        fn give_back<B, T>(&self, ways: Ways<B, T>) -> Result<(), StepError>
        where
            B: FnOnce() -> Option<Netns>,
            T: Fn(&mut Handle, &Home, u32) -> Result<(), StepError>,
        {
            let claim = Claim {
                device: "card".to_owned(),
                generation: 1,
                home: Some(home(self.before.clone(), false)),
                settings: None,
                physical: None,
                representor: None,
                is_back: false,
            };
            let end = PodEnd::In { netns: &self.pod, made: Some(self.index), others: &[] };
            let mut host = Handle::open_in(&self.node).unwrap();
            within(&self.node, || give_back_by(&mut host, &self.device, &claim, end, ways)).unwrap()
        }

        fn on_node(&self) -> DeviceState {
            Handle::open_in(&self.node).unwrap().device_named("card").unwrap().unwrap()
        }

        /// A macvlan of the pod's on the device, with a handle there.
        fn with_macvlan(&self) -> (Handle, u32) {
            let [mut inside, mut same] = [(); 2].map(|()| Handle::open_in(&self.pod).unwrap());
            let (card, lan) = (inside.link("net1").unwrap(), Macvlan::plain("lan", "net1"));
            let made = inside.create_macvlan(&lan, &card, self.pod.as_fd(), &mut same).unwrap();
            (inside, made.index)
        }

        fn is_in_pod(&self) -> bool {
            Handle::open_in(&self.pod).unwrap().device_named("net1").unwrap().is_some()
        }
    }

    /// Rows: SRV-back, HDV-conduct.
    #[test]
    fn a_vf_comes_home_by_either_way_as_it_was() {
        for make in [Netns::private, refused] {
            let taken = Taken::new();
            let between = || namespace_between(&taken.device, true, make);
            taken.give_back(Ways { between, take_off: left_programs::take_off }).unwrap();
            let as_before = |it: &DeviceState| {
                let link = &it.link;
                (link.up, link.mtu, link.mac, link.group, it.alias.clone(), it.conduct)
            };
            assert_eq!(as_before(&taken.on_node()), as_before(&taken.before));
            assert_ne!(taken.before.conduct, OF_POD);
            assert!(!taken.is_in_pod());
        }
    }

    /// Rows: HDV-altname.
    #[test]
    fn a_device_comes_home_although_its_names_in_the_pod_are_no_texts_or_beyond_number() {
        let many: Vec<String> = (0..496).map(|number| format!("{number:0127}")).collect();
        for (name, others) in [("\u{f7ff}", &many[..]), ("n\u{f780}", &["\u{f7f0}".to_owned()])] {
            let taken = Taken::new();
            let mut inside = Handle::open_in(&taken.pod).unwrap();
            inside.rename(taken.index, name).unwrap();
            inside.set_alias(taken.index, "\u{f7fe}").unwrap();
            inside.add_other_names(taken.index, others).unwrap();
            taken.give_back(Ways { between: || None, take_off: left_programs::take_off }).unwrap();
            let back = taken.on_node();
            assert_eq!((back.alias, back.other_names), (None, Vec::new()), "{name}");
            assert_eq!(inside.links().unwrap().len(), 1, "lo alone");
        }
    }

    /// Rows: HDV-above.
    #[test]
    fn what_is_on_a_device_goes_although_it_cannot_be_told_what_it_is_on() {
        let taken = Taken::new();
        let (mut inside, lan) = taken.with_macvlan();
        inside.give_sources(lan, 6_000);
        taken.give_back(Ways { between: || None, take_off: left_programs::take_off }).unwrap();
        assert!(!taken.is_in_pod());
        assert_eq!(inside.links().unwrap().len(), 1, "lo alone");
        assert_eq!(taken.on_node().link.index, taken.before.link.index);
    }

    /// Rows: HDV-impossible.
    #[test]
    fn what_a_device_had_and_cannot_have_any_more_does_not_keep_it_from_coming_home() {
        let taken = Taken::on_wire();
        let mut host = Handle::open_in(&taken.node).unwrap();
        let wire = host.link("wire").unwrap().index;
        // The kernel lowers that of what is on it as well.
        host.set_mtu(wire, 1500).unwrap();
        let as_is = |it: &DeviceState| (it.link.up, it.link.mtu, it.link.group, it.alias.clone());
        let give_back = || taken.give_back(Ways { between: || None, take_off: left_programs::take_off });
        assert_eq!(as_is(&taken.before), (true, 9000, 5, None));
        give_back().unwrap();
        let back = taken.on_node();
        assert_eq!((as_is(&back), taken.is_in_pod()), ((true, 1500, 5, None), false));
        // As the kernel brings a card home, under the name that it had in its pod.
        host.set_down(back.link.index).unwrap();
        host.rename(back.link.index, "net1").unwrap();
        host.set_alias(back.link.index, "card").unwrap();
        give_back().unwrap();
        assert_eq!(as_is(&taken.on_node()), (true, 1500, 5, None));

        // No macvlan is up with the address of what is beneath it.
        let taken = Taken::on_wire();
        let mut host = Handle::open_in(&taken.node).unwrap();
        let wire = host.link("wire").unwrap().index;
        host.set_mac(wire, taken.before.link.mac.unwrap()).unwrap();
        taken.give_back(Ways { between: || None, take_off: left_programs::take_off }).unwrap();
        assert_eq!(as_is(&taken.on_node()), (false, 9000, 5, None));
    }

    /// Rows: HDV-alias.
    #[test]
    fn a_free_name_is_no_devices_by_another_name_either() {
        assert_eq!(free_name(&[]), "dev0");
        let second = DeviceState { other_names: vec!["dev1".to_owned()], ..port(5, "card", None) };
        let present = [port(4, "dev0", None), second, port(6, "dev3", None)];
        assert_eq!(free_name(&present), "dev2");
    }

    /// Rows: HDV-mac-back.
    #[test]
    fn a_device_without_a_record_has_lost_the_address_that_it_was_made_with_if_it_has_another() {
        let lost = |permanent, own| {
            let mut found = port(4, "card", permanent);
            found.link.mac = own;
            lost_address(&found)
        };
        assert_eq!(lost(mac(1), mac(2)), mac(1));
        assert_eq!(lost(mac(1), mac(1)), None);
        assert_eq!(lost(None, mac(2)), None);
    }

    /// Rows: HDV-conduct.
    #[test]
    fn a_device_of_which_nobody_has_noted_it_sends_and_receives_as_its_kind_does() {
        let broadcast = Some(Mac([0xff; 6]));
        let usual = Conduct { broadcast, arp: true, multicast: true, mode: 0, queue: OF_POD.queue };
        let as_noted = Conduct { arp: false, ..usual };
        let at_home = |kind, own, noted| {
            let mut found = device(4, "card", (kind, None));
            (found.link.mac, found.conduct) = (own, OF_POD);
            conduct_at_home(&Home { conduct: noted, ..home(found.clone(), false) }, &found)
        };
        assert_eq!(at_home("", mac(1), Some(as_noted)), as_noted);
        for kind in ["", "veth", "macvlan", "macvtap", "vlan"] {
            assert_eq!(at_home(kind, mac(1), None), usual, "{kind}");
        }
        // The kernel makes a dummy without ARP; a card may be none of Ethernet.
        assert_eq!((at_home("dummy", mac(1), None), at_home("", None, None)), (OF_POD, OF_POD));
    }

    /// The node could not list its links with it. The pod gives it the name and an alias, as a device that was taken has.
    #[test]
    fn what_a_pod_has_given_more_than_can_be_told_does_not_go_to_the_node() {
        let taken = Taken::new();
        let mut host = Handle::open_in(&taken.node).unwrap();
        let (mut inside, lan) = taken.with_macvlan();
        inside.set_alias(lan, "of the node").unwrap();
        let mut is_in_pod_after = |sources| {
            inside.give_sources(lan, sources);
            let of = ("c1", "lan");
            let unrecorded = Unrecorded { of, others: &[], card: false, has_mac: true, home: None, group: 0 };
            let given = within(&taken.node, || give_back_by_alias(&mut host, unrecorded, Some(&taken.pod)));
            given.unwrap().unwrap();
            inside.find_link("lan").unwrap().is_some()
        };
        assert!(is_in_pod_after(6_000));
        let kept =
            Home { link: Some(1_000_000), ..home(inside.device_by_index(lan).unwrap().unwrap(), false) };
        let found = within(&taken.node, || find_in_pod(&mut host, &taken.pod, (&kept, Some(lan)), "lan"));
        assert!(found.unwrap().unwrap().is_none());
    }

    /// Rows: HDV-programs.
    #[test]
    fn a_device_without_a_record_is_found_again_while_a_program_of_its_pod_stays_on_it() {
        fn of(container: &str) -> Unrecorded<'_> {
            let of = (container, "net1");
            Unrecorded { of, others: &[], card: false, has_mac: true, home: None, group: 0 }
        }
        let taken = Taken::new();
        let mut host = Handle::open_in(&taken.node).unwrap();
        let del = |host: &mut Handle, container: &str, netns: Option<&Netns>| {
            within(&taken.node, || give_back_by_alias(host, of(container), netns)).unwrap().unwrap();
        };
        del(&mut host, "c1", Some(&taken.pod));
        let back = taken.on_node();
        assert_eq!((&back.alias, back.link.group), (&None, 0));
        assert_eq!(back.conduct, Conduct { queue: OF_POD.queue, ..taken.before.conduct });
        // As a DEL leaves it that could not take a program off.
        let mark = of("c1").mark();
        host.set_alias(back.link.index, &mark).unwrap();
        del(&mut host, "c2", Some(&taken.pod));
        assert_eq!(taken.on_node().alias, Some(mark));
        del(&mut host, "c1", None);
        assert_eq!(taken.on_node().alias, None);
        assert!(of(&"c".repeat(400)).mark().len() < 256);
    }

    /// Rows: HDV-repeated.
    #[test]
    fn a_device_without_a_record_is_found_again_from_its_move_on_until_all_is_given_back() {
        let taken = Taken::new();
        let mut host = Handle::open_in(&taken.node).unwrap();
        let of = ("c1", "net1");
        let unrecorded = Unrecorded { of, others: &[], card: false, has_mac: true, home: None, group: 0 };
        let seen = RefCell::new(None);
        let take_off = |host: &mut Handle, _: &Home, index: u32| -> Result<(), StepError> {
            *seen.borrow_mut() = host.device_by_index(index)?.and_then(|it| it.alias);
            Ok(())
        };
        let pod = Some(&taken.pod);
        let given = within(&taken.node, || give_back_unrecorded(&mut host, unrecorded, pod, take_off));
        given.unwrap().unwrap();
        assert_eq!((seen.into_inner(), taken.on_node().alias), (Some(unrecorded.mark()), None));
        // As a DEL leaves it that is killed behind the move.
        let index = taken.on_node().link.index;
        host.set_conduct(index, &OF_POD).unwrap();
        host.set_alias(index, &unrecorded.mark()).unwrap();
        within(&taken.node, || give_back_by_alias(&mut host, unrecorded, None)).unwrap().unwrap();
        let back = taken.on_node();
        let conduct = Conduct { queue: OF_POD.queue, ..taken.before.conduct };
        assert_eq!((back.alias, back.conduct, back.link.up), (None, conduct, false));
    }

    /// Rows: HDV-altname.
    #[test]
    fn without_a_record_a_device_goes_back_as_it_was_kept_if_that_is_of_it() {
        let other = Mac([2, 0, 0, 0, 0, 0x77]);
        for (group, is_its) in [(OWN_GROUPS | 7, true), (OWN_GROUPS | 8, false)] {
            let taken = Taken::new();
            let [mut host, mut inside] =
                [&taken.node, &taken.pod].map(|netns| Handle::open_in(netns).unwrap());
            let (alias, other_names) = (Some("of rack 7".to_owned()), vec!["enp3s0".to_owned()]);
            let kept = Home { alias, other_names, ..home(taken.before.clone(), false) };
            inside.add_other_names(taken.index, &["of-pod".to_owned()]).unwrap();
            inside.set_mtu(taken.index, 1400).unwrap();
            inside.set_mac(taken.index, other).unwrap();
            let of = ("c1", "net1");
            let unrecorded =
                Unrecorded { of, others: &[], card: false, has_mac: false, home: Some(&kept), group };
            let given = within(&taken.node, || give_back_by_alias(&mut host, unrecorded, Some(&taken.pod)));
            given.unwrap().unwrap();
            let back = taken.on_node();
            let shown = (back.link.mtu, back.link.mac, back.link.group, back.conduct.queue, back.link.up);
            let before = &taken.before;
            if is_its {
                assert_eq!((back.alias, back.other_names), (kept.alias, kept.other_names));
                let as_before = (before.link.mtu, before.link.mac, 5, before.conduct.queue, false);
                assert_eq!(shown, as_before);
            } else {
                assert_eq!((back.alias, back.other_names), (None, Vec::new()));
                assert_eq!(shown, (1400, Some(other), 0, OF_POD.queue, false));
            }
        }
    }

    /// Rows: HDV-altname.
    #[test]
    fn a_card_that_came_home_with_its_namespace_is_the_one_that_was_moved_if_it_is_marked_still() {
        let group = OWN_GROUPS | 9;
        let shown = |group, alias: Option<&str>| {
            let mut found = port(8, "net1", mac(1));
            (found.link.group, found.alias) = (group, alias.map(str::to_owned));
            found
        };
        let is_it = |kept: &Home, found| came_home(kept, std::slice::from_ref(&found), group).is_some();
        let kept = home(port(4, "eth1", mac(1)), false);
        assert!(is_it(&kept, shown(group, None)));
        // It was not moved, or was given back already; or another container held it.
        assert!(!is_it(&kept, shown(0, Some("eth1"))) && !is_it(&kept, shown(OWN_GROUPS | 8, None)));
        let of_group = Home { group: 5, ..kept };
        assert!(is_it(&of_group, shown(5, Some("eth1"))) && !is_it(&of_group, shown(5, None)));
        let mut veth = device(4, "card", ("veth", None));
        let kept = home(veth.clone(), false);
        veth.link.group = group;
        assert!(!is_it(&kept, veth));
    }

    /// Rows: HDV-names.
    #[test]
    fn a_device_that_is_another_records_is_not_given_back_without_one() {
        let taken = Taken::new();
        let mut host = Handle::open_in(&taken.node).unwrap();
        let mut is_in_pod_after = |others: &[Other]| {
            let of = ("c1", "net1");
            let unrecorded = Unrecorded { of, others, card: false, has_mac: true, home: None, group: 0 };
            let given = within(&taken.node, || give_back_by_alias(&mut host, unrecorded, Some(&taken.pod)));
            given.unwrap().unwrap();
            taken.is_in_pod()
        };
        let known_by = |made| [Other { home: home(taken.before.clone(), false), made }];
        assert!(is_in_pod_after(&known_by(None)));
        // Whatever its alias is.
        let mut inside = Handle::open_in(&taken.pod).unwrap();
        inside.set_alias(taken.index, "other").unwrap();
        assert!(is_in_pod_after(&known_by(Some(taken.index))));
        inside.set_alias(taken.index, "card").unwrap();
        assert!(!is_in_pod_after(&known_by(Some(taken.index + 1))));
    }

    /// Rows: HDV-programs.
    #[test]
    fn a_device_on_which_a_program_of_its_pod_stays_is_home_and_down_until_that_goes() {
        let taken = Taken::new();
        let stays = |_: &mut Handle, home: &Home, _: u32| -> Result<(), StepError> {
            let (device, name) = (home.name.clone(), "foreign".to_owned());
            Err(StepError::ProgramLeft { device, program: 7, name, source: LeftError::NoLink })
        };
        for _ in 0..2 {
            let refused = taken.give_back(Ways { between: || None, take_off: stays }).unwrap_err();
            assert_eq!(
                Chain(&refused).to_string(),
                "device card stays down: program 7 (foreign), which its pod has attached, cannot be taken off: the link that \
                 holds it is not found"
            );
            let found = taken.on_node();
            assert_eq!((found.link.up, &found.alias), (false, &taken.before.alias));
            assert!(!taken.is_in_pod());
        }
        taken.give_back(Ways { between: || None, take_off: left_programs::take_off }).unwrap();
        assert!(taken.before.link.up && taken.on_node().link.up);
    }
}
