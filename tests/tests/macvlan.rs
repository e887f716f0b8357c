//! Policies, counters and programs of macvlan attachments on a parent that they share.
#![expect(clippy::unwrap_used, reason = "a test reports by panicking")]

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use netattach::netlink::Hook;
use netattach_tests::manifest::{NAMESPACE, network, pod, policy};
use netattach_tests::node::{DEFAULT_NETWORK, WIRE, ip};
use netattach_tests::packet::Packet;
use netattach_tests::raw::RawSocket;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, connects, datagram, eventually};
use netattach_tests::{Namespace, Node, Pod};
use serde_json::{Value, json};

/// Host numbers on the network 10.52.0.0/24, in the order of the ADDs; [`OUTSIDE`] is beyond the parent.
const SERVER: u8 = 2;
const CLIENT: u8 = 3;
const OTHER: u8 = 4;
const OUTSIDE: u8 = 9;

struct Scene {
    node: Node,
    pods: [Pod; 3],
    /// The far end of the parent's wire.
    outside: Namespace,
}

impl Scene {
    fn new(mode: &str, policies: &[(&str, Value)]) -> Self {
        let mut node = Node::new(&[]).unwrap();
        node.add_wire().unwrap();
        let lan = json!({
            "cniVersion": "1.0.0", "type": "macvlan", "master": WIRE, "mode": mode,
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

    fn programs(&self) -> BTreeSet<(Hook, String)> {
        Snapshot::take(&self.node, &[]).unwrap().node.links[WIRE].programs.clone()
    }

    fn end(self) {
        let pods = self.pods.each_ref();
        for pod in pods {
            self.node.del(pod).success();
        }
        Snapshot::take(&self.node, &pods).unwrap().assert_nothing_is_left();
        let disciplines =
            self.node.namespace.run(|| Command::new("tc").args(["qdisc", "show", "dev", WIRE]).output());
        let disciplines = String::from_utf8(disciplines.unwrap().stdout).unwrap();
        assert!(!disciplines.contains("clsact"), "{disciplines}");
    }
}

fn at(host: u8, port: u16) -> SocketAddr {
    format!("10.52.0.{host}:{port}").parse().unwrap()
}

/// The server takes the client's connections to port 80 only; the other may send nothing but that to the server.
fn policies() -> [(&'static str, Value); 2] {
    let ingress = json!({
        "podSelector": {"matchLabels": {"app": "server"}},
        "policyTypes": ["Ingress"],
        "ingress": [{
            "from": [
                {"podSelector": {"matchLabels": {"app": "client"}}},
                {"ipBlock": {"cidr": format!("10.52.0.{OUTSIDE}/32")}}
            ],
            "ports": [{"protocol": "TCP", "port": 80}]
        }]
    });
    let egress = json!({
        "podSelector": {"matchLabels": {"app": "other"}},
        "policyTypes": ["Egress"],
        "egress": [{"to": [{"podSelector": {"matchLabels": {"app": "client"}}}]}]
    });
    [("policy-server", policy("server", "lan", &ingress)), ("policy-other", policy("other", "lan", &egress))]
}

/// Every pair over TCP and UDP, against what the policies say.
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
                    let taken = to != SERVER || (tcp && port == 80 && (from == CLIENT || from == OUTSIDE));
                    let sent = from != OTHER || to == CLIENT;
                    let expected = taken && sent;
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

/// How far policies hold for a pod with `CAP_NET_RAW`: by it other pods' addresses can be used where the kernel does not say
/// whose a frame is.
fn level() -> &'static str {
    if netattach::bpf::probe::has_netns_cookie() { "full" } else { "full-unless-privileged" }
}

/// Rows: C17.
#[test]
fn policies_hold_between_pods_of_one_parent_and_with_the_world() {
    let scene = Scene::new("bridge", &policies());
    assert_policies_hold(&scene);
    let rows = scene.node.ctl(&["attachments"]).unwrap();
    let lan = rows.as_array().unwrap().iter().filter(|row| row["network"] == "shop/lan");
    let levels: Vec<&Value> = lan.map(|row| &row["enforcement"]).collect();
    assert_eq!(levels, [level(); 3]);
    let reasons =
        |pod: &str| scene.stats(pod)["dropped"].as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    // What the other's egress policy does not let out never comes to the server.
    assert_eq!(reasons("server"), ["ingress-port"]);
    assert_eq!(reasons("client"), Vec::<String>::new());
    assert_eq!(reasons("other"), ["egress-peer"]);
    for pod in ["server", "client", "other"] {
        let stats = scene.stats(pod);
        let packets = |way: &str| stats[way]["packets"].as_u64().unwrap();
        assert!(packets("sent") > 10 && packets("received") > 10, "{stats}");
    }
    let explained = scene.node.ctl(&["explain", "shop/other", "shop/server", "80"]).unwrap();
    assert!(explained.to_string().contains("shop/lan"), "{explained:#}");
    scene.end();
}

/// Siblings of these modes do not reach each other on the node; the world does.
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

#[test]
fn the_programs_come_with_the_first_and_go_with_the_last_whoever_dies_meanwhile() {
    let mut scene = Scene::new("bridge", &policies());
    let expected: BTreeSet<(Hook, String)> = [
        (Hook::Ingress, "na_par_from".to_owned()),
        (Hook::Ingress, "na_par_to".to_owned()),
        (Hook::Egress, "na_par_from".to_owned()),
    ]
    .into();
    assert_eq!(scene.programs(), expected);
    scene.node.kill().unwrap();
    assert!(!connects(scene.namespace(OTHER), at(SERVER, 80), SILENCE));
    // Another agent on the node has a filter there, and somebody takes ours away.
    scene.node.namespace.run(|| {
        let run =
            |words: &str| assert!(Command::new("tc").args(words.split(' ')).status().unwrap().success());
        run(&format!("qdisc del dev {WIRE} clsact"));
        run(&format!("qdisc add dev {WIRE} clsact"));
    });
    scene.node.start().unwrap();
    assert_eq!(scene.programs(), expected);
    for pod in &scene.pods {
        scene.node.check(pod).success();
    }
    assert_policies_hold(&scene);
    scene.node.kill().unwrap();
    scene.node.start().unwrap();
    scene.node.del(&scene.pods[0]).success();
    scene.node.del(&scene.pods[1]).success();
    assert_eq!(scene.programs(), expected);
    scene.end();
}

/// Others' filters on a parent stay, and so does the queueing discipline that holds them.
#[test]
fn filters_of_others_on_the_parent_stay() {
    let mut node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    let lan = json!({"cniVersion": "1.0.0", "type": "macvlan", "master": WIRE, "ipam": node.host_local(&["10.52.0.0/24"])});
    node.write("lan", &network(NAMESPACE, "lan", &lan)).unwrap();
    node.write("server", &pod("server", &json!({"app": "server"}), &json!("lan"))).unwrap();
    let deny = json!({"podSelector": {}, "policyTypes": ["Ingress"]});
    node.write("policy", &policy("deny", &format!("{DEFAULT_NETWORK}, {NAMESPACE}/lan"), &deny)).unwrap();
    node.start().unwrap();
    let tc = |words: &str| {
        let output = node.namespace.run(|| Command::new("tc").args(words.split(' ')).output().unwrap());
        assert!(output.status.success(), "tc {words}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    tc(&format!("qdisc add dev {WIRE} clsact"));
    let pass = ["bpf", "bytecode", "1,6 0 0 4294967295", "flowid", "1:1"];
    let added = node.namespace.run(|| {
        let place = ["filter", "add", "dev", WIRE, "ingress", "prio", "1", "handle", "1"];
        Command::new("tc").args(place).args(pass).status().unwrap()
    });
    assert!(added.success());
    let before = tc(&format!("filter show dev {WIRE} ingress"));
    let server = Pod::new("server").unwrap();
    node.add(&server).success();
    let during = tc(&format!("filter show dev {WIRE} ingress"));
    assert!(during.contains("na_par_from") && during.contains("na_par_to"), "{during}");
    node.del(&server).success();
    assert_eq!(tc(&format!("filter show dev {WIRE} ingress")), before);
    assert!(tc(&format!("qdisc show dev {WIRE}")).contains("clsact"));
}
