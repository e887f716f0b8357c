//! The path of a packet in the agent's log, with an object that was built for it.

use std::collections::BTreeSet;
use std::net::{SocketAddr, UdpSocket};

use netattach_tests::manifest::{NAMESPACE, network, pod, policy};
use netattach_tests::tools;
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, datagram, echoed, eventually};
use netattach_tests::{Node, Pod};
use serde_json::json;

const OBJECT: &str = "netattach-log.bpf.o";

/// What the log says of packets.
fn said_of_packets(log: &str) -> BTreeSet<&str> {
    log.lines().filter_map(|line| Some(line.split_once("netattach::packet: ")?.1)).collect()
}

#[test]
fn the_path_of_a_packet_is_logged_for_one_attachment_and_no_more_by_the_next_agent() {
    let test = "the path of a packet in the log";
    let Some(objects) = tools::directory(test, "NETATTACH_BPF_LOG", &[OBJECT]) else { return };
    let mut node = Node::new(&[]).unwrap();
    let storage = json!({"cniVersion": "1.0.0", "type": "veth", "capabilities": {"ips": true},
                         "ipam": node.host_local(&["10.51.0.0/24"])});
    node.write("storage", &network(NAMESPACE, "storage", &storage)).unwrap();
    for (name, address) in [("server", "10.51.0.2/24"), ("client", "10.51.0.3/24")] {
        let asked = json!([{"name": "storage", "ips": [address]}]);
        node.write(name, &pod(name, &json!({"app": name}), &asked)).unwrap();
    }
    let web = json!({"podSelector": {"matchLabels": {"app": "server"}}, "policyTypes": ["Ingress"],
                     "ingress": [{"ports": [{"protocol": "UDP", "port": 80}]}]});
    node.write("web", &policy("web", "storage", &web)).unwrap();
    node.start().unwrap();
    let [server, client] = ["server", "client"].map(|name| {
        let pod = Pod::new(name).unwrap();
        node.add(&pod).success();
        pod
    });
    let [open, closed] = [80, 81].map(|port| SocketAddr::from(([10, 51, 0, 2], port)));
    let _open = Echo::serve(&server.namespace, open).unwrap();
    assert!(datagram(&client.namespace, open, PATIENCE).unwrap());
    assert_eq!(said_of_packets(&node.stop().unwrap()), BTreeSet::new(), "the usual object logs nothing");

    node.set("bpfLog", json!("trace"));
    node.set("bpfLogObject", json!(objects.join(OBJECT)));
    node.set("bpfLogOf", json!("shop/server/net1"));
    node.start().unwrap();
    let socket = client.namespace.run(|| UdpSocket::bind(("10.51.0.3", 4711))).unwrap();
    socket.connect(open).unwrap();
    assert!(echoed(&socket, b"ping", PATIENCE));
    socket.connect(closed).unwrap();
    assert!(!echoed(&socket, b"ping", SILENCE));
    let said = |text: &str| node.log_so_far().contains(text);
    assert!(eventually(PATIENCE, || said("verdict: dropped")), "{}", node.log_so_far());
    let log = node.stop().unwrap();
    let said = said_of_packets(&log);
    for expected in [
        "headers: 10.51.0.3 port 4711 to 10.51.0.2 port 80, protocol 17",
        "flow: none",
        "policy: allowed, rule 1",
        "flow: entered",
        "verdict: passes",
        "headers: 10.51.0.2 port 80 to 10.51.0.3 port 4711, protocol 17",
        "sender: accepted",
        "flow: goes on",
        "headers: 10.51.0.3 port 4711 to 10.51.0.2 port 81, protocol 17",
        "policy: denied, reason=ingress-port",
        "verdict: dropped, reason=ingress-port",
    ] {
        assert!(said.contains(&*format!("attachment=shop/server/net1 {expected}")), "{expected}:\n{log}");
    }
    let others = said.iter().filter(|line| !line.starts_with("attachment=shop/server/net1 "));
    assert_eq!(others.count(), 0, "{log}");

    node.set("bpfLog", json!("debug"));
    node.start().unwrap();
    socket.connect(open).unwrap();
    assert!(echoed(&socket, b"ping", PATIENCE));
    let passes = "attachment=shop/server/net1 verdict: passes";
    assert!(eventually(PATIENCE, || node.log_so_far().contains(passes)), "{}", node.log_so_far());
    let log = node.stop().unwrap();
    assert_eq!(said_of_packets(&log), BTreeSet::from([passes]), "verdicts alone");

    node.set("bpfLog", json!("off"));
    node.start().unwrap();
    assert!(echoed(&socket, b"ping", PATIENCE));
    assert!(!datagram(&client.namespace, closed, SILENCE).unwrap());
    assert_eq!(said_of_packets(&node.stop().unwrap()), BTreeSet::new(), "the usual object is back");

    node.set("bpfLog", json!("trace"));
    node.set("bpfLogObject", json!(objects.join("netattach.bpf.o")));
    let refusal = node.start().unwrap_err().to_string();
    let expected =
        "this BPF object does not log packets: build the one that does with `cargo xtask build-ebpf --log`";
    assert!(refusal.contains(expected), "{refusal}");
}
