//! Policies on interfaces made by other plugins, and on devices of the node in pods: enforced on the node if the link
//! has an end there, else in the pod.
//!
//! `begin` tests how programs are attached in the pod, `devices` devices that the agent itself takes, `levels` the
//! enforcement levels, `lifecycle` restarts and upgrades, `sriov` VFs of a card, `representor` their ends on the
//! node.
//!
//! `NETATTACH_REFERENCE_PLUGINS` names the directory of the Go plugins' executables.

mod begin;
mod devices;
mod levels;
mod lifecycle;
mod representor;
mod sriov;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use netattach::bpf::sys;
use netattach::mac::Mac;
use netattach_common::LAYOUT_VERSION;
use netattach_tests::manifest::{NAMESPACE, annotated, network, pod, policy};
use netattach_tests::node::{WIRE, ip};
use netattach_tests::other_programs::tc;
use netattach_tests::packet::Packet;
use netattach_tests::raw::RawSocket;
use netattach_tests::snapshot::{Network, Snapshot};
use netattach_tests::tools;
use netattach_tests::traffic::{Conversation, Echo, PATIENCE, SILENCE, connects, eventually, ping};
use netattach_tests::wires::{BEYOND, Wires, install};
use netattach_tests::{Namespace, Node, Pod};
use serde_json::{Value, json};

/// How long the agent may take to check an attachment without a notification: each check covers a sixth of them, and
/// checks are at most half a minute apart.
const FOUND_BY_LOOKING: Duration = Duration::from_secs(200);
const SERVER: u8 = 2;
const CLIENT: u8 = 3;
/// A container that has no capabilities over its network.
const DROPS_ALL: &str = r#"{"capabilities": {"drop": ["ALL"]}}"#;

/// The reference plugins; `None`: the test is skipped.
fn plugins(test: &str, needed: &[&str]) -> Option<PathBuf> {
    tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", needed)
}

/// Two pods, each with a device of the node moved into it, and the hosts beyond those wires.
struct Scene {
    node: Node,
    wires: Wires,
    server: Pod,
    client: Pod,
}

const BOTH: &str = "shop/wire-server, shop/wire-client";

impl Scene {
    fn new(test: &str, settings: &[(&str, Value)], policies: &[(&str, Value)]) -> Option<Self> {
        let names = ["host-device", "static"];
        let from = plugins(test, &names)?;
        let mut node = Node::new(&[]).unwrap();
        install(&node, &from, &names).unwrap();
        node.set("delegation", json!({"exec": ["host-device"]}));
        for (key, value) in settings {
            node.set(key, value.clone());
        }
        let wires = Wires::new(&node, &["server", "client"]).unwrap();
        for (name, host) in [("server", SERVER), ("client", CLIENT)] {
            let wire = format!("wire-{name}");
            node.write(&wire, &network(NAMESPACE, &wire, &Wires::config(name, host))).unwrap();
            node.write(name, &pod(name, &json!({"app": name}), &json!(wire))).unwrap();
        }
        for (name, policy) in policies {
            node.write(name, policy).unwrap();
        }
        node.start().unwrap();
        let [server, client] = ["server", "client"].map(|name| {
            let pod = Pod::new(name).unwrap();
            node.add(&pod).success();
            pod
        });
        Some(Self { node, wires, server, client })
    }

    fn row(&self, pod: &str) -> Value {
        row(&self.node, pod)
    }

    fn dropped(&self, pod: &str) -> Value {
        let stats = self.node.ctl(&["stats", "--pod", &format!("{NAMESPACE}/{pod}")]).unwrap();
        let of = |row: &&Value| row["ifname"] == "net1";
        stats.as_array().unwrap().iter().find(of).unwrap()["dropped"].clone()
    }

    /// Exactly these of [`WAYS`] get through, in both families.
    fn assert_reach(&self, expected: &[&str]) {
        let mut surprises = Vec::new();
        for (way, from, host, port) in WAYS {
            let from = match from {
                "server" => &self.server.namespace,
                "client" => &self.client.namespace,
                _ => &self.wires.beyond,
            };
            let wanted = expected.contains(&way);
            let patience = if wanted { PATIENCE } else { SILENCE };
            let surprising = |to: &SocketAddr| connects(from, *to, patience) != wanted;
            surprises.extend(at(host, port).into_iter().filter(surprising).map(|to| format!("{way} ({to})")));
        }
        assert_eq!(surprises, Vec::<String>::new());
    }

    fn serve(&self) -> Vec<Echo> {
        let mut served = Vec::new();
        for (pod, host) in [(&self.server, SERVER), (&self.client, CLIENT)] {
            for address in at(host, 80).into_iter().chain(at(host, 81)) {
                served.push(Echo::serve_soon(&pod.namespace, address).unwrap());
            }
        }
        for from in [&self.server.namespace, &self.client.namespace] {
            for beyond in BEYOND {
                assert!(ping(from, beyond.parse().unwrap(), PATIENCE).unwrap(), "{beyond}");
            }
        }
        served
    }

    /// Kernel ids of the links of a pod's device, by their pins.
    fn links(&self) -> BTreeMap<String, u32> {
        links(&self.node)
    }

    fn end(self) {
        for pod in [&self.server, &self.client] {
            self.node.del(pod).success();
        }
        self.nothing_is_left();
    }

    /// Checks that the devices are back on the node, without programs.
    fn nothing_is_left(&self) {
        assert_eq!(links(&self.node), BTreeMap::new());
        for device in ["server", "client"] {
            ip(&self.node.namespace, &["link", "del", device]).unwrap();
        }
        Snapshot::take(&self.node, &[&self.server, &self.client]).unwrap().assert_nothing_is_left();
    }
}

/// Connection attempts: the client, host number, port.
const WAYS: [(&str, &str, u8, u16); 5] = [
    ("client to server 80", "client", SERVER, 80),
    ("client to server 81", "client", SERVER, 81),
    ("beyond to server 80", "beyond", SERVER, 80),
    ("server to client 80", "server", CLIENT, 80),
    ("beyond to client 80", "beyond", CLIENT, 80),
];

/// The one additional attachment of a pod.
fn row(node: &Node, pod: &str) -> Value {
    let rows = node.ctl(&["attachments"]).unwrap();
    let mut rows = rows.as_array().unwrap().iter();
    rows.find(|row| row["pod"]["name"] == pod && row["ifname"] == "net1").unwrap().clone()
}

fn links(node: &Node) -> BTreeMap<String, u32> {
    let Ok(entries) = std::fs::read_dir(node.bpffs().join("link")) else { return BTreeMap::new() };
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let in_pods = names.filter(|name| name.starts_with("pod"));
    let id = |name: &String| {
        let link = sys::open_pin(&node.bpffs().join("link").join(name)).unwrap();
        sys::link_info(link.as_fd()).unwrap().id
    };
    in_pods.map(|name| (name.clone(), id(&name))).collect()
}

fn at(host: u8, port: u16) -> [SocketAddr; 2] {
    [format!("10.60.0.{host}"), format!("fd00:60::{host}")]
        .map(|address| SocketAddr::new(address.parse().unwrap(), port))
}

fn only_the_client() -> Value {
    let spec = json!({
        "podSelector": {"matchLabels": {"app": "server"}},
        "policyTypes": ["Ingress"],
        "ingress": [{
            "from": [{"podSelector": {"matchLabels": {"app": "client"}}}],
            "ports": [{"protocol": "TCP", "port": 80}, {"protocol": "UDP", "port": 80}]
        }]
    });
    policy("server", BOTH, &spec)
}

fn with_security_context(mut pod: Value, context: &str) -> Value {
    pod["spec"]["containers"][0]["securityContext"] = serde_json::from_str(context).unwrap();
    pod
}

/// Rows: C17, C20, C21.
#[test]
fn policies_hold_both_ways_on_a_device_that_was_moved_into_the_pod() {
    let Some(scene) = Scene::new("policies_hold_both_ways", &[], &[]) else { return };
    let served = scene.serve();
    scene.assert_reach(&WAYS.map(|(way, ..)| way));
    // No policy selects the pods: no programs run, and the enforcement level is reported.
    assert_eq!(scene.links(), BTreeMap::new());
    for pod in ["server", "client"] {
        let row = scene.row(pod);
        let keys = ["kind", "enforcement", "enforcement_detail", "programs_wait", "host_interface"];
        let told = keys.map(|key| row[key].clone());
        let why = "programs run in the pod, and its container main has CAP_NET_RAW";
        let expected = [
            json!("exec:host-device"),
            json!("full-unless-privileged"),
            json!(why),
            json!(true),
            Value::Null,
        ];
        assert_eq!(told, expected, "{pod}");
    }

    scene.node.write("policy", &only_the_client()).unwrap();
    assert!(eventually(PATIENCE, || scene.links().len() == 2), "the server's programs begin");
    scene.assert_reach(&["client to server 80", "server to client 80", "beyond to client 80"]);
    let dropped = scene.dropped("server");
    assert_eq!(dropped.as_object().unwrap().keys().collect::<Vec<_>>(), ["ingress-peer", "ingress-port"]);
    scene.node.check(&scene.server).success();
    let explained = scene.node.ctl(&["explain", BEYOND[0], "shop/server", "80"]).unwrap();
    let mut explained = explained.as_array().unwrap().iter();
    let explained = explained.find(|path| path["to"]["address"] == format!("10.60.0.{SERVER}")).unwrap();
    assert_eq!(explained["ingress"]["verdict"], "denied");
    let limit = json!({
        "of": {"pod": {"namespace": NAMESPACE, "name": "server"}, "address": format!("10.60.0.{SERVER}")},
        "enforcement": "full-unless-privileged",
        "why": "programs run in the pod, and its container main has CAP_NET_RAW"
    });
    assert_eq!(explained["limits"], json!([limit]));

    let nothing = json!({"podSelector": {"matchLabels": {"app": "client"}}, "policyTypes": ["Egress"]});
    scene.node.write("egress", &policy("egress", BOTH, &nothing)).unwrap();
    assert!(eventually(PATIENCE, || scene.links().len() == 4), "the client's programs begin");
    scene.assert_reach(&["server to client 80", "beyond to client 80"]);

    // The programs' other checks.
    let own: Mac = scene.row("server")["mac"].as_str().unwrap().parse().unwrap();
    let to_beyond = |packet: Packet| packet.udp(1, 7).frame();
    for (source, mac, reason) in [
        ("10.60.0.2", Mac([2, 0, 0, 0, 0x66, 0x66]), "source-mac"),
        ("10.60.0.77", own, "source-ipv4"),
        ("fd00:60::77", own, "source-ipv6"),
    ] {
        let beyond = BEYOND[usize::from(source.contains(':'))];
        let frame = to_beyond(Packet::between(source, beyond).from_mac(mac));
        RawSocket::queued(&scene.server.namespace, "net1").unwrap().send(&frame).unwrap();
        let counted = || scene.dropped("server")[reason].as_u64().unwrap_or(0) > 0;
        assert!(eventually(PATIENCE, counted), "{reason}");
    }
    drop(served);
    scene.end();
}

impl Scene {
    fn assert_reach_by_v4(&self, way: &str, wanted: bool) {
        let (_, from, host, port) = WAYS.into_iter().find(|(name, ..)| *name == way).unwrap();
        let from = if from == "client" { &self.client.namespace } else { &self.wires.beyond };
        let patience = if wanted { PATIENCE } else { SILENCE };
        assert_eq!(connects(from, at(host, port)[0], patience), wanted, "{way}");
    }

    /// [`Scene::serve`], for policies that do not let all pods reach each other.
    fn serve_behind_the_policy(&self) -> Vec<Echo> {
        let pods = [(&self.server, SERVER), (&self.client, CLIENT)];
        let echo = |(pod, host): (&Pod, u8)| Echo::serve(&pod.namespace, at(host, 80)[0]).unwrap();
        pods.map(echo).into()
    }
}
