//! Masquerade, and ports of the node that lead to pods.
//!
//! A node with pods on a bridge or on routed links, and a namespace outside of it, behind a wire. `masquerade` and
//! `host_ports` check which addresses are seen, `policies` how packets are judged, `table` the contents of the node's
//! packet filter and changes to it, `beside_others` other programs and agents.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr, TcpListener};

use netattach::netlink::nat::{self, Element, Set};
use netattach_tests::manifest::{network, pod};
use netattach_tests::node::{WIRE, ip};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, connects, eventually, opened, stretched};
use netattach_tests::{Namespace, Node, Outcome, Pod};
use serde_json::{Value, json};

mod beside_others;
mod host_ports;
mod masquerade;
mod policies;
mod table;

/// Addresses of the node and of the outside host, on the wire; by family.
const NODE: [&str; 2] = ["192.0.2.1", "2001:db8::1"];
const OUTSIDE: [&str; 2] = ["192.0.2.2", "2001:db8::2"];
/// Addresses of the outside host that the network's configuration excepts from masquerade.
const EXCEPTED: [&str; 2] = ["198.51.100.7", "2001:db8:7::7"];

/// The links of the node's pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Links {
    Bridge,
    Routed,
}

const BOTH: [Links; 2] = [Links::Bridge, Links::Routed];

struct Scene {
    node: Node,
    outside: Namespace,
    pods: Vec<Pod>,
}

fn at(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse().unwrap(), port)
}

impl Scene {
    /// A started node that knows pods of these names.
    fn new(links: Links, names: &[&str]) -> Self {
        let mut scene = Self::unstarted(links, names);
        scene.node.start().unwrap();
        scene
    }

    fn unstarted(links: Links, names: &[&str]) -> Self {
        let manifests: Vec<Value> =
            names.iter().map(|name| pod(name, &json!({"app": name}), &Value::Null)).collect();
        let node = Node::new(&manifests).unwrap();
        let mut config = node.default_config();
        if links == Links::Routed {
            let ipam = config["ipam"].take();
            config = json!({"cniVersion": "1.0.0", "type": "veth", "isDefaultGateway": true, "ipam": ipam});
        }
        config["ipMasq"] = json!(true);
        config["nonMasqueradeCIDRs"] = json!(["198.51.100.0/24", "2001:db8:7::/48"]);
        config["capabilities"] = json!({"portMappings": true});
        node.write("default", &network("kube-system", "default", &config)).unwrap();
        let scene = Self { node, outside: Namespace::new().unwrap(), pods: Vec::new() };
        scene.connect_outside();
        scene
    }

    fn connect_outside(&self) {
        let words = |words: &str| words.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let run = |namespace: &Namespace, line: &str| {
            ip(namespace, &words(line).iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
        };
        let (on_node, task) = (&self.node.namespace, self.outside.task());
        on_node.loopback_up().unwrap();
        self.outside.loopback_up().unwrap();
        run(on_node, &format!("link add {WIRE} up type veth peer name far0 netns {task}"));
        run(&self.outside, "link set far0 up");
        for (family, bits, pods) in [(0, 24, "10.50.0.0/24"), (1, 64, "fd00:50::/64")] {
            let nodad = if family == 1 { " nodad" } else { "" };
            let [node, outside, excepted] = [NODE[family], OUTSIDE[family], EXCEPTED[family]];
            run(on_node, &format!("addr add {node}/{bits} dev {WIRE}{nodad}"));
            run(&self.outside, &format!("addr add {outside}/{bits} dev far0{nodad}"));
            run(&self.outside, &format!("addr add {excepted} dev lo{nodad}"));
            run(on_node, &format!("route add {excepted} via {outside}"));
            run(&self.outside, &format!("route add {pods} via {node}"));
        }
    }

    /// Sends ADD like a runtime with these ports.
    fn ask(&self, pod: &Pod, ports: &Value) -> Outcome {
        let mut config = self.node.cni_config("1.0.0");
        config["runtimeConfig"] = json!({"portMappings": ports});
        self.node.call("ADD", pod).stdin(&config).run()
    }

    /// Attaches the pod of that name; returns its number and its addresses.
    fn add(&mut self, name: &str, ports: &Value) -> (usize, [IpAddr; 2]) {
        let pod = Pod::new(name).unwrap();
        let result = self.ask(&pod, ports).success();
        self.node.await_status(&pod);
        self.pods.push(pod);
        let address = |number: usize| {
            let text = result["ips"][number]["address"].as_str().unwrap();
            text.split_once('/').unwrap().0.parse().unwrap()
        };
        (self.pods.len() - 1, [address(0), address(1)])
    }

    fn elements(&self) -> BTreeSet<Element> {
        self.node.namespace.run(nat::all_elements).unwrap()
    }

    fn pod(&self, number: usize) -> &Namespace {
        &self.pods[number].namespace
    }

    /// Detaches all pods, and checks that nothing is left.
    fn end(self) {
        for pod in &self.pods {
            self.node.del(pod).success();
        }
        let pods: Vec<&Pod> = self.pods.iter().collect();
        Snapshot::take(&self.node, &pods).unwrap().assert_nothing_is_left();
        assert!(self.node.namespace.run(nat::shape).unwrap().is_empty(), "the table is there");
    }
}

/// Returns the address that a server there sees of a client that connects to `to`; `None`: the client does not reach
/// it.
fn seen(server: &Namespace, there: SocketAddr, client: &Namespace, to: SocketAddr) -> Option<IpAddr> {
    // A process that another test starts has a copy of the earlier listener until it executes.
    let mut bound = None;
    let is_bound = || {
        bound = server.run(|| TcpListener::bind(there)).ok();
        bound.is_some()
    };
    assert!(eventually(PATIENCE, is_bound), "nobody else listens at {there}");
    let listener = bound.unwrap();
    listener.set_nonblocking(true).unwrap();
    let _stream = opened(client, to, PATIENCE).ok()?;
    listener.accept().ok().map(|(_, peer)| peer.ip())
}
