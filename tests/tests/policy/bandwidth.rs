//! The bandwidth of an attachment, measured by real transfers.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::Ending;
use netattach_tests::{Namespace, Node, Pod};
use serde_json::{Value, json};

/// Bits per second, and the burst in bits: an eighth of a second's worth, as senders occasionally wait for a processor.
const RATE: u64 = 80_000_000;
const BURST: u64 = RATE / 8;
/// How long a transfer may use up its burst and settle, and then how long it is measured.
const SETTLE: Duration = Duration::from_secs(1);
const MEASURE: Duration = Duration::from_secs(4);
/// How long the receiver waits for data before it checks whether that is all.
const PATIENCE: Duration = Duration::from_millis(100);
/// Payload of a datagram.
const DATAGRAM: usize = 1400;

/// The size of payloads on the wire.
struct Wire {
    /// Header bytes, Ethernet included, of a packet and of each segment that it may still have to be cut into.
    headers: u64,
    /// Payload bytes of a full segment.
    segment: u64,
}

/// TCP with timestamps over IPv4.
const TCP: Wire = Wire { headers: 14 + 20 + 32, segment: 1448 };
const UDP: Wire = Wire { headers: 14 + 20 + 8, segment: DATAGRAM as u64 };

/// An interface's receive counters, and the times before and after reading them.
struct Reading {
    before: Instant,
    after: Instant,
    bytes: u64,
    packets: u64,
}

impl Reading {
    /// Must run in the interface's namespace.
    fn take(interface: &str) -> Self {
        let before = Instant::now();
        let counters = fs::read_to_string("/proc/thread-self/net/dev").unwrap();
        let after = Instant::now();
        let prefix = format!("{interface}:");
        let line = counters.lines().find_map(|line| line.trim_start().strip_prefix(&prefix)).unwrap();
        let mut numbers = line.split_whitespace().map(|number| number.parse().unwrap());
        let [bytes, packets] = [(); 2].map(|()| numbers.next().unwrap());
        Self { before, after, bytes, packets }
    }

    /// Lower and upper bound of the bits per second on the wire since an earlier reading.
    fn since(&self, earlier: &Self, wire: &Wire) -> (f64, f64) {
        let packets = self.packets - earlier.packets;
        // The kernel counts a packet that is not yet cut as one.
        let payload = self.bytes - earlier.bytes - packets * wire.headers;
        let bits = 8.0 * payload as f64 * (wire.segment + wire.headers) as f64 / wire.segment as f64;
        let longest = self.after.duration_since(earlier.before).as_secs_f64();
        let shortest = self.before.duration_since(earlier.after).as_secs_f64();
        (bits / longest, bits / shortest)
    }
}

/// Returns the receive rate of the pod's `interface` while `receive` empties the socket. Counted by the kernel, so
/// that a receiver that has to wait for its processor does not change the figure.
fn measured(
    interface: &str,
    wire: &Wire,
    stop: &AtomicBool,
    mut receive: impl FnMut() -> std::io::Result<usize>,
) -> (f64, f64) {
    let _ending = Ending(stop);
    let mut receive_for = |time| {
        let begun = Instant::now();
        while begun.elapsed() < time {
            match receive() {
                Err(error) if ![ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind()) => {
                    panic!("receive: {error}")
                }
                _ => {}
            }
        }
    };
    receive_for(SETTLE);
    let first = Reading::take(interface);
    receive_for(MEASURE);
    let last = Reading::take(interface);
    last.since(&first, wire)
}

/// One TCP stream.
fn tcp(from: &Pod, to: &Pod, interface: &str, address: SocketAddr) -> (f64, f64) {
    let stop = AtomicBool::new(false);
    let listener = to.namespace.run(|| TcpListener::bind(address).unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut stream = from.namespace.run(|| TcpStream::connect(address).unwrap());
            stream.set_write_timeout(Some(PATIENCE)).unwrap();
            let block = vec![0; 1 << 16];
            while !stop.load(Ordering::Relaxed) {
                // A full buffer is the effect of the limit; a receiver that is done resets the connection.
                let _ = stream.write(&block);
            }
        });
        let mut stream = listener.accept().unwrap().0;
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut buffer = vec![0; 1 << 18];
        to.namespace.run(|| measured(interface, &TCP, &stop, || stream.read(&mut buffer)))
    })
}

/// Datagrams, offered at twice the rate; a sender that had to wait for its processor catches up.
fn udp(from: &Pod, to: &Pod, interface: &str, address: SocketAddr) -> (f64, f64) {
    let stop = AtomicBool::new(false);
    let receiver = to.namespace.run(|| UdpSocket::bind(address).unwrap());
    receiver.set_read_timeout(Some(PATIENCE)).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let any: SocketAddr = "0.0.0.0:0".parse().unwrap();
            let sender = from.namespace.run(|| UdpSocket::bind(any).unwrap());
            sender.set_write_timeout(Some(PATIENCE)).unwrap();
            let pause = Duration::from_nanos((DATAGRAM as u64 * 8 * 1_000_000_000) / (2 * RATE));
            let (begun, mut sent) = (Instant::now(), 0u32);
            while !stop.load(Ordering::Relaxed) {
                if begun.elapsed() > pause * sent {
                    let _ = sender.send_to(&[0; DATAGRAM], address);
                    sent += 1;
                } else {
                    // A thread that slept gets a processor sooner than one that waited by spinning.
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        });
        let mut buffer = vec![0; 2048];
        to.namespace.run(|| measured(interface, &UDP, &stop, || receiver.recv(&mut buffer)))
    })
}

/// The token bucket at the root of a device, as `tc` shows it.
fn token_bucket(namespace: &Namespace, device: &str) -> Option<Value> {
    let words = ["-json", "qdisc", "show", "dev", device, "root"];
    let output = namespace.run(|| Command::new("tc").args(words).output()).unwrap();
    assert!(output.status.success(), "{output:?}");
    let shown: Value = serde_json::from_slice(&output.stdout).unwrap();
    let root = &shown[0];
    (root["kind"] == "tbf").then(|| root["options"].clone())
}

fn remove_queue(namespace: &Namespace, device: &str) {
    let words = ["qdisc", "del", "dev", device, "root"];
    assert!(namespace.run(|| Command::new("tc").args(words).status()).unwrap().success());
}

/// Name of the node's end of a pod's attachment.
pub(crate) fn host_end(node: &Node, pod: &str, network: &str) -> String {
    let shown = node.ctl(&["attachments", "--pod", pod, "--network", network]).unwrap();
    shown[0]["host_interface"].as_str().unwrap_or_else(|| panic!("{shown:#}")).to_owned()
}

/// Returns a node with a limited pod and an unlimited one. By annotation on a veth: the pod's receive rate; by key on
/// a bridge: its send rate.
fn limited() -> (Node, [Pod; 2]) {
    let mut node = Node::new(&[]).unwrap();
    let veth = json!({"cniVersion": "1.0.0", "type": "veth", "capabilities": {"bandwidth": true},
                      "ipam": node.host_local(&["10.51.0.0/24"])});
    node.write("limited", &network(NAMESPACE, "limited", &veth)).unwrap();
    let bridge = json!({"cniVersion": "1.0.0", "type": "bridge", "bridge": "br1",
                        "bandwidth": {"egressRate": RATE, "egressBurst": BURST},
                        "ipam": node.host_local(&["10.52.0.0/24"])});
    node.write("by-key", &network(NAMESPACE, "by-key", &bridge)).unwrap();
    let bandwidth = json!({"ingressRate": RATE, "ingressBurst": BURST});
    let asked = json!([{"name": "limited", "bandwidth": bandwidth}, {"name": "by-key"}]);
    node.write("slow", &pod("slow", &json!({}), &asked)).unwrap();
    node.write("fast", &pod("fast", &json!({}), &json!("limited, by-key"))).unwrap();
    node.start().unwrap();
    let pods = ["slow", "fast"].map(|name| {
        let pod = Pod::new(name).unwrap();
        node.add(&pod).success();
        pod
    });
    (node, pods)
}

#[test]
fn tcp_and_udp_get_the_rate_that_was_asked_for_in_each_direction() {
    let (node, [slow, fast]) = limited();
    let address = |text: &str| text.parse::<SocketAddr>().unwrap();
    let cases = [
        ("TCP to the pod", tcp(&fast, &slow, "net1", address("10.51.0.2:5001"))),
        ("UDP to the pod", udp(&fast, &slow, "net1", address("10.51.0.2:5002"))),
        ("TCP from the pod", tcp(&slow, &fast, "net2", address("10.52.0.3:5003"))),
        ("UDP from the pod", udp(&slow, &fast, "net2", address("10.52.0.3:5004"))),
    ];
    for (what, (least, most)) in cases {
        let [least, most] = [least, most].map(|rate| rate / RATE as f64);
        eprintln!("{what}: {least:.3} to {most:.3} of what was asked");
        assert!(least <= 1.05 && most >= 0.95, "{what}: {least:.3} to {most:.3} of what was asked");
    }
    // A pod that removes its own shaping is policed.
    remove_queue(&slow.namespace, "net2");
    let (least, _) = udp(&slow, &fast, "net2", address("10.52.0.3:5005"));
    assert!(least <= 1.05 * RATE as f64, "{:.3} of what was asked", least / RATE as f64);
    let dropped = node.ctl(&["stats", "--pod", "shop/slow", "--network", "limited"]).unwrap();
    assert!(dropped[0]["dropped"]["rate-limit"].as_u64().unwrap() > 0, "{dropped:#}");
    for pod in [&slow, &fast] {
        node.del(pod).success();
    }
    Snapshot::take(&node, &[&slow, &fast]).unwrap().assert_nothing_is_left();
}

#[test]
fn both_ends_are_paced_as_asked_and_the_nodes_end_is_put_right() {
    let (mut node, [slow, fast]) = limited();
    let (limited, by_key) =
        (host_end(&node, "shop/slow", "shop/limited"), host_end(&node, "shop/slow", "shop/by-key"));
    // In addition to the burst, 25 ms and a packet of 64 KiB may wait; shown in microseconds, the burst in units of
    // 64 ns.
    let waiting = 25_000 + (64 << 10) * 1_000_000 / (RATE / 8);
    let assert_paced = |namespace: &Namespace, device: &str| {
        let shown = token_bucket(namespace, device).unwrap();
        let near = |key: &str, wanted: u64| shown[key].as_u64().unwrap().abs_diff(wanted) <= 1;
        assert!(shown["rate"] == RATE / 8 && near("burst", BURST / 8) && near("lat", waiting), "{shown:#}");
    };
    assert_paced(&node.namespace, &limited);
    assert_paced(&slow.namespace, "net2");
    for (namespace, device) in
        [(&node.namespace, by_key.as_str()), (&slow.namespace, "net1"), (&fast.namespace, "net1")]
    {
        assert_eq!(token_bucket(namespace, device), None, "{device}");
    }
    node.check(&slow).success();

    // A pod that removes its own shaping is policed; the loss is its own.
    remove_queue(&slow.namespace, "net2");
    node.check(&slow).success();
    remove_queue(&node.namespace, &limited);
    let (_, message) = node.check(&slow).failure();
    assert!(message.contains("does not send at the attachment's rate"), "{message}");
    node.kill().unwrap();
    node.start().unwrap();
    node.check(&slow).success();
    assert_paced(&node.namespace, &limited);
    for pod in [&slow, &fast] {
        node.del(pod).success();
    }
    Snapshot::take(&node, &[&slow, &fast]).unwrap().assert_nothing_is_left();
}
