//! Plans of devices of the node that are moved to pods.

use serde_json::{Value, json};

use super::facts::OnBus;
use super::tests::request;
use super::*;
use crate::cni::CniArgs;
use crate::mac::Mac;
use crate::spec::{Device, DeviceId, VfLinkState, VfRates, VfSettings, VfVlan, VirtualFunction};
use crate::step::{Configure, HookKind, NotObservable, SetDevice, Step};

const VF: &str = "0000:03:02.1";
const MAC: &str = "02:00:00:00:00:07";

fn facts(on_bus: OnBus) -> Facts {
    Facts { on_bus: [(VF.to_owned(), on_bus)].into(), gathered: true, ..Facts::default() }
}

fn function() -> Option<VirtualFunction> {
    Some(VirtualFunction { physical: "0000:03:00.0".into(), number: 1 })
}

fn vf(driver: &str) -> OnBus {
    OnBus { driver: Some(driver.into()), function: function(), ..OnBus::default() }
}

fn plan(kind: &str, config: &Value, facts: &Facts) -> Result<Vec<Step>, (u32, String)> {
    let mut whole = json!({"cniVersion": "1.1.0", "name": "net", "type": kind});
    whole.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
    let args = CniArgs::default();
    let request = Request { facts, ..request(whole.as_object().unwrap(), &args) };
    driver(kind).unwrap().plan(&request).map_err(|error| {
        let error = CniError::from(error);
        (error.code, error.msg)
    })
}

fn device(id: DeviceId) -> Device {
    Device { pod_name: "net1".into(), id, userspace: None, function: None, rdma: None, switchdev: false }
}

/// Rows: HDV-keys, HDV-order.
#[test]
fn a_host_device_is_found_by_the_first_of_its_keys() {
    let moved = |id: DeviceId| {
        Ok(vec![Step::ClaimDevice(device(id)), Step::MoveDevice, Step::Configure(Configure::default())])
    };
    let bus = |name: &str| DeviceId::Bus(name.to_owned());
    let path = "/sys/devices/pci0000:00/0000:00:05.0";
    for (config, id) in [
        (json!({"device": "eth1", "hwaddr": MAC, "pciBusID": VF}), DeviceId::Name("eth1".into())),
        (json!({"hwaddr": MAC, "kernelpath": path}), DeviceId::Mac(MAC.parse().unwrap())),
        (json!({"kernelpath": path, "pciBusID": VF}), DeviceId::Path(path.into())),
        (json!({"pciBusID": VF, "device": ""}), bus(VF)),
        (json!({"pciBusID": "0000:00:01.0", "runtimeConfig": {"deviceID": VF}}), bus(VF)),
        (json!({"deviceID": VF}), bus(VF)),
    ] {
        assert_eq!(plan("host-device", &config, &facts(vf("ixgbevf"))), moved(id), "{config}");
    }
    let wants = driver("host-device").unwrap().wants(json!({"deviceID": VF}).as_object().unwrap());
    assert_eq!(wants, [Wanted::OnBus(VF.into())]);
}

/// Rows: HDV-keys, SRV-not-there.
#[test]
fn what_names_no_device_is_refused_by_its_key() {
    let nothing = Facts { gathered: true, ..Facts::default() };
    for (kind, config, expected) in [
        (
            "host-device",
            json!({}),
            (7, "key device: missing; one of device, hwaddr, kernelpath and pciBusID names the device"),
        ),
        ("host-device", json!({"device": "a/b"}), (7, "key device: \"a/b\"")),
        ("host-device", json!({"hwaddr": "junk"}), (7, "key hwaddr: \"junk\" is no Ethernet address")),
        (
            "host-device",
            json!({"kernelpath": "/sys/devices/../x"}),
            (7, "key kernelpath: \"/sys/devices/../x\" is not below /sys/devices"),
        ),
        (
            "host-device",
            json!({"pciBusID": VF}),
            (11, "there is no device 0000:03:02.1 on a bus of this node"),
        ),
        ("sriov", json!({"deviceID": VF}), (11, "there is no device 0000:03:02.1 on a bus of this node")),
        ("host-device", json!({"pciBusID": "../x"}), (7, "key pciBusID: \"../x\" is no name")),
        ("sriov", json!({"deviceID": "../x"}), (7, "key deviceID: \"../x\" is no name of a device on a bus")),
        (
            "sriov",
            json!({"deviceID": VF, "runtimeConfig": {"deviceID": "a/b"}}),
            (7, "key runtimeConfig.deviceID: \"a/b\" is no name of a device on a bus"),
        ),
        ("sriov", json!({}), (7, "key deviceID: missing; a device plugin's resource names it")),
        (
            "host-device",
            json!({"device": "eth1", "fastPath": true}),
            (2, "key fastPath: true is not supported"),
        ),
    ] {
        let (code, told) = plan(kind, &config, &nothing).unwrap_err();
        assert_eq!((code, &told[..expected.1.len()]), expected, "{config}: {told}");
    }
    // A definition is validated without a pod, and so without its device.
    assert!(plan("sriov", &json!({"vlan": 5}), &Facts::default()).is_ok());
}

/// Rows: SRV-keys.
#[test]
fn every_key_of_a_vf_reaches_its_physical_function() {
    let config = json!({
        "deviceID": VF, "vlan": 100, "vlanQoS": 5, "vlanProto": "802.1AD", "mac": MAC, "spoofchk": "on",
        "trust": "off", "min_tx_rate": 10, "max_tx_rate": 100, "link_state": "auto", "logLevel": "info",
        "logFile": "/tmp/log", "mtu": 9000
    });
    let settings = VfSettings {
        mac: None,
        vlan: Some(VfVlan { id: 100, priority: 5, service: true }),
        rates: Some(VfRates { min: 10, max: 100 }),
        spoof_check: Some(true),
        trust: Some(false),
        link_state: Some(VfLinkState::Auto),
    };
    let claimed = Device { function: function(), ..device(DeviceId::Bus(VF.into())) };
    let expected = vec![
        Step::ClaimDevice(claimed.clone()),
        Step::SetDevice(SetDevice {
            function: settings,
            mac: Some(MAC.parse::<Mac>().unwrap()),
            mtu: Some(9000),
        }),
        Step::MoveDevice,
        Step::Configure(Configure::default()),
    ];
    assert_eq!(plan("sriov", &config, &facts(vf("igbvf"))), Ok(expected));
    let nothing_set = plan("sriov", &json!({"deviceID": VF, "spoofchk": ""}), &facts(vf("igbvf"))).unwrap();
    assert_eq!(nothing_set[..2], [Step::ClaimDevice(claimed), Step::MoveDevice]);
    let one_rate = plan("sriov", &json!({"deviceID": VF, "max_tx_rate": 5}), &facts(vf("igbvf"))).unwrap();
    let rates = VfSettings { rates: Some(VfRates { min: 0, max: 5 }), ..VfSettings::default() };
    assert_eq!(one_rate[1], Step::SetDevice(SetDevice { function: rates, ..SetDevice::default() }));
}

/// Rows: HDV-mtu, SRV-mtu.
#[test]
fn a_device_gets_the_mtu_that_is_asked_for_where_it_has_an_interface_and_gets_its_own_back() {
    let keys = |mtu: Value| json!({"deviceID": VF, "mtu": mtu});
    for kind in ["host-device", "sriov"] {
        let planned = |mtu: Value, driver: &str| plan(kind, &keys(mtu), &facts(vf(driver)));
        let steps = planned(json!(9000), "ixgbevf").unwrap();
        assert_eq!(steps[1], Step::SetDevice(SetDevice { mtu: Some(9000), ..SetDevice::default() }));
        for none in [json!(0), Value::Null] {
            assert_eq!(planned(none, "ixgbevf").unwrap()[1], Step::MoveDevice, "{kind}");
        }
        for (mtu, driver, told) in [
            (json!("big"), "ixgbevf", "key mtu: invalid type: string \"big\", expected u32".to_owned()),
            (json!(67), "ixgbevf", "key mtu: 67 is not between 68 and 65535".to_owned()),
            (
                json!(9000),
                "vfio-pci",
                format!("key mtu: {VF} is driven by the pod, and has no interface whose MTU it would be"),
            ),
        ] {
            assert_eq!(planned(mtu, driver), Err((7, told)), "{kind}");
        }
    }
    let whole =
        json!({"cniVersion": "1.1.0", "name": "net", "type": "host-device", "device": "eth1", "mtu": 9000});
    let args = CniArgs::default();
    let alone = Request { recorded: false, ..request(whole.as_object().unwrap(), &args) };
    let error = CniError::from(driver("host-device").unwrap().plan(&alone).unwrap_err());
    let told =
        "key mtu: the device gets its own back by what netattachd has recorded; without it, chain tuning";
    assert_eq!((error.code, error.msg.as_str()), (7, told));
    // An executable that keeps a record gives it back as the agent does.
    let whole = json!({"cniVersion": "1.1.0", "name": "net", "type": "sriov", "deviceID": VF, "mtu": 9000});
    let facts = facts(vf("ixgbevf"));
    let alone = Request { recorded: false, facts: &facts, ..request(whole.as_object().unwrap(), &args) };
    let steps = driver("sriov").unwrap().plan(&alone).unwrap();
    assert_eq!(steps[1], Step::SetDevice(SetDevice { mtu: Some(9000), ..SetDevice::default() }));
}

/// Rows: SRV-keys, SRV-infiniband.
#[test]
fn a_value_that_a_vf_cannot_have_is_refused_by_its_key() {
    for (config, expected) in [
        (json!({"vlan": 4095}), "key vlan: 4095 is not between 0 and 4094"),
        (json!({"vlan": 5, "vlanQoS": 8}), "key vlanQoS: 8 is not between 0 and 7"),
        (json!({"vlanQoS": 3}), "key vlanQoS: needs vlan"),
        (json!({"vlan": 0, "vlanQoS": 3}), "key vlanQoS: 3 needs a vlan other than 0"),
        (json!({"vlanProto": "802.1q"}), "key vlanProto: needs vlan"),
        (json!({"vlan": 0, "vlanProto": "802.1ad"}), "key vlanProto: 802.1ad needs a vlan other than 0"),
        (json!({"vlan": 5, "vlanProto": "x"}), "key vlanProto: \"x\" is neither 802.1q nor 802.1ad"),
        (json!({"spoofchk": "yes"}), "key spoofchk: \"yes\" is neither on nor off"),
        (json!({"trust": "true"}), "key trust: \"true\" is neither on nor off"),
        (json!({"link_state": "up"}), "key link_state: \"up\" is not auto, enable or disable"),
    ] {
        let mut whole = config.clone();
        whole["deviceID"] = json!(VF);
        assert_eq!(plan("sriov", &whole, &facts(vf("igbvf"))), Err((7, expected.to_owned())), "{config}");
    }
    for key in ["rdma", "rdmaIsolation", "guid", "pkey"] {
        let mut whole = json!({"deviceID": VF});
        whole[key] = json!("x");
        let expected = format!("key {key}: \"x\" is not supported");
        let (code, told) = plan("sriov", &whole, &facts(vf("igbvf"))).unwrap_err();
        assert_eq!((code, &told[..expected.len()]), (2, &*expected), "{told}");
    }
    let alone = facts(OnBus { function: None, ..vf("igbvf") });
    let expected = format!("key trust: {VF} has no physical function on this node that could set it");
    assert_eq!(plan("sriov", &json!({"deviceID": VF, "trust": "on"}), &alone), Err((7, expected)));
    assert!(plan("sriov", &json!({"deviceID": VF, "mac": MAC}), &alone).is_ok(), "as host-device");
}

/// Rows: SRV-userspace, HDV-userspace, SRV-rdma.
#[test]
fn a_device_that_passes_the_kernel_is_not_moved_and_judged_nowhere() {
    let steps = plan("sriov", &json!({"deviceID": VF, "vlan": 5}), &facts(vf("vfio-pci"))).unwrap();
    let driven = Device {
        userspace: Some("vfio-pci".into()),
        function: function(),
        ..device(DeviceId::Bus(VF.into()))
    };
    let vlan = VfSettings { vlan: Some(VfVlan { id: 5, ..VfVlan::default() }), ..VfSettings::default() };
    let expected = [
        Step::ClaimDevice(driven.clone()),
        Step::SetDevice(SetDevice { function: vlan, ..SetDevice::default() }),
        Step::Configure(Configure { down: true, ..Configure::default() }),
    ];
    assert_eq!(steps, expected);
    let userspace = NotObservable::Userspace("vfio-pci".into());
    assert_eq!(HookKind::of_device(&driven), HookKind::Nowhere(userspace));
    let rdma = facts(OnBus { rdma: Some("mlx5_3".into()), ..vf("mlx5_core") });
    let steps = plan("host-device", &json!({"deviceID": VF}), &rdma).unwrap();
    let Step::ClaimDevice(claimed) = &steps[0] else { panic!("{steps:?}") };
    assert_eq!(HookKind::of_device(claimed), HookKind::Nowhere(NotObservable::Rdma("mlx5_3".into())));
    let (code, told) =
        plan("host-device", &json!({"deviceID": VF, "mac": MAC}), &facts(vf("vfio-pci"))).unwrap_err();
    assert_eq!(
        (code, told),
        (7, format!("key mac: {VF} is driven by the pod, and has no physical function to set it"))
    );
}

/// Rows: SRV-userspace, HDV-userspace.
#[test]
fn nobody_asks_for_an_address_by_an_interface_that_is_not_there() {
    let told = "key ipam.type: dhcp sends on the pod's interface, but a device that the pod drives has none";
    let asked = json!({"deviceID": VF, "ipam": {"type": "dhcp"}});
    // Also by the daemon of the reference plugin.
    let by_daemon = json!({"deviceID": VF, "ipam": {"type": "dhcp", "daemonSocketPath": "/run/dhcp.sock"}});
    for kind in ["sriov", "host-device"] {
        for config in [&asked, &by_daemon] {
            let refused = plan(kind, config, &facts(vf("vfio-pci"))).unwrap_err();
            assert_eq!(refused, (7, told.to_owned()), "{kind} {config}");
            let steps = plan(kind, config, &facts(vf("ixgbevf"))).unwrap();
            assert!(steps.iter().any(Step::asks_the_network), "{kind} {config}");
        }
    }
}

/// Rows: SRV-rdma-exclusive.
#[test]
fn a_vf_whose_rdma_would_stay_behind_is_refused_unless_the_pod_does_without() {
    let stays = OnBus { rdma: Some("mlx5_3".into()), rdma_stays: true, ..vf("mlx5_core") };
    let told = format!(
        "key rdma: missing, and the RDMA device mlx5_3 of {VF} would stay on the node: it is not moved with the interface, and \
         namespaces do not share it here (rdma system: netns exclusive). false, where the pod does without it"
    );
    let asked = |keys: Value, found: &OnBus| {
        let mut config = json!({"deviceID": VF});
        config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        plan("sriov", &config, &facts(found.clone())).map(drop)
    };
    assert_eq!(asked(json!({}), &stays), Err((7, told.clone())));
    assert_eq!(asked(json!({"rdma": null, "vlan": 5}), &stays), Err((7, told)));
    assert_eq!(asked(json!({"rdma": false}), &stays), Ok(()));
    assert_eq!(asked(json!({"rdma": true}), &stays).unwrap_err().0, 2);
    // A shared RDMA device is available to the pod too; a process that drives the whole device has all of it.
    assert_eq!(asked(json!({}), &OnBus { rdma_stays: false, ..stays.clone() }), Ok(()));
    assert_eq!(asked(json!({}), &OnBus { driver: Some("vfio-pci".into()), ..stays }), Ok(()));
}

/// Rows: SRV-switchdev.
#[test]
fn a_vf_of_a_card_in_mode_switchdev_is_judged_on_the_node_whoever_drives_it() {
    let rdma = Some("mlx5_3".to_owned());
    let on_bus = |driver: &str| OnBus { rdma: rdma.clone(), switchdev: true, ..vf(driver) };
    for (driver, userspace, behind) in [
        ("mlx5_core", None, vec![Step::MoveDevice, Step::Configure(Configure::default())]),
        (
            "vfio-pci",
            Some("vfio-pci".to_owned()),
            vec![Step::Configure(Configure { down: true, ..Configure::default() })],
        ),
    ] {
        let claimed = Device {
            userspace,
            function: function(),
            rdma: rdma.clone(),
            switchdev: true,
            ..device(DeviceId::Bus(VF.into()))
        };
        let steps = plan("sriov", &json!({"deviceID": VF}), &facts(on_bus(driver))).unwrap();
        assert_eq!(HookKind::of_device(&claimed), HookKind::Node);
        let expected = [vec![Step::ClaimDevice(claimed)], behind].concat();
        assert_eq!(steps, expected, "{driver}");
        let limited = json!({"deviceID": VF, "bandwidth": {"ingressRate": 8000, "ingressBurst": 80000}});
        let (code, told) = plan("sriov", &limited, &facts(on_bus(driver))).unwrap_err();
        assert_eq!((code, &told[..13]), (2, "key bandwidth"), "{told}");
        // The plugin for any device does not know virtual functions.
        let steps = plan("host-device", &json!({"deviceID": VF}), &facts(on_bus(driver))).unwrap();
        let Step::ClaimDevice(claimed) = &steps[0] else { panic!("{steps:?}") };
        assert_eq!((claimed.function.as_ref(), claimed.switchdev), (None, false), "{driver}");
    }
}
