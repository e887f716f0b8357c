//! Pods that request the addresses of others: of the bridge, of a router behind it, of the node, of another pod.

use std::net::SocketAddr;
use std::time::Duration;

use netattach_tests::manifest::{NAMESPACE, annotated, network, pod};
use netattach_tests::node::{WIRE, ip};
use netattach_tests::snapshot::{Network, Snapshot};
use netattach_tests::traffic::{Echo, PATIENCE, datagram, eventually};
use netattach_tests::{Namespace, Node, Pod};
use serde_json::{Value, json};

/// How long the agent may take to notice.
const NOTICED: Duration = Duration::from_secs(90);
/// Datagrams to the gateway that must all arrive.
const DATAGRAMS: usize = 20;
/// An unused address.
const FREE: &str = "02:00:00:00:0b:ad";
/// The annotation by which a pod selects its default network.
const CHOICE: &str = "v1.multus-cni.io/default-network";
/// The bridge's address in the pods' network.
const GATEWAY: &str = "10.50.0.1";

/// An attached victim, and a pod that requests something of the same network.
struct Scene {
    node: Node,
    victim: Pod,
    impostor: Pod,
    _gateway: Echo,
}

impl Scene {
    fn new(fast_path: &str, capabilities: &Value) -> Self {
        let pods = ["victim", "impostor"].map(|name| pod(name, &json!({}), &Value::Null));
        let mut node = Node::new(&pods).unwrap();
        node.set("fastPath", json!(fast_path));
        let mut config = node.default_config();
        config["capabilities"] = capabilities.clone();
        node.write("default", &network("kube-system", "default", &config)).unwrap();
        node.start().unwrap();
        let [victim, impostor] = ["victim", "impostor"].map(|name| Pod::new(name).unwrap());
        node.add(&victim).success();
        let gateway = Echo::serve(&node.namespace, (GATEWAY.parse::<std::net::IpAddr>().unwrap(), 7).into());
        Self { node, victim, impostor, _gateway: gateway.unwrap() }
    }

    /// Sets the impostor's request to the default network.
    fn ask(&self, wish: &Value) {
        let mut element = json!({"name": "default", "namespace": "kube-system"});
        element.as_object_mut().unwrap().extend(wish.as_object().unwrap().clone());
        let choice = json!([element]).to_string();
        let manifest = annotated(pod("impostor", &json!({}), &Value::Null), CHOICE, &choice);
        self.node.write("manifest-01", &manifest).unwrap();
        let seen = || self.node.ctl(&["status"]).is_ok();
        assert!(eventually(PATIENCE, seen));
    }

    /// Repeats ADD of the impostor until the agent has read its request.
    fn refused(&self, wish: &Value, word: &str) -> (u64, String) {
        self.ask(wish);
        let mut last = (0, String::new());
        let refused = || {
            let outcome = self.node.add(&self.impostor);
            if outcome.exit == 0 {
                self.node.del(&self.impostor).success();
                return false;
            }
            last = outcome.failure();
            last.1.contains(word)
        };
        assert!(eventually(PATIENCE, refused), "{wish}: {last:?}");
        last
    }

    fn attached(&self, wish: &Value) {
        self.ask(wish);
        let mac = wish["mac"].as_str().unwrap();
        let attached = || {
            if self.node.add(&self.impostor).exit == 0 {
                let devices = Network::of(&self.impostor.namespace).unwrap().links;
                if devices["eth0"].mac.unwrap().to_string() == mac {
                    return true;
                }
            }
            self.node.del(&self.impostor).success();
            false
        };
        assert!(eventually(PATIENCE, attached));
    }

    fn standing(&self, pod: &str) -> String {
        let rows = self.node.ctl(&["attachments", "--pod", &format!("{NAMESPACE}/{pod}")]).unwrap();
        rows[0]["fast_path"]["state"].as_str().unwrap().to_owned()
    }

    fn await_standing(&self, pod: &str, wanted: &str) {
        let mut last = String::new();
        let stands = || {
            last = self.standing(pod);
            last == wanted
        };
        assert!(eventually(NOTICED, stands), "{pod} is {last}, not {wanted}");
    }

    fn ip(&self, words: &str) {
        ip(&self.node.namespace, &words.split(' ').collect::<Vec<_>>()).unwrap();
    }

    fn bridge(&self) -> String {
        Network::of(&self.node.namespace).unwrap().links["br0"].mac.unwrap().to_string()
    }

    /// The victim resolves the address again, and all its packets there are answered.
    fn assert_reaches(&self, target: &str) {
        ip(&self.victim.namespace, &["neigh", "flush", "all"]).unwrap();
        let target: SocketAddr = format!("{target}:7").parse().unwrap();
        let answered = (0..DATAGRAMS).filter(|_| datagram(&self.victim.namespace, target, PATIENCE).unwrap());
        assert_eq!(answered.count(), DATAGRAMS, "{target}");
    }

    fn end(self) {
        for pod in [&self.victim, &self.impostor] {
            self.node.del(pod).success();
        }
        Snapshot::take(&self.node, &[&self.victim, &self.impostor]).unwrap().assert_nothing_is_left();
    }
}

#[test]
fn no_pod_gets_the_bridges_address_whichever_way_it_asks() {
    for fast_path in ["auto", "off"] {
        let scene = Scene::new(fast_path, &json!({"mac": true}));
        let bridge = scene.bridge();
        let taken = format!("MAC address {bridge} is taken: the node's device br0 has it");
        for wish in [json!({"mac": bridge}), json!({"cni-args": {"mac": bridge}})] {
            let (code, message) = scene.refused(&wish, "is taken");
            assert_eq!(code, 7, "{message}");
            assert!(message.contains(&taken), "{message}");
        }
        let args = scene.node.call("ADD", &scene.impostor).env["CNI_ARGS"].clone();
        scene.ask(&json!({}));
        let call = scene.node.call("ADD", &scene.impostor).with("CNI_ARGS", &format!("{args};MAC={bridge}"));
        let mut last = (0, String::new());
        let refused = || {
            last = call.run().failure();
            last.1.contains(&taken)
        };
        assert!(eventually(PATIENCE, refused), "{last:?}");
        scene.assert_reaches(GATEWAY);
        scene.end();
    }
}

#[test]
fn a_network_that_lets_nobody_choose_an_address_lets_nobody() {
    let scene = Scene::new("auto", &json!({"ips": true}));
    for key in ["mac", "MAC", "Mac"] {
        let (code, message) = scene.refused(&json!({"cni-args": {key: FREE}}), key);
        assert_eq!(code, 7, "{message}");
        assert!(message.contains("declares the capability mac"), "{message}");
    }
    scene.ask(&json!({}));
    let args = scene.node.call("ADD", &scene.impostor).env["CNI_ARGS"].clone();
    let call = scene.node.call("ADD", &scene.impostor).with("CNI_ARGS", &format!("{args};MAC={FREE}"));
    let mut last = (0, String::new());
    let refused = || {
        last = call.run().failure();
        last.1.contains("MAC in CNI_ARGS")
    };
    assert!(eventually(PATIENCE, refused), "{last:?}");
    assert_eq!(last.0, 7, "{last:?}");
    scene.assert_reaches(GATEWAY);
    scene.end();
}

#[test]
fn a_bridge_that_takes_a_pods_address_later_gets_what_is_sent_to_it() {
    let scene = Scene::new("auto", &json!({"mac": true}));
    scene.attached(&json!({"mac": FREE}));
    scene.await_standing("victim", "on");
    scene.await_standing("impostor", "on");
    scene.ip(&format!("link set br0 address {FREE}"));
    scene.await_standing("impostor", "same-mac");
    scene.assert_reaches(GATEWAY);
    assert_eq!(scene.standing("victim"), "on");
    scene.end();
}

#[test]
fn a_routers_address_is_the_routers_before_and_after() {
    const ROUTER: &str = "02:00:00:00:0f:01";
    let scene = Scene::new("auto", &json!({"mac": true}));
    let router = Namespace::new().unwrap();
    let on_router = |words: &str| ip(&router, &words.split(' ').collect::<Vec<_>>()).unwrap();
    scene.ip(&format!("link add {WIRE} type veth peer name far0 netns {}", router.task()));
    scene.ip(&format!("link set {WIRE} master br0 up"));
    on_router(&format!("link set far0 address {ROUTER} up"));
    on_router("address add 10.50.0.250/24 dev far0");
    let _echo = Echo::serve(&router, "10.50.0.250:7".parse().unwrap()).unwrap();
    scene.assert_reaches("10.50.0.250");
    let (code, message) = scene.refused(&json!({"mac": ROUTER}), "is taken");
    let taken = format!("MAC address {ROUTER} is taken: the bridge has seen it at port {WIRE}");
    assert_eq!(code, 11, "{message}");
    assert!(message.contains(&taken), "{message}");
    // A router that appears after the pod, with the pod's address.
    scene.attached(&json!({"mac": FREE}));
    scene.await_standing("impostor", "on");
    // The pod is silent now: if two stations have one address, a switch knows the last sender.
    let quiet = || std::fs::write("/proc/sys/net/ipv6/conf/eth0/disable_ipv6", "1");
    scene.impostor.namespace.run(quiet).unwrap();
    on_router(&format!("link set far0 address {FREE}"));
    ip(&scene.victim.namespace, &["neigh", "flush", "all"]).unwrap();
    let target = "10.50.0.250:7".parse().unwrap();
    let answers = || datagram(&scene.victim.namespace, target, Duration::from_millis(300)).unwrap();
    assert!(eventually(NOTICED, answers));
    scene.await_standing("impostor", "known-elsewhere");
    scene.assert_reaches("10.50.0.250");
    scene.end();
}

#[test]
fn no_pod_gets_the_address_of_a_macvlans_parent() {
    let node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    let parent = Network::of(&node.namespace).unwrap().links[WIRE].mac.unwrap().to_string();
    let lan = json!({
        "cniVersion": "1.0.0", "type": "macvlan", "master": WIRE, "capabilities": {"mac": true},
        "ipam": node.host_local(&["10.52.0.0/24"])
    });
    node.write("lan", &network(NAMESPACE, "lan", &lan)).unwrap();
    node.write("x", &pod("x", &json!({}), &json!([{"name": "lan", "mac": parent}]))).unwrap();
    let mut node = node;
    node.start().unwrap();
    let x = Pod::new("x").unwrap();
    let (code, message) = node.add(&x).failure();
    assert_eq!(code, 7, "{message}");
    assert!(
        message.contains(&format!("MAC address {parent} is taken: the node's device {WIRE} has it")),
        "{message}"
    );
    node.del(&x).success();
    Snapshot::take(&node, &[&x]).unwrap().assert_nothing_is_left();
}

#[test]
fn a_second_pod_gets_no_address_of_a_first_until_that_one_is_gone() {
    let mut scene = Scene::new("auto", &json!({"mac": true, "ips": true}));
    let of_victim = Network::of(&scene.victim.namespace).unwrap().links["eth0"].clone();
    let mac = of_victim.mac.unwrap().to_string();
    let holder = "is taken: pod shop/victim, container c-victim, interface eth0 has it";
    let taken = |scene: &Scene| {
        let (code, message) = scene.refused(&json!({"mac": mac}), "is taken");
        assert_eq!(code, 11, "{message}");
        assert!(message.contains(&format!("MAC address {mac} {holder}")), "{message}");
    };
    taken(&scene);
    // A later agent knows the holder too, although the bridge has forgotten a silent pod.
    scene.node.stop().unwrap();
    scene.node.start().unwrap();
    taken(&scene);
    scene.assert_reaches(GATEWAY);
    scene.node.del(&scene.victim).success();
    scene.attached(&json!({"mac": mac}));
    scene.end();
}

#[test]
fn an_address_that_a_pod_chooses_is_nobody_elses() {
    let pods = ["victim", "impostor"].map(|name| pod(name, &json!({}), &json!("lan")));
    let mut node = Node::new(&pods).unwrap();
    let lan = json!({
        "cniVersion": "1.0.0", "type": "bridge", "bridge": "br1", "isGateway": true,
        "ipam": {"type": "anything", "sub": {"n": 1}}
    });
    node.write("lan", &network(NAMESPACE, "lan", &lan)).unwrap();
    let routed = json!({"cniVersion": "1.0.0", "type": "veth", "ipam": {"type": "anything"}});
    node.write("routed", &network(NAMESPACE, "routed", &routed)).unwrap();
    let gives = |node: &Node, address: &str| {
        let (gateway, length) = ("10.70.0.1", 24);
        let ips = json!([{"address": format!("{address}/{length}"), "gateway": gateway}]);
        node.plugin("anything", &json!({"ADD": {"result": {"cniVersion": "1.0.0", "ips": ips}}})).unwrap();
    };
    gives(&node, "10.70.0.5");
    node.start().unwrap();
    let [victim, impostor] = ["victim", "impostor"].map(|name| Pod::new(name).unwrap());
    node.add(&victim).success();
    let own = "it is an address of the node, or of all stations on one of its links";
    let of_victim = "pod shop/victim, container c-victim, interface net1 has it";
    for (address, code, holder) in
        [("10.70.0.5", 11, of_victim), ("10.70.0.1", 7, own), ("10.70.0.255", 7, own), ("10.50.0.1", 7, own)]
    {
        gives(&node, address);
        let (found, message) = node.add(&impostor).failure();
        assert_eq!(found, code, "{message}");
        assert!(message.contains(&format!("address {address} is taken: {holder}")), "{message}");
    }
    // On a routed link the node's routers are protected too: otherwise all packets that the node sends through them
    // would go to the pod.
    ip(&node.namespace, &["route", "add", "10.99.0.0/16", "via", "10.50.0.77", "dev", "br0"]).unwrap();
    node.write("manifest-01", &pod("impostor", &json!({}), &json!("routed"))).unwrap();
    gives(&node, "10.50.0.77");
    let mut last = (0, String::new());
    let refused = || {
        let outcome = node.add(&impostor);
        if outcome.exit == 0 {
            // Refused for the bridge's address still: the source has not read the pod's new annotation yet.
            node.del(&impostor).success();
            return false;
        }
        last = outcome.failure();
        last.1.contains("address 10.50.0.77 is taken: the node routes by it")
    };
    assert!(eventually(PATIENCE, refused), "{last:?}");
    assert_eq!(last.0, 7, "{last:?}");
    for pod in [&victim, &impostor] {
        node.del(pod).success();
    }
    ip(&node.namespace, &["route", "del", "10.99.0.0/16"]).unwrap();
    Snapshot::take(&node, &[&victim, &impostor]).unwrap().assert_nothing_is_left();
}

/// Rows: STC-node-links, BRG-chosen.
#[test]
fn a_pod_chooses_no_address_of_the_node_and_none_that_the_node_reaches_elsewhere() {
    let chosen = |kind: &str, keys: &Value| {
        let mut config = json!({
            "cniVersion": "1.0.0", "type": kind, "capabilities": {"ips": true}, "ipam": {"type": "static"}
        });
        config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        config
    };
    let networks = [
        ("routed", chosen("veth", &json!({}))),
        ("behind", chosen("bridge", &json!({"bridge": "br-chosen", "isGateway": true}))),
    ];
    let near = |address: &str| {
        format!("address {address} is taken: the node has a route to 192.0.2.0/24, by {WIRE}")
    };
    let elsewhere = || "ipam.addresses names the subnets that pods may choose in".to_owned();
    // A host on the wire, a host behind a router there, and one with a route of its own.
    let wishes = [
        ("near", "routed", "192.0.2.9/32", 7, near("192.0.2.9")),
        ("far", "routed", "10.99.0.7/32", 7, format!("the node has a route to 10.99.0.0/16, by {WIRE}")),
        ("held", "routed", "10.98.0.7/32", 11, format!("the node has another route to it, by {WIRE}")),
        ("node", "behind", "192.0.2.77/25", 7, elsewhere()),
        ("world", "behind", "2000::99/3", 7, elsewhere()),
    ];
    let mut node = Node::new(&[]).unwrap();
    let _outside = node.add_outside().unwrap();
    for (name, config) in &networks {
        node.write(name, &network(NAMESPACE, name, config)).unwrap();
    }
    for (name, of, address, ..) in &wishes {
        let asked = json!([{"name": of, "ips": [address]}]);
        node.write(&format!("pod-{name}"), &pod(name, &json!({}), &asked)).unwrap();
    }
    let free = json!([{"name": "routed", "ips": ["10.97.0.7/32"]}]);
    node.write("pod-free", &pod("free", &json!({}), &free)).unwrap();
    for words in ["route add 10.99.0.0/16 via 192.0.2.2", &format!("route add 10.98.0.7 dev {WIRE}")] {
        ip(&node.namespace, &words.split(' ').collect::<Vec<_>>()).unwrap();
    }
    node.start().unwrap();
    for (name, _, _, code, told) in &wishes {
        let (found, said) = node.add(&Pod::new(name).unwrap()).failure();
        assert!(found == *code && said.ends_with(told), "{name}: {found} {said}");
        let links = Network::of(&node.namespace).unwrap().links;
        assert!(!links.contains_key("br-chosen"), "{name}");
    }
    let free = Pod::new("free").unwrap();
    node.add(&free).success();
    node.del(&free).success();
}

#[test]
fn an_address_of_static_has_one_pod_across_restarts_until_that_one_is_gone() {
    let pods = ["victim", "impostor"].map(|name| pod(name, &json!({}), &json!("lan")));
    let mut node = Node::new(&pods).unwrap();
    let lan = json!({
        "cniVersion": "1.1.0", "type": "bridge", "bridge": "br1", "isGateway": true,
        "ipam": {"type": "static", "addresses": [{"address": "10.70.0.5/24", "gateway": "10.70.0.1"}]}
    });
    node.write("lan", &network(NAMESPACE, "lan", &lan)).unwrap();
    node.start().unwrap();
    let [victim, impostor] = ["victim", "impostor"].map(|name| Pod::new(name).unwrap());
    node.add(&victim).success();
    let holder = "address 10.70.0.5 is taken: pod shop/victim, container c-victim, interface net1 has it";
    for _ in 0..2 {
        let (code, message) = node.add(&impostor).failure();
        assert_eq!(code, 11, "{message}");
        assert!(message.contains(holder), "{message}");
        node.stop().unwrap();
        node.start().unwrap();
    }
    node.del(&victim).success();
    node.add(&impostor).success();
    let device = Network::of(&impostor.namespace).unwrap().links["net1"].clone();
    assert!(format!("{device:?}").contains("10.70.0.5/24"), "{device:?}");
    node.del(&impostor).success();
    Snapshot::take(&node, &[&victim, &impostor]).unwrap().assert_nothing_is_left();
}
