//! Packets that a pod forwards for a host behind it.

use std::net::{SocketAddr, UdpSocket};

use netattach_tests::Namespace;

use super::*;

/// A host behind the attacker, on a link between `x0` of the attacker and `x1`.
fn behind(scene: &Scene) -> (Namespace, Mac) {
    let inner = Namespace::new().unwrap();
    let task = inner.task();
    attacker_runs(scene, "ip", &format!("link add x0 up type veth peer name x1 netns {task}"));
    attacker_runs(scene, "ip", "addr add 10.77.0.1/24 dev x0");
    let run = |words: &str| ip(&inner, &words.split(' ').collect::<Vec<_>>()).unwrap();
    run("addr add 10.77.0.2/24 dev x1");
    run("link set x1 up");
    run("route add default via 10.77.0.1");
    let mac = netattach_tests::snapshot::Network::of(&inner).unwrap().links["x1"].mac.unwrap();
    (inner, mac)
}

/// Bridging on a macvlan is among the documented limits of macvlans.
///
/// Rows: C87.
#[test]
fn what_the_pod_forwards_or_bridges_is_judged_as_its_own() {
    let scene = Scene::new();
    let (inner, mac) = behind(&scene);
    scene.attacker.namespace.run(|| std::fs::write("/proc/sys/net/ipv4/ip_forward", "1")).unwrap();
    for link in &scene.links() {
        let socket = inner.run(|| UdpSocket::bind("10.77.0.2:0")).unwrap();
        let before = scene.dropped(link.network, "source-ipv4");
        let forwarded = || {
            socket.send_to(b"ping", SocketAddr::new(link.v4[1].parse().unwrap(), ALLOWED)).unwrap();
            scene.dropped(link.network, "source-ipv4") > before
        };
        assert!(eventually(PATIENCE, forwarded), "{}: forwarded", link.network);
        if link.is_macvlan() {
            continue;
        }
        attacker_runs(&scene, "ip", "link add br9 up type bridge");
        for port in [link.device, "x0"] {
            attacker_runs(&scene, "ip", &format!("link set {port} master br9"));
        }
        let own = RawSocket::open(&inner, "x1").unwrap();
        let foreign = link.towards_the_victim(link.v4().from_mac(mac).udp(1001, ALLOWED).frame());
        scene.blocked(link, "bridged from another MAC", &own, &foreign, "source-mac");
        let denied = link.towards_the_victim(link.v4().udp(1002, DENIED).frame());
        scene.blocked(link, "bridged to a denied port", &own, &denied, "egress-port");
        attacker_runs(&scene, "ip", "link del br9");
    }
    // Deleted here, as the kernel delays the removal of the namespace.
    attacker_runs(&scene, "ip", "link del x0");
    drop(inner);
    scene.end();
}
