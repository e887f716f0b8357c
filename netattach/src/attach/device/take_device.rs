//! Takes a device of the node for a pod: claims the device, changes its settings as requested, and moves it.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use super::card::{self, Card, is_of, physical};
use super::claims::settle;
use super::error::{DeviceError, VfError};
use super::give_back::find_home;
use super::which_device::{Target, There};
use super::{bus, identity, left_programs, representor};
use crate::attach::addresses::holder::{Address, AddressError, Holder};
use crate::attach::apply::LinkError;
use crate::attach::apply::host_access::{self, is_host_link};
use crate::attach::{Node, StepError};
use crate::error_chain::Chain;
use crate::link;
use crate::mac::Mac;
use crate::netlink::{self, DeviceState, Handle, LinkState};
use crate::plan::{AttachmentPlan, Sandbox};
use crate::spec::{Device, DeviceId, OWN_GROUPS, VfSettings, VirtualFunction};
use crate::step::{Claim, Home, Step};
use crate::waits;

/// How often a card is asked for a VF's address, and the pause before each retry: some cards need a moment until the
/// VF accepts an address that the physical function has set.
const ADDRESS_TRIES: u32 = 20;
const ADDRESS_PAUSE: Duration = Duration::from_millis(50);

/// The device state that an ADD has read last, so that the next step need not dump all devices of the node again. Its
/// users check that it still applies.
#[derive(Debug, Default)]
pub(in crate::attach) struct Looked {
    /// The number of the claim.
    generation: u64,
    /// The device after its last setting was made.
    own: Option<DeviceState>,
}

/// Claims a device, and returns its state. If a sandbox whose namespace is gone held the device, it is given back
/// first.
///
/// # Errors
/// Another sandbox holds the device, or the node does not have it (yet).
pub(in crate::attach) fn claim(
    node: &Node,
    host: &mut Handle,
    device: &Device,
    (sandbox, attachment, cookie): (&Sandbox, &AttachmentPlan, u64),
) -> Result<(Claim, Looked), StepError> {
    let parents = match &device.id {
        DeviceId::Bus(name) => bus::parents_of(name),
        DeviceId::Path(path) => bus::name_at(path).map(|name| bus::parents_of(&name)).unwrap_or_default(),
        DeviceId::Name(_) | DeviceId::Mac(_) => Vec::new(),
    };
    let present = host.devices()?;
    let known = node.devices.known();
    let there = There { parents: &parents, present: &present, known: &known, carrier_of: &bus::carrier_of };
    let Target { key, home: before } = there.meant(device)?;
    let claimant = (sandbox, attachment, cookie);
    let generation = node.devices.claim(&key, claimant, |held| settle(node, held))?;
    // Until the device is claimed, sriov-cni neither takes nor changes it.
    let locked = node.devices.sriov_cni.lock(device, Some(&waits::vf_locks(attachment)))?;
    if let Some(locked) = &locked {
        locked.check_is_free_for(&sandbox.netns)?;
    }
    // Dumped again: only a dump that is newer than the claim shows links that were created on the device meanwhile.
    let present = host.devices()?;
    let found = before.as_ref().and_then(|before| identity::at_home(before, &present)).cloned();
    let rdma = found.as_ref().and_then(|found| bus::rdma_of(found.parent.as_deref()?));
    if let (Some(found), Some(_), None) = (&found, rdma, &device.rdma) {
        let why = "it has RDMA, which passes the kernel: name it by pciBusID";
        return Err(DeviceError::InUse { device: found.link.name.clone(), why }.into());
    }
    let home = match (&found, &device.userspace) {
        (Some(found), None) => {
            let among = before.is_some_and(|before| before.among);
            let programs = left_programs::running(found)?;
            Some(Home { programs: Some(programs), ..home(found.clone(), among) })
        }
        (_, Some(_)) => None,
        (None, None) => return Err(DeviceError::NotThere(device.id.to_string()).into()),
    };
    let asked = asked_mac(&attachment.steps);
    let card = card::find(host, (device, found.as_ref()), &present, asked)?;
    let physical = card.as_ref().map(|card| card.index);
    let settings =
        device.function.as_ref().zip(card.as_ref()).and_then(|(it, card)| card.settings(it.number));
    let of_vf = (settings.as_ref(), home.as_ref());
    let representor = representor::find(host, device, &attachment.steps, of_vf)?;
    let claim = Claim { device: key, generation, home, settings, physical, representor, is_back: false };
    node.devices.found(device, &claim);
    if let Some(mac) = asked {
        let around = Around { card: card.as_ref(), present: &present };
        claim_mac(node, (sandbox, attachment), (device, &claim), (mac, &around))?;
        if !node.records {
            check_own_mac_is_kept(claim.home.as_ref(), mac)?;
        }
    }
    if let (Some(found), Some(home)) = (&found, &claim.home) {
        // A process that creates an interface on the device now either sees the claim, or its interface is seen here.
        check_is_free(node, host, (found, home), &present)?;
    }
    if let Some(locked) = &locked {
        locked.mark(&sandbox.netns)?;
    }
    Ok((claim, Looked { generation, own: None }))
}

/// Returns the requested Ethernet address of a device, if any.
pub(in crate::attach) fn asked_mac(steps: &[Step]) -> Option<Mac> {
    steps.iter().find_map(|step| match step {
        Step::SetDevice(set) => set.mac,
        _ => None,
    })
}

/// The possible holders of the Ethernet address that a device is to get.
struct Around<'a> {
    /// The card that the device is part of: in its switch, the address must not exist twice.
    card: Option<&'a Card>,
    /// All devices of the node.
    present: &'a [DeviceState],
}

/// Claims the Ethernet address for a device.
///
/// # Errors
/// [`AddressError::Taken`] with the holder: an attachment, a device of the node, or another VF.
fn claim_mac(
    node: &Node,
    (sandbox, attachment): (&Sandbox, &AttachmentPlan),
    (device, claim): (&Device, &Claim),
    (mac, around): (Mac, &Around<'_>),
) -> Result<(), StepError> {
    if let Some(physical) = claim.physical {
        node.occupied.claim(physical, Address::Mac(mac), sandbox, attachment)?;
    }
    let (home, settings) = (claim.home.as_ref(), claim.settings.as_ref());
    if home.and_then(|home| home.mac) == Some(mac) || settings.and_then(|set| set.mac) == Some(mac) {
        return Ok(());
    }
    let taken = |holder| Err(StepError::Address(AddressError::Taken { address: Address::Mac(mac), holder }));
    let ends = [home.map(|home| home.index), claim.representor.as_ref().map(|it| it.device.index)];
    let mut others = around.present.iter().filter(|it| !ends.contains(&Some(it.link.index)));
    if let Some(other) = others.find(|it| it.link.mac == Some(mac)) {
        return taken(Holder::Node(other.link.name.clone()));
    }
    let physical = around.present.iter().find(|it| Some(it.link.index) == claim.physical);
    if let Some(name) = physical.and_then(|it| host_access::taken_beside(&it.link, mac)) {
        return taken(Holder::Node(name));
    }
    let other = around.card.and_then(|card| card.other_function(device, home, mac));
    other.map_or(Ok(()), |function| taken(Holder::Function(function)))
}

/// Refuses another address for a device whose own address neither a record nor the kernel keeps: it would be lost.
fn check_own_mac_is_kept(home: Option<&Home>, mac: Mac) -> Result<(), StepError> {
    match home {
        Some(home) if home.mac != Some(mac) && home.mac != home.permanent => {
            Err(DeviceError::OwnMacLost(home.name.clone()).into())
        }
        _ => Ok(()),
    }
}

/// Refuses a device that the node itself or other pods need.
fn check_is_free(
    node: &Node,
    host: &mut Handle,
    (found, home): (&DeviceState, &Home),
    present: &[DeviceState],
) -> Result<(), StepError> {
    let in_use = |why| Err(StepError::Device(DeviceError::InUse { device: home.name.clone(), why }));
    if found.link.controller.is_some() {
        return in_use("it is a port of a bridge or a bond");
    }
    if let Some(why) = need_of_pods(&found.link) {
        return in_use(why);
    }
    if host.default_routes()?.iter().any(|route| route.interface == Some(found.link.index)) {
        return in_use("a default route of the node leads through it");
    }
    if present.iter().any(|it| it.link.controller == Some(found.link.index)) {
        return in_use("other interfaces of the node are its ports");
    }
    // The node's own link on a parent exists for pods, which are checked below.
    if present.iter().any(|it| it.is_on(found.link.index) && !is_host_link(&it.link)) {
        return in_use("another interface of the node is on it");
    }
    // In another namespace, the physical function could not restore its VFs' settings.
    let has_functions = found.parent.as_deref().is_some_and(|it| node.devices.has_function_of(it));
    match has_functions || node.occupied.is_parent(found.link.index) {
        true => Err(DeviceError::ParentOfPods(home.name.clone()).into()),
        false => Ok(()),
    }
}

/// Returns why pods need a link of the node: a pod that held the link would be between other pods and the node, where
/// their policies are not enforced.
fn need_of_pods(found: &LinkState) -> Option<&'static str> {
    if matches!(&*found.kind, "veth" | "netkit") && link::is_host_name(&found.name) {
        return Some("it is the node's end of a pod's interface");
    }
    is_host_link(found).then_some("the node reaches pods by it")
}

/// Changes a VF's settings: through its physical function, and the address also on the device itself. Then asks the
/// card once for the resulting settings.
///
/// # Errors
/// The card refuses a setting, or has accepted it without effect; the error names the setting.
pub(in crate::attach) fn set(
    host: &mut Handle,
    device: &Device,
    (claim, looked): (&Claim, &mut Looked),
    (wanted, mac): (&VfSettings, Option<Mac>),
) -> Result<(), StepError> {
    let Some(function) = &device.function else {
        let (Some(mac), Some(home)) = (mac, &claim.home) else { return Ok(()) };
        let own = find_claimed(host, home)?.ok_or_else(|| DeviceError::NotThere(claim.device.clone()))?;
        looked.own = host.set_mac_and_show(own.link.index, mac)?;
        return Ok(());
    };
    // Without the former settings nothing could be restored.
    if claim.settings.is_none() {
        return Err(VfError::NoPhysicalFunction(function.physical.clone()).into());
    }
    let (own, index) = find_ends(host, function, claim)?;
    set_each(host, function, index, wanted)?;
    let mut shown = None;
    if let Some(mac) = mac {
        (looked.own, shown) = set_address(host, (function, index), (claim, own.as_ref()), mac)?;
    }
    let wanted = VfSettings { mac: mac.or(wanted.mac), ..wanted.clone() };
    if wanted.is_empty() {
        return Ok(());
    }
    let shown = match shown {
        Some(shown) => shown,
        None => host.vf_settings(index, function.number)?.unwrap_or_default(),
    };
    check_set(&wanted, &shown, function)
}

/// Sets the MTU of a claimed device.
///
/// # Errors
/// The kernel, or the card, refuses it.
pub(in crate::attach) fn set_mtu(
    host: &mut Handle,
    (claim, looked): (&Claim, &mut Looked),
    mtu: u32,
) -> Result<(), StepError> {
    let home = claim.home.as_ref().ok_or(StepError::Missing("a device with an interface"))?;
    let found = find_claimed(host, home)?;
    let mut found = found.ok_or_else(|| DeviceError::NotThere(claim.device.clone()))?;
    let refused = |source| StepError::Device(DeviceError::Mtu { device: claim.device.clone(), mtu, source });
    host.set_mtu(found.link.index, mtu).map_err(refused)?;
    found.link.mtu = mtu;
    looked.own = Some(found);
    Ok(())
}

/// Makes all given settings through the physical function, except for the address, see [`set_address`]. If a setting
/// is refused, the others are restored when the VF is given back, as the VF is still on the node.
fn set_each(
    host: &mut Handle,
    function: &VirtualFunction,
    index: u32,
    wanted: &VfSettings,
) -> Result<(), StepError> {
    let (names, each): (Vec<&'static str>, Vec<VfSettings>) = wanted.each().unzip();
    for (setting, set) in names.into_iter().zip(host.set_vf_each(index, function.number, &each)?) {
        set.map_err(refused(function, setting))?;
    }
    Ok(())
}

/// Refuses a card that reports another value of a setting than the one that it has accepted.
fn check_set(wanted: &VfSettings, shown: &VfSettings, function: &VirtualFunction) -> Result<(), StepError> {
    match wanted.contradicted_by(shown).each().next() {
        Some((setting, _)) => Err(VfError::SettingIgnored { setting, function: function.clone() }.into()),
        None => Ok(()),
    }
}

/// Sets the address of a VF. Returns its interface and its settings on the card afterwards, if they were read.
fn set_address(
    host: &mut Handle,
    (function, index): (&VirtualFunction, u32),
    (claim, own): (&Claim, Option<&DeviceState>),
    mac: Mac,
) -> Result<(Option<DeviceState>, Option<VfSettings>), StepError> {
    let given = VfSettings { mac: Some(mac), ..VfSettings::default() };
    let Some(own) = own else {
        host.set_vf(index, function.number, &given).map_err(refused(function, "mac"))?;
        return Ok((None, None));
    };
    // A VF may choose its own address until its physical function has set one; afterwards it may only use that one,
    // if its driver is told. So the VF's address is set first.
    let has_it = |host: &mut Handle| -> Result<bool, StepError> {
        Ok(host.link_by_index(own.link.index)?.mac == Some(mac))
    };
    if host.set_mac(own.link.index, mac).is_err() {
        let none = VfSettings { mac: Some(Mac([0; 6])), ..VfSettings::default() };
        let freed =
            host.set_vf(index, function.number, &none).and_then(|()| host.set_mac(own.link.index, mac));
        if let Err(error) = freed {
            tracing::debug!(error = %Chain(&error), "the VF takes its address from its card alone");
        }
    }
    let set = host.set_vf_and_show((index, function.number), &given, own.link.index);
    let (found, shown) = set.map_err(refused(function, "mac"))?;
    if found.as_ref().is_some_and(|found| found.link.mac == Some(mac)) {
        return Ok((found, shown));
    }
    for _ in 0..ADDRESS_TRIES {
        if has_it(host)? {
            return Ok((None, None));
        }
        if let Err(error) = host.set_mac(own.link.index, mac) {
            tracing::debug!(error = %Chain(&error), "the VF does not take its address yet");
        }
        std::thread::sleep(ADDRESS_PAUSE);
    }
    match has_it(host)? {
        true => Ok((None, None)),
        false => Err(DeviceError::AddressNotTaken { device: claim.device.clone(), mac }.into()),
    }
}

/// Returns the error for a setting that the card has refused.
fn refused(function: &VirtualFunction, setting: &'static str) -> impl FnOnce(netlink::Error) -> StepError {
    move |source| StepError::Vf(VfError::Setting { setting, function: function.clone(), source })
}

/// Moves a claimed device into the pod under its name there, down. `mark`: its link group there, if the device has
/// the default group.
///
/// # Errors
/// The pod has an interface of that name, or the kernel does not move the device.
pub(in crate::attach) fn move_in(
    host: &mut Handle,
    (pod, netns): (&mut Handle, BorrowedFd<'_>),
    (device, mark): (&Device, Option<u32>),
    (claim, looked): (&Claim, Looked),
) -> Result<LinkState, StepError> {
    let home = claim.home.as_ref().ok_or(StepError::Missing("a device with an interface"))?;
    // Since the last setting, in the step before, only the record was written.
    let seen = looked.own.filter(|seen| looked.generation == claim.generation && is_claimed(home, seen));
    let found = match seen {
        Some(seen) => seen,
        None => find_claimed(host, home)?.ok_or_else(|| DeviceError::NotThere(claim.device.clone()))?,
    };
    if !found.other_names.is_empty() {
        // An alternative name that also exists in the pod would prevent the move, or the new name there.
        host.remove_other_names(found.link.index, &found.other_names)?;
    }
    let group = match group_on_node(&found.link) {
        0 => mark.unwrap_or_default(),
        group => group,
    };
    let moved = host.move_device(found.link.index, netns, &device.pod_name, Some(&home.name), group);
    moved.map_err(|error| match error.already_exists() {
        true => StepError::Link(LinkError::NameTaken(device.pod_name.clone())),
        false => error.into(),
    })?;
    Ok(pod.link(&device.pod_name)?)
}

/// Finds a device that was claimed just before. Usually it still has the index at which it was found; if another
/// device has that index, dumps all devices again.
fn find_claimed(host: &mut Handle, home: &Home) -> Result<Option<DeviceState>, StepError> {
    let found = host.device_by_index(home.index)?;
    as_claimed(host, home, found)
}

/// Returns the device at the index of a claimed device, if it is that device; otherwise searches all devices.
fn as_claimed(
    host: &mut Handle,
    home: &Home,
    found: Option<DeviceState>,
) -> Result<Option<DeviceState>, StepError> {
    match found.filter(|it| is_claimed(home, it)) {
        Some(found) => Ok(Some(found)),
        None => find_home(host, home),
    }
}

fn is_claimed(home: &Home, found: &DeviceState) -> bool {
    identity::at_home(home, std::slice::from_ref(found)).is_some()
}

/// Returns a claimed VF's interface, unless a process drives it, and the index of its physical function's interface.
/// One datagram asks for both by their indices at the claim; if another device has the index now, all devices are
/// searched.
fn find_ends(
    host: &mut Handle,
    function: &VirtualFunction,
    claim: &Claim,
) -> Result<(Option<DeviceState>, u32), StepError> {
    let indices: Vec<u32> = claim.home.iter().map(|home| home.index).chain(claim.physical).collect();
    let mut shown = host.devices_by_index(&indices)?.into_iter();
    let own = match &claim.home {
        Some(home) => {
            let found = as_claimed(host, home, shown.next().flatten())?;
            Some(found.ok_or_else(|| DeviceError::NotThere(claim.device.clone()))?)
        }
        None => None,
    };
    let found = shown.next().flatten().filter(|it| is_of(function, it));
    let index = match found {
        Some(found) => found.link.index,
        None => {
            let missing = || StepError::Vf(VfError::NoPhysicalFunction(function.physical.clone()));
            physical(host, function)?.ok_or_else(missing)?.0
        }
    };
    Ok((own, index))
}

/// Returns the link group of a device on the node. A group of netattach marks a pod's link: a pod has given it to the
/// device, or the device was marked and the kernel has moved it back. Then the result is the default group.
pub(super) fn group_on_node(found: &LinkState) -> u32 {
    if found.group & OWN_GROUPS == 0 { found.group } else { 0 }
}

/// Returns the state of a device before any change, without its programs. `among`: see [`Home::among`].
pub(super) fn home(found: DeviceState, among: bool) -> Home {
    let (group, conduct, reception) = (group_on_node(&found.link), found.conduct, found.reception);
    let DeviceState { link, link_netns, parent, permanent, alias, other_names, .. } = found;
    Home {
        name: link.name,
        index: link.index,
        kind: link.kind,
        link: link.link.filter(|_| link_netns.is_none()),
        mac: link.mac,
        permanent,
        parent,
        among,
        mtu: link.mtu,
        up: link.up,
        alias,
        group,
        other_names,
        programs: None,
        planned: None,
        conduct: Some(conduct),
        reception,
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::super::identity::tests::{device, mac, port};
    use super::*;
    use crate::attach::error::step_code;
    use crate::attach::rig;
    use crate::cni::code;
    use crate::journal::Store;
    use crate::netns::{Netns, within};
    use crate::plan::fixtures;
    use crate::spec::Veth;
    use crate::step::SetDevice;
    use crate::sync::Arc;
    use crate::timing;

    /// A device of the node that a pod may have.
    fn card(name: &str) -> Device {
        Device {
            pod_name: "net1".to_owned(),
            id: DeviceId::Name(name.to_owned()),
            userspace: None,
            function: None,
            rdma: None,
            switchdev: false,
        }
    }

    /// Makes a device on the node whose other end is elsewhere.
    fn make(host: &mut Handle, name: &str, elsewhere: &Netns) -> DeviceState {
        let veth = Veth {
            host_name: name.to_owned(),
            pod_name: format!("{name}-far"),
            mtu: None,
            mac: None,
            group: 0,
            port: None,
        };
        let mut far = Handle::open_in(elsewhere).unwrap();
        let (near, _) = host.create_veth(&veth, None, elsewhere.as_fd(), &mut far).unwrap();
        host.device_by_index(near.index).unwrap().unwrap()
    }

    /// All devices of a node may be many: a list of them takes longer than all else that is asked.
    #[test]
    fn a_device_is_looked_for_among_all_before_its_claim_and_after_it_and_not_again() {
        let directory = tempfile::tempdir().unwrap();
        let journal = Store::open(directory.path().join("journal")).unwrap();
        let engine = rig::engine(directory.path(), journal, &Arc::new(rig::Maps::default()));
        let [node, pod, elsewhere] = [(); 3].map(|()| Netns::private().unwrap());
        within(&node, || {
            let mut host = Handle::open().unwrap();
            let mut inside = Handle::open_in(&pod).unwrap();
            make(&mut host, "card", &elsewhere);
            let card = card("card");
            let sandbox = fixtures::sandbox("a");
            let attachment = fixtures::attachment("host-device", Vec::new());
            let mac = Some(Mac([2, 0, 0, 0, 0, 7]));
            let (moved, times) = timing::operation(|| {
                let claimant = (&sandbox, &attachment, 0);
                let (claim, mut looked) = claim(&engine.node, &mut host, &card, claimant).unwrap();
                let wanted = (&VfSettings::default(), mac);
                set(&mut host, &card, (&claim, &mut looked), wanted).unwrap();
                assert_eq!(looked.own.as_ref().and_then(|own| own.link.mac), mac);
                move_in(&mut host, (&mut inside, pod.as_fd()), (&card, None), (&claim, looked)).unwrap()
            });
            assert_eq!((&*moved.name, moved.mac), ("net1", mac));
            // Two lists, a look before the address is set, and one in the pod.
            let asked = times.runs().iter().filter(|run| run.name == "RTM_GETLINK").count();
            assert_eq!(asked, 4);
        })
        .unwrap();
    }

    /// Rows: HDV-mac.
    #[test]
    fn a_device_gets_no_address_that_another_of_the_node_has() {
        let set = |mac| Step::SetDevice(SetDevice { mac: Some(mac), ..SetDevice::default() });
        let free = Mac([2, 0, 0, 0, 0, 7]);
        for asked in ["card", "other", "nobody"] {
            let directory = tempfile::tempdir().unwrap();
            let journal = Store::open(directory.path().join("journal")).unwrap();
            let engine = rig::engine(directory.path(), journal, &Arc::new(rig::Maps::default()));
            let [node, elsewhere] = [(); 2].map(|()| Netns::private().unwrap());
            within(&node, || {
                let mut host = Handle::open().unwrap();
                let made = ["card", "other"].map(|name| (name, make(&mut host, name, &elsewhere)));
                let of = made.iter().find(|(name, _)| *name == asked);
                let mac = of.map_or(free, |(_, device)| device.link.mac.unwrap());
                let (sandbox, steps) = (fixtures::sandbox("a"), vec![set(mac)]);
                let attachment = fixtures::attachment("host-device", steps);
                let claimant = (&sandbox, &attachment, 0);
                let claimed = claim(&engine.node, &mut host, &card("card"), claimant);
                let told = claimed.map(drop).map_err(|error| (step_code(&error), error.to_string()));
                let taken = format!("MAC address {mac} is taken: the node's device other has it");
                let expected = if asked == "other" { Err((code::INVALID_CONFIG, taken)) } else { Ok(()) };
                assert_eq!(told, expected, "{asked}");
            })
            .unwrap();
        }
    }

    /// Rows: HDV-mac-back.
    #[test]
    fn without_a_record_a_device_gets_another_address_if_it_has_the_one_that_it_was_made_with() {
        let refused = |permanent, own, asked: Option<Mac>| {
            let mut found = port(4, "card", permanent);
            found.link.mac = own;
            check_own_mac_is_kept(Some(&home(found, false)), asked.unwrap()).is_err()
        };
        assert!(!refused(mac(1), mac(1), mac(7)));
        assert!(!refused(None, mac(7), mac(7)), "it has it");
        assert!(refused(None, mac(1), mac(7)));
        assert!(refused(mac(1), mac(2), mac(7)));
    }

    /// Rows: HDV-one-device.
    #[test]
    fn no_other_device_is_moved_whatever_was_seen_last() {
        for (generation, is_seen) in [(1, true), (2, true), (2, false)] {
            let [node, pod, elsewhere] = [(); 3].map(|()| Netns::private().unwrap());
            let mut host = Handle::open_in(&node).unwrap();
            let mut inside = Handle::open_in(&pod).unwrap();
            let [wanted, other] = ["a", "b"].map(|name| make(&mut host, name, &elsewhere));
            let claim = Claim {
                device: "a".to_owned(),
                generation: 2,
                home: Some(home(wanted, false)),
                settings: None,
                physical: None,
                representor: None,
                is_back: false,
            };
            let looked = Looked { generation, own: is_seen.then_some(other) };
            move_in(&mut host, (&mut inside, pod.as_fd()), (&card("a"), None), (&claim, looked)).unwrap();
            let is_there = |name| host.find_link(name).unwrap().is_some();
            assert_eq!(["a", "b"].map(is_there), [false, true]);
        }
    }

    /// Rows: HDV-late-del.
    #[test]
    fn a_device_is_marked_where_it_has_the_default_group_and_no_mark_is_given_back() {
        let mark = OWN_GROUPS | 9;
        for (group, marked, at_home) in [(0, mark, 0), (5, 5, 5), (OWN_GROUPS | 7, mark, 0)] {
            let [node, pod, elsewhere] = [(); 3].map(|()| Netns::private().unwrap());
            let mut host = Handle::open_in(&node).unwrap();
            let mut inside = Handle::open_in(&pod).unwrap();
            let made = make(&mut host, "a", &elsewhere).link.index;
            host.set_group(made, group).unwrap();
            let claim = Claim {
                device: "a".to_owned(),
                generation: 1,
                home: Some(home(host.device_named("a").unwrap().unwrap(), false)),
                settings: None,
                physical: None,
                representor: None,
                is_back: false,
            };
            let into = (&mut inside, pod.as_fd());
            let moved = move_in(&mut host, into, (&card("a"), Some(mark)), (&claim, Looked::default()));
            assert_eq!((moved.unwrap().group, claim.home.unwrap().group), (marked, at_home));
        }
    }

    /// Rows: SRV-ignored.
    #[test]
    fn a_setting_that_a_card_takes_without_effect_is_named() {
        let function = VirtualFunction { physical: "0000:03:00.0".to_owned(), number: 1 };
        let wanted = VfSettings { trust: Some(true), spoof_check: Some(true), ..VfSettings::default() };
        let shown = VfSettings { trust: Some(false), ..wanted.clone() };
        let error = check_set(&wanted, &shown, &function).unwrap_err();
        assert_eq!(step_code(&error), code::INTERNAL);
        assert_eq!(
            error.to_string(),
            "key trust: the card has accepted it for VF 1 of 0000:03:00.0, but shows another value: its driver ignores it"
        );
        check_set(&wanted, &wanted, &function).unwrap();
        check_set(&wanted, &VfSettings::default(), &function).unwrap();
    }

    /// Rows: HDV-in-use.
    #[test]
    fn links_that_pods_need_stay_on_the_node() {
        let need = |name: &str, kind| need_of_pods(&device(4, name, (kind, Some(5))).link);
        let end = link::host_name("c1", "net1");
        let of_pod = Some("it is the node's end of a pod's interface");
        assert_eq!([need(&end, "veth"), need(&end, "netkit"), need(&end, "dummy")], [of_pod, of_pod, None]);
        assert_eq!(need("nahst5", "macvlan"), Some("the node reaches pods by it"));
        for other in ["card0", "na0", "na0123456789ABC", "nx0123456789abc", "eth1"] {
            assert_eq!(need(other, "veth"), None, "{other}");
        }
    }
}
