//! Links that are made in the pod: vlan, dummy, tap; and its loopback.

use super::*;

/// Rows: VLN-vlanProto, DMY-keys.
#[test]
fn a_vlan_and_a_dummy_are_made_in_the_pod() {
    let tag = |id, service| spec::VlanTag { id, service };
    let made = |parent: &str, tag| spec::Vlan {
        pod_name: "net1".into(),
        parent: parent.into(),
        tag,
        mtu: None,
        mac: None,
        group: GROUP,
        in_pod: false,
    };
    let vlan = |made: spec::Vlan| Step::CreateLink(spec::Link::Vlan(made));
    let expected = [vlan(made("eth1", tag(5, false))), lease("vlan"), configure(Style::Subnet, false)];
    assert_eq!(plan("vlan", json!({"master": "eth1", "vlanId": 5, "ipam": pool()})), expected);
    let outer = plan("vlan", json!({"master": "eth1", "vlanId": 6, "vlanProto": "802.1AD"}));
    assert_eq!(outer, [vlan(made("eth1", tag(6, true))), configure(Style::Subnet, false)]);
    let inside = plan("vlan", json!({"master": "eth0", "vlanId": 7, "linkInContainer": true}));
    assert_eq!(inside[0], vlan(spec::Vlan { in_pod: true, ..made("eth0", tag(7, false)) }));
    for (config, expected) in [
        (json!({"vlanId": 5}), "key master: missing; name the interface whose VLAN it is"),
        (json!({"master": "eth1", "vlanId": 4095}), "key vlanId: 4095 is not between 0 and 4094"),
        (json!({"master": "eth1", "vlanId": -1}), "key vlanId: -1 is not between 0 and 4094"),
        (
            json!({"master": "eth1", "vlanProto": "qinq"}),
            "key vlanProto: \"qinq\" is neither 802.1q nor 802.1ad",
        ),
        (
            json!({"master": "net1", "vlanId": 5, "linkInContainer": true}),
            "key master: \"net1\" is the interface that is to be made",
        ),
    ] {
        assert_eq!(refusal("vlan", &config, ""), (7, expected.to_owned()));
    }
    let dummy = spec::Dummy {
        pod_name: "net1".into(),
        mtu: Some(1400),
        mac: Some(MAC.parse().unwrap()),
        group: GROUP,
    };
    let expected =
        [Step::CreateLink(spec::Link::Dummy(dummy)), lease("dummy"), configure(Style::Subnet, false)];
    assert_eq!(plan("dummy", json!({"mtu": 1400, "mac": MAC, "ipam": pool()})), expected);
    assert_eq!(
        refusal("dummy", &json!({}), ""),
        (7, "key ipam: missing, and a dummy needs addresses".into())
    );
}

#[test]
fn a_tap_is_made_in_the_pod_and_a_bridges_port_sends_for_others() {
    let tap = |access, bridge: Option<&str>| spec::Tap {
        pod_name: "net1".into(),
        mtu: None,
        mac: None,
        group: GROUP,
        access,
        bridge: bridge.map(Into::into),
    };
    let all = spec::TapAccess { owner: Some(0), group: Some(107), multi_queue: true };
    let full = spec::Tap { mtu: Some(1400), mac: Some(MAC.parse().unwrap()), ..tap(all, Some("br0")) };
    let made = |tap| Step::CreateLink(spec::Link::Tap(tap));
    let keys = json!({"mtu": 1400, "mac": MAC, "owner": 0, "group": 107, "multiQueue": true, "bridge": "br0",
        "selinuxContext": "", "ipam": pool()});
    assert_eq!(plan("tap", keys), [made(full), lease("tap"), configure(Style::Subnet, false)]);
    let none = json!({"mtu": 0, "owner": null, "group": null, "multiQueue": null, "bridge": "", "mac": ""});
    let expected = [made(tap(spec::TapAccess::default(), None)), configure(Style::Subnet, false)];
    assert_eq!(plan("tap", none), expected);
    for (config, expected) in [
        (json!({"bridge": "net1"}), "key bridge: \"net1\" is the interface that is to be made"),
        (
            json!({"bridge": "br0", "sourceCheck": "full"}),
            "key sourceCheck: without effect: the tap is a bridge's port, which sends for others",
        ),
        (
            json!({"bridge": "br0", "sourceCheck": "mac"}),
            "key sourceCheck: without effect: the tap is a bridge's port, which sends for others",
        ),
        (
            json!({"bridge": "br0", "allowedAddresses": ["10.1.0.9"]}),
            "key allowedAddresses: without effect: the tap is a bridge's port, which sends for others",
        ),
        (json!({"owner": u32::MAX}), "key owner: 4294967295 is nobody's number"),
        (json!({"group": u32::MAX}), "key group: 4294967295 is nobody's number"),
        (json!({"mtu": 60}), "key mtu: 60 is not between 68 and 65535"),
    ] {
        assert_eq!(refusal("tap", &config, ""), (7, expected.to_owned()));
    }
    let checked = |keys: Value| {
        let protect = Protect::verified();
        let (mut config, args) = (object(keys), CniArgs::default());
        config.insert("name".into(), "net".into());
        let steps =
            driver("tap").unwrap().plan(&Request { protect: Some(&protect), ..request(&config, &args) });
        steps.unwrap().into_iter().find_map(|step| match step {
            Step::Protect(protect) => Some((protect.check_mac, protect.check_addresses, protect.fast_path)),
            _ => None,
        })
    };
    assert_eq!(checked(json!({"ipam": pool()})), Some((true, true, true)));
    assert_eq!(checked(json!({"ipam": pool(), "bridge": "br0"})), Some((false, false, true)));
    let off = json!({"ipam": pool(), "bridge": "br0", "sourceCheck": "off", "allowedAddresses": []});
    assert_eq!(checked(off), Some((false, false, false)));
}

#[test]
fn loopback_is_raised_whatever_the_configuration_says() {
    assert_eq!(plan("loopback", json!({"ipam": 7, "mtu": "x"})), [Step::RaiseLoopback]);
}
