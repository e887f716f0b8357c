//! The path of a packet in the agent's log, with an object that was built for it.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr, UdpSocket};

use netattach_tests::manifest::{NAMESPACE, network, pod, policy};
use netattach_tests::other_programs::index_of;
use netattach_tests::tools;
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, datagram, echoed, eventually};
use netattach_tests::{Node, Pod};
use serde_json::json;

use crate::bandwidth::host_end;

const OBJECT: &str = "netattach-log.bpf.o";

/// Returns the log's lines about packets.
fn said_of_packets(log: &str) -> BTreeSet<&str> {
    log.lines().filter_map(|line| Some(line.split_once("netattach::packet: ")?.1)).collect()
}

#[test]
fn the_path_of_a_packet_is_logged_for_one_attachment_and_no_more_by_the_next_agent() {
    let test = "the path of a packet in the log";
    let Some(objects) = tools::directory(test, "NETATTACH_BPF_LOG", &[OBJECT]) else { return };
    let mut node = Node::new(&[]).unwrap();
    let storage = json!({"cniVersion": "1.0.0", "type": "veth", "capabilities": {"ips": true},
                         "ipam": node.host_local(&["10.51.0.0/24", "fd00:51::/64"])});
    node.write("storage", &network(NAMESPACE, "storage", &storage)).unwrap();
    for (name, ips) in
        [("server", ["10.51.0.2/24", "fd00:51::2/64"]), ("client", ["10.51.0.3/24", "fd00:51::3/64"])]
    {
        let asked = json!([{"name": "storage", "ips": ips}]);
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
    let open6: SocketAddr = "[fd00:51::2]:80".parse().unwrap();
    let _open = [open, open6].map(|address| Echo::serve(&server.namespace, address).unwrap());
    assert!(datagram(&client.namespace, open, PATIENCE).unwrap());
    assert_eq!(said_of_packets(&node.stop().unwrap()), BTreeSet::new(), "the usual object logs nothing");

    node.set("bpfLog", json!("trace"));
    node.set("bpfLogObject", json!(objects.join(OBJECT)));
    node.set("bpfLogOf", json!("shop/server/net1"));
    node.start().unwrap();
    let [socket, socket6] = ["10.51.0.3", "fd00:51::3"].map(|own| {
        let own: IpAddr = own.parse().unwrap();
        client.namespace.run(|| UdpSocket::bind((own, 4711))).unwrap()
    });
    socket6.connect(open6).unwrap();
    assert!(echoed(&socket6, b"ping", PATIENCE));
    socket.connect(open).unwrap();
    assert!(echoed(&socket, b"ping", PATIENCE));
    let said = |text: &str| node.log_so_far().contains(text);
    // The agent inspects the node first, and the node resolves the addresses of both.
    let fast = "fast path: to attachment=shop/client/net1";
    let is_fast = || echoed(&socket, b"ping", PATIENCE) && said(fast);
    assert!(eventually(PATIENCE * 4, is_fast), "{}", node.log_so_far());
    socket.connect(closed).unwrap();
    assert!(!echoed(&socket, b"ping", SILENCE));
    assert!(eventually(PATIENCE, || said("verdict: dropped, reason=ingress-port")), "{}", node.log_so_far());
    // On the fast path, a packet reaches the pod at the end of its sender's link.
    let [at_server, at_client] = ["shop/server", "shop/client"]
        .map(|name| index_of(&node.namespace, &host_end(&node, name, "storage")).unwrap());
    let log = node.stop().unwrap();
    let said = said_of_packets(&log);
    // Four bytes, with the headers of Ethernet, IP and UDP.
    let [arrived, arrived6] = [(46, "800"), (66, "86dd")].map(|(bytes, ethertype)| {
        format!("attachment=shop/server/net1 to the pod: {bytes} bytes, ethertype {ethertype}, at device ")
    });
    for arrived in [arrived, arrived6] {
        let devices = [at_server, at_client].map(|device| said.contains(&*format!("{arrived}{device}")));
        assert!(devices.contains(&true), "{arrived}{at_server} or {at_client}:\n{log}");
    }
    let sent = format!("from the pod: 46 bytes, ethertype 800, at device {at_server}");
    for expected in [
        &*sent,
        fast,
        "headers: fd00:51::3 port 4711 to fd00:51::2 port 80, protocol 17",
        "headers: fd00:51::2 port 80 to fd00:51::3 port 4711, protocol 17",
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
    // Packets that maintain the link are judged too.
    let is_verdict = |line: &&str| line.starts_with("attachment=shop/server/net1 verdict: ");
    assert!(said_of_packets(&log).iter().all(is_verdict), "verdicts alone: {log}");

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
