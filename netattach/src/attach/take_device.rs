//! Takes a device of the node for a pod: claims it, sets what is asked for, and moves it.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use super::devices::settle;
use super::give_back::find_home;
use super::{Node, StepError, bus};
use crate::mac::Mac;
use crate::netlink::{DeviceState, Handle, LinkState};
use crate::plan::{AttachmentPlan, Sandbox};
use crate::spec::{Device, DeviceId, VfSettings, VirtualFunction};
use crate::step::{Claim, Home};

/// How often a card is asked for an address of a VF, and after which time each: some take a moment to believe their own
/// physical function.
const ADDRESS_TRIES: u32 = 20;
const ADDRESS_PAUSE: Duration = Duration::from_millis(50);

/// Claims a device, and returns how it is. What a sandbox whose namespace is gone had of it is given back first.
///
/// # Errors
/// Another sandbox has it, or the node does not have it (yet).
pub(super) fn claim(
    node: &Node,
    host: &mut Handle,
    device: &Device,
    (sandbox, attachment, cookie): (&Sandbox, &AttachmentPlan, u64),
) -> Result<Claim, StepError> {
    let key = match node.devices.known_by(&device.id) {
        Some(known) => known,
        None => key(host, device)?,
    };
    let claimant = (sandbox, attachment, cookie);
    let generation = node.devices.claim(&key, claimant, |held| settle(node, held))?;
    let found = find(host, &device.id)?;
    let rdma = found.as_ref().and_then(|found| bus::find(found.parent.as_deref()?)?.rdma);
    if let (Some(found), Some(_), None) = (&found, rdma, &device.rdma) {
        let why = "it has RDMA, which passes the kernel: name it by pciBusID";
        return Err(StepError::DeviceInUse { device: found.link.name.clone(), why });
    }
    let home = match (found, &device.userspace) {
        (Some(found), None) => {
            check_is_free(node, host, &found)?;
            Some(home(found))
        }
        (_, Some(_)) => None,
        (None, None) => return Err(StepError::NoDevice(device.id.to_string())),
    };
    let settings = match &device.function {
        Some(function) => physical(host, function)?.map(|(_, settings)| settings),
        None => None,
    };
    let claim = Claim { device: key, generation, home, settings };
    node.devices.found(device, &claim);
    Ok(claim)
}

/// Refuses a device that the node itself or other pods need where it is.
fn check_is_free(node: &Node, host: &mut Handle, found: &DeviceState) -> Result<(), StepError> {
    let in_use = |why| Err(StepError::DeviceInUse { device: found.link.name.clone(), why });
    if found.link.controller.is_some() {
        return in_use("it is a port of a bridge or a bond");
    }
    if host.default_routes()?.iter().any(|route| route.interface == Some(found.link.index)) {
        return in_use("a default route of the node leads through it");
    }
    let is_on_it = |link: &LinkState| {
        matches!(&*link.kind, "vlan" | "macvlan" | "ipvlan") && link.link == Some(found.link.index)
    };
    if host.links()?.iter().any(is_on_it) {
        return in_use("another interface of the node is on it");
    }
    match node.occupied.is_parent(found.link.index) {
        true => Err(StepError::ParentOfPods(found.link.name.clone())),
        false => Ok(()),
    }
}

/// Sets what a VF is to be: by its physical function, and the address by the device itself as well.
///
/// # Errors
/// The card refuses a setting, which is named.
pub(super) fn set(
    host: &mut Handle,
    device: &Device,
    claim: &Claim,
    (wanted, mac): (&VfSettings, Option<Mac>),
) -> Result<(), StepError> {
    let own = match &claim.home {
        Some(home) => Some(find_home(host, home)?.ok_or_else(|| StepError::NoDevice(claim.device.clone()))?),
        None => None,
    };
    let address = |host: &mut Handle, mac| own.as_ref().map(|own| host.set_mac(own.link.index, mac));
    let Some(function) = &device.function else {
        return mac.and_then(|mac| address(host, mac)).transpose().map_err(StepError::from).map(drop);
    };
    // Without what was set before nobody could give it back.
    if claim.settings.is_none() {
        return Err(StepError::NoPhysicalFunction(function.physical.clone()));
    }
    let (index, _) =
        physical(host, function)?.ok_or_else(|| StepError::NoPhysicalFunction(function.physical.clone()))?;
    for (setting, one) in wanted.each() {
        set_one(host, function, index, (setting, &one))?;
    }
    let Some(mac) = mac else { return Ok(()) };
    let given = VfSettings { mac: Some(mac), ..VfSettings::default() };
    let Some(own) = &own else { return set_one(host, function, index, ("mac", &given)) };
    // A VF may choose its address until its physical function has chosen one, and afterwards only that one, if its driver
    // hears of it: so it chooses first.
    let has_it = |host: &mut Handle| -> Result<bool, StepError> {
        Ok(host.link_by_index(own.link.index)?.mac == Some(mac))
    };
    if host.set_mac(own.link.index, mac).is_err() {
        let none = VfSettings { mac: Some(Mac([0; 6])), ..VfSettings::default() };
        let freed =
            host.set_vf(index, function.number, &none).and_then(|()| host.set_mac(own.link.index, mac));
        freed.unwrap_or_else(|error| tracing::debug!(%error, "the VF takes its address from its card alone"));
    }
    set_one(host, function, index, ("mac", &given))?;
    for _ in 0..ADDRESS_TRIES {
        if has_it(host)? {
            return Ok(());
        }
        if let Err(error) = host.set_mac(own.link.index, mac) {
            tracing::debug!(%error, "the VF does not take its address yet");
        }
        std::thread::sleep(ADDRESS_PAUSE);
    }
    if has_it(host)? { Ok(()) } else { Err(StepError::AddressNotTaken { device: claim.device.clone(), mac }) }
}

fn set_one(
    host: &mut Handle,
    function: &VirtualFunction,
    index: u32,
    (setting, one): (&'static str, &VfSettings),
) -> Result<(), StepError> {
    host.set_vf(index, function.number, one).map_err(|source| StepError::VfSetting {
        setting,
        function: function.clone(),
        source,
    })
}

/// Moves a claimed device into the pod under its name there, down.
///
/// # Errors
/// The pod has an interface of that name, or the kernel does not move the device.
pub(super) fn move_in(
    host: &mut Handle,
    (pod, netns): (&mut Handle, BorrowedFd<'_>),
    device: &Device,
    claim: &Claim,
) -> Result<LinkState, StepError> {
    let home = claim.home.as_ref().ok_or(StepError::Missing("a device with an interface"))?;
    let found = find_home(host, home)?.ok_or_else(|| StepError::NoDevice(claim.device.clone()))?;
    if !found.other_names.is_empty() {
        // A name that the pod has too would keep the device from being moved, or from getting its name there.
        host.remove_other_names(found.link.index, &found.other_names)?;
    }
    host.move_device(found.link.index, netns, &device.pod_name, Some(&home.name)).map_err(
        |error| match error.already_exists() {
            true => StepError::NameTaken(device.pod_name.clone()),
            false => error.into(),
        },
    )?;
    Ok(pod.link(&device.pod_name)?)
}

/// The VF's number at the interface of its physical function, and its settings there.
pub(super) fn physical(
    host: &mut Handle,
    function: &VirtualFunction,
) -> Result<Option<(u32, VfSettings)>, StepError> {
    let all = host.devices()?;
    for device in all.iter().filter(|device| device.parent.as_deref() == Some(&*function.physical)) {
        if let Some(settings) = host.vf_settings(device.link.index, function.number)? {
            return Ok(Some((device.link.index, settings)));
        }
    }
    Ok(None)
}

/// The device's name for claims.
fn key(host: &mut Handle, device: &Device) -> Result<String, StepError> {
    match &device.id {
        DeviceId::Bus(name) => Ok(name.clone()),
        DeviceId::Path(path) => bus::name_at(path).ok_or_else(|| StepError::NoDevice(device.id.to_string())),
        id @ (DeviceId::Name(_) | DeviceId::Mac(_)) => {
            let found = find(host, id)?.ok_or_else(|| StepError::NoDevice(id.to_string()))?;
            let permanent = found.permanent.map(|mac| mac.to_string());
            let Some(parent) = found.parent else { return Ok(permanent.unwrap_or(found.link.name)) };
            // A card may have several interfaces.
            let all = host.devices()?;
            let siblings = all.iter().filter(|other| other.parent.as_ref() == Some(&parent)).count();
            let own = permanent.filter(|_| siblings > 1);
            Ok(own.map_or_else(|| parent.clone(), |own| format!("{parent} {own}")))
        }
    }
}

/// The device on the node.
fn find(host: &mut Handle, id: &DeviceId) -> Result<Option<DeviceState>, StepError> {
    let parents = match id {
        DeviceId::Bus(name) => bus::parents_of(name),
        DeviceId::Path(path) => bus::name_at(path).map(|name| bus::parents_of(&name)).unwrap_or_default(),
        DeviceId::Name(_) | DeviceId::Mac(_) => Vec::new(),
    };
    let is_it = |device: &DeviceState| match id {
        DeviceId::Name(name) => device.link.name == *name || device.other_names.contains(name),
        DeviceId::Mac(mac) => device.link.mac == Some(*mac),
        DeviceId::Bus(_) | DeviceId::Path(_) => {
            device.parent.as_ref().is_some_and(|parent| parents.contains(parent))
        }
    };
    Ok(host.devices()?.into_iter().find(is_it))
}

fn home(found: DeviceState) -> Home {
    let DeviceState { link, parent, permanent, alias, other_names } = found;
    Home {
        name: link.name,
        index: link.index,
        kind: link.kind,
        mac: link.mac,
        permanent,
        parent,
        mtu: link.mtu,
        up: link.up,
        alias,
        other_names,
    }
}
