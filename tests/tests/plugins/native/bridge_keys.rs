//! Keys of `bridge` that make its port more than a port: VLANs, isolation, duplicates, an interface that stays down.

use netattach::netlink::{VlanUse, VlanUses};
use netattach::spec::{BridgePort, PortVlans};
use netattach_tests::Namespace;
use netattach_tests::node::ip;
use netattach_tests::runtime::{Call, config, with_result};
use netattach_tests::tools::bridges_filter_by_vlan;
use serde_json::{Value, json};

use super::{Rig, addresses};

const NATIVE: VlanUse = VlanUse { pvid: true, untagged: true };
const TAGGED: VlanUse = VlanUse { pvid: false, untagged: false };

/// Runs if the other tests of VLANs are skipped.
#[test]
fn a_kernel_whose_bridges_know_no_vlans_is_named_and_nothing_is_left() {
    let rig = Rig::new();
    let node = Namespace::new().unwrap();
    if ip(&node, &["link", "add", "probe", "type", "bridge", "vlan_filtering", "1"]).is_ok() {
        return;
    }
    let (code, message) =
        rig.refusal("ADD", &config("1.0.0", "bridge", &json!({"bridge": "br0", "vlan": 5})));
    assert_eq!(code, 50, "{message}");
    let expected = "the kernel of this node has no driver for links of kind bridge with VLAN filtering";
    assert!(message.contains(expected), "{message}");
    rig.assert_nothing_left("a kernel without VLANs");
}

/// Rows: BRG-portIsolation.
#[test]
fn an_isolated_port_is_one_in_the_kernel_and_check_finds_that_it_is_not_any_more() {
    let rig = Rig::new();
    let config = config("1.0.0", "bridge", &json!({"bridge": "br0", "portIsolation": true}));
    let result = rig.add(&config);
    let port = rig.links().1[0].clone();
    assert!(rig.node().link(&port).unwrap().isolated);
    rig.after("CHECK", &config, &result);
    ip(&rig.runtime.node, &["link", "set", &port, "type", "bridge_slave", "isolated", "off"]).unwrap();
    let (_, message) = rig.refusal("CHECK", &with_result(&config, &result));
    assert!(message.ends_with(&format!("port {port} is not isolated")), "{message}");
    rig.after("DEL", &config, &result);
    rig.assert_nothing_left("after DEL");
}

fn vlans_of(rig: &Rig, link: &str) -> VlanUses {
    let mut node = rig.node();
    let index = node.link(link).unwrap().index;
    node.port_vlans().unwrap().remove(&index).unwrap_or_default()
}

/// Rows: BRG-vlan, BRG-vlanTrunk, BRG-vlan-both.
#[test]
fn a_port_is_in_its_vlans_and_in_no_other() {
    if !bridges_filter_by_vlan("a_port_is_in_its_vlans_and_in_no_other") {
        return;
    }
    let rig = Rig::new();
    let keys = json!({
        "bridge": "br0", "vlan": 100, "vlanTrunk": [{"id": 7}, {"minID": 99, "maxID": 101}],
        "preserveDefaultVlan": false, "portIsolation": true,
    });
    let config = config("1.0.0", "bridge", &keys);
    let result = rig.add(&config);
    let port = rig.links().1[0].clone();
    let expected = VlanUses::from([(7, TAGGED), (99, TAGGED), (100, NATIVE), (101, TAGGED)]);
    assert_eq!(vlans_of(&rig, &port), expected);
    assert!(rig.node().link(&port).unwrap().isolated);
    rig.after("CHECK", &config, &result);
    let index = rig.node().link(&port).unwrap().index;
    let one_more = PortVlans { tagged: vec![(5, 5)], keeps_default: true, ..PortVlans::default() };
    let more = BridgePort { vlans: Some(one_more), ..BridgePort::default() };
    rig.node().ensure_port(index, &more).unwrap();
    let (_, message) = rig.refusal("CHECK", &with_result(&config, &result));
    assert!(message.ends_with(&format!("port {port} is in other VLANs")), "{message}");
    rig.after("DEL", &config, &result);
    rig.assert_nothing_left("after DEL");
}

/// Rows: BRG-vlan-gateway, BRG-vlan-leak.
#[test]
fn a_vlans_gateway_is_on_a_device_of_its_own_that_goes_when_the_add_fails() {
    if !bridges_filter_by_vlan("a_vlans_gateway_is_on_a_device_of_its_own_that_goes_when_the_add_fails") {
        return;
    }
    let rig = Rig::new();
    let keys = |mtu: u32| {
        json!({
            "bridge": "br9", "vlan": 5, "preserveDefaultVlan": false, "isGateway": true, "mtu": mtu, "ipam": rig.ipam(),
        })
    };
    let (code, message) = rig.refusal("ADD", &config("1.0.0", "bridge", &keys(1000)));
    assert_eq!(code, 7, "{message}");
    assert!(message.ends_with("mtu 1000 is below 1280, which IPv6 needs"), "{message}");
    rig.assert_nothing_left("after an ADD that failed when the gateway was there");

    let config = config("1.0.0", "bridge", &keys(1400));
    let result = rig.add(&config);
    let names: Vec<&Value> =
        result["interfaces"].as_array().unwrap().iter().map(|interface| &interface["name"]).collect();
    assert_eq!(names[3], "br9.5");
    let (mut node, device) = (rig.node(), rig.node().link("br9.5").unwrap());
    let bridge = node.link("br9").unwrap().index;
    assert_eq!(addresses(&mut node, device.index), ["10.1.0.1/24", "fd00:1::1/64"]);
    assert_eq!(addresses(&mut node, bridge), [""; 0]);
    let port = node.find_end_here(&device).unwrap().unwrap();
    assert_eq!(port.controller, Some(bridge));
    assert_eq!(vlans_of(&rig, &port.name), VlanUses::from([(5, NATIVE)]));
    rig.after("CHECK", &config, &result);
    // Out of the bridge, as when that was made again.
    ip(&rig.runtime.node, &["link", "set", &port.name, "nomaster"]).unwrap();
    let second = Namespace::new().unwrap();
    let call = Call { container: "c2", netns: second.path(), ..rig.call() };
    rig.runtime.add(call, &config).unwrap();
    assert_eq!(vlans_of(&rig, &port.name), VlanUses::from([(5, NATIVE)]));
    for call in [rig.call(), call] {
        rig.runtime.after("DEL", call, &config, &result).unwrap();
    }
    // It exists as long as the bridge.
    let own = node.own_bridges().unwrap();
    let (own, ports) = own.iter().find(|(bridge, _)| bridge.name == "br9").unwrap();
    assert_eq!(*ports, 0);
    node.ensure_own_bridge_absent(own).unwrap();
    rig.assert_nothing_left("after the bridge");
}

/// Rows: BRG-vlan-existing.
#[test]
fn a_bridge_of_others_that_knows_no_vlans_is_refused_and_one_of_ours_learns_them() {
    if !bridges_filter_by_vlan(
        "a_bridge_of_others_that_knows_no_vlans_is_refused_and_one_of_ours_learns_them",
    ) {
        return;
    }
    let rig = Rig::new();
    ip(&rig.runtime.node, &["link", "add", "theirs", "type", "bridge"]).unwrap();
    let keys = |bridge: &str| config("1.0.0", "bridge", &json!({"bridge": bridge, "vlan": 5}));
    let (code, message) = rig.refusal("ADD", &keys("theirs"));
    assert_eq!(code, 7);
    let expected = "bridge theirs does not filter by VLAN and was not made by netattach: switch it on (vlan_filtering 1), or remove the bridge";
    assert!(message.ends_with(expected), "{message}");
    ip(&rig.runtime.node, &["link", "del", "theirs"]).unwrap();
    let uplink = rig.node().link("uplink").unwrap().index;
    assert!(!rig.node().filters_by_vlan(uplink).unwrap());
    rig.add(&keys("uplink"));
    assert!(rig.node().filters_by_vlan(uplink).unwrap());
}

/// Rows: BRG-enabledad.
#[test]
fn a_duplicate_is_found_where_enabledad_asks_for_it() {
    let rig = Rig::new();
    let ipam = json!({"type": "static", "addresses": [{"address": "fd00:1::7/64"}]});
    let config = config("1.0.0", "bridge", &json!({"bridge": "br0", "enabledad": true, "ipam": ipam}));
    let result = rig.add(&config);
    let second = Namespace::new().unwrap();
    let call = Call { container: "c2", netns: second.path(), ..rig.call() };
    let (code, message) = rig.runtime.refusal("ADD", call, &config).unwrap();
    assert_eq!(code, 11);
    let expected = "address fd00:1::7 is taken: another host on the link has answered for it";
    assert!(message.ends_with(expected), "{message}");
    rig.after("DEL", &config, &result);
    rig.assert_nothing_left("after DEL");
}

/// Rows: BRG-disableContainerInterface.
#[test]
fn an_interface_that_is_disabled_stays_down() {
    let rig = Rig::new();
    let keys = json!({"bridge": "br0", "disableContainerInterface": true});
    let down = config("1.0.0", "bridge", &keys);
    let result = rig.add(&down);
    assert!(!rig.inside().link("eth0").unwrap().up);
    rig.after("CHECK", &down, &result);
    rig.after("DEL", &down, &result);
    let mut addressed = down;
    addressed["ipam"] = rig.ipam();
    let (code, message) = rig.refusal("ADD", &addressed);
    let expected = "key disableContainerInterface: an interface that stays down has no use for ipam";
    assert_eq!((code, message.as_str()), (7, expected));
}
