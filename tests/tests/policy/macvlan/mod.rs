//! Policies, counters and programs of macvlan attachments on a parent that they share.
//!
//! `parents` tests where the programs of that parent are attached.

mod parents;

use std::path::Path;
use std::process::Command;

use netattach_tests::manifest::{NAMESPACE, network, pod, policy};
use netattach_tests::node::{WIRE, ip};
use netattach_tests::packet::Packet;
use netattach_tests::raw::RawSocket;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, connects, datagram, datagram_from, eventually};
use netattach_tests::{Namespace, Node, Pod};
use serde_json::{Value, json};

use super::on_parent::{CLIENT, OTHER, OUTSIDE, SERVER, at, is_allowed, policies};

/// Host number of the pod whose address is assigned by DHCP.
const LATE: u8 = 77;

struct Scene {
    node: Node,
    pods: [Pod; 3],
    /// The far end of the parent's wire.
    outside: Namespace,
}

impl Scene {
    fn new(mode: &str, policies: &[(&str, Value)]) -> Self {
        Self::with(&[], mode, policies)
    }

    /// With these settings of the agent.
    fn with(settings: &[(&str, &str)], mode: &str, policies: &[(&str, Value)]) -> Self {
        Self::of("macvlan", settings, mode, policies)
    }

    /// With links of that kind.
    fn of(kind: &str, settings: &[(&str, &str)], mode: &str, policies: &[(&str, Value)]) -> Self {
        let mut node = Node::new(&[]).unwrap();
        for (key, value) in settings {
            node.set(key, json!(value));
        }
        node.add_wire().unwrap();
        let lan = json!({
            "cniVersion": "1.0.0", "type": kind, "master": WIRE, "mode": mode,
            "ipam": node.host_local(&["10.52.0.0/24"])
        });
        node.write("lan", &network(NAMESPACE, "lan", &lan)).unwrap();
        for name in ["server", "client", "other"] {
            node.write(name, &pod(name, &json!({"app": name}), &json!("lan"))).unwrap();
        }
        for (name, policy) in policies {
            node.write(name, policy).unwrap();
        }
        let outside = Namespace::new().unwrap();
        // `ip` takes a task for the namespace that it is in.
        let task = outside.path().ancestors().nth(2).and_then(Path::file_name).unwrap().to_str().unwrap();
        ip(&node.namespace, &["link", "set", "wire1", "netns", task]).unwrap();
        ip(&outside, &["addr", "add", &format!("10.52.0.{OUTSIDE}/24"), "dev", "wire1"]).unwrap();
        ip(&outside, &["link", "set", "wire1", "up"]).unwrap();
        node.start().unwrap();
        let pods = ["server", "client", "other"].map(|name| {
            let pod = Pod::new(name).unwrap();
            node.add(&pod).success();
            pod
        });
        Self { node, pods, outside }
    }

    fn namespace(&self, host: u8) -> &Namespace {
        match host {
            OUTSIDE => &self.outside,
            pod => &self.pods[usize::from(pod - SERVER)].namespace,
        }
    }

    fn stats(&self, pod: &str) -> Value {
        let rows = self.node.ctl(&["stats", "--pod", &format!("{NAMESPACE}/{pod}"), "--network", "shop/lan"]);
        rows.unwrap()[0].clone()
    }

    fn end(self) {
        let pods = self.pods.each_ref();
        for pod in pods {
            self.node.del(pod).success();
        }
        let after = Snapshot::take(&self.node, &pods).unwrap();
        after.assert_nothing_is_left();
        assert!(!after.pins.iter().any(|pin| pin.contains("/link/")), "{:?}", after.pins);
        assert!(!has_clsact(&self.node));
    }
}

/// Whether the parent has the queueing discipline for filters.
fn has_clsact(node: &Node) -> bool {
    let shown = node.namespace.run(|| Command::new("tc").args(["qdisc", "show", "dev", WIRE]).output());
    String::from_utf8(shown.unwrap().stdout).unwrap().contains("clsact")
}

/// Tries every pair over TCP and UDP, against the policies.
fn assert_policies_hold(scene: &Scene) {
    let everybody = [SERVER, CLIENT, OTHER, OUTSIDE];
    let ports = [80, 81];
    let servers: Vec<Echo> = everybody
        .iter()
        .flat_map(|host| ports.map(|port| Echo::serve(scene.namespace(*host), at(*host, port)).unwrap()))
        .collect();
    let mut surprises = Vec::new();
    for from in everybody {
        for to in everybody.into_iter().filter(|to| *to != from) {
            for port in ports {
                for tcp in [true, false] {
                    let expected = is_allowed(from, to, port, tcp);
                    let patience = if expected { PATIENCE } else { SILENCE };
                    let namespace = scene.namespace(from);
                    let passed = if tcp {
                        connects(namespace, at(to, port), patience)
                    } else {
                        datagram(namespace, at(to, port), patience).unwrap()
                    };
                    if passed != expected {
                        surprises.push(format!("{from} to {to}:{port}, tcp {tcp}: passed {passed}"));
                    }
                }
            }
        }
    }
    assert_eq!(surprises, Vec::<String>::new());
    drop(servers);
}

/// Rows: C17.
#[test]
fn policies_hold_between_pods_of_one_parent_and_with_the_world() {
    for attach in ["clsact", "tcx"] {
        policies_hold_with(attach);
    }
}

fn policies_hold_with(attach: &str) {
    let scene = Scene::with(&[("attach", attach)], "bridge", &policies());
    assert_policies_hold(&scene);
    let rows = scene.node.ctl(&["attachments"]).unwrap();
    let lan = rows.as_array().unwrap().iter().filter(|row| row["network"] == "shop/lan");
    let levels: Vec<&Value> = lan.map(|row| &row["enforcement"]).collect();
    // Pods that drop no capability have packet sockets.
    assert_eq!(levels, ["full-unless-privileged"; 3]);
    // Packets dropped by the other pod's egress policy never reach the server. A sender may have given up before its
    // neighbour was resolved, and its packet arrives after that.
    for (pod, reasons) in
        [("server", vec!["ingress-port"]), ("client", vec![]), ("other", vec!["egress-peer"])]
    {
        let mut counted: Vec<String> = Vec::new();
        eventually(PATIENCE, || {
            counted = scene.stats(pod)["dropped"].as_object().unwrap().keys().cloned().collect();
            counted.len() >= reasons.len()
        });
        assert_eq!(counted, reasons, "{pod}");
    }
    for pod in ["server", "client", "other"] {
        let stats = scene.stats(pod);
        let packets = |way: &str| stats[way]["packets"].as_u64().unwrap();
        assert!(packets("sent") > 10 && packets("received") > 10, "{stats}");
    }
    let explained = scene.node.ctl(&["explain", "shop/other", "shop/server", "80"]).unwrap();
    assert!(explained.to_string().contains("shop/lan"), "{explained:#}");
    scene.end();
}

/// Rows: C17, MVL-macvtap.
#[test]
fn policies_hold_on_macvtaps() {
    // While no program has its character device open, its frames are those of the pod's kernel.
    let scene = Scene::of("macvtap", &[], "bridge", &policies());
    assert_policies_hold(&scene);
    scene.end();
}

/// Siblings of these modes do not reach each other on the node, but external hosts do.
#[test]
fn policies_hold_in_the_modes_without_siblings() {
    for mode in ["private", "vepa"] {
        let scene = Scene::new(mode, &policies());
        let _servers: Vec<Echo> = [SERVER, CLIENT, OTHER]
            .map(|host| Echo::serve(scene.namespace(host), at(host, 80)).unwrap())
            .into();
        let server = Echo::serve(&scene.outside, at(OUTSIDE, 80)).unwrap();
        assert!(connects(scene.namespace(OUTSIDE), at(SERVER, 80), PATIENCE), "{mode}");
        assert!(connects(scene.namespace(CLIENT), server.address(), PATIENCE), "{mode}");
        assert!(!datagram(scene.namespace(OUTSIDE), at(SERVER, 80), SILENCE).unwrap(), "{mode}");
        assert!(!connects(scene.namespace(OTHER), server.address(), SILENCE), "{mode}");
        assert!(!connects(scene.namespace(CLIENT), at(SERVER, 80), SILENCE), "{mode}: siblings");
        scene.end();
    }
}

/// Another plugin requests the address, with the pod's frames, on a parent that has programs already.
///
/// Rows: C84.
#[test]
fn a_pod_without_an_address_asks_for_a_lease_on_a_parent_that_others_share() {
    let silent =
        json!({"podSelector": {"matchLabels": {"app": "late"}}, "policyTypes": ["Ingress", "Egress"]});
    for (attach, isolated) in [("clsact", false), ("tcx", true)] {
        let leased = json!({
            "cniVersion": "1.0.0", "type": "macvlan", "master": WIRE,
            "ipam": {"type": "dhcp", "daemonSocketPath": "/run/cni/dhcp.sock"}
        });
        let mut manifests = vec![
            ("leased", network(NAMESPACE, "leased", &leased)),
            ("late", pod("late", &json!({"app": "late"}), &json!("leased"))),
        ];
        manifests.extend(isolated.then(|| ("silent", policy("silent", "leased", &silent))));
        let scene = Scene::with(&[("attach", attach)], "bridge", &manifests);
        let ips = json!([{"address": format!("10.52.0.{LATE}/24")}]);
        let add = json!({"discover": true, "result": {"cniVersion": "1.0.0", "ips": ips}});
        scene.node.plugin("dhcp", &json!({"ADD": add})).unwrap();
        let heard = RawSocket::open_for(&scene.outside, "wire1", libc::ETH_P_IP as u16).unwrap();
        let late = Pod::new("late").unwrap();
        scene.node.add(&late).success();
        let asked = Packet::between("0.0.0.0", "255.255.255.255").udp(68, 67).frame();
        let frames = heard.frames_until(&asked[14..], PATIENCE).unwrap();
        assert!(frames.last().is_some_and(|frame| frame.ends_with(&asked[14..])), "{attach}: {frames:?}");
        // It has its address now, and no other.
        let server = Echo::serve(&scene.outside, at(OUTSIDE, 80)).unwrap();
        let patience = if isolated { SILENCE } else { PATIENCE };
        assert_eq!(datagram(&late.namespace, server.address(), patience).unwrap(), !isolated, "{attach}");
        scene.node.check(&late).success();
        ip(&late.namespace, &["addr", "add", "10.52.0.99/24", "dev", "net1"]).unwrap();
        let other = "10.52.0.99".parse().unwrap();
        assert!(!datagram_from(&late.namespace, other, server.address(), SILENCE).unwrap(), "{attach}");
        scene.node.del(&late).success();
        scene.end();
    }
}

/// A broadcast from outside and one from a sibling: one frame on the parent, one copy for each pod.
#[test]
fn group_frames_are_under_the_receivers_policy() {
    let scene = Scene::new("bridge", &policies());
    for from in [CLIENT, OUTSIDE] {
        let device = if from == OUTSIDE { "wire1" } else { "net1" };
        let before = scene.stats("server")["dropped"]["ingress-port"].as_u64().unwrap_or(0);
        let mac = Snapshot::take(&scene.node, &scene.pods.each_ref()).unwrap().pods[&scene.pods[1].container]
            .links["net1"]
            .mac;
        let mut packet = Packet::between(&format!("10.52.0.{from}"), "10.52.0.255");
        if from == CLIENT {
            packet = packet.from_mac(mac.unwrap());
        }
        let mut frame = packet.udp(1000, 81).frame();
        frame[..6].fill(0xff);
        let [server, client] = [SERVER, CLIENT]
            .map(|host| RawSocket::open_for(scene.namespace(host), "net1", libc::ETH_P_IP as u16).unwrap());
        RawSocket::open(scene.namespace(from), device).unwrap().send(&frame).unwrap();
        let dropped = || scene.stats("server")["dropped"]["ingress-port"].as_u64().unwrap_or(0) > before;
        assert!(eventually(PATIENCE, dropped), "{from}: not dropped for the server");
        assert_eq!(server.frames().unwrap(), Vec::<Vec<u8>>::new());
        if from == OUTSIDE {
            assert_eq!(client.frames_until(&frame, PATIENCE).unwrap(), [frame]);
        }
    }
    scene.end();
}
