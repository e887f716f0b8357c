//! Flow records, from the packet to `netattachctl flows`, and after their pod is gone.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use netattach::mac::Mac;
use netattach::npwg::STATUS_ANNOTATION;
use netattach_tests::manifest::{NAMESPACE, annotated, network, pod, policy};
use netattach_tests::node::{DEFAULT_NETWORK, executable};
use netattach_tests::packet::{Packet, tcp};
use netattach_tests::raw::RawSocket;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, connect, connects, datagram, eventually};
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};

/// `netattachctl flows --follow` while it runs, and the lines that it has written.
struct Follower {
    child: Child,
    lines: Arc<Mutex<Vec<Value>>>,
}

impl Follower {
    fn start(node: &Node, filters: &[&str]) -> Self {
        let mut child = Command::new(executable("netattachctl").unwrap())
            .arg("--socket")
            .arg(node.socket())
            .args(["-o", "json", "flows", "--follow"])
            .args(filters)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = Arc::new(Mutex::new(Vec::new()));
        let (stdout, written) = (child.stdout.take().unwrap(), Arc::clone(&lines));
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                written.lock().unwrap().push(serde_json::from_str(&line).unwrap());
            }
        });
        Self { child, lines }
    }

    /// Waits until the lines are enough; returns all that were written.
    fn lines(&self, enough: impl Fn(&[Value]) -> bool) -> Vec<Value> {
        let come = eventually(PATIENCE, || {
            std::thread::sleep(SILENCE / 10);
            enough(&self.lines.lock().unwrap())
        });
        let lines = self.lines.lock().unwrap().clone();
        assert!(come, "{lines:#?}");
        lines
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        // An error of a process that has ended by itself was reported already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A server that accepts TCP to port 80 from all peers on `storage`, and a client.
fn scene() -> (Node, [Pod; 2]) {
    let mut node = Node::new(&[]).unwrap();
    let storage = json!({"cniVersion": "1.0.0", "type": "veth", "capabilities": {"ips": true},
                         "ipam": node.host_local(&["10.51.0.0/24"])});
    node.write("storage", &network(NAMESPACE, "storage", &storage)).unwrap();
    for (name, address) in [("server", "10.51.0.2/24"), ("client", "10.51.0.3/24")] {
        let asked = json!([{"name": "storage", "ips": [address]}]);
        node.write(name, &pod(name, &json!({"app": name}), &asked)).unwrap();
    }
    let web = json!({"podSelector": {"matchLabels": {"app": "server"}}, "policyTypes": ["Ingress"],
                     "ingress": [{"ports": [{"protocol": "TCP", "port": 80}]}]});
    node.write("web", &policy("web", "storage", &web)).unwrap();
    node.start().unwrap();
    let pods = ["server", "client"].map(|name| {
        let pod = Pod::new(name).unwrap();
        node.add(&pod).success();
        pod
    });
    (node, pods)
}

fn at(port: u16) -> SocketAddr {
    SocketAddr::from(([10, 51, 0, 2], port))
}

/// The fields of a line that do not differ from run to run.
fn told(line: &Value) -> Value {
    let pod =
        format!("{}/{}", line["pod"]["namespace"].as_str().unwrap(), line["pod"]["name"].as_str().unwrap());
    json!([
        pod,
        line["network"],
        line["direction"],
        line["verdict"],
        line["reason"],
        line["protocol"],
        line["destination_port"]
    ])
}

#[test]
fn records_arrive_while_somebody_follows_and_filters_hold() {
    let (node, [server, client]) = scene();
    let everything = Follower::start(&node, &[]);
    let of_pod = Follower::start(&node, &["--pod", "shop/server"]);
    let of_another = Follower::start(&node, &["--pod", "shop/client"]);
    let of_another_network = Follower::start(&node, &["--network", "kube-system/default"]);
    let drops = Follower::start(&node, &["--verdict", "dropped", "--network", "shop/storage"]);
    let opened = Follower::start(&node, &["--verdict", "allowed"]);
    let by_port = Follower::start(&node, &["--reason", "ingress-port"]);
    let by_peer = Follower::start(&node, &["--reason", "ingress-peer"]);
    let echo = Echo::serve(&server.namespace, at(80)).unwrap();
    drop(connect(&client.namespace, at(80), PATIENCE).unwrap());
    assert!(!connects(&client.namespace, at(81), SILENCE));
    let here = ["shop/server", "shop/storage", "to-pod"];
    let line = |rest: &[Value]| {
        Value::Array(here.iter().map(|word| json!(word)).chain(rest.iter().cloned()).collect())
    };
    let flow = line(&[json!("allowed"), Value::Null, json!("tcp"), json!(80)]);
    let refused = line(&[json!("dropped"), json!("ingress-port"), json!("tcp"), json!(81)]);
    let both = |lines: &[Value]| {
        let told: Vec<_> = lines.iter().map(told).collect();
        told.contains(&flow) && told.contains(&refused)
    };
    everything.lines(both);
    of_pod.lines(both);
    for (follower, expected) in [(&drops, &refused), (&by_port, &refused), (&opened, &flow)] {
        let lines = follower.lines(|lines| !lines.is_empty());
        // An unanswered connection attempt is repeated.
        assert!(lines.iter().all(|line| told(line) == *expected), "{lines:#?}");
    }
    for nobody in [&of_another, &of_another_network, &by_peer] {
        assert_eq!(*nobody.lines.lock().unwrap(), Vec::<Value>::new());
    }

    // A flood of drops: the attachment's share is recorded, and the rest is counted.
    let socket = client.namespace.run(|| UdpSocket::bind("0.0.0.0:0").unwrap());
    for _ in 0..1000 {
        socket.send_to(b"x", at(9)).unwrap();
    }
    let dropped = |lines: &[Value]| lines.iter().filter(|line| line["destination_port"] == 9).count() as u64;
    let withheld = |lines: &[Value]| lines.iter().filter_map(|line| line["withheld"].as_u64()).sum::<u64>();
    let lines = of_pod.lines(|lines| dropped(lines) + withheld(lines) >= 1000);
    assert_eq!(dropped(&lines) + withheld(&lines), 1000, "each is told or counted");
    assert!(dropped(&lines) >= 100 && withheld(&lines) > 0, "{} told", dropped(&lines));
    assert_eq!(withheld(&of_another.lines.lock().unwrap()), 0, "another pod's are not its affair");
    drop(echo);
    for pod in [&server, &client] {
        node.del(pod).success();
    }
    Snapshot::take(&node, &[&server, &client]).unwrap().assert_nothing_is_left();
}

#[test]
fn the_flows_of_a_pod_end_with_it_and_what_they_were_is_told() {
    let (node, [server, client]) = scene();
    let follower = Follower::start(&node, &["--verdict", "ended"]);
    let echo = Echo::serve(&server.namespace, at(80)).unwrap();
    let connection = connect(&client.namespace, at(80), PATIENCE).unwrap();
    let local = connection.local_addr().unwrap();
    assert!(!datagram(&client.namespace, at(80), SILENCE).unwrap());
    node.del(&client).success();
    let lines = follower.lines(|lines| !lines.is_empty());
    let ended = &lines[0];
    assert_eq!(told(ended), json!(["shop/server", "shop/storage", "to-pod", "ended", "detached", "tcp", 80]));
    assert_eq!((&ended["source"], &ended["source_port"]), (&json!("10.51.0.3"), &json!(local.port())));
    // Handshake, four bytes and their acknowledgements; more after retransmissions.
    let packets = |way: &str| ended["ended"][way]["packets"].as_u64().unwrap();
    assert!((3..=20).contains(&packets("forward")) && (2..=20).contains(&packets("backward")), "{ended:#}");
    assert_eq!(lines.len(), 1, "{lines:#?}");
    let stats = node.ctl(&["stats", "--pod", "shop/server", "--network", "shop/storage"]).unwrap();
    assert_eq!(stats[0]["new_flows"], 1, "{stats:#}");
    let capacities = node.ctl(&["status"]).unwrap()["flows"].clone();
    assert_eq!(
        (&capacities[0]["family"], &capacities[0]["capacity"], &capacities[1]["capacity"]),
        (&json!("IPv4"), &json!(262_144), &json!(131_072))
    );
    drop((echo, connection));
    node.del(&server).success();
    Snapshot::take(&node, &[&server, &client]).unwrap().assert_nothing_is_left();
}

/// Returns a node where flows are kept, with pods `receiver` and `successor` that request the same address on
/// `storage`, and a running `sender` there, which may send only to receivers. One of these is on another node.
fn kept_scene() -> (Node, Pod) {
    let mut node = Node::new(&[]).unwrap();
    node.set("establishedOnChange", json!("keep"));
    let storage = json!({"cniVersion": "1.0.0", "type": "veth", "capabilities": {"ips": true},
                         "ipam": node.host_local(&["10.51.0.0/24"])});
    node.write("storage", &network(NAMESPACE, "storage", &storage)).unwrap();
    for (name, address) in [("receiver", 2), ("successor", 2), ("sender", 3)] {
        let asked = json!([{"name": "storage", "ips": [format!("10.51.0.{address}/24")]}]);
        node.write(name, &pod(name, &json!({"app": name}), &asked)).unwrap();
    }
    let elsewhere = pod("elsewhere", &json!({"app": "receiver"}), &Value::Null);
    let status = json!([{"name": "shop/storage", "interface": "net1", "ips": ["10.51.0.99"]}]).to_string();
    node.write("elsewhere", &annotated(elsewhere, STATUS_ANNOTATION, &status)).unwrap();
    let to_receivers = json!({"podSelector": {"matchLabels": {"app": "sender"}}, "policyTypes": ["Egress"],
                              "egress": [{"to": [{"podSelector": {"matchLabels": {"app": "receiver"}}}]}]});
    node.write("to-receivers", &policy("to-receivers", "storage", &to_receivers)).unwrap();
    node.start().unwrap();
    let sender = Pod::new("sender").unwrap();
    node.add(&sender).success();
    (node, sender)
}

/// Makes the sender send all the time, from one port, during `work`.
fn while_it_sends<T>(sender: &Pod, to: SocketAddr, work: impl FnOnce() -> T) -> T {
    let socket = sender.namespace.run(|| UdpSocket::bind("10.51.0.3:4000").unwrap());
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let began = Instant::now();
            while !is_over.load(Ordering::Relaxed) && began.elapsed() < 10 * PATIENCE {
                // Refused packets are ignored.
                let _ = socket.send_to(b"x", to);
            }
        });
        let done = work();
        is_over.store(true, Ordering::Relaxed);
        done
    })
}

/// A sender that continues while a pod is removed has no flow, kept or not, to the next pod with its address.
#[test]
fn a_kept_flow_does_not_outlive_the_pod_that_it_leads_to() {
    let (node, sender) = kept_scene();
    let [receiver, successor] = ["receiver", "successor"].map(|name| Pod::new(name).unwrap());
    let hears = |pod: &Pod, patience| {
        let socket = pod.namespace.run(|| UdpSocket::bind("0.0.0.0:9").unwrap());
        socket.set_read_timeout(Some(patience)).unwrap();
        socket.recv(&mut [0]).is_ok()
    };
    node.add(&receiver).success();
    let heard = while_it_sends(&sender, at(9), || {
        let before = hears(&receiver, PATIENCE);
        node.del(&receiver).success();
        node.add(&successor).success();
        [before, hears(&successor, SILENCE)]
    });
    assert_eq!(heard, [true, false]);
    for pod in [&successor, &sender] {
        node.del(pod).success();
    }
    Snapshot::take(&node, &[&receiver, &successor, &sender]).unwrap().assert_nothing_is_left();
}

#[test]
fn a_kept_flow_does_not_outlive_a_pod_of_another_node_either() {
    let (node, sender) = kept_scene();
    let told = |what: &dyn Fn(&Value) -> u64| {
        let stats = node.ctl(&["stats", "--pod", "shop/sender", "--network", "shop/storage"]).unwrap();
        what(&stats[0])
    };
    let opened = || told(&|row| row["new_flows"].as_u64().unwrap_or(0));
    let refused = || told(&|row| row["dropped"]["egress-peer"].as_u64().unwrap_or(0));
    let went = while_it_sends(&sender, SocketAddr::from(([10, 51, 0, 99], 9)), || {
        let was_open = eventually(PATIENCE, || opened() > 0) && refused() == 0;
        node.remove("elsewhere").unwrap();
        [was_open, eventually(PATIENCE, || refused() > 0)]
    });
    assert_eq!(went, [true, true]);
    node.del(&sender).success();
    Snapshot::take(&node, &[&sender]).unwrap().assert_nothing_is_left();
}

/// A flood from a pod, and one against a pod, on a node where only the table itself keeps a connection: packets of
/// flows missing from the table are dropped, and new flows are not limited.
#[test]
fn a_flood_costs_no_other_pod_a_connection() {
    let mut node = Node::new(&[]).unwrap();
    node.set("midstream", json!("drop"));
    node.set("newFlowsPerSecond", json!(0));
    let names = ["server", "client", "flooder", "stranger"];
    for name in names {
        let app = if name == "stranger" { "stranger" } else { "judged" };
        node.write(name, &pod(name, &json!({"app": app}), &json!([]))).unwrap();
    }
    let web = json!([{"ports": [{"protocol": "TCP", "port": 80}]}]);
    let spec = json!({"podSelector": {"matchLabels": {"app": "judged"}}, "policyTypes": ["Ingress", "Egress"],
                      "ingress": web, "egress": web});
    node.write("web", &policy("web", DEFAULT_NETWORK, &spec)).unwrap();
    node.start().unwrap();
    let pods = names.map(|name| {
        let pod = Pod::new(name).unwrap();
        node.add(&pod).success();
        pod
    });
    let [server, client, ..] = &pods;
    let address: SocketAddr = "10.50.0.2:80".parse().unwrap();
    let listener = server.namespace.run(|| TcpListener::bind(address)).unwrap();
    let mut idle = client.namespace.run(|| TcpStream::connect_timeout(&address, PATIENCE)).unwrap();
    idle.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut answering = listener.accept().unwrap().0;

    let rows = node.ctl(&["attachments"]).unwrap();
    let mac = |name: &str| {
        let mut rows = rows.as_array().unwrap().iter();
        let row = rows.find(|row| row["pod"]["name"] == name).unwrap();
        row["mac"].as_str().unwrap().parse::<Mac>().unwrap()
    };
    let displaced = |name: &str| {
        let stats = node.ctl(&["stats", "--pod", &format!("{NAMESPACE}/{name}")]).unwrap();
        stats[0]["flows_displaced"].as_u64().unwrap_or(0)
    };
    // A flow opened by a pod without policies belongs to the called pod.
    for (pod, own, pays) in [(&pods[2], "10.50.0.4", "flooder"), (&pods[3], "10.50.0.5", "server")] {
        let socket = RawSocket::open(&pod.namespace, "eth0").unwrap();
        for port in 1024..32_000 {
            let syn = Packet::between(own, "10.50.0.2").from_mac(mac(&pod.name)).tcp(port, 80, tcp::SYN);
            let mut frame = syn.frame();
            frame[..6].copy_from_slice(&mac("server").0);
            socket.send(&frame).unwrap();
        }
        assert!(eventually(PATIENCE, || displaced(pays) > 1000), "{pays}: {}", displaced(pays));
        assert_eq!(displaced("client"), 0);
        // Whichever end sends first.
        answering.write_all(b"x").unwrap();
        idle.read_exact(&mut [0]).unwrap();
        idle.write_all(b"x").unwrap();
        answering.read_exact(&mut [0]).unwrap();
    }
    drop((idle, answering, listener));
    for pod in &pods {
        node.del(pod).success();
    }
    Snapshot::take(&node, &pods.each_ref()).unwrap().assert_nothing_is_left();
}
