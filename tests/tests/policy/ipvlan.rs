//! Policies on ipvlans of one parent, and the error of an ADD on a kernel without the driver.
//!
//! `cargo xtask vm` runs these in the virtual machine whose kernel has the driver.

use std::path::Path;
use std::process::Command;

use netattach::netlink::Handle;
use netattach::spec::{IpvlanMode, LinkMode};
use netattach_tests::guide::{BUSYBOX, Machine, Page, Tools};
use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::node::{WIRE, ip};
use netattach_tests::packet::Packet;
use netattach_tests::raw::RawSocket;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::tools::{self, report_skipped};
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, connects, eventually};
use netattach_tests::wires::install;
use netattach_tests::{Namespace, Node, Pod};
use serde_json::{Value, json};

use super::on_parent::{CLIENT, OTHER, OUTSIDE, SERVER, at, is_allowed, policies};

/// Whether the kernel has the driver.
pub(super) fn has_driver() -> bool {
    tools::has_driver("ipvlan")
}

fn config(node: &Node, kind: &str, mode: &str) -> Value {
    json!({
        "cniVersion": "1.0.0", "type": kind, "master": WIRE, "mode": mode,
        "ipam": node.host_local(&["10.52.0.0/24"])
    })
}

/// A node with a wire, whose far end is in the second namespace.
fn node(mode: &str) -> (Node, Namespace) {
    let mut node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    for (name, kind, mode) in
        [("lan", "ipvlan", mode), ("routed", "ipvlan", "l3"), ("mac", "macvlan", "bridge")]
    {
        let definition = network(NAMESPACE, name, &config(&node, kind, mode));
        node.write(&format!("net-{name}"), &definition).unwrap();
    }
    let outside = Namespace::new().unwrap();
    // `ip` takes a task for the namespace that it is in.
    let task = outside.path().ancestors().nth(2).and_then(Path::file_name).unwrap().to_str().unwrap();
    ip(&node.namespace, &["link", "set", "wire1", "netns", task]).unwrap();
    ip(&outside, &["addr", "add", &format!("10.52.0.{OUTSIDE}/24"), "dev", "wire1"]).unwrap();
    ip(&outside, &["link", "set", "wire1", "up"]).unwrap();
    node.start().unwrap();
    (node, outside)
}

fn add(node: &Node, name: &str, network: &str) -> Pod {
    node.write(name, &pod(name, &json!({"app": name}), &json!(network))).unwrap();
    Pod::new(name).unwrap()
}

fn write_policies(node: &Node) {
    for (name, policy) in policies() {
        node.write(name, &policy).unwrap();
    }
}

/// Tries every pair over TCP; returns the results that differ from the policies.
fn surprises(namespaces: &[(u8, &Namespace)]) -> Vec<String> {
    let ports = [80, 81];
    let serve = |(host, namespace): &(u8, &Namespace)| {
        ports.map(|port| Echo::serve(namespace, at(*host, port)).unwrap())
    };
    let _servers: Vec<_> = namespaces.iter().map(serve).collect();
    let mut surprises = Vec::new();
    for (from, namespace) in namespaces {
        for (to, _) in namespaces.iter().filter(|(to, _)| to != from) {
            for port in ports {
                let expected = is_allowed(*from, *to, port, true);
                let patience = if expected { PATIENCE } else { SILENCE };
                if connects(namespace, at(*to, port), patience) != expected {
                    surprises.push(format!("{from} to {to}:{port}: expected {expected}"));
                }
            }
        }
    }
    surprises
}

fn policies_hold_in(mode: &str, expected: IpvlanMode) {
    let (node, outside) = node(mode);
    write_policies(&node);
    let pods = ["server", "client", "other"].map(|name| {
        let pod = add(&node, name, "lan");
        node.add(&pod).success();
        pod
    });
    let [server, client, other] = pods.each_ref().map(|pod| &pod.namespace);
    let mut namespaces = vec![(SERVER, server), (CLIENT, client), (OTHER, other)];
    // In mode l3, addresses of pods are not resolved on the wire.
    if expected == IpvlanMode::L2 {
        namespaces.push((OUTSIDE, &outside));
    }
    assert_eq!(surprises(&namespaces), Vec::<String>::new());
    for pod in &pods {
        node.check(pod).success();
        let found = Handle::open_in(pod.namespace.netns()).unwrap().link("net1").unwrap();
        assert_eq!((found.kind.as_str(), found.mode), ("ipvlan", Some(LinkMode::Ipvlan(expected))));
    }
    let rows = node.ctl(&["attachments"]).unwrap();
    let lan: Vec<&Value> =
        rows.as_array().unwrap().iter().filter(|row| row["network"] == "shop/lan").collect();
    assert_eq!(lan.len(), 3);
    for row in lan {
        assert_eq!((&row["kind"], &row["host_interface"]), (&json!("ipvlan"), &json!(WIRE)));
        assert_eq!(row["enforcement"], "full-unless-privileged");
        assert_eq!(row.get("fast_path"), None, "{row:#}");
    }
    for pod in &pods {
        node.del(pod).success();
    }
    Snapshot::take(&node, &pods.each_ref()).unwrap().assert_nothing_is_left();
}

#[test]
fn policies_hold_between_ipvlans_of_one_parent_and_with_the_world() {
    if !has_driver() {
        return report_skipped("policies_hold_between_ipvlans", "the kernel has no ipvlan");
    }
    policies_hold_in("l2", IpvlanMode::L2);
}

#[test]
fn policies_hold_between_ipvlans_in_mode_l3() {
    if !has_driver() {
        return report_skipped("policies_hold_between_ipvlans_in_mode_l3", "the kernel has no ipvlan");
    }
    policies_hold_in("l3", IpvlanMode::L3);
}

/// In mode l3 the driver routes a packet of a pod by the protocol that its socket has named, and the programs in the
/// pod judge it by its ethertype.
///
/// Rows: IVL-protocol.
#[test]
fn a_pod_cannot_name_another_protocol_than_its_frames_have_in_mode_l3() {
    if !has_driver() {
        return report_skipped("a_pod_cannot_name_another_protocol", "the kernel has no ipvlan driver");
    }
    let (node, outside) = node("l3");
    let a = add(&node, "a", "lan");
    node.add(&a).success();
    let own = Handle::open_in(a.namespace.netns()).unwrap().link("net1").unwrap().mac.unwrap();
    let arrived = RawSocket::open(&outside, "wire1").unwrap();
    let to = format!("10.52.0.{OUTSIDE}");
    let frame_of = |from: &str, port, ethertype: u16| {
        let mut frame = Packet::between(from, &to).from_mac(own).udp(port, 7).frame();
        frame[12..14].copy_from_slice(&ethertype.to_be_bytes());
        frame
    };
    let (ipv4, experiment) = (libc::ETH_P_IP as u16, 0x88b5);
    let socket = RawSocket::queued_as(&a.namespace, "net1", ipv4).unwrap();
    let malformed = || {
        let rows = node.ctl(&["stats"]).unwrap();
        let mut rows = rows.as_array().unwrap().iter();
        let row = rows.find(|row| row["pod"]["name"] == "a" && row["ifname"] == "net1").unwrap();
        row["dropped"]["malformed"].as_u64().unwrap_or(0)
    };
    let spoofed = frame_of("10.52.0.99", 1001, experiment);
    socket.send(&spoofed).unwrap();
    assert!(eventually(PATIENCE, || malformed() == 1));
    let named = RawSocket::queued_as(&a.namespace, "net1", experiment).unwrap();
    named.send(&frame_of("10.52.0.2", 1003, ipv4)).unwrap();
    assert!(eventually(PATIENCE, || malformed() == 2));
    let honest = frame_of("10.52.0.2", 1002, ipv4);
    socket.send(&honest).unwrap();
    let tail = |frame: &[u8]| frame[frame.len() - 12..].to_vec();
    let seen = arrived.frames_until(&tail(&honest), PATIENCE).unwrap();
    assert!(seen.last().is_some_and(|last| last.ends_with(&tail(&honest))), "an honest frame is lost");
    assert!(!seen.iter().any(|seen| seen.ends_with(&tail(&spoofed))), "a frame got through");
    node.del(&a).success();
}

#[test]
fn an_ipvlan_in_mode_l3s_is_refused_to_a_pod_that_a_policy_selects() {
    if !has_driver() {
        return report_skipped("an_ipvlan_in_mode_l3s_is_refused", "the kernel has no ipvlan");
    }
    let (node, _outside) = node("l3s");
    write_policies(&node);
    let [server, client] = ["server", "client"].map(|name| add(&node, name, "lan"));
    let (code, message) = node.add(&server).failure();
    assert_eq!(code, 7);
    assert!(
        message.contains("enforcement there is none (interfaces of this kind are not judged)"),
        "{message}"
    );
    node.add(&client).success();
    node.del(&client).success();
    Snapshot::take(&node, &[&server, &client]).unwrap().assert_nothing_is_left();
}

/// The mode is the parent's: a pod that administrates its network switches the ipvlans of all other pods.
///
/// Rows: IVL-switched.
#[test]
fn an_ipvlan_of_another_plugin_is_none_while_another_pod_has_switched_it_to_mode_l3s() {
    let test = "an_ipvlan_of_another_plugin_is_none_while";
    if !has_driver() {
        return report_skipped(test, "the kernel has no ipvlan");
    }
    let needed = ["ipvlan", "host-local"];
    let Some(from) = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &needed) else { return };
    let mut node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    install(&node, &from, &needed).unwrap();
    node.set("delegation", json!({"exec": needed}));
    node.write("net-lan", &network(NAMESPACE, "lan", &config(&node, "ipvlan", "l2"))).unwrap();
    write_policies(&node);
    node.start().unwrap();
    let [server, client] = ["server", "client"].map(|name| {
        let pod = add(&node, name, "lan");
        node.add(&pod).success();
        pod
    });
    let level = || {
        let rows = node.ctl(&["attachments"]).unwrap();
        let mut rows = rows.as_array().unwrap().iter();
        let row = rows.find(|row| row["pod"]["name"] == "server" && row["ifname"] == "net1").unwrap();
        row["enforcement"].as_str().unwrap().to_owned()
    };
    let conditions = |of: &Value| {
        let all = of.as_array().unwrap().iter();
        all.filter_map(|row| row["problem"].as_str().map(str::to_owned)).collect::<Vec<_>>()
    };
    let troubles = || conditions(&node.whole_status().unwrap()["troubles"]);
    let of_policies = || conditions(&node.ctl(&["policy"]).unwrap()["conditions"]);
    let (in_pod, nowhere) = (
        "in the pod: interface net1 is in ipvlan mode l3s, in which no program judges what it receives; it is left as it is",
        "its ipvlan was switched to mode l3s, in which packets come to the pod behind it",
    );
    let is_told = || {
        let of_server = of_policies().iter().any(|problem| problem.contains(nowhere));
        troubles().iter().filter(|problem| *problem == in_pod).count() == 2 && of_server
    };
    node.check(&server).success();
    assert_eq!((level().as_str(), is_told()), ("full-unless-privileged", false));

    let switch =
        |mode| ip(&client.namespace, &["link", "set", "net1", "type", "ipvlan", "mode", mode]).unwrap();
    switch("l3s");
    // The pods are checked one after the other, after pauses of up to half a minute.
    assert!(eventually(PATIENCE * 4, || level() == "none" && is_told()), "{:#?} {}", troubles(), level());
    let (_, told) = node.check(&server).failure();
    assert!(told.contains("interface net1 is in ipvlan mode l3s"), "{told}");
    switch("l2");
    let is_as_before = || level() == "full-unless-privileged" && !troubles().iter().any(|it| it == in_pod);
    assert!(eventually(PATIENCE * 4, is_as_before), "{:#?} {}", troubles(), level());
    node.check(&server).success();
    for pod in [&server, &client] {
        node.del(pod).success();
    }
    Snapshot::take(&node, &[&server, &client]).unwrap().assert_nothing_is_left();
}

/// It has no end on the node, by which it would go as well.
#[test]
fn an_ipvlan_that_its_pod_has_renamed_is_gone_once_it_was_detached() {
    if !has_driver() {
        return report_skipped("an_ipvlan_that_its_pod_has_renamed", "the kernel has no ipvlan");
    }
    let (node, _outside) = node("l2");
    node.write("a", &pod("a", &json!({"app": "a"}), &json!([]))).unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    node.ctl(&["attach", "shop/a", "lan"]).unwrap();
    for words in ["net1 down", "net1 name bound", "bound up"] {
        let words: Vec<&str> = ["link", "set"].into_iter().chain(words.split(' ')).collect();
        ip(&a.namespace, &words).unwrap();
    }
    node.ctl(&["detach", "shop/a", "net1"]).unwrap();
    let links = Handle::open_in(a.namespace.netns()).unwrap().links().unwrap();
    assert!(!links.iter().any(|link| link.kind == "ipvlan"), "{links:?}");
    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

/// The kernel does not announce them, as it does on other interfaces.
///
/// Rows: IVL-announce.
#[test]
fn neighbours_are_told_of_the_ipv6_addresses_of_an_ipvlan() {
    if !has_driver() {
        return report_skipped("neighbours_are_told_of_the_ipv6_addresses", "the kernel has no ipvlan");
    }
    let (node, outside) = node("l2");
    let ipam = json!({"type": "static", "addresses": [{"address": "fd00:54::3/64"}]});
    let six = json!({"cniVersion": "1.0.0", "type": "ipvlan", "master": WIRE, "ipam": ipam});
    node.write("net-six", &network(NAMESPACE, "six", &six)).unwrap();
    ip(&outside, &["addr", "add", "fd00:54::9/64", "dev", "wire1", "nodad"]).unwrap();
    // The holder that was there before.
    let before = ["lladdr", "02:00:00:00:00:99", "dev", "wire1", "nud", "stale"];
    ip(&outside, &[&["neigh", "replace", "fd00:54::3"][..], &before[..]].concat()).unwrap();
    let known = || {
        let list = ["-j", "neigh", "show", "to", "fd00:54::3"];
        let listed = outside.run(|| Command::new("ip").args(list).output()).unwrap();
        let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
        listed[0]["lladdr"].as_str().map(str::to_owned)
    };
    let a = add(&node, "a", "six");
    node.add(&a).success();
    let own = Handle::open_in(node.namespace.netns()).unwrap().link(WIRE).unwrap().mac.unwrap();
    assert!(eventually(PATIENCE, || known() == Some(own.to_string())), "{:?}, not {own}", known());
    node.del(&a).success();
}

/// Has the far end of the wire know another Ethernet address for each of these: of the holder that was there before.
fn had_another_holder<const N: usize>(outside: &Namespace, addresses: [&str; N]) {
    for address in addresses {
        let before = ["lladdr", "02:00:00:00:00:99", "dev", "wire1", "nud", "stale"];
        ip(outside, &[&["neigh", "replace", address][..], &before[..]].concat()).unwrap();
    }
}

/// The Ethernet addresses that the far end of the wire knows for these.
fn known_to<const N: usize>(outside: &Namespace, addresses: [&str; N]) -> [Option<String>; N] {
    let show = || Command::new("ip").args(["-j", "neigh", "show", "dev", "wire1"]).output();
    let listed: Value = serde_json::from_slice(&outside.run(show).unwrap().stdout).unwrap();
    addresses.map(|address| {
        let entry = listed.as_array().unwrap().iter().find(|it| it["dst"] == address);
        entry.and_then(|it| it["lladdr"].as_str()).map(str::to_owned)
    })
}

/// The kernel would announce the first one alone.
#[test]
fn neighbours_are_told_of_both_addresses_of_an_ipvlan_in_a_subnet_and_again_when_they_follow() {
    if !has_driver() {
        return report_skipped("neighbours_are_told_of_both_addresses", "the kernel has no ipvlan");
    }
    let (node, outside) = node("l2");
    let both = ["10.52.0.30", "10.52.0.31"];
    let ipam = json!({"type": "static", "addresses": both.map(|it| json!({"address": format!("{it}/24")}))});
    let two = json!({"cniVersion": "1.0.0", "type": "ipvlan", "master": WIRE, "ipam": ipam});
    node.write("net-two", &network(NAMESPACE, "two", &two)).unwrap();
    had_another_holder(&outside, both);
    let known = || known_to(&outside, both);
    let a = add(&node, "a", "two");
    node.add(&a).success();
    let own = Handle::open_in(node.namespace.netns()).unwrap().link(WIRE).unwrap().mac.unwrap().to_string();
    let are_told = |mac: &str| known().iter().all(|it| it.as_deref() == Some(mac));
    assert!(eventually(PATIENCE, || are_told(&own)), "{:?}, not {own}", known());
    let other = "02:00:00:00:00:77";
    ip(&node.namespace, &["link", "set", WIRE, "address", other]).unwrap();
    assert!(eventually(PATIENCE, || are_told(other)), "{:?}, not {other}", known());
    node.del(&a).success();
}

/// The addresses of an interface in a VRF are local in its table alone.
#[test]
fn neighbours_are_told_of_the_addresses_of_an_ipvlan_in_a_vrf() {
    let test = "neighbours_are_told_of_the_addresses_of_an_ipvlan_in_a_vrf";
    let probe = Namespace::new().unwrap();
    if !has_driver() || ip(&probe, &["link", "add", "probe", "type", "vrf", "table", "7"]).is_err() {
        return report_skipped(test, "the kernel has no ipvlan or no vrf");
    }
    let (node, outside) = node("l2");
    let addresses = ["10.52.0.30", "fd00:54::3"];
    let ipam = json!({
        "type": "static",
        "addresses": [{"address": "10.52.0.30/24"}, {"address": "fd00:54::3/64"}],
    });
    let ipvlan = json!({"type": "ipvlan", "master": WIRE, "ipam": ipam});
    let plugins = json!([ipvlan, {"type": "vrf", "vrfname": "blue"}]);
    let chain = json!({"cniVersion": "1.0.0", "name": "blue", "plugins": plugins});
    node.write("net-blue", &network(NAMESPACE, "blue", &chain)).unwrap();
    ip(&outside, &["addr", "add", "fd00:54::9/64", "dev", "wire1", "nodad"]).unwrap();
    had_another_holder(&outside, addresses);
    let known = || known_to(&outside, addresses);
    let a = add(&node, "a", "blue");
    node.add(&a).success();
    let port = Handle::open_in(a.namespace.netns()).unwrap().link("net1").unwrap();
    assert!(port.controller.is_some(), "{port:?}");
    let own = port.mac.unwrap().to_string();
    let are_told = || known().iter().all(|it| it.as_deref() == Some(own.as_str()));
    assert!(eventually(PATIENCE, are_told), "{:?}, not {own}", known());
    node.del(&a).success();
}

/// As the address of a bond changes that fails over, with an agent and while there is none.
///
/// Rows: IVL-parent-mac.
#[test]
fn a_pod_on_an_ipvlan_follows_a_parent_that_gets_another_ethernet_address() {
    if !has_driver() {
        return report_skipped("a_pod_on_an_ipvlan_follows_a_parent", "the kernel has no ipvlan");
    }
    let (mut node, outside) = node("l2");
    let a = add(&node, "a", "lan");
    node.add(&a).success();
    let to = at(OUTSIDE, 80);
    let _server = Echo::serve(&outside, to).unwrap();
    assert!(connects(&a.namespace, to, PATIENCE));
    let change = |node: &Node, mac: &str| {
        ip(&node.namespace, &["link", "set", WIRE, "address", mac]).unwrap();
    };
    // A pod that only serves is found all the same: its neighbours are told.
    let is_known = |mac: &str| {
        let show = || Command::new("ip").args(["-j", "neigh", "show", "dev", "wire1"]).output();
        let listed: Value = serde_json::from_slice(&outside.run(show).unwrap().stdout).unwrap();
        listed.as_array().unwrap().iter().any(|it| it["lladdr"] == mac)
    };
    change(&node, "02:00:00:00:00:77");
    node.check(&a).success();
    assert!(eventually(PATIENCE, || is_known("02:00:00:00:00:77")));
    assert!(connects(&a.namespace, to, PATIENCE));
    node.check(&a).success();
    // CHECK compares while the address changes, and the agent follows.
    let (there, checked) = (&node, &a);
    std::thread::scope(|scope| {
        let changing = scope.spawn(|| {
            for number in 10..16 {
                change(there, &format!("02:00:00:00:00:{number}"));
                std::thread::sleep(std::time::Duration::from_millis(300));
            }
        });
        while !changing.is_finished() {
            there.check(checked).success();
        }
    });
    assert!(connects(&a.namespace, to, PATIENCE));
    node.kill().unwrap();
    change(&node, "02:00:00:00:00:78");
    node.start().unwrap();
    assert!(eventually(PATIENCE, || is_known("02:00:00:00:00:78")));
    assert!(connects(&a.namespace, to, PATIENCE));
    node.check(&a).success();
    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

#[test]
fn links_that_cannot_be_beside_an_ipvlan_are_refused_by_name() {
    if !has_driver() {
        return report_skipped("links_that_cannot_be_beside_an_ipvlan", "the kernel has no ipvlan");
    }
    let (node, _outside) = node("l2");
    let first = add(&node, "first", "lan");
    node.add(&first).success();
    for (name, network, wanted) in [("routed", "routed", "ipvlans in mode l3"), ("mac", "mac", "macvlans")] {
        let pod = add(&node, name, network);
        let (code, message) = node.add(&pod).failure();
        assert_eq!(code, 7, "{message}");
        let expected = format!(
            "the parent {WIRE} carries ipvlans in mode l2, and {wanted} cannot share it with them; whose they are is in \
             HOST-INTERFACE of `netattachctl attachments -o wide`"
        );
        assert!(message.ends_with(&expected), "{message}");
    }
    // A conflict with a device of another owner is refused by the kernel.
    node.del(&first).success();
    ip(&node.namespace, &["link", "add", "link", WIRE, "name", "theirs", "type", "macvlan"]).unwrap();
    let (code, message) = node.add(&first).failure();
    assert_eq!(code, 7, "{message}");
    assert!(message.contains("the parent cannot carry ipvlans in mode l2: "), "{message}");
}

/// Runs where the other tests are skipped.
#[test]
fn a_kernel_without_the_driver_is_named_at_add_and_nothing_is_left() {
    if has_driver() {
        return;
    }
    let (node, _outside) = node("l2");
    let pod = add(&node, "server", "lan");
    let (code, message) = node.add(&pod).failure();
    assert_eq!(code, 50);
    assert!(message.contains("the kernel of this node has no driver for links of kind ipvlan"), "{message}");
    Snapshot::take(&node, &[&pod]).unwrap().assert_nothing_is_left();
}

/// The part of the guide that this kernel may lack the driver for; `runtimes::guides` runs the others.
#[test]
fn an_ipvlan_is_as_the_guide_says() {
    let test = "an_ipvlan_is_as_the_guide_says";
    if !has_driver() {
        return report_skipped(test, "this kernel has no driver for ipvlan");
    }
    let Some(runtimes) = tools::directory(test, "NETATTACH_RUNTIMES", &[BUSYBOX]) else { return };
    let text = include_str!("../../../docs/networks.md");
    let (page, busybox) = (Page { path: "docs/networks.md", text }, runtimes.join(BUSYBOX));
    page.run("ipvlan", Machine::Node, Tools { busybox: Some(&busybox), plugins: None }).unwrap();
}
