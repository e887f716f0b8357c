//! The wire is a port of the pods' bridge.

use netattach_tests::manifest::network_policy;
use netattach_tests::other_programs::{Verdict, attach_filter, attach_tcx, index_of, program, tc};
use netattach_tests::traffic::{SILENCE, connect};

use super::*;

fn scene(settings: &[(&str, Value)]) -> Scene {
    let scene = Scene::new(settings, |config| config);
    scene.node("ip", &format!("link set {WIRE} master br0"));
    scene.outside(&format!("addr add 10.50.0.200/24 dev {FAR}"));
    scene.outside(&format!("addr add fd00:50::c8/64 dev {FAR} nodad"));
    scene
}

/// Replies take the bridge, which knows where the wire is.
const FAST: Ways = Ways { received: EXCHANGES, sent: 0 };

#[test]
fn what_comes_from_the_wire_takes_the_fast_path_and_the_bridge_goes_on_learning() {
    let scene = scene(&[]);
    scene.await_standing("on");
    for family in [0, 1] {
        assert!(scene.answers(family));
        assert_eq!(scene.exchange(family), FAST);
    }
    assert!(scene.left_to_stack("learning") > 0, "the first frame of a station is the bridge's");
    let entries = scene.node.namespace.run(|| Command::new("bridge").args(["fdb", "show"]).output()).unwrap();
    let entries = String::from_utf8(entries.stdout).unwrap();
    let station = netattach_tests::snapshot::Network::of(&scene.outside).unwrap().links[FAR].mac.unwrap();
    let learned = entries.lines().any(|line| line.starts_with(&station.to_string()) && line.contains(WIRE));
    assert!(learned, "{entries}");
    connect(&scene.outside, scene.addresses[0], PATIENCE).unwrap();
    assert_eq!(scene.row("stats")["dropped"], json!({}));
    scene.end();
}

#[test]
fn the_pods_policy_holds_for_what_the_wire_brings() {
    let scene = scene(&[("networkPolicy", json!(true))]);
    let rules = json!({
        "podSelector": {"matchLabels": {"app": "server"}}, "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"ipBlock": {"cidr": "10.50.0.200/32"}}], "ports": [{"protocol": "UDP", "port": 7}]}]
    });
    scene.node.write("rules", &network_policy("rules", &rules)).unwrap();
    let closed = SocketAddr::new(scene.addresses[0].ip(), 8);
    let _echo = Echo::serve(&scene.server.namespace, closed).unwrap();
    scene.await_standing("on");
    let in_force = || !datagram(&scene.outside, closed, SILENCE).unwrap();
    assert!(eventually(PATIENCE, in_force), "the policy is not in force");
    assert!(scene.answers(0));
    assert_eq!(scene.exchange(0), FAST);
    let before = scene.row("stats");
    assert!(!datagram(&scene.outside, closed, SILENCE).unwrap());
    let after = scene.row("stats");
    assert!(after["dropped"]["ingress-port"].as_u64() > before["dropped"]["ingress-port"].as_u64());
    assert_eq!(after["fast"], before["fast"]);
    // Another address of the same station is another peer.
    scene.outside(&format!("addr add 10.50.0.201/24 dev {FAR}"));
    let from = "10.50.0.201".parse().unwrap();
    let passes = netattach_tests::traffic::datagram_from(&scene.outside, from, scene.addresses[0], SILENCE);
    assert!(!passes.unwrap());
    assert!(scene.row("stats")["dropped"]["ingress-peer"].as_u64() > Some(0));
    scene.end();
}

/// A setting of the wire or its bridge that keeps packets off the fast path, and how it is reverted.
struct Obstacle {
    name: &'static str,
    set: (&'static str, &'static str),
    reset: (&'static str, &'static str),
    /// Whether packets arrive meanwhile.
    passes: bool,
}

const OBSTACLES: [Obstacle; 4] = [
    Obstacle {
        name: "port-restricted",
        set: ("bridge", "link set dev wire0 isolated on"),
        reset: ("bridge", "link set dev wire0 isolated off"),
        passes: true,
    },
    Obstacle {
        name: "ageing",
        set: ("ip", "link set br0 type bridge ageing_time 1000"),
        reset: ("ip", "link set br0 type bridge ageing_time 30000"),
        passes: true,
    },
    Obstacle {
        name: "port-state",
        set: ("ip", "link set wire0 down"),
        reset: ("ip", "link set wire0 up"),
        passes: false,
    },
    // The pods are off the fast path, and the wire with them.
    Obstacle {
        name: "",
        set: ("ebtables", "-A FORWARD -p ARP -j ACCEPT"),
        reset: ("ebtables", "-X"),
        passes: true,
    },
];

#[test]
fn whatever_is_between_wire_and_pod_keeps_packets_on_the_bridge_until_it_is_gone() {
    let scene = scene(&[]);
    for Obstacle { name, set, reset, passes } in OBSTACLES {
        scene.await_standing("on");
        assert!(scene.answers(0), "before {name}");
        assert_eq!(scene.exchange(0), FAST, "before {name}");
        scene.node(set.0, set.1);
        scene.await_standing(name);
        if passes {
            assert_eq!(scene.exchange(0), STACK, "{name}");
        }
        if name.is_empty() {
            scene.node("ebtables", "-F");
        }
        scene.node(reset.0, reset.1);
    }
    scene.await_standing("on");
    scene.end();
}

#[test]
fn programs_of_others_on_the_wire_see_what_comes_in() {
    let scene = scene(&[]);
    let (namespace, index) = (&scene.node.namespace, index_of(&scene.node.namespace, WIRE).unwrap());
    scene.await_standing("on");
    // The qdisc exists already where our program is attached by clsact.
    let _ = tc(namespace, &format!("qdisc add dev {WIRE} clsact"));
    attach_filter(namespace, WIRE, true, 2, Verdict::Next).unwrap();
    scene.await_standing("programs");
    assert_eq!(scene.exchange(0), STACK);
    tc(namespace, &format!("filter del dev {WIRE} ingress prio 2")).unwrap();
    scene.await_standing("on");
    let link = attach_tcx(namespace, index, true, &program(Verdict::Next).unwrap()).unwrap();
    scene.await_standing("programs");
    assert_eq!(scene.exchange(0), STACK);
    drop(link);
    scene.await_standing("on");
    // Packets that leave by the wire always meet egress filters.
    attach_filter(namespace, WIRE, false, 2, Verdict::Next).unwrap();
    assert!(scene.answers(0));
    assert_eq!(scene.exchange(0), FAST);
    assert_eq!(scene.standing(), "on");
    // Removing the qdisc makes the wire lose a packet, regardless of the programs.
    tc(namespace, &format!("qdisc del dev {WIRE} clsact")).unwrap();
    assert!(eventually(NOTICED, || scene.runs_by() != [false, false]), "the program is put back");
    assert_eq!(scene.exchange(0), FAST);
    scene.end();
}

#[test]
fn a_network_that_opted_out_has_no_uplink() {
    let scene = Scene::new(&[], |mut config| {
        config["fastPath"] = json!(false);
        config
    });
    scene.node("ip", &format!("link set {WIRE} master br0"));
    scene.outside(&format!("addr add 10.50.0.200/24 dev {FAR}"));
    assert!(scene.answers(0));
    assert_eq!((scene.exchange(0), scene.standing()), (STACK, String::new()));
    scene.end();
}
