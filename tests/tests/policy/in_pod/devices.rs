//! Devices of the node that netattach itself moves to pods.

use std::fs;

use netattach::netlink::Handle;
use netattach_tests::other_programs::{
    Verdict, all_programs, attach_filter, attach_tcx, index_of, occupy, program,
};
use netattach_tests::record::rewritten;

use super::*;

/// Rows: HDV-level, HDV-owner.
#[test]
fn a_device_that_the_agent_takes_is_judged_in_the_pod_is_one_pods_and_goes_back() {
    let test = "a_device_that_the_agent_takes";
    let settings = [("delegation", json!({"exec": []}))];
    let Some(mut scene) = Scene::new(test, &settings, &[("policy", only_the_client())]) else { return };
    let served = scene.serve();
    assert!(eventually(PATIENCE, || scene.links().len() == 4));
    let row = scene.row("server");
    let told = ["kind", "enforcement", "host_interface"].map(|key| row[key].clone());
    assert_eq!(told, [json!("host-device"), json!("full-unless-privileged"), Value::Null], "{row:#}");
    // Without an end on the node there is no fast path to be on.
    assert_eq!(row.get("fast_path"), None, "{row:#}");
    let holds = |scene: &Scene| {
        connects(&scene.client.namespace, at(SERVER, 80)[0], PATIENCE)
            && !connects(&scene.client.namespace, at(SERVER, 81)[0], SILENCE)
            && !connects(&scene.wires.beyond, at(SERVER, 80)[0], SILENCE)
            && connects(&scene.wires.beyond, at(CLIENT, 80)[0], PATIENCE)
    };
    assert!(holds(&scene));

    // Another pod requests the device of the first, which that pod has renamed meanwhile; then the agent is killed.
    scene.node.write("other", &pod("other", &json!({"app": "other"}), &json!("wire-server"))).unwrap();
    let other = Pod::new("other").unwrap();
    for _ in 0..2 {
        let (code, told) = scene.node.add(&other).failure();
        assert_eq!(code, 11, "{told}");
        assert!(told.contains("device server is taken: pod shop/server, container "), "{told}");
        scene.node.kill().unwrap();
        scene.node.start().unwrap();
        assert!(holds(&scene));
    }
    for pod in [&scene.server, &scene.client] {
        scene.node.check(pod).success();
    }
    drop(served);
    ip(&scene.server.namespace, &["link", "set", "net1", "down"]).unwrap();
    ip(&scene.server.namespace, &["link", "set", "net1", "name", "mine"]).unwrap();
    scene.node.del(&scene.server).success();
    // The returned device can be used by the next pod.
    scene.node.add(&other).success();
    scene.node.del(&scene.server).success();
    scene.node.check(&other).success();
    scene.node.del(&other).success();
    scene.end();
}

/// The address that `tuning` requests is set on the device before packets of the pod are judged.
///
/// Rows: TUN-home.
#[test]
fn a_device_that_is_tuned_to_another_address_sends_by_it_and_goes_home_with_its_own() {
    const MAC: &str = "02:00:00:00:00:07";
    let mut node = Node::new(&[]).unwrap();
    let wires = Wires::new(&node, &["card"]).unwrap();
    let mut first = Wires::config("card", SERVER);
    let version = first.as_object_mut().unwrap().remove("cniVersion");
    let tuning = json!({"type": "tuning", "mac": MAC, "mtu": 1400});
    let keys = json!({"cniVersion": version, "name": "card", "plugins": [first, tuning]});
    node.write("card", &network(NAMESPACE, "card", &keys)).unwrap();
    node.write("a", &pod("a", &json!({}), &json!("card"))).unwrap();
    node.start().unwrap();
    let home = || Handle::open_in(node.namespace.netns()).unwrap().properties("card").unwrap();
    let before = home();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let found = Handle::open_in(a.namespace.netns()).unwrap().properties("net1").unwrap();
    assert_eq!((found.mac, found.mtu), (MAC.parse().ok(), Some(1400)));
    assert_eq!(node.status(&a).unwrap()[1]["mac"], MAC);
    node.check(&a).success();
    let server = Echo::serve(&wires.beyond, format!("{}:80", BEYOND[0]).parse().unwrap()).unwrap();
    assert!(connects(&a.namespace, server.address(), PATIENCE));
    node.del(&a).success();
    assert_eq!(home(), before);
}

/// Also if the ADD fails after it.
///
/// Rows: HDV-mtu.
#[test]
fn a_device_has_the_mtu_that_is_asked_for_and_goes_home_with_its_own() {
    let mut node = Node::new(&[]).unwrap();
    let _wires = Wires::new(&node, &["card"]).unwrap();
    node.plugin("last", &json!({"ADD": {"error": {"code": 123, "msg": "no more"}}})).unwrap();
    let mut card = Wires::config("card", SERVER);
    card["mtu"] = json!(1400);
    for (name, plugins) in [("good", json!([card])), ("bad", json!([card, {"type": "last"}]))] {
        let keys = json!({"cniVersion": "1.0.0", "name": name, "plugins": plugins});
        node.write(name, &network(NAMESPACE, name, &keys)).unwrap();
        node.write(&format!("pod-{name}"), &pod(name, &json!({}), &json!(name))).unwrap();
    }
    node.start().unwrap();
    let home = || Handle::open_in(node.namespace.netns()).unwrap().link("card").unwrap().mtu;
    assert_eq!(home(), 1500);
    let good = Pod::new("good").unwrap();
    node.add(&good).success();
    assert_eq!(Handle::open_in(good.namespace.netns()).unwrap().link("net1").unwrap().mtu, 1400);
    node.check(&good).success();
    ip(&good.namespace, &["link", "set", "net1", "mtu", "1390"]).unwrap();
    let (_, told) = node.check(&good).failure();
    assert!(told.ends_with("interface net1 has MTU 1390, not 1400"), "{told}");
    node.del(&good).success();
    assert_eq!(home(), 1500);
    let bad = Pod::new("bad").unwrap();
    node.call("ADD", &bad).run().failure();
    assert_eq!(home(), 1500);
}

/// A pod that administrates its network may set this: the next one would resolve all addresses at a single station,
/// or not at all.
///
/// Rows: HDV-conduct.
#[test]
fn what_a_pod_has_its_device_ask_for_neighbours_is_no_other_pods_matter() {
    let mut node = Node::new(&[]).unwrap();
    let wires = Wires::new(&node, &["card"]).unwrap();
    node.write("card", &network(NAMESPACE, "card", &Wires::config("card", SERVER))).unwrap();
    node.write("a", &pod("a", &json!({}), &json!("card"))).unwrap();
    node.start().unwrap();
    let conduct = |namespace: &Namespace, name: &str| {
        Handle::open_in(namespace.netns()).unwrap().device_named(name).unwrap().unwrap().conduct
    };
    let before = conduct(&node.namespace, "card");
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    assert_eq!(conduct(&a.namespace, "net1"), before);
    for [what, value] in [
        ["broadcast", "02:00:00:00:00:99"],
        ["arp", "off"],
        ["multicast", "off"],
        ["mode", "dormant"],
        ["txqueuelen", "1"],
    ] {
        ip(&a.namespace, &["link", "set", "net1", what, value]).unwrap();
    }
    let of_pod = conduct(&a.namespace, "net1");
    assert!(!of_pod.arp && !of_pod.multicast, "{of_pod:?}");
    assert_eq!((of_pod.broadcast, of_pod.mode, of_pod.queue), ("02:00:00:00:00:99".parse().ok(), 1, 1));
    node.del(&a).success();
    assert_eq!(conduct(&node.namespace, "card"), before);
    node.add(&a).success();
    for to in at(SERVER, 0) {
        assert!(ping(&wires.beyond, to.ip(), PATIENCE).unwrap(), "{to}");
    }
    node.del(&a).success();
}

/// Rows: HDV-carrier.
#[test]
fn an_add_ends_though_a_device_gets_no_carrier_and_its_addresses_are_used_once_it_has_one() {
    let mut node = Node::new(&[]).unwrap();
    let wires = Wires::new(&node, &["card"]).unwrap();
    node.write("card", &network(NAMESPACE, "card", &Wires::config("card", SERVER))).unwrap();
    node.write("a", &pod("a", &json!({}), &json!("card"))).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    let far_end = |state| ip(&wires.beyond, &["link", "set", "to-card", state]).unwrap();
    far_end("down");
    node.add(&a).success();
    far_end("up");
    for to in at(SERVER, 0) {
        assert!(ping(&wires.beyond, to.ip(), PATIENCE).unwrap(), "{to}");
    }
    node.del(&a).success();
    // If there is one, there is no warning.
    node.add(&a).success();
    node.del(&a).success();
    let log = node.stop().unwrap();
    assert_eq!(log.matches("no carrier; neighbours may not hear of its addresses").count(), 1, "{log}");
}

/// Rows: SRV-not-there.
#[test]
fn a_function_that_the_node_does_not_have_yet_is_to_be_tried_again() {
    const ABSENT: &str = "0000:7f:1f.7";
    let mut node = Node::new(&[]).unwrap();
    for kind in ["sriov", "host-device"] {
        node.write(kind, &network(NAMESPACE, kind, &json!({"cniVersion": "1.0.0", "type": kind}))).unwrap();
        let selection = json!([{"name": kind, "deviceID": ABSENT}]);
        node.write(&format!("pod-{kind}"), &pod(&format!("of-{kind}"), &json!({}), &selection)).unwrap();
    }
    node.start().unwrap();
    for kind in ["sriov", "host-device"] {
        let pod = Pod::new(&format!("of-{kind}")).unwrap();
        let (code, told) = node.add(&pod).failure();
        let expected = format!("there is no device {ABSENT} on a bus of this node");
        assert_eq!((code, told.ends_with(&expected)), (11, true), "{told}");
        Snapshot::take(&node, &[&pod]).unwrap().assert_nothing_is_left();
    }
}

/// Returns the node's devices of one kind by their names, each with the index of its other end or of its lower
/// device, and its other names.
fn devices_of(node: &Node, kind: &str) -> BTreeMap<String, (Option<u32>, Vec<String>)> {
    let devices = Handle::open_in(node.namespace.netns()).unwrap().devices().unwrap();
    let of_kind = devices.into_iter().filter(|device| device.link.kind == kind);
    of_kind.map(|device| (device.link.name, (device.link.link, device.other_names))).collect()
}

/// A pod that exchanges the names and aliases of two interfaces.
fn swap(pod: &Namespace, [first, second]: [&str; 2]) {
    let aliases = [first, second].map(|name| {
        let devices = Handle::open_in(pod.netns()).unwrap().devices().unwrap();
        devices.into_iter().find(|device| device.link.name == name).unwrap().alias.unwrap()
    });
    for (name, alias) in [first, second].into_iter().zip(aliases.iter().rev()) {
        ip(pod, &["link", "set", name, "alias", alias]).unwrap();
    }
    for name in [first, second] {
        ip(pod, &["link", "set", name, "down"]).unwrap();
    }
    for (from, to) in [(first, "other"), (second, first), ("other", second)] {
        ip(pod, &["link", "set", from, "name", to]).unwrap();
    }
}

/// Rows: HDV-names.
#[test]
fn a_pod_that_swaps_the_names_of_its_devices_gives_each_back_under_its_own() {
    let mut node = Node::new(&[]).unwrap();
    // Pairs with an end on the node, one whose other end is elsewhere, and macvlans: none has a permanent address.
    for name in ["pair", "twin"] {
        ip(&node.namespace, &["link", "add", name, "type", "veth", "peer", "name", &format!("to-{name}")])
            .unwrap();
    }
    let _wires = Wires::new(&node, &["wire-a", "wire-b"]).unwrap();
    ip(&node.namespace, &["link", "add", "below", "type", "veth", "peer", "name", "to-below"]).unwrap();
    for name in ["lan-a", "lan-b"] {
        let macvlan = ["link", "add", "link", "below", "name", name, "type", "macvlan", "mode", "bridge"];
        ip(&node.namespace, &macvlan).unwrap();
    }
    let names = ["pair", "twin", "wire-a", "wire-b", "lan-a", "lan-b"];
    for name in names {
        let keys = json!({
            "cniVersion": "1.0.0", "name": name,
            "plugins": [{"type": "host-device", "device": name}, {"type": "tuning", "txQLen": 77}]
        });
        node.write(&format!("net-{name}"), &network(NAMESPACE, name, &keys)).unwrap();
    }
    let selected: Vec<Value> =
        names.iter().map(|name| json!({"name": name, "namespace": NAMESPACE})).collect();
    node.write("a", &pod("a", &json!({}), &json!(selected))).unwrap();
    node.start().unwrap();
    let state = |node: &Node| ["veth", "macvlan"].map(|kind| devices_of(node, kind));
    let a = Pod::new("a").unwrap();
    let before = state(&node);
    node.add(&a).success();
    // The cluster's own interface is the other end of one of the node's.
    let meanwhile = state(&node);
    assert_eq!(meanwhile[1], BTreeMap::new());
    assert!(names.iter().all(|name| !meanwhile[0].contains_key(*name)), "{meanwhile:?}");
    for pair in [["net1", "net2"], ["net3", "net4"], ["net5", "net6"]] {
        swap(&a.namespace, pair);
    }
    node.kill().unwrap();
    node.start().unwrap();
    node.del(&a).success();
    assert_eq!(state(&node), before);
}

/// One of those is the name of the pod's first interface and one its own there; one of those is another device's on
/// the node.
///
/// Rows: HDV-altname.
#[test]
fn a_device_goes_back_with_its_other_names_and_without_those_that_its_pod_has_given_it() {
    let mut node = Node::new(&[]).unwrap();
    let _wires = Wires::new(&node, &["wire-a", "wire-b"]).unwrap();
    for name in ["node-name", "eth0", "net1"] {
        ip(&node.namespace, &["link", "property", "add", "dev", "wire-a", "altname", name]).unwrap();
    }
    let keys = json!({"cniVersion": "1.0.0", "type": "host-device", "device": "wire-a"});
    node.write("net", &network(NAMESPACE, "wire", &keys)).unwrap();
    node.write("a", &pod("a", &json!({}), &json!("wire"))).unwrap();
    node.start().unwrap();
    let before = devices_of(&node, "veth");
    let names = |name: &str| before[name].1.iter().map(String::as_str).collect::<BTreeSet<_>>();
    assert_eq!(names("wire-a"), BTreeSet::from(["eth0", "net1", "node-name"]));
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let taken = || Handle::open_in(a.namespace.netns()).unwrap().device_named("net1").unwrap().unwrap();
    assert_eq!(taken().other_names, [""; 0]);
    for name in ["pod-name", "wire-b", "node-name"] {
        ip(&a.namespace, &["link", "property", "add", "dev", "net1", "altname", name]).unwrap();
    }
    assert_eq!(taken().other_names.len(), 3);
    node.check(&a).success();
    node.del(&a).success();
    let after = devices_of(&node, "veth");
    let sorted = |devices: &BTreeMap<String, (Option<u32>, Vec<String>)>| {
        let mut wire = devices["wire-a"].1.clone();
        wire.sort();
        (wire, devices["wire-b"].1.clone(), devices.len())
    };
    assert_eq!(sorted(&after), sorted(&before));
}

/// A pod with `CAP_NET_ADMIN` and `CAP_BPF` attaches them. Programs that were on the device before stay.
///
/// Rows: HDV-programs.
#[test]
fn programs_that_a_pod_has_put_on_its_device_do_not_see_the_nodes_packets_afterwards() {
    let mut node = Node::new(&[]).unwrap();
    let _wires = Wires::new(&node, &["card"]).unwrap();
    ip(&node.namespace, &["link", "set", "card", "up"]).unwrap();
    let nodes_own = program(Verdict::Next).unwrap();
    let index = index_of(&node.namespace, "card").unwrap();
    let _link = attach_tcx(&node.namespace, index, true, &nodes_own).unwrap();
    let before = all_programs(&node.namespace, "card").unwrap();
    assert_eq!(before, [sys::program_id(nodes_own.as_fd()).unwrap()]);
    node.write("card", &network(NAMESPACE, "card", &Wires::config("card", SERVER))).unwrap();
    node.write("a", &pod("a", &json!({}), &json!("card"))).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    for by_link in [false, true] {
        node.add(&a).success();
        // The node's own, and those that judge the pod, by links at last.
        let on_device = || all_programs(&a.namespace, "net1").unwrap().len();
        assert!(eventually(PATIENCE, || links(&node).len() == 2 && on_device() == 3), "{}", on_device());
        tc(&a.namespace, "qdisc replace dev net1 clsact").unwrap();
        attach_filter(&a.namespace, "net1", true, 1, Verdict::Next).unwrap();
        let _held = occupy(&a.namespace, "net1", by_link).unwrap();
        assert_eq!(on_device(), 3 + 4, "by link: {by_link}");
        node.del(&a).success();
        assert_eq!(all_programs(&node.namespace, "card").unwrap(), before, "by link: {by_link}");
        let home = Handle::open_in(node.namespace.netns()).unwrap().link("card").unwrap();
        assert!(home.up, "by link: {by_link}");
    }
    let log = node.stop().unwrap();
    let told = log.matches("the pod left a program on the device; detached").count();
    assert_eq!(told, 6, "{log}");
}

/// Its record does not list the earlier programs of the device.
///
/// Rows: HDV-programs.
#[test]
fn what_was_on_a_device_before_an_earlier_version_gave_it_to_a_pod_stays() {
    let mut node = Node::new(&[]).unwrap();
    let _wires = Wires::new(&node, &["card"]).unwrap();
    let nodes_own = program(Verdict::Next).unwrap();
    let index = index_of(&node.namespace, "card").unwrap();
    let _link = attach_tcx(&node.namespace, index, true, &nodes_own).unwrap();
    let before = all_programs(&node.namespace, "card").unwrap();
    node.write("card", &network(NAMESPACE, "card", &Wires::config("card", SERVER))).unwrap();
    node.write("a", &pod("a", &json!({}), &json!("card"))).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    node.kill().unwrap();
    let name = format!("{}@eth0.jsonl", a.container);
    let path = node.path("state/journal").join(&name);
    let said = format!(",\"programs\":[{}]", sys::program_id(nodes_own.as_fd()).unwrap());
    let text = fs::read_to_string(&path).unwrap();
    assert_eq!(text.matches(&said).count(), 1, "{text}");
    fs::write(&path, rewritten(&name, &text, |line| line.replace(&said, ""))).unwrap();
    node.start().unwrap();
    let _held = occupy(&a.namespace, "net1", true).unwrap();
    node.del(&a).success();
    assert_eq!(all_programs(&node.namespace, "card").unwrap(), before);
    let log = node.stop().unwrap();
    let told = ["loaded before a pod was given the device", "the pod left a program"];
    assert_eq!(told.map(|it| log.matches(it).count()), [1, 3], "{log}");
}

/// An XDP program on a link above a device prevents removing any other from the device.
///
/// Rows: HDV-above.
#[test]
fn what_a_pod_has_put_above_its_device_neither_keeps_it_from_going_back_nor_goes_on_using_it() {
    let mut node = Node::new(&[]).unwrap();
    let _wires = Wires::new(&node, &["card"]).unwrap();
    let before = all_programs(&node.namespace, "card").unwrap();
    node.write("card", &network(NAMESPACE, "card", &Wires::config("card", SERVER))).unwrap();
    node.write("a", &pod("a", &json!({}), &json!("card"))).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    let ip_link = |words: &str| {
        let words: Vec<&str> = std::iter::once("link").chain(words.split(' ')).collect();
        ip(&a.namespace, &words).unwrap();
    };
    let is_there =
        |name: &str| Handle::open_in(a.namespace.netns()).unwrap().find_link(name).unwrap().is_some();

    node.add(&a).success();
    occupy(&a.namespace, "net1", false).unwrap();
    ip_link("add link net1 name lan type macvlan mode bridge");
    ip_link("add link net1 name tap type macvtap");
    ip_link("add name others type bridge");
    ip_link("add link others name of-others type macvlan");
    occupy(&a.namespace, "lan", false).unwrap();
    node.del(&a).success();
    assert_eq!(all_programs(&node.namespace, "card").unwrap(), before);
    assert_eq!(["lan", "tap", "others", "of-others"].map(is_there), [false, false, true, true]);

    // A single one.
    node.add(&a).success();
    occupy(&a.namespace, "net1", false).unwrap();
    ip_link("add link net1 name lan type macvlan mode bridge");
    occupy(&a.namespace, "lan", false).unwrap();
    node.del(&a).success();
    assert_eq!(all_programs(&node.namespace, "card").unwrap(), before);
    assert!(!is_there("lan"));

    // As a port.
    node.add(&a).success();
    occupy(&a.namespace, "net1", false).unwrap();
    ip_link("set net1 master others");
    node.del(&a).success();
    assert_eq!(all_programs(&node.namespace, "card").unwrap(), before);
    assert_eq!(Handle::open_in(node.namespace.netns()).unwrap().link("card").unwrap().controller, None);
    assert!(is_there("others"));
}

/// Rows: HDV-names.
#[test]
fn what_a_pod_has_made_in_the_place_of_a_device_does_not_get_its_name_on_the_node() {
    let mut node = Node::new(&[]).unwrap();
    ip(&node.namespace, &["link", "add", "card", "type", "veth", "peer", "name", "to-card"]).unwrap();
    let keys = json!({"cniVersion": "1.0.0", "type": "host-device", "device": "card"});
    node.write("net", &network(NAMESPACE, "card", &keys)).unwrap();
    node.write("a", &pod("a", &json!({}), &json!("card"))).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let taken = Handle::open_in(a.namespace.netns()).unwrap().link("net1").unwrap();
    // The device is moved to a namespace of the pod, and its name, index and alias are taken by a pair of the pod,
    // whose other end has the index of that of the device.
    let aside = Namespace::new().unwrap();
    let task =
        aside.path().ancestors().nth(2).and_then(std::path::Path::file_name).unwrap().to_str().unwrap();
    ip(&a.namespace, &["link", "set", "net1", "netns", task]).unwrap();
    let (index, other) = (taken.index.to_string(), taken.link.unwrap().to_string());
    let forge =
        ["link", "add", "net1", "index", &index, "type", "veth", "peer", "name", "mine", "index", &other];
    ip(&a.namespace, &forge).unwrap();
    ip(&a.namespace, &["link", "set", "net1", "alias", "card"]).unwrap();
    node.del(&a).success();
    assert!(!devices_of(&node, "veth").contains_key("card"));
    assert!(Handle::open_in(a.namespace.netns()).unwrap().find_link("net1").unwrap().is_some());
}

/// Rows: HDV-in-use.
#[test]
fn the_parent_of_an_interface_is_nobodys_and_what_a_pod_has_is_no_parent() {
    let mut node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    let lan = json!({"cniVersion": "1.0.0", "type": "macvlan", "master": WIRE});
    node.write("lan", &network(NAMESPACE, "lan", &lan)).unwrap();
    let wire = json!({"cniVersion": "1.0.0", "type": "host-device", "device": WIRE});
    node.write("wire", &network(NAMESPACE, "wire", &wire)).unwrap();
    for (name, networks) in [("above", "lan"), ("below", "wire")] {
        node.write(name, &pod(name, &json!({}), &json!(networks))).unwrap();
    }
    node.start().unwrap();
    let [above, below] = ["above", "below"].map(|name| Pod::new(name).unwrap());
    node.add(&above).success();
    for _ in 0..2 {
        let (code, told) = node.add(&below).failure();
        let expected = format!("device {WIRE} stays on the node: it carries interfaces of pods");
        assert_eq!((code, told.ends_with(&expected)), (11, true), "{told}");
        node.kill().unwrap();
        node.start().unwrap();
    }
    node.del(&above).success();
    // The node's own interfaces count as well.
    ip(&node.namespace, &["link", "add", "own", "link", WIRE, "type", "macvlan"]).unwrap();
    let (code, told) = node.add(&below).failure();
    let expected = format!("device {WIRE} stays on the node: another interface of the node is on it");
    assert_eq!((code, told.ends_with(&expected)), (7, true), "{told}");
    ip(&node.namespace, &["link", "del", "own"]).unwrap();
    node.add(&below).success();
    assert_ne!(node.add(&above).exit, 0);
    node.del(&below).success();
    node.add(&above).success();
    node.del(&above).success();
    Snapshot::take(&node, &[&above, &below]).unwrap().assert_nothing_is_left();
}
