//! Segments without a connection: scans, and data by raw sockets.

use std::net::IpAddr;

use netattach_tests::traffic::{connect, exchange};

use super::*;

const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const PSH: u8 = 8;
const ACK: u8 = 16;
const URG: u8 = 32;

/// TCP flags of segments that do not open a connection.
const SAID: [(&str, u8); 9] = [
    ("ACK", ACK),
    ("data", PSH | ACK),
    ("FIN", FIN),
    ("FIN and ACK", FIN | ACK),
    ("nothing (null scan)", 0),
    ("FIN, PSH and URG (xmas scan)", FIN | PSH | URG),
    ("SYN and ACK", SYN | ACK),
    ("RST", RST),
    ("RST and ACK", RST | ACK),
];
/// SCTP: DATA, INIT ACK, ABORT, SHUTDOWN ACK, COOKIE ECHO.
const CHUNKS: [u8; 5] = [0, 2, 6, 8, 10];

/// Every such segment from the attacker to the victim, in both families.
fn segments(link: &Link, source: u16, destination: u16) -> Vec<(String, Vec<u8>)> {
    let families = [("IPv4", link.v4()), ("IPv6", link.v6())];
    let of_family = |(family, packet): (&str, Packet)| {
        let tcp = SAID.map(|(said, flags)| {
            let frame = packet.clone().tcp(source, destination, flags).frame();
            (format!("TCP over {family}: {said}"), link.towards_the_victim(frame))
        });
        let sctp = CHUNKS.map(|chunk| {
            let frame = packet.clone().sctp(source, destination, chunk).frame();
            (format!("SCTP over {family}: chunk {chunk}"), link.towards_the_victim(frame))
        });
        tcp.into_iter().chain(sctp)
    };
    families.into_iter().flat_map(of_family).collect()
}

/// Whether `explain` reports traffic to a TCP port as denied on every path.
fn is_said_to_be_denied(scene: &Scene, from: &str, to: &str, port: u16, leg: &str) -> bool {
    let paths = scene.node.ctl(&["explain", from, to, &port.to_string()]).unwrap();
    let paths = paths.as_array().unwrap();
    !paths.is_empty() && paths.iter().all(|path| path[leg]["verdict"] == "denied")
}

#[test]
fn segments_without_connection_do_not_leave_a_pod_that_may_not_open_one() {
    let scene = Scene::new();
    for (number, link) in scene.links().iter().enumerate() {
        let segments = segments(link, 2000, 443);
        let frames: Vec<_> =
            segments.iter().map(|(what, frame)| (what.as_str(), frame.clone(), "egress-port")).collect();
        only_the_allowed_arrives(&scene, link, link.device, &frames, 2100 + number as u16);
        assert!(is_said_to_be_denied(&scene, link.v4[0], link.v4[1], 443, "egress"));
    }
    scene.end();
}

#[test]
fn segments_without_connection_do_not_reach_a_pod_by_its_rule_for_the_other_direction() {
    const CALLED: u16 = 443;
    let spec = json!({
        "podSelector": {"matchLabels": {"app": "victim"}},
        "policyTypes": ["Ingress", "Egress"],
        "egress": [{"ports": [{"protocol": "TCP", "port": CALLED}, {"protocol": "SCTP", "port": CALLED}]}]
    });
    let scene = Scene::under(&[], "victim", &spec);
    for link in &scene.links() {
        let socket = attackers_socket(&scene, link.device);
        for (what, frame) in segments(link, CALLED, 22) {
            let dropped = || scene.dropped_at("victim", link.network, "ingress-peer");
            let before = dropped();
            socket.send(&frame).unwrap();
            assert!(eventually(PATIENCE, || dropped() > before), "{}: {what} is not dropped", link.network);
        }
        assert!(is_said_to_be_denied(&scene, link.v4[0], link.v4[1], 22, "ingress"));
        // Replies to the victim's own connections come back.
        let server =
            Echo::serve(&scene.attacker.namespace, (link.v4[0].parse::<IpAddr>().unwrap(), CALLED).into());
        let server = server.unwrap();
        let mut connection = connect(&scene.victim.namespace, server.address(), PATIENCE).unwrap();
        exchange(&mut connection, PATIENCE).unwrap();
    }
    scene.end();
}
