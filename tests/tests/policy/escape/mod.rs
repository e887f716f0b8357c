//! Attempts of a pod with every capability over its own namespace to bypass checks and policies: raw frames from
//! packet sockets, devices, filters and queueing disciplines of its own. On each kind of link: a bridge's port, a
//! routed veth, a macvlan, a device that was moved into the pod.
//!
//! By means: `raw` frames, connections of loose `segments`, `devices` of the pod, among them `ifb`, and links
//! `on_node`, `forwarding` for others. For links with further possibilities: `macvlan`, `in_pod`. From devices
//! without programs: `others`.

mod devices;
mod forwarding;
mod ifb;
mod in_pod;
mod macvlan;
mod on_node;
mod others;
mod raw;
mod segments;

use std::process::Command;

use netattach::mac::Mac;
use netattach::plan::ethertypes::ETHERTYPES_ANNOTATION;
use netattach_tests::manifest::{NAMESPACE, annotated, network, pod, policy};
use netattach_tests::node::{DEFAULT_NETWORK, WIRE, ip};
use netattach_tests::packet::{Packet, any_frame, arp_request, dhcp};
use netattach_tests::privilege::{OVER_THE_NETWORK, with_only};
use netattach_tests::raw::{RawSocket, sum_at};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, eventually};
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};

/// Another station's MAC address.
const STRANGER: Mac = Mac([0x02, 0, 0, 0, 0x66, 0x66]);
/// The only port that the attacker's policy allows, and one that it denies.
const ALLOWED: u16 = 7;
const DENIED: u16 = 9;
/// The number of bytes at the end of a frame that identify it: routers change the bytes before.
const TAIL: usize = 12;

/// A network that both pods are on, as the attacker's interface sees it.
struct Link {
    network: &'static str,
    device: &'static str,
    own: Mac,
    /// The next hop's MAC address for frames to the victim.
    next: Mac,
    v4: [&'static str; 2],
    v6: [&'static str; 2],
    /// The drop reason for a frame from [`STRANGER`].
    strange: &'static str,
}

impl Link {
    /// From the attacker to the victim, with the right addresses.
    fn v4(&self) -> Packet {
        Packet::between(self.v4[0], self.v4[1]).from_mac(self.own)
    }

    fn is_macvlan(&self) -> bool {
        self.network == "shop/lan"
    }

    fn v6(&self) -> Packet {
        Packet::between(self.v6[0], self.v6[1]).from_mac(self.own)
    }

    fn towards_the_victim(&self, mut frame: Vec<u8>) -> Vec<u8> {
        frame[..6].copy_from_slice(&self.next.0);
        frame
    }

    /// ARP from the attacker's interface that claims these addresses.
    fn arp(&self, mac: Mac, address: &str) -> Vec<u8> {
        let mut frame = arp_request(mac, address, self.v4[1]);
        frame[6..12].copy_from_slice(&self.own.0);
        frame
    }
}

/// Frames that reached a pod, after all programs: on a macvlan those run at the device's own ingress, for copies of
/// group frames, so each ethertype has its socket there.
struct Witness(Vec<RawSocket>);

impl Witness {
    fn of(pod: &Pod, link: &Link) -> Self {
        const JUDGED: [i32; 5] =
            [libc::ETH_P_IP, libc::ETH_P_IPV6, libc::ETH_P_ARP, libc::ETH_P_8021Q, libc::ETH_P_8021AD];
        let all = [libc::ETH_P_ALL];
        let ethertypes: &[i32] = if link.is_macvlan() { &JUDGED } else { &all };
        let open =
            |ethertype: &i32| RawSocket::open_for(&pod.namespace, link.device, *ethertype as u16).unwrap();
        Self(ethertypes.iter().map(open).collect())
    }

    /// The frames received so far that were not returned before.
    fn frames(&self) -> Vec<Vec<u8>> {
        self.0.iter().flat_map(|socket| socket.frames().unwrap()).collect()
    }

    /// The frames received up to one that ends in these bytes, which is of the first ethertype.
    fn frames_until(&self, end: &[u8]) -> Vec<Vec<u8>> {
        let mut seen = self.0[0].frames_until(end, PATIENCE).unwrap();
        for other in &self.0[1..] {
            seen.extend(other.frames().unwrap());
        }
        seen
    }
}

struct Scene {
    node: Node,
    attacker: Pod,
    victim: Pod,
}

impl Scene {
    /// An attacker who may only send datagrams to port [`ALLOWED`], on a bridge, on a routed veth and on a macvlan.
    fn new() -> Self {
        Self::with(&[])
    }

    /// With these settings of the agent.
    fn with(settings: &[(&str, Value)]) -> Self {
        let spec = json!({
            "podSelector": {"matchLabels": {"app": "attacker"}},
            "policyTypes": ["Egress"],
            "egress": [{"ports": [{"protocol": "UDP", "port": ALLOWED}]}]
        });
        Self::under(settings, "attacker", &spec)
    }

    /// With a policy of another pod.
    fn under(settings: &[(&str, Value)], selected: &str, spec: &Value) -> Self {
        let mut node = Node::new(&[]).unwrap();
        for (key, value) in settings {
            node.set(key, value.clone());
        }
        node.add_wire().unwrap();
        let lan = json!({"cniVersion": "1.0.0", "type": "macvlan", "master": WIRE, "ipam": node.host_local(&["10.52.0.0/24", "fd00:52::/64"])});
        let lan = annotated(network(NAMESPACE, "lan", &lan), ETHERTYPES_ANNOTATION, "0x88b6");
        node.write("lan", &lan).unwrap();
        let storage = json!({"cniVersion": "1.0.0", "type": "veth", "ipam": node.host_local(&["10.51.0.0/24", "fd00:51::/64"])});
        node.write("storage", &network(NAMESPACE, "storage", &storage)).unwrap();
        for name in ["attacker", "victim"] {
            node.write(name, &pod(name, &json!({"app": name}), &json!("storage, lan"))).unwrap();
        }
        let all = format!("{DEFAULT_NETWORK}, {NAMESPACE}/storage, {NAMESPACE}/lan");
        node.write("policy", &policy(selected, &all, spec)).unwrap();
        node.start().unwrap();
        let [attacker, victim] = ["attacker", "victim"].map(|name| {
            let pod = Pod::new(name).unwrap();
            node.add(&pod).success();
            pod
        });
        Self { node, attacker, victim }
    }

    fn links(&self) -> [Link; 3] {
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
                strange: "source-mac",
            },
            Link {
                network: "shop/storage",
                device: "net1",
                own: mac(of("attacker", "shop/storage")),
                next: snapshot.node.links[host].mac.unwrap(),
                v4: ["10.51.0.2", "10.51.0.3"],
                v6: ["fd00:51::2", "fd00:51::3"],
                strange: "source-mac",
            },
            Link {
                network: "shop/lan",
                device: "net2",
                own: mac(of("attacker", "shop/lan")),
                next: mac(of("victim", "shop/lan")),
                v4: ["10.52.0.2", "10.52.0.3"],
                v6: ["fd00:52::2", "fd00:52::3"],
                strange: "stranger",
            },
        ]
    }

    /// Number of the attacker's packets dropped for a reason, including those without an attachment.
    fn dropped(&self, network: &str, reason: &str) -> u64 {
        self.dropped_at("attacker", network, reason)
    }

    /// [`Scene::dropped`] for another pod.
    fn dropped_at(&self, pod: &str, network: &str, reason: &str) -> u64 {
        let stats = self.node.ctl(&["stats"]).unwrap();
        let of = |row: &&Value| row["id"] == 0 || (row["pod"]["name"] == pod && row["network"] == network);
        let rows = stats.as_array().unwrap().iter().filter(of);
        rows.map(|row| row["dropped"][reason].as_u64().unwrap_or(0)).sum()
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

/// Runs `work` in the attacker's namespace, with every capability over networks and no other.
fn as_attacker<T: Send>(scene: &Scene, work: impl FnOnce() -> anyhow::Result<T> + Send) -> T {
    scene.attacker.namespace.run(|| with_only(OVER_THE_NETWORK, work)).unwrap()
}

/// A socket of the attacker's.
fn attackers_socket(scene: &Scene, device: &str) -> RawSocket {
    as_attacker(scene, || RawSocket::open_here(device, libc::ETH_P_ALL as u16))
}

/// Runs a program as the attacker. Blanks separate arguments, underscores stand for blanks inside one.
fn attacker_runs(scene: &Scene, program: &str, words: &str) {
    let words: Vec<String> = words.split(' ').map(|word| word.replace('_', " ")).collect();
    let output = as_attacker(scene, || Ok(Command::new(program).args(&words).output()?));
    assert!(output.status.success(), "{program} {words:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Sends frames one after another, each until its drop is counted, then one that is allowed; only that one reaches
/// the victim. Source ports distinguish the frames.
fn only_the_allowed_arrives(
    scene: &Scene,
    link: &Link,
    device: &str,
    frames: &[(&str, Vec<u8>, &str)],
    port: u16,
) {
    let victim = Witness::of(&scene.victim, link);
    let attacker = attackers_socket(scene, device);
    for (what, frame, reason) in frames {
        scene.blocked(link, what, &attacker, frame, reason);
    }
    let allowed = link.towards_the_victim(link.v4().udp(port, ALLOWED).frame());
    attackers_socket(scene, link.device).send(&allowed).unwrap();
    let tail = |frame: &[u8]| frame[frame.len() - TAIL..].to_vec();
    let seen = victim.frames_until(&tail(&allowed));
    let came = |frame: &[u8]| seen.iter().any(|seen| seen.ends_with(&tail(frame)));
    assert!(came(&allowed), "{}: the allowed datagram does not arrive", link.network);
    let escaped: Vec<&str> =
        frames.iter().filter(|(_, frame, _)| came(frame)).map(|(what, ..)| *what).collect();
    assert_eq!(escaped, Vec::<&str>::new(), "{}", link.network);
}
