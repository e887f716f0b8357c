//! `host-device` and `sriov`: a device of the node as an interface of the pod. The device is claimed,
//! configured, moved, and given back in its former state, see `attach::device`.
//!
//! The keys are those of `host-device` in containernetworking/plugins and of sriov-cni, `mtu` and
//! `bandwidth`. Policy is enforced on the interface in the pod. A device that the pod drives itself
//! (`vfio-pci`) or that has RDMA bypasses the kernel's network stack, and is refused to a pod that a policy
//! selects. A VF of a card in mode switchdev has an end on the node, its representor, whichever driver it
//! has: there policy is enforced on the representor.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{Driver, PlanError, Request, Wanted, check_link_name, check_mtu};
use crate::mac::Mac;
use crate::spec::{Device, DeviceId, VfLinkState, VfRates, VfSettings, VfVlan};
use crate::step::{Configure, SetDevice, Step};

/// The highest id of a VLAN (IEEE 802.1Q, 9.6: 4095 is reserved), and the highest priority.
const MOST_VLAN: i64 = 4094;
const MOST_PRIORITY: i64 = 7;

/// The key by which a configuration states that the pod does not need the RDMA device of its device.
const RDMA: &str = "rdma";

/// Placeholder for the device in a plan that is not carried out.
const ANY: &str = "0000:00:00.0";

pub(super) struct HostDevice;
pub(super) struct Sriov;

#[derive(Debug, Deserialize)]
struct Names {
    #[serde(default)]
    device: Option<String>,
    #[serde(default)]
    hwaddr: Option<String>,
    #[serde(default)]
    kernelpath: Option<String>,
    #[serde(default, rename = "pciBusID")]
    pci_bus_id: Option<String>,
    #[serde(default, rename = "deviceID")]
    device_id: Option<String>,
    #[serde(default, rename = "runtimeConfig")]
    runtime: Option<Runtime>,
}

#[derive(Debug, Deserialize)]
struct Runtime {
    #[serde(default, rename = "deviceID")]
    device_id: Option<String>,
}

#[derive(Debug, Deserialize)]
struct VfConfig {
    #[serde(default)]
    vlan: Option<i64>,
    #[serde(default, rename = "vlanQoS")]
    vlan_qos: Option<i64>,
    #[serde(default, rename = "vlanProto")]
    vlan_proto: Option<String>,
    #[serde(default)]
    spoofchk: Option<String>,
    #[serde(default)]
    trust: Option<String>,
    #[serde(default)]
    min_tx_rate: Option<u32>,
    #[serde(default)]
    max_tx_rate: Option<u32>,
    #[serde(default)]
    link_state: Option<String>,
}

fn given(text: Option<String>) -> Option<String> {
    text.filter(|text| !text.is_empty())
}

impl Driver for HostDevice {
    fn kind(&self) -> &'static str {
        "host-device"
    }

    fn is_judged(&self, _: &Map<String, Value>) -> bool {
        true
    }

    fn takes_device(&self) -> bool {
        true
    }

    fn wants(&self, config: &Map<String, Value>) -> Vec<Wanted> {
        let id = super::read_object(config).ok().and_then(|names| host_device(names).ok().flatten());
        id.map(on_bus).unwrap_or_default()
    }

    fn plan(&self, request: &Request<'_>) -> Result<Vec<Step>, PlanError> {
        let id = match host_device(request.read()?)? {
            Some(id) => id,
            // The device depends on the pod.
            None if !request.facts.gathered => DeviceId::Bus(ANY.to_owned()),
            None => {
                let reason = "missing; one of device, hwaddr, kernelpath and pciBusID names the device";
                return Err(PlanError::Value { key: "device", reason: reason.to_owned() });
            }
        };
        let device = Device { function: None, switchdev: false, ..request.device(id)? };
        let set = SetDevice { mac: request.mac()?, ..SetDevice::default() };
        request.device_steps(self, device, set)
    }

    fn remains(&self, request: &Request<'_>) -> Vec<Step> {
        request.device_remains()
    }
}

impl Driver for Sriov {
    fn kind(&self) -> &'static str {
        "sriov"
    }

    fn is_judged(&self, _: &Map<String, Value>) -> bool {
        true
    }

    fn takes_device(&self) -> bool {
        true
    }

    fn is_recorded(&self) -> bool {
        true
    }

    fn wants(&self, config: &Map<String, Value>) -> Vec<Wanted> {
        let id = super::read_object(config).ok().and_then(|names| function(names).ok().flatten());
        id.map(on_bus).unwrap_or_default()
    }

    fn plan(&self, request: &Request<'_>) -> Result<Vec<Step>, PlanError> {
        // RDMA devices and InfiniBand are the task of other plugins, and stay where they are: see
        // `check_rdma_is_not_lost`.
        request.refuse(
            self.kind(),
            &[
                (RDMA, json!(false)),
                ("rdmaIsolation", json!(false)),
                ("guid", json!("")),
                ("pkey", json!("")),
            ],
        )?;
        let settings = settings(request.read()?)?;
        let id = match function(request.read()?)? {
            Some(id) => id,
            // The device depends on the pod.
            None if !request.facts.gathered => DeviceId::Bus(ANY.to_owned()),
            None => {
                let reason = "missing; a device plugin's resource names it (k8s.v1.cni.cncf.io/resourceName)";
                return Err(PlanError::Value { key: "deviceID", reason: reason.to_owned() });
            }
        };
        let device = request.device(id)?;
        request.check_rdma_is_not_lost(&device)?;
        if request.facts.gathered
            && device.function.is_none()
            && let Some((key, _)) = settings.each().next()
        {
            let reason = format!("{} has no physical function on this node that could set it", device.id);
            return Err(PlanError::Value { key, reason });
        }
        let set = SetDevice { function: settings, mac: request.mac()?, mtu: None };
        request.device_steps(self, device, set)
    }

    fn remains(&self, request: &Request<'_>) -> Vec<Step> {
        request.device_remains()
    }
}

impl Request<'_> {
    /// The device as it is found on the node.
    fn device(&self, id: DeviceId) -> Result<Device, PlanError> {
        let mut device = Device {
            pod_name: self.ifname.to_owned(),
            id,
            userspace: None,
            function: None,
            rdma: None,
            switchdev: false,
        };
        let DeviceId::Bus(name) = &device.id else { return Ok(device) };
        match self.facts.on_bus.get(name) {
            Some(found) => {
                device.userspace = found.userspace().map(str::to_owned);
                device.function.clone_from(&found.function);
                device.rdma.clone_from(&found.rdma);
                device.switchdev = found.switchdev;
                Ok(device)
            }
            None if self.facts.gathered => Err(PlanError::NoDevice(name.clone())),
            None => Ok(device),
        }
    }

    /// Refuses a device whose RDMA device would stay behind, unless the configuration states that the pod
    /// does not need it.
    fn check_rdma_is_not_lost(&self, device: &Device) -> Result<(), PlanError> {
        let DeviceId::Bus(name) = &device.id else { return Ok(()) };
        let stays = self.facts.on_bus.get(name).is_some_and(|found| found.rdma_stays);
        let is_waived = self.config.get(RDMA) == Some(&json!(false));
        match &device.rdma {
            Some(rdma) if stays && !is_waived && device.userspace.is_none() => {
                let reason = format!(
                    "missing, and the RDMA device {rdma} of {name} would stay on the node: it is not moved with the interface, and \
                     namespaces do not share it here (rdma system: netns exclusive). false, where the pod does without it"
                );
                Err(PlanError::Value { key: RDMA, reason })
            }
            _ => Ok(()),
        }
    }

    /// The MTU for the device, if one is requested.
    fn mtu_of(&self, driver: &dyn Driver, device: &Device) -> Result<Option<u32>, PlanError> {
        #[derive(Deserialize)]
        struct Holder {
            #[serde(default)]
            mtu: Option<u32>,
        }
        let mtu = check_mtu(self.read::<Holder>()?.mtu)?;
        let reason = match mtu {
            None => return Ok(None),
            Some(_) if device.userspace.is_some() => {
                format!("{} is driven by the pod, and has no interface whose MTU it would be", device.id)
            }
            Some(_) if !self.recorded && !driver.is_recorded() => {
                "the device gets its own back by what netattachd has recorded; without it, chain tuning"
                    .to_owned()
            }
            Some(_) => return Ok(mtu),
        };
        Err(PlanError::Value { key: "mtu", reason })
    }

    fn device_steps(
        &self,
        driver: &dyn Driver,
        device: Device,
        mut set: SetDevice,
    ) -> Result<Vec<Step>, PlanError> {
        self.refuse(driver.kind(), &[("fastPath", json!(false))])?;
        let is_driven_by_pod = device.userspace.is_some();
        if is_driven_by_pod || device.switchdev {
            // Traffic of a device that the pod drives itself, and traffic that a card switches, cannot be
            // rate limited; a queueing discipline on a representor could also belong to the card's
            // administrator.
            self.refuse(driver.kind(), &[("bandwidth", json!({}))])?;
        }
        if set.mac.is_some() {
            check_mac_can_be_set(&device)?;
        }
        set.mtu = self.mtu_of(driver, &device)?;
        let mut steps = vec![Step::ClaimDevice(device)];
        if set != SetDevice::default() {
            steps.push(Step::SetDevice(set));
        }
        if !is_driven_by_pod {
            steps.push(Step::MoveDevice);
        }
        let ipam = self.ipam()?;
        if is_driven_by_pod && ipam.as_ref().is_some_and(Step::asks_the_network) {
            let reason =
                "dhcp sends on the pod's interface, but a device that the pod drives has none".to_owned();
            return Err(PlanError::Value { key: "ipam.type", reason });
        }
        let addressed = ipam.is_some();
        steps.extend(ipam);
        // For a device that the pod drives itself, the addresses are only in the result.
        let configure = Configure { dns: self.dns()?, down: is_driven_by_pod, ..Configure::default() };
        steps.extend(self.finish(addressed, configure)?);
        Ok(steps)
    }

    fn device_remains(&self) -> Vec<Step> {
        let device = Device {
            pod_name: self.ifname.to_owned(),
            id: DeviceId::Bus(ANY.to_owned()),
            userspace: None,
            function: None,
            rdma: None,
            switchdev: false,
        };
        let mut steps: Vec<Step> =
            std::iter::once(Step::ClaimDevice(device)).chain(self.ipam_remains()).collect();
        if let Ok(mac @ Some(_)) = self.mac() {
            steps.push(Step::SetDevice(SetDevice { mac, ..SetDevice::default() }));
        }
        steps
    }
}

/// Checks that the Ethernet address of a device can be set.
///
/// # Errors
/// The pod drives the device, and the device has no physical function.
pub fn check_mac_can_be_set(device: &Device) -> Result<(), PlanError> {
    if device.userspace.is_some() && device.function.is_none() {
        let reason = format!("{} is driven by the pod, and has no physical function to set it", device.id);
        return Err(PlanError::Value { key: "mac", reason });
    }
    Ok(())
}

fn on_bus(id: DeviceId) -> Vec<Wanted> {
    match id {
        DeviceId::Bus(name) => vec![Wanted::OnBus(name)],
        DeviceId::Name(_) | DeviceId::Mac(_) | DeviceId::Path(_) => Vec::new(),
    }
}

/// The device that the keys of `host-device` name; of several keys the first in this order, as in the
/// reference plugin.
fn host_device(names: Names) -> Result<Option<DeviceId>, PlanError> {
    let Names { device, hwaddr, kernelpath, pci_bus_id, device_id, runtime } = names;
    if let Some(name) = given(device) {
        check_link_name("device", &name)?;
        return Ok(Some(DeviceId::Name(name)));
    }
    if let Some(address) = given(hwaddr) {
        let wrong =
            || PlanError::Value { key: "hwaddr", reason: format!("{address:?} is no Ethernet address") };
        return Ok(Some(DeviceId::Mac(address.parse::<Mac>().map_err(|_| wrong())?)));
    }
    if let Some(path) = given(kernelpath) {
        let is_below = path.starts_with("/sys/devices/") && !path.split('/').any(|part| part == "..");
        let reason = || format!("{path:?} is not below /sys/devices");
        return is_below
            .then(|| Some(DeviceId::Path(path.clone())))
            .ok_or_else(|| PlanError::Value { key: "kernelpath", reason: reason() });
    }
    let named = [
        ("runtimeConfig.deviceID", runtime.and_then(|runtime| runtime.device_id)),
        ("pciBusID", pci_bus_id),
        ("deviceID", device_id),
    ];
    first_on_bus(named)
}

/// The virtual function that the keys of `sriov` name.
fn function(names: Names) -> Result<Option<DeviceId>, PlanError> {
    let named = [
        ("runtimeConfig.deviceID", names.runtime.and_then(|runtime| runtime.device_id)),
        ("deviceID", names.device_id),
        ("pciBusID", names.pci_bus_id),
    ];
    first_on_bus(named)
}

/// The device named by the first of these keys that has a value.
fn first_on_bus(named: [(&'static str, Option<String>); 3]) -> Result<Option<DeviceId>, PlanError> {
    match named.into_iter().find_map(|(key, name)| Some((key, given(name)?))) {
        Some((key, name)) => Ok(Some(DeviceId::Bus(check_bus_name(key, name)?))),
        None => Ok(None),
    }
}

/// Checks that a name is a single component of a path, and returns it.
fn check_bus_name(key: &'static str, name: String) -> Result<String, PlanError> {
    let is_name = !name.starts_with('.') && name.len() < 256 && !name.contains(['/', '\0']);
    match is_name {
        true => Ok(name),
        false => Err(PlanError::Value { key, reason: format!("{name:?} is no name of a device on a bus") }),
    }
}

fn settings(config: VfConfig) -> Result<VfSettings, PlanError> {
    let VfConfig { vlan, vlan_qos, vlan_proto, spoofchk, trust, min_tx_rate, max_tx_rate, link_state } =
        config;
    let wrong = |key, reason: String| PlanError::Value { key, reason };
    let number = |key, number: i64, most: i64| match u16::try_from(number) {
        Ok(id) if number <= most => Ok(id),
        _ => Err(wrong(key, format!("{number} is not between 0 and {most}"))),
    };
    let switch = |key, text: Option<String>| match given(text).as_deref() {
        None => Ok(None),
        Some("on") => Ok(Some(true)),
        Some("off") => Ok(Some(false)),
        Some(other) => Err(wrong(key, format!("{other:?} is neither on nor off"))),
    };
    let vlan = match vlan {
        Some(id) => {
            let id = number("vlan", id, MOST_VLAN)?;
            let priority = number("vlanQoS", vlan_qos.unwrap_or(0), MOST_PRIORITY)? as u8;
            let service = super::vlan::is_service(given(vlan_proto).as_deref())?;
            if id == 0 && priority != 0 {
                return Err(wrong("vlanQoS", format!("{priority} needs a vlan other than 0")));
            }
            if id == 0 && service {
                return Err(wrong("vlanProto", "802.1ad needs a vlan other than 0".to_owned()));
            }
            Some(VfVlan { id, priority, service })
        }
        None if vlan_qos.is_some_and(|priority| priority != 0) => {
            return Err(wrong("vlanQoS", "needs vlan".to_owned()));
        }
        None if given(vlan_proto).is_some() => return Err(wrong("vlanProto", "needs vlan".to_owned())),
        None => None,
    };
    let rates = (min_tx_rate.is_some() || max_tx_rate.is_some())
        .then(|| VfRates { min: min_tx_rate.unwrap_or(0), max: max_tx_rate.unwrap_or(0) });
    let link_state = match given(link_state).as_deref() {
        None => None,
        Some("auto") => Some(VfLinkState::Auto),
        Some("enable") => Some(VfLinkState::Enable),
        Some("disable") => Some(VfLinkState::Disable),
        Some(other) => {
            return Err(wrong("link_state", format!("{other:?} is not auto, enable or disable")));
        }
    };
    Ok(VfSettings {
        mac: None,
        vlan,
        rates,
        spoof_check: switch("spoofchk", spoofchk)?,
        trust: switch("trust", trust)?,
        link_state,
    })
}
