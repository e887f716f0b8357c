//! The fast path between pods and peers behind a device of the node: a veth stands for the wire.
//!
//! `switched`: the wire is a port of the pods' bridge; `routed`: it leads to a router. `xdp` tests the program in the
//! driver, `lifecycle` when the programs are attached and removed.

use std::net::{IpAddr, SocketAddr};
use std::process::Command;
use std::time::Duration;

use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::node::{WIRE, ip};
use netattach_tests::other_programs::index_of;
use netattach_tests::snapshot::{Network, Snapshot};
use netattach_tests::traffic::{Echo, PATIENCE, datagram, eventually};
use netattach_tests::{Namespace, Node, Pod};
use serde_json::{Value, json};

mod lifecycle;
mod routed;
mod switched;
mod xdp;

/// The agent's polling delay, for changes without notification.
const NOTICED: Duration = Duration::from_secs(60);
/// Number of datagrams exchanged to see which path they take.
const EXCHANGES: u64 = 5;
/// The other end of the wire.
const FAR: &str = "far0";

/// A pod with a server, and a peer behind a wire.
struct Scene {
    node: Node,
    server: Pod,
    outside: Namespace,
    /// The server's addresses, one per family.
    addresses: [SocketAddr; 2],
    _echoes: Vec<Echo>,
}

/// Paths of the packets since the last reading.
#[derive(Debug, PartialEq, Eq)]
struct Ways {
    /// Packets received by the fast path.
    received: u64,
    /// Packets sent by the fast path.
    sent: u64,
}

const STACK: Ways = Ways { received: 0, sent: 0 };

impl Scene {
    /// With the network changed, and with the wire added but not set up. There may be another pod, which has a
    /// macvlan on the wire.
    fn new(settings: &[(&str, Value)], change: impl FnOnce(Value) -> Value) -> Self {
        let mut node = Node::new(&[pod("server", &json!({"app": "server"}), &Value::Null)]).unwrap();
        for (key, value) in settings {
            node.set(key, value.clone());
        }
        node.write("default", &network("kube-system", "default", &change(node.default_config()))).unwrap();
        let lan = json!({
            "cniVersion": "1.0.0", "type": "macvlan", "master": WIRE,
            "ipam": node.host_local(&["198.51.100.0/24"])
        });
        node.write("lan", &network(NAMESPACE, "lan", &lan)).unwrap();
        node.write("neighbour", &pod("neighbour", &json!({}), &json!("lan"))).unwrap();
        node.start().unwrap();
        let server = Pod::new("server").unwrap();
        let result = node.add(&server).success();
        let addresses = [0, 1].map(|index| -> SocketAddr {
            let text = result["ips"][index]["address"].as_str().unwrap();
            (text.split('/').next().unwrap().parse::<IpAddr>().unwrap(), 7).into()
        });
        let echoes =
            addresses.iter().map(|address| Echo::serve(&server.namespace, *address).unwrap()).collect();
        let scene = Self { node, server, outside: Namespace::new().unwrap(), addresses, _echoes: echoes };
        let task = scene.outside.task();
        scene.node("ip", &format!("link add {WIRE} up type veth peer name {FAR} netns {task}"));
        scene.outside(&format!("link set {FAR} up"));
        scene
    }

    fn outside(&self, words: &str) {
        ip(&self.outside, &words.split(' ').collect::<Vec<_>>()).unwrap();
    }

    fn node(&self, program: &str, words: &str) {
        let run = || Command::new(program).args(words.split(' ')).output();
        let output = self.node.namespace.run(run).unwrap();
        assert!(output.status.success(), "{program} {words}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// The server's row in the output of `netattachctl`.
    fn row(&self, what: &str) -> Value {
        let rows = self.node.ctl(&[what, "--pod", &format!("{NAMESPACE}/server")]).unwrap();
        rows[0].clone()
    }

    /// The wire's state; empty: it is no uplink.
    fn standing(&self) -> String {
        let uplinks = self.node.ctl(&["status"]).unwrap()["uplinks"].clone();
        let wire = uplinks.as_array().unwrap().iter().find(|uplink| uplink["device"] == json!(WIRE)).cloned();
        wire.map(|wire| wire["state"].as_str().unwrap().to_owned()).unwrap_or_default()
    }

    fn await_standing(&self, wanted: &str) {
        let mut last = String::new();
        let stands = || {
            last = self.standing();
            last == wanted
        };
        assert!(eventually(NOTICED, stands), "the wire is {last:?}, not {wanted:?}");
    }

    fn answers(&self, family: usize) -> bool {
        datagram(&self.outside, self.addresses[family], PATIENCE).unwrap()
    }

    /// Exchanges datagrams with the server; returns their paths. A switched one may be shown to the bridge instead.
    fn exchange(&self, family: usize) -> Ways {
        let look = || {
            let stats = self.row("stats");
            let count = |value: &Value| value["packets"].as_u64().unwrap();
            let shown = stats["left_to_stack"]["learning"].as_u64().unwrap_or(0);
            (count(&stats["received"]), count(&stats["fast"]), count(&stats["fast_sent"]), shown)
        };
        let before = look();
        for _ in 0..EXCHANGES {
            assert!(self.answers(family));
        }
        let after = look();
        assert!(after.0 - before.0 >= EXCHANGES, "counted once each, beside what keeps the link going");
        let shown = (after.3 - before.3).min(1);
        let received = after.1 - before.1;
        Ways { received: if received == 0 { 0 } else { received + shown }, sent: after.2 - before.2 }
    }

    fn left_to_stack(&self, reason: &str) -> u64 {
        self.row("stats")["left_to_stack"].get(reason).map_or(0, |packets| packets.as_u64().unwrap())
    }

    /// Whether the program runs on the wire by a filter, and by a link.
    fn runs_by(&self) -> [bool; 2] {
        let links = Network::of(&self.node.namespace).unwrap().links;
        let by_filter = links[WIRE].programs.iter().any(|(_, name)| name == "na_wire");
        let index = index_of(&self.node.namespace, WIRE).unwrap();
        [by_filter, self.node.bpffs().join("link").join(format!("{index}_na_wire")).exists()]
    }

    /// Ends the test; checks that nothing of the fast path remains.
    fn end(self) {
        self.node.del(&self.server).success();
        Snapshot::take(&self.node, &[&self.server]).unwrap().assert_nothing_is_left();
        let output =
            self.node.namespace.run(|| Command::new("tc").args(["qdisc", "show", "dev", WIRE]).output());
        let disciplines = String::from_utf8(output.unwrap().stdout).unwrap();
        assert!(!disciplines.contains("clsact"), "{disciplines}");
        assert_eq!(self.node.ctl(&["status"]).unwrap()["uplinks"], json!([]));
    }
}
