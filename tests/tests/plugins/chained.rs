//! netattach as a chained plugin of a network: its dataplane for an interface that another plugin creates.

use std::net::IpAddr;

use netattach::mac::Mac;
use netattach::netlink::Handle;
use netattach_tests::manifest::{NAMESPACE, annotated, network, pod, policy};
use netattach_tests::node::{WIRE, ip};
use netattach_tests::packet::Packet;
use netattach_tests::raw::RawSocket;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, datagram_from, eventually, ping};
use netattach_tests::wires::install;
use netattach_tests::{Node, Pod, tools};
use serde_json::{Value, json};

const EXECUTED: [&str; 4] = ["bridge", "ptp", "macvlan", "host-local"];

/// A node that executes the reference's plugins; `None`: they are not there.
fn node(test: &str) -> Option<Node> {
    let from = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &EXECUTED)?;
    let mut node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    install(&node, &from, &EXECUTED).unwrap();
    node.set("delegation", json!({"exec": EXECUTED}));
    Some(node)
}

/// The plugin that makes an interface, with addresses of that network.
fn interface(node: &Node, kind: &str, number: u8) -> Value {
    let ipam = node.host_local(&[&format!("10.7{number}.0.0/24")]);
    json!({"type": kind, "bridge": format!("br7{number}"), "isGateway": true, "master": WIRE, "ipam": ipam})
}

/// Defines a network of these plugins, and a pod of the same name that has it.
fn define(node: &Node, name: &str, plugins: &[Value]) {
    let list = json!({"cniVersion": "1.0.0", "plugins": plugins});
    node.write(name, &network(NAMESPACE, name, &list)).unwrap();
    node.write(&format!("pod-{name}"), &pod(name, &json!({}), &json!(name))).unwrap();
}

fn row(node: &Node, pod: &str) -> Value {
    let rows = node.ctl(&["attachments", "--pod", &format!("{NAMESPACE}/{pod}")]).unwrap();
    rows.as_array().unwrap().iter().find(|row| row["ifname"] == "net1").unwrap().clone()
}

fn dropped(node: &Node, pod: &str, reason: &str) -> u64 {
    let rows = node.ctl(&["stats", "--pod", &format!("{NAMESPACE}/{pod}")]).unwrap();
    let row = rows.as_array().unwrap().iter().find(|row| row["ifname"] == "net1").unwrap();
    row["dropped"][reason].as_u64().unwrap_or_default()
}

/// Without netattach after it, packets of such an interface are not checked before a policy selects it.
///
/// Rows: CHN-keys, CHN-policy.
#[test]
fn programs_run_from_the_add_on_and_a_policy_holds() {
    let Some(mut node) = node("programs_run_from_the_add_on_and_a_policy_holds") else { return };
    let behind = json!({"type": "netattach"});
    for (number, kind) in (1..).zip(["bridge", "ptp", "macvlan"]) {
        define(&node, kind, &[interface(&node, kind, number), behind.clone()]);
        define(&node, &format!("alone-{kind}"), &[interface(&node, kind, number + 3)]);
    }
    node.start().unwrap();
    for (number, kind, level) in
        [(1, "bridge", "full"), (2, "ptp", "full"), (3, "macvlan", "full-unless-privileged")]
    {
        let [pod, alone] = [kind.to_owned(), format!("alone-{kind}")].map(|name| Pod::new(&name).unwrap());
        for pod in [&pod, &alone] {
            node.add(pod).success();
            assert_eq!(node.check(pod).success(), Value::Null, "{kind}");
        }
        let found = row(&node, kind);
        let shown = (&found["enforcement"], found.get("programs_wait"));
        assert_eq!(shown, (&json!(level), None), "{kind}: {found:#}");
        let waits = row(&node, &alone.name);
        assert_eq!(waits["programs_wait"], true, "{waits:#}");
        // Packets of the pod with a foreign source address.
        for of in [&pod, &alone] {
            let mac = Handle::open_in(of.namespace.netns()).unwrap().link("net1").unwrap().mac.unwrap();
            let frame =
                Packet::between("10.7.9.9", "10.70.0.9").from_mac(mac).payload(253, b"forged").frame();
            RawSocket::queued(&of.namespace, "net1").unwrap().send(&frame).unwrap();
        }
        assert!(eventually(PATIENCE, || dropped(&node, kind, "source-ipv4") > 0), "{kind}");
        assert_eq!(dropped(&node, &alone.name, "source-ipv4"), 0, "{kind}");

        let gateway: IpAddr = format!("10.7{number}.0.1").parse().unwrap();
        let reaches = || ping(&pod.namespace, gateway, SILENCE).unwrap();
        if kind != "macvlan" {
            assert!(ping(&pod.namespace, gateway, PATIENCE).unwrap(), "{kind}");
            let nothing = json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]});
            node.write("nothing", &policy("nothing", kind, &nothing)).unwrap();
            assert!(eventually(PATIENCE, || !reaches()), "{kind}");
            // The next agent continues with it.
            node.kill().unwrap();
            node.start().unwrap();
            assert!(!reaches(), "{kind}");
            assert_eq!(node.check(&pod).success(), Value::Null, "{kind}");
            node.remove("nothing").unwrap();
            assert!(eventually(PATIENCE, reaches), "{kind}");
        }
        for pod in [&pod, &alone] {
            node.del(pod).success();
        }
        Snapshot::take(&node, &[&pod, &alone]).unwrap().assert_nothing_is_left();
    }
}

/// A plugin may set addresses on its interface and attribute none to it, or those of another sandbox's interface. An
/// interface without any address gets one from the pod, and the level reports that addresses are not checked.
///
/// Rows: CHN-addresses.
#[test]
fn where_no_result_has_an_address_of_the_interface_the_kernels_are_its_own() {
    let mut node = Node::new(&[]).unwrap();
    for (name, given) in [("silent", json!(["10.77.0.2/24"])), ("bare", json!([]))] {
        let result = json!({
            "cniVersion": "1.0.0", "interfaces": [{"name": "net1", "sandbox": "/run/netns/another"}],
            "ips": [{"interface": 0, "address": "10.77.0.9/24"}],
        });
        node.plugin(name, &json!({"link": "veth", "addresses": given, "result": result})).unwrap();
        define(&node, name, &[json!({"type": name}), json!({"type": "netattach"})]);
    }
    node.start().unwrap();
    let [silent, bare] = ["silent", "bare"].map(|name| Pod::new(name).unwrap());
    let send = |pod: &Pod| {
        let mac = Handle::open_in(pod.namespace.netns()).unwrap().link("net1").unwrap().mac.unwrap();
        let socket = RawSocket::queued(&pod.namespace, "net1").unwrap();
        for from in ["10.77.0.2", "10.77.0.9"] {
            let frame = Packet::between(from, "10.77.0.1").from_mac(mac).payload(253, b"from").frame();
            socket.send(&frame).unwrap();
        }
    };
    let level = "programs run in the pod, and its container main has CAP_NET_RAW";
    let lax = "the pod may send from any IP address: neither the result of its plugins nor the kernel has one of the \
               interface, and allowedAddresses names none";
    for (pod, detail, checked) in [(&silent, level.to_owned(), 1), (&bare, format!("{level}; {lax}"), 0)] {
        node.add(pod).success();
        assert_eq!(node.check(pod).success(), Value::Null, "{}", pod.name);
        assert_eq!(row(&node, &pod.name)["enforcement_detail"], detail, "{}", pod.name);
        send(pod);
        let forged = |node: &Node| dropped(node, &pod.name, "source-ipv4");
        assert!(eventually(PATIENCE, || forged(&node) >= checked), "{}", pod.name);
        // The next agent continues with the addresses that were found.
        node.kill().unwrap();
        node.start().unwrap();
        assert_eq!(node.check(pod).success(), Value::Null, "{}", pod.name);
        send(pod);
        assert!(eventually(PATIENCE, || forged(&node) >= 2 * checked), "{}", pod.name);
        assert_eq!(forged(&node), 2 * checked, "{}: its own passes", pod.name);
        node.del(pod).success();
    }
    Snapshot::take(&node, &[&silent, &bare]).unwrap().assert_nothing_is_left();
}

/// Rows: CHN-keys, CHN-pod.
#[test]
fn tagged_frames_pass_where_netattach_or_a_permission_names_their_vlan() {
    let Some(mut node) = node("tagged_frames_pass_where_netattach_or_a_permission_names_their_vlan") else {
        return;
    };
    let addresses = json!(["10.71.0.96/28"]);
    node.set(
        "podSources",
        json!([{"namespaces": [NAMESPACE], "networks": ["*"], "addresses": addresses, "vlans": [100]}]),
    );
    let behind = json!({"type": "netattach", "vlans": [5]});
    define(&node, "b", &[interface(&node, "bridge", 1), behind]);
    let asks = json!([{"name": "b", "cni-args": {"vlans": [100], "allowedAddresses": ["10.71.0.100"]}}]);
    node.write("pod-asks", &pod("asks", &json!({}), &asks)).unwrap();
    define(&node, "plain", &[interface(&node, "bridge", 2)]);
    let asks = json!([{"name": "plain", "cni-args": {"sourceCheck": "full"}}]);
    node.write("pod-plain", &pod("plain", &json!({}), &asks)).unwrap();
    node.start().unwrap();
    let pods = ["b", "asks"].map(|name| Pod::new(name).unwrap());
    let [b, asks] = &pods;
    for pod in &pods {
        node.add(pod).success();
        assert_eq!(node.check(pod).success(), Value::Null);
    }
    let detail = |pod: &str| row(&node, pod)["enforcement_detail"].clone();
    assert_eq!(detail("b"), "frames of VLAN 5 pass with their tag");
    assert_eq!(
        detail("asks"),
        "the pod may send from 10.71.0.100 too; frames of VLANs 5, 100 pass with their tag"
    );
    let mac = |pod: &Pod| -> Mac {
        Handle::open_in(pod.namespace.netns()).unwrap().link("net1").unwrap().mac.unwrap()
    };
    let heard = RawSocket::open(&b.namespace, "net1").unwrap();
    let out = RawSocket::open(&asks.namespace, "net1").unwrap();
    let send = |tags: &[u16], text: &str| {
        let plain = Packet::between("10.71.0.3", "10.71.0.2").from_mac(mac(asks));
        let packet = tags.iter().fold(plain, |packet, tag| packet.tagged(*tag));
        let mut frame = packet.payload(253, text.as_bytes()).frame();
        frame[..6].copy_from_slice(&mac(b).0);
        out.send(&frame).unwrap();
    };
    // For `b`, VLAN 100 is blocked only while a policy isolates it.
    for (tags, text) in [(&[5][..], "five"), (&[6], "six"), (&[100], "hundred"), (&[], "the last one")] {
        send(tags, text);
    }
    let frames = heard.frames_until(b"the last one", PATIENCE).unwrap();
    let arrived = |text: &str| frames.iter().any(|frame| frame.ends_with(text.as_bytes()));
    assert_eq!(["five", "six", "hundred"].map(arrived), [true, false, true]);
    for address in ["10.71.0.100/32", "10.71.0.101/32"] {
        ip(&asks.namespace, &["addr", "add", address, "dev", "net1"]).unwrap();
    }
    let echo = Echo::serve(&b.namespace, "10.71.0.2:7".parse().unwrap()).unwrap();
    for (from, passes) in [("10.71.0.3", true), ("10.71.0.100", true), ("10.71.0.101", false)] {
        let patience = if passes { PATIENCE } else { SILENCE };
        let heard = datagram_from(&asks.namespace, from.parse().unwrap(), echo.address(), patience).unwrap();
        assert_eq!(heard, passes, "{from}");
    }
    let (code, told) = node.add(&Pod::new("plain").unwrap()).failure();
    let expected = "attach net1 (shop/plain): key cni-args.sourceCheck: only an interface that netattach makes and judges has it, \
                    and one behind which netattach is chained";
    assert_eq!((code, told.as_str()), (7, expected));
    drop(echo);
    for pod in &pods {
        node.del(pod).success();
    }
    Snapshot::take(&node, &pods.each_ref()).unwrap().assert_nothing_is_left();
}

/// Rows: CHN-own, CHN-refused.
#[test]
fn what_cannot_hold_is_refused_by_name() {
    let mut node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    // A plugin that leaves the pod a device to drive itself, and one that creates an interface.
    let info =
        json!({"type": "memif", "version": "1.1.0", "memif": {"role": "slave", "path": "/x", "mode": "ip"}});
    node.plugin("user", &json!({"deviceInfo": info})).unwrap();
    node.plugin("card", &json!({"link": "veth"})).unwrap();
    let user = json!({"type": "user", "capabilities": {"CNIDeviceInfoFile": true}});
    let card = json!({"type": "card"});
    let behind = |keys: Value| {
        let mut behind = keys;
        behind["type"] = json!("netattach");
        behind
    };
    let plain = behind(json!({}));
    let own = |kind: &str, mut keys: Value| {
        keys["type"] = json!(kind);
        match kind {
            "bridge" => keys["bridge"] = json!("br8"),
            _ => keys["master"] = json!(WIRE),
        }
        keys["ipam"] = node.host_local(&["10.78.0.0/24"]);
        keys
    };
    let refused = [
        (
            "user",
            vec![user, plain.clone()],
            "load policy and counters: netattach behind another plugin: net1 cannot have its dataplane: the pod drives the \
             device (memif) itself, past the kernel",
        ),
        (
            "fast",
            vec![card.clone(), behind(json!({"fastPath": true}))],
            "key fastPath: true: packets of an interface that another plugin made do not take the fast path",
        ),
        (
            "twice",
            vec![card.clone(), plain.clone(), plain.clone()],
            "plugins[2].type: netattach: the list has it already",
        ),
        (
            "limits",
            vec![
                card.clone(),
                json!({"type": "bandwidth", "ingressRate": 8000}),
                behind(json!({"bandwidth": {"ingressRate": 8000}})),
            ],
            "plugins[2].type: netattach: a plugin before it limits the interface already",
        ),
        (
            "never",
            vec![card.clone(), plain.clone()],
            "plugin netattach behind another: enforce is never, by the network's definition or the agent's settings; one of \
             the two",
        ),
        (
            "passthru",
            vec![own("macvlan", json!({"mode": "passthru"})), plain.clone()],
            "key type: netattach behind macvlan: no program sees such an interface, so it has no dataplane",
        ),
        (
            "other",
            vec![own("bridge", json!({"sourceCheck": "mac"})), behind(json!({"sourceCheck": "off"}))],
            "key sourceCheck: \"off\" of netattach behind the interface, which itself has \"mac\"; one of the two",
        ),
    ];
    for (name, plugins, _) in &refused {
        define(&node, name, plugins);
    }
    let list = json!({"cniVersion": "1.0.0", "plugins": [card, plain]});
    let never = annotated(network(NAMESPACE, "never", &list), "netattach.dev/enforce", "never");
    node.write("never", &never).unwrap();
    define(&node, "first", &[behind(json!({}))]);
    define(&node, "own", &[own("bridge", json!({})), behind(json!({"sourceCheck": "mac", "typo": 1}))]);
    node.start().unwrap();
    for (name, _, why) in &refused {
        let expected = format!("attach net1 (shop/{name}): {why}");
        assert_eq!(node.add(&Pod::new(name).unwrap()).failure(), (7, expected));
    }
    let itself = (7, "network shop/first: plugin type netattach is netattach itself".to_owned());
    assert_eq!(node.add(&Pod::new("first").unwrap()).failure(), itself);
    // DEL was called for the plugins that had run.
    Snapshot::take(&node, &[]).unwrap().assert_nothing_is_left();

    let pod = Pod::new("own").unwrap();
    node.add(&pod).success();
    let found = row(&node, "own");
    let shown = (&found["enforcement"], &found["enforcement_detail"]);
    assert_eq!(shown, (&json!("full"), &json!("the pod may send from any IP address")));
    let warnings = node.status(&pod).unwrap()[1]["dev.netattach.warnings"].clone();
    assert_eq!(
        warnings,
        json!(["key typo: without effect, netattach's own netattach plugin has no such key"])
    );
    node.del(&pod).success();
    Snapshot::take(&node, &[&pod]).unwrap().assert_nothing_is_left();
}
