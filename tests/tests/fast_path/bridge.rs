//! The fast path between pods of one bridge: that traffic takes it, and the conditions that prevent it.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use netattach_tests::manifest::{NAMESPACE, annotated, network, pod};
use netattach_tests::snapshot::{Snapshot, has_resting_numbers};
use netattach_tests::traffic::{
    Echo, Ending, PATIENCE, SILENCE, assert_transfers_whole, datagram, eventually,
};
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};

/// The agent's polling delay, for changes without notification.
const NOTICED: Duration = Duration::from_secs(60);
/// Number of datagrams exchanged to see which path they take.
const EXCHANGES: u64 = 5;

/// Two attached pods on one bridge, the second with a server.
struct Scene {
    node: Node,
    client: Pod,
    server: Pod,
    /// The server's addresses, one per family.
    addresses: [SocketAddr; 2],
    /// Names of the node's ends.
    ports: [String; 2],
    _echoes: Vec<Echo>,
}

impl Scene {
    fn new(settings: &[(&str, Value)]) -> Self {
        Self::with(settings, |config| config)
    }

    /// With a modified default network.
    fn with(settings: &[(&str, Value)], change: impl FnOnce(Value) -> Value) -> Self {
        let manifests = ["client", "server"].map(|name| pod(name, &json!({}), &Value::Null));
        let mut node = Node::new(&manifests).unwrap();
        for (key, value) in settings {
            node.set(key, value.clone());
        }
        node.write("default", &network("kube-system", "default", &change(node.default_config()))).unwrap();
        node.start().unwrap();
        let [client, server] = ["client", "server"].map(|name| Pod::new(name).unwrap());
        node.add(&client).success();
        let result = node.add(&server).success();
        let address = |index: usize| -> SocketAddr {
            let text = result["ips"][index]["address"].as_str().unwrap();
            (text.split('/').next().unwrap().parse::<std::net::IpAddr>().unwrap(), 7).into()
        };
        let addresses = [address(0), address(1)];
        let echoes = addresses.iter().map(|address| Echo::serve(&server.namespace, *address).unwrap());
        let echoes = echoes.collect();
        let ports =
            ["client", "server"].map(|name| row(&node, "attachments", name)["host_interface"].clone());
        let ports = ports.map(|port| port.as_str().unwrap().to_owned());
        Self { node, client, server, addresses, ports, _echoes: echoes }
    }

    fn standing(&self, pod: &str) -> String {
        row(&self.node, "attachments", pod)["fast_path"]["state"].as_str().unwrap().to_owned()
    }

    fn await_standing(&self, pod: &str, wanted: &str) {
        let mut last = String::new();
        let stands = || {
            last = self.standing(pod);
            last == wanted
        };
        assert!(eventually(NOTICED, stands), "{pod} is {last}, not {wanted}");
    }

    fn await_on(&self) {
        self.await_standing("client", "on");
        self.await_standing("server", "on");
    }

    /// Packets that the pods received by the fast path.
    fn fast(&self) -> [u64; 2] {
        ["client", "server"].map(|pod| row(&self.node, "stats", pod)["fast"]["packets"].as_u64().unwrap())
    }

    /// Exchanges datagrams; returns how many client and server received by the fast path.
    fn exchange(&self, family: usize) -> [u64; 2] {
        let before = self.fast();
        for _ in 0..EXCHANGES {
            assert!(datagram(&self.client.namespace, self.addresses[family], PATIENCE).unwrap());
        }
        let after = self.fast();
        [0, 1].map(|pod| after[pod] - before[pod])
    }

    /// A large transfer arrives intact, by the fast path.
    fn assert_transfers_whole(&self) {
        let before = self.fast();
        assert_transfers_whole(&self.client.namespace, self.addresses[0]);
        let after = self.fast();
        assert!(after[0] > before[0] && after[1] > before[1], "{before:?} {after:?}");
        assert_eq!(row(&self.node, "stats", "client")["dropped"], json!({}));
    }

    fn left_to_stack(&self, pod: &str, reason: &str) -> u64 {
        let left = &row(&self.node, "stats", pod)["left_to_stack"];
        left.get(reason).map_or(0, |packets| packets.as_u64().unwrap())
    }

    fn on_node(&self, program: &str, words: &str) {
        let run = || Command::new(program).args(words.split(' ')).output();
        let output = self.node.namespace.run(run).unwrap();
        assert!(output.status.success(), "{program} {words}: {}", String::from_utf8_lossy(&output.stderr));
    }

    fn end(self) {
        for pod in [&self.client, &self.server] {
            self.node.del(pod).success();
        }
        Snapshot::take(&self.node, &[&self.client, &self.server]).unwrap().assert_nothing_is_left();
    }
}

/// A pod's row in the output of `netattachctl`.
fn row(node: &Node, what: &str, pod: &str) -> Value {
    let rows = node.ctl(&[what, "--pod", &format!("{NAMESPACE}/{pod}")]).unwrap();
    assert_eq!(rows.as_array().unwrap().len(), 1, "{rows:#}");
    rows[0].clone()
}

const ALL_FAST: [u64; 2] = [EXCHANGES; 2];
const NONE_FAST: [u64; 2] = [0; 2];

#[test]
fn traffic_of_both_families_takes_the_fast_path_and_arrives_whole() {
    let scene = Scene::new(&[]);
    scene.await_on();
    for family in [0, 1] {
        // The first packets ask for addresses.
        assert!(datagram(&scene.client.namespace, scene.addresses[family], PATIENCE).unwrap());
        assert_eq!(scene.exchange(family), ALL_FAST);
    }
    scene.assert_transfers_whole();
    // The bridge keeps its entries of them permanently, although it sees none of these frames.
    let entries = scene.node.namespace.run(|| Command::new("bridge").args(["fdb", "show"]).output()).unwrap();
    let entries = String::from_utf8(entries.stdout).unwrap();
    for port in &scene.ports {
        let kept = entries.lines().any(|line| line.contains(port.as_str()) && line.contains("extern_learn"));
        assert!(kept, "{entries}");
    }
    scene.end();
}

/// Packets are in the programs while the pod that they are for is removed.
#[test]
fn what_comes_while_a_pod_goes_is_counted_for_nobody_that_comes_after_it() {
    let scene = Scene::new(&[]);
    scene.await_on();
    let (mut address, mut echoes) = (scene.addresses[0], Vec::new());
    for _ in 0..5 {
        assert!(datagram(&scene.client.namespace, address, PATIENCE).unwrap());
        let socket = scene.client.namespace.run(|| UdpSocket::bind("0.0.0.0:0")).unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _ending = Ending(&is_over);
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    // Refused once no pod has the address.
                    let _ = socket.send_to(&[0; 64], address);
                }
            });
            scene.node.del(&scene.server).success();
        });
        let result = scene.node.add(&scene.server).success();
        let stats = row(&scene.node, "stats", "server");
        assert_eq!((&stats["fast"]["packets"], &stats["dropped"]), (&json!(0), &json!({})), "{stats:#}");
        let text = result["ips"][0]["address"].as_str().unwrap();
        address.set_ip(text.split('/').next().unwrap().parse().unwrap());
        echoes.push(Echo::serve(&scene.server.namespace, address).unwrap());
        scene.await_standing("server", "on");
    }
    assert!(eventually(PATIENCE, || !has_resting_numbers(&scene.node).unwrap()), "numbers that are not free");
    scene.end();
}

/// A setting of the node that keeps pods off the fast path, and how it is reverted.
struct Obstacle {
    name: &'static str,
    /// Program and arguments; `PORT` stands for the server's port.
    set: (&'static str, &'static str),
    reset: &'static [(&'static str, &'static str)],
    /// Whether the pods can communicate meanwhile.
    passes: bool,
}

const OBSTACLES: [Obstacle; 8] = [
    Obstacle {
        name: "spanning-tree",
        set: ("ip", "link set br0 type bridge stp_state 1"),
        reset: &[("ip", "link set br0 type bridge stp_state 0")],
        passes: false,
    },
    Obstacle {
        name: "port-restricted",
        set: ("bridge", "link set dev PORT isolated on"),
        reset: &[("bridge", "link set dev PORT isolated off")],
        passes: true,
    },
    Obstacle {
        name: "no-bridge",
        set: ("ip", "link set PORT nomaster"),
        reset: &[("ip", "link set PORT master br0")],
        passes: false,
    },
    Obstacle {
        name: "port-state",
        set: ("ip", "link set PORT down"),
        reset: &[("ip", "link set PORT up")],
        passes: false,
    },
    Obstacle {
        name: "shaped",
        set: ("tc", "qdisc add dev PORT root tbf rate 1gbit burst 100k latency 20ms"),
        reset: &[("tc", "qdisc del dev PORT root")],
        passes: true,
    },
    Obstacle {
        name: "bridge-rules",
        set: ("ebtables", "-A FORWARD -p ARP -j ACCEPT"),
        reset: &[("ebtables", "-F"), ("ebtables", "-X")],
        passes: true,
    },
    Obstacle {
        name: "iptables",
        set: ("iptables", "-A FORWARD -p sctp -j DROP"),
        reset: &[("iptables", "-F"), ("iptables", "-X")],
        passes: true,
    },
    Obstacle {
        name: "iptables",
        set: ("ip6tables", "-A FORWARD -p sctp -j DROP"),
        reset: &[("ip6tables", "-F"), ("ip6tables", "-X")],
        passes: true,
    },
];

#[test]
fn whatever_makes_a_bridge_more_than_a_switch_keeps_its_pods_off_until_it_is_gone() {
    let scene = Scene::new(&[]);
    let here = |(program, words): &(&str, &str)| {
        scene.on_node(program, &words.replace("PORT", &scene.ports[1]));
    };
    for Obstacle { name, set, reset, passes } in OBSTACLES {
        scene.await_on();
        // After a change the bridge may have to learn the pods again.
        assert!(datagram(&scene.client.namespace, scene.addresses[0], PATIENCE).unwrap(), "before {name}");
        assert_eq!(scene.exchange(0), ALL_FAST, "before {name}");
        here(&set);
        scene.await_standing("server", name);
        if passes {
            assert_eq!(scene.exchange(0), NONE_FAST, "{name}");
        }
        reset.iter().for_each(here);
    }
    scene.await_on();
    scene.end();
}

#[test]
fn with_on_only_what_would_be_wrong_keeps_pods_off() {
    let scene = Scene::new(&[("fastPath", json!("on"))]);
    scene.on_node("ebtables", "-A FORWARD -p ARP -j ACCEPT");
    scene.on_node("iptables", "-A FORWARD -p sctp -j DROP");
    scene.await_on();
    assert!(datagram(&scene.client.namespace, scene.addresses[0], PATIENCE).unwrap());
    assert_eq!(scene.exchange(0), ALL_FAST);
    scene.on_node("bridge", &format!("link set dev {} isolated on", scene.ports[0]));
    scene.await_standing("client", "port-restricted");
    assert_eq!(scene.exchange(0), NONE_FAST);
    scene.end();
}

#[test]
fn with_off_nobody_takes_it_and_everybody_says_why() {
    let scene = Scene::new(&[("fastPath", json!("off"))]);
    scene.await_standing("server", "off");
    assert!(datagram(&scene.client.namespace, scene.addresses[0], PATIENCE).unwrap());
    assert_eq!(scene.exchange(0), NONE_FAST);
    let status = scene.node.ctl(&["status"]).unwrap();
    let row = json!({"state": "off", "detail": "the agent's setting fastPath is off", "attachments": 2});
    assert_eq!((&status["fast_path_mode"], &status["fast_path"]), (&json!("off"), &json!([row])));
    scene.end();
}

/// Rows: BRG-fastPath.
#[test]
fn a_network_can_keep_its_pods_off() {
    let scene = Scene::with(&[], |mut config| {
        config["fastPath"] = json!(false);
        config
    });
    scene.await_standing("server", "opted-out");
    assert!(datagram(&scene.client.namespace, scene.addresses[0], PATIENCE).unwrap());
    assert_eq!(scene.exchange(0), NONE_FAST);
    scene.end();
}

#[test]
fn a_plugin_that_may_work_on_the_nodes_end_keeps_pods_off() {
    let mut node = Node::new(&[pod("a", &json!({}), &Value::Null)]).unwrap();
    node.plugin("other", &json!({})).unwrap();
    let mut first = node.default_config();
    first.as_object_mut().unwrap().remove("cniVersion");
    let list = json!({"cniVersion": "1.0.0", "plugins": [first, {"type": "other"}]});
    node.write("default", &network("kube-system", "default", &list)).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let stands = || row(&node, "attachments", "a")["fast_path"]["state"] == "plugin";
    assert!(eventually(NOTICED, stands));
    let detail = "the network's plugin other may work on the node's end of the link";
    assert_eq!(row(&node, "attachments", "a")["fast_path"]["detail"], detail);
    node.del(&a).success();
}

#[test]
fn what_does_not_fit_the_receivers_link_takes_the_bridge() {
    let scene = Scene::new(&[]);
    scene.await_on();
    let socket = scene.client.namespace.run(|| UdpSocket::bind("0.0.0.0:0")).unwrap();
    socket.connect(scene.addresses[0]).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let payload = [0; 1400];
    let echoed = || {
        socket.send(&payload).unwrap();
        socket.recv(&mut [0; 2000]).is_ok()
    };
    assert!(eventually(PATIENCE, echoed));
    let left = || scene.left_to_stack("client", "too-big");
    assert_eq!(left(), 0);
    scene.on_node("ip", &format!("link set {} mtu 1300", scene.ports[1]));
    // The bridge cannot deliver it either: the fast path only handles packets that fit.
    let left_alone = || !echoed() && left() > 0;
    assert!(eventually(NOTICED, left_alone), "a frame of 1400 bytes takes the fast path to a link of 1300");
    assert_eq!(scene.standing("server"), "on");
    assert_eq!(scene.exchange(0), ALL_FAST, "short ones");
    scene.end();
}

#[test]
fn an_agent_that_comes_back_puts_pods_on_again_and_loses_nothing() {
    let mut scene = Scene::new(&[]);
    scene.await_on();
    assert!(datagram(&scene.client.namespace, scene.addresses[0], PATIENCE).unwrap());
    let before = scene.fast();
    scene.node.kill().unwrap();
    for _ in 0..EXCHANGES {
        assert!(datagram(&scene.client.namespace, scene.addresses[0], PATIENCE).unwrap());
    }
    scene.node.start().unwrap();
    let after = scene.fast();
    assert_eq!([after[0] - before[0], after[1] - before[1]], ALL_FAST, "without an agent, for a while");
    scene.await_on();
    assert_eq!(scene.exchange(0), ALL_FAST);
    scene.end();
}

#[test]
fn a_pod_that_goes_leaves_nothing_and_a_new_one_takes_its_place() {
    let scene = Scene::new(&[]);
    scene.await_on();
    scene.node.del(&scene.client).success();
    let successor = Pod::new("client").unwrap();
    scene.node.add(&successor).success();
    scene.await_on();
    assert!(datagram(&successor.namespace, scene.addresses[0], PATIENCE).unwrap());
    let before = scene.fast();
    assert_eq!(before[0], 1, "counters begin anew");
    assert!(datagram(&successor.namespace, scene.addresses[0], PATIENCE).unwrap());
    let after = scene.fast();
    assert_eq!([after[0] - before[0], after[1] - before[1]], [1, 1]);
    scene.node.del(&successor).success();
    scene.end();
}

fn routed(mut config: Value) -> Value {
    let ipam = config["ipam"].take();
    json!({"cniVersion": "1.0.0", "type": "veth", "isDefaultGateway": true, "ipam": ipam})
}

#[test]
fn traffic_of_routed_pods_takes_the_fast_path_one_hop_on() {
    let scene = Scene::with(&[], routed);
    scene.await_on();
    for family in [0, 1] {
        // The node resolves the pods' addresses first.
        let all_fast = || scene.exchange(family) == ALL_FAST;
        assert!(eventually(PATIENCE, all_fast), "{}", row(&scene.node, "stats", "client"));
    }
    assert!(scene.left_to_stack("client", "unroutable") > 0, "the first packets");
    scene.assert_transfers_whole();

    // A server that counts hops: a packet sent with two left is answered, and for one the node answers.
    let hops = |left, patience| {
        let socket = scene.client.namespace.run(|| UdpSocket::bind("0.0.0.0:0")).unwrap();
        socket.connect(scene.addresses[0]).unwrap();
        socket.set_read_timeout(Some(patience)).unwrap();
        socket.set_ttl(left).unwrap();
        socket.send(b"hops").unwrap();
        socket.recv(&mut [0; 16]).is_ok()
    };
    let before = (scene.fast(), scene.left_to_stack("client", "hop-limit"));
    assert!(hops(2, PATIENCE));
    assert!(!hops(1, SILENCE));
    let after = (scene.fast(), scene.left_to_stack("client", "hop-limit"));
    assert_eq!([after.0[0] - before.0[0], after.0[1] - before.0[1]], [1, 1]);
    assert_eq!(after.1 - before.1, 1);
    scene.end();
}

#[test]
fn filters_for_ip_packets_keep_routed_pods_off_and_the_nodes_routing_is_obeyed() {
    let scene = Scene::with(&[], routed);
    scene.await_on();
    let all_fast = || scene.exchange(0) == ALL_FAST;
    assert!(eventually(PATIENCE, all_fast));
    scene.on_node("iptables", "-A FORWARD -p sctp -j DROP");
    scene.await_standing("server", "ip-rules");
    assert_eq!(scene.exchange(0), NONE_FAST);
    scene.on_node("iptables", "-F");
    scene.on_node("iptables", "-X");
    scene.await_on();
    assert_eq!(scene.exchange(0), ALL_FAST);
    let IpAddr::V4(server) = scene.addresses[0].ip() else { panic!("the first address is IPv4") };
    scene.on_node("ip", &format!("rule add to {server} prohibit"));
    assert!(!datagram(&scene.client.namespace, scene.addresses[0], Duration::from_millis(300)).unwrap());
    scene.on_node("ip", &format!("rule del to {server} prohibit"));
    assert_eq!(scene.exchange(0), ALL_FAST);
    scene.on_node("sysctl", "-qw net.ipv4.ip_forward=0");
    assert!(!datagram(&scene.client.namespace, scene.addresses[0], Duration::from_millis(300)).unwrap());
    scene.end();
}

#[test]
fn the_nodes_rules_by_ports_are_obeyed_and_fragments_are_left_to_it() {
    let scene = Scene::with(&[], routed);
    scene.await_on();
    let limit = Duration::from_millis(300);
    let silent = |family: usize| !datagram(&scene.client.namespace, scene.addresses[family], limit).unwrap();
    let fragmented = |family: usize, patience| {
        let any = if family == 0 { "0.0.0.0:0" } else { "[::]:0" };
        let socket = scene.client.namespace.run(|| UdpSocket::bind(any)).unwrap();
        socket.connect(scene.addresses[family]).unwrap();
        socket.set_read_timeout(Some(patience)).unwrap();
        socket.send(&[0; 4000]).unwrap();
        socket.recv(&mut [0; 8000]).is_ok()
    };
    for (family, option) in [(0, "-4"), (1, "-6")] {
        let all_fast = || scene.exchange(family) == ALL_FAST;
        assert!(eventually(PATIENCE, all_fast), "{}", row(&scene.node, "stats", "client"));
        let before = (scene.fast(), scene.left_to_stack("client", "no-ports"));
        assert!(fragmented(family, PATIENCE));
        assert_eq!(scene.fast(), before.0, "what the node makes of their ports is its own");
        assert!(scene.left_to_stack("client", "no-ports") > before.1);
        let server = scene.addresses[family].ip();
        // Traffic to the server, and from it.
        for rule in [format!("to {server} ipproto udp dport 7"), format!("from {server} ipproto udp sport 7")]
        {
            scene.on_node("ip", &format!("{option} rule add {rule} prohibit"));
            assert!(silent(family), "{rule}");
            scene.on_node("ip", &format!("{option} rule del {rule} prohibit"));
        }
        scene.on_node("ip", &format!("{option} rule add to {server} ipproto udp dport 8 prohibit"));
        assert_eq!(scene.exchange(family), ALL_FAST, "a rule about another port");
    }
    scene.end();
}

#[test]
fn what_the_node_translates_is_never_passed_by() {
    let scene = Scene::with(&[("fastPath", json!("on"))], routed);
    scene.await_on();
    assert!(eventually(PATIENCE, || scene.exchange(0) == ALL_FAST));
    scene.on_node("iptables", "-A FORWARD -p sctp -j DROP");
    assert_eq!(scene.exchange(0), ALL_FAST, "filters are what `on` gives up");
    let server = scene.addresses[0];
    for (table, port) in [("iptables", 77), ("iptables-legacy", 78)] {
        let rule = format!(
            "-t nat -A PREROUTING -d 10.96.0.10 -p udp --dport {port} -j DNAT --to-destination {server}"
        );
        scene.on_node(table, &rule);
        scene.await_standing("client", "nat");
        assert_eq!(scene.exchange(0), NONE_FAST, "{table}");
        let service = format!("10.96.0.10:{port}").parse().unwrap();
        assert!(datagram(&scene.client.namespace, service, PATIENCE).unwrap(), "{table}");
        scene.on_node(table, "-t nat -F");
        if table == "iptables" {
            scene.on_node(table, "-t nat -X");
            for chain in ["PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"] {
                let deleted = format!("-t nat -X {chain}");
                let run = || Command::new(table).args(deleted.split(' ')).output();
                // Not every variant of iptables has these chains; errors are ignored.
                let _ = scene.node.namespace.run(run).unwrap();
            }
            scene.await_on();
        }
    }
    scene.end();
}

#[test]
fn pods_of_two_ways_reach_each_other_by_the_stack() {
    let scene = Scene::new(&[]);
    let ipam = scene.node.host_local(&["10.51.0.0/24"]);
    let config = json!({"cniVersion": "1.0.0", "type": "veth", "isDefaultGateway": true, "ipam": ipam});
    let default =
        annotated(pod("far", &json!({}), &Value::Null), "v1.multus-cni.io/default-network", "shop/far");
    scene.node.write("far-network", &network(NAMESPACE, "far", &config)).unwrap();
    scene.node.write("far", &default).unwrap();
    let far = Pod::new("far").unwrap();
    let attached = || scene.node.add(&far).exit == 0;
    assert!(eventually(PATIENCE, attached));
    scene.await_on();
    scene.await_standing("far", "on");
    let before = scene.fast();
    assert!(datagram(&far.namespace, scene.addresses[0], PATIENCE).unwrap());
    assert_eq!(scene.fast(), before);
    assert!(scene.left_to_stack("far", "elsewhere") + scene.left_to_stack("far", "unroutable") > 0);
    scene.node.del(&far).success();
    scene.end();
}
