//! `sourceCheck`, `allowedAddresses` and `vlans`: which source addresses and tags pass, and which do not.

use std::net::{IpAddr, SocketAddr};

use netattach::mac::Mac;
use netattach::netlink::Handle;
use netattach::plan::ethertypes::ETHERTYPES_ANNOTATION;
use netattach_tests::manifest::{NAMESPACE, annotated, network, pod};
use netattach_tests::node::{WIRE, ip};
use netattach_tests::packet::{Packet, any_frame};
use netattach_tests::raw::{RawSocket, sum_at};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, datagram_from, eventually};
use netattach_tests::wires::{Wires, install};
use netattach_tests::{Node, Pod, tools};
use serde_json::{Value, json};

/// The networks, by the keys that their definition has.
const NETWORKS: [(&str, &str); 4] = [
    ("strict", "{}"),
    ("virtual", r#"{"allowedAddresses": ["10.61.0.100", "fd00:61::100"]}"#),
    ("router", r#"{"sourceCheck": "mac"}"#),
    ("machine", r#"{"sourceCheck": "off"}"#),
];

fn config(node: &Node, number: usize, keys: &str) -> Value {
    let mut config: Value = serde_json::from_str(keys).unwrap();
    config["cniVersion"] = json!("1.0.0");
    config["type"] = json!("bridge");
    config["bridge"] = json!(format!("br{}", number + 1));
    config["ipam"] = node.host_local(&["10.61.0.0/24", "fd00:61::/64"]);
    config["ipam"]["dataDir"] = json!(node.path(&format!("leases-{number}")));
    config
}

/// Rows: SRC-sourceCheck, SRC-allowedAddresses, BRG-macspoofchk.
#[test]
fn a_definition_says_in_whose_name_its_pods_may_send() {
    pods_send_in_whose_name_they_may("bridge", false);
}

/// Rows: SRC-sourceCheck, SRC-allowedAddresses.
#[test]
fn on_macvlans_and_by_devices_of_the_node_it_says_so_too() {
    for kind in ["macvlan", "host-device"] {
        pods_send_in_whose_name_they_may(kind, false);
    }
}

/// Rows: CHN-keys.
#[test]
fn behind_another_plugin_netattach_says_so() {
    for kind in ["bridge", "macvlan", "host-device"] {
        pods_send_in_whose_name_they_may(kind, true);
    }
}

/// `executed`: the reference makes the interface, and the keys are those of netattach behind it.
fn pods_send_in_whose_name_they_may(kind: &str, executed: bool) {
    let mut node = Node::new(&[]).unwrap();
    if executed {
        let needed = [kind, "static", "host-local"];
        let test = "behind_another_plugin_netattach_says_so";
        let Some(from) = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &needed) else { return };
        install(&node, &from, &needed).unwrap();
        node.set("delegation", json!({"exec": needed}));
    }
    node.add_wire().unwrap();
    let sides = [("a", "10.61.0.2/24", "fd00:61::2/64"), ("b", "10.61.0.3/24", "fd00:61::3/64")];
    let _wires = Wires::new(&node, &sides.map(|(side, ..)| side)).unwrap();
    for (number, (name, keys)) in NETWORKS.into_iter().enumerate() {
        for (side, v4, v6) in sides {
            // Each device of the node has a network of its own.
            let name = format!("{side}-{name}");
            let mut config = config(&node, number, if executed { "{}" } else { keys });
            config["type"] = json!(kind);
            config["master"] = json!(WIRE);
            config["device"] = json!(side);
            config["ipam"] = json!({"type": "static", "addresses": [{"address": v4}, {"address": v6}]});
            if executed {
                let mut behind: Value = serde_json::from_str(keys).unwrap();
                behind["type"] = json!("netattach");
                config = json!({"cniVersion": "1.0.0", "plugins": [config, behind]});
            }
            node.write(&name, &network(NAMESPACE, &name, &config)).unwrap();
            node.write(&format!("pod-{name}"), &pod(&name, &json!({}), &json!(name))).unwrap();
        }
    }
    node.start().unwrap();
    // Which of these senders pass: its own address, the one that is allowed, another; the same by a foreign Ethernet
    // address.
    let expected = [
        ("strict", [true, false, false], false, ""),
        ("virtual", [true, true, false], false, "the pod may send from 10.61.0.100, fd00:61::100 too"),
        ("router", [true, true, true], false, "the pod may send from any IP address"),
        ("machine", [true, true, true], true, "the pod may send from any Ethernet and IP address"),
    ];
    for (number, (name, passes, by_any_mac, detail)) in expected.into_iter().enumerate() {
        let pods = ["a", "b"].map(|side| Pod::new(&format!("{side}-{name}")).unwrap());
        let [a, b] = &pods;
        if (kind, by_any_mac, executed) == ("macvlan", true, false) {
            let (code, told) = node.add(a).failure();
            assert_eq!((code, told.contains("key sourceCheck: ")), (2, true), "{told}");
            continue;
        }
        for pod in &pods {
            node.add(pod).success();
            assert_eq!(node.check(pod).success(), Value::Null, "{kind}, {name}");
        }
        for address in ["10.61.0.100/24", "10.61.0.101/24", "fd00:61::100/64", "fd00:61::101/64"] {
            let mut words = vec!["addr", "add", address, "dev", "net1"];
            if address.contains(':') {
                words.push("nodad");
            }
            ip(&a.namespace, &words).unwrap();
        }
        for (to, from) in [
            ("10.61.0.3", ["10.61.0.2", "10.61.0.100", "10.61.0.101"]),
            ("fd00:61::3", ["fd00:61::2", "fd00:61::100", "fd00:61::101"]),
        ] {
            let echo = Echo::serve_soon(&b.namespace, SocketAddr::new(to.parse().unwrap(), 7)).unwrap();
            for (from, passes) in from.into_iter().zip(passes) {
                let source: IpAddr = from.parse().unwrap();
                let patience = if passes { PATIENCE } else { SILENCE };
                let heard = datagram_from(&a.namespace, source, echo.address(), patience).unwrap();
                assert_eq!(heard, passes, "{kind}, {name}: {from} to {to}");
            }
        }
        let shown = node.ctl(&["attachments", "--pod", &format!("{NAMESPACE}/a-{name}")]).unwrap();
        let row = shown.as_array().unwrap().iter().find(|row| row["ifname"] == "net1");
        let row = row.unwrap_or_else(|| panic!("{shown:#}"));
        // The pods may have every privilege, which matters if programs do not run on the node's end.
        let level = if kind == "bridge" { "full" } else { "full-unless-privileged" };
        let told = row["enforcement_detail"].as_str().unwrap_or_default();
        let is_told = if kind == "bridge" { told == detail } else { told.contains(detail) };
        assert_eq!((row["enforcement"].as_str(), is_told), (Some(level), true), "{kind}, {name}: {told}");
        // A different one for each network: the reference's host-device does not restore a device's own address.
        let foreign = format!("02:00:00:00:{number:02x}:77");
        ip(&a.namespace, &["link", "set", "net1", "address", &foreign]).unwrap();
        let echo = Echo::serve(&b.namespace, "10.61.0.3:7".parse().unwrap()).unwrap();
        let patience = if by_any_mac { PATIENCE } else { SILENCE };
        let heard = datagram_from(&a.namespace, "10.61.0.2".parse().unwrap(), echo.address(), patience);
        assert_eq!(heard.unwrap(), by_any_mac, "{kind}, {name}: a foreign Ethernet address");
        drop(echo);
        for pod in &pods {
            assert_eq!(node.del(pod).success(), Value::Null);
        }
    }
}

/// A request of one pod holds only for that pod, if the agent's settings permit it.
///
/// Rows: SRC-allowedAddresses, SRC-pod.
#[test]
fn a_pod_asks_for_what_the_settings_permit() {
    let mut node = Node::new(&[]).unwrap();
    node.set(
        "podSources",
        json!([
            {"namespaces": [NAMESPACE], "networks": [format!("{NAMESPACE}/lan")], "addresses": ["10.61.0.96/28"]},
            {"namespaces": ["other"], "networks": ["*"], "sourceCheck": "mac"}
        ]),
    );
    node.write("lan", &network(NAMESPACE, "lan", &config(&node, 0, "{}"))).unwrap();
    let asks = [
        ("a", json!({"allowedAddresses": ["10.61.0.100", "10.61.0.104/31"]})),
        ("b", json!({})),
        ("beyond", json!({"allowedAddresses": ["10.61.0.112"]})),
        ("lax", json!({"sourceCheck": "mac"})),
    ];
    for (name, arguments) in &asks {
        let selection = json!([{"name": "lan", "cni-args": arguments}]);
        node.write(&format!("pod-{name}"), &pod(name, &json!({}), &selection)).unwrap();
    }
    node.start().unwrap();
    let [a, b] = ["a", "b"].map(|name| Pod::new(name).unwrap());
    for pod in [&a, &b] {
        node.add(pod).success();
        assert_eq!(node.check(pod).success(), Value::Null);
    }
    for (pod, other, own) in [(&a, "10.61.0.3", "10.61.0.2"), (&b, "10.61.0.2", "10.61.0.3")] {
        let is_permitted = pod.container == a.container;
        for address in ["10.61.0.100/32", "10.61.0.105/32", "10.61.0.106/32"] {
            ip(&pod.namespace, &["addr", "add", address, "dev", "net1"]).unwrap();
        }
        let far = if is_permitted { &b } else { &a };
        let echo = Echo::serve(&far.namespace, SocketAddr::new(other.parse().unwrap(), 7)).unwrap();
        for (from, passes) in [
            (own, true),
            ("10.61.0.100", is_permitted),
            ("10.61.0.105", is_permitted),
            ("10.61.0.106", false),
        ] {
            let patience = if passes { PATIENCE } else { SILENCE };
            let heard =
                datagram_from(&pod.namespace, from.parse().unwrap(), echo.address(), patience).unwrap();
            assert_eq!(heard, passes, "{from} to {other}");
        }
        for address in ["10.61.0.100/32", "10.61.0.105/32", "10.61.0.106/32"] {
            ip(&pod.namespace, &["addr", "del", address, "dev", "net1"]).unwrap();
        }
    }
    let shown = node.ctl(&["attachments", "--pod", &format!("{NAMESPACE}/a")]).unwrap();
    let row = shown.as_array().unwrap().iter().find(|row| row["ifname"] == "net1").unwrap().clone();
    assert_eq!(
        (&row["enforcement"], &row["enforcement_detail"]),
        (&json!("full"), &json!("the pod may send from 10.61.0.100, 10.61.0.104/31 too"))
    );
    for (name, said) in [
        ("beyond", "key cni-args.allowedAddresses: 10.61.0.112"),
        ("lax", "key cni-args.sourceCheck: \"mac\""),
    ] {
        let pod = Pod::new(name).unwrap();
        let refused = format!(
            "attach net1 (shop/lan): {said} is not permitted to pods of \"shop\" on shop/lan (setting podSources)"
        );
        assert_eq!(node.call("ADD", &pod).run().failure(), (7, refused));
    }
    for pod in [&a, &b] {
        assert_eq!(node.del(pod).success(), Value::Null);
    }
    Snapshot::take(&node, &[&a, &b]).unwrap().assert_nothing_is_left();
}

fn mac(pod: &Pod) -> Mac {
    Handle::open_in(pod.namespace.netns()).unwrap().link("net1").unwrap().mac.unwrap()
}

/// Sends frames with these tags from one pod to another with its own source address, and with a foreign one: of the
/// first, those marked arrive; of the others, none.
fn assert_passes<const N: usize>(
    from: &Pod,
    to: &Pod,
    (source, destination): (&str, &str),
    rows: [(&[u16], bool); N],
) {
    let (out, heard) = (&from.namespace, RawSocket::open(&to.namespace, "net1").unwrap());
    let out = RawSocket::open(out, "net1").unwrap();
    let send = |source: &str, tags: &[u16], text: &str| {
        let plain = Packet::between(source, destination).from_mac(mac(from));
        let packet = tags.iter().fold(plain, |packet, tag| packet.tagged(*tag));
        // A protocol for experiments (RFC 3692).
        let mut frame = packet.payload(253, text.as_bytes()).frame();
        frame[..6].copy_from_slice(&mac(to).0);
        out.send(&frame).unwrap();
    };
    for (tags, _) in rows {
        send(source, tags, &format!("tags {tags:?}"));
        send("10.61.0.9", tags, &format!("forged {tags:?}"));
    }
    send(source, &[], "the last one");
    let frames = heard.frames_until(b"the last one", PATIENCE).unwrap();
    let arrived = |text: &str| frames.iter().any(|frame| frame.ends_with(text.as_bytes()));
    for (tags, passes) in rows {
        assert_eq!(arrived(&format!("tags {tags:?}")), passes, "{source}: {tags:?}");
        assert!(!arrived(&format!("forged {tags:?}")), "{source}: {tags:?}");
    }
}

/// Two pods on the network `lan` of a node that is started for them.
fn attached(node: &mut Node) -> [Pod; 2] {
    let names = ["a", "b"];
    for name in names {
        node.write(&format!("pod-{name}"), &pod(name, &json!({}), &json!("lan"))).unwrap();
    }
    node.start().unwrap();
    names.map(|name| {
        let pod = Pod::new(name).unwrap();
        node.add(&pod).success();
        pod
    })
}

/// Rows: SRC-vlans.
#[test]
fn frames_of_vlans_pass_between_macvlans_too() {
    let mut node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    let mut config = config(&node, 0, r#"{"vlans": [5]}"#);
    config["type"] = json!("macvlan");
    config["master"] = json!(WIRE);
    node.write("lan", &network(NAMESPACE, "lan", &config)).unwrap();
    let [a, b] = attached(&mut node);
    for pod in [&a, &b] {
        node.check(pod).success();
    }
    let rows: [(&[u16], bool); 5] =
        [(&[], true), (&[5], true), (&[6], false), (&[5, 6], false), (&[5, 5], true)];
    assert_passes(&a, &b, ("10.61.0.2", "10.61.0.3"), rows);
    for pod in [&a, &b] {
        node.del(pod).success();
    }
    Snapshot::take(&node, &[&a, &b]).unwrap().assert_nothing_is_left();
}

/// Rows: SRC-vlans, SRC-vlans-pod.
#[test]
fn frames_of_vlans_pass_with_their_tag_where_a_definition_or_a_permission_names_them() {
    let mut node = Node::new(&[]).unwrap();
    node.set(
        "podSources",
        json!([{
            "namespaces": [NAMESPACE], "networks": ["*"], "vlans": [{"minID": 100, "maxID": 109}]
        }]),
    );
    let keys = r#"{"vlans": [5, {"minID": 7, "maxID": 8}]}"#;
    node.write("lan", &network(NAMESPACE, "lan", &config(&node, 0, keys))).unwrap();
    for (name, arguments) in
        [("a", json!({})), ("asks", json!({"vlans": [100]})), ("beyond", json!({"vlans": [5, 110]}))]
    {
        let selection = json!([{"name": "lan", "cni-args": arguments}]);
        node.write(&format!("pod-{name}"), &pod(name, &json!({}), &selection)).unwrap();
    }
    node.start().unwrap();
    let [a, asks, beyond] = ["a", "asks", "beyond"].map(|name| Pod::new(name).unwrap());
    for pod in [&a, &asks] {
        node.add(pod).success();
        node.check(pod).success();
    }
    let (code, told) = node.add(&beyond).failure();
    let refused =
        "key cni-args.vlans: VLAN 5 is not permitted to pods of \"shop\" on shop/lan (setting podSources)";
    assert_eq!((code, told.ends_with(refused)), (7, true), "{told}");

    // Whether frames that `a` and the other pod send to each other arrive, by their tags.
    let rows: [(&[u16], [bool; 2]); 9] = [
        (&[], [true, true]),
        (&[5], [true, true]),
        (&[7], [true, true]),
        (&[8], [true, true]),
        (&[6], [false, false]),
        (&[100], [false, true]),
        (&[101], [false, false]),
        (&[5, 7], [true, true]),
        (&[5, 6], [false, false]),
    ];
    let (first, second) = ("10.61.0.2", "10.61.0.3");
    let ways = [(&a, &asks, (first, second)), (&asks, &a, (second, first))];
    for (number, (from, to, between)) in ways.into_iter().enumerate() {
        assert_passes(from, to, between, rows.map(|(tags, passes)| (tags, passes[number])));
    }
    let shown = node.ctl(&["attachments", "--pod", &format!("{NAMESPACE}/asks")]).unwrap();
    let row = shown.as_array().unwrap().iter().find(|row| row["ifname"] == "net1").unwrap().clone();
    let detail = "frames of VLANs 5, 7 to 8, 100 pass with their tag";
    assert_eq!((&row["enforcement"], &row["enforcement_detail"]), (&json!("full"), &json!(detail)));
    // The result is the same after a restart.
    node.kill().unwrap();
    node.start().unwrap();
    assert_passes(&asks, &a, (second, first), [(&[100][..], true), (&[101], false)]);
    for pod in [&a, &asks] {
        node.del(pod).success();
    }
    Snapshot::take(&node, &[&a, &asks, &beyond]).unwrap().assert_nothing_is_left();
}

/// Otherwise the frame would be IP on the wire, from any address to any. The ethertype behind two tags is at an
/// offset that a packet socket can have overwritten on every kernel.
///
/// Rows: SRC-vlans, C88.
#[test]
fn an_ethertype_that_the_definition_names_is_not_another_later() {
    let mut node = Node::new(&[]).unwrap();
    let lan = network(NAMESPACE, "lan", &config(&node, 0, r#"{"vlans": [5, 7]}"#));
    node.write("lan", &annotated(lan, ETHERTYPES_ANNOTATION, "0x88b6")).unwrap();
    let [a, b] = attached(&mut node);
    let heard = RawSocket::open(&b.namespace, "net1").unwrap();
    let out = a.namespace.run(|| RawSocket::leaving_sums("net1")).unwrap();
    let send = |place: u16, text: &[u8]| {
        let named = [&[0_u8, 5, 0x81, 0, 0, 7, 0x88, 0xb6, 0, 0, 0, 0][..], text].concat();
        let frame = any_frame(mac(&b), mac(&a), 0x8100, &named);
        out.send(&[&sum_at(20, place - 20)[..], &frame].concat()).unwrap();
    };
    let dropped = || {
        let rows = node.ctl(&["stats", "--pod", &format!("{NAMESPACE}/a")]).unwrap();
        let row = rows.as_array().unwrap().iter().find(|row| row["ifname"] == "net1").unwrap();
        row["dropped"]["malformed"].as_u64().unwrap_or_default()
    };
    send(20, b"its ethertype is written");
    assert!(eventually(PATIENCE, || dropped() > 0));
    // Frames are not judged there.
    let text = b"its payload is written";
    send(24, text);
    let frames = heard.frames_until(text, PATIENCE).unwrap();
    let arrived = |text: &[u8]| frames.iter().any(|frame| frame.ends_with(text));
    assert_eq!([arrived(b"its ethertype is written"), arrived(text)], [false, true]);
    for pod in [&a, &b] {
        node.del(pod).success();
    }
    Snapshot::take(&node, &[&a, &b]).unwrap().assert_nothing_is_left();
}
