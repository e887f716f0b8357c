//! Which hosts reach a pod by a port of the node, and which do not.

use std::net::UdpSocket;
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType, ipproto, sockopt};

use super::*;

fn tcp(host: u16, pod: u16) -> Value {
    json!({"hostPort": host, "containerPort": pod, "protocol": "tcp"})
}

#[test]
fn a_port_leads_to_its_pod_from_everywhere_and_takes_nothing_else() {
    for links in BOTH {
        let mut scene = Scene::new(links, &["web", "other"]);
        let (web, addresses) = scene.add("web", &json!([tcp(8080, 80)]));
        let (other, others) = scene.add("other", &json!([]));
        let (on_node, outside) = (&scene.node.namespace, &scene.outside);
        for family in [0, 1] {
            let what = format!("{links:?}, {}", NODE[family]);
            let there = SocketAddr::new(addresses[family], 80);
            let by = at(NODE[family], 8080);
            let look = |client: &Namespace, to| seen(scene.pod(web), there, client, to);
            // The outside host's address is not hidden.
            assert_eq!(look(outside, by), OUTSIDE[family].parse().ok(), "{what}: outside");
            assert!(look(on_node, by).is_some(), "{what}: node");
            assert!(look(scene.pod(web), by).is_some(), "{what}: the pod itself");
            let sibling = look(scene.pod(other), by);
            if links == Links::Routed {
                assert_eq!(sibling, Some(others[family]), "{what}: another pod");
            } else {
                assert!(sibling.is_some_and(|seen| seen != others[family]), "{what}: another pod");
            }
            // Traffic through the node to the same port.
            let beyond = at(OUTSIDE[family], 8080);
            assert!(seen(outside, beyond, scene.pod(other), beyond).is_some(), "{what}: transit out");
            let behind = SocketAddr::new(others[family], 8080);
            assert!(seen(scene.pod(other), behind, outside, behind).is_some(), "{what}: transit in");
            // Another port of the node.
            let own = at(NODE[family], 8081);
            assert!(seen(on_node, own, outside, own).is_some(), "{what}: the node's own port");
        }
        let loopback = at("127.0.0.1", 8080);
        let there = SocketAddr::new(addresses[0], 80);
        assert!(seen(scene.pod(web), there, on_node, loopback).is_some(), "{links:?}: loopback");
        scene.node.check(&scene.pods[web]).success();
        scene.end();
    }
}

#[test]
fn a_port_of_one_address_is_open_there_alone() {
    let mut scene = Scene::new(Links::Bridge, &["web"]);
    let mapping =
        |at: &str| json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": at}]);
    let (web, addresses) = scene.add("web", &mapping(NODE[0]));
    let there = SocketAddr::new(addresses[0], 80);
    let _echo = Echo::serve(scene.pod(web), there).unwrap();
    let from = |client: &Namespace, to: &str| connects(client, at(to, 8080), PATIENCE);
    assert!(from(&scene.outside, NODE[0]));
    // Refused at once: no process listens there.
    assert!(!from(&scene.outside, NODE[1]) && !from(&scene.node.namespace, "127.0.0.1"));
    let setting = "/proc/sys/net/ipv4/conf/br0/route_localnet";
    let opened = || scene.node.namespace.run(|| std::fs::read_to_string(setting)).unwrap();
    assert_eq!(opened(), "0\n", "not needed");
    scene.end();
}

/// `route_localnet`, which a port at the node's loopback needs, would let pods in.
#[test]
fn pods_do_not_reach_the_nodes_loopback() {
    let mut scene = Scene::new(Links::Bridge, &["web"]);
    let setting = "/proc/sys/net/ipv4/conf/br0/route_localnet";
    let (web, _) = scene.add("web", &json!([tcp(8080, 80)]));
    assert_eq!(scene.node.namespace.run(|| std::fs::read_to_string(setting)).unwrap(), "1\n");
    let _local = Echo::serve(&scene.node.namespace, at("127.0.0.1", 7000)).unwrap();
    ip(scene.pod(web), &["route", "add", "127.0.0.1", "via", "10.50.0.1"]).unwrap();
    let allow = || std::fs::write("/proc/sys/net/ipv4/conf/eth0/route_localnet", "1");
    scene.pod(web).run(allow).unwrap();
    assert!(!connects(scene.pod(web), at("127.0.0.1", 7000), SILENCE));
    // The table blocks them.
    scene.node.stop().unwrap();
    let devices: Vec<Element> =
        scene.elements().into_iter().filter(|element| element.set == Set::Devices).collect();
    scene.node.namespace.run(|| nat::change(&devices, [])).unwrap();
    assert!(connects(scene.pod(web), at("127.0.0.1", 7000), PATIENCE));
    scene.node.start().unwrap();
    assert!(!connects(scene.pod(web), at("127.0.0.1", 7000), SILENCE));
    let pod = scene.pods.remove(web);
    scene.node.del(&pod).success();
    assert_eq!(scene.node.namespace.run(|| std::fs::read_to_string(setting)).unwrap(), "0\n");
    scene.end();
}

#[test]
fn a_port_that_another_pod_has_is_refused_by_its_name() {
    let mut scene = Scene::new(Links::Bridge, &["first", "second"]);
    let (first, _) = scene.add("first", &json!([tcp(8080, 80)]));
    let second = Pod::new("second").unwrap();
    let before = scene.elements();
    let message = "attach eth0 (kube-system/default): masquerade the pod and open ports of the node: \
                   hostPort 8080/tcp (IPv4) is taken: pod shop/first, container c-first, interface eth0 has it";
    let at_one = json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": NODE[0]}]);
    assert_eq!(scene.ask(&second, &json!([tcp(8080, 80)])).failure(), (11, message.to_owned()));
    let message = message.replace(" (IPv4)", " of 192.0.2.1");
    assert_eq!(scene.ask(&second, &at_one).failure(), (11, message));
    assert_eq!(scene.elements(), before);
    // An agent that starts knows the holder of the port.
    scene.node.kill().unwrap();
    scene.node.start().unwrap();
    assert_eq!(scene.ask(&second, &at_one).failure().0, 11);
    let pod = scene.pods.remove(first);
    scene.node.del(&pod).success();
    drop(second);
    scene.add("second", &json!([tcp(8080, 80)]));
    scene.end();
}

/// A sender that continues to send keeps its connection, which would lead to the removed pod.
#[test]
fn datagrams_reach_the_pod_that_has_the_port_now() {
    let mut scene = Scene::new(Links::Bridge, &["first", "second"]);
    let port = json!([{"hostPort": 5353, "containerPort": 53, "protocol": "udp"}]);
    for family in [0, 1] {
        let by = at(NODE[family], 5353);
        let local = if family == 0 { "0.0.0.0:0" } else { "[::]:0" };
        let sender = scene.outside.run(|| UdpSocket::bind(local)).unwrap();
        sender.connect(by).unwrap();
        sender.set_nonblocking(true).unwrap();
        let answered = || {
            // Refused while no pod has the port.
            let _ = sender.send(b"ping");
            std::thread::sleep(std::time::Duration::from_millis(20));
            sender.recv(&mut [0; 8]).is_ok()
        };
        assert!(!answered());
        for name in ["first", "second"] {
            let (number, addresses) = scene.add(name, &port);
            let echo = Echo::serve(scene.pod(number), SocketAddr::new(addresses[family], 53)).unwrap();
            assert!(eventually(PATIENCE, answered), "{name}, {by}");
            let pod = scene.pods.remove(number);
            scene.node.del(&pod).success();
            drop(echo);
        }
    }
    scene.end();
}

/// A socket for whole segments of SCTP, since a kernel may track and translate a protocol that it does not implement.
fn raw_sctp(namespace: &Namespace, family: usize) -> OwnedFd {
    let family = [AddressFamily::INET, AddressFamily::INET6][family];
    let socket = namespace.run(|| rustix::net::socket(family, SocketType::RAW, Some(ipproto::SCTP))).unwrap();
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(stretched(SILENCE))).unwrap();
    socket
}

/// A segment of SCTP with one chunk: INIT (1) or INIT ACK (2), RFC 9260.
fn segment(ports: [u16; 2], tag: u32, chunk: u8) -> Vec<u8> {
    let mut bytes = [ports[0].to_be_bytes(), ports[1].to_be_bytes()].concat();
    bytes.extend(tag.to_be_bytes());
    bytes.extend([0; 4]);
    bytes.extend([chunk, 0, 0, 20]);
    // Initiate tag, window, streams out and in, first number.
    for word in [7_u32, 65_536, 1 << 16 | 1, 1] {
        bytes.extend(word.to_be_bytes());
    }
    let mut sum = !0_u32;
    for byte in &bytes {
        sum ^= u32::from(*byte);
        for _ in 0..8 {
            sum = if sum & 1 == 1 { sum >> 1 ^ 0x82f6_3b78 } else { sum >> 1 };
        }
    }
    bytes[8..12].copy_from_slice(&(!sum).to_le_bytes());
    bytes
}

/// The ports of the next segment, sender's first.
fn received(socket: &OwnedFd, family: usize) -> Option<[u16; 2]> {
    let mut buffer = [0; 256];
    let (length, _) = rustix::net::recv(socket, &mut buffer[..], RecvFlags::empty()).ok()?;
    // IPv4 packets include their header.
    let segment = &buffer[if family == 0 { 20 } else { 0 }..length];
    Some([0, 2].map(|at| u16::from_be_bytes([segment[at], segment[at + 1]])))
}

#[test]
fn a_port_of_sctp_leads_to_its_pod_and_back() {
    let mut scene = Scene::new(Links::Routed, &["web"]);
    let (web, addresses) =
        scene.add("web", &json!([{"hostPort": 3868, "containerPort": 68, "protocol": "sctp"}]));
    for family in [0, 1] {
        let (inside, outside) = (raw_sctp(scene.pod(web), family), raw_sctp(&scene.outside, family));
        let send = |from: &OwnedFd, to: IpAddr, bytes: &[u8]| {
            rustix::net::sendto(from, bytes, SendFlags::empty(), &SocketAddr::new(to, 0)).unwrap();
        };
        let node: IpAddr = NODE[family].parse().unwrap();
        let mut seen = None;
        let arrived = eventually(PATIENCE, || {
            send(&outside, node, &segment([4000, 3868], 0, 1));
            seen = received(&inside, family);
            seen.is_some()
        });
        assert!(arrived, "{node}");
        assert_eq!(seen, Some([4000, 68]), "{}", addresses[family]);
        send(&inside, OUTSIDE[family].parse().unwrap(), &segment([68, 4000], 7, 2));
        assert_eq!(received(&outside, family), Some([3868, 4000]), "{node}");
    }
    scene.end();
}
