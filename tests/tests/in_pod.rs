//! Policies on interfaces that other plugins make: on the node where the link has an end there, else in the pod.
//!
//! `NETATTACH_REFERENCE_PLUGINS` names the directory of the Go plugins' executables.
#![expect(clippy::unwrap_used, reason = "a test reports by panicking")]

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use netattach::bpf::sys;
use netattach::mac::Mac;
use netattach_tests::foreign::tc;
use netattach_tests::manifest::{NAMESPACE, annotated, network, pod, policy};
use netattach_tests::node::{WIRE, ip};
use netattach_tests::packet::Packet;
use netattach_tests::raw::RawSocket;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::tools;
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, connects, eventually, ping};
use netattach_tests::wires::{BEYOND, Wires, install};
use netattach_tests::{Namespace, Node, Pod};
use serde_json::{Value, json};

/// Within this time the agent has looked at every attachment again.
const FOUND_BY_LOOKING: Duration = Duration::from_secs(30);
const SERVER: u8 = 2;
const CLIENT: u8 = 3;
/// How a pod says that it has no capabilities over its network.
const DROPS_ALL: &str = r#"{"capabilities": {"drop": ["ALL"]}}"#;

/// The reference plugins; `None`: the test is left out.
fn plugins(test: &str, needed: &[&str]) -> Option<PathBuf> {
    tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", needed)
}

/// Two pods, each with a device of the node moved into it, and whoever is beyond those wires.
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

    /// Exactly these get through, in both families; of [`WAYS`].
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
            // Addresses of IPv6 can be bound once nobody else turned out to have them.
            for address in at(host, 80).into_iter().chain(at(host, 81)) {
                let mut echo = None;
                let bound = || {
                    echo = Echo::serve(&pod.namespace, address).ok();
                    echo.is_some()
                };
                assert!(eventually(PATIENCE, bound), "{address}");
                served.extend(echo);
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

    /// The devices are back on the node, with nothing on them.
    fn nothing_is_left(&self) {
        assert_eq!(links(&self.node), BTreeMap::new());
        for device in ["server", "client"] {
            ip(&self.node.namespace, &["link", "del", device]).unwrap();
        }
        Snapshot::take(&self.node, &[&self.server, &self.client]).unwrap().assert_nothing_is_left();
    }
}

/// Who connects to what: by whom, host number, port.
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
            "ports": [{"protocol": "TCP", "port": 80}]
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
    // Nobody has selected anything: nothing runs, and how far it would hold is told.
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

    let nothing = json!({"podSelector": {"matchLabels": {"app": "client"}}, "policyTypes": ["Egress"]});
    scene.node.write("egress", &policy("egress", BOTH, &nothing)).unwrap();
    assert!(eventually(PATIENCE, || scene.links().len() == 4), "the client's programs begin");
    scene.assert_reach(&["server to client 80", "beyond to client 80"]);

    // What the programs check besides.
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

/// Rows: C91.
#[test]
fn programs_in_pods_go_on_without_an_agent_and_are_taken_over_by_the_next() {
    let test = "programs_in_pods_go_on_without_an_agent";
    let Some(mut scene) = Scene::new(test, &[], &[("policy", only_the_client())]) else { return };
    let served = scene.serve_behind_the_policy();
    let before = scene.links();
    assert_eq!(before.len(), 2);
    let holds = |scene: &Scene| {
        assert!(connects(&scene.client.namespace, at(SERVER, 80)[0], PATIENCE));
        assert!(!connects(&scene.wires.beyond, at(SERVER, 80)[0], SILENCE));
    };
    holds(&scene);
    scene.node.kill().unwrap();
    holds(&scene);
    // A policy that selects a pod while nobody looks.
    let nothing = json!({"podSelector": {"matchLabels": {"app": "client"}}, "policyTypes": ["Ingress"]});
    scene.node.write("later", &policy("later", BOTH, &nothing)).unwrap();
    scene.node.start().unwrap();
    holds(&scene);
    let after = scene.links();
    assert_eq!(after.len(), 4, "{after:?}");
    assert!(before.iter().all(|link| after.iter().any(|other| other == link)), "{before:?} {after:?}");
    assert!(!connects(&scene.wires.beyond, at(CLIENT, 80)[0], SILENCE));
    for pod in [&scene.server, &scene.client] {
        scene.node.check(pod).success();
    }
    drop(served);
    scene.end();
}

impl Scene {
    /// As [`Scene::serve`], where not everybody may be reached by everybody.
    fn serve_behind_the_policy(&self) -> Vec<Echo> {
        let pods = [(&self.server, SERVER), (&self.client, CLIENT)];
        let echo = |(pod, host): (&Pod, u8)| Echo::serve(&pod.namespace, at(host, 80)[0]).unwrap();
        pods.map(echo).into()
    }
}

/// Rows: DEL-07.
#[test]
fn a_pod_that_is_gone_leaves_no_link_and_no_pin() {
    let test = "a_pod_that_is_gone_leaves_no_link_and_no_pin";
    let Some(mut scene) = Scene::new(test, &[], &[("policy", only_the_client())]) else { return };
    assert_eq!(scene.links().len(), 2);
    // The kernel gives the node back what the namespace had of it.
    let gone = std::mem::replace(&mut scene.server.namespace, Namespace::new().unwrap());
    let del = scene.node.call("DEL", &scene.server).with("CNI_NETNS", &gone.path().to_string_lossy());
    drop(gone);
    del.run().success();
    assert_eq!(scene.links(), BTreeMap::new());
    scene.node.del(&scene.client).success();
    assert_eq!(scene.links(), BTreeMap::new());
    let _ = ip(&scene.node.namespace, &["link", "del", "client"]);
    drop(scene.wires);
    let snapshot = Snapshot::take(&scene.node, &[&scene.client]).unwrap();
    assert_eq!((snapshot.files, snapshot.dataplane), (BTreeMap::new(), Default::default()));
}

/// Rows: D9.
#[test]
fn where_programs_run_follows_from_the_link_and_the_level_from_there() {
    let test = "where_programs_run_follows_from_the_link";
    let needed = ["ptp", "bridge", "macvlan", "host-local"];
    let Some(from) = plugins(test, &needed) else { return };
    let mut node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    install(&node, &from, &needed).unwrap();
    node.set("delegation", json!({"exec": ["bridge", "macvlan", "host-local"]}));
    let own = |number: u8| node.host_local(&[&format!("10.7{number}.0.0/24")]);
    let networks = [
        ("ptp", json!({"type": "ptp", "ipam": own(1)}), "full", ""),
        ("bridge", json!({"type": "bridge", "bridge": "br7", "isGateway": true, "ipam": own(2)}), "full", ""),
        (
            "macvlan",
            json!({"type": "macvlan", "master": WIRE, "ipam": own(3)}),
            "full-unless-privileged",
            "programs run in the pod, and its container main has CAP_NET_RAW",
        ),
    ];
    let all = networks.each_ref().map(|(name, ..)| format!("shop/{name}")).join(", ");
    for (name, config, ..) in &networks {
        let mut config = config.clone();
        config["cniVersion"] = json!("1.0.0");
        node.write(name, &network(NAMESPACE, name, &config)).unwrap();
        node.write(&format!("pod-{name}"), &pod(name, &json!({}), &json!(name))).unwrap();
    }
    let nobody = policy("nobody", &all, &json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}));
    node.write("nobody", &nobody).unwrap();
    node.start().unwrap();
    let pods = networks.each_ref().map(|(name, ..)| Pod::new(name).unwrap());
    for (pod, (name, _, level, why)) in pods.iter().zip(&networks) {
        node.add(pod).success();
        node.check(pod).success();
        let row = row(&node, name);
        let told = (&row["enforcement"], row["enforcement_detail"].as_str().unwrap_or_default());
        assert_eq!(told, (&json!(level), *why), "{name}");
        assert_eq!(row["host_interface"].is_string(), *level == "full", "{name}: {row:#}");
        assert_eq!(row.get("programs_wait"), None, "{name}");
        let id = row["id"].as_u64().unwrap();
        let in_pod = links(&node).keys().filter(|pin| pin.starts_with(&format!("pod{id}_"))).count();
        assert_eq!(in_pod, if *level == "full" { 0 } else { 2 }, "{name}");
    }
    // What leaves by a gateway of the node is stopped on the node's end.
    for (pod, gateway) in [(&pods[0], "10.71.0.1"), (&pods[1], "10.72.0.1")] {
        let gateway: IpAddr = gateway.parse().unwrap();
        assert!(!ping(&pod.namespace, gateway, SILENCE).unwrap(), "{gateway}");
        let dropped = || {
            let stats = node.ctl(&["stats", "--pod", &format!("shop/{}", pod.name)]).unwrap();
            stats.as_array().unwrap().iter().any(|row| row["dropped"]["egress-peer"].as_u64() > Some(0))
        };
        assert!(eventually(PATIENCE, dropped), "{}", pod.name);
    }
    node.remove("nobody").unwrap();
    for (pod, gateway) in [(&pods[0], "10.71.0.1"), (&pods[1], "10.72.0.1")] {
        let gateway: IpAddr = gateway.parse().unwrap();
        assert!(eventually(PATIENCE, || ping(&pod.namespace, gateway, SILENCE).unwrap()), "{gateway}");
    }
    for pod in &pods {
        node.del(pod).success();
    }
    assert_eq!(links(&node), BTreeMap::new());
    Snapshot::take(&node, &pods.each_ref()).unwrap().assert_nothing_is_left();
}

/// Rows: D9.
#[test]
fn where_policies_do_not_hold_as_asked_an_add_fails_and_a_later_policy_is_reported() {
    let node = || {
        let mut node = Node::new(&[]).unwrap();
        node.set("unenforceable", json!("refuse"));
        // One that makes an interface, and one that leaves the pod a device to drive itself.
        node.plugin("card", &json!({"link": "veth"})).unwrap();
        let info = json!({"type": "memif", "version": "1.1.0", "memif": {"role": "slave", "path": "/x", "mode": "ip"}});
        node.plugin("user", &json!({"deviceInfo": info})).unwrap();
        let capabilities = json!({"CNIDeviceInfoFile": true});
        let user = json!({"cniVersion": "1.0.0", "type": "user", "capabilities": capabilities});
        let user = network(NAMESPACE, "user", &user);
        let card = network(NAMESPACE, "card", &json!({"cniVersion": "1.0.0", "type": "card"}));
        let strict = annotated(card.clone(), "netattach.dev/unenforceable", "refuse-unless-full");
        let mut strict = annotated(strict, "netattach.dev/enforce", "always");
        strict["metadata"]["name"] = json!("strict");
        let mut alone = annotated(card.clone(), "netattach.dev/enforce", "never");
        alone["metadata"]["name"] = json!("alone");
        let mut wrong = annotated(card.clone(), "netattach.dev/enforce", "perhaps");
        wrong["metadata"]["name"] = json!("wrong");
        for (name, network) in
            [("user", user), ("card", card), ("strict", strict), ("alone", alone), ("wrong", wrong)]
        {
            node.write(name, &with_annotations(network)).unwrap();
            let pod = pod(name, &json!({}), &json!(name));
            node.write(&format!("pod-{name}"), &pod).unwrap();
        }
        let bare = pod("bare", &json!({}), &json!("strict"));
        node.write("pod-bare", &with_security_context(bare, DROPS_ALL)).unwrap();
        node
    };
    let all =
        policy("all", "user, card, strict, alone", &json!({"podSelector": {}, "policyTypes": ["Ingress"]}));
    let [user, card, strict, alone, wrong, bare] =
        ["user", "card", "strict", "alone", "wrong", "bare"].map(|name| Pod::new(name).unwrap());

    let mut first = node();
    first.write("all", &all).unwrap();
    first.start().unwrap();
    let refused = |pod: &Pod, network: &str, enforcement: &str, demand: &str| {
        let message = format!(
            "enforcement there is {enforcement}, unenforceable is {demand}, and the pod is \
             selected by shop/all"
        );
        let (code, told) = first.add(pod).failure();
        assert_eq!(code, 7);
        let step = if network == "alone" { "" } else { " load policy and counters:" };
        assert_eq!(told, format!("attach net1 (shop/{network}):{step} {message}"));
    };
    let by_agent = "refuse by the agent's settings";
    refused(&user, "user", "none (the pod drives the device (memif) itself, past the kernel)", by_agent);
    refused(
        &alone,
        "alone",
        "none (enforce is never, by the network's definition or the agent's settings)",
        by_agent,
    );
    refused(
        &strict,
        "strict",
        "full-unless-privileged (programs run in the pod, and its container main has CAP_NET_RAW)",
        "refuse-unless-full by annotation netattach.dev/unenforceable of the network",
    );
    let (code, told) = first.add(&wrong).failure();
    assert_eq!(code, 7);
    assert_eq!(
        told,
        "network shop/wrong: annotation netattach.dev/enforce is \"perhaps\", not selected, always or never"
    );
    for pod in [&card, &bare] {
        first.add(pod).success();
        first.del(pod).success();
    }
    let pods = [&user, &card, &strict, &alone, &bare];
    Snapshot::take(&first, &pods).unwrap().assert_nothing_is_left();

    let mut second = node();
    second.start().unwrap();
    for pod in pods {
        second.add(pod).success();
    }
    let waits: Vec<bool> = pods.map(|pod| row(&second, &pod.name)["programs_wait"] == true).into();
    assert_eq!(waits, [false, true, false, false, false]);
    assert_eq!(links(&second).len(), 4, "those of strict run from the ADD on");
    second.write("all", &all).unwrap();
    let conditions = || second.ctl(&["policy"]).unwrap()["conditions"].clone();
    assert!(eventually(PATIENCE, || conditions().as_array().unwrap().len() == 3), "{:#}", conditions());
    let problems: Vec<String> = conditions()
        .as_array()
        .unwrap()
        .iter()
        .map(|row| format!("{}: {}", row["object"].as_str().unwrap(), row["problem"].as_str().unwrap()))
        .collect();
    let of = |pod: &str, what: &str| {
        format!("multi-networkpolicy shop/all: selects net1 of shop/{pod} on shop/{pod}, where {what}")
    };
    let nothing = |why: &str| format!("nothing is enforced ({why}): it has no effect there");
    assert_eq!(
        problems,
        [
            of("alone", &nothing("enforce is never, by the network's definition or the agent's settings")),
            of(
                "strict",
                "enforcement is full-unless-privileged (programs run in the pod, and its container main has CAP_NET_RAW)"
            ),
            of("user", &nothing("the pod drives the device (memif) itself, past the kernel")),
        ]
    );
    for pod in pods {
        second.del(pod).success();
    }
    assert_eq!(links(&second), BTreeMap::new());
    Snapshot::take(&second, &pods).unwrap().assert_nothing_is_left();
}

/// An object that has a place for annotations.
fn with_annotations(mut object: Value) -> Value {
    if object["metadata"]["annotations"].is_null() {
        object["metadata"]["annotations"] = json!({});
    }
    object
}

/// Rows: D16.
#[test]
fn filters_in_the_pod_are_advisory_and_put_back_when_the_pod_takes_them_off() {
    let test = "filters_in_the_pod_are_advisory";
    let settings = [("attach", json!("clsact"))];
    let Some(mut scene) = Scene::new(test, &settings, &[("policy", only_the_client())]) else { return };
    let served = scene.serve_behind_the_policy();
    let row = scene.row("server");
    let why =
        "programs are filters in the pod, where one with CAP_NET_ADMIN takes them off; links need Linux 6.6";
    assert_eq!((&row["enforcement"], &row["enforcement_detail"]), (&json!("advisory"), &json!(why)));
    assert_eq!(scene.links(), BTreeMap::new());
    let conditions = scene.node.ctl(&["policy"]).unwrap()["conditions"].clone();
    let problem =
        format!("selects net1 of shop/server on shop/wire-server, where enforcement is advisory ({why})");
    assert_eq!(conditions, json!([{"object": "multi-networkpolicy shop/server", "problem": problem}]));
    let holds = |scene: &Scene| {
        connects(&scene.client.namespace, at(SERVER, 80)[0], PATIENCE)
            && !connects(&scene.wires.beyond, at(SERVER, 80)[0], SILENCE)
    };
    assert!(holds(&scene));
    tc(&scene.server.namespace, "qdisc del dev net1 clsact").unwrap();
    // The agent looks now and then: nothing in a pod's namespace tells it.
    assert!(eventually(FOUND_BY_LOOKING, || scene.node.check(&scene.server).exit == 0), "put back");
    assert!(holds(&scene));

    // With links the same pods are held to their policies by those, and the filters are gone.
    scene.node.kill().unwrap();
    scene.node.set("attach", json!("tcx"));
    scene.node.start().unwrap();
    assert_eq!(scene.links().len(), 2);
    let programs = Snapshot::take(&scene.node, &[&scene.server]).unwrap();
    let programs = &programs.pods[&scene.server.container].links["net1"].programs;
    assert_eq!(programs.len(), 0, "{programs:?}");
    assert!(holds(&scene));
    drop(served);
    scene.end();
}
