//! The wire leads to a router, and the node's default route there.

use std::net::UdpSocket;

use netattach::mac::Mac;
use netattach::spec::TcHook;
use netattach_tests::other_programs::{Verdict, attach_filter, tc, tcx_programs};
use netattach_tests::packet::Packet;
use netattach_tests::raw::RawSocket;
use netattach_tests::traffic::{SILENCE, assert_transfers_whole};

use super::*;

fn scene(settings: &[(&str, Value)], change: impl FnOnce(Value) -> Value) -> Scene {
    let scene = Scene::new(settings, change);
    for (own, far, pods, bits) in
        [("192.0.2.1", "192.0.2.2", "10.50.0.0/24", 24), ("2001:db8::1", "2001:db8::2", "fd00:50::/64", 64)]
    {
        let nodad = if own.contains(':') { " nodad" } else { "" };
        scene.node("ip", &format!("addr add {own}/{bits} dev {WIRE}{nodad}"));
        scene.outside(&format!("addr add {far}/{bits} dev {FAR}{nodad}"));
        scene.node("ip", &format!("route add default via {far}"));
        scene.outside(&format!("route add {pods} via {own}"));
    }
    scene
}

fn links(mut config: Value) -> Value {
    let ipam = config["ipam"].take();
    json!({"cniVersion": "1.0.0", "type": "veth", "isDefaultGateway": true, "ipam": ipam})
}

const FAST: Ways = Ways { received: EXCHANGES, sent: EXCHANGES };

impl Scene {
    /// The node resolves the addresses of both ends first.
    fn await_fast(&self, family: usize) {
        self.await_standing("on");
        let all_fast = || self.exchange(family) == FAST;
        assert!(eventually(PATIENCE, all_fast), "{:#}", self.row("stats"));
    }

    /// Adds a pod with a macvlan on the wire.
    fn add_neighbour(&self) -> Pod {
        let neighbour = Pod::new("neighbour").unwrap();
        self.node.add(&neighbour).success();
        neighbour
    }

    fn assert_transfers_whole(&self) {
        assert_transfers_whole(&self.outside, self.addresses[0]);
        assert_eq!(self.row("stats")["dropped"], json!({}));
    }
}

#[test]
fn traffic_with_the_wire_takes_the_fast_path_both_ways_one_hop_on() {
    let scene = scene(&[], links);
    for family in [0, 1] {
        scene.await_fast(family);
    }
    scene.assert_transfers_whole();
    // With two hops left it arrives, and with one the node answers.
    let hops = |left, patience| {
        let socket = scene.outside.run(|| UdpSocket::bind("0.0.0.0:0")).unwrap();
        socket.connect(scene.addresses[0]).unwrap();
        socket.set_read_timeout(Some(patience)).unwrap();
        socket.set_ttl(left).unwrap();
        socket.send(b"hops").unwrap();
        socket.recv(&mut [0; 16]).is_ok()
    };
    let before = scene.left_to_stack("hop-limit");
    assert!(hops(2, PATIENCE));
    assert!(!hops(1, SILENCE));
    assert_eq!(scene.left_to_stack("hop-limit") - before, 1);
    scene.end();
}

#[test]
fn a_gateways_pods_are_routed_to_and_from_the_wire() {
    let scene = scene(&[], |config| config);
    for family in [0, 1] {
        scene.await_fast(family);
    }
    scene.assert_transfers_whole();
    scene.end();
}

#[test]
fn what_the_node_would_do_besides_keeps_packets_on_its_stack() {
    let scene = scene(&[], links);
    scene.await_fast(0);
    // Rules for IP packets apply to all devices: the pods are off the fast path, and the wire with them.
    scene.node("iptables", "-A FORWARD -p sctp -j DROP");
    scene.await_standing("");
    assert_eq!(scene.exchange(0), STACK);
    scene.node("iptables", "-F");
    scene.node("iptables", "-X");
    scene.await_fast(0);

    scene.node("ip", "xfrm policy add src 198.51.100.0/24 dst 198.51.100.0/24 dir out action block");
    scene.await_standing("");
    assert_eq!(scene.exchange(0), STACK);
    scene.node("ip", "xfrm policy flush");
    scene.await_fast(0);

    let _ = tc(&scene.node.namespace, &format!("qdisc add dev {WIRE} clsact"));
    attach_filter(&scene.node.namespace, WIRE, true, 2, Verdict::Next).unwrap();
    scene.await_standing("programs");
    assert_eq!(scene.exchange(0), STACK);
    tc(&scene.node.namespace, &format!("filter del dev {WIRE} ingress prio 2")).unwrap();
    scene.await_fast(0);

    scene.node("ip", "route del default");
    scene.node("ip", "-6 route del default");
    scene.await_standing("");
    assert_eq!(scene.exchange(0), STACK);
    scene.node("ip", "route add default via 192.0.2.2");
    scene.await_fast(0);
    scene.node.del(&scene.server).success();
    // In mode clsact, deleting the qdisc has removed the program.
    let _ = tc(&scene.node.namespace, &format!("qdisc del dev {WIRE} clsact"));
    scene.end();
}

/// A parent treats frames with a pod's socket as foreign, unless they pass the stack, which removes the socket.
#[test]
fn an_uplink_that_is_a_parent_is_left_by_the_stack() {
    for attach in ["auto", "clsact", "tcx"] {
        let scene = scene(&[("attach", json!(attach))], links);
        scene.await_fast(0);
        let neighbour = scene.add_neighbour();
        let received_only = || scene.exchange(0) == Ways { received: EXCHANGES, sent: 0 };
        assert!(eventually(PATIENCE, received_only), "{attach}: {:#}", scene.row("stats"));
        scene.assert_transfers_whole();
        scene.node.del(&neighbour).success();
        scene.await_fast(0);
        scene.end();
    }
}

/// A packet that a macvlan parent drops is not forwarded by the uplink on the same device, in either order of
/// attachment.
#[test]
fn an_uplink_that_is_a_parent_judges_macvlans_before_it_passes_on() {
    let scene = scene(&[("attach", json!("tcx"))], links);
    scene.await_fast(0);
    let index = index_of(&scene.node.namespace, WIRE).unwrap();
    let programs = || tcx_programs(&scene.node.namespace, index, TcHook::Ingress).unwrap();
    assert_eq!(programs(), ["na_wire"]);
    let neighbour = scene.add_neighbour();
    const ALL: [&str; 3] = ["na_par_in_from", "na_par_in_to", "na_wire"];
    assert_eq!(programs(), ALL);

    let mac = |namespace, device| Network::of(namespace).unwrap().links[device].mac.unwrap();
    let (node, far) = (mac(&scene.node.namespace, WIRE), mac(&scene.outside, FAR));
    let spoofed = mac(&neighbour.namespace, "net1");
    let received = RawSocket::open(&scene.server.namespace, "eth0").unwrap();
    let sender = RawSocket::open(&scene.outside, FAR).unwrap();
    scene.node("ip", "-6 route del default");
    for attempt in 0..2 {
        let server = scene.addresses[0].ip().to_string();
        let frame = |source: Mac, port| {
            let mut frame = Packet::between("192.0.2.2", &server).from_mac(source).udp(port, 9).frame();
            frame[..6].copy_from_slice(&node.0);
            frame
        };
        // The datagram: routers change the bytes before it.
        let tail = |frame: &[u8]| frame[frame.len() - 12..].to_vec();
        let [dropped, passed] = [frame(spoofed, 1000 + attempt), frame(far, 2000 + attempt)];
        sender.send(&dropped).unwrap();
        sender.send(&passed).unwrap();
        let seen = received.frames_until(&tail(&passed), PATIENCE).unwrap();
        assert!(seen.iter().any(|frame| frame.ends_with(&tail(&passed))));
        assert!(!seen.iter().any(|frame| frame.ends_with(&tail(&dropped))), "attempt {attempt}");
        // Once more with an uplink's program that came last.
        scene.node("ip", "route del default");
        assert!(eventually(NOTICED, || programs() == ALL[..2]), "{:?}", programs());
        scene.node("ip", "route add default via 192.0.2.2");
        assert!(eventually(NOTICED, || programs() == ALL), "{:?}", programs());
    }
    scene.node.del(&neighbour).success();
    assert_eq!(programs(), ["na_wire"]);
    scene.end();
}

#[test]
fn ipsec_keeps_packets_of_a_gateway_on_the_stack() {
    let scene = scene(&[], |config| config);
    scene.await_fast(0);
    scene.node("ip", "xfrm policy add src 198.51.100.0/24 dst 198.51.100.0/24 dir out action block");
    scene.await_standing("ipsec");
    assert_eq!(scene.exchange(0), STACK);
    scene.node("ip", "xfrm policy flush");
    scene.await_fast(0);
    // Bridged frames do not meet the rules here; routed packets do.
    for family in ["iptables", "ip6tables"] {
        scene.node("sysctl", &format!("-qw net.bridge.bridge-nf-call-{family}=0"));
    }
    scene.node("iptables", "-A FORWARD -p sctp -j DROP");
    scene.await_standing("ip-rules");
    assert_eq!(scene.exchange(0), STACK);
    scene.end();
}

#[test]
fn the_nodes_routing_is_asked_about_every_packet() {
    let scene = scene(&[], links);
    scene.await_fast(0);
    let silent = || !datagram(&scene.outside, scene.addresses[0], Duration::from_millis(300)).unwrap();
    let IpAddr::V4(server) = scene.addresses[0].ip() else { panic!("the first address is IPv4") };
    scene.node("ip", &format!("rule add to {server} prohibit"));
    assert!(silent());
    scene.node("ip", &format!("rule del to {server} prohibit"));
    assert_eq!(scene.exchange(0), FAST);
    // Incoming packets, and the check that an answer would leave where the packet came in.
    for rule in [format!("to {server} ipproto udp dport 7"), format!("from {server} ipproto udp sport 7")] {
        scene.node("ip", &format!("rule add {rule} prohibit"));
        assert!(silent(), "{rule}");
        scene.node("ip", &format!("rule del {rule} prohibit"));
        assert_eq!(scene.exchange(0), FAST);
    }
    scene.node("sysctl", &format!("-qw net.ipv4.conf.{WIRE}.forwarding=0"));
    assert!(silent());
    scene.node("sysctl", &format!("-qw net.ipv4.conf.{WIRE}.forwarding=1"));
    assert_eq!(scene.exchange(0), FAST);

    // The stack judges a source to which answers would leave elsewhere.
    scene.node("ip", "link add elsewhere0 up type veth peer name elsewhere1");
    scene.node("ip", "route add 198.51.100.0/24 dev elsewhere0");
    scene.outside("addr add 198.51.100.9/32 dev lo");
    let before = (scene.left_to_stack("source"), scene.row("stats")["fast"].clone());
    let from = "198.51.100.9".parse().unwrap();
    let limit = Duration::from_millis(300);
    assert!(
        !netattach_tests::traffic::datagram_from(&scene.outside, from, scene.addresses[0], limit).unwrap()
    );
    let after = (scene.left_to_stack("source"), scene.row("stats")["fast"].clone());
    assert!(after.0 > before.0);
    assert_eq!(after.1, before.1);
    scene.node("ip", "link del elsewhere0");
    scene.end();
}

#[test]
fn what_does_not_fit_the_wire_is_for_the_node_to_answer() {
    let scene = scene(&[], links);
    scene.await_fast(0);
    let outside = Echo::serve(&scene.outside, "192.0.2.2:9".parse().unwrap()).unwrap();
    let socket = scene.server.namespace.run(|| UdpSocket::bind("0.0.0.0:0")).unwrap();
    socket.connect(outside.address()).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let echoed = |length: usize| {
        // The first send after the node's ICMP error fails with that error.
        let _ = socket.send(&vec![0; length]);
        socket.recv(&mut [0; 2000]).is_ok_and(|received| received == length)
    };
    assert!(eventually(PATIENCE, || echoed(1400)));
    scene.node("ip", &format!("link set {WIRE} mtu 1300"));
    scene.outside(&format!("link set {FAR} mtu 1300"));
    let before = scene.left_to_stack("too-big");
    assert!(!echoed(1400), "it cannot get there whole");
    assert!(scene.left_to_stack("too-big") > before);
    // The pod has learned the MTU, and fragments its packets.
    assert!(eventually(PATIENCE, || echoed(1400)));
    assert!(eventually(PATIENCE, || echoed(1200)));
    scene.end();
}
