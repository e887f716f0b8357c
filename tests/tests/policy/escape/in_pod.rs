//! A device that was moved into the pod: programs run there, and a pod with all capabilities over its network can
//! bypass them in some ways. The tests assert these ways, which the attachment's enforcement level reports.

use std::os::fd::AsFd;

use netattach::bpf::sys;
use netattach::spec::TcHook;
use netattach_tests::privilege::load_pass_everything;
use netattach_tests::wires::{BEYOND, Wires, install};
use netattach_tests::{Namespace, tools};
use rustix::thread::CapabilitySet;

use super::*;

const DEVICE: &str = "net1";
const OWN: &str = "10.60.0.2";
const OWN_V6: &str = "fd00:60::2";
/// An unassigned address, in either family.
const FORGED: [&str; 2] = ["10.60.0.77", "fd00:60::77"];

/// The outcome of an attack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// The frame is dropped for this reason.
    Blocked(&'static str),
    /// It arrives: the attachment's level is not `full`.
    NotEnforceable,
}
use Outcome::{Blocked, NotEnforceable};

struct Alone {
    node: Node,
    wires: Wires,
    attacker: Pod,
    /// Every frame that leaves by the attacker's wire.
    beyond: RawSocket,
    mac: Mac,
}

impl Alone {
    /// An attacker who may only send datagrams to port [`ALLOWED`], by a device of the node.
    fn new(test: &str, capabilities: &Value) -> Option<Self> {
        let names = ["host-device", "static"];
        let from = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &names)?;
        let mut node = Node::new(&[]).unwrap();
        install(&node, &from, &names).unwrap();
        let wires = Wires::new(&node, &["card"]).unwrap();
        node.write("wire", &network(NAMESPACE, "wire", &Wires::config("card", 2))).unwrap();
        let mut attacker = pod("attacker", &json!({"app": "attacker"}), &json!("wire"));
        attacker["spec"]["containers"][0]["securityContext"] = json!({"capabilities": capabilities});
        node.write("attacker", &attacker).unwrap();
        let spec = json!({
            "podSelector": {}, "policyTypes": ["Egress"], "egress": [{"ports": [{"protocol": "UDP", "port": ALLOWED}]}]
        });
        node.write("policy", &policy("attacker", "shop/wire", &spec)).unwrap();
        // Putting the programs back does not make them enforceable.
        node.start().unwrap();
        let attacker = Pod::new("attacker").unwrap();
        node.add(&attacker).success();
        let beyond = RawSocket::open(&wires.beyond, "to-card").unwrap();
        let mac = row(&node)["mac"].as_str().unwrap().parse().unwrap();
        Some(Self { node, wires, attacker, beyond, mac })
    }

    fn packet(&self) -> Packet {
        Packet::between(OWN, BEYOND[0]).from_mac(self.mac)
    }

    fn packet_v6(&self) -> Packet {
        Packet::between(OWN_V6, BEYOND[1]).from_mac(self.mac)
    }

    fn dropped(&self, reason: &str) -> u64 {
        let stats = self.node.ctl(&["stats"]).unwrap();
        let rows = stats.as_array().unwrap().iter().filter(|row| row["ifname"] == DEVICE);
        rows.map(|row| row["dropped"][reason].as_u64().unwrap_or(0)).sum()
    }

    /// Sends a frame by a device of the attacker's, and returns once its outcome is known.
    fn outcome(&self, device: &str, bypass: bool, frame: &[u8], expected: Outcome) -> Outcome {
        let open = || RawSocket::open(&self.attacker.namespace, device);
        let socket =
            if bypass { open() } else { RawSocket::queued(&self.attacker.namespace, device) }.unwrap();
        match expected {
            Blocked(reason) => {
                let before = self.dropped(reason);
                socket.send(frame).unwrap();
                let counted = eventually(PATIENCE, || self.dropped(reason) > before);
                let arrived = self.beyond.frames().unwrap().iter().any(|seen| seen.ends_with(tail(frame)));
                if counted && !arrived { expected } else { NotEnforceable }
            }
            NotEnforceable => {
                socket.send(frame).unwrap();
                let seen = self.beyond.frames_until(tail(frame), PATIENCE).unwrap();
                let arrived = seen.iter().any(|seen| seen.ends_with(tail(frame)));
                if arrived { NotEnforceable } else { Blocked("before it arrived") }
            }
        }
    }

    fn run(&self, program: &str, words: &str) {
        let words: Vec<String> = words.split(' ').map(|word| word.replace('_', " ")).collect();
        let run = || with_only(OVER_THE_NETWORK, || Ok(Command::new(program).args(&words).output()?));
        let output = self.attacker.namespace.run(run).unwrap();
        assert!(output.status.success(), "{program} {words:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

fn tail(frame: &[u8]) -> &[u8] {
    &frame[frame.len() - TAIL..]
}

fn row(node: &Node) -> Value {
    let rows = node.ctl(&["attachments"]).unwrap();
    let mut rows = rows.as_array().unwrap().iter();
    rows.find(|row| row["ifname"] == DEVICE).unwrap().clone()
}

/// Runs a program of the attacker's own before all others of the device.
fn take_precedence(namespace: &Namespace, kept: CapabilitySet) -> anyhow::Result<Vec<std::os::fd::OwnedFd>> {
    namespace.run(|| {
        with_only(kept, || {
            let program = load_pass_everything()?;
            let socket = std::net::UdpSocket::bind("[::]:0")?;
            let index = rustix::net::netdevice::name_to_index(&socket, DEVICE)?;
            let attach = |direction| Ok(sys::tcx_attach(program.as_fd(), index, direction, None)?);
            [TcHook::Egress, TcHook::Ingress].map(attach).into_iter().collect()
        })
    })
}

/// Rows: C88.
#[test]
fn of_the_attacks_on_programs_in_the_pod_two_are_not_enforceable_and_the_level_says_so() {
    let test = "of_the_attacks_on_programs_in_the_pod_two_are_not_enforceable";
    let Some(scene) = Alone::new(test, &json!({"add": ["NET_ADMIN", "NET_RAW", "BPF"]})) else { return };
    let told = row(&scene.node);
    assert_eq!(told["enforcement"], "full-unless-privileged");
    assert_eq!(
        told["enforcement_detail"],
        "programs run in the pod, and its container main has CAP_NET_ADMIN"
    );
    let (packet, packet_v6) = (|| scene.packet(), || scene.packet_v6());
    let denied = |port| packet().udp(port, DENIED).frame();
    let forged = Packet::between(FORGED[0], BEYOND[0]).from_mac(scene.mac).udp(104, ALLOWED).frame();
    let mut found = Vec::new();
    let mut attack = |name, device: &str, bypass, frame: &[u8], expected| {
        found.push((name, scene.outcome(device, bypass, frame, expected), expected));
    };
    attack("a denied port", DEVICE, false, &denied(101), Blocked("egress-port"));
    attack("1 past the queueing discipline", DEVICE, true, &denied(102), NotEnforceable);
    scene.run("ip", &format!("link add link {DEVICE} name mv0 up type macvlan mode bridge"));
    let stranger = packet().from_mac(STRANGER).udp(103, ALLOWED).frame();
    attack("2 a macvlan on the device", "mv0", true, &stranger, Blocked("source-mac"));
    scene.run("ip", "link del mv0");
    attack("3 another MAC address", DEVICE, false, &stranger, Blocked("source-mac"));
    attack("4 another address", DEVICE, false, &forged, Blocked("source-ipv4"));
    let mut arp = arp_request(scene.mac, FORGED[0], BEYOND[0]);
    arp[6..12].copy_from_slice(&scene.mac.0);
    attack("5 ARP for another address", DEVICE, false, &arp, Blocked("arp-sender-ip"));
    let advertised = packet_v6().neighbour(136, FORGED[1], &[(2, scene.mac)]).frame();
    attack("6 neighbour discovery for another address", DEVICE, false, &advertised, Blocked("nd-target"));
    let tagged = packet().tagged(5).udp(107, ALLOWED).frame();
    attack("7 a VLAN tag", DEVICE, false, &tagged, Blocked("vlan-tagged"));
    let fragment = packet().identification(77).fragment(9, false).payload(17, &[0x22; 16]).frame();
    attack("8 a fragment without its first", DEVICE, false, &fragment, Blocked("frag-miss"));
    let behind = packet_v6().extension(60, &[0, 1, 4, 0, 0, 0, 0]).udp(109, DENIED).frame();
    attack("9 a denied port behind an extension header", DEVICE, false, &behind, Blocked("egress-port"));
    scene.run("ip", &format!("link set {DEVICE} down"));
    scene.run("ip", &format!("link set {DEVICE} name away up"));
    attack("10 the device under another name", "away", false, &denied(110), Blocked("egress-port"));
    scene.run("ip", "link set away down");
    scene.run("ip", &format!("link set away name {DEVICE} up"));
    scene.run("tc", &format!("qdisc add dev {DEVICE} clsact"));
    scene.run("tc", &format!("qdisc del dev {DEVICE} clsact"));
    attack("11 without queueing disciplines", DEVICE, false, &denied(111), Blocked("egress-port"));
    let links = take_precedence(&scene.attacker.namespace, OVER_THE_NETWORK).unwrap();
    attack(
        "12 a program that passes everything before all others",
        DEVICE,
        false,
        &denied(112),
        NotEnforceable,
    );
    drop(links);
    attack("and without it again", DEVICE, false, &denied(113), Blocked("egress-port"));
    let surprises: Vec<_> = found.iter().filter(|(_, outcome, expected)| outcome != expected).collect();
    assert!(surprises.is_empty(), "{surprises:?}");
    let passed: Vec<&str> =
        found.iter().filter(|(_, outcome, _)| *outcome == NotEnforceable).map(|(name, ..)| *name).collect();
    let expected =
        ["1 past the queueing discipline", "12 a program that passes everything before all others"];
    assert_eq!(passed, expected);
    scene.end();
}

/// Rows: C88.
#[test]
fn a_pod_without_capabilities_over_its_network_has_none_of_these_ways() {
    let test = "a_pod_without_capabilities_over_its_network_has_none_of_these_ways";
    let Some(scene) = Alone::new(test, &json!({"drop": ["ALL"]})) else { return };
    let told = row(&scene.node);
    assert_eq!((&told["enforcement"], told.get("enforcement_detail")), (&json!("full"), None));
    let refused = |work: &(dyn Fn() -> anyhow::Result<()> + Sync)| {
        let tried = scene.attacker.namespace.run(|| with_only(CapabilitySet::empty(), work));
        let error = tried.unwrap_err();
        error
            .downcast_ref::<std::io::Error>()
            .and_then(std::io::Error::raw_os_error)
            .or_else(|| error.downcast_ref::<rustix::io::Errno>().map(|errno| errno.raw_os_error()))
    };
    let raw = || RawSocket::open_here(DEVICE, libc::ETH_P_ALL as u16).map(drop);
    assert_eq!(refused(&raw), Some(libc::EPERM));
    let program = || load_pass_everything().map(drop).map_err(Into::into);
    assert_eq!(refused(&program), Some(libc::EPERM));
    scene.end();
}

impl Alone {
    fn end(self) {
        self.node.del(&self.attacker).success();
        ip(&self.node.namespace, &["link", "del", "card"]).unwrap();
        drop(self.wires);
        Snapshot::take(&self.node, &[&self.attacker]).unwrap().assert_nothing_is_left();
    }
}
