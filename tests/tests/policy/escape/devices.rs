//! Devices, filters and names that the pod changes.

use std::net::UdpSocket;
use std::os::fd::AsFd;

use netattach::bpf::sys;
use netattach::spec::TcHook;
use netattach_tests::privilege::load_pass_everything;

use super::*;

#[test]
fn devices_and_filters_of_the_pods_own_open_no_way_out() {
    let scene = Scene::new();
    for link in &scene.links() {
        let run = |program: &str, words: &str| attacker_runs(&scene, program, words);
        let device = link.device;
        let denied = |port| {
            let frame = link.towards_the_victim(link.v4().udp(port, DENIED).frame());
            [("a denied port", frame, "egress-port")]
        };

        // Macvlans stacked on the pod's interface: all send through it, and with the wrong address.
        run("ip", &format!("link add link {device} name mv0 up type macvlan mode bridge"));
        run("ip", &format!("link add link mv0 name mv1 address {STRANGER} up type macvlan mode bridge"));
        let from_mv = link.towards_the_victim(link.v4().from_mac(STRANGER).udp(1001, ALLOWED).frame());
        only_the_allowed_arrives(&scene, link, "mv1", &[("macvlan", from_mv, link.strange)], 2001);
        only_the_allowed_arrives(&scene, link, "mv1", &denied(1002), 2002);
        run("ip", "link del mv1");
        run("ip", "link del mv0");

        // A program of the pod's own that ends the chain for every packet before other programs, and no filters at all.
        if link.is_macvlan() {
            // The pod only harms itself by removing the programs that judge copies of group frames for it.
            run("tc", &format!("qdisc del dev {device} clsact"));
        }
        run("tc", &format!("qdisc add dev {device} clsact"));
        for hook in ["ingress", "egress"] {
            let accept = "bpf bytecode 1,6_0_0_4294967295 flowid 1:1";
            run("tc", &format!("filter add dev {device} {hook} prio 1 {accept}"));
        }
        only_the_allowed_arrives(&scene, link, device, &denied(1004), 2004);
        run("tc", &format!("qdisc del dev {device} clsact"));
        only_the_allowed_arrives(&scene, link, device, &denied(1005), 2005);

        // A program that runs before all filters, by a hook of its own, and passes everything.
        let attached = as_attacker(&scene, || {
            let program = load_pass_everything()?;
            let socket = UdpSocket::bind("127.0.0.1:0").or_else(|_| UdpSocket::bind("[::]:0"))?;
            let index = rustix::net::netdevice::name_to_index(&socket, device)?;
            let attach = |direction| Ok(sys::tcx_attach(program.as_fd(), index, direction, None)?);
            [TcHook::Ingress, TcHook::Egress].map(attach).into_iter().collect::<anyhow::Result<Vec<_>>>()
        });
        only_the_allowed_arrives(&scene, link, device, &denied(1007), 2007);
        drop(attached);

        run("ip", &format!("link set {device} down"));
        run("ip", &format!("link set {device} name away up"));
        let renamed = denied(1006);
        let socket = attackers_socket(&scene, "away");
        scene.blocked(link, "renamed", &socket, &renamed[0].1, "egress-port");
        run("ip", "link set away down");
        run("ip", &format!("link set away name {device} up"));
        only_the_allowed_arrives(&scene, link, device, &renamed, 2006);
    }
    scene.end();
}

#[test]
fn a_device_that_the_pod_makes_in_place_of_its_own_leads_nowhere() {
    let scene = Scene::new();
    for link in &scene.links() {
        let victim = RawSocket::open(&scene.victim.namespace, link.device).unwrap();
        let device = link.device;
        ip(&scene.attacker.namespace, &["link", "del", device]).unwrap();
        ip(&scene.attacker.namespace, &["link", "add", device, "up", "type", "veth", "peer", "name", "x0"])
            .unwrap();
        ip(&scene.attacker.namespace, &["link", "set", device, "address", &link.own.to_string()]).unwrap();
        ip(&scene.attacker.namespace, &["link", "set", "x0", "up"]).unwrap();
        let own = RawSocket::open(&scene.attacker.namespace, device).unwrap();
        let other_end = RawSocket::open(&scene.attacker.namespace, "x0").unwrap();
        let frame = link.towards_the_victim(link.v4().udp(1001, ALLOWED).frame());
        let tail = &frame[frame.len() - TAIL..];
        own.send(&frame).unwrap();
        let arrived = |socket: &RawSocket, patience| {
            socket.frames_until(tail, patience).unwrap().iter().any(|seen| seen.ends_with(tail))
        };
        assert!(arrived(&other_end, PATIENCE), "{}: the pod's own end sees it", link.network);
        assert!(!arrived(&victim, SILENCE), "{}", link.network);
        ip(&scene.attacker.namespace, &["link", "del", device]).unwrap();
    }
    scene.end();
}
