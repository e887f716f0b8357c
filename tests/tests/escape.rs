//! What a pod with every capability over its own namespace tries in order to get past checks and policies: raw
//! frames from packet sockets, devices, filters and queueing disciplines of its own.
#![expect(clippy::unwrap_used, reason = "a test reports by panicking")]

use std::process::Command;

use netattach::mac::Mac;
use netattach_tests::manifest::{NAMESPACE, network, pod, policy};
use netattach_tests::node::{DEFAULT_NETWORK, WIRE, ip};
use netattach_tests::packet::{Packet, arp_request};
use netattach_tests::raw::RawSocket;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{PATIENCE, SILENCE, eventually};
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};

/// Somebody else's MAC address.
const STRANGER: Mac = Mac([0x02, 0, 0, 0, 0x66, 0x66]);
/// The only port that the attacker's policy allows, and one that it does not.
const ALLOWED: u16 = 7;
const DENIED: u16 = 9;
/// How many bytes at the end of a frame are enough to know it again: routers change those before.
const TAIL: usize = 12;

/// A network that both pods are on, as the attacker's interface has it.
struct Link {
    network: &'static str,
    device: &'static str,
    own: Mac,
    /// Where frames to the victim have to go.
    next: Mac,
    v4: [&'static str; 2],
    v6: [&'static str; 2],
}

impl Link {
    /// From the attacker to the victim, with the right addresses.
    fn v4(&self) -> Packet {
        Packet::between(self.v4[0], self.v4[1]).from_mac(self.own)
    }

    fn v6(&self) -> Packet {
        Packet::between(self.v6[0], self.v6[1]).from_mac(self.own)
    }

    fn towards_the_victim(&self, mut frame: Vec<u8>) -> Vec<u8> {
        frame[..6].copy_from_slice(&self.next.0);
        frame
    }

    /// ARP of the attacker's interface that says these are its addresses.
    fn arp(&self, mac: Mac, address: &str) -> Vec<u8> {
        let mut frame = arp_request(mac, address, self.v4[1]);
        frame[6..12].copy_from_slice(&self.own.0);
        frame
    }
}

struct Scene {
    node: Node,
    attacker: Pod,
    victim: Pod,
}

impl Scene {
    /// An attacker who may send nothing but datagrams to port [`ALLOWED`], on a bridge and on a routed veth.
    fn new() -> Self {
        let mut node = Node::new(&[]).unwrap();
        let storage = json!({"cniVersion": "1.0.0", "type": "veth", "ipam": node.host_local(&["10.51.0.0/24", "fd00:51::/64"])});
        node.write("storage", &network(NAMESPACE, "storage", &storage)).unwrap();
        for name in ["attacker", "victim"] {
            node.write(name, &pod(name, &json!({"app": name}), &json!("storage"))).unwrap();
        }
        let spec = json!({
            "podSelector": {"matchLabels": {"app": "attacker"}},
            "policyTypes": ["Egress"],
            "egress": [{"ports": [{"protocol": "UDP", "port": ALLOWED}]}]
        });
        let both = format!("{DEFAULT_NETWORK}, {NAMESPACE}/storage");
        node.write("policy", &policy("attacker", &both, &spec)).unwrap();
        node.start().unwrap();
        let [attacker, victim] = ["attacker", "victim"].map(|name| {
            let pod = Pod::new(name).unwrap();
            node.add(&pod).success();
            pod
        });
        Self { node, attacker, victim }
    }

    fn links(&self) -> [Link; 2] {
        let rows = self.node.ctl(&["attachments"]).unwrap();
        let of = |pod: &str, network: &str| {
            let mut rows = rows.as_array().unwrap().iter();
            rows.find(|row| row["pod"]["name"] == pod && row["network"] == network).unwrap()
        };
        let mac = |row: &Value| row["mac"].as_str().unwrap().parse::<Mac>().unwrap();
        let host = of("attacker", "shop/storage")["host_interface"].as_str().unwrap();
        let snapshot = Snapshot::take(&self.node, &[]).unwrap();
        [
            Link {
                network: DEFAULT_NETWORK,
                device: "eth0",
                own: mac(of("attacker", DEFAULT_NETWORK)),
                next: mac(of("victim", DEFAULT_NETWORK)),
                v4: ["10.50.0.2", "10.50.0.3"],
                v6: ["fd00:50::2", "fd00:50::3"],
            },
            Link {
                network: "shop/storage",
                device: "net1",
                own: mac(of("attacker", "shop/storage")),
                next: snapshot.node.links[host].mac.unwrap(),
                v4: ["10.51.0.2", "10.51.0.3"],
                v6: ["fd00:51::2", "fd00:51::3"],
            },
        ]
    }

    /// How many of the attacker's packets were dropped for a reason.
    fn dropped(&self, network: &str, reason: &str) -> u64 {
        let stats = self.node.ctl(&["stats", "--pod", "shop/attacker", "--network", network]).unwrap();
        stats[0]["dropped"][reason].as_u64().unwrap_or(0)
    }

    /// Sends a frame, and returns once it was dropped for this reason.
    fn blocked(&self, link: &Link, what: &str, socket: &RawSocket, frame: &[u8], reason: &str) {
        let before = self.dropped(link.network, reason);
        socket.send(frame).unwrap_or_else(|error| panic!("{}: {what}: {error:#}", link.network));
        let counted = || self.dropped(link.network, reason) > before;
        assert!(eventually(PATIENCE, counted), "{}: {what}: not dropped as {reason}", link.network);
    }

    fn end(self) {
        for pod in [&self.attacker, &self.victim] {
            self.node.del(pod).success();
        }
        Snapshot::take(&self.node, &[&self.attacker, &self.victim]).unwrap().assert_nothing_is_left();
    }
}

fn attacker_runs(pod: &Pod, program: &str, words: &[String]) {
    let output = pod.namespace.run(|| Command::new(program).args(words).output()).unwrap();
    assert!(output.status.success(), "{program} {words:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Sends frames one after another, each until its drop is counted, then one that is allowed; of all of them only
/// that one comes to the victim. Ports of origin tell the frames apart.
fn only_the_allowed_arrives(
    scene: &Scene,
    link: &Link,
    device: &str,
    frames: &[(&str, Vec<u8>, &str)],
    port: u16,
) {
    let victim = RawSocket::open(&scene.victim.namespace, link.device).unwrap();
    let attacker = RawSocket::open(&scene.attacker.namespace, device).unwrap();
    for (what, frame, reason) in frames {
        scene.blocked(link, what, &attacker, frame, reason);
    }
    let allowed = link.towards_the_victim(link.v4().udp(port, ALLOWED).frame());
    RawSocket::open(&scene.attacker.namespace, link.device).unwrap().send(&allowed).unwrap();
    let tail = |frame: &[u8]| frame[frame.len() - TAIL..].to_vec();
    let seen = victim.frames_until(&tail(&allowed), PATIENCE).unwrap();
    let came = |frame: &[u8]| seen.iter().any(|seen| seen.ends_with(&tail(frame)));
    assert!(came(&allowed), "{}: the allowed datagram does not arrive", link.network);
    let escaped: Vec<&str> =
        frames.iter().filter(|(_, frame, _)| came(frame)).map(|(what, ..)| *what).collect();
    assert_eq!(escaped, Vec::<&str>::new(), "{}", link.network);
}

/// Rows: C88.
#[test]
fn raw_frames_past_the_queueing_discipline_are_judged_like_all_others() {
    let scene = Scene::new();
    for link in &scene.links() {
        let towards = |packet: Packet| link.towards_the_victim(packet.frame());
        let spoofed4 = format!("{}7", link.v4[0]);
        let spoofed6 = format!("{}7", link.v6[0]);
        let padding = [0, 1, 4, 0, 0, 0, 0];
        let nine = (0..9).fold(link.v6(), |packet, _| packet.extension(60, &padding));
        let frames = [
            ("a denied port", towards(link.v4().udp(1001, DENIED)), "egress-port"),
            ("a denied port, IPv6", towards(link.v6().udp(1002, DENIED)), "egress-port"),
            ("another MAC", towards(link.v4().from_mac(STRANGER).udp(1003, ALLOWED)), "source-mac"),
            (
                "another IPv4",
                towards(Packet::between(&spoofed4, link.v4[1]).from_mac(link.own).udp(1004, ALLOWED)),
                "source-ipv4",
            ),
            (
                "another IPv6",
                towards(Packet::between(&spoofed6, link.v6[1]).from_mac(link.own).udp(1005, ALLOWED)),
                "source-ipv6",
            ),
            ("ARP for another address", link.arp(link.own, &spoofed4), "arp-sender-ip"),
            ("ARP with another MAC", link.arp(STRANGER, link.v4[0]), "arp-sender-mac"),
            (
                "an advertisement of another address",
                towards(link.v6().neighbour(136, &spoofed6, &[(2, link.own)])),
                "nd-target",
            ),
            (
                "an advertisement with another MAC",
                towards(link.v6().neighbour(136, link.v6[0], &[(2, STRANGER)])),
                "nd-link-layer",
            ),
            ("a VLAN tag", towards(link.v4().tagged(5).udp(1006, ALLOWED)), "vlan-tagged"),
            ("two VLAN tags", towards(link.v4().tagged(5).tagged(6).udp(1007, ALLOWED)), "vlan-tagged"),
            (
                "a first fragment without ports",
                towards(link.v4().fragment(0, true).payload(17, &[0x11; 4])),
                "frag-tiny",
            ),
            (
                "a fragment without its first",
                towards(link.v4().identification(77).fragment(9, false).payload(17, &[0x22; 16])),
                "frag-miss",
            ),
            (
                "a denied port behind an extension header",
                towards(link.v6().extension(60, &padding).udp(1008, DENIED)),
                "egress-port",
            ),
            ("nine extension headers", towards(nine.udp(1009, ALLOWED)), "extension-headers"),
        ];
        only_the_allowed_arrives(&scene, link, link.device, &frames, 2000);
    }
    scene.end();
}

#[test]
fn devices_and_filters_of_the_pods_own_open_no_way_out() {
    let scene = Scene::new();
    for link in &scene.links() {
        // Blanks part words, underscores are blanks inside one.
        let run = |program: &str, words: &str| {
            let words: Vec<String> = words.split(' ').map(|word| word.replace('_', " ")).collect();
            attacker_runs(&scene.attacker, program, &words);
        };
        let device = link.device;
        let denied = |port| {
            let frame = link.towards_the_victim(link.v4().udp(port, DENIED).frame());
            [("a denied port", frame, "egress-port")]
        };

        // Macvlans on the pod's interface, one on the other: all speak through it, and with the wrong address.
        run("ip", &format!("link add link {device} name mv0 up type macvlan mode bridge"));
        run("ip", &format!("link add link mv0 name mv1 address {STRANGER} up type macvlan mode bridge"));
        let from_mv = link.towards_the_victim(link.v4().from_mac(STRANGER).udp(1001, ALLOWED).frame());
        only_the_allowed_arrives(&scene, link, "mv1", &[("macvlan", from_mv, "source-mac")], 2001);
        only_the_allowed_arrives(&scene, link, "mv1", &denied(1002), 2002);
        run("ip", "link del mv1");
        run("ip", "link del mv0");

        // A program of the pod's own that is done with every packet before anybody else, and no filters at all.
        run("tc", &format!("qdisc add dev {device} clsact"));
        for hook in ["ingress", "egress"] {
            let accept = "bpf bytecode 1,6_0_0_4294967295 flowid 1:1";
            run("tc", &format!("filter add dev {device} {hook} prio 1 {accept}"));
        }
        only_the_allowed_arrives(&scene, link, device, &denied(1004), 2004);
        run("tc", &format!("qdisc del dev {device} clsact"));
        only_the_allowed_arrives(&scene, link, device, &denied(1005), 2005);

        run("ip", &format!("link set {device} down"));
        run("ip", &format!("link set {device} name away up"));
        let renamed = denied(1006);
        let socket = RawSocket::open(&scene.attacker.namespace, "away").unwrap();
        scene.blocked(link, "renamed", &socket, &renamed[0].1, "egress-port");
        run("ip", "link set away down");
        run("ip", &format!("link set away name {device} up"));
        only_the_allowed_arrives(&scene, link, device, &renamed, 2006);
    }
    scene.end();
}

#[test]
fn a_device_that_the_pod_makes_in_place_of_its_own_leads_nowhere() {
    let scene = Scene::new();
    for link in &scene.links() {
        let victim = RawSocket::open(&scene.victim.namespace, link.device).unwrap();
        let device = link.device;
        ip(&scene.attacker.namespace, &["link", "del", device]).unwrap();
        ip(&scene.attacker.namespace, &["link", "add", device, "up", "type", "veth", "peer", "name", "x0"])
            .unwrap();
        ip(&scene.attacker.namespace, &["link", "set", device, "address", &link.own.to_string()]).unwrap();
        ip(&scene.attacker.namespace, &["link", "set", "x0", "up"]).unwrap();
        let own = RawSocket::open(&scene.attacker.namespace, device).unwrap();
        let other_end = RawSocket::open(&scene.attacker.namespace, "x0").unwrap();
        let frame = link.towards_the_victim(link.v4().udp(1001, ALLOWED).frame());
        let tail = &frame[frame.len() - TAIL..];
        own.send(&frame).unwrap();
        let arrived = |socket: &RawSocket, patience| {
            socket.frames_until(tail, patience).unwrap().iter().any(|seen| seen.ends_with(tail))
        };
        assert!(arrived(&other_end, PATIENCE), "{}: the pod's own end sees it", link.network);
        assert!(!arrived(&victim, SILENCE), "{}", link.network);
        ip(&scene.attacker.namespace, &["link", "del", device]).unwrap();
    }
    scene.end();
}

/// Nothing is enforced on a macvlan, selected by a policy or not, and that is told.
#[test]
fn a_macvlan_is_shown_as_not_enforced() {
    let mut node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    let lan = json!({"cniVersion": "1.0.0", "type": "macvlan", "master": WIRE, "ipam": node.host_local(&["10.52.0.0/24"])});
    node.write("lan", &network(NAMESPACE, "lan", &lan)).unwrap();
    node.write("attacker", &pod("attacker", &json!({"app": "attacker"}), &json!("lan"))).unwrap();
    let both = format!("{DEFAULT_NETWORK}, {NAMESPACE}/lan");
    let nothing = json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]});
    node.write("policy", &policy("nothing", &both, &nothing)).unwrap();
    node.start().unwrap();
    let attacker = Pod::new("attacker").unwrap();
    node.add(&attacker).success();

    let rows = node.ctl(&["attachments"]).unwrap();
    let shown: Vec<(&Value, &Value)> =
        rows.as_array().unwrap().iter().map(|row| (&row["network"], &row["enforcement"])).collect();
    let [default, lan, host, none] = [DEFAULT_NETWORK, "shop/lan", "host", "none"].map(Value::from);
    assert_eq!(shown, [(&default, &host), (&lan, &none)]);
    node.del(&attacker).success();
    Snapshot::take(&node, &[&attacker]).unwrap().assert_nothing_is_left();
}
