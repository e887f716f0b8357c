//! `host-device`: a device of the node in a pod, and back.

use std::net::IpAddr;
use std::path::Path;
use std::time::Instant;

use ipnet::IpNet;
use netattach::netlink::{DeviceState, Handle};
use netattach_tests::Namespace;
use netattach_tests::node::ip;
use netattach_tests::other_programs::{
    Verdict, all_programs, attach_tcx_for_good, index_of, occupy, program,
};
use netattach_tests::raw::RawSocket;
use netattach_tests::runtime::{Call, config, with_result};
use netattach_tests::tools;
use netattach_tests::traffic::{PATIENCE, eventually, stretched};
use serde_json::{Value, json};

use super::{MAC, Rig, VERSIONS, addresses, mac_of};

const CARD: &str = "card0";
const PAIR: [&str; 10] = ["link", "add", CARD, "address", MAC, "type", "veth", "peer", "name", "card1"];

/// A node with a device of its own, whose address is [`MAC`].
fn rig() -> Rig {
    let rig = Rig::new();
    ip(&rig.runtime.node, &PAIR).unwrap();
    ip(&rig.runtime.node, &["link", "set", "card1", "up"]).unwrap();
    rig
}

fn card(mut namespace: Handle, name: &str) -> Option<DeviceState> {
    namespace.devices().unwrap().into_iter().find(|device| device.link.name == name)
}

fn keys(rig: &Rig) -> Value {
    config("1.0.0", "host-device", &json!({"device": CARD, "ipam": rig.ipam()}))
}

/// Rows: HDV-back, HDV-twice.
#[test]
fn a_device_goes_to_the_pod_and_comes_back_under_its_name_as_often_as_it_is_asked() {
    let rig = rig();
    let before = card(rig.node(), CARD).unwrap();
    let mut config = keys(&rig);
    config["mac"] = json!(MAC);
    let result = rig.add(&config);
    let inside = card(rig.inside(), "eth0").unwrap();
    assert!(inside.link.up && card(rig.node(), CARD).is_none());
    assert_eq!(addresses(&mut rig.inside(), inside.link.index), ["10.1.0.2/24", "fd00:1::2/64"]);
    assert_eq!((inside.alias.as_deref(), mac_of(&inside.link).as_str()), (Some(CARD), MAC));
    assert_eq!(
        result["interfaces"],
        json!([{"name": "eth0", "mac": MAC, "mtu": 1500, "sandbox": rig.pod.path()}])
    );
    rig.after("CHECK", &config, &result);
    // A repeated ADD finds its interface there, and does not take it from the pod.
    let (code, told) = rig.refusal("ADD", &config);
    assert_eq!(code, 4, "{told}");
    rig.after("CHECK", &config, &result);
    let mut result = result;
    // A DEL without a namespace takes the device from that of the ADD: nobody else would give it back.
    for netns in [rig.pod.path(), Path::new("")] {
        for _ in 0..2 {
            rig.runtime.after("DEL", Call { netns, ..rig.call() }, &config, &result).unwrap();
            assert_eq!(card(rig.node(), CARD), Some(before.clone()), "{netns:?}");
            assert_eq!(card(rig.inside(), "eth0"), None, "{netns:?}");
            assert_eq!(rig.reserved(), [""; 0], "{netns:?}");
        }
        result = rig.add(&config);
    }
    // A device that is gone with its namespace need not be returned.
    ip(&rig.runtime.node, &["link", "del", "card1"]).unwrap();
    rig.after("DEL", &config, &result);
    assert_eq!(rig.reserved(), [""; 0]);
}

/// Rows: HDV-rollback.
#[test]
fn an_add_that_fails_when_the_device_is_in_the_pod_gives_it_back_exactly_as_it_was() {
    let rig = rig();
    let set = ["link", "set", CARD, "alias", "port 3 of rack 7", "mtu", "1400", "up"];
    for words in [&set[..], &["link", "property", "add", "dev", CARD, "altname", "enp3s0"]] {
        ip(&rig.runtime.node, words).unwrap();
    }
    let before = card(rig.node(), CARD);
    let mut config = keys(&rig);
    config["ipam"]["routes"] = json!([{"dst": "10.9.0.0/16", "gw": "192.0.2.1"}]);
    let (code, told) = rig.refusal("ADD", &config);
    assert!(code == 7 && told.contains("configure the pod's interface: RTM_NEWROUTE"), "{code}: {told}");
    assert_eq!((card(rig.node(), CARD), card(rig.inside(), "eth0")), (before, None));
    assert_eq!(rig.reserved(), [""; 0]);
}

/// Rows: HDV-mac.
#[test]
fn a_device_gets_no_ethernet_address_of_another_of_the_node() {
    let rig = rig();
    let other = mac_of(&rig.node().link("uplink").unwrap());
    let mut config = keys(&rig);
    config["mac"] = json!(other);
    let (code, told) = rig.refusal("ADD", &config);
    let expected = format!("MAC address {other} is taken: the node's device uplink has it");
    assert!(code == 7 && told.ends_with(&expected), "{code}: {told}");
    assert!(card(rig.node(), CARD).is_some() && card(rig.inside(), "eth0").is_none());
    assert_eq!(rig.reserved(), [""; 0]);
    // Its own it has already.
    config["mac"] = json!(mac_of(&rig.node().link(CARD).unwrap()));
    let result = rig.add(&config);
    assert_eq!(result["interfaces"][0]["mac"], config["mac"]);
    rig.after("DEL", &config, &result);
    assert!(card(rig.node(), CARD).is_some());
}

/// Rows: HDV-mac-back.
#[test]
fn an_address_that_a_device_would_keep_for_ever_is_refused() {
    let rig = rig();
    let before = card(rig.node(), CARD);
    let mut config = keys(&rig);
    config["mac"] = json!("02:00:00:00:00:08");
    let (code, told) = rig.refusal("ADD", &config);
    let expected = "key mac: device card0 has an address other than its permanent one, which only a record of netattachd can restore; without netattachd, chain tuning";
    assert!(code == 7 && told.ends_with(expected), "{code}: {told}");
    assert_eq!((card(rig.node(), CARD), card(rig.inside(), "eth0")), (before, None));
    assert_eq!(rig.reserved(), [""; 0]);
}

/// Rows: HDV-programs.
#[test]
fn a_program_that_a_pod_has_put_on_its_device_goes_without_an_agent_too() {
    let rig = rig();
    let config = keys(&rig);
    let result = rig.add(&config);
    let index = index_of(&rig.pod, "eth0").unwrap();
    for ingress in [true, false] {
        attach_tcx_for_good(&rig.pod, index, ingress, &program(Verdict::Drop).unwrap()).unwrap();
    }
    assert_eq!(all_programs(&rig.pod, "eth0").unwrap().len(), 2);
    rig.after("DEL", &config, &result);
    assert_eq!(all_programs(&rig.runtime.node, CARD).unwrap(), [0; 0]);
}

/// One of those is the name of the pod's interface.
///
/// Rows: HDV-altname.
#[test]
fn a_device_goes_back_with_its_other_names_and_its_alias_without_an_agent_too() {
    let rig = rig();
    ip(&rig.runtime.node, &["link", "set", CARD, "alias", "port 3 of rack 7"]).unwrap();
    for name in ["enp3s0", "eth0"] {
        ip(&rig.runtime.node, &["link", "property", "add", "dev", CARD, "altname", name]).unwrap();
    }
    let words = |mut found: DeviceState| {
        found.other_names.sort();
        (found.alias, found.other_names, found.link.mtu, mac_of(&found.link))
    };
    let before = words(card(rig.node(), CARD).unwrap());
    let config = keys(&rig);
    let result = rig.add(&config);
    let inside = card(rig.inside(), "eth0").unwrap();
    assert_eq!((inside.alias.as_deref(), inside.other_names), (Some(CARD), Vec::new()));
    ip(&rig.pod, &["link", "set", "eth0", "mtu", "1400", "address", "02:00:00:00:00:08"]).unwrap();
    ip(&rig.pod, &["link", "property", "add", "dev", "eth0", "altname", "of-pod"]).unwrap();
    // It has the interface, and keeps its former properties.
    rig.refusal("ADD", &config);
    for _ in 0..2 {
        rig.after("DEL", &config, &result);
        assert_eq!(words(card(rig.node(), CARD).unwrap()), before);
    }
}

/// Rows: HDV-gc.
#[test]
fn gc_gives_back_a_device_whose_del_never_came_and_no_other() {
    let rig = rig();
    ip(&rig.runtime.node, &["link", "set", CARD, "alias", "port 3 of rack 7"]).unwrap();
    let mut config = keys(&rig);
    config["cniVersion"] = json!("1.1.0");
    let result = rig.add(&config);
    let collected_by = |network: &str, valid: Option<Value>| {
        let mut gc = config.clone();
        gc["name"] = json!(network);
        if let Some(valid) = valid {
            gc["cni.dev/valid-attachments"] = valid;
        }
        rig.alone("GC", &gc);
        card(rig.node(), CARD).map(|back| (back.alias, back.link.up))
    };
    // Without a list, of another network, and of an attachment that is in use.
    assert_eq!(collected_by("net", None), None);
    assert_eq!(collected_by("another", Some(json!([]))), None);
    let own = json!([{"containerID": "c1", "ifname": "eth0"}]);
    assert_eq!(collected_by("net", Some(own)), None);
    let others = json!([{"containerID": "c2", "ifname": "eth0"}, {"containerID": "c1", "ifname": "eth1"}]);
    let back = Some((Some("port 3 of rack 7".to_owned()), false));
    assert_eq!(collected_by("net", Some(others)), back);
    assert!(card(rig.inside(), "eth0").is_none());
    // The stored properties are removed with it: a later change by an administrator stays.
    ip(&rig.runtime.node, &["link", "set", CARD, "alias", "port 4"]).unwrap();
    assert_eq!(collected_by("net", Some(json!([]))), Some((Some("port 4".to_owned()), false)));
    rig.after("DEL", &config, &result);
    assert_eq!(card(rig.node(), CARD).unwrap().alias.as_deref(), Some("port 4"));
}

/// Rows: HDV-above.
#[test]
fn what_a_pod_has_put_above_its_device_goes_without_an_agent_too() {
    let rig = rig();
    let config = keys(&rig);
    let result = rig.add(&config);
    occupy(&rig.pod, "eth0", false).unwrap();
    ip(&rig.pod, &["link", "add", "link", "eth0", "name", "lan", "type", "macvlan"]).unwrap();
    occupy(&rig.pod, "lan", false).unwrap();
    rig.after("DEL", &config, &result);
    assert_eq!(all_programs(&rig.runtime.node, CARD).unwrap(), [0; 0]);
    assert!(card(rig.inside(), "lan").is_none());
}

/// Rows: HDV-carrier.
#[test]
fn neighbours_are_told_once_a_late_carrier_is_there_and_no_add_waits_long_for_one_that_never_comes() {
    let rig = Rig::new();
    ip(&rig.runtime.node, &PAIR).unwrap();
    let mut config = keys(&rig);
    config["mac"] = json!(MAC);
    // The other end does not come up.
    let began = Instant::now();
    let result = rig.add(&config);
    assert!(began.elapsed() < stretched(PATIENCE));
    let inside = card(rig.inside(), "eth0").unwrap();
    assert!(inside.link.up);
    assert_eq!(addresses(&mut rig.inside(), inside.link.index), ["10.1.0.2/24", "fd00:1::2/64"]);
    rig.after("CHECK", &config, &result);
    rig.after("DEL", &config, &result);
    // It comes up while the ADD waits: announcements before that would be lost.
    let outside = RawSocket::open(&rig.runtime.node, "card1").unwrap();
    assert!(outside.frames().is_err(), "it is down");
    let result = std::thread::scope(|scope| {
        let coming = scope.spawn(|| {
            let is_up = || card(rig.inside(), "eth0").is_some_and(|device| device.link.up);
            assert!(eventually(PATIENCE, is_up));
            let mut node = rig.node();
            let other = node.link("card1").unwrap().index;
            node.ensure_up(other).unwrap();
        });
        let result = rig.add(&config);
        coming.join().unwrap();
        result
    });
    let address: IpNet = result["ips"][0]["address"].as_str().unwrap().parse().unwrap();
    let IpAddr::V4(address) = address.addr() else { panic!("{address}") };
    // A request for its own address (RFC 826): sender by Ethernet and by IP, no target, and the same address.
    let told = [&[2_u8, 0, 0, 0, 0, 7][..], &address.octets(), &[0; 6], &address.octets()].concat();
    let frames = outside.frames_until(&told, PATIENCE).unwrap();
    assert!(frames.last().is_some_and(|frame| frame.ends_with(&told)), "{frames:?}");
    rig.after("DEL", &config, &result);
}

/// Rows: HDV-in-use, HDV-keys.
#[test]
fn what_the_node_needs_stays_and_what_is_not_there_is_named() {
    let rig = rig();
    let refusal = |config: &Value| {
        let refused = rig.refusal("ADD", config);
        assert_eq!(rig.reserved(), [""; 0]);
        refused
    };
    let gone = config("1.0.0", "host-device", &json!({"device": "nosuch"}));
    let (code, told) = refusal(&gone);
    assert_eq!(code, 11);
    assert!(told.contains("the node has no network interface of device nosuch"), "{told}");
    ip(&rig.runtime.node, &["link", "set", CARD, "master", "uplink"]).unwrap();
    let (code, told) = refusal(&keys(&rig));
    assert_eq!(code, 7);
    assert!(told.ends_with("device card0 stays on the node: it is a port of a bridge or a bond"), "{told}");
    ip(&rig.runtime.node, &["link", "set", CARD, "nomaster", "up"]).unwrap();
    ip(&rig.runtime.node, &["address", "add", "192.0.2.1/24", "dev", CARD]).unwrap();
    ip(&rig.runtime.node, &["route", "add", "default", "via", "192.0.2.9"]).unwrap();
    let (code, told) = refusal(&keys(&rig));
    assert_eq!(code, 7);
    let expected = "device card0 stays on the node: a default route of the node leads through it";
    assert!(told.ends_with(expected), "{told}");
    assert_eq!(addresses(&mut rig.node(), card(rig.node(), CARD).unwrap().link.index), ["192.0.2.1/24"]);
}

/// Rows: HDV-each-other.
#[test]
fn each_gives_back_what_the_other_took() {
    let names = ["host-device", "host-local"];
    let Some(reference) = tools::directory("each_gives_back", "NETATTACH_REFERENCE_PLUGINS", &names) else {
        return;
    };
    for taken_by_us in [true, false] {
        let mut rig = rig();
        let (mut config, ours) = (keys(&rig), rig.runtime.plugins.clone());
        let (first, second) = if taken_by_us { (&ours, &reference) } else { (&reference, &ours) };
        for version in VERSIONS {
            config["cniVersion"] = json!(version);
            rig.runtime.plugins.clone_from(first);
            let result = rig.add(&config);
            assert!(card(rig.node(), CARD).is_none(), "{version}");
            rig.runtime.plugins.clone_from(second);
            rig.after("DEL", &config, &result);
            let is_back = card(rig.node(), CARD).is_some() && card(rig.inside(), "eth0").is_none();
            assert!(is_back, "{version} {taken_by_us}");
            assert_eq!(rig.reserved(), [""; 0], "{version}");
            // Only our own DEL removes the stored former properties of the device.
            rig.runtime.plugins.clone_from(&ours);
            rig.after("DEL", &config, &result);
        }
    }
}

/// An administrator's group is not overwritten; devices attached by an earlier version or by the reference have none
/// either.
///
/// Rows: HDV-unmarked.
#[test]
fn a_device_that_nothing_marks_as_another_containers_goes_home_whatever_address_it_has() {
    let others = "02:00:00:00:00:08";
    for by_tuning in [true, false] {
        let rig = rig();
        ip(&rig.runtime.node, &["link", "set", CARD, "group", "5"]).unwrap();
        let config_of_device = keys(&rig);
        let mut result = rig.add(&config_of_device);
        if by_tuning {
            let extra = json!({"mac": others, "dataDir": rig.dir.path().join("tuning")});
            let tuning = config("1.0.0", "tuning", &extra);
            result = rig.add(&with_result(&tuning, &result));
            assert_eq!(result["interfaces"][0]["mac"], others);
            rig.after("DEL", &tuning, &result);
        } else {
            ip(&rig.pod, &["link", "set", "eth0", "address", others]).unwrap();
        }
        rig.after("DEL", &config_of_device, &result);
        let back = card(rig.node(), CARD).unwrap();
        let shown = (mac_of(&back.link), back.link.group, back.alias);
        assert_eq!(shown, (MAC.to_owned(), 5, None), "{by_tuning}");
        assert!(card(rig.inside(), "eth0").is_none(), "{by_tuning}");
        assert_eq!(rig.reserved(), [""; 0], "{by_tuning}");
    }
}

/// A name that the pod has is not taken, and the device stays.
///
/// Rows: HDV-alias.
#[test]
fn a_pod_that_has_the_name_keeps_its_interface_and_the_node_its_device() {
    let rig = rig();
    ip(&rig.pod, &["link", "add", "eth0", "type", "bridge"]).unwrap();
    let (code, told) = rig.refusal("ADD", &keys(&rig));
    assert_eq!((code, told.ends_with("the pod has an interface named eth0 already")), (4, true), "{told}");
    let other = Namespace::new().unwrap();
    let result = rig.runtime.add(Call { netns: other.path(), ..rig.call() }, &keys(&rig)).unwrap();
    // Another link has the name on the node meanwhile.
    ip(&rig.runtime.node, &["link", "add", CARD, "type", "bridge"]).unwrap();
    let call = Call { netns: other.path(), ..rig.call() };
    rig.runtime.after("DEL", call, &keys(&rig), &result).unwrap();
    let kinds = [CARD, "dev0"].map(|name| rig.node().link(name).unwrap().kind);
    assert_eq!(kinds, ["bridge", "veth"]);
    assert!(card(Handle::open_in(other.netns()).unwrap(), "eth0").is_none());
}

/// A container with `CAP_NET_ADMIN` has set it.
///
/// Rows: HDV-alias.
#[test]
fn an_alias_that_is_no_free_name_keeps_no_device_in_its_container() {
    for alias in ["lo", "a/b", "card%d", "longer-than-any-name-of-a-link"] {
        let rig = rig();
        let result = rig.add(&keys(&rig));
        ip(&rig.pod, &["link", "set", "eth0", "alias", alias]).unwrap();
        rig.after("DEL", &keys(&rig), &result);
        let back = card(rig.node(), "dev0").unwrap();
        assert_eq!((back.link.up, back.alias), (false, None), "{alias}");
        assert!(card(rig.inside(), "eth0").is_none(), "{alias}");
    }
}
