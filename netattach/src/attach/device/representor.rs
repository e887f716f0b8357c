//! The representor of a VF: the node's end for the VF's traffic while its card is in switchdev mode. The representor
//! belongs to the card and to the administrator of the card's switch: netattach finds it instead of creating it, and
//! restores its state when the pod ends. netattach neither reads nor changes the bridge or other controller that the
//! representor is a port of.

use super::error::VfError;
use super::take_device::asked_mac;
use crate::attach::apply::{ensure_if_present, host_access};
use crate::attach::{Node, StepError};
use crate::enforce::names_on_node_ends;
use crate::error_chain::Chain;
use crate::mac::Mac;
use crate::netlink::{self, DeviceState, Handle, LinkState, devlink};
use crate::spec::{Device, VfSettings, VirtualFunction};
use crate::step::{Claim, Home, Interface, Representor, SetDevice, Step};
use crate::sysctl;

/// The bus of cards with VFs.
const BUS: &str = "pci";

/// The possible values of the stored settings; `arp_ignore` has the most (`Documentation/networking/ip-sysctl.rst`).
const VALUES: std::ops::RangeInclusive<u8> = 0..=8;

/// Whether the card of a VF is in switchdev mode; `false` for a device that is not a VF.
///
/// # Errors
/// The kernel does not report the mode.
pub(in crate::attach) fn is_switchdev(function: Option<&VirtualFunction>) -> Result<bool, netlink::Error> {
    function.map_or(Ok(false), |function| devlink::is_switchdev(BUS, &function.physical))
}

/// Finds the representor of a claimed device, and stores its state; `None`: the card is in legacy mode, or the device
/// is not a VF. `steps`: those of its attachment; `home`: its interface, unless a process drives it.
///
/// # Errors
/// The card's mode differs from the mode at planning; there is no representor (yet), or more than one; or a process
/// drives the device and its Ethernet address is unknown.
pub(super) fn find(
    host: &mut Handle,
    device: &Device,
    steps: &[Step],
    (settings, home): (Option<&VfSettings>, Option<&Home>),
) -> Result<Option<Representor>, StepError> {
    let Some(function) = &device.function else { return Ok(None) };
    if is_switchdev(Some(function))? != device.switchdev {
        return Err(VfError::OtherMode(function.physical.clone()).into());
    }
    if !device.switchdev {
        return Ok(None);
    }
    let found = only(function, host.representors(function)?)?;
    let driven = match &device.userspace {
        Some(_) => {
            let mac = Some(address(steps, settings).ok_or(VfError::NoAddress)?);
            Some(Interface { name: device.pod_name.clone(), index: 0, mac, mtu: 0 })
        }
        None => None,
    };
    let of_vf = asked_mtu(steps).or(home.map(|home| home.mtu));
    Ok(Some(noted(found, of_vf, driven)))
}

/// Returns the greatest MTU that is requested for a VF, if there is one: by its own plugin, or by a chained `tuning`,
/// which sets it in the pod.
fn asked_mtu(steps: &[Step]) -> Option<u32> {
    let asked = steps.iter().filter_map(|step| match step {
        Step::SetDevice(SetDevice { mtu, .. }) => *mtu,
        Step::Tune(tune) => tune.properties.mtu,
        _ => None,
    });
    asked.max()
}

/// Returns a representor's state, with an MTU that is at least the VF's MTU: the representor must accept the VF's
/// frames.
fn noted(found: LinkState, of_vf: Option<u32>, driven: Option<Interface>) -> Representor {
    let [accept_ra, addr_gen_mode, arp_ignore] = settings(&found.name)
        .map(|key| VALUES.into_iter().find(|value| sysctl::is(&key, &value.to_string())));
    let LinkState { name, index, mac, mtu, up, .. } = found;
    let device = Interface { name, index, mac, mtu: of_vf.map_or(mtu, |of_vf| of_vf.max(mtu)) };
    Representor { device, mtu, up, accept_ra, addr_gen_mode, arp_ignore, driven }
}

/// The settings that are stored and restored: `accept_ra`, `addr_gen_mode` and `arp_ignore`.
fn settings(name: &str) -> [String; 3] {
    [("ipv6", "accept_ra"), ("ipv6", "addr_gen_mode"), ("ipv4", "arp_ignore")]
        .map(|(family, setting)| format!("{family}/conf/{name}/{setting}"))
}

/// Returns the only representor, if exactly one was found.
fn only(function: &VirtualFunction, found: Vec<LinkState>) -> Result<LinkState, StepError> {
    let function = function.clone();
    let mut names = found.iter().map(|link| &*link.name);
    match names.next() {
        None => Err(VfError::NoRepresentor(function).into()),
        Some(first) => match names.next() {
            Some(second) => {
                let names = format!("{first}, {second}");
                Err(VfError::SeveralRepresentors { function, names }.into())
            }
            None => found.into_iter().next().ok_or(StepError::Vf(VfError::NoRepresentor(function))),
        },
    }
}

/// Returns the Ethernet address that a process which drives a VF has to use: the requested one, or else the one that
/// the physical function has set.
fn address(steps: &[Step], settings: Option<&VfSettings>) -> Option<Mac> {
    asked_mac(steps).or(settings?.mac).filter(|mac| mac.0 != [0; 6])
}

/// Brings a representor up, once its programs are attached. Prevents the node from becoming a neighbour of the pod
/// through the representor, and from accepting router advertisements there.
///
/// # Errors
/// The representor is gone, or the card refuses its MTU.
pub(in crate::attach) fn raise(host: &mut Handle, representor: &Representor) -> Result<(), StepError> {
    let device = &representor.device;
    host_access::be_no_neighbour(&device.name)?;
    if device.mtu != representor.mtu {
        host.set_mtu(device.index, device.mtu)?;
    }
    Ok(host.ensure_up(device.index)?)
}

/// Detaches an attachment's programs from its representor and restores the representor's state, after the VF has left
/// the pod. Can be repeated. A representor that is gone because its card's mode has changed needs nothing. A device
/// with another name or address may not be the representor, and is left alone.
///
/// # Errors
/// The kernel refuses.
pub(in crate::attach) fn leave(node: &Node, attachment: Option<u32>, claim: &Claim) -> Result<(), StepError> {
    let Some(representor) = &claim.representor else { return Ok(()) };
    leave_programs(node, attachment, claim)?;
    let device = &representor.device;
    let mut host = Handle::open()?;
    let found = match host.link_by_index(device.index) {
        Err(error) if error.not_found() => return Ok(()),
        found => found?,
    };
    // The kernel reuses indices once the counter wraps around.
    if found.name != device.name || found.mac != device.mac {
        return Ok(());
    }
    // The maps may have lost the number by which the programs are found, for example if the agent was killed during
    // the ADD.
    if let Some(filtered) = host.filtered(&found, &names_on_node_ends())? {
        host.ensure_unfiltered(&filtered, false)?;
    }
    let before = [representor.accept_ra, representor.addr_gen_mode, representor.arp_ignore];
    for (key, before) in settings(&found.name).iter().zip(before) {
        if let Some(before) = before {
            ensure_if_present(key, &before.to_string())?;
        }
    }
    // After the settings: setting the link down removes a link-local address that they cause.
    if found.up && !representor.up {
        host.set_down(device.index)?;
    }
    // Values that another program has changed since are left.
    if found.mtu == device.mtu
        && found.mtu != representor.mtu
        && let Err(error) = host.set_mtu(device.index, representor.mtu)
    {
        // The card may not allow this MTU any more; the VF is given back nevertheless.
        let mtu = representor.mtu;
        tracing::warn!(device = device.name, mtu, error = %Chain(&error), "the representor does not get its MTU back");
    }
    Ok(())
}

/// Detaches an attachment's programs from its representor, if it has one: also if another attachment holds the VF
/// now, whose frames they would drop. Can be repeated.
///
/// # Errors
/// The kernel refuses.
pub(in crate::attach) fn leave_programs(
    node: &Node,
    attachment: Option<u32>,
    claim: &Claim,
) -> Result<(), StepError> {
    match (&node.enforcer, attachment) {
        (Some(enforcer), Some(number)) if claim.representor.is_some() => Ok(enforcer.leave_device(number)?),
        _ => Ok(()),
    }
}

/// Detaches programs from representors that no record claims; all records must be loaded. If an attachment's record
/// is lost, its programs would drop the traffic of the VF's next holder; the kernel does not show the current holder.
/// A node end that is deleted with its pod keeps its programs, and passes no traffic.
///
/// # Errors
/// The kernel refuses.
pub(in crate::attach) fn sweep(node: &Node) -> Result<(), StepError> {
    let claimed = node.devices.representors();
    let mut host = Handle::open()?;
    let is_stray = |device: &DeviceState| device.stays() && !claimed.contains(&device.link.index);
    for stray in host.devices_with_filters(&names_on_node_ends(), is_stray)? {
        host.ensure_unfiltered(&stray, false)?;
        tracing::warn!(
            device = stray.name,
            "detached programs without a record from a device that outlives its attachment"
        );
    }
    Ok(())
}

/// Describes how the representor of a VF differs from the one that ADD found.
pub(in crate::attach) fn difference(
    host: &mut Handle,
    device: &Device,
    wanted: &Interface,
) -> Result<Option<String>, StepError> {
    let Some(function) = device.function.as_ref().filter(|_| device.switchdev) else { return Ok(None) };
    let (number, card) = (function.number, &function.physical);
    if !is_switchdev(Some(function))? {
        return Ok(Some(format!(
            "card {card} is no longer in mode switchdev: nothing judges its VF {number}"
        )));
    }
    let found = host.representors(function)?;
    let is_it = found.len() == 1 && found.iter().all(|link| link.index == wanted.index);
    let lost = || format!("{} is no longer the representor of VF {number} of {card}", wanted.name);
    Ok((!is_it).then(lost))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use serde_json::json;

    use super::*;
    use crate::attach::apply::apply;
    use crate::attach::rig;
    use crate::bpf::sys::{Instruction, load_classifier};
    use crate::journal::Store;
    use crate::netlink::Filter;
    use crate::netns::{Netns, within};
    use crate::plan::{Plan, fixtures};
    use crate::spec::{Properties, TcHook, Tune, Veth};
    use crate::step::{Output, StepRef};
    use crate::sync::Arc;

    fn function() -> VirtualFunction {
        VirtualFunction { physical: "0000:03:00.0".to_owned(), number: 1 }
    }

    fn mac(last: u8) -> Mac {
        Mac([2, 0, 0, 0, 0, last])
    }

    /// Rows: SRV-mtu.
    #[test]
    fn a_vf_is_to_have_the_mtu_that_is_asked_for() {
        let asked = Step::SetDevice(SetDevice { mtu: Some(9000), ..SetDevice::default() });
        assert_eq!(asked_mtu(&[Step::MoveDevice, asked.clone()]), Some(9000));
        let tuned = |mtu| {
            let properties = Properties { mtu, ..Properties::default() };
            Step::Tune(Tune { properties, ..Tune::default() })
        };
        assert_eq!(asked_mtu(&[Step::MoveDevice, tuned(Some(9000))]), Some(9000));
        assert_eq!(asked_mtu(&[asked, tuned(Some(1400)), tuned(None)]), Some(9000));
        assert_eq!(asked_mtu(&[Step::SetDevice(SetDevice::default())]), None);
    }

    /// Rows: SRV-switchdev.
    #[test]
    fn the_address_of_a_vf_that_a_process_drives_is_the_one_asked_for_or_set() {
        let asked = [Step::SetDevice(SetDevice { mac: Some(mac(1)), ..SetDevice::default() })];
        let set = |mac| VfSettings { mac: Some(mac), ..VfSettings::default() };
        assert_eq!(address(&asked, Some(&set(mac(2)))), Some(mac(1)));
        assert_eq!(address(&[], Some(&set(mac(2)))), Some(mac(2)));
        assert_eq!(address(&[], Some(&set(Mac([0; 6])))), None, "the VF chooses");
        assert_eq!(address(&[], None), None);
    }

    /// Only then does the card forward the VF's frames. No DHCP server answers, so the test ends there.
    ///
    /// Rows: SRV-switchdev.
    #[test]
    fn a_representor_is_up_before_an_address_is_asked_for() {
        let directory = tempfile::tempdir().unwrap();
        let journal = Store::open(directory.path().join("journal")).unwrap();
        let engine = rig::engine(directory.path(), journal, &Arc::new(rig::Maps::default()));
        let netns = Netns::private().unwrap();
        let lease = json!({"step": "lease", "ipam": "dhcp", "network": "lan", "wanted": [1]});
        let steps = vec![serde_json::from_value(lease).unwrap()];
        let attachments = vec![fixtures::attachment("sriov", steps)];
        let plan = Plan { sandbox: fixtures::sandbox("a"), attachments, dynamic: None };
        within(&netns, || {
            let mut host = Handle::open().unwrap();
            let name = "rep1";
            let veth = Veth {
                host_name: name.to_owned(),
                pod_name: "vf1".to_owned(),
                mtu: None,
                mac: None,
                group: 1,
                port: None,
            };
            let pod = &mut Handle::open().unwrap();
            let (made, _) = host.create_veth(&veth, None, netns.as_fd(), pod).unwrap();
            host.set_down(made.index).unwrap();
            let claim = Claim {
                device: "0000:03:02.1".to_owned(),
                generation: 1,
                home: None,
                settings: None,
                physical: None,
                representor: Some(noted(host.link(name).unwrap(), None, None)),
                is_back: false,
            };
            let mut record = engine.journal.create(rig::key("a"), plan.clone()).unwrap();
            record.outputs.insert(StepRef(0, 1), Output::Claimed(Box::new(claim)));
            let failed = apply(&engine.node, &plan, &netns, &mut record).unwrap_err();
            assert!(host.link(name).unwrap().up, "{failed}");
        })
        .unwrap();
    }

    /// A veth for a representor: both are devices of the node that stay when a pod ends.
    #[test]
    fn a_representor_is_as_it_was_when_the_pod_has_ended() {
        let directory = tempfile::tempdir().unwrap();
        let journal = Store::open(directory.path().join("journal")).unwrap();
        let engine = rig::engine(directory.path(), journal, &Arc::new(rig::Maps::default()));
        let netns = Netns::private().unwrap();
        let name = "rep1";
        let veth = Veth {
            host_name: name.to_owned(),
            pod_name: "vf1".to_owned(),
            mtu: Some(1500),
            mac: None,
            group: 1,
            port: None,
        };
        within(&netns, || {
            let mut host = Handle::open().unwrap();
            let pod = &mut Handle::open().unwrap();
            let (made, _) = host.create_veth(&veth, None, netns.as_fd(), pod).unwrap();
            host.set_down(made.index).unwrap();
            let are = |values: [&str; 3]| {
                settings(name).iter().zip(values).all(|(key, value)| sysctl::is(key, value))
            };
            let settings_before = ["1", "0", "2"];
            for (key, value) in settings(name).iter().zip(settings_before) {
                sysctl::ensure(key, value).unwrap();
            }
            let before = host.link(name).unwrap();
            assert!(!before.up);
            let representor = noted(before.clone(), Some(9000), None);
            let device = Interface { name: name.to_owned(), index: made.index, mac: made.mac, mtu: 9000 };
            let expected = Representor {
                device,
                mtu: 1500,
                up: false,
                accept_ra: Some(1),
                addr_gen_mode: Some(0),
                arp_ignore: Some(2),
                driven: None,
            };
            assert_eq!(representor, expected);
            assert_eq!(noted(before.clone(), Some(1400), None).device.mtu, 1500, "it takes more already");
            raise(&mut host, &representor).unwrap();
            let raised = host.link(name).unwrap();
            assert_eq!((raised.up, raised.mtu), (true, 9000));
            assert!(are(["0", "1", "8"]));
            let claim = Claim {
                device: "0000:03:02.1".to_owned(),
                generation: 1,
                home: None,
                settings: None,
                physical: None,
                representor: Some(representor.clone()),
                is_back: false,
            };
            // Ours, though the maps know of none, and another's.
            let instruction = |code, constant| Instruction { code, registers: 0, offset: 0, constant };
            let program = load_classifier("foreign", &[instruction(0xb7, -1), instruction(0x95, 0)]).unwrap();
            let filter = |handle, name| {
                let (hook, class) = (TcHook::Ingress, 0);
                Filter { hook, handle, class, name, program: program.as_fd() }
            };
            host.ensure_filters(made.index, &[filter(1, "na_from_pod"), filter(2, "other")]).unwrap();
            let filters = |host: &mut Handle| {
                let found = host.find_filters(made.index, TcHook::Ingress).unwrap();
                found.into_iter().filter_map(|filter| filter.name).collect::<Vec<_>>()
            };
            // Another device has the index now.
            for other in [
                Interface { name: "rep2".to_owned(), ..representor.device.clone() },
                Interface { mac: Some(mac(9)), ..representor.device.clone() },
            ] {
                let representor = Some(Representor { device: other, ..representor.clone() });
                leave(&engine.node, Some(1), &Claim { representor, ..claim.clone() }).unwrap();
                let after = host.link(name).unwrap();
                assert_eq!((after.up, after.mtu), (true, 9000));
                assert!(are(["0", "1", "8"]));
                assert_eq!(filters(&mut host), ["na_from_pod", "other"]);
            }
            for _ in 0..2 {
                leave(&engine.node, Some(1), &claim).unwrap();
                let after = host.link(name).unwrap();
                assert_eq!((after.up, after.mtu), (false, 1500));
                assert!(are(settings_before));
                assert_eq!(filters(&mut host), ["other"]);
            }
            // Another program has changed it since.
            host.set_mtu(made.index, 1400).unwrap();
            leave(&engine.node, Some(1), &claim).unwrap();
            assert_eq!(host.link(name).unwrap().mtu, 1400);
            host.ensure_link_absent(name).unwrap();
            leave(&engine.node, Some(1), &claim).unwrap();
        })
        .unwrap();
    }

    /// Rows: SRV-switchdev.
    #[test]
    fn of_none_and_of_two_representors_the_vf_is_named() {
        let told = |names: &[&str]| {
            let netns = Netns::private().unwrap();
            within(&netns, || {
                let mut host = Handle::open().unwrap();
                let lo = host.link("lo").unwrap();
                let found = names.iter().map(|name| LinkState { name: (*name).to_owned(), ..lo.clone() });
                only(&function(), found.collect()).map(|it| it.name).map_err(|error| error.to_string())
            })
            .unwrap()
        };
        let vf = "VF 1 of 0000:03:00.0";
        assert_eq!(told(&["a"]), Ok("a".to_owned()));
        let none = format!("the node has no representor of {vf}, whose card is in mode switchdev");
        assert_eq!(told(&[]), Err(none));
        let several = format!("{vf} has several representors (a, b)");
        assert_eq!(told(&["a", "b", "c"]), Err(several));
    }
}
